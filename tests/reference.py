"""The correct results of collectives, computed in one process from the specs in their docstrings.

The inputs of all ranks are one value: a stack over ranks if the input varies, a single tensor if it is invariant; so
are the outputs. `joint` is the collective as a function of that value. Its transforms are those of torch.func, on
ordinary tensors.
"""

from __future__ import annotations

import doctest
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn.collectives import functional


@dataclass(frozen=True)
class Case:
    """A collective, its keyword arguments, its type, and its input shape for `n` ranks."""

    name: str
    kwargs: dict[str, Any]
    takes: str  # V or I
    gives: str
    shape: Callable[[int], tuple[int, ...]]
    perm: Callable[[int], list[tuple[int, int]]] | None = None

    def arguments(self, n: int) -> dict[str, Any]:
        return self.kwargs if self.perm is None else self.kwargs | {"perm": self.perm(n)}

    def local(self, x: Tensor, axis: Any, n: int) -> Tensor:
        return getattr(functional, self.name)(x, axis, **self.arguments(n))

    def joint(self, n: int) -> Callable[[Tensor], Tensor]:
        spec = spec_of(self.name)
        kwargs = {key: value for key, value in self.arguments(n).items() if key != "to"}

        def together(whole: Tensor) -> Tensor:
            outs = spec(list(whole.unbind(0)) if self.takes == "V" else [whole] * n, **kwargs)
            return torch.stack(outs) if self.gives == "V" else outs[0]

        return together

    def __str__(self) -> str:
        words = [str(value) for value in self.kwargs.values()]
        return "-".join([self.name, *words] + ["ring" if self.perm is ring else "partial"] * (self.perm is not None))


def spec_of(name: str) -> Callable[..., Any]:
    """The executable spec in the docstring of a collective: a function of the list of all ranks' tensors."""
    examples = doctest.DocTestParser().get_examples(getattr(functional, name).__doc__ or "")
    source = next(example.source for example in examples if example.source.startswith(f"def {name}("))
    names: dict[str, Any] = {"torch": torch}
    exec(source, names)
    return names[name]


def ring(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


def partial(n: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(n - 1)]


LINEAR = [
    Case("psum", {}, "V", "I", lambda n: (3, 2)),
    Case("pmean", {}, "V", "I", lambda n: (2, 3)),
    Case("pvary", {}, "I", "V", lambda n: (3, 2)),
    Case("all_gather", {"dim": 0}, "V", "V", lambda n: (2, 3)),
    Case("all_gather", {"dim": 1}, "V", "V", lambda n: (2, 3)),
    Case("all_gather", {"dim": -1, "to": "invariant"}, "V", "I", lambda n: (2, 3)),
    Case("all_gather", {"dim": 0, "to": "invariant"}, "V", "I", lambda n: (2, 3)),
    Case("local_slice", {"dim": 0}, "I", "V", lambda n: (2 * n, 3)),
    Case("local_slice", {"dim": 1}, "I", "V", lambda n: (3, n)),
    Case("reduce_scatter", {"dim": 0}, "V", "V", lambda n: (2 * n, 3)),
    Case("reduce_scatter", {"dim": 1}, "V", "V", lambda n: (3, n)),
    Case("all_to_all", {"split_dim": 0, "concat_dim": 1}, "V", "V", lambda n: (n, 3)),
    Case("all_to_all", {"split_dim": 1, "concat_dim": 1}, "V", "V", lambda n: (2, 2 * n)),
    Case("all_to_all", {"split_dim": -1, "concat_dim": 0}, "V", "V", lambda n: (2, n)),
    Case("ppermute", {}, "V", "V", lambda n: (2, 3), ring),
    Case("ppermute", {}, "V", "V", lambda n: (2, 3), partial),
]


def drawn(kind: str, shape: tuple[int, ...], n: int, seed: int) -> Tensor:
    """The values of all ranks: `[n, *shape]` if they vary, `[*shape]` if they are invariant."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*((n,) if kind == "V" else ()), *shape, generator=generator, dtype=torch.float64)


def mine(kind: str, whole: Tensor, rank: int) -> Tensor:
    """A rank's part of such a value."""
    return whole[rank] if kind == "V" else whole


def library(name: str) -> Any:
    """A module, or a skip; what these log as they are imported, of kernels for other machines, is left out."""
    logging.disable(logging.WARNING)
    try:
        return pytest.importorskip(name)
    finally:
        logging.disable(logging.NOTSET)


def worst(differences: Iterable[float]) -> float:
    """The largest difference; nan if any of them is nan, which Python's max may ignore."""
    return torch.tensor(list(differences), dtype=torch.float64).max().item()
