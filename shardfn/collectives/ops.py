"""The ops under the collectives, each a kernel and a transpose; the transposes define every gradient.

A collective is linear in its one tensor: its forward derivative is itself, its reverse derivative its transpose, and
batching it is the same collective over the batched tensor. `primitive` makes an op from these facts, which works under
eager transforms and under torch.compile, also around torch.func.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn.callers import caller
from shardfn.check import recording
from shardfn.check.callsites import paused
from shardfn.check.findings import Finding, VaryingError
from shardfn.collectives import kernels
from shardfn.collectives.agree import DEBUG, agree, compare, gathered, values
from shardfn.collectives.ledger import unrecorded
from shardfn.compat import dispatch, functorch, process_groups
from shardfn.debugging import debugging
from shardfn.mesh.grid import Axis, AxisName
from shardfn.mesh.scope import bound_axis

Op = Callable[..., Tensor]


def _namespace() -> str:
    # torch.compile caches graphs on disk by the names of their ops, so changed code needs a different name.
    folder = Path(__file__).parent
    op_files = [folder / f"{name}.py" for name in ("messages", "kernels", "ops")]
    files = [*op_files, *sorted((folder.parent / "compat").glob("*.py"))]
    code = b"".join(file.read_bytes() for file in files)
    return f"shardfn_{hashlib.blake2b(code, digest_size=4).hexdigest()}"


LIBRARY = torch.library.Library(_namespace(), "FRAGMENT")


def primitive(name: str, statics: str, kernel: Op, transpose: Op | None) -> Op:
    """An op `(x, *statics) -> Tensor`, linear in `x`.

    Args:
        name: the op's name, as graphs show it.
        statics: the other arguments as in an op schema, `"int dim, int size, str group"`. Names that end in `dim`
            are dimensions of `x`, non-negative, and are shifted under vmap.
        kernel: moves the bytes; it sees plain tensors only and returns a fresh tensor.
        transpose: `(cotangent, *statics) -> Tensor`, or None for an op without a derivative.
    """
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

    def refusing_early(x: Tensor, *args: Any) -> Tensor:
        """Raises in forward already: an error in backward would be far from the line that causes it."""
        return refuse(x) if x.requires_grad and torch.is_grad_enabled() else op(x, *args)

    return op if transpose else refusing_early


def _batching(op: Op, statics: str) -> Callable[..., tuple[Tensor, int]]:
    """Batches by one collective: the batch dimension goes in front, and `dim` arguments move up by one."""
    shifts = [int(argument.split()[-1].endswith("dim")) for argument in statics.split(",")]

    def batch(dim: int, x: Tensor, *args: Any) -> tuple[Tensor, int]:
        shifted = [a + 1 if shift else a for a, shift in zip(args, shifts, strict=True)]
        return op(x.movedim(dim, 0), *shifted), 0

    return batch


def _refusal(name: str) -> Op:
    def refuse(*_: Any) -> Tensor:
        raise NotImplementedError(
            f"{name} has no derivative: the ranks that do not hold the extreme value would get none. "
            f"Pass it a value that is not differentiated, {name}(x.detach(), axis), as in a stable softmax."
        )

    return refuse


def collective(name: str, statics: str, kernel: Op, transpose: Op | None, meets: bool = True) -> Op:
    """A primitive that checked calls record.

    With `meets`, ranks communicate for it; they compare it first in the debug mode and in checked calls.
    """
    names = [argument.split()[-1] for argument in statics.split(",")]

    def recorded_kernel(x: Tensor, *args: Any) -> Tensor:
        recorder = recording.current()
        if meets and dispatch.plain(x):
            _compare_call(name, x, dict(zip(names, args, strict=True)))
        if recorder is None or not dispatch.plain(x):
            return kernel(x, *args)
        with paused():
            out = kernel(x, *args)
        recorder.record_collective(name, args[-1], x, out)
        return out

    return primitive(name, statics, recorded_kernel, transpose)


def describe_call(name: str, x: Tensor, statics: dict[str, Any]) -> str:
    """Describes a collective by the arguments that must be equal on all ranks."""
    rank_arguments = ("group", "index", "send", "receive")
    arguments = ", ".join([f"{key}={value}" for key, value in statics.items() if key not in rank_arguments])
    if name == "ragged_all_to_all":  # only `dim` may differ between ranks
        shape = [*x.shape[: statics["dim"]], "...", *x.shape[statics["dim"] + 1 :]]
    else:
        shape = list(x.shape)
    return f"{values(x.dtype, shape)}{', ' * bool(arguments)}{arguments}"


def _compare_call(name: str, x: Tensor, statics: dict[str, Any]) -> None:
    def compare_along(axis: Axis, by: str) -> None:
        compare(name, describe_call(name, x, statics), axis, by=by)
        if name == "ragged_all_to_all":
            _compare_lengths(statics, axis)

    _on_all_ranks(compare_along, statics["group"])


def compare_arguments(name: str, axis: AxisName, x: Tensor, described: Callable[[], list[str]], advice: str) -> None:
    """Compares the arguments of a function that runs several collectives, in the debug mode or in a checked call.

    Args:
        name: of the function.
        axis: the axis along which ranks must call it with the same arguments.
        x: one of its tensors; nothing is compared while it is traced.
        described: a line for each argument that is the same on all ranks, see `describe_arguments`.
        advice: what to do about a difference.

    Raises:
        ValueError: on all ranks, if they differ.
    """
    if not torch.compiler.is_compiling() and dispatch.plain(functorch.unwrapped(x)):
        subject = "the arguments", advice
        _on_all_ranks(lambda along, by: agree(described(), along, name, subject=subject), bound_axis(axis, name).group)


def describe_arguments(tensors: dict[str, Tensor], **options: Any) -> list[str]:
    """Describes arguments for the comparison: dtypes and shapes of tensors, and values of options."""
    shapes = [f"{name}: {x.dtype} {tuple(x.shape)}" for name, x in tensors.items()]
    return [*shapes, *(f"{name}={value!r}" for name, value in options.items())]


def _on_all_ranks(comparison: Callable[[Axis, str], None], name: str) -> None:
    """Runs a comparison along a group's axis in the debug mode or a checked call; the latter raises a finding."""
    if not name:
        return
    recorder = recording.comparing(name)
    if recorder is None and not debugging.collectives:
        return
    group = process_groups.group_of(name)
    with paused(), unrecorded():
        try:
            comparison(Axis(group.size(), group.rank(), name), DEBUG if recorder is None else recorder.name)
        except ValueError as error:
            if recorder is None:
                raise
            names = recorder.trace.names(recorder.trace.mask(recorder.axes_of(name)))
            finding = Finding("collectives", names, "", caller(), "call the same collectives on all ranks", str(error))
            raise VaryingError(str(error), (finding,)) from None


def _compare_lengths(statics: dict[str, Any], axis: Axis) -> None:
    """Raises ValueError on all ranks unless each rank receives what the others send to it."""
    rows = gathered(torch.tensor([statics["index"], *statics["send"], *statics["receive"]], device="cpu"), axis)
    sent, received = rows[rows[:, 0].argsort(), 1:].split(axis.size, 1)
    for source, target in (sent != received.T).nonzero().tolist()[:1]:
        raise ValueError(
            f"ragged_all_to_all: position {source} along the axis sends {sent[source, target]} places to position "
            f"{target}, which receives {received[target, source]}: receive= must equal the other ranks' send= for "
            f"this rank; if it is left out, ranks exchange these lengths"
        )


psum: Op = collective(
    "psum",
    "str group",
    kernel=lambda x, group: kernels.all_reduce(x, "sum", group),
    transpose=lambda ct, group: pvary(ct, group),
)
pvary: Op = collective(
    "pvary",
    "str group",
    kernel=lambda x, group: kernels.copy(x),
    transpose=lambda ct, group: psum(ct, group),
    meets=False,
)
pmax: Op = collective("pmax", "str group", kernel=lambda x, group: kernels.all_reduce(x, "max", group), transpose=None)
pmin: Op = collective("pmin", "str group", kernel=lambda x, group: kernels.all_reduce(x, "min", group), transpose=None)
all_gather: Op = collective(
    "all_gather",
    "int dim, int size, str group",
    kernel=kernels.all_gather,
    transpose=lambda ct, dim, size, group: reduce_scatter(ct, dim, size, group),
)
reduce_scatter: Op = collective(
    "reduce_scatter",
    "int dim, int size, str group",
    kernel=kernels.reduce_scatter,
    transpose=lambda ct, dim, size, group: all_gather(ct, dim, size, group),
)
all_gather_invariant: Op = collective(
    "all_gather_invariant",
    "int dim, int index, int size, str group",
    kernel=lambda x, dim, index, size, group: kernels.all_gather(x, dim, size, group),
    transpose=lambda ct, dim, index, size, group: local_slice(ct, dim, index, size, group),
)
local_slice: Op = collective(
    "local_slice",
    "int dim, int index, int size, str group",
    kernel=lambda x, dim, index, size, group: kernels.piece(x, dim, index, size),
    transpose=lambda ct, dim, index, size, group: all_gather_invariant(ct, dim, index, size, group),
    meets=False,
)
ppermute: Op = collective(
    "ppermute",
    "int[] source, int index, str group",
    kernel=kernels.permute,
    transpose=lambda ct, source, index, group: ppermute(ct, kernels.inverse(source), index, group),
)
all_to_all: Op = collective(
    "all_to_all",
    "int split_dim, int concat_dim, int size, str group",
    kernel=kernels.all_to_all,
    transpose=lambda ct, split, concat, size, group: all_to_all(ct, concat, split, size, group),
)
ragged_all_to_all: Op = collective(
    "ragged_all_to_all",
    "int dim, int[] send, int[] receive, int index, str group",
    kernel=kernels.ragged_all_to_all,
    transpose=lambda ct, dim, send, receive, index, group: ragged_all_to_all(ct, dim, receive, send, index, group),
)

replicated: Op = collective(
    "replicated",
    "str what, str group",
    kernel=lambda x, what, group: kernels.copy(x),
    transpose=lambda ct, what, group: verified(ct, what, group),
    meets=False,
)
verified: Op = collective(
    "verified",
    "str what, str group",
    kernel=lambda x, what, group: kernels.copy(_verified(x, what, group)),
    transpose=lambda ct, what, group: replicated(ct, what, group),
    meets=False,
)


def _verified(x: Tensor, operation: str, group: str) -> Tensor:
    """Returns `x` after checking that all ranks have the same values, up to the rounding of their sums."""
    if x.numel() and dispatch.plain(x):
        parts = torch.view_as_real(x) if x.is_complex() else x
        high, low = kernels.all_reduce(parts, "max", group), kernels.all_reduce(parts, "min", group)
        scale = torch.maximum(high.abs(), low.abs()).amax()
        if (high - low).amax() > scale * torch.finfo(x.dtype).eps ** 0.5:
            raise ValueError(
                f"{operation}: ranks have different derivatives of a value that is the same on all of them, each its "
                f"own part: write shardfn.pvary(value, axes) where it meets what varies, whose transpose adds up the "
                f"parts"
            )
    return x


def shifted(x: Tensor, by: int, index: int, size: int, group: str) -> Callable[[], Tensor]:
    """Starts to send `x` on by some ranks of a ring; returns a function that waits for the `x` that comes here."""
    if debugging.collectives and dispatch.plain(x):
        _compare_call("a step of a ring", x, {"group": group, "by": by})
    return kernels.shifted(x, by, index, size, group)
