"""A parameter has one name, wherever it is asked: its keys joined by dots, to which an empty key adds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import checkpoint
from shardfn.checkpoint.contents import contents
from shardfn.checkpoint.team import CheckpointError
from shardfn.checkpoint.tools import consolidate
from shardfn.shards.layout import is_flat
from shardfn.testing import world as shared_world
from tests.models import zeros

KEYS = st.sampled_from(["", "a", "b.c", "norm.weight", "layers.0", "float32"])
LEAVES = st.sampled_from([torch.float32, torch.float64, torch.int64])
NODES = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=2),
    max_leaves=5,
)
TREES = st.dictionaries(KEYS, NODES, min_size=1, max_size=4)


def walked(node: Any, *keys: Any) -> Iterator[tuple[str, torch.dtype]]:
    """The names of a tree's leaves, by the rule as it is said."""
    if isinstance(node, torch.dtype):
        yield ".".join(str(key) for key in keys if str(key) != ""), node
        return
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield from walked(child, *keys, key)


def everywhere(tree: Any, stages: str | None) -> dict[str, set[str]]:
    """The names that each part of the library gives the parameters of a tree."""
    mesh = sf.make_mesh(shard=1, device="cpu")
    whole = optree.tree_map(lambda dtype: torch.ones(2, 3, dtype=dtype), tree)
    asked: dict[str, set[str]] = {name: set() for name in ("strategy", "specs", "frozen", "decay", "chosen", "makers")}

    def hears(name: str, answer: Any) -> Any:
        def ask(path: str, shape: tuple[int, ...]) -> Any:
            asked[name].add(path)
            return answer

        return ask

    def maker(dtype: torch.dtype) -> Any:
        return lambda generator: torch.empty(2, 3, dtype=dtype, device="meta")

    more: dict[str, Any] = {} if stages is None else {"stages": stages}
    flat = sf.shard(
        whole, mesh, hears("strategy", sf.full_shard("shard")), specs=hears("specs", sf.P()),
        frozen=hears("frozen", False), **more,
    )  # fmt: skip

    def fill(path: str, x: Tensor, generator: torch.Generator) -> Tensor:
        asked["makers"].add(path)
        return torch.ones_like(x, device="cpu")

    sf.init_sharded(optree.tree_map(maker, tree), 0, mesh, sf.full_shard("shard"), fill=fill, **more)
    shards = [x for x in optree.tree_leaves(flat, is_leaf=is_flat) if is_flat(x)]
    found = {
        "shards": {entry.path for one in shards for entry in one.layout.entries},
        "local": {name for one in shards for name in sf.shards.local_parameters(one)},
        "named": {path for one in shards for path in (entry.path for entry in one.layout.entries)},
    }
    for kind, params in (("cut", flat), ("whole", whole)):
        held = contents({"model": params}, shared=False)
        found[f"contents, {kind}"] = {name.removeprefix("model").removeprefix(".") for name in held.tensors}
        found[f"keys, {kind}"] = {".".join(str(key) for key in keys[1:] if str(key)) for keys in held.keys.values()}
        asked["chosen"].clear()
        sf.shards.partition(params, hears("chosen", True))
        found[f"partition, {kind}"] = set(asked["chosen"])
        asked["decay"].clear()
        optimizer = so.sgd(0.1, weight_decay=hears("decay", 0.0))
        optimizer.step(params, optree.tree_map(torch.ones_like, params), optimizer.init(params))
        found[f"decay, {kind}"] = set(asked["decay"])
    return found | {name: asked[name] for name in ("strategy", "specs", "frozen", "makers")}


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(tree=TREES, stages=st.sampled_from([None, "", ".*"]))
def test_a_parameter_has_one_name_wherever_it_is_asked(tree: Any, stages: str | None) -> None:
    names = list(walked(tree))
    distinct = len({name for name, _ in names}) == len(names)
    trained = {name for name, dtype in names if dtype.is_floating_point}

    def body() -> None:
        if not names:
            return
        if not distinct:
            with pytest.raises(ValueError, match="two parameters are called"):
                everywhere(tree, stages)
            return
        for what, found in everywhere(tree, stages).items():
            asked = trained if what.startswith("decay") else {name for name, _ in names}
            assert found == asked, what

    shared_world(1, "threads").run(body)


LOOSE: dict[str, Any] = {
    "": {"norm.weight": torch.arange(3.0), "": {"scale": torch.ones(2, dtype=torch.float64)}},
    "layers.0": {"w": torch.arange(4.0), "n": torch.arange(2), "": torch.ones(1)},
    "layers.1": {"w": torch.arange(5.0), "n": torch.arange(7), "": torch.zeros(1)},
}
NAMES = {
    "norm.weight": 3, "scale": 2, "layers.0.w": 4, "layers.0.n": 2, "layers.0": 1, "layers.1.w": 5, "layers.1.n": 7,
    "layers.1": 1,
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_loose_parameters_are_saved_under_their_names_however_they_are_held(strategy: str, tmp_path: Path) -> None:
    """From flat shards of several dtypes to whole tensors under plain names, and to another tree's shards."""

    def body() -> None:
        mesh, place = sf.make_mesh(shard=1, device="cpu"), sf.strategies.from_name(strategy)
        params = sf.shard(LOOSE, mesh, place)
        checkpoint.save(tmp_path / "one", {"model": params, "optimizer": so.adamw(0.1).init(params)})
        plain = {name: torch.zeros(n) for name, n in NAMES.items()}
        plain |= {name: x.long() for name, x in plain.items() if name.endswith(".n")}
        plain["scale"] = plain["scale"].double()
        found = checkpoint.load(tmp_path / "one", {"model": plain}, ignore=r"optimizer\..*")["model"]
        assert found["norm.weight"].equal(LOOSE[""]["norm.weight"])
        assert found["layers.1.n"].equal(LOOSE["layers.1"]["n"])
        other = sf.shard(zeros(LOOSE), mesh, sf.ddp("shard"), stages="", frozen=r"layers\.0.*")
        back = sf.unshard(checkpoint.load(tmp_path / "one", {"model": other}, ignore=r"optimizer\..*")["model"])
        assert optree.tree_all(optree.tree_map(torch.equal, back, LOOSE))

    shared_world(1, "threads").run(body)


def test_a_loose_parameter_loses_a_prefix_like_any_other(tmp_path: Path) -> None:
    def body() -> None:
        params = sf.shard(LOOSE, sf.make_mesh(shard=1, device="cpu"), sf.full_shard("shard"))
        checkpoint.save(tmp_path / "one", {"model": params})

    shared_world(1, "threads").run(body)
    consolidate(tmp_path / "one", tmp_path / "one.pt", pattern=r"model\.norm.*", strip="model.norm.")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert isinstance(found["weight"], Tensor)


TWICE: dict[str, Any] = {
    "an empty key": {"": {"w": torch.ones(2)}, "w": torch.zeros(2)},
    "a dot": {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)},
    "in one stage": {"s": {"": {"w": torch.ones(2)}, "w": torch.zeros(2)}},
}


@pytest.mark.parametrize("tree", TWICE.values(), ids=list(TWICE))
def test_two_parameters_of_one_name_are_refused(tree: Any) -> None:
    def body() -> None:
        mesh = sf.make_mesh(shard=1, device="cpu")
        makers = optree.tree_map(lambda x: lambda generator: x.clone(), tree)
        refusing = [
            lambda: sf.shard(tree, mesh, sf.full_shard("shard")),
            lambda: sf.shards.shard_named([], tree, mesh, sf.full_shard("shard")),
            lambda: sf.init_sharded(makers, 0, mesh, sf.full_shard("shard")),
            lambda: sf.init(makers, 0),
        ]
        for refuse in refusing:
            with pytest.raises(ValueError, match=r"two parameters are called '(s\.)?(w|a\.b)'"):
                refuse()
        with pytest.raises((ValueError, CheckpointError), match="have the name"):
            contents(tree, shared=False)

    shared_world(1, "threads").run(body)


def test_init_and_init_sharded_draw_the_same_for_empty_keys() -> None:
    def draw(generator: torch.Generator) -> Tensor:
        return torch.randn(3, generator=generator)

    def body() -> None:
        makers = {"a": {"": draw, "b": draw}, "": {"c": draw}, "d": [{"": draw}]}
        params = sf.init_sharded(makers, 3, sf.make_mesh(shard=1, device="cpu"), sf.full_shard("shard"))
        whole = sf.init(makers, 3)
        assert optree.tree_all(optree.tree_map(torch.equal, sf.unshard(params), whole))
        assert len({tuple(x.tolist()) for x in optree.tree_leaves(whole)}) == 4

    shared_world(1, "threads").run(body)
