"""A training step on every mesh of 4 ranks; on one mesh, compared with FSDP2 and torch's tensor parallelism.

    OMP_NUM_THREADS=1 python -m benchmarks.parallel

The model of examples/train_nd.py with 34 million parameters in float32, 8 x 128 tokens per step, one thread per rank,
gloo, AdamW. First dense, on the 15 meshes of five axes. Torch runs the same model as modules, with loss parallelism,
with and without sequence parallelism. Then with 4 experts in every second layer, on the 6 meshes that have an axis for
experts.

Each row has its own processes. The first row of a model takes turns with all other rows of that model, a few at a time,
and the column "time / first" compares times of the same rounds. Our ledger does not record what torch sends. If there
are fewer cores than ranks, a rank that waits, as in a pipeline's bubble, leaves its core to another rank.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage, in_turns
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import KEEPS_MEMORY, Step, timed
from examples import train_nd
from examples.run import Params
from examples.train_nd import AXES, SIX, SPECS, Config, loss_fn
from shardfn import P

RANKS, SEED, RATE, DECAY = 4, 0, 3e-4, 0.1
TOGETHER = 5  # number of rows whose processes are alive at once
SIZES = Config(vocabulary=8192, width=512, heads=8, layers=8, hidden=1408, context=128, batch=8, micro=1)
TINY = replace(SIZES, vocabulary=64, width=32, heads=4, layers=4, hidden=44, context=16)
PEERS: dict[str, Placement] = {"FSDP2 + DTensor": Replicate(), "FSDP2 + DTensor, sequence parallel": Shard(1)}
FIRST = {"dense": {"shard": 2, "tensor": 2}, "4 experts": {"shard": 4}}


@dataclass(frozen=True)
class System:
    """The system of a row; `make` is called on every rank."""

    name: str
    make: Callable[[], Step]


def mixed(config: Config) -> Config:
    """The configuration with experts, and about as many parameters; no mesh splits a group of tokens."""
    group = config.context // 4
    # The balance loss is not linear in the batch, so with a pipeline's micro-batches, the loss would differ.
    return replace(config, hidden=config.hidden * 9 // 22, experts=4, group=group, capacity=group * 5 // 8, balance=0.0)


def batch(config: Config) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(config.vocabulary, (config.batch, config.context + 1), generator=generator)
    return rows.unflatten(0, (config.micro, -1))


# --- ours ---


def meshes() -> list[dict[str, int]]:
    """For every mesh, the axes with more than one rank."""
    every = (dict(zip(AXES, sizes, strict=True)) for sizes in itertools.product((4, 2, 1), repeat=len(AXES)))
    return [{axis: n for axis, n in sizes.items() if n > 1} for sizes in every if math.prod(sizes.values()) == RANKS]


def ours(config: Config, sizes: dict[str, int]) -> System:
    if "pipe" in sizes:
        config = replace(config, micro=4)
    return System(", ".join(f"{axis}={n}" for axis, n in sizes.items()), functools.partial(our_step, config, sizes))


def our_step(config: Config, sizes: dict[str, int]) -> Step:
    mesh = sf.make_mesh(device="cpu", **dict.fromkeys(AXES, 1) | sizes)
    placed = train_nd.strategy(config, mesh)
    params = sf.init_sharded(train_nd.init(config), SEED, mesh, placed, specs=SPECS)
    optimizer = so.adamw(RATE, weight_decay=DECAY)
    state = optimizer.init(params)
    tokens = batch(config)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P()), out_specs=(..., ..., P()))
    def trained(params: Params, state: Any, tokens: Tensor) -> Any:
        rows = sf.collectives.local_slice(tokens, SIX.rows, dim=1)
        loss, grads = sf.value_and_grad(loss_fn)(params, rows, config, SIX)
        return *optimizer.step(params, grads, state), loss

    def step() -> Tensor:
        nonlocal params, state
        params, state, loss = trained(params, state, tokens)
        return loss

    return step


# --- torch's: the same model as modules ---


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.width
        self.q, self.k, self.v, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.head = d // config.heads

    def forward(self, h: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (made(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for made in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(rotated(q, rope), rotated(k, rope), v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, f = config.width, config.hidden
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((d, f), (d, f), (f, d)))

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), rope)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, embed: nn.Module, blocks: list[nn.Module], head: nn.Module, config: Config) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = embed, nn.ModuleList(blocks), head
        half = config.width // config.heads // 2
        angles = torch.arange(config.context)[:, None] * 10000.0 ** -(torch.arange(half) / half)
        self.rope = angles.cos(), angles.sin()

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows[:, :-1])
        for block in self.blocks:
            x = block(x, self.rope)
        return F.cross_entropy(self.head(x).flatten(0, 1), rows[:, 1:].flatten())


def rotated(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    (a, b), (cos, sin) = x.chunk(2, -1), rope
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def peer_step(config: Config, between: Placement) -> Step:
    """A step with torch's tensor parallelism; `between` layers, activations are whole, or sharded by sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = peer(config, mesh, between)
    # The fused kernel needs all tensors on one mesh, but norms are not on `tensor` if activations are whole.
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    groups = [{"params": parameters} for parameters in by_mesh.values()]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY, fused=True)
    rows = batch(config)[0].chunk(2)[mesh.get_local_rank("shard")]

    def step() -> Tensor:
        with loss_parallel():
            loss = model(rows)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().to_local()

    return step


def peer(config: Config, mesh: DeviceMesh, between: Placement) -> nn.Module:
    """The sharded module: each stage is sharded as soon as it is made, with the values of `sf.init_sharded`."""
    made, plan, blocks = train_nd.init(config), plans(between), []
    for number in range(config.layers):
        with torch.device("meta"):
            block = Block(config)
        (p,) = sf.init({"blocks": {str(number): made["blocks"][number]}}, SEED)["blocks"].values()
        blocks.append(cut(filled(block, p), mesh, plan[1]))
    with torch.device("meta"):
        tokens, norm = nn.Embedding(config.vocabulary, config.width), nn.RMSNorm(config.width)
        out = nn.Linear(config.width, config.vocabulary, bias=False)
    ends = {"embed": nn.Sequential(OrderedDict(tokens=tokens)), "head": nn.Sequential(OrderedDict(norm=norm, out=out))}
    first, last = (filled(module, sf.init({name: made[name]}, SEED)[name]) for name, module in ends.items())
    model = Model(cut(first, mesh, plan[0]), blocks, cut(last, mesh, plan[2], again=False), config)
    fully_shard(model, mesh=mesh["shard"])
    return model


def filled(module: nn.Module, p: Params) -> nn.Module:
    """Copies our values into a module; its linear layers have transposed matrices."""
    for path, own in list(module.named_modules()):
        if isinstance(own, nn.Linear | nn.Embedding | nn.RMSNorm):
            value = p[path.split(".")[-1]]
            own.weight = nn.Parameter(value.T.contiguous() if isinstance(own, nn.Linear) else value)
    return module


def cut(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle], again: bool = True) -> nn.Module:
    """Shards a module over both axes; the last stage need not be gathered `again` for backward."""
    parallelize_module(module, mesh["tensor"], plan)
    fully_shard(module, mesh=mesh["shard"], reshard_after_forward=again)
    return module


def plans(between: Placement) -> tuple[dict[str, ParallelStyle], dict[str, ParallelStyle], dict[str, ParallelStyle]]:
    """The plans of torch's tensor parallelism for the embedding, a block and the head."""
    norms = () if between == Replicate() else ("norm", "norm1", "norm2")
    norm = {name: SequenceParallel() for name in norms}
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    return (
        {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)},
        # An input of several matrices is gathered once, so its gradient is reduced once.
        {"attention": PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(Replicate(), None))}
        | {"mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())}
        | {name: ColwiseParallel() for name in columns}
        | {name: RowwiseParallel(output_layouts=between) for name in ("attention.out", "mlp.down")}
        | {name: norm[name] for name in norms[1:]},
        {"out": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)}
        | {name: norm[name] for name in norms[:1]},
    )


# --- what the processes do in a turn ---


def built(usage: Usage) -> dict[str, Callable[..., Any]]:
    steps: dict[str, Step] = {}

    def make(system: System) -> None:
        steps[system.name] = system.make()

    return {
        "make": make,
        "train": lambda name, count: timed(steps[name], count),
        "moved": lambda name: moved(steps[name]),
        "peak": lambda: usage.peak() / 1e6,
    }


def moved(step: Step) -> float:
    """The MB that this rank sends in a step."""
    with sf.collectives.ledger() as log:
        step()
    return log.bytes() / 1e6


# --- the table ---

Start = Callable[[System], AbstractContextManager[Crew]]


@contextlib.contextmanager
def apart(system: System) -> Iterator[Crew]:
    """New processes for this system alone."""
    with Crew(RANKS, built, environment=KEEPS_MEMORY) as crew:
        crew.turn("make", system)
        yield crew


@contextlib.contextmanager
def among_others(crew: Crew, system: System) -> Iterator[Crew]:
    """Processes that are shared with other systems."""
    crew.turn("make", system)
    yield crew


def measured(model: str, systems: Sequence[System], start: Start, rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row for each system; the first system takes turns with all others."""
    first, others = systems[0], systems[1:]
    rows: list[dict[str, Any]] = []
    with start(first) as crew:
        for begin in range(0, len(others), TOGETHER - 1):
            with ExitStack() as stack:
                crews = {first.name: crew}
                for system in others[begin : begin + TOGETHER - 1]:
                    crews[system.name] = stack.enter_context(start(system))
                rows += compared(model, crews, rounds, steps)[bool(begin) :]
    return rows


def compared(model: str, crews: dict[str, Crew], rounds: int, steps: int) -> list[dict[str, Any]]:
    took, losses = in_turns(
        {name: functools.partial(crew.turn, "train", name, steps) for name, crew in crews.items()}, rounds
    )
    first = next(iter(took.values()))
    peaks = {name: max(crew.turn("peak")) for name, crew in crews.items()}
    return [
        {
            "model": model,
            "mesh": name,
            "step ms": took[name],
            "time / first": took[name] / first,
            "peak MB": peaks[name],
            "MB sent a step": max(crew.turn("moved", name)) or "-",
            "first loss": f"{losses[name][0]:.7f}",
        }
        for name, crew in crews.items()
    ]


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    by_name = {row["mesh"]: row for row in rows if row["model"] == "dense"}
    theirs = [row for name, row in by_name.items() if any(name.endswith(peer) for peer in PEERS)]
    first = rows[0]
    fastest, smallest = (min(row[column] for row in theirs) for column in ("time / first", "peak MB"))
    goals = [
        Goal(f"{first['mesh']}: time / FSDP2 + DTensor", 1 / fastest, 0.70),
        Goal(f"{first['mesh']}: peak memory / FSDP2 + DTensor", first["peak MB"] / smallest, 1.0),
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        losses = [float(row["first loss"]) for row in rows if row["model"] == model]
        goals.append(Goal(f"{model}: first loss, relative difference between all", max(losses) / min(losses) - 1, 1e-5))
    return goals


def main() -> None:
    options = parser("A training step on every mesh of 4 ranks, and with FSDP2 and DTensor's tensor parallelism.")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=1, help="steps per turn")
    options.add_argument("--peers", action="store_true", help="only the mesh that torch runs too, and torch")
    options.add_argument("--tiny", action="store_true", help="a tiny model, few meshes and processes, to try it")
    args = options.parse_args()
    config, every = (TINY, meshes()[::4]) if args.tiny else (SIZES, meshes())
    dense = [FIRST["dense"], *(sizes for sizes in every if "expert" not in sizes and sizes != FIRST["dense"])]
    sparse = [FIRST["4 experts"], *(sizes for sizes in every if "expert" in sizes)]
    first, *others = (ours(config, sizes) for sizes in dense)
    peers = [
        System(f"{first.name}: {name}", functools.partial(peer_step, config, between))
        for name, between in PEERS.items()
    ]
    models = {"dense": [first, *peers, *others], "4 experts": [ours(mixed(config), sizes) for sizes in sparse]}
    if args.peers:
        models = {"dense": [first, *peers]}
    with ExitStack() as stack:
        start: Start = apart
        if args.tiny:
            start = functools.partial(among_others, stack.enter_context(Crew(RANKS, built)))
        found = [measured(model, systems, start, args.rounds, args.steps) for model, systems in models.items()]
    rows = [row for each in found for row in each]
    publish(f"one training step on every mesh, {RANKS} ranks", rows, goals_of(rows), args.json)


if __name__ == "__main__":
    main()
