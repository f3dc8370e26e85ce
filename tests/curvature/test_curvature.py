"""Eigenvalues, traces, diagonals, solutions and sharpness: right beside dense matrices, and alike on any mesh."""

from __future__ import annotations

import math
import re
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
import shardfn.optim as so
from shardfn import curvature as sc
from shardfn import interop
from shardfn.testing import World
from shardfn.testing import world as started
from tests.curvature.test_operators import DATA, batches_of, dense, entropy, flat, grid, net, operator, whole
from tests.models import STRATEGIES
from tests.reference import worst

four = pytest.mark.world(4, "processes")
two = pytest.mark.world(2, "processes")
SIZES = [pytest.param(n, marks=pytest.mark.world(n, "processes")) for n in (1, 2, 4)]


def on_shards(kind: str, use: Any, strategy: str = "full_shard") -> Any:
    """What `use(A, params)` gives of an operator under `shard_map`, its trees whole."""
    mesh = grid()
    params = sf.shard(whole(), mesh, STRATEGIES[strategy])

    def run(params: Any, batches: Any) -> Any:
        return use(operator(kind, sf.stage, lambda x: sf.psum(x, DATA), params, batches), params)

    mapped = sf.shard_map(run, mesh=mesh, in_specs=(..., sf.P(DATA)), out_specs=..., check=False)
    return mapped(params, batches_of(mesh))


# --- eigenvalues ---


def eigenvalues(strategy: str) -> list[tuple[Tensor, Tensor, list[float], int]]:
    found = on_shards("hvp", lambda A, _: [sc.top_eig(A, 3, which=w, tolerance=1e-8) for w in ("LM", "SA")], strategy)
    matrix, told = dense("hvp"), []
    for each in found:
        vectors = [flat(sf.unshard(v)) for v in each.vectors]
        residuals = [float((matrix @ v - x * v).norm()) for v, x in zip(vectors, each.values, strict=True)]
        told.append((each.values, each.errors, residuals, each.products))
    return told


@pytest.mark.parametrize(
    ("world", "strategy"),
    [((1, "processes"), "full_shard"), ((2, "processes"), "zero1"), ((4, "processes"), "hybrid_shard")],
    indirect=["world"], ids=["1", "2", "4"],
)  # fmt: skip
def test_outermost_eigenvalues_are_those_of_the_dense_matrix(world: World, strategy: str) -> None:
    exact = torch.linalg.eigvalsh(dense("hvp"))
    size = float(exact.abs().max())
    for told in world.with_deadline(240).run(eigenvalues, strategy):
        for want, (values, errors, residuals, products) in zip(
            (exact[exact.abs().argsort(descending=True)], exact), told, strict=True
        ):
            assert worst((values - want[:3]).abs().tolist()) < 1e-8 * size
            assert worst(errors.tolist()) <= 1e-8 * size
            assert worst(residuals) < 2e-8 * size
            assert products < 150


def given(matrix: Tensor) -> Any:
    """An operator by a dense matrix, of a vector."""
    return sc.Operator(lambda v: {"x": matrix.to(v["x"]) @ v["x"]}, {"x": torch.zeros(len(matrix), dtype=matrix.dtype)})


def rotated(values: Tensor, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64, generator=draw))[0]
    return q @ values.diag() @ q.T


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(9),  # every vector is an eigenvector
        torch.zeros(9),
        torch.tensor([5.0] + [1.0] * 30),  # a space of two dimensions has all there is to find
        torch.tensor([2.0, 2.0, 2.0, 1.0, 0.0, 0.0]),
        torch.tensor([3.0]),
        torch.tensor([-4.0, 1.0]),
        torch.linspace(-1, 1, 60),
        torch.logspace(-9, 9, 40),
    ],
)
def test_eigenvalues_of_matrices_that_end_early(values: Tensor) -> None:
    matrix = rotated(values.double())
    found = sc.top_eig(given(matrix), 2, tolerance=1e-10)
    want = values.double()[values.abs().argsort(descending=True)]
    assert len(found.values) == min(2, len(values))
    size = max(1.0, float(want.abs().max()))
    assert abs(found.values[0].abs() - want[0].abs()) < 1e-7 * size
    for value, v in zip(found.values, found.vectors, strict=True):
        assert float((matrix @ v["x"] - value * v["x"]).norm()) < 1e-7 * size
        assert abs(float(v["x"].norm()) - 1) < 1e-9


def test_eigenvalues_of_narrow_dtypes_are_searched_in_float32() -> None:
    values = torch.linspace(1, 10, 40).double()
    matrix = rotated(values).float()
    for dtype in (torch.float32, torch.bfloat16):
        A = sc.Operator(lambda v: {"x": matrix @ v["x"]}, {"x": torch.zeros(40, dtype=dtype)})
        found = sc.top_eig(A, tolerance=1e-5)
        assert abs(float(found.values[0]) - 10) < 1e-4
        assert found.vectors[0]["x"].dtype == torch.float32


def test_a_search_that_is_cut_short_tells_its_errors() -> None:
    matrix = rotated(torch.linspace(-1, 1, 200).double())
    found = sc.top_eig(given(matrix), 2, tolerance=1e-12, products=9)
    assert found.products == 9
    exact = torch.linalg.eigvalsh(matrix)
    for value, error in zip(found.values, found.errors, strict=True):
        assert error > 1e-6
        assert float((exact - value).abs().min()) <= error + 1e-12


# --- the density of all ---


def density(folder: str, stop: int | None, strategy: str = "full_shard") -> Any:
    def use(A: sc.Operator, _: Any) -> Any:
        if stop is not None:
            apply, left = A._apply, [stop]

            def counted(v: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
                return apply(v)

            A._apply = counted
        found = sc.spectrum(A, 20, 2, folder=folder or None, every=3)
        return found.values, found.weights

    try:
        return on_shards("hvp", use, strategy)
    except KeyboardInterrupt:
        return None


def lanczos(matrix: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights, with vectors that are made orthogonal to all others."""
    Q = [v / v.norm()]
    for _ in range(steps - 1):
        w = matrix @ Q[-1]
        for _ in range(2):
            w = w - torch.stack(Q, 1) @ (torch.stack(Q) @ w)
        Q.append(w / w.norm())
    q = torch.stack(Q, 1)
    values, vectors = torch.linalg.eigh(q.T @ matrix @ q)
    return values, vectors[0] ** 2


def first_vectors() -> list[Tensor]:
    return [flat(sf.unshard(v)) for v in on_shards("hvp", _first)]


def _first(A: sc.Operator, _: Any) -> list[Any]:
    return [A.space.written(A.space.random_vector(kind, 0, n)) for kind in ("normal", "signs") for n in (0, 1)]


@pytest.mark.parametrize("ranks", SIZES[1:])
def test_densities_are_those_of_the_dense_matrix(world: World, ranks: int) -> None:
    starts = world.run(first_vectors)[0]
    for values, weights in world.with_deadline(240).run(density, "", None):
        assert worst((weights.sum(-1) - 1).abs().tolist()) < 1e-12
        for draw in range(2):
            want, heavy = lanczos(dense("hvp"), starts[draw], 20)
            for power in range(1, 9):  # moments, as values without weight may be anywhere
                a, b = (values[draw] ** power * weights[draw]).sum(), (want**power * heavy).sum()
                assert abs(a - b) < 1e-10 * float((want.abs() ** power * heavy).sum())


def test_random_vectors_are_alike_on_any_mesh() -> None:
    found = {n: started(n, "processes").run(first_vectors)[0] for n in (1, 2, 4)}
    for n in (2, 4):
        for a, b in zip(found[1], found[n], strict=True):
            assert torch.equal(a, b)
    normal, *_, signs, other = found[1]
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    assert not torch.equal(signs, other)
    assert abs(float(normal.mean())) < 0.3
    assert abs(float(normal.std()) - 1) < 0.2


def test_random_numbers_are_normal() -> None:
    A = sc.Operator(lambda v: v, {"x": torch.zeros(400_000, dtype=torch.float64)})
    x, y = A.space.random_vector("normal", 3, 0)[0], A.space.random_vector("normal", 3, 1)[0]
    edges = torch.tensor([-3.0, -2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 2.0, 3.0], dtype=torch.float64)
    want = 0.5 * (1 + torch.erf(edges / 2**0.5))
    assert worst([abs(float((x < e).double().mean() - p)) for e, p in zip(edges, want, strict=True)]) < 0.003
    assert abs(float((x * y).mean())) < 0.006
    assert abs(float((x[1:] * x[:-1]).mean())) < 0.006
    s = A.space.random_vector("signs", 3, 0)[0]
    assert abs(float(s.mean())) < 0.006
    assert abs(float((s[1:] * s[:-1]).mean())) < 0.006


@two
@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_a_density_goes_on_where_it_was_stopped(world: World, tmp_path: Path, strategy: str) -> None:
    want = world.run(density, "", None, strategy)
    assert world.run(density, str(tmp_path / "s"), 25, strategy) == [None, None]
    assert (tmp_path / "s").exists()
    for (values, weights), (same, heavy) in zip(
        world.run(density, str(tmp_path / "s"), 17, strategy), want, strict=True
    ):
        assert torch.equal(values, same)
        assert torch.equal(weights, heavy)
    for values, _ in world.run(density, str(tmp_path / "s"), 1, strategy):  # it is complete
        assert torch.equal(values, want[0][0])


def test_traces_of_functions() -> None:
    matrix = rotated(torch.linspace(1, 3, 50).double())
    found = sc.spectrum(given(matrix), 30, 20)
    value, error = found.trace(torch.log)
    want = float(torch.linspace(1, 3, 50).double().log().sum())
    assert 0 < error < 1
    assert abs(value - want) < 4 * error
    one, error = sc.spectrum(given(torch.eye(5, dtype=torch.float64) * 2), 4).trace(torch.log)  # ends after a step
    assert abs(one - 5 * math.log(2)) < 1e-12
    assert math.isnan(error)
    points = torch.linspace(-5, 9, 2001).double()
    assert abs(float(torch.trapezoid(found.density(points, 0.1), points)) - 1) < 1e-6


# --- traces and diagonals ---


def estimates() -> Any:
    return on_shards("ggn", lambda A, _: [sc.trace(A, 30), sc.trace(A, 30, sketch=0), sc.trace(A, 100)])


@two
def test_traces_are_those_of_the_dense_matrix(world: World) -> None:
    exact = float(dense("ggn").trace())
    for *rough, fine in world.with_deadline(240).run(estimates):
        for value, error in rough:
            assert 0 < error < exact
            assert abs(value - exact) < 4 * error
        assert abs(fine.value - exact) < 1e-10 * exact  # its sketch has the whole range: 2 x 8 rows x 2
        assert fine.error < 1e-10 * exact


def test_a_trace_by_hand() -> None:
    matrix = rotated(torch.linspace(-1, 3, 30).double())
    A = given(matrix)
    draws = [A.space.random_vector("signs", 5, k)[0] for k in range(12)]
    each = torch.stack([v @ matrix @ v for v in draws])
    value, error = sc.trace(A, 12, sketch=0, seed=5)
    assert abs(value - float(each.mean())) < 1e-12
    assert abs(error - float(each.std()) / 12**0.5) < 1e-12
    q = torch.linalg.qr(matrix @ torch.stack([A.space.random_vector("normal", 5, k)[0] for k in range(4)], 1))[0]
    rest = [v - q @ (q.T @ v) for v in draws[4:8]]
    want = float((q.T @ matrix @ q).trace() + torch.stack([v @ matrix @ v for v in rest]).mean())
    assert abs(sc.trace(A, 12, seed=5).value - want) < 1e-11
    assert abs(sc.trace(given(matrix[:3, :3]), 30).value - float(matrix[:3, :3].trace())) < 1e-12


def diagonals() -> Tensor:
    return flat(sf.unshard(on_shards("ggn", lambda A, _: sc.diag(A, 40, seed=2))))


@two
def test_diagonals_are_means_over_signs(world: World) -> None:
    matrix = dense("ggn")
    for found in world.run(diagonals):
        spread = ((matrix**2).sum(1) - matrix.diagonal() ** 2).sqrt() / 40**0.5
        assert ((found - matrix.diagonal()).abs() <= 5 * spread + 1e-12).all()
    exact = torch.arange(6).double()
    assert torch.allclose(sc.diag(given(exact.diag()), 1)["x"], exact, rtol=1e-15)


# --- systems ---


def solutions(by: Any) -> tuple[Tensor, float, int, bool]:
    def use(A: sc.Operator, params: Any) -> Any:
        b = sf.shard(whole(3), grid(), STRATEGIES["zero1"])
        found = sc.solve(A, b, by, damping=1.0, tolerance=1e-10)
        return found.x, found.residual, found.products, found.converged

    x, *rest = on_shards("ggn", use, "zero1")
    return flat(sf.unshard(x)), *rest


@two
@pytest.mark.parametrize("by", ["cg", "lsmr"])
def test_solutions_are_those_of_the_dense_matrix(world: World, by: str) -> None:
    matrix = dense("ggn") + torch.eye(len(dense("ggn")), dtype=torch.float64)
    b = flat(whole(3))
    want = torch.linalg.solve(matrix, b)
    for x, residual, products, converged in world.run(solutions, by):
        assert converged, (residual, products)
        assert float((x - want).norm() / want.norm()) < 1e-8
        assert abs(residual - float((b - matrix @ x).norm() / b.norm())) < 1e-11


@pytest.mark.parametrize("by", ["cg", "lsmr", "neumann"])
def test_each_method_solves(by: Any) -> None:
    matrix, b = rotated(torch.linspace(0.5, 4, 50).double()), torch.linspace(-1, 2, 50).double()
    found = sc.solve(given(matrix), {"x": b}, by, damping=0.25, tolerance=1e-12, products=999,
                     scale=0.4 if by == "neumann" else None)  # fmt: skip
    want = torch.linalg.solve(matrix + 0.25 * torch.eye(50).double(), b)
    assert found.converged
    assert float((found.x["x"] - want).norm() / want.norm()) < 1e-11
    off = float((b - matrix @ found.x["x"] - 0.25 * found.x["x"]).norm() / b.norm())
    assert abs(found.residual - off) < 1e-12


def test_systems_that_are_singular_or_indefinite() -> None:
    values = torch.tensor([3.0, 2.0, -1.0, 0.0, 0.0]).double()
    matrix, b = rotated(values), torch.arange(1.0, 6).double()
    found = sc.solve(given(matrix), {"x": b}, "lsmr", tolerance=1e-13, products=500)
    assert found.converged
    want = torch.linalg.pinv(matrix) @ b
    assert torch.allclose(found.x["x"], want, rtol=1e-8)
    assert abs(found.residual - float((b - matrix @ want).norm() / b.norm())) < 1e-9
    assert torch.equal(b, torch.arange(1.0, 6).double())
    with pytest.raises(ValueError, match="not positive definite"):
        sc.solve(given(matrix), {"x": b})
    with pytest.raises(FloatingPointError, match="diverges"):
        sc.solve(given(matrix), {"x": b}, "neumann", scale=1.0)
    short = sc.solve(given(rotated(torch.logspace(0, 6, 40).double())), {"x": torch.ones(40).double()}, products=5)
    assert (short.converged, short.products) == (False, 6)
    assert short.residual > 1e-3
    none = sc.solve(given(matrix), {"x": torch.zeros(5).double()})
    assert none.converged
    assert torch.equal(none.x["x"], torch.zeros(5).double())


# --- sharpness ---


def sharpnesses(strategy: str) -> dict[str, Any]:
    mesh = grid()
    params = sf.shard(whole(), mesh, STRATEGIES[strategy])
    opt = so.chain(so.clip_by_global_norm(10.0), so.adamw(1e-2, b2=0.9, donate=False))

    def run(params: Any, batches: Any) -> Any:
        def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
            return sf.psum(entropy(net(sf.stage, p, x), y), DATA)

        state, gradient = opt.init(params), sf.grad(loss)(params, *batches[0])
        _, state = opt.step(params, gradient, state)
        return {
            "raw": sc.sharpness(loss, params, batches, tolerance=1e-9, products=999),
            "adam": sc.sharpness(loss, params, batches, state=state, tolerance=1e-9, products=999),
            "gradient": gradient,
            "critical": sc.critical_sharpness(loss, params, gradient, batches[:1], tolerance=1e-6, forwards=60),
            "few": sc.critical_sharpness(loss, params, gradient, batches[:1], rate=1e-3),
            "none": sc.critical_sharpness(loss, params, gradient, batches[:1], rate=1e-9, forwards=3),
        }

    mapped = sf.shard_map(run, mesh=mesh, in_specs=(..., sf.P(DATA)), out_specs=..., check=False)
    found = mapped(params, batches_of(mesh))
    return found | {"gradient": flat(sf.unshard(found["gradient"]))}


@four
@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "hybrid_shard"])
def test_sharpness_is_that_of_the_dense_matrix(world: World, strategy: str) -> None:
    H = dense("hvp")
    for found in world.run(sharpnesses, strategy):
        g = found["gradient"]
        assert abs(found["raw"] - float(torch.linalg.eigvalsh(H).max())) < 1e-7
        root = (0.1 * (g.abs() + 1e-8)).rsqrt()  # after one step the mean of squares is the square
        assert abs(found["adam"] / float(torch.linalg.eigvalsh(root[:, None] * H * root).max()) - 1) < 1e-6
        critical, few, none = found["critical"], found["few"], found["none"]
        assert critical.low < critical.high < critical.low * (1 + 1e-6)
        assert few.forwards <= 9
        assert few.low <= critical.high
        assert few.high >= critical.low
        assert abs(few.sharpness / critical.sharpness - 1) < 0.5
        assert math.isnan(none.sharpness)
        assert none.low > 0
        assert math.isinf(none.high)


def test_critical_sharpness_of_a_quadratic_is_its_curvature_along_the_gradient() -> None:
    H = rotated(torch.linspace(0.1, 5, 12).double())
    p = {"x": torch.ones(12).double()}

    def loss(p: Any) -> Any:
        return 0.5 * p["x"] @ H @ p["x"]

    g = sf.grad(loss)(p)["x"]
    found = sc.critical_sharpness(loss, p, {"x": g}, tolerance=1e-8, forwards=100)
    assert abs(found.sharpness / float(g @ H @ g / (g @ g)) - 1) < 1e-7


# --- what surrounds a product ---


def test_operators_add_and_scale() -> None:
    a, b = rotated(torch.linspace(1, 2, 7).double()), rotated(torch.linspace(3, 5, 7).double(), 1)
    v = {"x": torch.arange(7).double()}
    got = (2 * given(a) - given(b) / 4 + given(a) * 0.5) @ v
    assert torch.allclose(got["x"], (2.5 * a - b / 4) @ v["x"], rtol=1e-13)
    same = sc.Operator(lambda v: v, {"x": torch.zeros(7).double()})
    assert (same @ v)["x"].data_ptr() != v["x"].data_ptr()
    assert torch.equal(v["x"], torch.arange(7).double())


def noisy(kind: str) -> tuple[float, bool]:
    """With dropout in the middle, a matrix is symmetric only if all that a product runs drops out the same."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params, u, v = (sf.shard(whole(k), mesh, sf.full_shard("shard")) for k in range(3))
    x = torch.arange(5)

    def outputs(p: Any) -> Tensor:
        return net(lambda f: sf.stage(lambda p, x: f(p, F.dropout(x, 0.5) if x.is_floating_point() else x)), p, x)

    def curve(z: Tensor) -> Tensor:
        return sf.psum(z.square().sum() + z.sin().sum(), "shard")

    torch.manual_seed(dist.get_rank())

    def both(p: Any, u: Any, v: Any) -> tuple[float, bool]:
        made: dict[str, Any] = {
            "hvp": lambda: sc.hvp(lambda p: curve(outputs(p)), p),
            "ggn": lambda: sc.ggn(outputs, curve, p),
            "fisher": lambda: sc.fisher(outputs, lambda z: Categorical(logits=z), p),
            "drawn": lambda: sc.fisher(outputs, lambda z: Categorical(logits=z), p, labels=2),
            "empirical": lambda: sc.empirical_fisher(lambda p: outputs(p).square().sum(1), p),
        }
        H = made[kind]()
        a = so.vdot(u, H @ v)
        torch.rand(3)
        before = torch.get_rng_state()
        b = so.vdot(v, H @ u)
        return abs(float(a - b)) / abs(float(a)), torch.equal(before, torch.get_rng_state())

    return sf.shard_map(both, mesh=mesh, in_specs=..., out_specs=..., check=False)(params, u, v)


@two
@pytest.mark.parametrize("kind", ["hvp", "ggn", "fisher", "drawn", "empirical"])
def test_each_product_draws_the_same_random_numbers(world: World, kind: str) -> None:
    for asymmetry, untouched in world.run(noisy, kind):
        assert asymmetry < 1e-12
        assert untouched


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_module(frozen: tuple[str, ...], dtype: torch.dtype = torch.float64) -> tuple[list[float], bool]:
    """How far products with a module's Hessian and Gauss-Newton matrix are from those of its whole parameters."""
    torch.manual_seed(0)
    mesh = sf.make_mesh(shard=-1, device="cpu")
    model = interop.functional(Net().to(dtype).train(), min_stage_params=1)
    params = model.shard(mesh, sf.full_shard("shard"), frozen=frozen)
    x = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(1))
    mine = x.chunk(mesh.size())[mesh.get_rank()]

    def one(p: Any, x: Tensor, data: Any = "shard") -> Tensor:
        return sf.psum(model(p, x).square().sum(), data)

    def outputs(p: Any, x: Tensor) -> Tensor:
        return model(p, x)

    def loss(z: Tensor, x: Tensor) -> Tensor:
        return sf.psum(z.square().sum(), "shard")

    space = sc.Operator(lambda v: v, params).space
    v = space.written(space.random_vector("normal", 1, 0))

    def both(p: Any, v: Any, b: Any) -> list[Any]:
        return [A @ v for A in (sc.hvp(one, p, b), sc.ggn(outputs, loss, p, b))]

    mapped = sf.shard_map(both, mesh=mesh, in_specs=(..., ..., sf.P("shard")), out_specs=...)
    products = mapped(params, v, [mine])
    missing = [node.values is None for node in optree.tree_leaves(v, is_leaf=lambda n: type(n) is sf.shards.FlatShard)]
    whole = sf.unshard(params)
    fixed = sf.unshard(optree.tree_map(lambda p: torch.zeros_like(p), params))
    direction = optree.tree_map(lambda z, d: z if d is None else d, fixed, sf.unshard(v), none_is_leaf=True)

    def plain(p: Any) -> Tensor:
        return one(p, x, ())

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        H = torch.func.jvp(torch.func.grad(plain), (whole,), (direction,))[1]
        push: Any = torch.func.jvp
        _, dz = push(lambda p: model(p, x), (whole,), (direction,))
        G = torch.func.vjp(lambda p: model(p, x), whole)[1](2 * dz)[0]
    found = []
    for got, want in zip(products, (H, G), strict=True):
        leaves = zip(optree.tree_leaves(sf.unshard(got), none_is_leaf=True), optree.tree_leaves(want), strict=True)
        pairs = [(a, b) for a, b in leaves if a is not None]
        found.append(worst([float((a - b).norm() / (b.norm() + 1)) for a, b in pairs]))
    return found, any(missing)


@two
@pytest.mark.parametrize("frozen", [(), ("blocks.0.*",)])
def test_products_of_modules(world: World, frozen: tuple[str, ...]) -> None:
    for off, missing in world.run(of_module, frozen):
        assert worst(off) < 1e-12
        assert missing is bool(frozen)


X = {"x": torch.ones(3)}


@two
@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda sc, p, m: sc.hvp(lambda p, b: p, p, iter([1])), TypeError, "pass a list"),
        (lambda sc, p, m: sc.hvp(lambda p, b: p, p, torch.ones(3)), TypeError, "this is Tensor"),
        (lambda sc, p, m: sc.hvp(lambda p, b: p, p, {"x": 1}), TypeError, "this is dict"),
        (lambda sc, p, m: sc.empirical_fisher(lambda p: p["x"].sum(), X) @ X, ValueError, "one loss a row"),
        (lambda sc, p, m: sc.top_eig(given(torch.eye(3)), seed=m.get_rank()), ValueError, "the arguments differ"),
        (lambda sc, p, m: sc.top_eig(given(torch.eye(3)), m.get_rank()), ValueError, "the arguments differ"),
        (lambda sc, p, m: sc.spectrum(given(torch.eye(3)), m.get_rank()), ValueError, "the arguments differ"),
        (lambda sc, p, m: sc.diag(given(torch.eye(3)), m.get_rank()), ValueError, "the arguments differ"),
        (lambda sc, p, m: sc.solve(given(torch.eye(3)), X, products=m.get_rank()), ValueError, "the arguments differ"),
        (lambda sc, p, m: sc.critical_sharpness(lambda p: p["x"].sum(), X, X, rate=0.0 + m.get_rank()),
         ValueError, "the arguments differ"),
        (lambda sc, p, m: sc.trace(given(torch.eye(3)), 9 + m.get_rank()), ValueError, "the arguments differ"),
        (lambda sc, p, m: sc.hvp(lambda p, b: p, p, 3), TypeError, "this is int"),
        (lambda sc, p, m: sc.hvp(lambda p, b: p, p, [1] * (1 + m.get_rank())), ValueError, "numbers of batches"),
        (lambda sc, p, m: sc.hvp(lambda p, b: p, p, []) @ p, ValueError, "there are no batches"),
        (lambda sc, p, m: sc.hvp(lambda p: p, {"n": torch.arange(3)}), ValueError, "no leaf with a gradient"),
        (lambda sc, p, m: sc.hvp(lambda p: p, {"z": torch.zeros(3) * 1j}), TypeError, "complex"),
        (lambda sc, p, m: given(torch.eye(3)) @ {"y": torch.zeros(3)}, ValueError, "another structure"),
        (lambda sc, p, m: given(torch.eye(3)) @ {"x": torch.zeros(4)}, ValueError, r"x is plain, \(4,\)"),
        (lambda sc, p, m: given(torch.eye(3)) @ {"x": torch.zeros(3, dtype=torch.int64)}, ValueError, "int64"),
        (lambda sc, p, m: given(torch.eye(3)) @ p, ValueError, "another structure"),
        (lambda sc, p, m: given(torch.eye(3)) @ {"x": None}, ValueError, "x is NoneType"),
        (lambda sc, p, m: sc.top_eig(given(torch.eye(3)), 0), ValueError, "count must be an integer of 1 or more"),
        (lambda sc, p, m: sc.top_eig(given(torch.eye(3)), which="SM"), ValueError, "which must be one of .*, got 'SM'"),
        (lambda sc, p, m: sc.top_eig(given(torch.eye(3) * math.nan)), FloatingPointError, "not finite"),
        (lambda sc, p, m: sc.spectrum(given(torch.eye(3) * math.inf)), FloatingPointError, "not finite"),
        (lambda sc, p, m: sc.trace(given(torch.eye(30) * math.nan), 8), FloatingPointError, "not finite"),
        (lambda sc, p, m: sc.spectrum(given(torch.eye(3)), 0), ValueError, "steps must be .* 1 or more, got 0"),
        (lambda sc, p, m: sc.trace(given(torch.eye(3)), 4, sketch=2), ValueError, "takes 4 products"),
        (lambda sc, p, m: sc.diag(given(torch.eye(3)), 0), ValueError, "products must be .* 1 or more, got 0"),
        (lambda sc, p, m: sc.solve(given(torch.eye(3)), {"x": torch.ones(3)}, "lu"), ValueError, "by must be .*'lu'"),
        (lambda sc, p, m: sc.solve(given(torch.eye(3)), {"x": torch.ones(3)}, scale=1.0), ValueError, "scale=1.0"),
        (lambda sc, p, m: sc.solve(given(torch.eye(3)), {"x": torch.ones(3) / 0}), FloatingPointError, "b is not fin"),
        (lambda sc, p, m: sc.solve(given(torch.eye(3) / 0), {"x": torch.ones(3)}), FloatingPointError, "not finite"),
        (lambda sc, p, m: sc.fisher(None, None, p, labels="true"), ValueError, "labels must be .*, got 'true'"),
        (lambda sc, p, m: sc.fisher(None, None, p, labels=0), ValueError, "labels must be .*, got 0"),
        (lambda sc, p, m: sc.preconditioned(given(torch.eye(3)), {"x": torch.zeros(3)}), ValueError, "3 numbers of D"),
        (lambda sc, p, m: sc.critical_sharpness(lambda p: p["x"].sum() * math.nan, X, X), ValueError, "is not finite"),
        (lambda sc, p, m: sc.critical_sharpness(lambda p: p["x"].sum(), X, X, rate=-1.0), ValueError, "rate .*got -1"),
        (lambda sc, p, m: sf.grad(lambda v: (given(torch.eye(3)) @ {"x": v})["x"].sum())(torch.ones(3)),
         RuntimeError, "a derivative through"),
        (lambda sc, p, m: sf.grad(lambda p: so.vdot(p, sc.hvp(lambda p: p["x"].sum(), p) @ p))(X),
         RuntimeError, "a derivative through"),
        (lambda sc, p, m: torch.func.grad(lambda v: (given(torch.eye(3)) @ {"x": v})["x"].sum())(torch.ones(3)),
         RuntimeError, "a derivative through"),
        (lambda sc, p, m: sf.jvp(lambda v: (given(torch.eye(3)) @ {"x": v})["x"], (torch.ones(3),), (torch.ones(3),)),
         RuntimeError, "a derivative through"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(world: World, make: Any, error: Any, said: str) -> None:
    for told in world.run(refused, make):
        assert told[0] == error.__name__, told
        assert re.search(said, told[1]), told
        assert len(told[1]) < 700


def refused(make: Any) -> tuple[str | None, str]:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params = sf.shard(whole(), mesh, sf.full_shard("shard"))
    try:
        make(sc, params, mesh)
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def unreduced(what: str) -> str:
    """The message where a loss is each rank's own."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params, x = sf.shard(whole(), mesh, sf.full_shard("shard")), torch.arange(5) + mesh.get_rank()
    own = {
        "hvp": lambda: sc.hvp(lambda p: net(sf.stage, p, x).square().mean(), params) @ params,
        "ggn": lambda: sc.ggn(lambda p: net(sf.stage, p, x), lambda z: z.square().mean(), params) @ params,
        "sharpness": lambda: sc.sharpness(lambda p: net(sf.stage, p, x).square().mean(), params),
        "critical": lambda: sc.critical_sharpness(lambda p: net(sf.stage, p, x).square().mean(), params, params),
    }[what]
    try:
        own()
    except ValueError as error:
        return str(error)
    return "nothing"


@two
@pytest.mark.parametrize("what", ["hvp", "ggn", "sharpness", "critical"])
def test_a_loss_that_is_not_reduced_is_refused_on_every_rank(world: World, what: str) -> None:
    assert all("on the ranks: reduce it over all of them" in told for told in world.run(unreduced, what))


def test_batches_are_tuples_or_lists() -> None:
    p, x, y = {"w": torch.ones(2).double()}, torch.ones(3, 2).double(), torch.arange(3).double()

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ p["w"] - y) ** 2).sum()

    for batch in ((x, y), [x, y]):
        assert torch.equal((sc.hvp(loss, p, [batch]) @ p)["w"], torch.full((2,), 12.0).double())


# --- outliers, drift, and what is overwritten ---


@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
def test_an_outlier_of_many_is_found(which: Any) -> None:
    n, sign = 300_000, -1.0 if which == "SA" else 1.0
    diagonal = torch.linspace(0.9, 1.0, n).double()
    diagonal[1234] = 3.0 * sign
    A = sc.Operator(lambda v: {"x": diagonal * v["x"]}, {"x": torch.zeros(n).double()})
    for seed in range(3):
        assert abs(float(sc.top_eig(A, which=which, tolerance=1e-2, seed=seed).values[0]) - 3 * sign) < 0.03
    far = torch.cat([torch.tensor([-1000.0]), torch.linspace(0, 1, 2000), torch.tensor([5.0])]).double()
    B = sc.Operator(lambda v: {"x": far * v["x"]}, {"x": torch.zeros(len(far)).double()})
    assert abs(float(sc.top_eig(B, which="LA", tolerance=1e-2).values[0]) - 5) < 0.05


def test_a_density_of_other_parameters_is_refused(tmp_path: Path) -> None:
    matrix = rotated(torch.linspace(1, 3, 30).double())
    sc.spectrum(given(matrix), 8, folder=tmp_path / "s")
    with pytest.raises(Exception, match="is of another operator"):
        sc.spectrum(given(10 * matrix), 8, folder=tmp_path / "s")
    with pytest.raises(Exception, match="is of a call with"):
        sc.spectrum(given(matrix), 9, folder=tmp_path / "s")


def test_an_operator_of_overwritten_parameters_is_refused() -> None:
    p = {"x": torch.ones(3)}
    H = sc.hvp(lambda p: (p["x"] ** 4).sum(), p)
    assert torch.equal((H @ p)["x"], torch.full((3,), 12.0))
    p["x"].mul_(2)
    with pytest.raises(RuntimeError, match="were overwritten since"):
        H @ p


def test_inner_products_in_float32_do_not_drift() -> None:
    x = {"x": torch.full((10_000_000,), 0.1)}
    assert abs(float(so.vdot(x, x)) / 1e5 - 1) < 1e-6


def test_a_solution_in_float32_tells_its_residual() -> None:
    matrix, b = rotated(torch.logspace(0, 4, 60).double()).float(), torch.linspace(-1, 2, 60)
    for by in ("cg", "lsmr"):
        found = sc.solve(given(matrix), {"x": b}, by, tolerance=1e-12, products=400)
        off = float((b.double() - matrix.double() @ found.x["x"].double()).norm() / b.norm())
        assert not found.converged
        assert 0.3 < found.residual / off < 3


def apart() -> str:
    """Plain tensors that are cut, whose inner products each rank would take of its own part."""
    mesh = sf.make_mesh(model=2, device="cpu")
    own = {"w": torch.arange(3.0) + mesh.get_rank()}
    mapped = sf.shard_map(lambda p: sc.top_eig(sc.hvp(lambda p: sf.psum((p["w"] ** 3).sum(), "model"), p)).values,
                          mesh=mesh, in_specs=sf.P("model"), out_specs=..., check=False)  # fmt: skip
    try:
        mapped(own)
    except ValueError as error:
        return str(error)
    return "nothing"


@two
def test_plain_tensors_that_are_cut_are_refused(world: World) -> None:
    assert all("differ between ranks" in told for told in world.run(apart))


@pytest.mark.parametrize("padding", [0, -1])
def test_padding_of_embeddings_has_no_tangents(padding: int) -> None:
    x, y = torch.tensor([0, 1, 2, 0, 4]), torch.tensor([1, 2, 3, 4, 0])
    p, u, v = ({"t": torch.randn(5, 3, generator=g).double(), "w": torch.randn(3, 5, generator=g).double()}
               for g in (torch.Generator().manual_seed(k) for k in range(3)))  # fmt: skip

    def model(p: Any) -> Tensor:
        return torch.tanh(F.embedding(x, p["t"], padding_idx=padding)) @ p["w"]

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="sum")

    for A in (
        sc.hvp(lambda p: loss(model(p)), p),
        sc.ggn(model, loss, p),
        sc.empirical_fisher(lambda p: model(p).sum(1), p),
    ):
        a, b = so.vdot(u, A @ v), so.vdot(v, A @ u)
        assert abs(float(a - b)) < 1e-12 * abs(float(a))
        assert torch.equal((A @ v)["t"][padding], torch.zeros(3).double())


def test_distributions_without_a_smooth_divergence_are_refused() -> None:
    p = {"z": torch.ones(3).double()}
    for likelihood in (lambda z: torch.distributions.Laplace(z, 2.0), lambda z: torch.distributions.StudentT(z)):
        with pytest.raises(NotImplementedError, match="take labels='drawn'"):
            sc.fisher(lambda p: p["z"], likelihood, p) @ p
    with pytest.raises(TypeError, match="the likelihood returned Tensor"):
        sc.fisher(lambda p: p["z"], lambda z: z, p) @ p
    with pytest.raises(ValueError, match="segment"):
        sc.unroll(lambda p, h: p, so.sgd(0.1), lambda p, h: p, segment=-1)


def replicas(noise: float) -> float | str:
    """An inner product that is rounding alone, which replicas may round otherwise."""
    mesh = sf.make_mesh(replica=2, device="cpu")
    ones = torch.ones(4, dtype=torch.float64)

    def run(p: Any) -> Any:
        space = sc.Operator(lambda v: v, p).space
        other = torch.tensor([1.0, -1.0, 1.0, -1.0 + noise * (1 + mesh.get_rank())]).double()
        return float(space.dots([[ones]], [other])[0])

    try:
        return sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=..., check=False)({"x": ones})
    except ValueError as error:
        return str(error)


@two
def test_rounding_of_replicas_is_no_difference(world: World) -> None:
    first, second = world.run(replicas, 1e-12)
    assert first == second
    assert abs(first) < 1e-11
    assert all("differ between ranks" in told for told in world.run(replicas, 0.1))
