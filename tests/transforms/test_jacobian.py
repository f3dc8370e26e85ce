"""Jacobians and Hessians over trees with flat shards: what one process computes, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn.compat.norms import WrittenOut
from shardfn.testing import World
from tests.models import normal
from tests.refusals import told

ROUNDING = 1e-12
MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "full_shard": ({"shard": -1}, sf.full_shard("shard")),
    "ddp": ({"shard": -1}, sf.ddp("shard")),
    "shard_grad_op": ({"shard": -1}, sf.strategies.shard_grad_op("shard")),
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
        "torch.jacfwd": told(lambda: s.mapped(torch.func.jacfwd(sum_of))),
        "torch.hessian": told(lambda: s.mapped(torch.func.hessian(lambda ps, c: s.sums(ps, c)["square"]))),
        "jacfwd, local": told(lambda: s.mapped(sf.jacfwd(local))),
        "jacrev, local": told(lambda: s.mapped(sf.jacrev(local))),
        "jacrev, unvaried": told(lambda: s.mapped(sf.jacrev(unvaried, (0, 1)))),
        "jacfwd, apart": told(lambda: s.mapped(lambda ps, _: sf.jacfwd(sum_of, (0, 1))(ps, mine))),
        "jacrev, in 16 bits": told(lambda: s.mapped(sf.jacrev(lambda ps, c: (sum_of(ps, c) * (1 + rank)).bfloat16()))),
        "jacfwd, integers": told(lambda: s.mapped(sf.jacfwd(lambda ps, c: (sum_of(ps, c), 1)))),
        "jacrev, argnums": told(lambda: s.mapped(sf.jacrev(sum_of, 2))),
    }


REFUSED = {
    "torch.jacfwd": "24 unit vectors on each of 2 ranks",
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


# --- Jacobians of Jacobians, where torch's batches of some norms lose derivatives ---

NORMS: dict[str, Any] = {
    "layer": lambda v: F.layer_norm(v[4:].view(3, 4), (4,), v[:4]),
    "batch": lambda v: F.batch_norm(v[4:].view(6, 2), None, None, v[:2], v[2:4], training=True),
    "instance": lambda v: F.instance_norm(v[4:].view(2, 2, 3), None, None, v[:2], v[2:4]),
    "group": lambda v: F.group_norm(v[4:].view(1, 4, 3), 2, v[:4], v[:4]),
    "rms": lambda v: F.rms_norm(v[4:].view(3, 4), (4,), v[:4]),
}


def slopes(f: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-5) -> Tensor:
    """The Jacobian of `f` by central differences."""
    basis = step * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(f(x + e) - f(x - e)) / (2 * step) for e in basis], -1)


@pytest.mark.parametrize("name", NORMS)
def test_second_derivatives_of_norms(name: str) -> None:
    x = normal(16, seed=3)

    def sums(v: Tensor) -> Tensor:
        return (NORMS[name](v) ** 3).flatten(1).sum(-1)

    def total(v: Tensor) -> Tensor:
        return sums(v).sum()

    def first(v: Tensor) -> Tensor:
        return torch.stack([torch.func.jvp(sums, (v,), (e,))[1] for e in torch.eye(16, dtype=v.dtype)], -1)

    ones = torch.ones(16, dtype=torch.float64)

    def outside(v: Tensor) -> Tensor:  # by plain autograd, and through what a function closes over
        rows = [lambda w, i=i: sf.jacrev(lambda s: sums(w * s))(ones)[0, i] for i in range(16)]
        return torch.stack([sf.grad(row)(v) for row in rows])

    want = slopes(first, x)
    both: dict[str, Any] = {"jacrev": sf.jacrev, "jacfwd": sf.jacfwd}
    found = {f"{a} of {b}": f(g(sums))(x) for a, f in both.items() for b, g in both.items()}
    found = {name: float((got - want).norm() / want.norm()) for name, got in found.items()}
    found["hessian"] = float((sf.hessian(total)(x) - want.sum(0)).norm() / want.sum(0).norm())
    by_hand = slopes(lambda v: (first(v) * v)[0], x)
    found["gradient of jacrev"] = float((outside(x) - by_hand).norm() / by_hand.norm())
    assert {name: off for name, off in found.items() if not off < 1e-7} == {}


LEVELS = {
    "sf.grad": lambda h, x: sf.grad(h)(x),
    "torch.func.grad": lambda h, x: torch.func.grad(h)(x),
    "sf.jvp": lambda h, x: torch.stack([sf.jvp(h, (x,), (e,))[1] for e in torch.eye(16).double()]),
    "backward": lambda h, x: torch.autograd.grad(h(y := x.clone().requires_grad_()), y)[0],
    "vmap in sf.grad": lambda h, x: sf.grad(
        lambda v: torch.func.vmap(lambda s: h(v * s))(torch.ones(1).double()).sum()
    )(x),
}
MEAN, VARIANCE = torch.tensor([0.1, 0.2]).double(), torch.tensor([0.5, 2.0]).double()
FUNCTIONS = {name: (lambda v, f=f: (f(v) ** 3).sum()) for name, f in NORMS.items()} | {
    "running": lambda v: (F.batch_norm(v[4:].view(6, 2), MEAN, VARIANCE, v[:2], v[2:4]) ** 3).sum(),
    "instance, running": lambda v: (
        F.instance_norm(v[4:].view(2, 2, 3), MEAN, VARIANCE, v[:2], v[2:4], use_input_stats=False) ** 3
    ).sum(),
    "modules": lambda v: torch.func.functional_call(
        torch.nn.LayerNorm(4), {"weight": v[:4], "bias": v[4:8]}, (v[8:].view(2, 4),)
    ).pow(3).sum(),
    "weight norm": lambda v: (torch._weight_norm(v[:12].view(3, 4), v[12:15].view(3, 1), 0) ** 3).sum(),
    "det": lambda v: torch.linalg.det(v.view(4, 4)),
    "slogdet": lambda v: torch.linalg.slogdet(v.view(4, 4))[1],
    "solve": lambda v: torch.linalg.solve(v.view(4, 4) + 3 * torch.eye(4), v[:4]).square().sum(),
    "cross entropy": lambda v: F.cross_entropy(v.view(4, 4), torch.tensor([0, 1, 1, 3])),
    "attention": lambda v: (F.scaled_dot_product_attention(*v[:12].view(3, 1, 2, 2)) ** 3).sum(),
    "padding": lambda v: (F.embedding(torch.tensor([0, 1, 2, 0]), v.view(4, 4), padding_idx=0) ** 3).sum(),
    "glu": lambda v: (F.glu(v.view(4, 4)) ** 3).sum(),
    "norm": lambda v: v.view(4, 4).norm(dim=-1).prod(),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_tangents(name: str) -> None:
    f, x, v = FUNCTIONS[name], normal(16, seed=5) + 0.1, normal(16, seed=6)
    want = slopes(lambda y: (torch.func.grad(f)(y) @ v)[None], x)[0]
    found = {level: derivative(lambda y: sf.jvp(f, (y,), (v,))[1], x) for level, derivative in LEVELS.items()}
    wanted = dict.fromkeys(found, want)
    if name != "weight norm":  # which has no forward mode

        def closing(y: Tensor) -> Tensor:
            return sf.jvp(lambda s: f(s * y), (torch.ones_like(x),), (v / x,))[1]

        found["what f closes over"] = sf.grad(closing)(x)
        wanted["what f closes over"] = slopes(lambda y: (torch.func.grad(f)(y) @ (y * v / x))[None], x)[0]
    off = {level: float((got - wanted[level]).norm() / wanted[level].norm()) for level, got in found.items()}
    assert {level: distance for level, distance in off.items() if not distance < 1e-6} == {}


W, B = normal(2, seed=1), normal(2, seed=2)
AS_TORCH: dict[str, Callable[..., Tensor]] = {
    "layer": lambda x, *_: F.layer_norm(x, (2, 3), normal(2, 3, seed=1), normal(2, 3, seed=2), 1e-3),
    "layer, by torch": lambda x, *_: torch.layer_norm(x, (3,), normal(3, seed=1), None, 1e-3),
    "batch, by torch": lambda x, mean, var: torch.batch_norm(x, W, B, mean, var, True, 0.1, 1e-3, False),
    "batch, running, by torch": lambda x, mean, var: torch.batch_norm(x, W, B, mean, var, False, 0.1, 1e-3, False),
    "instance, by torch": lambda x, mean, var: torch.instance_norm(x, W, B, mean, var, True, 0.1, 1e-3, False),
    "batch": lambda x, mean, var: F.batch_norm(x, mean, var, W, B, training=True, momentum=0.3),
    "instance": lambda x, mean, var: F.instance_norm(x, mean, var, W, B, momentum=0.3),
    "module": lambda x, *_: torch.nn.BatchNorm1d(2, dtype=x.dtype)(x).detach(),
    "weight": lambda x, *_: torch._weight_norm(x[0], normal(2, 1, seed=1), 0),
    "padding": lambda x, *_: F.embedding(torch.tensor([0, 1, 1]), x[:, 0], padding_idx=-1),
}


@pytest.mark.parametrize("name", AS_TORCH)
def test_norms_written_out_are_those_of_torch(name: str) -> None:
    x, running = normal(4, 2, 3, seed=7), [(MEAN.clone(), VARIANCE.clone()) for _ in range(2)]
    want = AS_TORCH[name](x, *running[0])
    with WrittenOut():
        got = AS_TORCH[name](x, *running[1])
    for a, b in zip((got, *running[1]), (want, *running[0]), strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).abs().max()) < 1e-12
