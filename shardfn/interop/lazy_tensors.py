"""Lazy tensors that consist of parts of others, and are assembled only when needed.

`transformers` converts the tensors of its files with functions of torch: it stacks experts, joins projections, splits
and transposes. Given an `Assembled` instead of a tensor, these functions return another one, which records where each
element comes from. So a rank reads only the elements that it keeps, and writes each element to its place in a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.quoting import listed
from shardfn.shards.boxes import Box, Ints, full_box


class AssembledPart(NamedTuple):
    """A part of an assembled tensor.

    Attributes:
        box: of the assembled tensor.
        values: its elements, a view of a source tensor with the shape of the box.
        origin: the name of that tensor; "" if they were computed.
    """

    box: Box
    values: Tensor
    origin: str


class Assembled:
    """Behaves as a tensor for functions that only move elements; other functions get the joined tensor.

    Attributes:
        shape: of the tensor.
        dtype: of its elements.
        parts: a partition of it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[AssembledPart]) -> None:
        self.shape, self.dtype, self.parts = tuple(shape), dtype, tuple(parts)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Assembled:
        """Itself, since it has no memory layout yet."""
        return self

    def cut(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """Yields the elements of a box without copying: boxes of the whole tensor, and their values."""
        for part in self.parts:
            both = part.box.common(box)
            if both is not None:
                yield both, part.values[both.slices_in(part.box)]

    def fill(self, box: Box, target: Tensor) -> None:
        """Copies the elements of a box to a tensor of its shape, of any dtype and device."""
        for both, values in self.cut(box):
            target[both.slices_in(box)].copy_(values)

    def joined(self) -> Tensor:
        """The tensor: its only part, or a new tensor."""
        if len(self.parts) == 1 and self.parts[0].values.dtype == self.dtype:
            return self.parts[0].values
        device = self.parts[0].values.device if self.parts else None
        result = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.fill(full_box(self.shape), result)
        return result

    def __getitem__(self, key: Any) -> Tensor:
        return self.joined()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _METHODS:
            return lambda *args, **kwargs: _METHODS[name](self, *args, **kwargs)
        return getattr(self.joined(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Applies a function of torch, lazily if it only moves elements."""
        if func in _FUNCTIONS:
            return _FUNCTIONS[func](*args, **(kwargs or {}))
        return func(*map(_materialized, args), **{name: _materialized(x) for name, x in (kwargs or {}).items()})


class Computed(Assembled):
    """A tensor that is computed each time that elements of it are needed.

    Attributes:
        rounded: whether it is computed from values that were quantized.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], Assembled], rounded: bool = True
    ) -> None:
        nothing = torch.empty(tuple(shape), dtype=dtype, device="meta")
        super().__init__(shape, dtype, [AssembledPart(full_box(tuple(shape)), nothing, "")])
        self._make, self.rounded = make, rounded

    def joined(self) -> Tensor:
        """As for `Assembled`, but computed."""
        return self._make().joined()

    def cut(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """As for `Assembled`, but computed."""
        return self._make().cut(box)


def lazy(x: Tensor, origin: str) -> Assembled:
    """An `Assembled` of one part: a whole tensor."""
    return Assembled(x.shape, x.dtype, [AssembledPart(full_box(x.shape), x, origin)])


def _materialized(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(map(_materialized, x))
    return x.joined() if isinstance(x, Assembled) else x


def _as_assembled(x: Any) -> Assembled:
    return x if isinstance(x, Assembled) else lazy(x, "")


def _with_sizes(numbers: Ints, dim: int, *new: int) -> Ints:
    """Replaces the entry of a dimension by others."""
    return (*numbers[:dim], *new, *numbers[dim + 1 :])


def _stack(tensors: Sequence[Any], dim: int = 0) -> Assembled:
    inputs = [_as_assembled(x) for x in tensors]
    if len({x.shape for x in inputs}) > 1:
        raise ValueError(f"tensors of different shapes cannot be stacked: {_shapes(inputs)}")
    dim %= inputs[0].ndim + 1
    shape = (*inputs[0].shape[:dim], 1, *inputs[0].shape[dim:])
    thicker = [Assembled(shape, x.dtype, [_thicker(part, dim) for part in x.parts]) for x in inputs]
    return _cat(thicker, dim)


def _thicker(part: AssembledPart, dim: int) -> AssembledPart:
    """A part with a new dimension of size 1."""
    offsets, sizes = part.box.offsets, part.box.sizes
    box = Box((*offsets[:dim], 0, *offsets[dim:]), (*sizes[:dim], 1, *sizes[dim:]))
    return AssembledPart(box, part.values.unsqueeze(dim), part.origin)


def _cat(tensors: Sequence[Any], dim: int = 0) -> Assembled:
    inputs = [_as_assembled(x) for x in tensors]
    dim %= inputs[0].ndim
    if len({_with_sizes(x.shape, dim) for x in inputs}) > 1:
        raise ValueError(f"tensors of different shapes cannot be joined along dimension {dim}: {_shapes(inputs)}")
    start, parts = 0, []
    for x in inputs:
        corner = _with_sizes((0,) * x.ndim, dim, start)
        parts += [AssembledPart(part.box.translated(corner), part.values, part.origin) for part in x.parts]
        start += x.shape[dim]
    return Assembled(
        _with_sizes(inputs[0].shape, dim, start), reduce(torch.promote_types, (x.dtype for x in inputs)), parts
    )


def _shapes(tensors: Sequence[Assembled]) -> str:
    return listed(str(list(shape)) for shape in dict.fromkeys(x.shape for x in tensors))


def _narrow(x: Assembled, dim: int, start: int, length: int) -> Assembled:
    box = Box(_with_sizes((0,) * x.ndim, dim, start), _with_sizes(x.shape, dim, length))
    back = tuple(-n for n in box.offsets)
    parts = []
    for part in x.parts:
        both = part.box.common(box)
        if both is not None:
            parts.append(AssembledPart(both.translated(back), part.values[both.slices_in(part.box)], part.origin))
    return Assembled(box.sizes, x.dtype, parts)


def _split(x: Assembled, sizes: int | Sequence[int], dim: int = 0) -> tuple[Assembled, ...]:
    dim %= x.ndim
    lengths = [len(piece) for piece in torch.empty(x.shape[dim], device="meta").split(sizes)]
    starts = itertools.accumulate(lengths, initial=0)
    return tuple(_narrow(x, dim, start, n) for start, n in zip(starts, lengths, strict=False))


def _transpose(x: Assembled, dim0: int, dim1: int) -> Assembled:
    def swapped(numbers: Ints) -> Ints:
        order = list(numbers)
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return tuple(order)

    return _rearranged(x, swapped, lambda values: values.transpose(dim0, dim1))


def _squeeze(x: Assembled, dim: int) -> Any:
    dim %= x.ndim
    return (
        x if x.shape[dim] != 1 else _rearranged(x, lambda numbers: _with_sizes(numbers, dim), lambda v: v.squeeze(dim))
    )


def _rearranged(x: Assembled, numbers: Callable[[Ints], Ints], values: Callable[[Tensor], Tensor]) -> Assembled:
    """Rearranges dimensions: `numbers` maps shapes and offsets, and `values` maps tensors."""
    parts = [
        AssembledPart(Box(numbers(part.box.offsets), numbers(part.box.sizes)), values(part.values), part.origin)
        for part in x.parts
    ]
    return Assembled(numbers(x.shape), x.dtype, parts)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack, torch.cat: _cat, torch.split: _split, torch.transpose: _transpose, torch.squeeze: _squeeze,
    torch.narrow: _narrow, torch.chunk: lambda x, chunks, dim=0: _split(x, max(1, -(-x.shape[dim] // chunks)), dim),
}  # fmt: skip
_METHODS = {func.__name__: method for func, method in _FUNCTIONS.items() if func not in (torch.stack, torch.cat)}
