"""Locks a run's folder for one run at a time; the kernel drops the lock when its process ends, however it ends."""

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
HERE, ELSEWHERE = 3.0, 100.0  # seconds to wait for a run on this host to end, and on one that may be gone
SIZE = 2**12  # most bytes of the lock file that are read
BUSY = (errno.EACCES, errno.EAGAIN)  # another process holds the lock
LACKING = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # the file system has no locks
_log = logging.getLogger("shardfn")
_held: dict[tuple[int, int, int], bytes] = {}  # by process and file: the kernel lets a process take its own lock again
_guard = threading.Lock()


class Lock:
    """A run's lock on the folder of its checkpoints, held by the first rank.

    It is a POSIX record lock, which worker processes do not inherit. Where the file system has no locks, the later run
    takes the folder, and the earlier one fails before its next write, since the file no longer has its content.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file: int | None = None
        self._written = b""
        self._refused: OSError | None = None

    def take(self) -> None:
        """Takes the lock, waiting a while for another run to end. An OSError is only raised later, by `check`.

        Raises:
            CheckpointError: another run has the folder.
        """
        began, warned = time.monotonic(), False
        try:
            while not self._try():
                other, here = self._owner(self._content())
                if time.monotonic() - began > (HERE if here else ELSEWHERE):
                    raise CheckpointError(
                        f"{self.path.parent} belongs to another run, which has not ended: {other}. Give one of the two "
                        f"another folder, or end that one{'' if here else f'; if its host is gone, delete {self.path}'}"
                    )
                if not warned and not here:
                    warned = True
                    _log.warning("waiting up to %g s for the run that has %s: %s", ELSEWHERE, self.path.parent, other)
                time.sleep(0.05)
        except OSError as error:
            self._refused = error

    def check(self) -> None:
        """Raises CheckpointError if another run has taken the folder since, or if it cannot be written to."""
        # The file may have been deleted, say by a clean-up, and may be deleted again at any time: it is read once.
        while (content := self._content()) != self._written and self._file is not None and seen(self.path) is None:
            self.release()
            self.take()
        if self._refused is not None:
            raise CheckpointError(f"{self.path.parent} cannot be written to: {self._refused.strerror}")
        if self._file is None or content != self._written:
            raise CheckpointError(f"{self.path.parent} belongs to another run now: {self._owner(content)[0]}")

    def release(self) -> None:
        """Releases the lock, and deletes its file if it is still this run's."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError, CheckpointError):  # a file that stays does not hinder the next run
                if self._is_current(file) and os.pread(file, SIZE, 0) == self._written:
                    self.path.unlink()
            _held.pop(_file_key(os.fstat(file)), None)
            os.close(file)

    def _try(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _guard:  # record locks are the process's: its threads are kept apart by `_held`
            status = seen(self.path)
            if status is not None and _file_key(status) in _held:
                return False
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                # The other run may have deleted the file after it was opened here.
                if _try_lock(file, self.path) and self._is_current(file):
                    self._written = _description()
                    os.ftruncate(file, 0)
                    os.pwrite(file, self._written, 0)
                    self._file, _held[_file_key(os.fstat(file))] = file, self._written
            finally:
                if self._file is None:
                    os.close(file)
            return self._file is not None

    def _is_current(self, file: int | None = None) -> bool:
        """Whether `file`, by default the run's open file, is still the one at the path."""
        file, status = self._file if file is None else file, seen(self.path)
        return file is not None and status is not None and _file_key(status) == _file_key(os.fstat(file))

    def _content(self) -> bytes:
        """The content of the lock file.

        Read through the open descriptor if there is one: closing a second one would drop this process's lock.
        """
        if self._file is not None and self._is_current():
            return os.pread(self._file, SIZE, 0)
        status = seen(self.path)
        try:
            return b"" if status is None else _held.get(_file_key(status)) or self.path.read_bytes()
        except FileNotFoundError:  # the other run has ended meanwhile
            return b""

    def _owner(self, content: bytes) -> tuple[str, bool]:
        """Describes the process that wrote this content, and tells whether it is on this host."""
        try:
            facts = json.loads(content)
            host = facts["host"]
            return f"process {facts['pid']} on {host}, since {facts['since']}", host == socket.gethostname()
        except (ValueError, KeyError, TypeError):
            return f"{self.path} does not say which", True


def _description() -> bytes:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "mark": uuid.uuid4().hex}
    return json.dumps(facts).encode()


def _file_key(status: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), status.st_dev, status.st_ino


def _try_lock(file: int, path: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in BUSY:
            return False
        if error.errno not in LACKING:
            raise
        _log.warning("%s: %s: if two runs come to this folder, the earlier one will end", path, error.strerror)
    return True
