"""Ranks that do not all do the same, functions that do odd things, and backward passes inside others."""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.testing import World, WorldError
from tests.models import by_backward, distance, everyone, layer, normal, squares, variables
from tests.reference import worst

D, DEPTH = 4, 4


def shift(p: Any, x: Tensor) -> Tensor:
    return x + p["b"]


def rows() -> Tensor:
    return normal(4, 3, D, seed=50)


def net(f: Any, ps: Any, x: Tensor) -> Tensor:
    for p in ps:
        x = f(p, x)
    return x


class Setting:
    def __init__(self) -> None:
        self.mesh = sf.make_mesh(device="cpu", shard=-1)
        self.rank, self.size = self.mesh.get_rank(), self.mesh.size()
        self.plain, self.flat = squares(DEPTH), sf.shard(squares(DEPTH), self.mesh, sf.full_shard("shard"))
        self.x = rows()[self.rank]

    def apart(self, loss: Any, of_rank: Any, how: str = "value_and_grad") -> float:
        """How far the gradient of `loss(flat)` is from that of the sum over ranks of `of_rank(params, rank)`."""
        want = torch.func.grad(everyone(of_rank, self.size))(self.plain)
        if how == "value_and_grad":
            got = sf.value_and_grad(loss)(self.flat)[1]
        elif how == "accumulate":
            got = sf.accumulate(lambda p, _: loss(p), [0])(self.flat)[1]
        else:
            got = by_backward(loss, self.flat)[1]
        return distance(sf.unshard(got), want)


both_sizes = pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
# Where lent memory is filled with nan, calls have memory, and leaves of autograd, of their own.
both_memories = pytest.mark.parametrize("memory", [True, False], ids=["own memory", "shared memory"])
hows = pytest.mark.parametrize("how", ["value_and_grad", "accumulate"])


def under(memory: bool, f: Any, *args: Any) -> Any:
    with sf.debug(memory=memory):
        return f(*args)


def other_layers(how: str, options: Any) -> float:
    """Rank 0's loss uses the first layers alone, the others' the last."""
    s = Setting()
    f = sf.stage(layer, **options)

    def loss(ps: Any) -> Tensor:
        outputs = [f(p, s.x) for p in ps]
        return torch.stack(outputs[:2] if s.rank == 0 else outputs[2:]).square().sum()

    def of_rank(ps: Any, k: int) -> Tensor:
        outputs = [layer(p, rows()[k]) for p in ps]
        return torch.stack(outputs[:2] if k == 0 else outputs[2:]).square().sum()

    return worst(s.apart(loss, of_rank, how) for _ in range(2))


@pytest.mark.parametrize("options", [{}, {"reshard": False}, {"remat": True}, {"prefetch": 0}], ids=str)
@hows
@both_sizes
def test_ranks_whose_losses_use_different_stages(world: World, how: str, options: Any) -> None:
    assert worst(world.run(other_layers, how, options)) < 1e-12


def no_loss_at_all(how: str) -> float:
    s = Setting()
    f = sf.stage(layer)

    def loss(ps: Any) -> Tensor:
        return net(f, ps, s.x).square().sum() if s.rank else net(f, ps, s.x).detach().sum()

    return s.apart(loss, lambda ps, k: net(layer, ps, rows()[k]).square().sum() * (k > 0), how)


@hows
@both_sizes
def test_a_rank_whose_loss_uses_no_stage(world: World, how: str) -> None:
    assert worst(world.run(no_loss_at_all, how)) < 1e-12


def constant_on_a_rank(how: str) -> float:
    s = Setting()
    f = sf.stage(lambda p, x: layer(p, x) if s.rank else torch.ones(3, D, dtype=torch.float64))
    g = sf.stage(layer)

    def of_rank(ps: Any, k: int) -> Tensor:
        first = layer(ps[0], rows()[k]) if k else torch.ones(3, D, dtype=torch.float64)
        return net(layer, ps[1:], first).square().sum()

    return s.apart(lambda ps: net(g, ps[1:], f(ps[0], s.x)).square().sum(), of_rank, how)


@hows
@both_sizes
def test_a_stage_that_is_constant_on_a_rank(world: World, how: str) -> None:
    assert worst(world.run(constant_on_a_rank, how)) < 1e-12


def swapped_by_backward(how: str) -> None:
    s = Setting()
    f = sf.stage(layer, reshard=how != "native")  # else the second gather tells first
    leaves = variables(s.flat)
    outputs = [f(p, s.x) for p in leaves]
    mesh = s.flat[0].layout.grid.mesh()
    with sf.collectives.transports(mesh, reduce_scatter="native") if how == "native" else contextlib.nullcontext():
        outputs[s.rank].square().sum().backward()


@pytest.mark.world(2, "processes")
def test_backward_with_other_stages_on_other_ranks_is_an_error_that_names_one(world: World) -> None:
    with pytest.raises(WorldError, match=r"stage '1': (its gradient came together|summing its gradient failed)"):
        world.with_deadline(30).run(swapped_by_backward, "direct")


@pytest.mark.world(2, "processes")
def test_what_comes_with_the_gradients_of_another_stage_tells(world: World) -> None:
    with pytest.raises(WorldError, match=r"stage '1': its gradient came together with another stage's"):
        world.with_deadline(30).run(swapped_by_backward, "native")


def reads_at_times(order: Any) -> list[float]:
    """The function's backward reads a parameter in some calls and on some ranks only."""
    s = Setting()
    on: list[Any] = [()]
    f = sf.stage(lambda p, x: (layer if s.rank in on[0] else shift)(p, x))
    found = []
    for ranks in order:
        on[0] = ranks

        def of_rank(ps: Any, k: int, ranks: Any = ranks) -> Tensor:
            return net(layer if k in ranks else shift, ps, rows()[k]).square().sum()

        found.append(s.apart(lambda ps: net(f, ps, s.x).square().sum(), of_rank))
    return found


@pytest.mark.parametrize(
    "order",
    # What the ranks agree on is settled by the first of them.
    [((), range(4), range(4), (0,), (), (1, 3)), ((0,), (), range(4)), ((1, 3), range(4), ())],
    ids=["none at first", "one at first", "half at first"],
)
@both_memories
@both_sizes
def test_a_function_that_reads_its_parameters_at_times(world: World, order: Any, memory: bool) -> None:
    assert worst(x for found in world.run(under, memory, reads_at_times, order) for x in found) < 1e-12


@sf.debug(memory=False)
def reads_at_times_among_others(count: int) -> dict[str, float]:
    """Beside layers whose backward always reads, and with slots that are taken out of turn."""
    s, dice, on = Setting(), random.Random(1), [False]
    plain = [p for i in range(2) for p in optree.tree_map(lambda x, i=i: x + i, squares(DEPTH))]
    flat = sf.shard(plain, s.mesh, sf.full_shard("shard"))

    def at_times(p: Any, x: Tensor) -> Tensor:
        return (layer if on[0] and s.rank == 0 else shift)(p, x)

    found = {}
    for k in range(count):
        drawn = [(dice.random() < 0.5, dice.randrange(3)) for _ in plain]
        stages = [sf.stage(at_times if some else layer, prefetch=ahead) for some, ahead in drawn]

        def loss(ps: Any, stages: Any = stages) -> Tensor:
            x = s.x
            for f, p in zip(stages, ps, strict=True):
                x = f(p, x)
            return x.square().sum()

        def of_rank(ps: Any, rank: int, drawn: Any = drawn) -> Tensor:
            plainly = [shift if some and (not on[0] or rank) else layer for some, _ in drawn]
            x = rows()[rank]
            for f, p in zip(plainly, ps, strict=True):
                x = f(p, x)
            return x.square().sum()

        for on[0] in (False, True):
            want = torch.func.grad(lambda p: torch.stack([of_rank(p, r) for r in range(s.size)]).sum())(plain)
            found[f"{k}, {on[0]}: {drawn}"] = distance(sf.unshard(sf.grad(loss)(flat)), want)
    return found


@pytest.mark.world(2, "processes")
def test_a_function_that_reads_at_times_among_others_that_do(world: World) -> None:
    for found in world.run(reads_at_times_among_others, 6):
        assert not {how: off for how, off in found.items() if not off < 1e-12}


def attack(how: str) -> float:
    """A gradient of the input, asked for inside the loss, is nobody else's."""
    s = Setting()
    f = sf.stage(layer)

    def moved(ps: Any) -> Tensor:
        x = s.x.clone().requires_grad_()
        loss = net(f, ps, x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        return (x + 0.1 * gradient.sign()).detach()

    def of_rank(ps: Any, k: int) -> Tensor:
        x = rows()[k]
        gradient = torch.func.grad(lambda y: net(layer, s.plain, y).square().sum())(x)
        return net(layer, ps, x + 0.1 * gradient.sign()).square().sum()

    return s.apart(lambda ps: net(f, ps, moved(ps)).square().sum(), of_rank, how)


@pytest.mark.parametrize("how", ["value_and_grad", "accumulate", "backward"])
@both_sizes
def test_a_backward_pass_inside_the_loss(world: World, how: str) -> None:
    assert worst(world.run(attack, how)) < 1e-12


def complex_layers() -> list[float]:
    s = Setting()
    plain = [{"w": torch.complex(normal(D, D, seed=i), normal(D, D, seed=9 + i))} for i in range(2)]
    flat = sf.shard(plain, s.mesh, sf.full_shard("shard"))

    def f(p: Any, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ p["w"]).abs()

    def loss(g: Any, ps: Any, x: Tensor) -> Tensor:
        return net(g, ps, x).square().sum()

    g = sf.stage(f)
    want = torch.func.grad(lambda p: torch.stack([loss(f, p, x) for x in rows()[: s.size]]).sum())(plain)
    found = [distance(sf.unshard(of(lambda p: loss(g, p, s.x))(flat)), want) for of in (sf.grad, torch.func.grad)]
    conjugate = loss(g, optree.tree_map(torch.conj, flat), s.x) - loss(f, optree.tree_map(torch.conj, plain), s.x)
    return [*found, conjugate.abs().item()]


@both_sizes
def test_complex_parameters(world: World) -> None:
    assert worst(x for found in world.run(complex_layers) for x in found) < 1e-12


def taped_on_some_ranks(strategy: str, where: int) -> tuple[float, list[Any]]:
    """A frozen stage whose input some ranks differentiate and others do not, among stages that are all trained.

    Returns how far gradients are off, and the reductions in order.
    """
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    placement = sf.strategies.from_name(strategy, shard="shard", replica="replica")
    flat, frozen = sf.shard(squares(DEPTH), mesh, placement), sf.shard(squares(1), mesh, placement, frozen=".*")
    known, rank = squares(1)[0], mesh.get_rank()

    def loss(f: Any, ps: Any, other: Any, x: Tensor, of: int) -> Tensor:
        for i, p in enumerate(ps):
            x = f(p, x)
            if i == where:
                x = x + f(other, x if of < 2 else x.detach())
        return x.square().sum()

    want = torch.func.grad(everyone(lambda ps, of: loss(layer, ps, known, rows()[of], of), 4))(squares(DEPTH))
    found = []
    with sf.collectives.ledger() as log:
        for _ in range(2):
            got = sf.grad(lambda ps: loss(sf.stage(layer), ps, frozen[0], rows()[rank], rank))(flat)
            found.append(distance(sf.unshard(got), want))
    return worst(found), [(r.op, r.axis, r.stage) for r in log.records if r.op in ("reduce_scatter", "all_reduce")]


@pytest.mark.world(4)
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2", "hfsdp"])
def test_hops_begin_in_one_order_whatever_else_is_on_a_ranks_tape(world: World, strategy: str) -> None:
    for where in range(DEPTH):
        found = world.with_deadline(60).run(taped_on_some_ranks, strategy, where)
        assert worst(off for off, _ in found) < 1e-12
        assert all(order == found[0][1] for _, order in found)


def frozen_unused(options: dict[str, Any]) -> list[float]:
    """Frozen layers after one that is trained, which only rank 0's loss uses; among others that are trained."""
    s = Setting()
    frozen, known = sf.shard(squares(DEPTH), s.mesh, sf.full_shard("shard"), frozen=".*"), squares(DEPTH)

    def loss(f: Any, ps: Any, others: Any, k: int) -> Tensor:
        x = f(ps[0], rows()[k])
        y = net(f, others, x)
        return net(f, ps[1:], x + y if k == 0 else x).square().sum()

    f = sf.stage(layer, **options)
    return [s.apart(lambda ps: loss(f, ps, frozen, s.rank), lambda ps, k: loss(layer, ps, known, k)) for _ in range(3)]


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"reshard": False}, {"prefetch": 0}], ids=str)
@both_sizes
def test_a_rank_whose_loss_does_not_use_frozen_stages(world: World, options: Any) -> None:
    assert worst(off for found in world.with_deadline(20).run(frozen_unused, options) for off in found) < 1e-12


def frozen_at_the_bottom() -> list[float]:
    """A frozen stage of numbers that are not differentiable, under those that are trained."""
    s = Setting()
    table, tokens = {"e": normal(7, D, seed=9)}, torch.tensor([1, 5, 6])
    bottom = sf.shard({"table": table}, s.mesh, sf.full_shard("shard"), frozen=".*")
    f, look = sf.stage(layer), sf.stage(lambda p, t: p["e"][t])
    want = torch.func.grad(lambda ps: net(layer, ps, table["e"][tokens]).square().sum() * s.size)(s.plain)
    grads = [
        grad(lambda ps: net(f, ps, look(bottom["table"], tokens)).square().sum())(s.flat)
        for grad in (torch.func.grad, sf.grad)
    ]
    return [distance(sf.unshard(got), want) for got in grads]


@both_memories
@pytest.mark.world(2, "processes")
def test_a_frozen_embedding_under_every_gradient(world: World, memory: bool) -> None:
    assert worst(off for found in world.run(under, memory, frozen_at_the_bottom) for off in found) < 1e-12


def other_blocks(strategy: str) -> None:
    """Half of the ranks asks for the gradient of one block, the other half for another's."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = sf.make_mesh(replica=2, shard=n // 2, device="cpu")
    chosen: Any = {
        "ddp": sf.ddp(("replica", "shard")),
        "zero1": sf.strategies.zero1(("replica", "shard")),
        "hybrid_shard": sf.hybrid_shard(shard="shard", replica="replica"),
        "hfsdp": sf.strategies.hfsdp(shard="shard", replica="replica"),
        "hpz": sf.strategies.hpz(shard="shard", replica="replica"),
    }[strategy]
    blocks = sf.shard([{"w": torch.full((8, 8), 0.1, dtype=torch.float64)} for _ in range(2)], mesh, chosen)
    staged = sf.stage(lambda p, x: x @ p["w"])
    x = torch.ones(3, 8, dtype=torch.float64)
    sf.grad(lambda ps: (staged(ps[0], x) + staged(ps[1], x)).sum())(blocks)
    sf.grad(lambda p: staged(p, x).sum())(blocks[rank // (n // 2)])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "hybrid_shard", "hfsdp", "hpz"])
def test_replicas_that_sum_the_gradients_of_different_stages_are_told(strategy: str) -> None:
    """The rank that has the end of the buffer is, or all by what they wait for."""
    with World(4) as four:
        errors = four.errors(other_blocks, strategy)
    told = [error for error in errors if re.search("different stages|in vain for", str(error))]
    assert len(told) >= (4 if strategy == "ddp" else 1), errors
