"""Ranks compare what they were called with, before a difference can hang them or mix up their values."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives import kernels
from shardfn.compat import process_groups
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
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
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
            digests, marked = gathered(row, mesh, axes, f"comparing {what}", name, alone).T.tolist()
    except RuntimeError as error:
        more = alone if waiting.elsewhere(error) else f"{alone}. {advice}"
        raise RuntimeError(bounded(f"{error}. {more}")) from waiting.cause(error)
    if len(set(digests)) == 1:
        return
    callsites.alike()
    failed, lengths = [n < 0 for n in marked], [abs(n) for n in marked]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    rows = gathered(padded, mesh, axes, f"comparing {what}, which differ", name)
    lines = [bytes(row[:n].tolist()).decode(errors="replace").split("\n") for row, n in zip(rows, lengths, strict=True)]
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
    ranks = sorted(dist.get_process_group_ranks(process_groups.group_of(along.group)))
    for rank, one in zip(ranks, said, strict=True):
        who.setdefault(one, []).append(rank)
    return findings((f"{ranks_named(some)} {'has' if len(some) == 1 else 'have'} {one}" for one, some in who.items()))


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
    group = _group(whole.group)
    with waiting.on(what, group, of, note=note):
        return kernels.all_gather(row[None], 0, whole.size, group)


def _along(mesh: DeviceMesh | Axis, axes: tuple[str, ...] | None) -> Axis:
    return mesh if isinstance(mesh, Axis) else axis_of(mesh, tuple(sizes(mesh)) if axes is None else axes)


def _group(whole: str) -> str:
    """A group of its own where backends allow, so that a rank which does not compare cannot answer with other data."""
    ranks = sorted(dist.get_process_group_ranks(process_groups.group_of(whole)))
    return cpu_group(ranks, "compare").group_name
