"""Programs whose ranks do not do the same end within seconds in the debug mode, and the message names the culprit.

Each is what somebody might write by mistake. Without the mode some of them wait for ever, and some mix up numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.collectives import into_buffers
from shardfn.collectives.agree import compare
from shardfn.collectives.ledger import attribution
from shardfn.mesh.deadlock import State, waits_in_vain
from shardfn.testing import World, WorldError, errors, world
from tests.heard import heard

CULPRIT, SIZE, WITHIN = 1, 3, 10.0
HERE = r"\S+test_hangs\.py:\d+"

first = sf.stage(lambda p, x: torch.tanh(x @ p))


def culprit() -> bool:
    return dist.get_rank() == CULPRIT


def mesh() -> Any:
    return sf.make_mesh(shard=-1, device="cpu")


def parameters() -> Any:
    generator = torch.Generator().manual_seed(0)
    plain = {name: torch.randn(4, 4, dtype=torch.float64, generator=generator) for name in "abc"}
    return sf.shard(plain, mesh(), sf.full_shard("shard"))


def rows() -> Tensor:
    return torch.ones(2, 4, dtype=torch.float64)


def under(f: Callable[[], Any]) -> Any:
    return sf.shard_map(f, mesh=mesh(), in_specs=..., out_specs=..., check=False)()


def model(params: Any, names: str) -> Tensor:
    x = rows()
    for name in names:
        x = first(params[name], x)
    return x.sum()


def step(params: Any, names: str = "abc") -> Any:
    return sf.value_and_grad(model)(params, names)


def trained(flat: sf.shards.FlatShard) -> sf.shards.FlatShard:
    return sf.shards.FlatShard(flat.values.detach().requires_grad_(), flat.layout)


# --- programs that are told what differs: the ranks live on ---


def skips_a_stage(params: Any) -> None:
    step(params, "ac" if culprit() else "abc")


def skips_the_last_stage(params: Any) -> None:
    step(params, "ab" if culprit() else "abc")


def runs_stages_in_another_order(params: Any) -> None:
    step(params, "acb" if culprit() else "abc")


def skips_backward(params: Any) -> None:
    required = {name: trained(params[name]) for name in "abc"}

    def work() -> None:
        loss = model(required, "abc")
        if not culprit():
            loss.backward()
        sf.psum(torch.ones(2), "shard")

    under(work)


def runs_backward_in_another_order(params: Any) -> None:
    losses = {name: model({name: trained(params[name])}, name) for name in "ab"}
    for name in "ba" if culprit() else "ab":
        losses[name].backward()


def loops_once_more(params: Any) -> None:
    for _ in range(3 if culprit() else 2):
        step(params)
    under(lambda: sf.psum(torch.ones(2), "shard"))


def goes_on_after_an_error(params: Any) -> None:
    """The error of one rank is caught around the step, as loops do that want to go on."""

    def work(number: int) -> Tensor:
        x = sf.psum(torch.ones(2), "shard")
        if culprit() and number == 1:
            raise ValueError("an odd batch")
        return sf.psum(x, "shard")

    for number in range(3):
        try:
            under(functools.partial(work, number))
        except ValueError as error:
            if str(error) != "an odd batch":
                raise


def skips_a_psum(_: Any) -> None:
    def work() -> None:
        if not culprit():
            sf.psum(torch.ones(2), "shard")
        sf.psum(torch.ones(2), "shard")

    under(work)


def swaps_two_psums(_: Any) -> None:
    def work() -> None:
        def total() -> Tensor:
            return sf.psum(torch.ones(2), "shard")

        def count() -> Tensor:
            return sf.psum(torch.ones(2), "shard")

        for one in (count, total) if culprit() else (total, count):
            one()

    under(work)


def has_another_shape(_: Any) -> None:
    under(lambda: sf.psum(torch.ones(3 if culprit() else 2), "shard"))


def has_another_dtype(_: Any) -> None:
    under(lambda: sf.psum(torch.ones(2, dtype=torch.float64 if culprit() else torch.float32), "shard"))


def does_something_else(_: Any) -> None:
    under(lambda: sf.all_gather(torch.ones(2), "shard") if culprit() else sf.psum(torch.ones(2), "shard"))


def goes_once_more_by_one_line(_: Any) -> None:
    """The same line on all ranks, and the same shapes; who is in which call tells them apart."""

    def work(times: int) -> None:
        for _ in range(times):
            sf.psum(torch.ones(2), "shard")

    under(lambda: work(3 if culprit() else 2))
    under(lambda: work(2))


PSUM = rf"psum\(torch\.float32 \[2\]\) over shard, called at {HERE}"
BACKWARD = rf"\(that ran forward at {HERE}\), called at {HERE}"
COMPARISON = rf"a comparison of the arguments of 'shard_map\(\S+\)', called at {HERE}"
FAILED = rf"\(after it has left with ValueError \(an odd batch\), raised at {HERE}, the call at {HERE}\)"


def gathers(stage: str) -> str:
    return rf"all_gather\(torch\.float64 \[24\]\) over shard of stage '{stage}' in forward, called at {HERE}"


def reduces(stage: str) -> str:
    return rf"reduce_scatter\(torch\.float64 \[24\]\) over shard of stage '{stage}' in backward {BACKWARD}"


DIFFERING: dict[Callable[[Any], None], tuple[str, str]] = {
    # what the others are about to do, and what the culprit is
    skips_a_stage: (gathers("b"), gathers("c")),
    skips_the_last_stage: (gathers("c"), reduces("b")),
    runs_stages_in_another_order: (gathers("b"), gathers("c")),
    skips_backward: (reduces("c"), PSUM),
    runs_backward_in_another_order: (reduces("a"), reduces("b")),
    loops_once_more: (COMPARISON, gathers("a")),
    goes_on_after_an_error: (PSUM, f"{COMPARISON} {FAILED}"),
    skips_a_psum: (PSUM, PSUM),
    swaps_two_psums: (PSUM, PSUM),
    goes_once_more_by_one_line: (COMPARISON, PSUM),
    has_another_shape: (PSUM, PSUM.replace(r"\[2\]", r"\[3\]")),
    has_another_dtype: (PSUM, PSUM.replace("float32", "float64")),
    does_something_else: (PSUM, PSUM.replace("psum", "all_gather").replace(r"\]\)", r"\], dim=0, size=3\)")),
}


def differing(programs: list[Callable[[Any], None]]) -> dict[str, tuple[str, str, float]]:
    params = parameters()
    step(params)
    found = {}
    with sf.debug(collectives=True):
        for program in programs:
            began = time.monotonic()
            try:
                program(params)
                found[program.__name__] = ("nothing", "", 0.0)
            except (ValueError, RuntimeError) as error:
                found[program.__name__] = (type(error).__name__, str(error), time.monotonic() - began)
        step(params)  # nothing is left on the way
    return found


def test_what_differs_is_told_on_every_rank_which_lives_on() -> None:
    every = world(SIZE).with_deadline(120).run(differing, [*DIFFERING])
    for program, (others, mine) in DIFFERING.items():
        for found in every:
            kind, said, took = found[program.__name__]
            assert kind == "ValueError", (program.__name__, said)
            # Two of three do the same, which is told once.
            assert re.search(rf": ranks 0, 2 have {others}[^;]*; rank 1 has {mine}", said), (program.__name__, said)
            assert took < WITHIN


def checked(trees: bool = False) -> tuple[str, str]:
    mine = {"ca"[not culprit()]: torch.ones(2), "b": torch.ones(2)} if trees else torch.ones(2 + culprit())
    try:
        sf.shard_map(lambda: sf.psum(mine, "shard"), mesh=mesh(), in_specs=..., out_specs=...)()
    except sf.check.VaryingError as error:
        return error.findings[0].kind, str(error)
    return "", ""


def test_a_call_that_is_checked_compares_without_the_mode() -> None:
    for kind, said in world(SIZE).with_deadline(60).run(checked):
        assert kind == "collectives"
        assert re.search(rf": ranks 0, 2 have {PSUM}; rank 1 has psum\(torch\.float32 \[3\]\)", said)


def test_trees_of_other_keys_are_not_added_up() -> None:
    for kind, said in world(SIZE).with_deadline(60).run(checked, True):
        assert kind == "collectives"
        assert "ranks 0, 2 have psum(a: torch.float32 [2])" in said
        assert "rank 1 has psum(b: torch.float32 [2])" in said


# --- programs in which ranks would wait for a rank that does not come: their groups are not used again ---


class Told(RuntimeError):
    """What a rank was told, and after how many seconds."""


@contextlib.contextmanager
def timed() -> Iterator[None]:
    began = time.monotonic()
    try:
        with sf.debug(collectives=True):
            yield
    except RuntimeError as error:
        raise Told(f"after {time.monotonic() - began:.2f} s: {error}") from None


def leaves_the_process() -> NoReturn:
    """As a process that has come to the end of its program."""
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(0)


def twice(before: Callable[[], object]) -> Tensor:
    """Two sums, before the second of which some rank does something."""
    sf.psum(torch.ones(2), "shard")
    before()
    return sf.psum(torch.ones(3), "shard")


def fails() -> None:
    if culprit():
        raise KeyError("an odd batch")


def dies() -> None:
    if culprit():
        os._exit(3)


def dies_before_a_collective(_: Any) -> None:
    with timed():
        under(lambda: twice(dies))


def dies_before_a_stage(params: Any) -> None:
    with timed():
        step(params, "ab")
        dies()
        step(params)


def raises_and_is_caught_elsewhere(_: Any) -> str:
    """The process lives on, and does nothing that others could see."""
    with timed(), contextlib.suppress(KeyError):
        under(lambda: twice(fails))
    return "lives on"


def raises_inside_a_step(params: Any) -> str:
    def loss(params: Any) -> Tensor:
        x = model(params, "ab")
        fails()
        return x + model(params, "c")

    with timed(), contextlib.suppress(KeyError):
        sf.value_and_grad(loss)(params)
    return "lives on"


def returns_early_from_a_step(_: Any) -> str:
    def work() -> Tensor:
        x = sf.psum(torch.ones(2), "shard")
        return x if culprit() else sf.psum(x, "shard")

    with timed():
        under(work)
    return "lives on"


def ends_the_loop_early(params: Any) -> None:
    with timed():
        for number in range(3):
            if culprit() and number == 2:
                leaves_the_process()
            step(params)


def ends_the_loop_early_and_saves(params: Any) -> None:
    with timed():
        for number in range(3):
            if culprit() and number == 2:
                break
            step(params)
        sf.checkpoint.save("/nowhere/at/all", params)


def does_one_step_more(params: Any) -> None:
    """The others come to the end of their programs."""
    with timed():
        for _ in range(3 if culprit() else 2):
            step(params)
        if not culprit():
            leaves_the_process()


def sums_over_another_axis(_: Any) -> None:
    """Rank 2 meets rank 3 in vain, and leaves rank 0 alone; each ends its process when it is done."""
    square, axis = sf.make_mesh(a=2, b=2, device="cpu"), "b" if dist.get_rank() == 2 else "a"
    work = sf.shard_map(lambda: sf.psum(torch.ones(2), axis), mesh=square, in_specs=..., out_specs=..., check=False)
    try:
        with timed():
            work()
    except Told as error:
        if dist.get_rank() == 0:
            raise
        sys.last_value = error  # as the interpreter does before it leaves
    leaves_the_process()


LATER = PSUM.replace(r"\[2\]", r"\[3\]")
KILLED = (
    r"rank 1 has ended without an error message \(killed, out of memory, or crashed\); look first at "
    "its output, and at the system's log. The last that all ranks came to was"
)
ERROR = rf"rank 1 has left with KeyError \('an odd batch'\), raised at {HERE}, the call at {HERE}"


def in_axis(name: str) -> str:
    return PSUM.replace("over shard", f"over {name}")


WAITING: dict[Callable[[Any], Any], dict[int, str]] = {
    # what those say that are told
    dies_before_a_collective: dict.fromkeys((0, 2), rf"{LATER}: {KILLED} {PSUM}"),
    dies_before_a_stage: {r: rf"{gathers('a')}: {KILLED} {reduces('a')}" for r in (0, 2)},
    raises_and_is_caught_elsewhere: dict.fromkeys((0, 2), rf"{LATER}: {ERROR}"),
    raises_inside_a_step: {r: rf"{gathers('c')}: {ERROR}" for r in (0, 2)},
    returns_early_from_a_step: dict.fromkeys((0, 2), rf"{PSUM}: rank 1 has returned from the call at {HERE}"),
    ends_the_loop_early: {r: rf"{gathers('a')}: rank 1 has ended, after {reduces('a')}" for r in (0, 2)},
    ends_the_loop_early_and_saves: {
        **{r: rf"{gathers('a')}: rank 1 waits for .* in sf\.checkpoint\.save, called at {HERE}" for r in (0, 2)},
        1: rf"in sf\.checkpoint\.save, called at {HERE}: ranks 0, 2: waits for {gathers('a')}",
    },
    does_one_step_more: {1: rf"{gathers('a')}: ranks? (0|2|0, 2):? ha(s|ve) ended, after {reduces('a')}"},
    sums_over_another_axis: {0: rf"{in_axis('a')}: rank 2 has failed: Told: .* {in_axis('b')}: rank 3 has ended"},
}


def in_the_world(name: str) -> Any:
    if name == sums_over_another_axis.__name__:
        return sums_over_another_axis(None)
    params = parameters()
    step(params)
    return globals()[name](params)


@pytest.mark.parametrize("program", WAITING, ids=lambda program: program.__name__)
def test_ranks_are_told_who_does_not_come(program: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "GRACE", WITHIN)  # the others shall have time to notice
    wanted = WAITING[program]
    size = 4 if program is sums_over_another_axis else SIZE
    with World(size, deadline=60) as fresh, pytest.raises(WorldError) as caught:
        fresh.run(in_the_world, program.__name__)
    for rank, said in wanted.items():
        failure = caught.value.failures[rank]
        assert failure.how == "raised", f"rank {rank}: {failure}"
        assert re.search(said, failure.message), f"rank {rank}: {failure.message}"
        assert float(re.findall(r"after ([\d.]+) s", failure.message)[0]) < WITHIN


# --- what is compared ---


def strategies() -> dict[str, tuple[Any, dict[str, Any], dict[str, str]]]:
    """Strategy, options of the stage, and transports: every way by which a stage moves anything."""
    both, few = ("replica", "shard"), {"gather_format": sf.quant.int8(64), "reduce_format": sf.quant.int8(64)}
    native = {"all_gather": "native", "reduce_scatter": "native"}
    return {
        "pieces": (sf.full_shard(both), {}, {}),
        "buffers": (sf.full_shard(both), {}, native),
        "broadcasts": (sf.full_shard(both), {}, {"all_gather": "broadcasts", "reduce_scatter": "exchange"}),
        "sums": (sf.ddp(both), {}, {}),
        "state": (sf.strategies.zero1(both), {}, {}),
        "replicas": (sf.hybrid_shard(shard="shard", replica="replica"), {}, {}),
        "hops": (sf.strategies.mics(both), {}, {}),
        "few bits": (sf.full_shard(both), few, {}),
        "few bits, replicas": (sf.hybrid_shard(shard="shard", replica="replica"), few, native),
    }


def moved_and_compared(name: str) -> tuple[set[Any], set[Any]]:
    """What a step has moved for each stage and in which pass, by the ledger; and what was compared before."""
    strategy, options, ways = strategies()[name]
    square, compared = sf.make_mesh(replica=2, shard=2, device="cpu"), set()
    plain = {k: torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) for k in "ab"}
    params = sf.shard(plain, square, strategy)
    layer, opt = sf.stage(lambda p, x: torch.tanh(x @ p), **options), sf.optim.sgd(0.1)

    def counted(op: str, values: str, axis: Any, served: bool = False) -> None:
        compared.add((op, attribution.stage, bool(attribution.backward)))
        compare(op, values, axis, served=served)

    with (
        mock.patch.object(into_buffers, "compare", counted), sf.collectives.transports(square, **ways),
        sf.debug(collectives=True), sf.collectives.ledger() as log,
    ):  # fmt: skip
        x = torch.ones(2, 16)
        _, grads = sf.value_and_grad(lambda p: layer(p["b"], layer(p["a"], x)).sum())(params)
        opt.step(params, grads, opt.init(params))
    return {(one.op, one.stage, one.backward) for one in log.records if one.scheduled}, compared


@pytest.mark.parametrize("name", strategies())
def test_whatever_a_stage_moves_is_compared_before(name: str) -> None:
    for moved, compared in world(4).with_deadline(60).run(moved_and_compared, name):
        assert {stage for _, stage, _ in moved} >= {"a", "b"}
        assert compared >= moved


# --- a rank that only takes long ---


def takes_long(seconds: float) -> list[str]:
    def late() -> None:
        if culprit():
            time.sleep(seconds)

    with sf.debug(collectives=True), heard() as said:
        assert under(lambda: twice(late)).tolist() == [SIZE] * 3
    return said


def test_a_rank_that_computes_is_waited_for_and_named() -> None:
    every = world(SIZE).with_deadline(60).run(takes_long, 6.0)
    named = rf"has waited [\d.]+ s for {LATER}: .*rank 1 has not come, and does something else, after {PSUM}"
    for rank in (0, 2):
        assert any(re.search(named, line) for line in every[rank]), every[rank]
    assert not any("in vain" in line for said in every for line in said)


# --- what follows from where ranks say that they stand, alone ---


def at(number: int, inside: int, *, first: bool = False) -> State:
    """A rank that waits at a comparison."""
    wait = {
        "group": "g", "ranks": [0, 1], "told": "psum", "key": "comparing", "count": number, "sided": False,
        "first": first, "place": ["g", number, inside],
    }  # fmt: skip
    thread = {"thread": 1, "main": True, "used": ["g"], "wait": wait}
    return {
        "beat": 1, "ended": "", "vain": {}, "last": "", "left": {}, "threads": [thread],
        "counts": {"g": {"comparing": number}},
    }  # fmt: skip


def gone_on(last: int, came: int) -> State:
    """A rank that has left a call whose last comparison had this number."""
    left = {"g": [last, "has returned from the call at train.py:3"]}
    return {
        "beat": 1, "ended": "", "vain": {}, "last": "", "left": left, "threads": None,
        "counts": {"g": {"comparing": came}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("waiting", "other", "vain"),
    [
        (at(5, 2), gone_on(4, 4), {0}),
        (at(5, 1), gone_on(4, 4), set()),
        (at(5, 2), gone_on(3, 3), set()),
        (at(5, 2), gone_on(4, 5), set()),
    ],
    ids=["it has left the call", "another call may begin with it", "it is behind", "it has come"],
)
def test_who_has_left_the_call_in_which_others_wait_cannot_come(waiting: State, other: State, vain: set[int]) -> None:
    assert {rank for rank, _ in waits_in_vain({0: waiting, 1: other})} == vain
