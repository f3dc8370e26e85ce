"""Micro-batches that fit: what runs out of memory, on any rank, runs again on all of them in smaller parts."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from shardfn.collectives.agree import agree
from shardfn.collectives.attempts import Attempt, Fared, can_call_off
from shardfn.compat import process_groups
from shardfn.mesh.axes import axis_of, sizes
from shardfn.mesh.grid import ALONE, Axis
from shardfn.mesh.groups import group_over, world_of_thread
from shardfn.mesh.lanes import lane
from shardfn.mesh.scope import current_mesh, independent_axes, mesh_of
from shardfn.shards.layout import is_flat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_log = logging.getLogger("shardfn")
_SUBJECT = (
    "the micro-batches",
    "Ranks cut their batches alike: pass the same micro=, and batches of the same shapes, on every rank",
)
HEARSAY = 5.0  # seconds
_SPOKEN = re.compile("OutOfMemoryError|MemoryError|out of memory|can't allocate memory|bad_alloc")
FIX = "Take a smaller batch or less memory for each row: sf.stage(remat=True), remat='offload', tiers, shorter rows"


@dataclass
class Known:
    """What one lane of a world knows of each function and batch: in how many parts it fits, and how large it is."""

    parts: dict[tuple[str, ...], int] = field(default_factory=dict)
    elements: dict[tuple[str, ...], int] = field(default_factory=dict)

    def first(self, key: tuple[str, ...], elements: int) -> int:
        """In how many parts to try what is new: no fewer than smaller batches of the same function have needed."""
        same = [one for one in self.parts if one[0] == key[0] and self.elements[one] <= elements]
        return max((self.parts[one] for one in same), default=1)


@dataclass(frozen=True)
class Batch:
    """One batch of this rank, to be cut.

    Attributes:
        tensors: its leaves, `[rows, ...]` each.
        tree: how to put it together.
        rows: of each leaf.
    """

    tensors: list[Tensor]
    tree: optree.PyTreeSpec
    rows: int

    def parts(self, n: int) -> list[Any]:
        """It in `n` parts, of which the first may have a row more than the last."""
        cut = [x.tensor_split(n) for x in self.tensors]
        return [optree.tree_unflatten(self.tree, [pieces[i] for pieces in cut]) for i in range(n)]


def batch_of(tree: Any, micro: Any) -> Batch:
    """The batch, if it can be cut so.

    Raises:
        TypeError, ValueError: it, or `micro`, is something else than it should be.
    """
    if micro != "auto" and (not isinstance(micro, int) or isinstance(micro, bool)):
        raise TypeError(f'accumulate: micro={micro!r}; it is a number of parts, or "auto"')
    paths, leaves, spec = optree.tree_flatten_with_path(tree)
    if not leaves:
        raise ValueError("accumulate: with micro= the second argument is one batch, and this one has no tensors")
    if any(is_flat(node) for node in optree.tree_leaves(tree, is_leaf=is_flat)):
        raise TypeError("accumulate: the batch has a flat shard in it, which has no rows; pass parameters as `params`")
    rows = {}
    for path, leaf in zip(paths, leaves, strict=True):
        where = "batch" + "".join(f"[{step!r}]" for step in path)
        if not isinstance(leaf, Tensor) or hasattr(leaf, "placements"):
            kind = type(leaf).__name__
            raise TypeError(f"accumulate: {where} is of type {kind}; with micro= a batch is a pytree of plain tensors")
        if leaf.ndim == 0:
            raise ValueError(f"accumulate: {where} is a scalar; every tensor of a batch has its rows in dim 0")
        if leaf.requires_grad:
            raise ValueError(f"accumulate: {where} requires a gradient; only `params` get one here: detach it")
        rows[where] = len(leaf)
    if len(set(rows.values())) > 1:
        said = ", ".join(f"{where} has {n}" for where, n in rows.items())
        raise ValueError(f"accumulate: tensors of one batch have the same number of rows in dim 0, and {said}")
    n = next(iter(rows.values()))
    if n == 0:
        raise ValueError("accumulate: the batch has no rows")
    if micro != "auto" and not 1 <= micro <= n:
        raise ValueError(f"accumulate: micro={micro}, and the batch has {n} rows: from 1 to {n} parts can be cut")
    return Batch(leaves, spec, n)


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
    axis = _together(params)
    try:
        batch, wrong = batch_of(tree, micro), None
    except (TypeError, ValueError) as error:
        batch, wrong = None, error
    if batch is None:
        agree([f"{name}: {wrong}"], axis, "accumulate", wrong, _SUBJECT)
        assert wrong is not None, "it is there, or something is wrong with it"
        raise wrong
    known: Known = world_of_thread().agreed.setdefault(f"fitting {lane()}", Known())
    shapes = [f"{x.dtype} {list(x.shape)}" for x in batch.tensors]
    key = ("\n".join([name, *described, f"micro={micro!r}", str(axis_ranks(axis)), _weight(params)]), *shapes)
    if key not in known.parts:
        elements = sum(x.numel() for x in batch.tensors)
        first = known.first(key, elements) if micro == "auto" else micro
        agree([*described, f"micro={micro!r}", *shapes], axis, "accumulate", subject=_SUBJECT)
        known.elements[key], known.parts[key] = elements, min(first, batch.rows)
    if micro != "auto":
        return run(batch.parts(micro))
    value, known.parts[key] = _as_few_as_fit(run, batch, known.parts[key], params, axis_ranks(axis), name)
    return value


def _as_few_as_fit(
    run: Callable[[list[Any]], T], batch: Batch, parts: int, params: Any, ranks: list[int], name: str
) -> tuple[T, int]:
    given = [*(x for x in optree.tree_leaves(params) if isinstance(x, Tensor)), *batch.tensors]
    random, versions = _Random(given), _versions(given)
    tried: list[int] = []
    while True:
        tried.append(parts)
        found = _tried(run, batch.parts(parts), ranks, name, lambda: _versions(given) == versions)
        if not isinstance(found, str):
            return found[0], parts
        _emptied()
        many = f"{batch.rows} rows in {parts} part{'s' if parts > 1 else ''}"
        if parts >= batch.rows:
            raise torch.OutOfMemoryError(
                f"accumulate: {name} runs out of memory with one row at a time ({many}; tried: "
                f"{', '.join(map(str, tried))}): {found}. {FIX}"
            )
        random.restore()
        more = min(2 * parts, batch.rows)
        _log.warning("accumulate: %s ran out of memory with %s, and runs again in %d: %s", name, many, more, found)
        parts = more


def _tried(
    run: Callable[[list[Any]], T], pieces: list[Any], ranks: list[int], name: str, whole: Callable[[], bool]
) -> tuple[T] | str:
    """What it returns, alone in a tuple; or who ran out of memory, and how, when all ranks have come back from it.

    `whole` says whether what it was given is as it was.
    """
    parts = f"{len(pieces)} part{'s' if len(pieces) > 1 else ''}"
    if len(ranks) == 1:
        try:
            return (run(pieces),)
        except Exception as error:
            told = exhausted(error)
            if told is None:
                raise
        return _refuse_changed({} if whole() else {0: Fared("off", told, changed=True)}, told, name, parts)
    with Attempt(ranks, f"accumulate of {name} in {parts}") as attempt:
        found = _run(run, pieces, ranks, name, attempt)
        if isinstance(found, tuple):
            return found
        attempt.interrupt()
        _emptied()
        fared = attempt.meet(replace(found, changed=not whole()))
        said = "; ".join([f"rank {rank}: {one.told}" for rank, one in fared.items() if one.how == "off"][:4])
        failed = [f"rank {rank} failed: {one.told}" for rank, one in fared.items() if one.how == "failed"]
        if failed:
            kind = torch.OutOfMemoryError if found.how == "off" else RuntimeError
            raise kind(
                f"accumulate: {name} ran out of memory in {parts} ({said}), and does not run again in smaller ones, "
                f"since {'; '.join(failed[:4])}"
            )
        attempt.renew(fared)
        return _refuse_changed(fared, said, name, parts)


def _run(
    run: Callable[[list[Any]], T], pieces: list[Any], ranks: list[int], name: str, attempt: Attempt
) -> tuple[T] | Fared:
    """What it returns, when it has on all ranks; or how this one fared in what was called off."""
    try:
        value = run(pieces)
    except Exception as error:
        told = exhausted(error)
        if told is not None and not can_call_off(ranks):
            raise RuntimeError(
                f"accumulate: {name} ran out of memory on rank {dist.get_rank()} in micro={len(pieces)} ({told}), and "
                f"ranks can only try again on gloo and NCCL: pass micro={2 * len(pieces)} in place of micro='auto'"
            ) from error
        if told is not None:
            attempt.call_off(f"rank {dist.get_rank()} ran out of memory: {told}")
            return Fared("off", told)
        # What another rank says of itself, by a pipeline, may come before it has called the attempt off.
        if isinstance(error, RuntimeError) and attempt.called_off(HEARSAY if _SPOKEN.search(str(error)) else 0.0):
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
            f"{', '.join(changed)} it has written into its parameters or its batch. Write it without in-place "
            f"operations on those"
        )
    return said


def exhausted(error: BaseException) -> str | None:
    """What the allocator says, if it is for want of memory that this was raised; else None."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        text = str(one)
        if isinstance(one, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(one, RuntimeError) and any(words in text for words in _WORDS)
        ):
            return f"{type(one).__name__}: {text.strip().splitlines()[0]}" if text.strip() else type(one).__name__
        waiting += [one.__cause__, one.__context__]
    return None


_WORDS = (
    "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc",
    "Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip


# --- who tries together ---


def _together(params: Any) -> Axis:
    """The ranks that run the same program: of the mesh in scope, or of the flat shards', or of the world."""
    mesh = current_mesh() or _mesh_of(params)
    if mesh is not None:
        return _real(axis_of(mesh, tuple(one for one in sizes(mesh) if one not in independent_axes())))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    ranks = list(range(dist.get_world_size()))
    return _real(Axis(len(ranks), dist.get_rank(), group_over(ranks).group_name))


def _real(axis: Axis) -> Axis:
    """Without the ranks that are made up, which nothing can be asked of."""
    return axis if axis.size > 1 and not process_groups.made_up() else ALONE


def _mesh_of(params: Any) -> DeviceMesh | None:
    flat = [node for node in optree.tree_leaves(params, is_leaf=is_flat) if is_flat(node)]
    return mesh_of(flat[0].layout.grid, "accumulate: its parameters") if flat else None


def _weight(params: Any) -> str:
    """How large a model is; of a pipeline's parts each rank has its own."""
    nodes = optree.tree_leaves(params, is_leaf=is_flat)
    flat = sum(node.layout.padded for node in nodes if is_flat(node))
    return f"{flat + sum(leaf.numel() for leaf in nodes if isinstance(leaf, Tensor))} numbers"


def axis_ranks(axis: Axis) -> list[int]:
    """Global ranks along an axis; of this one alone, whichever it is."""
    if axis.size == 1:
        return [0]
    return sorted(dist.get_process_group_ranks(process_groups.group_of(axis.group)))


# --- what an attempt leaves behind ---


class _Random:
    """Where torch's own random numbers stood, on the CPU and on the device of these tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.numbers = torch.get_rng_state()
        devices = {x.device for x in tensors} - {torch.device("cpu"), torch.device("meta")}
        self.more = [(one, torch.get_device_module(one).get_rng_state(one)) for one in devices]

    def restore(self) -> None:
        """Draws them again."""
        torch.set_rng_state(self.numbers)
        for device, state in self.more:
            torch.get_device_module(device).set_rng_state(state, device)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]


def _emptied() -> None:
    """Gives back what an attempt had, graphs and kept memory included."""
    gc.collect()
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        module.synchronize()
        module.empty_cache()
