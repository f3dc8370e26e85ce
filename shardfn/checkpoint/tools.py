"""What checkpoints hold, and how two differ, found by one process in memory that does not grow with them."""

from __future__ import annotations

import contextlib
import math
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint.contents import Scalar, as_bytes
from shardfn.checkpoint.folders import checkpoints, found_at, intact, is_checkpoint, restored, source_of
from shardfn.checkpoint.manifest import MANIFEST, METADATA, Source, read_manifest, torchs
from shardfn.checkpoint.reading import CheckpointReader, Report, meter, silent
from shardfn.checkpoint.team import CheckpointError

AT_ONCE = 2**18  # elements that are compared at a time


@dataclass(frozen=True)
class Summary:
    """What a checkpoint says of itself.

    Attributes:
        path: of its folder.
        format: `"shardfn"` or `"torch"`.
        whole: whether all of its files are there, in full length.
        bytes: of the files.
        files: how many.
        made: when; None where that is not known, like the following.
        ranks: how many wrote it.
        number: its own, in the folder of a run.
        latest: whether it is what training goes on from.
    """

    path: Path
    format: str
    whole: bool
    bytes: int
    files: int
    made: str | None = None
    ranks: int | None = None
    number: int | None = None
    latest: bool = False


@dataclass(frozen=True)
class TensorSummary:
    """A tensor of a checkpoint, and the number of parts that it is in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    parts: int


@dataclass
class Diff:
    """How two checkpoints differ, by name.

    Attributes:
        only_a: in the first.
        only_b: in the second.
        kinds: in both, of other dtypes, shapes or types.
        numbers: that differ.
        values: of tensors that differ: how many elements do, of how many, and the largest absolute difference.
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)
    numbers: dict[str, tuple[Scalar, Scalar]] = field(default_factory=dict)
    values: dict[str, tuple[int, int, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.kinds or self.numbers or self.values)


def summary(path: Path) -> Summary:
    """Of one checkpoint, from its manifest and the lengths of its files."""
    folder = found_at(path)
    there = [one.stat().st_size for one in folder.iterdir() if one.is_file()]
    if (folder / MANIFEST).exists():
        about: dict[str, Any] = {}
        with contextlib.suppress(CheckpointError):
            about = read_manifest(folder).about
        known: dict[str, Any] = {key: about.get(key) for key in ("made", "ranks", "number")}
        return Summary(path, "shardfn", not isinstance(intact(folder), str), sum(there), len(there), **known)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((folder / METADATA).stat().st_mtime))
    return Summary(path, "torch", _has_its_bytes(folder), sum(there), len(there), made)


def summaries(root: Path) -> list[Summary]:
    """Of the checkpoints in a folder, oldest first, then those that are torn, and what is left of unfinished ones.

    Raises:
        CheckpointError: there are none.
    """
    if not root.is_dir():
        raise CheckpointError(f"there is no folder {root}")
    whole, found = checkpoints(root), []
    for folder in sorted(root.iterdir()):
        if not folder.is_dir():
            continue
        original = root / folder.name.removeprefix(".").removesuffix(".replaced")
        if restored(original) == folder and is_checkpoint(folder):
            found.append(replace(summary(original), latest=[original] == whole[-1:]))
        elif any(folder.glob("*.distcp")):
            there = [one.stat().st_size for one in folder.iterdir()]
            found.append(Summary(folder, "unfinished", False, sum(there), len(there)))
    if not found:
        raise CheckpointError(f"{root} is not a checkpoint, and has none in it")
    return sorted(found, key=lambda one: (not one.whole, one.number or 0, one.made or "", one.path))


def entries(source: Source, names: list[str]) -> list[TensorSummary]:
    """The tensors among these names."""
    tensors = {name: source.tensors[name] for name in names if name in source.tensors}
    return [
        TensorSummary(name, str(kind.dtype).removeprefix("torch."), kind.shape, kind.bytes, len(source.chunks[name]))
        for name, kind in tensors.items()
    ]


def chosen(source: Source, pattern: str | None) -> list[str]:
    """Names of the tensors and numbers of which all of the name matches a regular expression; all, if it is None.

    Raises:
        CheckpointError: none does.
    """
    names = [name for name in [*source.tensors, *source.numbers] if pattern is None or re.fullmatch(pattern, name)]
    if pattern is not None and not names:
        raise CheckpointError(f"no entry of {source.folder} has a name that is all of {pattern!r}")
    return names


def diff(a: Path, b: Path, *, tolerance: float = 0.0, report: Report = silent) -> Diff:
    """How two checkpoints differ. NaNs at the same place are equal.

    Args:
        a: one of them.
        b: the other.
        tolerance: absolute differences up to which numbers are the same.
        report: is called with bytes done, and bytes in all.

    Raises:
        CheckpointError: what is wrong with one of them.
    """
    one, other, found = source_of(a), source_of(b), Diff()
    names, theirs = chosen(one, None), chosen(other, None)
    both = [name for name in names if name in set(theirs)]
    found.only_a = [name for name in names if name not in set(both)]
    found.only_b = [name for name in theirs if name not in set(both)]
    alike = []
    for name in both:
        kinds = [str(some.tensors.get(name) or type(some.numbers[name]).__name__) for some in (one, other)]
        if kinds[0] != kinds[1]:
            found.kinds[name] = kinds[0], kinds[1]
        elif name in one.tensors:
            alike.append(name)
        elif not _same(one.numbers[name], other.numbers[name], tolerance):
            found.numbers[name] = one.numbers[name], other.numbers[name]
    count = meter(report, sum(one.tensors[name].bytes for name in alike))
    mine, yours = CheckpointReader(one), CheckpointReader(other)
    for name in alike:
        differ, largest = 0, 0.0
        for box, values in mine.parts(name):
            more, most = _difference(values, yours.read(name, box), tolerance)
            differ, largest = differ + more, max(largest, most, key=_order)
            count(values.nbytes)
        if differ:
            found.values[name] = differ, math.prod(one.tensors[name].shape), largest
    return found


def _has_its_bytes(folder: Path) -> bool:
    """Whether files of torch.distributed.checkpoint are as long as what is in them."""
    try:
        source = torchs(folder)
        ends = [(file, offset + length) for file, offset, length in source.places.values()]
        ends += [(chunk.file, chunk.stop) for some in source.chunks.values() for chunk in some]
        return all((folder / file).stat().st_size >= end for file, end in ends)
    except (CheckpointError, OSError):
        return False


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, bool) or not isinstance(a, (int, float, complex)):
        return a == b
    return a == b or (a != a and b != b) or abs(a - b) <= tolerance


def _difference(x: Tensor, y: Tensor, tolerance: float) -> tuple[int, float]:
    """How many elements differ, and by how much at most."""
    if torch.equal(as_bytes(x), as_bytes(y)):
        return 0, 0.0
    differ, largest = 0, 0.0
    for some, others in zip(x.view(-1).split(AT_ONCE), y.view(-1).split(AT_ONCE), strict=True):
        a, b = _comparable(some), _comparable(others)
        unlike = (a != b) & ~((a != a) & (b != b))
        if unlike.any():
            distance = _distance(a[unlike], b[unlike])
            distance = distance[~(distance <= tolerance)]
            differ += distance.numel()
            largest = max([largest, *([distance.max().item()] if distance.numel() else [])], key=_order)
    return differ, largest


def _comparable(x: Tensor) -> Tensor:
    """In one of three dtypes, without loss; unsigned integers that are too large for signed ones moved down."""
    if x.is_complex():
        return x.to(torch.complex128)
    if x.dtype == torch.uint64:
        return x.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return x.to(torch.float64 if x.is_floating_point() else torch.int64)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Absolute differences; of integers that are not equal never 0."""
    if a.dtype != torch.int64:
        return (a - b).abs()
    differences = torch.maximum(a, b) - torch.minimum(a, b)
    return differences.to(torch.float64) + (differences < 0) * 2.0**64  # where they are more than int64 holds


def _order(value: float) -> tuple[bool, float]:
    return math.isnan(value), value
