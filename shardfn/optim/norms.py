"""Norms of sharded trees, in which every element counts once.

What a rank holds is summed over exactly those axes that cut it: not over replicas, and not over tensor-parallel ranks
that hold the same parameter whole. One reduction for each set of axes, however many parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.mesh.scope import mesh_of, scope
from shardfn.optim.differentiable import differentiable, tied, varied
from shardfn.optim.hyperparameters import check, kind
from shardfn.optim.optimizer import Transform
from shardfn.quoting import listed
from shardfn.shards.pieces import Unit, Units, dense, home, spread, units
from shardfn.tiers.placing import held
from shardfn.tiers.streaming import in_place
from shardfn.tiers.tensors import on_disk


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of a tree.

    Attributes:
        total: of all of it, `global_norm` as a number.
        stages: of each stage, by path; a plain tensor is a stage of its own.
        parameters: of each parameter, by path, such as `blocks.0.attn.q`.
    """

    total: float
    stages: dict[str, float]
    parameters: dict[str, float]


def norms(tree: Any) -> Norms:
    """Euclidean norms of a tree, its stages and its parameters, as plain numbers. All ranks call it together.

    Args:
        tree: parameters, gradients or anything shaped like them, of any floating-point or complex dtype. Integers,
            frozen parameters and None are left out.

    Returns:
        `Norms`, the same on every rank. The host waits for them.

    Example:
        ``for path, norm in norms(grads).parameters.items(): print(path, norm)``
    """
    known = units(tree)
    found = squares(known)
    of = {path: unit.name for unit in known.each if unit.trainable for _, path, _ in spread(unit)}  # stages
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
    """The Euclidean norm of a whole tree, in which each element counts once. All ranks call it together.

    Args:
        tree: parameters, gradients or anything shaped like them, of any floating-point or complex dtype. Integers,
            frozen parameters and None are left out.

    Returns:
        A 0-d tensor, the same on every rank: float64 if something in the tree is double, else float32. Differentiable.

    Example:
        ``penalised = loss + 1e-4 * global_norm(params) ** 2``
    """
    found = list(squares(units(tree)).values())
    return torch.stack(found).sum().sqrt() if found else torch.zeros(())


def vdot(a: Any, b: Any) -> Tensor:
    """The sum over all elements of `conj(a) * b`. All ranks call it together.

    As `jax.numpy.vdot` of whole trees: each element counts once, however it is cut and repeated. Differentiable;
    integers, frozen parameters and None are left out. `vdot(a, a)` is the square of `global_norm(a)`.

    Args:
        a: parameters, gradients or anything shaped like them.
        b: another such tree, of the same layouts.

    Returns:
        A 0-d tensor, the same on every rank: float32, or float64 if something is double; complex if something is.

    Raises:
        ValueError: trees of different structure, layouts or shapes.

    Example:
        A Rayleigh quotient, for the curvature along a direction `v`: ``vdot(v, hvp(v)) / vdot(v, v)``
    """
    left, right = units(a), units(b)
    ours, theirs = ([(one.name, one.layout, one.values.shape) for one in known.each] for known in (left, right))
    if left.tree != right.tree:
        both = listed([left.tree, right.tree], separator=" and ", room=1200)
        raise ValueError(f"vdot: the trees differ: their structures are {both}")
    for (name, layout, shape), (other, another, size) in zip(ours, theirs, strict=True):
        if (layout, shape) != (another, size):
            raise ValueError(
                f"vdot: the trees differ: {name} is {layout or 'plain'}, {tuple(shape)} here, and {other} is "
                f"{another or 'plain'}, {tuple(size)}, in the other: it takes two trees of the same layouts. "
                f"Where gradients are cut further than parameters (zero1, zero2, hfsdp), two gradients go "
                f"together, or two trees of parameters"
            )
    sources = [unit.values for known in (left, right) for unit in known.each if unit.trainable]
    numbers = 2 if any(x.is_complex() for x in sources) else 1
    found: dict[str, Tensor] = {}
    for x, y in zip(left.each, right.each, strict=True):
        for one in x.segments if x.trainable else ():
            p, q = (unit.values.reshape(-1)[one.start : one.stop] for unit in (x, y))
            dtype = torch.promote_types(torch.promote_types(p.dtype, q.dtype), wide(p))
            product = torch.vdot(p.to(dtype), q.to(dtype))
            found[one.path] = torch.stack(
                (product.real, product.imag if product.is_complex() else product * 0)[:numbers]
            )
    every = list(totals(left, found, lambda whole: numbers, sources).values())
    total = torch.stack(every).sum(0) if every else torch.zeros(numbers)
    return torch.view_as_complex(total) if numbers == 2 else total[0]


def clip_by_global_norm(limit: float, *, donate: bool = True) -> Transform:
    r"""Scales gradients so that their global norm is at most `limit`; overwrites them unless `donate=False`.

    :math:`g \leftarrow g \min(1, c / \lVert g \rVert)`. The norm from before is in the state, under `"norm"`, a 0-d
    tensor. A norm that is not finite makes all gradients so.

    Args:
        limit: :math:`c`, above 0.
        donate: overwrite gradients; if not, the update can be differentiated.

    Returns:
        A `Transform`.

    Raises:
        TypeError, ValueError: a limit that is not a number, such as gradients, or not above 0.

    Sources: Pascanu et al., On the difficulty of training recurrent neural networks (2013), algorithm 1.

    Example:
        ``chain(clip_by_global_norm(1.0), adamw(3e-4))``
    """
    if not isinstance(limit, (int, float)) and optree.tree_leaves(limit) != [limit]:
        raise TypeError(
            f"clip_by_global_norm: limit is {kind(limit)}; it is a number, and what clips is the transform that it "
            f"gives: chain(clip_by_global_norm(1.0), adamw(3e-4)), or grads, state = clip.update(params, grads, state)"
        )
    check("clip_by_global_norm", {"limit": limit, "donate": donate})

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        del params
        norm = global_norm(grads)
        factor = (limit / norm.clamp(min=limit)).where(norm.isfinite(), norm)
        return scaled(grads, factor, donate), state | {"limit": limit, "norm": norm.detach()}

    def init(params: Any) -> Any:
        known = [unit.values for unit in units(params).each if unit.trainable]
        dtype = torch.float64 if torch.float64 in map(wide, known) else torch.float32
        return {"limit": limit, "norm": torch.zeros((), dtype=dtype, device=known[0].device if known else None)}

    return Transform(init, update)


def clip_by_value(limit: float, *, donate: bool = True) -> Transform:
    """Clamps each element of the gradients to `[-limit, limit]`; overwrites them unless `donate=False`.

    Args:
        limit: above 0.
        donate: overwrite gradients; if not, the update can be differentiated.

    Returns:
        A `Transform`.

    Raises:
        TypeError, ValueError: a limit that is not a number, or not above 0.

    Example:
        ``chain(clip_by_value(0.1), sgd(0.01))``
    """
    check("clip_by_value", {"limit": limit, "donate": donate})

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        del params
        clamped = _changed(grads, donate, lambda x: x.clamp_(-limit, limit), lambda u: u.values.clamp(-limit, limit))
        return clamped, state

    return Transform(lambda params: {"limit": limit}, update)


def scaled(tree: Any, factor: Tensor | float, donate: bool) -> Any:
    """A tree times a number or a 0-d tensor, each in its own dtype."""
    at = functools.cache(lambda device: factor.to(device) if isinstance(factor, Tensor) else factor)
    return _changed(
        tree, donate, lambda x: x.mul_(at(x.device)), lambda u: (u.values * varied(factor, u)).to(u.values.dtype)
    )


def _changed(tree: Any, donate: bool, overwrite: Callable[[Tensor], object], replaced: Callable[[Unit], Tensor]) -> Any:
    """A tree of which each trained tensor is overwritten, or replaced where it must not or cannot be."""
    known = units(tree)
    trained = [unit for unit in known.each if unit.trainable and unit.values is not None]
    # In the gradient of a sum, say, an element of memory stands for several.
    if donate and not any(0 in unit.values.stride() and not dense(unit.values) for unit in trained):
        with torch.no_grad():
            in_place([unit.values for unit in trained], overwrite)
        return tree
    return known.like(replaced(u) if u.trainable and u.values is not None else u.values for u in known.each)


def squares(known: Units) -> dict[str, Tensor]:
    """The sum of squares of each parameter over all ranks, by path: 0-d, float32 or wider."""
    found: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    for unit in known.each:
        if unit.trainable and on_disk(unit.values) and not differentiable(unit.values):
            with held(unit.values.detach()) as values:
                found |= _norms(_parts_of(unit, values))
        elif unit.trainable:
            parts |= _parts_of(unit, unit.values)
    found |= _norms(parts)
    sources = [unit.values for unit in known.each if unit.trainable]
    return {path: total[0] for path, total in totals(known, found, lambda whole: 1, sources).items()}


def _parts_of(unit: Unit, values: Tensor) -> dict[str, Tensor]:
    return {one.path: values.reshape(-1)[one.start : one.stop] for one in unit.segments}


def _norms(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The square of each one's norm, as a vector of one."""
    kinds: dict[Any, list[str]] = {}
    for path, part in parts.items():
        kinds.setdefault((wide(part), part.device), []).append(path)
    found: dict[str, Tensor] = {}
    for (dtype, _), paths in kinds.items():
        each = torch._foreach_norm([parts[path] for path in paths], 2.0, dtype=dtype)
        found |= {path: norm.square().reshape(1) for path, norm in zip(paths, each, strict=True)}
    return found


def totals(
    known: Units, here: dict[str, Tensor], length: Callable[[tuple[int, ...]], int], sources: list[Tensor]
) -> dict[str, Tensor]:
    """Sums, over the ranks among which each trained parameter is cut, of a vector that they have of it.

    Args:
        known: the parameters.
        here: by path, this rank's vectors; zeros where there is none.
        length: of the vectors, from the parameter's whole shape.
        sources: what the vectors were made from, on every rank.
    """
    found: dict[str, Tensor] = {}
    groups: dict[tuple[Any, ...], dict[str, int]] = {}
    for unit in known.each:
        if unit.trainable:
            for axes, path, whole in spread(unit):
                kind = (unit.layout and unit.layout.grid, axes, wide(unit.values), home(unit))
                groups.setdefault(kind, {})[path] = length(whole)
    for (grid, axes, dtype, device), lengths in groups.items():
        own = next((here[path].device for path in lengths if path in here), device)
        rows = [
            here[path].to(dtype) if path in here else torch.zeros(n, dtype=dtype, device=own)
            for path, n in lengths.items()
        ]
        total = tied(torch.cat(rows).to(device), sources)
        if axes:
            with scope(mesh_of(grid, "a tree")):
                total = functional.psum(total, axes)
        found |= dict(zip(lengths, total.split(list(lengths.values())), strict=True))
    return found


def wide(x: Tensor) -> torch.dtype:
    """What numbers of this dtype are added up in."""
    return torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32
