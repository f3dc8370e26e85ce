"""A step that runs is measured, and is what was planned."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.mesh import waiting
from shardfn.plan.profiling import DeviceClock, Profile
from shardfn.testing import World, world
from tests.refusals import refused

WIDTH, LAYERS = 32, 4


def program(remat: bool, device: str | None = None) -> tuple[Any, ...]:
    """A step with its arguments."""

    @sf.stage(remat=remat)
    def block(p: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ p["up"]) @ p["down"]

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params):
            x = block(p, x)
        return x.square().mean()

    mesh = sf.make_mesh(device=device, replica=2, shard=2) if device else sf.make_mesh(replica=2, shard=2)

    def make(generator: torch.Generator) -> Any:
        return {name: torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH for name in ("up", "down")}

    optimizer = so.adamw(1e-3)
    params = sf.init_sharded([make] * LAYERS, 0, mesh, sf.hybrid_shard(shard="shard", replica="replica"))

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(params: Any, state: Any, x: Tensor) -> Any:
        value, grads = sf.value_and_grad(loss)(params, x)
        params, state = optimizer.step(params, grads, state)
        return params, state, value

    return step, params, optimizer.init(params), torch.ones(8, WIDTH)


def profiled(remat: bool, folder: str) -> dict[str, Any]:
    step, params, state, x = program(remat, "cpu")
    losses = []
    for _ in range(2):
        params, state, value = step(params, state, x)
        losses.append(value.item())
    with sf.collectives.ledger() as log:
        profile, (params, state, value) = sf.plan.profile_step(step, params, state, x)
    losses.append(value.item())
    _, _, value = step(params, state, x)
    losses.append(value.item())
    profile.trace(f"{folder}/{profile.rank}.json")
    sent = [(w.kind, w.axis, w.stage, w.dtype, w.sent, w.phase) for w in profile.works if w.kind != "compute"]
    noted = [(r.op, r.axis, r.stage, str(r.dtype)[6:], r.bytes) for r in log.records]
    assert waiting.ended == []
    return {"profile": profile, "losses": losses, "sent": sent, "ledger": noted}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "remat"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("profile")
    with World(4) as four:
        return request.param, four.run(profiled, request.param, str(folder)), folder


def test_a_profiled_step_computes_and_sends_what_the_step_does(measured: Any) -> None:
    _, found, _ = measured
    for one in found:
        losses = one["losses"]
        assert losses == sorted(losses, reverse=True)
        assert [row[:5] for row in one["sent"]] == one["ledger"]


def test_works_take_their_time_within_the_step(measured: Any) -> None:
    _, found, _ = measured
    for one in found:
        profile: Profile = one["profile"]
        assert len(profile.begins) == len(profile.ends) == len(profile.works)
        assert min(profile.begins) == 0
        assert all(begin <= end for begin, end in zip(profile.begins, profile.ends, strict=True))
        free: dict[int, float] = {}
        for work, begin, end in zip(profile.works, profile.begins, profile.ends, strict=True):
            assert begin >= free.get(work.stream, 0.0)  # a lane has one work at a time
            free[work.stream] = end


def test_a_gather_arrives_before_its_stage_computes(measured: Any) -> None:
    _, found, _ = measured
    profile: Profile = found[0]["profile"]
    spans = list(zip(profile.works, profile.begins, profile.ends, strict=True))
    for stage in range(LAYERS):
        arrived = next(end for work, _, end in spans if (work.kind, work.stage) == ("all_gather", str(stage)))
        computed = [begin for work, begin, _ in spans if work.flops and work.stage == str(stage)]
        assert arrived <= computed[0]


def planned(remat: bool) -> sf.plan.StepPlan:
    with sf.plan.mode(ranks=4):
        step, *args = program(remat)
        step(*args)
        return sf.plan.step(step, *args)


def test_a_profile_is_what_was_planned(measured: Any) -> None:
    remat, found, _ = measured
    plan = world(1, "alone").run(planned, remat)[0]
    profile: Profile = found[0]["profile"]

    def sent(works: Any) -> Counter[Any]:
        return Counter(
            (w.kind, w.axis, w.stage, w.dtype, w.sent, w.phase) for w in works if w.kind not in ("compute", "copy")
        )

    def flops(works: Any) -> Counter[Any]:
        total: Counter[Any] = Counter()
        for work in works:
            total[work.stage, work.phase] += sum(work.flops.values())
        return +total

    def most(one: sf.plan.StepPlan, kind: str) -> int:
        return max(held.kinds.get(kind, 0) for held in one.held)

    assert sent(profile.works) == sent(plan.works)
    assert flops(profile.works) == flops(plan.works)
    for kind in ("parameters", "optimizer", "gradients", "x"):
        assert most(profile, kind) == most(plan, kind)
    titles = [axes.get_title(loc="left") for axes in plan.figure(beside=profile).axes[::2]]
    assert titles[1].startswith("step, measured")


def test_each_rank_writes_its_own_views(measured: Any) -> None:
    _, found, folder = measured
    for rank, one in enumerate(found):
        assert one["profile"].rank == rank
        assert "measured on" in str(one["profile"]).splitlines()[0]
        events = json.loads((folder / f"{rank}.json").read_text())["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == len(one["profile"].works)


def test_what_is_no_step_is_an_error() -> None:
    told = refused(partial(sf.plan.profile_step, cast(Any, torch.ones(1))), TypeError)
    assert told.startswith("profile_step: the step is of type Tensor, and cannot be called")


def test_a_step_that_fails_fails_and_leaves_nothing_behind() -> None:
    def step(x: Tensor) -> Tensor:
        return x @ torch.ones(3)

    refused(lambda: sf.plan.profile_step(step, torch.ones(4)), RuntimeError)
    assert waiting.ended == []
    profile, out = sf.plan.profile_step(step, torch.ones(2, 3))
    assert out.tolist() == [3, 3]
    assert [work.kind for work in profile.works] == ["compute"]
    assert profile.works[0].where.startswith("test_profiling.py:")


def test_a_profile_in_a_profile_is_an_error() -> None:
    told = refused(lambda: sf.plan.profile_step(lambda: sf.plan.profile_step(torch.ones, 3)), RuntimeError)
    assert "another profile is being made" in told


def refused_where_planned() -> str:
    with sf.plan.mode(ranks=4):
        return refused(lambda: sf.plan.profile_step(torch.ones, 3), RuntimeError)


def test_nothing_runs_where_steps_are_planned() -> None:
    assert "use plan.step(step, ...) there" in world(1, "alone").run(refused_where_planned)[0]


class Event:
    """An event of a made-up accelerator, whose time passes by a millisecond an event."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        Event.count += 1
        self.at = Event.count

    def elapsed_time(self, end: Any) -> float:
        return float(end.at - self.at)


def test_an_accelerator_is_timed_by_events_on_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(stream_id=7)
    module = SimpleNamespace(Event=Event, current_stream=lambda device: stream, synchronize=lambda device: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    clock = DeviceClock(torch.device("cuda", 0))
    marks = [clock.mark() for _ in range(3)]
    assert clock.seconds(marks) == pytest.approx([0, 1e-3, 2e-3])
    assert clock.stream() == 8
