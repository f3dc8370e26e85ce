"""One call of a stage: its function run on gathered parameters, under an autograd of its own.

The graph that autograd makes here belongs to the call alone. What leaves it is detached, and its gradients are asked
for when the call's turn comes in backward; or it is made then, by running the function again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardfn.collectives.ledger import unscheduled
from shardfn.compat import autograd, functorch
from shardfn.mesh.axes import known_axes
from shardfn.mesh.scope import current_mesh, scope
from shardfn.stages.decoding import Decoding
from shardfn.stages.refusals import RefuseWrapped, enter, other_numbers, other_result, refuse_mixed, running, writes
from shardfn.stages.replay import TENSOR, Form, RngAndAutocast, Sample, entered, form_of
from shardfn.stages.signature import Signature, cast, cast_all
from shardfn.stages.tape import StageRun, Tape
from shardfn.transforms.step import current_step, owned

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardfn.stages.activation_offload import Offloading


@dataclass
class Residuals:
    """What one run of a stage's function leaves for its gradient.

    Attributes:
        parameters: each shard's, leaves of the graph.
        inputs: the other tensors, leaves of the graph.
        outputs: its ends; those that have let go of their numbers are edges, and None where there is no gradient.
        decoding: of the parameters in few bits, which the graph reads decoded.
    """

    parameters: list[list[Tensor]]
    inputs: list[Tensor]
    outputs: list[Any]
    decoding: Decoding | None = None

    def let_go(self) -> None:
        """Keeps where the graph ends, and not the numbers there."""
        self.outputs = [get_gradient_edge(y) if y.requires_grad else None for y in self.outputs]


class _Argument(torch.autograd.Function):
    """An argument whose place at the beginning of the graph another tensor takes: the graph holds that, and not it."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        return cotangents[0], None


class Call:
    """What the backward of a call needs besides tensors. Not a pytree node, so transforms pass it through.

    Attributes:
        leaves: the arguments that are not tensors.
        mesh: of the shards, which is alive until the call's backward has run.
        at: where among them the tensors are that are not shards.
        needs: which of shards and those tensors are differentiated.
        step: the evaluation of gradients that it is part of.
        collected: shards whose gradient that step takes from the stage, None for the others.
        tape: that it is on; None if no backward follows.
        run: its place there.
        residuals: of the last run, until a backward takes them.
        surroundings: the random numbers and autocast that it began with.
        contexts: for the first run and the next, where a policy says what to keep.
        transformed: whether a torch.func transform is running outside.
        reverse: whether all that run only take gradients.
        differentiable: which outputs may have a gradient.
        form: of what the first run returned.
        sample: of the numbers in it, where a later run is compared with it.
    """

    __slots__ = (  # noqa: RUF023  # in the order in which they come to be
        "signature", "mesh", "leaves", "at", "needs", "step", "collected", "tape", "run", "residuals",
        "surroundings", "contexts", "transformed", "reverse", "differentiable", "form",
        "sample",
        "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        signature: Signature,
        mesh: DeviceMesh,
        device: torch.device,
        leaves: list[Any],
        at: list[int],
        needs: list[bool],
    ) -> None:
        self.signature, self.mesh, self.leaves, self.at, self.needs = signature, mesh, leaves, at, needs
        self.step = current_step()
        self.collected: list[Tensor | None] = []
        self.tape: Tape | None = None
        self.run: StageRun | None = None
        self.residuals: Residuals | None = None
        generators = [x for x in (*leaves, *signature.closed_over()) if type(x) is torch.Generator]
        self.surroundings = RngAndAutocast(device, generators)
        remat = signature.options.remat
        self.contexts: list[Any] = list(remat()) if callable(remat) and any(needs) else []
        self.transformed = functorch.inside_transform()
        self.reverse = self.transformed and not functorch.inside_batching_or_forward()
        self.differentiable: list[bool] = []
        self.form: Form | None = None
        self.sample: Sample | None = None

    def rebuilt(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """The function's result with these tensors."""
        tree, leaves, _, order = self._known()
        tensors = iter([outputs[k] if k >= 0 else inputs[~k] for k in order])
        return optree.tree_unflatten(tree, [next(tensors) if leaf is TENSOR else leaf for leaf in leaves])

    def outputs(self, result: Any, inputs: Sequence[Tensor], transformed: bool = False) -> list[Tensor]:
        """What the call itself gives of the tensors in its result: each once, and none that came in as it is.

        Args:
            result: what the function returned.
            inputs: the tensors that it was given.
            transformed: whether these may belong to a transform.

        Raises:
            RuntimeError: an earlier run returned something else.
        """
        form, tensors = form_of(result, inputs)
        if self.form is None:
            self.form = form
        elif not self.form.same(form, transformed):
            raise RuntimeError(other_result(self.signature, str(self.form), str(form)))
        elif self.sample is not None and (off := self.sample.off(tensors)) is not None:
            raise RuntimeError(other_numbers(self.signature, off))
        own = dict(zip(self.form.order, tensors, strict=True))
        return [own[k] for k in sorted(own) if k >= 0]

    def remember(self, outputs: Sequence[Tensor]) -> None:
        """Keeps some of the numbers that the first run returned, by which it is seen whether another returns them."""
        assert self.form is not None, "the function has run"
        given = iter(outputs)
        numbers = {k: next(given) for k in sorted(set(self.form.order)) if k >= 0}
        self.sample = Sample([numbers.get(k) for k in self.form.order])

    def refuse_constant(self, outputs: Sequence[Tensor]) -> None:
        """Raises RuntimeError if outputs of another run have a gradient where the first run's had none, or none."""
        for i, (y, moves) in enumerate(zip(outputs, self.differentiable, strict=True)):
            if y.requires_grad is not moves:
                first, now = ("with a gradient", "without") if moves else ("without a gradient", "with one")
                raise RuntimeError(other_result(self.signature, f"output {i} {first}", now))

    def leaves_returned(self) -> list[Any]:
        """What is not a tensor in the result."""
        return self._known().leaves

    def _known(self) -> Form:
        assert self.form is not None, "the function has run"
        return self.form


def evaluate(
    call: Call,
    mesh: DeviceMesh,
    parameters: list[list[Tensor]],
    inputs: Sequence[Tensor],
    records: bool,
    saving: Any,
    decoding: Decoding | None,
    away: Offloading | None,
) -> Residuals:
    """The function on its arguments; with `records` under autograd, where `saving` is a context for what that saves.

    Of arguments that `away` lets go of, the graph does not hold the numbers.
    """
    signature, options = call.signature, call.signature.options
    given = call.needs[len(signature.shards) :]
    name = f"{signature.name} ({signature.stage})"
    checked = call.step is not None
    arguments = [x.detach() for x in inputs]
    light = [False] * len(arguments)
    begins = arguments
    if away is not None and not call.transformed:
        light = [away.lets_go(x) for x in arguments]
        begins = [  # tensors of one number in the place of those
            torch.empty_strided(x.shape, (0,) * x.ndim, dtype=x.dtype, device=x.device) if yes else x
            for x, yes in zip(arguments, light, strict=True)
        ]
    begins = [owned(x, records and need, name, checked) for x, need in zip(begins, given, strict=True)]
    leaves = list(call.leaves)
    around = [scope(mesh, known_axes(mesh))] if current_mesh() is not mesh else []
    if call.surroundings.autocast:
        around.append(call.surroundings.uncached())
    if call.transformed:
        around.append(RefuseWrapped(signature, call.reverse))
    if call.contexts:
        around.append(call.contexts.pop(0))
    if saving:
        around.append(saving)
    # Gradients are on already where no argument needs one: an output that does shows what was closed over.
    with entered(around), torch.set_grad_enabled(records or torch.is_grad_enabled()):
        for k, i in enumerate(call.at):
            if light[k] and given[k]:
                arguments[k] = _Argument.apply(begins[k], arguments[k])  # type: ignore[no-untyped-call]
            x = arguments[k]
            leaves[i] = cast(x, options.input_dtype)
        result = _run(signature, leaves, parameters, decoding)
    return Residuals(parameters, begins, call.outputs(result, arguments), decoding)


def _run(
    signature: Signature, leaves: Sequence[Any], parameters: Sequence[Sequence[Tensor]], decoding: Decoding | None
) -> Any:
    enter(signature)
    try:
        with unscheduled():
            result = signature.call(leaves, parameters, decoding)
    except RuntimeError as error:
        if "leaf Variable that requires grad" in str(error) or f"of {_Argument.__name__} is a view" in str(error):
            raise RuntimeError(writes(signature)) from error
        refuse_mixed(signature, error, parameters, leaves)
        raise
    finally:
        running.stage = None
    dtype = signature.options.output_dtype
    return result if dtype is None else cast_all(result, dtype)


def differentiated(
    residuals: Residuals, needs: Sequence[bool], cotangents: Sequence[Tensor | None]
) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
    """Gradients with respect to each shard's parameters, and to the inputs, where needed."""
    n = len(residuals.parameters)
    wanted = [p for ps, need in zip(residuals.parameters, needs[:n], strict=True) if need for p in ps]
    wanted += [x for x, need in zip(residuals.inputs, needs[n:], strict=True) if need]
    ends = [y if not isinstance(y, Tensor) or y.requires_grad else None for y in residuals.outputs]
    pairs = [(y, ct) for y, ct in zip(ends, cotangents, strict=True) if ct is not None and y is not None]
    asked = [x for x in wanted if x.requires_grad]  # the function may have said that it needs none of some
    gradients: list[Tensor | None] = [None] * len(asked)
    if pairs and asked:
        ys, cts = zip(*pairs, strict=True)
        with unscheduled():
            gradients = list(autograd.gradients(ys, asked, cts))
    if len(asked) < len(wanted):
        rest = iter(gradients)
        gradients = [next(rest) if x.requires_grad else None for x in wanted]
    rest = iter(gradients)
    of_parameters = [
        list(islice(rest, len(ps) if need else 0)) for ps, need in zip(residuals.parameters, needs, strict=False)
    ]
    return of_parameters, [next(rest) if need else None for need in needs[n:]]


class SharedMemory(Exception):
    """Outputs of a stage share memory with each other, or with inputs, of which a transform cannot know."""


def detached(outputs: Sequence[Tensor], storages: list[int], inputs: Sequence[Tensor], transformed: bool) -> Any:
    """The outputs as they leave a call, without its graph.

    Those that share memory do so outside too, as views by which autograd refuses a write that it could not follow.
    """
    taken = {autograd.storage_of(x): x for x in inputs}
    if len(set(storages)) == len(storages) and taken.keys().isdisjoint(storages):
        return tuple([y.detach() for y in outputs])
    if transformed:
        raise SharedMemory
    outside = []
    for y, storage in zip(outputs, storages, strict=True):
        if storage not in taken and storages.count(storage) == 1:
            outside.append(y.detach())
            continue
        base = taken.setdefault(storage, y.detach())
        same = base.dtype == y.dtype
        outside.append(base.as_strided(y.shape, y.stride(), y.storage_offset()) if same else y.detach().clone())
    return tuple(outside)
