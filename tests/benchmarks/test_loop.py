"""The benchmark of the loop runs, and counts the same steps of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_runs_and_says_what_the_loop_costs(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    command = [sys.executable, "-m", "benchmarks.loop", "--tiny", "--rounds", "2", "--steps", "8", "--json", str(told)]
    subprocess.run(
        command, check=True, cwd=ROOT, timeout=200, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = json.loads(told.read_text())
    assert [row["system"] for row in found["rows"]] == ["bare loop", "sf.run.loop", "sf.run.loop, saving"]
    bare, loop, saving = (row["steps"] for row in found["rows"])
    assert bare == loop == saving == 2 * 4
    assert [goal["name"] for goal in found["goals"]] == ["step in the loop / bare"]
