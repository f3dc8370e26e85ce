"""The pytest plugin: a `world` fixture, and a marker that chooses the world.

    pytest_plugins = ["shardfn.testing.plugin"]              # in conftest.py

    @pytest.mark.world(4)                                    # the default is 2 processes
    def test_gather(world):
        assert world.run(body) == [...]

    @pytest.mark.parametrize("world", [2, (4, "threads")], indirect=True)
    def test_everywhere(world): ...

The worlds are those of `shardfn.testing.world`: shared by all tests, and restarted after a failure.

With hypothesis, the plugin loads the profile "shardfn". An example may then take as long as the world's own deadline
allows, and the fixture may be used in `@given` tests, since it gives every example the same world. The rest is as in
hypothesis's own profile: on a CI server the examples are the same in every run. A profile of your own wins, whether it
is loaded in `conftest.py` or by `--hypothesis-profile`.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from shardfn.testing.world import World
from shardfn.testing.world import world as shared_world


@pytest.hookimpl(tryfirst=True)  # before hypothesis's own, which loads the profile of `--hypothesis-profile`
def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, and loads the hypothesis profile."""
    config.addinivalue_line(
        "markers", 'world(size=2, kind="processes", *, ranks=None): the world that the fixture `world` gives'
    )
    if find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    loaded = settings.get_current_profile_name()
    profile = settings.get_profile(loaded)
    allowed = [*profile.suppress_health_check, HealthCheck.function_scoped_fixture]
    settings.register_profile("shardfn", profile, deadline=None, suppress_health_check=allowed)
    if loaded in ("default", "ci") and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("shardfn")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """The world of the test's parameter, or of its marker, or of two processes if it has neither."""
    param = getattr(request, "param", None)
    if param is not None:
        return shared_world(*param) if isinstance(param, tuple) else shared_world(param)
    marker = request.node.get_closest_marker("world")
    if marker is None:
        return shared_world(2)
    if not marker.args and "size" not in marker.kwargs:
        return shared_world(2, **marker.kwargs)
    return shared_world(*marker.args, **marker.kwargs)
