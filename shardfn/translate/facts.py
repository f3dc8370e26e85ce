"""What a translation is made of: rows, one for each key, and lines of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardfn.quoting import bounded

Status = Literal["becomes", "always", "yours", "missing", "open", "unknown"]
UNTRANSLATED: tuple[Status, ...] = ("missing", "open", "unknown")


class TranslateError(ValueError):
    """What cannot be read, or contradicts itself."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


@dataclass(frozen=True)
class Source:
    """A Python expression that is no literal, as it is written."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call in a Python file: the last part of its name, and its arguments."""

    name: str
    line: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One key: what it says, and what becomes of it.

    Attributes:
        key: its path in the file, `"zero_optimization.stage"`.
        value: what the file says, as text.
        status: `"becomes"` lines of the program; `"always"` so, with nothing to set; `"yours"`, of what is around the
            program and does not change its results; `"missing"`, which has no counterpart and changes results or
            memory; `"open"`, whose value is not in the file; `"unknown"`, which is no key of that system.
        text: what it becomes, or why it has no meaning.
    """

    key: str
    value: str
    status: Status
    text: str


@dataclass(frozen=True)
class Translation:
    """What `translate` finds.

    Attributes:
        path: of the file.
        system: whose configuration it is.
        rows: one for each key, in the order of the file.
        program: the lines of shardfn, a Python program fragment.
        names: what the fragment needs from you, and what each of them is.
    """

    path: str
    system: str
    rows: tuple[Row, ...]
    program: str
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all that changes results or memory is translated."""
        return all(row.status not in UNTRANSLATED for row in self.rows)
