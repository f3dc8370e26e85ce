"""Random programs: their losses, gradients and parameters are those of one process, or an error says why not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardfn.testing import world
from tests import random_programs
from tests.random_programs import Action, Line, Op, Program, Stage, Tree, judged, programs, read, written

# The checkpoints that they write go to one folder, which may be there already.
SETTINGS = settings(
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def check(program: Program, folder: Path, kind: Any = "processes") -> None:
    verdict = judged(program, world(program.ranks, kind).with_deadline(20), str(folder))
    assert not verdict.finding, (
        f"{verdict.finding}\n{verdict.trace}\npython -m tests.random_programs --replay FILE, with\n{written(program)}"
    )


@settings(SETTINGS, max_examples=40)
@given(program=programs(4))
def test_programs_on_four_ranks(folder: Path, program: Program) -> None:
    check(program, folder)


@settings(SETTINGS, max_examples=40)
@given(program=programs(1))
def test_programs_on_one_rank(folder: Path, program: Program) -> None:
    check(program, folder)


@settings(SETTINGS, max_examples=250)
@given(program=programs(2))
def test_programs_on_two_ranks(folder: Path, program: Program) -> None:
    check(program, folder)


@settings(SETTINGS, max_examples=40)
@given(program=programs(2, "threads"))
def test_programs_on_threads(folder: Path, program: Program) -> None:
    check(program, folder, "threads")


# Programs that were wrong once, as small as they came to be.
ONCE = {
    "a checkpoint around a stage": '{"stages": [{"ops": [{}, {}]}], "lines": [{"around": "checkpoint"}]}',
    "a gradient that is its cotangent": '{"stages": [{"ops": [{"kind": "add"}]}], "lines": [{}, {}], "actions": '
    '[{"kind": "func_vjp"}, {"kind": "double"}, {"kind": "grad_grad"}]}',
    "an input that is returned twice": '{"stages": [{"outs": [{"kind": "input"}]}], "lines": [{}, {}], "actions": '
    '[{"kind": "func_grad"}]}',
    "a transform inside and outside": '{"stages": [{"ops": [{"kind": "func_vjp"}]}], "actions": '
    '[{"kind": "func_grad"}]}',
    "a policy and what autograd computes": '{"stages": [{"ops": [{"kind": "inplace_mul"}], "remat": "policy"}]}',
    "an attribute of a Function": '{"trees": [{}, {}, {}, {}, {}], "stages": [{"ops": [{"kind": "attribute"}]}], '
    '"lines": [{"kind": "layers"}], "actions": [{}, {"kind": "backward"}, {"kind": "two"}]}',
    "a checkpoint inside a stage": '{"trees": [{}, {}, {}, {}, {}], "stages": [{"ops": [{"wrap": "checkpoint"}]}], '
    '"lines": [{"kind": "layers"}], "actions": [{}, {"kind": "backward"}, {"kind": "two"}]}',
    "saved on the CPU inside a stage": '{"trees": [{}, {}, {}, {}, {}], "stages": [{"ops": [{"kind": "mul", '
    '"wrap": "save_on_cpu"}]}], "lines": [{"kind": "layers"}], "actions": [{}, {"kind": "backward"}, {"kind": "two"}]}',
    "a side door": '{"stages": [{"ops": [{"kind": "side"}]}], "lines": [{}, {"kind": "box"}]}',
    "a closure that starts to need a gradient": '{"stages": [{"ops": [{"kind": "closed"}]}], "actions": [{}, '
    '{"kind": "closes"}, {"kind": "backward"}]}',
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_what_was_wrong_once(folder: Path, name: str) -> None:
    check(read(ONCE[name]), folder)


# --- the machine itself ---


@given(program=st.sampled_from([1, 2, 4]).flatmap(programs))
@settings(SETTINGS, max_examples=30)
def test_a_program_can_be_written_and_read(program: Program) -> None:
    assert read(written(program)) == program


KINDS = ["value_and_grad", "backward", "func_grad", "accumulate", "optimize", "forward", "retain", "two", "double"]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_wrong_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    program = Program(actions=(Action(kind),))
    check(program, folder, "threads")
    right = random_programs.staged

    def wrong(f: Any, stage: Stage) -> Any:
        return right(lambda *args, **kwargs: tuple(y * (1 + 1e-10) for y in f(*args, **kwargs)), stage)

    monkeypatch.setattr(random_programs, "staged", wrong)
    assert "off by" in judged(program, world(2, "threads"), str(folder)).finding


def test_an_error_without_a_reason_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(f: Any, stage: Stage) -> Any:
        def fails(*args: Any, **kwargs: Any) -> Tensor:
            raise RuntimeError("stage f0 ('0') returns a parameter, or a view of one")

        return fails

    monkeypatch.setattr(random_programs, "staged", wrong)
    assert "returns a parameter" in judged(Program(), world(2, "threads"), str(folder)).finding


def test_a_finding_is_made_small() -> None:
    def wrong(program: Program) -> random_programs.Verdict:
        there = any(op.kind == "attribute" for stage in program.stages for op in stage.ops) and len(program.trees) > 2
        return random_programs.Verdict("off by 1" if there else "")

    big = Program(
        trees=(Tree(), Tree(form="list"), Tree(), Tree()),
        stages=(Stage(), Stage(ops=(Op(), Op("attribute", 2), Op("mul")), remat="yes")),
        lines=(Line("layers", a=3), Line()),
        actions=(Action(), Action("two")),
        donate=False,
    )
    small, _ = random_programs.made_small(big, wrong(big), wrong, 10)
    assert small == dataclasses.replace(Program(), trees=(Tree(),) * 3, stages=(Stage(ops=(Op("attribute"),)),))
