"""EK-FAC and influence: right beside dense matrices by their definition, and alike on any mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import curvature as sc
from shardfn.testing import World
from tests.models import STRATEGIES, data_mesh, normal
from tests.reference import worst

WORDS, D, H, T, CLASSES, ROWS = 7, 4, 5, 3, 3, 8
DATA = ("replica", "shard")
DAMPING = 1e-2
SIZES = [pytest.param(n, marks=pytest.mark.world(n, "processes")) for n in (1, 2, 4)]
two = pytest.mark.world(2, "processes")
Layer = Callable[[Any, Tensor], Tensor]


def whole() -> Any:
    shapes = {"a": (H, D), "s": (H,), "b": (H, D), "g": (D,)}
    layers = [{name: normal(*shape, seed=10 * i + k) for k, (name, shape) in enumerate(shapes.items())}
              for i in range(2)]  # fmt: skip
    return {"embed": {"e": normal(WORDS, D, seed=91)}, "head": {"w": normal(D, CLASSES, seed=92)}, "layers": layers}


def rows(batch: int, n: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(batch)
    return torch.randint(0, WORDS, (n, T), generator=draw), torch.randint(0, CLASSES, (n,), generator=draw)


def plainly(f: Any) -> Any:
    return f


class Met:
    """Records the inputs of each matrix, and has zeros added to its outputs, of which gradients can be taken."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.added: dict[str, Tensor] = {}

    def __call__(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        self.inputs[path] = x.detach()
        self.added[path] = torch.zeros_like(y, requires_grad=True)
        return y + self.added[path]


def net(stage: Any, params: Any, tokens: Tensor, met: Any = lambda _, __, y: y) -> Tensor:
    def layer(p: Any, x: Tensor, i: Any = None) -> Tensor:
        h = met(f"layers.{i}.a", x, F.linear(x, p["a"])) + p["s"]
        return x + p["g"] * met(f"layers.{i}.b", torch.tanh(h), torch.tanh(h) @ p["b"])

    embed = stage(lambda p, t: F.embedding(t, p["e"]))
    x = met("embed.e", (tokens[..., None] == torch.arange(WORDS)).double(), embed(params["embed"], tokens))
    if stage is plainly:
        for i, p in enumerate(params["layers"]):
            x = layer(p, x, i)
    else:
        f = stage(layer)
        for p in sf.layers(params["layers"]):
            x = f(p, x)
    z = stage(lambda p, x: x @ p["w"])(params["head"], x)
    return met("head.w", x, z).sum(1)


def losses_of(stage: Any) -> Any:
    def losses(params: Any, t: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(stage, params, t), y, reduction="none")

    return losses


# --- the same, as dense matrices ---


def leaves(tree: Any) -> dict[str, Tensor]:
    paths, values, _ = optree.tree_flatten_with_path(tree)
    return {".".join(map(str, path)): x for path, x in zip(paths, values, strict=True)}


@functools.cache
def each() -> dict[str, Tensor]:
    """Every row's gradient."""
    grads = torch.func.vmap(torch.func.grad(lambda p, t, y: losses_of(plainly)(p, t[None], y[None])[0]), (None, 0, 0))
    return leaves(grads(whole(), *(torch.cat(xs) for xs in zip(rows(0), rows(1), strict=True))))


@functools.cache
def factors() -> dict[str, tuple[Tensor, Tensor]]:
    """For each matrix the mean of its inputs' outer products, and the mean over rows of those of outputs' gradients."""
    t, y = (torch.cat(xs) for xs in zip(rows(0), rows(1), strict=True))
    met = Met()
    F.cross_entropy(net(plainly, whole(), t, met), y, reduction="sum").backward()
    found = {}
    for path, added in met.added.items():
        a, g = met.inputs[path].flatten(0, 1), added.grad.flatten(0, 1)  # type: ignore[union-attr]
        found[path] = a.T @ a / len(a), g.T @ g / len(t)
    return found


@functools.cache
def dense(corrected: bool = True, diagonal: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The matrix of each parameter, by the definition."""
    found = {}
    for path, g in each().items():
        pair = factors().get(path)
        if pair is None or path in diagonal:
            found[path] = g.flatten(1).square().mean(0).diag()
            continue
        (u, left), (v, right) = (torch.linalg.eigh(x) for x in pair)
        if path == "embed.e":
            u, left = pair[0].diagonal(), torch.eye(WORDS, dtype=torch.float64)
        if path.endswith(".a"):  # its rows are outputs
            u, left, v, right = v, right, u, left
        basis = torch.kron(left.contiguous(), right.contiguous())
        values = (g.flatten(1) @ basis).square().mean(0) if corrected else torch.kron(u.contiguous(), v)
        found[path] = basis @ values.diag() @ basis.T
    return found


def vector() -> Any:
    return optree.tree_map(lambda x: x.cos(), whole())


def off(tree: Any, want: dict[str, Tensor]) -> float:
    got = leaves(sf.unshard(tree))
    assert got.keys() == want.keys()
    return max(float((got[k] - want[k]).abs().max() / want[k].abs().max()) for k in want)


def times(matrices: dict[str, Tensor], f: Any) -> dict[str, Tensor]:
    return {path: f(matrices[path], x.flatten()).view_as(x) for path, x in leaves(vector()).items()}


def inverted(m: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.solve(m + DAMPING * torch.eye(len(m), dtype=m.dtype), x)


# --- products and solutions ---


def mine(mesh: Any) -> list[tuple[Tensor, Tensor]]:
    n, k = mesh.size(), mesh.get_rank()
    return [tuple(x.tensor_split(n)[k] for x in rows(batch)) for batch in (0, 1)]  # type: ignore[misc]


def applied(strategy: str, **options: Any) -> list[float]:
    mesh = data_mesh(dist.get_world_size())
    params = sf.shard(whole(), mesh, STRATEGIES[strategy])
    v = sf.shard(vector(), mesh, STRATEGIES[strategy])
    F = sc.ekfac(losses_of(sf.stage), params, mine(mesh), **options)
    want = dense(options.get("corrected", True), tuple(options.get("diagonal", ())))
    assert F.rows == 2 * ROWS
    return [off(F @ v, times(want, torch.mv)), off(F.solve(v, DAMPING), times(want, inverted))]


@pytest.mark.parametrize("world", SIZES, indirect=True)
@pytest.mark.parametrize("options", [{}, {"corrected": False}, {"diagonal": ["embed.e", "layers.1.a"]}],
                         ids=["ekfac", "kfac", "diagonal"])  # fmt: skip
def test_products_and_solutions_are_those_of_the_dense_matrix(world: World, options: dict[str, Any]) -> None:
    for found in world.run(applied, "full_shard", **options):
        assert worst(found) < 1e-9, found


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy(world: World, strategy: str) -> None:
    for found in world.run(applied, strategy):
        assert worst(found) < 1e-9, found
