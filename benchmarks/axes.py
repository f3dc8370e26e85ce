"""Models of transformers on tensor and context axes, and what masked attention over a context axis computes and sends.

    python -m benchmarks.axes

The first table says for each model whether its layers are sharded over a tensor axis by the table that its class ships,
and whether its rows are sharded over a context axis; or why not. Each context cell is a call on 4 ranks.

The second has the operations of attention, forward and backward, counted on each of 4 ranks, as those that run: the
busiest rank's compared with the mean, and all compared with full attention without a mask. The third compares the bytes
that the ledger counts with formulas: around a ring, keys and values travel `c - 1` steps, twice, and their gradients
`c`; a window leaves `ceil((w - 1) / n)` of `c - 1` steps in order, and twice that for balanced pieces of `n / 2`, and
one step home; exchanging heads sends `(c - 1) / c` of queries, keys, values and results, twice.

The last one has a training step of a Llama on a packed row of 32,768 tokens over 4 ranks: the peak that each rank's
plan says, and the most that tensors hold where the step runs on a simulated device, where blocks that documents hide
are left out (`benchmarks.packed`).
"""

from __future__ import annotations

import functools
import logging
import math
import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from benchmarks import packed
from benchmarks.report import Goal, parser, publish
from shardfn import interop, parallel
from shardfn.testing import World

RANKS, LENGTH, HEADS, GROUPS, WIDTH = 4, 8192, 4, 2, 16
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "head_dim": 8}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
IMAGES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8,
          "patch_size": 4}  # fmt: skip
SPEECH = {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
          "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("Llama", "ForCausalLM", TEXT),
    "Mistral": ("Mistral", "ForCausalLM", {**TEXT, "sliding_window": 5}),
    "Qwen3": ("Qwen3", "ForCausalLM", {**TEXT, "head_dim": 8}),
    "Gemma 3": ("Gemma3Text", "", {**TEXT, **SLIDING}),
    "gpt-oss": ("GptOss", "ForCausalLM", {**TEXT, **SLIDING, "num_local_experts": 4}),
    "DeepSeek-V3": ("DeepseekV3", "ForCausalLM", {**TEXT, **LATENT}),
    "BERT": (
        "Bert", "ForMaskedLM", {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ),
    "ViT": ("ViT", "ForImageClassification", IMAGES),
    "Whisper": ("Whisper", "ForConditionalGeneration", SPEECH),
}  # fmt: skip
WAYS: dict[str, Any] = {
    "ring": functools.partial(parallel.ring_attention, balanced=True),
    "ring in order": parallel.ring_attention,
    "ulysses": parallel.ulysses_attention,
}
ROW = (2148, 8192, 12288, 10140)  # tokens of its documents, which end inside of blocks


def module_of(name: str) -> Any:
    import transformers

    kind, head, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    made = getattr(transformers, f"{kind}{head}") if head else transformers.AutoModelForCausalLM.from_config
    module = made(config)
    with torch.no_grad():
        for p in module.parameters():  # ranks are threads, which share torch's random numbers
            p.copy_(torch.arange(p.numel()).cos().view_as(p) / 10)
    return module


def reason(error: Exception) -> str:
    """The clause of a message that says why."""
    said = str(error)
    why = said.partition("got 'context': ")[2] or said.partition(", but ")[2] or said
    return f"refused: {re.split(r'[,:]|[.] ', why)[0]}"


def by_tensor(name: str) -> str:
    try:
        interop.functional(module_of(name), tensor="auto", min_stage_params=512)
    except (TypeError, ValueError) as error:
        return reason(error)
    return "table"


def by_context(name: str) -> str:
    """What a call on this rank's piece says."""
    mesh = sf.make_mesh(context=-1, device="cpu")
    try:
        model = interop.functional(module_of(name), context="context", min_stage_params=512)
        params = model.shard(mesh, sf.full_shard("context"))

        def call(params: Any, tokens: Tensor) -> Tensor:
            return model(params, **model.cut({"input_ids": tokens})[0]).logits

        with torch.no_grad():
            sf.shard_map(call, mesh=mesh, in_specs=..., out_specs=..., check=False)(params, torch.ones(1, 16).long())
    except (TypeError, ValueError) as error:
        return reason(error)
    return "table"


class Operations(TorchDispatchMode):
    """Counts multiplications of products of matrices and of attention, of which a causal one has half."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, sizes = str(func), [x.shape for x in args if isinstance(x, Tensor)]
        if name.startswith("aten.bmm"):
            self.count += sizes[0].numel() * sizes[1][-1]
        elif "flash_attention_for_cpu" in name:
            backward = "backward" in name
            q, k = sizes[backward : backward + 2]
            causal = args[7] if backward else args[4] if len(args) > 4 else False
            products = 5 if backward else 2
            self.count += products * q.numel() * k[2] * (0.5 if causal else 1)
        return func(*args, **(kwargs or {}))


def masks() -> dict[str, parallel.Mask]:
    lengths = torch.tensor([LENGTH // 8] * 2 + [LENGTH // 2] + [LENGTH // 16] * 4)
    documents = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    padding = torch.arange(LENGTH)[None] < LENGTH // 8
    return {
        "causal": parallel.Mask(),
        "window": parallel.Mask(window=LENGTH // 16),
        "documents": parallel.Mask(documents=documents),
        "left padding": parallel.Mask(padding=padding),
        "full": parallel.Mask(causal=False),
    }


def attended() -> dict[tuple[str, str], tuple[float, float]]:
    """For each mask and way: this rank's operations, and the bytes that it sends."""
    mesh, found = sf.make_mesh(context=-1, device="cpu"), {}
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, LENGTH // RANKS, WIDTH, generator=draw) for n in (HEADS, GROUPS, GROUPS))
    for name, mask in masks().items():
        for way, attend in WAYS.items():
            if way == "ring in order" and name != "window":
                continue

            def loss(*xs: Tensor, attend: Any = attend, mask: Any = mask) -> Tensor:
                return attend(*xs, "context", mask=mask).sum()

            run = sf.shard_map(sf.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=..., out_specs=..., check=False)
            with Operations() as operations, sf.collectives.ledger() as log:
                run(q, k, v)
            op = "all_to_all" if way == "ulysses" else "ppermute"
            found[name, way] = operations.count, float(log.bytes(op=op))
    return found


def sent_by_formula(way: str, window: int | None = None) -> float:
    """Bytes that a rank sends."""
    query, key = (4 * n * LENGTH // RANKS * WIDTH for n in (HEADS, max(GROUPS, RANKS if way == "ulysses" else 0)))
    if way == "ulysses":
        return 2 * (2 * query + 2 * key) * (RANKS - 1) / RANKS
    pieces = 2 if way == "ring" else 1
    reached = RANKS if window is None else math.ceil((window - 1) / (LENGTH // RANKS // pieces))
    steps = min(RANKS - 1, pieces * reached)
    return 2 * key * (2 * steps + (steps + 1 if steps else 0))


def main() -> None:
    args = parser("Models on tensor and context axes, and what masked attention computes and sends.").parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows, goals = [], []
    for name in MODELS:
        tensor = by_tensor(name)  # first, as ranks in threads cannot import transformers at once
        (context,) = set(World(RANKS, kind="threads", deadline=100).run(by_context, name))
        rows.append({"model": name, "tensor": tensor, "context": context})
    found = World(RANKS, kind="threads", deadline=300).run(attended)
    dense = 7 * HEADS * LENGTH**2 * WIDTH
    for name, way in found[0]:
        counts = [of_rank[name, way][0] for of_rank in found]
        busiest, share = max(counts) * RANKS / sum(counts), sum(counts) / dense
        rows.append({"mask": name, "way": way, "busiest rank": busiest, "of full attention": share})
        if name in ("causal", "window", "full") or way == "ulysses":
            goals.append(Goal(f"{name}, {way}: operations of the busiest rank, compared with the mean", busiest, 1.1))
        if name == "window":
            goals.append(Goal(f"{name}, {way}: operations, compared with full attention", share, 0.2))
    cases = ("causal", "ring"), ("causal", "ulysses"), ("window", "ring"), ("window", "ring in order")
    for name, way in cases:
        sent, formula = found[0][name, way][1], sent_by_formula(way, masks()[name].window)
        rows.append({"mask": name, "way": way, "MB": sent / 1e6, "formula's": formula / 1e6})
        label = way if name == "causal" else f"{name}, {way}"
        goals.append(Goal(f"{label}: bytes of attention, off the formula", abs(sent - formula), 0))
    saved = found[0]["window", "ring in order"][1] / found[0]["causal", "ring"][1]
    goals.append(Goal("window, ring in order: bytes, compared with a ring without a window", saved, 0.4))
    row = packed.Row(ROW, RANKS)
    plans, most = packed.of_each(packed.planned, row), packed.of_each(packed.held, row)
    rows += [
        {"rank": rank, "planned peak, MB": plan.peak / 1e6, "held, MB": held[0] / 1e6, "plan, s": plan.seconds}
        for rank, (plan, held) in enumerate(zip(plans, most, strict=True))
    ]
    off = max(abs(plan.peak - held[0]) for plan, held in zip(plans, most, strict=True))
    goals.append(Goal("packed row of 32k on 4 ranks: planned peak, off what was held, bytes", off, 0))
    goals.append(
        Goal("packed row of 32k on 4 ranks: seconds for a plan", max(plan.seconds for plan in plans), 30, tolerance=1.0)
    )
    exact = ("Llama", "Mistral", "Qwen3", "Gemma 3", "gpt-oss", "DeepSeek-V3", "BERT")
    cells = {row["model"]: row["context"] for row in rows if "model" in row}
    goals.append(Goal("models on a context axis", sum(cells[name] == "table" for name in exact), 7, "at least"))
    publish(f"models of transformers on axes; attention to {LENGTH} positions on {RANKS} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
