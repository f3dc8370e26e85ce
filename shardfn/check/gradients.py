"""Rules for losses and gradients that are too large by the number of ranks, or are only each rank's part."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from shardfn.check.callsites import Site
from shardfn.check.case import OWN_ROWS, Case, divided, local, scaled_later
from shardfn.check.findings import Kind, given_at, line, named, target, written
from shardfn.check.fixes import derived, joined_at, original
from shardfn.check.trace import CollectiveCall, Gradient, Mask, Node, Output, Summed, Used, reached, union
from shardfn.check.varying import bits_of, numbers_of


def added_up(case: Case, event: Gradient) -> None:
    """A loss that is each rank's mean, or that each rank has whole, while its gradients are summed over ranks."""
    along, mean = case.types.along[event.loss], case.types.mean[event.loss]
    sums = [e.axes for e in case.trace.events if isinstance(e, Summed) and event.begin <= e.at <= event.end]
    backward = [node for node in case.trace.nodes[event.begin : event.end] if node.backward]
    summed = union([*sums, *(node.axes for node in backward if node.op in ("psum", "reduce_scatter"))])
    if event.inner and along & summed and _adapts(case, event):
        names, site = case.named(along & summed), case.trace.nodes[event.loss].site
        fix = f"shardfn.pvary(shardfn.unshard(params), {names})"
        case.add(
            event.loss, "inner", along & summed, "", site, fix,
            f"the gradient of a loss{line(site)} that varies along {names} is used to make new parameters inside of "
            f"another derivative, and is added up over the {case.size(along & summed)} ranks there: each rank's "
            f"parameters get the gradients of all ranks' losses. For a rank's own (a task on each rank) differentiate "
            f"by {fix}, made outside of that loss; for one of all ranks reduce the loss",
        )  # fmt: skip
        return
    for bit in bits_of(along & summed & ~case.compared.watched.get(event.loss, 0)):
        if not divided(case, event, bit):
            _repeated(case, event, bit)
    bad = along & summed & local(case, mean)
    if not bad or divided(case, event, bad):
        return
    node = case.trace.nodes[mean]
    fix = _mean_along(case, event.loss, mean, bad)
    totals = _totals(case, mean)
    how = f"is summed along {case.named(totals[0].axes)} alone" if totals else "is a mean over this rank's rows"
    case.add(
        mean, "losses", bad, "", node.site, fix,
        f"the loss{line(node.site)} {how}, and varies along {case.named(bad)}, but gradients are "
        f"added up over the {case.size(bad)} ranks there: they are those of the sum of all ranks' losses. "
        f"Write: {fix}",
    )  # fmt: skip


def _adapts(case: Case, event: Gradient) -> bool:
    """Whether new values of the variables of a loss are made from its gradient."""
    types, variables = case.types, case.differentiated(event)
    after = range(event.end, len(case.trace.nodes))
    return any(types.holds[at] & types.gradient[at] & variables for at in after)


def _repeated(case: Case, event: Gradient, bit: Mask) -> None:
    """A loss that each rank computes in full, from values of all ranks, so that it has the same bits on all ranks."""
    nodes, loss = case.trace.nodes, original(case, event.loss)
    roots = [nodes[r] for r in case.roots(loss, bit)]
    blank = {at for at, axes in case.blank.items() if axes & bit}
    if not roots or not case.alike(loss, bit) or blank.intersection(reached([loss], lambda at: nodes[at].parents)):
        return
    names, site, number = case.named(bit), nodes[loss].site, case.size(bit)
    fix = f"shardfn.pmean({written(site) or 'loss'}, {names})"
    if all(node.op == "all_gather" for node in roots):
        site = roots[0].site
        fix = f'shardfn.all_gather({given_at(site)}, {names}, to="invariant")'
    case.add(
        loss, "losses", bit, "", site, fix,
        f"each of the {number} ranks along {names} computes the loss{line(nodes[loss].site)} in full"
        f"{case.because(loss, bit)}, and gradients are added up over them: they are {number} times too large. "
        f"Write: {fix}",
    )  # fmt: skip


def _totals(case: Case, mean: int) -> list[Node]:
    """Returns the two sums over ranks whose quotient is a mean; none if it is a mean of one rank's rows."""
    totals = [case.types.total[p] for p in case.trace.nodes[mean].parents if case.types.total[p] >= 0]
    return [case.trace.nodes[at] for at in totals] if len(totals) == 2 else []


def _mean_along(case: Case, loss: int, mean: int, more: Mask) -> str:
    """Returns the call that extends a mean to more axes."""
    totals = _totals(case, mean)
    if totals:
        given = given_at(totals[0].site)
        return f"shardfn.psum({given}, {case.named(totals[0].axes | more)})"
    places = joined_at(case, loss, bits_of(more)[0])
    single = len(places) == 1 and places[0].op == "pmean"  # of all terms, where several are added
    site = places[0].site if single else case.trace.nodes[mean].site
    return f"shardfn.pmean({written(site) or 'loss'}, {case.named(more)})"


def partial_sums(case: Case, event: Gradient) -> None:
    """Sums over ranks that meet varying values on their way to the loss: each rank's derivative is only its part."""
    types = case.types
    asked, found = case.differentiated(event), dict[tuple[int, int], Mask]()
    # Along other axes the loss is each rank's own, so meeting varying values may be intended.
    for k in numbers_of(case.trace.everywhere & ~types.along[event.loss]):
        for number in numbers_of(types.met[event.loss][k] >> len(case.trace.variables)):
            at = types.sums[number]
            if types.depends[at] & asked and at >= event.begin:  # sums made before the pass are constants in it
                met = types.first[(k, 1 << number + len(case.trace.variables))]
                found[at, met] = found.get((at, met), 0) | 1 << k
    for (at, met), axes in found.items():
        sum_node, site, names = case.trace.nodes[at], case.trace.nodes[met].site, case.named(axes)
        member = 1 << len(case.trace.variables) + types.sums.index(at)
        through = derived(case, met, numbers_of(axes)[0], member)
        fix = f"shardfn.pvary({through or target(sum_node.site) or written(sum_node.site) or sum_node.op}, {names})"
        name = "all_gather" if sum_node.op == "all_gather_invariant" else sum_node.op
        case.add(
            met, "gradient", axes, "", site, fix,
            f"what {name} gives{line(sum_node.site)} is the same on all ranks along {names}, and meets what varies"
            f"{line(site)}, in {case.trace.nodes[met].op}: on each rank its derivative is that rank's part alone. "
            f"Write {fix} there: its transpose adds up the parts",
        )  # fmt: skip


def stepped(case: Case, event: Used) -> None:
    """Reports a gradient in an optimizer's step that varies along axes where its parameter does not."""
    types, at = case.types, event.gradient
    if event.cut is None:
        bad = types.along[at] & ~types.along[event.parameter]
        holds = types.holds[event.parameter] | case.trace.nodes[event.parameter].variable
        partial(case, bad, holds, f"an optimizer's step{line(event.site)}")
        return
    same = event.cut & ~types.along[at]
    node = _reduced(case, at, same)
    if node is not None:
        names = case.named(same)
        case.add(
            at, "sum", same, "", node.site, f"leave {node.op} out: the gradient of a flat shard is summed already",
            f"the gradient of a flat shard that goes into an optimizer's step{line(event.site)} is the same on all "
            f"ranks along {names}, which cut it: {node.op}{line(node.site)} has put pieces of different parameters "
            f"together. Leave it out: that gradient is summed already",
        )  # fmt: skip


def _reduced(case: Case, at: int, axes: Mask) -> Node | None:
    """Returns the collective along these axes that gave all ranks one value of this shape; None if there is none."""
    nodes, like = case.trace.nodes, case.trace.nodes[at].like
    if not axes or like is None or not math.prod(like[0]):  # a rank holds no element of a shard that lives elsewhere
        return None

    def onward(at: int) -> list[int]:
        return [p for p in nodes[at].parents if nodes[p].like == like and not case.types.along[p] & axes]

    path = (nodes[current] for current in reached([at], onward))
    return next((node for node in path if node.effect == "minus" and node.axes & axes), None)


def partial(case: Case, bad: Mask, variables: Mask, how: str) -> bool:
    """Records variables whose gradient varies where they do not; returns whether there are any."""
    recorded = False
    variables &= (1 << len(case.trace.variables)) - 1
    for at in numbers_of(variables & case.asked or variables):
        variable = case.trace.variables[at]
        mine = bad & variable.same & ~case.types.along[variable.node] & ~case.blank.get(variable.node, 0)
        if mine:
            before, first = case.partial.get(at, (0, how))
            case.partial[at] = (before | mine, first)
            recorded = True
    return recorded


def undeclared(case: Case) -> None:
    """Reports gradients of a loss that all ranks have that leave as each rank's part, if their specs declare nothing.

    Nothing contradicts that, and a sum over ranks may follow; but if parameters are updated by them, ranks drift apart.
    Only what varies by this rank's rows counts: ranks of a pipeline may have parameters of their own that begin equal.
    Parts whose elements, not only their norm, a collective takes are known to be parts: what else is made of them is a
    statistic, or what a rank remembers.
    """
    types, known, case.partial = case.types, case.partial, {}
    for bit in bits_of(case.trace.everywhere):
        held: dict[int, int] = {}  # the variables whose gradient's part is in a value
        for event in case.trace.gradients():
            for of, at in event.pairs:
                bad = types.along[at] & ~types.along[of] & ~types.along[event.loss] & bit
                if bad and case.of_rows(bit)[at] & OWN_ROWS:
                    held[at] = held.get(at, 0) | union(1 << v for v in numbers_of(types.holds[of]) if v not in known)
        elements, taken = dict(held), 0  # of which a value has elements; of which a collective takes them
        for at, node in enumerate(case.trace.nodes if held else ()):
            if node.axes & bit and node.effect in ("plus", "minus") and not node.backward:
                taken |= union(elements.get(p, 0) for p in node.parents)
            elif types.along[at] & bit:
                _carried(held, at, node.parents)
                _carried(elements, at, [p for p in node.parents if case.is_number(p) or not case.is_number(at)])
        for output in case.trace.events if held else ():
            if isinstance(output, Output) and output.allowed is None:
                partial(case, bit, held.get(output.node, 0) & ~taken, output.path)
    parts(case, "parts")


def _carried(of: dict[int, int], at: int, parents: Iterable[int]) -> None:
    if variables := union(of.get(p, 0) for p in parents):
        of[at] = of.get(at, 0) | variables


def parts(case: Case, kind: Kind = "gradient") -> None:
    """Reports parameters whose gradient is only each rank's part, and where a `pvary` would add the parts up."""
    groups: dict[tuple[Site | None, Mask, str], dict[int, int]] = {}
    loose = {e.path for e in case.trace.events if isinstance(e, Output) and e.allowed is None}
    for at, (axes, _) in case.partial.items():
        for (met, through), along in _places(case, at, axes).items():
            site = case.trace.nodes[met].site if met >= 0 else None
            groups.setdefault((site, along, through), {})[at] = met
    placed = union(axes for site, axes, _ in groups if site is not None)
    for (site, axes, through), places in groups.items():
        if site is None and not axes & ~placed:  # they met what varies through a value that another finding names
            continue
        members = list(places)
        first, whole = case.trace.variables[members[0]], _tree_of(case, members)
        names, how = case.trace.names(axes), case.partial[members[0]][1]
        others = ", ".join(case.trace.variables[m].path for m in members[1:4])
        said = f"{first.path} and {len(members) - 1} more ({others}{', ...' * (len(members) > 4)}) are"
        if whole or len(members) == 1:
            said = f"{whole}, in all its tensors, is" if whole else f"{first.path} is"
        given = whole or first.path
        fix = f"shardfn.pvary({through or (site.spelled(given) if site else given)}, {named(names)})"
        at = places[members[0]]
        where = f"{line(site)}, where {through or 'it'} meets what varies, in {case.trace.nodes[at].op}" if site else ""
        asked = len(members) > 1 and all(case.asked >> m & 1 for m in members)  # whole, and need not be
        instead = "; or shard them, shardfn.shard(params, mesh, strategy)" if asked else ""
        if kind == "gradient" and how in loose:
            instead += "; or, where each rank takes steps of its own, write it outside of what is differentiated"
        case.add(
            at if site else first.node, kind, axes, given, site, fix,
            f"{said} the same on all ranks along {named(names)}, but the gradient that goes into "
            f"{how} varies there: on each rank it is that rank's part alone. Write {fix}{where}: its transpose "
            f"adds up the parts{instead}{_mean_besides(case, members, axes)}",
        )  # fmt: skip


def _places(case: Case, at: int, axes: Mask) -> dict[tuple[int, str], Mask]:
    """Returns where a variable meets what varies, and through which value: by place, along which of these axes.

    Without a place, -1. Leaves out what other findings say.
    """
    found: dict[tuple[int, str], Mask] = {}
    for axis in numbers_of(axes):
        met = _met(case, at, axis, case.types.first)
        met = met if met >= 0 else _met(case, at, axis, case.types.touched)
        said = _outside(case, at, 1 << axis) or _follows(case, 1 << axis) if met < 0 else met in case.added
        if not said:
            place = met, derived(case, met, axis, 1 << at, case.trace.variables[at].path) if met >= 0 else ""
            found[place] = found.get(place, 0) | 1 << axis
    return found


def _tree_of(case: Case, members: list[int]) -> str:
    """Returns the path of the tree that holds these variables and no others; empty for one, or if there is none."""
    paths = {at: v.path for at, v in enumerate(case.trace.variables) if not case.blank.get(v.node)}
    first = paths[members[0]] if len(members) > 1 else ""
    roots = (first[: found.start()] for found in re.finditer(r"\[", first))
    return next((r for r in roots if members == [at for at in paths if paths[at].startswith(f"{r}[")]), "")


def _mean_besides(case: Case, members: list[int], axes: Mask) -> str:
    """Returns a hint if the loss is a mean over this rank's rows, for which a sum of the parts is not enough."""
    for event in case.trace.gradients():
        mean = case.types.mean[event.loss]
        asked = case.differentiated(event)
        bad = axes & case.types.along[event.loss] & local(case, mean)
        if any(asked >> m & 1 for m in members) and bad and not divided(case, event, bad):
            site, names = case.trace.nodes[mean].site, case.named(bad)
            return (
                f". The loss{line(site)} is a mean over this rank's rows: reduce it besides, by "
                f"shardfn.pmean({written(site) or 'loss'}, {names})"
            )
    return ""


def _met(case: Case, at: int, axis: int, places: Mapping[tuple[int, int], int]) -> int:
    """Returns where a variable met values that vary along an axis, before its gradient was complete; -1 if nowhere."""
    met = places.get((axis, 1 << at), -1)
    return met if met < case.until.get(at, len(case.trace.nodes)) else -1


def _follows(case: Case, axes: Mask) -> bool:
    """Whether another finding along these axes is the cause."""
    names = set(case.trace.names(axes))
    return any(finding.kind in ("sum", "vary", "losses") and names & set(finding.axes) for _, finding in case.found)


def _outside(case: Case, at: int, axes: Mask) -> bool:
    """Reports a `pvary` of a variable outside of the function that is differentiated by the result of the `pvary`."""
    for event in case.trace.gradients():
        for of, _ in event.pairs:
            if not case.types.along[of] & axes or not case.types.holds[of] >> at & 1:
                continue
            roots = case.roots(of, bits_of(axes)[0])
            pvary = next((case.trace.nodes[r] for r in roots if case.trace.nodes[r].op == "pvary"), None)
            if pvary is not None:
                path, names = case.trace.variables[at].path, case.named(axes)
                fix = f"shardfn.pvary({path}, {names}) inside of the function that is differentiated"
                case.add(
                    of, "gradient", axes, path, pvary.site, fix,
                    f"the gradient of what pvary{line(pvary.site)} made of {path} is each rank's own, and goes into "
                    f"{case.partial[at][1]}, which is the same on all ranks along {names}: nothing adds up the "
                    f"parts, since pvary stands outside of what is differentiated. Write: {fix}; or, where each rank "
                    f"takes steps of its own, average what they lead to, by shardfn.pmean along {names}",
                )  # fmt: skip
                return True
    return False


def reduced_by_hand(case: Case, call: CollectiveCall) -> None:
    """Gradients of each rank's mean that are summed, or gradients of the mean over all ranks that are averaged."""
    if call.name not in ("psum", "pmean") or not call.own:
        return
    for event in case.trace.gradients():
        for of, at in event.pairs:
            if at == call.node and all(case.alike(of, bit) for bit in bits_of(call.axes & case.types.along[of])):
                (_sum_of_means if call.name == "psum" else _mean_of_parts)(case, call, event)


def _sum_of_means(case: Case, call: CollectiveCall, event: Gradient) -> None:
    mean = case.types.mean[event.loss]
    own = case.types.along[event.loss] & local(case, mean)
    bad = own & call.axes
    # Sums along the other axes may come next.
    if not bad or any(divided(case, event, axes) for axes in {bad, own}):
        return
    case.add_call(
        call, "means", bad, f"shardfn.pmean({case.expression(call)}, {named(call.said)})",
        f"adds up gradients of losses that are means over each rank's rows{line(case.trace.nodes[mean].site)}: they "
        f"are {case.size(bad)} times those of the mean over all rows",
    )  # fmt: skip


def _mean_of_parts(case: Case, call: CollectiveCall, event: Gradient) -> None:
    types, mean = case.types, case.types.mean[event.loss]
    bad, divisors = call.axes & ~types.along[event.loss] & types.along[call.node], case.divisors(event.loss)
    ranks = case.size(bad)
    if mean >= 0 and (types.along[mean] & bad or case.trace.nodes[mean].number is not None):
        averaged = math.isclose(math.prod(divisors), ranks)  # else this averages the ranks' own means
    else:
        averaged = mean >= 0 or bool(divisors)
    if not bad or not averaged or math.inf in divisors:
        return
    if scaled_later(case, [at for _, at in event.pairs], event.end, lambda n, _: math.isclose(n * ranks, 1)):
        return
    case.add_call(
        call, "means", bad, f"shardfn.psum({case.expression(call)}, {named(call.said)})",
        f"is given the gradients of a loss that is reduced along {case.named(bad)} already: each rank's is its part, "
        f"and their sum is the gradient, which this divides by {ranks}",
    )  # fmt: skip
