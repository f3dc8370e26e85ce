"""EK-FAC: the Fisher matrix in a Kronecker-factored eigenbasis, which can be inverted.

Each parameter is a block of its own. What is kept of it is on the rank that owns it, which decomposes its factors; a
product moves a vector there and back, as Muon does with gradients.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn import checkpoint
from shardfn.collectives.agree import agree
from shardfn.curvature.labels import Drawn
from shardfn.curvature.operators import Operator, check_batches, each_of
from shardfn.curvature.per_example import Batch, Losses, batch_of, kind_of, per_example, refuse_cut, visit
from shardfn.curvature.row_moments import Kind, Place, Sums, Total, places, work
from shardfn.curvature.row_uses import Key
from shardfn.curvature.vectors import Space, Vector
from shardfn.optim.norms import wide
from shardfn.optim.owners import Block, as_owner, eigh, on_owner, remembered
from shardfn.quoting import listed
from shardfn.transforms.autodiff import name_of
from shardfn.transforms.fitting import together
from shardfn.transforms.shortage import RandomNumbers

SIDES = ("left", "right")
KEPT: dict[str, tuple[str, ...]] = {"linear": SIDES, "product": SIDES, "table": ("right",)}  # bases, by kind
EVERY: dict[Kind, tuple[int, ...]] = {"linear": (0, 1), "product": (0, 1), "table": (0, 1)}


class Kronecker(Operator):
    r"""The mean over rows of :math:`g g^\top` in the basis of EK-FAC: an operator, which can be inverted.

    Attributes:
        kinds: by path, how a parameter is used: `"linear"` for a matrix `[outputs, inputs]`, `"product"` for one
            `[inputs, outputs]`, `"table"` for an embedding, and `"diagonal"`.
        rows: number of rows of the mean.
        state: a tree of flat shards, each on the rank that owns the parameter: by path, its eigenvectors as columns
            (`left`, of its first dimension, and `right`) and `values`, of the parameter's shape.
    """

    def __init__(self, params: Any, kinds: Mapping[str, str], rows: float, state: Any, name: str) -> None:
        super().__init__(lambda v: self._through(v, lambda x, values: x * values), params, name)
        self.kinds, self.rows, self.state = kinds, rows, state

    def solve(self, v: Any, damping: float) -> Any:
        r""":math:`(F + \lambda)^{-1} v`.

        Args:
            v: a tree like the gradient or the parameters.
            damping: :math:`\lambda`, above 0.

        Returns:
            A tree like the gradient, in float32 or wider.

        Raises:
            ValueError: a damping that is not a finite number above 0, or differs between ranks; a tree of another kind.
        """
        self.space.agree("solve", damping=damping)
        if not isinstance(damping, (int, float)) or not 0 < damping < math.inf:
            raise ValueError(f"solve: damping={damping!r}; it is a finite number above 0")
        return self._through(v, lambda x, values: x / (values + damping))

    def _through(self, v: Any, scaled: Callable[[Tensor, Tensor], Tensor]) -> Any:
        def of_block(block: Block, x: Tensor) -> Tensor:
            own = as_owner(self.state[block.name])
            left, right = own.get("left"), own.get("right")
            y = x.to(own["values"].dtype).view(block.whole)
            y = scaled(_turned(y, left, right), own["values"])
            back = _turned(y, None if left is None else left.mT, None if right is None else right.mT)
            return back.reshape(x.shape)

        vector: Vector = [x.to(wide(x)) for x in self.space.read(v)]
        return self.space.written(on_owner(self.space.moving, vector, of_block, work))


def _turned(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    x = x if left is None else left.mT @ x
    return x if right is None else x @ right


def ekfac(
    losses: Losses | Drawn,
    params: Any,
    batches: Iterable[Any],
    *,
    corrected: bool = True,
    diagonal: Collection[str] = (),
    folder: str | os.PathLike[str] | None = None,
) -> Kronecker:
    r"""An approximation of the Fisher matrix that can be inverted: EK-FAC, or K-FAC.

    The matrix is the mean over all rows of all ranks of :math:`g g^\top`, with g the gradient of a row's loss. Between
    parameters it is taken as 0; biases are parameters of their own. For a matrix in products, with inputs :math:`a` and
    gradients :math:`d` of outputs, the basis is that of the eigenvectors of :math:`\sum a a^\top` and :math:`\sum d
    d^\top`, over all rows, tokens and uses. For an embedding, the first of them is diagonal. For parameters of one
    dimension, and those in `diagonal`, it is the identity. In this basis, EK-FAC has the mean of squares of rows'
    gradients, from a second pass over the batches. K-FAC has products of eigenvalues: of the mean over tokens of
    :math:`a a^\top`, and of the sum over tokens and mean over rows of :math:`d d^\top`.

    A rank holds the factors of the parameters that it owns, and while a stage runs those of this stage. They are
    summed over ranks after each batch.

    Args:
        losses: as for `per_example`; the labels in the batch give the *empirical* Fisher matrix. `Drawn` draws labels.
        params: as for `per_example`. They must not be overwritten meanwhile.
        batches: this rank's batches, as for `hvp`. They are read twice.
        corrected: whether values are those of EK-FAC.
        diagonal: paths of matrices whose basis is the identity.
        folder: a checkpoint, which is written if it is not there and read if it is, on any mesh.

    Returns:
        A `Kronecker`.

    Raises:
        ValueError: on all ranks, a matrix that is not used whole, by products or by lookups, or that is used by both,
            such as a tied embedding; parameters of three or more dimensions, such as kernels of convolutions. All of
            them may be in `diagonal`.
        TypeError, ValueError, RuntimeError: as `per_example` and `hvp`.
        CheckpointError: the folder has other parameters.

    Sources: Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature (2015); George
        et al., Fast approximate natural gradient descent in a Kronecker-factored eigenbasis (2018); for tokens,
        Eschenhagen et al., Kronecker-factored approximate curvature for modern neural network architectures (2023).

    Example:
        ``step = ekfac(losses, params, batches).solve(gradient, damping=1e-3)``
    """
    name = f"ekfac of {name_of(losses.model if isinstance(losses, Drawn) else losses)}"
    space, place = Space(params, name), None if folder is None else Path(folder)
    each = places(space)
    there = place is not None and place.exists() and not (place.is_dir() and not any(place.iterdir()))
    named = _named(diagonal, each, name)
    asked = {"corrected": bool(corrected), "diagonal": named, "folder": place and str(place), "exists": there}
    space.agree("ekfac", **asked)
    if there:
        assert place is not None, "it exists"
        return _read(space, each, place, name)
    check_batches(batches, params, name)
    matrices = [key for key, at in each.items() if len(at.shape) == 2 and at.path not in named]
    factors = Sums(space, EVERY, matrices, [key for key in each if key not in matrices])
    gather(factors, losses, batches, name)
    used = [key for key in matrices if factors.totals[key].kind is not None]
    parts = {key: _decomposed(each[key], factors.totals[key]) for key in used}
    totals = factors.totals
    if corrected:
        squares = Sums(space, {}, (), used, {key: part[0] for key, part in parts.items()})
        gather(squares, losses, batches, name)
        totals = totals | {key: squares.totals[key] for key in used}
    kinds = {at.path: factors.totals[key].kind or "diagonal" for key, at in each.items()}
    state = {}
    for key, at in each.items():
        kept = state[at.block.name] = _zeros(at, kinds[at.path])
        if not at.mine:
            continue
        values = totals[key].squares if key not in parts or corrected else parts[key][1]
        own, bases = as_owner(kept), parts[key][0] if key in parts else {}
        for into, x in [*((own[side], x) for side, x in bases.items()), (own["values"], values)]:
            if x is not None:
                into.copy_(x)
        own["values"].div_(factors.rows)
    found = Kronecker(params, kinds, factors.rows, state, name)
    if folder is not None:
        checkpoint.save(folder, {"kinds": kinds, "rows": found.rows, "state": state})
    return found


def gather(sums: Sums, losses: Losses | Drawn, batches: Iterable[Any], name: str, *, strict: bool = True) -> None:
    """Adds to sums what all batches have. The first is compared as by `per_example`.

    Raises:
        ValueError: there are matrices without factors, if `strict`; no rows.
    """
    params = sums.params
    refuse_cut(params)
    before = RandomNumbers([x.detach() for x in sums.space.variables.values])
    call = losses.losses if isinstance(losses, Drawn) else losses
    for number, batch in enumerate(each_of(batches, name)):
        own = batch, number
        given, rows = checked(params, lambda own=own: _labelled(losses, params, *own), name)  # type: ignore[misc]
        if not number and not sums.bases:
            per_example(call, params, *given)
        visit(call, params, rows, sums.receiver(rows.rows, *kind_of(params, rows)))
        others = sums.refused()
        if strict and others:
            raise ValueError(
                f"{name}: the use of {listed(others)} has no Kronecker factors: a matrix is used whole, by products or "
                f"by lookups, but not by both, and not in parts. Freeze it, or pass its path in diagonal="
            )
    before.restore()
    if not sums.rows:
        raise ValueError(f"{name}: no rank has rows")


def _labelled(losses: Losses | Drawn, params: Any, batch: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return losses.labelled(params, batch, number) if isinstance(losses, Drawn) else batch


def checked(params: Any, batch: Callable[[], tuple[Any, ...]], name: str) -> tuple[tuple[Any, ...], Batch]:
    """The arguments for a batch, and its rows, after all ranks have found theirs right."""
    error: Exception | None = None
    try:
        given = batch()
        rows = batch_of(given)
    except (TypeError, ValueError) as own:
        error = own
    agree([] if error is None else [str(error)], together(params), name, mine=error)
    if error is not None:  # a rank alone need not agree
        raise error
    return given, rows


def _named(diagonal: Collection[str], each: dict[Key, Place], name: str) -> tuple[str, ...]:
    if isinstance(diagonal, str):
        raise TypeError(f"{name}: diagonal={diagonal!r}; it is a collection of paths, [{diagonal!r}] for one")
    paths = {at.path for at in each.values()}
    unknown = sorted(set(diagonal) - paths)
    if unknown:
        raise ValueError(f"{name}: no parameter is called {listed(unknown)}; there are {listed(sorted(paths))}")
    many = sorted(at.path for at in each.values() if len(at.shape) > 2 and at.path not in diagonal)
    if many:
        raise ValueError(
            f"{name}: {listed(many)} have three or more dimensions, for which there are no Kronecker factors here. "
            f"Freeze them, or pass their paths in diagonal="
        )
    return tuple(sorted(diagonal))


# --- what is kept ---


def _zeros(at: Place, kind: str) -> Any:
    shapes = {side: (at.shape[i],) * 2 for i, side in enumerate(SIDES) if side in KEPT.get(kind, ())}
    return remembered(at.unit, at.block, at.owner, shapes | {"values": at.shape}, wide(at.unit.values))


def _read(space: Space, each: dict[Key, Place], folder: Path, name: str) -> Kronecker:
    told = checkpoint.load(folder, {"kinds": {at.path: "" for at in each.values()}, "rows": 0.0}, ignore=r"state\..*")
    state = {at.block.name: _zeros(at, told["kinds"][at.path]) for at in each.values()}
    found = checkpoint.load(folder, told | {"state": state})
    return Kronecker(space.params, found["kinds"], found["rows"], found["state"], name)


Decomposed = tuple[dict[str, Tensor], Tensor | None]  # bases, and on the owner the eigenvalues of their product


def _decomposed(at: Place, total: Total) -> Decomposed:
    """Eigenvectors of the factors of a matrix, zeros on other ranks than the owner; and K-FAC's eigenvalues."""
    assert total.kind is not None, "it is used"
    if not at.mine:
        like = at.unit.values
        sides = [(side, at.shape[i]) for i, side in enumerate(SIDES) if side in KEPT[total.kind]]
        return {side: like.new_zeros((n, n), dtype=wide(like)) for side, n in sides}, None
    bases, values = {}, []
    for i, side in enumerate(SIDES):
        moment = total.moments[i]
        if side in KEPT[total.kind]:
            found, bases[side] = eigh(moment)
            values.append(found.clamp(min=0))
        else:
            values.append(moment)
    return bases, torch.outer(*values) / total.tokens
