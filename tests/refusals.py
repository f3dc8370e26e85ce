"""The messages of calls that raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardfn.checkpoint import CheckpointError


def refused(call: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...] = CheckpointError) -> str:
    """The message of the error that the call raises, which must be of this kind."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def told(call: Callable[..., Any]) -> str:
    """The kind and message of the error that a call raises, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was done"
