"""Tiny forms of benchmarks run as commands, and their rows and goals are complete."""

from __future__ import annotations

from pathlib import Path

import shardfn as sf
from benchmarks.data import Memmap
from tests.benchmarks.running import told


def test_feeding_on_one_and_two_ranks_is_measured(tmp_path: Path) -> None:
    read = told("data", tmp_path)
    assert [goal["limit"] for goal in read["goals"]] == [1.02, 1.0, 1.0]
    assert all(goal["value"] > 0 for goal in read["goals"])
    assert [row["ranks"] for row in read["rows"] if "ranks" in row] == [1, 2]


def test_both_sides_read_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    sf.run.write_tokens(path, [[5, 6, 7], [1, 2], [9, 8, 7, 6], [3]])
    theirs, ours = Memmap(sf.run.TokenFile(path).tokens, 3), sf.run.token_windows(path, 3)
    assert [row.tolist() for row in (ours[i] for i in range(len(ours)))] == [
        theirs[i].tolist() for i in range(len(theirs))
    ]


def test_the_command_runs_and_says_what_the_checker_costs(tmp_path: Path) -> None:
    found = told("check", tmp_path, "--rounds", "2", "--steps", "2")
    assert [(row["ranks"], row["step"]) for row in found["rows"]] == [
        (ranks, step) for ranks in (2, 4) for step in ("check=True", "check=False")
    ]
    assert all(row["Python calls of a later one"] > 0 for row in found["rows"])
    counted = [goal for goal in found["goals"] if goal["limit"] == 0]
    assert len(counted) == 4
    assert all(goal["value"] == 0 for goal in counted)


def test_the_command_runs_and_says_what_the_loop_costs(tmp_path: Path) -> None:
    found = told("loop", tmp_path, "--rounds", "2", "--steps", "8")
    assert [row["system"] for row in found["rows"]] == ["bare loop", "sf.run.loop", "sf.run.loop, saving"]
    bare, loop, saving = (row["steps"] for row in found["rows"])
    assert bare == loop == saving == 2 * 4
    assert [goal["name"] for goal in found["goals"]] == ["step in the loop / bare"]
