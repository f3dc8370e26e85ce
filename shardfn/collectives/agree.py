"""Ranks compare what they were called with, before a difference can hang them or mix up their values.

`agree` stands before what needs other ranks: they compare arguments. Where `debugging.collectives` says so, `compare`
stands before each collective. Both raise on all ranks alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives import kernels
from shardfn.collectives.ledger import attribution, unrecorded
from shardfn.compat import autograd, functorch, process_groups
from shardfn.debugging import debugging
from shardfn.mesh import callsites, waiting
from shardfn.mesh.axes import axis_of, sizes
from shardfn.mesh.deadlock import ranks_named
from shardfn.mesh.grid import Axis
from shardfn.mesh.groups import cpu_group
from shardfn.quoting import bounded, findings, short

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


ARGUMENTS = (
    "the arguments",
    "Pieces of one value have the same shape on every rank: pad them, or declare `...` for what may differ",
)


def agree(
    described: list[str],
    mesh: DeviceMesh | Axis,
    name: str,
    mine: Exception | None = None,
    subject: tuple[str, str] = ARGUMENTS,
    axes: tuple[str, ...] | None = None,
) -> None:
    """Raises ValueError on every rank of the mesh unless all of them say the same.

    A rank that waits for others longer than `watchdog.PATIENCE` says so in the log.

    Args:
        described: what this rank was given, a line for each argument.
        mesh: whose ranks compare; or an axis of one, by which all along it do.
        name: who asks.
        mine: what is wrong with this rank's own arguments, to raise in place of a difference; the others hear of it.
        subject: what is compared, and what to do about a difference.
        axes: only the ranks along these compare.

    Raises:
        ValueError: the ranks differ, and the message says which and in what; or something is wrong on another one.
        RuntimeError: some rank did not come to compare before the process group's timeout.
    """
    whole = _along(mesh, axes)
    if whole.size == 1:
        return
    what, advice = subject
    text = "\n".join([name, *(" ".join(line.split()) for line in described)]).encode()
    digest = digest_of(text)
    place = callsites.outside(f"a comparison of {what} of {name!r}", whole.group) if debugging.collectives else None
    if place is not None:
        text = b"\n".join([place.text.encode(), *text.split(b"\n")[1:]])
    alone = (
        f"{name}: {what} are new to this rank ({short('; '.join(described[:6]), 800)}), and not every other rank "
        f"has come to compare"
    )
    row = torch.tensor([digest, -len(text) if mine else len(text)])
    try:
        with contextlib.nullcontext() if place is None else callsites.at(place):
            digests, marked = gathered(row, whole, None, f"comparing {what}", name, alone).T.tolist()
    except RuntimeError as error:
        more = alone if waiting.elsewhere(error) else f"{alone}. {advice}"
        raise RuntimeError(bounded(f"{error}. {more}")) from waiting.cause(error)
    if len(set(digests)) == 1:
        return
    callsites.alike()
    failed, lengths = [n < 0 for n in marked], [abs(n) for n in marked]
    lines = [said.split("\n") for said in texts(text, lengths, whole, f"comparing {what}, which differ", name)]
    if mine:
        raise mine
    if any(failed):
        rank = failed.index(True)
        worded = " ".join(lines[rank][1:]).removeprefix(f"{name}: ")
        raise ValueError(bounded(f"{name}: rank {rank} failed: {worded}"))
    elsewhere = {line[0].partition(_CALLED)[0] for line in lines}
    if len(elsewhere) > 1:
        each = [": ".join(filter(None, some[:2])) for some in lines]
        raise ValueError(f"{name}: ranks do different things: {told(whole, each)}. {ALIKE}")
    rank = next(r for r, digest in enumerate(digests) if digest != digests[0])
    first = [f"rank 0 has {line}{_called(lines[0])}" for line in lines[0][1:] if line not in lines[rank]]
    other = [f"rank {rank} has {line}{_called(lines[rank])}" for line in lines[rank][1:] if line not in lines[0]]
    only = [line for pair in itertools.zip_longest(first, other) for line in pair if line]
    raise ValueError(f"{name}: {what} differ between ranks: {findings(only, 6)}. {advice}")


def _called(lines: list[str]) -> str:
    """From where a rank compares, if it says so."""
    _, called, where = lines[0].partition(_CALLED)
    return called + where


_CALLED = ", called at "
ALIKE = "All ranks along an axis call the same collectives, on values of the same shape and dtype, in the same order"


def told(along: Axis, said: Sequence[str]) -> str:
    """What each rank along an axis has said, in the order of `gathered`: ranks that say the same together."""
    who: dict[str, list[int]] = {}
    for rank, one in zip(ranks_along(along), said, strict=True):
        who.setdefault(one, []).append(rank)
    return findings((f"{ranks_named(some)} {'has' if len(some) == 1 else 'have'} {one}" for one, some in who.items()))


def ranks_along(axis: Axis) -> list[int]:
    """The global ranks along an axis of a process group, in the order of `gathered`."""
    return sorted(dist.get_process_group_ranks(process_groups.group_of(axis.group)))


def texts(own: bytes, lengths: Sequence[int], along: Axis, what: str, of: str) -> list[str]:
    """What each rank along an axis says, in texts of these lengths, of which this rank's is `own`."""
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = torch.tensor(list(own), dtype=torch.uint8)
    rows = gathered(padded, along, None, what, of)
    return [bytes(row[:n].tolist()).decode(errors="replace") for row, n in zip(rows, lengths, strict=True)]


def digest_of(text: bytes) -> int:
    """The same for the same text, and another one for another, in 56 bits: an int64 holds it."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


@contextlib.contextmanager
def failing_together(
    meshes: Sequence[DeviceMesh], name: str, kinds: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """What is wrong on one rank is raised on all of them, which come to `agree` next with what they were given.

    Args:
        meshes: whose ranks hear of it.
        name: who asks.
        kinds: of errors, which a rank may meet that the others do not.
    """
    try:
        yield
    except kinds as error:
        for mesh in meshes:
            agree([str(error)], mesh, name, mine=error)
        raise


def gathered(
    row: Tensor,
    mesh: DeviceMesh | Axis,
    axes: tuple[str, ...] | None = None,
    what: str = "comparing",
    of: str = "",
    note: str = "",
) -> Tensor:
    """Every rank's row, or that of the ranks along some axes, on the CPU: `[ranks, *row.shape]`.

    `what` is done meanwhile, `of` is who asks for it, and `note` says more, for the message of a rank that waits.
    """
    whole = _along(mesh, axes)
    if whole.size == 1:
        return row[None]
    # A group of its own where backends allow: a rank that does not compare cannot answer with other data.
    group = cpu_group(ranks_along(whole), "compare").group_name
    with waiting.on(what, group, of, note=note):
        return kernels.all_gather(row[None], 0, whole.size, group)


def _along(mesh: DeviceMesh | Axis, axes: tuple[str, ...] | None) -> Axis:
    return mesh if isinstance(mesh, Axis) else axis_of(mesh, tuple(sizes(mesh)) if axes is None else axes)


# --- collectives, in the debug mode ---


DEBUG = "debug(collectives=True)"
_forwards: dict[str, str] = {}  # the line of each stage's last call


def compare(op: str, values: str, axis: Axis, served: bool = False, by: str = DEBUG) -> None:
    """Raises ValueError on all ranks along an axis unless they are about to do the same.

    Args:
        op: what.
        values: of what dtypes and shapes, and the op's other arguments: `"torch.float32 [3], dim=0"`.
        axis: along which.
        served: whether a stage's schedule does it.
        by: who asks for it. In the debug mode the lines have to be the same, too, by which alone it can tell two sums
            of the same shape apart. Not so for what a schedule does, since ranks may call a stage from different lines,
            one of them by `shardfn.skip`.

    Raises:
        ValueError: what they are about to do differs; the message has that of each, and the user's line.
        RuntimeError: a rank that cannot come any more.
    """
    if axis.size == 1:
        return
    leaf = f"{attribution.leaf}: " if attribution.leaf else ""
    what, line, failed = f"{op}({leaf}{values})", callsites.caller(), callsites.failure(axis.group)
    along = waiting.named(axis.group)
    text = f"{what}{f' over {along}' if along else ''}{_purpose(served, line)}, called at {line}{failed}"
    here = callsites.place(axis.group, text)
    same = [what, attribution.stage, _backward(), here.inside > 1, line if debugging.collectives and not served else ""]
    with callsites.at(here), functorch.outside_transforms(), unrecorded():
        found = _difference(repr(same), f"{text}\n{_counted(here)}", axis, by)
    if found:
        callsites.alike()
        raise ValueError(f"{by}: collectives differ between ranks: {found}. {ALIKE}{_dropped(found)}")


def _dropped(found: str) -> str:
    """What to say besides where a rank is in backward."""
    if "in backward" not in found:
        return ""
    return (
        ". Where a branch drops what a collective gave on some ranks, these have no derivative of it: choose by "
        "torch.where on all ranks"
    )


def values(dtype: torch.dtype, shape: Sequence[object]) -> str:
    """`"torch.float32 [3]"`."""
    return f"{dtype} {list(shape)}"


def _backward() -> bool:
    return autograd.inside_backward() if attribution.backward is None else attribution.backward


def _purpose(served: bool, line: str) -> str:
    """For which stage it is, and in which pass."""
    stage, backward = attribution.stage, _backward()
    if not stage:
        return " in backward" if backward else ""
    if not backward:
        _forwards[stage] = line
    way = f"{' of' if served else ' inside'} stage {stage!r} in {'backward' if backward else 'forward'}"
    began = _forwards.get(stage, line)
    return f"{way} (that ran forward at {began})" if backward and began != line else way


def _counted(here: callsites.Place) -> str:
    return f"number {here.inside} of the call at {here.where}" if here.inside else "outside of any call"


def _difference(same: str, text: str, axis: Axis, by: str) -> str:
    """What each rank is about to do, where that is not the same."""
    data = text.encode()[:4000]
    row = torch.tensor([digest_of(same.encode()), len(data)])
    digests, lengths = gathered(row, axis, None, "comparing collectives", by).T.tolist()
    if len(set(digests)) == 1:
        return ""
    every = [said.partition("\n") for said in texts(data, lengths, axis, "comparing collectives that differ", by)]
    plain = len({brief for brief, _, _ in every}) > 1
    return told(axis, [brief if plain else f"{brief} ({counted})" for brief, _, counted in every])
