"""Why a run stops before its last step, and which run may follow it in the same program."""

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
MARGIN = 2.0  # spare seconds for what is not measured
REPEAT = 2.0  # seconds within which signals count as one: the scheduler and torchrun may both send it
_log = logging.getLogger("shardfn")
_imported = time.monotonic()
_active: list[Interrupts] = []  # on this process's main thread, the innermost last
unheard: list[float] = []
"""Time of a signal that came when a run was finishing anyway: the next run of the program stops because of it."""


class Interrupts:
    """A context in which the first signal requests a stop, and a later one has the effect that it had before.

    Signals reach the main thread of a process; a run on another thread installs no handlers.

    Args:
        limit: seconds from the start of the process until it must have ended; None for no limit.
        save: where the run saves; None if it does not.
    """

    def __init__(self, limit: float | None, save: Path | None = None) -> None:
        self.save = save
        self.end = None if limit is None else process_start() + limit
        self.signaled: float | None = None  # time of the first signal
        self.cut = False  # whether a run nested in this one was stopped early by a signal
        self._why = 0
        self._outer: Interrupts | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._outer = _active[-1] if _active else None
            _active.append(self)
            self.signaled = unheard.pop() if unheard else None
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self.signaled is not None and self.save is not None:
            _log.warning("the run fails before it could save; the same call resumes from what %s has", self.save)
        self._restore()
        if self in _active:
            _active.remove(self)

    def leaves(self, reason: int) -> None:
        """Ends the run for a reason, an index into `REASONS`; passes a signal on to the enclosing run, or the next."""
        if self._outer is not None:
            self._outer.cut |= reason == 2
        elif reason in (0, 3) and self.signaled is not None:
            unheard[:] = [self.signaled]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        time_s = time.monotonic()
        if self._outer is not None and self._outer.signaled is None:
            self._outer.signaled = time_s
        if self.signaled is None:
            self.signaled = time_s
            name = signal.Signals(number).name
            saves = "without saving, as it has no save=" if self.save is None else "and saves, if every rank still can"
            _log.warning(
                "%s: the run stops after this step %s; another one, %g s from now, ends it at once", name, saves, REPEAT
            )
        elif time_s - self.signaled > REPEAT:
            self._restore()
            os.kill(os.getpid(), number)  # again, now with its former effect

    def _restore(self) -> None:
        for number, before in self._before.items():
            if before is not None:  # None if the handler was not installed from Python
                signal.signal(number, before)
        self._before = {}

    def reason(self, needs: float) -> int:
        """Why the run should stop now, as an index into `REASONS`. Once set, a reason to stop remains.

        Args:
            needs: seconds that stopping takes.
        """
        if self.signaled is not None:
            self._why = 2
        elif self._why == 0 and self.end is not None and time.monotonic() + needs + MARGIN > self.end:
            self._why = 1
        return self._why


def seconds_of(limit: float | timedelta | None, saves: bool) -> float | None:
    """The limit in seconds from the start of the process; by default SLURM's end of the job, if the run saves.

    Raises:
        TypeError, ValueError: the limit is not a positive length of time.
    """
    if limit is None:
        end = os.environ.get("SLURM_JOB_END_TIME", "") if saves else ""
        if not end:
            return None
        if not end.isdigit():
            raise ValueError(f"sf.run.loop: SLURM_JOB_END_TIME={end!r} is not a time: unset it, or pass time_limit=")
        return int(end) - time.time() + time.monotonic() - process_start()
    if isinstance(limit, timedelta):
        limit = limit.total_seconds()
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(f"sf.run.loop: time_limit must be seconds or a timedelta, got {limit!r}")
    if not limit > 0:
        raise ValueError(f"sf.run.loop: time_limit must be more than 0 seconds, got {limit!r}")
    return float(limit)


def process_start() -> float:
    """The start of this process on the clock of `time.monotonic`; where unknown, the time of this import."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return _imported
    return time.monotonic() - age


KEY = "run that ended early"  # key in `agreed` of a world


def ended(save: Path | None, reason: str) -> None:
    """Records whether a run that saves to this folder has ended early."""
    agreed, folder = world_of_thread().agreed, _absolute(save)
    if reason not in ("finished", "stopped"):
        agreed[KEY] = folder, reason
    elif agreed.get(KEY, (None, ""))[0] == folder:
        agreed.pop(KEY, None)


def refuse(save: Path | None) -> None:
    """Raises RuntimeError if this run would save results of a state that another run has left half trained.

    The run that ended early may continue, and so may one that saves nothing.
    """
    folder, reason = world_of_thread().agreed.get(KEY, (None, ""))
    if reason and save is not None and _absolute(save) != folder:
        raise RuntimeError(
            f"sf.run.loop: the run before this one{f', in {folder},' if folder else ''} has ended early "
            f"(run.ended == {reason!r}), and save={str(save)!r} would start another run from its half-trained state. "
            f"Finish the first run, or end the program and start it again"
        )


def reset_interrupts() -> None:
    """Forgets that a run has ended early or was signaled, as in a program that has just begun."""
    unheard.clear()
    for world in worlds():
        world.agreed.pop(KEY, None)


def _absolute(save: Path | None) -> str | None:
    return None if save is None else os.path.abspath(save)
