"""One rank of DeepSpeed's ZeRO-Infinity, with everything on disk, for `benchmarks/zero_infinity.py`.

It runs in a Python that has DeepSpeed, which is not a dependency of this project, and has built DeepSpeed's `async_io`.
It imports nothing from this project. It prints a line of JSON: the seconds of each measured step, and the peak memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """The block of `benchmarks/model.py`: attention, and a gated MLP."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        y = self.norms[1](x)
        found: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return found


class Model(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList([Block(width, heads, hidden) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def settings(folder: str) -> dict[str, Any]:
    """DeepSpeed's configuration, with everything on disk."""
    disk = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 20_000_000,
            "offload_param": {**disk, "buffer_count": 5, "buffer_size": 30_000_000},
            "offload_optimizer": {**disk, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
        },
        "aio": {"block_size": 2**20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    }


def main() -> None:
    import deepspeed  # type: ignore[import-not-found]

    folder, steps, tokens, *sizes = sys.argv[1], *map(int, sys.argv[2:])
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=settings(folder)):
        model = Model(*sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(folder))
    generator, seconds = torch.Generator().manual_seed(engine.global_rank), []
    for _ in range(steps + 2):  # the first two allocate buffers
        batch = torch.randint(sizes[0], (1, tokens + 1), generator=generator)
        torch.distributed.barrier()
        begin = time.perf_counter()
        engine.backward(engine(batch))
        engine.step()
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if engine.global_rank == 0:
        print(json.dumps({"seconds": seconds[2:], "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
