"""Compiled steps of every strategy on one device of a pretended world, beside the same steps as they are.

Collectives come late, on streams of their own, and some steps run on another stream than the default one. Then the
host must wait nowhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch import Tensor

import shardfn as sf
from benchmarks.gpu_schedules import Late, block, busy, collectives, problem, rule, waited
from benchmarks.gpu_setting import Answer, Where, accelerator
from benchmarks.strategies import DATA, STRATEGIES

CALLS = 6  # the second and the third are traced


def stepping(mesh: Any, strategy: Any, options: dict[str, Any], whole: Any, x: Tensor, compiles: bool) -> Any:
    """A step of clipped AdamW, which returns the loss and all shards."""
    optimizer, layer = rule(), sf.stage(block, **options)
    params = sf.shard(optree.tree_map(torch.clone, whole), mesh, strategy)
    state = optimizer.init(params)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params):
            x = layer(p, x)
        return sf.pmean(x.square().mean(), DATA)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def trained(params: Any, state: Any, x: Tensor) -> Any:
        value, gradients = sf.value_and_grad(loss)(params, x)
        return *optimizer.step(params, gradients, state), value

    run = sf.compile(trained) if compiles else trained

    def step() -> list[Tensor]:
        nonlocal params, state
        params, state, value = run(params, state, x)
        return [value, *optree.tree_leaves(params)]

    return step


def numbers(mesh: Any, step: Callable[[], list[Tensor]], dice: random.Random | None) -> list[Tensor]:
    """Losses, and the shards after the last call; `dice` draws the delays of collectives, or None if there are none."""
    module, found = torch.get_device_module(mesh.device_type), list[list[Tensor]]()
    with collectives(mesh, Late(module, dice)), busy(mesh.device_type, dice) if dice else nullcontext():
        for _ in range(CALLS):
            found.append([x.clone() for x in step()])
    module.synchronize()
    return [x.detach().cpu() for x in (*(each[0] for each in found), *found[-1][1:])]


def compiled(where: Where) -> Answer:
    answer, dice = Answer(), random.Random(0)
    with accelerator(where, values=True) as (device, simulation), sf.debug(memory=False):
        mesh = sf.make_mesh(replica=2, shard=4, device=device)
        whole, x = optree.tree_map(Tensor.double, problem(where, device))
        for name, strategy in STRATEGIES.items():
            for options in ({}, {"remat": True}) if name == "full_shard" else ({},):
                wanted = numbers(mesh, stepping(mesh, strategy, options, whole, x, False), None)
                step = stepping(mesh, strategy, options, whole, x, True)
                if simulation:
                    simulation.reset_counts()
                found = numbers(mesh, step, dice)
                races = len(simulation.races) if simulation else "not looked for"
                apart = max(
                    float((a - b).abs().max() / b.abs().max()) if bool(a.isfinite().all()) else float("inf")
                    for a, b in zip(found, wanted, strict=True)
                )
                waits = waited(step, simulation)
                label = f"{name}{', recomputed' if options else ''}, sf.compile"
                row = {"strategy": label, "apart": apart, "races": races}
                answer.rows.append(row | {"the host waits": "; ".join(waits) or "nowhere"})
                answer.goal(f"{label}: relative difference from the step as it is", apart, 1e-11)
                answer.goal(f"{label}: the host waits in a step", len(waits), 0)
                if isinstance(races, int):
                    answer.goal(f"{label}: races", races, 0)
    return answer
