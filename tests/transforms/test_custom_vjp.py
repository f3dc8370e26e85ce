"""A derivative written by hand means what its function meant where it was called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import parallel
from shardfn.testing import World

ROWS, WIDTH = 2, 4


def whole() -> Tensor:
    return torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def attention(x: Tensor) -> Tensor:
    q = x[None, None]
    return parallel.ring_attention(q, q, q, "x", mask=parallel.Mask(causal=False)).square().sum()


def norm(x: Tensor) -> Tensor:
    return parallel.rms_norm(x.flatten(), torch.ones_like(x.flatten()), "x").sin().sum()


def loss(x: Tensor) -> Tensor:
    targets = torch.arange(ROWS * 4) % WIDTH
    return parallel.cross_entropy(whole(), x.T.contiguous(), targets, "x").square().sum()


PLACES = ("outside of any scope", "in the scope of another mesh")


def elsewhere() -> dict[Any, float]:
    """Derivatives that are asked for somewhere else than where the function was called, and their second ones."""
    rank = torch.distributed.get_rank()
    mesh, other = sf.make_mesh(x=4, device="cpu"), sf.make_mesh(y=2, x=2, device="cpu")
    own, found = whole()[rank * ROWS :][:ROWS], {}

    def within(where: Any, f: Any) -> Any:
        return sf.shard_map(f, mesh=where, in_specs=(), out_specs=...)()

    for f in (attention, norm, loss):

        def derivatives(f: Any = f) -> list[Any]:
            g = sf.grad(f)
            return [g(own), sf.grad(lambda y: g(y).square().sum())(own)]  # called at once

        wanted = within(mesh, derivatives)
        for place in PLACES:
            x = own.clone().requires_grad_()
            value = within(mesh, lambda f=f, x=x: f(x))

            def asked(value: Tensor = value, x: Tensor = x) -> list[Tensor]:
                (first,) = torch.autograd.grad(value, x, create_graph=True)
                return [first, *torch.autograd.grad(first.square().sum(), x)]

            got = asked() if place == PLACES[0] else within(other, asked)
            for order, (a, b) in enumerate(zip(got, wanted, strict=True), 1):
                found[f.__name__, place, order] = ((a - b).abs().max() / b.abs().max()).item()
    return found


@pytest.mark.world(4)
def test_axis_names_mean_in_backward_what_they_meant_in_forward(world: World) -> None:
    for found in world.run(elsewhere):
        assert len(found) == 12
        assert not {cell: off for cell, off in found.items() if not off < 1e-12}
