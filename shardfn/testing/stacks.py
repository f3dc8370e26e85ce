"""The stacks of a rank's threads, and the line at which the user's function is."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_HERE = str(Path(__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep

_MAIN = "main thread 0x{:016x}\n"
_HEADER = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    name: str

    @property
    def place(self) -> str:
        """File name and line."""
        return f"{os.path.basename(self.file)}:{self.line}"


def record_stacks(descriptor: int) -> None:
    """Makes this process write its stacks to a file on SIGUSR1 and when it crashes. Call it on the main thread."""
    os.write(descriptor, _MAIN.format(threading.get_ident()).encode())
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR1, descriptor)


def parse_stacks(text: str) -> tuple[list[Frame], str]:
    """The main thread's frames in such a file, innermost first; and a text of all stacks in it."""
    first, _, rest = text.partition("\n")
    # One for each thread, and one for anything before the first.
    parts = re.split(r"^(?=(?:Current t|T)hread 0x)", rest, flags=re.M)
    sections = [part.rstrip() for part in parts if part.strip()]
    main = next((s for s in sections if _thread(s) and first.endswith(_thread(s))), "")
    lines = filter(None, map(_FRAME.match, main.splitlines()))
    frames = _within_call(Frame(line[1], int(line[2]) if line[2].isdigit() else 0, line[3]) for line in lines)
    other_stacks = [section for section in sections if section is not main]
    return frames, "\n".join(filter(None, [_render(frames), *other_stacks]))


def live(thread: int) -> tuple[list[Frame], str]:
    """The frames of a thread of this process, innermost first; and a text of them."""
    top = sys._current_frames().get(thread)
    if top is None:
        return [], ""
    summary = traceback.extract_stack(top)
    frames = _within_call(Frame(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(summary))
    return frames, _render(frames)


def where(frames: Sequence[Frame]) -> str:
    """One line: the collective a rank is in, and the user's line that called it."""
    user = next((i for i, frame in enumerate(frames) if _is_user(frame)), None)
    if user is None:
        return f"at {frames[0].place} ({frames[0].name})" if frames else "outside the function"
    text = f"at {frames[user].place} ({frames[user].name})"
    inner = [f.name for f in frames[:user] if f.file.startswith(_DISTRIBUTED) and f.name != "wrapper"]
    if inner:
        text = f"in {inner[-1]}, called {text}"
    caller = next((f for f in frames[user:] if _is_user(f) and not f.file.startswith(_OURS)), frames[user])
    return text if caller is frames[user] else f"{text}, from {caller.place} ({caller.name})"


def _thread(section: str) -> str:
    header = _HEADER.match(section)
    return header[1] if header else ""


def _within_call(frames: Iterable[Frame]) -> list[Frame]:
    """The frames inside the user's function, without those that lead to it."""
    inner_frames: list[Frame] = []
    for frame in frames:
        if frame.file.startswith(_HERE) and frame.name == "perform":
            break
        inner_frames.append(frame)
    return inner_frames


def _render(frames: Sequence[Frame]) -> str:
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.name}' for frame in frames]
    return "\n".join(["Stack (most recent call first):", *lines]) if frames else ""


def _is_user(frame: Frame) -> bool:
    if frame.file.startswith((_TORCH, _HERE, "<")):
        return False
    installed = "site-packages" in frame.file or frame.file.startswith(_STDLIB)
    return not installed or frame.file.startswith(_OURS)
