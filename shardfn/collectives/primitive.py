"""Linear ops between ranks that pass every transform: each is a kernel, a transpose, and nothing else.

A collective is linear in its one tensor, so its forward derivative is itself and its reverse derivative its
transpose; batching it is the same collective over the batched tensor. `primitive` makes an op of these facts:
one registered op where torch allows it (`compat.SINGLE_LEVEL`; it also passes torch.compile around torch.func),
or else one public `autograd.Function`, eager only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import dispatch

Op = Callable[..., Tensor]


def _namespace() -> str:
    # torch.compile keeps graphs on disk under the names of the ops in them: new code takes a new name.
    here = Path(__file__).parent
    own = [here / f"{name}.py" for name in ("primitive", "messages", "kernels", "ops")]
    files = [*own, *sorted((here.parent / "compat").glob("*.py"))]
    code = b"".join(file.read_bytes() for file in files)
    return f"shardfn_{hashlib.blake2b(code, digest_size=4).hexdigest()}"


LIBRARY = torch.library.Library(_namespace(), "FRAGMENT")


def primitive(name: str, statics: str, kernel: Op, transpose: Op | None) -> Op:
    """An op `(x, *statics) -> Tensor`, linear in `x`.

    Args:
        name: the op's name, as graphs show it.
        statics: the other arguments as in an op schema, `"int dim, int size, str group"`. Names that end in `dim`
            are dimensions of `x`, non-negative, and are shifted under vmap.
        kernel: what moves the bytes; sees plain tensors only, returns a fresh tensor.
        transpose: `(cotangent, *statics) -> Tensor`, or None for an op without a derivative.
    """
    make = registered if dispatch.SINGLE_LEVEL else public
    op = make(name, statics, kernel, transpose)
    return op if transpose else _refusing_early(op, _refusal(name))


def registered(name: str, statics: str, kernel: Op, transpose: Op | None) -> Op:
    """One dispatcher op with a rule for each transform: passes eager transforms and torch.compile."""
    refuse = _refusal(name)
    op: Op = dispatch.register(
        LIBRARY,
        name,
        statics,
        kernel=kernel,
        backward=transpose or refuse,
        forward_mode=(lambda t, *args: op(t, *args)) if transpose else refuse,
        batch=_batching(lambda x, *args: op(x, *args), statics),
    )
    return op


def public(name: str, statics: str, kernel: Op, transpose: Op | None) -> Op:
    """The same from public names only: every eager transform; torch.compile stops with a graph break at it."""
    refuse = _refusal(name)

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, *args: Any) -> Tensor:
            return kernel(x, *args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.args = inputs[1:]

        @staticmethod
        def backward(ctx: Any, ct: Tensor) -> tuple[Tensor | None, ...]:
            return ((transpose or refuse)(ct, *ctx.args), *(None for _ in ctx.args))

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
            return apply(tangent, *ctx.args) if transpose else refuse(tangent)

        @staticmethod
        def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor, *args: Any) -> tuple[Tensor, int]:
            return batch(dims[0], x, *args)

    apply: Op = torch.compiler.disable(lambda x, *args: Collective.apply(x, *args))  # type: ignore[no-untyped-call]
    batch = _batching(apply, statics)
    return apply


def _batching(op: Op, statics: str) -> Callable[..., tuple[Tensor, int]]:
    """One collective over the whole batch: the batch goes in front, and the op's dimensions move up by one."""
    shifts = [int(argument.split()[-1].endswith("dim")) for argument in statics.split(",")]

    def batch(dim: int, x: Tensor, *args: Any) -> tuple[Tensor, int]:
        moved = [a + 1 if shift else a for a, shift in zip(args, shifts, strict=True)]
        return op(x.movedim(dim, 0), *moved), 0

    return batch


def _refusal(name: str) -> Op:
    def refuse(*_: Any) -> Tensor:
        raise NotImplementedError(
            f"{name} has no derivative: the ranks that do not hold the extreme value would get none. "
            f"Pass it a value that is not differentiated, {name}(x.detach(), axis), as in a stable softmax."
        )

    return refuse


def _refusing_early(op: Op, refuse: Op) -> Op:
    """Backward would refuse as well, but far from the line that is to blame."""

    def early(x: Tensor, *args: Any) -> Tensor:
        return refuse(x) if x.requires_grad and torch.is_grad_enabled() else op(x, *args)

    return early
