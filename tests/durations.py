"""Which tests run when, by the seconds that they took when these were last recorded.

pytest                        all that is named
pytest --tier=fast            make test-fast: what takes little, the quickest test of every file, and those of the
                              next tier for the folders of shardfn that git sees edited
pytest --tier=change          make test: of tests that take long, every value of every parameter, not every pair;
                              of tests of which one case takes long, only the quickest of a file without others
pytest --tier=deep            part of make test-deep: what the tier before leaves out
pytest --record-durations     writes durations.json, from a run of everything
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("durations.json")
LONG = 2.0  # seconds for all cases of a test, from which on some do
SLOW = 2.0  # seconds for a case, from which on it is of the deep tier
QUICK = 0.2  # seconds for a case, up to which it is of the fast tier


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options."""
    parser.addoption("--tier", choices=("fast", "change", "deep"), help="the tests of make test-fast, test, test-deep")
    parser.addoption("--record-durations", action="store_true", help="write what each test takes to durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Record, where that is asked for and tests are reported: not in a worker."""
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


class Recorder:
    """Adds up what the cases of each test take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cases: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up and end count, too."""
        self.seconds[test := name(report.nodeid)] += report.duration
        self.cases[test].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write what takes a second or more: by test, seconds and cases."""
        tests = {key: [round(s, 1), len(self.cases[key])] for key, s in sorted(self.seconds.items()) if s >= 1}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in tests.items())
        RECORD.write_text(f"{{\n{lines}\n}}\n")


def name(nodeid: str) -> str:
    """The test without its parameters."""
    return nodeid.split("[", 1)[0]


def recorded() -> dict[str, tuple[float, int]]:
    """By test, the seconds and the number of its cases."""
    return {key: (seconds, cases) for key, (seconds, cases) in json.loads(RECORD.read_text()).items()}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of the tier; several workers begin with the files that take longest."""
    record = recorded()

    def seconds(item: pytest.Item) -> float:
        total, cases = record.get(name(item.nodeid), (0.0, 1))
        return total / cases

    def quick(some: Iterable[pytest.Item], limit: float) -> set[pytest.Item]:
        """Those that take no longer; of a file that has none, the quickest."""
        some = sorted(some, key=seconds)
        first = {item.path: item for item in reversed(some)}
        return {item for item in some if seconds(item) <= limit or item is first[item.path]}

    if tier := config.getoption("--tier"):
        by_test: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            by_test[name(item.nodeid)].append(item)
        thin = (cover(cases) if seconds(cases[0]) * len(cases) > LONG else cases for cases in by_test.values())
        kept = change = quick((item for cases in thin for item in cases), SLOW)
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
    """The folders of shardfn in which something differs from the last commit."""
    command = ["git", "status", "--porcelain", "--no-renames", "--", "shardfn"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    return {Path(line[3:]).parent.name for line in lines}


def cover(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Cases in which every value of every parameter occurs: the next has most new values, and rare ones of the old."""
    specs = {case: getattr(case, "callspec", None) for case in cases}
    # The cases of a test share the values: each is one object.
    values = {case: frozenset((k, id(x)) for k, x in spec.params.items()) for case, spec in specs.items() if spec}
    missing = {value for pairs in values.values() for value in pairs}
    times: Counter[tuple[str, int]] = Counter()
    chosen = [case for case in cases if case not in values]
    while missing:
        case = max(values, key=lambda case: (len(values[case] & missing), -sum(times[value] for value in values[case])))
        chosen.append(case)
        missing -= values[case]
        times.update(values.pop(case))
    return chosen
