"""Parameters and gradients that travel in few bits, against the same roundings done by hand."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import quant
from shardfn.shards.layout import FlatShard, Layout
from shardfn.testing import World
from tests.models import ENGINES, STRATEGIES, by_torch_func, by_value_and_grad, distance, mesh_of
from tests.models import layer as block
from tests.reference import worst

WIDTH = 24
FORMATS = [quant.int8(64), quant.fp8_e4m3(32), quant.nf4(64), quant.int4(32)]
OWN = STRATEGIES | {"zeropp": sf.strategies.zeropp(shard="shard", replica="replica")}
PAIRS = {name: (FORMATS[i % 4], FORMATS[(i + 1 + i // 4) % 4]) for i, name in enumerate(OWN)}  # gather, reduce


def model() -> Any:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) / 5

    return {"blocks": [{"w": normal(WIDTH, WIDTH), "b": normal(WIDTH), "unused": normal(300)} for _ in range(3)]}


def loss_of(block: Any) -> Any:
    def loss(params: Any, x: Tensor) -> Tensor:
        for p in params["blocks"]:
            x = block(p, x)
        return x.square().sum()

    return loss


def rows() -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rounded(x: Tensor, format: quant.Format | None) -> Tensor:
    return x if format is None else format.decode(format.encode(x), x.shape[-1], x.dtype)


def travelled(flats: Any, format: quant.Format | None) -> Any:
    """The whole parameters as they arrive."""

    def one(flat: FlatShard) -> FlatShard:
        chosen = format or flat.layout.placement.gather_format
        moves = chosen is not None and flat.layout.size > 1
        return FlatShard(rounded(flat.values, chosen) if moves and chosen else flat.values, flat.layout)

    return sf.unshard(optree.tree_map(one, flats, is_leaf=lambda x: isinstance(x, FlatShard)))


def by_accumulating(loss: Any, flat: Any) -> Any:
    """All is put off until the end, where sums that ranks have made of their own leave."""
    return sf.accumulate(lambda p, half: loss(p) * half, [0.5, 0.5], defer="all")(flat)


LEFT_BY = {"shard": ("replica",)}  # what is still to be scattered over when that is

# --- the reduction of one stage, done by hand on all ranks' gradients at once ---


def line(layout: Layout, rank: int, axes: tuple[str, ...]) -> list[int]:
    """The ranks along axes through one."""
    others = [name for name, _ in layout.grid.sizes if name not in axes]
    here = [layout.grid.index(rank, (name,)) for name in others]
    found = [r for r in layout.grid.ranks if [layout.grid.index(r, (name,)) for name in others] == here]
    return sorted(found, key=lambda r: layout.grid.index(r, axes))


def scattered(
    of: dict[int, Tensor], layout: Layout, axes: tuple[str, ...], format: quant.Format | None, before: int = 1
) -> dict[int, Tensor]:
    found = {}
    for rank in of:
        ranks, index = line(layout, rank, axes), layout.grid.index(rank, axes)
        pieces = {r: of[r].view(before, len(ranks), -1)[:, index].reshape(-1) for r in ranks}
        found[rank] = torch.stack([p if r == rank else rounded(p, format) for r, p in pieces.items()]).sum(0)
    return found


def summed(
    of: dict[int, Tensor], layout: Layout, axes: tuple[str, ...], format: quant.Format | None
) -> dict[int, Tensor]:
    """As a scatter, after which the sums are rounded once more and gathered."""
    n = layout.grid.size(axes)
    long = {r: torch.cat((x, x.new_zeros(-len(x) % n))) for r, x in of.items()}
    parts = scattered(long, layout, axes, format)
    return {r: torch.cat([rounded(parts[other], format) for other in line(layout, r, axes)])[: len(of[r])] for r in of}


def reduced(gradient: Any, flat: FlatShard, placement: sf.Placement, format: quant.Format | None) -> Tensor:
    """This rank's piece of the sum of all ranks' gradients of a stage."""
    layout, chosen = flat.layout, format or placement.reduce_format
    buffer = torch.zeros(layout.padded, dtype=torch.float64)
    for view, entry in zip(layout.views(buffer), layout.entries, strict=True):
        view.copy_(optree.tree_leaves(gradient)[entry.leaves[0]])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, buffer)
    of = dict(enumerate(every))
    whole = placement.axes or placement.gradients  # the first scatter is over these, the last axis of the mesh first
    for name in reversed([name for name, _ in layout.grid.sizes if name in whole]):
        before = [other for other in whole[: whole.index(name)] if other in LEFT_BY.get(name, ())]
        of = scattered(of, layout, (name,), chosen, layout.grid.size(tuple(before)))
    for name in placement.gradients[len(whole) :]:
        of = scattered(of, layout, (name,), chosen)
    left = tuple(axis for axis in placement.replicas if axis not in placement.gradients)
    if layout.grid.size(left) > 1:
        of = summed(of, layout, left, chosen)
    return of[dist.get_rank()]


def every(strategy: str) -> dict[Any, float]:
    """By what travels in few bits and each way to a gradient, how far its pieces are from those by hand."""
    mesh, (gather, reduce) = mesh_of(replica=2, shard=2), PAIRS[strategy]
    params = sf.shard(model(), mesh, OWN[strategy])
    ways = {"gather": (gather, None), "reduce": (None, reduce), "both": (gather, reduce)}
    return {
        (name, way): off
        for name, formats in ways.items()
        for way, off in stepped(mesh, strategy, params, *formats).items()
    }


def stepped(
    mesh: Any, strategy: str, params: Any, gather: quant.Format | None, reduce: quant.Format | None
) -> dict[str, float]:
    mine = rows().chunk(mesh.size())[mesh.get_rank()]
    loss = loss_of(sf.stage(block, gather_format=gather, reduce_format=reduce))
    whole = travelled(params, gather)
    local = torch.func.grad(loss_of(block))(whole, mine)
    found = {}
    for engine in (*ENGINES, by_accumulating):
        divides = engine in (by_value_and_grad, by_accumulating)
        value, grads = engine(lambda p: loss(p, mine), params)
        found[engine.__name__] = distance(value, loss_of(block)(whole, mine))
        for own, flat, got in zip(local["blocks"], params["blocks"], grads["blocks"], strict=True):
            placement = OWN[strategy]
            unrounded = engine is by_torch_func
            kinds = (None, None) if unrounded else (reduce, placement.reduce_format)
            if not divides:
                placement = sf.Placement(placement.axes, placement.replicas, reduce_format=kinds[1])
            want = reduced(own, flat, placement, kinds[0])
            found[engine.__name__] = worst([found[engine.__name__], (got.values - want).abs().max().item()])
    tangent = torch.func.jvp(lambda p: loss(p, mine), (params,), (optree.tree_map(torch.ones_like, params),))[1]
    ones = optree.tree_map(torch.ones_like, whole)
    found["jvp"] = distance(tangent, torch.func.jvp(lambda p: loss_of(block)(p, mine), (whole,), (ones,))[1])
    return found


@pytest.mark.world(4, "processes")
@pytest.mark.parametrize("strategy", [*OWN])
def test_what_arrives_is_what_was_sent_rounded(world: World, strategy: str) -> None:
    for found in world.run(every, strategy):
        assert {what: off for what, off in found.items() if not off < 1e-12} == {}


def mixed() -> list[str]:
    """What is said where ranks do not mean the same bytes: when they first meet, and when both are known to all."""
    mesh, said = mesh_of(replica=2, shard=2), []
    params = sf.shard({"mixed": torch.ones(64)}, mesh, sf.strategies.hfsdp(shard="shard", replica="replica"))
    stages = [sf.stage(torch.sum, reduce_format=format) for format in (quant.int8(64), quant.fp8_e4m3(32))]
    calls = [(stages[mesh.get_rank() % 2], (ValueError, RuntimeError)), *((f, ()) for f in stages)]
    for f, errors in (*calls, calls[0]):
        try:
            sf.value_and_grad(lambda p, f=f: f(p["mixed"]))(params)
        except errors as error:
            said.append(str(error))
    return said


@pytest.mark.world(4, "processes")
def test_ranks_that_mean_other_bytes_are_told(world: World) -> None:
    for first, then in world.run(mixed):
        assert "reduce_format=int8(64)" in first
        assert "reduce_format=fp8_e4m3(32)" in first
        assert "in different formats" in then
