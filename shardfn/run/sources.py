"""What has rows, each found by its number: data sets, tensors, arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import optree
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from shardfn.checkpoint.contents import lack
from shardfn.quoting import listed
from shardfn.run.fingerprints import described, digest
from shardfn.run.order import Numbers
from shardfn.transforms.cutting import written

NAME = "sf.run.batches"


@runtime_checkable
class Ready(Protocol):
    """Rows that are read without running anybody's code, so that a thread may read them beside a step."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, row: int) -> Any:
        """One of them."""

    def take(self, rows: Numbers) -> Any:
        """A batch of these: a tree of tensors whose dim 0 they are."""

    def fingerprint(self) -> str:
        """The same for the same rows."""


class Columns:
    """A pytree of tensors and arrays, whose dim 0 are the rows."""

    def __init__(self, tree: Any) -> None:
        paths, self._leaves, self._structure = optree.tree_flatten_with_path(tree, none_is_leaf=True)
        counts: dict[str, int] = {}
        for path, leaf in zip(paths, self._leaves, strict=True):
            name = f"source{written(path)}"
            if not isinstance(leaf, (Tensor, np.ndarray)) or leaf.ndim == 0:
                shown = "a tensor without dimensions" if isinstance(leaf, (Tensor, np.ndarray)) else described(leaf)
                raise TypeError(
                    f"{NAME}: {name} is {shown}; in a dict or tuple the leaves are tensors or arrays, whose dim 0 are "
                    f"the rows. Rows that are objects go in a list, or in a data set with __len__ and __getitem__"
                )
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                raise ValueError(
                    f"{NAME}: {name} is on {leaf.device}; keep what rows are read from on the CPU: batches come to the "
                    f"mesh's device by themselves"
                )
            if why := _no_rows(leaf):
                raise TypeError(f"{NAME}: {name} is {why}")
            counts[name] = len(leaf)
        if len(set(counts.values())) > 1:
            shown = listed(f"{name} has {count}" for name, count in counts.items())
            raise ValueError(f"{NAME}: dim 0 are the rows, of which all tensors have as many, but {shown}")
        self._count = next(iter(counts.values()), 0)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Any:
        return optree.tree_unflatten(self._structure, [leaf[row] for leaf in self._leaves])

    def take(self, rows: Numbers) -> Any:
        """A batch of these rows."""
        index = torch.from_numpy(rows)
        taken = [
            leaf.index_select(0, index) if isinstance(leaf, Tensor) else torch.from_numpy(leaf[rows])
            for leaf in self._leaves
        ]
        return optree.tree_unflatten(self._structure, taken)

    def fingerprint(self) -> str:
        """Of dtypes, shapes, and some rows between the first and the last."""
        return f"{digest((self.take(some_of(self._count)), [described(leaf) for leaf in self._leaves])):014x}"


def _no_rows(leaf: Tensor | np.ndarray) -> str:
    """Why no batches are made of a tensor or an array; "" of most."""
    if isinstance(leaf, Tensor):
        return f"a tensor {lack(leaf)}" if lack(leaf) else ""
    try:
        torch.from_numpy(np.empty(0, leaf.dtype))
    except (TypeError, ValueError):  # dates, words, objects; another order of bytes
        return f"an array of {leaf.dtype}, of which there are no tensors: convert it by astype, or leave it out"
    return ""


def some_of(count: int) -> Numbers:
    """The numbers of rows by which a source is known: at most 16, from the first to the last."""
    return np.unique(np.linspace(0, count - 1, 16).astype(np.int64))


def opened(source: Any) -> Any:
    """A source as `batches` reads it: with `__len__` and `__getitem__`, and `Ready` if it can be.

    Raises:
        TypeError: it has no rows that could be found by their numbers.
        ValueError: it has none at all, or tensors of different lengths.
    """
    if isinstance(source, Tensor | np.ndarray | dict | tuple):
        source = Columns(source)
    if isinstance(source, IterableDataset) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise TypeError(
            f"{NAME}: the source, of type {type(source).__name__}, is no data set with __len__ and __getitem__, so no "
            f"row of it can be found by its number. Files of rows are read by sf.run.Stream(files, read, lanes=...); "
            f"a loader of yours can be iterated by itself, and sf.run.checked(loader, mesh, axes) compares its batches"
        )
    if len(source) == 0:
        raise ValueError(f"{NAME}: the source, of type {type(source).__name__}, has no rows")
    return source


def unwrapped(source: Any, rows: Sequence[int]) -> tuple[Any, list[int]]:
    """The data set of which a Subset, or one of that, has some rows, and their numbers in it."""
    found = list(rows)
    while type(source) is Subset:
        found = [int(source.indices[row]) for row in found]
        source = source.dataset
    return source, found


def portion(batch: int, places: int, axes: Sequence[str]) -> int:
    """Rows of one place along the axes.

    Raises:
        ValueError: the places cannot have equal parts.
    """
    if batch % places:
        near = [n for n in (batch // places * places, math.ceil(batch / places) * places) if n]
        raise ValueError(
            f"{NAME}: batch={batch} rows a step cannot be cut into equal parts for {places} ranks along "
            f"{' x '.join(axes)}: say batch={' or '.join(map(str, near))}"
        )
    return batch // places
