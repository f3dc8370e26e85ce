"""What a stage's function must not do, and the errors that say so."""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from shardfn.compat import autograd, functorch
from shardfn.quoting import listed
from shardfn.stages.replay import Off
from shardfn.stages.signature import Signature


class _Running(threading.local):
    stage: Signature | None = None


running = _Running()


def enter(signature: Signature) -> None:
    """Notes that a stage's function begins on this thread; raises RuntimeError inside another one."""
    refuse_inside(signature)
    running.stage = signature


def refuse_inside(signature: Signature) -> None:
    """Raises RuntimeError if a stage's function is running on this thread."""
    if running.stage is not None:
        raise RuntimeError(
            f"{signature} is called inside {running.stage}: what one stage gathers it hands back before the "
            f"next, so call them one after another; for modules, choose stages= so that one holds the other"
        )


@contextlib.contextmanager
def reentrant_told(signature: Signature) -> Iterator[None]:
    """A context in which torch's refusal of a reentrant checkpoint names the stage, and what to write."""
    try:
        yield
    except RuntimeError as error:
        if "When use_reentrant=True" not in str(error):
            raise
        raise RuntimeError(
            f"{signature} uses torch.utils.checkpoint with use_reentrant=True, which torch cannot differentiate inside "
            f"it: write use_reentrant=False, or leave the checkpoint out and pass remat=True to the stage (for a "
            f"module, to functional, since its parameters are only there while its stage runs)"
        ) from error


def refuse_reentrant(signature: Signature, differentiated: Sequence[bool]) -> None:
    """Raises RuntimeError inside a reentrant torch checkpoint, through which no gradients reach these tensors."""
    frame = sys._getframe() if any(differentiated) else None
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise RuntimeError(
                f"{signature} is called inside torch.utils.checkpoint with use_reentrant=True, through which torch "
                f"brings no gradient to value_and_grad: write use_reentrant=False, or make the stage with remat=True"
            )
        frame = frame.f_back


class RefuseWrapped(torch.overrides.TorchFunctionMode):
    """Refuses tensors of a running torch.func transform, which a stage's function can only have closed over.

    All that is computed inside a transform is such a tensor; one without a derivative is replaced by its value.
    """

    def __init__(self, signature: Signature, reverse: bool) -> None:
        super().__init__()
        self.signature, self.reverse = signature, reverse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not functorch.inside_transform() and any(map(_followed, optree.tree_leaves((args, kwargs)))):
            args, kwargs = optree.tree_map(self._plain, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _plain(self, x: Any) -> Any:
        if not _followed(x):
            return x
        value = functorch.constant(x) if self.reverse else None
        if value is None:
            raise RuntimeError(_closes_over(self.signature, [f"a tensor of shape {tuple(x.shape)}, {x.dtype},"]))
        return value


def _followed(x: Any) -> bool:
    """Whether a running transform has wrapped it; a transform that has ended does no harm."""
    return functorch.wrapped(x) and functorch.wrapped(functorch.alive(x))


def refuse_returned(signature: Signature, outputs: Sequence[Tensor], own: set[int]) -> list[int]:
    """Ids of the outputs' storages.

    Raises:
        RuntimeError: an output shares the memory of parameters.
        TypeError: an output is sparse.
    """
    for i, y in enumerate(outputs):
        if y.layout is not torch.strided:
            raise TypeError(
                f"{signature} returns a sparse tensor ({y.layout}) as output {i}: return y.to_dense(), or its indices "
                f"and values"
            )
    storages = [autograd.storage_of(y) for y in outputs]
    if not own.isdisjoint(storages):
        i = next(i for i, storage in enumerate(storages) if storage in own)
        raise RuntimeError(
            f"{signature} returns a parameter, or a view of one, as output {i}, of shape {tuple(outputs[i].shape)}: "
            f"its memory is lent to the stage and gets other numbers afterwards. Return a clone, or compute with it "
            f"inside the stage"
        )
    return storages


def refuse_closure(signature: Signature, given: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor]) -> None:
    """Raises RuntimeError if outputs depend on a tensor that needs a gradient and is not an argument."""
    arguments = {id(x) for xs in given for x in xs}
    # At every call, as a tensor that needed no gradient before may need one now.
    for leaf in autograd.leaves_of(outputs):
        if id(leaf) not in arguments:
            named, strays = _reached(signature, outputs, arguments)
            raise RuntimeError(_closes_over(signature, named or strays) + ("" if named else _MADE_INSIDE))


_MADE_INSIDE = (
    ". If the function makes it, as y = x.detach().requires_grad_() to differentiate by y, write torch.func.grad "
    "inside the stage, or call the stage with an x that requires a gradient, and differentiate by x itself"
)


def _reached(signature: Signature, outputs: Sequence[Tensor], given: set[int]) -> tuple[list[str], list[str]]:
    """Describes the tensors other than those given on which outputs depend: those that the function's code names.

    The second list has those that are found where, in the graph, nodes that depend on given tensors use others that do
    not.
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
        if id(x) not in given and (x.grad_fn in parents if x.grad_fn is not None else id(x) in leaves)
    ]
    dependent = {node for node in parents if id(getattr(node, "variable", None)) in given}
    size = -1
    while size < len(dependent):  # until no node is added that depends on a given tensor
        size = len(dependent)
        dependent |= {node for node, edges in parents.items() if any(parent in dependent for parent, _ in edges)}
    crossing = {edge for node in dependent for edge in parents[node] if edge[0] not in dependent}
    shapes = dict.fromkeys(autograd.result_of(node, number) for node, number in crossing)
    strays = [(tuple(x.shape), x.dtype) for key, x in leaves.items() if key not in given]
    return named, [f"a tensor of shape {shape}, {dtype}," for shape, dtype in shapes or strays]


def refuse_opaque(signature: Signature, leaves: Sequence[Any]) -> None:
    """Raises TypeError for an output that hides tensors from pytrees."""
    for leaf in leaves:
        if type(leaf) not in _PLAIN and _hides_tensors(leaf):
            kind = type(leaf).__name__
            raise TypeError(
                f"{signature} returns a {kind}, which is not a pytree node, with tensors in it: their gradients would "
                f"be lost, and parameters among them get other numbers later. Return a tuple or dict of tensors, "
                f"register {kind} with optree, or, for a module, choose stages= so that who reads it is in one stage "
                f"with it"
            )


_PLAIN = {object, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_MOST_LOOKED_AT = 1000


def _hides_tensors(value: Any) -> bool:
    """Whether a value leads to a tensor: by an attribute, a closure, a generator's frame, an array's memory."""
    queue, seen = [value], {id(value)}
    while queue and len(seen) < _MOST_LOOKED_AT:
        current = queue.pop()
        if isinstance(current, Tensor):
            return True
        if isinstance(current, types.FunctionType):  # without its globals, which lead to all of its module
            referred = [current.__closure__, current.__defaults__, current.__kwdefaults__, current.__dict__]
        elif isinstance(current, types.GeneratorType):
            referred = list(inspect.getgeneratorlocals(current).values())
        elif type(current).__module__ == "numpy":
            referred = [getattr(current, "base", None)]
        else:
            referred = [] if isinstance(current, (type, types.ModuleType)) else gc.get_referents(current)
        for other in referred:
            if id(other) not in seen and not isinstance(other, (type, types.ModuleType)):
                seen.add(id(other))
                queue.append(other)
    return False


_DTYPES = re.compile("dtype|scalar type|weight type|bias type", re.IGNORECASE)


def refuse_mixed(signature: Signature, error: RuntimeError, parameters: Any, arguments: Sequence[Any]) -> None:
    """Raises RuntimeError in place of torch's if a function mixes parameters of one dtype with arguments of another."""
    own, others = (
        {x.dtype for x in optree.tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()}
        for tree in (parameters, [x for i, x in enumerate(arguments) if i not in signature.shards])
    )
    if not own or not others or len(own | others) == 1 or not _DTYPES.search(str(error)):
        return
    casts = {name: getattr(signature.options, name) for name in ("gather_dtype", "input_dtype")}
    asked_for = (
        " and ".join(f"{name}={dtype}" for name, dtype in casts.items() if dtype)
        or "no gather_dtype and no input_dtype"
    )
    first, second = (listed(sorted(map(str, dtypes))) for dtypes in (own, others))
    raise RuntimeError(
        f"{signature}: its function gets parameters of {first} and other arguments of {second}, which it mixes "
        f"({error}). With {asked_for}: gather_dtype is the dtype in which it gets parameters, input_dtype that of its "
        f"other arguments; give both the same, or cast inside the function"
    ) from error


def writes(signature: Signature) -> str:
    """The message for a function that writes into parameters."""
    return (
        f"{signature}: its function writes into its parameters, or into another tensor that it was given. Parameters "
        f"are lent to it, a gathered copy or the shard itself, and it may run again in backward: compute a new tensor, "
        f"and update parameters outside of stages"
    )


def other_result(signature: Signature, first: str, then: str) -> str:
    """The message for a function that returns something else when it runs again."""
    return (
        f"{signature}: its function ran again for its gradient and returned something else: first {first}, then "
        f"{then}. The gradient would be that of another function. It depends on more than its arguments: a counter, a "
        f"cache or a switch such as module.train() has changed since the first run. Pass that in as an argument, and "
        f"return what is to be kept"
    )


def other_numbers(signature: Signature, off: Off) -> str:
    """The message for a function that returns other numbers when it runs again."""
    return (
        f"{signature}: its function ran again for its gradient and returned other numbers: tensor {off.number} of its "
        f"result, {off.kind}, differs by {off.part:.1e} of its norm. The gradient would be that of another function. "
        f"It depends on more than its arguments: on what its first run left in a dict, a list, an attribute or a "
        f"global, on random numbers that are not torch's, or on an object that has changed since. Pass that in as an "
        f"argument and return what is to be kept, or use remat=False"
    )


def _closes_over(signature: Signature, names: Sequence[str]) -> str:
    """The message for a function that closes over tensors which need a gradient."""
    several = len(names) > 1
    return (
        f"{signature}: its function uses {listed(names, 3, separator=' and ')} that {'need' if several else 'needs'} a "
        f"gradient and {'are' if several else 'is'} not among its arguments: the gradient would be lost. Pass "
        f"{'them as arguments' if several else 'it as an argument'}, or use x.detach() of what should have none; of a "
        f"module, name the parameters in functional(loose=)"
    )
