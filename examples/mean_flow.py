"""Trains a transformer to draw digits in one step, by MeanFlow, sharded over a hybrid mesh.

    torchrun --standalone --nproc-per-node 4 -m examples.mean_flow --mesh replica=2,shard=2

The network u(z, r, t, label) is the mean velocity of a flow from noise at t = 1 to digits at t = 0. Its loss needs the
derivative of u along the flow, in forward mode, through attention: `sf.jvp` takes it on the shards. A digit is then
noise minus u(noise, 0, 1). The images are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. At
the end, `--out`/digits.png has digits of each kind, each drawn in one step.

Source: Geng, Deng, Bai, Kolter and He, Mean Flows for One-step Generative Modeling (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from examples.image_classifier import CLASSES, DATA, digits
from examples.run import Params, Reports, adamw, curve, hybrid_options, picture
from shardfn import P


@dataclass(frozen=True)
class Config:
    """Settings of the run; the letters are used in the shapes below."""

    batch: int = 128  # n images per step, over all ranks: b = n / (r s) on each
    width: int = 64  # c
    layers: int = 3
    heads: int = 4
    patch: int = 2  # l = (8 / patch)^2 patches of p = patch^2 pixels
    instant: float = 0.5  # share of rows with r = t, which learn the velocity itself
    rate: float = 2e-3
    warmup: int = 50
    decay: float = 0.0
    clip: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (8 // self.patch) ** 2


def init(config: Config) -> Params:
    """A function for each stage that draws its parameters."""
    c, p, dtype = config.width, config.patch**2, config.dtype

    def matrix(g: torch.Generator, n: int, m: int, scale: float = 1.0) -> Tensor:
        return torch.randn(n, m, generator=g, dtype=dtype) * (scale / n**0.5)

    def embedding(g: torch.Generator) -> Params:
        return {
            "image": matrix(g, p, c), "place": matrix(g, config.patches, c), "label": matrix(g, CLASSES, c),
            "times": matrix(g, 2 * c, c), "mixed": matrix(g, c, c),
        }  # fmt: skip

    def block(g: torch.Generator) -> Params:
        return {
            "qkv": matrix(g, c, 3 * c), "out": matrix(g, c, c), "up": matrix(g, c, 4 * c), "down": matrix(g, 4 * c, c),
            "shift": matrix(g, c, 2 * c), "norm": torch.ones(2, c, dtype=dtype),
        }  # fmt: skip

    def head(g: torch.Generator) -> Params:
        return {"norm": torch.ones(c, dtype=dtype), "out": matrix(g, c, p, 0.1)}

    return {"embed": embedding, "blocks": [block] * config.layers, "head": head}


# --- the network ---


def waves(x: Tensor, width: int) -> Tensor:
    """Times `[b]` as waves `[b, c]`."""
    rates = torch.exp(torch.linspace(0, 3, width // 2, dtype=x.dtype, device=x.device))
    angles = x[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


@sf.stage
def embed(p: Params, z: Tensor, r: Tensor, t: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    times = torch.cat([waves(t, p["times"].shape[1]), waves(t - r, p["times"].shape[1])], -1)
    given = F.silu(times @ p["times"] + p["label"][label]) @ p["mixed"]  # [b, c]
    return z @ p["image"] + p["place"], given  # [b, l, c]


@sf.stage
def block(p: Params, x: Tensor, given: Tensor, heads: int) -> Tensor:
    shifts = (given @ p["shift"]).unflatten(-1, (2, 1, -1)).unbind(1)  # two of [b, 1, c]
    h = F.rms_norm(x, x.shape[-1:], p["norm"][0]) + shifts[0]
    q, k, v = ((h @ p["qkv"]).unflatten(-1, (3, heads, -1))).unbind(2)  # [b, l, heads, c / heads]
    y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
    x = x + y.transpose(1, 2).flatten(-2) @ p["out"]
    h = F.rms_norm(x, x.shape[-1:], p["norm"][1]) + shifts[1]
    return x + F.gelu(h @ p["up"]) @ p["down"]


@sf.stage
def head(p: Params, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], p["norm"]) @ p["out"]  # [b, l, p]


def velocity(params: Params, z: Tensor, r: Tensor, t: Tensor, label: Tensor, config: Config) -> Tensor:
    """The mean velocity `[b, l, p]` from time r to time t."""
    x, given = embed(params["embed"], z, r, t, label)
    for p in sf.layers(params["blocks"]):
        x = block(p, x, given, heads=config.heads)
    return head(params["head"], x)


# --- the loss ---


def mean_flow(params: Params, rows: tuple[Tensor, ...], config: Config) -> tuple[Tensor, Tensor]:
    """The loss and the squared error of this rank's rows, summed.

    u is drawn to v - (t - r) du/dt, through which no gradient flows; rows with a large error weigh less.
    """
    x, label, noise, r, t = rows
    share = t[:, None, None]
    z, v = (1 - share) * x + share * noise, noise - x
    u, slope = sf.jvp(
        lambda z, r, t: velocity(params, z, r, t, label, config),
        (z, r, t),
        (v, torch.zeros_like(r), torch.ones_like(t)),
    )
    target = (v - (t - r)[:, None, None] * slope).detach()
    errors = (u - target).square().mean((1, 2))
    return (errors / (errors.detach() + 1e-2)).sum(), errors.detach().sum()


def drawn(seed: int, step: int, images: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Noise, and times r <= t, for this rank's rows: the same for a row on any mesh."""
    first, many = sf.axis_index(DATA) * len(images), sf.axis_size(DATA) * len(images)
    g = torch.Generator().manual_seed(sf.fold_in(seed, step).initial_seed())
    noise = torch.randn(many, *images.shape[1:], generator=g, dtype=config.dtype)
    times = torch.randn(2, many, generator=g, dtype=config.dtype).sub(0.4).sigmoid().sort(0).values
    equal = torch.rand(many, generator=g) < config.instant
    r, t = torch.where(equal, times[1], times[0]), times[1]
    return tuple(x[first : first + len(images)].to(images.device) for x in (noise, r, t))  # type: ignore[return-value]


def patches_of(images: Tensor, config: Config) -> Tensor:
    """Images `[m, 1, 8, 8]` from 0 to 1 as patches `[m, l, p]` from -1 to 1."""
    return F.unfold(images * 2 - 1, config.patch, stride=config.patch).mT.contiguous()


def images_of(patches: Tensor, config: Config) -> Tensor:
    """The inverse: `[m, 1, 8, 8]`."""
    return (F.fold(patches.mT, 8, config.patch, stride=config.patch) + 1) / 2


# --- the run ---


@dataclass(frozen=True)
class Run:
    """The results of a training run."""

    params: Params
    errors: list[float]  # one for each step


def train(config: Config, mesh: DeviceMesh, strategy: sf.Strategy, steps: int, seed: int, report: Reports = ()) -> Run:
    """The same seed gives the same losses on any mesh, by any strategy, up to rounding."""
    params = sf.init_sharded(init(config), seed, mesh, strategy)
    (images, labels), _ = digits(config.dtype)
    batches = sf.run.batches((patches_of(images, config), labels), mesh, DATA, config.batch, seed)
    optimizer = adamw(config.rate, config.warmup, steps, config.decay, config.clip)

    def loss(params: Params, rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        total, error = sf.psum(mean_flow(params, rows, config), DATA)
        count = sf.psum(len(rows[0]), DATA)
        return total / count, error / count

    @sf.shard_map(mesh=mesh, in_specs=(..., P(DATA)), out_specs=(..., P()))
    def step(state: Params, rows: tuple[Tensor, Tensor]) -> tuple[Params, dict[str, Tensor]]:
        given = (*rows, *drawn(seed, state["step"], rows[0], config))
        (value, error), grads = sf.value_and_grad(loss, has_aux=True)(state["model"], given)
        params, remembered = optimizer.step(state["model"], grads, state["optimizer"])
        return {"model": params, "optimizer": remembered, "step": state["step"] + 1}, {"loss": value, "error": error}

    state = {"model": params, "optimizer": optimizer.init(params), "step": 0}
    state, run = sf.run.loop(step, state, batches, steps=steps, report=report)
    return Run(state["model"], curve(run, "error"))


def sample(params: Params, labels: Tensor, seed: int, config: Config) -> Tensor:
    """Digits `[m, 1, 8, 8]` of these kinds, each drawn in one step; all ranks draw the same ones."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(labels), config.patches, config.patch**2, generator=g, dtype=config.dtype)
    noise, r = noise.to(labels.device), torch.zeros(len(labels), dtype=config.dtype, device=labels.device)
    with torch.no_grad():
        return images_of(noise - velocity(params, noise, r, torch.ones_like(r), labels, config), config)


def main() -> None:
    args = hybrid_options(
        "Train a network to draw digits in one step.", DATA, "runs/mean_flow", steps=2000
    ).parse_args()
    mesh, config = sf.make_mesh(device=args.device, **args.mesh), Config()
    run = train(config, mesh, args.strategy, args.steps, args.seed, (sf.run.progress(),))
    labels = torch.arange(CLASSES, device=mesh.device_type).repeat(4)
    drawn_digits = sample(run.params, labels, args.seed, config).cpu()
    if mesh.get_rank() == 0:
        picture({"training batch": run.errors}, "squared error", args.out / "error.png")
        show(drawn_digits, args.out / "digits.png")
        print(f"digits, each drawn in one step: {args.out / 'digits.png'}")


def show(images: Tensor, file: Path) -> None:
    """Writes images as rows of ten."""
    from matplotlib.image import imsave

    sheet: Any = images.clamp(0, 1).view(-1, CLASSES, 8, 8).transpose(1, 2).reshape(-1, 8 * CLASSES)
    file.parent.mkdir(parents=True, exist_ok=True)
    imsave(file, sheet.float().repeat_interleave(8, 0).repeat_interleave(8, 1).numpy(), cmap="gray_r")


if __name__ == "__main__":
    main()
