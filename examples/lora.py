"""Adapts a frozen language model to other text with low-rank adapters (LoRA): sharded adapters, and a choice of bases.

    torchrun --standalone --nproc-per-node 4 -m examples.lora --base once

First the model of `examples/train_lm.py` is trained on Python code; then adapters are trained on the prose of Python's
manual. The base is frozen: it needs no gradient communication and no optimizer state. `--base` sets how it is placed:

    sharded   sharded over all ranks, gathered for each use
    once      sharded over all ranks, gathered once per step for all micro-batches
    whole     whole on every rank, never gathered

At the end, the program prints the bytes that a rank sent in a step and the memory for gathered parameters, from the
ledger, next to a formula. Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2022), section 4.1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
import shardfn.optim as so
from examples import train_lm
from examples.run import Counted, Params, Reports, curve, options, stretches, table
from examples.run import corpus as source_code
from examples.train_lm import DATA, Config
from shardfn import P

BASES = {"sharded": sf.full_shard(DATA), "once": sf.full_shard(DATA).with_reshard("step"), "whole": sf.ddp(DATA)}
ADAPTED = ("qkv", "out", "up", "down")
RANK = 4
SCALE = 2.0
MICROBATCHES = 2
RATE = 3e-3


# --- the model: each block's matrices w become w + s a b ---


def init_adapters(base: Params, seed: int) -> Params:
    """Whole adapters for whole parameters; the product is zero at first."""
    generator = torch.Generator().manual_seed(seed)

    def adapter(w: Tensor) -> Params:
        a = torch.randn(w.shape[0], RANK, generator=generator, dtype=torch.float64) / w.shape[0] ** 0.5
        return {"a": a.to(w.dtype), "b": torch.zeros(RANK, w.shape[1], dtype=w.dtype)}

    return {"blocks": [{name: adapter(p[name]) for name in ADAPTED} for p in base["blocks"]]}


@sf.stage
def block(base: Params, adapters: Params, x: Tensor, heads: int) -> Tensor:
    adapted = {name: base[name] + SCALE * (p["a"] @ p["b"]) for name, p in adapters.items()}
    return train_lm.block(base | adapted, x, heads)


def model(adapters: Params, base: Params, tokens: Tensor, config: Config) -> Tensor:
    """Logits `[b, t, vocabulary]` for tokens `[b, t]`."""
    pairs = zip(base["blocks"], adapters["blocks"], strict=True)
    first, *ordered, last = sf.layers([base["embed"], *pairs, base["head"]])
    x = train_lm.embed(first, tokens)
    for p, adapter in ordered:
        x = block(p, adapter, x, config.heads)
    return train_lm.head(last, x)


def loss_fn(adapters: Params, base: Params, tokens: Tensor, config: Config) -> Tensor:
    """The sum of cross-entropies, in nats, over the tokens of all ranks."""
    logits = model(adapters, base, tokens[:, :-1], config)
    return sf.psum(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"), DATA)


# --- what a step costs ---


@dataclass(frozen=True)
class Cost:
    """The cost of one step for one rank.

    Attributes:
        sent: bytes sent.
        gathered: peak bytes of the buffers into which parameters are gathered.
        held: bytes of the shards of base and adapters, and of optimizer state.
    """

    sent: int
    gathered: int
    held: int


def formula(adapters: Params, base: Params, where: str) -> Cost:
    """The cost of a step, computed from the sizes of the stages.

    With n ranks, each rank sends (n - 1) / n B in a gather or scatter of B bytes. Forward gathers every stage. Backward
    gathers all but the last two again, which are still there, and scatters the adapters' gradients. The next
    micro-batch finds the blocks with which backward ended: both, or one where the embedding takes the other's place.
    """
    flats = optree.tree_leaves(
        {"base": base, "adapters": adapters}, is_leaf=lambda x: isinstance(x, sf.shards.FlatShard)
    )
    own, small = stages(base), stages(adapters)["blocks"]
    n = flats[0].layout.grid.size(DATA)
    blocks = [b * (where != "whole") + a for b, a in zip(own["blocks"], small, strict=True)]
    ends = [own["embed"], own["head"]] if where != "whole" else []
    again = blocks[: len(blocks) - (1 if ends else 2)]
    forward, scattered = sum(blocks) + sum(ends), sum(small)
    if where == "once":
        moved, gathered = forward + MICROBATCHES * scattered, forward
    else:
        found = (MICROBATCHES - 1) * sum(blocks[: 1 if ends else 2])
        moved, gathered = MICROBATCHES * (forward + sum(again) + scattered) - found, 2 * max(blocks + ends)
    held = sum(flat.values.nbytes for flat in flats) + 2 * sum(
        flat.values.nbytes for flat in flats if flat.layout.trainable
    )
    return Cost(moved * (n - 1) // n, gathered if n > 1 else 0, held)


def stages(params: Params) -> Any:
    """Bytes of each stage, whole."""
    return optree.tree_map(
        lambda flat: flat.layout.padded * flat.values.itemsize,
        params,
        is_leaf=lambda x: isinstance(x, sf.shards.FlatShard),
    )


# --- the run ---


@dataclass(frozen=True)
class Run:
    """The results of a run."""

    adapters: Params  # whole
    base: Params  # whole, unchanged
    losses: list[float]  # nats per token, one for each step
    measured: Cost  # of the last step
    expected: Cost


def adapt(
    config: Config,
    mesh: DeviceMesh,
    base: Params,
    text: Tensor,
    steps: int,
    seed: int,
    where: str,
    report: Reports = (),
) -> Run:
    """Trains adapters for a whole base model on a text."""
    optimizer = so.adamw(so.warmup_cosine(RATE, warmup=min(10, steps), steps=steps))
    frozen = sf.shard(base, mesh, BASES[where], frozen=[".*"])
    adapters = sf.shard(
        {"adapters": init_adapters(base, seed)}, mesh, sf.full_shard(DATA), stages=[r"adapters\.blocks\.\d+"]
    )
    adapters = adapters["adapters"]
    batches = sf.run.batches(stretches(text, config.context + 1), mesh, DATA, MICROBATCHES * config.batch, seed)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P(DATA)), out_specs=(..., P()))
    def on(frozen: Params, state: Params, rows: Tensor) -> tuple[Params, dict[str, Tensor]]:
        tokens = config.batch * config.context * MICROBATCHES

        def loss(adapters: Params, rows: Tensor) -> Tensor:
            return loss_fn(adapters, frozen, rows, config) / tokens

        value, grads = sf.accumulate(loss, rows.long().chunk(MICROBATCHES))(state["adapters"])
        adapters, remembered = optimizer.step(state["adapters"], grads, state["optimizer"])
        return {"adapters": adapters, "optimizer": remembered}, {"loss": value}

    step, state = Counted(functools.partial(on, frozen)), {"adapters": adapters, "optimizer": optimizer.init(adapters)}
    state, run = sf.run.loop(step, state, batches, steps=steps, report=report)
    held = [leaf.nbytes for leaf in optree.tree_leaves((frozen, state)) if isinstance(leaf, Tensor)]
    measured, adapters = Cost(step.log.bytes(scheduled=True), step.log.gathered, sum(held)), state["adapters"]
    return Run(sf.unshard(adapters), sf.unshard(frozen), curve(run), measured, formula(adapters, frozen, where))


def corpus() -> Tensor:
    """The prose of Python's manual, as bytes."""
    return torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def main() -> None:
    parser = options("Adapt a frozen language model by low-rank adapters.", steps=60)
    parser.add_argument("--base", choices=BASES, default="once", help="placement of the frozen model (default: once)")
    parser.add_argument("--base-steps", type=int, default=60, help="steps that train the base (default: %(default)s)")
    args = parser.parse_args()
    mesh, config = sf.make_mesh(device=args.device, replica=1, shard=-1), Config()
    shown, seed = (sf.run.progress(),), args.seed
    learnt = train_lm.train(config, mesh, source_code(), args.base_steps, seed, sf.full_shard(DATA), shown)
    own = sf.make_mesh(device=args.device, replica=1, shard=-1)  # its buffers are used only by the adapters' training
    run = adapt(config, own, learnt.params, corpus(), args.steps, seed, args.base, shown)
    if mesh.get_rank() == 0:
        print(f"nats per token: {run.losses[0]:.3f} at first, {run.losses[-1]:.3f} at the end")
        labels = {
            "sent": "sent in a step",
            "gathered": "buffers for gathered parameters",
            "held": "shards and optimizer state",
        }
        both = (run.measured, run.expected)
        rows = [[label, *(f"{getattr(cost, name) / 1e3:.1f}" for cost in both)] for name, label in labels.items()]
        table("of one rank", ("", "measured kB", "formula kB"), rows)


if __name__ == "__main__":
    main()
