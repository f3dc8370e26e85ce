"""Triton kernels that quantize and dequantize in one pass; `fused` imports them only where they run.

Arithmetic is that of the eager code, operation by operation: `div_rn` and `sqrt_rn` round as torch does, and launches
pass `enable_fp_fusion=False`, so that no product is added unrounded. Offsets are 64 bits wide.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

SIZE = 2048  # elements of a program, unless a block is larger
COARSE = tl.constexpr(3)  # steps of a search among bounds that all numbers of a program take together


@triton.jit
def wide(x):
    """Numbers in float32. bfloat16 is its upper half: casts are those of bits, which Triton's interpreter has right."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Float32 numbers in a dtype; halves are rounded to even."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def largest(x):
    """The largest magnitude in each row; nan if there is one."""
    # As whole numbers, the bits of magnitudes have the order of the magnitudes, and those of nan come last.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def places(x, bounds, BITS: tl.constexpr):
    """The number of the `2 ** BITS - 1` sorted bounds below each number; all are below nan."""
    place = tl.zeros(x.shape, tl.int32)
    for bit in tl.static_range(BITS):
        half = 1 << (BITS - 1 - bit)
        if bit < COARSE:  # one load for all numbers is faster than one for each
            bound = tl.load(bounds + half - 1)
            for k in tl.static_range(1, 1 << bit):
                index = 2 * half * k
                bound = tl.where(place == index, tl.load(bounds + index + half - 1), bound)
        else:
            bound = tl.load(bounds + place + half - 1)
        place += tl.where(x <= bound, 0, half)
    return place


@triton.jit
def _nearest(x, bounds, order, BITS: tl.constexpr, WHOLE: tl.constexpr, FRACTION: tl.constexpr):
    """The nearest codes, as int32."""
    if FRACTION > 0:
        return _nearest_float(x, FRACTION)
    if WHOLE:
        # The sum has no room for a fraction: it is rounded, halves to even, and its lowest bits are the whole number.
        bits = (x + 12582912.0).to(tl.int32, bitcast=True)
        return tl.where(x == x, bits & ((1 << BITS) - 1), 0)
    return tl.load(order + places(tl.where(x == x, x, float("-inf")), bounds, BITS)).to(tl.int32)


@triton.jit
def _nearest_float(x, FRACTION: tl.constexpr):
    """The nearest 8-bit floats with so many bits of fraction, halves to even; for numbers that do not overflow."""
    shift: tl.constexpr = 23 - FRACTION
    min_exponent: tl.constexpr = 129 - (1 << (6 - FRACTION))  # the exponent of the smallest normal one, among float32's
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size - ((min_exponent - 1) << 23) + (1 << (shift - 1)) - 1 + ((size >> shift) & 1)) >> shift
    unit: tl.constexpr = (min_exponent + shift) << 23  # the last bit of this float32 is worth the smallest 8-bit float
    above = tl.full(x.shape, unit, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (size.to(tl.float32, bitcast=True) + above).to(tl.int32, bitcast=True) - unit
    code = tl.where(size < (min_exponent << 23), subnormal, normal)
    return tl.where(x == x, code, 127) | ((bits >> 24) & 128)


@triton.jit(do_not_specialize=["blocks"])
def _encode(
    x, codes, tops, bounds, order, numel, x_row, codes_row, blocks, min_magnitude, code_max,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr, FRACTION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    numbers = wide(tl.load(x + row * x_row + offsets, mask=offsets < numel, other=0.0))
    top = largest(numbers)
    tl.store(tops + row * blocks + block, top, mask=block < blocks)
    factor = tl.div_rn(1.0, tl.where(top < min_magnitude, min_magnitude, top)) * code_max
    code = _nearest(numbers * factor[:, None], bounds, order, BITS, WHOLE, FRACTION)
    if BITS == 4:
        code = tl.where(offsets < numel, code, 0)  # also the half byte after an odd number of elements
        upper, lower = tl.split(tl.reshape(code, (ROWS, BLOCK // 2, 2)))
        offsets = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        code, numel = upper << 4 | lower, numel // 2 + numel % 2
    tl.store(codes + row * codes_row + offsets, code.to(tl.uint8), mask=offsets < numel)


@triton.jit(do_not_specialize=["blocks"])
def _decode(
    codes, scales, out, table, numel, codes_row, blocks,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * SIZE
    offsets = start + tl.arange(0, SIZE)
    codes += row * codes_row
    if BITS == 4:
        byte = start // 2 + tl.arange(0, SIZE // 2)
        pair = tl.load(codes + byte, mask=byte < numel // 2 + numel % 2, other=0)
        code = tl.interleave(pair >> 4, pair & 15)
    else:
        code = tl.load(codes + offsets, mask=offsets < numel, other=0)
    if WHOLE and BITS == 8:
        numbers = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        numbers = tl.load(table + code.to(tl.int32))
    scale = tl.load(scales + row * blocks + offsets // BLOCK, mask=offsets < numel, other=0.0)
    tl.store(out + row * numel + offsets, narrow(numbers * scale, out.dtype.element_ty), mask=offsets < numel)


def encode(
    x: Tensor, codes: Tensor, tops: Tensor, tables: Any, min_magnitude: float, code_max: float, block: int
) -> None:
    """Writes the codes of `x [rows, numel]` to rows of bytes, and the largest magnitudes to `tops [rows, blocks]`."""
    rows, numel = x.shape
    num_blocks = max(1, SIZE // block)
    _encode[triton.cdiv(tops.shape[1], num_blocks), rows](
        x, codes, tops, tables.bounds, tables.order, numel, x.stride(0), codes.stride(0), tops.shape[1],
        min_magnitude, code_max, BLOCK=block, ROWS=num_blocks, BITS=tables.bits, WHOLE=tables.whole,
        FRACTION=tables.fraction, enable_fp_fusion=False,
    )  # fmt: skip


def decode(codes: Tensor, scales: Tensor, out: Tensor, tables: Any, block: int) -> None:
    """Writes the numbers of rows of codes, times `scales [rows, blocks]`, to `out [rows, numel]`."""
    rows, numel = out.shape
    _decode[triton.cdiv(numel, SIZE), rows](
        codes, scales, out, tables.numbers, numel, codes.stride(0), scales.shape[1],
        BLOCK=block, SIZE=SIZE, BITS=tables.bits, WHOLE=tables.whole, enable_fp_fusion=False,
    )  # fmt: skip
