"""A run that is to end early ends after the same step on all ranks, saved."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardfn as sf
from shardfn.run import interrupts
from shardfn.run.interrupts import process_start, reset_interrupts
from shardfn.testing import World
from tests.launched import workers
from tests.run.toy import Rows, begin, mesh_here, step_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def begun() -> None:
    """Nothing has ended early in this process."""
    reset_interrupts()


def signaled(folder: Path, ranks: list[int], number: int, at: int, end: int) -> tuple[Any, Any, bool]:
    """Ranks get a signal, each at another moment near a step; then the run goes on to its end."""
    mesh, rank = mesh_here(), dist.get_rank()
    before = [signal.getsignal(one) for one in interrupts.SIGNALS]

    def later(n: int) -> None:
        if rank in ranks and n == at + rank:
            threading.Timer(0.001 * rank, os.kill, (os.getpid(), number)).start()
        time.sleep(0.002 * rank)

    _, run = sf.run.loop(step_of(mesh), begin(mesh), Rows(mesh, at=later), steps=10**6, save=folder, report=[])
    handlers = before == [signal.getsignal(one) for one in interrupts.SIGNALS]
    end = run.step + end
    _, rest = sf.run.loop(step_of(mesh, 0.2), begin(mesh), Rows(mesh), steps=end, save=folder, report=[])
    return run, rest, handlers


@pytest.mark.parametrize("world", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_stop_after_one_step_when_one_gets_a_signal(world: World, number: int, tmp_path: Path) -> None:
    for k, ranks in enumerate([[0], [world.size - 1], list(range(world.size))]):
        found = world.run(signaled, tmp_path / str(k), ranks, int(number), 5 * k + 1, 3)
        stopped = {run.step for run, _, _ in found}
        assert len(stopped) == 1
        assert {run.ended for run, _, _ in found} == {"preempted"}
        assert {(rest.start, rest.step, rest.ended) for _, rest, _ in found} == {
            (run.step, run.step + 3, "finished") for run, _, _ in found
        }
        assert all(handlers for *_, handlers in found)
        names = {one.name for one in (tmp_path / str(k)).iterdir()}
        assert names == {f"step-{n:08}" for n in (0, *stopped, *(n + 3 for n in stopped))}


def in_time(folder: Path, limit: Any, slow: float) -> tuple[str, float, int]:
    mesh = mesh_here()
    rank = dist.get_rank()
    rows = Rows(mesh, at=lambda n: time.sleep(slow))
    given = limit if rank == 0 else 3600  # clocks of hosts differ
    _, run = sf.run.loop(step_of(mesh), begin(mesh), rows, steps=10**6, save=folder, time_limit=given, report=[])
    return run.ended, time.monotonic() - process_start(), run.step


@pytest.mark.world(2)
def test_a_run_ends_before_its_limit(world: World, tmp_path: Path) -> None:
    age = max(world.run(lambda: time.monotonic() - process_start()))
    limit = age + interrupts.MARGIN + 3
    found = world.run(in_time, tmp_path, timedelta(seconds=limit), 0.01)
    assert {ended for ended, _, _ in found} == {"time"}
    assert len({step for *_, step in found}) == 1
    assert all(reached < limit for _, reached, _ in found)
    assert (tmp_path / f"step-{found[0][2]:08}").is_dir()


def test_the_end_of_a_job_of_slurm_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1))
    arguments: dict[str, Any] = {"steps": 50, "report": []}

    def step(state: int, batch: int) -> Any:
        return state + 1, {"loss": 0.0}

    _, run = sf.run.loop(step, 0, lambda start: range(start, 99), save=tmp_path, **arguments)
    assert (run.ended, run.step) == ("time", 1)
    _, run = sf.run.loop(step, 0, lambda start: range(start, 99), **arguments)
    assert (run.ended, run.step) == ("finished", 50)


def test_a_process_knows_its_age() -> None:
    code = """
import time
time.sleep(0.5)
from shardfn.run.interrupts import process_start
print(time.monotonic() - process_start())
"""
    began = time.monotonic()
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert 0.5 < float(told.stdout) < time.monotonic() - began + 0.02


def test_a_later_signal_ends_the_process_and_the_same_one_twice_does_not() -> None:
    code = """
import os, signal, time, shardfn as sf
from shardfn.run import interrupts
interrupts.REPEAT = 0.5
def step(state, batch):
    if batch == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        print("still here", flush=True)
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGTERM)
        print("and here", flush=True)
    return state, {"loss": 0.0}
sf.run.loop(step, 0, range(9), steps=9, report=[])
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert told.returncode == -signal.SIGTERM
    assert told.stdout == "still here\n"
    said = (
        "SIGTERM: the run stops after this step without saving, as it has no save=; another one, 0.5 s from now, ends"
    )
    assert said in told.stderr


@pytest.mark.parametrize("peer", ["lives", "is dead"])
def test_a_signal_promises_no_checkpoint_that_a_dead_rank_prevents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, peer: str
) -> None:
    def step(state: int, batch: int) -> Any:
        if batch == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            if peer == "is dead":
                raise RuntimeError("rank 0 waited in vain")
        return state + 1, {"loss": 0.0}

    with contextlib.suppress(RuntimeError):
        sf.run.loop(step, 0, lambda start: range(start, 99), steps=9, save=tmp_path, report=[])
    interrupts.reset_interrupts()
    assert "SIGTERM: the run stops after this step and saves, if every rank still can; another one, 2 s" in caplog.text
    fails = f"the run fails before it could save; the same call resumes from what {tmp_path} has"
    assert (fails in caplog.text) == (peer == "is dead")


def test_a_run_on_another_thread_leaves_signals_alone() -> None:
    before, found = [signal.getsignal(one) for one in interrupts.SIGNALS], []

    def step(state: int, batch: int) -> Any:
        found.append([signal.getsignal(one) for one in interrupts.SIGNALS])
        return state + 1, {"loss": 0.0}

    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(sf.run.loop(step, 0, range(9), steps=3, report=[])))
    thread.start()
    thread.join()
    assert ended[0][0] == 3
    assert found == [before] * 3


def taken_back() -> tuple[str, int]:
    """One rank says once that its time is over, and never again."""
    mesh, said = mesh_here(), [0, 1] if dist.get_rank() == 1 else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupts.Interrupts, "reason", lambda *_: said.pop(0) if said else 0)
        _, run = sf.run.loop(step_of(mesh), begin(mesh), Rows(mesh), steps=9, report=[])
    return run.ended, run.step


@pytest.mark.world(2)
def test_a_run_that_stops_says_why_also_when_the_reason_has_gone(world: World) -> None:
    assert world.run(taken_back) == [("time", 3)] * 2


def test_a_reason_stays() -> None:
    age = time.monotonic() - process_start()
    one = interrupts.Interrupts(age + 1000)
    assert [one.reason(needs) for needs in (1.0, 2000.0, 1.0)] == [0, 1, 1]
    one.signaled = time.monotonic()
    assert one.reason(1.0) == 2


PROGRAM = """
import sys, time, torch.distributed as dist
import shardfn as sf
from tests.run.toy import Rows, begin, mesh_here, step_of
mesh = mesh_here()
first = dist.get_rank() == 0
rows = Rows(mesh, at=lambda n: (time.sleep(0.02), print("step", n, flush=True) if first and n == 3 else None))
_, run = sf.run.loop(step_of(mesh), begin(mesh), rows, steps=10**6, save=sys.argv[1], report=[])
open(sys.argv[1] + f".{dist.get_rank()}", "w").write(f"{run.ended} {run.step}")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_torchrun_saves_and_ends_the_run(number: int, tmp_path: Path) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "run"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--signals-to-handle", "SIGTERM,SIGUSR1", str(program), str(folder)]  # fmt: skip
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(
        command, env=os.environ | more, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "step 3\n"
        agent.send_signal(number)
        agent.wait(60)
    finally:
        left = workers(agent.pid)
        agent.kill()
        agent.wait()
        for worker in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        if agent.stdout is not None:
            agent.stdout.close()
    said = {Path(f"{folder}.{rank}").read_text() for rank in range(2)}
    assert len(said) == 1
    ended, step = said.pop().split()
    assert ended == "preempted"
    assert sf.checkpoint.latest(folder) == folder / f"step-{int(step):08}"
