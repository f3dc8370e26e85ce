"""Hashes the bits of a tensor on its device, without synchronization or copies."""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import devices

_ON_CPU, _ON_DEVICE = 2**15, 2**18  # words at a time: little memory, which fits a core's own cache
_TF32 = 2.0**-10  # precision of float32 products on a GPU that uses TF32
_UNITS, _UNITS_OF_HALF = 1000, 16  # tolerance in last places: sums by atomics vary in order
_STEP = 0x1E3779B97F4A7C15  # odd, so that multiplying modulo 2^64 loses no bits


def digest_of(text: bytes) -> int:
    """Returns a 56-bit digest of a text, which fits into an int64 and is the same on every rank."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def bits(x: Tensor) -> int | Tensor:
    """Hashes shape and bytes; different tensors have equal hashes with odds of about 1 in 2^60.

    Returns a 0-d int64 on the device, which is not waited for, or for a tensor on the CPU an int: a small tensor that
    is kept would fragment the memory that is freed around it.
    """
    if not ordinary(x):
        total: int | Tensor = 17
        for part in ordinary_parts(x):
            total = _combine(total, bits(part))
        return total
    total = 17
    for n in x.shape:
        total = (total * 1000003 + n) % 2**62
    for chunk in flat_chunks(x.detach()):
        total = _combine(total, _mix_words(chunk))
    return total


def to_ints(values: Sequence[Any]) -> list[int]:
    """Converts numbers and 0-d tensors to ints, with one synchronization per device."""
    numbers: list[int] = [0] * len(values)
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(i)
        else:
            numbers[i] = value
    for places in by_device.values():
        for i, n in zip(places, torch.stack([values[i].long() for i in places]).tolist(), strict=True):
            numbers[i] = n
    return numbers


def ordinary(x: Tensor) -> bool:
    """Whether a tensor's numbers lie in its own memory: not sparse, nested, quantized or a wrapper of other tensors."""
    return x.layout is torch.strided and not (x.is_nested or x.is_quantized or hasattr(x, "__tensor_flatten__"))


def ordinary_parts(x: Tensor) -> list[Tensor]:
    """Returns the ordinary tensors that hold a tensor's numbers."""
    x = x.detach()
    if hasattr(x, "__tensor_flatten__"):
        inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    elif x.is_nested:
        inner = list(x.unbind())
    elif x.is_quantized:
        inner = [x.int_repr()]
    elif x.layout is torch.sparse_coo:
        coalesced = x.coalesce()
        inner = [coalesced.indices(), coalesced.values()]
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        inner = [x.crow_indices(), x.col_indices(), x.values()]
    elif x.layout in (torch.sparse_csc, torch.sparse_bsc):
        inner = [x.ccol_indices(), x.row_indices(), x.values()]
    elif x.layout is not torch.strided:
        inner = [x.to_dense()]
    else:
        return [x]
    return [part for tensor in inner for part in ordinary_parts(tensor)]


def constant(x: Tensor) -> bool | Tensor:
    """Whether all elements are equal; for a tensor on a device a 0-d bool there."""
    if not ordinary(x) or not x.numel():
        return ordinary(x)
    first = x.detach()[(slice(0, 1),) * x.ndim].reshape(-1)
    same = ((chunk == first).all() for chunk in flat_chunks(x.detach()))
    return all(same) if x.device.type == "cpu" else functools.reduce(torch.logical_and, same)


def rounding(x: Tensor) -> float:
    """Returns the expected relative error of a norm between recomputations or ranks."""
    eps = torch.finfo(x.dtype).eps
    # Where the user has set one of these, torch refuses to tell `allow_tf32`.
    backends: Any = torch.backends
    uses_tf32 = "tf32" in (backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision)
    if x.device.type == "cuda" and x.dtype in (torch.float32, torch.complex64) and uses_tf32:
        eps = _TF32
    return eps * (_UNITS_OF_HALF if eps >= _TF32 else _UNITS)


def flat_chunks(x: Tensor) -> Iterator[Tensor]:
    """Yields all elements in order, in small flat chunks that do not depend on the strides."""
    max_elements = _words(x.device) * 8 // x.element_size()
    row = math.prod(x.shape[1:])
    if x.numel() <= max_elements:
        if x.numel():
            yield x.resolve_conj().resolve_neg().contiguous().as_strided((x.numel(),), (1,))  # one element: any strides
    elif row <= max_elements:
        for rows in x.split(max_elements // row):
            yield from flat_chunks(rows)
    else:
        for i in range(len(x)):
            yield from flat_chunks(x[i])


def _mix_words(chunk: Tensor) -> int | Tensor:
    """Sums the words of a chunk, mixed and weighted by position, so that swapped words differ."""
    data = chunk.view(torch.uint8)
    words = data[: len(data) // 8 * 8]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    mixed = torch.bitwise_right_shift(words, 29, out=_scratch(words))
    total = mixed.bitwise_xor_(words).mul_(_odd(chunk.device)[: len(words)]).sum()
    rest = data[words.nbytes :].long()
    total = total + (rest * _odd(chunk.device)[-len(rest) :]).sum() if len(rest) else total
    return int(total) if chunk.device.type == "cpu" else total


class _Room(threading.local):
    """Scratch memory for mixing words, made once for each thread; allocating it again would fragment memory."""

    words: Tensor | None = None


_here = _Room()


def _scratch(words: Tensor) -> Tensor:
    """Returns scratch for these words; on a device a new tensor, as another stream may still read an old one."""
    if words.device.type != "cpu":
        return torch.empty_like(words)
    if _here.words is None:
        with torch.inference_mode(False):  # it will be used outside of inference mode, too
            _here.words = torch.empty(_ON_CPU, dtype=torch.int64, device="cpu")
    return _here.words[: len(words)]


def _combine(total: int | Tensor, part: int | Tensor) -> int | Tensor:
    """Combines two hashes in 64 bits; ints are wrapped explicitly, as tensors do on their own."""
    return _wrap_int(_wrap_int(total * _STEP) + part)


def _wrap_int(n: int | Tensor) -> int | Tensor:
    return n if isinstance(n, Tensor) else (n + 2**63) % 2**64 - 2**63


def _words(device: torch.device) -> int:
    return _ON_CPU if device.type == "cpu" else _ON_DEVICE


@devices.cached
def _odd(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _words(device), 2, device=device, dtype=torch.int64) * _STEP | 1
