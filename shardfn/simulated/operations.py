"""Operations of a simulated accelerator: their results, the memory that they use, and waits of the host."""

from __future__ import annotations

import functools
import math
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.callers import MODELS, PACKAGE, kind_of
from shardfn.collectives import ops
from shardfn.compat import dispatch, dynamo, modes, process_groups
from shardfn.compat.dispatch import tensors_in
from shardfn.simulated import cells, shapes
from shardfn.simulated.clocks import HOST, ByStorage, device_index
from shardfn.simulated.compiling import tracing

if TYPE_CHECKING:
    from shardfn.simulated.device import Device

NAME = "sim"
"""The device's name: `torch.device("sim")`."""

_aten: Any = torch.ops.aten
_DEVICE: Any = torch.ops.prim.device.default
_TOOLS = tuple(PACKAGE + name for name in ("simulated/", "testing/", "plan/", "quoting.py", "compat/modes.py"))

_pinned: ByStorage[bool] = ByStorage()
opened: list[Device] = []  # the one that is simulated now, if one is
second: ByStorage[bool] = ByStorage()  # storages whose memory is another's
_shadows: ByStorage[Any] = ByStorage()  # values of tensors on the device, some of which caches keep


class Operations(modes.DispatchMode):
    """Runs operations on the device's tensors, and notes for which the host waits, and what memory they use."""

    pretends = True

    @staticmethod
    def owns(x: Any) -> bool:
        """Whether a tensor is one of the device's."""
        return type(x) is dynamo.FAKE and x.device.type == NAME

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not opened or tracing():  # a thread from the block outlives it
            return func(*args, **kwargs or {})
        device = opened[0]  # also where a thread has this mode from an earlier block
        if func is _DEVICE:  # torch asks for the device of a fake tensor more often than for all else
            return args[0].device
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs)
        to = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if to != NAME and not any(x.device.type == NAME for x in tensors):
            return _on_host(device, func, args, kwargs, tensors)
        device.threads.add(threading.get_ident())
        with device.answering:
            return self._answered(device, func, args, kwargs)

    def _answered(self, device: Device, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace in _COLLECTIVES:
            return _run_collective(device, func, args, kwargs)
        if func.namespace == ops.LIBRARY.ns:
            with self:
                return dispatch.in_parts(func, *args, **kwargs)
        if dispatch.composite(func):  # such ops come here whole below autograd
            with self:
                return func.decompose(*args, **kwargs)
        if launches(func):
            device.operations[func.name()] += 1
        with modes.functions_unseen():
            answer: Callable[..., Any] = _ANSWERS.get(func, _run_op)
            out = answer(device, func, args, kwargs)
            device.listener.ran(func, args, kwargs, out)
        return out


def past_modes(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an operation that no mode has seen: torch's own code calls it, or a thread from before the block.

    Raises:
        NotImplementedError: nothing is simulated, or this operation is one of those of which others consist.
    """
    with modes.visible_to_modes():
        if dispatch.running(Operations) is not None:
            return func(*args, **kwargs)
        if not opened or opened[0].answering.knows():
            raise NotImplementedError(f"{func.name()}: the simulated device has no kernel for it")
        with Operations():
            return func(*args, **kwargs)


def launches(func: Any) -> bool:
    """Whether an operation launches something on the device: it is neither a view nor an allocation."""
    return not func.is_view and func.namespace != "prim" and func.overloadpacket not in _NO_KERNEL


def _on_host(device: Device, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    if device.planned and func in _ROOM:
        size = args[0].numel() if isinstance(args[0], Tensor) else math.prod(args[0])
        func = _ROOM[func] if size > _SMALL else func  # what is large has room, but no pages
    if func is _aten._pin_memory.default or kwargs.get("pin_memory"):
        if device.graph is not None:
            device.graph.refuse("pinning memory")
        pins = func is _aten._pin_memory.default
        pinned = args[0].clone() if pins else func(*args, **kwargs | {"pin_memory": False})
        _pinned[pinned] = True
        device.listener.note_memory(pinned)
        return pinned
    if func is _aten.is_pinned.default:
        return args[0] in _pinned
    if func.namespace in _COLLECTIVES and dist.get_world_size() > 1 and func not in _QUIET:
        device._waited("cpu collective")
        device.listener.sent(_group_of(func, args, kwargs), HOST)
    if not func.is_view and all(x.device.type == "cpu" for x in tensors):  # those on "meta" have no memory
        reads, writes = _used(func, args, kwargs)
        device.clocks.use(HOST, func.name(), reads, writes)
        large = bool(writes) and min(x.numel() for x in writes) > _SMALL and func.overloadpacket not in _SHAPES
        if large and device.planned:  # when a step is planned, nothing reads what it would write
            return writes[0] if len(func._schema.returns) == 1 else None
    out = func(*args, **kwargs)
    if isinstance(out, Tensor) and out.device.type == "cpu":
        device.listener.note_memory(out)
    return out


_SMALL = 1024  # elements
_ROOM = {_aten.zeros.default: _aten.empty.memory_format, _aten.zeros_like.default: _aten.empty_like.default}
_QUIET = {torch.ops._c10d_functional.wait_tensor.default}
_COLLECTIVES = ("c10d", "_c10d_functional")


def _used(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those among its arguments into which it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    if not func._schema.is_mutable:
        return tensors_in(args, kwargs), writes
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        found = tensors_in(value)
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(found)
    return reads, writes


def _run_op(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on the device. As on any device, host tensors may only be single numbers."""
    if func.is_view or func.namespace == "prim" or func.overloadpacket in _SHAPES:
        return _pretended(device, func, args, kwargs)
    reads, writes = _used(func, args, kwargs)
    new = func.overloadpacket in _NO_KERNEL
    if not new:
        device.clocks.use(device.stream(), func.name(), reads, writes)
    out = _result(device, func, args, kwargs)
    if device.graph is not None:
        device.graph.use(([], []), out) if new else device.graph.record(func, args, kwargs, out, (reads, writes))
    made = [x for x in tensors_in(out) if x.device.type == NAME]
    for x in made:
        device.clocks.allocated(device.stream(), x)
    if not new:
        device.clocks.use(device.stream(), func.name(), (), made)
    return out


def _result(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, with values if the device has some, and if the operation runs now."""
    if device.values and device.graph is None:
        return _valued(device, func, args, kwargs)
    return None if func in _SHAPELESS else _pretended(device, func, args, kwargs)


def _pretended(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, without values: as it was the last time that the operation got such arguments."""
    if torch.is_inference_mode_enabled():  # torch cannot make a view, which comes from here, an inference tensor
        with torch.inference_mode(False), torch.no_grad():
            return _pretended(device, func, args, kwargs)
    key = shapes.key_of(func, args, kwargs)
    if key is None:
        return _fake_result(device, func, args, kwargs)
    known = shapes.known.get(key)
    if known is None:
        out = _fake_result(device, func, args, kwargs)
        if key == shapes.key_of(func, args, kwargs):
            shapes.known[key] = shapes.results(out, args, kwargs)
        return out
    return shapes.replayed_result(known, args, kwargs)


def _fake_result(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, without values, as torch finds its shape."""
    mode = device.fake_mode

    def fake(x: Any) -> Any:
        here = not isinstance(x, Tensor) or x.device.type == NAME
        return x if here else mode.from_tensor(x, static_shapes=True)

    args, kwargs = optree.tree_map(fake, (args, kwargs))
    kwargs.pop("generator", None)
    try:
        with mode, dispatch.outside_autocast():
            plain = getattr(func.overloadpacket, _PLAIN.get(func._overloadname, func._overloadname))
            return (cells.FORMULAS.get(func) or plain)(*args, **kwargs)
    except dynamo.DEPENDS_ON_NUMBERS as error:
        device._waited(func.name())
        raise NotImplementedError(
            f"{func.name()} at {users_line()}: what it returns depends on numbers, and the simulated device has none"
        ) from error
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{func.name()} at {users_line()}: torch cannot tell the shape of its result without running it ({error})"
        ) from error
    except RuntimeError as error:
        on = sorted({str(x.device) for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)})
        if len(on) < 2 or "same device" not in str(error):
            raise
        raise RuntimeError(
            f"{func.name()} at {users_line()}: tensors are on several devices: {', '.join(on)}. Make them inside the "
            f"block, or on the device of the others, device=x.device"
        ) from error


# Without a generator: `rand.generator` needs one, and `rand` gives the same, no values.
_PLAIN = {"generator": "default", "low_generator": "low"}


# --- values ---


def _valued(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, with values: those of the same operation on the CPU."""
    tensors = [x for x in tensors_in(args, kwargs) if x.device.type == NAME]
    index = tensors[0].device.index if tensors else device_index(kwargs.get("device"), device.current.device)
    if any(x.device.index != index for x in tensors):
        found = sorted({str(x.device) for x in tensors})
        raise RuntimeError(f"{func.name()} at {users_line()}: tensors are on several devices: {', '.join(found)}")
    originals: dict[int, Tensor] = {}  # by id of a shadow

    def shadowed(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, Tensor) or x.device.type != NAME:
            return x
        found = shadow(x)
        originals[id(found)] = x
        return found

    shadows = optree.tree_map(shadowed, (args, kwargs))
    out = (cells.FORMULAS.get(func) or dispatch.on_cpu(func))(*shadows[0], **shadows[1])
    if func.overloadpacket in _NO_KERNEL:  # what memory holds that nothing has written
        for x in optree.tree_leaves(out):
            x.untyped_storage().fill_(255)
    return optree.tree_map(lambda x: originals.get(id(x)) if id(x) in originals else _wrapped(device, x, index), out)


def shadow(x: Tensor) -> Tensor:
    """The values of a tensor, on the CPU."""
    storage = x.untyped_storage()
    values = _shadows.get(x)
    if values is None:
        values = _shadows[x] = torch.UntypedStorage(storage.nbytes())
        values.fill_(255)  # type: ignore[attr-defined]
    elif values.nbytes() < storage.nbytes():
        values.resize_(storage.nbytes())
    found = torch.empty(0, dtype=x.dtype, device="cpu").set_(values, x.storage_offset(), x.shape, x.stride())
    found = torch._conj(found) if x.is_conj() else found
    return torch._neg_view(found) if x.is_neg() else found


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


def twin(x: Tensor) -> Tensor | None:
    """A tensor with a second storage over the same memory; None where uses are checked, which go by storages."""
    module = torch.get_device_module(NAME)
    device = module.simulation()
    if device is None or device.clocks.watches:
        return None
    with dispatch.outside_modes(), device.fake_mode:  # it is no memory of its own
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    second[made] = True
    if device.values:
        shadow(x)
        _shadows[made] = _shadows[x]
    return made


# --- collectives ---


def _run_collective(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """A collective runs on a stream of its group, which waits for the current one when it is launched."""
    if func in _QUIET:
        found = device.results.get(args[0])
        if found is not None:
            device.clocks.wait(device.stream(), found[0])
            device.results[args[0]] = found[0], ()
            if device.values and device.graph is None:
                func(shadow(args[0]))
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

    def launched() -> None:
        if not message:
            with device._lock:
                device.collectives.setdefault(group, []).append((func.name(), sent))

    device.clocks.wait(stream, device.clocks.launched_until(device.stream()))
    device.clocks.use(stream, func.name(), reads, writes)
    out, number = _result(device, func, args, kwargs), -1
    if device.graph is None:
        launched()
    else:
        number = device.graph.collective(func, args, kwargs, out, (reads, writes), launched)
    made = [x for x in tensors_in(out) if x.device.type == NAME]
    for x in made:
        device.clocks.allocated(device.stream(), x)
    device.clocks.use(stream, func.name(), (), made)
    # As NCCL's works do, a collective holds its tensors until the first wait for it, whichever stream waits.
    point, held = device.clocks.launched_until(stream), (*reads, *writes)
    for x in made if func.namespace == "_c10d_functional" else ():
        device.results[x] = point, held
    for work in optree.tree_leaves(out):
        if isinstance(work, torch.ScriptObject):
            handle = process_groups.handle_of(work)
            # The handle lives, so that the caller gets this one.
            device.works[id(handle)] = handle, point, (*held, *made), number
    device.listener.sent(group.partition(" ")[0], stream)
    for x in made:
        device.listener.note_memory(x)
    return out


def _group_of(func: Any, args: Any, kwargs: Any) -> str:
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            return str(dist.ProcessGroup.unbox(x).group_name)
        if isinstance(x, str) and func.namespace == "_c10d_functional" and x not in ("sum", "avg", "max", "min"):
            return x
    return ""


def waits_for(device: Device, wait: Callable[..., bool]) -> Callable[..., bool]:
    """A collective's `wait`: the current stream waits, and the host does not."""

    @functools.wraps(wait)
    def waits(work: Any, *args: Any) -> bool:
        known = device.works.pop(id(work), None)
        if known is not None:
            device.clocks.wait(device.stream(), known[1])
            if device.graph is not None:
                device.graph.wait(known[3])
        return wait(work, *args)

    return waits


# --- operations that make the host wait, and copies ---


def _item(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    device._waited("item")
    device.clocks.use(device.stream(), func.name(), args, ())
    value = shadow(args[0]) if device.values else torch.ones((), dtype=args[0].dtype, device="cpu")
    return value.item()


def _equal(device: Device, func: Any, args: Any, kwargs: Any) -> bool:
    device._waited(func.overloadpacket.__name__)
    device.clocks.use(device.stream(), func.name(), args, ())
    return bool(_valued(device, func, args, kwargs)) if device.values else True


def _to_copy(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    (x,), to = args, kwargs.get("device")
    kind, index = None if to is None else torch.device(to).type, device_index(to, device.current.device)
    if kind is None or (kind == x.device.type and (kind != NAME or index == x.device.index)):
        return _run_op(device, func, args, kwargs)
    dtype, non_blocking = kwargs.get("dtype") or x.dtype, kwargs.get("non_blocking", False)
    if kind == NAME:
        steps = torch.empty_like(x, device="meta").stride()
        with device.fake_mode:
            made = torch.empty_strided(x.shape, steps, dtype=dtype, device=f"{NAME}:{index}")
        device.clocks.allocated(device.stream(index), made)
        return _copied_into(device, made, x, non_blocking)
    host = torch.empty(x.shape, dtype=dtype, device=to)
    if non_blocking:
        _pinned[host] = True  # torch uses pinned memory in this case
    return _copied_into(device, host, x, non_blocking)


def _run_copy(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    into, x, *rest = args
    non_blocking = rest[0] if rest else kwargs.get("non_blocking", False)
    if into.device.type == x.device.type and into.device == x.device:
        return _run_op(device, func, args, kwargs)
    return _copied_into(device, into, x, non_blocking)


def _copied_into(device: Device, into: Tensor, x: Tensor, non_blocking: bool) -> Tensor:
    """Copies between devices. The host waits, unless its memory is pinned and `non_blocking` asks it not to."""
    host = into if into.device.type == "cpu" else x
    if device.graph is not None and host.device.type == "cpu":
        device.graph.refuse(f"copy {x.device.type}->{into.device.type}")
    device.clocks.use(device.stream(), "copy", (x,), (into,))
    device.listener.copied(into, x)
    alone = host.numel() <= 1 and host is x  # travels with the kernel's arguments
    if host.device.type == "cpu" and not (non_blocking and (host in _pinned or alone)):
        device._waited(f"copy {x.device.type}->{into.device.type}")
    if device.values:
        target, source = (shadow(y) if y.device.type == NAME else y for y in (into, x))
        target.copy_(source)
    elif into.device.type == "cpu" and (not device.planned or into.numel() <= _SMALL):
        into.fill_(1)  # when a step is planned, what is large on the host has room, but no pages
    return into


def _empty_result(device: Device, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    with device.fake_mode:
        return torch.empty(shape, dtype=dtype, device=NAME)


def _sized(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """A result whose size depends on numbers; without these, as if nothing was zero."""
    device._waited(func.overloadpacket.__name__)
    if device.values:
        return _run_op(device, func, args, kwargs)
    shape, dtype = _SIZES[func](*args, **kwargs)
    return _empty_result(device, *shape, dtype=dtype)


_SIZES: dict[Any, Callable[..., tuple[tuple[int, ...], torch.dtype]]] = {
    _aten.nonzero.default: lambda x: ((x.numel(), x.ndim), torch.int64),
    _aten.masked_select.default: lambda x, mask: ((torch.broadcast_shapes(x.shape, mask.shape).numel(),), x.dtype),
    _aten.bincount.default: lambda x, weights=None, minlength=0: (
        (max(1, minlength),), torch.int64 if weights is None else torch.float64
    ),
}  # fmt: skip


def _repeat_interleave(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    size = kwargs.get("output_size")
    if size is None:
        device._waited("repeat_interleave")
        size = args[0].numel()
    return _run_op(device, func, args, kwargs) if device.values else _empty_result(device, size)


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
            shown += [_empty_result(device, *([index.numel()] if masks else index.shape)) for _ in range(many)]
    return _run_op(device, func, args if device.values else (x, shown, *rest), kwargs)


def _sparse(device: Device, func: Any, args: Any, kwargs: Any, what: str = "result") -> Any:
    raise NotImplementedError(
        f"{func.name()} at {users_line()}: its {what} is sparse, which the simulated device does not support"
    )


def _run_embedding(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    position = [argument.name for argument in func._schema.arguments].index("sparse")
    if any(args[position : position + 1]) or kwargs.get("sparse"):
        _sparse(device, func, args, kwargs, "gradient")
    return _run_op(device, func, args, kwargs)


_SHAPES = {getattr(_aten, name) for name in ("resize_", "set_", "_reshape_alias", "_unsafe_view", "lift_fresh")}
_NO_KERNEL = _SHAPES | {
    getattr(_aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream", "is_pinned")
}


_ANSWERS: dict[Any, Callable[..., Any]] = {
    # Zeros of forward mode have memory here: the device knows no tensors without.
    _aten._efficientzerotensor.default: lambda device, _, *given: _run_op(device, _aten.zeros.default, *given),
    _aten._local_scalar_dense.default: _item,
    _aten.equal.default: _equal,
    _aten.allclose.default: _equal,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _run_copy,
    **dict.fromkeys(_SIZES, _sized),
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.index.Tensor: _index,
    _aten.index_put.default: _index,
    _aten.index_put_.default: _index,
    _aten._index_put_impl_.default: _index,
    _aten.record_stream.default: lambda device, _, args, kwargs: device.clocks.record(args[0], args[1].stream_id),
    _aten.embedding.default: _run_embedding,
    _aten._embedding_bag.default: _run_embedding,
    _aten._to_sparse.default: _sparse,
    _aten._to_sparse.sparse_dim: _sparse,
    _aten._sparse_coo_tensor_with_dims_and_tensors.default: _sparse,
}
_SHAPELESS = {  # torch does not know that they return nothing
    _aten._fused_sgd_.default, _aten._fused_sgd_.tensor_lr, _aten._fused_adam_.tensor_lr, _aten._fused_adamw_.tensor_lr,
}  # fmt: skip


# --- where ---


def line(of_package: bool = True) -> str:
    """The innermost line of this package outside its testing tools, or otherwise of code that is not a library."""
    other = ""
    for where, ours in _stack_lines():
        if ours == of_package:
            return where
        other = other or where
    return other or "?"


def users_line() -> str:
    """The innermost line of code that is neither a library nor this package, or otherwise of this package."""
    return line(of_package=False)


def _stack_lines() -> Iterator[tuple[str, bool]]:
    """The lines in the call stack, innermost first, and whether each is this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        kind = "user" if file.startswith(MODELS) else kind_of(file)
        ours = kind == "package" and not file.startswith(_TOOLS)
        if ours or kind in ("user", "installed"):
            name = f"shardfn/{file.removeprefix(PACKAGE)}" if ours else pathlib.PurePath(file).name
            yield f"{name}:{frame.f_lineno}", ours
        frame = frame.f_back
