"""The benchmark of the loop runs, and counts the same steps of each."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.running import told


def test_the_command_runs_and_says_what_the_loop_costs(tmp_path: Path) -> None:
    found = told("loop", tmp_path, "--rounds", "2", "--steps", "8")
    assert [row["system"] for row in found["rows"]] == ["bare loop", "sf.run.loop", "sf.run.loop, saving"]
    bare, loop, saving = (row["steps"] for row in found["rows"])
    assert bare == loop == saving == 2 * 4
    assert [goal["name"] for goal in found["goals"]] == ["step in the loop / bare"]
