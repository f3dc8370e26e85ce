"""Training steps of Llama-like models on one GPU: time, memory and hardware utilization, compared with FSDP2.

    python -m benchmarks.gpu            # about 10 minutes
    python -m benchmarks.gpu --stress   # compares results of random schedules, while other streams are busy

Shards, gradients and AdamW's state are in float32 (108 GB for 7 billion parameters on one rank). Parameters are
gathered in bfloat16, and gradients are summed in float32. Blocks are recomputed in backward. Larger worlds are fake
groups: a rank has its part of the shards, but nothing is sent, so their losses mean nothing. Each row has its own
process.

Causal attention counts as half a square. "MFU" is the model's FLOP, divided by the step's time and the chip's
989 TFLOP/s; "executed" also counts the second forward of the blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardfn as sf
from benchmarks.model import SEED, Config, Params, Whole, block, embed, head, makers, rope_table, tokens
from benchmarks.report import Goal, lacks, parser, publish
from shardfn import P
from shardfn.compat import process_groups

PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16
RATE = 1e-5
MODELS = {
    "1B": Config(vocabulary=32000, width=2048, layers=22, heads=16, hidden=5632, context=4096, batch=8, device="cuda"),
    "7B": Config(vocabulary=32000, width=4096, layers=32, heads=32, hidden=11008, context=4096, batch=4, device="cuda"),
}
TINY = Config(vocabulary=64, width=32, layers=3, heads=2, hidden=48, context=8)


@dataclass(frozen=True)
class Case:
    """One row: a system, a model and a world."""

    system: str
    model: str
    config: Config
    world: int
    steps: int
    compiled: bool


# --- one training step of each system ---


def shardfn_step(config: Config, compiled: bool) -> Callable[[], Tensor]:
    mesh = sf.make_mesh(data=-1, device=config.device)
    params = sf.init_sharded(makers(config), SEED, mesh, sf.full_shard("data"))
    lower = functools.partial(sf.stage, gather_dtype=torch.bfloat16)
    layer = torch.compile(block) if compiled else block
    first, middle, last = lower(embed), lower(layer, remat=True), lower(head)
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


def fsdp2_step(config: Config, compiled: bool) -> Callable[[], Tensor]:
    lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(config.device, (dist.get_world_size(),))

    def wrap(stage: nn.Module, name: str) -> nn.Module:
        if name == "blocks":
            stage = checkpoint_wrapper(stage)
            if compiled:
                stage.compile()
        fully_shard(stage, mesh=mesh, mp_policy=lower)
        return stage

    model = Whole(config, wrap, rope_table(config, torch.bfloat16))
    fully_shard(model, mesh=mesh, mp_policy=lower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    rows = tokens(config, 0)

    def step() -> Tensor:
        loss: Tensor = model(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# --- measuring ---


def measured(case: Case) -> dict[str, Any]:
    """A row of the table; runs in its own process."""
    warnings.filterwarnings("ignore")
    config, cuda = case.config, case.config.device == "cuda"
    with pretended(case.world, config.device):
        step = (shardfn_step if case.system == "shardfn" else fsdp2_step)(config, case.compiled)
        first = float(step())
        step()
        seconds = []
        for _ in range(case.steps):
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


@contextmanager
def pretended(world: int, device: str) -> Iterator[None]:
    """A process group: of this process alone, or a fake one of several ranks."""
    if device == "cuda":
        torch.cuda.set_device(0)
    with tempfile.NamedTemporaryFile() as file:
        if world == 1:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{file.name}", rank=0, world_size=1)
        else:
            dist.init_process_group("fake", store=process_groups.fake_store(), rank=0, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


def flops(config: Config) -> tuple[float, float]:
    """The FLOP of one step: of the model, and with the repeated forward of the blocks."""
    count = config.batch * config.context
    attention = 2 * config.layers * config.context * config.width  # forward, per token; causal: half a square
    blocks = 2 * (config.numel - config.width * config.vocabulary) + attention
    last = 2 * config.width * config.vocabulary
    return count * 3.0 * (blocks + last), count * (4.0 * blocks + 3.0 * last)


def all_rows(models: dict[str, Config], worlds: list[int], steps: int, compiled: bool) -> list[dict[str, Any]]:
    rows = []
    context = multiprocessing.get_context("spawn")
    for (name, config), world in itertools.product(models.items(), worlds):
        by_system: dict[str, list[dict[str, Any]]] = {"shardfn": [], "FSDP2": []}
        # If a goal depends on it, each system runs twice, in turn.
        for system in [*by_system] * (2 if world == 1 else 1):
            with ProcessPoolExecutor(1, mp_context=context) as fresh:
                case = Case(system, name, config, world, steps, compiled)
                by_system[system].append(fresh.submit(measured, case).result())
        rows += [min(found, key=lambda row: row["step ms"]) for found in by_system.values()]
    return rows


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        where = f"{ours['model']}, world {ours['world']}"
        goals.append(Goal(f"{where}: step / FSDP2", ours["step ms"] / theirs["step ms"], 0.95))
        if not math.isnan(ours["peak GiB"]):
            goals.append(Goal(f"{where}: peak memory / FSDP2", ours["peak GiB"] / theirs["peak GiB"], 1.0))
        if ours["world"] == 1:
            apart = abs(float(ours["first loss"]) / float(theirs["first loss"]) - 1)
            goals.append(Goal(f"{where}: first loss, relative difference", apart, 1e-3))
        if ours["world"] == 1 and ours["model"] == "7B":
            goals.append(Goal(f"{where}: executed share of the peak", ours["executed"], 0.60, "at least"))
            goals.append(Goal(f"{where}: MFU", ours["MFU"], 0.60, "at least"))
    return goals


# --- random schedules ---


def stress(device: str, schedules: int, width: int) -> list[dict[str, Any]]:
    """Random stages in random order on busy streams, compared with the plain function or the simplest schedule."""
    warnings.filterwarnings("ignore")
    with pretended(8, device):
        mesh = sf.make_mesh(one=1, eight=8, device=device)
        made = {"blocks": [functools.partial(_layer, width=width, device=device)] * 6}
        whole = sf.init(made, SEED)
        cut = {axis: sf.init_sharded(made, SEED, mesh, sf.full_shard(axis)) for axis in ("one", "eight")}
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(1)).to(device)
        return [_by_schedule(random.Random(seed), seed, mesh, whole, cut, x) for seed in range(schedules)]


def _layer(generator: torch.Generator, width: int, device: str) -> Params:
    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) / width**0.5).to(device)

    return {"up": normal(width, 3 * width), "bias": normal(3 * width), "down": normal(3 * width, width)}


def _block(p: Params, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def _lowered(p: Params, x: Tensor) -> Tensor:
    return _block({name: value.to(x.dtype) for name, value in p.items()}, x)


def _by_schedule(dice: random.Random, seed: int, mesh: Any, whole: Any, cut: Any, x: Tensor) -> dict[str, Any]:
    axis = dice.choice(["one", "eight"])
    order = [dice.randrange(6) for _ in range(dice.randint(3, 12))]
    lower = functools.partial(sf.stage, _block, gather_dtype=torch.float32)
    kinds = [
        {
            "prefetch": dice.choice([0, 1, 2, 3]),
            "reshard": dice.choice([True, False, None]),
            "remat": dice.choice([False, True, "offload"]),
        }
        for _ in range(dice.choice([1, 2]))
    ]
    stages = [lower(**kind) for kind in kinds]
    chosen = [dice.choice(stages) for _ in order]
    # A fake group sends nothing, so gathered numbers are not the model's parameters, but they are always the same.
    plain = [_lowered if axis == "one" else lower(prefetch=0)] * len(order)
    expected = _gradients(whole if axis == "one" else cut[axis], plain, order, mesh, x, None)
    found = _gradients(cut[axis], chosen, order, mesh, x, dice)
    if axis == "one":
        found = found[0], sf.unshard(found[1], mesh)
    wanted, got = optree.tree_leaves(expected), optree.tree_leaves(found)
    worst = max(_apart(a, b) for a, b in zip(got, wanted, strict=True))
    return {"schedule": str(seed), "axis": axis, "calls": len(order), "kinds": str(kinds), "difference": worst}


def _gradients(params: Any, stages: list[Any], order: list[int], mesh: Any, x: Tensor, dice: Any) -> Any:
    def loss(params: Any) -> Tensor:
        y = x
        for function, p in zip(stages, sf.layers([params["blocks"][i] for i in order]), strict=True):
            y = function(p, y)
        return y.square().mean()

    run = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=...)
    if dice is None or x.device.type != "cuda":
        return run(params)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for stream in streams[:2]:
        with torch.cuda.stream(stream):
            for _ in range(dice.randint(0, 8)):
                busy = torch.randn(2048, 2048, device=x.device)
                busy @ busy
            torch.cuda._sleep(dice.randint(0, 10**7))
    with torch.cuda.stream(streams[2]) if dice.random() < 0.5 else nullcontext():
        found = run(params)
        if dice.random() < 0.5:  # another step after it, on the same buffers
            run(params)
    torch.cuda.synchronize()
    return found


def _apart(found: Tensor, wanted: Tensor) -> float:
    scale = wanted.abs().max().item() or 1.0
    worst = ((found - wanted).abs().max() / scale).item()
    return math.inf if math.isnan(worst) else worst


def main() -> None:
    options = parser("Training steps of 1B and 7B models on one GPU, next to FSDP2.")
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 64])
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--compile", action="store_true", help="apply torch.compile to each block, in both systems")
    options.add_argument("--stress", action="store_true", help="compare the results of random schedules instead")
    options.add_argument("--schedules", type=int, default=50)
    options.add_argument("--device", default="cuda", help="cpu, with --tiny, to try the command")
    options.add_argument("--tiny", action="store_true")
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        lacks("benchmarks.gpu needs a CUDA device")
    if args.stress:
        rows = stress(args.device, args.schedules, 16 if args.tiny else 512)
        worst = max(row["difference"] for row in rows)
        goals = [Goal(f"{args.schedules} schedules: largest relative difference", worst, 1e-5)]
        publish(f"random schedules on {args.device}", rows, goals, args.json)
        return
    models = {name: TINY if args.tiny else MODELS[name] for name in args.models}
    rows = all_rows(models, args.worlds, args.steps, args.compile)
    publish("one training step on one GPU, bfloat16 on float32 shards, full remat", rows, goals_of(rows), args.json)


if __name__ == "__main__":
    main()
