"""Stages in a function whose rows are apart: parameters are gathered when a stage runs, and rows' gradients are met.

A call of a stage is one of another stage, on the same schedule, whose function keeps the rows apart. No gradient of its
parameters is asked for, so none is reduced; its backward hands over its rows' gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import autograd, functorch
from shardfn.curvature.row_uses import Begin, Key, Receiver, Ticket
from shardfn.curvature.rows import Task, Way, now
from shardfn.quant.packed import is_packed
from shardfn.shards.layout import assemble
from shardfn.stages.forward_mode import nodes_of
from shardfn.stages.signature import Signature
from shardfn.stages.stage import instead, made

Variables = Mapping[int, tuple[int, Tensor]]


class Plan:
    """What a call needs besides tensors; no pytree node.

    Attributes:
        mapped: which arguments are `[rows, *]`.
        keys: for each argument, what identifies its parameters, None for one that is not trained; None for an argument
            that is no stage's.
        receiver: what takes the gradients of rows.
        tickets: those of results that are computed from parameters alone, by number; the same if the stage runs again.
    """

    def __init__(self, mapped: Sequence[bool], keys: Sequence[list[Key | None] | None], receiver: Receiver) -> None:
        self.mapped, self.keys, self.receiver = mapped, keys, receiver
        self.tickets: dict[int, Ticket] = {}


@contextlib.contextmanager
def stages_apart(receiver: Receiver, variables: Variables) -> Iterator[None]:
    """A context in which stages are called by one row.

    Args:
        receiver: what takes their rows' gradients.
        variables: the shards of which they are gradients, and the indices of their leaves, by id.
    """
    before, instead.call = instead.call, functools.partial(_called, receiver, variables)
    try:
        yield
    finally:
        instead.call = before


def _called(receiver: Receiver, variables: Variables, signature: Signature, leaves: list[Any]) -> Any:
    """Calls a stage."""
    mode = now.mode
    if mode is None or functorch.level() != mode.level:
        raise RuntimeError(f"{signature} is called inside a transform of its own, in losses of per_example")
    given, mapped = list(leaves), [False] * len(leaves)
    shards = set(signature.shards)
    for i, x in enumerate(leaves):
        if i not in shards and isinstance(x, Tensor):
            all_of = None
            if mode.row(x):
                with functorch.below():
                    all_of = functorch.rows_of(x)
            elif mode.shared(x):
                all_of = mode.all_of(x)
            given[i], mapped[i] = (x, False) if all_of is None else (all_of, True)
    nodes = nodes_of(signature, given)
    nodes = [
        signature.wholes[at[0]].having(x) if at[0] in signature.wholes else x
        for at, x in zip(signature.sources, nodes, strict=True)
    ]
    plan = Plan([mapped[at[0]] for at in signature.sources], _keys(signature, leaves, receiver, variables), receiver)
    args, kwargs = optree.tree_unflatten(signature.outer, nodes)
    with functorch.below(), _aside(variables):
        result, which = _stage(signature)(args, kwargs, mode.anchor, plan)
    ys, tree = optree.tree_flatten(result)
    for i, (y, kind) in enumerate(zip(ys, which, strict=True)):
        if kind == "rows":
            ys[i] = functorch.mapped(y, mode.level)
        elif kind == "shared":
            with functorch.below():
                ys[i] = mode.collector.returned(y, plan.tickets[i])
    return optree.tree_unflatten(tree, ys)


@contextlib.contextmanager
def _aside(variables: Variables) -> Iterator[None]:
    """A context in which stages are ordinary ones, and shards need no gradient."""
    before = instead.call, now.mode
    instead.call = now.mode = None
    for _, x in variables.values():
        x.requires_grad_(False)
    try:
        with autograd.saved_tensors_hooks_enabled():
            yield
    finally:
        instead.call, now.mode = before
        for _, x in variables.values():
            x.requires_grad_()


def _keys(
    signature: Signature, leaves: Sequence[Any], receiver: Receiver, variables: Variables
) -> list[list[Key | None] | None]:
    """What identifies the parameters among the arguments; counts the calls that use each shard."""
    layouts, shards = iter(signature.layouts), set(signature.shards)
    found: list[list[Key | None] | None] = []
    for at in signature.sources:
        if at[0] not in shards:
            found.append(None)
            continue
        own, keys = [], []
        for i in at:
            layout, shard = next(layouts), leaves[i]
            trains = layout.trainable and torch.is_grad_enabled() and shard.requires_grad
            if trains and id(shard) not in variables:
                raise RuntimeError(
                    f"{signature} gets shards that losses of per_example computed from params: pass those of params, "
                    f"and compute inside the stage"
                )
            if trains:
                receiver.calls[variables[id(shard)][0]] = receiver.calls.get(variables[id(shard)][0], 0) + 1
            own.append(layout)
            numbers = range(len(layout.entries))
            keys.append([Key(variables[id(shard)][0], number) if trains else None for number in numbers])
        tree = assemble(own, keys)
        flat = optree.tree_leaves(tree, is_leaf=lambda x: x is None or is_packed(x))
        found.append([key if isinstance(key, Key) else None for key in flat])
    return found


def _stage(signature: Signature) -> Any:
    """The stage whose function keeps rows apart: `(args, kwargs, anchor, plan) -> (result, which)`."""
    if signature.apart is None:

        @functools.wraps(signature.function)
        def function(args: Any, kwargs: Any, anchor: Tensor, plan: Plan) -> Any:
            return _run(signature, args, kwargs, anchor, plan)

        signature.apart = made(signature.name, function, signature.options, signature.computes)
    return signature.apart


def _run(signature: Signature, args: Any, kwargs: Any, anchor: Tensor, plan: Plan) -> Any:
    leaves: list[Any] = []
    mapped: list[bool] = []
    keys: list[Key | None] = []
    trees: list[tuple[int, Any]] = []
    for node, yes, own in zip(signature.outer.flatten_up_to((args, kwargs)), plan.mapped, plan.keys, strict=True):
        parts, tree = ([node], None) if own is None else optree.tree_flatten(node)
        leaves += parts
        mapped += [yes] * len(parts)
        keys += [None] if own is None else own
        trees.append((len(parts), tree))

    def call(leaves: list[Any]) -> Any:
        nodes, at = [], 0
        for n, tree in trees:
            nodes.append(leaves[at] if tree is None else optree.tree_unflatten(tree, leaves[at : at + n]))
            at += n
        args, kwargs = optree.tree_unflatten(signature.outer, nodes)
        return signature.function(*args, **kwargs)

    trained = [key for key in keys if key is not None]
    anchor = Begin.apply(anchor, functools.partial(plan.receiver.settle, trained))  # type: ignore[no-untyped-call]
    task = Task(call, leaves, mapped, keys, anchor, plan.receiver, plan.tickets)
    result, which = Way.of(signature.code, 2, bounded=True).run(task)
    return result, tuple("shared" if yes is None else "rows" if yes else "other" for yes in which)
