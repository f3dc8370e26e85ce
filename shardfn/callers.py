"""Finds the user's line and function in the call stack, for error messages and warnings."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import optree
import torch

from shardfn.quoting import installed

Kind = Literal["package", "between", "python", "installed", "user"]

PACKAGE = f"{Path(__file__).parent}{os.sep}"
MODELS = f"{PACKAGE}shapes{os.sep}"  # known models, which a plan takes for the user's
LIBRARIES = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (torch, optree))
UNKNOWN = "an unknown line"

_CALLING = frozenset(str(module.__file__) for module in (contextlib, functools, threading))  # on behalf of others
_PYTHON = f"{Path(str(threading.__file__)).parent}{os.sep}"  # as a rule it has the folder of packages, too
_LOOPS = f"{PACKAGE}run"


@functools.cache
def kind_of(file: str) -> Kind:
    """The owner of a source file's code.

    Returns:
        `"package"` for shardfn; `"between"` for torch and modules that call user code, such as `contextlib`; `"python"`
        for the rest of the standard library; `"installed"` for other packages; otherwise `"user"`.
    """
    if file.startswith(PACKAGE):
        return "package"
    if file.startswith((*LIBRARIES, "<frozen", "<eval_with_key>")) or file in _CALLING:
        return "between"
    if file.startswith(_PYTHON) and "-packages" not in file[len(_PYTHON) :]:
        return "python"
    return "installed" if installed(file) else "user"


def caller() -> str:
    """The innermost line of the user; in backward, the line that called backward."""
    return _users_line(_frame_lines(sys._getframe(1)))


def of_thread(thread: int) -> str:
    """The innermost line of the user on a thread at present; empty if there is none."""
    line = _users_line(_frame_lines(sys._current_frames().get(thread)))
    return "" if line == UNKNOWN else line


def raised_at(error: BaseException) -> str:
    """The innermost line of the user that an error passed through."""
    lines, traceback = list[tuple[str, int]](), error.__traceback__
    while traceback is not None:
        lines.insert(0, (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _users_line(lines)


def api_name(inner: str) -> str:
    """The name of the shardfn function that the user's line calls, for messages from functions inside it.

    Args:
        inner: the name of the inner function; it is returned if it is no plain name, or if the user's line calls no
            public function by name.
    """
    if torch.compiler.is_compiling() or not inner.isidentifier():
        return inner
    names, frame = list[str](), sys._getframe(1)
    while (kind := kind_of(frame.f_code.co_filename)) != "user":
        if kind == "package" and "<locals>" not in frame.f_code.co_qualname:
            names.append(frame.f_code.co_qualname)
        if frame.f_back is None:
            return inner
        frame = frame.f_back
    name = names[-1].replace("Functional.", "model.") if names else "_"
    return inner if re.search(r"(^|\.)_|[A-Z]", name) else name


def warned(f: Callable[..., Any]) -> tuple[str, int, dict[str, Any]]:
    """The location for a warning about a call of `f`: file, line, and that module's globals.

    It is the user's line that calls `f`; or the line that defines `f` if shardfn calls it, as a loop calls its step.
    """
    frame, folders = sys._getframe(1), set()
    while frame.f_back is not None and kind_of(frame.f_code.co_filename) != "user":
        folders.add(os.path.dirname(frame.f_code.co_filename))
        frame = frame.f_back
    code = getattr(inspect.unwrap(f), "__code__", None)
    if _LOOPS in folders and code is not None and kind_of(code.co_filename) == "user":
        return code.co_filename, code.co_firstlineno, inspect.unwrap(f).__globals__
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals


def _frame_lines(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _users_line(lines: Iterable[tuple[str, int]]) -> str:
    """The innermost of these lines that is the user's, with the line of another package that it led to, if any."""
    within = ""
    for file, number in lines:
        kind = kind_of(file)
        if kind == "user":
            return f"{file}:{number}" + (f" (in {within})" if within else "")
        if kind in ("python", "installed"):
            within = within or f"{installed(file)}:{number}"
    return within or UNKNOWN
