"""Kernels in Triton: a step of AdamW on state in 8 bits, and rounding at random; imported only where they can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from shardfn.quant.kernels import largest, narrow, places, wide

ROWS = 2  # blocks of a program
SIZE = 2048  # elements of a program that rounds


@triton.jit
def _decode_block(codes, scales, numbers, offsets, block, inside, some):
    """The numbers of codes times those of their blocks, 0 outside."""
    number = tl.load(numbers + tl.load(codes + offsets, mask=inside, other=0).to(tl.int32))
    return tl.where(inside, number * tl.load(scales + block, mask=some, other=0.0)[:, None], 0.0)


@triton.jit
def _encode_block(x, codes, scales, bounds, offsets, block, inside, some):
    """Writes the largest magnitude of each block, and the codes of the numbers divided by it."""
    top = largest(x)
    scaled = tl.div_rn(x, tl.where(top == 0, 1.0, top)[:, None])
    tl.store(codes + offsets, places(scaled, bounds, 8).to(tl.uint8), mask=inside)
    tl.store(scales + block, top, mask=some)


@triton.jit(do_not_specialize_on_alignment=["m_scales", "v_scales"])
def _adamw(
    p, g, m_codes, m_scales, v_codes, v_scales, m_out, v_out, m_numbers, m_bounds, v_numbers, v_bounds, lr, n,
    b1, rest1, b2, rest2, bias1, bias2, eps, weight_decay,
    CLOSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, some = offsets < n, block * BLOCK < n
    param = wide(tl.load(p + offsets, mask=inside, other=0.0))
    grad = wide(tl.load(g + offsets, mask=inside, other=0.0))
    m = _decode_block(m_codes, m_scales, m_numbers, offsets, block, inside, some)
    v = _decode_block(v_codes, v_scales, v_numbers, offsets, block, inside, some)
    rate = tl.load(lr)
    m = m * b1 + grad * rest1
    v = v * b2 + grad * rest2 * grad
    root = tl.div_rn(tl.sqrt_rn(v), bias2) + eps
    param = param * (1.0 - rate * weight_decay) - tl.div_rn(tl.div_rn(rate, bias1) * m, root)
    tl.store(p + offsets, narrow(param, p.dtype.element_ty), mask=inside)
    if CLOSE:
        _encode_block(m, m_codes, m_scales, m_bounds, offsets, block, inside, some)
        _encode_block(v, v_codes, v_scales, v_bounds, offsets, block, inside, some)
    else:
        tl.store(m_out + offsets, m, mask=inside)
        tl.store(v_out + offsets, v, mask=inside)


def adamw(
    columns: Sequence[Tensor], out: Sequence[Tensor], tables: Sequence[Tensor], numbers: Sequence[Any], block: int
) -> None:
    """Updates parameters and their state of codes and scales; or, if `out` is given, writes new numbers to that."""
    p, n = columns[0], len(columns[0])
    _adamw[(triton.cdiv(n, ROWS * block),)](
        *columns, *(out or (p, p)), *tables, numbers[0], n, *numbers[1:],
        CLOSE=not out, ROWS=ROWS, BLOCK=block, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "first", "factor", "term"])
def _round(x, out, n, first, factor, term, SHIFT: tl.constexpr, SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    numbers = wide(tl.load(x + offsets, mask=offsets < n, other=0.0))
    key = (offsets + first).to(tl.int32) * factor + term
    key = key ^ ((key >> 16) & 0xFFFF)
    key = key * 0x7FEB352D
    key = key ^ ((key >> 15) & 0x1FFFF)
    key = key * -0x7B935975
    key = key ^ ((key >> 16) & 0xFFFF)
    bits = numbers.to(tl.int32, bitcast=True)
    up = (bits + ((key >> SHIFT) & 0xFFFF)) & -0x10000
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = tl.where(finite, up.to(tl.float32, bitcast=True), numbers)
    tl.store(out + offsets, narrow(rounded, out.dtype.element_ty), mask=offsets < n)


def round_at_random(x: Tensor, out: Tensor, first: int, factor: int, term: int, half: int) -> None:
    """Rounds numbers to bfloat16 with 16 bits, the lower or upper `half`, of the hashes of `factor * i + term`.

    `i` counts from `first`.
    """
    n = len(x)
    _round[(triton.cdiv(n, SIZE),)](x, out, n, first, factor, term, SHIFT=16 * half, SIZE=SIZE)
