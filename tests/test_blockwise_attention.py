"""Attention whose scores are computed again: the values and derivatives of torch's plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardfn.compat import blockwise_attention
from shardfn.compat.blockwise_attention import sdpa
from tests.models import in_forward_mode, normal
from tests.reference import worst

Attention = Callable[..., Tensor]


def masks(length: int, count: int) -> dict[str, dict[str, Any]]:
    seen = normal(length, count, seed=9) > -0.5
    none = seen.clone()
    none[2] = False
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "scaled": {"scale": 0.3},
        "seen": {"attn_mask": seen},
        "one sees nothing": {"attn_mask": none},
        "biased": {"attn_mask": normal(3, length, count, seed=8)},
    }


def derivatives(f: Attention, batch: tuple[int, ...], length: int, count: int, width: int) -> list[Tensor]:
    """Values, tangents, gradients, tangents of gradients, gradients of gradients, and a batch."""
    shapes = [(*batch, length, 4), (*batch, count, 4), (*batch, count, width), (*batch, length, width)]
    inputs, tangents = (tuple(normal(*shape, seed=k + i) for i, shape in enumerate(shapes)) for k in (0, 10))

    def transposed(q: Tensor, k: Tensor, v: Tensor, ct: Tensor) -> Any:
        return torch.func.vjp(f, q, k, v)[1](ct)

    def of_gradients(q: Tensor) -> Tensor:
        return torch.stack([x.sin().sum() for x in transposed(q, *inputs[1:])]).sum()

    def of_tangents(k: Tensor) -> Tensor:
        return torch.func.jvp(transposed, (inputs[0], k, *inputs[2:]), tangents)[1][0].sin().sum()

    return [
        f(*inputs[:3]),
        torch.func.jvp(f, inputs[:3], tangents[:3])[1],
        torch.func.jvp(lambda v: f(*inputs[:2], v), inputs[2:3], tangents[2:3])[1],
        *transposed(*inputs),
        *torch.func.jvp(transposed, inputs, tangents)[1],
        torch.func.grad(of_gradients)(inputs[0]),
        torch.func.grad(of_tangents)(inputs[1]),
        torch.func.vmap(lambda t: torch.func.jvp(lambda q: f(q, *inputs[1:3]), inputs[:1], (t,))[1])(
            torch.stack([inputs[0], tangents[0]])
        ),
    ]


@pytest.mark.parametrize("kind", masks(3, 3))
@pytest.mark.parametrize("at_a_time", [8, 80, 2**18])
@pytest.mark.parametrize(("batch", "length", "count", "width"), [((2, 3), 5, 7, 6), ((3,), 4, 4, 4)])
def test_derivatives_are_those_of_the_plain_formulas(
    kind: str, at_a_time: int, batch: tuple[int, ...], length: int, count: int, width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(blockwise_attention, "SCORES", at_a_time)
    options = masks(length, count)[kind]
    with sdpa_kernel(SDPBackend.MATH):
        got, want = (
            derivatives(lambda q, k, v, f=f: f(q, k, v, **options), batch, length, count, width)
            for f in (sdpa, F.scaled_dot_product_attention)
        )
    known = [(x, y) for x, y in zip(got, want, strict=True) if not y.isnan().any()]
    assert len(known) >= len(want) - (kind == "one sees nothing")  # of which torch has no gradient of a product
    assert worst([float((x - y).norm() / y.norm().clamp(1e-9)) for x, y in known]) < 1e-14
    assert all(x.isfinite().all() for x in got)


@pytest.mark.parametrize("kind", masks(5, 7))
@pytest.mark.parametrize(("at_a_time", "rows"), [(8, 1), (80, 2), (2**18, 2), (2**18, 64)])
@pytest.mark.parametrize("still", [(), (0,), (1, 3), (2, 3), (0, 1, 2)])
def test_a_gradient_and_its_tangent_in_place(
    kind: str, at_a_time: int, rows: int, still: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise_attention, "SCORES", at_a_time)
    monkeypatch.setattr(blockwise_attention, "ROWS", rows)
    for length, count, groups in ((5, 7, 3), (7, 5, 1), (1, 1, 3), (1, 6, 1), (6, 1, 3)):
        options = masks(length, count)[kind] if min(length, count) > 2 else {"is_causal": kind == "causal"}
        options = options | {"enable_gqa": True}
        shapes = [(2, 3, length, 4), (2, groups, count, 4), (2, groups, count, 6), (2, 3, length, 6)]
        inputs, tangents = (
            [normal(*shape, seed=k + i).mT.contiguous().mT for i, shape in enumerate(shapes)] for k in (0, 10)
        )
        moving = [None if i in still else t for i, t in enumerate(tangents)]
        with sdpa_kernel(SDPBackend.MATH):
            want = in_forward_mode(partial(F.scaled_dot_product_attention, **options), inputs, moving, nullcontext())
        with monkeypatch.context() as patched:
            patched.delattr(blockwise_attention, "_attention_blocks")  # of the formulas
            got = in_forward_mode(partial(sdpa, **options), inputs, moving, nullcontext())
        for both, expected in zip(got, want, strict=True):
            for x, y in zip(both, expected, strict=True):
                if y is not None and y.isfinite().all():  # torch has none of a row that sees nothing
                    assert x is not None
                    assert float((x - y).norm() / y.norm().clamp(1e-3)) < 1e-13
                assert x is None or x.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_heads_of_keys_and_lower_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (normal(2, heads, 5, 8, seed=heads + i).to(dtype) for i, heads in enumerate((4, 2, 2)))
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    got = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    assert got.dtype == dtype
    assert float((got - want).norm() / want.norm()) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_torch_computes_the_rest() -> None:
    q, bias = normal(2, 3, 4, seed=0), normal(3, 3, seed=1)
    with sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(0)
        dropped = sdpa(q, q, q, dropout_p=0.5)
        torch.manual_seed(0)
        assert torch.equal(dropped, F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
        slopes = [
            torch.func.grad(lambda b, f=f: f(q, q, q, b).sin().sum())(bias)
            for f in (sdpa, F.scaled_dot_product_attention)
        ]
        assert slopes[0].norm() > 0
        assert torch.equal(*slopes)
        wrongs: list[dict[str, Any]] = [{"attn_mask": bias, "is_causal": True}, {"enable_gqa": 2}]
        for wrong in wrongs:
            errors = []
            for f in (sdpa, F.scaled_dot_product_attention):
                with pytest.raises((RuntimeError, TypeError)) as told:
                    f(q, q[:1, :2, :3], q, **wrong)
                errors.append(str(told.value))
            assert errors[0] == errors[1]
