"""Micro-batches that fit: what runs out of memory, on any rank, runs again on all of them in smaller parts."""

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

from shardfn.collectives.agree import agree, digest_of, gathered, ranks_along
from shardfn.collectives.attempts import Attempt, Fared, can_call_off
from shardfn.compat import process_groups
from shardfn.mesh.axes import axis_of, sizes
from shardfn.mesh.grid import ALONE, Axis
from shardfn.mesh.groups import group_over, world_of_thread
from shardfn.mesh.lanes import lane
from shardfn.mesh.scope import current_mesh, independent_axes, mesh_of
from shardfn.quoting import findings, listed
from shardfn.shards.layout import is_flat
from shardfn.transforms.cutting import Batch, batch_of
from shardfn.transforms.shortage import SPOKEN, RandomNumbers, emptied, exhausted, handled, versions

T = TypeVar("T")
Key = tuple[str, tuple[int, ...]]  # the function, and the ranks that run it together
_log = logging.getLogger("shardfn")
_SUBJECT = (
    "the micro-batches",
    "Ranks cut their batches alike: pass the same micro=, and batches of the same structure and dtypes, on every rank",
)
HEARSAY = 5.0  # seconds
FIX = "Take a smaller batch or less memory for each row: sf.stage(remat=True), remat='offload', tiers, shorter rows"


@dataclass
class Known:
    """What one lane of a world knows of each function: in how many parts its batches fit.

    Attributes:
        parts: by how many numbers a batch has on the rank with the most; only what more parts than before have needed.
        compared: with other ranks, since the process began.
    """

    parts: dict[Key, dict[int, int]] = field(default_factory=dict)
    compared: set[Key] = field(default_factory=set)

    def first(self, key: Key, elements: int) -> int:
        """In how many parts to try: no fewer than this or a smaller batch of the same function has needed."""
        return max((parts for size, parts in self.parts.get(key, {}).items() if size <= elements), default=1)

    def learn(self, key: Key, elements: int, parts: int) -> None:
        """A batch has fitted in so many."""
        if parts > self.first(key, elements):
            larger = self.parts.get(key, {}).items()
            self.parts[key] = {size: n for size, n in larger if size < elements or n > parts} | {elements: parts}

    def among(self, ranks: Sequence[int]) -> list[Key]:
        """What these ranks, of which this is one, have found out by themselves."""
        return [key for key in self.parts if len(key[1]) == 1 or set(key[1]) <= set(ranks)]


def known_here() -> Known:
    """What this lane of this world knows."""
    known: Known = world_of_thread().agreed.setdefault(f"fitting {lane()}", Known())
    return known


def remembered(ranks: Sequence[int]) -> str:
    """In how many parts batches fit that these ranks have cut, as JSON that says nothing of their numbers."""
    known, places = known_here(), {rank: place for place, rank in enumerate(ranks)}
    found = []
    for key in known.among(ranks):
        name, them = key
        who = [places[rank] for rank in them] if len(them) > 1 else []
        found += [[name, who, elements, parts] for elements, parts in known.parts[key].items()]
    return json.dumps(found)


def recall(text: str, ranks: Sequence[int]) -> None:
    """These ranks know again what `remembered` said of them, or of as many others, and nothing else."""
    known = known_here()
    for key in known.among(ranks):
        del known.parts[key]
    for name, places, *_, elements, parts in json.loads(text):
        if all(place < len(ranks) for place in places):
            known.learn((name, tuple(ranks[place] for place in places) or (0,)), elements, parts)


def fitted(run: Callable[[list[Any]], T], tree: Any, micro: Any, params: Any, described: Sequence[str], name: str) -> T:
    """What `run` returns of the parts of a batch.

    Args:
        run: computes on micro-batches; it changes nothing, so that it can run again.
        tree: the batch.
        micro: into how many parts it is cut; `"auto"`: as few as fit.
        params: what `run` computes with.
        described: what else ranks have in common, a line each.
        name: of the function, for messages.

    Raises:
        TypeError, ValueError: the batch cannot be cut so, or not on every rank alike.
        torch.OutOfMemoryError: one row is too much, on some rank.
        RuntimeError: out of memory where ranks cannot go back; a batch or parameters that were written into.
    """
    axis, known = _together(params), known_here()
    batch, wrong = None, None
    try:
        batch = batch_of(tree, micro)
    except (TypeError, ValueError) as error:
        wrong = error
    key = ("\n".join([name, *described, f"micro={micro!r}", _weight(params)]), tuple(axis_ranks(axis)))
    rows, elements = 0, 0
    if micro == "auto" or axis.size == 1 or key not in known.compared:
        rows, elements = _most(batch, wrong, [*described, f"micro={micro!r}"], axis)
        known.compared.add(key)
    if batch is None:
        assert wrong is not None, "it is there, or something is wrong with it"
        raise wrong
    if micro != "auto":
        return run(batch.parts(min(micro, rows) if axis.size == 1 else micro))
    parts = min(known.first(key, elements), rows)
    value, parts = _as_few_as_fit(run, batch, rows, parts, params, axis_ranks(axis), name)
    known.learn(key, elements, parts)
    return value


def _most(batch: Batch | None, wrong: Exception | None, described: Sequence[str], axis: Axis) -> tuple[int, int]:
    """Rows, and numbers, of the rank with the most: ranks have as many as they have, and cut into as many parts.

    Raises:
        TypeError, ValueError: on every rank, what is wrong on one, or differs; or none has a row.
    """
    said = [*described, *(batch.kinds if batch is not None else [str(wrong)])]
    row = torch.tensor(
        [digest_of("\n".join(said).encode()), *((batch.rows, batch.elements) if batch is not None else (0, 0))]
    )
    every = gathered(row, axis, None, "comparing the micro-batches", "accumulate")
    if len(every[:, 0].unique()) > 1:
        agree(said, axis, "accumulate", wrong, _SUBJECT)
    if wrong is not None:
        raise wrong
    _, rows, elements = every.amax(0).tolist()
    if not rows:
        raise ValueError("accumulate: the batch has no rows" + ("" if axis.size == 1 else ", on any rank"))
    return rows, elements


def _as_few_as_fit(
    run: Callable[[list[Any]], T], batch: Batch, rows: int, parts: int, params: Any, ranks: list[int], name: str
) -> tuple[T, int]:
    """What it returns, and in how many parts; `rows` are those of the rank with the most."""
    given = [*(x for x in optree.tree_leaves(params) if isinstance(x, Tensor)), *batch.tensors]
    random, before, outer = RandomNumbers(given), versions(given), handled()
    tried: list[int] = []
    while True:
        tried.append(parts)
        found = _tried(run, batch.parts(parts), ranks, name, lambda: versions(given) == before, outer)
        if not isinstance(found, str):
            return found[0], parts
        emptied()
        many = f"{rows} rows in {parts} part{'s' if parts > 1 else ''}"
        if parts >= rows:
            raise torch.OutOfMemoryError(
                f"accumulate: {name} runs out of memory with one row at a time ({many}; tried: "
                f"{', '.join(map(str, tried))}): {found}. {FIX}"
            )
        random.restore()
        more = min(2 * parts, rows)
        _log.warning("accumulate: %s ran out of memory with %s, and runs again in %d: %s", name, many, more, found)
        parts = more


def _tried(
    run: Callable[[list[Any]], T],
    pieces: list[Any],
    ranks: list[int],
    name: str,
    whole: Callable[[], bool],
    outer: Collection[int],
) -> tuple[T] | str:
    """What it returns, alone in a tuple; or who ran out of memory, and how, when all ranks have come back from it.

    `whole` says whether what it was given is as it was; `outer` are errors that were handled before.
    """
    parts = f"{len(pieces)} part{'s' if len(pieces) > 1 else ''}"
    if len(ranks) == 1:
        try:
            return (run(pieces),)
        except Exception as error:
            told = exhausted(error, outer)
            if told is None:
                raise
        return _refuse_changed({} if whole() else {0: Fared("off", told, changed=True)}, told, name, parts)
    with Attempt(ranks, f"accumulate of {name} in {parts}") as attempt:
        found = _run(run, pieces, ranks, name, attempt, outer)
        if isinstance(found, tuple):
            return found
        attempt.interrupt()
        emptied()
        fared = attempt.meet(replace(found, changed=not whole()))
        said = findings([f"rank {rank}: {one.told}" for rank, one in fared.items() if one.how == "off"], 4)
        failed = [f"rank {rank} failed: {one.told}" for rank, one in fared.items() if one.how == "failed"]
        if failed:
            kind = torch.OutOfMemoryError if found.how == "off" else RuntimeError
            raise kind(
                f"accumulate: {name} ran out of memory in {parts} ({said}), and does not run again in smaller ones, "
                f"since {findings(failed, 4)}"
            )
        attempt.renew(fared)
        return _refuse_changed(fared, said, name, parts)


def _run(
    run: Callable[[list[Any]], T],
    pieces: list[Any],
    ranks: list[int],
    name: str,
    attempt: Attempt,
    outer: Collection[int],
) -> tuple[T] | Fared:
    """What it returns, when it has on all ranks; or how this one fared in what was called off."""
    try:
        value = run(pieces)
    except Exception as error:
        told = exhausted(error, outer)
        if told is not None and not can_call_off(ranks):
            raise RuntimeError(
                f"accumulate: {name} ran out of memory on rank {dist.get_rank()} in micro={len(pieces)} ({told}), and "
                f"ranks can only try again on gloo and NCCL: pass micro={2 * len(pieces)} in place of micro='auto'"
            ) from error
        if told is not None:
            attempt.call_off(f"rank {dist.get_rank()} ran out of memory: {told}")
            return Fared("off", told)
        # What another rank says of itself, by a pipeline, may come before it has called the attempt off.
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


def _refuse_changed(fared: dict[int, Fared], said: str, name: str, parts: str) -> str:
    """`said`, if all ranks can run again with what they were given."""
    changed = [str(rank) for rank, one in fared.items() if one.changed]
    if changed:
        raise RuntimeError(
            f"accumulate: {name} ran out of memory in {parts} ({said}), and cannot run again in smaller ones: on rank "
            f"{listed(changed)} it has written into its parameters or its batch. Write it without in-place "
            f"operations on those"
        )
    return said


# --- who tries together ---


def _together(params: Any) -> Axis:
    """The ranks that run the same program: of the mesh in scope, or of the flat shards', or of the world."""
    flat = next((node for node in optree.tree_leaves(params, is_leaf=is_flat) if is_flat(node)), None)
    mesh = current_mesh() or (flat and mesh_of(flat.layout.grid, "accumulate: its parameters"))
    if mesh is not None:
        return _real(axis_of(mesh, tuple(one for one in sizes(mesh) if one not in independent_axes())))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    ranks = list(range(dist.get_world_size()))
    return _real(Axis(len(ranks), dist.get_rank(), group_over(ranks).group_name))


def _real(axis: Axis) -> Axis:
    """Without the ranks that are made up, which nothing can be asked of."""
    return axis if axis.size > 1 and not process_groups.made_up() else ALONE


def _weight(params: Any) -> str:
    """How large a model is; of a pipeline's parts each rank has its own."""
    nodes = optree.tree_leaves(params, is_leaf=is_flat)
    flat = sum(node.layout.padded for node in nodes if is_flat(node))
    return f"{flat + sum(leaf.numel() for leaf in nodes if isinstance(leaf, Tensor))} numbers"


def axis_ranks(axis: Axis) -> list[int]:
    """Global ranks along an axis; of this one alone, whichever it is."""
    return [0] if axis.size == 1 else ranks_along(axis)
