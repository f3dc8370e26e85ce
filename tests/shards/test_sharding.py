"""Whole parameters to shards and back, and parameters that are made or streamed into shards."""

from __future__ import annotations

import random
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, distribute_tensor

import shardfn as sf
from shardfn import P, quant
from shardfn.testing import World
from shardfn.testing import strategies as draws
from shardfn.testing import world as shared_world
from tests.models import same

COMMUNICATING = settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Weights:
    w: Any
    b: Any


optree.register_pytree_node(
    Weights,
    lambda node: ((node.w, node.b), None, ("w", "b")),
    lambda _, children: Weights(*children),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


def strategies_on(sizes: dict[str, int]) -> list[sf.Placement]:
    names = tuple(sizes)
    found = [sf.full_shard(names), sf.full_shard(names[::-1]), sf.ddp(names), sf.strategies.shard_grad_op(names[-1])]
    if len(names) == 2:
        found += [
            sf.hybrid_shard(shard=names[1], replica=names[0]),
            sf.strategies.hybrid_shard_zero2(shard=names[0], replica=names[1]),
        ]
    return found


def there_and_back(tree: Any, sizes: dict[str, int], more: dict[str, Any]) -> bool:
    mesh = sf.make_mesh(device="cpu", **sizes)
    before = optree.tree_map(torch.clone, tree)
    for strategy in strategies_on(sizes):
        flat = sf.shard(tree, mesh, strategy, **more)
        assert all(x.is_contiguous() and x.ndim == 1 for x in optree.tree_leaves(flat))
        back = sf.unshard(flat)
        assert same(back, before), (strategy, back, before)
        own = {x.untyped_storage().data_ptr() for x in optree.tree_leaves(tree) if x.numel()}
        new = {x.untyped_storage().data_ptr() for x in optree.tree_leaves((flat, back)) if x.numel()}
        assert not own & new, "parameters are copied"
    return same(tree, before)


VARIED = {
    "dict": {"w": torch.arange(6.0).view(2, 3), "inner": {"b": torch.arange(5), "empty": {}}},
    "list": [torch.arange(3.0), {"x": torch.arange(4.0).double()}, (torch.ones(1),), None],
    "pair": Pair(torch.arange(5.0), [torch.zeros(0, 3), torch.tensor(4.0)]),
    "dataclass": Weights(torch.arange(9.0).view(3, 3).T, torch.arange(10)[::3]),
    "none": None,
    "nothing": {},
    "tuple": (torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor([True, False, True])),
    "complex": {"z": torch.complex(torch.arange(3.0), torch.ones(3)), "half": torch.ones(3).half()},
    "conj": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 4),
    "scalar": torch.tensor(3, dtype=torch.int16),
    "special": torch.tensor([float("nan"), -0.0, float("inf")]),
}


@pytest.mark.parametrize(
    ("n", "sizes"),
    [(1, {"a": 1}), (2, {"a": 2}), (2, {"a": 1, "b": 2}), (4, {"a": 4}), (4, {"a": 2, "b": 2}), (4, {"b": 4, "a": 1})],
    ids=str,
)
def test_every_kind_of_tree_comes_back_as_it_was(n: int, sizes: dict[str, int]) -> None:
    def body() -> None:
        for more in ({}, {"frozen": [".*w", "list.*"]}, {"stages": [""]}, {"stages": ["[^.]+"]}):
            assert there_and_back(VARIED, sizes, more)
        small: list[Any] = [torch.arange(5.0), [torch.arange(5.0)], {}, None, [], {"a": {}}]
        for one in small:
            assert there_and_back(one, sizes, {})

    shared_world(n, "threads").run(body)


@pytest.mark.world(2)
def test_every_kind_of_tree_comes_back_on_processes(world: World) -> None:
    assert all(world.run(there_and_back, {k: VARIED[k] for k in ("dict", "list", "complex", "tuple")}, {"a": 2}, {}))


@COMMUNICATING
@given(data=st.data())
def test_a_drawn_tree_comes_back_as_it_was(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 2, 4]))
    sizes = data.draw(draws.mesh_sizes(world=n))
    tree = data.draw(draws.pytrees(draws.tensors(dtype=draws.dtypes())))
    more = data.draw(st.sampled_from([{}, {"stages": [""]}, {"frozen": [".*"]}]))
    if not optree.tree_leaves(tree):
        more = {}
    assert all(shared_world(n, "threads").run(there_and_back, tree, sizes, more))


# --- stages ---


def boundaries(tree: Any, **more: Any) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat = sf.shard(tree, mesh, sf.full_shard("shard"), **more)
    nodes = optree.tree_leaves(flat, is_leaf=lambda x: isinstance(x, sf.shards.FlatShard))
    return [node.layout.stage for node in nodes]


def model() -> Any:
    return {
        "embed": {"wte": torch.ones(3, 2), "wpe": torch.ones(2)},
        "blocks": [{"attn": {"q": torch.ones(2), "k": torch.ones(2)}, "mlp": torch.ones(3)} for _ in range(2)],
        "pair": (torch.ones(2), {"x": torch.ones(1)}),
        "named": Pair(torch.ones(2), torch.ones(1)),
        "scale": torch.ones(()),
    }


@pytest.mark.parametrize(
    ("stages", "found"),
    [
        (None, ["blocks.0", "blocks.1", "embed", "named", "pair.0", "pair.1", "scale"]),
        ([""], [""]),
        (["[^.]+"], ["blocks", "embed", "named", "pair", "scale"]),
        (["embed", r"blocks\.\d+\.\w+", "pair", "named|scale"],
         ["blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "embed", "named", "pair", "scale"]),
    ],
)  # fmt: skip
@pytest.mark.world(2, "threads")
def test_where_one_stage_ends_and_the_next_begins(world: World, stages: Any, found: Any) -> None:
    assert world.run(boundaries, model(), stages=stages) == [found] * 2


@pytest.mark.world(2, "threads")
def test_lists_and_leaves_at_the_top(world: World) -> None:
    assert world.run(boundaries, [{"w": torch.ones(2)}, torch.ones(1)])[0] == ["0", "1"]
    assert world.run(boundaries, torch.ones(1))[0] == [""]
    assert world.run(boundaries, [[torch.ones(2), torch.ones(2)], (torch.ones(2),)])[0] in (
        ["0.0", "0.1", "1.0"],
        ["0", "1"],
    )


def groups() -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat = sf.shard({"s": VARIED["dict"], "t": VARIED["tuple"]}, mesh, sf.full_shard("shard"), frozen=["s.w"])
    assert set(flat["s"]) == {"float32 frozen", "int64 frozen"}
    assert set(optree.tree_leaves(flat["t"][0].layout.dtype)) == {torch.bfloat16}
    assert all(not flat["s"][key].layout.trainable for key in flat["s"])
    whole = sf.shard({"s": VARIED["dict"]}, mesh, sf.full_shard("shard"))
    assert set(whole["s"]) == {"float32", "int64 frozen"}
    assert sf.stage(lambda p: p["w"].sum() + p["inner"]["b"].sum())(whole["s"]) == 15 + 10


@pytest.mark.world(2, "threads")
def test_a_stage_with_several_dtypes_or_frozen_parameters_is_a_dict(world: World) -> None:
    world.run(groups)


def ties() -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    w = torch.arange(6.0).view(2, 3)
    plain = {"s": {"a": w, "b": w, "c": w.T, "d": w[:1], "e": w.clone()}}
    flat = sf.shard(plain, mesh, sf.full_shard("shard"))
    assert same(sf.unshard(flat), plain)
    kept = len(flat["s"].layout.entries)
    assert kept == 4
    rank = mesh.get_rank()

    def loss(p: Any) -> Tensor:
        return sf.stage(lambda p: (p["a"] * 2 + p["b"] * 3).sum() + p["c"].sum() + p["e"].sum() + 0 * p["d"].sum())(p)

    gradient = sf.unshard(sf.grad(lambda ps: loss(ps["s"]) * (rank + 1))(flat))["s"]
    n = sum(range(1, mesh.size() + 1))
    assert gradient["a"].tolist() == gradient["b"].tolist() == torch.full((2, 3), 5.0 * n).tolist()
    assert gradient["c"].tolist() == torch.full((3, 2), 1.0 * n).tolist()


@pytest.mark.world(2, "threads")
def test_a_tensor_at_several_places_of_a_stage_is_one_parameter(world: World) -> None:
    world.run(ties)


# --- cut over other axes too ---


def tensor_parallel(inputs: str, specs: Any) -> None:
    mesh = sf.make_mesh(shard=2, tensor=2, device="cpu")
    plain = {"block": {"up": torch.arange(24.0).view(4, 6), "down": torch.arange(12.0).view(6, 2), "b": torch.ones(6)}}
    index = mesh.get_local_rank("tensor")
    mine = {"up": plain["block"]["up"].chunk(2, 1)[index], "down": plain["block"]["down"].chunk(2, 0)[index]}
    mine["b"] = plain["block"]["b"].chunk(2)[index]
    tree = plain if inputs == "global" else {"block": mine}
    flat = sf.shard(tree, mesh, sf.full_shard("shard"), specs=specs, inputs=inputs)  # type: ignore[arg-type]
    sf.stage(lambda p: [torch.testing.assert_close(p[name], mine[name], rtol=0, atol=0) for name in mine])(
        flat["block"]
    )
    assert same(sf.unshard(flat), plain)
    by_path = {part.path: part for part in flat["block"].layout.ranges(mesh.get_rank())}
    for path, part in by_path.items():
        assert part.corner == {"block.up": (0, 3 * index), "block.down": (3 * index, 0), "block.b": (3 * index,)}[path]


MATRICES = sf.by_path([(r".*\.up", P(None, "tensor")), (r".*\.down", P("tensor")), (r".*\.b", P("tensor"))])


TREE = {"block": {"up": P(None, "tensor"), "down": P("tensor"), "b": P("tensor")}}


@pytest.mark.parametrize("inputs", ["global", "local"])
@pytest.mark.parametrize("specs", [MATRICES, TREE], ids=["rules", "tree"])
@pytest.mark.world(4, "threads")
def test_parameters_cut_over_another_axis(world: World, specs: Any, inputs: str) -> None:
    world.run(tensor_parallel, inputs, specs)


def one_spec_for_all() -> None:
    mesh = sf.make_mesh(tensor=2, shard=2, device="cpu")
    plain = {"a": torch.arange(8.0), "b": torch.arange(12.0).view(4, 3)}
    for strategy in (sf.full_shard("shard"), sf.ddp("shard")):
        flat = sf.shard(plain, mesh, strategy, specs=P("tensor"))
        assert same(sf.unshard(flat), plain)
        assert sf.stage(lambda p: p.numel())(flat["a"]) == 4
    assert same(sf.unshard(sf.shard(plain, mesh, sf.ddp(()), specs=P(("shard", "tensor")))), plain)


def a_prefix() -> None:
    """Of a tree with lists, and keys in which regular expressions would see more than a name."""
    mesh = sf.make_mesh(tensor=2, shard=2, device="cpu")
    plain = {"a.*": [{"w": torch.arange(8.0)}, (torch.ones(4), torch.ones(6))], "a": {"w": torch.ones(3)}}
    flat = sf.shard(plain, mesh, sf.full_shard("shard"), specs={"a.*": [P("tensor"), (P(), P("tensor"))], "a": P()})
    assert same(sf.unshard(flat), plain)
    shapes = sf.stage(lambda p: [tuple(x.shape) for x in optree.tree_leaves(p)])
    assert [shapes(p) for p in (*flat["a.*"], flat["a"])] == [[(4,)], [(4,), (3,)], [(3,)]]


@pytest.mark.world(4, "threads")
def test_specs_are_a_tree_prefix_of_the_parameters(world: World) -> None:
    world.run(a_prefix)


@pytest.mark.world(4, "threads")
def test_one_spec_for_all_parameters(world: World) -> None:
    world.run(one_spec_for_all)


# --- refusals, on every rank ---


def refused(how: str) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    first = mesh.get_rank() == 0
    full, w = sf.full_shard("shard"), torch.ones(2, 3)
    match how:
        case "two stages":
            return sf.shard({"a": {"w": w}, "b": {"v": w}}, mesh, full)
        case "values":
            return sf.shard({"a": {"w": w, "v": w + mesh.get_rank()}}, mesh, full)
        case "values of one element":
            return sf.shard({"a": {"w": w, "v": torch.tensor([1.0, 2.0 + mesh.get_rank()])}}, mesh, full)
        case "order of values":
            v = torch.arange(4.0) if first else torch.tensor([0.0, 2.0, 1.0, 3.0])
            return sf.shard({"a": {"w": w, "v": v}}, mesh, full)
        case "bytes in another order":
            v = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) if first else torch.tensor([[3.0, 4.0], [1.0, 2.0]])
            return sf.shard({"a": {"w": w, "v": v}}, mesh, full)
        case "shapes":
            return sf.shard({"a": {"w": w, "v": torch.ones(2 + mesh.get_rank())}}, mesh, full)
        case "dtypes":
            return sf.shard({"a": {"w": w, "v": torch.ones(2, dtype=torch.float64 if first else None)}}, mesh, full)
        case "paths":
            return sf.shard({"a": {"w": w, ("v" if first else "u"): torch.ones(2)}}, mesh, full)
        case "one rank fails":
            return sf.shard({"a": {"w": w, "v": torch.ones(2) if first else 3}}, mesh, full)
        case "axis":
            return sf.shard({"a": w}, mesh, sf.full_shard("sharp"))
        case "module":
            return sf.shard(torch.nn.Linear(2, 2), mesh, full)
        case "mesh":
            return sf.init_sharded({"a": w}, 0, full, full)  # type: ignore[arg-type]
        case "strategy":
            return sf.shard({"a": w}, mesh, "shard")  # type: ignore[arg-type]
        case "divides":
            other = sf.make_mesh(t=-1, s=1, device="cpu")
            return sf.shard({"a": {"v": torch.ones(3)}}, other, sf.full_shard("s"), specs=P("t"))
        case "both":
            return sf.shard({"a": {"v": torch.ones(4)}}, mesh, full, specs=P("shard"))
        case "no stage":
            return sf.shard({"a": {"w": w}, "b": torch.ones(2)}, mesh, full, stages=["a"])
        case "no match":
            return sf.shard({"a": {"w": w}}, mesh, full, frozen=["a.v"])
        case "no stage matches":
            return sf.shard({"a": {"w": w}}, mesh, full, stages=["", "b"])
        case "no spec matches":
            return sf.shard({"a": {"w": w}}, mesh, full, specs=sf.by_path([("a.v", P()), (".*", P())]))
        case "no place of the tree":
            return sf.shard({"a": {"w": w}, "b": {"w": w + 1}}, mesh, full, specs={"a": P()})
        case "another place":
            return sf.shard({"a": {"w": w}}, mesh, full, specs={"a": P(), "b": {"v": P()}})
        case "no spec":
            return sf.shard({"a": {"w": w}}, mesh, full, specs={"a": {"w": ("shard",)}})
        case "no rule":
            return sf.shard({"a": {"w": w}}, mesh, full, specs=sf.by_path([("a.v", P())]))
        case "int":
            return sf.shard({"a": {"w": w, "n": 3}}, mesh, full)
        case "shards":
            return sf.shard(sf.shard({"a": w}, mesh, full), mesh, full)
        case "dtensor":
            return sf.shard({"a": {"w": distribute_tensor(w, mesh, [Replicate()])}}, mesh, full)
        case "meta":
            return sf.shard({"a": {"w": w.to("meta")}}, mesh, full)
        case "number of stages":
            return sf.shard({"a": {"w": w}}, mesh, full, stages=2)  # type: ignore[arg-type]
        case "inputs":
            return sf.shard({"a": {"w": w}}, mesh, full, inputs="both")  # type: ignore[arg-type]
    raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("two stages", ValueError, ["b.v", "same tensor", "'a'"]),
        ("values", ValueError, ["a.v", "rank 0 has", "rank 1 has", "init_sharded"]),
        ("values of one element", ValueError, ["a.v", "rank 1 has"]),
        ("order of values", ValueError, ["a.v", "rank 1 has"]),
        ("bytes in another order", ValueError, ["a.v", "rank 1 has"]),
        ("shapes", ValueError, ["a.v: (2,)", "a.v: (3,)"]),
        ("dtypes", ValueError, ["float64"]),
        ("paths", ValueError, ["a.v", "a.u"]),
        ("one rank fails", (ValueError, TypeError), ["a.v", "int"]),
        ("axis", (ValueError, NameError), ["sharp", "shard"]),
        ("module", TypeError, ["of type Linear", "interop.functional(module).tree"]),
        ("mesh", TypeError, ["of type Placement, not a DeviceMesh"]),
        ("strategy", TypeError, ["Placement", "full_shard"]),
        ("divides", ValueError, ["a.v", "3"]),
        ("both", ValueError, ["a.v", "'shard'"]),
        ("no stage", ValueError, ["b is in no stage"]),
        ("no match", ValueError, ["'a.v'", "a.w"]),
        ("no stage matches", ValueError, ["'b'"]),
        ("no spec matches", ValueError, ["a.v"]),
        ("no place of the tree", ValueError, ["specs have nothing for b.w"]),
        ("another place", ValueError, ["nothing matches 'b.v'", "a.w"]),
        ("no spec", TypeError, ["specs['a']['w'][0] is 'shard', not a P"]),
        ("no rule", ValueError, ["a.w", "strict=False"]),
        ("int", TypeError, ["a.n", "int"]),
        ("shards", TypeError, ["a", "FlatShard"]),
        ("dtensor", TypeError, ["a.w", "full_tensor"]),
        ("meta", ValueError, ["a.w", "meta", "init_sharded"]),
        ("number of stages", TypeError, ["stages", "'2' of type int"]),
        ("inputs", ValueError, ["inputs", "local"]),
    ],
)
@pytest.mark.world(2, "threads")
def test_what_cannot_be_cut_is_refused_on_every_rank(world: World, how: str, kind: Any, words: list[str]) -> None:
    for error in world.errors(refused, how):
        assert isinstance(error, kind), error
        for word in words:
            assert word in str(error), (word, str(error))


@pytest.mark.parametrize("how", ["values", "one rank fails", "shapes"])
@pytest.mark.world(2)
def test_a_difference_is_met_on_processes_too(world: World, how: str) -> None:
    for error in world.errors(refused, how):
        assert isinstance(error, (ValueError, TypeError)), error
        assert "a.v" in str(error)


# --- made in place ---


def make_block(g: torch.Generator) -> Any:
    return {"w": torch.randn(4, 4, generator=g), "b": torch.zeros(4), "noise": torch.rand(3, generator=g)}


MAKERS: Any = {
    "embed": {"wte": lambda g: torch.randn(5, 4, generator=g)},
    "blocks": [make_block, make_block, {"w": lambda g: torch.randn(2, 2, generator=g), "b": torch.ones(3)}],
    "head": lambda g: {"out": torch.randn(4, 2, generator=g, dtype=torch.float64), "norm": torch.ones(4)},
    "nothing": None,
}


def made(sizes: dict[str, int]) -> Any:
    mesh = sf.make_mesh(device="cpu", **sizes)
    plain = sf.init(MAKERS, 7)
    for strategy in strategies_on(sizes):
        flat = sf.init_sharded(MAKERS, 7, mesh, strategy, frozen=["embed.*"])
        other = sf.shard(plain, mesh, strategy, frozen=["embed.*"])
        assert optree.tree_structure(flat) == optree.tree_structure(other)
        assert same(flat, other)
    return sf.unshard(flat)


def test_makers_give_the_same_parameters_on_every_mesh() -> None:
    plain = sf.init(MAKERS, 7)
    assert same(plain, sf.init(MAKERS, 7))
    assert not same(plain, sf.init(MAKERS, 8))
    assert not torch.equal(plain["blocks"][0]["w"], plain["blocks"][1]["w"])
    assert not torch.equal(plain["blocks"][0]["noise"], plain["blocks"][1]["noise"])
    for sizes in ({"a": 1}, {"a": 2}, {"a": 4}, {"a": 2, "b": 2}, {"b": 4, "a": 1}):
        n = torch.Size(sizes.values()).numel()
        for one in shared_world(n, "processes" if sizes == {"a": 2} else "threads").run(made, sizes):
            assert same(one, plain)


def dropped(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5)


CARELESS: dict[str, Any] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3, dtype=torch.float64),
    "randint": lambda: torch.randint(1, 9, (3,)).double(),
    "randperm": lambda: torch.randperm(9).double(),
    "like": lambda: torch.randn_like(torch.rand_like(torch.randint_like(torch.ones(3), 2, 9))),
    "normal": lambda: torch.normal(torch.zeros(3), 1.0) + torch.normal(0.0, 1.0, (3,)),
    "in place": lambda: torch.empty(3).uniform_().normal_().exponential_().log_normal_().cauchy_().geometric_(0.5),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)) + torch.empty(9).bernoulli_(0.5),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4).float(),
    "gamma": lambda: torch.distributions.Gamma(2.0, 1.0).sample((3,)) + torch.poisson(torch.full((3,), 4.0)),
    "module": lambda: torch.nn.Linear(3, 2).weight.detach(),
    "init": lambda: torch.nn.init.trunc_normal_(torch.nn.init.orthogonal_(torch.empty(3, 3))),
    "default device": lambda: torch.rand(3, device=torch.device("cpu")),
}


def careless() -> Any:
    """Makers that draw from torch's own generator."""
    makers = {"a": [lambda g, make=make: make() for make in CARELESS.values()]}
    mesh = sf.make_mesh(shard=-1, device="cpu")
    torch.manual_seed(mesh.get_rank())
    before, undisturbed = torch.get_rng_state(), dropped(torch.ones(64))
    torch.set_rng_state(before)
    flat = sf.init_sharded(makers, 7, mesh, sf.full_shard("shard"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(dropped(torch.ones(64)), undisturbed)
    assert len({tuple(row) for row in sf.unshard(flat)["a"][0][None].tolist()}) == 1
    return same(sf.unshard(flat), sf.init(makers, 7)), undisturbed.tolist()


@pytest.mark.world(2)
def test_makers_that_draw_from_the_global_generator_agree_and_leave_it_alone(world: World) -> None:
    (one, first), (other, second) = world.run(careless)
    assert one
    assert other
    assert first != second  # ranks go on with numbers of their own


@pytest.mark.parametrize("kind", CARELESS)
def test_a_maker_without_a_generator_draws_from_the_one_that_it_is_given(kind: str) -> None:
    torch.manual_seed(0)
    found = sf.init({"a": lambda g: CARELESS[kind](), "b": lambda g: CARELESS[kind]()}, 7)
    torch.manual_seed(1)
    again = sf.init({"a": lambda g: CARELESS[kind](), "c": lambda g: CARELESS[kind]()}, 7)
    assert same(found["a"], again["a"])
    assert not same(found["a"], found["b"])
    assert not same(sf.init(lambda g: [CARELESS[kind](), CARELESS[kind]()], 7)[0], found["a"])


def test_a_generator_that_is_passed_and_one_that_is_not_give_one_stream() -> None:
    both = sf.init(lambda g: [torch.rand(3, generator=g), torch.rand(3)], 7)
    assert same(both, sf.init(lambda g: list(torch.rand(6, generator=g).split(3)), 7))
    own = torch.Generator().manual_seed(5)
    assert same(sf.init(lambda g: torch.rand(3, generator=own), 7), torch.rand(3, generator=own.manual_seed(5)))


def seeded(g: torch.Generator) -> Tensor:
    torch.manual_seed(3)
    return torch.rand(3)


def seeded_apart(g: torch.Generator) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return seeded(g)


def seeded_afterwards(g: torch.Generator) -> Tensor:
    made = torch.rand(3)
    torch.manual_seed(3)
    return made


@pytest.mark.parametrize(
    "maker", [seeded, seeded_apart, seeded_afterwards, lambda g: torch.native_dropout(torch.ones(3), 0.5, True)[0]]
)
def test_a_maker_that_seeds_for_itself_is_refused(maker: Any) -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"the maker of a.w (seeds|draws from) torch's own generator.*Draw from"):
        sf.init({"a": {"w": maker}}, 7)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(sf.init({"a": lambda g: torch.native_dropout(torch.ones(3), 0.5, False)[0]}, 7), {"a": torch.ones(3)})


def one_stage_at_a_time(depth: int) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    alive: list[Any] = []
    order, most = [], 0

    def maker(number: int) -> Any:
        def make(g: torch.Generator) -> Any:
            nonlocal most
            made = {"w": torch.randn(8, 8, generator=g), "v": torch.randn(8, 8, generator=g)}
            order.append(number)
            alive.extend((number, weakref.ref(x)) for x in made.values())
            most = max(most, len({k for k, ref in alive if ref() is not None}))
            return made

        return make

    makers = {"blocks": [maker(i) for i in range(depth)], "head": maker(depth)}
    sf.init_sharded(makers, 0, mesh, sf.full_shard("shard"))
    return order, most, sum(ref() is not None for _, ref in alive)


@pytest.mark.parametrize("world", [(1, "threads"), (2, "threads")], indirect=True, ids=["1", "2"])
def test_makers_are_called_stage_by_stage_and_only_one_stage_is_whole(world: World) -> None:
    for order, most, left in world.run(one_stage_at_a_time, 5):
        assert order == list(range(6))
        assert most == 1
        assert left == 0


def from_meta() -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    like = {
        "a": {"w": torch.empty(3, 4, device="meta"), "b": torch.empty(4, device="meta")},
        "c": lambda g: {"d": torch.empty(5, device="meta", dtype=torch.float64)},
    }
    met = []

    def fill(path: str, x: Tensor, g: torch.Generator) -> Tensor:
        met.append((path, x.is_meta))
        return torch.randn(x.shape, generator=g, dtype=x.dtype) if x.ndim > 1 else torch.rand(x.shape, dtype=x.dtype)

    flat = sf.init_sharded(like, 3, mesh, sf.full_shard("shard"), fill=fill)
    assert met == [("a.b", True), ("a.w", True), ("c.d", True)]
    assert same(sf.unshard(flat), sf.init(like, 3, fill=fill))
    sf.init_sharded(like, 3, mesh, sf.full_shard("shard"))


@pytest.mark.world(2)
def test_meta_tensors_are_filled_by_path(world: World) -> None:
    for error in world.errors(from_meta):
        assert isinstance(error, ValueError)
        assert "a.b is on the meta device" in str(error)


def filled_in_few_bits() -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    like = {
        "a": {"w": torch.empty(3, 64, device="meta"), "b": torch.empty(4, device="meta")},
        "c": lambda g: {"d": torch.empty(65, 2, device="meta", dtype=torch.float64)},
        "e": torch.empty(64, 2, device="meta"),
    }
    asked = []

    def fill(path: str, x: Tensor, g: torch.Generator) -> Tensor:
        asked.append((path, tuple(x.shape), x.dtype))
        return torch.randn(x.shape, generator=g, dtype=x.dtype)

    few = {**like, "c": like["c"](None)}  # type: ignore[operator]
    few = quant.quantize(few, quant.nf4(double=True), ["a.w", "c.d", "e"])
    flat = sf.init_sharded(few, 3, mesh, sf.full_shard("shard"), fill=fill)
    want = quant.quantize(sf.init(like, 3, fill=fill), quant.nf4(double=True), ["a.w", "c.d", "e"])
    assert asked[:4] == asked[4:]
    assert same(sf.unshard(flat), want)
    assert same(sf.init(few, 3, fill=fill), want)
    assert sf.unshard(flat)["c"]["d"].dtype == torch.float64


@pytest.mark.world(2)
def test_what_is_kept_in_few_bits_is_filled_with_the_parameter(world: World) -> None:
    world.run(filled_in_few_bits)


@pytest.mark.parametrize(
    ("fill", "kind", "told"),
    [
        (lambda path, x, g: torch.ones(3, 64, dtype=torch.float64), TypeError, "of torch.float64 for a.w"),
        (lambda path, x, g: torch.ones(2, 2), ValueError, r"shape \[2, 2\] for a.w, which has \[3, 64\]"),
        (lambda path, x, g: None, TypeError, "of type NoneType for a.w, which is a tensor of torch.float32"),
    ],
)
@pytest.mark.parametrize("few", [False, True])
def test_what_fill_returns_is_what_it_was_asked_for(fill: Any, kind: type[Exception], told: str, few: bool) -> None:
    like: Any = {"a": {"w": torch.empty(3, 64, device="meta")}}
    with pytest.raises(kind, match=told):
        sf.init(quant.quantize(like, quant.nf4()) if few else like, 0, fill=fill)


# --- streamed ---


def stream(how: str, seed: int = 0, sizes: Any = None) -> Any:
    mesh = sf.make_mesh(device="cpu", **(sizes or {"shard": -1}))
    axes = tuple(sizes or ["shard"])
    plain = sf.init(MAKERS, 7)
    paths = [".".join(map(str, path)) for path in optree.tree_paths(plain)]
    named = list(zip(paths, optree.tree_leaves(plain), strict=True))
    random.Random(seed).shuffle(named)
    like = optree.tree_map(lambda x: torch.empty_like(x, device="meta"), plain)
    match how:
        case "missing":
            named = [one for one in named if one[0] not in ("blocks.0.w", "head.out")]
        case "unknown":
            named.insert(3, ("blocks.0.q", torch.ones(2)))
        case "twice":
            named.append(named[0])
        case "shape":
            named = [(name, x.T if name == "embed.wte" else x) for name, x in named]
        case "dtype":
            named = [(name, x.double() if name == "embed.wte" else x) for name, x in named]
        case "differs":
            named = [(name, x + mesh.get_rank() if name == "embed.wte" else x) for name, x in named]
        case "other order":
            random.Random(mesh.get_rank()).shuffle(named)
        case "one rank's is missing":
            named = named[: len(named) - mesh.get_rank()]
        case "values on one rank only":
            named = [(name, x * 0 if mesh.get_rank() else x) for name, x in named]
    flat = sf.shards.shard_named(iter(named), like, mesh, sf.full_shard(axes), frozen=["embed.*"])
    assert same(flat, sf.shard(plain, mesh, sf.full_shard(axes), frozen=["embed.*"]))
    return sf.unshard(flat)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [{"a": 4}, {"a": 2, "b": 2}], ids=str)
@pytest.mark.world(4, "threads")
def test_named_tensors_come_in_any_order(world: World, seed: int, sizes: Any) -> None:
    for got in world.run(stream, "", seed, sizes):
        assert same(got, sf.init(MAKERS, 7))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", ["no tensor came for", "blocks.0.w", "head.out"]),
        ("unknown", ["'blocks.0.q' is not a parameter", "blocks.0.b"]),
        ("twice", ["came twice"]),
        ("shape", ["embed.wte", "(4, 5)", "(5, 4)"]),
        ("dtype", ["embed.wte", "float64", "float32"]),
        ("differs", ["embed.wte", "rank 1 has"]),
        ("one rank's is missing", []),
        ("values on one rank only", ["blocks.0.", "sum", "rank 0 has"]),
    ],
)
@pytest.mark.world(2, "threads")
def test_a_stream_that_does_not_fit_is_refused_on_every_rank(world: World, how: str, words: list[str]) -> None:
    for error in world.errors(stream, how):
        assert isinstance(error, ValueError), error
        for word in words:
            assert word in str(error), (word, str(error))


def one_rank_fails() -> None:
    mesh = sf.make_mesh(device="cpu", shard=2)
    tree = {"w": torch.ones(4)} if mesh.get_rank() else {"w": torch.ones(4), "v": 3}
    sf.shard(tree, mesh, sf.full_shard("shard"))


@pytest.mark.world(2, "threads")
def test_a_rank_whose_own_parameters_are_fine_hears_what_is_wrong_on_another(world: World) -> None:
    own, other = world.errors(one_rank_fails)
    assert isinstance(own, TypeError)
    assert str(other) == f"shard: rank 0 failed: {own}"


@pytest.mark.world(2, "threads")
def test_ranks_may_read_a_stream_in_different_orders(world: World) -> None:
    for got in world.run(stream, "other order"):
        assert same(got, sf.init(MAKERS, 7))


def streaming_peak() -> Any:
    """No tensor of the stream is kept."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    like = {"blocks": [torch.empty(64, device="meta") for _ in range(6)]}
    refs: list[Any] = []

    def named() -> Any:
        for i in range(6):
            assert sum(ref() is not None for ref in refs) <= 1
            x = torch.full((64,), float(i))
            refs.append(weakref.ref(x))
            yield f"blocks.{i}", x
            del x

    sf.shards.shard_named(named(), like, mesh, sf.full_shard("shard"))
    return sum(ref() is not None for ref in refs)


@pytest.mark.world(2, "threads")
def test_a_stream_is_cut_as_it_comes(world: World) -> None:
    assert world.run(streaming_peak) == [0, 0]


# --- unshard ---


def unshard_more(cosines: Any) -> Any:
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    plain = {"a": {"w": torch.arange(6.0).double()}, "b": torch.arange(5.0).double()}
    flat = sf.shard(plain, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    mixed = sf.unshard({"p": flat, "step": 3, "none": None, "x": torch.ones(2)})
    assert mixed["step"] == 3
    assert same(mixed["p"], plain)
    assert same(sf.unshard(flat, mesh), plain)
    with sf.collectives.ledger() as log:
        sf.unshard(flat)
    assert [(one.op, one.axis) for one in log.records] == [("all_gather", ("shard",))] * 2
    # linear and V -> I: what all ranks hold has one gradient, of which each gets its piece
    c = sf.shard(cosines, mesh, sf.hybrid_shard(shard="shard", replica="replica"))
    g = torch.func.grad(lambda p: sum(x.sin().sum() for x in optree.tree_leaves(sf.unshard(p))))(flat)
    return max((x - y).abs().max().item() for x, y in zip(optree.tree_leaves(sf.unshard(g)),
                                                        optree.tree_leaves(sf.unshard(c)), strict=True))  # fmt: skip


@pytest.mark.world(4, "threads")
def test_unshard_leaves_the_rest_and_is_differentiable(world: World) -> None:
    assert (
        max(
            world.run(
                unshard_more, {"a": {"w": torch.arange(6.0).double().cos()}, "b": torch.arange(5.0).double().cos()}
            )
        )
        < 1e-12
    )


def unshard_elsewhere() -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat = sf.shard({"a": torch.ones(3)}, mesh, sf.full_shard("shard"))
    return sf.unshard(flat, sf.make_mesh(data=-1, device="cpu"))


@pytest.mark.world(2, "threads")
def test_unshard_on_another_mesh_is_refused(world: World) -> None:
    for error in world.errors(unshard_elsewhere):
        assert isinstance(error, ValueError)
        assert "'a'" in str(error)
