"""Shampoo, KL-Shampoo, SOAP: what their papers say, on any number of ranks, with each block's work on one of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
import shardfn.optim as so
from shardfn.optim.owners import eigh, owners
from shardfn.optim.shampoo import _eigenbasis, _iterate, cost, inverse_power
from shardfn.shards.pieces import units
from shardfn.testing import World, world
from tests.models import DATA, STRATEGIES, data_mesh, distance, normal
from tests.reference import worst
from tests.refusals import refused

STEPS, PARTS = 5, 8
B1, B2, EPS, RIDGE, RATE, DECAY = 0.9, 0.8, 1e-6, 1e-4, 0.05, 0.1
INITIAL = 0.3


# --- as in the papers, by one process ---


def boxes(shape: tuple[int, ...], block: int) -> Iterator[tuple[slice, ...]]:
    return itertools.product(*([slice(i, i + block) for i in range(0, n, block)] for n in shape))


def rows_along(g: Tensor, i: int) -> Tensor:
    return g.transpose(0, i).reshape(g.shape[i], -1)


def times(x: Tensor, matrix: Tensor, i: int) -> Tensor:
    """A matrix times each column of a tensor along a dimension."""
    moved = x.transpose(0, i)
    return (matrix @ moved.reshape(len(matrix), -1)).view(moved.shape).transpose(0, i)


def power(matrix: Tensor, exponent: float) -> Tensor:
    u, s, _ = torch.linalg.svd(matrix)
    return u @ torch.diag(s**exponent) @ u.mT


class Paper:
    """A block of a tensor without dimensions of length 1; `step` returns its direction."""

    def __init__(self, shape: tuple[int, ...], **options: Any) -> None:
        self.t, self.mean, self.square = 0, torch.zeros(shape).double(), torch.zeros(shape).double()
        self.factors = [torch.zeros(n, n).double() for n in shape]
        self.options = {"exponent": 1 / (2 * len(shape)), "every": 1, "graft": True} | options
        self.matrices: list[Tensor] = []

    def moments(self, g: Tensor, of_square: Tensor, t: int) -> tuple[Tensor, Tensor]:
        self.mean = B1 * self.mean + (1 - B1) * g
        self.square = B2 * self.square + (1 - B2) * of_square**2
        return self.mean / (1 - B1**t), self.square / (1 - B2**t)

    def gather(self, g: Tensor) -> None:
        self.factors = [B2 * f + (1 - B2) * rows_along(g, i) @ rows_along(g, i).mT for i, f in enumerate(self.factors)]


class Shampoo(Paper):
    def step(self, g: Tensor) -> Tensor:
        self.t += 1
        self.gather(g)
        if (self.t - 1) % self.options["every"] == 0:
            self.matrices = [
                power(f / (1 - B2**self.t) + RIDGE * torch.eye(len(f)).double(), -self.options["exponent"])
                for f in self.factors
            ]
        m, v = self.moments(g, g, self.t)
        along = m
        for i, matrix in enumerate(self.matrices):
            along = times(along, matrix, i)
        return along * (m / (v.sqrt() + EPS)).norm() / along.norm() if self.options["graft"] else along


class KLShampoo(Paper):
    """By Kronecker products of whole covariances, of the gradient as one vector."""

    def step(self, g: Tensor) -> Tensor:
        if not self.t:
            self.factors = [INITIAL * torch.eye(n).double() for n in g.shape]
            self.inverses = [torch.eye(n).double() / INITIAL for n in g.shape]
        new = []
        for i, factor in enumerate(self.factors):
            others = torch.eye(1).double()
            for j, inverse in enumerate(self.inverses):
                others = others if j == i else torch.kron(others, inverse)
            rows = g.movedim(i, 0).flatten(1)
            new.append(B2 * factor + (1 - B2) * rows @ others @ rows.mT / len(others))
        self.factors = new
        if self.t % self.options["every"] == 0:
            damped = [f + RIDGE * torch.eye(len(f)).double() for f in self.factors]
            self.matrices, self.inverses = [power(f, -0.5) for f in damped], [power(f, -1.0) for f in damped]
        self.t += 1
        self.mean = B1 * self.mean + (1 - B1) * g
        along = self.mean / (1 - B1**self.t)
        for i, matrix in enumerate(self.matrices):
            along = times(along, matrix, i)
        return along


class Soap(Paper):
    def step(self, g: Tensor) -> Tensor:
        along = torch.zeros_like(g)
        if self.t:
            m, v = self.moments(g, self.turned(g, True), self.t)
            along = self.turned(self.turned(m, True) / (v.sqrt() + EPS), False)
        self.gather(g)
        if not self.t:
            self.matrices = [torch.linalg.eigh(f).eigenvectors.flip(1) for f in self.factors]
        elif self.t % self.options["every"] == 0:
            for i, (f, q) in enumerate(zip(self.factors, self.matrices, strict=True)):
                order = torch.diag(q.mT @ f @ q).argsort(descending=True)
                self.square = self.square.index_select(i, order)
                self.matrices[i] = torch.linalg.qr(f @ q[:, order]).Q
        self.t += 1
        return along

    def turned(self, x: Tensor, forth: bool) -> Tensor:
        for i, q in enumerate(self.matrices):
            x = times(x, q.mT if forth else q, i)
        return x


def by_paper(kind: type[Any], start: Tensor, block: int, rests: int, **options: Any) -> Tensor:
    p = start.clone()
    inner = [n for n in p.shape if n != 1]
    places = list(boxes(tuple(inner), block))
    own = [kind(tuple(p.view(inner)[place].shape), **options) for place in places]
    for t in range(STEPS):
        g, new = gradient(p, t).view(inner), p.view(inner).clone()
        for place, one in zip(places, own, strict=True):
            along = one.step(g[place])
            if t >= rests:
                new[place] = (1 - RATE * DECAY) * new[place] - RATE * along
        p = new.view(p.shape)
    return p


def gradient(p: Tensor, t: int) -> Tensor:
    """Of full rank, and different at each step."""
    return torch.sin(p.double() * (3 + t)).to(p.dtype)


def shampoo(**options: Any) -> so.Optimizer:
    given = {"b1": B1, "b2": B2, "eps": EPS, "ridge": RIDGE, "weight_decay": DECAY, "every": 2, "block": 4}
    return so.shampoo(**{"lr": RATE} | given | options)


def kl_shampoo(**options: Any) -> so.Optimizer:
    given = {"b1": B1, "b2": B2, "eps": EPS, "ridge": RIDGE, "initial": INITIAL, "weight_decay": DECAY, "block": 4}
    return so.kl_shampoo(**{"lr": RATE, "every": 2} | given | options)


def soap(**options: Any) -> so.Optimizer:
    given = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY, "every": 2, "block": 4}
    return so.soap(**{"lr": RATE} | given | options)


def trained(optimizer: so.Optimizer, ps: Any, grads: Callable[[Any, int], Any], steps: int = STEPS) -> tuple[Any, Any]:
    state = optimizer.init(ps)
    for t in range(steps):
        ps, state = optimizer.step(ps, grads(ps, t), state)
    return ps, state


def each(ps: Any, t: int) -> Any:
    return optree.tree_map(lambda p: gradient(p, t), ps)


SHAPES = [(5, 5), (6, 4), (1, 6, 5), (7, 10), (3, 4, 5), (4, 3, 1, 3, 2)]


PAPERS: list[Any] = [(shampoo, Shampoo, options) for options in ({}, {"every": 3}, {"graft": False}, {"exponent": 0.5})]
PAPERS += [(kl_shampoo, KLShampoo, options) for options in ({}, {"every": 3})]


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
@pytest.mark.parametrize(("make", "kind", "options"), PAPERS, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shampoo_is_the_papers(shape: tuple[int, ...], make: Any, kind: Any, options: Any, donate: bool) -> None:
    start = normal(*shape, seed=1)
    for block in (4, 100):
        got, _ = trained(make(block=block, donate=donate, **{"every": 1} | options), {"w": start.clone()}, each)
        assert (got["w"] - by_paper(kind, start, block, 0, **options)).abs().max() < 1e-11


def test_kl_shampoo_finds_the_covariance_of_gradients() -> None:
    """Of normal gradients with a Kronecker product for a covariance, whose estimate has the least divergence."""
    draw = torch.Generator().manual_seed(0)
    roots = [torch.randn(n, n, generator=draw).double() + torch.eye(n).double() for n in (3, 4)]
    optimizer, ps = kl_shampoo(lr=0.0, every=1, b2=0.998, block=9), {"w": torch.zeros(3, 4).double()}
    state = optimizer.init(ps)
    for _ in range(4000):
        z = torch.randn(3, 4, generator=draw).double()
        ps, state = optimizer.step(ps, {"w": roots[0] @ z @ roots[1].mT}, state)
    (block,) = state["chosen"]["blocks"].values()
    factors = block["factors"]
    want, got = torch.kron(*(r @ r.mT for r in roots)), torch.kron(*factors)
    assert (got - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("shape", "block"), [((5, 5), 9), ((6, 1, 6), 9), ((8, 12), 4), ((3, 3, 3), 3)], ids=str)
def test_soap_is_the_papers(shape: tuple[int, ...], block: int, every: int, donate: bool) -> None:
    """Of blocks whose factors have full rank at the first step, where the paper says which the eigenvectors are."""
    start = normal(*shape, seed=2)
    got, _ = trained(soap(block=block, every=every, donate=donate), {"w": start.clone()}, each)
    assert (got["w"] - by_paper(Soap, start, block, 1, every=every)).abs().max() < 1e-9


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("make", [shampoo, kl_shampoo, soap])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rounding_chooses_no_direction(rows: int, make: Callable[..., so.Optimizer], every: int) -> None:
    """Factors of few gradients have low rank, and gradients are rounded otherwise on another number of ranks."""

    def few(noise: float, ps: Any, t: int) -> Any:
        g = normal(*ps["w"].shape, seed=t)
        g[rows:] = 0
        return {"w": g * (1 + noise * normal(*g.shape, seed=100 + t))}

    optimizer = make(every=every, block=99, **({} if make is soap else {"ridge": 1e-12}))
    for width, steps in ((4, 7), (8, 7), (9, 12), (33, 7)):
        start = normal(5, width, seed=99)
        both = [trained(optimizer, {"w": start.clone()}, functools.partial(few, x), steps)[0] for x in (0.0, 3e-16)]
        assert distance(*both) < 1e-12


class Coarse(TorchDispatchMode):
    """Rounds what products read to TF32, as a GPU does where torch is told so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and torch.backends.cuda.matmul.fp32_precision == "tf32":
            args = [((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32) for x in args]
        return func(*args, **(kwargs or {}))


def of_low_rank(seed: int) -> Tensor:
    g = normal(9, 3, seed=seed).float()
    return g @ g.mT


def iterated(factor: Tensor) -> Tensor:
    basis = torch.linalg.qr(normal(9, 9, seed=1).float())[0]
    _iterate([factor], [basis], torch.zeros(9))
    return basis


def test_a_basis_in_float32_is_followed_where_eigenvalues_fall_to_rounding() -> None:
    """At the width of a layer, whose factors have eigenvalues of all sizes, and gain rank with every gradient."""
    anew = 0
    for seed, rows in itertools.product(range(4), (100, 300, 600)):
        scales = 10 ** torch.linspace(0, -6, 300)
        gradients = [(normal(rows, 300, seed=10 * seed + t) * scales).float() for t in range(4)]
        factor, square = torch.zeros(300, 300), torch.zeros(300)
        basis = torch.eye(300)
        for t, g in enumerate(gradients):
            factor = 0.95 * factor + 0.05 * g.mT @ g
            if t == 0:
                basis = _eigenbasis(factor)
                continue
            counted = CountsEigh()
            with counted:
                _iterate([factor], [basis], square)
            anew += counted.times > 0
            assert (basis.mT @ basis - torch.eye(300)).abs().max() < 1e-4
    assert anew == 0


class CountsEigh(TorchDispatchMode):
    times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += "eigh" in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("work", [lambda x: inverse_power(x, 0.5, 1e-12), _eigenbasis, iterated])
def test_small_eigenvalues_are_not_rounded_to_tf32(work: Callable[[Tensor], Tensor]) -> None:
    factor = of_low_rank(0)
    want = work(factor)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with Coarse():
            got = work(factor)
        after = torch.backends.cuda.matmul.fp32_precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert (torch.equal(got, want), after) == (True, "tf32")


def test_vectors_are_updated_by_adamw() -> None:
    start = {"b": normal(7, seed=1), "row": normal(1, 6, seed=2), "s": normal(seed=3), "c": normal(1, 4, 1, seed=4)}
    for make in (shampoo, soap):
        got, _ = trained(make(), optree.tree_map(torch.clone, start), each)
        adamw = so.adamw(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
        assert distance(got, trained(adamw, optree.tree_map(torch.clone, start), each)[0]) == 0


@pytest.mark.parametrize("says_so", [True, False])
def test_a_decomposition_that_fails_in_float32_is_one_in_float64(monkeypatch: Any, says_so: bool) -> None:
    """As by LAPACK, which returned nan for a factor with 200 eigenvalues of 0 up to rounding."""
    x, real = normal(5, 5, seed=1).float(), torch.linalg.eigh
    x = x @ x.mT

    def fails(x: Tensor) -> Any:
        if x.dtype == torch.float32 and says_so:
            raise RuntimeError("it did not converge")
        values, vectors = real(x)
        return (values * torch.nan, vectors) if x.dtype == torch.float32 else (values, vectors)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, vectors = eigh(x)
    assert values.dtype == vectors.dtype == torch.float32
    assert (vectors * values @ vectors.mT - x).abs().max() < 1e-6
    assert eigh(x * torch.nan)[0].isnan().all()


# --- programs, on any number of ranks ---

Program = tuple[Callable[[], Any], Callable[[], so.Optimizer], Callable[[Any, int], Any]]


def model() -> Any:
    return {
        "embed": {"e": normal(11, 6, seed=1)},
        "blocks": [{"w": normal(6, 5, seed=i), "v": normal(5, 6, seed=9 + i), "b": normal(5, seed=i)} for i in (2, 3)],
    }


def conv() -> Any:
    return {"conv": {"w": normal(6, 4, 3, 3, seed=1), "b": normal(6, seed=2)}, "stack": {"w": normal(2, 5, 3, seed=3)}}


def odd() -> Any:
    return {
        "rows": {"one": normal(1, 7, seed=1), "column": normal(7, 1, seed=2), "both": normal(1, 1, seed=3)},
        "none": {"w": normal(0, 4, seed=1), "v": normal(3, 0, seed=1), "n": normal(0, seed=1)},
        "some": {"w": normal(0, 4, seed=1), "m": normal(4, 5, seed=4)},
        "scalar": {"s": normal(seed=5), "long": normal(2, 41, seed=6)},
    }


def in_16_bits() -> Any:
    a = {"w": normal(6, 5, seed=1).bfloat16(), "b": normal(5, seed=2)}
    return {"a": a, "c": {"w": normal(4, 4, seed=3).float()}}


def without(*names: str, at: tuple[int, ...]) -> Callable[[Any, int], Any]:
    """Gradients of which some stages have none at some steps."""

    def grads(ps: Any, t: int) -> Any:
        found = each(ps, t)
        return found | {name: optree.tree_map(lambda _: None, found[name]) for name in names if t in at}

    return grads


def times_number(numbers: list[float]) -> Callable[[Any, int], Any]:
    return lambda ps, t: optree.tree_map(lambda g: g * numbers[t], each(ps, t))


def by_layer(path: str, shape: tuple[int, ...]) -> float:
    return 0.1 if "0" in path else 0.3 / max(1, len(shape))


def not_w(path: str, shape: tuple[int, ...]) -> bool:
    return not path.endswith("w")


def programs(make: Callable[..., so.Optimizer]) -> dict[str, Program]:
    def wrapped(wrap: Callable[[so.Optimizer], so.Optimizer], **options: Any) -> Callable[[], so.Optimizer]:
        return lambda: wrap(make(**options))

    return {
        "plain": (model, make, each),
        "every step": (model, lambda: make(every=1), each),
        "blocks of two": (model, lambda: make(block=2), each),
        "blocks of three": (model, lambda: make(block=3), each),
        "no blocks": (model, lambda: make(block=999), each),
        "pure": (model, lambda: make(donate=False), each),
        "convolutions": (conv, make, each),
        "convolutions, whole": (conv, lambda: make(block=9), each),
        "odd shapes": (odd, make, each),
        "16 bits": (in_16_bits, make, each),
        "16 bits, master": (in_16_bits, wrapped(so.fp32_master_weights), each),
        "a schedule": (model, lambda: make(lr=so.warmup_cosine(0.1, warmup=2, steps=9)), each),
        "a rate that is a tensor": (model, lambda: make(lr=torch.tensor(0.03).double()), each),
        "rules": (model, lambda: make(b1=by_layer, b2=by_layer, eps=by_layer, weight_decay=by_layer), each),
        "no means": (model, lambda: make(b1=0.0, b2=0.0), each),
        "clipped": (model, wrapped(lambda o: so.chain(so.clip_by_global_norm(0.5), o)), each),
        "accumulated": (model, wrapped(lambda o: so.multi_steps(o, 2)), each),
        "averaged": (model, wrapped(lambda o: so.ema(o, 0.5)), each),
        "skipped": (model, wrapped(so.skip_nonfinite), times_number([1, float("inf"), 1, float("nan"), 1])),
        "loss scaled": (model, wrapped(lambda o: so.dynamic_loss_scale(o, scale=4.0)), times_number([4, 4, 4, 4, 4])),
        "some by another": (model, wrapped(lambda o: so.masked(o, r"blocks.*", so.adamw(0.1))), each),
        "some not at all": (model, wrapped(lambda o: so.masked(o, not_w)), each),
        "no gradients at first": (model, make, without("embed", at=(0, 1))),
        "no gradients later": (model, make, without("embed", at=(2, 3))),
        "gradients of zero at first": (model, make, times_number([0, 0, 1, 1, 1])),
        "gradients of zero later": (model, make, times_number([1, 1, 0, 0, 1])),
        "only zeros": (model, make, times_number([0, 0, 0, 0, 0])),
        "tiny gradients": (model, make, times_number([1e-30] * 5)),
        "huge gradients": (model, make, times_number([1e30] * 5)),
    }


MAKE: dict[str, Callable[..., so.Optimizer]] = {"shampoo": shampoo, "kl_shampoo": kl_shampoo, "soap": soap}


def off(got: Any, want: Any) -> float:
    """The largest difference, in units of what rounding allows."""
    worst = 0.0
    for x, y in zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True):
        allowed = 1e-10 if x.dtype == torch.float64 else 8 * torch.finfo(x.dtype).eps
        if x.numel():
            worst = max(worst, (x.double() - y.double()).abs().max().item() / allowed)
        assert y.isfinite().all()
    return worst


@functools.cache
def by_one_process(name: str, program: str) -> Any:
    params, make, grads = programs(MAKE[name])[program]
    return trained(make(), params(), grads)[0]


def compared(name: str, part: int, strategy: str, n: int) -> dict[str, float]:
    mesh, found = data_mesh(n), {}
    for program, (params, make, grads) in list(programs(MAKE[name]).items())[part::PARTS]:
        flat = sf.shard(params(), mesh, STRATEGIES[strategy])
        before = optree.tree_map(torch.clone, flat)
        got, _ = trained(make(), flat, grads)
        found[program] = off(sf.unshard(got), by_one_process(name, program))
        if program == "pure":
            found["as before"] = distance(flat, before)
    return found


@pytest.mark.parametrize(
    "world", [(1, "processes"), (2, "processes"), (4, "processes")], indirect=True, ids=["1", "2", "4"]
)
@pytest.mark.parametrize("strategy", ["full_shard", "ddp", "zero1", "hfsdp", "hybrid_shard"])
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", MAKE)
def test_programs_train_as_one_process(world: World, name: str, part: int, strategy: str) -> None:
    for found in world.with_deadline(60).run(compared, name, part, strategy, world.size):
        assert not {program: x for program, x in found.items() if not x < 1}


# --- where the work and the memory are ---


def shared(name: str, strategy: str) -> tuple[float, float, int, int]:
    """This rank's work over a rank's mean, its bytes of state over the mean, and counts of whole matrices."""
    mesh, optimizer = data_mesh(4), MAKE[name](block=16)
    whole = [{"w": normal(8, 8, seed=i), "v": normal(8, 16, seed=i)} for i in range(8)]
    flat = sf.shard(whole, mesh, STRATEGIES[strategy])
    _, state = trained(optimizer, flat, each, 2)
    held = [x.numel() for x in optree.tree_leaves(state["chosen"]["blocks"])]
    total = sum(x.numel() for x in optree.tree_leaves(optimizer.init(whole)["chosen"]["blocks"]))
    owner = owners(units(flat).each, cost, 16)
    work = [sum(cost(block.box.sizes) for block, rank in owner.items() if rank == r) for r in range(4)]
    return work[mesh.get_rank()] / (sum(work) / 4), sum(held) / (total / 4), sum(n > 0 for n in held), len(held)


@pytest.mark.world(4)
@pytest.mark.parametrize("strategy", ["full_shard", "ddp", "hybrid_shard", "zero1"])
def test_work_and_memory_are_shared_evenly(world: World, strategy: str) -> None:
    found = world.run(shared, "shampoo", strategy)
    assert all(work == 1.0 and 1.0 <= memory < 1.2 for work, memory, _, _ in found)
    assert [count for *_, count, _ in found] == [4, 4, 4, 4]
    assert {total for *_, total in found} == {16}


# --- saved, and gone on with elsewhere ---


def begun(name: str, strategy: str, ranks: int) -> tuple[Any, Any, Any]:
    flat = sf.shard(model() | conv(), data_mesh(ranks), STRATEGIES[strategy])
    optimizer = MAKE[name](every=3)
    return optimizer, flat, optimizer.init(flat)


def saved(name: str, strategy: str, ranks: int, folder: str) -> Any:
    optimizer, ps, state = begun(name, strategy, ranks)
    for t in range(2):
        ps, state = optimizer.step(ps, each(ps, t), state)
    sf.checkpoint.save(folder, {"params": ps, "state": state})
    for t in range(2, 6):
        ps, state = optimizer.step(ps, each(ps, t), state)
    return sf.unshard(ps)


def resumed(name: str, strategy: str, ranks: int, folder: str) -> Any:
    optimizer, ps, state = begun(name, strategy, ranks)
    read = sf.checkpoint.load(folder, {"params": ps, "state": state})
    ps, state = read["params"], read["state"]
    for t in range(2, 6):
        ps, state = optimizer.step(ps, each(ps, t), state)
    return sf.unshard(ps)


@pytest.mark.parametrize("name", MAKE)
def test_a_state_goes_on_between_decompositions_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    places = [("full_shard", 1), ("zero1", 2), ("hybrid_shard", 4)]
    wanted = {n: world(n).run(saved, name, strategy, n, str(tmp_path / str(n)))[0] for strategy, n in places}
    for (_, first), (strategy, n) in itertools.product(places, places):
        for got in world(n).run(resumed, name, strategy, n, str(tmp_path / str(first))):
            assert distance(got, wanted[first]) < 1e-10


# --- what is not finite, and what is refused ---


def spoiled(name: str) -> tuple[bool, bool]:
    """Whether what a gradient that is not finite reaches is nan, and nothing else."""
    flat = sf.shard(model(), data_mesh(2), STRATEGIES["full_shard"])

    def grads(ps: Any, t: int) -> Any:
        found = each(ps, t)
        return found | {"embed": optree.tree_map(lambda g: g * (float("nan") if t == 2 else 1), found["embed"])}

    whole = sf.unshard(trained(MAKE[name](), flat, grads)[0])
    rest = optree.tree_leaves(whole["blocks"])
    return bool(whole["embed"]["e"].isnan().all()), all(bool(x.isfinite().all()) for x in rest)


@pytest.mark.world(2)
@pytest.mark.parametrize("name", MAKE)
def test_what_is_not_finite_spoils_its_parameter_only(world: World, name: str) -> None:
    assert world.run(spoiled, name) == [(True, True)] * 2


@pytest.mark.parametrize("name", MAKE)
def test_what_cannot_be_is_refused(name: str) -> None:
    make, ps = MAKE[name], {"w": normal(3, 4, seed=1)}
    assert f"{name}: w is torch.complex64" in refused(lambda: make().init({"w": torch.ones(2, 2) * 1j}), TypeError)
    wrong: dict[str, Any] = {"every": 0, "block": 1.5, "b2": 1.0, "donate": 1, "lr": -1.0, "weight_decay": "a"}
    for key, value in wrong.items():
        assert f"{name}: {key} must be" in refused(functools.partial(make, **{key: value}), (TypeError, ValueError))
    bad = make(b1=lambda path, shape: 1.5)
    assert "w: a rule for a parameter: b1 must be" in refused(lambda: bad.step(ps, ps, bad.init(ps)), ValueError)
    for donate in (True, False):
        opt = make(donate=donate)

        def loss(p: Any, opt: so.Optimizer = opt) -> Tensor:
            return opt.step(p, p, opt.init(p))[0]["w"].sum()

        for run in (sf.grad, torch.func.grad):
            assert f"{name} has no derivative" in refused(functools.partial(run(loss), dict(ps)), RuntimeError)
    opt = make()
    state = opt.init(ps)
    state["chosen"]["step"] = torch.tensor(0)
    assert "the host must know the step number" in refused(lambda: opt.step(ps, ps, state), TypeError)


# --- on meshes of other axes ---

MESHES = [{"replica": 1, "shard": 2, "tensor": 2, "pipe": 1}, {"replica": 2, "shard": 1, "tensor": 1, "pipe": 2}]
SPECS = sf.by_path([(r".*\.w", sf.P(None, "tensor")), (r".*\.v", sf.P("tensor")), (r".*\.n", sf.P())])


def elsewhere(name: str, sizes: dict[str, int]) -> float:
    def whole() -> Any:
        return [{"w": normal(6, 10, seed=i), "v": normal(10, 7, seed=i), "n": normal(6, seed=i)} for i in range(2)]

    def placed(path: str, shape: tuple[int, ...]) -> sf.Placement:
        return sf.hybrid_shard(shard="shard", replica="replica").only_on(pipe=int(path[0]) % sizes["pipe"])

    flat = sf.shard(whole(), sf.make_mesh(device="cpu", **sizes), placed, specs=SPECS)
    return distance(sf.unshard(trained(MAKE[name](), flat, each)[0]), trained(MAKE[name](), whole(), each)[0])


@pytest.mark.world(4)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_parameters_may_be_cut_and_placed_along_other_axes(world: World, name: str, sizes: dict[str, int]) -> None:
    assert worst(world.run(elsewhere, name, sizes)) < 1e-10


def uncut(name: str) -> float:
    """Several strategies in one tree, among them that of all ranks by themselves."""

    def strategy(path: str, shape: tuple[int, ...]) -> sf.Placement:
        return {"e": sf.Placement(), "w": sf.ddp(DATA)}.get(path[-1], sf.full_shard(DATA))

    flat = sf.shard(model(), data_mesh(4), strategy)
    return distance(sf.unshard(trained(MAKE[name](), flat, each)[0]), trained(MAKE[name](), model(), each)[0])


@pytest.mark.world(4)
@pytest.mark.parametrize("name", MAKE)
def test_strategies_may_be_mixed(world: World, name: str) -> None:
    assert worst(world.run(uncut, name)) < 1e-10
