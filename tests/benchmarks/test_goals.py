"""Figures are held: what gets worse, is missed, new or gone fails by name, and so does a benchmark that cannot run."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from benchmarks import goals, readme
from benchmarks.goals import COUNTED, TIMED, Command, Outcome
from benchmarks.report import Goal, lacks, publish, save

GIVEN: dict[str, str | None] = {"jax": None, "deepspeed": None}
STEP = Goal("step / peer", 0.5, 0.6)
COMMAND = Command("module --ranks 2", 60, 0.1)


def kept(goal: Goal, tolerance: float = 0.0) -> dict[str, Any]:
    return {"value": goal.value, "limit": goal.limit, "sense": goal.sense, "tolerance": tolerance}


def test_every_command_writes_rows_and_goals_in_one_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    least = Goal("share of the peak", 0.7, 0.6, "at least", 0.05)
    publish("a table", [{"system": "ours", "ms": 1.0}], [STEP, least, replace(least, value=0.5)], tmp_path / "told")
    told = json.loads((tmp_path / "told").read_text())
    assert told["rows"] == [{"system": "ours", "ms": 1.0}]
    assert told["goals"][0] == {
        "name": "step / peer", "value": 0.5, "limit": 0.6, "sense": "at most", "tolerance": 0.0, "met": True
    }  # fmt: skip
    assert [one["met"] for one in told["goals"]] == [True, True, False]
    assert "at least 0.6" in capsys.readouterr().out


class Parsed(Exception):
    """Where a command has read its arguments: what it has understood, and what not."""


@pytest.mark.parametrize("command", [*COUNTED, *TIMED], ids=lambda command: command.words)
def test_each_command_understands_its_words(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(parser: argparse.ArgumentParser) -> None:
        raise Parsed(*parser.parse_known_args())

    module, *words = command.words.split()
    needed = [f"--{command.needs}", "python"] if command.needs else []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *words, *needed, "--json", "told"])
    with pytest.raises(Parsed) as caught:
        importlib.import_module(f"benchmarks.{module}").main()
    understood, unknown = caught.value.args
    assert (understood.json, unknown) == (Path("told"), [])


def test_every_benchmark_is_in_the_list() -> None:
    listed = {command.words.split()[0] for command in (*COUNTED, *TIMED)}
    there = {path.stem for path in Path(goals.__file__).parent.glob("*.py") if " publish(" in path.read_text()}
    assert there - {"report"} == listed


@pytest.mark.parametrize(
    ("now", "then", "tolerance", "well", "said"),
    [
        (STEP, STEP, 0.0, True, ""),
        (replace(STEP, value=0.4), STEP, 0.0, True, "better: record it"),
        (replace(STEP, value=0.51), STEP, 0.0, False, "WORSE"),
        (replace(STEP, value=0.55), STEP, 0.1, True, ""),
        (replace(STEP, value=0.57), STEP, 0.1, False, "WORSE"),
        (replace(STEP, value=0.61), STEP, 1.0, False, "MISSED, was met"),
        (replace(STEP, value=0.7), replace(STEP, value=0.7), 0.0, True, "short, as recorded"),
        (replace(STEP, limit=0.7), STEP, 0.0, False, "ITS GOAL WAS at most 0.6"),
        (replace(STEP, limit=0.55), STEP, 0.0, True, ""),
        (replace(STEP, sense="at least"), STEP, 1.0, False, "ITS GOAL WAS at most 0.6"),
        (Goal("none", 1, 0), Goal("none", 0, 0), 0.1, False, "WORSE"),
        (Goal("many", 5, 4, "at least"), Goal("many", 6, 4, "at least"), 0.0, False, "WORSE"),
        (Goal("many", 7, 4, "at least"), Goal("many", 6, 4, "at least"), 0.0, True, "better: record it"),
        (Goal("many", 5, 3, "at least"), Goal("many", 5, 4, "at least"), 0.0, False, "ITS GOAL WAS at least 4"),
        (Goal("nan", float("nan"), 4), Goal("nan", 5, 4), 1.0, False, "WORSE"),
        (None, STEP, 0.0, False, "GONE: no command tells it"),
        (STEP, None, 0.0, False, "NEW: record it"),
    ],
)  # fmt: skip
def test_a_figure_is_judged_beside_its_record(
    now: Goal | None, then: Goal | None, tolerance: float, well: bool, said: str
) -> None:
    assert goals.judged(now, kept(then, tolerance) if then else None) == (well, said)


def test_all_figures_are_in_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    monkeypatch.setattr(goals, "outcome", lambda *_: Outcome([STEP], rows=[{"ranks": 2}]))
    goals.compared([COMMAND], GIVEN, False, file)
    saved = json.loads(file.read_text())
    assert saved["rows"] == [{"command": COMMAND.words, "ranks": 2}]
    assert [goal["name"] for goal in saved["goals"]] == [STEP.name]


def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Outcome, record: bool = False) -> list[str]:
    monkeypatch.setattr(goals, "outcome", lambda command, given: found)
    monkeypatch.setattr(goals, "RECORD", tmp_path / "figures.json")
    monkeypatch.setattr(readme, "write", lambda record: None)
    return goals.compared([COMMAND], GIVEN, record)


def test_what_worsens_fails_with_its_name_and_both_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert compared(monkeypatch, tmp_path, Outcome([STEP]), record=True) == []
    assert compared(monkeypatch, tmp_path, Outcome([STEP])) == []
    assert compared(monkeypatch, tmp_path, Outcome([replace(STEP, value=0.58)])) == [
        "module --ranks 2: step / peer: WORSE (0.58; recorded 0.5)"
    ]
    assert compared(monkeypatch, tmp_path, Outcome([Goal("another", 1, 1)])) == [
        "module --ranks 2: another: NEW: record it (1; recorded nothing)",
        "module --ranks 2: step / peer: GONE: no command tells it (nothing; recorded 0.5)",
    ]


def test_what_cannot_run_fails_and_what_lacks_something_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(monkeypatch, tmp_path, Outcome([STEP]), record=True)
    failed = "module --ranks 2: (all): FAILED: ValueError: no (nothing; recorded nothing)"
    assert compared(monkeypatch, tmp_path, Outcome(failed="ValueError: no")) == [failed]
    assert compared(monkeypatch, tmp_path, Outcome(failed="ValueError: no"), record=True)
    capsys.readouterr()
    assert compared(monkeypatch, tmp_path, Outcome(lacks="a GPU"), record=True) == []
    assert "needs a GPU" in capsys.readouterr().out
    assert compared(monkeypatch, tmp_path, Outcome([STEP])) == [], "both left the record as it was"


@pytest.mark.parametrize(
    ("program", "deadline", "found"),
    [
        ("import sys; print('x', file=sys.stderr); sys.exit(77)", 60, (77, "x")),
        ("raise ValueError('no')", 60, (1, "ValueError: no")),
        ("import time; time.sleep(60)", 0.5, (-1, "did not end within 0 s")),
        ("", 60, (0, "exit status 0")),
    ],
)
def test_a_command_ends_or_is_ended(program: str, deadline: float, found: tuple[int, str]) -> None:
    assert goals.ran([sys.executable, "-S", "-c", program], deadline) == found


def test_a_benchmark_that_lacks_something_says_what_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="it needs a GPU") as caught:
        lacks("it needs a GPU")
    assert caught.value.code == 77
    assert capsys.readouterr().err == "it needs a GPU\n"
    assert goals.outcome(Command("check_vma", 60, needs="jax"), GIVEN).lacks.startswith("--jax PYTHON")


def test_names_that_no_benchmark_has_are_refused() -> None:
    assert goals.chosen(False, ["wire", "train_step --ranks 2"]) == [COUNTED[1], TIMED[0]]
    with pytest.raises(SystemExit, match="no benchmark is called wired: structure, wire, "):
        goals.chosen(False, ["wire", "wired"])


def test_what_is_counted_is_recorded_and_the_readme_says_what_is_recorded() -> None:
    record = goals.known()
    assert {command.words for command in COUNTED} <= set(record)
    assert set(record) <= {command.words for command in (*COUNTED, *TIMED)}
    text = readme.FILE.read_text()
    assert readme.written(text, record) == text, "python -m benchmarks.goals --readme writes it"
    other = json.loads(json.dumps(record).replace('"step ms": ', '"step ms": 1'))
    assert readme.written(text, other) != text


def test_figures_that_numpy_computed_are_written(tmp_path: Path) -> None:
    save([], [Goal(kind.__name__, kind(1.5), 2) for kind in (numpy.float64, float)], tmp_path / "figures.json")
    assert [goal["met"] for goal in json.loads((tmp_path / "figures.json").read_text())["goals"]] == [True, True]
