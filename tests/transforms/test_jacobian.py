"""Jacobians and Hessians over trees with flat shards: what one process computes, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import World
from tests.models import normal

ROUNDING = 1e-12
MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "full_shard": ({"shard": -1}, sf.full_shard("shard")),
    "ddp": ({"shard": -1}, sf.ddp("shard")),
    "shard_grad_op": ({"shard": -1}, sf.shard_grad_op("shard")),
    "hybrid": ({"replica": 2, "shard": -1}, sf.hybrid_shard(shard="shard", replica="replica")),
}


def whole() -> Any:
    return {"a": {"w": normal(3, 4, seed=1), "b": normal(4, seed=2)}, "h": {"o": normal(4, 2, seed=3)}}


def network(stage: Callable[[Any], Any], ps: Any, scale: Tensor, x: Tensor) -> Tensor:
    hidden = torch.tanh(stage(lambda p, x: x @ p["w"] + p["b"])(ps["a"], x))
    found: Tensor = stage(lambda p, y: y @ p["o"])(ps["h"], hidden) * scale.sin()
    return found


def reference(rows: Tensor, ps: Any, scale: Tensor) -> Any:
    y = torch.stack([network(lambda f: f, ps, scale, x) for x in rows])
    return {"sum": y.sum((0, 1)), "square": y.square().sum()}


def apart(got: Any, want: Any) -> float:
    pairs = list(zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True))
    assert [a.shape for a, _ in pairs] == [b.shape for _, b in pairs]
    return max(float((a - b).abs().max()) for a, b in pairs)


class Setting:
    def __init__(self, kind: str) -> None:
        shape, strategy = MESHES[kind]
        self.mesh = sf.make_mesh(**shape, device="cpu")
        self.axes, self.scale = tuple(shape), torch.tensor([0.3, 0.9], dtype=torch.float64)
        self.rows = torch.stack([normal(2, 3, seed=10 + k) for k in range(self.mesh.size())])
        self.ps = sf.shard(whole(), self.mesh, strategy)

    def sums(self, ps: Any, scale: Tensor) -> Any:
        y = network(sf.stage, ps, sf.pvary(scale, self.axes), self.rows[self.mesh.get_rank()])
        return {"sum": sf.psum(y.sum(0), self.axes), "square": sf.psum(y.square().sum(), self.axes)}

    def mapped(self, f: Any) -> Any:
        return sf.shard_map(f, mesh=self.mesh, in_specs=..., out_specs=...)(self.ps, self.scale)


def of_one_process(kind: str) -> dict[str, float]:
    s, found = Setting(kind), {}
    for name in ("jacrev", "jacfwd"):
        theirs = getattr(torch.func, name)(lambda ps, c: reference(s.rows, ps, c), (0, 1))(whole(), s.scale)
        for chunk in (None, 5):
            ours = getattr(sf, name)(s.sums, (0, 1), chunk_size=chunk)
            found[f"{name}, {chunk}"] = apart(s.mapped(lambda *a, f=ours: sf.unshard(f(*a))), theirs)
        shards, aux = s.mapped(getattr(sf, name)(lambda ps, c: (s.sums(ps, c), c.square()), has_aux=True))
        found[f"{name}, aux"] = float((aux - s.scale.square()).abs().max())
        one = optree.tree_map(lambda g: g[1], shards["sum"])  # a row is a gradient, as an optimizer takes it
        found[f"{name}, a row"] = apart(sf.unshard(one), optree.tree_map(lambda g: g[1], theirs["sum"][0]))
    square = sf.hessian(lambda ps, c: s.sums(ps, c)["square"], (0, 1))
    theirs = torch.func.hessian(lambda ps, c: reference(s.rows, ps, c)["square"], (0, 1))(whole(), s.scale)
    found["hessian"] = apart(s.mapped(lambda *a: sf.unshard(square(*a))), theirs)
    return found


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_jacobians_over_shards_are_those_of_one_process(world: World, kind: str) -> None:
    for found in world.run(of_one_process, kind):
        assert {name: off for name, off in found.items() if not off < ROUNDING} == {}


def said(f: Callable[[], Any]) -> str:
    try:
        f()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "nothing"


def refused() -> dict[str, str]:
    s = Setting("full_shard")
    rank = s.mesh.get_rank()

    def sum_of(ps: Any, scale: Tensor) -> Tensor:
        found: Tensor = s.sums(ps, scale)["sum"]
        return found

    def local(ps: Any, scale: Tensor) -> Tensor:
        return network(sf.stage, ps, scale, s.rows[rank])

    def unvaried(ps: Any, scale: Tensor) -> Tensor:
        return sf.psum(local(ps, scale).sum(0), s.axes)

    mine = s.scale + rank
    return {
        "torch.jacfwd": said(lambda: s.mapped(torch.func.jacfwd(sum_of))),
        "torch.hessian": said(lambda: s.mapped(torch.func.hessian(lambda ps, c: s.sums(ps, c)["square"]))),
        "jacfwd, local": said(lambda: s.mapped(sf.jacfwd(local))),
        "jacrev, local": said(lambda: s.mapped(sf.jacrev(local))),
        "jacrev, unvaried": said(lambda: s.mapped(sf.jacrev(unvaried, (0, 1)))),
        "jacfwd, apart": said(lambda: s.mapped(lambda ps, _: sf.jacfwd(sum_of, (0, 1))(ps, mine))),
        "jacrev, in 16 bits": said(lambda: s.mapped(sf.jacrev(lambda ps, c: (sum_of(ps, c) * (1 + rank)).bfloat16()))),
        "jacfwd, integers": said(lambda: s.mapped(sf.jacfwd(lambda ps, c: (sum_of(ps, c), 1)))),
        "jacrev, argnums": said(lambda: s.mapped(sf.jacrev(sum_of, 2))),
    }


REFUSED = {
    "torch.jacfwd": "a basis of 24 unit vectors on each of these 2 ranks",
    "torch.hessian": "Use shardfn.jacfwd, shardfn.jacrev or shardfn.hessian",
    "jacfwd, local": "its result differs between ranks",
    "jacrev, local": "its result differs between ranks",
    "jacrev, unvaried": "the part of an argument that is no shard differs between ranks",
    "jacfwd, apart": "an argument that is no shard differs between ranks",
    "jacrev, in 16 bits": "its result differs between ranks",
    "jacfwd, integers": "returns int among its outputs",
    "jacrev, argnums": "argnums=2",
}


@pytest.mark.world(2, "processes")
def test_what_is_no_jacobian_of_one_process_is_refused_on_every_rank(world: World) -> None:
    for found in world.run(refused):
        assert {case: told for case, told in found.items() if REFUSED[case] not in told} == {}


def pushed() -> float:
    """Tangents of the whole parameters that somebody batches: one column on each rank in turn, and random ones."""
    s = Setting("full_shard")
    seeded = torch.Generator().manual_seed(7)
    everything = whole()
    values, tree = optree.tree_flatten(everything)
    basis = torch.eye(sum(x.numel() for x in values), dtype=torch.float64)
    some = torch.cat([basis, torch.randn(5, len(basis), generator=seeded, dtype=torch.float64)])
    parts = [
        part.view(-1, *x.shape) for part, x in zip(some.split([x.numel() for x in values], 1), values, strict=True)
    ]
    each = [sf.shard(optree.tree_unflatten(tree, [p[i] for p in parts]), s.mesh, MESHES["full_shard"][1])
            for i in range(len(some))]  # fmt: skip
    stack = optree.tree_map(lambda *xs: torch.stack(xs), *each)

    def moved(ps: Any, scale: Tensor) -> Any:
        return torch.func.vmap(lambda v: torch.func.jvp(lambda ps: s.sums(ps, scale)["sum"], (ps,), (v,))[1])(stack)

    def plain(v: Any) -> Any:
        return torch.func.jvp(lambda ps: reference(s.rows, ps, s.scale)["sum"], (everything,), (v,))[1]

    want = torch.func.vmap(plain)(optree.tree_unflatten(tree, parts))
    return apart(s.mapped(moved), want)


@pytest.mark.world(2, "processes")
def test_tangents_of_whole_parameters_are_batched_as_ever(world: World) -> None:
    assert max(world.run(pushed)) < ROUNDING


def test_without_a_mesh_they_are_those_of_torch() -> None:
    rows, scale = normal(1, 2, 3, seed=4), torch.tensor([0.3, 0.9], dtype=torch.float64)
    for name in ("jacrev", "jacfwd"):
        ours, theirs = (getattr(m, name)(lambda ps, c: reference(rows, ps, c), (1, 0)) for m in (sf, torch.func))
        assert apart(ours(whole(), scale), theirs(whole(), scale)) < ROUNDING
    ours, theirs = (m.hessian(lambda ps: reference(rows, ps, scale)["square"]) for m in (sf, torch.func))
    assert apart(ours(whole()), theirs(whole())) < ROUNDING
