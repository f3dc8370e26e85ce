"""Curvature on a GPU: products beside plain torch's on the CPU, and their memory and time beside a gradient's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardfn as sf
import shardfn.optim as so
from benchmarks.gpu_schedules import waited
from benchmarks.gpu_setting import Answer, Where, pretended
from benchmarks.gpu_training import MODELS, fresh
from benchmarks.model import SEED, Config, Params, block, embed, makers, tokens
from shardfn import curvature as sc

CONTEXT, BATCH, ROUNDS = 1024, 8, 3
KINDS = ("gradient", "hvp", "hvp, remat", "ggn", "jvp", "norms of rows", "clipped rows", "hvp by torch.func")
NET = {"first": (16, 48), "gain": (16,), "shift": (16,), "qkv": (16, 48), "out": (16, 16), "bias": (16,)}


def curvature(where: Where) -> Answer:
    answer = Answer()
    with pretended(1, where.device):
        right(where, answer)
        decompositions(where, answer)
    costs(where, answer)
    return answer


# --- numbers ---


def layer(p: Params, x: Tensor) -> Tensor:
    """A layer norm, attention, and a perceptron."""
    h = F.layer_norm(x, x.shape[-1:], p["gain"], p["shift"])
    q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (h @ p["qkv"]).chunk(3, -1))
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]
    return x + F.gelu(x @ p["first"])[..., :16] * F.softplus(p["bias"])


def right(where: Where, answer: Answer) -> None:
    """float64, one rank; plain torch on the CPU has whole parameters, and one row at a time."""
    generator = torch.Generator().manual_seed(SEED)
    whole, other = (
        [{k: torch.randn(s, generator=generator, dtype=torch.float64) / 4 for k, s in NET.items()} for _ in range(3)]
        for _ in range(2)
    )
    x = torch.randn(5, 7, 16, generator=generator, dtype=torch.float64)
    mesh = sf.make_mesh(data=1, device=where.device)
    params, v = (sf.shard(tree, mesh, sf.full_shard("data")) for tree in (whole, other))

    def losses(stage: Callable[[Any], Any], inner: Callable[[Any], Any] = iter) -> Callable[[Any, Tensor], Tensor]:
        staged = stage(layer)

        def run(params: Any, x: Tensor) -> Tensor:
            for p in inner(params):
                x = staged(p, x)
            return x.sin().square().mean((1, 2))

        return run

    ours, plain, rows = losses(sf.stage, sf.layers), losses(lambda f: f), x.to(where.device)

    def loss(params: Any) -> Tensor:
        return ours(params, rows).sum()

    with sdpa_kernel(SDPBackend.MATH):
        grad = torch.func.grad(lambda p: plain(p, x).sum())
        expected = torch.func.jvp(grad, (whole,), (other,))[1]
        each = [optree.tree_leaves(torch.func.grad(lambda p, r=row: plain(p, r[None]).sum())(whole)) for row in x]
        norms = torch.stack([torch.stack([g.square().sum() for g in row]).sum().sqrt() for row in each])
        least = float(norms.median())
        clipped = [
            sum(g * min(1.0, least / float(n)) for g, n in zip(leaf, norms, strict=True))
            for leaf in zip(*each, strict=True)
        ]
        dense = torch.func.jacfwd(grad)(whole)
    square = torch.cat(
        [
            torch.cat([one.flatten(0, a.dim() - 1).flatten(1) for one, b in zip(line, _leaves(whole), strict=True)], 1)
            for a, line in zip(_leaves(whole), _lines(dense, whole), strict=True)
        ]
    )
    operator = sc.hvp(loss, params)
    found = sc.per_example(ours, params, rows)
    values = sc.top_eig(operator, 2, tolerance=1e-10).values
    largest = torch.linalg.eigvalsh(square)
    largest = largest[largest.abs().argsort(descending=True)][:2]
    pairs = {
        "Hessian-vector product": (sf.unshard(operator @ v), expected),
        "norms of rows": (found.norms, norms),
        "clipped sum": (sf.unshard(found.clipped(least)), clipped),
        "two eigenvalues": (torch.as_tensor(values), largest),
    }
    for name, (one, reference) in pairs.items():
        apart = max(
            float((a.cpu() - b).norm() / b.norm()) for a, b in zip(_leaves(one), _leaves(reference), strict=True)
        )
        answer.rows.append({"float64": name, "relative difference": apart})
        answer.goal(f"{name}: relative difference from plain torch on the CPU", apart, 1e-10)


def _leaves(tree: Any) -> list[Tensor]:
    return optree.tree_leaves(tree)


def _lines(dense: Any, whole: Any) -> list[list[Tensor]]:
    spec = optree.tree_structure(whole)
    return [_leaves(line) for line in spec.flatten_up_to(dense)]


# --- optimizers that decompose ---


def decompositions(where: Where, answer: Answer) -> None:
    """Steps with matrices of a layer of width 1024; whether the host waits in one that decomposes nothing."""
    width = 64 if where.tiny else 1024
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    mesh = sf.make_mesh(data=1, device=where.device)
    made = {name: lambda g, s=shape: torch.randn(s, generator=g) / 30 for name, shape in shapes.items()}
    for name, optimizer in (
        ("adamw", so.adamw(1e-3)),
        ("muon", so.muon(1e-3)),
        ("shampoo", so.shampoo(1e-3, every=4)),
        ("soap", so.soap(1e-3, every=4)),
    ):
        params = sf.init_sharded([made] * 2, SEED, mesh, sf.full_shard("data"))
        state, seconds, kept = optimizer.init(params), [], [params]
        held = [state]

        def step(optimizer: Any = optimizer, kept: list[Any] = kept, held: list[Any] = held) -> None:
            kept[0], held[0] = optimizer.step(kept[0], optree.tree_map(torch.sin, kept[0]), held[0])

        for _ in range(10):
            began = time.perf_counter()
            step()
            if where.cuda:
                torch.cuda.synchronize()
            seconds.append((time.perf_counter() - began) * 1e3)
        finite = all(bool(x.isfinite().all()) for x in optree.tree_leaves(kept[0]))
        row = {"optimizer": name, "median ms": statistics.median(seconds[2:]), "most ms": max(seconds[2:])}
        answer.rows.append(row | {"finite": finite})
        answer.goal(f"{name}: parameters are finite", finite, 1, "at least")
        if where.cuda:
            places = [told for _ in range(3) for told in waited(step, None)]
            answer.rows.append({"optimizer": name, "the host waits": "; ".join(places) or "nowhere"})


# --- memory and time ---


def costs(where: Where, answer: Answer) -> None:
    config = replace(MODELS["1B"], context=CONTEXT, batch=BATCH)
    if where.tiny:
        config = replace(MODELS["tiny"], device=where.device)
    rows = []
    for kind in KINDS:
        try:
            rows.append(fresh(measured, (kind, config)))
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            rows.append({"derivative": kind, "ms": math.nan, "GiB": math.nan, "because": "out of memory"})
    base = rows[0]
    for row in rows:
        row |= {"time / gradient": row["ms"] / base["ms"], "memory / gradient": row["GiB"] / base["GiB"]}
    answer.rows += rows
    limits = {"hvp": (2.5, 2), "ggn": (2.5, 2), "norms of rows": (1.3, 1.2)}
    for row in rows:
        for what, limit in zip(("time", "memory"), limits.get(row["derivative"], ()), strict=False):
            name = f"{what} of {row['derivative']} / the gradient's"
            if where.cuda:
                answer.goal(name, row[f"{what} / gradient"], limit)
            else:
                answer.unanswered(name, "it is for a GPU", limit)


def measured(case: tuple[str, Config]) -> dict[str, Any]:
    kind, config = case
    torch.set_float32_matmul_precision("high")
    with pretended(1, config.device):
        mesh = sf.make_mesh(data=1, device=config.device)
        params, v = (sf.init_sharded(makers(config), seed, mesh, sf.full_shard("data")) for seed in (0, 1))
        run = derivative(kind, config, params, v)
        peaks, seconds = [], []
        for _ in range(ROUNDS + 1):
            held = torch.cuda.memory_allocated() if config.device == "cuda" else 0
            if config.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            found = run()
            if config.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            peaks.append(torch.cuda.max_memory_allocated() - held if config.device == "cuda" else 0)
            del found
    return {"derivative": kind, "ms": statistics.median(seconds[1:]) * 1e3, "GiB": max(peaks[1:]) / 2**30 or math.nan}


def logits(p: Params, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], p["norm"], 1e-5) @ p["out"].T


def derivative(kind: str, config: Config, params: Params, v: Params) -> Callable[[], Any]:
    first, middle = sf.stage(embed), sf.stage(block, remat="remat" in kind)
    last = sf.stage(logits)
    batch = tokens(config, 0)

    def outputs(params: Params, rows: Tensor = batch) -> Tensor:
        x = first(params["embed"], rows[:, :-1])
        for p in sf.layers(params["blocks"]):
            x = middle(p, x, config.heads)
        return last(params["head"], x)

    def losses(params: Params, rows: Tensor) -> Tensor:
        each = F.cross_entropy(outputs(params, rows).flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        return each.view(len(rows), -1).mean(1)

    def curve(y: Tensor) -> Tensor:
        return F.cross_entropy(y.flatten(0, 1), batch[:, 1:].flatten())

    def loss(params: Params) -> Tensor:
        return curve(outputs(params))

    if kind == "gradient":
        return lambda: sf.grad(loss)(params)
    if kind == "jvp":
        return lambda: sf.jvp(loss, (params,), (v,))
    if kind == "hvp by torch.func":

        def composed() -> Any:
            with sdpa_kernel(SDPBackend.MATH):
                return torch.func.jvp(sf.grad(loss), (params,), (v,))

        return composed
    if "rows" in kind:

        def of_rows() -> Any:
            found = sc.per_example(losses, params, batch)
            return found.norms if "norms" in kind else found.clipped(1e-3)

        return of_rows
    return lambda: (sc.ggn(outputs, curve, params) if kind == "ggn" else sc.hvp(loss, params)) @ v
