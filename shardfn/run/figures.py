"""What is known of a step besides its metrics: how long it took, tokens a second, memory, use of the device."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "H20": 148e12,
    "GB200": 2500e12, "B200": 2250e12, "A100": 312e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
    "RTX 4090": 165e12, "V100": 125e12, "MI300X": 1307e12,
}  # fmt: skip
"""Multiplications and additions a second in bfloat16 (V100: float16), dense, by a part of the device's name."""


def peak_of(name: str) -> float | None:
    """The peak of a device of this name, if it is known."""
    known = [part for part in PEAKS if part in name]
    return PEAKS[max(known, key=len)] if known else None


def tokens_of(batch: Any, places: int) -> int:
    """Tokens of a step on all ranks: the elements of the largest matrix of integers in a batch; 0 if it has none."""
    matrices = [x for x in optree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim == 2]
    kinds = (torch.uint8, torch.int16, torch.int32, torch.int64)
    return places * max((x.numel() for x in matrices if x.dtype in kinds), default=0)


class Figures:
    """Figures of one step after another.

    Args:
        flops: of a step, on all ranks together.
        peak: of one device.
        devices: how many there are.
        places: how many ranks have rows of their own.
    """

    def __init__(self, flops: float | None, peak: float | None, devices: int, places: int) -> None:
        self.gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.flops, self.devices, self.places = flops, devices, places
        self.peak = peak_of(torch.cuda.get_device_name()) if peak is None and self.gpu else peak
        self.before = time.perf_counter()
        self.took: dict[int, tuple[float, int]] = {}  # seconds and tokens of steps whose metrics have not been read

    def restart(self) -> None:
        """What has happened since the last step was not a part of the next one."""
        self.before = time.perf_counter()

    def launched(self, step: int, batch: Any) -> None:
        """A step has been launched. The host is never more than two ahead, so this is how long one takes."""
        now = time.perf_counter()
        self.took[step] = max(now - self.before, 1e-9), tokens_of(batch, self.places)
        self.before = now

    def of(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """The figures of a step whose metrics have just been read."""
        seconds, own = self.took.pop(step)
        found = {"seconds": seconds}
        if tokens := metrics.get("tokens", own):
            found["tokens_per_second"] = tokens / seconds
        found["memory_gib"] = (torch.cuda.max_memory_allocated() if self.gpu else resident()) / 2**30
        if self.flops:
            found["tflops"] = self.flops / seconds / self.devices / 1e12
            if self.peak:
                found["mfu"] = self.flops / seconds / self.devices / self.peak
        return found


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
