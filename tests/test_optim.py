"""Optimizers on shards: the parameters of one process, whatever the strategy, the rule and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import World
from tests.reference import worst

D, STEPS = 6, 5


def layer(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"]) @ p["a"]


def embed(p: Any, x: Tensor) -> Tensor:
    return p["e"][x]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2


def params() -> Any:
    return {
        "embed": {"e": normal(11, D, seed=1)},
        "blocks": [
            {"w": normal(D, 5, seed=10 + i), "b": normal(5, seed=20 + i), "a": normal(5, D, seed=30 + i)}
            for i in range(3)
        ],
        "scale": normal(D, seed=3),
    }


def tokens(n: int) -> Tensor:
    return torch.randint(0, 11, (n, 4), generator=torch.Generator().manual_seed(n))


def model(stage: Any, ps: Any, rows: Tensor) -> Tensor:
    """The sum over these rows; the whole batch's loss divides by the number of rows of all."""
    x = stage(embed)(ps["embed"], rows)
    f = stage(layer)
    for p in sf.layers(ps["blocks"]):
        x = f(p, x)
    return stage(torch.mul)(ps["scale"], x).square().sum()


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and path != "embed.e"


def decay(path: str, shape: tuple[int, ...]) -> float:
    del path
    return 0.1 if len(shape) > 1 else 0.0


OPTIMIZERS: dict[str, Callable[..., so.Optimizer]] = {
    "sgd": lambda **k: so.sgd(0.05, **k),
    "sgd-nesterov": lambda **k: so.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=decay, **k),
    "adam": lambda **k: so.adam(0.02, weight_decay=0.1, **k),
    "adamw": lambda **k: so.adamw(0.02, **k),
    "adamw-masked": lambda **k: so.adamw(so.warmup_cosine(0.02, warmup=2, steps=6), weight_decay=decay, **k),
    "lion": lambda **k: so.lion(0.01, weight_decay=0.1, **k),
    "adafactor": lambda **k: so.adafactor(0.02, weight_decay=0.1, **k),
    "muon": lambda **k: so.masked(so.muon(0.02, dtype=None, **k), is_matrix, so.adamw(0.02, **k)),
    "rmsprop of torch": lambda donate: so.from_torch(torch.optim.RMSprop, lr=0.01, weight_decay=decay),
    "adam of torch": lambda donate: so.from_torch(torch.optim.Adam, lr=0.01, amsgrad=True),
    "everything": lambda **k: so.chain(
        so.clip_by_value(3.0, **k),
        so.clip_by_global_norm(0.7, **k),
        so.accumulate(so.ema(so.skip_nonfinite(so.adamw(0.02, weight_decay=decay, **k)), 0.9), 2),
    ),
}
STRATEGIES: dict[str, Callable[[], sf.Placement]] = {
    "ddp": lambda: sf.ddp(("replica", "shard")),
    "zero1": lambda: sf.zero1(("replica", "shard")),
    "zero2": lambda: sf.zero2(("replica", "shard")),
    "full_shard": lambda: sf.full_shard(("replica", "shard")),
    "hybrid_shard": lambda: sf.hybrid_shard("shard", "replica"),
    "hybrid_shard_zero2": lambda: sf.hybrid_shard_zero2("shard", "replica"),
    "hfsdp": lambda: sf.hfsdp("shard", "replica"),
    "hpz": lambda: sf.hpz("shard", "replica"),
    "mics": lambda: sf.mics(("shard", "replica")),
}


def plain(f: Any) -> Any:
    return f


def trained(optimizer: so.Optimizer, ps: Any, gradient: Callable[[Any, int], Any]) -> tuple[Any, Any]:
    state = optimizer.init(ps)
    for number in range(STEPS):
        ps, state = optimizer.step(ps, gradient(ps, number), state)
    return ps, state


def distance(got: Any, want: Any) -> float:
    (a, one), (b, other) = optree.tree_flatten(got), optree.tree_flatten(want)
    assert one == other
    return worst((x - y).abs().max().item() for x, y in zip(a, b, strict=True) if isinstance(x, Tensor))


def compare(strategy: str, names: list[str], n: int) -> Any:
    sizes = {"replica": 2 if n == 4 else 1, "shard": max(1, n // 2) if n == 4 else n}
    mesh = sf.make_mesh(device="cpu", **sizes)
    rows = tokens(12)
    mine = rows.tensor_split(n)[mesh.get_rank()]
    found = {}
    for name in names:
        for donate in (True, False):

            def alone(ps: Any, number: int) -> Any:
                return sf.grad(lambda p: model(plain, p, (rows + number) % 11) / rows.numel())(ps)

            def shared(ps: Any, number: int) -> Any:
                return sf.grad(lambda p: model(sf.stage, p, (mine + number) % 11) / rows.numel())(ps)

            want, _ = trained(OPTIMIZERS[name](donate=True), optree.tree_map(torch.clone, params()), alone)
            flat = sf.shard(params(), mesh, STRATEGIES[strategy]())
            before = optree.tree_map(torch.clone, flat)
            got, state = trained(OPTIMIZERS[name](donate=donate), flat, shared)
            found[name, donate] = distance(sf.unshard(got), want)
            if not donate and "of torch" not in name:
                found[f"{name}, as before", donate] = distance(flat, before)
            assert optree.tree_structure(got) == optree.tree_structure(flat)
            del state
    return found


@pytest.mark.parametrize(
    "world", [(1, "processes"), (2, "processes"), (4, "processes")], indirect=True, ids=["1", "2", "4"]
)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_optimizer_with_every_strategy_trains_as_one_process(world: World, strategy: str) -> None:
    for found in world.within(120).run(compare, strategy, list(OPTIMIZERS), world.size):
        assert not {name: d for name, d in found.items() if not d < 1e-10}


def torch_of(name: str, leaves: list[Tensor]) -> torch.optim.Optimizer:
    matrices = {"params": [x for x in leaves if x.ndim == 2], "weight_decay": 0.1}
    groups: list[dict[str, Any]] = [matrices, {"params": [x for x in leaves if x.ndim < 2]}]
    return {
        "sgd-nesterov": lambda: torch.optim.SGD(
            groups,
            0.05,
            momentum=0.9,
            nesterov=True,
        ),
        "adam": lambda: torch.optim.Adam(leaves, 0.02, weight_decay=0.1),
        "adamw": lambda: torch.optim.AdamW(leaves, 0.02),
        "sgd": lambda: torch.optim.SGD(leaves, 0.05),
        "adafactor": lambda: torch.optim.Adafactor(leaves, 0.02, weight_decay=0.1),
    }[name]()


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
@pytest.mark.parametrize("name", ["sgd", "sgd-nesterov", "adam", "adamw", "adafactor"])
def test_optimizers_are_those_of_torch(name: str, donate: bool) -> None:
    rows = tokens(12)
    gradient = sf.grad(lambda p: model(plain, p, rows) / rows.numel())
    got, _ = trained(OPTIMIZERS[name](donate=donate), optree.tree_map(torch.clone, params()), lambda p, _: gradient(p))
    leaves, tree = optree.tree_flatten(optree.tree_map(torch.clone, params()))
    leaves = [x.requires_grad_() for x in leaves]
    optimizer = torch_of(name, leaves)
    for _ in range(STEPS):
        for x, g in zip(leaves, optree.tree_leaves(gradient(optree.tree_unflatten(tree, leaves))), strict=True):
            x.grad = g.detach()
        optimizer.step()
    assert distance(got, optree.tree_unflatten(tree, [x.detach() for x in leaves])) < 1e-12


def moved(name: str, strategy: str) -> bool:
    """Whether a donated step left the memory of parameters of which this rank has some."""
    mesh = sf.make_mesh(device="cpu", replica=1, shard=2)
    flat = sf.shard(params(), mesh, STRATEGIES[strategy]())
    before = [x.data_ptr() for x in optree.tree_leaves(flat["blocks"])]
    optimizer = OPTIMIZERS[name](donate=True)
    state = optimizer.init(flat)
    for _ in range(2):
        flat, state = optimizer.step(flat, optree.tree_map(torch.ones_like, flat), state)
    return before != [x.data_ptr() for x in optree.tree_leaves(flat["blocks"])]


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_a_donated_step_stays_in_the_memory_of_the_parameters(world: World, strategy: str) -> None:
    for name in OPTIMIZERS.keys() - {"everything"}:  # which rests at every other step
        assert world.run(moved, name, strategy) == [False, False], name
