"""Whether a checkpoint is as it was written: every byte, by the checksums in its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardfn.checkpoint import files
from shardfn.checkpoint.boxes import Box, whole
from shardfn.checkpoint.contents import Kind
from shardfn.checkpoint.files import Chunk, Manifest
from shardfn.checkpoint.reading import Report, checksum, described, meter, misfits, silent, span
from shardfn.checkpoint.sources import Source, opened
from shardfn.checkpoint.team import CheckpointError
from shardfn.compat import dcp

Count = Callable[[int], None]


@dataclass(frozen=True)
class Damage:
    """Bytes `start` to `stop` of a file, the entries that are in them, and what is wrong."""

    file: str
    start: int
    stop: int
    entries: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        path: of the checkpoint.
        format: `"shardfn"`; or `"torch"`, whose checksums do not cover all bytes.
        entries: tensors, numbers and strings.
        files: how many, as they should be.
        bytes: in all of them.
        damage: everything that is wrong.
    """

    path: Path
    format: str
    entries: int
    files: int
    bytes: int
    damage: list[Damage]


def verify(path: Path, report: Report = silent) -> Verdict:
    """Reads every byte of a checkpoint, and compares.

    Of torch.distributed.checkpoint's it reads every item, which must have its shape, and fit the checksums that
    `torch.save` keeps in it, of all but names and filling.

    Raises:
        CheckpointError: this is no checkpoint.
    """
    folder = found_at(path)
    if not (folder / files.MANIFEST).exists():
        return _verify_torchs(path, folder, report)
    try:
        manifest = files.read_manifest(folder)
    except CheckpointError as error:
        size = (folder / files.MANIFEST).stat().st_size
        return Verdict(path, "shardfn", 0, 1, size, [Damage(files.MANIFEST, 0, size, (), str(error))])
    held: dict[str, list[tuple[Chunk, str]]] = {}
    for name, chunks in manifest.chunks.items():
        for chunk in chunks:
            held.setdefault(chunk.file, []).append((chunk, name))
    total = sum(size for size, _ in manifest.files.values())
    count = meter(report, total)
    damage: list[Damage] = []
    for file in sorted({*manifest.files, *held}):
        damage += _of_file(folder, file, manifest, sorted(held.get(file, []), key=lambda one: one[0].offset), count)
    known = {*manifest.files, files.MANIFEST}
    damage += [
        Damage(one.name, 0, one.stat().st_size, (), "the manifest does not know this file")
        for one in sorted(folder.iterdir())
        if one.name not in known
    ]
    damage += _of_parts(files.MANIFEST, manifest.tensors, manifest.chunks)
    entries = len(manifest.tensors) + len(manifest.numbers)
    return Verdict(path, "shardfn", entries, len(known), total + (folder / files.MANIFEST).stat().st_size, damage)


def found_at(path: Path) -> Path:
    """The folder of a checkpoint, whole or not.

    Raises:
        CheckpointError: this is no checkpoint.
    """
    folder = files.restored(path)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    if not files.is_checkpoint(folder):
        inside = files.checkpoints(folder)
        hint = f"; it has {len(inside)} in it, such as {inside[-1]}" if inside else ""
        raise CheckpointError(f"{path} is no checkpoint: it has neither {files.MANIFEST} nor {files.METADATA}{hint}")
    return folder


def flaw_of(kind: Kind, chunks: Sequence[Chunk]) -> str:
    """Why parts do not make up a tensor; nothing if they do."""
    all_of_it = whole(kind.shape)
    if not chunks:
        return "it has no parts"
    for chunk in chunks:
        inside = len(chunk.box.sizes) == len(kind.shape) and all(
            at >= 0 and at + n <= of for at, n, of in zip(chunk.box.offsets, chunk.box.sizes, kind.shape, strict=True)
        )
        if not inside:
            return f"a part at {list(chunk.box.offsets)} of sizes {list(chunk.box.sizes)} is not in {list(kind.shape)}"
    live: list[tuple[int, Box]] = []  # boxes that reach this far
    spans = sorted((span(chunk.box, kind.shape), i) for i, chunk in enumerate(chunks) if chunk.box.numel)
    for (start, stop), i in spans:
        live = [(end, one) for end, one in live if end > start]
        box = chunks[i].box
        twice = next((one for _, one in live if one.common(box)), None)
        if twice is not None:
            return f"the parts at {list(twice.offsets)} and {list(box.offsets)} have some elements both"
        live.append((stop, box))
    missing = all_of_it.numel - sum(chunk.box.numel for chunk in chunks)
    return f"{missing} of {all_of_it.numel} elements are in no part" if missing else ""


def check_parts(source: Source, names: Iterable[str]) -> None:
    """That the parts of each of these tensors make it up.

    Raises:
        CheckpointError: of the first of which they do not.
    """
    for name in names:
        flaw = flaw_of(source.tensors[name], source.chunks.get(name, []))
        if flaw:
            raise CheckpointError(f"{source.folder} is damaged, in {name}: {flaw}")


@dataclass(frozen=True)
class _Segment:
    """Bytes of a file between two places where its running checksum is known."""

    start: int
    stop: int
    before: int
    after: int
    entries: tuple[str, ...]


def _segments(size: int, crc: int, held: list[tuple[Chunk, str]]) -> Iterator[_Segment]:
    at = before = 0
    for chunk, name in held:
        if (chunk.offset, chunk.before) != (at, before):
            yield _Segment(at, chunk.offset, before, chunk.before, ())
        at, before = chunk.offset + chunk.length, chunk.after
        yield _Segment(chunk.offset, at, chunk.before, chunk.after, (name,))
    if (at, before) != (size, crc):
        yield _Segment(at, size, before, crc, ())


def _of_file(
    folder: Path, file: str, manifest: Manifest, held: list[tuple[Chunk, str]], count: Count
) -> Iterator[Damage]:
    names = tuple(dict.fromkeys(name for _, name in held))
    if file not in manifest.files:
        yield Damage(file, 0, 0, names, "the manifest has parts in it, but not the file")
        return
    size, crc = manifest.files[file]
    try:
        with opened(folder / file) as descriptor:
            there = (folder / file).stat().st_size
            gone: list[str] = []
            for segment in _segments(size, crc, held):
                if segment.stop > there:
                    gone += segment.entries
                elif segment.start > segment.stop:
                    yield Damage(file, segment.stop, segment.start, segment.entries, "parts lie one over another")
                elif checksum(descriptor, segment.start, segment.stop, segment.before, count) != segment.after:
                    what = "its checksum does not fit" if segment.entries else "no tensor; its checksum does not fit"
                    yield Damage(file, segment.start, segment.stop, segment.entries, what)
            if there < size:
                count(size - there)
                yield Damage(file, there, size, tuple(dict.fromkeys(gone)), f"it ends after {there} of {size} bytes")
            if there > size:
                yield Damage(file, size, there, (), f"it goes on after its {size} bytes")
    except CheckpointError as error:
        count(size)
        yield Damage(file, 0, size, names, str(error))


def _of_parts(file: str, tensors: dict[str, Kind], chunks: dict[str, list[Chunk]]) -> Iterator[Damage]:
    for name, kind in tensors.items():
        flaw = flaw_of(kind, chunks.get(name, []))
        if flaw:
            yield Damage(file, 0, 0, (name,), flaw)


def _verify_torchs(path: Path, folder: Path, report: Report) -> Verdict:
    content = (folder / files.METADATA).read_bytes()
    try:
        entries, items, damage = _items(content)
    except Exception as error:  # a damaged pickle raises almost anything
        what = f"it cannot be read: {error or type(error).__name__}"
        return Verdict(path, "torch", 0, 1, len(content), [Damage(files.METADATA, 0, len(content), (), what)])
    total = sum(length for _, _, length, _, _ in items)
    count = meter(report, total)
    for file, offset, length, name, box in items:
        what = _flaw_of_item(folder / file, offset, length, box)
        count(length)
        if what:
            damage.append(Damage(file, offset, offset + length, (name,), what))
    return Verdict(path, "torch", entries, len({file for file, *_ in items}) + 1, total + len(content), damage)


def _items(content: bytes) -> tuple[int, list[tuple[str, int, int, str, Box | None]], list[Damage]]:
    """How many entries there are, where their items are, of which box of a tensor, and what they lack."""
    found, places = dcp.read_checkpoint_metadata(content)
    items: list[tuple[str, int, int, str, Box | None]] = [(*place, name, None) for name, place in places.items()]
    damage: list[Damage] = []
    for name, (dtype, shape, parts) in found.items():
        chunks = [Chunk(Box(tuple(at), tuple(sizes)), *place) for at, sizes, *place in parts]
        items += [(one.file, one.offset, one.length, name, one.box) for one in chunks]
        damage += _of_parts(files.METADATA, {name: Kind(dtype, tuple(shape))}, {name: chunks})
    return len(found) + len(places), sorted(items, key=lambda one: one[:3]), damage


def _flaw_of_item(path: Path, offset: int, length: int, box: Box | None) -> str:
    try:
        with opened(path) as descriptor:
            if path.stat().st_size < offset + length:
                return f"the file ends after {path.stat().st_size} bytes"
            wrong = misfits(descriptor, offset, length)
            if wrong:
                return f"its own checksum does not fit, in {', '.join(wrong)}"
            if box is None:
                return ""  # it may be anything, and is not unpickled
            value = described(descriptor, offset, length)
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # a damaged item raises almost anything
        return f"it cannot be read: {error}"
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != box.sizes:
        return f"it is no tensor of sizes {list(box.sizes)}"
    return ""
