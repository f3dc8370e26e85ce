"""What a step makes the host wait for, on a pretended accelerator.

Every case is built once and called three times; what is counted is the third call. In a steady step the host waits for
nothing, but where a number must be known to go on: `WAITS` says where, and for how many.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import compat, parallel
from shardfn.testing import simulated, world

RANKS, WIDTH = 8, 16
DATA = ("replica", "shard")
Step = Callable[[], Any]

STRATEGIES: dict[str, Any] = {
    "ddp": sf.ddp(DATA),
    "zero1": sf.zero1(DATA),
    "zero2": sf.zero2(DATA),
    "full_shard": sf.full_shard(DATA),
    "hybrid_shard": sf.hybrid_shard("shard", "replica"),
    "hybrid_shard_zero2": sf.hybrid_shard_zero2("shard", "replica"),
    "hfsdp": sf.hfsdp("shard", "replica"),
    "hpz": sf.hpz("shard", "replica"),
    "mics": sf.mics(DATA),
}
STAGES: dict[str, dict[str, Any]] = {
    "kept activations": {},
    "remat": {"remat": True},
    "offload": {"remat": "offload"},
    "policy": {"remat": [torch.ops.aten.mm.default]},
    "reshard": {"reshard": True},
    "no reshard": {"reshard": False},
    "no prefetch": {"prefetch": 0},
    "far prefetch": {"prefetch": 2},
    "narrow": {"gather_dtype": torch.bfloat16, "input_dtype": torch.bfloat16, "output_dtype": torch.float32},
}
HALF = lambda path, shape: len(shape) > 1  # noqa: E731
OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "sgd": lambda: so.sgd(1e-3),
    "momentum": lambda: so.sgd(1e-3, momentum=0.9),
    "adam": lambda: so.adam(1e-3),
    "adamw": lambda: so.adamw(1e-3),
    "adamw, scheduled": lambda: so.adamw(so.warmup_cosine(1e-3, warmup=1, steps=9)),
    "adamw, decay by rule": lambda: so.adamw(1e-3, weight_decay=lambda path, shape: 0.1 if len(shape) > 1 else 0.0),
    "adamw, pure": lambda: so.adamw(1e-3, donate=False),
    "lion": lambda: so.lion(1e-3),
    "adafactor": lambda: so.adafactor(1e-3),
    "muon": lambda: so.masked(so.muon(1e-3), HALF, so.adamw(1e-3)),
    "muon, pure": lambda: so.masked(so.muon(1e-3, donate=False), HALF, so.adamw(1e-3)),
    "clipped": lambda: so.chain(so.clip_by_global_norm(1.0), so.adamw(1e-3)),
    "clipped, pure": lambda: so.chain(so.clip_by_global_norm(1.0, donate=False), so.adamw(1e-3)),
    "clamped": lambda: so.chain(so.clip_by_value(1.0), so.adamw(1e-3)),
    "ema": lambda: so.ema(so.adamw(1e-3), 0.9),
    "accumulate": lambda: so.accumulate(so.adamw(1e-3), 2),
    "shard_state": lambda: so.shard_state(so.adamw(1e-3), "replica"),
    "skip_nonfinite": lambda: so.skip_nonfinite(so.adamw(1e-3)),
    "loss_scaled": lambda: so.loss_scaled(so.adamw(1e-3)),
}

WAITS: dict[str, int] = {
    # whether to skip is decided on the host, for all parameters at once
    "optimizer, skip_nonfinite": 1,
    "optimizer, loss_scaled": 1,
    "norms as numbers": 1,
    "a loss that is printed": 1,
    # how many tokens travel where: one table of counts
    "mixture, dropless": 1,
    "mixture, refusing": 1,
}


# --- the programs ---


def layer() -> dict[str, Tensor]:
    made = {"up": torch.randn(WIDTH, 2 * WIDTH), "b": torch.randn(2 * WIDTH), "down": torch.randn(2 * WIDTH, WIDTH)}
    return {name: x.to("sim") for name, x in made.items()}


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"] + p["b"]) @ p["down"]


def losing(staged: Any) -> Any:
    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = staged(p, x)
        return x.square().sum()

    return loss


def drawn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, device="sim", **options)


def mapped(mesh: Any, f: Callable[..., Any], *args: Any) -> Step:
    run = sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)
    return lambda: run(*args)


def sharded(mesh: Any, strategy: Any, layers: int = 3) -> Any:
    return sf.shard({"blocks": [layer() for _ in range(layers)]}, mesh, strategy)


def training(mesh: Any, strategy: Any, **options: Any) -> Step:
    vg = sf.value_and_grad(losing(sf.stage(block, **options)))
    return mapped(mesh, vg, sharded(mesh, strategy), drawn(8, WIDTH))


def psum_in_a_stage(mesh: Any, **options: Any) -> Step:
    def crossed(p: Any, x: Tensor) -> Tensor:
        h = torch.tanh(sf.pvary(x, "shard") @ p["up"] + sf.pvary(p["b"], "shard"))
        return x + sf.psum(h @ p["down"], "shard")

    vg = sf.value_and_grad(losing(sf.stage(crossed, **options)))
    return mapped(mesh, vg, sharded(mesh, sf.full_shard("replica")), drawn(8, WIDTH))


def dropping(mesh: Any, remat: bool) -> Step:
    def dropped(p: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(block(p, x), 0.1)

    vg = sf.value_and_grad(losing(sf.stage(dropped, remat=remat)))
    return mapped(mesh, vg, sharded(mesh, STRATEGIES["full_shard"]), drawn(8, WIDTH))


def tied(mesh: Any) -> Step:
    staged = sf.stage(block)

    def loss(params: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = staged(params["blocks"][0], x)
        return x.square().sum()

    return mapped(mesh, sf.value_and_grad(loss), sharded(mesh, STRATEGIES["full_shard"]), drawn(8, WIDTH))


def backward_by_the_user(mesh: Any) -> Step:
    params, x = sharded(mesh, STRATEGIES["full_shard"]), drawn(8, WIDTH)
    loss = losing(sf.stage(block))
    leaves = [p.values.requires_grad_() for p in params["blocks"]]

    def step() -> None:
        loss(params, x).backward()
        for leaf in leaves:
            leaf.grad = None

    return mapped(mesh, step)


def transformed(mesh: Any, how: str) -> Step:
    params, x = sharded(mesh, sf.full_shard("shard"), 1), drawn(8, WIDTH)
    loss = losing(sf.stage(block))

    def hvp(params: Any, x: Tensor) -> Any:
        return torch.func.jvp(lambda q: sf.grad(loss)(q, x), (params,), (params,))[1]

    def reverse(params: Any, x: Tensor) -> Any:
        return sf.grad(lambda q: sum(g.values.sum() for g in sf.grad(loss)(q, x)["blocks"]))(params)

    ways = {"hvp": hvp, "reverse over reverse": reverse, "func.grad": torch.func.grad(loss)}
    return mapped(mesh, ways[how], params, x)


def accumulating(mesh: Any, defer: Any) -> Step:
    loss, x = losing(sf.stage(block)), drawn(8, WIDTH)
    run = lambda params: sf.accumulate(loss, [x[:4], x[4:]], defer=defer)(params)  # noqa: E731
    return mapped(mesh, run, sharded(mesh, STRATEGIES["hybrid_shard"]))


def optimizing(mesh: Any, name: str, strategy: str = "hybrid_shard") -> Step:
    params = sharded(mesh, STRATEGIES[strategy])
    if name == "shard_state":
        params = sharded(mesh, STRATEGIES["hybrid_shard"])
    opt, vg = OPTIMIZERS[name](), sf.value_and_grad(losing(sf.stage(block)))
    now = SimpleNamespace(params=params, state=opt.init(params))
    run = sf.shard_map(vg, mesh=mesh, in_specs=..., out_specs=...)
    x = drawn(8, WIDTH)

    def step() -> None:
        _, grads = run(now.params, x)
        now.params, now.state = opt.step(now.params, grads, now.state)

    return step


def attending(mesh: Any, way: str, fused: bool = False, **options: Any) -> Step:
    heads = RANKS if way == "ulysses" else 4
    q, k, v = (drawn(2, heads, 8, 16, dtype=torch.bfloat16 if fused else torch.float32) for _ in range(3))
    f = {
        "ring": lambda *xs: parallel.ring_attention(*xs, "shard", **options),
        "ulysses": lambda *xs: parallel.ulysses_attention(*xs, "shard", **options),
        "alone": lambda *xs: parallel.attention(*xs, **options),
    }[way]
    step = mapped(mesh, sf.grad(lambda *xs: f(*xs).float().sum(), (0, 1, 2)), q, k, v)
    if not fused:
        return step

    def with_kernel() -> Any:
        before, compat._has_flash = compat._has_flash, lambda device: True
        try:
            return step()
        finally:
            compat._has_flash = before

    return with_kernel


def mixing(mesh: Any, **options: Any) -> Step:
    experts = 4
    x, gate, e = drawn(1, experts, WIDTH), drawn(WIDTH, experts), drawn(experts // 4, WIDTH, WIDTH)

    def loss(e: Tensor, gate: Tensor) -> Tensor:
        routing = parallel.route(x, gate, 1)
        out = parallel.mixture(lambda p, x: x @ p, e, x, routing, "shard", **options)
        return out.sum() + parallel.balance_loss(routing, DATA) + parallel.router_loss(routing, DATA)

    return mapped(mesh, sf.grad(loss, (0, 1)), e, gate)


def language(mesh: Any) -> Step:
    """A vocabulary that is cut: embedding, a norm of cut vectors, cross-entropy."""
    tokens = torch.randint(0, 32, (2, 8), device="sim")
    table, weight, out = drawn(8, WIDTH), drawn(WIDTH // 4), drawn(WIDTH, 8)

    def loss(table: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        x = parallel.embedding(tokens, table, "shard")
        x = parallel.to_parallel(x, "shard")
        x = sf.all_gather(parallel.rms_norm(x[..., : WIDTH // 4], weight, "shard"), "shard", dim=2, to="invariant")
        return parallel.cross_entropy(x, out, tokens, "shard", chunk=4).sum()

    return mapped(mesh, sf.grad(loss, (0, 1, 2)), table, weight, out)


def counted(mesh: Any) -> Step:
    """A loss divided by a number of the host's."""
    return mapped(mesh, lambda x: sf.psum(x.sum(), DATA) / sf.psum(128, DATA), drawn(4))


def piping(mesh: Any, schedule: Any) -> Step:
    module: Any = importlib.import_module("shardfn.parallel.pipeline")  # the name in the package is the function's
    between = module._Between(optree.tree_structure(0), (((4, WIDTH), torch.float32),))
    params = sf.shard({"blocks": [layer()]}, mesh, sf.full_shard("replica").at(shard=0))
    staged = sf.stage(block)

    def part(params: Any, x: Any, batch: Tensor) -> Tensor:
        return staged(params["blocks"][0], batch if x is None else x)

    x = drawn(4, WIDTH)

    def run(params: Any) -> Any:
        return sf.value_and_grad(lambda p: module.pipeline(part, p, [x, x, x], "shard", schedule=schedule))(params)

    step = mapped(mesh, run, params)

    def known() -> Any:
        before, module._surveyed = module._surveyed, lambda *_: between
        try:
            return step()
        finally:
            module._surveyed = before

    return known


def norms_as_numbers(mesh: Any) -> Step:
    params = sharded(mesh, STRATEGIES["hybrid_shard"])
    return lambda: so.norms(params)


def one_norm(mesh: Any) -> Step:
    params = sharded(mesh, STRATEGIES["hybrid_shard"])
    return lambda: so.global_norm(params)


def printed(mesh: Any) -> Step:
    step = training(mesh, STRATEGIES["full_shard"])
    return lambda: step()[0].item()


def unsharded(mesh: Any) -> Step:
    params = sharded(mesh, STRATEGIES["hybrid_shard"])
    return lambda: sf.unshard(params)


def cases() -> dict[str, Callable[[Any], Step]]:
    found: dict[str, Callable[[Any], Step]] = {}
    for name, strategy in STRATEGIES.items():
        for kind, options in STAGES.items():
            found[f"{name}, {kind}"] = lambda mesh, s=strategy, o=options: training(mesh, s, **o)
    for kind in ("kept activations", "remat", "offload"):
        found[f"psum in a stage, {kind}"] = lambda mesh, o=STAGES[kind]: psum_in_a_stage(mesh, **o)
    for remat in (False, True):
        found[f"dropout, remat={remat}"] = lambda mesh, remat=remat: dropping(mesh, remat)
    for how in ("hvp", "reverse over reverse", "func.grad"):
        found[how] = lambda mesh, how=how: transformed(mesh, how)
    for defer in ("nothing", "replicas", "everything"):
        found[f"accumulate, {defer}"] = lambda mesh, defer=defer: accumulating(mesh, defer)
    for name in OPTIMIZERS:
        found[f"optimizer, {name}"] = lambda mesh, name=name: optimizing(mesh, name)
    for strategy in ("zero1", "hfsdp"):
        found[f"optimizer on {strategy}"] = lambda mesh, s=strategy: optimizing(mesh, "clipped", s)
    for way in ("ring", "ulysses", "alone"):
        for fused in (False, True):
            found[f"attention, {way}, fused={fused}"] = lambda mesh, w=way, f=fused: attending(mesh, w, f)
    found["attention, ring, in order"] = lambda mesh: attending(mesh, "ring", balanced=False)
    found["attention, ring, not causal"] = lambda mesh: attending(mesh, "ring", causal=False)
    found["mixture, capacity"] = lambda mesh: mixing(mesh, capacity=8)
    found["mixture, refusing"] = lambda mesh: mixing(mesh, capacity=8, overflow="error")
    found["mixture, dropless"] = lambda mesh: mixing(mesh)
    found["pipeline, 1f1b"] = lambda mesh: piping(mesh, "1f1b")
    found["pipeline, gpipe"] = lambda mesh: piping(mesh, "gpipe")
    plain = {"a parameter used twice": tied, "backward by the user": backward_by_the_user, "vocabulary": language}
    plain |= {"a sum of a number": counted, "norms as numbers": norms_as_numbers, "a global norm": one_norm}
    return found | plain | {"a loss that is printed": printed, "unshard": unsharded}


# --- running them ---


def observed(names: list[str], backend: str) -> dict[str, Any]:
    """Of each case: what its third call waited for, its hazards, and how it failed."""
    found: dict[str, Any] = {}
    with simulated(RANKS, backend=backend) as device:
        mesh = sf.make_mesh(replica=2, shard=4, device=device.name)
        for name in names:
            try:
                step = cases()[name](mesh)
                for _ in range(3):
                    device.forget()
                    step()
                found[name] = device.synchronisations, device.hazards, None
            except Exception:
                found[name] = [], [], traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def steady() -> dict[str, Any]:
    return world(1, "alone").within(120).run(observed, list(cases()), "simulated")[0]


@pytest.mark.parametrize("name", cases())
def test_a_steady_step_waits_only_where_a_number_must_be_known(steady: dict[str, Any], name: str) -> None:
    waits, hazards, failure = steady[name]
    assert failure is None, failure
    assert hazards == []
    assert sum(one.times for one in waits) == WAITS.get(name, 0), waits


FEW = ["full_shard, kept activations", "hybrid_shard, remat", "zero1, kept activations", "accumulate, everything"]


@pytest.mark.parametrize("backend", ["fake", "cpu:fake,sim:fake", "cpu:simulated,sim:fake"])
def test_process_groups_may_be_told_by_device(backend: str) -> None:
    for waits, hazards, failure in world(1, "alone").run(observed, FEW, backend)[0].values():
        assert (waits, hazards, failure) == ([], [], None)
