"""Trains the model of `examples/train_lm.py` as a pipeline: its layers are on different ranks.

    torchrun --standalone --nproc-per-node 4 -m examples.pipeline --pipe 4 --micro 8 --schedule 1f1b

The first rank along `pipe` has the embedding, the last one has the head, and each rank has some of the layers and holds
no others. Activations go to the next rank, and their gradients come back. A rank is idle while it waits for either: for
(p - 1) / (m + p - 1) of the time, with p ranks and m micro-batches, in both schedules. `1f1b` runs backward passes as
soon as possible, and so holds the activations of at most p micro-batches; `gpipe` holds those of all. If there are more
ranks than `--pipe`, the rows of each micro-batch and the parameters of every stage are sharded over `shard`.

The program first draws the schedule, as if forward and backward took equally long, and then trains the model. At the
end it prints the time, the memory, and the bytes that each rank sent to its neighbors, next to a formula. Sources:
Huang et al., GPipe (2018); Narayanan et al., PipeDream-2BW (2020).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from examples import train_lm
from examples.run import Params, Reports, corpus, curve, fit, memory, options, ranks, stretches
from shardfn import P, parallel
from shardfn.parallel.pipeline import Schedule, schedule_of


@dataclass(frozen=True)
class Config(train_lm.Config):
    """Splits a batch into micro-batches."""

    micro: int = 8
    schedule: Schedule = "1f1b"


def picture(schedule: Schedule, size: int, count: int) -> list[str]:
    """What each rank does in each time slot, one row per rank: `F2` is forward of micro-batch 2, `B2` its backward.

    A pass takes one slot, and waits until the neighbor that sends its input has finished.
    """
    left = [schedule_of(schedule, index, size, count) for index in range(size)]
    done: set[tuple[int, str, int]] = set()
    rows: list[list[str]] = [[] for _ in left]
    while any(left):
        ready = []
        for index, own in enumerate(left):
            kind, number = own[0] if own else ("", 0)
            source = index - 1 if kind == "forward" else index + 1
            if own and (not 0 <= source < size or (source, kind, number) in done):
                ready.append((index, *own.pop(0)))
        done.update(ready)  # all at once: neighbors can use them in the next slot
        now = {index: f"{kind[0].upper()}{number}" for index, kind, number in ready}
        for index, row in enumerate(rows):
            row.append(now.get(index, "."))
    width = max(len(cell) for row in rows for cell in row)
    return [" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]


# --- the model: the stages of train_lm, each on its ranks ---


def strategy(config: Config, size: int) -> sf.Strategy:
    """Which of `size` ranks has which parameters."""
    owners = [rank for rank, own in enumerate(parallel.split_layers(config.layers, size)) for _ in own]

    def placed(path: str, shape: tuple[int, ...]) -> sf.Placement:
        first, layer, *_ = path.split(".")
        at = {"embed": 0, "head": size - 1}[first] if first != "blocks" else owners[int(layer)]
        return sf.full_shard("shard").only_on(pipe=at)

    return placed


def part(params: Params, x: Any, rows: Tensor, config: Config) -> Tensor:
    """This rank's part of a micro-batch: maps the previous rank's output to the next one's input, or to the loss."""
    index, size = sf.axis_index("pipe"), sf.axis_size("pipe")
    own = [params["blocks"][i] for i in parallel.split_layers(config.layers, size)[index]]
    first, last = [params["embed"]] * (index == 0), [params["head"]] * (index == size - 1)
    ordered = sf.layers([*first, *own, *last])
    if first:
        x = train_lm.embed(ordered[0], rows[:, :-1])
    for p in ordered[len(first) : len(first) + len(own)]:
        x = train_lm.block(p, x, config.heads)
    if not last:
        return x
    logits = train_lm.head(ordered[-1], x)
    total = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return sf.psum(total, "shard") / (config.batch * config.context)


def loss_fn(params: Params, tokens: Tensor, config: Config) -> Tensor:
    """Mean cross-entropy, in nats, over the whole batch. Tokens `[batch / shard, context + 1]`."""
    batches = list(rearrange(tokens, "(m rows) t -> m rows t", m=config.micro))
    return parallel.pipeline(
        lambda params, x, rows: part(params, x, rows, config), params, batches, "pipe", schedule=config.schedule
    )


# --- the run ---


def formula(config: Config, shard: int, size: int, index: int) -> tuple[int, int]:
    """Bytes that rank `index` sends in a step: m activations to the next one, and m gradients to the one before."""
    activation = config.batch // shard // config.micro * config.context * config.width * config.dtype.itemsize
    sent = config.micro * activation
    return sent * (index < size - 1), sent * (index > 0)


def train(
    config: Config, mesh: DeviceMesh, data: Tensor, steps: int, seed: int, report: Reports = ()
) -> tuple[list[float], sf.collectives.Ledger]:
    """Trains from scratch; returns the losses, and the ledger of the last step."""

    def loss(params: Params, rows: Tensor) -> Tensor:
        return loss_fn(params, rows.long(), config)

    params = sf.shard(train_lm.init(config, seed), mesh, strategy(config, mesh["pipe"].size()))
    batches = sf.run.batches(stretches(data, config.context + 1), mesh, "shard", config.batch, seed)
    _, run, log = fit(loss, params, mesh, train_lm.optimizer(config, steps), batches, steps, report)
    return curve(run), log


def main() -> None:
    parser = options("Train a language model whose layers are on different ranks.", steps=25)
    parser.add_argument("--pipe", type=int, default=ranks(4), help="ranks that share the layers (default: %(default)s)")
    parser.add_argument("--micro", type=int, default=8, help="micro-batches per step (default: %(default)s)")
    parser.add_argument("--schedule", choices=get_args(Schedule), default="1f1b", help="default: %(default)s")
    args = parser.parse_args()
    mesh = sf.make_mesh(device=args.device, pipe=args.pipe, shard=-1)
    config, first = Config(micro=args.micro, schedule=args.schedule), mesh.get_rank() == 0
    if first:
        print("\n".join(picture(config.schedule, args.pipe, config.micro)))
        print(f"a rank waits {(args.pipe - 1) / (config.micro + args.pipe - 1):.0%} of the time\n")
    began = time.perf_counter()
    losses, log = train(config, mesh, corpus()[0], args.steps, args.seed, (sf.run.progress(),))
    took = (time.perf_counter() - began) / args.steps

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=P())
    def along_pipe(sent: Tensor) -> Tensor:
        return sf.all_gather(sent[None], "pipe", to="invariant")

    own = torch.tensor([log.bytes(op="send", backward=way) for way in (False, True)], device=mesh.device_type)
    every = along_pipe(own)
    if first:
        print(f"loss {losses[-1]:.3f} nats, {took:.3f} s per step, {memory(mesh.device_type)} on the first rank")
        print(log)
        for index, sent in enumerate(every.tolist()):
            expected = formula(config, mesh["shard"].size(), args.pipe, index)
            told = (f"{n / 1e3:.1f} kB (formula {m / 1e3:.1f})" for n, m in zip(sent, expected, strict=True))
            print("rank {} of {} sends on {} and back {}".format(index, args.pipe, *told))


if __name__ == "__main__":
    main()
