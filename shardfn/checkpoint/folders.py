"""A folder of checkpoints: names that appear when all is on the disk, the newest, and what dead processes left."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from shardfn.checkpoint.disk import sync
from shardfn.checkpoint.manifest import MANIFEST, METADATA, Manifest, read_manifest, write_manifest, write_metadata
from shardfn.checkpoint.team import CheckpointError


def intact(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint whose files are all there, in full length; None for anything else."""
    try:
        manifest = read_manifest(folder)
        whole = all((folder / name).stat().st_size == size for name, (size, _) in manifest.files.items())
    except (CheckpointError, OSError):
        return None
    return manifest if whole else None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one, whole or not, of this module or of torch.distributed.checkpoint."""
    return (folder / MANIFEST).exists() or (folder / METADATA).exists()


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints in a folder that are whole, oldest first."""
    if not root.is_dir():
        return []
    found = []
    replaced = (folder.name[1:].removesuffix(".replaced") for folder in root.glob(".*.replaced"))
    names = {folder.name for folder in root.iterdir() if not folder.name.startswith(".") and folder.is_dir()}
    for path in (root / name for name in names | set(replaced)):
        manifest = intact(restored(path))
        if manifest is not None:
            found.append((manifest.about["number"], path))
    return [folder for _, folder in sorted(found)]


def aside(path: Path, what: str) -> Path:
    """Where something that belongs to a checkpoint is while it is not, or no more, one."""
    return path.parent / f".{path.name}.{what}"


def publish(folder: Path, path: Path) -> None:
    """Gives a folder its name, and what had it another one until then."""
    sync(folder)
    old = aside(path, "replaced")
    if path.exists():
        discard(old)
        path.rename(old)
    folder.rename(path)
    sync(path.parent)
    discard(old)


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
    return old if not path.exists() and old.exists() else path


def discard(folder: Path) -> None:
    """Deletes a folder, whose name nobody takes for a checkpoint's meanwhile."""
    folder = restored(folder)
    if not folder.exists():
        return
    if not folder.name.startswith("."):
        away = aside(folder, "deleting")
        discard(away)
        folder = folder.rename(away)
    shutil.rmtree(folder)


def tidy(root: Path, keep: int | None) -> None:
    """Deletes what dead processes left, and all but the newest `keep` checkpoints."""
    for folder in root.glob(".*.*"):
        if folder.suffix in (".writing", ".deleting") and folder.is_dir():
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
    for folder in checkpoints(root)[:-keep] if keep else []:
        discard(folder)


def about(root: Path, ranks: int) -> dict[str, Any]:
    """What a new checkpoint in this folder says of itself."""
    known = [intact(restored(path)) for path in checkpoints(root)]
    number = 1 + max((one.about["number"] for one in known if one is not None), default=0)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"number": number, "made": made, "ranks": ranks, "torch": torch.__version__}
