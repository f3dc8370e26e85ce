"""Threads and workers end with their iterator; what they cannot read is said at its step; copies run beside a step."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import shardfn as sf
from shardfn.run.feeding import ahead
from shardfn.run.stepping import Stepping
from shardfn.testing import World, WorldError, simulated, world
from tests.refusals import told

CPU = torch.device("cpu")


class Rows(Dataset[Any]):
    """Row i is i, but for one, at which something happens."""

    def __init__(self, at: int = -1, act: Callable[[], Any] | None = None) -> None:
        self.at, self.act = at, act

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> Any:
        if row == self.at and self.act is not None:
            self.act()
        return row


def fail() -> None:
    raise OSError("the disk is gone")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def made(source: Any, **more: Any) -> sf.run.Batches:
    mesh = sf.make_mesh(data=-1, device="cpu")
    return sf.run.batches(source, mesh, "data", 8, 0, shuffle=False, **more)


def threads() -> int:
    return sum(thread.name == "shardfn-feed" for thread in threading.enumerate())


def children() -> set[int]:
    listed = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    tasks = [task / "children" for task in Path("/proc/self/task").iterdir()] if listed.exists() else []
    found = set()
    for path in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            found |= {int(pid) for pid in path.read_text().split()}
    return found


def gone(before: set[int], within: float = 10) -> bool:
    """Whether threads and processes have ended, soon."""
    gc.collect()
    end = time.monotonic() + within
    while (threads() or children() - before) and time.monotonic() < end:
        time.sleep(0.02)
    return not threads() and not children() - before


def left(workers: int) -> list[bool]:
    before, found = children(), []
    batches = made(Rows() if workers else torch.arange(64), workers=workers)
    for _ in batches:  # and the loop ends early
        found.append(threads() == 1 and len(children() - before) == workers)
        break
    found.append(gone(before))
    iterator = batches(3)
    next(iterator)
    del iterator
    found.append(gone(before))
    batches(0)
    found.append(len(list(made(Rows(), workers=workers, epochs=1))) == 8)
    return [*found, gone(before)]


def closed(workers: int) -> list[bool]:
    """Whether rows of a run that are closed have ended, though an error still knows them."""
    before, found = children(), []
    batches = made(Rows() if workers else torch.arange(64), workers=workers)
    loader = torch.utils.data.DataLoader(Rows(), 8, num_workers=2)
    for given in (batches, lambda start: itertools.islice(iter(loader), start, None)):
        rows = Stepping(None, given, 0, 0, 8).rows(1)
        try:
            next(rows)
            raise ValueError("a step failed")
        except ValueError as error:
            found.append(not gone(before, 0.1))
            rows.close()
            found += [gone(before, 2), error.__traceback__ is not None, next(rows, None) is None]
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_and_workers_end_when_rows_are_closed(workers: int) -> None:
    assert world(1).run(closed, workers) == [[True] * 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_and_workers_end_with_the_iterator(workers: int) -> None:
    assert world(1).run(left, workers) == [[True] * 5]


def failures(act: Callable[[], None]) -> tuple[int, str, bool]:
    """How many batches there were before the error, what it says, and whether all have ended."""
    before, batches = children(), made(Rows(20, act), workers=2)
    found: list[Any] = []
    text = told(lambda: found.extend(batches))
    return len(found), text, gone(before)


@pytest.mark.world(2)
def test_a_worker_that_fails_is_an_error_at_its_step_on_every_rank(world: World) -> None:
    for count, text, ended in world.run(failures, fail):
        assert (count, ended) == (2, True)
        assert "OSError: Caught OSError in DataLoader worker process" in text
        assert "row 20 of the source, Rows, was read" in text


@pytest.mark.world(2)
def test_a_worker_that_is_killed_is_an_error_on_every_rank(world: World) -> None:
    for count, text, ended in world.run(failures, die):
        assert (count <= 2, ended) == (True, True)
        assert "RuntimeError" in text
        assert "worker" in text


def test_an_error_comes_after_what_was_read_before_it() -> None:
    def some() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("gone")

    found: list[int] = []
    assert told(lambda: found.extend(ahead(some, 4, CPU))) == "OSError: gone"
    assert (found, gone(children())) == ([1, 2], True)


def test_so_many_are_read_ahead() -> None:
    read: list[int] = []

    def count() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    iterator = ahead(count, 3, CPU)
    assert not read
    assert next(iterator) == 0
    end = time.monotonic() + 10
    while len(read) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)  # in which it would read more
    assert len(read) == 5  # the first, three that wait, and one in its hands
    iterator.close()
    assert gone(children())


def lonely(victim: int) -> list[Any]:
    seen = []
    for step, batch in enumerate(made(torch.arange(64))):
        if step == 3 and torch.distributed.get_rank() == victim:
            os._exit(3)
        seen.append(batch)
        if step == 6:
            break
    return seen


@pytest.mark.world(2)
def test_a_rank_that_dies_leaves_nobody_waiting(world: World) -> None:
    with pytest.raises(WorldError, match="rank 1"):  # a hang would be a WorldTimeout
        world.with_deadline(50).run(lonely, 1)


ORPHANS = """
import os, sys, torch
import shardfn as sf
batches = sf.run.batches(list(range(64)), sf.make_mesh(data=1, device="cpu"), "data", 8, 0, workers=2)
iterator = iter(batches)
next(iterator)
print("reading", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "raise ValueError('by itself')", "pass"])
def test_workers_do_not_outlive_their_process(end: str) -> None:
    command = [sys.executable, "-c", ORPHANS.format(end=end)]
    # Whoever holds the pipe is alive: reading it to its end waits for the workers, too.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "reading\n"
    assert (done.returncode, "by itself" in done.stderr) == {"o": (-9, False), "r": (1, True), "p": (0, False)}[end[0]]


GROUP = """
import os, signal, time
import shardfn as sf
class Rows:
    def __len__(self):
        return 64
    def __getitem__(self, row):  # so slowly that few are read ahead
        time.sleep(0.005)
        return row
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)
batches = sf.run.batches(Rows(), sf.make_mesh(data=1, device="cpu"), "data", 8, 0, workers=2, prefetch=1, epochs=1)
for step, batch in enumerate(batches):
    if step < 2:
        os.killpg(0, (signal.SIGUSR1, signal.SIGTERM)[step])
print("read", step)
"""


def test_a_signal_to_all_of_a_process_group_leaves_workers_alone() -> None:
    done = subprocess.run([sys.executable, "-c", GROUP], capture_output=True, text=True, timeout=60, process_group=0)
    assert done.stdout == "read 7\n", done.stderr


def on_the_device(prefetch: int) -> Any:
    with simulated(ranks=1) as device:
        mesh = sf.make_mesh(data=1, device=device.name)
        source = {"x": torch.arange(64.0).view(32, 2), "y": torch.arange(32)}
        batches = sf.run.batches(source, mesh, "data", 8, 0, remainder="pad", prefetch=prefetch)
        iterator = iter(batches)
        next(iterator)
        device.reset_counts()
        kinds = [(x.device.type, tuple(x.shape), x.dtype) for _ in range(5) for x in next(iterator).values()]
        iterator.close()
        return set(kinds), device.synchronizations, device.races, threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_come_to_the_device_without_a_wait(prefetch: int) -> None:
    (found,) = world(1, "alone").run(on_the_device, prefetch)
    kinds, waits, races, alive = found
    assert kinds == {("sim", (8, 2), torch.float32), ("sim", (8,), torch.int64), ("sim", (8,), torch.bool)}
    assert (waits, races, alive) == ([], [], 0)
