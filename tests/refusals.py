"""What calls say that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardfn.checkpoint import CheckpointError


def refused(call: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...] = CheckpointError) -> str:
    """The message of an error of this kind, which the call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def told(call: Callable[[], Any]) -> str:
    """The error that a call raises, with its kind."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was done"
