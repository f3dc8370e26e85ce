"""Worlds: a function runs once on every rank, and its results are returned in rank order."""

from __future__ import annotations

import atexit
import copy
import functools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from shardfn.testing import serialization
from shardfn.testing.errors import Failure, Outcome, Returned, raise_failures
from shardfn.testing.processes import Processes
from shardfn.testing.threads import Fake, Threads

Kind = Literal["processes", "threads", "fake", "alone"]


class World:
    """`size` ranks that run functions together, with `torch.distributed` initialized in each.

    The function, its arguments and its results are copied by pickling, so nothing is shared with the caller, and
    lambdas and closures work. Every call starts with seed 0, float32 as the default dtype and the caller's warning
    filters. A run that fails on any rank leaves nothing behind: the next one has fresh ranks.

        with World(2) as w:
            assert w.run(lambda: dist.get_rank()) == [0, 1]

    Args:
        size: the number of ranks.
        kind: "processes" (CPU processes with gloo), "threads" (of this process: faster to start, no forward-mode
            differentiation, shared process-wide defaults), "fake" (transfers nothing; any size starts at once) or
            "alone" (fresh processes without a process group, for what cannot be undone in a process).
        deadline: seconds that a run may take.
        ranks: for "fake", the ranks as which a function runs; default: rank 0 alone.

    Raises:
        ValueError: the size, the kind or the ranks are invalid.
    """

    def __init__(
        self, size: int, *, kind: Kind = "processes", deadline: float = 60.0, ranks: Sequence[int] | None = None
    ) -> None:
        self.size = size
        self.kind = kind
        self.deadline = deadline
        self.ranks = _ranks(size, kind, ranks)
        engines: dict[Kind, Callable[[], Processes | Threads | Fake]] = {
            "processes": lambda: Processes(size),
            "threads": lambda: Threads(size),
            "fake": lambda: Fake(size, self.ranks),
            "alone": lambda: Processes(size, alone=True),
        }
        if kind not in engines:
            raise ValueError(f"kind={kind!r} is not one of {', '.join(map(repr, engines))}")
        self._engine = engines[kind]()
        self._lock = threading.Lock()

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every rank.

        Returns:
            One result per rank, in rank order.

        Raises:
            WorldError: a rank raised an exception, or its process died.
            WorldTimeout: ranks did not answer within the deadline; it says where each of them is.
            TypeError: the function or an argument cannot be pickled.
        """
        __tracebackhide__ = True  # pytest shows the caller's line
        outcomes = self._outcomes(fn, args, kwargs)
        raise_failures(outcomes, self.ranks, _function_name(fn), self.deadline)
        return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]

    def errors(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[BaseException | None]:
        """Calls `fn(*args, **kwargs)` on every rank, where it is expected to raise.

        Returns:
            Each rank's exception, in rank order: None if it returned, a TimeoutError if it never did, a
            ChildProcessError if its process died.
        """
        outcomes = self._outcomes(fn, args, kwargs)
        return [outcome.as_exception() if isinstance(outcome, Failure) else None for outcome in outcomes]

    def with_deadline(self, deadline: float) -> World:
        """The same world, with another deadline in seconds."""
        view = copy.copy(self)
        view.deadline = deadline
        return view

    def close(self) -> None:
        """Stops the ranks. A later run starts them again."""
        with self._lock:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"World({self.size}, kind={self.kind!r})"

    def _outcomes(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Outcome]:
        call = serialization.pack(fn, args, kwargs)
        with self._lock:
            return self._engine.run(call, self.deadline)


_worlds: dict[tuple[int, Kind, tuple[int, ...]], World] = {}


def world(size: int, kind: Kind = "processes", *, ranks: Sequence[int] | None = None) -> World:
    """A world that every caller in this process shares; it lives until the process exits.

        @given(seed=st.integers())
        def test_sum_does_not_depend_on_the_seed(seed):
            world(2).run(check_sum, seed)

    Raises:
        ValueError: the size, the kind or the ranks are invalid.
    """
    key = (size, kind, _ranks(size, kind, ranks))
    if key not in _worlds:
        if not _worlds:
            atexit.register(close_worlds)
        _worlds[key] = World(size, kind=kind, ranks=ranks)
    return _worlds[key]


def close_worlds() -> None:
    """Stops the ranks of every shared world; called automatically when the process exits."""
    for shared in _worlds.values():
        shared.close()


def _ranks(size: int, kind: Kind, ranks: Sequence[int] | None) -> tuple[int, ...]:
    if size < 1:
        raise ValueError(f"a world has at least one rank, got size {size}")
    if ranks is None:
        return (0,) if kind == "fake" else tuple(range(size))
    if kind != "fake":
        raise ValueError(f'ranks={ranks} is for kind="fake"; kind="{kind}" runs all {size} ranks')
    if outside := [rank for rank in ranks if not 0 <= rank < size]:
        raise ValueError(f"ranks {outside} are not in a world of size {size}")
    return tuple(ranks)


def _function_name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = str(getattr(fn, "__qualname__", type(fn).__qualname__))
    code = getattr(fn, "__code__", None)
    if code is None:
        return name
    return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
