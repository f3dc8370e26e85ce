"""Ranks compare what they are about to do before each collective, where `debugging.collectives` says so.

`if debugging.collectives: compare(...)` stands before whatever needs other ranks. It raises on all of them alike,
before a difference can hang them or mix up their numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from shardfn.collectives.agree import ALIKE, gathered, told
from shardfn.collectives.ledger import attribution, unrecorded
from shardfn.compat import autograd, functorch
from shardfn.debugging import debugging
from shardfn.mesh import callsites, waiting
from shardfn.mesh.grid import Axis

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
    digest, data = hashlib.blake2b(same.encode(), digest_size=7).digest(), text.encode()[:4000]
    row = torch.tensor([int.from_bytes(digest, "big"), len(data)])
    digests, lengths = gathered(row, axis, None, "comparing collectives", by).T.tolist()
    if len(set(digests)) == 1:
        return ""
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = gathered(padded, axis, None, "comparing collectives that differ", by)
    every = [
        bytes(row[:n].tolist()).decode(errors="replace").partition("\n") for row, n in zip(rows, lengths, strict=True)
    ]
    plain = len({brief for brief, _, _ in every}) > 1
    return told(axis, [brief if plain else f"{brief} ({counted})" for brief, _, counted in every])
