"""Trees of several models, each sharded by a call of its own, so that parameters have the same paths in each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.shards.pieces import units
from shardfn.testing import world
from tests.models import distance
from tests.reference import worst

OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "sgd": lambda: so.sgd(0.1, momentum=0.9),
    "adamw": lambda: so.adamw(0.1),
    "adamw, decay by rule": lambda: so.adamw(0.1, weight_decay=lambda path, shape: 0.1 if len(shape) > 1 else 0.0),
    "adafactor": lambda: so.adafactor(0.1),
    "lamb": lambda: so.lamb(0.1),
    "lion8bit": lambda: so.lion8bit(0.1),
    "adamw8bit": lambda: so.adamw8bit(0.1),
    "muon": lambda: so.masked(so.muon(0.1), lambda path, shape: len(shape) == 2, so.adamw(0.1)),
    "shampoo": lambda: so.shampoo(1e-2, ridge=1e-6, every=2, block=5),
    "kl_shampoo": lambda: so.kl_shampoo(1e-2, ridge=1e-6, every=2, block=5),
    "sophia": lambda: so.sophia(1e-2),
    "soap": lambda: so.soap(1e-2, every=2, block=5),
    "ema": lambda: so.ema(so.adamw(0.1), 0.9),
    "shard_state": lambda: so.shard_state(so.adamw(0.1), "replica"),
    "torch's": lambda: so.from_torch(torch.optim.RMSprop, lr=0.1),
}
STRATEGIES = {
    "hybrid": sf.hybrid_shard(shard="shard", replica="replica"),
    "full": sf.full_shard(("replica", "shard")),
    "none": None,
}
SHAPES: dict[str, tuple[dict[str, tuple[int, ...]], ...]] = {
    "alike": ({"w": (3, 5), "b": (5,)}, {"w": (3, 5), "b": (5,)}),
    "of other shapes": ({"w": (3, 5), "b": (5,)}, {"w": (4, 2), "b": (3,)}),
    "with other names": ({"w": (3, 5)}, {"w": (3, 5), "b": (3,)}),
}


def models(shapes: str, strategy: str) -> tuple[Any, list[Any]]:
    mesh, g = sf.make_mesh(device="cpu", replica=2, shard=2), torch.Generator().manual_seed(0)

    def drawn(shapes: dict[str, tuple[int, ...]]) -> Any:
        made = [{k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in shapes.items()} for _ in range(2)]
        whole = {"blocks": made}
        placement = STRATEGIES[strategy]
        return whole if placement is None else sf.shard(whole, mesh, placement)

    return mesh, [drawn(each) for each in SHAPES[shapes]]


def whole(tree: Any) -> list[Tensor]:
    return [x.detach().clone() for x in optree.tree_leaves(sf.unshard(tree))]


def gradients(tree: Any, scale: float) -> Any:
    return optree.tree_map(lambda x: torch.sin(x.detach()) * scale, tree)


def stepped(name: str, shapes: str, strategy: str) -> float:
    """How far steps on a tree of two models are from steps on each."""
    found: list[list[Tensor]] = []
    for together in (True, False):
        _, (a, b) = models(shapes, strategy)
        trees = [{"actor": a, "critic": b}] if together else [a, b]
        done: list[Tensor] = []
        for tree in trees:
            opt = OPTIMIZERS[name]()
            state = opt.init(tree)
            for n in range(3):
                tree, state = opt.step(tree, gradients(tree, 1.0 + n), state)
            done += whole(tree)
        found.append(done)
    return distance(found[0], found[1])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_several_models_are_those_on_each(name: str, shapes: str, strategy: str) -> None:
    if name == "shard_state" and strategy != "hybrid":
        strategy = "hybrid"  # the others have no replicas
    assert worst(world(4).run(stepped, name, shapes, strategy)) < 1e-12


def measured(shapes: str, strategy: str, nesting: str) -> tuple[list[float], list[float]]:
    """Norms of a tree of two models, and what they are; `nesting` says how the tree is made."""
    _, (a, b) = models(shapes, strategy)
    trees = {
        "named": {"actor": a, "critic": b},
        "listed": [a, b],
        "parts": [a["blocks"], b["blocks"]],
        "single stages": (a["blocks"][0], b["blocks"][0]),
        "deep": {"x": [{"blocks": a}, b]},
    }
    tree = trees[nesting]
    every = torch.cat([x.flatten() for x in whole(tree)])
    norms = so.norms(tree)
    clip = so.clip_by_global_norm(0.1)
    clipped, _ = clip.update(tree, gradients(tree, 1.0), clip.init(tree))
    names = [path for unit in units(tree).each for path in [segment.path for segment in unit.segments]]
    assert len(names) == len(set(names)), names
    got = [so.global_norm(tree), norms.total, sum(x**2 for x in norms.parameters.values()) ** 0.5,
           so.vdot(tree, tree), torch.cat([x.flatten() for x in whole(clipped)]).norm()]  # fmt: skip
    total = every.norm()
    return [float(x) for x in got], [float(x) for x in (total, total, total, total**2, min(0.1, every.sin().norm()))]


@pytest.mark.parametrize(("shapes", "strategy"), [*itertools.product(SHAPES, STRATEGIES)])
@pytest.mark.parametrize("nesting", ["named", "listed", "parts", "single stages", "deep"])
def test_norms_count_every_element_of_every_model(shapes: str, strategy: str, nesting: str) -> None:
    for got, want in world(4).run(measured, shapes, strategy, nesting):
        assert got == pytest.approx(want, rel=1e-12)


def seen() -> tuple[list[str], list[str], list[str]]:
    """The paths that rules see: of `masked`, of `partition`, and of `masked` within `masked`."""
    _, (a, b) = models("alike", "hybrid")
    tree, asked = {"actor": a, "critic": b}, list[list[str]]()

    def rule(path: str, shape: tuple[int, ...]) -> bool:
        asked[-1].append(path)
        return "blocks.0" in path

    for run in (
        lambda: so.masked(so.sgd(1.0), rule, so.adamw(1.0)).init(tree),
        lambda: sf.shards.partition(tree, rule),
        lambda: so.masked(so.masked(so.sgd(1.0), rule, so.adamw(1.0)), lambda p, s: True, so.sgd(1.0)).init(tree),
    ):
        asked.append([])
        run()
    first, second, third = ([*dict.fromkeys(paths)] for paths in asked)
    return first, second, third


def test_rules_see_paths_in_the_tree_that_they_are_given() -> None:
    want = [f"{model}.blocks.{i}.{k}" for model in ("actor", "critic") for i in (0, 1) for k in ("b", "w")]
    for found in world(4).run(seen):
        for paths in found:
            assert sorted(paths) == want


def saved(folder: str) -> float:
    _, (a, b) = models("alike", "hybrid")
    opt, tree = OPTIMIZERS["muon"](), {"actor": a, "critic": b}
    state = {"params": tree, "moments": opt.init(tree)}
    params, moments = opt.step(tree, gradients(tree, 1.0), state["moments"])
    state = {"params": params, "moments": moments}
    sf.checkpoint.save(folder, state)
    _, (a, b) = models("alike", "full")
    like = {"actor": a, "critic": b}
    read = sf.checkpoint.load(folder, {"params": like, "moments": opt.init(like)})
    return distance(whole(read["params"]), whole(params))


def test_several_models_are_saved_and_loaded_elsewhere(tmp_path: Path) -> None:
    assert max(world(4).run(saved, str(tmp_path / "saved"))) == 0.0


def left_out(name: str, ranks: int) -> bool:
    """Whether parameters without gradients stay, and the others move as if they were alone, over accumulated steps."""
    mesh, draw = sf.make_mesh(shard=ranks, device="cpu"), torch.Generator().manual_seed(0)
    a, b = ({"w": torch.randn(4, 3, generator=draw, dtype=torch.float64)} for _ in range(2))
    optimizer = so.multi_steps(OPTIMIZERS[name](), 2)

    def trained(tree: Any, given: Callable[[Any], Any]) -> Any:
        params = sf.shard(tree, mesh, sf.full_shard("shard"))
        state = optimizer.init(params)
        for step in range(4):
            params, state = optimizer.step(params, given(gradients(params, step + 1.0)), state)
        return sf.unshard(params)

    both = trained({"a": a, "b": b}, lambda grads: grads | {"b": None})
    alone = trained({"a": a}, lambda grads: grads)
    return both["a"]["w"].equal(alone["a"]["w"]) and both["b"]["w"].equal(b["w"])


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion8bit", "muon", "soap", "ema", "torch's"])
def test_what_has_no_gradient_in_any_accumulated_step_stays(name: str) -> None:
    for ranks in (1, 2):
        assert all(world(ranks).run(left_out, name, ranks))
