"""What the tests of stages in free-form programs share: a model's data, two programs, and shards that are leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from tests.models import (
    VOCABULARY,
    WIDTH,
    block,
    distance,
    embed,
    everyone,
    gradients,
    head,
    normal,
    params,
    plainly,
    variables,
)
from tests.reference import worst

ROWS = 3
Program = Callable[[Any, Any, Any], Tensor]

everywhere = pytest.mark.parametrize("world", [(2, "processes"), (4, "threads")], indirect=True, ids=["2", "4-threads"])
on_threads = pytest.mark.world(2, "threads")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"remat": True},
    {"remat": "mm"},
    {"remat": "offload"},
    {"reshard": False},
    {"prefetch": 0},
    {"prefetch": 3, "remat": True},
    {"reshard": False, "remat": True},
]


# --- a model's data, and what all ranks' losses together have as their gradient ---


def tokens_of(rank: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(100 + rank))


def rows_of(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * normal(ROWS, WIDTH, seed=200 + rank).to(dtype)


def apart(found: dict[Any, Any], want: Any) -> dict[Any, float]:
    """How far gradients, as shards, are from one over whole parameters: the first by itself, the others through it."""
    first = next(iter(found.values()))
    off = distance(sf.unshard(first), want)
    return {name: off + distance(gradient, first) for name, gradient in found.items()}


def staged(f: Any, **options: Any) -> Any:
    """`sf.stage`; operators, which cannot be pickled, by their name."""
    if options.get("remat") == "mm":
        options["remat"] = [torch.ops.aten.mm.default]
    return sf.stage(f, **options)


@functools.cache
def wanted(program: Program, n: int, shifts: tuple[int, ...] = (0,), depth: int = 4) -> tuple[Any, Tensor]:
    """The gradient of all ranks' losses together, each with the data of these shifts, and what they add up to."""
    total = everyone(lambda ps, k: torch.stack([program(plainly, ps, k + shift) for shift in shifts]).sum(), n)
    gradient, value = torch.func.grad_and_value(total)(params(depth))
    return gradient, value


def straight(stage: Any, ps: Any, rank: int) -> Tensor:
    x = stage(embed)(ps["embed"], tokens_of(rank))
    for p in sf.layers(ps["blocks"]):
        x = stage(block)(p, x)
    return stage(head)(ps["head"], x).square().sum()


def loops(stage: Any, ps: Any, rank: int) -> Tensor:
    x = rows_of(rank)
    for _ in range(3):
        for p in sf.layers(ps["blocks"]):
            x = stage(block)(p, x)
    return x.square().sum()


class Setting:
    """Shards as leaves on this rank, and what the whole parameters give."""

    def __init__(self, depth: int = 4, **options: Any) -> None:
        self.mesh = sf.make_mesh(shard=-1, device="cpu")
        self.n, self.rank = self.mesh.size(), self.mesh.get_rank()
        self.depth, self.plain = depth, params(depth)
        self.flat = sf.shard(self.plain, self.mesh, sf.full_shard("shard"))
        self.leaves = variables(self.flat)
        self.stages: dict[Any, Any] = {}
        self.options = options

    def stage(self, f: Any) -> Any:
        return self.stages.setdefault(f, staged(f, **self.options))

    def want(self, program: Any, *numbers: int) -> Any:
        """The gradient of the sum of a program's losses on each of these shifts of the ranks' data."""
        return wanted(program, self.n, numbers or (0,), self.depth)[0]

    def left(self) -> Any:
        """What `backward` left on the leaves, which it takes away."""
        found = gradients(self.leaves)
        for leaf in optree.tree_leaves(self.leaves):
            leaf.grad = None
        return found

    def collected(self) -> Any:
        """The same, whole."""
        return sf.unshard(self.left())

    def clean_step(self) -> float:
        """How far a step from here on is off."""
        _, gradient = sf.value_and_grad(lambda ps: straight(self.stage, ps, self.rank))(self.flat)
        straight(self.stage, self.leaves, self.rank).backward()
        return worst(apart({"value_and_grad": gradient, "backward": self.left()}, self.want(straight)).values())
