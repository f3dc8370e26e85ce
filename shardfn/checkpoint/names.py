"""Names here, and in files of others: rules from the one to the other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardfn.checkpoint.boxes import Box, Ints
from shardfn.checkpoint.contents import Kind
from shardfn.checkpoint.team import CheckpointError
from shardfn.mesh.spec import joined
from shardfn.quoting import listed

Rule = tuple[str, str] | tuple[str, str, str]
"""`(regular expression, template)`, or these and `"T"`: a name of ours that the first matches becomes the second."""
_Parsed = tuple[re.Pattern[str], str, bool]


class Name(NamedTuple):
    """What something is called there, and whether its last two dimensions are swapped."""

    theirs: str
    turned: bool = False


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
        matches = ((pattern.fullmatch(name), template, swap) for pattern, template, swap in parsed)
        first = next(((match, template, swap) for match, template, swap in matches if match), None)
        theirs, swap = (name, False) if first is None else (first[0].expand(first[1]), first[2])
        if theirs in owners:
            raise CheckpointError(f"{owners[theirs]} and {name} are both {theirs!r} there: each needs its own name")
        owners[theirs], found[name] = name, Name(theirs, swap)
    return found


def turned(numbers: Ints, swap: bool) -> Ints:
    """Sizes, or offsets, of which the last two are swapped."""
    return (*numbers[:-2], numbers[-1], numbers[-2]) if swap else numbers


def turned_box(box: Box, swap: bool) -> Box:
    """A box of a tensor of ours in the tensor there."""
    return Box(turned(box.offsets, swap), turned(box.sizes, swap))


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


def _parsed(rules: Sequence[Rule], names: Sequence[str]) -> list[_Parsed]:
    """The rules, each of which must match something."""
    for rule in rules:
        if isinstance(rule, str) or len(rule) not in (2, 3) or tuple(rule[2:]) not in ((), ("T",)):
            raise CheckpointError(f'a rule is (regular expression, template), or these and "T", not {rule!r}')
    parsed = [(re.compile(rule[0]), rule[1], len(rule) == 3) for rule in rules]
    idle = [repr(pattern.pattern) for pattern, *_ in parsed if not any(map(pattern.fullmatch, names))]
    if idle:
        raise CheckpointError(f"no parameter matches {listed(idle)}; the first of them are {listed(names)}")
    return parsed
