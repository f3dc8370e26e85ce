"""Infers along which axes each value of a recorded call varies, and why: a pure function of the record.

The rules are those of `collectives.functional`: an op's result varies along each axis along which any of its arguments
does; `psum` removes an axis, `pvary` adds one. The other attributes are what messages need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.check.trace import JOINING, Gradient, Mask, Node, Trace, union
from shardfn.compat import functorch

SCALES = frozenset({
    "neg", "mul", "div", "add", "sub", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "clone", "alias",
    "_to_copy", "expand", "select", "detach", "mean", "sum", "copy_", "lift_fresh", "t", "transpose", "permute",
    "written in part", "psum", "pvary",
})  # fmt: skip
"""Ops that may be part of scaling a value by a number, as a loss is scaled."""
MEANS = frozenset({
    "mean", "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "multi_margin_loss",
    "multilabel_margin_loss_forward",
})  # fmt: skip
_MOST = 8  # most divisors that are kept besides the last


@dataclass
class Varying:
    """Facts about each node, by its index; sets of axes and of variables are bit masks.

    Attributes:
        along: the axes along which it varies.
        backward: those of them along which it varies because of something in a backward pass.
        declared: whether it depends on anything with a declared spec or layout.
        guessed: whether it depends on anything known only by its bits.
        free: by axis, the variables by which it may be differentiated along a path on which nothing varies along the
            axis.
        met: by axis, the variables that have met values that vary along it.
        holds: the variables that it is a new value of.
        updated: by axis, those of them that were updated with a varying gradient.
        gradient: the variables whose gradient it depends on.
        mean: the node of a mean that was only scaled since; -1 for none.
        total: the node of a scalar summed over ranks that was only scaled since; -1 for none.
        counted: by node, the axes whose ranks a division counts, as `pmean` and a sum by `psum` do; 0 if not known.
        divisors: by what it, or the mean that it scales, was divided, latest last; infinity for a tensor. Each with the
            axes in `counted`.
        rows: for a sum over rows that was only scaled since, the numbers of elements in its first dimensions.
        first: (axis, variable) -> the node where they met.
        sums: the nodes that a collective made the same on all ranks; their bits in `free` and `met` follow those of the
            variables.
        depends: the variables by which it may be differentiated.
        touched: like `first`, where no derivative was recorded, as in a function with its own backward.
    """

    along: list[Mask] = field(default_factory=list)
    backward: list[Mask] = field(default_factory=list)
    declared: list[bool] = field(default_factory=list)
    guessed: list[bool] = field(default_factory=list)
    free: list[tuple[int, ...]] = field(default_factory=list)
    met: list[tuple[int, ...]] = field(default_factory=list)
    holds: list[int] = field(default_factory=list)
    updated: list[tuple[int, ...]] = field(default_factory=list)
    gradient: list[int] = field(default_factory=list)
    mean: list[int] = field(default_factory=list)
    counted: dict[int, Mask] = field(default_factory=dict)
    divisors: list[tuple[tuple[float, Mask], ...]] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    total: list[int] = field(default_factory=list)
    first: dict[tuple[int, int], int] = field(default_factory=dict)
    touched: dict[tuple[int, int], int] = field(default_factory=dict)
    sums: list[int] = field(default_factory=list)
    depends: list[int] = field(default_factory=list)


def varying(trace: Trace, differs: Mapping[int, Mask]) -> Varying:
    """Infers the types of all values in a record.

    Args:
        trace: the record.
        differs: for values known by their bits, the axes along which these differ between ranks.
    """
    types = Varying()
    pairs = [pair for event in trace.events if isinstance(event, Gradient) for pair in event.pairs]
    variable_of = {gradient_id: variable_id for variable_id, gradient_id in pairs}
    for node_id, node in enumerate(trace.nodes):
        _type(types, trace, node_id, node, differs.get(node_id, 0))
        variable_id = variable_of.get(node_id)
        if variable_id is not None:
            types.gradient[node_id] |= trace.nodes[variable_id].variable | types.holds[variable_id]
    return types


def _type(types: Varying, trace: Trace, node_id: int, node: Node, differs: Mask) -> None:
    parents, num_axes = node.parents, len(trace.axes)
    axes = union(types.along[p] for p in parents) | differs
    match node.effect:
        case "plus":
            axes |= node.axes
        case "minus":
            axes &= ~node.axes
        case "exactly":
            axes = node.axes | differs
    types.along.append(axes)
    _append_facts(types, trace, node_id, node, axes, differs)
    followed = node.records and not (node.effect == "exactly" and node.root == "")
    through = parents if node.records and node.root != "parameter" else ()
    depends = node.variable | union(types.depends[p] for p in through)
    types.depends.append(depends)
    sum_bit = 0
    if node.effect == "minus" and node.op in JOINING and node.records and not node.backward and depends:
        sum_bit = 1 << len(trace.variables) + len(types.sums)
        types.sums.append(node_id)
    free_by_axis, met_by_axis, updated_by_axis = [], [], []
    for axis in range(num_axes):
        bit = 1 << axis
        remaining = 0 if axes & bit else node.variable | (sum_bit if node.axes & bit else 0)
        met_here, fresh = 0, 0
        if followed and node.root != "parameter":
            for p in parents:
                met_here |= types.met[p][axis]
                if not types.along[p] & bit:
                    if axes & bit:
                        fresh |= types.free[p][axis]
                    else:
                        remaining |= types.free[p][axis]
        if fresh and not (node.effect == "plus" and node.about == "I"):
            for variable in bits_of(fresh & ~met_here):
                types.first.setdefault((axis, variable), node_id)
            met_here |= fresh
        if axes & bit and node.effect == "union" and not node.backward:
            for p in parents:
                for variable in bits_of(0 if types.along[p] & bit else types.holds[p]):
                    types.touched.setdefault((axis, variable), node_id)
        free_by_axis.append(remaining)
        met_by_axis.append(met_here)
        updated_by_axis.append(_updated(types, trace, node, parents, bit, axis, axes))
    types.free.append(tuple(free_by_axis))
    types.met.append(tuple(met_by_axis))
    types.updated.append(tuple(updated_by_axis))


def _append_facts(types: Varying, trace: Trace, node_id: int, node: Node, axes: Mask, differs: Mask) -> None:
    """Appends the facts that do not depend on the axis."""
    parents = node.parents
    backward = axes if node.backward else 0
    declared = node.root in ("input", "parameter") and node.effect == "exactly"
    guessed = node.root in ("closure", "random") or (node.root == "input" and node.effect != "exactly")
    holds, gradient, mean, total = node.variable, 0, -1, -1
    rows: tuple[int, ...] = ()
    divisors: tuple[tuple[float, Mask], ...] = ()
    counted = types.counted[node_id] = _counted_axes(types, trace, node) if scales(node) and parents else 0
    for p in parents:
        backward |= types.backward[p] & axes & ~exchanged_axes(node)
        declared = declared or types.declared[p]
        guessed = guessed or types.guessed[p]
        gradient |= types.gradient[p]
        if trace.nodes[p].like == node.like and not node.backward and node.root != "parameter":
            holds |= types.holds[p]
        if node.op in SCALES:
            rows = rows or types.rows[p]
            divisors = divisors or types.divisors[p]
            total = max(total, types.total[p])
    mean_parents = [p for p in parents if types.mean[p] >= 0] if node.op in SCALES else []
    if mean_parents:  # of several terms take one that varies, and the least scaled
        chief = min(mean_parents, key=lambda p: (not types.along[p], len(types.divisors[p])))
        mean, divisors = types.mean[chief], types.divisors[chief]
    if node.number is not None:
        divisors = (*divisors[-_MOST:], (abs(node.number), counted))
    elif scales(node) and any(is_number(trace.nodes[p]) for p in parents):
        divisors = (*divisors[-_MOST:], (math.inf, counted))
    if node.op in MEANS and node.count:
        mean = node_id
    elif node.op == "psum" and not node.backward and node.like is not None and node.like[0] == ():
        total = node_id
    elif node.rows:
        rows = node.rows
    elif (node.number is not None or node.op in ("div", "div_")) and _divides(
        types, trace, node, rows if mean < 0 else ()
    ):
        mean = node_id
    elif scales(node) and (differs or (node.op == "mul" and sum(types.along[p] > 0 for p in parents) == 2)):
        mean, rows = -1, ()  # weighted by this rank's own values, so no plain mean or sum any more
    types.backward.append(backward)
    types.declared.append(declared)
    types.guessed.append(guessed)
    types.holds.append(holds)
    types.gradient.append(gradient)
    types.mean.append(mean)
    types.divisors.append(() if mean == node_id else divisors)
    types.rows.append(rows)
    types.total.append(total)


def exchanged_axes(node: Node) -> Mask:
    """Returns the axes along which an op of a forward pass exchanged values between ranks."""
    return node.axes if node.effect == "plus" and node.op != "pvary" and not node.backward else 0


def scales(node: Node) -> bool:
    """Whether an op multiplies or divides."""
    return node.op.removeprefix("_foreach_").removesuffix("_") in ("mul", "div")


def _counted_axes(types: Varying, trace: Trace, node: Node) -> Mask:
    """Returns the axes whose ranks a division counts, as that of `pmean` does; 0 if unknown."""
    if node.number is not None:
        total = trace.nodes[node.parents[0]]
        names = trace.names(total.axes)
        by_ranks = total.op == "psum" and node.number == math.prod(trace.axes[name] for name in names)
        return total.axes if by_ranks else 0
    axes, total_id = 0, types.total[node.parents[-1]] if node.op.startswith("div") and len(node.parents) == 2 else -1
    while total_id >= 0:
        axes |= trace.nodes[total_id].axes
        total_id = types.total[trace.nodes[total_id].parents[0]]
    return axes


def is_number(node: Node) -> bool:
    """Whether a value has one element."""
    return node.like is not None and math.prod(node.like[0]) == 1


def _divides(types: Varying, trace: Trace, node: Node, rows: tuple[int, ...]) -> bool:
    """Whether a division turns a sum over local rows, or over rows of several ranks, into a mean."""
    if node.number is not None:
        return node.number > 1 and node.number in rows
    if len(node.parents) != 2 or node.like is None or node.like[0]:
        return False
    a, b = node.parents
    sums = [trace.nodes[types.total[p]].axes if types.total[p] >= 0 else 0 for p in (a, b)]
    local = types.along[a] & types.along[b] & ~sums[1]  # what pvary makes of a sum over ranks is no local count
    return local > 0 or 0 < sums[0] == sums[1]


def _updated(
    types: Varying, trace: Trace, node: Node, parents: tuple[int, ...], bit: Mask, axis: int, axes: Mask
) -> int:
    if not axes & bit & ~exchanged_axes(node):
        return 0
    larger = [p for p in parents if is_number(trace.nodes[p]) or not is_number(node)]  # their norm is no new value
    updated = union(types.updated[p][axis] for p in larger)
    by = [p for p in parents if types.backward[p] & bit and not node.backward]
    if by:  # a difference of a rank's own new value and the old one is no new value
        new_values = union(types.holds[p] for p in by)
        updated |= union(types.holds[p] for p in larger if not types.along[p] & bit) & ~new_values
    return updated


def bits_of(mask: int) -> list[int]:
    """Returns the single bits of a set."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low)
        mask ^= low
    return bits


def numbers_of(mask: int) -> list[int]:
    """Returns the numbers of the bits of a set."""
    return [bit.bit_length() - 1 for bit in bits_of(mask)]


_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def typeof(x: Tensor) -> str:
    """The dtype and shape of a value, and the mesh axes along which it varies.

    Known inside a checked call of `shard_map`, which is the first call for each kind of arguments, on every rank by
    itself: nothing is exchanged. Facts that only other ranks' bits can tell, such as for a tensor that is closed over,
    are known when the call has ended; until then the value counts as the same on all ranks.

    Args:
        x: a tensor.

    Returns:
        `f32[8, 64]{varying: shard, tensor}`; `f32[8, 64]` for a value that is the same on all ranks;
        `f32[8, 64]{not followed}` where no call is being checked.

    Raises:
        TypeError: the argument is not a tensor.

    Example:
        ``print(sf.check.typeof(loss))``
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"typeof: x must be a tensor, got {type(x).__name__}")
    short = _SHORT.get(x.dtype, str(x.dtype).removeprefix("torch."))
    text = f"{short}[{', '.join(map(str, x.shape))}]"
    recorder = recording.current()
    if recorder is None:
        return f"{text}{{not followed}}"
    node = recorder.values.node_of(functorch.unwrapped(x))
    names = recorder.trace.names(varying(recorder.trace, {}).along[node])
    return f"{text}{{varying: {', '.join(names)}}}" if names else text
