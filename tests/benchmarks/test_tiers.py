"""The benchmark of training on disk runs, and what it counts is what moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.disk import BLOCK, THREADS, Bare, moved
from benchmarks.model import Config
from benchmarks.on_disk import Training
from shardfn.testing import World
from tests.benchmarks.running import told


def test_the_command_runs_and_finds_the_same_losses_and_no_growth(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = "--rounds", "1", "--layers", "2", "4", "--scratch", str(scratch)
    goals = {goal["name"]: goal for goal in told("tiers", tmp_path, *options, seconds=300)["goals"]}
    for name in (
        "16 tokens: losses that differ from those in memory",
        "32 tokens: losses that differ from those in memory",
        "resident memory of a rank, everything included, GB",
        "resident without inputs, the deepest / the least deep",
    ):
        assert goals[name]["met"], goals[name]
    assert "bytes moved / ZeRO-Infinity's formula" in goals
    assert not list(scratch.iterdir())


def test_a_bare_disk_moves_what_it_is_told(tmp_path: Path) -> None:
    disk = Bare(str(tmp_path), THREADS * BLOCK)
    before = moved()
    assert disk.seconds(6 * BLOCK, 4 * BLOCK) > 0
    read, written = (after - was for was, after in zip(before, moved(), strict=True))
    assert (read, written) == (6 * BLOCK, 4 * BLOCK)


def trained(config: Any, folder: str) -> Any:
    training = Training(config, folder)
    training.step(16)
    before = moved()
    training.step(16)
    return [after - was for was, after in zip(before, moved(), strict=True)], training.formula()


@pytest.mark.world(2, "processes")
def test_a_step_moves_what_the_formula_says(world: World, tmp_path: Path) -> None:
    config = Config(vocabulary=512, width=256, heads=4, hidden=1024, layers=3, batch=1)
    for found, formula in world.with_deadline(120).run(trained, config, str(tmp_path)):
        assert found == pytest.approx(list(formula), rel=0.05)
