"""Groups of processes that take turns, so that several systems can be measured side by side.

Each system has its own processes, so no system's memory counts for another. Processes that are waiting for their turn
are blocked in a read, and take no CPU time.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist

_variables: dict[str, str] = {}  # environment variables that the fork server was started with


class Crew:
    """The processes of one system.

    Args:
        ranks: the number of processes.
        build: called in each process after its process group is initialized; returns functions by name.
        *args: arguments of `build`.
        environment: environment variables of the processes; all crews of a program must have the same.
    """

    def __init__(
        self,
        ranks: int,
        build: Callable[..., dict[str, Callable[..., Any]]],
        *args: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        # A fork server has already imported this program, so a crew starts in a second.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shardfn"])  # the program that -m runs is not preloaded automatically
        variables = {"OMP_NUM_THREADS": "1"} | (environment or {})
        if _variables and _variables != variables:
            raise ValueError(f"all crews of a program start with the same variables: {_variables}, not {variables}")
        _variables.update(variables)
        before = dict(os.environ)
        os.environ.update(variables)
        self._folder = tempfile.TemporaryDirectory()
        self._ends, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            given = (theirs, Path(self._folder.name, "store").as_uri(), rank, ranks, build, args)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        os.environ.clear()
        os.environ.update(before)
        self._answers()

    def turn(self, name: str, *args: Any) -> list[Any]:
        """Runs the function of that name on all ranks at once; returns its results by rank."""
        for end in self._ends:
            end.send((name, args))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._ends):
            waiting = [end for end in self._ends if end not in answers]
            for end in cast("list[Connection]", wait(waiting)):
                try:
                    answers[end] = end.recv()
                except EOFError:
                    raise RuntimeError(f"rank {self._ends.index(end)} died") from None
                if isinstance(answers[end], BaseException):
                    raise answers[end]
        return [answers[end] for end in self._ends]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            if error is not None:
                process.kill()
            process.join()
        self._folder.cleanup()


def in_turns(
    trains: dict[str, Callable[[], list[Any]]], rounds: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The median milliseconds of a step of each system, and the losses of its steps, the means over its ranks.

    Args:
        trains: functions that return the seconds and the losses of some steps, by rank; they take turns.
        rounds: the number of turns, after one that is a warm-up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in trains}
    losses: dict[str, list[float]] = {name: [] for name in trains}
    for number in range(rounds + 1):
        for name, train in trains.items():
            times, found = (list(zip(*each, strict=True)) for each in zip(*train(), strict=True))
            seconds[name] += map(max, times) if number else []
            losses[name] += map(statistics.fmean, found)
    return {name: statistics.median(each) * 1e3 for name, each in seconds.items()}, losses


@dataclass
class Usage:
    """The resources that this process has used since this object was made.

    Attributes:
        base: bytes of memory with only the imports and the process group.
        idle: CPU seconds used between turns.
        waited: seconds between turns.
    """

    base: float = field(default_factory=lambda: _reset())
    idle: float = 0.0
    waited: float = 0.0

    def peak(self) -> float:
        """The peak bytes so far, above the base."""
        return status("VmHWM") - self.base

    def again(self) -> float:
        """Resets the peak; returns the current bytes of memory."""
        return _reset()

    def of(self, step: Callable[[], Any], rounds: int) -> tuple[float, float]:
        """The peak in MB above the base, and the least CPU milliseconds, of some calls."""
        times = []
        for _ in range(rounds):
            began = time.process_time()
            step()
            times.append(time.process_time() - began)
        return self.peak() / 1e6, 1e3 * min(times)


def busy_seconds() -> float:
    """CPU seconds that all cores of this machine have been busy since it started."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _serve(
    end: Connection, store: str, rank: int, ranks: int, build: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        dist.barrier()
        usage = Usage()
        functions = build(usage, *args)
        end.send(None)
    except BaseException as error:
        end.send(error)
        raise
    while True:
        slept, cpu = time.perf_counter(), time.process_time()
        try:
            name, given = end.recv()
        except EOFError:
            break
        usage.waited += time.perf_counter() - slept
        usage.idle += time.process_time() - cpu
        try:
            end.send(functions[name](*given))
        except BaseException as error:
            end.send(error)
            raise
    dist.destroy_process_group()


def _reset() -> float:
    """Resets the peak to the current number of bytes, and returns that number."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> float:
    """A number of bytes that the operating system tells of this process."""
    # Not getrusage: there, a process starts with the peak of its parent.
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "this is Linux"
    return int(found[1]) * 1024.0
