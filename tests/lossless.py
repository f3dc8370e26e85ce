"""A format without loss: programs that send values in it give the same results as without a format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfn.quant.formats import Format


class Lossless(Format):
    """Every number in 64 bits."""

    def __reduce__(self) -> Any:
        return Lossless, (self.name, self.block)

    def nbytes(self, numel: int) -> int:
        return 8 * numel

    def encode(self, x: Tensor) -> Tensor:
        return x.detach().double().contiguous().view(torch.uint8)

    def decode(self, packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        assert packed.shape[-1] == 8 * numel
        return packed.clone(memory_format=torch.contiguous_format).view(torch.float64).to(dtype)


LOSSLESS = Lossless("lossless", 2)
WIRES = {
    "no": {},
    "gather": {"gather_format": LOSSLESS},
    "reduce": {"reduce_format": LOSSLESS},
    "both": {"gather_format": LOSSLESS, "reduce_format": LOSSLESS},
}
