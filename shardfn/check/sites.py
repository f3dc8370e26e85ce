"""Where in the user's own code something was called."""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import linecache
import os
import re
import sys
from dataclasses import dataclass, field
from types import CodeType, FrameType

import torch

from shardfn.check.frames import is_users


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
        try:
            parsed = ast.parse(self.expression or "", mode="eval").body
        except SyntaxError:
            return None
        return ast.unparse(parsed.args[0]) if isinstance(parsed, ast.Call) and parsed.args else None

    @property
    def of(self) -> str | None:
        """What a function or a method that is called there takes its values from, as it is written."""
        try:
            parsed = ast.parse(self.expression or "", mode="eval").body
        except SyntaxError:
            return None
        if not isinstance(parsed, ast.Call):
            return None
        if parsed.args and not isinstance(parsed.args[0], (ast.Constant, ast.UnaryOp)):
            return ast.unparse(parsed.args[0])
        return ast.unparse(parsed.func.value) if isinstance(parsed.func, ast.Attribute) else None

    @property
    def sides(self) -> tuple[str, str] | None:
        """What is added, subtracted or divided there, left and right, as it is written."""
        try:
            parsed = ast.parse(self.expression or "", mode="eval").body
        except SyntaxError:
            return None
        return (ast.unparse(parsed.left), ast.unparse(parsed.right)) if isinstance(parsed, ast.BinOp) else None

    @property
    def divisor(self) -> str | None:
        """What is divided by there, as it is written."""
        try:
            parsed = ast.parse(self.expression or "", mode="eval").body
        except SyntaxError:
            return None
        divides = isinstance(parsed, ast.BinOp) and isinstance(parsed.op, ast.Div)
        return ast.unparse(parsed.right) if isinstance(parsed, ast.BinOp) and divides else None

    def spelled(self, path: str) -> str:
        """How that line writes a value of which the path ends alike: `p['w']` for `params['block']['w']`."""
        try:
            parsed = ast.parse(self.text.split("#")[0].strip())
        except SyntaxError:
            return path
        last = (re.findall(r"\w+", path) or [path])[-1]
        ends = [node for node in ast.walk(parsed) if _end(node) == last]
        written = [ast.unparse(node) for node in ends]
        return written[0] if len(set(written)) == 1 and path not in written else path

    @property
    def target(self) -> str | None:
        """The name that the line gives to what it computes, if it does only that."""
        try:
            parsed = ast.parse(self.text.split("#")[0].strip())
        except SyntaxError:
            return None
        if len(parsed.body) == 1 and isinstance(parsed.body[0], ast.Assign) and len(parsed.body[0].targets) == 1:
            target, later = parsed.body[0].targets[0], isinstance(parsed.body[0].value, ast.Lambda)
            known = isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)) and not later
            return ast.unparse(target) if known else None
        return None


_SHORT = 80  # characters that a message quotes
_APPLY = inspect.unwrap(torch.autograd.Function.apply).__code__
_sites: dict[tuple[CodeType, str, int], Site] = {}  # code is equal to that of another file with the same lines


def here() -> Site | None:
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
    return None if found is None else _site(found.f_code, found.f_lasti, found.f_lineno)


def _site(code: CodeType, instruction: int, line: int) -> Site:
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
