"""The table of mutants: each can still be made, its test exists, and the cheapest are caught."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, caught, differs

CHEAP = ["a swapped call passes", "parameters are returned"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_another_program_and_has_a_test(mutant: Mutant) -> None:
    text = differs(mutant)
    ast.parse(text)
    assert text != (ROOT / "shardfn" / mutant.file).read_text()
    file, *names = mutant.test.partition("[")[0].split("::")
    found = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert found.issuperset(names)


def test_names_of_mutants_are_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("name", CHEAP)
def test_a_mutant_is_caught(name: str) -> None:
    found, told = caught(next(mutant for mutant in MUTANTS if mutant.name == name))
    assert found, told


def test_what_changes_nothing_survives() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == CHEAP[0])
    found, told = caught(replace(mutant, new=mutant.old))
    assert not found, told
    assert "passed" in told
