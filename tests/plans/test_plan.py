"""What is planned is what is run: every collective and every byte, of the device's memory too."""

from __future__ import annotations

import dataclasses
import functools
import resource
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
import shardfn.optim as so
from shardfn.plans.schedule import Held
from shardfn.testing import World, WorldError, world
from tests.models import STRATEGIES
from tests.plans import planned as programs

Case = tuple[str, str]
EVERY = [(strategy, variant) for strategy in STRATEGIES for variant in programs.VARIANTS]


def some(ranks: int) -> list[Case]:
    """Programs with each strategy and each variant; for 4 ranks each variant of two strategies."""
    each = [(name, programs.VARIANTS[(i + ranks) % len(programs.VARIANTS)]) for i, name in enumerate(STRATEGIES)]
    return list(dict.fromkeys(each + [case for case in EVERY if ranks == 4 and case[0] == "hybrid_shard"]))


def planned(cases: list[Case], ranks: int) -> list[sf.Plan]:
    found: list[sf.Plan] = world(1, "alone").within(300).run(programs.planned, cases, ranks, 0)[0]
    return found


def measured(cases: list[Case], ranks: int) -> list[tuple[int, int, list[programs.Sent]]]:
    """Each program on the simulated device with values, one process a rank, as rank 0 sees it."""

    def on(rank: int) -> Any:
        with World(1, kind="alone", deadline=500) as alone:
            return alone.run(programs.measured, cases, ranks, rank, folder)[0]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        return next(iter([*pool.map(on, range(ranks))]))


def differences(cases: list[Case], ranks: int) -> list[str]:
    """What is not as planned."""
    wrong = []
    ran = world(ranks, "processes").within(500).run(programs.ran, cases, ranks)[0]
    for case, plan, sent, (most, rounded, on_device) in zip(
        cases, planned(cases, ranks), ran, measured(cases, ranks), strict=True
    ):
        calls = programs.sent_by(plan)
        if case[1] == "few bits":  # what a CPU sends from a thread of its own is of no stage in the ledger
            differ = Counter((c[0], c[1], c[3], c[4]) for c in calls) != Counter((c[0], c[1], c[3], c[4]) for c in sent)
        else:
            differ = Counter(calls) != Counter(sent)
        if differ or calls != on_device:  # on the device in the same order, too
            wrong.append(f"{case}: collectives")
        if (plan.peak.total, plan.allocator) != (most, rounded):
            wrong.append(f"{case}: {plan.peak.total}, {plan.allocator} bytes planned, {most}, {rounded} held")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_planned_is_sent_and_held(ranks: int) -> None:
    assert differences(some(ranks), ranks) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_variant_of_every_strategy(ranks: int) -> None:
    assert differences(EVERY, ranks) == []


@functools.cache
def of_full_shard() -> dict[str, sf.Plan]:
    """Plans of one strategy on 2 ranks, by variant."""
    variants = ["plain", "remat"]
    return dict(zip(variants, planned([("full_shard", variant) for variant in variants], 2), strict=True))


def test_kinds_of_memory() -> None:
    plan = of_full_shard()["plain"]
    parameters, state = plan.peak.kinds["parameters"], plan.peak.kinds["optimizer"]
    assert state == 2 * parameters  # two moments
    assert plan.peak.total == max(entry.total for entry in plan.held) == sum(a.bytes for a in plan.allocations)
    assert {"gathered", "reducing", "activations", "transients", "tokens"} <= plan.peak.kinds.keys()
    gradients = max(entry.kinds.get("gradients", 0) for entry in plan.held)
    assert gradients == parameters
    lines = {a.where for a in plan.allocations if a.kind == "activations"}
    assert lines
    assert all(line.startswith("planned.py:") for line in lines)


def test_works() -> None:
    plan = of_full_shard()["remat"]
    assert {work.phase for work in plan.works} == {"forward", "backward", "recompute", "update"}
    for position, work in enumerate(plan.works):
        assert all(other < position and plan.works[other].stream != work.stream for other in work.after)
    gathers = plan.select(kind="all_gather", stage="blocks.1")
    assert [work.phase for work in gathers] == ["forward", "backward"]
    assert all(work.ranks == 2 and work.nodes == 1 and work.scheduled for work in gathers)
    tokens = programs.ROWS * 8
    each = 2 * 2 * tokens * programs.WIDTH * programs.HIDDEN
    assert plan.flops(stage="blocks.1", phase="forward") == plan.flops(stage="blocks.1", phase="recompute") == each
    assert plan.flops(stage="blocks.1", phase="backward") == 2 * each


def test_differences() -> None:
    plain, remat = of_full_shard()["plain"], of_full_shard()["remat"]
    assert str(plain - plain).endswith("no difference")
    less = remat - plain
    assert less.peak == remat.peak.total - plain.peak.total == sum(less.kinds.values()) < 0
    assert less.flops > 0
    assert "activations" in str(less)


def test_a_plan_is_saved_and_read_back(tmp_path: Path) -> None:
    plan = of_full_shard()["plain"]
    plan.save(tmp_path / "plan.json")
    assert sf.Plan.load(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.json").read_text()
    for other, told in (
        (text.replace('"version": 1', '"version": 0'), "version 0"),
        (text.replace('"peak":', '"top":'), r"differs in \['peak', 'top'\]"),
        ("nothing", "not JSON"),
    ):
        (tmp_path / "other.json").write_text(other)
        with pytest.raises(ValueError, match=told):
            sf.Plan.load(tmp_path / "other.json")


def test_a_ledger_is_checked_against_a_plan() -> None:
    plan = of_full_shard()["plain"]
    log = sf.Ledger([_record(work) for work in plan.collectives])
    plan.check(log)
    log.records[3] = dataclasses.replace(log.records[3], bytes=7)
    with pytest.raises(AssertionError, match=r"planned, but not run: .*run, but not planned: .* of 7 bytes"):
        plan.check(log)


def _record(work: Any) -> sf.Record:
    backward = work.phase in ("backward", "recompute")
    dtype = getattr(torch, work.dtype)
    return sf.Record(work.kind, work.axis, work.stage, dtype, work.sent, "native", work.scheduled, backward)


def many_ranks(ranks: int) -> tuple[int, int, Held]:
    with sf.planning(ranks) as device:
        mesh = sf.make_mesh(replica=ranks // 8, shard=8)
        params = sf.init_sharded(programs.makers(), 0, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
        assert params["embed"].values.device.type == device.name
        plan = sf.plan(sf.value_and_grad(programs.whole_loss), params, torch.zeros(2, 8, dtype=torch.int64))
        [gather] = plan.select(kind="all_gather", stage="embed", phase="forward")
        return plan.parameters, gather.nodes, plan.peak


def test_any_number_of_ranks() -> None:
    [(parameters, nodes, peak)] = world(1, "alone").run(many_ranks, 16384)
    block = 2 * programs.WIDTH * programs.HIDDEN + programs.HIDDEN
    assert parameters == 2 * programs.VOCABULARY * programs.WIDTH + programs.WIDTH + programs.LAYERS * block
    assert nodes == 1
    assert peak.kinds["gradients"] + peak.kinds["parameters"] > 0


def test_plans_need_a_place() -> None:
    with pytest.raises(RuntimeError, match=r"inside `with shardfn\.planning"):
        sf.plan(lambda: None)
    with pytest.raises(WorldError, match="rank 0 of 2 already, on gloo"):
        world(2, "processes").run(lambda: sf.planning(4).__enter__())


def offloaded(blocks: int) -> int:
    """The most bytes of activations in a step whose blocks offload them."""
    with sf.planning(ranks=1):
        whole = [{"w": torch.empty(64, 64)} for _ in range(blocks)]
        params = sf.shard(whole, sf.make_mesh(shard=1), sf.full_shard("shard"))
        stage = sf.stage(lambda p, x: torch.tanh(x @ p["w"]).square(), remat=sf.offload(above=0))

        def loss(params: Any, x: Any) -> Any:
            for p in sf.layers(params):
                x = stage(p, x)
            return x.sum()

        plan = sf.plan(sf.grad(loss), params, torch.zeros(64, 64))
        return max(entry.kinds.get("activations", 0) for entry in plan.held)


def test_activations_that_leave_are_not_held() -> None:
    few, many = (world(1, "alone").run(offloaded, blocks)[0] for blocks in (24, 48))
    assert many - few < 64 * 64 * 4  # less than one of those of 24 further blocks


def on_the_host() -> tuple[dict[str, int], int]:
    """The planned bytes on the host, and how much larger the process is for them."""
    wide = 2**13
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with sf.planning(ranks=4):
        mesh = sf.make_mesh(shard=4)
        place = sf.full_shard("shard").on(params="host", state="host")
        maker = functools.partial(torch.randn, wide, wide)
        params = sf.init_sharded([{"w": lambda generator: maker(generator=generator)}] * 4, 0, mesh, place)
        stage, opt = sf.stage(lambda p, x: x @ p["w"]), so.adamw(1e-3)

        def loss(params: Any) -> Any:
            x = torch.ones(4, wide)
            for p in sf.layers(params):
                x = stage(p, x)
            return x.square().sum()

        def step(params: Any, state: Any) -> Any:
            return opt.step(params, sf.grad(loss)(params), state)

        plan = sf.plan(step, params, opt.init(params))
    return plan.host, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_what_is_on_the_host_is_planned_without_memory() -> None:
    [(host, grown)] = world(1, "alone").run(on_the_host)
    assert host["parameters"] >= 2**28
    assert host["optimizer"] == 2 * host["parameters"]
    assert grown < 2**28
