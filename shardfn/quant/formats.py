"""Formats: how the numbers of a tensor become bytes, in blocks that have a scale each.

A block's scale is its largest magnitude over the largest number of the code, so that nothing overflows. The bytes of a
tensor are the scales, and behind them the codes:

    nf4(64)               | scales: float32, one a block | codes: two a byte |
    nf4(64, double=True)  | scales of the scales: float32, one for 256 | their mean | their codes: one a block | codes |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardfn.quant import codes
from shardfn.quant.codes import Code

NESTED = 256  # scales that have a scale together
STEP = 2**18  # numbers that are encoded at a time
TINY = 1e-38  # the smallest scale, whose inverse is finite: of zeros, too


@dataclass(frozen=True)
class Format:
    """How numbers become bytes; hashable, and equal to another one that does the same.

    Attributes:
        name: of the code.
        block: how many elements, in row-major order, have one scale. The last block of a tensor may have fewer.
        double: whether the scales are kept in 8 bits, too, as in QLoRA (Dettmers et al. 2023, section 3).
    """

    name: str
    block: int
    double: bool = False
    code: Code = field(repr=False, compare=False, default=codes.nf4)

    def __str__(self) -> str:
        return f"{self.name}({self.block}{', double=True' if self.double else ''})"

    def __reduce__(self) -> Any:
        return format_of, (self.name, self.block, self.double)

    def blocks(self, numel: int) -> int:
        """How many scales that many elements have."""
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """Bytes of that many elements."""
        return self._start(numel) + -(-numel * self.code.bits // 8)

    @cached_property
    def rate(self) -> float:
        """Bytes an element, of many."""
        scale = 1 + 4 / NESTED if self.double else 4
        return self.code.bits / 8 + scale / self.block

    def encode(self, x: Tensor) -> Tensor:
        """The bytes of each row of floating-point numbers: `[..., numel] -> [..., nbytes]`, uint8.

        Numbers that are not finite make their whole block such.
        """
        # A little at a time: what is computed on the way is several times as large.
        done = [self._encoded(some) for some in x.detach().split(max(1, STEP // self.block) * self.block, -1)]
        scales, numbers = (_joined(list(parts)) for parts in zip(*done, strict=True))
        return torch.cat((*self._stored(scales), numbers), -1)

    def _encoded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and codes."""
        scales, scaled = _scaled(x.float(), self.block, self.code.most)
        return scales, self.code.encode(scaled)

    def decode(self, packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The rows that these bytes stand for: code times scale in float32, then converted."""
        numbers = self.code.decode(self.codes(packed, numel))[..., :numel]
        return _times(numbers, self.scales(packed, numel), self.block).to(dtype)

    def scales(self, packed: Tensor, numel: int) -> Tensor:
        """The scale of each block, float32."""
        n = self.blocks(numel)
        if not self.double:
            return _floats(packed, 0, n)
        few = -(-n // NESTED)
        nested, mean = _floats(packed, 0, few), _floats(packed, 4 * few, 1)
        return _times(codes.dynamic.decode(packed[..., 4 * few + 4 : 4 * few + 4 + n]), nested, NESTED) + mean

    def codes(self, packed: Tensor, numel: int) -> Tensor:
        """The bytes that are codes."""
        return packed[..., self._start(numel) : self.nbytes(numel)]

    def _start(self, numel: int) -> int:
        n = self.blocks(numel)
        return 4 * -(-n // NESTED) + 4 + n if self.double else 4 * n

    def _stored(self, scales: Tensor) -> list[Tensor]:
        if not self.double:
            return [scales.view(torch.uint8)]
        mean = scales.mean(-1, keepdim=True) if scales.shape[-1] else scales.new_zeros(*scales.shape[:-1], 1)
        nested, scaled = _scaled(scales - mean, NESTED, 1.0)
        return [nested.view(torch.uint8), mean.view(torch.uint8), codes.dynamic.encode(scaled)]


def _scaled(x: Tensor, block: int, most: float) -> tuple[Tensor, Tensor]:
    """The scale of each block, and the numbers over their scales, beyond `most` by a rounding at most."""
    whole = x.shape[-1] // block * block
    parts = [part for part in (x[..., :whole].unflatten(-1, (-1, block)), x[..., None, whole:]) if part.numel()]
    if not parts:
        return x.new_empty(*x.shape[:-1], 0), x
    largest = [part.abs().amax(-1) for part in parts]
    divisors = [top.clamp_min(TINY * most) for top in largest]
    scaled = [(part * (most / top)[..., None]).flatten(-2) for part, top in zip(parts, divisors, strict=True)]
    # bitsandbytes, of whose codes 1 is the largest, keeps the largest magnitude where it did not divide by it.
    return _joined(largest if most == 1 else divisors) / most, _joined(scaled)


def _times(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    whole = numbers.shape[-1] // block * block
    full, rest = numbers[..., :whole].unflatten(-1, (-1, block)), numbers[..., whole:]
    parts = [(full * scales[..., : whole // block, None]).flatten(-2)] if whole else []
    return _joined([*parts, rest * scales[..., -1:]] if rest.shape[-1] else parts) if numbers.numel() else numbers


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _floats(packed: Tensor, start: int, n: int) -> Tensor:
    if n == 0:
        return packed.new_empty((*packed.shape[:-1], 0), dtype=torch.float32)
    some = packed[..., start : start + 4 * n]  # which may begin where floats may not
    return some.clone(memory_format=torch.contiguous_format).view(torch.float32)


def format_of(name: str, block: int, double: bool = False) -> Format:
    """A format by its name.

    Raises:
        ValueError: there is none such; a block that is not a positive even number; double scales of another code.
    """
    known = {code.name: code for code in _CODES}
    if name not in known:
        raise ValueError(f"{name!r} is not a format: there are {', '.join(known)}")
    if not isinstance(block, int) or isinstance(block, bool) or block < 2 or block % 2:
        raise ValueError(f"{name}: block={block!r}; it is an even number of elements that have one scale, such as 64")
    return Format(name, block, double, known[name])


def check_format(format: object, what: str, *, optional: bool = True) -> None:
    """Raises TypeError for what is not a format, nor None where it is optional."""
    if isinstance(format, Format) or (optional and format is None):
        return
    said = f"the function {getattr(format, '__name__', 'itself')}: call it" if callable(format) else repr(format)
    raise TypeError(f"{what} is a format, such as shardfn.quant.int8(){', or None' * optional}, not {said}")


_CODES = (codes.nf4, codes.fp4, codes.int4, codes.int8, codes.fp8_e4m3, codes.fp8_e5m2)


def nf4(block: int = 64, *, double: bool = False) -> Format:
    """4-bit NormalFloat: 16 quantiles of the normal distribution (Dettmers et al. 2023, QLoRA, appendix E).

    Args:
        block: elements that have one scale.
        double: whether the scales are kept in 8 bits: 0.516 bytes a parameter instead of 0.563.
    """
    return format_of("nf4", block, double)


def fp4(block: int = 64, *, double: bool = False) -> Format:
    """Floating-point numbers of a sign, two bits of exponent and one of fraction, as bitsandbytes has them."""
    return format_of("fp4", block, double)


def int4(block: int = 64, *, double: bool = False) -> Format:
    """The whole numbers from -7 to 7, times a scale."""
    return format_of("int4", block, double)


def int8(block: int = 256) -> Format:
    """The whole numbers from -127 to 127, times a scale: 1.016 bytes a parameter."""
    return format_of("int8", block)


def fp8_e4m3(block: int = 128) -> Format:
    """Floating-point numbers of 4 bits of exponent and 3 of fraction, of which the largest is 448, times a scale."""
    return format_of("fp8_e4m3", block)


def fp8_e5m2(block: int = 128) -> Format:
    """Floating-point numbers of 5 bits of exponent and 2 of fraction, of which the largest is 57344, times a scale."""
    return format_of("fp8_e5m2", block)
