"""Verifies every byte of a checkpoint against the checksums in its manifest."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardfn.checkpoint.contents import TensorType
from shardfn.checkpoint.disk import Flaw, checked_records, open_readonly
from shardfn.checkpoint.folders import found_at
from shardfn.checkpoint.manifest import MANIFEST, METADATA, Chunk, Manifest, read_manifest, torchs
from shardfn.checkpoint.reading import OTHER, Report, ReusedMemory, blocks, elements, located, meter, silent
from shardfn.checkpoint.team import CheckpointError
from shardfn.local_paths import local_path
from shardfn.shards.boxes import full_box
from shardfn.tracebacks import api_boundary

Count = Callable[[int], None]


@dataclass(frozen=True)
class Damage:
    """Bytes `start` to `stop` of a file, the names of the entries in them, and what is wrong."""

    file: str
    start: int
    stop: int
    entries: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        path: of the checkpoint.
        format: `"shardfn"`; or `"torch"`, whose checksums do not cover all bytes.
        entries: number of tensors, numbers and strings.
        files: number of files that there should be.
        bytes: in all of them.
        damage: everything that is wrong.
    """

    path: Path
    format: str
    entries: int
    files: int
    bytes: int
    damage: list[Damage]


@api_boundary
def verify(path: str | os.PathLike[str], report: Report = silent) -> VerifyReport:
    """Reads every byte of a checkpoint and compares checksums, in one process.

    Of a torch.distributed.checkpoint it reads every item, which must have the right shape, and match the checksums that
    `torch.save` keeps in it, which cover all but names and padding.

    Args:
        path: of the checkpoint.
        report: called with bytes done and bytes in all.

    Returns:
        A `VerifyReport`; its `damage` is empty if the checkpoint is intact.

    Raises:
        CheckpointError: this is not a checkpoint.
    """
    path = local_path(path, "checkpoint.verify: path")
    folder = found_at(path)
    if not (folder / MANIFEST).exists():
        return _verify_torchs(path, folder, report)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        size = (folder / MANIFEST).stat().st_size
        return VerifyReport(path, "shardfn", 0, 1, size, [Damage(MANIFEST, 0, size, (), str(error))])
    parts: dict[str, list[tuple[Chunk, str]]] = {}
    for name, chunks in manifest.chunks.items():
        for chunk in chunks:
            parts.setdefault(chunk.file, []).append((chunk, name))
    total = sum(size for size, _ in manifest.files.values())
    count = meter(report, total)
    damage: list[Damage] = []
    for file in sorted({*manifest.files, *parts}):
        damage += _of_file(folder, file, manifest, sorted(parts.get(file, []), key=lambda part: part[0].offset), count)
    expected = {*manifest.files, MANIFEST}
    damage += [
        Damage(extra.name, 0, extra.stat().st_size, (), "the manifest does not know this file")
        for extra in sorted(folder.iterdir())
        if extra.name not in expected
    ]
    damage += _of_parts(MANIFEST, manifest)
    entries = len(manifest.tensors) + len(manifest.numbers)
    return VerifyReport(path, "shardfn", entries, len(expected), total + (folder / MANIFEST).stat().st_size, damage)


def _between(size: int, crc: int, parts: list[tuple[Chunk, str]]) -> Iterator[tuple[Chunk, tuple[str, ...]]]:
    """Splits a file into its parts and the chunks between them; yields each with the names of the entries in it."""
    position = before = 0
    for chunk, name in parts:
        if (chunk.offset, chunk.before) != (position, before):
            yield Chunk(chunk.box, chunk.file, position, chunk.offset - position, 0, before, chunk.before), ()
        position, before = chunk.stop, chunk.after or 0
        yield chunk, (name,)
    if (position, before) != (size, crc):
        yield Chunk(full_box(()), "", position, size - position, 0, before, crc), ()


def _of_file(
    folder: Path, file: str, manifest: Manifest, parts: list[tuple[Chunk, str]], count: Count
) -> Iterator[Damage]:
    names = tuple(dict.fromkeys(name for _, name in parts))
    if file not in manifest.files:
        yield Damage(file, 0, 0, names, "the manifest has parts in it, but not the file")
        return
    size, crc = manifest.files[file]
    try:
        with open_readonly(folder / file) as descriptor:
            actual_size = (folder / file).stat().st_size
            gone: list[str] = []
            for chunk, entries in _between(size, crc, parts):
                if chunk.stop > actual_size:
                    gone += entries
                    continue
                if chunk.length < 0:
                    yield Damage(file, chunk.stop, chunk.offset, entries, "parts overlap")
                    continue
                crc = chunk.before
                for _, content in blocks(descriptor, chunk.offset, chunk.stop, chunk.offset, ReusedMemory()):
                    crc = zlib.crc32(content, crc)
                    count(len(content))
                if crc != chunk.after:
                    yield Damage(file, chunk.offset, chunk.stop, entries, OTHER if entries else f"no tensor; {OTHER}")
            if actual_size < size:
                count(size - actual_size)
                problem = f"it ends after {actual_size} of {size} bytes"
                yield Damage(file, actual_size, size, tuple(dict.fromkeys(gone)), problem)
            if actual_size > size:
                yield Damage(file, size, actual_size, (), f"it goes on after its {size} bytes")
    except (CheckpointError, Flaw) as error:
        count(size)
        yield Damage(file, 0, size, names, str(error))


def _of_parts(file: str, manifest: Manifest) -> Iterator[Damage]:
    for name in manifest.tensors:
        flaw = manifest.flaw(name)
        if flaw:
            yield Damage(file, 0, 0, (name,), flaw)


def _verify_torchs(path: Path, folder: Path, report: Report) -> VerifyReport:
    size = (folder / METADATA).stat().st_size
    try:
        source = torchs(folder)
    except CheckpointError as error:
        return VerifyReport(path, "torch", 0, 1, size, [Damage(METADATA, 0, size, (), str(error))])
    damage = list(_of_parts(METADATA, source))
    items: list[tuple[Chunk, str, TensorType | None]] = [
        (Chunk(full_box(()), *place), name, None) for name, place in source.places.items()
    ]
    items += [(chunk, name, source.tensors[name]) for name, chunks in source.chunks.items() for chunk in chunks]
    total = sum(chunk.length for chunk, *_ in items)
    count, buffer = meter(report, total), ReusedMemory()
    for chunk, name, kind in sorted(items, key=lambda item: (item[0].file, item[0].offset, item[1])):
        flaw = _flaw_of_item(folder, chunk, kind, buffer)
        count(chunk.length)
        if flaw:
            damage.append(Damage(chunk.file, chunk.offset, chunk.stop, (name,), flaw))
    entries, files = len(source.tensors) + len(source.places), {chunk.file for chunk, *_ in items}
    return VerifyReport(path, "torch", entries, len(files) + 1, total + size, damage)


def _flaw_of_item(folder: Path, chunk: Chunk, kind: TensorType | None, buffer: ReusedMemory) -> str:
    """The fault of a part of a tensor, or of another item, which is not unpickled; "" if none."""
    try:
        with open_readonly(folder / chunk.file) as descriptor:
            size = (folder / chunk.file).stat().st_size
            if size < chunk.stop:
                return f"the file ends after {size} bytes"
            if kind is None:
                checked_records(descriptor, chunk.offset, chunk.length)
            else:
                for _ in elements(descriptor, chunk, kind, located(descriptor, chunk, kind, torchs=True), buffer):
                    pass
    except (CheckpointError, Flaw) as error:
        return str(error)
    return ""
