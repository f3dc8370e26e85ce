"""Hints about a correct call: unused parameters, and results that are not reduced."""

from __future__ import annotations

from shardfn.check.case import OWN_ROWS, Case
from shardfn.check.trace import Output, union
from shardfn.check.varying import bits_of, is_number
from shardfn.quoting import listed


def hints(case: Case) -> list[str]:
    """Returns a sentence for each hint."""
    return [*_unused(case), *_local_metric_hints(case)] if not case.trace.prefix else []


def _unused(case: Case) -> list[str]:
    """Returns a hint about trained parameters on which no loss depends."""
    trace, types, events = case.trace, case.types, case.trace.gradients()
    if trace.unfollowed or trace.closed or any(event.pushed for event in events):
        return []
    requested = union(case.differentiated(event) for event in events)
    used = union(types.depends[event.loss] for event in events)
    parents = [trace.nodes[v.node].parents for v in trace.variables if trace.nodes[v.node].root == "parameter"]
    # Flat shards, whose parameters are reported by themselves.
    gathered = union(types.holds[p] for node_parents in parents for p in node_parents)
    by_path: dict[str, bool] = {}
    for index, variable in enumerate(trace.variables):
        if requested >> index & 1 and not gathered >> index & 1:
            by_path[variable.path] = by_path.get(variable.path, False) or bool(used >> index & 1)
    unused = [path for path, uses in by_path.items() if not uses]
    return [f"no loss uses {listed(unused)}, by which it is differentiated: freeze or drop what is not trained"] * bool(
        unused
    )


def _local_metric_hints(case: Case) -> list[str]:
    """Returns hints about local metrics: single numbers of local rows that are returned under `...`."""
    texts = []
    for event in case.trace.events:
        if isinstance(event, Output) and event.allowed is None and is_number(case.trace.nodes[event.node]):
            bits = bits_of(case.types.along[event.node])
            local_axes = sum(bit for bit in bits if case.of_rows(bit)[event.node] == OWN_ROWS)
            if local_axes:
                names = case.named(local_axes)
                texts.append(f"{event.path} is of each rank's rows alone along {names}: reduce it by psum or pmean")
    return texts
