"""Nothing outlives its world: no process, no file, no warning."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from shardfn.testing import World

SLEEPY = """
import os, sys, time
from shardfn.testing import World

world = World(2)
print(os.getpid(), *world.run(os.getpid), *world.run(os.getppid), flush=True)
{then}
"""

REVIVE = """
os.kill(world.run(os.getppid)[0], 9)
print([type(error).__name__ for error in world.errors(time.sleep, 5)])
print(world.run(int))
"""


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it collected by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def all_gone(pids: list[int], patience: float = 10.0) -> bool:
    limit = time.monotonic() + patience
    while time.monotonic() < limit and not all(map(is_gone, pids)):
        time.sleep(0.02)
    return all(map(is_gone, pids))


def script(tmp_path: Path, then: str) -> subprocess.Popen[str]:
    file = tmp_path / "script.py"
    file.write_text(SLEEPY.format(then=then))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", str(file)],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("then", ["time.sleep(60)", "world.run(time.sleep, 60)"], ids=["idle", "busy"])
def test_killing_the_caller_ends_its_ranks_and_leaves_no_file(tmp_path, then):
    process = script(tmp_path, then)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        pids = [int(word) for word in line.split()]
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    assert len(pids) == 5
    assert all_gone(pids)
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("then", ["", "1 / 0"], ids=["end", "error"])
def test_an_ordinary_end_is_clean(tmp_path, then):
    process = script(tmp_path, then)
    out, errors = process.communicate(timeout=60)
    assert all_gone([int(word) for word in out.split()])
    assert "Warning" not in errors
    assert ("ZeroDivisionError" in errors) == (then == "1 / 0")
    assert errors == "" or then == "1 / 0"
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_closed_world_has_no_processes():
    with World(2) as local:
        pids = local.run(os.getpid)
    assert all(map(is_gone, pids))


def test_a_dropped_world_has_no_processes():
    local = World(2)
    pids = local.run(os.getpid)
    del local
    assert all_gone(pids)


def test_a_subprocess_of_a_rank_dies_with_it():
    def spawn():
        return os.posix_spawnp("sleep", ["sleep", "60"], os.environ)

    with World(1) as local:
        [pid] = local.run(spawn)
        local.errors(os._exit, 1)
        assert all_gone([pid])
        [pid] = local.run(spawn)
    assert all_gone([pid])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_world_survives_the_death_of_the_process_that_forks_its_ranks(tmp_path):
    process = script(tmp_path, REVIVE)
    out, errors = process.communicate(timeout=60)
    assert errors == ""
    assert out.splitlines()[1:] == ["['ChildProcessError', 'ChildProcessError']", "[0, 0]"]


def test_descriptors_do_not_leak():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with World(2) as local:
        local.run(int)
    before = open_files()
    for _ in range(5):
        with World(2) as local:
            local.errors(sys.exit)
            local.run(int)
    assert open_files() == before


LEFT: list[Any] = []


class Loop:
    """Garbage, once nobody has it."""

    def __init__(self, held: Any) -> None:
        self.itself, self.held = self, held


def compiles() -> None:
    gc.disable()  # so that nobody collects it by chance
    f = torch.compile(lambda x: x + 1, backend="eager")
    f(torch.ones(1))
    LEFT.append(weakref.ref(Loop(f)))


def alive() -> int:
    gc.enable()
    return sum(one() is not None for one in LEFT)


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_what_a_call_compiled_is_not_left_to_the_threads_of_the_next(kind: Literal["processes", "threads"]) -> None:
    """They would take it apart in the middle of anything, and wait in there for each other."""
    try:
        with World(2, kind=kind) as world:
            world.run(compiles)
            assert world.run(alive) == [0, 0]
    finally:
        gc.enable()
