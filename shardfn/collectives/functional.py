"""Collectives by axis name, each with its mathematical transpose as its backward.

A value is *varying* (V) over an axis when the ranks along it hold different values, *invariant* (I) when they all
hold the same one. A collective's type says what it takes and returns, and its transpose runs the other way:

    psum                 V -> I    transpose: pvary
    pvary                I -> V    transpose: psum
    all_gather           V -> V    transpose: reduce_scatter
    all_gather(to="invariant")  V -> I    transpose: local_slice
    local_slice          I -> V    transpose: all_gather(to="invariant")
    reduce_scatter       V -> V    transpose: all_gather
    ppermute             V -> V    transpose: the inverse permutation
    all_to_all           V -> V    transpose: the two dims swapped
    ragged_all_to_all    V -> V    transpose: the send and receive lengths swapped
    pmax, pmin           V -> I    none: an error

Each works over one axis or a tuple of them (major to minor), on a tensor or a pytree, under every torch.func transform
and torch.compile. The result never aliases the argument, not even along an axis of size 1, so it may be written to. The
*spec* in a docstring is the collective on a list with one tensor for each rank along the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import optree
import torch
from torch import Tensor

from shardfn.callers import api_name
from shardfn.check import recording
from shardfn.collectives import kernels, ops
from shardfn.collectives.ledger import attribution
from shardfn.debugging import debugging
from shardfn.mesh.grid import Axis, AxisName, as_names
from shardfn.mesh.planned import notes, planned
from shardfn.mesh.scope import bound_axis, current_device, refuse_independent
from shardfn.mesh.spec import dotted

T = TypeVar("T")
Call = tuple[Any, ...]  # an op and its arguments after the tensor


def psum(x: T, axis: AxisName) -> T:
    """Sum over the ranks along `axis`: `V -> I`.

    Takes every shape and numeric dtype; a Python number becomes the 0-d tensor that `torch.tensor` makes of it. Sums of
    integers wrap, as in torch.

    Spec:
        >>> def psum(xs):
        ...     return [sum(xs) for _ in xs]

        rank 0: a            rank 0: a + b + c
        rank 1: b     ->     rank 1: a + b + c
        rank 2: c            rank 2: a + b + c

    Transpose: `pvary`, the identity. All ranks hold the same sum, with the same cotangent, and each term enters it
    once. (The transpose of an all-reduce whose result each rank *uses differently* would be another all-reduce: write
    `pvary(psum(x, axis), axis)` for that.)

    Raises:
        TypeError: bool, or an integer dtype that the backend cannot add.
        NameError, ValueError: no mesh in scope; unknown axis.
    """
    return _over(x, axis, "psum", lambda t, a: (ops.psum, *_summable(t, a, "psum")))


def pmean(x: T, axis: AxisName) -> T:
    """Mean over the ranks along `axis`: `V -> I`; `psum` divided by the axis size.

    Spec:
        >>> def pmean(xs):
        ...     return [sum(xs) / len(xs) for _ in xs]

        rank 0: a            rank 0: (a + b) / 2
        rank 1: b     ->     rank 1: (a + b) / 2

    Transpose: `pvary` divided by the axis size.
    """
    total = _over(x, axis, "pmean", lambda t, a: (ops.psum, *_summable(t, a, "pmean")))
    size = axis_size(axis)
    return optree.tree_map(lambda t: t / size, total)


def pmax(x: T, axis: AxisName) -> T:
    """Largest value over the ranks along `axis`, elementwise: `V -> I`. On bools: whether any is true.

    Spec:
        >>> def pmax(xs):
        ...     return [torch.stack(xs).amax(0) for _ in xs]

        rank 0: [1, 5]            rank 0: [3, 5]
        rank 1: [3, 2]     ->     rank 1: [3, 5]

    Transpose: none. Differentiating it raises NotImplementedError: pass `x.detach()`.
    """
    return _over(x, axis, "pmax", lambda t, a: (ops.pmax, *_ordered(t, a, "pmax")))


def pmin(x: T, axis: AxisName) -> T:
    """Smallest value over the ranks along `axis`, elementwise: `V -> I`. On bools: whether all are true.

    Spec:
        >>> def pmin(xs):
        ...     return [torch.stack(xs).amin(0) for _ in xs]

        rank 0: [1, 5]            rank 0: [1, 2]
        rank 1: [3, 2]     ->     rank 1: [1, 2]

    Transpose: none. Differentiating it raises NotImplementedError: pass `x.detach()`.
    """
    return _over(x, axis, "pmin", lambda t, a: (ops.pmin, *_ordered(t, a, "pmin")))


def pvary(x: T, axis: AxisName) -> T:
    """Marks a replicated value as one that ranks along `axis` use differently: `I -> V`. A copy; nothing moves.

    Apply it to a replicated parameter before it meets this rank's data: the transpose then sums its gradient over
    the ranks, once.

    Spec:
        >>> def pvary(xs):
        ...     return xs

        rank 0: a            rank 0: a
        rank 1: a     ->     rank 1: a

    Transpose: `psum`.
    """
    return _over(x, axis, "pvary", lambda t, a: (ops.pvary, a.group))


def all_gather(x: T, axis: AxisName, *, dim: int = 0, to: Literal["varying", "invariant"] = "varying") -> T:
    """Every rank's `x`, concatenated along `dim` in the order of `axis`.

    Shapes: `[..., n, ...] -> [..., n * size, ...]`, any dtype.

    Args:
        x: tensors of at least one dimension, of the same shape on every rank.
        axis: one axis name, or several as their product.
        dim: the dimension to concatenate along.
        to: `"varying"` (`V -> V`) if each rank then uses the result with its own data, as it does a gathered weight;
            `"invariant"` (`V -> I`) if all ranks then do the same with it.

    Spec:
        >>> def all_gather(xs, dim=0):
        ...     return [torch.cat(xs, dim) for _ in xs]

        rank 0: a            rank 0: a b c
        rank 1: b     ->     rank 1: a b c
        rank 2: c            rank 2: a b c

    Transpose: `reduce_scatter` along the same dim; of `to="invariant"`, `local_slice`.

    Raises:
        ValueError: the dimension does not exist, or `to` is unknown.
    """
    if to not in ("varying", "invariant"):
        raise ValueError(f'all_gather: to must be "varying" or "invariant", got {to!r}')

    def gather(t: Tensor, a: Axis) -> Call:
        d = _dim(t, dim, "all_gather", "dim")
        if to == "varying":
            return ops.all_gather, d, a.size, a.group
        return ops.all_gather_invariant, d, a.index, a.size, a.group

    return _over(x, axis, "all_gather", gather)


def local_slice(x: T, axis: AxisName, *, dim: int = 0) -> T:
    """This rank's shard of a value that is replicated along `axis`: `I -> V`. A copy; nothing moves.

    Shapes: `[..., n * size, ...] -> [..., n, ...]`, any dtype.

    Spec:
        >>> def local_slice(xs, dim=0):
        ...     return [x.chunk(len(xs), dim)[rank] for rank, x in enumerate(xs)]

        rank 0: a b c            rank 0: a
        rank 1: a b c     ->     rank 1: b
        rank 2: a b c            rank 2: c

    Transpose: `all_gather(to="invariant")`.

    Raises:
        ValueError: the dimension does not exist or does not divide by the axis size.
    """

    def cut(t: Tensor, a: Axis) -> Call:
        return ops.local_slice, _divisible(t, dim, axis, a, "local_slice", "dim"), a.index, a.size, a.group

    return _over(x, axis, "local_slice", cut)


def reduce_scatter(x: T, axis: AxisName, *, dim: int = 0) -> T:
    """This rank's shard along `dim` of the sum over the ranks along `axis`: `V -> V`.

    Shapes: `[..., n * size, ...] -> [..., n, ...]`. It is JAX's `psum_scatter(tiled=True)`.

    Spec:
        >>> def reduce_scatter(xs, dim=0):
        ...     return list(sum(xs).chunk(len(xs), dim))

        rank 0: a0 a1            rank 0: a0 + b0
        rank 1: b0 b1     ->     rank 1: a1 + b1

    Transpose: `all_gather` along the same dim.

    Raises:
        ValueError: the dimension does not exist or does not divide by the axis size.
        TypeError: a dtype that cannot be summed.
    """

    def scatter(t: Tensor, a: Axis) -> Call:
        d = _divisible(t, dim, axis, a, "reduce_scatter", "dim")
        return ops.reduce_scatter, d, a.size, *_summable(t, a, "reduce_scatter")

    return _over(x, axis, "reduce_scatter", scatter)


def ppermute(x: T, axis: AxisName, perm: Sequence[tuple[int, int]]) -> T:
    """Sends `x` from rank to rank along `axis`: `V -> V`.

    Args:
        x: tensors of the same shape on every rank.
        axis: one axis name, or several as their product.
        perm: `(source, target)` positions along the axis; no source or target occurs twice. A rank that is no target
            gets zeros.

    Spec:
        >>> def ppermute(xs, perm):
        ...     source = {target: source for source, target in perm}
        ...     return [xs[source[i]] if i in source else torch.zeros_like(xs[i]) for i in range(len(xs))]

        perm [(0, 1), (1, 2)]
        rank 0: a            rank 0: 0
        rank 1: b     ->     rank 1: a
        rank 2: c            rank 2: b

    Transpose: the inverse permutation.

    Raises:
        ValueError: a position outside the axis, or a source or target named twice.
    """
    pairs = [(int(source), int(target)) for source, target in perm]
    size = bound_axis(axis, "ppermute").size
    for end, positions in zip(("source", "target"), zip(*pairs, strict=True), strict=False):
        for position in positions:
            if not 0 <= position < size:
                raise ValueError(
                    f"ppermute over {axis!r}: {end} {position} in {pairs}, but positions run from 0 to {size - 1}"
                )
            if positions.count(position) > 1:
                raise ValueError(f"ppermute over {axis!r}: {end} {position} is there twice in {pairs}")
    sources = {target: source for source, target in pairs}
    source = [sources.get(rank, -1) for rank in range(size)]
    out = _over(x, axis, "ppermute", lambda t, a: (ops.ppermute, source, a.index, a.group))
    if size == 1 and not pairs:  # zeros, even where x is inf or nan, that still have a derivative
        return optree.tree_map(lambda t: t.masked_fill(torch.ones((), dtype=torch.bool, device=t.device), 0), out)
    return out


def all_to_all(x: T, axis: AxisName, *, split_dim: int, concat_dim: int) -> T:
    """Piece `j` of `x` along `split_dim` goes to rank `j`; what arrives is concatenated along `concat_dim`: `V -> V`.

    Shapes: `split_dim` shrinks and `concat_dim` grows by the factor of the axis size. A value that is sharded along
    `concat_dim` becomes one that is sharded along `split_dim`.

    Spec:
        >>> def all_to_all(xs, split_dim, concat_dim):
        ...     pieces = [x.chunk(len(xs), split_dim) for x in xs]
        ...     return [torch.cat([p[rank] for p in pieces], concat_dim) for rank in range(len(xs))]

        rank 0: a0 a1            rank 0: a0 b0
        rank 1: b0 b1     ->     rank 1: a1 b1

    Transpose: `all_to_all` with the two dims swapped.

    Raises:
        ValueError: a dimension does not exist, or `split_dim` does not divide by the axis size.
    """

    def exchange(t: Tensor, a: Axis) -> Call:
        split = _divisible(t, split_dim, axis, a, "all_to_all", "split_dim")
        return ops.all_to_all, split, _dim(t, concat_dim, "all_to_all", "concat_dim"), a.size, a.group

    return _over(x, axis, "all_to_all", exchange)


def ragged_all_to_all(
    x: T, axis: AxisName, send: Sequence[int], receive: Sequence[int] | None = None, *, dim: int = 0
) -> T:
    """As `all_to_all` along one dimension, in pieces of any lengths: `send[j]` places go to rank `j`: `V -> V`.

    Shapes: `[..., sum(send), ...] -> [..., sum(receive), ...]`.

    Args:
        x: tensors of `sum(send)` places along `dim`, any dtype; the other dimensions agree between ranks.
        axis: one axis name, or several as their product.
        send: lengths of the pieces, one for each rank along the axis; may be 0.
        receive: lengths of the pieces that arrive, by rank: `receive[j]` here is `send[here]` on rank `j`. Default: the
            ranks exchange them first, which takes one more exchange and a wait for it.
        dim: the dimension that is split, and along which the received pieces are concatenated.

    Spec:
        >>> def ragged_all_to_all(xs, sends, dim=0):
        ...     pieces = [x.split(send, dim) for x, send in zip(xs, sends)]
        ...     return [torch.cat([p[rank] for p in pieces], dim) for rank in range(len(xs))]

        rank 0: a0 a1 a1     send [1, 2]            rank 0: a0 b0 b0 b0
        rank 1: b0 b0 b0     send [3, 0]     ->     rank 1: a1 a1

    Transpose: `ragged_all_to_all` with `send` and `receive` swapped.

    Raises:
        ValueError: lengths are negative, not one for each rank, or do not add up to the dimension; in a checked call,
            also if `receive` differs from what the others send.
    """
    size = bound_axis(axis, "ragged_all_to_all").size
    lengths = {"send": [int(n) for n in send]}
    if receive is None:
        counts = torch.tensor(lengths["send"], device="cpu")
        received = all_to_all(counts.to(device=current_device()), axis, split_dim=0, concat_dim=0)
        receive = received.tolist()
        if planned():
            notes().assume("ragged_all_to_all: from each rank comes as much as goes there")
            receive = lengths["send"]
    lengths["receive"] = [int(n) for n in receive]
    for name, values in lengths.items():
        if len(values) != size or min(values) < 0:
            raise ValueError(
                f"ragged_all_to_all over {axis!r}: {name} must be {size} lengths, 0 or more, one per rank, got {values}"
            )

    def exchange(t: Tensor, a: Axis) -> Call:
        d = _dim(t, dim, "ragged_all_to_all", "dim")
        if t.shape[d] != sum(lengths["send"]):
            raise ValueError(
                f"ragged_all_to_all over {axis!r}: send={lengths['send']} adds up to {sum(lengths['send'])}, but "
                f"dimension {d} of shape {tuple(t.shape)} is {t.shape[d]}"
            )
        return ops.ragged_all_to_all, d, lengths["send"], lengths["receive"], a.index, a.group

    return _over(x, axis, "ragged_all_to_all", exchange)


def axis_index(axis: AxisName) -> int:
    """This rank's position along `axis`, a plain int; over several axes the first is the major one.

    Spec:
        >>> def axis_index(xs):
        ...     return list(range(len(xs)))
    """
    return bound_axis(axis, "axis_index").index


def axis_size(axis: AxisName) -> int:
    """The number of ranks along `axis`, a plain int.

    Spec:
        >>> def axis_size(xs):
        ...     return [len(xs) for _ in xs]
    """
    return bound_axis(axis, "axis_size").size


def _over(x: T, axis: AxisName, name: str, f: Callable[[Tensor, Axis], Call]) -> T:
    """Runs the op that `f` chooses, after its checks, on the tensor or on each leaf of the pytree.

    Along an axis of size 1 each op is a copy, so that a program that writes into the result does not change its
    argument on such meshes alone. Ops without a derivative still run there, so that they raise when they are
    differentiated.
    """
    bound = bound_axis(axis, name)
    refuse_independent(axis, name)

    recorder = None if torch.compiler.is_compiling() else recording.current()

    pieces = {} if recorder is None or isinstance(x, Tensor) else recording.shard_axes(x)

    def apply_to_leaf(leaf: Any) -> Any:
        tensor = leaf
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            tensor = torch.full((), leaf, device=current_device())  # a copy would make the host wait
        elif not isinstance(leaf, Tensor):
            raise TypeError(
                f"{api_name(name)} takes tensors and numbers, or pytrees of them; got {type(leaf).__name__}"
            )
        if recorder is not None:
            number = None if tensor is leaf else leaf
            recorder.called(name, as_names(axis), tensor, number, axis, pieces.get(id(leaf), ()))
        op, *statics = f(tensor, bound)
        if bound.size > 1 or op in (ops.pmax, ops.pmin):
            return op(tensor, *statics)
        return kernels.copy(tensor) if tensor is leaf else tensor

    if isinstance(x, Tensor) or (recorder is None and not debugging.collectives):
        return apply_to_leaf(x) if isinstance(x, Tensor) else optree.tree_map(apply_to_leaf, x)
    paths, leaves, tree = optree.tree_flatten_with_accessor(x)
    results = []
    try:
        for path, leaf in zip(paths, leaves, strict=True):
            attribution.leaf = dotted(path)  # which identifies the leaf when ranks compare
            results.append(apply_to_leaf(leaf))
    finally:
        attribution.leaf = ""
    return optree.tree_unflatten(tree, results)


def _dim(x: Tensor, dim: int, name: str, argument: str) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{api_name(name)}: {argument}={dim}, but the tensor has shape {tuple(x.shape)}, of {x.ndim} dimensions"
        )
    return dim % x.ndim


def _divisible(x: Tensor, dim: int, axis: AxisName, bound: Axis, name: str, argument: str) -> int:
    d = _dim(x, dim, name, argument)
    if x.shape[d] % bound.size:
        padded = -(-x.shape[d] // bound.size) * bound.size
        raise ValueError(
            f"{api_name(name)} over {axis!r} cuts dimension {d} of shape {tuple(x.shape)} into {bound.size} equal "
            f"pieces, but {x.shape[d]} does not divide by {bound.size}: pad it to {padded}"
        )
    return d


def _summable(x: Tensor, axis: Axis, name: str) -> tuple[str]:
    """Returns the group to sum over; raises TypeError if the dtype cannot be summed."""
    if x.dtype == torch.bool or (x.device.type == "cpu" and x.dtype not in kernels.SUMMABLE and not x.is_complex()):
        raise TypeError(
            f"{api_name(name)} cannot add {x.dtype} on {x.device.type}: cast first, for example x.to(torch.int64)"
        )
    return (axis.group,)


def _ordered(x: Tensor, axis: Axis, name: str) -> tuple[str]:
    """Returns the group to compare over; raises TypeError if the dtype has no order."""
    if x.is_complex():
        raise TypeError(f"{api_name(name)}: complex numbers have no order; got {x.dtype}")
    return (axis.group,) if x.dtype == torch.bool else _summable(x, axis, name)
