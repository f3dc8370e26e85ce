"""Trains a network with batch norms, or a vision transformer, to read digits, sharded over a hybrid mesh.

    torchrun --standalone --nproc-per-node 4 -m examples.image_classifier --mesh replica=2,shard=2
    torchrun --standalone --nproc-per-node 4 -m examples.image_classifier --model vit --strategy zero2

The images are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. The network is an ordinary `torch.nn.Module`.
Its running statistics are buffers, which each call takes and returns as new values, like parameters and optimizer
state. With `sync_batch_norm`, the statistics are those of the whole batch on all ranks. The trained network, including
its running means and variances, is therefore the one that a single process would have trained. After 150 steps on two
processes, it classifies 99.4% of the held-out digits correctly. At the end, `--out`/model holds its state dict, and the
module loaded from there on one process has the same accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from examples.run import Params, Reports, adamw, curve, hybrid_options, picture
from shardfn import P, interop

DATA = ("replica", "shard")  # the batch is sharded over both: r x s ranks
SPECS = {"model": ..., "buffers": P(), "optimizer": ...}
CLASSES = 10
Buffers = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    """Settings of the run; the letters are used in the shapes below."""

    batch: int = 64  # n images per step, over all ranks: b = n / (r s) on each
    width: int = 32  # c channels
    blocks: int = 3
    rate: float = 3e-3
    warmup: int = 20
    decay: float = 0.05
    clip: float = 1.0
    dtype: torch.dtype = torch.float32


# --- the models: ordinary modules ---


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))  # [b, c, 8, 8]
        return F.relu(x + self.norm2(self.conv2(h)))  # [b, c, 8, 8]


class Network(nn.Module):
    """A small residual network."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)  # [b, 1, 8, 8] -> [b, c, 8, 8]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))  # [b, c] -> [b, 10]
        return logits


def network(config: Config) -> nn.Module:
    return Network(config.width, config.blocks)


def vision_transformer(config: Config) -> nn.Module:
    """The vision transformer of `transformers`, on patches of 2 x 2 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {
        "hidden_size": 2 * config.width, "intermediate_size": 4 * config.width, "num_hidden_layers": config.blocks,
        "num_attention_heads": 4, "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": CLASSES,
    }  # fmt: skip
    return ViTForImageClassification(ViTConfig(**sizes))


MODELS: dict[str, Callable[[Config], nn.Module]] = {"network": network, "vit": vision_transformer}


def made(name: str, config: Config, seed: int) -> nn.Module:
    """A module with the same values on every rank."""
    torch.manual_seed(seed)
    return MODELS[name](config).to(config.dtype)


# --- the images ---


def digits(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images `[m, 1, 8, 8]` from 0 to 1 and labels `[m]`, for training and, one in five, for validation."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = torch.from_numpy(found.images).to(dtype)[:, None] / 16, torch.from_numpy(found.target).long()
    held_out = torch.arange(len(labels)) % 5 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


# --- the loss ---


def loss_fn(
    params: Params, model: interop.Functional, buffers: Buffers, images: Tensor, labels: Tensor
) -> tuple[Tensor, Buffers]:
    """Mean cross-entropy over the rows of all ranks, and the updated buffers."""
    logits, buffers = logits_of(model, params, buffers, images)  # [b, 10]
    total = F.cross_entropy(logits, labels, reduction="sum")
    return sf.psum(total, DATA) / sf.psum(len(labels), DATA), buffers


def logits_of(model: Callable[..., Any], params: Params, buffers: Buffers, images: Tensor) -> tuple[Tensor, Buffers]:
    out, buffers = model(params, images, buffers=buffers)
    return getattr(out, "logits", out), buffers  # the transformer returns more than logits


# --- the run ---


@dataclass(frozen=True)
class Run:
    """The results of a training run."""

    params: Params
    buffers: Buffers
    losses: list[float]  # one for each step
    accuracy: float  # on held-out images


def train(
    module: nn.Module,
    config: Config,
    mesh: DeviceMesh,
    strategy: sf.Strategy,
    steps: int,
    seed: int,
    report: Reports = (),
) -> tuple[interop.Functional, Run]:
    """The same seed gives the same losses and buffers on any mesh, by any strategy, up to rounding."""
    model = interop.functional(module.to(mesh.device_type), sync_batch_norm=DATA)
    params, buffers = model.shard(mesh, strategy), model.buffers
    training, held_out = digits(config.dtype)
    batches = sf.run.batches(training, mesh, DATA, config.batch, seed)
    optimizer = adamw(config.rate, config.warmup, steps, config.decay, config.clip)

    @sf.shard_map(mesh=mesh, in_specs=(SPECS, P(DATA)), out_specs=(SPECS, P()))
    def step(state: Params, rows: tuple[Tensor, Tensor]) -> tuple[Params, dict[str, Tensor]]:
        gradient = sf.value_and_grad(loss_fn, has_aux=True)
        (loss, buffers), grads = gradient(state["model"], model, state["buffers"], *rows)
        params, remembered = optimizer.step(state["model"], grads, state["optimizer"])
        return {"model": params, "buffers": buffers, "optimizer": remembered}, {"loss": loss}

    @sf.shard_map(mesh=mesh, in_specs=(..., P()), out_specs=P())
    def accuracy(params: Params, buffers: Buffers) -> Tensor:
        own = slice(sf.axis_index(DATA), None, sf.axis_size(DATA))  # however many there are
        images, labels = (part[own].to(mesh.device_type) for part in held_out)
        with torch.no_grad():
            logits, _ = logits_of(model, params, buffers, images)
        return sf.psum((logits.argmax(-1) == labels).sum(), DATA) / sf.psum(len(labels), DATA)

    state = {"model": params, "buffers": buffers, "optimizer": optimizer.init(params)}
    state, run = sf.run.loop(step, state, batches, steps=steps, report=report)
    model.module.eval()  # from here on, batch norms use their running statistics
    params, buffers = state["model"], state["buffers"]
    return model, Run(params, buffers, curve(run), accuracy(params, buffers).item())


def main() -> None:
    parser = hybrid_options("Train a network to read digits.", DATA, "runs/image_classifier", steps=200)
    parser.add_argument("--model", choices=MODELS, default="network", help="default: %(default)s")
    args = parser.parse_args()
    mesh, config = sf.make_mesh(device=args.device, **args.mesh), Config()
    module = made(args.model, config, args.seed)
    model, run = train(module, config, mesh, args.strategy, args.steps, args.seed, (sf.run.progress(),))
    interop.save_pretrained(args.out / "model", model, run.params, buffers=run.buffers)
    if mesh.get_rank() == 0:
        picture({"training batch": run.losses}, "loss", args.out / "loss.png")
        print(f"held-out digits: {run.accuracy:.1%} are read correctly")
        print(f"and by the module alone, loaded from {args.out / 'model'}: {alone(args, config):.1%}")


def alone(args: Any, config: Config) -> float:
    """The accuracy of the module itself, on one process."""
    from safetensors.torch import load_file

    folder, module = args.out / "model", made(args.model, config, args.seed + 1)
    if isinstance(module, Network):
        module.load_state_dict(load_file(folder / "model.safetensors"))
    else:
        kind: Any = type(module)
        module = kind.from_pretrained(folder)
    images, labels = digits(config.dtype)[1]
    with torch.no_grad():
        out = module.eval()(images)
    return (getattr(out, "logits", out).argmax(-1) == labels).double().mean().item()


if __name__ == "__main__":
    main()
