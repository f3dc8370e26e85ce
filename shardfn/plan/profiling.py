"""Profiles a step: runs it once, for real, and records when each work begins and ends.

What is noted is the same as in a plan, by the same code. A collective lasts from when it is issued until something has
waited for it, so it is seen how far ahead of need it is issued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.ledger import Record
from shardfn.compat import modes
from shardfn.mesh import waiting
from shardfn.mesh.axes import device_of
from shardfn.mesh.planned import planned
from shardfn.plan.drawing import lane_of
from shardfn.plan.plan import StepPlan
from shardfn.plan.planning import mark, mesh_for, named_arguments, plan_of
from shardfn.plan.recorder import MemoryBlock, OpenWork, PlanRecorder
from shardfn.plan.schedule import Work
from shardfn.simulated.device import Device
from shardfn.simulated.operations import launches
from shardfn.tracebacks import api_boundary

_COLLECTIVES = ("c10d", "_c10d_functional")
_STREAM = 1  # the number of the device's own stream among drafts, where 0 is the host


@dataclass(frozen=True, repr=False)
class Profile(StepPlan):
    """The works and memory of one rank in a step that ran, with the attributes of a `StepPlan`.

    Attributes:
        begins: seconds from the start of the step at which each work began, by its position.
        ends: and at which it ended.
    """

    begins: tuple[float, ...] = ()
    ends: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """Label in plots."""
        return f"{super().title}, measured"


@api_boundary
def profile_step(
    step: Callable[..., Any], *args: Any, mesh: DeviceMesh | None = None, **kwargs: Any
) -> tuple[Profile, Any]:
    """Runs a step once, for real, and measures its works, collectives and memory on this rank.

    Every rank that the step needs calls it, with the arguments that it would pass to the step. What a first step does
    once, such as connecting to others, is measured too, so run some steps before. On an accelerator the times are those
    of the device, by events, and on the CPU those of the calling thread. To note an operation takes the host some
    microseconds, during which the device may idle; code that torch.compile made is not looked into.

    Args:
        step: the function.
        *args: its arguments; what it donates is gone afterwards.
        mesh: whose axes and device it is about. Default: that of the flat shards among the arguments.
        **kwargs: further arguments.

    Returns:
        The profile, which has the views of a plan; and what the step returned.

    Raises:
        TypeError: the step cannot be called.
        RuntimeError: inside `plan.mode`, where nothing runs; or another profile is being made.
        Exception: what the step itself raises.

    Example:
        ``profile, (params, state, loss) = sf.plan.profile_step(step, params, state, tokens)``, then
        ``plan.save_picture("step.svg", beside=profile)``
    """
    if not callable(step):
        raise TypeError(
            f"profile_step: the step is of type {type(step).__name__}, and cannot be called: pass the function itself, "
            "then its arguments, as in profile_step(step, params, batch)"
        )
    if planned():
        raise RuntimeError("profile_step: inside plan.mode(...) nothing runs: use plan.step(step, ...) there")
    if waiting.ended:
        raise RuntimeError("profile_step: another profile is being made in this process: let it end first")
    arguments = named_arguments(step, args, kwargs)
    mesh = mesh_for("profile_step", mesh, arguments)
    timer = _Timer(torch.device("cpu") if mesh is None else device_of(mesh))
    parameters = mark(timer, arguments)
    before = {block: block.nbytes for block in timer.blocks.values()}
    with timer.listening():
        result = step(*args, **kwargs)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1))
    reused = timer.reused_buffers(before, result)
    return timer.profile(plan_of(timer, per_node, step, mesh, parameters, before | reused, result)), result


class HostClock:
    """Marks moments of the host."""

    mark = staticmethod(time.perf_counter)

    def stream(self) -> int:
        """Returns the number of the current stream."""
        return _STREAM

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """Returns the time of each since the first."""
        return [mark - marks[0] for mark in marks]


class DeviceClock:
    """Marks moments of an accelerator, by events on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.module, self.device = torch.get_device_module(device), device

    def mark(self) -> Any:
        """Marks when the current stream comes here."""
        event = self.module.Event(enable_timing=True)
        event.record(self.module.current_stream(self.device))
        return event

    def stream(self) -> int:
        """Returns the number of the current stream."""
        return int(self.module.current_stream(self.device).stream_id) + _STREAM

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Returns the time of each since the first."""
        self.module.synchronize(self.device)
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]


class _Timer(PlanRecorder):
    """A recorder of a running step, which also notes when each work began and ended."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.kind = device.type
        self.clock = HostClock() if device.type == "cpu" else DeviceClock(device)
        self.spans: dict[OpenWork, list[Any]] = {}
        self.under_way: list[OpenWork] = []
        clocks = SimpleNamespace(all=dict, known=lambda stream: {}, marked=set())
        stand_in = SimpleNamespace(clocks=clocks, defaults=[_STREAM], stream=self.clock.stream)
        self.device = cast(Device, stand_in)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which operations, collectives and waits are recorded."""
        waiting.ended.append(self.waited)
        try:
            with super().listening(), _OperationTimer(self):
                yield
        finally:
            waiting.ended.remove(self.waited)

    def recorded(self, entry: Record) -> None:
        """Notes a collective, which is issued now."""
        with self._lock:
            super().recorded(entry)
            draft = self._announced.pop()
            self.works.append(draft)
            self.under_way.append(draft)
            begin = self.clock.mark()
            self.spans[draft] = [begin, begin]

    def waited(self, wait: waiting.on) -> None:
        """Ends the awaited collectives: all that the program issued in order, or those of a stage."""
        with self._lock:
            for draft in list(self.under_way):
                record = draft.record
                assert record is not None, "what is under way is a collective"
                if not record.scheduled or (record.op == wait.what and wait.of in ("", record.stage)):
                    self.spans[draft][1] = self.clock.mark()
                    self.under_way.remove(draft)

    def happened(self, func: Any, args: Any, kwargs: Any, out: Any, begin: Any) -> None:
        """Notes an operation that began then, and ends now."""
        with self._lock:
            end = self.clock.mark()
            if func.namespace in _COLLECTIVES:
                if self.works and self.works[-1].record is not None:  # others compare ranks, or connect them
                    self.works[-1].launches += 1
                    self.spans[self.works[-1]][1] = end
                for x in optree.tree_leaves(args):
                    if isinstance(x, Tensor):
                        self.note_memory(x)
                return
            inputs = [x for x in args if isinstance(x, Tensor)]
            copies = isinstance(out, Tensor) and inputs and inputs[-1].device.type != out.device.type
            source = inputs[-1] if copies else None  # to a device of another kind
            if source is None:
                self.ran(func, args, kwargs, out)
            else:
                self.copied(out, source)
            if self._on and self.works and (source is not None or launches(func)):
                self.spans.setdefault(self.works[-1], [begin, end])[1] = end

    def reused_buffers(self, before: dict[MemoryBlock, int], result: Any) -> dict[MemoryBlock, int]:
        """Returns the bytes of buffers that the step reused from earlier steps.

        They were first heard of when the step wrote to them, and are taken to be there from the beginning.
        """
        returned = {self.find(x) for x in optree.tree_leaves(result) if isinstance(x, Tensor)}
        new = (block for block in self.blocks.values() if block not in before)
        reused = {block: block.nbytes for block in new if block not in returned}
        self.events = [event for event in self.events if event[2] not in reused]
        return reused

    def profile(self, plan: StepPlan) -> Profile:
        """Returns a plan with the times of its works."""
        spans = [self.spans[draft] for draft in self.works]
        seconds = self.clock.seconds([mark for span in spans for mark in span]) if spans else []
        first = min(seconds[::2], default=0.0)
        begins, ends = (tuple(t - first for t in times) for times in (seconds[::2], seconds[1::2]))
        works = tuple(_assign_streams(plan.works, begins, ends))
        return Profile(**vars(plan) | {"works": works, "begins": begins, "ends": ends})


class _OperationTimer(modes.Watching):
    """Tells a timer of each operation that runs."""

    def __init__(self, timer: _Timer) -> None:
        super().__init__()
        self.timer = timer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, begin = kwargs or {}, self.timer.clock.mark()
        out = func(*args, **kwargs)
        self.timer.happened(func, args, kwargs, out, begin)
        return out


def _assign_streams(works: Sequence[Work], begins: Sequence[float], ends: Sequence[float]) -> Iterator[Work]:
    """Yields the works with a separate stream for each of several concurrent collectives of a kind."""
    first = max((work.stream for work in works), default=0) + 1
    streams: dict[str, list[int]] = {}  # of each kind
    free: dict[int, float] = {}
    for work, begin, end in zip(works, begins, ends, strict=True):
        if work.kind in ("compute", "copy"):
            yield work
            continue
        kind_streams = streams.setdefault(lane_of(work), [])
        stream = next((candidate for candidate in kind_streams if free[candidate] <= begin), None)
        if stream is None:
            stream = first + len(free)
            kind_streams.append(stream)
        free[stream] = end
        yield dataclasses.replace(work, stream=stream)
