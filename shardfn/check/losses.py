"""Losses of which gradients are too large by the ranks, or lack a part of it."""

from __future__ import annotations

import math

from shardfn.check.case import Case
from shardfn.check.trace import Call, Gradient, Mask, Node, Summed
from shardfn.check.varying import SCALES, bits_of
from shardfn.check.words import line, named, target, written


def added_up(case: Case, event: Gradient) -> None:
    """A loss that each rank has a mean of, or all of, while its gradients are summed over the ranks."""
    along, mean = case.types.along[event.loss], case.types.mean[event.loss]
    summed = _axes_summed(case, event)
    for bit in bits_of(along & summed):
        if not _divided(case, event, case.size(bit)):
            _repeated(case, event, bit)
    bad = along & summed & case.types.along[mean] if mean >= 0 else 0
    if not bad or _divided(case, event, case.size(bad)) or _of_all(case, mean, case.size(bad)):
        return
    made = case.trace.nodes[mean]
    fix = _reduced(case, mean, bad)
    partly = _summed(case, mean)
    alone = f"is summed along {named(case.trace.names(partly))} alone"
    what = alone if partly else "is a mean over this rank's rows"
    case.add(
        mean, "losses", bad, "", made.site, fix,
        f"the loss{line(made.site)} {what}, and varies along {named(case.trace.names(bad))}, but gradients are "
        f"added up over the {case.size(bad)} ranks there: they are those of the sum of all ranks' losses. "
        f"Write: {fix}",
    )  # fmt: skip


def by_hand(case: Case, call: Call) -> None:
    """Gradients of each rank's mean that are summed, or those of the mean over all ranks that are averaged."""
    for event in case.gradients():
        if call.own and call.node in [at for _, at in event.pairs]:
            if call.name == "psum":
                _sum_of_means(case, call, event)
            elif call.name == "pmean":
                _mean_of_parts(case, call, event)


def _sum_of_means(case: Case, call: Call, event: Gradient) -> None:
    mean = case.types.mean[event.loss]
    own = case.types.along[event.loss] & case.types.along[mean] if mean >= 0 else 0
    bad, names = own & call.axes, named(call.said)
    for ranks in {case.size(bad), case.size(own)}:  # sums along the other axes may come next
        if not bad or _divided(case, event, ranks) or _of_all(case, mean, ranks):
            return
        if _divided_later(case, call.node, ranks):
            return
    fix = f"shardfn.pmean({case.expression(call)}, {names})"
    case.add(
        call.node, "means", bad, "", call.site, fix,
        f"psum along {names}{line(call.site)} adds up gradients of losses that are means over each rank's rows"
        f"{line(case.trace.nodes[mean].site)}: they are {case.size(bad)} times those of the mean over all "
        f"rows. Write: {fix}",
    )  # fmt: skip


def _mean_of_parts(case: Case, call: Call, event: Gradient) -> None:
    types, mean = case.types, case.types.mean[event.loss]
    bad = call.axes & ~types.along[event.loss] & types.along[call.node]
    ranks, names = case.size(bad), named(call.said)
    of_each = mean >= 0 and (types.along[mean] & bad or case.trace.nodes[mean].number is not None)
    if not bad or (of_each and not _divided(case, event, ranks)):  # of the sum of all ranks' means, it is the mean
        return
    fix = f"shardfn.psum({case.expression(call)}, {names})"
    case.add(
        call.node, "means", bad, "", call.site, fix,
        f"pmean along {names}{line(call.site)} is given the gradients of a loss that is reduced along "
        f"{named(case.trace.names(bad))} already: each rank's is its part, and their sum is the gradient, which this "
        f"divides by {ranks}. Write: {fix}",
    )  # fmt: skip


def _divided_later(case: Case, at: int, ranks: int) -> bool:
    """Whether what is made of a value, by sums and by scaling, is divided by the number of ranks."""
    reached = {at}
    for later, node in enumerate(case.trace.nodes[at + 1 :], at + 1):
        if not reached.isdisjoint(node.parents) and node.op.removesuffix("_") in SCALES:
            if node.number == ranks:
                return True
            reached.add(later)
    return False


def _divided(case: Case, event: Gradient, ranks: int) -> bool:
    """Whether a loss, or all that was made of its gradient at once, is divided by the number of ranks."""
    mean, rows = case.types.mean[event.loss], case.types.rows[event.loss]
    divisors = case.types.divisors[event.loss]
    by = math.prod(divisors)
    if ranks in divisors or by in [n * ranks for n in (1, *rows)]:
        return True
    if mean >= 0 and case.trace.nodes[mean].number == ranks:
        return True  # by as many rows as there are ranks, or by the ranks
    if mean >= 0 and by >= ranks and math.isclose(by / ranks, round(by / ranks), rel_tol=1e-9):
        return True
    gradients = {at for _, at in event.pairs}
    later = (n for n in case.trace.nodes[event.end :] if n.number == ranks)
    return any(not gradients.isdisjoint(n.parents) for n in later)


def _of_all(case: Case, mean: int, ranks: int) -> bool:
    """Whether a sum is divided by what may be the number of all ranks' rows as well as of this one's elements."""
    return case.trace.nodes[mean].number in [n * ranks for n in case.types.rows[mean]]


def _repeated(case: Case, event: Gradient, bit: Mask) -> None:
    """A loss that each rank computes of all ranks' values."""
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


def _reduced(case: Case, mean: int, more: Mask) -> str:
    """What makes a mean one along more axes."""
    totals = _totals(case, mean)
    if totals:
        given = (totals[0].site.given if totals[0].site else None) or "..."
        return f"shardfn.psum({given}, {named(case.trace.names(totals[0].axes | more))})"
    return f"shardfn.pmean({written(case.trace.nodes[mean].site) or 'loss'}, {named(case.trace.names(more))})"


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
