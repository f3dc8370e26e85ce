"""Selects parameters by patterns for their paths, or by a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardfn.quoting import short

Which = str | Iterable[str] | Callable[[str, Any], Any]
"""A regular expression that must match the whole path, several of them, or a function `(path, shape) -> bool`."""


@dataclass(frozen=True)
class Chosen:
    """A selection of parameters: those whose whole path matches a pattern, or for which a function returns true."""

    patterns: tuple[re.Pattern[str], ...]
    rule: Callable[[str, Any], Any] | None = None

    def __call__(self, path: str, shape: Any) -> bool:
        """Whether a parameter is selected."""
        return bool(self.matching(path)) if self.rule is None else bool(self.rule(path, shape))

    def matching(self, path: str) -> set[str]:
        """Returns the patterns that match a path."""
        return {pattern.pattern for pattern in self.patterns if pattern.fullmatch(path)}

    def unused(self, paths: Iterable[str]) -> set[str]:
        """Returns the patterns that match none of these paths."""
        return {pattern.pattern for pattern in self.patterns}.difference(*map(self.matching, paths))

    def as_text(self) -> str:
        """Returns the selection as text, for messages."""
        return short(self) or "an empty list"

    def __str__(self) -> str:
        if self.rule is not None:
            return f"the function {getattr(self.rule, '__name__', type(self.rule).__name__)}"
        return ", ".join(pattern.pattern for pattern in self.patterns)


def chosen(which: Which, name: str) -> Chosen:
    """Turns the argument called `name` into a selection.

    Raises:
        TypeError: the argument is neither patterns nor a function.
        ValueError: a pattern is not a regular expression.

    Example:
        >>> chosen([r"blocks\\..*", "head"], "frozen")("blocks.0.w", (4, 4))
        True
        >>> chosen(lambda path, shape: len(shape) == 1, "frozen")("blocks.0.w", (4, 4))
        False
    """
    if callable(which) and not isinstance(which, type):
        return Chosen((), which)
    patterns = [which] if isinstance(which, str) else list(which) if isinstance(which, Iterable) else [which]
    try:
        return Chosen(tuple(re.compile(pattern) for pattern in patterns))  # type: ignore[arg-type]
    except re.error as error:
        raise ValueError(f"{name}: {error.pattern!r} is not a regular expression: {error}") from None
    except TypeError:
        raise TypeError(
            f"{name} says which parameters: a regular expression for their whole paths, several of them, or a function "
            f"of a path and a shape; not {str(which)[:60]!r} of type {type(which).__name__}"
        ) from None
