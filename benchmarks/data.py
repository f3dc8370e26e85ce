"""Feeding a run: how much of a slow source's time a step waits, and the cost of a batch compared with torch's loader.

    python -m benchmarks.data

The step is a pause, like that of a host thread while an accelerator computes. The slow source is a dataset, read by one
worker process, which takes half of that time for a batch. For comparison, the same step gets its batches from a list.
Then tensors and token files are read, in turn with a `DataLoader` that has a `DistributedSampler`; both run in one
process without workers, so that only the work per batch is compared.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import shardfn as sf
from benchmarks.report import Goal, interleaved, parser, publish
from shardfn.run.tokens import HEADER
from shardfn.testing import world


class Slow(Dataset[Any]):
    """Rows that take some time to read, per batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, row: int) -> Tensor:
        return torch.full((16,), row)

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        time.sleep(self.seconds)
        return [self[row] for row in rows]


class Memmap(Dataset[Any]):
    """Windows of a token file, as training scripts read them."""

    def __init__(self, tokens: Any, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, row: int) -> Tensor:
        first = row * self.context
        return torch.from_numpy(self.tokens[first : first + self.context + 1].astype(np.int64))


def forever(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from make()


def peer(data: Dataset[Any], batch: int) -> Iterator[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    return forever(lambda: iter(DataLoader(data, batch, sampler=sampler)))


def hidden(step: float, read: float, steps: int) -> dict[str, Any]:
    """Times of a step whose source takes `read` seconds per batch, and of one whose batches are ready."""
    mesh = sf.make_mesh(data=1, device="cpu")
    slow = iter(sf.run.batches(Slow(read), mesh, "data", 8, 0, workers=1))
    ready = itertools.cycle([torch.full((8, 16), row) for row in range(4)])
    next(slow)  # the worker has started
    found: dict[str, list[float]] = {"slow": [], "ready": []}
    for _ in range(steps):
        for name, batches in (("ready", ready), ("slow", slow)):
            for number in range(20):
                began = time.perf_counter()
                next(batches)
                time.sleep(step)
                if number >= 10:  # skip batches that the worker read ahead during the other's turn
                    found[name].append(time.perf_counter() - began)
    ms = {name: statistics.median(seconds) * 1e3 for name, seconds in found.items()}
    return {
        "a step of": f"{step * 1e3:.0f} ms, and {read * 1e3:.0f} ms to read its batch",
        "ms with ready batches": ms["ready"], "ms with the slow source": ms["slow"],
        "slow / ready": ms["slow"] / ms["ready"],
    }  # fmt: skip


def costs(folder: str, tiny: bool) -> list[dict[str, Any]]:
    """Microseconds per batch, of shardfn and of torch's loader."""
    mesh = sf.make_mesh(data=1, device="cpu")
    rows, tokens = (2000, 100_000) if tiny else (100_000, 20_000_000)
    x, y = torch.randn(rows, 128), torch.arange(rows)
    path = Path(folder, "tokens")
    drawn = np.random.default_rng(0).integers(0, 50_000, tokens)
    sf.run.write_tokens(path, np.array_split(drawn, 100), "uint16", separator=0)
    mapped = np.memmap(path, np.uint16, "r", HEADER, (sf.run.TokenFile(path).count,))
    table = []
    for name, ours, theirs, batch in (
        ("tensors, 64 rows of 128 floats", (x, y), TensorDataset(x, y), 64),
        ("token file, 8 rows of 1024", sf.run.token_windows(path, 1024), Memmap(mapped, 1024), 8),
    ):
        runs = {
            "by a thread": iter(sf.run.batches(ours, mesh, "data", batch, 0)),
            "no thread": iter(sf.run.batches(ours, mesh, "data", batch, 0, prefetch=0)),
            "peer": peer(theirs, batch),
        }
        for run in runs.values():
            next(run)
        calls = {kind: lambda run=run: next(run) for kind, run in runs.items()}
        seconds = interleaved(calls, repeats=3 if tiny else 15, inner=20 if tiny else 100)  # type: ignore[arg-type]
        us = {kind: value * 1e6 for kind, value in seconds.items()}
        table.append(
            {
                "us of a batch": name, "shardfn, by a thread": us["by a thread"], "shardfn, no thread": us["no thread"],
                "DataLoader + DistributedSampler": us["peer"], "shardfn / theirs": us["no thread"] / us["peer"],
            }
        )  # fmt: skip
    return table


def exchanged(steps: int) -> float:
    """Microseconds per batch on this rank, including communication between ranks."""
    batches = iter(sf.run.batches(torch.randn(4096, 128), sf.make_mesh(data=-1, device="cpu"), "data", 64, 0))
    for _ in range(10):
        next(batches)
    began = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return (time.perf_counter() - began) / steps * 1e6


def main() -> None:
    options = parser("Feeding a run: a slow source behind the step, and the cost of a batch.")
    options.add_argument("--tiny", action="store_true", help="little data and few steps, to try the command")
    args = options.parse_args()
    behind = hidden(0.04, 0.02, 3 if args.tiny else 15)
    with tempfile.TemporaryDirectory() as folder:
        table = costs(folder, args.tiny)
    many = 50 if args.tiny else 1000
    ranks = [
        {"ranks": size, "us of a batch of tensors": statistics.median(world(size).run(exchanged, many))}
        for size in (1, 2)
    ]  # fmt: skip
    goals = [
        Goal("step with the slow source / with ready batches", behind["slow / ready"], 1.02),
        *(Goal(f"{row['us of a batch']}: shardfn / theirs", row["shardfn / theirs"], 1.0) for row in table),
    ]
    publish("feeding a run", [behind, *table, *ranks], goals, args.json)


if __name__ == "__main__":
    main()
