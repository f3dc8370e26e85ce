"""Files of tokens for language models: documents in sequence, and where each begins.

A file is a header of 4096 bytes, the tokens, and the index of the first token of each document and of the end, as
int64; all little-endian. The header is a magic word, the checksum of the rest of it, and JSON padded by spaces. A file
is complete when it appears under its name.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardfn.checkpoint.folders import replacing
from shardfn.local_paths import local_path
from shardfn.run.order import Numbers

MAGIC, VERSION, HEADER = b"SFTOKENS", 1, 4096
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
PORTION = 2**24  # bytes that are checksummed at a time


def write_tokens(
    path: str | Path, documents: Iterable[Any], dtype: str = "uint32", separator: int | None = None
) -> int:
    """Writes documents to a file that `token_windows` and `packed_windows` read.

    Documents are written one by one, so memory use does not grow with their number. The file appears under its name
    once it is complete and on disk; call this on one process.

    Args:
        path: of the file, which is replaced if it exists.
        documents: the tokens of each: a sequence, array or tensor of ints, 1-D and not empty.
        dtype: of the tokens in the file; `"uint16"` holds vocabularies of up to 65,536.
        separator: token added after each document, such as the end-of-text token.

    Returns:
        The number of tokens in the file.

    Raises:
        ValueError: the dtype is unknown, there are no documents, or one is empty or has a token outside of the dtype's
            range.
        TypeError: a document is not a sequence of ints.
    """
    path, kind = local_path(path, "write_tokens: path"), _token_dtype(dtype)
    limits = np.iinfo(kind)
    if separator is not None and not limits.min <= separator <= limits.max:
        raise ValueError(f"write_tokens: separator={separator} does not fit into {dtype}")
    end = np.array([] if separator is None else [separator], kind)
    with (
        replacing(path, f"{os.getpid()}-{secrets.token_hex(4)}") as unfinished,
        unfinished.open("wb") as file,
        tempfile.TemporaryFile(dir=path.parent) as starts,
    ):
        file.write(bytes(HEADER))
        count = number = checksum = 0
        for number, document in enumerate(documents, 1):
            tokens = np.concatenate([_tokens(document, number - 1, kind), end])
            content = tokens.tobytes()
            starts.write(np.int64(count).astype("<i8").tobytes())
            file.write(content)
            checksum, count = zlib.crc32(content, checksum), count + len(tokens)
        if number == 0:
            raise ValueError("write_tokens: there are no documents to write")
        starts.write(np.int64(count).astype("<i8").tobytes())
        starts.seek(0)
        file.write(bytes(-file.tell() % 8))  # aligns the int64 that follow
        shutil.copyfileobj(starts, file)
        starts.seek(0)
        while portion := starts.read(PORTION):
            checksum = zlib.crc32(portion, checksum)
        facts = {"version": VERSION, "dtype": dtype, "tokens": count, "documents": number, "checksum": checksum}
        file.seek(0)
        text = json.dumps(facts).encode().ljust(HEADER - 16)
        file.write(MAGIC + zlib.crc32(text).to_bytes(8, "little") + text)
    return count


def _token_dtype(name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise ValueError(f"write_tokens: dtype={name!r}; a file of tokens has one of {', '.join(DTYPES)}")
    return np.dtype(name).newbyteorder("<")


def _tokens(document: Any, number: int, kind: np.dtype[Any]) -> NDArray[Any]:
    """A document as an array of the file's dtype."""
    values = document.detach().cpu().numpy() if isinstance(document, Tensor) else np.asarray(document)
    if values.ndim == 1 and values.size == 0:
        raise ValueError(f"write_tokens: document {number} has no tokens: leave it out")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TypeError(
            f"write_tokens: document {number} is of type {type(document).__name__}, {values.dtype} "
            f"{list(values.shape)}; a document is a 1-D sequence of ints, as a tokenizer gives it"
        )
    limits = np.iinfo(kind)
    lowest, highest = int(values.min()), int(values.max())
    if lowest < limits.min or highest > limits.max:
        outside = highest if highest > limits.max else lowest
        raise ValueError(
            f"write_tokens: document {number} has token {outside}, and {kind.name} holds "
            f"{limits.min} to {limits.max}: choose a wider dtype of {', '.join(DTYPES)}"
        )
    return values.astype(kind)


class TokenFile:
    """A file of tokens, mapped into memory.

    Attributes:
        path: of the file.
        count: number of tokens.
        documents: number of documents.
        checksum: of the tokens, and of where documents begin.

    Raises:
        ValueError: it is not a file of tokens, or damaged or incomplete.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = local_path(path, "TokenFile: path")
        with self.path.open("rb") as file:
            head = file.read(HEADER)
        if not head.startswith(MAGIC):
            raise ValueError(f"{self.path} is not a file of tokens by sf.run.write_tokens")
        if len(head) < HEADER or zlib.crc32(head[16:]) != int.from_bytes(head[8:16], "little"):
            raise ValueError(f"{self.path}: the header is damaged: write the file again")
        facts = json.loads(head[16:])
        if facts["version"] != VERSION:
            raise ValueError(f"{self.path} is of version {facts['version']}, and this shardfn reads version {VERSION}")
        self.count, self.documents, self.checksum = facts["tokens"], facts["documents"], facts["checksum"]
        self._dtype = _token_dtype(facts["dtype"])
        nbytes = self.count * self._dtype.itemsize
        self._after = HEADER + nbytes + -nbytes % 8
        expected, size = self._after + 8 * (self.documents + 1), self.path.stat().st_size
        if size != expected:
            raise ValueError(f"{self.path} has {size} bytes and not {expected}: it is not all there; copy it again")

    @functools.cached_property
    def tokens(self) -> NDArray[Any]:
        """All tokens, in the dtype of the file."""
        return self._mapped(self._dtype, HEADER, self.count)

    @functools.cached_property
    def starts(self) -> NDArray[np.int64]:
        """The index of the first token of each document, and the end of the last; int64 `[documents + 1]`."""
        return self._mapped(np.dtype("<i8"), self._after, self.documents + 1)

    def _mapped(self, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
        return np.asarray(np.memmap(self.path, dtype, "r", offset, (count,)))  # slices of it cost half of a memmap's

    def verify(self) -> None:
        """Checks the checksum of the whole file.

        Raises:
            ValueError: the content has changed since it was written.
        """
        checksum = 0
        for values in (self.tokens, self.starts):
            step = PORTION // values.itemsize
            for first in range(0, len(values), step):
                checksum = zlib.crc32(values[first : first + step].tobytes(), checksum)
        if checksum != self.checksum:
            raise ValueError(f"{self.path}: its content has checksum {checksum}, and {self.checksum} was written")

    def __reduce__(self) -> Any:
        return TokenFile, (self.path,)  # pickling the map would copy it


Paths = str | Path | Sequence[str | Path]


class Windows:
    """Windows of `context + 1` tokens, each beginning with the last token of the one before."""

    def __init__(self, files: list[TokenFile], context: int) -> None:
        self.files, self.context = files, context
        self._ends = np.cumsum([(file.count - 1) // context for file in files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> Tensor:
        return torch.from_numpy(self._values(np.array([range(len(self))[row]]))[0])

    def read_rows(self, rows: Numbers) -> Any:
        """A batch of rows: int64 `[rows, context + 1]`."""
        return torch.from_numpy(self._values(rows))

    def fingerprint(self) -> str:
        """A digest of all tokens and the row length."""
        facts = repr((self.context, [(file.count, file.checksum) for file in self.files]))
        return hashlib.blake2b(facts.encode(), digest_size=7).hexdigest()

    def _values(self, rows: Numbers) -> Numbers:
        values = np.empty((len(rows), self.context + 1), np.int64)
        for row, (file, first) in zip(values, self._places(rows), strict=True):
            row[:] = file.tokens[first : first + self.context + 1]
        return values

    def _places(self, rows: Numbers) -> list[tuple[TokenFile, int]]:
        """The file of each row, and the index of its first token there."""
        which = np.searchsorted(self._ends, rows, "right")
        before = np.where(which > 0, self._ends[which - 1], 0)
        firsts = (rows - before) * self.context
        return [(self.files[file], first) for file, first in zip(which.tolist(), firsts.tolist(), strict=True)]


class Packed(Windows):
    """The same windows, with the document of each token."""

    def __getitem__(self, row: int) -> Any:
        return {name: x[0] for name, x in self.read_rows(np.array([range(len(self))[row]])).items()}

    def read_rows(self, rows: Numbers) -> Any:
        """A batch of rows: int64 `[rows, context + 1]` each."""
        documents = np.empty((len(rows), self.context + 1), np.int64)
        positions = np.empty_like(documents)
        for i, (file, first) in enumerate(self._places(rows)):
            low, high = np.searchsorted(file.starts, [first, first + self.context], "right")
            begins = np.maximum(file.starts[low - 1 : high], first)
            indices = np.arange(first, first + self.context + 1)
            documents[i] = np.searchsorted(begins, indices, "right")
            positions[i] = indices - begins[documents[i] - 1]
        batch = {"tokens": self._values(rows), "documents": documents, "positions": positions}
        return {name: torch.from_numpy(x) for name, x in batch.items()}

    def fingerprint(self) -> str:
        """As for `Windows`, but different, since the batches are."""
        return f"packed {super().fingerprint()}"


def token_windows(files: Paths, context: int) -> Windows:
    """Rows of `context + 1` tokens, cut from the concatenated documents.

    `row[:-1]` are inputs, and `row[1:]` targets; each row begins with the last token of the one before, so every token
    but a file's first is predicted once. Tokens left over at the end of a file are not read.

    Args:
        files: made by `sf.run.write_tokens`: a path, or several.
        context: tokens that a model sees.

    Returns:
        A source for `sf.run.batches`, of int64 `[context + 1]`.

    Raises:
        ValueError: the context is not positive, or longer than a file; or a file is damaged.
    """
    return Windows(_open_files(files, context, "token_windows"), context)


def packed_windows(files: Paths, context: int) -> Packed:
    """As `token_windows`, with the document of each token, so that attention can be kept within documents.

    A row is a dict of int64 `[context + 1]`: `tokens`; `documents`, counted from 1 in each row; and `positions`, which
    begin with 0 in each document, and again in each row. A token may attend to those before it for which
    `documents[:, None] == documents`; where `documents[1:] != documents[:-1]` the next token is another document's.

    Args:
        files: made by `sf.run.write_tokens`: a path, or several.
        context: tokens that a model sees.

    Returns:
        A source for `sf.run.batches`.

    Raises:
        ValueError: the context is not positive, or longer than a file; or a file is damaged.
    """
    return Packed(_open_files(files, context, "packed_windows"), context)


def _open_files(files: Paths, context: int, name: str) -> list[TokenFile]:
    if context < 1:
        raise ValueError(f"{name}: context={context}; a row has at least one token and the next")
    token_files = [TokenFile(path) for path in ([files] if isinstance(files, (str, Path)) else files)]
    if not token_files:
        raise ValueError(f"{name}: there are no files")
    for file in token_files:
        if file.count <= context:
            raise ValueError(
                f"{name}: {file.path} has {file.count} tokens, and a row of context={context} needs {context + 1}: "
                f"leave the file out, or choose a shorter context"
            )
    return token_files
