"""A dispatch mode that records what a function does with tensors: forward, backward and inside every transform.

It stands below autograd and torch.func, so it sees plain tensors and the ops that really run. Anything that bypasses
ops, such as a stage's engine filling memory, is reported to it by calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.check import callsites, ops
from shardfn.check.bits import digest_of
from shardfn.check.callsites import active, thread
from shardfn.check.ops import facts_of
from shardfn.check.trace import (
    Claimed,
    CollectiveCall,
    Counted,
    Effect,
    Gradient,
    Mask,
    Node,
    Ordered,
    PartialGradient,
    Summed,
    Trace,
    Used,
    Variable,
    reached,
    union,
)
from shardfn.check.values import Values, like_of
from shardfn.compat import autograd, dispatch, functorch, modes
from shardfn.compat.replacing import replaced

MOST = 2**16
"""Number of nodes after which a record ends."""
COMPARED = 2**10
"""Number of collectives of a call that ranks compare in each group."""


def current() -> TraceRecorder | None:
    """Returns the recorder of the checked call that this thread works for; None if there is none or it is over."""
    recorder = outer()
    return recorder if recorder is None or not recorder.over() else None


def outer() -> TraceRecorder | None:
    """Like `current`, even when the record is over here: it may go on on another rank.

    None while torch traces ops into a graph: what the graph does is recorded when it runs.
    """
    if not active[0] or thread.paused or dispatch.traced():
        return None
    return thread.recorder or dispatch.running(TraceRecorder)


def comparing(group: str) -> TraceRecorder | None:
    """Returns the recorder of the checked call if the next collective in a group is to be compared, else None.

    That depends only on the number of collectives in the group, which is equal on all its ranks. How many ops a rank
    has recorded, and so when its record ends, may differ, and no rank may wait for another because of it.
    """
    recorder = outer()
    if recorder is None and active[0] and not thread.paused and autograd.autograd_thread() and len(_all) == 1:
        (recorder,) = _all  # the mode may have left, but the call goes on
    return recorder if recorder is not None and recorder.compares(group) else None


_all: set[TraceRecorder] = set()


class TraceRecorder(modes.Watching):
    """Records the ops that run inside.

    Attributes:
        trace: the record.
        values: the node of each tensor's current value.
        name: the name of the call, for messages.
        axes_of: names of the axes along which a process group runs.
    """

    def __init__(self, name: str, axes: dict[str, int], groups: Callable[[str], Iterable[str]]) -> None:
        super().__init__()
        self.trace = Trace(name, axes)
        self.values = Values(self.trace)
        self.name, self.axes_of = name, groups
        self.stated: list[tuple[str, float]] = []  # numbers that must be equal on all ranks, and what they are
        self._parameters: dict[Any, int] = {}
        self._before: TraceRecorder | None = None
        self._compared: Counter[str] = Counter()
        self._end: list[int] = []  # lengths of the record's lists when it ended
        self._looks = False

    def __enter__(self) -> TraceRecorder:
        self._before, thread.recorder = thread.recorder, self
        active[0] += 1
        _all.add(self)
        super().__enter__()
        self._looks = True
        return self

    def __exit__(self, *error: Any) -> None:
        if self._looks:
            super().__exit__(*error)
        active[0] -= 1
        _all.discard(self)
        thread.recorder = self._before
        self.values.clear_memory()

    # --- the end of a long record ---

    def over(self) -> bool:
        """Whether the record has ended. The mode then leaves as soon as it can."""
        if not self._end:
            if len(self.trace.nodes) < MOST:
                return False
            self._end = self.values.lengths()
        innermost = self._looks and thread.recorder is self and modes.innermost() is self
        # Not in a backward pass or a transform, which restores the modes that it found.
        if innermost and not (autograd.inside_backward() or functorch.inside_transform()):
            super().__exit__()
            self._looks = False
        return True

    def ended(self) -> bool:
        """Drops the entries after the end of the record; returns whether it ended early."""
        if self._end:
            self.values.cut(self._end)
        return bool(self._end)

    def compares(self, group: str) -> bool:
        """Whether the next collective in a group is compared; counts it."""
        self._compared[group] += 1
        return self._compared[group] <= COMPARED

    # --- ops ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._end or self.over():
            return func(*args, **kwargs)
        if dispatch.traced():  # fake tensors, such as DTensor's, which the mode below handles
            return func(*args, **kwargs)
        if any(kind is not Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented
        namespace = getattr(func, "namespace", "")
        if thread.paused or namespace in ("prim", "prims", "profiler") or namespace.startswith("shardfn_"):
            with replaced(thread, recorder=self):  # backward of CUDA tensors runs on autograd's own threads
                return func(*args, **kwargs)
        if namespace.startswith(("c10d", "_c10d")):
            return ops.communicated(self.values, func, args, kwargs)
        if callsites.caller() == "engine":
            return func(*args, **kwargs)
        return ops.op(self.values, func, facts_of(func), args, kwargs)

    # --- reports of what ops do not show ---

    def input(self, x: Tensor, path: str, allowed: Mask | None) -> int:
        """Adds an argument, which may vary along the axes `allowed`; None: along those where its bits differ."""
        x = functorch.unwrapped(x)
        effect: Effect = "exactly" if allowed is not None else "union"
        node = Node("input", (), None, effect, allowed or 0, "input", records=True, like=like_of(x), about=path)
        node_id = self.values.add(node)
        if ops.differentiable(x):
            node.variable = 1 << len(self.trace.variables)
            self.trace.variables.append(Variable(path, self.trace.everywhere & ~(allowed or 0), node_id))
        self.values.keep(x, node_id)
        return node_id

    def number(self, x: complex, path: str) -> int:
        """Adds a number that the function returned, which ranks compare."""
        node_id = self.values.add(Node("number", (), None, root="constant", about=path))
        self.values.note(self.values.evidence, node_id, None, digest_of(path.encode()), 3 if x != x else hash(x))
        return node_id

    def part_of(self, shard_id: int, allowed: Mask) -> int:
        """Adds one parameter in a flat shard, which ranks compare on its own."""
        return self.values.add(Node("input", (shard_id,), None, "exactly", allowed, "input"))

    def record_collective(self, name: str, group: str, x: Tensor, y: Tensor) -> None:
        """Records that a collective along the axes of a group made `y` from `x`."""
        takes, gives = COLLECTIVES[name][0], COLLECTIVES[name][1]
        axes = self.trace.mask(self.axes_of(group))
        effect: Effect = "plus" if gives == "V" else "minus"
        if name in ("replicated", "verified"):
            effect = "union"
        backward = autograd.inside_backward()
        parent = self.values.node_of(x)
        if x.requires_grad and not backward and not self.values.follows(x):  # the result of a custom Function
            self.trace.unfollowed = True
        node_id = self.values.add(
            Node(name, (parent,), self.values.site(), effect, axes, backward=backward,
                 records=torch.is_grad_enabled() and ops.differentiable(y), like=like_of(y), about=takes)
        )  # fmt: skip
        self.values.keep(y, node_id)

    def gathered(self, x: Tensor, names: Iterable[str], y: Tensor) -> None:
        """Records that `y` was filled, by no op, from all ranks along these axes; `x` is the local part."""
        x, y = functorch.unwrapped(x), functorch.unwrapped(y)
        parent, axes = self.values.node_of(x), self.trace.mask(names)
        node_id = self.values.add(
            Node("all_gather_invariant", (parent,), self.values.site(), "minus", axes, like=like_of(y))
        )
        self.values.keep(y, node_id, written=True, full=True)

    def parameters(
        self,
        stage: Any,
        paths: Sequence[str],
        shard: Tensor,
        full_params: Sequence[Tensor],
        summed: Mask,
        cut: Sequence[Mask],
    ) -> None:
        """Adds the full parameters of a flat shard, as a stage's function receives them.

        Their gradients are summed along `summed`; each is sharded over its axes in `cut`, along which ranks differ.
        """
        parent = self.values.node_of(functorch.unwrapped(shard))
        varied = self._varied(parent)
        for index, (path, x, sharded_axes) in enumerate(zip(paths, full_params, cut, strict=True)):
            axes = summed | sharded_axes | varied
            for tangent in functorch.tangents(x):
                self.declared(tangent, axes, [tangent], "tangent")
            x = functorch.unwrapped(x)
            node = Node(
                "parameter", (parent,), self.values.site(), "exactly", axes, "parameter", records=True,
                like=like_of(x), about=path,
            )  # fmt: skip
            if ops.differentiable(x):
                node.variable = 1 << len(self.trace.variables)
                self.trace.variables.append(Variable(path, self.trace.everywhere & ~axes, len(self.trace.nodes)))
            self._parameters[(stage, index)] = node_id = self.values.add(node)
            self.trace.cut[node_id] = sharded_axes
            self.values.keep(x, node_id)

    def _varied(self, shard: int) -> Mask:
        """Returns the axes along which `pvary` made a flat shard vary."""
        nodes = self.trace.nodes

        def followed_parents(child: int) -> list[int]:
            return [p for p in nodes[child].parents if nodes[p].like == nodes[shard].like and not nodes[child].backward]

        path_nodes = (nodes[node_id] for node_id in reached([shard], followed_parents))
        return union(node.axes for node in path_nodes if node.op == "pvary" and not node.backward)

    def part(self, stage: Any, number: int, gradient: Tensor) -> None:
        """Records a stage's gradient of one of its parameters, just before it is summed over ranks."""
        variable = self._parameters.get((stage, number))
        if variable is not None:
            node = self.values.node_of(functorch.unwrapped(gradient))
            self.trace.events.append(PartialGradient(variable, node, self.trace.nodes[variable].axes))

    def summed(self, axes: Mask) -> None:
        """Records that a stage sums gradients along these axes."""
        self.trace.events.append(Summed(len(self.trace.nodes), axes))

    def declared(self, x: Tensor, axes: Mask, sources: Iterable[Tensor], op: str) -> None:
        """Adds a value made by the library, which knows along which axes it varies."""
        x = functorch.unwrapped(x)
        parents = tuple(self.values.node_of(functorch.unwrapped(y)) for y in sources)
        backward = autograd.inside_backward()
        node_id = self.values.add(
            Node(op, parents, self.values.site(), "exactly", axes, backward=backward, like=like_of(x))
        )
        self.values.keep(x, node_id)

    def called(
        self, name: str, names: Iterable[str], x: Tensor, number: float | None, axis: Any, pieces: Iterable[str] = ()
    ) -> None:
        """Records a collective call by the function; `pieces` are the axes of a flat shard argument."""
        caller, backward = callsites.who_calls(), autograd.inside_backward()
        if caller == "library" or (backward and caller != "user"):
            return  # the library's own calls are not judged
        plain = functorch.unwrapped(x)
        node = self.values.node_of(plain)
        if name == "psum" and caller == "user" and number is None and not backward:
            self.values.note(
                self.values.watched, node, self.values.site(), 4, plain
            )  # it may vary by the library's numbers
        axes, cut, site = self.trace.mask(names), self.trace.mask(pieces), self.values.site()
        self.trace.events.append(CollectiveCall(name, axes, node, site, number, axis, caller == "user", backward, cut))

    def differentiated(self, loss: Tensor, begin: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Records the gradients that `value_and_grad` returns."""
        end = len(self.trace.nodes)
        gradients, inner = [], False
        for variable, gradient in pairs:
            inner = inner or variable.requires_grad or functorch.wrapped(variable)
            plain = functorch.unwrapped(gradient)
            variable_id = self.values.node_of(functorch.unwrapped(variable))
            gradient_id = self.values.add(
                Node("gradient", (self.values.node_of(plain),), self.values.site(), backward=True,
                     like=like_of(plain))
            )  # fmt: skip
            self.values.keep(plain, gradient_id)
            gradients.append((variable_id, gradient_id))
        plain, site = functorch.unwrapped(loss), self.values.site()
        node = self.values.node_of(plain)
        self.values.note(self.values.watched, node, site, 1, plain)
        pushed = functorch.inside_forward_mode()
        self.trace.events.append(Gradient(node, begin, end, gradients, self.values.site(), inner, pushed))

    def counted(self, total: Tensor, count: Tensor | float) -> None:
        """Records a micro-batch's total and the count by which `accumulate` divides it."""
        node = self.values.node_of(functorch.unwrapped(total))
        by = self.values.node_of(functorch.unwrapped(count)) if isinstance(count, Tensor) else -1
        self.trace.events.append(Counted(node, by, None if isinstance(count, Tensor) else count))

    def used(self, pairs: Iterable[tuple[Tensor, Tensor, Iterable[str] | None]]) -> None:
        """Records the parameters and gradients of an optimizer's step, with the axes of flat shards."""
        for parameter, gradient, cut in pairs:
            nodes = [self.values.node_of(functorch.unwrapped(x)) for x in (parameter, gradient)]
            axes = None if cut is None else self.trace.mask(cut)
            self.trace.events.append(Used(nodes[0], nodes[1], self.values.site(), axes))

    def claimed(self, function: str, side: str, path: str, x: Tensor, allowed: Mask) -> None:
        """Records a value that an inner mapped function takes or returns, which may vary along these axes alone."""
        node = self.values.node_of(functorch.unwrapped(x))
        self.trace.events.append(Claimed(function, side, path, node, allowed, self.values.site()))

    def ordered(self, name: str, names: Iterable[str], balanced: bool) -> None:
        """Records the order in which a function of `parallel` shards a sequence over these axes."""
        axes, num_nodes = self.trace.mask(names), len(self.trace.nodes)
        self.trace.events.append(Ordered(name, axes, balanced, num_nodes, self.values.site()))

    def same(self, x: Tensor, y: Tensor) -> None:
        """Records that a tensor stands for another one, derivative included."""
        self.values.keep(functorch.unwrapped(x), self.values.node_of(functorch.unwrapped(y)))

    def filled(self, x: Tensor) -> None:
        """Records that something other than an op has written to a tensor."""
        self.values.filled(functorch.unwrapped(x))


COLLECTIVES = {
    "psum": "VI",
    "pmax": "VI",
    "pmin": "VI",
    "pvary": "IV",
    "all_gather": "VV",
    "reduce_scatter": "VV",
    "all_gather_invariant": "VI",
    "local_slice": "IV",
    "ppermute": "VV",
    "all_to_all": "VV",
    "ragged_all_to_all": "VV",
    "replicated": "II",
    "verified": "II",
}
"""What each takes and returns: V for varying, I for invariant."""


def shard_axes(tree: Any) -> dict[int, tuple[str, ...]]:
    """Returns the axes that shard each flat shard in a tree, by the identity of its values."""
    nodes = optree.tree_leaves(tree, is_leaf=lambda node: hasattr(node, "layout") and hasattr(node, "values"))
    return {
        id(node.values): node.layout.placement.axes
        for node in nodes
        if not isinstance(node, Tensor) and hasattr(node, "layout")
    }
