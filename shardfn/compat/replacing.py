"""Attributes that are others for a while: of modules of torch, and of what each thread has for itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize


@contextlib.contextmanager
def replaced(place: Any, **replacements: Any) -> Iterator[None]:
    """A context in which these attributes of an object or a module are others."""
    before = {name: getattr(place, name) for name in replacements}
    for name, other in replacements.items():
        setattr(place, name, other)
    try:
        yield
    finally:
        for name, plain in before.items():
            setattr(place, name, plain)


def without_parametrize_cache() -> Any:
    """A context in which parametrized weights are computed at each use, as outside of `parametrize.cached()`.

    It also skips setting a parametrized tensor to itself, which changes no number but counts as a write.
    """
    setting = parametrize._maybe_set

    def unless_itself(dest: Tensor, src: Tensor) -> None:
        if dest is not src:
            setting(dest, src)

    return replaced(parametrize, _cache_enabled=0, _maybe_set=unless_itself)


def taken_for_real() -> Any:
    """A context in which transformers takes fake tensors for ordinary ones.

    It asks, and then reads no numbers and makes the attention masks that a run leaves out.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    asks = hasattr(module, "is_fake_tensor")
    return replaced(module, is_fake_tensor=lambda x: False) if asks else contextlib.nullcontext()
