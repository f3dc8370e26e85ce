"""Memory of one GPU: a batch for which there really is none, and what the allocator holds in the long run."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

import shardfn as sf
from benchmarks.gpu_schedules import different
from benchmarks.gpu_setting import Answer, Where, pretended
from benchmarks.gpu_training import MODELS, shardfn_step

ROWS, LAYERS = 8, 4
ROOM = 40  # tensors of one row; the whole batch takes more than twice as many
STEPS = 50


def memory(where: Where) -> Answer:
    answer = Answer()
    with pretended(1, where.device):
        shortage(where, answer)
        fragments(where, answer)
    return answer


# --- out of memory ---


def shortage(where: Where, answer: Answer) -> None:
    """`micro="auto"` where the allocator really has no more memory."""
    mesh, wide = sf.make_mesh(data=1, device=where.device), 2**20 if where.tiny else 2**26
    whole = [{"w": torch.full((2,), 0.5 + i / 8, device=where.device)} for i in range(LAYERS)]
    params = sf.shard(whole, mesh, sf.full_shard("data"))
    rows = torch.linspace(0, 1, ROWS, device=where.device)[:, None]

    @sf.stage
    def stage(p: Any, x: Tensor) -> Tensor:
        return (x * p["w"][0]).sin() + p["w"][1]

    def loss(params: Any, x: Tensor) -> Tensor:
        x = x.expand(-1, wide)
        for p in sf.layers(params):
            x = stage(p, x)
        return x.square().sum() / (ROWS * wide)

    def step(micro: Any) -> Any:
        run = sf.accumulate(loss, rows, micro=micro)
        found = [one.cpu() for one in optree.tree_leaves(run(params))]
        return run.micro, found

    step(ROWS)  # so that what is made once is there
    before = torch.cuda.memory_allocated() if where.cuda else 0
    with limited(where, ROOM * wide * 4):
        micro, found = step("auto")
    lost = torch.cuda.memory_allocated() - before if where.cuda else 0
    answer.rows.append({"rows": ROWS, "fit in parts": micro})
    answer.goal("a batch that does not fit: parts", micro, 2, "at least")
    answer.goal(
        "a batch that does not fit: numbers that differ from as many parts", different(found, step(micro)[1]), 0
    )
    name = "a batch that does not fit: memory lost, MiB"
    if where.cuda:
        answer.goal(name, lost / 2**20, 1)
    else:
        answer.unanswered(name, "the CPU's allocator does not tell", 1)


@contextmanager
def limited(where: Where, room: int) -> Iterator[None]:
    """There are only so many bytes of memory left: other tensors hold the device's, or the process may take no more."""
    if where.cuda:
        torch.cuda.empty_cache()
        held = torch.empty(torch.cuda.mem_get_info()[0] - room, dtype=torch.uint8, device="cuda")
        yield
        del held
        torch.cuda.empty_cache()
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


# --- in the long run ---


def fragments(where: Where, answer: Answer) -> None:
    """What the allocator holds beside what is used, over many steps."""
    ratio, allocations = f"reserved / allocated, peaks of {STEPS} steps", f"allocations of the driver in {STEPS} steps"
    if not where.cuda:
        for name, limit in ((ratio, 1.1), (allocations, 0.0)):
            answer.unanswered(name, "torch's caching allocator is the GPU's", limit)
        return
    step = shardfn_step(MODELS["tiny" if where.tiny else "1B"])
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    answer.rows.append({"steps": STEPS, "reserved GiB": reserved / 2**30, "allocated GiB": allocated / 2**30})
    answer.goal(ratio, reserved / allocated, 1.1)
    answer.goal(allocations, torch.cuda.memory_stats()["num_device_alloc"] - before, 0)
