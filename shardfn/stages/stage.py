"""Stages: functions whose parameters are gathered before they run, and whose gradients are reduced after backward.

Under autograd a `Schedule` issues the gathers and reductions of a call, as FSDP2's hooks do. Inside torch.func
transforms and in traced graphs a call is composed of differentiable collectives (`composition.py`). Some contexts, such
as `shardfn.jvp`, replace the function by which this thread calls stages: `way.call`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import optree
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn.compat import dispatch, dynamo, functorch
from shardfn.mesh import planned
from shardfn.mesh.grid import Grid
from shardfn.mesh.scope import elsewhere, inside_part, mesh_of
from shardfn.quant.formats import Format
from shardfn.quant.packed import Packed
from shardfn.shards.layout import FlatShard, is_stage, stage_shards
from shardfn.stages.composition import composed
from shardfn.stages.entry_exit import Call
from shardfn.stages.options import Options, Remat
from shardfn.stages.prefetch import Group, PrefetchOrder
from shardfn.stages.schedule import Schedule, schedule_of
from shardfn.stages.signature import Signature, signature_of
from shardfn.transforms.modules import refuse_module
from shardfn.transforms.step import exact_part_differentiates

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class _Requested(TypedDict, total=False):
    """The options of `stage` for type checkers."""

    remat: Remat
    reshard: bool | Literal["step"] | None
    prefetch: int
    gather_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    gather_format: Format | None
    reduce_format: Format | None
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None


@overload
def stage(fn: F, /, **options: Unpack[_Requested]) -> F: ...
@overload
def stage(fn: None = None, /, **options: Unpack[_Requested]) -> Callable[[F], F]: ...
def stage(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    remat: Remat = False,
    reshard: bool | Literal["step"] | None = None,
    prefetch: int = 1,
    gather_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather_format: Format | None = None,
    reduce_format: Format | None = None,
    input_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> Any:
    """Turns a function of full parameters into one of flat shards: all-gather, compute, reduce-scatter.

    The function gets full parameters in place of each `FlatShard` among the arguments (or of the dict that `shard`
    puts in place of a stage's parameters). They are views of the gathered buffer: do not write into them. A call
    without shards runs the function unchanged. Works as a decorator.

    Args:
        fn: a pure function: its result depends on its arguments (any pytrees), which it does not change.
        remat: False keeps activations for backward; True recomputes them; `offload(to, above)` moves the large ones to
            host memory, or to disk, until backward, with `recompute=True` only the stage's inputs, from which it
            recomputes, and "offload" is `offload()`; a policy for
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`, or a list of ops, says which results to
            keep. The second forward draws the same random numbers.
        reshard: when the gathered parameters are freed: True, after forward, and backward gathers them again; False,
            after backward; "step", after the step with all its micro-batches. Default: as `Placement.reshard` says.
        prefetch: how many gathers run ahead, of the layers that `layers` announces, and in backward. Each takes a
            buffer of the size of the largest stage, in addition to the one in use.
        gather_dtype: dtype in which floating-point parameters are gathered and passed to the function; default: the
            shard's own.
        reduce_dtype: dtype in which their gradients are reduced; default: the shard's own.
        gather_format: quantized format in which floating-point parameters are gathered, such as `quant.int8()`: each
            rank quantizes its shard, and all ranks compute with the dequantized values. Gradients ignore the rounding.
            Default: as `Placement.gather_format` says.
        reduce_format: quantized format in which their gradients are reduced: each is rounded when it is sent, by one
            all-to-all for each axis, and sums are in float32. Transforms of torch.func send them unrounded. Default: as
            `Placement.reduce_format` says.
        input_dtype: floating-point tensors among the other arguments are cast to it.
        output_dtype: floating-point results are cast to it.

    Returns:
        A function with the same signature. Derivatives with respect to shards are those of the composition
        `fn(all_gather(pvary(shard)))`: gradients are reduce-scattered over the axes that shard the parameters, then
        summed over the replica axes. Derivatives by autograd and by `shardfn.jvp` run the schedule; those by torch.func
        run the composition, which keeps gathered parameters.

    Raises:
        RuntimeError: a function that writes into a parameter, or whose second forward returns a different result; in a
            `shardfn.jvp` of a gradient, one that is recomputed and closes over a tensor that needs a gradient; ranks
            that run different stages.
        ValueError, TypeError: shards of a different mesh or shape, or only some of a stage's; a module that has
            parameters.

    Example:
        ``block = stage(block, remat=True)``, then ``for p in layers(params["blocks"]): x = block(p, x)``
    """
    requested = Options(
        remat, reshard, prefetch, gather_dtype, reduce_dtype, gather_format, reduce_format, input_dtype, output_dtype
    )
    options = requested.checked()
    if fn is None:
        return functools.partial(stage, **vars(requested))
    refuse_module("stage", fn)
    return make_stage(getattr(fn, "__name__", type(fn).__name__), fn, options)


@dataclass(eq=False)
class Made:
    """The arguments from which a stage was made; `skipping` is the stage that `skip` calls instead."""

    name: str
    function: Callable[..., Any]
    options: Options
    skipping: Callable[..., Any] | None = None


def make_stage(name: str, function: Callable[..., Any], options: Options, computes: bool = True) -> Callable[..., Any]:
    """Makes a stage; without `computes` it only joins the collectives of other ranks' calls of that stage."""
    signatures: dict[Any, Signature] = {}

    @functools.wraps(function)
    def staged(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _in_function(name, function, args, kwargs)
        leaves, tree = optree.tree_flatten((args, kwargs))
        # The layouts are in the tree too, but optree leaves them out of its hash: without them keys would collide.
        key = (tree, *[arg.layout for arg in args if type(arg) is FlatShard])
        signature = signatures.get(key)
        if signature is None:
            signature = signatures[key] = signature_of(name, function, options, args, kwargs)
            signature.computes = computes
        if not signature.shards:
            return signature.call(leaves, ()) if signature.wholes else function(*args, **kwargs)
        return (way.call or called)(signature, leaves)

    staged._shardfn_made = Made(name, function, options)  # type: ignore[attr-defined]
    return staged


def _in_function(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a stage's function while torch.compile traces the caller, with decoded parameters; rejects flat shards."""
    dynamo.trace_dicts()
    nodes, tree = optree.tree_flatten((args, kwargs), is_leaf=lambda x: type(x) in (FlatShard, Packed))
    if any(type(node) is FlatShard for node in nodes):
        dynamo.refuse_compiling(f"stage {name}")
    args, kwargs = optree.tree_unflatten(tree, [x.decoded() if type(x) is Packed else x for x in nodes])
    return function(*args, **kwargs)


class Layers(Sequence[T]):
    """The sequence that `layers` returns; it announces the order of stages to the schedules."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = list(items)
        groups: dict[Grid, list[Group]] = {}
        for item in self._items:
            flats: list[Any] = [item] if type(item) is FlatShard else _flats(item)
            if flats:
                group = tuple([flat.layout for flat in flats]), tuple([flat.values for flat in flats])
                groups.setdefault(flats[0].layout.grid, []).append(group)
        self._orders = {grid: PrefetchOrder(members) for grid, members in groups.items()}
        for grid, order in self._orders.items():
            schedule_of(mesh_of(grid, "layers: a stage")).announce(order)

    def __iter__(self) -> Iterator[T]:
        for grid, order in self._orders.items():
            schedule_of(mesh_of(grid, "layers: a stage")).announce(order)
        yield from self._items
        for grid, order in self._orders.items():
            schedule_of(mesh_of(grid, "layers: a stage")).withdraw(order)

    def __getitem__(self, i: Any) -> Any:
        return self._items[i]

    def __len__(self) -> int:
        return len(self._items)


def layers(items: Iterable[T]) -> Sequence[T]:
    """Announces the order of layers, so that the next layer's parameters are gathered while one computes.

    Args:
        items: parameters of stages, in the order in which the stages will be called.

    Raises:
        TypeError: a dict, which iterates over its keys.

    Returns:
        The same items as a sequence. Schedules prefetch in this order until all items have been called.

    Example:
        ``for p in layers(params["blocks"]): x = block(p, x)``, or for a whole model
        ``ordered = layers([params["embed"], *params["blocks"], params["head"]])``, of which it uses ``ordered[0]``,
        ``ordered[1:-1]`` and ``ordered[-1]``.
    """
    if isinstance(items, Mapping):
        raise TypeError(
            f"layers: the items are a {type(items).__name__}, which iterates over its keys, not over parameters: pass "
            f"its values in the order of their use, layers(params.values())"
        )
    return list(items) if torch.compiler.is_compiling() else Layers(items)


def _flats(item: Any) -> list[FlatShard]:
    parts = optree.tree_leaves(item, is_leaf=is_stage)
    return [flat for part in parts if is_stage(part) for flat in stage_shards(part)]


def skip(stage: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
    """Joins other ranks' call of a stage without computing: in its gather, and in its reduction with a zero gradient.

    All ranks call the same stages in the same order. A rank that has no use for one, such as a layer of an image
    encoder when its batch has no images, skips it where other ranks call it.

    Args:
        stage: a function that `shardfn.stage` returned; or, inside a call of a model from `interop.functional`, a
            module that is one of its stages, whose parameters that call has. Of a module that is no stage, as in plain
            torch, the result is the same zero.
        *args: the parameters, at the same positions as in a call. Of other tensors the values are not used, only
            whether they need a gradient: pass the zero from the layer before, as a call would get that layer's result.
            If the parameters are frozen, backward reaches the stage only through such a tensor.
        **kwargs: the same for arguments that are passed by name.

    Returns:
        A 0-d zero in bfloat16 or the stage's `output_dtype`, with a derivative of zero in all arguments. Use the last
        one as other ranks use the result, or add it to the loss: through it this rank's backward reaches the stages
        that it skipped. Only `value_and_grad`, `grad` and `accumulate` find them without it, if no other transform runs
        around them; a second derivative needs it used as the result is.

    Raises:
        TypeError: `stage` is not a stage.
        torch._dynamo.exc.UserError: under `torch.compile`.

    Example:
        ``run = block if has_images else partial(sf.skip, block)``, then
        ``for p in sf.layers(params["images"]): x = run(p, x)``
    """
    dynamo.refuse_compiling("skip")
    module_skip = getattr(getattr(stage, "forward", None), "_shardfn_skip", None)
    if module_skip is not None:
        return module_skip(*args, **kwargs)
    if isinstance(stage, nn.Module):  # a module outside of `functional` or of any stage has no collectives to join
        return _zero(type(stage).forward)(list(stage.parameters()), *args, **kwargs)
    source: Made | None = getattr(stage, "_shardfn_made", None)
    if source is None or getattr(stage, "__wrapped__", None) is not source.function:
        raise TypeError(
            f"skip: {getattr(stage, '__name__', stage)!r} is not a stage, but a {type(stage).__name__}: pass what "
            f"shardfn.stage returned, and then the parameters"
        )
    if source.skipping is None:
        source.skipping = make_stage(source.name, _zero(source.function), source.options, computes=False)
    return source.skipping(*args, **kwargs)


def _zero(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the name of `function` that returns zero, with zero derivatives in all arguments."""

    @functools.wraps(function)
    def zero(*args: Any, **kwargs: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.bfloat16, device="cpu")  # so that adding it does not promote a loss's dtype
        for x in optree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                empty = (x if x.ndim else x.view(1))[..., :0]  # a product with 0 would be nan for inf
                total = total + empty.sum().real
        # Not linear, so that second derivatives pass through here too, on all ranks or on none.
        return torch.expm1(total).to(torch.bfloat16)

    return zero


class _StageCaller(threading.local):
    """The function by which this thread calls stages on flat shards; None for `called`, the default.

    `shardfn.jvp`, per-example gradients and compiled steps replace it.
    """

    call: Callable[[Signature, list[Any]], Any] | None = None

    def __reduce__(self) -> str:
        return "way"  # pickled by name: a stage that is sent to another process uses that process's object


way = _StageCaller()


def called(signature: Signature, leaves: list[Any]) -> Any:
    """Calls a stage by its schedule; inside torch.func transforms and traced graphs, composes it of collectives."""
    composes = dispatch.in_graph() or functorch.inside_batching_or_forward() or functorch.inside_transform()
    if composes and inside_part():
        raise exact_part_differentiates(signature.name)
    return called_by(None if composes else schedule_of, signature, leaves)


def called_by(
    schedules: Callable[[DeviceMesh], Schedule] | None, signature: Signature, leaves: list[Any], make: Any = Call
) -> Any:
    """Calls a stage by the schedule of its mesh; with None for `schedules`, by its composition.

    `make` is the class of the call. Drops the references to shards in `leaves`.
    """
    mesh = mesh_of(signature.layouts[0].grid, f"stage {signature.name}: {signature.stage!r}")
    if planned.blocks and elsewhere():
        return composed(signature, leaves, mesh)
    if signature.only_at_axes:
        signature.refuse_elsewhere()
    if schedules is None:
        return composed(signature, leaves, mesh)
    schedule = schedules(mesh)
    shards, shard_indices = _checked_shards(signature, leaves), set(signature.shards)
    tensor_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in shard_indices]
    for i in shard_indices:
        leaves[i] = None
    return schedule.call(signature, leaves, shards, tensor_indices, make)


def _checked_shards(signature: Signature, leaves: Sequence[Any]) -> tuple[Tensor, ...]:
    """The shards among the arguments.

    Raises:
        TypeError, ValueError: a shard does not hold a tensor of its piece's shape.
    """
    shards = []
    for i, layout in zip(signature.shards, signature.layouts, strict=True):
        values = leaves[i]
        if not isinstance(values, Tensor):
            raise TypeError(f"stage {signature.name}: {layout.stage!r} holds {type(values).__name__}, not a tensor")
        if values.shape != (layout.piece,):
            raise ValueError(
                f"stage {signature.name}: {layout.stage!r} holds shape {tuple(values.shape)}, but its piece is "
                f"({layout.piece},): a stack of shards goes through torch.func.vmap, anything else is another layout"
            )
        shards.append(values.resolve_conj().resolve_neg() if values.is_conj() or values.is_neg() else values)
    return tuple(shards)
