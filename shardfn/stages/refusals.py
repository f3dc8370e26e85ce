"""What the function of a stage must not do, and what is said when it does."""

from __future__ import annotations

import gc
import inspect
import re
import sys
import threading
import types
from collections.abc import Sequence
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
    """The function of a stage begins on this thread; one inside another is refused."""
    refuse_inside(signature)
    running.stage = signature


def refuse_inside(signature: Signature) -> None:
    """Raises RuntimeError inside the function of a stage."""
    if running.stage is not None:
        raise RuntimeError(
            f"{signature} is called inside {running.stage}: what one stage gathers it hands back before the "
            f"next, so call them one after another"
        )


def refuse_reentrant(signature: Signature, differentiated: Sequence[bool]) -> None:
    """Raises RuntimeError inside a reentrant checkpoint of torch's, where gradients asked for by name would be zero."""
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

    All that is computed inside a transform is one of these; one without a derivative is the number that it is.
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
        number = functorch.constant(x) if self.reverse else None
        if number is None:
            raise RuntimeError(_closes_over(self.signature, [f"a tensor of shape {tuple(x.shape)}, {x.dtype},"]))
        return number


def _followed(x: Any) -> bool:
    """Whether a transform that runs has wrapped it; one that has ended does no harm."""
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
    """Raises RuntimeError if the function reached a tensor that needs a gradient and was not given to it."""
    known = {id(x) for xs in given for x in xs}
    for leaf in autograd.leaves_of(outputs):  # at every call: a tensor that needed no gradient may need one now
        if id(leaf) not in known:
            raise RuntimeError(_closes_over(signature, _reached(signature, outputs, known)))


def _reached(signature: Signature, outputs: Sequence[Tensor], known: set[int]) -> list[str]:
    """What else than the known tensors outputs depend on, in words: the tensors that the function names; if it names
    none, those where what depends on known ones meets what does not.
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
        if type(leaf) not in _PLAIN and _hides_tensors(leaf):
            kind = type(leaf).__name__
            raise TypeError(
                f"{signature} returns a {kind}, which is not a pytree node, with tensors in it: their gradients would "
                f"be lost, and parameters among them get other numbers later. Return a tuple or dict of tensors, or "
                f"register {kind} with optree"
            )


_PLAIN = {object, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_MOST_LOOKED_AT = 1000


def _hides_tensors(value: Any) -> bool:
    """Whether a value leads to a tensor: by an attribute, a closure, a generator's frame, an array's memory."""
    left, seen = [value], {id(value)}
    while left and len(seen) < _MOST_LOOKED_AT:
        reached = left.pop()
        if isinstance(reached, Tensor):
            return True
        if isinstance(reached, types.FunctionType):  # not all that its module has
            referred = [reached.__closure__, reached.__defaults__, reached.__kwdefaults__, reached.__dict__]
        elif isinstance(reached, types.GeneratorType):
            referred = list(inspect.getgeneratorlocals(reached).values())
        elif type(reached).__module__ == "numpy":
            referred = [getattr(reached, "base", None)]
        else:
            referred = [] if isinstance(reached, (type, types.ModuleType)) else gc.get_referents(reached)
        for other in referred:
            if id(other) not in seen and not isinstance(other, (type, types.ModuleType)):
                seen.add(id(other))
                left.append(other)
    return False


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
    asked_for = (
        " and ".join(f"{name}={dtype}" for name, dtype in asked.items() if dtype)
        or "no gather_dtype and no input_dtype"
    )
    first, second = (listed(sorted(map(str, some))) for some in (own, others))
    raise RuntimeError(
        f"{signature}: its function gets parameters of {first} and other arguments of {second}, which it mixes "
        f"({error}). With {asked_for}: gather_dtype is the dtype in which it gets parameters, input_dtype that of its "
        f"other arguments; give both the same, or cast inside the function"
    ) from error


def writes(signature: Signature) -> str:
    """What is wrong with writing into parameters."""
    return (
        f"{signature}: its function writes into its parameters, or into another tensor that it was given. Parameters "
        f"are lent to it, a gathered copy or the shard itself, and it may run again in backward: compute a new tensor, "
        f"and update parameters outside of stages"
    )


def other_result(signature: Signature, first: str, then: str) -> str:
    """What is wrong with a function that returns something else when it runs again."""
    return (
        f"{signature}: its function ran again for its gradient and returned something else: first {first}, then "
        f"{then}. The gradient would be that of another function. It depends on more than its arguments: a counter, a "
        f"cache or a switch such as module.train() has changed since the first run. Pass that in as an argument, and "
        f"return what is to be kept"
    )


def other_numbers(signature: Signature, off: Off) -> str:
    """What is wrong with a function that returns other numbers when it runs again."""
    return (
        f"{signature}: its function ran again for its gradient and returned other numbers: tensor {off.number} of its "
        f"result, {off.kind}, differs by {off.part:.1e} of its norm. The gradient would be that of another function. "
        f"It depends on more than its arguments: on what its first run left in a dict, a list, an attribute or a "
        f"global, on random numbers that are not torch's, or on an object that has changed since. Pass that in as an "
        f"argument and return what is to be kept, or use remat=False"
    )


def _closes_over(signature: Signature, found: Sequence[str]) -> str:
    several = len(found) > 1
    return (
        f"{signature}: its function uses {listed(found, 3, separator=' and ')} that {'need' if several else 'needs'} a "
        f"gradient and {'are' if several else 'is'} not among its arguments: the gradient would be lost. Pass "
        f"{'them as arguments' if several else 'it as an argument'}, or use x.detach() of what should have none"
    )
