"""torch.compile: inside a stage one graph for all layers, around shards an error that says what to do instead."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
import shardfn.interop as interop
import shardfn.optim as so
from shardfn.compat import modes
from shardfn.testing import World
from tests import models
from tests.models import distance
from tests.reference import worst
from tests.refusals import told
from tests.stages.setting import Setting, rows_of, staged


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"]) @ p["v"]


def weights() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 4, generator=g, dtype=torch.float64) for name in ("w", "v")}


def around() -> dict[str, str]:
    """What is said of each function of shards that torch.compile traces, whether it wants one graph or takes pieces."""
    mesh = sf.make_mesh(data=-1, device="cpu")
    cut = sf.full_shard("data")
    params, x = sf.shard({"blocks": [weights(), weights()]}, mesh, cut), torch.ones(3, 4, dtype=torch.float64)
    module = interop.functional(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double())
    optimizer = so.adamw(1e-2, donate=False)
    state, layer = optimizer.init(params), sf.stage(block)

    def loss(params: Any) -> Tensor:
        y = x
        for p in sf.layers(params["blocks"]):
            y = layer(p, y)
        return y.square().sum()

    def step(params: Any) -> Any:
        return optimizer.step(params, sf.grad(loss)(params), state)

    functions: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "a stage": (lambda params: layer(params["blocks"][0], x), params),
        "layers": (loss, params),
        "a gradient": (sf.value_and_grad(loss), params),
        "torch's gradient": (lambda params: torch.func.grad(loss)(params), params),
        "a product": (lambda params: torch.func.jvp(loss, (params,), (params,)), params),
        "a mapped step": (sf.shard_map(step, mesh=mesh, in_specs=..., out_specs=...), params),
        "micro-batches": (lambda params: sf.accumulate(lambda p, x: loss(p) * x, [(1.0,), (2.0,)])(params), params),
        "an optimizer": (lambda params: optimizer.step(params, params, state), params),
        "its state": (optimizer.init, params),
        "one that skips": (lambda params: so.skip_nonfinite(optimizer).init(params), params),
        "a norm": (so.global_norm, params),
        "a product of trees": (lambda params: so.vdot(params, params), params),
        "arithmetic": (lambda params: optree.tree_map(lambda x: x * 2, params), params),
        "whole parameters": (sf.unshard, params),
        "parameters for one": (lambda params: sf.unshard(params, ranks=[0]), params),
        "a stage that is skipped": (lambda params: sf.skip(layer, params["blocks"][0], x), params),
        "a module": (lambda values: module(values, x), module.shard(mesh, cut)),
    }
    found = {}
    for name, (f, given) in functions.items():
        for fullgraph in (True, False):
            torch._dynamo.reset()
            found[f"{name}, {fullgraph}"] = told(partial(torch.compile(f, backend="eager", fullgraph=fullgraph), given))
    return found


@pytest.mark.world(2)
def test_what_works_on_shards_says_what_compiles_it(world: World) -> None:
    for said in world.with_deadline(120).run(around):
        wrong = {k: text for k, text in said.items() if "cannot be traced by torch.compile" not in text}
        wrong |= {k: text for k, text in said.items() if not text.startswith("UserError")}
        assert not wrong, wrong


def test_an_optimizer_of_plain_tensors_says_so_too() -> None:
    optimizer = so.adamw(1e-2)
    params = weights()
    state = optimizer.init(params)
    with pytest.raises(Exception, match=r"cannot be traced by torch.compile"):
        torch.compile(lambda: optimizer.step(params, params, state), backend="eager")()


def test_a_stage_of_whole_parameters_is_its_function() -> None:
    layer, params, x = sf.stage(block, remat=True), weights(), torch.ones(3, 4, dtype=torch.float64)
    torch._dynamo.reset()
    fast = torch.compile(lambda p, x: layer(p, layer(p, x)), backend="aot_eager", fullgraph=True)
    assert distance(fast(params, x), block(params, block(params, x))) <= 1e-14


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_a_graph_have_memory_of_their_own(backend: str) -> None:
    torch._dynamo.reset()
    f = sf.value_and_grad(lambda p: (p["a"] + p["b"]).sum())
    _, grads = torch.compile(f, backend=backend, fullgraph=True)({"a": torch.ones(3), "b": torch.ones(3)})
    grads["a"][0] = 7
    assert grads["a"].tolist() == [7, 1, 1]
    assert grads["b"].tolist() == [1, 1, 1]


# --- inside a stage ---


def compiled(options: dict[str, Any]) -> Any:
    s = Setting(**options)
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    fast = staged(torch.compile(models.block, backend=counting, fullgraph=True), **options)

    def net(f: Any, ps: Any, rank: int) -> Tensor:
        x = rows_of(rank)
        for p in sf.layers(ps):
            x = f(p, x)
        return x.square().sum()

    want = torch.func.grad(models.everyone(lambda ps, k: net(models.block, ps, k), s.n))(s.plain["blocks"])
    x = [sf.grad(lambda ps: net(fast, ps, s.rank))(s.flat["blocks"]) for _ in range(3)]
    return worst(distance(sf.unshard(one), want) for one in x), len(graphs)


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"reshard": False}], ids=str)
@pytest.mark.world(2)
def test_a_compiled_block_is_compiled_once_for_all_layers(world: World, options: Any) -> None:
    for off, graphs in world.run(compiled, options):
        assert off < 1e-12
        # The first layer's input needs no gradient, the others' do; under no_grad it is a graph of its own.
        assert graphs <= 2 + bool(options.get("remat"))


def broken(x: torch.Tensor) -> torch.Tensor:
    with open(os.devnull, "w") as file:
        print("a break in the graph", file=file)
    return x.sin() + 1


def test_a_mode_that_watches_is_no_part_of_what_is_traced(recwarn: pytest.WarningsRecorder) -> None:
    class Seen(modes.Watching):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(broken, backend="eager")
    with Seen():
        assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin() + 1)
    assert not [str(told.message) for told in recwarn if "trace the builtin" in str(told.message)]
