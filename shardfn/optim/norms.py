"""Norms of sharded trees, in which every element counts once.

What a rank holds is summed over exactly those axes that cut it: not over replicas, and not over tensor-parallel ranks
that hold the same parameter whole. One reduction for each set of axes, however many parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn import collectives
from shardfn.mesh import mesh_of, scope
from shardfn.optim.core import Transform, Unit, Units, units


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of a tree.

    Attributes:
        total: of all of it.
        stages: of each stage, by path; a plain tensor is a stage of its own.
        parameters: of each parameter, by path.
    """

    total: float
    stages: dict[str, float]
    parameters: dict[str, float]


def norms(tree: Any) -> Norms:
    """Norms of parameters, gradients or anything shaped like them, as plain numbers. All ranks call it together."""
    known = units(tree)
    found = squares(known)
    of = _names(known)
    values = torch.stack([found[name] for name in of]).tolist() if of else []
    parameters, stages = dict(zip(of, values, strict=True)), dict.fromkeys(of.values(), 0.0)
    for name, stage in of.items():
        stages[stage] += parameters[name]
    return Norms(
        sum(values) ** 0.5,
        {name: value**0.5 for name, value in stages.items()},
        {name: value**0.5 for name, value in parameters.items()},
    )


def global_norm(tree: Any) -> Tensor:
    """The Euclidean norm of a whole tree: 0-d, the same on every rank. All ranks call it together.

    Differentiable; integers, frozen parameters and None are left out.
    """
    found = list(squares(units(tree)).values())
    return torch.stack(found).sum().sqrt() if found else torch.zeros(())


def clip_by_global_norm(limit: float, *, donate: bool = True) -> Transform:
    r"""Scales gradients so that their global norm is at most `limit`: :math:`g \min(1, c / \lVert g \rVert)`.

    The norm before it stands in the state, under `"norm"`.

    Args:
        limit: :math:`c`, above 0.
        donate: gradients are overwritten.

    Sources: Pascanu et al., On the difficulty of training recurrent neural networks (2013), algorithm 1.
    """
    if not limit > 0:
        raise ValueError(f"clip_by_global_norm: limit={limit!r}; it is above 0")

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        del params
        norm = global_norm(grads)
        factor = (limit / norm.clamp(min=limit)).where(norm.isfinite(), norm)
        return scaled(grads, factor, donate), state | {"limit": limit, "norm": norm.detach()}

    return Transform(lambda params: {"limit": limit, "norm": torch.zeros(())}, update)


def clip_by_value(limit: float, *, donate: bool = True) -> Transform:
    """Clamps each element of the gradients to `[-limit, limit]`."""
    if not limit > 0:
        raise ValueError(f"clip_by_value: limit={limit!r}; it is above 0")

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        del params
        known = units(grads)
        values = [unit.values for unit in known.each if unit.trainable]
        if donate:
            with torch.no_grad():
                torch._foreach_clamp_min_(values, -limit)
                torch._foreach_clamp_max_(values, limit)
            return grads, state
        return known.like(u.values.clamp(-limit, limit) if u.trainable else u.values for u in known.each), state

    return Transform(lambda params: {"limit": limit}, update)


def scaled(tree: Any, factor: Tensor, donate: bool) -> Any:
    """A tree times a 0-d tensor, each in its own dtype."""
    known = units(tree)
    if donate:
        with torch.no_grad():
            for unit in known.each:
                if unit.trainable:
                    unit.values.mul_(factor.to(unit.values.device))
        return tree
    return known.like(
        (u.values * factor).to(u.values.dtype) if u.trainable and u.values is not None else u.values for u in known.each
    )


def squares(known: Units) -> dict[str, Tensor]:
    """The sum of squares of each parameter over all ranks, by path: 0-d, float32 or wider."""
    return sums(known, lambda parts, wide: [x.square() for x in torch._foreach_norm(parts, 2.0, dtype=wide)])


def sums(known: Units, of: Callable[[list[Tensor], torch.dtype], list[Tensor]]) -> dict[str, Tensor]:
    """A sum over the elements of each parameter, on whatever ranks they are, by path: 0-d, float32 or wider.

    Args:
        known: the parameters.
        of: `(parts, dtype) -> sums`: what each part here adds.
    """
    found: dict[str, Tensor] = {}
    groups: dict[tuple[Any, tuple[str, ...]], list[Unit]] = {}
    for unit in known.each:
        if unit.trainable:
            for axes in cuts(unit):
                groups.setdefault((unit.layout and unit.layout.grid, axes), []).append(unit)
    for (grid, axes), members in groups.items():
        here = {name: i for i, name in enumerate(dict.fromkeys(n for unit in members for n in _entries(unit, axes)))}
        parts, at = [], []
        for unit in members:
            for one in unit.segments:
                if one.path in here:
                    parts.append(unit.values.reshape(-1)[one.start : one.stop])
                    at.append(here[one.path])
        like = members[0].values
        wide = torch.float64 if like.dtype in (torch.float64, torch.complex128) else torch.float32
        total = torch.zeros(len(here), dtype=wide, device=like.device)
        if parts:
            each = torch.stack([x.to(wide) for x in of(parts, wide)])
            total = total.index_add(0, torch.tensor(at, device=like.device), each)
        if axes:
            with scope(mesh_of(grid, "a norm: a tree")):
                total = collectives.psum(total, axes)
        found |= dict(zip(here, total.unbind(), strict=True))
    return found


def cuts(unit: Unit) -> list[tuple[str, ...]]:
    """The sets of axes that cut parameters of a unit, whether or not this rank holds any of them."""
    if unit.layout is None:
        return [()]
    order = [name for name, _ in unit.layout.grid.sizes]
    own = frozenset(unit.layout.placement.axes)
    sets = {own | frozenset(unit.layout.entries[i].spec.axes) for i in unit.entries}
    return sorted(tuple(sorted(one, key=order.index)) for one in sets)


def _entries(unit: Unit, axes: tuple[str, ...]) -> list[str]:
    """The parameters of a unit that these axes cut."""
    if unit.layout is None:
        return [unit.segments[0].path]
    own, entries = frozenset(unit.layout.placement.axes), [unit.layout.entries[i] for i in unit.entries]
    return [e.path for e in entries if own | frozenset(e.spec.axes) == frozenset(axes)]


def _names(known: Units) -> dict[str, str]:
    """The stage of each trained parameter."""
    trained = [unit for unit in known.each if unit.trainable]
    return {name: unit.name for unit in trained for axes in cuts(unit) for name in _entries(unit, axes)}
