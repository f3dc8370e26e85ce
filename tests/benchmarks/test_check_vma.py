"""Who finds what, from a recorded run: what the command and the page on JAX say of it. JAX is not needed."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check_vma
from benchmarks.check_vma import CASES, Found, beyond, checked, goals, in_words, missed, row, summary
from shardfn.testing import world

RECORDED = json.loads(Path(__file__).with_name("check_vma.json").read_text())
TOLD: dict[str, Any] = RECORDED["programs"]
FOUND = {name: Found(tuple(kinds), 0.0) for name, kinds in RECORDED["shardfn"].items()}
HERE = [name for name in CASES if name in FOUND]
assert len(HERE) == len(CASES), "record it again"
ROOT = Path(__file__).resolve().parents[2]


def page() -> tuple[str, list[list[str]]]:
    """The section, and the rows of its table."""
    text = (ROOT / "docs" / "explanation" / "check-vma.md").read_text()
    section = text.split("## What check_vma finds, and what the checker finds")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line[:1] == "|"]
    return section, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_the_recorded_numbers() -> None:
    section, rows = page()
    assert f"JAX {RECORDED['jax']}" in section
    assert f"runs {len(CASES)} wrong programs" in section
    assert rows == [[str(cell) for cell in one.values()] for one in summary(FOUND, TOLD)]


def test_the_page_names_what_jax_alone_finds() -> None:
    section, _ = page()
    for name in HERE:
        alone = TOLD[name]["verdict"] == "finds" and not FOUND[name].kinds
        assert (f"`{name}`" in section) == alone, name


def test_every_recorded_program_has_a_row_in_words() -> None:
    for name in HERE:
        words = row(name, FOUND[name], TOLD[name])
        assert words["JAX"].split(":")[0] in (
            "finds",
            "silent",
            "hangs",
            "cannot be wrong there",
            "cannot be said there",
        )
        assert words["shardfn"] == (", ".join(dict.fromkeys(FOUND[name].kinds)) or "SILENT")
        assert words["what is wrong"].endswith(f"({', '.join(CASES[name].axes)})")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"verdict": "finds", "said": "ValueError: no"}, "finds: ValueError: no"),
        ({"verdict": "right", "results": {}}, "cannot be wrong there"),
        ({"verdict": "cannot", "said": "why"}, "cannot be said there: why"),
        ({"verdict": "silent", "results": {"gradient": {"ratio": 2.0, "off": 1.0}}}, "silent: gradient x 2"),
        ({"verdict": "silent", "results": {"gradient": {"ratio": 1.1, "off": 0.48}}}, "silent: gradient off by 48 %"),
        ({"verdict": "silent", "results": {"value": {"ratio": 1.0, "off": 1e-16}}}, "silent: devices differ"),
    ],
)
def test_what_came_of_a_program_is_said(told: dict[str, Any], words: str) -> None:
    assert in_words(told) == words


def test_what_one_side_alone_finds_is_counted() -> None:
    silent, finds = {"verdict": "silent", "results": {}}, {"verdict": "finds", "said": ""}
    one, two, *rest = CASES
    told = {one: silent, two: finds} | {name: {"verdict": "right"} for name in rest}
    all_found = {name: Found((CASES[name].kind,), 0.0) for name in CASES}
    assert (missed(all_found, told), beyond(all_found, told)) == ([], [one])
    assert [goal.value for goal in goals(all_found, told)] == [0, 0, 0, 1]
    without = all_found | {two: Found((), 0.0)}
    assert missed(without, told) == [two]
    assert [goal.met for goal in goals(without, told)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("missing_pvary_ddp", ("gradient",)), ("mean_of_means_masked", ("means",)), ("jax_value_out", ("output",))],
)
def test_errors_and_warnings_are_what_is_found(name: str, kinds: tuple[str, ...]) -> None:
    for found, seconds in world(2).run(checked, name):
        assert found == kinds
        assert seconds > 0


def test_without_jax_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check_vma"])
    with pytest.raises(SystemExit, match=r"python3 -m venv jaxenv && .*pip install 'jax\[cpu\]', and pass --jax"):
        check_vma.main()
    monkeypatch.setattr(sys, "argv", ["check_vma", "--jax", sys.executable])
    with pytest.raises(SystemExit, match=r"No module named 'jax'; check_vma needs an interpreter that has JAX"):
        check_vma.main()


def test_the_programs_in_jax_import_jax_and_numpy_alone() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "check_vma_jax.py").read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    others = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert others == {"jax", "numpy"}
