"""Norms, products and clipped sums of single examples' gradients, against vmap of grad on one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import interop
from shardfn.curvature.per_example import PerExample, dp_grads, noise_scale, per_example
from shardfn.testing import World
from shardfn.testing import world as shared_world
from tests.models import STRATEGIES, data_mesh, distance, gradients, normal, plainly, sharded_trees, variables
from tests.reference import worst
from tests.refusals import told

WORDS, T, D, H = 11, 5, 6, 2
Layer = Callable[[Any, Tensor], Tensor]
two = pytest.mark.world(2, "processes")
SHAPES = {
    "up": (D, 8), "down": (8, D), "square": (D, D), "wide": (3 * D, D), "heads": (H, D, D // H), "kernel": (D, D, 3),
    "gain": (D,), "shift": (D,), "table": (T, D), "odd": (D, D), "number": (),
}  # fmt: skip


def whole(seed: int = 0, layers: int = 2) -> Any:
    each = [{name: normal(*shape, seed=1000 * seed + 50 * i + k) for k, (name, shape) in enumerate(SHAPES.items())}
            for i in range(layers)]  # fmt: skip
    embed = {"e": normal(WORDS, D, seed=1000 * seed + 991), "scale": normal(D, seed=1000 * seed + 990)}
    return {"embed": embed, "layers": each, "head": {"w": normal(D, WORDS, seed=1000 * seed + 992)}}


def tokens(rank: int, rows: int = 4) -> Tensor:
    return torch.randint(0, WORDS, (rows, T), generator=torch.Generator().manual_seed(rank))


def losses_of(stage: Any, layer: Layer, tied: bool = False, **options: Any) -> Callable[..., Tensor]:
    def embed(p: Any, t: Tensor) -> Tensor:
        return F.embedding(t, p["e"]) * p["scale"]

    def head(p: Any, x: Tensor) -> Tensor:
        return x @ p["w"]

    def tied_head(p: Any, x: Tensor) -> Tensor:
        return F.linear(x, p["e"])

    def losses(params: Any, t: Tensor) -> Tensor:
        x = stage(embed)(params["embed"], t)
        f = stage(layer, **options)
        for p in sf.layers(params["layers"]):
            x = f(p, x)
        x = torch.tanh(x)
        y = stage(tied_head)(params["embed"], x) if tied else stage(head)(params["head"], x)
        each = F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten(), reduction="none")
        return each.view(len(t), T - 1).sum(1)

    return losses


def alone(losses: Callable[..., Tensor], params: Any, *batch: Tensor) -> Any:
    """Every row's gradient, on one process."""

    def gradient(*row: Tensor) -> Any:
        leaves = variables(params)
        losses(leaves, *(x[None] for x in row))[0].backward()
        return gradients(leaves)

    return optree.tree_map(lambda *gs: torch.stack(gs), *[gradient(*row) for row in zip(*batch, strict=True)])


def norms_of(gradients: Any) -> Tensor:
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in optree.tree_leaves(gradients)]).sum(0).sqrt()


def off(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(((got - want).abs() / want.abs().clamp(1)).max()) if len(want) else 0.0


# --- layers, by what is special about them ---


def mlp(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def linear(p: Any, x: Tensor) -> Tensor:
    return x + F.linear(torch.tanh(F.linear(x, p["square"], p["shift"])), p["odd"], bias=p["gain"])


def normed(p: Any, x: Tensor) -> Tensor:
    return mlp(p, F.layer_norm(x, (D,), p["gain"], p["shift"]))


def rms_normed(p: Any, x: Tensor) -> Tensor:
    return mlp(p, F.rms_norm(x, (D,), 1 + p["gain"]))


def attending(p: Any, x: Tensor) -> Tensor:
    q, k, v = (x @ w.T for w in p["wide"].chunk(3))
    q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + y.transpose(1, 2).flatten(2) @ p["square"]


def by_einsum(p: Any, x: Tensor) -> Tensor:
    q, k = (torch.einsum("btd,hde->bhte", x, w) for w in (p["heads"], 2 * p["heads"]))
    y = torch.einsum("bhst,bthe->bshe", torch.softmax(q @ k.mT, -1), torch.einsum("hde,btd->bthe", p["heads"], x))
    return x + torch.einsum("bshe,hde->bsd", y, p["heads"])


def convolving(p: Any, x: Tensor) -> Tensor:
    return x + F.conv1d(x.mT, p["kernel"], p["shift"], padding=1).mT


def depthwise(p: Any, x: Tensor) -> Tensor:
    return x + F.conv1d(x.mT, p["kernel"][:, :1], padding=2, dilation=2, groups=D).mT


def transposed(p: Any, x: Tensor) -> Tensor:
    return x + (p["square"] @ x.mT).mT @ p["odd"].T.contiguous()


def indexed(p: Any, x: Tensor) -> Tensor:
    h = x @ p["square"][:, ::2] @ p["odd"][[0, 2, 4]]
    return x + h * p["wide"][3, :] + p["table"][1:3].sum(0)


def twice(p: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(x @ p["square"]) + x @ p["square"].T
    return x + F.linear(x, p["square"])


def overlapping(p: Any, x: Tensor) -> Tensor:
    w = p["wide"]
    return x + x @ w[:D] + torch.tanh(x @ w[3 : 3 + D]) @ w[5 : 5 + D].T + w.mean(0) * x


def in_place(p: Any, x: Tensor) -> Tensor:
    h = x @ p["square"]
    h[:, 0] *= p["gain"]
    h += p["shift"]
    return x.clone().add_(h)


def computed(p: Any, x: Tensor) -> Tensor:
    w = p["square"] / p["square"].norm(dim=0, keepdim=True) * p["gain"]  # a weight norm
    return x + x @ w + x @ torch.linalg.matrix_exp(p["odd"] - p["odd"].T) + p["number"] * x


def placed(p: Any, x: Tensor) -> Tensor:
    return mlp(p, x + p["table"][: x.shape[1]])


def joined(p: Any, x: Tensor) -> Tensor:
    first = p["gain"].expand(len(x), 1, D)
    return mlp(p, torch.cat([first, x[:, 1:]], 1) + torch.where(x > 0, p["shift"], p["table"]))


def parameters_alone(p: Any, x: Tensor) -> Tensor:
    return x * sf_constant(p)


def sf_constant(p: Any) -> Tensor:
    return (p["up"] @ p["down"]).sum(0)


class Doubling(torch.autograd.Function):
    """A product whose gradient torch.func cannot map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, (g * x).flatten(0, -2).sum(0)


def by_function(p: Any, x: Tensor) -> Tensor:
    return mlp(p, Doubling.apply(x, p["gain"]))


def deciding(p: Any, x: Tensor) -> Tensor:
    rows = [mlp(p, row) if row.sum() > 0 else row @ p["square"] for row in x]
    return torch.stack(rows)


def packed(p: Any, x: Tensor) -> Tensor:
    """Of another length in each row, which torch's fallback for vmap finds only when it puts rows together."""
    lengths = (x[..., 0] > 0).sum(1).clamp(min=1).cpu()
    flat = torch.nn.utils.rnn.pack_padded_sequence(x @ p["square"], lengths, batch_first=True, enforce_sorted=False)
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(flat, batch_first=True, total_length=x.shape[1])
    return x + torch.tanh(y @ p["odd"])


def routed(p: Any, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    which = (flat @ p["gain"]) > 0
    y = torch.zeros_like(flat)
    for yes, w in ((which, p["square"]), (~which, p["odd"])):
        at = yes.nonzero().flatten()
        y = y.index_add(0, at, torch.tanh(flat[at] @ w))
    return x + y.view(x.shape)


def mapped(p: Any, x: Tensor) -> Tensor:
    return x + torch.func.vmap(lambda row: torch.tanh(row @ p["square"]))(x)


def of_a_gradient(p: Any, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda y: torch.tanh(y @ p["up"]).sum())(x)


def constants(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = p["square"].norm() + (x @ p["square"]).sum((1, 2), keepdim=True)
    return x + torch.tanh(x @ p["odd"]) * scale.detach() * 0.1 + x @ p["square"].detach()


def recurrent(p: Any, x: Tensor) -> Tensor:
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(T):
        h = torch.tanh(h @ p["square"] + x[:, t] @ p["odd"] + p["shift"])
        ys.append(h)
    return torch.stack(ys, 1)


def by_addmm(p: Any, x: Tensor) -> Tensor:
    return x + torch.addmm(p["shift"], x.reshape(-1, D), p["square"]).view(x.shape)


LAYERS = {f.__name__: f for f in (
    mlp, linear, normed, rms_normed, attending, by_einsum, convolving, depthwise, transposed, indexed, twice,
    overlapping, in_place, computed, placed, joined, parameters_alone, by_function, deciding, routed, mapped,
    of_a_gradient, constants, recurrent, by_addmm, packed,
)}  # fmt: skip
UNMAPPABLE = {"by_function", "deciding", "packed", "routed"}  # outside of stages vmap cannot run them


def differences(losses: Any, params: Any, reference: Any, of: Any, rows: list[Tensor], mine: int, **more: Any) -> Any:
    """How far losses, norms and a clipped sum are from those of one process."""
    each = alone(reference, of, torch.cat(rows))
    norms = norms_of(each)
    limit = float(norms.median())
    counts = [len(x) for x in rows]
    want = norms.split(counts)[mine]
    found = per_example(losses, params, rows[mine], **more)
    weights = (limit / norms).clamp(max=1)
    clipped = optree.tree_map(lambda g: torch.einsum("r,r...->...", weights, g), each)
    apart = distance(sf.unshard(found.clipped(limit)), clipped, floor=1.0)
    return [off(found.norms, want), off(found.values, reference(of, torch.cat(rows)).split(counts)[mine]), apart]


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - UNMAPPABLE))
def test_norms_of_one_process(name: str) -> None:
    losses = losses_of(plainly, LAYERS[name])
    for _ in range(2):  # the first call compares
        assert worst(differences(losses, whole(), losses, whole(), [tokens(0)], 0)) < 1e-12


def sharded(name: str, strategy: str, options: dict[str, Any], tied: bool, rows: Any, **more: Any) -> list[float]:
    mesh, params = sharded_trees(strategy, whole())
    losses = losses_of(sf.stage, LAYERS[name], tied, **options)
    reference = losses_of(plainly, LAYERS[name], tied)
    parts = [tokens(k, rows[k % len(rows)]) for k in range(mesh.size())]
    return [
        x for _ in range(2) for x in differences(losses, params, reference, whole(), parts, mesh.get_rank(), **more)
    ]


@two
@pytest.mark.parametrize("name", LAYERS)
def test_norms_in_stages(world: World, name: str) -> None:
    for options in ({}, {"remat": True}):
        for found in world.run(sharded, name, "full_shard", options, False, [4]):
            assert worst(found) < 1e-12, (options, found)


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norms_with_each_strategy(world: World, strategy: str) -> None:
    for options in ({"remat": "offload"}, {"reshard": False, "prefetch": 0}):
        for found in world.run(sharded, "attending", strategy, options, True, [4]):
            assert worst(found) < 1e-12, (options, found)


@two
@pytest.mark.parametrize("name", ["mlp", "twice", "by_function", "deciding"])
def test_parameters_of_several_stages(world: World, name: str) -> None:
    for found in world.run(sharded, name, "full_shard", {}, True, [4]):
        assert worst(found) < 1e-12, found


@two
def test_parts_and_rows_that_differ_between_ranks(world: World) -> None:
    for rows, micro in (([5, 2], 1), ([3, 0], 1), ([4, 3], 3), ([1, 0], 2)):
        for found in world.run(sharded, "normed", "full_shard", {}, True, rows, micro=micro):
            assert worst(found) < 1e-12, (rows, micro, found)


# --- what else a program may do ---


def dropping(p: Any, x: Tensor) -> Tensor:
    return mlp(p, F.dropout(x, 0.4))


def with_dropout(strategy: str, options: dict[str, Any]) -> list[float]:
    """How far norms are from those of gradients through the losses as they are written, with their random numbers."""
    mesh, params = sharded_trees(strategy, whole())
    losses, own = losses_of(sf.stage, dropping, **options), tokens(mesh.get_rank())
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(per_example(losses, params, own).norms)
    drawn = torch.rand(1)
    want = []
    for row in range(len(own)):
        torch.manual_seed(5)
        plain = losses_of(plainly, dropping)
        gradient = torch.func.grad(lambda p, row=row, plain=plain: plain(p, own)[row])(whole())
        want.append(norms_of(optree.tree_map(lambda g: g[None], gradient)))
    assert torch.equal(drawn, torch.rand(1)) or options, "the random numbers that follow are the same"
    return [off(norms, torch.cat(want)) for norms in found]


@two
def test_dropout_draws_what_the_losses_draw(world: World) -> None:
    for options in ({}, {"remat": True}):
        for found in world.run(with_dropout, "full_shard", options):
            assert worst(found) < 1e-12, (options, found)


def beside_stages() -> list[float]:
    """Plain tensors beside shards, which a stage takes too; stages in a list and in a loop."""
    mesh = data_mesh(dist.get_world_size())
    rank, n = mesh.get_rank(), mesh.size()
    plain = {"emb": normal(WORDS, D, seed=70), "gate": normal(D, seed=71), "out": normal(D, 3, seed=72)}
    layer = whole()["layers"][0]
    rows = [tokens(k) for k in range(n)]

    def losses(stage: Any) -> Callable[..., Tensor]:
        f = stage(lambda p, x, gate, y: (attending(p, x * gate), y[0] + 1))

        def run(params: Any, batch: Any, shift: float) -> Tensor:
            x = params["emb"][batch["t"]] + shift
            for _ in range(3):
                x, y = f(params["layer"], x, params["gate"].exp(), [x.sum()])
            z = (x * params["gate"]).mean(1) @ params["out"]
            return (z.square().sum(1) + 0 * y) * batch["w"]

        return run

    both = {"layer": sf.shard({"a": layer}, mesh, STRATEGIES["full_shard"])["a"], **plain}
    batches: list[dict[str, Any]] = [
        {"t": t, "w": torch.linspace(0.5, 2, len(t), dtype=torch.float64), "n": 3} for t in rows
    ]
    own = {"layer": layer, **plain}

    def one(params: Any, t: Tensor, w: Tensor) -> Tensor:
        return losses(plainly)(params, {"t": t[None], "w": w[None]}, 0.5)[0]

    each = [[torch.func.grad(one)(own, t, w) for t, w in zip(b["t"], b["w"], strict=True)] for b in batches]
    stacked = [optree.tree_map(lambda *gs: torch.stack(gs), *gs) for gs in each]
    norms = [norms_of(g) for g in stacked]
    found = per_example(losses(sf.stage), both, batches[rank], 0.5)
    limit = float(torch.cat(norms).median())
    parts = [
        optree.tree_map(lambda g, n=n: torch.einsum("r,r...->...", (limit / n).clamp(max=1), g), g)
        for g, n in zip(stacked, norms, strict=True)
    ]
    want = optree.tree_map(lambda *gs: torch.stack(gs).sum(0), *parts)
    got = found.clipped(limit)
    got = {**got, "layer": sf.unshard(got["layer"])}
    return [off(found.norms, norms[rank]), distance(got, want, floor=1.0)]


@two
def test_tensors_beside_stages(world: World) -> None:
    for found in world.run(beside_stages):
        assert worst(found) < 1e-12, found


@pytest.mark.world(1)
def test_one_rank(world: World) -> None:
    for name, tied in (("attending", True), ("routed", False)):
        assert worst(world.run(sharded, name, "full_shard", {}, tied, [4])[0]) < 1e-12


def in_few_bits(options: dict[str, Any], autocast: bool) -> float:
    mesh, params = sharded_trees("full_shard", optree.tree_map(lambda x: x.float(), whole()))
    own = tokens(mesh.get_rank())
    want = norms_of(alone(losses_of(plainly, attending, True), whole(), own))

    def stage(f: Any, **_: Any) -> Any:
        return sf.stage(f, **options)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = [per_example(losses_of(stage, attending, True), params, own).norms for _ in range(2)]
    return worst([float((got / want - 1).abs().max()) for got in found])


@two
def test_few_bits(world: World) -> None:
    half = torch.bfloat16
    few = {"gather_dtype": half, "reduce_dtype": torch.float32, "input_dtype": half}
    for options, autocast in ((few, False), ({}, True), ({"gather_format": sf.quant.int8()}, False)):
        assert worst(world.run(in_few_bits, options, autocast)) < 0.1
    assert worst(world.run(in_few_bits, {}, False)) < 1e-4


class Model(torch.nn.Module):
    def __init__(self, padding: int | None = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(WORDS, D, padding_idx=padding)
        layer = torch.nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True, dtype=torch.float64)
        self.layers = torch.nn.ModuleList([layer, torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.GELU())])
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


def of_a_module() -> list[float]:
    mesh = data_mesh(dist.get_world_size())
    model = Model()
    reference = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = tokens(mesh.get_rank())

    def one(params: Any, t: Tensor) -> Tensor:
        y = torch.func.functional_call(model, params, (t[None],))
        return F.cross_entropy(y[0], t, reduction="sum")

    want = norms_of(optree.tree_map(lambda *gs: torch.stack(gs), *[torch.func.grad(one)(reference, t) for t in own]))
    forward = interop.functional(Model(), remat=True)
    params = forward.shard(mesh, sf.full_shard(("replica", "shard")))

    def losses(params: Any, t: Tensor) -> Tensor:
        y = forward(params, t)
        return F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none").view(t.shape).sum(1)

    return [off(per_example(losses, params, own).norms, want) for _ in range(2)]


@two
def test_a_module(world: World) -> None:
    assert worst([x for found in world.run(of_a_module) for x in found]) < 1e-12


def communicated() -> Any:
    mesh, params = sharded_trees("full_shard", whole())
    losses, own = losses_of(sf.stage, mlp), tokens(mesh.get_rank())
    per_example(losses, params, own)
    found = []
    for run in (lambda: sf.grad(lambda p: losses(p, own).sum())(params), lambda: per_example(losses, params, own)):
        with sf.collectives.ledger() as log:
            run()
        found.append([entry.op for entry in log.records if entry.scheduled])
        found.append([entry.op for entry in log.records if not entry.scheduled])
    return found


def held_by_norms() -> list[int]:
    """The most bytes of gathered parameters that a gradient has, and norms of rows."""
    mesh = sf.make_mesh(data=2, device="cpu")
    params = sf.shard({"blocks": [{"w": torch.randn(64, 64)} for _ in range(8)]}, mesh, sf.full_shard("data"))
    layer, x, found = sf.stage(lambda p, x: x + torch.tanh(F.linear(x, p["w"]))), torch.randn(4, 64), []

    def losses(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = layer(p, x)
        return x.square().sum(1)

    for run in (lambda: sf.grad(lambda p: losses(p, x).sum())(params), lambda: per_example(losses, params, x).norms):
        for _ in range(3):
            with sf.collectives.ledger() as log:
                run()
        found.append(log.gathered)
    return found


@pytest.mark.world(2)
def test_norms_hold_no_more_parameters_than_a_gradient(world: World) -> None:
    for of_gradient, of_norms in world.run(held_by_norms):
        assert of_norms <= of_gradient


@two
def test_norms_take_the_gathers_of_a_gradient_and_no_reductions(world: World) -> None:
    for gradient, aside, norms, compared in world.run(communicated):
        assert "reduce_scatter" in gradient
        assert (aside, len(compared)) == ([], 1)  # ranks say that they have rows
        assert set(norms) == {"all_gather"}
        assert norms.count("all_gather") <= gradient.count("all_gather") + 1  # frozen stages always gather again


def products() -> list[float]:
    mesh = data_mesh(dist.get_world_size())
    params, v = (sf.shard(whole(seed), mesh, STRATEGIES["full_shard"]) for seed in (0, 1))
    own, plain = tokens(mesh.get_rank()), losses_of(plainly, attending)
    each = alone(plain, whole(), own)
    pairs = zip(optree.tree_leaves(each), optree.tree_leaves(whole(1)), strict=True)
    want = torch.stack([(g * x).reshape(len(g), -1).sum(1) for g, x in pairs]).sum(0)
    return [off(per_example(losses_of(sf.stage, attending), params, own, micro=n).dots(v), want) for n in (1, 2)]


@two
def test_products_with_a_direction(world: World) -> None:
    assert worst([x for found in world.run(products) for x in found]) < 1e-12


# --- private gradients, and noise ---


PRIVATE: dict[str, Any] = {"max_grad_norm": 0.5, "expected_batch_size": 10.0, "seed": 3, "step": 7}


def private(strategy: str, noise: float) -> Any:
    mesh, params = sharded_trees(strategy, whole())
    n = 8 // mesh.size()
    own = tokens(0, 8)[n * mesh.get_rank() : n * (mesh.get_rank() + 1)]
    options = PRIVATE | {"noise_multiplier": noise}
    got = [dp_grads(losses_of(sf.stage, mlp), params, own, micro=micro, **options) for micro in (1, 2)]
    return [sf.unshard(g) for g in got]


def test_private_gradients_are_the_same_on_any_mesh() -> None:
    each = alone(losses_of(plainly, mlp), whole(), tokens(0, 8))
    weights = (0.5 / norms_of(each)).clamp(max=1)
    assert (weights < 1).any()
    exact = optree.tree_map(lambda g: torch.einsum("r,r...->...", weights, g) / 10, each)
    noisy: list[Any] = []
    for n in (1, 2, 4):
        for strategy in ("full_shard", "zero1", "hfsdp") if n == 4 else ("full_shard",):
            for clean in shared_world(n).run(private, strategy, 0.0)[0]:
                assert distance(clean, exact, floor=1.0) < 1e-12
            noisy += shared_world(n).run(private, strategy, 1.1)[0]
    assert worst(distance(other, noisy[0], floor=1.0) for other in noisy) < 1e-12
    drawn = [
        (a - b).flatten() * 10 / (1.1 * 0.5) for a, b in zip(*map(optree.tree_leaves, (noisy[0], exact)), strict=True)
    ]
    z = torch.cat(drawn)
    assert abs(float(z.mean())) < 4 / len(z) ** 0.5
    assert abs(float(z.std()) - 1) < 4 / (2 * len(z)) ** 0.5
    assert len(set(z.tolist())) == len(z)


def of_samples(strategy: str, rate: float, rounds: int) -> list[Any]:
    """Private gradients of samples, by rank, and which rows they had."""
    mesh, params = sharded_trees(strategy, whole())
    axes = tuple(mesh.mesh_dim_names or ())
    batches = sf.run.batches({"t": tokens(0, 24), "row": torch.arange(24)}, mesh, axes, 24, 5, sample_rate=rate)
    options: dict[str, Any] = {
        "max_grad_norm": 0.5,
        "noise_multiplier": 1.1,
        "expected_batch_size": 24 * rate,
        "seed": 3,
    }
    found = []
    for step, batch in zip(range(rounds), batches, strict=False):
        got = dp_grads(losses_of(sf.stage, mlp), params, batch["t"], mask=batch["mask"], step=step, **options)
        parts = dp_grads(
            losses_of(sf.stage, mlp), params, batch["t"], mask=batch["mask"], step=step, micro=2, **options
        )
        found.append((batch["row"][batch["mask"]].tolist(), sf.unshard(got), sf.unshard(parts)))
    return found


@pytest.mark.parametrize("rate", [0.03, 0.5])
def test_private_gradients_of_samples_are_the_same_on_any_mesh(rate: float) -> None:
    """Ranks have other numbers of rows, some of them none, and at some steps no rank has any."""
    rounds, plain = 6, losses_of(plainly, mlp)
    wanted = shared_world(1).run(of_samples, "full_shard", rate, rounds)[0]
    sizes = [len(rows) for rows, _, _ in wanted]
    assert (0 in sizes) == (rate < 0.1)
    assert len(set(sizes)) > 1
    for step, (rows, _, _) in enumerate(wanted):  # by one process without stages, and by its rows alone
        options: dict[str, Any] = {
            "max_grad_norm": 0.5,
            "noise_multiplier": 1.1,
            "expected_batch_size": 24 * rate,
            "seed": 3,
            "step": step,
        }
        alone_ = dp_grads(plain, whole(), tokens(0, 24)[rows], **options)
        assert distance(wanted[step][1], alone_, floor=1.0) < 1e-12
        each = alone(plain, whole(), tokens(0, 24)[rows]) if rows else None
        clean = dp_grads(plain, whole(), tokens(0, 24)[rows], **options | {"noise_multiplier": 0.0})
        weights = (0.5 / norms_of(each)).clamp(max=1) if rows else torch.zeros(0)
        exact = [torch.einsum("r,r...->...", weights, g) / (24 * rate) for g in optree.tree_leaves(each)]
        assert all(distance(a, b, floor=1.0) < 1e-12 for a, b in zip(optree.tree_leaves(clean), exact, strict=False))
        assert rows or max(float(x.abs().max()) for x in optree.tree_leaves(clean)) == 0
    for n, strategy in ((2, "full_shard"), (4, "full_shard"), (4, "zero1"), (4, "hfsdp")):
        ranks = shared_world(n).run(of_samples, strategy, rate, rounds)
        for step in range(rounds):
            assert [row for rank in ranks for row in rank[step][0]] == wanted[step][0]
            for rank in ranks:
                for got in rank[step][1:]:
                    assert distance(got, wanted[step][1], floor=1.0) < 1e-12


def test_masked_rows_make_no_difference() -> None:
    def losses(p: Any, x: Tensor) -> Tensor:
        return (p * x).exp().sum(1)

    rows = torch.tensor([[1.0, 2.0], [1e9, 1e9], [0.5, 1.0]])
    options: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 0.0, "expected_batch_size": 2.0}
    mask = torch.tensor([True, False, True])
    got = dp_grads(losses, torch.ones(2), rows, mask=mask, seed=0, step=0, **options)
    assert torch.equal(got, dp_grads(losses, torch.ones(2), rows[mask], seed=0, step=0, **options))
    assert got.isfinite().all()


def late_look() -> str:
    """What is said at the first call of which the first rank has a row, after calls without."""
    mesh = data_mesh(dist.get_world_size())
    params = sf.shard({"only": whole()["layers"][0]}, mesh, STRATEGIES["full_shard"])["only"]

    def twisted(p: Any, x: Tensor) -> Tensor:
        y = mlp(p, x)
        return y.detach() + y.flip(0) - y.flip(0).detach()

    def losses(p: Any, x: Tensor) -> Tensor:
        return sf.stage(twisted)(p, x).square().sum((1, 2))

    x = normal(3, T, D, seed=mesh.get_rank())
    options: dict[str, Any] = {
        "max_grad_norm": 1.0,
        "noise_multiplier": 0.0,
        "expected_batch_size": 1.0,
        "seed": 0,
        "step": 0,
    }
    for counts in ((0, 0), (0, 3)):
        dp_grads(losses, params, x, mask=torch.arange(3) < counts[mesh.get_rank()], **options)
    try:
        dp_grads(losses, params, x, **options)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@two
def test_losses_are_looked_at_when_the_first_rank_has_rows(world: World) -> None:
    assert all("its derivative mixes rows" in said for said in world.run(late_look))


def test_noise_is_normal_and_another_at_each_step() -> None:
    params = {"a": torch.zeros(400, 500, dtype=torch.float64), "b": torch.zeros(400, 500, dtype=torch.float64)}
    nothing = torch.zeros(1, dtype=torch.float64)

    def losses(p: Any, x: Tensor) -> Tensor:
        return x * (p["a"].sum() + p["b"].sum())

    def drawn(seed: int, step: int) -> list[Tensor]:
        g = dp_grads(
            losses,
            params,
            nothing,
            max_grad_norm=2.0,
            noise_multiplier=3.0,
            expected_batch_size=1.0,
            seed=seed,
            step=step,
        )
        return [x.flatten() / 6 for x in optree.tree_leaves(g)]

    each = [*drawn(0, 0), *drawn(0, 1), *drawn(1, 0)]
    assert torch.equal(each[0], drawn(0, 0)[0])
    n = len(each[0])
    for z in each:
        for power, moment in {1: 0, 2: 1, 3: 0, 4: 3, 6: 15}.items():
            spread = math.sqrt({1: 1, 2: 2, 3: 15, 4: 96, 6: 10170}[power] / n)
            assert abs(float((z**power).mean()) - moment) < 5 * spread, power
    table = torch.corrcoef(torch.stack([*each, each[0].roll(1)])) - torch.eye(7)
    assert float(table.abs().max()) < 5 / n**0.5


def scale() -> float:
    mesh, params = sharded_trees("hybrid_shard", whole())
    n = 16 // mesh.size()
    own = tokens(0, 16)[n * mesh.get_rank() : n * (mesh.get_rank() + 1)]
    rows = per_example(losses_of(sf.stage, mlp), params, own)
    mean = optree.tree_map(lambda g: g / 16, rows.weighted(torch.ones(len(own))))
    return float(noise_scale(rows.norms, mean))


@pytest.mark.world(4, "processes")
def test_noise_scale(world: World) -> None:
    each = alone(losses_of(plainly, mlp), whole(), tokens(0, 16))
    g = torch.cat([x.reshape(len(x), -1) for x in optree.tree_leaves(each)], 1)
    spread = g.var(0, correction=1).sum()
    want = float(spread / (g.mean(0).square().sum() - spread / 16))
    assert worst([abs(got / want - 1) for got in world.run(scale)]) < 1e-10


# --- errors ---


def wrong_calls() -> dict[str, str]:
    mesh = data_mesh(dist.get_world_size())
    rank = mesh.get_rank()
    params = sf.shard({"only": whole()["layers"][0]}, mesh, STRATEGIES["full_shard"])["only"]
    x = normal(4, T, D, seed=rank)
    layer = sf.stage(mlp)

    def batch_normed(p: Any, x: Tensor) -> Tensor:
        return F.batch_norm(mlp(p, x).flatten(0, 1), None, None, p["gain"], p["shift"], training=True).view(x.shape)

    def losses(p: Any, x: Tensor) -> Tensor:
        return layer(p, x).square().sum((1, 2))

    def straight_through(p: Any, x: Tensor) -> Tensor:
        y = mlp(p, x)
        return y.detach() + y.flip(0) - y.flip(0).detach()

    def derived(p: Any, x: Tensor) -> Tensor:
        return losses(optree.tree_map(lambda y: y * 2, p), x)

    tensor = sf.make_mesh(device="cpu", tensor=2)
    cut = sf.shard({"only": {"w": normal(D, D, seed=1)}}, tensor, sf.ddp("tensor"), specs=sf.P("tensor"))
    half: Any = {"seed": 0.5, "step": 0}

    def of_a_mask(mask: Any) -> Any:
        return {
            "max_grad_norm": 1.0,
            "noise_multiplier": 0.0,
            "expected_batch_size": 1.0,
            "seed": 0,
            "step": 0,
            "mask": mask,
        }

    programs: dict[str, Callable[[], Any]] = {
        "a batch norm": lambda: per_example(lambda p, x: sf.stage(batch_normed)(p, x).square().sum((1, 2)), params, x),
        "a mean": lambda: per_example(lambda p, x: losses(p, x) - losses(p, x).mean(), params, x),
        "a derivative": lambda: per_example(
            lambda p, x: sf.stage(straight_through)(p, x).square().sum((1, 2)), params, x
        ),
        "one number": lambda: per_example(lambda p, x: losses(p, x).sum(), params, x),
        "derived": lambda: per_example(derived, params, x),
        "outside": lambda: per_example(lambda p, x: losses(p, x) + p.values.sum(), params, x),
        "rows": lambda: per_example(lambda p, x, y: losses(p, x), params, x, x[:2]),
        "no rows": lambda: per_example(lambda p: losses(p, x), params),
        "a shard as a batch": lambda: per_example(losses, params, params),
        "inside": lambda: torch.func.grad(lambda x: per_example(losses, params, x).norms.sum())(x),
        "no parts": lambda: per_example(losses, params, x, micro=0),
        "a module": lambda: per_example(torch.nn.Linear(2, 2), params, x),
        "cut by both": lambda: per_example(lambda p, x: x, cut, x),
        "rows of one": lambda: per_example(lambda p, x, *y: losses(p, x), params, x, *[x[:2]] * rank),
        "parts of one": lambda: per_example(losses, params, x, micro=1 + rank),
        "weights": lambda: per_example(losses, params, x).weighted(torch.ones(3)),
        "clip": lambda: dp_grads(
            losses, params, x, max_grad_norm=0.0, noise_multiplier=1.0, expected_batch_size=1.0, seed=0, step=0
        ),
        "noise": lambda: dp_grads(
            losses, params, x, max_grad_norm=1.0, noise_multiplier=-1.0, expected_batch_size=1.0, seed=0, step=0
        ),
        "size": lambda: dp_grads(
            losses, params, x, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=math.inf, seed=0, step=0
        ),
        "mask": lambda: dp_grads(losses, params, x, **of_a_mask(torch.ones(4))),
        "length": lambda: dp_grads(losses, params, x, **of_a_mask(torch.ones(3, dtype=torch.bool))),
        "one rank": lambda: dp_grads(losses, params, x, **of_a_mask(torch.ones(4 - mesh.get_rank(), dtype=torch.bool))),
        "no mask": lambda: dp_grads(losses, params, x, **of_a_mask([True] * 4)),
        "seed": lambda: dp_grads(
            losses, params, x, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=1.0, **half
        ),
    }
    return {name: told(program) for name, program in programs.items()}


@two
def test_errors(world: World) -> None:
    for found in world.run(wrong_calls):
        assert "rows are mixed, as by a batch norm" in found["a batch norm"]
        assert "rows are mixed, as by a batch norm" in found["a mean"]
        assert "its derivative mixes rows" in found["a derivative"]
        assert "returns one loss a row, [rows], and returned a tensor of shape () for one row" in found["one number"]
        assert "gets shards that losses of per_example computed from params" in found["derived"]
        assert "computes with a flat shard outside of stages" in found["outside"]
        assert "no tensor of the batch has rows" in found["no rows"]
        assert "flat shard in the batch" in found["a shard as a batch"]
        assert "take it outside" in found["inside"]
        assert "micro must be an integer of 1 or more, got 0" in found["no parts"]
        assert "Linear is a module" in found["a module"]
        assert "'only.w' is sharded over tensor by specs=, and a strategy has tensor too" in found["cut by both"]
        assert all("has 4" in found[name] and "has 2" in found[name] for name in ("rows", "rows of one"))
        assert "micro=1" in found["parts of one"]
        assert "weights: (3,), for 4 examples" in found["weights"]
        assert "max_grad_norm must be a finite number above 0, got 0.0" in found["clip"]
        assert "noise_multiplier must be a finite number, 0 or more, got -1.0" in found["noise"]
        assert "expected_batch_size must be a finite number above 0, got inf" in found["size"]
        assert "a seed is an int" in found["seed"]
        mask = "mask must be bool, [4], one for each of this rank's rows, got "
        assert f"{mask}torch.float32 of shape (4,)" in found["mask"]
        assert f"{mask}torch.bool of shape (3,)" in found["length"]
        assert f"{mask}list" in found["no mask"]
        assert f"{mask}torch.bool of shape (3,)" in found["one rank"]
        assert max(map(len, found.values())) < 2000


def test_a_row_that_is_not_finite_is_seen() -> None:
    def losses(p: Any, x: Tensor) -> Tensor:
        return (p * x).exp().sum(1)

    found: PerExample = per_example(losses, torch.ones(3), torch.tensor([[1.0, 2.0, 3.0], [1.0, 1e4, 0.0]]))
    assert found.norms.isfinite().tolist() == [True, False]
    assert not found.clipped(1.0).isfinite().all()
