"""The caller's warning filters, carried to another process: what is an error here is an error there."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Filter = tuple[str, str, str, str, int]


def current() -> list[Filter]:
    """This process's filters as plain values, first match first."""

    def text(pattern: Any) -> str:
        return getattr(pattern, "pattern", pattern) or ""

    def name(kind: Any) -> str:
        return f"{kind.__module__}:{kind.__qualname__}"

    return [(action, text(msg), name(kind), text(mod), line) for action, msg, kind, mod, line in warnings.filters]


@contextmanager
def applied(filters: Sequence[Filter]) -> Iterator[None]:
    """Applies these filters in the block. Not for threads: filters belong to the process."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, kind, module, line in reversed(filters):
            if category := _category(kind):
                warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]
        yield


def _category(kind: str) -> type[Warning] | None:
    # A class whose module was never imported here cannot be warned with here.
    module, _, name = kind.partition(":")
    category: Any = sys.modules.get(module)
    for part in name.split("."):
        category = getattr(category, part, None)
    return category if isinstance(category, type) and issubclass(category, Warning) else None
