"""Runs one step: the next batch, the step's random numbers, the user's function, and what its first calls show."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.check.findings import VaryingError, VaryingWarning
from shardfn.compat import loaders
from shardfn.quoting import findings, listed
from shardfn.run.async_metrics import checked_metrics
from shardfn.run.randomness import Generators, seed_all
from shardfn.shards.replicated import checksum


@dataclass(frozen=True)
class Stepping:
    """The inputs of a step apart from its number and the state.

    Attributes:
        function: the user's step.
        batches: of the user.
        seed: of random numbers.
        place: of this rank, among those with different rows.
        steps: number of the last step.
        numbered: whether the function takes the step's number.
        exact: whether a step draws numbers for parts of a batch, of which ranks have different ones; see `accumulate`.
    """

    function: Any
    batches: Any
    seed: int
    place: int
    steps: int
    numbered: bool = False
    exact: bool = False

    def rows(self, start: int) -> IsolatedBatches:
        """Opens the batches from a step on, with random numbers that begin the same for every `start`.

        So a loader that reads the batches before `start` again and drops them draws the same numbers as before.

        Raises:
            TypeError: they are not iterable.
        """
        seed_all(self.seed, "batches", self.place)
        batches = self.batches(start) if callable(self.batches) else self.batches
        try:
            return IsolatedBatches(iter(batches))
        except TypeError:
            raise TypeError(
                f"sf.run.loop: batches({start}) returned a {type(batches).__name__}, not an iterator of batches"
            ) from None

    def close(self, rows: Iterator[Any]) -> None:
        """Closes the batches, unless they are the caller's own iterator, which may be read further."""
        close = getattr(rows, "close", None)
        is_callers = isinstance(rows, IsolatedBatches) and rows.iterator is self.batches
        if callable(close) and not is_callers:
            close()

    def run_step(self, n: int, rows: Iterator[Any], state: Any) -> tuple[Any, dict[str, Any], Any]:
        """Runs step `n`, counted from 0; returns the state, the metrics, and the batch.

        Raises:
            ValueError: there is no batch for it.
            TypeError: the function returned something else than state and metrics.
        """
        try:
            batch = next(rows)
        except StopIteration:
            raise ValueError(
                f"sf.run.loop: the batches ended after {n} of {self.steps} steps: pass steps={n}, or batches that go on"
            ) from None
        seed_all(self.seed, n, 0 if self.exact else self.place)
        try:
            result = self.function(state, batch, n + 1) if self.numbered else self.function(state, batch)
        except StopIteration as error:
            raise RuntimeError(f"sf.run.loop: step {n} raised StopIteration") from error
        if not isinstance(result, tuple) or len(result) != 2:
            content = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise TypeError(f"sf.run.loop: step returned {content}, not two values, (state, metrics)")
        return result[0], checked_metrics(result[1], "sf.run.loop: step"), batch


@contextlib.contextmanager
def same_rows_refused() -> Iterator[None]:
    """A context in which the checker's finding that all ranks read the same rows is an error.

    Filters of the user come first, so who wants the same rows ignores `VaryingWarning`, or declares them as such.

    Raises:
        VaryingError: on every rank.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*each rank reads the same rows", VaryingWarning, append=True)
        try:
            yield
        except VaryingWarning as warning:
            raise VaryingError(f"sf.run.loop: {warning}", warning.findings) from None


@dataclass
class Unchanged:
    """Finds a step that returns the state that it was given, by its first calls.

    Attributes:
        calls: that returned the very tensors that they were given, unwritten; `FEW` when there is nothing to find.
    """

    calls: int = 0
    _sums: list[int] = field(default_factory=list)

    def before(self, state: Any) -> list[tuple[Tensor, int]]:
        """The tensors of a state and their versions; empty if there is nothing to find."""
        return [] if self.calls == FEW else _with_versions(state)

    def after(self, before: list[tuple[Tensor, int]], state: Any) -> bool:
        """Whether it is found now. Graphs write without a new version, so values are compared, too."""
        if not before:
            return False
        versions = _with_versions(state)
        same = len(versions) == len(before) and all(
            x is y and n == m for (x, n), (y, m) in zip(versions, before, strict=True)
        )
        self.calls = self.calls + 1 if same else FEW
        if not same or self.calls < FEW - 1:
            return False
        sums, self._sums = self._sums, [checksum(x) for x, _ in versions]
        return self.calls == FEW and sums == self._sums


FEW = 3  # calls
UNCHANGED = "Return the state that the optimizer's step returned; with donate=False that is a new one"


def _with_versions(state: Any) -> list[tuple[Tensor, int]]:
    tensors = (x for x in optree.tree_leaves(state) if isinstance(x, Tensor))
    return [(x, 0 if x.is_inference() else x._version) for x in tensors]


@dataclass
class IsolatedBatches(Iterator[Any]):
    """Batches whose code has a separate random state, unaffected by the random numbers of steps."""

    iterator: Iterator[Any]
    _generators: Generators = field(default_factory=Generators.capture)

    def __next__(self) -> Any:
        self._generators.restore()
        try:
            return next(self.iterator)
        except StopIteration as end:
            loaders.refuse_failed(end, "sf.run.loop")
            raise
        except Exception as error:
            loaders.without_frames(error)
            raise
        finally:
            self._generators = Generators.capture()

    def close(self) -> None:
        """Closes the iterator, which ends its threads and workers; there are no more batches."""
        iterator, self.iterator = self.iterator, iter(())
        close = getattr(iterator, "close", None)
        if callable(close):
            close()


_NUMBERS = {("a int", "int64[]"), ("a float", "float64[]")}  # what a compiled or graphed step makes of numbers


@dataclass(frozen=True)
class Kinds:
    """A state's structure, and the types, dtypes and shapes of its leaves."""

    tree: Any
    leaves: tuple[str, ...]

    def check(self, other: Kinds) -> None:
        """Raises ValueError if a state that a step returned differs in these."""
        if self.tree != other.tree:
            raise ValueError(
                "sf.run.loop: step returned a state of another structure than the run began with: "
                f"{findings(_changes(self.tree, other.tree))}: the next step, and a checkpoint, could not continue "
                f"from that"
            )
        for path, expected, returned in zip(self.tree.paths(), self.leaves, other.leaves, strict=True):
            if expected != returned and (expected, returned) not in _NUMBERS:
                raise ValueError(
                    f"sf.run.loop: step returned another kind of state: {_dotted(path)} was "
                    f"{expected}, and is {returned}: the next step, and a checkpoint, could not continue from that"
                )


def kinds_of(state: Any) -> Kinds:
    """The `Kinds` of a state."""
    leaves, tree = optree.tree_flatten(state)
    return Kinds(tree, tuple(map(_leaf_text, leaves)))


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return "a torch.Generator" if isinstance(leaf, torch.Generator) else f"a {type(leaf).__name__}"


def _changes(began: Any, returned: Any, path: tuple[Any, ...] = ()) -> list[str]:
    """The changes of a state's structure, by paths."""
    if began.type is not returned.type:
        return [f"{_dotted(path)} was {_brief(began)}, and is {_brief(returned)}"]
    old_children, new_children = _children(began), _children(returned)
    changes = [f"{_dotted((*path, key))} is missing" for key in old_children if key not in new_children]
    changes += [f"{_dotted((*path, key))} is new" for key in new_children if key not in old_children]
    for key, child in old_children.items():
        if key in new_children and child != new_children[key]:
            changes += _changes(child, new_children[key], (*path, key))
    return changes or [f"{_dotted(path)} is another kind of {began.type.__name__}"]


def _children(tree: Any) -> dict[Any, Any]:
    return dict(zip(tree.entries(), tree.children(), strict=True))


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "it"


def _brief(tree: Any) -> str:
    if tree.type is None:
        return "a value"
    if tree.type is type(None):
        return "None"
    return f"a {tree.type.__name__} with [{listed(tree.entries(), 4)}]"
