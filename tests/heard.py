"""The log messages of shardfn."""

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
    """A list of the messages on this rank, which grows while the block runs."""
    handler, log = _Heard(), logging.getLogger("shardfn")
    log.addHandler(handler)
    try:
        yield handler.said
    finally:
        log.removeHandler(handler)
