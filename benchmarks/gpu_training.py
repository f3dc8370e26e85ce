"""Training steps of Llama-like models on one GPU: time, memory and hardware utilization, compared with FSDP2.

Shards, gradients and AdamW's state are in float32 (108 GB for 7 billion parameters on one rank). Parameters are
gathered in bfloat16, and gradients are summed in float32. Blocks are recomputed in backward; where they are compiled,
as the head is then, the compiler is told to recompute, and chooses what. FSDP2 reduces gradients in a group of their
own, where this torch has that. "sf.compile" is the gradient and the optimizer as one program. Larger worlds are fake
groups: a rank has its part of the shards, and copies of what it sends stand for what others would send, so losses mean
nothing. Each row has its own process.

Causal attention counts as half a square. "MFU" is the model's FLOP, divided by the step's time and the chip's
989 TFLOP/s; "executed" also counts the second forward of the blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import shardfn as sf
import shardfn.optim as so
from benchmarks import stage_overhead
from benchmarks.gpu_setting import Answer, Missing, Where, pretended
from benchmarks.model import SEED, Config, Params, Whole, block, embed, head, makers, rope_table, tokens
from shardfn import P
from shardfn.compat import process_groups

PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16
RATE = 1e-5
MODELS = {
    "1B": Config(vocabulary=32000, width=2048, layers=22, heads=16, hidden=5632, context=4096, batch=8, device="cuda"),
    "7B": Config(vocabulary=32000, width=4096, layers=32, heads=32, hidden=11008, context=4096, batch=8, device="cuda"),
    "tiny": Config(vocabulary=64, width=32, layers=3, heads=2, hidden=48, context=8, device="cuda"),
}
STEPS = 5
MOST = 16  # kernels of the table of differences
SEPARATE = "set_separate_reduce_scatter_group"  # of FSDP2, since torch 2.13
NEEDED = 140e9  # bytes, of 7B
PUBLISHED = 10_471  # tokens/s of 7B on one H200, at an MFU of 0.578


@dataclass(frozen=True)
class Case:
    """One row: a system, a model and a world; and whether the model's blocks and its head are compiled."""

    system: str
    model: str
    config: Config
    world: int
    compiled: bool = False


# --- one training step of each system ---


def compiler(config: Config) -> str:
    return "inductor" if config.device == "cuda" else "aot_eager"  # which needs no C++ compiler


def recomputed(p: Params, x: Tensor, heads: int, rope: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, p, x, heads, rope, use_reentrant=False)
    return out


def differentiable(config: Config, compiled: bool) -> tuple[DeviceMesh, Params, Callable[..., Tensor]]:
    """A mesh, sharded parameters, and the loss of both and rows of tokens."""
    mesh = sf.make_mesh(data=-1, device=config.device)
    params = sf.init_sharded(makers(config), SEED, mesh, sf.full_shard("data"))
    lower = functools.partial(sf.stage, gather_dtype=torch.bfloat16)
    if compiled:
        middle, last = (lower(torch.compile(f, backend=compiler(config))) for f in (recomputed, head))
    else:
        middle, last = lower(block, remat=True), lower(head)
    first, rope = lower(embed), rope_table(config, torch.bfloat16)

    def loss_fn(params: Params, rows: Tensor) -> Tensor:
        x = first(params["embed"], rows[:, :-1])
        for p in sf.layers(params["blocks"]):
            x = middle(p, x, config.heads, rope)
        return last(params["head"], x, rows[:, 1:]) / sf.axis_size("data")

    return mesh, params, loss_fn


def shardfn_step(config: Config, compiled: bool = False) -> Callable[[], Tensor]:
    mesh, params, loss_fn = differentiable(config, compiled)
    rows = tokens(config, 0)
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


def program_step(config: Config, compiled: bool = True) -> Callable[[], Tensor]:
    """The gradient and the optimizer's step as one program."""
    mesh, params, loss_fn = differentiable(config, False)
    optimizer, rows = so.adamw(RATE), tokens(config, 0)
    state = optimizer.init(params)

    @sf.compile
    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P("data")), out_specs=...)
    def trained(params: Params, state: Any, rows: Tensor) -> Any:
        loss, gradients = sf.value_and_grad(loss_fn)(params, rows)
        return *optimizer.step(params, gradients, state), loss

    def step() -> Tensor:
        nonlocal params, state
        params, state, loss = trained(params, state, rows)
        return loss * dist.get_world_size()

    return step


def fsdp2_step(config: Config, compiled: bool = False) -> Callable[[], Tensor]:
    lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(config.device, (dist.get_world_size(),))

    def wrap(stage: nn.Module, name: str) -> nn.Module:
        if name == "blocks":
            stage = checkpoint_wrapper(stage)
        if compiled and name != "embed":
            stage.compile(backend=compiler(config))
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


@contextmanager
def copies(world: int) -> Iterator[None]:
    """In place of a fake group's collectives: copies of what this rank sends stand for what others would send.

    Numbers are then as large as in training; how fast a chip multiplies them depends on that.
    """

    def gather(out: Tensor, own: Tensor) -> None:
        others = out.view(world, -1)[1:]
        others.copy_(own.view(1, -1).expand_as(others))

    def scatter(out: Tensor, flat: Tensor) -> None:
        out.copy_(flat.view(world, -1)[0].view_as(out))

    def filling(fill: Callable[[Tensor, Tensor], None], out: str, own: str) -> Callable[..., Any]:
        def begun(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                fill(*(args[:2] if args else (kwargs[out], kwargs[own])))
            return SimpleNamespace(wait=lambda: True)

        return begun

    with ExitStack() as stack:
        for module, name, fill, *names in (
            (process_groups, "start_all_gather", gather, "whole", "own"),
            (process_groups, "start_reduce_scatter", scatter, "out", "flat"),
            (dist, "all_gather_into_tensor", gather, "output_tensor", "input_tensor"),
            (dist, "reduce_scatter_tensor", scatter, "output", "input"),
        ):
            if world > 1:
                stack.enter_context(mock.patch.object(module, name, filling(fill, *names)))
        yield


STEP_OF = {"shardfn": shardfn_step, "FSDP2": fsdp2_step, "sf.compile": program_step}
SYSTEMS = ("shardfn", "FSDP2")


def fresh(f: Callable[[Any], Any], case: Any) -> Any:
    """What a function says of a case, in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(f, case).result()


# --- time and memory ---


def measured(case: Case) -> dict[str, Any]:
    """A row of the table."""
    config, cuda = case.config, case.config.device == "cuda"
    with pretended(case.world, config.device), copies(case.world):
        step = STEP_OF[case.system](config, case.compiled)
        first = float(step())
        for _ in range(2):  # sf.compile traces in the second call and in the third
            step()
        seconds = []
        if cuda:  # compilers try kernels in the first steps, with memory of their own
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
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
            "system": f"{case.system}, compiled" if case.compiled and case.system in SYSTEMS else case.system,
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


def compared(
    model: str, world: int, where: Where, answer: Answer, compiled: bool = False, systems: tuple[str, str] = SYSTEMS
) -> dict[str, Any]:
    """Enters both systems, and the goals of their ratios; returns our row."""
    config = replace(MODELS["tiny" if where.tiny else model], device=where.device)
    by_system: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for system in systems * (2 if world == 1 else 1):  # where there is no doubt about values, in turn, twice
        by_system[system].append(fresh(measured, Case(system, model, config, world, compiled)))
    ours, theirs = rows = [min(found, key=lambda row: row["step ms"]) for found in by_system.values()]
    answer.rows += rows
    how = ", sf.compile" if systems[0] == "sf.compile" else ", compiled" if compiled else ""
    label = f"{model}{how}, world {world}"
    answer.goal(f"{label}: step / FSDP2", ours["step ms"] / theirs["step ms"], 0.95)
    for column, name in (("peak GiB", "peak memory"), ("reserved GiB", "reserved memory")):
        if where.cuda:
            answer.goal(f"{label}: {name} / FSDP2", ours[column] / theirs[column], 1.0)
        else:
            answer.unanswered(f"{label}: {name} / FSDP2", "the CPU's allocator does not tell", 1.0)
    if world == 1:
        apart = abs(float(ours["first loss"]) / float(theirs["first loss"]) - 1)
        answer.goal(f"{label}: first loss, relative difference", apart, 1e-3)
    return ours


def worlds(where: Where) -> Answer:
    answer = Answer()
    for world in (1, 8, 64):
        compared("1B", world, where, answer)
    compared("1B", 1, where, answer, compiled=True)
    compared("1B", 1, where, answer, compiled=True, systems=("sf.compile", "FSDP2"))
    return answer


def seven(where: Where) -> Answer:
    if where.cuda and not where.tiny and torch.cuda.get_device_properties(0).total_memory < NEEDED:
        raise Missing(f"7B takes {NEEDED / 1e9:.0f} GB of device memory: an H200, say")
    answer = Answer()
    compared("7B", 1, where, answer)
    ours = compared("7B", 1, where, answer, compiled=True)
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
    with pretended(case.world, case.config.device), copies(case.world):
        step = STEP_OF[case.system](case.config, case.compiled)
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


def by_kernel(ours: list[Span], theirs: list[Span]) -> list[dict[str, Any]]:
    """Rows of the kernels whose time differs most between the two systems."""
    spent: dict[str, list[float]] = {}
    for i, kernels in enumerate((ours, theirs)):
        for name, start, end in kernels:
            row = spent.setdefault(_short(name), [0.0, 0.0, 0, 0])
            row[i] += (end - start) / 1e3
            row[2 + i] += 1
    most = sorted(spent.items(), key=lambda item: -abs(item[1][0] - item[1][1]))[:MOST]
    columns = "shardfn ms", "FSDP2 ms", "shardfn launches", "FSDP2 launches"
    return [{"kernel": name, **dict(zip(columns, row, strict=True))} for name, row in most]


def _short(name: str) -> str:
    """A kernel's name without what all have, cut."""
    bare = re.sub(r"^void |at::native::|\(anonymous namespace\)::|std::array<[^>]*>|c10::|detail::", "", name)
    return re.sub(r"\(.*\)$|unrolled_|vectorized_|_kernel", "", bare)[:72]


def gaps(where: Where) -> Answer:
    answer, model = Answer(), "tiny" if where.tiny else "1B"
    config, counts, share, found = replace(MODELS[model], device=where.device), {}, {}, {}
    for system, world in itertools.product(SYSTEMS, (1, 8)):
        kernels = found[system, world] = fresh(spans, Case(system, model, config, world))
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
    answer.rows += by_kernel(found["shardfn", 1], found["FSDP2", 1])
    for world in (1, 8):
        answer.goal(f"world {world}: kernels / FSDP2", counts["shardfn", world] / counts["FSDP2", world], 1.0)
        answer.goal(f"world {world}: share of the step in which nothing runs", share["shardfn", world], 0.02)
    return answer


# --- time of the host ---


def host(where: Where) -> Answer:
    """What the host does for a stage, where it launches kernels and need not wait for them."""
    answer = Answer()
    for compiled in (False, True):
        with pretended(stage_overhead.RANKS, where.device):
            took = stage_overhead.measure(2 if where.tiny else 11, 3, where.device, compiled)
        rows, goals = stage_overhead.told(took, False, compiled)
        how = ", compiled" if compiled else ""
        answer.rows += [{**row, "system": f"{row['system']}{how}"} for row in rows]
        answer.goals += [replace(goal, name=f"host time of a stage{how}: {goal.name}") for goal in goals]
    return answer
