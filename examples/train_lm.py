"""Trains a byte-level language model on the sources of Python's standard library, sharded over a hybrid mesh.

    torchrun --standalone --nproc-per-node 4 examples/train_lm.py --mesh replica=2,shard=2 --strategy hybrid_shard

Math, memory and communication are all on this page. Every layer's parameters are one flat shard, cut over `shard`; a
stage gathers them just before its function runs, and brings its gradient back: reduce-scattered over `shard`, then
summed over `replica` on the shard only. AdamW touches this rank's shards and nothing else. Another `--strategy` cuts
and gathers otherwise; nothing else on this page changes.

With `--resume` it goes on from the newest checkpoint in `--out`, on whatever mesh it is started: a run whose processes
die, and which `torchrun --max-restarts 3` starts again, ends at the same loss.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import resource
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
import shardfn.optim as so
from shardfn import P, checkpoint

DATA = ("replica", "shard")  # the batch is cut over both
Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the model, and of the run."""

    vocabulary: int = 256
    width: int = 128
    heads: int = 4
    layers: int = 4
    hidden: int = 352
    context: int = 128
    batch: int = 16  # sequences a step, over all ranks
    rate: float = 6e-3
    warmup: int = 40
    decay: float = 0.1
    clip: float = 1.0
    dtype: torch.dtype = torch.float32


# --- the model: pure functions of full parameters ---


def init(config: Config, seed: int) -> Params:
    """All parameters, whole; the same for one seed on any mesh."""
    generator = torch.Generator().manual_seed(seed)
    d, f, v = config.width, config.hidden, config.vocabulary

    def normal(*shape: int, fan_in: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) / fan_in**0.5).to(config.dtype)

    def ones() -> Tensor:
        return torch.ones(d, dtype=config.dtype)

    def block() -> Params:
        return {
            "norm1": ones(),
            "qkv": normal(d, 3 * d, fan_in=d),
            "out": normal(d, d, fan_in=d * 2 * config.layers),
            "norm2": ones(),
            "up": normal(d, 2 * f, fan_in=d),
            "down": normal(f, d, fan_in=f * 2 * config.layers),
        }

    return {
        "embed": {"tokens": normal(v, d, fan_in=d), "places": normal(config.context, d, fan_in=d)},
        "blocks": [block() for _ in range(config.layers)],
        "head": {"norm": ones(), "out": normal(d, v, fan_in=d)},
    }


@sf.stage
def embed(p: Params, tokens: Tensor) -> Tensor:
    return p["tokens"][tokens] + p["places"][: tokens.shape[1]]


@sf.stage
def block(p: Params, x: Tensor, heads: int) -> Tensor:
    h = F.rms_norm(x, x.shape[-1:], p["norm1"]) @ p["qkv"]
    q, k, v = rearrange(h, "b t (three head d) -> three b head t d", three=3, head=heads)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + rearrange(attended, "b head t d -> b t (head d)") @ p["out"]
    gate, value = (F.rms_norm(x, x.shape[-1:], p["norm2"]) @ p["up"]).chunk(2, -1)
    return x + (F.silu(gate) * value) @ p["down"]


@sf.stage
def head(p: Params, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], p["norm"]) @ p["out"]


def model(params: Params, tokens: Tensor, config: Config) -> Tensor:
    """Logits `[b, t, vocabulary]` for tokens `[b, t]`, from flat shards or from whole parameters alike."""
    ordered = sf.layers([params["embed"], *params["blocks"], params["head"]])
    x = embed(ordered[0], tokens)
    for p in ordered[1:-1]:
        x = block(p, x, config.heads)
    return head(ordered[-1], x)


def loss_fn(params: Params, tokens: Tensor, config: Config) -> Tensor:
    """Mean cross-entropy, in nats, over all predicted tokens of all ranks. Tokens `[rows, context + 1]`."""
    logits = model(params, tokens[:, :-1], config)
    total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return sf.psum(total, DATA) / sf.psum(tokens[:, 1:].numel(), DATA)


# --- the optimizer: on this rank's shards ---


def optimizer(config: Config, steps: int) -> so.Optimizer:
    """AdamW, clipped; a cosine after a linear warm-up, down to a tenth. Matrices decay, vectors do not."""
    rate = so.warmup_cosine(config.rate, warmup=min(config.warmup, steps), steps=steps, end=config.rate / 10)

    def decay(path: str, shape: tuple[int, ...]) -> float:
        return config.decay if len(shape) > 1 else 0.0

    return so.chain(so.clip_by_global_norm(config.clip), so.adamw(rate, b2=0.98, weight_decay=decay))


# --- the run ---


def corpus() -> tuple[Tensor, Tensor]:
    """The standard library's sources as bytes, for training and, one file in sixteen, for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept: dict[bool, list[bytes]] = {True: [], False: []}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if not {"site-packages", "test", "tests"} & set(name.parts):
            kept[hashlib.blake2b(str(name).encode()).digest()[0] < 16].append(file.read_bytes())
    held_out, training = (
        torch.frombuffer(bytearray(b"\n".join(kept[side])), dtype=torch.uint8) for side in (True, False)
    )
    return training, held_out


def draw(data: Tensor, config: Config, generator: torch.Generator) -> Tensor:
    """This rank's rows, `[rows, context + 1]`, of one global batch, whose places all ranks draw alike."""
    starts = torch.randint(len(data) - config.context, (config.batch,), generator=generator, device=data.device)
    own = sf.local_slice(starts, DATA)
    return data[own[:, None] + torch.arange(config.context + 1, device=data.device)].long()


@dataclass(frozen=True)
class Run:
    """What a training run leaves behind."""

    params: Params  # whole
    losses: list[float]  # in nats, one for each step
    validation: float  # in nats, at the end


@dataclass(frozen=True)
class Saves:
    """Where checkpoints go, how often, and whether to go on from one."""

    folder: Path
    every: int  # steps
    resume: bool = False


def train(
    config: Config,
    mesh: DeviceMesh,
    data: tuple[Tensor, Tensor],
    steps: int,
    seed: int,
    strategy: sf.Strategy,
    report: Callable[[int, float], None] = lambda step, loss: None,
    saves: Saves | None = None,
) -> Run:
    """The same seed gives the same losses on any mesh, by any strategy, up to rounding; however often interrupted."""
    opt = optimizer(config, steps)
    training, held_out = (part.to(mesh.device_type) for part in data)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P()), out_specs=(..., ..., P()))
    def train_step(params: Params, state: Params, step: int) -> tuple[Params, Params, Tensor]:
        tokens = draw(training, config, sf.fold_in(seed, step))
        loss, grads = sf.value_and_grad(loss_fn)(params, tokens, config)
        params, state = opt.step(params, grads, state)
        return params, state, loss

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=P())
    def validate(params: Params) -> Tensor:
        with torch.no_grad():
            batches = [draw(held_out, config, sf.fold_in(seed, 0, i)) for i in range(16)]
            return torch.stack([loss_fn(params, tokens, config) for tokens in batches]).mean()

    params = sf.shard(init(config, seed), mesh, strategy)
    # Batches are drawn by the step's number, so it says where in the data the run is.
    now = {
        "model": params,
        "optimizer": opt.init(params),
        "step": 0,
        "seed": seed,
        "losses": torch.zeros(steps).double(),
    }
    newest = checkpoint.latest(saves.folder) if saves and saves.resume else None
    if newest is not None:
        now = checkpoint.load(newest, now)
        if now["seed"] != seed:
            raise ValueError(f"{newest} is of a run with --seed {now['seed']}, not {seed}")
    for step in range(now["step"], steps):
        params, state, loss = train_step(now["model"], now["optimizer"], step)
        now["losses"][step] = loss
        now |= {"model": params, "optimizer": state, "step": step + 1}
        report(step, loss.item())
        if saves and (step + 1) % saves.every == 0:
            checkpoint.save_async(saves.folder / f"step-{step + 1:06d}", now, keep=2, overwrite=True)
    checkpoint.finish()
    return Run(sf.unshard(now["model"]), now["losses"].tolist(), validate(now["model"]).item())


def complete(params: Params, config: Config, prompt: bytes, length: int, seed: int) -> bytes:
    """Continues a prompt with whole, unsharded parameters: the same model, no mesh."""
    device = params["head"]["out"].device
    generator = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)
    with torch.no_grad():
        for _ in range(length):
            logits = model(params, text[:, -config.context :], config)[0, -1]
            chosen = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
            text = torch.cat([text, chosen[None]], 1)
    return bytes(text[0].tolist())


def memory(device: str) -> str:
    """The most memory that this process has used."""
    if device == "cuda":
        return f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MB"


def plot(losses: list[float], validation: float, file: Path) -> None:
    """The loss curve, in bits per byte, as a picture."""
    from matplotlib.figure import Figure  # which takes a second to load

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot([loss / math.log(2) for loss in losses], linewidth=0.8, label="training batch")
    axes.axhline(validation / math.log(2), color="black", linestyle=":", label="held-out files, at the end")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=150, bbox_inches="tight")


def arguments() -> argparse.Namespace:
    def mesh(text: str) -> dict[str, int]:
        pairs = dict(pair.split("=") for pair in text.split(","))
        if not set(pairs) <= set(DATA):
            raise argparse.ArgumentTypeError(f"axes are {' and '.join(DATA)}, as in replica=2,shard=2; got {text}")
        return {name: int(pairs.get(name, 1)) for name in DATA}

    def strategy(name: str) -> sf.Placement:
        try:
            return sf.strategy(name, shard="shard", replica="replica")
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser = argparse.ArgumentParser(description="Train a byte-level language model, sharded over a mesh.")
    parser.add_argument(
        "--mesh", type=mesh, default="shard=-1", help="replica=R,shard=S; one may be -1 (default: %(default)s)"
    )
    parser.add_argument(
        "--strategy",
        type=strategy,
        default="hybrid_shard",
        help="ddp, FULL_SHARD, zero1, hpz, ... (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=600, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", help="cpu or cuda; default: CUDA where there is some")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/train_lm"),
        help="folder for checkpoints and the loss curve (default: %(default)s)",
    )
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    mesh = sf.make_mesh(device=args.device, **args.mesh)
    first = mesh.get_rank() == 0
    config = Config()
    began = time.perf_counter()
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, disable=not first, refresh_per_second=4) as bar:
        task = bar.add_task("starting", total=args.steps)

        done = 0

        def report(step: int, loss: float) -> None:
            nonlocal done
            done += 1
            speed = done * config.batch * config.context / (time.perf_counter() - began)
            told = [f"loss {loss:.3f}", f"{loss / math.log(2):.3f} bits/byte", f"{speed / 1e3:.1f}k tokens/s"]
            bar.update(task, completed=step + 1, description="  ".join([*told, memory(mesh.device_type)]))

        every = args.save_every or (args.steps if args.resume else 0)
        saves = Saves(args.out / "checkpoints", every, args.resume) if every else None
        run = train(config, mesh, corpus(), args.steps, args.seed, args.strategy, report, saves)
    if first:
        args.out.mkdir(parents=True, exist_ok=True)
        plot(run.losses, run.validation, args.out / "loss.png")
        sample = complete(run.params, config, b"def main(", 300, args.seed)
        print(f"held-out files: {run.validation / math.log(2):.3f} bits per byte")
        print(f"loss curve: {args.out / 'loss.png'}\n\n{sample.decode(errors='replace')}")


if __name__ == "__main__":
    main()
