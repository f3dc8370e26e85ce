"""Checks, before the first call of a stage, that ranks run the same; tags and marks check later calls."""

from __future__ import annotations

import threading
from threading import get_ident

from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.agree import agree
from shardfn.collectives.ledger import unscheduled
from shardfn.compat import autograd
from shardfn.mesh.axes import sizes
from shardfn.mesh.groups import world_of_thread
from shardfn.mesh.lanes import lane
from shardfn.mesh.scope import independent_axes
from shardfn.stages.gather_plan import GatherPlan
from shardfn.stages.signature import Signature

_STAGES = (
    "the stages",
    "All ranks run the same stages in the same order: a branch around a stage goes the same way on every rank, and "
    "one that has no use for it calls shardfn.skip(stage, params)",
)


class LaneState:
    """What the ranks have agreed on in one lane, shared by all its threads.

    It is a context in which no other thread of the lane may run stages: other ranks could not tell them apart. A thread
    of autograd works for one that waits for it, which may be inside.

    Attributes:
        met: plans of the stages that were compared between ranks, and how their gradients are summed.
        inside: the threads that run stages, one within the other.
    """

    def __init__(self) -> None:
        self.met: set[tuple[GatherPlan, str]] = set()
        self.inside: list[int] = []

    def __enter__(self) -> None:
        inside, this_thread = self.inside, get_ident()
        if inside and inside[-1] != this_thread and not autograd.autograd_thread():
            running, arriving = (
                next((t.name for t in threading.enumerate() if t.ident == n), "?") for n in (inside[-1], this_thread)
            )
            raise RuntimeError(
                f"threads {running!r} and {arriving!r} run stages at the same time, and other ranks "
                f"cannot tell them apart: give each thread a name of its own, the same on all ranks, in "
                f"threading.Thread(name=...)"
            )
        inside.append(this_thread)

    def __exit__(self, *_: object) -> None:
        self.inside.pop()


def lane_state() -> LaneState:
    """The state of this thread's lane; it belongs to the world, as a mesh may be freed earlier on some ranks."""
    return world_of_thread().agreed.setdefault(lane(), LaneState())


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
    described = [
        f"{signature.name} on {gather.layout}, gathered as {gather.wire or gather.dtype}{signature.summed}, layout "
        f"with checksum {bytes(gather.tag[:8].tolist()).hex()}"
        for gather in plan.each
    ]
    with unscheduled():
        agree(described, mesh, "stage", subject=_STAGES, axes=callers(mesh, signature))
    lane_state.met.add((plan, signature.summed))
