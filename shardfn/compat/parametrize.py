"""Torch's parametrizations, which can cache results between calls, and which write to parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.nn.utils import parametrize


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """A context in which parametrized weights are computed at each use, as outside of `parametrize.cached()`.

    It also skips setting a parametrized tensor to itself, which changes no number but counts as a write.
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
