"""Training steps of Llama-like models on one GPU: time, memory and hardware utilization, compared with FSDP2.

Shards, gradients and AdamW's state are in float32 (108 GB for 7 billion parameters on one rank). Parameters are
gathered in bfloat16, and gradients are summed in float32. Blocks are recomputed in backward. FSDP2 reduces gradients in
a group of their own, where this torch has that. Larger worlds are fake groups: a rank has its part of the shards, but
nothing is sent, so their losses mean nothing. Each row has its own process.

Causal attention counts as half a square. "MFU" is the model's FLOP, divided by the step's time and the chip's
989 TFLOP/s; "executed" also counts the second forward of the blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import shardfn as sf
from benchmarks.gpu_setting import Answer, Missing, Where, pretended
from benchmarks.model import SEED, Config, Params, Whole, block, embed, head, makers, rope_table, tokens
from shardfn import P

PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16
RATE = 1e-5
MODELS = {
    "1B": Config(vocabulary=32000, width=2048, layers=22, heads=16, hidden=5632, context=4096, batch=8, device="cuda"),
    "7B": Config(vocabulary=32000, width=4096, layers=32, heads=32, hidden=11008, context=4096, batch=4, device="cuda"),
    "tiny": Config(vocabulary=64, width=32, layers=3, heads=2, hidden=48, context=8, device="cuda"),
}
STEPS = 5
SEPARATE = "set_separate_reduce_scatter_group"  # of FSDP2, since torch 2.13
NEEDED = 135e9  # bytes, of 7B
PUBLISHED = 10_471  # tokens/s of 7B on one H200, at an MFU of 0.578


@dataclass(frozen=True)
class Case:
    """One row: a system, a model and a world."""

    system: str
    model: str
    config: Config
    world: int


# --- one training step of each system ---


def shardfn_step(config: Config) -> Callable[[], Tensor]:
    mesh = sf.make_mesh(data=-1, device=config.device)
    params = sf.init_sharded(makers(config), SEED, mesh, sf.full_shard("data"))
    lower = functools.partial(sf.stage, gather_dtype=torch.bfloat16)
    first, middle, last = lower(embed), lower(block, remat=True), lower(head)
    rope, rows = rope_table(config, torch.bfloat16), tokens(config, 0)

    def loss_fn(params: Params, rows: Tensor) -> Tensor:
        x = first(params["embed"], rows[:, :-1])
        for p in sf.layers(params["blocks"]):
            x = middle(p, x, config.heads, rope)
        return last(params["head"], x, rows[:, 1:]) / sf.axis_size("data")

    differentiated = sf.shard_map(
        sf.value_and_grad(loss_fn), mesh=mesh, in_specs=(..., P("data")), out_specs=(..., ...)
    )
    leaves = optree.tree_leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=RATE, fused=True)

    def step() -> Tensor:
        loss, gradients = differentiated(params, rows)
        for leaf, gradient in zip(leaves, optree.tree_leaves(gradients), strict=True):
            leaf.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        return loss * dist.get_world_size()

    return step


def fsdp2_step(config: Config) -> Callable[[], Tensor]:
    lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(config.device, (dist.get_world_size(),))

    def wrap(stage: nn.Module, name: str) -> nn.Module:
        if name == "blocks":
            stage = checkpoint_wrapper(stage)
        fully_shard(stage, mesh=mesh, mp_policy=lower)
        return stage

    model = Whole(config, wrap, rope_table(config, torch.bfloat16))
    fully_shard(model, mesh=mesh, mp_policy=lower)
    if hasattr(model, SEPARATE):
        getattr(model, SEPARATE)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    rows = tokens(config, 0)

    def step() -> Tensor:
        loss: Tensor = model(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


STEP_OF = {"shardfn": shardfn_step, "FSDP2": fsdp2_step}


def fresh(f: Callable[[Case], Any], case: Case) -> Any:
    """What a function says of a case, in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(f, case).result()


# --- time and memory ---


def measured(case: Case) -> dict[str, Any]:
    """A row of the table."""
    config, cuda = case.config, case.config.device == "cuda"
    with pretended(case.world, config.device):
        step = STEP_OF[case.system](config)
        first = float(step())
        step()
        seconds = []
        for _ in range(STEPS):
            began = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        needed, executed = flops(config)
        took = statistics.median(seconds)
        return {
            "model": case.model,
            "world": case.world,
            "system": case.system,
            "step ms": took * 1e3,
            "tokens/s": round(config.batch * config.context / took),
            "MFU": needed / took / PEAK,
            "executed": executed / took / PEAK,
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else math.nan,
            "reserved GiB": torch.cuda.max_memory_reserved() / 2**30 if cuda else math.nan,
            "first loss": f"{first:.6f}",
        }


def flops(config: Config) -> tuple[float, float]:
    """The FLOP of one step: of the model, and with the repeated forward of the blocks."""
    count = config.batch * config.context
    attention = 2 * config.layers * config.context * config.width  # forward, per token; causal: half a square
    blocks = 2 * (config.numel - config.width * config.vocabulary) + attention
    last = 2 * config.width * config.vocabulary
    return count * 3.0 * (blocks + last), count * (4.0 * blocks + 3.0 * last)


def compared(model: str, world: int, where: Where, answer: Answer) -> dict[str, Any]:
    """Enters both systems, and the goals of their ratios; returns our row."""
    config = replace(MODELS["tiny" if where.tiny else model], device=where.device)
    by_system: dict[str, list[dict[str, Any]]] = {system: [] for system in STEP_OF}
    for system in [*STEP_OF] * (2 if world == 1 else 1):  # where there is no doubt about values, in turn, twice
        by_system[system].append(fresh(measured, Case(system, model, config, world)))
    ours, theirs = rows = [min(found, key=lambda row: row["step ms"]) for found in by_system.values()]
    answer.rows += rows
    label, name = f"{model}, world {world}", f"{model}, world {world}: peak memory / FSDP2"
    answer.goal(f"{label}: step / FSDP2", ours["step ms"] / theirs["step ms"], 0.95)
    if where.cuda:
        answer.goal(name, ours["peak GiB"] / theirs["peak GiB"], 1.0)
    else:
        answer.unanswered(name, "the CPU's allocator does not tell", 1.0)
    if world == 1:
        apart = abs(float(ours["first loss"]) / float(theirs["first loss"]) - 1)
        answer.goal(f"{label}: first loss, relative difference", apart, 1e-3)
    return ours


def worlds(where: Where) -> Answer:
    answer = Answer()
    for world in (1, 8, 64):
        compared("1B", world, where, answer)
    return answer


def seven(where: Where) -> Answer:
    if where.cuda and not where.tiny and torch.cuda.get_device_properties(0).total_memory < NEEDED:
        raise Missing(f"7B takes {NEEDED / 1e9:.0f} GB of device memory: an H200, say")
    answer = Answer()
    ours = compared("7B", 1, where, answer)
    names = {"7B: MFU": ("MFU", 0.60), "7B: executed share of the peak": ("executed", 0.60)}
    names["7B: tokens/s"] = ("tokens/s", PUBLISHED)
    for name, (column, limit) in names.items():
        if where.cuda and not where.tiny:
            answer.goal(name, ours[column], limit, "at least")
        else:
            answer.unanswered(name, "it is for the whole model on a GPU", limit, "at least")
    return answer


# --- kernels, and gaps between them ---

Span = tuple[str, float, float]  # a kernel, its beginning and its end in microseconds


def spans(case: Case) -> list[Span]:
    """What runs on the device in a steady step; on the CPU, operations stand for kernels."""
    cuda = case.config.device == "cuda"
    with pretended(case.world, case.config.device):
        step = STEP_OF[case.system](case.config)
        step()
        step()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
            step()
            if cuda:
                torch.cuda.synchronize()
        kind = DeviceType.CUDA if cuda else DeviceType.CPU
        events = [e for e in profiler.events() if e.device_type == kind and not getattr(e, "is_user_annotation", False)]
        found = [(e.name, e.time_range.start, e.time_range.end) for e in events if cuda or not e.cpu_children]
        return sorted(found, key=lambda span: span[1])


def gaps_between(kernels: list[Span]) -> list[tuple[float, str, str]]:
    """How long nothing runs, between which two; the longest first."""
    found, (last, _, end) = [], kernels[0]
    for name, start, stop in kernels[1:]:
        if start > end:
            found.append((start - end, last, name))
        if stop > end:
            last, end = name, stop
    return sorted(found, reverse=True)


def gaps(where: Where) -> Answer:
    answer, model = Answer(), "tiny" if where.tiny else "1B"
    config, counts, share = replace(MODELS[model], device=where.device), {}, {}
    for system, world in itertools.product(STEP_OF, (1, 8)):
        kernels = fresh(spans, Case(system, model, config, world))
        between, whole = gaps_between(kernels), max(end for *_, end in kernels) - kernels[0][1]
        idle = sum(gap for gap, *_ in between)
        counts[system, world], share[system, world] = len(kernels), idle / whole
        answer.rows.append(
            {
                "system": system,
                "world": world,
                "kernels of a layer": len(kernels) / config.layers,
                "busy ms": (whole - idle) / 1e3,
                "gaps ms": idle / 1e3,
                "longest us": between[0][0] if between else 0.0,
                "after, before": f"{between[0][1]:.40}, {between[0][2]:.40}" if between else "",
            }
        )
    for world in (1, 8):
        answer.goal(f"world {world}: kernels / FSDP2", counts["shardfn", world] / counts["FSDP2", world], 1.0)
        answer.goal(f"world {world}: share of the step in which nothing runs", share["shardfn", world], 0.02)
    return answer
