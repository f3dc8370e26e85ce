"""Runs what was translated: a small model, some steps, and the same by hand on one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardfn as sf
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


def draws(step: int, micro_batches: int) -> list[list[Tensor]]:
    """For each micro-batch of a step the rows of four ranks."""
    draw = torch.Generator().manual_seed(step)
    return [[torch.randn(4, 8, generator=draw) for _ in range(4)] for _ in range(micro_batches)]


def error(y: Tensor) -> Tensor:
    return (y.float() - 1).square().mean()


class Ran(NamedTuple):
    """What a program came to: the losses of its steps, the parameters after them, and the rows of all ranks."""

    values: list[float]
    params: dict[str, Tensor]
    rows: list[Tensor]


def run(file: Path, folder: Path, names: dict[str, Any]) -> Ran:
    """Runs a program to its end."""
    found = translate(file)
    space: dict[str, Any] = {}

    def place() -> tuple[int, int]:
        """This rank's place among those with other rows, and how many there are."""
        mine, ranks = 0, 1
        for axis in (space["DATA"],) if isinstance(space["DATA"], str) else space["DATA"]:
            size = space["mesh"][axis].size()
            mine, ranks = mine * size + space["mesh"].get_local_rank(axis), ranks * size
        return mine, ranks

    def many() -> int:
        return int(space.get("micro_batches", 1))

    def batches(start: int) -> Iterator[tuple[Tensor]]:
        for step in itertools.count(start):
            yield (torch.cat([micro[place()[0]] for micro in draws(step, many())]),)

    given = {
        **names,
        "module": module(),
        "mean": lambda model, params, x: error(model(params, x)),
        "total": lambda model, params, x: error(model(params, x)) * len(x),
        "count": lambda x: torch.tensor(len(x)),
        "optimizer": so.adamw(1e-2),
        "rows": torch.randn(96, 8, generator=torch.Generator().manual_seed(2)),
        "batches": batches,
        "folder": folder,
    }
    space.update({name: given[name] for name in found.names})
    exec(compile(found.program, "program", "exec"), space)
    values = [value for _, value in sorted(space["run"].metrics["loss"].items())]
    if "rows" in found.names:
        made = space["batches"].identity
        every = sf.run.batches(space["rows"], space["mesh"], (), made["batch"], made["seed"])
        rows = [batch for batch, _ in zip(every, values, strict=False)]
    else:
        rows = [torch.cat([x for micro in draws(n, many()) for x in micro[: place()[1]]]) for n in range(len(values))]
    whole = space["model"].state_dict(space["held"]["params"])
    return Ran(values, {name: p.double() for name, p in whole.items() if name != "scale"}, rows)


def reference(
    rows: list[Tensor], make: Any, clip: float | None = None, low: torch.dtype | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The same in plain torch on one process: gradients are means over the rows of all ranks and micro-batches."""
    net = module()
    optimizer = make(net.parameters())
    values = []
    for i, x in enumerate(rows):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"](i + 1) if "rate" in group else group["lr"]
        optimizer.zero_grad()
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            value = error(net(x))
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        values.append(float(value.detach()))
    return values, {name: p.detach().double() for name, p in net.named_parameters()}
