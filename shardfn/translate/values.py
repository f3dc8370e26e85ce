"""Reads values as the files of other systems spell them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardfn import strategies
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
    """A configuration cannot be read, or contradicts itself."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


@dataclass(frozen=True)
class SourceExpression:
    """A Python expression that is not a literal, as source text."""

    text: str


@dataclass(frozen=True)
class SourceCall:
    """A call in a Python file: the last part of its name, and its arguments."""

    name: str
    line: int = field(repr=False, compare=False)  # calls of two lines may be alike
    arguments: Mapping[str, Any]


def shown(value: Any) -> str:
    """A value as text of bounded length."""
    if isinstance(value, SourceExpression):
        return value.text if len(value.text) < 200 else f"{value.text[:190]}..."
    if isinstance(value, SourceCall):
        return f"{value.name}(...)"
    if isinstance(value, (list, tuple, set, frozenset)) and any(isinstance(item, SourceExpression) for item in value):
        return f"[{', '.join(map(shown, value))}]"
    text = value if isinstance(value, str) and len(value) < 200 else _SHORT.repr(value)
    return " ".join(text.split()) if len(text) < 200 else f"{text[:190]}..."


def upper_word(value: Any) -> str:
    """A value as one word in capitals: FULL_SHARD for `Strategy.FULL_SHARD` or `"full_shard"`, and 3 for 3.0."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, SourceExpression) and value.text.replace(".", "").replace("_", "").isalnum():
        return value.text.rpartition(".")[2].upper()
    return value.text if isinstance(value, SourceExpression) else str(value).strip().upper()


def strategy_path(name: str) -> str:
    """Returns the public name of a strategy, such as `sf.ddp` or `sf.strategies.hpz`."""
    return f"sf.strategies.{name}" if name in strategies.__all__ else f"sf.{name}"


def spellings(value: Any) -> tuple[str, ...]:
    """The words that a value may stand for: YAML reads unquoted `no` and `off` as false, `yes` and `on` as true."""
    if isinstance(value, bool):
        return ("TRUE", "YES", "ON") if value else ("FALSE", "NO", "OFF")
    return (upper_word(value),)


def is_auto(value: Any) -> bool:
    """Whether the value is "auto", which leaves it to the arguments of a trainer."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def is_open(value: Any) -> bool:
    """Whether the value is not in the file: `"auto"`, or a Python expression."""
    return is_auto(value) or isinstance(value, (SourceExpression, SourceCall))


def as_switch(key: str, value: Any) -> bool:
    """A switch, as a bool."""
    if upper_word(value) not in ("TRUE", "YES", "1", "FALSE", "NO", "NONE", "0"):
        raise TranslateError(f"{key}: {shown(value)} is neither true nor false")
    return upper_word(value) in ("TRUE", "YES", "1")


def as_count(key: str, value: Any, minimum: int = 1) -> int:
    """A whole number of at least `minimum`, which may be written as 5e8."""
    x = number(key, value)
    if x != int(x) or x < minimum:
        raise TranslateError(f"{key}: {shown(value)} is not a whole number of {minimum} or more")
    return int(x)


def number(key: str, value: Any, minimum: float = 0.0) -> float:
    """A number of at least `minimum`; YAML reads 1e-4 as a string."""
    try:
        if isinstance(value, bool):
            raise TypeError
        x = float(value)
    except (TypeError, ValueError):
        raise TranslateError(f"{key}: {shown(value)} is not a number") from None
    if not math.isfinite(x) or x < minimum:
        raise TranslateError(f"{key}: {shown(value)} is not a number of {minimum:g} or more")
    return x


def positive(key: str, value: Any) -> float | None:
    """A number above 0; None for 0 or no value."""
    return (value and number(key, value)) or None


def natural(key: str, value: Any) -> int | None:
    """A whole number of 0 or more, or None for no value."""
    return None if value is None else as_count(key, value, 0)


def whole_or_all(key: str, value: Any) -> int | None:
    """A whole number; None for no value, or for -1, which means as many as there are."""
    return None if value is None or number(key, value, -1) == -1 else as_count(key, value)


def pair(key: str, value: Any) -> tuple[float, float]:
    """Two numbers."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise TranslateError(f"{key}: {shown(value)} is not two numbers")
    return number(key, value[0]), number(key, value[1])


def lower(key: str, value: Any) -> str | None:
    """A word in lower case, or None for no value."""
    return None if value is None else str(value).lower()


def path(key: str, value: Any) -> str | None:
    """A path, or None for "none"."""
    return None if str(value).lower() == "none" else str(value)


def words(key: str, value: Any) -> tuple[str, ...]:
    """Names, from a list or a comma-separated string; for Python classes, their own names."""
    if isinstance(value, str):
        names: list[Any] = [name.strip() for name in value.split(",") if name.strip()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        names = [name.text.rpartition(".")[2] if isinstance(name, SourceExpression) else name for name in value]
        names = sorted(names, key=str) if isinstance(value, (set, frozenset)) else names
    else:
        names = []
    if not names or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise TranslateError(f"{key}: {shown(value)} is not a list of names")
    return tuple(names)


def dtype(key: str, value: Any) -> str | None:
    """A floating-point dtype as code, `torch.bfloat16`; None for no value."""
    spelling = value.text if isinstance(value, SourceExpression) else str(value)
    spelling = spelling.removeprefix("torch.").lower()
    for name, spellings in _DTYPES.items():
        if spelling in spellings.split():
            return f"torch.{name}"
    if value is False or spelling in ("none", "no", "null"):
        return None
    raise TranslateError(f"{key}: {shown(value)} is not a dtype that is known here: bf16, fp16, fp32 or fp64")
