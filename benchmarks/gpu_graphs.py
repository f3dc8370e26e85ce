"""Steps of a small model as graphs, beside the same steps as they are: the host's time, the step's time, the numbers.

The model has many thin layers, so that launching its operations takes longer than running them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor

import shardfn as sf
from benchmarks.gpu_setting import Answer, Where, pretended
from benchmarks.model import perceptron
from shardfn.testing import Device, simulated

LAYERS, WIDTH, ROWS, STEPS = 48, 256, 64, 40
TINY = 4, 8, 4, 8
WARM_UP = 6  # steps; the graph is captured among them

Step = Callable[[Any, Any, Tensor], tuple[Any, Any, Tensor]]


@contextmanager
def one_rank(where: Where) -> Iterator[tuple[str, Device | None]]:
    if where.cuda:
        with pretended(1, "cuda"):
            yield "cuda", None
    else:
        with simulated(values=True) as device:
            yield device.name, device


def problem(where: Where, device: str) -> tuple[Step, Any, Any, list[Tensor]]:
    """A step, its parameters and state, and batches."""
    layers, width, rows, steps = TINY if where.tiny else (LAYERS, WIDTH, ROWS, STEPS)
    mesh, draw = sf.make_mesh(data=1, device=device), torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) / width**0.5

    whole = [{"up": made(width, width), "down": made(width, width)} for _ in range(layers)]
    params, optimizer = sf.shard(whole, mesh, sf.full_shard("data")), sf.optim.adamw(1e-3)
    staged = sf.stage(perceptron)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params):
            x = staged(p, x)
        return sf.pmean(x.square().mean(), "data")

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(params: Any, state: Any, x: Tensor) -> tuple[Any, Any, Tensor]:
        value, grads = sf.value_and_grad(loss)(params, x)
        params, state = optimizer.step(params, grads, state)
        return params, state, value

    return step, params, optimizer.init(params), [made(rows, width).to(device) for _ in range(WARM_UP + steps)]


def measured(where: Where, device: str, simulation: Device | None, graph: bool) -> tuple[dict[str, Any], list[float]]:
    """A row of the table, and the losses."""
    step, params, state, batches = problem(where, device)
    run = sf.cuda_graph(step) if graph else step
    synchronize = torch.get_device_module(device).synchronize
    host, losses = [], []
    for i, x in enumerate(batches):
        if i == WARM_UP:
            synchronize()
            begin = time.perf_counter()
        if simulation is not None:
            simulation.reset_counts()
        start = time.perf_counter()
        params, state, value = run(params, state, x)
        if i >= WARM_UP:
            host.append(time.perf_counter() - start)
        losses.append(value)
    launched = "" if simulation is None else simulation.operations.total()
    synchronize()
    whole = (time.perf_counter() - begin) / len(host)
    row = {
        "step": "graphed" if graph else "as it is",
        "host, ms": 1e3 * statistics.median(host),
        "step, ms": 1e3 * whole,
    }
    del params, state, run
    return row | {"launched by the host": launched}, [x.item() for x in optree.tree_leaves(losses)]


@sf.debug(memory=False, collectives=False, nan=False)  # in which steps do more, and graphs are refused
def graphs(where: Where) -> Answer:
    """Graphed steps beside the same steps as they are."""
    answer, found = Answer(), []
    with one_rank(where) as (device, simulation):
        for graph in (False, True):
            row, losses = measured(where, device, simulation, graph)
            answer.rows.append(row)
            found.append(losses)
    apart = max(abs(a - b) / abs(b) for a, b in zip(found[1], found[0], strict=True))
    answer.goal("cuda_graph: losses, relative difference", apart, 1e-5)
    eager, graphed = answer.rows
    if where.cuda:
        answer.goal("cuda_graph: the host's time of a step / as it is", graphed["host, ms"] / eager["host, ms"], 0.2)
        answer.goal("cuda_graph: a step's time / as it is", graphed["step, ms"] / eager["step, ms"], 0.7)
    else:
        answer.unanswered(
            "cuda_graph: the host's time of a step / as it is", "the host runs the operations itself", 0.2
        )
        answer.unanswered("cuda_graph: a step's time / as it is", "the host runs the operations itself", 0.7)
        answer.goal("cuda_graph: launched by the host in a step", graphed["launched by the host"], 4)
    return answer
