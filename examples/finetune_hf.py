"""Trains a causal language model of `transformers` on Python's own sources, sharded over a hybrid mesh.

    torchrun --standalone --nproc-per-node 4 -m examples.finetune_hf --model mixtral --mesh replica=2,shard=2
    torchrun --standalone --nproc-per-node 4 -m examples.finetune_hf --from FOLDER --rate 2e-5 --dtype bfloat16 --remat

The model's own code runs unchanged as a function of its parameters: every layer is a stage, whose parameters are one
flat shard. With `--from`, the parameters come from the files of a pretrained model, of which each rank reads only what
it keeps, and the text is tokenized by the tokenizer in that folder. Otherwise a small model of the family `--model`
starts from random parameters, which each rank initializes one stage at a time, and each byte is a token. The loss is
the model's own, with `num_items_in_batch`: the mean over the tokens of all ranks, even if they have different numbers
of tokens. A mixture of experts adds its router's loss, of the tokens of all ranks. At the end, `--out`/model is a
folder for `from_pretrained`, and a model loaded from it generates text.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardfn as sf
from examples.run import (
    Params,
    Reports,
    adamw,
    bytes_tokenizer,
    corpus,
    curve,
    fit,
    folder_of,
    hybrid_options,
    picture,
    stretches,
)
from shardfn import P, interop, parallel

DATA = ("replica", "shard")  # the batch is sharded over both: r x s ranks
IGNORED = -100  # the label of tokens that are not predicted

SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 1024}
GATED = {"intermediate_size": 352, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "gpt2": {},
    "qwen2": GATED,
    "mistral": GATED,
    "mixtral": {**GATED, "intermediate_size": 176, "num_local_experts": 4, "num_experts_per_tok": 2,
                "output_router_logits": True},
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Settings of the run; the letters are used in the shapes below."""

    batch: int = 16  # sequences per step, over all ranks: b = batch / (r s) on each
    context: int = 128  # t tokens per sequence
    rate: float = 3e-3
    warmup: int = 20
    decay: float = 0.1
    clip: float = 1.0
    dtype: torch.dtype = torch.float32  # of parameters and optimizer state


# --- the model ---


def made(name: str, dtype: torch.dtype, **sizes: Any) -> tuple[Any, Any]:
    """A small module of a family, on the meta device, and its tokenizer."""
    tokenizer = bytes_tokenizer()
    special = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = AutoConfig.for_model(name, **{**SIZES, **MODELS[name], **special, **sizes})
    with interop.meta():
        return AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer


def described(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A module on the meta device, from the configuration in a folder, and its tokenizer."""
    with interop.meta():
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return module, AutoTokenizer.from_pretrained(folder)


def drawn(path: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Initializes a parameter as most models of `transformers` do: random matrices, norms of ones, biases of zeros."""
    if like.ndim > 1:
        return 0.02 * torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return torch.full(like.shape, 0.0 if path.endswith("bias") else 1.0, dtype=like.dtype)


def sharded(
    module: Any, folder: Path | None, mesh: DeviceMesh, strategy: sf.Strategy, seed: int = 0, **options: Any
) -> tuple[interop.Functional, Params]:
    """The module as a function, and its parameters, from a folder or random; no rank ever holds all of them."""
    model = interop.functional(module.eval(), **options)  # without dropout, whose masks would depend on the mesh
    if folder is not None:
        return model, interop.load(folder, model, mesh, strategy)
    return model, sf.init_sharded(model.tree, seed, mesh, strategy, fill=drawn, frozen=model.frozen)


# --- the loss ---


def tokenized(tokenizer: Any, rows: Tensor, context: int) -> dict[str, Any]:
    """Tokens and labels, `[b, t]`, from bytes `[b, n]`; short rows are padded at the end, which attention ignores."""
    texts = [bytes(row.tolist()).decode(errors="ignore") for row in rows]
    ids = [torch.tensor(one) for one in tokenizer(texts, truncation=True, max_length=context)["input_ids"]]
    tokens, labels = (pad_sequence(ids, batch_first=True, padding_value=value) for value in (0, IGNORED))
    return {"input_ids": tokens.to(rows.device), "labels": labels.to(rows.device)}


def loss_fn(params: Params, model: interop.Functional, batch: dict[str, Any]) -> Tensor:
    """Mean cross-entropy, in nats, over all predicted tokens of all ranks, and the router's loss of a mixture."""
    module: Any = model.module
    config, labels = module.config, batch["labels"]
    count = sf.psum((labels[:, 1:] != IGNORED).sum(), DATA)  # []: the first token of a row is not predicted
    out = model(params, batch["input_ids"], use_cache=False)  # logits [b, t, v]
    total = module.loss_function(out.logits, labels, config.vocab_size, num_items_in_batch=count)
    loss = sf.psum(total, DATA)
    if getattr(out, "router_logits", None) is None:
        return loss
    kept = (labels != IGNORED).flatten()  # the router's loss leaves padding out
    return loss + config.router_aux_loss_coef * router_loss(out.router_logits, kept, config.num_experts_per_tok)


def router_loss(router_logits: tuple[Tensor, ...], kept: Tensor, chosen: int) -> Tensor:
    """The loss of `transformers` that balances experts, over the tokens of all ranks: no sum over tokens."""
    logits = torch.stack(router_logits)[:, kept]  # [layers, tokens, experts]
    weights, experts = logits.softmax(-1).topk(chosen)
    return chosen * parallel.balance_loss(parallel.Routing(experts, weights, logits), DATA)


# --- the run ---


@dataclass(frozen=True)
class Run:
    """The results of a training run; losses are in nats per token."""

    params: Params
    losses: list[float]  # one for each step
    before: float  # on held-out files
    after: float


def train(
    model: interop.Functional,
    params: Params,
    tokenizer: Any,
    config: Config,
    mesh: DeviceMesh,
    data: tuple[Tensor, Tensor],
    steps: int,
    seed: int,
    report: Reports = (),
) -> Run:
    """The same seed gives the same losses on any mesh, by any strategy, up to rounding."""

    def collate(rows: list[Tensor]) -> dict[str, Tensor]:
        return tokenized(tokenizer, torch.stack(rows), config.context)

    training, held_out = (  # tokens are rarely longer than 8 bytes
        sf.run.batches(stretches(text, 8 * config.context + 1), mesh, DATA, config.batch, seed, collate=collate)
        for text in data
    )

    def loss(params: Params, batch: dict[str, Tensor]) -> Tensor:
        return loss_fn(params, model, batch)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=P())
    def loss_on(params: Params, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return loss_fn(params, model, batch)

    def validate(params: Params) -> float:
        return torch.stack([loss_on(params, batch) for batch in islice(held_out(0), 8)]).mean().item()

    before = validate(params)
    optimizer = adamw(config.rate, config.warmup, steps, config.decay, config.clip)
    params, run, _ = fit(loss, params, mesh, optimizer, training, steps, report)
    return Run(params, curve(run), before, validate(params))


def write(folder: Path, prompt: str, length: int, seed: int) -> str:
    """Text generated by the model in a folder, on one process."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    tokens = tokenizer(prompt, return_tensors="pt")  # [1, n]
    written = model.generate(**tokens, max_new_tokens=length, do_sample=True, temperature=0.8)  # [1, n + length]
    text: str = tokenizer.decode(written[0], skip_special_tokens=True)
    return text


def main() -> None:
    parser = hybrid_options("Train a causal language model of transformers.", DATA, "runs/finetune_hf", steps=200)
    parser.add_argument("--model", choices=MODELS, default="llama", help="family of the small model (default: llama)")
    parser.add_argument("--from", type=folder_of, dest="folder", help="a pretrained model, instead of --model")
    parser.add_argument("--rate", type=float, default=Config.rate, help="AdamW's learning rate (default: %(default)s)")
    parser.add_argument("--remat", action="store_true", help="keep only the inputs of layers, and recompute the rest")
    parser.add_argument("--dtype", type=dtype_of, help="dtype of gathers and compute, such as bfloat16")
    args = parser.parse_args()
    mesh, config = sf.make_mesh(device=args.device, **args.mesh), Config(rate=args.rate)
    module, tokenizer = described(args.folder, config.dtype) if args.folder else made(args.model, config.dtype)
    model, params = sharded(
        module, args.folder, mesh, args.strategy, args.seed, remat=args.remat, gather_dtype=args.dtype
    )
    run = train(model, params, tokenizer, config, mesh, corpus(), args.steps, args.seed, (sf.run.progress(),))
    interop.save_pretrained(args.out / "model", model, run.params, tokenizer=tokenizer)
    if mesh.get_rank() == 0:
        levels = {"held-out files, before": run.before, "held-out files, after": run.after}
        picture({"training batch": run.losses}, "nats per token", args.out / "loss.png", levels)
        print(f"held-out files: {run.before:.3f} nats per token before, {run.after:.3f} after")
        print(f"loss curve: {args.out / 'loss.png'}, model: {args.out / 'model'}\n")
        print(write(args.out / "model", "def main(", 200, args.seed))


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise argparse.ArgumentTypeError(f"{name} is not a floating-point dtype of torch")
    return found


if __name__ == "__main__":
    main()
