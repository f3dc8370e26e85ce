"""A step of each optimizer on flat shards, compared with the same kernel on one tensor, and with FSDP2's optimizer.

    OMP_NUM_THREADS=1 python -m benchmarks.optimizer

First, a GPT with 34 million parameters, fully sharded. Each rank has several flat shards, which are views of one
tensor; the kernel alone is called on that tensor. Both use the same memory, because its location alone can change the
time by 5 %. 8-bit optimizers are compared with those of bitsandbytes on one tensor, if it is installed. Adafactor and
Muon have no such counterpart.

Then, 288 small parameters, 9 per block, where most of the time is spent outside the kernels: AdamW on 32 flat shards,
and torch's AdamW on the 288 DTensors that FSDP2 makes of them. All take turns in the same processes, on all ranks at
once. Times are medians over all rounds and ranks, and ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardfn as sf
from benchmarks.crew import Crew, Usage
from benchmarks.model import ORTHOGONALISES, SEED, Config, Params, Stage, makers
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import KEEPS_MEMORY
from shardfn import optim

RATE = 1e-3
LIMITS = {"adamw, 24 rates": 1.1}
BLOCKS, WIDTH = 32, 64
NAMES = ("norm1", "q", "k", "v", "out", "norm2", "gate", "up", "down")
Run = Callable[[], None]
Times = dict[str, list[float]]


def is_hidden(path: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon is used for a parameter."""
    return len(shape) == 2 and path.startswith("blocks")


def by_layer(path: str, shape: tuple[int, ...]) -> float:
    """A rate for each block's vectors, square and other matrices: 24 in 8 blocks, as layer-wise decay has them."""
    words = path.split(".")
    depth = int(words[1]) if words[0] == "blocks" else 7
    return RATE * 0.75 ** (7 - depth) / (1 + len(shape) + (len(set(shape)) == 1))


def optimizers() -> dict[str, optim.Optimizer]:
    return {
        "sgd, momentum": optim.sgd(RATE, momentum=0.9),
        "adam": optim.adam(RATE),
        "adamw": optim.adamw(RATE),
        "adamw, 24 rates": optim.adamw(by_layer),
        "lion": optim.lion(RATE, weight_decay=0.01),
        "adamw, state in bfloat16": optim.adamw(RATE, state_dtype=torch.bfloat16),
        "adamw8bit": optim.adamw8bit(RATE),
        "lion8bit": optim.lion8bit(RATE, weight_decay=0.01),
        "adafactor": optim.adafactor(RATE),
        "muon, adamw for the rest": optim.masked(optim.muon(RATE, dtype=ORTHOGONALISES), is_hidden, optim.adamw(RATE)),
    }


# The state of elementwise optimizers.
SLOTS = {"sgd, momentum": ["momentum"], "adam": ["mean", "square"], "adamw": ["mean", "square"],
         "adamw, 24 rates": ["mean", "square"], "lion": ["mean"]}  # fmt: skip


def bare(name: str, p: Tensor, g: Tensor, slots: list[Tensor]) -> Run:
    """The kernel of an optimizer, called on one tensor."""
    first = slots[0]
    count = torch.zeros(())
    adam = {"lr": RATE, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}

    def of_adam(kernel: Callable[..., None], weight_decay: float) -> Run:
        def run() -> None:
            count.add_(1)
            kernel([p], [g], *([slot] for slot in slots), [], [count], weight_decay=weight_decay, **adam)

        return run

    def sgd() -> None:
        torch._fused_sgd_(
            [p],
            [g],
            [first],
            weight_decay=0.0,
            momentum=0.9,
            lr=RATE,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def lion() -> None:
        moves = torch._foreach_lerp([first], [g], 0.1)
        torch._foreach_sign_(moves)
        torch._foreach_mul_([p], 1 - RATE * 0.01)
        torch._foreach_add_([p], moves, alpha=-RATE)
        torch._foreach_lerp_([first], [g], 0.01)

    kernels: dict[str, Run] = {
        "sgd, momentum": sgd,
        "adam": of_adam(torch._fused_adam_, 0.0),
        "adamw": of_adam(torch._fused_adamw_, 0.01),
        "adamw, 24 rates": of_adam(torch._fused_adamw_, 0.01),
        "lion": lion,
    }
    return kernels[name]


def of_bitsandbytes(name: str, p: Tensor, g: Tensor) -> Run | None:
    """A step of bitsandbytes' optimizer on one tensor; None if it has none, or is not installed."""
    names = {"adamw8bit": "AdamW8bit", "lion8bit": "Lion8bit"}
    if name not in names or importlib.util.find_spec("bitsandbytes") is None:
        return None
    logging.disable(logging.WARNING)  # warnings about kernels for other machines
    theirs = importlib.import_module("bitsandbytes.optim")
    logging.disable(logging.NOTSET)
    variable = p.requires_grad_()
    variable.grad = g
    optimizer = getattr(theirs, names[name])([variable], lr=RATE, weight_decay=0.01, min_8bit_size=0)

    def run() -> None:
        optimizer.step()

    return run


# --- what the processes do in a turn ---


def stepping(optimizer: optim.Optimizer, params: Any, grads: Any, slots: dict[str, Any]) -> Run:
    """A donated step with these gradients and these parts of the state."""
    state = optimizer.init(params) | slots

    def run() -> None:
        nonlocal params, state
        params, state = optimizer.step(params, grads, state)

    return run


def gradients(tree: Any) -> Any:
    return optree.tree_map(lambda x: torch.full_like(x, 1e-3), tree)


def built(usage: Usage, config: Config) -> dict[str, Callable[..., Any]]:
    del usage
    mesh = sf.make_mesh(data=-1, device="cpu")

    def large(rounds: int) -> tuple[int, int, Times]:
        """The numbers of shards and elements on this rank, and the seconds of each step."""
        params = sf.init_sharded(makers(config), SEED, mesh, sf.full_shard("data"))
        leaves, tree = optree.tree_flatten(params)
        flat = torch.cat(leaves)

        def shards(x: Tensor) -> Any:
            return optree.tree_unflatten(tree, x.split([leaf.numel() for leaf in leaves]))

        runs: dict[str, Run] = {}
        kernels: dict[str, Run] = {}
        for name, optimizer in optimizers().items():
            p, g = flat.clone(), torch.full_like(flat, 1e-3)
            slots = {slot: torch.zeros_like(flat) for slot in SLOTS.get(name, [])}
            runs[name] = stepping(optimizer, shards(p), shards(g), {slot: shards(x) for slot, x in slots.items()})
            one = bare(name, p, g, list(slots.values())) if slots else of_bitsandbytes(name, p.clone(), g)
            if one is not None:
                kernels[f"{name}, one tensor"] = one
        # All kernels run after all optimizers, so that no kernel finds its memory in a cache.
        return len(leaves), flat.numel(), timed(runs | kernels, rounds)

    def small(rounds: int) -> Times:
        whole = sf.init({"blocks": [layer] * BLOCKS}, SEED)
        params = sf.shard(whole, mesh, sf.full_shard("data"))
        runs = {"shardfn": stepping(optim.adamw(RATE), params, gradients(params), {})}
        for options in ({}, {"foreach": True}, {"fused": True}):
            shown = "".join(f", {name}={value}" for name, value in options.items())
            runs[f"FSDP2{shown}"] = dtensors(whole["blocks"], options)
        return timed(runs, rounds)

    return {"large": large, "small": small}


def layer(g: torch.Generator) -> Params:
    return {n: torch.ones(WIDTH) if "norm" in n else torch.randn(WIDTH, WIDTH, generator=g) / 8 for n in NAMES}


def dtensors(blocks: list[Params], options: dict[str, Any]) -> Run:
    """A step of torch's AdamW on the DTensors that FSDP2 makes of these parameters."""
    model = nn.Sequential(*(Stage(unused, {name: x.clone() for name, x in p.items()}) for p in blocks))
    for each in model:
        fully_shard(each)
    fully_shard(model)
    variables = list(model.parameters())
    assert len(variables) == BLOCKS * len(NAMES), "each parameter is a DTensor of its own"
    for p in variables:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = torch.optim.AdamW(variables, lr=RATE, **options)

    def run() -> None:
        optimizer.step()

    return run


def unused(p: Params, x: Tensor) -> Tensor:
    raise AssertionError("nothing is computed with these parameters")


def timed(runs: dict[str, Run], rounds: int) -> Times:
    """Seconds of each in every round."""
    seconds: Times = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            if number >= 2:  # the first two are warm-ups
                seconds[name].append(time.perf_counter() - began)
    return seconds


# --- the tables ---


def joined(by_rank: list[Times]) -> Times:
    return {name: [one for times in by_rank for one in times[name]] for name in by_rank[0]}


def ratio(times: Times, name: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def large_rows(times: Times) -> list[dict[str, Any]]:
    def ms(name: str) -> float:
        return statistics.median(times[name]) * 1e3

    rows = []
    for name in optimizers():
        other = f"{name}, one tensor"
        beside = (ms(other), ratio(times, name, other)) if other in times else ("", "")
        rows.append(
            {
                "optimizer": name,
                "flat shards ms": ms(name),
                "one tensor ms": beside[0],
                "shards / one tensor": beside[1],
                "/ adamw": ratio(times, name, "adamw"),
            }
        )
    return rows


def main() -> None:
    options = parser("Every optimizer on flat shards, compared with bare kernels and FSDP2's optimizer.")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=31)
    args = options.parse_args()
    with Crew(args.ranks, built, Config(), environment=KEEPS_MEMORY) as crew:
        told = crew.turn("large", args.rounds)
        few = joined(crew.turn("small", args.rounds))
    shards, elements, _ = told[0]
    many = joined([times for *_, times in told])
    rows = large_rows(many)
    goals = [
        Goal(f"{row['optimizer']}: shards / one tensor", row["shards / one tensor"], LIMITS.get(row["optimizer"], 1.05))
        for row in rows
        if row["shards / one tensor"] != ""
    ]
    for name, times in few.items():
        ms = statistics.median(times) * 1e3
        rows.append({"AdamW on 288 parameters": name, "ms": ms, "/ shardfn": ratio(few, name, "shardfn")})
        if name != "shardfn":
            goals.append(Goal(f"288 parameters: shardfn / {name}", ratio(few, "shardfn", name), 1 / 5))
    title = f"an optimizer step, {args.ranks} ranks, {elements / 1e6:.1f}M elements in {shards} flat shards on each"
    publish(title, rows, goals, args.json)


if __name__ == "__main__":
    main()
