"""Rows become a batch, and batches of ranks are filled up to one length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shardfn.quoting import listed
from shardfn.run.fingerprints import described, kinds, named_leaves
from shardfn.transforms.cutting import written

SIZES = 64  # of a batch's first dimensions, which ranks tell each other
KNOWN = {"attention_mask": 0, "labels": -100, "token_type_ids": 0}  # as tokenizers' own padding has them
Pad = Literal["ranks", "own"] | Mapping[Any, float]


@dataclass(frozen=True)
class Lengths:
    """What becomes of batches that are longer on some ranks.

    Attributes:
        values: what shorter ones are filled with, by the last key of a leaf's path; None: they stay as they are.
    """

    values: Mapping[Any, float] | None

    def padded(self, batch: Any, least: Sequence[int], most: Sequence[int], name: str) -> Any:
        """A batch with the sizes of the longest, filled at the ends; `least` and `most` are those of all ranks.

        Raises:
            ValueError: leaves differ, and nobody has said what to fill them with. All ranks raise it, or none.
        """
        if self.values is None or least == most:
            return batch
        paths, leaves, tree = optree.tree_flatten_with_path(batch, none_is_leaf=True)
        at, filled = 0, []
        for path, leaf in zip(paths, leaves, strict=True):
            dims = slice(at, at := at + len(shape_of(leaf)))
            same = least[dims] == most[dims]
            filled.append(leaf if same else _filled(leaf, most[dims], self._value(path, leaf, most[dims], name)))
        return optree.tree_unflatten(tree, filled)

    def _value(self, path: tuple[Any, ...], leaf: Any, most: Sequence[int], name: str) -> float:
        assert self.values is not None, "somebody asked for padding"
        key = path[-1] if path else "x"
        whole = not described(leaf).startswith(("float", "bfloat", "complex"))
        value = self.values.get(key)
        if value is None and whole:  # a mask of floats may be one that is added
            known = {**KNOWN, **{one: value for one, value in self.values.items() if isinstance(one, str)}}
            value = next((value for one, value in known.items() if str(key).endswith(f"_{one}") or key == one), None)
        if value is None or (whole and value != int(value)):
            why = "nothing says what to fill it with" if value is None else f"pad[{key!r}]={value} is no whole number"
            dtype, dims = described(leaf).partition(" ")[0], ", ".join(map(str, most))
            raise ValueError(
                f"{name}: batch{written(path)}, {dtype}, has other sizes on other ranks, up to [{dims}], and {why}: "
                f"say pad={{{key!r}: ...}}, by the leaf's last key"
            )
        return value


def _filled(leaf: Any, sizes: Sequence[int], value: float) -> Any:
    missing = [size - have for size, have in zip(sizes, leaf.shape, strict=False)]
    if isinstance(leaf, np.ndarray):
        return np.pad(leaf, [(0, n) for n in missing], constant_values=value)
    return torch.nn.functional.pad(leaf, [n for more in reversed(missing) for n in (0, more)], value=value)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """Of a tensor or an array; nothing else has one, and rows that have sizes of their own have none in common."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return ()
    return tuple(leaf.shape) if isinstance(leaf, (Tensor, np.ndarray)) else ()


def of_dicts(batch: Any) -> Any:
    """A batch in whose tree every mapping is a dict: transformers' own kind is none that trees know."""
    found = dict(batch) if isinstance(batch, Mapping) and optree.all_leaves([batch], none_is_leaf=True) else batch
    if isinstance(found, (dict, list, tuple)) and not optree.all_leaves([found], none_is_leaf=True):
        return optree.tree_map(lambda x: of_dicts(x) if isinstance(x, Mapping) else x, found, none_is_leaf=True)
    return found


def lengths_of(pad: Any, collate: Any, name: str) -> Lengths | None:
    """What `pad=` asks for; None where batches have the same shapes on all ranks.

    Raises:
        TypeError, ValueError: something else than it may be.
    """
    if pad is None or (isinstance(pad, str) and pad == "own"):
        return None if pad is None else Lengths(None)
    if isinstance(pad, str) and pad == "ranks":
        return Lengths(_of_tokenizer(collate))
    if not isinstance(pad, Mapping):
        raise TypeError(
            f'{name}: pad={pad!r}; it is "ranks", to the longest of all ranks; a dict of what to fill with, by key; '
            f'"own", for batches that stay as long as each rank has them; or None'
        )
    wrong = [
        key for key, value in pad.items() if not isinstance(value, (int, float)) or not isinstance(key, (str, int))
    ]
    if wrong:
        raise TypeError(f"{name}: pad[{wrong[0]!r}]={pad[wrong[0]]!r}; a leaf's last key has a number to fill it with")
    return Lengths({**_of_tokenizer(collate), **pad})


def _of_tokenizer(collate: Any) -> dict[Any, float]:
    """What a collator that pads fills with itself, where it says so as those of transformers do."""
    tokenizer = getattr(collate, "tokenizer", None)
    said = {
        "input_ids": getattr(tokenizer, "pad_token_id", None),
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", None),
        "labels": getattr(collate, "label_pad_token_id", None),
    }
    return {key: value for key, value in said.items() if isinstance(value, int)}


def kinds_but_sizes(batch: Any) -> list[str]:
    """The leaves of a batch, a line for each, without their sizes, as far as ranks tell each other those."""
    told, lines = 0, []
    for name, leaf in named_leaves(batch):
        shape = shape_of(leaf)
        told += len(shape)
        kind = described(leaf)
        dims = f"{kind.partition(' ')[0]} {len(shape)}-d" if shape and told <= SIZES else kind
        lines.append(f"{name} {dims}".lstrip())
    return lines


def sizes_of(batch: Any) -> list[int]:
    """The sizes of a batch's first dimensions, leaf by leaf; 0 where it has no more."""
    found = [n for leaf in optree.tree_leaves(batch, none_is_leaf=True) for n in shape_of(leaf)]
    return (found + [0] * SIZES)[:SIZES]


Collate = Callable[[list[Any]], Any]


def collated(rows: list[Any], numbers: Sequence[int], collate: Collate | None) -> Any:
    """A batch of rows; torch's `default_collate` stacks them, if nobody says otherwise.

    Raises:
        TypeError: strings or None, which are no numbers.
        ValueError: rows of different structure, shape or dtype.
    """
    if collate is not None:
        return of_dicts(collate(rows))
    rows = [dict(row) if isinstance(row, Mapping) and not isinstance(row, dict) else row for row in rows]
    _refuse_words(rows[0], numbers[0])
    try:
        return default_collate(rows)
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise _odd(rows, numbers) or error from error


def _refuse_words(row: Any, number: int) -> None:
    for name, leaf in named_leaves(row):
        if isinstance(leaf, (str, bytes)) or leaf is None:
            raise TypeError(
                f"row {number} of the source has {type(leaf).__name__} at row{name}, of which no tensor is "
                f"made: turn it into numbers in the data set (tokenize it), drop the column (remove_columns of a "
                f"Hugging Face data set), or pass collate="
            )


def _odd(rows: list[Any], numbers: Sequence[int]) -> Exception | None:
    """What to say of the first row that is not like the first one."""
    first = kinds(rows[0])
    for row, number in zip(rows[1:], numbers[1:], strict=True):
        if (own := kinds(row)) != first:
            a = [line for line in first if line not in own][:2]
            b = [line for line in own if line not in first][:2]
            return ValueError(
                f"rows of a batch must be alike: row {number} of the source has {listed(b) or 'less'}, and row "
                f"{numbers[0]} has {listed(a) or 'less'}. Pad or crop them in the data set, or pass collate="
            )
    return None


def masked(batch: Any, real: Any) -> Any:
    """A batch with the mask of its rows, bool `[rows]`.

    Raises:
        ValueError: a dict that has a mask already.
    """
    mask = torch.from_numpy(np.ascontiguousarray(real))
    if isinstance(batch, Mapping):
        if "mask" in batch:
            raise ValueError(
                'last="pad" adds "mask", bool [rows], to batches that are dicts, and these have a "mask": rename it'
            )
        return {**batch, "mask": mask}
    return (*batch, mask) if isinstance(batch, (tuple, list)) else (batch, mask)


def joined(batches: Sequence[Any]) -> Any:
    """One batch of several, along dim 0.

    Raises:
        TypeError: leaves that are no tensors.
        ValueError: parts of other lengths.
    """
    if len(batches) == 1:
        return batches[0]
    for leaf in optree.tree_leaves(batches[0], none_is_leaf=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"several workers read parts of a batch, which are joined where their leaves are tensors, and collate= "
                f"returned {type(leaf).__name__}: say workers=1, or return tensors"
            )
    try:
        return optree.tree_map(lambda *parts: torch.cat(parts), *batches)
    except RuntimeError as error:
        raise ValueError(
            f"several workers read parts of a batch, which collate= has made of other lengths, so that they cannot be "
            f"joined ({error}): say workers=1, or pad to one length"
        ) from error
