"""Keeps derivatives of a pure step exact where ranks hold different elements.

A number that all ranks share changes elements that only some ranks hold, so its gradient is the sum over those ranks.
A rank that holds nothing of a parameter still takes part in the collectives of derivatives through it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.compat import autograd, functorch
from shardfn.mesh.scope import scope_of
from shardfn.mesh.spec import dotted
from shardfn.shards.pieces import Unit, joined, spread
from shardfn.transforms.step import current_step


def shared_values(shared: dict[str, Tensor], unit: Unit) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns values that all ranks share, one per parameter of a unit, for use with the elements of this rank.

    `pvary` makes their gradient the sum over the ranks; all ranks must take part in its transpose. The second value
    returned, tensors without elements, ties the result to them on ranks that hold nothing of a parameter.
    """
    if not any(differentiable(shared[path]) for _, path, _ in spread(unit)) or unit.layout is None:
        return shared, []
    groups: dict[tuple[str, ...], list[str]] = {}
    for axes, path, _ in spread(unit):
        groups.setdefault(axes, []).append(path)
    varying, ties = dict(shared), []
    with scope_of(unit.layout.grid, f"stage {unit.name!r}"):
        for axes, paths in groups.items():
            rows = [shared[path].reshape(-1) for path in paths]
            packed = functional.pvary(torch.cat(rows), axes) if axes else torch.cat(rows)
            ties.append(packed[:0])
            for path, row in zip(paths, packed.split([len(row) for row in rows]), strict=True):
                varying[path] = row.view(shared[path].shape)
    return varying, ties


def tied(x: Tensor, dependencies: Iterable[Tensor]) -> Tensor:
    """Makes `x` depend on `dependencies` too, without using any of their elements.

    A rank that holds nothing of some parameters must still take part in the collectives of derivatives through them.
    """
    empties = [other.reshape(1, -1)[:, :0].to(x.dtype) for other in dependencies if differentiable(other)]
    # Derivatives of exp depend on its argument, and so derivatives of any order on all of these tensors. Rows, since
    # the gradient that torch.cat gives an empty vector has no graph.
    return torch.cat([x.reshape(1, -1), torch.cat(empties, 1).exp()], 1).view(x.shape) if empties else x


def filled(base: Tensor, unit: Unit, parts: Iterable[Tensor], ties: Iterable[Tensor] = ()) -> Tensor:
    """A tensor like a unit's values, with `parts` in its segments; it depends on `ties` as well."""
    spans = [(segment.start, segment.stop) for segment in unit.filled]
    return tied(joined(list(parts), unit._replace(values=base.reshape(-1)), spans).view(base.shape), ties)


def numbered(value: Any, unit: Unit) -> tuple[dict[str, Any], list[Tensor]]:
    """A number that all ranks share, or a rule's, by parameter of a unit; a tensor goes through `shared_values`."""
    by_path = {path: value(path, shape) if callable(value) else value for _, path, shape in spread(unit)}
    return shared_values(by_path, unit) if isinstance(value, Tensor) else (by_path, [])


def times(unit: Unit, x: Tensor, rule: Any) -> Tensor:
    """A tensor like a unit's values, times a number, or times what a rule gives for each parameter."""
    factors, ties = numbered(rule, unit)
    flat = x.reshape(-1)
    return filled(x, unit, [(flat[s.start : s.stop] * factors[s.path]).to(x.dtype) for s in unit.filled], ties)


def varied(value: Any, unit: Unit) -> Any:
    """The same number for all elements of a unit: the number itself, or a vector if it may be differentiated."""
    if not isinstance(value, Tensor) or unit.layout is None or not differentiable(value):
        return value
    by_path, ties = numbered(value, unit)
    rows, last = [], 0
    for seg in unit.segments:
        rows += [value.detach().expand(seg.start - last), by_path[seg.path].expand(seg.stop - seg.start)]
        last = seg.stop
    return torch.cat([*rows, value.detach().expand(unit.values.numel() - last), *ties]).view(unit.values.shape)


PURE = "pass donate=False to each optimizer and transform of the chain"


def refuse_overwriting(name: str, *trees: Any, does: str = "overwrites what it is given", instead: str = PURE) -> None:
    """Raises RuntimeError if a step that overwrites is given anything that is being differentiated.

    The derivative through a value that was overwritten would be silently wrong, whether it is that of a parameter, a
    gradient, the state or a learning rate in it. Outside of functions that are differentiated, parameters that the
    user's own `backward` differentiates may be overwritten, and so may their gradients.
    """
    transformed = functorch.inside_transform() or functorch.inside_forward_mode()
    if not transformed and (current_step() is None or not torch.is_grad_enabled()):
        return
    for tree in trees:
        for accessor, x in zip(optree.tree_accessors(tree), optree.tree_leaves(tree), strict=True):
            if isinstance(x, Tensor) and (_taped(x) if transformed else x.requires_grad):
                raise RuntimeError(
                    f"{name} {does}, and {dotted(accessor) or 'a tensor of that'} may be "
                    f"differentiated here, inside a function under grad, value_and_grad or a transform of torch.func: "
                    f"{instead}, or detach() tensors outside of the derivative"
                )


def _taped(x: Tensor) -> bool:
    """Whether a transform that is running here takes a derivative with respect to a tensor."""
    return any(kind in ("gradient", "tangent") for _, kind in functorch.followed(x))


def lerped(xs: list[Tensor], ys: list[Tensor], weight: float, donate: bool = False) -> list[Tensor]:
    """`x + weight * (y - x)` of each pair; overwrites x with `donate`."""
    if functorch.inside_transform():  # where torch has no such operation on several tensors
        new = [(x, torch.lerp(x, y, weight)) for x, y in zip(xs, ys, strict=True)]
        return [x.copy_(z) if donate else z for x, z in new]
    if donate:
        torch._foreach_lerp_(xs, ys, weight)
        return xs
    return list(torch._foreach_lerp(xs, ys, weight))


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors, which transforms may have wrapped, share memory."""
    return autograd.storage_of(functorch.unwrapped(x)) == autograd.storage_of(functorch.unwrapped(y))


def differentiable(x: Tensor) -> bool:
    """Whether a derivative with respect to `x` may be taken."""
    return (
        functorch.inside_transform() or functorch.inside_forward_mode() or (torch.is_grad_enabled() and x.requires_grad)
    )
