"""A folder of checkpoints: names that appear when all is on the disk, the newest, and what dead processes left."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint.contents import SCALARS
from shardfn.checkpoint.disk import Flaw, opened, sync, unpickled
from shardfn.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Manifest,
    Source,
    read_manifest,
    torchs,
    write_manifest,
    write_metadata,
)
from shardfn.checkpoint.team import CheckpointError

FILES = re.compile(rf"__\d+_0\.distcp|{re.escape(MANIFEST)}|{re.escape(METADATA)}")
FILE_SYSTEMS = "lost+found"  # is at the root of a disk, where only the superuser may look

_log = logging.getLogger("shardfn")


def intact(folder: Path) -> Manifest | str:
    """The manifest of a checkpoint whose files are all there, in full length; or why it is none.

    Raises:
        CheckpointError: the disk does not say.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError) and not _absent(error.__cause__):
            raise
        return str(error)
    for name, (size, _) in manifest.files.items():
        there = seen(folder / name)
        if there is None or there.st_size != size:
            return f"{folder / name} {'is gone' if there is None else f'has {there.st_size} of {size} bytes'}"
    return manifest


def seen(path: Path) -> os.stat_result | None:
    """What is there, a link followed; None if there is nothing.

    Raises:
        CheckpointError: the disk does not say. To take that for nothing would begin a run anew.
    """
    try:
        return path.stat()
    except OSError as error:
        if _absent(error):
            return None
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _absent(error: OSError) -> bool:
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one, whole or not, of this module or of torch.distributed.checkpoint."""
    return seen(folder / MANIFEST) is not None or seen(folder / METADATA) is not None


def names_in(root: Path) -> list[str]:
    """The names in a folder, and those that checkpoints had which a process was replacing when it died; sorted.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        found = os.listdir(root)
    except OSError as error:
        if _absent(error):
            return []
        raise CheckpointError(f"{root} cannot be read: {error.strerror}") from error
    replaced = [name[1:].removesuffix(".replaced") for name in found if name[:1] == "." and name.endswith(".replaced")]
    return sorted({*replaced, *(name for name in found if not name.startswith("."))} - {FILE_SYSTEMS})


def manifests(root: Path) -> dict[Path, Manifest | str]:
    """Of the checkpoints in a folder, oldest first; and why those that are torn are none.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    found = {
        path: intact(restored(path)) for path in map(root.joinpath, names_in(root)) if is_checkpoint(restored(path))
    }
    return dict(sorted(found.items(), key=lambda one: (_number(one[1]), one[0])))


def _number(manifest: Manifest | str) -> int:
    return 0 if isinstance(manifest, str) else manifest.about["number"]


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints in a folder that are whole, oldest first. Raises as `manifests` does."""
    return [path for path, manifest in manifests(root).items() if not isinstance(manifest, str)]


def found_at(path: Path, also: Sequence[str] = ()) -> Path:
    """The folder of a checkpoint, whole or not; `also` is what else was looked for in it.

    Raises:
        CheckpointError: there is none.
    """
    folder = restored(path)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    if not is_checkpoint(folder):
        inside = checkpoints(folder)
        hint = f"; there are {len(inside)} in it: {inside[-1]}, which latest() finds, is the newest" if inside else ""
        lacks = " nor ".join((MANIFEST, METADATA, *also))
        raise CheckpointError(f"{path} is not a checkpoint: it has neither {lacks}{hint}")
    return folder


def source_of(path: Path, also: Sequence[str] = ()) -> Source:
    """A checkpoint, to read from; `also` is what else was looked for.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = found_at(path, also)
    if (folder / MANIFEST).exists():
        return Source(**vars(read_manifest(folder)), folder=folder)
    found = torchs(folder)
    for name, (file, offset, length) in found.places.items():
        # What is neither is not for trees to have; if one wants it all the same, it is missing.
        with opened(folder / file) as descriptor, contextlib.suppress(Flaw):
            value = unpickled(descriptor, offset, length)
            if type(value) in SCALARS:
                found.numbers[name] = value
                continue
        found.others[name] = "neither a tensor nor a number or string"
    return found


def aside(path: Path, what: str) -> Path:
    """Where something that belongs to a checkpoint is while it is not, or no more, one."""
    return path.parent / f".{path.name}.{what}"


def publish(folder: Path, path: Path) -> None:
    """Gives a folder its name, and what had it another one until then."""
    sync(folder)
    old = aside(path, "replaced")
    if seen(path) is not None:
        discard(old)
        path.rename(old)
    folder.rename(path)
    sync(path.parent)
    spare(old)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where a file is written that gets its name when the block ends well, and all of it is on the disk."""
    unfinished = aside(path, "writing")
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


@contextlib.contextmanager
def discarding(folder: Path) -> Iterator[None]:
    """Discards a folder that is not finished if the block fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # what failed first is what is to be known
            discard(folder)
        raise


def completed(folder: Path, path: Path, manifest: Manifest, keys: dict[str, tuple[Any, ...]]) -> None:
    """Makes a folder in which every file of tensors is a checkpoint, under its name.

    Args:
        folder: where the files are.
        path: of the checkpoint.
        manifest: what is in them.
        keys: names as the keys from the root of the tree; one that is not there is a key itself.
    """
    write_metadata(folder, manifest, {name: keys.get(name, (name,)) for name in [*manifest.tensors, *manifest.numbers]})
    write_manifest(folder, manifest)
    publish(folder, path)


def restored(path: Path) -> Path:
    """The path, or where its checkpoint is if a process died while it was replaced."""
    old = aside(path, "replaced")
    return old if seen(path) is None and seen(old) is not None else path


def discard(folder: Path) -> None:
    """Deletes a folder, whose name nobody takes for a checkpoint's meanwhile."""
    folder = restored(folder)
    if seen(folder) is None:
        return
    if not folder.name.startswith("."):
        away = aside(folder, "deleting")
        discard(away)
        folder = folder.rename(away)
    shutil.rmtree(folder)


def spare(folder: Path) -> None:
    """Discards what nobody needs; where that fails, nothing is lost but room."""
    try:
        discard(folder)
    except OSError as error:
        _log.warning("%s could not be deleted, and stays: %s", folder, error)


def tidy(root: Path) -> None:
    """Deletes what dead processes left; a folder with anything else in it than a checkpoint has is somebody's own."""
    for name in os.listdir(root):
        folder = root / name
        if name[:1] == "." and folder.suffix in (".writing", ".deleting") and not folder.is_symlink() and _left(folder):
            spare(folder)


def _left(folder: Path) -> bool:
    try:
        return folder.is_dir() and all(map(FILES.fullmatch, os.listdir(folder)))
    except OSError as error:
        _log.warning("%s could not be looked at, and stays: %s", folder, error)
        return False


def older(root: Path, keep: int | None) -> list[Path]:
    """All but the newest `keep` checkpoints in a folder. A link is nobody's to follow, or to delete."""
    own = [path for path in checkpoints(root) if not path.is_symlink()]
    return own[:-keep] if keep else []


def about(root: Path, ranks: int) -> dict[str, Any]:
    """What a new checkpoint in this folder says of itself."""
    number = 1 + max(map(_number, manifests(root).values()), default=0)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"number": number, "made": made, "ranks": ranks, "torch": torch.__version__}
