"""What a record is asked takes no longer than it is long, and one rank's trouble is heard by all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.check.judging import judged
from shardfn.testing import world
from shardfn.transforms import checking

BLOCKS = 60  # each doubles the ways back: nobody goes all of them


def noise(w: Tensor, x: Tensor) -> Tensor:
    z = torch.ones(4, 8) * torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(BLOCKS):
        z = z + torch.tanh(z @ w)
    return sf.pmean(((z - x) ** 2).mean(), "data")


def solved(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(BLOCKS):
        x = x + 0.1 * (w[0] - x)
    return sf.psum(x, "data")


def trained(w: Tensor, x: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        y = x
        for _ in range(BLOCKS):
            y = y + torch.tanh(y @ w)
        return sf.psum(y.square().mean(), "data")

    return sf.value_and_grad(loss)(sf.pvary(w, "data"))[0]


def doubled(w: Tensor, x: Tensor) -> Tensor:
    total = x.sum() + w.sum()
    for _ in range(BLOCKS):
        total = total + total
    return total


def added(w: Tensor, x: Tensor) -> Tensor:
    total = x.sum() + w.sum()
    for _ in range(700):
        total = total + (x * w[0]).sum()
    return total


WALKS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "noise": (noise, "the same random numbers"),
    "solved": (solved, ""),
    "trained": (trained, ""),
    "doubled": (doubled, "result"),
    "added": (added, "result"),
}


def told(name: str) -> str:
    """What the checker says of a function."""
    mesh = sf.make_mesh(data=2, device="cpu")
    step = sf.shard_map(WALKS[name][0], mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), inputs="local")
    try:
        step(torch.ones(8, 8) / 8, torch.arange(32.0).view(4, 8) + mesh.get_rank())
    except (sf.check.VaryingError, sf.check.VaryingWarning) as said:
        return str(said)
    return ""


@pytest.mark.filterwarnings("error::shardfn.check.VaryingWarning")
@pytest.mark.parametrize("name", WALKS)
def test_shared_values_are_walked_once(name: str) -> None:
    for said in world(2, "threads").with_deadline(20.0).run(told, name):
        assert WALKS[name][1] in said
        assert len(said) < 4000


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "of whole numbers": Tensor.long,
    "empty": lambda x: x[:0],
    "sparse": Tensor.to_sparse,
    "wider": Tensor.double,
}


def other_kind(kind: str) -> str:
    mesh = sf.make_mesh(data=2, device="cpu")
    rank = mesh.get_rank()
    result = sf.shard_map(
        lambda x: x if rank else KINDS[kind](x), mesh=mesh, in_specs=P("data"), out_specs=P(), inputs="local"
    )
    with pytest.raises(sf.check.VaryingError) as raised:
        result(torch.ones(4, 3) + rank)
    return raised.value.findings[0].kind


@pytest.mark.parametrize("kind", KINDS)
def test_results_of_another_kind_on_each_rank_are_told_on_all(kind: str) -> None:
    assert world(2, "threads").with_deadline(20.0).run(other_kind, kind) == ["output"] * 2


def failing() -> str:
    mesh = sf.make_mesh(data=2, device="cpu")

    def on_one(*args: Any) -> Any:
        if mesh.get_rank():
            raise RecursionError("too deep")
        return judged(*args)

    with mock.patch.object(checking, "judged", on_one), pytest.raises(RuntimeError) as raised:
        sf.shard_map(lambda x: sf.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())(torch.ones(2))
    return str(raised.value)


def test_a_rank_that_cannot_judge_tells_the_others() -> None:
    for said in world(2).with_deadline(20.0).run(failing):
        assert "rank 1 failed to check the call: RecursionError: too deep" in said
