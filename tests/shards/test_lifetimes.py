"""A mesh lives as long as somebody can use it: its flat shards, or a backward that is still to come."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any
from unittest import mock

import optree
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.testing import World, world


def placed(**sizes: int) -> tuple[Any, weakref.ref[Any]]:
    """Parameters of which nothing else is kept, and whether their mesh is alive."""
    mesh = sf.make_mesh(**(sizes or {"shard": -1}), device="cpu")
    return sf.shard(whole(), mesh, sf.full_shard(tuple(sizes or ("shard",)))), weakref.ref(mesh)


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(n, generator=generator, dtype=torch.float64) for name, n in (("a", 24), ("b", 7))}


square = sf.stage(lambda p: p.square().sum(), remat=True)


def loss(p: Any) -> Tensor:
    return square(p["a"]) + square(p["b"]) ** 2


def right(gradient: Any) -> bool:
    """Whether the sum over ranks of the loss has this gradient."""
    wanted, n = torch.func.grad(loss)(whole()), dist.get_world_size()
    return all((gradient[name] - n * wanted[name]).abs().max() < 1e-12 for name in wanted)


def kept() -> dict[str, Any]:
    found: dict[str, Any] = {}
    params, ref = placed()
    mesh = ref()
    for name in ("first", "second"):
        gradient = sf.grad(loss)(params)
        found[name] = right(sf.unshard(gradient)) and ref() is mesh
    del mesh, params
    found["by a gradient"] = right(sf.unshard(gradient)) and ref() is not None
    moved = optree.tree_map(torch.clone, gradient)
    del gradient
    found["by what tree_map makes"] = ref() is not None and right(sf.unshard(moved))
    copied = copy.deepcopy(moved)
    del moved
    found["by a deep copy"] = ref() is not None and right(sf.unshard(copied))
    del copied
    found["gone at once"] = ref() is None
    return found


def before_backward() -> dict[str, Any]:
    params, ref = placed()
    leaves = optree.tree_map(lambda x: x.requires_grad_(), params)
    out, tree = loss(leaves), optree.tree_structure(leaves)
    values = optree.tree_leaves(leaves)
    del params, leaves
    gc.collect()
    out.backward()
    del out
    gone = ref() is None
    return {"gone": gone, "right": right(sf.unshard(optree.tree_unflatten(tree, [x.grad for x in values])))}


def only_numbers() -> dict[str, Any]:
    """What does not keep a mesh finds one all the same, which is made once."""
    params, ref = placed()
    leaves, tree = optree.tree_flatten(params)
    text = pickle.dumps(params)
    del params
    gone = ref() is None
    with mock.patch.object(dist, "new_group", autospec=True, side_effect=dist.new_group) as new_group:
        same = [right(sf.unshard(sf.grad(loss)(optree.tree_unflatten(tree, leaves)))) for _ in range(2)]
        same.append(right(sf.unshard(sf.grad(loss)(pickle.loads(text)))))
    return {"gone": gone, "right": all(same), "groups": new_group.call_count == 0}


def of_two_alike() -> dict[str, Any]:
    first, one = placed()
    second, other = placed()
    at_first = right(sf.unshard(sf.grad(loss)(first)))
    del second
    later = right(sf.unshard(sf.grad(loss)(first)))
    return {"right": at_first and later, "alive": one() is not None, "gone": other() is None}


def many() -> dict[str, Any]:
    refs, calls = [], []
    with mock.patch.object(dist, "new_group", autospec=True, side_effect=dist.new_group) as new_group:
        for i in range(12):
            params, ref = placed(**({"x": 2, "y": 2} if i % 2 else {"shard": 4}))
            assert right(sf.unshard(sf.grad(loss)(params)))
            refs.append(ref)
            calls.append(new_group.call_count)
    del params
    return {"gone": [ref() for ref in refs] == [None] * 12, "groups": calls[3] == calls[-1]}


def test_a_mesh_lives_as_long_as_somebody_can_use_it() -> None:
    def body() -> Any:
        gc.collect()
        gc.disable()  # what goes, goes at once
        try:
            return {f.__name__: f() for f in (kept, before_backward, only_numbers, of_two_alike)}
        finally:
            gc.enable()

    for found in world(2).run(body):
        assert all(all(each.values()) for each in found.values()), found


def test_many_meshes_leave_nothing_behind() -> None:
    with World(4) as fresh:
        for found in fresh.run(many):
            assert all(found.values()), found
