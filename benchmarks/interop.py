"""An unchanged Hugging Face model: a training step next to hand-written functions and FSDP2, and loading its files.

    OMP_NUM_THREADS=1 python -m benchmarks.interop

Steps: a Llama with 32 million parameters in float32, 2 x 128 tokens and one thread per rank, 2 ranks, gloo, AdamW
(shardfn's own; torch's for FSDP2). `interop` is the module of `transformers` through `shardfn.interop.functional`;
`by hand` is the same computation written as functions of the same parameters; FSDP2 shards the same module. Every
system has its own processes. All are alive at once and take turns of a few steps; times are medians of all steps.

Loading: a folder of `save_pretrained` with 100 million parameters, on 4 ranks. `interop.load` is compared with
`from_pretrained` on rank 0 and FSDP2's broadcast of its state dict to the other ranks. Memory is the peak that the
operating system gave to any rank, counted from before the first parameter, above its shards, in units of the largest
stage.

For the steps, the malloc settings are those of `benchmarks.train_step`. For loading, malloc returns large blocks to the
system at once, so that the system's figure is the memory in use.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("USE_TORCHAO", "0")

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import KEEPS_MEMORY, RATE, timed
from shardfn import P, interop

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as _transformers

transformers: Any = _transformers

CONTEXT, ROWS = 128, 2
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 11, "vocab_size": 16384}
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
GIVES_BACK = KEEPS_MEMORY | {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
Step = Callable[[], Tensor]


def config(**sizes: int) -> Any:
    made = {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, **sizes,
    }  # fmt: skip
    return transformers.LlamaConfig(
        **made, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa", max_position_embeddings=256
    )


def filled(path: str, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.ones(like.shape) if "norm" in path else torch.randn(like.shape, generator=generator) * 0.02


def module(sizes: dict[str, int]) -> Any:
    with interop.meta():
        return transformers.LlamaForCausalLM(config(**sizes))


def tokens(vocabulary: int) -> Tensor:
    draw = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(vocabulary, (ROWS, CONTEXT + 1), generator=draw)


# --- steps ---


def stepping(params: Any, loss_fn: Callable[..., Tensor], mesh: Any, vocabulary: int) -> Step:
    optimizer, rows = so.adamw(RATE), tokens(vocabulary)
    state = optimizer.init(params)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P("data")), out_specs=(..., ..., ...))
    def trained(params: Any, state: Any, rows: Tensor) -> Any:
        loss, grads = sf.value_and_grad(loss_fn)(params, rows)
        return loss, *optimizer.step(params, grads, state)

    def step() -> Tensor:
        nonlocal params, state
        loss, params, state = trained(params, state, rows)
        return loss * mesh.size()

    return step


def by_interop(sizes: dict[str, int], **options: Any) -> Step:
    mesh = sf.make_mesh(data=-1, device="cpu")
    model = interop.functional(module(sizes), **options)
    params = sf.init_sharded(model.tree, 0, mesh, sf.full_shard("data"), fill=filled)

    def loss_fn(params: Any, rows: Tensor) -> Tensor:
        wanted = rows[:, 1:].contiguous()
        out = model(
            params, input_ids=rows[:, :-1], labels=wanted, shift_labels=wanted, num_items_in_batch=wanted.numel()
        )
        loss: Tensor = out.loss / mesh.size()
        return loss

    return stepping(params, loss_fn, mesh, config(**sizes).vocab_size)


def by_hand(sizes: dict[str, int]) -> Step:
    mesh, c = sf.make_mesh(data=-1, device="cpu"), config(**sizes)
    model = interop.functional(module(sizes), min_stage_params=0)
    params = sf.init_sharded(model.tree, 0, mesh, sf.full_shard("data"), fill=filled)
    width, size = c.hidden_size, c.hidden_size // c.num_attention_heads
    several = c.num_attention_heads // c.num_key_value_heads
    rates = 10000.0 ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(CONTEXT), rates).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (width,), weight, c.rms_norm_eps)

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def embed(p: Any, rows: Tensor) -> Tensor:
        return F.embedding(rows, p["weight"])

    def block(p: Any, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = norm(x, p["input_layernorm.weight"])
        q, k, v = (
            F.linear(h, p[f"self_attn.{n}_proj.weight"]).view(b, t, -1, size).transpose(1, 2) for n in ("q", "k", "v")
        )
        k, v = turned(k).repeat_interleave(several, 1), v.repeat_interleave(several, 1)
        mixed = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(b, t, width), p["self_attn.o_proj.weight"])
        h = norm(x, p["post_attention_layernorm.weight"])
        gated = F.silu(F.linear(h, p["mlp.gate_proj.weight"])) * F.linear(h, p["mlp.up_proj.weight"])
        return x + F.linear(gated, p["mlp.down_proj.weight"])

    def head(n: Any, p: Any, x: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(norm(x, n["weight"]), p["weight"]).flatten(0, 1), wanted.flatten())

    first, layer, last = sf.stage(embed), sf.stage(block), sf.stage(head)

    def loss_fn(params: Any, rows: Tensor) -> Tensor:
        blocks = [params[f"model.layers.{i}"] for i in range(c.num_hidden_layers)]
        embedding, *layers, ends = sf.layers(
            [params["model.embed_tokens"], *blocks, [params["model.norm"], params["lm_head"]]]
        )
        x = first(embedding, rows[:, :-1])
        for p in layers:
            x = layer(p, x)
        return last(ends[0], ends[1], x, rows[:, 1:]) / mesh.size()

    return stepping(params, loss_fn, mesh, c.vocab_size)


def sharded_module(sizes: dict[str, int]) -> Any:
    """The module under FSDP2, sharded layer by layer, without values."""
    model: Any = module(sizes)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    kind: Any = type(model.model.rotary_emb)
    model.model.rotary_emb = kind(model.config)
    return model


def fsdp2(sizes: dict[str, int]) -> Step:
    model = sharded_module(sizes)
    values: Any = _named(sf.init(interop.functional(module(sizes)).tree, 0, fill=filled))
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    return by_torch(model, adamw(model))


def adamw(model: Any) -> torch.optim.Optimizer:
    """Torch's AdamW for the trained parameters of a module."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, fused=True)


def by_torch(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    """A training step of a module with torch's optimizer."""
    rows = tokens(model.config.vocab_size)
    wanted = rows[:, 1:].contiguous()

    def step() -> Tensor:
        loss = model(input_ids=rows[:, :-1], labels=wanted, shift_labels=wanted).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found: Tensor = loss.detach()
        return found

    return step


def _named(tree: Any) -> dict[str, Tensor]:
    """The tree's tensors by the module's parameter names."""
    return {f"{path}.{name}" if path else name: x for path, part in tree.items() for name, x in part.items()}


def built(usage: Usage, make: Callable[..., Step], sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    step = make(sizes, **options)
    return {
        "train": functools.partial(timed, step),
        "peak": lambda: usage.peak() / 1e6,
        "again": lambda: usage.again() / 1e6,
    }


def compared(crews: dict[str, Crew], rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row for each system."""
    seconds: dict[str, list[float]] = {name: [] for name in crews}
    losses: dict[str, list[float]] = {name: [] for name in crews}
    for number in range(rounds + 1):
        for name, crew in crews.items():
            found = crew.turn("train", steps)
            if number:  # the first turn warms up
                seconds[name] += map(max, *(times for times, _ in found))
            else:
                crew.turn("again")
            losses[name] += [statistics.fmean(each) for each in zip(*(some for _, some in found), strict=True)]
    took = {name: statistics.median(each) * 1e3 for name, each in seconds.items()}
    peaks = {name: max(crew.turn("peak")) for name, crew in crews.items()}
    return [
        {
            "system": name,
            "step ms": took[name],
            "/ by hand": took[name] / took["by hand"],
            "/ FSDP2": took[name] / took["FSDP2"],
            "peak MB": peaks[name],
            "peak / FSDP2": peaks[name] / peaks["FSDP2"],
            "first loss": f"{losses[name][0]:.6f}",
            "fourth loss": f"{losses[name][3]:.6f}",
        }
        for name in crews
    ]


# --- loading ---


def written(folder: str, sizes: dict[str, int]) -> None:
    """Writes a folder with `save_pretrained` of `transformers`, in several files."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config(**sizes)).save_pretrained(folder, max_shard_size="100MB")


def loads_shardfn(sizes: dict[str, int], folder: str) -> Any:
    model = interop.functional(module(sizes), min_stage_params=0)
    return interop.load(folder, model, sf.make_mesh(data=-1, device="cpu"), sf.full_shard("data"))


def loads_fsdp2(sizes: dict[str, int], folder: str) -> Any:
    model = sharded_module(sizes)
    first = dist.get_rank() == 0
    whole = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict() if first else {}
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return [p.to_local() for p in model.parameters()]


def built_loader(
    usage: Usage, load: Callable[[dict[str, int], str], Any], sizes: dict[str, int], folder: str, small: str
) -> dict[str, Any]:
    load(TINY, small)  # memory of imports and caches at the first use does not count
    largest = max(sum(x.nbytes for x in optree.tree_leaves(part)) for part in _sizes_of(sizes))

    def loaded() -> tuple[float, float, float]:
        gc.collect()
        base = usage.again()
        dist.barrier()
        began = time.perf_counter()
        params = load(sizes, folder)
        dist.barrier()
        seconds = time.perf_counter() - began
        shards = sum(x.nbytes for x in optree.tree_leaves(params) if isinstance(x, Tensor))
        return seconds, usage.peak() + usage.base - base - shards, largest

    return {"load": loaded}


def _sizes_of(sizes: dict[str, int]) -> list[Any]:
    return list(interop.functional(module(sizes), min_stage_params=0).tree.values())


def loading(sizes: dict[str, int], small: dict[str, int], rounds: int) -> list[dict[str, Any]]:
    """A row for each system."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        written(f"{folder}/large", sizes)
        written(f"{folder}/small", small)
        crews = {
            name: stack.enter_context(
                Crew(4, built_loader, load, sizes, f"{folder}/large", f"{folder}/small", environment=GIVES_BACK)
            )
            for name, load in (("interop.load", loads_shardfn), ("from_pretrained + FSDP2's broadcast", loads_fsdp2))
        }
        found: dict[str, list[Any]] = {name: [] for name in crews}
        for _ in range(rounds):
            for name, crew in crews.items():
                found[name].append([max(each) for each in zip(*crew.turn("load"), strict=True)])
        for name, each in found.items():
            seconds, above, largest = (statistics.median(some) for some in zip(*each, strict=True))
            rows.append(
                {
                    "loading 100M parameters, 4 ranks": name,
                    "seconds": seconds,
                    "largest stage MB": largest / 1e6,
                    "peak above shards MB": above / 1e6,
                    "/ largest stage": above / largest,
                }
            )
    return rows


def loading_apart(tiny: bool) -> list[dict[str, Any]]:
    """The rows of `loading` from a separate program, since a program's processes share their malloc settings."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.interop", "--loading", file.name, *(["--tiny"] if tiny else [])]
        subprocess.run(command, check=True)
        rows: list[dict[str, Any]] = json.loads(Path(file.name).read_text())
    return rows


# --- the tables ---


def main() -> None:
    options = parser("A Hugging Face module next to hand-written functions and FSDP2: steps, memory, loading.")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--steps", type=int, default=3, help="steps per turn")
    options.add_argument("--tiny", action="store_true", help="tiny models, to try the command")
    options.add_argument("--loading", type=Path, metavar="FILE", help="measure only loading, and write its rows there")
    args = options.parse_args()
    if args.loading:
        found = loading(TINY if args.tiny else LARGE, TINY, 1 if args.tiny else 3)
        args.loading.write_text(json.dumps(found))
        return
    sizes = TINY if args.tiny else {}
    systems: dict[str, tuple[Callable[..., Step], dict[str, Any]]] = {
        "interop": (by_interop, {}),
        "by hand": (by_hand, {}),
        "FSDP2": (fsdp2, {}),
        "interop, remat": (by_interop, {"remat": True}),
    }
    with ExitStack() as stack:
        crews = {
            name: stack.enter_context(Crew(2, built, make, sizes, more, environment=KEEPS_MEMORY))
            for name, (make, more) in systems.items()
        }
        rows = compared(crews, args.rounds, args.steps)
    loads = loading_apart(args.tiny)
    ours = rows[0]
    first = [float(row["first loss"]) for row in rows]
    goals = [
        Goal("step / by hand", ours["/ by hand"], 1.03),
        Goal("step / FSDP2", ours["/ FSDP2"], 0.72),
        Goal("peak memory / FSDP2", ours["peak / FSDP2"], 0.55),
        Goal("first loss, relative difference between all", max(first) / min(first) - 1, 1e-5),
        Goal("loading: peak above shards / largest stage", loads[0]["/ largest stage"], 1.2),
        Goal("loading: time / from_pretrained + FSDP2's broadcast", loads[0]["seconds"] / loads[1]["seconds"], 1.0),
    ]
    publish("a Llama of transformers: one training step on 2 ranks; loading", [*rows, *loads], goals, args.json)


if __name__ == "__main__":
    main()
