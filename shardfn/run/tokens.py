"""Files of tokens for language models: documents one after the other, and where each begins.

4096 bytes of header, the tokens, then the number of the first token of each document, and of the one after the last,
as int64; all little-endian. The header is a magic word, the checksum of the rest of it, and JSON padded by spaces. A
file comes into its place whole, or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardfn.checkpoint.disk import sync

MAGIC, VERSION, HEADER = b"SFTOKENS", 1, 4096
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
PORTION = 2**24  # bytes of which a checksum is taken at a time


def write_tokens(
    path: str | Path, documents: Iterable[Any], dtype: str = "uint32", separator: int | None = None
) -> int:
    """Writes documents to a file that `token_windows` and `packed_windows` read.

    They are written as they come, so that memory does not grow with them. The file is under its name when it is
    complete and on the disk; one process writes it.

    Args:
        path: of the file, which is replaced if it exists.
        documents: of each its tokens: a sequence, array or tensor of ints, 1-D and not empty.
        dtype: of the tokens in the file; `"uint16"` holds vocabularies of up to 65,536.
        separator: token after each document, as that for the end of a text.

    Returns:
        How many tokens the file has.

    Raises:
        ValueError: an unknown dtype, no documents, or one that is empty or has a token which the dtype does not hold.
        TypeError: a document that is not a sequence of ints.
    """
    path, kind = Path(path), _dtype(dtype)
    limits = np.iinfo(kind)
    if separator is not None and not limits.min <= separator <= limits.max:
        raise ValueError(f"write_tokens: separator={separator} does not fit into {dtype}")
    end = np.array([] if separator is None else [separator], kind)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with unfinished.open("wb") as file, tempfile.TemporaryFile(dir=path.parent) as starts:
            file.write(bytes(HEADER))
            count = number = checksum = 0
            for number, document in enumerate(documents, 1):
                tokens = np.concatenate([_tokens(document, number - 1, kind), end])
                starts.write(np.int64(count).astype("<i8").tobytes())
                checksum, count = _written(file, tokens.tobytes(), checksum), count + len(tokens)
            if number == 0:
                raise ValueError("write_tokens: there are no documents to write")
            starts.write(np.int64(count).astype("<i8").tobytes())
            starts.seek(0)
            file.write(bytes(-file.tell() % 8))
            shutil.copyfileobj(starts, file)
            starts.seek(0)
            while portion := starts.read(PORTION):
                checksum = zlib.crc32(portion, checksum)
            facts = {"version": VERSION, "dtype": dtype, "tokens": count, "documents": number, "checksum": checksum}
            file.seek(0)
            file.write(_header(facts))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
    return count


def _dtype(name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise ValueError(f"write_tokens: dtype={name!r}; a file of tokens has one of {', '.join(DTYPES)}")
    return np.dtype(name).newbyteorder("<")


def _tokens(document: Any, number: int, kind: np.dtype[Any]) -> NDArray[Any]:
    """A document as it is written."""
    values = document.detach().cpu().numpy() if isinstance(document, Tensor) else np.asarray(document)
    if values.ndim == 1 and values.size == 0:
        raise ValueError(f"write_tokens: document {number} has no tokens: leave it out")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TypeError(
            f"write_tokens: document {number} is of type {type(document).__name__}, {values.dtype} "
            f"{list(values.shape)}; a document is a 1-D sequence of ints, as a tokenizer gives it"
        )
    limits = np.iinfo(kind)
    least, most = int(values.min()), int(values.max())
    if least < limits.min or most > limits.max:
        raise ValueError(
            f"write_tokens: document {number} has token {most if most > limits.max else least}, and {kind.name} holds "
            f"{limits.min} to {limits.max}: choose a wider dtype of {', '.join(DTYPES)}"
        )
    return values.astype(kind)


def _written(file: Any, content: bytes, checksum: int) -> int:
    file.write(content)
    return zlib.crc32(content, checksum)


def _header(facts: dict[str, Any]) -> bytes:
    text = json.dumps(facts).encode().ljust(HEADER - 16)
    return MAGIC + zlib.crc32(text).to_bytes(8, "little") + text


class TokenFile:
    """A file of tokens, mapped into memory.

    Attributes:
        path: of the file.
        count: tokens in it.
        documents: how many.
        checksum: of the tokens, and of where documents begin.

    Raises:
        ValueError: no such file, or not all of it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            head = file.read(HEADER)
        if not head.startswith(MAGIC):
            raise ValueError(f"{self.path} is no file of tokens, as sf.run.write_tokens makes them")
        if len(head) < HEADER or zlib.crc32(head[16:]) != int.from_bytes(head[8:16], "little"):
            raise ValueError(f"{self.path}: the header is damaged: write the file anew")
        facts = json.loads(head[16:])
        if facts["version"] != VERSION:
            raise ValueError(f"{self.path} is of version {facts['version']}, and this shardfn reads version {VERSION}")
        self.count, self.documents, self.checksum = facts["tokens"], facts["documents"], facts["checksum"]
        self._dtype = _dtype(facts["dtype"])
        nbytes = self.count * self._dtype.itemsize
        self._after = HEADER + nbytes + -nbytes % 8
        expected, size = self._after + 8 * (self.documents + 1), self.path.stat().st_size
        if size != expected:
            raise ValueError(f"{self.path} has {size} bytes and not {expected}: it is not all there; copy it again")

    @functools.cached_property
    def tokens(self) -> NDArray[Any]:
        """All of them, in the dtype of the file."""
        return np.memmap(self.path, self._dtype, "r", HEADER, (self.count,))

    @functools.cached_property
    def starts(self) -> NDArray[np.int64]:
        """The first token of each document, and the end of the last."""
        return np.memmap(self.path, np.dtype("<i8"), "r", self._after, (self.documents + 1,))

    def verify(self) -> None:
        """Reads the whole file.

        Raises:
            ValueError: its content is not what was written.
        """
        found = 0
        for values in (self.tokens, self.starts):
            step = PORTION // values.itemsize
            for first in range(0, len(values), step):
                found = zlib.crc32(values[first : first + step].tobytes(), found)
        if found != self.checksum:
            raise ValueError(f"{self.path}: its content has checksum {found}, and {self.checksum} was written")

    def __reduce__(self) -> Any:
        return TokenFile, (self.path,)  # a map of memory would be copied
