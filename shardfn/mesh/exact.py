"""One tree of additions over parts of a batch or pieces of a buffer, which any number of ranks can share.

The leaves `0 .. parts - 1` are numbers with digits of base 2, the first of which may have base 3. The tree adds along
the first digit, then along the second, and so on. A rank has consecutive leaves, which agree in their first digits, and
the leaves of ranks differ in these alone. So a sum over ranks comes first, of as many bytes as any reduce-scatter, and
each rank goes on with the piece that it got.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.quoting import listed

ALIGNMENT = 1024
"""Bytes of which the pieces of a buffer, and the places of parameters in it, are multiples.

Kernels may round otherwise at the end of a tensor, where its length is no multiple of their vectors' length. Only
the ends of parameters are such ends then, on any mesh."""


def bases(parts: int) -> tuple[int, ...]:
    """The bases of the digits of a leaf's number, the most significant first."""
    first = (3,) if parts % 3 == 0 else ()
    return (*first, *itertools.repeat(2, (parts // math.prod(first)).bit_length() - 1))


def fitting_sizes(parts: int) -> list[int]:
    """The numbers of ranks that can share the tree."""
    return [1, *itertools.accumulate(bases(parts), lambda a, b: a * b)]


def split_bases(parts: int, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bases of the digits that number the ranks, and of those that number a rank's leaves."""
    number = fitting_sizes(parts).index(ranks)
    return bases(parts)[:number], bases(parts)[number:]


def order(parts: int, ranks: int) -> list[int]:
    """A rank's leaves in the order in which `PartSums` adds them: digits count up from the most significant."""
    leaves, stride = [0], parts // ranks
    for base in split_bases(parts, ranks)[1]:
        stride //= base
        leaves = [leaf + digit * stride for digit in range(base) for leaf in leaves]
    return leaves


def add(values: Sequence[Tensor], over: Sequence[int], out: Tensor) -> None:
    """Fills `out` with the sum of several values by a tree whose digits have these bases; overwrites the values."""
    values = list(values)
    for base in over[:-1]:
        n = len(values) // base
        for k in range(1, base):
            torch._foreach_add_(values[:n], values[k * n : (k + 1) * n])
        values = values[:n]
    torch.add(values[0], values[1], out=out)
    for x in values[2:]:
        out.add_(x)


def sum_of_pieces(x: Tensor, exact: int) -> Tensor:
    """The sum over the first dimension `[exact, ...]`, by the tree; differentiable."""
    for base in bases(exact):
        first, *rest = x.unflatten(0, (base, -1)).unbind()
        x = sum(rest, first)
    return x[0]


class PartSums:
    """The sum of tensors that arrive in the order of `order`: a stack of partial sums.

    None stands for zeros, from a part that makes fewer calls than others.
    """

    def __init__(self, over: Sequence[int]) -> None:
        self.over = over
        self.levels: list[list[Any]] = [[] for _ in over]
        self.count = 0
        self.sum: Tensor | None = None

    def add(self, x: Tensor | None) -> None:
        """Adds a tensor, which nothing else refers to."""
        self.count += 1
        for level, base in zip(self.levels, self.over, strict=True):
            level.append(x)
            if len(level) < base:
                return
            x = level[0]
            for other in level[1:]:
                x = _plus(x, other)
            level.clear()
        self.sum = x


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two; adding zeros changes a negative zero, so they are added."""
    if a is None or b is None:
        x = b if a is None else a
        return x if x is None else x.add_(0.0)
    return a.add_(b)


def check_fits(exact: int, sizes: dict[str, int], axes: Sequence[str], stage: str) -> None:
    """Raises ValueError unless a mesh can have the same bits as others.

    Args:
        exact: number of parts.
        sizes: of the mesh's axes.
        axes: those along which ranks work on other rows.
        stage: name of the stage, for the message.
    """
    model_axes = [name for name, size in sizes.items() if size > 1 and name not in axes]
    if model_axes:
        raise ValueError(
            f"stage {stage!r}: with_exact({exact}) does not support the axis {listed(map(repr, model_axes))}, along "
            f"which ranks share rows. Leave with_exact out, or make a mesh of data axes alone"
        )
    ranks = math.prod(sizes[name] for name in axes)
    if ranks not in fitting_sizes(exact):
        other = next((n for n in (2 * ranks, 3 * ranks) if n.bit_count() <= 2 and ranks in fitting_sizes(n)), None)
        raise ValueError(
            f"stage {stage!r} has with_exact({exact}), which fits {listed(map(str, fitting_sizes(exact)))} ranks, and "
            f"there are {ranks}. Take one of these numbers of ranks"
            + (f", or other parts, such as with_exact({other})" if other else "")
        )
