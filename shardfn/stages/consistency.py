"""Checks that ranks run the same stages in the same order, from one thread at a time."""

from __future__ import annotations

import contextlib
from threading import current_thread
from typing import TYPE_CHECKING, Any

from shardfn.collectives.agree import agree
from shardfn.collectives.ledger import unscheduled
from shardfn.mesh.axes import sizes
from shardfn.mesh.groups import world_of_thread
from shardfn.mesh.lanes import lane
from shardfn.mesh.scope import independent_axes
from shardfn.stages.signature import GatherPlan, Signature

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_STAGES = (
    "the stages",
    "All ranks run the same stages in the same order: a branch around a stage goes the same way on every rank, and "
    "one that has no use for it calls shardfn.skip(stage, params)",
)


class LaneState:
    """What the ranks have agreed on in one lane, shared by all its threads.

    Attributes:
        compared: plans of the stages that were compared between ranks, and how their gradients are summed.
        inside: the context of the thread that runs a stage.
    """

    def __init__(self) -> None:
        self.compared: set[tuple[GatherPlan, str]] = set()
        self.inside: _Alone | None = None


def lane_state() -> LaneState:
    """The state of this thread's lane; it belongs to the world, as a mesh may be freed earlier on some ranks."""
    return world_of_thread().agreed.setdefault(lane(), LaneState())


class _Alone:
    """A context in which no other thread of the lane may run stages: other ranks could not tell them apart."""

    __slots__ = ("depth", "lane_state", "name")

    def __init__(self, lane_state: LaneState) -> None:
        self.lane_state, self.depth, self.name = lane_state, 0, current_thread().name

    def __enter__(self) -> None:
        other = self.lane_state.inside
        if other is not None and other is not self:
            raise RuntimeError(
                f"threads {other.name!r} and {self.name!r} run stages at the same time, and other ranks cannot tell "
                f"them apart: give each thread a name of its own, the same on all ranks, in threading.Thread(name=...)"
            )
        self.lane_state.inside, self.depth = self, self.depth + 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.lane_state.inside = None


def alone(mesh: DeviceMesh, lane_state: LaneState) -> Any:
    """A context that refuses a second thread of the lane, if there are several ranks."""
    return _Alone(lane_state) if mesh.size() > 1 else contextlib.nullcontext()


def callers(mesh: DeviceMesh, signature: Signature) -> tuple[str, ...]:
    """Axes along which all ranks call a stage: not those where one position has its parameters, or ranks are
    independent.
    """
    elsewhere = (*signature.only_at_axes, *independent_axes())
    return tuple(name for name in sizes(mesh) if name not in elsewhere)


def compare(mesh: DeviceMesh, signature: Signature, plan: GatherPlan, lane_state: LaneState) -> None:
    """Compares a stage between ranks when it runs for the first time.

    Raises:
        RuntimeError: ranks run different stages.
    """
    if (plan, signature.summed) in lane_state.compared:
        return
    described = [
        f"{signature.name} on {gather.layout}, gathered as {gather.wire or gather.dtype}{signature.summed}, layout "
        f"with checksum {bytes(gather.tag[:8].tolist()).hex()}"
        for gather in plan.each
    ]
    with unscheduled():
        agree(described, mesh, "stage", subject=_STAGES, axes=callers(mesh, signature))
    lane_state.compared.add((plan, signature.summed))
