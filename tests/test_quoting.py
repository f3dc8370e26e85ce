"""Messages are short, whatever they are about, and name a file with what they leave out."""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Iterator

import pytest

from benchmarks.messages import MISTAKES, MOST, RANKS, said
from shardfn import quoting, tracebacks
from shardfn.checkpoint import CheckpointError
from shardfn.testing import World
from shardfn.translate import TranslateError

FILE = re.compile(r"\(all of it in ([^()\s]+)\)")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch, World(RANKS, kind="threads", deadline=60) as world:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("errors")))
        yield world


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_message_is_short_whatever_the_tree(mistake: str, ranks: World) -> None:
    for message in ranks.run(said, mistake):
        assert len(message) <= MOST
        assert MISTAKES[mistake][1] in message
        for file in FILE.findall(message):
            whole = pathlib.Path(file).read_text()
            assert len(whole) > 400
            first = message[: message.index("(all of it")].split(" ... ")[0]
            assert whole.startswith(first[:100]) or whole[:40] in message
        assert " more" not in message or FILE.search(message)


def test_what_is_short_is_said_as_it_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert quoting.listed(["a", 2]) == "a, 2"
    assert quoting.findings(["a" * 400]) == "a" * 400
    assert quoting.bounded("a" * MOST) == "a" * MOST
    assert list(tmp_path.iterdir()) == []


def test_a_list_says_how_many_more_and_where_all_are(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = [f"layers.{i}" for i in range(5000)]
    message = quoting.listed(names)
    assert message.startswith("layers.0, layers.1, ")
    assert " and 4992 more " in message
    assert pathlib.Path(FILE.findall(message)[0]).read_text().split("\n") == names
    assert quoting.listed(names) == message
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("error", [CheckpointError, TranslateError])
def test_an_error_of_the_package_keeps_its_ends_and_the_whole_in_a_file(
    error: type[Exception], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = f"wrong {'x' * 5000} do this"
    message = str(error(text))
    assert len(message) <= MOST
    assert message.startswith("wrong x")
    assert message.endswith("x do this")
    assert pathlib.Path(FILE.findall(message)[0]).read_text() == text


def test_without_room_for_a_file_a_message_is_short_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no such folder")
    assert len(quoting.bounded("x" * 5000)) <= MOST
    assert quoting.listed(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_what_users_raise_is_theirs() -> None:
    @tracebacks.api_boundary
    def run() -> None:
        raise ValueError("x" * 5000)

    with pytest.raises(ValueError, match=r"^x{5000}$"):
        run()
