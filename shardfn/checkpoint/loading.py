"""From a checkpoint to a tree of any placement, each rank reading what it holds."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.checkpoint.boxes import whole
from shardfn.checkpoint.contents import Contents, LocalBox, contents, generators, rebuilt
from shardfn.checkpoint.folders import checkpoints
from shardfn.checkpoint.reading import Reader, Wanted
from shardfn.checkpoint.saving import finish
from shardfn.checkpoint.sources import Source, source_of
from shardfn.checkpoint.team import CheckpointError, Team, on_each_rank, team_of
from shardfn.mesh import waiting

_log = logging.getLogger("shardfn")


@dataclass
class Differences:
    """How a checkpoint and a tree differ, by name.

    Attributes:
        missing: names wanted by the tree that are not in the checkpoint.
        extra: in the checkpoint, not wanted.
        shapes: in both, of other shapes: `(checkpoint's, tree's)`.
        kinds: in both, of other dtypes or types.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[str, str]] = field(default_factory=dict)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.shapes or self.kinds)

    def __str__(self) -> str:
        said = []
        if self.missing:
            said.append(f"missing in the checkpoint: {', '.join(self.missing)}")
        if self.extra:
            said.append(f"in the checkpoint, but not in the tree: {', '.join(self.extra)}")
        for what, found in (("shape", self.shapes), ("kind", self.kinds)):
            each = [f"{name} is {theirs} there, {ours} in the tree" for name, (theirs, ours) in found.items()]
            if each:
                said.append(f"of another {what}: {', '.join(each)}")
        return "; ".join(said) or "nothing differs"


@waiting.during("sf.checkpoint.load")
def load(
    path: str | os.PathLike[str],
    like: Any,
    *,
    strict: bool = True,
    ignore: str | Iterable[str] = (),
    donate: bool = True,
) -> Any:
    """Reads training state from a checkpoint, on all ranks together; overwrites `like` unless `donate=False`.

    The checkpoint is one of `save`, on any mesh and by any strategy, or of torch.distributed.checkpoint, such as
    FSDP2's. Each rank reads the parts that it holds, one after another, and compares their checksums. In addition to
    its shards it needs 64 MB of memory, and the largest tensor of others' checkpoints that is not contiguous there.

    Args:
        path: of the checkpoint; `latest` finds one.
        like: a tree as `save` takes one, placed as the result is to be.
        strict: whether everything must be the same on both sides. If not, what is missing stays as it is in `like`,
            what is extra is ignored, other dtypes are converted, and the log of `shardfn` says so; other shapes are
            still errors.
        ignore: regular expressions, or one; entries of the checkpoint whose whole name matches one are not wanted.
        donate: write into `like`'s tensors and generators. If not, they stay as they are, and are copied.

    Returns:
        The tree, with the checkpoint's values.

    Raises:
        CheckpointError: what is missing, extra, of another shape or dtype, all at once; a damaged or foreign file. The
            same on every rank. Files that are gone or too short are found before anything is overwritten; where only a
            checksum shows damage, `like` may have been overwritten in part, and the message says what.
        TypeError, ValueError: what is in `like` cannot be loaded.

    Example:
        ``tree = load(latest("runs/1"), {"params": params, "state": state, "step": 0})``
    """
    finish()
    tree, held = on_each_rank(lambda: _placed(like, donate))
    team, path, what = team_of(held.grids), Path(path), f"load {path}"

    def compared() -> tuple[Reader, Wanted, Differences, dict[str, str]]:
        source = source_of(path)
        differ, names = _compared(source, held, team, patterns(ignore))
        if differ.shapes or (strict and differ):
            raise CheckpointError(str(differ))
        every = [*held.boxes, *(LocalBox(name, whole(x.shape), x) for name, x in held.plain.items())]
        reader = Reader(source)
        wanted = reader.wanted(LocalBox(names[one.name], one.box, one.values) for one in every if one.name in names)
        reader.check(wanted)
        return reader, wanted, differ, names

    reader, wanted, differ, names = team.each(what, compared)
    if differ and team.rank == 0:
        _log.warning("%s, not strict: %s", what, differ)

    def read() -> None:
        with torch.no_grad():
            reader.fill(wanted)
        for name, generator in generators(tree).items():
            if name in names:
                generator.set_state(held.plain[name])

    try:
        team.each(what, read)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_unusable(names) if donate else '`like` is as it was'}") from error.__cause__
    numbers = reader.source.numbers
    return rebuilt(tree, {name: numbers[theirs] for name, theirs in names.items() if name in held.numbers})


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Finds the newest whole checkpoint in a folder.

    Args:
        root: of one run's checkpoints, the parent of what `save` is given.

    Returns:
        Its path; None where there is none, or no such folder. One that is torn, or torch.distributed.checkpoint's own,
        is never it. "Newest" is by the number that each has in the folder, not by name or time.

    Example:
        ``if (path := latest("runs/1")) is not None: tree = load(path, tree)``
    """
    found = checkpoints(Path(root))
    return found[-1] if found else None


def _compared(
    source: Source, wanted: Contents, team: Team, ignore: list[re.Pattern[str]]
) -> tuple[Differences, dict[str, str]]:
    """What differs, and under which names what is wanted is to be found."""
    differ, names = Differences(), {}
    for name in [*wanted.tensors, *wanted.numbers]:
        ranks = source.by_rank.get(name)
        if ranks is not None:
            if ranks != team.size or name not in wanted.by_rank:
                ours = f"that of {team.size} ranks" if name in wanted.by_rank else "the same on all ranks"
                differ.shapes[name] = f"that of {ranks} ranks, each its own", ours
                continue
            theirs = f"{name}.rank{team.rank}"
        else:
            theirs = name
        if theirs not in source.tensors and theirs not in source.numbers:
            differ.missing.append(name)
            continue
        names[name] = theirs
        _compare_one(differ, name, source, theirs, wanted)
    used = {f"{name}.rank{rank}" for name, ranks in source.by_rank.items() for rank in range(ranks)}
    differ.extra = [
        name
        for name in [*source.tensors, *source.numbers, *source.by_rank]
        if name not in used
        and name not in wanted.tensors
        and name not in wanted.numbers
        and not any(rule.fullmatch(name) for rule in ignore)
    ]
    return differ, names


def _compare_one(differ: Differences, name: str, source: Source, theirs: str, wanted: Contents) -> None:
    kind, number = source.tensors.get(theirs), source.numbers.get(theirs)
    ours = wanted.tensors.get(name)
    if ours is None or kind is None:
        here, there = str(ours or type(wanted.numbers[name]).__name__), str(kind or type(number).__name__)
        if here != there:
            where = differ.kinds if ours is None and kind is None else differ.shapes
            where[name] = there, here
        return
    if kind.shape != ours.shape:
        differ.shapes[name] = str(kind), str(ours)
    elif kind.dtype != ours.dtype:
        differ.kinds[name] = str(kind), str(ours)


def _unusable(names: dict[str, str]) -> str:
    """What a load that failed on the way may have written to, on some rank."""
    listed = list(names)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return (
        f"It was found on the way: these tensors of `like` are now in part the checkpoint's, in part as they were: "
        f"{', '.join(listed[:8])}{more}. Load a whole checkpoint into them; donate=False leaves `like` as it is"
    )


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


def _placed(like: Any, donate: bool) -> tuple[Any, Contents]:
    """The tree that is filled, and what it holds."""
    tree = like if donate else optree.tree_map(_copied, like)
    return tree, contents(tree, shared=False)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return leaf.clone_state()
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
