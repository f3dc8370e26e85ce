"""Second moments of each parameter's inputs and gradients, summed over rows, tokens, ranks and batches.

The gradient of a row with respect to a matrix in a product is a sum over its tokens of outer products of inputs and
gradients of outputs. Their second moments are Kronecker factors; the second moments of the gradient's own elements, in
any basis, are sums of squares. Both are found while a stage's backward runs, and one stage's are in memory at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from shardfn.check.callsites import paused
from shardfn.collectives import functional
from shardfn.compat import process_groups
from shardfn.curvature.row_axes import over_ranks
from shardfn.curvature.row_gradients import Outer, Picked, Used, everywhere, row_slices, single, sum_of_uses
from shardfn.curvature.row_rules import ConvolutionWeight
from shardfn.curvature.row_uses import Key, Receiver
from shardfn.curvature.vectors import Space
from shardfn.optim.norms import wide
from shardfn.optim.owners import OwnedBlock, as_matrix, blocks, owners, work
from shardfn.shards.boxes import Ints
from shardfn.shards.pieces import Unit

Kind = Literal["linear", "product", "table"]
KINDS: tuple[Kind, ...] = ("linear", "product", "table")  # [outputs, inputs], [inputs, outputs], [words, outputs]
_OTHER = len(KINDS) + 1  # what no factors describe
Bases = Sequence[Tensor | None]  # for each dimension of a matrix an orthogonal matrix; None for the identity


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter, and the rank that owns the results computed from it.

    Attributes:
        block: the parameter.
        unit: the leaf that holds it.
        owner: global rank; with plain tensors, every rank itself.
    """

    block: OwnedBlock
    unit: Unit
    owner: int

    @property
    def path(self) -> str:
        """Path of the parameter."""
        return self.block.path

    @property
    def shape(self) -> Ints:
        """Shape of the parameter."""
        return self.block.whole

    @property
    def matrix(self) -> Ints:
        """Its shape as a matrix; with more dimensions, the first one and all others."""
        return as_matrix(self.shape)

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == process_groups.global_rank()


def owned_parameters(space: Space) -> dict[Key, OwnedParameter]:
    """Returns the parameters that have a gradient, by key."""
    owner = owners(space.moving, work)
    return {
        Key(i, block.entry): OwnedParameter(block, unit, owner[block])
        for i, unit in enumerate(space.moving)
        for block in blocks(unit)
    }


@dataclass
class Total:
    """Sums for one parameter over all rows of all ranks, held by its owner.

    Attributes:
        kind: how it is used; None for one that no product uses.
        tokens: number of vectors that met it.
        moments: sums of outer products of the vectors along each dimension, `[d, d]`; for the words of a table, their
            counts `[d]`.
        squares: sums over rows of squares of the gradient in a basis, of the matrix's shape.
        other: whether it was used in a way that no factors describe.
    """

    kind: Kind | None = None
    tokens: float = 0.0
    moments: dict[int, Tensor] = field(default_factory=dict)
    squares: Tensor | None = None
    other: bool = False


class Sums:
    """Second moments, and squares of gradients, summed over batches.

    Args:
        space: vectors like the gradient of the parameters.
        moments: for a parameter of a kind, the dimensions of which moments are wanted.
        squared: keys of parameters of whose gradients squares are wanted.
        bases: the bases of squares, `left` and `right`, for the owner of a parameter, zeros for others; the identity
            where there is none.
    """

    def __init__(
        self,
        space: Space,
        moments: Mapping[Kind, Collection[int]],
        matrices: Collection[Key],
        squared: Collection[Key],
        bases: Mapping[Key, Callable[[], Mapping[str, Tensor]]] | None = None,
    ) -> None:
        self.space, self.params, self.places = space, space.params, owned_parameters(space)
        self.wanted, self.bases = moments, bases or {}
        self.matrices, self.squared = dict.fromkeys(matrices), dict.fromkeys(squared)
        self.totals = {key: Total() for key in self.places}
        self.rows = 0.0

    def receiver(self, rows: int, dtype: torch.dtype, device: torch.device) -> MomentSums:
        """Returns a receiver for one batch; `rows` is 0 for a rank that visits zeros."""
        self.rows += float(over_all(self.params, torch.tensor(float(rows), dtype=torch.float64, device=device)))
        return MomentSums(self, rows, dtype, device)

    def refused(self) -> list[str]:
        """Paths of the matrices that have no factors."""
        return [self.places[key].path for key in self.matrices if self.totals[key].other]


def over_all(params: Any, x: Tensor) -> Tensor:
    """The sum over the ranks that have different rows, without gradients or checks."""
    with paused(), torch.no_grad():
        return over_ranks(params, x)


def max_over_ranks(params: Any, x: Tensor) -> Tensor:
    """The maximum over the ranks that have different rows, without gradients or checks."""
    with paused(), torch.no_grad():
        return over_ranks(params, x, functional.pmax)


class MomentSums(Receiver):
    """A receiver that adds one batch to `Sums`."""

    def __init__(self, sums: Sums, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(max(rows, 1), dtype)
        self.sums, self.empty, self.dtype, self.device = sums, not rows, dtype, device
        self.found: dict[Key, Total] = {}
        self.squares: dict[Key, Tensor] = {}
        self.waiting: dict[Key, list[tuple[int, Sequence[Used]]]] = {}
        self.reduced: set[Key] = set()

    def add_uses(self, key: Key, uses: Sequence[Used] | None) -> None:
        """Adds the moments of one call."""
        if key not in self.sums.matrices or self.empty:
            return
        shape, batch_total = self.sums.places[key].matrix, self.found.setdefault(key, Total())
        singles = single(uses or [])
        pairs = [factors(shape, use) for use in singles]
        for pair in [None] if uses is None else pairs:
            if pair is None or pair[0] != (batch_total.kind or pair[0]):
                batch_total.other = True
                return
            batch_total.kind = pair[0]
        for (form, _), (kind, vectors) in zip(singles, [pair for pair in pairs if pair is not None], strict=True):
            batch_total.tokens += math.prod(vectors[0].shape[:2])
            for dim in self.sums.wanted.get(kind, ()):
                moment = _word_counts(form) if isinstance(form, Picked) and dim == 0 else _moment(vectors[dim])
                batch_total.moments[dim] = batch_total.moments[dim] + moment if dim in batch_total.moments else moment

    def keep(self, key: Key, numel: int, rows: slice, uses: Sequence[Used]) -> None:
        """Keeps the uses of a parameter until its gradient is complete, if squares are needed."""
        if key in self.sums.squared and not self.empty:
            super().keep(key, numel, rows, uses)

    def add_gradients(self, key: Key, numel: int, rows: slice, uses: Sequence[Used]) -> None:
        """Adds the squares of some rows' gradients; those in a basis wait for it."""
        if key not in self.sums.squared or self.empty:
            return
        if key in self.sums.bases:
            self.waiting.setdefault(key, []).append((numel, uses))
        else:
            self._square(key, numel, uses, (None, None))

    def _square(self, key: Key, numel: int, uses: Sequence[Used], bases: Bases) -> None:
        new = squares_in(self.sums.places[key].matrix, numel, uses, bases)
        self.squares[key] = self.squares[key].add_(new) if key in self.squares else new

    def finish_stage(self, keys: Sequence[Key]) -> None:
        """Sums the moments and squares of a stage over ranks; all ranks call it together."""
        tracked = [key for key in keys if key in self.sums.places]
        self._reduce(tracked, [key for key in tracked if self.calls.get(key.leaf, 1) == 1])

    def finish(self) -> None:
        """Takes the kept uses, and sums the parameters that no stage has summed."""
        super().finish()
        remaining = [key for key in self.sums.places if key not in self.reduced]
        self._reduce(remaining, remaining)

    def _reduce(self, keys: Sequence[Key], complete: Sequence[Key]) -> None:
        matrices = [key for key in keys if key in self.sums.matrices]
        if matrices:
            self._reduce_moments(matrices)
        for key in complete:
            self.reduced.add(key)
            if key in self.sums.squared:
                self._reduce_squares(key)

    def _reduce_moments(self, keys: Sequence[Key]) -> None:
        params, batch_totals = self.sums.params, [self.found.pop(key, Total()) for key in keys]
        numbers = torch.zeros((3, len(keys)), dtype=torch.float64, device=self.device)
        for i, batch_total in enumerate(batch_totals):
            code = _OTHER if batch_total.other else 0 if batch_total.kind is None else 1 + KINDS.index(batch_total.kind)
            numbers[0, i], numbers[1, i], numbers[2, i] = code, -(code or math.inf), batch_total.tokens
        ends = max_over_ranks(params, numbers[:2]).tolist()
        tokens = over_all(params, numbers[2]).tolist()
        for key, batch_total, max_code, negated_min, count in zip(keys, batch_totals, *ends, tokens, strict=True):
            total, place = self.sums.totals[key], self.sums.places[key]
            if not max_code:
                continue
            kind = None if max_code == _OTHER or max_code != -negated_min else KINDS[int(max_code) - 1]
            if kind is None or kind != (total.kind or kind):
                total.other = True
                continue
            total.kind, total.tokens = kind, total.tokens + count
            for dim in self.sums.wanted.get(kind, ()):
                n = place.matrix[dim]
                size = (n,) if (kind, dim) == ("table", 0) else (n, n)
                part = batch_total.moments.pop(dim, None)
                part = torch.zeros(size, dtype=self.dtype, device=self.device) if part is None else part
                part = over_all(params, part.to(self.dtype))
                if place.is_owner:
                    total.moments[dim] = total.moments[dim].add_(part) if dim in total.moments else part

    def _reduce_squares(self, key: Key) -> None:
        place, total = self.sums.places[key], self.sums.totals[key]
        if key in self.sums.bases:
            bases = self.sums.bases[key]()
            if place.block.layout is not None:
                bases = {side: over_all(self.sums.params, x) for side, x in bases.items()}
            for numel, uses in self.waiting.pop(key, []):
                self._square(key, numel, uses, (bases.get("left"), bases.get("right")))
        squares = self.squares.pop(key, None)
        squares = torch.zeros(place.matrix, dtype=self.dtype, device=self.device) if squares is None else squares
        squares = over_all(self.sums.params, squares.to(self.dtype))
        if place.is_owner:
            total.squares = squares if total.squares is None else total.squares.add_(squares)


# --- of one use ---

Vectors = tuple[Tensor, Tensor]  # along each dimension of a matrix, `[rows, tokens, d]`; of a table, `[rows, tokens]`


def factors(shape: Ints, use: Used) -> tuple[Kind, Vectors] | None:
    """Returns a use's kind and the vectors whose outer products it sums; None without factors."""
    form, place = use
    if isinstance(form, ConvolutionWeight):
        is_full, outer = place == everywhere(form.op.shape), form.outer()
        return ("linear", (outer.a[:, 0], outer.b[:, 0])) if is_full and outer is not None else None
    if isinstance(form, Picked):
        return ("table", (form.at, form.g)) if len(shape) == 2 and place == everywhere(shape) else None
    if not isinstance(form, Outer) or form.a.shape[1] != 1 or len(shape) != 2 or place.offset:
        return None
    a, b = form.a[:, 0], form.b[:, 0]
    for split in range(len(place.shape) + 1):
        first, second = (_as_one_dim(place.shape[s], place.strides[s]) for s in (slice(split), slice(split, None)))
        sizes = a.shape[-1], b.shape[-1]
        if first is None or second is None or (math.prod(place.shape[:split]), second[0]) != sizes:
            continue
        rows, columns = (shape[0], shape[1] if shape[0] > 1 else 1), (shape[1], 1)
        if (first, second) == (rows, columns):
            return "product", (a, b)
        if (second, first) == (rows, columns):
            return "linear", (b, a)
    return None


def _as_one_dim(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Dimensions as one: its size and stride; None if there is none."""
    pairs = [(n, s) for n, s in zip(shape, strides, strict=True) if n > 1]
    if any(s != n * t for (_, s), (n, t) in itertools.pairwise(pairs)):
        return None
    return (math.prod(shape), pairs[-1][1]) if pairs else (1, 1)


def _moment(x: Tensor) -> Tensor:
    """The sum of `x x^T` over rows and tokens."""
    kind = wide(x)
    total = torch.zeros((x.shape[-1], x.shape[-1]), dtype=kind, device=x.device)
    for rows in row_slices(len(x), x[:1].numel()):
        flat = x[rows].flatten(0, 1).to(kind)
        total.addmm_(flat.mT, flat)
    return total


def _word_counts(form: Picked) -> Tensor:
    """Counts how often each word occurs, without padding."""
    counts = torch.bincount(form.at.flatten(), minlength=form.shape[0]).double()
    if form.padding is not None:
        counts[form.padding] = 0
    return counts


def squares_in(shape: Ints, numel: int, uses: Sequence[Used], bases: Bases) -> Tensor:
    """Sums over rows the squares of their gradients in a basis: `[*shape]`."""
    # In the identity basis, the gradients of a convolution's weight need no patches.
    direct = bases == (None, None) and any(isinstance(form, ConvolutionWeight) for form, _ in uses)
    factored = [None] if direct or len(shape) != 2 else [factors(shape, use) for use in single(uses)]
    pairs = [pair for pair in factored if pair is not None]
    kinds = {kind for kind, _ in pairs}
    if len(pairs) == len(factored) and not {"table"} < kinds:
        x, y = (torch.cat([vectors[i] for _, vectors in pairs], 1) for i in (0, 1))
        if kinds == {"table"}:
            places, sums = Picked(x, y, shape).sums()
            sums = rebased(sums, (None, bases[1]))
            return sums.new_zeros(shape).index_add_(0, places % shape[0], sums.square_())
        x, y = (v.to(wide(v)) if q is None else v.to(q.dtype) @ q for v, q in zip((x, y), bases, strict=True))
        if x.shape[1] == 1:
            return x[:, 0].square().mT @ y[:, 0].square()
        total = x.new_zeros(shape)
        for rows in row_slices(len(x), numel):
            total += (x[rows].mT @ y[rows]).square_().sum(0)
        return total
    form = uses[0][0]
    total = torch.zeros(shape, dtype=wide(form.part(slice(0, 1))), device=form.part(slice(0, 1)).device)
    for rows in row_slices(form.rows, numel):
        total += rebased(sum_of_uses(numel, uses, rows).to(total.dtype).view(-1, *shape), bases).square_().sum(0)
    return total


def rebased(g: Tensor, bases: Bases) -> Tensor:
    """Changes the bases of both dimensions of matrices."""
    left, right = bases
    g = g if left is None else left.mT @ g
    return g if right is None else g @ right
