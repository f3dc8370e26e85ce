"""Disks that fill, fail, lose a file or hang in the middle: every rank hears of it, and the last checkpoint goes on."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import checkpoint
from tests import crash
from tests.tiers.setting import Held, disk, failing

STEPS, FAILS_AT, SECONDS = 5, 3, 40.0


def cut_off(kind: str) -> None:
    """As another process may do it, by the descriptors of this one."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if f"shardfn-{kind}-" in os.readlink(f"/proc/self/fd/{name}"):
                subprocess.run(["truncate", "-s", "8192", f"/proc/{os.getpid()}/fd/{name}"], check=True)
                return
    raise AssertionError(f"no file of {kind} is open")


@contextlib.contextmanager
def no_larger(nbytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def hanging() -> Iterator[None]:
    os.environ["SHARDFN_DISK_TIMEOUT"] = "1"
    held = Held("read")
    held.go.wait = lambda timeout=None: bool(time.sleep(10**6))  # type: ignore[method-assign, func-returns-value]
    with disk(held):
        yield


@contextlib.contextmanager
def losing(kind: str) -> Iterator[None]:
    cut_off(kind)
    yield


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "full": (
        lambda: no_larger(4096),
        "(making room for|writing) 0.0 MB of .* failed: File too large; [0-9.,]+ MB are free",
    ),
    "full when it is written": (
        lambda: disk(failing("write", 3, errno.ENOSPC)),
        "writing 0.0 MB of .* failed: No space left on device; [0-9.,]+ MB are free",
    ),
    "not readable": (lambda: disk(failing("read", 5)), "reading 0.0 MB of .* failed: Input/output error"),
    "not writable": (lambda: disk(failing("write", 5)), "writing 0.0 MB of .* failed: Input/output error"),
    "hangs": (hanging, "has taken more than 1 s: the disk is too slow for it, or hangs; SHARDFN_DISK_TIMEOUT"),
    "params cut off": (lambda: losing("params"), "the file ends at 8192 bytes and had [0-9]+: something else"),
    "state cut off": (lambda: losing("state"), "the file ends at 8192 bytes and had [0-9]+: something else"),
}
AT_FIRST = {"full at first": (lambda: no_larger(4096), "making room for 0.0 MB of params in .* failed: File too large")}


def live(rank: int, folder: str, fault: str) -> None:
    """Trains, and saves after every step; the disk of rank 0 fails, or none."""
    root = Path(folder)
    os.environ["SHARDFN_SCRATCH"] = str(root / "scratch")
    torch.set_num_threads(1)
    os.dup2(os.open(root / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    try:
        train(rank, root, fault)
    except BaseException as error:
        (root / f"error{rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def train(rank: int, root: Path, fault: str) -> None:
    store = (root / f"store {fault}".replace(" ", "-")).as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    mesh = sf.make_mesh(device="cpu", shard=2)
    with contextlib.ExitStack() as stack:
        if fault in AT_FIRST and rank == 0:
            stack.enter_context(AT_FIRST[fault][0]())
        state = crash.initial(mesh, crash.ON_DISK)
        newest = checkpoint.latest(root / "run")
        if newest is not None:
            state = checkpoint.load(newest, state)
        while state["step"] < STEPS:
            if fault in FAULTS and rank == 0 and state["step"] == FAILS_AT - 1:
                stack.enter_context(FAULTS[fault][0]())
            state = crash.trained(state, mesh)
            checkpoint.save(root / "run" / f"step-{state['step']:05d}", state)
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, fault: str) -> list[int]:
    """How both ranks ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardfn.optim", "torch.distributed.device_mesh", "tests.crash"])
    processes = [context.Process(target=live, args=(rank, str(folder), fault), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    end = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.exitcode is None:
            process.kill()
    return [-1 if process.exitcode is None else process.exitcode for process in processes]


def in_memory() -> dict[str, Any]:
    """What a run gives that nothing happens to."""
    mesh = sf.make_mesh(device="cpu", shard=2)
    state = crash.initial(mesh, {})
    while state["step"] < STEPS:
        state = crash.trained(state, mesh)
    moments = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state["optimizer"])
    return {"model": sf.unshard(state["model"]), "moments": optree.tree_leaves(moments)}


@pytest.mark.parametrize("fault", [*FAULTS, *AT_FIRST])
@pytest.mark.world(2)
def test_every_rank_hears_of_a_fault_and_the_last_checkpoint_goes_on(world: Any, fault: str, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    assert run(tmp_path, fault) == [1, 1], (tmp_path / "log0").read_text()[-3000:]
    wanted = (FAULTS | AT_FIRST)[fault][1]
    assert re.search(wanted, (tmp_path / "error0").read_text()), (tmp_path / "error0").read_text()
    assert (tmp_path / "error1").exists()
    newest = checkpoint.latest(tmp_path / "run")
    assert fault in AT_FIRST or (newest is not None and newest.name == f"step-{FAILS_AT - 1:05d}")
    assert os.listdir(tmp_path / "scratch") == []
    assert run(tmp_path, "") == [0, 0], (tmp_path / "log0").read_text()[-3000:]
    assert os.listdir(tmp_path / "scratch") == []
    found, _ = crash.whole(checkpoint.latest(tmp_path / "run"))  # type: ignore[arg-type]
    want = world.run(in_memory)[0]["model"]
    for name, x in want.items():
        assert found[f"model.{name}"].equal(x), name


@pytest.mark.parametrize("seed", [0])
def test_killed_runs_leave_nothing_behind_and_go_on_bit_for_bit(seed: int, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "saved").mkdir()
    tally, worst = crash.crash(2, 6, seed, crash.MESHES[:1], tmp_path / "saved", scratch=tmp_path / "scratch")
    assert sum(tally.ends.values()) == 2
    assert worst == 0
