"""Experts that are cut over an axis, and tokens that travel to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, parallel
from shardfn.testing import World
from tests.models import layer as expert
from tests.reference import worst

EXPERTS, GROUPS, TOKENS, WIDTH, K = 4, 4, 6, 5, 2
either = pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
CUT = {"gate": P(), "w": P("expert"), "b": P("expert")}


def drawn(seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"gate": (WIDTH, EXPERTS), "w": (EXPERTS, WIDTH, WIDTH), "b": (EXPERTS, WIDTH)}
    params = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    return params, torch.randn(GROUPS, TOKENS, WIDTH, generator=g, dtype=torch.float64)


def plain(params: Any, x: Tensor, capacity: int | None) -> Tensor:
    """By loops over tokens: the definition."""
    total = x.new_zeros(())
    logits = x @ params["gate"]
    probabilities = logits.softmax(-1)
    used: dict[tuple[int, int], int] = {}
    out = [[x.new_zeros(WIDTH) for _ in range(x.shape[1])] for _ in range(len(x))]
    counts = [0] * EXPERTS
    for choice in range(K):
        for g in range(len(x)):
            for t in range(x.shape[1]):
                weights, experts = probabilities[g, t].topk(K)
                e = int(experts[choice])
                counts[e] += 1
                used[g, e] = used.get((g, e), 0) + 1
                if capacity is None or used[g, e] <= capacity:
                    y = expert({"w": params["w"][e], "b": params["b"][e]}, x[g, t])
                    out[g][t] = out[g][t] + weights[choice] / weights.sum() * y
    total = torch.stack([torch.stack(row) for row in out]).square().sum()
    shares = torch.tensor(counts, dtype=x.dtype) / sum(counts)
    balance = EXPERTS * (shares * probabilities.mean((0, 1))).sum()
    return total + 0.3 * balance + 0.2 * logits.logsumexp(-1).square().mean()


def mixed(params: Any, x: Tensor, capacity: int | None, axis: Any = "expert") -> Tensor:
    routing = parallel.route(x, sf.pvary(params["gate"], axis), K)
    y = parallel.mixture_of_experts(expert, {"w": params["w"], "b": params["b"]}, x, routing, axis, capacity=capacity)
    losses = 0.3 * parallel.balance_loss(routing, axis) + 0.2 * parallel.router_loss(routing, axis)
    return sf.psum(y.square().sum(), axis) + losses


Shares = dict[str, tuple[int | None, Any]]
"""A capacity, and the tokens that a rank has of all."""
EVEN: Shares = {
    f"capacity {n}": (n, lambda x, rank: x.chunk(torch.distributed.get_world_size())[rank])
    for n in (None, TOKENS * K, 2, 1)
}
FEW: Shares = {
    "no groups": (None, lambda x, rank: x if rank == 0 else x[:0]),
    "no groups on the first": (None, lambda x, rank: x if rank == 1 else x[:0]),
    "groups without tokens": (None, lambda x, rank: x if rank == 0 else x[:, :0]),
    "fewer groups": (None, lambda x, rank: (x[:3], x[3:])[rank] if rank < 2 else x[:0]),
    "groups without tokens, capacity": (2, lambda x, rank: x if rank == 0 else x[:, :0]),
    "groups without tokens on the first, capacity": (1, lambda x, rank: x if rank == 1 else x[:, :0]),
}


def differences(shares: Shares) -> dict[Any, float]:
    mesh = sf.make_mesh(expert=torch.distributed.get_world_size(), device="cpu")
    place = sf.shard_map(lambda p: p, mesh=mesh, in_specs=(CUT,), out_specs=CUT, inputs="global")
    (whole, x), (along, _) = drawn(), drawn(1)
    found: dict[Any, float] = {}
    for name, (capacity, share) in shares.items():

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
        def run(p: Any, v: Any, x: Tensor, capacity: Any = capacity) -> Any:
            def loss(p: Any, x: Tensor = x) -> Tensor:
                return mixed(p, x, capacity)

            grad, of_x = sf.grad(loss, (0, 1))(p, x)
            return loss(p), grad, of_x, torch.func.jvp(sf.grad(loss), (p,), (v,))[1]

        value, grad, of_x, product = run(place(whole), place(along), share(x, mesh.get_rank()))
        reference = torch.func.grad(lambda p, x, c=capacity: plain(p, x, c), (0, 1))
        grads, of_all = reference(whole, x)
        second = torch.func.jvp(lambda p, r=reference: r(p, x)[0], (whole,), (along,))[1]
        found[name, "value"] = abs(value / plain(whole, x, capacity) - 1).item()
        for kind, got, wanted in [("grad", grad, place(grads)), ("hvp", product, place(second))]:
            for key in whole:
                found[name, kind, key] = ((got[key] - wanted[key]).abs().max() / grads[key].abs().max()).item()
        found[name, "x"] = (of_x - share(of_all, mesh.get_rank())).abs().sum().item()
        alone = torch.func.grad(lambda p, c=capacity: mixed(p, x, c, ()))(whole)
        found[name, "alone"] = max((alone[key] - grads[key]).abs().max().item() for key in whole)
    return found


@either
@pytest.mark.parametrize("shares", [EVEN, FEW], ids=["even", "few or none"])
def test_mixtures_are_those_of_one_process_whatever_tokens_ranks_have(world: World, shares: Shares) -> None:
    for found in world.with_deadline(100).run(differences, shares):
        assert len(found) == len(shares) * 9
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


def in_parts() -> dict[str, float]:
    """How far the sum over parts is from that on one process; the last part of the second rank is empty."""
    mesh = sf.make_mesh(expert=2, device="cpu")
    whole, x = drawn()
    tree = {"layer": whole}
    cut = sf.by_path([(r"layer\.[wb]", P("expert"))], strict=False)
    params = sf.shard(
        tree, mesh, lambda path, _: sf.full_shard("expert") if "gate" in path else sf.Placement(), specs=cut
    )

    def layer(p: Any, x: Tensor) -> Tensor:
        routing = parallel.route(x, p["gate"], K)
        y = parallel.mixture_of_experts(expert, {"w": p["w"], "b": p["b"]}, x, routing, "expert")
        losses = 0.3 * parallel.balance_loss(routing, "expert") + 0.2 * parallel.router_loss(routing, "expert")
        return sf.psum(y.square().sum(), "expert") + losses

    def loss(p: Any, x: Tensor) -> Tensor:
        return stage(p["layer"], x)

    stage = sf.stage(layer)
    run = sf.shard_map(lambda p, x: sf.accumulate(loss, x, micro=2)(p), mesh=mesh, in_specs=..., out_specs=(P(), ...))
    value, grads = run(params, (x[:3], x[3:])[mesh.get_rank()])

    def reference(p: Any) -> Tensor:
        return plain(p, torch.cat((x[:2], x[3:])), None) + plain(p, x[2:3], None)

    wanted, got = torch.func.grad(reference)(whole), sf.unshard(grads)["layer"]
    found = {key: ((got[key] - wanted[key]).abs().max() / wanted[key].abs().max()).item() for key in whole}
    return {"value": abs(value / reference(whole) - 1).item(), **found}


@pytest.mark.world(2)
def test_a_rank_with_fewer_rows_has_an_empty_part(world: World) -> None:
    for found in world.with_deadline(60).run(in_parts):
        assert len(found) == 4
        assert worst(found.values()) < 1e-12, found


@pytest.mark.parametrize("shape", [(0, TOKENS, WIDTH), (GROUPS, 0, WIDTH), (0, 0, WIDTH)], ids=str)
@pytest.mark.parametrize("capacity", [None, 2])
def test_no_tokens_are_mixed_to_none_and_add_nothing_to_a_loss(shape: tuple[int, ...], capacity: int | None) -> None:
    params, x = drawn()[0], torch.ones(shape, dtype=torch.float64)

    def loss(p: Any, x: Tensor) -> Tensor:
        return mixed(p, x, capacity, ())

    routing = parallel.route(x, params["gate"], K)
    assert (
        parallel.mixture_of_experts(expert, {"w": params["w"], "b": params["b"]}, x, routing, capacity=capacity).shape
        == shape
    )
    assert parallel.num_dropped(routing, 2) == 0
    assert not any((parallel.balance_loss(routing), parallel.router_loss(routing), loss(params, x)))
    gradient = torch.func.grad(loss, (0, 1))
    grads, of_x = gradient(params, x)
    assert of_x.shape == shape
    second: Any = torch.func.jvp(lambda p: gradient(p, x)[0], (params,), (params,))[1]
    for key in params:
        assert torch.equal(grads[key], torch.zeros_like(params[key]))
        assert torch.equal(second[key], torch.zeros_like(params[key]))


def each_sample() -> float:
    mesh = sf.make_mesh(expert=2, device="cpu")
    whole, x = drawn()

    @sf.shard_map(mesh=mesh, in_specs=(CUT, P()), out_specs=..., inputs="global")
    def run(p: Any, x: Tensor) -> Any:
        # Every rank has every sample: each counts on both, and so twice.
        return torch.func.vmap(lambda row: sf.grad(lambda p: mixed(p, row[None], 3))(p)["w"])(x)

    def alone(row: Tensor) -> Tensor:
        return torch.func.grad(lambda p: 2 * (mixed(p, row[None], 3, ()) - routers(p, row)))(whole)["w"]

    def routers(p: Any, row: Tensor) -> Tensor:
        routing = parallel.route(row[None], p["gate"], K)
        return 0.3 * parallel.balance_loss(routing) + 0.2 * parallel.router_loss(routing)

    wanted = torch.stack([alone(row) for row in x])
    return (run(whole, x) - wanted.chunk(2, 1)[mesh.get_rank()]).abs().max().item()


@pytest.mark.world(2)
def test_gradients_of_each_sample(world: World) -> None:
    assert worst(world.run(each_sample)) < 1e-12


def ragged() -> dict[str, float]:
    size = torch.distributed.get_world_size()
    mesh = sf.make_mesh(a=size, device="cpu")
    rank = mesh.get_rank()
    sends = [[(i * 2 + j) % 3 for j in range(size)] for i in range(size)]
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(sum(send), 2, generator=generator, dtype=torch.float64) for send in sends]
    pieces = [x.split(send) for x, send in zip(xs, sends, strict=True)]
    wanted = torch.cat([p[rank] for p in pieces])
    receive = [send[rank] for send in sends]

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def run(x: Tensor) -> dict[str, Tensor]:
        def f(x: Tensor) -> Tensor:
            return sf.collectives.ragged_all_to_all(x, "a", sends[rank], receive)

        there = f(x)
        ct = torch.arange(there.numel(), dtype=there.dtype).view(there.shape)
        back = torch.func.vjp(f, x)[1](ct)[0]
        both = sf.psum((there * ct).sum(), "a") - sf.psum((x * back).sum(), "a")  # transposition
        columns = torch.func.vmap(f, in_dims=1, out_dims=1)(x)
        return {
            "value": there - wanted, "told": sf.collectives.ragged_all_to_all(x, "a", sends[rank]) - wanted,
            "transpose": both,
            "jvp": torch.func.jvp(f, (x,), (x,))[1] - wanted, "vmap": columns - wanted,
            "dim": sf.collectives.ragged_all_to_all(x.mT, "a", sends[rank], receive, dim=1) - wanted.mT,
            "bool": (sf.collectives.ragged_all_to_all(x > 0, "a", sends[rank], receive) != (wanted > 0)).double(),
        }  # fmt: skip

    return {name: x.abs().sum().item() for name, x in run(xs[rank]).items()}


@either
def test_pieces_of_any_length_go_to_their_ranks(world: World) -> None:
    for found in world.run(ragged):
        assert len(found) == 7
        assert not {name: x for name, x in found.items() if not x < 1e-12}


X = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GATE = torch.eye(WIDTH, EXPERTS, dtype=torch.float64)


def with_experts(n: int, **options: Any) -> Any:
    p = {"w": torch.zeros(n, WIDTH, WIDTH, dtype=torch.float64), "b": torch.zeros(n, WIDTH, dtype=torch.float64)}
    return lambda: parallel.mixture_of_experts(expert, p, X, parallel.route(X, GATE, K), "expert", **options)


BAD: dict[str, tuple[Any, list[str]]] = {
    "tokens beyond the capacity": (
        with_experts(2, capacity=1, overflow="error"), ["choices of tokens", "capacity of 1", "4 experts", "raise it"]
    ),
    "not this rank's experts": (with_experts(4), ["4 experts", "2 ranks", "[4]"]),
    "no capacity at all": (with_experts(2, capacity=0), ["capacity must be 1 or more"]),
    "an unknown overflow": (with_experts(2, capacity=1, overflow="raise"), ["'raise'", '"drop" or "error"']),
    "more choices than experts": (lambda: parallel.route(X, GATE, 5), ["k=5", "4 experts"]),
    "tokens without groups": (lambda: parallel.route(X[0], GATE, 1), ["(6, 5)", "[g, t, d]"]),
    "lengths that do not add up": (
        lambda: sf.collectives.ragged_all_to_all(X[0], "expert", [1, 2], [1, 2]),
        ["send=[1, 2]", "adds up to 3", "is 6"],
    ),
    "lengths that others do not send": (
        lambda: sf.collectives.ragged_all_to_all(X[0], "expert", [2, 4], [2, 4]),
        ["position 0 along the axis sends 4 places to position 1, which receives 2", "receive="],
    ),
    "lengths of which another rank sends none": (
        lambda: sf.collectives.ragged_all_to_all(X[0], "expert", [6, 0], [[6, 0], [6, 6]][sf.axis_index("expert")]),
        ["position 0 along the axis sends 0 places to position 1, which receives 6"],
    ),
    "too few lengths": (
        lambda: sf.collectives.ragged_all_to_all(X[0], "expert", [6], [6]), ["send must be 2 lengths", "got [6]"]
    ),
    "a batch without a capacity": (
        lambda: torch.func.vmap(lambda x: parallel.mixture_of_experts(
            expert, {"w": torch.zeros(2, WIDTH, WIDTH, dtype=torch.float64)}, x, parallel.route(x, GATE, K), "expert"
        ))(X[None]),
        ["without a capacity", "vmap", "capacity="],
    ),
}  # fmt: skip


def refusals() -> dict[str, str]:
    mesh, found = sf.make_mesh(expert=2, device="cpu"), {}
    for name, (call, _) in BAD.items():
        try:
            sf.shard_map(call, mesh=mesh, in_specs=(), out_specs=...)()
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.world(2)
def test_what_does_not_fit_is_refused_on_every_rank(world: World) -> None:
    for found in world.run(refusals):
        for name, (_, words) in BAD.items():
            assert all(word in found[name] for word in words), (name, found.get(name))


def test_dropped_counts_the_choices_that_find_no_place() -> None:
    x = torch.ones(1, 5, 2)  # all tokens choose alike
    routing = parallel.route(x, torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]), 2)
    assert parallel.num_dropped(routing, 5) == 0
    assert parallel.num_dropped(routing, 3) == 4
    assert parallel.balance_loss(routing) > 1.0
