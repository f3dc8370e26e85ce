"""A simulated accelerator: programs run on it without one, and whatever would make the host wait for it is counted.

Its tensors have shapes, dtypes and strides, but no values, and its process group transfers nothing. The order of events
is real: autograd runs backward on a thread of its own, as on CUDA, and a tensor copied to the host is an ordinary
tensor there, full of ones.

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

from shardfn.compat import dynamo, modes, process_groups

NAME = "sim"
"""The device's name: `torch.device("sim")`."""

_aten: Any = torch.ops.aten
_HERE = pathlib.Path(__file__).resolve()
_PACKAGE = str(_HERE.parent.parent) + "/"
_TESTING = str(_HERE.parent) + "/"
_BETWEEN = (_TESTING, str(modes.__file__))
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
        generators: counts of calls that read or wrote the state of its random generators, by name.
        threads: identities of the threads on which its operations ran.
        operations: counts of operations by name, without views and pure allocations. Each is at least one kernel on a
            real device.
    """

    name = NAME

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: Counter[tuple[str, str]] = Counter()
        self._hazards: Counter[tuple[str, str]] = Counter()
        self.generators: Counter[str] = Counter()
        self.threads: set[int] = set()
        self.operations: Counter[str] = Counter()

    @property
    def synchronisations(self) -> list[Wait]:
        """The waits of the host since `forget`."""
        return [Wait(*key, count) for key, count in sorted(self._waits.items())]

    @property
    def hazards(self) -> list[Wait]:
        """Reads, since `forget`, of memory on the host into which a copy from the device was still under way."""
        return [Wait(*key, count) for key, count in sorted(self._hazards.items())]

    def forget(self) -> None:
        """Starts all counts afresh."""
        with self._lock:
            for counter in (self._waits, self._hazards, self.generators, self.threads, self.operations):
                counter.clear()

    def _waited(self, kind: str) -> None:
        _under_way.clear()
        with self._lock:
            self._waits[kind, _line()] += 1

    def _raced(self, kind: str) -> None:
        with self._lock:
            self._hazards[kind, _line()] += 1


@contextlib.contextmanager
def simulated(ranks: int = 1, rank: int = 0, backend: str = "simulated") -> Iterator[Device]:
    """Makes this process one rank of a simulated world with simulated accelerators, while the block runs.

    Registering the device cannot be undone, so tests do it in a process of its own, `world(1, "alone")`.

    Args:
        ranks: the number of ranks in the world.
        rank: this process's rank.
        backend: of the process group. None transfers anything: `"simulated"`, for both devices, is checked like a real
            one; `"cpu:fake,sim:fake"` and the like are torch's own, which shardfn recognises as fake.

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
    device = Device()
    _current.append(device)
    dist.init_process_group(backend, store=process_groups.fake_store(), rank=rank, world_size=ranks)
    try:
        with _patched(device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            with _Operations(device):
                yield device
    finally:
        dist.destroy_process_group()
        _current.clear()


_current: list[Device] = []
_pinned: weakref.WeakSet[Any] = weakref.WeakSet()  # storages
_under_way: weakref.WeakSet[Any] = weakref.WeakSet()  # storages into which the device is still copying


@functools.cache
def _register() -> None:
    if torch.accelerator.is_available():
        raise RuntimeError(
            f"this process has an accelerator, {torch.accelerator.current_accelerator()}, next to which torch cannot "
            f"pretend another: hide it, by CUDA_VISIBLE_DEVICES= say"
        )
    process_groups.register_python_device(NAME, _Module())
    process_groups.register_fake_backend("simulated", ["cpu", NAME])


@contextlib.contextmanager
def _patched(device: Device) -> Iterator[None]:
    """Patches what torch does without an operation that modes see; and threads, each of which has modes of its own."""
    fake: Any = dynamo.fake_tensors()
    patches = [(torch, "Generator", _Generator), (fake, "tolist", lambda x: x.cpu().tolist())]
    patches += [(torch, name, _copied(getattr(torch, name))) for name in ("tensor", "as_tensor")]
    patches += [(threading.Thread, "run", _beside(device, threading.Thread.run))]
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
    """A queue of work, which is always finished."""

    def __new__(cls, *_: Any, **__: Any) -> _Stream:
        return super().__new__(cls, device=NAME)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        _synchronize()

    def query(self) -> bool:
        return True

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    """An event in such a queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        _synchronize()

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


class _Module:
    """`torch.sim`."""

    Stream = _Stream
    Event = _Event

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        _synchronize()

    def empty_cache(self) -> None:
        pass  # there is no cache

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

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


def _synchronize() -> None:
    for device in _current:
        device._waited("synchronize")


def _of_generators(name: str, answer: Any = None) -> Any:
    for device in _current:
        device.generators[name] += 1
    return answer


# --- what operations do ---


class _Operations(modes.DispatchMode):
    """Runs operations on the device's tensors without values, and counts those for which the host waits."""

    pretends = True

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        to = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if to != NAME and not any(x.device.type == NAME for x in tensors):
            return self._on_host(func, args, kwargs, tensors)
        self.device.threads.add(threading.get_ident())
        if not func.is_view and func.namespace != "prim" and func.overloadpacket not in _NO_KERNEL:
            self.device.operations[func.name()] += 1
        answer = _ANSWERS.get(func)
        return answer(self.device, func, args, kwargs) if answer else _pretended(self.device, func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        if func is _aten._pin_memory.default or kwargs.get("pin_memory"):
            pins = func is _aten._pin_memory.default
            pinned = args[0].clone() if pins else func(*args, **kwargs | {"pin_memory": False})
            _pinned.add(pinned.untyped_storage())
            return pinned
        if func is _aten.is_pinned.default:
            return args[0].untyped_storage() in _pinned
        if func.namespace in ("c10d", "_c10d_functional") and dist.get_world_size() > 1 and func not in _QUIET:
            self.device._waited("cpu collective")
        if not func.is_view and any(x.untyped_storage() in _under_way for x in tensors):
            self.device._raced(func.name())
        return func(*args, **kwargs)


_QUIET = {torch.ops._c10d_functional.wait_tensor.default}


def _pretended(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, without values. As on any device, host tensors may only be single numbers."""
    mode = dynamo.fake_mode()
    args, kwargs = optree.tree_map(lambda x: _fake(x, mode), (args, kwargs))
    kwargs.pop("generator", None)
    try:
        with mode:
            return _without_generator(func)(*args, **kwargs)
    except dynamo.depends_on_numbers() as error:
        device._waited(func.name())
        raise NotImplementedError(
            f"{func.name()} at {_line()}: what it returns depends on numbers, and the pretended device has none"
        ) from error


def _fake(x: Any, mode: Any) -> Any:
    if not isinstance(x, Tensor) or x.device.type == NAME:
        return x
    return mode.from_tensor(x, static_shapes=True)


def _without_generator(func: Any) -> Any:
    """The overload without a generator: `rand.generator` needs one, and `rand` gives the same, no values."""
    return getattr(func.overloadpacket, _PLAIN.get(func._overloadname, func._overloadname))


_PLAIN = {"generator": "default", "low_generator": "low"}


def _item(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    device._waited("item")
    return torch.ones((), dtype=args[0].dtype, device="cpu").item()


def _equal(device: Device, func: Any, args: Any, kwargs: Any) -> bool:
    device._waited("equal")
    return True


def _to_copy(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    (x,), to = args, kwargs.get("device")
    if to is None or torch.device(to).type == x.device.type:
        return _pretended(device, func, args, kwargs)
    if torch.device(to).type == NAME:
        if not kwargs.get("non_blocking"):
            device._waited(f"copy {x.device.type}->{NAME}")
        return _pretended(device, func, args, kwargs)
    host = torch.ones(x.shape, dtype=kwargs.get("dtype") or x.dtype, device=to)
    _arrives(device, host, kwargs.get("non_blocking", False))
    if kwargs.get("non_blocking"):
        _pinned.add(host.untyped_storage())  # torch uses pinned memory in this case
    return host


def _copy(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    into, x, *rest = args
    non_blocking = rest[0] if rest else kwargs.get("non_blocking", False)
    if into.device.type == x.device.type:
        return _pretended(device, func, args, kwargs)
    if into.device.type == NAME:
        if not non_blocking:
            device._waited(f"copy {x.device.type}->{NAME}")
        return _pretended(device, func, args, kwargs)
    into.fill_(1)
    _arrives(device, into, non_blocking and into.untyped_storage() in _pinned)
    return into


def _arrives(device: Device, x: Tensor, later: bool) -> None:
    """Records a copy to the host: it waits now, or the copy stays under way."""
    if later:
        _under_way.add(x.untyped_storage())
    else:
        device._waited(f"copy {NAME}->{x.device.type}")


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    with dynamo.fake_mode():
        return torch.empty(shape, dtype=dtype, device=NAME)


def _nonzero(device: Device, func: Any, args: Any, kwargs: Any) -> Tensor:
    device._waited("nonzero")
    return _empty(args[0].numel(), args[0].ndim)  # as if nothing was zero


def _masked_select(device: Device, func: Any, args: Any, kwargs: Any) -> Tensor:
    device._waited("masked_select")
    return _empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel(), dtype=args[0].dtype)


def _bincount(device: Device, func: Any, args: Any, kwargs: Any) -> Tensor:
    device._waited("bincount")
    arguments = dict(zip(("x", "weights", "minlength"), args, strict=False)) | kwargs
    weights, minimum = arguments.get("weights"), arguments.get("minlength", 0)
    return _empty(max(1, minimum), dtype=torch.int64 if weights is None else torch.float64)


def _repeat_interleave(device: Device, func: Any, args: Any, kwargs: Any) -> Tensor:
    size = kwargs.get("output_size")
    if size is None:
        device._waited("repeat_interleave")
        size = args[0].numel()
    return _empty(size)


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
        shown += [_empty(index.numel()) for _ in range(index.ndim)] if masks else [_empty(*index.shape)]
    return _pretended(device, func, (x, shown, *rest), kwargs)


def _nothing(device: Device, func: Any, args: Any, kwargs: Any) -> None:
    """An operation that only changes values, or does nothing."""


_NO_KERNEL = {
    getattr(_aten, name)
    for name in (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "record_stream",
        "_reshape_alias", "_unsafe_view", "lift_fresh", "is_pinned",
    )
}  # fmt: skip
_ANSWERS: dict[Any, Callable[..., Any]] = {
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
    _aten.record_stream.default: _nothing,
    _aten._fused_sgd_.default: _nothing,
    _aten._fused_sgd_.tensor_lr: _nothing,
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
