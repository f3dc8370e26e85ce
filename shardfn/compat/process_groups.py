"""Process groups by name, collectives into given buffers, worlds without a network."""

from __future__ import annotations

import hashlib
import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional

# The functions of torch.distributed around these take as long as the launch itself.
_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")


_gather_into = "all_gather_single" if _RENAMED else "_allgather_base"
_scatter_into = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"
_gathering, _scattering = torch._C._distributed_c10d.AllgatherOptions(), dist.ReduceScatterOptions()
_gathering.asyncOp = _scattering.asyncOp = True


def start_all_gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Begins to fill `whole` with every rank's `own`; the work."""
    return getattr(group, _gather_into)(whole, own, _gathering)


def start_reduce_scatter(out: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Begins to sum every rank's `flat` into each rank's `out`; the work."""
    return getattr(group, _scatter_into)(out, flat, _scattering)


_resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009  # not exported


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    found: dist.ProcessGroup = _resolve(name)
    return found


def backend_of(group: dist.ProcessGroup, device: str) -> str:
    """Which backend moves a group's tensors on a kind of device: `"gloo"`, `"nccl"`, ..."""
    return _backends(group).get(device, "undefined")


def global_rank() -> int:
    """This process's rank; 0 where torch.distributed has not started."""
    return dist.get_rank() if dist.is_initialized() else 0


def default_store() -> Any:
    """The store by which the processes of the default group met."""
    return dist.distributed_c10d._get_default_store()


def host_of(store: Any) -> str:
    """The name of the host that has a store; empty where none has, as of a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def worlds_of_threads() -> bool:
    """Whether each thread of this process has a torch.distributed of its own, as in tests."""
    return type(dist.distributed_c10d._world).__name__ == "ThreadLocalWorld"


_NOBODY_SENDS = 2**30 + 7  # as a message's tag


def break_group(group: dist.ProcessGroup) -> bool:
    """Ends all that is under way in a gloo group with errors, here and on the other ranks; whether it could.

    A message that does not come in time makes gloo close its connections. There is no other way to wake a thread
    that is blocked in a collective.
    """
    if group.size() == 1 or backend_of(group, "cpu") != "gloo":
        return False
    for step in range(1, group.size()):
        other = (group.rank() + step) % group.size()
        try:
            group.recv([torch.zeros(1)], other, _NOBODY_SENDS).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):  # which closes all connections; one that is closed already does not
                break
    return True


_PrefixStore: Any = dist.distributed_c10d.PrefixStore
_RENEWABLE = {"gloo", "nccl"}
_PRIVATE = ("_register_backend", "_set_group_name", "_set_group_desc", "_get_backend")
_FIRST, _LAST = 100, 255  # kinds of backends, of which a group has one each; torch numbers its own from 0
_renewed: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def renewable(group: dist.ProcessGroup) -> bool:
    """Whether a group can be interrupted and work again after it."""
    names = set(_backends(group).values())
    known = all(hasattr(dist.ProcessGroup, name) for name in _PRIVATE)
    return known and names <= _RENEWABLE and _renewed.get(group, _FIRST) + len(names) <= _LAST


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Kind of device -> the backend that moves its tensors."""
    config = str(dist.get_backend_config(group)).split(",")
    return {kind: name for kind, name in (part.split(":") for part in config) if name != "undefined"}


def interrupt(group: dist.ProcessGroup) -> None:
    """Ends all that is under way in a group, of which nothing can be asked then but to `renew` it."""
    break_group(group)
    for kind, name in _backends(group).items():
        if name == "nccl" and torch.device(kind) in group._device_types:
            group._get_backend(torch.device(kind)).abort()


def renew(group: dist.ProcessGroup, meeting: str, store: Any) -> None:
    """A group that was interrupted works again: whoever holds it need not know. All its ranks take part.

    Args:
        group: the group.
        meeting: a name that no other call has, the same on all its ranks.
        store: by which they meet.
    """
    called, described = group.group_name, group.group_desc
    made: dict[str, Any] = {}
    for kind, name in _backends(group).items():
        if torch.device(kind) not in group._device_types:
            continue
        if name not in made:
            found = _PrefixStore(f"{meeting}/{name}", store)
            made[name] = _new_backend(group, kind, name, found), _renewed.get(group, _FIRST)
            _renewed[group] = made[name][1] + 1
        backend, number = made[name]
        # A group keeps the first backend of each type, so that another one needs another type.
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType(number), backend)
    group._set_group_name(called)
    group._set_group_desc(described)


def _new_backend(group: dist.ProcessGroup, kind: str, name: str, store: Any) -> Any:
    # The options hold what listens for gloo, and its thread, which the new backend has in common with the old one.
    old: Any = group._get_backend(torch.device(kind))
    options = getattr(old, "options", None) or default_store().timeout
    create: Any = dist.ProcessGroupGloo if name == "gloo" else dist.ProcessGroupNCCL
    backend = create(store, group.rank(), group.size(), options)
    backend._set_sequence_number_for_group()
    return backend


_made_up = {"fake"}  # backends


def between_processes() -> bool:
    """Whether the world's ranks are processes that can meet, and not made up, or threads, as in tests."""
    config = str(dist.get_backend_config())
    return any(kind in config for kind in ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "undefined"))


def made_up() -> bool:
    """Whether the other ranks of the world are none: this process says that it is one of many, and nothing moves."""
    world = dist.group.WORLD
    return world is not None and set(_backends(world).values()) <= _made_up


def disconnected(rank: int) -> bool:
    """Whether gloo's connection to a rank of the world is closed, as when its process was killed."""
    world = dist.group.WORLD
    if world is None or rank == world.rank() or backend_of(world, "cpu") != "gloo":
        return False
    try:
        world.recv([torch.zeros(1)], rank, _NOBODY_SENDS)  # it stays open, and takes nothing from anybody
    except RuntimeError:
        return True
    return False


def new_group(ranks: list[int], name: str, backend: str | None = None) -> dist.ProcessGroup:
    """A group of these global ranks, in this order; only its members take part in making it, by this name.

    It is as patient as the world is: torch would wait for half an hour, whatever was asked for there.
    """
    ordered = ranks == sorted(ranks)
    if not ordered and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ValueError(
            f"ranks {ranks} are not in ascending order, and torch {torch.__version__} always sorts a group's ranks: "
            "name the axes in the mesh's own order, or use torch >= 2.13"
        )
    order: dict[str, Any] = {} if ordered else {"sort_ranks": False}
    _names.next = hashlib.blake2b(name.encode()).hexdigest()[:32]
    try:
        timeout = default_store().timeout
        with _by_members_alone():
            return dist.new_group(ranks, timeout, backend=backend, use_local_synchronization=True, **order)
    finally:
        _names.next = None


@contextmanager
def _by_members_alone() -> Iterator[None]:
    """Groups are made anew inside, and not split off the world's communicator, in which all its ranks take part.

    Another thread than the main one meets the others by a connection of its own: who waits holds the store, so that
    two threads could keep each other's ranks from coming.
    """
    world, groups = dist.group.WORLD, dist.distributed_c10d._world.pg_map
    assert world is not None
    device, known = world.bound_device_id, groups[world]
    if device is not None:
        world.bound_device_id = None
    if threading.current_thread() is not threading.main_thread() and not worlds_of_threads():
        own: Any = known[1]
        groups[world] = (known[0], own.clone())
    try:
        yield
    finally:
        groups[world] = known
        if device is not None:
            world.bound_device_id = device


# torch names such a group by its ranks and by how many groups this rank has had, which its members may count
# differently, and then wait for each other under different names.
_names = threading.local()


if hasattr(dist.distributed_c10d, "_hash_ranks_to_str"):
    _torchs_name = dist.distributed_c10d._hash_ranks_to_str
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: getattr(_names, "next", None) or _torchs_name(ranks)


def _missing(what: str, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} does not have {what} where shardfn looks for it ({error}); "
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


def register_fake_backend(name: str, devices: list[str]) -> None:
    """The fake process group under another name, for these kinds of devices.

    Raises:
        RuntimeError: this torch has no fake process group.
    """
    fake_store()
    create = dist.Backend._plugins["FAKE"].creator_fn
    dist.Backend.register_backend(name, create, extended_api=True, devices=devices)
    _made_up.add(name)


def register_python_device(name: str, module: Any) -> None:
    """Makes torch's spare kind of device one of this name, without memory or kernels; `module` is `torch.<name>`.

    Raises:
        RuntimeError: this torch cannot do so from Python.
    """
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError as error:
        raise _missing("a device made in Python", error) from error
    _setup_privateuseone_for_python_backend(name, module)


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
    """Make every thread that waits in a collective leave it with SystemExit; returns though one may be stuck in it."""
    group = _threaded().ProcessLocalGroup
    group._terminate.set()
    for collective in list(group._cur_coll_on_pgs.values()):
        for condition in (collective._start_cond, collective._done_cond):
            if condition.acquire(timeout=1):
                condition.notify_all()
                condition.release()
