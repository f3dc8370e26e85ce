"""A call that fails leaves a model as it was: what forward sets in attributes, loose or in a stage, goes back."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn.interop import functional
from shardfn.testing import World
from tests.interop.modules import WIDTH, Fails, Stack, linear, mapped, meshed, of_module, off, rows, seeded


def count(m: Any) -> Any:
    m.calls = getattr(m, "calls", 0) + 1
    return m.calls


def switch(m: Any) -> Any:
    m.training = not m.training
    return 2 if m.training else 5


def rebind(m: Any) -> Any:
    m.mean = m.mean + 1
    return m.mean


def write(m: Any) -> Any:
    m.mean.add_(1)
    return m.mean


def append(m: Any) -> Any:
    m.seen.append(1)
    return len(m.seen)


def tally(m: Any) -> Any:
    m.counts["calls"] += 1
    return m.counts["calls"]


def rotate(m: Any) -> Any:
    m.last.append(len(m.last))
    return sum(m.last)


def forget(m: Any) -> Any:
    return 3 if vars(m).pop("fresh", None) else 1


def register(m: Any) -> Any:
    if "grown" not in m._buffers:
        m.register_buffer("grown", torch.full((), 2.0, dtype=torch.float64), persistent=False)
        return 1
    return m.grown


HABITS: dict[str, Callable[[Any], Any]] = {
    one.__name__: one for one in (count, switch, rebind, write, append, tally, rotate, forget, register)
}  # fmt: skip


class Habit(nn.Module):
    """What it computes depends on what it set before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.w, self.kind, self.mean, self.fresh = linear(), kind, torch.ones(WIDTH), True
        self.seen, self.last = list[int](), collections.deque([1, 2], maxlen=3)
        self.counts: dict[str, int] = collections.defaultdict(int)

    def forward(self, x: Tensor) -> Tensor:
        scale = HABITS[self.kind](self)
        return torch.tanh(self.w(x)) * scale


class Around(nn.Module):
    """Has the habit itself, or leaves it to a layer, and fails when it is told to."""

    def __init__(self, kind: str, where: str) -> None:
        super().__init__()
        first = Habit(kind) if where == "loose" else Stack(Habit(kind))
        self.first, self.last, self.fails = first, nn.ModuleList([linear()]), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fails:
            raise Fails
        found: Tensor = self.last[0](x)
        return found


def failing(kind: str) -> dict[str, float]:
    """How far calls are from the module's, where every second one fails."""
    mesh, found = meshed(), {}
    for where in ("loose", "stage"):
        alone: Any = seeded(lambda where=where: Around(kind, where))  # type: ignore[misc]
        model = functional(copy.deepcopy(alone), min_stage_params=64)
        assert ("first.layers.0" in model.stages) == (where == "stage")
        params = model.shard(mesh, sf.full_shard("shard"))
        shell: Any = model.module
        for turn in range(3):
            shell.fails = True
            with pytest.raises(Fails):
                mapped(sf.grad(lambda p, m=model: m(p, rows()).square().sum()), mesh)(params)
            shell.fails = False
            value, grads = mapped(sf.value_and_grad(lambda p, m=model: m(p, rows()).square().sum()), mesh)(params)
            want, gradient = of_module(alone, lambda call: call(rows()).square().sum())
            named = model.state_dict(grads)
            away = max(abs(float(value - want)), off({k: named[k] for k in gradient}, gradient))
            found[f"{where} {turn}"] = away
    return found


@pytest.mark.parametrize("kind", HABITS)
@pytest.mark.world(2, "processes")
def test_what_a_failed_call_set_is_taken_back(world: World, kind: str) -> None:
    for found in world.with_deadline(120).run(failing, kind):
        assert {case: x for case, x in found.items() if not x < 1e-12} == {}
