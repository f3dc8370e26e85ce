"""One step of a run: the next batch, the random numbers that belong to it, and the user's function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.run.async_metrics import checked
from shardfn.run.randomness import Generators, seed_all


@dataclass(frozen=True)
class Stepping:
    """What a step is a function of, besides its number and the state.

    Attributes:
        function: the user's.
        batches: the user's.
        seed: of random numbers.
        place: of this rank, among those with other rows.
        steps: the last step.
    """

    function: Any
    batches: Any
    seed: int
    place: int
    steps: int

    def rows(self, start: int) -> Rows:
        """The batches from a step on. Random numbers in their code begin alike for every `start`.

        So they are the same again in a loader that reads what comes before `start` once more, and drops it.

        Raises:
            TypeError: they are none.
        """
        seed_all(self.seed, "batches", self.place)
        found = self.batches(start) if callable(self.batches) else self.batches
        try:
            return Rows(iter(found))
        except TypeError:
            raise TypeError(
                f"sf.run.loop: batches({start}) returned a {type(found).__name__}, not an iterator of batches"
            ) from None

    def close(self, rows: Iterator[Any]) -> None:
        """Ends what gives batches, if it was made here: a caller's own iterator may be read further."""
        close = getattr(rows, "close", None)
        theirs = isinstance(rows, Rows) and rows.found is self.batches
        if callable(close) and not theirs:
            close()

    def one(self, n: int, rows: Iterator[Any], state: Any) -> tuple[Any, dict[str, Any], Any]:
        """Runs step `n`, which counts from 0: the state, the metrics, and the batch.

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
        seed_all(self.seed, n, self.place)
        try:
            result = self.function(state, batch)
        except StopIteration as error:
            raise RuntimeError(f"sf.run.loop: step {n} raised StopIteration") from error
        if not isinstance(result, tuple) or len(result) != 2:
            what = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise TypeError(f"sf.run.loop: step returned {what}, not two values, (state, metrics)")
        return result[0], checked(result[1], "sf.run.loop: step"), batch


@dataclass
class Rows(Iterator[Any]):
    """Batches whose code draws random numbers of its own, which go on from batch to batch whatever steps draw."""

    found: Iterator[Any]
    _generators: Generators = field(default_factory=Generators.now)

    def __next__(self) -> Any:
        self._generators.restore()
        try:
            return next(self.found)
        finally:
            self._generators = Generators.now()

    def close(self) -> None:
        """Ends what reads, as threads and workers. There are no more batches."""
        found, self.found = self.found, iter(())
        close = getattr(found, "close", None)
        if callable(close):
            close()


@dataclass(frozen=True)
class Kinds:
    """What a state is, but for its numbers."""

    tree: Any
    leaves: tuple[str, ...]

    def check(self, other: Kinds) -> None:
        """Raises ValueError, if the state that a step returned is something else."""
        if self.tree != other.tree:
            raise ValueError(
                f"sf.run.loop: step returned a state of another structure: the run began with {_brief(self.tree)}, and "
                f"returned {_brief(other.tree)}: the next step, and a checkpoint, could not go on from that"
            )
        for path, mine, theirs in zip(self.tree.paths(), self.leaves, other.leaves, strict=True):
            if mine != theirs:
                raise ValueError(
                    f"sf.run.loop: step returned another kind of state: {'.'.join(map(str, path)) or 'it'} was "
                    f"{mine}, and is {theirs}: the next step, and a checkpoint, could not go on from that"
                )


def kinds_of(state: Any) -> Kinds:
    """What a state is."""
    leaves, tree = optree.tree_flatten(state)
    return Kinds(tree, tuple(map(_kind, leaves)))


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return "a torch.Generator" if isinstance(leaf, torch.Generator) else f"a {type(leaf).__name__}"


def _brief(tree: Any) -> str:
    text = str(tree).removeprefix("PyTreeSpec(").removesuffix(")")
    return text if len(text) <= 200 else f"{text[:200]}..."
