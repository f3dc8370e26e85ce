"""One call of a stage: its function run on gathered parameters, with an autograd graph of its own.

That graph belongs to the call alone. Its outputs leave detached, and its gradients are computed when the call's turn
comes in backward. With remat, the graph is only made then, by running the function again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.check import recording
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
    from shardfn.stages.activation_offload import Offloading
    from shardfn.stages.forward_mode import Pairs


@dataclass
class Residuals:
    """What one run of a stage's function leaves for its gradient.

    Attributes:
        parameters: each shard's parameters, leaves of the graph.
        inputs: the other tensors, leaves of the graph.
        outputs: the ends of the graph; where activations are offloaded, edges in place of the tensors, and None where
            there is no gradient.
        decoding: of quantized parameters, which the graph reads decoded.
    """

    parameters: list[list[Tensor]]
    inputs: list[Tensor]
    outputs: list[Any]
    decoding: Decoding | None = None


class _Argument(torch.autograd.Function):
    """Puts a stand-in for an argument at the beginning of the graph, which then does not hold the argument."""

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
        mesh: the mesh of the shards, kept alive until the call's backward has run.
        at: indices in `leaves` of the tensors that are not shards.
        needs: which shards and which of those tensors are differentiated.
        step: the evaluation of gradients to which the call belongs.
        collected: the shards whose gradient that step takes from the stage, None for the others.
        tape: the call's tape; None if no backward follows.
        run: its entry on the tape.
        residuals: of the last run, until a backward takes them.
        surroundings: the random state and autocast at the beginning of the call.
        contexts: of a policy that says what to keep: one for the first run and one for the second.
        transformed: whether a torch.func transform is running outside.
        reverse: whether all running transforms only take gradients.
        differentiable: which outputs may have a gradient.
        form: the form of the first run's result.
        sample: some numbers of that result, if a later run is compared with it.
        pairs: in forward mode, how its tensors and their tangents belong together.
    """

    tape: Tape | None = None
    run: StageRun | None = None
    residuals: Residuals | None = None
    form: Form | None = None
    sample: Sample | None = None
    pairs: Pairs | None = None

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
        generators = [x for x in (*leaves, *signature.closed_over().values()) if type(x) is torch.Generator]
        remat = signature.options.remat
        self.contexts: list[Any] = list(remat()) if callable(remat) and any(needs) else []
        self.transformed = functorch.inside_transform()
        self.surroundings = RngAndAutocast(device, generators, again=any(needs) or self.transformed)
        self.reverse = self.transformed and not functorch.inside_batching_or_forward()
        self.differentiable: list[bool] = []

    def rebuilt(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """The function's result, with these tensors."""
        assert self.form is not None, "the function has run"
        tree, leaves, _, order = self.form
        tensors = iter([outputs[k] if k >= 0 else inputs[~k] for k in order])
        return optree.tree_unflatten(tree, [next(tensors) if leaf is TENSOR else leaf for leaf in leaves])

    def outputs(self, result: Any, inputs: Sequence[Tensor], transformed: bool = False) -> list[Tensor]:
        """The call's own outputs: each tensor of the result once, without inputs that are returned as they are.

        Args:
            result: the function's result.
            inputs: the tensors that it was given.
            transformed: whether they may belong to a transform.

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
        by_number = dict(zip(self.form.order, tensors, strict=True))
        return [by_number[k] for k in sorted(by_number) if k >= 0]

    def remember(self, outputs: Sequence[Tensor]) -> None:
        """Keeps some of the numbers that the first run returned, to compare a second run with them."""
        assert self.form is not None, "the function has run"
        self.sample = Sample([outputs[k] if k >= 0 else None for k in self.form.order])

    def refuse_constant(self, outputs: Sequence[Tensor]) -> None:
        """Raises RuntimeError if an output has a gradient in one of two runs and none in the other."""
        for i, (y, had_gradient) in enumerate(zip(outputs, self.differentiable, strict=True)):
            if y.requires_grad is not had_gradient:
                first, now = ("with a gradient", "without") if had_gradient else ("without a gradient", "with one")
                raise RuntimeError(other_result(self.signature, f"output {i} {first}", now))


def evaluate(
    call: Call,
    parameters: list[list[Tensor]],
    inputs: Sequence[Tensor],
    records: bool,
    saving: Any = None,
    decoding: Decoding | None = None,
    offloader: Offloading | None = None,
) -> Residuals:
    """Runs the function on its arguments; with `records` under autograd, with `saving` as context for what that saves.

    Arguments that `offloader` lets go of are not held by the graph.
    """
    signature, options = call.signature, call.signature.options
    needs = call.needs[len(signature.shards) :]
    name = f"{signature.name} ({signature.stage})"
    checked = call.step is not None
    arguments = [x.detach() for x in inputs]
    replaced = [False] * len(arguments)
    begins = arguments
    if offloader is not None and not call.transformed:
        replaced = [offloader.lets_go(x) for x in arguments]
        begins = [  # stand-ins of the same shape, which take the memory of one number
            torch.empty_strided(x.shape, (0,) * x.ndim, dtype=x.dtype, device=x.device) if yes else x
            for x, yes in zip(arguments, replaced, strict=True)
        ]
    begins = [owned(x, records and need, name, checked) for x, need in zip(begins, needs, strict=True)]
    leaves = list(call.leaves)
    contexts = [scope(call.mesh, known_axes(call.mesh))] if current_mesh() is not call.mesh else []
    if call.surroundings.autocast:
        contexts.append(call.surroundings.uncached())
    if call.transformed:
        contexts.append(RefuseWrapped(signature, call.reverse))
    if call.contexts:
        contexts.append(call.contexts.pop(0))
    if saving:
        contexts.append(saving)
    # Without `records` the grad mode stays as it is: an output that then needs a gradient shows a closure over one.
    with entered(contexts), torch.set_grad_enabled(records or torch.is_grad_enabled()):
        recorder = recording.current()
        for k, i in enumerate(call.at):
            if replaced[k] and needs[k]:
                arguments[k] = _Argument.apply(begins[k], arguments[k])  # type: ignore[no-untyped-call]
            x = arguments[k]
            if recorder is not None:
                recorder.same(x, inputs[k])  # autograd differentiates through the call
            leaves[i] = cast(x, options.input_dtype)
        result = _run(signature, leaves, parameters, decoding)
    return Residuals(parameters, begins, call.outputs(result, arguments), decoding)


def _run(
    signature: Signature, leaves: Sequence[Any], parameters: Sequence[Sequence[Tensor]], decoding: Decoding | None
) -> Any:
    """Calls the function; turns some errors of torch into ones that name the stage."""
    enter(signature)
    try:
        with unscheduled():
            result = signature.call(leaves, parameters, decoding)
    except RuntimeError as error:
        said = str(error)
        if "leaf Variable that requires grad" in said or (_Argument.__name__ in said and "is a view" in said):
            raise RuntimeError(writes(signature)) from error
        refuse_mixed(signature, error, parameters, leaves)
        raise
    finally:
        running.stage = None
    dtype = signature.options.output_dtype
    return result if dtype is None else cast_all(result, dtype)


def differentiated(
    residuals: Residuals, needs: Sequence[bool], cotangents: Sequence[Tensor | None], create_graph: bool = False
) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
    """Gradients with respect to each shard's parameters, and to the inputs, where needed."""
    n = len(residuals.parameters)
    wanted = [p for ps, need in zip(residuals.parameters, needs[:n], strict=True) if need for p in ps]
    wanted += [x for x, need in zip(residuals.inputs, needs[n:], strict=True) if need]
    outputs = [y if not isinstance(y, Tensor) or y.requires_grad else None for y in residuals.outputs]
    pairs = [(y, ct) for y, ct in zip(outputs, cotangents, strict=True) if ct is not None and y is not None]
    variables = [x for x in wanted if x.requires_grad]  # the function may have called requires_grad_(False)
    gradients: list[Tensor | None] = [None] * len(variables)
    if pairs and variables:
        ys, cts = zip(*pairs, strict=True)
        with unscheduled():
            gradients = list(autograd.gradients(ys, variables, cts, create_graph))
        # A function's own backward may return a parameter, whose memory the next stage uses.
        lent = {autograd.storage_of(p) for ps in residuals.parameters for p in ps}
        gradients = [
            g.clone() if g is not None and g.layout is torch.strided and autograd.storage_of(g) in lent else g
            for g in gradients
        ]
    if len(variables) < len(wanted):
        remaining = iter(gradients)
        gradients = [next(remaining) if x.requires_grad else None for x in wanted]
    remaining = iter(gradients)
    of_parameters = [
        list(islice(remaining, len(ps) if need else 0)) for ps, need in zip(residuals.parameters, needs, strict=False)
    ]
    return of_parameters, [next(remaining) if need else None for need in needs[n:]]


class SharedMemory(Exception):
    """Outputs of a stage share memory with each other or with inputs, which a transform cannot represent."""


def detached(outputs: Sequence[Tensor], storages: list[int], inputs: Sequence[Tensor], transformed: bool) -> Any:
    """The outputs of a call, detached from its graph.

    Outputs that share memory still do so outside, as views, on which autograd refuses a write that it could not follow.
    """
    bases = {autograd.storage_of(x): x for x in inputs}
    if len(set(storages)) == len(storages) and bases.keys().isdisjoint(storages):
        return tuple([y.detach() for y in outputs])
    if transformed:
        raise SharedMemory
    results = []
    for y, storage in zip(outputs, storages, strict=True):
        if storage not in bases and storages.count(storage) == 1:
            results.append(y.detach())
            continue
        base = bases.setdefault(storage, y.detach())
        viewable = base.dtype == y.dtype
        results.append(base.as_strided(y.shape, y.stride(), y.storage_offset()) if viewable else y.detach().clone())
    return tuple(results)
