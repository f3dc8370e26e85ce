"""Whether a stage's backward reads its parameters: one that does not is never gathered for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardfn.collectives import functional
from shardfn.collectives.ledger import unscheduled
from shardfn.mesh.axes import per_mesh
from shardfn.mesh.lanes import lane
from shardfn.mesh.scope import scope
from shardfn.stages.agreement import callers
from shardfn.stages.call import Call
from shardfn.stages.parameters import Loan, loan
from shardfn.stages.tape import StageRun

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Reads:
    """What the ranks of one engine have seen and agreed on.

    Attributes:
        known: by the kind of a call, whether backward of such a call was seen to read parameters.
    """

    def __init__(self, mesh: DeviceMesh, mesh_of: Callable[[], DeviceMesh]) -> None:
        self.known = per_mesh(mesh, ("reads", lane()), dict[Any, bool])
        self.mesh_of = mesh_of

    def watch(self, call: Call, run: StageRun) -> Loan | None:
        """A loan by which it is seen whether backward reads parameters; none where that is known, or makes no odds.

        A call like one that did not is watched again, since gathering for its backward is left out.
        """
        known = self.known.get(run.kind)
        if run.slot is None or run.keep or known or (known is None and call.transformed):
            return None
        if not any(call.needs[: len(run.shards)]):  # of a frozen stage, ranks differ in whether there is a backward
            return None
        lent = loan(run.slot, run.plan, run.shards, call.needs)
        if lent is None:
            self.saw(run, True)
        return lent

    def saw(self, run: StageRun, reads: bool) -> None:
        """Whether a call's backward will gather, which all ranks must do or none: they agree once.

        Not on what none of them has computed, which says nothing of later calls.
        """
        kind = run.kind
        if kind not in self.known:
            mesh, signature = self.mesh_of(), run.signature
            with unscheduled(), scope(mesh), torch.no_grad():
                flags = torch.tensor([float(reads), float(signature.computes)], device=run.shards[0].device)
                reading, computing = functional.psum(flags, callers(mesh, signature)).tolist()
            if computing:
                self.known[kind] = bool(reading)
        run.reads = self.known.get(kind, False)
        if reads and not run.reads and run.slot is not None:
            run.saved = run.slot.save()
