"""Wrong programs: what shardfn's checker finds, and what JAX's `shard_map(check_vma=True)` does with their equivalents.

    OMP_NUM_THREADS=1 python -m benchmarks.check_vma --jax jaxenv/bin/python

Each program has one mistake. They are the gallery of the checker's tests (tests/check/wrong.py), and programs that JAX
refuses (tests/check/from_jax.py). In shardfn, they run on gloo processes, and a mistake counts as found if the call
raises an error or warns; seconds are those of the second of two checked calls. In JAX (benchmarks/check_vma_jax.py),
they run in the interpreter that `--jax` names, on CPU devices, and are compared with one device in float64:

    finds                    it raises an error; the first line is shown
    silent                   it runs, but computes something else, or different numbers on each device
    hangs                    it runs, and waits forever
    cannot be wrong there    it runs and is right: JAX inserts `pvary` by itself, and counts replicated values once
    cannot be said there     JAX has no equivalent
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardfn as sf
from benchmarks.report import Goal, lacks, parser, publish
from shardfn.testing import World, WorldError, WorldTimeout
from tests.check.from_jax import CANNOT, FROM_JAX
from tests.check.wrong import TYPED, Wrong

CASES: dict[str, Wrong] = TYPED | FROM_JAX
BEYOND = 5  # the least number of programs that are found here but are silent or hang in JAX
FLAGS = "--xla_force_host_platform_device_count=4 --xla_cpu_collective_call_terminate_timeout_seconds=5"
MISTAKES = {
    "gradient": "the gradient of a replicated value covers one rank's rows only",
    "output": "an output varies, but its spec declares it invariant",
    "sum": "`psum` of a value that is the same on all ranks",
    "losses": "gradients of the sum, not the mean, of the ranks' losses",
    "whole": "a sum of values that every rank holds whole",
    "inner": "a gradient within a gradient, of each rank's own loss",
    "parts": "a gradient that leaves as each rank's part",
    "branch": "the result of a collective, dropped on some ranks",
    "means": "a mean of means, or `psum` and `pmean` of gradients mixed up",
    "vary": "`pvary` or `local_slice` of a value that varies already",
    "batch_norm": "batch statistics of one rank's rows",
    "replica": "replicas that differ",
    "same": "the same rows, or random numbers, on all ranks",
    "closure": "a tensor that is closed over differs between ranks",
    "collectives": "ranks call different collectives",
    "NotImplementedError": "the derivative of `pmax`",
}
NO_JAX = (
    "check_vma needs an interpreter that has JAX, which shardfn does not: make one by "
    "python3 -m venv jaxenv && jaxenv/bin/pip install 'jax[cpu]', and pass --jax jaxenv/bin/python"
)


@dataclass(frozen=True)
class Found:
    """The result of shardfn's checker for a program.

    Attributes:
        kinds: the kinds of its findings, the first cause first; empty if there are none.
        seconds: the time of the call.
    """

    kinds: tuple[str, ...]
    seconds: float


# --- shardfn ---


def checked(name: str) -> tuple[tuple[str, ...], float]:
    """The kinds of findings, and the seconds of a checked call, on this rank."""
    case = CASES[name]
    mesh = sf.make_mesh(device="cpu", **case.mesh)
    torch.manual_seed(mesh.get_rank())  # as in processes without a common seed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.perf_counter()
        kinds: tuple[str, ...] = ()
        try:
            case.program(functools.partial(sf.shard_map, mesh=mesh, check=True), mesh)
        except sf.check.VaryingError as error:
            kinds = tuple(one.kind for one in error.findings)
        except NotImplementedError:
            kinds = ("NotImplementedError",)
        except ValueError as error:  # raised before ranks would wait for each other
            if "collectives differ between ranks" not in str(error):
                raise
            kinds = ("collectives",)
        seconds = time.perf_counter() - began
    warned = [one.message for one in caught if isinstance(one.message, sf.check.VaryingWarning)]
    return kinds + tuple(one.kind for warning in warned for one in warning.findings), seconds


def found_here(worlds: Mapping[int, World], name: str) -> Found:
    """The result on the first rank, in the second call."""
    world = worlds[math.prod(CASES[name].mesh.values())]
    try:
        world.run(checked, name)
        return Found(*world.run(checked, name)[0])
    except (WorldError, WorldTimeout):
        return Found((), math.nan)


def all_found() -> dict[str, Found]:
    with World(2, deadline=120) as two, World(4, deadline=120) as four:
        return {name: found_here({2: two, 4: four}, name) for name in CASES}


# --- JAX ---


UNWRITTEN = {"verdict": "unwritten"}


def told_by_jax(python: str) -> dict[str, Any]:
    """The results that the other interpreter prints."""
    script = Path(__file__).with_name("check_vma_jax.py")
    environment = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([python, str(script)], capture_output=True, text=True, env=environment)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        lacks(f"{python} {script.name}: {last[0]}; {NO_JAX}")
    answer: dict[str, Any] = json.loads(done.stdout)
    answer["programs"] = dict.fromkeys((*CASES, *CANNOT), UNWRITTEN) | answer["programs"]
    return answer


def in_words(told: dict[str, Any]) -> str:
    """A program's result in JAX, as text."""
    match told["verdict"]:
        case "finds":
            return f"finds: {told['said']}"
        case "hangs":
            return f"hangs: {told['said']}"
        case "cannot":
            return f"cannot be said there: {told['said']}"
        case "right":
            return "cannot be wrong there"
        case "unknown":
            return "runs; the intended result is not known"
        case "unwritten":
            return "nobody has written it"
    off = [_off(name, **one) for name, one in told["results"].items() if one["off"] > 1e-12]
    return "silent: " + ", ".join(off or ["devices differ"])


def _off(name: str, ratio: float, off: float) -> str:
    if abs(off - abs(ratio - 1)) < 1e-6:
        return f"{name} x {ratio:.4g}"
    return f"{name} off by {100 * off:.0f} %"


# --- the comparison ---


def row(name: str, found: Found | None, told: dict[str, Any]) -> dict[str, Any]:
    if found is None:
        mistake, here, seconds = CANNOT[name], "cannot be said", math.nan
    else:
        mistake = f"{MISTAKES[CASES[name].kind]} ({', '.join(CASES[name].axes)})"
        here, seconds = ", ".join(dict.fromkeys(found.kinds)) or "SILENT", found.seconds
    return {"program": name, "what is wrong": mistake, "shardfn": here, "seconds": seconds, "JAX": in_words(told)}


def summary(found: Mapping[str, Found], told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The number of programs of each mistake that shardfn and JAX find."""
    counts: dict[str, Counter[str]] = {}
    for name in [name for name in CASES if name in told]:
        verdicts = [told[name]["verdict"], *["here"] * bool(found[name].kinds)]
        counts.setdefault(CASES[name].kind, Counter()).update(verdicts)
    return [
        {
            "mistake": text,
            "programs": counts[kind].total() - counts[kind]["here"],
            "shardfn finds": counts[kind]["here"],
            "JAX finds": counts[kind]["finds"],
            "JAX is silent or hangs": counts[kind]["silent"] + counts[kind]["hangs"],
            "cannot be wrong in JAX": counts[kind]["right"],
            "cannot be written in JAX": counts[kind]["cannot"],
        }
        for kind, text in MISTAKES.items()
        if kind in counts
    ]


def missed(found: Mapping[str, Found], told: Mapping[str, Any]) -> list[str]:
    """Programs that JAX finds but shardfn does not."""
    return [name for name in CASES if told[name]["verdict"] == "finds" and not found[name].kinds]


def beyond(found: Mapping[str, Found], told: Mapping[str, Any]) -> list[str]:
    """Programs that shardfn finds, but that give wrong numbers or hang in JAX."""
    return [name for name in CASES if told[name]["verdict"] in ("silent", "hangs") and found[name].kinds]


def goals(found: Mapping[str, Found], told: Mapping[str, Any]) -> Sequence[Goal]:
    return [
        Goal("programs that JAX finds and shardfn does not", len(missed(found, told)), 0),
        Goal("programs that shardfn does not find", sum(not found[name].kinds for name in CASES), 0),
        Goal("programs that nobody has written in JAX", sum(told[name] == UNWRITTEN for name in CASES), 0),
        Goal("programs found beyond JAX", len(beyond(found, told)), BEYOND, "at least"),
    ]


def main() -> None:
    options = parser("Wrong programs, and which of them shardfn's checker and JAX's check_vma find.")
    options.add_argument("--jax", metavar="PYTHON", help="a Python interpreter that has JAX")
    args = options.parse_args()
    if not args.jax:
        lacks(NO_JAX)
    answer = told_by_jax(args.jax)
    told, found = answer["programs"], all_found()
    rows = [row(name, found.get(name), told[name]) for name in (*CASES, *CANNOT)] + summary(found, told)
    publish(f"who finds what: shardfn, and JAX {answer['jax']} with check_vma", rows, goals(found, told), args.json)
    print(f"found beyond JAX: {len(beyond(found, told))}")
    print(f"found by JAX alone: {', '.join(missed(found, told)) or 'nothing'}")


if __name__ == "__main__":
    main()
