"""Losses of which gradients are too large by the ranks, or lack a part of it."""

from __future__ import annotations

from shardfn.check.case import Case
from shardfn.check.joining import joined_at
from shardfn.check.scaling import divided, local
from shardfn.check.trace import Gradient, Mask, Node, Summed
from shardfn.check.varying import bits_of
from shardfn.check.words import line, named, target, written


def added_up(case: Case, event: Gradient) -> None:
    """A loss that each rank has a mean of, or all of, while its gradients are summed over the ranks."""
    along, mean = case.types.along[event.loss], case.types.mean[event.loss]
    summed = _axes_summed(case, event)
    if event.inner and along & summed and _adapts(case, event):
        _inner(case, event, along & summed)
        return
    for bit in bits_of(along & summed & ~case.compared.watched.get(event.loss, 0)):
        if not divided(case, event, case.size(bit)):
            _repeated(case, event, bit)
    bad = along & summed & local(case, mean)
    if not bad or divided(case, event, case.size(bad)):
        return
    made = case.trace.nodes[mean]
    fix = _reduced(case, event.loss, mean, bad)
    partly = _summed(case, mean)
    alone = f"is summed along {named(case.trace.names(partly))} alone"
    what = alone if partly else "is a mean over this rank's rows"
    case.add(
        mean, "losses", bad, "", made.site, fix,
        f"the loss{line(made.site)} {what}, and varies along {named(case.trace.names(bad))}, but gradients are "
        f"added up over the {case.size(bad)} ranks there: they are those of the sum of all ranks' losses. "
        f"Write: {fix}",
    )  # fmt: skip


def _adapts(case: Case, event: Gradient) -> bool:
    """Whether new values of what a loss was differentiated by are made of its gradient."""
    types, variables = case.types, 0
    for of, _ in event.pairs:
        variables |= case.trace.nodes[of].variable | types.holds[of]
    after = range(event.end, len(case.trace.nodes))
    return any(types.holds[at] & types.gradient[at] & variables for at in after)


def _inner(case: Case, event: Gradient, axes: Mask) -> None:
    names = named(case.trace.names(axes))
    site = case.trace.nodes[event.loss].site
    fix = f"shardfn.pvary(shardfn.unshard(params), {names})"
    case.add(
        event.loss, "inner", axes, "", site, fix,
        f"the gradient of a loss{line(site)} that varies along {names} is used to make new parameters inside of "
        f"another derivative, and is added up over the {case.size(axes)} ranks there: each rank's parameters get the "
        f"gradients of all ranks' losses. For a rank's own (a task on each rank) differentiate by {fix}, made outside "
        f"of that loss; for one of all ranks reduce the loss",
    )  # fmt: skip


def _repeated(case: Case, event: Gradient, bit: Mask) -> None:
    """A loss that each rank computes of all ranks' values, and that has the same bits on all."""
    roots = [case.trace.nodes[r] for r in case.roots(event.loss, bit)]
    if not roots or any(n.op != "all_gather" for n in roots):
        return
    names, site = named(case.trace.names(bit)), roots[0].site
    given = (site.given if site else None) or "..."
    fix = f'shardfn.all_gather({given}, {names}, to="invariant")'
    case.add(
        event.loss, "losses", bit, "", site, fix,
        f"the loss is made of what all_gather{line(site)} gives, so that each of the {case.size(bit)} ranks along "
        f"{names} has all of it, and gradients are added up over them: they are {case.size(bit)} times too large. "
        f"Write: {fix}",
    )  # fmt: skip


def _axes_summed(case: Case, event: Gradient) -> Mask:
    """The axes along which gradients were summed on their way."""
    summed = 0
    for one in case.trace.events:
        if isinstance(one, Summed) and event.begin <= one.at <= event.end:
            summed |= one.axes
    for node in case.trace.nodes[event.begin : event.end]:
        if node.backward and node.op in ("psum", "reduce_scatter"):
            summed |= node.axes
    return summed


def _totals(case: Case, mean: int) -> list[Node]:
    """The sums over ranks that were divided by each other to make a mean; none if it is of one rank's rows."""
    found = [case.types.total[p] for p in case.trace.nodes[mean].parents if case.types.total[p] >= 0]
    return [case.trace.nodes[at] for at in found] if len(found) == 2 else []


def _summed(case: Case, mean: int) -> Mask:
    """The axes along which the numerator of a mean was summed."""
    totals = _totals(case, mean)
    return totals[0].axes if totals else 0


def _reduced(case: Case, loss: int, mean: int, more: Mask) -> str:
    """What makes a mean one along more axes."""
    totals = _totals(case, mean)
    if totals:
        given = (totals[0].site.given if totals[0].site else None) or "..."
        return f"shardfn.psum({given}, {named(case.trace.names(totals[0].axes | more))})"
    places = joined_at(case, loss, bits_of(more)[0])
    one = len(places) == 1 and places[0].op == "pmean"  # of all terms, where several are added
    site = places[0].site if one else case.trace.nodes[mean].site
    return f"shardfn.pmean({written(site) or 'loss'}, {named(case.trace.names(more))})"


def partial_sums(case: Case, event: Gradient) -> None:
    """Sums over ranks that met what varies on their way to the loss: each rank's derivative is its part alone."""
    types, nodes = case.types, case.trace.nodes
    asked = 0
    for of, _ in event.pairs:
        asked |= nodes[of].variable | types.holds[of]
    for k in range(len(case.trace.axes)):
        if types.along[event.loss] >> k & 1:
            continue  # each rank's own loss: what it meets may be a part of it
        for bit in bits_of(types.met[event.loss][k] >> len(case.trace.variables)):
            at = types.sums[bit.bit_length() - 1]
            if types.depends[at] & asked and at >= event.begin:  # what was made before is a constant there
                _partial_sum(case, at, types.first[(k, bit << len(case.trace.variables))], 1 << k)


def _partial_sum(case: Case, at: int, met: int, axis: Mask) -> None:
    made, place, names = case.trace.nodes[at], case.trace.nodes[met].site, named(case.trace.names(axis))
    fix = f"shardfn.pvary({target(made.site) or written(made.site) or made.op}, {names})"
    name = "all_gather" if made.op == "all_gather_invariant" else made.op
    case.add(
        met, "gradient", axis, "", place, fix,
        f"what {name} gives{line(made.site)} is the same on all ranks along {names}, and meets what varies"
        f"{line(place)}, in {case.trace.nodes[met].op}: on each rank its derivative is that rank's part alone. "
        f"Write {fix} there: its transpose adds up the parts",
    )  # fmt: skip
