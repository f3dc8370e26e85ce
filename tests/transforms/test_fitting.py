"""Micro-batches that fit: whatever runs out of memory, wherever, runs again in smaller parts, and exactly."""

from __future__ import annotations

import math
import random
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.testing as testing
from shardfn.collectives import attempts
from shardfn.testing import World, simulated
from shardfn.transforms.shortage import exhausted
from tests.faults import DEPTH, Fault, compared, cpus, forget, out, parameters, pythons, trained
from tests.models import STRATEGIES, normal
from tests.reference import worst
from tests.refusals import told

PAIR, SQUARE = {"replica": 1, "shard": 2}, {"replica": 2, "shard": 2}
PLACES = [
    *(f"{way} {place}" for way in ("forward", "backward") for place in ("in front", "in 0", "in 1", "in 2", "after 1")),
    "loss",
]


@pytest.mark.world(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_one_rank_runs_out_of_memory_anywhere(world: World, place: str, rank: int) -> None:
    for used, met, same, far in world.run(compared, PAIR, "full_shard", [(rank, 0, place, 1, 1)]):
        assert (used, same) == ([2, 2], True)
        assert far < 1e-14
        assert met in (0, 1)


SEVERAL: dict[str, tuple[list[Fault], list[int]]] = {
    "twice in a row": ([(1, 0, "forward in 1", 1, 2)], [4, 4]),
    "first one rank, then the other": ([(0, 0, "backward in 2", 1, 1), (1, 0, "loss", 1, 2)], [4, 4]),
    "both at the same place": ([(r, 0, "forward after 1", 1, 1) for r in range(2)], [2, 2]),
    "at different places": ([(0, 0, "forward in 2", 1, 1), (1, 0, "backward in 1", 1, 1)], [2, 2]),
    "the other way round": ([(1, 0, "forward in front", 1, 1), (0, 0, "backward in front", 1, 1)], [2, 2]),
    "at the second micro-batch": ([(0, 0, "loss", 1, 1), (0, 0, "forward in 1", 2, 2)], [4, 4]),
    "at the second one's backward": ([(1, 0, "loss", 1, 1), (0, 0, "backward in 0", 2, 2)], [4, 4]),
    "when the others have finished": ([(0, 0, "loss", 1, 1), (1, 0, "backward in front", 2, 2)], [4, 4]),
    "down to single rows": ([(1, 0, "backward in 1", 1, 4)], [8, 8]),
    "later, when it has fitted": ([(0, 1, "backward in 1", 1, 1)], [1, 2]),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("case", SEVERAL)
def test_ranks_run_out_of_memory_several_times(world: World, case: str) -> None:
    faults, parts = SEVERAL[case]
    results = world.run(compared, PAIR, "full_shard", faults)
    assert [(used, same) for used, _, same, _ in results] == [(parts, True)] * 2
    assert worst(far for *_, far in results) < 1e-14
    assert sum(met for _, met, _, _ in results) >= 1


@pytest.mark.world(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_goes_on(world: World, strategy: str) -> None:
    at = list(STRATEGIES).index(strategy)
    faults = [(at % 4, 0, PLACES[(3 * at) % len(PLACES)], 1, 1), ((at + 1) % 4, 1, "backward in 1", 2, 2)]
    for used, _, same, far in world.run(compared, SQUARE, strategy, faults, 7):
        assert (used, same) == ([2, 4, 4, 4, 4, 4, 4], True)
        assert far < 1e-14


def at_random(seed: int) -> list[Fault]:
    draw = random.Random(seed)
    return [
        (draw.randrange(4), draw.randrange(3), draw.choice(PLACES), draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 4)))
        for _ in range(draw.randrange(1, 7))
    ]


@pytest.mark.world(4)
@pytest.mark.parametrize("seed", range(12))
def test_any_faults_on_any_ranks(world: World, seed: int) -> None:
    strategy = list(STRATEGIES)[seed % len(STRATEGIES)]
    results = world.run(compared, SQUARE, strategy, at_random(seed), 5)
    assert [used for used, *_ in results] == [results[0][0]] * 4
    assert all(same for _, _, same, _ in results)
    assert worst(far for *_, far in results) < 1e-14


HOW: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3},
    "remat": {"options": {"remat": True}, "dropout": 0.3},
    "kept": {"options": {"reshard": False}},
    "far ahead": {"options": {"prefetch": 2}},
    "offload": {"options": {"remat": "offload"}},
    "scatters put off": {"defer": "all"},
    "nothing put off": {"defer": "nothing"},
    "aux": {"has_aux": True},
    "outside of shard_map": {"scoped": False},
    "the CPU's error": {"error": cpus},
    "Python's error": {"error": pythons},
}


@pytest.mark.world(4)
@pytest.mark.parametrize("name", HOW)
def test_whatever_the_step_does(world: World, name: str) -> None:
    faults = [(3, 0, "backward in 1", 1, 1), (2, 0, "forward in 2", 2, 2)]
    for used, _, same, far in world.run(compared, SQUARE, "hybrid_shard", faults, 6, **HOW[name]):
        assert (used, same) == ([4] * 6, True)
        assert far < 1e-14 or math.isnan(far) == ("dropout" in HOW[name])


@pytest.mark.world(2)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_gradients_and_parameters_that_are_elsewhere(
    world: World, tier: Literal["host", "disk"], tmp_path: Path
) -> None:
    placement = sf.full_shard(("replica", "shard")).with_tiers(params=tier, grads=tier)
    faults = [(1, 0, "backward in 1", 1, 1), (0, 1, "forward in 2", 2, 2)]
    for used, _, same, far in world.run(compared, PAIR, placement, faults, 6, scratch=tmp_path):
        assert (used, same) == ([2] + [4] * 5, True)
        assert far < 1e-14


def threaded(result: list[Any]) -> Any:
    def run() -> None:
        result.append(compared(PAIR, "full_shard", [(1, 0, "backward in 1", 1, 1)], 3))

    thread = threading.Thread(target=run, name="another trainer")
    thread.start()
    thread.join()
    return [*result, compared(PAIR, "full_shard", [(0, 0, "forward in 2", 1, 1)])]


@pytest.mark.world(2)
def test_a_thread_of_its_own(world: World) -> None:
    for one, other in world.run(threaded, []):
        assert (one[0], one[2], other[0], other[2]) == ([2, 2, 2], True, [2, 2], True)


def alone(faults: list[Fault], **how: Any) -> Any:
    return compared({"replica": 1, "shard": 1}, "full_shard", faults, 3, **how)


def test_one_process() -> None:
    faults = [(0, 0, "backward in 1", 1, 1), (0, 0, "loss", 2, 3)]
    assert World(1, kind="alone").run(alone, faults)[0][:3] == ([4, 4, 4], 2, True)


def test_plain_parameters_and_no_process_group(caplog: pytest.LogCaptureFixture) -> None:
    batch, faults = (torch.arange(14.0, dtype=torch.float64).view(7, 2), {"y": torch.ones(7)}), [2, 3]

    def loss(p: Tensor, x: Tensor, more: dict[str, Tensor]) -> Tensor:
        if faults and len(x) > 2:
            faults.pop()
            raise cpus()
        return (p * x * more["y"][:, None]).sum()

    run = sf.accumulate(loss, batch, micro="auto")
    p = torch.tensor([1.0, 2.0], dtype=torch.float64)
    value, gradient = run(p)
    assert (value, gradient.tolist(), run.micro) == (p.mul(batch[0]).sum(), batch[0].sum(0).tolist(), 4)
    said = "accumulate: loss ran out of memory with 7 rows in 1 part, and runs again in 2: RuntimeError: [enforce"
    assert caplog.records[0].getMessage().startswith(said)
    assert sf.accumulate(loss, batch, micro=7)(p)[1].tolist() == batch[0].sum(0).tolist()


def remembered() -> Any:
    forget()
    used = []

    def loss(p: Tensor, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise out()
        return (p * x).sum()

    p = torch.ones(2, dtype=torch.float64)
    for n in (8, 8, 2, 3, 16, 12, 8):
        run = sf.accumulate(loss, torch.ones(n, 2, dtype=torch.float64), micro="auto")
        assert run(p)[0] == 2 * n
        used.append(run.micro)
    return used


def test_what_fits_is_known_at_the_next_step_and_is_a_start_for_larger_batches() -> None:
    assert World(1, kind="alone").run(remembered) == [[2, 2, 1, 1, 4, 4, 2]]


# --- what cannot go on ---


def too_large(kind: Callable[[], Exception]) -> Any:
    forget()
    said = told(lambda: trained(PAIR, "full_shard", "auto", [(1, 0, "backward in 1", 1, 9)], error=kind))
    return said, compared(PAIR, "full_shard", [(0, 0, "backward in 1", 1, 1)], 3)[:3]


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", [out, cpus, pythons])
def test_less_than_a_row_is_the_allocators_error_on_every_rank(world: World, kind: Callable[[], Exception]) -> None:
    for said, (used, _, same) in world.run(too_large, kind):
        assert said.startswith(
            "OutOfMemoryError: accumulate: loss runs out of memory with one row at a time (8 rows in 8"
        )
        assert "tried: 1, 2, 4, 8): rank 1: " in said
        assert "sf.stage(remat=True)" in said
        assert (used, same) == ([2, 2, 2], True)


def mixed(other: int, place: str, kind: type[Exception]) -> Any:
    forget()
    rank = torch.distributed.get_rank()
    error = (lambda: kind("mine")) if rank == other else out
    trained(PAIR, "full_shard", "auto", [(other, 0, place, 1, 9), (1 - other, 0, "forward in 2", 1, 9)], error=error)


@pytest.mark.parametrize("place", ["forward in 2", "loss"])
@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_another_error_on_one_rank_ends_it_on_all(place: str, kind: type[Exception]) -> None:
    with World(2, deadline=40) as world:
        mine, other = world.errors(mixed, 1, place, kind)
        assert isinstance(mine, torch.OutOfMemoryError)
        assert f"since rank 1 failed: {kind.__name__}: mine" in str(mine) or "with one row at a time" in str(mine)
        assert (type(other), str(other)) == (kind, "mine") or "with one row at a time" in str(other)


def lost(kept: Path) -> str:
    attempts.PATIENCE = 1.0
    forget()
    mesh = sf.make_mesh(device="cpu", shard=2)

    def loss(p: Tensor, x: Tensor) -> Tensor:
        if sf.psum(x.sum(), "shard") and mesh.get_rank() == 1:
            raise KeyboardInterrupt
        raise out()

    step = sf.shard_map(
        lambda p: sf.accumulate(loss, torch.ones(4, 2), micro="auto")(p), mesh=mesh, in_specs=(...,), out_specs=...
    )
    try:
        kept.write_text(told(lambda: step(torch.ones(2))))
    except KeyboardInterrupt:
        while not kept.exists():
            time.sleep(0.1)
    return kept.read_text()


def test_a_rank_that_does_not_come_back_is_not_waited_for(tmp_path: Path) -> None:
    with World(2, deadline=60) as world:
        said = world.run(lost, tmp_path / "said")[0]
    assert said.startswith("RuntimeError: accumulate of loss in 1 part: it was aborted, and rank 1 has not come back")


def only_one(place: str) -> Any:
    forget()
    said = told(lambda: trained(PAIR, "full_shard", "auto", [(1, 0, place, 1, 9)], error=lambda: ValueError("mine")))
    if torch.distributed.get_rank() == 1:
        assert said == "ValueError: mine", said
        raise ValueError(said)
    return said


@pytest.mark.parametrize("place", ["forward in 1", "backward in front"])
def test_an_error_that_is_not_about_memory_is_as_without(place: str) -> None:
    with World(2, deadline=40) as world:
        errors = world.errors(only_one, place)
        assert str(errors[1]) == "ValueError: mine"


def everywhere() -> Any:
    forget()
    faults = [(rank, 0, "loss", 1, 9) for rank in range(2)]
    said = told(lambda: trained(PAIR, "full_shard", "auto", faults, error=lambda: ValueError("mine")))
    return said, compared(PAIR, "full_shard", [(0, 0, "loss", 1, 1)])[:3]


@pytest.mark.world(2)
def test_an_error_on_every_rank_is_everybodys_own(world: World) -> None:
    assert [said for said, _ in world.run(everywhere)] == ["ValueError: mine"] * 2


def in_place(what: str, only: int) -> str:
    forget()
    mesh = sf.make_mesh(device="cpu", shard=2)
    p, x = torch.ones(2), torch.ones(4, 2)

    def loss(p: Any, x: Tensor) -> Tensor:
        if only in (-1, mesh.get_rank()):
            with torch.no_grad():
                (p if what == "params" else x).mul_(2)
        if len(x) > 2 and mesh.get_rank() == 1:
            raise out()
        return sf.psum((p * x).sum(), "shard")

    step = sf.shard_map(
        lambda p, x: sf.accumulate(loss, x, micro="auto")(p), mesh=mesh, in_specs=(..., ...), out_specs=...
    )
    return told(lambda: step(p, x))


@pytest.mark.world(2)
@pytest.mark.parametrize("only", [-1, 0, 1])
@pytest.mark.parametrize("what", ["params", "batch"])
def test_what_writes_into_its_arguments_does_not_run_again(world: World, what: str, only: int) -> None:
    ranks = "0, 1" if only == -1 else str(only)
    for said in world.run(in_place, what, only):
        assert f"cannot run again in smaller ones: on rank {ranks} it has written into its parameters or its" in said


X = torch.ones(4, 2)
WRONG: dict[str, tuple[Any, Any, str]] = {
    "no parts": (X, 0, "ValueError: accumulate: micro must be 1 or more, got 0"),
    "fewer than none": (X, -1, "ValueError: accumulate: micro must be 1 or more, got -1"),
    "a fraction": (X, 2.0, 'TypeError: accumulate: micro must be a number of parts, "auto" or "exact", got 2.0'),
    "a truth": (X, True, 'TypeError: accumulate: micro must be a number of parts, "auto" or "exact", got True'),
    "another word": (X, "all", 'TypeError: accumulate: micro must be a number of parts, "auto" or "exact"'),
    "a tensor of parts": (
        X,
        torch.tensor(2),
        'TypeError: accumulate: micro must be a number of parts, "auto" or "exact"',
    ),
    "no tensors": (
        {},
        "auto",
        "ValueError: accumulate: with micro= the second argument is one batch, and this one has",
    ),
    "a number in it": ((X, 3), "auto", "TypeError: accumulate: batch[1] is of type int; with micro= a batch is"),
    "a set in it": ({"x": X, "mask": {1}}, "auto", "TypeError: accumulate: batch['mask'] is of type set"),
    "a list of words": (["a"], 2, "TypeError: accumulate: batch[0] is of type str"),
    "a generator": (iter([X]), 1, "TypeError: accumulate: batch is of type list_iterator"),
    "a scalar": ((X, torch.tensor(1.0)), 2, "ValueError: accumulate: batch[1] is a scalar; every tensor of a batch"),
    "rows of two kinds": (
        {"x": X, "y": X[:3]},
        2,
        "ValueError: accumulate: tensors of one batch have the same number of",
    ),
    "a gradient": (X.clone().requires_grad_(), 2, "ValueError: accumulate: batch requires a gradient; only `params`"),
}


def asked(batch: Any, micro: Any, only: int | None, scoped: bool) -> str:
    """What a rank is told; where only one has it wrong, the others pass what is right."""
    mesh = sf.make_mesh(device="cpu", shard=2)
    batch, micro = (batch, micro) if only in (None, mesh.get_rank()) else (torch.ones(4, 2), "auto")
    p = torch.ones(2)

    def step(p: Tensor) -> Any:
        return sf.accumulate(lambda p, *x: p.sum(), batch, micro=micro)(p)

    return told(lambda: (sf.shard_map(step, mesh=mesh, in_specs=(...,), out_specs=...) if scoped else step)(p))


def all_asked(scoped: bool) -> list[list[str]]:
    found = []
    for batch, micro, _ in WRONG.values():
        given = iter([X]) if micro == 1 else batch
        each = [asked(given, micro, None, scoped)]
        for only in range(2):
            forget()
            each.append(asked(iter([X]) if micro == 1 else batch, micro, only, scoped))
        found.append(each)
    return found


@pytest.mark.world(2)
@pytest.mark.parametrize("scoped", [True, False])
def test_what_cannot_be_cut_is_said_on_every_rank(world: World, scoped: bool) -> None:
    for rank, results in enumerate(world.run(all_asked, scoped)):
        for (name, (_, _, want)), (both, *each) in zip(WRONG.items(), results, strict=True):
            assert both.startswith(want), name
            assert each[rank].startswith(want), name
            assert f"accumulate: rank {1 - rank} failed: " in each[1 - rank], name
            assert want.split(": ", 2)[2][:20] in each[1 - rank], name


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "another number of parts": (torch.ones(4, 2), 2),
    "another dtype": (torch.ones(4, 2).double(), "auto"),
    "another structure": ({"x": torch.ones(4, 2)}, "auto"),
    "another dimension": (torch.ones(4), "auto"),
    "no rows on any rank": (torch.ones(0, 2), "auto"),
}


def differing(name: str) -> str:
    mesh = sf.make_mesh(device="cpu", shard=2)
    batch, micro = DIFFERENT[name]
    if mesh.get_rank() == 0:
        batch, micro = batch[:0] if name == "no rows on any rank" else torch.ones(4, 2), "auto"
    step = sf.shard_map(
        lambda p: sf.accumulate(lambda p, x: p.sum(), batch, micro=micro)(p),
        mesh=mesh, in_specs=(...,), out_specs=...,
    )  # fmt: skip
    return told(lambda: step(torch.ones(2)))


@pytest.mark.world(2)
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_cut_alike(world: World, name: str) -> None:
    for said in world.run(lambda: forget() and differing(name)):
        if name == "no rows on any rank":
            assert said == "ValueError: accumulate: the batch has no rows, on any rank"
        else:
            assert said.startswith("ValueError: accumulate: the micro-batches differ between ranks: rank 0 has ")
            assert "Ranks cut their batches alike" in said


def transformed() -> list[str]:
    def both(micro: Any, p: Tensor) -> Any:
        return sf.accumulate(lambda p, x: (p * x).square().sum(), torch.ones(4, 2), micro=micro)(p)[0]

    p = torch.ones(2)
    return [
        told(lambda: torch.func.grad(lambda p: both("auto", p))(p)),
        told(lambda: torch.func.vmap(lambda p: both("auto", p))(p[None])),
        told(lambda: sf.grad(lambda p: both("auto", p))(p)),
        told(lambda: both("auto", p.clone().requires_grad_())),
        told(lambda: torch.func.jvp(lambda p: both("auto", p), (p,), (p,))),
        str(torch.func.grad(lambda p: both(2, p))(p).tolist()),
        str(torch.func.jvp(lambda p: both(2, p), (p,), (p,))[1].item()),
    ]


def test_what_something_outside_differentiates_is_refused_with_auto_and_exact_with_a_number() -> None:
    *refused, gradient, tangent = transformed()
    for said in refused:
        assert said.startswith("RuntimeError: accumulate: micro='auto' with <lambda> under a torch.func transform, or")
        assert "Pass a number: micro=2" in said
    assert (gradient, tangent) == ("[8.0, 8.0]", "16.0")


# --- other worlds ---


def in_threads() -> Any:
    forget()
    return compared(PAIR, "full_shard", [])[:3]


def test_threads_and_made_up_ranks_run_as_usual() -> None:
    assert testing.world(2, "threads").run(in_threads) == [([1, 1], 0, True)] * 2
    with World(2, kind="fake") as world:
        assert world.run(lambda: trained(PAIR, "full_shard", "auto", [(0, 0, "loss", 1, 1)])[1:]) == [([2], 1)]


def out_in_threads() -> Any:
    forget()
    faults = [(rank, 0, "loss", 1, 9) for rank in range(2)]
    return told(lambda: trained(PAIR, "full_shard", "auto", faults))


def test_where_groups_cannot_be_made_anew_the_number_to_pass_is_said() -> None:
    for rank, said in enumerate(testing.world(2, "threads").run(out_in_threads)):
        assert said.startswith(f"RuntimeError: accumulate: loss ran out of memory on rank {rank} in micro=1 (")
        assert said.endswith("pass micro=2 in place of micro='auto'")


def on_a_device() -> int:
    with simulated(2) as device:
        mesh = sf.make_mesh(device=device.name, shard=2)
        ps = sf.shard(optree.tree_map(lambda x: x.to(device.name), parameters()), mesh, sf.full_shard("shard"))
        left = [1, 2]

        def loss(ps: Any, x: Tensor) -> Tensor:
            for p in sf.layers(ps["blocks"]):
                x = sf.stage(lambda p, x: x @ p["w"])(p, x)
            if left:
                left.pop()
                raise out()
            return x.sum()

        run = sf.accumulate(loss, torch.ones(8, 4, dtype=torch.float64, device=device.name), micro="auto")
        run(ps)
        return run.micro


def random_numbers_set_back(initialized: bool) -> Any:
    """How often the device's numbers are read, set back and begun anew, where the program itself brings rows there."""
    with simulated(1) as device, pytest.MonkeyPatch.context() as patch:
        in_use = [initialized]
        patch.setattr(torch.get_device_module(device.name), "is_initialized", lambda: in_use[0], raising=False)

        def loss(p: Tensor, x: Tensor) -> Tensor:
            in_use[0] = True
            x = x.to(device.name)
            if len(x) > 2:
                raise out()
            return (p * x.cpu()).sum()

        device.generators.clear()
        sf.accumulate(loss, torch.ones(8, 2), micro="auto")(torch.ones(2))
        return [device.generators[name] for name in ("get_rng_state", "set_rng_state", "manual_seed")]


def test_random_numbers_of_a_device_that_only_the_program_knows_are_set_back() -> None:
    with World(1, kind="alone") as world:
        assert world.run(random_numbers_set_back, True) == [[1, 2, 0]]
        assert world.run(random_numbers_set_back, False) == [[0, 0, 2]]


def test_an_error_is_not_for_want_of_memory_because_it_comes_after_one_that_was() -> None:
    parts = []

    def loss(p: Tensor, x: Tensor) -> Tensor:
        parts.append(len(x))
        raise ValueError("a mistake")

    def again(loss: Callable[..., Tensor]) -> Any:
        try:
            raise out()
        except torch.OutOfMemoryError:
            run = sf.accumulate(loss, torch.ones(8, 2), micro="auto")
            run(torch.ones(2))
            return run.micro

    assert told(lambda: again(loss)) == "ValueError: a mistake"
    assert parts == [8]

    def large(p: Tensor, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise out()
        return (p * x).sum()

    assert again(large) == 4


def test_a_device_of_its_own() -> None:
    with World(1, kind="alone") as world:
        assert world.run(on_a_device) == [4]


LIBRARIES = [
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "Cuda failure 'out of memory'",
    "Failed to CUDA calloc 6291456 bytes",
    "Failed to CUDA host alloc 4096 bytes",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: insufficient resources when calling `cusparseCreate(handle)`: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
]


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (out(), "OutOfMemoryError: pretended: out of memory. Tried to allocate 2.00 GiB"),
        (pythons(), "MemoryError"),
        (RuntimeError("std::bad_alloc"), "RuntimeError: std::bad_alloc"),
        *[(RuntimeError(f"{text}\nCompile with more"), f"RuntimeError: {text}") for text in LIBRARIES],
        (
            RuntimeError(
                "NCCL error in: NCCLUtils.hpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
                "version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
                "Cuda failure 2 'out of memory'"
            ),
            "RuntimeError: Cuda failure 2 'out of memory'",
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (RuntimeError("NCCL error: Cuda failure 1 'invalid argument'"), None),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), None),
        (RuntimeError("Connection closed by peer"), None),
    ],
)
def test_what_is_for_want_of_memory(error: Exception, want: str | None) -> None:
    found = exhausted(error)
    assert found is None if want is None else found is not None and found.startswith(want)
    later = RuntimeError("stage 'blocks.0': ...")
    later.__context__ = error
    assert exhausted(later) == found


# --- true limits ---


def under_limit(sizes: dict[str, int], room: int | None) -> Any:
    """A batch whose activations take 32 MB a row and block, which fit into `room` bytes in parts only."""
    mesh = sf.make_mesh(device="cpu", **sizes)
    wide = 2**20
    flat = sf.shard({"blocks": [{"w": normal(2, seed=i)} for i in range(DEPTH)]}, mesh, sf.full_shard("shard"))
    rows = normal(8, 1, seed=60 + mesh.get_rank())
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    if room is not None:
        with open("/proc/self/status") as status:
            now = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (now + room, limits[1]))

    def block(p: Any, x: Tensor) -> Tensor:
        return (x * p["w"][0]).sin() + p["w"][1]

    def loss(ps: Any, x: Tensor) -> Tensor:
        x = x.expand(-1, wide)
        for p in sf.layers(ps["blocks"]):
            x = sf.stage(block)(p, x)
        return x.square().sum() / (8 * wide)

    try:
        run = sf.accumulate(loss, rows, micro="auto")
        value, grads = run(flat)
        whole = told(lambda: sf.accumulate(loss, rows, micro=1)(flat)) if room is not None and mesh.size() == 1 else ""
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    return run.micro, value, sf.unshard(grads), whole


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_batch_that_does_not_fit_trains_under_a_limit_of_the_process(n: int) -> None:
    with World(n, deadline=120) as world:
        limited = world.run(under_limit, {"shard": n}, 420 * 2**20)
        free = world.run(lambda: forget() and under_limit({"shard": n}, None))
    assert [micro for micro, *_ in free] == [1] * n
    assert {micro for micro, *_ in limited} in ({2}, {4}, {8})
    for (_, value, grads, whole), (_, want, exact, _) in zip(limited, free, strict=True):
        torch.testing.assert_close((value, grads), (want, exact), rtol=1e-12, atol=1e-14)
        assert "DefaultCPUAllocator: can't allocate memory" in whole or n > 1


def piped() -> Any:
    forget()
    mesh = sf.make_mesh(device="cpu", pipe=2)
    rank, rows = mesh.get_rank(), normal(8, 3, seed=70)
    w = normal(3, 3, seed=71 + rank)

    def part(w: Tensor, x: Tensor | None, batch: Tensor) -> Tensor:
        if len(batch) > 2 and rank == 1:
            raise out()
        y = torch.tanh((batch if x is None else x) @ w)
        return y.square().sum() if rank else y

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return sf.parallel.pipeline(part, w, x.chunk(2), "pipe")

    def step(w: Tensor, micro: Any) -> Any:
        run = sf.accumulate(loss, rows, micro=micro)
        return *run(w), run.micro

    mapped = sf.shard_map(step, mesh=mesh, in_specs=(..., ...), out_specs=...)
    first, again, other = mapped(w, "auto"), mapped(w, "auto"), mapped(w, 2)
    return first[2], all(torch.equal(a, b) for one in (again, other) for a, b in zip(first[:2], one[:2], strict=True))


@pytest.mark.world(2)
def test_a_part_of_a_pipeline_runs_out_of_memory(world: World) -> None:
    assert world.run(piped) == [(2, True)] * 2
