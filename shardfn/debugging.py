"""Checks that are too expensive for every step, switched on by the environment or for a block of code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass
class Debugging:
    """The optional checks that are on: `if debugging.memory: ...`. Checks without cost are always on.

    Attributes:
        memory: parameters are compared after each call of a stage, and memory that is reused is filled with nan.
        collectives: before each collective, ranks compare it.
        nan: after each run of a stage, ranks check that it returned only finite numbers.
    """

    memory: bool = False
    collectives: bool = False
    nan: bool = False


KINDS = tuple(field.name for field in fields(Debugging))
debugging = Debugging()
"""For the whole process, not one thread: backward may run on a thread that autograd started."""

_asked: list[dict[str, bool]] = []  # the environment's request, then each open block's, in order


def debug(
    *by_position: object, memory: bool | None = None, collectives: bool | None = None, nan: bool | None = None
) -> contextlib._GeneratorContextManager[None]:
    """Switches checks on or off while the block runs, for all threads of the process.

    All ranks must pass the same. Without a block, the environment switches them on: `SHARDFN_DEBUG=collectives`,
    `memory,collectives`, or `all`.

    Args:
        memory: parameters are compared after each call of a stage, of which writes past autograd show; memory that is
            used again, as that through which values go to the host, is filled with nan, so that a late read of it
            shows.
        collectives: before each collective, those of stages and pipelines included, the ranks along its axis compare
            what they are about to do, and from which line. If they differ, all of them raise a ValueError that lists
            what each was about to do; a rank that can no longer take part is named within seconds. Costs an exchange,
            and a wait of the host, for each collective.
        nan: after each stage's forward and backward, the first that returned a number that is not finite raises a
            FloatingPointError on all ranks that run it, with its name, the rank, and whether its inputs were finite.
            Costs a wait of the host and an exchange for each. Code compiled around stages is not checked.

    Checks that are left out stay unchanged.

    Raises:
        TypeError: no check is named, or something is passed by position.

    Example:
        ``with sf.debug(collectives=True): step(params, tokens)``
    """
    checks = {"memory": memory, "collectives": collectives, "nan": nan}
    asked = {name: on for name, on in checks.items() if on is not None}
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
    _apply_requests()
    try:
        yield
    finally:
        _asked[:] = [other for other in _asked if other is not asked]  # not pop(): threads open blocks in any order
        _apply_requests()


def _apply_requests() -> None:
    for name in KINDS:
        setattr(debugging, name, next((asked[name] for asked in reversed(_asked) if name in asked), False))


def by_environment(text: str) -> dict[str, bool]:
    """The checks that a value of `SHARDFN_DEBUG` switches on.

    Raises:
        ValueError: it names something else.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in (*KINDS, "1", "all", "0")]
    if unknown:
        raise ValueError(
            f"SHARDFN_DEBUG={text!r}: {', '.join(unknown)} is not a check. Pass a comma-separated list of "
            f"{', '.join(KINDS)}; 1 or all selects all of them"
        )
    everything = "1" in words or "all" in words
    return {name: everything or name in words for name in KINDS}


_asked.append(by_environment(os.environ.get("SHARDFN_DEBUG", "")))
_apply_requests()
