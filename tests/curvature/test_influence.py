"""EK-FAC and influence: right beside dense matrices by their definition, and alike on any mesh."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

import shardfn as sf
from shardfn import curvature as sc
from shardfn import interop
from shardfn.shards.random import mixed
from shardfn.testing import World
from shardfn.testing import world as started
from tests.models import STRATEGIES, data_mesh, leaves, normal, plainly, sharded_trees
from tests.reference import worst
from tests.refusals import told

WORDS, D, H, T, CLASSES, ROWS = 7, 4, 5, 3, 3, 8
DATA = ("replica", "shard")
DAMPING = 1e-2
SIZES = [pytest.param(n, marks=pytest.mark.world(n, "processes")) for n in (1, 2, 4)]
two = pytest.mark.world(2, "processes")


def whole() -> Any:
    shapes = {"a": (H, D), "s": (H,), "b": (H, D), "g": (D,)}
    layers = [{name: normal(*shape, seed=10 * i + k) for k, (name, shape) in enumerate(shapes.items())}
              for i in range(2)]  # fmt: skip
    return {"embed": {"e": normal(WORDS, D, seed=91)}, "head": {"w": normal(D, CLASSES, seed=92)}, "layers": layers}


def rows(batch: int, n: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(batch)
    return torch.randint(0, WORDS, (n, T), generator=draw), torch.randint(0, CLASSES, (n,), generator=draw)


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
    loss = F.cross_entropy(net(plainly, whole(), t, met), y, reduction="sum")
    found = {}
    for path, added in met.added.items():
        a, g = (x.flatten(0, 1) for x in (met.inputs[path], torch.autograd.grad(loss, added, retain_graph=True)[0]))
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
    return [tuple(x.tensor_split(n)[k] for x in rows(batch)) for batch in (0, 1)]


def applied(strategy: str, **options: Any) -> list[float]:
    mesh, params, v = sharded_trees(strategy, whole(), vector())
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


# --- programs ---


def of(losses: Any, tree: Any, batch: Any, diagonal: tuple[str, ...] = (), strategy: str = "full_shard") -> Any:
    mesh, params = sharded_trees(strategy, tree)
    n, k = mesh.size(), mesh.get_rank()
    own = tuple(x.tensor_split(n)[k] for x in batch)
    return sc.ekfac(losses, params, [own], diagonal=diagonal), params


def by_definition(g: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """A dense matrix from rows' gradients `[rows, m, n]` and factors."""
    eye = [torch.eye(n, dtype=g.dtype) for n in g.shape[1:]]
    bases = [eye[i] if x is None else torch.linalg.eigh(x)[1] for i, x in enumerate((left, right))]
    basis = torch.kron(*(b.contiguous() for b in bases))
    return basis @ (g.flatten(1) @ basis).square().mean(0).diag() @ basis.T


X = normal(6, T, D, seed=70)
W = {"s": {"w": normal(D, D, seed=71)}}


def recurrent(stage: Any, remat: bool = False) -> Any:
    """A matrix that is used three times in one stage, and by two calls of it."""
    options = {"remat": True} if remat else {}
    f = stage(lambda p, x: torch.tanh(torch.tanh(x @ p["w"]) @ p["w"] + x @ p["w"]), **options)
    return lambda p, x: f(p["s"], f(p["s"], x)).square().sum((1, 2))


def of_recurrent(remat: bool) -> float:
    F, _ = of(recurrent(sf.stage, remat), W, (X,))
    x, w = X, W["s"]["w"]
    met, inputs = [], []

    def product(x: Tensor) -> Tensor:
        met.append(torch.zeros_like(x, requires_grad=True))
        inputs.append(x.detach())
        return x @ w + met[-1]

    for _ in range(2):
        x = torch.tanh(product(torch.tanh(product(x))) + product(x))
    slopes = torch.autograd.grad(x.square().sum(), met)
    a, d = (torch.cat([y.flatten(0, 1) for y in ys]) for ys in (inputs, slopes))
    g = torch.func.vmap(
        torch.func.grad(lambda w, x: recurrent(lambda f, **_: f)({"s": {"w": w}}, x[None])[0]), (None, 0)
    )(w, X)
    matrix = by_definition(g, a.T @ a, d.T @ d)
    v = {"s": {"w": w.cos()}}
    got = sf.unshard(F @ sf.shard(v, data_mesh(dist.get_world_size()), STRATEGIES["full_shard"]))["s"]["w"]
    want = (matrix @ w.cos().flatten()).view_as(w)
    return float((got - want).abs().max() / want.abs().max())


@two
@pytest.mark.parametrize("remat", [False, True])
def test_a_matrix_that_several_stages_use_several_times(world: World, remat: bool) -> None:
    assert worst(world.run(of_recurrent, remat)) < 1e-9


IMAGES = normal(5, 2, 6, 6, seed=75)
KERNEL = {"s": {"k": normal(3, 2, 3, 2, seed=76)}}


def convolving(stage: Any) -> Any:
    f = stage(lambda p, x: torch.tanh(F.conv2d(x, p["k"], stride=(2, 1), padding=(1, 2), dilation=(1, 2))))
    return lambda p, x: f(p["s"], x).square().sum((1, 2, 3))


def of_convolution() -> list[float]:
    found, params = of(convolving(sf.stage), KERNEL, (IMAGES,))
    k = KERNEL["s"]["k"]
    options: Any = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
    z = F.conv2d(IMAGES, k, **options).requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(z).square().sum(), z)
    a = F.unfold(IMAGES, (3, 2), **options).mT.flatten(0, 1)
    d = slope.flatten(2).mT.flatten(0, 1)
    g = torch.func.vmap(torch.func.grad(lambda p, x: convolving(plainly)(p, x[None])[0]), (None, 0))(KERNEL, IMAGES)
    matrix = by_definition(g["s"]["k"].flatten(2), d.T @ d, a.T @ a)
    want = {"s.k": (matrix @ k.flatten()).view_as(k)}
    mesh = data_mesh(dist.get_world_size())
    own = IMAGES.tensor_split(mesh.size())[mesh.get_rank()]
    moments = sc.second_moments(convolving(sf.stage), params, [own], fisher=True)
    gram = sf.unshard(moments.inputs)["s.k"] - a.T @ a / len(a)
    doubled = sf.unshard(moments.replaced(lambda path, w, gram: 2 * w))["s"]["k"] - 2 * k
    squares = sf.unshard(moments.fisher)["s"]["k"] - g["s"]["k"].square().mean(0)
    return [off(found @ params, want), *(float(x.abs().max()) for x in (gram, doubled, squares))]


@two
def test_convolutions(world: World) -> None:
    for found in world.run(of_convolution):
        assert worst(found) < 1e-9, found


def with_rows(counts: tuple[int, ...]) -> list[float]:
    """Ranks have other numbers of rows; the last batch has none on the first rank."""
    mesh, params, v = sharded_trees("full_shard", whole(), vector())
    k = mesh.get_rank()
    batches = [tuple(x.split(list(counts))[k] for x in rows(0)), tuple(x.split([0, ROWS])[k] for x in rows(1))]
    F = sc.ekfac(losses_of(sf.stage), params, batches)
    G = sc.second_moments(losses_of(sf.stage), params, batches)
    want = factors()["head.w"][0]
    return [off(F @ v, times(dense(), torch.mv)), float((sf.unshard(G.inputs)["head.w"] - want).abs().max())]


@two
def test_ranks_with_other_numbers_of_rows(world: World) -> None:
    for counts in ((5, 3), (8, 0)):
        for found in world.run(with_rows, counts):
            assert worst(found) < 1e-9, found


def test_plain_tensors_on_one_process() -> None:
    F = sc.ekfac(losses_of(plainly), whole(), [rows(0), rows(1)])
    assert F.kinds == {"embed.e": "table", "head.w": "product"} | {
        f"layers.{i}.{name}": kind
        for i in range(2)
        for name, kind in (("a", "linear"), ("b", "product"), ("g", "diagonal"), ("s", "diagonal"))
    }
    assert off(F @ vector(), times(dense(), torch.mv)) < 1e-9
    assert off(F.solve(vector(), DAMPING), times(dense(), inverted)) < 1e-9
    assert sc.top_eig(F, 1, tolerance=1e-9).values[0] == pytest.approx(
        max(float(torch.linalg.eigvalsh(m)[-1]) for m in dense().values()), rel=1e-6
    )


def of_plain_tensors() -> list[float]:
    mesh = data_mesh(dist.get_world_size())

    def run(params: Any, batches: Any) -> Any:
        found = sc.ekfac(losses_of(plainly), params, batches)
        return found.solve(params, DAMPING)

    mapped = sf.shard_map(run, mesh=mesh, in_specs=(sf.P(), sf.P(DATA)), out_specs=sf.P())
    want = {path: inverted(dense()[path], x.flatten()).view_as(x) for path, x in leaves(whole()).items()}
    return [off(mapped(whole(), mine(mesh)), want)]


@two
def test_plain_tensors_that_all_ranks_have(world: World) -> None:
    for found in world.run(of_plain_tensors):
        assert worst(found) < 1e-9, found


def held() -> int:
    mesh, params = sharded_trees("full_shard", whole())
    state = sc.ekfac(losses_of(sf.stage), params, mine(mesh)).state
    own = [kept.layout.views(kept.values) for kept in state.values() if kept.values.numel()]
    return sum(x.numel() for each in own for x in each)


@pytest.mark.world(4, "processes")
def test_each_number_is_on_one_rank(world: World) -> None:
    sizes = [x.numel() for x in leaves(whole()).values()]
    bases = 2 * (2 * H**2 + 2 * D**2) + D**2 + CLASSES**2 + D**2
    assert sum(world.run(held)) == sum(sizes) + bases


def narrow(kind: str) -> float:
    mesh = data_mesh(dist.get_world_size())
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    tree = optree.tree_map(lambda x: x.to(dtype), whole())
    params = sf.shard(tree, mesh, STRATEGIES["full_shard"])
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        found = sc.ekfac(losses_of(sf.stage), params, mine(mesh))
    v = optree.tree_map(lambda x: x.to(dtype), vector())
    got = leaves(sf.unshard(found @ sf.shard(v, mesh, STRATEGIES["full_shard"])))
    assert all(x.dtype == torch.float32 for x in got.values())
    want = times(dense(), torch.mv)
    return max(float((got[k] - want[k]).abs().max() / want[k].abs().max()) for k in want)


@two
@pytest.mark.parametrize(("kind", "most"), [("float32", 1e-4), ("autocast", 0.1), ("bfloat16", 0.2)])
def test_narrow_numbers_are_summed_in_float32(world: World, kind: str, most: float) -> None:
    for found in world.run(narrow, kind):
        assert found < most


def test_padding_has_no_curvature() -> None:
    def losses(p: Any, t: Tensor) -> Tensor:
        return torch.tanh(F.embedding(t, p["e"], padding_idx=2)).sum((1, 2)).square()

    table, t = {"e": normal(WORDS, D, seed=91)}, rows(0)[0]
    found, counts = sc.ekfac(losses, table, [(t,)], corrected=False), t.flatten().bincount(minlength=WORDS)
    counts[2] = 0
    product = (found @ {"e": torch.ones_like(table["e"])})["e"]
    assert (product[2] == 0).all()
    torch.testing.assert_close(product / product[0], (counts / counts[0])[:, None].double().expand(WORDS, D))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, D)
        self.up, self.norm, self.down = torch.nn.Linear(D, H), torch.nn.LayerNorm(H), torch.nn.Linear(H, CLASSES)

    def forward(self, t: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(self.embed(t))))).sum(1)


def of_module() -> list[float]:
    torch.manual_seed(3)
    module = Net().double()
    plain = {path: x.detach().clone() for path, x in module.named_parameters()}
    model = interop.functional(copy.deepcopy(module), min_stage_params=0)
    mesh = data_mesh(dist.get_world_size())
    params = model.shard(mesh, STRATEGIES["full_shard"])
    F = sc.ekfac(
        lambda p, t, y: torch.nn.functional.cross_entropy(model(p, t), y, reduction="none"), params, mine(mesh)
    )
    t, y = (torch.cat(xs) for xs in zip(rows(0), rows(1), strict=True))

    def loss(p: Any, t: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.func.functional_call(module, p, (t[None],)), y[None])

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(plain, t, y)
    x = torch.tanh(module.norm(module.up(module.embed(t)))).detach().flatten(0, 1)
    d = torch.softmax(module(t).detach(), 1) - torch.nn.functional.one_hot(y, CLASSES)
    matrix = by_definition(grads["down.weight"], d.T @ d, x.T @ x)
    v = optree.tree_map(torch.cos, params)
    got = leaves(sf.unshard(F @ v))
    w = plain["down.weight"].detach().cos()
    name = next(path for path in got if path.endswith("down.weight"))
    bias = next(path for path in got if path.endswith("up.bias"))
    want = (matrix @ w.flatten()).view_as(w)
    other = grads["up.bias"].square().mean(0) * plain["up.bias"].cos()
    return [float((got[p] - x).abs().max() / x.abs().max()) for p, x in ((name, want), (bias, other.detach()))]


@two
def test_a_module(world: World) -> None:
    for found in world.run(of_module):
        assert worst(found) < 1e-9, found


# --- what is refused ---


def tied(p: Any, t: Tensor, stage: Any = sf.stage) -> Tensor:
    s = stage(lambda p, t: F.linear(p["e"][t], p["e"]))
    return s(p["s"], t).logsumexp(-1).sum(1)


def in_parts(p: Any, x: Tensor) -> Tensor:
    return sf.stage(lambda p, x: sum(x @ w.T for w in p["e"].chunk(2)))(p["s"], x[:, :, :D]).square().sum((1, 2))


def added(p: Any, x: Tensor) -> Tensor:
    return sf.stage(lambda p, x: x + p["e"][:T])(p["s"], x).square().sum((1, 2))


def refused(which: str) -> Any:
    tokens = torch.arange(18).view(6, T) % WORDS
    table, square = normal(WORDS, D, seed=5), normal(D, D, seed=5)
    programs: dict[str, Any] = {
        "tied": (tied, table, tokens), "in_parts": (in_parts, square, X), "added": (added, table, X),
        "in_groups": (in_groups, normal(D, 1, 2, seed=5), X), "by_heads": (by_heads, normal(2, D, 3, seed=5), X),
    }  # fmt: skip
    losses, e, batch = programs[which]
    try:
        of(losses, {"s": {"e": e}}, (batch,))
    except ValueError as error:
        F, params = of(losses, {"s": {"e": e}}, (batch,), diagonal=("s.e",))
        g = torch.func.vmap(torch.func.grad(lambda e, x: plain[which]({"s": {"e": e}}, x[None])[0]), (None, 0))(
            e, batch
        )
        return str(error), float((sf.unshard(F @ params)["s"]["e"] - g.square().mean(0) * e).abs().max())
    return "nothing", 0.0


def in_groups(p: Any, x: Tensor) -> Tensor:
    return sf.stage(lambda p, x: F.conv1d(x.mT, p["e"], groups=D))(p["s"], x).square().sum((1, 2))


def by_heads(p: Any, x: Tensor) -> Tensor:
    return sf.stage(lambda p, x: torch.einsum("btd,hde->bhte", x, p["e"]))(p["s"], x).square().sum((1, 2, 3))


plain: dict[str, Any] = {
    "in_groups": lambda p, x: F.conv1d(x.mT, p["s"]["e"], groups=D).square().sum((1, 2)),
    "by_heads": lambda p, x: torch.einsum("btd,hde->bhte", x, p["s"]["e"]).square().sum((1, 2, 3)),
    "tied": lambda p, t: F.linear(p["s"]["e"][t], p["s"]["e"]).logsumexp(-1).sum(1),
    "in_parts": lambda p, x: sum(x @ w.T for w in p["s"]["e"].chunk(2)).square().sum((1, 2)),
    "added": lambda p, x: (x + p["s"]["e"][:T]).square().sum((1, 2)),
}


@two
@pytest.mark.parametrize("which", list(plain))
def test_matrices_without_factors_are_refused_by_name_and_can_be_diagonal(world: World, which: str) -> None:
    for message, apart in world.run(refused, which):
        assert re.search(r"the use of s\.e has no Kronecker factors", message), message
        assert apart < 1e-9


def wrong(which: str) -> str:
    mesh, params = sharded_trees("full_shard", whole())
    batches: Any = mine(mesh)
    first = mesh.get_rank() == 0
    calls: dict[str, Callable[[], Any]] = {
        "name": lambda: sc.ekfac(losses_of(sf.stage), params, batches, diagonal=["head"]),
        "string": lambda: sc.ekfac(losses_of(sf.stage), params, batches, diagonal="head.w"),
        "options differ": lambda: sc.ekfac(losses_of(sf.stage), params, batches, corrected=first),
        "rows on one rank": lambda: sc.ekfac(
            losses_of(sf.stage), params, [(rows(0)[0], rows(1, 5)[1])] if first else batches[:1]
        ),
        "batches differ": lambda: sc.second_moments(losses_of(sf.stage), params, batches if first else batches[:1]),
        "generator": lambda: sc.second_moments(losses_of(sf.stage), params, iter(batches)),
        "none": lambda: sc.second_moments(losses_of(sf.stage), params, []),
        "damping": lambda: sc.ekfac(losses_of(sf.stage), params, batches, corrected=False).solve(params, 0.0),
        "mixed rows": lambda: sc.second_moments(
            lambda p, *b: (x := losses_of(sf.stage)(p, *b)) - x.mean(), params, batches
        ),
        "a query of another kind": lambda: sc.influence(
            lambda q: q, [{"x": torch.ones(3)}], losses_of(sf.stage), params, batches
        ),
        "another shape": lambda: sc.second_moments(losses_of(sf.stage), params, batches).replaced(
            lambda path, w, gram: w[:1] if path == "head.w" else w
        ),
        "no distribution": lambda: sc.ekfac(
            sc.SampledLabels(lambda p, t, y: net(sf.stage, p, t), lambda z, t, y: z), params, batches
        ),
    }
    return told(calls[which])


@two
@pytest.mark.parametrize(
    ("which", "message"),
    {
        "name": "ValueError: .*no parameter is called head; there are embed.e",
        "string": "TypeError: .*it is a collection of paths",
        "options differ": "ValueError: .*ekfac.*corrected",
        "rows on one rank": "ValueError: .*(has this rank's rows in dim 0|rank 0)",
        "batches differ": "ValueError: .*numbers of batches",
        "generator": "TypeError: .*a list of batches",
        "none": "ValueError: .*no batches",
        "damping": "ValueError: .*damping must be a finite number above 0, got 0.0",
        "mixed rows": "RuntimeError: .*rows are mixed",
        "a query of another kind": "ValueError: .*another structure",
        "another shape": r"ValueError: .*returned \(1, 4\) for head.w",
        "no distribution": "TypeError: .*torch.distributions",
    }.items(),
)
def test_errors_are_told_on_all_ranks(world: World, which: str, message: str) -> None:
    for said in world.run(wrong, which):
        assert re.match(message, said, re.DOTALL), said


# --- labels that are drawn ---


def fisher_of_draws() -> list[float]:
    """The matrix at labels that were drawn is the empirical one at these labels."""
    mesh, params, v = sharded_trees("full_shard", whole(), vector())
    drawn = sc.SampledLabels(lambda p, t: net(sf.stage, p, t), lambda z, t: Categorical(logits=z), seed=4)
    before = torch.get_rng_state()
    batches = [(t,) for t, _ in mine(mesh)]
    F = sc.ekfac(drawn, params, batches)
    assert torch.equal(before, torch.get_rng_state())
    labels = [drawn.labeled(params, batch, i)[0] for i, batch in enumerate(batches)]
    same = sc.ekfac(losses_of(sf.stage), params, [(t, y) for (t,), y in zip(batches, labels, strict=True)])
    got, want = (leaves(sf.unshard(A @ v)) for A in (F, same))
    return [float((got[k] - want[k]).abs().max() / want[k].abs().max()) for k in want]


@two
def test_labels_are_the_same_in_each_pass(world: World) -> None:
    for found in world.run(fisher_of_draws):
        assert worst(found) < 1e-12, found


def test_labels_are_drawn_from_the_model() -> None:
    (t, _), n = rows(0), 500
    drawn = [
        sc.SampledLabels(lambda p, t: net(plainly, p, t), lambda z, t: Categorical(logits=z), seed) for seed in range(n)
    ]
    wanted = torch.softmax(net(plainly, whole(), t), 1)
    found = sum(F.one_hot(each.labeled(whole(), (t,), 0)[0], CLASSES) for each in drawn) / n
    assert ((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / n).sqrt() + 1 / n).all()


# --- scores ---


def scored(strategy: str) -> list[float]:
    mesh, params = sharded_trees(strategy, whole())
    losses = losses_of(sf.stage)
    F = sc.ekfac(losses, params, mine(mesh))
    got = sc.influence(lambda q: F.solve(q, DAMPING), queries_of(params, mesh), losses, params, mine(mesh))
    want = []
    for query in dense_queries():
        solved = {k: inverted(dense()[k], q.flatten()) for k, q in query.items()}
        want.append(torch.stack([each()[k].flatten(1) @ solved[k] for k in solved]).sum(0))
    n, k = mesh.size(), mesh.get_rank()
    both = torch.cat([x.tensor_split(n, 1)[k] for x in torch.stack(want).chunk(2, 1)], 1)
    assert got.shape == both.shape == (2, 2 * ROWS // n)
    return [float((got - both).abs().max() / both.abs().max())]


@pytest.mark.central
@pytest.mark.parametrize("world", SIZES, indirect=True)
def test_scores_are_those_of_a_dense_solution(world: World) -> None:
    for strategy in ("full_shard", "zero1", "hybrid_shard"):
        for found in world.run(scored, strategy):
            assert worst(found) < 1e-9, (strategy, found)


# --- gradients that are kept ---


def projection(path: str, side: int, n: int, size: int) -> Tensor:
    draw = torch.Generator().manual_seed(mixed(5, "projection", path, side))
    return torch.eye(n).double() if n <= size else torch.randn(n, size, generator=draw, dtype=torch.float64) / size**0.5


def projected(path: str, g: Tensor, size: int) -> Tensor:
    """Of gradients `[rows, *shape]`."""
    shape = g.shape[1:]
    g = g.reshape(len(g), *([*shape, 1, 1][:2] if len(shape) < 3 else [shape[0], -1]))
    left, right = (projection(path, side, g.shape[1 + side], size) for side in (0, 1))
    return (left.T @ g @ right).flatten(1)


def wanted_scores(queries: list[dict[str, Tensor]], size: int, damping: float | None) -> Tensor:
    scores = torch.zeros(len(queries), 2 * ROWS).double()
    for path, g in each().items():
        kept = projected(path, g, size)
        matrix = torch.eye(kept.shape[1]).double()
        if damping is not None:
            matrix = torch.linalg.inv(kept.T @ kept / len(kept) + damping * matrix)
        scores += torch.cat([projected(path, q[path][None], size) for q in queries]) @ matrix @ kept.T
    return scores


def queries_of(params: Any, mesh: Any) -> list[Any]:
    t, y = rows(7, 2)
    losses = losses_of(sf.stage)
    return [sf.grad(lambda p, i=i: losses(p, t[i : i + 1], y[i : i + 1]).sum() / mesh.size())(params) for i in range(2)]


@functools.cache
def dense_queries() -> list[dict[str, Tensor]]:
    t, y = rows(7, 2)
    one = torch.func.grad(lambda p, i: losses_of(plainly)(p, t[i : i + 1], y[i : i + 1])[0])
    return [leaves(one(whole(), i)) for i in range(2)]


def stored(folder: Path, strategy: str, write: bool) -> list[float]:
    mesh, found = data_mesh(dist.get_world_size()), []
    params = sf.shard(whole(), mesh, STRATEGIES[strategy])
    for size in (1, 2, 4, 16):
        found += of_size(folder / str(size), params, mesh, size, write)
    return found


def of_size(folder: Path, params: Any, mesh: Any, size: int, write: bool) -> list[float]:
    store = sc.store_gradients(folder, losses_of(sf.stage), params, mine(mesh) if write else None, size=size, seed=5)
    assert store.rows == 2 * ROWS
    queries, found = queries_of(params, mesh), []
    assert store.scores([]).shape == (0, 2 * ROWS)
    for damping in (None, DAMPING, 1.0):
        got, wanted = store.scores(queries, damping), wanted_scores(dense_queries(), size, damping)
        found.append(float((got - wanted).abs().max() / wanted.abs().max()))
    return found


@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "hybrid_shard", "ddp"])
def test_scores_of_kept_gradients_are_dense_ones_on_any_mesh(tmp_path: Path, strategy: str) -> None:
    for writers, readers in ((1, 4), (2, 1), (4, 2)):
        folder = tmp_path / str(writers)
        for n, write in ((writers, True), (readers, False)):
            for found in started(n).with_deadline(60).run(stored, folder, strategy, write):
                assert worst(found) < 1e-12, (strategy, writers, n)


def conv(stage: Any) -> Any:
    f = stage(lambda p, x: F.conv2d(x[:, :, :, None], p["k"], p["c"], padding=1))
    return lambda p, x: torch.tanh(f(p["s"], x)).sum((1, 2, 3))


def tied_over_stages(stage: Any) -> Any:
    first, last = stage(lambda p, t: p["e"][t]), stage(lambda p, x: torch.tanh(x) @ p["e"].T)
    return lambda p, t: last(p["s"], first(p["s"], t)).logsumexp(-1).sum(1)


def odd(stage: Any) -> Any:
    f = stage(lambda p, x: (x @ p["one"]) * p["n"] + torch.einsum("rtd,hde->rthe", x, p["h"]).sum(2) + p["none"].sum())
    return lambda p, x: torch.sin(f(p["s"], x)).sum((1, 2)) * p["plain"][1]


HOSTILE: dict[str, tuple[Any, Any, Tensor]] = {
    "tied in a stage": (lambda stage: functools.partial(tied, stage=stage), {"e": normal(WORDS, D, seed=1)},
                        rows(3, 5)[0]),
    "tied over stages": (tied_over_stages, {"e": normal(WORDS, D, seed=1)}, rows(3, 5)[0]),
    "a convolution": (conv, {"k": normal(H, T, 3, 3, seed=1), "c": normal(H, seed=2)}, normal(5, T, D, seed=3)),
    "odd shapes": (odd, {"one": normal(D, 1, seed=1), "n": normal(seed=2), "h": normal(2, D, H, seed=3),
                         "none": normal(0, 4, seed=4), "unused": normal(H, 6, seed=5)}, normal(5, T, D, seed=6)),
}  # fmt: skip


def hostile(folder: Path, which: str, strategy: str, frozen: list[str]) -> list[float]:
    """Fewer rows than ranks in one batch, and a plain tensor that is the same on all ranks."""
    make, tree, x = HOSTILE[which]
    mesh, size, extra = data_mesh(dist.get_world_size()), 3, {"plain": normal(2, seed=9)}
    n, k = mesh.size(), mesh.get_rank()
    params = sf.shard({"s": tree}, mesh, STRATEGIES[strategy], frozen=frozen) | extra
    batches = [(each.tensor_split(n)[k],) for each in (x[:1], x[1:])]
    store = sc.store_gradients(folder, make(sf.stage), params, batches, size=size, seed=5)
    query = sf.shard({"s": optree.tree_map(torch.cos, tree)}, mesh, STRATEGIES[strategy], frozen=frozen) | extra
    got, each = store.scores([query], DAMPING), dict[str, Tensor]()
    whole = {"s": tree} | extra
    for i in range(len(x)):
        free = optree.tree_map(lambda x: x.clone().requires_grad_(), whole)
        found = torch.autograd.grad(
            make(plainly)(free, x[i : i + 1])[0], list(leaves(free).values()), allow_unused=True
        )
        for path, p, g in zip(leaves(free), leaves(free).values(), found, strict=True):
            each[path] = torch.cat(
                [each.get(path, p[None][:0].detach()), (torch.zeros_like(p) if g is None else g)[None]]
            )
    want = torch.zeros(1, len(x)).double()
    for path, g in each.items():
        if path not in frozen and g[0].numel():
            kept, q = projected(path, g, size), leaves(whole)[path]
            matrix = torch.linalg.inv(kept.T @ kept / len(kept) + DAMPING * torch.eye(kept.shape[1]).double())
            want += projected(path, (q if path == "plain" else q.cos())[None], size) @ matrix @ kept.T
    return [float((got - want).abs().max() / want.abs().max())]


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "zero1"])
@pytest.mark.parametrize("which", HOSTILE)
@pytest.mark.parametrize("world", SIZES, indirect=True)
def test_gradients_of_other_programs_are_kept(world: World, tmp_path: Path, which: str, strategy: str) -> None:
    frozen = {"a convolution": ["s.c"], "odd shapes": ["s.one"]}.get(which, [])
    for found in world.with_deadline(60).run(hostile, tmp_path / "rows", which, strategy, frozen):
        assert worst(found) < 1e-11, found


def test_projected_products_are_right_on_average() -> None:
    draw = torch.Generator().manual_seed(0)
    x, params = torch.randn(6, 9, generator=draw).double(), {"w": torch.randn(7, 9, generator=draw).double()}

    def losses(p: Any, x: Tensor) -> Tensor:
        return F.linear(x, p["w"]).square().sum(1)

    g = torch.stack([torch.func.grad(lambda p, i=i: losses(p, x[i : i + 1])[0])(params)["w"] for i in range(6)])
    wanted, found = torch.einsum("ij,nij->n", g[0], g), []
    for seed in range(600):
        with tempfile.TemporaryDirectory() as folder:
            found.append(sc.store_gradients(folder, losses, params, [x], size=5, seed=seed).scores([{"w": g[0]}])[0])
    mean, error = torch.stack(found).mean(0), torch.stack(found).std(0) / len(found) ** 0.5
    assert ((mean - wanted).abs() < 4 * error).all()


def gone_on(folder: Path) -> list[float]:
    """A call that breaks off at its second batch, and one that goes on."""
    mesh = data_mesh(dist.get_world_size())
    params, batches = sf.shard(whole(), mesh, STRATEGIES["full_shard"]), mine(mesh)

    class Stops(Exception):
        pass

    class Feed(list[Any]):
        def __iter__(self) -> Any:
            yield batches[0]
            raise Stops

    with contextlib.suppress(Stops):
        sc.store_gradients(folder, losses_of(sf.stage), params, Feed(batches), size=2, seed=5)
    dist.barrier()  # all ranks have written
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*.npy")}
    assert len(times) == mesh.size()
    dist.barrier()  # all have looked
    with contextlib.suppress(sf.checkpoint.CheckpointError):
        sc.store_gradients(folder, losses_of(sf.stage), params, size=2, seed=5)
        raise AssertionError("it is not complete")
    store = sc.store_gradients(folder, losses_of(sf.stage), params, batches, size=2, seed=5)
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    got, wanted = store.scores(queries_of(params, mesh)), wanted_scores(dense_queries(), 2, None)
    return [float((got - wanted).abs().max() / wanted.abs().max())]


@pytest.mark.parametrize("world", SIZES, indirect=True)
def test_a_store_goes_on_where_it_broke_off(world: World, tmp_path: Path) -> None:
    for found in world.run(gone_on, tmp_path / "rows"):
        assert worst(found) < 1e-12


def wrong_store(folder: Path, which: str) -> str:
    mesh = data_mesh(dist.get_world_size())
    params, batches = sf.shard(whole(), mesh, STRATEGIES["full_shard"]), mine(mesh)
    first = mesh.get_rank() == 0
    store = functools.partial(sc.store_gradients, folder, losses_of(sf.stage))
    found = store(params, batches, size=2)
    before = sorted(path.name for path in folder.iterdir())
    other = sf.shard(optree.tree_map(lambda x: x * (1 + 1e-6), whole()), mesh, STRATEGIES["full_shard"])
    calls: dict[str, Callable[[], Any]] = {
        "size": lambda: store(params, batches, size=3),
        "seed": lambda: store(params, batches, size=2, seed=1),
        "size 0": lambda: store(params, batches, size=0),
        "sizes differ": lambda: store(params, batches, size=2 + first),
        "no batches on a rank": lambda: store(params, batches if first else None, size=2),
        "other values": lambda: store(other, batches, size=2),
        "other rows": lambda: store(params, [batches[1], batches[0]], size=2),
        "rows on a rank": lambda: store(params, [batches[0], batches[0]] if first else batches, size=2),
        "more batches": lambda: store(params, [*batches, batches[0]], size=2),
        "nothing there": lambda: sc.store_gradients(folder / "none", losses_of(sf.stage), params),
        "a file": lambda: sc.store_gradients(folder / "gradients.json", losses_of(sf.stage), params, batches),
        "damping": lambda: found.scores(queries_of(params, mesh), 0.0),
        "a query": lambda: found.scores([{"x": torch.ones(3)}]),
        "queries differ": lambda: found.scores(queries_of(params, mesh)[: 1 + first]),
    }
    message = told(calls[which])
    assert sorted(path.name for path in folder.iterdir()) == before
    return message


@two
@pytest.mark.parametrize(
    ("which", "message"),
    {
        "size": "CheckpointError: .*for other arguments: size: 2, not 3",
        "seed": "CheckpointError: .*for other arguments: seed: 0, not 1",
        "size 0": "ValueError: .*size must be an integer of 1 or more, got 0",
        "sizes differ": "ValueError: .*size: ",
        "no batches on a rank": "ValueError: .*batches: ",
        "other values": "CheckpointError: .*is of different values of the parameters",
        "other rows": "CheckpointError: .*is of other losses, or of another first batch",
        "rows on a rank": "(CheckpointError|ValueError): .*batch 1 of rank 0 in .* was another one",
        "more batches": "CheckpointError: .*for other arguments: batches: 2, not 3",
        "nothing there": "CheckpointError: .*has no gradients: pass batches",
        "a file": "(OSError|NotADirectoryError|FileExistsError|ValueError): ",
        "damping": "ValueError: scores: damping must be a finite number above 0, or None, got 0.0",
        "a query": "ValueError: .*another structure",
        "queries differ": "ValueError: .*queries: ",
    }.items(),
)
def test_errors_of_stores_are_told_on_all_ranks(world: World, tmp_path: Path, which: str, message: str) -> None:
    for said in world.run(wrong_store, tmp_path / "rows", which):
        assert re.match(message, said, re.DOTALL), said


def broken(folder: Path) -> list[str]:
    """A file of the second rank is cut short, and then that of another row."""
    mesh, params = sharded_trees("full_shard", whole())
    store = sc.store_gradients(folder, losses_of(sf.stage), params, mine(mesh), size=2, seed=5)
    file, said = min(folder.glob("*-00001-*.npy")), []
    content = file.read_bytes()
    for wrong in (content[:-8], content[:40], b""):
        dist.barrier()
        file.write_bytes(wrong)
        dist.barrier()
        said.append(told(lambda: store.scores(queries_of(params, mesh))))
    return said


@two
def test_a_file_that_is_cut_short_is_told_on_all_ranks(world: World, tmp_path: Path) -> None:
    for said in world.run(broken, tmp_path / "rows"):
        assert len(said) == 3, said


# --- what is kept ---


def kept(folder: Path, first: bool) -> float:
    mesh, params, v = sharded_trees("full_shard", whole(), vector())
    found = []
    for batches in (mine(mesh), *([] if first else [None])):
        F = sc.ekfac(losses_of(sf.stage), params, batches, folder=folder)
        found.append(off(F.solve(v, DAMPING), times(dense(), inverted)))
    return worst(found)


def test_a_folder_keeps_it_for_another_mesh(tmp_path: Path) -> None:
    for n, first in ((4, True), (2, False), (1, False)):
        for found in started(n).run(kept, tmp_path / "fisher", first):
            assert found < 1e-9


def under_a_map() -> list[float]:
    """Everything runs under the checker too."""
    mesh, params = sharded_trees("full_shard", whole())

    def run(params: Any, v: Any, batches: Any) -> Any:
        losses = losses_of(sf.stage)
        F = sc.ekfac(losses, params, batches)
        return F @ v, sc.influence(lambda q: F.solve(q, DAMPING), [v], losses, params, batches)

    v = sf.shard(vector(), mesh, STRATEGIES["full_shard"])
    batches = [rows(0), rows(1)]
    product, _ = sf.shard_map(run, mesh=mesh, in_specs=(..., ..., sf.P(DATA)), out_specs=(..., sf.P(None, DATA)))(
        params, v, mine(mesh)
    )
    del batches
    return [off(product, times(dense(), torch.mv))]


@two
def test_under_the_checker(world: World) -> None:
    for found in world.run(under_a_map):
        assert worst(found) < 1e-9, found


def of_frozen() -> list[float]:
    """Some parameters are frozen, some of another dtype, one has no dimensions and one no elements."""
    mesh = data_mesh(dist.get_world_size())
    extra = {"n": torch.tensor(1.5, dtype=torch.float64), "none": torch.ones(0, 3, dtype=torch.float64)}
    tree = whole() | {"extra": extra | {"half": torch.ones(CLASSES)}}
    params = sf.shard(
        tree, mesh, STRATEGIES["full_shard"], frozen=lambda path, _: path.startswith(("embed", "layers.0"))
    )

    def losses(p: Any, t: Tensor, y: Tensor) -> Tensor:
        scaled = sf.stage(lambda e, z: z * e["n"] + e["half"].double() + e["none"].sum())
        return F.cross_entropy(scaled(p["extra"], net(sf.stage, p, t)), y, reduction="none")

    found = sc.ekfac(losses, params, mine(mesh))
    moving = {"extra.half", "extra.n", "head.w", *(f"layers.1.{name}" for name in "absg")}
    assert set(found.kinds) == moving, found.kinds

    def plainly_(p: Any, t: Tensor, y: Tensor) -> Tensor:
        z = net(plainly, p, t[None]) * p["extra"]["n"] + p["extra"]["half"].double()
        return F.cross_entropy(z, y[None])

    t, y = (torch.cat(xs) for xs in zip(rows(0), rows(1), strict=True))
    g = leaves(torch.func.vmap(torch.func.grad(plainly_), (None, 0, 0))(tree, t, y))
    got = leaves(sf.unshard(found @ params))
    want = {path: g[path].square().mean(0) * x for path, x in leaves(tree).items() if path in found.kinds}
    diagonal = [path for path, kind in found.kinds.items() if kind == "diagonal"]
    assert {"extra.n", "extra.half"} <= set(diagonal)
    return [float((got[path].double() - want[path]).abs().max()) for path in diagonal]


@two
def test_frozen_parameters_and_odd_shapes(world: World) -> None:
    for found in world.run(of_frozen):
        assert worst(found) < 1e-6, found


def along_one_axis() -> list[float]:
    """Ranks along the other axis have the same rows, and do the same work."""
    mesh = sf.make_mesh(device="cpu", other=2, shard=2)
    params = sf.shard(whole(), mesh, sf.full_shard("shard"))
    v = sf.shard(vector(), mesh, sf.full_shard("shard"))
    k = mesh.get_local_rank("shard")
    batches = [tuple(x.tensor_split(2)[k] for x in rows(batch)) for batch in (0, 1)]
    found = sc.ekfac(losses_of(sf.stage), params, batches)
    assert found.rows == 2 * ROWS
    drawn = sc.SampledLabels(lambda p, t: net(sf.stage, p, t), lambda z, t: Categorical(logits=z))
    labels = sf.shard_map(lambda x: sf.all_gather(x, "other"), mesh=mesh, in_specs=..., out_specs=...)(
        drawn.labeled(params, (batches[0][0],), 0)[0]
    )
    assert torch.equal(*labels.chunk(2))
    return [off(found.solve(v, DAMPING), times(dense(), inverted))]


@pytest.mark.world(4, "processes")
def test_an_axis_along_which_rows_are_the_same(world: World) -> None:
    for found in world.run(along_one_axis):
        assert worst(found) < 1e-9, found
