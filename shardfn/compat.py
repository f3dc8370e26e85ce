"""The only home of private torch names, and of names that changed between releases.

`SINGLE_LEVEL` says whether this torch lets one registered op carry its own rule for every transform
(see `primitive.py`); it is found out by trying, not by version number.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import pathlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

Function = TypeVar("Function", bound=Callable[..., Any])

DispatchMode = TorchDispatchMode

WIRE: Any = torch.ops._c10d_functional
"""Functional collectives as ops: what torch.compile's passes look for in a graph."""

try:
    from torch._C._functorch import (
        get_single_level_autograd_function_allowed,
        set_single_level_autograd_function_allowed,
    )
    from torch._functorch.eager_transforms import enable_inplace_requires_grad, grad_increment_nesting
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
    from torch.autograd.forward_ad import _set_fwd_grad_enabled
    from torch.autograd.function import _SingleLevelFunction
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    _AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
    _after_autograd = torch._C._after_autograd_keyset
    HAS_NAMES = True
except (ImportError, AttributeError):  # a torch without them takes the public construction
    HAS_NAMES = False


def register(
    lib: torch.library.Library,
    name: str,
    statics: str,
    kernel: Callable[..., torch.Tensor],
    backward: Callable[..., torch.Tensor],
    forward_mode: Callable[..., torch.Tensor],
    batch: Callable[..., tuple[torch.Tensor, int]],
) -> Callable[..., torch.Tensor]:
    """Registers op `name(Tensor x, <statics>)`, each of whose transforms is given by one function of (x, *statics).

    The Autograd kernel is a single-level Function that redispatches to the same op below autograd, where an
    outer transform meets the op again and applies its own rule: that is what makes nesting work.
    """
    lib.define(f"{name}(Tensor x, {statics}) -> Tensor")
    op = getattr(getattr(torch.ops, lib.ns), name).default

    class Rule(_SingleLevelFunction):
        @staticmethod
        def forward(keys: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
            # Outer levels must record this call: without the first two, grad of grad is silently zero.
            with torch.enable_grad(), _set_fwd_grad_enabled(True), _AutoDispatchBelowAutograd():
                return op.redispatch(keys & _after_autograd, x, *args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.args = inputs[2:]

        @staticmethod
        def backward(ctx: Any, ct: torch.Tensor) -> tuple[Any, ...]:
            return (None, backward(ct, *ctx.args), *(None for _ in ctx.args))

        @staticmethod
        def jvp(ctx: Any, _: Any, tangent: torch.Tensor, *__: Any) -> torch.Tensor:
            return forward_mode(tangent, *ctx.args)

    def autograd_kernel(keys: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        allowed = get_single_level_autograd_function_allowed()
        set_single_level_autograd_function_allowed(True)
        try:
            return Rule.apply(keys, x, *args)  # type: ignore[attr-defined]
        finally:
            set_single_level_autograd_function_allowed(allowed)

    def traced(mode: Any, *args: Any) -> torch.Tensor:
        with mode:  # a graph holds the functional collectives themselves, which compilers know
            return kernel(*args)

    lib.impl(name, kernel, "CompositeExplicitAutograd")
    lib.impl(name, autograd_kernel, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"{lib.ns}::{name}", lambda _, dims, x, *args: batch(dims[0], x, *args), lib=lib)
    op.py_impl(ProxyTorchDispatchMode)(traced)
    return op


def _backwards(y: torch.Tensor) -> torch.Tensor:
    """The gradient of `y` by the one leaf that it was made from, with a graph of its own.

    Not by autograd's engine: that would start here, with threads for the devices that there are by now, so a process
    forked later could not differentiate where there is a GPU, nor this one on a device that is registered later.
    """
    order: list[Any] = []
    seen: set[Any] = set()

    def visit(node: Any) -> None:
        if node is not None and node not in seen:
            seen.add(node)
            for parent, _ in node.next_functions:
                visit(parent)
            order.append(node)

    visit(y.grad_fn)
    arrived: dict[Any, Any] = {y.grad_fn: torch.ones_like(y)}
    for node in reversed(order[1:]):
        ct = arrived[node]
        made = node.apply(ct) if isinstance(node, torch.autograd.function.BackwardCFunction) else node(ct)
        several = made if isinstance(made, tuple) else (made,)
        if len(several) > len(node.next_functions):  # a Function in Python answers for what is no tensor, too
            several = tuple(g for g in several if g is not None)
        for (parent, _), g in zip(node.next_functions, several, strict=True):
            if parent is not None and g is not None:
                arrived[parent] = arrived[parent] + g if parent in arrived else g
    return arrived[order[0]]  # the leaf's own node


def _nesting_works() -> bool:
    """Doubles a number through a registered op, and asks for the derivative of its derivative."""
    lib = torch.library.Library("shardfn_probe", "FRAGMENT")

    def double(x: torch.Tensor, n: int) -> torch.Tensor:
        return op(x, n)

    op = register(
        lib,
        "double",
        "int n",
        kernel=lambda x, n: x * n,
        backward=double,
        forward_mode=double,
        batch=lambda dim, x, n: (op(x, n), dim),
    )

    def derivative(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        # What torch.func.grad does; torch.func.grad itself would load the whole of torch.compile.
        with torch.enable_grad(), grad_increment_nesting() as level, enable_inplace_requires_grad(True):
            x = torch._C._functorch._wrap_for_grad(x, level).requires_grad_()
            return torch._C._functorch._unwrap_for_grad(_backwards(f(x).sum()), level)

    second = derivative(lambda x: derivative(lambda x: double(x, 2) ** 3, x), torch.ones(2, dtype=torch.float64))
    return bool((second == 48).all())  # of 8 x^3


def _try(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except Exception:
        return False


SINGLE_LEVEL = HAS_NAMES and _try(_nesting_works)


def inside_transform() -> bool:
    """Whether a torch.func transform is running here."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> Any:
    """A context: ops inside are done at once, on plain tensors, whatever torch.func transforms run."""
    return torch._C._DisableFuncTorch()


def followed(x: torch.Tensor) -> set[tuple[int, str]]:
    """What follows a tensor, and on which level of torch.func's transforms: a gradient, a tangent, a batch."""
    functorch, found = torch._C._functorch, set()
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        found.add("tangent")
    top = functorch.peek_interpreter_stack()
    own = top is not None and functorch.is_functorch_wrapped_tensor(x) and functorch.maybe_get_level(x) == top.level()
    if own and functorch.is_batchedtensor(x):
        found.add("batch")
    elif x.requires_grad and (own or top is None):
        found.add("gradient")
    if top is None:
        return {(0, one) for one in found}
    with temporarily_pop_interpreter_stack():
        return {(top.level(), one) for one in found} | followed(functorch.get_unwrapped(x) if own else x)


def constant(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor inside what torch.func's gradients have wrapped; None if some level follows a gradient of it."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if x.requires_grad or not functorch.is_gradtrackingtensor(x):
            return None
        x = functorch.get_unwrapped(x)
    return x


def inside_batching_or_forward() -> bool:
    """Whether a tensor may be a batch of vmap's, or carry a tangent: torch.func.grad and vjp alone do neither."""
    if forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() not in _REVERSE for level in stack)


def batching() -> bool:
    """Whether a vmap is running here."""
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


_REVERSE = (torch._C._functorch.TransformType.Grad,)


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, which binds the arguments to a signature anew at each call."""
    if inside_transform():
        return function.apply(*args)
    plain = super(torch.autograd.Function, function)
    return plain.apply(*(alive(x) if isinstance(x, torch.Tensor) else x for x in args))  # type: ignore[attr-defined]


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """A tensor without the wrapping of any transform."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def alive(x: torch.Tensor) -> torch.Tensor:
    """A tensor without the wrapping of transforms that have ended."""
    return torch._C._functorch.unwrap_if_dead(x)


def batched(x: torch.Tensor) -> bool:
    """Whether a tensor is a batch of `torch.autograd.grad(is_grads_batched=True)`'s."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def wrapped(x: Any) -> bool:
    """Whether a tensor belongs to a torch.func transform that is running."""
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def saved_tensors_hooks_allowed() -> bool:
    """Whether saved-tensor hooks work here: torch.func's transforms do not let them."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The hooks, `(pack, unpack)`, that saved tensors go through here, if any."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def assert_on_device(holds: torch.Tensor, message: str) -> None:
    """Fails, later and on the device, unless `holds`."""
    torch._assert_async(holds, message)


@functools.cache
def drawing(op: Any) -> tuple[Any, int] | None:
    """An op that does what a random one does with a generator, and which argument that is; None if there is none."""
    names = [argument.name for argument in op._schema.arguments]
    if "generator" in names:
        return op, names.index("generator")
    for overload in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, overload)
        theirs = [argument.name for argument in other._schema.arguments]
        if "generator" in theirs and [name for name in theirs if name != "generator"] == names:
            return other, len(names)  # by name alone
    return None


def inside_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def autograd_thread() -> bool:
    """Whether this thread is one of autograd's own, which Python did not start: backward of CUDA tensors runs there."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def register_in_torch(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    """Makes a class a node of torch's own pytrees, which torch.func flattens by."""
    torch.utils._pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )


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


def plain(x: torch.Tensor) -> bool:
    """Whether a tensor has data and nobody watches the ops on it: no fake tensor, no tracing."""
    watched: Any = type(x).__torch_dispatch__
    return watched is torch.Tensor.__torch_dispatch__ and not torch._C._len_torch_dispatch_stack()


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    found: dist.ProcessGroup = _resolve(name)
    return found


def backend_of(group: dist.ProcessGroup, device: str) -> str:
    """Which backend moves a group's tensors on a kind of device: `"gloo"`, `"nccl"`, ..."""
    return dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",")).get(device, "undefined")


def global_rank() -> int:
    """This process's rank; 0 where torch.distributed has not started."""
    return dist.get_rank() if dist.is_initialized() else 0


def storage_of(x: torch.Tensor) -> int:
    """The same number for tensors that share memory; tensors without data, fake ones say, have one too."""
    return x.untyped_storage()._cdata


_NAMEABLE = ("cpu", "cuda", "xpu")  # where memory goes from library to library by DLPack


def second_storage(x: torch.Tensor) -> torch.Tensor | None:
    """The same memory by a storage of its own; None where that cannot be had."""
    if type(x) is not torch.Tensor or x.device.type not in _NAMEABLE:  # a fake tensor's would be read all the same
        return None
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))  # type: ignore[attr-defined]


COUNTS_REFERENCES = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def references(x: torch.Tensor) -> tuple[int, int]:
    """How many things refer to a tensor: in C++, and in Python."""
    return x._use_count(), sys.getrefcount(x)  # type: ignore[attr-defined]


def storage_references(x: torch.Tensor) -> int:
    """How many tensors, and other things, refer to the storage of `x`."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def inside_forward_mode() -> bool:
    """Whether tensors may carry tangents here."""
    return forward_ad._current_level >= 0


def constant_when_traced(f: Function) -> Function:
    """torch.compile runs `f` once, while tracing, and takes its result as a constant."""
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's own way loads all of it
    return f


@constant_when_traced
def trace_dicts() -> None:
    """From here on torch.compile traces how optree takes dicts of plain numbers apart, as it does for other dicts.

    It would call optree for them, whose result it cannot hold, and mix up with its own.
    """
    try:
        from torch._dynamo.polyfills import pytree
    except ImportError:  # without it optree is no part of any graph
        return
    for name in ("dict_flatten", "dict_unflatten"):
        if hasattr(pytree, name):
            getattr(pytree, name).__torch_dynamo_can_constant_fold_through__ = False


def one_graph() -> Any:
    """A context: while torch.compile traces, what it cannot follow inside is an error, and not run in pieces."""
    strict = getattr(torch._dynamo, "error_on_graph_break", None) if torch.compiler.is_compiling() else None
    return nullcontext() if strict is None else strict(True)


@constant_when_traced
def refuse_in_graph(message: str | None) -> None:
    """Ends what torch.compile traces with an error, unless there is nothing to say; for use inside `one_graph`.

    An exception that traced code raises would have it run again, uncompiled, in pieces.
    """
    if message is not None:
        raise torch._dynamo.exc.UserError(torch._dynamo.exc.UserErrorType.INVALID_INPUT, message)


def default_store() -> Any:
    """The store by which the processes of the default group met."""
    return dist.distributed_c10d._get_default_store()


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
    try:
        group.recv([torch.zeros(1)], (group.rank() + 1) % group.size(), _NOBODY_SENDS).wait(timedelta(milliseconds=1))
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


@functools.cache
def fake_mode() -> Any:
    """Under which operations make tensors that have shapes, dtypes and strides, but no numbers; one a process."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensors() -> Any:
    """The class of such tensors."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def depends_on_numbers() -> tuple[type[Exception], ...]:
    """What an operation on such tensors raises that would have to look at numbers."""
    from torch._subclasses import fake_tensor

    return fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


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


def result_of(node: Any, number: int) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of one of the results whose gradient a node of autograd's graph takes."""
    variable = getattr(node, "variable", None)
    found = node._input_metadata[number] if variable is None else variable
    return tuple(found.shape), found.dtype


def backward_pass() -> int:
    """The number of the backward pass that runs on this thread; -1 for none."""
    number: int = torch._C._current_graph_task_id()
    return number


_fused_cpu: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_fused_cpu_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_fused_cuda: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention", None)
_fused_cuda_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", None)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[b, h, t, d], [b, h, s, d], ... -> [b, h, t, d]` and the logarithm of its sums `[b, h, t]`.

    No autograd. By torch's fused kernels where they take such tensors.
    """
    if _fits_cpu(q, k):
        return _fused_cpu(*map(_rows, (q, k, v)), 0.0, causal, scale=scale)
    if _fits_cuda(q, k):
        out, lse = _fused_cuda(*map(_even_rows, (q, k, v)), 0.0, causal, False, scale=scale)[:2]
        return out[..., : v.shape[-1]], lse
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp().to(v.dtype) @ v), lse


def attention_backward(
    ct: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by `q`, `k` and `v`, where `out` and `lse` are of attention to these keys and maybe to others too."""
    if _fits_cpu(q, k):
        return _fused_cpu_backward(*map(_rows, (ct, q, k, v, out)), lse, 0.0, causal, scale=scale)
    if _fits_cuda(q, k):
        lse = lse.contiguous()  # as the kernel reads it, whatever its strides
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)
        more = None, None, q.shape[2], k.shape[2], 0.0, causal, nothing, nothing
        found = _fused_cuda_backward(*map(_even_rows, (ct, q, k, v, out)), lse, *more, scale=scale)
        dq, dk, dv = (g[..., : q.shape[-1]] for g in found)
        return dq, dk, dv
    p = (_scores(q, k, causal, scale) - lse[..., None]).exp()
    d = (ct * out).sum(-1, keepdim=True).to(p.dtype)
    ds = (p * ((ct @ v.mT).to(p.dtype) - d) * scale).to(q.dtype)
    return ds @ k, ds.mT @ q, p.to(ct.dtype).mT @ ct


def _fits_cpu(q: torch.Tensor, k: torch.Tensor) -> bool:
    known = _fused_cpu is not None and _fused_cpu_backward is not None
    return known and q.device.type == "cpu" and min(q.numel(), k.numel()) > 0


def _fits_cuda(q: torch.Tensor, k: torch.Tensor) -> bool:
    known = _fused_cuda is not None and _fused_cuda_backward is not None
    narrow = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    return known and narrow and min(q.numel(), k.numel()) > 0 and _has_flash(q.device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether torch and the device have the kernels."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """With the numbers of a row side by side, as kernels take for granted, and none of them asks."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _even_rows(x: torch.Tensor) -> torch.Tensor:
    """With rows, side by side, of a multiple of 8 numbers, each of which begins at a multiple of 8 numbers."""
    if x.shape[-1] % 8:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
    even = x.stride(-1) == 1 and not any(n % 8 for n in (x.storage_offset(), *x.stride()[:-1]))
    return x if even else x.clone(memory_format=torch.contiguous_format)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores


def checkpoint_metadata(
    tensors: dict[str, tuple[torch.dtype, Sequence[int], list[tuple[Any, ...]]]],
    numbers: dict[str, tuple[str, int, int]],
    keys: dict[str, tuple[Any, ...]],
) -> Any:
    """What torch.distributed.checkpoint pickles beside its files.

    Args:
        tensors: name -> dtype, shape, and parts `(offsets, sizes, file, offset, length)`.
        numbers: name -> `(file, offset, length)`.
        keys: name -> the keys to it in nested dicts.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    described: dict[str, Any] = {name: metadata.BytesStorageMetadata() for name in numbers}
    places = {metadata.MetadataIndex(name): filesystem._StorageInfo(*place) for name, place in numbers.items()}
    for name, (dtype, shape, parts) in tensors.items():
        chunks = [metadata.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes, *_ in parts]
        described[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=dtype), torch.Size(shape), chunks
        )
        for i, (at, _, *place) in enumerate(parts):
            places[metadata.MetadataIndex(name, at, i)] = filesystem._StorageInfo(*place)
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return metadata.Metadata(
        described, keys, places, metadata.StorageMeta(), **({"version": version} if version else {})
    )


def read_checkpoint_metadata(content: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, int, int]]]:
    """The first two arguments of `checkpoint_metadata` from such a pickle, in which nothing else is allowed.

    Raises:
        pickle.UnpicklingError: the pickle asks for something else.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    found = _described(content)
    places: dict[tuple[str, Any], filesystem._StorageInfo] = {
        (index.fqn, index.offset and tuple(index.offset)): place for index, place in found.storage_data.items()
    }
    tensors, numbers = {}, {}
    for name, one in found.state_dict_metadata.items():
        if isinstance(one, metadata.BytesStorageMetadata):
            place = places[name, None]
            numbers[name] = place.relative_path, place.offset, place.length
            continue
        parts = []
        for chunk in one.chunks:
            place = places.get((name, tuple(chunk.offsets))) or places[name, None]
            parts.append((tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length))
        tensors[name] = one.properties.dtype, tuple(one.size), parts
    every = [*numbers.values(), *(part[2:] for _, _, parts in tensors.values() for part in parts)]
    if any(tuple(map(type, place)) != (str, int, int) or min(place[1:]) < 0 for place in every):
        raise pickle.UnpicklingError("a place in a file that is none")
    return tensors, numbers


def read_checkpoint_keys(content: bytes) -> dict[str, tuple[Any, ...]]:
    """The third argument of `checkpoint_metadata` from such a pickle; empty where there is none.

    Raises:
        pickle.UnpicklingError: the pickle asks for something else.
    """
    keys = _described(content).planner_data
    return dict(keys) if isinstance(keys, dict) else {}


def _described(content: bytes) -> Any:
    from torch.distributed.checkpoint import metadata

    found = _Data(io.BytesIO(content)).load()
    if not isinstance(found, metadata.Metadata):
        raise pickle.UnpicklingError(f"a {type(found).__name__} in place of torch.distributed.checkpoint's Metadata")
    return found


class _Data(pickle.Unpickler):
    """Makes what describes a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        from torch.distributed.checkpoint import filesystem, metadata

        if module == "torch.distributed.checkpoint.metadata" and name in (*metadata.__all__, "_MEM_FORMAT_ENCODING"):
            return getattr(metadata, name)
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return filesystem._StorageInfo
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return getattr(torch.serialization, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"):
            return getattr(pathlib, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no description of tensors needs")
