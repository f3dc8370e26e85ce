"""What of a tree is called what in files, by rules, and how the one and the others differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardfn.checkpoint.boxes import Box, Ints
from shardfn.checkpoint.contents import Contents, Kind, LocalBox
from shardfn.checkpoint.manifest import Entries
from shardfn.checkpoint.team import CheckpointError, Team
from shardfn.mesh.spec import joined
from shardfn.quoting import findings, listed, short

Rule = tuple[str, str] | tuple[str, str, str]
"""`(regular expression, template)`, or these and `"T"`: a name of ours that the first matches becomes the second."""


class Name(NamedTuple):
    """What something is called there, and whether its last two dimensions are swapped."""

    theirs: str
    turned: bool = False

    def box(self, local: LocalBox) -> LocalBox:
        """A box of a tensor of ours as one of the tensor there."""
        box = Box(turned(local.box.offsets, self.turned), turned(local.box.sizes, self.turned))
        return LocalBox(self.theirs, box, local.values.mT if self.turned else local.values)


def renamed(names: Iterable[str], rules: Iterable[Rule]) -> dict[str, Name]:
    """What each of our names is there: what the first rule that matches it makes of it, or the same.

    Raises:
        CheckpointError: a rule that is none, or matches nothing; two of ours that are called the same there.
    """
    names = list(names)
    parsed = _parsed(list(rules), names)
    found: dict[str, Name] = {}
    owners: dict[str, str] = {}
    for name in names:
        there = Name(name)
        for pattern, template, swap in parsed:
            if match := pattern.fullmatch(name):
                there = Name(match.expand(template), swap)
                break
        if (owner := owners.setdefault(there.theirs, name)) != name:
            raise CheckpointError(f"{owner} and {name} are both {there.theirs!r} there: each needs its own name")
        found[name] = there
    return found


def turned(numbers: Ints, swap: bool) -> Ints:
    """Sizes, or offsets, of which the last two are swapped."""
    return (*numbers[:-2], numbers[-1], numbers[-2]) if swap else numbers


def refuse_flat(name: str, kind: Kind | None) -> None:
    """Raises CheckpointError for a tensor, or a number, that has no two dimensions to swap."""
    if kind is None or len(kind.shape) < 2:
        what = kind or "a number or string"
        raise CheckpointError(f'a rule with "T" matches {name}, but of {what} there are no two dimensions to swap')


def part_with(names: Sequence[str], there: Iterable[str]) -> str:
    """The part of a file under which all of these names are, so that a message may say it; "" if there is none."""
    every, first = set(there), next(iter(names), None)
    if first is None:
        return ""
    parts = (name.removesuffix(f".{first}") for name in every if name.endswith(f".{first}"))
    return next((part for part in sorted(parts, key=len) if all(joined(part, one) in every for one in names)), "")


def _parsed(rules: Sequence[Rule], names: Sequence[str]) -> list[tuple[re.Pattern[str], str, bool]]:
    """The rules, each of which must match something."""
    for rule in rules:
        if isinstance(rule, str) or len(rule) not in (2, 3) or tuple(rule[2:]) not in ((), ("T",)):
            raise CheckpointError(f'a rule is (regular expression, template), or these and "T", not {rule!r}')
    parsed = [(re.compile(rule[0]), rule[1], len(rule) == 3) for rule in rules]
    idle = [repr(pattern.pattern) for pattern, *_ in parsed if not any(map(pattern.fullmatch, names))]
    if idle:
        raise CheckpointError(f"no parameter matches {listed(idle)}; the first of them are {listed(names)}")
    return parsed


# --- what differs ---


_ROOM = 300  # characters for each kind of difference in a message


@dataclass
class Differences:
    """How a checkpoint and a tree differ, by name.

    Attributes:
        missing: names wanted by the tree that are not in the checkpoint.
        extra: in the checkpoint, not wanted.
        shapes: in both, of other shapes: `(checkpoint's, tree's)`.
        kinds: in both, of other dtypes or types.
        formats: in both, in other few bits.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[str, str]] = field(default_factory=dict)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)
    formats: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes or self.kinds or self.formats)

    def __str__(self) -> str:
        sentences = []
        if self.missing:
            sentences.append(f"missing in the checkpoint: {listed(self.missing, room=_ROOM)}")
        if self.extra:
            sentences.append(f"in the checkpoint, but not in the tree: {listed(self.extra, room=_ROOM)}")
        for what, found in (("shape", self.shapes), ("kind", self.kinds), ("format", self.formats)):
            each = [f"{name} is {theirs} there, {ours} in the tree" for name, (theirs, ours) in found.items()]
            if each:
                sentences.append(f"of another {what}: {listed(each, room=_ROOM)}")
        return findings(sentences) or "nothing differs"


Naming = Callable[[Contents], dict[str, Name]]


@dataclass(frozen=True)
class Asked:
    """What one call reads.

    Attributes:
        part: where names of the source begin.
        naming: what each of our names is in that part.
        strict: whether everything must be the same on both sides.
        ignore: what is not wanted, as `load` takes it.
        converts: whether dtypes may differ.
        advice: what to do where only some is missing.
    """

    part: str = ""
    naming: Naming = field(default_factory=lambda: by_rules(()))
    strict: bool = True
    ignore: str | Iterable[str] = ()
    converts: bool = False
    advice: str = ""


def by_rules(rules: Iterable[Rule]) -> Naming:
    """Names by rules, as `load` takes them."""
    return lambda held: renamed([*held.tensors, *held.numbers], rules)


def compared(
    source: Entries, wanted: Contents, team: Team, asked: Asked, naming: dict[str, Name]
) -> tuple[Differences, dict[str, Name]]:
    """What differs, and under which names what is wanted is to be found."""
    differ, names = Differences(), dict[str, Name]()
    ignore = patterns(asked.ignore)
    expected: set[str] = set()
    for name in [*wanted.tensors, *wanted.numbers]:
        inside, swap = naming[name]
        root = not wanted.keys[name] and inside == name  # a tree that is one leaf
        theirs = (asked.part if root and asked.part else joined(asked.part, inside)) or name
        label = name if theirs in (name, joined(asked.part, name)) else f"{inside} (here {name})"
        expected.add(theirs)
        ranks = source.by_rank.get(theirs)
        if ranks is not None:
            if ranks != team.size or name not in wanted.by_rank:
                ours = f"that of {team.size} ranks" if name in wanted.by_rank else "the same on all ranks"
                differ.shapes[label] = f"that of {ranks} ranks, each its own", ours
                continue
            theirs = f"{theirs}.rank{team.rank}"
        if theirs in source.tensors or theirs in source.numbers:
            names[name] = Name(theirs, swap)
            _compare_one(differ, label, source, names[name], wanted, name)
        elif theirs in source.others:
            differ.shapes[label] = source.others[theirs], str(wanted.tensors.get(name, "a number or string"))
        else:
            differ.missing.append(label)
    if asked.converts:
        differ.kinds.clear()
    expected |= {f"{name}.rank{rank}" for name, ranks in source.by_rank.items() for rank in range(ranks)}
    for name in [*source.tensors, *source.numbers, *source.by_rank]:
        within = None if name in expected else _inside(name, asked.part)
        if within is not None and not any(rule.fullmatch(within) for rule in ignore):
            differ.extra.append(name)
    return differ, names


def _inside(name: str, part: str) -> str | None:
    """The name of an entry in a part; None if it is not there."""
    if not part or name == part:
        return name
    return name[len(part) + 1 :] if name.startswith(f"{part}.") else None


def hint(differ: Differences, names: dict[str, Name], source: Entries, asked: Asked) -> str:
    """Where all that is missing is."""
    every = [*source.tensors, *source.numbers]
    if asked.part and not any(_inside(name, asked.part) for name in every):
        parts = listed(dict.fromkeys(name.partition(".")[0] for name in every), room=_ROOM)
        return f". There is no part {short(repr(asked.part))}: the first keys are {parts}"
    if names or not differ.missing:
        return asked.advice if differ.missing else ""
    plain = [label.partition(" (here ")[0] for label in differ.missing]
    part = part_with(plain, every)
    return f". They are all in its part {part!r}: pass part={part!r}" if part else ""


def _compare_one(differ: Differences, label: str, source: Entries, there: Name, wanted: Contents, name: str) -> None:
    """Notes how one entry of a tree differs from what is there under its name."""
    kind, number = source.tensors.get(there.theirs), source.numbers.get(there.theirs)
    ours = wanted.tensors.get(name)
    if there.turned:
        refuse_flat(name, ours)
    if ours is None or kind is None:
        here, other = str(ours or type(wanted.numbers[name]).__name__), str(kind or type(number).__name__)
        if here != other:
            where = differ.kinds if ours is None and kind is None else differ.shapes
            where[label] = other, here
        return
    ours = Kind(ours.dtype, turned(ours.shape, there.turned), ours.meant)
    more = " when its last two dimensions are swapped" if there.turned else ""
    if kind.shape != ours.shape:
        differ.shapes[label] = str(kind), f"{ours}{more}"
    elif kind.dtype != ours.dtype:
        differ.kinds[label] = str(kind), f"{ours}{more}"
    elif kind.meant and ours.meant and kind.meant != ours.meant:  # what others wrote does not say it
        differ.formats[label] = kind.meant, ours.meant


def patterns(rules: str | Iterable[str]) -> list[re.Pattern[str]]:
    """Regular expressions; one may be by itself.

    Raises:
        CheckpointError: something that is not one.
    """
    found = []
    for rule in [rules] if isinstance(rules, str) else rules:
        try:
            found.append(re.compile(rule))
        except (re.error, TypeError) as error:
            raise CheckpointError(f"ignore: {rule!r} is not a regular expression: {error}") from error
    return found
