"""Trains a language model whose MLPs are mixtures of experts, over two axes: data and experts.

    torchrun --standalone --nproc-per-node 4 -m examples.moe --expert 2 --capacity 10

The rows of a batch are sharded over both axes, and so are the parameters of attention. Each rank along `expert` has
some of the experts, which are sharded over `data` only. An all-to-all sends tokens to their experts, another one sends
the results back, and gradients take the same way. With a capacity, an expert takes at most that many tokens of each
group, and the number of bytes sent is fixed. With `--capacity none`, every token reaches its experts, and the number of
bytes depends on the choices.

Two more losses keep the experts evenly used and the router's logits small. At the end, the program prints how many
choices were dropped, how evenly the experts were used, and how many bytes a rank exchanged with experts, next to a
formula. Sources: Lepikhin et al., GShard (2020); Fedus et al., Switch Transformers (2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from examples import train_lm
from examples.run import Counted, Params, Reports, corpus, curve, options, ranks, stretches
from shardfn import P, parallel

ROWS = ("data", "expert")
SPECS = sf.by_path([(r"blocks\.\d+\.experts\..*", P("expert"))], strict=False)


@dataclass(frozen=True)
class Config(train_lm.Config):
    """The sizes of the experts, and how tokens choose them."""

    layers: int = 2
    hidden: int = 128
    experts: int = 8
    chosen: int = 2  # experts per token
    group: int = 32  # tokens to which a capacity applies
    capacity: int | None = 10
    overflow: Literal["drop", "error"] = "drop"
    balance: float = 0.1  # ten times the value that long runs use
    router: float = 0.001


def init(config: Config, seed: int) -> Params:
    """The parameters of `train_lm`, with a router and experts in place of each MLP."""
    params, generator = train_lm.init(config, seed), torch.Generator().manual_seed(seed + 1)
    d, f, e = config.width, config.hidden, config.experts

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (drawn / shape[-2] ** 0.5).to(config.dtype)

    for p in params["blocks"]:
        del p["up"], p["down"]
        p["router"] = normal(d, e)
        p["experts"] = {"up": normal(e, d, 2 * f), "down": normal(e, f, d) / (2 * config.layers) ** 0.5}
    return params


def strategy(path: str, shape: tuple[int, ...]) -> sf.Placement:
    return sf.full_shard("data" if ".experts." in path else ROWS)


# --- the model ---


def expert(p: Params, x: Tensor) -> Tensor:
    """One expert, on any number of tokens: `[n, d] -> [n, d]`."""
    gate, value = (x @ p["up"]).chunk(2, -1)
    return (F.silu(gate) * value) @ p["down"]


@sf.stage
def block(p: Params, x: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, the additional losses, and the numbers of choices per expert on this rank and of dropped ones."""
    h = F.rms_norm(x, x.shape[-1:], p["norm1"]) @ p["qkv"]
    q, k, v = rearrange(h, "b t (three head d) -> three b head t d", three=3, head=config.heads)
    x = x + rearrange(parallel.attention(q, k, v), "b head t d -> b t (head d)") @ p["out"]
    h = rearrange(F.rms_norm(x, x.shape[-1:], p["norm2"]), "b (n g) d -> (b n) g d", g=config.group)
    routing = parallel.route(h, p["router"], config.chosen)
    y = parallel.mixture_of_experts(
        expert, p["experts"], h, routing, "expert", capacity=config.capacity, overflow=config.overflow
    )
    besides = config.balance * parallel.balance_loss(routing, ROWS)
    besides = besides + config.router * parallel.router_loss(routing, ROWS)
    lost = x.new_zeros((), dtype=torch.long)
    if config.capacity is not None:
        lost = parallel.num_dropped(routing, config.capacity)
    used = torch.bincount(routing.experts.flatten(), minlength=config.experts)
    return x + rearrange(y, "(b n) g d -> b (n g) d", b=len(x)), besides, torch.cat((used, lost[None]))


def loss_fn(params: Params, tokens: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """The loss over all ranks' tokens, and the share of each expert and of dropped choices, over all layers."""
    first, *blocks, last = sf.layers([params["embed"], *params["blocks"], params["head"]])
    x, besides, counts = train_lm.embed(first, tokens[:, :-1]), [], []
    for p in blocks:
        x, more, count = block(p, x, config)
        besides.append(more)
        counts.append(count)
    logits = train_lm.head(last, x)
    total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss = sf.psum(total, ROWS) / (config.batch * config.context) + torch.stack(besides).mean()
    every = sf.psum(torch.stack(counts).sum(0), ROWS)
    return loss, every / every[:-1].sum()


# --- the run ---


def formula(config: Config, data: int, size: int) -> tuple[int, int]:
    """Bytes that a rank exchanges with experts in a step, forward and backward: (s - 1) / s of each buffer.

    A layer has two all-to-alls each way, of `e * g * capacity * d` numbers for g groups. Without a capacity, they have
    as many rows as there are choices, if experts are evenly used, and are preceded by the token counts of the experts.
    """
    tokens = config.batch * config.context // (data * size)
    places = tokens * config.chosen
    if config.capacity is not None:
        places = config.experts * config.capacity * tokens // config.group
    numbers = config.layers * 2 * places * config.width * config.dtype.itemsize
    lengths = config.layers * config.experts * torch.int64.itemsize if config.capacity is None else 0
    return (numbers + lengths) * (size - 1) // size, numbers * (size - 1) // size


def travelled(log: sf.collectives.Ledger) -> tuple[int, int]:
    """The bytes that a rank has exchanged with experts, forward and backward."""
    return log.bytes(op="all_to_all", backward=False), log.bytes(op="all_to_all", backward=True)


def train(
    config: Config, mesh: DeviceMesh, data: Tensor, steps: int, seed: int, report: Reports = ()
) -> tuple[list[float], list[float], sf.collectives.Ledger]:
    """Trains from scratch; returns the losses and, of the last step, the shares as in `loss_fn` and its bytes."""
    opt = train_lm.optimizer(config, steps)

    @sf.shard_map(mesh=mesh, in_specs=(..., P(ROWS)), out_specs=(..., P()))
    def step(state: Params, rows: Tensor) -> tuple[Params, dict[str, Tensor]]:
        (loss, shares), grads = sf.value_and_grad(loss_fn, has_aux=True)(state["model"], rows.long(), config)
        params, remembered = opt.step(state["model"], grads, state["optimizer"])
        return {"model": params, "optimizer": remembered}, {"loss": loss} | dict(zip(names, shares, strict=True))

    names = [*(f"expert {n}" for n in range(config.experts)), "dropped"]
    params = sf.shard(init(config, seed), mesh, strategy, specs=SPECS)
    batches = sf.run.batches(stretches(data, config.context + 1), mesh, ROWS, config.batch, seed)
    state, counted = {"model": params, "optimizer": opt.init(params)}, Counted(step)
    _, run = sf.run.loop(counted, state, batches, steps=steps, report=report)
    return curve(run), [run.metrics[name][steps] for name in names], counted.log


def main() -> None:
    parser = options("Train a language model with mixtures of experts.", steps=40)
    parser.add_argument(
        "--expert", type=int, default=ranks(2), help="ranks that share the experts (default: %(default)s)"
    )
    parser.add_argument(
        "--capacity", type=lambda text: None if text == "none" else int(text), default=10,
        help="tokens of each group of 32 that an expert takes, or none for no limit (default: 10)",
    )  # fmt: skip
    args = parser.parse_args()
    mesh, config = sf.make_mesh(device=args.device, data=-1, expert=args.expert), Config(capacity=args.capacity)
    losses, shares, log = train(config, mesh, corpus()[0], args.steps, args.seed, (sf.run.progress(),))
    if mesh.get_rank() == 0:
        *used, lost = (share * config.experts for share in shares)
        print(f"loss {losses[-1]:.3f}; {lost / config.experts:.1%} of choices dropped")
        print("choices of each expert, of 1.00 if evenly:", *(f"{share:.2f}" for share in used))
        print(log)
        evenly = "" if config.capacity else " (if evenly used)"
        ways, expected = ("forward", "backward"), formula(config, mesh["data"].size(), args.expert)
        for way, sent, numbers in zip(ways, travelled(log), expected, strict=True):
            print(f"to experts and back, {way}: {sent / 1e3:.1f} kB, formula{evenly} {numbers / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
