"""What the log of shardfn says."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Messages on this rank while the block runs, as they come."""
    handler, log = _Heard(), logging.getLogger("shardfn")
    log.addHandler(handler)
    try:
        yield handler.said
    finally:
        log.removeHandler(handler)
