"""What the strategies promise of everything they draw."""

import math

import hypothesis.strategies as st
import optree
import pytest
import torch
from hypothesis import assume, find, given

from shardfn.mesh.spec import P
from shardfn.testing import strategies as draw


@given(draw.shapes(min_ndim=1, max_ndim=2, min_size=1, max_size=3))
def test_shapes_stay_within_their_bounds(shape):
    assert 1 <= len(shape) <= 2
    assert all(1 <= size <= 3 for size in shape)


@pytest.mark.parametrize("family", ["float", "integer", "bool"])
def test_dtypes_belong_to_their_family(family):
    @given(draw.dtypes(family))
    def check(dtype):
        assert dtype in draw.FAMILIES[family]
        assert dtype.is_floating_point == (family == "float")

    check()


@given(st.data())
def test_tensors_have_the_shape_and_dtype_asked_for(data):
    shape, dtype = data.draw(draw.shapes()), data.draw(draw.dtypes())
    x = data.draw(draw.tensors(shape, dtype))
    assert (tuple(x.shape), x.dtype) == (shape, dtype)
    drawn = data.draw(draw.tensors(draw.shapes(max_ndim=1), draw.dtypes("integer")))
    assert drawn.ndim <= 1
    assert not drawn.dtype.is_floating_point


@given(draw.dtypes(), st.integers(0, 100))
def test_a_seed_is_a_tensor(dtype, seed):
    assert torch.equal(draw.tensor_of((3, 2), dtype, seed), draw.tensor_of((3, 2), dtype, seed))


@given(draw.pytrees(st.integers()))
def test_pytrees_are_trees_of_their_leaves(tree):
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=False)
    assert all(isinstance(leaf, int) for leaf in leaves)
    assert optree.tree_unflatten(treedef, leaves) == tree


@pytest.mark.parametrize(
    "shape",
    [
        lambda t: t is None,
        lambda t: t == {},
        lambda t: t == (),
        lambda t: isinstance(t, draw.Pair),
        lambda t: isinstance(t, dict) and any(isinstance(v, list) and v for v in t.values()),
    ],
    ids=["none", "empty dict", "empty tuple", "namedtuple", "list in dict"],
)
def test_pytrees_come_in_every_form(shape):
    find(draw.pytrees(st.integers()), shape)


@given(draw.mesh_sizes(max_world=8, max_axes=3))
def test_meshes_fit_their_world(sizes):
    assert 1 <= math.prod(sizes.values()) <= 8
    assert list(sizes) in (["shard"], ["replica", "shard"], ["replica", "shard", "tensor"])


@given(draw.mesh_sizes(world=4))
def test_meshes_fill_a_given_world(sizes):
    assert math.prod(sizes.values()) == 4


@given(st.integers(0, 3), draw.mesh_sizes(max_world=8, max_axes=3), st.data())
def test_specs_cut_global_shapes_evenly(ndim, mesh, data):
    spec = data.draw(draw.specs(ndim, list(mesh)))
    assert isinstance(spec, P)
    assert len(spec.entries) == ndim
    assert set(spec.axes) <= set(mesh)
    assert len(set(spec.axes)) == len(spec.axes)
    shape = data.draw(draw.global_shapes(spec, mesh, ndim=ndim + 1, max_size=3))
    assert len(shape) == ndim + 1
    for size, entry in zip(shape, spec.entries, strict=False):
        pieces = draw.cut(entry, mesh)
        assert size % pieces == 0
        assert size // pieces <= 3


def test_an_axis_order_other_than_the_mesh_is_drawn():
    spec = find(draw.specs(1, ["replica", "shard"]), lambda spec: spec == P(("shard", "replica")))
    assert spec.axes == ("shard", "replica")


def test_a_spec_longer_than_the_tensor_is_refused():
    @given(draw.global_shapes(P(None, "shard"), {"shard": 2}, ndim=1))
    def check(shape):
        assume(False)

    with pytest.raises(ValueError, match=r"has 2 entries, which is more than ndim=1"):
        check()
