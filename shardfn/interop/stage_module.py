"""Runs a module as a stage: its own forward, on the parameters of the call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.compat import functorch
from shardfn.compat.autograd import storage_of
from shardfn.interop import output_capturing, refusals
from shardfn.interop.in_place import Adapting, arguments, buffers_in_place, replaced, unasked, uncached
from shardfn.interop.module_state import Attributes, Before
from shardfn.interop.placeholder import ModulePart, Placeholder, ShellCall, Slot, revealed
from shardfn.interop.pytrees import Forms
from shardfn.interop.tensor_checks import ShardedModules
from shardfn.stages.signature import cast
from shardfn.stages.stage import skip, stage


class ModuleCall:
    """One call: its parameters, the keys of buffers that may change, adapters, and the stages that have run.

    Attributes:
        records: if it began while gradients are recorded, the code of the frame where it did.
        lent: ids of the loose values in their places.
        reveal: gathers the value of a placeholder of a stage that other code reads; returns the placeholder if it
            cannot.
    """

    def __init__(
        self,
        params: Any,
        changing: frozenset[str],
        adapters: Mapping[str, Any],
        records: CodeType | None,
        reveal: Callable[[ModuleCall, Placeholder], Any],
    ) -> None:
        self.params, self.changing, self.adapters, self.records = params, changing, adapters, records
        self.trace: list[str] = []
        self.lent: set[int] = set()
        self.reveal = functools.partial(reveal, self)
        self.revealed: dict[Any, dict[str, Tensor]] = {}


class Shell(NamedTuple):
    """The state shared by the stages of a module.

    Attributes:
        running: the current call and stage.
        places: of buffers, by key.
        statistics: keys of buffers that may change.
    """

    running: ShellCall
    places: Mapping[str, Sequence[Slot]]
    statistics: Collection[str]


def casting(
    forward: Callable[..., Any], input_dtype: torch.dtype | None, output_dtype: torch.dtype | None
) -> Callable[..., Any]:
    """A forward whose arguments and results are cast, as those of a stage are."""
    forms = Forms()

    def to(dtype: torch.dtype | None, tree: Any) -> Any:
        leaves, form = forms.flatten(tree)
        converted = [cast(x, dtype) for x in leaves]
        same = all(a is b for a, b in zip(converted, leaves, strict=True))
        return tree if same else forms.unflatten(converted, form)  # what is not cast may be written into

    @functools.wraps(forward)
    def cast_around(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = to(input_dtype, (args, kwargs))
        return to(output_dtype, forward(*args, **kwargs))

    return cast_around


def storage(x: Tensor) -> int | None:
    """A number equal for tensors that share memory; None for those without a storage."""
    return storage_of(functorch.unwrapped(x)) if x.layout is torch.strided else None


class StageUnit:
    """A module that is a stage: its forward is replaced by a call of this."""

    def __init__(
        self,
        shell: Shell,
        part: ModulePart,
        region: ShardedModules | None,
        instead: Mapping[nn.Module, Callable[..., Any]],
        compile: bool | Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self.shell, self.part, self.region, self.forms, self.options = shell, part, region, Forms(), options
        self.adapting, self.attributes = Adapting(part), Attributes(part.module.modules())
        self.slots = [*part.own, *part.shared]
        self.placeholders = [slot.holder[slot.at] for slot in self.slots]
        self.fresh, self.unasked = uncached(part.module), unasked(part.module)
        self.forward = self.eager = instead.get(part.module, part.module.forward)
        self.instead = {m: forward for m, forward in instead.items() if m is not part.module}
        if compile:
            self.forward = torch.compile(self.forward, **({} if compile is True else compile))

        def run(*values: Any) -> Any:
            return self._run(*values)

        run.__name__ = run.__qualname__ = type(part.module).__name__
        # Arguments and results are cast here, because a stage would cast buffers as well.
        self.input_dtype, self.output_dtype = options.get("input_dtype"), options.get("output_dtype")
        self.stage = stage(
            run, **{name: x for name, x in options.items() if name not in ("input_dtype", "output_dtype")}
        )
        forward: Any = functools.wraps(part.module.forward)(lambda *a, **k: self(*a, **k))
        forward._shardfn_skip = self.skip
        part.module.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's forward."""
        call = self.shell.running.now
        if self.shell.running.unit is self:  # forward calls the module itself, within its stage
            return self.eager(*args, **kwargs)
        if call is None:
            refusals.refuse_again(self.part.path)
            raise RuntimeError(
                f"{self.part.path} is called by itself, and its parameters were taken out: call the function that "
                f"`functional` returned, model(params, ...)"
            )
        leaves, form = self.forms.flatten((args, kwargs))
        leaves = tuple([revealed(x) for x in leaves])
        if torch.is_grad_enabled():
            refusals.refuse_caches(self.part, leaves)
        elif call.records is not None:
            refusals.refuse_inside_function(self.part, call.records)
        transformed = functorch.inside_transform()
        if transformed:
            refusals.refuse_hooks(self.part)
        call.trace.append(self.part.path)
        buffers = {key: holder[attr] for holder, attr, key in self.part.buffers}
        changing = tuple(key for key in buffers if key in call.changing)
        stage_params, shared, *adapters = arguments(call.params, self.part, call.adapters)
        swapped = self._swapped(call.lent)
        cast_leaves = tuple([cast(x, self.input_dtype) for x in leaves]) if self.input_dtype else leaves
        before = self.attributes.present_state()
        capture_names = output_capturing.requested_names()
        results, outer, changed = self.stage(
            stage_params, shared, swapped, buffers, changing, cast_leaves, form, capture_names, before, *adapters
        )
        results = [cast(x, self.output_dtype) for x in results] if self.output_dtype else results
        for key, value in changed.items():
            for holder, attr, _ in self.shell.places[key]:
                holder[attr] = value
        if transformed:
            refusals.refuse_kept(self.part, leaves)
        out, recorded = self.forms.unflatten(results, outer)
        output_capturing.hand_on(recorded)
        return out

    def _swapped(self, lent_ids: Collection[int]) -> dict[int, Any]:
        """Values that `torch.func.functional_call`, or an assignment, has put in the places of parameters."""
        try:
            current = [slot.holder[slot.at] for slot in self.slots]
        except KeyError as error:
            refusals.refuse_deleted(self.part, error)
        pairs = enumerate(zip(current, self.placeholders, strict=True))
        swapped = {i: revealed(x) for i, (x, placeholder) in pairs if x is not placeholder and id(x) not in lent_ids}
        if swapped:  # a list of the module's own follows its parameters
            values = {self.slots[i].key: x for i, x in swapped.items()}
            elsewhere = (i for i, slot in enumerate(self.slots) if id(slot.holder) not in self.adapting.homes)
            swapped |= {i: values[key] for i in elsewhere if (key := self.slots[i].key) in values}
        return swapped

    def skip(self, *args: Any, **kwargs: Any) -> Tensor:
        """Implements `shardfn.skip` for the module."""
        call = self.shell.running.now
        if call is None:
            raise RuntimeError(
                f"skip: {self.part.path} is skipped outside of a call of the model, which has its parameters: skip it "
                f"in the forward of the module that would call it"
            )
        call.trace.append(self.part.path)
        return skip(self.stage, *arguments(call.params, self.part, call.adapters), args, kwargs)

    def _run(
        self,
        stage_params: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        swapped: Mapping[int, Tensor],
        buffers: Mapping[str, Tensor],
        changing: Sequence[str],
        leaves: Sequence[Any],
        form: int,
        capture_names: tuple[str, ...],
        before: Before,
        *adapters: Any,
    ) -> Any:
        args, kwargs = self.forms.unflatten(leaves, form)
        part = self.part
        slots = self.slots
        values = [stage_params[slot.key] for slot in part.own] + [shared[slot.key] for slot in part.shared]
        values = [swapped.get(i, x) for i, x in enumerate(values)] if swapped else values
        outer_unit, self.shell.running.unit = self.shell.running.unit, self
        try:
            with (
                before.restoring(),
                self.fresh(),
                self.unasked(),
                self.adapting.placed(slots, values, adapters) as pairs,
                buffers_in_place(part, self._constant(buffers), changing) as changed,
                replaced("forward", self.instead),
                output_capturing.recording(capture_names) as recorded,
                contextlib.nullcontext()
                if self.region is None
                else self.region.entered(part.module.training, leaves, slots, retrace=bool(capture_names)) as followed,
            ):
                if self.region is not None:
                    self.region.prove(part, slots, self.eager, args, kwargs)
                out = (self.forward if followed is None else self.eager)(*args, **kwargs)
                refusals.refuse_rebound(part, pairs)
                lent_storages = {storage(value) for _, value in pairs if isinstance(value, Tensor)}
        except RuntimeError as error:
            groups = {"parameters": values, "arguments": leaves, "buffers": buffers}
            refusals.refuse_mixed(error, part, groups, {**self.options, "input_dtype": self.input_dtype})
            raise
        finally:
            self.shell.running.unit = outer_unit
        if self.forms.writable(form):
            refusals.refuse_written(part, leaves, self.forms.flatten((args, kwargs)), form)
        results, outer = self.forms.flatten((out, recorded))
        # Position tables and query tokens return a parameter, whose memory is lent for this run only.
        results = tuple([x.clone() if isinstance(x, Tensor) and storage(x) in lent_storages else x for x in results])
        if followed is not None:
            followed.check(results)
        return results, outer, changed

    def _constant(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Buffers, with statistics detached, since torch's kernels lack derivatives that transforms would ask for."""
        return {key: x.detach() if key in self.shell.statistics else x for key, x in buffers.items()}
