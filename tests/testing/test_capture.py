"""Graphs of a simulated device: recorded once and run again, with what the host computed left as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn.optim as so
from shardfn.testing import simulated, world


def module() -> Any:
    return torch.get_device_module("sim")


def captured(work: Callable[[], Any], stream: Any = None) -> tuple[Any, Any]:
    graph = module().CUDAGraph()
    with module().graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = work()
    return graph, result


def run_again() -> Any:
    """Values before and after each of three runs, random numbers, and races."""
    with simulated(values=True) as device:
        x, w = torch.ones(3, device="sim"), torch.full((3,), 2.0, device="sim")
        graph, (y, _, r) = captured(lambda: (x * w + 1, w.mul_(2), torch.rand(4, device="sim")))
        rows = [y.cpu().tolist()]
        draws = []
        for _ in range(3):
            graph.replay()
            rows.append(y.cpu().tolist())
            draws.append(tuple(r.cpu().tolist()))
        return rows, draws, w.cpu().tolist(), device.races, device.operations["replay"]


def test_a_graph_runs_on_the_memory_that_it_was_captured_with() -> None:
    rows, draws, w, races, replays = world(1, "alone").with_deadline(60).run(run_again)[0]
    assert all(x != x for x in rows[0])  # nothing has run yet
    assert rows[1:] == [[3.0] * 3, [5.0] * 3, [9.0] * 3]
    assert (len(set(draws)), w, races, replays) == (3, [16.0] * 3, [], 3)


FORBIDDEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "item": (lambda x: x.sum().item(), "item at"),
    "copy to the host": (lambda x: x.cpu(), "copy sim->cpu at"),
    "copy from the host": (lambda x: torch.ones(2).to("sim"), "copy cpu->sim at"),
    "mask": (lambda x: x[x > 0], "mask as index at"),
    "synchronize": (lambda x: module().synchronize(), "synchronize at"),
    "query": (lambda x: module().Event().query(), "query at"),
    "pinned memory": (lambda x: torch.empty(3, pin_memory=True), "pinning memory at"),
    "random state": (lambda x: module().get_rng_state(), "get_rng_state at"),
    "another stream": (lambda x: on_another(x, module().Stream()), "but not on this stream"),
    "the default stream": (lambda x: on_another(x, module().default_stream()), "but not on this stream"),
    "an event from before": (lambda x: module().current_stream().wait_event(BEFORE[0]), "leads into a capture"),
    "a second capture": (lambda x: captured(lambda: x + 1), "a second capture at"),
}
BEFORE: list[Any] = []


def on_another(x: Any, stream: Any) -> None:
    with module().stream(stream):
        x + 1


def forbidden() -> dict[str, str]:
    found = {}
    with simulated(values=True):
        x = torch.ones(3, device="sim")
        BEFORE.append(module().current_stream().record_event())
        for name, (do, _) in FORBIDDEN.items():
            try:
                captured(functools.partial(do, x))
                found[name] = "no error"
            except RuntimeError as error:
                found[name] = str(error)
        x.cpu()  # no capture is left open
    return found


def test_what_needs_the_host_or_leaves_the_capture_is_an_error() -> None:
    found = world(1, "alone").with_deadline(60).run(forbidden)[0]
    for name, (_, message) in FORBIDDEN.items():
        assert message in found[name], name


def forked(joins: bool) -> Any:
    with simulated(values=True):
        x, main, side = torch.ones(3, device="sim"), module().Stream(), module().Stream()

        def work() -> Any:
            side.wait_stream(main)
            with module().stream(side):
                y = x + 1
            if joins:
                main.wait_stream(side)
            return y

        try:
            graph, y = captured(work, main)
        except RuntimeError as error:
            return str(error)
        graph.replay()
        return y.cpu().tolist()


def test_a_stream_that_joins_must_be_waited_for() -> None:
    assert world(1, "alone").with_deadline(60).run(forked, True)[0] == [2.0] * 3
    assert "ends while work is on 1 streams" in world(1, "alone").with_deadline(60).run(forked, False)[0]


def freed(storage: bool) -> str:
    with simulated(values=True):
        kept = [torch.ones(3, device="sim")]
        graph, _ = captured(lambda: kept[0] + 1)
        graph.replay()
        if storage:
            kept[0].untyped_storage().resize_(0)
            kept[0].untyped_storage().resize_(12)
        else:
            kept.clear()
        with pytest.raises(RuntimeError, match="uses memory that was freed") as told:
            graph.replay()
        return str(told.value)


def test_memory_that_a_graph_uses_must_not_be_freed() -> None:
    assert "(3,)" in world(1, "alone").with_deadline(60).run(freed, False)[0]
    assert "(3,)" in world(1, "alone").with_deadline(60).run(freed, True)[0]


def frozen() -> tuple[list[float], list[float]]:
    """The parameters after each step of an optimizer with a schedule, without a graph, and in a plain one."""
    optimizer, found = so.sgd(so.warmup_linear(0.1, warmup=4, steps=9)), []
    with simulated(values=True):
        for graph in (False, True):
            params, grads = {"w": torch.ones(1, device="sim")}, {"w": torch.ones(1, device="sim")}
            state, rows = optimizer.init(params), []
            step = functools.partial(optimizer.step, params, grads, state)
            run = captured(step)[0] if graph else None
            for _ in range(3):
                if run is not None:
                    run.replay()
                else:
                    params, state = optimizer.step(params, grads, state)
                rows.append(params["w"].cpu().item())
            found.append(rows)
    return found[0], found[1]


def test_a_rate_that_the_host_computes_stays_what_it_was() -> None:
    eager, graph = world(1, "alone").with_deadline(60).run(frozen)[0]
    assert eager == pytest.approx([0.975, 0.925, 0.85])
    assert graph == pytest.approx([0.975, 0.95, 0.925])
