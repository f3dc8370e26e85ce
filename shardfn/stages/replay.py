"""State that a recomputed function needs again (random state, autocast), and comparison of its two results."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardfn.check.bits import rounding
from shardfn.collectives.capturing import capturing
from shardfn.compat import functorch
from shardfn.compat.norms import ReplacedFunctions
from shardfn.quoting import short

SAMPLE = 2**16  # most numbers that are compared of one tensor


def entered(contexts: Sequence[Any]) -> Any:
    """One context that enters all of these in order."""
    return contextlib.nullcontext() if not contexts else contexts[0] if len(contexts) == 1 else _several(contexts)


@contextlib.contextmanager
def _several(contexts: Sequence[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


_NOT_AGAIN = (
    "in a stage that runs again in backward, where a captured step cannot draw the same numbers again: use "
    "stage(..., remat=False), or draw before the stage and pass the numbers to it"
)


class RngAndAutocast:
    """The random state, autocast and `ReplacedFunctions` of a call, which its recomputation restores.

    The random state is read only if the function may run `again`.
    """

    __slots__ = ("device", "generators", "numbers", "more", "autocast", "written")  # noqa: RUF023

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator], again: bool) -> None:
        self.device = device
        self.generators = [(generator, generator.get_state()) for generator in generators if again]
        self.numbers = torch.get_rng_state() if again else None
        on_device = again and device.type != "cpu" and capturing() is None
        self.more = torch.get_device_module(device).get_rng_state(device) if on_device else None
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self.written = ReplacedFunctions.active()
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}

    def drawing(self, is_replay: bool) -> Any:
        """A context for random draws in a first run or its replay; none here, a subclass may need one."""
        return contextlib.nullcontext()

    def autocast_again(self) -> Any:
        """A context with the autocast settings of the first run."""
        contexts: list[Any] = [] if self.written is None else [self.written()]
        present = [kind for kind in ("cpu", self.device.type) if torch.is_autocast_enabled(kind)]
        for kind in dict.fromkeys([*self.autocast, *present]):
            enabled, dtype = kind in self.autocast, self.autocast.get(kind)
            contexts.append(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False))
        return entered(contexts)

    @contextlib.contextmanager
    def restored_state(self) -> Iterator[None]:
        """A context with the first run's random state and autocast; its end restores the current random state."""
        present = RngAndAutocast(self.device, [generator for generator, _ in self.generators], again=True)
        casting = self.autocast_again()
        self._restore()
        watch = capturing()
        if watch is not None:
            watch.drawing = _NOT_AGAIN
        try:
            with casting:
                yield
        finally:
            present._restore()
            if watch is not None:
                watch.drawing = ""

    def _restore(self) -> None:
        assert self.numbers is not None, "it may run again"
        torch.set_rng_state(self.numbers)
        for generator, state in self.generators:
            generator.set_state(state)
        if self.more is not None:
            torch.get_device_module(self.device).set_rng_state(self.more, self.device)


TENSOR: Any = object()
_DISCRETE = (bool, int, str, bytes, torch.dtype, torch.device)


class ResultSignature(NamedTuple):
    """The result of a function, without its tensors' values.

    Attributes:
        tree: the structure.
        leaves: the leaves that are not tensors.
        kinds: dtype and shape of each tensor.
        order: for each tensor: the index of an output, or `~index` of an input that is returned unchanged.
    """

    tree: optree.PyTreeSpec
    leaves: list[Any]
    kinds: list[tuple[torch.dtype, torch.Size]]
    order: list[int]

    def same(self, other: ResultSignature) -> bool:
        """Whether a later run returned the same form. Floats may differ, such as a time that the function measured."""
        return (
            self.kinds == other.kinds
            and self.order == other.order
            and self.tree == other.tree
            and all(map(_same_leaf, self.leaves, other.leaves))
        )

    def __str__(self) -> str:
        kinds = iter([tensor_text(*kind) for kind in self.kinds])
        descriptions = [next(kinds) if leaf is TENSOR else short(repr(leaf), 40) for leaf in self.leaves]
        parts = str(self.tree).removeprefix("PyTreeSpec(").removesuffix(")").split("*")
        if len(parts) == len(descriptions) + 1:
            text = "".join(part + description for part, description in zip(parts, [*descriptions, ""], strict=True))
        else:  # a key contains a star as well
            text = ", ".join(descriptions)
        through = [i for i, k in enumerate(self.order) if k < 0]
        return short(text, 200) + (f" (arguments are handed through as tensors {through})" if through else "")


def _same_leaf(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a is TENSOR) is (b is TENSOR) and (not isinstance(a, _DISCRETE) or a == b)


def form_of(result: Any, arguments: Sequence[Tensor]) -> tuple[ResultSignature, list[Tensor]]:
    """The form of a function's result, given the tensors passed to it, and the tensors in the result."""
    leaves, tree = optree.tree_flatten(result)
    tensors = [y for y in leaves if isinstance(y, Tensor)]
    positions = {id(x): ~j for j, x in enumerate(arguments)}
    order, outputs = [], 0
    for y in tensors:
        k = positions.get(id(y))
        if k is None:
            k = positions[id(y)] = outputs
            outputs += 1
        order.append(k)
    rest = [TENSOR if isinstance(y, Tensor) else y for y in leaves]
    return ResultSignature(tree, rest, [(y.dtype, shape_of(y)) for y in tensors], order), tensors


def shape_of(x: Tensor) -> torch.Size:
    """The shape; -1 for ragged dimensions of a nested tensor, whose symbolic sizes differ in each run."""
    return torch.Size([x.size(0), *[-1] * (x.dim() - 1)]) if x.is_nested else x.shape


def tensor_text(dtype: torch.dtype, shape: torch.Size) -> str:
    """Describes a tensor: `"float32[2, 8]"`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class Off(NamedTuple):
    """A tensor of a result that differs from that of the first run.

    Attributes:
        number: its index.
        kind: dtype and shape.
        part: norm of the difference, relative to the larger norm.
    """

    number: int
    kind: str
    part: float


class SampledNumbers:
    """Some of the values that a function returned: all of a small tensor, evenly spaced ones of a large tensor."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.parts = [None if x is None or not _is_compared(x) else _sampled_values(x).clone() for x in tensors]

    def off(self, tensors: Sequence[Tensor]) -> Off | None:
        """The first tensor of a second run whose values differ by more than rounding; None if there is none."""
        for number, (part, x) in enumerate(zip(self.parts, tensors, strict=True)):
            plain = functorch.unwrapped(x.detach())
            if part is None or plain.dtype != part.dtype:
                continue
            if (sample := _sampled_values(plain)).shape == part.shape:
                difference = _relative_difference(sample, part)
                if not difference <= rounding(part):
                    return Off(number, tensor_text(x.dtype, x.shape), difference)
        return None


def _is_compared(x: Tensor) -> bool:
    """Whether a tensor's values are compared; not those of integers, which differ where rounding decides a tie."""
    plain = type(x) is Tensor and x.layout is torch.strided and not x.is_nested
    return plain and (x.is_floating_point() or x.is_complex()) and x.numel() > 0


def _sampled_values(x: Tensor) -> Tensor:
    """Evenly spaced values of a tensor; unlike flattening, it copies no full non-contiguous tensor."""
    step = math.ceil(x.numel() / SAMPLE)
    for dim in range(x.ndim - 1, -1, -1) if not x.is_contiguous() else ():
        stride = min(step, x.shape[dim])
        x, step = x.movedim(dim, 0)[::stride].movedim(0, dim), math.ceil(step / stride)
    return x.reshape(-1)[::step]


def _relative_difference(second: Tensor, first: Tensor) -> float:
    """The norm of the difference, relative to the larger norm; nan equals nan, and infinity equals infinity."""
    wide = torch.complex128 if second.is_complex() else torch.float64
    second, first = second.to(wide), first.to(wide)
    same = (second == first) | (second.isnan() & first.isnan())
    distance = torch.where(same, 0, second - first).norm() / torch.maximum(_norm(second), _norm(first))
    return 0.0 if bool(same.all()) else math.inf if bool(distance.isnan()) else float(distance)


def _norm(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0).norm()
