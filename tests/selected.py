"""The cases that one run of pytest has of a module, for fixtures that work for all of them at once."""

from __future__ import annotations

from typing import Any

import pytest


def selected_values(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a parameter in the tests of the fixture's module that this run has, each once."""
    items = [item for item in request.session.items if item.path == request.path]
    specs = [item.callspec.params for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return list(dict.fromkeys(params[name] for params in specs if name in params))
