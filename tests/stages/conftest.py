"""What tests of stages may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def threads_on_one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that are threads take turns anyway; on several cores, waking each other costs as much as what they do."""
    if "world" not in request.fixturenames or request.getfixturevalue("world").kind != "threads":
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
