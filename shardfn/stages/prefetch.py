"""Starts gathers ahead of need: in forward by the announced order, in backward by the tape."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from shardfn.shards.layout import Layout
from shardfn.shards.placement import Keep
from shardfn.stages.residency import Residency
from shardfn.stages.signature import GatherPlan, Signature
from shardfn.stages.tape import StageRun, Tape, identities, key_of
from shardfn.transforms.given import ready_since
from shardfn.transforms.step import Step

Group = tuple[tuple[Layout, ...], tuple[Tensor, ...]]  # the shards of one stage


class LastGather(NamedTuple):
    """How the last call of a stage with such layouts gathered its parameters."""

    plan: GatherPlan
    taped: bool
    keep: Keep
    signature: Signature


class PrefetchOrder:
    """The shards of stages in the order in which they will be used."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups, self.at = groups, 0
        self.places: dict[int, list[int]] = {}
        for i, (_, shards) in enumerate(groups):
            self.places.setdefault(id(shards[0]), []).append(i)

    def after(self, shard: Tensor, count: int) -> list[Group] | None:
        """The next `count` stages after the one with this first shard; None if it is not in the order."""
        places = self.places.get(id(shard))
        if places is None:
            return None
        self.at = next((i for i in places if i >= self.at), places[0]) + 1  # a shard may occur several times
        return self.groups[self.at : self.at + count]


class Prefetch:
    """Decides what one engine gathers next.

    Attributes:
        orders: weak references to the orders that `layers` announced.
        last_gathers: by the layouts of a stage; its next gather is expected to be the same.
    """

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.orders: list[weakref.ref[PrefetchOrder]] = []
        self.last_gathers: dict[tuple[Layout, ...], LastGather] = {}

    def announce(self, order: PrefetchOrder) -> None:
        """Announces an order of stages, which holds until it is garbage-collected."""
        self.orders = [*(reference for reference in self.orders if reference() is not None), weakref.ref(order)]

    def ahead(self, tape: Tape | None, step: Step | None, run: StageRun) -> None:
        """Starts the gathers of the next layers in forward."""
        signature = run.signature
        self.last_gathers[signature.layouts] = LastGather(run.plan, tape is not None, run.keep, signature)
        count, groups = signature.options.prefetch, None
        for reference in reversed(self.orders):
            order = reference()
            groups = None if order is None else order.after(run.shards[0], 2 * count)
            if groups is not None:
                break
        for layouts, shards in (groups or ())[count:]:
            self._announce(layouts, shards)
        for layouts, shards in (groups or ())[:count]:
            last = self.last_gathers.get(layouts)
            if last is not None and last.plan.nbytes and last.taped == (tape is not None):
                key = key_of(tape, step, last.keep, last.plan, identities(shards))
                coming = StageRun(last.signature, last.plan, shards, key, last.keep, ready=ready_since(shards))
                if not self.residency.take(tape, coming, count + 1, busy=run.slot):
                    return

    def _announce(self, layouts: Sequence[Layout], shards: Sequence[Tensor]) -> None:
        """Starts to read shards from disk that will be gathered after the present gathers."""
        for layout, shard in zip(layouts, shards, strict=True):
            if layout.placement.tiers.params == "disk":
                self.residency.means.disk.announce(shard)

    def behind(self, tape: Tape | None, run: StageRun) -> None:
        """Starts the gathers for the calls whose backward comes next."""
        gathers = run.signature.options.prefetch if tape is not None else 0
        announcements = gathers
        for index in range(run.index - 1, -1, -1):
            if gathers == announcements == 0:
                return
            assert tape is not None, "something is left to gather"
            other = tape.runs[index]
            if other.done or other.slot is None or other.keep or not other.reads:
                continue
            if gathers == 0:
                if other.secondary is None and other.slot.holds != other.key:
                    self._announce(other.signature.layouts, other.shards)
                announcements -= 1
                continue
            if other.slot.alternates(run.slot):
                return
            if other.slot.holds != other.key:
                self.residency.fill(other)
            gathers -= 1
