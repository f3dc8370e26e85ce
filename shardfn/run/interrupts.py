"""Why a run stops before its last step, and which run may follow one that did, in the same program."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from shardfn.mesh.groups import world_of_thread, worlds

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
MARGIN = 2.0  # seconds for what is not measured
REPEAT = 2.0  # seconds within which a signal comes from several sides: from the scheduler, and from torchrun
_log = logging.getLogger("shardfn")
_imported = time.monotonic()
_within: list[Interrupts] = []  # of this process's main thread, the innermost last
unheard: list[float] = []
"""When a signal came that a run did not need any more: the program's next one ends by it."""


class Interrupts:
    """While the block runs, the first signal asks for an end, and one that comes later does what it did before.

    Signals reach the main thread of a process; a run on another thread leaves them as they are.

    Args:
        limit: seconds from the start of the process until it must have ended; None if there is no such time.
    """

    def __init__(self, limit: float | None) -> None:
        self.end = None if limit is None else process_start() + limit
        self.signalled: float | None = None  # when
        self.cut = False  # whether a run inside of this one was ended early
        self._why = 0
        self._outer: Interrupts | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._outer = _within[-1] if _within else None
            _within.append(self)
            self.signalled = unheard.pop() if unheard else None
            self._before = {number: signal.signal(number, self._asked) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        if self in _within:
            _within.remove(self)

    def leaves(self, why: int) -> None:
        """The run ends, for a reason by its number in `REASONS`; the one around it hears of a signal, or the next."""
        if self._outer is not None:
            self._outer.cut |= why == 2
        elif why == 0 and self.signalled is not None:
            unheard[:] = [self.signalled]

    def _asked(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._outer is not None and self._outer.signalled is None:
            self._outer.signalled = now
        if self.signalled is None:
            self.signalled = now
            name = signal.Signals(number).name
            _log.warning("%s: the run saves and ends; another one, %g s from now, ends it at once", name, REPEAT)
        elif now - self.signalled > REPEAT:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, before in self._before.items():
            if before is not None:  # which Python did not install
                signal.signal(number, before)
        self._before = {}

    def reason(self, needs: float) -> int:
        """Why it should stop now, by its number in `REASONS`. What was said once is never taken back.

        Args:
            needs: seconds that it takes to stop.
        """
        if self.signalled is not None:
            self._why = 2
        elif self._why == 0 and self.end is not None and time.monotonic() + needs + MARGIN > self.end:
            self._why = 1
        return self._why


def seconds_of(limit: float | timedelta | None, saves: bool) -> float | None:
    """A limit in seconds from the start of the process: the one given, or SLURM's end of the job if there is a save.

    Raises:
        TypeError, ValueError: no length of time.
    """
    if limit is None:
        end = os.environ.get("SLURM_JOB_END_TIME", "") if saves else ""
        if not end:
            return None
        if not end.isdigit():
            raise ValueError(f"sf.run.loop: SLURM_JOB_END_TIME={end!r} is no time: unset it, or pass limit=")
        return int(end) - time.time() + time.monotonic() - process_start()
    if isinstance(limit, timedelta):
        limit = limit.total_seconds()
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(f"sf.run.loop: limit={limit!r}; it is seconds, or a timedelta")
    if not limit > 0:
        raise ValueError(f"sf.run.loop: limit={limit!r}; it is more than 0 seconds")
    return float(limit)


def process_start() -> float:
    """When this process began, on the clock of `time.monotonic`."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return _imported
    return time.monotonic() - age


KEY = "run that ended early"  # in what a world has agreed on


def ended(save: Path | None, why: str) -> None:
    """A run with this folder has ended."""
    agreed, mine = world_of_thread().agreed, _whole(save)
    if why != "finished":
        agreed[KEY] = mine, why
    elif agreed.get(KEY, (None, ""))[0] == mine:
        agreed.pop(KEY, None)


def refuse(save: Path | None) -> None:
    """Raises RuntimeError for a run that would keep what it makes of the state that another one has left half trained.

    The one that ended may go on, and so may one that keeps nothing.
    """
    folder, why = world_of_thread().agreed.get(KEY, (None, ""))
    if why and save is not None and _whole(save) != folder:
        raise RuntimeError(
            f"sf.run.loop: the run before this one{f', in {folder},' if folder else ''} has ended early "
            f"(run.ended == {why!r}), and save={str(save)!r} is another run, which would begin from a state that is "
            f"half trained and keep it: end the program where run.ended is not 'finished', and start it again, or let "
            f"the first run finish before"
        )


def forget() -> None:
    """No run has ended early, or was asked to, as in a program that has just begun."""
    unheard.clear()
    for world in worlds():
        world.agreed.pop(KEY, None)


def _whole(save: Path | None) -> str | None:
    return None if save is None else os.path.abspath(save)
