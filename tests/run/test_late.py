"""The loop makes the host wait for nothing on the device in a steady step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.run.async_metrics import Late
from shardfn.testing import simulated, world


def waits() -> list[Any]:
    with simulated(ranks=8) as device:
        mesh = sf.make_mesh(shard=8, device=device.name)
        params = sf.init_sharded({"w": lambda g: torch.randn(16, 16, generator=g)}, 0, mesh, sf.full_shard("shard"))
        optimizer = sf.optim.adamw(1e-3)
        stage = sf.stage(lambda p, x: (x @ p["w"]).square().mean())

        @sf.shard_map(mesh=mesh, in_specs=(..., ..., ...), out_specs=...)
        def trained(params: Any, state: Any, rows: Any) -> Any:
            loss, grads = sf.value_and_grad(lambda p: sf.psum(stage(p, rows), "shard"))(params)
            return *optimizer.step(params, grads, state), loss

        def step(state: Any, rows: Any) -> Any:
            params, moments, loss = trained(state[0], state[1], rows)
            return (params, moments), {"loss": loss, "count": loss + 1}

        def batches(start: int) -> Any:
            for n in range(start, 12):
                if n == 6:
                    device.reset_counts()
                if n == 11:
                    steady.extend(device.synchronizations)
                yield torch.ones(4, 16, device=device.name)

        steady: list[Any] = []
        rows = torch.ones(4, 16, device=device.name)
        state: Any = (params, optimizer.init(params))
        for n in range(6):
            if n == 3:
                device.reset_counts()
            state, _ = step(state, rows)
        bare = [(one.kind, one.times) for one in device.synchronizations]
        batches.axes = ("shard",)  # type: ignore[attr-defined]
        _, run = sf.run.loop(step, state, batches, steps=12, report=[])
        return [bare, steady, len(run.metrics["loss"])]


def test_no_host_waits_in_a_steady_step() -> None:
    bare, steady, told = world(1, "alone").run(waits)[0]
    assert (bare, told) == ([], 12)
    # One that nobody waits for: the next step is launched while it travels.
    assert [(one.kind, one.where.partition(":")[0], one.times) for one in steady] == [
        ("cpu collective", "shardfn/run/agreeing.py", 5)
    ]


def test_metrics_are_read_in_order_and_not_before_they_are_asked_for() -> None:
    late = Late()
    for n in range(1, 5):
        late.put(n, {"a": torch.tensor(n), "b": 0.5 * n, "c": torch.tensor(float(n), requires_grad=True)})
    assert list(late.until(2)) == [(1, {"a": 1.0, "b": 0.5, "c": 1.0}), (2, {"a": 2.0, "b": 1.0, "c": 2.0})]
    assert [step for step, _ in late.until(9)] == [3, 4]


def recorded() -> Any:
    """Whether one copy of metrics is waited for, and on the current stream of the metrics' device."""
    asked, on = [], []
    with simulated() as device, pytest.MonkeyPatch.context() as patch:
        module = torch.get_device_module(device.name)
        theirs = module.current_stream()

        def current_stream(where: Any = None) -> Any:
            asked.append(where)
            return theirs

        patch.setattr(module, "current_stream", current_stream, raising=False)
        patch.setattr(module.Event, "record", lambda self, stream=None: on.append(stream))
        loss = torch.ones((), device=device.name)
        Late().put(1, {"loss": loss, "count": loss + 1})
        return asked == [loss.device], [one is theirs for one in on]


def test_metrics_are_waited_for_on_the_stream_of_their_own_device() -> None:
    assert world(1, "alone").run(recorded) == [(True, [True])]
