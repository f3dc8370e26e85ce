"""Parametrisations of torch's, whose results it can keep from one call to the next, and which write to parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.nn.utils import parametrize


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Inside the block parametrised weights are computed at each use, as outside of `parametrize.cached()`.

    What is parametrised there is not set to itself, which changes no number, and is a write to those who count these.
    """
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    setting = parametrize._maybe_set

    def unless_itself(dest: Tensor, src: Tensor) -> None:
        if dest is not src:
            setting(dest, src)

    parametrize._maybe_set = unless_itself
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._maybe_set = before, setting
