"""A stage that several parts of a pipeline use: its gradient is the sum over its uses."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import parallel
from shardfn.testing import World
from tests.models import distance, drawn, residual

ROWS, LENGTH, VOCABULARY, WIDTH, MICRO = 4, 3, 11, 8, 4
Params = dict[str, Any]


def whole() -> Params:
    normal = drawn(0)
    blocks = [{"w": normal(WIDTH, WIDTH) / 3, "b": normal(WIDTH)} for _ in range(2)]
    return {"table": {"w": normal(VOCABULARY, WIDTH)}, "blocks": blocks}


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (MICRO, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def stages(**options: Any) -> tuple[Any, ...]:
    """The embedding, a block, and the head, whose matrix is the embedding's."""

    def embed(p: Params, rows: Tensor) -> Tensor:
        return p["w"][rows]

    def head(p: Params, x: Tensor, rows: Tensor) -> Tensor:
        logits = (x @ p["w"].T).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, rows.flatten(), reduction="sum")

    return sf.stage(embed, **options), sf.stage(residual, **options), sf.stage(head, **options)


def loss(
    params: Params,
    batches: Any,
    pipe: Any = (),
    data: Any = (),
    schedule: Any = "1f1b",
    table: Any = None,
    **options: Any,
) -> Tensor:
    """A sum over tokens; with `table`, the one in the parameters is not used."""
    embed, block, head = stages(**options)

    def part(params: Params, x: Any, rows: Tensor) -> Tensor:
        index, size, tied = sf.axis_index(pipe), sf.axis_size(pipe), table or params["table"]
        if index == 0:
            x = embed(tied, rows[:, :-1])
        for i in parallel.split_layers(2, size)[index]:
            x = block(params["blocks"][i], x)
        return head(tied, x, rows[:, 1:]) if index == size - 1 else x

    return sf.psum(parallel.pipeline(part, params, batches, pipe, schedule=schedule), data)


def furthest(got: Any, wanted: Any) -> float:
    """The largest relative difference; frozen parameters have no gradient."""
    pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if a is not None]
    return distance([a for a, _ in pairs], [b for _, b in pairs], floor=0.0)


TABLES = {
    "the same along pipe": sf.hybrid_shard(shard="shard", replica="pipe"),
    "whole": sf.ddp(("pipe", "shard")),
    "gradients cut": sf.strategies.zero1(("shard", "pipe")),
    "kept for the step": sf.hybrid_shard(shard="shard", replica="pipe").with_reshard("step"),
}
OPTIONS: list[dict[str, Any]] = [{}, {"remat": True}, {"schedule": "gpipe"}]


def placed(params: Params, mesh: Any, table: Any, **options: Any) -> Params:
    """Each block where it is used; with no strategy for the table, all parameters on all ranks along the pipe."""
    placements = {
        "table": table,
        "0": sf.full_shard("shard").only_on(pipe=0),
        "1": sf.full_shard("shard").only_on(pipe=1),
    }

    def strategy(path: str, shape: tuple[int, ...]) -> sf.Placement:
        return placements[path.split(".")[-2]] if table else TABLES["the same along pipe"]

    return sf.shard(params, mesh, strategy, **options)


def differences(sizes: dict[str, int], tables: list[str | None], options: list[dict[str, Any]]) -> dict[Any, float]:
    mesh = sf.make_mesh(device="cpu", **sizes)
    params, xs = whole(), tokens()
    along = optree.tree_map(torch.cos, params)
    gradient = torch.func.grad(loss)(params, list(xs))
    product = torch.func.jvp(lambda p: torch.func.grad(loss)(p, list(xs)), (params,), (along,))[1]
    found = {}

    def mapped(f: Any) -> Any:
        return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)

    def f(p: Params, **option: Any) -> Tensor:
        return loss(p, list(sf.collectives.local_slice(xs, "shard", dim=1)), "pipe", "shard", **option)

    def compare(name: Any, got: Any, wanted: Any) -> None:
        found[name] = furthest(optree.tree_leaves(got, none_is_leaf=True), optree.tree_leaves(wanted))

    for name in tables:
        table = TABLES.get(name or "")
        p, v = placed(params, mesh, table), placed(along, mesh, table)
        for option in options:
            value, got = mapped(lambda p, option=option: sf.value_and_grad(f)(p, **option))(p)
            compare((name, str(option)), sf.unshard(got), gradient)
            compare((name, str(option), "value"), value, loss(params, list(xs)))
        if name in (None, "whole"):
            for jvp in (torch.func.jvp, sf.jvp):
                got = mapped(lambda p, v, jvp=jvp: jvp(sf.grad(f), (p,), (v,))[1])(p, v)
                compare((name, "second derivative", jvp.__module__), sf.unshard(got), product)
        if name == "the same along pipe":
            frozen = placed(params, mesh, table, frozen=["table.*"])
            compare("frozen", sf.unshard(mapped(sf.grad(f))(frozen)), gradient)
            closed = mapped(lambda p: sf.grad(lambda b: f({"blocks": b}, table=p["table"]))(p["blocks"]))
            compare("frozen and closed over", sf.unshard(closed(frozen)), gradient["blocks"])
            others = placed(params, mesh, table, frozen=["blocks.*"])
            compare("the others frozen", sf.unshard(mapped(sf.grad(f))(others)), gradient)
    return found


@pytest.mark.world(2)
def test_its_gradient_is_the_sum_over_its_uses(world: World) -> None:
    for found in world.run(differences, {"pipe": 2, "shard": 1}, ["whole", None], OPTIONS):
        assert len(found) == 2 * (3 * 2 + 2)
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


@pytest.mark.world(4)
def test_its_gradient_is_the_sum_over_its_uses_and_over_the_ranks_that_cut_it(world: World) -> None:
    for found in world.run(differences, {"pipe": 2, "shard": 2}, [*TABLES, None], [{}]):
        assert len(found) == 5 * 2 + 2 * 2 + 3
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


def along_the_pipe() -> None:
    """A table that is cut along the pipe, which no part can gather alone; found out at its second call too."""
    mesh = sf.make_mesh(device="cpu", pipe=2, shard=1)
    p = placed(whole(), mesh, sf.full_shard("pipe"))
    sf.shard_map(lambda p: loss(p, list(tokens()), "pipe"), mesh=mesh, in_specs=..., out_specs=...)(p)


@pytest.mark.world(2)
def test_one_that_is_cut_along_the_pipe_is_refused_on_every_rank(world: World) -> None:
    for error in world.with_deadline(20).errors(along_the_pipe):
        assert isinstance(error, RuntimeError)
        assert "gathering 'table': ranks along 'pipe' run independently" in str(error)
