"""The table of mutants: each can still be made, its test exists, and the cheapest is caught."""

from __future__ import annotations

import ast
import functools
from dataclasses import replace

import pytest

from tests.mutants import CHANGES, MUTANTS, ROOT, caught, differs

CHEAP = next(mutant for mutant in MUTANTS if mutant.name == "a swapped call passes")


@functools.cache
def functions_in(file: str) -> set[str]:
    found = ast.walk(ast.parse((ROOT / file).read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", CHANGES)
def test_each_mutant_of_a_file_is_another_program_and_has_a_test(file: str) -> None:
    for mutant in (mutant for mutant in MUTANTS if mutant.file == file):
        text = differs(mutant)
        ast.parse(text)
        assert text != (ROOT / "shardfn" / mutant.file).read_text(), mutant.name
        test, *names = mutant.test.partition("[")[0].split("::")
        assert functions_in(test).issuperset(names), mutant.name


def test_names_of_mutants_are_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mutant_is_caught() -> None:
    found, told = caught(CHEAP)
    assert found, told


def test_what_changes_nothing_survives() -> None:
    found, told = caught(replace(CHEAP, new=CHEAP.old))
    assert not found, told
    assert "passed" in told


def test_a_test_that_hangs_catches_nothing() -> None:
    with pytest.raises(
        RuntimeError, match=r"a swapped call passes: tests/optim/test_optim.py\S* did not end within 0 s"
    ):
        caught(CHEAP, deadline=0.01)
