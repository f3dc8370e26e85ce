"""Folders of checkpoints: publishing atomically, finding the newest, and cleaning up after dead processes."""

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
from shardfn.checkpoint.disk import Flaw, open_readonly, sync, unpickled
from shardfn.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Manifest,
    TensorSource,
    read_manifest,
    torchs,
    write_manifest,
    write_metadata,
)
from shardfn.checkpoint.team import CheckpointError

FILES = re.compile(rf"__\d+_0\.distcp|{re.escape(MANIFEST)}|{re.escape(METADATA)}")
FILE_SYSTEMS = "lost+found"  # at the root of a disk, readable by the superuser only

_log = logging.getLogger("shardfn")


def intact(folder: Path) -> Manifest | str:
    """The manifest of a checkpoint whose files all exist at full length; otherwise the reason as text.

    Raises:
        CheckpointError: the disk cannot be read.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError) and not _absent(error.__cause__):
            raise
        return str(error)
    for name, (size, _) in manifest.files.items():
        status = path_status(folder / name)
        if status is None or status.st_size != size:
            return f"{folder / name} {'is gone' if status is None else f'has {status.st_size} of {size} bytes'}"
    return manifest


def path_status(path: Path) -> os.stat_result | None:
    """The status of a path, following links; None if nothing exists there.

    Raises:
        CheckpointError: the disk cannot be read. Taking that for nothing would begin the run again.
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
    """Whether a folder is a checkpoint, complete or not, of this module or of torch.distributed.checkpoint."""
    return path_status(folder / MANIFEST) is not None or path_status(folder / METADATA) is not None


def names_in(root: Path) -> list[str]:
    """The sorted names in a folder, including checkpoints that a process was replacing when it died.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        every = os.listdir(root)
    except OSError as error:
        if _absent(error):
            return []
        raise CheckpointError(f"{root} cannot be read: {error.strerror}") from error
    replaced = [name[1:].removesuffix(".replaced") for name in every if name[:1] == "." and name.endswith(".replaced")]
    return sorted({*replaced, *(name for name in every if not name.startswith("."))} - {FILE_SYSTEMS})


def manifests(root: Path) -> dict[Path, Manifest | str]:
    """The manifests of the checkpoints in a folder, oldest first; for torn ones the reason as text.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    by_path = {
        path: intact(restored(path)) for path in map(root.joinpath, names_in(root)) if is_checkpoint(restored(path))
    }
    return dict(sorted(by_path.items(), key=lambda pair: (_checkpoint_number(pair[1]), pair[0])))


def _checkpoint_number(manifest: Manifest | str) -> int:
    return 0 if isinstance(manifest, str) else manifest.about["number"]


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first. Raises as `manifests` does."""
    return [path for path, manifest in manifests(root).items() if not isinstance(manifest, str)]


def found_at(path: Path, also: Sequence[str] = ()) -> Path:
    """The folder of a checkpoint, complete or not.

    Args:
        path: of the checkpoint.
        also: other files that were looked for, for the message.

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


def source_of(path: Path, also: Sequence[str] = ()) -> TensorSource:
    """A checkpoint to read from; `also` as for `found_at`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = found_at(path, also)
    if (folder / MANIFEST).exists():
        return TensorSource(**vars(read_manifest(folder)), folder=folder)
    source = torchs(folder)
    for name, (file, offset, length) in source.places.items():
        # Other values cannot be loaded into a tree; if the tree wants one, it is reported as missing.
        with open_readonly(folder / file) as descriptor, contextlib.suppress(Flaw):
            value = unpickled(descriptor, offset, length)
            if type(value) in SCALARS:
                source.numbers[name] = value
                continue
        source.others[name] = "neither a tensor nor a number or string"
    return source


def staging_path(path: Path, suffix: str) -> Path:
    """The hidden path at which a checkpoint is written, or waits to be replaced or deleted."""
    return path.parent / f".{path.name}.{suffix}"


def publish(folder: Path, path: Path) -> None:
    """Renames a finished folder to `path`, and discards what was there before."""
    sync(folder)
    old = staging_path(path, "replaced")
    if path_status(path) is not None:
        discard(old)
        path.rename(old)
    folder.rename(path)
    sync(path.parent)  # before the old one goes, so that one of them outlives a crash
    spare(old)


@contextlib.contextmanager
def replacing(path: Path, suffix: str = "writing") -> Iterator[Path]:
    """A context that yields a temporary path, with a suffix, and renames the synced file to `path`."""
    unfinished = staging_path(path, suffix)
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


@contextlib.contextmanager
def discarding(folder: Path) -> Iterator[None]:
    """A context that discards an unfinished folder if its block fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            discard(folder)
        raise


def completed(folder: Path, path: Path, manifest: Manifest, keys: dict[str, tuple[Any, ...]]) -> None:
    """Adds manifest and metadata to a folder of finished tensor files, and publishes it.

    Args:
        folder: where the files are.
        path: of the checkpoint.
        manifest: describes the files.
        keys: names as keys from the root of the tree; a name that is not there is its own key.
    """
    write_metadata(folder, manifest, {name: keys.get(name, (name,)) for name in [*manifest.tensors, *manifest.numbers]})
    write_manifest(folder, manifest)
    publish(folder, path)


def restored(path: Path) -> Path:
    """The path, or the one to which its checkpoint was moved by a process that died while replacing it."""
    old = staging_path(path, "replaced")
    return old if path_status(path) is None and path_status(old) is not None else path


def discard(folder: Path) -> None:
    """Deletes a folder, after renaming it so that it never counts as a checkpoint while being deleted."""
    folder = restored(folder)
    if path_status(folder) is None:
        return
    if not folder.name.startswith("."):
        doomed = staging_path(folder, "deleting")
        discard(doomed)
        folder = folder.rename(doomed)
    shutil.rmtree(folder)


def spare(folder: Path) -> None:
    """Discards a superfluous folder; a failure is only logged."""
    try:
        discard(folder)
    except OSError as error:
        _log.warning("%s could not be deleted, and stays: %s", folder, error)


def tidy(root: Path) -> None:
    """Deletes what dead processes left. A folder that holds any other file is assumed to be the user's, and stays."""
    for name in os.listdir(root):
        folder = root / name
        if (
            name[:1] == "."
            and folder.suffix in (".writing", ".deleting")
            and not folder.is_symlink()
            and _is_ours(folder)
        ):
            spare(folder)


def _is_ours(folder: Path) -> bool:
    try:
        return folder.is_dir() and all(map(FILES.fullmatch, os.listdir(folder)))
    except OSError as error:
        _log.warning("%s could not be looked at, and stays: %s", folder, error)
        return False


def older(root: Path, keep: int | None) -> list[Path]:
    """All but the newest `keep` checkpoints in a folder. Links are neither followed nor deleted."""
    paths = [path for path in checkpoints(root) if not path.is_symlink()]
    return paths[:-keep] if keep else []


def about(root: Path, ranks: int, exact: int = 0) -> dict[str, Any]:
    """Facts about a new checkpoint in this folder: number, time, ranks, torch version; `setting`, if it is exact."""
    number = 1 + max(map(_checkpoint_number, manifests(root).values()), default=0)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"number": number, "made": created, "ranks": ranks, "torch": torch.__version__} | setting(exact)


def setting(exact: int) -> dict[str, Any]:
    """The facts apart from the program that decide the bits of an exact run, under `"exact"`; empty for others."""
    if not exact:
        return {}
    backends: Any = torch.backends
    return {
        "exact": {
            "parts": exact,
            "torch": torch.__version__,
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "",
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "workspace of cuBLAS": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
            "products of float32": {
                "cuBLAS": backends.cuda.matmul.fp32_precision,
                "cuDNN": backends.cudnn.conv.fp32_precision,
                "oneDNN": backends.mkldnn.matmul.fp32_precision,
            },
        }
    }
