"""Norms of single examples' gradients where an axis cuts the parameters, against vmap of grad on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P, parallel
from shardfn.curvature.per_example import dp_grads, noise_scale, per_example
from shardfn.testing import World
from shardfn.testing import world as shared_world
from tests.curvature.test_per_example import norms_of, off
from tests.models import distance, gradients, normal, plainly, variables
from tests.reference import worst

WORDS, T, D, H = 12, 4, 8, 2
Program = Callable[..., Tensor]
SHAPES = {
    "q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (D, 12), "ub": (12,), "down": (12, D), "db": (D,),
    "n": (D,), "nb": (D,), "gain": (12,), "odd": (D, D),
}  # fmt: skip
SPECS = sf.by_path(
    [
        (r".*\.(q|k|v|up)|head\.w", P(None, "tensor")),
        (r".*\.(o|down|ub|gain)|.*\.e", P("tensor")),
        (r".*", P()),
    ]
)


def whole() -> Any:
    each = [{name: normal(*shape, seed=50 * i + k) for k, (name, shape) in enumerate(SHAPES.items())} for i in range(2)]
    embed = {"e": normal(WORDS, D, seed=991), "p": normal(T, D, seed=990)}
    return {"embed": embed, "layers": each, "head": {"w": normal(D, WORDS, seed=992), "n": normal(D, seed=993)}}


def tokens(rank: int, rows: int = 3) -> Tensor:
    return torch.randint(0, WORDS, (rows, T + 1), generator=torch.Generator().manual_seed(rank))


# --- layers, by what is special about them ---


def heads(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def block(p: Any, x: Tensor, t: Any) -> Tensor:
    h = parallel.to_parallel(F.layer_norm(x, (D,), p["n"], p["nb"]), t)
    q, k, v = (heads(h @ p[name], H // sf.axis_size(t)) for name in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + parallel.from_parallel(y @ p["o"], t)
    h = torch.tanh(parallel.to_parallel(x, t) @ p["up"] + p["ub"])
    return x + parallel.from_parallel(h @ p["down"], t) + p["db"]


def by_linear(p: Any, x: Tensor, t: Any) -> Tensor:
    h = torch.tanh(F.linear(parallel.to_parallel(x, t), p["up"].T, p["ub"])) * p["gain"]
    y = parallel.from_parallel(torch.einsum("btf,fd->btd", h, p["down"]), t)
    return x + F.linear(y, p["odd"], p["db"])


def sequences(p: Any, x: Tensor, t: Any) -> Tensor:
    """Activations between layers are cut along the sequence, and so what an uncut norm meets."""
    x = sf.local_slice(x, t, dim=1)
    n, shift = sf.pvary(p["n"], t), sf.pvary(p["db"], t)
    h = parallel.to_parallel(F.rms_norm(x, (D,), n), t, sequence=1)
    x = x + parallel.from_parallel(torch.tanh(h @ p["up"]) @ p["down"], t, sequence=1) + shift
    return sf.all_gather(x, t, dim=1, to="invariant")


def cut_norms(p: Any, x: Tensor, t: Any) -> Tensor:
    h = parallel.rms_norm(parallel.to_parallel(x, t) @ p["up"], p["gain"], t)
    return x + parallel.from_parallel(h @ p["down"], t)


def cut_here(p: Any, x: Tensor, t: Any) -> Tensor:
    """A weight that no axis cuts is cut by the program."""
    own = sf.local_slice(p["odd"], t, dim=1)
    return x + sf.all_gather(torch.tanh(parallel.to_parallel(x, t) @ own), t, dim=-1, to="invariant")


def gathered(p: Any, x: Tensor, t: Any) -> Tensor:
    """A weight that an axis cuts is made whole by the program."""
    w = sf.all_gather(p["q"], t, dim=1, to="invariant")
    return x + torch.tanh(x @ w) @ w.T


def computed(p: Any, x: Tensor, t: Any) -> Tensor:
    """A weight norm, over what all ranks have of a matrix."""
    squares = sf.psum(p["down"].square().sum(0), t)
    w = p["down"] / sf.pvary(squares.sqrt(), t)
    h = parallel.to_parallel(x, t) @ p["up"]
    return x + parallel.from_parallel(torch.tanh(h) @ w, t)


def moved(p: Any, x: Tensor, t: Any) -> Tensor:
    """Columns change ranks, of the weight and of what is computed."""
    w = sf.all_to_all(p["up"], t, split_dim=0, concat_dim=1)  # [d / size, 12]
    x_here = sf.local_slice(x, t, dim=2)
    h = sf.reduce_scatter(x_here @ w, t, dim=2)
    return x + parallel.from_parallel(torch.tanh(h) @ p["down"], t)


def several(p: Any, x: Tensor, t: Any) -> Tensor:
    for _ in range(2):
        h = parallel.to_parallel(x, t)
        x = torch.tanh(x + parallel.from_parallel((h @ p["up"]) @ p["down"], t))
        x = x + parallel.from_parallel(torch.tanh(h @ p["down"].T) @ p["down"], t)
    return x


def deciding(p: Any, x: Tensor, t: Any) -> Tensor:
    rows = [block(p, row[None], t)[0] if row.sum() > 0 else row @ p["odd"] for row in x]
    return torch.stack(rows)


LAYERS = {f.__name__: f for f in (
    block, by_linear, sequences, cut_norms, cut_here, gathered, computed, moved, several, deciding,
)}  # fmt: skip


def losses_of(stage: Any, layer: Any, t: Any = (), tied: bool = False, **options: Any) -> Program:
    def embed(p: Any, tokens: Tensor) -> Tensor:
        return parallel.embedding(tokens, p["e"], t) + p["p"]

    def head(p: Any, x: Tensor, targets: Tensor) -> Tensor:
        return parallel.cross_entropy(F.rms_norm(x, (D,), p["n"]), p["w"], targets, t).sum(1)

    def tied_head(p: Any, x: Tensor, targets: Tensor) -> Tensor:
        return parallel.cross_entropy(x, p["e"].T, targets, t).sum(1)

    def losses(params: Any, tokens: Tensor) -> Tensor:
        x = stage(embed)(params["embed"], tokens[:, :-1])
        f = stage(lambda p, x: layer(p, x, t), **options)
        for p in sf.layers(params["layers"]):
            x = f(p, x)
        if tied:
            return stage(tied_head)(params["embed"], x, tokens[:, 1:])
        return stage(head)(params["head"], x, tokens[:, 1:])

    return losses


def alone(losses: Program, params: Any, *batch: Tensor) -> Any:
    """Every row's gradient, on one process."""

    def gradient(*row: Tensor) -> Any:
        leaves = variables(params)
        losses(leaves, *(x[None] for x in row))[0].backward()
        return gradients(leaves)

    return optree.tree_map(lambda *gs: torch.stack(gs), *[gradient(*row) for row in zip(*batch, strict=True)])


def meshes(world: int) -> list[dict[str, int]]:
    return [{"shard": 1, "tensor": 2}] if world == 2 else [{"shard": 2, "tensor": 2}]


def differences(name: str, tied: bool, checked: bool, counts: list[int], micro: int, options: Any) -> list[float]:
    """How far all that there is of rows is from one process."""
    (sizes,) = meshes(dist.get_world_size())
    mesh = sf.make_mesh(device="cpu", **sizes)
    params = sf.shard(whole(), mesh, sf.full_shard("shard"), specs=SPECS)
    direction = optree.tree_map(lambda x: x.cos(), whole())
    parted = sf.shard(direction, mesh, sf.full_shard("shard"), specs=SPECS)
    reference = losses_of(plainly, LAYERS[name], (), tied)
    losses = losses_of(sf.stage, LAYERS[name], "tensor", tied, **options)
    place = mesh.get_local_rank("shard")
    rows = [tokens(k, counts[k % len(counts)]) for k in range(sizes["shard"])]
    each = alone(reference, whole(), torch.cat(rows))
    split = [len(x) for x in rows]
    norms = norms_of(each)
    limit = float(norms.median())
    weights = (limit / norms).clamp(max=1)
    clipped = optree.tree_map(lambda g: torch.einsum("r,r...->...", weights, g), each)
    products = [(g * d).flatten(1).sum(1) for g, d in zip(*map(optree.tree_leaves, (each, direction)), strict=True)]

    def found(params: Any, x: Tensor) -> Any:
        rows = per_example(losses, params, x, micro=micro)
        return rows.values, rows.norms, rows.clipped(limit), rows.dots(parted)

    mapped = sf.shard_map(found, mesh=mesh, in_specs=(..., P("shard")), out_specs=..., check=checked)
    result = []
    for _ in range(2):  # the first call compares
        values, own, summed, dots = mapped(params, rows[place])
        result += [
            off(own, norms.split(split)[place]),
            off(values, reference(whole(), torch.cat(rows)).split(split)[place]),
            distance(sf.unshard(summed), clipped, floor=1.0),
            off(dots, torch.stack(products).sum(0).split(split)[place]),
        ]
        sf.assert_replicated(summed)
    return result


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_cut_parameters(name: str, ranks: int) -> None:
    for tied in (False, True):
        options = {"remat": True} if tied else {}
        for found in shared_world(ranks).run(differences, name, tied, name == "block", [3], 1, options):
            assert worst(found) < 1e-12, (tied, found)
