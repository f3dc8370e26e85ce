"""Returns what hooks of `transformers` record in a layer, attentions and router logits, as an output of its stage."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

HOOKS = "transformers.utils.output_capturing"
"""The module of `transformers` that has these hooks."""


def _collector() -> Any:
    """The context variable of `transformers` for what is being recorded; None if it is not loaded, or lacks it."""
    module = sys.modules.get(HOOKS)
    return getattr(module, "_active_collector", None)


def requested_names() -> tuple[str, ...]:
    """The keys being recorded; an argument of a stage, since it may run again when nothing is recorded."""
    collector = _collector()
    active = collector.get() if collector is not None else None
    return tuple(key for key in (active or ()) if not key.startswith("_"))


@contextlib.contextmanager
def recording(keys: tuple[str, ...]) -> Iterator[dict[str, list[Any]]]:
    """A context that yields what is recorded inside its block, by key."""
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
    """Adds what a stage recorded to the recording around it."""
    for key, values in recorded.items():
        if values:
            _collector().get()[key].extend(values)
