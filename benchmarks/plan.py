"""Plans of a Llama of 405 billion parameters: how long they take, and in what memory.

    python -m benchmarks.plan

The step is forward, backward and AdamW in bfloat16, one sequence of 8,192 tokens a rank, each layer recomputed in
backward; parameters are cut over 8 ranks, and there are 128 or 2,048 such groups. Shapes of the model: Llama Team, The
Llama 3 Herd of Models (2024), table 3.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.report import Goal, parser, publish
from shardfn import parallel
from shardfn.testing import World

WIDTH, HIDDEN, VOCABULARY, HEADS, GROUPS, LAYERS, TOKENS = 16384, 53248, 128256, 128, 8, 126, 8192
HEAD = WIDTH // HEADS
SHARD = 8


class Planned(NamedTuple):
    """What a plan took, and some of what it says.

    Attributes:
        seconds: for parameters, optimizer state and the plan.
        memory: most bytes of the process.
        parameters: of the model.
        peak: bytes on a rank.
        kinds: the same, by kind.
        sent: bytes that a rank sends.
        flops: that a rank computes.
    """

    seconds: float
    memory: int
    parameters: int
    peak: int
    kinds: dict[str, int]
    sent: int
    flops: int


def empty(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.empty(shape, dtype=torch.bfloat16)


def makers(layers: int) -> dict[str, Any]:
    key = empty(WIDTH, GROUPS * HEAD)
    square, wide = empty(WIDTH, WIDTH), empty(WIDTH, HIDDEN)
    layer = {"q": square, "k": key, "v": key, "o": square, "gate": wide, "up": wide, "down": empty(HIDDEN, WIDTH)}
    layer |= {"attend": empty(WIDTH), "feed": empty(WIDTH)}
    head = {"norm": empty(WIDTH), "out": empty(WIDTH, VOCABULARY)}
    return {"embed": {"table": empty(VOCABULARY, WIDTH)}, "blocks": [layer] * layers, "head": head}


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, HEAD)).transpose(1, 2)


def block(p: Any, x: Tensor) -> Tensor:
    h = F.rms_norm(x, (WIDTH,), p["attend"])
    q, k, v = heads(h @ p["q"], HEADS), heads(h @ p["k"], GROUPS), heads(h @ p["v"], GROUPS)
    x = x + parallel.attention(q, k, v).transpose(1, 2).flatten(2) @ p["o"]
    h = F.rms_norm(x, (WIDTH,), p["feed"])
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def head(p: Any, x: Tensor, tokens: Tensor) -> Tensor:
    logits = F.rms_norm(x, (WIDTH,), p["norm"]) @ p["out"]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def table(p: Any, tokens: Tensor) -> Tensor:
    return p["table"][tokens]


embed = sf.stage(table)
blocks, last = sf.stage(block, remat=True), sf.stage(head)


def loss(params: Any, tokens: Tensor) -> Tensor:
    x = embed(params["embed"], tokens)
    for p in sf.layers(params["blocks"]):
        x = blocks(p, x)
    return sf.pmean(last(params["head"], x, tokens), ("replica", "shard"))


def planned(ranks: int, layers: int) -> Planned:
    """Plans one step."""
    began = time.perf_counter()
    with sf.plan.mode(ranks):
        mesh = sf.make_mesh(replica=ranks // SHARD, shard=SHARD)
        params = sf.init_sharded(makers(layers), 0, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
        optimizer = so.adamw(1e-4)

        @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
        def step(params: Any, state: Any, tokens: Tensor) -> Any:
            value, grads = sf.value_and_grad(loss)(params, tokens)
            return *optimizer.step(params, grads, state), value

        plan = sf.plan.step(step, params, optimizer.init(params), torch.zeros(1, TOKENS, dtype=torch.int64))
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sent = sum(work.sent for work in plan.collectives)
    return Planned(seconds, memory, plan.parameters, plan.peak.total, plan.peak.kinds, sent, plan.flops())


def main() -> None:
    args = parser("How long plans take, and in what memory.").parse_args()
    found = {}
    for ranks in (1024, 16384):
        with World(1, kind="alone", deadline=300) as alone:
            [found[ranks]] = alone.run(planned, ranks, LAYERS)
    rows = [
        {
            "ranks": f"{ranks:,}", "parameters, billions": plan.parameters / 1e9, "seconds": plan.seconds,
            "process, GB": plan.memory / 1e9, "planned peak, GB": plan.peak / 1e9, "sent, GB": plan.sent / 1e9,
            "PFLOP": plan.flops / 1e15,
        }
        for ranks, plan in found.items()
    ]  # fmt: skip
    few, many = found.values()
    kinds = {"kind at the peak": "", "GB": 0.0}
    rows += [kinds | {"kind at the peak": kind, "GB": n / 1e9} for kind, n in few.kinds.items()]
    goals = [
        Goal("405B on 1,024 ranks: seconds for a plan", few.seconds, 30),
        Goal("405B on 1,024 ranks: GB of the process", few.memory / 1e9, 2),
        Goal("405B: time for 16,384 ranks / for 1,024", many.seconds / few.seconds, 1.1),
    ]
    publish("plans of Llama 405B", rows, goals, args.json)


if __name__ == "__main__":
    main()
