"""The views of a plan show what it holds."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from functools import partial
from pathlib import Path

import matplotlib.image
import pytest

from shardfn.plan import printed
from shardfn.plan.plan import StepPlan
from shardfn.plan.schedule import Allocation, Held, Work
from tests.plan.plans import At, stack, taking
from tests.refusals import refused

NOTHING = StepPlan("step", {}, 0, (), (), {}, {}, Held(0, {}), (), 0)


# --- the table ---


def test_equal_stages_are_one_row() -> None:
    text = stack(126).table(120)
    assert len(text.splitlines()) < 30
    assert text.count("layers.") == 5  # the peak, two allocations, and the first and last of the row
    assert re.search(r"\nlayers.0 … layers.125 \(126 alike\) +120 +10 TFLOP +10 TFLOP +20 TFLOP +3 +2.4 GB\n", text)


def test_stages_that_alternate_are_two_rows_and_one_that_differs_is_a_third() -> None:
    def works(layers: int) -> list[Work]:
        return [
            Work("compute", f"{i}.{part}", launches=n + (i == 2 and part == "mlp"))
            for i in range(layers)
            for part, n in (("attention", 5), ("mlp", 7))
        ]

    text = dataclasses.replace(NOTHING, works=tuple(works(5))).text(100)
    rows = [line.split("  ")[0] for line in text.splitlines()[7:]]
    assert rows == ["0.attention … 4.attention (5 alike)", "0.mlp … 4.mlp (4 alike)", "2.mlp"]


def test_what_is_summed_is_the_sum() -> None:
    plan = stack(5, whole=8_000_000)
    text = plan.table(160)
    rows = {re.split(" {2,}", line)[0]: re.split(" {2,}", line)[-2:] for line in text.splitlines() if " shard " in line}
    assert rows["all_gather"] == ["5", "5 MB"]
    assert rows["reduce_scatter"] == ["5", "5 MB"]
    assert f"all {plan.peak.total / 1e9:.4g} GB" in re.sub(" +", " ", text)
    assert f"{sum(work.launches for work in plan.works):,} operations" in text


def test_a_table_of_anything_fits_a_screen() -> None:
    works = tuple(Work("all_gather", f"stage{'x' * i}", axis=(f"a{i}",), dtype=f"int{i}", sent=i) for i in range(100))
    rows = tuple(Allocation("gradients", f"file{i}.py:3", "long" * 40, i, i) for i in range(100))
    plan = dataclasses.replace(NOTHING, works=works, allocations=rows, host={"optimizer": 5})
    lines = plan.table(60).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 60
    assert "… 87 more rows" in lines
    assert "… 95 more rows" in lines
    assert "on the host" in plan.table(60)


def test_a_plan_prints_as_its_table_with_and_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = stack(4)
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=printed.WIDE, force_terminal=True, color_system="truecolor")
    console.print(plan)
    colored = out.getvalue()
    assert "\x1b[" in colored
    plain = re.sub(r"\x1b\[[\d;]*m", "", colored)
    assert [line.rstrip() for line in plain.splitlines()] == plan.text(printed.WIDE).splitlines()
    assert "<span" in plan._repr_html_()
    monkeypatch.setattr(printed, "find_spec", lambda name: None)
    assert repr(plan) == str(plan) == plan.table()
    assert plan._repr_html_().startswith("<pre>step on")


def test_an_empty_plan_has_views(tmp_path: Path) -> None:
    assert "no mesh: rank 0 of 1" in str(NOTHING)
    NOTHING.save_picture(tmp_path / "picture.png")
    NOTHING.trace(tmp_path / "trace.json")


def test_times_of_another_plan_are_an_error(tmp_path: Path) -> None:
    plan = stack(3)
    for view in (plan.save_picture, plan.trace):
        told = refused(partial(view, tmp_path / "x.png", times=At((0.0,) * 17, (1.0,) * 17)), ValueError)
        assert "times must be those of this plan's 19 works, got 17" in told


# --- the picture and the trace ---


def test_a_picture_has_the_lanes_and_the_memory(tmp_path: Path) -> None:
    plan = stack(6)
    lanes, memory = plan.figure(taking(plan)).axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["compute", "gathers", "reductions"]
    assert sum(len(drawn.get_paths()) for drawn in lanes.collections) == len(plan.works)
    assert memory.get_xlim() == (0, max(taking(plan).ends))
    assert len(plan.figure(beside=stack(3)).axes) == 4
    plan.save_picture(tmp_path / "plan.png", taking(plan), beside=stack(3))
    assert matplotlib.image.imread(tmp_path / "plan.png").shape[1] > 1000
    assert "names no kind of picture" in refused(lambda: plan.save_picture(tmp_path / "plan.txt"), ValueError)


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printed, "find_spec", lambda name: None)
    assert "pip install '.[examples]'" in refused(stack(2).figure, ModuleNotFoundError)


def test_a_trace_has_streams_as_threads_and_memory_as_a_counter(tmp_path: Path) -> None:
    plan = stack(6)
    times = taking(plan)
    plan.trace(tmp_path / "step.json", times)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    by_kind = {kind: [event for event in events if event["ph"] == kind] for kind in "MXC"}
    assert len(events) == sum(map(len, by_kind.values()))
    named = {e["tid"]: e["args"]["name"] for e in by_kind["M"] if e["name"] == "thread_name"}
    assert named == {0: "compute", 1: "gathers", 2: "reductions"}
    assert [event["ts"] for event in by_kind["X"]] == pytest.approx([t * 1e6 for t in times.begins])
    assert [sum(event["args"].values()) for event in by_kind["C"]] == [one.total for one in plan.held]
    assert {event["pid"] for event in events} == {plan.rank}
    ends: dict[int, float] = {}
    for event in by_kind["X"]:  # a thread's works do not overlap, or viewers would nest them
        assert event["ts"] >= ends.get(event["tid"], 0) - 1e-6
        ends[event["tid"]] = event["ts"] + event["dur"]
