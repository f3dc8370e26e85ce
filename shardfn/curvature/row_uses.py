"""Uses of parameters by rows, from which per-row gradients are assembled.

Inside a function whose rows are apart, tensors that are computed from parameters alone, such as a transposed weight,
are whole, and have a graph of their own that leads to the parameters. An op that takes one of them and a row uses it.
Each use hands over, in backward, every row's gradient with respect to that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import autograd, functorch
from shardfn.curvature.row_gradients import (
    Dense,
    ExampleGradient,
    ParameterView,
    Several,
    Used,
    everywhere,
    row_slices,
    squares,
    sum_of_uses,
)

_VIEWS = {  # nodes of autograd through which a norm passes as it is
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0", "SelectBackward0",
    "ReshapeAliasBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0", "AliasBackward0",
    "DiagonalBackward0", "NarrowBackward0",
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """The identity of a parameter in all runs.

    Attributes:
        leaf: index of the leaf that it is or is a part of, among those that have a gradient.
        number: its index in a flat shard.
    """

    leaf: int
    number: int = 0


class Undecided(RuntimeError):
    """Error for a use of parameters that rules do not follow."""


class Receiver:
    """Base class for consumers of per-row gradients, one parameter after another, during backward.

    Attributes:
        rows: number of rows.
        calls: how many calls of stages use a shard, by the index of its leaf.
        kept: uses of parameters of several calls, by parameter: number of elements, and the uses.
        eps: relative rounding of the coarsest gradients that were met.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows, self.eps = rows, torch.finfo(dtype).eps
        self.calls: dict[int, int] = {}
        self.kept: dict[Key, tuple[int, list[Used]]] = {}

    def add_uses(self, key: Key, uses: Sequence[Used] | None) -> None:
        """Called with the uses of a parameter in one call; None if its gradient has no factors."""

    def add_gradients(self, key: Key, numel: int, rows: slice, uses: Sequence[Used]) -> None:
        """Consumes the final gradients of some rows with respect to a parameter, a sum of uses."""
        raise NotImplementedError

    def finish_stage(self, keys: Sequence[Key]) -> None:
        """Called after the backward of a stage with these parameters, in one order on all ranks."""

    def keep(self, key: Key, numel: int, rows: slice, uses: Sequence[Used]) -> None:
        """Keeps uses of a parameter that other calls use too."""
        kept_uses = self.kept.setdefault(key, (numel, []))[1]
        if rows == slice(0, self.rows):
            kept_uses += uses
            return
        place = ParameterView((numel,), (1,), 0)
        if not kept_uses or not (isinstance(kept_uses[0][0], Dense) and kept_uses[0][1] == place):
            values = uses[0][0].part(slice(0, 1))
            kept_uses.insert(0, (Dense(values.new_zeros((self.rows, numel))), place))
        dense = kept_uses[0][0]
        assert isinstance(dense, Dense), "it was just made"
        dense.values[rows] += sum_of_uses(numel, uses, slice(None))

    def finish(self) -> None:
        """Takes the kept uses."""
        for key, (numel, uses) in self.kept.items():
            self.add_gradients(key, numel, slice(0, self.rows), uses)
        self.kept.clear()


class SquaredNorms(Receiver):
    """Squared gradient norms of this rank's rows, accumulated during backward.

    Attributes:
        cut: the axes that shard parameters, of which this rank then has only a part of each row's gradient.
        squares: by these axes, `[rows]`; `()` for unsharded parameters.
    """

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device, cut: Mapping[Key, tuple[str, ...]]) -> None:
        super().__init__(rows, dtype)
        self.cut = cut
        self.squares = {axes: torch.zeros(rows, dtype=dtype, device=device) for axes in sorted({(), *cut.values()})}

    def add_gradients(self, key: Key, numel: int, rows: slice, uses: Sequence[Used]) -> None:
        """Adds to the squares of some rows."""
        sums = self.squares[self.cut.get(key, ())]
        sums[rows] += squares(numel, uses).to(sums.dtype)


class Ticket:
    """A tensor that a stage computed from parameters alone, and returned.

    Attributes:
        taken: how the uses outside of the stage are taken from where they were handed over.
    """

    def __init__(self) -> None:
        self.taken: Callable[[], list[Used]] = list


class RunParameter:
    """A parameter in one run of a function.

    Attributes:
        leaf: its tensor, a leaf of autograd that nothing outside of the run reaches; None once that is not needed.
        key: what identifies it between runs; None if a stage returned it.
        source: the result of the stage, if one returned it.
        awaited: number of its uses that have not handed over anything.
        uses: those that have.
        every: all of its uses, while the function runs.
        simple: whether all are views of it.
    """

    __slots__ = ("awaited", "every", "key", "leaf", "shape", "simple", "source", "uses")

    def __init__(self, leaf: Tensor, key: Key | None, source: Tensor | None = None) -> None:
        self.leaf: Tensor | None = leaf
        self.shape, self.key, self.source = leaf.shape, key, source
        self.awaited, self.simple = 0, True
        self.uses: list[TensorUse] = []
        self.every: list[TensorUse] = []


class TensorUse:
    """One use of a tensor that is computed from parameters alone.

    Attributes:
        tensor: that tensor, with its graph; None once it is not needed.
        order: the order of its dimensions in `form`.
        parameters: those that it is computed from.
        place: where its elements, in that order, are in the only parameter; None if it is no view of one.
        form: every row's gradient, once it is handed over.
    """

    __slots__ = ("form", "order", "parameters", "place", "tensor")

    def __init__(self, tensor: Tensor, order: Sequence[int], parameters: Sequence[RunParameter]) -> None:
        self.tensor: Tensor | None = tensor
        self.order, self.parameters = tuple(order), parameters
        self.place = _place(self.order, tensor, parameters)
        self.form: ExampleGradient | None = None

    def part(self, rows: slice, parameter: RunParameter) -> Tensor:
        """The gradients of some rows with respect to a parameter, `[rows, *shape]`."""
        assert self.form is not None, "it was handed over"
        assert parameter.leaf is not None, "only of views it is not needed"
        tensor, leaf = self.tensor, parameter.leaf
        inverse_order = sorted(range(len(self.order)), key=self.order.__getitem__)
        gradients = self.form.part(rows).permute(0, *(i + 1 for i in inverse_order))
        if leaf is tensor:
            return gradients

        def pull(g: Tensor) -> Tensor:
            gradient = torch.autograd.grad(tensor, leaf, g, retain_graph=True, allow_unused=True)[0]  # type: ignore[arg-type]
            return torch.zeros_like(leaf) if gradient is None else gradient

        try:
            with functorch.mapping(len(gradients)) as level:
                pulled = pull(functorch.as_row(gradients, level))
                with functorch.below():
                    return functorch.rows_of(pulled)
        except (RuntimeError, NotImplementedError):  # a Function of the program's own, that cannot be mapped
            return torch.stack([pull(g) for g in gradients])


def _place(order: Sequence[int], tensor: Tensor, parameters: Sequence[RunParameter]) -> ParameterView | None:
    leaf = parameters[0].leaf
    assert leaf is not None, "the function runs"
    if len(parameters) > 1 or tensor.dtype != leaf.dtype or tensor._backward_hooks or not leaf.is_contiguous():
        return None
    node, names = tensor.grad_fn, set()
    while node is not None and len(node.next_functions) == 1:
        names.add(node.name())
        node = node.next_functions[0][0]
    if names == {"CloneBackward0"} and tensor.shape == leaf.shape:
        ordered = leaf.detach().permute(tuple(order))
        return ParameterView(tuple(ordered.shape), ordered.stride(), 0)
    if not names <= _VIEWS or autograd.storage_of(tensor) != autograd.storage_of(leaf):
        return None
    ordered = tensor.detach().permute(tuple(order))
    place = ParameterView(tuple(ordered.shape), ordered.stride(), int(ordered.storage_offset() - leaf.storage_offset()))
    return place if place.once else None


class UseCollector:
    """The uses in one run of a function on some of the rows."""

    def __init__(self, receiver: Receiver, rows: slice) -> None:
        self.receiver, self.rows = receiver, rows
        self.parameters: dict[int, RunParameter] = {}
        self.ended: list[RunParameter] = []

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.rows.stop - self.rows.start

    def parameter(self, x: Tensor, key: Key) -> Tensor:
        """Registers a parameter of the run, and returns its leaf for the function."""
        leaf = x.detach().requires_grad_()
        self.parameters[id(leaf)] = RunParameter(leaf, key)
        return leaf

    def returned(self, source: Tensor, ticket: Ticket) -> Tensor:
        """Registers a stage's result, and returns its leaf for the function."""
        leaf = source.detach().requires_grad_()
        parameter = self.parameters[id(leaf)] = RunParameter(leaf, None, source)

        def take_uses() -> list[Used]:
            uses, parameter.uses = parameter.uses, []
            return self._used(parameter, uses, slice(0, self.count)) if uses else []

        ticket.taken = take_uses
        return leaf

    def use(self, tensor: Tensor, order: Sequence[int] | None = None) -> TensorUse | None:
        """Registers a use; None if the tensor depends on no parameter of the run.

        Raises:
            Undecided: it depends on others too.
        """
        leaves = {id(leaf) for leaf in autograd.leaves_of([tensor])}
        if leaves.isdisjoint(self.parameters):
            return None
        if not leaves <= self.parameters.keys() or any(self.parameters[i].leaf._backward_hooks for i in leaves):  # type: ignore[union-attr]
            raise Undecided("a tensor that is computed from parameters and others that need a gradient")
        use = TensorUse(
            tensor, range(tensor.ndim) if order is None else order, [self.parameters[i] for i in sorted(leaves)]
        )
        for parameter in use.parameters:
            parameter.awaited += 1
            parameter.every.append(use)
            parameter.simple = parameter.simple and use.place is not None
        return use

    def end(self) -> None:
        """Ends the run, and releases the parameters of which it used only views."""
        for leaf_id, parameter in list(self.parameters.items()):
            if parameter.simple and parameter.source is None:
                self.ended.append(self.parameters.pop(leaf_id))
                parameter.leaf = None
                for use in parameter.every:
                    use.tensor = None
            parameter.every.clear()

    def expanded(self, tensor: Tensor, anchor: Tensor, use: TensorUse) -> Tensor:
        """Returns a tensor once for each row, `[rows, *shape]`."""
        rows = tensor.detach().expand(self.count, *tensor.shape)
        return Met.apply(rows, anchor, lambda g: self.hand_over(use, Dense(g), g.dtype))  # type: ignore[no-untyped-call]

    def exported(self, tensor: Tensor, anchor: Tensor, use: TensorUse, ticket: Ticket) -> Tensor:
        """Returns a stage's result, whose backward collects all uses outside of the stage."""

        def hand_over(g: Tensor) -> None:
            if uses := ticket.taken():
                self.hand_over(use, Several(tuple(uses), tuple(g.shape)), g.dtype)

        return Met.apply(tensor.detach(), anchor, hand_over)  # type: ignore[no-untyped-call]

    def hand_over(self, use: TensorUse, form: ExampleGradient, dtype: torch.dtype) -> None:
        """Stores the gradients of a use, computed in this dtype; finishes parameters without pending uses."""
        use.form = form
        self.receiver.eps = max(self.receiver.eps, torch.finfo(dtype).eps)
        for parameter in use.parameters:
            parameter.awaited -= 1
            parameter.uses.append(use)
            if parameter.awaited == 0 and parameter.key is not None:
                self._finish(parameter, parameter.key)

    def finish(self) -> None:
        """Finishes parameters with uses that backward does not reach."""
        for parameter in (*self.ended, *self.parameters.values()):
            if parameter.uses and parameter.key is not None:
                self._finish(parameter, parameter.key)
        self.parameters.clear()
        self.ended.clear()

    def _finish(self, parameter: RunParameter, key: Key) -> None:
        uses, parameter.uses = parameter.uses, []
        numel, all_rows = parameter.shape.numel(), slice(0, self.count)
        self.receiver.add_uses(key, self._used(parameter, uses, all_rows) if parameter.simple else None)
        if self.receiver.calls.get(key.leaf, 1) > 1:
            self.receiver.keep(key, numel, self.rows, self._used(parameter, uses, all_rows))
            return
        for part in [all_rows] if parameter.simple else row_slices(self.count, numel):
            rows = slice(self.rows.start + part.start, self.rows.start + part.stop)
            self.receiver.add_gradients(key, numel, rows, self._used(parameter, uses, part))

    def _used(self, parameter: RunParameter, uses: Sequence[TensorUse], part: slice) -> list[Used]:
        """The uses of a parameter; of some rows if they are not simple."""
        if parameter.simple:
            return [(use.form, use.place) for use in uses if use.form is not None and use.place is not None]
        gradients = [use.part(part, parameter) for use in uses]
        total = gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)
        return [(Dense(total), everywhere(parameter.shape))]


# --- nodes of autograd; each takes the scalar `anchor`, for which alone a gradient is asked ---


class Begin(torch.autograd.Function):
    """Anchor of a run or stage, whose backward follows that of all uses; calls `end`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, end: Callable[[], object]) -> Tensor:
        """The anchor."""
        ctx.end = end
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """Ends the run."""
        ctx.end()
        return g, None


class Link(torch.autograd.Function):
    """Anchor of a use of stages' results, so that the stages' backward follows the use's."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *sources: Tensor) -> Tensor:
        """The anchor."""
        ctx.sources = [(x.shape, x.dtype, x.device) for x in sources]
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        """Zeros for the stages."""
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.sources]
        return (g, *zeros)


class Met(torch.autograd.Function):
    """A tensor whose gradient is passed to a function."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, consume: Callable[[Tensor], object]) -> Tensor:
        """The tensor."""
        ctx.anchor, ctx.consume = anchor, consume
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Hands over the gradient."""
        ctx.consume(g)
        return None, torch.zeros_like(ctx.anchor), None


class Shared(torch.autograd.Function):
    """An op of rows and one tensor that all rows share.

    `forward(x, tensor)` computes it, `back(g, tensor)` gives the gradient of x, and `form(x, g)` that of the tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tensor: Tensor, anchor: Tensor, collector: UseCollector, use: TensorUse, op: Any
    ) -> Tensor:
        """The result of the op."""
        ctx.collector, ctx.use, ctx.op, ctx.anchor = collector, use, op, anchor
        ctx.save_for_backward(x, tensor)
        y: Tensor = op.forward(x, tensor)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Hands over the gradients of rows with respect to the tensor."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "per_example: a gradient that is differentiated again: write torch.func.grad inside a stage"
            )
        x, tensor = ctx.saved_tensors
        ctx.collector.hand_over(ctx.use, ctx.op.form(x.detach(), g), g.dtype)
        back = ctx.op.back(x, g, tensor) if ctx.needs_input_grad[0] else None
        return back, None, torch.zeros_like(ctx.anchor), None, None, None
