"""Everything about GPUs that no test on a CPU can answer, in one run: each figure with its value and its goal.

    python -m benchmarks.gpu                      # about 30 minutes on one GPU
    python -m benchmarks.gpu --only late waits    # some parts
    python -m benchmarks.gpu --only late --sanitizer
    python -m benchmarks.gpu --tiny --device cpu  # tries the command: tiny models, and a simulated device where it can

Each part is a process with a deadline. A figure that a machine cannot give, and each part that fails or does not end,
is told by name, and does not meet its goal. `--sanitizer` adds a run of the first part under compute-sanitizer, with
memory allocated in the order of streams, so that a use before its allocation, or after its memory was freed, is found.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    gpu_compiled,
    gpu_curvature,
    gpu_graphs,
    gpu_groups,
    gpu_kernels,
    gpu_memory,
    gpu_schedules,
    gpu_training,
)
from benchmarks.goals import ran
from benchmarks.gpu_setting import Answer, Missing, Where
from benchmarks.report import lacks, parser, publish

SANITIZER = "compute-sanitizer"
CHECKS = ["--tool", "memcheck", "--track-stream-ordered-races", "all", "--error-exitcode", "99"]
ALLOCATOR = ["PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"]  # whose order the sanitizer understands


@dataclass(frozen=True)
class Part:
    """Some figures.

    Attributes:
        ask: finds them; raises Missing if this machine cannot.
        seconds: the deadline.
    """

    ask: Callable[[Where], Answer]
    seconds: float


PARTS = {
    "late": Part(gpu_schedules.late, 600),
    "renewals": Part(gpu_groups.renewals, 120),
    "worlds": Part(gpu_training.worlds, 900),
    "gaps": Part(gpu_training.gaps, 300),
    "host": Part(gpu_training.host, 120),
    "kernels": Part(gpu_kernels.kernels, 300),
    "waits": Part(gpu_schedules.waits, 300),
    "graphs": Part(gpu_graphs.graphs, 300),
    "compiled": Part(gpu_compiled.compiled, 600),
    "memory": Part(gpu_memory.memory, 300),
    "curvature": Part(gpu_curvature.curvature, 400),
    "7B": Part(gpu_training.seven, 900),
    "ranks": Part(gpu_groups.ranks, 600),
}


def asked(name: str, where: Where, before: Sequence[str] = ()) -> Answer:
    """The answer of a part, which runs as a process; `before` is what stands before its command."""
    label = f"{name}, {SANITIZER}" if before else name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "told.json")
        line = [*before, sys.executable, "-m", "benchmarks.gpu", "--here", name, "--device", where.device]
        line += ["--json", str(file), *(["--tiny"] if where.tiny else [])]
        status, last = ran(line, PARTS[name].seconds)
        told = json.loads(file.read_text()) if file.exists() else {"rows": [], "goals": []}
    answer = Answer(told["rows"])
    for one in told["goals"]:
        prefix = f"{label}: " if before else ""
        answer.goal(prefix + one["name"], one["value"], one["limit"], one["sense"])
    if status:
        answer.unanswered(f"{label}: ends well", last, 0)
    elif before:
        answer.goal(f"{label}: ends well", status, 0)
    return answer


def sanitized(where: Where) -> Answer:
    """The first part, with every access to memory checked; it takes much longer, and so has tiny models."""
    answer = Answer()
    if not where.cuda or not shutil.which(SANITIZER):
        why = f"{SANITIZER}, of the CUDA toolkit, is not on the path" if where.cuda else "it checks a GPU"
        answer.unanswered(f"late, {SANITIZER}: ends well", why, 0)
        return answer
    return asked("late", Where(where.device, tiny=True), ["env", *ALLOCATOR, SANITIZER, *CHECKS])


def here(name: str, where: Where, file: Path | None) -> None:
    """Runs a part in this process."""
    try:
        answer = PARTS[name].ask(where)
    except Missing as error:
        answer = Answer()
        answer.unanswered(name, str(error), 0)
    publish(f"{name} on {where.device}", ordered(answer.rows), answer.goals, file)


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with those of what was not answered last, in one table."""
    return sorted(rows, key=lambda row: "not answered" in row)


def main() -> None:
    options = parser("Everything about GPUs that no test on a CPU can answer.")
    options.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts; default: all")
    options.add_argument("--sanitizer", action="store_true", help=f"also run the first part under {SANITIZER}")
    options.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu, with --tiny, to try the command"
    )
    options.add_argument("--tiny", action="store_true", help="tiny models")
    options.add_argument("--here", choices=list(PARTS), help="run one part in this process, without a deadline")
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        lacks("benchmarks.gpu needs a CUDA device")
    where = Where(args.device, args.tiny)
    if args.here:
        here(args.here, where, args.json)
        return
    answers = [asked(name, where) for name in args.only] + ([sanitized(where)] if args.sanitizer else [])
    rows, figures = ([one for answer in answers for one in getattr(answer, kind)] for kind in ("rows", "goals"))
    publish(f"on {torch.cuda.get_device_name() if where.cuda else 'the CPU'}", ordered(rows), figures, args.json)


if __name__ == "__main__":
    main()
