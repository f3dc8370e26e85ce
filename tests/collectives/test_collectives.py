"""Collectives on every dtype, shape and memory layout against the spec in their docstrings, and their transposes."""

from __future__ import annotations

import dataclasses
import math
import re
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad, jvp, vjp, vmap

import shardfn as sf
from shardfn.collectives import functional, messages
from shardfn.debugging import Debugging, by_environment, debugging
from shardfn.mesh.axes import known_axes
from shardfn.mesh.grid import Axis
from shardfn.mesh.scope import scope
from shardfn.testing import World, world
from shardfn.testing import strategies as draws
from tests.models import mesh_of
from tests.reference import spec_of, worst

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALL_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *SMALL_FLOATS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool]
LAYOUTS = ["contiguous", "transposed", "strided", "expanded", "lazy"]

MOVES = ["pvary", "all_gather", "local_slice", "ppermute", "all_to_all"]
SUMS = ["psum", "pmean", "reduce_scatter"]
EXTREMES = ["pmax", "pmin"]
TYPES = {"psum": "VI", "pmean": "VI", "pvary": "IV", "local_slice": "IV", "pmax": "VI", "pmin": "VI"}

# A hang, met after a rank raised alone, would be met again at each step of shrinking.
COMMUNICATING = settings(max_examples=50, phases=[Phase.explicit, Phase.reuse, Phase.generate])


def under(mesh_sizes: dict[str, int], f: Any, *args: Any, check: bool = True) -> Any:
    threads = dist.get_backend() == "threaded"  # whose groups end with each call
    mesh = (mesh_of.__wrapped__ if threads else mesh_of)(**mesh_sizes)
    return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=..., check=check)(*args)


@st.composite
def calls(draw: st.DrawFn, name: str, n: int, min_size: int = 0) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A local shape and keyword arguments that `name` accepts over `n` ranks."""
    fewest = 1 if name in ("all_gather", "local_slice", "reduce_scatter", "all_to_all") else 0
    shape = list(draw(draws.shapes(min_ndim=fewest, max_ndim=3, min_size=min_size, max_size=3)))
    dim = st.integers(-len(shape), len(shape) - 1)
    if name == "ppermute":
        sources, targets = draw(st.permutations(range(n))), draw(st.permutations(range(n)))
        return tuple(shape), {"perm": list(zip(sources, targets, strict=True))[: draw(st.integers(0, n))]}
    kwargs: dict[str, Any] = {}
    if name == "all_to_all":
        kwargs = {"split_dim": draw(dim), "concat_dim": draw(dim)}
    elif fewest:
        kwargs = {"dim": draw(dim)}
    if name in ("local_slice", "reduce_scatter", "all_to_all"):
        shape[kwargs["split_dim"] if name == "all_to_all" else kwargs["dim"]] *= n
    return tuple(shape), kwargs


@st.composite
def axes_of_meshes(draw: st.DrawFn, max_world: int = 4) -> tuple[dict[str, int], Any]:
    """A mesh, and one or several of its axes in any order."""
    sizes = draw(draws.mesh_sizes(max_world=max_world, max_axes=3))
    order = draw(st.permutations(list(sizes)))[: draw(st.integers(1, len(sizes)))]
    return sizes, order[0] if len(order) == 1 and draw(st.booleans()) else tuple(order)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another arrangement of memory, or with a negation or a conjugation still to be done."""
    if layout == "transposed" and x.ndim >= 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and x.ndim:
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if layout == "expanded" and x.ndim and x.shape[0] > 0:
        return x[:1].expand(x.shape)
    if layout == "lazy" and x.is_complex():
        return torch.conj_physical(x).conj()
    if layout == "lazy" and x.dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(x), -x).conj().imag
    return x


def bits(x: Tensor) -> Tensor:
    plain = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str, position: int) -> Tensor:
    seed = 7 if TYPES.get(name, "VV")[0] == "I" else position
    return laid_out(draws.tensor_of(shape, dtype, seed), layout)


def against_spec(name: str, dtype: torch.dtype, layout: str, n: int, shape: tuple[int, ...], kwargs: Any) -> str:
    """Whether the collective gives what its spec gives; `refused` where it says that it cannot."""

    def body() -> str:
        xs = [value(name, shape, dtype, layout, i) for i in range(n)]
        mine = xs[sf.axis_index("a")]
        before = bits(mine).clone()
        try:
            got = getattr(functional, name)(mine, "a", **kwargs)
        except TypeError as error:
            return "refused" if name in str(error) and str(dtype) in str(error) else f"unclear: {error}"
        want = spec_of(name)(xs, **kwargs)[sf.axis_index("a")]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), (got.dtype, got.shape, want.dtype, want.shape)
        assert bits(mine).equal(before), "it wrote into its argument"
        if name in MOVES or not (dtype.is_floating_point or dtype.is_complex):
            return "right" if bits(got).equal(bits(want)) else f"{got} is not {want}"
        tolerance = 4 * n * torch.finfo(dtype).eps
        return "right" if torch.allclose(got, want, rtol=tolerance, atol=tolerance) else f"{got} is not {want}"

    return under({"a": n}, body)


@pytest.mark.parametrize("name", MOVES + SUMS + EXTREMES)
@COMMUNICATING
@given(data=st.data())
def test_every_dtype_shape_and_layout_is_right_or_refused(name: str, data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([2, 4]))
    dtype, layout = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(LAYOUTS))
    shape, kwargs = data.draw(calls(name, n))
    found = set(world(n).with_deadline(10).run(against_spec, name, dtype, layout, n, shape, kwargs))
    assert len(found) == 1
    allowed = {"right"}
    if dtype not in FLOATS + COMPLEX + [torch.int32, torch.int64] and name not in MOVES:
        allowed |= {"refused"}
    if dtype in COMPLEX and name in EXTREMES:
        allowed = {"refused"}
    if dtype == torch.bool and name in EXTREMES:
        allowed = {"right"}
    assert found <= allowed


def closure(sizes: dict[str, int], axis: Any, name: str, shape: tuple[int, ...], kwargs: Any) -> dict[str, Any]:
    """This rank's terms of <A t, c> and <t, A^T c>, and what must vanish."""

    def body() -> dict[str, Any]:
        n, first = sf.axis_size(axis), int(sf.pmin(torch.tensor(dist.get_rank()), axis))
        takes, gives = tuple("VI" if kwargs.get("to") == "invariant" else TYPES.get(name, "VV"))

        def drawn(shape: Any, kind: str, seed: int) -> Tensor:
            return draws.tensor_of(tuple(shape), torch.float64, seed + (dist.get_rank() if kind == "V" else first))

        def f(x: Tensor) -> Tensor:
            return getattr(functional, name)(x, axis, **kwargs)

        x, t = drawn(shape, takes, 100), drawn(shape, takes, 200)
        y, pull = vjp(f, x)[:2]
        c = drawn(y.shape, gives, 300)
        moved, pulled = jvp(f, (x,), (t,))[1], pull(c)[0]
        leaf = x.clone().requires_grad_()
        by_autograd = torch.autograd.grad(f(leaf), leaf, c)[0]
        assert moved.shape == y.shape
        assert pulled.shape == x.shape
        once = {"V": 1.0, "I": 1.0 / n}
        return {
            "pushed": (moved * c).sum().item() * once[gives],
            "pulled": (t * pulled).sum().item() * once[takes],
            "off": worst(d.abs().max().item() if d.numel() else 0.0 for d in (moved - f(t), pulled - by_autograd)),
            "size": (moved.numel(), pulled.numel()),
        }

    return under(sizes, body)


LINEAR = ["psum", "pmean", "pvary", "local_slice", "reduce_scatter", "ppermute", "all_to_all"]


@pytest.mark.parametrize(
    ("name", "to"), [(name, None) for name in LINEAR] + [("all_gather", "varying"), ("all_gather", "invariant")]
)
@COMMUNICATING
@given(data=st.data())
def test_a_transpose_pulls_back_what_the_collective_pushes(name: str, to: Any, data: st.DataObject) -> None:
    sizes, axis = data.draw(axes_of_meshes())
    n = math.prod(sizes[one] for one in ((axis,) if isinstance(axis, str) else axis))
    shape, kwargs = data.draw(calls(name, n, min_size=data.draw(st.integers(0, 1))))
    kwargs = kwargs | ({"to": to} if to else {})
    found = world(math.prod(sizes.values())).with_deadline(10).run(closure, sizes, axis, name, shape, kwargs)
    pushed, pulled = (sum(one[side] for one in found) for side in ("pushed", "pulled"))
    assert abs(pushed - pulled) <= 1e-12 * max(1, sum(max(one["size"]) for one in found))
    assert worst(one["off"] for one in found) <= 1e-12


def test_the_closure_notices_a_wrong_transpose() -> None:
    """The property above must not hold by itself: with an all-reduce as its transpose, psum is off by the ranks."""

    def body() -> Any:
        def f(x: Tensor) -> Tensor:
            return sf.pvary(sf.psum(x, "a"), "a")

        t, c = torch.tensor([1.0 + dist.get_rank()]), torch.tensor([3.0])
        moved, pulled = jvp(f, (t,), (t,))[1], vjp(f, t)[1](c)[0]
        return (moved * c).sum().item() / 2, (t * pulled).sum().item()  # as if it were invariant

    found = world(2).run(lambda: under({"a": 2}, body))
    assert sum(pulled for _, pulled in found) == 2 * sum(pushed for pushed, _ in found)


class TestTrees:
    def test_a_tree_goes_in_and_comes_out(self) -> None:
        def body() -> Any:
            x = torch.tensor([1.0, 2.0]) * (1 + sf.axis_index("a"))
            tree = {"w": x, "more": [(x.to(torch.int64), None), {}], "pair": draws.Pair(x[0], 3)}
            return sf.psum(tree, "a")

        for tree in world(2).run(lambda: under({"a": 2}, body)):
            assert tree["w"].tolist() == [3.0, 6.0]
            assert tree["more"] == [(tree["more"][0][0], None), {}]
            assert tree["more"][0][0].tolist() == [3, 6]
            assert tree["more"][0][0].dtype == torch.int64
            assert type(tree["pair"]).__name__ == "Pair"
            assert [leaf.item() for leaf in tree["pair"]] == [3.0, 6]

    @pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "pvary"])
    @pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 1, "b": 2}], ids=str)
    @pytest.mark.parametrize("number", [3, 0.1, 2**40, -1], ids=str)
    def test_a_number_becomes_a_tensor(self, name: str, sizes: dict[str, int], number: Any) -> None:
        def body() -> Any:
            got = getattr(functional, name)(number, "a")
            return got, torch.tensor(number)

        times = sizes["a"] if name == "psum" else 1
        for got, one in world(2).run(lambda: under(sizes, body)):
            assert (got.dtype, got.shape) == (one.dtype, ())
            assert got.item() == (one * times).item()

    @pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 1, "b": 2}], ids=str)
    def test_a_permuted_number_becomes_a_tensor(self, sizes: dict[str, int]) -> None:
        found = world(2).run(lambda: under(sizes, lambda: sf.ppermute([3], "a", [(0, 1)] if sizes["a"] == 2 else [])))
        assert [tree[0].tolist() for tree in found] == ([0, 3] if sizes["a"] == 2 else [0, 0])

    def test_pmean_of_integers_is_a_fraction(self) -> None:
        def body() -> Any:
            return sf.pmean([sf.axis_index("a"), torch.tensor([sf.axis_index("a")])], "a")

        for scalar, vector in world(2).run(lambda: under({"a": 2}, body)):
            assert (scalar.item(), vector.tolist()) == (0.5, [0.5])


@pytest.mark.parametrize("axis", ["one", ("one",), ("one", "two"), ("two", "one")], ids=str)
def test_along_one_rank_every_collective_is_the_identity(axis: Any) -> None:
    def body() -> list[bool]:
        x = torch.arange(6.0).view(2, 3)
        calls: list[Any] = [sf.psum, sf.pmean, sf.pmax, sf.pmin, sf.pvary, sf.all_gather, sf.collectives.local_slice]
        calls += [sf.reduce_scatter, lambda x, a: sf.all_gather(x, a, dim=-1, to="invariant")]
        calls += [lambda x, a: sf.ppermute(x, a, [(0, 0)]), lambda x, a: sf.collectives.local_slice(x, a, dim=1)]
        calls += [lambda x, a: sf.all_to_all(x, a, split_dim=0, concat_dim=1)]
        linear = [f for f in calls if f not in (sf.pmax, sf.pmin)]
        same = [f(x, axis).equal(x) for f in calls]
        same += [grad(lambda x, f=f: (f(x, axis) ** 2).sum())(x).equal(2 * x) for f in linear]
        same += [sf.ppermute(x, axis, []).equal(torch.zeros_like(x))]
        return same

    for same in world(2).run(lambda: under({"one": 1, "a": 2, "two": 1}, body)):
        assert all(same)


# What one rank accepts, two must accept as well, and the other way round: programs move from a laptop to a cluster.
REFUSED_ANYWHERE: list[tuple[str, Any]] = [
    ("psum", lambda: sf.psum(torch.tensor(True), "a")),
    ("psum", lambda: sf.psum(torch.ones(2, dtype=torch.int16), "a")),
    ("reduce_scatter", lambda: sf.reduce_scatter(torch.ones(2, dtype=torch.bool), "a")),
    ("all_gather", lambda: sf.all_gather(torch.ones(()), "a")),
    ("all_gather", lambda: sf.all_gather(torch.ones(2), "a", dim=1)),
    ("all_gather", lambda: sf.all_gather(torch.ones(2), "a", to="everyone")),  # type: ignore[arg-type]
    ("local_slice", lambda: sf.collectives.local_slice(torch.ones(2), "a", dim=-2)),
    ("all_to_all", lambda: sf.all_to_all(torch.ones(2, 2), "a", split_dim=2, concat_dim=0)),
    ("pmax", lambda: sf.pmax(torch.ones(2, dtype=torch.complex64), "a")),
    ("pmax", lambda: grad(lambda x: sf.pmax(x, "a").sum())(torch.ones(2))),
    ("psum", lambda: sf.psum("word", "a")),
    ("psum", lambda: sf.psum(True, "a")),
]


@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 1, "b": 2}], ids=["two ranks", "one rank"])
@pytest.mark.parametrize("index", range(len(REFUSED_ANYWHERE)))
def test_what_two_ranks_refuse_one_rank_refuses(index: int, sizes: dict[str, int]) -> None:
    name, call = REFUSED_ANYWHERE[index]
    for error in world(2, "threads").errors(lambda: under(sizes, call)):
        assert isinstance(error, (TypeError, ValueError, NotImplementedError))
        assert name in str(error)


class TestWire:
    """How many collectives a step issues, and how many messages to and from the other of two ranks they are."""

    @staticmethod
    def calls(f: Any) -> tuple[dict[str, int], int]:
        sent: list[int] = []

        def arrive(works: Any, kind: Any, group: Any) -> None:
            sent.append(len(works.works.result()))
            kept(works, kind, group)

        kept, messages._arrive = messages._arrive, arrive
        try:
            with sf.collectives.ledger() as log:
                f()
        finally:
            messages._arrive = kept
        return dict(Counter(one.op for one in log.records)), sum(sent)

    @pytest.mark.parametrize("batch", [1, 7])
    @pytest.mark.parametrize("engine", [torch.func.grad, sf.grad], ids=["func", "shardfn"])
    def test_per_sample_gradients_through_a_gather_make_one_exchange_each_way(self, batch: int, engine: Any) -> None:
        def body() -> Any:
            w = torch.randn(4, 3, dtype=torch.float64)

            def loss(w: Tensor, x: Tensor) -> Tensor:
                return torch.sin(sf.all_gather(w, "a") @ x).sum()

            xs = torch.randn(batch, 3, dtype=torch.float64)
            return TestWire.calls(lambda: vmap(engine(loss), in_dims=(None, 0))(w, xs))

        for counts in world(2).run(lambda: under({"a": 2}, body, check=False)):
            assert counts == ({"all_gather": 1, "reduce_scatter": 1}, 4)

    @pytest.mark.parametrize(
        ("name", "kwargs", "forward", "backward"),
        [
            ("psum", {}, "all_reduce", None),
            ("pvary", {}, None, "all_reduce"),
            ("all_gather", {}, "all_gather", "reduce_scatter"),
            ("all_gather", {"to": "invariant"}, "all_gather", None),
            ("local_slice", {}, None, "all_gather"),
            ("reduce_scatter", {}, "reduce_scatter", "all_gather"),
            ("all_to_all", {"split_dim": 0, "concat_dim": 1}, "all_to_all", "all_to_all"),
            ("ppermute", {"perm": [(0, 1), (1, 0)]}, "ppermute", "ppermute"),
        ],
    )
    def test_a_collective_is_one_exchange_or_none(self, name: str, kwargs: Any, forward: Any, backward: Any) -> None:
        def body() -> Any:
            x = torch.randn(4, 2, requires_grad=True)
            y: list[Tensor] = []
            sent = TestWire.calls(lambda: y.append(getattr(functional, name)(x, "a", **kwargs)))
            return sent, TestWire.calls(lambda: y[0].sum().backward())

        for sent, returned in world(2).run(lambda: under({"a": 2}, body, check=False)):
            assert sent == (({forward: 1}, 2) if forward else ({}, 0))
            assert returned == (({backward: 1}, 2) if backward else ({}, 0))


def by_autograd(f: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.grad(f(x).sum(), x)


DIFFERENTIATED = {
    "autograd": by_autograd,
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones(2)),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones(2),)),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, x])),
    "grad of vmap": lambda f, x: grad(lambda x: vmap(f)(torch.stack([x, x])).sum())(x),
    "jvp of vmap": lambda f, x: jvp(vmap(f), (x[None],), (x[None],)),
    "shardfn": lambda f, x: sf.grad(lambda x: f(x).sum())(x),
    "grad through a product": lambda f, x: grad(lambda x: (x * f(x * 2)).sum())(x),
}


@pytest.mark.parametrize("way", DIFFERENTIATED)
@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_value_is_not_differentiated(name: str, way: str) -> None:
    def body() -> str:
        with pytest.raises(NotImplementedError) as caught:
            DIFFERENTIATED[way](lambda x: getattr(functional, name)(x, "a"), torch.randn(2))
        return str(caught.value)

    for message in world(2).run(lambda: under({"a": 2}, body)):
        assert f"{name} has no derivative" in message
        assert "x.detach()" in message


@torch.no_grad()
def without_grad(f: Any, x: Tensor) -> Tensor:
    return f(x.clone().requires_grad_())


UNDIFFERENTIATED = {
    "plain": lambda f, x: f(x),
    "no_grad": without_grad,
    "inference_mode": torch.inference_mode()(lambda f, x: f(x).clone()),
    "detached": lambda f, x: f(x.clone().requires_grad_().detach()),
    "vmap": lambda f, x: vmap(f, in_dims=1)(x[:, None])[0],
    "of another argument": lambda f, x: grad(lambda k: (k * f(x)).sum())(torch.tensor(1.0)) / f(x).sum() * f(x),
    "detached in grad": lambda f, x: grad(lambda x: (x * f(x.detach())).sum())(x),
    "detached in vmap of grad": lambda f, x: vmap(grad(lambda x: (x * f(x.detach())).sum()))(x[None])[0],
    "detached in jvp": lambda f, x: jvp(lambda x: x * f(x.detach()), (x,), (torch.ones(2),))[1],
}


@pytest.mark.parametrize("way", UNDIFFERENTIATED)
@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_value_serves_where_nothing_differentiates_it(name: str, way: str) -> None:
    def body() -> Any:
        xs = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])]
        got = UNDIFFERENTIATED[way](lambda x: getattr(functional, name)(x, "a"), xs[sf.axis_index("a")])
        return (got - spec_of(name)(xs)[0]).abs().max().item()

    assert worst(world(2).run(lambda: under({"a": 2}, body))) <= 1e-12


def test_a_stable_softmax_over_cut_logits_is_right() -> None:
    def body() -> float:
        whole = draws.tensor_of((3, 8), torch.float64, 5) * 50

        def loss(local: Tensor) -> Tensor:
            top = sf.pmax(local.detach().amax(-1), "a")
            return (sf.psum((local - top[:, None]).exp().sum(-1), "a").log() + top).sum()

        want = torch.softmax(whole, -1)
        mine = sf.collectives.local_slice(whole, "a", dim=1)
        return (sf.grad(loss)(mine) - sf.collectives.local_slice(want, "a", dim=1)).abs().max().item()

    assert worst(world(4).run(lambda: under({"a": 4}, body))) <= 1e-12


WRITTEN: dict[str, Callable[[Tensor, int], Tensor]] = {
    "pvary": lambda x, n: sf.pvary(x, "a"),
    "psum": lambda x, n: sf.psum(x, "a"),
    "pmean": lambda x, n: sf.pmean(x, "a"),
    "local_slice": lambda x, n: sf.collectives.local_slice(x, "a"),
    "all_gather": lambda x, n: sf.all_gather(x, "a"),
    "all_gather to invariant": lambda x, n: sf.all_gather(x, "a", to="invariant"),
    "reduce_scatter": lambda x, n: sf.reduce_scatter(x, "a"),
    "ppermute": lambda x, n: sf.ppermute(x, "a", [(i, i) for i in range(n)]),
    "all_to_all": lambda x, n: sf.all_to_all(x, "a", split_dim=0, concat_dim=0),
    "ragged_all_to_all": lambda x, n: sf.collectives.ragged_all_to_all(x, "a", [4 // n] * n),
    "pmax": lambda x, n: sf.pmax(x, "a"),
    "pmin": lambda x, n: sf.pmin(x, "a"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_write_into_the_result_leaves_the_argument_alone(name: str, size: int) -> None:
    def body() -> Any:
        x = torch.ones(4)
        WRITTEN[name](x, size).add_(7)
        leaf = torch.ones(4, requires_grad=True)
        if name not in EXTREMES:
            z = WRITTEN[name](leaf, size)
            z.mul_(3)
            assert torch.autograd.grad(z.sum(), leaf)[0].gt(1).any()
        return x.tolist(), leaf.tolist()

    assert world(2).run(lambda: under({"a": size, "b": 2 // size}, body)) == [([1.0] * 4, [1.0] * 4)] * 2


# Of four ranks, where the order of additions matters: each is one number of these.
INEXACT: dict[torch.dtype, tuple[list[float], float]] = {
    torch.float64: ([1e16, 1.0, -1e16, 1.0], 1.0),  # by rank, step by step
    torch.float32: ([1e8, 1.0, -1e8, 1.0], 1.0),
    torch.bfloat16: ([256.0, 1.0, 1.0, 1.0], 260.0),  # rounded once
    torch.float16: ([2048.0, 1.0, 1.0, 1.0], 2052.0),
}


def test_a_sum_has_the_same_bits_on_all_ranks_and_narrow_numbers_are_rounded_once() -> None:
    """Small sums, which one rank adds up, and large ones, of which each rank adds up a piece."""

    def body() -> set[tuple[str, float]]:
        found = set()
        for dtype, (numbers, want) in INEXACT.items():
            for length in (4, 40_000):
                x = torch.full((length,), numbers[sf.axis_index("a")], dtype=dtype)
                sums = {"psum": sf.psum(x, "a"), "reduce_scatter": sf.reduce_scatter(x, "a")}
                sums["pmean"] = sf.pmean(x, "a") * 4
                found |= {(f"{name} {dtype}", one - want) for name, y in sums.items() for one in y.unique().tolist()}
        return found

    for found in world(4).run(lambda: under({"a": 4}, body)):
        assert len(found) == 3 * len(INEXACT)
        assert {name: off for name, off in found if off} == {}


@pytest.mark.parametrize(
    ("sizes", "axis"), [({"a": 2, "b": 2}, ("a", "b")), ({"a": 2, "b": 2}, ("b", "a")), ({"b": 4}, "b")], ids=str
)
def test_gather_undoes_slice_and_permutations_undo_themselves(sizes: dict[str, int], axis: Any) -> None:
    def body() -> bool:
        x = draws.tensor_of((8, 4), torch.float64, 3)
        mine = sf.collectives.local_slice(x, axis, dim=1)
        ring = [(i, (i + 1) % 4) for i in range(4)]
        back = [(target, source) for source, target in ring]
        there = sf.all_to_all(mine, axis, split_dim=0, concat_dim=1)
        same = sf.all_gather(mine, axis, dim=1).equal(x)
        same &= sf.ppermute(sf.ppermute(mine, axis, ring), axis, back).equal(mine)
        same &= sf.all_to_all(there, axis, split_dim=1, concat_dim=0).equal(mine)
        return same and sf.all_gather(there, axis).equal(x)

    assert world(4).run(lambda: under(sizes, body)) == [True] * 4


# What each of two ranks calls; today's backends would mix such messages up, or end the process.
DIFFERING: dict[str, tuple[Any, Any]] = {
    "a longer sum": (lambda: sf.psum(torch.ones(3), "a"), lambda: sf.psum(torch.ones(4), "a")),
    "a sum of another dtype": (
        lambda: sf.psum(torch.ones(4), "a"),
        lambda: sf.psum(torch.ones(2, dtype=torch.float64), "a"),
    ),
    "another shape of as many numbers": (lambda: sf.psum(torch.ones(2, 3), "a"), lambda: sf.psum(torch.ones(6), "a")),
    "a large sum": (lambda: sf.psum(torch.ones(50_000), "a"), lambda: sf.psum(torch.ones(40_000), "a")),
    "a large and a small sum": (lambda: sf.psum(torch.ones(50_000), "a"), lambda: sf.psum(torch.ones(4), "a")),
    "a sum of nothing": (lambda: sf.psum(torch.ones(0), "a"), lambda: sf.psum(torch.ones(1), "a")),
    "a sum and a maximum": (lambda: sf.psum(torch.ones(4), "a"), lambda: sf.pmax(torch.ones(4), "a")),
    "a sum and a gather": (lambda: sf.psum(torch.ones(4), "a"), lambda: sf.all_gather(torch.ones(4), "a")),
    "a longer gather": (lambda: sf.all_gather(torch.ones(9), "a"), lambda: sf.all_gather(torch.ones(1), "a")),
    "a gather along another dimension": (
        lambda: sf.all_gather(torch.ones(2, 2), "a"),
        lambda: sf.all_gather(torch.ones(2, 2), "a", dim=1),
    ),
    "a longer reduce_scatter": (
        lambda: sf.reduce_scatter(torch.ones(4), "a"),
        lambda: sf.reduce_scatter(torch.ones(2), "a"),
    ),
    "an exchange along other dimensions": (
        lambda: sf.all_to_all(torch.ones(2, 2), "a", split_dim=0, concat_dim=1),
        lambda: sf.all_to_all(torch.ones(2, 2), "a", split_dim=1, concat_dim=0),
    ),
    "another permutation": (
        lambda: sf.ppermute(torch.ones(2), "a", [(0, 1), (1, 0)]),
        lambda: sf.ppermute(torch.ones(2), "a", [(1, 0)]),
    ),
    "lengths that do not fit": (
        lambda: sf.collectives.ragged_all_to_all(torch.ones(4), "a", [1, 3], [1, 2]),
        lambda: sf.collectives.ragged_all_to_all(torch.ones(4), "a", [2, 2], [2, 2]),
    ),
    "a permutation that only one rank takes part in": (
        lambda: [sf.ppermute(torch.full((2,), float(i)), "a", [(0, 1)]) for i in range(2)],
        lambda: [sf.ppermute(torch.ones(2), "a", perm) for perm in ([], [(0, 1)])],
    ),
    "what only backward sends": (
        lambda: grad(lambda x: (sf.pvary(x, "a") * 2).sum())(torch.ones(3)),
        lambda: grad(lambda x: (sf.pvary(x, "a") * 2).sum())(torch.ones(4)),
    ),
}


def test_ranks_that_do_different_things_wait_and_get_no_wrong_values() -> None:
    """Each pair of calls on a group of its own that gives up soon, all at the same time."""

    def body() -> dict[str, str]:
        rank, patience = dist.get_rank(), timedelta(seconds=2)
        meshes, groups = {}, {}
        for name in DIFFERING:
            group = dist.new_group([0, 1], timeout=patience)
            meshes[name] = DeviceMesh.from_group(group, "cpu", torch.arange(2), mesh_dim_names=("a",))
            groups[name] = Axis(2, rank, group.group_name)
            known_axes(meshes[name]).used["a"] = groups[name]  # not the group of all meshes
        for mesh in meshes.values():  # connected, and counting alike
            with scope(mesh):
                assert sf.psum(1, "a") == 2
        found: dict[str, str] = {}

        def attempt(name: str) -> None:
            known_axes(meshes[name]).used["a"] = groups[name]  # nor one of this thread's
            try:
                with scope(meshes[name]):
                    found[name] = f"returned {DIFFERING[name][rank]()}"
            except RuntimeError as error:
                found[name] = str(error)

        threads = [threading.Thread(target=attempt, args=(name,), name=name) for name in DIFFERING]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    for found in world(2).run(body):
        assert set(found) == set(DIFFERING)
        assert {name: said for name, said in found.items() if "in vain for" not in said} == {}


class TestDebugging:
    def test_all_ranks_are_told_what_differs(self) -> None:
        differing = {name: calls for name, calls in DIFFERING.items() if "lengths" not in name}  # those may

        def body() -> dict[str, str]:
            found = {}
            for name, calls in differing.items():
                with sf.debug(collectives=True), pytest.raises(ValueError, match="collectives differ") as caught:
                    under({"a": 2}, calls[dist.get_rank()])
                found[name] = str(caught.value)
            return found

        line = r"\S.* called at \S+test_collectives.py:\d+"
        for found in world(2).run(body):
            assert set(found) == set(differing)
            assert [
                said for said in found.values() if not re.search(f"rank 0 has {line}; rank 1 has {line}", said)
            ] == []

    def test_a_collective_that_a_rank_leaves_out_is_noticed_at_the_next(self) -> None:
        def body() -> Any:
            def f() -> Any:
                if sf.axis_index("a") == 0:
                    sf.psum(torch.ones(2), "a")
                return sf.psum(torch.ones(2), "a")

            with sf.debug(collectives=True):
                return under({"a": 2}, f)

        lines = set()
        for error in world(2).errors(body):
            lines |= set(re.findall(r"test_collectives.py:\d+", str(error)))
        assert len(lines) == 2

    def test_right_programs_pass(self) -> None:
        def body() -> Any:
            def f(x: Tensor) -> Tensor:
                y = sf.all_gather(x, "a")
                y = sf.collectives.ragged_all_to_all(y[: 1 + sf.axis_index("a")], "a", [1, sf.axis_index("a")])
                return sf.psum(
                    (y**2).sum() + sf.ppermute(x, "a", [(0, 1)]).sum() + sf.pmean(sf.pvary(x, "a"), "a").sum(), "a"
                )

            with sf.debug(collectives=True):
                return under(
                    {"a": 2}, lambda: [grad(f)(torch.ones(3)), vmap(grad(f))(torch.ones(2, 3)), sf.psum(1, ())]
                )

        for first, second, one in world(2).run(body):
            assert (first.shape, second.shape, one.item()) == ((3,), (2, 3), 1)

    def test_blocks_nest_and_leave_what_they_do_not_name(self) -> None:
        before = dataclasses.replace(debugging)
        with sf.debug(collectives=True, memory=False):
            assert debugging == Debugging(memory=False, collectives=True)
            with sf.debug(memory=True):
                assert debugging == Debugging(memory=True, collectives=True)
                with sf.debug(collectives=False):
                    assert debugging == Debugging(memory=True, collectives=False)
            assert debugging == Debugging(memory=False, collectives=True)
        assert debugging == before

    @pytest.mark.parametrize(
        ("said", "on"),
        [
            ("", set()), ("0", set()), ("1", {"memory", "collectives", "nan"}),
            ("all", {"memory", "collectives", "nan"}), ("memory", {"memory"}),
            (" Collectives ,memory", {"memory", "collectives"}), ("nan", {"nan"}),
        ],
    )  # fmt: skip
    def test_the_environment_switches_it_on(self, said: str, on: set[str]) -> None:
        assert {name for name, switched in by_environment(said).items() if switched} == on

    def test_a_word_that_means_nothing_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="SHARDFN_DEBUG='memroy': memroy is not a check"):
            by_environment("memroy")


def goes_on_after_an_interrupt(name: str) -> list[float]:
    """Sums after a collective that was interrupted on all ranks while its messages were under way."""
    mesh, wait = sf.make_mesh(shard=-1, device="cpu"), messages._wait_for
    n = mesh.size()
    calls: dict[str, Any] = {
        "psum": lambda x: sf.psum(x, "shard"),
        "all_gather": lambda x: sf.all_gather(x, "shard", dim=0),
        "reduce_scatter": lambda x: sf.reduce_scatter(x, "shard", dim=0),
        "ppermute": lambda x: sf.ppermute(x, "shard", perm=[(i, (i + 1) % n) for i in range(n)]),
        "all_to_all": lambda x: sf.all_to_all(x, "shard", split_dim=0, concat_dim=0),
    }

    def mapped(f: Any) -> Any:
        return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=..., check=False)

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    found = []
    total = mapped(lambda x: sf.psum(x, "shard"))
    for kept in (True, False):  # whether somebody holds the error, and with it what was under way
        run = mapped(calls[name])
        run(torch.ones(4 * n))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages, "_wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt) as caught:
                run(torch.full((4 * n,), 7.0))
        if not kept:
            del caught
        assert messages._wait_for is wait
        found += [total(torch.tensor(float(k))).item() / n for k in range(3)]
    return found


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("name", ["psum", "all_gather", "reduce_scatter", "ppermute", "all_to_all"])
def test_what_is_under_way_at_an_interrupt_meets_nothing_later(world: World, name: str) -> None:
    assert world.with_deadline(30).run(goes_on_after_an_interrupt, name) == [[0.0, 1.0, 2.0] * 2] * 4
