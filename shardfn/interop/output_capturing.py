"""What hooks of `transformers` record inside a layer, attentions and router logits, leaves its stage as an output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

HOOKS = "transformers.utils.output_capturing"
"""The module of `transformers` that has these hooks."""


def _collector() -> Any:
    """Where `transformers` says what is being recorded; None where it is not loaded, or has no such thing."""
    module = sys.modules.get(HOOKS)
    return getattr(module, "_active_collector", None)


def wanted() -> tuple[str, ...]:
    """What is being recorded now; a stage may run again when nothing is, so it gets this as an argument."""
    collector = _collector()
    active = collector.get() if collector is not None else None
    return tuple(key for key in (active or ()) if not key.startswith("_"))


@contextlib.contextmanager
def recording(keys: tuple[str, ...]) -> Iterator[dict[str, list[Any]]]:
    """Gives what is recorded inside the block, by key."""
    inner: dict[str, list[Any]] = {key: [] for key in keys}
    collector = _collector()
    if not keys or collector is None:
        yield inner
        return
    token = collector.set(inner)
    try:
        yield inner
    finally:
        collector.reset(token)


def hand_on(recorded: Mapping[str, list[Any]]) -> None:
    """Adds what a stage recorded to what is being recorded."""
    for key, values in recorded.items():
        if values:
            _collector().get()[key].extend(values)
