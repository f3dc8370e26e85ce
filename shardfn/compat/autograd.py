"""What autograd is about to do, and who refers to a tensor's memory."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.graph
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch.multiprocessing.reductions import StorageWeakRef


def saved_tensors_hooks_allowed() -> bool:
    """Whether saved-tensor hooks work here: torch.func's transforms do not let them."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


@contextlib.contextmanager
def saved_tensors_hooks_enabled() -> Iterator[None]:
    """Saved-tensor hooks work inside, on a graph that no transform of torch.func around it differentiates."""
    refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if refused is not None:
            torch._C._autograd._saved_tensors_hooks_disable(refused)


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The hooks, `(pack, unpack)`, that saved tensors go through here, if any."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def inside_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def autograd_thread() -> bool:
    """Whether this thread is one of autograd's own, which Python did not start: backward of CUDA tensors runs there."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def storage_of(x: torch.Tensor) -> int:
    """The same number for tensors that share memory; tensors without data, fake ones say, have one too."""
    return x.untyped_storage()._cdata


def weak_storage(x: torch.Tensor) -> Any:
    """A reference to a tensor's storage that keeps its number, but not its memory."""
    return StorageWeakRef(x.untyped_storage())


_NAMEABLE = ("cpu", "cuda", "xpu")  # where memory goes from library to library by DLPack


def second_storage(x: torch.Tensor) -> torch.Tensor | None:
    """The same memory by a storage of its own; None where that cannot be had."""
    if type(x) is not torch.Tensor or x.device.type not in _NAMEABLE:  # a fake tensor's would be read all the same
        return None
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))  # type: ignore[attr-defined]


COUNTS_REFERENCES = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def references(x: torch.Tensor) -> tuple[int, int]:
    """How many things refer to a tensor: in C++, and in Python."""
    return x._use_count(), sys.getrefcount(x)  # type: ignore[attr-defined]


def storage_references(x: torch.Tensor) -> int:
    """How many tensors, and other things, refer to the storage of `x`."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """What `torch.autograd.grad` gives, None for an input that is not used.

    Its checks of the arguments, a good part of a small stage's time, are left out where the engine can be reached.
    """
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:
        return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    found: tuple[torch.Tensor | None, ...] = run(
        tuple(outputs), tuple(cotangents), False, False, tuple(inputs), True, accumulate_grad=False
    )
    return found


def leaves_of(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that need a gradient at which the graphs of these begin; a result without a graph is one itself."""
    results = list(results)
    found = [y for y in results if y.grad_fn is None and y.requires_grad]
    nodes: list[Any] = [y.grad_fn for y in results if y.grad_fn is not None]
    seen = {None, *nodes}
    for node in nodes:  # which grows
        parents = node.next_functions
        for parent, _ in parents:
            if parent not in seen:
                seen.add(parent)
                nodes.append(parent)
        if not parents and (leaf := getattr(node, "variable", None)) is not None:  # asking another node takes long
            found.append(leaf)
    return found


def result_of(node: Any, number: int) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of one of the results whose gradient a node of autograd's graph takes."""
    variable = getattr(node, "variable", None)
    found = node._input_metadata[number] if variable is None else variable
    return tuple(found.shape), found.dtype


def backward_pass() -> int:
    """The number of the backward pass that runs on this thread; -1 for none."""
    number: int = torch._C._current_graph_task_id()
    return number
