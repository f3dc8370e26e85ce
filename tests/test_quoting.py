"""Messages are short, whatever they are about, and name a file with what they leave out."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from benchmarks.messages import MISTAKES, MOST, RANKS, said
from shardfn import quoting
from shardfn.checkpoint import CheckpointError
from shardfn.testing import World
from shardfn.translate import TranslateError

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
    @quoting.short_errors
    def run() -> None:
        raise ValueError("x" * 5000)

    with pytest.raises(ValueError, match=r"^x{5000}$"):
        run()


# --- tracebacks ---


def own_frames(error: BaseException) -> list[str]:
    """The functions of the package in an error's traceback."""
    frames = traceback.walk_tb(error.__traceback__)
    return [frame.f_code.co_name for frame, _ in frames if frame.f_globals["__name__"].startswith("shardfn")]


def faulty(kind: str, x: Tensor) -> Tensor:
    if kind == "user":
        raise KeyError(kind)
    if kind == "torch":
        return x @ x[:1]
    return torch.utils.data.default_collate([object()])


def called(kind: str) -> BaseException:
    """The error of a step whose innermost line is the caller's, in a stage's forward or backward."""
    mesh = sf.make_mesh(shard=1, device="cpu")
    params = sf.shard({"w": torch.ones(3)}, mesh, sf.full_shard("shard"))
    stage = sf.stage(lambda p, x: faulty(kind, x * p["w"]))

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(params: Any, x: Tensor) -> Any:
        return sf.value_and_grad(lambda p: stage(p, x).sum())(params)

    with pytest.raises(Exception) as found:  # noqa: PT011
        step(params, torch.ones(2, 3))
    return found.value


@pytest.mark.parametrize("kind", ["user", "torch", "library"])
def test_a_traceback_has_the_lines_of_the_caller_and_none_of_the_package(kind: str) -> None:
    error = called(kind)
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert own_frames(error) == []
    assert names[1:5] == ["step", "<lambda>", "<lambda>", "faulty"]
    assert (len(names) > 5) == (kind == "library")  # frames of others stay


def test_an_error_that_the_package_raises_ends_at_the_line_that_calls_it() -> None:
    mesh = sf.make_mesh(shard=1, device="cpu")
    with pytest.raises(ValueError, match="unknown axis 'other'") as found:
        sf.shard({"w": torch.ones(3)}, mesh, sf.full_shard("other"))
    assert own_frames(found.value) == []
    with pytest.raises(ValueError, match="unknown axis") as found:  # of one public function inside of another
        sf.init_sharded({"w": lambda generator: sf.shard({"w": torch.ones(3)}, mesh, sf.full_shard("other"))},
                        0, mesh, sf.full_shard("shard"))  # fmt: skip
    assert own_frames(found.value) == []


def test_causes_are_folded_and_what_goes_wrong_inside_of_the_package_is_not() -> None:
    def fails() -> Any:
        try:
            sf.P(3)  # type: ignore[arg-type]
        except TypeError as error:
            raise RuntimeError("of that") from error

    with pytest.raises(RuntimeError, match="of that") as found:
        quoting.short_errors(fails)()
    assert found.value.__cause__ is not None
    assert own_frames(found.value) == own_frames(found.value.__cause__) == []
    with pytest.raises(TypeError, match="not iterable") as unexpected:
        quoting.short_errors(quoting.listed)(5)  # type: ignore[arg-type]
    assert own_frames(unexpected.value) == ["run", "listed"]


def test_the_environment_brings_the_package_s_frames_back() -> None:
    program = textwrap.dedent("""
        import torch, shardfn as sf
        sf.shard({"w": torch.ones(3)}, sf.make_mesh(shard=1, device="cpu"), sf.full_shard("other"))
    """)
    lines = {}
    for value in ("full", "folded"):
        environment = {**os.environ, "SHARDFN_TRACEBACKS": value, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
        )
        lines[value] = [line for line in done.stderr.splitlines() if '  File "' in line]
        assert "unknown axis 'other'" in done.stderr
    assert len(lines["folded"]) == 1
    assert len(lines["full"]) > 4
