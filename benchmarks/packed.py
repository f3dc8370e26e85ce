"""A training step of an unmodified Llama on packed rows over a context axis: planned, and held where it runs."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.held import Tracker, cudas_attention
from benchmarks.plan_trackers import uncollected
from shardfn import interop
from shardfn.compat import attention, devices
from shardfn.testing import World, simulated

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "attention_dropout": 0.0,
}  # fmt: skip


class Row(NamedTuple):
    """A row of documents over some ranks: the numbers of their tokens, and options of the model."""

    lengths: tuple[int, ...]
    ranks: int
    options: dict[str, Any] = {"remat": True}  # noqa: RUF012


class Planned(NamedTuple):
    """What a plan says of a step, in bytes, and the seconds that it took."""

    peak: int
    allocator: int
    flops: int
    moved: int
    launches: int
    seconds: float


def training(row: Row, device: str | None) -> tuple[Any, tuple[Any, ...]]:
    """A training step and its arguments; documents are on the host."""
    import transformers

    length = sum(row.lengths)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=length)
    mesh = sf.make_mesh(context=row.ranks, device=device)
    with torch.device("cpu"):
        module = transformers.LlamaForCausalLM(config)
        ids = torch.arange(len(row.lengths))
        documents = ids.repeat_interleave(torch.tensor(row.lengths))[None]
    tokens = torch.ones(1, length, dtype=torch.int64, device=mesh.device_type)
    model = interop.functional(module, context="context", min_stage_params=256, **row.options)
    params, opt = model.shard(mesh, sf.full_shard("context")), so.adamw(1e-3)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
    def step(params: Any, state: Any, tokens: Tensor, documents: Tensor) -> Any:
        several = {} if len(row.lengths) == 1 else {"documents": documents}
        inputs, labels = model.cut({"input_ids": tokens, **several})
        count = sf.psum((labels != -100).sum(), "context")

        def loss(params: Any) -> Tensor:
            logits = model(params, **inputs).logits.flatten(0, 1)
            total = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
            return sf.psum(total, "context") / count

        value, grads = sf.value_and_grad(loss)(params)
        return *opt.step(params, grads, state), value

    return step, (params, opt.init(params), tokens, documents)


def planned(row: Row, rank: int) -> Planned:
    began = time.perf_counter()
    with sf.debug(memory=False), sf.plan.mode(row.ranks, rank):
        step, args = training(row, None)
        plan = sf.plan.step(step, *args)
    moved, launches = (sum(getattr(work, name) for work in plan.works) for name in ("moved", "launches"))
    return Planned(plan.peak.total, plan.allocator, plan.flops(), moved, launches, time.perf_counter() - began)


def held(row: Row, rank: int, store: str | None = None) -> tuple[int, int, list[Any]]:
    """The most bytes on the device in a second step, as they are and in whole 512, and the host's waits.

    Documents have their numbers. Other tensors have theirs only with a store, through which the ranks meet.
    """
    torch.set_num_threads(1)
    met = None if store is None else dist.FileStore(store, row.ranks)  # type: ignore[attr-defined]
    kernels = attention.pretending if met is None else cudas_attention
    device = simulated(row.ranks, rank, store=met, races=False)
    with sf.debug(memory=False), device as one, kernels(one.name), Tracker(one.name) as tracker:
        step, args = training(row, one.name)
        step(*args)
        with uncollected():
            tracker.look(())
            tracker.most = tracker.rounded = 0
            one.reset_counts()
            step(*args)
            waits = one.synchronizations
    return tracker.most, tracker.rounded, waits


def alone(function: Any, *args: Any) -> Any:
    with World(1, kind="alone", deadline=300) as world:
        return world.run(function, *args)[0]


def of_each(function: Any, row: Row) -> list[Any]:
    """The results of a function of a row and a rank, which depends on no other rank, in one process."""

    def every() -> list[Any]:
        found = []
        for rank in range(row.ranks):
            devices.clear_caches()  # those of the rank before, which this one would use without making them
            found.append(function(row, rank))
        return found

    results: list[Any] = alone(every)
    return results


def held_together(row: Row) -> list[tuple[int, int, list[Any]]]:
    """The same with numbers, in as many processes as ranks."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(row.ranks) as pool:
        return [*pool.map(lambda rank: alone(held, row, rank, f"{folder}/store"), range(row.ranks))]
