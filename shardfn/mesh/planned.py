"""Whether this process only plans a program: on a device without numbers, as one of many ranks that do not run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor


class Notes(Protocol):
    """What takes note of a program that is planned."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context in which no note is taken."""

    def on_host(self, tensors: Iterable[Tensor]) -> None:
        """Notes that a run has the memory of these tensors on the host."""

    def assume(self, what: str) -> None:
        """Notes something that depends on numbers, and that the plan takes for granted."""


blocks: list[tuple[str, Notes]] = []
"""The open blocks in which programs are planned: the device, and what takes note of the program."""


def planned() -> str:
    """Returns the name of the device on which programs are planned; empty if they run."""
    return blocks[-1][0] if blocks else ""


def notes() -> Notes:
    """Returns what takes note of the program that is planned."""
    return blocks[-1][1]


@contextlib.contextmanager
def planning_on(device: str, notes: Notes) -> Iterator[None]:
    """A context in which programs are planned on this device: ranks that are not there are not compared with."""
    blocks.append((device, notes))
    try:
        yield
    finally:
        blocks.remove((device, notes))
