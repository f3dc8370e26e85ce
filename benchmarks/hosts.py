"""A training step on two hosts with a slow link between them: bytes over the link, and time.

    python -m benchmarks.hosts

The hosts are two network namespaces of this machine, with two ranks each and a link of 1 Gbit/s between them
(`tc tbf`). `torchrun` starts the ranks as it would on real hosts. Creating namespaces requires root, or `CAP_SYS_ADMIN`
and `CAP_NET_ADMIN`. The model is a GPT with 11 million parameters in float32, with AdamW on the shards; only the
strategy differs. The kernel counts bytes and packets on the link, in both directions; the packets' headers are
subtracted. The result is compared with the bytes in the ledger of the collectives that cross the link. The difference
is gloo's header of each message, and the traffic of torchrun's agents. The model is small enough for two cores, so that
the link determines the time.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardfn as sf
from benchmarks.model import Config
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import shardfn_step, timed
from benchmarks.two_hosts import crossed, hosts, launch
from shardfn import quant

BOTH = ("replica", "shard")
FULL, INT8, INT4 = sf.full_shard(BOTH), quant.int8(256), quant.int4(64)
STRATEGIES = {
    "full_shard": FULL,
    "hybrid_shard": sf.hybrid_shard(shard="shard", replica="replica"),
    "hfsdp": sf.strategies.hfsdp(shard="shard", replica="replica"),
    "ddp": sf.ddp(BOTH),
    "hpz": sf.strategies.hpz(shard="shard", replica="replica"),
    "full_shard, gather_format=int8": replace(FULL, gather_format=INT8),
    "full_shard, reduce_format=int8": replace(FULL, reduce_format=INT8),
    "full_shard, reduce_format=int4": replace(FULL, reduce_format=INT4),
    "hybrid_shard, reduce_format=int4": replace(sf.hybrid_shard(shard="shard", replica="replica"), reduce_format=INT4),
    "zeropp": sf.strategies.zeropp(shard="shard", replica="replica"),
}


# --- on each rank ---


def expected(log: sf.collectives.Ledger) -> float:
    """Bytes that this rank's collectives send to the other host, for two hosts of two ranks."""
    return sum(one.bytes * crossing(one.op, one.axis) for one in log.records)


def crossing(op: str, axis: tuple[str, ...]) -> float:
    """The part of what a rank sends in a collective that goes to the other host, for two hosts of two ranks."""
    if axis in {("replica",), ("shard",)}:
        return float(axis == ("replica",))
    # Gloo's ring of four crosses between the hosts in two places; otherwise, two of three pieces go there.
    return 1 / 2 if op == "all_reduce" else 2 / 3


def ranks(file: Path, tiny: bool, steps: int) -> None:
    torch.set_num_threads(1)
    config = _config(tiny)
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    rows = []
    for name, strategy in STRATEGIES.items():
        step, _ = shardfn_step(config, mesh, strategy)
        timed(step, 2)
        with sf.collectives.ledger() as log:
            step()
        meant = torch.tensor(expected(log), dtype=torch.float64)
        dist.all_reduce(meant)
        dist.barrier()
        before = crossed()
        seconds, losses = timed(step, steps)
        dist.barrier()
        whole, payload = (now - then for now, then in zip(crossed(), before, strict=True))
        rows.append(
            {
                "strategy": name,
                "step ms": statistics.median(seconds) * 1e3,
                "MB over the link": payload / steps / 1e6,
                "headers %": 100 * (whole / payload - 1),
                "MB by the ledger": meant.item() / 1e6,
                "loss": losses[-1],
            }
        )
        del step
    if dist.get_rank() == 0:
        file.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _config(tiny: bool) -> Config:
    if tiny:
        return Config(vocabulary=64, width=32, layers=2, heads=2, hidden=48, context=8)
    return Config(width=256, hidden=704)


# --- the hosts ---


def measured(tiny: bool, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, hosts("benchmarks.hosts"):
        file = Path(folder, "rows.json")
        launch("benchmarks.hosts", "--ranks", str(file), "--steps", str(steps), *(["--tiny"] if tiny else []))
        rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


def main() -> None:
    options = parser("A training step on two emulated hosts with 1 Gbit/s between them.")
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    options.add_argument("--ranks", type=Path, metavar="FILE", help="run as one of the ranks, and write rows there")
    args = options.parse_args()
    if args.ranks:
        ranks(args.ranks, args.tiny, args.steps)
        return
    rows = measured(args.tiny, args.steps)
    first = rows[0]
    for row in rows:
        row["over the link / by the ledger"] = row["MB over the link"] / row["MB by the ledger"]
        row["step / full_shard"] = row["step ms"] / first["step ms"]
        row["MB / full_shard"] = row["MB over the link"] / first["MB over the link"]
    off = max(abs(math.log(row["over the link / by the ledger"])) for row in rows)
    by_name = {row["strategy"]: row for row in rows}
    goals = [
        Goal("bytes over the link beside those of the ledger, largest relative difference", math.expm1(off), 0.02),
        Goal("zeropp: step / full_shard", by_name["zeropp"]["step / full_shard"], 1.0),
        Goal("zeropp: bytes over the link / full_shard", by_name["zeropp"]["MB / full_shard"], 0.25),
    ]
    publish("one training step on two hosts of two ranks, 1 Gbit/s between them", rows, goals, args.json)


if __name__ == "__main__":
    main()
