"""What parameters, gradients and states will take, as it is said beforehand, is what is then there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, quant
from shardfn.compat import autograd
from shardfn.mesh.scope import scope as sf_scope
from shardfn.plan.memory import Bytes
from shardfn.testing import world
from shardfn.tiers import placing, tensors
from tests.models import STRATEGIES
from tests.plan.test_buffers import embed, head
from tests.refusals import told

WIDTH = 6
FROZEN = r".*\.(table|ids)"
DISK: dict[str, Any] = {"params": "disk", "grads": "disk", "state": "disk"}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: so.adamw(0.1, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1)),
    "sgd": lambda: so.sgd(0.1, momentum=0.9),
    "sgd without momentum": lambda: so.sgd(0.1),
    "adamw8bit": lambda: so.adamw8bit(0.1),
    "adamw in bfloat16": lambda: so.adamw(0.1, state_dtype=torch.bfloat16),
    "lion": lambda: so.lion(0.1),
    "adafactor": lambda: so.adafactor(0.1),
    "lamb": lambda: so.lamb(0.1),
    "muon, masked": lambda: so.masked(so.muon(0.1), lambda path, shape: len(shape) == 2, so.adamw(0.1)),
    "shampoo": lambda: so.shampoo(1e-2, ridge=1e-6, every=2, block=5),
    "soap": lambda: so.soap(1e-2, every=2, block=5),
    "ema": lambda: so.ema(so.adamw(0.1), 0.9),
    "master": lambda: so.fp32_master_weights(so.adamw(0.1)),
    "accumulated": lambda: so.multi_steps(so.adamw(0.1), 2),
    "clipped": lambda: so.chain(so.clip_by_global_norm(1.0), so.adamw(0.1)),
}


def whole() -> dict[str, Any]:
    """Of several dtypes in a stage, frozen or not, of odd sizes, and of none."""
    g = torch.Generator().manual_seed(0)

    def block() -> dict[str, Any]:
        return {
            "w": torch.randn(WIDTH, 7, generator=g),
            "v": torch.randn(7, WIDTH, generator=g).bfloat16(),
            "b": torch.randn(7, generator=g),
            "table": torch.randn(5, 3, generator=g),
            "ids": torch.randint(9, (5,), generator=g),
            "none": torch.empty(0, 4),
        }

    return {"norm": {"scale": torch.randn(3, generator=g)}, "blocks": [block() for _ in range(3)]}


def sizes(ranks: int) -> dict[str, int]:
    return {1: {"replica": 1, "shard": 1}, 2: {"replica": 1, "shard": 2}, 4: {"replica": 2, "shard": 2}}[ranks]


def taken(tree: Any, but: Any = ()) -> Bytes:
    """What the tensors of a tree take up, each memory once."""
    seen = {autograd.storage_of(x) for x in optree.tree_leaves(but) if isinstance(x, Tensor)}
    memory = disk = 0
    for x in optree.tree_leaves(tree):
        if not isinstance(x, Tensor) or autograd.storage_of(x) in seen:
            continue
        seen.add(autograd.storage_of(x))
        place = tensors.place_of(x)
        if place is None:
            memory += x.untyped_storage().nbytes()
        else:
            disk += place.stretch.nbytes
    return Bytes(memory, 0, disk)


# --- parameters and states ---


def compared(strategy: sf.Placement, ranks: int, folder: str) -> list[str]:
    """The optimizers of which what was said is not what was made."""
    wrong = []
    ways: list[dict[str, Any]] = [{}, {"state": "disk"}, DISK]
    for tiers in ways:
        placed, mesh = strategy.with_tiers(**tiers), sf.make_mesh(device="cpu", scratch=folder, **sizes(ranks))
        params = sf.shard(whole(), mesh, placed, frozen=FROZEN)
        for name, make in OPTIMIZERS.items():
            said = sf.plan.estimate_memory(whole(), make(), placed, mesh=mesh, frozen=FROZEN)
            if said != sf.plan.estimate_memory(params, make()):
                wrong.append(f"{name}, {tiers}: before and after sharding")
            state = make().init(params)
            found = taken(params), taken(state, but=params)
            if (said.parameters, said.state) != found:
                wrong.append(f"{name}, {tiers}: said {said.parameters}, {said.state}; found {found}")
        if "params" in tiers and placing.file_of(mesh, "params").nbytes != said.parameters.disk:
            wrong.append(f"{tiers}: the file of parameters")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_parameters_and_states_are_as_large_as_was_said(name: str, ranks: int, tmp_path: Path) -> None:
    assert (
        world(ranks, "processes" if ranks == 2 else "threads").run(compared, STRATEGIES[name], ranks, str(tmp_path))
        == [[]] * ranks
    )


# --- gradients ---


def model() -> dict[str, Any]:
    """Stages of different sizes: the first is the largest."""
    g = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(50, WIDTH, generator=g),
        "blocks": whole()["blocks"] + whole()["blocks"][:2],
        "head": {"o": torch.randn(WIDTH, 4, generator=g), "b": torch.zeros(4)},
    }


def block(p: Any, x: Tensor) -> Tensor:
    wide = torch.tanh(x.to(p["w"].dtype) @ p["w"] + p["b"] + p["table"].sum() + p["ids"].sum())
    return x + F.linear(wide.to(p["v"].dtype), p["v"].T).to(x.dtype)


def loss(params: Any, tokens: Tensor) -> Tensor:
    x = sf.stage(embed)(params["embed"], tokens)
    for p in sf.layers(params["blocks"]):
        x = sf.stage(block)(p, x)
    return sf.psum(sf.stage(head)(params["head"], x), ("replica", "shard"))


def stepped(strategy: Any, ranks: int, folder: str) -> tuple[sf.plan.MemoryEstimate, dict[str, Any]]:
    """What was said of a run, and what there was."""
    mesh = sf.make_mesh(device="cpu", scratch=folder, **sizes(ranks))
    optimizer = OPTIMIZERS["adamw"]()
    said = sf.plan.estimate_memory(model(), optimizer, strategy, mesh=mesh, frozen=FROZEN)
    params = sf.shard(model(), mesh, strategy, frozen=FROZEN)
    state = optimizer.init(params)
    found: dict[str, Any] = {}

    @functools.partial(sf.shard_map, mesh=mesh, in_specs=(..., ..., P(("replica", "shard"))), out_specs=(..., ...))
    def step(params: Any, state: Any, tokens: Tensor) -> Any:
        _, grads = sf.value_and_grad(loss)(params, tokens)
        found["gradients"] = taken(grads, but=params)
        return optimizer.step(params, grads, state)

    for _ in range(2):
        params, state = step(params, state, torch.arange(5) + mesh.get_rank())
    files: Any = {kind: placing.file_of(mesh, kind).nbytes for kind in ("params", "grads", "state")}
    return said, found | {"parameters": taken(params), "state": taken(state, but=params), "files": files}


RUNS = [
    *((name, tiers) for name in STRATEGIES for tiers in ({}, DISK)),
    *(("full_shard", {kind: "disk"}) for kind in ("params", "grads", "state")),
]
FEWER = [run for run in RUNS if run[0] in ("zero1", "full_shard", "hybrid_shard", "hfsdp", "hpz")]


def runs(mine: list[Any], ranks: int, folder: str) -> list[Any]:
    return [stepped(STRATEGIES[name].with_tiers(**tiers), ranks, folder) for name, tiers in mine]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_takes_what_was_said(ranks: int, tmp_path: Path) -> None:
    mine = RUNS if ranks == 2 else FEWER
    for found in world(ranks).with_deadline(240).run(runs, mine, ranks, str(tmp_path)):
        for run, (said, there) in zip(mine, found, strict=True):
            assert said.parameters == there["parameters"], run
            assert said.state == there["state"], run
            assert said.gradients == there["gradients"], run
            files = said.parameters.disk, 2 * said.gradients.disk, said.state.disk
            assert files[0] <= there["files"]["params"] <= 2 * files[0], run  # a rank may write what it gets elsewhere
            assert there["files"]["grads"] <= files[1], run
            assert there["files"]["state"] == files[2], run


# --- few bits ---


def packed(depth: int) -> Any:
    g = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(32, 64, generator=g), "a": torch.randn(32, 4, generator=g)} for _ in range(depth)]
    return quant.quantize({"blocks": blocks}, quant.nf4(), [r".*\.w"])


def in_few_bits(folder: str) -> list[Any]:
    found = []
    for tiers in ({}, DISK):
        mesh = sf.make_mesh(device="cpu", scratch=folder, **sizes(2))
        strategy = STRATEGIES["full_shard"].with_tiers(**tiers)
        said = sf.plan.estimate_memory(packed(3), so.adamw(0.1), strategy, mesh=mesh)
        params = sf.shard(packed(3), mesh, strategy)
        state = so.adamw(0.1).init(params)
        f = sf.stage(lambda p, x: x @ p["w"] @ p["w"].T @ p["a"] @ p["a"].T)

        def loss(params: Any, x: Tensor, f: Any = f) -> Tensor:
            for p in sf.layers(params["blocks"]):
                x = f(p, x)
            return sf.psum(x.sum(), ("replica", "shard"))

        with sf_scope(mesh):
            _, grads = sf.value_and_grad(loss)(params, torch.ones(2, 32))
        found.append((said, sf.plan.MemoryEstimate(taken(params), taken(grads, but=params), taken(state, but=params))))
    return found


def test_a_base_in_few_bits_takes_what_was_said(tmp_path: Path) -> None:
    for rank in world(2).run(in_few_bits, str(tmp_path)):
        for said, there in rank:
            assert said == there


# --- what one has before there is memory ---


def likes(folder: str) -> list[sf.plan.MemoryEstimate]:
    """The same parameters as tensors, without numbers, and as makers."""
    mesh = sf.make_mesh(device="cpu", scratch=folder, **sizes(2))
    strategy, optimizer = STRATEGIES["full_shard"].with_tiers(state="disk"), so.adamw(0.1)
    shapes: dict[str, Any] = {"embed": (50, WIDTH), "blocks": [(WIDTH, 7), (7, WIDTH)]}

    def maker(shape: tuple[int, ...]) -> Any:
        return lambda generator: {
            "w": torch.randn(shape, generator=generator, device="cpu"),
            "b": torch.nn.init.normal_(torch.empty(shape[1:], dtype=torch.bfloat16), generator=generator),
        }

    makers = {"embed": maker(shapes["embed"]), "blocks": [maker(one) for one in shapes["blocks"]]}
    made = sf.init(makers, seed=0)
    nothing = optree.tree_map(lambda x: torch.empty_like(x, device="meta"), made)
    said = [sf.plan.estimate_memory(one, optimizer, strategy, mesh=mesh) for one in (made, nothing, makers)]
    with sf_scope(mesh):
        said.append(sf.plan.estimate_memory(nothing, optimizer, strategy))
    said.append(sf.plan.estimate_memory(sf.init_sharded(makers, 0, mesh, strategy), optimizer))
    return said


def test_parameters_may_be_without_numbers_or_not_made_yet(tmp_path: Path) -> None:
    for rank in world(2).run(likes, str(tmp_path)):
        assert len(set(rank)) == 1
        assert rank[0].parameters.device > 0
        assert rank[0].state.disk > rank[0].state.device == 0


def test_a_module_without_memory_is_counted() -> None:
    def body() -> sf.plan.MemoryEstimate:
        with interop.meta():
            module = torch.nn.TransformerEncoderLayer(2**12, 8, 2**14, batch_first=True)
        mesh = sf.make_mesh(device="cpu", **sizes(1))
        return sf.plan.estimate_memory(
            interop.functional(module).tree, so.adamw(0.1), sf.full_shard("shard"), mesh=mesh
        )

    (said,) = world(1).run(body)
    elements = 4 * 2**24 + 2 * 2**26
    assert 4 * elements <= said.parameters.device < 4.01 * elements
    assert said.state.device == 2 * said.parameters.device


def test_plain_parameters_are_counted_as_they_are() -> None:
    tree = whole()
    tied = {"a": tree["norm"]["scale"], "b": tree["norm"]["scale"]}
    assert sf.plan.estimate_memory(tied).parameters == Bytes(12)
    said = sf.plan.estimate_memory(tree, so.adamw(0.1))
    state = so.adamw(0.1).init(tree)
    assert (said.parameters, said.state) == (taken(tree), taken(state))
    assert said.total.total == said.parameters.total + said.gradients.total + said.state.total


def test_nothing_is_moved_and_nobody_is_asked(tmp_path: Path) -> None:
    def body(folder: str) -> tuple[int, int]:
        mesh = sf.make_mesh(device="cpu", scratch=folder, **sizes(2))
        if mesh.get_rank() == 1:
            return 0, 0
        with sf.collectives.ledger() as log:
            sf.plan.estimate_memory(whole(), so.adamw(0.1), STRATEGIES["full_shard"].with_tiers(**DISK), mesh=mesh)
        return len(log.records), placing.file_of(mesh, "params").nbytes

    assert world(2).run(body, str(tmp_path)) == [(0, 0)] * 2


def test_a_step_afterwards_still_notices_its_arguments_in_each_others_place() -> None:
    tree, optimizer = {"w": torch.ones(3)}, so.adamw(0.1)
    state = optimizer.init(tree)
    sf.plan.estimate_memory(tree, optimizer)
    with pytest.raises(ValueError, match="the parameters came as grads"):
        optimizer.step({"w": torch.zeros(3)}, tree, state)


def test_figures_are_a_table() -> None:
    said = sf.plan.MemoryEstimate(Bytes(12_000_000), Bytes(host=1_000_000), state=Bytes(disk=24_000_000))
    assert str(said).splitlines() == [
        "MB a rank         device        host        disk",
        "parameters        12.000           -           -",
        "gradients              -       1.000           -",
        "state                  -           -      24.000",
        "total             12.000       1.000      24.000",
    ]
    assert str(sf.plan.MemoryEstimate(Bytes(20_000_000_000))).startswith("GB a rank")


# --- what it refuses ---


def never(params: Any, grads: Any, state: Any) -> Any:
    raise AssertionError


def reading(generator: torch.Generator) -> Tensor:
    return torch.ones(int(torch.randint(3, (), generator=generator)))


def test_what_cannot_be_counted_is_refused() -> None:
    def body() -> list[str]:
        mesh = sf.make_mesh(device="cpu", **sizes(1))
        tree, full = {"w": torch.ones(3)}, sf.full_shard("shard")
        params = sf.shard(tree, mesh, full)
        hungry = so.Optimizer(lambda params: {"x": [float(x.sum()) for x in optree.tree_leaves(params)]}, never)
        calls: dict[str, Callable[[], Any]] = {
            "what init returned": lambda: sf.plan.estimate_memory(tree, so.adamw(0.1).init(tree)),
            "a class": lambda: sf.plan.estimate_memory(tree, torch.optim.AdamW),  # type: ignore[arg-type]
            "no mesh": lambda: sf.plan.estimate_memory(tree, strategy=full),
            "no strategy": lambda: sf.plan.estimate_memory(tree, mesh=mesh),
            "sharded": lambda: sf.plan.estimate_memory(params, strategy=full, mesh=mesh),
            "a pattern": lambda: sf.plan.estimate_memory(tree, strategy=full, mesh=mesh, frozen="v"),
            "an int": lambda: sf.plan.estimate_memory({"w": 3}),
            "a module": lambda: sf.plan.estimate_memory(torch.nn.Linear(2, 2)),
            "values": lambda: sf.plan.estimate_memory(tree, hungry),
            "later": lambda: sf.plan.estimate_memory(tree, so.ema(so.from_torch(torch.optim.RMSprop, lr=0.1), 0.9)),
            "a maker": lambda: sf.plan.estimate_memory({"w": reading}),
        }
        return [f"{name}: {told(call)}" for name, call in calls.items()]

    (found,) = world(1).run(body)
    wanted = [
        "what init returned: TypeError: estimate_memory takes an optimizer",
        "a class: TypeError: estimate_memory takes an optimizer",
        "no mesh: ValueError: estimate_memory: a strategy, but no mesh",
        "no strategy: ValueError: estimate_memory: a mesh, but no strategy",
        "sharded: ValueError: estimate_memory: the parameters are sharded already",
        "a pattern: ValueError: estimate_memory: nothing matches 'v'; the parameters are w",
        "an int: TypeError: estimate_memory: w is of type int",
        "a module: TypeError: estimate_memory: the tree is a module; its parameters as a tree are interop.functional(",
        "values: ValueError: estimate_memory: the optimizer's init cannot run without numbers",
        "later: ValueError: estimate_memory: from_torch's optimizers make their state in the first step",
        "a maker: ValueError: estimate_memory: the maker of w cannot run without numbers",
    ]
    assert [one[: len(start)] for one, start in zip(found, wanted, strict=True)] == wanted
