"""Parameters that live at one place of an axis."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import World
from tests.models import distance
from tests.optimizers import optimizers_named


def whole() -> Any:
    generator = torch.Generator().manual_seed(0)

    def layer() -> dict[str, Tensor]:
        return {"w": torch.randn(4, 6, generator=generator, dtype=torch.float64), "b": torch.ones(6).double()}

    return {"first": layer(), "blocks": [layer() for _ in range(4)], "everywhere": layer()}


def at(strategy: Any) -> Any:
    def placed(path: str, shape: tuple[int, ...]) -> sf.Placement:
        name, number, *_ = path.split(".")
        if name == "everywhere":
            return strategy
        return strategy.only_on(pipe=0 if name == "first" else int(number) // 2)

    return placed


def shards(mesh: Any, strategy: Any) -> Any:
    return sf.shard(whole(), mesh, at(strategy))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: so.adamw(1e-2, weight_decay=lambda path, shape: 0.1 if len(shape) > 1 else 0.0),
    **optimizers_named("pure, adafactor, lamb, muon, shampoo, soap"),
    "clipped, averaged": lambda: so.ema(so.chain(so.clip_by_global_norm(0.1), so.sgd(0.1)), 0.9),
}
ROUNDING = {"soap": 1e-8}  # the eigenvectors of small eigenvalues amplify it
STRATEGIES = {"full_shard": sf.full_shard("shard"), "zero1": sf.strategies.zero1("shard"), "ddp": sf.ddp("shard")}


def trained() -> dict[Any, float]:
    mesh, found = sf.make_mesh(shard=2, pipe=2, device="cpu"), {}
    for name, strategy in STRATEGIES.items():
        params = shards(mesh, strategy)
        for kind, make in OPTIMIZERS.items():
            opt, plain = make(), whole()
            mine, state = optree.tree_map(torch.clone, params), opt.init(params)
            wanted = opt.init(plain)
            for _ in range(2):
                grads = optree.tree_map(torch.sin, mine)
                mine, state = opt.step(mine, grads, state)
                plain, wanted = opt.step(plain, optree.tree_map(torch.sin, plain), wanted)
            found[name, kind] = distance(sf.unshard(mine), plain)
        found[name, "norm"] = abs(so.global_norm(params) - so.global_norm(whole())).item()
    return found


@pytest.mark.world(4)
def test_optimizers_and_norms_count_what_lives_elsewhere(world: World) -> None:
    for found in world.run(trained):
        assert len(found) == 3 * (1 + len(OPTIMIZERS))
        assert not {cell: x for cell, x in found.items() if not x < ROUNDING.get(cell[1], 1e-12)}


def held() -> Any:
    mesh = sf.make_mesh(shard=2, pipe=2, device="cpu")
    params, place = shards(mesh, sf.full_shard("shard")), mesh.get_local_rank("pipe")
    back = sf.unshard(params)
    same = all(map(torch.equal, optree.tree_leaves(back), optree.tree_leaves(whole())))
    sf.shards.assert_replicated(params)
    stage = sf.stage(lambda p, x: x @ p["w"] + p["b"])
    x = torch.ones(2, 4, dtype=torch.float64)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def gradient(params: Any) -> Any:
        mine = [params["blocks"][i] for i in (2 * place, 2 * place + 1)]

        def loss(mine: Any) -> Tensor:
            return sum(stage(p, x).square().sum() for p in mine) / 2  # two ranks add up

        return sf.grad(loss)(mine)

    wanted = torch.func.grad(lambda ps: sum((x @ p["w"] + p["b"]).square().sum() for p in ps))(whole()["blocks"])
    off = distance(sf.unshard(gradient(params)), wanted[2 * place : 2 * place + 2])
    with pytest.raises(ValueError, match=f"'blocks.{2 - 2 * place}' lives at pipe={1 - place}.*holds nothing of it"):
        stage(params["blocks"][2 - 2 * place], x)
    with pytest.raises(ValueError, match="lives at"):
        torch.func.vmap(lambda x: stage(params["blocks"][2 - 2 * place], x))(x)
    return same, [len(p.values) > 0 for p in params["blocks"]], off, str(params["blocks"][3].layout)


@pytest.mark.world(4)
def test_ranks_elsewhere_hold_nothing_and_call_nothing(world: World) -> None:
    for rank, (same, here, off, told) in enumerate(world.run(held)):
        assert same
        assert here == [place == rank % 2 for place in (0, 0, 1, 1)]
        assert off < 1e-12
        assert "only at pipe=1" in told


def refused() -> list[str]:
    mesh, found = sf.make_mesh(shard=2, pipe=2, device="cpu"), []
    for make in (
        lambda: sf.shard(whole(), mesh, sf.full_shard("shard").only_on(pipe=2)),
        lambda: sf.shard(whole(), mesh, sf.full_shard("shard").only_on(depth=0)),
        lambda: sf.full_shard("pipe").only_on(pipe=0),
        lambda: sf.shard(whole(), mesh, sf.full_shard("shard").only_on(pipe=0), specs=sf.P("pipe")),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the caller looks at the words
            make()
        found.append(str(caught.value))
    return found


@pytest.mark.world(4)
def test_places_that_are_not_there_are_refused(world: World) -> None:
    for position, axis, twice, both in world.run(refused):
        assert "at pipe=2, but positions run from 0 to 1" in position
        assert "unknown axis 'depth'" in axis
        assert "names the axis 'pipe' twice" in twice
        assert "puts it at one place of that axis" in both
