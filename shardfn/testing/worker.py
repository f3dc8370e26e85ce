"""What a rank of a world of processes does: meet the others, then answer calls until asked to leave."""

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
    """Meet, answer calls, leave in good order. An empty message means: leave. A size of 0: there is nobody to meet."""
    _die_with_parent()
    stacks.record(log)
    torch.set_num_threads(1)
    with Connection(channel) as caller, contextlib.suppress(EOFError, BrokenPipeError):
        if size:
            _meet(rank, size, caller)
        while setting := caller.recv_bytes():
            _answer(setting, caller)
        if size:
            # Without it a rank may be gone while another still talks to it, and the other aborts.
            dist.barrier()
            dist.destroy_process_group()
        _exit()
    os._exit(1)  # the caller is gone


def _exit() -> NoReturn:
    """Exit in good order, without the second or so in which the interpreter takes torch apart."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _meet(rank: int, size: int, caller: Connection) -> None:
    """Join the others at a store that rank 0 holds, on a port that the caller passes on."""
    port = 0 if rank == 0 else pickle.loads(caller.recv_bytes())
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    if rank == 0:
        caller.send_bytes(pickle.dumps(store.port))
    # The caller watches the clock, so a collective itself never gives up.
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
    """Ask the kernel to kill this process when its parent dies, where the kernel can."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
