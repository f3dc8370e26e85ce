"""Which parameters are meant is said by a pattern, by several, or by a function, wherever it is asked."""

from __future__ import annotations

import re
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P
from shardfn.mesh.selectors import chosen
from shardfn.testing import World
from shardfn.testing import world as shared_world

WAYS: dict[str, Any] = {
    "pattern": r"blocks\.\d\.w",
    "patterns": [r"blocks\.0\.w", r"blocks\.1\..*w"],
    "generator": (rf"blocks\.{i}\.w" for i in range(2)),
    "function": lambda path, shape: path.startswith("blocks") and shape == (4, 6),
}


def whole() -> dict[str, Any]:
    def layer() -> dict[str, Tensor]:
        return {"w": torch.ones(4, 6), "b": torch.ones(6)}

    return {"blocks": [layer(), layer()], "head": torch.ones(4)}


def as_any(x: Any) -> Any:
    return x


def frozen_paths(tree: Any) -> list[str]:
    flats = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, sf.shards.FlatShard))
    return sorted(entry.path for flat in flats if not flat.layout.trainable for entry in flat.layout.entries)


def by_all_ways() -> dict[str, Any]:
    mesh = sf.make_mesh(shard=1, tensor=2, device="cpu")
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        which = list(way) if name == "generator" else way
        flat = sf.shard(whole(), mesh, sf.full_shard("shard"), frozen=iter(which) if name == "generator" else which)
        yes, no = sf.shards.partition(whole(), which)
        params = whole()
        opt = so.masked(so.sgd(1.0), which)
        state = opt.init(params)
        params, _ = opt.step(params, optree.tree_map(torch.ones_like, params), state)
        found[name] = {
            "frozen": frozen_paths(flat),
            "init": frozen_paths(sf.init_sharded(whole(), 0, mesh, sf.full_shard("shard"), frozen=which)),
            "named": frozen_paths(
                sf.shards.shard_named(
                    [(f"blocks.{i}.{n}", whole()["blocks"][i][n]) for i in (0, 1) for n in "wb"]
                    + [("head", torch.ones(4))],
                    whole(), mesh, sf.full_shard("shard"), frozen=which,
                )
            ),
            "partition": [len(optree.tree_leaves(part)) for part in (yes, no)],
            "masked": [float(x.sum()) for x in optree.tree_leaves(params)],
        }  # fmt: skip
    cut: dict[str, Any] = {
        "by_path": sf.by_path([(r"blocks\..*w", P(None, "tensor"))], strict=False),
        "function": lambda path, shape: P(None, "tensor") if len(shape) == 2 else P(),
    }
    found["specs"] = {
        str(sf.shard(whole(), mesh, sf.full_shard("shard"), specs=specs)["blocks"][0].layout.entries)
        for specs in cut.values()
    }
    stages: dict[str, Any] = {
        "pattern": r"blocks|head",
        "function": lambda path, shape: path == "blocks" or shape == (4,),
    }
    found["stages"] = {
        str(list(sf.shard(whole(), mesh, sf.full_shard("shard"), stages=which)["blocks"].layout.entries))
        for which in stages.values()
    }
    return found


@pytest.mark.world(2)
def test_parameters_are_chosen_by_patterns_or_a_function_everywhere(world: World) -> None:
    for found in world.run(by_all_ways):
        wanted = ["blocks.0.w", "blocks.1.w"]
        for name in WAYS:
            assert found[name] == {
                "frozen": wanted, "init": wanted, "named": wanted, "partition": [2, 3],
                "masked": [6.0, 0.0, 6.0, 0.0, 4.0],
            }  # fmt: skip
        assert len(found["specs"]) == len(found["stages"]) == 1


WRONG: dict[str, tuple[Any, str]] = {
    "a number": (3, "says which parameters"),
    "a list of numbers": ([1], "says which parameters"),
    "a class": (dict, "says which parameters"),
    "not a regular expression": ("blocks.(", r"'blocks.(' is not a regular expression"),
    "nothing matches": ("block", "nothing matches"),
}


@pytest.mark.parametrize(("which", "says"), WRONG.values(), ids=list(WRONG))
def test_what_chooses_nothing_is_refused(which: Any, says: str) -> None:
    refusing = {
        "frozen": lambda: sf.shard(whole(), sf.make_mesh(shard=-1, device="cpu"), sf.ddp("shard"), frozen=which),
        "stages": lambda: sf.shard(whole(), sf.make_mesh(shard=-1, device="cpu"), sf.ddp("shard"), stages=which),
        "partition": lambda: sf.shards.partition(whole(), which),
        "masked": lambda: so.masked(so.sgd(1.0), which).init(whole()),
    }

    def body() -> dict[str, str]:
        said = {}
        for name, call in refusing.items():
            with pytest.raises((TypeError, ValueError)) as caught:
                call()
            said[name] = str(caught.value)
        return said

    (said,) = shared_world(1, "threads").run(body)
    for name, text in said.items():
        told = {"stages": "is in no stage", "masked": "no parameter has a path that as a whole matches 'block'"}
        found = told.get(name, says) if says == "nothing matches" else says
        assert re.search(re.escape(found), text), (name, text)
        assert name in text or says == "nothing matches", text


def test_a_function_that_returns_no_spec_is_refused() -> None:
    def body() -> None:
        mesh = sf.make_mesh(shard=-1, device="cpu")
        with pytest.raises(TypeError, match=r"blocks\.0\.b: specs is a function that returned 'tensor', not a P"):
            sf.shard(whole(), mesh, sf.ddp("shard"), specs=lambda path, shape: as_any("tensor"))

    shared_world(1, "threads").run(body)


def test_patterns_match_whole_paths() -> None:
    assert chosen("head", "x")("head", ())
    assert not chosen("head", "x")("head.w", ())
    assert chosen(["a", "b"], "x").unused(["a.b", "b"]) == {"a"}
