"""An error of what runs inside names the function that the user's line calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn import interop, parallel
from shardfn.testing import World
from tests.refusals import refused

Call = Callable[[], Any]


def labels(n: int = 3) -> Tensor:
    return torch.zeros(n, dtype=torch.long)


def routed() -> tuple[Tensor, Any]:
    x = torch.ones(1, 4, 4)
    return x, parallel.route(x, torch.ones(4, 4), 2)


def qkv(*heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k = (torch.ones(1, n, 4, 4) for n in heads)
    return q, k.to(dtype), k.to(dtype)


def mixture() -> Any:
    x, routing = routed()
    return parallel.mixture_of_experts(lambda p, t: t * p, torch.ones(2, 4), x, routing, "x")


def own_rows() -> Tensor:
    return torch.ones(4 + 2 * sf.axis_index("c"))


loose: Any = parallel  # for calls that the types refuse
CALLS: dict[str, tuple[Call, str]] = {
    "an axis, in a mean": (lambda: sf.pmean(torch.ones(3), "x"), "pmean: unknown axis 'x'"),
    "an axis, before a layer": (lambda: parallel.to_parallel(torch.ones(3), "x"), "to_parallel: unknown axis"),
    "an axis, after a layer": (lambda: parallel.from_parallel(torch.ones(3), "x"), "from_parallel: unknown axis"),
    "an axis, of losses": (
        lambda: parallel.cross_entropy(torch.ones(3, 4), torch.ones(4, 4), labels(), "x"),
        "cross_entropy: unknown axis",
    ),
    "an axis, of experts": (mixture, "mixture_of_experts: unknown axis"),
    "an axis, of a loss of experts": (lambda: parallel.balance_loss(routed()[1], "x"), "balance_loss: unknown axis"),
    "an axis, of heads": (lambda: parallel.ulysses_attention(*qkv(2, 2), "x"), "ulysses_attention: unknown axis"),
    "an axis, of places": (lambda: parallel.positions(8, "x"), "positions: unknown axis"),
    "an axis that is none": (lambda: loose.to_parallel(torch.ones(3), 3), "to_parallel: axis must be a name"),
    "a type": (lambda: loose.from_parallel("a", "c"), "from_parallel takes tensors"),
    "a dtype": (lambda: parallel.from_parallel(torch.ones(3) > 0, "c"), "from_parallel cannot add"),
    "a dimension": (
        lambda: parallel.to_parallel(torch.ones(2, 3), "c", sequence=5),
        "to_parallel: dim=5, but the tensor has",
    ),
    "a size": (
        lambda: parallel.embedding(labels(), torch.ones(4, 2), "c", sequence=0),
        "embedding over 'c' cuts dimension 0",
    ),
    "heads of a ring": (lambda: parallel.ring_attention(*qkv(3, 2), "c"), "ring_attention: q (1, 3, 4, 4)"),
    "heads that are exchanged": (lambda: parallel.ulysses_attention(*qkv(6, 4), "c"), "ulysses_attention: q ("),
    "dtypes of a ring": (
        lambda: parallel.ring_attention(*qkv(2, 2, dtype=torch.float64), "c"),
        "ring_attention: q is torch.float32",
    ),
    "rows of a mean": (lambda: sf.pmean(own_rows(), "c"), "rank 0 has psum(torch.float32 [4]) in pmean over c"),
    "rows of a sum": (
        lambda: parallel.from_parallel(own_rows(), "c"),
        "rank 0 has psum(torch.float32 [4]) in from_parallel over c",
    ),
    "the collective itself": (lambda: sf.psum(own_rows(), "c"), "rank 0 has psum(torch.float32 [4]) over c"),
    "what a function of the user's calls": (lambda: sf.grad(lambda x: sf.psum(x, "x"))(torch.ones(())), "psum: unkn"),
}


def told(case: str) -> str:
    mesh = sf.make_mesh(c=2, device="cpu")
    return refused(sf.shard_map(CALLS[case][0], mesh=mesh, in_specs=(), out_specs=...), (ValueError, TypeError))


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.world(2, "threads")
def test_a_message_names_the_function_that_was_called(world: World, case: str) -> None:
    for message in world.run(told, case):
        assert CALLS[case][1] in message


def on_another_mesh(call: str) -> str:
    model = interop.functional(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    params = model.shard(sf.make_mesh(c=2, device="cpu"), sf.full_shard("c"))
    calls = {"model.state_dict": lambda: model.state_dict(params), "unshard": lambda: sf.unshard(params)}
    mesh = sf.make_mesh(d=2, device="cpu")
    return refused(sf.shard_map(calls[call], mesh=mesh, in_specs=(), out_specs=...), ValueError)


@pytest.mark.parametrize("call", ["model.state_dict", "unshard"])
@pytest.mark.world(2, "processes")
def test_so_does_one_of_shards_of_another_mesh(world: World, call: str) -> None:
    for message in world.run(on_another_mesh, call):
        assert message.startswith(f"{call}: stage '0' is placed on a mesh (c=2)")
