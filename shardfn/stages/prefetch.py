"""Prefetch: which gathers start ahead of need, and how long their buffers are kept.

Two lists predict the next stages: in forward, the order that `layers` announced; in backward, this step's calls in
reverse. Both depend on layouts and on the order of calls alone, so all ranks start the same gathers in the same order.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.into_buffers import Communicator, communicator_of
from shardfn.collectives.ledger import open_ledgers, record_buffers
from shardfn.compat import autograd, functorch
from shardfn.mesh.axes import device_of, sizes
from shardfn.shards.layout import Layout
from shardfn.stages.entry_exit import Call, attributed
from shardfn.stages.gather import Gathered, Gathering, Secondary
from shardfn.stages.gather_plan import Gather, GatherPlan
from shardfn.stages.tape import CallTape, Key

Group = tuple[tuple[Layout, ...], tuple[Tensor, ...]]  # the shards of one stage
_numbers = itertools.count(1)


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


class Wanted(NamedTuple):
    """A gather that is needed now or probably next: its key, and the arguments that start it."""

    key: Key
    plan: GatherPlan
    shards: Sequence[Tensor]
    of: Sequence[Tensor]  # the shards of which the ids are in the key
    again: bool = False
    keeps: bool = False


def key_of(plan: GatherPlan, shards: Sequence[Tensor], versions: Sequence[int]) -> Key:
    """The key of a gathered buffer: its plan, and the ids and versions of its shards.

    The buffer keeps the shards alive, so that ids stay unique. A shard without a version counter (-1) may have changed
    unseen, so each call gets a new key.
    """
    changing = next(_numbers) if -1 in versions else 0
    return (plan, changing, *map(id, shards), *versions)


ORDERS = 4  # most announced orders


class Prefetch:
    """The gathered parameters of one lane's stages on one mesh.

    Attributes:
        buffers: gathers in flight or complete, by key (`key_of`). A call that uses one also holds a reference itself.
        kept: gathers that stay until the step ends, for `reshard="step"`.
        orders: orders that `layers` announced, the latest last.
        last: by the layouts of a stage, the plan of its last call, and whether that call kept the gathered parameters;
            prefetch assumes that the next call does the same.
        tape: the tape to which calls are now added.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self.device = weakref.ref(mesh), device_of(mesh)
        self._communicators: dict[tuple[str, ...], Communicator | None] = {}
        self.gathering = Gathering(self.device, self.communicator)
        self.buffers: dict[Key, Gathered] = {}
        self.kept: dict[Key, Gathered] = {}
        self.orders: deque[PrefetchOrder] = deque(maxlen=ORDERS)
        self.last: dict[Any, tuple[GatherPlan, bool]] = {}
        self.tape = CallTape(None)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh; held weakly."""
        mesh = self._mesh()
        assert mesh is not None, "a mesh whose stages run is alive"
        return mesh

    def communicator(self, names: tuple[str, ...]) -> Communicator | None:
        """The communicator along these axes; None if there is one rank along them."""
        if names not in self._communicators:
            several = math.prod(sizes(self.mesh)[name] for name in names) > 1
            self._communicators[names] = communicator_of(self.mesh, names) if several else None
        return self._communicators[names]

    # --- in forward ---

    def announce(self, order: PrefetchOrder) -> None:
        """Announces stages in the order of their use, until it is withdrawn or the step ends."""
        self.withdraw(order)
        if not functorch.inside_transform():  # transforms use the composition, which gathers nothing ahead
            self.orders.append(order)

    def withdraw(self, order: PrefetchOrder) -> None:
        """Takes an order back: all its stages have been called."""
        if order in self.orders:
            self.orders.remove(order)

    def _gathered(self, call: Call) -> Gathered:
        request = Wanted(call.key, call.plan, call.shards, call.shards, keeps=call.keeps)
        self._turn(call, [request, *self.announced(call)], 1 + call.signature.options.prefetch + call.keeps)
        gathered = self._find(call.key)
        assert gathered is not None, "it has been started"
        if call.keeps:
            self._keep(call, gathered)
        try:
            gathered.wait()
        except RuntimeError:
            self.drop_gather(gathered)
            raise
        return gathered

    def _find(self, key: Key) -> Gathered | None:
        """The gather with this key, in flight or complete; None if there is none."""
        gathered = self.buffers.get(key) or self.kept.get(key)
        if gathered is None and key in self.tape.held:
            gathered = self.tape.held[key][0]
        return gathered

    def _keep(self, call: Call, gathered: Gathered) -> None:
        """Keeps what was gathered until the step ends, or until the last call that keeps it has had its backward."""
        if call.signature.keep == "step" and call.step is not None:
            self.kept[call.key] = gathered
            call.step.add_schedule(call.schedule)
        elif call.tape is not None:
            call.tape.held.setdefault(call.key, [gathered, 0])[1] += 1
            self.buffers.pop(call.key, None)

    def announced(self, call: Call) -> list[Wanted]:
        """The gathers of the stages that `layers` announced next, as far as earlier calls have shown their plans."""
        signature, count = call.signature, call.signature.options.prefetch
        self.last[signature.layouts] = call.plan, call.keeps
        groups = None
        for order in reversed(self.orders):
            groups = order.after(call.shards[0], 2 * count)
            if groups is not None:
                break
        requests = []
        for layouts, shards in (groups or ())[:count]:
            plan, keeps = self.last.get(layouts, (None, False))
            if plan is not None and plan.nbytes and -1 not in (versions := autograd.versions_of(shards)):
                requests.append(Wanted(key_of(plan, shards, versions), plan, shards, shards, keeps=keeps))
        for layouts, shards in (groups or ())[count:]:
            self._read_ahead(layouts, shards)
        return requests

    def _read_ahead(self, layouts: Sequence[Any], shards: Sequence[Tensor]) -> None:
        """Starts to read shards from disk that will be gathered after those that are gathered now."""
        for layout, shard in zip(layouts, shards, strict=True):
            if layout.placement.tiers.params == "disk":
                self.gathering.disk.announce(shard)

    def _turn(self, call: Call, requests: Sequence[Wanted], places: int = 0) -> None:
        """Starts the requested gathers, and drops all others from `buffers`; calls that still use those hold them.

        If there are fewer than `places` requests, as at the end of forward, the latest buffers stay: backward begins
        with these.
        """
        staying = {request.key for request in requests}
        places -= len(staying)
        staying.update([key for key in reversed(self.buffers) if key not in staying][:places] if places > 0 else ())
        for key in [key for key in self.buffers if key not in staying]:
            self.buffers.pop(key).wait()  # an unused gather writes into its memory until it has arrived
        for request in requests:
            gathered = self._find(request.key)
            if gathered is None:
                with attributed(request.key[0].stage):
                    gathered = self.start(call, request)
                gathered.of = request.of
            self.buffers.pop(request.key, None)
            self.buffers[request.key] = gathered  # dicts keep the order of insertion: this is the latest now

    def start(self, call: Call, request: Wanted) -> Gathered:
        """Starts a gather, for a call."""
        if open_ledgers:
            pieces = {id(x): x.nbytes for secondary in self.tape.secondary.values() for x in secondary.shards}
            record_buffers(self.gathering.pool.nbytes() + self.gathering.decoded.nbytes() + sum(pieces.values()))
        return Gathered(request.plan, request.shards, self.gathering, request.again, request.keeps)

    def drop_gather(self, gathered: Gathered) -> None:
        """Drops a gather that failed, or into which a function wrote, so that no call uses it again."""
        for store in (self.buffers, self.kept):
            for key in [key for key, other in store.items() if other is gathered]:
                del store[key]

    def end_forward(self, call: Call, gathered: Gathered) -> None:
        """Ends the use of gathered parameters in forward.

        With a secondary placement (ZeRO++'s hpZ) it keeps a larger shard, from which backward gathers.
        """
        if call.tape is None:  # no backward comes, and shards may change unseen until the next call
            self.buffers.pop(call.key, None)
        plan = call.plan.secondary
        if plan is None or not isinstance(call.signature.keep, tuple) or call.tape is None or call.again is False:
            return
        secondary = call.tape.secondary
        if call.key not in secondary:
            shards = [
                shard if gather is secondary else self.piece(gathered, secondary)
                for gather, secondary, shard in zip(call.plan.each, plan.each, call.shards, strict=True)
            ]
            secondary[call.key] = Secondary(plan, tuple(shards))
        call.secondary = secondary[call.key]

    def piece(self, gathered: Gathered, gather: Gather) -> Tensor:
        """A copy of this rank's larger shard of the gathered parameters, from which backward gathers."""
        comm = self.communicator(gather.layout.placement.axes)
        return gathered.piece(gather, 0 if comm is None else comm.axis.index)

    # --- in backward ---

    def gather_again(self, call: Call) -> None:
        """Starts to gather a call's parameters for backward, and those of the calls before it."""
        if call.again:
            self._turn(call, [self._gather_request(call), *self.before(call)])
            call.gathered = self._find(call.key)
        else:  # a recomputed function whose parameters were kept
            call.gathered = self._find(call.key) or self.start(call, self._gather_request(call))

    def _gather_request(self, call: Call) -> Wanted:
        if autograd.versions_of(call.shards) != call.versions:
            raise RuntimeError(
                f"{call.signature}: a shard has been modified by an inplace operation between forward and backward, "
                f"which would compute with different numbers: update parameters after backward"
            )
        if call.secondary is not None:
            return Wanted(call.key, call.secondary.plan, call.secondary.shards, call.shards, again=True)
        return Wanted(call.key, call.plan, call.shards, call.shards, again=True)

    def before(self, call: Call) -> list[Wanted]:
        """The gathers of the calls whose backward comes next."""
        requests = []
        gathers = announcements = call.signature.options.prefetch
        tape = call.tape
        calls = () if tape is None else tape.before(call) if tape.nested else reversed(tape.runs[: call.index])
        for other in calls:
            if gathers == announcements == 0:
                break
            if other.done or not other.again:
                continue
            if gathers == 0:
                if other.secondary is None:
                    self._read_ahead(other.signature.layouts, other.shards)
                announcements -= 1
                continue
            if other.key != call.key:
                requests.append(self._gather_request(other))
            gathers -= 1
        return requests

    def _drop_buffers(self, waits: bool = True) -> None:
        for store in (self.buffers, self.kept):
            for gathered in store.values() if waits else ():
                gathered.wait()
            store.clear()
        self.gathering.pool.trim()
        self.gathering.decoded.trim()
