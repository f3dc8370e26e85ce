"""Optimizers on parameters, gradients and state that are on disk: the same bits as in memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.shards.layout import is_stage
from shardfn.shards.pieces import is_unit
from shardfn.testing import World
from shardfn.tiers import placing, streaming
from shardfn.tiers.tensors import on_disk
from tests.optimizers import optimizers_named
from tests.refusals import refused

ALL = {"params": "disk", "grads": "disk", "state": "disk"}
TIERS: list[dict[str, Any]] = [{"params": "disk"}, {"grads": "disk"}, {"state": "disk"}, ALL]

OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "sgd": lambda: so.sgd(0.1, momentum=0.9, nesterov=True),
    **optimizers_named(
        "adam, pure, adamw in bfloat16, lion, muon, shampoo, kl_shampoo, sophia, soap, adafactor, lamb, averaged"
    ),
    "adamw": lambda: so.adamw(so.warmup_cosine(1e-2, warmup=1, steps=9), weight_decay=by_name),
    "adamw8bit": lambda: so.adamw8bit(1e-2, weight_decay=by_name),
    "lion8bit": lambda: so.lion8bit(1e-3),
    "clipped": lambda: so.chain(so.clip_by_global_norm(0.1), so.clip_by_value(0.01), so.adamw(1e-2)),
    "torch's": lambda: so.from_torch(torch.optim.AdamW, lr=1e-2),
    "in several steps": lambda: so.multi_steps(so.adamw(1e-2), 2),
}


def by_name(path: str, shape: tuple[int, ...]) -> float:
    return 0.1 if len(shape) > 1 else 0.0


def parameters() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {
        "blocks": [{"w": torch.randn(37, 53, generator=g), "b": torch.randn(41, generator=g)} for _ in range(3)],
        "head": {"w": torch.randn(300, 29, generator=g), "scale": torch.tensor(2.0)},
        "wide": {"w": torch.randn(64, 64, generator=g, dtype=torch.float64)},
    }


def trained(mesh: Any, strategy: Any, make: Callable[[], so.Optimizer]) -> tuple[Any, Any, Any]:
    """Whole parameters after some steps; the state, and shards."""
    optimizer = make()
    params = sf.shard(parameters(), mesh, strategy)
    state = optimizer.init(params)

    def loss_fn(ps: Any, number: int) -> Tensor:
        return sum(
            (twice(p, torch.tensor(1.0 + number)).double() for p in optree.tree_leaves(ps, is_leaf=is_stage)),
            start=torch.zeros((), dtype=torch.float64),
        )

    for number in range(3):
        _, grads = sf.value_and_grad(loss_fn)(params, number)
        params, state = optimizer.step(params, grads, state)
    return sf.unshard(params), state, params


@sf.stage
def twice(p: Any, x: Tensor) -> Tensor:
    return sum(((w * x).sin().sum().double() for w in optree.tree_leaves(p)), start=torch.zeros(()).double())


def differences(folder: str, names: list[str]) -> list[str]:
    """Which optimizers end elsewhere than in memory, or leave something in memory, under which strategy."""
    mesh, wrong = sf.make_mesh(device="cpu", scratch=folder, data=-1), []
    streaming.CHUNK = 1024  # so that there are several
    for name in names:
        for kind, strategy in {
            "full": sf.full_shard("data"),
            "zero1": sf.strategies.zero1("data"),
            "ddp": sf.ddp("data"),
        }.items():
            want, *_ = trained(mesh, strategy, OPTIMIZERS[name])
            for tiers in TIERS if kind == "full" else [ALL]:
                got, state, params = trained(mesh, strategy.with_tiers(**tiers), OPTIMIZERS[name])
                if not all(map(torch.equal, optree.tree_leaves(got), optree.tree_leaves(want))):
                    wrong.append(f"{name}, {kind}, {tiers}: other numbers")
                for what, tree in (("params", params), ("state", state)):
                    nodes = [x for x in optree.tree_leaves(tree, is_leaf=is_unit) if is_unit(x)]
                    if not all(on_disk(x.values) is (what in tiers) for x in nodes if x.values.numel()):
                        wrong.append(f"{name}, {kind}, {tiers}: {what} are elsewhere")
    return wrong


@pytest.mark.world(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_the_same_wherever_things_are_kept(world: World, name: str, tmp_path: Path) -> None:
    assert world.with_deadline(240).run(differences, str(tmp_path), [name]) == [[], []]


def refusals(folder: str) -> dict[str, str]:
    mesh = sf.make_mesh(device="cpu", scratch=folder, data=-1)
    params = sf.shard(parameters(), mesh, sf.full_shard("data").with_tiers(state="disk"))
    adamw = so.adamw(1e-2)
    state = adamw.init(params)
    moved = optree.tree_map(lambda x: x * 2 if isinstance(x, Tensor) else x, state)
    return {
        "in memory": refused(lambda: adamw.step(params, params, moved), ValueError),
        "blocks": refused(lambda: so.from_torch(torch.optim.AdamW, block=8, lr=0.1).init(params), ValueError),
    }


@pytest.mark.world(2)
def test_a_state_that_has_left_its_tier_is_refused(world: World, tmp_path: Path) -> None:
    for said in world.run(refusals, str(tmp_path)):
        assert said["in memory"] == (
            "step: the state of 'blocks.0' is in memory, and the strategy keeps it on disk: what maps over a tree "
            "makes new tensors. Put it back: state = shardfn.shards.to_tier(state, 'disk')"
        )
        assert (
            "with block=8 its state stays on the device, and the strategy keeps that of blocks.0 on disk"
            in (said["blocks"])
        )


def one_disk_is_full(folder: str) -> str:
    mesh = sf.make_mesh(device="cpu", scratch=folder, data=-1)
    params = sf.shard(parameters(), mesh, sf.full_shard("data").with_tiers(state="disk"))
    if mesh.get_rank() == 1:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        return refused(lambda: so.adamw(1e-2).init(params), (OSError, ValueError))
    finally:
        if mesh.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.world(2)
def test_every_rank_hears_of_a_disk_that_is_full(world: World, tmp_path: Path) -> None:
    other, own = world.run(one_disk_is_full, str(tmp_path))
    assert f"MB of state in {str(tmp_path)!r} failed: File too large" in own
    assert f"rank 1 failed: [Errno 27] making room for 0.0 MB of state in {str(tmp_path)!r} failed" in other


def rooms(folder: str) -> tuple[int, int, int]:
    """Bytes of the file of gradients: made with the parameters, after a step, and what gradients take."""
    mesh = sf.make_mesh(device="cpu", scratch=folder, data=-1)
    params = sf.shard(parameters(), mesh, sf.full_shard("data").with_tiers(grads="disk"))
    file = placing.file_of(mesh, "grads")
    before = file.nbytes
    used = 0
    for _ in range(3):
        _, grads = sf.value_and_grad(lambda ps: sum(twice(p, torch.ones(())) for p in ps["blocks"]))(params)
        used = sum(x.nbytes for x in optree.tree_leaves(grads) if on_disk(x))
        del grads  # two at a time would take twice the room
    return before, file.nbytes, used


@pytest.mark.world(2)
def test_room_for_gradients_is_made_with_the_parameters(world: World, tmp_path: Path) -> None:
    for before, after, used in world.run(rooms, str(tmp_path)):
        assert after == before > used > 0


def mapped(folder: str) -> tuple[bool, bool]:
    """Whether parameters that were mapped over are on disk, before a step and after it."""
    mesh = sf.make_mesh(device="cpu", scratch=folder, data=-1)
    params = sf.shard(parameters(), mesh, sf.full_shard("data").with_tiers(params="disk"))
    optimizer = so.adamw(1e-2)
    state, params = optimizer.init(params), optree.tree_map(lambda x: x * 2, params)
    before = any(map(on_disk, optree.tree_leaves(params)))
    params, state = optimizer.step(params, params, state)
    return before, all(on_disk(x) for x in optree.tree_leaves(params) if x.numel())


@pytest.mark.world(2)
def test_parameters_that_were_mapped_over_are_on_disk_after_a_step(world: World, tmp_path: Path) -> None:
    assert world.run(mapped, str(tmp_path)) == [(False, True)] * 2
