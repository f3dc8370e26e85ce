"""What a stage's function keeps, hands out or closes over behind the engine's back: right, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.testing import World
from tests.reference import worst

DEPTH, ROWS, D = 5, 3, 4
Layer = Callable[[Any, Tensor], Tensor]


def plain(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def parameters() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2

    return [{"w": normal(D, D), "b": normal(D)} for _ in range(DEPTH)]


def rows(rank: int) -> Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def net(layer: Layer, blocks: Any, x: Tensor) -> Tensor:
    for p in blocks:
        x = layer(p, x)
    return x.square().sum()


def everyone(layer: Layer, n: int, frozen: bool) -> Any:
    """The gradient of the sum of all ranks' losses, by plain autograd on one process."""
    whole = optree.tree_map(lambda x: x.clone().requires_grad_(), parameters())
    for p in whole if frozen else []:
        p["w"].requires_grad_(False)
    torch.stack([net(layer, whole, rows(k)) for k in range(n)]).sum().backward()
    return optree.tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, whole)


def distance(got: Any, want: Any) -> float:
    return worst(
        [0.0, *((a - b).abs().max().item() for a, b in zip(*map(optree.tree_leaves, (got, want)), strict=True))]
    )


# --- backward reads parameters that nobody saw saved ---


class KeepsOnContext(torch.autograd.Function):
    """As bitsandbytes' `MatMul4Bit` does: the weight is an attribute, not a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g @ ctx.w.T, None


class KeepsAView(KeepsOnContext):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w.T.contiguous().T if w.shape[0] == 1 else w.T.T
        return x @ w


def keeps_on_context(p: Any, x: Tensor) -> Tensor:
    return KeepsOnContext.apply(x, p["w"].detach()) + p["b"] * x


def keeps_a_view(p: Any, x: Tensor) -> Tensor:
    return KeepsAView.apply(x, p["w"].detach()) + p["b"] * x


def checkpointed(p: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: plain(p, x), x, use_reentrant=False)


def checkpointed_anew(p: Any, x: Tensor) -> Tensor:
    return checkpoint(plain, p, x + 0, use_reentrant=True) if x.requires_grad else plain(p, x)


def under_hooks(p: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return plain(p, x)


def under_low_level_hooks(p: Any, x: Tensor) -> Tensor:
    torch._C._autograd._push_saved_tensors_default_hooks(lambda t: [t], lambda kept: kept[0])
    try:
        return plain(p, x)
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def on_cpu(p: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return plain(p, x)


def hooked(p: Any, x: Tensor) -> Tensor:
    y = x + p["b"]
    y.register_hook(lambda g: g @ p["w"].detach())
    return y


def hooked_at_a_node(p: Any, x: Tensor) -> Tensor:
    y = x * 1 + p["b"]
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda given, _: tuple(None if g is None else g * p["b"].detach().sum() for g in given))
    return y


def hooked_parameter(p: Any, x: Tensor) -> Tensor:
    if p["b"].requires_grad:
        p["b"].register_hook(lambda g: g * p["w"].detach().sum())
    return x + p["b"]


def differentiated_inside(p: Any, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda z: plain(p, z).square().sum())(x)


def cyclic(p: Any, x: Tensor) -> Tensor:
    cycle: list[Any] = [p["w"]]
    cycle.append(cycle)  # nobody frees it before the garbage collector comes
    return x + p["b"]


READING: dict[str, Layer] = {
    f.__name__: f
    for f in (
        plain, keeps_on_context, keeps_a_view, checkpointed, checkpointed_anew, under_hooks, under_low_level_hooks,
        on_cpu, hooked, hooked_at_a_node, hooked_parameter, differentiated_inside, cyclic,
    )
}  # fmt: skip
STRATEGIES: dict[str, Callable[[], Any]] = {
    "full_shard": lambda: sf.full_shard(("replica", "shard")),
    "zero2": lambda: sf.zero2(("replica", "shard")),
    "hybrid_shard": lambda: sf.hybrid_shard("shard", "replica"),
    "hpz": lambda: sf.hpz("shard", "replica"),
}


def read(strategy: str, options: dict[str, Any]) -> dict[str, float]:
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = sf.make_mesh(replica=2 if n == 4 else 1, shard=2, device="cpu")
    found: dict[str, float] = {}
    for name, function in READING.items():
        for frozen in (False, True):
            if frozen and name == "checkpointed_anew":
                continue  # torch's own wants an input that needs a gradient
            want = everyone(function, n, frozen)
            flat = sf.shard(parameters(), mesh, STRATEGIES[strategy](), frozen=[r"\d+\.w"] if frozen else [])
            staged = sf.stage(function, **options)

            def loss(blocks: Any, staged: Any = staged) -> Tensor:
                return net(staged, sf.layers(blocks), rows(rank))

            got = [sf.unshard(sf.grad(loss)(flat)) for _ in range(2)]
            leaves = optree.tree_map(lambda v: v.clone().requires_grad_(), flat)
            loss(leaves).backward()
            got.append(sf.unshard(optree.tree_map(lambda v: v.grad, leaves)) if not frozen else got[0])
            for one in got:
                for g, w in zip(one, want, strict=True):
                    pairs = [(g[k], w[k]) for k in w if not (frozen and k == "w")]
                    off = worst((a - b).abs().max().item() for a, b in pairs)
                    found[f"{name} {frozen}"] = max(found.get(f"{name} {frozen}", 0.0), off)
    return found


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"prefetch": 0}], ids=str)
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        ((2, "processes"), "full_shard"),
        ((2, "processes"), "zero2"),
        ((4, "threads"), "hybrid_shard"),
        ((4, "threads"), "hpz"),
    ],
    indirect=["world"],
    ids=["full_shard", "zero2", "hybrid_shard", "hpz"],
)
def test_backward_reads_parameters_wherever_the_function_keeps_them(
    world: World, strategy: str, options: dict[str, Any]
) -> None:
    for found in world.run(read, strategy, options):
        assert worst(found.values()) < 1e-12, {name: off for name, off in found.items() if not off < 1e-12}
