"""Collectives written as patterns: `redistribute(x, "b/data d/shard -> b/data d")`.

On both sides of an arrow, a pattern names each dimension of this rank's tensor, followed by slashes and the mesh axes
over which it is sharded, major to minor. `+axis` after the dimensions says that the ranks along the axis hold partial
sums.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import optree
from torch import Tensor

from shardfn.collectives import functional, kernels
from shardfn.mesh.scope import bound_axis

_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")


@dataclass(frozen=True)
class PatternSide:
    """One side of a pattern: dimension names, the axes that shard each, and the axes with partial sums."""

    names: tuple[str, ...]
    cuts: tuple[tuple[str, ...], ...]
    partial: frozenset[str]


@dataclass(frozen=True)
class PatternStep:
    """One collective: its name in `collectives`, the axes, and its dimension arguments."""

    op: str
    axes: tuple[str, ...]
    dims: tuple[tuple[str, int], ...]


def redistribute(x: Any, pattern: str) -> Any:
    """Moves a value from one placement to another by the collectives that the pattern's axis names imply.

    =====================  =================================================  ======
    left -> right          collective                                         type
    =====================  =================================================  ======
    ``d/a -> d``           ``all_gather(x, "a", dim=d)``                      V -> V
    ``d -> d/a``           ``local_slice(x, "a", dim=d)``                     I -> V
    ``d +a -> d/a``        ``reduce_scatter(x, "a", dim=d)``                  V -> V
    ``d +a -> d``          ``psum(x, "a")``                                   V -> I
    ``s/a h -> s h/a``     ``all_to_all(x, "a", split_dim=h, concat_dim=s)``  V -> V
    =====================  =================================================  ======

    Args:
        x: this rank's tensor, or a pytree of tensors of the same rank.
        pattern: dimensions with the axes that shard them, an arrow, and the same dimensions with the axes that shard
            them afterwards. Parsed once.

    Raises:
        ValueError: the pattern cannot be read, or its sides differ in more than their axes; the shape does not fit; the
            change needs several patterns. The message quotes the pattern and the shape.

    Example:
        ``redistribute(w, "d/replica/shard f -> d f")`` gathers over both axes in one collective.
    """
    names, steps, axes = plan(pattern)
    for axis in axes:
        bound_axis(axis, f"redistribute pattern {pattern!r}")

    def redistribute_leaf(leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"redistribute takes tensors, or pytrees of them; got {type(leaf).__name__}")
        if leaf.ndim != len(names):
            raise ValueError(
                f"redistribute pattern {pattern!r} names {len(names)} dimensions, but the tensor has shape "
                f"{tuple(leaf.shape)}"
            )
        for step in steps:
            try:
                leaf = getattr(functional, step.op)(leaf, step.axes, **dict(step.dims))
            except (ValueError, TypeError) as error:
                message = f"{error} (in redistribute pattern {pattern!r}, on shape {tuple(leaf.shape)})"
                raise type(error)(message) from None
        return leaf if steps else kernels.copy(leaf)  # a copy, since results may be written to

    return optree.tree_map(redistribute_leaf, x)


@lru_cache(maxsize=1024)
def plan(pattern: str) -> tuple[tuple[str, ...], tuple[PatternStep, ...], tuple[str, ...]]:
    """Returns a pattern's dimension names, the collectives that turn its left side into its right, and its axes."""
    sides = pattern.split("->")
    if len(sides) != 2:
        raise ValueError(f"redistribute pattern {pattern!r} needs one arrow, as in 'b/data d -> b d'")
    before, after = (_parse(side, pattern) for side in sides)
    if before.names != after.names:
        raise ValueError(
            f"redistribute pattern {pattern!r} names dimensions {' '.join(before.names)!r} on the left and "
            f"{' '.join(after.names)!r} on the right: both sides name the same ones in the same order "
            f"(einops.rearrange reorders)"
        )
    axes = {axis for side in (before, after) for cut in (*side.cuts, tuple(side.partial)) for axis in cut}
    return before.names, tuple(_plan_steps(before, after, pattern)), tuple(sorted(axes))


def _parse(side: str, pattern: str) -> PatternSide:
    dims: list[tuple[str, ...]] = []
    partial: list[str] = []
    for token in side.split():
        parts = token.removeprefix("+").split("/")
        if not all(map(_WORD.fullmatch, parts)) or (token.startswith("+") and len(parts) > 1):
            raise ValueError(f"redistribute pattern {pattern!r}: cannot read {token!r}; write d, d/axis, or +axis")
        if token.startswith("+"):
            partial += parts
        elif partial:
            raise ValueError(f"redistribute pattern {pattern!r}: dimension {token!r} comes after a partial sum")
        else:
            dims.append(tuple(parts))
    names = tuple(parts[0] for parts in dims)
    axes = [axis for parts in dims for axis in parts[1:]] + partial
    for kind, parts in (("dimension", list(names)), ("axis", axes)):
        for name in parts:
            if parts.count(name) > 1:
                raise ValueError(f"redistribute pattern {pattern!r}: {kind} {name!r} occurs twice on one side")
    return PatternSide(names, tuple(parts[1:] for parts in dims), frozenset(partial))


def _plan_steps(before: PatternSide, after: PatternSide, pattern: str) -> list[PatternStep]:
    """Plans the collectives: sums first, as they never grow the value, then moves, gathers and local slices."""
    if not after.partial <= before.partial:
        created = ", ".join(sorted(after.partial - before.partial))
        raise ValueError(f"redistribute pattern {pattern!r} cannot make a partial sum over {created}")
    cuts = [list(axes) for axes in before.cuts]
    goal = [list(axes) for axes in after.cuts]
    source = {axis: dim for dim, axes in enumerate(cuts) for axis in axes}
    target = {axis: dim for dim, axes in enumerate(goal) for axis in axes}
    summed = sorted(before.partial - after.partial)
    steps: list[PatternStep] = []

    scattered = [axis for axes in goal for axis in axes if axis in before.partial]
    for dim, axes in _grouped(scattered, target):
        steps.append(PatternStep("reduce_scatter", axes, (("dim", dim),)))
        cuts[dim] += axes
    summed_axes = tuple(axis for axis in summed if axis not in target)
    if summed_axes:
        steps.append(PatternStep("psum", summed_axes, ()))

    moving = [axis for axes in before.cuts for axis in axes if axis in target and target[axis] != source[axis]]
    for axis in reversed(moving):
        if cuts[source[axis]][-1] != axis:
            raise _too_much(pattern, axis)
        cuts[source[axis]].pop()
        cuts[target[axis]].append(axis)
        steps.append(PatternStep("all_to_all", (axis,), (("split_dim", target[axis]), ("concat_dim", source[axis]))))

    for dim in range(len(cuts)):
        gathered = tuple(axis for axis in cuts[dim] if axis not in target)
        if gathered:
            if tuple(cuts[dim][-len(gathered) :]) != gathered:
                raise _too_much(pattern, gathered[0])
            del cuts[dim][-len(gathered) :]
            steps.append(PatternStep("all_gather", gathered, (("dim", dim),)))

    fresh = [axis for axes in goal for axis in axes if axis not in source and axis not in before.partial]
    for dim, axes in _grouped(fresh, target):
        steps.append(PatternStep("local_slice", axes, (("dim", dim),)))
        cuts[dim] += axes
    for have, want in zip(cuts, goal, strict=True):
        if have != want:
            raise _too_much(
                pattern, next(a for a, b in zip([*have, ""], [*want, ""], strict=False) if a != b) or want[-1]
            )
    return steps


def _grouped(axes: list[str], dims: dict[str, int]) -> list[tuple[int, tuple[str, ...]]]:
    return [(dim, tuple(a for a in axes if dims[a] == dim)) for dim in sorted({dims[a] for a in axes})]


def _too_much(pattern: str, axis: str) -> ValueError:
    return ValueError(
        f"redistribute pattern {pattern!r}: axis {axis!r} is not the last that cuts its dimension, and only the last "
        f"can be gathered, moved or added: reach it by several patterns"
    )
