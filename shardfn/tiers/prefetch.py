"""How shards come to the device from where they are kept; what is on disk is read before it is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from shardfn.tiers.copy_streams import Arrival, CopyStreams, copy_streams
from shardfn.tiers.tensors import place_of
from shardfn.tiers.transfers import Reading, reading


class DiskPrefetch:
    """What one schedule reads: by where it is, the tensor, which it keeps, and which numbers that held."""

    def __init__(self) -> None:
        self._each: dict[tuple[int, int], tuple[Tensor, int, Reading]] = {}
        self._streams: CopyStreams | None = None  # by which something came since the last step
        self._copies: list[Arrival] = []

    def announce(self, x: Tensor) -> None:
        """A tensor is going to be read: starts that, if it is on disk, and anybody counts its changes."""
        if place_of(x) is None or x.is_inference():
            return
        known = self._each.get(_key(x))
        if known is not None and known[1] == x._version:
            return
        self._drop(x)
        started = reading(x.detach())
        if started is not None:
            self._each[_key(x)] = x, x._version, started

    def take(self, x: Tensor) -> Reading | None:
        """A tensor on its way from disk; None of one that is not there."""
        if place_of(x) is None:
            return None
        found = self._each.get(_key(x))
        if found is not None and not x.is_inference() and found[1] == x._version:
            del self._each[_key(x)]
            return found[2]
        self._drop(x)
        return reading(x)

    def _drop(self, x: Tensor) -> None:
        """What was read of it is not what it holds now."""
        found = self._each.pop(_key(x), None)
        if found is not None:
            found[2].give_up()

    @contextlib.contextmanager
    def arriving(self, tier: str, x: Tensor, device: torch.device) -> Iterator[Tensor]:
        """A shard's numbers in memory, for a block that starts to copy them to a device."""
        coming = self.take(x) if tier == "disk" else None
        arrival: Arrival | None = None
        try:
            if coming is not None:
                coming.wait()
                x = coming.values
            if x.device == device:
                yield x
            else:  # copies go beside what the accelerator computes, and so do the collectives that send them
                self._streams = copy_streams(device)
                with self._streams.bringing() as arrival:
                    self._copies.append(arrival)
                    yield x
        finally:
            if coming is not None:
                coming.give_back(None if arrival is None else arrival.event)

    def copies(self) -> list[Arrival]:
        """What was started to be copied since it was asked the last time."""
        copies, self._copies = self._copies, []
        return copies

    def give_up(self) -> None:
        """Nobody waits any more for what was announced; nor does a copy still read what may be overwritten now."""
        each, self._each = self._each, {}
        for _, _, coming in each.values():
            coming.give_up()
        streams, self._streams = self._streams, None
        if streams is not None:
            streams.settle()


def _key(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.numel()
