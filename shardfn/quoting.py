"""How errors quote what may be long: the first of it, how much more there is, and a file with the whole."""

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

MOST = 2000
"""Characters of a message, whatever it is about."""

F = TypeVar("F", bound=Callable[..., Any])


def listed(names: Iterable[Any], most: int = 8, separator: str = ", ", room: int = 480) -> str:
    """The first of some names; where that is not all: how many more there are, and a file with all.

    Args:
        names: what is listed, each as its text.
        most: of them.
        separator: what stands between them.
        room: characters for them, of which one that is not alone has at most half.

    Example:
        >>> listed(["w", "b"])
        'w, b'
    """
    every = list(map(str, names))
    shown = [short(one, room if len(every) == 1 else room // 2 - len(separator)) for one in every[:most]]
    while len(shown) > 1 and len(separator.join(shown)) > room:
        shown.pop()
    if shown == every:
        return separator.join(shown)
    more = f" and {len(every) - len(shown)} more" if len(shown) < len(every) else ""
    return f"{separator.join(shown)}{more}{_where(chr(10).join(every))}"


def findings(sentences: Iterable[Any], most: int = 8) -> str:
    """The first of some findings, as `listed`, with room for sentences."""
    return listed(sentences, most, "; ", 1200)


def short(text: Any, most: int = 240) -> str:
    """A text without its middle, if it is longer: what is wrong stands first, and what to write last."""
    text = str(text)
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def bounded(text: str) -> str:
    """A message of at most `MOST` characters: one that is longer loses its middle, and names a file with all of it."""
    if len(text) <= MOST:
        return text
    between = f" ...{_where(text)} ... "
    room = MOST - len(between)
    return f"{text[: room - room // 3]}{between}{text[-(room // 3) :]}"


def byte_count(n: int) -> str:
    """Bytes, in the largest unit of which there is at least one, to four digits."""
    value, unit = float(n), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, bigger
    return f"{value:.4g} {unit}"


def short_errors(f: F) -> F:
    """A function of the package whose own errors are no longer than `MOST`; their types and causes stay."""

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            said = error.args[0] if len(error.args) == 1 else None
            if isinstance(said, str) and len(said) > MOST and _ours(error.__traceback__):
                error.args = (bounded(said),)
            raise

    return run  # type: ignore[return-value]


def _ours(trace: TracebackType | None) -> bool:
    """Whether an error comes from a line of the package: what others say is theirs."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).split(".")[0] == __name__.split(".")[0]


def _where(text: str) -> str:
    """Where the whole text is; nothing where there is no room for it: then the error alone has to do.

    The name follows from the text, so that all ranks say the same; each writes it, as they may be on other hosts.
    """
    data = text.encode(errors="replace")
    with contextlib.suppress(OSError, KeyError):
        path = os.path.join(
            tempfile.gettempdir(), f"shardfn-{getpass.getuser()}-{hashlib.blake2b(data, digest_size=4).hexdigest()}.txt"
        )
        file, own = tempfile.mkstemp(prefix="shardfn-")
        with os.fdopen(file, "wb") as out:
            out.write(data)
        os.replace(own, path)
        return f" (all of it in {path})"
    return ""
