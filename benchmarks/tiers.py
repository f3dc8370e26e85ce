"""Training on disk: memory, exactness and speed, growth with depth, and a comparison with ZeRO-Infinity.

    OMP_NUM_THREADS=1 python -m benchmarks.tiers
    OMP_NUM_THREADS=1 python -m benchmarks.tiers --only growth

state    a model with a training state of 5.6 GB on two ranks with less memory: `benchmarks/on_disk.py`
growth   peak memory against depth: `benchmarks/depth.py`
peer     a comparison with DeepSpeed's ZeRO-Infinity: `benchmarks/zero_infinity.py`
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import depth, on_disk, zero_infinity
from benchmarks.report import Goal, parser, publish

PARTS = ("state", "growth", "peer")


def main() -> None:
    options = parser("Training with its state on disk: memory, exactness, speed, growth, and the peer.")
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=" ".join(PARTS))
    options.add_argument("--tokens", type=int, nargs="+", default=[16, 128], help="tokens per rank and step, for state")
    options.add_argument("--rounds", type=int, default=3, help="measured rounds of steps")
    options.add_argument("--limit", type=float, default=1.1, help="RLIMIT_DATA of a rank in GB (default: %(default)s)")
    options.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32], help="numbers of layers, for growth")
    options.add_argument("--scratch", type=Path, default=Path(), help="a folder on the disk (default: the current one)")
    options.add_argument("--deepspeed", metavar="PYTHON", help="a Python that has DeepSpeed with async_io, for peer")
    options.add_argument("--tiny", action="store_true", help="tiny models, to try the command")
    args = options.parse_args()
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=args.scratch) as folder:
        if "state" in args.only:
            config = on_disk.TINY if args.tiny else on_disk.LARGE
            contexts = [16, 32] if args.tiny else args.tokens
            file = 2**25 if args.tiny else 2**29
            found, ends = on_disk.state(config, folder, contexts, args.rounds, args.limit * 1e9, file)
            rows, goals = [*rows, *found], [*goals, *ends]
        if "growth" in args.only:
            found, ends = depth.growth(args.layers, folder, args.tiny)
            rows, goals = [*rows, *found], [*goals, *ends]
        if "peer" in args.only:
            found, ends = zero_infinity.peer(folder, args.tiny, args.rounds, args.deepspeed)
            rows, goals = [*rows, *found], [*goals, *ends]
    publish("training on disk", rows, goals, args.json)


if __name__ == "__main__":
    main()
