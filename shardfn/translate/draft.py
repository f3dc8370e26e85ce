"""What is known so far of a program: facts, each with the keys that said it."""

from __future__ import annotations

from typing import Any

from shardfn.quoting import listed
from shardfn.translate.facts import Row, Status, TranslateError
from shardfn.translate.values import shown


class Name(str):
    """Code for a value that is not in the file: a name that the reader defines."""


class Draft:
    """Facts by name, rows in order, and the names that the reader of the program defines."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.keys: dict[str, tuple[str, ...]] = {}
        self.rows: list[Row] = []
        self.names: dict[str, str] = {}

    def say(self, fact: str, value: Any, *keys: str) -> None:
        """Adds a fact.

        Raises:
            TranslateError: another key says something else.
        """
        if fact in self.facts and self.facts[fact] != value:
            before = ", ".join(self.keys[fact]) or "the default"
            raise TranslateError(
                f"{listed(keys)} and {before} contradict each other: {shown(value)} and {shown(self.facts[fact])}"
            )
        self.facts[fact] = value
        self.keys[fact] = tuple(dict.fromkeys((*self.keys.get(fact, ()), *keys)))

    def row(self, key: str, value: Any, status: Status, text: str) -> None:
        """Adds a row."""
        self.rows.append(Row(key, shown(value), status, text))

    def name(self, name: str, about: str) -> Name:
        """A name that the reader defines."""
        self.names[name] = about
        return Name(name)

    def get(self, fact: str, default: Any = None) -> Any:
        """A fact, or the default."""
        return self.facts.get(fact, default)

    def of(self, *facts: str) -> tuple[str, ...]:
        """The keys that said any of these."""
        return tuple(dict.fromkeys(key for fact in facts for key in self.keys.get(fact, ())))
