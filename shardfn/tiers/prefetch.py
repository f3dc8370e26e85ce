"""How shards get to the device from their tier; those on disk are read before they are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from shardfn.tiers.copy_streams import Arrival, CopyStreams, copy_streams
from shardfn.tiers.tensors import place_of
from shardfn.tiers.transfers import Reading, reading


class DiskPrefetch:
    """Reads of one schedule, by address: the tensor (kept alive: its address stays its own), its version, the read."""

    def __init__(self) -> None:
        self._reads: dict[tuple[int, int], tuple[Tensor, int, Reading]] = {}
        self._streams: CopyStreams | None = None  # set if anything was copied since the last step
        self._copies: list[Arrival] = []

    def announce(self, x: Tensor) -> None:
        """Starts to read a tensor that will be needed, if it is on disk and has a version counter."""
        if place_of(x) is None or x.is_inference():
            return
        earlier = self._reads.get(_key(x))
        if earlier is not None and earlier[1] == x._version:
            return
        self._drop(x)
        started = reading(x.detach())
        if started is not None:
            self._reads[_key(x)] = x, x._version, started

    def take(self, x: Tensor) -> Reading | None:
        """The read of a tensor, started now if it was not announced or has changed since; None if it is not on disk."""
        if place_of(x) is None:
            return None
        started = self._reads.get(_key(x))
        if started is not None and not x.is_inference() and started[1] == x._version:
            del self._reads[_key(x)]
            return started[2]
        self._drop(x)
        return reading(x)

    def _drop(self, x: Tensor) -> None:
        """Gives up a tensor's read, whose values are out of date."""
        started = self._reads.pop(_key(x), None)
        if started is not None:
            started[2].give_up()

    @contextlib.contextmanager
    def arriving(self, tier: str, x: Tensor, device: torch.device) -> Iterator[Tensor]:
        """A shard's values in memory, for a block that starts to copy them to a device."""
        coming = self.take(x) if tier == "disk" else None
        arrival: Arrival | None = None
        try:
            if coming is not None:
                coming.wait()
                x = coming.values
            if x.device == device:
                yield x
            else:  # copies, and collectives that send them, run concurrently with the accelerator's computation
                self._streams = copy_streams(device)
                with self._streams.bringing() as arrival:
                    self._copies.append(arrival)
                    yield x
        finally:
            if coming is not None:
                coming.give_back(None if arrival is None else arrival.event)

    def copies(self) -> list[Arrival]:
        """The copies started since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def give_up(self) -> None:
        """Gives up what was announced, and waits until no copy reads what may be overwritten from now on."""
        reads, self._reads = self._reads, {}
        for _, _, coming in reads.values():
            coming.give_up()
        streams, self._streams = self._streams, None
        if streams is not None:
            streams.settle()


def _key(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.numel()
