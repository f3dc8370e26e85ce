"""The pytest plugin: a `world` fixture, and a marker that says which.

    pytest_plugins = ["shardfn.testing.plugin"]              # in conftest.py

    @pytest.mark.world(4)                                    # 2 processes, if nothing says otherwise
    def test_gather(world):
        assert world.run(body) == [...]

    @pytest.mark.parametrize("world", [2, (4, "threads")], indirect=True)
    def test_everywhere(world): ...

The worlds are those of `shardfn.testing.world`: shared by all tests, and restarted after a failure. With hypothesis,
name the world inside, as in

    @given(x=tensors())
    def test_sum(x):
        world(2).run(body, x)

or load the profile "shardfn", in which an example may take as long as the world's own deadline allows, and in which
the fixture may be used, since it gives every example the same world.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from shardfn.testing.world import World
from shardfn.testing.world import world as shared_world


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the hypothesis profile."""
    config.addinivalue_line(
        "markers", 'world(size=2, kind="processes", *, ranks=None): the world that the fixture `world` gives'
    )
    if find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        settings.register_profile("shardfn", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """The world of the test's parameter or else of its marker; two processes if it has neither."""
    param = getattr(request, "param", None)
    if param is not None:
        return shared_world(*param) if isinstance(param, tuple) else shared_world(param)
    marker = request.node.get_closest_marker("world")
    if marker is None:
        return shared_world(2)
    if not marker.args and "size" not in marker.kwargs:
        return shared_world(2, **marker.kwargs)
    return shared_world(*marker.args, **marker.kwargs)
