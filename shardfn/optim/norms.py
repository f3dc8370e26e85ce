"""Norms of sharded trees, in which every element counts once.

Partial sums are added over exactly the axes that shard a parameter: not over replicas, and not over tensor-parallel
ranks that hold the same parameter whole. There is one reduction for each set of axes, however many parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.compat import functorch
from shardfn.mesh.exact import sum_of_pieces
from shardfn.mesh.scope import scope_of
from shardfn.optim.differentiable import differentiable, refuse_overwriting, tied, times, varied
from shardfn.optim.hyperparameters import check, kind
from shardfn.optim.optimizer import Transform
from shardfn.quoting import listed
from shardfn.shards.parts import has_parts, refuse_parts
from shardfn.shards.pieces import Unit, Units, dense, home, spread, units
from shardfn.tiers.placing import in_memory
from shardfn.tiers.streaming import in_place
from shardfn.tiers.tensors import on_disk


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of a tree.

    Attributes:
        total: of the whole tree: `global_norm` as a number.
        stages: of each stage, by path; a plain tensor is a stage of its own.
        parameters: of each parameter, by path, such as `blocks.0.attn.q`.
    """

    total: float
    stages: dict[str, float]
    parameters: dict[str, float]


def norms(tree: Any) -> Norms:
    """Euclidean norms of a tree, its stages and its parameters, as plain numbers. All ranks call it together.

    Args:
        tree: parameters, gradients or a tree of the same structure, of any floating-point or complex dtype. Integers,
            frozen parameters and None are left out.

    Returns:
        `Norms`, the same on every rank. The host waits for them.

    Example:
        ``for path, norm in norms(grads).parameters.items(): print(path, norm)``
    """
    leaves = _counted(units(tree))
    refuse_parts("norms", leaves)
    sums = squares(leaves)
    stage_of = {path: unit.name for unit in leaves.each for _, path, _ in spread(unit)}
    values = torch.stack([sums[name] for name in stage_of]).tolist() if stage_of else []
    parameters, stages = dict(zip(stage_of, values, strict=True)), dict.fromkeys(stage_of.values(), 0.0)
    for name, stage in stage_of.items():
        stages[stage] += parameters[name]
    by_name = [{name: value**0.5 for name, value in sums.items()} for sums in (stages, parameters)]
    return Norms(sum(values) ** 0.5, *by_name)


def global_norm(tree: Any, *, order: float = 2.0) -> Tensor:
    """The norm of a whole tree, in which each element counts once. All ranks call it together.

    Args:
        tree: parameters, gradients or a tree of the same structure, of any floating-point or complex dtype. Integers,
            frozen parameters and None are left out.
        order: 2 for the Euclidean norm, 1 for the sum of magnitudes, `math.inf` for the largest magnitude.

    Returns:
        A 0-d tensor, the same on every rank: float64 if any tensor of the tree is double, else float32.
        Differentiable, but for the largest magnitude on several ranks.

    Raises:
        ValueError: another order, or a plain tensor that a spec of `shard_map` shards.

    Example:
        ``penalized = loss + 1e-4 * global_norm(params) ** 2``
    """
    leaves = _counted(units(tree))
    refuse_parts("global_norm", leaves)
    _refuse_order("global_norm", order)
    return _norm(leaves, order)


def _refuse_order(name: str, order: float) -> None:
    if isinstance(order, bool) or order not in (1, 2, math.inf):
        raise ValueError(f"{name}: order must be 1, 2 or math.inf, got {order!r}. Pass one of these")


def _norm(leaves: Units, order: float) -> Tensor:
    if order == math.inf:
        return _largest_magnitude(leaves)
    sums = list(squares(leaves, order).values())
    total = torch.stack(sums).sum() if sums else torch.zeros((), device="cpu")
    return total.sqrt() if order == 2 else total


def _largest_magnitude(leaves: Units) -> Tensor:
    """The largest magnitude on all ranks; infinite if a number is not finite."""
    tops: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    grids: dict[Any, list[Unit]] = {}
    for unit in leaves.each:
        grids.setdefault(unit.layout and unit.layout.grid, []).append(unit)
        if on_disk(unit.values):
            with in_memory(unit.values) as values:
                tops |= _norms(_segments_of(unit, values), math.inf)
        else:
            parts |= _segments_of(unit, unit.values)
    tops |= _norms(parts, math.inf)
    largest = []
    for grid, members in grids.items():
        places: dict[Any, list[Tensor]] = {}
        for unit in members:
            for top in (tops[segment.path] for segment in unit.segments if segment.path in tops):
                places.setdefault((top.device, top.dtype), []).append(top)
        dtype = functools.reduce(torch.promote_types, (wide(unit.values) for unit in members))
        zero = torch.zeros(1, dtype=dtype, device=home(members[0]))
        maximum = torch.cat([zero, *(torch.cat(xs).to(zero) for xs in places.values())])
        maximum = maximum.nan_to_num(nan=math.inf, posinf=math.inf).amax()
        if grid is not None:
            with scope_of(grid, "a tree"):
                maximum = functional.pmax(maximum, tuple(name for name, _ in grid.sizes))
        largest.append(maximum)
    if not largest:
        return torch.zeros((), device="cpu")
    return functools.reduce(lambda a, b: torch.maximum(*_promoted(a, b)), largest)


def _promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Casts two numbers to the wider of their dtypes, on the device of the second."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(b.device, dtype), b.to(dtype)


def vdot(a: Any, b: Any) -> Tensor:
    """The sum over all elements of `conj(a) * b`. All ranks call it together.

    As `jax.numpy.vdot` of whole trees: each element counts once, however it is cut and replicated. Differentiable;
    integers, frozen parameters and None are left out. `vdot(a, a)` is the square of `global_norm(a)`.

    Args:
        a: parameters, gradients or a tree of the same structure.
        b: another such tree, with the same layouts.

    Returns:
        A 0-d tensor, the same on every rank: float32, or float64 if any tensor is double; complex if any tensor is.

    Raises:
        ValueError: the trees differ in structure, layouts or shapes.

    Example:
        A Rayleigh quotient, for the curvature along a direction `v`: ``vdot(v, hvp(v)) / vdot(v, v)``
    """
    left, right = units(a), units(b)
    if left.tree != right.tree:
        structures = listed([left.tree, right.tree], separator=" and ", room=1200)
        raise ValueError(f"vdot: the trees differ: their structures are {structures}")
    left, right = _counted(left, right), _counted(right, left)
    refuse_parts("vdot", left, right)
    facts = ([(unit.name, unit.layout, unit.values.shape) for unit in leaves.each] for leaves in (left, right))
    for (name, layout, shape), (other_name, other_layout, other_shape) in zip(*facts, strict=True):
        if (layout, shape) != (other_layout, other_shape):
            raise ValueError(
                f"vdot: the trees differ: {name} is {layout or 'plain'}, {tuple(shape)} here, and {other_name} is "
                f"{other_layout or 'plain'}, {tuple(other_shape)}, in the other. Pass two gradients or two trees "
                f"of parameters, as zero1, zero2 and hfsdp shard gradients further"
            )
    return dots([left], right)[0]


def _counted(leaves: Units, other: Units | None = None) -> Units:
    """The trained units that have values, in another tree of the same structure, too."""
    zipped = zip(leaves.each, (other or leaves).each, strict=True)
    return leaves._replace(each=[u for u, v in zipped if u.trainable and u.values is not None and v.values is not None])


def dots(trees: Sequence[Units], other: Units) -> Tensor:
    """The inner products of trees with one other, `[trees]`, as `vdot` computes them; the trees are not compared."""
    sources = [unit.values for leaves in (*trees, other) for unit in leaves.each if unit.trainable]
    numbers = 2 if any(x.is_complex() for x in sources) else 1
    products: dict[str, dict[int, Tensor]] = {}
    for i, y in enumerate(other.each):
        for seg in y.segments if y.trainable else ():

            def product_of(start: int, stop: int, i: int = i, y: Unit = y) -> Tensor:
                rows = []
                for left in trees:
                    p, q = (unit.values.reshape(-1)[start:stop] for unit in (left.each[i], y))
                    dtype = torch.promote_types(torch.promote_types(p.dtype, q.dtype), wide(p))
                    p, q = p.to(dtype), q.to(dtype)
                    # On a CPU torch's products of vectors add one after another, which drifts in float32.
                    product = torch.vdot(p, q) if p.is_complex() else (p * q).sum()
                    complete = product.to(torch.promote_types(dtype, torch.complex64)) if numbers == 2 else product
                    rows.append(torch.view_as_real(complete) if numbers == 2 else product.reshape(1))
                return torch.cat(rows)

            products[seg.path] = y.by_piece(seg, product_of)
    sums = list(totals(other, products, lambda shape: numbers * len(trees), sources).values())
    total = torch.stack(sums).sum(0) if sums else torch.zeros(numbers * len(trees), device="cpu")
    return torch.view_as_complex(total.view(-1, 2)) if numbers == 2 else total


def clip_by_global_norm(
    limit: float, *, order: float = 2.0, by: Callable[[str, Any], Any] | None = None, donate: bool = True
) -> Transform:
    r"""Scales gradients so that their global norm is at most `limit`; overwrites them unless `donate=False`.

    :math:`g \leftarrow g \min(1, c / \lVert g \rVert)`. The norm before clipping is in the state, under `"norm"`, a
    0-d tensor, or with `by` a dict of them. If it is not finite, all gradients of the group become so.

    Args:
        limit: :math:`c`, above 0.
        order: of the norm, as for `global_norm`; with `by` 1 or 2.
        by: a rule `(path, shape) -> name` of a group; each group is scaled by the norm of its own gradients. None for
            one norm of all.
        donate: whether to overwrite gradients; if not, the update can be differentiated.

    Returns:
        A `Transform`.

    Raises:
        TypeError, ValueError: the limit is not a number, or not above 0; another order than 1, 2 or infinity; `by` is
            not a function, or gives something else than a string.

    Sources: Pascanu et al., On the difficulty of training recurrent neural networks (2013), algorithm 1.

    Example:
        ``chain(clip_by_global_norm(1.0, by=lambda path, shape: path.split(".")[0]), adamw(3e-4))``
    """
    if not isinstance(limit, (int, float)) and optree.tree_leaves(limit) != [limit]:
        raise TypeError(
            f"clip_by_global_norm: limit must be a number, got {kind(limit)}. Pass gradients to the transform that it "
            f"gives: chain(clip_by_global_norm(1.0), adamw(3e-4)), or grads, state = clip.update(params, grads, state)"
        )
    check("clip_by_global_norm", {"limit": limit, "donate": donate})
    _refuse_order("clip_by_global_norm", order)
    if by is not None and (not callable(by) or order == math.inf):
        raise TypeError(
            f"clip_by_global_norm: by must be a function of a parameter's path and shape, with order 1 or 2, got "
            f"{kind(by)} and order {order}"
        )

    def group_of(path: str, shape: Any) -> str:
        name = by(path, shape) if by is not None else ""
        if not isinstance(name, str):
            raise TypeError(f"clip_by_global_norm: by must give the name of a group, a string, got {name!r} for {path}")
        return name

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        if has_parts():  # or else trees need not be taken apart for it
            refuse_parts("clip_by_global_norm", *([] if params is None else [units(params)]), units(grads))
        if by is not None:
            norms = _norms_by_group(_counted(units(grads)), order, group_of)
            factors = {
                name: (limit / norm.clamp(min=limit)).where(norm.isfinite(), norm) for name, norm in norms.items()
            }
            grads = _scaled_by_group("clip_by_global_norm", grads, factors, group_of, donate)
            zeros = {
                name: torch.zeros_like(norm) for name, norm in state["norm"].items()
            }  # of groups without gradients
            known = zeros | {name: norm.detach() for name, norm in norms.items()}
            return grads, state | {"limit": limit, "norm": known}
        norm = _norm(_counted(units(grads)), order)
        factor = (limit / norm.clamp(min=limit)).where(norm.isfinite(), norm)
        return scaled("clip_by_global_norm", grads, factor, donate), state | {"limit": limit, "norm": norm.detach()}

    def init(params: Any) -> Any:
        leaves = units(params)
        refuse_parts("clip_by_global_norm", leaves)
        trained = [unit.values for unit in leaves.each if unit.trainable]
        dtype = torch.float64 if torch.float64 in map(wide, trained) else torch.float32
        zero = torch.zeros((), dtype=dtype, device=trained[0].device if trained else None)
        names = {group_of(path, shape) for unit in leaves.each if unit.trainable for _, path, shape in spread(unit)}
        return {"limit": limit, "norm": zero if by is None else {name: zero.clone() for name in sorted(names)}}

    return Transform(init, update)


def clip_by_value(limit: float, *, donate: bool = True) -> Transform:
    """Clamps each element of the gradients to `[-limit, limit]`; overwrites them unless `donate=False`.

    Args:
        limit: above 0.
        donate: whether to overwrite gradients; if not, the update can be differentiated.

    Returns:
        A `Transform`.

    Raises:
        TypeError, ValueError: the limit is not a number, or not above 0.

    Example:
        ``chain(clip_by_value(0.1), sgd(0.01))``
    """
    check("clip_by_value", {"limit": limit, "donate": donate})

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        del params

        def clamp(xs: list[Tensor]) -> None:
            if functorch.inside_transform():  # vmap has no rule for lists
                for x in xs:
                    x.clamp_(-limit, limit)
            else:
                torch._foreach_clamp_min_(xs, -limit)
                torch._foreach_clamp_max_(xs, limit)

        return _changed("clip_by_value", grads, donate, clamp, lambda u: u.values.clamp(-limit, limit)), state

    return Transform(lambda params: {"limit": limit}, update)


def scaled(name: str, tree: Any, factor: Tensor | float, donate: bool) -> Any:
    """A tree times a number or a 0-d tensor; each tensor keeps its dtype."""
    factor_on = functools.cache(lambda device: factor.to(device) if isinstance(factor, Tensor) else factor)

    def scale(xs: list[Tensor]) -> None:
        if functorch.inside_transform():  # vmap has no rule for lists
            for x in xs:
                x.mul_(factor_on(x.device))
        else:
            torch._foreach_mul_(xs, factor_on(xs[0].device))

    return _changed(name, tree, donate, scale, lambda u: (u.values * varied(factor, u)).to(u.values.dtype))


def _norms_by_group(leaves: Units, order: float, group_of: Callable[[str, Any], str]) -> dict[str, Tensor]:
    """The norm of each group of parameters."""
    sums, members = squares(leaves, order), dict[str, list[Tensor]]()
    for unit in leaves.each:
        for _, path, shape in spread(unit):
            members.setdefault(group_of(path, shape), []).append(sums[path])
    totals = {name: functools.reduce(lambda a, b: torch.add(*_promoted(a, b)), xs) for name, xs in members.items()}
    return {name: total.sqrt() if order == 2 else total for name, total in totals.items()}


def _scaled_by_group(
    name: str, tree: Any, factors: dict[str, Tensor], group_of: Callable[[str, Any], str], donate: bool
) -> Any:
    """A tree whose parameters are multiplied by the factors of their groups."""

    def factor(path: str, shape: Any) -> Tensor:
        return factors[group_of(path, shape)]

    leaves = units(tree)
    if donate:
        refuse_overwriting(name, tree)
    if not donate or functorch.inside_transform() or not _overwritable(leaves):
        moving = (u.trainable and u.values is not None for u in leaves.each)
        return leaves.with_values(
            times(u, u.values, factor) if moves else u.values for u, moves in zip(leaves.each, moving, strict=True)
        )
    views: dict[str, list[Tensor]] = {}
    for unit in leaves.each:
        for s in unit.filled if unit.trainable and unit.values is not None else ():
            view = unit.values if unit.layout is None else unit.values[s.start : s.stop]
            views.setdefault(group_of(s.path, s.whole), []).append(view)
    with torch.no_grad():
        for group, xs in views.items():
            in_place(xs, functools.partial(_multiply, factors[group]))
    return tree


def _multiply(factor: Tensor, xs: list[Tensor]) -> None:
    torch._foreach_mul_(xs, factor.to(xs[0].device))


def _overwritable(leaves: Units) -> bool:
    """Whether all tensors can be overwritten; the gradient of a sum, say, stores one number for many elements."""
    trained = (unit.values for unit in leaves.each if unit.trainable and unit.values is not None)
    return not any(0 in x.stride() and not dense(x) for x in trained)


def _changed(
    name: str, tree: Any, donate: bool, overwrite: Callable[[list[Tensor]], object], replaced: Callable[[Unit], Tensor]
) -> Any:
    """A tree whose trained tensors are overwritten, or replaced if they must not or cannot be overwritten."""
    leaves = units(tree)
    trained = [unit for unit in leaves.each if unit.trainable and unit.values is not None]
    if donate:
        refuse_overwriting(name, tree)
    if donate and _overwritable(leaves):
        with torch.no_grad():
            in_place([unit.values for unit in trained], overwrite)
        return tree
    return leaves.with_values(replaced(u) if u.trainable and u.values is not None else u.values for u in leaves.each)


def squares(leaves: Units, order: float = 2.0) -> dict[str, Tensor]:
    """The sum of squares, or magnitudes, of each parameter over all ranks, by path: 0-d, float32 or wider."""
    sums: dict[Any, Tensor] = {}
    parts: dict[Any, Tensor] = {}
    for unit in leaves.each:
        if unit.trainable and on_disk(unit.values) and not differentiable(unit.values):
            # A tensor on disk is in memory only here, one at a time.
            with in_memory(unit.values.detach()) as values:
                sums |= _norms(_parts_of(unit, values), order)
        elif unit.trainable:
            parts |= _parts_of(unit, unit.values)
    sums |= _norms(parts, order)
    sources = [unit.values for unit in leaves.each if unit.trainable]

    def sum_of(path: str, start: int, stop: int) -> Tensor:
        return sums[path, start]

    local = {
        s.path: unit.by_piece(s, functools.partial(sum_of, s.path))
        for unit in leaves.each
        for s in unit.segments
        if (s.path, s.start) in sums
    }
    return {path: total[0] for path, total in totals(leaves, local, lambda shape: 1, sources).items()}


def _segments_of(unit: Unit, values: Tensor) -> dict[Any, Tensor]:
    return {segment.path: values.reshape(-1)[segment.start : segment.stop] for segment in unit.segments}


def _parts_of(unit: Unit, values: Tensor) -> dict[Any, Tensor]:
    """Ranges of elements that are summed apart, by path and first element."""
    flat = values.reshape(-1)
    return {(s.path, start): flat[start:stop] for s in unit.segments for _, start, stop in unit.exact_ranges(s)}


def _norms(parts: dict[Any, Tensor], order: float = 2.0) -> dict[Any, Tensor]:
    """The norm of each tensor, the squared one for order 2, `[1]`, in float32 or wider."""
    groups: dict[Any, list[str]] = {}
    # Of complex numbers torch computes no norm in another dtype.
    real = torch.view_as_real if order == 2 else torch.abs
    parts = {path: real(x) if x.is_complex() else x for path, x in parts.items() if x.numel() or order == 2}
    for path, part in parts.items():
        groups.setdefault((part.dtype, part.device), []).append(path)
    squared: dict[str, Tensor] = {}
    for paths in groups.values():
        norms = roots([parts[path] for path in paths], order, wide(parts[paths[0]]))
        if order != 2:
            squared |= {path: x.reshape(1) for path, x in zip(paths, norms, strict=True)}
            continue
        lists = not functorch.inside_transform()  # vmap has no rule for lists
        squares = torch._foreach_mul(norms, norms) if lists else [norm.square() for norm in norms]
        squared |= {path: x.reshape(1) for path, x in zip(paths, squares, strict=True)}
    return squared


def roots(tensors: list[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norms of tensors of one dtype and device."""
    if functorch.inside_transform() or functorch.inside_forward_mode():  # of which torch has no derivative there
        return [torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors]
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def totals(
    leaves: Units, local: dict[str, dict[int, Tensor]], length: Callable[[tuple[int, ...]], int], sources: list[Tensor]
) -> dict[str, Tensor]:
    """Sums a vector for each trained parameter over the ranks that have shards of it.

    Args:
        leaves: the parameters.
        local: this rank's vectors, by path, of `Unit.by_piece`; missing ones count as zeros.
        length: length of the vector, from the parameter's whole shape.
        sources: the tensors from which vectors are made, on every rank; for derivatives.
    """
    totals: dict[str, Tensor] = {}
    groups: dict[tuple[Any, ...], dict[str, int]] = {}
    for unit in leaves.each:
        if unit.trainable:
            for axes, path, full_shape in spread(unit):
                key = (unit.layout and unit.layout.grid, axes, wide(unit.values), home(unit), unit.exact)
                groups.setdefault(key, {})[path] = length(full_shape)
    for (grid, axes, dtype, device, exact), lengths in groups.items():
        vectors = {path: local.get(path, {}) for path in lengths}
        place = next((x.device for by_number in vectors.values() for x in by_number.values()), device)
        zeros = torch.zeros(max(lengths.values()), dtype=dtype, device=place)
        rows = [
            vectors[path][number].to(dtype) if number in vectors[path] else zeros[:n]
            for number in range(exact or 1)
            for path, n in lengths.items()
        ]
        total = tied(torch.cat(rows).to(device), sources)
        if axes:
            with scope_of(grid, "a tree"):
                total = functional.psum(total, axes)  # of exact sums one rank has a number, and all others zeros
        if exact:  # the sum of negative zeros is positive on several ranks
            total = sum_of_pieces(total.view(exact, -1), exact) + 0.0
        totals |= dict(zip(lengths, total.split(list(lengths.values())), strict=True))
    return totals


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which numbers of this dtype are summed."""
    return torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32
