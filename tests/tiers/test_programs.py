"""Programs that do not know where their numbers are kept: on tiers they give the same bits as in memory.

python -m tests.tiers.test_programs --ranks 2 4    # every program with every strategy and every tier
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor

from shardfn.testing import World
from shardfn.testing import world as shared_world
from shardfn.tiers import streaming, transfers
from tests.models import STRATEGIES, mesh_of
from tests.tiers.programs import PROGRAMS
from tests.tiers.setting import disk, late

TIERS: dict[str, dict[str, Any]] = {
    "everything": {"params": "disk", "grads": "disk", "state": "disk"},
    "params": {"params": "disk"},
    "grads": {"grads": "disk"},
    "state": {"state": "disk"},
    "params and grads": {"params": "disk", "grads": "disk"},
    "on the host": {"params": "host", "grads": "host", "state": "host"},
}
SIZES = {1: {"replica": 1, "shard": 1}, 2: {"replica": 1, "shard": 2}, 4: {"replica": 2, "shard": 2}}
TENSOR = "tensor"  # stands for a strategy, and is a mesh: with a second axis that cuts parameters


def in_pieces(folder: str) -> Any:
    """Small numbers go as large ones do: in several parts, through several windows, some of them not aligned."""
    environ = mock.patch.dict(os.environ, {"SHARDFN_SCRATCH": folder})
    parts, windows = mock.patch.object(transfers, "AT_ONCE", 8192), mock.patch.object(streaming, "CHUNK", 192)
    return environ, parts, windows


def differ(name: str, strategy: str, tiers: list[str], size: int, folder: str) -> list[str]:
    """What a program gives otherwise on tiers than in memory."""
    placement = STRATEGIES["full_shard" if strategy == TENSOR else strategy]
    mesh = mesh_of(shard=max(size // 2, 1), tensor=min(size, 2)) if strategy == TENSOR else mesh_of(**SIZES[size])
    if strategy == TENSOR:
        placement = placement.without(("replica",)) if "replica" in placement.replicas else type(placement)(("shard",))
    environ, parts, windows = in_pieces(folder)
    with environ, parts, windows:
        torch.manual_seed(0)
        want, found = PROGRAMS[name](mesh, placement), []
        for tier in tiers:
            torch.manual_seed(0)
            got = PROGRAMS[name](mesh, placement.with_tiers(**TIERS[tier]))
            found += [f"{name}, {strategy}, {tier}: {told}" for told in different(got, want)]
    return found + [f"{name}: {left} is left" for left in os.listdir(folder)]


def different(got: Any, want: Any) -> list[str]:
    (a, one), (b, other) = optree.tree_flatten(got), optree.tree_flatten(want)
    if len(a) != len(b):
        return [f"{one} in place of {other}"]
    return [f"leaf {k}: {x} in place of {y}" for k, (x, y) in enumerate(zip(a, b, strict=True)) if not same(x, y)]


def same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return bool(x == y)
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)


def all_of(cases: list[tuple[str, str, list[str]]], size: int, folder: str) -> list[str]:
    return list(itertools.chain.from_iterable(differ(*case, size, folder) for case in cases))


def dealt() -> list[tuple[str, str, list[str]]]:
    """Each program with a strategy and a tier, in turn, and with everything on disk."""
    strategies, tiers = itertools.cycle(STRATEGIES), itertools.cycle(list(TIERS)[1:])
    return [(name, next(strategies), ["everything", next(tiers)][: 1 + k % 2]) for k, name in enumerate(PROGRAMS)]


GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.world(2)
def test_programs_give_the_same_bits_on_tiers(world: World, group: int, tmp_path: Path) -> None:
    assert world.run(all_of, dealt()[group::GROUPS], 2, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("size", [1, 4])
def test_some_programs_on_one_rank_and_on_four(size: int, tmp_path: Path) -> None:
    names = ("everything", "accumulate, deferring all", "changed in place between steps", "state cut further")
    cases = [(name, strategy, ["everything"]) for name in names for strategy in ("hfsdp", "hpz")]
    assert shared_world(size).run(all_of, cases, size, str(tmp_path)) == [[]] * size


@pytest.mark.world(2)
def test_parameters_that_another_axis_cuts(world: World, tmp_path: Path) -> None:
    assert world.run(all_of, [("tensor parallel", TENSOR, list(TIERS))], 2, str(tmp_path)) == [[], []]


LATE = (
    "adamw-masked", "prefetch of three", "accumulate, deferring replicas", "changed in place between steps",
    "loops that end early", "layers out of order", "tied shards", "a step that fails in between",
)  # fmt: skip


def on_a_late_disk(seed: int, folder: str) -> list[str]:
    rank = torch.distributed.get_rank()
    with disk(late(10 * seed + rank, 0.002)):
        return all_of([(name, "full_shard", ["everything"]) for name in LATE], 2, folder)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.world(2)
def test_when_a_disk_answers_changes_nothing(world: World, seed: int, tmp_path: Path) -> None:
    assert world.run(on_a_late_disk, seed, str(tmp_path)) == [[], []]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for ranks, program in itertools.product(args.ranks, PROGRAMS):
            every = [(program, strategy, list(TIERS)) for strategy in STRATEGIES]
            told = shared_world(ranks).with_deadline(600).run(all_of, every, ranks, place)
            print(f"{ranks} ranks, {program}: {told if any(told) else 'the same bits'}", flush=True)
