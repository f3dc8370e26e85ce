"""Makes batches of rows, pads those of ranks to one length, and describes and digests them to be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shardfn.quoting import listed
from shardfn.transforms.fitting import path_text

SIZES = 64  # at most so many dimensions of a batch are compared between ranks
KNOWN = {"attention_mask": 0, "labels": -100, "token_type_ids": 0}  # as tokenizers of transformers pad
Pad = Literal["ranks", "none"] | Mapping[Any, float]


@dataclass(frozen=True)
class Lengths:
    """The padding of batches that are longer on some ranks.

    Attributes:
        values: padding values by the last key of a leaf's path; None leaves batches unchanged.
    """

    values: Mapping[Any, float] | None

    def padded(self, batch: Any, min_sizes: Sequence[int], max_sizes: Sequence[int], name: str) -> Any:
        """Pads a batch at the ends to the largest size of each dimension over ranks.

        Args:
            batch: of this rank.
            min_sizes: smallest sizes over ranks, of all dimensions leaf by leaf.
            max_sizes: largest sizes, likewise.
            name: of the public function, for messages.

        Raises:
            ValueError: a leaf needs padding and has no padding value. All ranks raise it, or none.
        """
        if self.values is None or min_sizes == max_sizes:
            return batch
        paths, leaves, tree = optree.tree_flatten_with_path(batch, none_is_leaf=True)
        position, filled = 0, []
        for path, leaf in zip(paths, leaves, strict=True):
            dims = slice(position, position := position + len(shape_of(leaf)))
            same = min_sizes[dims] == max_sizes[dims]
            target = max_sizes[dims]
            filled.append(leaf if same else _padded(leaf, target, self._value(path, leaf, target, name)))
        return optree.tree_unflatten(tree, filled)

    def _value(self, path: tuple[Any, ...], leaf: Any, max_sizes: Sequence[int], name: str) -> float:
        assert self.values is not None, "somebody asked for padding"
        key = path[-1] if path else "x"
        integral = not describe_leaf(leaf).startswith(("float", "bfloat", "complex"))
        value = self.values.get(key)
        if value is None and integral:  # a default of 0 could be wrong for floats, as in an additive attention mask
            known = {**KNOWN, **{end: value for end, value in self.values.items() if isinstance(end, str)}}
            value = next((value for end, value in known.items() if str(key).endswith(f"_{end}") or key == end), None)
        if value is None or (integral and value != int(value)):
            wrong = f"pad[{key!r}]={value} is no whole number"
            reason = "nothing says what to fill it with" if value is None else wrong
            dtype, dims = describe_leaf(leaf).partition(" ")[0], ", ".join(map(str, max_sizes))
            raise ValueError(
                f"{name}: batch{path_text(path)}, {dtype}, has different sizes on other ranks, up to [{dims}], and "
                f"{reason}: pass pad={{{key!r}: ...}}, by the leaf's last key"
            )
        return value


def _padded(leaf: Any, sizes: Sequence[int], value: float) -> Any:
    missing = [size - have for size, have in zip(sizes, leaf.shape, strict=False)]
    if isinstance(leaf, np.ndarray):
        return np.pad(leaf, [(0, n) for n in missing], constant_values=value)
    return torch.nn.functional.pad(leaf, [n for after in reversed(missing) for n in (0, after)], value=value)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of a tensor or an array; empty for other objects, and for nested tensors, whose rows may vary."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return ()
    return tuple(leaf.shape) if isinstance(leaf, (Tensor, np.ndarray)) else ()


def of_dicts(batch: Any) -> Any:
    """Turns the mappings in a batch into dicts, since optree takes others, as those of transformers, for leaves."""
    tree = dict(batch) if isinstance(batch, Mapping) and optree.all_leaves([batch], none_is_leaf=True) else batch
    if isinstance(tree, (dict, list, tuple)) and not optree.all_leaves([tree], none_is_leaf=True):
        return optree.tree_map(lambda x: of_dicts(x) if isinstance(x, Mapping) else x, tree, none_is_leaf=True)
    return tree


def lengths_of(pad: Any, collate: Any, name: str) -> Lengths | None:
    """The argument `pad` as `Lengths`; None if batches must have the same shapes on all ranks.

    Raises:
        TypeError, ValueError: it has a value that is not allowed.
    """
    if pad is None or (isinstance(pad, str) and pad == "none"):
        return None if pad is None else Lengths(None)
    if isinstance(pad, str) and pad == "ranks":
        return Lengths(_of_tokenizer(collate))
    if not isinstance(pad, Mapping):
        raise TypeError(
            f'{name}: pad must be "ranks", to the longest of all ranks; a dict of padding values by key; '
            f'"none", for batches of different lengths; or None, got {pad!r}'
        )
    wrong = [
        key for key, value in pad.items() if not isinstance(value, (int, float)) or not isinstance(key, (str, int))
    ]
    if wrong:
        raise TypeError(f"{name}: pad[{wrong[0]!r}]={pad[wrong[0]]!r}; a leaf's last key has a number to fill it with")
    return Lengths({**_of_tokenizer(collate), **pad})


def _of_tokenizer(collate: Any) -> dict[Any, float]:
    """The padding values that a collator uses, read from its attributes as collators of transformers name them."""
    tokenizer = getattr(collate, "tokenizer", None)
    values = {
        "input_ids": getattr(tokenizer, "pad_token_id", None),
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", None),
        "labels": getattr(collate, "label_pad_token_id", None),
    }
    return {key: value for key, value in values.items() if isinstance(value, int)}


def kinds_but_sizes(batch: Any) -> list[str]:
    """One line for each leaf of a batch, without the first `SIZES` sizes, which ranks compare as numbers."""
    dims_so_far, lines = 0, []
    for name, leaf in named_leaves(batch):
        shape = shape_of(leaf)
        dims_so_far += len(shape)
        kind = describe_leaf(leaf)
        text = f"{kind.partition(' ')[0]} {len(shape)}-d" if shape and dims_so_far <= SIZES else kind
        lines.append(f"{name} {text}".lstrip())
    return lines


def sizes_of(batch: Any) -> list[int]:
    """The sizes of a batch's first `SIZES` dimensions, leaf by leaf, padded by 0."""
    sizes = [n for leaf in optree.tree_leaves(batch, none_is_leaf=True) for n in shape_of(leaf)]
    return (sizes + [0] * SIZES)[:SIZES]


Collate = Callable[[list[Any]], Any]


def collated(rows: list[Any], numbers: Sequence[int], collate: Collate | None) -> Any:
    """Makes a batch of rows by `collate`, or by torch's `default_collate`.

    Raises:
        TypeError: a row has strings or None.
        ValueError: rows differ in structure, shape or dtype.
    """
    if collate is not None:
        return of_dicts(collate(rows))
    rows = [dict(row) if isinstance(row, Mapping) and not isinstance(row, dict) else row for row in rows]
    for name, leaf in named_leaves(rows[0]):
        if isinstance(leaf, (str, bytes)) or leaf is None:
            raise TypeError(
                f"row {numbers[0]} of the source has {type(leaf).__name__} at row{name}, which cannot become a "
                f"tensor. Convert it to numbers (tokenize it), drop the column (remove_columns in Hugging Face data "
                f"sets), or pass collate="
            )
    try:
        return default_collate(rows)
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise _row_difference(rows, numbers) or error from error


def _row_difference(rows: list[Any], numbers: Sequence[int]) -> Exception | None:
    """An error that names the first row whose leaves differ from those of the first row."""
    first = kinds(rows[0])
    for row, number in zip(rows[1:], numbers[1:], strict=True):
        if (row_kinds := kinds(row)) != first:
            a = [line for line in first if line not in row_kinds][:2]
            b = [line for line in row_kinds if line not in first][:2]
            return ValueError(
                f"rows of a batch must be alike: row {number} of the source has {listed(b) or 'less'}, and row "
                f"{numbers[0]} has {listed(a) or 'less'}. Pad or crop them in the data set, or pass collate="
            )
    return None


def masked(batch: Any, real: Any) -> Any:
    """Adds the mask of real rows, bool `[rows]`, to a batch.

    Raises:
        ValueError: the batch is a dict that has a mask already.
    """
    mask = torch.from_numpy(np.ascontiguousarray(real))
    if isinstance(batch, Mapping):
        if "mask" in batch:
            raise ValueError(
                'remainder="pad" and sample_rate= add "mask", bool [rows], to dicts of rows, and these have a "mask": '
                "rename it"
            )
        return {**batch, "mask": mask}
    return (*batch, mask) if isinstance(batch, (tuple, list)) else (batch, mask)


def join_batches(batches: Sequence[Any]) -> Any:
    """Concatenates batches along dim 0.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: sizes differ in other dimensions.
    """
    if len(batches) == 1:
        return batches[0]
    for leaf in optree.tree_leaves(batches[0], none_is_leaf=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"several workers read parts of a batch, which are joined where their leaves are tensors, and collate= "
                f"returned {type(leaf).__name__}: pass workers=1, or return tensors"
            )
    try:
        return optree.tree_map(lambda *parts: torch.cat(parts), *batches)
    except RuntimeError as error:
        raise ValueError(
            f"several workers read parts of a batch, to which collate= gave different lengths, so that they cannot be "
            f"joined ({error}): pass workers=1, or pad to one length"
        ) from error


# --- digests and descriptions, to compare batches between ranks ---


TELLING = 8  # equal distinct rows on two ranks from which on it is no coincidence


def digest(tree: Any) -> int:
    """A 56-bit digest of a pytree's structure and of its leaves' dtypes, shapes and values.

    Of a leaf of an unknown type, only the type counts. Two trees that differ have the same digest with probability
    2^-56.
    """
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    hasher = hashlib.blake2b(str(structure).encode(), digest_size=7)
    for leaf in leaves:
        hasher.update(describe_leaf(leaf).encode())
        hasher.update(_leaf_bytes(leaf))
    return int.from_bytes(hasher.digest(), "big")


def describe_leaf(leaf: Any) -> str:
    """Dtype and shape of a tensor or array; the type of anything else."""
    if isinstance(leaf, Tensor) and leaf.is_nested:  # its rows have sizes of their own, or symbolic ones
        return f"{str(leaf.dtype).removeprefix('torch.')} [{', '.join([str(leaf.size(0)), *'*' * (leaf.ndim - 1)])}]"
    if isinstance(leaf, (Tensor, np.ndarray)):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return type(leaf).__name__


def _leaf_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor) and _in_parts(leaf):
        return b"".join(map(_leaf_bytes, _dense_parts(leaf)))
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


def _dense_parts(x: Tensor) -> Sequence[Tensor]:
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
    return [(path_text(path), leaf) for path, leaf in zip(paths, leaves, strict=True)]


def kinds(batch: Any) -> list[str]:
    """One line for each leaf of a batch: `['x'] float32 [8, 3]`."""
    return [f"{name} {describe_leaf(leaf)}".lstrip() for name, leaf in named_leaves(batch)]


def row_digests(batch: Any) -> list[int]:
    """A digest of each row along dim 0; one of the whole batch if its leaves do not share a dim 0."""
    leaves = [x for x in optree.tree_leaves(batch) if isinstance(x, (Tensor, np.ndarray))]
    if any(isinstance(x, Tensor) and _in_parts(x) for x in leaves):
        return [digest(batch)]
    sizes = {len(x) if x.ndim else 0 for x in leaves}
    if len(sizes) != 1:
        return [digest(batch)]
    host_leaves = [x.detach().cpu() if isinstance(x, Tensor) else x for x in leaves]
    return [digest([x[row] for x in host_leaves]) for row in range(sizes.pop())]
