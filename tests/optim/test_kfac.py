"""K-FAC: what its papers say, beside one written for one process, on any number of ranks and by any strategy."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.curvature as sc
import shardfn.optim as so
from shardfn.optim.owners import owners, work
from shardfn.shards.pieces import units
from shardfn.testing import World
from shardfn.testing import world as started
from tests.models import STRATEGIES, copied, data_mesh, distance, leaves, normal, plainly
from tests.reference import worst
from tests.refusals import refused, told

WORDS, D, H, T, CLASSES, ROWS, STEPS, ESTIMATES = 7, 4, 5, 3, 3, 12, 7, 2
RATE, MOMENTUM, B2, DAMPING, CLIP, EVERY, DECAY = 0.3, 0.8, 0.7, 0.02, 0.05, 3, 0.1
SIZES = [pytest.param(n, marks=pytest.mark.world(n, "processes")) for n in (1, 2, 4)]
two = pytest.mark.world(2, "processes")
MATRICES = {"up.w": "product", "conv.k": "linear", "down.w": "linear", "twice.w": "linear", "head.w": "product"}


def whole() -> Any:
    return {
        "embed": {"e": normal(WORDS, D, seed=1)},
        "up": {"w": normal(D, H, seed=2), "b": normal(H, seed=3)},
        "conv": {"k": normal(H, H, 2, seed=4)},
        "down": {"w": normal(1, H, seed=5), "s": normal(seed=6)},
        "twice": {"w": normal(H, H, seed=7), "g": normal(H, seed=8)},
        "head": {"w": normal(H, CLASSES, seed=9)},
    }


def net(stage: Any, p: Any, t: Tensor, met: Any = lambda _, __, y: y) -> Tensor:
    x = stage(lambda p, t: F.embedding(t, p["e"]))(p["embed"], t)
    x = torch.tanh(stage(lambda p, x: met("up.w", x, x @ p["w"]) + p["b"])(p["up"], x))
    x = torch.tanh(stage(lambda p, x: met("conv.k", x, F.conv1d(x.mT, p["k"])).mT)(p["conv"], x))
    x = x + stage(lambda p, x: met("down.w", x, F.linear(x, p["w"])) * p["s"])(p["down"], x)
    f = stage(lambda p, x: torch.tanh(met("twice.w", x, F.linear(x, p["w"])) * p["g"]))
    x = f(p["twice"], f(p["twice"], x))
    return stage(lambda p, x: met("head.w", x, x @ p["w"]))(p["head"], x).sum(1)


def rows(t: int, n: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(t)
    return torch.randint(0, WORDS, (n, T), generator=draw), torch.randint(0, CLASSES, (n,), generator=draw)


def losses(stage: Any) -> Callable[..., Tensor]:
    return lambda p, t, y: F.cross_entropy(net(stage, p, t), y, reduction="none")


def kfac(**options: Any) -> so.Kfac:
    given: dict[str, Any] = {"momentum": MOMENTUM, "b2": B2, "damping": DAMPING, "clip": CLIP, "every": EVERY}
    given |= {"lr": RATE, "weight_decay": DECAY, "which": list(MATRICES)}
    given["fallback"] = so.adamw(0.05, weight_decay=DECAY, donate=options.get("donate", True))
    return so.kfac(**given | options)


# --- as in the papers, by one process ---


def factors(p: Any, t: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each matrix the mean of its inputs' outer products, and the mean over rows of those of outputs' gradients."""
    inputs: dict[str, list[Tensor]] = {}
    added: dict[str, list[Tensor]] = {}

    def met(path: str, x: Tensor, z: Tensor) -> Tensor:
        if path == "conv.k":  # patches, as many as outputs
            x = x.unfold(1, 2, 1).flatten(2)
        inputs.setdefault(path, []).append(x.detach().flatten(0, 1))
        added.setdefault(path, []).append(torch.zeros_like(z, requires_grad=True))
        return z + added[path][-1]

    loss = F.cross_entropy(net(plainly, p, t, met), y, reduction="sum")
    found = {}
    for path, zeros in added.items():
        gs = [g.mT if path == "conv.k" else g for g in torch.autograd.grad(loss, zeros, retain_graph=True)]
        a, g = torch.cat(inputs[path]), torch.cat([g.flatten(0, 1) for g in gs])
        found[path] = a.T @ a / len(a), g.T @ g / len(t)
    return found


def damped(factor: Tensor, by: Tensor) -> Tensor:
    return torch.linalg.inv(factor + by * torch.eye(len(factor)).double())


def momentum_of(path: str, shape: tuple[int, ...]) -> Any:
    return MOMENTUM if path < "h" else lambda step: 0.5 / step


def damping_of(path: str, shape: tuple[int, ...]) -> float:
    return DAMPING * shape[0]


RULES: dict[str, Any] = {"momentum": momentum_of, "damping": damping_of}


@functools.cache
def by_paper(clip: float | None = CLIP, every: int = EVERY, rules: bool = False) -> Any:
    """Parameters after all steps, and how much the steps were clipped."""
    params = optree.tree_map(lambda x: x.clone().requires_grad_(), whole())
    each, scales = leaves(params), []
    rest = torch.optim.AdamW([x for path, x in each.items() if path not in MATRICES], lr=0.05, weight_decay=DECAY)
    means: dict[str, list[Tensor]] = {path: [torch.zeros(1).double()] * 2 for path in MATRICES}
    inverses: dict[str, tuple[Tensor, Tensor]] = {}
    momenta, k = {path: torch.zeros(1).double() for path in MATRICES}, 0
    for step in range(STEPS):
        t, y = rows(step)
        if step % ESTIMATES == 0:
            k += 1
            for path, new in factors(params, t, y).items():
                means[path] = [B2 * old + (1 - B2) * x for old, x in zip(means[path], new, strict=True)]
        rest.zero_grad()
        for path in MATRICES:
            each[path].grad = None
        losses(plainly)(params, t, y).mean().backward()
        along, grads = {}, {}
        for path, kind in MATRICES.items():
            if step % every == 0:
                a, g = (x / (1 - B2**k) for x in means[path])
                pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
                damping = damping_of(path, tuple(each[path].shape)) if rules else DAMPING
                inverses[path] = damped(a, pi * damping**0.5), damped(g, damping**0.5 / pi)
            a, g = inverses[path]
            gradient = each[path].grad
            assert gradient is not None
            grads[path] = gradient
            grad = gradient.flatten(1) if gradient.ndim > 2 else gradient
            d = g @ grad @ a if kind == "linear" else a @ grad @ g
            along[path] = d.view_as(each[path])
        size = RATE**2 * sum(float((grads[path] * d).sum()) for path, d in along.items())
        scale = 1.0 if clip is None else min(1.0, (clip / size) ** 0.5)
        scales.append(scale)
        with torch.no_grad():
            for path, d in along.items():
                momenta[path] = (0.5 / (step + 1) if rules and path > "h" else MOMENTUM) * momenta[path] + scale * d
                each[path].mul_(1 - RATE * DECAY).sub_(RATE * momenta[path])
        rest.step()
    return optree.tree_map(Tensor.detach, params), scales


# --- on ranks ---


def mine(mesh: Any, t: int) -> tuple[Tensor, Tensor]:
    n, k = mesh.size(), mesh.get_rank()
    x, y = rows(t)
    return x.tensor_split(n)[k], y.tensor_split(n)[k]


Way = tuple[so.Optimizer, Callable[[Any], Any], Callable[[Any, Any], Any]]
"""A wrapper, and what takes the state of kfac out of the wrapper's and puts another one there."""


def plain(optimizer: so.Kfac) -> Way:
    return optimizer, lambda state: state, lambda state, new: new


def trained(optimizer: so.Kfac, way: Way, ps: Any, state: Any, mesh: Any, steps: range = range(STEPS)) -> Any:
    of, axes = losses(sf.stage), tuple(mesh.mesh_dim_names)
    outer, out, back = way
    for t in steps:
        batch = mine(mesh, t)
        if t % ESTIMATES == 0:
            state = back(state, optimizer.estimate(sc.second_moments(of, ps, [batch], outputs=True), out(state)))
        grads = sf.grad(lambda ps, *batch: sf.psum(of(ps, *batch).sum(), axes) / ROWS)(ps, *batch)
        ps, state = outer.step(ps, grads, state)
    return ps, state


def by_ranks(strategy: str, options: dict[str, Any], wrap: str = "nothing") -> tuple[float, float]:
    mesh, optimizer = data_mesh(dist.get_world_size()), kfac(**options)
    flat, way = sf.shard(whole(), mesh, STRATEGIES[strategy]), WRAPPERS[wrap](optimizer)
    state = way[0].init(flat)
    before = copied(flat), copied(way[1](state)["chosen"]["blocks"])
    run = sf.shard_map(
        lambda ps, state: trained(optimizer, way, ps, state, mesh), mesh=mesh, in_specs=..., out_specs=...
    )
    got, _ = run(flat, state)
    pure = not options.get("donate", True)
    changed = distance((flat, way[1](state)["chosen"]["blocks"]), before) if pure else 0.0
    wanted, _ = by_paper(options.get("clip", CLIP), options.get("every", EVERY), "damping" in options)
    return distance(sf.unshard(got), wanted), changed


WRAPPERS: dict[str, Callable[[so.Kfac], Way]] = {
    "nothing": plain,
    "chain": lambda o: (
        so.chain(so.clip_by_global_norm(1e9), o), lambda s: s[-1], lambda s, new: (*s[:-1], new),
    ),
    "ema": lambda o: (so.ema(o, 0.9), lambda s: s["optimizer"], lambda s, new: s | {"optimizer": new}),
    "skip_nonfinite": lambda o: (so.skip_nonfinite(o), lambda s: s["optimizer"], lambda s, new: s | {"optimizer": new}),
    "masked": lambda o: (so.masked(o, r".*", so.sgd(0.1)), lambda s: s["chosen"], lambda s, new: s | {"chosen": new}),
}  # fmt: skip


def test_the_reference_clips_some_steps_and_moves_all() -> None:
    params, scales = by_paper()
    assert min(scales) < 0.9
    assert max(scales) == 1.0
    assert all(distance(x, y) > 1e-2 for x, y in zip(*map(optree.tree_leaves, (params, whole())), strict=True))


@pytest.mark.central
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", SIZES, indirect=True)
def test_steps_are_the_papers(world: World, strategy: str) -> None:
    for apart, _ in world.with_deadline(60).run(by_ranks, strategy, {}):
        assert apart < 1e-9


@pytest.mark.parametrize(
    "options", [{"clip": None, "every": 1}, {"donate": False}, RULES], ids=["clip", "pure", "rules"]
)
@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
@two
def test_options(world: World, strategy: str, options: dict[str, Any]) -> None:
    for apart, changed in world.with_deadline(60).run(by_ranks, strategy, options):
        assert apart < 1e-9
        assert changed == 0


@pytest.mark.parametrize("wrap", [name for name in WRAPPERS if name != "nothing"])
@two
def test_inside_of_other_optimizers(world: World, wrap: str) -> None:
    for apart, _ in world.with_deadline(60).run(by_ranks, "full_shard", {}, wrap):
        assert apart < 1e-9


def without(strategy: str) -> list[float]:
    """A stage without a gradient, at the first step and later, beside one whose gradient is zero."""
    mesh, apart = data_mesh(dist.get_world_size()), []
    optimizer = kfac(weight_decay=0.0, momentum=0.0, donate=False, every=1, fallback=so.sgd(0.1, donate=False))
    one = other = sf.shard(whole(), mesh, STRATEGIES[strategy])
    moments = sc.second_moments(losses(sf.stage), one, [mine(mesh, 0)], outputs=True)
    state = last = optimizer.estimate(moments, optimizer.init(one))
    for t, gone in enumerate(("up", "head", "embed", "twice")):
        grads = optree.tree_map(lambda x, t=t: torch.sin(x * (3 + t)), gradient_like(one, mesh))
        none = optree.tree_map(lambda _: None, grads[gone])
        zero = optree.tree_map(torch.zeros_like, grads[gone])
        before = copied(one[gone])
        one, state = optimizer.step(one, grads | {gone: none}, state)
        assert distance(one[gone], before) == 0
        other, last = optimizer.step(other, grads | {gone: zero}, last)
        apart += [distance(one[name], other[name]) for name in one if name != gone]
        other = copied(one)
    return apart


def gradient_like(ps: Any, mesh: Any) -> Any:
    axes = tuple(mesh.mesh_dim_names)
    squares = sf.stage(lambda p: sum(x.square().sum() for x in optree.tree_leaves(p)))
    f = sf.grad(lambda ps: sf.psum(sum(squares(p) for p in ps.values()), axes) / mesh.size())
    return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)(ps)


@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "hybrid_shard"])
@pytest.mark.parametrize("world", SIZES, indirect=True)
def test_a_stage_without_a_gradient_stays_and_others_go_on(world: World, strategy: str) -> None:
    for apart in world.with_deadline(60).run(without, strategy):
        assert worst(apart) < 1e-12


def test_a_factor_of_zeros_has_damping_alone() -> None:
    """Of a layer whose outputs are never used."""
    params = {"w": normal(4, 5, seed=1), "v": normal(5, 3, seed=2)}
    x, optimizer = normal(6, 4, seed=3), so.kfac(RATE, momentum=0.0, damping=DAMPING, clip=None)

    def of(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"] * 0 @ p["v"]).sum(1) + x.sum(1)

    moments = sc.second_moments(of, params, [x], outputs=True)
    state = optimizer.estimate(moments, optimizer.init(params))
    root, grads = DAMPING**0.5, optree.tree_map(torch.sin, params)
    wanted = params["w"] - RATE * torch.linalg.solve(x.T @ x / 6 + root * torch.eye(4).double(), grads["w"]) / root
    new, _ = optimizer.step(params, grads, state)
    assert distance(new["w"], wanted) < 1e-12


# --- where the work and the memory are ---


def shared(strategy: str) -> tuple[float, float, int]:
    """This rank's work over a rank's mean, its numbers of factors and inverses over the mean, and how many it owns."""
    mesh, optimizer = data_mesh(4), so.kfac(0.1)
    flat = sf.shard(
        [{"w": normal(8, 8, seed=i), "v": normal(8, 16, seed=i)} for i in range(8)], mesh, STRATEGIES[strategy]
    )
    blocks = optimizer.init(flat)["chosen"]["blocks"]
    held = [x.numel() for x in optree.tree_leaves(blocks)]
    each = [work(block.box.sizes) for block, rank in owners(units(flat).each, work).items() if rank == mesh.get_rank()]
    total = 8 * (work((8, 8)) + work((8, 16)))
    return sum(each) / (total / 4), sum(held) / (8 * 2 * (3 * 64 + 256) / 4), sum(n > 0 for n in held)


@pytest.mark.world(4)
@pytest.mark.parametrize("strategy", ["full_shard", "ddp", "hybrid_shard", "zero1"])
def test_work_and_memory_are_shared_evenly(world: World, strategy: str) -> None:
    for found, memory, count in world.run(shared, strategy):
        assert found == 1.0
        assert 1.0 <= memory < 1.1
        assert count == 4


# --- saved, and gone on with elsewhere ---


def run(optimizer: so.Kfac, ps: Any, state: Any, mesh: Any, steps: range) -> Any:
    f = functools.partial(trained, optimizer, plain(optimizer), mesh=mesh, steps=steps)
    return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)(ps, state)


def saved(folder: Path, strategy: str, first: bool) -> float:
    mesh, optimizer = data_mesh(dist.get_world_size()), kfac()
    flat = sf.shard(whole(), mesh, STRATEGIES[strategy])
    state = optimizer.init(flat)
    if first:
        ps, state = run(optimizer, flat, state, mesh, range(5))
        sf.checkpoint.save(folder, {"params": ps, "state": state})
        return 0.0
    read = sf.checkpoint.load(folder, {"params": flat, "state": state})
    got, _ = run(optimizer, read["params"], read["state"], mesh, range(5, STEPS))
    return distance(sf.unshard(got), by_paper()[0])


def test_a_checkpoint_goes_on_on_another_mesh_between_two_inversions(tmp_path: Path) -> None:
    for n, strategy, first in ((4, "hybrid_shard", True), (2, "zero1", False), (1, "ddp", False)):
        for apart in started(n).with_deadline(60).run(saved, tmp_path / "state", strategy, first):
            assert apart < 1e-9


# --- what is refused ---


def wrong(which: str) -> str:
    mesh = data_mesh(dist.get_world_size())
    flat, batches = sf.shard(whole(), mesh, STRATEGIES["full_shard"]), [mine(mesh, 0)]
    optimizer = kfac()
    state = optimizer.init(flat)
    other = so.kfac(0.1)

    def estimated(params: Any = flat, optimizer: so.Kfac = optimizer, state: Any = state, **more: Any) -> Any:
        return optimizer.estimate(sc.second_moments(losses(sf.stage), params, batches, **more), state)

    def wide() -> Any:
        return sf.shard(whole() | {"head": {"w": normal(H, CLASSES + 1, seed=9)}}, mesh, STRATEGIES["full_shard"])

    calls: dict[str, Callable[[], Any]] = {
        "no estimate": lambda: optimizer.step(flat, copied(flat), state),
        "an embedding": lambda: estimated(flat, other, other.init(flat), outputs=True),
        "inputs alone": estimated,
        "a vector": lambda: kfac(which=["up.b"]).init(flat),
        "no such path": lambda: kfac(which=["down"]).init(flat),
        "another shape": lambda: estimated(wide(), outputs=True),
        "plain": lambda: optimizer.estimate(
            sc.second_moments(losses(plainly), whole(), [rows(0)], outputs=True), state
        ),
        "a captured count": lambda: optimizer.step(
            flat, copied(flat), state | {"chosen": state["chosen"] | {"step": torch.tensor(0)}}
        ),
    }
    return told(calls[which])


@two
@pytest.mark.parametrize(
    ("which", "message"),
    {
        "no estimate": "RuntimeError: kfac: there are no factors before the first estimate: state = optimizer",
        "an embedding": "ValueError: kfac: these moments have no factors of embed.e, .* by which=",
        "inputs alone": "ValueError: kfac: .* pass outputs=True to curvature.second_moments",
        "a vector": "ValueError: kfac: which= chose up.b, of fewer than two dimensions",
        "no such path": "ValueError: kfac: no parameter .* matches 'down'; there are conv.k",
        "another shape": r"ValueError: kfac: the moment of outputs of head.w is \(4, 4\), and \(3, 3\) in the state",
        "plain": "ValueError: kfac: .* of outputs of conv.k is of a plain tensor, and the state of a flat shard",
        "a captured count": "TypeError: kfac: the host must know the step number",
    }.items(),
)
def test_errors_are_told_on_all_ranks(world: World, which: str, message: str) -> None:
    for said in world.run(wrong, which):
        assert re.match(message, said, re.DOTALL), said


@pytest.mark.parametrize("name", ["lr", "momentum", "b2", "damping", "clip", "every", "weight_decay", "donate"])
def test_arguments_out_of_their_range_are_refused(name: str) -> None:
    for value in ("a", -1, math.inf, torch.tensor([0.1])):
        assert name in refused(functools.partial(kfac, **{name: value}), (ValueError, TypeError))


def test_a_derivative_is_refused() -> None:
    optimizer, p = so.kfac(0.1, donate=False), {"w": normal(3, 3, seed=1)}
    state = optimizer.init(p)
    said = refused(lambda: sf.grad(lambda p: optimizer.step(p, p, state)[0]["w"].sum())(p), RuntimeError)
    assert "kfac has no derivative" in said


def checked_grams() -> int:
    mesh = data_mesh(dist.get_world_size())
    flat, of, found = sf.shard(whole(), mesh, STRATEGIES["full_shard"]), losses(sf.stage), list[Any]()

    def noted(ps: Any) -> Any:
        found.append(sc.second_moments(of, ps, [mine(mesh, 0)], outputs=True))
        return ps

    sf.shard_map(noted, mesh=mesh, in_specs=..., out_specs=...)(flat)
    return len(found)


@pytest.mark.world(4, "threads")
def test_a_checked_call_judges_no_gradients_that_grams_takes_for_itself(world: World) -> None:
    assert world.run(checked_grams) == [1] * 4
