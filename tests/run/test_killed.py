"""What a kill at any moment leaves; `python -m tests.killed_runs` does more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.killed_runs import difference, kill


@pytest.mark.parametrize("sizes", [[1], [2], [4], [1, 2, 4]], ids=str)
def test_killed_runs_go_on_as_if_nothing_had_happened(sizes: list[int], tmp_path: Path) -> None:
    noise = 0.2 if len(sizes) == 1 else 0.0
    begun = kill(3, sizes, seed=len(sizes) + sizes[0], folder=tmp_path, steps=10, noise=noise)
    assert len(begun) == 4
    far, same = difference(tmp_path, sizes[0], noise)
    if len(sizes) == 1:
        assert (far, same) == (0, True)
    else:
        assert far < 1e-12
