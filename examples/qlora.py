"""Fine-tunes a Llama of `transformers` whose base is kept in four bits (QLoRA), sharded over a hybrid mesh.

    torchrun --standalone --nproc-per-node 2 -m examples.qlora
    torchrun --standalone --nproc-per-node 4 -m examples.qlora --base FOLDER --mesh replica=2,shard=2 --alone

A small Llama learns Python from the standard library, a token a byte, and goes into files; with `--base` it is one that
is in a folder already. The matrices of its layers are quantised to NF4 while they are read: no rank ever has more than
its part of 0.52 bytes a number. On this frozen base adapters learn another language, C++, from the headers that torch
ships. Then base and adapters are merged into files that `from_pretrained` reads, and the adapters go into peft's.

All is measured on files that nothing was trained on, in bits per byte. For comparison, unless `--alone` is given, come
as many steps on the same text without quantisation: of adapters, and of all parameters. Source: Dettmers et al., QLoRA:
Efficient Finetuning of Quantized LLMs (2023).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import shardfn as sf
from examples.finetune_hf import DATA, IGNORED, described, made, sharded
from examples.run import Params, adamw, corpus, files, fit, folder_of, hybrid_options, joined, stretches, table
from shardfn import P, interop, lora, quant

FORMAT = quant.nf4(double=True)
MATRICES = r"model\.layers\..*_proj\.weight"  # embedding, norms and head keep their bits

COLUMNS = ("", "C++", "Python", "kept MB", "sent MB")

Data = tuple[Tensor, Tensor]  # bytes, for training and held out
Model = Callable[..., Any]  # of tokens and labels, as transformers calls it


@dataclass(frozen=True)
class Config:
    """Of all training runs; the letters are those of the shapes below."""

    batch: int = 16  # texts a step, over all ranks: b = batch / (r s) on each
    context: int = 128  # n bytes of a text
    rate: float = 1e-2  # of AdamW, for adapters,
    full_rate: float = 3e-3  # and for all parameters
    warmup: int = 20
    rank: int = 8  # of adapters
    alpha: float = 16  # over the rank, what they are multiplied by
    looks: int = 16  # batches of held-out text that are measured
    dtype: torch.dtype = torch.float32  # of what is not in four bits


# --- texts, and their loss ---


def headers() -> Data:
    """The C++ headers of torch, without those that are generated."""
    folder = Path(torch.__file__).parent / "include" / "torch"
    training, held_out = files(folder, "*.h", but=["generated"])
    if not training or not held_out:
        raise FileNotFoundError(f"there are no headers in {folder}, where the wheels of torch have them")
    return joined(training), joined(held_out)


class Batch(NamedTuple):
    inputs: dict[str, Tensor]  # tokens and labels, [b, t]
    size: int  # bytes


def tokenized(tokenizer: Any, rows: Tensor) -> Batch:
    """Texts of bytes `[b, n]`, each after a token for the start, so that all of its bytes are predicted."""
    texts = [bytes(row.tolist()).decode(errors="ignore") for row in rows]
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = [torch.tensor([start, *one]) for one in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    tokens, labels = (pad_sequence(ids, batch_first=True, padding_value=value) for value in (0, IGNORED))
    inputs = {"input_ids": tokens.to(rows.device), "labels": labels.to(rows.device)}
    return Batch(inputs, sum(len(text.encode()) for text in texts))


def nats(model: Model, batch: Batch) -> Tensor:
    """Cross-entropy for a byte of the texts of all ranks, by the model's own loss."""
    count = sf.psum(batch.size, DATA)
    return sf.psum(model(**batch.inputs, num_items_in_batch=count, use_cache=False).loss, DATA)


# --- training and measuring ---


@dataclass(frozen=True)
class Task:
    """What all training runs and measurements have in common."""

    config: Config
    mesh: DeviceMesh
    strategy: sf.Strategy  # of the base
    tokenizer: Any
    python: Data
    cpp: Data
    steps: int
    seed: int

    def batches(self, text: Tensor) -> sf.run.Batches:
        """This rank's texts, as bytes `[b, n]`."""
        return sf.run.batches(stretches(text, self.config.context), self.mesh, DATA, self.config.batch, self.seed)


class Trained(NamedTuple):
    params: Params
    state: int  # bytes of the optimizer's on a rank
    sent: int  # bytes by a rank in a step


def trained(
    task: Task, model: Callable[[Params], Model], params: Params, text: Tensor, rate: float, steps: int
) -> Trained:
    """What becomes of some parameters, of which `model` makes a model."""
    optimizer = adamw(rate, task.config.warmup, steps, decay=0.0, clip=1.0)

    def loss(params: Params, rows: Tensor) -> Tensor:
        return nats(model(params), tokenized(task.tokenizer, rows))

    params, _, log = fit(loss, params, task.mesh, optimizer, task.batches(text), steps, (sf.run.progress(),))
    return Trained(params, size(optimizer.init(params)), log.bytes(scheduled=True))


def bits(task: Task, model: Model, text: Tensor) -> float:
    """What a model takes for a byte of a text."""

    @sf.shard_map(mesh=task.mesh, in_specs=P(DATA), out_specs=P())
    def of(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return nats(model, tokenized(task.tokenizer, rows))

    some = islice(task.batches(text)(0), task.config.looks)
    return torch.stack([of(rows) for rows in some]).mean().item() / math.log(2)


class Row(NamedTuple):
    """What came of one model."""

    name: str
    cpp: float  # bits per byte of held-out files
    python: float
    kept: int = 0  # bytes of a rank between steps of training: parameters and optimizer state
    sent: int = 0  # bytes by a rank in a step


def row(task: Task, name: str, model: Model, kept: int = 0, sent: int = 0) -> Row:
    return Row(name, bits(task, model, task.cpp[1]), bits(task, model, task.python[1]), kept, sent)


def size(*trees: Params) -> int:
    """Bytes of this rank's part."""
    return sum(leaf.nbytes for leaf in optree.tree_leaves(trees) if isinstance(leaf, Tensor))


# --- the chain ---


def based(task: Task, folder: Path, steps: int, **sizes: int) -> None:
    """Trains a small Llama, and writes it as `transformers` does."""
    module, _ = made("llama", task.config.dtype, **sizes)
    model, params = sharded(module, None, task.mesh, task.strategy, task.seed)
    run = tuned(task, model, params, task.python[0], steps)
    interop.save_pretrained(folder, model, run.params, tokenizer=task.tokenizer)


def tuned(task: Task, model: interop.Functional, params: Params, text: Tensor, steps: int) -> Trained:
    """All parameters of a model, trained."""
    return trained(task, lambda params: functools.partial(model, params), params, text, task.config.full_rate, steps)


def adapted(task: Task, name: str, model: interop.Functional, params: Params) -> tuple[Params, Row]:
    """Adapters that learnt C++ on a base, whole on every rank."""
    config = task.config
    adapters = lora.init(model, "all-linear", config.rank, alpha=config.alpha, seed=task.seed)
    adapters = sf.shard(adapters, task.mesh, sf.ddp(DATA))

    def on_base(adapters: Params) -> Model:
        return functools.partial(model, params, adapters=adapters)

    run = trained(task, on_base, adapters, task.cpp[0], config.rate, task.steps)
    kept = size(params, run.params) + run.state
    return run.params, row(task, name, on_base(run.params), kept, run.sent)


def quantised(task: Task, folder: Path) -> tuple[interop.Functional, Params]:
    """A model whose matrices are in four bits, each as soon as it is read."""
    model = interop.functional(described(folder, task.config.dtype)[0].eval())
    model.tree = quant.quantize(model.tree, FORMAT, names=MATRICES)  # which has no values yet
    return model, interop.load(folder, model, task.mesh, task.strategy)


def in_four_bits(task: Task, base: Path, out: Path) -> list[Row]:
    """Adapters on a base in four bits, and both together in files."""
    model, params = quantised(task, base)
    before = row(task, "base in 4 bits", functools.partial(model, params))
    adapters, after = adapted(task, "adapters on 4 bits", model, params)
    lora.save_pretrained(out / "adapter", model, adapters)
    merged = lora.merge(params, adapters, model)
    interop.save_pretrained(out / "merged", model, merged, tokenizer=task.tokenizer)
    theirs: Any = AutoModelForCausalLM.from_pretrained(out / "merged")
    alone = row(task, "merged, by transformers", theirs.to(task.mesh.device_type))
    if abs(alone.cpp - after.cpp) > 1e-3:
        raise ValueError(f"{out / 'merged'} takes {alone.cpp:.4f} bits per byte, and what was merged {after.cpp:.4f}")
    return [before, after, alone]


def in_all_bits(task: Task, base: Path) -> list[Row]:
    """The same base as it is, adapters on it, and all of its parameters trained on."""
    model, params = sharded(described(base, task.config.dtype)[0], base, task.mesh, task.strategy)
    before = row(task, "base", functools.partial(model, params))
    _, after = adapted(task, "adapters on all bits", model, params)
    run = tuned(task, model, params, task.cpp[0], task.steps)
    kept = size(run.params) + run.state
    return [before, after, row(task, "all parameters", functools.partial(model, run.params), kept, run.sent)]


def show(rows: list[Row]) -> None:
    cells = [
        (one.name, f"{one.cpp:.3f}", f"{one.python:.3f}", *(f"{n / 1e6:.2f}" if n else "" for n in one[3:]))
        for one in rows
    ]
    table("bits per byte of held-out files; what a rank keeps between steps, and sends in one", COLUMNS, cells)


def main() -> None:
    parser = hybrid_options("Fine-tune a Llama whose base is kept in four bits.", DATA, "runs/qlora", steps=100)
    parser.add_argument("--base", type=folder_of, help="of a pretrained Llama (default: a small one is trained)")
    parser.add_argument("--base-steps", type=int, default=300, help="that train it (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=Config.rank, help="of the adapters (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=Config.rate, help="of AdamW, for them (default: %(default)s)")
    parser.add_argument(
        "--full-rate", type=float, default=Config.full_rate, help="for all parameters (default: %(default)s)"
    )
    parser.add_argument("--alone", action="store_true", help="compare with nothing that needs the base in all bits")
    args = parser.parse_args()
    config = Config(rate=args.rate, full_rate=args.full_rate, rank=args.rank)
    mesh, base = sf.make_mesh(device=args.device, **args.mesh), args.base or args.out / "base"
    tokenizer = (described(base, config.dtype) if args.base else made("llama", config.dtype))[1]
    python, cpp = ((a.to(mesh.device_type), b.to(mesh.device_type)) for a, b in (corpus(), headers()))
    task = Task(config, mesh, args.strategy, tokenizer, python, cpp, args.steps, args.seed)
    if not args.base:
        based(task, base, args.base_steps)
    rows = in_four_bits(task, base, args.out)
    if not args.alone:
        whole, *others = in_all_bits(task, base)
        rows = [whole, *rows, *others]
    if mesh.get_rank() == 0:
        show(rows)
        print(f"files: {base}, {args.out / 'adapter'} (of peft), {args.out / 'merged'}")


if __name__ == "__main__":
    main()
