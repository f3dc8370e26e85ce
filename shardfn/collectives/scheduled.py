"""Collectives of a traced step as operations of its graph, each with a start and a later wait."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives.capturing import capturing
from shardfn.collectives.ops import LIBRARY


class Scheduled(ABC):
    """One collective of a graph, or several that go together.

    Attributes:
        number: its id in the graph.
        ahead: how many collectives of its kind may start before their place in the graph, once their inputs exist; with
            0 it starts at its place. Each is waited for where a result is used.
    """

    ahead = 0

    def __init__(self) -> None:
        self.number = next(_numbers)
        _known[self.number] = self

    @abstractmethod
    def __str__(self) -> str:
        """A description, the same on every rank that takes part."""

    @abstractmethod
    def empty_results(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Tensors with the shapes and dtypes of its results; their values are not used."""

    @abstractmethod
    def start(self, inputs: Sequence[Tensor | None]) -> Any:
        """Starts it; returns the argument of `finish`."""

    @abstractmethod
    def finish(self, started: Any) -> list[Tensor]:
        """Waits for it; returns its results."""

    def abandon(self) -> None:  # noqa: B027
        """Drops a collective that an error has left in flight."""

    def prepare(self) -> None:  # noqa: B027
        """Frees memory that the graph does not need, such as the eager step's, before the graph runs."""


_numbers = itertools.count(1)
_known: weakref.WeakValueDictionary[int, Scheduled] = weakref.WeakValueDictionary()


def known(number: int) -> Scheduled:
    """The collective of this number."""
    return _known[number]


def run_in_graph(work: Scheduled, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Runs a collective as one operation of the graph that is being traced."""
    watch = capturing()
    assert watch is not None, "a step is traced under a watch"
    watch.works.append(work)
    return SCHEDULED(list(inputs), work.number)


LIBRARY.define("scheduled(Tensor?[] inputs, int number) -> Tensor[]")
torch.library.register_fake(
    f"{LIBRARY.ns}::scheduled", lambda inputs, number: known(number).empty_results(inputs), lib=LIBRARY
)
SCHEDULED: Any = getattr(torch.ops, LIBRARY.ns).scheduled.default
