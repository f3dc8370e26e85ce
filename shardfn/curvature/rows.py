"""Runs a function, and the stages in it, with its rows apart, so that each row's gradient can be told from the others'.

The function runs under a vmap over rows, as if it were called with one row alone. Ops that take parameters and rows do
so by rules, which leave whole products whole. What no rule knows gets every parameter once for each row; and a function
that vmap cannot run is called for one row after another.

A call of a stage is one of another stage, on the same schedule, whose function keeps the rows apart. No gradient of its
parameters is asked for, so none is reduced; its backward hands over its rows' gradients.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfn.compat import autograd, functorch
from shardfn.compat.dispatch import tensors_in
from shardfn.compat.replacing import replaced
from shardfn.curvature.row_gradients import parts
from shardfn.curvature.row_rules import OPENED, RULES, WITHOUT_PARAMETERS
from shardfn.curvature.row_uses import Begin, Key, Link, Receiver, Shared, TensorUse, Ticket, Undecided, UseCollector
from shardfn.quant.packed import is_packed
from shardfn.shards.layout import assemble
from shardfn.stages.signature import Signature
from shardfn.stages.stage import made, way

MOST_EXPANDED = 4  # times the elements of a row that an op takes, which its parameters may have in the general way


class _Now(threading.local):
    mode: RowsMode | None = None


now = _Now()


class RowsMode(TorchFunctionMode):
    """A context in which ops meet rows, and tensors that are computed from parameters alone."""

    def __init__(self, collector: UseCollector, level: int, anchor: Tensor, bounded: bool) -> None:
        super().__init__()
        self.collector, self.level, self.anchor, self.bounded = collector, level, anchor, bounded
        self.before: list[RowsMode | None] = []

    def __enter__(self) -> RowsMode:
        self.before.append(now.mode)
        now.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        now.mode = self.before.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if now.mode is self and functorch.level() == self.level and func not in _ASIDE:
            return self._met(func, args, kwargs)
        return func(*args, **kwargs)

    def _met(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in(args, kwargs)
        rows = [x for x in tensors if self.row(x)]
        if not rows:
            return func(*args, **kwargs)
        shared = [x for x in tensors if self.shared(x)]
        rule = (RULES if shared else WITHOUT_PARAMETERS).get(func)
        if rule is not None and "out" not in kwargs:
            result = rule(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if not shared:
            return func(*args, **kwargs)
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        return self._generally(func, args, kwargs, rows, shared)

    def _generally(self, func: Any, args: Any, kwargs: Any, rows: list[Tensor], shared: list[Tensor]) -> Any:
        most = MOST_EXPANDED * max(x.numel() for x in rows)
        for x in shared if self.bounded else ():
            if x.numel() > most and parts(self.collector.count, x.numel())[1:]:
                raise Undecided(f"{getattr(func, '__name__', func)} of a parameter of {x.numel()} elements")
        all_of = {id(x): self.all_of(x) for x in shared}
        given = {key: functorch.mapped(x, self.level) for key, x in all_of.items() if x is not None}
        args, kwargs = _replaced((args, kwargs), given)
        return func(*args, **kwargs)

    # --- for rules ---

    def row(self, x: Any) -> bool:
        """Whether x is a row."""
        return isinstance(x, Tensor) and functorch.is_mapped(x, self.level)

    def shared(self, x: Any) -> bool:
        """Whether x is computed from parameters alone."""
        if not isinstance(x, Tensor) or functorch.wrapped(x):
            return False
        return x.requires_grad and torch.is_grad_enabled()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function of torch, by a rule if there is one."""
        return self._met(function, args, kwargs)

    def together(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Calls a function with all rows at once, `[rows, *]`."""
        with functorch.below():
            y = function(*[functorch.rows_of(x) for x in rows])
        return functorch.mapped(y, self.level)

    def by(self, op: Any, x: Tensor, tensor: Tensor, order: Any) -> Any:
        """Applies `op` to a row and a tensor whose dimensions are taken in this order."""
        use = self.collector.use(tensor, order)
        if use is None:
            return NotImplemented
        plain = tensor.detach().permute(use.order)
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.is_floating_point():
            dtype = torch.get_autocast_dtype(kind)
            x, plain = x.to(dtype), plain.to(dtype)
        return self.together(lambda rows: Shared.apply(rows, plain, self._anchor(use), self.collector, use, op), x)  # type: ignore[no-untyped-call]

    def all_of(self, tensor: Tensor, ticket: Ticket | None = None) -> Tensor | None:
        """A shared tensor once for each row, `[rows, *shape]`, or with a ticket as a stage returns it.

        None if it depends on no parameter.
        """
        use = self.collector.use(tensor)
        if use is None:
            return None
        with functorch.below():
            if ticket is None:
                return self.collector.expanded(tensor, self._anchor(use), use)
            return self.collector.exported(tensor, self._anchor(use), use, ticket)

    def _anchor(self, use: TensorUse) -> Tensor:
        sources = [parameter.source for parameter in use.parameters if parameter.source is not None]
        return Link.apply(self.anchor, *sources) if sources else self.anchor  # type: ignore[no-untyped-call]


_ASIDE = {Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.size, Tensor.dim}  # type: ignore[attr-defined]


def _replaced(tree: Any, given: dict[int, Tensor]) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)([_replaced(x, given) for x in tree])
    if isinstance(tree, dict):
        return {key: _replaced(x, given) for key, x in tree.items()}
    return given.get(id(tree), tree)


# --- a whole function ---

Result = tuple[Any, list[bool | None]]  # a tree, and which of its leaves are `[rows, *]`; None for those with a ticket


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function.

    Attributes:
        call: the function of leaves.
        leaves: its arguments.
        mapped: which of them are `[rows, *]`.
        keys: which of them are parameters: what identifies each; None for the others.
        anchor: a scalar that needs a gradient.
        receiver: what takes the gradients of rows.
        tickets: for results that are computed from parameters alone, by number; None to have them once for each row.
    """

    call: Callable[[list[Any]], Any]
    leaves: Sequence[Any]
    mapped: Sequence[bool]
    keys: Sequence[Key | None]
    anchor: Tensor
    receiver: Receiver
    tickets: dict[int, Ticket] | None = None


class ExecutionMode:
    """How a function is run: with rules, with every parameter once for each row, or row by row.

    Attributes:
        at: the way that was found.
        most: the last that may be tried.
        bounded: whether the function may be called for some rows at a time, to use less memory.
    """

    def __init__(self, most: int, bounded: bool) -> None:
        self.at, self.most, self.bounded = 0, most, bounded

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(code: Any, most: int, bounded: bool) -> ExecutionMode:
        """How functions with this code are run; they may be made anew at each step."""
        return ExecutionMode(most, bounded)

    def run(self, task: FunctionCall) -> Result:
        """Runs a function with its rows apart."""
        while True:
            state, tried = torch.get_rng_state(), self.at
            try:
                return _WAYS[tried](task, self.bounded)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if tried >= self.most or not cannot(error):
                    raise
                self.at = max(self.at, tried + 1)  # ranks may be threads
                torch.set_rng_state(state)


def cannot(error: Exception) -> bool:
    """Whether an error says that the way is none for the function, and not that the function is wrong."""
    return isinstance(error, Undecided) or any(sign in str(error) for sign in _SIGNS)


_SIGNS = (
    "vmap", "functorch", "BatchedTensor", "atching rule", "doesn't have storage", "does not require grad",
    "not have a grad_fn", "stack expects each tensor to be equal size",
)  # fmt: skip


def _by_rules(task: FunctionCall, bounded: bool) -> Result:
    collector = UseCollector(task.receiver, slice(0, task.receiver.rows))
    pairs = zip(task.leaves, task.keys, strict=True)
    leaves = [x if key is None else collector.parameter(x, key) for x, key in pairs]
    begin = Begin.apply(task.anchor, collector.finish)  # type: ignore[no-untyped-call]
    return _under_vmap(task, leaves, task.mapped, begin, collector, bounded)


def _expanded(task: FunctionCall, bounded: bool) -> Result:
    numel = sum(x.numel() for x, key in zip(task.leaves, task.keys, strict=True) if key is not None)
    results = []
    for rows in parts(task.receiver.rows, numel if bounded else 0):
        leaves, mapped, begin, collector = _of_rows(task, rows)
        results.append(_under_vmap(replace(task, tickets=None), leaves, mapped, begin, collector, bounded))
    return _joined(results, torch.cat)


def _one_by_one(task: FunctionCall, bounded: bool) -> Result:
    results: list[Result] = []
    for i in range(task.receiver.rows):
        leaves, mapped, *_ = _of_rows(task, slice(i, i + 1))
        result = task.call([x[0] if yes else x for x, yes in zip(leaves, mapped, strict=True)])
        results.append((result, [isinstance(y, Tensor) for y in optree.tree_leaves(result)]))
    return _joined(results, torch.stack)


_WAYS = (_by_rules, _expanded, _one_by_one)


def _of_rows(task: FunctionCall, rows: slice) -> tuple[list[Any], list[bool], Tensor, UseCollector]:
    """The arguments for some rows, every parameter once for each, and which are mapped; the anchor; what collects."""
    collector = UseCollector(task.receiver, rows)
    begin = Begin.apply(task.anchor, collector.finish)  # type: ignore[no-untyped-call]
    leaves = []
    for x, yes, key in zip(task.leaves, task.mapped, task.keys, strict=True):
        if key is not None:
            leaf = collector.parameter(x, key)
            use = collector.use(leaf)
            assert use is not None, "it is a parameter of the run"
            leaves.append(collector.expanded(leaf, begin, use))
        else:
            leaves.append(x[rows] if yes else x)
    return leaves, [yes or key is not None for yes, key in zip(task.mapped, task.keys, strict=True)], begin, collector


def _under_vmap(
    task: FunctionCall,
    leaves: Sequence[Any],
    mapped: Sequence[bool],
    begin: Tensor,
    collector: UseCollector,
    bounded: bool,
) -> Result:
    count, tickets = collector.count, task.tickets
    with functorch.mapping(count) as level, RowsMode(collector, level, begin, bounded) as rows, _no_hooks():
        result = task.call([functorch.mapped(x, level) if yes else x for x, yes in zip(leaves, mapped, strict=True)])
        ys, tree = optree.tree_flatten(result)
        made: list[Any] = []
        which: list[bool | None] = []
        for number, y in enumerate(ys):
            yes: bool | None = rows.row(y)
            if yes:
                with functorch.below():
                    y = functorch.rows_of(y)
            elif rows.shared(y):
                ticket = None if tickets is None else tickets.setdefault(number, Ticket())
                shared = rows.all_of(y, ticket)
                y, yes = (y, False) if shared is None else (shared, True if ticket is None else None)
            which.append(yes)
            made.append(y)
    if any(yes and len(y) != count for y, yes in zip(made, which, strict=True)):
        raise Undecided("rows of another function")
    reached = {id(x) for x in autograd.leaves_of([y for y in made if isinstance(y, Tensor)])}
    if not reached.isdisjoint(collector.parameters):
        raise Undecided("a Function of the program's own")
    collector.end()
    return optree.tree_unflatten(tree, made), which


def _no_hooks() -> Any:
    """A context in which nothing runs a part of the function again in backward, where rows are not apart."""
    if autograd.saved_tensors_hooks() is not None or not autograd.saved_tensors_hooks_allowed():
        return contextlib.nullcontext()
    return torch.autograd.graph.disable_saved_tensors_hooks(
        "per_example runs this under vmap, where nobody takes what autograd saves: write stage(f, remat=True) in place "
        "of torch.utils.checkpoint, or put it into a stage"
    )


def _joined(results: Sequence[Result], join: Callable[..., Tensor]) -> Result:
    """One result of several, of some rows each."""
    first, which = results[0]
    if len(results) == 1 and join is torch.cat:
        return results[0]
    columns = zip(*(optree.tree_leaves(result) for result, _ in results), strict=True)
    ys = [join(column) if yes else column[0] for column, yes in zip(columns, which, strict=True)]
    return optree.tree_unflatten(optree.tree_structure(first), ys), which


# --- stages ---

Variables = Mapping[int, tuple[int, Tensor]]


class RowsPlan:
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


def stages_apart(receiver: Receiver, variables: Variables) -> contextlib.AbstractContextManager[None]:
    """A context in which stages are called by one row.

    Args:
        receiver: what takes their rows' gradients.
        variables: the shards of which they are gradients, and the indices of their leaves, by id.
    """
    return replaced(way, call=functools.partial(_called, receiver, variables))


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
    pairs, wholes = zip(signature.sources, signature.nodes(given), strict=True), signature.wholes
    nodes = [wholes[at[0]].having(x) if at[0] in wholes else x for at, x in pairs]
    plan = RowsPlan(
        [mapped[at[0]] for at in signature.sources], _keys(signature, leaves, receiver, variables), receiver
    )
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
    for _, x in variables.values():
        x.requires_grad_(False)
    try:
        with replaced(way, call=None), replaced(now, mode=None), autograd.saved_tensors_hooks_enabled():
            yield
    finally:
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
        def function(args: Any, kwargs: Any, anchor: Tensor, plan: RowsPlan) -> Any:
            return _run(signature, args, kwargs, anchor, plan)

        signature.apart = made(signature.name, function, signature.options, signature.computes)
    return signature.apart


def _run(signature: Signature, args: Any, kwargs: Any, anchor: Tensor, plan: RowsPlan) -> Any:
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
    task = FunctionCall(call, leaves, mapped, keys, anchor, plan.receiver, plan.tickets)
    result, which = ExecutionMode.of(signature.code, 2, bounded=True).run(task)
    return result, tuple("shared" if yes is None else "rows" if yes else "other" for yes in which)
