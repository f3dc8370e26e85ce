"""What makes the derivative of a pure step exact, where ranks hold different elements.

A number that all ranks have moves elements that only some of them have, so its gradient is the sum of what those say;
and a rank that holds nothing of a parameter takes part in what derivatives through it communicate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives import functional
from shardfn.compat import functorch
from shardfn.mesh.scope import mesh_of, scope
from shardfn.shards.pieces import Unit, joined, spread


def lent(known: dict[str, Tensor], unit: Unit) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What all ranks have of each parameter of a unit, by path, for use with elements that some of them have.

    Its gradient is then the sum of what those ranks say: `pvary`, whose transpose all of them take part in. So the
    result depends on the second value returned, of no elements, also where a rank has nothing of a parameter.
    """
    if not any(differentiable(known[path]) for _, path, _ in spread(unit)) or unit.layout is None:
        return known, []
    groups: dict[tuple[str, ...], list[str]] = {}
    for axes, path, _ in spread(unit):
        groups.setdefault(axes, []).append(path)
    found, ties = dict(known), []
    with scope(mesh_of(unit.layout.grid, f"stage {unit.name!r}")):
        for axes, paths in groups.items():
            rows = [known[path].reshape(-1) for path in paths]
            every = functional.pvary(torch.cat(rows), axes) if axes else torch.cat(rows)
            ties.append(every[:0])
            for path, row in zip(paths, every.split([len(row) for row in rows]), strict=True):
                found[path] = row.view(known[path].shape)
    return found, ties


def tied(x: Tensor, others: Iterable[Tensor]) -> Tensor:
    """`x`, as a result of the others too, of whose elements it has none.

    A rank that has nothing of some parameters must still take part in what derivatives through them communicate.
    """
    rest = [other.reshape(-1)[:0].to(x.dtype) for other in others if differentiable(other)]
    return torch.cat([x.reshape(-1), *rest]).view(x.shape) if rest else x


def filled(around: Tensor, unit: Unit, parts: Iterable[Tensor], ties: Iterable[Tensor] = ()) -> Tensor:
    """A tensor like a unit's values, with new numbers in each of its segments, as a result of the ties, too."""
    spans = [(one.start, one.stop) for one in unit.filled]
    return tied(joined(list(parts), unit._replace(values=around.reshape(-1)), spans).view(around.shape), ties)


def numbered(number: Any, unit: Unit) -> tuple[dict[str, Any], list[Tensor]]:
    """A number that all ranks have, for use with each parameter of a unit; as `lent`, if it may be differentiated."""
    each = {path: number for _, path, _ in spread(unit)}
    return lent(each, unit) if isinstance(number, Tensor) else (each, [])


def varied(number: Any, unit: Unit) -> Any:
    """The same for all elements of a unit: the number itself, or if it may be differentiated, a vector."""
    if not isinstance(number, Tensor) or unit.layout is None or not differentiable(number):
        return number
    each, ties = numbered(number, unit)
    rows, last = [], 0
    for one in unit.segments:
        rows += [number.detach().expand(one.start - last), each[one.path].expand(one.stop - one.start)]
        last = one.stop
    return torch.cat([*rows, number.detach().expand(unit.values.numel() - last), *ties]).view(unit.values.shape)


def differentiable(x: Tensor) -> bool:
    """Whether somebody may want a derivative by it."""
    return (
        functorch.inside_transform() or functorch.inside_forward_mode() or (torch.is_grad_enabled() and x.requires_grad)
    )
