"""Trains a language model on a mesh of any of six axes: replica, shard, tensor, context, expert, pipe.

    torchrun --standalone --nproc-per-node 4 -m examples.train_nd --mesh shard=2,tensor=2
    torchrun --standalone --nproc-per-node 4 -m examples.train_nd --mesh pipe=2,expert=2 --experts 4

The model is one pure function, and each axis adds a collective at one place in it:

    replica, shard, expert   shard the rows of a batch; parameters are replicated over `replica`, sharded over the rest
    context                  shards sequences; attention passes keys and values around
    tensor                   shards heads, hidden units and the vocabulary
    expert                   shards the experts; tokens are sent to them
    pipe                     splits the list of layers; activations go from rank to rank

On one process, it is the ordinary model. The loss and its gradient are the same on every mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
import shardfn.optim as so
from examples.run import Params, Reports, corpus, curve, fit, options, sizes_of, stretches
from shardfn import P, parallel

AXES = ("replica", "shard", "tensor", "context", "expert", "pipe")


@dataclass(frozen=True)
class Axes:
    """The role of each mesh axis; by default there are none, as on one process."""

    rows: sf.collectives.AxisName = ()  # shard the batch
    tensor: sf.collectives.AxisName = ()
    context: sf.collectives.AxisName = ()
    expert: sf.collectives.AxisName = ()
    pipe: sf.collectives.AxisName = ()

    @property
    def data(self) -> tuple[str, ...]:
        """The axes along which ranks have different tokens."""
        return (*self.rows, *((self.context,) if isinstance(self.context, str) else self.context))


ALONE = Axes()
SIX = Axes(("replica", "shard", "expert"), "tensor", "context", "expert", "pipe")


@dataclass(frozen=True)
class Config:
    """Sizes of the model and the run."""

    vocabulary: int = 256
    width: int = 128
    heads: int = 4
    layers: int = 4
    hidden: int = 352
    experts: int = 0  # in every second block; 0: all blocks are dense
    chosen: int = 2  # experts per token
    capacity: int | None = None  # tokens of a group that an expert takes; None: no limit
    group: int = 8  # tokens
    balance: float = 0.01
    context: int = 128
    batch: int = 16  # sequences per step, over all ranks
    micro: int = 2  # micro-batches per step
    ring: bool = True  # or Ulysses
    sequence: bool = False  # whether `tensor` also shards sequences between layers; for dense models only
    rate: float = 6e-3
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def mixed(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts > 0 and layer % 2 == 1


# --- the model ---


def init(config: Config) -> Params:
    """Functions that make each stage's parameters."""
    d, f, v = config.width, config.hidden, config.vocabulary

    def normal(g: torch.Generator, *shape: int, fan_in: int) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) / fan_in**0.5).to(config.dtype)

    def ones() -> Tensor:
        return torch.ones(d, dtype=config.dtype)

    def embed(g: torch.Generator) -> Params:
        return {"tokens": normal(g, v, d, fan_in=d)}

    def block(layer: int) -> Any:
        def made(g: torch.Generator) -> Params:
            few = d * 2 * config.layers
            attention = {name: normal(g, d, d, fan_in=d) for name in ("q", "k", "v")}
            p = {"norm1": ones(), **attention, "out": normal(g, d, d, fan_in=few), "norm2": ones()}
            e = (config.experts,) if config.mixed(layer) else ()
            mlp = {
                "gate": normal(g, *e, d, f, fan_in=d),
                "up": normal(g, *e, d, f, fan_in=d),
                "down": normal(g, *e, f, d, fan_in=f * 2 * config.layers),
            }
            return p | ({"router": normal(g, d, *e, fan_in=d), "experts": mlp} if e else mlp)

        return made

    def head(g: torch.Generator) -> Params:
        return {"norm": ones(), "out": normal(g, d, v, fan_in=d)}

    return {"embed": embed, "blocks": [block(i) for i in range(config.layers)], "head": head}


SPECS = sf.by_path(
    [
        (r"embed\.tokens", P("tensor")),
        (r".*\.experts\.(gate|up)", P("expert", None, "tensor")),
        (r".*\.experts\.down", P("expert", "tensor")),
        (r".*\.(q|k|v|gate|up)", P(None, "tensor")),
        (r"blocks\..*\.(out|down)", P("tensor")),
        (r"head\.out", P(None, "tensor")),
        (r".*\.(norm.?|router)", P()),
    ],
    strict=False,
)


def strategy(config: Config, mesh: DeviceMesh) -> sf.Strategy:
    """Shards parameters over the ranks with different tokens, on the ranks that have their layer."""
    stages = parallel.split_layers(config.layers, mesh["pipe"].size())

    def placed(path: str, shape: tuple[int, ...]) -> sf.Placement:
        first, layer, *_ = path.split(".")
        places = {"embed": 0, "head": len(stages) - 1}
        at = places[first] if first in places else next(i for i, own in enumerate(stages) if int(layer) in own)
        over = ("shard", "context") if ".experts." in path else ("shard", "context", "expert")
        return sf.hybrid_shard(shard=over, replica="replica").only_on(pipe=at)

    return placed


@sf.stage
def embed(p: Params, tokens: Tensor, axes: Axes, sequence: int | None) -> Tensor:
    return parallel.embedding(tokens, p["tokens"], axes.tensor, sequence=sequence)


@sf.stage
def block(p: Params, x: Tensor, rope: Tensor, config: Config, axes: Axes) -> tuple[Tensor, Tensor]:
    """Activations `[b, t, d]`, and the balance loss of the layer's experts."""
    sequence = 1 if config.sequence else None
    x = x + attended(p, normed(x, p["norm1"], config, axes), rope, config, axes)
    h = normed(x, p["norm2"], config, axes)
    if "experts" in p:
        y, uneven = mixed(p, h, config, axes)
    else:
        y, uneven = mlp(p, parallel.to_parallel(h, axes.tensor, sequence=sequence)), x.new_zeros(())
    return x + parallel.from_parallel(y, axes.tensor, sequence=sequence), uneven


def normed(x: Tensor, weight: Tensor, config: Config, axes: Axes) -> Tensor:
    if config.sequence:  # then each rank has different positions
        weight = sf.pvary(weight, axes.tensor)
    return parallel.rms_norm(x, weight)


def attended(p: Params, h: Tensor, rope: Tensor, config: Config, axes: Axes) -> Tensor:
    sequence = 1 if config.sequence else None
    h = parallel.to_parallel(h, axes.tensor, sequence=sequence)
    heads = config.heads // sf.axis_size(axes.tensor)
    q, k, v = (rearrange(h @ p[name], "b t (h d) -> b h t d", h=heads) for name in ("q", "k", "v"))
    q, k = rotated(q, rope), rotated(k, rope)
    ring = partial(parallel.ring_attention, balanced=True)  # all ranks have equal work
    attention = ring if config.ring else parallel.ulysses_attention
    found = rearrange(attention(q, k, v, axes.context), "b h t d -> b t (h d)")
    return parallel.from_parallel(found @ p["out"], axes.tensor, sequence=sequence)


def angles(places: Tensor, config: Config) -> Tensor:
    """Cosines and sines of rotary positions, `[2, t, d / heads / 2]`."""
    half = config.width // config.heads // 2
    rates = 10000.0 ** -(torch.arange(half, dtype=config.dtype, device=places.device) / half)
    found = places.to(config.dtype)[:, None] * rates
    return torch.stack((found.cos(), found.sin()))


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * rope[0] - b * rope[1], a * rope[1] + b * rope[0]), -1)


def mlp(p: Params, h: Tensor) -> Tensor:
    return (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def mixed(p: Params, x: Tensor, config: Config, axes: Axes) -> tuple[Tensor, Tensor]:
    tokens = rearrange(x, "b (n g) d -> (b n) g d", g=config.group)
    routing = parallel.route(tokens, p["router"], config.chosen)
    # The experts' hidden units are sharded over `tensor`: each rank has a partial sum of every result.
    parts = parallel.Routing(routing.experts, sf.pvary(routing.weights, axes.tensor), routing.logits)
    h = sf.pvary(tokens, axes.tensor)
    y = parallel.mixture_of_experts(mlp, p["experts"], h, parts, axes.expert, capacity=config.capacity)
    y = rearrange(y, "(b n) g d -> b (n g) d", b=len(x))
    return y, parallel.balance_loss(routing, axes.data)


@sf.stage
def head(p: Params, x: Tensor, targets: Tensor, config: Config, axes: Axes) -> Tensor:
    """The sum of this rank's losses."""
    x = normed(x, p["norm"], config, axes)
    sequence = 1 if config.sequence else None
    return parallel.cross_entropy(x, p["out"], targets, axes.tensor, sequence=sequence).sum()


def part(params: Params, x: Any, rows: Tensor, config: Config, axes: Axes) -> Any:
    """Runs this rank's layers on a micro-batch `[b, context + 1]`: from the previous rank's output to its own."""
    own, last = stages_of(config, axes), sf.axis_size(axes.pipe) - 1
    index = sf.axis_index(axes.pipe)
    places = parallel.positions(rows.shape[1] - 1, axes.context, balanced=config.ring, device=rows.device)
    first = [params["embed"]] * (index == 0)
    final = [params["head"]] * (index == last)
    ordered = sf.layers([*first, *(params["blocks"][i] for i in own), *final])
    if index == 0:
        sequence = 1 if config.sequence else None
        x = embed(ordered[0], rows[:, places], axes, sequence), rows.new_zeros((), dtype=config.dtype)
    (x, uneven), rope = x, angles(places, config)
    for p in ordered[len(first) : len(first) + len(own)]:
        x, more = block(p, x, rope, config, axes)
        uneven = uneven + more
    if index < last:
        return x, uneven
    total = sf.psum(head(ordered[-1], x, rows[:, places + 1], config, axes), axes.data)
    count = config.batch * config.context
    return total / count + config.balance * uneven / config.micro


def stages_of(config: Config, axes: Axes) -> range:
    return parallel.split_layers(config.layers, sf.axis_size(axes.pipe))[sf.axis_index(axes.pipe)]


def loss_fn(params: Params, tokens: Tensor, config: Config, axes: Axes = ALONE) -> Tensor:
    """Mean cross-entropy of the whole batch, in nats, plus the balance loss. Tokens `[micro, rows, context + 1]`."""

    def own(params: Params, x: Any, rows: Tensor) -> Any:
        return part(params, x, rows, config, axes)

    return parallel.pipeline(own, params, list(tokens), axes.pipe)


# --- the run ---


def optimizer(config: Config, steps: int) -> so.Optimizer:
    """AdamW with clipping; only matrices have weight decay."""
    rate = so.warmup_cosine(config.rate, warmup=min(40, steps), steps=steps, end=config.rate / 10)
    adamw = so.adamw(rate, b2=0.98, weight_decay=lambda path, shape: 0.1 if len(shape) > 1 else 0.0)
    return so.chain(so.clip_by_global_norm(1.0), adamw)


def train(config: Config, mesh: DeviceMesh, data: Tensor, steps: int, report: Reports = ()) -> Any:
    """Trains from scratch; returns the losses and the whole parameters."""

    def loss(params: Params, rows: Tensor) -> Tensor:
        return loss_fn(params, rearrange(rows.long(), "(rows m) t -> m rows t", m=config.micro), config, SIX)

    params = sf.init_sharded(init(config), config.seed, mesh, strategy(config, mesh), specs=SPECS)
    batches = sf.run.batches(stretches(data, config.context + 1), mesh, SIX.rows, config.batch, config.seed)
    params, run, _ = fit(loss, params, mesh, optimizer(config, steps), batches, steps, report)
    return curve(run), sf.unshard(params)


def main() -> None:
    parser = options("Train a language model on a mesh of any of six axes.", steps=50)
    parser.add_argument(
        "--mesh", type=sizes_of(*AXES), default="shard=-1", help="such as shard=2,tensor=2; one size may be -1"
    )
    parser.add_argument("--experts", type=int, default=0, help="experts in every second block (default: none)")
    args = parser.parse_args()
    config = Config(experts=args.experts, seed=args.seed)
    mesh = sf.make_mesh(device=args.device, **args.mesh)
    train(config, mesh, corpus()[0], args.steps, (sf.run.progress(),))


if __name__ == "__main__":
    main()
