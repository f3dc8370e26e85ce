"""Wrong inputs of plans are told at once, in one message with what is wrong and what is right."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.plan.schedule import Held, Work
from shardfn.testing import world
from tests.refusals import told

Call = Callable[[], Any]
WORKS = (Work("compute", flops={"float32": 10}), Work("all_gather", axis=("shard",), ranks=2, sent=8))
PLAN = sf.plan.StepPlan(
    "step", {"shard": 2}, 0, WORKS, (Held(0, {"parameters": 8}),), {}, {}, Held(0, {"parameters": 8}), (), 2
)
CHIP = sf.plan.Chip("own", "here", {"float32": 1e12}, 1e12, 2**30)
ANY: Any = None


def refused(calls: dict[str, Call]) -> dict[str, str]:
    found = {name: told(call) for name, call in calls.items()}
    assert all(len(message) < 700 for message in found.values())
    return found


def halved(x: torch.Tensor) -> torch.Tensor:
    while x.sum() > 0.5:
        x = x / 2
    return x


def blocks() -> dict[str, str]:
    def block(*args: Any, **kwargs: Any) -> Call:
        def opened() -> None:
            with sf.plan.mode(*args, **kwargs):
                pass

        return opened

    def inside(act: Call) -> Call:
        def run() -> Any:
            with sf.plan.mode(2):
                return act()

        return run

    host = torch.ones(3, 3, device="cpu")
    return refused({
        "no ranks": block(0),
        "a text": block("8"),
        "half a rank": block(8.5),
        "no such rank": block(4, 4),
        "a rank before the first": block(4, -1),
        "an empty node": block(4, per_node=0),
        "a node of text": block(4, per_node="8"),
        "a mesh of other ranks": inside(lambda: sf.make_mesh(shard=3)),
        "a mesh of this machine": inside(lambda: sf.make_mesh(shard=2, device="cpu")),
        "no step": inside(lambda: sf.plan.step(ANY)),
        "what a step returned": inside(lambda: sf.plan.step((1, 2), 3)),  # type: ignore[arg-type]
        "a mesh of text": inside(lambda: sf.plan.step(lambda: None, mesh="shard=2")),  # type: ignore[arg-type]
        "numbers of the host": inside(lambda: sf.plan.step(lambda x: x @ torch.ones(3, 3), host)),
        "a loop by numbers": inside(lambda: sf.plan.step(halved, torch.ones(3))),
        "sizes by numbers": inside(lambda: sf.plan.step(torch.unique, torch.ones(3))),
    })  # fmt: skip


def test_blocks_and_steps() -> None:
    [found] = world(1, "alone").run(blocks)
    wanted = {
        "no ranks": "ValueError: plan.mode: ranks must be at least 1, got 0",
        "a text": "TypeError: plan.mode: ranks must be an integer, got '8'",
        "half a rank": "TypeError: plan.mode: ranks must be an integer, got 8.5",
        "no such rank": "ValueError: plan.mode: rank=4 of ranks=4",
        "a rank before the first": "ValueError: plan.mode: rank must be at least 0, got -1",
        "an empty node": "ValueError: plan.mode: per_node must be at least 1, got 0",
        "a node of text": "TypeError: plan.mode: per_node must be an integer, got '8'",
        "a mesh of other ranks": "ValueError: make_mesh(shard=3) needs 3 ranks, but the world has 2: plan with",
        "a mesh of this machine": "ValueError: make_mesh: device='cpu', while this process plans for 'sim'",
        "no step": "TypeError: plan.step: the step is of type NoneType",
        "what a step returned": "TypeError: plan.step: the step is of type tuple, not a function: pass it without call",
        "a mesh of text": "TypeError: the mesh is of type str",
        "numbers of the host": "RuntimeError: aten::mm at test_wrong_inputs.py:",
        "a loop by numbers": "NotImplementedError: item at test_wrong_inputs.py:",
        "sizes by numbers": "NotImplementedError: aten::_unique2",
    }
    assert {name: found[name][: len(start)] for name, start in wanted.items()} == wanted
    assert "cpu, sim:0. Make them inside the block" in found["numbers of the host"]


CALLS: dict[str, tuple[Call, str]] = {
    "an attribute": (lambda: PLAN.select(op="all_gather"), "TypeError: works of a plan have no attribute 'op'"),
    "a count": (lambda: PLAN.count(phases="forward"), "TypeError: works of a plan have no attribute 'phases'"),
    "sent": (lambda: PLAN.sent(axes="shard"), "TypeError: works of a plan have no attribute 'axes'"),
    "a pass": (lambda: PLAN.flops(phase="fwd"), "ValueError: phase='fwd'; a plan has forward, backward, recompute"),
    "a difference": (lambda: PLAN - 5, "TypeError: unsupported operand"),  # type: ignore[operator]
    "no log": (lambda: PLAN.check(ANY), "TypeError: check: the log is of type NoneType, not a Ledger"),
    "bits": (lambda: PLAN.fits("80Gib"), "ValueError: '80Gib' is not a memory size"),
    "no unit": (lambda: PLAN.fits("80"), "ValueError: '80' is not a memory size"),
    "less than nothing": (lambda: PLAN.fits(-1), "ValueError: -1 is not a memory size"),
    "half a byte": (lambda: PLAN.fits(2.5), "ValueError: 2.5 is not a memory size"),  # type: ignore[arg-type]
    "a reserve": (lambda: PLAN.fits("80GiB", "2 gigs"), "ValueError: '2 gigs' is not a memory size"),
    "unknown links": (
        lambda: PLAN.timed("h1000", "h100"),
        "ValueError: links: there is no 'h1000', only h100, h200, a100, b200; from a file comes Links.load(path)",
    ),
    "an unknown chip": (lambda: PLAN.timed("h100", "xpu"), "ValueError: chip: there is no 'xpu'"),
    "no links": (lambda: PLAN.timed(ANY, "h100"), "TypeError: timed: links must be Links, or a name, got NoneType"),
    "a chip for links": (
        lambda: PLAN.timed(CHIP, "h100"),  # type: ignore[arg-type]
        "TypeError: timed: links must be Links, or a name, got Chip",
    ),
    "tokens": (
        lambda: PLAN.timed("h100", "h100", tokens="x"),  # type: ignore[arg-type]
        "ValueError: timed: tokens must be a positive number, got 'x'",
    ),
    "nodes": (
        lambda: PLAN.timed("h100", "h100", per_node=0),
        "ValueError: timed: per_node must be a positive number, got 0",
    ),
    "times of text": (lambda: PLAN.figure("h100"), "TypeError: the times are of type str"),  # type: ignore[arg-type]
    "times of a trace": (lambda: PLAN.trace("a.json", 5), "TypeError: the times are of type int"),  # type: ignore[arg-type]
    "beside": (lambda: PLAN.figure(None, "b"), "TypeError: plan: beside must be another plan, or a profile, got str"),  # type: ignore[arg-type]
    "a picture": (lambda: PLAN.save_picture("a.xyz"), "ValueError: plan: 'a.xyz' names no kind of picture"),
    "a rate": (
        lambda: CHIP.with_rate("bfloat16", -4),
        "ValueError: Chip 'own': rates['bfloat16'] must be a positive number, got -4",
    ),
    "a dtype": (lambda: CHIP.rate("int4"), "ValueError: the chip 'own' has no rate for 'int4'"),
    "no bandwidth": (
        lambda: dataclasses.replace(CHIP, bandwidth=0),
        "ValueError: Chip 'own': bandwidth must be a positive number, got 0",
    ),
    "no efficiency": (
        lambda: dataclasses.replace(CHIP, efficiency=0),
        "ValueError: Chip 'own': efficiency must be a positive number, got 0",
    ),
    "a launch": (
        lambda: dataclasses.replace(CHIP, launch=-1),
        "ValueError: Chip 'own': launch must be seconds, 0 or more, got -1",
    ),
    "no copies": (
        lambda: sf.plan.Links("l", "s", {}, 0),
        "ValueError: Links 'l': copying must be a positive number of bytes a second, got 0",
    ),
    "a side": (
        lambda: sf.plan.measure_chip("cpu", side=-1),
        "ValueError: measure_chip: side must be a positive number, got -1",
    ),
    "dtypes of text": (
        lambda: sf.plan.measure_chip(dtypes=["float32"]),  # type: ignore[list-item]
        "TypeError: measure_chip: dtypes must be a list, such as [torch.bfloat16], got ['float32']",
    ),
    "one dtype": (
        lambda: sf.plan.measure_chip(dtypes=torch.float32),  # type: ignore[arg-type]
        "TypeError: measure_chip: dtypes must be a list, such as [torch.bfloat16], got torch.float32",
    ),
    "no mesh": (lambda: sf.plan.measure_links(ANY), "TypeError: the mesh is of type NoneType"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call, start = CALLS[name]
    assert refused({name: call})[name][: len(start)] == start


def test_what_a_file_of_a_plan_lacks_is_told(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert sf.plan.StepPlan.load(path) == PLAN
    whole = json.loads(path.read_text())
    for name, value in {
        "works": 5, "held": None, "peak": {"at": 0, "kinds": 5}, "mesh": [1], "disk": {"parameters": "x"}
    }.items():  # fmt: skip
        path.write_text(json.dumps(whole | {name: value}))
        with pytest.raises(ValueError, match=r"plan\.json' is damaged: .*; save it again"):
            sf.plan.StepPlan.load(path)
