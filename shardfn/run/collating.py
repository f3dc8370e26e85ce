"""Rows become a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shardfn.quoting import listed
from shardfn.run.fingerprints import kinds
from shardfn.run.padding import of_dicts
from shardfn.transforms.cutting import written

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
    paths, leaves, _ = optree.tree_flatten_with_path(row, none_is_leaf=True)
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, (str, bytes)) or leaf is None:
            raise TypeError(
                f"row {number} of the source has {type(leaf).__name__} at row{written(path)}, of which no tensor is "
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
