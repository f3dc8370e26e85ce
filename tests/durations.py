"""Selects tests by tier, from the recorded durations of earlier runs.

pytest                        the tests named on the command line, or all
pytest --tier=fast            make test-fast: quick tests, the quickest test of every file, and the tests of tier
                              "change" for the folders of shardfn with uncommitted edits
pytest --tier=change          make test: enough cases of each test to have every row of each `parametrize`, but not
                              every pair of rows, and of those as many as fit in the test's budget, spread over its
                              table; no slow cases, except the quickest one of a file that has only slow ones, and the
                              first one of a test that is marked as central; of a test that is marked as
                              sampled(count), the first cases alone
pytest --tier=deep            part of make test-deep: the cases that tier "change" leaves out
pytest --record-durations     updates durations.json with the tests that ran
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

Row = tuple[tuple[str, int], ...]

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("durations.json")
BUDGET = 4.0  # seconds of each test in tier change
SLOW = 0.7  # seconds per case, above which it is in the deep tier
QUICK = 0.2  # seconds per case, up to which it is in the fast tier


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the two options."""
    parser.addoption("--tier", choices=("fast", "change", "deep"), help="the tests of make test-fast, test, test-deep")
    parser.addoption("--record-durations", action="store_true", help="write the seconds of each test to durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Starts recording, if asked for; not in workers, since the main process gets all reports."""
    config.addinivalue_line("markers", "central: a slow test whose first case is in tier change")
    config.addinivalue_line("markers", "sampled(count): a test of which only the first cases are in tier change")
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


class Recorder:
    """Adds up the seconds of each test's cases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cases: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the duration of a call, a set-up or a teardown."""
        self.seconds[test := name(report.nodeid)] += report.duration
        self.cases[test].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Writes the seconds and the number of cases of every test that ran and takes a second or more."""
        tests = recorded()
        for test, seconds in self.seconds.items():
            _, known = tests.pop(test, (0.0, 0))
            if seconds >= 1 or len(self.cases[test]) < known:  # of a test with a record, some cases may be quick
                tests[test] = round(seconds, 1), len(self.cases[test])
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(tests.items()))
        RECORD.write_text(f"{{\n{lines}\n}}\n")


def name(nodeid: str) -> str:
    """The test's name without its parameters."""
    return nodeid.split("[", 1)[0]


def recorded() -> dict[str, tuple[float, int]]:
    """The recorded seconds and number of cases, by test."""
    return {key: (seconds, cases) for key, (seconds, cases) in json.loads(RECORD.read_text()).items()}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests of other tiers; several workers begin with the longest files."""
    record = recorded()

    def seconds(item: pytest.Item) -> float:
        total, cases = record.get(name(item.nodeid), (0.0, 1))
        return total / cases

    def quick(some: Iterable[pytest.Item], limit: float) -> set[pytest.Item]:
        """The cases within the limit; of a file without any, the quickest case."""
        some = sorted(some, key=seconds)
        first = {item.path: item for item in reversed(some)}
        return {item for item in some if seconds(item) <= limit or item is first[item.path]}

    if tier := config.getoption("--tier"):
        by_test: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            by_test[name(item.nodeid)].append(item)
        thin = (thinned(cases, seconds(cases[0]) * len(cases)) for cases in by_test.values())
        central = {cases[0] for cases in by_test.values() if cases[0].get_closest_marker("central")}
        kept = change = quick((item for cases in thin for item in cases), SLOW) | central
        if tier == "deep":
            kept = set(items) - change
        elif tier == "fast":
            edited = edited_folders()
            # In order, so that every worker keeps the same of equally quick ones.
            kept = quick((item for item in items if item in change), QUICK) | {
                item for item in change if item.path.parent.name in edited
            }
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    if hasattr(config, "workerinput"):  # workers take file after file
        total: Counter[Path] = Counter()
        for item in items:
            total[item.path] += round(1000 * seconds(item))
        items.sort(key=lambda item: -total[item.path])


def edited_folders() -> set[str]:
    """The folders of shardfn with changes since the last commit."""
    command = ["git", "status", "--porcelain", "--no-renames", "--", "shardfn"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    return {Path(line[3:]).parent.name for line in lines}


def thinned(cases: list[pytest.Item], seconds: float) -> list[pytest.Item]:
    """The cases of one test that tier change has, if they are not slow."""
    if sampled := cases[0].get_closest_marker("sampled"):
        return cases[: sampled.args[0]]
    chosen = cover(cases)
    count = max(1, int(BUDGET * len(cases) / seconds)) if seconds else len(chosen)
    return [chosen[i * len(chosen) // count] for i in range(count)] if count < len(chosen) else chosen


def cover(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Cases in which every row of every `parametrize` occurs: chosen greedily, by most new rows, then by rare ones."""
    values = {case: rows(case) for case in cases if hasattr(case, "callspec")}
    missing = {value for pairs in values.values() for value in pairs}
    times: Counter[Row] = Counter()
    chosen = [case for case in cases if case not in values]
    while missing:
        case = max(values, key=lambda case: (len(values[case] & missing), -sum(times[value] for value in values[case])))
        chosen.append(case)
        missing -= values[case]
        times.update(values.pop(case))
    return chosen


def rows(case: pytest.Item) -> frozenset[Row]:
    """The names and the identities of a case's values; values that one decorator gives together are one row."""
    left: dict[str, Any] = dict(case.callspec.params)  # type: ignore[attr-defined]
    found: set[Row] = set()
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        # The cases of a test share the objects of their values.
        found.add(tuple((name, id(left.pop(name))) for name in names if name in left))
    return frozenset(found | {((name, id(value)),) for name, value in left.items()})
