"""Reports stages to the checker, which follows operations, and sees none of gathers and reductions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardfn.check.recording import TraceRecorder
from shardfn.shards.layout import Layout


def record_parameters(recorder: TraceRecorder, layout: Layout, shard: Tensor, parameters: Sequence[Tensor]) -> None:
    """Records the parameters that a stage's function gets; their gradients will be summed over ranks."""
    mask = recorder.trace.mask
    summed = mask((*layout.placement.axes, *layout.placement.replicas))
    cut = [mask((*layout.placement.only_at_axes, *entry.spec.axes)) for entry in layout.entries]
    recorder.parameters(layout, [entry.path for entry in layout.entries], shard, parameters, summed, cut)


def record_gradients(recorder: TraceRecorder, layout: Layout, gradients: Sequence[Tensor | None]) -> None:
    """Records a stage's gradients, before they are summed over ranks."""
    recorder.summed(recorder.trace.mask((*layout.placement.axes, *layout.placement.replicas)))
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            recorder.part(layout, number, gradient)


def record_sum(recorder: TraceRecorder, layout: Layout, shard: Tensor, gradient: Tensor) -> None:
    """Records the gradient of a flat shard."""
    fine = layout.state_layout if gradient.shape != shard.shape else layout
    cut = {name for number in range(len(fine.entries)) for name in fine.cut_axes(number)}
    recorder.declared(gradient, recorder.trace.mask((*fine.placement.axes, *cut)), [shard], "gradient of a stage")
