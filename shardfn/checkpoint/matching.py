"""Maps names of a tree to names in files, by rules, and finds how the two differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardfn.checkpoint.contents import Contents, LocalBox, TensorType
from shardfn.checkpoint.manifest import Entries
from shardfn.checkpoint.team import CheckpointError, RankGroup
from shardfn.mesh.spec import joined
from shardfn.quoting import findings, listed, short
from shardfn.shards.boxes import Box, Ints

Rule = tuple[str, str] | tuple[str, str, str]
"""`(regular expression, template)`: our names that match become the template; `"T"` also swaps the last two dims."""


class StoredName(NamedTuple):
    """The name of an entry in the files, and whether its last two dimensions are swapped there."""

    theirs: str
    turned: bool = False

    def box(self, local: LocalBox) -> LocalBox:
        """A box of our tensor as a box of the tensor in the files."""
        box = Box(turned(local.box.offsets, self.turned), turned(local.box.sizes, self.turned))
        return LocalBox(self.theirs, box, local.values.mT if self.turned else local.values)


def renamed(names: Iterable[str], rules: Iterable[Rule]) -> dict[str, StoredName]:
    """Maps each of our names to its name in the files: by the first rule that matches it, or unchanged.

    Raises:
        CheckpointError: a rule is malformed, or matches nothing; two names become the same.
    """
    names, rules = list(names), list(rules)
    for rule in rules:
        if isinstance(rule, str) or len(rule) not in (2, 3) or tuple(rule[2:]) not in ((), ("T",)):
            raise CheckpointError(f'a rule is (regular expression, template), or these and "T", not {rule!r}')
    parsed = [(re.compile(rule[0]), rule[1], len(rule) == 3) for rule in rules]
    idle = [repr(pattern.pattern) for pattern, *_ in parsed if not any(map(pattern.fullmatch, names))]
    if idle:
        raise CheckpointError(f"no parameter matches {listed(idle)}; the first of them are {listed(names)}")
    result: dict[str, StoredName] = {}
    owners: dict[str, str] = {}
    for name in names:
        target = StoredName(name)
        for pattern, template, swap in parsed:
            if match := pattern.fullmatch(name):
                target = StoredName(match.expand(template), swap)
                break
        if (owner := owners.setdefault(target.theirs, name)) != name:
            raise CheckpointError(f"{owner} and {name} are both {target.theirs!r} there: each needs its own name")
        result[name] = target
    return result


def turned(numbers: Ints, swap: bool) -> Ints:
    """Sizes or offsets, with the last two swapped if `swap`."""
    return (*numbers[:-2], numbers[-1], numbers[-2]) if swap else numbers


def refuse_flat(name: str, kind: TensorType | None) -> None:
    """Raises CheckpointError for a number, or a tensor with fewer than two dimensions to swap."""
    if kind is None or len(kind.shape) < 2:
        what = kind or "a number or string"
        raise CheckpointError(f'a rule with "T" matches {name}, but of {what} there are no two dimensions to swap')


def part_with(names: Sequence[str], there: Iterable[str]) -> str:
    """The shortest part of a file that contains all of these names, to suggest in a message; "" if there is none."""
    entries, first = set(there), next(iter(names), None)
    if first is None:
        return ""
    parts = (name.removesuffix(f".{first}") for name in entries if name.endswith(f".{first}"))
    return next((part for part in sorted(parts, key=len) if all(joined(part, inner) in entries for inner in names)), "")


# --- what differs ---


_ROOM = 300  # characters for each kind of difference in a message
_TENSORS = {"int": "int64 []", "float": "float64 []"}  # what compiled and graphed steps make of numbers


@dataclass
class Differences:
    """How a checkpoint and a tree differ, by name.

    Attributes:
        missing: in the tree, not in the checkpoint.
        extra: in the checkpoint, not in the tree.
        shapes: in both, with different shapes: `(checkpoint's, tree's)`.
        kinds: in both, with different dtypes or types.
        formats: in both, in different formats of few bits.
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
        for what, pairs in (("shape", self.shapes), ("kind", self.kinds), ("format", self.formats)):
            lines = [f"{name} is {theirs} there, {ours} in the tree" for name, (theirs, ours) in pairs.items()]
            if lines:
                sentences.append(f"of another {what}: {listed(lines, room=_ROOM)}")
        return findings(sentences) or "nothing differs"


Naming = Callable[[Contents], dict[str, StoredName]]


@dataclass(frozen=True)
class LoadRequest:
    """What one call is to read.

    Attributes:
        part: prefix of the entries to read.
        naming: maps our names to those in that part.
        strict: whether everything must be the same on both sides.
        ignore: entries to ignore, as `load` takes it.
        converts: whether dtypes may differ.
        advice: added to the message if some entries are missing.
    """

    part: str = ""
    naming: Naming = field(default_factory=lambda: by_rules(()))
    strict: bool = True
    ignore: str | Iterable[str] = ()
    converts: bool = False
    advice: str = ""


def by_rules(rules: Iterable[Rule]) -> Naming:
    """A naming by rules, as `load` takes them."""
    return lambda held: renamed([*held.tensors, *held.numbers], rules)


def compared(
    source: Entries, wanted: Contents, team: RankGroup, asked: LoadRequest, naming: dict[str, StoredName]
) -> tuple[Differences, dict[str, StoredName]]:
    """What differs, and the name in the files of each entry that can be read."""
    differences, names = Differences(), dict[str, StoredName]()
    ignore = patterns(asked.ignore)
    expected: set[str] = set()
    for name in [*wanted.tensors, *wanted.numbers]:
        inside, swap = naming[name]
        root = not wanted.keys[name] and inside == name  # the tree is a single leaf
        theirs = (asked.part if root and asked.part else joined(asked.part, inside)) or name
        label = name if theirs in (name, joined(asked.part, name)) else f"{inside} (here {name})"
        expected.add(theirs)
        ranks = source.by_rank.get(theirs)
        if ranks is not None:
            copy = wanted.copies.get(name)
            index, count = (team.rank, team.size) if copy is None else (copy.index, copy.count)
            if ranks != count or name not in wanted.by_rank:
                ours = f"that of {count} ranks" if name in wanted.by_rank else "the same on all ranks"
                differences.shapes[label] = f"that of {ranks} ranks, each its own", ours
                continue
            theirs = f"{theirs}.rank{index}"
        if theirs in source.tensors or theirs in source.numbers:
            names[name] = StoredName(theirs, swap and name not in wanted.optional)
            _compare_one(differences, label, source, names[name], wanted, name)
        elif theirs in source.others:
            differences.shapes[label] = source.others[theirs], str(wanted.tensors.get(name, "a number or string"))
        elif name not in wanted.optional:
            differences.missing.append(label)
    if asked.converts:
        differences.kinds.clear()
    expected |= {f"{name}.rank{rank}" for name, ranks in source.by_rank.items() for rank in range(ranks)}
    for name in [*source.tensors, *source.numbers, *source.by_rank]:
        within = None if name in expected else _inside(name, asked.part)
        if within is not None and not any(rule.fullmatch(within) for rule in ignore):
            differences.extra.append(name)
    return differences, names


def _inside(name: str, part: str) -> str | None:
    """The name of an entry within a part; None if it is not in the part."""
    if not part or name == part:
        return name
    return name[len(part) + 1 :] if name.startswith(f"{part}.") else None


def hint(differ: Differences, names: dict[str, StoredName], source: Entries, asked: LoadRequest) -> str:
    """Advice for a message: in which part the missing entries are, or that there is no such part."""
    entries = [*source.tensors, *source.numbers]
    if asked.part and not any(_inside(name, asked.part) for name in entries):
        parts = listed(dict.fromkeys(name.partition(".")[0] for name in entries), room=_ROOM)
        return f". There is no part {short(repr(asked.part))}: the first keys are {parts}"
    if names or not differ.missing:
        return asked.advice if differ.missing else ""
    plain = [label.partition(" (here ")[0] for label in differ.missing]
    part = part_with(plain, entries)
    return f". They are all in its part {part!r}: pass part={part!r}" if part else ""


def _compare_one(
    differ: Differences, label: str, source: Entries, there: StoredName, wanted: Contents, name: str
) -> None:
    """Records how an entry of a tree differs from the entry in the files."""
    kind, number = source.tensors.get(there.theirs), source.numbers.get(there.theirs)
    ours = wanted.tensors.get(name)
    if there.turned:
        refuse_flat(name, ours)
    if ours is None or kind is None:
        our_kind, their_kind = str(ours or type(wanted.numbers[name]).__name__), str(kind or type(number).__name__)
        if our_kind != their_kind and _TENSORS.get(our_kind, our_kind) != _TENSORS.get(their_kind, their_kind):
            group = differ.kinds if ours is None and kind is None else differ.shapes
            group[label] = their_kind, our_kind
        return
    ours = TensorType(ours.dtype, turned(ours.shape, there.turned), ours.meant)
    suffix = " when its last two dimensions are swapped" if there.turned else ""
    if kind.shape != ours.shape:
        differ.shapes[label] = str(kind), f"{ours}{suffix}"
    elif kind.dtype != ours.dtype:
        differ.kinds[label] = str(kind), f"{ours}{suffix}"
    elif kind.meant and ours.meant and kind.meant != ours.meant:  # files of other tools do not name the format
        differ.formats[label] = kind.meant, ours.meant


def patterns(rules: str | Iterable[str]) -> list[re.Pattern[str]]:
    """Compiles regular expressions, or a single one.

    Raises:
        CheckpointError: something is not a regular expression.
    """
    compiled = []
    for rule in [rules] if isinstance(rules, str) else rules:
        try:
            compiled.append(re.compile(rule))
        except (re.error, TypeError) as error:
            raise CheckpointError(f"ignore: {rule!r} is not a regular expression: {error}") from error
    return compiled
