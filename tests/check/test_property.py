"""What the checker calls the same on all ranks along an axis is so, whatever program made it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.check.varying import varying
from shardfn.compat import functorch
from shardfn.mesh.scope import scope
from shardfn.mesh.spec import Leaf
from shardfn.testing import world
from shardfn.transforms.checking import CheckedCall

AXES = ("a", "b")
SPECS = (P(), P("a"), P("b"), P(("a", "b")))
LENGTH = 60
Op = Callable[..., Tensor]


class Program:
    """A random program: the same steps on every rank, on a growing list of 4 x 4 values."""

    def __init__(self, seed: int, closed: Tensor, here: dict[str, int]) -> None:
        self.draw, self.closed, self.here, self.seed = random.Random(seed), closed, here, seed

    def run(self, values: list[Tensor]) -> list[Tensor]:
        for _ in range(LENGTH):
            step = self.draw.choice(self.STEPS)
            values.append(step(self, values).reshape(4, 4))
        return values

    def one(self, values: list[Tensor]) -> Tensor:
        return self.draw.choice(values)

    def axes(self) -> Any:
        return self.draw.choice(["a", "b", ("a", "b")])

    def pointwise(self, values: list[Tensor]) -> Tensor:
        op: Op = self.draw.choice([torch.sin, torch.tanh, torch.neg, torch.abs])
        return op(self.one(values))

    def both(self, values: list[Tensor]) -> Tensor:
        x, y = self.one(values), self.one(values)
        op: Any = self.draw.choice([torch.add, torch.mul, torch.maximum, torch.matmul])
        found: Tensor = op(x, y).clamp(-3, 3)
        return found

    def chosen(self, values: list[Tensor]) -> Tensor:
        return torch.where(self.one(values) > 0, self.one(values), self.one(values))

    def joined(self, values: list[Tensor]) -> Tensor:
        return torch.cat([self.one(values)[:2], self.one(values)[2:]])

    def made(self, values: list[Tensor]) -> Tensor:
        return torch.full((4, 4), self.draw.random()) + torch.zeros_like(self.one(values))

    def of_rank(self, values: list[Tensor]) -> Tensor:
        name = self.draw.choice(AXES)
        index = sf.axis_index(name)
        kind = self.draw.randrange(4)
        if kind == 0:
            return self.one(values) * (index + 1)
        if kind == 1:
            return torch.full((4, 4), float(index))
        if kind == 2:
            return self.one(values)[index].expand(4, 4)
        return torch.tensor([float(index)] * 16)

    def branch(self, values: list[Tensor]) -> Tensor:
        x, name = self.one(values), self.draw.choice(AXES)
        return x * 2 if sf.axis_index(name) == 0 else x + 1

    def outside(self, values: list[Tensor]) -> Tensor:
        return self.closed * 1

    def from_numbers(self, values: list[Tensor]) -> Tensor:
        return torch.tensor(self.one(values).tolist())

    def drawn(self, values: list[Tensor]) -> Tensor:
        which: Any = self.draw.choice([(), ("a",), ("b",), (("a", "b"),)])
        return torch.rand(4, 4, generator=sf.fold_in(self.seed, self.draw.randrange(99), *which))

    def in_place(self, values: list[Tensor]) -> Tensor:
        x = self.one(values).clone()
        view = x[: self.draw.randrange(1, 4)]
        if self.draw.random() < 0.5:
            view.add_(self.one(values)[: len(view)])
        else:
            view.copy_(self.one(values)[: len(view)])
        return x

    def buffer(self, values: list[Tensor]) -> Tensor:
        x = torch.empty(4, 4)
        x[:2] = self.one(values)[:2]
        x[2:] = self.one(values)[2:]
        return x

    def fused(self, values: list[Tensor]) -> Tensor:
        xs = [self.one(values).clone() for _ in range(3)]
        torch._foreach_add_(xs, [self.one(values) for _ in range(3)])
        return self.draw.choice(xs).clamp(-3, 3)

    def gradient(self, values: list[Tensor]) -> Tensor:
        x, y, axes = self.one(values), self.one(values), self.axes()
        inner: Op = self.draw.choice([lambda t: t, lambda t: sf.pvary(t, axes), lambda t: sf.psum(t, axes)])

        def loss(t: Tensor) -> Tensor:
            return (inner(t) * y).sin().sum()

        by: Any = self.draw.choice([sf.grad, torch.func.grad, _by_backward])
        found: Tensor = by(loss)(x)
        return found

    def tangent(self, values: list[Tensor]) -> Tensor:
        axes, y = self.axes(), self.one(values)
        made: Any = torch.func.vjp(lambda t: sf.psum(t * y, axes), self.one(values))[1]
        found: Tensor = made(self.one(values))[0].clamp(-3, 3)
        return found

    def mapped(self, values: list[Tensor]) -> Tensor:
        axes = self.axes()
        return torch.func.vmap(lambda row: sf.psum(row, axes) / 4)(self.one(values))

    def collective(self, values: list[Tensor]) -> Tensor:
        x, axes = self.one(values), self.axes()
        size = sf.axis_size(axes)
        match self.draw.randrange(8):
            case 0:
                return sf.psum(x, axes) / size
            case 1:
                return sf.pmax(x.detach(), axes)
            case 2:
                return sf.pvary(x, axes)
            case 3:
                return sf.all_gather(x, axes)[:4]
            case 4:
                return sf.all_gather(x, axes, to="invariant")[-4:]
            case 5:
                return sf.reduce_scatter(torch.cat([x] * size), axes) / size
            case 6:
                return sf.ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)])
            case _:
                return sf.collectives.local_slice(torch.cat([x] * size), axes)

    STEPS = (pointwise, both, both, both, chosen, joined, made, of_rank, branch, outside, from_numbers, drawn, in_place,
             buffer, fused, gradient, tangent, mapped, collective, collective, collective, collective)  # fmt: skip


def _by_backward(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        f(leaf).backward()
        assert leaf.grad is not None
        return leaf.grad

    return gradient


def judged(seeds: list[int]) -> list[Any]:
    """For each program and value: what the checker says of it, and the value."""
    torch.set_default_dtype(torch.float64)
    mesh = sf.make_mesh(a=2, b=2)
    found = []
    for seed in seeds:
        here = {name: mesh.get_local_rank(name) for name in AXES}
        inputs, pieces = [], []
        for k, spec in enumerate(SPECS):
            parts = [here[name] for name in spec.axes]
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1000 * seed + 10 * k + sum(
                part << i for i, part in enumerate(parts)
            )))  # fmt: skip
            inputs.append(Leaf(f"x{k}", x, spec))
            pieces.append(x)
        closed = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed + here["a"] * (seed % 2)))
        checked = CheckedCall(judged, mesh, False)
        with scope(mesh), checked.recorder:
            checked.record_arguments(inputs, pieces)
            values = Program(seed, closed, here).run(list(pieces))
            nodes = [checked.recorder.values.node_of(functorch.unwrapped(x)) for x in values]
            compared = checked.compared([])
        trace = checked.recorder.trace
        types = varying(trace, compared.nodes)
        found.append([(trace.names(types.along[node]), x) for node, x in zip(nodes, values, strict=True)])
    return found


@pytest.mark.parametrize("first", range(0, 40, 4))
def test_what_is_called_the_same_is_the_same(first: int) -> None:
    ranks = world(4, "threads").run(judged, list(range(first, first + 4)))
    same = 0
    for program in range(4):
        for k in range(len(ranks[0][program])):
            for axis, pairs in (("a", [(0, 2), (1, 3)]), ("b", [(0, 1), (2, 3)])):
                if any(axis in ranks[r][program][k][0] for r in range(4)):
                    continue
                same += 1
                for one, other in pairs:
                    x, y = ranks[one][program][k][1], ranks[other][program][k][1]
                    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert same > 40  # the checker does not just call everything varying
