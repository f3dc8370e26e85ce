"""SLURM's way to write many host names: `node[001-003,7],gpu-a[1-2]b`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts(nodelist: str) -> Iterator[str]:
    """The names, in the order in which they are written. The last of several brackets counts fastest.

    Raises:
        ValueError: it is not written so.

    Example:
        >>> list(hosts("node[001-003,7],gpu-a[1-2]b"))
        ['node001', 'node002', 'node003', 'node7', 'gpu-a1b', 'gpu-a2b']
    """
    for name in re.split(r",(?![^\[\]]*\])", nodelist):
        *pieces, end = _PART.split(name)
        if not name or re.search(r"[\[\]\s,]", "".join([*pieces[::2], end])):
            raise ValueError(f"{nodelist!r} is no list of hosts as SLURM writes them, such as node[001-003,7],gpu1")
        texts, ranges = pieces[::2], pieces[1::2]
        for numbers in itertools.product(*(list(_numbers(one, nodelist)) for one in ranges)):
            yield "".join(itertools.chain.from_iterable(zip(texts, numbers, strict=True))) + end


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    """What a bracket holds: numbers as wide as they are written."""
    for one in ranges.split(","):
        found = _RANGE.fullmatch(one)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{nodelist!r}: [{ranges}] does not hold numbers and ranges, such as [001-003,7]")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield str(number).zfill(len(found[1]))
