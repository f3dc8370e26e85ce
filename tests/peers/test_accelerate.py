"""Behaviors that Accelerate's tests check: accumulation, batches that fit, samplers, reductions, mixed precision."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop
from shardfn.testing import world
from tests.models import DATA, distance, drawn
from tests.peers.modules import ROWS, WIDTH, filled, mapped, residuals, rows, setting

LR = 0.05
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed: pip install accelerate"
)


def one_set() -> Any:
    module, (mesh, mine) = filled(residuals()), setting()
    plain = copy.deepcopy(module)
    model = interop.functional(module, min_stage_params=8)
    return mesh, mine, model, model.shard(mesh, sf.full_shard(DATA)), plain


def mean_pair(model: Any) -> Any:
    """A loss by its total and count over all ranks."""
    return lambda ps, x: (sf.psum(model(ps, x).square().sum(), DATA), sf.psum(torch.tensor(x.numel()), DATA))


# --- beside Accelerate itself, on one process ---


def of_accelerate(steps: int, micro: int, limit: float | None, by_value: bool) -> dict[str, Tensor]:
    """Parameters after training by an Accelerator on one process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=micro, cpu=True)
    module = filled(residuals())
    module, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=LR))
    for step in range(steps):
        for part in rows(step).chunk(micro):
            with accelerator.accumulate(module):
                accelerator.backward(module(part).square().mean())
                if accelerator.sync_gradients and limit is not None:
                    clip = accelerator.clip_grad_value_ if by_value else accelerator.clip_grad_norm_
                    clip(module.parameters(), limit)
                optimizer.step()
                optimizer.zero_grad()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return {name: p.detach() for name, p in module.named_parameters()}


def of_shardfn(steps: int, micro: int, limit: float | None, by_value: bool) -> dict[str, Tensor]:
    mesh, mine, model, params, _ = one_set()
    clip = so.clip_by_value if by_value else so.clip_by_global_norm
    optimizer = so.adamw(LR) if limit is None else so.chain(clip(limit), so.adamw(LR))
    state = optimizer.init(params)
    run = mapped(lambda ps, x: sf.accumulate(mean_pair(model), x, micro=micro)(ps), mesh)
    for step in range(steps):
        params, state = optimizer.step(params, run(params, mine(rows(step)))[1], state)
    return model.state_dict(params)


TRAINED: dict[str, tuple[int, int, float | None, bool]] = {
    "gradient accumulation": (3, 2, None, False),
    "no accumulation": (3, 1, None, False),
    "accumulation of single rows": (2, 4, None, False),
    "clipped by value after accumulation": (3, 2, 0.01, True),
    "clipped by norm after accumulation": (3, 2, 0.1, False),
}


@needs_accelerate
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_accelerate(name: str) -> None:
    want = of_accelerate(*TRAINED[name])
    slack = 1e-5 if "norm" in name else 1e-12  # torch adds 1e-6 to the norm
    assert all(distance(got, want) < slack for got in world(4, "threads").run(of_shardfn, *TRAINED[name]))


# --- accumulation ---


def an_incomplete_accumulation_weighs_rows_alike() -> None:
    """The last micro-batch has one row, the others have more."""
    mesh, mine, model, params, plain = one_set()
    run = mapped(lambda ps, x: sf.accumulate(mean_pair(model), x.split([2, 1, 1]))(ps), mesh)
    value, slopes = run(params, mine(rows()))
    wanted = plain(rows()).square().mean()
    wanted.backward()
    assert abs(value - wanted.detach()) < 1e-12
    assert distance(model.state_dict(slopes), {name: p.grad for name, p in plain.named_parameters()}) < 1e-12


def schedules_advance_once_for_all_micro_batches() -> None:
    ps, optimizer = {"w": torch.zeros(1).double()}, so.multi_steps(so.sgd(lambda step: 1.0 * step), 2)
    state, seen = optimizer.init(ps), []
    for _ in range(6):
        ps, state = optimizer.step(ps, {"w": torch.full((1,), -0.5).double()}, state)
        seen.append(ps["w"].item())
    assert seen == [0, 1, 1, 3, 3, 6]


# --- find_executable_batch_size ---


def fitted(room: dict[int, int], error: type[Exception] = torch.OutOfMemoryError) -> tuple[int, float]:
    """The number of parts in which a batch fits where ranks have room for so many rows, and how far its gradient is."""
    mesh, mine, model, params, plain = one_set()

    def loss(ps: Any, x: Tensor) -> Tensor:
        if len(x) > room.get(mesh.get_rank(), ROWS):
            raise error(f"{len(x)} rows")
        return sf.psum(model(ps, x).square().sum(), DATA) / (ROWS * WIDTH)

    def step(ps: Any, x: Tensor) -> Any:
        run = sf.accumulate(loss, x, micro="auto")
        slopes = run(ps)[1]
        return run.micro, slopes

    micro, slopes = mapped(step, mesh, out=...)(params, mine(rows()))
    plain(rows()).square().mean().backward()
    want = {name: p.grad for name, p in plain.named_parameters()}
    return micro, distance(model.state_dict(slopes), want)


FITS: dict[str, tuple[dict[int, int], int]] = {
    "all of it": ({}, 1),
    "one rank has room for half": ({1: 2}, 2),
    "one rank has room for a row": ({3: 1}, 4),
    "ranks have room for different numbers": ({0: 2, 1: 3, 2: 1}, 4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FITS)
def test_a_batch_is_cut_until_it_fits(name: str) -> None:
    room, parts = FITS[name]
    for micro, off in world(4).run(fitted, room):
        assert micro == parts
        assert off < 1e-12


@pytest.mark.sampled(0)
def test_no_room_for_a_row_is_an_error_on_every_rank() -> None:
    for error in world(4).errors(fitted, {2: 0}):
        assert "one row at a time" in str(error)


@pytest.mark.sampled(0)
def test_another_error_is_not_tried_again() -> None:
    errors = world(4).errors(fitted, {2: 0}, ValueError)
    assert "0 rows" not in str(errors[2])
    assert "4 rows" in str(errors[2])


# --- samplers and loaders ---

SOURCE = {"row": torch.arange(22), "x": torch.arange(22).double()}


def batches(size: int = 8, **options: Any) -> tuple[Any, Any]:
    mesh = sf.make_mesh(device="cpu", replica=2, shard=2)
    return mesh, sf.run.batches(SOURCE, mesh, DATA, size, 3, **options)


def all_rows(batch: Any) -> list[int]:
    """Of all ranks, in their order."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, batch["row"][batch["mask"]].tolist() if "mask" in batch else batch["row"].tolist())
    return [row for part in parts for row in part]


def an_epoch_has_every_row_once() -> None:
    _, made = batches(remainder="pad", epochs=2)
    rows_of_all = [row for batch in made for row in all_rows(batch)]
    assert sorted(rows_of_all[:22]) == sorted(rows_of_all[22:]) == [*range(22)]
    assert rows_of_all[:22] != rows_of_all[22:]


def skipping_first_batches_is_resuming() -> None:
    _, made = batches(remainder="wrap", epochs=3)
    whole = [all_rows(batch) for batch in made]
    for start in (1, 4, 7):
        assert [all_rows(batch) for batch in made(start)] == whole[start:]


def the_order_depends_on_the_seed_and_not_on_ranks() -> None:
    mesh, made = batches()
    first = [all_rows(batch) for batch, _ in zip(made, range(4), strict=False)]
    alone = sf.run.batches(SOURCE, mesh, (), 8, 3)
    assert first == [batch["row"].tolist() for batch, _ in zip(alone, range(4), strict=False)]
    other = sf.run.batches(SOURCE, mesh, (), 8, 4)
    assert first != [batch["row"].tolist() for batch, _ in zip(other, range(4), strict=False)]


def every_rank_has_as_many_batches_and_rows() -> None:
    for last, count, size in (("drop", 2, 2), ("pad", 3, 2), ("wrap", 3, 2)):
        _, made = batches(remainder=last, epochs=1)
        assert [len(batch["row"]) for batch in made] == [size] * count, last


def without_shuffling_rows_are_in_order() -> None:
    _, made = batches(shuffle=False, remainder="pad", epochs=1)
    assert [row for batch in made for row in all_rows(batch)] == [*range(22)]


def metrics_leave_out_what_pads_the_last_batch() -> None:
    mesh, made = batches(remainder="pad", epochs=1)
    total = sf.shard_map(
        lambda b: sf.psum(torch.stack([(b["x"] * b["mask"]).sum(), b["mask"].sum().double()]), DATA),
        mesh=mesh, in_specs=..., out_specs=P(),
    )  # fmt: skip
    value, count = torch.stack([total(batch) for batch in made]).sum(0).tolist()
    assert (value / count, count) == (10.5, 22)


# --- reductions, and what is random ---


def gather_reduce_and_broadcast() -> None:
    mesh, mine = setting()
    x = mine(rows())
    run = lambda f, out: sf.shard_map(f, mesh=mesh, in_specs=P(DATA), out_specs=out)(x)  # noqa: E731
    assert distance(run(lambda x: sf.all_gather(x, DATA, to="invariant"), P()), rows()) == 0
    assert distance(run(lambda x: sf.psum(x, DATA), P()), rows().view(4, 4, WIDTH).sum(0)) < 1e-14
    assert distance(run(lambda x: sf.pmean(x, DATA), P()), rows().view(4, 4, WIDTH).mean(0)) < 1e-14
    first = run(lambda x: sf.psum(x * ((sf.axis_index(DATA)) == 0), DATA), P())
    assert distance(first, rows()[:4]) == 0


def local_sgd_averages_parameters_now_and_then() -> None:
    """Ranks train by themselves for two steps, and then take the mean."""
    mesh, mine = setting()
    start, optimizer = drawn(0)(WIDTH, 2), so.sgd(0.1)

    def alone(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(2):
            w = w - 0.1 * 2 / x.numel() * x.T @ (x @ w)
        return w

    def step(w: Tensor, x: Tensor) -> Tensor:
        ps, state = {"w": sf.pvary(w, DATA)}, optimizer.init({"w": w})
        for _ in range(2):
            slopes = sf.grad(lambda p: (x @ p["w"]).square().sum() / x.numel())(ps)
            ps, state = optimizer.step(ps, slopes, state)
        return sf.pmean(ps["w"], DATA)

    got = sf.shard_map(step, mesh=mesh, in_specs=(P(), P(DATA)), out_specs=P())(start.clone(), mine(rows()))
    want = torch.stack([alone(start, x) for x in rows().chunk(4)]).mean(0)
    assert distance(got, want) < 1e-12


def a_step_in_float16_that_overflows_is_skipped() -> None:
    mesh, _, model, params, _ = one_set()
    before, optimizer = model.state_dict(params), so.dynamic_loss_scale(so.adamw(LR), scale=8.0)
    state = optimizer.init(params)
    slopes = optree.tree_map(torch.ones_like, params)
    if mesh.get_rank() == 1:
        optree.tree_leaves(slopes)[0][0] = float("inf")
    params, state = optimizer.step(params, slopes, state)
    assert (state["skipped"], state["scale"]) == (1, 4.0)
    assert distance(model.state_dict(params), before) == 0


BEHAVIORS = [
    an_incomplete_accumulation_weighs_rows_alike, schedules_advance_once_for_all_micro_batches,
    an_epoch_has_every_row_once, skipping_first_batches_is_resuming, the_order_depends_on_the_seed_and_not_on_ranks,
    every_rank_has_as_many_batches_and_rows, without_shuffling_rows_are_in_order,
    metrics_leave_out_what_pads_the_last_batch, gather_reduce_and_broadcast,
    local_sgd_averages_parameters_now_and_then, a_step_in_float16_that_overflows_is_skipped,
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda f: f.__name__)
def test_behavior_of_accelerate(behavior: Callable[[], None]) -> None:
    world(4, "threads").run(behavior)
