"""Strategies of which none is clearly faster are ties; what crosses between hosts is counted in a plan."""

from __future__ import annotations

import pytest

import shardfn as sf
from benchmarks.plan_hosts import crosses, told_apart
from shardfn.plan.schedule import Held, Work

BOTH = ("replica", "shard")


def test_strategies_of_which_none_is_faster_in_all_rounds_but_one_are_ties() -> None:
    fast, slow = [1.0, 1.1, 1.2, 1.3], [2.0, 2.1, 2.2, 2.3]
    assert told_apart({"a": fast, "b": slow, "c": slow}) == [("a", "b"), ("a", "c")]
    assert told_apart({"a": [9.0, *fast[1:]], "b": slow}) == [("a", "b")]
    assert told_apart({"a": [9.0, 9.0, *fast[2:]], "b": slow}) == []


@pytest.mark.parametrize(
    ("kind", "axis", "nodes", "part"),
    [
        ("all_gather", BOTH, 2, 2 / 3),
        ("all_reduce", BOTH, 2, 1 / 2),
        ("all_gather", ("shard",), 1, 0),
        ("compute", (), 1, 0),
    ],
)
def test_works_whose_ranks_span_nodes_cross(kind: str, axis: tuple[str, ...], nodes: int, part: float) -> None:
    work = Work(kind, axis=axis, ranks=4, nodes=nodes, sent=1200)
    plan = sf.plan.StepPlan("step", {}, 0, (work,), (), {}, {}, Held(0, {}), (), 0)
    assert crosses(plan) == 1200 * part
