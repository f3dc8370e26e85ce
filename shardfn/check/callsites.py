"""Where a call comes from: the line of the user's, whose code it is, and which checked call runs on the thread."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import itertools
import linecache
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import optree
import torch

from shardfn.compat import functorch


@dataclass(frozen=True)
class Site:
    """A line of code.

    Attributes:
        file: its path.
        line: its number.
        function: what it is in.
        digest: the same on every rank that runs the same code, from another folder perhaps.
        span: lines and columns of what is computed, from and to, where Python knows.
    """

    file: str
    line: int
    function: str
    digest: int = field(compare=False)
    span: tuple[int, int, int, int] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line}"

    @property
    def text(self) -> str:
        """What stands there."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def expression(self) -> str | None:
        """What is computed there, as it is written, if that is short."""
        if self.span is None:
            return None
        first, last, start, end = self.span
        lines = [linecache.getline(self.file, n).encode() for n in range(first, last + 1)]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][start:]
        found = " ".join(b" ".join(lines).decode(errors="replace").split())
        return found if 0 < len(found) <= _SHORT else None

    @property
    def given(self) -> str | None:
        """What the function that is called there is given first, as it is written."""
        parsed = self._parsed()
        return ast.unparse(parsed.args[0]) if isinstance(parsed, ast.Call) and parsed.args else None

    @property
    def of(self) -> str | None:
        """What a function or a method that is called there takes its values from, as it is written."""
        parsed = self._parsed()
        if not isinstance(parsed, ast.Call):
            return None
        if parsed.args and not isinstance(parsed.args[0], (ast.Constant, ast.UnaryOp)):
            return ast.unparse(parsed.args[0])
        return ast.unparse(parsed.func.value) if isinstance(parsed.func, ast.Attribute) else None

    @property
    def sides(self) -> tuple[str, str] | None:
        """What is added, subtracted or divided there, left and right, as it is written."""
        parsed = self._parsed()
        return (ast.unparse(parsed.left), ast.unparse(parsed.right)) if isinstance(parsed, ast.BinOp) else None

    @property
    def divisor(self) -> str | None:
        """What is divided by there, as it is written."""
        parsed = self._parsed()
        divides = isinstance(parsed, ast.BinOp) and isinstance(parsed.op, ast.Div)
        return ast.unparse(parsed.right) if isinstance(parsed, ast.BinOp) and divides else None

    def spelled(self, path: str) -> str:
        """How that line writes a value of which the path ends alike: `p['w']` for `params['block']['w']`."""
        last = (re.findall(r"\w+", path) or [path])[-1]
        ends = [node for node in ast.walk(self._statement()) if _end(node) == last]
        written = [ast.unparse(node) for node in ends]
        return written[0] if len(set(written)) == 1 and path not in written else path

    @property
    def target(self) -> str | None:
        """The name that the line gives to what it computes, if it does only that."""
        body = self._statement().body
        if len(body) != 1 or not isinstance(body[0], ast.Assign) or len(body[0].targets) != 1:
            return None
        target, later = body[0].targets[0], isinstance(body[0].value, ast.Lambda)
        named = isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)) and not later
        return ast.unparse(target) if named else None

    def _parsed(self) -> ast.expr | None:
        """The expression that is computed there."""
        try:
            return ast.parse(self.expression or "", mode="eval").body
        except SyntaxError:
            return None

    def _statement(self) -> ast.Module:
        """The line by itself; empty where it is a part of a longer statement."""
        try:
            return ast.parse(self.text.split("#")[0].strip())
        except SyntaxError:
            return ast.Module([], [])


_SHORT = 80  # characters that a message quotes
_APPLY = inspect.unwrap(torch.autograd.Function.apply).__code__
_sites: dict[tuple[CodeType, str, int], Site] = {}  # code is equal to that of another file with the same lines


def callsite() -> Site | None:
    """The line outside of this package and of torch that leads here; None where a thread of autograd's own runs.

    What the forward of a custom autograd function does, the line does that calls it.
    """
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if is_users(frame.f_code):
            found = frame if found is None else found
        elif frame.f_code is _APPLY:
            found = None
        elif found is not None:
            break
        frame = frame.f_back
    return None if found is None else _callsite(found.f_code, found.f_lasti, found.f_lineno)


def _callsite(code: CodeType, instruction: int, line: int) -> Site:
    place = (code, code.co_filename, instruction)
    found = _sites.get(place)
    if found is None:
        # Without the folder, which may be each rank's own.
        said = f"{os.path.basename(code.co_filename)}:{code.co_qualname}:{line}".encode()
        digest = int.from_bytes(hashlib.blake2b(said, digest_size=7).digest(), "big")
        span = _span(code, instruction)
        found = _sites[place] = Site(code.co_filename, line, code.co_qualname, digest, span)
    return found


def _end(node: ast.AST) -> str | None:
    """The last name or key of a value in a tree."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return None


def _span(code: CodeType, instruction: int) -> tuple[int, int, int, int] | None:
    first, last, start, end = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if first is None or last is None or start is None or end is None:
        return None
    return first, last, start, end


def _short(path: str) -> str:
    try:
        short = os.path.relpath(path)
    except ValueError:  # another drive
        return path
    return path if short.startswith("..") else short


def _native(*places: str) -> tuple[str, ...]:
    """Paths as this system writes them."""
    return tuple(os.path.join(*place.split("/")) for place in places)


Caller = Literal["user", "library", "engine"]

_FOLDERS = (Path(__file__).parents[1], Path(torch.__file__).parent, Path(optree.__file__).parent)
_NOT_USERS = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
_PYTHONS = (contextlib.__file__, functools.__file__, threading.__file__)  # which call on behalf of others
_BACKWARD = _native(
    "compat/autograd.py", "transforms/autodiff.py", "transforms/accumulate.py", "transforms/custom_vjp.py"
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
_OPS = _native("collectives/functional.py", "collectives/ops.py", "compat/dispatch.py")
"""Which are ops, whoever calls them."""
_ENGINE = _native(
    "stages/ring.py", "stages/residency.py", "stages/reduction.py", "stages/prefetch.py", "stages/compressed.py",
    "stages/activation_offload.py", "collectives/into_buffers.py", "collectives/messages.py",
    "collectives/agree.py",
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


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.recorder: Any = None
        self.paused = 0


thread = _OfThread()
active = [0]  # recorders in this process; looked at before anything else is


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Nothing inside is recorded."""
    thread.paused += 1
    try:
        yield
    finally:
        thread.paused -= 1


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Nothing inside is recorded, differentiated, or part of a transform."""
    with paused(), functorch.outside_transforms(), torch.no_grad():
        yield
