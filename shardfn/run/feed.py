"""What a loop needs of whatever gives it batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class Feed(Protocol):
    """Gives a run's batches, from any step on."""

    def __call__(self, start: int) -> Iterator[Any]:
        """This rank's part of the batches of step `start`, and of those after it."""
