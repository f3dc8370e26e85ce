"""The benchmark of the checker runs, and what it counts is none."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.running import told


def test_the_command_runs_and_says_what_the_checker_costs(tmp_path: Path) -> None:
    found = told("check", tmp_path, "--rounds", "2", "--steps", "2")
    assert [(row["ranks"], row["step"]) for row in found["rows"]] == [
        (ranks, step) for ranks in (2, 4) for step in ("check=True", "check=False")
    ]
    assert all(row["Python calls of a later one"] > 0 for row in found["rows"])
    counted = [goal for goal in found["goals"] if goal["limit"] == 0]
    assert len(counted) == 4
    assert all(goal["value"] == 0 for goal in counted)
