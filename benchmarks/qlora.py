"""A QLoRA step compared with FSDP2 + bitsandbytes + peft: memory, bytes gathered, and time.

    OMP_NUM_THREADS=1 python -m benchmarks.bits --only memory

A Llama with 100 million parameters: the layers' matrices are in NF4 with double quantization, with adapters of rank 16
on all of them; the rest is in float32. AdamW, 2 ranks, gloo, 2 x 128 tokens and one thread per rank; layers are
recomputed in backward. The peer is the recipe of fsdp_qlora, with FSDP2: bitsandbytes' `Linear4bit` with float storage,
which FSDP can shard, peft's adapters, and `fully_shard` for each layer and for the rest. A variant shards the embedding
and the head separately. Both systems start from the same values. Every system has its own processes; all are alive at
once and take turns.

`peak` is the peak memory that the operating system gave to a rank in a step, above its memory before the model was
built, while glibc's malloc keeps freed memory, as in `benchmarks.train_step`. `in use` is the same in processes whose
malloc returns all except the smallest blocks at once. `kept` is the bytes of tensors that stay between steps.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage, in_turns
from benchmarks.interop import LARGE, adamw, by_torch, config, filled, module, tokens
from benchmarks.report import Goal
from benchmarks.train_step import KEEPS_MEMORY, RATE, timed
from shardfn import P, interop, lora, quant
from shardfn.quant import bitsandbytes as few_bits

FORMAT = quant.nf4(double=True)
RANKS, RANK, ALPHA = 2, 16, 32
BASE = r"model\.layers\.\d+\..*_proj\.weight"
GIVES_BACK = KEEPS_MEMORY | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
Told = dict[str, Callable[..., Any]]


# --- the systems: functions that train one step, and that return the bytes kept ---


def by_shardfn(sizes: dict[str, int], place: Callable[[str], sf.Placement]) -> Told:
    mesh = sf.make_mesh(data=-1, device="cpu")
    model = interop.functional(module(sizes), remat=True, min_stage_params=1024)
    tree = quant.quantize(model.tree, FORMAT, BASE)
    params = sf.init_sharded(tree, 0, mesh, sf.full_shard("data"), fill=filled)
    whole = lora.init(model, "all-linear", rank=RANK, alpha=ALPHA, dropout=0.0, seed=0)
    adapters = sf.shard(whole, mesh, place("data"))
    optimizer, rows = so.adamw(RATE), tokens(config(**sizes).vocab_size)
    state = optimizer.init(adapters)

    def loss_fn(adapters: Any, params: Any, rows: Tensor) -> Tensor:
        wanted = rows[:, 1:].contiguous()
        out = model(
            params, adapters=adapters, input_ids=rows[:, :-1], labels=wanted, shift_labels=wanted,
            num_items_in_batch=wanted.numel(),
        )  # fmt: skip
        loss: Tensor = out.loss / mesh.size()
        return loss

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., ..., P("data")), out_specs=(..., ..., ...))
    def trained(adapters: Any, state: Any, params: Any, rows: Tensor) -> Any:
        loss, grads = sf.value_and_grad(loss_fn)(adapters, params, rows)
        return loss, *optimizer.step(adapters, grads, state)

    def step() -> Tensor:
        nonlocal adapters, state
        loss, adapters, state = trained(adapters, state, params, rows)
        return loss * mesh.size()

    def gathered() -> tuple[int, int]:
        with sf.collectives.ledger() as log:
            step()
        return log.bytes(op="all_gather"), expected(tree, whole if place is sf.full_shard else {}, mesh.size())

    return {"step": step, "kept": lambda: nbytes((params, adapters, state)), "gathered": gathered}


def by_fsdp2(sizes: dict[str, int], apart: bool) -> Told:
    model, states = in_four_bits(sizes)
    peft = importlib.import_module("peft")
    found = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0)
    model = peft.get_peft_model(model, found).base_model.model
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    for end in (model.model.embed_tokens, model.lm_head) if apart else ():
        fully_shard(end)
    fully_shard(model)
    model.train()
    optimizer = adamw(model)

    def kept() -> int:
        moments = [x for state in optimizer.state.values() for x in state.values()]
        tensors = [*model.parameters(), *states, *moments]
        return sum(getattr(x, "to_local", lambda x=x: x)().nbytes for x in tensors)

    return {"step": by_torch(model, optimizer), "kept": kept, "gathered": lambda: (0, 0)}


def in_four_bits(sizes: dict[str, int]) -> tuple[Any, list[Tensor]]:
    """The module, with bitsandbytes' linear layers instead of its own; and the scales, which are not sharded."""
    bnb = importlib.import_module("bitsandbytes")
    model, states = module(sizes), []
    for path, p in list(model.named_parameters()):
        holder, _, name = path.rpartition(".")
        x = sf.init({path: p.detach()}, 0, fill=filled)[path]
        if not path.endswith("_proj.weight"):
            setattr(model.get_submodule(holder), name, nn.Parameter(x, requires_grad=False))
            continue
        few = bnb.nn.Linear4bit(
            *reversed(x.shape), bias=False, compute_dtype=torch.float32, quant_type="nf4",
            quant_storage=torch.float32, device="meta",
        )  # fmt: skip
        words = few_bits.file_tensors(path, quant.pack(x, FORMAT))
        codes = words.pop(path)  # FSDP can shard them if they are stored as floats
        few.weight = bnb.nn.Params4bit.from_prequantized(
            codes.view(-1).view(torch.float32).view(-1, 1), {k.removeprefix(path + "."): v for k, v in words.items()},
            requires_grad=False, device="cpu", module=few,
        )  # fmt: skip
        state = few.quant_state
        states += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        parent, _, last = holder.rpartition(".")
        setattr(model.get_submodule(parent), last, few)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.is_loaded_in_4bit = True  # for peft
    return model, states


# --- what a step gathers ---


def expected(tree: Any, adapters: Any, ranks: int) -> int:
    """Bytes that a rank sends: forward gathers every stage; backward gathers the layers again, except for the last.

    The parameters of one dtype are aligned to 64 bytes in one buffer, which has 64 bytes more at its end. It is sharded
    into pieces whose sizes are multiples of 64, and each rank sends its piece to the others.
    """

    def stage(part: Any) -> int:
        sizes: dict[torch.dtype, list[int]] = {}
        for x in optree.tree_leaves(part, is_leaf=lambda x: isinstance(x, quant.Packed)):
            few = isinstance(x, quant.Packed)
            kept = x.format.nbytes(x.numel) if few else x.numel() * x.itemsize
            sizes.setdefault(torch.uint8 if few else x.dtype, []).append(kept)
        wholes = [sum(-(-n // 64) * 64 for n in each[:-1]) + each[-1] + 64 for each in sizes.values()]
        return sum(-(-whole // (64 * ranks)) * 64 for whole in wholes) * (ranks - 1)

    layers = [name for name in tree if ".layers." in name]
    own = {name: stage(tree[name]) for name in tree}
    beside = {name: stage(adapters[name]) for name in layers if name in adapters}
    both = {name: own.get(name, 0) + beside.get(name, 0) for name in tree}
    return sum(both.values()) + sum(both[name] for name in layers[:-1])


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in optree.tree_leaves(tree) if isinstance(x, Tensor))


# --- on each rank ---


def built(usage: Usage, make: Callable[..., Told], sizes: dict[str, int], *rest: Any) -> Told:
    make(TINY, *rest)["step"]()  # memory of imports and caches at the first use does not count
    gc.collect()
    usage.base = usage.again()
    told = make(sizes, *rest)
    gc.collect()
    usage.again()
    return {
        "train": functools.partial(timed, told["step"]),
        "peak": lambda: usage.peak() / 1e6,
        "kept": lambda: told["kept"]() / 1e6,
        "gathered": told["gathered"],
    }


SYSTEMS: dict[str, tuple[Any, ...]] = {
    "shardfn": (by_shardfn, sf.full_shard),
    "shardfn, adapters whole": (by_shardfn, sf.ddp),
    "FSDP2 + bitsandbytes + peft": (by_fsdp2, False),
    "the same, ends apart": (by_fsdp2, True),
}
OURS, PEER = "shardfn", "FSDP2 + bitsandbytes + peft"


def rows_of(sizes: dict[str, int], rounds: int, steps: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        crews = {
            name: stack.enter_context(Crew(RANKS, built, make, sizes, *rest, environment=environment))
            for name, (make, *rest) in SYSTEMS.items()
        }
        took, losses = in_turns(
            {name: functools.partial(crew.turn, "train", steps) for name, crew in crews.items()}, rounds
        )
        gathered = {name: crew.turn("gathered")[0] for name, crew in crews.items()}
        return [
            {
                "system": name,
                "step ms": took[name],
                "peak MB": max(crew.turn("peak")),
                "kept MB": max(crew.turn("kept")),
                "gathered": gathered[name][0],
                "by the formula": gathered[name][1],
                "losses": losses[name],
            }
            for name, crew in crews.items()
        ]


# --- the table ---


def apart(environment: str, tiny: bool, rounds: int) -> list[dict[str, Any]]:
    """The rows from a separate program, since a program's processes share their malloc settings."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        more = ["--rounds", str(rounds), *(["--tiny"] if tiny else [])]
        subprocess.run([sys.executable, "-m", "benchmarks.qlora", environment, file.name, *more], check=True)
        rows: list[dict[str, Any]] = json.loads(Path(file.name).read_text())
    return rows


def memory(tiny: bool, rounds: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """A row for each system, and the goals."""
    rows, used = apart("keeps", tiny, rounds), apart("gives-back", tiny, 1)
    for row, other in zip(rows, used, strict=True):
        row["in use MB"] = other["peak MB"]
    by_name = {row["system"]: row for row in rows}
    ours, peer = by_name[OURS], by_name[PEER]
    first = [row["losses"][0] for row in rows]
    off = max(abs(row["gathered"] - row["by the formula"]) for row in rows)
    goals = [
        Goal("QLoRA: peak memory / FSDP2 + bitsandbytes + peft", ours["peak MB"] / peer["peak MB"], 0.6),
        Goal("QLoRA: memory in use / FSDP2 + bitsandbytes + peft", ours["in use MB"] / peer["in use MB"], 0.6),
        Goal("QLoRA: bytes gathered, off the formula", off, 0),
        Goal("QLoRA: first loss, relative difference between all", max(first) / min(first) - 1, 1e-5),
    ]  # fmt: skip
    told = [
        {
            "QLoRA, 2 ranks": name,
            "step ms": row["step ms"],
            "/ peer": row["step ms"] / peer["step ms"],
            "peak MB": row["peak MB"],
            "peak / peer": row["peak MB"] / peer["peak MB"],
            "in use MB": row["in use MB"],
            "in use / peer": row["in use MB"] / peer["in use MB"],
            "kept MB": row["kept MB"],
            "gathers": f"{row['gathered']:,}" if row["gathered"] else "",
            "first loss": f"{row['losses'][0]:.6f}",
        }
        for name, row in by_name.items()
    ]
    return told, goals


def main() -> None:
    options = argparse.ArgumentParser(description="Writes the rows of benchmarks.bits --only memory.")
    options.add_argument("malloc", choices=("keeps", "gives-back"))
    options.add_argument("file", type=Path)
    options.add_argument("--rounds", type=int, required=True)
    options.add_argument("--tiny", action="store_true")
    args = options.parse_args()
    environment = KEEPS_MEMORY if args.malloc == "keeps" else GIVES_BACK
    found = rows_of(TINY if args.tiny else LARGE, args.rounds, 2, environment)
    args.file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
