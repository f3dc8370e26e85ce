"""Plans a step: the user's own, run on a simulated device as one of many ranks, without memory and without numbers."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.compat import attention, devices, process_groups, replacing
from shardfn.mesh.axes import sizes
from shardfn.mesh.planned import planning_on
from shardfn.mesh.scope import current_mesh, mesh_of
from shardfn.mesh.spec import dotted
from shardfn.plan.course import course_of
from shardfn.plan.places import SourceLocation
from shardfn.plan.plan import StepPlan
from shardfn.plan.recorder import MemoryBlock, PlanRecorder
from shardfn.quant.packed import is_packed
from shardfn.quoting import listed, short
from shardfn.shards.layout import flat_shards, is_flat
from shardfn.simulated.clocks import HOST
from shardfn.simulated.device import Device, simulated
from shardfn.tiers import transfers
from shardfn.tracebacks import api_boundary


@contextlib.contextmanager
def mode(ranks: int, rank: int = 0, *, per_node: int = 8) -> Iterator[Device]:
    """Inside the block this process is one of many ranks that do not run, with a device that has no numbers.

    The program is the same as the one that runs: `make_mesh`, `init_sharded`, `shard` or `interop.functional`, an
    optimizer's `init`, and the step. Nothing has memory, nothing is sent and nothing computed, so that a model of any
    size on any number of ranks fits on a laptop. New tensors are on the planned device, and `device.name` names it.
    Parameters may be on the device meta, and makers are not run on numbers.

    Args:
        ranks: the number of ranks in the world.
        rank: as which of them the program runs.
        per_node: how many ranks a node has, in order.

    Yields:
        The device.

    Raises:
        RuntimeError: this process has ranks already, or an accelerator; or such a block is open. Plan in a process of
            its own, before the one that trains.
        ValueError: there is no such rank; a node has no ranks.
        TypeError: a number is not whole.

    Example:
        ``with sf.plan.mode(ranks=1024): mesh = sf.make_mesh(replica=128, shard=8); ...; sf.plan.step(step, params)``
    """
    for name, value, minimum in (("ranks", ranks, 1), ("rank", rank, 0), ("per_node", per_node, 1)):
        if type(value) is not int:
            raise TypeError(f"plan.mode: {name} must be an integer, got {short(repr(value))}")
        if value < minimum:
            raise ValueError(f"plan.mode: {name} must be at least {minimum}, got {value}")
    if _open:
        raise RuntimeError("plan.mode: such a block is open already: plan one after another")
    if rank >= ranks:
        raise ValueError(f"plan.mode: rank={rank} of ranks={ranks}; ranks are numbered from 0 to ranks - 1")
    if dist.is_initialized():
        raise RuntimeError(
            f"plan.mode: this process is rank {dist.get_rank()} of {dist.get_world_size()} already, on "
            f"{dist.get_backend()}, and cannot be another: plan in a separate process, or before the first make_mesh"
        )
    recorder = PlanRecorder()
    with (
        simulated(ranks, rank, listener=recorder, races=False) as device,
        planning_on(device.name, recorder),
        _collecting_little(),
    ):
        _clear_caches()
        recorder.device = device
        _open.append((recorder, per_node))
        try:
            with attention.pretending(device.name), torch.device(device.name):
                yield device
        finally:
            _open.clear()
            _clear_caches()


def _clear_caches() -> None:
    """Drops caches for devices of this name: the memory of another such device would not be seen."""
    devices.clear_caches()
    transfers.buffers.free_unused()


_open: list[tuple[PlanRecorder, int]] = []


@contextlib.contextmanager
def _collecting_little() -> Iterator[None]:
    """A context in which the garbage collector visits only new objects: those of torch take it long."""
    if gc.get_freeze_count():  # someone else uses this
        yield
        return
    gc.collect()  # or what blocks before left in circles would stay
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@api_boundary
def step(step: Callable[..., Any], *args: Any, mesh: DeviceMesh | None = None, **kwargs: Any) -> StepPlan:
    """Plans a step inside `plan.mode`: all that a rank computes, sends and holds, without running it on numbers.

    The step is any function: under `shard_map`, of a module, with micro-batches, a pipeline, adapters, or a product
    with a Hessian. It is called twice, as it is, on shapes, and the second call is what is planned: the first makes the
    buffers that further ones use again. What ranks compare in a first call is left out.

    Whose memory it is, is told by where it was made. That of arguments goes by their names: `params` and the like are
    `"parameters"`, `state` and the like are `"optimizer"`; of other names, the first with flat shards is
    `"parameters"`, and the rest has its own name. What a stage's schedule makes for parameters is `"gathered"`, and for
    gradients `"reducing"`. What comes from a forward pass and is there when a backward pass has begun is
    `"activations"`, also if that pass was a recomputation; what comes from a backward pass and outlives it,
    `"gradients"`. All else is `"transients"`.

    Args:
        step: the function.
        *args: its arguments: hollow ones, made inside the block.
        mesh: whose axes the plan names. Default: that of the flat shards among the arguments.
        **kwargs: further arguments.

    Returns:
        The plan.

    Raises:
        RuntimeError: no `plan.mode` block is open.
        TypeError: the step is no function, or the mesh is none.
        NotImplementedError: the size of a result depends on numbers, as that of `torch.unique` does.
        Exception: what the step itself raises.

    Example:
        ``plan = sf.plan.step(step, params, state, tokens)``, then ``print(plan)`` or ``plan.peak``
    """
    if not _open:
        raise RuntimeError(
            "plan.step: nothing is planned here: make the mesh, the parameters and the step inside `with "
            "shardfn.plan.mode(ranks=...):`, in a process without ranks, and plan the step there"
        )
    recorder, per_node = _open[-1]
    if not callable(step):
        raise TypeError(
            f"plan.step: the step is of type {type(step).__name__}, not a function: pass it without calling it, "
            f"plan.step(step, params, state, tokens)"
        )
    if mesh is not None:
        sizes(mesh)  # which refuses what is no mesh
    arguments = named_arguments(step, args, kwargs)
    parameters = mark(recorder, arguments)
    with devices.without_collector(), replacing.taken_for_real(), _explained(recorder):
        step(*args, **kwargs)
        gc.collect()
        before = {block: block.nbytes for block in recorder.blocks.values()}
        with recorder.listening():
            result = step(*args, **kwargs)
    return plan_of(recorder, per_node, step, mesh_for("plan.step", mesh, arguments), parameters, before, result)


@contextlib.contextmanager
def _explained(recorder: PlanRecorder) -> Iterator[None]:
    """A context that adds to an error the assumptions made before, from which it may come."""
    recorder.assumed.clear()
    try:
        yield
    except Exception as error:
        if recorder.assumed:
            error.add_note(
                f"Planned without numbers, the step has gone on with 1 where it reads one on the host, with true for "
                f"masks, and with what else is assumed: {listed(recorder.assumed, 3)}"
            )
        raise


def mesh_for(caller: str, mesh: DeviceMesh | None, arguments: Any) -> DeviceMesh | None:
    """Returns the mesh of a step: the one passed, or that of the flat shards among its arguments."""
    if mesh is None and (flats := flat_shards(arguments)):
        return mesh_of(flats[0].layout.grid, caller)
    return mesh if mesh is not None else current_mesh()


def plan_of(
    recorder: PlanRecorder,
    per_node: int,
    step: Callable[..., Any],
    mesh: DeviceMesh | None,
    parameters: int,
    before: dict[MemoryBlock, int],
    result: Any,
) -> StepPlan:
    """Returns the plan of a recorded step.

    Args:
        recorder: which listened to it.
        per_node: how many ranks a node has.
        step: the function.
        mesh: whose axes are named.
        parameters: the number of elements of all parameters.
        before: the memory that was held before, with its bytes.
        result: what the step returned.
    """
    returned = {recorder.find(x) for x in optree.tree_leaves(result) if isinstance(x, Tensor)}
    memory_course = course_of(recorder.events, before, returned, len(recorder.works) - 1)
    launched = (open_work.stream for open_work in recorder.works if open_work.stream != HOST)
    streams = dict.fromkeys([recorder.device.defaults[0], *launched])
    order = {stream: index for index, stream in enumerate(streams)}
    return StepPlan(
        name=getattr(step, "__qualname__", type(step).__name__),
        mesh={} if mesh is None else sizes(mesh),
        rank=process_groups.global_rank(),
        works=tuple(open_work.work(per_node, order) for open_work in recorder.works),
        parameters=parameters,
        assumed=tuple(recorder.assumed),
        **memory_course._asdict(),
    )


def named_arguments(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the arguments, by the names of the step's parameters."""
    try:
        bound = inspect.signature(step).bind(*args, **kwargs)
    except (TypeError, ValueError):  # it has no signature, or does not take these, as the call will tell
        return [(f"argument {i}", x) for i, x in enumerate(args)] + list(kwargs.items())
    arguments: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            arguments += [(f"{name}[{i}]", x) for i, x in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            arguments += list(value.items())
        else:
            arguments.append((name, value))
    return arguments


# --- what the arguments of a step are ---

_NAMES = {
    "parameters": re.compile(r"param|weight|adapter|base$|model$"),
    "optimizer": re.compile(r"opt|state|moment"),
    "gradients": re.compile(r"grad"),
}


def mark(recorder: PlanRecorder, arguments: Sequence[tuple[str, Any]]) -> int:
    """Records the kinds of a step's arguments; returns the number of elements of all parameters.

    Args:
        recorder: where it is noted.
        arguments: by name.
    """
    numel_by_param: dict[Any, int] = {}
    has_sharded = False
    for name, tree in arguments:
        sharded = any(is_flat(node) for _, node in _nodes(tree))
        default = "parameters" if sharded and not has_sharded else ""
        has_sharded |= sharded
        for path, node in _nodes(tree):
            # What the argument's name says, or that of a part of it: `state.params` are parameters.
            parts = (*path[:1], name) if _matching(name) == "optimizer" else (name, *path[:1])
            kind = next(filter(None, map(_matching, parts)), default or name)
            for x in optree.tree_leaves(node):
                block = recorder.find(x) if isinstance(x, Tensor) else None
                if block is not None and not block.kind:
                    block.kind, block.place = kind, SourceLocation("forward", "", name)
            if kind == "parameters":
                numel_by_param |= _element_counts(node)
    return sum(numel_by_param.values())


def _matching(name: str) -> str:
    return next((kind for kind, pattern in _NAMES.items() if pattern.match(name.lower())), "")


def _nodes(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf=lambda x: is_flat(x) or is_packed(x))
    for accessor, leaf in zip(accessors, leaves, strict=True):
        yield tuple(dotted(accessor).split(".")), leaf


def _element_counts(node: Any) -> dict[Any, int]:
    """Returns the number of elements of each parameter of a node, on all ranks."""
    if is_flat(node):
        layout = node.layout
        return {(layout.stage, entry.path): math.prod(layout.meant_shape(i)) for i, entry in enumerate(layout.entries)}
    if is_packed(node):
        return {id(node): math.prod(node.shape)}
    return {id(node): node.numel()} if isinstance(node, Tensor) else {}
