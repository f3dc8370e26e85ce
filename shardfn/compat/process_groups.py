"""Process groups by name, their interruption and renewal, collectives into given buffers, worlds without a network."""

from __future__ import annotations

import hashlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional

from shardfn.compat import devices, dispatch, functorch

# Called directly, since torch.distributed's wrappers take as long as the launch itself.
_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")


_gather_into = "all_gather_single" if _RENAMED else "_allgather_base"
_scatter_into = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"
_gathering, _scattering = torch._C._distributed_c10d.AllgatherOptions(), dist.ReduceScatterOptions()
_gathering.asyncOp = _scattering.asyncOp = True


def start_all_gather(full: torch.Tensor, own_piece: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to fill `full` with every rank's `own_piece`; returns the work."""
    return getattr(group, _gather_into)(full, own_piece, _gathering)


def start_reduce_scatter(out: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to sum every rank's `flat` into each rank's `out`; returns the work."""
    return getattr(group, _scatter_into)(out, flat, _scattering)


_resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009  # not exported


def group_of(name: str) -> dist.ProcessGroup:
    """Returns the process group of that name."""
    return _resolve(name)


def backend_of(group: dist.ProcessGroup, device: str) -> str:
    """Returns the backend that moves a group's tensors on a kind of device: `"gloo"`, `"nccl"`, ..."""
    return _backends(group).get(device, "undefined")


def sends_at_once(group: dist.ProcessGroup, device: str) -> bool:
    """Whether ranks may send to each other before they receive: as gloo can, but only from memory of the host."""
    return device == "cpu" and backend_of(group, device) == "gloo"


def global_rank() -> int:
    """Returns this process's rank; 0 if torch.distributed has not started."""
    return dist.get_rank() if dist.is_initialized() else 0


def default_store() -> Any:
    """Returns the store through which the processes of the default group met."""
    return dist.distributed_c10d._get_default_store()


def host_of(store: Any) -> str:
    """Returns the name of the host that serves a store; empty if none does, as for a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def worlds_of_threads() -> bool:
    """Whether each thread of this process has its own torch.distributed state, as in tests."""
    return type(dist.distributed_c10d._world).__name__ == "ThreadLocalWorld"


_NOBODY_SENDS = 2**30 + 7  # a tag that no message has


def break_group(group: dist.ProcessGroup) -> bool:
    """Aborts all operations in flight in a gloo group, on all its ranks; returns whether that is possible.

    gloo closes its connections when a message does not arrive in time. There is no other way to wake a thread that is
    blocked in a collective.
    """
    if group.size() == 1 or backend_of(group, "cpu") != "gloo":
        return False
    for step in range(1, group.size()):
        other = (group.rank() + step) % group.size()
        try:
            group.recv([torch.zeros(1, device="cpu")], other, _NOBODY_SENDS).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):  # which closes all connections; other errors: this one was closed before
                break
    return True


_PrefixStore: Any = dist.distributed_c10d.PrefixStore
_RENEWABLE = {"gloo", "nccl"}
_FIRST, _LAST = 100, 255  # numbers of backend types, of which a group has one each; torch's own start at 0
_renewed: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def renewable(group: dist.ProcessGroup) -> bool:
    """Whether a group can be interrupted and made to work again."""
    names = set(_backends(group).values())
    return names <= _RENEWABLE and _renewed.get(group, _FIRST) + len(names) <= _LAST


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Returns kind of device -> the backend that moves its tensors."""
    config = str(dist.get_backend_config(group)).split(",")
    return {kind: name for kind, name in (part.split(":") for part in config) if name != "undefined"}


def interrupt(groups: Sequence[dist.ProcessGroup]) -> None:
    """Aborts all operations in flight in groups, which can then only be renewed, by `renew`."""
    aborts = []
    for group in groups:
        break_group(group)
        for kind, name in _backends(group).items():
            if name == "nccl" and torch.device(kind) in group._device_types:
                aborts.append(group._get_backend(torch.device(kind)).abort)
    if aborts:
        # All at once: an abort waits for the device, which another communicator may block that waits for a rank.
        with ThreadPoolExecutor(len(aborts), "shardfn-abort", devices.as_here()) as threads:
            for done in [threads.submit(abort) for abort in aborts]:
                done.result()


def renew(group: dist.ProcessGroup, meeting: str, store: Any) -> None:
    """Makes an interrupted group work again in place, so that its holders need not know. All its ranks take part.

    Args:
        group: the group.
        meeting: a name unique to this call, the same on all its ranks.
        store: the store through which they meet.
    """
    group_name, description = group.group_name, group.group_desc
    renewed: dict[str, Any] = {}
    for kind, name in _backends(group).items():
        if torch.device(kind) not in group._device_types:
            continue
        if name not in renewed:
            prefixed = _PrefixStore(f"{meeting}/{name}", store)
            renewed[name] = _new_backend(group, kind, name, prefixed), _renewed.get(group, _FIRST)
            _renewed[group] = renewed[name][1] + 1
        backend, number = renewed[name]
        # A group keeps the first backend of each type, so a new one needs a new type number.
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType(number), backend)
    group._set_group_name(group_name)
    group._set_group_desc(description)
    for (_, pairs), device in sorted(_connected.get(group, {}).items()):
        connection(group, device, pairs)()


def _new_backend(group: dist.ProcessGroup, kind: str, name: str, store: Any) -> Any:
    # The options hold gloo's listening device and its thread, which the new backend shares with the old one.
    old: Any = group._get_backend(torch.device(kind))
    options = getattr(old, "options", None) or default_store().timeout
    create: Any = dist.ProcessGroupGloo if name == "gloo" else dist.ProcessGroupNCCL
    backend = create(store, group.rank(), group.size(), options)
    backend._set_sequence_number_for_group()
    return backend


_CONNECTED = {"gloo", "mpi", "fake", "threaded", "undefined"}  # backends whose ranks are connected from the beginning
_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, bool], torch.device]] = (
    weakref.WeakKeyDictionary()
)  # by group: for which kind of device, and whether pairs; and the device


def connects_late(group: dist.ProcessGroup, device: str) -> bool:
    """Whether a group connects its ranks in their first collective on a kind of device, as NCCL does."""
    return group.size() > 1 and backend_of(group, device) not in _CONNECTED


def connected(group: dist.ProcessGroup, device: torch.device, pairs: bool = False) -> bool:
    """Whether the ranks of a group are connected for tensors on a device; or the pairs of neighbors among them."""
    return not connects_late(group, device.type) or (device.type, pairs) in _connected.get(group, ())


def connection(group: dist.ProcessGroup, device: torch.device, pairs: bool = False) -> Callable[[], dist.ProcessGroup]:
    """Returns a function that connects the ranks of a group, in which all take part; memory is allocated before.

    Args:
        group: the group.
        device: this rank's device.
        pairs: whether each rank is connected with the next one, for messages: NCCL gives every two ranks that send to
            each other a communicator of their own.
    """
    own_rank = group.rank()
    with functorch.outside_transforms(), dispatch.untraced():
        x = torch.zeros(1, device=device)

    def connect() -> dist.ProcessGroup:
        # Noted first: if this fails on some ranks, all connect it again when it is renewed.
        _connected.setdefault(group, {})[device.type, pairs] = device
        with functorch.outside_transforms(), dispatch.untraced():
            if not pairs:
                group.allreduce([x]).wait()
            for low, high in pairwise(range(group.size())) if pairs else ():  # in one order on all ranks: no deadlock
                if own_rank in (low, high):
                    start, other = (group.send, high) if own_rank == low else (group.recv, low)
                    start([x], other, 0).wait()
        return group

    return connect


_made_up = {"fake"}  # backends that move nothing


def between_processes() -> bool:
    """Whether the world's ranks are processes that can meet, rather than fake ranks or, as in tests, threads."""
    return not (worlds_of_threads() or made_up())


def made_up() -> bool:
    """Whether the world's other ranks do not exist: this process claims to be one of many, and nothing moves."""
    world = dist.group.WORLD
    return world is not None and set(_backends(world).values()) <= _made_up


def disconnected(rank: int) -> bool:
    """Whether gloo's connection to a rank of the world is closed, as when its process was killed."""
    world = dist.group.WORLD
    if world is None or rank == world.rank() or backend_of(world, "cpu") != "gloo":
        return False
    try:
        # This receive stays pending and matches no message.
        world.recv([torch.zeros(1, device="cpu")], rank, _NOBODY_SENDS)
    except RuntimeError:
        return True
    return False


class _Placed(int):
    """A rank that sorts by its place in a list: before torch 2.13, `dist.new_group` sorts ranks."""

    place: int

    def __new__(cls, place: int, rank: int) -> _Placed:
        self = super().__new__(cls, rank)
        self.place = place
        return self

    def __lt__(self, other: Any) -> bool:
        return self.place < other.place if isinstance(other, _Placed) else int(self) < other


def new_group(ranks: list[int], name: str, backend: str | None = None) -> dist.ProcessGroup:
    """Makes a group of these global ranks in this order; only its members take part, and meet under this name.

    Its timeout is the world's: torch's default would be half an hour, whatever the user asked for.
    """
    order: dict[str, Any] = {}
    if ranks != sorted(ranks):
        if "sort_ranks" in inspect.signature(dist.new_group).parameters:
            order = {"sort_ranks": False}
        else:
            ranks = [_Placed(place, rank) for place, rank in enumerate(ranks)]
    _names.next = hashlib.blake2b(name.encode()).hexdigest()[:32]
    try:
        timeout = default_store().timeout
        with _by_members_alone():
            group = dist.new_group(ranks, timeout, backend=backend, use_local_synchronization=True, **order)
    finally:
        _names.next = None
    known = dist.distributed_c10d._world.pg_group_ranks
    known[group] = {int(rank): place for rank, place in known[group].items()}
    return group


@contextmanager
def _by_members_alone() -> Iterator[None]:
    """A context in which new groups are created by their members alone, not split off the world's communicator.

    A thread other than the main one meets the others on its own store connection: a waiting thread blocks the
    connection, and two threads could keep each other's ranks from coming.
    """
    world, groups = dist.group.WORLD, dist.distributed_c10d._world.pg_map
    assert world is not None
    device, entry = world.bound_device_id, groups[world]
    if device is not None:
        world.bound_device_id = None
    if threading.current_thread() is not threading.main_thread() and between_processes():
        store: Any = entry[1]
        groups[world] = (entry[0], store.clone())
    try:
        yield
    finally:
        groups[world] = entry
        if device is not None:
            world.bound_device_id = device


# torch names such a group by its ranks and by the number of groups that this rank has made. Members may count
# differently, and would then wait for each other under different names. Nor is the group counted, as since torch 2.14:
# ranks outside do not count it, and would name the next group of all ranks otherwise.
_names = threading.local()


if hasattr(dist.distributed_c10d, "_process_group_name"):
    _torchs_name = dist.distributed_c10d._process_group_name

    def _name(ranks: Any, use_hashed_name: bool) -> Any:
        own = getattr(_names, "next", None) if use_hashed_name else None
        return own or _torchs_name(ranks, use_hashed_name)

    dist.distributed_c10d._process_group_name = _name


@contextmanager
def _looked_for(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise RuntimeError(
            f"torch {torch.__version__} does not have {name} where shardfn looks for it ({error}); "
            'use kind="processes", which needs no private torch names'
        ) from error


def group_count() -> int:
    """Returns how many process groups this rank holds."""
    return len(dist.distributed_c10d._world.pg_names)


def fake_store() -> Any:
    """Returns a store for the "fake" backend, which importing its module registers.

    Raises:
        RuntimeError: this torch has no fake process group.
    """
    with _looked_for("the fake process group"):
        from torch.testing._internal.distributed.fake_pg import FakeStore
    return FakeStore()


def register_fake_backend(name: str, devices: list[str], made_up: bool = True) -> None:
    """Registers the fake process group under another name, for these kinds of devices.

    Args:
        name: the backend's name.
        devices: kinds of devices.
        made_up: whether the other ranks do not exist; otherwise something else sends what it is given.

    Raises:
        RuntimeError: this torch has no fake process group.
    """
    fake_store()
    create = dist.Backend._plugins["FAKE"].creator_fn
    dist.Backend.register_backend(name, create, extended_api=True, devices=devices)
    if made_up:
        _made_up.add(name)


def handle_of(work: Any) -> Any:
    """Returns the handle that a collective's caller gets, from what the dispatcher sees of it."""
    return dist.distributed_c10d.Work.unbox(work)


def kinds_of_handles() -> list[Any]:
    """Returns the classes of handles of collectives."""
    return [dist.distributed_c10d.Work, *dist.distributed_c10d.Work.__subclasses__()]


def register_python_device(name: str, module: Any) -> None:
    """Gives torch's spare kind of device this name, without memory or kernels; `module` becomes `torch.<name>`.

    Raises:
        RuntimeError: this torch cannot do so from Python.
    """
    with _looked_for("a device made in Python"):
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    _setup_privateuseone_for_python_backend(name, module)


def _threaded() -> Any:
    with _looked_for("the threaded process group"):
        from torch.testing._internal.distributed import multi_threaded_pg
    local_world: Any = multi_threaded_pg.ThreadLocalWorld
    if not hasattr(local_world, "comms"):  # torch 2.11 forgot it, and cannot end a world without
        local_world.comms = property(lambda self: self._get_world().__dict__.setdefault("comms", []))
    return multi_threaded_pg


@contextmanager
def threaded_groups() -> Iterator[None]:
    """A context in which every thread has its own `torch.distributed` state, with the backend "threaded".

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
    """Makes threads that wait in a collective leave it with SystemExit; returns even if one is stuck there."""
    group = _threaded().ProcessLocalGroup
    group._terminate.set()
    for collective in list(group._cur_coll_on_pgs.values()):
        for condition in (collective._start_cond, collective._done_cond):
            if condition.acquire(timeout=1):
                condition.notify_all()
                condition.release()
