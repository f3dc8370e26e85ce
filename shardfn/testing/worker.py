"""A rank's process in a world of processes: it joins the others, then answers calls until it is asked to leave."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NoReturn

import torch
import torch.distributed as dist

from shardfn.compat import dynamo, process_groups
from shardfn.testing import filters, serialization, stacks, state


def serve(rank: int, size: int, channel: int, log: int) -> NoReturn:
    """Joins the others, unless `size` is 0, and answers calls; an empty message asks it to leave. It never returns."""
    _die_with_parent()
    stacks.record(log)
    torch.set_num_threads(1)
    with Connection(channel) as caller, contextlib.suppress(EOFError, BrokenPipeError):
        if size:
            _meet(rank, size, caller)
        while setting := caller.recv_bytes():
            _answer(setting, caller)
        if size:
            # Otherwise a rank may be gone while another still communicates with it, which then aborts.
            dist.barrier()
            dist.destroy_process_group()
        _exit()
    os._exit(1)  # the caller is gone


def _exit() -> NoReturn:
    """Exits after the exit handlers, without the second or so in which the interpreter tears torch down."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _meet(rank: int, size: int, caller: Connection) -> None:
    """Joins the others at a store that rank 0 holds, on a port that the caller passes on."""
    port = 0 if rank == 0 else pickle.loads(caller.recv_bytes())
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    if rank == 0:
        caller.send_bytes(pickle.dumps(store.port))
    # The caller enforces the deadline, so a collective itself never times out.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(days=1))
    caller.send_bytes(b"ready")


def _answer(setting: bytes, caller: Connection) -> None:
    sys.path[:], warning_filters = pickle.loads(setting)
    call = caller.recv_bytes()
    state.reset()
    with filters.applied(warning_filters):
        answer = serialization.encode(serialization.perform(call))
    caller.send_bytes(pickle.dumps(process_groups.group_count()))
    caller.send_bytes(answer)
    dynamo.free_graphs()


def _die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies, where the kernel can."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
