"""Reports the first stage that makes a non-finite number, on all ranks that run the stage.

With `debugging.nan`, the check runs after a stage's forward and after its backward. Ranks exchange their findings, so
that all raise: a rank that raised alone would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.agree import gathered, ranks_along, texts
from shardfn.collectives.ledger import unscheduled
from shardfn.mesh.axes import axis_of
from shardfn.quoting import listed
from shardfn.stages.consistency import callers
from shardfn.stages.replay import tensor_text


def after_forward(
    mesh: DeviceMesh,
    run: Any,
    parameters: Sequence[Sequence[Tensor]],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> None:
    """Raises FloatingPointError on all ranks that run the stage, if an output on any of them is not finite."""
    text = ""
    if bad := not_finite(outputs):
        entries = [entry for gather in run.plan.each for entry in gather.layout.entries]
        params = [p for ps in parameters for p in ps]
        updated = [entry.path for entry, p in zip(entries, params, strict=True) if not_finite([p])]
        origin = "finite inputs and parameters"
        if updated:
            origin = f"parameters that were not finite before it ran: {listed(updated, 6)}: the last update made them"
        elif bad_inputs := not_finite(inputs):
            before = "what is before the stage, outside of any other, made them"
            origin = f"inputs that were not finite ({describe_nonfinite(bad_inputs)}): {before}"
        text = f"the forward made {describe_nonfinite(bad)}, of {origin}"
    raise_nonfinite(mesh, run, text)


def after_backward(mesh: DeviceMesh, run: Any, came: str, gradients: Sequence[Sequence[Tensor | None]]) -> None:
    """Raises FloatingPointError on all ranks that run the stage, if a parameter's gradient on any is not finite."""
    paths = [
        entry.path
        for gather, gs in zip(run.plan.each, gradients, strict=True)
        for entry, x in zip(gather.layout.entries, gs, strict=True)
        if x is not None and not_finite([x])
    ]
    text = ""
    if paths:
        cause = "a finite gradient"
        if came:
            cause = f"a gradient that was not finite when it came in ({came}): what follows the stage made it"
        text = f"the backward made gradients of {listed(paths, 6)} that are not finite, of {cause}"
    raise_nonfinite(mesh, run, text)


def not_finite(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that have a number which is not finite."""
    floating = [x.detach() for x in tensors if (x.is_floating_point() or x.is_complex()) and x.numel()]
    return [x for x in floating if not bool(torch.isfinite(_widened(x)).all())]


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def describe_nonfinite(tensors: Sequence[Tensor]) -> str:
    """Describes tensors that are not finite, such as `"nan in float32[2, 8]"`."""
    return ", ".join(
        f"{'nan' if bool(torch.isnan(_widened(x)).any()) else 'inf'} in {tensor_text(x.dtype, x.shape)}"
        for x in tensors
    )


def raise_nonfinite(mesh: DeviceMesh, run: Any, message: str) -> None:
    """Raises FloatingPointError on all ranks that run a stage, if any of them found something.

    A rank whose own loss does not use the outputs takes part with an empty text.
    """
    signature, text = run.signature, message.encode()[:2000]
    axis = axis_of(mesh, callers(mesh, signature))
    with unscheduled():
        length = torch.tensor([len(text)], device="cpu")
        lengths = gathered(length, axis, None, "comparing whether numbers are finite", str(signature))[:, 0].tolist()
        if not any(lengths):
            return
        messages = texts(text, lengths, axis, "comparing what is not finite", str(signature))
    reporting = [rank for rank, n in zip(ranks_along(axis), lengths, strict=True) if n]
    first = next(text for text in messages if text)
    elsewhere = f" (and something like it on {len(reporting) - 1} more)" if len(reporting) > 1 else ""
    raise FloatingPointError(f"{signature}, on rank {reporting[0]}{elsewhere}: {first}")
