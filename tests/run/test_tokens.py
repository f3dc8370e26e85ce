"""Files of tokens: what is read is what was written, or it is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardfn as sf
from shardfn.run.tokens import HEADER
from tests.refusals import told

DOCUMENTS = [[5, 6, 7], np.array([1, 2], np.uint16), torch.tensor([9, 8, 7, 6]), (3,)]


def written(path: Path, documents: Any = DOCUMENTS, **more: Any) -> Path:
    sf.run.write_tokens(path, documents, **more)
    return path


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_documents_come_back(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens"
    assert sf.run.write_tokens(path, iter(DOCUMENTS), dtype, separator=0) == 14
    file = sf.run.TokenFile(path)
    assert file.tokens.tolist() == [5, 6, 7, 0, 1, 2, 0, 9, 8, 7, 6, 0, 3, 0]
    assert (file.starts.tolist(), file.documents, file.count) == ([0, 4, 7, 12, 14], 4, 14)
    file.verify()
    assert pickle.loads(pickle.dumps(file)).tokens.tolist() == file.tokens.tolist()
    assert len(pickle.dumps(file)) < 500
    assert [one.name for one in tmp_path.iterdir()] == ["tokens"]


def test_windows_predict_every_token_once(tmp_path: Path) -> None:
    files = [written(tmp_path / "a"), written(tmp_path / "b", [range(100, 107)])]
    rows = sf.run.token_windows(files, 3)
    assert [rows[i].tolist() for i in range(len(rows))] == [
        [5, 6, 7, 1], [1, 2, 9, 8], [8, 7, 6, 3], [100, 101, 102, 103], [103, 104, 105, 106],
    ]  # fmt: skip
    assert rows.read_rows(np.array([4, 0])).tolist() == [[103, 104, 105, 106], [5, 6, 7, 1]]
    assert rows[-1].tolist() == rows[4].tolist()
    with pytest.raises(IndexError):
        rows[5]


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), context=st.integers(1, 12))
def test_packed_windows_know_the_document_of_each_token(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], context: int
) -> None:
    if sum(lengths) <= context:
        return
    path = tmp_path_factory.mktemp("packed") / "tokens"
    written(path, [[number] * length for number, length in enumerate(lengths)], dtype="uint8")
    rows, plain = sf.run.packed_windows(path, context), sf.run.token_windows(path, context)
    for i in range(len(rows)):
        row = {name: x.tolist() for name, x in rows[i].items()}
        assert row["tokens"] == plain[i].tolist()
        assert row["documents"] == [token - row["tokens"][0] + 1 for token in row["tokens"]]
        where = [row["documents"][: at + 1].count(document) - 1 for at, document in enumerate(row["documents"])]
        assert row["positions"] == where


WRONG: dict[str, tuple[Any, str]] = {
    "none": ([], "ValueError: write_tokens: there are no documents to write"),
    "empty": ([[1], []], "ValueError: write_tokens: document 1 has no tokens"),
    "large": ([[1], [70000]], "ValueError: write_tokens: document 1 has token 70000, and uint16 holds 0 to 65535"),
    "negative": ([[-1]], "ValueError: write_tokens: document 0 has token -1"),
    "floats": ([[0.5]], "TypeError: write_tokens: document 0 is of type list, float64"),
    "words": (["text"], "TypeError: write_tokens: document 0 is of type str"),
    "flat": ([1, 2], "TypeError: write_tokens: document 0 is of type int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_document_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    documents, message = WRONG[name]
    path = written(tmp_path / "tokens", [[4]], dtype="uint16")
    before = path.read_bytes()
    assert told(lambda: sf.run.write_tokens(path, documents, "uint16")).startswith(message)
    assert (path.read_bytes(), [one.name for one in tmp_path.iterdir()]) == (before, ["tokens"])


def test_other_wrong_arguments_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    assert "dtype='float32'; a file of tokens has one of" in told(lambda: written(path, dtype="float32"))
    assert "separator=300 does not fit into uint8" in told(lambda: written(path, dtype="uint8", separator=300))
    written(path)
    assert "context=0" in told(lambda: sf.run.token_windows(path, 0))
    assert "has 10 tokens, and a row of context=10 needs 11" in told(lambda: sf.run.packed_windows(path, 10))
    assert "there are no files" in told(lambda: sf.run.token_windows([], 4))
    assert "FileNotFoundError" in told(lambda: sf.run.token_windows(tmp_path / "other", 4))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens")
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    assert "it is not all there" in told(lambda: sf.run.TokenFile(path))
    path.write_bytes(good[:40] + b"9" + good[41:])
    assert "the header is damaged" in told(lambda: sf.run.TokenFile(path))
    path.write_bytes(good[:100])
    assert "the header is damaged" in told(lambda: sf.run.TokenFile(path))
    path.write_bytes(b"text")
    assert "is not a file of tokens" in told(lambda: sf.run.TokenFile(path))
    for at in (HEADER + 3, len(good) - 2):
        path.write_bytes(good[:at] + b"\xff" + good[at + 1 :])
        assert "and " in told(sf.run.TokenFile(path).verify)
        assert "was written" in told(sf.run.TokenFile(path).verify)
