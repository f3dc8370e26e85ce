"""Finds the origin of a call: the user's line, the code's owner, and the thread's checked call."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
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

import torch

from shardfn.callers import LIBRARIES, PACKAGE, kind_of
from shardfn.check.bits import digest_of
from shardfn.compat import functorch
from shardfn.quoting import installed


@dataclass(frozen=True)
class Site:
    """A line of code.

    Attributes:
        file: its path.
        line: its number.
        function: qualified name of the function that contains it.
        digest: equal on every rank that runs the same code, even from another folder.
        span: first and last line and column of the expression that is computed, if Python knows them, and if it is
            computed at this very line.
        within: the line of an installed package that computes, if this line only led there.
    """

    file: str
    line: int
    function: str
    digest: int = field(compare=False)
    span: tuple[int, int, int, int] | None = field(default=None, compare=False)
    within: str = ""

    def __str__(self) -> str:
        return f"{_relative_path(self.file)}:{self.line}" + (f" (in {self.within})" if self.within else "")

    @property
    def text(self) -> str:
        """The source of the line; empty if it only leads to the computation."""
        return "" if self.within else linecache.getline(self.file, self.line).strip()

    @property
    def expression(self) -> str | None:
        """The source of the expression that is computed there, if it is short."""
        if self.span is None:
            return None
        first, last, start, end = self.span
        lines = [linecache.getline(self.file, n).encode() for n in range(first, last + 1)]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][start:]
        source = " ".join(b" ".join(lines).decode(errors="replace").split())
        return source if 0 < len(source) <= _SHORT else None

    @property
    def first_argument(self) -> str | None:
        """The source of the first argument of the function that is called there."""
        parsed = self._parsed()
        return ast.unparse(parsed.args[0]) if isinstance(parsed, ast.Call) and parsed.args else None

    @property
    def value_source(self) -> str | None:
        """The source of the called function's first argument, or of the called method's object."""
        parsed = self._parsed()
        if not isinstance(parsed, ast.Call):
            return None
        if parsed.args and not isinstance(parsed.args[0], (ast.Constant, ast.UnaryOp)):
            return ast.unparse(parsed.args[0])
        return ast.unparse(parsed.func.value) if isinstance(parsed.func, ast.Attribute) else None

    @property
    def sides(self) -> tuple[str, str] | None:
        """The source of the left and right operand of the binary operation there."""
        parsed = self._parsed()
        return (ast.unparse(parsed.left), ast.unparse(parsed.right)) if isinstance(parsed, ast.BinOp) else None

    @property
    def divisor(self) -> str | None:
        """The source of the divisor of the division there."""
        parsed = self._parsed()
        divides = isinstance(parsed, ast.BinOp) and isinstance(parsed.op, ast.Div)
        return ast.unparse(parsed.right) if isinstance(parsed, ast.BinOp) and divides else None

    def spelled(self, path: str) -> str:
        """Returns the line's spelling of a path, such as `p['w']` for `params['block']['w']`."""
        last = (re.findall(r"\w+", path) or [path])[-1]
        ends = [node for node in ast.walk(self._statement()) if _last_key(node) == last]
        written = [ast.unparse(node) for node in ends]
        return written[0] if len(set(written)) == 1 and path not in written else path

    @property
    def target(self) -> str | None:
        """The source of the only target to which the line assigns, if it does only that."""
        body = self._statement().body
        if len(body) != 1 or not isinstance(body[0], ast.Assign) or len(body[0].targets) != 1:
            return None
        target, is_lambda = body[0].targets[0], isinstance(body[0].value, ast.Lambda)
        assigns = isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)) and not is_lambda
        return ast.unparse(target) if assigns else None

    def _parsed(self) -> ast.expr | None:
        """Parses the expression that is computed there."""
        try:
            return _parse(self.expression or "", "eval").body
        except SyntaxError:
            return None

    def _statement(self) -> ast.Module:
        """Parses the line by itself; an empty module if it is part of a longer statement."""
        try:
            return _parse(self.text.split("#")[0].strip(), "exec")
        except SyntaxError:
            return ast.Module([], [])


def _parse(source: str, mode: Literal["eval", "exec"]) -> Any:
    """Parses in one go: Python 3.11 has one count of a tree's depth for all threads, and fails where another parses.

    Nothing but a collection lets another thread run meanwhile.
    """
    with _PARSING:
        collected = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(source, mode=mode)
        finally:
            if collected:
                gc.enable()


_PARSING = threading.Lock()
_SHORT = 80  # most characters of source that a message quotes
# With the files: equal lines give equal code.
_sites: dict[tuple[CodeType, str, int, CodeType, str, int], Site] = {}


def callsite() -> Site | None:
    """Returns the user's line that leads here, outside this package and torch; None on one of autograd's own threads.

    Ops in the forward of a custom autograd function belong to the line that calls it, and ops of an installed package
    to the line of the user that leads there, if any does.
    """
    frame: FrameType | None = sys._getframe(1)
    inner = None
    while frame is not None:
        if kind_of(frame.f_code.co_filename) not in ("package", "between"):
            inner = None if functorch.is_forward(frame.f_code) else inner or frame
        elif inner is not None:
            break
        frame = frame.f_back
    if inner is None:
        return None
    outer: FrameType | None = inner
    while outer is not None and kind_of(outer.f_code.co_filename) != "user":
        outer = outer.f_back
    return _callsite(*_instruction_of(inner), *_instruction_of(outer or inner))


def _instruction_of(frame: FrameType) -> tuple[CodeType, int, int]:
    return frame.f_code, frame.f_lasti, frame.f_lineno


def _callsite(code: CodeType, offset: int, line: int, outer: CodeType, outer_offset: int, outer_line: int) -> Site:
    """Returns the site of an instruction; `outer` is the user's instruction that led there."""
    key = (code, code.co_filename, offset, outer, outer.co_filename, outer_offset)
    site = _sites.get(key)
    if site is None:
        # Without the folder, which may differ between ranks.
        text = f"{os.path.basename(code.co_filename)}:{code.co_qualname}:{line}".encode()
        direct = outer is code
        library_line = "" if direct else f"{installed(code.co_filename)}:{line}"
        span = _span(code, offset) if direct else None
        site = _sites[key] = Site(outer.co_filename, outer_line, outer.co_qualname, digest_of(text), span, library_line)
    return site


def _last_key(node: ast.AST) -> str | None:
    """Returns the last name or key of an expression that reaches into a tree."""
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


def _relative_path(path: str) -> str:
    try:
        short = os.path.relpath(path)
    except ValueError:  # another drive
        return path
    return path if short.startswith("..") else short


def _native(*places: str) -> tuple[str, ...]:
    """Writes paths as this system does."""
    return tuple(os.path.join(*place.split("/")) for place in places)


Caller = Literal["user", "library", "engine"]

_BACKWARD = _native(
    "compat/autograd.py", "transforms/autodiff.py", "transforms/accumulate.py", "transforms/custom_vjp.py"
)
"""Files that run a backward pass."""
_FUNCTIONAL = PACKAGE + _native("collectives/functional.py")[0]
_MODELS = tuple(f"{PACKAGE}{room}{os.sep}" for room in ("parallel", "interop", "stages", "forward_mode"))
_TORCH = Path(torch.__file__).parent
_MODES = (
    f"{Path(__file__).parent}{os.sep}",
    *(str(_TORCH.joinpath(*place.split("/"))) for place in ("_dynamo/eval_frame.py", "_compile.py")),
    str(_TORCH.joinpath("utils", "_python_dispatch.py")),
    PACKAGE + _native("compat/modes.py")[0],
)
"""Files that stand between an op and its caller."""
_CALLING = "check", "collectives", "compat", "compiled", "forward_mode", "shards", "stages", "transforms"
_STAND_INS = (*LIBRARIES, *(f"{PACKAGE}{room}{os.sep}" for room in _CALLING))
_OPS = _native("collectives/functional.py", "collectives/ops.py", "compat/dispatch.py")
"""Files that implement ops, whoever calls them."""
_ENGINE = _native(
    "stages/reduction.py", "collectives/compressed.py", "tiers/activations.py", "collectives/into_buffers.py",
    "collectives/messages.py", "collectives/agree.py",
)  # fmt: skip
"""Files that fill and free memory that belongs to none of the user's values."""


def called_by(name: str) -> bool:
    """Whether a function of torch.nn.functional with this name leads to the recorded op."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == name and code.co_filename == torch.nn.functional.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def caller() -> Caller:
    """Returns the caller of the recorded op: the user, this package, or its memory engine.

    Ops of a backward pass count as the user's, since they differentiate the user's ops.
    """
    frame = sys._getframe(2)
    while frame is not None:
        kind = _frame_kind(frame.f_code.co_filename)
        if kind != "torch":
            return kind
        frame = frame.f_back  # type: ignore[assignment]
    return "user"


def stands_in() -> bool:
    """Whether a recorded `detach` is called by torch or an engine, which supplies the derivative itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_MODES):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_STAND_INS)


@functools.cache
def _frame_kind(file: str) -> Caller | Literal["torch"]:
    if file.startswith("<eval_with_key>"):  # a module that torch.fx has traced
        return "user"
    if file.startswith(_MODES) or (kind := kind_of(file)) == "between":
        return "torch"
    if kind != "package":
        return "user"
    place = file.removeprefix(PACKAGE)
    if place in _BACKWARD:
        return "user"
    if place in _OPS:
        return "torch"
    return "engine" if place in _ENGINE or place.split(os.sep)[0] in ("mesh", "tiers") else "library"


def who_calls() -> Literal["user", "model", "library"]:
    """Returns the caller of a collective: the user, this package's model code, or its other code."""
    frame = sys._getframe(1)
    file = frame.f_code.co_filename
    while frame.f_back is not None and file.startswith((*LIBRARIES, *_MODES, _FUNCTIONAL)):
        frame = frame.f_back
        file = frame.f_code.co_filename
    if not file.startswith((PACKAGE, *LIBRARIES)):
        return "user"
    return "model" if file.startswith(_MODELS) else "library"


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.recorder: Any = None
        self.paused = 0


thread = _OfThread()
active = [0]  # number of recorders in this process, checked first because it is cheap


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A context inside which nothing is recorded."""
    thread.paused += 1
    try:
        yield
    finally:
        thread.paused -= 1


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A context inside which nothing is recorded, differentiated or transformed."""
    with paused(), functorch.outside_transforms(), torch.no_grad():
        yield
