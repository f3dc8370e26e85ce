"""A folder belongs to one run at a time: the kernel forgets the lock of a process that has ended, however it did."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path

from shardfn.checkpoint.folders import seen
from shardfn.checkpoint.team import CheckpointError

NAME = ".lock"
HERE, ELSEWHERE = 3.0, 100.0  # seconds that a run waits for one on this host to end, and on a host that may be gone
SIZE = 2**12  # bytes of what is said, at most
BUSY = (errno.EACCES, errno.EAGAIN)
LACKING = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # a file system without locks
_log = logging.getLogger("shardfn")
_mine: dict[tuple[int, int, int], bytes] = {}  # by process and file: the kernel would give it its own lock again
_one = threading.Lock()


class Lock:
    """A run's, on the folder of its checkpoints; the first rank has it.

    A record lock, which workers do not inherit. Where the file system has none, the later run takes the folder, and the
    earlier one ends before it writes anything more, since the file no longer says what it has written there.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file: int | None = None
        self._said = b""
        self._refused: OSError | None = None

    def take(self) -> None:
        """Waits a while for another run to end. Where nothing can be written, the folder is only read.

        Raises:
            CheckpointError: another run has the folder.
        """
        began, told = time.monotonic(), False
        try:
            while not self._taken():
                other, here = self._who(self._now())
                if time.monotonic() - began > (HERE if here else ELSEWHERE):
                    raise CheckpointError(
                        f"{self.path.parent} belongs to another run, which has not ended: {other}. Give one of the two "
                        f"another folder, or end that one{'' if here else f'; if its host is gone, delete {self.path}'}"
                    )
                if not told and not here:
                    told = True
                    _log.warning("waiting up to %g s for the run that has %s: %s", ELSEWHERE, self.path.parent, other)
                time.sleep(0.05)
        except OSError as error:
            self._refused = error

    def check(self) -> None:
        """Raises CheckpointError, if another run has taken the folder meanwhile, or it cannot be written to."""
        if self._file is not None and seen(self.path) is None:  # somebody has tidied up
            self.release()
            self.take()
        if self._refused is not None:
            raise CheckpointError(f"{self.path.parent} cannot be written to: {self._refused.strerror}")
        if self._file is None or self._now() != self._said:
            raise CheckpointError(f"{self.path.parent} belongs to another run now: {self._who(self._now())[0]}")

    def release(self) -> None:
        """The folder is free."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError, CheckpointError):  # what is left says nothing to the next run
                if self._there(file) and os.pread(file, SIZE, 0) == self._said:
                    self.path.unlink()
            _mine.pop(_key(os.fstat(file)), None)
            os.close(file)

    def _taken(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _one:
            there = seen(self.path)
            if there is not None and _key(there) in _mine:
                return False
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if _locked(file, self.path) and self._there(file):
                    self._said = _about()
                    os.ftruncate(file, 0)
                    os.pwrite(file, self._said, 0)
                    self._file, _mine[_key(os.fstat(file))] = file, self._said
            finally:
                if self._file is None:
                    os.close(file)
            return self._file is not None

    def _there(self, file: int | None = None) -> bool:
        """Whether the file is still the one of this name."""
        file, there = self._file if file is None else file, seen(self.path)
        return file is not None and there is not None and _key(there) == _key(os.fstat(file))

    def _now(self) -> bytes:
        """What the file says. Where this process has it open, closing it again would give up the lock."""
        if self._file is not None and self._there():
            return os.pread(self._file, SIZE, 0)
        there = seen(self.path)
        try:
            return b"" if there is None else _mine.get(_key(there)) or self.path.read_bytes()
        except FileNotFoundError:  # the other run has ended meanwhile
            return b""

    def _who(self, said: bytes) -> tuple[str, bool]:
        """Whose words these are, and whether that is a process of this host."""
        try:
            about = json.loads(said)
            host = about["host"]
            return f"process {about['pid']} on {host}, since {about['since']}", host == socket.gethostname()
        except (ValueError, KeyError, TypeError):
            return f"{self.path} does not say which", True


def _about() -> bytes:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    about = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "mark": uuid.uuid4().hex}
    return json.dumps(about).encode()


def _key(found: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), found.st_dev, found.st_ino


def _locked(file: int, path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in BUSY:
            return False
        if error.errno not in LACKING:
            raise
        _log.warning("%s: %s: if two runs come to this folder, the earlier one will end", path, error.strerror)
    return True
