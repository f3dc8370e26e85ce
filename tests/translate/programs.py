"""Runs what was translated: a small model, three steps, and the same by hand on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardfn.optim as so
from shardfn.translate import translate


class Block(nn.Module):
    """A layer whose batch is rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    """Three blocks and a head, with a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def module() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(ranks: int, micro_batches: int) -> list[list[list[Tensor]]]:
    """For each step and micro-batch, every rank's rows."""
    draw = torch.Generator().manual_seed(1)
    return [[[torch.randn(4, 8, generator=draw) for _ in range(ranks)] for _ in range(micro_batches)] for _ in range(3)]


def error(y: Tensor) -> Tensor:
    return (y.float() - 1).square().mean()


def run(file: Path, folder: Path, names: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """The values of three steps, and the parameters after them."""
    found = translate(file)
    given = {"module": module(), "mean": lambda model, params, x: error(model(params, x)), **names}
    given |= {
        "total": lambda model, params, x: error(model(params, x)) * len(x),
        "count": lambda x: torch.tensor(len(x)),
    }
    if "optimizer" in found.names:
        given.setdefault("optimizer", so.adamw(1e-2))
    space: dict[str, Any] = {name: given[name] for name in found.names}
    exec(compile(found.program, "program", "exec"), space)
    mesh, params, state = space["mesh"], space["params"], space["state"]
    axes = (space["DATA"],) if isinstance(space["DATA"], str) else space["DATA"]
    ranks, mine = 1, 0
    for axis in axes:
        size = mesh[axis].size()
        ranks, mine = ranks * size, mine * size + mesh.get_local_rank(axis)
    many, values = space.get("micro_batches", 1), []
    for step in rows(ranks, many):
        own = [(micro[mine],) for micro in step]
        value, params, state = space["train_step"](params, state, own if "micro_batches" in space else own[0])
        values.append(float(value))
    if "save" in space:
        space.update(params=params, state=state)
        space["save"](folder, 3)
    whole = space["model"].state_dict(params)
    return values, {name: p.double() for name, p in whole.items() if name != "scale"}


def reference(
    ranks: int, micro_batches: int, make: Any, clip: float | None = None, low: torch.dtype | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The same in plain torch on one process: gradients are means over ranks and micro-batches."""
    net = module()
    optimizer = make(net.parameters())
    values = []
    for i, step in enumerate(rows(ranks, micro_batches)):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"](i + 1) if "rate" in group else group["lr"]
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in step:
            for x in micro:
                with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                    one = error(net(x)) / ranks / micro_batches
                one.backward()
                total = total + one.detach()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        values.append(float(total))
    return values, {name: p.detach().double() for name, p in net.named_parameters()}
