"""Gradients on their way from a stage's parameters to the shards.

A gradient is summed over the ranks that cut the parameters, each getting its piece, and that piece over the ranks that
hold the same. Both run while the next stage computes. A number in flight must not be read, so only a `Step`, which
collects gradients past autograd and ends when all have arrived, lets them fly; anybody else waits at once.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives.into_buffers import (
    Communicator,
    Handle,
    all_reduce,
    arrived,
    reduce_scatter,
    scatter_apart,
    sends_apart,
)
from shardfn.collectives.ledger import here, serving
from shardfn.compat import dispatch
from shardfn.debugging import debugging
from shardfn.mesh import waiting
from shardfn.shards.buffer import ALIGNMENT
from shardfn.shards.layout import Layout
from shardfn.transforms.step import Defer, GradientSum, ReductionRoute, Step

Place = tuple[int, int]  # which of a stage's buffers, and which of the two memories for it


@functools.lru_cache(maxsize=4096)
def _marks(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands at the end of the last piece, where no parameter is: 1, and digits that say which stage it is.

    Their sum over ranks is these times the first of them, unless ranks sum different stages.
    """
    n = ALIGNMENT // layout.dtype.itemsize
    digest = hashlib.blake2b(repr((layout.stage, layout.entries, layout.padded)).encode(), digest_size=n).digest()
    digits = [digit if dtype.itemsize > 2 else digit % 2 for digit in digest]  # so that sums are exact
    return torch.tensor([1, *digits[1:]], dtype=dtype, device=device)


class PendingReduction:
    """One gradient on its way."""

    __slots__ = (
        "ends", "later", "layout", "marks", "out", "pieces", "place", "reducing", "route", "scattering", "splitting",
        "stage", "total",
    )  # fmt: skip

    def __init__(
        self,
        place: Place,
        layout: Layout,
        marks: Tensor | None,
        out: Tensor,
        route: ReductionRoute,
        scattering: Handle | None,
        total: GradientSum | None,
        later: bool,
    ) -> None:
        self.place, self.layout, self.marks = place, layout, marks
        shard = route.shard
        self.pieces = 1 if route.split is None else route.split.axis.size  # that it is still to be cut into
        self.ends = shard is None or shard.axis.index == shard.axis.size - 1  # whether the end of the buffer is here
        self.out, self.route, self.scattering, self.total, self.later = out, route, scattering, total, later
        self.reducing: Handle | None = None
        self.splitting: tuple[Handle, Tensor] | None = None
        self.stage = here.stage
        if scattering is None:
            self._reduce()

    def scattered(self) -> None:
        """Until the scatter is done, whose buffers are free then, and what follows it has begun; or until that is."""
        if self.scattering is not None:
            scattering, self.scattering = self.scattering, None
            self._wait(scattering, "reduce_scatter", self.route.shard)
            if self.marks is not None and self.ends and self.route.shard is not None and self.route.shard.checks:
                _compare(self.out[len(self.out) - len(self.marks) :], self.marks.to(self.out.dtype), self.stage)
            self._reduce()
        else:
            self._split()

    def _marks(self) -> tuple[Tensor, Tensor] | None:
        """The end of what is here of the buffer, and the marks for it; None where there are none."""
        left = self.route.split or self.route.replica
        marks = _marks(self.layout, self.out.dtype, self.out.device)
        if not self.ends or left is None or not left.checks or len(self.out) < len(marks) * self.pieces:
            return None
        return self.out[len(self.out) - len(marks) :], marks

    def _mark(self) -> None:
        """What is summed next says which stage it is, too."""
        found = self._marks()
        if found is not None:
            found[0].copy_(found[1])

    def _unmark(self) -> None:
        found = self._marks()
        if found is not None:
            _compare(*found, self.stage)

    def _wait(self, handle: Handle, op: str, comm: Communicator | None) -> None:
        assert comm is not None, "something moves along it"
        try:
            arrived(handle, op, comm.group_names[1], self.stage)
        except RuntimeError as error:
            raise RuntimeError(
                f"stage {self.stage!r}: summing its gradient failed on this rank: {error}"
            ) from waiting.cause(error)

    def _reduce(self) -> None:
        if self.later:
            return
        split, replica = self.route.split, self.route.replica
        self._mark()
        with serving(self.stage, backward=True):
            if split is not None:
                fine = self.out.new_empty(self.out.numel() // split.axis.size)
                self.splitting = reduce_scatter(self.out, fine, split, self.out.new_empty), fine
            elif replica is not None:
                self.reducing = all_reduce(self.out, replica)

    def _split(self) -> None:
        if self.splitting is not None:
            (handle, self.out), self.splitting = self.splitting, None
            self._wait(handle, "reduce_scatter", self.route.split)
            assert self.route.split is not None, "something was split"
            self.ends = self.ends and self.route.split.axis.index == self.route.split.axis.size - 1
            self.pieces = 1
            self._unmark()
            if self.route.replica is not None:
                self._mark()
                with serving(self.stage, backward=True):
                    self.reducing = all_reduce(self.out, self.route.replica)

    def wait(self) -> Tensor:
        """The gradient, arrived."""
        self.scattered()
        self._split()
        if self.reducing is not None:
            reducing, self.reducing = self.reducing, None
            self._wait(reducing, "all_reduce", self.route.replica)
            self._unmark()
        if self.total is not None:
            self.total.add(self.out)
        return self.out


def _compare(end: Tensor, marks: Tensor, stage: str) -> None:
    """Takes the marks off the end of a buffer, and looks whether all ranks meant the same stage."""
    told = "ranks sum the gradients of different stages"
    if end.device.type != "cpu":
        dispatch.assert_on_device((end == marks * end[0]).all(), told)
    elif not torch.equal(end, marks * end[0]):
        raise RuntimeError(
            f"stage {stage!r}: its gradient came together with another stage's: {told}. Whose output the "
            f"loss uses must be the same on every rank, or be differentiated by shardfn.value_and_grad"
        )
    end.zero_()


@dataclass(frozen=True)
class Dtypes:
    """Of a gradient: as the function gives it, as it is summed, and as it arrives."""

    function: torch.dtype
    sum: torch.dtype
    shard: torch.dtype


def _goes_apart(layout: Layout, route: ReductionRoute, dtypes: Dtypes) -> bool:
    """Whether gradients are sent from where they are. What decides is the same on every rank."""
    return (
        route.shard is not None
        and sends_apart(route.shard, "reduce_scatter")
        and layout.coarse
        and dtypes.function == dtypes.sum == dtypes.shard
        and (dtypes.sum.itemsize >= 4 or route.shard.axis.size == 2)  # else each addition would round
        and not dtypes.sum.is_complex
    )


Spread = tuple[Tensor, list[Tensor], list[Tensor], Tensor]


def _spread(flat: Tensor, layout: Layout) -> Spread:
    """A buffer, each parameter's place in it, what lies between, and the place of the marks."""
    marks = layout.padded - ALIGNMENT // layout.dtype.itemsize
    gaps = [flat[start : min(start + length, marks)] for start, length in layout.gaps]
    return flat, layout.views(flat), gaps, flat[marks:]


class Reductions:
    """The gradients in flight on one mesh, and the memory that they take off from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.in_flight: list[PendingReduction] = []
        self.kept: dict[Any, Tensor] = {}
        self.spread: dict[Any, Spread] = {}  # the scratch memory for gradients, as a layout divides it

    def scratch(self, name: Any, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory that is kept and lent again: fresh pages for every layer cost time, and room."""
        nbytes = numel * dtype.itemsize
        if name not in self.kept or self.kept[name].numel() < nbytes:
            self.kept[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.kept[name][:nbytes].view(dtype)

    def start(
        self,
        place: Place,
        layout: Layout,
        gradients: Sequence[Tensor | None],
        route: ReductionRoute,
        dtypes: Dtypes,
        total: GradientSum | None,
        defer: Defer,
    ) -> PendingReduction | None:
        """Sends the gradients of one buffer's parameters on their way; `place` says by which memory."""
        if total is not None and defer == "everything":
            if total.whole is None:
                total.whole = torch.zeros(layout.padded, dtype=dtypes.sum, device=self.device)
            known = [(view, g) for view, g in zip(layout.views(total.whole), gradients, strict=True) if g is not None]
            if known:
                torch._foreach_add_([view for view, _ in known], [g.to(dtypes.sum) for _, g in known])
            return None
        for pending in self.in_flight:
            if pending.place == place:
                self._scattered(pending)
        later = defer != "nothing"
        if _goes_apart(layout, route, dtypes):
            return self._send_apart(place, layout, gradients, route, dtypes.sum, total, later)
        flat = self._flat(place, layout, gradients, route, dtypes.sum)
        return self._send(place, layout, flat, route, dtypes.shard, total, later)

    def _flat(
        self,
        place: Place,
        layout: Layout,
        gradients: Sequence[Tensor | None],
        route: ReductionRoute,
        dtype: torch.dtype,
    ) -> Tensor:
        """The gradients one after another, as their parameters lie in the layout."""
        if route.shard is None:  # this rank's whole gradient is the piece itself
            flat, views, gaps, tail = _spread(torch.empty(layout.padded, dtype=dtype, device=self.device), layout)
        else:
            buffer = self.scratch(("gradient", place), layout.padded, dtype)
            known = self.spread.get((place, layout, dtype))
            if known is None or known[0].data_ptr() != buffer.data_ptr():
                known = self.spread[(place, layout, dtype)] = _spread(buffer, layout)
            flat, views, gaps, tail = known
        if any(g is None for g in gradients):
            gaps = [*gaps, *(view for view, g in zip(views, gradients, strict=True) if g is None)]
            views = [view for view, g in zip(views, gradients, strict=True) if g is not None]
        given = [g for g in gradients if g is not None]
        if route.shard is None:
            gaps = [*gaps, tail]
        else:
            views, given = [*views, tail], [*given, _marks(layout, dtype, self.device)]
        torch._foreach_zero_(gaps)
        if views:
            torch._foreach_copy_(views, given)
        return flat

    def _send(
        self,
        place: Place,
        layout: Layout,
        flat: Tensor,
        route: ReductionRoute,
        out_dtype: torch.dtype,
        total: GradientSum | None,
        later: bool,
    ) -> PendingReduction:
        if route.shard is None:
            if route.replica is not None and not later and flat.dtype != out_dtype:
                marks = _marks(layout, flat.dtype, flat.device)
                end = flat[len(flat) - len(marks) :].copy_(marks)
                arrived(all_reduce(flat, route.replica), "all_reduce", route.replica.group_names[1], here.stage)
                if route.replica.checks:
                    _compare(end, marks, here.stage)
                later = True
            pending = PendingReduction(place, layout, None, flat.to(out_dtype), route, None, total, later)
        else:
            marks = _marks(layout, flat.dtype, flat.device)
            out = torch.empty(layout.piece, dtype=out_dtype, device=self.device)
            scattering = reduce_scatter(
                flat, out, route.shard, lambda n: self.scratch(("received", place), n, flat.dtype)
            )
            pending = PendingReduction(place, layout, marks, out, route, scattering, total, later)
        self.in_flight.append(pending)
        return pending

    def _send_apart(
        self,
        place: Place,
        layout: Layout,
        gradients: Sequence[Tensor | None],
        route: ReductionRoute,
        dtype: torch.dtype,
        total: GradientSum | None,
        later: bool,
    ) -> PendingReduction:
        """Sends what other ranks sum from the gradients themselves, and adds what comes to this rank's own."""
        shard = route.shard
        assert shard is not None
        flats = [
            torch.zeros(entry.numel, dtype=dtype, device=self.device) if g is None else g.reshape(-1)
            for g, entry in zip(gradients, layout.entries, strict=True)
        ]
        index, size = shard.axis.index, shard.axis.size
        parts = [[flats[k][start:stop] for k, start, stop, _ in cut] for cut in layout.cuts]
        places = [(at, at + stop - start) for _, start, stop, at in layout.cuts[index]]
        marks = _marks(layout, dtype, self.device)
        parts[-1].append(marks)
        if index == size - 1:
            places.append((layout.piece - len(marks), layout.piece))
        out = torch.empty(layout.piece, dtype=dtype, device=self.device)
        for at, length in layout.holes[index]:
            out[at : at + length].zero_()
        # The first that comes is received where the sum shall be.
        scratch = self.scratch(("received", place), layout.piece * (size - 2), dtype) if size > 2 else out[:0]
        arriving = [out, *scratch.view(size - 2, -1).unbind()] if size > 2 else [out]
        into = [[row[start:stop] for start, stop in places] for row in arriving]

        def add() -> None:
            for n, own in enumerate(parts[index]):
                target = into[0][n].add_(own)
                for more in into[1:]:
                    target.add_(more[n])

        scattering = scatter_apart(parts, [*into[:index], [], *into[index:]], add, layout.padded, dtype, shard)
        pending = PendingReduction(place, layout, marks, out, route, scattering, total, later)
        self.in_flight.append(pending)
        return pending

    def wait(self, pending: PendingReduction) -> Tensor:
        """One gradient, at once."""
        self.in_flight.remove(pending)
        self._scattered(pending)
        return pending.wait()

    def scattered(self) -> None:
        """Until no gradient needs the scratch memory."""
        for pending in self.in_flight:
            self._scattered(pending)

    def _scattered(self, pending: PendingReduction) -> None:
        """Until its scratch memory is free, which in the debug mode becomes nan then."""
        lent = pending.scattering is not None
        pending.scattered()
        if debugging.memory and lent:
            for name in ("gradient", "received"):
                if (name, pending.place) in self.kept:
                    self.kept[name, pending.place].fill_(255)

    def drain(self) -> None:
        """Until every gradient has arrived."""
        in_flight, self.in_flight = self.in_flight, []
        for pending in in_flight:
            self._scattered(pending)
        for pending in in_flight:
            pending.wait()

    def settle(self, step: Step) -> None:
        """Does what the step put off."""
        for total in [one for one in step.sums.values() if one.reductions is self]:
            with serving(total.layout.stage, backward=True):
                if step.defer == "everything" and total.whole is not None:
                    whole, total.whole, total.out = total.whole, None, None
                    *_, tail = _spread(whole, total.layout)
                    tail.copy_(_marks(total.layout, whole.dtype, whole.device))
                    self.scattered()
                    self._send((0, 0), total.layout, whole, total.route, total.dtype, total, False)
                elif step.defer == "replicas" and total.out is not None:
                    out, total.out = total.out, None
                    self.in_flight.append(
                        PendingReduction((0, 0), total.layout, None, out, total.route, None, total, False)
                    )
        self.drain()
