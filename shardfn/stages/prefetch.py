"""The order of stages that `layers` announces."""

from __future__ import annotations

from torch import Tensor

from shardfn.shards.layout import Layout

Group = tuple[tuple[Layout, ...], tuple[Tensor, ...]]  # the shards of one stage


class PrefetchOrder:
    """The shards of stages in the order in which they will be used."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups, self.at = groups, 0
        self.places: dict[int, list[int]] = {}
        for i, (_, shards) in enumerate(groups):
            self.places.setdefault(id(shards[0]), []).append(i)

    def after(self, shard: Tensor, count: int) -> list[Group] | None:
        """The next `count` stages after the one with this first shard; None if it is not in the order."""
        places = self.places.get(id(shard))
        if places is None:
            return None
        self.at = next((i for i in places if i >= self.at), places[0]) + 1  # a shard may occur several times
        return self.groups[self.at : self.at + count]
