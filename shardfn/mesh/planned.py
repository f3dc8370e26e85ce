"""Whether this process only plans a program: it runs alone, on shapes, as one rank of a simulated world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor


class Notes(Protocol):
    """The observer of a program that is planned."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context in which nothing is recorded."""

    def repeated(self, times: int) -> contextlib.AbstractContextManager[None]:
        """A context in which what is launched counts as often; memory is that of one time."""

    def on_host(self, tensors: Iterable[Tensor]) -> None:
        """Records that in a run the memory of these tensors is on the host."""

    def assume(self, what: str) -> None:
        """Records an assumption of the plan that depends on values."""


blocks: list[tuple[str, Notes]] = []
"""The open planning blocks: the simulated device's name, and the observer of the program."""


def planned() -> str:
    """Returns the name of the device on which programs are planned; empty if they run."""
    return blocks[-1][0] if blocks else ""


def notes() -> Notes:
    """Returns the observer of the program that is planned."""
    return blocks[-1][1]


@contextlib.contextmanager
def planning_on(device: str, notes: Notes) -> Iterator[None]:
    """A context in which programs are planned on this device: there are no other ranks to compare with."""
    blocks.append((device, notes))
    try:
        yield
    finally:
        blocks.remove((device, notes))
