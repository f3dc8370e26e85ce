"""Dispatch to the Triton kernels in `kernels`, each in place of an eager baseline of many operations.

They run on CUDA devices on which Triton is installed, on plain tensors, and only after a check on the device: the first
time, a kernel has to equal its baseline on some thousand numbers, among them zeros, subnormals, halves, inf and nan.
Otherwise a warning says what differs, and the baseline runs.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.compat import devices, dispatch, functorch
from shardfn.quant import codes
from shardfn.quant.codes import Code

KINDS: tuple[str, ...] = ("cuda",)
DTYPES = torch.float32, torch.bfloat16, torch.float16
LARGEST = 2**12  # elements of a block; larger ones do not fit in a program's registers
ROWS = 2**16 - 1  # of a CUDA grid


def fits(*tensors: Tensor) -> bool:
    """Whether kernels may run: on plain vectors or matrices with contiguous rows, outside of graphs and transforms."""
    device = tensors[0].device
    if device.type not in KINDS or torch.compiler.is_compiling() or not _has_triton():
        return False
    if functorch.inside_transform() or functorch.inside_forward_mode():
        return False
    return all(x.device == device and _fits_kernels(x) for x in tensors)


def _fits_kernels(x: Tensor) -> bool:
    ordinary = type(x) in (Tensor, torch.nn.Parameter) and dispatch.plain(x) and not functorch.batched(x)
    return ordinary and x.numel() > 0 and x.ndim in (1, 2) and x.stride(-1) == 1 and x.shape[:-1].numel() <= ROWS


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# --- the check ---


def difference(kind: str, actual: Tensor, expected: Tensor) -> str:
    """Says where two tensors differ, bit for bit, any nan being equal to any other; empty if nowhere."""
    as_bytes = [x.contiguous().view(torch.uint8).view(*x.shape, x.element_size()) for x in (actual, expected)]
    other = (as_bytes[0] != as_bytes[1]).any(-1) & ~(actual.isnan() & expected.isnan())
    if not bool(other.any()):
        return ""
    index = tuple(other.nonzero()[0].tolist())
    return f"{kind} {list(index)} is {actual[index].item()!r} instead of {expected[index].item()!r}"


def samples(code: Code, block: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers on which an encoder has to equal its twin, `[2, numel]`: finite ones, and some that are not.

    There are all halves between codes, numbers of any size, and a last block of one number.
    """
    draw = torch.Generator().manual_seed(0)
    table = codes.numbers(code)
    table = table[table.isfinite()].sort().values
    exact = torch.cat((table, (table[1:] + table[:-1]) / 2, torch.tensor([0.0, -0.0, 1e-45], device="cpu")))
    width = block - 1
    rows = torch.nn.functional.pad(exact, (0, -len(exact) % width)).view(-1, width)
    halves = torch.cat((torch.full((len(rows), 1), code.most, device="cpu"), rows), 1)  # whose scale is 1
    powers = torch.arange(-46, 39, dtype=torch.float64, device="cpu")[:, None]
    random = torch.randn(len(powers), block, generator=draw, dtype=torch.float64, device="cpu") * 10**powers
    flat = torch.cat((halves.view(-1), torch.zeros(block, device="cpu"), random.view(-1), torch.ones(1, device="cpu")))
    max_value = torch.finfo(dtype).max
    finite = torch.stack((flat, -flat.flip(0))).clamp(-max_value, max_value).to(dtype)
    wild = finite[:, -4 * block - 1 :].clone()
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        wild[:, i * block] = value
    return finite.to(device), wild.to(device)


def coded_samples(code: Code, block: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Codes `[2, bytes]` and scales `[2, blocks]` on which a decoder has to equal its twin, and a count of numbers.

    Each code has scales of any size; the last block has one number.
    """
    draw = torch.Generator().manual_seed(0)
    exponents = torch.arange(-46, 39, dtype=torch.float64, device="cpu")
    halves = [1 + n * 2.0**-bits for bits in (8, 11) for n in (1, 3)]  # between two numbers of 16 bits
    special = torch.tensor([*halves, 0.0, torch.inf, torch.nan, 1.0], dtype=torch.float64, device="cpu")
    scales = torch.cat((torch.rand(len(exponents), generator=draw, device="cpu") * 10**exponents, special))
    scales = scales.to(torch.float32).repeat(max(1, 2**12 // block // len(scales)))
    numel = (len(scales) - 1) * block + 1
    of_codes = torch.randint(256, (2, -(-numel * code.bits // 8)), generator=draw, dtype=torch.uint8, device="cpu")
    return of_codes.to(device), torch.stack((scales, scales)).to(device), numel


# --- quantized parameters ---


class Tables(NamedTuple):
    """The tables of a code for kernels: `numbers [2 ** bits]`, sorted `bounds`, and codes in order.

    `whole` is whether codes are whole numbers, `fraction` the bits of fraction if codes are 8-bit floats, otherwise 0.
    """

    numbers: Tensor
    bounds: Tensor
    order: Tensor
    bits: int
    whole: bool
    fraction: int


@devices.cached
def tables(code: Code, device: torch.device) -> Tables:
    """The tables of a code on a device."""
    with torch.inference_mode(False), torch.no_grad():
        numbers = codes.numbers(code).contiguous()
        sorted, order = numbers.sort()
        bounds = codes.midpoints(sorted, code.keeps)
        fraction, is_integer = _FRACTIONS.get(code.name, 0), code.name in ("int4", "int8")
        order = order.to(device, torch.uint8)
        return Tables(numbers.to(device), bounds.to(device), order, code.bits, is_integer, fraction)


_FRACTIONS = {"fp8_e4m3": 3, "fp8_e5m2": 2}


def encode(x: Tensor, into: Tensor, code: Code, block: int, min_magnitude: float) -> Tensor:
    """Writes the codes of `[..., numel]` to bytes; returns the largest magnitude of each block, `[..., blocks]`.

    Numbers are divided by their block's largest magnitude, or by `min_magnitude` if that is larger, times the
    code's largest number.
    """
    kernels = _kernels()
    tops = x.new_empty(*x.shape[:-1], -(-x.shape[-1] // block), dtype=torch.float32)
    with torch.accelerator.device_index(x.device.index):
        matrices = _matrix(x), _matrix(into), _matrix(tops)
        kernels.encode(*matrices, tables(code, x.device), min_magnitude, code.most, block)
    return tops


def decode(of_codes: Tensor, scales: Tensor, numel: int, dtype: torch.dtype, code: Code, block: int) -> Tensor:
    """The numbers of bytes, times `scales [..., blocks]`: `[..., numel]` in a dtype."""
    out = scales.new_empty(*scales.shape[:-1], numel, dtype=dtype)
    with torch.accelerator.device_index(scales.device.index):
        rows = [_matrix(x) for x in (of_codes, scales.contiguous(), out)]
        _kernels().decode(*rows, tables(code, out.device), block)
    return out


def _kernels() -> Any:
    from shardfn.quant import kernels  # imports Triton, which only CUDA devices need

    return kernels


def _matrix(x: Tensor) -> Tensor:
    return x[None] if x.ndim == 1 else x
