"""Runs a function and its stages under a vmap over rows, and collects per-row gradients.

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
from shardfn.curvature.row_gradients import row_slices
from shardfn.curvature.row_rules import OPENED, RULES, WITHOUT_PARAMETERS
from shardfn.curvature.row_uses import Begin, Key, Link, Receiver, Shared, TensorUse, Ticket, Undecided, UseCollector
from shardfn.quant.packed import is_packed
from shardfn.shards.layout import assemble
from shardfn.stages.signature import Signature
from shardfn.stages.stage import make_stage, way

MOST_EXPANDED = 4  # times the elements of a row that an op takes, which its parameters may have in the general way


class _Now(threading.local):
    mode: RowsMode | None = None


now = _Now()


class RowsMode(TorchFunctionMode):
    """A torch-function mode for rows, and for tensors that depend on parameters alone."""

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
        if now.mode is self and functorch.level() == self.level and func not in _UNINTERCEPTED:
            return self._dispatch(func, args, kwargs)
        return func(*args, **kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
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
        max_elements = MOST_EXPANDED * max(x.numel() for x in rows)
        for x in shared if self.bounded else ():
            if x.numel() > max_elements and row_slices(self.collector.count, x.numel())[1:]:
                raise Undecided(f"{getattr(func, '__name__', func)} of a parameter of {x.numel()} elements")
        all_of = {id(x): self.all_of(x) for x in shared}
        replacements = {key: functorch.as_row(x, self.level) for key, x in all_of.items() if x is not None}
        args, kwargs = _with_replacements((args, kwargs), replacements)
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
        return self._dispatch(function, args, kwargs)

    def call_batched(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Calls a function with all rows at once, `[rows, *]`."""
        with functorch.below():
            y = function(*[functorch.rows_of(x) for x in rows])
        return functorch.as_row(y, self.level)

    def by(self, op: Any, x: Tensor, tensor: Tensor, order: Any) -> Any:
        """Applies `op` to a row and a tensor whose dimensions are taken in this order."""
        use = self.collector.use(tensor, order)
        if use is None:
            return NotImplemented
        detached = tensor.detach().permute(use.order)
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.is_floating_point():
            dtype = torch.get_autocast_dtype(kind)
            x, detached = x.to(dtype), detached.to(dtype)
        apply: Any = Shared.apply
        return self.call_batched(lambda rows: apply(rows, detached, self._anchor(use), self.collector, use, op), x)

    def all_of(self, tensor: Tensor, ticket: Ticket | None = None) -> Tensor | None:
        """Returns a shared tensor for each row, `[rows, *shape]`, or exports it with a ticket.

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


_UNINTERCEPTED = {Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.size, Tensor.dim}  # type: ignore[attr-defined]


def _with_replacements(tree: Any, replacements: dict[int, Tensor]) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)([_with_replacements(x, replacements) for x in tree])
    if isinstance(tree, dict):
        return {key: _with_replacements(x, replacements) for key, x in tree.items()}
    return replacements.get(id(tree), tree)


# --- a function ---

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
    """Execution of a function by rules, with parameters expanded over rows, or row by row.

    Attributes:
        current: index of the mode that was found to work.
        last: index of the last mode that may be tried.
        bounded: whether the function may be called for some rows at a time, to use less memory.
    """

    def __init__(self, last: int, bounded: bool) -> None:
        self.current, self.last, self.bounded = 0, last, bounded

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def for_code(code: Any, last: int, bounded: bool) -> ExecutionMode:
        """Returns the mode of functions with this code, which each step may make again."""
        return ExecutionMode(last, bounded)

    def run(self, task: FunctionCall) -> Result:
        """Runs a function in the first mode that supports it."""
        while True:
            state, tried = torch.get_rng_state(), self.current
            try:
                return _WAYS[tried](task, self.bounded)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if tried >= self.last or not cannot(error):
                    raise
                self.current = max(self.current, tried + 1)  # ranks may be threads
                torch.set_rng_state(state)


def cannot(error: Exception) -> bool:
    """Whether an error means that a mode does not support the function."""
    return isinstance(error, Undecided) or any(sign in str(error) for sign in _SIGNS)


_SIGNS = (
    "vmap", "functorch", "BatchedTensor", "atching rule", "doesn't have storage", "does not require grad",
    "not have a grad_fn", "stack expects each tensor to be equal size",
)  # fmt: skip


def _call_by_rules(task: FunctionCall, bounded: bool) -> Result:
    collector = UseCollector(task.receiver, slice(0, task.receiver.rows))
    pairs = zip(task.leaves, task.keys, strict=True)
    leaves = [x if key is None else collector.parameter(x, key) for x, key in pairs]
    begin = Begin.apply(task.anchor, collector.finish)  # type: ignore[no-untyped-call]
    return _under_vmap(task, leaves, task.mapped, begin, collector, bounded)


def _expanded(task: FunctionCall, bounded: bool) -> Result:
    numel = sum(x.numel() for x, key in zip(task.leaves, task.keys, strict=True) if key is not None)
    results = []
    for rows in row_slices(task.receiver.rows, numel if bounded else 0):
        leaves, mapped, begin, collector = _of_rows(task, rows)
        results.append(_under_vmap(replace(task, tickets=None), leaves, mapped, begin, collector, bounded))
    return _join_results(results, torch.cat)


def _call_one_by_one(task: FunctionCall, bounded: bool) -> Result:
    results: list[Result] = []
    for i in range(task.receiver.rows):
        leaves, mapped, *_ = _of_rows(task, slice(i, i + 1))
        result = task.call([x[0] if is_mapped else x for x, is_mapped in zip(leaves, mapped, strict=True)])
        results.append((result, [isinstance(y, Tensor) for y in optree.tree_leaves(result)]))
    return _join_results(results, torch.stack)


_WAYS = (_call_by_rules, _expanded, _call_one_by_one)


def _of_rows(task: FunctionCall, rows: slice) -> tuple[list[Any], list[bool], Tensor, UseCollector]:
    """Returns the arguments for some rows, with expanded parameters; which are mapped; anchor and collector."""
    collector = UseCollector(task.receiver, rows)
    begin = Begin.apply(task.anchor, collector.finish)  # type: ignore[no-untyped-call]
    leaves = []
    for x, is_mapped, key in zip(task.leaves, task.mapped, task.keys, strict=True):
        if key is not None:
            leaf = collector.parameter(x, key)
            use = collector.use(leaf)
            assert use is not None, "it is a parameter of the run"
            leaves.append(collector.expanded(leaf, begin, use))
        else:
            leaves.append(x[rows] if is_mapped else x)
    mapped = [is_mapped or key is not None for is_mapped, key in zip(task.mapped, task.keys, strict=True)]
    return leaves, mapped, begin, collector


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
        pairs = zip(leaves, mapped, strict=True)
        result = task.call([functorch.as_row(x, level) if is_row else x for x, is_row in pairs])
        ys, tree = optree.tree_flatten(result)
        outputs: list[Any] = []
        which: list[bool | None] = []
        for index, y in enumerate(ys):
            is_row: bool | None = rows.row(y)
            if is_row:
                with functorch.below():
                    y = functorch.rows_of(y)
            elif rows.shared(y):
                ticket = None if tickets is None else tickets.setdefault(index, Ticket())
                shared = rows.all_of(y, ticket)
                y, is_row = (y, False) if shared is None else (shared, True if ticket is None else None)
            which.append(is_row)
            outputs.append(y)
    if any(is_row and len(y) != count for y, is_row in zip(outputs, which, strict=True)):
        raise Undecided("rows of another function")
    reached = {id(x) for x in autograd.leaves_of([y for y in outputs if isinstance(y, Tensor)])}
    if not reached.isdisjoint(collector.parameters):
        raise Undecided("a Function of the program's own")
    collector.end()
    return optree.tree_unflatten(tree, outputs), which


def _no_hooks() -> Any:
    """A context without saved-tensor hooks, which would recompute in backward outside of the vmap."""
    if autograd.saved_tensors_hooks() is not None or not autograd.saved_tensors_hooks_allowed():
        return contextlib.nullcontext()
    return torch.autograd.graph.disable_saved_tensors_hooks(
        "per_example runs this under vmap, where nobody takes what autograd saves: write stage(f, remat=True) in place "
        "of torch.utils.checkpoint, or put it into a stage"
    )


def _join_results(results: Sequence[Result], join: Callable[..., Tensor]) -> Result:
    """Joins the results of several groups of rows."""
    first, which = results[0]
    if len(results) == 1 and join is torch.cat:
        return results[0]
    columns = zip(*(optree.tree_leaves(result) for result, _ in results), strict=True)
    ys = [join(column) if is_row else column[0] for column, is_row in zip(columns, which, strict=True)]
    return optree.tree_unflatten(optree.tree_structure(first), ys), which


# --- stages ---

Variables = Mapping[int, tuple[int, Tensor]]


class RowsPlan:
    """The static arguments of a call; not a pytree node.

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
    return replaced(way, call=functools.partial(_call_stage, receiver, variables))


def _call_stage(receiver: Receiver, variables: Variables, signature: Signature, leaves: list[Any]) -> Any:
    """Calls a stage inside the vmap over rows."""
    mode = now.mode
    if mode is None or functorch.level() != mode.level:
        raise RuntimeError(f"{signature} is called inside a nested transform, in losses of per_example")
    arguments, mapped = list(leaves), [False] * len(leaves)
    shards = set(signature.shards)
    for i, x in enumerate(leaves):
        if i not in shards and isinstance(x, Tensor):
            all_of = None
            if mode.row(x):
                with functorch.below():
                    all_of = functorch.rows_of(x)
            elif mode.shared(x):
                all_of = mode.all_of(x)
            arguments[i], mapped[i] = (x, False) if all_of is None else (all_of, True)
    pairs, wholes = zip(signature.sources, signature.nodes(arguments), strict=True), signature.wholes
    nodes = [wholes[indices[0]].having(x) if indices[0] in wholes else x for indices, x in pairs]
    plan = RowsPlan(
        [mapped[indices[0]] for indices in signature.sources],
        _argument_keys(signature, leaves, receiver, variables),
        receiver,
    )
    args, kwargs = optree.tree_unflatten(signature.outer, nodes)
    with functorch.below(), _normal_stages(variables):
        result, which = _stage(signature)(args, kwargs, mode.anchor, plan)
    ys, tree = optree.tree_flatten(result)
    for i, (y, kind) in enumerate(zip(ys, which, strict=True)):
        if kind == "rows":
            ys[i] = functorch.as_row(y, mode.level)
        elif kind == "shared":
            with functorch.below():
                ys[i] = mode.collector.returned(y, plan.tickets[i])
    return optree.tree_unflatten(tree, ys)


@contextlib.contextmanager
def _normal_stages(variables: Variables) -> Iterator[None]:
    """A context in which stages run normally, and shards need no gradient."""
    for _, x in variables.values():
        x.requires_grad_(False)
    try:
        with replaced(way, call=None), replaced(now, mode=None), autograd.saved_tensors_hooks_enabled():
            yield
    finally:
        for _, x in variables.values():
            x.requires_grad_()


def _argument_keys(
    signature: Signature, leaves: Sequence[Any], receiver: Receiver, variables: Variables
) -> list[list[Key | None] | None]:
    """Returns the keys of parameters among the arguments; counts the calls that use each shard."""
    layouts, shards = iter(signature.layouts), set(signature.shards)
    keys_by_node: list[list[Key | None] | None] = []
    for indices in signature.sources:
        if indices[0] not in shards:
            keys_by_node.append(None)
            continue
        node_layouts, keys = [], []
        for i in indices:
            layout, shard = next(layouts), leaves[i]
            trains = layout.trainable and torch.is_grad_enabled() and shard.requires_grad
            if trains and id(shard) not in variables:
                raise RuntimeError(
                    f"{signature} gets shards that losses of per_example computed from params. Pass the shards of "
                    f"params, and compute inside the stage"
                )
            if trains:
                receiver.calls[variables[id(shard)][0]] = receiver.calls.get(variables[id(shard)][0], 0) + 1
            node_layouts.append(layout)
            entries = range(len(layout.entries))
            keys.append([Key(variables[id(shard)][0], entry) if trains else None for entry in entries])
        tree = assemble(node_layouts, keys)
        flat = optree.tree_leaves(tree, is_leaf=lambda x: x is None or is_packed(x))
        keys_by_node.append([key if isinstance(key, Key) else None for key in flat])
    return keys_by_node


def _stage(signature: Signature) -> Any:
    """Returns the stage's per-row variant: `(args, kwargs, anchor, plan) -> (result, which)`."""
    if signature.apart is None:

        @functools.wraps(signature.function)
        def function(args: Any, kwargs: Any, anchor: Tensor, plan: RowsPlan) -> Any:
            return _run_stage(signature, args, kwargs, anchor, plan)

        signature.apart = make_stage(signature.name, function, signature.options, signature.computes)
    return signature.apart


def _run_stage(signature: Signature, args: Any, kwargs: Any, anchor: Tensor, plan: RowsPlan) -> Any:
    leaves: list[Any] = []
    mapped: list[bool] = []
    keys: list[Key | None] = []
    trees: list[tuple[int, Any]] = []
    nodes = signature.outer.flatten_up_to((args, kwargs))
    for node, is_row, node_keys in zip(nodes, plan.mapped, plan.keys, strict=True):
        parts, tree = ([node], None) if node_keys is None else optree.tree_flatten(node)
        leaves += parts
        mapped += [is_row] * len(parts)
        keys += [None] if node_keys is None else node_keys
        trees.append((len(parts), tree))

    def call(leaves: list[Any]) -> Any:
        nodes, start = [], 0
        for n, tree in trees:
            nodes.append(leaves[start] if tree is None else optree.tree_unflatten(tree, leaves[start : start + n]))
            start += n
        args, kwargs = optree.tree_unflatten(signature.outer, nodes)
        return signature.function(*args, **kwargs)

    trained = [key for key in keys if key is not None]
    anchor = Begin.apply(anchor, functools.partial(plan.receiver.finish_stage, trained))  # type: ignore[no-untyped-call]
    task = FunctionCall(call, leaves, mapped, keys, anchor, plan.receiver, plan.tickets)
    result, which = ExecutionMode.for_code(signature.code, 2, bounded=True).run(task)
    return result, tuple("shared" if is_row is None else "rows" if is_row else "other" for is_row in which)
