"""Training on a simulated accelerator with values: the CPU's numbers, no race, one order of collectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import parallel
from shardfn.testing import simulated, world
from tests.models import STRATEGIES, distance
from tests.optimizers import optimizers_named
from tests.transforms.steps import block

WIDTH, LAYERS, STEPS = 8, 3, 2

STAGES: dict[str, dict[str, Any]] = {
    "kept": {},
    "remat": {"remat": True},
    "offload": {"remat": sf.offload(above=0)},
    "far prefetch": {"prefetch": 2},
}
OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    **optimizers_named("adamw, adamw8bit, muon, soap"),
    "clipped": lambda: so.chain(so.clip_by_global_norm(0.1), so.sgd(0.1, momentum=0.9)),
    "shard_state": lambda: so.shard_state(so.adamw(1e-2), "replica"),
    "dynamic_loss_scale": lambda: so.dynamic_loss_scale(so.adamw(1e-2)),
}
TIERS: list[dict[str, Any]] = [
    {"params": "host"},
    {"grads": "host"},
    {"state": "host"},
    {"params": "host", "grads": "host", "state": "host"},
    {"params": "disk", "grads": "disk", "state": "disk"},
]
Program = tuple[str, str, str, dict[str, Any]]
PROGRAMS: dict[str, Program] = {
    **{f"{s}, {k}": (s, k, "adamw", {}) for s, k in zip(STRATEGIES, itertools.cycle(STAGES), strict=False)},
    **{f"hybrid_shard, {o}": ("hybrid_shard", "kept", o, {}) for o in OPTIMIZERS},
    **{f"full_shard, {' '.join(t)} {max(t.values())}": ("full_shard", "kept", "adamw", t) for t in TIERS},
}
NAMES = [*PROGRAMS, "collectives and a pipeline"]


def trained(device: str, program: Program, scratch: str) -> list[Tensor]:
    """The losses, and the parameters after some steps."""
    strategy, stage, optimizer, tiers = program
    draw = torch.Generator().manual_seed(0)
    mesh = sf.make_mesh(replica=2, shard=2, device=device, scratch=scratch)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) / 2

    shapes = {"up": (WIDTH, 5), "b": (5,), "down": (5, WIDTH)}
    whole = {"blocks": [{name: made(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]}
    params = sf.shard(whole, mesh, STRATEGIES[strategy].with_tiers(**tiers) if tiers else STRATEGIES[strategy])
    batch = made(4, 3, WIDTH)[dist.get_rank()].to(mesh.device_type)
    staged, opt = sf.stage(block, **STAGES[stage]), OPTIMIZERS[optimizer]()

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = staged(p, x)
        return sf.pmean(x.square().mean(), ("replica", "shard"))

    step = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=...)
    state, losses = opt.init(params), []
    for _ in range(STEPS):
        value, grads = step(params, batch)
        losses.append(value.detach())
        params, state = opt.step(params, grads, state)
    return [x.detach().cpu() for x in (*losses, *optree.tree_leaves(sf.unshard(params)))]


def differentiated(device: str) -> list[Tensor]:
    """Results and gradients of a function with every collective, and of a pipeline."""
    mesh = sf.make_mesh(replica=2, shard=2, device=device)
    draw = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(4, 4, generator=draw, dtype=torch.float64).to(device)
    w = torch.randn(4, 4, generator=draw, dtype=torch.float64).to(device)

    def f(x: Tensor) -> Tensor:
        y = sf.all_gather(x, "shard", dim=0) * 2
        y = torch.tanh(sf.reduce_scatter(y, ("replica", "shard"), dim=0))
        y = sf.all_to_all(sf.ppermute(y, "shard", [(0, 1), (1, 0)]), "shard", split_dim=1, concat_dim=0)
        return sf.pmean((y + sf.pmax(y.detach(), "replica")).square().sum(), ("replica", "shard"))

    def part(w: Tensor, y: Any, b: Tensor) -> Tensor:
        first, last = sf.axis_index("shard") == 0, sf.axis_index("shard") == 1
        y = torch.tanh((b if first else y) @ w)
        return y.square().sum() if last else y

    def piped(w: Tensor) -> Tensor:
        return parallel.pipeline(part, w, [x, 2 * x, 3 * x], "shard")

    run = sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    found = [*run(sf.value_and_grad(f))(x), torch.func.jvp(run(f), (x,), (w,))[1], *run(sf.value_and_grad(piped))(w)]
    return [y.detach().cpu() for y in found]


def on_the_device(store: str, program: Program | None, scratch: str) -> tuple[int, list[Tensor], Any, dict[str, Any]]:
    """This rank, the numbers of a program (None: `differentiated`), its races, and its collectives by group."""
    met = dist.FileStore(store, 4)  # type: ignore[attr-defined]
    rank = met.add("ranks", 1) - 1
    with simulated(4, rank, store=met) as device:
        device.reset_counts()
        device.collectives.clear()
        numbers = numbers_on(device.name, program, scratch)
        return rank, numbers, device.races, dict(device.collectives)


def numbers_on(device: str, program: Program | None, scratch: str) -> list[Tensor]:
    return trained(device, program, scratch) if program else differentiated(device)


@pytest.mark.parametrize("name", NAMES)
def test_the_device_has_the_cpus_numbers_no_race_and_one_order_of_collectives(tmp_path: Path, name: str) -> None:
    program, scratch = PROGRAMS.get(name), str(tmp_path)
    got = world(4, "alone").with_deadline(120).run(on_the_device, str(tmp_path / "store"), program, scratch)
    want = world(4).with_deadline(120).run(numbers_on, "cpu", program, scratch)
    for (_, numbers, races, _), wanted in zip(sorted(got, key=lambda found: found[0]), want, strict=True):
        assert races == []
        assert distance(numbers, wanted) < 1e-14
    for group in {group for *_, collectives in got for group in collectives}:
        orders = [collectives[group] for *_, collectives in got if group in collectives]
        assert all(order == orders[0] for order in orders), group
