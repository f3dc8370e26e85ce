"""Source locations of operations: the pass, the part of the package, and the line.

A location is read from the stack of calls, up to where a backward pass began. In one, the line is that of the operation
whose derivative is computed.
"""

from __future__ import annotations

import pathlib
import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from shardfn.callers import MODELS, PACKAGE, kind_of
from shardfn.compat import autograd
from shardfn.compat.flops import operation_number

_UNSEEN = ("simulated/", "plan/", "testing/", "compat/modes.py")
# What part of the package makes memory for what; a folder or a file of it. The first that is on the stack decides.
_PARTS = {
    "stages/gather.py": "gathered",
    "stages/gather_stream.py": "gathered",
    "stages/reduction.py": "reducing",
    "collectives/compressed.py": "reducing",
    "tiers/activations.py": "activations",
    "optim/": "update",
}


_AGAIN = ("stages/recompute.py second", "forward_mode/paired_call.py run_again")
_PASSES = {"parallel/pipeline.py _forward": "forward", "parallel/pipeline.py _backward": "backward"}


class SourceLocation(NamedTuple):
    """The location at which an operation is issued.

    Attributes:
        phase: `"forward"`, `"backward"`, `"recompute"` or `"update"`.
        part: `"gathered"`, `"reducing"`, `"activations"` or `"update"` if the package's stages or optimizers issue it
            for themselves; otherwise empty.
        where: `file:line` of the user's code.
    """

    phase: str
    part: str
    where: str


class _CodeOrigin(NamedTuple):
    """The origin of a frame's code."""

    kind: str  # "user", "package" or "library"
    part: str
    name: str


class LocationFinder:
    """Finds the source locations of operations.

    Attributes:
        differentiated: whether a backward pass has run since the step began.
    """

    def __init__(self) -> None:
        self.differentiated = False
        self._codes: dict[CodeType, _CodeOrigin] = {}
        self._lines: dict[int, str] = {}  # by the number of the operation that autograd records

    def current_location(self, stage: str) -> SourceLocation:
        """Returns the location of the operation that is issued now, for this stage."""
        part, where, phase = "", "", ""
        user = False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = self._codes.get(frame.f_code) or self._origin_of(frame.f_code)
            if code.kind == "user":
                if not user:
                    where, user = f"{code.name}:{frame.f_lineno}", True
            elif code.kind == "package":
                if not user and not part:
                    part = code.part
                if code.part == "update":
                    phase = "update"
                elif code.name in _AGAIN:
                    phase = phase or "recompute"
                elif code.name in _PASSES:
                    phase = phase or _PASSES[code.name]
            elif code.name == "unpack_hook":  # of torch.utils.checkpoint
                phase = phase or "recompute"
            elif code.name == "_engine_run_backward":
                break
            frame = frame.f_back
        inside = autograd.inside_backward()
        self.differentiated |= inside
        return SourceLocation(phase or self._phase(inside, stage), part, self._line(where, inside, phase))

    def asks(self) -> str:
        """Returns the line of the user's code that issues this; empty if the package does so for itself."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = self._codes.get(frame.f_code) or self._origin_of(frame.f_code)
            if code.kind != "library":
                return f"{code.name}:{frame.f_lineno}" if code.kind == "user" else ""
            frame = frame.f_back
        return ""

    def _phase(self, inside: bool, stage: str) -> str:
        if inside:
            return "backward"
        # What is neither recorded nor a stage's, after a backward pass, uses the gradients.
        return "update" if self.differentiated and not stage and not torch.is_grad_enabled() else "forward"

    def _line(self, where: str, inside: bool, phase: str) -> str:
        backward = inside and phase != "recompute"
        number = operation_number(backward)
        if backward:
            return self._lines.get(number, where)
        if where and number >= 0:
            self._lines[number] = where
        return where

    def _origin_of(self, code: CodeType) -> _CodeOrigin:
        file = code.co_filename
        owner = "user" if file.startswith(MODELS) else kind_of(file)
        if owner == "package":
            name = file.removeprefix(PACKAGE)
            parts = [part for start, part in _PARTS.items() if name.startswith(start)]
            kind = "library" if name.startswith(_UNSEEN) else "package"
            origin = _CodeOrigin(kind, parts[0] if parts else "", f"{name} {code.co_name}")
        elif owner in ("between", "python"):
            name = code.co_name if file.endswith(("utils/checkpoint.py", "autograd/graph.py")) else ""
            origin = _CodeOrigin("library", "", name)
        else:
            origin = _CodeOrigin("user", "", pathlib.PurePath(file).name)
        self._codes[code] = origin
        return origin
