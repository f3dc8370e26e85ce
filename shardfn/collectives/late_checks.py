"""Deferred checks of values on a device, made on the host without waiting for the device.

A few bytes are copied to pinned memory. Later stage calls test whether the copies have arrived, and check them. So an
error belongs to a call made shortly before. A check on the device (`torch._assert_async`) would end the CUDA context of
each rank on which it fails; and after a collective was aborted, it would read data that never arrived. The checks of an
aborted attempt are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives.capturing import capturing
from shardfn.mesh.groups import world_of_thread
from shardfn.mesh.lanes import lane

ROOM = 512  # bytes of one check
_ROWS = 64  # checks that share a page of pinned memory, and its event

Wrong = Callable[[Tensor], str | None]
"""Says what is wrong with a tensor on the host; None if nothing is."""


class _PinnedRows:
    """Rows of pinned memory, into which bytes are copied on one stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.event: Any = None
        with torch.inference_mode(False), torch.no_grad():
            self.rows = torch.empty(_ROWS, ROOM, dtype=torch.uint8, pin_memory=True, device="cpu")
        self.checks: list[tuple[Tensor, Wrong]] = []

    def close(self) -> None:
        self.event = self.stream.record_event()


class LateChecks:
    """The checks of one lane that have not been read."""

    def __init__(self) -> None:
        self.pages: deque[_PinnedRows] = deque()  # closed, to be read once their event has passed
        self.open: dict[Any, _PinnedRows] = {}  # by stream

    def add(self, x: Tensor, wrong: Wrong) -> None:
        """Starts to copy `x`, of at most `ROOM` bytes, to the host."""
        stream = torch.get_device_module(x.device).current_stream(x.device)
        page = self.open.get(stream)
        if page is None:
            page = self.open[stream] = _PinnedRows(stream)
        row = page.rows[len(page.checks)][: x.nbytes].view(x.dtype).view(x.shape)
        row.copy_(x, non_blocking=True)
        page.checks.append((row, wrong))
        if len(page.checks) == _ROWS:
            self._close(stream)

    def close(self) -> None:
        """Ends the pages that are open, so that they can be read once the device has got this far."""
        for stream in list(self.open):
            self._close(stream)

    def _close(self, stream: Any) -> None:
        page = self.open.pop(stream)
        page.close()
        self.pages.append(page)

    def read(self, wait: bool = False) -> None:
        """Runs the checks whose data has arrived, or with `wait` all of them.

        Raises:
            RuntimeError: something is wrong with it.
        """
        if wait:
            self.close()
        while self.pages:
            event = self.pages[0].event
            if not event.query():
                if not wait:
                    return
                event.synchronize()
            for row, wrong in self.pages.popleft().checks:
                if message := wrong(row):
                    self.pages.clear()
                    self.open.clear()
                    raise RuntimeError(f"{message} (found when the device had got there: a few calls later)")


def late_checks() -> LateChecks:
    """The unread checks of this thread's lane, shared by all its threads."""
    return world_of_thread().agreed.setdefault(f"late checks {lane()}", LateChecks())


def drop_checks() -> None:
    """Drops all checks of this lane, whose data may never have arrived."""
    world_of_thread().agreed.pop(f"late checks {lane()}", None)


def poll_checks(device: torch.device, wait: bool = False) -> None:
    """Runs the checks of a device whose data has arrived, as `LateChecks.read`."""
    if device.type != "cpu":
        late_checks().read(wait)


def after_replay(late: Sequence[tuple[Tensor, Wrong]]) -> None:
    """Adds the checks of a captured step that was replayed."""
    checks = late_checks()
    for x, wrong in late:
        checks.add(x, wrong)
    if late:
        checks.close()


def check(x: Tensor, wrong: Wrong) -> None:
    """Raises RuntimeError with what `wrong` says of `x`: at once for a tensor on the CPU, otherwise at a later call.

    A captured step is not checked again: it always does what was checked when it ran before.
    """
    if capturing() is not None:
        return
    if x.device.type != "cpu":
        late_checks().add(x, wrong)
    elif message := wrong(x):
        raise RuntimeError(message)
