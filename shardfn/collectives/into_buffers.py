"""Asynchronous collectives into the caller's buffers, by which stages move parameters and gradients.

Each returns a handle; after its `wait()` the result is in the buffer. The transport of an axis is chosen once, by its
backend, and is recorded in the ledger; `transports` overrides it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.agree import compare, values
from shardfn.collectives.capturing import current, refuse_traced
from shardfn.collectives.ledger import open_ledgers, record
from shardfn.collectives.messages import Launched
from shardfn.compat import process_groups
from shardfn.debugging import debugging
from shardfn.mesh import waiting
from shardfn.mesh.axes import axis_of, device_of, per_mesh
from shardfn.mesh.exact import add
from shardfn.mesh.grid import Axis
from shardfn.mesh.groups import connected_group, group_over
from shardfn.mesh.lanes import lane


class Handle(Protocol):
    """An operation in flight."""

    def wait(self) -> Any:
        """Waits until the result has arrived; on CUDA, until the current stream may use it."""


@dataclass(frozen=True)
class Communicator:
    """The process groups and transports of some axes of a mesh, for stages.

    Attributes:
        names: the axes, major to minor.
        axis: their product as this rank sees it.
        group: the axes' own group.
        device: this rank's device.
        chosen: the default transport of each collective.
        overrides: the transports set by `transports`.
        checks: whether ranks compare; not on a fake group, which moves nothing.
    """

    names: tuple[str, ...]
    axis: Axis
    group: Any
    device: torch.device
    chosen: dict[str, str]
    overrides: dict[str, str]
    checks: bool

    @functools.cached_property
    def gathers(self) -> Any:
        """The group that moves parameters; all ranks make it together."""
        return self._own_group("gather")

    @functools.cached_property
    def reductions(self) -> Any:
        """The group that moves gradients; all ranks make it together."""
        return self._own_group("reduce")

    def _own_group(self, use: str) -> Any:
        """The axes' group; on NCCL a separate group, as NCCL serializes the collectives of one communicator.

        So gathers ahead of need, reductions, and the program's own collectives do not wait for each other.
        """
        if not process_groups.connects_late(self.group, self.device.type):
            return self.group
        group = connected_group(group_over(dist.get_process_group_ranks(self.group), use), self.device)
        waiting.name_axes(group.group_name, " x ".join(self.names))
        return group


class CombinedWorks:
    """Several works as one; `then` runs once all have arrived."""

    __slots__ = ("then", "works")

    def __init__(self, works: Sequence[Any], then: Callable[[], Any] | None = None) -> None:
        self.works, self.then = works, then

    def wait(self) -> None:
        """Waits until all have arrived, and runs `then`."""
        for work in self.works:
            work.wait()
        if self.then:
            self.then()
        self.works, self.then = (), None


class Later:
    """A work that starts only when somebody waits for it."""

    __slots__ = ("first", "start")

    def __init__(self, first: Handle, start: Callable[[], Handle]) -> None:
        self.first, self.start = first, start

    def wait(self) -> None:
        """Waits for the first work, then starts and awaits the second."""
        self.first.wait()
        self.start().wait()


class Purpose(NamedTuple):
    """The purpose of messages: the stage, for error texts, and a number, in the tags that match messages."""

    stage: str
    number: int

    def __repr__(self) -> str:
        return repr(self.stage)

    def __str__(self) -> str:
        return f"{self.stage} {self.number}"


def arrived(work: Handle, op: str, group: str, purpose: str | Purpose) -> None:
    """Waits for a work; the watchdog reports a long wait as this operation."""
    with waiting.on(op, group, purpose):
        work.wait()


def communicator_of(mesh: DeviceMesh, names: tuple[str, ...]) -> Communicator:
    """Returns the communicator of these axes; its first use is a collective of all ranks along them."""

    def linked() -> Communicator:
        axis = axis_of(mesh, names)
        group = process_groups.group_of(axis.group)
        moves = process_groups.backend_of(group, mesh.device_type) != "fake"
        by_pieces = "direct" if process_groups.sends_at_once(group, mesh.device_type) else "native"
        chosen = {"all_gather": by_pieces, "reduce_scatter": by_pieces, "all_reduce": "native"}
        return Communicator(names, axis, group, device_of(mesh), chosen, _overrides(mesh), moves)

    return per_mesh(mesh, ("link", lane(), names), linked)


@contextlib.contextmanager
def transports(mesh: DeviceMesh, **chosen: str) -> Iterator[None]:
    """Overrides the transports of stages along every axis of the mesh while the block runs.

    All ranks must pass the same. Results are the same up to rounding. The fastest transport depends on the network;
    `ledger` reports which one each collective took.

    Args:
        mesh: the mesh.
        **chosen: a transport for each collective that should not take its default:

            - `all_gather`: `"native"` (the backend's own), `"direct"` (each piece sent to each other rank, on gloo
              only) or `"broadcasts"` (one from each rank);
            - `reduce_scatter`: `"native"`, `"direct"` or `"exchange"` (an all-to-all and a local sum);
            - `all_reduce`: `"native"`.

            The defaults are `"direct"` for CPU tensors on gloo, and `"native"` otherwise.

    Returns:
        A context.

    Raises:
        ValueError: the collective or transport is unknown, or does not work on this backend.

    Example:
        ``with transports(mesh, reduce_scatter="exchange"): loss, gradient = step(params, batch)``
    """
    for op, transport_name in chosen.items():
        if transport_name not in TRANSPORTS.get(op, {}):
            choices = "; ".join(f"{name}: {', '.join(ways)}" for name, ways in TRANSPORTS.items())
            raise ValueError(f"transports: there is no {op}={transport_name!r}; there are {choices}")
        world = dist.group.WORLD
        if (
            transport_name == "direct"
            and world is not None
            and not process_groups.sends_at_once(world, mesh.device_type)
        ):
            backend = process_groups.backend_of(world, mesh.device_type)
            raise ValueError(
                f'transports: {op}="direct" is not supported by {backend} with tensors on {mesh.device_type}, which '
                f"may have no point-to-point messages, or run them in order, so that ranks wait for each other "
                f'forever. Pass {op}="native"'
            )
    overrides = _overrides(mesh)
    before = dict(overrides)
    overrides.update(chosen)
    try:
        yield
    finally:
        overrides.clear()
        overrides.update(before)


def all_gather(
    whole: Tensor, comm: Communicator, dtype: torch.dtype, own: Tensor | None = None, purpose: int = 0
) -> Handle:
    """Fills `whole`, bytes `[size * n]`, with every rank's shard; this rank's shard, `own`, is in place already.

    Messages only match others of the same `purpose` (a `Purpose`'s number, or 0).
    """
    transport_name = _issued("all_gather", comm, (whole.nbytes, dtype))
    if transport_name == "native" and own is not None:  # saves a view of the own shard at every step
        return process_groups.start_all_gather(whole, own, comm.gathers)
    if transport_name == "direct":
        return _gather_directly(whole, comm, purpose)
    return TRANSPORTS["all_gather"][transport_name](whole, comm)


def gather_by_hops(full: Tensor, index: int, hops: Sequence[Communicator], dtype: torch.dtype) -> Handle:
    """Like `all_gather` over a product of axes, in which this rank has position `index`, one axis after another.

    The first of `hops` is the minor axis: it gathers a contiguous range of `full`, which the next hop passes on.
    """
    steps, pieces = [], math.prod(comm.axis.size for comm in hops)
    for comm in hops:
        pieces //= comm.axis.size
        index //= comm.axis.size
        region = full.view(pieces, -1)[index]
        name = _issued("all_gather", comm, (region.nbytes, dtype))  # now, since later hops start on another thread
        steps.append((functools.partial(TRANSPORTS["all_gather"][name], region, comm), name))
    work: Handle = steps[0][0]()
    for start, name in steps[1:]:
        work = _start_after(work, start, name, full.device)
    return work


def _start_after(first: Handle, start: Callable[[], Handle], transport_name: str, device: torch.device) -> Handle:
    """Starts a collective once `first`, whose result it needs, has arrived."""
    if transport_name == "direct":
        return Launched(lambda: (first.wait(), [start()])[1])
    if device.type == "cpu":
        return Later(first, start)
    module = torch.get_device_module(device)
    # A new stream waits for the first hop, so that the current stream can compute meanwhile.
    with module.stream(module.Stream(device=device)):
        first.wait()
        return start()


def transport(op: str, comm: Communicator) -> str:
    """Returns the transport of a collective; with `"direct"`, the data may be in several buffers."""
    return comm.overrides.get(op) or comm.chosen[op]


def scatter_pieces(
    parts: Sequence[Sequence[Tensor]],
    into: Sequence[Sequence[Tensor]],
    add: Callable[[], None],
    numel: int,
    dtype: torch.dtype,
    comm: Communicator,
    purpose: int = 0,
) -> Handle:
    """Starts a reduce-scatter of pieces that each consist of several tensors.

    `parts[i]` go to rank `i`; rank `i`'s parts for this rank arrive in `into[i]`, in the same order; `add` then sums
    them. `numel` counts the elements of all ranks' pieces.
    """
    _issued("reduce_scatter", comm, (numel * dtype.itemsize, dtype))
    return CombinedWorks([exchanged(into, parts, comm, purpose=purpose)], add)


def reduce_scatter(
    flat: Tensor, out: Tensor, comm: Communicator, scratch: Callable[[int], Tensor], purpose: int = 0
) -> Handle:
    """Fills `out [n]` with the sum over ranks of their pieces of `flat [size * n]` for this rank.

    `out` may have a wider dtype than `flat`; `scratch(n)` lends memory for `n` elements of `flat`'s dtype until the
    wait. Messages only match others of the same `purpose`.
    """
    if flat.is_complex():
        complex_scratch, flat, out = scratch, _real(flat), _real(out)

        def scratch(n: int) -> Tensor:
            return _real(complex_scratch(n // 2))

    transport_name = _issued("reduce_scatter", comm, (flat.nbytes, flat.dtype))
    if transport_name == "direct":
        return _scatter_directly(flat, out, comm, scratch, purpose)
    return TRANSPORTS["reduce_scatter"][transport_name](flat, out, comm, scratch)


def scatter_by_tree(
    flat: Tensor,
    out: Tensor,
    comm: Communicator,
    pieces: Sequence[int],
    over: Sequence[int],
    scratch: Callable[[int], Tensor],
    purpose: int = 0,
) -> Handle:
    """As `reduce_scatter`, by a tree of additions.

    `pieces[i]` is the index of the piece that rank `i` gets, and `over` are the bases of the digits of a rank's number,
    the most significant first, along which the tree adds. `flat` is overwritten.
    """
    transport_name = _issued("reduce_scatter", comm, (flat.nbytes, flat.dtype))
    n, index = comm.axis.size, comm.axis.index
    parts = flat.view(n, -1).unbind()
    outgoing = [parts[i] for i in pieces]
    if transport_name == "direct":
        received = scratch(flat.numel() - out.numel()).view(n - 1, -1).unbind()
        summands = [*received[:index], outgoing[index], *received[index:]]
        work = exchanged([[x] for x in summands], [[x] for x in outgoing], comm, purpose=purpose)
    else:
        every = scratch(flat.numel())
        ordered = flat if list(pieces) == sorted(pieces) else torch.cat(outgoing)
        work = dist.all_to_all_single(every, ordered, group=comm.reductions, async_op=True)
        summands = list(every.view(n, -1).unbind())

    return CombinedWorks([work], functools.partial(add, summands, over, out))


def all_reduce(x: Tensor, comm: Communicator) -> Handle:
    """Sums `x` over ranks, in place."""
    x = _real(x)
    transport_name = _issued("all_reduce", comm, (x.nbytes, x.dtype))
    return TRANSPORTS["all_reduce"][transport_name](x, comm)


def compare_buffers(op: str, comm: Communicator, *buffers: tuple[int, torch.dtype], more: str = "") -> None:
    """Compares, with `debugging.collectives`, whether all ranks run this collective on buffers of these sizes."""
    if comm.checks:
        described = " + ".join(values(dtype, [nbytes // dtype.itemsize]) for nbytes, dtype in buffers)
        compare(op, described + more, comm.axis, served=True)


def _issued(op: str, comm: Communicator, *buffers: tuple[int, torch.dtype]) -> str:
    """Returns the transport of a collective; before that ranks compare it, and the ledger records it."""
    if debugging.collectives:
        compare_buffers(op, comm, *buffers)
    if current.watch is not None:
        refuse_traced(f"{op} into memory that is filled again")
    transport_name = comm.overrides.get(op) or comm.chosen[op]
    if open_ledgers:
        times = 2 if op == "all_reduce" else 1
        for nbytes, dtype in buffers:
            sent = times * nbytes * (comm.axis.size - 1) // comm.axis.size
            record(op, comm.axis.group, dtype, sent, transport_name, comm.names)
    return transport_name


def _real(x: Tensor) -> Tensor:
    """Views a complex vector as its real and imaginary parts, which can be summed."""
    return torch.view_as_real(x).view(-1) if x.is_complex() else x


def _overrides(mesh: DeviceMesh) -> dict[str, str]:
    return per_mesh(mesh, "transports", dict[str, str])


def _gather_natively(full: Tensor, comm: Communicator) -> Handle:
    own_piece = full.view(comm.axis.size, -1)[comm.axis.index]
    return process_groups.start_all_gather(full, own_piece, comm.gathers)


def _gather_by_broadcasts(full: Tensor, comm: Communicator) -> Handle:
    pieces = full.view(comm.axis.size, -1).unbind()
    return CombinedWorks(
        [dist.broadcast(piece, group=comm.gathers, group_src=i, async_op=True) for i, piece in enumerate(pieces)]
    )


def _gather_directly(full: Tensor, comm: Communicator, purpose: int = 0) -> Handle:
    pieces = full.view(comm.axis.size, -1).unbind()
    own_pieces = [pieces[comm.axis.index]]
    return exchanged([[piece] for piece in pieces], [own_pieces] * len(pieces), comm, gathers=True, purpose=purpose)


def exchanged(
    into: Sequence[Sequence[Tensor]],
    out: Sequence[Sequence[Tensor]],
    comm: Communicator,
    gathers: bool = False,
    purpose: int = 0,
) -> Handle:
    """Sends `out[i]` to each other rank `i`, and receives into `into[i]` what that rank has for this one.

    It uses the group for gradients, or with `gathers` the one for parameters. gloo ends the process if a message's
    length differs from the expected one. So the tag contains the length and the purpose: a message that differs in
    these only waits, until the watchdog reports it.
    """
    if current.watch is not None:
        refuse_traced("messages into memory that is filled again")
    peers = [i for i in range(comm.axis.size) if i != comm.axis.index]
    group = comm.gathers if gathers else comm.reductions

    def launch() -> list[Any]:
        works = [group.recv([x], i, _message_tag(x, gathers, purpose)) for i in peers for x in into[i] if x.nbytes]
        return works + [
            group.send([x], i, _message_tag(x, gathers, purpose)) for i in peers for x in out[i] if x.nbytes
        ]

    return Launched(launch, group)


def purpose_of(stage: str, identity: str) -> Purpose:
    """The purpose of messages for a stage, with a number of 30 bits, the same on all ranks."""
    return Purpose(stage, zlib.crc32(identity.encode()) % 2**30)


def _message_tag(x: Tensor, gathers: bool, purpose: int) -> int:
    return (purpose + 61 * x.nbytes) % 2**30 if purpose else 2**30 + 2 * (x.nbytes % 2**28) + gathers


def _scatter_natively(flat: Tensor, out: Tensor, comm: Communicator, scratch: Callable[[int], Tensor]) -> Handle:
    if out.dtype == flat.dtype:
        return process_groups.start_reduce_scatter(out, flat, comm.reductions)
    narrow = scratch(out.numel())
    work = process_groups.start_reduce_scatter(narrow, flat, comm.reductions)
    return CombinedWorks([work], lambda: out.copy_(narrow))


def _scatter_directly(
    flat: Tensor, out: Tensor, comm: Communicator, scratch: Callable[[int], Tensor], purpose: int = 0
) -> Handle:
    pieces = flat.view(comm.axis.size, -1).unbind()
    local, index = pieces[comm.axis.index], comm.axis.index
    received = list(scratch(flat.numel() - local.numel()).view(comm.axis.size - 1, -1).unbind())

    def add() -> None:
        # In a narrow dtype each addition would round, so the sum is kept in float32 and rounded once.
        wide = out if out.dtype.itemsize >= 4 else torch.empty_like(out, dtype=torch.float32)
        torch.add(local, received[0], out=wide) if local.dtype == wide.dtype else wide.copy_(local).add_(received[0])
        for piece in received[1:]:
            wide.add_(piece)
        if wide is not out:
            out.copy_(wide)

    into = [[piece] for piece in [*received[:index], local, *received[index:]]]
    return CombinedWorks([exchanged(into, [[piece] for piece in pieces], comm, purpose=purpose)], add)


def _scatter_by_exchange(flat: Tensor, out: Tensor, comm: Communicator, scratch: Callable[[int], Tensor]) -> Handle:
    received = scratch(flat.numel())
    work = dist.all_to_all_single(received, flat, group=comm.reductions, async_op=True)
    return CombinedWorks([work], lambda: torch.sum(received.view(comm.axis.size, -1), 0, dtype=out.dtype, out=out))


TRANSPORTS: dict[str, dict[str, Callable[..., Any]]] = {
    "all_gather": {"native": _gather_natively, "direct": _gather_directly, "broadcasts": _gather_by_broadcasts},
    "reduce_scatter": {"native": _scatter_natively, "direct": _scatter_directly, "exchange": _scatter_by_exchange},
    "all_reduce": {"native": lambda x, comm: dist.all_reduce(x, group=comm.reductions, async_op=True)},
}
