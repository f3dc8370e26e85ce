"""Values as the files of other systems spell them, read into Python's."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardfn.quoting import bounded

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 3, 8, 8, 120, 120
_DTYPES = {
    "bfloat16": "bf16 bfloat16 bf16-mixed bf16-true amp_bf16 bfp16",
    "float16": "fp16 float16 half 16 16-mixed 16-true amp_fp16",
    "float32": "fp32 float32 float 32 32-true",
    "float64": "fp64 float64 double 64 64-true",
}


class TranslateError(ValueError):
    """What cannot be read, or contradicts itself."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


@dataclass(frozen=True)
class Source:
    """A Python expression that is no literal, as it is written."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call in a Python file: the last part of its name, and its arguments."""

    name: str
    line: int
    arguments: Mapping[str, Any]


def shown(value: Any) -> str:
    """As text, of bounded length."""
    if isinstance(value, Source):
        return value.text if len(value.text) < 200 else f"{value.text[:190]}..."
    if isinstance(value, Call):
        return f"{value.name}(...)"
    if isinstance(value, (list, tuple, set, frozenset)) and any(isinstance(one, Source) for one in value):
        return f"[{', '.join(map(shown, value))}]"
    text = value if isinstance(value, str) and len(value) < 200 else _SHORT.repr(value)
    return " ".join(text.split()) if len(text) < 200 else f"{text[:190]}..."


def word(value: Any) -> str:
    """As one word in capitals: of `Strategy.FULL_SHARD` or `"full_shard"` it is FULL_SHARD, and of 3.0 it is 3."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Source) and value.text.replace(".", "").replace("_", "").isalnum():
        return value.text.rpartition(".")[2].upper()
    return value.text if isinstance(value, Source) else str(value).strip().upper()


def is_auto(value: Any) -> bool:
    """Whether the file leaves it to the arguments of a trainer."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def is_open(value: Any) -> bool:
    """Whether the value is not in the file: `"auto"`, or an expression of Python."""
    return is_auto(value) or isinstance(value, (Source, Call))


def on(key: str, value: Any) -> bool:
    """A switch."""
    if word(value) not in ("TRUE", "YES", "1", "FALSE", "NO", "NONE", "0"):
        raise TranslateError(f"{key}: {shown(value)} is neither true nor false")
    return word(value) in ("TRUE", "YES", "1")


def whole(key: str, value: Any, least: int = 1) -> int:
    """A whole number, which may be written as 5e8."""
    found = number(key, value)
    if found != int(found) or found < least:
        raise TranslateError(f"{key}: {shown(value)} is not a whole number of {least} or more")
    return int(found)


def number(key: str, value: Any, least: float = 0.0) -> float:
    """A number that is not negative; YAML reads 1e-4 as a string."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError):
        raise TranslateError(f"{key}: {shown(value)} is not a number") from None
    if not math.isfinite(found) or found < least:
        raise TranslateError(f"{key}: {shown(value)} is not a number of {least:g} or more")
    return found


def positive(key: str, value: Any) -> float | None:
    """A number above 0; None for 0, and where none is said."""
    return (value and number(key, value)) or None


def natural(key: str, value: Any) -> int | None:
    """A whole number of 0 or more, where one is said."""
    return None if value is None else whole(key, value, 0)


def whole_or_all(key: str, value: Any) -> int | None:
    """A whole number; None for -1, which means as many as there are, and where none is said."""
    return None if value is None or number(key, value, -1) == -1 else whole(key, value)


def pair(key: str, value: Any) -> tuple[float, float]:
    """Two numbers."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise TranslateError(f"{key}: {shown(value)} is not two numbers")
    return number(key, value[0]), number(key, value[1])


def lower(key: str, value: Any) -> str | None:
    """A word in small letters; None where none is said."""
    return None if value is None else str(value).lower()


def path(key: str, value: Any) -> str | None:
    """A path; None where it is none."""
    return None if str(value).lower() == "none" else str(value)


def words(key: str, value: Any) -> tuple[str, ...]:
    """Names, in a list or between commas; of classes in Python, their own names."""
    if isinstance(value, str):
        found: list[Any] = [one.strip() for one in value.split(",") if one.strip()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        found = [one.text.rpartition(".")[2] if isinstance(one, Source) else one for one in value]
        found = sorted(found, key=str) if isinstance(value, (set, frozenset)) else found
    else:
        found = []
    if not found or not all(isinstance(one, str) and one.isidentifier() for one in found):
        raise TranslateError(f"{key}: {shown(value)} is not a list of names")
    return tuple(found)


def dtype(key: str, value: Any) -> str | None:
    """Of floating-point numbers, as code: `torch.bfloat16`. None where none is said."""
    said = value.text if isinstance(value, Source) else str(value)
    said = said.removeprefix("torch.").lower()
    for name, spellings in _DTYPES.items():
        if said in spellings.split():
            return f"torch.{name}"
    if said in ("none", "no", "null"):
        return None
    raise TranslateError(f"{key}: {shown(value)} is not a dtype that is known here: bf16, fp16, fp32 or fp64")
