"""Stages in forward mode: tangents of parameters are gathered with them, and reduced gradients carry tangents.

Inside `shardfn.jvp` a call of a stage is replaced by a call of a paired stage, whose function pairs each parameter and
argument with its tangent: `(p, x, dp, dx) -> (y, dy)`. It runs on the same schedule. Its backward gets cotangents with
tangents; autograd propagates both, and the schedule reduces the gradients and their tangents.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from shardfn.collectives.capturing import capturing
from shardfn.collectives.ledger import ledger
from shardfn.compat import autograd, dispatch, functorch, modes, together
from shardfn.forward_mode.watched import WRITES, belonging, running
from shardfn.quoting import short
from shardfn.stages.refusals import writes
from shardfn.stages.signature import Signature, signature_of
from shardfn.tiers.activations import Offload
from shardfn.transforms.autodiff import detached, moves
from shardfn.transforms.shortage import RandomNumbers
from shardfn.transforms.step import current_step


def runs_on_schedule(signature: Signature, leaves: Sequence[Any]) -> bool:
    """Whether a call in forward mode runs on the schedule; else it is composed.

    It is composed where parameters or gradients are quantized for communication, which a composition leaves out of
    derivatives, or where activations leave the device: aliases of parameters would go with them.
    """
    options = signature.options
    rounding: list[Any] = [options, *(layout.placement for layout in signature.layouts)]
    if any(source.gather_format or source.reduce_format for source in rounding) or signature.packed or signature.wholes:
        return False
    if dispatch.in_graph() or functorch.inside_transform() or isinstance(options.remat, Offload):
        return False
    return any(isinstance(x, Tensor) and functorch.tangent_of(x) is not None for x in leaves)


# --- the stage of pairs ---


class Pairs:
    """A call of a stage in forward mode.

    Attributes:
        signature: of the stage of pairs.
        leaves: its arguments, without tangents: the values of all leaves, followed by the tangents of some.
        count: how many of them are values.
        tangent_of: by the number of a shard, that of its tangent.
        unread: shards of whose gradient the tangent alone is used.
    """

    def __init__(self, signature: Signature, leaves: Sequence[Any]) -> None:
        parts = [functorch.unpacked(x) if isinstance(x, Tensor) else (x, None) for x in leaves]
        values = [value for value, _ in parts]
        needs = [torch.is_grad_enabled() and moves(x) and x.requires_grad for x in values]
        shards, step = set(signature.shards), current_step()
        # A stage has one for all of its parameters or for none, and one if its gradient will have one.
        has = tuple(
            any(parts[i][1] is not None or (needs[i] and i in shards) for i in source) for source in signature.sources
        )
        tangents = [torch.zeros_like(x) if t is None and moves(x) else x if t is None else t for x, t in parts]
        moving = [node for node, has_tangent in zip(signature.nodes(tangents), has, strict=True) if has_tangent]
        arguments: Any = (signature.nodes(values), moving), {}
        variables = step.variables if step is not None and step.unread and not torch.is_anomaly_enabled() else {}
        unread = tuple(all(id(leaves[i]) in variables for i in source) for source in signature.sources)
        kind = has, unread
        if kind not in signature.paired:
            function = functools.wraps(signature.function)(functools.partial(_on_pairs, signature, *kind))
            paired_signature = signature.paired[kind] = signature_of(
                signature.name, function, signature.options, *arguments
            )
            paired_signature.computes = signature.computes
        self.signature = signature.paired[kind]
        self.leaves: list[Any] = optree.tree_leaves(arguments)
        self.count = len(leaves)
        count = sum(i < len(leaves) for i in self.signature.shards)
        source_of = {leaf: k for k, source in enumerate(signature.sources) for leaf in source}
        paired = [k for k, i in enumerate(signature.shards) if has[source_of[i]]]
        self.tangent_of = dict(zip(paired, range(count, len(self.signature.shards)), strict=True))
        self.unread = {k for k in paired if unread[source_of[signature.shards[k]]]}


def _on_pairs(
    signature: Signature, has: Sequence[bool], unread: Sequence[bool], nodes: list[Any], moving: list[Any]
) -> Any:
    """Calls the stage's function on parameters and arguments with tangents."""
    values = optree.tree_leaves(nodes)
    differentiable = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad]
    tries = bool(differentiable) and torch.is_grad_enabled() and signature.reverses
    is_unread = [node_unread for node, node_unread in zip(nodes, unread, strict=True) for _ in optree.tree_leaves(node)]
    transposed = functools.partial(
        _transposed, signature, has, nodes, moving, differentiable, [is_unread[i] for i in differentiable]
    )
    if tries and (autograd.inside_backward() or capturing() is not None):  # it has run there before
        return transposed()
    if tries:
        began = _Random(values, signature)
        with ledger() as log:
            try:
                return transposed()
            except Exception as error:
                if not (_REFUSALS.search(str(error)) or type(error).__module__.startswith("torch._dynamo")):
                    raise  # a graph of pairs would fail, too
                if log.records:
                    raise RuntimeError(
                        f"{signature}: in shardfn.jvp it runs inside of torch.func.vjp, which raised an error after a "
                        f"collective: {short(str(error))}. Move that operation before the collective, or leave it out"
                    ) from error
        began.restore()
    return _recorded(signature, has, nodes, moving, tries)


class _Random:
    """The state of the generators of random numbers that a function may use: torch's, Python's and numpy's."""

    def __init__(self, values: Sequence[Any], signature: Signature) -> None:
        self.torch = RandomNumbers([x for x in values if isinstance(x, Tensor)])
        self.own = [(x, x.get_state()) for x in signature.generators(values)]
        self.others = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        self.torch.restore()
        for generator, state in self.own:
            generator.set_state(state)
        random.setstate(self.others[0])
        np.random.set_state(self.others[1])


# What torch.func refuses, and a graph of pairs may allow.
_REFUSALS = re.compile(
    f"{WRITES}|setup_context|functorch|torch\\.func|saved tensor hooks|Nested forward mode|data pointer|captured Tensor"
    "|TensorWrapper"
)


def _recorded(signature: Signature, has: Sequence[bool], nodes: list[Any], moving: list[Any], refused: bool) -> Any:
    """Calls it on pairs whose graph autograd records."""
    pairs = _paired(has, nodes, moving)
    try:
        with modes.functions_seen(), running(None, _ranges(optree.tree_leaves(pairs))):
            result = _call_function(signature, pairs)
    except RuntimeError as error:
        if WRITES in str(error) or "modified inplace. This view was created inside a custom Function" in str(error):
            raise RuntimeError(writes(signature)) from error
        raise
    signature.reverses &= not refused
    return optree.tree_map(functools.partial(_unaliased, _storages_of((nodes, moving, pairs))), result)


def _transposed(
    signature: Signature,
    has: Sequence[bool],
    nodes: list[Any],
    moving: list[Any],
    differentiable: Sequence[int],
    unread: Sequence[bool],
) -> Any:
    """Calls it inside of `torch.func.vjp`.

    A graph of pairs themselves would record the formulas of the tangents, too. What an operation returns and saves
    would hold its tangent, the tangent's graph the operation, and all of it memory until `jvp` ends.
    """
    flat, tree = optree.tree_flatten(nodes)
    plain_inputs = [x.detach() if isinstance(x, Tensor) else x for x in flat]
    leaves = optree.tree_leaves(_paired(has, optree.tree_unflatten(tree, plain_inputs), moving))
    traced: list[Any] = []

    def run(*variables: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        arguments = list(leaves)
        for group in groups:
            pairs = [variables[k] for k in group] + [xs[k] for k in group]
            for k, x in zip(group, _InPlaceOf.apply(*pairs), strict=True):  # type: ignore[no-untyped-call]
                arguments[differentiable[k]] = x
                if unread[k]:
                    together.mark_unread(x)
        kept_by = contextlib.nullcontext() if saving.call is None else saving.call()
        with modes.functions_seen(), running(f"{signature.name} ({signature.stage})", _ranges(leaves)), kept_by:
            belonging(arguments)
            result = _call_function(signature, optree.tree_unflatten(tree, arguments))
        results, structure = optree.tree_flatten(result)
        ys, integers = (
            [y for y in results if isinstance(y, Tensor) and moves(y) == is_moving] for is_moving in (True, False)
        )
        constants = [_TensorLocation(moves(y)) if isinstance(y, Tensor) else y for y in results]
        traced[:] = constants, structure, [y.requires_grad for y in ys], ys, variables, integers
        return ys or [variables[0].new_zeros(())], integers  # `vjp` refuses a function without results

    xs = [leaves[i] for i in differentiable]
    has_tangents = [functorch.tangent_of(x) is not None for x in xs]
    # Of one Function, all results have tangents, or none.
    by_tangent = [[k for k, paired in enumerate(has_tangents) if paired is kind] for kind in (True, False)]
    groups = [group for group in by_tangent if group]
    begins = [torch.empty_strided(x.shape, (0,) * x.ndim, dtype=x.dtype, device=x.device) for x in xs]
    transform: Any = torch.func.vjp
    before = _versions(leaves)
    ys, _, integer_outputs = transform(run, *begins, has_aux=True)
    if _versions(leaves) != before:
        raise RuntimeError(writes(signature))
    constants, structure, follows, *graph = traced
    storages = _storages_of((nodes, moving, leaves))
    pairs = [functorch.unpacked(_unaliased(storages, y)) for y in ys[: len(follows)]]
    values = [y for y, _ in pairs]
    if any(follows):
        plain_inputs = [flat[i] for i in differentiable]
        outputs = _Transposed.apply((signature, *graph), follows, len(values), *values, *plain_inputs)  # type: ignore[no-untyped-call]
        values = [out if paired else y for y, out, paired in zip(values, outputs, follows, strict=True)]
    results = iter([y if t is None else functorch.dual(y, t) for y, (_, t) in zip(values, pairs, strict=True)])
    rest = iter(integer_outputs)
    filled = [next(results if y.moves else rest) if isinstance(y, _TensorLocation) else y for y in constants]
    return optree.tree_unflatten(structure, filled)


class _Saving(threading.local):
    """The saved-tensor hooks for graphs of a stage's function inside `torch.func.vjp`; None for no hooks."""

    call: Callable[[], Any] | None = None


saving = _Saving()


def _ranges(leaves: Iterable[Any]) -> list[tuple[int, int]]:
    """The memory addresses of tensors that are lent to a stage's function."""
    return [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in leaves if type(x) is Tensor]


class _TensorLocation(NamedTuple):
    """A placeholder for a tensor in a flattened result: `moves` says whether it may have a tangent."""

    moves: bool


def _paired(has: Sequence[bool], nodes: list[Any], moving: list[Any]) -> list[Any]:
    tangents = iter(moving)
    return [
        optree.tree_map(dual, node, next(tangents)) if has_tangent else node
        for node, has_tangent in zip(nodes, has, strict=True)
    ]


def _call_function(signature: Signature, nodes: list[Any]) -> Any:
    args, kwargs = optree.tree_unflatten(signature.outer, nodes)
    return signature.function(*args, **kwargs)


def _storages_of(tree: Any) -> set[int]:
    """The storages of tensors and their tangents."""
    tensors = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
    return {autograd.storage_of(part) for x in tensors for part in functorch.unpacked(x) if part is not None}


class _InPlaceOf(torch.autograd.Function):
    """`(*begins, *xs) -> xs`, with the gradients of `begins`: so that a graph holds what of xs it reads."""

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([x.view_as(x) for x in tensors[len(tensors) // 2 :]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return *cotangents, *[None] * len(cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple([None if t is None else t.view_as(t) for t in tangents[len(tangents) // 2 :]])


class _Transposed(torch.autograd.Function):
    """`((stage, ys', xs', others'), follows, count, *ys, *xs) -> ys`, with the gradients that ys' have in xs'.

    Gradients have tangents.
    """

    @staticmethod
    def forward(ctx: Any, graph: Any, follows: Sequence[bool], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graph, ctx.count = graph, count
        ctx.versions = [functorch.unwrapped(y)._version for y in (*graph[1], *graph[3])]
        outputs = tuple([y.detach() for y in tensors[:count]])  # no views: the caller may write into them
        ctx.mark_non_differentiable(*[y for y, has_gradient in zip(outputs, follows, strict=True) if not has_gradient])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        (signature, ys, xs, integer_outputs), ctx.graph = ctx.graph, None
        _refuse_written(signature, (*ys, *integer_outputs), ctx.versions, ys)
        used = [(y, functorch.unpacked(ct)) for y, ct in zip(ys, cotangents, strict=True) if ct is not None]
        grads: Sequence[Tensor | None] = [None] * len(xs)
        if used:
            ys, pairs = zip(*used, strict=True)
            cts = [
                value.detach() if tangent is None else functorch.dual(value.detach(), tangent.detach())
                for value, tangent in pairs
            ]
            # Some formulas of torch are right in forward mode only in grad mode, as with `create_graph`.
            grads = torch.autograd.grad(ys, xs, cts, retain_graph=False, create_graph=True, allow_unused=True)
        gradients = [None if g is None else detached(functorch.alive(g)) for g in grads]
        closed_over = zip(cotangents, ctx.needs_input_grad[3:], strict=False)  # through what the function closes over
        return None, None, None, *[ct if need else None for ct, need in closed_over], *gradients


def _refuse_written(signature: Signature, results: Sequence[Tensor], versions: Sequence[int], ys: Any) -> None:
    """Raises RuntimeError if results were written into since, and the graph of ys reads them.

    Torch's own versions do not tell, as what `torch.func.vjp` saves is wrapped.
    """
    inner = [functorch.unwrapped(y) for y in results]
    written = {autograd.storage_of(y) for y, n in zip(inner, versions, strict=True) if y._version != n}
    for saved in autograd.saved_by(y.grad_fn for y in ys) if written else ():
        if autograd.storage_of(functorch.unwrapped(saved)) in written:
            raise RuntimeError(
                f"{signature}: a result of shape {list(saved.shape)} was modified by an inplace operation after the "
                f"stage, whose gradient reads it: write `x = x + y` in place of `x += y` there"
            )


def _versions(leaves: Sequence[Any]) -> list[int]:
    tensors = [x for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
    return [part._version for x in tensors for part in functorch.unpacked(x) if part is not None]


def dual(value: Any, tangent: Any) -> Any:
    """A pair. Torch would copy the tangent if it were at another place in its storage, with a storage as large."""
    if not moves(value):
        return value
    marked = any(x.is_conj() or x.is_neg() for x in (value, tangent))  # which an alias would lose
    # Nor would it take a view of bytes that are numbers.
    bases = [x._base for x in (value, tangent) if x._base is not None]
    if marked or (value.untyped_storage().nbytes() == value.nbytes and all(map(moves, bases))):
        return functorch.dual(value, tangent)
    if capturing() is None:  # a captured step would take an alias for memory from outside
        alias, other = autograd.second_storage(value.detach()), autograd.second_storage(tangent)
        if alias is not None and other is not None:
            return functorch.dual(_Alias.apply(value, alias), other)  # type: ignore[no-untyped-call]
    return functorch.dual(value.clone(), tangent.clone())


class _Alias(torch.autograd.Function):
    """The same numbers in another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alias: Tensor) -> Tensor:
        return alias.view_as(alias)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor, None]:
        return ct, None


def _unaliased(storages: set[int], y: Any) -> Any:
    """A result that shares no memory with what was given: pairs are aliases, and writes into them would not be seen."""
    return y.clone() if moves(y) and autograd.storage_of(functorch.unpacked(y)[0]) in storages else y


class _Tangent(torch.autograd.Function):
    """A tangent of an output, whose gradient nobody takes."""

    @staticmethod
    def forward(ctx: Any, stage: str, tangent: Tensor, *depends: Tensor) -> Tensor:
        ctx.stage, ctx.count = stage, len(depends)
        ctx.set_materialize_grads(False)
        return tangent.detach()  # no view, into which torch would let nobody write, as by `x += 1` after the stage

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        if cotangent is not None:
            raise RuntimeError(
                f"stage {ctx.stage!r}: the gradient of a tangent is not supported if the function closes over a "
                f"differentiated value, or unpacks a tangent. Pass the value to jvp as a primal, or use torch.func.jvp"
            )
        return (None, None) + (None,) * ctx.count


def nobodys(stage: str, tangent: Tensor, depends: Sequence[Tensor]) -> Tensor:
    """The tangent of an output; a gradient of it, which would go to these tensors, is refused."""
    return _Tangent.apply(stage, tangent, *depends) if depends else tangent  # type: ignore[no-untyped-call]
