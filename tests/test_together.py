"""Rules that compute a gradient and its tangent together: the values and derivatives of torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.compat import together
from shardfn.forward_mode.watched import Watched
from tests.models import in_forward_mode, normal
from tests.reference import worst

FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "matmul": (lambda x, w: x @ w, [(3, 5), (5, 4)]),
    "of more rows": (lambda x, w: torch.matmul(x, w), [(2, 3, 5), (5, 4)]),
    "of one row": (lambda x, w: x.matmul(w), [(1, 5), (5, 1)]),
    "of a transposed matrix": (lambda x, w: x.mT @ w.mT, [(5, 3), (4, 5)]),
    "of no rows": (lambda x, w: (x @ w).sum() + w.sum(), [(0, 5), (5, 4)]),
    "of a vector": (lambda x, w: x @ w, [(5,), (5, 4)]),
    "linear": (lambda x, w: F.linear(x, w), [(2, 3, 5), (4, 5)]),
    "linear with a bias": (lambda x, w, b: F.linear(x, w, b), [(3, 5), (4, 5), (4,)]),
    "a matrix twice": (lambda x, w: (x @ w).sin() @ w.mT, [(3, 5), (5, 4)]),
    "by itself": (lambda x: x @ x, [(4, 4)]),
    "silu": (lambda x: F.silu(3 * x), [(3, 50)]),
    "silu of columns": (lambda x: F.silu(x.mT.chunk(2)[1]), [(3, 50)]),
    "gelu": (lambda x: F.gelu(3 * x), [(3, 50)]),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), [(3, 50)]),
    "a perceptron": (lambda x, w, u: F.gelu(F.silu(x @ w) @ u), [(2, 3, 5), (5, 6), (6, 4)]),
}
RULES = ("matmul", "of more rows", "of one row", "of a transposed matrix", "linear", "silu", "gelu", "a perceptron")


def given(name: str) -> tuple[Callable[..., Any], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A function with a cotangent as its last argument, arguments, and tangents."""
    f, shapes = FUNCTIONS[name]
    inputs, tangents = (tuple(normal(*shape, seed=k + i) for i, shape in enumerate(shapes)) for k in (0, 10))
    ct, dct = (normal(*f(*inputs).shape, seed=k) for k in (20, 21))
    return f, (*inputs, ct), (*tangents, dct)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("still", [(), (0,), (-2,), (-1,), (0, -1)])
def test_gradients_and_their_tangents(name: str, still: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "NUMBERS", 64)
    f, inputs, tangents = given(name)
    moving = [None if i in {k % len(inputs) for k in still} else t for i, t in enumerate(tangents)]
    along: Any = torch.func.jvp
    want, moved = along(
        lambda *given: (f(*given[:-1]), *torch.func.vjp(f, *given[:-1])[1](given[-1])),
        inputs,
        tuple(torch.zeros_like(x) if t is None else t for x, t in zip(inputs, moving, strict=True)),
    )
    got = in_forward_mode(f, inputs, moving, Watched())
    assert len(got) == len(want)
    for (value, tangent), y, dy in zip(got, want, moved, strict=True):
        assert torch.allclose(value, y, rtol=1e-13, atol=1e-13)
        assert torch.allclose(torch.zeros_like(y) if tangent is None else tangent, dy, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", RULES)
def test_other_orders_and_batches(name: str) -> None:
    f, inputs, tangents = given(name)

    def orders() -> list[Tensor]:  # without a jvp of a jvp: sf.jvp is around none, and torch gives Functions zero there
        primals, moving = inputs[:-1], tangents[:-1]

        def transposed(*given: Tensor) -> Any:
            return torch.func.vjp(f, *given[:-1])[1](given[-1])

        def of_gradients(x: Tensor) -> Tensor:
            return torch.stack([g.sin().sum() for g in transposed(x, *inputs[1:])]).sum()

        def of_tangents(x: Tensor) -> Tensor:
            return torch.func.jvp(f, (x, *primals[1:]), moving)[1].sin().sum()

        def of_products(x: Tensor) -> Tensor:
            return torch.func.jvp(torch.func.grad(of_gradients), (x,), (moving[0],))[1].sin().sum()

        batch = torch.stack([inputs[0], tangents[0]])
        return [
            torch.func.jvp(f, primals, moving)[1],
            *transposed(*inputs),
            *torch.func.jvp(transposed, inputs, tangents)[1],
            torch.func.grad(of_gradients)(inputs[0]),
            torch.func.grad(of_tangents)(inputs[0]),
            torch.func.grad(of_products)(inputs[0]),
            torch.func.vmap(lambda x: f(x, *primals[1:]))(batch),
            *torch.func.vmap(lambda x: transposed(x, *inputs[1:]))(batch),
            torch.func.vmap(lambda t: torch.func.jvp(f, primals, (t, *moving[1:]))[1])(batch),
        ]

    want = orders()
    with Watched():
        got = orders()
    assert worst([float((x - y).norm() / y.norm().clamp(1)) for x, y in zip(got, want, strict=True)]) < 1e-12


@pytest.mark.parametrize("name", ["matmul", "linear", "silu", "gelu"])
def test_a_gradient_of_a_tangent_that_is_closed_over(name: str) -> None:
    f, inputs, tangents = given(name)

    def slope(mode: Any) -> Tensor:  # autograd follows pairs that need a gradient, and none of torch.func's levels
        x = inputs[0].clone().requires_grad_()
        with mode, torch.autograd.forward_ad.dual_level():
            y = f(torch.autograd.forward_ad.make_dual(x, tangents[0]), *inputs[1:-1])
            moved = torch.autograd.forward_ad.unpack_dual(y).tangent
        return torch.autograd.grad(moved.sin().sum() + y.sum(), x)[0]

    assert torch.allclose(slope(Watched()), slope(torch.enable_grad()), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in RULES if name != "of one row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_dtypes_are_as_near_as_those_of_torch(name: str, dtype: torch.dtype) -> None:
    f, inputs, tangents = given(name)
    exact = in_forward_mode(f, inputs, tangents, Watched())
    lower = [x.to(dtype) for x in inputs], [t.to(dtype) for t in tangents]
    for (value, tangent), (y, dy) in zip(in_forward_mode(f, *lower, Watched()), exact, strict=True):
        for x, z in ((value, y), (tangent, dy)):
            assert x is not None
            assert z is not None
            assert x.dtype == dtype
            assert float((x - z).norm() / z.norm()) < (2e-2 if dtype == torch.bfloat16 else 2e-6)
