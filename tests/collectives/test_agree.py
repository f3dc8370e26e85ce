"""Ranks that differ are told what differs, who has it, and who lacks it."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.collectives.agree import agree, failing_together
from shardfn.mesh.axes import axis_of
from shardfn.testing import World
from tests.refusals import told

SUM = "psum(torch.float32 []) over a, called at "
CASES: dict[str, tuple[dict[int, list[str]], str]] = {
    "a fact": ({1: ["rows=99", "seed=0"]}, "ranks 0, 2 have rows=100; rank 1 has rows=99. Advice"),
    "three facts": (
        {1: ["rows=99", "seed=0"], 2: ["rows=98", "seed=0"]},
        "rank 0 has rows=100; rank 1 has rows=99; rank 2 has rows=98. Advice",
    ),
    "one more": (
        {1: ["rows=100", "seed=0", "w: (2,), values with checksum 5"]},
        "the things differ between ranks: rank 1 has w: (2,), which ranks 0, 2 lack. Advice",
    ),
    "one fewer": ({2: ["seed=0"]}, "the things differ between ranks: ranks 0, 1 have rows=100, which rank 2 lacks. "),
    "one more of the same name": (
        {1: ["rows=100", "rows=50", "seed=0"]},
        "the things differ between ranks: rank 1 has rows=50. Advice",
    ),
    "something without a name": (
        {1: ["another thing", "seed=0"]},
        "ranks 0, 2 have rows=100, which rank 1 lacks; rank 1 has another thing. Advice",
    ),
    "values": (
        {rank: [f"w: (2,), values with checksum {rank // 2}"] for rank in range(3)},
        "differ between ranks: ranks 0, 1 have w: (2,), values with checksum 0; rank 2 has w: (2,), values with",
    ),
    "values because of a fact": (
        {rank: [f"w: (2,), values with checksum {rank}", f"v: {rank // 2}"] for rank in range(3)},
        "the things differ between ranks: ranks 0, 1 have v: 0; rank 2 has v: 1. Advice",
    ),
    "order": (
        {2: ["seed=0", "rows=100"]},
        "differ between ranks: ranks 0, 1 have rows=100; seed=0; rank 2 has seed=0; rows=100. Advice",
    ),
}  # fmt: skip


def compared() -> dict[str, str]:
    mesh = sf.make_mesh(a=3, device="cpu")
    found = {}
    for name, (others, _) in CASES.items():
        mine = others.get(dist.get_rank(), ["rows=100", "seed=0"])
        found[name] = told(partial(agree, mine, mesh, "caller", subject=("the things", "Advice")))
    return found


@pytest.mark.world(3, "threads")
def test_who_has_what_and_who_lacks_it(world: World) -> None:
    for found in world.run(compared):
        for name, (_, words) in CASES.items():
            assert words in found[name], (name, found[name])
            assert found[name].startswith("ValueError: caller: the things differ between ranks: ")


def of_some_ranks() -> tuple[str, str]:
    mesh = sf.make_mesh(a=2, b=2, device="cpu")
    rank = dist.get_rank()
    error = ValueError("it is odd") if rank == 3 else None
    return (
        told(lambda: agree([f"n={rank}"], mesh, "caller", axes=("b",))),
        told(lambda: agree([], mesh, "caller", error, axes=("b",))),
    )


@pytest.mark.world(4, "threads")
def test_ranks_are_named_by_their_numbers_in_the_world(world: World) -> None:
    found = world.run(of_some_ranks)
    for rank, (differs, fails) in enumerate(found):
        first = rank // 2 * 2
        assert f"rank {first} has n={first}; rank {first + 1} has n={first + 1}. " in differs
        own = {2: "ValueError: caller: rank 3 failed: it is odd", 3: "ValueError: it is odd"}
        assert fails == own.get(rank, "it was done")


def on_two_meshes() -> str:
    mesh, rank = sf.make_mesh(a=2, b=2, device="cpu"), dist.get_rank()
    along = [axis_of(mesh, (name,)) for name in ("b", "a")]

    def run() -> None:
        with failing_together(along, "caller"):
            if rank == 0:
                raise ValueError("it is odd")
        if 0 < rank < 3:  # rank 1 is along one of them, and rank 2 along the other
            agree([], along[rank - 1], "caller")

    return told(run)


@pytest.mark.world(4, "threads")
def test_the_ranks_of_each_mesh_hear_of_an_error(world: World) -> None:
    heard = "ValueError: caller: rank 0 failed: it is odd"
    assert world.run(on_two_meshes) == ["ValueError: it is odd", heard, heard, "it was done"]


def differing_on_one_of_two_meshes() -> str:
    mesh, rank = sf.make_mesh(a=2, b=2, device="cpu"), dist.get_rank()
    along = [axis_of(mesh, (name,)) for name in ("b", "a")]
    return told(lambda: agree([f"n={rank == 1}"], along, "caller"))


@pytest.mark.world(4, "threads")
def test_a_difference_on_one_mesh_is_told_to_the_ranks_of_the_next(world: World) -> None:
    ours, *others = world.run(differing_on_one_of_two_meshes)
    differ = "ValueError: caller: the arguments differ between ranks: rank 0 has n=False; rank 1 has n=True. "
    assert ours.startswith(differ)
    assert others[0].startswith(differ)
    for rank, heard in enumerate(others[1:]):
        assert heard.startswith(f"ValueError: caller: rank {rank} failed: the arguments differ between ranks: rank 0")


def all_fail() -> str:
    mesh = sf.make_mesh(a=2, device="cpu")
    return told(lambda: agree(["n=1"], mesh, "caller", ValueError("it is odd")))


@pytest.mark.world(2, "threads")
def test_an_error_on_all_ranks_is_raised_as_it_is(world: World) -> None:
    assert world.run(all_fail) == ["ValueError: it is odd"] * 2


def one_fails_alone() -> str:
    mesh = sf.make_mesh(a=2, device="cpu")

    def total() -> Any:
        if dist.get_rank() == 1:
            sf.shard({"w": 3}, mesh, sf.full_shard("a"))
        return sf.psum(torch.ones(()), "a")

    with sf.debug(collectives=True):
        return told(sf.shard_map(total, mesh=mesh, in_specs=(), out_specs=...))


@pytest.mark.world(2)
def test_a_rank_that_fails_where_others_compare_collectives_is_heard(world: World) -> None:
    other, own = world.run(one_fails_alone)
    assert own.startswith("TypeError: w is of type int; ")
    assert f"collectives differ between ranks: rank 0 has {SUM}" in other
    assert "; rank 1 has a comparison of the arguments of 'shard', called at " in other
    assert ": w is of type int; parameters are plain tensors" in other


def one_more_layer(how: str) -> str:
    mesh = sf.make_mesh(a=3, device="cpu")
    more = dist.get_rank() == 1
    layers = [{"w": torch.ones(4, 4)} for _ in range(4)]
    stage = sf.stage(lambda p, x: x @ p["w"])

    def model(params: Any, number: int) -> Any:
        x = torch.ones(2, 4)
        for p in params[:number]:
            x = stage(p, x)
        return sf.psum(x.sum(), "a")

    def run() -> None:
        params = sf.shard(layers[: 3 + more] if how == "held" else layers, mesh, sf.full_shard("a"))
        sf.shard_map(model, mesh=mesh, in_specs=..., out_specs=...)(params, 3 + more)

    return told(run)


@pytest.mark.world(3)
def test_a_layer_that_one_rank_has_more_is_named_without_checksums(world: World) -> None:
    for said in world.run(one_more_layer, "held"):
        assert (
            "rank 1 has 3: float32, 1/3 over a, 64 B a rank, which ranks 0, 2 lack; rank 1 has 3.w: (4, 4), whi" in said
        )
        assert "checksum" not in said


@pytest.mark.world(3)
def test_a_layer_that_one_rank_runs_more_is_named_on_every_rank(world: World) -> None:
    for said in world.run(one_more_layer, "run"):
        assert re.search(
            r"ranks 0, 2 have psum\(\S+ \[\]\) over a, called at \S+; rank 1 has stage: <lambda> on 3: ", said
        )
        assert "checksum" not in said
