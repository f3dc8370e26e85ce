"""Losses and gradients that are too large by the number of ranks, or each rank's part alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardfn.check.callsites import Site
from shardfn.check.case import Case, divided, local, scaled_later
from shardfn.check.findings import line, named, target, written
from shardfn.check.fixes import joined_at
from shardfn.check.trace import Call, Gradient, Mask, Node, Summed, Used, reached
from shardfn.check.varying import bits_of


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
    fix = _mean_along(case, event.loss, mean, bad)
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
    types, variables = case.types, case.differentiated(event)
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


def _mean_along(case: Case, loss: int, mean: int, more: Mask) -> str:
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
    types = case.types
    asked = case.differentiated(event)
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


def stepped(case: Case, event: Used) -> None:
    """What an optimizer gets varies along the axes along which the parameter does."""
    types, at = case.types, event.gradient
    if event.cut is None:
        bad = types.along[at] & ~types.along[event.parameter]
        holds = types.holds[event.parameter] | case.trace.nodes[event.parameter].variable
        partial(case, bad, holds, f"an optimizer's step{line(event.site)}")
        return
    same = event.cut & ~types.along[at]
    made = _reduced(case, at, same)
    if made is not None:
        names = named(case.trace.names(same))
        case.add(
            at, "sum", same, "", made.site, f"leave {made.op} out: the gradient of a flat shard is summed already",
            f"the gradient of a flat shard that goes into an optimizer's step{line(event.site)} is the same on all "
            f"ranks along {names}, which cut it: {made.op}{line(made.site)} has put pieces of different parameters "
            f"together. Leave it out: that gradient is summed already",
        )  # fmt: skip


def _reduced(case: Case, at: int, same: Mask) -> Node | None:
    """The collective along these axes by which all ranks have got one value of this shape; None if there is none."""
    nodes, like = case.trace.nodes, case.trace.nodes[at].like
    if not same or like is None or not math.prod(like[0]):  # of what lives elsewhere a rank has nothing
        return None

    def onward(at: int) -> list[int]:
        return [p for p in nodes[at].parents if nodes[p].like == like and not case.types.along[p] & same]

    ways = (nodes[now] for now in reached([at], onward))
    return next((node for node in ways if node.effect == "minus" and node.axes & same), None)


def partial(case: Case, bad: Mask, variables: Mask, how: str) -> bool:
    """Takes down that gradients of these variables vary where they do not."""
    told = False
    variables &= (1 << len(case.trace.variables)) - 1
    for bit in bits_of(variables & case.asked or variables):
        at = bit.bit_length() - 1
        variable = case.trace.variables[at]
        mine = bad & variable.same & ~case.types.along[variable.node]
        if mine and variable.node not in case.blank:
            before, first = case.partial.get(at, (0, how))
            case.partial[at] = (before | mine, first)
            told = True
    return told


def parts(case: Case) -> None:
    """Says which parameters have gradients that are each rank's part, and where a `pvary` adds them up."""
    groups: dict[tuple[Site | None, Mask], list[int]] = {}
    met: dict[int, int] = {}
    for at, (axes, _) in case.partial.items():
        places = _met(case, at, axes, case.types.first) or _met(case, at, axes, case.types.touched)
        if not places and _outside(case, at, axes):
            continue
        met[at] = min(places, default=-1)
        if met[at] in case.added:
            continue
        site = case.trace.nodes[met[at]].site if places else None
        if not places and _follows(case, axes):
            continue
        groups.setdefault((site, axes), []).append(at)
    for (site, axes), members in groups.items():
        first = case.trace.variables[members[0]]
        names, how = case.trace.names(axes), case.partial[members[0]][1]
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        others = ", ".join(case.trace.variables[m].path for m in members[1:4])
        more += f" ({others}{', ...' * (len(members) > 4)})" if others else ""
        fix = f"shardfn.pvary({site.spelled(first.path) if site else first.path}, {named(names)})"
        where = f"{line(site)}, where it meets what varies, in {case.trace.nodes[met[members[0]]].op}" if site else ""
        case.add(
            met[members[0]] if site else first.node, "gradient", axes, first.path, site, fix,
            f"{first.path}{more} is the same on all ranks along {named(names)}, but the gradient that goes into "
            f"{how} varies there: on each rank it is that rank's part alone. Write {fix}{where}: its transpose "
            f"adds up the parts{_mean_besides(case, members, axes)}",
        )  # fmt: skip


def _mean_besides(case: Case, members: list[int], axes: Mask) -> str:
    """What is to be said where the loss is a mean over this rank's rows, of which no sum is wanted."""
    for event in case.gradients():
        mean = case.types.mean[event.loss]
        asked = case.differentiated(event)
        bad = axes & case.types.along[event.loss] & local(case, mean)
        if any(asked >> m & 1 for m in members) and bad and not divided(case, event, case.size(bad)):
            site, names = case.trace.nodes[mean].site, named(case.trace.names(bad))
            return (
                f". The loss{line(site)} is a mean over this rank's rows: reduce it besides, by "
                f"shardfn.pmean({written(site) or 'loss'}, {names})"
            )
    return ""


def _met(case: Case, at: int, axes: Mask, places: Mapping[tuple[int, int], int]) -> list[int]:
    """Where a variable met what varies along these axes, on the way to its gradient."""
    found = [places.get((k, 1 << at)) for k in range(len(case.trace.axes)) if axes >> k & 1]
    return [node for node in found if node is not None and node < case.until.get(at, len(case.trace.nodes))]


def _follows(case: Case, axes: Mask) -> bool:
    """Whether something else that is wrong along these axes is the cause."""
    names = set(case.trace.names(axes))
    return any(one.kind in ("sum", "vary", "losses") and names & set(one.axes) for _, one in case.found)


def _outside(case: Case, at: int, axes: Mask) -> bool:
    """Takes down a `pvary` of a variable that stands outside of what is differentiated by what it gave."""
    for event in case.gradients():
        for of, _ in event.pairs:
            if not case.types.along[of] & axes or not case.types.holds[of] >> at & 1:
                continue
            roots = case.roots(of, bits_of(axes)[0])
            made = next((case.trace.nodes[r] for r in roots if case.trace.nodes[r].op == "pvary"), None)
            if made is not None:
                path, names = case.trace.variables[at].path, named(case.trace.names(axes))
                fix = f"shardfn.pvary({path}, {names}) inside of the function that is differentiated"
                case.add(
                    of, "gradient", axes, path, made.site, fix,
                    f"the gradient of what pvary{line(made.site)} made of {path} is each rank's own, and goes into "
                    f"{case.partial[at][1]}, which is the same on all ranks along {names}: nothing adds up the "
                    f"parts, since pvary stands outside of what is differentiated. Write: {fix}; or, where each rank "
                    f"takes steps of its own, average what they lead to, by shardfn.pmean along {names}",
                )  # fmt: skip
                return True
    return False


def reduced_by_hand(case: Case, call: Call) -> None:
    """Gradients of each rank's mean that are summed, or those of the mean over all ranks that are averaged."""
    if call.name not in ("psum", "pmean") or not call.own:
        return
    for event in case.gradients():
        for of, at in event.pairs:
            if at == call.node and all(case.alike(of, bit) for bit in bits_of(call.axes & case.types.along[of])):
                (_sum_of_means if call.name == "psum" else _mean_of_parts)(case, call, event)


def _sum_of_means(case: Case, call: Call, event: Gradient) -> None:
    mean = case.types.mean[event.loss]
    own = case.types.along[event.loss] & local(case, mean)
    bad, names = own & call.axes, named(call.said)
    # Sums along the other axes may come next.
    if not bad or any(divided(case, event, ranks) for ranks in {case.size(bad), case.size(own)}):
        return
    fix = f"shardfn.pmean({case.expression(call)}, {names})"
    case.add(
        call.node, "means", bad, "", call.site, fix,
        f"psum along {names}{line(call.site)} adds up gradients of losses that are means over each rank's rows"
        f"{line(case.trace.nodes[mean].site)}: they are {case.size(bad)} times those of the mean over all rows. "
        f"Write: {fix}",
    )  # fmt: skip


def _mean_of_parts(case: Case, call: Call, event: Gradient) -> None:
    types, mean = case.types, case.types.mean[event.loss]
    bad, by = call.axes & ~types.along[event.loss] & types.along[call.node], types.divisors[event.loss]
    ranks, names = case.size(bad), named(call.said)
    if mean >= 0 and (types.along[mean] & bad or case.trace.nodes[mean].number is not None):
        averaged = math.isclose(math.prod(by), ranks)  # or it is the sum of all ranks' means, of which this is the mean
    else:
        averaged = mean >= 0 or bool(by)
    if not bad or not averaged or math.inf in by:
        return
    if scaled_later(case, [at for _, at in event.pairs], event.end, lambda n, _: math.isclose(n * ranks, 1)):
        return
    fix = f"shardfn.psum({case.expression(call)}, {names})"
    case.add(
        call.node, "means", bad, "", call.site, fix,
        f"pmean along {names}{line(call.site)} is given the gradients of a loss that is reduced along "
        f"{named(case.trace.names(bad))} already: each rank's is its part, and their sum is the gradient, which this "
        f"divides by {ranks}. Write: {fix}",
    )  # fmt: skip
