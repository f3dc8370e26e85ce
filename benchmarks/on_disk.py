"""A model whose training state is several times the memory limit of its processes, compared with training in memory.

    OMP_NUM_THREADS=1 python -m benchmarks.tiers --only state

A Llama with 351 million parameters in float32 and AdamW, 5.6 GB in all, on two ranks with gloo; layers are recomputed
in backward. Parameters, gradients and optimizer state are on disk, and the operating system limits the memory of each
rank (RLIMIT_DATA). Another pair of processes trains the same model in memory, without a limit, in turn with the first
pair. A third pair shows that training in memory fails under the limit.

The memory of a rank is its peak resident memory (VmHWM), including Python, torch and mapped pages of files. The bytes
that a step reads and writes come from a formula, and from the kernel's counters. The bandwidth of the disk is measured
in turn with the steps: reads and writes in the same proportion, by both ranks at once, in the same folder. A step takes
at least the time of its computation, and at least the time of its reads and writes. Since gradients are complete before
the optimizer begins, this bound also holds for gradients and optimizer separately.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage
from benchmarks.disk import Bare, moved
from benchmarks.model import SEED, Config, Params, makers, rope_table, staged, tokens
from benchmarks.report import Goal
from shardfn import P

RANKS, RATE = 2, 1e-3
LARGE = Config(vocabulary=16384, width=1024, layers=24, heads=16, hidden=2944, batch=1)
TINY = Config(vocabulary=256, width=64, layers=3, heads=2, hidden=128, batch=1)
# Large blocks of memory go back to the system when they are freed, so that resident memory is memory in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
MB, GB = 1e6, 1e9


def strategy(on_disk: bool) -> sf.Strategy:
    cut = sf.full_shard("data")
    return cut.with_tiers(params="disk", grads="disk", state="disk") if on_disk else cut


@dataclass
class Training:
    """The training of a model.

    Attributes:
        seconds: the times of gradients and of the optimizer, for each step.
        steps: step functions by number of tokens per rank; the first call of each is checked.
    """

    config: Config
    folder: str | None
    seconds: list[tuple[float, float]] = field(default_factory=list)
    steps: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh = sf.make_mesh(data=-1, device="cpu", scratch=self.folder)
        self.params = sf.init_sharded(makers(self.config), SEED, self.mesh, strategy(self.folder is not None))
        self.optimizer = so.adamw(RATE)
        self.state = self.optimizer.init(self.params)
        self.local_loss = staged(self.config, remat=True)

    def step(self, context: int) -> float:
        """Trains one step on so many tokens per rank; returns this rank's loss."""
        config = replace(self.config, context=context)
        if context not in self.steps:
            self.steps[context] = self.mapped(config)
        found = self.steps[context](self.params, self.state, tokens(config, dist.get_rank()))
        loss, self.params, self.state = found
        return float(loss) * self.mesh.size()

    def mapped(self, config: Config) -> Callable[..., Any]:
        """A step function for the number of tokens in a configuration."""
        rope = rope_table(config, torch.float32)

        def loss_fn(params: Params, rows: Tensor) -> Tensor:
            return self.local_loss(params, rows, rope) / self.mesh.size()

        def trained(params: Params, state: Any, rows: Tensor) -> Any:
            times = [time.perf_counter()]
            loss, grads = sf.value_and_grad(loss_fn)(params, rows)
            times.append(time.perf_counter())
            found = loss, *self.optimizer.step(params, grads, state)
            times.append(time.perf_counter())
            self.seconds.append((times[1] - times[0], times[2] - times[1]))
            return found

        return sf.shard_map(trained, mesh=self.mesh, in_specs=(..., ..., P("data")), out_specs=(..., ..., ...))

    def formula(self) -> tuple[int, int]:
        """Bytes that a rank reads and writes in a step.

        Forward reads every stage; backward reads the layers, except for the last, which is still in memory, and not the
        embedding. Gradients are written, and read by the optimizer, which also reads and writes parameters and both
        moments.
        """
        whole = nbytes(self.params)
        again = nbytes(self.params["blocks"][:-1])
        return whole + again + whole + whole + 2 * whole, whole + whole + 2 * whole


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in optree.tree_leaves(tree) if isinstance(x, Tensor))


# --- on each rank ---


def built(usage: Usage, config: Config, folder: str | None, limit: float | None) -> dict[str, Any]:
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    usage.again()
    training = Training(config, folder)

    def train(context: int, steps: int) -> dict[str, Any]:
        training.seconds.clear()
        before, losses, whole = moved(), [], []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            losses.append(training.step(context))
            dist.barrier()
            whole.append(time.perf_counter() - began)
        return {
            "losses": losses,
            "seconds": whole,
            "parts": list(training.seconds),
            "moved": [(b - a) / steps for a, b in zip(before, moved(), strict=True)],
        }

    return {
        "train": train,
        "formula": training.formula,
        "peak": lambda: (usage.peak() + usage.base) / MB,
        "kept": lambda: 4 * nbytes(training.params) / MB,
    }


def bare(usage: Usage, folder: str, nbytes: int) -> dict[str, Any]:
    """The disk alone, while the other ranks use it too."""
    del usage
    disk = Bare(folder, nbytes)

    def bandwidth(read: float, written: float) -> float:
        """Bytes per second on this rank, with reads and writes in this proportion."""
        share = 2 * nbytes / (read + written)
        dist.barrier()
        return 2 * nbytes / disk.seconds(read * share, written * share)

    return {"bandwidth": bandwidth}


def limited(usage: Usage, config: Config, limit: float) -> dict[str, Any]:
    del usage
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    return {"train": lambda context: Training(config, None).step(context)}


# --- the rows ---


def refused(config: Config, limit: float, context: int) -> str:
    """The error of training in memory under the limit; empty if it succeeds."""
    try:
        with Crew(RANKS, limited, config, limit, environment=ENVIRONMENT) as crew:
            crew.turn("train", context)
    except (RuntimeError, MemoryError, OSError) as error:
        return str(error).strip().splitlines()[-1]
    return ""


@dataclass
class Times:
    """Measurements of one system, for one number of tokens per rank.

    Attributes:
        losses: of the ranks, for each step.
        whole: seconds of each step, on the slower rank.
        parts: seconds of gradients and of the optimizer.
        moved: bytes read and written, as the kernel counts them.
    """

    losses: list[list[float]] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    parts: list[tuple[float, ...]] = field(default_factory=list)
    moved: list[list[float]] = field(default_factory=list)

    def add(self, found: list[dict[str, Any]], counts: bool) -> None:
        """Adds the ranks' results; only their losses, if the steps are a warm-up."""
        self.losses += map(list, zip(*(each["losses"] for each in found), strict=True))
        if counts:
            self.whole += map(max, *(each["seconds"] for each in found))
            self.parts += [tuple(map(max, *both)) for both in zip(*(each["parts"] for each in found), strict=True)]
            self.moved += [each["moved"] for each in found]

    def part(self, which: int) -> float:
        return statistics.median(each[which] for each in self.parts)


def state(
    config: Config, folder: str, contexts: list[int], rounds: int, limit: float, file: int
) -> tuple[list[dict[str, Any]], list[Goal]]:
    """The rows of both systems for each number of tokens, and the goals."""
    names = {"in memory": None, "on disk": limit}
    found = {(name, context): Times() for name in names for context in contexts}
    speeds: list[float] = []
    with ExitStack() as stack:
        crews = {
            name: stack.enter_context(Crew(RANKS, built, config, folder if of else None, of, environment=ENVIRONMENT))
            for name, of in names.items()
        }
        disk = stack.enter_context(Crew(RANKS, bare, folder, file, environment=ENVIRONMENT))
        formula = crews["on disk"].turn("formula")[0]
        for number in range(rounds + 1):  # the first is a warm-up
            for context in contexts:
                for name, crew in crews.items():
                    found[name, context].add(crew.turn("train", context, 1), number > 0)
                speeds.append(RANKS * min(disk.turn("bandwidth", *formula)))
        peaks = {name: max(crew.turn("peak")) for name, crew in crews.items()}
        kept = sum(crews["on disk"].turn("kept"))
    answer = refused(config, limit, contexts[0])
    speed = statistics.median(speeds)
    rows = [row(name, context, found, speed, formula, peaks) for context in contexts for name in names]
    goals = [
        Goal("resident memory of a rank, everything included, GB", peaks["on disk"] * MB / GB, 1.2),
        Goal("training in memory under the same limit (0: refused)", float(not answer), 0),
        *(goal for context in contexts for goal in against(context, found, speed, formula)),
    ]
    about = {
        "the state": f"{kept / 1e3:.2f} GB on {RANKS} ranks",
        "limit": f"RLIMIT_DATA {limit / GB:.2f} GB a rank",
        "in memory under it": answer or "it trains",
        "the disk by itself": f"{speed / GB:.2f} GB/s ({min(speeds) / GB:.2f} to {max(speeds) / GB:.2f})",
    }
    return [about, *rows], goals


Found = dict[tuple[str, int], Times]


def row(
    name: str, context: int, found: Found, speed: float, formula: tuple[int, int], peaks: dict[str, float]
) -> dict[str, Any]:
    times, here = found[name, context], name == "in memory"
    seconds = statistics.median(times.whole)
    counted = statistics.median(map(sum, times.moved)) if times.moved else 0.0
    return {
        "training": name,
        "tokens a rank": context,
        "step s": seconds,
        "gradients s": times.part(0),
        "optimizer s": times.part(1),
        "resident MB": peaks[name],
        "moved GB a rank": 0.0 if here else sum(formula) / GB,
        "by the kernel": counted / GB,
        "disk alone s": 0.0 if here else RANKS * sum(formula) / speed,
        "/ max": seconds / bound(context, found, speed, formula),
        "/ max of parts": seconds / bound_of_parts(context, found, speed, formula),
        "last loss": f"{statistics.fmean(times.losses[-1]):.6f}",
    }


def bound(context: int, found: Found, speed: float, formula: tuple[int, int]) -> float:
    return max(statistics.median(found["in memory", context].whole), RANKS * sum(formula) / speed)


def bound_of_parts(context: int, found: Found, speed: float, formula: tuple[int, int]) -> float:
    """The bound of gradients, plus that of the optimizer, which reads four numbers per element and writes three."""
    optimizer = formula[1] * 7 / 4
    of = found["in memory", context]
    return sum(
        max(of.part(which), RANKS * moves / speed)
        for which, moves in enumerate((sum(formula) - optimizer, optimizer))
    )  # fmt: skip


def against(context: int, found: Found, speed: float, formula: tuple[int, int]) -> list[Goal]:
    ours, memory = found["on disk", context], found["in memory", context]
    same = sum(a != b for a, b in zip(ours.losses, memory.losses, strict=True))
    off = max(abs(sum(each) / sum(formula) - 1) for each in ours.moved)
    seconds = statistics.median(ours.whole)
    return [
        Goal(f"{context} tokens: losses that differ from those in memory", same, 0),
        Goal(f"{context} tokens: bytes by the kernel, off the formula", off, 0.02),
        Goal(
            f"{context} tokens: step / max(in memory, bytes / disk)",
            seconds / bound(context, found, speed, formula),
            1.15,
        ),
    ]
