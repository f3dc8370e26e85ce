"""Plans made by hand."""

from __future__ import annotations

from dataclasses import dataclass

from shardfn.plan.plan import StepPlan
from shardfn.plan.schedule import Allocation, Held, Work

GATHERS, REDUCTIONS = 1, 2


@dataclass(frozen=True)
class At:
    """When each work begins and ends."""

    begins: tuple[float, ...]
    ends: tuple[float, ...]


def stack(layers: int = 126, whole: int = 6_400_000_000, axis: tuple[str, ...] = ("shard",)) -> StepPlan:
    """A step of equal layers, fully sharded over 8 ranks, with remat: as a plan of 405 billion parameters has it."""
    works: list[Work] = []
    held: list[Held] = []
    now = {"parameters": layers * whole // 8, "optimizer": layers * whole // 2, "gathered": 2 * whole}
    now |= {"reducing": 0, "gradients": 0, "activations": 0, "transients": 0}

    def work(kind: str, **facts: object) -> int:
        works.append(Work(kind, **facts))  # type: ignore[arg-type]
        return len(works) - 1

    def holds(**more: int) -> None:
        now.update({kind: now[kind] + nbytes for kind, nbytes in more.items()})
        held.append(Held(len(works) - 1, dict(now)))

    def gather(i: int, phase: str) -> int:
        return work(
            "all_gather", stage=f"layers.{i}", phase=phase, stream=GATHERS, axis=axis, ranks=8, dtype="bfloat16",
            sent=whole // 8, scheduled=True, where="model.py:40",
        )  # fmt: skip

    def compute(i: int, phase: str, flops: int, *after: int) -> int:
        return work(
            "compute", stage=f"layers.{i}", phase=phase, after=after, launches=40, flops={"bfloat16": flops},
            moved=2 * whole, where="model.py:44",
        )  # fmt: skip

    for i in range(layers):
        compute(i, "forward", 10**13, gather(i, "forward"))
        holds(activations=64_000_000, transients=0 if i else 500_000_000)
    for i in reversed(range(layers)):
        compute(i, "recompute", 10**13, gather(i, "backward"))
        holds(activations=700_000_000)
        compute(i, "backward", 2 * 10**13)
        holds(gradients=whole // 8, activations=-764_000_000, reducing=0 if i < layers - 1 else 2 * whole)
        work(
            "reduce_scatter", stage=f"layers.{i}", phase="backward", stream=REDUCTIONS, axis=axis, ranks=8,
            dtype="float32", sent=whole // 8, scheduled=True, after=(len(works) - 1,), where="model.py:40",
        )  # fmt: skip
    work("compute", phase="update", launches=14, moved=whole, where="train.py:9")
    holds(reducing=-2 * whole, transients=100_000_000)
    peak = max(held, key=lambda one: one.total)
    rows = [
        ("optimizer", "state.mu", "", 2 * layers), ("parameters", "params", "", layers),
        ("gathered", "model.py:40", "layers.7", 2), ("activations", "model.py:46", f"layers.{layers - 1}", 12),
    ]  # fmt: skip
    largest = tuple(Allocation(k, where, stage, n, max(1, peak.kinds[k])) for k, where, stage, n in rows)
    return StepPlan(
        "step", {"replica": 128, "shard": 8}, 0, tuple(works), tuple(held), {}, {}, peak, largest, layers * whole // 2
    )  # fmt: skip


def taking(plan: StepPlan) -> At:
    """Times in which each stream runs its works one after another, once those before have ended."""
    free: dict[int, float] = {}
    begin: list[float] = []
    end: list[float] = []
    for work in plan.works:
        at = max([free.get(work.stream, 0.0), *(end[i] for i in work.after)])
        took = sum(work.flops.values()) / 4e14 + (work.sent / 4e10 if work.kind != "compute" else 1e-4)
        begin.append(at)
        end.append(at + took)
        free[work.stream] = at + took
    return At(tuple(begin), tuple(end))
