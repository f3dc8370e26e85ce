"""Whose code calls: the user's, this package's, or what of it moves memory that belongs to no value."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Literal

import optree
import torch

Caller = Literal["user", "library", "engine"]

_FOLDERS = (Path(__file__).parents[1], Path(torch.__file__).parent, Path(optree.__file__).parent)
_NOT_USERS = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
_PYTHONS = (contextlib.__file__, functools.__file__, threading.__file__)  # which call on behalf of others
_BACKWARD = tuple(
    os.path.join(*place.split("/"))
    for place in (
        "compat/autograd.py",
        "transforms/autodiff.py",
        "transforms/accumulate.py",
        "transforms/custom_vjp.py",
    )
)
"""Which run a backward pass."""
_FUNCTIONAL = str(_FOLDERS[0].joinpath("collectives", "functional.py"))
_MODELS = tuple(f"{_FOLDERS[0] / room}{os.sep}" for room in ("parallel", "interop", "stages"))
_TORCH = Path(torch.__file__).parent
_MODES = (
    f"{Path(__file__).parent}{os.sep}",
    *(str(_TORCH.joinpath(*place.split("/"))) for place in ("_dynamo/eval_frame.py", "_compile.py")),
    str(_TORCH.joinpath("utils", "_python_dispatch.py")),
    str(_FOLDERS[0].joinpath("compat", "modes.py")),
)
"""Which stand between an op and its caller."""
_STAND_INS = (
    *_NOT_USERS[1:],
    *(f"{_FOLDERS[0] / room}{os.sep}" for room in ("check", "collectives", "compat", "shards", "stages", "transforms")),
)
_OPS = tuple(
    os.path.join(*place.split("/"))
    for place in ("collectives/functional.py", "collectives/ops.py", "compat/dispatch.py")
)
"""Which are ops, whoever calls them."""
_ENGINE = tuple(
    os.path.join(*place.split("/"))
    for place in (
        "stages/ring.py", "stages/residency.py", "stages/reduction.py", "stages/prefetch.py", "stages/compressed.py",
        "stages/activation_offload.py", "collectives/into_buffers.py", "collectives/messages.py",
        "collectives/agree.py",
    )
)  # fmt: skip
"""Which fill and empty memory that belongs to no value of the user's."""
_users: dict[str, bool] = {}
_callers: dict[str, Caller | Literal["torch"]] = {}


def is_users(code: CodeType) -> bool:
    """Whether code is neither of this package nor of torch."""
    file = code.co_filename
    users = _users.get(file)
    if users is None:
        plain = not file.startswith((*_NOT_USERS, "<frozen", "<eval_with_key>"))
        users = _users[file] = plain and file not in _PYTHONS
    return users


def called_by(name: str) -> bool:
    """Whether a function of torch.nn.functional with this name leads to the op that is recorded."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == name and code.co_filename == torch.nn.functional.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def caller() -> Caller:
    """Whose line calls the op that is recorded: the user's; one of this package; or one of what moves its memory.

    Ops of a backward pass are the user's, too, which they differentiate.
    """
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _callers.get(file)
        if kind is None:
            kind = _callers[file] = _kind(file)
        if kind != "torch":
            return kind
        frame = frame.f_back  # type: ignore[assignment]
    return "user"


def stands_in() -> bool:
    """Whether a `detach` that is recorded is one of torch's or of an engine's, which brings the derivative itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_MODES):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_STAND_INS)


def _kind(file: str) -> Caller | Literal["torch"]:
    if file.startswith((*_MODES, *_NOT_USERS[1:], "<frozen")):
        return "torch"
    if not file.startswith(_NOT_USERS[0]):
        return "torch" if file in _PYTHONS else "user"
    place = os.path.relpath(file, _FOLDERS[0])
    if place in _BACKWARD:
        return "user"
    if place in _OPS:
        return "torch"
    return "engine" if place in _ENGINE or place.split(os.sep)[0] in ("mesh", "tiers") else "library"


def who_calls() -> Literal["user", "model", "library"]:
    """Who calls a collective: the user's own code; a function of this package that is a part of models; or another."""
    frame = sys._getframe(1)
    file = frame.f_code.co_filename
    while frame.f_back is not None and file.startswith((*_NOT_USERS[1:], *_MODES, _FUNCTIONAL)):
        frame = frame.f_back
        file = frame.f_code.co_filename
    if not file.startswith(_NOT_USERS):
        return "user"
    return "model" if file.startswith(_MODELS) else "library"
