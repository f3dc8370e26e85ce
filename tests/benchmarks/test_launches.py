"""A step launches few operations on a device, at any size, and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import shardfn as sf
import shardfn.optim as so
from benchmarks.launches import (
    DECIDES,
    LAYERS,
    OPTIMIZERS,
    WIRES,
    Counts,
    counts,
    empty,
    gradient,
    layers,
    step_of,
)  # fmt: skip
from benchmarks.model import perceptron as block
from shardfn.testing import simulated, world
from tests.selected import selected_values


def of_a_billion(names: list[str]) -> dict[str, Counts]:
    with simulated() as device:
        return {name: counts(device, step_of(name)) for name in names}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Counts]:
    names = [name for name in selected_values(request, "name") if name in OPTIMIZERS]
    return world(1, "alone").with_deadline(120).run(of_a_billion, names)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_launches_few_operations_for_a_billion_parameters(found: dict[str, Counts], name: str) -> None:
    operations, waits = found[name]
    assert operations <= OPTIMIZERS[name][1]
    assert waits == int(name in DECIDES)


def of_few_and_many_ranks(name: str) -> list[int]:
    """Operations of a step whose parameters or gradients are sent in few bits, on 4 and on 16 ranks."""
    found = []
    for ranks in (4, 16):
        with simulated(ranks) as device:
            mesh = sf.make_mesh(shard=ranks, device=device.name)
            params = sf.shard(layers(), mesh, sf.full_shard("shard"))
            run = gradient(sf.stage(block, **WIRES[name][0]), params)
            found.append(counts(device, sf.shard_map(run, mesh=mesh, in_specs=(), out_specs=...)).operations)
    return found


@pytest.mark.parametrize("name", WIRES)
def test_few_bits_are_encoded_and_decoded_for_all_ranks_at_once(name: str) -> None:
    ((few, many),) = world(1, "alone").run(of_few_and_many_ranks, name)
    # A sum of gradients takes one addition for each rank, so that its order does not depend on anything else.
    assert many - few == (12 * LAYERS if name.startswith("reduce") else 0)


OF_TREES: dict[str, Callable[[Any], object]] = {
    "clip_by_global_norm": lambda grads: clipped(so.clip_by_global_norm(1.0), grads),
    "clip_by_value": lambda grads: clipped(so.clip_by_value(1.0), grads),
    "global_norm": so.global_norm,
    "finite": so.all_finite,
}


def clipped(transform: so.Transform, grads: Any) -> Any:
    return transform.update(grads, grads, transform.init(grads))


def of_few_and_many() -> dict[str, list[int]]:
    """Operations on 2 and 20 plain parameters, and on 2 and 20 stages of which this rank has some parameters only."""
    found: dict[str, list[int]] = {}
    with simulated(ranks=8) as device:
        mesh = sf.make_mesh(shard=8, device=device.name)
        plain = [[{"a": empty(8, 8), "b": empty(8)} for _ in range(n)] for n in (2, 20)]
        trees = [*plain, *(sf.shard(layers, mesh, sf.full_shard("shard")) for layers in plain)]
        for name, run in OF_TREES.items():
            found[name] = [counts(device, partial(run, tree)).operations for tree in trees]
    return found


def test_norms_launch_as_much_for_many_parameters_as_for_few() -> None:
    for name, (few, many, few_stages, many_stages) in world(1, "alone").run(of_few_and_many)[0].items():
        assert few == many <= 20, name
        assert few_stages == many_stages <= 20, name
