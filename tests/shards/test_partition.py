"""Trees taken apart by a rule, and derivatives with respect to a part of them alone."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.testing import World
from tests.models import distance, everyone, layer, normal, squares

D = 4


def rows(rank: int) -> Tensor:
    return normal(3, D, seed=70 + rank)


def loss_of(f: Any, ps: Any, x: Tensor) -> Tensor:
    for p in ps:
        x = f(p, x)
    return x.square().sum()


def taken_by(way: str) -> dict[str, float]:
    """How far derivatives with respect to the layer in the middle are off."""
    n, rank = dist.get_world_size(), dist.get_rank()
    data = [rows(k) for k in range(n)]
    mesh, stage = sf.make_mesh(shard=n, device="cpu"), sf.stage(layer)
    frozen = ["1.b"] if way == "two buffers" else []
    plain, directions = squares(3), optree.tree_map(lambda x: x.cos(), squares(3))

    def parts(tree: Any) -> Any:
        flat = sf.shard(tree, mesh, sf.full_shard("shard"), frozen=frozen)
        return sf.shards.partition(flat, lambda path, shape: path == "1.w" or (path == "1.b" and not frozen))

    def whole(middle: Any) -> Any:
        return [plain[0], {**plain[1], **middle}, plain[2]]

    (chosen, rest), (along, _) = parts(plain), parts(directions)
    chosen, along = sf.shards.flatten_by_path(chosen), sf.shards.flatten_by_path(along)
    middle, direction = ({k: v for k, v in ps[1].items() if f"1.{k}" not in frozen} for ps in (plain, directions))

    def mine(part: Any) -> Tensor:
        return loss_of(stage, sf.shards.combine(part, rest), data[rank])

    def of_rank(part: Any, k: int = rank) -> Tensor:
        return loss_of(layer, whole(part), data[k])

    def off(got: Any, want: Any) -> float:
        """Of what is a pruned tree of shards."""
        got = sf.unshard(sf.shards.combine(got, rest))[1]
        return distance({name: got[name] for name in want}, want)

    total = everyone(of_rank, n)
    found = {}
    got, want = torch.func.jvp(mine, (chosen,), (along,)), torch.func.jvp(of_rank, (middle,), (direction,))
    found["jvp"] = max((a - b).abs().item() for a, b in zip(got, want, strict=True))
    pulled: Any = torch.func.vjp(mine, chosen)
    value, pull = pulled
    found["vjp"] = max(
        (value - of_rank(middle)).abs().item(), off(pull(torch.ones_like(value))[0], torch.func.grad(total)(middle))
    )
    for name, grad in (("hvp", sf.grad), ("hvp of torch.func.grad", torch.func.grad)):
        got, want = (
            torch.func.jvp(grad(f), (at,), (to,)) for f, at, to in ((mine, chosen, along), (total, middle, direction))
        )
        found[name] = max(off(a, b) for a, b in zip(got, want, strict=True))
    stacked, stacks = (
        optree.tree_map(lambda x, v: torch.stack([x, x + v, x - v]), at, to)
        for at, to in ((chosen, along), (middle, direction))
    )
    found["vmap"] = (torch.func.vmap(mine)(stacked) - torch.func.vmap(of_rank)(stacks)).abs().max().item()
    got, want = torch.func.vmap(sf.grad(mine))(stacked), torch.func.vmap(sf.grad(total))(stacks)
    for i in range(3):
        found[f"vmap of grad, {i}"] = off(*(optree.tree_map(lambda x, i=i: x[i], one) for one in (got, want)))
    return found


@pytest.mark.parametrize("way", ["one buffer", "two buffers"])
@pytest.mark.world(2)
def test_derivatives_with_respect_to_a_part_alone(world: World, way: str) -> None:
    for found in world.with_deadline(30).run(taken_by, way):
        assert not {how: off for how, off in found.items() if not off < 1e-12}


def tree() -> Any:
    return {"a": torch.ones(2), "b": [torch.zeros(1, 3), None, 5], "c": ((), torch.ones(1))}


def test_what_is_pruned_has_no_place_for_the_rest_in_any_registry() -> None:
    whole = tree()
    chosen, rest = sf.shards.partition(whole, lambda path, shape: path in ("b.0", "c.1"))
    part = sf.shards.flatten_by_path(chosen)
    assert list(part) == ["b.0", "c.1"]
    assert len(torch.utils._pytree.tree_leaves(part)) == len(optree.tree_leaves(part, none_is_leaf=True)) == 2
    for trees in (
        (part, rest),
        (rest, part),
        (part, sf.shards.flatten_by_path(rest), optree.tree_map(lambda _: None, whole)),
    ):
        back = sf.shards.combine(*trees)
        assert optree.tree_structure(back) == optree.tree_structure(whole)
        assert all(a is b for a, b in zip(optree.tree_leaves(back), optree.tree_leaves(whole), strict=True))
    assert sf.shards.flatten_by_path(part) == part, "what is pruned stays so"
    assert sf.shards.combine({}, whole)["a"] is whole["a"]
    one = torch.ones(1)
    assert sf.shards.combine(sf.shards.flatten_by_path(one), None) is one


def test_trees_that_do_not_go_together_are_refused() -> None:
    whole = tree()
    chosen, rest = sf.shards.partition(whole, lambda path, shape: path == "b.0")
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((sf.shards.flatten_by_path(chosen), whole), "2 trees have something at b.0"),
        (({"b.7": 1, "z": 2}, rest), r"tree 1 has b.7, z, for which tree 2 has no place, whose paths are a, b.0, b.1"),
        ((sf.shards.flatten_by_path(chosen), sf.shards.flatten_by_path(rest)), "one of them must have all places"),
        (([1], rest), "tree 2 has another structure than tree 1"),
    ]
    for trees, message in cases:
        with pytest.raises(ValueError, match=message):
            sf.shards.combine(*trees)
    with pytest.raises(ValueError, match=r"two places in the tree have the path 'a.b': give a key another name"):
        sf.shards.flatten_by_path({"a.b": 1, "a": {"b": None}})
