"""Formats: how the numbers of a tensor are encoded as bytes, in blocks that have one scale each.

A block's scale is its largest magnitude divided by the code's largest number, so that nothing overflows. A tensor's
bytes are the scales, followed by the codes:

    nf4(64)               | scales: float32, one a block | codes: two a byte |
    nf4(64, double=True)  | scales of the scales: float32, one for 256 | their mean | their codes: one a block | codes |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardfn.compat.devices import elements_at_a_time
from shardfn.compat.trusted import trusted
from shardfn.quant import codes, fused
from shardfn.quant.codes import Code

NESTED = 256  # scales that share one scale
STEP = 2**18  # numbers encoded or decoded at a time on a CPU
TINY = 1e-38  # the smallest scale, also of a block of zeros: its inverse is finite


@dataclass(frozen=True)
class Format:
    """An encoding of numbers as bytes; hashable, and equal to any format with the same encoding.

    Attributes:
        name: of the code.
        block: elements, in row-major order, that share one scale. The last block of a tensor may be shorter.
        double: whether the scales are kept in 8 bits too, as in QLoRA (Dettmers et al. 2023, section 3).
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
        """The number of blocks, and so of scales, of `numel` elements."""
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """The bytes of `numel` elements."""
        return self._start(numel) + -(-numel * self.code.bits // 8)

    @cached_property
    def rate(self) -> float:
        """Bytes per element of a large tensor."""
        scale = 1 + 4 / NESTED if self.double else 4
        return self.code.bits / 8 + scale / self.block

    def encode(self, x: Tensor) -> Tensor:
        """Encodes each row of floating-point numbers: `[..., numel] -> [..., nbytes]`, uint8.

        A number that is not finite makes its whole block so.
        """
        x = x.detach()
        if self._fused("encode", x, dtype=x.dtype):
            return self._encoded_at_once(x)
        return self._encoded_in_steps(x)

    def _encoded_in_steps(self, x: Tensor) -> Tensor:
        # Intermediate results are several times as large.
        step = max(1, elements_at_a_time(x.device, STEP) // self.block) * self.block
        results = [self._encoded(part) for part in x.split(step, -1)]
        scales, numbers = (_concatenate(list(column)) for column in zip(*results, strict=True))
        return torch.cat((*self._stored(scales), numbers), -1)

    def _encoded_at_once(self, x: Tensor) -> Tensor:
        numel = x.shape[-1]
        out = x.new_empty(*x.shape[:-1], self.nbytes(numel), dtype=torch.uint8)
        largest = fused.encode(x, self.codes(out, numel), self.code, self.block, TINY * self.code.most)
        scales = _stored_scales(largest, self.code.most)
        out[..., : self._start(numel)] = torch.cat(self._stored(scales), -1)
        return out

    def _encoded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and codes."""
        scales, scaled = _block_scaled(x.float(), self.block, self.code.most)
        return scales, self.code.encode(scaled)

    def decode(self, packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Decodes rows of bytes: code times scale in float32, then converted to `dtype`."""
        of_codes, scales = self.codes(packed, numel), self.scales(packed, numel)
        if self._fused("decode", of_codes, scales, dtype=dtype):
            return fused.decode(of_codes, scales, numel, dtype, self.code, self.block)
        return self._decoded(of_codes, scales, numel, dtype)

    def decode_into(self, out: Tensor, packed: Tensor) -> Tensor:
        """Decodes one row to `[numel]`, on a CPU; faster than `decode`, as intermediate results stay in its cache."""
        numel, blocks = len(out), max(1, STEP // self.block)
        of_codes, scales = self.codes(packed, numel), self.scales(packed, numel)
        of_blocks = of_codes.split(blocks * self.block * self.code.bits // 8), scales.split(blocks)
        for codes_, scales_, part in zip(*of_blocks, out.split(blocks * self.block), strict=True):
            part.copy_(self._decoded(codes_, scales_, len(part), out.dtype))
        return out

    def _decoded(self, of_codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return _times_scales(self.code.decode(of_codes)[..., :numel], scales, self.block).to(dtype)

    def _fused(self, operation: str, *tensors: Tensor, dtype: torch.dtype) -> bool:
        """Whether a kernel encodes or decodes these tensors."""
        sizes = self.block <= fused.LARGEST and self.block & (self.block - 1) == 0
        if not sizes or dtype not in fused.DTYPES or not fused.fits(*tensors):
            return False
        device, check = tensors[0].device, self._check_encode if operation == "encode" else self._check_decode
        label = f"shardfn's kernel to {operation} {self.name}({self.block}), {dtype}"
        return trusted(label, device, lambda: check(dtype, device))

    def _check_encode(self, dtype: torch.dtype, device: torch.device) -> str:
        """The difference between the encoding kernel and `_encoded_in_steps`; "" if none."""
        finite, wild = fused.samples(self.code, self.block, dtype, device)
        numel = wild.shape[-1]
        decoded = [
            self._decoded(self.codes(row, numel), self.scales(row, numel), numel, torch.float32)
            for row in (self._encoded_at_once(wild), self._encoded_in_steps(wild))
        ]  # codes of nan are not the same everywhere, but what they stand for is
        problem = fused.difference("byte", self._encoded_at_once(finite), self._encoded_in_steps(finite))
        return problem or fused.difference("number", *decoded)

    def _check_decode(self, dtype: torch.dtype, device: torch.device) -> str:
        """The difference between the decoding kernel and `_decoded`; "" if none."""
        of_codes, scales, numel = fused.coded_samples(self.code, self.block, device)
        decoded = fused.decode(of_codes, scales, numel, dtype, self.code, self.block)
        return fused.difference("number", decoded, self._decoded(of_codes, scales, numel, dtype))

    def scales(self, packed: Tensor, numel: int) -> Tensor:
        """The scale of each block, float32."""
        n = self.blocks(numel)
        if not self.double:
            return _floats(packed, 0, n)
        groups = -(-n // NESTED)
        nested, mean = _floats(packed, 0, groups), _floats(packed, 4 * groups, 1)
        return (
            _times_scales(codes.dynamic.decode(packed[..., 4 * groups + 4 : 4 * groups + 4 + n]), nested, NESTED) + mean
        )

    def codes(self, packed: Tensor, numel: int) -> Tensor:
        """The part of the bytes that is codes."""
        return packed[..., self._start(numel) : self.nbytes(numel)]

    def _start(self, numel: int) -> int:
        n = self.blocks(numel)
        return 4 * -(-n // NESTED) + 4 + n if self.double else 4 * n

    def _stored(self, scales: Tensor) -> list[Tensor]:
        if not self.double:
            return [scales.view(torch.uint8)]
        mean = scales.mean(-1, keepdim=True) if scales.shape[-1] else scales.new_zeros(*scales.shape[:-1], 1)
        nested, scaled = _block_scaled(scales - mean, NESTED, 1.0)
        return [nested.view(torch.uint8), mean.view(torch.uint8), codes.dynamic.encode(scaled)]


def _block_scaled(x: Tensor, block: int, code_max: float) -> tuple[Tensor, Tensor]:
    """The scale of each block, and the numbers divided by their scales, which exceed `code_max` only by rounding."""
    full_numel = x.shape[-1] // block * block
    full, rest = x[..., :full_numel].unflatten(-1, (-1, block)), x[..., None, full_numel:]
    parts = [part for part in (full, rest) if part.numel()]
    if not parts:
        return x.new_empty(*x.shape[:-1], 0), x
    largest = [part.abs().amax(-1) for part in parts]
    divisors = [top.clamp_min(TINY * code_max) for top in largest]
    scaled = [(part * (code_max / top)[..., None]).flatten(-2) for part, top in zip(parts, divisors, strict=True)]
    return _stored_scales(_concatenate(largest), code_max), _concatenate(scaled)


def _stored_scales(largest: Tensor, code_max: float) -> Tensor:
    # If the code's largest number is 1, the magnitude itself is stored, even below TINY, as in bitsandbytes.
    # A product, since CUDA takes the reciprocal of a number that it divides by, and a CPU does not.
    return largest if code_max == 1 else largest.clamp_min(TINY * code_max) * (1 / code_max)


def _times_scales(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    full_numel = numbers.shape[-1] // block * block
    full, rest = numbers[..., :full_numel].unflatten(-1, (-1, block)), numbers[..., full_numel:]
    parts = [(full * scales[..., : full_numel // block, None]).flatten(-2)] if full_numel else []
    return _concatenate([*parts, rest * scales[..., -1:]] if rest.shape[-1] else parts) if numbers.numel() else numbers


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _floats(packed: Tensor, start: int, n: int) -> Tensor:
    if n == 0:
        return packed.new_empty((*packed.shape[:-1], 0), dtype=torch.float32)
    raw = packed[..., start : start + 4 * n]  # may not be aligned for float32, so it is copied
    return raw.clone(memory_format=torch.contiguous_format).view(torch.float32)


def format_of(name: str, block: int, double: bool = False) -> Format:
    """A format by its name.

    Raises:
        ValueError: there is no such format; the block is not a positive even number; `double` with 8 bits.
    """
    by_name = {code.name: code for code in _CODES}
    if name not in by_name:
        raise ValueError(f"{name!r} is not a format: there are {', '.join(by_name)}")
    if not isinstance(block, int) or isinstance(block, bool) or block < 2 or block % 2:
        raise ValueError(
            f"{name}: block must be an even number of elements that have one scale, such as 64, got {block!r}"
        )
    if double and by_name[name].bits == 8:
        raise ValueError(f"{name}: double=True is for formats of 4 bits, whose scales it keeps in 8 bits")
    return Format(name, block, double, by_name[name])


def check_format(format: object, argument: str, *, optional: bool = True) -> None:
    """Raises TypeError unless it is a format, or None where that is allowed."""
    if isinstance(format, Format) or (optional and format is None):
        return
    shown = f"the function {getattr(format, '__name__', 'itself')}: call it" if callable(format) else repr(format)
    raise TypeError(f"{argument} must be a format, such as shardfn.quant.int8(){', or None' * optional}, got {shown}")


_CODES = (codes.nf4, codes.fp4, codes.int4, codes.int8, codes.fp8_e4m3, codes.fp8_e5m2)


def nf4(block: int = 64, *, double: bool = False) -> Format:
    """4-bit NormalFloat: 16 quantiles of the normal distribution (Dettmers et al. 2023, QLoRA, appendix E).

    Args:
        block: elements that share one scale.
        double: whether the scales are kept in 8 bits too: 0.516 bytes a parameter instead of 0.563.
    """
    return format_of("nf4", block, double)


def fp4(block: int = 64, *, double: bool = False) -> Format:
    """4-bit floating-point numbers: a sign, two bits of exponent and one of fraction, as in bitsandbytes."""
    return format_of("fp4", block, double)


def int4(block: int = 64, *, double: bool = False) -> Format:
    """The whole numbers from -7 to 7, times a scale."""
    return format_of("int4", block, double)


def int8(block: int = 256) -> Format:
    """The whole numbers from -127 to 127, times a scale: 1.016 bytes a parameter."""
    return format_of("int8", block)


def fp8_e4m3(block: int = 128) -> Format:
    """8-bit floating-point numbers, 4 bits of exponent and 3 of fraction, the largest 448, times a scale."""
    return format_of("fp8_e4m3", block)


def fp8_e5m2(block: int = 128) -> Format:
    """8-bit floating-point numbers, 5 bits of exponent and 2 of fraction, the largest 57344, times a scale."""
    return format_of("fp8_e5m2", block)
