"""Trains a byte-level language model on the sources of Python's standard library, sharded over a hybrid mesh.

    torchrun --standalone --nproc-per-node 4 -m examples.train_lm --mesh replica=2,shard=2 --strategy hybrid_shard

Math, memory and communication are all in this file. Every layer's parameters are one flat shard, sharded over `shard`.
A stage gathers them just before its function runs, and reduces their gradient: a reduce-scatter over `shard`, then a
sum over `replica` of the shard only. AdamW updates only this rank's shards. With another `--strategy`, sharding and
gathers change, but nothing else in this file does. At the end, one step's ledger is printed next to `formula`.

With `--resume`, training continues from the newest checkpoint in `--out`, on any mesh. If its processes die, and
`torchrun --max-restarts 3` starts them again, the run ends at the same loss. After a SIGTERM, it exits with status 75.
With `--exact 8`, it has the same bits on 1, 2, 4 and 8 ranks, and if it goes on with fewer of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
import shardfn.optim as so
from examples.run import Counted, Params, Reports, compare, corpus, end, hybrid_arguments, leave, stretches
from shardfn import P

DATA = ("replica", "shard")  # the batch is sharded over both: r x s ranks


@dataclass(frozen=True)
class Config:
    """Sizes of the model and the run; the letters are used in the shapes below."""

    vocabulary: int = 256  # v
    width: int = 128  # d
    heads: int = 4  # h
    layers: int = 4  # l
    hidden: int = 352  # f
    context: int = 128  # t
    batch: int = 16  # sequences per step, over all ranks: b = batch / (r s) on each
    rate: float = 6e-3
    warmup: int = 40
    decay: float = 0.1
    clip: float = 1.0
    dtype: torch.dtype = torch.float32


# --- the model: pure functions of whole parameters ---


def init(config: Config, seed: int) -> Params:
    """All parameters, whole; one seed gives the same values on any mesh."""
    generator = torch.Generator().manual_seed(seed)
    d, f, v = config.width, config.hidden, config.vocabulary

    def normal(*shape: int, fan_in: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) / fan_in**0.5).to(config.dtype)

    def ones() -> Tensor:
        return torch.ones(d, dtype=config.dtype)

    def block() -> Params:
        attention = {"qkv": normal(d, 3 * d, fan_in=d), "out": normal(d, d, fan_in=d * 2 * config.layers)}
        mlp = {"up": normal(d, 2 * f, fan_in=d), "down": normal(f, d, fan_in=f * 2 * config.layers)}
        return {"norm1": ones(), **attention, "norm2": ones(), **mlp}

    return {
        "embed": {"tokens": normal(v, d, fan_in=d), "places": normal(config.context, d, fan_in=d)},
        "blocks": [block() for _ in range(config.layers)],
        "head": {"norm": ones(), "out": normal(d, v, fan_in=d)},
    }


@sf.stage
def embed(p: Params, tokens: Tensor) -> Tensor:  # gathers (v + t) d numbers; its backward reads none of them
    return p["tokens"][tokens] + p["places"][: tokens.shape[1]]  # [b, t] -> [b, t, d]


@sf.stage
def block(p: Params, x: Tensor, heads: int) -> Tensor:  # gathers 4 d d + 3 d f + 2 d numbers, each way
    h = F.rms_norm(x, x.shape[-1:], p["norm1"]) @ p["qkv"]  # [b, t, d] @ [d, 3 d] -> [b, t, 3 d]
    q, k, v = rearrange(h, "b t (three head d) -> three b head t d", three=3, head=heads)  # [b, h, t, d / h]
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, h, t, d / h]
    x = x + rearrange(attended, "b head t d -> b t (head d)") @ p["out"]  # [b, t, d] @ [d, d] -> [b, t, d]
    gate, value = (F.rms_norm(x, x.shape[-1:], p["norm2"]) @ p["up"]).chunk(2, -1)  # [b, t, f] each
    return x + (F.silu(gate) * value) @ p["down"]  # [b, t, f] @ [f, d] -> [b, t, d]


@sf.stage
def head(p: Params, x: Tensor) -> Tensor:  # gathers d v + d numbers
    return F.rms_norm(x, x.shape[-1:], p["norm"]) @ p["out"]  # [b, t, d] @ [d, v] -> [b, t, v]


def model(params: Params, tokens: Tensor, config: Config) -> Tensor:
    """Logits `[b, t, v]` for tokens `[b, t]`, from flat shards or from whole parameters."""
    ordered = sf.layers([params["embed"], *params["blocks"], params["head"]])  # gathers one while another computes
    x = embed(ordered[0], tokens)
    for p in ordered[1:-1]:
        x = block(p, x, config.heads)
    return head(ordered[-1], x)


def total_and_count(params: Params, tokens: Tensor, config: Config) -> tuple[Tensor, int]:
    """The sum of the cross-entropies of all predicted tokens, in nats, and their number. Tokens `[b, t + 1]`."""
    logits = model(params, tokens[:, :-1], config)
    total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return total, tokens[:, 1:].numel()


def loss_fn(params: Params, tokens: Tensor, config: Config) -> Tensor:
    """Mean cross-entropy, in nats, over all predicted tokens of all ranks. Tokens `[b, t + 1]`."""
    total, count = total_and_count(params, tokens, config)
    return sf.psum(total, DATA) / sf.psum(count, DATA)


def optimizer(config: Config, steps: int) -> so.Optimizer:
    """AdamW with clipping; linear warm-up, then a cosine. Only matrices have weight decay."""
    rate = so.warmup_cosine(config.rate, warmup=min(config.warmup, steps), steps=steps, end=config.rate / 10)

    def decay(path: str, shape: tuple[int, ...]) -> float:
        return config.decay if len(shape) > 1 else 0.0

    return so.chain(so.clip_by_global_norm(config.clip), so.adamw(rate, b2=0.98, weight_decay=decay))


# --- what a step sends ---


def formula(params: Params) -> dict[str, tuple[int, ...]]:
    """Bytes that a rank sends for each stage in a step: for parameters, again in backward, and for gradients.

    A stage has B bytes, sharded over s ranks; its gradients and optimizer state are sharded over g. Forward gathers
    over s, and if g is larger, the optimizer's step has gathered the rest before: in total, each rank sends
    B (g - 1) / g. Backward gathers again, over s or over the ranks that share a copy, except for the last two stages,
    which are still in the ring, and the embedding, whose backward reads nothing. Gradients are scattered over g, which
    takes B (g - 1) / g, and the pieces are summed over the r replicas, which takes 2 B / g (r - 1) / r.
    """
    stages = [params["embed"], *params["blocks"], params["head"]]
    found: dict[str, tuple[int, ...]] = {}
    for number, flat in enumerate(stages):
        place, size, count = flat.layout.placement, flat.layout.padded * flat.values.itemsize, flat.layout.grid.size
        g, r = count(place.gradients), count(place.axes + place.replicas) // count(place.gradients)
        c = count({True: place.axes, False: ()}.get(place.reshard, place.reshard))  # ranks that backward gathers over
        again = size * (c - 1) // c if 0 < number < len(stages) - 2 else 0
        scattered = size * (g - 1) // g
        found[flat.layout.stage] = (scattered, again, scattered + 2 * size // g * (r - 1) // r)
    return found


# --- the run ---


@dataclass(frozen=True)
class Trained:
    """The results of a training run."""

    params: Params  # whole
    run: sf.run.Run  # with the losses of its steps, in nats, and of held-out files as `eval/loss`
    log: sf.collectives.Ledger  # of the last step
    expected: dict[str, tuple[int, ...]]  # bytes that a rank sends for each stage in a step: see `moved`

    @property
    def validation(self) -> float:
        return self.run.metrics["eval/loss"][self.run.step]


def train(
    config: Config,
    mesh: DeviceMesh,
    data: tuple[Tensor, Tensor],
    steps: int,
    seed: int,
    strategy: sf.Strategy,
    report: Reports = (),
    **saves: Any,
) -> Trained:
    """One seed gives the same losses, up to rounding, on any mesh, by any strategy, and after any interruptions.

    With a strategy that has exact parts, they and the parameters are the same bits.
    """
    opt, exact = optimizer(config, steps), isinstance(strategy, sf.Placement) and strategy.exact
    training, held_out = (
        sf.run.batches(stretches(text, config.context + 1), mesh, DATA, config.batch, seed) for text in data
    )

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=(..., P()))
    def step(state: Params, rows: Tensor) -> tuple[Params, dict[str, Tensor]]:
        if exact:
            of_part = sf.accumulate(lambda p, part: total_and_count(p, part, config), rows.long(), micro="exact")
            loss, grads = of_part(state["model"])
        else:
            loss, grads = sf.value_and_grad(loss_fn)(state["model"], rows.long(), config)
        params, remembered = opt.step(state["model"], grads, state["optimizer"])
        return {"model": params, "optimizer": remembered}, {"loss": loss, "bits/byte": loss / math.log(2)}

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=P())
    def loss_on(params: Params, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return loss_fn(params, rows.long(), config)

    def validate(state: Params) -> dict[str, Tensor]:
        return {"loss": torch.stack([loss_on(state["model"], rows) for rows in islice(held_out(0), 16)]).mean()}

    params = sf.shard(init(config, seed), mesh, strategy)
    state, counted = {"model": params, "optimizer": opt.init(params)}, Counted(step)
    state, run = sf.run.loop(
        counted, state, training, steps=steps, seed=seed, evaluate=(validate, steps), report=report, **saves
    )
    return Trained(sf.unshard(state["model"]), run, counted.log, formula(state["model"]))


def main() -> None:
    args = hybrid_arguments("Train a byte-level language model, sharded over a mesh.", DATA, "runs/train_lm", steps=600)
    mesh, config = sf.make_mesh(device=args.device, **args.mesh), Config()
    curve, shown = args.out / "metrics.jsonl", sf.run.progress()
    trained = train(
        config, mesh, corpus(), args.steps, args.seed, args.strategy, (shown, sf.run.jsonl(curve)), **args.saves
    )
    end(trained.run)
    if mesh.get_rank() == 0:
        compare(trained.log, trained.expected)
        # The model that was trained on shards generates text from whole parameters, without a mesh.
        whole, context = trained.params, config.context
        leave(curve, trained.validation, lambda text: model(whole, text[:, -context:], config), args.out, args.seed)


if __name__ == "__main__":
    main()
