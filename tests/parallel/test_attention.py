"""Attention over a cut sequence is attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import compat, parallel
from shardfn.testing import World

HEADS, LENGTH, WIDTH = 8, 16, 6


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def along(gs: Any, ts: Any) -> Any:
    return sum((g * t).sum() for g, t in zip(gs, ts, strict=True))


def drawn(groups: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, HEADS, LENGTH, WIDTH), (2, groups, LENGTH, WIDTH), (2, groups, LENGTH, WIDTH)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


WAYS: dict[str, Any] = {
    "ring, balanced": (parallel.ring_attention, {"balanced": True}),
    "ring, in order": (parallel.ring_attention, {"balanced": False}),
    "ulysses": (parallel.ulysses_attention, {"balanced": False}),
}


def cells(size: int) -> list[tuple[str, bool, int]]:
    return [(way, causal, groups) for way in WAYS for causal in (True, False) for groups in (HEADS, size)]


def called(way: str, causal: bool, axis: Any) -> Any:
    function, options = WAYS[way]
    more = options if function is parallel.ring_attention else {}
    return lambda q, k, v: function(q, k, v, axis, causal=causal, **more)


def differences() -> dict[Any, float]:
    size = torch.distributed.get_world_size()
    mesh = sf.make_mesh(context=size, device="cpu")
    found: dict[Any, float] = {}
    for way, causal, groups in cells(size):
        whole, tangent = drawn(groups), drawn(groups, 1)
        f = called(way, causal, "context")

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
        def run(
            whole: Any, tangent: Any, f: Any = f, way: str = way, causal: bool = causal
        ) -> dict[str, tuple[Any, Any]]:
            own = parallel.positions(LENGTH, "context", balanced=WAYS[way][1]["balanced"] and causal)
            local, moves = (tuple(x[:, :, own] for x in xs) for xs in (whole, tangent))

            def loss(*args: Tensor) -> Tensor:
                return sf.psum(f(*args).square().sum(), "context")

            def reference(*args: Tensor) -> Tensor:
                return plain(*args, causal=causal).square().sum()

            every = (0, 1, 2)
            grads = torch.func.grad(reference, every)(*whole)
            return {
                "value": (f(*local), plain(*whole, causal=causal)),
                "grad": (sf.grad(loss, every)(*local), grads),
                "func.grad": (torch.func.grad(loss, every)(*local), grads),
                "hvp": (
                    torch.func.jvp(sf.grad(loss, every), local, moves)[1],
                    torch.func.jvp(torch.func.grad(reference, every), whole, tangent)[1],
                ),
                "reverse over reverse": (
                    sf.grad(lambda *xs: along(sf.grad(loss, every)(*xs), moves), every)(*local),
                    torch.func.grad(lambda *xs: along(torch.func.grad(reference, every)(*xs), tangent), every)(*whole),
                ),
                "vmap of grad": (
                    torch.func.vmap(lambda *xs: sf.grad(loss, every)(*(x[None] for x in xs)))(*local),
                    tuple(g[:, None] for g in grads),
                ),
            }

        with torch.no_grad():
            own = sf.shard_map(
                lambda way=way, causal=causal: parallel.positions(
                    LENGTH, "context", balanced=WAYS[way][1]["balanced"] and causal
                ),
                mesh=mesh,
                in_specs=(),
                out_specs=...,
            )()
            for name, (got, wanted) in run(whole, tangent).items():
                pairs = [(got, wanted)] if isinstance(got, Tensor) else list(zip(got, wanted, strict=True))
                worst = max(((a - b[..., own, :]).abs().max() / b.abs().max()).item() for a, b in pairs)
                found[way, causal, groups, name] = worst
    return found


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])
def test_every_derivative_is_that_of_one_process(world: World) -> None:
    for found in world.within(100).run(differences):
        assert len(found) == 6 * 12
        wrong = {cell: worst for cell, worst in found.items() if not worst < 1e-12}
        assert not wrong


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_and_what_stands_in_for_them_are_attention(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    q, k, v = drawn(HEADS)
    wanted = torch.func.vjp(lambda *xs: plain(*xs, causal=causal), q, k, v)
    ct = torch.cos(q)
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(compat, "_fits_cpu", lambda q, k: False)
        out, lse = compat.attention(q, k, v, causal, WIDTH**-0.5)
        found = (out, *compat.attention_backward(ct, q, out, lse, k, v, causal, WIDTH**-0.5))
        for a, b in zip(found, (wanted[0], *wanted[1](ct)), strict=True):
            assert (a - b).abs().max() < 1e-13, f"fused: {fused}"


def refusals() -> list[str]:
    mesh, found = sf.make_mesh(context=2, device="cpu"), []
    q, k, v = (x[:, :, :7] for x in drawn(HEADS))
    for call in (
        lambda: parallel.ring_attention(q, k, v, "context"),
        lambda: parallel.ring_attention(q, k[:, :3], v[:, :3], "context"),
        lambda: parallel.ring_attention(q, k[:, :, :5], v[:, :, :5], "context"),
        lambda: parallel.ulysses_attention(q, k[:, :1], v[:, :1], "context"),
        lambda: parallel.positions(6, "context"),
    ):
        with pytest.raises(ValueError, match=r"attention|positions") as caught:
            sf.shard_map(call, mesh=mesh, in_specs=(), out_specs=...)()
        found.append(str(caught.value))
    return found


@pytest.mark.world(2)
def test_what_does_not_fit_is_refused_on_every_rank(world: World) -> None:
    for odd, heads, lengths, shared, positions in world.run(refusals):
        assert "7 places" in odd
        assert "multiple of 4" in odd
        assert "8 heads of queries are no multiple of 3" in heads
        assert "7 queries and 5 keys" in lengths
        assert "1 heads" in shared
        assert "use ring_attention" in shared
        assert "pad it to 8" in positions
