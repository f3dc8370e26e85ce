"""What a layer's forward reads besides its arguments: whether it trains, and numbers that it counts in attributes.

A stage may run its function again, for its gradient, after these have changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

_NUMBERS = (bool, int, float, complex, str, type(None))
Place = tuple[dict[str, Any], str]


class Attributes:
    """Of the modules of one stage: `training` of all, and the plain attributes that their forwards were seen to write.

    All plain attributes are looked at before and after the first run in each mode.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.owners = [vars(m) for m in modules]
        self.written: list[Place] = []
        self.looked: set[tuple[bool, ...]] = set()

    def now(self) -> Before:
        """As they are, for a call of the stage."""
        training = tuple([own["training"] for own in self.owners])
        if training in self.looked:
            return Before(self, training, self.written)
        places = [
            (own, name) for own in self.owners for name, x in own.items() if isinstance(x, _NUMBERS) and name[:1] != "_"
        ]
        return Before(self, training, places)


class Before:
    """As attributes were when a stage was called; each run of its function begins with them.

    The first run leaves in them what it wrote, later ones leave them alone.
    """

    def __init__(self, of: Attributes, training: tuple[bool, ...], places: list[Place]) -> None:
        self.of, self.training, self.places = of, training, places
        self.values = [own[name] for own, name in places]
        self.ran = False

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The block runs the function of the stage."""
        if not self.ran:
            self.ran = True
            yield
            self._look()
            return
        owners = [(own, "training") for own in self.of.owners]
        places = [*owners, *self.places]
        kept = [own.get(name) for own, name in places]
        _put(places, [*self.training, *self.values])
        try:
            yield
        finally:
            _put(places, kept)

    def _look(self) -> None:
        """Which attributes the first run in this mode wrote."""
        if self.training in self.of.looked:
            return
        written = [
            place for place, value in zip(self.places, self.values, strict=True) if place[0].get(place[1]) is not value
        ]
        known = {(id(own), name) for own, name in self.of.written}
        self.of.written = [*self.of.written, *((own, name) for own, name in written if (id(own), name) not in known)]
        self.of.looked.add(self.training)


def _put(places: list[Place], values: list[Any]) -> None:
    for (own, name), value in zip(places, values, strict=True):
        own[name] = value
