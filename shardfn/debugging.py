"""Which checks run that cost too much for every step, by the environment or for a block of code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass
class Debugging:
    """What is checked beyond what costs nothing. Read where it matters: `if debugging.memory: ...`.

    Attributes:
        memory: lent memory is filled with nan when it is given back.
        collectives: ranks compare what they are about to do, before each collective.
        nan: ranks compare whether a stage made only finite numbers, after each of its runs.
    """

    memory: bool = False
    collectives: bool = False
    nan: bool = False


KINDS = tuple(field.name for field in fields(Debugging))
debugging = Debugging()
"""Of the whole process: backward may run on a thread that autograd started."""

_asked: list[dict[str, bool]] = []  # by the environment first, then by each block, in the order in which they began


def debug(
    *by_position: object, memory: bool | None = None, collectives: bool | None = None, nan: bool | None = None
) -> contextlib._GeneratorContextManager[None]:
    """Switches checks on or off while the block runs, in the whole process and on all ranks alike.

    Without a block, the environment switches them on: `SHARDFN_DEBUG=collectives`, `memory,collectives`, or `all`.

    Args:
        memory: lent memory is filled with nan when it is given back, so that whoever still reads it sees that.
        collectives: before each collective, those of stages and pipelines included, the ranks along its axis compare
            what they are about to do, and from which line. All of them raise a ValueError where they differ, with what
            each was about to do; a rank that cannot come any more is named within seconds. Costs an exchange, and a
            wait of the host, for each.
        nan: after each stage's forward and backward, the first that made a number which is not finite raises a
            FloatingPointError on all ranks that run it, with its name, the rank, and whether what it was given was
            finite. Costs a wait of the host and an exchange for each. What is compiled around stages is not watched.

    What is left out stays as it is.

    Raises:
        TypeError: nothing to switch, or something by position.

    Example:
        ``with sf.debug(collectives=True): step(params, tokens)``
    """
    every = {"memory": memory, "collectives": collectives, "nan": nan}
    asked = {name: on for name, on in every.items() if on is not None}
    if by_position or not asked:
        given = ", ".join(map(repr, by_position))
        raise TypeError(
            f"debug({given}) says no check by name: write debug(memory=True), debug(collectives=True), "
            f"debug(nan=True), or several"
        )
    return _switched(asked)


@contextlib.contextmanager
def _switched(asked: dict[str, bool]) -> Iterator[None]:
    _asked.append(asked)
    _settle()
    try:
        yield
    finally:
        _asked[:] = [one for one in _asked if one is not asked]  # other threads may have begun and ended meanwhile
        _settle()


def _settle() -> None:
    for name in KINDS:
        setattr(debugging, name, next((asked[name] for asked in reversed(_asked) if name in asked), False))


def by_environment(said: str) -> dict[str, bool]:
    """What `SHARDFN_DEBUG` asks for."""
    words = [word.strip().lower() for word in said.split(",") if word.strip()]
    unknown = [word for word in words if word not in (*KINDS, "1", "all", "0")]
    if unknown:
        raise ValueError(
            f"SHARDFN_DEBUG={said!r}: {', '.join(unknown)} is nothing that can be checked; it is a list, with commas, "
            f"of {', '.join(KINDS)}, or 1 or all for all of them"
        )
    everything = "1" in words or "all" in words
    return {name: everything or name in words for name in KINDS}


_asked.append(by_environment(os.environ.get("SHARDFN_DEBUG", "")))
_settle()
