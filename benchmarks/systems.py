"""One model, trained by shardfn and by its peers: what `benchmarks.train_step` runs on the ranks of a world.

The model is a 34M-parameter GPT in pure functions. Peers wrap these functions in modules, one unit for each stage, as
their documentation asks for.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardfn as sf

VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN, BATCH, CONTEXT = 8192, 512, 8, 8, 1408, 2, 128
RATE = 1e-3

Params = dict[str, Any]
Step = Callable[[], Tensor]


# --- the model ---


def embed(p: Params, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, p["tokens"])


def block(p: Params, x: Tensor) -> Tensor:
    b, t, d = x.shape
    h = F.linear(F.rms_norm(x, (d,), p["norm1"], 1e-5), p["qkv"])
    q, k, v = h.view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
    x = x + F.linear(a, p["out"])
    h = F.rms_norm(x, (d,), p["norm2"], 1e-5)
    return x + F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"])


def head(p: Params, x: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (WIDTH,), p["norm"], 1e-5), p["out"])


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator) * 0.02


def make_embed(g: torch.Generator) -> Params:
    return {"tokens": _normal(g, VOCABULARY, WIDTH)}


def make_block(g: torch.Generator) -> Params:
    d, f = WIDTH, HIDDEN
    return {
        "norm1": torch.ones(d),
        "qkv": _normal(g, 3 * d, d),
        "out": _normal(g, d, d),
        "norm2": torch.ones(d),
        "gate": _normal(g, f, d),
        "up": _normal(g, f, d),
        "down": _normal(g, d, f),
    }


def make_head(g: torch.Generator) -> Params:
    return {"norm": torch.ones(WIDTH), "out": _normal(g, VOCABULARY, WIDTH)}


MAKERS = {"embed": make_embed, "blocks": [make_block] * LAYERS, "head": make_head}


def rows(rank: int) -> Tensor:
    """One rank's tokens `[batch, context + 1]`, the same at every step."""
    return torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1 + rank))


def mean_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def plain(params: Params, tokens: Tensor) -> Tensor:
    x = embed(params["embed"], tokens[:, :-1])
    for p in params["blocks"]:
        x = block(p, x)
    return mean_loss(head(params["head"], x), tokens)


def optimizer(leaves: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(leaves, lr=RATE, fused=True)


# --- how each system takes a step: the loss of this rank's rows ---


def shardfn(rank: int, ranks: int) -> Step:
    mesh = sf.make_mesh(shard=ranks, device="cpu")
    stages = [sf.stage(f) for f in (embed, block, head)]
    params = sf.init_sharded(MAKERS, 0, mesh, sf.full_shard("shard"))
    leaves = optree.tree_leaves(params)
    adamw, tokens = optimizer(leaves), rows(rank)

    def loss(params: Params) -> Tensor:
        first, middle, last = stages
        x = first(params["embed"], tokens[:, :-1])
        for p in sf.layers(params["blocks"]):
            x = middle(p, x)
        return mean_loss(last(params["head"], x), tokens) / ranks  # equal rows on every rank: a term of the mean

    evaluate = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=...)

    def step() -> Tensor:
        value, gradients = evaluate(params)
        for leaf, gradient in zip(leaves, optree.tree_leaves(gradients), strict=True):
            leaf.grad = gradient
        del gradients, gradient
        adamw.step()
        adamw.zero_grad()
        return value * ranks

    return step


class Unit(nn.Module):
    """A stage as a module."""

    def __init__(self, function: Callable[..., Tensor], params: Params) -> None:
        super().__init__()
        self.function = function
        self.names = list(params)
        for name, value in params.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.function({name: getattr(self, name) for name in self.names}, x)


def module() -> nn.Sequential:
    whole = sf.init(MAKERS, 0)
    units = [Unit(embed, whole["embed"]), *(Unit(block, p) for p in whole["blocks"]), Unit(head, whole["head"])]
    return nn.Sequential(*units)


def of_module(model: nn.Module, rank: int) -> Step:
    adamw, tokens = optimizer(list(model.parameters())), rows(rank)

    def step() -> Tensor:
        loss = mean_loss(model(tokens[:, :-1]), tokens)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


def fsdp2(rank: int, ranks: int) -> Step:
    model = module()
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    return of_module(model, rank)


def fsdp1(rank: int, ranks: int) -> Step:
    return of_module(
        FullyShardedDataParallel(
            module(), auto_wrap_policy=ModuleWrapPolicy({Unit}), use_orig_params=True, device_id=torch.device("cpu")
        ),
        rank,
    )


def ddp(rank: int, ranks: int) -> Step:
    return of_module(nn.parallel.DistributedDataParallel(module()), rank)


def compute(rank: int, ranks: int) -> Step:
    """What no schedule can avoid: one rank's rows through whole parameters, and an optimizer for this rank's share."""
    params = sf.init(MAKERS, 0)
    leaves = [leaf.requires_grad_() for leaf in optree.tree_leaves(params)]
    mine = torch.cat([leaf.detach().flatten() for leaf in leaves]).chunk(ranks)[rank].clone()
    adamw, tokens = optimizer([mine]), rows(rank)
    mine.grad = torch.zeros_like(mine)

    def step() -> Tensor:
        loss = plain(params, tokens)
        gradients = torch.autograd.grad(loss, leaves)
        del gradients
        adamw.step()
        return loss.detach()

    return step


def single(rank: int, ranks: int) -> Step:
    """One process and the rows of one rank."""
    return of_module(module(), 0)


def reference(rank: int, ranks: int) -> Step:
    """One process and the rows of all ranks, for the losses."""
    params = sf.init(MAKERS, 0)
    leaves = [leaf.requires_grad_() for leaf in optree.tree_leaves(params)]
    adamw, tokens = optimizer(leaves), torch.cat([rows(r) for r in range(ranks)])

    def step() -> Tensor:
        loss = plain(params, tokens)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


SYSTEMS: dict[str, Callable[[int, int], Step]] = {
    "shardfn": shardfn,
    "FSDP2": fsdp2,
    "FSDP1": fsdp1,
    "DDP": ddp,
    "one process": single,
    "compute alone": compute,
    "all rows, one process": reference,
}


# --- on the ranks ---


@dataclass
class State:
    """What a rank keeps between its turns."""

    step: Step
    base: int  # bytes in memory before there was a parameter


kept: list[State] = []


def start(system: str, ranks: int) -> None:
    """Makes the model; from here on memory counts."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of peers
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base = memory("VmRSS")
    step = SYSTEMS[system](dist.get_rank(), ranks)
    kept[:] = [State(step, base)]


def turn(steps: int) -> tuple[list[float], list[float]]:
    """Seconds and losses of some steps, with a barrier after each."""
    seconds, losses = [], []
    dist.barrier()
    for _ in range(steps):
        began = time.perf_counter()
        loss = kept[0].step()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    return seconds, losses


def peak() -> int:
    """Bytes that the model and its steps took at most."""
    return memory("VmHWM") - kept[0].base


def memory(name: str) -> int:
    """A figure of this process in /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def breakdown(repeats: int) -> dict[str, float]:
    """Seconds of shardfn's parts, alone on this rank: the optimizer, and moving the bytes of a step."""
    step = kept[0].step
    with sf.ledger() as log:
        step()
    leaves = list(_closure(step, "leaves"))
    adamw = _closure(step, "adamw")
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    took: dict[str, list[float]] = {"optimizer": [], "wire": []}
    moves = _moves(log)
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        adamw.step()
        took["optimizer"].append(time.perf_counter() - began)
        dist.barrier()
        began = time.perf_counter()
        for move in moves:
            move()
        dist.barrier()
        took["wire"].append(time.perf_counter() - began)
    adamw.zero_grad()
    median = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in took.items()}
    return median | {"MB sent": log.bytes() / 1e6, "calls": float(len(log.records))}


def _closure(function: Any, name: str) -> Any:
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__), strict=True))[name]


def _moves(log: sf.Ledger) -> list[Callable[[], None]]:
    """The collectives of a step again, one after another, each waited for."""
    ranks = dist.get_world_size()
    others = [rank for rank in range(ranks) if rank != dist.get_rank()]

    def swap(numel: int) -> Callable[[], None]:
        out, into = torch.zeros(numel // len(others)), [torch.empty(numel // len(others)) for _ in others]

        def run() -> None:
            works = [dist.irecv(x, rank, tag=7) for x, rank in zip(into, others, strict=True)]
            works += [dist.isend(out, rank, tag=7) for rank in others]
            for work in works:
                assert work is not None
                work.wait()

        return run

    return [swap(record.bytes // 4) for record in log.records]
