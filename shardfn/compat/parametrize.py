"""Parametrisations of torch's, whose results it can keep from one call to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.nn.utils import parametrize


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Inside the block parametrised weights are computed at each use, as outside of `parametrize.cached()`."""
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before
