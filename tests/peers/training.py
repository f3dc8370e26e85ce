"""Steps of training on shards, beside the same module on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardfn as sf
import shardfn.optim as so
from shardfn import interop
from tests.models import DATA, STRATEGIES, distance
from tests.peers.modules import filled, mapped, mean_square, residuals, rows, setting

Optimizers = tuple[so.Optimizer, Callable[[Any], torch.optim.Optimizer]]
ADAMW: Optimizers = (so.adamw(0.05), lambda ps: torch.optim.AdamW(ps, lr=0.05))


def trained(
    build: Callable[[], nn.Module] = residuals,
    strategy: sf.Strategy = STRATEGIES["hybrid_shard"],
    optimizers: Optimizers = ADAMW,
    limit: tuple[float, float] | None = None,
    **options: Any,
) -> None:
    """Three steps; `limit` is a norm and its order, by which gradients are clipped."""
    module, (mesh, mine) = filled(build()), setting()
    plain = copy.deepcopy(module)
    ours, theirs = optimizers[0], optimizers[1]([p for p in plain.parameters() if p.requires_grad])
    ours = ours if limit is None else so.chain(so.clip_by_global_norm(limit[0], order=limit[1]), ours)
    model = interop.functional(module, **{"min_stage_params": 8} | options)
    params = model.shard(mesh, strategy)
    state = ours.init(params)
    buffers: Any = {name: b.clone() for name, b in model.buffers.items()}

    def loss(ps: Any, x: Tensor) -> Any:
        return mean_square(model(ps, x, buffers=buffers)[0], DATA)

    for number in range(3):
        x = rows(number)
        value, gradient = mapped(sf.value_and_grad(loss), mesh)(params, mine(x))
        params, state = ours.step(params, gradient, state)
        theirs.zero_grad()
        wanted = mean_square(plain(x), ())
        wanted.backward()
        for p in plain.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        if limit is not None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None], limit[1])
            for p in plain.parameters():  # torch's own clipping adds 1e-6 to the norm
                p.grad = p.grad * (limit[0] / norm).clamp(max=1) if p.grad is not None else None
        theirs.step()
        assert abs(value - wanted.detach()) < 1e-12
    assert distance(model.state_dict(params), dict(plain.named_parameters(remove_duplicate=False))) < 1e-12
