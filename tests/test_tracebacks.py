"""Tracebacks show the lines of the caller, and of the package only what helps."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import quoting, tracebacks
from shardfn.testing import world

ROOT = pathlib.Path(__file__).resolve().parents[1]


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

    with pytest.raises((KeyError, RuntimeError, TypeError)) as found:
        step(params, torch.ones(2, 3))
    return found.value


@pytest.mark.parametrize("kind", ["user", "torch", "library"])
def test_a_traceback_has_the_lines_of_the_caller_and_none_of_the_package(kind: str) -> None:
    error = called(kind)
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert own_frames(error) == []
    assert names[1:5] == ["step", "<lambda>", "<lambda>", "faulty"]
    assert (len(names) > 5) == (kind == "library")  # frames of others stay


def frames_of_a_checked_call() -> tuple[list[str], str]:
    """The package's frames in the error of an operation that a checker runs, and the innermost function."""
    mesh = sf.make_mesh(shard=2)
    params = sf.shard({"w": torch.ones(4, 4)}, mesh, sf.full_shard("shard"))
    stage = sf.stage(lambda p, x: x @ p["w"])
    step = sf.shard_map(
        sf.value_and_grad(lambda p, x: sf.pmean(stage(p, x).mean(), "shard")),
        mesh=mesh, in_specs=(..., sf.P("shard")), out_specs=...,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as found:
        step(params, torch.ones(4, 3))
    return own_frames(found.value), [frame.f_code.co_name for frame, _ in traceback.walk_tb(found.value.__traceback__)][
        -1
    ]


def test_an_operation_that_fails_in_a_checked_call_ends_at_the_line_of_the_caller() -> None:
    for own, innermost in world(2, "threads").run(frames_of_a_checked_call):
        assert own == []
        assert innermost == "<lambda>"


def test_an_error_that_the_package_raises_ends_at_the_line_that_calls_it() -> None:
    mesh = sf.make_mesh(shard=1, device="cpu")
    with pytest.raises(ValueError, match="unknown axis 'other'") as found:
        sf.shard({"w": torch.ones(3)}, mesh, sf.full_shard("other"))
    assert own_frames(found.value) == []
    with pytest.raises(ValueError, match="unknown axis") as found:  # of one public function inside of another
        sf.init_sharded({"w": lambda generator: sf.shard({"w": torch.ones(3)}, mesh, sf.full_shard("other"))},
                        0, mesh, sf.full_shard("shard"))  # fmt: skip
    assert own_frames(found.value) == []


def test_a_public_function_that_calls_another_one_ends_at_the_line_that_calls_it() -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match="must return a 0-d") as found:
        sf.grad(lambda p: p["w"])({"w": torch.ones(3)})  # no scalar: `grad` calls `value_and_grad`
    assert own_frames(found.value) == []


def test_causes_are_folded_and_what_goes_wrong_inside_of_the_package_is_not() -> None:
    def fails() -> Any:
        try:
            sf.P(3)  # type: ignore[arg-type]
        except TypeError as error:
            raise RuntimeError("of that") from error

    with pytest.raises(RuntimeError, match="of that") as found:
        tracebacks.api_boundary(fails)()
    assert found.value.__cause__ is not None
    assert own_frames(found.value) == own_frames(found.value.__cause__) == []
    with pytest.raises(TypeError, match="not iterable") as unexpected:
        tracebacks.api_boundary(quoting.listed)(5)  # type: ignore[arg-type]
    assert own_frames(unexpected.value) == ["run", "listed"]


@dataclass(frozen=True)
class Frozen(Exception):
    """An error whose attributes cannot be set."""

    text: str


def test_errors_that_cannot_be_changed_or_that_cause_each_other_arrive_as_they_are() -> None:
    def freezes() -> None:
        raise Frozen("x")

    def turns() -> None:
        error, other = KeyError("x"), IndexError("y")
        error.__cause__, other.__cause__ = other, error
        raise error

    for function, kind in ((freezes, Frozen), (turns, KeyError)):
        outer = tracebacks.api_boundary(lambda function=function: tracebacks.api_boundary(function)())
        with pytest.raises(kind) as found:
            outer()
        assert own_frames(found.value) == []
        assert [frame.f_code.co_name for frame, _ in traceback.walk_tb(found.value.__traceback__)][-1] in (
            "freezes",
            "turns",
        )


def test_what_was_being_handled_is_folded_too() -> None:
    def fails() -> None:
        try:
            sf.P(3)  # type: ignore[arg-type]
        except TypeError:
            raise RuntimeError("of that")  # noqa: B904

    with pytest.raises(RuntimeError, match="of that") as found:
        tracebacks.api_boundary(fails)()
    assert isinstance(found.value.__context__, TypeError)
    assert own_frames(found.value.__context__) == []


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
