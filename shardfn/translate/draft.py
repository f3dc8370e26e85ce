"""What is known so far of a program: facts, each with the keys that said it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfn.quoting import listed
from shardfn.translate.facts import Call, Row, Status, TranslateError
from shardfn.translate.values import is_open, shown


class Name(str):
    """Code for a value that is not in the file: a name that the reader defines."""


class Draft:
    """What is known so far of a program: facts by name with the keys that said them, rows, and names to define."""

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
            before = ", ".join(self.of(fact)) or "the default"
            raise TranslateError(
                f"{listed(keys)} and {before} contradict each other: {shown(value)} and {shown(self.facts[fact])}"
            )
        self.put(fact, value, *keys)

    def put(self, fact: str, value: Any, *keys: str) -> None:
        """Sets a fact, whatever was said before; the keys that said it stay beside these."""
        self.facts[fact] = value
        self.keys[fact] = tuple(dict.fromkeys((*self.of(fact), *keys)))

    def row(self, key: str, value: Any, status: Status, text: str) -> None:
        """Adds a row."""
        self.rows.append(Row(key, shown(value), status, text))

    def open(self, key: str, value: Any, then: str = "") -> None:
        """Adds the row of a key whose value is not in the file, and says what it would be."""
        self.row(key, value, "open", "its value is not in the file" + (f"; {then}" if then else ""))

    def named(self, key: str, value: Any, name: str, about: str, then: str = "") -> Name:
        """Adds the row of a key whose value is not in the file, and a name that stands for it in the program."""
        said = f"its value is not in the file: the program has the name {name} for it"
        self.row(key, value, "open", f"{said}; {then}" if then else said)
        return self.name(name, about)

    def strangers(self, key: str, given: Mapping[str, Any], known: str) -> None:
        """Adds a row for each argument that is none of these words."""
        for name, one in given.items():
            if name not in known.split():
                self.row(f"{key}.{name}", one, "unknown", "no argument that is known here")

    def settings(self, key: str, value: Any) -> dict[str, Any] | None:
        """What a mapping, or a call, holds; None where there is nothing, or it is not in the file.

        Raises:
            TranslateError: it is neither.
        """
        value = value.arguments if isinstance(value, Call) else value
        if isinstance(value, Mapping):
            return dict(value)
        if is_open(value):
            self.open(key, value, "it is a mapping of keys")
        elif value is not None:
            raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
        return None

    def name(self, name: str, about: str) -> Name:
        """A name that the reader of the program defines."""
        self.names[name] = about
        return Name(name)

    def get(self, fact: str, default: Any = None) -> Any:
        """A fact, or the default."""
        return self.facts.get(fact, default)

    def of(self, *facts: str) -> tuple[str, ...]:
        """The keys that said any of these."""
        return tuple(dict.fromkeys(key for fact in facts for key in self.keys.get(fact, ())))
