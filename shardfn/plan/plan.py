"""The plan of a step: what it computes, sends and holds, on one rank, before it is run."""

from __future__ import annotations

from dataclasses import dataclass

from shardfn.plan import fits, timeline
from shardfn.plan.chips import Chip
from shardfn.plan.fits import RESERVE, Fit
from shardfn.plan.links import Links
from shardfn.plan.schedule import Allocation, Held, Work
from shardfn.plan.timeline import Timeline
from shardfn.plan.views import Views


@dataclass(frozen=True, repr=False)
class Plan(Views):
    """What one rank does and holds in a step.

    Attributes:
        name: of the step's function.
        mesh: the sizes of the mesh's axes, by name, in order.
        rank: whose plan it is.
        works: in the order in which the host issues them.
        held: the course of the memory on the device: an entry for each work during which it changed.
        host: the most bytes held on the host, pinned or not, by kind.
        peak: the largest entry of `held`.
        allocations: what is held at the peak, largest first.
        parameters: number of elements of all parameters on all ranks.
        allocator: the most bytes on the device as CUDA's caching allocator counts them: each tensor has whole 512.
    """

    name: str
    mesh: dict[str, int]
    rank: int
    works: tuple[Work, ...]
    held: tuple[Held, ...]
    host: dict[str, int]
    peak: Held
    allocations: tuple[Allocation, ...]
    parameters: int
    allocator: int = 0

    def timed(
        self, links: Links | str, chip: Chip | str, per_node: int | None = None, tokens: float | None = None
    ) -> Timeline:
        """Computes when each work begins and ends: see `shardfn.plan.timeline.timed`."""
        return timeline.timed(self, links, chip, per_node, tokens)

    def fits(self, memory: str | int, reserve: str | int = RESERVE) -> Fit:
        """Compares the peak with a device's memory, `"80GiB"` say: see `shardfn.plan.fits.fits`."""
        return fits.fits(self, memory, reserve)
