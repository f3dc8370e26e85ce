"""A number for the bits of a tensor, made on its device without a wait and without a copy."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_ON_CPU, _ON_DEVICE = 2**15, 2**18  # words at a time, so that little memory is needed; a core's own cache holds it
_TF32 = 2.0**-10  # what products of float32 keep on a GPU, by the algorithm that is found to be the fastest there
_UNITS, _UNITS_OF_HALF = 1000, 16  # in the last place: of sums by atomics, the order is another at each run
_STEP = 0x1E3779B97F4A7C15  # odd, so that what came before is never lost


def bits(x: Tensor) -> int | Tensor:
    """The same for the same shape and bytes, and for others but for odds of about 1 in 2^60.

    Of a tensor on a device a 0-d int64 there, for which nobody waits yet. Of one on the CPU a number: a small tensor
    that is kept would split the memory that is freed around it.
    """
    if not ordinary(x):
        total: int | Tensor = 17
        for part in parts(x):
            total = _joined(total, bits(part))
        return total
    total = _of_shape(x)
    for some in pieces(x.detach()):
        total = _joined(total, _mixed(some))
    return total


def whole(values: Sequence[Any]) -> list[int]:
    """Plain numbers, of numbers and 0-d tensors: those on a device are waited for at once."""
    found: list[int] = [0] * len(values)
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(i)
        else:
            found[i] = value
    for places in by_device.values():
        for i, n in zip(places, torch.stack([values[i].long() for i in places]).tolist(), strict=True):
            found[i] = n
    return found


def ordinary(x: Tensor) -> bool:
    """Whether a tensor's numbers lie in its own memory: it is not sparse, nested, quantized or made of others."""
    return x.layout is torch.strided and not (x.is_nested or x.is_quantized or hasattr(x, "__tensor_flatten__"))


def parts(x: Tensor) -> list[Tensor]:
    """The ordinary tensors in which the numbers of any tensor are."""
    x = x.detach()
    if hasattr(x, "__tensor_flatten__"):
        found = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    elif x.is_nested:
        found = list(x.unbind())
    elif x.is_quantized:
        found = [x.int_repr()]
    elif x.layout is torch.sparse_coo:
        whole = x.coalesce()
        found = [whole.indices(), whole.values()]
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        found = [x.crow_indices(), x.col_indices(), x.values()]
    elif x.layout in (torch.sparse_csc, torch.sparse_bsc):
        found = [x.ccol_indices(), x.row_indices(), x.values()]
    elif x.layout is not torch.strided:
        found = [x.to_dense()]
    else:
        return [x]
    return [part for one in found for part in parts(one)]


def constant(x: Tensor) -> bool | Tensor:
    """Whether all elements are the same; of a tensor on a device a 0-d bool there."""
    if not ordinary(x) or not x.numel():
        return ordinary(x)
    first = x.detach()[(slice(0, 1),) * x.ndim].reshape(-1)
    same = ((some == first).all() for some in pieces(x.detach()))
    return all(same) if x.device.type == "cpu" else functools.reduce(torch.logical_and, same)


def rounding(x: Tensor) -> float:
    """The part of its norm by which a tensor may be off where the same was computed once more, or on another rank."""
    eps = torch.finfo(x.dtype).eps
    on_cores = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    if x.device.type == "cuda" and x.dtype in (torch.float32, torch.complex64) and on_cores:
        eps = _TF32
    return eps * (_UNITS_OF_HALF if eps >= _TF32 else _UNITS)


def pieces(x: Tensor) -> Iterator[Tensor]:
    """All elements in order, some at a time: the same ones whatever the strides are, so that no copy is large."""
    most = _words(x.device) * 8 // x.element_size()
    row = math.prod(x.shape[1:])
    if x.numel() <= most:
        if x.numel():
            yield x.resolve_conj().resolve_neg().contiguous().as_strided((x.numel(),), (1,))  # one element may have any
    elif row <= most:
        for some in x.split(most // row):
            yield from pieces(some)
    else:
        for i in range(len(x)):
            yield from pieces(x[i])


def _mixed(some: Tensor) -> int | Tensor:
    """The sum of a few bytes, each word of them mixed by its place: what two places exchange must not cancel out."""
    data = some.view(torch.uint8)
    words = data[: len(data) // 8 * 8]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    mixed = torch.bitwise_right_shift(words, 29, out=_room(words))
    total = mixed.bitwise_xor_(words).mul_(_odd(some.device)[: len(words)]).sum()
    rest = data[words.nbytes :].long()
    total = total + (rest * _odd(some.device)[-len(rest) :]).sum() if len(rest) else total
    return int(total) if some.device.type == "cpu" else total


class _Room(threading.local):
    """Memory to mix words in: made once on each thread, since what is freed between small tensors is split by them."""

    words: Tensor | None = None


_here = _Room()


def _room(words: Tensor) -> Tensor:
    """As large as these words; on a device new, as another stream may still read what was there."""
    if words.device.type != "cpu":
        return torch.empty_like(words)
    if _here.words is None:
        with torch.inference_mode(False):  # outside of which it will be used, too
            _here.words = torch.empty(_ON_CPU, dtype=torch.int64)
    return _here.words[: len(words)]


def _joined(total: int | Tensor, more: int | Tensor) -> int | Tensor:
    """Both, in 64 bits; plain numbers have to be cut to what tensors do by themselves."""
    return _wrapped(_wrapped(total * _STEP) + more)


def _wrapped(n: int | Tensor) -> int | Tensor:
    return n if isinstance(n, Tensor) else (n + 2**63) % 2**64 - 2**63


def _words(device: torch.device) -> int:
    return _ON_CPU if device.type == "cpu" else _ON_DEVICE


@functools.lru_cache(maxsize=16)
def _odd(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _words(device), 2, device=device, dtype=torch.int64) * _STEP | 1


def _of_shape(x: Tensor) -> int:
    found = 17
    for n in x.shape:
        found = (found * 1000003 + n) % 2**62
    return found
