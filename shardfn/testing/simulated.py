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
    device.forget()
    step()
    assert device.synchronisations == []
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives import ops
from shardfn.collectives.late_checks import LateChecks
from shardfn.compat import dispatch, dynamo, modes, process_groups
from shardfn.testing.clocks import HOST, ByStorage, Clocks, Current, Point, device_index

NAME = "sim"
"""The device's name: `torch.device("sim")`."""

_aten: Any = torch.ops.aten
_HERE = pathlib.Path(__file__).resolve()
_PACKAGE = str(_HERE.parent.parent) + "/"
_TESTING = str(_HERE.parent) + "/"
_BETWEEN = (_TESTING, str(modes.__file__), str(weakref.__file__))
_ELSEWHERE = tuple(str(pathlib.Path(str(module.__file__)).parent) + "/" for module in (torch, optree))


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
    """

    name = NAME

    def __init__(self, values: bool = False, count: int = 1) -> None:
        self._lock = threading.Lock()
        self._waits: Counter[tuple[str, str]] = Counter()
        self.values, self.count = values, count
        self.clocks = Clocks(_line)
        self.current = Current()
        self.defaults = [self.clocks.stream() for _ in range(count)]
        self.works: dict[int, tuple[Any, Point, Any]] = {}  # by id of a handle: itself, its end, and what it holds
        self.results: ByStorage[tuple[Point, Any]] = ByStorage()  # end and what is held, by what is filled
        self.streams: dict[str, int] = {}  # of collectives, by group
        self.collectives: dict[str, list[tuple[str, int]]] = {}
        self.fake_mode = dynamo.fake_mode()
        self.generators: Counter[str] = Counter()
        self.threads: set[int] = set()
        self.operations: Counter[str] = Counter()

    @property
    def synchronisations(self) -> list[Wait]:
        """The waits of the host since `forget`."""
        return [Wait(*key, count) for key, count in sorted(self._waits.items())]

    @property
    def races(self) -> list[str]:
        """Uses of memory, since `forget`, that no event or wait orders: the later one, and the earlier one."""
        self.clocks.look()
        return [f"{later}, with {earlier}" for later, earlier in dict.fromkeys(self.clocks.races)]

    def forget(self) -> None:
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
        self.clocks.synchronize(self.stream())
        with self._lock:
            self._waits[kind, _line()] += 1


@contextlib.contextmanager
def simulated(
    ranks: int = 1,
    rank: int = 0,
    backend: str = "simulated",
    *,
    values: bool = False,
    store: Any = None,
    count: int = 1,
) -> Iterator[Device]:
    """Makes this process one rank of a simulated world with simulated accelerators, while the block runs.

    Registering the device cannot be undone, so tests do it in processes of their own, `world(n, "alone")`.

    Args:
        ranks: the number of ranks in the world.
        rank: this process's rank.
        backend: of the process group. None transfers anything: `"simulated"`, for both devices, is checked like a real
            one; `"cpu:fake,sim:fake"` and the like are torch's own, which shardfn recognises as fake.
        values: whether tensors have values. They are computed on the CPU, at once.
        store: one of torch.distributed, through which the ranks, each a process, meet; then tensors have values and are
            sent, by gloo.
        count: the number of devices that this process sees.

    Raises:
        RuntimeError: the process has a process group already, or an accelerator; or such a block is open.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "simulated() makes the default process group of this process, and there is one already: backend "
            f"{dist.get_backend()}, rank {dist.get_rank()} of {dist.get_world_size()}"
        )
    if _current:
        raise RuntimeError("simulated() is open already in this process")
    _register()
    device = Device(values or store is not None, count)
    _current.append(device)
    if store is not None:
        backend = "cpu:gloo,sim:sent"
    dist.init_process_group(backend, store=store or process_groups.fake_store(), rank=rank, world_size=ranks)
    try:
        with _patched(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            with _Operations(device):
                yield device
    finally:
        dist.destroy_process_group()
        _current.clear()


_current: list[Device] = []
_pinned: ByStorage[bool] = ByStorage()
_shadows: ByStorage[Any] = ByStorage()  # values of tensors on the device, some of which caches keep


@functools.cache
def _register() -> None:
    if torch.accelerator.is_available():
        raise RuntimeError(
            f"this process has an accelerator, {torch.accelerator.current_accelerator()}, next to which torch cannot "
            f"pretend another: hide it, by CUDA_VISIBLE_DEVICES= say"
        )
    process_groups.register_python_device(NAME, _Module())
    process_groups.register_fake_backend("simulated", ["cpu", NAME])
    process_groups.register_fake_backend("sent", [NAME], made_up=False)


@contextlib.contextmanager
def _patched(device: Device) -> Iterator[None]:
    """Patches what torch does without an operation that modes see; and threads, each of which has modes of its own."""
    fake: Any = dynamo.fake_tensors()
    patches: list[tuple[Any, str, Any]] = [(torch, "Generator", _Generator)]
    patches += [(fake, "tolist", lambda x: x.cpu().tolist())]
    patches += [(torch, name, _copied(getattr(torch, name))) for name in ("tensor", "as_tensor")]
    patches += [(threading.Thread, "run", _beside(device, threading.Thread.run))]
    handles = [kind for kind in process_groups.kinds_of_handles() if "wait" in vars(kind)]
    patches += [(kind, "wait", _waits_for(device, kind.wait)) for kind in handles]
    if not device.values:  # what arrives on the host is ones, which no check would accept
        add = LateChecks.add
        patches.append((LateChecks, "add", lambda checks, x, wrong: add(checks, x, lambda _: None)))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def _beside(device: Device, run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """A thread's `run` under the device's mode, as modes apply to one thread only."""

    @functools.wraps(run)
    def on_device(thread: threading.Thread) -> None:
        with _Operations(device):
            run(thread)

    return on_device


def _copied(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A constructor of tensors from host data, which copies its result to the device if that is asked for."""

    @functools.wraps(make)
    def made(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(data, dtype=dtype, device=device, **options)
        return make(data, dtype=dtype, **options).to(device)

    return made


class _Generator(torch.Generator):
    """A generator for a device that draws nothing."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)  # type: ignore[call-arg]


# --- what torch asks the module of a device ---


class _Stream(torch.Stream):
    """A queue of work."""

    def __new__(cls, device: Any = None, priority: int = 0, *, number: int | None = None) -> _Stream:
        on = _device()
        index = device_index(device, on.current.device)
        number = on.clocks.stream() if number is None else number
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return super().__new__(cls, stream_id=number, device_index=index, device_type=kind)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        _device().clocks.synchronize(self.stream_id)
        _synchronize()

    def query(self) -> bool:
        on = _device().clocks
        return on.happened(on.now(self.stream_id))

    def wait_stream(self, other: Any) -> None:
        on = _device().clocks
        on.wait(self.stream_id, on.now(other.stream_id))

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
        if self.point is not None:
            _device().clocks.wait(HOST, self.point)
        _synchronize()

    def query(self) -> bool:
        return self.point is None or _device().clocks.happened(self.point)

    def record(self, stream: Any = None) -> None:
        on = _device()
        self.point = on.clocks.now(on.stream() if stream is None else stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        on = _device()
        if self.point is not None:  # torch waits for nothing if nothing was recorded
            on.clocks.wait(on.stream() if stream is None else stream.stream_id, self.point)


class _Within:
    """A context in which a stream is current, and its device."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            current, index = _device().current, self.stream.device.index
            self.before = current.device, index, current.streams.get(index)
            current.device, current.streams[index] = index, self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            current = _device().current
            current.device, index, stream = self.before
            current.streams[index] = stream


class _Module:
    """`torch.sim`."""

    Stream = _Stream
    Event = _Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return bool(_current)

    def current_device(self) -> int:
        return _device().current.device if _current else 0

    def device_count(self) -> int:
        return _device().count if _current else 1

    def set_device(self, device: Any) -> None:
        on = _device()
        on.current.device = device_index(device, on.current.device)

    def synchronize(self, device: Any = None) -> None:
        _device().clocks.synchronize_all()
        _synchronize()

    def empty_cache(self) -> None:
        pass  # there is no cache

    def current_stream(self, device: Any = None) -> Any:
        on = _device()
        index = device_index(device, on.current.device)
        return on.current.streams.get(index) or self.default_stream(index)

    def default_stream(self, device: Any = None) -> _Stream:
        on = _device()
        index = device_index(device, on.current.device)
        return _Stream(index, number=on.defaults[index])

    def stream(self, stream: Any) -> Any:
        return _Within(stream)

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
    return _current[0]


def _synchronize() -> None:
    for device in _current:
        with device._lock:
            device._waits["synchronize", _line()] += 1


def _of_generators(name: str, answer: Any = None) -> Any:
    for device in _current:
        device.generators[name] += 1
    return answer


# --- what operations do ---


class _Operations(modes.DispatchMode):
    """Runs operations on the device's tensors, and notes for which the host waits, and what memory they use."""

    pretends = True

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    @staticmethod
    def owns(x: Any) -> bool:
        """Whether a tensor is one of the device's."""
        return type(x) is dynamo.fake_tensors() and x.device.type == NAME

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        to = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if to != NAME and not any(x.device.type == NAME for x in tensors):
            return self._on_host(func, args, kwargs, tensors)
        device = self.device
        device.threads.add(threading.get_ident())
        if func.namespace in _COLLECTIVES:
            return _collective(device, func, args, kwargs)
        if func.namespace == ops.LIBRARY.ns:
            with self:
                return dispatch.in_parts(func, *args, **kwargs)
        if dispatch.composite(func):  # such ops come here whole below autograd
            with self:
                return func.decompose(*args, **kwargs)
        if not func.is_view and func.namespace != "prim" and func.overloadpacket not in _NO_KERNEL:
            device.operations[func.name()] += 1
        answer = _ANSWERS.get(func)
        return answer(device, func, args, kwargs) if answer else _run(device, func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        if func is _aten._pin_memory.default or kwargs.get("pin_memory"):
            pins = func is _aten._pin_memory.default
            pinned = args[0].clone() if pins else func(*args, **kwargs | {"pin_memory": False})
            _pinned[pinned] = True
            return pinned
        if func is _aten.is_pinned.default:
            return args[0] in _pinned
        if func.namespace in _COLLECTIVES and dist.get_world_size() > 1 and func not in _QUIET:
            self.device._waited("cpu collective")
        if not func.is_view and all(x.device.type == "cpu" for x in tensors):  # those on "meta" have no memory
            self.device.clocks.use(HOST, func.name(), *_used(func, args, kwargs))
        return func(*args, **kwargs)


_QUIET = {torch.ops._c10d_functional.wait_tensor.default}
_COLLECTIVES = ("c10d", "_c10d_functional")


def _used(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those among its arguments into which it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        found = [x for x in optree.tree_leaves(value) if isinstance(x, Tensor)]
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(found)
    return reads, writes


def _run(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on the device. As on any device, host tensors may only be single numbers."""
    if func.is_view or func.namespace == "prim" or func.overloadpacket in _SHAPES:
        return _pretended(device, func, args, kwargs)
    reads, writes = _used(func, args, kwargs)
    new = func.overloadpacket in _NO_KERNEL
    if not new:
        device.clocks.use(device.stream(), func.name(), reads, writes)
    out = _valued(device, func, args, kwargs) if device.values else _pretended(device, func, args, kwargs)
    made = [x for x in optree.tree_leaves(out) if isinstance(x, Tensor) and x.device.type == NAME]
    for x in made:
        device.clocks.allocated(device.stream(), x)
    if not new:
        device.clocks.use(device.stream(), func.name(), (), made)
    return out


def _pretended(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, without values."""
    mode = device.fake_mode
    args, kwargs = optree.tree_map(lambda x: _fake(x, mode), (args, kwargs))
    kwargs.pop("generator", None)
    try:
        with mode:
            return _without_generator(func)(*args, **kwargs)
    except dynamo.depends_on_numbers() as error:
        device._waited(func.name())
        raise NotImplementedError(
            f"{func.name()} at {_line()}: what it returns depends on numbers, and the simulated device has none"
        ) from error


def _fake(x: Any, mode: Any) -> Any:
    if not isinstance(x, Tensor) or x.device.type == NAME:
        return x
    return mode.from_tensor(x, static_shapes=True)


def _without_generator(func: Any) -> Any:
    """The overload without a generator: `rand.generator` needs one, and `rand` gives the same, no values."""
    return getattr(func.overloadpacket, _PLAIN.get(func._overloadname, func._overloadname))


_PLAIN = {"generator": "default", "low_generator": "low"}


# --- values ---


def _valued(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, with values: those of the same operation on the CPU."""
    tensors = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.device.type == NAME]
    index = tensors[0].device.index if tensors else device_index(kwargs.get("device"), device.current.device)
    if any(x.device.index != index for x in tensors):
        found = sorted({str(x.device) for x in tensors})
        raise RuntimeError(f"{func.name()} at {_line()}: tensors are on several devices: {', '.join(found)}")
    originals: dict[int, Tensor] = {}  # by id of a shadow

    def shadowed(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, Tensor) or x.device.type != NAME:
            return x
        found = _shadow(x)
        originals[id(found)] = x
        return found

    shadows = optree.tree_map(shadowed, (args, kwargs))
    out = func(*shadows[0], **shadows[1])
    if func.overloadpacket in _NO_KERNEL:  # what memory holds that nothing has written
        for x in optree.tree_leaves(out):
            x.untyped_storage().fill_(255)
    return optree.tree_map(lambda x: originals.get(id(x)) if id(x) in originals else _wrapped(device, x, index), out)


def _shadow(x: Tensor) -> Tensor:
    """The values of a tensor, on the CPU."""
    storage = x.untyped_storage()
    values = _shadows.get(x)
    if values is None:
        values = _shadows[x] = torch.UntypedStorage(storage.nbytes())
        values.fill_(255)  # type: ignore[attr-defined]
    elif values.nbytes() < storage.nbytes():
        values.resize_(storage.nbytes())
    shadow = torch.empty(0, dtype=x.dtype, device="cpu").set_(values, x.storage_offset(), x.shape, x.stride())
    shadow = torch._conj(shadow) if x.is_conj() else shadow
    return torch._neg_view(shadow) if x.is_neg() else shadow


def _wrapped(device: Device, x: Any, index: int) -> Any:
    """A tensor of the device with new values."""
    if not isinstance(x, Tensor):
        return x
    if x.storage_offset() or x.is_conj() or x.is_neg():
        x = torch.empty_like(x).copy_(x)
    with device.fake_mode:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=f"{NAME}:{index}")
    _shadows[made] = x.untyped_storage()
    return made


# --- collectives ---


def _collective(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """A collective runs on a stream of its group, which waits for the current one when it is launched."""
    if func in _QUIET:
        found = device.results.get(args[0])
        if found is not None:
            device.clocks.wait(device.stream(), found[0])
            device.results[args[0]] = found[0], ()
            if device.values:
                func(_shadow(args[0]))
        return args[0]
    reads, writes = _used(func, args, kwargs)
    group = _group_of(func, args, kwargs)
    message = func.name() in ("c10d::send", "c10d::recv_")  # between two ranks, which have a communicator of their own
    if message:
        group = f"{group} {sorted((dist.ProcessGroup.unbox(args[1]).rank(), args[2]))}"
    uneven = "alltoall" in func.name() or "all_to_all" in func.name()  # each rank has its own sizes
    sent = 0 if uneven else sum(x.nbytes for x in {id(x): x for x in (*reads, *writes)}.values())
    with device._lock:
        stream = device.streams.get(group)
        if stream is None:
            stream = device.streams[group] = device.clocks.stream()
        if not message:
            device.collectives.setdefault(group, []).append((func.name(), sent))
    device.clocks.wait(stream, device.clocks.now(device.stream()))
    device.clocks.use(stream, func.name(), reads, writes)
    out = _valued(device, func, args, kwargs) if device.values else _pretended(device, func, args, kwargs)
    made = [x for x in optree.tree_leaves(out) if isinstance(x, Tensor) and x.device.type == NAME]
    for x in made:
        device.clocks.allocated(device.stream(), x)
    device.clocks.use(stream, func.name(), (), made)
    # As NCCL's works do, a collective holds its tensors until the first wait for it, whichever stream waits.
    point, held = device.clocks.now(stream), (*reads, *writes)
    for x in made if func.namespace == "_c10d_functional" else ():
        device.results[x] = point, held
    for work in optree.tree_leaves(out):
        if isinstance(work, torch.ScriptObject):
            handle = process_groups.handle_of(work)
            # The handle lives, so that the caller gets this one.
            device.works[id(handle)] = handle, point, (*held, *made)
    return out


def _group_of(func: Any, args: Any, kwargs: Any) -> str:
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            return str(dist.ProcessGroup.unbox(x).group_name)
        if isinstance(x, str) and func.namespace == "_c10d_functional" and x not in ("sum", "avg", "max", "min"):
            return x
    return ""


def _waits_for(device: Device, wait: Callable[..., bool]) -> Callable[..., bool]:
    """A collective's `wait`: the current stream waits, and the host does not."""

    @functools.wraps(wait)
    def waits(work: Any, *args: Any) -> bool:
        known = device.works.pop(id(work), None)
        if known is not None:
            device.clocks.wait(device.stream(), known[1])
        return wait(work, *args)

    return waits


# --- operations that make the host wait, and copies ---


def _item(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    device._waited("item")
    device.clocks.use(device.stream(), func.name(), args, ())
    value = _shadow(args[0]) if device.values else torch.ones((), dtype=args[0].dtype, device="cpu")
    return value.item()


def _equal(device: Device, func: Any, args: Any, kwargs: Any) -> bool:
    device._waited("equal")
    device.clocks.use(device.stream(), func.name(), args, ())
    return bool(_valued(device, func, args, kwargs)) if device.values else True


def _to_copy(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    (x,), to = args, kwargs.get("device")
    if to is None or (torch.device(to).type == x.device.type and not _elsewhere(device, x, to)):
        return _run(device, func, args, kwargs)
    dtype, non_blocking = kwargs.get("dtype") or x.dtype, kwargs.get("non_blocking", False)
    if torch.device(to).type == NAME:
        index = device_index(to, device.current.device)
        with device.fake_mode:
            made = torch.empty_strided(x.shape, _steps(x), dtype=dtype, device=f"{NAME}:{index}")
        device.clocks.allocated(device.stream(index), made)
        return _copied_into(device, made, x, non_blocking)
    host = torch.empty(x.shape, dtype=dtype, device=to)
    if non_blocking:
        _pinned[host] = True  # torch uses pinned memory in this case
    return _copied_into(device, host, x, non_blocking)


def _elsewhere(device: Device, x: Tensor, to: Any) -> bool:
    """Whether a device is another one than a tensor's, of the same kind."""
    return x.device.type == NAME and device_index(to, device.current.device) != x.device.index


def _steps(x: Tensor) -> tuple[int, ...]:
    """The strides of a copy."""
    return torch.empty_like(x, device="meta").stride()


def _copy(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    into, x, *rest = args
    non_blocking = rest[0] if rest else kwargs.get("non_blocking", False)
    if into.device.type == x.device.type and into.device == x.device:
        return _run(device, func, args, kwargs)
    return _copied_into(device, into, x, non_blocking)


def _copied_into(device: Device, into: Tensor, x: Tensor, non_blocking: bool) -> Tensor:
    """Copies between devices. The host waits, unless its memory is pinned and `non_blocking` asks it not to."""
    host = into if into.device.type == "cpu" else x
    device.clocks.use(device.stream(), "copy", (x,), (into,))
    alone = host.numel() <= 1 and host is x  # travels with the kernel's arguments
    if host.device.type == "cpu" and not (non_blocking and (host in _pinned or alone)):
        device._waited(f"copy {x.device.type}->{into.device.type}")
    if device.values:
        target, source = (_shadow(y) if y.device.type == NAME else y for y in (into, x))
        target.copy_(source)
    elif into.device.type == "cpu":
        into.fill_(1)
    return into


def _empty(device: Device, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    with device.fake_mode:
        return torch.empty(shape, dtype=dtype, device=NAME)


def _nonzero(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    device._waited("nonzero")
    if device.values:
        return _run(device, func, args, kwargs)
    return _empty(device, args[0].numel(), args[0].ndim)  # as if nothing was zero


def _masked_select(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    device._waited("masked_select")
    if device.values:
        return _run(device, func, args, kwargs)
    return _empty(device, torch.broadcast_shapes(args[0].shape, args[1].shape).numel(), dtype=args[0].dtype)


def _bincount(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    device._waited("bincount")
    if device.values:
        return _run(device, func, args, kwargs)
    arguments = dict(zip(("x", "weights", "minlength"), args, strict=False)) | kwargs
    weights, minimum = arguments.get("weights"), arguments.get("minlength", 0)
    return _empty(device, max(1, minimum), dtype=torch.int64 if weights is None else torch.float64)


def _repeat_interleave(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    size = kwargs.get("output_size")
    if size is None:
        device._waited("repeat_interleave")
        size = args[0].numel()
    return _run(device, func, args, kwargs) if device.values else _empty(device, size)


def _index(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing: masks make the host wait for their contents; indices on the host are copied to the device."""
    x, indices, *rest = args
    shown: list[Any] = []
    single = bool(rest) and rest[0].numel() == 1
    for index in indices:
        if index is None or (index.device.type == NAME and index.dtype not in (torch.bool, torch.uint8)):
            shown.append(index)
            continue
        if index.device.type != NAME and index.ndim:
            device._waited(f"copy {index.device.type}->{NAME}")
        masks = index.dtype in (torch.bool, torch.uint8)
        if masks and not single:
            device._waited("mask as index")
        if not device.values:
            many = index.ndim if masks else 1
            shown += [_empty(device, *([index.numel()] if masks else index.shape)) for _ in range(many)]
    return _run(device, func, args if device.values else (x, shown, *rest), kwargs)


def _record_stream(device: Device, func: Any, args: Any, kwargs: Any) -> None:
    device.clocks.record(args[0], args[1].stream_id)


def _fused_sgd(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    return _run(device, func, args, kwargs) if device.values else None  # torch does not know its shapes


_SHAPES = {getattr(_aten, name) for name in ("resize_", "set_", "_reshape_alias", "_unsafe_view", "lift_fresh")}
_NO_KERNEL = _SHAPES | {
    getattr(_aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream", "is_pinned")
}


def _zeros(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Zeros of forward mode, which have memory here: the device knows no tensors without."""
    return _run(device, _aten.zeros.default, args, kwargs)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten._efficientzerotensor.default: _zeros,
    _aten._local_scalar_dense.default: _item,
    _aten.equal.default: _equal,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.bincount.default: _bincount,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.index.Tensor: _index,
    _aten.index_put.default: _index,
    _aten.index_put_.default: _index,
    _aten._index_put_impl_.default: _index,
    _aten.record_stream.default: _record_stream,
    _aten._fused_sgd_.default: _fused_sgd,
    _aten._fused_sgd_.tensor_lr: _fused_sgd,
}


# --- where ---


def _line() -> str:
    """The innermost line of this package outside its testing tools, or otherwise of code that is not a library."""
    frame: FrameType | None = sys._getframe(1)
    own: str | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_BETWEEN):
            return f"shardfn/{file.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        if own is None and not file.startswith((*_BETWEEN, *_ELSEWHERE, "<")):
            own = f"{pathlib.PurePath(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return own or "?"
