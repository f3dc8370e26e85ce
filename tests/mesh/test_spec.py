"""Specs as values, as prefixes of trees, as rules over paths, and as arithmetic on shapes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from torch.utils import _pytree

import shardfn as sf
from shardfn import P
from shardfn.mesh.spec import match
from shardfn.testing import strategies as draws

Pair = namedtuple("Pair", ["first", "second"])


def mesh_of(**sizes: int) -> Any:
    """All that specs ask of a mesh."""
    return SimpleNamespace(mesh_dim_names=tuple(sizes), shape=tuple(sizes.values()))


SPECS = [
    (P(), "P()", (), ()),
    (P("a"), "P('a')", ("a",), (("a",),)),
    (P(None, "a"), "P(None, 'a')", ("a",), ((), ("a",))),
    (P(("a", "b"), None, "c"), "P(('a', 'b'), None, 'c')", ("a", "b", "c"), (("a", "b"), (), ("c",))),
    (P("b", "a"), "P('b', 'a')", ("b", "a"), (("b",), ("a",))),
]


@pytest.mark.parametrize(("spec", "text", "axes", "by_dim"), SPECS, ids=repr)
def test_a_spec_is_a_value(spec: P, text: str, axes: Any, by_dim: Any) -> None:
    assert repr(spec) == text
    assert eval(text) == spec
    for twin in (eval(text), pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec)):
        assert twin == spec
        assert hash(twin) == hash(spec)
        assert {spec: 1}[twin] == 1
    assert (spec.axes, tuple(spec.by_dim()), len(spec)) == (axes, by_dim, len(by_dim))
    assert P(*spec) == spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.entries = ()  # type: ignore[misc]


def test_different_specs_differ() -> None:
    specs = [spec for spec, *_ in SPECS] + [P(("b", "a"), None, "c"), P("a", "b"), P("b"), P(None), P("a", None)]
    assert len(set(specs)) == len(specs)
    assert all((one == other) == (one is other) for one in specs for other in specs)
    others: list[Any] = ["a", ("a",), None, ...]
    assert not any(P("a") == other for other in others)


@pytest.mark.parametrize(
    ("spelled", "normal"),
    [
        (P(("a",)), P("a")),
        (P(["a"]), P("a")),
        (P(["a", "b"]), P(("a", "b"))),
        (P(()), P(None)),
        (P([], "a"), P(None, "a")),
        (P(("a",), ("b",)), P("a", "b")),
    ],
)
def test_one_spelling_is_kept(spelled: P, normal: P) -> None:
    assert spelled == normal
    assert hash(spelled) == hash(normal)
    assert repr(spelled) == repr(normal)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (P("a"), P("a", None), True),
        (P(), P(None, None), True),
        (P(None, "a"), P(None, "a", None, None), True),
        (P("a"), P(None, "a"), False),
        (P("a"), P(), False),
        (P(("a", "b")), P(("b", "a")), False),
        (P("a", "b"), P(("a", "b")), False),
    ],
)
def test_specs_that_cut_alike_are_the_same(one: P, other: P, same: bool) -> None:
    assert one.same(other) is other.same(one) is same


@pytest.mark.parametrize("flatten", [optree.tree_leaves, _pytree.tree_leaves], ids=["optree", "torch"])
def test_a_spec_is_a_leaf(flatten: Any) -> None:
    tree = {"w": P("a", ("b", "c")), "x": [P(), (P(None),)]}
    assert flatten(tree) == [P("a", ("b", "c")), P(), P(None)]


@pytest.mark.parametrize("entry", [1, 0.5, True, ..., b"a", ("a", 1), ("a", None), [["a"]], {"a"}, {"a": 1}, P("a")])
def test_an_entry_is_a_name_or_names_or_none(entry: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(repr(entry))):
        P("x", entry)


@pytest.mark.parametrize("entries", [("a", "a"), (("a", "a"),), (("a", "b"), "a"), ("b", None, ["c", "b"])], ids=str)
def test_an_axis_cuts_once(entries: Any) -> None:
    twice = "b" if entries[0] == "b" else "a"
    with pytest.raises(ValueError, match=rf"axis '{twice}' is named twice"):
        P(*entries)


W, B, X = (torch.zeros(size) for size in (2, 3, 4))


class Carrier:
    """A value that says itself how it is cut; trees stop at it."""

    def __init__(self, spec: P) -> None:
        self.spec = spec
        self.local = torch.ones(2)

    def __repr__(self) -> str:
        return f"Carrier({self.spec})"


optree.register_pytree_node(
    Carrier, lambda c: ((c.local,), c.spec), lambda spec, _: Carrier(spec), namespace="test_spec"
)
CARRIER = Carrier(P("a"))


@pytest.mark.parametrize(
    ("specs", "tree", "paths", "found"),
    [
        (P("a"), W, ["p"], [P("a")]),
        (..., {"w": W, "b": B}, ["p['b']", "p['w']"], [...] * 2),
        (P("a"), {"w": W, "b": [B, X]}, ["p['b'][0]", "p['b'][1]", "p['w']"], [P("a")] * 3),
        ({"w": P("a"), "b": P()}, {"b": B, "w": W}, ["p['b']", "p['w']"], [P(), P("a")]),
        ({"w": P("a"), "b": ...}, {"w": (W, X), "b": B}, ["p['b']", "p['w'][0]", "p['w'][1]"], [..., P("a"), P("a")]),
        ([P("a"), (P("b"), P())], [W, (B, X)], ["p[0]", "p[1][0]", "p[1][1]"], [P("a"), P("b"), P()]),
        (Pair(P("a"), P("b")), Pair(W, {"k": B}), ["p.first", "p.second['k']"], [P("a"), P("b")]),
        (OrderedDict(z=P("a"), y=P("b")), OrderedDict(z=W, y=B), ["p['z']", "p['y']"], [P("a"), P("b")]),
        (P("a"), None, [], []),
        (None, None, [], []),
        ({"w": P("a"), "n": None}, {"w": W, "n": None}, ["p['w']"], [P("a")]),
        ({"w": P("a"), "n": P("b")}, {"w": W, "n": None}, ["p['w']"], [P("a")]),
        (P("a"), {"w": {}, "b": [], "t": ()}, [], []),
        ({}, {}, [], []),
        ([], [], [], []),
        ({"w": P("a")}, {"w": []}, [], []),
        (P(), {"n": 3, "s": "word", "f": len}, ["p['f']", "p['n']", "p['s']"], [P()] * 3),
        (..., [CARRIER, W], ["p[0]", "p[1]"], [..., ...]),
        ([P("a"), P()], [CARRIER, W], ["p[0]", "p[1]"], [P("a"), P()]),
    ],
    ids=str,
)
def test_specs_are_a_prefix_of_the_tree(specs: Any, tree: Any, paths: list[str], found: list[Any]) -> None:
    leaves = match(specs, tree, "in_specs", "p")
    assert [leaf.path for leaf in leaves] == paths
    assert [leaf.spec for leaf in leaves] == found
    assert all(eval(leaf.path, {"p": tree}) is leaf.value for leaf in leaves)


@given(tree=draws.pytrees(st.integers()))
def test_one_spec_serves_every_leaf_and_a_tree_of_specs_each_its_own(tree: Any) -> None:
    one = match(P("a"), tree, "in_specs", "p")
    assert [leaf.value for leaf in one] == optree.tree_leaves(tree)
    assert {leaf.spec for leaf in one} <= {P("a")}
    assert len({leaf.path for leaf in one}) == len(one)
    each = match(optree.tree_map(lambda n: P(f"a{n}"), tree), tree, "in_specs", "p")
    assert [leaf.spec for leaf in each] == [P(f"a{leaf.value}") for leaf in one]
    assert [leaf.path for leaf in each] == [leaf.path for leaf in one]


TREE = {"blocks": [{"w": W, "norm": B}, {"w": W, "norm": B}], "head": X, "norm": Pair(W, B)}


@pytest.mark.parametrize(
    ("rules", "strict", "found"),
    [
        (
            [(r".*norm.*", P()), (r"blocks\..*", P("a")), ("head", P("b"))],
            True,
            [P(), P("a"), P(), P("a"), P("b"), P(), P()],
        ),
        (
            [(r"blocks\.0\.w", P("x")), (r"blocks\..*", P("a")), (r".*", ...)],
            True,
            [P("a"), P("x"), P("a"), P("a"), ..., ..., ...],
        ),
        ([(r".*", P("a")), (r"head", P("b"))], True, [P("a")] * 7),
        ([("head", P("b"))], False, [P()] * 4 + [P("b")] + [P()] * 2),
        ([("hea", P("b")), ("ead", P("b"))], False, [P()] * 7),
        ([("nothing", P("b"))], False, [P()] * 7),
        ([], False, [P()] * 7),
    ],
)
def test_the_first_rule_that_matches_a_whole_path_decides(rules: Any, strict: bool, found: list[Any]) -> None:
    leaves = match(sf.by_path(rules, strict=strict), TREE, "in_specs", "p")
    assert [leaf.spec for leaf in leaves] == found
    assert [leaf.value is value for leaf, value in zip(leaves, optree.tree_leaves(TREE), strict=True)] == [True] * 7


def test_rules_stand_for_a_subtree_and_see_paths_from_there() -> None:
    specs = {"blocks": sf.by_path([(r"\d\.w", P("a")), (r"\d\.norm", P())]), "head": P("b"), "norm": ...}
    found = [leaf.spec for leaf in match(specs, TREE, "in_specs", "p")]
    assert found == [P(), P("a"), P(), P("a"), P("b"), ..., ...]


def test_rules_see_the_fields_of_a_named_tuple_by_name() -> None:
    specs = sf.by_path([(r"norm\.first", P("a")), (r".*", P())])
    assert [leaf.spec for leaf in match(specs, TREE, "in_specs", "p")][-2:] == [P("a"), P()]


def test_rules_see_one_tensor_as_the_empty_path() -> None:
    assert [leaf.spec for leaf in match(sf.by_path([("", P("a"))]), W, "in_specs", "p")] == [P("a")]


def test_rules_stop_at_a_value_that_carries_its_spec() -> None:
    specs = sf.by_path([(r"0", ...), (r"1", P())])
    assert [leaf.spec for leaf in match(specs, [CARRIER, W], "in_specs", "p")] == [..., P()]


@pytest.mark.parametrize(
    ("specs", "tree", "kind", "words"),
    [
        ({"w": P()}, {"w": W, "b": B}, ValueError, ["in_specs", "'b'", "prefix of p"]),
        ({"w": P(), "v": P()}, {"w": W}, ValueError, ["in_specs", "'v'", "prefix of p"]),
        ({"w": {"q": P()}}, {"w": W}, ValueError, ["in_specs['w']", "prefix of p"]),
        ([P()], [W, B], ValueError, ["in_specs", "prefix of p", "1 children", "2 children"]),
        ((P(), P()), [W, B], ValueError, ["in_specs", "prefix of p", "tuple", "list"]),
        ({"b": [P(), (P(),)]}, {"b": [W, (W, B)]}, ValueError, ["in_specs['b'][1]", "prefix of p"]),
        (None, W, ValueError, ["in_specs", "prefix of p", "P()"]),
        ("a", W, TypeError, ["in_specs is 'a'", "str", "write P('a')"]),
        ({"w": "a"}, {"w": W}, TypeError, ["in_specs['w'] is 'a'", "write P('a')"]),
        ({"w": [P(), 3]}, {"w": [W, B]}, TypeError, ["in_specs['w'][1] is 3", "int", "write P()"]),
        (("a", None), W, Exception, ["in_specs"]),
        (sf.by_path([("head", P())]), {"w": W, "head": X}, ValueError, ["in_specs", "no rule for w", "strict=False"]),
        (
            sf.by_path([(".*", P()), ("haed", P())]),
            {"head": X},
            ValueError,
            ["in_specs", "match no path: haed", "the paths are head", "strict=False"],
        ),
        (
            {"m": sf.by_path([("v", P())])},
            {"m": {"w": W}},
            ValueError,
            ["in_specs['m']", "no rule for w", "match no path: v"],
        ),
        (sf.by_path([("v", P())]), {}, ValueError, ["match no path: v"]),
    ],
    ids=str,
)
def test_specs_that_do_not_fit_say_where(specs: Any, tree: Any, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        match(specs, tree, "in_specs", "p")
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("rules", "kind", "words"),
    [
        ([("head", "a")], TypeError, ["by_path", "'a'", "P('a')"]),
        ([("head", None)], TypeError, ["by_path", "None", "P()"]),
        ([("(", P())], re.error, ["("]),
    ],
)
def test_rules_are_read_when_they_are_written(rules: Any, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        sf.by_path(rules)
    if kind is TypeError:
        assert [word for word in words if word not in str(caught.value)] == []


@st.composite
def cut_values(draw: st.DrawFn) -> tuple[dict[str, int], P, tuple[int, ...]]:
    sizes = draw(draws.mesh_sizes(max_world=12, max_axes=3))
    ndim = draw(st.integers(0, 4))
    spec = draw(draws.specs(ndim, tuple(sizes)))
    return sizes, spec, draw(draws.global_shapes(spec, sizes, ndim=ndim))


@given(drawn=cut_values())
def test_local_and_global_shapes_are_inverse_and_numpy_agrees(drawn: Any) -> None:
    sizes, spec, shape = drawn
    mesh = mesh_of(**sizes)
    local = sf.shards.local_shape(shape, spec, mesh)
    pieces = [np.zeros(shape)]
    for dim, names in enumerate(spec.by_dim()):
        for name in names:
            pieces = [part for piece in pieces for part in np.split(piece, sizes[name], axis=dim)]
    assert {piece.shape for piece in pieces} == {local}
    assert sf.shards.global_shape(local, spec, mesh) == shape
    assert all(type(n) is int for n in local)
    assert sf.shards.local_shape(torch.Size(shape), spec, mesh) == local
    assert sf.shards.local_shape(sf.shards.global_shape(shape, spec, mesh), spec, mesh) == shape


@pytest.mark.parametrize(
    ("shape", "spec", "words"),
    [
        (
            (6, 10),
            P(None, ("replica", "shard")),
            [
                "w",
                "(6, 10)",
                repr(P(None, ("replica", "shard"))),
                "dimension 1",
                "8 equal pieces",
                "replica 2 x shard 4",
            ],
        ),
        ((6, 10), P(None, ("replica", "shard")), ["10 does not divide by 8", "pad it to 16"]),
        ((3,), P("shard"), ["w", "(3,)", "shard 4", "3 does not divide by 4", "pad it to 4"]),
        ((1,), P("replica"), ["1 does not divide by 2", "pad it to 2"]),
        ((4,), P("shard", None), ["w", "(4,)", "1 dimension,", "P('shard', None) describes 2", "at most 1"]),
        ((), P("shard"), ["w", "()", "0 dimensions", "P('shard') describes 1", "write P() for a scalar"]),
        ((4,), P("model"), ["w", "P('model')", "unknown axis 'model'", "replica=2, shard=4"]),
        ((4,), P(("shard", "x")), ["w", "unknown axis 'x'", "replica=2, shard=4"]),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_say_why(shape: tuple[int, ...], spec: P, words: list[str]) -> None:
    mesh = mesh_of(replica=2, shard=4)
    with pytest.raises(ValueError, match=r"dimension|axis") as caught:
        sf.shards.local_shape(shape, spec, mesh, "w")
    assert [word for word in words if word not in str(caught.value)] == []
    if "divide" not in str(caught.value):
        with pytest.raises(ValueError, match=r"dimension|axis") as again:
            sf.shards.global_shape(shape, spec, mesh, "w")
        assert [word for word in words if word not in str(again.value)] == []


def test_an_empty_dimension_divides() -> None:
    mesh = mesh_of(a=2, b=3)
    assert sf.shards.local_shape((0, 6), P("a", "b"), mesh) == (0, 2)
    assert sf.shards.global_shape((0, 2), P("a", "b"), mesh) == (0, 6)
