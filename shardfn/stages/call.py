"""One call of a stage: its function run on gathered parameters, under an autograd of its own, and what must not be.

The graph that autograd makes here belongs to the call alone. What leaves it is detached, and its gradients are asked
for when the call's turn comes in backward; or it is made then, by running the function again.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from shardfn.collectives.ledger import in_place
from shardfn.compat import autograd, functorch
from shardfn.mesh.axes import known_axes
from shardfn.mesh.scope import current_mesh, scope
from shardfn.stages.signature import Signature
from shardfn.transforms.owned import escaped, owned
from shardfn.transforms.step import current_step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardfn.stages.engine import Engine
    from shardfn.stages.tape import Place

_TENSOR: Any = object()


@dataclass
class Residuals:
    """What one run of a stage's function leaves for its gradient.

    Attributes:
        parameters: each shard's, leaves of the graph.
        inputs: the other tensors, leaves of the graph.
        outputs: its ends.
    """

    parameters: list[list[Tensor]]
    inputs: list[Tensor]
    outputs: list[Tensor]


class Call:
    """What the backward of a call needs beside tensors. No pytree node, so transforms pass it through.

    Attributes:
        leaves: the arguments that are no tensors.
        engine: of the mesh of its shards.
        mesh: which is alive until the call's backward has run.
        at: where among them the tensors stand that are no shards.
        needs: which of shards and those tensors are differentiated.
        step: the evaluation of gradients that it is part of.
        collected: shards whose gradient that step takes from the stage, None for the others.
        place: where it stands on the engine's tape.
        residuals: of the last run, until a backward takes them.
        surroundings: the random numbers and autocast that it began with.
        contexts: for the first run and the next, where a policy says what to keep.
        transformed: whether a torch.func transform is running outside.
        reverse: whether all that run only take gradients.
        differentiable: which outputs may have a gradient.
        order: of the tensors in the result: the number of an output, or `~number` of an input handed through.
    """

    __slots__ = (  # noqa: RUF023  # in the order in which they come to be
        "signature", "engine", "mesh", "leaves", "at", "needs", "step", "collected", "place", "residuals",
        "surroundings", "contexts", "transformed", "reverse", "differentiable", "result", "static", "order",
        "__weakref__",
    )  # fmt: skip

    def __init__(
        self, signature: Signature, engine: Engine, leaves: list[Any], at: list[int], needs: list[bool]
    ) -> None:
        self.signature, self.engine, self.leaves, self.at, self.needs = signature, engine, leaves, at, needs
        self.mesh = engine.mesh
        self.step = current_step()
        self.collected: list[Tensor | None] = []
        self.place: Place | None = None
        self.residuals: Residuals | None = None
        generators = [x for x in (*leaves, *signature.closed_over()) if type(x) is torch.Generator]
        self.surroundings = RngAndAutocast(engine.device, generators)
        remat = signature.options.remat
        self.contexts: list[Any] = list(remat()) if callable(remat) and any(needs) else []
        self.transformed = functorch.inside_transform()
        self.reverse = self.transformed and not functorch.inside_batching_or_forward()
        self.differentiable: list[bool] = []
        self.result: Any = None
        self.static: list[Any] = []
        self.order: list[int] = []

    def rebuilt(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """The function's result with these tensors."""
        tensors = iter([outputs[k] if k >= 0 else inputs[~k] for k in self.order])
        return optree.tree_unflatten(self.result, [next(tensors) if leaf is _TENSOR else leaf for leaf in self.static])

    def outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the call itself gives of the tensors in its result: each once, and none that came in as it is."""
        found = dict(zip(self.order, tensors, strict=True))
        return [found[k] for k in sorted(found) if k >= 0]


class RngAndAutocast:
    """The state that a function may depend on beside its arguments, for running it again."""

    __slots__ = ("device", "generators", "numbers", "more", "autocast")  # noqa: RUF023

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self.device = device
        self.generators = [(one, one.get_state()) for one in generators]
        self.numbers = torch.get_rng_state()
        self.more = None if device.type == "cpu" else _module(device).get_rng_state(device)
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}

    @contextlib.contextmanager
    def uncached(self) -> Iterator[None]:
        """Autocast as it is, without its cache: that goes by tensors, which in a slot get other numbers."""
        with contextlib.ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same random numbers and the same autocast as then."""
        now = RngAndAutocast(self.device, [one for one, _ in self.generators])
        kinds = dict.fromkeys([*self.autocast, *now.autocast])
        self._restore()
        try:
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    on, dtype = kind in self.autocast, self.autocast.get(kind)
                    stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=False))
                yield
        finally:
            now._restore()

    def _restore(self) -> None:
        torch.set_rng_state(self.numbers)
        for one, state in self.generators:
            one.set_state(state)
        if self.more is not None:
            _module(self.device).set_rng_state(self.more, self.device)


def evaluate(
    call: Call,
    mesh: DeviceMesh,
    parameters: list[list[Tensor]],
    inputs: Sequence[Tensor],
    records: bool,
    saving: Any,
) -> Residuals:
    """The function on its arguments; with `records` under autograd, where `saving` is a context for what that saves."""
    signature, options = call.signature, call.signature.options
    given = call.needs[len(signature.shards) :]
    name = f"{signature.name} ({signature.stage})"
    checked = call.step is not None
    arguments = [owned(x.detach(), records and need, name, checked) for x, need in zip(inputs, given, strict=True)]
    leaves = list(call.leaves)
    with contextlib.ExitStack() as stack:
        if current_mesh() is not mesh:
            stack.enter_context(scope(mesh, known_axes(mesh)))
        if call.surroundings.autocast:
            stack.enter_context(call.surroundings.uncached())
        if call.transformed:
            stack.enter_context(_RefuseWrapped(call))
        if call.contexts:
            stack.enter_context(call.contexts.pop(0))
        if saving:
            stack.enter_context(saving)
        # Gradients are on already where no argument needs one: an output that does shows what was closed over.
        stack.enter_context(torch.set_grad_enabled(records or torch.is_grad_enabled()))
        for i, x in zip(call.at, arguments, strict=True):
            leaves[i] = cast(x, options.input_dtype)
        result = _run(signature, leaves, parameters)
    found, call.result = optree.tree_flatten(result)
    tensors = [y for y in found if isinstance(y, Tensor)]
    if not call.static:  # the first run
        call.static = [_TENSOR if isinstance(y, Tensor) else y for y in found]
        call.order = _order(tensors, arguments)
    return Residuals(parameters, arguments, call.outputs(tensors))


def _order(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[int]:
    """By what number each tensor of a result is known, see `Call.order`."""
    known = {id(x): ~j for j, x in enumerate(arguments)}
    order, outputs = [], 0
    for y in tensors:
        k = known.get(id(y))
        if k is None:
            k = known[id(y)] = outputs
            outputs += 1
        order.append(k)
    return order


def _run(signature: Signature, leaves: Sequence[Any], parameters: Sequence[Sequence[Tensor]]) -> Any:
    enter(signature)
    try:
        with in_place():
            result = signature.call(leaves, parameters)
    except RuntimeError as error:
        if "leaf Variable that requires grad" in str(error):
            raise RuntimeError(writes(signature)) from error
        refuse_mixed(signature, error, parameters, leaves)
        raise
    finally:
        running.stage = None
    dtype = signature.options.output_dtype
    return result if dtype is None else optree.tree_map(lambda y: cast(y, dtype), result)


def differentiated(
    made: Residuals, needs: Sequence[bool], cotangents: Sequence[Tensor | None]
) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
    """Gradients with respect to each shard's parameters, and to the inputs, where needed."""
    n = len(made.parameters)
    found: list[Tensor | None]
    wanted = [p for ps, need in zip(made.parameters, needs[:n], strict=True) if need for p in ps]
    wanted += [x for x, need in zip(made.inputs, needs[n:], strict=True) if need]
    pairs = [(y, ct) for y, ct in zip(made.outputs, cotangents, strict=True) if ct is not None and y.requires_grad]
    asked = [x for x in wanted if x.requires_grad]  # the function may have said that it needs none of some
    found = [None] * len(asked)
    if pairs and asked:
        ys, cts = zip(*pairs, strict=True)
        with in_place():
            found = list(torch.autograd.grad(ys, asked, cts, allow_unused=True))
    if len(asked) < len(wanted):
        rest = iter(found)
        found = [next(rest) if x.requires_grad else None for x in wanted]
    rest = iter(found)
    of_parameters: list[list[Tensor | None]] = [
        [next(rest) for _ in ps] if need else [] for ps, need in zip(made.parameters, needs[:n], strict=True)
    ]
    return of_parameters, [next(rest) if need else None for need in needs[n:]]


class Saving:
    """Where what autograd saves of a run goes: to the host, or through the hooks that are in force around the stage.

    Parameters go nowhere. Their memory is lent, backward fills it again, and another copy would only take room.
    """

    def __init__(self, name: str, own: set[int], device: torch.device | None, around: Any) -> None:
        self.name, self.own, self.device, self.around = name, own, device, around

    def context(self) -> Any:
        """Under which it works."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> tuple[str, Any, Any]:
        if autograd.storage_of(x) in self.own:
            return "own", x.detach(), x._version  # an output itself would hold the graph that holds it
        if self.device is None:
            return "around", self.around[0](x), self.around[1]
        if x.device != self.device:
            return "own", x.detach(), x._version
        away = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return "host", away.copy_(x, non_blocking=True), None

    def _unpack(self, packed: tuple[str, Any, Any]) -> Tensor:
        where, x, more = packed
        if where == "host":
            back: Tensor = x.to(self.device, non_blocking=True)
            return back
        if where == "around":
            found: Tensor = more(x)
            return found
        if x._version != more:
            raise RuntimeError(
                f"stage {self.name}: a tensor of shape {tuple(x.shape)} that its backward needs has been "
                f"modified by an inplace operation since"
            )
        same: Tensor = x
        return same


def discarding(stage: str) -> Any:
    """A context in which autograd saves nothing: its graph only shows what depends on what."""

    def gone(_: Any) -> Tensor:
        raise escaped(stage)

    return torch.autograd.graph.saved_tensors_hooks(lambda x: None, gone)


# --- what a stage must not do ---


class _Running(threading.local):
    stage: str | None = None


running = _Running()


def enter(signature: Signature) -> None:
    """The function of a stage begins on this thread; one inside another is refused."""
    refuse_inside(signature)
    running.stage = f"{signature.name} ({signature.stage!r})"


def refuse_inside(signature: Signature) -> None:
    """Raises RuntimeError inside the function of a stage."""
    if running.stage is not None:
        raise RuntimeError(
            f"stage {signature.name} ({signature.stage!r}) is called inside stage {running.stage}: what one stage "
            f"gathers it hands back before the next, so call them one after another"
        )


def refuse_reentrant(signature: Signature, differentiated: Sequence[bool]) -> None:
    """Raises RuntimeError inside a reentrant checkpoint of torch's, where gradients asked for by name would be zero."""
    frame = sys._getframe() if any(differentiated) else None
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise RuntimeError(
                f"stage {signature.name} ({signature.stage!r}) is called inside torch.utils.checkpoint with "
                f"use_reentrant=True, through which torch brings no gradient to value_and_grad: write "
                f"use_reentrant=False, or make the stage with remat=True"
            )
        frame = frame.f_back


class _RefuseWrapped(torch.overrides.TorchFunctionMode):
    """Refuses tensors of a running torch.func transform, which a stage's function can only have closed over.

    All that is computed inside a transform is one of these; one without a derivative is the number that it is.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not functorch.inside_transform() and any(map(_followed, optree.tree_leaves((args, kwargs)))):
            args, kwargs = optree.tree_map(self._plain, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _plain(self, x: Any) -> Any:
        if not _followed(x):
            return x
        number = functorch.constant(x) if self.call.reverse else None
        if number is None:
            told = f"a tensor of shape {tuple(x.shape)}, {x.dtype},"
            raise RuntimeError(_closes_over(self.call.signature, [told]))
        return number


def _followed(x: Any) -> bool:
    """Whether a transform that runs has wrapped it; one that has ended is no harm."""
    return functorch.wrapped(x) and functorch.wrapped(functorch.alive(x))


def refuse_returned(signature: Signature, outputs: Sequence[Tensor], own: set[int]) -> list[int]:
    """The numbers of the outputs' storages.

    Raises:
        RuntimeError: an output has the memory of parameters.
        TypeError: one is sparse.
    """
    for i, y in enumerate(outputs):
        if y.layout is not torch.strided:
            raise TypeError(
                f"stage {signature.name} ({signature.stage!r}) returns a sparse tensor ({y.layout}) as output {i}: "
                f"return y.to_dense(), or its indices and values"
            )
    storages = [autograd.storage_of(y) for y in outputs]
    if not own.isdisjoint(storages):
        i = next(i for i, storage in enumerate(storages) if storage in own)
        raise RuntimeError(
            f"stage {signature.name} ({signature.stage!r}) returns a parameter, or a view of one, as output "
            f"{i}, of shape {tuple(outputs[i].shape)}: its memory is lent to the stage and gets other numbers "
            f"afterwards. Return a clone, or compute with it inside the stage"
        )
    return storages


def refuse_closure(signature: Signature, made: Residuals) -> None:
    """Raises RuntimeError if the function reached a tensor that needs a gradient and was not passed to it."""
    known = {id(x) for xs in (*made.parameters, made.inputs) for x in xs}
    for y in made.outputs:
        if y.grad_fn is None and y.requires_grad and id(y) not in known:
            raise RuntimeError(_closes_over(signature, _reached(signature, made.outputs, known)))
    # At every call: a tensor that needed no gradient may need one now.
    nodes: list[Any] = [y.grad_fn for y in made.outputs if y.grad_fn is not None]
    seen = {None, *nodes}
    for node in nodes:  # which grows
        parents = node.next_functions
        for parent, _ in parents:
            if parent not in seen:
                seen.add(parent)
                nodes.append(parent)
        if not parents and id(variable := getattr(node, "variable", None)) not in known and variable is not None:
            raise RuntimeError(_closes_over(signature, _reached(signature, made.outputs, known)))


def _reached(signature: Signature, outputs: Sequence[Tensor], known: set[int]) -> list[str]:
    """What outputs depend on beside what is known, in words: the tensors that the function names; if it names none,
    those where what depends on known ones meets what does not.
    """
    nodes: list[Any] = [y.grad_fn for y in outputs if y.grad_fn is not None]
    parents: dict[Any, list[Any]] = {}
    leaves = {id(y): y for y in outputs if y.grad_fn is None and y.requires_grad}
    while nodes:
        node = nodes.pop()
        if node not in parents:
            parents[node] = [edge for edge in node.next_functions if edge[0] is not None]
            nodes += [parent for parent, _ in parents[node]]
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaves[id(variable)] = variable
    named = [
        f"{name!r}, of shape {tuple(x.shape)}, {x.dtype},"
        for name, x in signature.named()
        if id(x) not in known and (x.grad_fn in parents if x.grad_fn is not None else id(x) in leaves)
    ]
    own = {node for node in parents if id(getattr(node, "variable", None)) in known}
    grown = -1
    while grown < len(own):  # what depends on them
        grown = len(own)
        own |= {node for node, edges in parents.items() if any(parent in own for parent, _ in edges)}
    met = {edge for node in own for edge in parents[node] if edge[0] not in own}
    shapes = dict.fromkeys(autograd.result_of(node, number) for node, number in met)
    strays = [(tuple(x.shape), x.dtype) for key, x in leaves.items() if key not in known]
    return named or [f"a tensor of shape {shape}, {dtype}," for shape, dtype in shapes or strays]


def refuse_opaque(signature: Signature, leaves: Sequence[Any]) -> None:
    """Raises TypeError for an output in which tensors hide."""
    for leaf in leaves:
        if leaf is not _TENSOR and type(leaf) not in _PLAIN and _hides_tensors(leaf):
            kind = type(leaf).__name__
            raise TypeError(
                f"stage {signature.name} ({signature.stage!r}) returns a {kind}, which is no pytree node, with tensors "
                f"in it: their gradients would be lost, and parameters among them get other numbers afterwards. "
                f"Return a tuple or dict of tensors, or register {kind} with optree"
            )


_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_MOST_LOOKED_AT = 1000


def _hides_tensors(value: Any) -> bool:
    """Whether a value leads to a tensor: by an attribute, a closure, a generator's frame, an array's memory."""
    left, seen = [value], {id(value)}
    while left and len(seen) < _MOST_LOOKED_AT:
        one = left.pop()
        if isinstance(one, Tensor):
            return True
        if isinstance(one, types.FunctionType):  # not all that its module has
            found = [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]
        elif isinstance(one, types.GeneratorType):
            found = list(inspect.getgeneratorlocals(one).values())
        elif type(one).__module__ == "numpy":
            found = [getattr(one, "base", None)]
        else:
            found = [] if isinstance(one, (type, types.ModuleType)) else gc.get_referents(one)
        for other in found:
            if id(other) not in seen and not isinstance(other, (type, types.ModuleType)):
                seen.add(id(other))
                left.append(other)
    return False


class SharedMemory(Exception):
    """Outputs of a stage share memory with each other, or with inputs, where that cannot be told to a transform."""


def leaving(outputs: Sequence[Tensor], storages: list[int], inputs: Sequence[Tensor], transformed: bool) -> Any:
    """The outputs as they leave a call, without its graph.

    Those that share memory do so outside too, as views by which autograd refuses a write that it could not follow.
    """
    taken = {autograd.storage_of(x): x for x in inputs}
    if len(set(storages)) == len(storages) and taken.keys().isdisjoint(storages):
        return tuple([y.detach() for y in outputs])
    if transformed:
        raise SharedMemory
    found = []
    for y, storage in zip(outputs, storages, strict=True):
        if storage not in taken and storages.count(storage) == 1:
            found.append(y.detach())
            continue
        base = taken.setdefault(storage, y.detach())
        same = base.dtype == y.dtype
        found.append(base.as_strided(y.shape, y.stride(), y.storage_offset()) if same else y.detach().clone())
    return tuple(found)


_DTYPES = re.compile("dtype|scalar type|weight type|bias type", re.IGNORECASE)


def refuse_mixed(signature: Signature, error: RuntimeError, parameters: Any, arguments: Sequence[Any]) -> None:
    """Raises RuntimeError in place of torch's where a function met parameters of one dtype and others of another."""
    own, others = (
        {x.dtype for x in optree.tree_leaves(some) if isinstance(x, Tensor) and x.is_floating_point()}
        for some in (parameters, [x for i, x in enumerate(arguments) if i not in signature.shards])
    )
    if not own or not others or len(own | others) == 1 or not _DTYPES.search(str(error)):
        return
    asked = {name: getattr(signature.options, name) for name in ("gather_dtype", "input_dtype")}
    told = (
        " and ".join(f"{name}={dtype}" for name, dtype in asked.items() if dtype)
        or "no gather_dtype and no input_dtype"
    )
    first, second = (", ".join(sorted(map(str, some))) for some in (own, others))
    raise RuntimeError(
        f"stage {signature.name} ({signature.stage!r}): its function gets parameters of {first} and other arguments of "
        f"{second}, which it mixes ({error}). With {told}: gather_dtype is the dtype in which it gets parameters, "
        f"input_dtype that of its other arguments; give both the same, or cast inside the function"
    ) from error


def writes(signature: Signature) -> str:
    """What is wrong with writing into parameters."""
    return (
        f"stage {signature.name} ({signature.stage!r}): its function writes into its parameters, or into another "
        f"tensor that it was given. Parameters are lent to it, a gathered copy or the shard itself, and it may run "
        f"again in backward: compute a new tensor, and update parameters outside of stages"
    )


def _closes_over(signature: Signature, found: Sequence[str]) -> str:
    several = len(found) > 1
    return (
        f"stage {signature.name} ({signature.stage!r}): its function uses {' and '.join(found[:3])} that "
        f"{'need' if several else 'needs'} a gradient and {'are' if several else 'is'} not among its arguments: the "
        f"gradient would be lost. Pass {'them as arguments' if several else 'it as an argument'}, or use x.detach() of "
        f"what shall have none"
    )


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors in another dtype, other things as they are."""
    return x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)
