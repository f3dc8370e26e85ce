"""A simulated accelerator: programs run on it without one, and whatever would make the host wait for it is counted.

Autograd runs backward on a thread of its own, as on CUDA. Every use of memory is checked: two uses on different streams
of which one is a write must be ordered by events or waits, or they are a race.

By default tensors have shapes, dtypes and strides, but no values, the process group transfers nothing, and a tensor
copied to the host is full of ones there: this is for counting, at any size. With `values=True` tensors have values, and
with a `store` the ranks are processes between which they are sent.

with simulated(ranks=8) as device:
    mesh = sf.make_mesh(shard=8, device=device.name)
    ...
    step()
    device.reset_counts()
    step()
    assert device.synchronizations == []
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives.late_checks import LateChecks
from shardfn.compat import autograd, dispatch, dynamo, process_groups
from shardfn.compat.dispatch import tensors_in
from shardfn.simulated import autocast, compiling
from shardfn.simulated.capture import Capture, Graph
from shardfn.simulated.clocks import HOST, ByStorage, Clocks, Current, Point, device_index
from shardfn.simulated.operations import NAME, Operations, line, opened, past_modes, twin, users_line, waits_for

ENDLESS = 5000
"""Waits of one line after which a loop is taken to wait for numbers."""


class Wait(NamedTuple):
    """Waits of the host of one kind at one line.

    Attributes:
        kind: `"item"`, `"copy sim->cpu"`, `"copy cpu->sim"`, `"synchronize"`, `"cpu collective"`, or the name of an
            operation whose result's size depends on values.
        where: `file:line` in this package, or otherwise in the caller's own code.
        times: how often.
    """

    kind: str
    where: str
    times: int


class Listener:
    """Receiver of everything that a program does on the device; this one ignores it."""

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation was launched, or made a view or room without launching anything."""

    def copied(self, into: Tensor, x: Tensor) -> None:
        """A copy between the host and the device was launched."""

    def sent(self, group: str, stream: int) -> None:
        """A collective of a group was launched on a stream."""

    def note_host_read(self, kind: str) -> None:
        """The host waited for the device: see `Wait`."""

    def note_memory(self, x: Tensor) -> None:
        """A tensor has memory, on the host or on the device."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has got another size; it may be unknown, and no tensor may have it now."""


class Answering(threading.local):
    """A context in which a thread answers an operation.

    Attributes:
        depth: how many such contexts the thread is in.
        known: whether the thread has the device's mode, unless it is disabled.
    """

    depth, known = 0, False

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def knows(self) -> bool:
        """Whether this thread answers an operation now, or has a mode for that."""
        return self.depth > 0 or self.known


class Device:
    """The simulated accelerator, as a test sees it.

    Attributes:
        name: for `torch.device` and `make_mesh(device=...)`.
        values: whether tensors have values.
        clocks: the order of the work on all streams.
        generators: counts of calls that read or wrote the state of its random generators, by name.
        threads: identities of the threads on which its operations ran.
        operations: counts of operations by name, without views and pure allocations. Each is at least one kernel on a
            real device.
        collectives: those of each group, in order: operation, and bytes where they are the same on all ranks.
        resizes: counts of the times that the memory of a storage was freed and allocated again, by its number.
        listener: what is told of all of it.
        planned: whether something listens: then nothing reads what is large on the host, which has room, but no pages.
    """

    name = NAME

    def __init__(
        self, values: bool = False, count: int = 1, listener: Listener | None = None, races: bool = True
    ) -> None:
        self.listener, self.planned = listener or Listener(), listener is not None
        self._lock = threading.Lock()
        self._waits: Counter[tuple[str, str]] = Counter()
        self.values, self.count = values, count
        self.clocks = Clocks(line, watches=races)
        self.current = Current()
        self.defaults = [self.clocks.stream() for _ in range(count)]
        # By id of a handle: itself, its end, what it holds, and its number in a graph.
        self.works: dict[int, tuple[Any, Point, Any, int]] = {}
        self.graph: Graph | None = None  # the one that is being captured
        self.results: ByStorage[tuple[Point, Any]] = ByStorage()  # end and what is held, by what is filled
        self.streams: dict[str, int] = {}  # of collectives, by group
        self.collectives: dict[str, list[tuple[str, int]]] = {}
        self.fake_mode = dynamo.fake_mode()
        self.answering = Answering()
        self.generators: Counter[str] = Counter()
        self.resizes: Counter[int] = Counter()
        self.threads: set[int] = set()
        self.operations: Counter[str] = Counter()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that the memory of a storage was freed, and other memory allocated for it, by the current stream."""
        self.resizes[storage._cdata] += 1
        self.clocks.resized(self.stream(), storage)
        self.listener.resized(storage)

    @property
    def synchronizations(self) -> list[Wait]:
        """The waits of the host since `reset_counts`."""
        return [Wait(*key, count) for key, count in sorted(self._waits.items())]

    @property
    def races(self) -> list[str]:
        """Uses of memory, since `reset_counts`, that no event or wait orders: the later one, and the earlier one."""
        self.clocks.note_freed()
        return [f"{later}, with {earlier}" for later, earlier in dict.fromkeys(self.clocks.races)]

    def reset_counts(self) -> None:
        """Starts all counts afresh."""
        with self._lock:
            for counter in (self._waits, self.generators, self.threads, self.operations, self.clocks.races):
                counter.clear()

    def stream(self, index: int | None = None) -> int:
        """The number of the stream that is current in this thread."""
        index = self.current.device if index is None else index
        stream = self.current.streams.get(index)
        return self.defaults[index] if stream is None else int(stream.stream_id)

    def _waited(self, kind: str) -> None:
        """The host waits for the current stream."""
        if self.graph is not None:
            self.graph.refuse(kind)
        self.clocks.synchronize(self.stream())
        with self._lock:
            where = line()
            self._waits[kind, where] += 1
        reads = not kind.startswith(("copy cpu", "cpu collective"))
        if reads and not self.values and self._waits[kind, where] > ENDLESS:
            raise NotImplementedError(
                f"{kind} at {users_line()} came {ENDLESS} times: a loop that ends by numbers does not end "
                f"here, where the simulated device has none"
            )
        self.listener.note_host_read(kind)


@contextlib.contextmanager
def simulated(
    ranks: int = 1,
    rank: int = 0,
    backend: str = "simulated",
    *,
    values: bool = False,
    store: Any = None,
    count: int = 1,
    listener: Listener | None = None,
    races: bool = True,
) -> Iterator[Device]:
    """Makes this process one rank of a simulated world with simulated accelerators, while the block runs.

    Registering the device cannot be undone, so tests do it in processes of their own, `world(n, "alone")`.

    Args:
        ranks: the number of ranks in the world.
        rank: this process's rank.
        backend: of the process group. None transfers anything: `"simulated"`, for both devices, is checked like a real
            one; `"cpu:fake,sim:fake"` and the like are torch's own, which shardfn recognizes as fake.
        values: whether tensors have values. They are computed on the CPU, at once. Without a store nothing is
            sent, and collectives of several ranks leave what this rank has.
        store: one of torch.distributed, through which the ranks, each a process, meet; then tensors have values and are
            sent, by gloo.
        count: the number of devices that this process sees.
        listener: is told of all that happens.
        races: whether uses of memory are checked.

    Raises:
        RuntimeError: the process has a process group already, or an accelerator; or such a block is open.
        ValueError: there is no such rank, or no device.
        TypeError: the store is none of torch.distributed.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "simulated() makes the default process group of this process, and there is one already: backend "
            f"{dist.get_backend()}, rank {dist.get_rank()} of {dist.get_world_size()}"
        )
    if opened:
        raise RuntimeError("simulated() is open already in this process")
    if not 0 <= rank < ranks:
        raise ValueError(f"simulated: rank={rank} of ranks={ranks}: ranks are numbered from 0 to ranks - 1")
    if count < 1:
        raise ValueError(f"simulated: count={count}; a process sees 1 device or more")
    if isinstance(store, (str, pathlib.Path)):
        raise TypeError(
            f"simulated: store must be a torch.distributed store, such as FileStore(path, {ranks}), got "
            f"{type(store).__name__}. All ranks pass the same store"
        )
    _register_device()
    state, hook = random.getstate(), sys.excepthook  # torch draws from the one, and wraps the other
    device = Device(values or store is not None, count, listener, races)
    if store is not None:
        backend = "cpu:gloo,sim:sent"
    opened.append(device)
    try:
        dist.init_process_group(backend, store=store or process_groups.fake_store(), rank=rank, world_size=ranks)
        with _patched(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            device.answering.known = True
            with Operations():
                yield device
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        opened.clear()
        random.setstate(state)
        sys.excepthook = hook


@functools.cache
def _register_device() -> Any:
    """Registers the device; returns what torch forgets with its object."""
    if torch.accelerator.is_available():
        raise RuntimeError(
            f"this process has an accelerator, {torch.accelerator.current_accelerator()}, and torch cannot "
            f"simulate another. Hide it, such as by CUDA_VISIBLE_DEVICES="
        )
    process_groups.register_python_device(NAME, _Module())
    autograd.twins[NAME] = twin
    dispatch.own_kernels(past_modes)
    process_groups.register_fake_backend("simulated", ["cpu", NAME])
    process_groups.register_fake_backend("sent", [NAME], made_up=False)
    return autocast.register_autocast(NAME)


@contextlib.contextmanager
def _patched(device: Device) -> Iterator[None]:
    """Patches functions of torch that no dispatch mode sees, and threads, as modes are local to a thread."""
    with torch.device("cpu"):  # torch remembers from now on which constructors take the default device
        torch.empty(0, device=None)
    handles = [kind for kind in process_groups.kinds_of_handles() if "wait" in vars(kind)]
    patches = [*_patches(device), *compiling.patches(NAME)]
    patches += [(kind, "wait", waits_for(device, kind.wait)) for kind in handles]
    if not device.values:  # what arrives on the host is ones, which no check would accept
        add = LateChecks.add
        patches.append((*dynamo.redraws(), lambda x, *_, **__: x))
        patches.append((LateChecks, "add", lambda checks, x, wrong: add(checks, x, lambda _: None)))
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _patches(device: Device) -> Iterator[tuple[Any, str, Any]]:
    fake: Any = dynamo.FAKE
    answer, resize, run = fake.__torch_dispatch__, torch.UntypedStorage.resize_, threading.Thread.run
    make: Any = torch.autocast.__init__
    clear: Any = torch.clear_autocast_cache
    swap: Any = torch.utils.swap_tensors

    def formatted(x: Tensor, how: str) -> str:  # a single number is read for that, also if it has a class of its own
        return format(x.item(), how) if x.ndim == 0 else object.__format__(x, how)

    def dispatched(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation that no dispatch mode has seen, such as one on a thread from before the block."""
        here = device.answering.knows() or device.fake_mode.enter_stack
        if here or not any(x.device.type == NAME for x in tensors_in(args, kwargs)):
            return answer(func, types, args, kwargs)
        return past_modes(func, *args, **kwargs or {})

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        same = resize(storage, nbytes)
        device.resized(storage)
        return same

    def init_autocast(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        if enabled and device_type not in (NAME, "cpu"):  # it would be without effect
            raise RuntimeError(
                f"torch.autocast({device_type!r}) at {users_line()}: the tensors here are on the simulated device, "
                f"{NAME!r}, and would not be cast: name it by mesh.device_type or device.name"
            )
        make(self, device_type, dtype, enabled, cache_enabled)

    def cleared() -> None:
        autocast.drop_casts()
        clear()

    def swapped(a: Tensor, b: Tensor) -> None:  # `module.to(dtype)` calls it, where torch itself has weak references
        if type(a) is type(b) is fake and a.device == b.device:
            a.data, b.data = b.data, a.data
        else:
            swap(a, b)

    def run_thread(thread: threading.Thread) -> None:
        device.answering.known = True
        with Operations():
            run(thread)

    yield torch, "Generator", _Generator
    yield fake, "tolist", lambda x: x.cpu().tolist()
    yield fake, "__format__", formatted
    yield fake, "__torch_dispatch__", classmethod(dispatched)
    yield torch.UntypedStorage, "resize_", resized
    yield torch.autocast, "__init__", init_autocast
    yield torch, "clear_autocast_cache", cleared
    yield torch.utils, "swap_tensors", swapped
    yield threading.Thread, "run", run_thread


class _Generator(torch.Generator):
    """A generator for a device that draws nothing."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)  # type: ignore[call-arg]


# --- what torch asks the module of a device ---


class _SimulatedStream(torch.Stream):
    """A queue of work."""

    def __new__(cls, device: Any = None, priority: int = 0, *, number: int | None = None) -> _SimulatedStream:
        on = _device()
        index = device_index(device, on.current.device)
        number = on.clocks.stream() if number is None else number
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return super().__new__(cls, stream_id=number, device_index=index, device_type=kind)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        _synchronize(lambda clocks: clocks.synchronize(self.stream_id))

    def query(self) -> bool:
        _refuse_in_graph("query")
        on = _device().clocks
        return on.happened(on.launched_until(self.stream_id))

    def wait_stream(self, other: Any) -> None:
        on = _device().clocks
        on.wait(self.stream_id, on.launched_until(other.stream_id))

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event


class _Event:
    """A point in such a queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.point: Point | None = None

    def synchronize(self) -> None:
        _synchronize(lambda clocks: clocks.wait(HOST, self.point or Point({}, 0)))

    def query(self) -> bool:
        _refuse_in_graph("query")
        return self.point is None or _device().clocks.happened(self.point)

    def record(self, stream: Any = None) -> None:
        on = _device()
        self.point = on.clocks.launched_until(on.stream() if stream is None else stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        on = _device()
        if self.point is not None:  # torch waits for nothing if nothing was recorded
            on.clocks.wait(on.stream() if stream is None else stream.stream_id, self.point)


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    """A context in which a stream is current, and its device."""
    if stream is None:
        yield
        return
    current, index = _device().current, stream.device.index
    before = current.device, current.streams.get(index)
    current.device, current.streams[index] = index, stream
    try:
        yield
    finally:
        current.device, current.streams[index] = before


class _Module:
    """`torch.sim`."""

    Stream = _SimulatedStream
    Event = _Event
    CUDAGraph = Graph
    graph = Capture

    def is_available(self) -> bool:
        return bool(opened)

    is_initialized = is_available

    def current_device(self) -> int:
        return _device().current.device if opened else 0

    def device_count(self) -> int:
        return _device().count if opened else 1

    def set_device(self, device: Any) -> None:
        on = _device()
        on.current.device = device_index(device, on.current.device)

    def simulation(self) -> Device:
        return _device()

    def is_current_stream_capturing(self) -> bool:
        return bool(opened) and _device().clocks.captured(_device().stream())

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 1

    def synchronize(self, device: Any = None) -> None:
        _synchronize(Clocks.synchronize_all)

    def empty_cache(self) -> None:
        pass  # there is no cache

    def current_stream(self, device: Any = None) -> Any:
        on = _device()
        index = device_index(device, on.current.device)
        return on.current.streams.get(index) or self.default_stream(index)

    def default_stream(self, device: Any = None) -> _SimulatedStream:
        on = _device()
        index = device_index(device, on.current.device)
        return _SimulatedStream(index, number=on.defaults[index])

    def stream(self, stream: Any) -> Any:
        return _on_stream(stream)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: Any = None) -> Tensor:
        return _of_generators("get_rng_state", torch.zeros(16, dtype=torch.uint8, device="cpu"))

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        _of_generators("set_rng_state")

    def manual_seed(self, seed: int) -> None:
        _of_generators("manual_seed")

    def manual_seed_all(self, seed: int) -> None:
        _of_generators("manual_seed_all")

    def initial_seed(self) -> int:
        return int(_of_generators("initial_seed", 0))


def _device() -> Device:
    return opened[0]


def _synchronize(wait: Callable[[Clocks], None]) -> None:
    _refuse_in_graph("synchronize")
    for device in opened:
        wait(device.clocks)
        with device._lock:
            device._waits["synchronize", line()] += 1


def _refuse_in_graph(what: str) -> None:
    for device in opened:
        if device.graph is not None:
            device.graph.refuse(what)


def _of_generators(name: str, answer: Any = None) -> Any:
    _refuse_in_graph(name)
    for device in opened:
        device.generators[name] += 1
    return answer
