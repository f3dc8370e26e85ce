"""Saving and loading training state on 4 ranks, compared with FSDP2 and torch.distributed.checkpoint.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoint

The state is a GPT with 34 million parameters and AdamW's two moments in float32, sharded over the ranks: 408 MB. Both
systems write files of the same format to the same disk, and wait until they are written. They take turns; times are
medians of the slowest rank. Memory is a rank's peak in its first calls, above what it had before them with the model in
place; the allocator gives freed memory back to the system. The pause is the time of the call that saves in the
background.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage
from benchmarks.model import SEED, Config, Whole, makers
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import RATE, fully_sharded
from shardfn import checkpoint

RANKS = 4
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
OPS = ("save", "load", "pause")
TINY = Config(width=32, heads=2, layers=2, hidden=64, vocabulary=64)


def built_shardfn(usage: Usage, config: Config) -> dict[str, Callable[..., Any]]:
    mesh = sf.make_mesh(data=-1, device="cpu")
    params = sf.init_sharded(makers(config), SEED, mesh, sf.full_shard("data"))
    state = {"model": params, "optim": so.adamw(RATE).init(params), "step": 0}

    def load(path: str) -> None:
        nonlocal state
        state = checkpoint.load(path, state)

    return {
        "save": lambda path: measured(usage, lambda: checkpoint.save(path, state)),
        "load": lambda path: measured(usage, lambda: load(path)),
        "pause": lambda path: measured(usage, lambda: checkpoint.save_async(path, state)),
        "finish": checkpoint.wait_for_saves,
        "now": lambda: usage.again() - usage.base,
    }


def built_fsdp2(usage: Usage, config: Config) -> dict[str, Callable[..., Any]]:
    model = fully_sharded(Whole(config, lambda stage, _: fully_sharded(stage)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    pending: list[Any] = []
    group = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments, "step": 0}

    def load(path: str) -> None:
        found = state()
        state_dict_loader.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    def pause(path: str) -> None:
        pending.append(state_dict_saver.async_save(state(), checkpoint_id=path, process_group=group))

    def finish() -> None:
        while pending:
            pending.pop().result()

    return {
        "save": lambda path: measured(usage, lambda: state_dict_saver.save(state(), checkpoint_id=path)),
        "load": lambda path: measured(usage, lambda: load(path)),
        "pause": lambda path: measured(usage, lambda: pause(path)),
        "finish": finish,
        "now": lambda: usage.again() - usage.base,
    }


def measured(usage: Usage, call: Callable[[], Any]) -> tuple[float, float]:
    """The seconds of a call, and its peak bytes above those of the imports."""
    dist.barrier()
    usage.again()
    began = time.perf_counter()
    call()
    took = time.perf_counter() - began
    return took, usage.peak()


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def rounds_of(crews: dict[str, Crew], count: int, folder: Path) -> list[dict[str, Any]]:
    seconds: dict[tuple[str, str], list[float]] = {}
    memory: dict[tuple[str, str], float] = {}
    sizes: dict[str, int] = {}
    began = {name: crew.turn("now") for name, crew in crews.items()}
    for number in range(count + 1):
        for name, crew in crews.items():
            path = folder / f"{number} {name}"
            for op in OPS:
                target = path if op != "pause" else folder / f"{number} {name} later"
                found = crew.turn(op, str(target))
                if op == "pause":
                    crew.turn("finish")
                if number:  # the first round warms up
                    seconds.setdefault((name, op), []).append(max(took for took, _ in found))
                else:
                    memory[name, op] = max(peak - base for (_, peak), base in zip(found, began[name], strict=True))
                if op == "save":
                    sizes[name] = size_of(path)
            for used in folder.iterdir():
                shutil.rmtree(used)
    return [
        {
            "system": name,
            **{f"{op} ms": statistics.median(seconds[name, op]) * 1e3 for op in OPS},
            **{f"{op} peak MB": memory[name, op] / 1e6 for op in ("save", "load")},
            "MB on disk": sizes[name] / 1e6,
        }
        for name in crews
    ]


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    ours, theirs = rows
    found = [
        Goal(f"{what} / FSDP2 + DCP", ours[column] / theirs[column], 1.0)
        for what, column in (
            ("time to save", "save ms"), ("time to load", "load ms"), ("peak memory of saving", "save peak MB"),
            ("peak memory of loading", "load peak MB"), ("bytes", "MB on disk"),
        )
    ]  # fmt: skip
    return [*found, Goal("pause of a save in the background / save", ours["pause ms"] / ours["save ms"], 0.10)]


def main() -> None:
    options = parser("Saving and loading on 4 ranks, next to FSDP2 with torch.distributed.checkpoint.")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    args = options.parse_args()
    config = TINY if args.tiny else Config()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        crews = {
            "shardfn": stack.enter_context(Crew(RANKS, built_shardfn, config, environment=GIVES_BACK)),
            "FSDP2 + DCP": stack.enter_context(Crew(RANKS, built_fsdp2, config, environment=GIVES_BACK)),
        }
        rows = rounds_of(crews, args.rounds, folder)
    publish(f"a checkpoint of training state, {RANKS} ranks", rows, goals_of(rows), args.json)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
