"""Every test is in one tier, and few cases of a test hold every value of its parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import durations

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
def test_long(a, b): pass

def test_slow(): pass

@pytest.mark.central
@pytest.mark.parametrize("c", range(2))
def test_central(c): pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("d", range(5))
def test_sampled(d): pass

@pytest.mark.parametrize("e", range(10))
def test_table(e): pass

@pytest.mark.parametrize("f, g", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_rows(f, g): pass

def test_new(): pass
"""
RECORD = {
    "test_one.py::test_long": [24.0, 12],
    "test_one.py::test_slow": [90.0, 1],
    "test_one.py::test_central": [20.0, 2],
    "test_one.py::test_table": [15.0, 10],
    "test_two.py::test_slow": [90.0, 1],
}
SPREAD = {f"test_one.py::test_table[{i}]" for i in (0, 1, 3, 5, 6, 8)}
SAMPLE = {"test_one.py::test_sampled[0]", "test_one.py::test_sampled[1]"}
# Those without a record, and the only one of its file.
ROWS = {f"test_one.py::test_rows[{i}-{j}]" for i in (0, 1) for j in (0, 1)}
QUICK = {"test_one.py::test_new", "test_two.py::test_slow"} | SAMPLE | ROWS


@pytest.fixture
def tiers(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The tests of each tier, and of none, of two files: one of them has only a slow test."""
    record = pytester.path / "durations.json"
    record.write_text(json.dumps(RECORD))
    monkeypatch.setattr(durations, "RECORD", record)
    monkeypatch.setattr(durations, "SLOW", 2.0)
    monkeypatch.setattr(durations, "BUDGET", 9.0)
    pytester.makepyfile(test_one=TESTS, test_two="def test_slow(): pass")

    def chosen(*options: str) -> set[str]:
        result = pytester.inline_run("-p", "tests.durations", "--collect-only", *options)
        (call,) = result.getcalls("pytest_collection_finish")
        return {item.nodeid for item in call.session.items}

    return {tier: chosen(f"--tier={tier}") for tier in ("fast", "change", "deep")} | {"": chosen()}


def test_every_test_is_run_by_make_test_or_by_make_test_deep(tiers: dict[str, set[str]]) -> None:
    assert len(tiers[""]) == 12 + 5 + 5 + 10 + 4
    assert tiers["change"] | tiers["deep"] == tiers[""]
    assert not tiers["change"] & tiers["deep"]
    assert tiers["fast"] <= tiers["change"]


def test_what_takes_long_is_thinned_and_what_is_new_runs(tiers: dict[str, set[str]]) -> None:
    kept = {nodeid for nodeid in tiers["change"] if "test_long" in nodeid}
    values = [nodeid.split("[")[1][:-1].split("-") for nodeid in kept]
    assert len(values) == 4
    assert sorted(len({*column}) for column in zip(*values, strict=True)) == [3, 4]
    assert tiers["change"] - kept == QUICK | SPREAD | {"test_one.py::test_central[0]"}
    assert tiers["fast"] == QUICK


def test_of_a_long_table_cases_from_all_of_it_fit_in_the_budget(tiers: dict[str, set[str]]) -> None:
    assert {nodeid for nodeid in tiers["change"] if "test_table" in nodeid} == SPREAD


def test_a_recorded_run_says_what_each_test_took(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    record = pytester.path / "durations.json"
    record.write_text('{"test_it.py::test_quick": [9.0, 1], "test_another.py::test_long": [9.0, 1]}')
    monkeypatch.setattr(durations, "RECORD", record)
    pytester.makepyfile(
        test_it="import time, pytest\n"
        "@pytest.mark.parametrize('n', range(2))\ndef test_long(n): time.sleep(0.6)\n"
        "def test_quick(): pass"
    )
    pytester.inline_run("-p", "tests.durations", "--record-durations")
    found = json.loads(record.read_text())
    assert found.pop("test_another.py::test_long") == [9.0, 1], "it did not run"
    ((name, (seconds, cases)),) = found.items()
    assert (name, cases) == ("test_it.py::test_long", 2)
    assert 1.2 <= seconds < 10


def test_every_recorded_test_is_there() -> None:
    """Or it was renamed, and its time is that of nobody."""
    root, texts = durations.ROOT, dict[Path, str]()
    for name in durations.recorded():
        file, *_, function = name.split("::")
        path = root / file
        texts.setdefault(path, path.read_text())
        assert f"def {function}(" in texts[path], name
