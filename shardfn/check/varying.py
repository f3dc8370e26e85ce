"""Along which axes each value of a recorded call varies, and why. A pure function of what was recorded.

The rules are those of `collectives.functional`: an op's result varies along each axis along which anything that it was
given does; `psum` takes the axis away, `pvary` adds it. What follows a value besides is what a message needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.check.trace import JOINING, Gradient, Mask, Node, Trace
from shardfn.compat import functorch

SCALES = frozenset({
    "neg", "mul", "div", "add", "sub", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "clone", "alias",
    "_to_copy", "expand", "select", "detach", "mean", "sum", "copy_", "lift_fresh", "t", "transpose", "permute",
    "written in part", "psum", "pvary",
})  # fmt: skip
"""Ops of which the result is some number times what it was, as a loss is scaled."""
MEANS = frozenset({
    "mean", "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "multi_margin_loss",
    "multilabel_margin_loss_forward",
})  # fmt: skip
_MOST = 8  # divisors that are kept besides the last


@dataclass
class Varying:
    """By node; sets of axes and of variables are bits.

    Attributes:
        along: the axes along which it varies.
        backward: those of them where it does because something in a backward pass did.
        declared: whether it was made of what a spec or a layout declares.
        guessed: whether it was made of anything of which only the bits are known.
        free: by axis, the variables that it may be differentiated by on a way on which nothing varies along it.
        met: by axis, the variables that have met what varies along it.
        holds: the variables that it is a new value of.
        updated: by axis, those of them that a gradient which varies was used on.
        gradient: the variables whose gradient it was made of.
        mean: the node that is a mean, which was only scaled since; -1 for none.
        total: the node that is a scalar summed over ranks, which was only scaled since; -1 for none.
        divisors: by what it, or the mean that it was made of, was divided, the last of that; infinity for a tensor.
        rows: of a sum over rows, which was only scaled since: how many elements their first dimensions have.
        first: by axis and variable, the node where they met.
        sums: the nodes of what collectives made the same on all ranks; their bits in `free` and `met` follow those of
            the variables.
        depends: the variables that it may be differentiated by.
        touched: as `first`, where nothing was recorded for a derivative, as in a function with its own backward.
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
    divisors: list[tuple[float, ...]] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    total: list[int] = field(default_factory=list)
    first: dict[tuple[int, int], int] = field(default_factory=dict)
    touched: dict[tuple[int, int], int] = field(default_factory=dict)
    sums: list[int] = field(default_factory=list)
    depends: list[int] = field(default_factory=list)


def varying(trace: Trace, differs: Mapping[int, Mask]) -> Varying:
    """What follows from a recorded call.

    Args:
        trace: the call.
        differs: of values that are known by their bits, the axes along which these differ between ranks.
    """
    found = Varying()
    gradients = {at: of for event in trace.events if isinstance(event, Gradient) for of, at in event.pairs}
    for at, node in enumerate(trace.nodes):
        _type(found, trace, at, node, differs.get(at, 0))
        of = gradients.get(at)
        if of is not None:
            found.gradient[at] |= trace.nodes[of].variable | found.holds[of]
    return found


def _type(found: Varying, trace: Trace, at: int, node: Node, differs: Mask) -> None:
    parents, count = node.parents, len(trace.axes)
    given = 0
    for p in parents:
        given |= found.along[p]
    given |= differs
    match node.effect:
        case "plus":
            given |= node.axes
        case "minus":
            given &= ~node.axes
        case "exactly":
            given = node.axes | differs
        case "union":
            pass
    found.along.append(given)
    _explain(found, trace, at, node, given, differs)
    followed = node.records and not (node.effect == "exactly" and node.root == "")
    depends = node.variable
    for p in parents if node.records and node.root != "parameter" else ():
        depends |= found.depends[p]
    found.depends.append(depends)
    own = 0
    if node.effect == "minus" and node.op in JOINING and node.records and not node.backward and depends:
        own = 1 << len(trace.variables) + len(found.sums)
        found.sums.append(at)
    free, met, updated = [], [], []
    for k in range(count):
        bit = 1 << k
        still = 0 if given & bit else node.variable | (own if node.axes & bit else 0)
        has, new = 0, 0
        if followed and node.root != "parameter":
            for p in parents:
                has |= found.met[p][k]
                if not found.along[p] & bit:
                    if given & bit:
                        new |= found.free[p][k]
                    else:
                        still |= found.free[p][k]
        if new and not (node.effect == "plus" and node.about == "I"):
            for variable in bits_of(new & ~has):
                found.first.setdefault((k, variable), at)
            has |= new
        if given & bit and node.effect == "union" and not node.backward:
            for p in parents:
                for variable in bits_of(0 if found.along[p] & bit else found.holds[p]):
                    found.touched.setdefault((k, variable), at)
        free.append(still)
        met.append(has)
        updated.append(_updated(found, node, parents, bit, k, given))
    found.free.append(tuple(free))
    found.met.append(tuple(met))
    found.updated.append(tuple(updated))


def _explain(found: Varying, trace: Trace, at: int, node: Node, along: Mask, differs: Mask) -> None:
    """What does not depend on the axis."""
    parents = node.parents
    backward = along if node.backward else 0
    declared = node.root in ("input", "parameter") and node.effect == "exactly"
    guessed = node.root in ("closure", "random") or (node.root == "input" and node.effect != "exactly")
    holds, gradient, mean, total = node.variable, 0, -1, -1
    rows: tuple[int, ...] = ()
    divisors: tuple[float, ...] = ()
    for p in parents:
        backward |= found.backward[p] & along
        declared = declared or found.declared[p]
        guessed = guessed or found.guessed[p]
        gradient |= found.gradient[p]
        if trace.nodes[p].like == node.like and not node.backward and node.root != "parameter":
            holds |= found.holds[p]
        if node.op in SCALES:
            rows = rows or found.rows[p]
            divisors = divisors or found.divisors[p]
            total = max(total, found.total[p])
    means = [p for p in parents if found.mean[p] >= 0] if node.op in SCALES else []
    if means:  # of several terms one that varies, and the least scaled
        chief = min(means, key=lambda p: (not found.along[p], len(found.divisors[p])))
        mean, divisors = found.mean[chief], found.divisors[chief]
    if node.number is not None:
        divisors = (*divisors[-_MOST:], abs(node.number))
    elif scales(node) and any(is_number(trace.nodes[p]) for p in parents):
        divisors = (*divisors[-_MOST:], math.inf)
    if node.op in MEANS and node.count:
        mean = at
    elif node.op == "psum" and not node.backward and node.like is not None and node.like[0] == ():
        total = at
    elif node.rows:
        rows = node.rows
    elif (node.number is not None or node.op in ("div", "div_")) and _divides(
        found, trace, node, rows if mean < 0 else ()
    ):
        mean = at
    elif scales(node) and (differs or (node.op == "mul" and _all_vary(found, parents))):
        mean, rows = -1, ()  # weighted by something of this rank
    found.backward.append(backward)
    found.declared.append(declared)
    found.guessed.append(guessed)
    found.holds.append(holds)
    found.gradient.append(gradient)
    found.mean.append(mean)
    found.divisors.append(() if mean == at else divisors)
    found.rows.append(rows)
    found.total.append(total)


def scales(node: Node) -> bool:
    """Whether an op multiplies, or divides."""
    return node.op.removeprefix("_foreach_").removesuffix("_") in ("mul", "div")


def _all_vary(found: Varying, parents: tuple[int, ...]) -> bool:
    return len(parents) == 2 and all(found.along[p] for p in parents)


def is_number(node: Node) -> bool:
    """Whether a value has one element."""
    return node.like is not None and math.prod(node.like[0]) == 1


def _divides(found: Varying, trace: Trace, node: Node, rows: tuple[int, ...]) -> bool:
    """Whether a division makes a mean of a sum over this rank's rows, or over those of ranks along some axes."""
    if node.number is not None:
        return node.number > 1 and node.number in rows
    if len(node.parents) != 2 or node.like is None or node.like[0]:
        return False
    a, b = node.parents
    sums = [trace.nodes[found.total[p]].axes for p in (a, b) if found.total[p] >= 0]
    return bool(found.along[a] & found.along[b]) or (len(sums) == 2 and sums[0] == sums[1])


def _updated(found: Varying, node: Node, parents: tuple[int, ...], bit: Mask, k: int, along: Mask) -> int:
    updated = 0
    for p in parents:
        updated |= found.updated[p][k]
    if along & bit and not node.backward and any(found.backward[p] & bit for p in parents):
        for p in parents:
            if not found.along[p] & bit:
                updated |= found.holds[p]
    return updated


def bits_of(mask: int) -> list[int]:
    """The single bits of a set."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low)
        mask ^= low
    return found


def roots_of(trace: Trace, types: Varying, at: int, bit: Mask, differs: Mapping[int, Mask]) -> list[int]:
    """The nodes at which a value begins to vary along an axis, the latest first."""
    seen, ahead, found = set(), [at], []
    while ahead:
        now = ahead.pop()
        if now in seen or not types.along[now] & bit:
            continue
        seen.add(now)
        begins, more = _begins(trace, types, now, bit, differs)
        found += [now] * begins
        ahead += more
    return sorted(found, reverse=True)


def _begins(trace: Trace, types: Varying, at: int, bit: Mask, differs: Mapping[int, Mask]) -> tuple[bool, list[int]]:
    """Whether a value that varies along an axis begins to do so there, and the others by which it does."""
    node = trace.nodes[at]
    passes = node.effect in ("union", "plus") or (node.effect == "minus" and not node.axes & bit)
    more = [p for p in node.parents if types.along[p] & bit] if passes else []
    differ = bool(differs.get(at, 0) & bit)
    if more and differ and not node.root:  # by a number, and by what it was given
        return True, more
    gathers = node.effect == "plus" and bool(node.axes & bit) and node.op == "all_gather"
    begins = not more or node.root == "statistics" or differ or gathers
    return begins, [] if begins else more


def over_roots(
    trace: Trace, types: Varying, bit: Mask, differs: Mapping[int, Mask], of: Callable[[int], int]
) -> list[int]:
    """For each node, all that `of` says of the nodes at which it begins to vary along an axis, as bits."""
    found: list[int] = []
    for at in range(len(trace.nodes)):
        begins, more = _begins(trace, types, at, bit, differs) if types.along[at] & bit else (False, [])
        said = of(at) if begins else 0
        for p in more:
            said |= found[p]
        found.append(said)
    return found


_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def typeof(x: Tensor) -> str:
    """The dtype and shape of a value, and the mesh axes along which it varies.

    That is known inside a checked call of `shard_map`, which is the first one for each kind of arguments, on every
    rank by itself: nothing is exchanged. What only other ranks' bits can tell, of a tensor that is closed over say,
    is known when the call has ended, and counts as the same on all ranks until then.

    Args:
        x: a tensor.

    Returns:
        `f32[8, 64]{varying: shard, tensor}`; `f32[8, 64]` for a value that is the same on all ranks;
        `f32[8, 64]{not followed}` where no call is being checked.

    Raises:
        TypeError: something that is not a tensor.

    Example:
        ``print(sf.typeof(loss))``
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"typeof takes a tensor, not {type(x).__name__}")
    short = _SHORT.get(x.dtype, str(x.dtype).removeprefix("torch."))
    said = f"{short}[{', '.join(map(str, x.shape))}]"
    recorder = recording.current()
    if recorder is None:
        return f"{said}{{not followed}}"
    node = recorder.values.node_of(functorch.unwrapped(x))
    names = recorder.trace.names(varying(recorder.trace, {}).along[node])
    return f"{said}{{varying: {', '.join(names)}}}" if names else said
