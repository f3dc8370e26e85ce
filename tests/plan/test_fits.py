"""A plan says whether it fits into a device's memory, why not, and what would."""

from __future__ import annotations

from typing import Any

import pytest

from shardfn.plan.fits import size_of
from shardfn.plan.plan import StepPlan
from shardfn.plan.schedule import Allocation, Held, Work

GIB = 2**30


def plan(*works: Work, **kinds: int) -> StepPlan:
    peak = Held(0, {kind: count * GIB for kind, count in kinds.items()})
    largest = max(kinds, key=lambda kind: kinds[kind], default="")
    made = (Allocation(largest, "model.py:7", "blocks.0", 3, GIB),)
    return StepPlan("step", {"replica": 4, "shard": 8}, 0, works, (peak,), {}, {}, peak, made, 0)


GATHER = Work("all_gather", axis=("shard",), ranks=8, sent=8)


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 * GIB), ("80 GB", 80 * 10**9), ("1.5TiB", 3 * 2**39), ("7 kb", 7000), (5, 5), ("2MiB", 2**21)],
)
def test_sizes_are_read(text: str | int, count: int) -> None:
    assert size_of(text) == count


@pytest.mark.parametrize("text", ["", "80 apples", "GiB", "-3", -3, "1e9", "12", "80Gib", 2.5])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a memory size"):
        size_of(text)


def test_a_plan_that_fits_is_true() -> None:
    fit = plan(parameters=10, activations=60).fits("80GiB", reserve="4GiB")
    assert fit
    assert (fit.needed, fit.spare, fit.changes) == (70 * GIB, 6 * GIB, ())
    assert fit.largest == (("activations", 60 * GIB), ("parameters", 10 * GIB))
    assert (
        fit.reason
        == "it fits: it needs 75.16 GB of 85.9 GB (80 GiB), of which 4.295 GB are left free; 6.442 GB are spare"
    )


def test_the_nearest_change_that_is_enough_comes_first() -> None:
    fit = plan(GATHER, parameters=10, optimizer=20, activations=60).fits("80GiB", reserve=0)
    assert not fit
    assert (fit.spare, fit.where) == (-10 * GIB, "model.py:7")
    assert "it needs 96.64 GB of 85.9 GB (80 GiB), of which 0 B are left free; 10.74 GB are missing" in fit.reason
    assert "Largest are activations 64.42 GB, optimizer 21.47 GB" in fit.reason
    assert "(at model.py:7)" in fit.reason
    enough = [change for change in fit.changes if change.enough]
    assert [change.saves // GIB for change in enough] == [15, 20, 30, 30, 60]
    assert "twice as many ranks along 'shard'" in enough[0].what
    assert "nearest: twice as many ranks along 'shard' (saves about 16.11 GB)" in str(fit)


def test_a_reserve_above_the_memory_is_named_and_not_the_plan() -> None:
    fit = plan(parameters=1).fits("1GiB")
    assert not fit
    assert fit.reason == (
        "it does not fit: 2.147 GB of the device are to be left free, and it has 1.074 GB (1 GiB): pass a smaller "
        "reserve; the plan needs 1.074 GB"
    )
    assert "it does not fit: it needs 1.074 GB of" in plan(parameters=1).fits("2GiB").reason  # nothing is left for it


def test_what_is_computed_again_already_is_not_advised() -> None:
    again = Work("compute", phase="recompute")
    for works, advised in (((), True), ((again,), False)):
        fit = plan(*works, activations=100).fits("80GiB")
        assert any("remat" in change.what for change in fit.changes) == advised


def test_where_no_one_change_is_enough_the_largest_is_named() -> None:
    fit = plan(parameters=300, optimizer=300).fits("80GiB")
    assert not any(change.enough for change in fit.changes[1:])
    assert fit.changes[0].enough  # all of it on the host
    fit = plan(gathered=300, optimizer=30).fits("80GiB")
    assert "no one change is enough" in fit.reason


def test_a_batch_is_cut_as_often_as_it_takes() -> None:
    fit = plan(activations=300, parameters=10).fits("80GiB", reserve=0)
    micro = next(change for change in fit.changes if "micro" in change.what)
    assert "8 times as small" in micro.what
    assert micro.enough
