"""What is wrong is one clear error on every rank, and no rank is left waiting."""

from __future__ import annotations

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.testing import World
from tests.refusals import told
from tests.run.toy import Rows, begin, mesh_here, step_of


def fine(state: Any, batch: Any) -> Any:
    return state, {"loss": 0.0}


def forever(start: int) -> Any:
    return itertools.count(start)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "step is none": ({"step": 3}, "TypeError: sf.run.loop: step is a int, not a function (state, batch)"),
    "step a module": ({"step": torch.nn.Linear(2, 2)}, "TypeError: sf.run.loop: Linear is a module, which has param"),
    "step of one": ({"step": lambda state: 0}, "step is called as (state, batch) -> (state, metrics), and step(state)"),
    "one value": ({"step": lambda s, b: s}, "step returned a int, not two values, (state, metrics)"),
    "three values": ({"step": lambda s, b: (s, {}, 1)}, "step returned 3 values, not two values"),
    "metrics a tensor": ({"step": lambda s, b: (s, torch.ones(()))}, "metrics are a Tensor, not a dict: name them"),
    "metrics a vector": ({"step": lambda s, b: (s, {"loss": torch.ones(3)})}, "metrics['loss'] has shape (3,)"),
    "metrics complex": ({"step": lambda s, b: (s, {"loss": torch.ones((), dtype=torch.complex64)})}, "torch.complex64"),
    "metrics sparse": ({"step": lambda s, b: (s, {"x": torch.ones(1).to_sparse()})}, "is a tensor of torch.sparse_coo"),
    "metrics huge": ({"step": lambda s, b: (s, {"x": 10**400})}, "metrics['x'] is more than a float holds"),
    "metrics text": ({"step": lambda s, b: (s, {"loss": "low"})}, "metrics['loss'] is a str, not a number"),
    "metrics by number": ({"step": lambda s, b: (s, {0: 1.0})}, "metrics have the key 0, and keys are strings"),
    "another structure": ({"step": lambda s, b: ((s, s), {})}, "returned a state of another structure"),
    "a tuple": ({"step": lambda s, b: ((s, s), {})}, "it was a value, and is a tuple with [0, 1]"),
    "another key": (
        {"step": lambda s, b: ({"a": {"c": None}, "d": 0}, {}), "state": {"a": {"b": 0, "c": 0}}},
        "than the run began with: d is new; a.b is missing; a.c was a value, and is None: the next step",
    ),
    "another kind": ({"step": lambda s, b: (0.5, {})}, "another kind of state: it was a int, and is a float"),
    "another shape": (
        {"step": lambda s, b: ({"w": torch.zeros(3)}, {}), "state": {"w": torch.zeros(2)}},
        "w was float32[2], and is float32[3]",
    ),
    "no steps": ({"steps": 0}, "ValueError: sf.run.loop: steps must be the number of the last step, an integer of 1"),
    "half a step": ({"steps": 1.5}, "an integer of 1 or more, got 1.5"),
    "true steps": ({"steps": True}, "an integer of 1 or more, got True"),
    "save_every without save": (
        {"save_every": 3},
        "save_every=3 is about checkpoints, and there are none without save=folder",
    ),
    "keep_last without save": ({"keep_last": 3}, "keep_last=3 is about checkpoints"),
    "save_every 0": ({"save_every": 0, "save": "x"}, "save_every must be the number of steps between two checkpoints"),
    "keep_last 0": ({"keep_last": 0, "save": "x"}, "keep_last must be the number of checkpoints that stay"),
    "save a number": ({"save": 3}, "save is a int, not a folder"),
    "resume a path": ({"resume": "x"}, "resume must be True"),
    "batches none": ({"batches": None}, "batches must be a function of the step to start at, got NoneType"),
    "batches of nothing": ({"batches": lambda: iter([])}, "batches is called as batches(start)"),
    "batches no iterator": ({"batches": lambda start: 3}, "batches(0) returned a int, not an iterator of batches"),
    "batches a list, saved": ({"batches": [1, 2], "save": "x"}, "got list, which always begins at its first batch"),
    "batches end": ({"batches": lambda start: range(start, 3)}, "the batches ended after 3 of 5 steps: pass steps=3"),
    "evaluate a number": ({"evaluate": 3}, "evaluate must be a function (state) -> metrics"),
    "evaluate never": ({"evaluate": (len, 0)}, "evaluate must be (function, steps between two evaluations)"),
    "evaluate of two": ({"evaluate": fine}, "evaluate is called as (state) -> metrics"),
    "evaluated vector": ({"evaluate": lambda s: {"x": torch.ones(2)}}, "evaluate (eval): metrics['x'] has shape (2,)"),
    "report a name": ({"report": "progress"}, "report must be a function"),
    "report not called": ({"report": sf.run.progress}, "report has progress itself: call it, sf.run.progress(...)"),
    "seed a word": ({"seed": "x"}, "TypeError: a seed is an int"),
    "time_limit negative": ({"time_limit": -1}, "time_limit must be more than 0 seconds, got -1"),
    "time_limit a word": ({"time_limit": "1h"}, "time_limit must be seconds or a timedelta, got '1h'"),
    "flops 0": ({"flops": 0}, "flops must be a number above 0"),
    "state of functions": ({"state": {"f": len}, "save": "x"}, "TypeError: a checkpoint holds flat shards, tensors"),
}


def call(folder: Path, **changed: Any) -> str:
    given: dict[str, Any] = {"step": fine, "state": 0, "batches": forever, "steps": 5, "report": [], **changed}
    if isinstance(given.get("save"), str):
        given["save"] = folder / given["save"]
    step, state, batches = given.pop("step"), given.pop("state"), given.pop("batches")
    return told(lambda: sf.run.loop(step, state, batches, **given))


def all_calls(folder: Path) -> dict[str, str]:
    return {name: call(folder / name, **changed) for name, (changed, _) in CALLS.items()}


@pytest.mark.world(2)
def test_wrong_arguments_are_refused_on_every_rank(world: World, tmp_path: Path) -> None:
    first, second = world.run(all_calls, tmp_path)
    assert first == second
    assert {name: said for name, said in first.items() if CALLS[name][1] not in said} == {}


def without_a_key() -> list[str]:
    """What is said of states of many flat shards, on a rank that loses one key, and where the strategy is another."""
    mesh = sf.make_mesh(data=-1, device="cpu")
    plain = [{"w": torch.ones(4, 4, dtype=torch.float64) * n} for n in range(20)]
    params, other = (
        sf.shard(plain, mesh, strategy) for strategy in (sf.full_shard("data"), sf.strategies.zero1("data"))
    )
    state = {"params": params, "opt": {"mean": params, "step": 0}}
    returned = [{"params": params, "opt": {"mean": params}}, {"params": [*params[:-1], other[-1]], "opt": state["opt"]}]

    def run(one: Any) -> Any:
        return sf.run.loop(lambda s, b: (one, {}), state, [0], steps=1, report=[])

    return [told(partial(run, one)) for one in returned]


@pytest.mark.world(2)
def test_what_a_returned_state_lacks_is_named_by_its_path(world: World) -> None:
    for lacks, differs in world.run(without_a_key):
        assert "than the run began with: opt.step is missing: the next step" in lacks
        assert "than the run began with: params.19 is another kind of FlatShard: the next step" in differs


def differing(folder: Path) -> list[str]:
    rank = dist.get_rank()
    feed: Any = Rows(None, identity={"rank": rank})
    return [
        call(folder, steps=5 + rank), call(folder, save=f"{rank}"), call(folder, seed=rank),
        call(folder, steps=0 if rank else 5), call(folder, evaluate=(lambda s: {}, 2) if rank else None),
        call(folder, batches=feed),
    ]  # fmt: skip


@pytest.mark.world(2)
def test_ranks_that_differ_are_refused_on_both(world: World, tmp_path: Path) -> None:
    first, second = world.run(differing, tmp_path)
    assert "ranks differ in steps: rank 0 has 5, rank 1 6" in first[0]
    assert "ranks differ in save" in first[1]
    assert "seed: rank 0 has 0, rank 1 1" in first[2]
    assert first[3].startswith("ValueError: sf.run.loop: on rank 1, ValueError: sf.run.loop: steps must be")
    assert second[3].startswith("ValueError: sf.run.loop: steps must be")
    assert "ranks differ in evaluate" in first[4]
    assert """batches.identity: rank 0 has {"rank": 0}, rank 1 {"rank": 1}""" in first[5]
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, True, False, True, True]


def resumed(folder: Path) -> list[str]:
    mesh, found = mesh_here(), []

    def again(rows: Any = None, state: Any = None, steps: int = 4, **changed: Any) -> None:
        arguments: dict[str, Any] = {"steps": steps, "save": folder / "run", "report": [], **changed}
        rows = Rows(mesh) if rows is None else rows
        found.append(told(lambda: sf.run.loop(step_of(mesh), state or begin(mesh), rows, **arguments)))

    again(steps=2)
    again(rows=Rows(mesh, identity={"rows": 16, "seed": 1}))
    again(rows=Rows(mesh, identity=None))  # type: ignore[arg-type]
    again(seed=1)
    again(resume=False)
    again(state=begin(mesh, width=7))
    again(rows=Rows(mesh, identity={"f": len}))
    again(rows=Rows(mesh, axes="rows"))
    again(rows=Rows(mesh, identity=3))  # type: ignore[arg-type]
    (folder / "file").touch()
    again(save=folder / "file")
    again()
    return found


@pytest.mark.world(2)
def test_a_run_goes_on_only_as_the_one_it_was(world: World, tmp_path: Path) -> None:
    first, second = world.run(resumed, tmp_path)
    assert first == second
    done, identity, none, seed, refused, model, plain, axes, kind, file, last = first
    assert done == last == "it was done"
    assert "step-00000002: rows was 8 and is 16; seed was None and is 1. Steps after it would get different" in identity
    assert "rows was 8 and is None" in none
    assert "seed=1, and the run in" in seed
    assert "has seed=0" in seed
    assert "resume=False, and" in refused
    assert "CheckpointError" in model
    assert "float64 [6, 6]" in model
    assert "batches.identity is a dict of plain values" in plain
    assert "the mesh of the state has no axis 'rows' (shard=2)" in axes
    assert "batches.identity is a int, not a dict" in kind
    assert "is a file, not a folder" in file


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    steps: list[int] = []
    said = call(tmp_path, save=tmp_path / "file" / "run", step=lambda s, b: steps.append(b))
    assert "CheckpointError" in said
    assert steps == []


# --- what fails on one rank alone ---


def failing(folder: Path, how: str) -> tuple[str, float]:
    mesh, rank = mesh_here(), dist.get_rank()
    step = step_of(mesh)

    def user(state: Any, rows: Any) -> Any:
        if how == "step" and rank == 1 and state["seen"] == 24:
            raise KeyError("of rank 1")
        return step(state, rows)

    def evaluate(state: Any) -> Any:
        if how == "evaluate" and rank == 1:
            raise KeyError("of rank 1")
        return {"norm": sf.unshard(state["params"])["blocks"][0]["w"].norm()}

    def report(n: int, metrics: Any) -> None:
        if how == "report" and n == 3:
            raise KeyError("of rank 0")

    rows = Rows(mesh, end=3 if how == "batches" and rank == 1 else 100)
    began = time.monotonic()
    arguments: dict[str, Any] = {"save": folder, "save_every": 2, "evaluate": (evaluate, 3), "report": [report]}
    said = told(lambda: sf.run.loop(user, begin(mesh), rows, steps=10, **arguments))
    return said, time.monotonic() - began


@pytest.mark.parametrize("how", ["step", "evaluate", "report", "batches"])
def test_when_one_rank_fails_the_others_end_within_seconds(how: str, tmp_path: Path) -> None:
    with World(2) as world:
        (first, one), (second, two) = world.run(failing, tmp_path, how)
    rank = 0 if how == "report" else 1
    own, other = (first, second) if rank == 0 else (second, first)
    what = "ValueError: sf.run.loop: the batches ended after 3" if how == "batches" else f"KeyError: 'of rank {rank}'"
    assert own.startswith(what)
    assert f"rank {rank} has failed: {what}" in other
    assert "RuntimeError" in other or "CheckpointError" in other
    assert max(one, two) < 25
    assert sf.checkpoint.latest(tmp_path) == tmp_path / f"step-{2 if how != 'report' else 4:08}" or how == "report"


def after_failures() -> list[str]:
    mesh = mesh_here()
    told(lambda: sf.run.loop(step_of(mesh), begin(mesh), Rows(mesh, end=2), steps=5, report=[]))
    time.sleep(7 * dist.get_rank())  # the other one waits longer than `watchdog.PATIENCE`
    return [told(lambda: sf.run.loop(step_of(mesh), begin(mesh), Rows(mesh), steps=5, report=[]))]


@pytest.mark.world(2)
def test_ranks_that_failed_together_go_on_together(world: World) -> None:
    assert world.run(after_failures) == [["it was done"]] * 2
