"""Private fine-tuning learns, and is the same on any mesh."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.testing import world
from tests.models import distance

if find_spec("sklearn") is None:  # which takes seconds to load, and not every worker needs it
    pytest.skip("scikit-learn is not installed", allow_module_level=True)
from examples import private as example
from examples.image_classifier import digits

STEPS = 12


def trained(strategy: str, replica: int, shard: int) -> Any:
    mesh = sf.make_mesh(device="cpu", replica=replica, shard=shard)
    placement = sf.strategies.from_name(strategy, shard="shard", replica="replica")
    rows, (images, labels) = digits(torch.float64)
    start, found = example.init(0, torch.float64), []
    for clip, noise in ((1.0, 1.0), (1e6, 0.0)):
        found.append(example.train(start, mesh, placement, rows, STEPS, 0, clip, noise))
    right = [float((example.logits(params, images).argmax(1) == labels).double().mean()) for params in found]
    return found, right


@functools.cache
def alone() -> Any:
    return world(1).with_deadline(60).run(trained, "ddp", 1, 1)[0]


@pytest.mark.parametrize(
    ("strategy", "replica", "shard"), [("hybrid_shard", 1, 2), ("hybrid_shard", 2, 2), ("zero1", 2, 2)]
)
def test_private_training_is_the_same_on_any_mesh_and_learns(strategy: str, replica: int, shard: int) -> None:
    wanted, right = alone()
    assert right[1] > right[0] > 0.3
    for found, _ in world(replica * shard).with_deadline(60).run(trained, strategy, replica, shard):
        assert distance(found, wanted, floor=1.0) < 1e-10
