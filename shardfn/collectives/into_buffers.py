"""Asynchronous collectives into given buffers, by which the stage engine moves parameters and gradients.

Each returns a handle whose `wait()` leaves the result in its place. Which transport an axis uses is chosen once, by
its backend, and is recorded in the ledger; `transports` overrides it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives.agree import compare, values
from shardfn.collectives.ledger import record, recording
from shardfn.collectives.messages import Launched
from shardfn.compat import process_groups
from shardfn.debugging import debugging
from shardfn.mesh import waiting
from shardfn.mesh.axes import axis_of, per_mesh
from shardfn.mesh.grid import Axis
from shardfn.mesh.groups import group_over
from shardfn.mesh.lanes import lane

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> Any:
        """Until it has arrived; on CUDA, until the current stream may use it."""


@dataclass(frozen=True)
class Communicator:
    """Axes of a mesh as the engine moves along them: one group for parameters, and where overlap needs it, another.

    Attributes:
        names: the axes, major to minor.
        axis: their product as this rank sees it.
        gathers: moves parameters.
        reductions: moves gradients.
        group_names: of these two.
        chosen: transport of each collective, by default.
        overrides: what `transports` says instead.
        checks: whether what arrives is what was sent; a fake group moves nothing.
    """

    names: tuple[str, ...]
    axis: Axis
    gathers: Any
    reductions: Any
    group_names: tuple[str, str]
    chosen: dict[str, str]
    overrides: dict[str, str]
    checks: bool


class Together:
    """Several works as one; `then` runs when all have arrived."""

    __slots__ = ("then", "works")

    def __init__(self, works: Sequence[Any], then: Callable[[], Any] | None = None) -> None:
        self.works, self.then = works, then

    def wait(self) -> None:
        """Until all have, and `then` has run."""
        for work in self.works:
            work.wait()
        if self.then:
            self.then()
        self.works, self.then = (), None


class Later:
    """What starts when somebody waits for it."""

    __slots__ = ("first", "start")

    def __init__(self, first: Handle, start: Callable[[], Handle]) -> None:
        self.first, self.start = first, start

    def wait(self) -> None:
        """Until both have arrived, one after the other."""
        self.first.wait()
        self.start().wait()


def arrived(work: Handle, op: str, group: str, stage: str) -> None:
    """Waits for what is under way; who waits long says that it is for this."""
    with waiting.on(op, group, stage):
        work.wait()


def communicator_of(mesh: DeviceMesh, names: tuple[str, ...]) -> Communicator:
    """The axes of the mesh, made ready once. All ranks along them take part the first time."""
    return per_mesh(mesh, ("link", lane(), names), lambda: _linked(mesh, names))


def _linked(mesh: DeviceMesh, names: tuple[str, ...]) -> Communicator:
    axis = axis_of(mesh, names)
    group = process_groups.group_of(axis.group)
    backend = process_groups.backend_of(group, mesh.device_type)
    # NCCL runs the collectives of one communicator one after another; two of them overlap.
    second = group_over(dist.get_process_group_ranks(group), "reduce") if backend == "nccl" else group
    called = group.group_name, second.group_name
    waiting.along(called[1], " x ".join(names))
    pieces = "direct" if backend == "gloo" else "native"
    chosen = {"all_gather": pieces, "reduce_scatter": pieces, "all_reduce": "native"}
    return Communicator(names, axis, group, second, called, chosen, _overrides(mesh), backend != "fake")


@contextlib.contextmanager
def transports(mesh: DeviceMesh, **chosen: str) -> Iterator[None]:
    """Overrides how stages move bytes along every axis of the mesh while the block runs; the same on all ranks.

    Results are the same up to rounding. Which transport is the fastest depends on the network: `ledger` says which one
    each collective took.

    Args:
        mesh: the mesh.
        **chosen: a transport for each collective that should not take its default:

            - `all_gather`: `"native"` (the backend's own), `"direct"` (each piece sent to each other rank, on gloo
              only) or `"broadcasts"` (one from each rank);
            - `reduce_scatter`: `"native"`, `"direct"` or `"exchange"` (an all-to-all and a local sum);
            - `all_reduce`: `"native"`.

            The defaults are `"direct"` on gloo, and `"native"` on other backends.

    Returns:
        A context.

    Raises:
        ValueError: no such collective or transport, or not on this backend.

    Example:
        ``with transports(mesh, reduce_scatter="exchange"): loss, gradient = step(params, batch)``
    """
    for op, how in chosen.items():
        if how not in TRANSPORTS.get(op, {}):
            known = "; ".join(f"{name}: {', '.join(ways)}" for name, ways in TRANSPORTS.items())
            raise ValueError(f"transports: there is no {op}={how!r}; there are {known}")
        backend = process_groups.backend_of(dist.group.WORLD, mesh.device_type) if dist.group.WORLD else "gloo"
        if how == "direct" and backend != "gloo":
            raise ValueError(
                f'transports: {op}="direct" sends each piece as a message of its own, as gloo can; {backend} may run '
                f"the messages of one communicator one after another, so that ranks which send first wait for each "
                f'other for ever, or have no messages: here, use {op}="native"'
            )
    overrides = _overrides(mesh)
    before = dict(overrides)
    overrides.update(chosen)
    try:
        yield
    finally:
        overrides.clear()
        overrides.update(before)


def all_gather(whole: Tensor, comm: Communicator, dtype: torch.dtype, own: Tensor | None = None) -> Handle:
    """Fills `whole`, bytes `[size * n]`, with every rank's piece; this rank's `own` is in its place already."""
    if debugging.collectives:
        compared("all_gather", comm, (whole.nbytes, dtype))
    how = _transport("all_gather", whole, dtype, comm)
    if how == "native" and own is not None:  # whoever gathers at every step knows where it is
        return process_groups.start_all_gather(whole, own, comm.gathers)
    return TRANSPORTS["all_gather"][how](whole, comm)


def gather_by_hops(whole: Tensor, index: int, hops: Sequence[Communicator], dtype: torch.dtype) -> Handle:
    """As `all_gather` over the product of axes, of which this rank is number `index`, one after another.

    The first of `hops` is the minor axis: what it gathers is a stretch of `whole`, which the next one passes on.
    """
    steps, pieces = [], math.prod(comm.axis.size for comm in hops)
    for comm in hops:
        pieces //= comm.axis.size
        index //= comm.axis.size
        region = whole.view(pieces, -1)[index]
        if debugging.collectives:  # before the first of them starts: the others do so on another thread
            compared("all_gather", comm, (region.nbytes, dtype))
        how = _transport("all_gather", region, dtype, comm)
        steps.append((functools.partial(TRANSPORTS["all_gather"][how], region, comm), how))
    work: Handle = steps[0][0]()
    for start, how in steps[1:]:
        work = _followed(work, start, how, whole.device)
    return work


def _followed(first: Handle, start: Callable[[], Handle], how: str, device: torch.device) -> Handle:
    """One collective when another has arrived, whose result it needs."""
    if how == "direct":
        return Launched(lambda: (first.wait(), [start()])[1])
    if device.type == "cpu":
        return Later(first, start)
    module = torch.get_device_module(device)
    with module.stream(module.Stream(device=device)):
        first.wait()
        return start()


def sends_pieces(comm: Communicator, op: str) -> bool:
    """Whether what is sent, and what is received, need not lie in one buffer."""
    return _how(comm, op) == "direct"


class Pieces(NamedTuple):
    """A buffer to gather, with this rank's piece elsewhere; the last piece ends in `tag` in place of its end.

    Attributes:
        whole: `[size * n]` bytes, to be filled but for this rank's.
        own: `[n]`, this rank's.
        tag: the end of the last piece.
        dtype: of the numbers.
    """

    whole: Tensor
    own: Tensor
    tag: Tensor
    dtype: torch.dtype


def gather_pieces(buffers: Sequence[Pieces], comm: Communicator) -> Handle:
    """As `all_gather` of each of these buffers, of which all messages are under way together."""
    size, last = comm.axis.size, comm.axis.index == comm.axis.size - 1
    if debugging.collectives:
        compared("all_gather", comm, *((buffer.whole.nbytes, buffer.dtype) for buffer in buffers))
    into: list[list[Tensor]] = [[] for _ in range(size)]
    out: list[Tensor] = []
    for whole, own, tag, dtype in buffers:
        _transport("all_gather", whole, dtype, comm)
        end = len(own) - len(tag)
        *pieces, final = whole.view(size, -1).unbind()
        for i, piece in enumerate(pieces):
            into[i].append(piece)
        into[-1] += [final[:end], final[end:]]
        out += [own[:end], tag] if last else [own]
    return _swap(into, [out] * size, comm, comm.gathers, tag=1)


def scatter_pieces(
    parts: Sequence[Sequence[Tensor]],
    into: Sequence[Sequence[Tensor]],
    add: Callable[[], None],
    numel: int,
    dtype: torch.dtype,
    comm: Communicator,
) -> Handle:
    """A reduce-scatter of pieces that lie in parts: `parts[i]` go to rank `i`, whose own for this one come into
    `into[i]`, in step; `add` adds up what has come. `numel` elements are what all ranks' pieces have together.
    """
    if debugging.collectives:
        compared("reduce_scatter", comm, (numel * dtype.itemsize, dtype))
    if recording():
        sent = numel * dtype.itemsize * (comm.axis.size - 1) // comm.axis.size
        record("reduce_scatter", comm.axis.group, dtype, sent, "direct", comm.names)
    return Together([_swap(into, parts, comm, comm.reductions, tag=2)], add)


def exchanged(into: Sequence[Sequence[Tensor]], out: Sequence[Sequence[Tensor]], comm: Communicator) -> Handle:
    """Each other rank `i` gets `out[i]`, and `into[i]` comes from there, of gradients; where pieces are sent."""
    return _swap(into, out, comm, comm.reductions, tag=2)


def reduce_scatter(flat: Tensor, out: Tensor, comm: Communicator, scratch: Callable[[int], Tensor]) -> Handle:
    """Fills `out [n]` with the sum over ranks of their piece of `flat [size * n]` for this rank.

    `out` may have a wider dtype than `flat`; `scratch(n)` lends memory for `n` elements like `flat`'s until the wait.
    """
    if flat.is_complex():
        complex_scratch, flat, out = scratch, _real(flat), _real(out)

        def scratch(n: int) -> Tensor:
            return _real(complex_scratch(n // 2))

    if debugging.collectives:
        compared("reduce_scatter", comm, (flat.nbytes, flat.dtype))
    how = _transport("reduce_scatter", flat, flat.dtype, comm)
    return TRANSPORTS["reduce_scatter"][how](flat, out, comm, scratch)


def all_reduce(x: Tensor, comm: Communicator) -> Handle:
    """Sums `x` over ranks, in place."""
    x = _real(x)
    if debugging.collectives:
        compared("all_reduce", comm, (x.nbytes, x.dtype))
    how = _transport("all_reduce", x, x.dtype, comm)
    return TRANSPORTS["all_reduce"][how](x, comm)


def compared(op: str, comm: Communicator, *buffers: tuple[int, torch.dtype], more: str = "") -> None:
    """Whether all ranks are about to do this, with buffers of so many bytes: where `debugging.collectives` asks."""
    if comm.checks:
        told = " + ".join(values(dtype, [nbytes // dtype.itemsize]) for nbytes, dtype in buffers)
        compare(op, told + more, comm.axis, served=True)


def _transport(op: str, x: Tensor, dtype: torch.dtype, comm: Communicator) -> str:
    """The transport, entered in the ledger with what of `x` is sent."""
    how = _how(comm, op)
    if recording():
        times = 2 if op == "all_reduce" else 1
        sent = times * x.numel() * x.element_size() * (comm.axis.size - 1) // comm.axis.size
        record(op, comm.axis.group, dtype, sent, how, comm.names)
    return how


def _real(x: Tensor) -> Tensor:
    """A complex vector as its parts, which is how it can be summed."""
    return torch.view_as_real(x).view(-1) if x.is_complex() else x


def _how(comm: Communicator, op: str) -> str:
    return comm.overrides.get(op) or comm.chosen[op]


def _overrides(mesh: DeviceMesh) -> dict[str, str]:
    return per_mesh(mesh, "transports", dict[str, str])


def _gather_natively(whole: Tensor, comm: Communicator) -> Handle:
    own = whole.view(comm.axis.size, -1)[comm.axis.index]
    return process_groups.start_all_gather(whole, own, comm.gathers)


def _gather_by_broadcasts(whole: Tensor, comm: Communicator) -> Handle:
    pieces = whole.view(comm.axis.size, -1).unbind()
    return Together(
        [dist.broadcast(piece, group=comm.gathers, group_src=i, async_op=True) for i, piece in enumerate(pieces)]
    )


def _gather_directly(whole: Tensor, comm: Communicator) -> Handle:
    pieces = whole.view(comm.axis.size, -1).unbind()
    own = [pieces[comm.axis.index]]
    return _swap([[piece] for piece in pieces], [own] * len(pieces), comm, comm.gathers, tag=1)


def _swap(
    into: Sequence[Sequence[Tensor]], out: Sequence[Sequence[Tensor]], comm: Communicator, group: Any, tag: int
) -> Handle:
    """Each other rank `i` gets `out[i]` of this one, and this one gets what is for it from there into `into[i]`.

    A message of another length than is expected would end the process; with another tag it is waited for.
    """
    others = [i for i in range(comm.axis.size) if i != comm.axis.index]

    def launch() -> list[Any]:
        works = [group.recv([x], i, _tagged(tag, x)) for i in others for x in into[i] if x.nbytes]
        return works + [group.send([x], i, _tagged(tag, x)) for i in others for x in out[i] if x.nbytes]

    return Launched(launch, group)


def _tagged(tag: int, x: Tensor) -> int:
    return tag + 4 * (x.nbytes % 2**27)


def _scatter_natively(flat: Tensor, out: Tensor, comm: Communicator, scratch: Callable[[int], Tensor]) -> Handle:
    if out.dtype == flat.dtype:
        return process_groups.start_reduce_scatter(out, flat, comm.reductions)
    narrow = scratch(out.numel())
    work = process_groups.start_reduce_scatter(narrow, flat, comm.reductions)
    return Together([work], lambda: out.copy_(narrow))


def _scatter_directly(flat: Tensor, out: Tensor, comm: Communicator, scratch: Callable[[int], Tensor]) -> Handle:
    pieces = flat.view(comm.axis.size, -1).unbind()
    own, index = pieces[comm.axis.index], comm.axis.index
    received = list(scratch(flat.numel() - own.numel()).view(comm.axis.size - 1, -1).unbind())

    def add() -> None:
        # In a narrow dtype each addition would round: all but the last step are done in a wider one.
        wide = out if out.dtype.itemsize >= 4 else torch.empty_like(out, dtype=torch.float32)
        torch.add(own, received[0], out=wide) if own.dtype == wide.dtype else wide.copy_(own).add_(received[0])
        for piece in received[1:]:
            wide.add_(piece)
        if wide is not out:
            out.copy_(wide)

    into = [[piece] for piece in [*received[:index], own, *received[index:]]]
    return Together([_swap(into, [[piece] for piece in pieces], comm, comm.reductions, tag=2)], add)


def _scatter_by_exchange(flat: Tensor, out: Tensor, comm: Communicator, scratch: Callable[[int], Tensor]) -> Handle:
    received = scratch(flat.numel())
    work = dist.all_to_all_single(received, flat, group=comm.reductions, async_op=True)
    return Together([work], lambda: torch.sum(received.view(comm.axis.size, -1), 0, dtype=out.dtype, out=out))


def _reduce_natively(x: Tensor, comm: Communicator) -> Handle:
    return dist.all_reduce(x, group=comm.reductions, async_op=True)


TRANSPORTS: dict[str, dict[str, Callable[..., Any]]] = {
    "all_gather": {"native": _gather_natively, "direct": _gather_directly, "broadcasts": _gather_by_broadcasts},
    "reduce_scatter": {"native": _scatter_natively, "direct": _scatter_directly, "exchange": _scatter_by_exchange},
    "all_reduce": {"native": _reduce_natively},
}
