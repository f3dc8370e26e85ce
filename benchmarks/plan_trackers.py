"""A plan's memory beside FSDP's memory tracker, and beside what a step really held.

    python -m benchmarks.plan_trackers

`FSDPMemTracker` follows a step of FSDP2 on fake tensors and a fake process group; `sf.plan.step` plans a step of
shardfn. Both train the same functions (`benchmarks.model`) in float32: each layer is a unit, parameters are gathered
for forward and again for backward, AdamW is fused, and the layers are computed again in backward or not
(`torch.utils.checkpoint` inside of FSDP's unit; `remat`). Both tell of their second step. A kind of memory is in both
what it is for, but where one draws a line the other may draw another: the tracker's activations contain what a forward
pass needs for a while, and its transients the gradients of a unit until they are put together. Where a CPU composes an
operation of others, both take CUDA's kernel.

For the model that fits here, the step also runs on the simulated device with values, where the bytes of all memories
are counted after each operation (`benchmarks.held`), with as many processes as ranks.
"""

from __future__ import annotations

import contextlib
import gc
import math
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from benchmarks.held import Tracker, cudas_attention
from benchmarks.model import Config, Whole, training
from benchmarks.report import Goal, parser, publish
from shardfn.testing import World, simulated

MODELS = {
    "34M": (Config(), 2),
    "7B": (Config(vocabulary=32000, width=4096, layers=32, heads=32, hidden=11008, context=4096, batch=1), 64),
}
FITS = ("34M", "tiny")
TINY = (Config(vocabulary=64, width=32, layers=3, heads=2, hidden=48, context=8), 2)
WAYS = {"kept": {}, "remat": {"remat": True}}
KINDS = {  # of the tracker
    "SHARDED_PARAM": "parameters",
    "SHARDED_GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
    "UNSHARDED_PARAM": "gathered",
    "ALL_GATHER": "gathered",
    "UNSHARDED_GRAD": "reducing",
    "REDUCE_SCATTER": "reducing",
    "TEMP": "transients",
    "BUFFER": "rows",
    "INP": "rows",
}
Found = tuple[dict[str, int], float]
"""Bytes at the peak, by kind, and the seconds that it took to find them."""


# --- FSDP2, by its tracker ---


class Again(nn.Module):
    """A module that is computed again in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False)


def tracked(config: Config, ranks: int, way: str) -> Found:
    dist.init_process_group("fake", rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def wrap(stage: nn.Module, name: str) -> nn.Module:
        module = Again(stage) if way == "remat" and name == "blocks" else stage
        fully_shard(module, mesh=mesh)
        return module

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", refused, "CPU")  # so that autograd takes it for one operation, as on CUDA
    began = time.perf_counter()
    with FakeTensorMode():
        model = Whole(config, wrap, init=drawn)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        rows = torch.zeros(config.batch, config.context + 1, dtype=torch.int64)
        for _ in range(2):
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((rows,))
            with tracker:
                model(rows).backward()
                optimizer.step()
                optimizer.zero_grad()
    kinds = dict.fromkeys(KINDS.values(), 0)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    for kind, nbytes in peak.items():
        if kind != "Total":
            kinds[KINDS[getattr(kind, "name", kind)]] += nbytes
    seconds = time.perf_counter() - began
    dist.destroy_process_group()
    return kinds, seconds


def refused(*args: Any) -> Any:
    raise NotImplementedError("fake tensors have no numbers to normalize")


def drawn(makers: Any, seed: int) -> Any:
    """What makers make; `sf.init` looks at a generator's state, which fake tensors lack."""
    return optree.tree_map(lambda make: make(torch.Generator().manual_seed(seed)), makers)


# --- shardfn, planned and run ---


def planned(config: Config, ranks: int, way: str) -> tuple[Found, int]:
    began = time.perf_counter()
    with sf.debug(memory=False), sf.plan.mode(ranks):
        step, args = training(config, sf.make_mesh(data=ranks), sf.full_shard("data"), **WAYS[way])
        plan = sf.plan.step(step, *args)
    return (plan.peak.kinds, time.perf_counter() - began), plan.allocator


def held(config: Config, ranks: int, rank: int, way: str, store: str) -> tuple[int, int]:
    """The most bytes on the simulated device in the second step: as they are, and in whole 512."""
    torch.set_num_threads(1)
    file = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
    ours = simulated(ranks, rank, store=file, races=False)
    with sf.debug(memory=False), ours as device, cudas_attention(device.name), Tracker(device.name) as tracker:
        mesh = sf.make_mesh(device=device.name, data=ranks)
        step, args = training(config, mesh, sf.full_shard("data"), **WAYS[way])
        step(*args)
        with uncollected():
            tracker.look(())
            tracker.most = tracker.rounded = 0
            step(*args)
    return tracker.most, tracker.rounded


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context in which only what nothing refers to is freed, as in a plan."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held_by_all(config: Config, ranks: int, way: str) -> list[tuple[int, int]]:
    def on(rank: int) -> tuple[int, int]:
        with World(1, kind="alone", deadline=300) as alone:
            found: tuple[int, int] = alone.run(held, config, ranks, rank, way, f"{folder}/store")[0]
        return found

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(on, range(ranks))]


# --- compared ---


def alone(function: Any, *args: Any) -> Any:
    with World(1, kind="alone", deadline=300) as world:
        return world.run(function, *args)[0]


def compared(name: str, config: Config, ranks: int, way: str) -> tuple[list[dict[str, Any]], list[Goal]]:
    (kinds, seconds), allocator = alone(planned, config, ranks, way)
    theirs, their_seconds = alone(tracked, config, ranks, way)
    ours, peer = sum(kinds.values()), sum(theirs.values())
    found = {kind: (theirs.get(kind, 0), kinds.get(kind, 0)) for kind in (*KINDS.values(), *kinds)} | {
        "all": (peer, ours)
    }
    about, label = {"model": f"{name}, {ranks} ranks, {way}"}, f"{name}, {way}"
    rows: list[dict[str, Any]] = [
        about | {"kind at the peak": kind, "FSDP2, tracked, MB": a / 1e6, "shardfn, planned, MB": b / 1e6}
        for kind, (a, b) in found.items()
    ]
    goals = [Goal(f"{label}: planned peak / FSDP2's by its tracker", ours / peer, 1.0)]
    most = math.nan
    if name in FITS:
        (most, rounded), *_ = held_by_all(config, ranks, way)
        goals.append(Goal(f"{label}: planned peak, off what was held", abs(ours / most - 1), 0))
        goals.append(Goal(f"{label}: the same in whole 512 bytes", abs(allocator / rounded - 1), 0))
    took = {"tracker, s": their_seconds, "plan, s": seconds, "shardfn / FSDP2": ours / peer, "held, MB": most / 1e6}
    return [*rows, about | took], goals


def main() -> None:
    options = parser("A plan's memory beside FSDP's memory tracker, and beside what a step held.")
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    args = options.parse_args()
    rows, goals = [], []
    for name, (config, ranks) in ({"tiny": TINY} if args.tiny else MODELS).items():
        for way in WAYS:
            found, aims = compared(name, config, ranks, way)
            rows += found
            goals += aims
    rows.sort(key=lambda row: "tracker, s" in row)
    publish("the memory of a step: planned, and by FSDP's tracker", rows, goals, args.json)


if __name__ == "__main__":
    main()
