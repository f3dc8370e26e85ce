"""What is planned is what is run: every collective and every byte, of the device's memory too."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import re
import resource
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
import shardfn.optim as so
from benchmarks import plan_trackers
from shardfn import interop
from shardfn.plan.schedule import Held
from shardfn.stages import gather, reduction
from shardfn.testing import World, WorldError, simulated, world
from shardfn.tiers.transfers import copy_streams
from tests.models import STRATEGIES
from tests.plan import planned as programs

Case = tuple[str, str]
EVERY = [(strategy, variant) for strategy in STRATEGIES for variant in programs.VARIANTS]


def some(ranks: int) -> list[Case]:
    """Programs with each strategy and each variant; for 4 ranks each variant of two strategies."""
    each = [(name, programs.VARIANTS[(i + ranks) % len(programs.VARIANTS)]) for i, name in enumerate(STRATEGIES)]
    return list(dict.fromkeys(each + [case for case in EVERY if ranks == 4 and case[0] == "hybrid_shard"]))


def planned(cases: list[Case], ranks: int) -> list[sf.plan.StepPlan]:
    found: list[sf.plan.StepPlan] = world(1, "alone").with_deadline(300).run(programs.planned, cases, ranks, 0)[0]
    return found


def measured(cases: list[Case], ranks: int) -> list[tuple[int, int, list[programs.Sent]]]:
    """Each program on the simulated device with values, one process a rank, as rank 0 sees it."""

    def on(rank: int) -> Any:
        with World(1, kind="alone", deadline=500) as alone:
            return alone.run(programs.measured, cases, ranks, rank, folder)[0]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        return next(iter([*pool.map(on, range(ranks))]))


def alike(case: Case, plan: sf.plan.StepPlan, sent: list[programs.Sent]) -> bool:
    """Whether a plan has the collectives of a run on CPUs."""
    calls = programs.sent_by(plan)
    if case[1] == "few bits":  # what a CPU sends from a thread of its own is of no stage in the ledger
        return Counter((c[0], c[1], c[3], c[4]) for c in calls) == Counter((c[0], c[1], c[3], c[4]) for c in sent)
    return Counter(calls) == Counter(sent)


def differences(cases: list[Case], ranks: int) -> list[str]:
    """What is not as planned."""
    wrong = []
    ran = world(ranks, "processes").with_deadline(500).run(programs.ran, cases, ranks)[0]
    for case, plan, sent, (most, rounded, on_device) in zip(
        cases, planned(cases, ranks), ran, measured(cases, ranks), strict=True
    ):
        calls = programs.sent_by(plan)
        if not alike(case, plan, sent) or calls != on_device:  # on the device in the same order, too
            wrong.append(f"{case}: collectives")
        if (plan.peak.total, plan.allocator) != (most, rounded):
            wrong.append(f"{case}: {plan.peak.total}, {plan.allocator} bytes planned, {most}, {rounded} held")
    return wrong


def test_what_is_planned_is_sent() -> None:
    cases = some(2)[:2]
    ran = world(2, "processes").run(programs.ran, cases, 2)[0]
    assert all(ran)
    assert all(alike(*each) for each in zip(cases, planned(cases, 2), ran, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_planned_is_sent_and_held(ranks: int) -> None:
    assert differences(some(ranks), ranks) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_variant_of_every_strategy(strategy: str, ranks: int) -> None:
    assert differences([case for case in EVERY if case[0] == strategy], ranks) == []


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
def test_layers_with_options_of_their_own(strategy: str) -> None:
    assert differences([(strategy, variant) for variant in programs.MIXED], 2) == []


@pytest.mark.parametrize("way", ["kept", "remat"])
def test_attention_holds_what_is_planned(way: str) -> None:
    config, ranks = plan_trackers.TINY
    (kinds, _), allocator = plan_trackers.alone(plan_trackers.planned, config, ranks, way)
    assert (sum(kinds.values()), allocator) == plan_trackers.held_by_all(config, ranks, way)[0]


def of_attention() -> tuple[sf.plan.StepPlan, sf.plan.StepPlan]:
    """A gradient and a Hessian-vector product of layers of attention."""
    with sf.plan.mode(ranks=2):
        mesh = sf.make_mesh(data=2)
        layer = {"w": lambda g: torch.randn(64, 192, generator=g)}
        params = sf.init_sharded([layer] * 3, 0, mesh, sf.full_shard("data"))
        x = torch.ones(2, 128, 64)

        def attend(p: Any, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (x @ p["w"]).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

        stage = sf.stage(attend)

        def gradient(params: Any) -> Any:
            def loss(params: Any) -> torch.Tensor:
                y = x
                for p in sf.layers(params):
                    y = stage(p, y)
                return sf.psum(y.square().sum(), "data")

            return sf.grad(loss)(params)

        runs = gradient, lambda params: sf.jvp(gradient, (params,), (params,))
        mapped = [sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False) for run in runs]
        once, twice = (sf.plan.step(run, params) for run in mapped)
        return once, twice


def test_a_product_of_attention_has_a_plan() -> None:
    [(once, twice)] = world(1, "alone").run(of_attention)
    assert len(twice.select(kind="all_gather")) == 2 * len(once.select(kind="all_gather")) > 0
    assert once.peak.kinds["activations"] < twice.peak.kinds["activations"] < 2 * once.peak.kinds["activations"]


def test_only_the_first_layer_is_gathered_at_the_end_of_backward() -> None:
    [(once, _)] = world(1, "alone").run(of_attention)
    last = max(
        i for i, work in enumerate(once.works) if (work.kind, work.phase, work.stage) == ("compute", "backward", "0")
    )
    gathered = {held.at: held.kinds.get("gathered", 0) for held in once.held}
    assert gathered[last] == max(gathered.values()) / 2 > 0


def gated(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """A normalized and gated input, and its gradients."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = F.silu(F.rms_norm(x, (16,), weight, 1e-5))
    y.square().sum().backward()
    return [t.detach().cpu() for t in (y, x.grad, weight.grad) if t is not None]


def gated_on_the_device(store: str) -> tuple[set[str], list[torch.Tensor], list[torch.Tensor]]:
    """The operations of `gated` there, and its numbers there and on the CPU."""
    x, weight = torch.randn(4, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    file = torch.distributed.FileStore(store, 1)  # type: ignore[attr-defined]
    with simulated(1, 0, store=file) as device:
        found = gated(x.to(device.name), weight.to(device.name))
        launched = set(device.operations)
    return launched, found, gated(x, weight)


def test_operations_for_which_cuda_has_kernels_are_not_composed_of_others(tmp_path: Path) -> None:
    [(launched, found, wanted)] = world(1, "alone").run(gated_on_the_device, f"{tmp_path}/store")
    assert {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward", "aten::silu_backward"} <= launched
    assert not {"aten::rsqrt", "aten::sigmoid"} & launched
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@functools.cache
def of_full_shard() -> dict[str, sf.plan.StepPlan]:
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
    assert plan.sent(axis="shard") == plan.sent(axis=["shard"]) == plan.sent(axis=("shard",)) > 0
    with pytest.raises(ValueError, match="axis 'shrad': the plan's mesh has"):
        plan.sent(axis="shrad")
    tokens = programs.ROWS * 8
    each = 2 * 2 * tokens * programs.WIDTH * programs.HIDDEN
    assert plan.flops(stage="blocks.1", phase="forward") == plan.flops(stage="blocks.1", phase="recompute") == each
    assert plan.flops(stage="blocks.1", phase="backward") == 2 * each


def test_differences() -> None:
    plain, remat = of_full_shard()["plain"], of_full_shard()["remat"]
    assert str(plain - plain).endswith("no difference")
    less = remat - plain
    assert less.peak == remat.peak.total - plain.peak.total == sum(less.kinds.values())
    assert less.kinds["activations"] < 0
    assert less.flops > 0
    assert "activations" in str(less)


def test_a_plan_is_saved_and_read_back(tmp_path: Path) -> None:
    plan = of_full_shard()["plain"]
    plan.save(tmp_path / "plan.json")
    assert sf.plan.StepPlan.load(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.json").read_text()
    for other, told in (
        (text.replace('"version": 1', '"version": 0'), "version 0"),
        (text.replace('"peak":', '"top":'), r"differs in \['peak', 'top'\]"),
        ("nothing", "not JSON"),
    ):
        (tmp_path / "other.json").write_text(other)
        with pytest.raises(ValueError, match=told):
            sf.plan.StepPlan.load(tmp_path / "other.json")


def test_a_ledger_is_checked_against_a_plan() -> None:
    plan = of_full_shard()["plain"]
    log = sf.collectives.Ledger([_record(work) for work in plan.collectives])
    plan.check(log)
    log.records[3] = dataclasses.replace(log.records[3], bytes=7)
    with pytest.raises(AssertionError, match=r"planned, but not run: .*run, but not planned: .* of 7 bytes"):
        plan.check(log)


def _record(work: Any) -> sf.collectives.Record:
    backward = work.phase in ("backward", "recompute")
    dtype = getattr(torch, work.dtype)
    return sf.collectives.Record(work.kind, work.axis, work.stage, dtype, work.sent, "native", work.scheduled, backward)


def many_ranks(ranks: int) -> tuple[int, int, Held]:
    with sf.plan.mode(ranks) as device:
        mesh = sf.make_mesh(replica=ranks // 8, shard=8)
        params = sf.init_sharded(programs.makers(), 0, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
        assert params["embed"].values.device.type == device.name
        plan = sf.plan.step(sf.value_and_grad(programs.whole_loss), params, torch.zeros(2, 8, dtype=torch.int64))
        [gather] = plan.select(kind="all_gather", stage="embed", phase="forward")
        return plan.parameters, gather.nodes, plan.peak


def test_any_number_of_ranks() -> None:
    [(parameters, nodes, peak)] = world(1, "alone").run(many_ranks, 16384)
    block = 2 * programs.WIDTH * programs.HIDDEN + programs.HIDDEN
    assert parameters == 2 * programs.VOCABULARY * programs.WIDTH + programs.WIDTH + programs.LAYERS * block
    assert nodes == 1
    assert peak.kinds["gradients"] + peak.kinds["parameters"] > 0


def test_plans_need_a_place() -> None:
    with pytest.raises(RuntimeError, match=r"inside `with shardfn\.plan\.mode"):
        sf.plan.step(lambda: None)
    with pytest.raises(WorldError, match="rank 0 of 2 already, on gloo"):
        world(2, "processes").run(lambda: sf.plan.mode(4).__enter__())


def offloaded(blocks: int) -> int:
    """The most bytes of activations in a step whose blocks offload them."""
    with sf.plan.mode(ranks=1):
        whole = [{"w": torch.empty(64, 64)} for _ in range(blocks)]
        params = sf.shard(whole, sf.make_mesh(shard=1), sf.full_shard("shard"))
        stage = sf.stage(lambda p, x: torch.tanh(x @ p["w"]).square(), remat=sf.offload(above=0))

        def loss(params: Any, x: Any) -> Any:
            for p in sf.layers(params):
                x = stage(p, x)
            return x.sum()

        plan = sf.plan.step(sf.grad(loss), params, torch.zeros(64, 64))
        return max(entry.kinds.get("activations", 0) for entry in plan.held)


def test_activations_that_leave_are_not_held() -> None:
    few, many = (world(1, "alone").run(offloaded, blocks)[0] for blocks in (24, 48))
    assert many - few < 64 * 64 * 4  # less than one of those of 24 further blocks


def on_the_host() -> tuple[dict[str, int], int]:
    """The planned bytes on the host, and how much larger the process is for them."""
    wide = 2**13
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with sf.plan.mode(ranks=4):
        mesh = sf.make_mesh(shard=4)
        place = sf.full_shard("shard").with_tiers(params="host", state="host")
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

        plan = sf.plan.step(step, params, opt.init(params))
    return plan.host, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_what_is_on_the_host_is_planned_without_memory() -> None:
    [(host, grown)] = world(1, "alone").run(on_the_host)
    assert host["parameters"] >= 2**28
    assert host["optimizer"] == 2 * host["parameters"]
    assert grown < 2**28


def with_numbers() -> tuple[sf.plan.StepPlan, sf.plan.StepPlan]:
    def reads(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = x[x > 0]
        return x * x.mean().item()

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y: torch.Tensor = sf.stage(lambda p, x: x @ p["w"])(params, x)
            return y.square().mean()

    with sf.plan.mode(2):
        mesh = sf.make_mesh(shard=2)
        params = sf.shard({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, mesh, sf.full_shard("shard"))
        return sf.plan.step(reads, torch.as_tensor([1.0, 2.0])), sf.plan.step(loss, params, torch.ones(2, 2))


def test_numbers_that_a_step_reads_are_named() -> None:
    [(reads, inference)] = world(1, "alone").run(with_numbers)
    kinds = [what.split(" at test_plan.py:")[0] for what in reads.assumed]
    assert kinds == ["item", "mask as index", "item"]
    assert "what depends on numbers is assumed (1, where the host reads one): item at test_plan.py:" in reads.table(200)
    assert inference.assumed == ()
    assert inference.count(kind="all_gather") == 1


def second_derivatives() -> tuple[int, int]:
    """The bytes sent in collectives outside of `shard_map`, in a plan; and how many there are."""
    with sf.plan.mode(2):
        mesh = sf.make_mesh(shard=2)
        params = sf.init_sharded(programs.makers()["head"], 0, mesh, sf.full_shard("shard"))

        def square(params: Any) -> torch.Tensor:
            y: torch.Tensor = sf.stage(lambda p: p["norm"].square().sum() * p["out"].sum())(params)
            return y

        def curved(params: Any) -> Any:
            return torch.func.jvp(sf.grad(square), (params,), (params,))[1]

        plan = sf.plan.step(curved, params)
        return plan.sent(), len(plan.collectives)


def test_collectives_along_axes_without_a_name_are_counted() -> None:
    [(sent, count)] = world(1, "alone").run(second_derivatives)
    assert count > 2
    assert sent > 0


def on_disk() -> tuple[dict[str, int], dict[str, int]]:
    wide = 2**12
    with sf.plan.mode(2):
        mesh = sf.make_mesh(shard=2)
        place = sf.full_shard("shard").with_tiers(params="disk", state="disk")
        params = sf.init_sharded({"w": lambda g: torch.randn(wide, wide, generator=g)}, 0, mesh, place)
        said = sf.plan.estimate_memory(params, so.adamw(1e-3))

        def step(params: Any, state: Any) -> Any:
            loss = sf.stage(lambda p: (torch.ones(1, wide) @ p["w"]).sum())
            return so.adamw(1e-3).step(params, sf.grad(loss)(params), state)

        plan = sf.plan.step(step, params, so.adamw(1e-3).init(params))
        return plan.disk, {"parameters": said.parameters.disk, "optimizer": said.state.disk}


def test_disks_are_planned_without_a_folder_and_without_room() -> None:
    [(disk, said)] = world(1, "alone").run(on_disk)
    assert disk == said
    assert disk["parameters"] == 2**25 + 4096  # a piece ends with what tells stages apart, in a block of its own


def made_again() -> list[str]:
    """Operations whose results arguments of equal shapes do not say; those that are not as on the CPU."""

    def tried(device: str) -> list[Any]:
        x, y = torch.zeros(4, 6, device=device), torch.ones(4, 6, device=device)
        found: list[Any] = []
        for _ in range(2):
            found.append(len(torch.empty(0, 3, device=device).unbind(0)))
            a, b = torch.empty(3, device=device), torch.empty(9, device=device)
            for other in (x[0, :3], y[0, :3]):  # of equal shapes, in other memory
                a.set_(other)  # type: ignore[call-overload]  # torch's stubs lack it
                found.append(a.untyped_storage()._cdata == other.untyped_storage()._cdata)
            found += [z.as_strided((2,), (1,), 3).storage_offset() for z in (x[1], x[2], b)]
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            found += [torch.ones(7, device=device).dtype, (torch.ones(3, dtype=torch.int64, device=device) / 2).dtype]
        return found

    with sf.plan.mode(1) as device:
        planned, plain = tried(device.name), tried("cpu")
    return [f"{i}: {a}, {b}" for i, (a, b) in enumerate(zip(planned, plain, strict=True)) if a != b]


def test_what_was_found_for_like_arguments_holds_for_these() -> None:
    assert world(1, "alone").run(made_again) == [[]]


def counted() -> tuple[int, int]:
    from torch.utils.flop_counter import FlopCounterMode

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w).sum() + F.conv2d(x, w, stride=2).sum() + F.conv_transpose2d(x, w).sum()

    with FlopCounterMode(display=False) as counter:
        step(torch.ones(2, 4, 9, 9), torch.ones(4, 4, 3, 3))
    with sf.plan.mode(1):
        plan = sf.plan.step(step, torch.ones(2, 4, 9, 9), torch.ones(4, 4, 3, 3))
    return plan.flops(), counter.get_total_flops()


def test_operations_are_counted_as_torch_counts_them() -> None:
    ((ours, torchs),) = world(1, "alone").run(counted)
    assert ours == torchs > 0


def often() -> tuple[int, str]:
    """How much of blocks before is left, and what the error of a loop is."""
    from shardfn.plan.recorder import PlanRecorder
    from shardfn.simulated import device

    device.ENDLESS = 20
    for _ in range(4):
        programs.planned([("full_shard", "plain")], 2, 0)
    left = sum(type(x) is PlanRecorder for x in gc.get_objects())
    with sf.plan.mode(1):
        for _ in range(50):
            x = torch.tensor(1.0)  # which reads nothing
        try:
            while x.item():
                pass
        except NotImplementedError as error:
            return left, str(error)
    return left, ""


def test_blocks_leave_nothing_and_only_loops_that_read_numbers_are_endless() -> None:
    [(left, told)] = world(1, "alone").run(often)
    assert left <= 1
    assert "a loop that ends by numbers" in told


def built(how: str) -> tuple[Any, Any]:
    """The memory at the peak, and that of the host, of a step of a module that was built in this way."""
    with sf.plan.mode(64) as device:
        mesh = sf.make_mesh(shard=64)
        contexts: dict[str, Any] = {
            "as it is": contextlib.nullcontext(),
            "on the host": torch.device("cpu"),
            "hollow": interop.meta(),
        }
        with contexts[how]:
            module = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])
        model, x = interop.functional(module), torch.zeros(4, 1024, device=device.name)
        params = model.shard(mesh, sf.full_shard("shard"))

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
        def step(params: Any, x: torch.Tensor) -> Any:
            return sf.grad(lambda p: sf.pmean(model(p, x).square().mean(), "shard"))(params)

        plan = sf.plan.step(step, params, x)
        return plan.peak.total, sum(plan.host.values())


def test_a_module_has_its_own_memory_on_the_host() -> None:
    [(peak, host)] = world(1, "alone").run(built, "on the host")
    assert world(1, "alone").run(built, "as it is") == [(peak, host)]
    [(same, less)] = world(1, "alone").run(built, "hollow")
    assert (same, host - less) == (peak, 4 * (1024 * 1024 + 1024) * 4)


def left_on_devices() -> list[int]:
    """How many tensors of devices are kept after a plan."""
    programs.planned([("full_shard", "few bits")], 2, 0)
    kept: list[Any] = [reduction._marks, reduction._tag, gather._tag_on, copy_streams]
    return [f.cache_info().currsize for f in kept]


def test_nothing_is_kept_of_a_planned_device() -> None:
    assert world(1, "alone").run(left_on_devices) == [[0, 0, 0, 0]]


def decides() -> str:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.max() > 0.5:
            raise ValueError("too large")
        return x

    with sf.plan.mode(1), pytest.raises(ValueError, match="too large") as caught:
        sf.plan.step(step, torch.zeros(3))
    return caught.value.__notes__[0]


def test_an_error_says_what_was_assumed_before() -> None:
    [note] = world(1, "alone").run(decides)
    assert re.search(r"1 where it reads one on the host, .*: item at test_plan.py:\d+", note)


def closed() -> set[str]:
    """The phases of a step in which an optimizer calls the gradient."""

    def step(x: torch.Tensor) -> None:
        w = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.LBFGS([w], max_iter=1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (w * x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    with sf.plan.mode(1):
        return {work.phase for work in sf.plan.step(step, torch.zeros(3)).works}


def test_a_gradient_that_an_optimizer_calls_is_a_backward_pass() -> None:
    [phases] = world(1, "alone").run(closed)
    assert "backward" in phases


N = 4096
TRAFFIC: dict[str, tuple[Any, int]] = {  # what runs, and how many numbers it reads and writes
    "a new result": (lambda x, y, table: x + y, 3 * N),
    "in place": (lambda x, y, table: x.add_(y), 3 * N),
    "overwritten": (lambda x, y, table: x.copy_(y), 2 * N),
    "expanded": (lambda x, y, table: x + y[:1].expand(N), 2 * N + 1),
    "several": (lambda x, y, table: torch._foreach_add_([x, y], [y, x]), 4 * N),
    "rows of a table": (lambda x, y, table: table[torch.zeros(2, dtype=torch.int64)], 2 * 2 * N + 2 * 2 + 2 * 2),
    "rows that change": (
        lambda x, y, table: table.index_add_(0, torch.zeros(2, dtype=torch.int64), y.expand(2, N)),
        2 * 2 * N + N + 2 * 2 * 2,
    ),
    "an optimizer": (
        lambda x, y, table: torch._fused_adamw_(
            [x], [y], [table[0]], [table[1]], [], [torch.ones(())], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0,
            eps=1e-8, amsgrad=False, maximize=False,
        ),
        7 * N + 2,
    ),
}  # fmt: skip


def traffic(name: str) -> int:
    with sf.plan.mode(1):
        plan = sf.plan.step(TRAFFIC[name][0], torch.zeros(N), torch.zeros(N), torch.zeros(8, N))
        return sum(work.moved for work in plan.works) // 4


@pytest.mark.parametrize("name", TRAFFIC)
def test_bytes_that_operations_read_and_write(name: str) -> None:
    assert world(1, "alone").run(traffic, name) == [TRAFFIC[name][1]]
