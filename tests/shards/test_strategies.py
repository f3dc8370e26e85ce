"""Strategies: what they mean, what they move, and how users name them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import ShardingStrategy

import shardfn as sf
import shardfn.optim as so
from shardfn.shards.layout import is_flat
from shardfn.testing import World
from tests.models import (
    DATA,
    STRATEGIES,
    by_backward,
    data_mesh,
    distance,
    normal,
    plainly,
    scaled,
    scaled_loss,
    token_rows,
)
from tests.reference import worst

WIDTH = 6
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "strategies.md"

NAMED: dict[str, sf.Placement] = {
    "ddp": sf.ddp(DATA),
    "zero1": sf.strategies.zero1(DATA),
    "zero2": sf.zero2(DATA),
} | STRATEGIES
OWN: dict[str, sf.Placement] = {
    "optimizer cut within nodes": sf.Placement(replicas=DATA, gradients=("shard",)),
    "hpz, hierarchical": dataclasses.replace(sf.strategies.hpz(shard="shard", replica="replica"), hierarchical=True),
    "mics the other way": sf.strategies.mics(DATA),
    "once a step": sf.full_shard(DATA).with_reshard("step"),
    "hfsdp, kept": sf.strategies.hfsdp(shard="shard", replica="replica").with_reshard(False),
    "hfsdp, once a step": sf.strategies.hfsdp(shard="shard", replica="replica").with_reshard("step"),
}


relative = functools.partial(distance, floor=1.0)


def ways(n: int, strategy: sf.Strategy) -> dict[str, float]:
    """How far each way to a gradient is from one process's."""
    mesh = data_mesh(n)
    mine = token_rows(12).tensor_split(n)[mesh.get_rank()]
    parts = mine.tensor_split(3)
    want = sf.grad(lambda p: scaled_loss(plainly, p, token_rows(12)))(scaled(4))
    flat = sf.shard(scaled(4), mesh, strategy)

    def loss(p: Any, x: Tensor = mine, **options: Any) -> Tensor:
        return scaled_loss(sf.stage, p, x, **options)

    found = {
        "value_and_grad": sf.grad(loss)(flat),
        "torch.func.grad": torch.func.grad(loss)(flat),
        "backward": by_backward(loss, flat)[1],
        "remat": sf.grad(lambda p: loss(p, remat=True))(flat),
        "reshard": sf.grad(lambda p: loss(p, reshard=True))(flat),
        "kept": sf.grad(lambda p: loss(p, reshard=False))(flat),
        "no prefetch": sf.grad(lambda p: loss(p, prefetch=0))(flat),
        "layers twice": optree.tree_map(lambda g: g / 2, sf.grad(lambda p: loss(p) + loss(p))(flat)),
    }
    for defer in ("nothing", "replicas", "all"):
        found[f"accumulate, {defer}"] = sf.accumulate(loss, parts, defer=defer)(flat)[1]
    return {name: relative(sf.unshard(got), want) for name, got in found.items()}


@pytest.mark.parametrize(
    "world", [(1, "processes"), (2, "processes"), (4, "processes")], indirect=True, ids=["1", "2", "4"]
)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *OWN])
def test_gradients_are_those_of_one_process(world: World, strategy: str) -> None:
    for found in world.with_deadline(60).run(ways, world.size, (STRATEGIES | OWN)[strategy]):
        assert not {name: d for name, d in found.items() if not d < 1e-12}


@pytest.mark.world(4, "threads")
@pytest.mark.parametrize("strategy", ["hpz", "mics", "hfsdp", "zero1"])
def test_other_transports_give_the_same(world: World, strategy: str) -> None:
    for found in world.with_deadline(60).run(ways, 4, STRATEGIES[strategy]):
        assert not {name: d for name, d in found.items() if not d < 1e-12}


def with_transport(strategy: sf.Placement, gather: str) -> float:
    mesh = data_mesh(4)
    mine = token_rows(12).tensor_split(4)[mesh.get_rank()]
    want = sf.grad(lambda p: scaled_loss(plainly, p, token_rows(12)))(scaled(4))
    with sf.collectives.transports(mesh, all_gather=gather):
        got = sf.grad(lambda p: scaled_loss(sf.stage, p, mine))(sf.shard(scaled(4), mesh, strategy))
    return relative(sf.unshard(got), want)


@pytest.mark.world(4)
@pytest.mark.parametrize("gather", ["native", "direct", "broadcasts"])
@pytest.mark.parametrize("strategy", ["hpz", "mics"])
def test_hops_go_by_every_transport(world: World, strategy: str, gather: str) -> None:
    assert worst(world.with_deadline(60).run(with_transport, STRATEGIES[strategy], gather)) < 1e-12


def beside(flat: Any, rank: int) -> Tensor:
    """What a piece holds that is of no parameter."""
    start = flat.layout.grid.index(rank, flat.layout.placement.axes) * flat.layout.piece
    offsets = {entry.path: entry.offset - start for entry in flat.layout.entries}
    left = torch.ones(len(flat.values), dtype=torch.bool)
    for part in flat.layout.ranges(rank):
        left[offsets[part.path] + part.start : offsets[part.path] + part.stop] = False
    chosen: Tensor = flat.values[left]
    return chosen


@contextlib.contextmanager
def dirty_memory() -> Iterator[None]:
    """Memory that nobody has written to yet is full of nan."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def in_dirty_memory(width: int, transports: dict[str, str]) -> tuple[dict[str, float], dict[str, float]]:
    """How far gradients are from one process's, and what they hold that is of no parameter."""
    mesh = data_mesh(4)
    rank, every = mesh.get_rank(), normal(12, WIDTH, seed=5)
    mine = every.tensor_split(4)[rank]
    ps = [{"w": normal(WIDTH, width, seed=i), "v": normal(width, WIDTH, seed=9 + i), "b": normal(width, 3, seed=19 + i)}
          for i in range(2)]  # fmt: skip

    def loss(ps: Any, x: Tensor, stage: Any = sf.stage) -> Tensor:
        for p in ps:
            x = stage(lambda p, x: x + torch.tanh(x @ p["w"]) @ p["v"])(p, x)  # nobody reads `b`
        return x.square().sum()

    whole = optree.tree_map(lambda x: x.clone().requires_grad_(), ps)
    loss(whole, every, plainly).backward()
    want = optree.tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, whole)
    off, left = {}, {}
    with dirty_memory(), sf.collectives.transports(mesh, **transports):
        for name in ("ddp", "zero1", "full_shard", "hybrid_shard", "hfsdp", "hpz", "optimizer cut within nodes"):
            flat = sf.shard(ps, mesh, (STRATEGIES | OWN)[name])
            found = {"value_and_grad": sf.grad(lambda p: loss(p, mine))(flat)}
            for defer in ("replicas", "all"):
                found[defer] = sf.accumulate(loss, mine.tensor_split(2), defer=defer)(flat)[1]
            for way, got in found.items():
                off[f"{name}, {way}"] = relative(sf.unshard(got), want)
                left[f"{name}, {way}"] = worst(beside(one, rank).abs().sum().item() for one in got)
    return off, left


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("width", "transports"),
    [(7, {}), (7, {"reduce_scatter": "native"}), (5003, {})],
    ids=["small", "small, natively", "large, one by one"],
)
def test_gradients_have_zeros_where_no_parameter_is(world: World, width: int, transports: dict[str, str]) -> None:
    """Any `tree_map` over them, such as a norm, takes them for part of the gradient."""
    for off, left in world.run(in_dirty_memory, width, transports):
        assert not {how: d for how, d in off.items() if not d < 1e-12}
        assert not {how: d for how, d in left.items() if d != 0}


def narrow_sums() -> dict[str, list[float]]:
    """Gradients of which four ranks give numbers that are lost if each addition rounds."""
    mesh = data_mesh(4)
    found = {}
    for dtype, large, much in ((torch.bfloat16, 256.0, 260.0), (torch.float16, 2048.0, 2052.0)):
        x = torch.tensor(large if mesh.get_rank() == 0 else 1.0, dtype=dtype)
        for length in (24, 50_000):  # the latter is sent from where it is, where that is exact
            for wire in ("parameters", "sums"):
                w = torch.ones(length, dtype=dtype if wire == "parameters" else torch.float32)
                flat = sf.shard({"w": w}, mesh, sf.full_shard(DATA))
                f = sf.stage(lambda p, x: (p["w"] * x).sum(), reduce_dtype=dtype)
                got = sf.unshard(sf.grad(lambda p, f=f, x=x: f(p, x))(flat))["w"]
                want = much if wire == "parameters" else large + 3
                found[f"{dtype}, {length}, {wire}"] = [one - want for one in got.unique().tolist()]
    return found


@pytest.mark.world(4)
def test_gradients_in_narrow_dtypes_are_rounded_once(world: World) -> None:
    for found in world.run(narrow_sums):
        assert not {how: off for how, off in found.items() if off != [0.0]}


def lower() -> dict[str, float]:
    """Gradients of float32 parameters that are gathered as bfloat16, beside those of ddp."""
    mesh = data_mesh(4)
    mine = token_rows(12).tensor_split(4)[mesh.get_rank()]
    low, high = torch.bfloat16, torch.float32
    options: Any = {"gather_dtype": low, "input_dtype": low, "output_dtype": high, "reduce_dtype": high}
    found = {}
    for name, strategy in (STRATEGIES | OWN).items():
        flat = sf.shard(optree.tree_map(torch.Tensor.float, scaled(4)), mesh, strategy)
        found[name] = sf.unshard(sf.grad(lambda p: scaled_loss(lambda f, **_: sf.stage(f, **options), p, mine))(flat))
    return {name: relative(got, found["ddp"]) for name, got in found.items()}


@pytest.mark.world(4)
def test_parameters_travel_in_another_dtype_by_every_strategy(world: World) -> None:
    for found in world.with_deadline(60).run(lower):
        assert not {name: d for name, d in found.items() if not d < 1e-6}


# --- the ledger against the table of the docs ---


def documented() -> dict[str, list[tuple[bool | None, str, tuple[str, ...]]]]:
    """For each strategy what the table says: whether backward, the collective and its axes, in order."""
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("| strategy | forward | backward |") :].split("\n\n")[0].splitlines()[2:]
    found = {}
    for line in table:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        calls: list[tuple[bool | None, str, tuple[str, ...]]] = []
        for kind, cell in zip((False, True, True, None), cells, strict=True):
            for call in filter(None, cell.split(", ")):
                op, _, axes = call.partition(" ")
                calls.append((kind, op, DATA if axes == "data" else tuple(axes.split(" x "))))
        found[name.strip("`")] = calls
    return found


def moved(strategy: sf.Placement) -> tuple[list[Any], int]:
    """What one step moved for one stage: `(backward, op, axes, bytes)`; and the bytes of the stage."""
    mesh = data_mesh(4)
    flat = sf.shard(scaled(4), mesh, strategy)
    mine = token_rows(12).tensor_split(4)[mesh.get_rank()]
    optimizer = so.sgd(0.1)
    state = optimizer.init(flat)

    def step() -> list[Any]:
        nonlocal flat, state
        with sf.collectives.ledger() as log:
            _, grads = sf.value_and_grad(lambda p: scaled_loss(sf.stage, p, mine))(flat)
        with sf.collectives.ledger() as after:
            flat, state = optimizer.step(flat, grads, state)
        found = [(one.backward, one.op, one.axis, one.bytes) for one in log.select(stage="blocks.1", scheduled=True)]
        return found + [(None, one.op, one.axis, one.bytes) for one in after.select(stage="blocks.1")]

    step()
    layout = flat["blocks"][1].layout
    return step(), layout.padded * layout.dtype.itemsize


def bytes_of(calls: list[tuple[bool | None, str, tuple[str, ...]]], whole: int) -> list[int]:
    """What each call sends: gathers end with the whole, reductions begin with it, or with what others leave."""
    sent = []
    for number, (kind, op, axes) in enumerate(calls):
        k, size = 2 ** len(axes), whole
        later = [a for b, o, a in calls[number + 1 :] if (b, o) == (kind, op) == (kind, "all_gather")]
        before = [a for b, o, a in calls[:number] if o == "reduce_scatter"]
        if op == "all_gather" and kind is not None:
            size //= 2 ** sum(map(len, later))
        elif op != "all_gather":
            size //= 2 ** sum(map(len, before))
        else:  # of what scatters left of the parameters, where they are cut themselves
            size //= 2 ** (sum(map(len, before)) - len(axes))
        sent.append((2 if op == "all_reduce" else 1) * size * (k - 1) // k)
    return sent


@pytest.mark.world(4)
@pytest.mark.parametrize("strategy", list(NAMED))
def test_the_ledger_has_what_the_table_says(world: World, strategy: str) -> None:
    calls = documented()[strategy]
    for found, whole in world.with_deadline(60).run(moved, NAMED[strategy]):
        expected = [(*call, sent) for call, sent in zip(calls, bytes_of(calls, whole), strict=True)]
        assert sorted(map(str, found)) == sorted(map(str, expected))


def test_every_strategy_is_in_the_tables() -> None:
    assert list(documented()) == list(NAMED)
    page = PAGE.read_text(encoding="utf-8")
    for name in NAMED:
        assert re.search(rf"\| `sf\.(strategies\.)?{name}\(", page)


# --- rules ---


def mixed(n: int) -> dict[str, Any]:
    small = sf.strategies.replicate_small(sf.full_shard(DATA), below=10)

    def rule(path: str, shape: tuple[int, ...]) -> sf.Placement:
        if path.startswith("blocks.2") and len(shape) == 2:
            return sf.strategies.zero1(DATA)
        names = {"embed.e": "zero1", "blocks.0.w": "hybrid_shard", "blocks.1.b": "hpz", "scale": "mics"}
        return STRATEGIES[names[path]] if path in names else small(path, shape)

    mesh = data_mesh(n)
    flat = sf.shard(scaled(4), mesh, rule)
    return {"keys": [sorted(p) for p in flat["blocks"]], "ways": ways(n, rule), "small": ways(n, small)}


@pytest.mark.parametrize("world", [(1, "processes"), (2, "processes"), (4, "processes")], indirect=True)
def test_stages_and_parameters_may_have_strategies_of_their_own(world: World) -> None:
    for found in world.with_deadline(60).run(mixed, world.size):
        assert not {name: d for kind in ("ways", "small") for name, d in found[kind].items() if not d < 1e-12}
        assert found["keys"][0] == ["float64 over replica x shard", "float64 over shard", "float64 whole"]


@pytest.mark.world(4)
def test_several_strategies_train_one_model(world: World) -> None:
    names = {"blocks.0.w": "hybrid_shard", "blocks.1.b": "hpz", "scale": "zero1", "embed.e": "hfsdp"}

    def body() -> float:
        mesh = data_mesh(4)
        mine = token_rows(12).tensor_split(4)[mesh.get_rank()]

        def trained(ps: Any, stage: Any, x: Tensor) -> Any:
            optimizer = so.chain(so.clip_by_global_norm(0.5), so.adamw(0.02))
            state = optimizer.init(ps)
            for _ in range(4):
                ps, state = optimizer.step(ps, sf.grad(lambda p: scaled_loss(stage, p, x))(ps), state)
            return ps

        want = trained(scaled(4), plainly, token_rows(12))
        rule = sf.shard(scaled(4), mesh, lambda path, shape: STRATEGIES[names.get(path, "ddp")])
        return relative(sf.unshard(trained(rule, sf.stage, mine)), want)

    assert worst(world.with_deadline(60).run(body)) < 1e-10


@pytest.mark.world(2)
def test_a_rule_that_is_wrong_is_refused_on_every_rank(world: World) -> None:
    def body() -> None:
        sf.shard({"w": torch.ones(4)}, sf.make_mesh(shard=2, device="cpu"), lambda path, shape: "full_shard")  # type: ignore[arg-type,return-value]

    for error in world.errors(body):
        assert isinstance(error, TypeError)
        assert "w: the strategy is a function that returned 'full_shard', not a Placement" in str(error)

    def unknown() -> None:
        sf.shard({"w": torch.ones(4)}, sf.make_mesh(shard=2, device="cpu"), lambda path, shape: sf.ddp("data"))

    for error in world.errors(unknown):
        assert "the strategy of w" in str(error)
        assert "data" in str(error)


def test_uncut_takes_a_strategy() -> None:
    rule = sf.strategies.replicate_small(lambda path, shape: sf.full_shard(path), below=5)
    assert rule("a", (2, 3)) == sf.full_shard("a")
    assert rule("a", (2, 2)) == sf.ddp("a")
    with pytest.raises(TypeError, match="'full_shard' is not a strategy"):
        sf.strategies.replicate_small("full_shard", below=5)  # type: ignore[arg-type]


# --- names ---


def test_names_of_other_libraries_mean_what_they_mean_there() -> None:
    def named(name: str) -> sf.Placement:
        return sf.strategies.from_name(name, shard="shard", replica="replica")

    known: dict[str, list[Any]] = {
        "ddp": ["NO_SHARD", "fsdp:3", "zero:0", "ddp_spawn", "ddp_find_unused_parameters_true", "no_shard auto_wrap",
                "DistributedDataParallel"],
        "zero1": ["deepspeed_stage_1", "zero-1", "zero:1", "optim"],
        "zero2": ["deepspeed_stage_2", "ZeRO-2", "zero:2", "deepspeed", "optim_grads"],
        "shard_grad_op": [
            "SHARD_GRAD_OP", "fsdp:2", "shard_grad_op auto_wrap", ShardingStrategy.SHARD_GRAD_OP,
            "ShardingStrategy.SHARD_GRAD_OP",
        ],
        "full_shard": [
            "FULL_SHARD", "fsdp:1", "fsdp", "fsdp1", "fsdp_native", "full_shard|auto_wrap", "fully_shard",
            "full_shard auto_wrap", "auto_wrap full_shard", "deepspeed_stage_3", "ZeRO-3", "zero:3",
            "optim_grads_params",
        ],
        "hybrid_shard": ["HYBRID_SHARD", "fsdp:4", "HSDP", "hybrid_shard auto_wrap"],
        "hybrid_shard_zero2": ["_HYBRID_SHARD_ZERO2", "fsdp:5", "hybrid_shard_zero2 auto_wrap"],
    }  # fmt: skip
    for same, names in known.items():
        for name in names:
            assert named(name) == NAMED[same], name
    for name in NAMED:
        if name != "mics":
            assert named(name) == NAMED[name]
    assert sf.strategies.from_name("mics", shard=("shard", "replica")) == STRATEGIES["mics"]
    assert sf.strategies.from_name("full_shard") == sf.full_shard("shard")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *(("3", '"fsdp:3" or "zero:3"'), (3, '"fsdp:3" or "zero:3"'), ("0", 'write "zero:0"'), ("5", 'write "fsdp:5"')),
        ("deepspeed_stage_3_offload", 'Use "full_shard"'),
        ("deepspeed_stage_3_offload_nvme", 'Use "full_shard"'),
        ("deepspeed_stage_2_offload", 'Use "zero2"'),
        ("full_shard offload auto_wrap", 'Use "full_shard"'),
        ("shard_grad_op auto_wrap offload", 'Use "shard_grad_op"'),
        ("fsdp_cpu_offload", 'Use "full_shard"'),
        ("fsdp_native_full_shard_offload", 'Use "full_shard"'),
    ],
)
def test_a_name_that_says_two_things_or_more_than_there_is_is_refused(name: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        sf.strategies.from_name(name)
    assert repr(name) in str(caught.value)


def test_what_owners_call_zero_keeps_parameters_whole_and_what_fsdp_calls_grad_op_does_not() -> None:
    assert sf.strategies.zero1("a") == sf.zero2("a") == sf.Placement(replicas=("a",), gradients=("a",))
    assert (
        sf.strategies.shard_grad_op("a")
        == sf.full_shard("a").with_reshard(False)
        == sf.Placement(("a",), reshard=False)
    )


def test_what_is_kept_is_what_is_not_given_back() -> None:
    for keep, reshard in [(True, False), (False, True), ("step", "step"), (("a",), ("a",))]:
        new = sf.Placement(("a", "b"), reshard=reshard)  # type: ignore[arg-type]
        assert sf.full_shard(("a", "b")).with_reshard(reshard) == new  # type: ignore[arg-type]
        assert new.keep == keep
    with pytest.raises(TypeError):
        sf.Placement(("a",), (), True)  # type: ignore[call-arg]  # reshard= is said by name


def test_axes_are_a_name_or_a_tuple_of_names() -> None:
    assert sf.Placement("a", "b", gradients=("a", "b")) == sf.strategies.hfsdp(shard="a", replica="b")
    for wrong in (["a"], 3, ("a", 1)):
        with pytest.raises(TypeError, match="must be a mesh axis name or a tuple of names"):
            sf.Placement(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [sf.hybrid_shard, sf.strategies.hybrid_shard_zero2, sf.strategies.hfsdp, sf.strategies.hpz, sf.strategies.zeropp],
)
def test_axes_of_two_kinds_are_told_apart_by_name(make: Any) -> None:
    """The mesh's order is another one, and a program with the two exchanged trains all the same."""
    call = re.escape(f"write {make.__name__}(shard='a', replica='b')")
    with pytest.raises(TypeError, match=call):
        make("a", "b")
    with pytest.raises(TypeError, match=re.escape(f"""write {make.__name__}(shard='a', replica="replica")""")):
        make("a")
    assert make(shard="a", replica="b").axes[0] == "a"
    for two in (lambda: sf.strategies.mics("a", "b"), lambda: sf.strategies.from_name("hsdp", "a", "b")):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="positional"):
            two()


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(ValueError, match="there is no strategy 'full-shart'") as caught:
        sf.strategies.from_name("full-shart")
    assert "did you mean 'full_shard'?" in str(caught.value)
    for name in NAMED:
        assert name in str(caught.value)
    for name in ("x", "y" * 1000, "deepspeed_stage_9"):
        with pytest.raises(ValueError, match="there is no strategy") as caught:
            sf.strategies.from_name(name)
        assert len(str(caught.value)) < 500
    with pytest.raises(ValueError, match="pass replica="):
        sf.strategies.from_name("HYBRID_SHARD")


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"axes": ("a",), "replicas": ("a",)}, "names the axis 'a' twice"),
        ({"axes": ("a",), "replicas": ("b",), "gradients": ("b",)}, "gradients=('b',)"),
        ({"axes": ("a",), "gradients": ("a", "c")}, "gradients=('a', 'c')"),
        ({"axes": ("a", "b"), "reshard": ("b",)}, "reshard=('b',)"),
        ({"axes": ("a", "b"), "reshard": "whole"}, "reshard='whole'"),
    ],
)
def test_a_placement_that_makes_no_sense_is_refused(kwargs: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        sf.Placement(**kwargs)


# --- frozen ---


def frozen_run(way: str) -> Any:
    mesh = data_mesh(4)
    mine = token_rows(12).tensor_split(4)[mesh.get_rank()]
    want = sf.grad(lambda p: scaled_loss(plainly, p, token_rows(12)))(scaled(4))["blocks"][3]
    if way == "patterns":
        flat = sf.shard(scaled(4), mesh, STRATEGIES["full_shard"], frozen=[r"embed.*", r"blocks\.[012].*", "scale"])
        trained, rest = flat, None
    else:
        flat = sf.shard(scaled(4), mesh, STRATEGIES["full_shard"])
        trained, rest = sf.shards.partition(flat, lambda path, shape: path.startswith("blocks.3"))

    def loss(p: Any) -> Tensor:
        return scaled_loss(sf.stage, p if rest is None else sf.shards.combine(p, rest), mine)

    sf.grad(loss)(trained)
    with sf.collectives.ledger() as log:
        grads = sf.grad(loss)(trained)
    state = so.adamw(0.1).init(trained)
    moments = [x for x in optree.tree_leaves(state) if isinstance(x, Tensor)]
    if way == "patterns":
        whole = sf.unshard(grads)
        assert whole["scale"] is None
        assert whole["blocks"][0] == {"w": None, "b": None, "v": None}
    return (
        relative(sf.unshard(grads["blocks"][3]), want),
        sorted({one.stage for one in log.select(op="reduce_scatter")}),
        sum(x.numel() for x in moments) == 2 * flat["blocks"][3].layout.piece,
    )


@pytest.mark.world(4)
@pytest.mark.parametrize("way", ["patterns", "partition"])
def test_what_is_frozen_moves_no_gradients_and_has_no_state(world: World, way: str) -> None:
    for d, stages, small in world.with_deadline(60).run(frozen_run, way):
        assert d < 1e-12
        assert stages == ["blocks.3"]
        assert small


def test_partition_and_combine_are_inverse() -> None:
    tree = {"a": torch.ones(2), "b": [torch.zeros(1, 3), None, 5], "c": ()}
    chosen, rest = sf.shards.partition(tree, lambda path, shape: path == "b.0" and shape == (1, 3))
    assert chosen["a"] is None
    assert rest["b"] == [None, None, 5]
    back = sf.shards.combine(chosen, rest)
    assert optree.tree_structure(back) == optree.tree_structure(tree)
    assert back["a"] is tree["a"]
    with pytest.raises(ValueError, match="2 trees have something at a"):
        sf.shards.combine(tree, tree)
    with pytest.raises(ValueError, match="another structure"):
        sf.shards.combine({"a": None}, {"b": None})


@pytest.mark.world(2)
def test_partition_refuses_to_take_a_buffer_apart(world: World) -> None:
    def body() -> None:
        flat = sf.shard(scaled(4), sf.make_mesh(shard=2, device="cpu"), sf.full_shard("shard"))
        sf.shards.partition(flat, lambda path, shape: path.endswith("w"))

    for error in world.errors(body):
        assert "stage 'blocks.0'" in str(error)
        assert "such as blocks.0.w, and others, such as blocks.0.b" in str(error)


def once(strategy: Any = True, stage: Any = None) -> tuple[int, int, float]:
    mesh, staged = data_mesh(4), functools.partial(sf.stage, reshard=stage)
    mine = token_rows(12).tensor_split(4)[mesh.get_rank()]
    want = sf.grad(lambda p: scaled_loss(plainly, p, token_rows(12)))(scaled(4))
    flat = sf.shard(scaled(4), mesh, STRATEGIES["full_shard"].with_reshard(strategy), frozen="embed.*")

    def step() -> Any:
        return sf.accumulate(lambda p, x: scaled_loss(staged, p, x), mine.split(1))(flat)[1]

    step()
    with sf.collectives.ledger() as log:
        grads = step()
    gathers = log.select(op="all_gather", scheduled=True)
    found = sf.unshard(grads["blocks"])
    return len(gathers), len([one for one in gathers if one.stage == "embed"]), relative(found, want["blocks"])


@pytest.mark.world(4)
def test_parameters_may_be_gathered_once_for_all_micro_batches(world: World) -> None:
    for way in ({"strategy": "step"}, {"stage": "step"}):
        for count, of_embed, d in world.with_deadline(60).run(once, **way):
            assert (count, of_embed) == (6, 1)
            assert d < 1e-12
    for count, of_embed, d in world.with_deadline(60).run(once, False):
        assert (count, of_embed) == (6 * 3, 3)
        assert d < 1e-12


def three_steps(reshard: Any) -> tuple[int, list[int]]:
    """Buffers for gathered parameters, which do not add up over steps."""
    mesh = data_mesh(4)
    flat = sf.shard(scaled(4), mesh, STRATEGIES["full_shard"].with_reshard(reshard))
    mine, sizes = token_rows(12).tensor_split(4)[mesh.get_rank()], []
    for _ in range(3):
        with sf.collectives.ledger() as log:
            grads = sf.accumulate(lambda p, x: scaled_loss(sf.stage, p, x), mine.split(1))(flat)[1]
        flat, _ = so.sgd(0.1).step(flat, grads, so.sgd(0.1).init(flat))
        sizes.append(log.gathered)
    return sum(one.layout.padded * 8 for one in optree.tree_leaves(flat, is_leaf=is_flat)), sizes


@pytest.mark.world(4)
@pytest.mark.parametrize("reshard", ["step", False])
def test_what_is_kept_is_given_back(world: World, reshard: Any) -> None:
    for whole, sizes in world.with_deadline(60).run(three_steps, reshard):
        assert sizes[1] == sizes[2]
        assert all(whole <= size <= whole + 6 * 512 for size in sizes)


def nearby() -> tuple[list[int], int]:
    mesh = data_mesh(4)
    flat = sf.shard(scaled(4), mesh, STRATEGIES["hpz"])
    mine, sizes = token_rows(12).tensor_split(4)[mesh.get_rank()], []
    for _ in range(3):
        with sf.collectives.ledger() as log:
            sf.grad(lambda p: scaled_loss(sf.stage, p, mine))(flat)
        sizes.append(log.gathered)
    return sizes, sum(flat["blocks"][i].layout.secondary.piece * 8 for i in range(4))


@pytest.mark.world(4)
def test_copies_for_backward_take_the_memory_of_their_pieces(world: World) -> None:
    for sizes, copies in world.with_deadline(60).run(nearby):
        assert sizes[1] == sizes[2]
        buffers = 2 * (11 * WIDTH * 8 + 64 * 4 + 512)
        assert all(copies <= size <= buffers + copies for size in sizes)


# --- replicas ---


def differing(which: str) -> None:
    mesh = data_mesh(4)
    flat = sf.shard(scaled(4), mesh, STRATEGIES["hybrid_shard"])
    if mesh.get_rank() == 2:
        values = flat["blocks"][1].values
        values[0] = torch.nextafter(values[0], values[0] + 1)
    sf.shards.assert_replicated({"params": flat, "also": torch.ones(2)} if which == "tree" else flat)


@pytest.mark.world(4)
@pytest.mark.parametrize("which", ["params", "tree"])
def test_replicas_that_differ_in_one_bit_are_named(world: World, which: str) -> None:
    for error in world.errors(differing, which):
        assert isinstance(error, ValueError)
        assert "blocks.1.b has some numbers on rank 0 and others on rank 2" in str(error)
        assert "blocks.1.w" not in str(error)


@pytest.mark.world(4)
def test_replicas_that_are_the_same_pass(world: World) -> None:
    def body() -> None:
        mesh = data_mesh(4)
        for strategy in STRATEGIES.values():
            sf.shards.assert_replicated(sf.shard(scaled(4), mesh, strategy))
        sf.shards.assert_replicated({"a": torch.ones(3)}, mesh)
        with pytest.raises(ValueError, match="pass the mesh"):
            sf.shards.assert_replicated({"a": torch.ones(3)})

    world.with_deadline(60).run(body)


@pytest.mark.world(4)
@pytest.mark.parametrize("inputs", ["global", "local"])
def test_shard_notices_replicas_that_start_from_different_bits(world: World, inputs: Any) -> None:
    def body() -> None:
        mesh = data_mesh(4)
        tree = {"w": torch.ones(4, 2), "v": torch.ones(3)}
        specs = sf.P() if inputs == "global" else sf.by_path([("w", sf.P("shard")), ("v", sf.P())])
        tree["w"] = tree["w"] * (1 + (mesh.get_rank() == 3))
        sf.shard(tree, mesh, sf.ddp("replica"), inputs=inputs, specs=specs)

    for error in world.errors(body):
        assert isinstance(error, ValueError)
        assert "w" in str(error)


# --- fairness of ragged batches ---


def ragged(strategy: sf.Placement, n: int) -> float:
    """The gradient of the mean over all tokens, where ranks have 1, 2, 3 and 10 samples."""
    mesh = data_mesh(n)
    cuts = [0, 1, 3, 6, 16] if n == 4 else [0, 1, 16] if n == 2 else [0, 16]
    every, rank = token_rows(16), mesh.get_rank()
    mine = every[cuts[rank] : cuts[rank + 1]]

    def mean(p: Any) -> Tensor:
        return sf.psum(scaled_loss(sf.stage, p, mine), DATA) / sf.psum(mine.numel(), DATA)

    got = sf.shard_map(sf.grad(mean), mesh=mesh, in_specs=(...,), out_specs=...)(sf.shard(scaled(4), mesh, strategy))
    want = sf.grad(lambda p: scaled_loss(plainly, p, every) / every.numel())(scaled(4))
    return relative(sf.unshard(got), want)


@pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_ragged_batches_give_the_global_token_mean(world: World, strategy: str) -> None:
    assert worst(world.with_deadline(60).run(ragged, STRATEGIES[strategy], world.size)) < 1e-12
