"""Stochastic rounding to bfloat16: up or down, such that the mean is exact; the same on all ranks, and repeatable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.compat.trusted import trusted
from shardfn.optim.differentiable import differentiable
from shardfn.quant.fused import DTYPES, difference, fits
from shardfn.shards.pieces import Segment, Unit
from shardfn.shards.random import mixed


def rounded(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Rounds numbers to `dtype`; to bfloat16 stochastically, up or down, such that the mean is exact.

    Args:
        x: floating-point numbers.
        dtype: bfloat16, or one at least as wide as float32, which needs no rounding.
        bits: int32 of the same shape, uniform from 0 to below 2^16.
    """
    if dtype != torch.bfloat16:
        return x.to(dtype)
    wide = x.float()
    # bfloat16 is the upper half of float32: adding to the lower half carries into the upper with the right probability.
    up = ((wide.view(torch.int32) + bits) & -(2**16)).view(torch.float32)
    return torch.where(wide.isfinite(), up, wide).to(dtype)


def closed(
    unit: Unit, start: int, stop: int, numbers: Sequence[Tensor], dtype: torch.dtype, salt: tuple[Any, ...]
) -> list[Tensor]:
    """Elements `start` to `stop` of a unit, of one or more tensors of that size, rounded to `dtype` as by `rounded`.

    The random bits depend only on the salt, the parameter's name and the element's place in it, so they are the same on
    all ranks that hold the element, for any number of ranks. A derivative through it raises NotImplementedError.
    """
    if dtype != torch.bfloat16 or start == stop:
        return [refusing(x, x.detach().to(dtype)) for x in numbers]
    first = numbers[0]
    kernel_name = f"shardfn's kernel to round {first.dtype} at random"
    runs = first.dtype in DTYPES and fits(*numbers)
    if runs and trusted(kernel_name, first.device, lambda: _kernel_difference(first.dtype, first.device)):
        return [_by_kernel(unit, start, stop, x, i, salt) for i, x in enumerate(numbers)]
    draws = random_bits(unit, start, stop, len(numbers), salt)
    return [refusing(x, rounded(x.detach(), dtype, draw)) for x, draw in zip(numbers, draws, strict=True)]


def random_bits(unit: Unit, start: int, stop: int, n: int, salt: tuple[Any, ...]) -> Iterator[Tensor]:
    """Random bits for elements of a unit, as `rounded` takes them, `n` times."""

    def keys(salt: tuple[Any, ...]) -> Tensor:
        span_keys = []
        for length, index, factor, term in _spans(unit, start, stop, salt):
            dtype = torch.int32 if index + length < 2**31 else torch.int64
            places = torch.arange(index, index + length, dtype=dtype, device=unit.values.device)
            span_keys.append(places.to(torch.int32).mul_(factor).add_(term))
        return torch.cat(span_keys) if len(span_keys) > 1 else span_keys[0]

    return _draws(keys, n, salt)


def random_bits_at(places: Tensor, path: str, dims: int, n: int, salt: tuple[Any, ...]) -> Iterator[Tensor]:
    """Random bits for elements at row-major places of a full parameter with `dims` dimensions."""

    def keys(salt: tuple[Any, ...]) -> Tensor:
        factor, term = _keys(salt, path, (0,) * dims)
        return places.to(torch.int32).mul_(factor).add_(term)

    return _draws(keys, n, salt)


def _draws(keys: Callable[[tuple[Any, ...]], Tensor], n: int, salt: tuple[Any, ...]) -> Iterator[Tensor]:
    for first in range(0, n, 2):
        # One hash of 32 bits gives two draws of 16.
        pair = _hashed(keys((*salt, first)))
        yield pair & 0xFFFF
        if first + 1 < n:
            yield (pair >> 16) & 0xFFFF


def _spans(unit: Unit, start: int, stop: int, salt: tuple[Any, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Parts of the places from `start` to `stop`, in order: length, first index, and factor and term of their keys.

    A key is `factor * i + term` for row-major index `i` in this rank's value of a parameter, and 0 where none is.
    """
    if any(isinstance(part, Tensor) for part in salt):
        raise TypeError(
            "rounding at random draws from the step number, which the host must know, and here it is a tensor, as in a "
            "captured step: keep the state in float32 (state_dtype=torch.float32) and parameters in "
            "fp32_master_weights(...)"
        )
    done = start
    for segment in unit.filled:
        low, high = max(segment.start, start), min(segment.stop, stop)
        if low >= high:
            continue
        if done < low:
            yield low - done, 0, 0, 0
        yield high - low, segment.first + low - segment.start, *_keys(salt, segment.path, segment.corner)
        done = high
    if done < stop:
        yield stop - done, 0, 0, 0


def _keys(salt: tuple[Any, ...], path: str, corner: tuple[int, ...]) -> tuple[int, int]:
    """An odd factor and a term, both from a hash of the salt, the path and the corner."""
    key = mixed(*salt, path, *corner)
    return (key & 0x7FFFFFFF) | 1, (key >> 31) & 0x7FFFFFFF


def _hashed(x: Tensor) -> Tensor:
    """Mixes each number's bits so that every bit depends on all of them: "lowbias32" of Wellons (2018)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x.mul_(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x


# --- by one kernel, which is chosen as in `shardfn.quant.fused` ---


def _by_kernel(unit: Unit, start: int, stop: int, x: Tensor, index: int, salt: tuple[Any, ...]) -> Tensor:
    from shardfn.optim import kernels  # imports Triton, which only CUDA devices need

    out, flat, done = torch.empty_like(x, dtype=torch.bfloat16), x.detach().view(-1), 0
    flat_out = out.view(-1)
    with torch.accelerator.device_index(x.device.index):
        for n, first, factor, term in _spans(unit, start, stop, (*salt, index // 2 * 2)):
            kernels.round_at_random(flat[done : done + n], flat_out[done : done + n], first, factor, term, index % 2)
            done += n
    return refusing(x, out)


def _kernel_difference(dtype: torch.dtype, device: torch.device) -> str:
    """Describes a difference of the kernel from its eager twin, for any bits; empty if none."""
    draw, n = torch.Generator().manual_seed(0), 5000
    bits = torch.randint(-(2**31), 2**31, (n,), generator=draw, dtype=torch.int64, device="cpu")
    bits[:400] |= 0x7FFF0000  # nan, whose bits a sum would carry away
    x = bits.to(torch.int32).view(torch.float32).to(device, dtype)
    places = ("a", 2**31 - 1000, 0, 2300), ("b", 2**33 + 7, 2400, n)
    parts = tuple([Segment(path, (2**34,), (2**34,), (0,), first, low, high) for path, first, low, high in places])
    unit, salt = Unit(x, parts, None, (), 0, n, True, "w"), (3, 2**40, "check")
    draws = list(random_bits(unit, 0, n, 2, salt))
    for index in range(2):
        result = _by_kernel(unit, 0, n, x, index, salt)
        if mismatch := difference(f"draw {index}, the number", result, rounded(x, torch.bfloat16, draws[index])):
            return mismatch
    return ""


# --- derivatives ---


def refusing(x: Tensor, value: Tensor) -> Tensor:
    """Returns `value`, through which a derivative raises NotImplementedError, as rounding has none."""
    return _Refusing.apply(x, value) if differentiable(x) else value  # type: ignore[no-untyped-call]


class _Refusing(torch.autograd.Function):
    """Returns a copy of `value` that depends on `x`; any derivative raises NotImplementedError."""

    @staticmethod
    def forward(x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(REFUSED)

    jvp = backward

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, value: Tensor) -> Any:
        """One call for the whole batch."""
        return _Refusing.apply(x if dims[0] is None else x.movedim(dims[0], 0), value), dims[1]  # type: ignore[no-untyped-call]


REFUSED = (
    "a derivative through what an optimizer rounded, its state in few bits or its parameters by stochastic_rounding: "
    "rounding has none. Differentiate a single step of an optimizer with such a state, and any number of steps of one "
    "that keeps all in the parameters' dtype, such as adamw(..., donate=False)"
)
