"""Compares a stage between ranks before its first call.

Later calls are checked without further messages: by tags in gathers (`gather.py`) and marks in reductions.
"""

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
    """The stages on which ranks have agreed in one lane, shared by all threads of the lane.

    As a context it excludes the lane's other threads: if two ran stages at once, ranks could order their collectives
    differently. An autograd thread may enter: it works for a thread that waits for it, and may be inside itself.

    Attributes:
        met: plans of the stages that ranks have compared, with their options for reducing gradients.
        inside: ids of the threads that run stages, innermost last.
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
                f"cannot tell them apart: give each thread its own name, the same on all ranks, in "
                f"threading.Thread(name=...)"
            )
        inside.append(this_thread)

    def __exit__(self, *_: object) -> None:
        self.inside.pop()


def lane_state() -> LaneState:
    """The state of this thread's lane; it belongs to the world, as a mesh may be freed earlier on some ranks."""
    return world_of_thread().agreed.setdefault(lane(), LaneState())


def callers(mesh: DeviceMesh, signature: Signature) -> tuple[str, ...]:
    """The axes along which all ranks call a stage.

    Left out are the axes with parameters at one position only, and those along which ranks are independent.
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
