"""Micro-batches that fit: whatever runs out of memory, wherever, runs again in smaller parts, and exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import World
from tests.models import DATA, STRATEGIES, normal, plainly, residual, squares
from tests.reference import worst

D, DEPTH, ROWS = 4, 3, 8
Fault = tuple[int, int, str, int, int]  # the rank, step, place and micro-batch, and the most parts, in which it happens


class Faults:
    """Runs out of memory where it is told to."""

    def __init__(self, faults: Sequence[Fault], rank: int, error: Callable[[], Exception]) -> None:
        self.mine, self.error = [fault[1:] for fault in faults if fault[0] == rank], error
        self.step = self.batch = self.parts = self.met = 0

    def begin(self, x: Tensor, whole: Tensor) -> None:
        """A micro-batch of a batch."""
        self.batch = 1 if x.data_ptr() == whole.data_ptr() else self.batch + 1
        self.parts = round(len(whole) / len(x))

    def at(self, place: str) -> None:
        for step, where, batch, parts in self.mine:
            if (step, where, batch) == (self.step, place, self.batch) and self.parts <= parts:
                self.met += 1
                raise self.error()

    def passing(self, place: str, x: Tensor) -> Tensor:
        """`x`, which may not come through, forward or backward."""
        self.at(f"forward {place}")
        made: Tensor = _Passing.apply(x, self, place)  # type: ignore[no-untyped-call]
        return made


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, faults: Faults, place: str) -> Tensor:
        ctx.faults, ctx.place = faults, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:  # type: ignore[override]
        ctx.faults.at(f"backward {ctx.place}")
        return ct, None, None


def out() -> Exception:
    return torch.OutOfMemoryError("pretended: out of memory")


def net(stage: Any, ps: Any, x: Tensor, faults: Faults | None) -> Tensor:
    """Residual blocks with dropout; faults are in the stages, and between them."""
    for k, p in enumerate(sf.layers(ps["blocks"])):

        def block(p: Any, x: Tensor, k: int = k) -> Tensor:
            y = residual(p, x)
            return y if faults is None else faults.passing(f"in {k}", y)

        x = stage(block)(p, x)
        if faults is not None:
            x = faults.passing(f"after {k}", x)
    return x


def params() -> Any:
    return {"blocks": squares(DEPTH), "unused": normal(3, seed=21)}


def trained(
    sizes: dict[str, int],
    strategy: str,
    micro: Any,
    faults: Sequence[Fault] = (),
    steps: int = 1,
    error: Callable[[], Exception] = out,
    dropout: float = 0.0,
    options: dict[str, Any] | None = None,
    scoped: bool = True,
    **how: Any,
) -> tuple[Any, Any, list[int], int]:
    """Losses, the parameters in the end, in how many parts each step ran, and how many faults were met."""
    mesh = sf.make_mesh(device="cpu", **sizes)
    rank, n = mesh.get_rank(), mesh.size()
    found, rows, used = Faults(faults, rank, error), normal(n, ROWS, D, seed=50)[rank], []
    ps = sf.shard(params(), mesh, STRATEGIES[strategy])
    torch.manual_seed(rank)

    def step(ps: Any, x: Tensor) -> Any:
        def loss(ps: Any, part: Tensor) -> Any:
            found.begin(part, x)
            part = torch.nn.functional.dropout(part, dropout)
            y = net(lambda f: sf.stage(f, **options or {}), ps, part, found)
            total = y.square().sum() / (n * ROWS)
            found.at("loss")
            return (total, part.sum()) if how.get("has_aux") else total

        run = sf.accumulate(loss, x, micro=micro, **how)
        value, grads = run(ps)
        used.append(run.micro)
        return value, grads

    if scoped:
        step = sf.shard_map(step, mesh=mesh, in_specs=(..., ...), out_specs=(..., ...))
    values = []
    for found.step in range(steps):
        value, grads = step(ps, rows)
        values.append(value)
        ps = optree.tree_map(lambda p, g: p - 0.1 * g.reshape(p.shape), ps, grads) if same(ps, grads) else ps
    return values, (sf.unshard(ps), grads), used, found.met


def same(ps: Any, grads: Any) -> bool:
    """Whether gradients are cut as their parameters are."""
    pairs = zip(optree.tree_leaves(ps), optree.tree_leaves(grads), strict=True)
    return all(p.shape == g.shape for p, g in pairs)


def compared(sizes: dict[str, int], strategy: str, faults: Sequence[Fault], steps: int = 2, **how: Any) -> Any:
    """Parts and faults of a run that runs out of memory; whether it is, bit for bit, the run with as many parts."""
    error = how.pop("error", out)
    values, end, used, met = trained(sizes, strategy, "auto", faults, steps, error=error, **how)
    again = [trained(sizes, strategy, n, (), steps, **how) for n in sorted(set(used))]
    equal = used[-1] != used[0] or identical((values, end), again[0][:2])
    return used, met, equal


def identical(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))


def test_x(): pass


@pytest.mark.world(2)
@pytest.mark.parametrize("place", ["forward in 1", "backward in 1", "forward after 2", "backward after 0", "loss"])
def test_quick(world: World, place: str) -> None:
    print(world.within(30).run(compared, {"replica": 1, "shard": 2}, "full_shard", [(1, 0, place, 1, 1)]))
