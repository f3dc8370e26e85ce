"""What is seen of a run: on a terminal, in a log, in files."""

from __future__ import annotations

import json
import math
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.run.async_metrics import peak_of
from shardfn.run.reports import lasting, metrics_line
from shardfn.testing import World
from tests.refusals import told

ROOT = Path(__file__).resolve().parents[2]


def run(steps: int, report: Any, folder: Path | None = None, loss: float = 1.5) -> None:
    def step(state: int, batch: Any) -> Any:
        return state + 1, {"loss": loss, "tokens": 100}

    save: dict[str, Any] = {} if folder is None else {"save": folder, "save_every": 2}
    sf.run.loop(step, 0, lambda start: range(start, 99), steps=steps, report=report, **save)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_json_have_each_step_once_also_of_a_run_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    run(4, sf.run.jsonl(path), tmp_path / "run")
    whole = path.read_text()
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert lines(path)[0].keys() == {"step", "loss", "tokens", "seconds", "tokens_per_second", "memory_gib"}
    path.write_text(whole + '{"step": 5, "loss": 9}\n{"step": 6, "lo')
    run(7, sf.run.jsonl(path), tmp_path / "run", loss=2.5)
    assert [(line["step"], line["loss"]) for line in lines(path)] == [
        (1, 1.5), (2, 1.5), (3, 1.5), (4, 1.5), (5, 2.5), (6, 2.5), (7, 2.5)
    ]  # fmt: skip
    assert path.read_text().startswith(whole)


def test_lines_of_json_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    report = sf.run.jsonl(tmp_path / "metrics")
    report.begin(0, 9)
    report(1, {"loss": math.nan, "norm": math.inf, "rate": 0.1})
    report.end()
    assert lines(tmp_path / "metrics") == [{"step": 1, "loss": None, "norm": None, "rate": 0.1}]


def test_a_new_run_begins_a_file_anew_and_keeps_the_old_one(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0):
        run(2, sf.run.jsonl(tmp_path / "metrics"), loss=loss)
    for name, loss in (("metrics.1", 1.0), ("metrics.2", 2.0), ("metrics", 3.0)):
        assert [line["loss"] for line in lines(tmp_path / name)] == [loss, loss]


FOREIGN = {
    "a data set": '{"text": "a"}\n{"text": "b"}\n',
    "one with steps": '{"step": 1, "text": "a"}\n',
    "something later": '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 2.0}\n[3]\n',
    "steps in no order": '{"step": 2, "loss": 2.0}\n{"step": 1, "loss": 2.0}\n',
    "one line": '{"text": "a"}',
    "no text": "\0\0",
}


@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, name: str, begins: int) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(FOREIGN[name])
    said = told(lambda: sf.run.jsonl(path).begin(begins, 9))
    assert said.startswith("ValueError: sf.run.jsonl: line ")
    assert f"of {path} is not a run's metrics" in said
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("train.jsonl", FOREIGN[name])]


def into_a_data_set(path: Path) -> str:
    return told(lambda: run(9, sf.run.jsonl(path)))


@pytest.mark.world(2)
def test_of_a_file_of_something_else_all_ranks_hear(world: World, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(FOREIGN["a data set"])
    first, second = world.run(into_a_data_set, tmp_path / "train.jsonl")
    assert first.startswith("ValueError: sf.run.jsonl: line 1 of ")
    assert second.startswith("RuntimeError: sf.run.loop: rank 0 has failed: ValueError: sf.run.jsonl: line 1 of ")


@pytest.mark.parametrize(
    "torn", ["", "{", '{"step": ', '{"step": 3', '{"step": 3, "loss": 1', "\0\0", '{"step": 3\0\0']
)
def test_a_line_that_was_torn_is_cut_off(tmp_path: Path, torn: str) -> None:
    path, kept = tmp_path / "metrics", '{"step": 1, "loss": null}\n{"step": 2, "a": 2.0}\n{"step": 2, "eval/a": 2.0}\n'
    path.write_text(f"{kept}{torn}")
    report = sf.run.jsonl(path)
    report.begin(2, 9)
    report.end()
    assert path.read_text() == kept


def test_a_disk_that_is_full_is_named_by_the_file(tmp_path: Path) -> None:
    report = sf.run.jsonl(tmp_path / "metrics")
    report.begin(0, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, before[1]))
    try:
        said = told(lambda: report(1, {"loss": 1.0}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        report.end()
    assert said == f"OSError: [Errno 27] File too large: '{tmp_path / 'metrics'}'"


def test_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    for steps in (4, 7):
        run(steps, sf.run.tensorboard(tmp_path / "board"), tmp_path / "run")
    # Its reader warns of its own use of the standard library.
    code = """
import sys, warnings
warnings.simplefilter("ignore")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1])
found.Reload()
print([(one.step, one.value) for one in found.Scalars("loss")])
"""
    said = subprocess.run([sys.executable, "-c", code, tmp_path / "board"], check=True, capture_output=True, text=True)
    assert said.stdout == f"{[(n, 1.5) for n in range(1, 8)]}\n"


def test_without_tensorboard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shardfn.run.reports.find_spec", lambda name: None)
    said = told(lambda: sf.run.tensorboard(tmp_path))
    assert said == (
        "ModuleNotFoundError: sf.run.tensorboard needs tensorboard, which is in the extra tensorboard: "
        "pip install '.[tensorboard]'"
    )


def test_without_a_terminal_progress_is_lines_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    run(50, None)
    said = capsys.readouterr().err
    first, last = said.splitlines()
    assert first.startswith("step 1/50  loss 1.5  ")
    assert last.startswith("step 50/50  loss 1.5  ")
    assert " tokens/s  " in last
    assert last.endswith(" GiB  0 s left")
    assert said.isascii()
    assert "\x1b" not in said
    run(5, sf.run.progress(seconds=1e-9))
    assert len(capsys.readouterr().err.splitlines()) == 5


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], read: list[float]) -> list[str]:
    """What progress says is left of 100 steps, of which each is read at a time; the first takes a minute by itself."""
    clock = [0.0]
    monkeypatch.setattr("shardfn.run.reports.time.monotonic", lambda: clock[0])
    report = sf.run.progress(seconds=1e-9)
    report.begin(0, 100)
    for step, clock[0] in enumerate(read, 1):
        clock[0] += step * 1e-6  # no two at the same time
        report(step, {"loss": 1.5, "seconds": 60.0 if step == 1 else 1.0})
    return [line.partition(" s/step")[2].strip() for line in capsys.readouterr().err.splitlines()]


def test_the_time_left_is_shown_once_it_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, capsys, [60, 61, 62, 63, 64]) == ["", "", "", "1 min 36 s left", "1 min 35 s left"]
    # With evaluations in between, which the seconds of steps do not include.
    assert shown(monkeypatch, capsys, [60, 62, 64, 66])[3] == "3 min 12 s left"
    # Steps may be read all at once, before a checkpoint.
    assert shown(monkeypatch, capsys, [64, 64, 64, 64])[3] == "1 min 36 s left"


def test_a_run_that_resumes_says_so_in_its_first_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(2, None, tmp_path)
    assert "resumed" not in capsys.readouterr().err
    run(4, None, tmp_path)
    first, *later = capsys.readouterr().err.splitlines()
    assert first == f"resumed from {tmp_path}/step-00000002 (step 2)"
    assert all(line.startswith("step ") for line in later)
    run(4, None, tmp_path)  # and a run that has nothing left to do
    assert capsys.readouterr().err.splitlines() == [f"resumed from {tmp_path}/step-00000004 (step 4)"]
    run(5, [], tmp_path)
    assert capsys.readouterr().err == ""


PROGRAM = """
import sys, time, shardfn as sf
if sys.argv[1:]:
    import shardfn.run.reports as module
    sys.modules["shardfn.run.reports"].find_spec = lambda name: None
def step(state, batch):
    time.sleep(0.05)
    return state, {"loss": 1.5}
sf.run.loop(step, 0, range(99), steps=20)
"""


def on_terminal(*arguments: str) -> str:
    """What the program writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=theirs, cwd=ROOT) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                more = os.read(ours, 4096)
            except OSError:  # it has closed its end
                break
            said += more
    os.close(ours)
    assert process.returncode == 0
    return said.decode()


def test_on_a_terminal_progress_is_a_bar_that_ends() -> None:
    said = on_terminal()
    assert "step 20/20" in said
    assert "loss 1.5" in said
    assert "\x1b[?25h" in said  # the cursor is shown again
    assert said.count("\n") < 12


def test_without_rich_progress_is_lines_on_a_terminal_too() -> None:
    said = on_terminal("plain")
    assert "\x1b" not in said
    assert said.splitlines()[-1].startswith("step 20/20  loss 1.5")


def test_a_report_that_fails_ends_the_run_and_the_bar(tmp_path: Path) -> None:
    ended: list[str] = []

    class Failing:
        def begin(self, step: int, steps: int) -> None:
            ended.append("begun")

        def __call__(self, step: int, metrics: Any) -> None:
            raise OSError("disk full")

        def end(self) -> None:
            ended.append("ended")

    assert told(lambda: run(9, [Failing()])) == "OSError: disk full"
    assert ended == ["begun", "ended"]


def test_what_a_report_does_to_its_metrics_no_other_sees() -> None:
    seen: list[float] = []
    run(3, [lambda step, metrics: metrics.clear(), lambda step, metrics: seen.append(metrics["loss"])])
    assert seen == [1.5] * 3


def test_a_report_that_fails_at_its_end_is_told_and_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def __call__(self, step: int, metrics: Any) -> None:
            """Is told of a step."""

        def end(self) -> None:
            raise OSError("no room is left")

    state, run = sf.run.loop(lambda s, x: (s + x, {"loss": 0.0}), 0, [1, 2], steps=2, report=Failing())
    assert (state, run.ended) == (3, "finished")
    assert "failed at its end, and may be incomplete: OSError('no room is left')" in caplog.text


def test_figures_are_shown_in_their_units() -> None:
    figures = {"loss": 1.23456, "tokens": 9.0, "seconds": 0.5, "tokens_per_second": 123456.0, "memory_gib": 2.0}
    assert metrics_line({**figures, "tflops": 400.0, "mfu": 0.404}) == (
        "loss 1.235  123k tokens/s  0.5 s/step  2.00 GiB  400 TFLOP/s  40.4% MFU"
    )
    said = ["0 s", "59 s", "1 min 01 s", "1 h 00 min", "25 h 01 min"]
    assert [lasting(x) for x in (0.4, 59, 61, 3600, 90061)] == said


def test_devices_are_known_by_the_longest_name() -> None:
    names = ["H100 80GB HBM3", "H100 PCIe", "H200", "A100-SXM4-80GB", "L40S", "Abacus"]
    assert [peak_of(f"NVIDIA {name}") for name in names] == [989e12, 756e12, 989e12, 312e12, 362e12, None]


class Saved:
    """A report that copies each checkpoint once it is complete."""

    def __init__(self, fails_at: int = -1) -> None:
        self.seen: list[tuple[str, int, bool]] = []
        self.fails_at = fails_at

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Does nothing with steps."""

    def saved(self, path: Path, step: int) -> None:
        self.seen.append((path.name, step, not sf.checkpoint.verify(path).damage))
        if step == self.fails_at:
            raise OSError("no room in the store")


def saved_runs(folder: str) -> Any:
    mesh = sf.make_mesh(data=-1, device="cpu")
    report = Saved()

    def step(state: Any, batch: Any) -> Any:
        return state, {"loss": 1.0}

    params = sf.shard({"w": torch.ones(4)}, mesh, sf.full_shard("data"))

    def loop(name: str, steps: int, report: Any) -> None:
        sf.run.loop(
            step,
            params,
            lambda start: range(start, 9),
            steps=steps,
            save=f"{folder}/{name}",
            save_every=2,
            report=report,
        )

    loop("a", 3, report)
    loop("a", 5, report)
    return report.seen, told(lambda: loop("b", 4, Saved(fails_at=4))), told(lambda: loop("c", 4, Saved(fails_at=0)))


@pytest.mark.world(2)
def test_report_hears_of_each_checkpoint_once_it_is_complete(world: World, tmp_path: Path) -> None:
    found = world.run(saved_runs, str(tmp_path))
    assert found[0][0] == [(f"step-{n:08}", n, True) for n in (0, 2, 3, 4, 5)]
    assert found[1][0] == []
    for seen, *errors in found:
        assert all("no room in the store" in text for text in errors), (seen, errors)
