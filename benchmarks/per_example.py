"""Norms and clipped sums of single examples' gradients on the schedule of stages, beside one ordinary gradient.

    OMP_NUM_THREADS=1 python -m benchmarks.per_example
    OMP_NUM_THREADS=1 python -m benchmarks.per_example --peers     # needs opacus

Two ranks, float32: a transformer, and a perceptron whose rows have one token. Memory is the peak that the operating
system gave to a rank above what it had with the shards of parameters; results, such as a gradient, are a part of it.
Time is a rank's processor's. `vmap of grad` has whole parameters, and gradients of one row at a time.

`--peers` compares with opacus, by ghost clipping: the norms, which are equal, and a private step of SGD, on one process
and on two with FSDP2. As opacus finds norms, it also computes a gradient, of which nothing is used.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage
from benchmarks.report import Goal, lacks, parser, publish
from shardfn.curvature.per_example import dp_grads, per_example

RANKS = 2
NETS = ("transformer", "perceptron")
KINDS = ("gradient", "norms", "clipped sum", "vmap of grad")
WORDS, HEADS = 4096, 8


def attending(p: Any, x: Tensor) -> Tensor:
    h = F.layer_norm(x, x.shape[-1:], p["gain"], p["shift"])
    q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (h @ p["qkv"]).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ p["out"]
    return x + F.gelu(F.rms_norm(x, x.shape[-1:], p["scale"]) @ p["up"]) @ p["down"]


def perceptron(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(F.linear(x, p["up"], p["bias"])) @ p["down"]


def embed(p: Any, tokens: Tensor) -> Tensor:
    return p["words"][tokens]


def makers(net: str, width: int, layers: int) -> Any:
    shapes: dict[str, tuple[int, ...]] = {"up": (4 * width, width), "bias": (4 * width,), "down": (4 * width, width)}
    if net == "transformer":
        shapes = {
            "gain": (width,), "shift": (width,), "scale": (width,), "qkv": (width, 3 * width), "out": (width, width),
            "up": (width, 4 * width), "down": (4 * width, width),
        }  # fmt: skip

    def layer(g: torch.Generator) -> Any:
        return {name: torch.randn(shape, generator=g) / width**0.5 for name, shape in shapes.items()}

    return {
        "embed": lambda g: {"words": torch.randn(WORDS, width, generator=g)},
        "layers": [layer] * layers,
        "head": lambda g: {"out": torch.randn(width, WORDS, generator=g) / width**0.5},
    }


def losses_of(stage: Any, net: str) -> Callable[..., Tensor]:
    first, middle = stage(embed), stage(attending if net == "transformer" else perceptron)
    last = stage(lambda p, x: x @ p["out"])

    def losses(params: Any, tokens: Tensor) -> Tensor:
        x = first(params["embed"], tokens)
        for p in sf.layers(params["layers"]):
            x = middle(p, x)
        each = F.cross_entropy(last(params["head"], x).flatten(0, 1), tokens.flatten(), reduction="none")
        return each.view(tokens.shape).sum(1)

    return losses


def program(net: str, kind: str, width: int, layers: int, rows: int) -> Callable[[], Any]:
    mesh = sf.make_mesh(data=RANKS, device="cpu")
    params = sf.init_sharded(makers(net, width, layers), 0, mesh, sf.full_shard("data"))
    tokens = torch.randint(0, WORDS, (rows, 64 if net == "transformer" else 1))
    losses, plain = losses_of(sf.stage, net), losses_of(lambda f: f, net)

    def run() -> Any:
        if kind == "gradient":
            return sf.grad(lambda p: losses(p, tokens).sum())(params)
        if kind == "vmap of grad":
            one = torch.func.grad(lambda p, t: plain(p, t[None])[0])
            whole = sf.unshard(params)
            return [sum(g.square().sum() for g in torch.utils._pytree.tree_leaves(one(whole, t))) for t in tokens]
        found = per_example(losses, params, tokens)
        return found.norms if kind == "norms" else found.clipped(float(found.norms.median()))

    return run


def built(
    usage: Usage, net: str, kind: str, width: int, layers: int, rows: int, rounds: int
) -> dict[str, Callable[..., Any]]:
    program(net, kind, 16, 2, 2)()  # memory of torch's first use does not count
    step = program(net, kind, width, layers, rows)
    usage.base = usage.again()

    def measured() -> tuple[float, float]:
        step()  # compares what is new
        usage.again()
        return usage.of(step, rounds)

    return {"measured": measured}


# --- beside opacus ---

CLIP, NOISE, RATE = 1.0, 1.0, 1e-4
AS_NEAR = 1e-4  # norms in float32, relative


class Layer(nn.Module):
    """A layer of the same function as a module of modules that opacus knows."""

    def __init__(self, p: Any) -> None:
        super().__init__()
        width = len(p["down"][0])
        self.up, self.down = linear(p["up"].mT if "qkv" in p else p["up"], p.get("bias")), linear(p["down"].mT)
        if "qkv" in p:
            self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
            self.first.load_state_dict({"weight": p["gain"], "bias": p["shift"]})
            self.second.load_state_dict({"weight": p["scale"]})
            self.qkv, self.out = linear(p["qkv"].mT), linear(p["out"].mT)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "qkv"):
            return x + self.down(torch.tanh(self.up(x)))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None)
    made.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return made


def module(params: Any) -> nn.Module:
    table = params["embed"]["words"]
    words = nn.Embedding(WORDS, table.shape[1], _weight=table.clone())
    return nn.Sequential(words, *map(Layer, params["layers"]), linear(params["head"]["out"].mT))


def by_opacus(kind: str, whole: Any, tokens: Tensor, ranks: int) -> Callable[[], Any]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping, GradSampleModuleFastGradientClippingFSDP
    from opacus.optimizers import DPOptimizerFastGradientClipping, FSDPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    wrap, clipping, dp = {
        True: (lambda m: m, GradSampleModuleFastGradientClipping, DPOptimizerFastGradientClipping),
        False: (FSDP2Wrapper, GradSampleModuleFastGradientClippingFSDP, FSDPOptimizerFastGradientClipping),
    }[ranks == 1]
    model = clipping(wrap(module(whole).train()), max_grad_norm=CLIP, loss_reduction="sum", use_ghost_clipping=True)
    given = {"noise_multiplier": NOISE, "max_grad_norm": CLIP, "expected_batch_size": ranks * len(tokens)}
    optimizer = dp(torch.optim.SGD(model.parameters(), RATE), loss_reduction="sum", **given)

    def run() -> Any:
        optimizer.zero_grad(set_to_none=True)
        each = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
        each = each.view(tokens.shape).sum(1)
        if kind == "norms":
            each.sum().backward()
            return model.get_norm_sample()
        DPTensorFastGradientClipping(model, optimizer, each, loss_reduction="sum").backward()
        return optimizer.step()

    return run


def by_shardfn(net: str, kind: str, whole: Any, tokens: Tensor, ranks: int) -> Callable[[], Any]:
    params = sf.shard(whole, sf.make_mesh(data=ranks, device="cpu"), sf.full_shard("data"))
    losses, optimizer = losses_of(sf.stage, net), so.sgd(RATE)
    state = optimizer.init(params)

    def run() -> Any:
        nonlocal params, state
        if kind == "norms":
            return per_example(losses, params, tokens).norms
        size = ranks * len(tokens)
        gradient = dp_grads(
            losses, params, tokens, max_grad_norm=CLIP, noise_multiplier=NOISE, expected_batch_size=size, seed=0, step=0
        )
        params, state = optimizer.step(params, gradient, state)

    return run


def built_beside(
    usage: Usage, whose: str, net: str, kind: str, width: int, layers: int, rounds: int
) -> dict[str, Callable[..., Any]]:
    ranks, place = dist.get_world_size(), dist.get_rank()
    shape = (8, 64) if net == "transformer" else (64, 1)

    def step(width: int, layers: int) -> Callable[[], Any]:
        tokens = torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(place))
        given = kind, sf.init(makers(net, width, layers), 0), tokens, ranks
        return by_opacus(*given) if whose == "opacus" else by_shardfn(net, *given)

    step(16, 2)()  # memory of torch's first use does not count
    run = step(width, layers)
    usage.base = usage.again()

    def measured() -> tuple[tuple[float, float], list[float]]:
        found = run()  # our first call compares what is new
        usage.again()
        return usage.of(run, rounds), [] if found is None or found is False else found.tolist()

    return {"measured": measured}


def peers(args: Any) -> None:
    if importlib.util.find_spec("opacus") is None:
        lacks("opacus is missing: pip install opacus")
    rows, goals = [], []
    for ranks, net, kind in itertools.product((1, RANKS), NETS, ("norms", "private step")):
        figures: dict[str, tuple[float, ...]] = {}
        norms: dict[str, Tensor] = {}
        for whose in ("shardfn", "opacus"):
            given = whose, net, kind, args.width, args.layers, args.rounds
            with Crew(ranks, built_beside, *given, environment={"MALLOC_MMAP_THRESHOLD_": "1000000"}) as crew:
                told = crew.turn("measured")
            figures[whose] = tuple(max(each) for each in zip(*(usage for usage, _ in told), strict=True))
            norms[whose] = torch.tensor([own for _, own in told])
            (peak, took), on = figures[whose], "one process" if ranks == 1 else f"{ranks} ranks"
            rows.append({"": f"{on}, {net}: {kind}, {whose}", "MB above shards": peak, "CPU ms": took})
        if kind == "norms":
            apart = (norms["shardfn"] / norms["opacus"] - 1).abs().max()
            goals.append(Goal(f"{on}, {net}: norms, from opacus'", float(apart), AS_NEAR))
        for i, what in enumerate(("memory", "time")):
            ratio = figures["shardfn"][i] / figures["opacus"][i]
            goals.append(Goal(f"{on}, {net}: {what} of {kind} / opacus'", ratio, 1))
    publish("gradients of single examples, beside opacus", rows, goals, args.json)


def main() -> None:
    options = parser("Memory and time of single examples' norms and clipped sums, beside a gradient's.")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--peers", action="store_true", help="only beside opacus, which must be installed")
    args = options.parse_args()
    if args.peers:
        return peers(args)
    rows, goals = [], []
    for net in NETS:
        found = {}
        for kind in KINDS:
            batch = 8 if net == "transformer" else 64
            given = net, kind, args.width, args.layers, batch, args.rounds if kind != "vmap of grad" else 1
            with Crew(RANKS, built, *given, environment={"MALLOC_MMAP_THRESHOLD_": "1000000"}) as crew:
                found[kind] = tuple(max(each) for each in zip(*crew.turn("measured"), strict=True))
        base = found["gradient"]
        for kind, (peak, took) in found.items():
            figures = {"MB above shards": peak, "of the gradient's": peak / base[0], "CPU ms": took}
            rows.append({"": f"{net}: {kind}", **figures, "of its": took / base[1]})
        goals += [
            Goal(f"memory of norms / the gradient's, {net}", found["norms"][0] / base[0], 1.2),
            Goal(f"time of norms / the gradient's, {net}", found["norms"][1] / base[1], 1.3),
            Goal(f"time of a clipped sum / the gradient's, {net}", found["clipped sum"][1] / base[1], 2.3),
        ]
    publish(f"gradients of single examples, {RANKS} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
