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
            raise CheckpointError(f'a rule must be (regular expression, template) or the same with "T", got {rule!r}')
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
        content = kind or "a number or string"
        raise CheckpointError(f'a rule with "T" matches {name}, but of {content} there are no two dimensions to swap')


def part_with(names: Sequence[str], available: Iterable[str]) -> str:
    """The shortest part of a file that contains all of these names, to suggest in a message; "" if there is none."""
    entries, first = set(available), next(iter(names), None)
    if first is None:
        return ""
    parts = (name.removesuffix(f".{first}") for name in entries if name.endswith(f".{first}"))
    return next((part for part in sorted(parts, key=len) if all(joined(part, inner) in entries for inner in names)), "")


# --- what differs ---


_HYPERPARAMETER = re.compile(r"\bnumbers\.\w+$")
_ROOM = 300  # characters for each kind of difference in a message
_TENSORS = {"int": "int64 []", "float": "float64 []"}  # what compiled and graphed steps make of numbers


@dataclass
class Differences:
    """The differences between a checkpoint and a tree, by name.

    Attributes:
        missing: in the tree, not in the checkpoint.
        extra: in the checkpoint, not in the tree.
        shapes: in both, with different shapes: `(checkpoint's, tree's)`.
        kinds: in both, with different dtypes or types.
        formats: in both, in different quantized formats.
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
        for aspect, pairs in (("shape", self.shapes), ("kind", self.kinds), ("format", self.formats)):
            lines = [f"{name} is {stored} there, {expected} in the tree" for name, (stored, expected) in pairs.items()]
            if lines:
                sentences.append(f"of another {aspect}: {listed(lines, room=_ROOM)}")
        if any(_HYPERPARAMETER.search(name) for name in (*self.missing, *self.extra)):
            sentences.append(
                "an optimizer's state has its plain numbers, and no rules or schedules: to change one for the other, "
                "pass " + ("strict=False" if self.missing else r"ignore=r'.*\bnumbers\.\w+'")
            )
        return findings(sentences) or "nothing differs"


Naming = Callable[[Contents], dict[str, StoredName]]


@dataclass(frozen=True)
class LoadRequest:
    """The options of one load.

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
    return lambda flat_tree: renamed([*flat_tree.tensors, *flat_tree.numbers], rules)


def compare_entries(
    source: Entries, flat_tree: Contents, group: RankGroup, request: LoadRequest, naming: dict[str, StoredName]
) -> tuple[Differences, dict[str, StoredName]]:
    """Returns the differences, and the stored name of each entry that can be read."""
    differences, names = Differences(), dict[str, StoredName]()
    ignore = patterns(request.ignore)
    expected: set[str] = set()
    for name in [*flat_tree.tensors, *flat_tree.numbers]:
        inside, swap = naming[name]
        root = not flat_tree.keys[name] and inside == name  # the tree is a single leaf
        stored_name = (request.part if root and request.part else joined(request.part, inside)) or name
        label = name if stored_name in (name, joined(request.part, name)) else f"{inside} (here {name})"
        expected.add(stored_name)
        ranks = source.by_rank.get(stored_name)
        if ranks is not None:
            copy = flat_tree.copies.get(name)
            index, count = (group.rank, group.size) if copy is None else (copy.index, copy.count)
            if ranks != count or name not in flat_tree.by_rank:
                local_kind = f"that of {count} ranks" if name in flat_tree.by_rank else "the same on all ranks"
                differences.shapes[label] = f"that of {ranks} ranks, each its own", local_kind
                continue
            stored_name = f"{stored_name}.rank{index}"
        if stored_name in source.tensors or stored_name in source.numbers:
            names[name] = StoredName(stored_name, swap and name not in flat_tree.optional)
            _compare_one(differences, label, source, names[name], flat_tree, name)
        elif stored_name in source.others:
            local_kind = str(flat_tree.tensors.get(name, "a number or string"))
            differences.shapes[label] = source.others[stored_name], local_kind
        elif name not in flat_tree.optional:
            differences.missing.append(label)
    if request.converts:
        differences.kinds.clear()
    expected |= {f"{name}.rank{rank}" for name, ranks in source.by_rank.items() for rank in range(ranks)}
    for name in [*source.tensors, *source.numbers, *source.by_rank]:
        inner_name = None if name in expected else _inside(name, request.part)
        if inner_name is not None and not any(rule.fullmatch(inner_name) for rule in ignore):
            differences.extra.append(name)
    return differences, names


def _inside(name: str, part: str) -> str | None:
    """The name of an entry within a part; None if it is not in the part."""
    if not part or name == part:
        return name
    return name[len(part) + 1 :] if name.startswith(f"{part}.") else None


def hint(differ: Differences, names: dict[str, StoredName], source: Entries, request: LoadRequest) -> str:
    """Advice for a message: in which part the missing entries are, or that there is no such part."""
    entries = [*source.tensors, *source.numbers]
    if request.part and not any(_inside(name, request.part) for name in entries):
        parts = listed(dict.fromkeys(name.partition(".")[0] for name in entries), room=_ROOM)
        return f". There is no part {short(repr(request.part))}: the first keys are {parts}"
    if names or not differ.missing:
        return request.advice if differ.missing else ""
    plain = [label.partition(" (here ")[0] for label in differ.missing]
    part = part_with(plain, entries)
    return f". They are all in its part {part!r}: pass part={part!r}" if part else ""


def _compare_one(
    differ: Differences, label: str, source: Entries, stored: StoredName, flat_tree: Contents, name: str
) -> None:
    """Records how an entry of a tree differs from the entry in the files."""
    kind, number = source.tensors.get(stored.theirs), source.numbers.get(stored.theirs)
    tree_type = flat_tree.tensors.get(name)
    if stored.turned:
        refuse_flat(name, tree_type)
    if tree_type is None or kind is None:
        tree_kind = str(tree_type or type(flat_tree.numbers[name]).__name__)
        stored_kind = str(kind or type(number).__name__)
        if tree_kind != stored_kind and _TENSORS.get(tree_kind, tree_kind) != _TENSORS.get(stored_kind, stored_kind):
            group = differ.kinds if tree_type is None and kind is None else differ.shapes
            group[label] = stored_kind, tree_kind
        return
    tree_type = TensorType(tree_type.dtype, turned(tree_type.shape, stored.turned), tree_type.meant)
    suffix = " when its last two dimensions are swapped" if stored.turned else ""
    if kind.shape != tree_type.shape:
        differ.shapes[label] = str(kind), f"{tree_type}{suffix}"
    elif kind.dtype != tree_type.dtype:
        differ.kinds[label] = str(kind), f"{tree_type}{suffix}"
    elif kind.meant and tree_type.meant and kind.meant != tree_type.meant:  # other tools' files do not name the format
        differ.formats[label] = kind.meant, tree_type.meant


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
