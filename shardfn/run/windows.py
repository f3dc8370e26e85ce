"""Rows for language models: stretches of a fixed number of tokens from files of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardfn.run.order import Numbers
from shardfn.run.tokens import TokenFile

Paths = str | Path | Sequence[str | Path]


class Windows:
    """Stretches of `context + 1` tokens, each of which begins with the last token of the one before."""

    def __init__(self, files: list[TokenFile], context: int) -> None:
        self.files, self.context = files, context
        self._ends = np.cumsum([(file.count - 1) // context for file in files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> Tensor:
        return torch.from_numpy(self._values(np.array([range(len(self))[row]]))[0])

    def take(self, rows: Numbers) -> Any:
        """A batch of these rows: int64 `[rows, context + 1]`."""
        return torch.from_numpy(self._values(rows))

    def fingerprint(self) -> str:
        """Of all tokens, and the length of a row."""
        known = repr((self.context, [(file.count, file.checksum) for file in self.files]))
        return hashlib.blake2b(known.encode(), digest_size=7).hexdigest()

    def _values(self, rows: Numbers) -> Numbers:
        found = np.empty((len(rows), self.context + 1), np.int64)
        for into, (file, first) in zip(found, self._places(rows), strict=True):
            into[:] = file.tokens[first : first + self.context + 1]
        return found

    def _places(self, rows: Numbers) -> list[tuple[TokenFile, int]]:
        """The file of each row, and its first token."""
        which = np.searchsorted(self._ends, rows, "right")
        before = np.where(which > 0, self._ends[which - 1], 0)
        firsts = (rows - before) * self.context
        return [(self.files[file], first) for file, first in zip(which.tolist(), firsts.tolist(), strict=True)]


class Packed(Windows):
    """The same stretches, and which document each of their tokens is of."""

    def __getitem__(self, row: int) -> Any:
        return {name: x[0] for name, x in self.take(np.array([range(len(self))[row]])).items()}

    def take(self, rows: Numbers) -> Any:
        """A batch of these rows: int64 `[rows, context + 1]` each."""
        documents = np.empty((len(rows), self.context + 1), np.int64)
        positions = np.empty_like(documents)
        for i, (file, first) in enumerate(self._places(rows)):
            documents[i], positions[i] = _documents(file.starts, first, self.context + 1)
        found = {"tokens": self._values(rows), "documents": documents, "positions": positions}
        return {name: torch.from_numpy(x) for name, x in found.items()}

    def fingerprint(self) -> str:
        """As of the stretches alone, but another."""
        return f"packed {super().fingerprint()}"


def _documents(starts: NDArray[np.int64], first: int, length: int) -> tuple[Numbers, Numbers]:
    """Of each token of a stretch its document, counted from 1, and its place in it, as far as it is in the stretch."""
    low, high = np.searchsorted(starts, [first, first + length - 1], "right")
    begins = np.maximum(starts[low - 1 : high], first)
    at = np.arange(first, first + length)
    documents = np.searchsorted(begins, at, "right")
    return documents, at - begins[documents - 1]


def token_windows(files: Paths, context: int) -> Windows:
    """Rows of `context + 1` tokens, documents run on into each other: concatenated, and cut.

    `row[:-1]` are inputs, and `row[1:]` what comes next; each row begins with the last token of the one before, so that
    every token but a file's first is predicted once. What is left at the end of a file is not read.

    Args:
        files: that `sf.run.write_tokens` made: a path, or several.
        context: tokens that a model sees.

    Returns:
        A source for `sf.run.batches`, of int64 `[context + 1]`.

    Raises:
        ValueError: a context that is not positive, or longer than a file; a file that is damaged.
    """
    return Windows(_opened(files, context, "token_windows"), context)


def packed_windows(files: Paths, context: int) -> Packed:
    """As `token_windows`, and with each token its document, so that attention can be kept within documents.

    A row is a dict of int64 `[context + 1]`: `tokens`; `documents`, counted from 1 in each row; and `positions`, which
    begin with 0 in each document, and again in each row. A token may attend to those before it for which
    `documents[:, None] == documents`; where `documents[1:] != documents[:-1]` the next token is another document's.

    Args:
        files: that `sf.run.write_tokens` made: a path, or several.
        context: tokens that a model sees.

    Returns:
        A source for `sf.run.batches`.

    Raises:
        ValueError: a context that is not positive, or longer than a file; a file that is damaged.
    """
    return Packed(_opened(files, context, "packed_windows"), context)


def _opened(files: Paths, context: int, name: str) -> list[TokenFile]:
    if context < 1:
        raise ValueError(f"{name}: context={context}; a row has at least one token and the next")
    found = [TokenFile(path) for path in ([files] if isinstance(files, (str, Path)) else files)]
    if not found:
        raise ValueError(f"{name}: there are no files")
    for file in found:
        if file.count <= context:
            raise ValueError(
                f"{name}: {file.path} has {file.count} tokens, and a row of context={context} needs {context + 1}: "
                f"leave the file out, or choose a shorter context"
            )
    return found
