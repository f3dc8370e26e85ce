"""Converts a checkpoint, part by part in one process: to one file, or to what another number of ranks would write."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint import folders, safetensors
from shardfn.checkpoint.contents import BUFFER, FEW
from shardfn.checkpoint.disk import write_at
from shardfn.checkpoint.folders import source_of
from shardfn.checkpoint.manifest import Manifest, Source
from shardfn.checkpoint.reading import CheckpointReader, Report, meter, silent
from shardfn.checkpoint.team import CheckpointError
from shardfn.checkpoint.tools import chosen
from shardfn.checkpoint.writing import Writer
from shardfn.shards.boxes import steps, whole

Count = Callable[[int], None]


@dataclass(frozen=True)
class Written:
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
) -> Written:
    """Writes the whole tensors of a checkpoint to one file, atomically.

    Args:
        src: the checkpoint.
        dst: `.safetensors`, which holds tensors and is written part by part; or `.pt`, nested dicts of everything by
            torch.save, which must fit into memory.
        pattern: for the names; see `chosen`.
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
    names = chosen(source, pattern)
    tensors = [name for name in names if name in source.tensors]
    olds = _renamed(names, strip)
    dst.parent.mkdir(parents=True, exist_ok=True)
    count = meter(report, sum(source.tensors[name].bytes for name in tensors))
    with folders.replacing(dst) as unfinished:
        left_out = write(CheckpointReader(source), unfinished, olds, strip, count)
    left_out += [] if pattern else source.others
    numbers = len(names) - len(tensors) if dst.suffix == ".pt" else 0
    return Written(dst, len(tensors), numbers, dst.stat().st_size, left_out)


def reshard(src: Path, dst: Path, ranks: int, *, report: Report = silent) -> Written:
    """Rewrites a checkpoint, atomically, as `ranks` ranks would with `full_shard`; also reads torch's own checkpoints.

    Raises:
        CheckpointError: the checkpoint or the destination is wrong.
    """
    if ranks < 1:
        raise CheckpointError(f"{ranks} ranks; 1 or more write a checkpoint")
    source = source_of(src)
    if folders.restored(dst).exists():
        raise CheckpointError(f"{dst} exists: pass another path")
    reader, keys, owners = CheckpointReader(source), source.keys(), _owners(source, ranks)
    dst.parent.mkdir(parents=True, exist_ok=True)
    folder = folders.aside(dst, "writing")
    folders.discard(folder)
    manifest = Manifest(tensors=source.tensors, by_rank=source.by_rank)
    count = meter(report, sum(kind.bytes for kind in source.tensors.values()))
    with folders.discarding(folder):
        folder.mkdir()
        for rank, share in enumerate(_shares(source, owners, ranks)):
            with contextlib.closing(Writer(folder, rank)) as writer:
                for name, start, stop in share:
                    kind = source.tensors[name]
                    for box in steps(whole(kind.shape), BUFFER // kind.dtype.itemsize, start, stop):
                        writer.tensor(name, reader.read(name, box), box)
                        count(box.numel * kind.dtype.itemsize)
                for name, value in source.numbers.items():
                    if owners.get(name, 0) == rank:
                        writer.number(name, value)
                manifest.add(writer.end())
        manifest.about = folders.about(dst.parent, ranks)
        folders.completed(folder, dst, manifest, keys)
    size = sum(size for size, _ in manifest.files.values())
    return Written(dst, len(manifest.tensors), len(manifest.numbers), size, list(source.others))


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
                value[box.within(whole(kind.shape))].copy_(values)
                count(values.nbytes)
        path_keys = keys.get(name, (name,))
        _put(tree, _stripped(path_keys, strip) if name != new else path_keys, name, value)
    with path.open("wb") as file:
        torch.save(_with_lists(tree), file)
    return []


def _stripped(keys: tuple[Any, ...], strip: str) -> tuple[Any, ...]:
    keys = tuple(key for key in keys if str(key))  # empty keys do not show in the name
    while strip and strip.startswith(f"{keys[0]}."):
        strip, keys = strip[len(f"{keys[0]}.") :], keys[1:]
    return (str(keys[0]).removeprefix(strip), *keys[1:]) if strip else keys


def _put(tree: dict[Any, Any], keys: tuple[Any, ...], name: str, value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise CheckpointError(f"{name} is inside {key!r}, which is not a dict")
    if keys[-1] in tree:
        raise CheckpointError(f"two entries are {'.'.join(map(str, keys))}, of which one is {name}")
    tree[keys[-1]] = value


def _with_lists(node: Any) -> Any:
    """Turns dicts whose keys are 0, 1 and so on into lists."""
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(value) for key, value in node.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[i] for i in range(len(items))]
    return items


def _owners(source: Source, ranks: int) -> dict[str, int]:
    """The rank that writes each entry that differs between ranks."""
    return {f"{name}.rank{rank}": rank % ranks for name, size in source.by_rank.items() for rank in range(size)}


def _shares(source: Source, owners: dict[str, int], ranks: int) -> list[list[tuple[str, int, int]]]:
    """For each rank, the tensors that it writes, with first and last-plus-one element."""
    load = [0] * ranks
    shares: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for name, kind in source.tensors.items():
        numel = whole(kind.shape).numel
        if name in owners or kind.bytes < FEW:
            rank = owners.get(name, load.index(min(load)))
            shares[rank].append((name, 0, numel))
            load[rank] += kind.bytes + 4096
            continue
        length = -(-numel // ranks)
        for rank, start in enumerate(range(0, numel, length)):
            shares[rank].append((name, start, min(start + length, numel)))
    return shares
