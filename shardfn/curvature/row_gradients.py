"""Per-row gradients of one parameter, kept as factors, and their norms.

The gradient of row r with respect to a matrix is a sum over its tokens of outer products, `sum_t a[r, t] b[r, t]^T`.
Its norm is found without it where that is less work: the square is `sum_tu (a_t . a_u) (b_t . b_u)`.

Sources: Goodfellow, Efficient per-example gradient computations (2015); Li et al., Large language models can be strong
differentially private learners (2022), section 4.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardfn.optim.norms import wide

AT_ONCE = 2**20  # elements of gradients of rows that are in memory at once


class ExampleGradient(Protocol):
    """The gradient of each of some rows, `[rows, *shape]`."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    def squares(self) -> Tensor:
        """The square of each row's norm, `[rows]`."""

    def part(self, rows: slice) -> Tensor:
        """The gradients of some rows."""


@dataclass(frozen=True)
class Dense:
    """Gradients stored in full."""

    values: Tensor

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.values)

    def squares(self) -> Tensor:
        """The square of each row's norm, `[rows]`."""
        values = torch.view_as_real(self.values.resolve_conj()) if self.values.is_complex() else self.values
        return torch.linalg.vector_norm(values[:, None].flatten(1), dim=1, dtype=wide(values)).square()

    def part(self, rows: slice) -> Tensor:
        """The gradients of some rows."""
        return self.values[rows]


@dataclass(frozen=True)
class Outer:
    """`sum_t a[r, h, t, i] b[r, h, t, j]`.

    Attributes:
        a: `[rows, heads, tokens, m]`.
        b: `[rows, heads, tokens, n]`.
        shape: of a row's gradient, `heads * m * n` elements.
    """

    a: Tensor
    b: Tensor
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.a)

    def squares(self) -> Tensor:
        """The square of each row's norm, `[rows]`."""
        (_, heads, tokens, m), n = self.a.shape, self.b.shape[-1]
        if tokens == 1:
            a, b = (torch.linalg.vector_norm(x, dim=(2, 3), dtype=wide(x)).square() for x in (self.a, self.b))
            return (a * b).sum(1)
        if tokens * (m + n) <= m * n:
            return torch.cat([self._by_tokens(rows) for rows in row_slices(self.rows, heads * tokens**2)])
        return torch.cat([Dense(self.part(rows)).squares() for rows in row_slices(self.rows, heads * m * n)])

    def _by_tokens(self, rows: slice) -> Tensor:
        a, b = (x[rows].to(wide(x)) for x in (self.a, self.b))
        return (a @ a.mT).mul_(b @ b.mT).sum((1, 2, 3))

    def part(self, rows: slice) -> Tensor:
        """The gradients of some rows."""
        return (self.a[rows].mT @ self.b[rows]).reshape(-1, *self.shape)

    def swapped(self) -> Outer:
        """Returns the gradients of the transposed matrix."""
        return Outer(self.b, self.a, (self.shape[1], self.shape[0]))


@dataclass(frozen=True)
class Picked:
    """Sums over tokens of `g[r, t]` at the table row that token t selects.

    Attributes:
        at: `[rows, tokens]`.
        g: `[rows, tokens, n]`.
        shape: of the table, `[count, *]`, with n elements in each of its rows.
        padding: a row of which g is 0.
    """

    at: Tensor
    g: Tensor
    shape: tuple[int, ...]
    padding: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.at)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Returns the distinct places `row * count + at`, and g's sum at each, float32 or wider."""
        base = torch.arange(self.rows, device=self.at.device)[:, None]
        places, inverse = (self.at + base * self.shape[0]).flatten().unique(return_inverse=True)
        g = self.g.flatten(0, 1)
        sums = torch.zeros((len(places), g.shape[1]), dtype=wide(g), device=g.device)
        return places, sums.index_add_(0, inverse, g.to(sums.dtype))

    def squares(self) -> Tensor:
        """The square of each row's norm, `[rows]`."""
        places, sums = self.sums()
        return sums.new_zeros(self.rows).index_add_(0, places // self.shape[0], sums.square().sum(1))

    def part(self, rows: slice) -> Tensor:
        """The gradients of some rows."""
        indices, g = self.at[rows], self.g[rows]
        table = g.new_zeros((len(indices) * self.shape[0], g.shape[-1]))
        places = (indices + torch.arange(len(indices), device=indices.device)[:, None] * self.shape[0]).flatten()
        return table.index_add_(0, places, g.flatten(0, 1)).reshape(-1, *self.shape)

    def cross(self, other: Outer) -> Tensor:
        """The inner product of each row's gradient with another of the same table, `[rows]`."""
        a, b = other.a[:, 0], other.b[:, 0]  # [rows, tokens, count], [rows, tokens, n]
        products = b.to(wide(a)) @ self.g.mT.to(wide(a))
        picked = a.gather(2, self.at[:, None].expand(-1, a.shape[1], -1))
        return (products * picked).sum((1, 2))


def row_slices(rows: int, elements: int) -> list[slice]:
    """Splits the rows into slices of at most about `AT_ONCE` elements each."""
    step = max(1, AT_ONCE // max(1, elements))
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


# --- several uses of one parameter ---


@dataclass(frozen=True)
class ParameterView:
    """A strided view of a parameter."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @functools.cached_property
    def once(self) -> bool:
        """Whether no element occurs twice."""
        reach = 0
        for stride, n in sorted(zip(self.strides, self.shape, strict=True)):
            if n > 1:
                if stride <= reach:
                    return False
                reach += (n - 1) * stride
        return True

    def select_from(self, flat: Tensor) -> Tensor:
        """Returns this view of each row's parameter, given `[rows, numel]`."""
        return flat.as_strided((len(flat), *self.shape), (flat.stride(0), *self.strides), self.offset)


Used = tuple[ExampleGradient, ParameterView]


@dataclass(frozen=True)
class Several:
    """The sum of several uses of one tensor of this shape."""

    uses: tuple[Used, ...]
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.uses[0][0].rows

    def squares(self) -> Tensor:
        """The square of each row's norm, `[rows]`."""
        return squares(math.prod(self.shape), self.uses)

    def part(self, rows: slice) -> Tensor:
        """The gradients of some rows."""
        total = sum_of_uses(math.prod(self.shape), self.uses, rows)
        return total.unflatten(1, self.shape or (1,)).reshape(-1, *self.shape)


def everywhere(shape: Sequence[int]) -> ParameterView:
    """The view of a full parameter of this shape."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return ParameterView(tuple(shape), tuple(strides), 0)


def squares(numel: int, uses: Sequence[Used]) -> Tensor:
    """The square of the norm of each row's gradient with respect to one parameter, `[rows]`.

    Args:
        numel: number of its elements.
        uses: the gradient is the sum of these; each is the gradient with respect to some of the elements.
    """
    groups: dict[Any, list[Used]] = {}
    for form, place in single(uses):
        rising = len(place.shape) == 2 and place.strides[0] < place.strides[1]
        if rising and isinstance(form, Outer) and form.a.shape[1] == 1:
            form, place = form.swapped(), ParameterView(place.shape[::-1], place.strides[::-1], place.offset)
        heads = form.a.shape[1] if isinstance(form, Outer) else 0
        key = (type(form), place, heads) if isinstance(form, (Outer, Picked, Dense)) else id(form)
        groups.setdefault(key, []).append((form, place))
    merged = [(_sum([form for form, _ in group]), group[0][1]) for group in groups.values()]
    if len(merged) == 1:
        return merged[0][0].squares()
    if _disjoint(numel, tuple(place for _, place in merged)):
        return torch.stack([form.squares() for form, _ in merged]).sum(0)
    if len(merged) == 2 and merged[0][1] == merged[1][1]:
        for (picked, _), (outer, _) in (merged, merged[::-1]):
            if (
                isinstance(picked, Picked)
                and isinstance(outer, Outer)
                and outer.a.shape[1] == 1 == len(picked.shape) - 1
            ):
                return picked.squares() + outer.squares() + 2 * picked.cross(outer)
    rows = merged[0][0].rows
    return torch.cat([Dense(sum_of_uses(numel, merged, part)).squares() for part in row_slices(rows, numel)])


def sum_of_uses(numel: int, uses: Sequence[Used], rows: slice) -> Tensor:
    """Adds up uses for some rows, `[rows, numel]`."""
    values = [(form.part(rows), place) for form, place in uses]
    sums = values[0][0].new_zeros((len(values[0][0]), numel))
    for value, place in values:
        place.select_from(sums).add_(value)
    return sums


def single(uses: Sequence[Used]) -> list[Used]:
    """Replaces each sum of uses of the full parameter by these uses."""
    singles: list[Used] = []
    for form, place in uses:
        is_full = isinstance(form, Several) and place == everywhere(form.shape)
        singles += single(form.uses) if is_full and isinstance(form, Several) else [(form, place)]
    return singles


def _sum(forms: Sequence[Any]) -> ExampleGradient:
    """The sum of forms of one kind."""
    first: ExampleGradient = forms[0]
    if len(forms) == 1:
        return first
    if isinstance(first, Outer):
        return Outer(torch.cat([f.a for f in forms], 2), torch.cat([f.b for f in forms], 2), first.shape)
    if isinstance(first, Picked):
        return Picked(torch.cat([f.at for f in forms], 1), torch.cat([f.g for f in forms], 1), first.shape)
    return Dense(torch.stack([f.part(slice(None)) for f in forms]).sum(0))


@functools.lru_cache(maxsize=1024)
def _disjoint(numel: int, places: tuple[ParameterView, ...]) -> bool:
    reach = [sum((n - 1) * s for n, s in zip(p.shape, p.strides, strict=True)) for p in places]
    ends = sorted((p.offset, p.offset + far) for p, far in zip(places, reach, strict=True))
    if all(stop < start for (_, stop), (start, _) in itertools.pairwise(ends)):
        return True
    counts = torch.zeros((1, numel), dtype=torch.int32, device="cpu")
    for place in places:
        place.select_from(counts).add_(1)
    return bool((counts <= 1).all())
