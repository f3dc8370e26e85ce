"""Meanings of keys, and how a file's settings, or a call's arguments, are read by a table of meanings.

Each system has tables: dicts from names of keys to meanings. Only `read` goes through them. What depends on several
keys is in their section: which are read first, and what is done before and after.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardfn.translate.draft import Status, TranslationBuilder
from shardfn.translate.values import SourceCall, SourceExpression, TranslateError, as_switch, is_open, shown, spellings


@dataclass(frozen=True)
class Meaning:
    """The meaning of one key, whatever its value.

    Attributes:
        status, text: of its row.
        facts: the facts that it says; a function is called with the key and the value, and returns None for no fact.
        harmless: values, as words, for which a `missing` key changes nothing.
        off: text of the row if no fact is said; default: "as without it".
        name: if the value is not in the file, the name that stands for it in the program.
        about: the description of that name.
        lax: if the value is not in the file, the translation is complete without it.
    """

    status: Status
    text: str
    facts: Mapping[str, Any]
    harmless: tuple[str, ...] = ()
    off: str | None = None
    name: str | None = None
    about: str = ""
    lax: bool = False


@dataclass(frozen=True)
class By:
    """A meaning for each value, by words as that system spells them, or by the name of a call, as `CPUOffload()`.

    Attributes:
        choices: meanings by value.
        otherwise: the meaning of other values and calls; None: they are errors.
        said: what a message calls the choices, also where the value is not in the file.
    """

    choices: Mapping[str, Meaning | Section | Reader]
    otherwise: Meaning | Section | Reader | None = None
    said: str = ""


Reader = Callable[[TranslationBuilder, str, Any], None]
"""A key that is read by a function of the draft, the key and the value."""
Table = Mapping[str, "Meaning | By | Section | Reader"]


@dataclass(frozen=True)
class Section:
    """Keys below a key, or the arguments of a call.

    Attributes:
        table: their meanings.
        owner: whose keys they are, for messages.
        switch: the key that turns the section on, if there is one.
        itself: the meaning of the call itself, besides those of its arguments.
        kind, cut: the kind of strategy that it is, and how it cuts unless a key says so.
        first, last: names of the keys that are read before, or after, the others, separated by spaces.
        before: called with the draft, the prefix of keys and the settings; it may take some out, which are not read.
        after: called with the same arguments, once they have been read.
    """

    table: Table
    owner: str = ""
    switch: str | None = None
    itself: Meaning | None = None
    kind: str | None = None
    cut: str | None = None
    first: str = ""
    last: str = ""
    before: Callable[[TranslationBuilder, str, dict[str, Any]], None] | None = None
    after: Callable[[TranslationBuilder, str, dict[str, Any]], None] | None = None


def always(text: str) -> Meaning:
    """A meaning: shardfn always does so, with nothing to set."""
    return Meaning("always", text, {})


def yours(text: str, **facts: Any) -> Meaning:
    """A meaning: outside the program, without effect on its results; with facts, it becomes lines."""
    return Meaning("becomes" if facts else "yours", text, facts, lax=True)


def missing(text: str, *harmless: str) -> Meaning:
    """A meaning: no counterpart, unless the value is one of those that change nothing."""
    return Meaning("missing", text, {}, tuple(value.upper() for value in harmless))


def unsaid(text: str) -> Meaning:
    """A meaning: the value leaves open what is wanted."""
    return Meaning("open", text, {})


def sets(text: str, *, off: str | None = None, name: str | None = None, about: str = "", **facts: Any) -> Meaning:
    """A meaning: it becomes lines, by facts."""
    return Meaning("becomes", text, facts, (), off, name, about)


def flag(if_true: Meaning | Section | Reader, if_false: Meaning | Section | Reader) -> By:
    """The meanings of true and false."""
    return By({**same_for("true yes 1", if_true), **same_for("false no none 0", if_false)}, said="true or false")


def same_for(names: str, meaning: Any) -> dict[str, Any]:
    """The same meaning for several keys or values, separated by spaces."""
    return dict.fromkeys(names.split(), meaning)


def read(draft: TranslationBuilder, key: str, value: Any, section: Section) -> None:
    """Reads each setting of a section; `key` is empty for a file or a call.

    Raises:
        TranslateError: a key cannot have its value, or two contradict each other.
    """
    switch = section.switch
    settings = draft.settings(key, {switch: value} if switch and isinstance(value, bool) else value)
    if settings is None:
        return
    prefix = f"{key}." if key else ""
    if section.kind:
        draft.put("kind", section.kind)
    if section.itself and isinstance(value, SourceCall):
        meant(draft, key, value, section.itself)
    is_on = True
    if switch and is_open(settings.get(switch)):
        draft.open(f"{prefix}{switch}", settings.pop(switch), "the rest is as if it were off")
        is_on = False
    elif switch:
        is_on = as_switch(f"{prefix}{switch}", settings.get(switch))
    if not is_on:
        section = Section(same_for(" ".join(section.table), always("switched off, as without it")), section.owner)
    if section.before:
        section.before(draft, prefix, settings)
    first, last = section.first.split(), section.last.split()
    for name in dict.fromkeys([*first, *(name for name in settings if name not in last), *last]):
        if name not in settings:
            continue
        setting, meaning = settings[name], section.table.get(str(name))
        if meaning is not None:
            meant(draft, f"{prefix}{name}", setting, meaning)
        elif isinstance(setting, SourceExpression) and not str(name).isidentifier():
            draft.row(f"{prefix}{name}", setting, "open", "what it says is not in the file, or not where it is read")
        else:
            near = difflib.get_close_matches(str(name), section.table, n=1, cutoff=0.5)
            text = f"no key{f' of {section.owner}' if section.owner else ''} that is known here"
            draft.row(f"{prefix}{name}", setting, "unknown", text + (f"; the closest is {near[0]}" if near else ""))
    if section.cut:
        draft.facts.setdefault("cut", section.cut)
    if section.after:
        section.after(draft, prefix, settings)


def meant(draft: TranslationBuilder, key: str, value: Any, meaning: Meaning | By | Section | Reader) -> None:
    """Adds the row and the facts of one key, or of each key below it."""
    if isinstance(meaning, Section):
        if value in (None, {}) or (isinstance(value, SourceCall) and not value.arguments and not meaning.itself):
            draft.row(key, value, "always", "it says nothing")
        read(draft, key, value, meaning)
    elif isinstance(meaning, By):
        _by(draft, key, value, meaning)
    elif callable(meaning):
        meaning(draft, key, value)
    elif meaning.status == "missing" and set(spellings(value)) & set(meaning.harmless):
        draft.row(key, value, "always", "so here as well")
    elif meaning.status == "becomes" and is_open(value) and any(map(callable, meaning.facts.values())):
        text = meaning.text.replace("{value}", "...")
        if meaning.lax:
            draft.row(key, value, "yours", text)
        elif meaning.name is None:
            draft.open(key, value, f"with one it is {text}")
        else:
            note = f"its value is not in the file: the program has the name {meaning.name} for it; {text}"
            draft.row(key, value, "open", note)
            for fact in meaning.facts:
                draft.say(fact, draft.name(meaning.name, meaning.about or key), key)
    else:
        facts = {fact: x(key, value) if callable(x) else x for fact, x in meaning.facts.items()}
        for fact, x in facts.items():
            if x is not None:
                draft.say(fact, x, key)
        status, text = meaning.status, meaning.text.replace("{value}", shown(value))
        if facts and all(x is None for x in facts.values()):
            status, text = ("yours", text) if meaning.lax else ("always", meaning.off or "as without it")
        draft.row(key, value, status, text)


def _by(draft: TranslationBuilder, key: str, value: Any, meaning: By) -> None:
    spelled = {choice.upper(): match for choice, match in meaning.choices.items()}
    words = (f"{value.name.upper()}()",) if isinstance(value, SourceCall) else spellings(value)
    match = next((spelled[spelling] for spelling in words if spelling in spelled), None)
    choices_text = meaning.said or f"one of {', '.join(meaning.choices)}"
    if match is None and is_open(value) and (meaning.said or meaning.otherwise is None):
        draft.open(key, value, f"it is {choices_text}")
        return
    chosen = match or meaning.otherwise
    if chosen is None:
        raise TranslateError(f"{key}: {shown(value)} is not {choices_text}")
    meant(draft, key, value, chosen)
