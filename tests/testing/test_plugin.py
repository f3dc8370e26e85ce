"""The fixture and the marker, as a test suite sees them."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

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
@settings(max_examples=5)
@given(x=st.integers())
def test_drawn(world, x):
    assert world.run(lambda: x) == [x, x]
"""


MINE = """
from hypothesis import settings

settings.register_profile("mine", max_examples=3, deadline=1000)
"""

LOADED = """
from hypothesis import HealthCheck, settings

def test_profile():
    now = settings.get_profile(settings.get_current_profile_name())
    assert (settings.get_current_profile_name(), now.deadline is None, now.derandomize) == {wanted!r}
    assert (HealthCheck.function_scoped_fixture in now.suppress_health_check) == {wanted[1]!r}
"""


@pytest.fixture
def hypothesis_own(request: pytest.FixtureRequest) -> Iterator[str]:
    """The profile that hypothesis itself loads, on somebody's machine and on a CI server."""
    before, own = settings.get_current_profile_name(), getattr(request, "param", "default")
    settings.load_profile(own)
    yield own
    settings.load_profile(before)


def test_fixture_and_marker(pytester: pytest.Pytester, hypothesis_own: str) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-p", "shardfn.testing.plugin", "--strict-markers", "-W", "error")
    result.assert_outcomes(passed=9)


def test_the_marker_is_listed(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-p", "shardfn.testing.plugin", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.world(size=2, kind=*"])


@pytest.mark.parametrize(
    ("conftest", "options", "name"),
    [
        ("", [], "shardfn"),
        (MINE, ["--hypothesis-profile", "shardfn"], "shardfn"),
        (MINE, ["--hypothesis-profile", "mine"], "mine"),
        (MINE + "settings.load_profile('mine')", [], "mine"),
        (MINE + "def pytest_configure():\n    settings.load_profile('mine')", [], "mine"),
    ],
)
@pytest.mark.parametrize("by", ["-p", "pytest_plugins"])
@pytest.mark.parametrize("hypothesis_own", ["default", "ci"], indirect=True)
def test_the_profile_is_loaded_unless_there_is_one_of_the_users(
    pytester: pytest.Pytester, hypothesis_own: str, conftest: str, options: list[str], name: str, by: str
) -> None:
    if by == "-p":
        options = ["-p", "shardfn.testing.plugin", *options]
    else:
        conftest = "pytest_plugins = ['shardfn.testing.plugin']\n" + conftest
    pytester.makeconftest(conftest)
    wanted = (name, name == "shardfn", hypothesis_own == "ci")
    pytester.makepyfile(LOADED.format(wanted=wanted))
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=1)
