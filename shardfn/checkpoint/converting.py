"""A checkpoint as one file, or as another number of ranks writes it, part by part by one process."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint import files, safetensors
from shardfn.checkpoint.boxes import Box, whole
from shardfn.checkpoint.contents import FEW, Kind
from shardfn.checkpoint.files import Manifest, Writer
from shardfn.checkpoint.reading import Reader, Report, bytes_of, memory, meter, parts, runs, silent
from shardfn.checkpoint.sources import Ours, Source, source_of
from shardfn.checkpoint.team import CheckpointError
from shardfn.checkpoint.tools import chosen
from shardfn.checkpoint.verifying import check_parts
from shardfn.compat import dcp


@dataclass(frozen=True)
class Written:
    """What became a new file or checkpoint, and the names of what did not."""

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
    """Whole tensors of a checkpoint in one file, which is whole or absent.

    Args:
        src: the checkpoint.
        dst: `.safetensors`, which holds tensors and is written part by part; or `.pt`, nested dicts of everything by
            torch.save, for which it must fit into memory.
        pattern: for the names; see `chosen`.
        strip: what names that begin with it lose.
        overwrite: replace a file of this name.
        report: told of progress.

    Raises:
        CheckpointError: what is wrong with the checkpoint, the names or the destination.
    """
    write = {".safetensors": _safetensors, ".pt": _nested}.get(dst.suffix)
    if write is None:
        raise CheckpointError(f"{dst} ends neither in .safetensors nor in .pt")
    if dst.is_dir() or (dst.exists() and not overwrite):
        raise CheckpointError(f"{dst} exists{': pass --overwrite, or another path' if dst.is_file() else ''}")
    source = source_of(src)
    names = chosen(source, pattern)
    tensors = [name for name in names if name in source.tensors]
    check_parts(source, tensors)
    olds = _renamed(names, strip)
    dst.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.aside(dst, "writing")
    count = meter(report, sum(bytes_of(source.tensors[name]) for name in tensors))
    try:
        left_out = write(Reader(source), temporary, olds, strip, count)
        temporary.replace(dst)
    finally:
        temporary.unlink(missing_ok=True)
    files.sync(dst.parent)
    left_out += [] if pattern else _unread(source)
    numbers = len(names) - len(tensors) if dst.suffix == ".pt" else 0
    return Written(dst, len(tensors), numbers, dst.stat().st_size, left_out)


def reshard(src: Path, dst: Path, ranks: int, *, report: Report = silent) -> Written:
    """The same checkpoint as so many ranks write it with `full_shard`, whole or absent; also one of torch's own.

    Raises:
        CheckpointError: what is wrong with the checkpoint or the destination.
    """
    if ranks < 1:
        raise CheckpointError(f"{ranks} ranks; 1 or more write a checkpoint")
    source = source_of(src)
    if files.restored(dst).exists():
        raise CheckpointError(f"{dst} exists: pass another path")
    check_parts(source, source.tensors)
    reader, keys = Reader(source), _keys(source)
    dst.parent.mkdir(parents=True, exist_ok=True)
    folder = files.aside(dst, "writing")
    files.discard(folder)
    manifest = Manifest(dict(source.tensors), {}, {}, dict(source.by_rank))
    places: dict[str, tuple[str, int, int]] = {}
    count = meter(report, sum(map(bytes_of, source.tensors.values())))
    try:
        folder.mkdir()
        for rank, own in enumerate(_shares(source, ranks)):
            with contextlib.closing(Writer(folder, f"__{rank}_0.distcp")) as writer:
                for name, start, stop in own:
                    for box in _boxes_of(source.tensors[name], start, stop):
                        chunk = writer.tensor(reader.read(name, box), box)
                        manifest.chunks.setdefault(name, []).append(chunk)
                        count(box.numel * source.tensors[name].dtype.itemsize)
                for name in _numbers_of(source, rank, ranks):
                    manifest.numbers[name] = source.numbers[name]
                    places[name] = writer.number(source.numbers[name])
                manifest.files[writer.name] = writer.end()
        manifest.about = files.about(dst.parent, ranks)
        known = {name: keys.get(name, (name,)) for name in [*manifest.tensors, *manifest.numbers]}
        files.write_metadata(folder, manifest, known, places)
        files.write_manifest(folder, manifest)
        files.publish(folder, dst)
    except BaseException:
        with contextlib.suppress(OSError):
            files.discard(folder)
        raise
    size = sum(size for size, _ in manifest.files.values())
    return Written(dst, len(manifest.tensors), len(manifest.numbers), size, _unread(source))


def _renamed(names: list[str], strip: str) -> dict[str, str]:
    """New names to old ones."""
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


def _safetensors(
    reader: Reader, path: Path, olds: dict[str, str], strip: str, count: Callable[[int], None]
) -> list[str]:
    """Writes tensors to a file of the safetensors format; the names of what it cannot hold."""
    source = reader.source
    kinds = {name: source.tensors[old] for name, old in olds.items() if old in source.tensors}
    plan = safetensors.planned(kinds, sys.maxsize, {})
    (header,), (length,) = plan.headers.values(), plan.lengths.values()
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(header), 0)
        file.truncate(length)
        for name, kind in kinds.items():
            for box in _parts_of(source, olds[name]):
                content = memory(reader.read(olds[name], box))
                _write_box(file.fileno(), content, box, kind, plan.places[name][1])
                count(len(content))
        os.fsync(file.fileno())
    return [old for old in olds.values() if old not in source.tensors]


def _write_box(descriptor: int, content: memoryview, box: Box, kind: Kind, begin: int) -> None:
    length, starts = runs(box, kind.shape)
    size = length * kind.dtype.itemsize
    for i, start in enumerate(starts):
        _write(descriptor, content[i * size : (i + 1) * size], begin + start * kind.dtype.itemsize)


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        done = os.pwrite(descriptor, content, offset)
        content, offset = content[done:], offset + done


def _nested(reader: Reader, path: Path, olds: dict[str, str], strip: str, count: Callable[[int], None]) -> list[str]:
    """Writes nested dicts and lists by torch.save."""
    source, keys = reader.source, _keys(reader.source)
    tree: dict[Any, Any] = {}
    for new, name in olds.items():
        value: Any = source.numbers.get(name)
        if name in source.tensors:
            kind = source.tensors[name]
            value = torch.empty(kind.shape, dtype=kind.dtype)
            for box in _parts_of(source, name):
                value[box.within(whole(kind.shape))].copy_(reader.read(name, box))
                count(box.numel * kind.dtype.itemsize)
        own = keys.get(name, (name,))
        _put(tree, _stripped(own, strip) if name != new else own, name, value)
    with path.open("wb") as file:
        torch.save(_with_lists(tree), file)
        file.flush()
        os.fsync(file.fileno())
    return []


def _stripped(keys: tuple[Any, ...], strip: str) -> tuple[Any, ...]:
    while strip and strip.startswith(f"{keys[0]}."):
        strip, keys = strip[len(f"{keys[0]}.") :], keys[1:]
    return (str(keys[0]).removeprefix(strip), *keys[1:]) if strip else keys


def _put(tree: dict[Any, Any], keys: tuple[Any, ...], name: str, value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise CheckpointError(f"{name} is in {key!r}, which is no dict")
    if keys[-1] in tree:
        raise CheckpointError(f"two entries are {'.'.join(map(str, keys))}, of which one is {name}")
    tree[keys[-1]] = value


def _with_lists(node: Any) -> Any:
    """With lists for dicts whose keys are 0, 1 and so on."""
    if not isinstance(node, dict):
        return node
    made = {key: _with_lists(value) for key, value in node.items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[i] for i in range(len(made))]
    return made


def _parts_of(source: Source, name: str) -> Iterator[Box]:
    """A tensor's parts, those that are large in smaller ones."""
    for chunk in source.chunks[name]:
        yield from parts(chunk.box, 0, chunk.box.numel, source.tensors[name].dtype.itemsize)


def _boxes_of(kind: Kind, start: int, stop: int) -> Iterable[Box]:
    if math.prod(kind.shape) == 0:
        return [whole(kind.shape)]
    return parts(whole(kind.shape), start, stop, kind.dtype.itemsize)


def _owners(source: Source, ranks: int) -> dict[str, int]:
    """Who writes what each rank had its own of."""
    return {f"{name}.rank{one}": one % ranks for name, size in source.by_rank.items() for one in range(size)}


def _shares(source: Source, ranks: int) -> list[list[tuple[str, int, int]]]:
    """For each rank the tensors that it writes something of, from which element to which."""
    owners, load = _owners(source, ranks), [0] * ranks
    shares: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for name, kind in source.tensors.items():
        numel = math.prod(kind.shape)
        if name in owners or bytes_of(kind) < FEW:
            rank = owners.get(name, load.index(min(load)))
            shares[rank].append((name, 0, numel))
            load[rank] += bytes_of(kind) + 4096
            continue
        length = -(-numel // ranks)
        for rank, start in enumerate(range(0, numel, length)):
            shares[rank].append((name, start, min(start + length, numel)))
    return shares


def _numbers_of(source: Source, rank: int, ranks: int) -> list[str]:
    owners = _owners(source, ranks)
    return [name for name in source.numbers if owners.get(name, 0) == rank]


def _keys(source: Source) -> dict[str, tuple[Any, ...]]:
    """Each name as the keys from the root of the tree, where that is known."""
    path = source.folder / files.METADATA
    try:
        content = path.read_bytes()
        known = files.read_manifest(source.folder).files[files.METADATA] if isinstance(source, Ours) else None
        if known is not None and known != (len(content), zlib.crc32(content)):
            raise CheckpointError(f"{path} is damaged: its checksum does not fit")
        return dcp.read_checkpoint_keys(content)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _unread(source: Source) -> list[str]:
    """Names of what is neither tensor, number nor string."""
    if isinstance(source, Ours):
        return []
    _, places = dcp.read_checkpoint_metadata((source.folder / files.METADATA).read_bytes())
    return [name for name in places if name not in source.numbers]
