"""Which file a rank's values go to, and how tensors get to the tier that a placement asks for."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from shardfn.compat import functorch
from shardfn.mesh.axes import device_of, grid_of, per_mesh
from shardfn.mesh.planned import planned
from shardfn.tiers import copying, tensors
from shardfn.tiers.tensors import File
from shardfn.tiers.transfers import reading

SCRATCH = "SHARDFN_SCRATCH"


def file_of(mesh: DeviceMesh, kind: str) -> File:
    """This rank's file for one kind of values.

    Raises:
        ValueError: no scratch folder is configured.
        OSError: the file cannot be made.
    """
    return per_mesh(mesh, ("file", kind), lambda: File(_folder(mesh, kind), kind))


def _folder(mesh: DeviceMesh, kind: str) -> str:
    folders = (per_mesh(m, "scratch", str) for m in (mesh, *grid_of(mesh).meshes()))  # or of an equal mesh
    folder: str = next(filter(None, folders), os.environ.get(SCRATCH) or (tempfile.gettempdir() if planned() else ""))
    if not folder:
        raise ValueError(
            f"{kind} are to be on disk, but the folder is unknown: pass a folder on a local disk, make_mesh(..., "
            f"scratch=folder), or set {SCRATCH}"
        )
    return os.path.abspath(os.path.expanduser(folder))


def new(shape: tuple[int, ...], dtype: torch.dtype, tier: str, kind: str, mesh: DeviceMesh) -> Tensor:
    """Zeros on a tier.

    Raises:
        ValueError: the tier is disk, and no scratch folder is configured.
        OSError: the disk has no room.
    """
    if tier == "disk":
        return tensors.empty(shape, dtype, file_of(mesh, kind), zeros=True)
    if tier == "host" and mesh.device_type != "cpu":
        return torch.zeros(shape, dtype=dtype, pin_memory=True, device="cpu")
    return torch.zeros(shape, dtype=dtype, device=device_of(mesh))


def is_on_tier(x: Tensor, tier: str, mesh: DeviceMesh) -> bool:
    """Whether a tensor is on a tier."""
    if tier == "disk":
        return x.numel() == 0 or tensors.place_of(x) is not None
    device = torch.device("cpu") if tier == "host" else device_of(mesh)
    return x.device == device and tensors.place_of(x) is None


def put(x: Tensor, tier: str, kind: str, mesh: DeviceMesh) -> Tensor:
    """A tensor's values on a tier: the tensor itself if it is there, otherwise a copy."""
    if is_on_tier(x, tier, mesh):
        return x
    shape = tuple(x.shape)
    if tier == "disk":
        placed = tensors.empty(shape, x.dtype, file_of(mesh, kind))
    else:
        placed = new(shape, x.dtype, tier, kind, mesh)
    copying.copy_(placed, x.detach())
    return placed


def plain(x: object) -> bool:
    """Whether a value is a tensor with values, outside torch.func transforms and not on the meta device."""
    return isinstance(x, Tensor) and x.device.type != "meta" and not functorch.inside_transform()


def on_mesh_device(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor's values on the mesh's device, differentiably; the tensor itself if it is there."""
    device = device_of(mesh)
    if x.device.type == "meta" or (x.device == device and tensors.place_of(x) is None):
        return x
    if plain(x) and not (torch.is_grad_enabled() and x.requires_grad):
        x = copying.read(x)
    return x.to(device, non_blocking=True) if x.device != device else x


@contextlib.contextmanager
def in_memory(x: Tensor) -> Iterator[Tensor]:
    """A tensor's values in memory while the block runs; the tensor itself if it is not on disk."""
    under_way = reading(x)
    if under_way is None:
        yield x
        return
    try:
        under_way.wait()
        yield under_way.values
    finally:
        under_way.give_back()


_intended = WeakTensorKeyDictionary()


def intend(x: Tensor, tier: str) -> None:
    """Records the tier on which the values of a tensor without values would be."""
    _intended[x] = tier


def intended(x: Tensor) -> str | None:
    """The tier recorded by `intend`, or None."""
    tier: str | None = _intended.get(x)
    return tier
