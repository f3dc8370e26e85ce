"""A number for the bits of a tensor, made on its device without a wait."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_WORDS = 2**18  # at a time, so that little memory is needed
_STEP = 0x1E3779B97F4A7C15  # odd, so that what came before is never lost


def bits(x: Tensor) -> Tensor:
    """0-d int64: the same for the same shape and bytes, and for others but for odds of about 1 in 2^60."""
    if not ordinary(x):
        total = torch.full((), 17, dtype=torch.int64, device=x.device)
        for part in parts(x):
            total = total * _STEP + bits(part)
        return total
    data = x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    words = data[: len(data) // 8 * 8]
    if words.storage_offset() % 8:
        words = words.clone()
    total = torch.full((), _of_shape(x), dtype=torch.int64, device=x.device)
    for some in words.view(torch.int64).split(_WORDS):
        total = total * _STEP + _sum(some)
    rest = data[len(words) :]
    return total * _STEP + _sum(rest.long()) if len(rest) else total


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


def constant(x: Tensor) -> Tensor:
    """0-d bool: whether all elements are the same."""
    if not ordinary(x):
        return torch.zeros((), dtype=torch.bool, device=x.device)
    flat = x.detach().reshape(-1)
    return (flat == flat[:1]).all() if flat.numel() else torch.ones((), dtype=torch.bool, device=x.device)


def _sum(words: Tensor) -> Tensor:
    # A mix before the sum: what two places exchange must not cancel out.
    mixed = words ^ (words >> 29)
    return (mixed * _odd(words.device)[: len(words)]).sum()


@functools.lru_cache(maxsize=16)
def _odd(device: torch.device) -> Tensor:
    weights = torch.arange(1, 2 * _WORDS, 2, device=device, dtype=torch.int64)
    return weights * _STEP | 1


def _of_shape(x: Tensor) -> int:
    found = 17
    for n in x.shape:
        found = (found * 1000003 + n) % 2**62
    return found
