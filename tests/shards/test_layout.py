"""How parameters lie in a flat buffer: as a pytree node, in memory, by rank, and in words."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as torch_tree
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import World
from shardfn.testing import strategies as draws
from shardfn.testing import world as shared_world

COMMUNICATING = settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])


def tree() -> Any:
    return {
        "layer": {"w": torch.arange(15.0).view(3, 5), "scalar": torch.tensor(2.0), "none": torch.ones(0, 4)},
        "odd": torch.arange(7.0),
    }


def sharded(axis: Any = "shard", **sizes: int) -> Any:
    mesh = sf.make_mesh(device="cpu", **(sizes or {"shard": -1}))
    return sf.shard(tree(), mesh, sf.full_shard(axis))


def as_a_node() -> Any:
    flat = sharded()
    one = flat["odd"]
    leaves, treedef = optree.tree_flatten(flat)
    torch_leaves, torch_def = torch_tree.tree_flatten(flat)
    assert (
        [id(x) for x in leaves] == [id(flat["layer"].values), id(flat["odd"].values)] == [id(x) for x in torch_leaves]
    )
    for back in (optree.tree_unflatten(treedef, leaves), torch_tree.tree_unflatten(torch_leaves, torch_def)):
        assert type(back["odd"]) is sf.shards.FlatShard
        assert back["odd"].values is one.values
        assert back["odd"].layout == one.layout
    assert hash(treedef) == hash(optree.tree_structure(sharded()))
    assert treedef == optree.tree_structure(sharded())
    assert optree.tree_paths(flat) == [("layer", "values"), ("odd", "values")]
    for kind in (None, 3, "word", object(), torch.ones(2, 2), (1, 2), {"a": 1}):
        assert optree.tree_map(lambda x, kind=kind: kind, flat)["odd"].values is kind
        assert torch_tree.tree_map(lambda x, kind=kind: kind, flat)["odd"].values is kind
        repr(optree.tree_map(lambda x, kind=kind: kind, flat))
    twice = optree.tree_map(torch.add, flat, flat)
    assert torch.equal(twice["odd"].values, 2 * one.values)


@pytest.mark.world(2, "threads")
def test_a_shard_is_a_pytree_node_with_one_leaf_of_any_kind(world: World) -> None:
    world.run(as_a_node)


def copied() -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat = sf.shard(tree(), mesh, sf.full_shard("shard"))["layer"]
    for back in (pickle.loads(pickle.dumps(flat)), copy.deepcopy(flat), copy.copy(flat)):
        assert back.layout == flat.layout
        assert hash(back.layout) == hash(flat.layout)
        assert str(back) == str(flat)
        assert torch.equal(back.values, flat.values)
        assert optree.tree_structure(back) == optree.tree_structure(flat)
    deep = copy.deepcopy({"p": flat, "q": flat})
    assert deep["p"] is deep["q"]
    assert deep["p"].values is not flat.values
    other = sf.shard(tree(), mesh, sf.full_shard("shard"))["odd"].layout
    assert other != flat.layout
    assert flat.layout != 3
    out = sf.unshard(pickle.loads(pickle.dumps(flat)))
    assert torch.equal(out["w"], tree()["layer"]["w"])
    return pickle.dumps(flat)


@pytest.mark.world(2, "threads")
def test_a_shard_is_pickled_and_copied(world: World) -> None:
    made = world.run(copied)
    assert pickle.loads(made[0]).layout == pickle.loads(made[1]).layout  # elsewhere, without any process group


def described() -> str:
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    plain = {"blocks": [{"w": torch.zeros(4, 4), "b": torch.zeros(4, dtype=torch.bfloat16)}]}
    flat = sf.shard(plain, mesh, sf.hybrid_shard(shard="shard", replica="replica"), frozen=[".*b"])
    return repr(flat["blocks"][0]["float32"]) + repr(flat["blocks"][0]["bfloat16 frozen"])


@pytest.mark.world(4, "threads")
def test_a_shard_says_what_it_holds(world: World) -> None:
    for text in world.run(described):
        for word in (
            "blocks.0",
            "float32",
            "bfloat16, frozen",
            "1/2 over shard",
            "replica",
            "blocks.0.w [4, 4]",
            " B a rank",
        ):
            assert word in text, (word, text)


def beside_another_mesh() -> Any:
    """A mesh like this one is used, and goes."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat = sf.shard(tree(), mesh, sf.full_shard("shard"))
    sharded()
    whole = sf.unshard(flat)
    return torch.equal(whole["odd"], tree()["odd"]) and sf.stage(lambda p: p.sum().item())(flat["odd"]) == 21


@pytest.mark.world(2, "threads")
def test_a_shard_outlives_other_meshes_like_its_own(world: World) -> None:
    assert world.run(beside_another_mesh) == [True, True]


# --- in memory ---

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def views_are_aligned(shapes: Any, dtype: torch.dtype) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    plain = {str(i): draws.tensor_of(shape, dtype, seed=i) for i, shape in enumerate(shapes)}
    flat = sf.shard({"all": plain}, mesh, sf.full_shard("shard"))["all"]
    found: list[Any] = []

    def look(p: Any) -> Tensor:
        for name, x in p.items():
            assert torch.equal(x, plain[name])
            assert x.shape == plain[name].shape
            assert x.dtype == plain[name].dtype
            assert x.is_contiguous()
            found.append((x.untyped_storage().data_ptr(), x.data_ptr()))
        return torch.zeros(())

    sf.stage(look)(flat)
    assert len({storage for storage, _ in found}) <= 1, "one buffer"
    return all((at - storage) % 64 == 0 and at % 64 == 0 for storage, at in found)


@COMMUNICATING
@given(shapes=st.lists(draws.shapes(min_size=1), min_size=1, max_size=6), dtype=st.sampled_from(DTYPES))
def test_gathered_parameters_are_aligned_views_of_one_buffer(shapes: Any, dtype: torch.dtype) -> None:
    assert all(shared_world(2, "threads").run(views_are_aligned, shapes, dtype))


def element_ranges(shapes: Any, dtype: torch.dtype, sizes: Any, axes: Any, cut: Any) -> Any:
    """Each rank's own part of each parameter, with where it says that it comes from."""
    mesh = sf.make_mesh(device="cpu", **sizes)
    plain = {str(i): draws.tensor_of(shape, dtype, seed=i) for i, shape in enumerate(shapes)}
    flat = sf.shard({"all": plain}, mesh, sf.full_shard(axes), specs=P(cut) if cut else P())["all"]
    rank = torch.distributed.get_rank()
    local = sf.shards.local_parameters(flat)
    mine = {}
    for part in flat.layout.ranges(rank):
        values = local[part.path]
        assert values.shape == (part.stop - part.start,)
        whole = plain[part.path.removeprefix("all.")]
        index = tuple(slice(low, low + n) for low, n in zip(part.corner, part.shape, strict=True))
        assert torch.equal(values, whole[index].reshape(-1)[part.start : part.stop])
        if values.numel():
            assert values.untyped_storage().data_ptr() == flat.values.untyped_storage().data_ptr()
        number = torch.arange(whole.numel()).view(whole.shape)
        mine[part.path] = number[index].reshape(-1)[part.start : part.stop].tolist()
    assert set(local) == set(mine)
    replicas = [mesh.get_local_rank(name) for name in sizes if name not in (*axes, cut)]
    return replicas, mine


@COMMUNICATING
@given(data=st.data())
def test_the_ranges_of_all_ranks_cover_each_element_once(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([2, 4]))
    sizes = data.draw(draws.mesh_sizes(world=n))
    axes = data.draw(st.permutations(list(sizes)))[: data.draw(st.integers(1, len(sizes)))]
    cut = data.draw(st.sampled_from([None, *(name for name in sizes if name not in axes)]))
    shapes = data.draw(st.lists(draws.shapes(min_ndim=1 if cut else 0), min_size=1, max_size=4))
    if cut:
        shapes = [(shape[0] * sizes[cut], *shape[1:]) for shape in shapes]
    dtype = data.draw(st.sampled_from(DTYPES))
    found = shared_world(n, "threads").run(element_ranges, shapes, dtype, sizes, tuple(axes), cut)
    first = [mine for replicas, mine in found if replicas == found[0][0]]
    for i, shape in enumerate(shapes):
        numbers = sorted(number for mine in first for number in mine.get(f"all.{i}", []))
        assert numbers == list(range(torch.Size(shape).numel()))
        assert sum(f"all.{i}" in mine for mine in first) >= 1


def from_anywhere() -> Any:
    """Any rank can say what any other holds."""
    layout = sharded()["layer"].layout
    return [[(r.path, r.start, r.stop) for r in layout.ranges(rank)] for rank in range(2)]


@pytest.mark.world(2, "threads")
def test_each_rank_knows_what_the_others_hold(world: World) -> None:
    first, second = world.run(from_anywhere)
    assert first == second
    assert first[0] != first[1]
