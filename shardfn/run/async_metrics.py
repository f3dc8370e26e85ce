"""Reads metrics on the host only after later steps have been launched, and computes each step's figures."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from shardfn.collectives.late_checks import late_checks

STEPS = 2  # launched before a step's metrics are read


def checked_metrics(metrics: Any, caller: str) -> dict[str, Any]:
    """A step's metrics, checked to be numbers and tensors of one element.

    Raises:
        TypeError, ValueError: they are something else.
    """
    if not isinstance(metrics, Mapping):
        kind = "None (is a `return` missing?)" if metrics is None else f"a {type(metrics).__name__}"
        raise TypeError(f"{caller}: metrics are {kind}, not a dict: name them, {{'loss': loss}}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"{caller}: metrics have the key {name!r}, and keys are strings")
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise TypeError(f"{caller}: metrics[{name!r}] is a tensor of {value.layout}: pass its .sum()")
            if value.numel() != 1 or value.is_complex():
                raise ValueError(
                    f"{caller}: metrics[{name!r}] has shape {tuple(value.shape)} and {value.dtype}: a metric is one "
                    f"real number: reduce it, by .mean() or .sum(), or give its parts separate names"
                )
        elif not isinstance(value, (Real, np.bool_)):
            hint = "; a step returns (state, metrics), in this order" if caller.endswith("step") else ""
            raise TypeError(
                f"{caller}: metrics[{name!r}] is a {type(value).__name__}, not a number or a tensor of one{hint}"
            )
        elif isinstance(value, int) and abs(value) > sys.float_info.max:
            raise ValueError(f"{caller}: metrics[{name!r}] is more than a float holds")
    return dict(metrics)


@dataclass(frozen=True)
class _Coming:
    """One step's metrics on their way to the host.

    Attributes:
        step: counts from 1.
        order: the names, in the user's order.
        known: the metrics that were numbers on the host already.
        copies: names, and the 1-D host tensor of their values, for each device.
        waits: events after which the copies are complete.
    """

    step: int
    order: list[str]
    known: dict[str, float]
    copies: list[tuple[list[str], Tensor]]
    waits: list[Any]

    def read(self) -> dict[str, float]:
        for wait in self.waits:
            if not wait.query():
                wait.synchronize()  # this also bounds how far the host runs ahead of the device
        if self.waits:
            late_checks().read()  # of the same steps, so they have arrived, too
        values = dict(self.known)
        for names, copy in self.copies:
            values |= zip(names, copy.tolist(), strict=True)
        return {name: values[name] for name in self.order}


@dataclass
class Late:
    """The metrics of steps that have been launched and not read."""

    coming: deque[_Coming] = field(default_factory=deque)

    def put(self, step: int, metrics: dict[str, Any]) -> None:
        """Starts to copy a step's metrics to the host, without waiting; the tensors may be overwritten afterwards."""
        numbers = {name: float(x) for name, x in metrics.items() if not isinstance(x, Tensor)}
        by_device: dict[torch.device, list[str]] = {}
        for name, x in metrics.items():
            if isinstance(x, Tensor):
                by_device.setdefault(x.device, []).append(name)
        copies, waits = [], []
        for device, names in by_device.items():
            wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
            # The allocator may reuse `packed` during the copy, but only for later work on the same stream.
            packed = torch.stack([metrics[name].detach().reshape(()).to(wide) for name in names])
            if device.type != "cpu":
                host = torch.empty(len(names), dtype=wide, pin_memory=device.type != "mps", device="cpu")
                packed = host.copy_(packed, non_blocking=True)
                waits.append(_arrival(device))
            copies.append((names, packed))
        self.coming.append(_Coming(step, list(metrics), numbers, copies, waits))

    def until(self, step: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields step and metrics in order, up to and including `step`, waiting for the device if needed."""
        while self.coming and self.coming[0].step <= step:
            pending = self.coming.popleft()
            yield pending.step, pending.read()


def _arrival(device: torch.device) -> Any:
    """An event recorded after the work launched on a device, which need not be the current one."""
    module = torch.get_device_module(device)
    event = module.Event()
    if hasattr(module, "current_stream"):
        event.record(module.current_stream(device))
    else:
        event.record()  # MPS has one stream
    return event


PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "H20": 148e12,
    "GB200": 2500e12, "B200": 2250e12, "A100": 312e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
    "RTX 4090": 165e12, "V100": 125e12, "MI300X": 1307e12,
}  # fmt: skip
"""Dense bfloat16 (V100: float16) floating point operations a second, by a part of the device's name."""


def peak_of(name: str) -> float | None:
    """The peak operations a second of a device by its name, or None if it is unknown."""
    parts = [part for part in PEAKS if part in name]
    return PEAKS[max(parts, key=len)] if parts else None


def tokens_of(batch: Any, places: int) -> int:
    """Estimates the tokens of a step on all ranks; 0 if the batch has no 2-D tensor of integers.

    It is the size of the largest such tensor times the number of places with rows of their own.
    """
    matrices = [x for x in optree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim == 2]
    kinds = (torch.uint8, torch.int16, torch.int32, torch.int64)
    return places * max((x.numel() for x in matrices if x.dtype in kinds), default=0)


class StepFigures:
    """Computes time, throughput and memory of each step.

    Args:
        flops: floating point operations of a step, on all ranks together.
        peak: floating point operations a second of one device.
        devices: how many devices there are.
        places: how many ranks have rows of their own.
    """

    def __init__(self, flops: float | None, peak: float | None, devices: int, places: int) -> None:
        self.gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.flops, self.devices, self.places = flops, devices, places
        self.peak = peak_of(torch.cuda.get_device_name()) if peak is None and self.gpu else peak
        self.before = time.perf_counter()
        self.took: dict[int, tuple[float, int]] = {}  # seconds and tokens of steps whose metrics have not been read

    def restart(self) -> None:
        """Restarts the clock, so that work between steps, as for a checkpoint, is not counted in the next step."""
        self.before = time.perf_counter()

    def launched(self, step: int, batch: Any) -> None:
        """Notes that a step has been launched; as the host is at most two ahead, launches are as far apart as steps."""
        time_s = time.perf_counter()
        self.took[step] = max(time_s - self.before, 1e-9), tokens_of(batch, self.places)
        self.before = time_s

    def figures_of(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """The figures of a step, from its metrics; each step's can be asked for once."""
        seconds, estimate = self.took.pop(step)
        figures = {"seconds": seconds}
        if tokens := metrics.get("tokens", estimate):
            figures["tokens_per_second"] = tokens / seconds
        figures["memory_gib"] = (torch.cuda.max_memory_allocated() if self.gpu else resident()) / 2**30
        if self.flops:
            figures["tflops"] = self.flops / seconds / self.devices / 1e12
            if self.peak:
                figures["mfu"] = self.flops / seconds / self.devices / self.peak
        return figures


def resident() -> int:
    """The resident memory of this process in bytes; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
