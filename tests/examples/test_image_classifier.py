"""Networks with buffers train alike on every mesh, as one process trains them."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
import shardfn.optim as so
from shardfn import interop
from shardfn.testing import World, world

if find_spec("sklearn") is None:  # which takes seconds to load, and not every worker needs it
    pytest.skip("scikit-learn is not installed", allow_module_level=True)
from examples import image_classifier as example

pytestmark = pytest.mark.filterwarnings("ignore", "error::shardfn.check.VaryingWarning")

TINY = example.Config(batch=16, width=8, blocks=2, warmup=2, clip=1e9, dtype=torch.float64)
STEPS = 4
ROUNDING = 1e-13
Numbers = dict[str, torch.Tensor]


def trained(name: str, mesh: Any, strategy: str) -> tuple[Any, example.Run]:
    placement = sf.strategies.from_name(strategy, shard="shard", replica="replica")
    return example.train(example.made(name, TINY, 0), TINY, mesh, placement, STEPS, 0)


def numbers(replica: int, shard: int) -> dict[str, Numbers]:
    mesh, found = sf.make_mesh(device="cpu", replica=replica, shard=shard), {}
    for name in example.MODELS:
        for strategy in ("hybrid_shard", "zero1") if replica > 1 else ("hybrid_shard",):
            model, run = trained(name, mesh, strategy)
            found[f"{name} {strategy}"] = {
                "losses": torch.tensor(run.losses, dtype=torch.float64),
                "accuracy": torch.tensor(run.accuracy, dtype=torch.float64),
                **run.buffers,
                **model.state_dict(run.params),
            }
    return found


def rows() -> list[Any]:
    """The batches of a run, whole."""
    mesh = sf.make_mesh(device="cpu", replica=1, shard=1)
    return list(islice(sf.run.batches(example.digits(TINY.dtype)[0], mesh, example.DATA, TINY.batch, 0)(0), STEPS))


@functools.cache
def by_torch(name: str) -> Numbers:
    """The module itself, trained by torch on whole batches."""
    module = example.made(name, TINY, 0)
    _, held_out = example.digits(TINY.dtype)
    rates = so.warmup_cosine(TINY.rate, warmup=TINY.warmup, steps=STEPS, end=TINY.rate / 10)
    matrices, vectors = ([p for p in module.parameters() if (p.ndim > 1) == one] for one in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": TINY.decay}, {"params": vectors, "weight_decay": 0.0}]
    )
    losses = []
    for step, (images, labels) in enumerate(world(1).run(rows)[0]):
        out = module(images)
        loss = F.cross_entropy(getattr(out, "logits", out), labels)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rates(step + 1)
        optimizer.step()
        losses.append(loss.item())
    out = module.eval()(held_out[0])
    right = getattr(out, "logits", out).argmax(-1) == held_out[1]
    found = {"losses": torch.tensor(losses, dtype=torch.float64), "accuracy": right.double().mean()}
    return {**found, **{name: x.detach() for name, x in module.state_dict().items()}}


@pytest.mark.parametrize("cells", [(1, 1), (1, 2), (2, 2)], ids=str)
def test_losses_parameters_and_running_statistics_are_those_of_the_module_by_torch(cells: tuple[int, int]) -> None:
    for found in world(cells[0] * cells[1]).with_deadline(200).run(numbers, *cells):
        assert {key.split()[0] for key in found} == set(example.MODELS)
        for key, got in found.items():
            want = by_torch(key.split()[0])
            assert got.keys() == want.keys()
            start = example.made(key.split()[0], TINY, 0).state_dict()
            stayed = [one for one, x in start.items() if (want[one] - x).abs().max() < TINY.rate / 2]
            assert all(one.endswith("k_proj.bias") for one in stayed), stayed  # which a softmax does not see
            for one, x in want.items():
                off = 1e-6 if one == "accuracy" else ROUNDING
                assert (got[one].double() - x.double()).abs().max() <= off * x.double().abs().max().clamp(1), (key, one)
    assert any("running_var" in one for one in by_torch("network"))


def saved(folder: str) -> list[tuple[float, float]]:
    mesh, found = sf.make_mesh(device="cpu", replica=1, shard=2), []
    for name in example.MODELS:
        model, run = trained(name, mesh, "hybrid_shard")
        interop.save_pretrained(f"{folder}/{name}/model", model, run.params, buffers=run.buffers)
        args = SimpleNamespace(model=name, out=Path(folder) / name, seed=0)
        found.append((run.accuracy, example.alone(args, TINY)))
    return found


@pytest.mark.world(2)
def test_the_module_alone_reads_as_many_digits(world: World, tmp_path: Path) -> None:
    for found in world.with_deadline(200).run(saved, str(tmp_path)):
        assert len(found) == len(example.MODELS)
        for ours, alone in found:
            assert abs(ours - alone) < 1e-6
