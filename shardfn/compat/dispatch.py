"""Operators of this package, and queries about the dispatcher."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch._C._functorch import get_single_level_autograd_function_allowed, set_single_level_autograd_function_allowed
from torch._functorch.eager_transforms import enable_inplace_requires_grad, grad_increment_nesting
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Mode = TypeVar("Mode", bound=TorchDispatchMode)


def outside_modes() -> Any:
    """A context in which ops create plain tensors that no dispatch mode, such as a fake-tensor mode, takes over."""
    return _disable_current_modes()


def untraced() -> Any:
    """A context in which ops run at once, and are part of no graph that torch traces here."""
    return outside_modes() if any(map(_keyed, _modes())) else contextlib.nullcontext()


WIRE: Any = torch.ops._c10d_functional
"""Functional collectives as ops, which torch.compile's passes look for in a graph."""


def register(
    lib: torch.library.Library,
    name: str,
    statics: str,
    kernel: Callable[..., torch.Tensor],
    backward: Callable[..., torch.Tensor],
    forward_mode: Callable[..., torch.Tensor],
    batch: Callable[..., tuple[torch.Tensor, int]],
) -> Callable[..., torch.Tensor]:
    """Registers op `name(Tensor x, <statics>)`, with one function of (x, *statics) for each transform.

    The Autograd kernel is a single-level Function that redispatches to the same op below autograd, where an outer
    transform meets the op again and applies its own rule: this makes nesting work.
    """
    lib.define(f"{name}(Tensor x, {statics}) -> Tensor")
    op = getattr(getattr(torch.ops, lib.ns), name).default

    class Rule(_SingleLevelFunction):
        @staticmethod
        def forward(keys: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
            # Outer levels must record this call: without the first two, grad of grad is silently zero.
            with torch.enable_grad(), _set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keys & torch._C._after_autograd_keyset, x, *args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.args = inputs[2:]
            ctx.set_materialize_grads(False)  # zeros would be moved, and reach what has no gradient

        @staticmethod
        def backward(ctx: Any, ct: torch.Tensor | None) -> tuple[Any, ...]:
            return (None, None if ct is None else backward(ct, *ctx.args), *(None for _ in ctx.args))

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


@functools.cache
def composite(op: Any) -> bool:
    """Whether an op is defined by other ops, which autograd differentiates in its place."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        op.namespace == "aten"
        and has(op.name(), "CompositeImplicitAutograd")
        and op.overloadpacket.__name__ not in OF_ACCELERATORS
    )


OF_ACCELERATORS = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Ops for which CUDA has kernels, while devices that have none compose them of others, which take more memory."""


PAST_MODES = ("empty.memory_format", "empty_strided", "copy_", "_local_scalar_dense")
"""Ops that torch's own code calls where no mode sees them, as to make a tensor of the list in `x[[0, 2]]`."""


@functools.cache
def own_kernels(answer: Callable[..., Any]) -> torch.library.Library:
    """Makes ops those of a simulated device, too; autograd has formulas for those of accelerators.

    Args:
        answer: what is called with the op and its arguments, if no mode has answered it.
    """
    lib = torch.library.Library("aten", "IMPL")
    for name in OF_ACCELERATORS + PAST_MODES:
        lib.impl(name, functools.partial(answer, _aten_op(name)), "PrivateUse1")
    return lib


def autocasting(rules: dict[str, Callable[..., Any]]) -> torch.library.Library:
    """Makes `torch.autocast` work on torch's spare device.

    Args:
        rules: by the name of each op that it changes: what is called with the op and its arguments, outside autocast.
    """
    lib = torch.library.Library("aten", "IMPL")
    for name, rule in rules.items():
        lib.impl(name, functools.partial(_outside_autocast, rule, _aten_op(name)), "AutocastPrivateUse1")
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    lib.rest = rest  # type: ignore[attr-defined]  # both live as long as one
    return lib


def _outside_autocast(rule: Callable[..., Any], op: Any, *args: Any, **kwargs: Any) -> Any:
    with outside_autocast():
        return rule(op, *args, **kwargs)


def outside_autocast() -> Any:
    """Returns a context in which autocast changes no op on torch's spare device."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    return torch._C._ExcludeDispatchKeyGuard(key)


def _aten_op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def on_cpu(op: Any) -> Any:
    """Returns a function that computes an op on CPU tensors: the op, or its decomposition if it has no kernel."""
    if op is not torch.ops.aten._fused_rms_norm_backward.default:
        return op
    from torch._decomp import decomposition_table  # which takes a while

    return decomposition_table[op]


def in_parts(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs a registered op by its kernel, whose own operations a mode sees."""
    return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def _backwards(y: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of `y` with respect to its single leaf, as a differentiable tensor.

    Avoids autograd's engine, which would start now, with threads for the devices known so far: a process forked later
    could then not differentiate if there is a GPU, nor could this one on a device that is registered later.
    """
    order: list[Any] = []
    visited: set[Any] = set()

    def visit(node: Any) -> None:
        if node is not None and node not in visited:
            visited.add(node)
            for parent, _ in node.next_functions:
                visit(parent)
            order.append(node)

    visit(y.grad_fn)
    cotangents: dict[Any, Any] = {y.grad_fn: torch.ones_like(y)}
    for node in reversed(order[1:]):
        ct = cotangents[node]
        result = node.apply(ct) if isinstance(node, torch.autograd.function.BackwardCFunction) else node(ct)
        grads = result if isinstance(result, tuple) else (result,)
        if len(grads) > len(node.next_functions):  # a Python Function also returns None for non-tensors
            grads = tuple(g for g in grads if g is not None)
        for (parent, _), g in zip(node.next_functions, grads, strict=True):
            if parent is not None and g is not None:
                cotangents[parent] = cotangents[parent] + g if parent in cotangents else g
    return cotangents[order[0]]  # the leaf's own node


def _nesting_works() -> bool:
    """Whether the second derivative through a registered op that doubles a number is right."""
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
        # Does what torch.func.grad does, which itself would load all of torch.compile.
        with torch.enable_grad(), grad_increment_nesting() as level, enable_inplace_requires_grad(True):
            x = torch._C._functorch._wrap_for_grad(x, level).requires_grad_()
            return torch._C._functorch._unwrap_for_grad(_backwards(f(x).sum()), level)

    second = derivative(
        lambda x: derivative(lambda x: double(x, 2) ** 3, x), torch.ones(2, dtype=torch.float64, device="cpu")
    )
    return bool((second == 48).all())  # the second derivative of 8 x^3 at 1


if not _nesting_works():
    raise ImportError(
        f"torch {torch.__version__} computes wrong second derivatives through operations of shardfn. Install a tested "
        f"version, torch 2.11 to 2.14"
    )


@functools.cache
def drawing(op: Any) -> tuple[Any, int] | None:
    """Returns the overload of a random op that takes a generator, and the generator's position; None without one."""
    names = [argument.name for argument in op._schema.arguments]
    if "generator" in names:
        return op, names.index("generator")
    for overload in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, overload)
        other_names = [argument.name for argument in other._schema.arguments]
        if "generator" in other_names and [name for name in other_names if name != "generator"] == names:
            return other, len(names)  # keyword-only
    return None


def plain(x: torch.Tensor) -> bool:
    """Whether a tensor has data and no mode changes the ops on it: not fake, and not being traced."""
    watched: Any = type(x).__torch_dispatch__
    return watched is torch.Tensor.__torch_dispatch__ and not traced()


def running(kind: type[Mode]) -> Mode | None:
    """Returns the innermost mode of this class that sees ops here; autograd's threads inherit the caller's modes."""
    return next((mode for mode in reversed(_modes()) if isinstance(mode, kind)), None)


def traced() -> bool:
    """Whether a dispatch mode is active that may change what ops do: one of torch's own, or of a pretended device.

    Modes that only count or keep results, as `torch.utils.flop_counter` and checkpoints do, change nothing, and may be
    active on some ranks only.
    """
    return pretended() or any(map(_keyed, _modes()))


def pretended() -> bool:
    """Whether the mode of a pretended device is active: its tensors are fake ones, and stay as long as others."""
    return any(getattr(mode, "pretends", False) for mode in _modes())


def ordinary(x: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass; tensors of a simulated device count as ordinary."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) or any(
        getattr(mode, "pretends", False) and mode.owns(x) for mode in _modes()
    )


def readable(x: torch.Tensor) -> bool:
    """Whether the host can read a tensor's numbers now: nothing is traced, and it has some, also on a pretended device.

    Tensors of a planned device count too, whose numbers are made up.
    """
    return ordinary(x) and x.device.type != "meta" and not any(map(_keyed, _modes()))


def fake(x: torch.Tensor) -> bool:
    """Whether a tensor has no values, and belongs to a fake-tensor mode or to a pretended device."""
    return isinstance(x, FakeTensor)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation, or in its result, which are lists and dicts at most."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += tensors_in(*value)
        elif isinstance(value, dict):
            tensors += tensors_in(*value.values())
    return tensors


def is_op(func: Any) -> bool:
    """Whether what a dispatch mode is told of is one of the dispatcher's operations, not one of functions."""
    return isinstance(func, torch._ops.OpOverload)


def in_graph() -> bool:
    """Whether torch traces ops into a graph here, to run them later, as `make_fx` does."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return any(getattr(mode, "_mode_key", None) is proxy for mode in _modes())


def _modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


def _keyed(mode: Any) -> bool:
    """Whether a mode is one of torch's own that trace, or that make fake tensors."""
    return getattr(mode, "_mode_key", None) is not None
