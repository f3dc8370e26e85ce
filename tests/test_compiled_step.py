"""torch.compile around whatever is made of stages: one graph, and what it gives is what the same gives uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import World

D = torch.float64
STRATEGIES: dict[str, Callable[..., Any]] = {
    "full_shard": lambda: sf.full_shard("data"),
    "zero2": lambda: sf.zero2("data"),
    "hybrid_shard": lambda: sf.hybrid_shard("data", "replica"),
    "hybrid_replicas": lambda: sf.hybrid_shard("replica", "data"),
    "ddp": lambda: sf.ddp("data"),
}


def layer(g: torch.Generator) -> dict[str, Any]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=D) / 3

    return {"up": draw(4, 6), "both": (draw(6), draw(6, 4))}


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"] + p["both"][0]) @ p["both"][1]


def batch(k: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(10 * k + torch.distributed.get_rank()), dtype=D)


def rank_mesh() -> Any:
    return sf.make_mesh(replica=1, data=torch.distributed.get_world_size(), device="cpu")


def mapped(f: Any, mesh: Any) -> Any:
    return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)


class Program:
    """A model, and what may be compiled of its training; each `(compile) -> (params, state, x) -> results`."""

    def __init__(self, strategy: str, remat: Any = False, layers: int = 2) -> None:
        self.mesh = rank_mesh()
        self.params = sf.init_sharded({"blocks": [layer] * layers}, 0, self.mesh, STRATEGIES[strategy]())
        self.optimizer = sf.optim.adamw(1e-2, donate=False)
        self.state = self.optimizer.init(self.params)
        self.staged = sf.stage(block, remat=remat)

    def loss(self, params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = self.staged(p, x)
        return sf.psum(x.square().sum(), "data")

    def step(self, compiled: Any) -> Any:
        def step(params: Any, state: Any, x: Tensor) -> Any:
            value, grads = sf.value_and_grad(self.loss)(params, x)
            return value, grads, *self.optimizer.step(params, grads, state)

        return compiled(mapped(step, self.mesh))

    def value_and_grad(self, compiled: Any) -> Any:
        f = compiled(mapped(sf.value_and_grad(self.loss), self.mesh))
        return lambda params, state, x: f(params, x)

    def loss_alone(self, compiled: Any) -> Any:
        f = mapped(sf.value_and_grad(compiled(self.loss)), self.mesh)
        return lambda params, state, x: f(params, x)

    def forward(self, compiled: Any) -> Any:
        f = compiled(mapped(self.loss, self.mesh))
        return lambda params, state, x: torch.no_grad()(f)(params, x)

    def torch_func(self, compiled: Any) -> Any:
        f = compiled(mapped(lambda params, x: torch.func.grad(self.loss)(params, x), self.mesh))
        return lambda params, state, x: f(params, x)

    def backward(self, compiled: Any) -> Any:
        f = compiled(mapped(self.loss, self.mesh))

        def asked(params: Any, state: Any, x: Tensor) -> Any:
            moving = optree.tree_map(lambda p: p.detach().requires_grad_(), params)
            value = f(moving, x)
            value.backward()
            return value.detach(), optree.tree_map(lambda p: p.grad, moving)

        return asked


def apart(found: Any, wanted: Any) -> float:
    """The largest difference between the tensors of two trees of the same structure."""
    assert optree.tree_structure(found) == optree.tree_structure(wanted)
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True)
    return max((a - b).abs().max().item() if isinstance(a, Tensor) else abs(a - b) for a, b in pairs)


def compiled_beside_eager(kind: str, strategy: str, remat: Any, backend: str) -> tuple[float, list[int]]:
    """Over steps, each from what the last gave: how far results are apart, and how many graphs there are by then."""
    graphs = 0

    def counted(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    program = Program(strategy, remat)
    make = getattr(program, kind)
    eager, fast = make(lambda f: f), make(lambda f: torch.compile(f, backend=counted, fullgraph=True))
    states, off, counts = [(program.params, program.state)] * 2, 0.0, []
    for k, rows in enumerate((3, 3, 3, 5)):
        results = [f(*given, batch(k, rows)) for f, given in zip((eager, fast), states, strict=True)]
        off = max(off, apart(results[1], results[0]))
        counts.append(graphs)
        if kind == "step":
            states = [result[2:] for result in results]
        else:  # other parameters, in new tensors
            states = [(optree.tree_map(lambda p: p * 0.9, params), state) for params, state in states]
    return off, counts


CASES = [
    ("step", "full_shard", False, "aot_eager"),
    ("step", "hybrid_replicas", True, "eager"),
    ("value_and_grad", "zero2", True, "aot_eager"),
    ("value_and_grad", "hybrid_shard", False, "eager"),
    ("value_and_grad", "full_shard", False, "inductor"),
    ("loss_alone", "full_shard", False, "aot_eager"),
    ("forward", "full_shard", True, "aot_eager"),
    ("torch_func", "hybrid_replicas", False, "eager"),
    ("backward", "ddp", False, "aot_eager"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.world(2)
def test_what_is_compiled_gives_what_is_not(world: World, case: Any) -> None:
    for off, graphs in world.run(compiled_beside_eager, *case):
        assert off <= 1e-12
        # The number of the step, and then the number of rows, become dynamic once; otherwise a graph is kept.
        steps = case[0] == "step"
        assert graphs[:3] == [1, 1 + steps, 1 + steps], graphs
        assert graphs[3] <= 3, graphs
