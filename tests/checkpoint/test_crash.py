"""What a kill at any moment leaves; `python -m tests.crash` does more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import crash


@pytest.mark.parametrize("meshes", [crash.MESHES[:1], crash.MESHES], ids=["one mesh", "any mesh"])
def test_killed_runs_lose_nothing(meshes: list[dict[str, int]], tmp_path: Path) -> None:
    tally, worst = crash.crash(kills=4, steps=10, seed=0, meshes=meshes, folder=tmp_path)
    assert sum(tally.ends.values()) == 4
    assert tally.steps >= 10
    assert worst == 0 if len(meshes) == 1 else worst < 1e-12
