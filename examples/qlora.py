"""Fine-tunes a Llama of `transformers` with its base in four bits (QLoRA), sharded over a hybrid mesh.

    torchrun --standalone --nproc-per-node 2 -m examples.qlora
    torchrun --standalone --nproc-per-node 4 -m examples.qlora --base FOLDER --mesh replica=2,shard=2 --alone

First a small Llama is trained on the Python code of the standard library, with a token for each byte, and saved to
files; with `--base`, an existing folder is used instead. The matrices of its layers are quantised to NF4 as they are
read, so no rank ever holds more than its part of 0.52 bytes per number. On this frozen base, adapters are trained on
another language: the C++ headers that torch ships. Then base and adapters are merged into files for `from_pretrained`,
and the adapters are also saved in peft's format.

Every result is measured on held-out files, in bits per byte. For comparison, unless `--alone` is given, the same number
of steps is run on the same text without quantisation: once for adapters, and once for all parameters. Source: Dettmers
et al., QLoRA: Efficient Finetuning of Quantized LLMs (2023).
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
MATRICES = r"model\.layers\..*_proj\.weight"  # embedding, norms and head are not quantised

COLUMNS = ("", "C++", "Python", "kept MB", "sent MB")

Data = tuple[Tensor, Tensor]  # bytes, for training and held out
Model = Callable[..., Any]  # of tokens and labels, as transformers calls it


@dataclass(frozen=True)
class Config:
    """Settings of all training runs; the letters are used in the shapes below."""

    batch: int = 16  # texts per step, over all ranks: b = batch / (r s) on each
    context: int = 128  # n bytes per text
    rate: float = 1e-2  # AdamW's, for adapters,
    full_rate: float = 3e-3  # and for all parameters
    warmup: int = 20
    rank: int = 8  # of adapters
    alpha: float = 16  # adapters are multiplied by alpha / rank
    looks: int = 16  # batches of held-out text that are measured
    dtype: torch.dtype = torch.float32  # of parameters that are not in four bits


# --- texts, and their loss ---


def headers() -> Data:
    """The C++ headers of torch, without generated ones."""
    folder = Path(torch.__file__).parent / "include" / "torch"
    training, held_out = files(folder, "*.h", but=["generated"])
    if not training or not held_out:
        raise FileNotFoundError(f"there are no headers in {folder}, where the wheels of torch have them")
    return joined(training), joined(held_out)


class Batch(NamedTuple):
    inputs: dict[str, Tensor]  # tokens and labels, [b, t]
    size: int  # bytes


def tokenized(tokenizer: Any, rows: Tensor) -> Batch:
    """Texts of bytes `[b, n]`, each preceded by a start token, so that all of its bytes are predicted."""
    texts = [bytes(row.tolist()).decode(errors="ignore") for row in rows]
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = [torch.tensor([start, *one]) for one in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    tokens, labels = (pad_sequence(ids, batch_first=True, padding_value=value) for value in (0, IGNORED))
    inputs = {"input_ids": tokens.to(rows.device), "labels": labels.to(rows.device)}
    return Batch(inputs, sum(len(text.encode()) for text in texts))


def nats(model: Model, batch: Batch) -> Tensor:
    """Cross-entropy per byte over the texts of all ranks, from the model's own loss."""
    count = sf.psum(batch.size, DATA)
    return sf.psum(model(**batch.inputs, num_items_in_batch=count, use_cache=False).loss, DATA)


# --- training and measuring ---


@dataclass(frozen=True)
class Task:
    """What all training runs and measurements share."""

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
    state: int  # bytes of optimizer state on a rank
    sent: int  # bytes that a rank sends in a step


def trained(
    task: Task, model: Callable[[Params], Model], params: Params, text: Tensor, rate: float, steps: int
) -> Trained:
    """The result of training some parameters, from which `model` makes a model."""
    optimizer = adamw(rate, task.config.warmup, steps, decay=0.0, clip=1.0)

    def loss(params: Params, rows: Tensor) -> Tensor:
        return nats(model(params), tokenized(task.tokenizer, rows))

    params, _, log = fit(loss, params, task.mesh, optimizer, task.batches(text), steps, (sf.run.progress(),))
    return Trained(params, size(optimizer.init(params)), log.bytes(scheduled=True))


def bits(task: Task, model: Model, text: Tensor) -> float:
    """The bits per byte of a model on a text."""

    @sf.shard_map(mesh=task.mesh, in_specs=P(DATA), out_specs=P())
    def of(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return nats(model, tokenized(task.tokenizer, rows))

    some = islice(task.batches(text)(0), task.config.looks)
    return torch.stack([of(rows) for rows in some]).mean().item() / math.log(2)


class Row(NamedTuple):
    """The results of one model."""

    name: str
    cpp: float  # bits per byte of held-out files
    python: float
    kept: int = 0  # bytes of parameters and optimizer state on a rank, between training steps
    sent: int = 0  # bytes that a rank sends in a step


def row(task: Task, name: str, model: Model, kept: int = 0, sent: int = 0) -> Row:
    return Row(name, bits(task, model, task.cpp[1]), bits(task, model, task.python[1]), kept, sent)


def size(*trees: Params) -> int:
    """Bytes of this rank's part."""
    return sum(leaf.nbytes for leaf in optree.tree_leaves(trees) if isinstance(leaf, Tensor))


# --- the chain ---


def based(task: Task, folder: Path, steps: int, **sizes: int) -> None:
    """Trains a small Llama, and saves it in the format of `transformers`."""
    module, _ = made("llama", task.config.dtype, **sizes)
    model, params = sharded(module, None, task.mesh, task.strategy, task.seed)
    run = tuned(task, model, params, task.python[0], steps)
    interop.save_pretrained(folder, model, run.params, tokenizer=task.tokenizer)


def tuned(task: Task, model: interop.Functional, params: Params, text: Tensor, steps: int) -> Trained:
    """Trains all parameters of a model."""
    return trained(task, lambda params: functools.partial(model, params), params, text, task.config.full_rate, steps)


def adapted(task: Task, name: str, model: interop.Functional, params: Params) -> tuple[Params, Row]:
    """Trains adapters on C++ on a base; they are whole on every rank."""
    config = task.config
    adapters = lora.init(model, "all-linear", config.rank, alpha=config.alpha, seed=task.seed)
    adapters = sf.shard(adapters, task.mesh, sf.ddp(DATA))

    def on_base(adapters: Params) -> Model:
        return functools.partial(model, params, adapters=adapters)

    run = trained(task, on_base, adapters, task.cpp[0], config.rate, task.steps)
    kept = size(params, run.params) + run.state
    return run.params, row(task, name, on_base(run.params), kept, run.sent)


def quantised(task: Task, folder: Path) -> tuple[interop.Functional, Params]:
    """A model whose matrices are quantised to four bits as they are read."""
    model = interop.functional(described(folder, task.config.dtype)[0].eval())
    model.tree = quant.quantize(model.tree, FORMAT, names=MATRICES)  # which has no values yet
    return model, interop.load(folder, model, task.mesh, task.strategy)


def in_four_bits(task: Task, base: Path, out: Path) -> list[Row]:
    """Trains adapters on a base in four bits, and saves both merged."""
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
    """The base without quantisation: as it is, with adapters, and with all of its parameters trained."""
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
    parser.add_argument("--base", type=folder_of, help="a pretrained Llama (default: a small one is trained)")
    parser.add_argument("--base-steps", type=int, default=300, help="steps that train it (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=Config.rank, help="rank of the adapters (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=Config.rate, help="their learning rate (default: %(default)s)")
    parser.add_argument(
        "--full-rate", type=float, default=Config.full_rate, help="rate for all parameters (default: %(default)s)"
    )
    parser.add_argument("--alone", action="store_true", help="skip the comparisons with the unquantised base")
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
