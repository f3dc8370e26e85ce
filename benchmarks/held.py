"""An independent measure of the memory that tensors hold on a device, beside which plans are checked."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardfn.compat import attention
from shardfn.simulated.operations import second


class Tracker(TorchDispatchMode):
    """Measures the device's memory after each operation, by asking of each memory whether it is still there."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.live = device, dict[int, weakref.ref[torch.UntypedStorage]]()
        self.most = self.rounded = 0

    def look(self, tree: Any) -> None:
        for x in optree.tree_leaves(tree):
            if isinstance(x, Tensor) and x.device.type == self.device and x not in second:
                storage = x.untyped_storage()
                self.live[storage._cdata] = weakref.ref(storage)  # torch keeps the object until the memory is freed
        storages = {key: found for key, known in self.live.items() if (found := known()) is not None}
        self.live = {key: self.live[key] for key in storages}
        sizes = [storage.nbytes() for storage in storages.values()]
        self.most = max(self.most, sum(sizes))
        self.rounded = max(self.rounded, sum(-(-n // 512) * 512 for n in sizes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.look(() if func.is_view else (args, out))
        return out


@contextlib.contextmanager
def cudas_attention(kind: str) -> Iterator[None]:
    """A context in which a simulated device has CUDA's kernel of attention in float32, whose numbers the CPU finds."""
    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_efficient_attention"
    library.impl(name, _efficient, "CPU")
    library.impl(f"{name}_backward", _efficient_backward, "CPU")
    try:
        with attention.pretending(kind):
            yield
    finally:
        library._destroy()


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, needs: bool, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, lse = attention.PLAIN.forward(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    like = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)  # heads are laid out beside each other
    seed = torch.zeros((), dtype=torch.int64)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return like.copy_(out), lse if needs else lse[..., :0], seed, seed.clone()


def _efficient_backward(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found = attention.PLAIN.backward(ct, q, k, v, out, lse[..., : q.shape[2]], causal, scale)
    laid = (torch.empty_like(g.transpose(1, 2)).transpose(1, 2).copy_(g) for g in found)
    return *laid, None
