"""A step launches few operations on a device, at any size, and waits for nothing."""

from __future__ import annotations

import pytest

from benchmarks.launches import DECIDES, OPTIMIZERS, Counts, counts, step_of
from shardfn.testing import simulated, world


def of_a_billion() -> dict[str, Counts]:
    with simulated() as device:
        return {name: counts(device, step_of(name)) for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def found() -> dict[str, Counts]:
    return world(1, "alone").within(120).run(of_a_billion)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_launches_few_operations_for_a_billion_parameters(found: dict[str, Counts], name: str) -> None:
    operations, waits = found[name]
    assert operations <= OPTIMIZERS[name][1]
    assert waits == int(name in DECIDES)
