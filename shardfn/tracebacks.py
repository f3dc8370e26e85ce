"""Errors as the caller sees them: with a short message, at the caller's own line.

Tracebacks leave out the package's frames, as JAX's traceback filtering does.
"""

from __future__ import annotations

import dis
import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from shardfn.quoting import MOST, bounded

FOLDS = os.environ.get("SHARDFN_TRACEBACKS", "folded") != "full"
"""Whether tracebacks leave out the package's own frames."""

_BETWEEN = ("torch", "optree", "contextlib", "functools", "concurrent", "threading")  # through which it calls functions
_RAISE = dis.opmap["RAISE_VARARGS"]

F = TypeVar("F", bound=Callable[..., Any])


def api_boundary(f: F) -> F:
    """Wraps a public function, so that its errors end at the caller's line; types and causes stay.

    Messages that the package raises have at most `MOST` characters.
    """

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            message = error.args[0] if len(error.args) == 1 else None
            if isinstance(message, str) and len(message) > MOST and _is_package_frame(_innermost(error.__traceback__)):
                error.args = (bounded(message),)
            if FOLDS:
                _fold(error)
            raise

    return run  # type: ignore[return-value]


def _fold(error: Exception) -> None:
    """Folds the tracebacks of an error and of its causes."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        # Not `__traceback__ = ...`: an exception may be a frozen dataclass, whose attributes cannot be set.
        current.with_traceback(_folded(current))
        pending += [current.__cause__, None if current.__suppress_context__ else current.__context__]


def _folded(error: BaseException) -> TracebackType | None:
    """An error's traceback without the package's own frames, and torch's between them.

    Only if the package raised it to say something, or code that the package called, or an operation of such code that a
    mode of the package runs: what else goes wrong inside of the package, or of torch where the package calls it, keeps
    all frames.
    """
    frames: list[TracebackType] = []
    trace, last, inside, leaves_out, runs = error.__traceback__, None, False, False, False
    while trace is not None:
        runs = last is not None and _runs_operation(last, trace)
        last = trace
        inside = _is_package_frame(trace) or (inside and _package(trace) in _BETWEEN)
        leaves_out = leaves_out or inside
        if not inside:
            frames.append(trace)
        trace = trace.tb_next
    if not leaves_out:
        return error.__traceback__
    if inside and last is not None and not runs and not getattr(error, "_shardfn_folded", False):
        raises = _is_package_frame(last) and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
        if isinstance(error, AssertionError) or not (raises or isinstance(error, Warning)):
            return error.__traceback__
    BaseException.__setattr__(error, "_shardfn_folded", True)  # for the boundaries further out
    folded = None
    for trace in reversed(frames):
        folded = TracebackType(folded, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    return folded


def _runs_operation(caller: TracebackType, called: TracebackType) -> bool:
    """Whether a mode of the package runs the operation there that it was given to look at."""
    operation = caller.tb_frame.f_locals.get("func") if _is_package_frame(caller) else None
    return operation is not None and called.tb_frame.f_locals.get("self") is operation


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _package(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__")).split(".")[0]


def _is_package_frame(trace: TracebackType | None) -> bool:
    """Whether a frame is of this package."""
    return trace is not None and _package(trace) == __name__.split(".")[0]
