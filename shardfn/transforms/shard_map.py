"""`shard_map`: runs a function of local shards on a mesh, with axis names in scope."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.check import recording
from shardfn.collectives import kernels, ops
from shardfn.collectives.agree import ARGUMENTS, agree, failing_together
from shardfn.compat.dispatch import plain, traced
from shardfn.compat.dynamo import one_graph, refuse_in_graph, trace_dicts
from shardfn.compat.functorch import inside_transform
from shardfn.mesh.axes import axis_of, known_axes, sizes
from shardfn.mesh.lanes import lane
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import current_mesh, scope
from shardfn.mesh.spec import Leaf, P, check_own, check_spec, is_dtensor, local_shape, match, places_itself
from shardfn.quoting import listed
from shardfn.shards.parts import Parts, note_again, note_parts
from shardfn.shards.replicated import checksum
from shardfn.tracebacks import api_boundary
from shardfn.transforms.autodiff import name_of
from shardfn.transforms.checking import CheckedCall, check_setting, claim

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@overload
def shard_map(
    f: F,
    /,
    *,
    mesh: DeviceMesh | None = None,
    in_specs: Any,
    out_specs: Any,
    inputs: Literal["local", "global"] = "local",
    check: bool = True,
) -> F: ...
@overload
def shard_map(
    f: None = None,
    /,
    *,
    mesh: DeviceMesh | None = None,
    in_specs: Any,
    out_specs: Any,
    inputs: Literal["local", "global"] = "local",
    check: bool = True,
) -> Callable[[F], F]: ...


def shard_map(
    f: Function | None = None,
    /,
    *,
    mesh: DeviceMesh | None = None,
    in_specs: Any,
    out_specs: Any,
    inputs: Literal["local", "global"] = "local",
    check: bool = True,
) -> Any:
    """Runs `f` on every rank of a mesh, each on its own shards, with the mesh's axis names in scope.

    PyTorch is multi-controller: the arguments are this rank's *local* shards, and the specs declare how the global
    value is sharded. Nothing is moved on the way in or out. Works as a decorator, takes positional and
    keyword arguments, and composes with torch.func inside and outside.

    Args:
        f: the function. It gets plain tensors only: a DTensor's placement is checked and its local part passed.
        mesh: the mesh; default: the one in scope, for a shard_map inside a shard_map.
        in_specs: one spec for all arguments; a tuple with one tree prefix of specs for each parameter, in the order
            of the signature (a `*args` parameter takes all that remain); or a dict of parameter name to specs.
        out_specs: a tree prefix of specs for the result.
        inputs: `"global"`: every rank passes the full value, and `f` gets a copy of this rank's shard; for tests and
            initialization. The derivative with respect to a full value is full, the same on every rank, and equal to
            that of the same function on one process. Replicated values that meet varying ones need `pvary` as usual.
        check: whether the first call for each kind of arguments is checked: which values vary along which axes is
            traced, forward and backward, and compared with the specs. `SHARDFN_CHECK=always|first|off` overrides it.

    Returns:
        The function on local shards, returning local shards. A call with new shapes checks them, and that they are the
        same on all ranks: equal shapes where a spec is declared, any shape under `...`. If shapes are new on one rank
        only, that rank logs it and fails at the process group's timeout. torch.compile belongs inside,
        `shard_map(torch.compile(f), ...)`; around the mapped function it takes local tensors and one graph, and
        nothing is checked.

    Raises:
        ValueError: specs that do not fit the arguments or the result, and ranks that differ; each names the tree path,
            the shapes, the mesh sizes and the fix. `VaryingError` is one: a value that is declared to be the same on
            all ranks is not, or is reduced twice. `VaryingWarning` warns of what is probably a mistake.
        TypeError: something that is not a spec; `check` is not a bool.
        NameError: there is no mesh, neither passed nor in scope.

    Example:
        ``total = shard_map(lambda x: psum(x.sum(), "shard"), mesh=mesh, in_specs=P("shard"), out_specs=P())``
    """
    if inputs not in ("local", "global"):
        raise ValueError(f'shard_map: inputs must be "local" or "global", got {inputs!r}')
    if not isinstance(check, bool):
        raise TypeError(f"shard_map: check must be True or False, got {check!r}")
    if f is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, inputs=inputs, check=check
        )
    function = f
    when = check_setting() or ("first" if check else "off")
    signatures: set[Any] = set()
    parts: Known = {}
    axes = None if mesh is None else known_axes(mesh)

    @api_boundary
    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        current = current_mesh() if mesh is None else mesh
        if current is None:
            raise NameError("shard_map: no mesh: pass mesh=shardfn.make_mesh(...)")
        graph = torch.compiler.is_compiling()  # a graph can only hold the axes of the thread that made the function
        with scope(current, axes if graph or (axes is not None and axes.lane == lane()) else known_axes(current)):
            if graph:
                trace_dicts()
                with one_graph():
                    if inputs == "global":
                        refuse_in_graph(_GLOBAL)
                    return function(*args, **kwargs)  # without checks: they are Python, which a graph cannot hold
            inside = recording.outer()
            validates = when == "always" or inside is not None
            entered = _enter(function, args, kwargs, in_specs, current, inputs, signatures, validates, when, parts)
            if inside is not None:
                claim(inside, f"shard_map({name_of(function)})", "in_specs", entered.leaves, entered.pieces, current)
            elif when != "off" and entered.new and current.size() > 1 and not traced() and not planned():
                return _run_checked(
                    function, entered, out_specs, current, signatures, _differentiated((args, kwargs)), parts
                )
            result = function(*entered.args, **entered.kwargs)
            leaves = _leave(function, result, out_specs, current, signatures, inside is not None, parts)
            if inside is not None:
                values = [leaf.value for leaf in leaves]
                claim(inside, f"shard_map({name_of(function)})", "out_specs", leaves, values, current)
            return result

    return mapped


_WHOLE = (
    "the arguments",
    'With inputs="global" every rank passes the same whole values: make them from one seed, or send them from one '
    'rank; inputs="local" is for pieces, of which each rank has its own',
)
_GLOBAL = (
    'shard_map(inputs="global") checks and cuts whole values in Python, which a graph cannot hold: compile what is '
    "inside, shard_map(torch.compile(f), ...), or pass local values"
)


Known = dict[Any, Parts]  # by the signature of arguments, or of a result


class _Entered(NamedTuple):
    """The arguments as the function gets them.

    Attributes:
        args, kwargs: all arguments.
        new: whether the call is to be checked.
        leaves, pieces: each leaf with its spec, and the value that the function gets for it; empty if not looked at.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    new: bool
    leaves: list[Leaf]
    pieces: list[Any]


def _run_checked(
    f: Function, entered: _Entered, out_specs: Any, mesh: DeviceMesh, signatures: set[Any], outer: bool, parts: Known
) -> Any:
    """Runs a checked call: records it, and then compares the records of all ranks."""
    checked = CheckedCall(f, mesh, outer)
    with checked.recorder:
        checked.record_arguments(entered.leaves, entered.pieces)
        result = f(*entered.args, **entered.kwargs)
        checked.finish(_leave(f, result, out_specs, mesh, signatures, True, parts))
    return result


def _enter(
    f: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_specs: Any,
    mesh: DeviceMesh,
    inputs: str,
    signatures: set[Any],
    validates: bool,
    when: str,
    parts: Known,
) -> _Entered:
    """The arguments as the function gets them; validated if their signature is new, or with `validates`."""
    leaves, signature = _signature("in", (args, kwargs), mesh)
    new = signature not in signatures
    if not new and not validates and inputs == "local" and not any(map(is_dtensor, leaves)):
        note_again(parts.get(signature), leaves)
        return _Entered(args, kwargs, False, [], [])
    name = f"shard_map({name_of(f)})"
    compared = [f"the check {when!r}"]  # all ranks must check, as the check's end is a collective
    alone = signature in signatures or inside_transform()
    # At a first call other ranks, whose arguments may be right, wait to compare: this rank's error must reach them.
    with failing_together([] if signatures or alone else [mesh], name, (ValueError, TypeError)):
        values = [*args, *kwargs.values()]
        named = list(zip(values, _labeled_arguments(f, args, kwargs, in_specs, name), strict=True))
        compares_values = inputs == "global" and not alone
        matched = [match(specs, value, f"{name} in_specs for {label}", label) for value, (label, specs) in named]
        pieces = [[_localized(leaf, mesh, inputs, name) for leaf in members] for members in matched]
        for members, locals_ in zip(matched, pieces, strict=True):
            compared += [
                _compared_line(leaf, piece, compares_values) for leaf, piece in zip(members, locals_, strict=True)
            ]
        local = [
            optree.tree_unflatten(optree.tree_structure(value, is_leaf=places_itself), locals_)
            for value, locals_ in zip(values, pieces, strict=True)
        ]
    flat = [leaf for members in matched for leaf in members]
    values_inside = [piece for locals_ in pieces for piece in locals_]
    parts[signature] = note_parts(leaves, flat, values_inside, mesh)
    number = known_axes(mesh).number
    agreed = (number, *compared)
    # Only shapes under `...` are new, perhaps on this rank alone: no agreement, which other ranks would not join.
    if not alone and agreed in signatures:
        new = False
    elif not alone:
        # A copy: other ranks may be threads, which add to the set meanwhile.
        before = (line for kind, *lines in tuple(signatures) if kind == number for line in lines)
        agree(compared, mesh, name, subject=_WHOLE if compares_values else ARGUMENTS, before=before)
        signatures.add(agreed)
    signatures.add(signature)
    positional, by_name = tuple(local[: len(args)]), dict(zip(kwargs, local[len(args) :], strict=True))
    return _Entered(positional, by_name, new or validates, flat, values_inside)


def _leave(
    f: Function, result: Any, out_specs: Any, mesh: DeviceMesh, signatures: set[Any], validates: bool, parts: Known
) -> list[Leaf]:
    """Validates a result if its signature is new, or with `validates`; then returns its leaves with their specs."""
    result_leaves, signature = _signature("out", result, mesh)
    if signature in signatures and not validates:
        note_again(parts.get(signature), result_leaves)
        return []
    name = f"shard_map({name_of(f)})"
    leaves = match(out_specs, result, f"{name} out_specs", "result")
    for leaf in leaves:
        check_spec(leaf, mesh, f"{name} out_specs")
    parts[signature] = note_parts(result_leaves, leaves, [leaf.value for leaf in leaves], mesh)
    signatures.add(signature)
    return leaves


def _signature(side: str, tree: Any, mesh: DeviceMesh) -> tuple[list[Any], Any]:
    """The leaves of a tree, and a hashable value that is equal for trees which pass the same checks."""
    leaves, treedef = optree.tree_flatten(tree)
    kinds = tuple(
        (leaf.shape, leaf.dtype)
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf.spec if places_itself(leaf) else None)
        for leaf in leaves
    )
    return leaves, (side, known_axes(mesh).number, inside_transform(), treedef, kinds)


def _labeled_arguments(
    f: Function, args: tuple[Any, ...], kwargs: dict[str, Any], in_specs: Any, name: str
) -> list[tuple[str, Any]]:
    """The label of each argument, and its specs: positional ones first, then keywords as passed."""
    labels, parameters = _labels(f, args, kwargs, name)
    if isinstance(in_specs, dict):
        unknown = sorted(set(in_specs) - set(parameters))
        missing = [label for label in labels if label.split("[")[0] not in in_specs]
        if unknown or missing:
            wrong = [f"no parameter {listed(unknown)}"] if unknown else []
            wrong += [f"none for {listed(missing)}"] if missing else []
            raise ValueError(
                f"{name} in_specs by name: {'; '.join(wrong)}; the parameters are {listed(parameters)} (specs of one "
                f"dict argument go in a tuple)"
            )
        return [(label, in_specs[label.split("[")[0]]) for label in labels]
    if not isinstance(in_specs, (tuple, list)):
        return [(label, in_specs) for label in labels]
    slots = [slot for parameter in parameters for slot in _slots(parameter, labels)]
    needed = max((slots.index(label) + 1 for label in labels), default=0)
    if not needed <= len(in_specs) <= len(slots):
        raise ValueError(
            f"{name}: in_specs has {len(in_specs)} for {needed} argument{'s' * (needed != 1)} ({listed(slots)}): "
            f"give one for each, one spec for all, or a dict by parameter name"
        )
    return [(label, in_specs[slots.index(label)]) for label in labels]


def _labels(f: Function, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[list[str], list[str]]:
    """The Python names of the arguments as passed, and the parameters of the signature."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # some callables written in C have no signature
        labels = [f"args[{i}]" for i in range(len(args))] + list(kwargs)
        return labels, ["args", *kwargs]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    labels, parameters = [], []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            labels += [f"{parameter.name}[{i}]" for i in range(len(args) - len(labels))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) and len(labels) < len(args):
            labels.append(parameter.name)
        parameters += [parameter.name] if parameter.kind is not parameter.VAR_KEYWORD else []
    extra = [key for key in kwargs if key not in parameters]
    return labels + list(kwargs), parameters + extra


def _slots(parameter: str, labels: list[str]) -> list[str]:
    return [label for label in labels if label.startswith(f"{parameter}[")] or [parameter]


def _localized(leaf: Leaf, mesh: DeviceMesh, inputs: str, name: str) -> Any:
    """The value that the function gets for a leaf, which is checked against its spec."""
    check_spec(leaf, mesh, f"{name} in_specs")
    if is_dtensor(leaf.value):
        return _unwrapped(leaf, mesh, name)
    if inputs == "global" and isinstance(leaf.value, Tensor) and isinstance(leaf.spec, P):
        local_shape(leaf.value.shape, leaf.spec, mesh, f"{name} in_specs: {leaf.path}")
        # `local_slice`, so that the derivative is that of the full value, on every rank.
        piece = leaf.value
        for dim, names in enumerate(leaf.spec.by_dim()):
            axis = axis_of(mesh, names)
            if axis.size > 1:
                piece = ops.local_slice(piece, dim, axis.index, axis.size, axis.group)
        same_axes = tuple(
            axis_name for axis_name, n in sizes(mesh).items() if n > 1 and axis_name not in leaf.spec.axes
        )
        if same_axes and (piece.is_floating_point() or piece.is_complex()):
            description = f"{name}: {leaf.path} along {', '.join(map(repr, same_axes))}"
            piece = ops.replicated(piece, description, axis_of(mesh, same_axes).group)
        return kernels.copy(piece) if piece is leaf.value else piece
    return leaf.value


def _differentiated(tree: Any) -> bool:
    """Whether something outside may differentiate a leaf."""
    leaves = optree.tree_leaves(tree)
    return inside_transform() or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _unwrapped(leaf: Leaf, mesh: DeviceMesh, name: str) -> Tensor:
    """The local part of a DTensor, whose placements must match its spec."""
    value: Any = leaf.value
    if value.device_mesh != mesh:
        raise ValueError(
            f"{name} in_specs: {leaf.path} is a DTensor on {value.device_mesh}, but the function runs on {mesh}: "
            f"distribute it over the same mesh, or pass its local tensor"
        )
    cuts: list[tuple[str, ...]] = [()] * value.ndim
    for axis, placement in zip(sizes(mesh), value.placements, strict=True):
        if placement.is_partial():
            raise ValueError(
                f"{name} in_specs: {leaf.path} is a DTensor with partial sums over {axis!r}: "
                f"redistribute it to Shard or Replicate first"
            )
        if type(placement).__name__ == "Shard":
            cuts[placement.dim] += (axis,)
        elif not placement.is_replicate():
            raise ValueError(
                f"{name} in_specs: {leaf.path} is a DTensor placed as {placement}, which a spec cannot say"
            )
    spec = P(*cuts)
    check_own(leaf, spec, f"{name} in_specs")
    local_shape(value.shape, spec, mesh, f"{name} in_specs: {leaf.path}")
    return cast(Tensor, value.to_local())


def _compared_line(leaf: Leaf, value: Any, compares_values: bool) -> str:
    """A description of a leaf that must be equal on all ranks: dtype, shape unless under `...`, and checksum."""
    if not isinstance(value, Tensor):
        return f"{leaf.path}: {type(value).__name__}{f' placed as {value.spec}' if places_itself(value) else ''}"
    shape = "" if isinstance(leaf.spec, EllipsisType) else f" {tuple(value.shape)}"
    same = compares_values and isinstance(leaf.spec, P) and not is_dtensor(leaf.value) and plain(leaf.value)
    numbers = f", numbers with checksum {checksum(leaf.value)}" if same else ""
    return f"{leaf.path}: {value.dtype}{shape}{numbers}"
