"""The fixture and the marker, as a test suite sees them."""

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

def test_default(world):
    assert (world.size, world.kind) == (2, "processes")

@pytest.mark.world(3)
def test_marked(world):
    assert (world.size, world.kind) == (3, "processes")
    assert world.run(dist.get_rank) == [0, 1, 2]

@pytest.mark.world(3, kind="threads")
def test_kind(world):
    assert world.run(dist.get_rank) == [0, 1, 2]

@pytest.mark.world(kind="threads")
def test_kind_alone(world):
    assert (world.size, world.kind) == (2, "threads")

@pytest.mark.world(8, "fake", ranks=[3])
def test_ranks(world):
    assert world.run(dist.get_rank) == [3]

@pytest.mark.world(3)
@pytest.mark.parametrize("world", [1, (2,), (4, "threads")], indirect=True)
def test_parameters(world):
    assert world.run(dist.get_world_size) == [world.size] * world.size
    assert world.size != 3

@pytest.mark.world(2, kind="threads")
@settings(settings.get_profile("shardfn"), max_examples=5)
@given(x=st.integers())
def test_drawn(world, x):
    assert world.run(lambda: x) == [x, x]
"""


def test_fixture_and_marker(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-p", "shardfn.testing.plugin", "--strict-markers", "-W", "error")
    result.assert_outcomes(passed=9)


def test_the_marker_is_listed(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-p", "shardfn.testing.plugin", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.world(size=2, kind=*"])
