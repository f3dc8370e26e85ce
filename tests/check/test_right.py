"""The checker is silent on right programs, and changes nothing of what they give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from examples import train_lm
from shardfn import P
from shardfn.testing import world
from shardfn.transforms.checking import CheckedCall
from tests.check.right import PROGRAMS, On
from tests.models import distance

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
HEARD = '"error::shardfn.check.VaryingWarning"'
SMALL = train_lm.Config(
    width=16, heads=2, layers=2, hidden=24, context=16, batch=8, warmup=3, dtype=torch.float64, clip=0.5
)


def told(name: str, check: bool, folder: Path) -> tuple[list[Any], Any]:
    """What a program gave at its first and at its second call, and what it should."""
    program = PROGRAMS[name]
    run, wanted = program.make(On(check, program.sizes, folder))
    return [run() for _ in range(2)], wanted


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees are equal in everything."""
    (a, first), (b, second) = optree.tree_flatten(one), optree.tree_flatten(other)
    return first == second and all(map(_same, a, b))


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return bool(x == y)
    kinds = [(type(t), t.shape, t.dtype, t.stride(), t.requires_grad) for t in (x, y)]
    return kinds[0] == kinds[1] and x.detach().equal(y.detach())


def apart(got: Any, want: Any) -> float:
    """The largest difference, relative to each tensor's largest number; it counts booleans as 0 and 1."""
    return distance(optree.tree_map(_number, got), optree.tree_map(_number, want), floor=1.0)


def _number(x: Any) -> Any:
    return x.int() if isinstance(x, Tensor) and x.dtype == torch.bool else x


def tried(name: str, folder: Path) -> tuple[bool, float]:
    """Whether a program gives the same with the checker and without, and how far that is from the reference."""
    checked, wanted = told(name, check=True, folder=folder)
    plain, _ = told(name, check=False, folder=folder)
    dist.barrier()
    return all(same_bits(each, plain[0]) for each in (*checked, *plain)), apart(checked[0], wanted)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_passes_in_silence_and_unchanged(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    ranks = torch.tensor(list(program.sizes.values())).prod().item()
    for equal, off in world(int(ranks), program.kind).run(tried, name, tmp_path):  # a warning is an error here
        assert equal
        assert off <= program.tolerance


def test_a_wrong_program_would_not_pass(tmp_path: Path) -> None:
    def body() -> Any:
        on = On(True, {"shard": 2}, tmp_path)
        return on(lambda x: x.sum(), P("shard"), P())(on.cut(torch.arange(4.0), "shard"))

    assert all(isinstance(error, sf.check.VaryingError) for error in world(2, "threads").errors(body))


def test_there_are_many_right_programs() -> None:
    assert len(PROGRAMS) >= 45


def trained() -> int:
    """The main job, on a small model; how many of its calls were checked."""
    text = torch.frombuffer(bytearray(b"def f(x):\n    return x + 1\n" * 40), dtype=torch.uint8)
    mesh = sf.make_mesh(device="cpu", replica=2, shard=2)
    with mock.patch.object(CheckedCall, "finish", autospec=True, side_effect=CheckedCall.finish) as finished:
        train_lm.train(SMALL, mesh, (text, text.flip(0)), 3, 0, sf.hybrid_shard(shard="shard", replica="replica"))
    return finished.call_count


def test_the_main_job_is_checked_in_silence() -> None:
    # Its own tests, and those of the other examples, run with the checker too, whose warnings are errors there.
    assert all(calls >= 1 for calls in world(4).run(trained))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_the_examples_are_checked_and_their_tests_hear_of_it(file: Path) -> None:
    tests = ROOT / "tests" / "examples" / f"test_{file.stem}.py"
    assert "check=False" not in file.read_text()
    ignored = re.findall(r"filterwarnings\((.*)\)", tests.read_text()) if tests.exists() else []
    assert all(HEARD in marks for marks in ignored if '"ignore"' in marks)
