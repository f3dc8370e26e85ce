"""Output of all commands (tables, JSON, byte counts), and parsers of their numeric and path arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardfn.local_paths import local_path


def print_table(names: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[int] = ()) -> None:
    """Prints a table; the columns with these numbers are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=any(names), pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    # Output that does not go to a terminal is not wrapped.
    Console(width=None if sys.stdout.isatty() else 100_000, highlight=False).print(table)


def print_json(value: Any) -> int:
    """Prints a value as JSON; returns the exit status of success."""
    print(json.dumps(as_json(value), indent=2))
    return 0


def as_json(value: Any) -> Any:
    """A value as JSON has it; paths and non-finite numbers as strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: as_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, complex):
        return [as_json(value.real), as_json(value.imag)]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def size(count: int) -> str:
    """Returns a number of bytes as text."""
    from rich.filesize import decimal

    return decimal(count)


def local(text: str) -> Path:
    """Returns a path, as an argument."""
    try:
        return local_path(text, "PATH")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """Returns a whole number that is 1 or more, as an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number that is 1 or more")
    return int(text)
