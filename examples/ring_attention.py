"""Trains a byte-level language model on long sequences, each of them sharded over all ranks.

    torchrun --standalone --nproc-per-node 4 -m examples.ring_attention --method ring

Ranks along `context` have different positions of the same few sequences. Everything except attention works on each
position by itself. For attention, keys and values go around a ring, and a rank computes with those that it has while
the next ones arrive; with `--method ulysses`, four all-to-alls change from positions to heads and back. Parameters are
flat shards over the same axis: gradients are summed over ranks with different positions, as over ranks with different
sequences.

In causal attention, a position attends to those before it. With `--in-order`, the last of c ranks therefore has 2 c - 1
times the work of the first. By default, each rank has a piece of the beginning and one of the end, so all ranks have
the same amount of work.

At the end, the program prints the time of a step and the bytes that a rank sent for attention, next to a formula.
Sources: Liu et al., Ring Attention (2023); Jacobs et al., DeepSpeed Ulysses (2023).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from examples import train_lm
from examples.run import Params, Reports, corpus, curve, fit, memory, options, stretches
from shardfn import parallel


@dataclass(frozen=True)
class Config(train_lm.Config):
    """Few, long sequences."""

    layers: int = 2
    context: int = 1024
    batch: int = 1
    warmup: int = 10
    method: str = "ring"  # or "ulysses"
    in_order: bool = False  # positions of the ring; those of Ulysses always are

    @property
    def balanced(self) -> bool:
        return self.method == "ring" and not self.in_order


# --- the model: each rank has its positions of every sequence ---


@sf.stage
def embed(p: Params, tokens: Tensor, places: Tensor) -> Tensor:
    return p["tokens"][tokens] + p["places"][places]


@sf.stage
def block(p: Params, x: Tensor, config: Config) -> Tensor:
    h = F.rms_norm(x, x.shape[-1:], p["norm1"]) @ p["qkv"]
    q, k, v = rearrange(h, "b t (three head d) -> three b head t d", three=3, head=config.heads)
    x = x + rearrange(attended(q, k, v, config), "b head t d -> b t (head d)") @ p["out"]
    gate, value = (F.rms_norm(x, x.shape[-1:], p["norm2"]) @ p["up"]).chunk(2, -1)
    return x + (F.silu(gate) * value) @ p["down"]


def attended(q: Tensor, k: Tensor, v: Tensor, config: Config) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, `[b, head, t / c, d]`."""
    if config.method == "ring":
        return parallel.ring_attention(q, k, v, "context", balanced=config.balanced)
    return parallel.ulysses_attention(q, k, v, "context")


def loss_fn(params: Params, rows: Tensor, config: Config) -> Tensor:
    """Mean cross-entropy, in nats, over the positions of all ranks. Rows `[batch, context + 1]`, whole on each rank."""
    own = parallel.positions(config.context, "context", balanced=config.balanced, device=rows.device)
    first, *blocks, last = sf.layers([params["embed"], *params["blocks"], params["head"]])
    x = embed(first, rows[:, own], own)
    for p in blocks:
        x = block(p, x, config)
    logits, targets = train_lm.head(last, x), rows[:, own + 1]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return sf.psum(total, "context") / targets.numel() / sf.axis_size("context")


# --- the run ---


@dataclass(frozen=True)
class Cost:
    """What one rank sends for attention in a step."""

    op: str  # the collective
    calls: int
    forward: int  # bytes sent
    backward: int


def formula(config: Config, size: int) -> Cost:
    """A ring sends keys and values c - 1 times in forward and again in backward, and their gradients c times.

    Ulysses has four all-to-alls each way, of queries, keys, values and results; a rank keeps 1 / c of each.
    """
    one = config.batch * config.context * config.width // size * config.dtype.itemsize  # of this rank's keys, say
    if config.method == "ulysses":
        each = config.layers * 4 * one * (size - 1) // size
        return Cost("all_to_all", config.layers * 8 if size > 1 else 0, each, each)
    there, back = config.layers * (size - 1), config.layers * size if size > 1 else 0
    return Cost("ppermute", 2 * there + back, there * 2 * one, (there + back) * 2 * one)


def measured(log: sf.collectives.Ledger, config: Config) -> Cost:
    """The same from the ledger; the sends of a ring were started before their data was needed."""
    ring = config.method == "ring"
    op = "ppermute" if ring else "all_to_all"
    ways = (log.bytes(op=op, scheduled=ring, backward=way) for way in (False, True))
    return Cost(op, log.count(op=op, scheduled=ring), *ways)


def train(
    config: Config, mesh: DeviceMesh, data: Tensor, steps: int, seed: int, report: Reports = ()
) -> tuple[list[float], sf.collectives.Ledger]:
    """Trains from scratch; returns the losses, and the ledger of the last step."""

    def loss(params: Params, rows: Tensor) -> Tensor:
        return loss_fn(params, rows.long(), config)

    params = sf.shard(train_lm.init(config, seed), mesh, sf.full_shard("context"))
    # Sequences are sharded, rows are not: all ranks have the same rows.
    batches = sf.run.batches(stretches(data, config.context + 1), mesh, (), config.batch, seed)
    _, run, log = fit(loss, params, mesh, train_lm.optimizer(config, steps), batches, steps, report)
    return curve(run), log


def main() -> None:
    parser = options("Train a language model on sequences that are sharded over all ranks.", steps=25)
    parser.add_argument("--method", choices=("ring", "ulysses"), default="ring", help="default: %(default)s")
    parser.add_argument("--in-order", action="store_true", help="one piece per rank of the ring, unbalanced")
    parser.add_argument("--context", type=int, default=1024, help="positions per sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step (default: %(default)s)")
    args = parser.parse_args()
    mesh = sf.make_mesh(device=args.device, context=-1)
    config = Config(context=args.context, batch=args.batch, method=args.method, in_order=args.in_order)
    began = time.perf_counter()
    losses, log = train(config, mesh, corpus()[0], args.steps, args.seed, (sf.run.progress(),))
    took = (time.perf_counter() - began) / args.steps
    if mesh.get_rank() == 0:
        print(f"loss {losses[-1]:.3f} nats, {took:.3f} s per step, {memory(mesh.device_type)}")
        print(log)
        for name, cost in (("measured", measured(log, config)), ("formula", formula(config, mesh.size()))):
            kilobytes = f"{cost.forward / 1e3:.1f} kB forward, {cost.backward / 1e3:.1f} kB backward"
            ahead = " issued ahead" if config.method == "ring" else ""
            print(f"{name:9} {cost.calls} {cost.op}{ahead}: a rank sends {kilobytes}")


if __name__ == "__main__":
    main()
