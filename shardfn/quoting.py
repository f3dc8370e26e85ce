"""Shortens long values and paths for error messages.

Of a long value, a message has the beginning, the length of the rest, and the path of a file with all of it. Paths of
installed packages begin below the folder of packages.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import inspect
import os
import site
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

MOST = 2000
"""The most characters of a message."""

F = TypeVar("F", bound=Callable[..., Any])


def listed(names: Iterable[Any], most: int = 8, separator: str = ", ", room: int = 480) -> str:
    """The first of some names; if there are more, how many, and a file with all of them.

    Args:
        names: what is listed, by its `str`.
        most: the most names that are shown.
        separator: the text between names.
        room: the most characters for names; one of several names gets at most half of them.

    Example:
        >>> listed(["w", "b"])
        'w, b'
    """
    texts = list(map(str, names))
    shown = [short(text, room if len(texts) == 1 else room // 2 - len(separator)) for text in texts[:most]]
    while len(shown) > 1 and len(separator.join(shown)) > room:
        shown.pop()
    if shown == texts:
        return separator.join(shown)
    more = f" and {len(texts) - len(shown)} more" if len(shown) < len(texts) else ""
    return f"{separator.join(shown)}{more}{_where(chr(10).join(texts))}"


def findings(sentences: Iterable[Any], most: int = 8) -> str:
    """The first of some findings, like `listed`, with room for sentences."""
    return listed(sentences, most, "; ", 1200)


def short(text: Any, most: int = 240) -> str:
    """A text without its middle if it is longer than `most`: the problem stands first, and the fix last."""
    text = str(text)
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def bounded(text: str) -> str:
    """A message of at most `MOST` characters: a longer one loses its middle, and names a file with all of it."""
    if len(text) <= MOST:
        return text
    between = f" ...{_where(text)} ... "
    room = MOST - len(between)
    return f"{text[: room - room // 3]}{between}{text[-(room // 3) :]}"


def amount(n: float, unit: str = "") -> str:
    """A number with four digits, with the prefix that makes it at least 1: `1.234 TFLOP`."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if n < 1000 or prefix == "E":
            break
        n /= 1000
    return f"{n:.4g} {prefix}{unit}".rstrip()


def byte_count(n: int) -> str:
    """A number of bytes with four digits, in the largest unit (kB is 1000 B) that makes it at least 1."""
    return amount(n, "B")


def advised(advice: Mapping[str, str], otherwise: str) -> Callable[[F], F]:
    """Wraps a function so that errors about the arguments of a call end in what to write.

    Args:
        advice: that, by keywords of other libraries, which the function does not have.
        otherwise: that for a call without unknown keywords.
    """

    def wrap(f: F) -> F:
        signature = inspect.signature(f)
        any_keyword = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())

        @functools.wraps(f)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = [] if any_keyword else [key for key in kwargs if key not in signature.parameters]
                takes = f"it takes {listed(signature.parameters, 20)}" if unknown else otherwise
                known = next((advice[key] for key in unknown if key in advice), takes)
                raise TypeError(f"{f.__name__}: {short(error)}; {known}") from None
            return f(*args, **kwargs)

        return run  # type: ignore[return-value]

    return wrap


def _where(text: str) -> str:
    """Writes a text to a file and names it; returns an empty string if that fails.

    The file's name follows from the text, so that all ranks name the same; each writes it, as hosts may differ.
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


@functools.cache
def _folders() -> tuple[str, ...]:
    """Folders of installed packages, whose code nobody works on; the standard library's last, as it has them."""
    import sysconfig

    paths = sysconfig.get_paths()
    found = [*site.getsitepackages(), site.getusersitepackages(), *(paths[k] for k in ("purelib", "platlib", "stdlib"))]
    return tuple(f"{folder}{os.sep}" for folder in dict.fromkeys(found))


@functools.cache
def installed(file: str) -> str:
    """The path of a file of an installed package or of Python, from the folder of packages on; else empty."""
    folder = next((folder for folder in _folders() if file.startswith(folder)), None)
    return "" if folder is None else file.removeprefix(folder)
