"""Operators of our own, and what a dispatcher does with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Mode = TypeVar("Mode", bound=TorchDispatchMode)


def outside_modes() -> Any:
    """A context: ops inside make tensors as they are, which no mode, of fake tensors say, has for its own."""
    return _disable_current_modes()


WIRE: Any = torch.ops._c10d_functional


"""Functional collectives as ops: what torch.compile's passes look for in a graph."""


try:
    from torch._C._functorch import (
        get_single_level_autograd_function_allowed,
        set_single_level_autograd_function_allowed,
    )
    from torch._functorch.eager_transforms import enable_inplace_requires_grad, grad_increment_nesting
    from torch._functorch.pyfunctorch import (
        temporarily_pop_interpreter_stack as temporarily_pop_interpreter_stack,
    )
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
        if len(several) > len(node.next_functions):  # a Function in Python answers for what is not a tensor, too
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


def plain(x: torch.Tensor) -> bool:
    """Whether a tensor has data and nobody watches the ops on it: no fake tensor, no tracing."""
    watched: Any = type(x).__torch_dispatch__
    return watched is torch.Tensor.__torch_dispatch__ and not traced()


def running(kind: type[Mode]) -> Mode | None:
    """The innermost mode of this class that sees the ops here; autograd's own threads have those of who called it."""
    stack = (torch._C._get_dispatch_stack_at(i) for i in reversed(range(torch._C._len_torch_dispatch_stack())))
    return next((mode for mode in stack if isinstance(mode, kind)), None)


def traced() -> bool:
    """Whether a dispatch mode runs that may change what ops do: one of torch's own, or of a pretended device.

    What only counts or keeps what ops give, as `torch.utils.flop_counter` and checkpoints do, changes nothing, and may
    run on some ranks alone.
    """
    modes = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    return any(getattr(mode, "_mode_key", None) is not None or getattr(mode, "pretends", False) for mode in modes)
