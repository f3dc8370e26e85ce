"""`python -m shardfn.testing`: measures what worlds cost on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardfn.testing.world import Kind, World


def sum_of_ones() -> float:
    """Runs a small all-reduce."""
    x = torch.ones(8, device="cpu")
    dist.all_reduce(x)
    return float(x[0])


def fail() -> None:
    """Raises an error, after which a world restarts."""
    raise ValueError("on purpose")


def main() -> None:
    """Prints a table of worlds."""
    ready = _seconds(lambda: World(1).run(int))
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; importing torch for the ranks, once: {ready:.1f} s")
    print("milliseconds for a run of a small all-reduce")
    print(f"{'world':<22}{'first':>10}{'started':>10}{'after a failure':>18}")
    plan: list[tuple[int, Kind]] = [(1, "processes"), (2, "processes"), (4, "processes"), (2, "threads")]
    for size, kind in [*plan, (4, "threads"), (4096, "fake")]:
        with World(size, kind=kind) as world:
            start = _seconds(lambda: world.run(sum_of_ones))
            run = _seconds(lambda: [world.run(sum_of_ones) for _ in range(100)]) / 100
            world.errors(fail)
            restart = _seconds(lambda: world.run(sum_of_ones))
        print(f"{size:>5} {kind:<16}{1e3 * start:>10.1f}{1e3 * run:>10.1f}{1e3 * restart:>18.1f}")


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
