"""What the parts of `benchmarks.gpu` share: where they run, what they answer, and process groups of one process."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import Goal, Sense
from shardfn.compat import process_groups
from shardfn.testing import Device, simulated

RANKS = 8  # of a world that one process pretends


@dataclass(frozen=True)
class Where:
    """Where a part runs.

    Attributes:
        device: `"cuda"`, or `"cpu"` to try the command.
        tiny: whether models are tiny.
    """

    device: str
    tiny: bool

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


class Missing(Exception):
    """What a part needs, and is not here."""


@dataclass
class Answer:
    """The rows of a part, and its figures with their goals."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def goal(self, name: str, value: float, limit: float, sense: Sense = "at most") -> None:
        self.goals.append(Goal(name, value, limit, sense))

    def unanswered(self, name: str, why: str, limit: float, sense: Sense = "at most") -> None:
        """Enters a figure that cannot be had here; it does not meet its goal."""
        self.rows.append({"not answered": name, "because": why})
        self.goal(name, math.nan, limit, sense)


@contextmanager
def pretended(world: int, device: str) -> Iterator[None]:
    """A process group: of this process alone, or a fake one of several ranks."""
    warnings.filterwarnings("ignore")
    if device == "cuda":
        torch.cuda.set_device(0)
    with tempfile.NamedTemporaryFile() as file:
        if world == 1:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{file.name}", rank=0, world_size=1)
        else:
            dist.init_process_group("fake", store=process_groups.fake_store(), rank=0, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def accelerator(where: Where, values: bool) -> Iterator[tuple[str, Device | None]]:
    """One rank of a pretended world, with its device's name: the GPU, or a simulated device in its place."""
    if where.cuda:
        with pretended(RANKS, "cuda"):
            yield "cuda", None
    else:
        with simulated(RANKS, backend="cpu:fake,sim:fake", values=values) as device:
            yield device.name, device
