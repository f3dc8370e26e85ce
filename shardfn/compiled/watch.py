"""Checks that a captured step needs no host and repeats the same operations: a dispatch mode.

A graph holds operations on a device with the numbers that the host passed to them. What the host computed is part of
it for good. So the operations of one call are noted, with their numbers, and compared with those of the next: a number
that differs would be frozen. The host cannot read a result either, as nothing runs while a graph is captured.

On the CPU the same is found for what is computed from the step's arguments, so that a program shows its errors there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from shardfn import callers
from shardfn.collectives.capturing import Watch, current
from shardfn.compat import autograd, modes

_aten: Any = torch.ops.aten
_READS = {
    getattr(_aten, name)
    for name in ("_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero", "masked_select", "bincount",
                 "_unique2", "unique_dim", "unique_consecutive")
}  # fmt: skip
_COPIES = {_aten._to_copy, _aten.copy_}
_INDEXES = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_MASKS = (torch.bool, torch.uint8)
_GENERATOR = torch.Generator  # as it is now: a simulated device puts another in its place

T = TypeVar("T")
Note = tuple[Any, tuple[Any, ...]]


class StepWatch(Watch, modes.Watching):
    """A context for one call of a step that is to be captured.

    Args:
        name: the caller, for messages.
        inputs: the tensors among the step's arguments.
        device: where the step runs.
        before: what an earlier call did, from its `notes`; None for the first.

    Attributes:
        notes: the operations so far, each with the numbers that the host passed to it.
        held: tensors from outside of the call, one for each memory that an operation uses.
    """

    def __init__(
        self, name: str, inputs: Iterable[Tensor], device: torch.device, before: list[Note] | None = None
    ) -> None:
        Watch.__init__(self, name, device)
        modes.Watching.__init__(self)
        self.before = before
        self.notes: list[Note] = []
        self.held: dict[int, Tensor] = {}
        # What operations have made, and where, and on the CPU what was computed from the inputs: by numbers of
        # storages, with references that keep these numbers from others.
        self._made: dict[int, tuple[Any, str]] = {}
        self._from_inputs: dict[int, Any] = {}
        for x in inputs if device.type == "cpu" else ():
            self._mark(x)

    def __enter__(self) -> StepWatch:
        self._outer, current.watch = current.watch, self
        modes.Watching.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        modes.Watching.__exit__(self, *error)
        current.watch = self._outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = optree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        watched = [x for x in tensors if self._watches(x)]
        runs = func.namespace != "prim"  # `prim.device` only tells what a simulated device's tensor is
        if runs and (watched or _requested_device(kwargs) == self.device.type):
            self._refuse(func, args, kwargs, tensors)
            self._note(func, leaves)
            for x in watched:
                self._hold(x)
        result = func(*args, **kwargs)
        if watched and not func.is_view and self.device.type == "cpu":
            for x in written(func, args, kwargs, Tensor):
                self._mark(x)
        known = {autograd.storage_of(x) for x in tensors}
        for x in optree.tree_leaves(result):
            if isinstance(x, Tensor) and autograd.storage_of(x) not in known:
                if watched and self.device.type == "cpu":
                    self._mark(x)
                if self._watches(x):
                    description = f"of shape {list(x.shape)}, made by {func.name()} at {callers.caller()},"
                    self._made[autograd.storage_of(x)] = autograd.weak_storage(x), description
        return result

    def finish(self, results: Iterable[Any]) -> None:
        """Raises RuntimeError if the call ended early, or left tensors that are not results."""
        if self.before is not None and len(self.notes) < len(self.before):
            self._refuse_change(f"ends before {self.before[len(self.notes)][0].name()}, which it did at the last call")
        result_storages = {
            autograd.storage_of(x) for x in (*results, *(x for x, _ in self.late)) if isinstance(x, Tensor)
        }
        if self._left(result_storages):
            gc.collect()  # what only refers to itself is not kept
        for description in self._left(result_storages):
            raise RuntimeError(
                f"{self.name}: a tensor {description} is kept when the step has returned, in a list, a cache or an "
                f"attribute: a graph leaves none there. Return it"
            )

    def _left(self, results: set[int]) -> list[str]:
        """Returns descriptions of tensors that outlive the step and are not results."""
        return [
            description
            for n, (storage, description) in self._made.items()
            if n not in results and not storage.expired()
        ]

    # --- what is noted ---

    def _watches(self, x: Tensor) -> bool:
        """Whether the host does not know what is in a tensor."""
        if self.device.type != "cpu":
            return x.device.type == self.device.type
        storage = self._from_inputs.get(autograd.storage_of(x)) if x.device.type == "cpu" else None
        return storage is not None and not storage.expired()

    def _mark(self, x: Tensor) -> None:
        """Notes that a tensor on the CPU depends on the inputs."""
        self._from_inputs[autograd.storage_of(x)] = autograd.weak_storage(x)

    def _hold(self, x: Tensor) -> None:
        """Keeps memory that was there before: a graph goes on using it."""
        storage = autograd.storage_of(x)
        origin = self._made.get(storage)
        if storage not in self.held and (origin is None or origin[0].expired()) and self.device.type != "cpu":
            self.held[storage] = x

    def _note(self, func: Any, leaves: list[Any]) -> None:
        """Notes an operation, and compares it with the one at the same place of the call before."""
        numbers = tuple(
            x.item() if isinstance(x, Tensor) else x
            for x in leaves
            if type(x) in (int, float, bool, complex)
            or (isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() == 1 and not self._watches(x))
        )
        note = (func, numbers)
        if self.before is not None:
            i = len(self.notes)
            if i >= len(self.before) or self.before[i][0] is not func:
                known = self.before[i][0].name() if i < len(self.before) else "nothing more"
                self._refuse_change(f"runs {func.name()}, and at the last call {known}")
            elif repr(self.before[i][1]) != repr(numbers):
                pairs = zip(self.before[i][1], numbers, strict=False)
                previous, current = next(((a, b) for a, b in pairs if repr(a) != repr(b)), (self.before[i][1], numbers))
                raise RuntimeError(
                    f"{self.name}: {func.name()} at {callers.caller()} gets the number {current!r}, and at the last "
                    f"call {previous!r}: a graph would keep the host's number. Pass it as a 0-d tensor argument, or "
                    f"return it with the state"
                )
        self.notes.append(note)

    def _refuse_change(self, change: str) -> None:
        raise RuntimeError(
            f"{self.name}: the step {change} (at {callers.caller()}): a graph cannot change. Pass values that change "
            f"as arguments, and branch only on arguments that are not tensors"
        )

    # --- what is refused ---

    def _refuse(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        """Raises RuntimeError for what needs the host, for random numbers that would not be new in each run, and for
        what means something else for a number that has become a tensor."""
        packet = func.overloadpacket
        if packet in _READS or self._counts(packet, args, kwargs):
            self._refuse_host(
                f"the host reads a result, by {func.name()},",
                "return it, and read it after the call; in place of an if use torch.where, and in place of math.cos "
                "torch.cos",
            )
        to = _requested_device(kwargs) if packet is _aten._to_copy else None
        kinds = {x.device.type for x in tensors} | ({to} if to else set())
        if packet in _COPIES and len(kinds) > 1:
            self._refuse_host(
                f"the step copies between {' and '.join(sorted(kinds))}",
                "move what goes in before the step, and what comes out after it; parameters, state and activations "
                "stay on the device",
            )
        indices = [x for x in args[1] if isinstance(x, Tensor) and x.ndim] if packet in _INDEXES else []
        if any(x.device.type != self.device.type for x in indices):
            self._refuse_host(
                f"the step copies indices from the CPU to {self.device.type}", "make them there before the step"
            )
        if (
            func is _aten.pow.Scalar
            and isinstance(args[0], int)
            and args[1].ndim == 0
            and not args[1].is_floating_point()
        ):
            raise RuntimeError(
                f"{self.name}: {func.name()} at {callers.caller()} raises an integer to a power that has become a "
                f"tensor of integers, where negative powers are 0: write {float(args[0])} ** n"
            )
        if kwargs.get("pin_memory") or packet is _aten._pin_memory:
            self._refuse_host("the step pins memory", "keep it on the device")
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = next((x for x in (*args, *kwargs.values()) if isinstance(x, _GENERATOR)), None)
            if self.drawing or generator is not None:
                reason = self.drawing or (
                    "from a torch.Generator, such as fold_in makes, which a graph does not advance: draw from torch's "
                    "own generator, torch.rand(...) or F.dropout, or pass the numbers among the arguments"
                )
                raise RuntimeError(f"{self.name}: {func.name()} at {callers.caller()} draws {reason}")

    def _counts(self, packet: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the size of a result depends on numbers."""
        if packet is _aten.repeat_interleave:
            return kwargs.get("output_size") is None and len(args) > 0 and isinstance(args[-1], Tensor)
        if packet in _INDEXES:
            single = len(args) > 2 and args[2].numel() == 1
            return not single and any(isinstance(x, Tensor) and x.dtype in _MASKS for x in args[1])
        return False

    def _refuse_host(self, action: str, fix: str) -> None:
        raise RuntimeError(
            f"{self.name}: {action} at {callers.caller()}, but nothing has run yet when a step is captured, and a "
            f"graph runs without the host: {fix}"
        )


def _requested_device(kwargs: dict[str, Any]) -> str | None:
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def written(func: Any, args: Any, kwargs: dict[str, Any], kind: type[T]) -> list[T]:
    """The tensors among the arguments into which an operation writes, or what stands for them."""
    targets: list[T] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            targets += [x for x in optree.tree_leaves(value) if isinstance(x, kind)]
    return targets
