"""torch.compile around whatever is made of stages: one graph, and what it gives is what the same gives uncompiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.compat import modes
from shardfn.testing import World
from tests import models
from tests.models import distance
from tests.reference import worst
from tests.stages.setting import Setting, rows_of, staged

D = torch.float64
STRATEGIES: dict[str, Callable[..., Any]] = {
    "full_shard": lambda: sf.full_shard("data"),
    "shard_grad_op": lambda: sf.shard_grad_op("data"),
    "hybrid_shard": lambda: sf.hybrid_shard(shard="data", replica="replica"),
    "hybrid_replicas": lambda: sf.hybrid_shard(shard="replica", replica="data"),
    "ddp": lambda: sf.ddp("data"),
    "zero1": lambda: sf.zero1("data"),
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

    def unmapped(self, compiled: Any) -> Any:
        """Outside of any mesh's scope: the shards say which mesh is meant."""

        def loss(params: Any, x: Tensor) -> Tensor:
            for p in params["blocks"]:
                x = self.staged(p, x)
            return x.square().sum()

        f = compiled(lambda params, x: sf.value_and_grad(loss)(params, x))
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
    for k, rows in enumerate((3, 3, 3) if kind == "step" else (3, 3, 3, 5)):
        x = batch(k, rows)
        if backend == "inductor":  # which takes long: no graph for three rows before that for any number
            torch._dynamo.mark_dynamic(x, 0)
        results = [f(*given, x) for f, given in zip((eager, fast), states, strict=True)]
        off = max(off, distance(results[1], results[0]))
        counts.append(graphs)
        if kind == "step":
            states = [result[2:] for result in results]
        else:  # other parameters, in new tensors
            states = [(optree.tree_map(lambda p: p * 0.9, params), state) for params, state in states]
    return off, counts


CASES = [
    ("step", "full_shard", False, "aot_eager"),
    ("step", "hybrid_replicas", True, "eager"),
    ("value_and_grad", "shard_grad_op", True, "aot_eager"),
    ("value_and_grad", "hybrid_shard", False, "eager"),
    ("value_and_grad", "full_shard", False, "inductor"),
    ("unmapped", "zero1", False, "eager"),
    ("unmapped", "hybrid_shard", False, "eager"),
    ("loss_alone", "full_shard", False, "aot_eager"),
    ("forward", "full_shard", True, "aot_eager"),
    ("torch_func", "hybrid_replicas", False, "eager"),
    ("backward", "ddp", False, "aot_eager"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.world(2)
def test_what_is_compiled_gives_what_is_not(world: World, case: Any) -> None:
    # Where nothing was compiled before, inductor's own headers are, which takes a minute on a busy machine.
    for off, graphs in world.within(180).run(compiled_beside_eager, *case):
        assert off <= 1e-12
        # The number of the step, and then the number of rows, become dynamic once; otherwise a graph is kept.
        steps = case[0] == "step"
        assert graphs[:3] == [1, 1 + steps, 1 + steps]
        assert graphs[-1] <= 3


def only_matrices(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


PURE: dict[str, Callable[[], sf.optim.Optimizer]] = {
    "clipped": lambda: so.chain(so.clip_by_global_norm(0.1, donate=False), so.adam(1e-2, donate=False)),
    "clamped": lambda: so.chain(so.clip_by_value(0.01, donate=False), so.sgd(1e-2, momentum=0.9, donate=False)),
    "scheduled": lambda: so.lion(so.warmup_cosine(1e-2, warmup=2, steps=5), donate=False),
    "masked": lambda: so.masked(so.muon(1e-2, donate=False), only_matrices, so.adamw(1e-2, donate=False)),
    "adafactor": lambda: so.adafactor(1e-2, donate=False),
    "with a master copy": lambda: so.master(so.adamw(1e-2, donate=False), donate=False),
    "every other step": lambda: so.multi_steps(so.adamw(1e-2, donate=False), 2),
    "8 bits": lambda: so.adamw8bit(1e-2, donate=False),
}


def optimizer_in_graph(name: str, strategy: str) -> tuple[float, float]:
    """How far parameters are apart, of which some are in float32, and how far they moved."""
    program, optimizer = Program(strategy), PURE[name]()

    def step(params: Any, state: Any, x: Tensor) -> Any:
        return optimizer.step(params, sf.grad(program.loss)(params, x), state)

    torch._dynamo.reset()
    eager = mapped(step, program.mesh)
    fast = torch.compile(eager, backend="aot_eager", fullgraph=True)
    mine = theirs = program.params, optimizer.init(program.params)
    for k in range(3):
        mine, theirs = fast(*mine, batch(k)), eager(*theirs, batch(k))
    return distance(mine, theirs), distance(mine[0], program.params)


@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "hybrid_replicas"])
@pytest.mark.parametrize("name", PURE)
@pytest.mark.world(2)
def test_an_optimizer_is_part_of_the_graph(world: World, name: str, strategy: str) -> None:
    for off, moved in world.within(180).run(optimizer_in_graph, name, strategy):
        assert off <= (1e-6 if name == "with a master copy" else 1e-12)
        assert moved > 1e-4


def refusals() -> list[str]:
    """What is said where a graph cannot hold it, asked for one graph and not."""
    program, other = Program("full_shard"), sf.make_mesh(rows=1, data=torch.distributed.get_world_size(), device="cpu")
    donating = sf.optim.adamw(1e-2)

    def broken(params: Any, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return program.loss(params, x)

    whole = sf.shard_map(program.loss, mesh=program.mesh, in_specs=..., out_specs=..., inputs="global")
    told = []
    donated = [so.adafactor(1e-2), so.master(so.adamw(1e-2, donate=False)), so.chain(so.clip_by_value(1.0), donating)]
    skipping = so.skip_nonfinite(so.adamw(1e-2, donate=False))
    steps = [
        mapped(lambda params, x, o=o: o.step(params, params, o.init(params)), program.mesh)
        for o in (donating, *donated, skipping)
    ]
    for f in (whole, *steps, mapped(program.loss, other), mapped(broken, program.mesh)):
        for fullgraph in (True, False):
            torch._dynamo.reset()
            try:
                torch.compile(f, backend="eager", fullgraph=fullgraph)(program.params, batch(0))
                told.append("nothing")
            except torch._dynamo.exc.InternalTorchDynamoError as error:
                told.append(f"internal error: {error}")
            except Exception as error:
                told.append(str(error))
    return told


@pytest.mark.world(2)
def test_what_a_graph_cannot_hold_is_refused(world: World) -> None:
    wanted = [
        "compile what is inside",
        *["pass donate=False"] * 4,
        "the host decides",
        "is placed on a mesh",
        "graph_break",
    ]
    for told in world.run(refusals):
        for text, part in zip(told, [one for one in wanted for _ in range(2)], strict=True):
            assert part in text
            assert "internal error" not in text


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_a_graph_have_memory_of_their_own(backend: str) -> None:
    torch._dynamo.reset()
    f = sf.value_and_grad(lambda p: (p["a"] + p["b"]).sum())
    _, grads = torch.compile(f, backend=backend, fullgraph=True)({"a": torch.ones(3), "b": torch.ones(3)})
    grads["a"][0] = 7
    assert grads["a"].tolist() == [7, 1, 1]
    assert grads["b"].tolist() == [1, 1, 1]


def closures() -> float:
    """What functions close over is no constant of the graph: it may be replaced, or overwritten."""

    class Box:
        scale, power = torch.tensor(2.0, dtype=D), 1.0

    torch._dynamo.reset()
    program, box = Program("full_shard"), Box()
    scaled = sf.stage(lambda p, x: block(p, x) * box.scale**box.power)
    f = mapped(sf.value_and_grad(lambda params, x: scaled(params["blocks"][0], x).sum()), program.mesh)
    fast, off = torch.compile(f, backend="aot_eager", fullgraph=True), []
    for k in range(4):
        if k == 1:
            box.scale = torch.tensor(3.0, dtype=D)
        if k == 2:
            box.power = 2.0
        if k == 3:
            box.scale.mul_(2)
        off.append(distance(fast(program.params, batch(0)), f(program.params, batch(0))))
    return max(off)


@pytest.mark.world(2)
def test_a_graph_keeps_nothing_of_what_is_closed_over(world: World) -> None:
    assert max(world.run(closures)) <= 1e-12


def around() -> dict[str, float]:
    """Transforms inside of a graph, several micro-batches, and a stage outside of any scope."""
    program = Program("hybrid_replicas", layers=1)
    direction = optree.tree_map(torch.ones_like, program.params)

    def product(params: Any, x: Tensor) -> Any:
        return torch.func.jvp(lambda p: sf.grad(program.loss)(p, x), (params,), (direction,))[1]

    def summed(params: Any, x: Tensor) -> Any:
        return sf.accumulate(program.loss, [(x,), (2 * x,)])(params)

    def alone(params: Any, x: Tensor) -> Tensor:
        return program.staged(params["blocks"][0], x)

    def counted(params: Any, x: Tensor) -> Any:
        rows, norm = sf.psum((len(x), 1.5), "data"), so.global_norm(params)
        return program.loss(params, x) / rows[0] + rows[1] * norm, so.vdot(params, params)

    found = {}
    for f in (*(mapped(f, program.mesh) for f in (product, summed, counted)), alone):
        torch._dynamo.reset()
        fast = torch.compile(f, backend="eager", fullgraph=True)
        found[f.__name__] = distance(fast(program.params, batch(0)), f(program.params, batch(0)))
    return found


@pytest.mark.world(2)
def test_what_goes_around_and_inside(world: World) -> None:
    for found in world.run(around):
        assert max(found.values()) <= 1e-12, found


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
