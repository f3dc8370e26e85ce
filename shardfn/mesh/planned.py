"""Whether this process only plans a program: on a device without numbers, as one of many ranks that do not run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_devices: list[str] = []


def planned() -> str:
    """Returns the name of the device on which programs are planned; empty if they run."""
    return _devices[-1] if _devices else ""


@contextlib.contextmanager
def planning_on(device: str) -> Iterator[None]:
    """A context in which programs are planned on this device: ranks that are not there are not compared with."""
    _devices.append(device)
    try:
        yield
    finally:
        _devices.remove(device)
