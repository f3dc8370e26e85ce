"""What a checked call learns of stages, whose parameters and gradients go through memory that no op writes to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardfn.check.recording import Recorder
from shardfn.shards.layout import Layout


def parameters(recorder: Recorder, layout: Layout, shard: Tensor, given: Sequence[Tensor]) -> None:
    """A stage's function is about to get these, gathered from a shard; their gradients will be summed over ranks."""
    mask = recorder.trace.mask
    summed = mask((*layout.placement.axes, *layout.placement.replicas))
    allowed = [summed | mask(layout.cut_axes(number)) for number in range(len(layout.entries))]
    recorder.parameters(layout, [entry.path for entry in layout.entries], shard, given, allowed)


def gradients(recorder: Recorder, layout: Layout, found: Sequence[Tensor | None]) -> None:
    """A stage's gradients, before they are summed over the ranks that hold other rows."""
    recorder.summed(recorder.trace.mask((*layout.placement.axes, *layout.placement.replicas)))
    for number, gradient in enumerate(found):
        if gradient is not None:
            recorder.part(layout, number, gradient)


def summed(recorder: Recorder, layout: Layout, shard: Tensor, gradient: Tensor) -> None:
    """The gradient of a flat shard has arrived."""
    fine = layout.state_layout if gradient.shape != shard.shape else layout
    cut = {name for number in range(len(fine.entries)) for name in fine.cut_axes(number)}
    recorder.declared(gradient, recorder.trace.mask((*fine.placement.axes, *cut)), [shard], "gradient of a stage")
