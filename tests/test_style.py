"""Rules of style that a machine can check. The numbers of places that break them only shrink.

`python -m tests.test_style RULE` lists the places.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Words that are no names: participles, adverbs, prepositions and pronouns, which leave out what the value is.
NO_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        again alike among apart aside asked at away beside brought course drawn each forget found given heard held
        here holdings how kept least lent like look made means meet met mine moved most now of on one onward opened
        others ours own room said seen settle shortage surroundings take taken team theirs there together told wanted
        way what who whole why within word yes along
        """,
    )
)
# Phrases of this project alone, and what everybody else writes.
PHRASES = {
    r"few bits": "quantized, 8-bit",
    r"anew": "again",
    r"alike": "identical, in the same way",
    r"in vain": "never completes",
    r"besides?": "compared with, next to, also",
    r"of (?:its|their|your) own": "its own ...",
    r"called off": "aborted",
    r"under way": "in flight",
    r"goe?s? on from": "continues from",
    r"as (?:it is|they are)": "unchanged",
    r"other (?:values|numbers|rows|shapes|bits|dtypes)": "different ...",
    r"cut (?:over|along|into|between)": "sharded over, split into",
}
ALLOWED = {
    "names of locals and parameters": 134,
    "names of functions": 0,
    "names of functions in more than two modules": 10,
    "names of classes in several modules": 2,
    "docstrings that begin with a clause": 0,
    "docstrings with long first lines": 0,
    "docstrings with phrases": 0,
    "messages that state a rule as a fact": 0,
    "long messages": 0,
    "pages with phrases": 4,
    "pages with long sentences": 3,
}


@cache
def places() -> dict[str, list[str]]:
    """The places that break each rule."""
    found: dict[str, list[str]] = defaultdict(list)
    modules: dict[tuple[type, str], set[str]] = defaultdict(set)
    for file in sorted((ROOT / "shardfn").rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
            if isinstance(node, ast.FunctionDef):
                check_names(node, where, found)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                check_docstring((ast.get_docstring(node) or "").split("\n")[0], where, found)
            if isinstance(node, ast.Raise) and node.exc is not None:
                check_messages(node.exc, where, found)
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                modules[type(node), node.name.lstrip("_")].add(str(file))
    for (kind, name), files in modules.items():
        if kind is ast.FunctionDef and len(files) > 2:
            found["names of functions in more than two modules"].append(f"{name}: {len(files)}")
        if kind is ast.ClassDef and len(files) > 1:
            found["names of classes in several modules"].append(f"{name}: {len(files)}")
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        check_page(page.read_text(), str(page.relative_to(ROOT)), found)
    return found


def check_names(function: ast.FunctionDef, where: str, found: dict[str, list[str]]) -> None:
    """Adds a function's name, and those of its locals and parameters."""
    if function.name.lstrip("_") in NO_NAMES:
        found["names of functions"].append(f"{where} {function.name}")
    stored = {x.id for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    for name in sorted((stored | {x.arg for x in ast.walk(function.args) if isinstance(x, ast.arg)}) & NO_NAMES):
        found["names of locals and parameters"].append(f"{where} {function.name}: {name}")


def check_docstring(first: str, where: str, found: dict[str, list[str]]) -> None:
    """Adds a docstring whose first line breaks rules."""
    if re.match(r"(What|Those|Who|Whose|Where|When|How)\b", first):
        found["docstrings that begin with a clause"].append(f"{where} {first}")
    if len(first.split()) > 22:
        found["docstrings with long first lines"].append(f"{where} {first}")
    found["docstrings with phrases"] += [f"{where} {first}" for phrase in PHRASES if re.search(rf"\b{phrase}\b", first)]


def check_messages(error: ast.expr, where: str, found: dict[str, list[str]]) -> None:
    """Adds the texts of an error that break rules."""
    for node in ast.walk(error):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(x.value) if isinstance(x, ast.Constant) else "X" for x in parts)
        if not isinstance(node, ast.JoinedStr) and not (isinstance(node, ast.Constant) and type(node.value) is str):
            continue
        if re.search(r"; it (is|takes)\b|, and this is\b|, not X$", text):
            found["messages that state a rule as a fact"].append(f"{where} {text}")
        if len(text.split()) > 35:
            found["long messages"].append(f"{where} {text}")


def check_page(text: str, page: str, found: dict[str, list[str]]) -> None:
    """Adds phrases and long sentences of a page, without its code."""
    prose = re.sub(r"^\s*```.*?^\s*```\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    for phrase in PHRASES:
        found["pages with phrases"] += [f"{page} {match.group()}" for match in re.finditer(rf"\b{phrase}\b", prose)]
    lines = " ".join(line for line in prose.split("\n") if not line.startswith(("|", "#", "!", "<", "*")))
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`])", re.sub(r"\s+", " ", lines)):
        if len(sentence.split()) > 32:
            found["pages with long sentences"].append(f"{page} {sentence}")


@pytest.mark.parametrize("rule", ALLOWED)
def test_no_rule_is_broken_in_more_places_than_before(rule: str) -> None:
    count = len(places()[rule])
    assert count <= ALLOWED[rule], f"{count} places: `python -m tests.test_style '{rule}'` lists them"
    assert count == ALLOWED[rule], f"{count} places are left: lower the number in ALLOWED"


if __name__ == "__main__":
    print(*places()[sys.argv[1]], sep="\n")
