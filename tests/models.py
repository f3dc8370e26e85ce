"""Toy models for tests, with their parameters, meshes, strategies, ways to compute a gradient, and differences.

A model is an embedding, a sequence of blocks, and a head; most tests use only the blocks. All numbers are in float64,
where a program on shards agrees with one process up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import shardfn as sf
from shardfn.checkpoint.tensor_bytes import as_bytes
from tests.reference import worst

DATA = ("replica", "shard")
WIDTH, HIDDEN, VOCABULARY = 4, 5, 11

STRATEGIES: dict[str, sf.Placement] = {
    "ddp": sf.ddp(DATA),
    "zero1": sf.strategies.zero1(DATA),
    "shard_grad_op": sf.strategies.shard_grad_op(DATA),
    "full_shard": sf.full_shard(DATA),
    "hybrid_shard": sf.hybrid_shard(shard="shard", replica="replica"),
    "hybrid_shard_zero2": sf.strategies.hybrid_shard_zero2(shard="shard", replica="replica"),
    "hfsdp": sf.strategies.hfsdp(shard="shard", replica="replica"),
    "hpz": sf.strategies.hpz(shard="shard", replica="replica"),
    "mics": sf.strategies.mics(("shard", "replica")),
}


# --- parameters ---


def normal(*shape: int, seed: int) -> Tensor:
    """Normally distributed numbers with mean 0 and standard deviation 1/2."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2


def drawn(seed: int, scale: float = 1.0) -> Callable[..., Tensor]:
    """A function that draws tensors of given shapes, one after another."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of some shapes, as `drawn` draws them."""
    draw = drawn(seed)
    return [draw(*shape) for shape in shapes]


def blocks(depth: int, width: int = WIDTH) -> list[dict[str, Tensor]]:
    """Parameters for `block`."""
    shapes = {"w": (width, HIDDEN), "b": (HIDDEN,), "v": (HIDDEN, width)}
    return [
        {name: normal(*shape, seed=10 * (k + 1) + i) for k, (name, shape) in enumerate(shapes.items())}
        for i in range(depth)
    ]


def squares(depth: int, width: int = WIDTH) -> list[dict[str, Tensor]]:
    """Parameters for `layer` and `residual`."""
    return [{"w": normal(width, width, seed=2 * i), "b": normal(width, seed=2 * i + 1)} for i in range(depth)]


def params(depth: int = 4, width: int = WIDTH) -> dict[str, Any]:
    """Parameters for an embedding, blocks and a head."""
    return {
        "embed": {"e": normal(VOCABULARY, width, seed=1)},
        "blocks": blocks(depth, width),
        "head": {"o": normal(width, 3, seed=2)},
    }


def scaled(depth: int = 3, width: int = 6) -> dict[str, Any]:
    """Parameters for `scaled_loss`, whose last stage is one tensor, not a dictionary."""
    return {
        "embed": {"e": normal(VOCABULARY, width, seed=1)},
        "blocks": blocks(depth, width),
        "scale": normal(width, seed=3),
    }


# --- functions of one stage's parameters, and a model of them ---


def embed(p: Any, tokens: Tensor) -> Tensor:
    return p["e"][tokens]


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"]) @ p["v"]


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def residual(p: Any, x: Tensor) -> Tensor:
    return x + layer(p, x)


def head(p: Any, x: Tensor) -> Tensor:
    return x @ p["o"]


def plainly(f: Any = None, **_: Any) -> Any:
    """Replaces `sf.stage`: returns the function itself."""
    return f


def scaled_loss(stage: Any, ps: Any, tokens: Tensor, **options: Any) -> Tensor:
    """The sum of the losses of these rows, `[rows, 4]`."""
    x = stage(embed)(ps["embed"], tokens)
    f = stage(block, **options)
    for p in sf.layers(ps["blocks"]):
        x = f(p, x)
    return stage(torch.mul)(ps["scale"], x).square().sum()


def token_rows(n: int) -> Tensor:
    """Random tokens `[n, 4]`."""
    return torch.randint(0, VOCABULARY, (n, 4), generator=torch.Generator().manual_seed(n))


def everyone(f: Callable[[Any, int], Tensor], n: int) -> Callable[[Any], Tensor]:
    """The sum of all ranks' losses; its gradient is that of sharded parameters."""
    return lambda ps: torch.stack([f(ps, rank) for rank in range(n)]).sum()


# --- meshes of this process's world ---


@functools.cache
def mesh_of(**sizes: int) -> Any:
    """A cached mesh, since process groups are slow to make; not for ranks that are threads."""
    return sf.make_mesh(device="cpu", **sizes)


def data_mesh(n: int) -> Any:
    """A mesh with the two axes `DATA`: 2 x 2 for 4 ranks, otherwise all ranks along `shard`."""
    return sf.make_mesh(device="cpu", replica=2 if n == 4 else 1, shard=n // 2 if n == 4 else n)


def sharded_trees(strategy: str, *trees: Any) -> tuple[Any, ...]:
    """A mesh of all ranks with the two axes `DATA`, and trees that are cut by one of `STRATEGIES`."""
    mesh = data_mesh(dist.get_world_size())
    return mesh, *(sf.shard(tree, mesh, STRATEGIES[strategy]) for tree in trees)


# --- ways to compute a gradient: `(loss, flat) -> (value, gradient)` ---


def copied(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def variables(tree: Any) -> Any:
    """Copies that are autograd leaves and require gradients."""
    return optree.tree_map(lambda x: x.clone().requires_grad_(), tree)


def gradients(leaves: Any) -> Any:
    """The gradients that `backward` has left on leaves; zeros for leaves without one."""
    return optree.tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, leaves)


def by_value_and_grad(loss: Any, flat: Any) -> Any:
    return sf.value_and_grad(loss)(flat)


def by_backward(loss: Any, flat: Any) -> Any:
    leaves = variables(flat)
    value = loss(leaves)
    value.backward()
    return value.detach(), gradients(leaves)


def by_torch_func(loss: Any, flat: Any) -> Any:
    gradient, value = torch.func.grad_and_value(loss)(flat)
    return value, gradient


ENGINES = [by_value_and_grad, by_backward, by_torch_func]


# --- trees ---


def leaves(tree: Any) -> dict[str, Tensor]:
    """The leaves of a tree by their paths."""
    paths, values, _ = optree.tree_flatten_with_path(tree)
    return {".".join(map(str, path)): x for path, x in zip(paths, values, strict=True)}


def zeros(tree: Any) -> Any:
    """A tree of the same kinds with zeros."""
    return optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else type(x)(), tree)


def same(got: Any, want: Any) -> bool:
    """Whether two trees are one bit for bit, in structure, kinds, shapes and dtypes."""
    (a, one), (b, other) = optree.tree_flatten(got), optree.tree_flatten(want)
    return one == other and all(map(_same, a, b))


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return type(x) is type(y) and bool(x == y)
    return (x.shape, x.dtype) == (y.shape, y.dtype) and torch.equal(as_bytes(x), as_bytes(y))


# --- differences ---


def distance(got: Any, want: Any, floor: float | None = None) -> float:
    """The largest difference between two trees of the same structure; nan if any difference is nan.

    Args:
        got: a tree of tensors and numbers.
        want: a tree with the same structure, shapes and dtypes.
        floor: if given, differences are relative to the largest number of each leaf, or to this, if it is larger.
    """
    (a, one), (b, other) = optree.tree_flatten(got), optree.tree_flatten(want)
    assert one == other, (one, other)
    return worst([0.0, *(_apart(x, y, floor) for x, y in zip(a, b, strict=True))])


def _apart(x: Any, y: Any, floor: float | None) -> float:
    if not isinstance(x, Tensor):
        return abs(x - y)
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    if not x.numel():
        return 0.0
    off = (x - y).abs().max()
    return (off if floor is None else off / y.abs().max().clamp(min=floor)).item()


def in_forward_mode(f: Any, inputs: Any, tangents: Any, mode: Any) -> list[tuple[Tensor, Tensor | None]]:
    """The value of `f(*inputs[:-1])` and the gradients at the cotangent `inputs[-1]`, each with its tangent.

    As stages in `sf.jvp` take them: in a vjp of pairs. No tangent is None.
    """
    transform: Any = torch.func.vjp
    with forward_ad.dual_level(), mode:
        *pairs, ct = [x if t is None else forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        y, pull = transform(f, *pairs)
        return [(x.primal, x.tangent) for x in map(forward_ad.unpack_dual, (y, *pull(ct)))]


class Halved(torch.autograd.Function):
    """Its own derivative in forward mode, too; backward gets zeros where there is no gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return Halved.apply(ct)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return Halved.apply(t)
