"""What a step issues, to the collective: how many, of how many bytes, along which axes, for which stage, and when."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import World
from tests.models import block, embed, head, params

D, DEPTH = 4, 5


NAMES = ["embed", *(f"blocks.{i}" for i in range(DEPTH)), "head"]


class Setting:
    def __init__(self, placement: Any = None, sizes: Any = None, **options: Any) -> None:
        self.mesh = sf.make_mesh(device="cpu", **(sizes or {"shard": -1}))
        self.flat = sf.shard(params(DEPTH), self.mesh, placement or sf.full_shard("shard"))
        self.embed, self.block, self.head = (sf.stage(f, **options) for f in (embed, block, head))
        self.tokens = torch.arange(3) + self.mesh.get_rank()

    def loss(self, ps: Any) -> Tensor:
        x = self.embed(ps["embed"], self.tokens)
        for p in sf.layers(ps["blocks"]):
            x = self.block(p, x)
        return self.head(ps["head"], x).square().sum()

    def blocks_only(self, ps: Any) -> Tensor:
        x = torch.ones(2, D, dtype=torch.float64)
        for p in sf.layers(ps["blocks"]):
            x = self.block(p, x)
        return x.square().sum()

    def step(self, loss: Any = None) -> Any:
        return sf.value_and_grad(loss or self.loss)(self.flat)

    def recorded(self, loss: Any = None) -> sf.collectives.Ledger:
        """Of a second step: in the first, ranks compare what they run."""
        self.step(loss)
        with sf.collectives.ledger() as log:
            self.step(loss)
        return log

    def piece_bytes(self, name: str) -> int:
        first, _, number = name.partition(".")
        part = self.flat[first][int(number)] if number else self.flat[first]
        return part.values.numel() * part.values.element_size()


def kinds(log: sf.collectives.Ledger) -> Any:
    return {
        "forward": [one.stage for one in log.select(op="all_gather", backward=False)],
        "backward": [one.stage for one in log.select(op="all_gather", backward=True)],
        "scattered": [one.stage for one in log.select(op="reduce_scatter")],
        "others": len([one for one in log.records if one.op not in ("all_gather", "reduce_scatter")]),
    }


def a_step(options: dict[str, Any], loss: str = "loss") -> Any:
    s = Setting(**options)
    log = s.recorded(getattr(s, loss))
    for one in log.records:
        assert one.scheduled
        assert one.axis == ("shard",)
        assert one.dtype == torch.float64
        assert one.backward or one.op == "all_gather"
        assert one.bytes == s.piece_bytes(one.stage) * (s.mesh.size() - 1)
    return kinds(log)


both_kinds = pytest.mark.parametrize("world", [(2, "processes"), (4, "threads")], indirect=True, ids=["2", "4-threads"])


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 10])
@both_kinds
def test_backward_gathers_what_the_ring_no_longer_holds(world: World, prefetch: int) -> None:
    """The last `prefetch + 1` stages of forward are still there, and an embedding's backward reads no parameter."""
    for found in world.run(a_step, {"prefetch": prefetch}):
        assert sorted(found["forward"]) == sorted(NAMES)
        gone = NAMES[: max(0, len(NAMES) - (prefetch + 1))]
        assert found["backward"] == [name for name in reversed(gone) if name != "embed"]
        assert sorted(found["scattered"]) == sorted(NAMES)
        assert found["others"] == 0


def gathered_when_the_embedding_runs() -> Any:
    seen: list[list[str]] = []
    logs: list[sf.collectives.Ledger] = []

    def looking(p: Any, tokens: Tensor) -> Tensor:
        seen.append([one.stage for log in logs for one in log.records])
        return embed(p, tokens)

    s = Setting()
    s.embed = sf.stage(looking)

    def whole_order(ps: Any) -> Tensor:
        ordered = sf.layers([ps["embed"], *ps["blocks"], ps["head"]])
        x = s.embed(ordered[0], s.tokens)
        for p in ordered[1:-1]:
            x = s.block(p, x)
        return s.head(ordered[-1], x).square().sum()

    s.step(whole_order)
    with sf.collectives.ledger() as log:
        logs.append(log)
        s.step(whole_order)
    return seen[-1], kinds(log)


@both_kinds
def test_the_first_block_is_gathered_while_the_embedding_runs(world: World) -> None:
    for seen, found in world.run(gathered_when_the_embedding_runs):
        assert seen == ["embed", "blocks.0"]
        assert found["forward"] == NAMES
        assert found["backward"] == NAMES[-3:0:-1]


def a_layer_that_comes_again(prefetch: int) -> Any:
    s = Setting(prefetch=prefetch)
    a, b, c = s.flat["blocks"][:3]

    def loss(_: Any) -> Tensor:
        x = torch.ones(2, D, dtype=torch.float64)
        for p in sf.layers([a, b, a, c]):
            x = s.block(p, x)
        return x.square().sum()

    with torch.no_grad():
        loss(None)
        with sf.collectives.ledger() as log:
            loss(None)
    return kinds(log)["forward"]


@pytest.mark.world(2, "threads")
def test_what_follows_a_layer_that_comes_again(world: World) -> None:
    a, b, c = NAMES[1:4]
    for prefetch in (0, 1, 2):
        assert world.run(a_layer_that_comes_again, prefetch) == [[a, b, a, c]] * 2


@both_kinds
def test_gathers_and_scatters_are_issued_in_the_order_of_the_program(world: World) -> None:
    for found in world.run(a_step, {}):
        assert found["forward"] == NAMES
        assert found["scattered"] == NAMES[::-1]


def test_a_recomputing_stage_reads_its_parameters_again() -> None:
    from shardfn.testing import world

    for found in world(2, "threads").run(a_step, {"remat": True}):
        assert found["forward"] == NAMES
        assert found["backward"] == NAMES[-3::-1]


@pytest.mark.parametrize("options", [{"reshard": False}, {"reshard": False, "remat": True}], ids=str)
@pytest.mark.world(2, "threads")
def test_what_is_kept_is_not_gathered_again(world: World, options: Any) -> None:
    for found in world.run(a_step, options):
        assert (found["forward"], found["backward"]) == (NAMES, [])
        assert sorted(found["scattered"]) == sorted(NAMES)


@pytest.mark.world(2, "threads")
def test_a_first_layer_whose_input_needs_no_gradient(world: World) -> None:
    """Backward of `x + tanh(x w + b) v` reads `v` though not `w`: it is gathered; of `x w` alone, nothing is."""
    for found in world.run(a_step, {}, "blocks_only"):
        assert found["forward"] == NAMES[1:-1]
        assert found["backward"] == NAMES[1 : -1 - 2][::-1]

    def linear() -> Any:
        s = Setting()
        f = sf.stage(lambda p, x: x @ p["w"] @ torch.ones(5, D, dtype=x.dtype))

        def loss(ps: Any) -> Tensor:
            x = torch.ones(2, D, dtype=torch.float64)
            for p in sf.layers(ps["blocks"]):
                x = f(p, x)
            return x.square().sum()

        return kinds(s.recorded(loss))

    for found in world.run(linear):
        assert found["backward"] == NAMES[2:-3][::-1]


def hybrid(placement: sf.Placement) -> Any:
    s = Setting(placement, {"replica": 2, "shard": 2})
    log = s.recorded()
    found = Counter((one.op, one.axis, one.scheduled, one.backward) for one in log.records)
    total = sum(s.piece_bytes(name) for name in NAMES)
    return found, log.bytes(op="reduce_scatter"), log.bytes(op="all_reduce"), total


@pytest.mark.world(4, "threads")
def test_a_hybrid_step_sums_each_piece_over_the_replicas(world: World) -> None:
    n = len(NAMES)
    for found, scattered, reduced, total in world.run(hybrid, sf.hybrid_shard(shard="shard", replica="replica")):
        assert found == {
            ("all_gather", ("shard",), True, False): n,
            ("all_gather", ("shard",), True, True): n - 3,
            ("reduce_scatter", ("shard",), True, True): n,
            ("all_reduce", ("replica",), True, True): n,
        }
        assert (scattered, reduced) == (total, total)
    for found, *_ in world.run(hybrid, sf.strategies.hybrid_shard_zero2(shard="shard", replica="replica")):
        assert found["all_gather", ("shard",), True, True] == 0
    for found, _, reduced, total in world.run(hybrid, sf.ddp(("replica", "shard"))):
        assert found == {("all_reduce", ("replica", "shard"), True, True): n}
        assert reduced == total * 2 * 3 // 4


def by_backward() -> Any:
    s = Setting()
    leaves = [x.clone().requires_grad_() for x in (s.flat["embed"].values, s.flat["head"].values)]
    ps = {
        "embed": sf.shards.FlatShard(leaves[0], s.flat["embed"].layout),
        "blocks": s.flat["blocks"],
        "head": sf.shards.FlatShard(leaves[1], s.flat["head"].layout),
    }
    s.loss(ps).backward()
    with sf.collectives.ledger() as log:
        s.loss(ps).backward()
    return kinds(log)


@pytest.mark.world(2, "threads")
def test_what_needs_no_gradient_is_not_scattered(world: World) -> None:
    for found in world.run(by_backward):
        assert found["scattered"] == ["head", "embed"]
        assert found["backward"] == NAMES[1:-2][::-1]


def without_gradients() -> Any:
    s = Setting()
    s.step()
    with torch.no_grad(), sf.collectives.ledger() as log:
        s.loss(s.flat)
        s.loss(s.flat)
    with sf.collectives.ledger() as other:
        s.loss(s.flat)
    return kinds(log), kinds(other), log.count(scheduled=False)


@pytest.mark.world(2, "threads")
def test_a_forward_alone_gathers_each_stage_once(world: World) -> None:
    for log, other, in_place in world.run(without_gradients):
        assert log == {"forward": NAMES * 2, "backward": [], "scattered": [], "others": 0}
        assert other["forward"] == NAMES
        assert in_place == 0


def the_same_again() -> Any:
    s = Setting()

    def loss(ps: Any) -> Tensor:
        x = torch.ones(2, D, dtype=torch.float64)
        for _ in range(4):
            x = s.block(ps["blocks"][0], x)
        return x.square().sum()

    return kinds(s.recorded(loss))


@pytest.mark.world(2, "threads")
def test_parameters_that_are_there_are_not_gathered_again(world: World) -> None:
    for found in world.run(the_same_again):
        assert found["forward"] == ["blocks.0"]
        assert found["backward"] == []
        assert found["scattered"] == ["blocks.0"] * 4


# --- the ledger itself ---


def nested() -> None:
    s = Setting()
    s.step()
    with sf.collectives.ledger() as outer:
        s.step()
        with sf.collectives.ledger() as inner:
            s.step()
        with sf.collectives.ledger() as empty:
            pass
    assert len(outer.records) == 2 * len(inner.records) > 0
    assert outer.records[len(inner.records) :] == inner.records
    assert empty.records == []
    s.step()
    assert len(outer.records) == 2 * len(inner.records), "it is over"
    with pytest.raises(KeyError), sf.collectives.ledger() as broken:
        raise KeyError
    s.step()
    assert broken.records == []


@pytest.mark.world(2, "threads")
def test_ledgers_nest_and_end(world: World) -> None:
    world.run(nested)


def numbers() -> None:
    s = Setting()
    log = s.recorded()
    assert log.count() == len(log.records) == len(log.select())
    assert log.bytes() == sum(one.bytes for one in log.records)
    assert log.count(op="all_gather") + log.count(op="reduce_scatter") == log.count()
    assert log.bytes(op="all_gather", stage="head") == s.piece_bytes("head") * (s.mesh.size() - 1)
    assert log.select(stage="head", op="all_gather")[0].axis == ("shard",)
    text = str(log)
    for word in ("op", "axis", "MB sent", "all_gather", "reduce_scatter", "scheduled", "backward", "shard", "float64"):
        assert word in text
    with sf.collectives.ledger() as nothing:
        pass
    assert "op" in str(nothing)
    with pytest.raises(AttributeError):
        log.select(color="red")


@pytest.mark.world(2, "threads")
def test_records_are_selected_counted_and_printed(world: World) -> None:
    world.run(numbers)


def by_hand() -> Any:
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    x = torch.ones(8, 4)

    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        y = sf.psum(x, ("replica", "shard"))
        return y, sf.reduce_scatter(sf.all_gather(x, "shard"), "replica")

    run = sf.shard_map(body, mesh=mesh, in_specs=P(("replica", "shard")), out_specs=(P(), ...))
    run(x)
    with sf.collectives.ledger() as log:
        run(x)
    return [(one.op, one.axis, one.bytes, one.dtype, one.scheduled, one.stage, one.backward) for one in log.records]


@pytest.mark.world(4, "threads")
def test_collectives_of_the_user_are_recorded_in_place(world: World) -> None:
    size = 8 * 4 * 4
    for found in world.run(by_hand):
        assert found == [
            ("all_reduce", ("replica", "shard"), size * 2 * 3 // 4, torch.float32, False, "", False),
            ("all_gather", ("shard",), size, torch.float32, False, "", False),
            ("reduce_scatter", ("replica",), size, torch.float32, False, "", False),
        ]


def inside_a_stage() -> Any:
    mesh = sf.make_mesh(shard=2, tensor=2, device="cpu")
    flat = sf.shard([{"w": torch.ones(4, 4)}], mesh, sf.full_shard("shard"), specs=P(None, "tensor"))
    f = sf.stage(lambda p, x: sf.all_gather(x @ p["w"], "tensor", dim=1))

    def loss(ps: Any) -> Tensor:
        return f(ps[0], torch.ones(2, 4)).sum() / 4  # which four ranks add up

    run = sf.shard_map(sf.grad(loss), mesh=mesh, in_specs=(...,), out_specs=...)
    run(flat)
    with sf.collectives.ledger() as log:
        run(flat)
    return [(one.op, one.axis, one.stage, one.scheduled, one.backward) for one in log.records]


@pytest.mark.world(4, "threads")
def test_a_collective_inside_a_stage_stands_in_its_name(world: World) -> None:
    for found in world.run(inside_a_stage):
        assert found == [
            ("all_gather", ("shard",), "0", True, False),
            ("all_gather", ("tensor",), "0", False, False),
            ("reduce_scatter", ("tensor",), "0", False, True),
            ("reduce_scatter", ("shard",), "0", True, True),
        ]


def chosen() -> Any:
    s = Setting()
    s.step()
    found = []
    for ways in ({"all_gather": "native", "reduce_scatter": "native"}, {"reduce_scatter": "exchange"}, {}):
        with sf.collectives.transports(s.mesh, **ways), sf.collectives.ledger() as log:
            _, gradient = s.step()
        found.append((gradient["head"].values, {(one.op, one.how) for one in log.records}))
    with pytest.raises(ValueError, match="pigeon"), sf.collectives.transports(s.mesh, all_gather="pigeon"):
        pass
    with pytest.raises(ValueError, match="all_to_all"), sf.collectives.transports(s.mesh, all_to_all="native"):
        pass
    assert all((one[0] - found[0][0]).abs().max() < 1e-12 for one in found)
    return [ways for _, ways in found]


@pytest.mark.world(2)
def test_a_transport_that_is_chosen_is_used(world: World) -> None:
    for native, exchange, default in world.run(chosen):
        assert native == {("all_gather", "native"), ("reduce_scatter", "native")}
        assert ("reduce_scatter", "exchange") in exchange
        assert ("reduce_scatter", "native") not in exchange
        assert {op for op, _ in default} == {"all_gather", "reduce_scatter"}
