"""Lists, compares and converts checkpoints, in one process and in memory that does not grow with them."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint import folders, safetensors
from shardfn.checkpoint.contents import FEW, Scalar
from shardfn.checkpoint.disk import write_at
from shardfn.checkpoint.folders import checkpoints, found_at, intact, is_checkpoint, restored, source_of
from shardfn.checkpoint.manifest import MANIFEST, METADATA, Manifest, TensorSource, read_manifest, torchs
from shardfn.checkpoint.reading import CheckpointReader, Report, meter, silent
from shardfn.checkpoint.team import CheckpointError
from shardfn.checkpoint.tensor_bytes import BUFFER, as_bytes
from shardfn.checkpoint.writing import Writer
from shardfn.shards.boxes import full_box, steps

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
    """The differences between two checkpoints, by name.

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
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((folder / METADATA).stat().st_mtime))
    return Summary(path, "torch", _has_its_bytes(folder), sum(sizes), len(sizes), created)


def summaries(root: Path) -> list[Summary]:
    """The checkpoints in a folder, complete ones first, oldest first; then torn ones and remains of unfinished ones.

    Raises:
        CheckpointError: there are none.
    """
    if not root.is_dir():
        raise CheckpointError(f"there is no folder {root}")
    complete, result = checkpoints(root), []
    for folder in sorted(root.iterdir()):
        if not folder.is_dir():
            continue
        original = root / folder.name.removeprefix(".").removesuffix(".replaced")
        if restored(original) == folder and is_checkpoint(folder):
            result.append(replace(summary(original), latest=[original] == complete[-1:]))
        elif any(folder.glob("*.distcp")):
            sizes = [entry.stat().st_size for entry in folder.iterdir()]
            result.append(Summary(folder, "unfinished", False, sum(sizes), len(sizes)))
    if not result:
        raise CheckpointError(f"{root} is not a checkpoint, and has none in it")
    return sorted(result, key=lambda entry: (not entry.whole, entry.number or 0, entry.made or "", entry.path))


def entries(source: TensorSource, names: list[str]) -> list[TensorSummary]:
    """The tensors among these names."""
    tensors = {name: source.tensors[name] for name in names if name in source.tensors}
    return [
        TensorSummary(name, str(kind.dtype).removeprefix("torch."), kind.shape, kind.bytes, len(source.chunks[name]))
        for name, kind in tensors.items()
    ]


def matching_names(source: TensorSource, pattern: str | None) -> list[str]:
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
    names, names_b = matching_names(first, None), matching_names(second, None)
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
        elif not _same_number(first.numbers[name], second.numbers[name], tolerance):
            result.numbers[name] = first.numbers[name], second.numbers[name]
    count = meter(report, sum(first.tensors[name].bytes for name in same_kind))
    reader_a, reader_b = CheckpointReader(first), CheckpointReader(second)
    for name in same_kind:
        differ, largest = 0, 0.0
        for box, values in reader_a.parts(name):
            differing, distance = _largest_difference(values, reader_b.read(name, box), tolerance)
            differ, largest = differ + differing, max(largest, distance, key=_order)
            count(values.nbytes)
        if differ:
            result.values[name] = differ, math.prod(first.tensors[name].shape), largest
    return result


def digest(path: Path, pattern: str | None = None, *, report: Report = silent) -> str:
    """A hash of names, dtypes, shapes, numbers and all bits, the same for any ranks that wrote them.

    Args:
        path: of the checkpoint.
        pattern: for the names; see `matching_names`.
        report: called with bytes done and bytes in all.

    Returns:
        16 hexadecimal digits. Entries of which each rank has its own are left out.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or no name matches.
    """
    source = source_of(path)
    of_ranks = {f"{name}.rank{rank}" for name, size in source.by_rank.items() for rank in range(size)}
    names = sorted({*matching_names(source, pattern)} - of_ranks)
    count = meter(report, sum(source.tensors[name].bytes for name in names if name in source.tensors))
    reader, result = CheckpointReader(source), hashlib.sha256()
    for name in names:
        kind = source.tensors.get(name)
        result.update(repr((name, str(kind) if kind else source.numbers[name])).encode())
        for box in steps(full_box(kind.shape), BUFFER // kind.dtype.itemsize) if kind else ():
            values = reader.read(name, box)
            result.update(as_bytes(values).numpy().data)
            count(values.nbytes)
    return result.hexdigest()[:16]


def _has_its_bytes(folder: Path) -> bool:
    """Whether the files of a torch.distributed.checkpoint are as long as its metadata says."""
    try:
        source = torchs(folder)
        ends = [(file, offset + length) for file, offset, length in source.places.values()]
        ends += [(chunk.file, chunk.stop) for chunks in source.chunks.values() for chunk in chunks]
        return all((folder / file).stat().st_size >= end for file, end in ends)
    except (CheckpointError, OSError):
        return False


def _same_number(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, bool) or not isinstance(a, (int, float, complex)):
        return a == b
    return a == b or (a != a and b != b) or abs(a - b) <= tolerance


def _largest_difference(x: Tensor, y: Tensor, tolerance: float) -> tuple[int, float]:
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


# --- converting ---


Count = Callable[[int], None]


@dataclass(frozen=True)
class WriteResult:
    """A summary of the new file or checkpoint, and the names of entries that were left out."""

    path: Path
    tensors: int
    numbers: int
    bytes: int
    left_out: list[str]


def consolidate(
    src: Path,
    dst: Path,
    *,
    pattern: str | None = None,
    strip: str = "",
    overwrite: bool = False,
    report: Report = silent,
) -> WriteResult:
    """Writes the whole tensors of a checkpoint to one file, atomically.

    Args:
        src: the checkpoint.
        dst: `.safetensors`, which holds tensors and is written part by part; or `.pt`, nested dicts of everything by
            torch.save, which must fit into memory.
        pattern: for the names; see `matching_names`.
        strip: prefix that is removed from names.
        overwrite: replace an existing file.
        report: called with bytes done and bytes in all.

    Raises:
        CheckpointError: the checkpoint, the names or the destination are wrong.
    """
    write = {".safetensors": _safetensors, ".pt": _nested}.get(dst.suffix)
    if write is None:
        raise CheckpointError(f"{dst} ends neither in .safetensors nor in .pt")
    if dst.is_dir() or (dst.exists() and not overwrite):
        raise CheckpointError(f"{dst} exists{': pass --overwrite, or another path' if dst.is_file() else ''}")
    source = source_of(src)
    names = matching_names(source, pattern)
    tensors = [name for name in names if name in source.tensors]
    olds = _renamed(names, strip)
    dst.parent.mkdir(parents=True, exist_ok=True)
    count = meter(report, sum(source.tensors[name].bytes for name in tensors))
    with folders.replacing(dst) as unfinished:
        left_out = write(CheckpointReader(source), unfinished, olds, strip, count)
    left_out += [] if pattern else source.others
    numbers = len(names) - len(tensors) if dst.suffix == ".pt" else 0
    return WriteResult(dst, len(tensors), numbers, dst.stat().st_size, left_out)


def reshard(src: Path, dst: Path, ranks: int, *, report: Report = silent) -> WriteResult:
    """Rewrites a checkpoint, atomically, as `ranks` ranks would with `full_shard`; also reads torch's own checkpoints.

    Raises:
        CheckpointError: the checkpoint or the destination is wrong.
    """
    if ranks < 1:
        raise CheckpointError(f"{ranks} ranks; 1 or more write a checkpoint")
    source = source_of(src)
    if folders.restored(dst).exists():
        raise CheckpointError(f"{dst} exists: pass another path")
    reader, keys = CheckpointReader(source), source.keys()
    # Entries that differ between ranks, each with the rank that writes it.
    owners = {f"{name}.rank{rank}": rank % ranks for name, size in source.by_rank.items() for rank in range(size)}
    dst.parent.mkdir(parents=True, exist_ok=True)
    folder = folders.staging_path(dst, "writing")
    folders.discard(folder)
    manifest = Manifest(tensors=source.tensors, by_rank=source.by_rank)
    count = meter(report, sum(kind.bytes for kind in source.tensors.values()))
    with folders.discarding(folder):
        folder.mkdir()
        for rank, share in enumerate(_shares(source, owners, ranks)):
            with contextlib.closing(Writer(folder, rank)) as writer:
                for name, start, stop in share:
                    kind = source.tensors[name]
                    for box in steps(full_box(kind.shape), BUFFER // kind.dtype.itemsize, start, stop):
                        writer.tensor(name, reader.read(name, box), box)
                        count(box.numel * kind.dtype.itemsize)
                for name, value in source.numbers.items():
                    if owners.get(name, 0) == rank:
                        writer.number(name, value)
                manifest.add(writer.end())
        manifest.about = folders.about(dst.parent, ranks)
        folders.completed(folder, dst, manifest, keys)
    size = sum(size for size, _ in manifest.files.values())
    return WriteResult(dst, len(manifest.tensors), len(manifest.numbers), size, list(source.others))


def _renamed(names: list[str], strip: str) -> dict[str, str]:
    """Maps new names to old ones."""
    if strip and not any(name.startswith(strip) for name in names):
        raise CheckpointError(f"no name begins with {strip!r}")
    olds: dict[str, str] = {}
    for old in names:
        new = old.removeprefix(strip)
        if not new or new in olds:
            clash = f"{old!r} and {olds[new]!r} are both {new!r}" if new else f"nothing is left of {old!r}"
            raise CheckpointError(f"{clash}, without {strip!r}")
        olds[new] = old
    return olds


def _safetensors(reader: CheckpointReader, path: Path, olds: dict[str, str], strip: str, count: Count) -> list[str]:
    """Writes tensors to a safetensors file; returns the names of entries that it cannot hold."""
    source = reader.source
    kinds = {name: source.tensors[old] for name, old in olds.items() if old in source.tensors}
    plan = safetensors.planned(kinds, sys.maxsize, {})
    (header,), (length,) = plan.headers.values(), plan.lengths.values()
    with path.open("wb", buffering=0) as file:
        write_at(file.fileno(), memoryview(header), 0)
        file.truncate(length)
        for name, (_, offset, shape) in plan.places.items():
            for box, values in reader.parts(olds[name]):
                safetensors.write_box(file.fileno(), offset, shape, box, values)
                count(values.nbytes)
    return [old for old in olds.values() if old not in source.tensors]


def _nested(reader: CheckpointReader, path: Path, olds: dict[str, str], strip: str, count: Count) -> list[str]:
    """Writes nested dicts and lists by torch.save."""
    source, keys = reader.source, reader.source.keys()
    tree: dict[Any, Any] = {}
    for new, name in olds.items():
        value: Any = source.numbers.get(name)
        if name in source.tensors:
            kind = source.tensors[name]
            value = torch.empty(kind.shape, dtype=kind.dtype, device="cpu")
            for box, values in reader.parts(name):
                value[box.slices_in(full_box(kind.shape))].copy_(values)
                count(values.nbytes)
        path_keys = keys.get(name, (name,))
        _insert_value(tree, _stripped(path_keys, strip) if name != new else path_keys, name, value)
    with path.open("wb") as file:
        torch.save(_with_lists(tree), file)
    return []


def _stripped(keys: tuple[Any, ...], strip: str) -> tuple[Any, ...]:
    keys = tuple(key for key in keys if str(key))  # empty keys do not show in the name
    while strip and strip.startswith(f"{keys[0]}."):
        strip, keys = strip[len(f"{keys[0]}.") :], keys[1:]
    return (str(keys[0]).removeprefix(strip), *keys[1:]) if strip else keys


def _insert_value(tree: dict[Any, Any], keys: tuple[Any, ...], name: str, value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise CheckpointError(f"{name} is inside {key!r}, which is not a dict")
    if keys[-1] in tree:
        raise CheckpointError(f"two entries have the name {'.'.join(map(str, keys))}; one is {name}")
    tree[keys[-1]] = value


def _with_lists(node: Any) -> Any:
    """Turns dicts whose keys are 0, 1 and so on into lists."""
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(value) for key, value in node.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[i] for i in range(len(items))]
    return items


def _shares(source: TensorSource, owners: dict[str, int], ranks: int) -> list[list[tuple[str, int, int]]]:
    """For each rank, the tensors that it writes, with first and last-plus-one element."""
    load = [0] * ranks
    shares: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for name, kind in source.tensors.items():
        numel = full_box(kind.shape).numel
        if name in owners or kind.bytes < FEW:
            rank = owners.get(name, load.index(min(load)))
            shares[rank].append((name, 0, numel))
            load[rank] += kind.bytes + 4096
            continue
        length = -(-numel // ranks)
        for rank, start in enumerate(range(0, numel, length)):
            shares[rank].append((name, start, min(start + length, numel)))
    return shares
