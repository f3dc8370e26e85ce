"""What a state may be, and what is said of one that no checkpoint could be loaded into."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import World
from tests.heard import heard
from tests.refusals import told

Step = Callable[[Any, Any], Any]


def rows(start: int) -> Iterator[Tensor]:
    for n in itertools.count(start):
        yield torch.randn(4, 6, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


@sf.stage
def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def by_torch() -> tuple[dict[str, Any], Step]:
    """A state with an optimizer of torch's, which is complete after its first step, and a step."""
    mesh = sf.make_mesh(device="cpu", shard=-1)
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = sf.shard({"layer": {"w": weight}}, mesh, sf.full_shard("shard"))
    optimizer = so.from_torch(torch.optim.RMSprop, lr=0.1)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(state: Any, x: Tensor) -> Any:
        loss, grads = sf.value_and_grad(lambda p: sf.pmean(layer(p["layer"], x).square().sum(), "shard"))(
            state["params"]
        )
        params, remembered = optimizer.step(state["params"], grads, state["optimizer"])
        return {"params": params, "optimizer": remembered}, {"loss": loss}

    return {"params": params, "optimizer": optimizer.init(params)}, step


def an_optimizer_of_torchs(folder: str) -> tuple[list[float], list[float], str, tuple[int, int], list[float]]:
    """Losses of a bare loop, and of runs: one that keeps nothing, one that is refused, one that begins a step later."""
    state, step = by_torch()
    bare = []
    for x in itertools.islice(rows(0), 6):
        state, metrics = step(state, x)
        bare.append(metrics["loss"].item())
    state, step = by_torch()
    _, run = sf.run.loop(step, state, rows, steps=6, report=[])
    state, step = by_torch()
    refused = told(lambda: sf.run.loop(step, state, rows, steps=6, save=f"{folder}/refused", report=[]))
    found: list[float] = []
    for steps in (3, 6):
        state, step = by_torch()
        begun, _ = step(state, next(rows(0)))
        _, part = sf.run.loop(step, begun, rows, steps=steps, save=f"{folder}/kept", save_every=1, report=[])
        found += part.metrics["loss"].values()
    state, step = by_torch()
    begun, _ = step(state, next(rows(0)))
    _, whole = sf.run.loop(step, begun, rows, steps=6, report=[])
    assert found == list(whole.metrics["loss"].values())
    return bare, list(run.metrics["loss"].values()), refused, (part.start, part.step), found


@pytest.mark.world(2)
def test_an_optimizer_of_torchs_trains_and_is_kept_once_it_is_complete(world: World, tmp_path: Path) -> None:
    for bare, looped, refused, (start, end), found in world.run(an_optimizer_of_torchs, str(tmp_path)):
        assert looped == bare
        assert refused.startswith("ValueError: sf.run.loop: the state of an optimizer by from_torch is not complete")
        assert "Take one step first" in refused
        assert (start, end, len(found)) == (3, 6, 6)


def changing(at: int, values: Any) -> Step:
    """A step after which a part of the state is another kind of thing."""

    def step(state: Any, _: Any) -> Any:
        n = state["n"] + 1
        return {"n": n, "best": values[n >= at]}, {"loss": 0.5}

    return step


KINDS = {
    "None, then a tensor": (None, torch.ones(2)),
    "a tensor, then another shape": (torch.ones(2), torch.ones(3)),
    "an int, then a float": (0, 0.5),
}


def kinds(folder: str) -> dict[str, tuple[str, int]]:
    """What is said of a state that changes at step 3, when it would be saved, and at which step the last one was."""
    sf.make_mesh(device="cpu", data=-1)
    found = {}
    for name, values in KINDS.items():
        start = {"n": 0, "best": values[0]}
        step, save = changing(3, values), f"{folder}/{name}"
        said = told(lambda: sf.run.loop(step, start, rows, steps=6, save=save, save_every=2, report=[]))  # noqa: B023
        _, run = sf.run.loop(changing(9, values), start, rows, steps=4, save=save, report=[])
        found[name] = said, run.start
    return found


@pytest.mark.world(2)
def test_a_state_that_becomes_something_else_later_is_not_saved(world: World, tmp_path: Path) -> None:
    for found in world.run(kinds, str(tmp_path)):
        for name, (said, last) in found.items():
            assert said.startswith("ValueError: sf.run.loop: step returned a"), (name, said)
            assert "a checkpoint, could not continue from that" in said, name
            assert last == 2, name


def too_few(folder: str) -> list[str]:
    step = changing(99, (0, 0))
    sf.make_mesh(device="cpu", data=-1)
    sf.run.loop(step, {"n": 0, "best": 0}, rows, steps=5, save=folder, report=[])
    return [told(lambda: sf.run.loop(step, {"n": 0, "best": 0}, rows, steps=3, save=folder, report=[]))]


@pytest.mark.world(2)
def test_a_run_that_is_further_than_it_is_asked_to_come_says_so(world: World, tmp_path: Path) -> None:
    for (said,) in world.run(too_few, str(tmp_path / "run")):
        assert said.startswith("ValueError: sf.run.loop: steps=3, and ")
        assert "is of step 5 already" in said


class Ends:
    """A data set, one row of which ends what iterates over it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> Tensor:
        if row == 5:  # by which the data set is not known
            raise StopIteration
        return torch.ones(2)


def stops() -> list[str]:
    mesh = sf.make_mesh(device="cpu", data=2)
    found = []
    for workers in (0, 1):
        batches = sf.run.batches(Ends(), mesh, "data", 2, 0, shuffle=False, workers=workers)
        found.append(told(lambda: list(batches)))  # noqa: B023
    step = changing(99, (0, 0))

    def stopping(state: Any, x: Any) -> Any:
        return next(iter(())) if state["n"] == 2 else step(state, x)

    found.append(told(lambda: sf.run.loop(stopping, {"n": 0, "best": 0}, rows, steps=5, report=[])))
    return found


@pytest.mark.world(2)
def test_what_stops_iteration_inside_does_not_end_a_run_in_silence(world: World) -> None:
    for by_itself, by_worker, in_step in world.run(stops):
        for said in (by_itself, by_worker):
            assert "RuntimeError" in said
        assert in_step == "RuntimeError: sf.run.loop: step 2 raised StopIteration"
    assert any("row 5 of the source raised StopIteration" in said for said, *_ in world.run(stops))


def test_a_metric_may_be_numpys() -> None:
    def step(state: int, x: Any) -> Any:
        return state, {"loss": np.float32(0.5), "better": np.bool_(True), "count": np.int64(3)}

    _, run = sf.run.loop(step, 0, range(3), steps=2, report=[])
    assert {name: dict(series) for name, series in run.metrics.items()} == {
        "loss": {1: 0.5, 2: 0.5}, "better": {1: 1.0, 2: 1.0}, "count": {1: 3.0, 2: 3.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda s, x: (s, None), "metrics are None (is a `return` missing?)"),
        (lambda s, x: ({"loss": 1.0}, {"w": [1.0]}), "a step returns (state, metrics), in this order"),
    ],
)
def test_what_a_step_returned_by_mistake_is_guessed(step: Step, says: str) -> None:
    assert says in told(lambda: sf.run.loop(step, {"loss": 0.0}, range(3), steps=2, report=[]))


def test_what_is_no_folder_or_the_wrong_way_round_is_said(tmp_path: Path) -> None:
    step = changing(99, (0, 0))
    (tmp_path / "file").touch()

    def call(**more: Any) -> str:
        return told(lambda: sf.run.loop(step, {"n": 0, "best": 0}, rows, steps=2, report=[], **more))

    assert "save must be a folder" in call(save="")
    assert "is a file, not a folder" in call(save=tmp_path / "file")
    assert "the function comes first: (function, steps)" in call(evaluate=(2, lambda state: {}))


def unmoved(kind: str) -> list[str]:
    mesh = sf.make_mesh(device="cpu", shard=-1)
    optimizer = so.adamw(1e-2, donate=kind == "donated")
    params = sf.shard({"w": torch.ones(3, 3, dtype=torch.float64)}, mesh, sf.full_shard("shard"))
    written = torch.zeros(3)  # as a graph writes, without another version

    def step(state: Any, batch: Any) -> Any:
        new_params, moments = optimizer.step(state["params"], state["params"], state["moments"])
        if kind == "graphed":
            written.numpy()[:] += 1
        new = {"params": new_params, "moments": moments, "seen": state["seen"] + 1}
        return (new if kind in ("new", "donated") else {**state, "seen": state["seen"] + 1}), {"loss": 1.0}

    begun: dict[str, Any] = {"params": params, "moments": optimizer.init(params), "seen": 0}
    if kind == "graphed":
        begun["written"] = written
    with heard() as lines:
        sf.run.loop(step, begun, range(6), steps=6, report=[])
    return [line for line in lines if "nothing trains" in line]


@pytest.mark.world(2)
def test_step_that_returns_its_old_state_is_told_once(world: World) -> None:
    first, second = world.run(unmoved, "old")
    assert len(first) == 1
    assert "step returns the state that it was given" in first[0]
    assert second == []
    for kind in ("new", "donated", "graphed"):
        assert world.run(unmoved, kind) == [[], []]
