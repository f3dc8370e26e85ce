"""Every wrong program of the gallery is found, and is right with the fix that its message names."""

from __future__ import annotations

import functools
import inspect
import math
import re
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import shardfn as sf
from shardfn.check.findings import LAST, PROBABLY
from shardfn.testing import World, world
from tests.check.wrong import GALLERY, Wrong
from tests.models import distance

PLAIN = {"shardfn.": "sf.", '"': "'", "('replica', 'shard')": "BOTH"}
FIX = re.compile(r" *# fix: ")


def fixed(program: Any) -> Any:
    """The program with the lines that stand in its comments."""
    lines = inspect.getsource(program).splitlines()
    found, instead = [], list[str]()
    for line in lines[[line.startswith("def ") for line in lines].index(True) :]:
        if FIX.match(line):
            instead.append(line.replace("# fix: ", "", 1))
        else:
            found += instead or [line]
            instead = []
    scope = dict(program.__globals__)
    exec(compile("\n".join(found), f"{program.__name__} with its fix", "exec"), scope)
    return scope[program.__name__]


def run(case: Wrong, program: Any, check: bool = True) -> list[Any]:
    """The numbers that it returns, whole."""
    mesh = sf.make_mesh(device="cpu", **case.mesh)
    result = sf.unshard(program(functools.partial(sf.shard_map, mesh=mesh, check=check), mesh), mesh)
    return [torch.as_tensor(leaf).detach() for leaf in optree.tree_leaves(result)]


def fixed_numbers(name: str) -> list[Any]:
    return run(GALLERY[name], fixed(GALLERY[name].program))


def unchecked_numbers(name: str) -> list[Any]:
    return run(GALLERY[name], GALLERY[name].program, check=False)


def world_of(case: Wrong) -> World:
    ranks = torch.Size(case.mesh.values()).numel()
    return world(ranks, "threads")


def off(case: Wrong, numbers: list[Any]) -> float:
    """How far from what one process computes."""
    wanted = [torch.as_tensor(leaf) for leaf in optree.tree_leaves(case.reference())]
    same = [x.shape for x in numbers] == [x.shape for x in wanted]
    return distance(numbers, wanted, floor=1e-3) if same else math.inf


@pytest.mark.parametrize("name", GALLERY)
def test_with_the_fix_it_is_one_process(name: str) -> None:
    case = GALLERY[name]
    for numbers in world_of(case).run(fixed_numbers, name):
        assert off(case, numbers) < 1e-12


@pytest.mark.parametrize("name", GALLERY)
def test_when_nobody_checks_it_is_wrong(name: str) -> None:
    case = GALLERY[name]
    if case.hangs:
        errors = world_of(case).with_deadline(1.0).errors(unchecked_numbers, name)
        assert any(isinstance(error, TimeoutError) for error in errors)
    elif case.kind == "NotImplementedError":
        for error in world_of(case).errors(unchecked_numbers, name):
            assert isinstance(error, NotImplementedError)
    else:
        assert max(off(case, numbers) for numbers in world_of(case).run(unchecked_numbers, name)) > 1e-3


def line_of(case: Wrong) -> str:
    """Where the message must point."""
    lines, first = inspect.getsourcelines(case.program)
    found = [first + i for i, line in enumerate(lines) if line.endswith("# here\n")]
    assert len(found) <= 1
    return f"{Path(inspect.getfile(case.program)).name}:{found[0]}" if found else ""


def comments(program: Any) -> str:
    """What is to stand in place of the mistake."""
    return "\n".join(line for line in inspect.getsource(program).splitlines() if FIX.match(line))


def plain(code: str) -> str:
    """The same for what Python reads as the same."""
    return functools.reduce(lambda text, item: text.replace(*item), PLAIN.items(), code)


def findings(name: str) -> Any:
    """What is said of the wrong program: its first finding, and the message."""
    case = GALLERY[name]
    try:
        run(case, case.program)
    except (sf.check.VaryingError, sf.check.VaryingWarning) as error:
        first = error.findings[0]
        return type(error), first.kind, first.axes, first.path, first.where, first.fix, str(error)
    except NotImplementedError as error:
        return type(error), type(error).__name__, case.axes, "", "", "", str(error)


@pytest.mark.parametrize("name", GALLERY)
def test_every_rank_hears_what_is_wrong_and_where_and_what_to_write(name: str) -> None:
    case = GALLERY[name]
    ranks = world_of(case).run(findings, name)
    assert None not in ranks
    assert len({said[-1] for said in ranks}) == 1
    for said in ranks:
        raised, kind, axes, path, where, fix, message = said
        assert (kind, tuple(axes)) == (case.kind, case.axes), message
        if kind != "NotImplementedError":
            assert issubclass(
                raised, (sf.check.VaryingError, sf.check.VaryingWarning) if kind in PROBABLY else sf.check.VaryingError
            )
            assert line_of(case) in (message if kind == "collectives" else where), message  # others call it elsewhere
        assert path.startswith(case.path), message
        assert case.fix in (fix or message), message
        assert case.fix or (fix and plain(fix) in plain(comments(case.program))), message
        assert case.says in message
        assert where in message


def checked_numbers(name: str) -> list[Any]:
    return run(GALLERY[name], GALLERY[name].program)


@pytest.mark.parametrize("name", [name for name, case in GALLERY.items() if case.kind in LAST])
def test_what_may_be_meant_is_warned_of_once_and_runs_on(name: str) -> None:
    case = GALLERY[name]
    with pytest.warns(sf.check.VaryingWarning) as caught:
        ranks = world_of(case).run(checked_numbers, name)
    assert [type(one.message) for one in caught] == [sf.check.VaryingWarning] * world_of(case).size
    for numbers, unchecked in zip(ranks, world_of(case).run(unchecked_numbers, name), strict=True):
        assert all(map(torch.equal, numbers, unchecked))
