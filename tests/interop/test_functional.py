"""Modules as functions of sharded parameters, against the unsharded module on the whole batch."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

import shardfn as sf
from shardfn import P
from shardfn.interop import Functional, functional
from shardfn.testing import World
from tests.interop import zoo
from tests.interop.modules import data_mesh, laid, off, product
from tests.models import DATA, STRATEGIES
from tests.reference import worst

Named = dict[str, Tensor]
NAMES = list(zoo.ZOO)


def rows(batch: zoo.Batch) -> zoo.Batch:
    """This rank's part of a batch."""
    return {k: x.chunk(dist.get_world_size())[dist.get_rank()] for k, x in batch.items()}


class Reference:
    """The module as it is, on the whole batch."""

    def __init__(self, name: str, **arguments: Any) -> None:
        self.case, self.module = zoo.ZOO[name], zoo.build(name, **arguments)
        self.batch = self.case.batch()
        self.whole = {k: p.detach().clone() for k, p in self.module.named_parameters()}

    def loss(self, p: Named) -> Tensor:
        out = functional_call(self.module, p, (), self.batch, tie_weights=True)
        total, count = self.case.loss(out, self.batch)
        return total / count

    def gradient(self) -> Named:
        return torch.func.grad(self.loss)(self.whole)

    def tangent(self) -> Named:
        draw = zoo.generator(5)
        return {k: torch.randn(p.shape, generator=draw, dtype=p.dtype) for k, p in self.whole.items()}

    def hvp(self) -> Named:
        return product(torch.func.grad(self.loss), self.whole, self.tangent(), self.case.forward_mode)

    def samples(self) -> Named:
        def one(p: Named, row: zoo.Batch) -> Tensor:
            row = {k: x[None] for k, x in row.items()}
            return self.case.loss(functional_call(self.module, p, (), row, tie_weights=True), row)[0]

        return torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(self.whole, self.batch)


def loss_of(name: str, model: Functional) -> Any:
    """Of this rank's rows, averaged over the whole batch."""
    case = zoo.ZOO[name]

    def loss(params: Any, batch: zoo.Batch) -> Tensor:
        total, count = case.loss(model(params, **batch), batch)
        return sf.psum(total, DATA) / sf.psum(count, DATA)

    return loss


def made(name: str, strategy: str, n: int, **options: Any) -> tuple[Functional, Any, Any]:
    model = functional(zoo.build(name), **{"min_stage_params": 512, **zoo.ZOO[name].options, **options})
    mesh = data_mesh(n)
    return model, sf.shard(model.tree, mesh, STRATEGIES[strategy], frozen=model.frozen), mesh


def first_derivatives(name: str, strategy: str, options: dict[str, Any]) -> list[float]:
    n = dist.get_world_size()
    reference = Reference(name)
    want = reference.gradient()
    model, params, mesh = made(name, strategy, n, **options)
    step = sf.shard_map(
        sf.value_and_grad(loss_of(name, model)), mesh=mesh, in_specs=(..., P(DATA)), out_specs=(P(), ...)
    )
    found = []
    for _ in range(2):  # the second knows the order of the stages
        value, grads = step(params, rows(reference.batch))
        got = model.state_dict(grads)
        found += [abs(float(value - reference.loss(reference.whole))), off({k: got[k] for k in want}, want)]
    return found


@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.world(2, "processes")
def test_gradients_are_those_of_the_module(world: World, name: str, options: dict[str, Any]) -> None:
    for found in world.run(first_derivatives, name, "full_shard", options):
        assert worst(found) < 1e-12


@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if one != "full_shard"])
@pytest.mark.parametrize("name", ["llama_tied", "t5", "bert", "joint"])
@pytest.mark.world(4, "processes")
def test_gradients_are_the_same_under_every_strategy(world: World, name: str, strategy: str) -> None:
    for found in world.run(first_derivatives, name, strategy, {}):
        assert worst(found) < 1e-12


def second_derivatives(name: str, strategy: str) -> float:
    n = dist.get_world_size()
    reference = Reference(name)
    want = reference.hvp()
    model, params, mesh = made(name, strategy, n)
    tangent = sf.shard(laid(model, reference.tangent()), mesh, STRATEGIES[strategy], frozen=model.frozen)
    loss = loss_of(name, model)

    def hvp(p: Any, t: Any, batch: zoo.Batch) -> Any:
        return product(lambda p: sf.grad(loss)(p, batch), p, t, zoo.ZOO[name].forward_mode)

    run = sf.shard_map(hvp, mesh=mesh, in_specs=(..., ..., P(DATA)), out_specs=...)
    got = model.state_dict(run(params, tangent, rows(reference.batch)))
    return off({k: got[k] for k in want}, want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.world(2, "processes")
def test_hessian_vector_products(world: World, name: str) -> None:
    assert worst(world.run(second_derivatives, name, "full_shard")) < 1e-12


def of_each_sample(name: str) -> list[float]:
    n, rank = dist.get_world_size(), dist.get_rank()
    reference = Reference(name)
    want = reference.samples()
    model, params, mesh = made(name, "full_shard", n)
    case = zoo.ZOO[name]

    def one(p: Any, row: zoo.Batch) -> Tensor:
        row = {k: x[None] for k, x in row.items()}
        return case.loss(model(p, **row), row)[0]

    per = sf.shard_map(
        torch.func.vmap(sf.grad(one), in_dims=(None, 0)), mesh=mesh, in_specs=(..., P(DATA)), out_specs=...
    )
    grads = per(params, rows(reference.batch))
    found = []
    for i in range(zoo.ROWS // n):  # the i-th rows of all ranks together
        got = model.state_dict(optree.tree_map(lambda x, i=i: x[i], grads))
        together = {k: torch.stack([w.chunk(n)[r][i] for r in range(n)]).sum(0) for k, w in want.items()}
        found.append(off({k: got[k] for k in want}, together))
    assert rank >= 0
    return found


@pytest.mark.parametrize("name", [name for name, case in zoo.ZOO.items() if case.samples])
@pytest.mark.world(2, "processes")
def test_gradients_of_each_sample(world: World, name: str) -> None:
    for found in world.run(of_each_sample, name):
        assert worst(found) < 1e-12
