"""Access to autograd's state and graphs, and to references to a tensor's memory."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import optree
import torch
import torch.autograd.graph
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch.multiprocessing.reductions import StorageWeakRef


def saved_tensors_hooks_allowed() -> bool:
    """Whether saved-tensor hooks work here; torch.func's transforms disable them."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


@contextlib.contextmanager
def saved_tensors_hooks_enabled() -> Iterator[None]:
    """A context in which saved-tensor hooks work, on a graph that no surrounding transform differentiates."""
    refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        if refused is not None:
            torch._C._autograd._saved_tensors_hooks_disable(refused)


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Returns the hooks `(pack, unpack)` that saved tensors go through here, if any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class hooked:
    """A context in which what autograd saves goes through these hooks, which give way to torch.func's transforms.

    Transforms refuse to run under hooks; these are taken off while one runs, whose graph then keeps what it saves.
    """

    __slots__ = ("hooks",)

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self.hooks = pack, unpack
        if torch._C._autograd._saved_tensors_hooks_disable is not _taking_own_off:
            torch._C._autograd._saved_tensors_hooks_disable = _taking_own_off  # type: ignore[assignment]
            torch._C._autograd._saved_tensors_hooks_enable = _putting_own_back

    def __enter__(self) -> None:
        _own.on.append(self.hooks[0])
        torch._C._autograd._push_saved_tensors_default_hooks(*self.hooks)

    def __exit__(self, *_: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        _own.on.pop()


class hooked_inside(hooked):
    """The same inside of a transform of torch.func, for what its own graph saves."""

    __slots__ = ("off", "refused")

    def __enter__(self) -> None:
        self.refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        self.off, _own.off = _own.off, []
        _enable_hooks()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _own.off = self.off
        if self.refused is not None:
            _disable_hooks(self.refused)


class _OwnHooks(threading.local):
    def __init__(self) -> None:
        self.on: list[Any] = []
        self.off: list[tuple[Any, Any]] = []


_own = _OwnHooks()
_disable_hooks = torch._C._autograd._saved_tensors_hooks_disable
_enable_hooks = torch._C._autograd._saved_tensors_hooks_enable


def _taking_own_off(message: str, *refuses: bool) -> None:
    """In place of torch's function, with which a transform begins."""
    before = len(_own.off)
    while (
        refuses != (False,) and (top := saved_tensors_hooks()) is not None and any(top[0] is hook for hook in _own.on)
    ):
        torch._C._autograd._pop_saved_tensors_default_hooks()
        _own.off.append(top)
    try:
        _disable_hooks(message, *refuses)
    except RuntimeError:  # there are others
        _put_back(before)
        raise


def _putting_own_back() -> None:
    """In place of torch's function, with which it ends."""
    _enable_hooks()
    _put_back(0)


def _put_back(count: int) -> None:
    while len(_own.off) > count:
        torch._C._autograd._push_saved_tensors_default_hooks(*_own.off.pop())


def inside_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def modified(x: torch.Tensor, version: int) -> str:
    """Torch's message for a saved tensor that was written into; with hooks, torch itself does not check."""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{x.dtype} {list(x.shape)}] is at version {x._version}; expected version {version} instead"
    )


def autograd_thread() -> bool:
    """Whether this is one of autograd's own threads, not started by Python, where backward of CUDA tensors runs."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the versions of tensors; -1 for one that may change unseen."""
    return [-1 if x.is_inference() else x._version for x in tensors]


def storage_of(x: torch.Tensor) -> int:
    """Returns a number equal for tensors that share memory; works for tensors without data, such as fake ones."""
    return x.untyped_storage()._cdata


def memory_of(x: torch.Tensor) -> int | None:
    """Returns `storage_of`; None for a tensor without a storage, such as a sparse one."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else None


def weak_storage(x: torch.Tensor) -> Any:
    """Returns a reference that keeps the number of a tensor's storage reserved, but not its memory."""
    return StorageWeakRef(x.untyped_storage())


_NAMEABLE = ("cpu", "cuda", "xpu")  # devices whose memory DLPack can share


twins: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {}
"""The implementation of `second_storage` for kinds of devices that DLPack does not know."""


def second_storage(x: torch.Tensor) -> torch.Tensor | None:
    """Returns a tensor with a second storage over the same memory; None if that is not possible."""
    if x.device.type in twins:
        return twins[x.device.type](x)
    if type(x) is not torch.Tensor or x.device.type not in _NAMEABLE:  # DLPack would read even a fake tensor's memory
        return None
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))  # type: ignore[attr-defined]


def saved_by(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors that a graph holds for its backward, from these nodes on."""
    pending, visited = list(nodes), set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        attributes = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        if isinstance(node, torch.autograd.function.BackwardCFunction):  # its attributes are those of the context
            attributes += [node.saved_tensors, vars(node)]
        yield from (x for x in optree.tree_leaves(attributes) if isinstance(x, torch.Tensor))
        pending += [parent for parent, _ in node.next_functions]


def storage_references(x: torch.Tensor) -> int:
    """Returns how many tensors and other objects refer to the storage of `x`."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns how many tensors and other objects refer to a storage, by its number in `storage_of`."""


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    create_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Returns what `torch.autograd.grad` does, with None for an input that is not used.

    Skips its checks of the arguments, which take a good part of a small stage's time.
    """
    return torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(cotangents), create_graph, create_graph, tuple(inputs), True, accumulate_grad=False
    )


def hooks_of(x: torch.Tensor) -> dict[int, Any]:
    """The hooks that are registered on a tensor, and those that will be, without the tensor."""
    if x._backward_hooks is None and x.requires_grad:
        x._backward_hooks = OrderedDict()
        if x.grad_fn is not None:
            x.grad_fn._register_hook_dict(x)
    return {} if x._backward_hooks is None else x._backward_hooks


def leaves_of(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the leaves that need a gradient in the graphs of these tensors; a result may be a leaf itself."""
    results = list(results)
    leaves = [y for y in results if y.grad_fn is None and y.requires_grad]
    nodes: list[Any] = [y.grad_fn for y in results if y.grad_fn is not None]
    visited = {None, *nodes}
    for node in nodes:  # the loop appends to the list
        parents = node.next_functions
        for parent, _ in parents:
            if parent not in visited:
                visited.add(parent)
                nodes.append(parent)
        if not parents and (leaf := getattr(node, "variable", None)) is not None:  # asking other nodes is slow
            leaves.append(leaf)
    return leaves


Operation = tuple[str, tuple[str, ...]]
"""The name of an operation's backward, and the source of each argument."""


def last_node() -> int:
    """The number of the last node that this thread has added to a graph."""
    with torch.enable_grad():
        return int(torch.empty(0, device="cpu", requires_grad=True).view(0).grad_fn._sequence_nr())  # type: ignore[union-attr]


def operations(
    results: Iterable[torch.Tensor], inputs: Sequence[torch.Tensor], after: int, outside: set[Any]
) -> list[Operation]:
    """The operations of a graph in the order in which they ran: each with where its arguments come from.

    Args:
        results: where the graph ends.
        inputs: where it begins.
        after: the number of the last node before it, on this thread.
        outside: nodes that are no part of it, to which those are added that are older.
    """
    begins = {(x.grad_fn, x.output_nr): k for k, x in enumerate(inputs) if x.grad_fn is not None}
    leaves = {id(x): k for k, x in enumerate(inputs) if x.grad_fn is None}
    parents: dict[Any, list[Any]] = {}

    def place(node: Any, number: int) -> Any:
        """The source of an argument: a text such as `input 0`, or a node of the graph and its output number."""
        if node is None or (node, number) in begins:
            return "nothing" if node is None else f"input {begins[node, number]}"
        if not node.next_functions and (leaf := getattr(node, "variable", None)) is not None:
            return f"input {leaves[id(leaf)]}" if id(leaf) in leaves else "a leaf"
        if node in outside or (node not in parents and node._sequence_nr() <= after):
            outside.add(node)
            return "something outside"
        if node not in parents:
            parents[node] = []
            pending.append(node)
        return node, number

    pending: list[Any] = []
    for y in results:
        place(y.grad_fn, y.output_nr)
    while pending:
        node = pending.pop()
        parents[node] = [place(*parent) for parent in node.next_functions]
    order = {node: index for index, node in enumerate(sorted(parents, key=lambda node: node._sequence_nr()))}

    def spelled(place: Any) -> str:
        return place if isinstance(place, str) else f"result {place[1]} of operation {order[place[0]]}"

    return [(node.name(), tuple(map(spelled, parents[node]))) for node in order]


def held_leaves(results: Iterable[torch.Tensor], but: Iterable[torch.Tensor]) -> bool:
    """Whether something refers to other leaves of these graphs; nobody can differentiate by one that was lost."""
    return any(count > _LOST for count in _leaf_counts(results, {id(x) for x in but}))


def _leaf_counts(results: Iterable[torch.Tensor], but: Collection[int]) -> list[int]:
    leaves = [leaf for leaf in leaves_of(results) if id(leaf) not in but]
    return [sys.getrefcount(leaf) for leaf in leaves]


# Versions of Python count the references of frames in their own way, so a leaf that is lost tells.
with torch.inference_mode(False), torch.enable_grad():
    _LOST = _leaf_counts([torch.ones((), device="cpu").requires_grad_() * 1], ())[0]


def at_end_of_pass(call: Callable[[], None]) -> None:
    """Calls something when the running backward pass ends; not if it ends with an error."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def backward_pass() -> int:
    """Returns the number of the backward pass that runs on this thread; -1 if there is none."""
    return torch._C._current_graph_task_id()
