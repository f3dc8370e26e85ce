"""Comparisons between ranks, which find differences before these hang a program or mix up values.

`agree` compares the arguments of operations that need other ranks. With `debugging.collectives`, `compare` precedes
each collective. If ranks differ, both raise an error on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn import callers
from shardfn.check.bits import digest_of
from shardfn.collectives import kernels
from shardfn.collectives.ledger import attribution, unrecorded
from shardfn.compat import autograd, dispatch, functorch, process_groups
from shardfn.debugging import debugging
from shardfn.mesh import comparisons, waiting
from shardfn.mesh.axes import axis_of, sizes
from shardfn.mesh.deadlock import ranks_named
from shardfn.mesh.grid import Axis
from shardfn.mesh.groups import cpu_group
from shardfn.mesh.planned import planned
from shardfn.quoting import bounded, findings, short

ARGUMENTS = (
    "the arguments",
    "Pieces of one value have the same dtype and shape on every rank; declare `...` only for shapes that are meant to "
    "differ",
)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """A context in which ops run at once on plain tensors, whatever transforms and tracing are active here."""
    with functorch.outside_transforms(), dispatch.untraced():
        yield


def agree(
    described: list[str],
    mesh: DeviceMesh | Axis | Sequence[DeviceMesh | Axis],
    name: str,
    own_error: Exception | None = None,
    subject: tuple[str, str] = ARGUMENTS,
    axes: tuple[str, ...] | None = None,
    before: Iterable[str] | None = None,
) -> None:
    """Raises ValueError on every rank of the mesh unless all ranks have the same arguments.

    A rank that waits for others longer than `watchdog.PATIENCE` logs that.

    Args:
        described: this rank's arguments, one line for each; with `own_error`, the error's text is sent instead.
        mesh: the mesh whose ranks compare, or an axis whose ranks do; of several, one after another, and an error found
            on one is also raised by the ranks of those that follow.
        name: the caller, for messages.
        own_error: the error in this rank's own arguments, which it raises in any case; the other ranks raise it, too.
        subject: the name of the compared things, and advice about a difference.
        axes: only the ranks along these axes compare.
        before: lines that all ranks agreed on in earlier calls; if a rank does not come, the message says what is new.

    Raises:
        ValueError: the ranks differ, and the message says which ranks and how; or another rank reports an error.
        RuntimeError: a rank did not come to compare before the process group's timeout.
    """
    for member in mesh if isinstance(mesh, Sequence) else [mesh]:
        try:
            _agree(described, _axis_along(member, axes), name, own_error, subject, before)
        except Exception as error:
            if not isinstance(error, ValueError) and error is not own_error:
                raise
            own_error = error
    if own_error is not None:
        raise own_error


@at_once()
def _agree(
    described: list[str],
    axis: Axis,
    name: str,
    own_error: Exception | None,
    subject: tuple[str, str],
    before: Iterable[str] | None,
) -> None:
    """Compares as `agree` does, on one axis."""
    if axis.size == 1 or planned():
        if own_error is not None:
            raise own_error
        return
    topic = subject[0]
    described = described if own_error is None else [str(own_error)]
    text = "\n".join([name, *(" ".join(line.split()) for line in described)]).encode()
    digest = digest_of(text)
    place = (
        comparisons.unnumbered(f"a comparison of {topic} of {name!r}", axis.group) if debugging.collectives else None
    )
    if place is not None:
        text = b"\n".join([place.text.encode(), *text.split(b"\n")[1:]])
    alone, known = _alone(name, topic, described, before)
    advice = _advised(subject, described, known)
    # A negative length marks a rank whose own arguments are wrong.
    row = torch.tensor([digest, -len(text) if own_error else len(text)], device="cpu")
    try:
        with contextlib.nullcontext() if place is None else comparisons.holding_at(place):
            note = f"{alone}. {advice}" if known else alone or ("" if described else advice)
            digests, marked = gathered(row, axis, None, f"comparing {topic}", name, note).T.tolist()
    except RuntimeError as error:
        parts = [str(error), alone] if waiting.elsewhere(error) else [alone, advice, str(error)]
        raise RuntimeError(bounded(". ".join(filter(None, parts)))) from waiting.cause(error)
    if len(set(digests)) > 1:
        comparisons.mark_common_error()
        rank_texts = texts(text, [*map(abs, marked)], axis, f"comparing {topic}, which differ", name)
    if own_error is not None:
        raise own_error
    if len(set(digests)) == 1:
        return
    lines, failed = [rank_text.split("\n") for rank_text in rank_texts], [i for i, n in enumerate(marked) if n < 0]
    if failed:
        reason = " ".join(lines[failed[0]][1:]).removeprefix(f"{name}: ")
        raise ValueError(bounded(f"{name}: rank {ranks_along(axis)[failed[0]]} failed: {reason}"))
    raise ValueError(f"{name}: {_difference_of_arguments(lines, axis, subject)}")


def _alone(name: str, subject_name: str, described: list[str], before: Iterable[str] | None) -> tuple[str, list[str]]:
    """Returns a message for when other ranks do not come, of what is new here, and the lines that this replaces."""
    earlier = set(before or ())
    if not described or (before is not None and not earlier):
        return "", []
    new = [line for line in described if line not in earlier] or described
    names = {line.partition(": ")[0] for line in new}
    known = sorted(line for line in earlier if line.partition(": ")[0] in names)
    news = _few(new) + (f"; known before: {_few(known)}" if known else "")
    rank = process_groups.global_rank()
    subject_name = f"{subject_name} are new to rank {rank}" if earlier else f"rank {rank} compares {subject_name}"
    return f"{name}: {subject_name} ({news}), and not every other rank has come to compare", known


_ROWS = re.compile(r"(.+: \S+) \(\d+(.*)\)")


def _advised(subject: tuple[str, str], own_lines: list[str], *other_ranks: list[str]) -> str:
    """Returns the advice about a difference, with more where two lines differ by the number of rows alone."""

    def named(lines: set[str]) -> set[tuple[str, str]]:
        return {(match[1], match[2]) for match in map(_ROWS.fullmatch, lines) if match}

    rows = any(named(set(own_lines) - set(other)) & named(set(other) - set(own_lines)) for other in other_ranks)
    batch = ". If this is a last batch with fewer rows, drop it (drop_last=True) or pad it"
    return subject[1] + batch * (subject is ARGUMENTS and rows)


def _few(lines: list[str]) -> str:
    """Returns the first of some lines; bounded."""
    more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
    return short("; ".join(map(_without_checksum, lines[:4])), 200) + more


def _difference_of_arguments(lines: list[list[str]], axis: Axis, subject: tuple[str, str]) -> str:
    """Describes the differences between ranks' lines, the first of which names the operation."""
    if len({line[0].partition(_CALLED)[0] for line in lines}) > 1:
        return f"ranks do different things: {format_rank_texts(axis, [_operation(row) for row in lines])}. {ALIKE}"
    plain = [[first, *map(_without_checksum, rest)] for first, *rest in lines]
    # Values depend on dtypes and shapes, so checksums are told only if nothing else differs; if no line differs, the
    # order does.
    sentences = (
        _sentences(plain, axis)
        or _sentences(lines, axis)
        or [format_rank_texts(axis, ["; ".join(row[1:]) for row in lines])]
    )
    advice = _advised(subject, *plain)
    return f"{subject[0]} differ between ranks: {findings(sentences, 6)}. {advice}"


def _sentences(lines: list[list[str]], axis: Axis) -> list[str]:
    """Describes each line that only some ranks have: those ranks, and the ranks without a line of this name."""
    ranks = ranks_along(axis)
    owners: dict[str, list[int]] = {}  # by index; lines that stand at the same place follow each other
    for column in itertools.zip_longest(*(dict.fromkeys(rank_lines[1:]) for rank_lines in lines)):
        for i, line in enumerate(column):
            if line is not None:
                owners.setdefault(line, []).append(i)
    named: dict[str, set[int]] = {}
    for line, some in owners.items():
        named.setdefault(_name(line), set()).update(some)
    sentences = []
    for line, some in owners.items():
        if len(some) == len(lines):
            continue
        lacking = [rank for i, rank in enumerate(ranks) if _name(line) and i not in named[_name(line)]]
        lacks = f", which {ranks_named(lacking)} {'lacks' if len(lacking) == 1 else 'lack'}" if lacking else ""
        places: dict[str, list[int]] = {}
        for i in some:
            _, called, where = lines[i][0].partition(_CALLED)  # empty if the rank does not say
            places.setdefault(called + where, []).append(ranks[i])
        sentences += [f"{_having(same)} {line}{place}{lacks}" for place, same in places.items()]
    return sentences


_NAMED = re.compile(r"(\S+)(?:: |=)")
_CHECKSUM = re.compile(r"(?:, \w+)? with checksum \w+$")


def _name(line: str) -> str:
    """Returns the name at the start of a line: `x['w']` of `x['w']: torch.float32 (2,)`; empty if there is none."""
    match = _NAMED.match(line)
    return match[1] if match else ""


def _without_checksum(line: str) -> str:
    """Returns a line without the checksum at its end."""
    return _CHECKSUM.sub("", line)


def _operation(lines: list[str]) -> str:
    """Returns a rank's operation and its first argument, from the lines of its description."""
    first, *rest = lines
    return f"{first}: {_without_checksum(rest[0])}" if rest and rest[0] and not rest[0].startswith("(") else first


def _having(ranks: list[int]) -> str:
    return f"{ranks_named(ranks)} {'has' if len(ranks) == 1 else 'have'}"


_CALLED = ", called at "
ALIKE = "All ranks along an axis call the same collectives, on values of the same shape and dtype, in the same order"


def format_rank_texts(axis: Axis, rank_texts: Sequence[str]) -> str:
    """Formats the texts of the ranks along an axis, in the order of `gathered`, with one entry for equal texts."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks_along(axis), rank_texts, strict=True):
        ranks_by_text.setdefault(text, []).append(rank)
    return findings(f"{_having(some)} {text}" for text, some in ranks_by_text.items())


def ranks_along(axis: Axis) -> list[int]:
    """Returns the global ranks along an axis of a process group, in the order of `gathered`."""
    if axis.size == 1:
        return [process_groups.global_rank()]
    return sorted(dist.get_process_group_ranks(process_groups.group_of(axis.group)))


def texts(own_text: bytes, lengths: Sequence[int], axis: Axis, operation: str, caller: str) -> list[str]:
    """Returns the text of each rank along an axis, from this rank's text and the byte lengths of all texts."""
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(own_text)] = torch.tensor(list(own_text), dtype=torch.uint8, device="cpu")
    rows = gathered(padded, axis, None, operation, caller)
    return [bytes(row[:n].tolist()).decode(errors="replace") for row, n in zip(rows, lengths, strict=True)]


@contextlib.contextmanager
def failing_together(
    meshes: Sequence[DeviceMesh | Axis], name: str, kinds: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """A context in which an error on one rank is raised on all; the other ranks must call `agree` next.

    Args:
        meshes: the meshes whose ranks raise it, too.
        name: the caller, for messages.
        kinds: the kinds of errors that may occur on one rank alone.
    """
    try:
        yield
    except kinds as error:
        agree([], meshes, name, own_error=error)
        raise  # where no mesh was given


def gathered(
    row: Tensor,
    mesh: DeviceMesh | Axis,
    axes: tuple[str, ...] | None = None,
    operation: str = "comparing",
    caller: str = "",
    note: str = "",
) -> Tensor:
    """Returns the rows of all ranks, or of those along some axes, on the CPU: `[ranks, *row.shape]`.

    `operation`, `caller` and `note` are for the message of a rank that waits.
    """
    axis = _axis_along(mesh, axes)
    if axis.size == 1:
        return row[None]
    # A separate group where backends allow: a rank that does not compare cannot answer with data of another collective.
    group = cpu_group(ranks_along(axis), "compare").group_name
    with waiting.on(operation, group, caller, note=note), at_once():
        return kernels.all_gather(functorch.unwrapped(row)[None], 0, axis.size, group)


def _axis_along(mesh: DeviceMesh | Axis, axes: tuple[str, ...] | None) -> Axis:
    return mesh if isinstance(mesh, Axis) else axis_of(mesh, tuple(sizes(mesh)) if axes is None else axes)


# --- collectives, in the debug mode ---


DEBUG = "debug(collectives=True)"
_forwards: dict[str, str] = {}  # the line of each stage's last call


def compare(op: str, values: str, axis: Axis, served: bool = False, by: str = DEBUG) -> None:
    """Raises ValueError on all ranks along an axis unless they are about to run the same collective.

    Args:
        op: the name of the collective.
        values: dtypes and shapes, and the op's other arguments: `"torch.float32 [3], dim=0"`.
        axis: the axis along which it runs.
        served: whether a stage's schedule issues it.
        by: the caller of the comparison. In the debug mode the user's lines must be equal, too: nothing else tells two
            sums of the same shape apart. For collectives of a schedule they may differ, since ranks may call a
            stage from different lines, one of them by `shardfn.skip`.

    Raises:
        ValueError: the ranks differ; the message has each rank's collective and the user's line.
        RuntimeError: a rank can no longer come.
    """
    if axis.size == 1:
        return
    leaf = f"{attribution.leaf}: " if attribution.leaf else ""
    item = f"{op}({leaf}{values})" if values else op
    line, failed = callers.caller(), comparisons.failure(axis.group)
    call = op if served or _backward() else callers.api_name(op)
    axes = waiting.group_axes(axis.group)
    inside = f" in {call}" if call != op else ""
    text = f"{item}{inside}{f' over {axes}' if axes else ''}{_purpose(served, line)}, called at {line}{failed}"
    place = comparisons.numbered_place(axis.group, text)
    same = [
        item,
        attribution.stage,
        _backward(),
        place.inside > 1,
        line if debugging.collectives and not served else "",
    ]
    counted = f"(number {place.inside} of the call at {place.where})" if place.inside else "(outside of any call)"
    with comparisons.holding_at(place), at_once(), unrecorded():
        difference = _difference(repr(same), f"{text}\n{counted}", axis, by)
    if difference:
        comparisons.mark_common_error()
        advice = ALIKE + _DROPPED * ("in backward" in difference)
        raise ValueError(f"{by}: collectives differ between ranks: {difference}. {advice}")


_DROPPED = (
    ". Where a branch drops what a collective gave on some ranks, these have no derivative of it: choose by "
    "torch.where on all ranks"
)


def values(dtype: torch.dtype, shape: Sequence[object]) -> str:
    """Formats a dtype and a shape: `"torch.float32 [3]"`."""
    return f"{dtype} {list(shape)}"


def _backward() -> bool:
    return autograd.inside_backward() if attribution.backward is None else attribution.backward


def _purpose(served: bool, line: str) -> str:
    """Says for which stage and in which pass a collective runs."""
    stage, backward = attribution.stage, _backward()
    if not stage:
        return " in backward" if backward else ""
    if not backward:
        _forwards[stage] = line
    purpose = f"{' of' if served else ' inside'} stage {stage!r} in {'backward' if backward else 'forward'}"
    began = _forwards.get(stage, line)
    return f"{purpose} (that ran forward at {began})" if backward and began != line else purpose


def _difference(same: str, text: str, axis: Axis, by: str) -> str:
    """Describes each rank's next collective if ranks differ; else returns an empty text."""
    data = text.encode()[:4000]
    row = torch.tensor([digest_of(same.encode()), len(data)], device="cpu")
    digests, lengths = gathered(row, axis, None, "comparing collectives", by).T.tolist()
    if len(set(digests)) == 1:
        return ""
    # A rank whose arguments are wrong marks that by a negative length, see `agree`.
    rank_texts = texts(data, [*map(abs, lengths)], axis, "comparing collectives that differ", by)
    rank_lines = [text.split("\n") for text in rank_texts]
    distinct = len({lines[0] for lines in rank_lines}) > 1
    return format_rank_texts(axis, [_operation(lines) if distinct else " ".join(lines) for lines in rank_lines])
