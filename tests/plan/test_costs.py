"""Times of collectives, of computing and of whole plans: what is hidden, what is exposed, and what shares a link."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardfn as sf
from shardfn.plan import presets
from shardfn.plan.machines import OPERATIONS, Chip, Links, nodes_of
from shardfn.plan.measuring import measure_chip, measure_links
from shardfn.plan.plan import StepPlan
from shardfn.plan.schedule import Held, Work
from shardfn.testing import world

CHIP = Chip("one", "a test", {"float32": 1e12}, 1e12, 2**34, efficiency=1.0, reach=1.0, launch=0.0)
TABLE = ((1e6, 1.0), (2e6, 2.0))  # a megabyte a second
LINKS = Links("even", "a test", {op: {(1, 2): TABLE, (2, 1): TABLE} for op in OPERATIONS}, 1e6)


def plan(*works: Work, mesh: dict[str, int] | None = None) -> StepPlan:
    nothing = Held(0, {})
    return StepPlan("step", mesh or {"shard": 2}, 0, works, (nothing,), {}, {}, nothing, (), 0)


def compute(seconds: float, **more: Any) -> Work:
    return Work("compute", **({"flops": {"float32": round(seconds * 1e12)}} | more))


def gather(seconds: float, stream: int = 1, **more: Any) -> Work:
    return Work("all_gather", stream=stream, axis=("shard",), ranks=2, sent=round(seconds * 1e6), **more)


def test_the_longest_of_arithmetic_traffic_and_launches_is_what_computing_takes() -> None:
    chip = replace(CHIP, launch=1e-3)
    assert chip.seconds(Work("compute", flops={"float32": 10**12}, moved=10**11, launches=3)) == 1
    assert chip.seconds(Work("compute", flops={"float32": 10**11}, moved=2 * 10**12)) == 2
    assert chip.seconds(Work("compute", launches=4000)) == 4
    assert replace(CHIP, efficiency=0.5).seconds(compute(1)) == 2
    assert replace(CHIP, reach=0.25).seconds(Work("compute", moved=10**12)) == 4


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no rate for 'bfloat16', only for float32.*with_rate"):
        plan(compute(1, flops={"bfloat16": 1})).timed(LINKS, CHIP)
    assert CHIP.with_rate("bfloat16", 2e12).seconds(compute(1, flops={"bfloat16": 10**12})) == 0.5


def test_a_hidden_collective_is_not_exposed() -> None:
    timeline = plan(gather(2), compute(3)).timed(LINKS, CHIP)
    assert (timeline.begins, timeline.ends) == ((0.0, 0.0), (2.0, 3.0))
    assert (timeline.seconds, timeline.computing, timeline.communicating, timeline.exposed) == (3, 3, 2, 0)


def test_a_collective_that_computing_waits_for_is_exposed_as_far_as_nothing_hides_it() -> None:
    works = gather(2, stage="a"), compute(1.5), compute(1, after=(0,), stage="a"), gather(1, after=(2,), stage="b")
    timeline = plan(*works).timed(LINKS, CHIP)
    assert timeline.begins == (0, 0, 2, 3)
    assert (timeline.seconds, timeline.computing, timeline.exposed) == (4, 2.5, 1.5)
    stages = timeline.stages
    assert (stages["a"].computing, stages["a"].communicating, stages["a"].exposed) == (1, 2, 0.5)
    assert (stages["b"].computing, stages["b"].exposed) == (0, 1)


def test_works_of_a_stream_run_one_after_another() -> None:
    assert plan(gather(1), gather(1), gather(1)).timed(LINKS, CHIP).ends == (1, 2, 3)


def test_collectives_on_the_same_link_share_its_bandwidth() -> None:
    assert plan(gather(1), gather(2, stream=2)).timed(LINKS, CHIP).ends == (2, 3)
    between = replace(gather(2, stream=2), nodes=2)  # another link
    assert plan(gather(1), between).timed(LINKS, CHIP).ends == (1, 2)


def test_a_late_host_is_waited_for() -> None:
    slow = replace(CHIP, host=0.5)
    timeline = plan(compute(0.25, launches=2), compute(0.25, launches=2)).timed(LINKS, slow)
    assert (timeline.begins, timeline.waiting) == ((1, 2), 1.75)


def test_copies_are_hidden_by_all_else() -> None:
    copy = Work("copy", stream=3, sent=3 * 10**6)
    timeline = plan(copy, compute(1), gather(2)).timed(LINKS, CHIP)
    assert (timeline.computing, timeline.exposed, timeline.copying, timeline.seconds) == (1, 1, 1, 3)


def test_utilization_leaves_out_what_is_computed_again() -> None:
    again = compute(1, phase="recompute")
    timeline = plan(compute(1), again, gather(2, stream=0)).timed(LINKS, replace(CHIP, efficiency=0.5), tokens=600)
    assert timeline.seconds == 6
    assert timeline.utilization == pytest.approx(1 / 6)
    assert timeline.tokens == 100
    assert "MFU 16.7 %, 100 tokens/s" in str(timeline)


def test_a_plan_in_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        plan(compute(1, after=(1,)), gather(1, after=(0,))).timed(LINKS, CHIP)


@pytest.mark.parametrize("wrong", [{"per_node": 0}, {"tokens": -1}])
def test_numbers_that_are_not_positive_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be a positive number"):
        plan(compute(1)).timed(LINKS, CHIP, **wrong)


def test_how_ranks_are_spread_over_nodes_follows_from_the_axes() -> None:
    mesh = {"replica": 4, "shard": 8, "tensor": 2}
    spread = {
        axis: nodes_of(mesh, 37, axis, 8) for axis in (("tensor",), ("shard",), ("replica",), ("replica", "shard"))
    }
    assert spread == {("tensor",): 1, ("shard",): 2, ("replica",): 4, ("replica", "shard"): 8}
    works = replace(gather(1), axis=("replica",), ranks=2)
    assert plan(works, mesh={"replica": 2, "shard": 2}).timed(LINKS, CHIP, per_node=2).seconds == 1
    far = replace(LINKS, curves={"all_gather": {(2, 1): TABLE}})
    with pytest.raises(ValueError, match=r"no times of 'all_gather' within a node; they have .*all_gather 2 x 1"):
        plan(works, mesh={"replica": 2, "shard": 2}).timed(far, CHIP, per_node=4)


def test_times_between_entries_are_interpolated_between_logarithms() -> None:
    curve = (1e3, 1e-3), (1e5, 1e-2)
    links = Links(
        "x", "", {"all_gather": {(1, 2): curve, (1, 8): tuple((size, 4 * time) for size, time in curve)}}, 1.0
    )

    def seconds(sent: float, ranks: int) -> float:
        return links.seconds("all_gather", sent, ranks)

    assert seconds(1e4, 2) == pytest.approx(math.sqrt(1e-3 * 1e-2))
    assert seconds(1, 2) == 1e-3  # no collective is faster than the least
    assert seconds(1e6, 2) == pytest.approx(0.1)  # and more bytes take longer in proportion
    assert seconds(1e3, 4) == pytest.approx(2e-3)
    assert seconds(1e3, 16) == pytest.approx(8e-3)
    assert links.seconds("all_gather", 1e9, 1) == 0
    with pytest.raises(ValueError, match=r"no times of 'all_reduce' within a node; they have .*all_gather 1 x 8"):
        links.seconds("all_reduce", 1, 2)


@pytest.mark.parametrize("curve", [(), ((2.0, 1.0), (1.0, 1.0)), ((0.0, 1.0),)])
def test_a_table_that_is_none_is_refused(curve: Any) -> None:
    with pytest.raises(ValueError, match="pairs of bytes and seconds"):
        Links("x", "", {"all_gather": {(1, 2): curve}}, 1.0)


@pytest.mark.parametrize("name", presets.CHIPS)
def test_known_machines_have_sources_and_plausible_times(name: str) -> None:
    links, chip = presets.links(name), presets.chip(name)
    assert "nccl-tests" in links.source
    assert "datasheet" in chip.source
    for operation in OPERATIONS:
        for nodes in (1, 2, 32, 512):
            times = [links.seconds(operation, 2.0**k, 8 * nodes, nodes) for k in range(10, 34)]
            assert times == sorted(times)
            assert 1e-6 < times[0] < 0.02
    near, far = (links.seconds("all_gather", 2**30, 8 * nodes, nodes) for nodes in (1, 4))
    assert near < far * 1.05
    one, each = (links.seconds("all_reduce", 2**30, 32 * own, 32) for own in (1, 8))
    assert one > 3 * each  # eight network cards carry more than one


def test_a_bandwidth_is_that_which_was_measured() -> None:
    """8 H100s: 386 GB of the whole result a second, of which each rank sends seven eighths."""
    assert 2**33 * 7 / 8 / presets.links("h100").seconds("all_gather", 2**33 * 7 / 8, 8) == pytest.approx(
        386e9 * 7 / 8, rel=0.02
    )


@pytest.mark.parametrize("read", [presets.links, presets.chip])
def test_an_unknown_machine_is_refused(read: Any) -> None:
    with pytest.raises(ValueError, match=r"there is no 'tpu', only .*a100"):
        read("tpu")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    links, chip = presets.links("a100"), presets.chip("b200")
    links.save(tmp_path / "links.json")
    chip.save(tmp_path / "chip.json")
    assert Links.load(tmp_path / "links.json") == links
    assert Chip.load(tmp_path / "chip.json") == chip
    (tmp_path / "none.json").write_text('{"a": 1}')
    for load in (Links.load, Chip.load):
        with pytest.raises(ValueError, match=r"none.json holds no"):
            load(tmp_path / "none.json")


def links_measured(axes: dict[str, int], per_node: int) -> Links:
    mesh = sf.make_mesh(device="cpu", **axes)
    return measure_links(mesh, sent=[2**12, 2**16], repeats=2, per_node=per_node)


@pytest.mark.parametrize(
    ("axes", "per_node", "spreads"),
    [({"shard": 2}, 2, {(1, 2)}), ({"replica": 2, "shard": 2}, 2, {(1, 2), (2, 1), (2, 2)})],
)
def test_links_are_measured_and_the_same_on_all_ranks(
    axes: dict[str, int], per_node: int, spreads: set[tuple[int, int]]
) -> None:
    first, *others = world(math.prod(axes.values())).run(links_measured, axes, per_node)
    assert all(each == first for each in others)
    assert set(first.curves) == set(OPERATIONS)
    for tables in first.curves.values():
        assert set(tables) == spreads
        for curve in tables.values():
            assert [round(math.log2(size)) for size, _ in curve] == [12, 16]
            assert all(1e-6 < time < 10 for _, time in curve)
    assert first.copying > 0


def measured_wrongly(rank_of: dict[int, dict[str, Any]], **arguments: Any) -> None:
    mesh = sf.make_mesh(shard=2, device="cpu")
    measure_links(mesh, **arguments | rank_of.get(mesh.get_rank(), {}))


@pytest.mark.parametrize(
    ("wrong", "rank_of", "message"),
    [
        ({"sent": []}, {}, "numbers of bytes, growing"),
        ({"sent": [4, 2]}, {}, "numbers of bytes, growing"),
        ({"repeats": 0}, {}, "must be 1 or more"),
        ({"sent": [4096]}, {1: {"sent": [8192]}}, "sent"),
        ({"sent": [4096]}, {1: {"repeats": 0}}, "must be 1 or more"),
    ],
)
def test_wrong_arguments_are_one_error_on_every_rank(
    wrong: dict[str, Any], rank_of: dict[int, dict[str, Any]], message: str
) -> None:
    errors = world(2).errors(measured_wrongly, rank_of, **wrong)
    assert all(isinstance(error, ValueError) for error in errors)
    assert all("measure_links" in str(error) and message in str(error) for error in errors)


def test_one_rank_has_no_links() -> None:
    def alone() -> None:
        measure_links(sf.make_mesh(shard=1, device="cpu"))

    (error,) = world(1).errors(alone)
    assert "has one rank, which has no link to another" in str(error)


def test_a_chip_is_measured() -> None:
    chip = measure_chip(side=64)
    assert chip.rates["float32"] > 1e6
    assert chip.bandwidth > 1e6
    assert chip.memory > 2**20
    assert chip.launch < 1e-3
    with pytest.raises(ValueError, match="side must be a positive number, got -1"):
        measure_chip(side=-1)
