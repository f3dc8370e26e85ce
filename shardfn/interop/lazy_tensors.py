"""Tensors that consist of parts of others, and are not put together until someone needs them.

`transformers` converts the tensors of its files with functions of torch: it stacks experts, joins projections, splits
and transposes. Given an `Assembled` instead of a tensor, these functions return another one, which knows where each
element comes from. So a rank reads only the elements that it keeps, and writes each element to its place in a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.checkpoint.boxes import Box, Ints, whole
from shardfn.quoting import listed


class Part(NamedTuple):
    """Some elements.

    Attributes:
        box: where they stand in the assembled tensor.
        values: the elements, of the box's sizes: a view of a tensor.
        origin: the name of that tensor; "" where they were computed.
    """

    box: Box
    values: Tensor
    origin: str


class Assembled:
    """Behaves as a tensor for functions that only move elements; for others it is joined, and they return a tensor.

    Attributes:
        shape: of the tensor.
        dtype: of its elements.
        parts: that make it up, each element once.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part]) -> None:
        self.shape, self.dtype, self.parts = tuple(shape), dtype, tuple(parts)

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Assembled:
        """Itself: what is not in memory yet cannot lie there in pieces."""
        return self

    def cut(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """The elements of a box, without a copy: where in the whole they stand, and they themselves."""
        for part in self.parts:
            both = part.box.common(box)
            if both is not None:
                yield both, part.values[both.within(part.box)]

    def fill(self, box: Box, target: Tensor) -> None:
        """Copies the elements of a box to a tensor of its sizes, of whatever dtype and device."""
        for both, values in self.cut(box):
            target[both.within(box)].copy_(values)

    def joined(self) -> Tensor:
        """The tensor: the only part itself, or a new one."""
        if len(self.parts) == 1 and self.parts[0].values.dtype == self.dtype:
            return self.parts[0].values
        device = self.parts[0].values.device if self.parts else None
        made = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.fill(whole(self.shape), made)
        return made

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
        """What a function of torch gives."""
        if func in _FUNCTIONS:
            return _FUNCTIONS[func](*args, **(kwargs or {}))
        return func(*map(_real, args), **{name: _real(x) for name, x in (kwargs or {}).items()})


class Computed(Assembled):
    """A tensor that is computed whenever some of it is asked for.

    Attributes:
        rounded: whether it is made of numbers that were rounded to few bits.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], Assembled], rounded: bool = True
    ) -> None:
        nothing = torch.empty(tuple(shape), dtype=dtype, device="meta")
        super().__init__(shape, dtype, [Part(whole(tuple(shape)), nothing, "")])
        self._make, self.rounded = make, rounded

    def joined(self) -> Tensor:
        """As of any other."""
        return self._make().joined()

    def cut(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """As of any other."""
        return self._make().cut(box)


def lazy(x: Tensor, origin: str) -> Assembled:
    """Of one part: all of a tensor."""
    return Assembled(x.shape, x.dtype, [Part(whole(x.shape), x, origin)])


def _real(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(map(_real, x))
    return x.joined() if isinstance(x, Assembled) else x


def _wrapped(x: Any) -> Assembled:
    return x if isinstance(x, Assembled) else lazy(x, "")


def _at(numbers: Ints, dim: int, *instead: int) -> Ints:
    """With others in place of the number of a dimension."""
    return (*numbers[:dim], *instead, *numbers[dim + 1 :])


def _stack(tensors: Sequence[Any], dim: int = 0) -> Assembled:
    every = [_wrapped(x) for x in tensors]
    if len({x.shape for x in every}) > 1:
        raise ValueError(f"tensors of different shapes cannot be stacked: {_shapes(every)}")
    dim %= every[0].ndim + 1
    shape = (*every[0].shape[:dim], 1, *every[0].shape[dim:])
    thicker = [Assembled(shape, x.dtype, [_thicker(part, dim) for part in x.parts]) for x in every]
    return _cat(thicker, dim)


def _thicker(part: Part, dim: int) -> Part:
    """With one more dimension, of size 1."""
    at, n = part.box.offsets, part.box.sizes
    box = Box((*at[:dim], 0, *at[dim:]), (*n[:dim], 1, *n[dim:]))
    return Part(box, part.values.unsqueeze(dim), part.origin)


def _cat(tensors: Sequence[Any], dim: int = 0) -> Assembled:
    every = [_wrapped(x) for x in tensors]
    dim %= every[0].ndim
    if len({_at(x.shape, dim) for x in every}) > 1:
        raise ValueError(f"tensors of different shapes cannot be joined along dimension {dim}: {_shapes(every)}")
    at, parts = 0, []
    for x in every:
        corner = _at((0,) * x.ndim, dim, at)
        parts += [Part(part.box.moved(corner), part.values, part.origin) for part in x.parts]
        at += x.shape[dim]
    return Assembled(_at(every[0].shape, dim, at), reduce(torch.promote_types, (x.dtype for x in every)), parts)


def _shapes(every: Sequence[Assembled]) -> str:
    return listed(str(list(shape)) for shape in dict.fromkeys(x.shape for x in every))


def _narrow(x: Assembled, dim: int, start: int, length: int) -> Assembled:
    box = Box(_at((0,) * x.ndim, dim, start), _at(x.shape, dim, length))
    back = tuple(-n for n in box.offsets)
    parts = []
    for part in x.parts:
        both = part.box.common(box)
        if both is not None:
            parts.append(Part(both.moved(back), part.values[both.within(part.box)], part.origin))
    return Assembled(box.sizes, x.dtype, parts)


def _split(x: Assembled, sizes: int | Sequence[int], dim: int = 0) -> tuple[Assembled, ...]:
    dim %= x.ndim
    lengths = [len(some) for some in torch.empty(x.shape[dim], device="meta").split(sizes)]
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
    return x if x.shape[dim] != 1 else _rearranged(x, lambda numbers: _at(numbers, dim), lambda v: v.squeeze(dim))


def _rearranged(x: Assembled, numbers: Callable[[Ints], Ints], values: Callable[[Tensor], Tensor]) -> Assembled:
    """With other dimensions: what becomes of the numbers of each, and of the elements."""
    parts = [
        Part(Box(numbers(part.box.offsets), numbers(part.box.sizes)), values(part.values), part.origin)
        for part in x.parts
    ]
    return Assembled(numbers(x.shape), x.dtype, parts)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack, torch.cat: _cat, torch.split: _split, torch.transpose: _transpose, torch.squeeze: _squeeze,
    torch.narrow: _narrow, torch.chunk: lambda x, chunks, dim=0: _split(x, max(1, -(-x.shape[dim] // chunks)), dim),
}  # fmt: skip
_METHODS = {func.__name__: method for func, method in _FUNCTIONS.items() if func not in (torch.stack, torch.cat)}
