"""What a function returns may be written to: no argument changes, on one rank no more than on two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import world
from tests.reference import LINEAR

ONE, TWO = {"a": 1}, {"a": 2}
Made = tuple[Callable[..., Any], tuple[Any, ...]]  # a function under shard_map, and its arguments


def floats(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def collectives(axis: Any, n: int) -> dict[str, Made]:
    made: dict[str, Made] = {}
    for case in LINEAR:
        made[str(case)] = lambda x, case=case: case.local(x, axis, n), (floats(*case.shape(n)),)
    for name in ("psum", "pmean", "pmax", "pmin", "pvary"):
        f = getattr(sf, name)
        made[f"{name} of integers"] = lambda x, f=f: f(x, axis), (torch.arange(6),)
        made[f"{name} of a tree"] = lambda x, f=f: f({"w": x, "more": [x, x[0]]}, axis), (floats(2, 3),)
        made[f"{name} of a view"] = lambda x, f=f: f(x.mT[::2], axis), (floats(4, 4),)
        made[f"{name} of an expanded value"] = lambda x, f=f: f(x.expand(3, 2), axis), (floats(1, 2),)
    made["psum of complex numbers"] = lambda x: sf.psum(x, axis), (floats(4).to(torch.complex128),)
    made["pmax of bools"] = lambda x: sf.pmax(x, axis), (floats(4) > 2,)
    made["ragged_all_to_all"] = (
        lambda x: sf.collectives.ragged_all_to_all(x, axis, [2] * n, [2] * n),
        (floats(2 * n, 2),),
    )
    made["ragged_all_to_all, not told"] = (
        lambda x: sf.collectives.ragged_all_to_all(x, axis, [2] * n),
        (floats(2 * n, 2),),
    )
    made["ppermute to nobody"] = lambda x: sf.ppermute(x, axis, []), (floats(2),)
    made["psum twice"] = lambda x: [y := sf.psum(x, axis), sf.psum(y, axis)], (floats(2),)
    if axis:
        made["redistribute"] = lambda x: sf.collectives.redistribute(x, f"d/{axis} f -> d f"), (floats(2, 2),)
        made["redistribute to the same"] = (
            lambda x: sf.collectives.redistribute(x, f"d/{axis} f -> d/{axis} f"),
            (floats(2, 2),),
        )
        made["redistribute a sum"] = lambda x: sf.collectives.redistribute(x, f"d f +{axis} -> d f"), (floats(2, 2),)
    return made


def parallel(axis: Any, n: int) -> dict[str, Made]:
    p, q = sf.parallel, floats(1, 2, 4, 8)
    routing = p.Routing(torch.tensor([[[0], [1]]]), torch.ones(1, 2, 1).double(), torch.ones(1, 2, 2).double())
    expert = lambda w, x: x  # noqa: E731
    made: dict[str, Made] = {
        "to_parallel": (lambda x: p.to_parallel(x, axis), (floats(2, 3),)),
        "to_parallel, sequence": (lambda x: p.to_parallel(x, axis, sequence=0), (floats(2, 3),)),
        "from_parallel": (lambda x: p.from_parallel(x, axis), (floats(2, 3),)),
        "from_parallel, sequence": (lambda x: p.from_parallel(x, axis, sequence=0), (floats(2, 3),)),
        "embedding": (lambda i, w: p.embedding(i, w, axis), (torch.tensor([0, 1]), floats(2, 3))),
        "rms_norm": (lambda x, w: p.rms_norm(x, w, axis), (floats(2, 4), floats(4))),
        "cross_entropy": (
            lambda x, w, t: p.cross_entropy(x, w, t, axis),
            (floats(2, 3), floats(3, 2), torch.ones(2).long()),
        ),
        "ring_attention": (lambda q, k, v: p.ring_attention(q, k, v, axis), (q, q.clone(), q.clone())),
        "ulysses_attention": (lambda q, k, v: p.ulysses_attention(q, k, v, axis), (q, q.clone(), q.clone())),
        "positions": (lambda: p.positions(8, axis), ()),
        "mixture": (
            lambda x, w: p.mixture_of_experts(expert, w, x, routing, axis, capacity=2),
            (floats(1, 2, 3), floats(2 // n, 1)),
        ),
        "mixture, none dropped": (
            lambda x, w: p.mixture_of_experts(expert, w, x, routing, axis),
            (floats(1, 2, 3), floats(2 // n, 1)),
        ),
        "balance_loss": (lambda logits: p.balance_loss(replace(routing, logits=logits), axis), (floats(1, 2, 2),)),
        "router_loss": (lambda logits: p.router_loss(replace(routing, logits=logits), axis), (floats(1, 2, 2),)),
    }
    return made


def changed(f: Callable[..., Any], args: Any) -> list[str]:
    """What goes wrong when the results of `f(*args)` are written to, one after another."""
    before = [leaf.detach().clone() for leaf in optree.tree_leaves(args)]
    results = [leaf for leaf in optree.tree_leaves(f(*args)) if isinstance(leaf, Tensor)]
    values = [leaf.detach().clone() for leaf in results]
    wrong = []
    for number, result in enumerate(results):
        try:
            result.copy_(~result if result.dtype == torch.bool else result + 1)
        except RuntimeError as error:  # it is the argument itself, of which torch needs to know the value
            wrong.append(str(error))
        same = zip(results[number + 1 :], values[number + 1 :], strict=True)
        wrong += ["another result changed"] * (not all(a.equal(b) for a, b in same))
    arguments = zip(optree.tree_leaves(args), before, strict=True)
    return wrong + ["an argument changed"] * (not all(a.equal(b) for a, b in arguments))


def written(axis: Any, sizes: dict[str, int]) -> dict[str, list[str]]:
    mesh = sf.make_mesh(device="cpu", **sizes)
    n = sizes[axis] if axis else 1
    found = {}
    for name, (f, args) in {**collectives(axis, n), **parallel(axis, n)}.items():
        mapped = sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=..., check=name != "psum twice")  # is told
        found[name] = changed(mapped, args)
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        if leaves and "pm" not in name and not any(x.is_complex() for x in leaves):
            found[f"{name}, of what is differentiated"] = changed(mapped, leaves)
    return found


@pytest.mark.parametrize(("axis", "sizes"), [("a", ONE), ("a", TWO), ((), ONE), ((), TWO)], ids=str)
def test_what_a_collective_returns_may_be_written_to(axis: Any, sizes: dict[str, int]) -> None:
    for found in world(sizes["a"]).run(written, axis, sizes):
        assert len(found) > 80
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def placed(sizes: dict[str, int]) -> dict[str, list[str]]:
    """What goes into and comes out of functions that place values."""
    mesh = sf.make_mesh(device="cpu", **sizes)
    whole = {"w": floats(4, 2), "more": {"b": floats(2), "i": torch.arange(3), "none": floats(0)}, "scalar": floats()}
    found = {}
    for strategy in (
        sf.full_shard("a"),
        sf.strategies.zero1("a"),
        sf.strategies.shard_grad_op("a"),
        sf.ddp("a"),
        sf.full_shard("a").only_on(b=0),
    ):
        size = sf.make_mesh(device="cpu", **sizes, b=1) if strategy.only_at else mesh
        found[f"shard {strategy}"] = changed(lambda tree, s=strategy, m=size: sf.shard(tree, m, s), (whole,))
        params = sf.shard(whole, size, strategy)
        found[f"unshard {strategy}"] = changed(sf.unshard, (params,))
        twice = sf.unshard(params), sf.unshard(params)
        found[f"unshard twice {strategy}"] = changed(lambda tree, other=twice[1]: other, (twice[0],))
        named = {"w": floats(4, 2), "v": floats(2)}
        like = {key: value.to("meta") for key, value in named.items()}
        found[f"shard_named {strategy}"] = changed(
            lambda named, s=strategy, m=size, like=like: sf.shards.shard_named(named.items(), like, m, s), (named,)
        )
        found[f"init_sharded {strategy}"] = changed(
            lambda w, s=strategy, m=size: sf.init_sharded({"w": w, "x": lambda g: torch.ones(3)}, 0, m, s),
            (whole["w"],),
        )

        def trained(tree: Any, s: Any = strategy, m: Any = size) -> Any:
            params, opt = sf.shard(tree, m, s), sf.optim.adamw(0.1)
            return opt.step(params, optree.tree_map(torch.ones_like, params), opt.init(params))[0]  # donates

        floating = {"w": floats(4, 2), "b": floats(2)}
        found[f"a step of shards, {strategy}"] = changed(trained, (floating,))
    cut = sf.shard({"w": floats(4, 2)}, mesh, sf.ddp(()), specs=P("a"))
    found["unshard what specs cut"] = changed(sf.unshard, (cut,))
    for spec in (P("a"), P(), P(None, "a")):
        entered = sf.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=..., inputs="global")
        found[f"global {spec}"] = changed(lambda x, f=entered: [f(x), f(x)], (floats(4, 2),))
    return found


@pytest.mark.parametrize("sizes", [ONE, TWO], ids=str)
def test_what_placing_returns_may_be_written_to(sizes: dict[str, int]) -> None:
    for found in world(sizes["a"]).run(placed, sizes):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
