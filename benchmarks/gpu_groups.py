"""Process groups on one GPU: NCCL's, interrupted and renewed; and several ranks that really are apart."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from benchmarks import shared_device
from benchmarks.gpu_schedules import STEPS, block, problem, rule, training
from benchmarks.gpu_setting import Answer, Where, pretended
from benchmarks.strategies import STRATEGIES
from shardfn.compat import process_groups
from shardfn.testing import World

TIMES = 5
RANKS = 4
SKEW = 0.02  # seconds by which ranks fall behind each other, at most, in front of a step


# --- renewal ---


def renewals(where: Where) -> Answer:
    """The group of one rank is interrupted while it has work, renewed, and used, several times."""
    answer, right, seconds = Answer(), 0, []
    with pretended(1, where.device):
        group = dist.group.WORLD
        assert group is not None
        x = torch.ones(2**10 if where.tiny else 2**26, device=where.device)
        dist.all_reduce(x)
        free = _free(where)
        for i in range(TIMES):
            if where.cuda:
                torch.cuda._sleep(10**8)  # so that the next is under way
            dist.all_reduce(x, async_op=True)
            began = time.perf_counter()
            process_groups.interrupt([group])
            process_groups.renew(group, f"again {i}", process_groups.default_store())
            seconds.append(time.perf_counter() - began)
            sent, whole = torch.full((4,), float(i), device=where.device), torch.empty(4, device=where.device)
            dist.all_reduce(sent)
            process_groups.start_all_gather(whole, sent, group).wait()
            right += whole.tolist() == [i] * 4
        answer.rows.append({"backend": dist.get_backend(), "renewals": TIMES, "slowest s": max(seconds)})
        answer.goal("renewed groups that work", right, TIMES, "at least")
        answer.goal("slowest renewal, s", max(seconds), 5)
        name = "device memory lost by all renewals, MiB"
        if where.cuda:
            answer.goal(name, (free - _free(where)) / 2**20, 64)
        else:
            answer.unanswered(name, "gloo holds no device memory", 64)
    return answer


def _free(where: Where) -> int:
    if not where.cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


# --- several ranks on one device ---


def ranks(where: Where) -> Answer:
    """Processes on one device train with every strategy, while they fall behind each other at random."""
    answer, count = Answer(), 2 if where.tiny else RANKS
    with tempfile.TemporaryDirectory() as folder, World(count, kind="alone", deadline=400) as world:
        found = world.run(_apart, str(Path(folder, "store")), count, where)
    for name in STRATEGIES:
        errors = [by_strategy[name][0] for by_strategy in found]
        skew = max(by_strategy[name][1] for by_strategy in found)
        answer.rows.append({"strategy": name, "ranks": count, "largest difference": max(errors), "skew ms": skew * 1e3})
        answer.goal(f"{name} on {count} ranks: relative difference from one process", max(errors), 1e-12)
    return answer


def _apart(path: str, count: int, where: Where) -> dict[str, tuple[float, float]]:
    """Of each strategy: the largest relative difference of a parameter, and the longest that this rank waited."""
    store = dist.FileStore(path, count)  # type: ignore[attr-defined]
    rank = store.add("ranks", 1) - 1
    shared_device.register()
    if where.cuda:
        torch.cuda.set_device(0)
    dist.init_process_group(shared_device.NAME, store=store, rank=rank, world_size=count)
    try:
        mesh = sf.make_mesh(replica=2, shard=count // 2, device=where.device)
        whole, batch = optree.tree_map(Tensor.double, problem(where, where.device))
        wanted = optree.tree_leaves(_alone(whole, batch))
        return {name: _by_strategy(mesh, strategy, whole, batch, wanted) for name, strategy in STRATEGIES.items()}
    finally:
        dist.destroy_process_group()


def _alone(whole: Any, batch: Tensor) -> Any:
    """The parameters that one process finds."""
    optimizer, params = rule(), optree.tree_map(torch.clone, whole)
    state = optimizer.init(params)

    def loss(params: Any) -> Tensor:
        x = batch
        for p in params:
            x = block(p, x)
        return x.square().mean()

    for _ in range(STEPS):
        params, state = optimizer.step(params, torch.func.grad(loss)(params), state)
    return params


def _by_strategy(mesh: Any, strategy: Any, whole: Any, batch: Tensor, wanted: list[Tensor]) -> tuple[float, float]:
    dice = random.Random(mesh.get_rank())
    mine = batch.chunk(mesh.size())[mesh.get_rank()]
    step = training(mesh, strategy, [sf.stage(block)] * len(whole), whole, mine)
    shared_device.waits.clear()
    for _ in range(STEPS):
        time.sleep(dice.random() * SKEW)
        _, params = step()
    found = optree.tree_leaves(sf.unshard(params, mesh))
    far = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True))
    return far, max(shared_device.waits)
