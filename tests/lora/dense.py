"""What adapters mean: the module with the sums in the places of its weights, on one process."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import functional_call

from shardfn import lora
from shardfn.interop import Functional
from shardfn.mesh.spec import joined
from tests.interop import zoo

Named = dict[str, Tensor]


def summed(weight: Tensor, adapter: lora.Adapter) -> Tensor:
    """The whole matrix, or one for each expert."""
    recipe = adapter.recipe
    scale = recipe.alpha / (recipe.rank**0.5 if recipe.rslora else recipe.rank)
    if recipe.kind in ("experts", "turned_experts"):
        a = adapter.a.reshape(len(weight), -1, adapter.a.shape[1])
        b = adapter.b.reshape(adapter.b.shape[0], -1, len(weight))
        return weight + scale * torch.einsum(f"ore,eri->{'eoi' if recipe.kind == 'experts' else 'eio'}", b, a)
    turned = recipe.kind in ("conv1d", "embedding")
    own = weight.T if turned else weight
    found = own + scale * adapter.b @ adapter.a
    if adapter.magnitude is not None:
        found = found * (adapter.magnitude / torch.linalg.norm(found.detach(), dim=1))[:, None]
    return found.T if turned else found


def weights(base: Named, names: dict[str, str], adapters: Any) -> Named:
    """Parameters by all of their names, with adapters."""
    found = {alias: base[name] for alias, name in names.items()}
    for stage, part in adapters.items():
        for name, one in part.items():
            path = joined(stage, name)
            adapted = isinstance(one, lora.Adapter)
            path = f"{path}.weight" if adapted and path not in found else path
            found[path] = summed(found[path], one) if adapted else one
    return found


def loss(name: str, module: Any, base: Named, model: Functional, adapters: Any, batch: zoo.Batch) -> Tensor:
    """Of a module that has no adapters."""
    values = weights(base, model.names, adapters)
    total, count = zoo.ZOO[name].loss(functional_call(module, values, (), batch, tie_weights=False), batch)
    return total / count


def drawn(adapters: Any, seed: int = 7) -> Any:
    """The same adapters with other numbers, none of which is zero."""
    draw = torch.Generator().manual_seed(seed)
    return optree.tree_map(lambda x: x + torch.randn(x.shape, generator=draw, dtype=x.dtype) / 4, adapters)
