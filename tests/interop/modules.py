"""Modules of the tests, meshes for them, and what a module does without shardfn on the same rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import shardfn as sf
from shardfn.interop import Functional

Named = dict[str, Tensor]
Call = Callable[..., Any]
WIDTH = 4


def data_mesh(n: int) -> Any:
    return (
        sf.make_mesh(replica=2, shard=n // 2, device="cpu")
        if n == 4
        else sf.make_mesh(replica=1, shard=n, device="cpu")
    )


def meshed(tensor: int = 1) -> Any:
    """All ranks, so many along `tensor`."""
    sizes = {"tensor": tensor} if tensor > 1 else {}
    return sf.make_mesh(shard=dist.get_world_size() // tensor, **sizes, device="cpu")


def mapped(f: Any, mesh: Any, check: bool = True) -> Any:
    return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=..., check=check)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def on_first(run: Callable[[], Any]) -> None:
    """What the first rank does, while others wait."""
    if dist.get_rank() == 0:
        run()
    dist.barrier()


def off(got: Named, want: Named) -> float:
    """The largest difference, relative to the largest number of all."""
    assert got.keys() == want.keys()
    scale = max(float(w.abs().max()) for w in want.values() if w.numel())
    return max(float((got[k] - want[k]).abs().max()) / scale for k in want)


def summed(values: Named) -> Named:
    for x in values.values():
        dist.all_reduce(x)
    return values


def of_module(module: nn.Module, run: Callable[[Call], Tensor]) -> tuple[Tensor, Named]:
    """The value on this rank, and the gradient of the sum over all of them."""
    whole = {k: p.detach().clone().requires_grad_(p.requires_grad) for k, p in module.named_parameters()}
    value = run(lambda *a, **k: functional_call(module, whole, a, k, tie_weights=True))
    moving = [p for p in whole.values() if p.requires_grad]
    found = iter(torch.autograd.grad(value, moving, allow_unused=True))
    grads = {k: next(found) if p.requires_grad else None for k, p in whole.items()}
    return value.detach(), summed(
        {k: torch.zeros_like(whole[k]) if g is None else g.clone() for k, g in grads.items() if whole[k].requires_grad}
    )


def laid(model: Functional, values: Named) -> Any:
    """Values by name, in the structure of the parameters."""
    return {
        key: values[key] if isinstance(part, Tensor) else {k: values[f"{key}.{k}" if key else k] for k in part}
        for key, part in model.tree.items()
    }


def product(gradient: Any, p: Any, tangent: Any, forward_mode: bool) -> Any:
    """Of the Hessian and a tangent."""
    if forward_mode:
        return torch.func.jvp(gradient, (p,), (tangent,))[1]
    pull: Any = torch.func.vjp(gradient, p)[1]
    return pull(tangent)[0]


def backward(loss: Callable[[Any], Tensor]) -> Callable[[Any], Any]:
    """The gradient by autograd's own `backward`, on leaves."""

    def run(params: Any) -> Any:
        leaves = torch.utils._pytree.tree_map(lambda x: x.detach().requires_grad_(), params)
        loss(leaves).backward()
        return torch.utils._pytree.tree_map(lambda x: x.grad, leaves)

    return run


def rows(seed: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(seed + dist.get_rank())
    return torch.randn(6, WIDTH, generator=draw, dtype=torch.float64)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.v(torch.tanh(self.w(x)))
        return found


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclasses.dataclass
class Answer:
    logits: Tensor
    extra: Tensor | None = None
    inner: Any = None


class Block(nn.Module):
    """Answers with a dataclass, or with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, quiet: bool = False) -> Any:
        if quiet:
            return None
        y = torch.tanh(self.w(x))
        return Answer(y, None, [Answer(y * 2), {"name": "twice"}])


class Net(nn.Module):
    """Blocks in an order that its caller chooses, each as often as it says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Any:
        for i in order:
            assert self.blocks[i](x, quiet=True) is None
            x = x + self.blocks[i](x).inner[0].logits
        return Answer(x * self.scale)

    def doubled(self, x: Tensor) -> Tensor:
        found: Tensor = 2 * self(x).logits
        return found


class Fails(Exception):
    pass
