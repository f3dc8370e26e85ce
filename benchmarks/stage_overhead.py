"""The host time of a stage in addition to its computation, forward and backward, for shardfn and for FSDP2.

    OMP_NUM_THREADS=1 python -m benchmarks.stage_overhead
    OMP_NUM_THREADS=1 python -m benchmarks.stage_overhead --calls
    OMP_NUM_THREADS=1 python -m benchmarks.stage_overhead --compiled

A fake group sends nothing, and tensors are tiny, so the time is that of Python and the dispatcher: CPU seconds of one
process. From each system's time, the time of the same functions on plain tensors is subtracted; their gradients are
taken in the same way. `--calls` counts the calls of functions in place of time, which is the same on every machine.
`--compiled` compares `sf.compile` of the whole step with FSDP2 around compiled blocks, and subtracts compiled blocks.
"""

from __future__ import annotations

import cProfile
import functools
import time
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardfn as sf
from benchmarks.model import Params, Stage
from benchmarks.report import Goal, interleaved, parser, publish
from shardfn.testing import World

RANKS, LAYERS, WIDTH = 8, 32, 16
NAMES = ("norm1", "q", "k", "v", "out", "norm2", "gate", "up", "down")


def block(p: Params, x: Tensor) -> Tensor:
    h = F.rms_norm(x, (WIDTH,), p["norm1"])
    attended = torch.softmax((h @ p["q"]) @ (h @ p["k"]).mT, -1) @ (h @ p["v"])
    x = x + attended @ p["out"]
    h = F.rms_norm(x, (WIDTH,), p["norm2"])
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def layer(g: torch.Generator) -> Params:
    return {n: torch.ones(WIDTH) if "norm" in n else torch.randn(WIDTH, WIDTH, generator=g) / 8 for n in NAMES}


def functional(function: Callable[[Params, Tensor], Tensor], x: Tensor) -> Callable[[Any], Any]:
    def loss(blocks: Any) -> Tensor:
        y = x
        for p in sf.layers(blocks):
            y = function(p, y)
        return y.sum()

    return sf.value_and_grad(loss)


def modular(blocks: list[Params], x: Tensor, sharded: bool, compiled: bool = False) -> Callable[[], None]:
    model = nn.Sequential(*(Stage(block, p) for p in blocks))
    for each in model:
        if compiled:
            each.compile()
        if sharded:
            fully_shard(each)
    if sharded:
        fully_shard(model)

    def run() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return run


def calls(run: Callable[[], Any]) -> float:
    """How many functions of Python, and of C that Python calls, one run calls."""
    profile = cProfile.Profile()
    profile.runcall(run)
    return sum(entry.callcount for entry in profile.getstats())


def measure(repeats: int | None, inner: int, device: str = "cpu", compiled: bool = False) -> dict[str, float]:
    """Seconds of the host for a run of each kind, or, if `repeats` is None, calls."""
    torch.set_num_threads(1)
    mesh = sf.make_mesh(data=RANKS, device=device)
    makers, x = [layer] * LAYERS, torch.randn(4, WIDTH, device=device)
    blocks = sf.init_sharded({"blocks": makers}, 0, mesh, sf.full_shard("data"))["blocks"]

    def whole() -> list[Params]:
        return optree.tree_map(lambda p: p.to(device), sf.init(makers, 0))

    on_shards, plain = functional(sf.stage(block), x), modular(whole(), x, False, compiled)
    if compiled:
        on_shards = sf.compile(sf.shard_map(on_shards, mesh=mesh, in_specs=..., out_specs=...))
    runs = {
        "shardfn": functools.partial(on_shards, blocks),
        "shardfn plain": plain if compiled else functools.partial(functional(block, x), whole()),
        "FSDP2": modular(whole(), x, True, compiled),
        "FSDP2 plain": plain,
    }

    def steps() -> dict[str, float]:
        if times is None:
            return {name: calls(run) for name, run in runs.items()}
        return interleaved(runs, repeats=times, inner=inner, clock=time.process_time)

    if not compiled:  # a compiled step is mapped itself
        steps = sf.shard_map(steps, mesh=mesh, in_specs=(), out_specs=...)
    times: int | None = 2
    steps()  # the first call is checked, the second one of a compiled step traced
    times = repeats
    return dict(steps())


def told(took: dict[str, float], counted: bool, compiled: bool = False) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Rows and goals of what `measure` found, for one stage."""
    unit, scale = ("calls", 1.0) if counted else ("us", 1e6)
    each = {name: of_all / LAYERS * scale for name, of_all in took.items()}
    rows = [
        {
            "system": name,
            f"sharded {unit}": each[name],
            f"plain {unit}": each[f"{name} plain"],
            f"overhead {unit}": each[name] - each[f"{name} plain"],
        }
        for name in ("shardfn", "FSDP2")
    ]
    ours, theirs = (float(row[f"overhead {unit}"]) for row in rows)
    most = (500, 0.22) if counted else (200, 0.22) if compiled else (250, 0.25)
    return rows, [Goal(f"shardfn, {unit}", ours, most[0]), Goal("shardfn / FSDP2", ours / theirs, most[1])]


def main() -> None:
    options = parser("Host time of a stage, forward and backward, compared with the same functions on plain tensors.")
    options.add_argument("--repeats", type=int, default=21)
    options.add_argument("--calls", action="store_true", help="count calls of functions in place of time")
    options.add_argument("--compiled", action="store_true", help="the whole step compiled, and FSDP2's blocks")
    args = options.parse_args()
    repeats = None if args.calls else args.repeats
    (took,) = World(RANKS, kind="fake", deadline=600).run(measure, repeats, 3, "cpu", args.compiled)
    title = f"one of {LAYERS} stages of {len(NAMES)} parameters, forward + backward, fake group of {RANKS}"
    publish(title, *told(took, args.calls, args.compiled), args.json)


if __name__ == "__main__":
    main()
