"""Products with Hessians, Gauss-Newton and Fisher matrices: those of dense matrices on one process."""

from __future__ import annotations

import functools
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal
from torch.utils.flop_counter import FlopCounterMode

import shardfn as sf
from shardfn import curvature as sc
from shardfn.testing import World
from tests.models import STRATEGIES, normal, plainly
from tests.reference import worst

D, WORDS, CLASSES, ROWS = 4, 7, 3, 8
DATA = ("replica", "shard")


def whole(seed: int = 0) -> Any:
    shapes = {"a": (D, 5), "b": (5, D), "s": (D,)}
    layers = [{name: normal(*shape, seed=100 * seed + 10 * i + k) for k, (name, shape) in enumerate(shapes.items())}
              for i in range(2)]  # fmt: skip
    return {"embed": {"e": normal(WORDS, D, seed=100 * seed + 91)}, "layers": layers,
            "head": {"w": normal(D, CLASSES, seed=100 * seed + 92)}}  # fmt: skip


def rows(batch: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(batch)
    return torch.randint(0, WORDS, (ROWS,), generator=draw), torch.randint(0, CLASSES, (ROWS,), generator=draw)


def net(stage: Any, params: Any, tokens: Tensor) -> Tensor:
    x = stage(lambda p, t: p["e"][t])(params["embed"], tokens)
    f = stage(lambda p, x: x + F.layer_norm(torch.tanh(x @ p["a"]) @ p["b"], (D,), p["s"]))
    for p in sf.layers(params["layers"]):
        x = f(p, x)
    return stage(lambda p, x: x @ p["w"])(params["head"], x)


def entropy(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum") / ROWS


def joint(z: Tensor, y: Tensor) -> Tensor:
    return entropy(z, y).square() + z.sum().sin()


def categorical(z: Tensor, x: Tensor, y: Tensor) -> Categorical:
    return Categorical(logits=z)


def scales(z: Tensor, x: Tensor, y: Tensor) -> Normal:
    return Normal(z[:, 0], z[:, 1].exp())


def labels(z: Tensor, x: Tensor, y: Tensor) -> Bernoulli:
    return Bernoulli(logits=z)


def operator(kind: str, stage: Any, total: Any, params: Any, batches: Any) -> sc.Operator:
    def model(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return net(stage, p, x)

    if kind == "hvp":
        return sc.hvp(lambda p, x, y: total(entropy(net(stage, p, x), y)), params, batches)
    if kind == "ggn":
        return sc.ggn(model, lambda z, x, y: total(entropy(z, y)), params, batches)
    if kind == "joint ggn":  # in which all rows meet
        return sc.ggn(model, lambda z, x, y: total(entropy(z, y)).square() + total(z.sum()).sin(), params, batches)
    if kind == "empirical":

        def each(p: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(net(stage, p, x), y, reduction="none")

        return sc.empirical_fisher(each, params, batches)
    return sc.fisher(model, LIKELIHOODS[kind], params, batches)


LIKELIHOODS: dict[str, Any] = {"categorical": categorical, "normal": scales, "bernoulli": labels}
KINDS = ["hvp", "ggn", "joint ggn", "empirical", *LIKELIHOODS]


# --- the same, as dense matrices ---


@functools.cache
def dense(kind: str) -> Tensor:
    """The matrix, on the parameters as one vector, by the definition."""
    leaves, tree = optree.tree_flatten(whole())
    sizes = [x.numel() for x in leaves]
    point = torch.cat([x.flatten() for x in leaves])

    def model(vector: Tensor, x: Tensor) -> Tensor:
        parts = [v.view(p.shape) for v, p in zip(vector.split(sizes), leaves, strict=True)]
        return net(plainly, optree.tree_unflatten(tree, parts), x)

    matrix = torch.zeros(len(point), len(point), dtype=torch.float64)
    for batch in range(2):
        x, y = rows(batch)
        z, J = model(point, x), torch.func.jacrev(model)(point, x)  # [rows, classes], [rows, classes, n]
        if kind == "hvp":
            slope = torch.func.grad(lambda v, x=x, y=y: entropy(model(v, x), y))
            basis = torch.eye(len(point), dtype=point.dtype)  # no batches: torch's of layer norms are wrong
            matrix += torch.stack([torch.func.jvp(slope, (point,), (e,))[1] for e in basis], 1)
        elif kind in ("ggn", "joint ggn"):
            f = functools.partial(joint if kind == "joint ggn" else entropy, y=y)
            matrix += torch.einsum("rcn,rcsd,sdm->nm", J, torch.func.hessian(f)(z), J)
        elif kind == "empirical":
            g = torch.func.jacrev(lambda v, x=x, y=y: F.cross_entropy(model(v, x), y, reduction="none"))(point)
            matrix += g.T @ g
        else:
            matrix += torch.einsum("rcn,rcd,rdm->nm", J, expected(kind, z), J)
    return matrix


def expected(kind: str, z: Tensor) -> Tensor:
    """The Fisher matrix in the outputs of each row, from tables of distributions."""
    if kind == "categorical":
        p = z.softmax(-1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    if kind == "bernoulli":
        p = z.sigmoid()
        return torch.diag_embed(p * (1 - p))
    found = torch.zeros(len(z), CLASSES, CLASSES, dtype=z.dtype)
    found[:, 0, 0], found[:, 1, 1] = (-2 * z[:, 1]).exp(), 2
    return found


def flat(tree: Any) -> Tensor:
    return torch.cat([x.flatten() for x in optree.tree_leaves(tree)])


def batches_of(mesh: Any) -> list[tuple[Tensor, ...]]:
    n, k = mesh.size(), mesh.get_rank()
    return [tuple(x.chunk(n)[k] for x in rows(batch)) for batch in range(2)]


def grid() -> Any:
    n = dist.get_world_size()
    return sf.make_mesh(replica=2 if n > 2 else 1, shard=-1, device="cpu")


def off(kind: str, strategy: str, inside: bool) -> float:
    """How far a product is from that with the dense matrix: the operator made under `shard_map`, or around one."""
    mesh = grid()
    params, v = (sf.shard(whole(seed), mesh, STRATEGIES[strategy]) for seed in (0, 1))

    def total(x: Tensor) -> Tensor:
        return sf.psum(x, DATA)

    def made(params: Any, v: Any, batches: Any) -> Any:
        return operator(kind, sf.stage, total, params, batches) @ v

    if inside:
        mapped = sf.shard_map(made, mesh=mesh, in_specs=(..., ..., sf.P(DATA)), out_specs=...)
        product = mapped(params, v, batches_of(mesh))
    else:
        on = sf.shard_map(lambda p, x, y: total(entropy(net(sf.stage, p, x), y)), mesh=mesh,
                          in_specs=(..., sf.P(DATA), sf.P(DATA)), out_specs=sf.P())  # fmt: skip
        product = sc.hvp(on, params, batches_of(mesh)) @ v
    want = dense(kind) @ flat(whole(1))
    return float((flat(sf.unshard(product)) - want).norm() / want.norm())


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.world(n, "processes")) for n in (1, 2, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_dense_matrices(world: World, kind: str, ranks: int) -> None:
    assert worst(world.run(off, kind, "full_shard", True)) < 1e-13


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_products_are_right_with_each_strategy(world: World, strategy: str) -> None:
    for kind in ("hvp", "ggn"):
        assert worst(world.run(off, kind, strategy, True)) < 1e-13


@pytest.mark.world(2, "processes")
def test_a_loss_may_be_mapped_already(world: World) -> None:
    assert worst(world.run(off, "hvp", "full_shard", False)) < 1e-13


# --- a Hessian's products compute no gradients that nobody reads ---


def hooked(p: Any, x: Tensor) -> Tensor:
    if p["w"].requires_grad:
        p["w"].register_hook(lambda g: g.clamp(-0.1, 0.1))
    return torch.tanh(x @ p["w"])


BLOCKS: dict[str, Any] = {
    "products": lambda p, x: x + torch.tanh(x @ p["w"]) @ p["v"],
    "linear": lambda p, x: torch.tanh(F.linear(x, p["w"], p["b"])) @ p["v"],
    "tied": lambda p, x: torch.tanh(x @ p["w"]) @ p["w"].T,
    "weights of norm one": lambda p, x: torch.tanh(x @ (p["w"] / p["w"].norm())) @ p["v"],
    "weights that multiply too": lambda p, x: torch.tanh(x @ p["w"]) * p["w"].norm(),
    "a choice of weights": lambda p, x: torch.tanh(x @ torch.where(p["w"] > 0, p["w"], p["w"] * p["v"])),
    "no matrix product": lambda p, x: torch.tanh(torch.einsum("ij,jk->ik", x, p["w"])),
    "a bias of weights": lambda p, x: torch.tanh(F.linear(x, p["w"], p["b"] * p["w"].sum())),
    "a constant": lambda p, x: torch.tanh(x @ p["w"].detach()) @ p["v"],
    "a hook": hooked,
}
BEFORE: dict[str, Any] = {"": lambda w: w, "times a number": lambda w: w * 1.5, "squared": torch.square}


def of_blocks(seed: int) -> Any:
    shapes = {"w": (D, D), "v": (D, D), "b": (D,)}
    return [{name: normal(*shape, seed=100 * seed + 10 * i + k) for k, (name, shape) in enumerate(shapes.items())}
            for i in range(2)]  # fmt: skip


def loss_of_blocks(block: Any, before: str, penalty: float) -> Any:
    def loss(params: Any, x: Tensor) -> Tensor:
        for p in optree.tree_map(BEFORE[before], params):
            x = block(p, x)
        return x.square().sum()

    def penalized(params: Any, x: Tensor) -> Tensor:
        cubes = [(w**3).sum() for w in optree.tree_leaves(params)]
        return loss(params, x) + penalty * torch.stack(cubes).sum()

    return penalized if penalty else loss


def off_without_gradients(name: str, remat: bool) -> float:
    """The worst product, by what is done to parameters before a stage has them, and whether a penalty has them too."""
    mesh, found = sf.make_mesh(data=-1, device="cpu"), [0.0]
    params, v = (sf.shard(of_blocks(seed), mesh, sf.full_shard("data")) for seed in (0, 1))
    x = normal(mesh.size(), 2, D, seed=3)
    staged = sf.stage(BLOCKS[name], remat=remat)
    for before in BEFORE:
        # One process has one tensor, whose hook would see the gradient of a penalty too.
        for penalty in {0, name != "a hook"}:
            loss = loss_of_blocks(staged, before, penalty)  # of this rank's parts of parameters
            alone = loss_of_blocks(BLOCKS[name], before, penalty / mesh.size())

            def product(params: Any, v: Any, x: Tensor, loss: Any = loss) -> Any:
                return sc.hvp(lambda p: sf.psum(loss(p, x), "data"), params) @ v

            mapped = sf.shard_map(product, mesh=mesh, in_specs=(..., ..., sf.P("data")), out_specs=...)
            got = flat(sf.unshard(mapped(params, v, x[mesh.get_rank()])))
            of_ranks = [torch.func.grad(lambda p, f=alone, x=x: f(p, x)) for x in x]  # a hook sees one rank's gradient
            pushed = [flat(torch.func.jvp(g, (of_blocks(0),), (of_blocks(1),))[1]) for g in of_ranks]
            want = torch.stack(pushed).sum(0)
            found.append(float((got - want).norm() / want.norm()))
    return worst(found)


@pytest.mark.world(2, "processes")
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_that_nobody_reads_are_in_no_product(world: World, name: str, remat: bool) -> None:
    assert worst(world.run(off_without_gradients, name, remat)) < 1e-13


def cost_of_a_product() -> tuple[list[int], list[int]]:
    """Multiplications, and bytes that are reduced, of a gradient and of a product of its tangents."""
    mesh, x = sf.make_mesh(data=-1, device="cpu"), normal(8, D, seed=3)
    params, v = (sf.shard(of_blocks(seed), mesh, sf.full_shard("data")) for seed in (0, 1))
    loss, flops, nbytes = loss_of_blocks(sf.stage(BLOCKS["products"]), "", 0), [], []
    hessian = sc.hvp(lambda p: loss(p, x), params)
    for run in (lambda: sf.grad(loss)(params, x), lambda: hessian @ v):
        run()
        with sf.collectives.ledger() as log, FlopCounterMode(display=False) as counter:
            run()
        flops.append(counter.get_total_flops())
        nbytes.append(sum(entry.bytes for entry in log.records if entry.op == "reduce_scatter"))
    return flops, nbytes


@pytest.mark.world(2, "processes")
def test_a_product_computes_and_reduces_tangents_of_gradients_alone(world: World) -> None:
    for (gradient, product), (once, again) in world.run(cost_of_a_product):
        assert 3 * product <= 8 * gradient
        assert 0 < once == again
