"""A run that ended early is followed by nothing but itself; what it left out is made up for when it goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardfn as sf
from examples.run import end
from shardfn.run import interrupts
from shardfn.run.checkpoints import Origin, Saver
from shardfn.run.folder import Keeping
from shardfn.run.interrupts import reset_interrupts
from shardfn.testing import World
from tests.refusals import told
from tests.run.toy import Rows, begin, mesh_here, step_of


@pytest.fixture(autouse=True)
def begun() -> None:
    """Nothing has ended early in this process."""
    reset_interrupts()


def run(steps: int, stop: int | None = None, **more: Any) -> sf.run.Run:
    """Steps that count, and get a signal in one of them."""

    def step(state: int, batch: int) -> Any:
        if batch + 1 == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return state + 1, {"loss": 0.0}

    more.setdefault("report", [])
    return sf.run.loop(step, 0, lambda start: iter(range(start, 99)), steps=steps, **more)[1]


def state_of(state: int) -> dict[str, float]:
    return {"state": state}


def evaluations(path: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["step"], line["eval/state"]) for line in lines if "eval/state" in line]


def test_a_signal_in_the_last_step_leaves_nothing_out(tmp_path: Path) -> None:
    found = run(4, stop=4, save=tmp_path, evaluate=state_of)
    assert (found.ended, found.step) == ("finished", 4)
    assert found.metrics["eval/state"] == {4: 4.0}
    again = run(4, save=tmp_path, evaluate=state_of)
    assert (again.start, again.ended, dict(again.metrics)) == (4, "finished", {"eval/state": {4: 4.0}})


def test_an_evaluation_that_a_stop_has_left_out_comes_when_the_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    more: dict[str, Any] = {"save": tmp_path / "run", "evaluate": (state_of, 2)}
    first = run(6, stop=4, report=sf.run.jsonl(file), **more)
    assert (first.ended, first.step, first.metrics["eval/state"]) == ("preempted", 4, {2: 2.0})
    assert evaluations(file) == [(2, 2.0)]
    second = run(6, report=sf.run.jsonl(file), **more)
    assert second.metrics["eval/state"] == {4: 4.0, 6: 6.0}
    run(6, report=sf.run.jsonl(file), **more)
    assert evaluations(file) == [(2, 2.0), (4, 4.0), (6, 6.0)]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_a_signal_in_the_last_step_of_a_phase_ends_the_next(tmp_path: Path) -> None:
    assert run(4, stop=4, save=tmp_path / "a").ended == "finished"
    second = run(9, save=tmp_path / "b")
    assert (second.ended, second.step) == ("preempted", 1)
    reset_interrupts()
    third = run(9, save=tmp_path / "b")
    assert (third.start, third.ended) == (1, "finished")


@pytest.mark.parametrize("steps", [4, 6])
@pytest.mark.parametrize("every", [2, 5])
def test_a_signal_in_a_run_of_an_evaluation_ends_both_and_the_evaluation_comes_again(
    tmp_path: Path, steps: int, every: int
) -> None:
    asks, inside = [4], []

    def evaluate(state: int) -> dict[str, float]:
        inner = run(3, stop=2 if asks[:1] == [state] and asks.pop() else 0)
        inside.append((state, inner.ended))
        return {"n": inner.step}

    more: dict[str, Any] = {"save": tmp_path, "evaluate": (evaluate, 2), "save_every": every}
    first = run(steps, **more)
    assert (first.ended, first.step, first.metrics["eval/n"]) == ("preempted", 4, {2: 3.0})
    reset_interrupts()
    second = run(steps, **more)
    assert (second.start, second.ended) == (4, "finished")
    assert second.metrics["eval/n"] == dict.fromkeys(range(4, steps + 1, 2), 3.0)
    assert inside[:3] == [(2, "finished"), (4, "preempted"), (4, "finished")]


def test_an_evaluation_that_fails_costs_no_steps(tmp_path: Path) -> None:
    def failing(state: int) -> Any:
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"):
        run(5, save=tmp_path, save_every=3, evaluate=failing)
    assert run(5, save=tmp_path, save_every=3).start == 3


def test_time_for_an_evaluation_is_left_where_one_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[float] = []

    def reason(self: interrupts.Interrupts, seconds: float) -> int:
        needs.append(seconds)
        return 0

    monkeypatch.setattr(interrupts.Interrupts, "reason", reason)
    monkeypatch.setattr("shardfn.run.looping.time", SimpleNamespace(monotonic=iter(range(0, 10**6, 100)).__next__))
    run(5, evaluate=(state_of, 2))
    # Steps and evaluations take 100 s each; at 2 and 4 it is asked twice, and at 2 no evaluation has been measured.
    assert needs == [300, 300, 300, 300, 400, 400, 400, 400, 400]


def test_time_for_two_checkpoints_is_left_while_one_is_written(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Keeping(None, None), Origin(0, "null"), seconds=10.0)
    idle = saver.needs()
    saver.pending = SimpleNamespace()  # type: ignore[assignment]
    assert (idle, saver.needs()) == (15.0, 25.0)


def test_after_a_run_that_ended_early_no_other_is_kept(tmp_path: Path) -> None:
    assert run(9, stop=3, save=tmp_path / "a").ended == "preempted"
    said = told(lambda: run(4, save=tmp_path / "b"))
    assert said.startswith(f"RuntimeError: sf.run.loop: the run before this one, in {tmp_path / 'a'}, has ended early")
    assert not (tmp_path / "b").exists()
    assert run(2).ended == "finished"  # which keeps nothing
    assert run(9, stop=5, save=tmp_path / "a").step == 5
    assert told(lambda: run(4, save=tmp_path / "b")) == said
    assert run(9, save=tmp_path / "a").ended == "finished"
    assert run(4, save=tmp_path / "b").ended == "finished"
    assert run(4, stop=2).ended == "preempted"
    assert "the run before this one has ended early" in told(lambda: run(4, save=tmp_path / "c"))


def two(folder: Path) -> str:
    mesh = mesh_here()

    def stop(n: int) -> None:
        if n == 2 and mesh.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    sf.run.loop(step_of(mesh), begin(mesh), Rows(mesh, at=stop), steps=10**6, save=folder / "a", report=[])
    return told(lambda: sf.run.loop(step_of(mesh), begin(mesh), Rows(mesh), steps=9, save=folder / "b", report=[]))


@pytest.mark.world(2)
def test_all_ranks_refuse_it(world: World, tmp_path: Path) -> None:
    for said in world.run(two, tmp_path):
        assert "has ended early (run.ended == 'preempted')" in said
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("how", ["finished", "stopped", "failed", "not finite"])
def test_batches_are_closed_however_a_run_ends(how: str, tmp_path: Path) -> None:
    opened: list[str] = []

    def batches(start: int) -> Iterator[int]:
        opened.append("open")
        try:
            yield from range(start, 99)
        finally:
            opened.append("closed")

    def step(state: int, batch: int) -> Any:
        if batch == 3 and how == "failed":
            raise KeyError("lost")
        if batch == 3 and how == "stopped":
            os.kill(os.getpid(), signal.SIGTERM)
        return state + 1, {"loss": float("nan") if batch == 3 and how == "not finite" else 0.0}

    try:
        sf.run.loop(step, 0, batches, steps=8, save=tmp_path, report=[])
    except (KeyError, FloatingPointError) as error:
        held = error  # with the frames in which the iterator lives
        assert how in ("failed", "not finite"), held
        assert opened == ["open", "closed"] * (2 if how == "not finite" else 1)
    else:
        assert opened == ["open", "closed"]


def test_an_iterator_of_the_callers_can_be_read_further() -> None:
    rows = (n for n in range(9))

    def step(state: int, batch: int) -> Any:
        return state + batch, {"loss": 0.0}

    assert sf.run.loop(step, 0, rows, steps=3, report=[])[0] == 3
    assert next(rows) == 3


@pytest.mark.parametrize("ended", ["preempted", "time"])
def test_a_program_whose_run_has_to_go_on_has_not_succeeded(ended: str) -> None:
    end(sf.run.Run(0, 9, "finished", {}))
    with pytest.raises(SystemExit) as left:
        end(sf.run.Run(0, 4, ended, {}))
    assert left.value.code == os.EX_TEMPFAIL


def stopped(folder: str) -> Any:
    mesh = sf.make_mesh(data=-1, device="cpu")
    state = sf.shard({"w": torch.zeros(4)}, mesh, sf.full_shard("data"))

    def step(state: Any, batch: int) -> Any:
        return state, {"loss": 1.0}

    def levelled(metrics: Any) -> bool:
        """Whether the last evaluation was no better than the one before."""
        values = list(metrics["eval/x"].values())
        return len(values) > 1 and values[-1] >= values[-2]

    values = iter([3.0, 2.0, 2.0, 1.0, 0.0, -1.0])
    options: dict[str, Any] = {"save": folder, "save_every": 2, "report": [], "stop": levelled}
    _, run = sf.run.loop(
        step, state, lambda start: range(start, 99), steps=20, evaluate=(lambda s: {"x": next(values)}, 2), **options
    )
    never: Any = False
    wrong = told(lambda: sf.run.loop(step, state, lambda start: range(9), steps=2, stop=never, report=[]))
    _, other = sf.run.loop(step, state, lambda start: range(9), steps=2, save=f"{folder}-other", report=[])
    return run.ended, run.step, sf.checkpoint.latest(folder).name, wrong, other.ended  # type: ignore[union-attr]


@pytest.mark.parametrize("world", [1, 2], indirect=True)
def test_run_stops_and_saves_when_a_function_of_the_metrics_says_so(world: World, tmp_path: Path) -> None:
    for ended, at, newest, wrong, other in world.run(stopped, str(tmp_path / "run")):
        assert (ended, newest, other) == ("stopped", f"step-{at:08}", "finished")
        assert 6 < at <= 8
        assert "stop must be a function of the metrics" in wrong
