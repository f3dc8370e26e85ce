"""Which parameters are meant: said by patterns for their paths, or by a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardfn.quoting import short

Which = str | Iterable[str] | Callable[[str, Any], Any]
"""A regular expression that matches whole paths, several of them, or a function `(path, shape) -> whether`."""


@dataclass(frozen=True)
class Chosen:
    """Parameters that are meant: those of which a pattern matches the whole path, or of which a function says so."""

    patterns: tuple[re.Pattern[str], ...]
    rule: Callable[[str, Any], Any] | None = None

    def __call__(self, path: str, shape: Any) -> bool:
        """Whether a parameter is one of them."""
        return bool(self.matching(path)) if self.rule is None else bool(self.rule(path, shape))

    def matching(self, path: str) -> set[str]:
        """The patterns that match a path."""
        return {one.pattern for one in self.patterns if one.fullmatch(path)}

    def unused(self, paths: Iterable[str]) -> set[str]:
        """The patterns that match none of these paths."""
        return {one.pattern for one in self.patterns}.difference(*map(self.matching, paths))

    def said(self) -> str:
        """What chooses; for messages."""
        return short(self) or "an empty list"

    def __str__(self) -> str:
        if self.rule is not None:
            return f"the function {getattr(self.rule, '__name__', type(self.rule).__name__)}"
        return ", ".join(one.pattern for one in self.patterns)


def chosen(which: Which, name: str) -> Chosen:
    """What an argument of this name chooses.

    Raises:
        TypeError: it is neither patterns nor a function.
        ValueError: a pattern that is not a regular expression.

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
        return Chosen(tuple(re.compile(one) for one in patterns))  # type: ignore[arg-type]
    except re.error as error:
        raise ValueError(f"{name}: {error.pattern!r} is not a regular expression: {error}") from None
    except TypeError:
        raise TypeError(
            f"{name} says which parameters: a regular expression for their whole paths, several of them, or a function "
            f"of a path and a shape; not {str(which)[:60]!r} of type {type(which).__name__}"
        ) from None
