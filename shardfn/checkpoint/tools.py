"""Lists and compares checkpoints, in one process and in memory that does not grow with them."""

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
    """Facts about a checkpoint.

    Attributes:
        path: of its folder.
        format: `"shardfn"` or `"torch"`.
        whole: whether all of its files exist, at full length.
        bytes: of all files.
        files: number of files.
        made: when it was written; None if unknown, as with the following.
        ranks: how many ranks wrote it.
        number: its number in the folder of a run.
        latest: whether training would resume from it.
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
    """A tensor of a checkpoint, and the number of its parts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    parts: int


@dataclass
class Diff:
    """How two checkpoints differ, by name.

    Attributes:
        only_a: in the first only.
        only_b: in the second only.
        kinds: in both, with different dtypes, shapes or types.
        numbers: numbers and strings that differ.
        values: for tensors that differ: number of different elements, number of elements, and largest absolute
            difference.
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)
    numbers: dict[str, tuple[Scalar, Scalar]] = field(default_factory=dict)
    values: dict[str, tuple[int, int, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.kinds or self.numbers or self.values)


def summary(path: Path) -> Summary:
    """The facts about one checkpoint, from its manifest and the lengths of its files."""
    folder = found_at(path)
    sizes = [file.stat().st_size for file in folder.iterdir() if file.is_file()]
    if (folder / MANIFEST).exists():
        about: dict[str, Any] = {}
        with contextlib.suppress(CheckpointError):
            about = read_manifest(folder).about
        facts: dict[str, Any] = {key: about.get(key) for key in ("made", "ranks", "number")}
        return Summary(path, "shardfn", not isinstance(intact(folder), str), sum(sizes), len(sizes), **facts)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((folder / METADATA).stat().st_mtime))
    return Summary(path, "torch", _has_its_bytes(folder), sum(sizes), len(sizes), made)


def summaries(root: Path) -> list[Summary]:
    """The checkpoints in a folder, complete ones first, oldest first; then torn ones and remains of unfinished ones.

    Raises:
        CheckpointError: there are none.
    """
    if not root.is_dir():
        raise CheckpointError(f"there is no folder {root}")
    whole, result = checkpoints(root), []
    for folder in sorted(root.iterdir()):
        if not folder.is_dir():
            continue
        original = root / folder.name.removeprefix(".").removesuffix(".replaced")
        if restored(original) == folder and is_checkpoint(folder):
            result.append(replace(summary(original), latest=[original] == whole[-1:]))
        elif any(folder.glob("*.distcp")):
            sizes = [entry.stat().st_size for entry in folder.iterdir()]
            result.append(Summary(folder, "unfinished", False, sum(sizes), len(sizes)))
    if not result:
        raise CheckpointError(f"{root} is not a checkpoint, and has none in it")
    return sorted(result, key=lambda entry: (not entry.whole, entry.number or 0, entry.made or "", entry.path))


def entries(source: Source, names: list[str]) -> list[TensorSummary]:
    """The tensors among these names."""
    tensors = {name: source.tensors[name] for name in names if name in source.tensors}
    return [
        TensorSummary(name, str(kind.dtype).removeprefix("torch."), kind.shape, kind.bytes, len(source.chunks[name]))
        for name, kind in tensors.items()
    ]


def chosen(source: Source, pattern: str | None) -> list[str]:
    """The names of tensors and numbers that match a regular expression as a whole; all names if it is None.

    Raises:
        CheckpointError: no name matches.
    """
    names = [name for name in [*source.tensors, *source.numbers] if pattern is None or re.fullmatch(pattern, name)]
    if pattern is not None and not names:
        raise CheckpointError(f"no entry of {source.folder} has a name that matches {pattern!r} as a whole")
    return names


def diff(a: Path, b: Path, *, tolerance: float = 0.0, report: Report = silent) -> Diff:
    """Compares two checkpoints. NaNs at the same place count as equal.

    Args:
        a: path of the first.
        b: path of the second.
        tolerance: absolute difference up to which numbers count as equal.
        report: called with bytes done and bytes in all.

    Raises:
        CheckpointError: one of them is missing or damaged.
    """
    first, second, result = source_of(a), source_of(b), Diff()
    names, names_b = chosen(first, None), chosen(second, None)
    common = [name for name in names if name in set(names_b)]
    result.only_a = [name for name in names if name not in set(common)]
    result.only_b = [name for name in names_b if name not in set(common)]
    same_kind = []
    for name in common:
        kinds = [str(source.tensors.get(name) or type(source.numbers[name]).__name__) for source in (first, second)]
        if kinds[0] != kinds[1]:
            result.kinds[name] = kinds[0], kinds[1]
        elif name in first.tensors:
            same_kind.append(name)
        elif not _same(first.numbers[name], second.numbers[name], tolerance):
            result.numbers[name] = first.numbers[name], second.numbers[name]
    count = meter(report, sum(first.tensors[name].bytes for name in same_kind))
    reader_a, reader_b = CheckpointReader(first), CheckpointReader(second)
    for name in same_kind:
        differ, largest = 0, 0.0
        for box, values in reader_a.parts(name):
            differing, distance = _difference(values, reader_b.read(name, box), tolerance)
            differ, largest = differ + differing, max(largest, distance, key=_order)
            count(values.nbytes)
        if differ:
            result.values[name] = differ, math.prod(first.tensors[name].shape), largest
    return result


def _has_its_bytes(folder: Path) -> bool:
    """Whether the files of a torch.distributed.checkpoint are as long as its metadata says."""
    try:
        source = torchs(folder)
        ends = [(file, offset + length) for file, offset, length in source.places.values()]
        ends += [(chunk.file, chunk.stop) for chunks in source.chunks.values() for chunk in chunks]
        return all((folder / file).stat().st_size >= end for file, end in ends)
    except (CheckpointError, OSError):
        return False


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, bool) or not isinstance(a, (int, float, complex)):
        return a == b
    return a == b or (a != a and b != b) or abs(a - b) <= tolerance


def _difference(x: Tensor, y: Tensor, tolerance: float) -> tuple[int, float]:
    """The number of elements that differ, and the largest absolute difference."""
    if torch.equal(as_bytes(x), as_bytes(y)):
        return 0, 0.0
    differ, largest = 0, 0.0
    for xs, ys in zip(x.view(-1).split(AT_ONCE), y.view(-1).split(AT_ONCE), strict=True):
        a, b = _comparable(xs), _comparable(ys)
        unequal = (a != b) & ~((a != a) & (b != b))
        if unequal.any():
            distance = _distance(a[unequal], b[unequal])
            distance = distance[~(distance <= tolerance)]
            differ += distance.numel()
            largest = max([largest, *([distance.max().item()] if distance.numel() else [])], key=_order)
    return differ, largest


def _comparable(x: Tensor) -> Tensor:
    """Converts without loss to complex128, float64 or int64; uint64 is shifted down by 2^63 to fit."""
    if x.is_complex():
        return x.to(torch.complex128)
    if x.dtype == torch.uint64:
        return x.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return x.to(torch.float64 if x.is_floating_point() else torch.int64)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Absolute differences; never 0 for integers that are not equal."""
    if a.dtype != torch.int64:
        return (a - b).abs()
    differences = torch.maximum(a, b) - torch.minimum(a, b)
    return differences.to(torch.float64) + (differences < 0) * 2.0**64  # corrects differences that overflow int64


def _order(value: float) -> tuple[bool, float]:
    return math.isnan(value), value
