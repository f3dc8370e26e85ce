"""Every figure that the documentation promises: its value, its goal, and the value recorded last.

    python -m benchmarks.goals                       # counted figures: part of make test
    python -m benchmarks.goals --timed --record      # all figures, on an otherwise idle machine; then README.md

Each command below is a benchmark, which runs as its own process with a deadline. A figure fails if it is worse than
recorded by more than its tolerance, misses a goal that it had met, is missing, or was never recorded. A command that
cannot run fails too. A command that lacks something, such as a GPU, does not fail, but reports what it lacks. Only
`--record` writes benchmarks/figures.json and the tables of README.md that come from it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import readme
from benchmarks.report import LACKING, Goal, parser, save, short

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("figures.json")
Record = dict[str, Any]  # by command: seconds, figures by name, and rows if README.md shows them


@dataclass(frozen=True)
class Command:
    """A benchmark.

    Attributes:
        words: the command after `python -m benchmarks.`
        deadline: in seconds.
        tolerance: the smallest tolerance of its figures.
        needs: an option of this program that must be given, and is passed on to the command.
    """

    words: str
    deadline: float
    tolerance: float = 0.0
    needs: str = ""


COUNTED = [
    Command("structure", 120, 0.005),  # so that a fix may add a few lines
    Command("wire", 300),
    Command("launches", 300),
    Command("peak", 200),
    Command("messages", 200, 0.25),  # better words may take more letters, up to the goal
    Command("imports", 200),
    Command("axes", 400),
    Command("stage_overhead --calls", 200, 0.01),
]
NOISE = 0.1
TIMED = [
    Command("train_step --ranks 2", 600, NOISE),
    Command("train_step --ranks 4 --rounds 5", 900, NOISE),
    Command("stage_overhead", 200, NOISE),
    Command("stage_overhead --compiled", 500, 2.0),  # the difference of two times that are nearly equal
    Command("collectives", 300, NOISE),
    Command("collectives --gloo 2 --repeats 7", 300, NOISE),
    Command("optimizer", 600, NOISE),
    Command("muon --rounds 7", 300, NOISE),
    Command("compiled", 600, NOISE),
    Command("shampoo", 300, NOISE),
    Command("strategies --rounds 3", 600, NOISE),
    Command("parallel --peers", 400, NOISE),
    Command("checkpoint", 300, NOISE),
    Command("plan", 600, NOISE),
    Command("plan_trackers", 400, NOISE),
    Command("which_strategy --models", 900, NOISE),
    Command("loop --rounds 8", 600, NOISE),
    Command("data", 200, NOISE),
    Command("check", 400, NOISE),
    Command("parameter_memory", 300, NOISE),
    Command("transforms", 300, NOISE),
    Command("curvature", 300, NOISE),
    Command("curvature --limited", 300),
    Command("curvature --peers", 600, NOISE),
    Command("per_example", 400, NOISE),
    Command("per_example --peers", 600, NOISE),
    Command("interop --rounds 5", 500, NOISE),
    Command("bits --only formats memory", 400, NOISE),
    Command("bits --only convergence", 900, 0.6),  # single runs, in which other roundings change some tenths
    Command("tiers --only state growth --rounds 2", 900, NOISE),
    Command("tiers --only peer", 400, NOISE, needs="deepspeed"),
    Command("hosts", 600, NOISE),
    Command("plan_hosts", 400, NOISE),
    Command("elastic", 300, NOISE),
    Command("exact --steps 10 --rounds 5", 900, NOISE),
    Command("gpu", 5000, NOISE),
    Command("check_vma", 600, NOISE, needs="jax"),
]


@dataclass(frozen=True)
class Outcome:
    """The result of a command.

    Attributes:
        goals: its figures.
        rows: its table.
        seconds: the time that it took.
        lacks: what it needs but is missing.
        failed: why it has no figures.
    """

    goals: list[Goal] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    lacks: str = ""
    failed: str = ""


# --- one command ---


def outcome(command: Command, given: dict[str, str | None]) -> Outcome:
    """Runs a command."""
    more: list[str] = []
    if command.needs:
        program = given[command.needs]
        if not program:
            return Outcome(lacks=f"--{command.needs} PYTHON, an interpreter that has it")
        more = [f"--{command.needs}", program]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "told.json")
        module, *words = command.words.split()
        line = [sys.executable, "-m", f"benchmarks.{module}", *words, *more, "--json", str(file)]
        status, last = ran(line, command.deadline)
        if status == LACKING:
            return Outcome(lacks=last)
        if status:
            return Outcome(failed=last)
        told = json.loads(file.read_text())
    goals = [Goal(*(one[key] for key in ("name", "value", "limit", "sense", "tolerance"))) for one in told["goals"]]
    return Outcome(goals, told["rows"], time.perf_counter() - began)


def ran(line: list[str], deadline: float) -> tuple[int, str]:
    """Runs a command line; returns its exit status and its last line on stderr, and ends all of its processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True, **options) as process:
        try:
            _, complaints = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            return -1, f"did not end within {deadline:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    lines = [one for one in complaints.splitlines() if one.strip()] or [f"exit status {process.returncode}"]
    return process.returncode, lines[-1]


# --- one figure, compared with its record ---


def judged(now: Goal | None, then: dict[str, Any] | None) -> tuple[bool, str]:
    """Whether a figure passes, and a remark on it."""
    if now is None:
        return False, "GONE: no command tells it"
    if then is None:
        return False, "NEW: record it"
    before = Goal(now.name, then["value"], then["limit"], then["sense"])
    sign = 1 if now.sense == "at most" else -1
    if before.sense != now.sense or sign * (now.limit - before.limit) > 0:
        return False, f"ITS GOAL WAS {before.sense} {short(before.limit)}"
    worse = sign * (now.value - before.value)
    slack = then["tolerance"] * max(abs(before.value), abs(before.limit))
    if not worse <= slack:  # true for nan
        return False, "WORSE"
    if before.met and not now.met:
        return False, "MISSED, was met"
    if worse < -slack:
        return True, "better: record it"
    return True, "" if now.met else "short, as recorded"


def told(command: Command, found: Outcome, record: Record) -> Iterator[tuple[str, str, str, str, bool, str]]:
    """Rows of the table: figure, value, goal, recorded value, whether it passes, and a remark."""
    if found.lacks or found.failed:
        yield (
            "(all)",
            "",
            "",
            "",
            not found.failed,
            f"needs {found.lacks}" if found.lacks else f"FAILED: {found.failed}",
        )
        return
    before: dict[str, Any] = record.get(command.words, {}).get("figures", {})
    now = {goal.name: goal for goal in found.goals}
    for name in [*now, *(name for name in before if name not in now)]:
        one, then = now.get(name), before.get(name)
        well, said = judged(one, then)
        value, goal = (short(one.value), f"{one.sense} {short(one.limit)}") if one else ("", "")
        yield name, value, goal, short(then["value"]) if then else "", well, said


# --- the record ---


def recorded(command: Command, found: Outcome) -> dict[str, Any]:
    """The record of a command."""
    kept: dict[str, Any] = {
        "seconds": round(found.seconds),
        "figures": {
            one.name: {
                "value": one.value, "limit": one.limit, "sense": one.sense,
                "tolerance": max(one.tolerance, command.tolerance),
            } for one in found.goals
        },
    }  # fmt: skip
    return kept | ({"rows": found.rows} if command.words in readme.COMMANDS else {})


def known() -> Record:
    found: Record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def keep(outcomes: dict[Command, Outcome]) -> None:
    """Updates the record with the commands that ran, and writes README.md."""
    ran = {one.words: recorded(one, found) for one, found in outcomes.items() if found.goals}
    RECORD.write_text(json.dumps(known() | ran, indent=1) + "\n")
    readme.write(known())


def main() -> None:
    options = parser("Every figure that the docs promise, with its goal and its record.")
    options.add_argument("--timed", action="store_true", help="also timed figures: on an idle machine, half an hour")
    options.add_argument("--only", nargs="+", metavar="NAME", help="benchmarks: a module, or a module and its options")
    options.add_argument("--record", action="store_true", help="write these values to figures.json and README.md")
    options.add_argument("--readme", action="store_true", help="only write the tables of README.md, from the record")
    for needed in ("jax", "deepspeed"):
        options.add_argument(f"--{needed}", metavar="PYTHON", help=f"a Python interpreter that has {needed}")
    args = options.parse_args()
    if args.readme:
        readme.write(known())
        return
    if failures := compared(chosen(args.timed, args.only), vars(args), args.record, args.json):
        raise SystemExit("\n".join(failures))


def chosen(timed: bool, only: list[str] | None) -> list[Command]:
    """The commands to run; `only` chooses among counted and timed ones."""
    if not only:
        return [*COUNTED, *(TIMED if timed else [])]
    every = [*COUNTED, *TIMED]
    names = {one: {one.words, one.words.split()[0]} for one in every}
    if unknown := {*only} - set().union(*names.values()):
        sys.exit(f"no benchmark is called {', '.join(sorted(unknown))}: {', '.join(one.words for one in every)}")
    return [one for one in every if names[one] & {*only}]


def compared(commands: list[Command], given: dict[str, Any], record: bool, file: Path | None = None) -> list[str]:
    """Runs the commands and prints the table; returns a line for each figure that fails.

    After each command, `file` has the rows and goals of all commands so far.
    """
    outcomes: dict[Command, Outcome] = {}
    failures = []
    before = known()
    table = Table("figure", "value", "goal", "recorded", "", title="figures and their goals", title_justify="left")
    for command in commands:
        found = outcomes[command] = outcome(command, given)
        print(f"benchmarks.{command.words}: {found.seconds:.0f} s", file=sys.stderr)
        rows = [{"command": one.words, **row} for one, each in outcomes.items() for row in each.rows]
        save(rows, [goal for each in outcomes.values() for goal in each.goals], file)
        table.add_section()
        table.add_row(f"[b]{command.words}[/b]", "", "", "", f"{found.seconds:.0f} s")
        for name, value, goal, then, well, said in told(command, found, before):
            table.add_row(name, value, goal, then, said)
            if not well:
                failures.append(f"{command.words}: {name}: {said} ({value or 'nothing'}; recorded {then or 'nothing'})")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if record:
        keep(outcomes)
        return [f"{one.words}: {found.failed}" for one, found in outcomes.items() if found.failed]
    return failures


if __name__ == "__main__":
    main()
