"""Collectives that a function calls on values for which they are not right."""

from __future__ import annotations

from shardfn.check.case import Case
from shardfn.check.trace import Call, Mask
from shardfn.check.varying import SCALES
from shardfn.check.words import line, named

_SUMS = ("psum", "pmean", "reduce_scatter")
_ONCE = ("pvary", "local_slice")


def called(case: Case, call: Call) -> None:
    """A sum of what is the same everywhere, a `pvary` of what varies, a mean of means over other numbers of rows."""
    along = case.types.along[call.node]
    mixes = call.name in (*_SUMS, "pmax", "pmin")
    flat = (call.pieces or case.pieces(call.node)) & call.axes if mixes else 0
    pieces = flat or (case.scattered(call.node) & call.axes if mixes else 0)
    if pieces:
        names, what = named(case.trace.names(pieces)), "flat shards" if flat else "gradients of pieces"
        fix = f"leave {call.name} out: {case.expression(call)}"
        case.add(
            call.node, "sum", pieces, "", call.site, fix,
            f"{call.name} along {named(call.said)}{line(call.site)} is given {what}, which are cut along "
            f"{names}, and mixes up different parameters: each rank has other elements. Where they are gradients, "
            f"they are summed already. Write: {fix}",
        )  # fmt: skip
        return
    if call.name in _SUMS and not call.number:
        _sum(case, call, along)
    if call.name in _ONCE and along & call.axes:
        twice = along & call.axes
        rest = case.trace.names(call.axes & ~along)
        if rest:
            fix = f"shardfn.{call.name}({case.expression(call)}, {named(rest)})"
        elif call.name == "local_slice" and case.types.backward[call.node] & twice:
            fix = f"shardfn.reduce_scatter({case.expression(call)}, {named(case.trace.names(twice))})"
        else:
            fix = f"leave {call.name} out: {case.expression(call)}"
        because = case.because(call.node, twice)
        case.add(
            call.node, "vary", twice, "", call.site, fix,
            f"{call.name} along {named(call.said)}{line(call.site)} takes a value that is the same on all ranks "
            f"along {named(case.trace.names(twice))}, but this one varies there already{because}. Write: {fix}",
        )  # fmt: skip


def _summed_before(case: Case, at: int, missing: Mask) -> bool:
    """Whether a value is a sum over ranks already, which nothing that may be their number divides."""
    nodes, by = case.trace.nodes, case.types.divisors[at]
    while nodes[at].op in SCALES and nodes[at].op != "psum" and len(nodes[at].parents) == 1:
        at = nodes[at].parents[0]
    return nodes[at].op == "psum" and bool(nodes[at].axes & missing) and not by


def _sum(case: Case, call: Call, along: Mask) -> None:
    missing, types = call.axes & ~along, case.types
    given = case.expression(call)
    matters = call.name != "pmean" or bool(types.depends[call.node] and not types.gradient[call.node])
    known = (types.declared[call.node] or call.backward) and not types.guessed[call.node]
    if missing and matters and (known or _summed_before(case, call.node, missing)):
        rest = case.trace.names(call.axes & along)
        other = case.trace.names(along & ~call.axes & ~(call.pieces or case.pieces(call.node)))
        times = case.size(missing)
        instead = rest or other
        fix = (
            f"shardfn.{call.name}({given}, {named(instead)})" if instead
            else f"shardfn.local_slice({given}, {named(call.said)})" if call.name == "reduce_scatter"
            else f"leave {call.name} out: {given}"
        )  # fmt: skip
        does = (
            f"divides its derivative by {times}" if call.name == "pmean"
            else f"makes it {times} times as large"
        )  # fmt: skip
        meant = f"; it varies along {named(other)}" if other and not rest else ""
        case.add(
            call.node, "sum", missing, "", call.site, fix,
            f"{call.name} along {named(call.said)}{line(call.site)} is given a value that is the same on all ranks "
            f"along {named(case.trace.names(missing))}, and {does}{meant}. Write: {fix}",
        )  # fmt: skip
    mean = types.mean[call.node]
    uneven = case.compared.counts.get(mean, 0) & call.axes if mean >= 0 and call.own else 0
    if uneven:
        site = case.trace.nodes[mean].site
        axis = named(call.said)
        fix = f"shardfn.psum(total, {axis}) / shardfn.psum(count, {axis})"
        case.add(
            call.node, "means", uneven, "", call.site, fix,
            f"{call.name} along {axis}{line(call.site)} is given means, made{line(site)}, over numbers of rows "
            f"that differ between ranks along {named(case.trace.names(uneven))}: that is not the mean over all "
            f"rows. Write: {fix}",
        )  # fmt: skip
