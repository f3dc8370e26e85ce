"""The only home, in shardfn.testing, of private torch names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def _missing(what: str, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} does not have {what} where shardfn.testing looks for it ({error}); "
        'use kind="processes", which needs no private torch names'
    )


def group_count() -> int:
    """How many process groups this rank holds."""
    return len(dist.distributed_c10d._world.pg_names)


def fake_store() -> Any:
    """A store for the "fake" backend, which importing its module registers.

    Raises:
        RuntimeError: this torch has no fake process group.
    """
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise _missing("the fake process group", error) from error
    return FakeStore()


def _threaded() -> Any:
    try:
        from torch.testing._internal.distributed import multi_threaded_pg
    except ImportError as error:
        raise _missing("the threaded process group", error) from error
    return multi_threaded_pg


@contextmanager
def threaded_groups() -> Iterator[None]:
    """Give every thread its own `torch.distributed` state, backend "threaded", while the block runs.

    Raises:
        RuntimeError: this torch has no threaded process group, or one is in use already.
    """
    pg = _threaded()
    if isinstance(dist.distributed_c10d._world, pg.ThreadLocalWorld):
        raise RuntimeError('a world with kind="threads" is running in this process already')
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    pg._install_threaded_pg()
    try:
        yield
    finally:
        pg.ProcessLocalGroup.reset()
        pg._uninstall_threaded_pg()
        isolate(False)


def release_threads() -> None:
    """Make every thread that waits in a collective leave it with SystemExit."""
    group = _threaded().ProcessLocalGroup
    with group._coll_lock:
        group.exception_handle(None)
