"""A training step of shardfn and of its peers, side by side: time, memory and losses.

    OMP_NUM_THREADS=1 python -m benchmarks.train_step --ranks 2

A GPT with 34 million parameters in float32, 2 x 128 tokens and one thread per rank, gloo, AdamW (shardfn's own; torch's
for the peers). Every system has its own processes. All are alive at once and take turns of a few steps; times are
medians of all steps. shardfn runs twice: once it gathers every layer for forward and again for backward, as FSDP does;
once it keeps gathered parameters for backward, which is closer to DDP, whose parameters are always whole.

`single` is as many processes, which send nothing: each computes the gradient of its rows on whole parameters, and steps
AdamW on the part that a rank of `full_shard` has. `one process` is a single process, with all of AdamW.

In all processes, glibc's malloc keeps freed memory. Otherwise, depending on the layout of the heap, some runs would
return it to the kernel at every step and others never, which changes a step by 3 %.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage, busy_seconds, in_turns
from benchmarks.model import SEED, Config, Params, Whole, block, embed, head, makers, staged, tokens
from benchmarks.report import Goal, parser, publish
from shardfn import P
from shardfn.collectives import into_buffers

RATE = 1e-3
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40)}
Step = Callable[[], Tensor]


# --- each system: a function that trains one step and returns this rank's loss ---


def shardfn_step(config: Config, mesh: DeviceMesh, strategy: sf.Strategy) -> tuple[Step, Callable[[], None]]:
    """A step, and its last part alone: AdamW on this rank's shards, if gradients are sharded like parameters."""
    params = sf.init_sharded(makers(config), SEED, mesh, strategy)
    optimizer, rows = so.adamw(RATE), tokens(config, dist.get_rank())
    state = optimizer.init(params)
    data, local_loss = tuple(mesh.mesh_dim_names or ()), staged(config)

    def loss_fn(params: Params, rows: Tensor) -> Tensor:
        return local_loss(params, rows) / mesh.size()

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P(data)), out_specs=(..., ..., ...))
    def trained(params: Params, state: Any, rows: Tensor) -> Any:
        loss, grads = sf.value_and_grad(loss_fn)(params, rows)
        return loss, *optimizer.step(params, grads, state)

    def step() -> Tensor:
        nonlocal params, state
        loss, params, state = trained(params, state, rows)
        return loss * mesh.size()

    def update() -> None:
        nonlocal params, state
        params, state = optimizer.step(params, zeros(), state)

    @functools.cache
    def zeros() -> Params:
        return optree.tree_map(torch.zeros_like, params)

    return step, update


def module_step(model: nn.Module, config: Config) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    rows = tokens(config, dist.get_rank())

    def step() -> Tensor:
        loss = model(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(config: Config) -> Step:
    model = Whole(config, lambda stage, _: fully_sharded(stage))
    return module_step(fully_sharded(model), config)


def fully_sharded(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


def fsdp1(config: Config) -> Step:
    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    return module_step(wrap(Whole(config, lambda stage, _: wrap(stage))), config)


def ddp(config: Config) -> Step:
    model = Whole(config, lambda stage, _: stage)
    return module_step(DistributedDataParallel(model, gradient_as_bucket_view=True), config)


def one_process(config: Config) -> Step:
    return module_step(Whole(config, lambda stage, _: stage), config)


def single(config: Config) -> Step:
    """The computation of a rank of `full_shard`, without communication: its rows' gradient, and AdamW on its part."""
    params, rows = sf.init(makers(config), SEED), tokens(config, dist.get_rank())
    optimizer, ranks = so.adamw(RATE), dist.get_world_size()

    def share(tree: Params) -> Params:
        return optree.tree_map(lambda x: x.view(-1)[: x.numel() // ranks], tree)

    def loss_fn(params: Params, rows: Tensor) -> Tensor:
        x = embed(params["embed"], rows[:, :-1])
        for p in params["blocks"]:
            x = block(p, x, config.heads)
        return head(params["head"], x, rows[:, 1:])

    own = share(params)  # the same memory
    state = optimizer.init(own)

    def step() -> Tensor:
        nonlocal own, state
        loss, grads = sf.value_and_grad(loss_fn)(params, rows)
        own, state = optimizer.step(own, share(grads), state)
        return loss

    return step


def gradient_only(config: Config) -> Step:
    """The computation of one process, without an optimizer."""
    model = Whole(config, lambda stage, _: stage)
    rows = tokens(config, dist.get_rank())

    def step() -> Tensor:
        loss = model(rows)
        torch.autograd.grad(loss, list(model.parameters()))
        return loss.detach()

    return step


# --- what the processes do in a turn ---


def built(usage: Usage, make: Callable[[Config], Step], config: Config) -> dict[str, Callable[..., Any]]:
    step = make(config)
    return {"train": functools.partial(timed, step), "usage": lambda: told(usage)}


def built_shardfn(
    usage: Usage, strategy: Callable[[str], sf.Placement], config: Config
) -> dict[str, Callable[..., Any]]:
    step, update = shardfn_step(config, sf.make_mesh(data=-1, device="cpu"), strategy("data"))
    return {
        "train": functools.partial(timed, step),
        "usage": lambda: told(usage),
        "moved": lambda: moved(step),
        "optimizer": functools.partial(timed, update),
        "gathers": lambda steps, numel: timed(functools.partial(gather_alone, mesh_link(), numel), steps),
        "scatters": lambda steps, numel: timed(functools.partial(scatter_alone, mesh_link(), numel), steps),
    }


def timed(step: Callable[[], Any], steps: int) -> tuple[list[float], list[float]]:
    """For each step, the seconds until all ranks are done, and its result."""
    seconds, results = [], []
    dist.barrier()
    for _ in range(steps):
        began = time.perf_counter()
        result = step()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        results.append(0.0 if result is None else float(result))
    return seconds, results


def told(usage: Usage) -> tuple[float, float, float]:
    """The peak MB above the imports, the fraction of a core used while waiting, and all CPU seconds."""
    return usage.peak() / 1e6, usage.idle / usage.waited if usage.waited else 0.0, time.process_time()


# --- the parts of a step, each alone on all ranks at once ---


def moved(step: Step) -> list[tuple[str, int]]:
    """The collectives of a step, and the bytes that this rank sent in each."""
    with sf.collectives.ledger() as log:
        step()
    return [(record.op, record.bytes) for record in log.records]


@functools.cache
def mesh_link() -> into_buffers.Communicator:
    return into_buffers.communicator_of(sf.make_mesh(data=-1, device="cpu"), ("data",))


@functools.cache
def buffers(numel: int) -> tuple[Tensor, Tensor, Tensor]:
    ranks = dist.get_world_size()
    return torch.ones(numel * ranks), torch.empty(numel), torch.empty(numel * ranks)


def gather_alone(along: into_buffers.Communicator, numel: int) -> None:
    into_buffers.all_gather(buffers(numel)[0].view(torch.uint8), along, torch.float32).wait()


def scatter_alone(along: into_buffers.Communicator, numel: int) -> None:
    flat, out, scratch = buffers(numel)
    into_buffers.reduce_scatter(flat, out, along, lambda n: scratch[:n]).wait()


# --- the tables ---


def compared(crews: dict[str, Crew], rounds: int, steps: int) -> tuple[list[dict[str, Any]], float]:
    """A row for each system, and the number of cores that other programs used meanwhile."""
    began = busy_seconds() - cpu_seconds(crews), time.perf_counter()
    took, losses = in_turns(
        {name: functools.partial(crew.turn, "train", steps) for name, crew in crews.items()}, rounds
    )
    used = {name: [max(each) for each in zip(*crew.turn("usage"), strict=True)] for name, crew in crews.items()}
    others = (busy_seconds() - cpu_seconds(crews) - began[0]) / (time.perf_counter() - began[1])
    rows = [
        {
            "system": name,
            "step ms": took[name],
            "/ FSDP2": took[name] / took["FSDP2"],
            "/ DDP": took[name] / took["DDP"],
            "/ single": took[name] / took["single"],
            "peak MB": used[name][0],
            "peak / FSDP2": used[name][0] / used["FSDP2"][0],
            "first loss": f"{losses[name][0]:.7f}",
            "fourth loss": f"{losses[name][3]:.7f}",
            "last loss": f"{losses[name][-1]:.7f}",  # by then, rounding has grown: the peers differ too
            "idle CPU %": used[name][1] * 100,
        }
        for name in crews
    ]
    return rows, others


def cpu_seconds(crews: dict[str, Crew]) -> float:
    return time.process_time() + sum(cpu for crew in crews.values() for *_, cpu in crew.turn("usage"))


def floors(ours: Crew, alone: Crew, config: Config, rounds: int, steps: int) -> list[dict[str, Any]]:
    """The parts of a step of shardfn, each measured alone in the same rounds."""
    sent = ours.turn("moved")[0]
    ranks = len(ours.turn("usage"))
    piece = (config.numel - config.width * config.vocabulary) // config.layers // ranks
    each = piece * 4 * (ranks - 1)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, crew, turn, args in (
            ("step", ours, "train", ()),
            ("compute", alone, "train", ()),
            ("optimizer", ours, "optimizer", ()),
            ("gathers", ours, "gathers", (piece,)),
            ("scatters", ours, "scatters", (piece,)),
        ):
            found.setdefault(name, []).extend(map(max, *(times for times, _ in crew.turn(turn, steps, *args))))
    took = {name: statistics.median(times) * 1e3 for name, times in found.items()}
    gathered = sum(n for op, n in sent if op == "all_gather")
    scattered = sum(n for op, n in sent if op == "reduce_scatter")
    speed = {name: each / took[name] / 1e6 for name in ("gathers", "scatters")}  # GB/s
    parts = {
        f"forward and backward of {ranks} separate processes at once": took["compute"],
        "optimizer on the shards": took["optimizer"],
        f"{gathered / 1e6:.0f} MB gathered, {speed['gathers']:.2f} GB/s alone": gathered / speed["gathers"] / 1e6,
        f"{scattered / 1e6:.0f} MB scattered, {speed['scatters']:.2f} GB/s alone": scattered / speed["scatters"] / 1e6,
    }
    parts["the rest; below 0 where parts overlap"] = took["step"] - sum(parts.values())
    parts["step"] = took["step"]
    return [{"part": name, "ms": ms, "share": ms / took["step"]} for name, ms in parts.items()]


def goals_of(rows: list[dict[str, Any]], others: float, ranks: int) -> list[Goal]:
    by_name = {row["system"]: row for row in rows}
    ours, kept = by_name["shardfn"], by_name["shardfn, kept for backward"]
    goals = [Goal("step / FSDP2", ours["/ FSDP2"], 0.65 if ranks == 2 else 0.70)]
    if ranks == 2:
        goals.append(Goal("step / single", ours["/ single"], 1.15))
        goals.append(Goal("step, parameters kept for backward / single", kept["/ single"], 1.08))
        goals.append(Goal("step / DDP", ours["/ DDP"], 1.0))
        goals.append(Goal("step, parameters kept for backward / DDP", kept["/ DDP"], 1.0))
    goals.append(Goal("peak memory / FSDP2", ours["peak / FSDP2"], 0.50))
    goals.append(Goal("peak memory, parameters kept for backward / FSDP2", kept["peak / FSDP2"], 0.60))
    for which in ("first loss", "fourth loss"):
        found = [float(by_name[system][which]) for system in by_name if system not in ("single", "one process")]
        goals.append(Goal(f"{which}, relative difference between all", max(found) / min(found) - 1, 1e-5))
    return [*goals, Goal("cores that other programs took meanwhile", others, 0.05)]


def main() -> None:
    options = parser("A training step of shardfn, FSDP2, FSDP1, DDP and without communication, side by side.")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--steps", type=int, default=3, help="steps per turn")
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    args = options.parse_args()
    config = Config(vocabulary=64, width=32, layers=2, heads=2, hidden=48, context=8) if args.tiny else Config()
    with ExitStack() as stack:

        def crew(ranks: int, *build: Any) -> Crew:
            return stack.enter_context(Crew(ranks, *build, config, environment=KEEPS_MEMORY))

        crews = {
            "shardfn": crew(args.ranks, built_shardfn, sf.full_shard),
            "shardfn, kept for backward": crew(args.ranks, built_shardfn, sf.strategies.shard_grad_op),
        }
        for name, make in {"FSDP2": fsdp2, "FSDP1": fsdp1, "DDP": ddp}.items():
            crews[name] = crew(args.ranks, built, make)
        crews["single"] = crew(args.ranks, built, single)
        crews["one process"] = crew(1, built, one_process)
        rows, others = compared(crews, args.rounds, args.steps)
        alone = crew(args.ranks, built, gradient_only)
        alone.turn("train", args.steps)
        parts = floors(crews["shardfn"], alone, config, args.rounds, args.steps)
    title = f"one training step, {args.ranks} ranks; and what shardfn's consists of, each part alone"
    publish(title, [*rows, *parts], goals_of(rows, others, args.ranks), args.json)


if __name__ == "__main__":
    main()
