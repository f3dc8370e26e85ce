"""Hints about a checked call that is right: parameters without a use, and results that nobody has summed."""

from __future__ import annotations

from shardfn.check.case import OWN_ROWS, Case
from shardfn.check.trace import Output, union
from shardfn.check.varying import bits_of, is_number
from shardfn.quoting import listed


def hints(case: Case) -> list[str]:
    """Returns a sentence for each hint."""
    return [*_unused(case), *_local(case)] if not case.trace.prefix else []


def _unused(case: Case) -> list[str]:
    """Parameters by which losses are differentiated and on which none depends."""
    trace, types, events = case.trace, case.types, case.trace.gradients()
    if any(event.pushed for event in events):
        return []
    asked = union(case.differentiated(event) for event in events)
    used = union(types.depends[event.loss] for event in events)
    parents = [trace.nodes[v.node].parents for v in trace.variables if trace.nodes[v.node].root == "parameter"]
    gathered = union(types.holds[p] for each in parents for p in each)  # flat shards, whose parameters are told
    by_path: dict[str, bool] = {}
    for at, variable in enumerate(trace.variables):
        if asked >> at & 1 and not gathered >> at & 1:
            by_path[variable.path] = by_path.get(variable.path, False) or bool(used >> at & 1)
    unused = [path for path, uses in by_path.items() if not uses]
    return [f"no loss uses {listed(unused)}, by which it is differentiated: freeze or drop what is not trained"] * bool(
        unused
    )


def _local(case: Case) -> list[str]:
    """Single numbers of this rank's rows that are returned under `...`, as metrics are."""
    said = []
    for event in case.trace.events:
        if isinstance(event, Output) and event.allowed is None and is_number(case.trace.nodes[event.node]):
            along = bits_of(case.types.along[event.node])
            own = sum(bit for bit in along if case.of_rows(bit)[event.node] == OWN_ROWS)
            if own:
                names = case.named(own)
                said.append(f"{event.path} is of each rank's rows alone along {names}: reduce it by psum or pmean")
    return said
