"""The main job is the same training run on every mesh."""

from __future__ import annotations

import functools
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from examples import train_lm
from examples.run import curve, moved
from shardfn.testing import world
from tests.launched import workers
from tests.models import STRATEGIES

TINY = train_lm.Config(
    width=16, heads=2, layers=2, hidden=24, context=16, batch=8, warmup=3, dtype=torch.float64, clip=0.5
)
STEPS = 6
TEXT = b"def f(x):\n    return x + 1\n" * 40


def losses(sizes: dict[str, int], seed: int, strategy: str) -> list[float]:
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    mesh = sf.make_mesh(device="cpu", **sizes)
    run = train_lm.train(TINY, mesh, (text, text.flip(0)), STEPS, seed, placement(strategy))
    assert {stage: moved(run.log, stage) for stage in run.expected} == run.expected, "bytes, and those of the formula"
    return [*curve(run.run), run.validation]


def placement(strategy: str) -> sf.Placement:
    name, _, parts = strategy.partition(", exact in ")
    return sf.strategies.from_name(name, shard="shard", replica="replica").with_exact(int(parts or 0))


def on(sizes: dict[str, int], seed: int = 0, strategy: str = "hybrid_shard") -> list[float]:
    ranks = sizes["replica"] * sizes["shard"]
    first, *others = world(ranks).run(losses, sizes, seed, strategy)
    assert all(other == first for other in others), "an invariant loss is the same bits on every rank"
    return first


@functools.cache
def alone() -> list[float]:
    return on({"replica": 1, "shard": 1})


@pytest.mark.parametrize(("replica", "shard"), [(1, 2), (2, 1), (1, 4), (4, 1), (2, 2)])
def test_the_curve_does_not_depend_on_the_mesh(replica: int, shard: int) -> None:
    one = torch.tensor(alone(), dtype=torch.float64)
    cut = torch.tensor(on({"replica": replica, "shard": shard}), dtype=torch.float64)
    assert one[STEPS - 1] < one[0] - 0.1, "nothing was learnt"
    assert ((cut - one).abs() / one).max() < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_curve_does_not_depend_on_the_strategy(strategy: str) -> None:
    one = torch.tensor(alone(), dtype=torch.float64)
    cut = torch.tensor(on({"replica": 2, "shard": 2}, strategy=strategy), dtype=torch.float64)
    assert ((cut - one).abs() / one).max() < 1e-12


def test_the_seed_decides_the_curve() -> None:
    sizes = {"replica": 1, "shard": 2}
    assert on(sizes, seed=1) == on(sizes, seed=1)
    assert on(sizes, seed=1) != on(sizes, seed=2)


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    def body() -> tuple[float, float]:
        params = train_lm.init(TINY, 0)
        tokens = torch.randint(256, (8, TINY.context + 1), generator=torch.Generator().manual_seed(0))
        mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
        loss = sf.shard_map(
            lambda params, tokens: train_lm.loss_fn(params, tokens, TINY),
            mesh=mesh,
            in_specs=(..., sf.P(train_lm.DATA)),
            out_specs=sf.P(),
            inputs="global",
        )
        logits = train_lm.model(params, tokens[:, :-1], TINY)
        alone = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        cut = sf.shard(params, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
        return loss(cut, tokens).item(), alone.item()

    for sharded, alone in world(4).run(body):
        assert abs(sharded - alone) < 1e-12


def test_a_batch_that_the_mesh_does_not_divide_is_refused_on_every_rank() -> None:
    def body() -> None:
        mesh = sf.make_mesh(replica=1, shard=2, device="cpu")
        text = torch.zeros(500, dtype=torch.uint8)
        train_lm.train(replace(TINY, batch=3), mesh, (text, text), 1, 0, placement("hybrid_shard"))

    for error in world(2).errors(body):
        assert isinstance(error, ValueError)
        assert "batch=3" in str(error)


def interrupted(sizes: dict[str, int], folder: str, steps: int, strategy: str = "hybrid_shard") -> Any:
    """Which step it went on from, and its losses; nothing, if it was stopped by an error after so many steps."""
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    mesh = sf.make_mesh(device="cpu", **sizes)

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == steps:
            raise RuntimeError("stopped")

    try:
        run = train_lm.train(
            TINY, mesh, (text, text.flip(0)), STEPS, 0, placement(strategy), (stop,), save=folder, save_every=2
        )
    except RuntimeError as error:
        if "stopped" not in str(error):
            raise
        return None
    return run.run.start, [*curve(run.run), run.validation]


def test_an_interrupted_run_ends_where_it_would_have(tmp_path: Path) -> None:
    wanted = on({"replica": 1, "shard": 2})
    folder = str(tmp_path / "same")
    for steps in (3, 5):
        assert world(2).run(interrupted, {"replica": 1, "shard": 2}, folder, steps) == [None] * 2
    for start, found in world(2).run(interrupted, {"replica": 1, "shard": 2}, folder, 99):
        assert start == 4
        assert found == wanted[4:]  # bit for bit on the same mesh
    folder = str(tmp_path / "others")
    assert world(4).run(interrupted, {"replica": 2, "shard": 2}, folder, 3) == [None] * 4
    assert world(1).run(interrupted, {"replica": 1, "shard": 1}, folder, 5, "ddp") == [None]
    for start, found in world(2).run(interrupted, {"replica": 1, "shard": 2}, folder, 99, "zero1"):
        assert start == 4
        assert torch.allclose(torch.tensor(found).double(), torch.tensor(wanted[4:]).double(), rtol=1e-12, atol=0)


@pytest.mark.central
def test_with_exact_parts_the_curve_is_the_same_bits_wherever_it_goes_on(tmp_path: Path) -> None:
    def trained(sizes: dict[str, int], folder: str, steps: int, strategy: str) -> Any:
        ranks = sizes["replica"] * sizes["shard"]
        return world(ranks).run(interrupted, sizes, str(tmp_path / folder), steps, f"{strategy}, exact in 4")

    ((_, wanted),) = trained({"replica": 1, "shard": 1}, "alone", 99, "ddp")
    assert trained({"replica": 2, "shard": 2}, "others", 3, "hybrid_shard") == [None] * 4
    assert trained({"replica": 1, "shard": 1}, "others", 5, "ddp") == [None]
    for start, found in trained({"replica": 1, "shard": 2}, "others", 99, "full_shard"):
        assert start == 4
        assert found[:-1] == wanted[4:-1]  # without that of held-out files, which ranks add as usual


SMALL: dict[str, Any] = {"width": 16, "heads": 2, "layers": 2, "hidden": 24, "context": 32}
MANY = 60  # steps, of which most are still to come when a process is killed for the last time
PROGRAM = f"""
import functools, torch
from examples import train_lm
text = torch.frombuffer(bytearray({TEXT!r}), dtype=torch.uint8)
train_lm.Config, train_lm.corpus = functools.partial(train_lm.Config, **{SMALL}), lambda: (text, text.flip(0))
train_lm.main()
"""


def uninterrupted() -> float:
    """The loss at the end of what the program does, on two ranks."""
    mesh = sf.make_mesh(device="cpu", replica=1, shard=-1)
    config = replace(train_lm.Config(), **SMALL)
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    return train_lm.train(config, mesh, (text, text.flip(0)), MANY, 0, placement("hybrid_shard")).validation


def test_a_killed_process_restarts_the_run_which_ends_at_the_same_loss(tmp_path: Path) -> None:
    """torchrun starts all processes again, and they go on from the newest checkpoint."""

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(tmp_path), "PYTHONPATH": root}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--steps", str(MANY), "--out", str(tmp_path / "killed"), "--resume", "--save-every", "3"]
    wanted = world(2).with_deadline(200).run(uninterrupted)[0]
    checkpoints = tmp_path / "killed" / "checkpoints"
    run = subprocess.Popen(
        [*torchrun, "--max-restarts", "2", str(program), *options],
        env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 100
        while not any(int(one.name[5:]) >= 6 for one in checkpoints.glob("step-*")):
            assert time.monotonic() < end
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.02)
        os.kill(workers(run.pid)[-1], signal.SIGKILL)
        out, error = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 0, error
    assert "Sending process" in error, error  # it was started anew
    assert f"held-out files: {wanted / math.log(2):.3f} bits per byte" in out.splitlines()
