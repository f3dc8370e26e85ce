"""What a run finds out goes on with it, wherever its mesh lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn import P
from shardfn.testing import World
from tests.faults import forget, out
from tests.models import layer as block
from tests.refusals import told
from tests.run.toy import OPTIMIZER, Rows, begin, step_of, whole

WIDTH, ROWS = 6, 16


def halves() -> DeviceMesh:
    """Of each two ranks one mesh."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("half", "shard"))
    return mesh["shard"]


def by_halves(folder: Path) -> Any:
    mesh, rank = halves(), dist.get_rank()

    def batches(start: int) -> Iterator[Tensor]:
        for n in range(start, 9):
            rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
            yield rows.chunk(2)[mesh.get_local_rank()]

    def run(end: int, name: str) -> tuple[int, list[Tensor]]:
        state, run = sf.run.loop(step_of(mesh), begin(mesh), batches, steps=end, save=folder / name, report=[])
        return run.start, whole(state)

    both = f"half{rank // 2}"
    starts = [run(2, both)[0]]
    dist.barrier()
    if rank < 2:
        starts.append(run(3, both)[0])  # the other half does something else
    dist.barrier()
    start, apart = run(4, both)
    _, at_once = run(4, f"{both} at once")
    return [*starts, start], all(map(torch.equal, apart, at_once))


@pytest.mark.world(4)
def test_a_run_on_some_of_the_ranks_goes_on_without_the_others(world: World, tmp_path: Path) -> None:
    found = world.run(by_halves, tmp_path)
    assert found == [([0, 2, 3], True)] * 2 + [([0, 2], True)] * 2


def fitted(folder: Path, ends: list[int], bad: int, fresh: bool = True, micro: Any = "auto") -> tuple[Any, ...]:
    """The parts in which each step ran, losses and parameters, where rank 1 runs out of memory at a step."""
    mesh = sf.make_mesh(device="cpu", shard=2)
    layer = sf.stage(block)
    used: list[int] = []
    losses: list[float] = []
    source = torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P("shard"), ...), out_specs=...)
    def trained(params: Any, moments: Any, rows: Tensor, n: int) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            for k, p in enumerate(sf.layers(params["blocks"])):
                if k == 1 and (n, mesh.get_rank(), len(x)) == (bad, 1, 8):
                    raise out()
                x = layer(p, x)
            x = torch.nn.functional.dropout(x, 0.2)
            return sf.psum((x - 0.5).square().sum(), "shard") / ROWS

        how = micro(n) if callable(micro) else micro
        run = sf.accumulate(loss, rows, micro=how)
        value, grads = run(params)
        used.append(run.micro)
        return *OPTIMIZER.step(params, grads, moments), value

    def step(state: Any, rows: Tensor) -> Any:
        params, moments, loss = trained(state["params"], state["moments"], rows, state["seen"])
        return {"params": params, "moments": moments, "seen": state["seen"] + 1}, {"loss": loss}

    state = begin(mesh)
    for end in ends:
        if fresh:
            forget()
        batches = sf.run.batches(source, mesh, "shard", ROWS, seed=1, remainder="wrap")
        state, run = sf.run.loop(step, begin(mesh), batches, steps=end, save=folder, save_every=2, report=[])
        losses += run.metrics["loss"].values()
    return used, losses, whole(state)


def in_parts(folder: Path) -> list[Any]:
    def same(one: Any, other: Any) -> bool:
        return one[1] == other[1] and all(map(torch.equal, one[2], other[2]))

    once = fitted(folder / "once", [8], 3)
    by_number = fitted(folder / "by number", [8], -1, micro=lambda n: 1 if n < 3 else 2)
    apart = fitted(folder / "apart", [6, 8], 3)
    # Another run of the same process knows more than that one did at its step 2.
    earlier = fitted(folder / "earlier", [2], 3)[0] + fitted(folder / "other", [4], 3)[0]
    earlier += fitted(folder / "earlier", [4], -1, fresh=False)[0]
    return [once[0], same(once, by_number), apart[0], same(once, apart), earlier]


@pytest.mark.world(2)
def test_a_rank_that_runs_out_of_memory_in_a_run_goes_on_and_is_remembered(world: World, tmp_path: Path) -> None:
    for once, by_number, apart, same, earlier in world.run(in_parts, tmp_path):
        assert once == apart == [1, 1, 1, 2, 2, 2, 2, 2]
        assert by_number
        assert same
        assert earlier == [1, 1, 1, 1, 1, 2, 1, 1]


def other_forms(folder: Path) -> list[str]:
    mesh = sf.make_mesh(device="cpu", shard=2)
    state = begin(mesh)
    sf.checkpoint.save(folder / "run" / "step-00000002", {"state": state, "step": 2, "run": {"seed": 0, "batches": ""}})
    return [told(lambda: sf.run.loop(step_of(mesh), state, Rows(mesh), steps=4, save=folder / "run", report=[]))]


@pytest.mark.world(2)
def test_a_checkpoint_of_another_form_is_said_to_be_one(world: World, tmp_path: Path) -> None:
    for (said,) in world.run(other_forms, tmp_path):
        assert said.startswith("CheckpointError: load ")
        assert (
            "not of sf.run.loop, or is of a different version of shardfn: it has no run.parts and no run.best." in said
        )
