"""Muon on flat shards: each matrix is orthogonalised on one rank, where its pieces come together.

Matrices are assigned to ranks by cost, the costliest first to the rank with the least to do. One all-to-all brings the
pieces there, another brings the results back; replicas share the work too. So no rank does another's, and a rank
holds whole only what it works on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives import functional
from shardfn.collectives.ledger import record
from shardfn.compat import process_groups
from shardfn.mesh.axes import axis_of
from shardfn.mesh.grid import Grid
from shardfn.mesh.scope import mesh_of, scope
from shardfn.optim.differentiable import numbered, tied
from shardfn.optim.elementwise import Schedule
from shardfn.optim.optimizer import Optimizer, Rule, of_rule
from shardfn.optim.ranges import at_step, check, whole
from shardfn.shards.layout import Layout, Range
from shardfn.shards.pieces import Unit, pairs, refuse_complex, units, zeros_like

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def muon(
    lr: float | Tensor | Schedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float | Rule = 0.1,
    iterations: int = 5,
    dtype: torch.dtype | None = torch.bfloat16,
    donate: bool = True,
) -> Optimizer:
    r"""Muon, for matrices only.

    :math:`m \leftarrow \mu m + (1 - \mu) g`, then :math:`u = (1 - \mu) g + \mu m` with Nesterov's momentum or else
    :math:`m`; :math:`p \leftarrow (1 - \eta \lambda) p - \eta \sqrt{\max(1, r / c)}\, \mathrm{orth}(u)` for a matrix of
    :math:`r` rows and :math:`c` columns, where :math:`\mathrm{orth}` makes all singular values about 1 by a quintic
    Newton-Schulz iteration.

    State: one number a parameter.

    Args:
        lr: a number, or a function of the number of the step, which begins at 1.
        momentum: :math:`\mu`.
        nesterov: as above.
        weight_decay: :math:`\lambda`, or a rule `(path, shape) -> number`.
        iterations: of Newton-Schulz.
        dtype: that it computes in, and moves; None for the gradient's.
        donate: as for `sgd`. Without it matrices are gathered on every rank, differentiably.

    Raises:
        ValueError: a parameter that is no matrix.

    Sources: Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).

    Example:
        ``masked(muon(0.02), lambda path, shape: len(shape) == 2 and "embed" not in path, adamw(3e-4))``
    """
    numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    check("muon", numbers | {"nesterov": nesterov, "donate": donate})
    whole("muon", "iterations", iterations, 1)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"muon: dtype={dtype!r}; it is a floating dtype, or None for the gradient's")
    constant = {name: value for name, value in numbers.items() if not callable(value)}

    def init(params: Any) -> Any:
        refuse_complex(units(params), "muon")
        for unit in units(params).each:
            _refuse(unit)
        return {"step": 0, "numbers": constant, "momentum": zeros_like(params)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, known = state["step"] + 1, units(params)
        now = numbers | state["numbers"]
        now["lr"] = at_step(now["lr"], count)
        momenta = known.beside(state["momentum"])
        present = {i: grad for i, (_, grad) in enumerate(pairs(known, grads)) if grad is not None}
        at, gs = list(present), list(present.values())
        if not at:
            return params, state | {"step": count}
        with torch.set_grad_enabled(not donate and torch.is_grad_enabled()):
            ms: list[Tensor] = [momenta[i] for i in at]
            if donate:
                torch._foreach_lerp_(ms, gs, 1 - now["momentum"])
            else:
                ms = list(torch._foreach_lerp(ms, gs, 1 - now["momentum"]))
            updates = list(torch._foreach_lerp(gs, ms, now["momentum"])) if nesterov else ms
            chosen = [known.each[i] for i in at]
            orthogonal = (apart if donate else together)(chosen, updates, iterations, dtype)
            values = [unit.values for unit in known.each]
            for i, unit, o in zip(at, chosen, orthogonal, strict=True):
                values[i] = _moved(unit, o, now, donate)
        for i, m in zip(at, ms, strict=True):
            momenta[i] = m
        made = params if donate else known.like(values)
        return made, state | {"step": count, "momentum": known.like(momenta)}

    return Optimizer(init, step)


def _moved(unit: Unit, o: Tensor, now: dict[str, Any], donate: bool) -> Tensor:
    """A unit's values after their step along `o`."""
    flat = unit.values.reshape(-1)
    rows: list[Tensor] = []
    last = 0
    rates, ties = numbered(now["lr"], unit)
    for one in unit.filled:
        lr = rates[one.path]
        scale = lr * max(1.0, one.whole[0] / one.whole[1]) ** 0.5
        keep = 1 - lr * of_rule(now["weight_decay"], one)
        p, direction = flat[one.start : one.stop], o.reshape(-1)[one.start : one.stop].to(flat.dtype)
        if donate:
            p.mul_(keep)
            # As alpha a tensor would be read by the host.
            p.sub_(direction * scale) if isinstance(scale, Tensor) else p.add_(direction, alpha=-scale)
        else:
            rows += [flat[last : one.start], p * keep - scale * direction]
            last = one.stop
    if donate:
        return unit.values if unit.values.is_contiguous() else unit.values.copy_(flat.view(unit.values.shape))
    return tied(torch.cat([*rows, flat[last:]]).view(unit.values.shape), [o, *ties])


def _refuse(unit: Unit) -> None:
    entries = [unit.layout.entries[i] for i in unit.entries] if unit.layout else unit.segments
    for one in entries:
        if unit.trainable and len(one.shape) != 2:
            raise ValueError(
                f"muon: {one.path} has shape {one.shape}, and only matrices can be orthogonalised; give the others to "
                f"another optimizer: masked(muon(...), lambda path, shape: len(shape) == 2, adamw(...))"
            )


def orthogonalised(x: Tensor, iterations: int, dtype: torch.dtype | None) -> Tensor:
    """`[..., r, c]` matrices with singular values of about 1."""
    a, b, c = COEFFICIENTS
    y = x.to(dtype or x.dtype)
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.mT if tall else y


# --- where each matrix comes together ---


@dataclass(frozen=True)
class Matrix:
    """A whole matrix, of which ranks hold parts.

    Attributes:
        path: its name.
        shape: rows and columns.
        layout: of the flat shard that it is in; None for one that every rank has.
        entry: its number in the layout.
    """

    path: str
    shape: tuple[int, int]
    layout: Layout | None = None
    entry: int = 0

    @property
    def cost(self) -> int:
        """Operations of an iteration: two products of `m x m` and `m x n`, and one of `m x m` and `m x m`."""
        least = min(self.shape)
        return 4 * self.shape[0] * self.shape[1] * least + 2 * least**3

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh along which ranks hold parts or copies of it."""
        if self.layout is None:
            return ()
        used = {*self.layout.placement.replicas, *self.layout.cut_axes(self.entry)}
        return tuple(name for name, _ in self.layout.grid.sizes if name in used)

    def part(self, rank: int) -> Range | None:
        """What a rank holds of it."""
        assert self.layout is not None, "only a part has a place"
        return next((one for one in self.layout.ranges(rank) if one.path == self.path), None)


@functools.lru_cache(maxsize=4096)
def _of_layout(layout: Layout, entries: tuple[int, ...]) -> tuple[Matrix, ...]:
    found = []
    for number in entries:
        rows, columns = layout.whole_shape(number)
        if rows * columns:  # or else there is nothing to do, and nobody has a part
            found.append(Matrix(layout.entries[number].path, (rows, columns), layout, number))
    return tuple(found)


def _matrices(unit: Unit) -> tuple[Matrix, ...]:
    if unit.layout is None:
        return tuple(Matrix(one.path, (one.shape[0], one.shape[1])) for one in unit.filled)
    return _of_layout(unit.layout, unit.entries)


Part = tuple[int, Range]  # number of the matrix, and which of its elements


@dataclass(frozen=True)
class Plan:
    """Who orthogonalises what, and what travels for it.

    Attributes:
        peers: the ranks that share the work.
        owners: for each matrix, the peer who does it.
        sent: to each peer, the parts of matrices that it needs from this rank.
        received: from each peer, likewise; results travel the other way, to all copies.
        returned: to each peer, the parts of this rank's results that it holds.
        wanted: from each peer, the parts of its results that this rank holds.
    """

    peers: tuple[int, ...]
    owners: tuple[int, ...]
    sent: tuple[tuple[Part, ...], ...]
    received: tuple[tuple[Part, ...], ...]
    returned: tuple[tuple[Part, ...], ...]
    wanted: tuple[tuple[Part, ...], ...]


@functools.lru_cache(maxsize=256)
def planned(matrices: tuple[Matrix, ...], peers: tuple[int, ...], rank: int) -> Plan:
    """The plan for matrices that the same axes spread; the same on all peers but for whose view it is."""
    owners = assigned([one.cost for one in matrices], len(peers))

    def copy_of(matrix: Matrix, peer: int) -> int:
        assert matrix.layout is not None, "what travels lies in a layout"
        names = matrix.layout.placement.replicas
        return matrix.layout.grid.index(peer, names) if names else 0

    def parts(holder: int, owner: int, same_copy: bool) -> tuple[Part, ...]:
        found = []
        for number, matrix in enumerate(matrices):
            if peers[owners[number]] == owner and (not same_copy or copy_of(matrix, holder) == copy_of(matrix, owner)):
                part = matrix.part(holder)
                if part is not None:
                    found.append((number, part))
        return tuple(found)

    return Plan(
        peers,
        tuple(owners),
        tuple(parts(rank, peer, True) for peer in peers),
        tuple(parts(peer, rank, True) for peer in peers),
        tuple(parts(peer, rank, False) for peer in peers),
        tuple(parts(rank, peer, False) for peer in peers),
    )


def assigned(costs: Sequence[int], workers: int) -> list[int]:
    """A worker for each job: the costliest first, to whom has the least to do (Graham's rule)."""
    load, found = [0] * workers, [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        found[job] = min(range(workers), key=lambda w: (load[w], w))
        load[found[job]] += costs[job]
    return found


def apart(
    chosen: Sequence[Unit], updates: Sequence[Tensor], iterations: int, dtype: torch.dtype | None
) -> list[Tensor]:
    """Each unit's elements of its orthogonalised matrices, each matrix worked on by one rank."""
    made = [torch.zeros_like(x) for x in updates]
    groups: dict[tuple[Any, ...], list[tuple[Matrix, int]]] = {}
    for i, unit in enumerate(chosen):
        for matrix in _matrices(unit):
            kind = (matrix.layout and matrix.layout.grid, matrix.axes, dtype or updates[i].dtype, updates[i].device)
            groups.setdefault(kind, []).append((matrix, i))
    for (grid, axes, kind, _), members in groups.items():
        if not axes:
            for matrix, i in members:
                made[i].copy_(orthogonalised(updates[i].view(matrix.shape), iterations, kind).view(made[i].shape))
        else:
            _moved_and_back(grid, axes, kind, members, chosen, updates, made, iterations)
    return made


def _moved_and_back(
    grid: Grid,
    axes: tuple[str, ...],
    dtype: torch.dtype,
    members: list[tuple[Matrix, int]],
    chosen: Sequence[Unit],
    updates: Sequence[Tensor],
    made: list[Tensor],
    iterations: int,
) -> None:
    mesh = mesh_of(grid, "muon: a tree")
    axis = axis_of(mesh, axes)
    group = process_groups.group_of(axis.group) if axis.size > 1 else None
    matrices, rank = tuple(matrix for matrix, _ in members), process_groups.global_rank()
    plan = planned(matrices, tuple(dist.get_process_group_ranks(group)) if group else (rank,), rank)
    here = {one.path: (i, one.start, one.stop) for i, unit in enumerate(chosen) for one in unit.segments}

    def local(tensors: Sequence[Tensor], number: int) -> Tensor:
        i, start, stop = here[matrices[number].path]
        return tensors[i].reshape(-1)[start:stop]

    like = updates[members[0][1]].to(dtype)
    out = [[local(updates, n).to(dtype) for n, _ in to] for to in plan.sent]
    pieces = _exchanged(out, plan.received, like, group, axis.group, axes)
    mine = [n for n, owner in enumerate(plan.owners) if plan.peers[owner] == rank]
    whole = {n: _assembled(matrices[n], [(r, x) for m, r, x in pieces if m == n], like) for n in mine}
    whole = {n: orthogonalised(x, iterations, dtype) for n, x in whole.items()}
    out = [[_block(whole[n], part).reshape(-1)[part.start : part.stop] for n, part in to] for to in plan.returned]
    for number, _, x in _exchanged(out, plan.wanted, like, group, axis.group, axes):
        local(made, number).copy_(x)


def _exchanged(
    out: list[list[Tensor]],
    coming: Sequence[Sequence[Part]],
    like: Tensor,
    group: Any,
    name: str,
    axes: tuple[str, ...],
) -> list[tuple[int, Range, Tensor]]:
    """What the peers sent: the number of a matrix, which elements, and the elements."""
    sizes = [sum(x.numel() for x in to) for to in out]
    expected = [sum(part.stop - part.start for _, part in each) for each in coming]
    flat = torch.cat([like[:0].reshape(-1), *(x for to in out for x in to)])
    received = torch.empty(sum(expected), dtype=like.dtype, device=like.device)
    if group is None:
        received = flat
    else:
        away = flat.numel() - sizes[dist.get_rank(group)]
        record("all_to_all", name, like.dtype, away * like.element_size(), "native", axes)
        dist.all_to_all_single(received, flat, expected, sizes, group=group)
    parts = [part for each in coming for part in each]
    lengths = [part.stop - part.start for _, part in parts]
    return [(n, part, x) for (n, part), x in zip(parts, received.split(lengths), strict=True)]


def _assembled(matrix: Matrix, parts: list[tuple[Range, Tensor]], like: Tensor) -> Tensor:
    whole = torch.empty(matrix.shape, dtype=like.dtype, device=like.device)
    blocks: dict[tuple[int, ...], list[tuple[Range, Tensor]]] = {}
    for part, x in parts:
        blocks.setdefault(part.corner, []).append((part, x))
    for held in blocks.values():
        held.sort(key=lambda one: one[0].start)
        _block(whole, held[0][0]).copy_(torch.cat([x for _, x in held]).view(held[0][0].shape))
    return whole


def _block(whole: Tensor, part: Range) -> Tensor:
    """The value that a rank computes with, of which `part` is a part."""
    (row, column), (rows, columns) = part.corner, part.shape
    return whole[row : row + rows, column : column + columns]


def together(
    chosen: Sequence[Unit], updates: Sequence[Tensor], iterations: int, dtype: torch.dtype | None
) -> list[Tensor]:
    """As `apart`, by collectives that can be differentiated: every rank has every matrix, and works on all of them."""
    made = []
    for unit, update in zip(chosen, updates, strict=True):
        here = {one.path: one for one in unit.segments}
        rows: dict[str, Tensor] = {}
        every = [update]
        for matrix in _matrices(unit):
            whole = update.reshape(matrix.shape) if matrix.layout is None else _whole(matrix, here, update)
            o = orthogonalised(whole, iterations, dtype).to(update.dtype)
            every.append(o)
            if matrix.path in here:
                one = here[matrix.path]
                part = None if matrix.layout is None else matrix.part(process_groups.global_rank())
                mine = o if part is None else _block(o, part)
                rows[matrix.path] = mine.reshape(-1)[one.first : one.first + one.stop - one.start]
        flat, filled, last = torch.zeros_like(update).reshape(-1), [], 0
        for one in unit.filled:
            filled += [flat[last : one.start], rows[one.path]]
            last = one.stop
        made.append(tied(torch.cat([*filled, flat[last:]]).view(update.shape), every))
    return made


def _whole(matrix: Matrix, here: dict[str, Any], update: Tensor) -> Tensor:
    assert matrix.layout is not None, "what is gathered lies in a layout"
    whole = update.new_zeros(matrix.shape)
    part = matrix.part(process_groups.global_rank())
    if part is not None and matrix.path in here:
        one = here[matrix.path]
        block = torch.nn.functional.pad(
            update.reshape(-1)[one.start : one.stop], (part.start, part.shape[0] * part.shape[1] - part.stop)
        ).view(part.shape)
        (row, column), (rows, columns) = part.corner, part.shape
        whole = torch.nn.functional.pad(
            block, (column, matrix.shape[1] - column - columns, row, matrix.shape[0] - row - rows)
        )
    cut = matrix.layout.cut_axes(matrix.entry)
    if not cut:
        return whole
    with scope(mesh_of(matrix.layout.grid, "muon: a tree")):
        return functional.pvary(functional.psum(tied(whole, [update]), cut), cut)
