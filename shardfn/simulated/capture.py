"""Graphs of a simulated accelerator: work that is recorded once, and runs again on the same memory.

While a graph is captured nothing runs: results have memory, and nothing in it. `replay` then runs each operation on the
memory that it was recorded with, so whatever the host computed meanwhile stays as it was. As on CUDA, a capture begins
on one stream, and other streams join it by waiting for its events; they must be waited for before it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from shardfn.compat import autograd, dispatch, process_groups
from shardfn.simulated.operations import NAME, line, shadow

if TYPE_CHECKING:
    from shardfn.simulated.device import Device

Used = tuple[list[Tensor], list[Tensor]]
"""What an operation reads, and those among its arguments into which it writes."""


class Graph:
    """`torch.sim.CUDAGraph`.

    Attributes:
        number: of the capture, as `Clocks` knows it.
        runs: what a replay runs, in order.
        memory: one tensor for each memory from outside, by the number of its storage.
        written: the numbers of those into which it writes.
        sizes: how often each had been resized when it was captured.
    """

    def __init__(self) -> None:
        self.number = 0
        self.runs: list[Callable[[], None]] = []
        self.memory: dict[int, Tensor] = {}
        self.written: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.works: dict[int, Any] = {}
        self.made: dict[int, Any] = {}
        self.device: Device | None = None

    # --- capture ---

    def refuse(self, what: str) -> None:
        """Raises RuntimeError: the operation is not allowed while a graph is captured."""
        raise RuntimeError(f"{what} at {line()}: not permitted while a graph is captured")

    def record(self, func: Any, args: Any, kwargs: Any, out: Any, used: Used) -> None:
        """Records an operation; `used` are the arguments whose memory it reads and writes."""
        self.use(used, out)
        if not self._values():
            return
        values = optree.tree_map(_value, (args, kwargs))
        own = {autograd.storage_of(x) for x in (*used[0], *used[1])}
        results = [
            shadow(x) if _is_simulated(x) and autograd.storage_of(x) not in own else None
            for x in optree.tree_leaves(out)
        ]

        def run() -> None:
            found = optree.tree_leaves(func(*values[0], **values[1]))
            for into, x in zip(results, found, strict=True):
                if into is not None:
                    sent = func.namespace == "_c10d_functional"
                    into.copy_(torch.ops._c10d_functional.wait_tensor(x) if sent else x)

        self.runs.append(run)

    def collective(self, func: Any, args: Any, kwargs: Any, out: Any, used: Used, launched: Callable[[], None]) -> int:
        """Records a collective; `launched` enters it where they are counted. Returns what `wait` knows it by."""
        self.runs.append(launched)
        if func.namespace == "_c10d_functional":
            self.record(func, args, kwargs, out, used)
            return -1
        self.use(used, out)
        if not self._values():
            return -1
        number, values = len(self.runs), optree.tree_map(_value, (args, kwargs))

        def run() -> None:
            found = func(*values[0], **values[1])
            self.works[number] = [x for x in optree.tree_leaves(found) if isinstance(x, torch.ScriptObject)]

        self.runs.append(run)
        return number

    def wait(self, number: int) -> None:
        """Records a wait for the collective that was recorded as this one."""

        def run() -> None:
            for work in self.works.pop(number, ()):
                process_groups.handle_of(work).wait()

        self.runs.append(run)

    def use(self, used: Used, out: Any) -> None:
        """Notes the memory that an operation uses, and what is new."""
        for x in (*used[0], *used[1]):
            number = autograd.storage_of(x)
            made = self.made.get(number)
            if _is_simulated(x) and number not in self.memory and (made is None or made.expired()):
                assert self.device is not None, "a graph that is captured has a device"
                with self.device.fake_mode:
                    self.memory[number] = torch.ops.aten.alias.default(x)  # with no other reference to the memory
                self.sizes[number] = self.device.resizes[number]
        self.written |= {autograd.storage_of(x) for x in used[1] if _is_simulated(x)}
        for x in optree.tree_leaves(out):
            if _is_simulated(x) and autograd.storage_of(x) not in self.memory:
                self.made.setdefault(autograd.storage_of(x), autograd.weak_storage(x))

    def _values(self) -> bool:
        assert self.device is not None, "a graph that is captured has a device"
        return self.device.values

    # --- replay ---

    def replay(self) -> None:
        """Runs all of it, on the current stream."""
        device = self.device
        if device is None or device.graph is not None:
            raise RuntimeError(f"replay at {line()}: this graph was not captured, or another is being captured")
        # What asks for the count is a reference, too.
        freed = [x for x in self.memory.values() if autograd.storage_references(x) <= 2]
        freed += [self.memory[number] for number, times in self.sizes.items() if device.resizes[number] != times]
        if freed:
            raise RuntimeError(f"replay at {line()}: the graph uses memory that was freed: {tuple(freed[0].shape)}")
        writes = [x for number, x in self.memory.items() if number in self.written]
        device.operations["replay"] += 1
        device.clocks.use(device.stream(), "replay", list(self.memory.values()), writes)
        with dispatch.outside_modes():  # which would take what is sent for collectives of the host
            for run in self.runs:
                run()
            for number in list(self.works):
                for work in self.works.pop(number):
                    process_groups.handle_of(work).wait()


class Capture:
    """`torch.sim.graph`: a context in which work on the device is recorded in place of run."""

    def __init__(
        self, cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got "
                               f"{capture_error_mode}")  # fmt: skip
        self.graph, self.stream = cuda_graph, stream

    def __enter__(self) -> None:
        module = torch.get_device_module(NAME)
        device = self.graph.device = module.simulation()
        if device.graph is not None:
            self.graph.refuse("a second capture")
        module.synchronize()  # as torch.cuda.graph does
        self.stream = self.stream or module.Stream()
        if self.stream.stream_id in device.defaults:
            self.graph.refuse("the default stream")
        self.within = module.stream(self.stream)
        self.within.__enter__()
        device.graph, self.graph.number = self.graph, device.clocks.begin_capture(self.stream.stream_id)

    def __exit__(self, kind: Any, *error: Any) -> None:
        device = self.graph.device
        assert device is not None, "it was entered"
        device.graph = None
        loose = device.clocks.end_capture(self.stream.stream_id)
        self.within.__exit__(kind, *error)
        if loose:
            self.graph.runs.clear()
            self.graph.device = None
            raise RuntimeError(
                f"the capture at {line()} ends while work is on {len(loose)} streams that joined it, and nothing waits "
                f"for them"
            )


def _is_simulated(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME


def _value(x: Any) -> Any:
    """An argument as a replay passes it: a tensor of the device as the values in its memory."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return shadow(x) if _is_simulated(x) else x
