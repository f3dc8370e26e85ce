"""Metrics on their way to the host, which reads them when later steps have been launched."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

STEPS = 2  # that are launched before a step's metrics are read


def checked(metrics: Any, who: str) -> dict[str, Any]:
    """Metrics as numbers and tensors of one element.

    Raises:
        TypeError, ValueError: they are something else.
    """
    if not isinstance(metrics, Mapping):
        what = "None (is a `return` missing?)" if metrics is None else f"a {type(metrics).__name__}"
        raise TypeError(f"{who}: metrics are {what}, not a dict: name them, {{'loss': loss}}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"{who}: metrics have the key {name!r}, and keys are strings")
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise TypeError(f"{who}: metrics[{name!r}] is a tensor of {value.layout}: pass its .sum(), say")
            if value.numel() != 1 or value.is_complex():
                raise ValueError(
                    f"{who}: metrics[{name!r}] has shape {tuple(value.shape)} and {value.dtype}: a metric is one real "
                    f"number: reduce it, by .mean() or .sum(), or give its parts names of their own"
                )
        elif not isinstance(value, (Real, np.bool_)):
            turned = "; a step returns (state, metrics), in this order" if who.endswith("step") else ""
            raise TypeError(
                f"{who}: metrics[{name!r}] is a {type(value).__name__}, not a number or a tensor of one{turned}"
            )
        elif isinstance(value, int) and abs(value) > sys.float_info.max:
            raise ValueError(f"{who}: metrics[{name!r}] is more than a float holds")
    return dict(metrics)


@dataclass(frozen=True)
class _Coming:
    """One step's. `waits` are what says that the copies have arrived."""

    step: int
    order: list[str]
    known: dict[str, float]
    copies: list[tuple[list[str], Tensor]]
    waits: list[Any]

    def read(self) -> dict[str, float]:
        for wait in self.waits:
            if not wait.query():  # this bounds how far the host runs ahead
                wait.synchronize()
        values = dict(self.known)
        for names, copy in self.copies:
            values |= zip(names, copy.tolist(), strict=True)
        return {name: values[name] for name in self.order}


@dataclass
class Late:
    """The metrics of the last few steps."""

    coming: deque[_Coming] = field(default_factory=deque)

    def put(self, step: int, metrics: dict[str, Any]) -> None:
        """Starts to copy a step's metrics, which may be written to afterwards; it does not wait."""
        known = {name: float(x) for name, x in metrics.items() if not isinstance(x, Tensor)}
        by_device: dict[torch.device, list[str]] = {}
        for name, x in metrics.items():
            if isinstance(x, Tensor):
                by_device.setdefault(x.device, []).append(name)
        copies, waits = [], []
        for device, names in by_device.items():
            wide = torch.float32 if device.type == "mps" else torch.float64
            # Its memory may be given away while it is copied, but only to later work of the same stream.
            packed = torch.stack([metrics[name].detach().reshape(()).to(wide) for name in names])
            if device.type != "cpu":
                host = torch.empty(len(names), dtype=wide, pin_memory=device.type != "mps")
                packed = host.copy_(packed, non_blocking=True)
                waits.append(_arrival(device))
            copies.append((names, packed))
        self.coming.append(_Coming(step, list(metrics), known, copies, waits))

    def until(self, step: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Those of the steps up to one, in order. It waits for these."""
        while self.coming and self.coming[0].step <= step:
            one = self.coming.popleft()
            yield one.step, one.read()


def _arrival(device: torch.device) -> Any:
    """An event behind what was launched on a device, which need not be the current one."""
    module = torch.get_device_module(device)
    event = module.Event()
    if hasattr(module, "current_stream"):
        event.record(module.current_stream(device))
    else:
        event.record()  # MPS has one stream
    return event
