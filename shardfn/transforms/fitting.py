"""Micro-batches that fit into memory: if any rank runs out of memory, all ranks run again with smaller parts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.check.bits import digest_of
from shardfn.collectives.agree import agree, at_once, gathered, ranks_along
from shardfn.collectives.attempts import Attempt, Fared, can_call_off
from shardfn.compat import process_groups
from shardfn.mesh.axes import axis_of, sizes
from shardfn.mesh.grid import ALONE, Axis
from shardfn.mesh.groups import group_over, world_of_thread
from shardfn.mesh.lanes import lane
from shardfn.mesh.planned import notes, planned
from shardfn.mesh.scope import current_mesh, independent_axes, mesh_of
from shardfn.quoting import findings, listed, short
from shardfn.shards.layout import flat_shards, is_flat
from shardfn.transforms.shortage import SPOKEN, RandomNumbers, emptied, exhausted, handled, versions

T = TypeVar("T")
Key = tuple[str, tuple[int, ...]]  # the function, and the ranks that run it together
_log = logging.getLogger("shardfn")
_SUBJECT = (
    "the micro-batches",
    "Ranks cut their batches alike: pass the same micro=, and batches of the same structure and dtypes, on every rank",
)
HEARSAY = 5.0  # seconds to wait for a rank to abort the attempt after its error has arrived here
FIX = "Take a smaller batch or less memory for each row: sf.stage(remat=True), remat='offload', tiers, shorter rows"


@dataclass
class Known:
    """The numbers of parts in which batches of each function have fitted, for one lane of a world.

    Attributes:
        parts: by function, and by the number of elements of a batch on the rank with the most; only entries that needed
            more parts than smaller batches.
        compared: functions whose batches were compared between ranks since the process began.
    """

    parts: dict[Key, dict[int, int]] = field(default_factory=dict)
    compared: set[Key] = field(default_factory=set)

    def first(self, key: Key, elements: int) -> int:
        """The number of parts to try first: what this or a smaller batch of the same function has needed."""
        return max((parts for size, parts in self.parts.get(key, {}).items() if size <= elements), default=1)

    def learn(self, key: Key, elements: int, parts: int) -> None:
        """Notes that a batch has fitted in `parts` parts."""
        if parts > self.first(key, elements):
            larger = self.parts.get(key, {}).items()
            self.parts[key] = {size: n for size, n in larger if size < elements or n > parts} | {elements: parts}

    def known_on(self, ranks: Sequence[int]) -> list[Key]:
        """The entries of functions that run on these ranks, or on this rank alone."""
        return [key for key in self.parts if len(key[1]) == 1 or set(key[1]) <= set(ranks)]


def known_here() -> Known:
    """The entries of this lane of this world."""
    return world_of_thread().agreed.setdefault(f"fitting {lane()}", Known())


def remembered(ranks: Sequence[int]) -> str:
    """The entries of these ranks as JSON, with positions in `ranks` in place of rank numbers."""
    known, places = known_here(), {rank: place for place, rank in enumerate(ranks)}
    entries = []
    for key in known.known_on(ranks):
        name, members = key
        positions = [places[rank] for rank in members] if len(members) > 1 else []
        entries += [[name, positions, elements, parts] for elements, parts in known.parts[key].items()]
    return json.dumps(entries)


def recall(text: str, ranks: Sequence[int]) -> None:
    """Replaces the entries of these ranks by those in the JSON of `remembered`, which may come from other ranks."""
    known = known_here()
    for key in known.known_on(ranks):
        del known.parts[key]
    for name, places, *_, elements, parts in json.loads(text):
        if all(place < len(ranks) for place in places):
            known.learn((name, tuple(ranks[place] for place in places) or (0,)), elements, parts)


def fitted(run: Callable[[list[Any]], T], tree: Any, micro: Any, params: Any, described: Sequence[str], name: str) -> T:
    """Runs `run` on the micro-batches of a batch; returns its result.

    Args:
        run: computes on micro-batches; it changes nothing, so that it can run again.
        tree: the batch.
        micro: the number of parts; `"auto"`: as few as fit.
        params: the parameters that `run` uses.
        described: other arguments that must be equal on all ranks, a line for each.
        name: the function's name, for messages.

    Raises:
        TypeError, ValueError: the batch cannot be split in this way, or ranks would split it differently.
        torch.OutOfMemoryError: a single row is too much on some rank.
        RuntimeError: out of memory where ranks cannot abandon an attempt; the batch or parameters were written into.
    """
    axis, known = program_ranks(params), known_here()
    batch, error = None, None
    try:
        batch = batch_of(tree, micro)
    except (TypeError, ValueError) as raised:
        error = raised  # raised below, once other ranks know
    key = ("\n".join([name, *described, f"micro={micro!r}", _weight(params)]), tuple(axis_ranks(axis)))
    rows, elements = 0, 0
    if micro == "auto" or axis.size == 1 or key not in known.compared:
        rows, elements = _largest_batch(batch, error, [*described, f"micro={micro!r}"], axis)
        known.compared.add(key)
    if batch is None:
        assert error is not None, "it is there, or something is wrong with it"
        raise error
    if micro != "auto":
        return run(batch.parts(min(micro, rows) if axis.size == 1 else micro))
    parts = min(known.first(key, elements), rows)
    if planned():
        notes().assume(f"accumulate: micro='auto' has {parts} part{'s' if parts > 1 else ''}")
    value, parts = _as_few_as_fit(run, batch, rows, parts, params, axis_ranks(axis), name)
    known.learn(key, elements, parts)
    return value


def agreed_batch(tree: Any, parts: int, described: Sequence[str], axis: Axis) -> Batch:
    """A batch that is the same on all ranks but for its numbers, and whose rows are that many equal parts.

    Raises:
        TypeError, ValueError: on every rank, for an error on one of them, or a difference.
    """
    batch, error = None, None
    try:
        batch = batch_of(tree, parts)
        if batch.rows % parts or not batch.rows:
            raise ValueError(
                f"accumulate: a batch that is added exactly must have equal parts, got {batch.rows} rows for {parts} "
                f"parts on this rank. Pass a multiple of {parts} rows on every rank"
            )
    except (TypeError, ValueError) as raised:
        error = raised  # raised below, once other ranks know
    _largest_batch(batch, error, [*described, f"rows={batch and batch.rows}"], axis)
    assert batch is not None, "it is there, or something is wrong with it"
    return batch


@at_once()
def _largest_batch(
    batch: Batch | None, error: Exception | None, described: Sequence[str], axis: Axis
) -> tuple[int, int]:
    """Rows and elements of the rank with the most; ranks may differ in these, but not in the number of parts.

    Raises:
        TypeError, ValueError: on every rank, for an error on one of them, or a difference; or if no rank has a row.
    """
    lines = [*described, *(batch.kinds if batch is not None else [str(error)])]
    row = torch.tensor(
        [digest_of("\n".join(lines).encode()), *((batch.rows, batch.elements) if batch is not None else (0, 0))],
        device="cpu",
    )
    note = f"It has {short('; '.join(lines), 400)}"
    rows_of_ranks = gathered(row, axis, None, "comparing the micro-batches", "accumulate", note)
    if planned():
        notes().assume("accumulate: no rank has more rows than this one")
        rows_of_ranks = row[None]
    if len(rows_of_ranks[:, 0].unique()) > 1:
        agree(lines, axis, "accumulate", error, _SUBJECT)
    if error is not None:
        raise error
    _, rows, elements = rows_of_ranks.amax(0).tolist()
    if not rows and not (planned() and axis.size > 1):
        raise ValueError("accumulate: the batch has no rows" + ("" if axis.size == 1 else ", on any rank"))
    return rows, elements


def _as_few_as_fit(
    run: Callable[[list[Any]], T], batch: Batch, rows: int, parts: int, params: Any, ranks: list[int], name: str
) -> tuple[T, int]:
    """The result, and the number of parts; `rows` is that of the rank with the most."""
    tensors = [*(x for x in optree.tree_leaves(params) if isinstance(x, Tensor)), *batch.tensors]
    random, before, outer = RandomNumbers(tensors), versions(tensors), handled()
    tried: list[int] = []
    while True:
        tried.append(parts)
        outcome = _tried(run, batch.parts(parts), ranks, name, lambda: versions(tensors) == before, outer)
        if not isinstance(outcome, str):
            return outcome[0], parts
        emptied()
        many = f"{rows} rows in {parts} part{'s' if parts > 1 else ''}"
        if parts >= rows:
            raise torch.OutOfMemoryError(
                f"accumulate: {name} runs out of memory with one row at a time ({many}; tried: "
                f"{', '.join(map(str, tried))}): {outcome}. {FIX}"
            )
        random.restore()
        more = min(2 * parts, rows)
        _log.warning("accumulate: %s ran out of memory with %s, and runs again in %d: %s", name, many, more, outcome)
        parts = more


def _tried(
    run: Callable[[list[Any]], T],
    pieces: list[Any],
    ranks: list[int],
    name: str,
    unchanged: Callable[[], bool],
    outer: Collection[int],
) -> tuple[T] | str:
    """The result, as a tuple of one; or which ranks ran out of memory, once all ranks have abandoned the attempt.

    `unchanged` says whether parameters and batch are unchanged; `outer` are ids of exceptions handled before.
    """
    parts = f"{len(pieces)} part{'s' if len(pieces) > 1 else ''}"
    if len(ranks) == 1:
        try:
            return (run(pieces),)
        except Exception as error:
            text = exhausted(error, outer)
            if text is None:
                raise
        return _refuse_changed({} if unchanged() else {0: Fared("off", text, changed=True)}, text, name, parts)
    with Attempt(ranks, f"accumulate of {name} in {parts}") as attempt:
        outcome = _run_attempt(run, pieces, ranks, name, attempt, outer)
        if isinstance(outcome, tuple):
            return outcome
        attempt.interrupt()
        emptied()
        fared = attempt.wait_for_outcomes(replace(outcome, changed=not unchanged()))
        reasons = findings([f"rank {rank}: {f.told}" for rank, f in fared.items() if f.how == "off"], 4)
        failed = [f"rank {rank} failed: {f.told}" for rank, f in fared.items() if f.how == "failed"]
        if failed:
            kind = torch.OutOfMemoryError if outcome.how == "off" else RuntimeError
            raise kind(
                f"accumulate: {name} ran out of memory in {parts} ({reasons}), and does not run again in smaller ones, "
                f"since {findings(failed, 4)}"
            )
        attempt.renew(fared)
        return _refuse_changed(fared, reasons, name, parts)


def _run_attempt(
    run: Callable[[list[Any]], T],
    pieces: list[Any],
    ranks: list[int],
    name: str,
    attempt: Attempt,
    outer: Collection[int],
) -> tuple[T] | Fared:
    """The result as a 1-tuple, once all ranks have one; or this rank's outcome of an aborted attempt."""
    try:
        value = run(pieces)
    except Exception as error:
        text = exhausted(error, outer)
        if text is not None and not can_call_off(ranks):
            raise RuntimeError(
                f"accumulate: {name} ran out of memory on rank {dist.get_rank()} in micro={len(pieces)} ({text}), and "
                f"ranks can only try again on gloo and NCCL: pass micro={2 * len(pieces)} in place of micro='auto'"
            ) from error
        if text is not None:
            attempt.call_off(f"rank {dist.get_rank()} ran out of memory: {text}")
            return Fared("off", text)
        # Another rank's error may arrive, through a pipeline, before that rank has aborted the attempt.
        if isinstance(error, RuntimeError) and attempt.called_off(HEARSAY if SPOKEN.search(str(error)) else 0.0):
            return Fared("stopped", str(error))
        attempt.failed(f"{type(error).__name__}: {error}")
        raise
    try:
        attempt.finished()
    except RuntimeError as error:
        if not attempt.called_off():
            raise
        return Fared("stopped", str(error))
    return (value,)


def _refuse_changed(fared: dict[int, Fared], description: str, name: str, parts: str) -> str:
    """Returns `description`; raises RuntimeError if a rank has changed its parameters or batch and cannot try again."""
    changed = [str(rank) for rank, f in fared.items() if f.changed]
    if changed:
        raise RuntimeError(
            f"accumulate: {name} ran out of memory in {parts} ({description}), and cannot run again in smaller ones: "
            f"on rank {listed(changed)} it has written into its parameters or its batch. Write it without in-place "
            f"operations on those"
        )
    return description


# --- who tries together ---


def program_ranks(params: Any) -> Axis:
    """The ranks that run the same program: of the mesh in scope, else of the flat shards' mesh, else the world."""
    mesh = current_mesh() or next((mesh_of(flat.layout.grid, "the parameters") for flat in flat_shards(params)), None)
    if mesh is not None:
        return _answering_axis(axis_of(mesh, tuple(name for name in sizes(mesh) if name not in independent_axes())))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    ranks = list(range(dist.get_world_size()))
    return _answering_axis(Axis(len(ranks), dist.get_rank(), group_over(ranks).group_name))


def _answering_axis(axis: Axis) -> Axis:
    """The axis, or `ALONE` if its other ranks are simulated: they cannot answer. In a plan, always the axis."""
    return axis if axis.size > 1 and (planned() or not process_groups.made_up()) else ALONE


def _weight(params: Any) -> str:
    """The size of a model, as text; the same on all ranks of a pipeline, each of which has its own part."""
    nodes = optree.tree_leaves(params, is_leaf=is_flat)
    flat = sum(node.layout.padded for node in nodes if is_flat(node))
    return f"{flat + sum(leaf.numel() for leaf in nodes if isinstance(leaf, Tensor))} numbers"


def axis_ranks(axis: Axis) -> list[int]:
    """Global ranks along an axis; `[0]` for one rank, whichever it is, and for ranks that do not run."""
    return [0] if axis.size == 1 or planned() else ranks_along(axis)


# --- a batch, and its parts ---


@dataclass(frozen=True)
class Batch:
    """One batch of this rank that will be split into micro-batches.

    Attributes:
        tensors: its leaves, `[rows, ...]` each.
        tree: its structure.
        rows: number of rows of each leaf.
    """

    tensors: list[Tensor]
    tree: optree.PyTreeSpec
    rows: int

    @property
    def kinds(self) -> list[str]:
        """A description of each leaf, without its number of rows, which must be equal on all ranks."""
        paths = optree.treespec_paths(self.tree)
        return [f"batch{path_text(path)} {x.dtype} {x.ndim}-d" for path, x in zip(paths, self.tensors, strict=True)]

    @property
    def elements(self) -> int:
        """Number of elements of all leaves."""
        return sum(x.numel() for x in self.tensors)

    def parts(self, n: int) -> list[Any]:
        """The batch split into `n` parts; the first may have one row more, and with too few rows the last are empty."""
        split = [x.tensor_split(n) for x in self.tensors]
        return [optree.tree_unflatten(self.tree, [pieces[i] for pieces in split]) for i in range(n)]


def batch_of(tree: Any, micro: Any) -> Batch:
    """The batch, checked.

    Raises:
        TypeError, ValueError: the batch, or `micro`, is not what it should be.
    """
    if micro != "auto" and (not isinstance(micro, int) or isinstance(micro, bool)):
        raise TypeError(f'accumulate: micro must be a number of parts, "auto" or "exact", got {micro!r}')
    if micro != "auto" and micro < 1:
        raise ValueError(f"accumulate: micro must be 1 or more, got {micro}")
    paths, leaves, spec = optree.tree_flatten_with_path(tree)
    if not leaves:
        raise ValueError("accumulate: with micro= the second argument is one batch, and this one has no tensors")
    if flat_shards(tree):
        raise TypeError("accumulate: the batch has a flat shard in it, which has no rows; pass parameters as `params`")
    rows = {}
    for path, leaf in zip(paths, leaves, strict=True):
        name = f"batch{path_text(path)}"
        if not isinstance(leaf, Tensor) or hasattr(leaf, "placements"):
            kind = type(leaf).__name__
            raise TypeError(f"accumulate: {name} is of type {kind}; with micro= a batch is a pytree of plain tensors")
        if leaf.ndim == 0:
            raise ValueError(f"accumulate: {name} is a scalar; every tensor of a batch has its rows in dim 0")
        if leaf.requires_grad:
            raise ValueError(f"accumulate: {name} requires a gradient; only `params` get one here: detach it")
        rows[name] = len(leaf)
    if len(set(rows.values())) > 1:
        counts = listed(f"{name} has {n}" for name, n in rows.items())
        raise ValueError(f"accumulate: tensors of one batch have the same number of rows in dim 0, and {counts}")
    return Batch(leaves, spec, next(iter(rows.values())))


def path_text(path: tuple[Any, ...]) -> str:
    """A path in a tree, written as Python."""
    return "".join(f"[{key!r}]" for key in path)
