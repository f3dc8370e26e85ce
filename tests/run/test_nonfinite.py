"""A number that is not finite ends a run on all ranks, and the stage that made it first is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.testing import World, world
from tests.models import layer as block
from tests.refusals import told
from tests.run.toy import Rows, begin, mesh_here, step_of


class Infinite(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return torch.full_like(cotangents[0], torch.inf)


def wrong(where: str, rank: int) -> Any:
    """A block whose numbers go wrong on one rank, when a row begins with 100."""

    def layer(p: Any, x: Tensor) -> Tensor:
        mine = bool((x[:, 0] == 100).any()) and dist.get_rank() == rank
        y = block(p, x)
        if where == "forward" and mine:
            return torch.log(-y.square() - 1)
        if where == "backward" and mine:
            return block({"w": p["w"], "b": Infinite.apply(p["b"])}, x)
        return y

    return layer


def run(folder: Path | None, where: str, rank: int, bad: int) -> str:
    """What a run says whose rows begin with 100 at a step."""
    mesh = mesh_here()

    def marked(start: int) -> Any:
        for n, rows in enumerate(Rows(mesh)(start), start):
            rows = rows.clone()
            if n == bad:
                rows[:, 0] = 100
            yield rows

    step = step_of(mesh, stage=wrong(where, rank))

    def user(state: Any, rows: Tensor) -> Any:
        state, metrics = step(state, rows)
        if where == "outside" and rows[0, 0] == 100 and dist.get_rank() == rank:
            metrics["loss"] = metrics["loss"] / 0
        return state, metrics

    more: dict[str, Any] = {} if folder is None else {"save": folder, "save_every": 4, "keep_last": 2}
    return told(lambda: sf.run.loop(user, begin(mesh), marked, steps=20, report=[], **more))


@pytest.mark.parametrize("world", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_first_stage_is_named_with_its_rank_on_every_rank(world: World, where: str, tmp_path: Path) -> None:
    for rank, bad in ((0, 5), (world.size - 1, 7)):
        folder = tmp_path / f"{rank} {bad}"
        messages = world.run(run, folder, where, rank, bad)
        assert len(set(messages)) == 1, messages
        said = f"step {bad + 1}, stage layer ('blocks.0'), on rank {rank}: the {where} made "
        assert said in messages[0]
        assert messages[0].startswith("FloatingPointError: sf.run.loop: not finite at step ")
        assert f"Run again from {folder}/step-00000004, with each stage watched" in messages[0]
        assert {one.name for one in folder.iterdir()} == {"step-00000000", "step-00000004"}
        if where == "forward":
            assert "nan in float64" in messages[0]
            assert "of finite inputs and parameters" in messages[0]
        else:
            assert "made gradients of blocks.0.b that are not finite, of a finite gradient" in messages[0]


@pytest.mark.world(2)
def test_what_no_stage_made_is_said_to_be_outside(world: World, tmp_path: Path) -> None:
    messages = world.run(run, tmp_path, "outside", 1, 6)
    assert len(set(messages)) == 1
    assert "at step 7 (rank 1: loss is inf)" in messages[0]
    assert "step 7, on rank 1, outside of the stages, loss is inf, though what they made was finite" in messages[0]


@pytest.mark.world(2)
def test_without_checkpoints_the_parameters_are_named_and_what_to_do(world: World) -> None:
    messages = world.run(run, None, "forward", 0, 2)
    assert len(set(messages)) == 1
    assert "not finite at step 3 (rank 0: loss is nan)" in messages[0]
    assert "the state now has nan in state.params.blocks.0." in messages[0]
    assert "Pass save=folder" in messages[0]
    assert "sf.debug(nan=True)" in messages[0]


def updates(folder: Path, end: int, more: dict[str, Any]) -> str:
    """The loss stays finite at the step whose update makes the state nan."""

    def step(state: Tensor, n: int) -> Any:
        loss = state.nan_to_num().sum()
        return (state * torch.nan if n == 5 else state + 1), {"loss": loss}

    start, name = torch.zeros(3), lambda start: iter(range(start, 99))
    return told(lambda: sf.run.loop(step, start, name, steps=end, save=folder, report=[], **more))


def test_a_state_with_nan_is_never_saved_though_the_loss_was_finite(tmp_path: Path) -> None:
    message = updates(tmp_path, 9, {"save_every": 3, "keep_last": 1})
    assert "FloatingPointError" in message
    assert "at step 6 (rank 0: the state has nan in state)" in message
    assert "step 6, on rank 0, the update made nan in state, though no stage did" in message
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000003"]


def test_a_state_with_nan_before_the_first_step_is_refused(tmp_path: Path) -> None:
    start = {"w": torch.tensor([1.0, torch.nan]), "mask": torch.tensor([-torch.inf])}
    message = told(
        lambda: sf.run.loop(lambda s, b: (s, {}), start, lambda n: iter([]), steps=1, save=tmp_path, report=[])
    )
    assert message == "FloatingPointError: sf.run.loop: the state has nan before the first step, in state.w"
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_happen_again_is_said(tmp_path: Path) -> None:
    runs: list[int] = []

    def step(state: int, n: int) -> Any:
        runs.append(n)
        return state, {"loss": torch.tensor(torch.nan if runs.count(3) == 1 and n == 3 else 1.0)}

    batches: Any = lambda start: range(start, 99)  # noqa: E731
    message = told(lambda: sf.run.loop(step, 0, batches, steps=9, save=tmp_path, save_every=2, report=[]))
    assert "all numbers were finite then, so the step does not give the same twice" in message
    assert sf.checkpoint.latest(tmp_path) == tmp_path / "step-00000002"


def from_a_generator(folder: Path) -> str:
    def step(state: int, n: Tensor) -> Any:
        return state, {"loss": torch.nan if n == 3 else 1.0}

    loader = sf.run.check_loader((torch.tensor([n]) for n in range(9)), sf.make_mesh(device="cpu", data=1), ())
    return told(lambda: sf.run.loop(step, 0, loader, steps=9, save=folder, save_every=2, report=[]))


def test_what_is_not_finite_is_said_also_where_its_batches_do_not_come_again(tmp_path: Path) -> None:
    (message,) = world(1, "alone").run(from_a_generator, tmp_path)
    assert "FloatingPointError: sf.run.loop: not finite at step 4 (rank 0: loss is nan)" in message
    assert (
        "with each stage watched: that failed, by ValueError: sf.run.check_loader: the loader is a generator" in message
    )


def test_only_the_loss_has_to_be_finite_where_there_is_one() -> None:
    def step(state: int, n: int) -> Any:
        return state, {"loss": 1.0, "worst": torch.tensor(torch.inf)}

    assert sf.run.loop(step, 0, range(9), steps=5, report=[])[1].step == 5
    message = told(
        lambda: sf.run.loop(lambda s, n: (s, {"perplexity": 1.0, "norm": torch.inf}), 0, range(9), steps=5, report=[])
    )
    assert "not finite at step 1 (rank 0: norm is inf)" in message
