"""The benchmark of feeding runs, and reads what it says."""

from __future__ import annotations

from pathlib import Path

import shardfn as sf
from benchmarks.data import Memmap
from tests.benchmarks.running import told


def test_the_command_runs(tmp_path: Path) -> None:
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
