"""Digests and descriptions of batches, to compare them between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from shardfn.transforms.cutting import written

TELLING = 8  # equal distinct rows on two ranks from which on it is no coincidence


def digest(tree: Any) -> int:
    """A 56-bit digest of a pytree's structure and of its leaves' dtypes, shapes and values.

    Of a leaf of an unknown type, only the type counts. Two trees that differ have the same digest with probability
    2^-56.
    """
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    hasher = hashlib.blake2b(str(structure).encode(), digest_size=7)
    for leaf in leaves:
        hasher.update(described(leaf).encode())
        hasher.update(_bytes(leaf))
    return int.from_bytes(hasher.digest(), "big")


def described(leaf: Any) -> str:
    """Dtype and shape of a tensor or array; the type of anything else."""
    if isinstance(leaf, Tensor) and leaf.is_nested:  # its rows have sizes of their own, or symbolic ones
        return f"{str(leaf.dtype).removeprefix('torch.')} [{', '.join([str(leaf.size(0)), *'*' * (leaf.ndim - 1)])}]"
    if isinstance(leaf, (Tensor, np.ndarray)):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return type(leaf).__name__


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor) and _in_parts(leaf):
        return b"".join(map(_bytes, _parts(leaf)))
    if isinstance(leaf, Tensor):
        flat = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return np.ascontiguousarray(leaf).tobytes()
    if isinstance(leaf, (bool, int, float, complex, str, bytes, type(None), np.generic)):
        return repr(leaf).encode()
    return b""


def _in_parts(x: Tensor) -> bool:
    return x.layout is not torch.strided or x.is_nested or x.is_quantized or x.is_meta


def _parts(x: Tensor) -> Sequence[Tensor]:
    """The dense tensors of which a sparse or nested tensor consists; none for other kinds."""
    if x.is_nested:
        return x.unbind()
    if x.layout is torch.sparse_coo:
        x = x.coalesce()
        return x.indices(), x.values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    return ()


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a pytree, None included, each with its path as Python writes it."""
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True)
    return [(written(path), leaf) for path, leaf in zip(paths, leaves, strict=True)]


def kinds(batch: Any) -> list[str]:
    """One line for each leaf of a batch: `['x'] float32 [8, 3]`."""
    return [f"{name} {described(leaf)}".lstrip() for name, leaf in named_leaves(batch)]


def rows_of(batch: Any) -> list[int]:
    """A digest of each row along dim 0; one of the whole batch if its leaves do not share a dim 0."""
    leaves = [x for x in optree.tree_leaves(batch) if isinstance(x, (Tensor, np.ndarray))]
    if any(isinstance(x, Tensor) and _in_parts(x) for x in leaves):
        return [digest(batch)]
    sizes = {len(x) if x.ndim else 0 for x in leaves}
    if len(sizes) != 1:
        return [digest(batch)]
    here = [x.detach().cpu() if isinstance(x, Tensor) else x for x in leaves]
    return [digest([x[row] for x in here]) for row in range(sizes.pop())]
