"""What `value_and_grad` returns: of which arguments, in which structure, in which engine, and of sharded weights."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import hessian, jacrev, jvp, vmap

import shardfn as sf
from shardfn import P
from shardfn.testing import strategies as draws
from shardfn.testing import world
from tests.models import distance, normal
from tests.reference import worst

Pair = namedtuple("Pair", ["first", "second"])
X, Y = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3.0, -1.0], dtype=torch.float64)


def product(x: Tensor, y: Tensor, power: int = 2) -> Tensor:
    return (x**power * y).sum()


def close(got: Any, want: Any) -> bool:
    """Equal structure, and values equal up to rounding."""
    pairs = zip(optree.tree_leaves(got), optree.tree_leaves(want), strict=True)
    same = optree.tree_structure(got) == optree.tree_structure(want)
    return same and all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) and a.dtype == b.dtype for a, b in pairs)


DX, DY = 2 * X * Y, X**2


@pytest.mark.parametrize(
    ("argnums", "gradient"),
    [
        (0, DX),
        (1, DY),
        (-1, DY),
        (-2, DX),
        ((0,), (DX,)),
        ((0, 1), (DX, DY)),
        ((1, 0), (DY, DX)),
        ([1], (DY,)),
        ((-1, 0), (DY, DX)),
        ((), ()),
    ],
    ids=str,
)
def test_argument_numbers_choose_and_order_the_gradients(argnums: Any, gradient: Any) -> None:
    value, found = sf.value_and_grad(product, argnums)(X, Y)
    assert close(found, gradient)
    assert close(value, product(X, Y))
    assert close(sf.grad(product, argnums)(X, Y), gradient)
    assert close(sf.grad(product, argnums)(X, Y, power=2), gradient)


@pytest.mark.parametrize("argnums", [(0, 0), (0, -2), (1, 0, 1)], ids=str)
def test_an_argument_named_twice_is_refused(argnums: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="twice"):
        sf.value_and_grad(product, argnums)(X, Y)


@pytest.mark.parametrize("argnums", [2, -3, (0, 2)], ids=str)
def test_an_argument_number_without_an_argument_is_refused(argnums: Any) -> None:
    with pytest.raises(TypeError, match=r"argnums=.*product.*2 positional arguments"):
        sf.value_and_grad(product, argnums)(X, Y)


def test_the_docstring_and_name_of_the_function_stay() -> None:
    def loss(x: Tensor) -> Tensor:
        """The loss."""
        return x.sum()

    for made in (sf.grad(loss), sf.value_and_grad(loss)):
        assert (made.__name__, made.__doc__) == ("loss", "The loss.")
    assert close(sf.grad(functools.partial(product, y=Y))(X), DX)


def test_aux_comes_beside_the_loss_or_the_gradient() -> None:
    def loss(x: Tensor) -> Any:
        return (x**2).sum(), {"double": 2 * x, "words": ["a", None, 3]}

    (value, aux), gradient = sf.value_and_grad(loss, has_aux=True)(X)
    assert close((value, gradient), ((X**2).sum(), 2 * X))
    assert aux["words"] == ["a", None, 3]
    assert close(aux["double"], 2 * X)
    gradient, aux = sf.grad(loss, has_aux=True)(X)
    assert close((gradient, aux["double"]), (2 * X, 2 * X))


def mixed_tree() -> dict[str, Any]:
    return {
        "w": X.clone(),
        "nested": [(Y.clone(), None), {}, Pair(torch.tensor(3), X.clone().to(torch.float32))],
        "n": 3,
        "flag": True,
        "mask": torch.tensor([True, False]),
        "ids": torch.tensor([0, 1]),
        "name": "relu",
        "f": torch.relu,
        "unused": torch.ones(2, 2, dtype=torch.float64),
        "empty": torch.ones(0, dtype=torch.float64),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
    }


def loss_of_tree(p: dict[str, Any]) -> Tensor:
    (y, _), _, pair = p["nested"]
    assert (p["n"], p["flag"], p["name"]) == (3, True, "relu")
    kept = torch.where(p["mask"], p["w"], 0.0)[p["ids"]]
    return (kept * y).sum() * p["n"] + pair.second.sum() * pair.first + p["scalar"] ** 2 + p["empty"].sum()


def gradient_of_tree() -> dict[str, Any]:
    return {
        "w": torch.where(torch.tensor([True, False]), 3 * Y, 0.0),
        "nested": [(torch.where(torch.tensor([True, False]), 3 * X, 0.0), None), {}, Pair(None, 3 * torch.ones(2))],
        **dict.fromkeys(("n", "flag", "mask", "ids", "name", "f")),
        "unused": torch.zeros(2, 2, dtype=torch.float64),
        "empty": torch.zeros(0, dtype=torch.float64),
        "scalar": torch.tensor(4.0, dtype=torch.float64),
    }


def tensors_of(gradient: Any) -> list[Tensor]:
    """Its tensors, since torch.func lets nothing else out; their places are checked here."""
    want = gradient_of_tree()
    assert optree.tree_structure(gradient, none_is_leaf=True) == optree.tree_structure(want, none_is_leaf=True)
    assert optree.tree_structure(gradient) == optree.tree_structure(want)
    return optree.tree_leaves(gradient)


ENGINES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "plain": lambda f: f(),
    "no_grad": torch.no_grad()(lambda f: f()),
    "vmap": lambda f: [t[0] for t in vmap(lambda _: f())(torch.zeros(2))],
    "jvp": lambda f: jvp(lambda _: f(), (torch.ones(1),), (torch.ones(1),))[0],
    "grad": lambda f: torch.func.grad(lambda x: (x.sum(), f()), has_aux=True)(torch.ones(1))[1],
    "jacrev": lambda f: jacrev(lambda x: (x, f()), has_aux=True)(torch.ones(1))[1],
}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_has_the_structure_of_its_argument(engine: str) -> None:
    found = ENGINES[engine](lambda: tensors_of(sf.grad(loss_of_tree)(mixed_tree())))
    assert close(found, optree.tree_leaves(gradient_of_tree()))


@pytest.mark.parametrize("tree", [{}, [], None, 3, "word", {"n": 3}, torch.tensor(3), (torch.tensor(True), None)])
def test_a_tree_without_floats_has_a_gradient_of_none(tree: Any) -> None:
    def check() -> Tensor:
        value, gradient = sf.value_and_grad(lambda _: torch.tensor(2.0))(tree)
        assert gradient == optree.tree_map(lambda _: None, tree)
        return value

    assert ENGINES["plain"](check).item() == 2.0
    assert ENGINES["grad"](check).item() == 2.0


@pytest.mark.parametrize(
    ("loss", "kind", "words"),
    [
        (lambda x: 2.0 * 3, TypeError, ["a tensor", "float"]),
        (lambda x: 2, TypeError, ["a tensor", "int"]),
        (lambda x: None, TypeError, ["a tensor", "NoneType"]),
        (lambda x: (x.sum(), x), TypeError, ["a tensor", "tuple", "has_aux=True"]),
        (lambda x: x, ValueError, ["(2,)", ".sum()"]),
        (lambda x: x.sum()[None], ValueError, ["(1,)", "0-d"]),
        (lambda x: x.sum().to(torch.int64), ValueError, ["torch.int64", "floating"]),
        (lambda x: x.sum() * (1 + 1j), ValueError, ["torch.complex", "real"]),
        (lambda x: (x > 0).all(), ValueError, ["torch.bool"]),
    ],
)
def test_a_loss_is_a_real_scalar(loss: Any, kind: type[Exception], words: list[str]) -> None:
    def named(x: Tensor) -> Any:
        return loss(x)

    for engine in (lambda f: f(X), lambda f: vmap(f)(X[None])):
        with pytest.raises(kind) as caught:
            engine(sf.value_and_grad(named))
        assert [word for word in ["must return", "named", *words] if word not in str(caught.value)] == []


@pytest.mark.parametrize("result", [X.sum(), [X.sum(), 1], (X.sum(), 1, 2), (X.sum(),)], ids=["loss", "list", "3", "1"])
def test_with_aux_a_loss_is_a_pair(result: Any) -> None:
    with pytest.raises(TypeError, match=r"has_aux=True.*must return \(loss, aux\)"):
        sf.value_and_grad(lambda x: result, has_aux=True)(X)


def test_complex_parameters_follow_torch() -> None:
    z = torch.tensor([1 + 2j, -3j], dtype=torch.complex128)

    def loss(z: Tensor) -> Tensor:
        return (z * z.conj()).real.sum() + (z**2).imag.sum()

    leaf = z.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    assert close(sf.grad(loss)(z), want)
    assert close(vmap(sf.grad(loss))(z[None])[0], want)


def cubes(x: Tensor) -> Tensor:
    return (x**3).sum()


TRANSFORMS: dict[str, tuple[Callable[[], Any], Any]] = {
    "grad of grad": (lambda: sf.grad(lambda x: sf.grad(cubes)(x).sum())(X), 6 * X),
    "func.grad of grad": (lambda: torch.func.grad(lambda x: sf.grad(cubes)(x).sum())(X), 6 * X),
    "grad of func.grad": (lambda: sf.grad(lambda x: torch.func.grad(cubes)(x).sum())(X), 6 * X),
    "third": (
        lambda: sf.grad(lambda x: sf.grad(lambda x: sf.grad(cubes)(x).sum())(x).sum())(X),
        6 * torch.ones_like(X),
    ),
    "jvp": (lambda: jvp(sf.grad(cubes), (X,), (Y,)), (3 * X**2, 6 * X * Y)),
    "vmap": (lambda: vmap(sf.grad(cubes))(torch.stack([X, Y])), torch.stack([3 * X**2, 3 * Y**2])),
    "jacrev": (lambda: jacrev(sf.grad(cubes))(X), torch.diag(6 * X)),
    "hessian": (lambda: hessian(lambda x: sf.value_and_grad(cubes)(x)[0])(X), torch.diag(6 * X)),
    "value": (lambda: torch.func.grad(lambda x: sf.value_and_grad(cubes)(x)[0])(X), 3 * X**2),
    "value in plain": (lambda: sf.grad(lambda x: sf.value_and_grad(cubes)(x)[0])(X), 3 * X**2),
    "closed over": (lambda: sf.grad(lambda x: sf.grad(lambda y: (x * y**2).sum())(Y).sum())(X), 2 * Y),
    "func closed over": (lambda: torch.func.grad(lambda x: sf.grad(lambda y: (x * y**2).sum())(Y).sum())(X), 2 * Y),
    "aux closed over": (
        lambda: sf.grad(lambda x: sf.grad(lambda y: ((y**2).sum(), (x * y).sum()), has_aux=True)(Y)[1])(X),
        Y,
    ),
    "func aux closed over": (
        lambda: torch.func.grad(lambda x: sf.grad(lambda y: ((y**2).sum(), (x * y).sum()), has_aux=True)(Y)[1])(X),
        Y,
    ),
    "aux of the argument": (
        lambda: sf.grad(lambda x: sf.grad(lambda y: ((y**2).sum(), (y**3).sum()), has_aux=True)(x)[1])(X),
        3 * X**2,
    ),
    "value closed over": (lambda: sf.grad(lambda x: sf.value_and_grad(lambda y: (x * y).sum())(Y)[0])(X), Y),
    "two levels closed over": (
        lambda: sf.grad(lambda x: sf.grad(lambda y: sf.grad(lambda z: (x * y * z**2).sum())(Y).sum())(Y).sum())(X),
        2 * Y,
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_are_differentiated_again(name: str) -> None:
    run, want = TRANSFORMS[name]
    assert close(run(), want)


class TestOutsideGraph:
    """Who else differentiates decides whether a graph is kept."""

    def test_arguments_that_require_grad_keep_double_backward(self) -> None:
        x = X.clone().requires_grad_()
        value, gradient = sf.value_and_grad(cubes)(x)
        assert close(torch.autograd.grad(value, x, retain_graph=True)[0], 3 * X**2)
        assert close(torch.autograd.grad(gradient.sum(), x)[0], 6 * X)

    def test_one_argument_of_many_that_requires_grad_keeps_double_backward(self) -> None:
        y = Y.clone().requires_grad_()
        gradient = sf.grad(lambda p: (p["x"] ** 2 * p["y"]).sum())({"x": X, "y": y})
        assert close(torch.autograd.grad(gradient["x"].sum(), y)[0], 2 * X)

    @pytest.mark.parametrize("depth", ["leaf", "computed", "parameter"])
    def test_a_tensor_closed_over_keeps_double_backward(self, depth: str) -> None:
        leaf = torch.nn.Parameter(Y.clone()) if depth == "parameter" else Y.clone().requires_grad_()
        y = leaf * 1 if depth == "computed" else leaf
        gradient = sf.grad(lambda x: (x**2 * y).sum())(X)
        assert close(gradient.detach(), DX)
        assert close(torch.autograd.grad(gradient.sum(), leaf)[0], 2 * X)

    def test_an_argument_that_is_not_differentiated_keeps_double_backward(self) -> None:
        y = Y.clone().requires_grad_()
        gradient = sf.grad(product)(X, y)
        assert close(torch.autograd.grad(gradient.sum(), y)[0], 2 * X)

    def test_aux_of_a_tensor_closed_over_stays_connected(self) -> None:
        y = Y.clone().requires_grad_()
        _, aux = sf.grad(lambda x: ((x**2).sum(), (x * y).sum()), has_aux=True)(X)
        assert close(torch.autograd.grad(aux, y)[0], X)

    @pytest.mark.parametrize(
        "loss",
        [lambda x: ((x**2).sum(), {"a": x * 2, "n": 3}), lambda x: (torch.ones(()), {"a": x * 2})],
        ids=["used", "unused"],
    )
    def test_otherwise_no_graph_is_kept(self, loss: Any) -> None:
        (value, aux), gradient = sf.value_and_grad(loss, has_aux=True)(X)
        assert not any(t.requires_grad for t in (value, aux["a"], gradient))
        assert all(t.grad_fn is None for t in (value, aux["a"], gradient))
        assert not X.requires_grad
        assert X.grad is None

    @pytest.mark.parametrize("requires_grad", [True, False])
    def test_under_no_grad_the_gradient_is_right_and_detached(self, requires_grad: bool) -> None:
        x = X.clone().requires_grad_(requires_grad)
        with torch.no_grad():
            (value, aux), gradient = sf.value_and_grad(lambda x: (cubes(x), x * 2), has_aux=True)(x)
        assert close((value, gradient), (cubes(X), 3 * X**2))
        assert not any(t.requires_grad for t in (value, gradient, aux))
        assert x.requires_grad is requires_grad
        assert x.grad is None

    def test_inference_mode_is_right_or_refused(self) -> None:
        with torch.inference_mode():
            found: Any
            try:
                found = sf.value_and_grad(cubes)(X)
            except RuntimeError as error:
                found = error
        if isinstance(found, RuntimeError):
            assert "inference" in str(found)
        else:
            assert close([t.clone() for t in found], [cubes(X), 3 * X**2])

    def test_no_grad_inside_is_a_constant(self) -> None:
        def loss(x: Tensor) -> Tensor:
            with torch.no_grad():
                held = x**2
            return (x * held).sum()

        assert close(sf.grad(loss)(X), X**2)
        assert close(sf.grad(lambda x: (x * x.detach()).sum())(X), X)

    def test_the_gradient_of_a_leaf_does_not_reach_its_grad_field(self) -> None:
        x = X.clone().requires_grad_()
        sf.grad(cubes)(x)
        assert x.grad is None

    def test_dual_tensors_keep_their_tangents(self) -> None:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(X, Y)
            (value, aux), gradient = sf.value_and_grad(lambda x: (cubes(x), x**2), has_aux=True)(x)
            found = [forward_ad.unpack_dual(t) for t in (value, aux, gradient)]
        assert all(one.tangent is not None for one in found)
        assert close([one.tangent for one in found], [(3 * X**2 * Y).sum(), 2 * X * Y, 6 * X * Y])

    def test_dual_tensors_closed_over_keep_their_tangents(self) -> None:
        with forward_ad.dual_level():
            y = forward_ad.make_dual(Y, X)
            value, gradient = sf.value_and_grad(lambda x: (x**2 * y).sum())(X)
            found = [forward_ad.unpack_dual(t) for t in (value, gradient)]
        assert all(one.tangent is not None for one in found)
        assert close([one.tangent for one in found], [(X**3).sum(), 2 * X * X])

    def test_a_write_into_the_argument_is_refused_and_leaves_it_alone(self) -> None:
        def loss(x: Tensor) -> Tensor:
            x.mul_(2)
            return x.sum()

        x = X.clone()
        with pytest.raises(RuntimeError, match="writes into a parameter by which it is differentiated"):
            sf.grad(loss)(x)
        assert close(x, X)


class TestCompiled:
    def test_the_loss_inside_may_be_compiled(self) -> None:
        compiled = torch.compile(cubes, fullgraph=True, backend="aot_eager")
        assert close(sf.grad(compiled)(X), 3 * X**2)

    def test_a_function_that_differentiates_compiles_as_one_graph(self) -> None:
        def step(x: Tensor) -> Any:
            value, gradient = sf.value_and_grad(lambda p: cubes(p["x"]))({"x": x})
            return value, x - 0.1 * gradient["x"]

        with torch._dynamo.config.patch(trace_autograd_ops=True):
            value, x = torch.compile(step, fullgraph=True, backend="aot_eager")(X)
        assert close((value, x), (cubes(X), X - 0.3 * X**2))


# Sharded weights: the gradient of the global mean loss, on this rank's piece, against one process.

ROWS, INNER, OUT = 8, 8, 4


def data() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(draws.tensor_of(s, torch.float64, i) for i, s in enumerate([(ROWS, INNER), (INNER, OUT), (ROWS, OUT)]))  # type: ignore[return-value]


def one_process() -> Tensor:
    x, w, y = data()
    return sf.grad(lambda w: ((torch.tanh(x @ w) - y) ** 2).mean())(w)


def mean_loss(x: Tensor, w: Tensor, y: Tensor, axes: Any, total: Callable[[Tensor, Any], Tensor] = sf.psum) -> Tensor:
    """The mean over all rows of all ranks."""
    return total(((torch.tanh(x @ w) - y) ** 2).sum(), axes) / (ROWS * OUT)


def fsdp(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return mean_loss(x, sf.all_gather(w, "d"), y, "d")


def ddp(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return mean_loss(x, sf.pvary(w, "d"), y, "d")


def hsdp(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return mean_loss(x, sf.all_gather(sf.pvary(w, "r"), "d"), y, ("r", "d"))


def two_axes(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return mean_loss(x, sf.all_gather(w, ("r", "d")), y, ("r", "d"))


def fsdp_and_tensor(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Rows of the batch over d; rows of w over r, whose products are summed, and over d, gathered."""
    w = sf.all_gather(w, "d", dim=1)
    partial = sf.collectives.local_slice(x, "r", dim=1) @ w
    out = torch.tanh(sf.psum(partial, "r"))
    return sf.psum(((out - y) ** 2).sum(), "d") / (ROWS * OUT)


LAYOUTS: list[tuple[Any, dict[str, int], P, P]] = [
    (fsdp, {"d": 2}, P("d"), P("d")),
    (fsdp, {"d": 4}, P("d"), P("d")),
    (ddp, {"d": 2}, P("d"), P()),
    (ddp, {"d": 4}, P("d"), P()),
    (hsdp, {"r": 2, "d": 2}, P(("r", "d")), P("d")),
    (two_axes, {"r": 2, "d": 2}, P(("r", "d")), P(("r", "d"))),
    (fsdp_and_tensor, {"r": 2, "d": 2}, P("d"), P("r", "d")),
]


def ratio(
    loss: Any, sizes: dict[str, int], rows: P, weights: P, engine: Any, check: bool = True
) -> tuple[float, float]:
    """The smallest and the largest ratio of an element of this rank's gradient to that of one process."""
    mesh = sf.make_mesh(device="cpu", **sizes)
    mapped = functools.partial(sf.shard_map, mesh=mesh, out_specs=..., inputs="global", check=check)
    x, w, y = data()
    found = mapped(lambda x, w, y: engine(lambda w: loss(x, w, y))(w), in_specs=(rows, weights, rows))(x, w, y)
    want = mapped(lambda g: g, in_specs=weights)(one_process())
    assert found.shape == want.shape
    return (found / want).min().item(), (found / want).max().item()


@pytest.mark.parametrize("engine", [sf.grad, torch.func.grad], ids=["shardfn", "func"])
@pytest.mark.parametrize(("loss", "sizes", "rows", "weights"), LAYOUTS)
def test_the_gradient_of_the_global_mean_is_that_of_one_process(
    loss: Any, sizes: dict[str, int], rows: P, weights: P, engine: Any
) -> None:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    for low, high in world(ranks).run(ratio, loss, sizes, rows, weights, engine):
        assert abs(low - 1) <= 1e-12
        assert abs(high - 1) <= 1e-12


class NaiveSum(torch.autograd.Function):
    """An all-reduce whose backward is an all-reduce, as it is often written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any) -> Tensor:
        ctx.axis = axis
        return sf.psum(x, axis)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return sf.psum(ct, ctx.axis), None


@pytest.mark.parametrize(("ranks", "gather"), [(2, sf.all_gather), (4, sf.all_gather), (2, sf.pvary), (4, sf.pvary)])
def test_with_an_all_reduce_for_its_own_transpose_gradients_are_too_large_by_the_ranks(ranks: int, gather: Any) -> None:
    """Why psum's transpose is pvary: the sum's cotangent is one number that all ranks hold, not one of each."""

    def naive(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return mean_loss(x, gather(w, "d"), y, "d", NaiveSum.apply)

    weights = P("d") if gather is sf.all_gather else P()
    for low, high in world(ranks).run(ratio, naive, {"d": ranks}, P("d"), weights, sf.grad, False):
        assert abs(low - ranks) <= 1e-12
        assert abs(high - ranks) <= 1e-12


def test_per_sample_gradients_of_sharded_weights_are_those_of_one_process() -> None:
    def body() -> float:
        x, w, y = data()
        mesh = sf.make_mesh(d=-1, device="cpu")

        def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return ((torch.tanh(x @ w) - y) ** 2).sum()

        def whole(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return loss(sf.all_gather(w, "d", to="invariant"), x, y)

        def per_sample(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return vmap(sf.grad(whole), in_dims=(None, 0, 0))(w, x, y)

        run = sf.shard_map(per_sample, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P(None, "d"), inputs="global")
        want = vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(w, x, y)
        size, rank = mesh.size(), mesh.get_local_rank()
        return (run(w, x, y) - want.chunk(size, 1)[rank]).abs().max().item()

    assert worst(world(2).run(body)) <= 1e-12


@pytest.mark.parametrize("tracked", ["nothing", "an argument", "a closure"])
def test_gradients_do_not_share_memory(tracked: str) -> None:
    p = [torch.ones(2, 2, requires_grad=tracked == "an argument") for _ in range(3)]
    scale = torch.ones((), requires_grad=tracked == "a closure")
    found = sf.grad(lambda p: (p[0] + p[1]).sum() * scale + (p[2] * 2).sum())(p)
    with torch.no_grad():
        for gradient in found:
            gradient.mul_(3)
    assert [gradient.flatten().tolist() for gradient in found] == [[3.0] * 4, [3.0] * 4, [6.0] * 4]


def test_gradients_of_tensors_without_data_have_their_shapes() -> None:
    with FakeTensorMode():
        p = [torch.ones(2, 3), torch.ones(2, 3)]
        assert [g.shape for g in sf.grad(lambda p: (p[0] + p[1]).sum())(p)] == [(2, 3), (2, 3)]


class Energy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(X.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x**2).sum()


@pytest.mark.parametrize("transform", [sf.value_and_grad, sf.grad])
@pytest.mark.parametrize("args", [({"weight": X}, Y), ({"weight": X},)], ids=["parameters and input", "parameters"])
def test_a_module_is_no_function_of_its_parameters(transform: Any, args: Any) -> None:
    says = r"Energy is a module, .* not a function of its parameters: write model = shardfn\.interop\.functional\("
    with pytest.raises(TypeError, match=says):
        transform(Energy())(*args)


@pytest.mark.parametrize(
    "call", [lambda f: sf.stage(f), lambda f: sf.stage(remat=True)(f), lambda f: sf.accumulate(f, [X])]
)
def test_a_module_with_parameters_is_no_stage_and_no_sum_of_losses(call: Any) -> None:
    with pytest.raises(TypeError, match=r"Energy is a module, .* not a function of its parameters"):
        call(Energy())


def test_a_module_is_differentiated_by_its_input() -> None:
    assert close(sf.grad(Energy())(Y), 2 * X * Y)


class Scaled(torch.nn.Module):
    """Its forward takes the parameters; a buffer is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", Y)

    def forward(self, params: Any, x: Tensor) -> Tensor:
        return (params["w"] * self.scale * x).sum()


def test_a_module_may_be_a_function_of_parameters() -> None:
    want = {"w": Y * X}
    assert close(sf.grad(Scaled())({"w": X}, X), want)
    assert close(sf.grad(sf.stage(Scaled()))({"w": X}, X), want)
    assert close(sf.accumulate(Scaled(), [X])({"w": X})[1], want)


def shrunk(p: Tensor) -> Tensor:
    """A gradient inside of the loss, of a leaf that it makes."""
    inner = sf.grad(lambda v: (p * v * v).sum())(torch.ones(3, dtype=torch.float64))
    return inner.square().sum()


def physical(p: Tensor) -> Tensor:
    """As in physics-informed networks: the loss differentiates by points that it makes leaves itself."""
    x = torch.linspace(0, 1, 5, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad((p[:, None] * x**3).sum(), x, create_graph=True)
    return (slope - p.sum()).square().sum()


def penalized(stage: Any, p: Any, x: Tensor) -> Tensor:
    """As the gradient penalty of Wasserstein GANs, of a stage."""
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(stage(p, x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().sum()


@pytest.mark.parametrize("loss", [shrunk, physical])
def test_leaves_that_only_the_loss_knew_keep_no_graph(loss: Any) -> None:
    p = torch.arange(1.0, 4.0, dtype=torch.float64)
    value, gradient = sf.value_and_grad(loss)(p)
    _, (again,) = sf.value_and_grad(loss)(p), (sf.grad(loss)(p),)
    assert not value.requires_grad
    assert not gradient.requires_grad
    h = 1e-6 * torch.eye(3, dtype=torch.float64)
    wanted = torch.stack([(loss(p + e) - loss(p - e)).detach() / 2e-6 for e in h])
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=0)
    assert torch.equal(again, gradient)


def test_a_leaf_that_is_kept_stays_connected() -> None:
    kept = []

    def loss(p: Tensor) -> Tensor:
        x = torch.ones(3, dtype=torch.float64).requires_grad_()
        kept.append(x)
        return (p * x**2).sum()

    value, gradient = sf.value_and_grad(loss)(torch.ones(3, dtype=torch.float64))
    assert torch.autograd.grad(value, kept[0], retain_graph=True)[0].tolist() == [2.0] * 3
    assert torch.autograd.grad(gradient.sum(), kept[0])[0].tolist() == [2.0] * 3


def penalties() -> Any:
    mesh = sf.make_mesh(d=-1, device="cpu")
    w, x = normal(4, 4, seed=1), normal(4, 4, seed=2)
    flat = sf.shard({"a": {"w": w}}, mesh, sf.full_shard("d"))

    def layer(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"])

    stage = sf.stage(layer)
    mine = x.chunk(mesh.size())[mesh.get_rank()]
    value, gradient = sf.value_and_grad(lambda p: penalized(stage, p["a"], mine))(flat)
    whole = {"w": w.clone().requires_grad_()}
    (wanted,) = torch.autograd.grad(penalized(layer, whole, x), whole["w"])
    return value.requires_grad, gradient["a"].values.requires_grad, distance(sf.unshard(gradient)["a"]["w"], wanted)


def test_a_penalty_on_slopes_of_a_stage_keeps_no_graph() -> None:
    for *graphs, off in world(2).run(penalties):
        assert graphs == [False, False]
        assert off < 1e-12
