"""The measured pictures of the documentation, each drawn from what a real run did.

    MALLOC_MMAP_THRESHOLD_=65536 OMP_NUM_THREADS=1 python docs/pictures.py

data.png: which rows of two epochs are in which batch, and which ranks read them, as the order of the rows says.
mesh.png: what each of four ranks holds of one stage, and which groups its collectives run in, as the layouts say.
show.png: what `sf.show` draws of a language model whose embedding is frozen and whose head is whole on every rank.
checker.png: what the checker takes down of two small programs on two ranks, and along what each value varies.
compiled.png: the program that `compile` makes of a step of five layers on two ranks.
nodes.png: eight ranks on two nodes, in blocks and in turn, and what `make_mesh` says of the axes.
modules.png: the stages, unstaged parameters and tied weights that `functional` finds in GPT-2, and how large they are.
memory.png: the memory of one rank during a training step, by four strategies: the resident size of the process, read
from /proc every half millisecond. Each phase is drawn equally long. glibc gives freed memory back at once, because of
the variable above.
schedule.png: one step of two ranks in time. When each collective was issued is read from the ledger, when each stage
computed from hooks around it, on rank 0; the fastest of twenty steps.
plan.png: the plan of the step on how-to/will-it-fit.md, with the times of the cost model for H100 GPUs.
loop.png: a run of `sf.run.loop` on two ranks, of which one gets a signal.
fitting.png: one step of two ranks with `accumulate(micro="auto")`, of which one runs out of memory, in time: when each
micro-batch began and ended, by hooks around its forward and backward; the fastest of five steps.
strategies.png: the time and the memory of every strategy, from the table in reference/strategies.md that
`benchmarks.strategies` made, beside figures that others published.
spectrum.png: what `examples.spectrum` draws: the curvature of a language model's loss while it trains, in two minutes.
influence.png: what `examples.influence` draws: scores of files for their own held-out stretches, in two minutes.
optimizers.png: what `examples.optimizers` draws: the losses of several optimizers, by steps and by seconds, in ten.
exact.png: the losses of `examples.train_lm` on one rank and on four, with exact parts and without.
elastic.png: the steps of the run that `benchmarks.elastic` disturbs, and when it does so. It makes network namespaces,
and takes a few minutes.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.check.varying import varying
from shardfn.checkpoint import saving
from shardfn.mesh.make import across
from shardfn.mesh.scope import scope
from shardfn.mesh.spec import Leaf
from shardfn.run.order import Order
from shardfn.testing import World, world
from shardfn.transforms.checking import CheckedCall
from shardfn.transforms.fitting import recall

HERE = Path(__file__).resolve().parent
BLUE, GREEN, ORANGE, RED, GRAY = "#38618c", "#4f9d69", "#e08e45", "#c0504d", "#9aa7b5"
PALE = {"forward": "#7fa6cf", "backward": "#38618c", "gather": GREEN, "reduce": ORANGE}
Params = Any


def makers(layers: int, width: int) -> Params:
    def make(generator: torch.Generator) -> Params:
        return {name: torch.randn(width, width, generator=generator) / width for name in ("up", "down")}

    return [make] * layers


@sf.stage
def block(p: Params, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


# --- memory ---


@contextmanager
def sampled(found: list[tuple[float, float]]) -> Iterator[None]:
    """Seconds and bytes of resident memory, while the block runs."""
    page, done = os.sysconf("SC_PAGE_SIZE"), threading.Event()

    def watch() -> None:
        while not done.is_set():
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            found.append((time.perf_counter(), resident))
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def memory_of_a_step(strategy: sf.Placement, layers: int, width: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Samples of the third step, above the process before it had parameters, and when its phases began and ended."""
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    optimizer = so.adamw(1e-3)
    phases: list[float] = []

    def loss(params: Params, x: Tensor) -> Tensor:
        for p in sf.layers(params):
            x = block(p, x)
        phases.append(time.perf_counter())
        return x.square().mean()

    step = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=...)

    def steps(layers: int, width: int) -> list[tuple[float, float]]:
        params = sf.init_sharded(makers(layers, width), 0, mesh, strategy)
        state = optimizer.init(params)
        for _ in range(3):
            found: list[tuple[float, float]] = []
            dist.barrier()
            with sampled(found):
                phases[:] = [time.perf_counter()]
                _, grads = step(params, torch.ones(64, width))
                phases.append(time.perf_counter())
                params, state = optimizer.step(params, grads, state)
                phases.append(time.perf_counter())
                del grads
        return found

    before = steps(2, 16)[-1][1]  # by then torch has loaded what it needs
    return [(t, size - before) for t, size in steps(layers, width)], phases


def stretched(t: float, phases: list[float]) -> float:
    """The moment, where every phase is as long as every other."""
    for i, (begin, end) in enumerate(itertools.pairwise(phases)):
        if t <= end:
            return i + (t - begin) / (end - begin)
    return len(phases) - 1.0


def draw_memory(path: Path) -> None:
    layers, width = 8, 1024
    data = ("replica", "shard")
    strategies = {
        "ddp": sf.ddp(data),
        "zero1": sf.strategies.zero1(data),
        "hybrid_shard": sf.hybrid_shard(shard="shard", replica="replica"),
        "full_shard": sf.full_shard(data),
    }
    megabytes = layers * 2 * width**2 * 4 / 1e6
    figure = Figure(figsize=(9.2, 3.4), dpi=100, layout="constrained")
    every = figure.subplots(1, len(strategies), sharey=True)
    for axes, (name, strategy) in zip(every, strategies.items(), strict=True):
        with World(4) as world:
            samples, phases = world.run(memory_of_a_step, strategy, layers, width)[0]
        xs = [stretched(t, phases) for t, _ in samples]
        axes.plot(xs, [size / 1e6 for _, size in samples], color=BLUE, linewidth=1.6)
        axes.set_title(name, fontsize=11)
        axes.set_xlim(0, 3)
        axes.set_xticks([0.5, 1.5, 2.5], ["forward", "backward", "update"], fontsize=9)
        axes.tick_params(axis="x", length=0)
        for i, color in enumerate(("#eef3f8", "#dfe8f2", "#f6ecdf")):
            axes.axvspan(i, i + 1, color=color, zorder=0)
        print(f"{name}: peak {max(size for _, size in samples) / 1e6:.0f} MB, parameters {megabytes:.0f} MB whole")
    every[0].set_ylim(0)
    every[0].set_ylabel(f"MB of rank 0 above the start\n({megabytes:.0f} MB of parameters)")
    figure.savefig(path)


# --- the schedule ---


class Stamped(list[sf.collectives.Record]):
    """Records, and when each was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, record: sf.collectives.Record) -> None:
        self.times.append(time.perf_counter())
        super().append(record)


def times_of_a_step(layers: int, width: int, tries: int) -> dict[str, Any]:
    """Of the fastest of some steps: when stages computed, forward and backward, and when collectives were issued."""
    mesh = sf.make_mesh(shard=2, device="cpu")
    params = sf.init_sharded(makers(layers, width), 0, mesh, sf.full_shard("shard"))
    x = torch.ones(384, width)
    forward: list[list[float]] = []
    arrived: dict[int, float] = {}

    @sf.stage
    def timed(p: Params, x: Tensor) -> Tensor:
        began = time.perf_counter()
        y = x + torch.tanh(x @ p["up"]) @ p["down"]
        forward.append([began, time.perf_counter()])
        return y

    def seen(i: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            arrived[i] = time.perf_counter()

        return hook

    def loss(params: Params, x: Tensor) -> Tensor:
        for i, p in enumerate(sf.layers(params)):
            x = timed(p, x)
            x.register_hook(seen(i))
        return x.square().mean()

    step = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=...)
    best: dict[str, Any] = {"end": float("inf")}
    for _ in range(tries + 2):
        forward.clear()
        dist.barrier()
        with sf.collectives.ledger() as log:
            log.records = Stamped()
            began = time.perf_counter()
            step(params, x)
            ended = time.perf_counter()
        assert isinstance(log.records, Stamped)
        moved = [
            (one.op, one.stage, one.backward, at - began)
            for one, at in zip(log.records, log.records.times, strict=True)
            if one.scheduled
        ]
        if ended - began < best["end"]:
            best = {
                "end": ended - began,
                "forward": [[t - began for t in each] for each in forward],
                "backward": [arrived[i] - began for i in range(layers)],
                "moved": moved,
            }
    return best


def draw_schedule(path: Path) -> None:
    layers = 6
    with World(2, deadline=300) as world:
        found = world.run(times_of_a_step, layers, 640, 20)[0]
    forward, backward, end = found["forward"], found["backward"], found["end"]
    ms = 1e3
    figure = Figure(figsize=(9.2, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()

    def bar(i: int, begin: float, until: float, kind: str, lower: bool) -> None:
        y = i + (0.2 if lower else -0.2)
        axes.barh(y, (until - begin) * ms, left=begin * ms, height=0.36, color=PALE[kind], edgecolor="white")

    for i, (begin, until) in enumerate(forward):
        bar(i, begin, until, "forward", lower=False)
    for i, begin in enumerate(backward):
        bar(i, begin, backward[i - 1] if i else end, "backward", lower=False)
    for op, stage, in_backward, at in found["moved"]:
        i = int(stage)
        if op == "all_gather":
            bar(i, at, backward[i] if in_backward else forward[i][0], "gather", lower=True)
        else:  # it is waited for when the next one has computed, or at the end
            bar(i, at, backward[i - 2] if i > 1 else end, "reduce", lower=True)
    labels = {
        "forward": "computes forward",
        "backward": "computes backward",
        "gather": "gather: issued, until its stage begins",
        "reduce": "reduce-scatter: issued, until it must have arrived",
    }
    for kind, label in labels.items():
        axes.barh(0, 0, color=PALE[kind], label=label)
    axes.set_yticks(range(layers), [f"stage {i}" for i in range(layers)])
    axes.invert_yaxis()
    axes.set_xlim(0, end * ms)
    axes.set_xlabel("ms since the step began, rank 0 of 2")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(path)
    print(f"a step of {end * ms:.1f} ms, {len(found['moved'])} collectives")


# --- the mesh ---


def held_by_a_rank() -> tuple[list[tuple[str, int, int]], int, list[int], int]:
    """Of one stage on `replica=2, shard=2`: what this rank has of which parameter, its groups, and its piece."""
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    shapes = {"w": (8, 8), "b": (8,), "out": (8, 5)}
    make = {name: lambda g, shape=shape: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    shard = sf.init_sharded([make], 0, mesh, sf.hybrid_shard(shard="shard", replica="replica"))[0]
    rank = mesh.get_rank()
    ranges = [(one.path.split(".")[-1], one.start, one.stop) for one in shard.layout.ranges(rank)]
    return ranges, rank, [mesh.get_local_rank("replica"), mesh.get_local_rank("shard")], shard.layout.piece


def draw_mesh(path: Path) -> None:
    with World(4) as world:
        found = world.run(held_by_a_rank)
    colors = {"b": RED, "out": "#7b5ea7", "w": BLUE}
    figure = Figure(figsize=(7.6, 3.5), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-0.75, 2.35)
    axes.set_ylim(2.05, -0.62)
    for ranges, rank, (replica, shard), piece in found:
        x, y = 0.05 + shard * 1.15, replica * 1.0
        axes.add_patch(_box(x, y, 0.95, 0.62))
        axes.text(x + 0.06, y + 0.14, f"rank {rank}", fontsize=11, va="center", weight="bold")
        left = x + 0.06
        padding = piece - sum(stop - start for _, start, stop in ranges)
        for name, start, stop in [*ranges, ("", 0, padding)]:
            width = 0.83 * (stop - start) / piece
            if not name:
                axes.barh(y + 0.4, width, left=left, height=0.2, color="#d9dde3", edgecolor="white")
                axes.text(left + width / 2, y + 0.555, "padding", ha="center", va="center", fontsize=7.5)
                continue
            axes.barh(y + 0.4, width, left=left, height=0.2, color=colors[name], edgecolor="white")
            axes.text(left + width / 2, y + 0.4, name, color="white", ha="center", va="center", fontsize=10)
            axes.text(left + width / 2, y + 0.555, f"{start}:{stop}", ha="center", va="center", fontsize=7.5)
            left += width
    for replica in range(2):
        axes.text(-0.1, replica + 0.31, f"replica={replica}", ha="right", va="center", fontsize=11)
        axes.annotate(
            "",
            (1.21, replica + 0.31),
            (0.99, replica + 0.31),
            arrowprops={"arrowstyle": "<->", "color": GREEN, "lw": 2},
        )
    for shard in range(2):
        x = 0.525 + shard * 1.15
        axes.text(x, -0.12, f"shard={shard}", ha="center", va="center", fontsize=11)
        axes.annotate("", (x, 1.01), (x, 0.62), arrowprops={"arrowstyle": "<->", "color": ORANGE, "lw": 2})
    axes.text(1.1, -0.42, "along shard: all-gather parameters, reduce-scatter gradients", color=GREEN, ha="center")
    axes.text(1.1, 1.85, "along replica: all-reduce this rank's piece of the gradient", color="#b5651d", ha="center")
    figure.savefig(path)


def _box(x: float, y: float, width: float, height: float) -> Any:
    from matplotlib.patches import FancyBboxPatch

    box = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.01")
    box.set(facecolor="#f4f8fc", edgecolor=BLUE)
    return box


# --- who holds what ---


def draw_show(path: Path) -> None:
    width, vocabulary = 256, 4096

    def body() -> None:
        mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
        shapes = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        params = {
            "embed": torch.zeros(vocabulary, width),
            "blocks": [{name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(6)],
            "head": torch.zeros(vocabulary // 2, width),
        }
        both, within = ("replica", "shard"), sf.hybrid_shard(shard="shard", replica="replica")
        ways = {"embed": sf.full_shard(both), "head": sf.ddp(both)}
        shown = sf.show(sf.shard(params, mesh, lambda path, _: ways.get(path, within), frozen="embed"))
        shown.figure().savefig(path)

    with World(4, kind="fake") as world:
        world.run(body)


# --- a module ---


def gpt2_taken_apart() -> tuple[dict[str, str], dict[str, tuple[int, list[str]]]]:
    """The classes of the modules of GPT-2 that have parameters of one entry of its tree, by path, and for each entry
    the number of its elements, and which of these modules read it."""
    transformers: Any = importlib.import_module("transformers")
    with torch.device("meta"):
        model = sf.interop.functional(transformers.GPT2LMHeadModel(transformers.GPT2Config()))
    entries: dict[str, tuple[int, list[str]]] = {}
    for key, part in model.tree.items():
        values = part if isinstance(part, dict) else {key: part}
        readers = [alias.rpartition(".")[0] for alias, name in model.names.items() if name in values]
        entries[key] = sum(x.numel() for x in values.values()), [key] if key in model.stages else [*set(readers)]
    readers = [path for _, paths in entries.values() for path in paths]
    modules = [path for path, _ in model.module.named_modules() if path in readers]
    return {path: type(model.module.get_submodule(path)).__name__ for path in modules}, entries


def draw_modules(path: Path) -> None:
    modules, entries = gpt2_taken_apart()
    blocks = [one for one in modules if modules[one] == "GPT2Block"]
    rows = {one: float(i) for i, one in enumerate(one for one in modules if one not in blocks[2:-1])}
    middle = (rows[blocks[1]] + rows[blocks[-1]]) / 2
    rows = {one: y + 0.6 * (y > middle) for one, y in rows.items()}
    figure = Figure(figsize=(7.6, 3.7), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 7.6)
    axes.set_ylim(max(rows.values()) + 0.75, -1.35)
    axes.text(0.2, -0.9, "modules", fontsize=11, weight="bold", va="center")
    axes.text(3.75, -0.9, "parameters", fontsize=11, weight="bold", va="center")
    axes.text(4.85, -0.9, "are gathered", fontsize=11, weight="bold", va="center")
    for one, y in rows.items():
        axes.text(0.2, y, one, fontsize=10, va="center", family="monospace")
        axes.text(1.95, y, modules[one], fontsize=10, va="center", color="#5b6775")
    for x in (0.32, 4.22):
        axes.text(x, middle + 0.3, "⋮", fontsize=12, va="center")
    for key, (numel, readers) in entries.items():
        if key in blocks[2:-1]:
            continue
        y, at = min(rows[one] for one in readers), [rows[one] for one in readers]
        kind, color = ("as a stage, for its module", BLUE) if key else ("unstaged, once for the whole call", GREEN)
        if len(readers) > 1:
            kind, color = "tied, for each stage that reads them", RED
            axes.plot([3.4, 3.4], [min(at), max(at)], color=color, linewidth=1.6)
        for each in at:
            axes.plot([3.0, 3.7 if each == y else 3.4], [each, each], color=color, linewidth=1.6)
        axes.barh(y, 1.0, left=3.75, height=0.62, color=color, edgecolor="white")
        size = f"{numel / 1e6:.1f} M" if numel > 1e5 else f"{numel:,}"
        axes.text(4.25, y, size, color="white", ha="center", va="center", fontsize=9.5)
        axes.text(4.85, y, kind, color=color, va="center", fontsize=10)
    figure.savefig(path)


# --- the order of rows ---


def draw_data(path: Path) -> None:
    """Two epochs of nine rows in batches of four, and who reads what, as the order says."""
    order = Order(9, 4, 0, remainder="wrap", epochs=2)
    part = order.part(0, 0, 4, order.steps or 0)
    rows, epochs = part.rows.tolist(), part.epochs.tolist()
    figure = Figure(figsize=(9.2, 3.3), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(-4.6, len(rows) + 0.2)
    axes.set_ylim(-5.4, 1.6)
    axes.axis("off")
    for at, (row, epoch) in enumerate(zip(rows, epochs, strict=True)):
        color = (BLUE, GREEN, GRAY)[epoch]
        axes.add_patch(_box(at, 0, 0.92, 0.8)).set_facecolor(color)
        axes.text(at + 0.46, 0.4, str(row), ha="center", va="center", color="white", fontsize=10)
    for step in range(order.steps or 0):
        axes.text(4 * step + 1.96, 1.15, f"step {step}", ha="center", va="center", fontsize=10)
    axes.text(-0.3, 0.4, "the order of rows", ha="right", va="center", fontsize=10)
    for line, (name, ranks) in enumerate(
        {"data=2": ["0", "1"], "data=4": ["0", "1", "2", "3"], "data=2, tensor=2": ["0, 1", "2, 3"]}.items()
    ):
        y, size = -1.5 - 1.4 * line, 4 // len(ranks)
        axes.text(-0.3, y + 0.4, f"ranks of {name}", ha="right", va="center", fontsize=10)
        for at in range(0, len(rows), size):
            box = _box(at, y, size - 0.08, 0.8)
            axes.add_patch(box).set_facecolor((ORANGE, "#f0c48f", "#d9873a", "#f5dcb9")[at // size % len(ranks)])
            axes.text(at + size / 2 - 0.04, y + 0.4, ranks[at // size % len(ranks)], ha="center", va="center")
    figure.savefig(path)


# --- a run ---


def times_of_a_run(folder: str) -> dict[str, Any]:
    """When steps begin, their metrics are read, checkpoints are written; rank 1 gets a signal."""
    mesh = sf.make_mesh(shard=2, device="cpu")
    optimizer = so.adamw(1e-3)
    params = sf.init_sharded({"blocks": makers(4, 384)}, 0, mesh, sf.full_shard("shard"))
    times: dict[str, Any] = {"steps": [], "read": [], "saves": [], "signal": 0.0}

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., ...), out_specs=...)
    def trained(params: Params, moments: Any, x: Tensor) -> Any:
        def loss(params: Params) -> Tensor:
            y = x
            for p in sf.layers(params["blocks"]):
                y = block(p, y)
            return sf.psum(y.square().mean(), "shard")

        value, grads = sf.value_and_grad(loss)(params)
        return *optimizer.step(params, grads, moments), value

    def step(state: Any, x: Tensor) -> Any:
        params, moments, loss = trained(state[0], state[1], x)
        return (params, moments), {"loss": loss}

    def batches(start: int) -> Iterator[Tensor]:
        for n in range(start, 10**6):
            times["steps"].append(time.perf_counter())
            times["saves"] += [(p.path.name, p.done(), time.perf_counter()) for p in saving._pending]
            if n == 9 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield torch.ones(64, 384)

    def read(n: int, metrics: dict[str, float]) -> None:
        times["read"].append((n, time.perf_counter()))

    _, run = sf.run.loop(step, (params, optimizer.init(params)), batches, steps=10**6, save=folder, save_every=4,
                         report=[read])  # fmt: skip
    return {**times, "end": time.perf_counter(), "run": run.step}


def draw_loop(path: Path) -> None:
    with World(2, deadline=300) as world, tempfile.TemporaryDirectory() as folder:
        found = world.run(times_of_a_run, folder)[0]
    steps, end, ms = found["steps"], found["end"], 1e3
    began = steps[0]
    figure = Figure(figsize=(9.2, 2.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    for n, (a, b) in enumerate(zip(steps, [*steps[1:], found["read"][-1][1]], strict=True)):
        axes.barh(0, (b - a) * ms, left=(a - began) * ms, height=0.6, color=PALE["forward"], edgecolor="white")
        axes.text(((a + b) / 2 - began) * ms, 0, str(n + 1), ha="center", va="center", color="white", fontsize=9)
    together: dict[int, list[tuple[int, float]]] = {}
    for n, at in found["read"]:
        axes.plot((at - began) * ms, 1, "o", color=BLUE, markersize=4)
        together.setdefault(round((at - began) * 100), []).append((n, at))  # those of one moment have one label
    for several in together.values():
        (first, at), (last, _) = several[0], several[-1]
        told = str(first) if first == last else f"{first} to {last}"
        axes.text((at - began) * ms, 1.42, told, ha="center", va="center", fontsize=8, color=BLUE)
    for number in range(4, len(steps), 4):
        seen = [at for name, _, at in found["saves"] if name == f"step-{number:08}"]
        until = max(seen, default=steps[number])
        axes.barh(2, (until - steps[number]) * ms, left=(steps[number] - began) * ms, height=0.6, color=GREEN)
    axes.barh(2, (end - found["read"][-1][1]) * ms, left=(found["read"][-1][1] - began) * ms, height=0.6, color=GREEN)
    axes.axvline((steps[9] - began) * ms, color=RED, linewidth=1.2)
    axes.text((steps[9] - began) * ms, -0.62, "SIGTERM at rank 1 ", ha="right", va="center", color=RED, fontsize=8.5)
    axes.set_yticks(range(3), ["steps launched", "metrics read", "checkpoint written"])
    axes.set_ylim(2.5, -0.9)
    axes.set_xlabel("ms since the first step began, rank 0 of 2")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    print(f"{found['run']} steps, {(end - began) * ms:.0f} ms")


# --- the checker ---


def followed(program: Callable[[Tensor, Tensor], Tensor]) -> list[tuple[str, bool, bool]]:
    """Of the gradient of a program by its first argument, each value: the op, whether it varies, and in which pass."""
    mesh = sf.make_mesh(data=2, device="cpu")
    checked = CheckedCall(program, mesh, outer=False)
    pieces = [torch.ones(3), torch.arange(6.0).view(2, 3) + mesh.get_rank()]
    with scope(mesh), checked.recorder:
        checked.record_arguments([Leaf("w", pieces[0], sf.P()), Leaf("x", pieces[1], sf.P("data"))], pieces)
        sf.grad(program)(*pieces)
        types = varying(checked.recorder.trace, checked.compared([]).nodes)
    nodes = zip(checked.recorder.trace.nodes, types.along, strict=True)
    return [(node.about if node.op == "input" else node.op, bool(along), node.backward) for node, along in nodes]


def forgetful(w: Tensor, x: Tensor) -> Tensor:
    return sf.psum((x @ w).square().sum(), "data")


def careful(w: Tensor, x: Tensor) -> Tensor:
    return forgetful(sf.pvary(w, "data"), x)


def draw_checker(path: Path) -> None:
    figure = Figure(figsize=(9.2, 4.4), dpi=100, layout="constrained")
    with World(2, deadline=300) as world:
        for axes, program, title in zip(
            figure.subplots(2, 1), (forgetful, careful), ("without pvary", "with pvary"), strict=True
        ):
            _values(axes, world.run(followed, program)[0], title)
    figure.savefig(path)


_SHOWN = {"x": "x", "w": "w", "pvary": "pvary", "mv": "x @ w", "pow": "square", "sum": "sum", "psum": "psum"}
_BACK = {"gradient": "gradient of w", "psum": "psum", "mv": "x.T @ ct", "pvary": "pvary", "mul": "2 (x @ w) ct"}


def _values(axes: Any, found: list[tuple[str, bool, bool]], title: str) -> None:
    """Forward from left to right, backward below it from right to left."""
    ahead = [(_SHOWN[op], varies) for op, varies, backward in found if not backward and op in _SHOWN]
    ahead.sort(key=lambda one: one[0] != "x")
    back = [(_BACK[op], varies) for op, varies, backward in found if backward and op in _BACK]
    back = [one for n, one in enumerate(back) if one[0] not in [name for name, _ in back[n + 1 :]]]
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=10)
    for row, boxes in ((0, ahead), (1, back)):
        for n, (name, varies) in enumerate(boxes):
            at = n if row == 0 else len(ahead) - 1 - n
            gradient = name.startswith("gradient")
            color = (RED if varies else GREEN) if gradient else BLUE if varies else GRAY
            axes.add_patch(Rectangle((at - 0.42, -row - 0.27), 0.84, 0.54, facecolor=color, edgecolor="white"))
            axes.text(at, -row, name, ha="center", va="center", color="white", fontsize=9)
            axes.text(at, -row - 0.4, "varies" if varies else "the same", ha="center", va="center", fontsize=7.5)
            if n + 1 < len(boxes) and name != "x":
                axes.text(at + (0.5 if row == 0 else -0.5), -row, "\u2192" if row == 0 else "\u2190", ha="center",
                          va="center", color=GRAY)  # fmt: skip
    axes.set_xlim(-0.6, 6.6)
    axes.set_ylim(-1.55, 0.4)


# --- nodes ---


def draw_nodes(path: Path) -> None:
    figure = Figure(figsize=(8.4, 2.7), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, hosts, title in ((left, "00001111", "ranks in blocks"), (right, "01010101", "ranks in turn")):
        axes.set_axis_off()
        axes.set_xlim(-0.75, 4)
        axes.set_ylim(2.2, -0.6)
        spans = across(hosts, {"replica": 2, "shard": 4})
        axes.set_title(f"{title}: {'shard spans nodes' if spans else 'shard lies within a node'}", fontsize=10)
        for rank, host in enumerate(hosts):
            y, x = divmod(rank, 4)
            color = (BLUE, ORANGE)[int(host)]
            axes.add_patch(Rectangle((x + 0.06, y + 0.1), 0.88, 0.72, facecolor=color, edgecolor="white"))
            text = f"rank {rank}\nnode {host}"
            axes.text(x + 0.5, y + 0.46, text, color="white", fontsize=9, ha="center", va="center")
        for y in range(2):
            axes.text(-0.05, y + 0.46, f"replica {y}", fontsize=9, ha="right", va="center")
        for x in range(4):
            axes.text(x + 0.5, -0.1, f"shard {x}", fontsize=9, ha="center", va="center")
    figure.savefig(path)


# --- the run that loses a host ---


def draw_elastic(path: Path) -> None:
    sys.path.insert(0, str(HERE.parent))
    from benchmarks import elastic

    events, steps, difference = elastic.measured(tiny=False, seed=0)
    print(*events, f"largest relative difference of a loss: {difference:.1e}", sep="\n")
    began = steps[0]["time"]
    figure = Figure(figsize=(9.2, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    for ranks, color in ((4, BLUE), (2, ORANGE)):
        some = [step for step in steps if step["ranks"] == ranks]
        times, numbers = [step["time"] - began for step in some], [step["step"] for step in some]
        axes.plot(times, numbers, ".", color=color, markersize=3, label=f"{ranks} ranks")
    for event in events:
        axes.axvline(event["at s"], color=RED, linewidth=1, linestyle=":")
        place: dict[str, Any] = {"rotation": 90, "va": "top", "ha": "right", "fontsize": 9, "color": RED}
        axes.text(event["at s"], max(step["step"] for step in steps), event["event"], **place)
    axes.set(xlabel="seconds", ylabel="step", xlim=(0, None), ylim=(0, None))
    axes.legend(loc="lower right")
    figure.savefig(path)


# --- batches that fit ---


class Marked(torch.autograd.Function):
    """Passes its input on, and says when its gradient has come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Callable[[], None]) -> Tensor:
        ctx.mark = mark
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        ctx.mark()
        return ct, None


def times_of_fitting() -> list[dict[str, Any]]:
    """When each micro-batch of some steps began and ended, with its rows, and when this rank ran out of memory."""
    mesh = sf.make_mesh(shard=2, device="cpu")
    params = sf.init_sharded(makers(8, 512), 0, mesh, sf.full_shard("shard"))
    room, times = 2 if dist.get_rank() == 1 else 99, {"parts": [], "out": []}  # type: ignore[var-annotated]

    def loss(params: Params, x: Tensor) -> Tensor:
        rows, began = len(x), time.perf_counter()
        one = [rows, began, began]
        times["parts"].append(one)

        def mark() -> None:
            one[2] = time.perf_counter()

        x = cast(Any, Marked).apply(x.requires_grad_(), mark)
        for k, p in enumerate(sf.layers(params)):
            mark()
            if k == 5 and rows > room:
                times["out"].append((rows, time.perf_counter()))
                raise torch.OutOfMemoryError(f"{rows} rows")
            x = block(p, x.flatten(0, 1)).unflatten(0, (rows, -1))
        return x.square().mean()

    def step(params: Params, x: Tensor) -> Any:
        return sf.accumulate(loss, x, micro="auto")(params)

    run = sf.shard_map(step, mesh=mesh, in_specs=..., out_specs=...)
    sf.shard_map(lambda p, x: sf.accumulate(loss, x, micro=8)(p), mesh=mesh, in_specs=..., out_specs=...)(
        params, torch.ones(8, 64, 512)
    )
    found = []
    for _ in range(5):
        for kept in times.values():
            kept.clear()
        recall("[]", [0, 1])
        dist.barrier()
        run(params, torch.ones(8, 64, 512))
        found.append({name: list(kept) for name, kept in times.items()})
    return found


def draw_fitting(path: Path) -> None:
    with World(2, deadline=300) as world:
        every = zip(*world.run(times_of_fitting), strict=True)
    found = min(every, key=lambda both: both[0]["parts"][-1][2] - both[0]["parts"][0][1])
    began, ms = min(one["parts"][0][1] for one in found), 1e3
    figure = Figure(figsize=(9.2, 2.3), dpi=100, layout="constrained")
    axes = figure.subplots()
    for rank, one in enumerate(found):
        for rows, a, b in one["parts"]:
            color = {8: GRAY, 4: GRAY, 2: BLUE}[rows]
            axes.barh(rank, (b - a) * ms, left=(a - began) * ms, height=0.55, color=color, edgecolor="white")
            axes.text(((a + b) / 2 - began) * ms, rank, str(rows), ha="center", va="center", color="white", fontsize=9)
        for rows, at in one["out"]:
            axes.plot((at - began) * ms, rank, "X", color=RED, markersize=9, markeredgecolor="white")
            a = next(a for n, a, _ in one["parts"] if n == rows)
            axes.text((a - began) * ms, rank + 0.46, " out of memory", ha="left", va="center", color=RED, fontsize=8.5)
    for attempt, rows in enumerate((8, 4, 2)):
        at = min(a for one in found for n, a, _ in one["parts"] if n == rows)
        parts = 2**attempt
        axes.axvline((at - began) * ms, color=GRAY, linewidth=0.8, linestyle=":")
        text = f" {parts} part{'s' if parts > 1 else ''}"
        axes.text((at - began) * ms, -0.5, text, ha="left", va="center", fontsize=8.5)
    axes.set_yticks(range(2), ["rank 0", "rank 1"])
    axes.set_ylim(1.7, -0.7)
    axes.set_xlabel("ms since the step began")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


# --- the plan ---


def planned_on_the_page() -> tuple[Any, Any]:
    """The plan of the page's step, and the times of its works on H100 GPUs."""
    code = (HERE / "how-to/will-it-fit.md").read_text().split("```python\n")[1].split("```")[0]
    page: dict[str, Any] = {}
    exec(compile(code, "will-it-fit.md", "exec"), page)
    plan = page["planned"]()
    return plan, plan.timed("h100", "h100")


def draw_plan(path: Path) -> None:
    plan, times = world(1, "alone").run(planned_on_the_page)[0]
    plan.save_picture(path, times)


# --- strategies ---


def draw_strategies(path: Path) -> None:
    sys.path.insert(0, str(HERE.parent))
    from benchmarks import strategies

    page = (HERE / "reference/strategies.md").read_text()
    lines = page.split("| strategy | step ms | peak MB |")[1].split("\n\n")[0].splitlines()[2:]
    figures = {}
    for line in lines:
        names, took, peak, _ = (cell.strip() for cell in line.strip("|").split("|"))
        figures[names.split(",")[0].strip("`")] = (float(took), float(peak))
    time_of_ddp, memory_of_ddp = figures["ddp"]
    rows = [
        {"strategy": name, "time / ddp": took / time_of_ddp, "memory / ddp": peak / memory_of_ddp}
        for name, (took, peak) in figures.items()
    ]
    strategies.draw(rows, path)


# --- curvature ---


def watched() -> Any:
    sys.path.insert(0, str(HERE.parent))
    from examples import run, spectrum

    mesh = sf.make_mesh(replica=1, shard=-1, device="cpu")
    placed = sf.strategies.from_name("full_shard", shard="shard", replica="replica")
    return spectrum.watch(spectrum.SMALL, mesh, run.corpus()[0], 200, 20, placed)


def draw_spectrum(path: Path) -> None:
    with World(2, deadline=1200) as ranks:
        found = ranks.run(watched)[0]
    from examples import spectrum

    spectrum.draw(found, spectrum.SMALL, (20, 100, 200), path)


# --- compiled steps ---


def program_of_a_step() -> list[tuple[str, str, int, int]]:
    """The gathers, regions and reductions of a compiled step of five layers: kind, name, and where in the program."""
    from shardfn.compiled.compile import Programs

    mesh = sf.make_mesh(data=2, device="cpu")
    params = sf.init_sharded(makers(5, 16), 0, mesh, sf.full_shard("data"))
    optimizer, layer = so.adamw(1e-2), sf.stage(block)

    def loss(params: Params, x: Tensor) -> Tensor:
        for p in sf.layers(params):
            x = layer(p, x)
        return sf.pmean(x.square().mean(), "data")

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(params: Params, state: Any, x: Tensor) -> Any:
        value, grads = sf.value_and_grad(loss)(params, x)
        return *optimizer.step(params, grads, state), value

    programs, state = Programs(step, None), optimizer.init(params)
    for _ in range(2):
        params, state, _ = programs.called((params, state, torch.ones(4, 16)), {})
    (program,) = programs.programs.values()
    found: list[tuple[str, str, int, int]] = []
    begun: dict[str, int] = {}
    at, values = 0, program.captured.function.__globals__  # type: ignore[union-attr]
    for line in program.captured.source.splitlines():  # type: ignore[union-attr]
        if match := re.search(r"(c\d+)\(b\)", line):
            found.append(("computes", str(id(values[match[1]])), at, at + 1))
            at += 1
        elif match := re.search(r"(v\d+) = c\d+\.start", line):
            begun[match[1]] = at
        elif match := re.search(r"(c\d+)\.finish\((v\d+)\)", line):
            work = values[match[1]]
            found.append(("gather" if work.lends else "reduce", str(work).split()[1].strip(":"), begun[match[2]], at))
    return found


def draw_compiled(path: Path) -> None:
    with World(2, deadline=300) as ranks:
        found = ranks.run(program_of_a_step)[0]
    figure = Figure(figsize=(9.2, 2.8), dpi=100, layout="constrained")
    axes = figure.subplots()
    regions = list(dict.fromkeys(name for kind, name, _, _ in found if kind == "computes"))
    rows = {"gather": 0, "computes": 1, "reduce": 2}
    for kind, name, begin, end in found:
        color = f"C{regions.index(name)}" if kind == "computes" else PALE[kind]
        y = rows[kind] if kind == "computes" else rows[kind] + 0.16 * (int(name) - 2)
        width, height = max(end - begin, 0.4), 0.6 if kind == "computes" else 0.16
        axes.barh(y, width, left=begin, height=height, color=color, edgecolor="white", alpha=0.7)
        label = chr(ord("A") + regions.index(name)) if kind == "computes" else name
        axes.text(begin + width / 2, y, label, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(3), ["gathers of layers", "regions", "reductions of layers"])
    axes.invert_yaxis()
    axes.set_xlabel("place in the program; regions with the same letter are the same code")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def scored() -> Any:
    sys.path.insert(0, str(HERE.parent))
    from examples import influence

    mesh, (files, held_out) = sf.make_mesh(replica=1, shard=-1, device="cpu"), influence.sources(influence.SMALL)
    placed = sf.strategies.from_name("full_shard", shard="shard", replica="replica")
    params, _ = influence.trained(influence.SMALL, mesh, files, 300, placed)
    return influence.scores(influence.SMALL, mesh, params, files, held_out)


def draw_influence(path: Path) -> None:
    with World(2, deadline=1200) as ranks:
        found = ranks.run(scored)[0]
    from examples import influence

    influence.draw(found, influence.FILES, path)


def raced() -> Any:
    sys.path.insert(0, str(HERE.parent))
    from examples import optimizers, run

    mesh = sf.make_mesh(replica=1, shard=-1, device="cpu")
    placed = sf.strategies.from_name("full_shard", shard="shard", replica="replica")
    return optimizers.compare(optimizers.SMALL, mesh, run.corpus()[0], 200, placed)


def draw_optimizers(path: Path) -> None:
    with World(2, deadline=1200) as ranks:
        found = ranks.run(raced)[0]
    from examples import optimizers

    optimizers.draw(found, path)


def curve_of(parts: int, steps: int) -> list[float]:
    """The losses of a run of `examples.train_lm`, on the ranks that there are."""
    from examples import run, train_lm

    text = torch.frombuffer(bytearray(Path(run.__file__).read_bytes()), dtype=torch.uint8)
    mesh = sf.make_mesh(replica=1, shard=-1, device="cpu")
    config = train_lm.Config(width=32, heads=2, layers=2, hidden=64, context=64, warmup=10)
    trained = train_lm.train(config, mesh, (text, text), steps, 0, sf.full_shard("shard").with_exact(parts))
    return run.curve(trained.run)


def draw_exact(path: Path) -> None:
    steps, curves = 80, dict[str, list[float]]()
    for ranks in (1, 4):
        with World(ranks, deadline=600) as world:
            for kind, parts in {"exact": 8, "not exact": 0}.items():
                curves[f"{ranks} rank{'s' if ranks > 1 else ''}, {kind}"] = world.run(curve_of, parts, steps)[0]
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, style in {"1 rank, exact": "-", "4 ranks, exact": ":"}.items():
        left.plot(range(1, steps + 1), curves[name], style, linewidth=1.5 if style == "-" else 4, label=name)
    left.set(xlabel="step", ylabel="loss", title="two runs, one curve")
    left.legend()
    for kind in ("not exact", "exact"):
        pairs = zip(curves[f"1 rank, {kind}"], curves[f"4 ranks, {kind}"], strict=True)
        right.plot(range(1, steps + 1), [abs(a - b) for a, b in pairs], label=kind)
    right.set(xlabel="step", title="difference of the losses on 1 and on 4 ranks")
    right.legend()
    figure.savefig(path, dpi=150)


DRAWN = {
    "checker": draw_checker,
    "compiled": draw_compiled,
    "data": draw_data,
    "elastic": draw_elastic,
    "exact": draw_exact,
    "fitting": draw_fitting,
    "influence": draw_influence,
    "loop": draw_loop,
    "mesh": draw_mesh,
    "nodes": draw_nodes,
    "memory": draw_memory,
    "modules": draw_modules,
    "optimizers": draw_optimizers,
    "plan": draw_plan,
    "schedule": draw_schedule,
    "show": draw_show,
    "spectrum": draw_spectrum,
    "strategies": draw_strategies,
}


def main() -> None:
    options = argparse.ArgumentParser(description="Draw the measured pictures of the documentation.")
    options.add_argument("names", nargs="*", choices=[*DRAWN, []], help="default: all")
    for name in options.parse_args().names or DRAWN:
        DRAWN[name](HERE / f"{name}.png")


if __name__ == "__main__":
    main()
