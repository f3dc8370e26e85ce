"""What a key may mean, and how the settings of a file are looked up in a table of meanings.

A table is a dict from keys to meanings, and there is one for each system. `apply` goes through it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardfn.translate.draft import Draft
from shardfn.translate.facts import Source, Status, TranslateError
from shardfn.translate.values import is_open, on, shown, word


@dataclass(frozen=True)
class Meaning:
    """What one key means, whatever its value, or by its value.

    Attributes:
        status, text: of its row.
        facts: what it says; a function is called with the key and the value.
        harmless: values, as words, for which a `missing` key changes nothing.
        name: where the value is not in the file, the name that stands for it in the program; `"about"` says what it is.
    """

    status: Status
    text: str
    facts: Mapping[str, Any]
    harmless: tuple[str, ...] = ()
    name: str | None = None
    about: str = ""


@dataclass(frozen=True)
class By:
    """A meaning for each value, by words in capitals."""

    choices: Mapping[str, Meaning]
    otherwise: Meaning | None = None


@dataclass(frozen=True)
class Section:
    """Keys below a key. `switch` is the one that turns the section on."""

    table: Table
    switch: str | None = None


@dataclass(frozen=True)
class Whole:
    """A key that a function of the draft, the key and the value takes care of."""

    read: Callable[[Draft, str, Any], None]


Table = Mapping[str, Meaning | By | Section | Whole]


def always(text: str) -> Meaning:
    """Nothing to set: it is so."""
    return Meaning("always", text, {})


def yours(text: str) -> Meaning:
    """Around the program, and no part of its results."""
    return Meaning("yours", text, {})


def missing(text: str, *harmless: str) -> Meaning:
    """No counterpart, unless the value is one of those that change nothing."""
    return Meaning("missing", text, {}, tuple(one.upper() for one in harmless))


def sets(text: str, *, name: str | None = None, about: str = "", **facts: Any) -> Meaning:
    """Becomes lines, by facts."""
    return Meaning("becomes", text, facts, (), name, about)


def flag(yes: Meaning, no: Meaning) -> By:
    """By true and false."""
    off = ("FALSE", "NO", "NONE", "0")
    return By({**dict.fromkeys(("TRUE", "YES", "1"), yes), **dict.fromkeys(off, no)})


def apply(draft: Draft, settings: Mapping[str, Any], table: Table, prefix: str = "", owner: str = "") -> None:
    """Looks up each setting.

    Raises:
        TranslateError: a value that its key cannot have, or two that contradict each other.
    """
    for name, value in settings.items():
        key = f"{prefix}{name}"
        meaning = table.get(str(name))
        if meaning is None and isinstance(value, Source) and not str(name).isidentifier():
            draft.row(key, value, "open", "what it says is not in the file, or not where it is read")
        elif meaning is None:
            draft.row(key, value, "unknown", _unknown(str(name), table, owner))
        elif isinstance(meaning, Section):
            _section(draft, key, value, meaning, owner)
        elif isinstance(meaning, Whole):
            meaning.read(draft, key, value)
        else:
            meant(draft, key, value, meaning)


def meant(draft: Draft, key: str, value: Any, meaning: Meaning | By) -> None:
    """Adds the row and the facts of one key."""
    if isinstance(meaning, By):
        found = meaning.choices.get(word(value), meaning.otherwise)
        if found is None:
            if is_open(value):
                draft.row(key, value, "open", f"its value is not in the file; it is {_listed(meaning)}")
                return
            raise TranslateError(f"{key}: {shown(value)} is not one of {_listed(meaning)}")
        meaning = found
    if meaning.status == "missing" and word(value) in meaning.harmless:
        draft.row(key, value, "always", "so here as well")
    elif meaning.status == "becomes" and is_open(value) and any(map(callable, meaning.facts.values())):
        _open(draft, key, value, meaning)
    else:
        for fact, said in meaning.facts.items():
            made = said(key, value) if callable(said) else said
            if made is not None:
                draft.say(fact, made, key)
        draft.row(key, value, meaning.status, meaning.text.replace("{value}", shown(value)))


def _open(draft: Draft, key: str, value: Any, meaning: Meaning) -> None:
    why = "its value is not in the file"
    if meaning.name is None:
        draft.row(key, value, "open", f"{why}; with one it is {meaning.text}")
        return
    for fact in meaning.facts:
        draft.say(fact, draft.name(meaning.name, meaning.about or key), key)
    draft.row(key, value, "open", f"{why}: the program has the name {meaning.name} for it; {meaning.text}")


def _section(draft: Draft, key: str, value: Any, section: Section, owner: str) -> None:
    if value is None or value == {}:
        return
    if not isinstance(value, Mapping):
        if is_open(value):
            draft.row(key, value, "open", "its value is not in the file; it is a mapping of keys")
            return
        raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
    switch = value.get(section.switch) if section.switch else True
    if section.switch and not is_open(switch) and not on(f"{key}.{section.switch}", switch):
        for name, one in value.items():
            if name in section.table:
                draft.row(f"{key}.{name}", one, "always", "switched off, as without it")
            else:
                draft.row(f"{key}.{name}", one, "unknown", _unknown(str(name), section.table, owner))
        return
    apply(draft, value, section.table, f"{key}.", owner)


def _listed(meaning: By) -> str:
    return ", ".join(meaning.choices)


def _unknown(name: str, table: Table, owner: str) -> str:
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    whose = f" of {owner}" if owner else ""
    return f"no key{whose} that is known here" + (f"; the closest is {near[0]}" if near else "")


def strangers(draft: Draft, key: str, given: Mapping[str, Any], known: str) -> None:
    """A row for each argument that is none of these words."""
    for name, one in given.items():
        if name not in known.split():
            draft.row(f"{key}.{name}", one, "unknown", "no argument that is known here")
