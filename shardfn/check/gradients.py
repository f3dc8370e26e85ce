"""Rules for losses and gradients that are too large by the number of ranks, or are partial sums."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from shardfn.check.callsites import Site
from shardfn.check.case import OWN_ROWS, Case, divided, local, scaled_later
from shardfn.check.findings import Kind, axes_text, given_at, line, target, written
from shardfn.check.fixes import derived, joined_at, original
from shardfn.check.trace import CollectiveCall, Gradient, Mask, Node, Output, Summed, Used, reached, union
from shardfn.check.varying import bits_of, numbers_of


def added_up(case: Case, event: Gradient) -> None:
    """Reports a loss that is a local mean or full on each rank, while its gradients are summed over ranks."""
    loss_axes, mean = case.types.along[event.loss], case.types.mean[event.loss]
    sums = [e.axes for e in case.trace.events if isinstance(e, Summed) and event.begin <= e.at <= event.end]
    backward = [node for node in case.trace.nodes[event.begin : event.end] if node.backward]
    summed = union([*sums, *(node.axes for node in backward if node.op in ("psum", "reduce_scatter"))])
    if event.inner and loss_axes & summed and _adapts(case, event):
        names, site = case.named(loss_axes & summed), case.trace.nodes[event.loss].site
        fix = f"shardfn.pvary(shardfn.unshard(params), {names})"
        case.add(
            event.loss, "inner", loss_axes & summed, "", site, fix,
            f"the gradient of a loss{line(site)} that varies along {names} is used to make new parameters inside of "
            f"another derivative, and is added up over the {case.size(loss_axes & summed)} ranks there: each rank's "
            f"parameters get the gradients of all ranks' losses. For a rank's own (a task on each rank) differentiate "
            f"by {fix}, made outside of that loss; for one of all ranks reduce the loss",
        )  # fmt: skip
        return
    for bit in bits_of(loss_axes & summed & ~case.compared.watched.get(event.loss, 0)):
        if not divided(case, event, bit):
            _repeated(case, event, bit)
    bad = loss_axes & summed & local(case, mean)
    if not bad or divided(case, event, bad):
        return
    node = case.trace.nodes[mean]
    fix = _mean_along(case, event.loss, mean, bad)
    totals = _mean_sums(case, mean)
    problem = f"is summed along {case.named(totals[0].axes)} alone" if totals else "is a mean over this rank's rows"
    case.add(
        mean, "losses", bad, "", node.site, fix,
        f"the loss{line(node.site)} {problem}, and varies along {case.named(bad)}, but gradients are "
        f"added up over the {case.size(bad)} ranks there: they are those of the sum of all ranks' losses. "
        f"Write: {fix}",
    )  # fmt: skip


def _adapts(case: Case, event: Gradient) -> bool:
    """Whether new values of the variables of a loss are made from its gradient."""
    types, variables = case.types, case.differentiated(event)
    later_ids = range(event.end, len(case.trace.nodes))
    return any(types.holds[node_id] & types.gradient[node_id] & variables for node_id in later_ids)


def _repeated(case: Case, event: Gradient, bit: Mask) -> None:
    """Reports a loss that each rank computes in full, with the same bits on all ranks."""
    nodes, loss = case.trace.nodes, original(case, event.loss)
    roots = [nodes[r] for r in case.roots(loss, bit)]
    blank = {node_id for node_id, axes in case.blank.items() if axes & bit}
    if not roots or not case.has_equal_bits(loss, bit):
        return
    if blank.intersection(reached([loss], lambda i: nodes[i].parents)):
        return
    names, site, num_ranks = case.named(bit), nodes[loss].site, case.size(bit)
    fix = f"shardfn.pmean({written(site) or 'loss'}, {names})"
    if all(node.op == "all_gather" for node in roots):
        site = roots[0].site
        fix = f'shardfn.all_gather({given_at(site)}, {names}, to="invariant")'
    case.add(
        loss, "losses", bit, "", site, fix,
        f"each of the {num_ranks} ranks along {names} computes the loss{line(nodes[loss].site)} in full"
        f"{case.because(loss, bit)}, and gradients are added up over them: they are {num_ranks} times too large. "
        f"Write: {fix}",
    )  # fmt: skip


def _mean_sums(case: Case, mean: int) -> list[Node]:
    """Returns the two sums over ranks whose quotient is a mean; none for a local mean."""
    totals = [case.types.total[p] for p in case.trace.nodes[mean].parents if case.types.total[p] >= 0]
    return [case.trace.nodes[total] for total in totals] if len(totals) == 2 else []


def _mean_along(case: Case, loss: int, mean: int, more: Mask) -> str:
    """Returns the call that extends a mean to more axes."""
    totals = _mean_sums(case, mean)
    if totals:
        argument = given_at(totals[0].site)
        return f"shardfn.psum({argument}, {case.named(totals[0].axes | more)})"
    fix_sites = joined_at(case, loss, bits_of(more)[0])
    single = len(fix_sites) == 1 and fix_sites[0].op == "pmean"  # of all terms, where several are added
    site = fix_sites[0].site if single else case.trace.nodes[mean].site
    return f"shardfn.pmean({written(site) or 'loss'}, {case.named(more)})"


def partial_sums(case: Case, event: Gradient) -> None:
    """Reports sums over ranks that meet varying values on their way to the loss.

    On each rank the derivative by such a sum is that rank's part alone.
    """
    types = case.types
    requested, meetings = case.differentiated(event), dict[tuple[int, int], Mask]()
    # Along other axes the loss is each rank's own, so meeting varying values may be intended.
    for axis in numbers_of(case.trace.everywhere & ~types.along[event.loss]):
        for index in numbers_of(types.met[event.loss][axis] >> len(case.trace.variables)):
            sum_id = types.sums[index]
            # Sums made before the pass are constants in it.
            if types.depends[sum_id] & requested and sum_id >= event.begin:
                meeting_id = types.first[(axis, 1 << index + len(case.trace.variables))]
                meetings[sum_id, meeting_id] = meetings.get((sum_id, meeting_id), 0) | 1 << axis
    for (sum_id, meeting_id), axes in meetings.items():
        sum_node, site, names = case.trace.nodes[sum_id], case.trace.nodes[meeting_id].site, case.named(axes)
        member = 1 << len(case.trace.variables) + types.sums.index(sum_id)
        through = derived(case, meeting_id, numbers_of(axes)[0], member)
        fix = f"shardfn.pvary({through or target(sum_node.site) or written(sum_node.site) or sum_node.op}, {names})"
        name = "all_gather" if sum_node.op == "all_gather_invariant" else sum_node.op
        case.add(
            meeting_id, "gradient", axes, "", site, fix,
            f"what {name} gives{line(sum_node.site)} is the same on all ranks along {names}, and meets what varies"
            f"{line(site)}, in {case.trace.nodes[meeting_id].op}: on each rank its derivative is that rank's part "
            f"alone. Write {fix} there: its transpose adds up the parts",
        )  # fmt: skip


def stepped(case: Case, event: Used) -> None:
    """Reports a gradient in an optimizer's step that varies along axes where its parameter does not."""
    types, gradient_id = case.types, event.gradient
    if event.cut is None:
        bad = types.along[gradient_id] & ~types.along[event.parameter]
        holds = types.holds[event.parameter] | case.trace.nodes[event.parameter].variable
        partial(case, bad, holds, f"an optimizer's step{line(event.site)}")
        return
    same = event.cut & ~types.along[gradient_id]
    node = _reduced(case, gradient_id, same)
    if node is not None:
        names = case.named(same)
        case.add(
            gradient_id, "sum", same, "", node.site,
            f"leave {node.op} out: the gradient of a flat shard is summed already",
            f"the gradient of a flat shard that goes into an optimizer's step{line(event.site)} is the same on all "
            f"ranks along {names}, which cut it: {node.op}{line(node.site)} has put pieces of different parameters "
            f"together. Leave it out: that gradient is summed already",
        )  # fmt: skip


def _reduced(case: Case, node_id: int, axes: Mask) -> Node | None:
    """Returns the collective along these axes that made this value the same on all ranks, if any."""
    nodes, shape_dtype = case.trace.nodes, case.trace.nodes[node_id].like
    # A rank holds no element of a shard that lives elsewhere.
    if not axes or shape_dtype is None or not math.prod(shape_dtype[0]):
        return None

    def followed_parents(child: int) -> list[int]:
        return [p for p in nodes[child].parents if nodes[p].like == shape_dtype and not case.types.along[p] & axes]

    path = (nodes[current] for current in reached([node_id], followed_parents))
    return next((node for node in path if node.effect == "minus" and node.axes & axes), None)


def partial(case: Case, bad: Mask, variables: Mask, consumer: str) -> bool:
    """Records variables whose gradient varies where they do not; returns whether there are any."""
    recorded = False
    variables &= (1 << len(case.trace.variables)) - 1
    for index in numbers_of(variables & case.requested or variables):
        variable = case.trace.variables[index]
        new_axes = bad & variable.same & ~case.types.along[variable.node] & ~case.blank.get(variable.node, 0)
        if new_axes:
            known_axes, first_consumer = case.partial.get(index, (0, consumer))
            case.partial[index] = (known_axes | new_axes, first_consumer)
            recorded = True
    return recorded


def undeclared(case: Case) -> None:
    """Reports partial gradients of an invariant loss that are returned without a declared spec.

    Nothing contradicts that, and a sum over ranks may follow; but if parameters are updated by them, ranks drift apart.
    Only what varies by this rank's rows counts: ranks of a pipeline may have parameters of their own that begin equal.
    Parts whose elements, not only their norm, a collective takes are known to be parts: what else is made of them is a
    statistic, or what a rank remembers.
    """
    types, reported, case.partial = case.types, case.partial, {}
    for bit in bits_of(case.trace.everywhere):
        variables_by_node: dict[int, int] = {}  # the variables whose gradient's part is in a value
        for event in case.trace.gradients():
            for variable_id, node_id in event.pairs:
                bad = types.along[node_id] & ~types.along[variable_id] & ~types.along[event.loss] & bit
                if bad and case.of_rows(bit)[node_id] & OWN_ROWS:
                    unreported = (v for v in numbers_of(types.holds[variable_id]) if v not in reported)
                    variables_by_node[node_id] = variables_by_node.get(node_id, 0) | union(1 << v for v in unreported)
        # Variables of whose gradient a value has elements, and those of which a collective takes elements.
        elements, exchanged = dict(variables_by_node), 0
        for node_id, node in enumerate(case.trace.nodes if variables_by_node else ()):
            if node.axes & bit and node.effect in ("plus", "minus") and not node.backward:
                exchanged |= union(elements.get(p, 0) for p in node.parents)
            elif types.along[node_id] & bit:
                _carried(variables_by_node, node_id, node.parents)
                parents = [p for p in node.parents if case.is_number(p) or not case.is_number(node_id)]
                _carried(elements, node_id, parents)
        for output in case.trace.events if variables_by_node else ():
            if isinstance(output, Output) and output.allowed is None:
                partial(case, bit, variables_by_node.get(output.node, 0) & ~exchanged, output.path)
    partial_gradients(case, "parts")


def _carried(variables_by_node: dict[int, int], node_id: int, parents: Iterable[int]) -> None:
    if variables := union(variables_by_node.get(p, 0) for p in parents):
        variables_by_node[node_id] = variables_by_node.get(node_id, 0) | variables


def partial_gradients(case: Case, kind: Kind = "gradient") -> None:
    """Reports parameters with partial gradients, and the place for a `pvary` that sums them."""
    groups: dict[tuple[Site | None, Mask, str], dict[int, int]] = {}
    undeclared_paths = {e.path for e in case.trace.events if isinstance(e, Output) and e.allowed is None}
    for index, (axes, _) in case.partial.items():
        for (meeting_id, through), meeting_axes in _meeting_places(case, index, axes).items():
            site = case.trace.nodes[meeting_id].site if meeting_id >= 0 else None
            groups.setdefault((site, meeting_axes, through), {})[index] = meeting_id
    placed = union(axes for site, axes, _ in groups if site is not None)
    for (site, axes, through), meetings in groups.items():
        if site is None and not axes & ~placed:  # they met what varies through a value that another finding names
            continue
        members = list(meetings)
        first, tree_path = case.trace.variables[members[0]], _tree_of(case, members)
        names, consumer = case.trace.names(axes), case.partial[members[0]][1]
        other_paths = ", ".join(case.trace.variables[m].path for m in members[1:4])
        subject = f"{first.path} and {len(members) - 1} more ({other_paths}{', ...' * (len(members) > 4)}) are"
        if tree_path or len(members) == 1:
            subject = f"{tree_path}, in all its tensors, is" if tree_path else f"{first.path} is"
        path = tree_path or first.path
        fix = f"shardfn.pvary({through or (site.spelled(path) if site else path)}, {axes_text(names)})"
        node_id = meetings[members[0]]
        op = case.trace.nodes[node_id].op
        location = f"{line(site)}, where {through or 'it'} meets what varies, in {op}" if site else ""
        all_requested = len(members) > 1 and all(case.requested >> m & 1 for m in members)  # whole, and need not be
        alternative = "; or shard them, shardfn.shard(params, mesh, strategy)" if all_requested else ""
        if kind == "gradient" and consumer in undeclared_paths:
            alternative += "; or, where each rank takes steps of its own, write it outside of what is differentiated"
        case.add(
            node_id if site else first.node, kind, axes, path, site, fix,
            f"{subject} the same on all ranks along {axes_text(names)}, but the gradient that goes into "
            f"{consumer} varies there: on each rank it is that rank's part alone. Write {fix}{location}: its transpose "
            f"adds up the parts{alternative}{_mean_besides(case, members, axes)}",
        )  # fmt: skip


def _meeting_places(case: Case, index: int, axes: Mask) -> dict[tuple[int, str], Mask]:
    """Returns the places at which a variable meets varying values, each with its axes.

    A place is a node, -1 if unknown, and the source of the operand through which the variable comes. Leaves out places
    that other findings name.
    """
    axes_by_meeting: dict[tuple[int, str], Mask] = {}
    for axis in numbers_of(axes):
        meeting_id = _meeting_node(case, index, axis, case.types.first)
        meeting_id = meeting_id if meeting_id >= 0 else _meeting_node(case, index, axis, case.types.touched)
        if meeting_id < 0:
            is_reported = _report_outer_pvary(case, index, 1 << axis) or _follows(case, 1 << axis)
        else:
            is_reported = meeting_id in case.added
        if not is_reported:
            path = case.trace.variables[index].path
            meeting = meeting_id, derived(case, meeting_id, axis, 1 << index, path) if meeting_id >= 0 else ""
            axes_by_meeting[meeting] = axes_by_meeting.get(meeting, 0) | 1 << axis
    return axes_by_meeting


def _tree_of(case: Case, members: list[int]) -> str:
    """Returns the path of the tree that holds exactly these variables; empty if there is none."""
    paths = {index: v.path for index, v in enumerate(case.trace.variables) if not case.blank.get(v.node)}
    first = paths[members[0]] if len(members) > 1 else ""
    prefixes = (first[: match.start()] for match in re.finditer(r"\[", first))
    return next((r for r in prefixes if members == [i for i in paths if paths[i].startswith(f"{r}[")]), "")


def _mean_besides(case: Case, members: list[int], axes: Mask) -> str:
    """Returns a hint if the loss is a mean over local rows, which also needs a `pmean`."""
    for event in case.trace.gradients():
        mean = case.types.mean[event.loss]
        requested = case.differentiated(event)
        bad = axes & case.types.along[event.loss] & local(case, mean)
        if any(requested >> m & 1 for m in members) and bad and not divided(case, event, bad):
            site, names = case.trace.nodes[mean].site, case.named(bad)
            return (
                f". The loss{line(site)} is a mean over this rank's rows: reduce it besides, by "
                f"shardfn.pmean({written(site) or 'loss'}, {names})"
            )
    return ""


def _meeting_node(case: Case, index: int, axis: int, meetings: Mapping[tuple[int, int], int]) -> int:
    """Returns the node at which a variable met a varying value before its gradient was complete, or -1."""
    meeting_id = meetings.get((axis, 1 << index), -1)
    return meeting_id if meeting_id < case.gradient_end.get(index, len(case.trace.nodes)) else -1


def _follows(case: Case, axes: Mask) -> bool:
    """Whether another finding along these axes is the cause."""
    names = set(case.trace.names(axes))
    return any(finding.kind in ("sum", "vary", "losses") and names & set(finding.axes) for _, finding in case.findings)


def _report_outer_pvary(case: Case, index: int, axes: Mask) -> bool:
    """Reports a `pvary` of a variable outside of the differentiated function."""
    for event in case.trace.gradients():
        for variable_id, _ in event.pairs:
            if not case.types.along[variable_id] & axes or not case.types.holds[variable_id] >> index & 1:
                continue
            roots = case.roots(variable_id, bits_of(axes)[0])
            pvary = next((case.trace.nodes[r] for r in roots if case.trace.nodes[r].op == "pvary"), None)
            if pvary is not None:
                path, names = case.trace.variables[index].path, case.named(axes)
                fix = f"shardfn.pvary({path}, {names}) inside of the function that is differentiated"
                case.add(
                    variable_id, "gradient", axes, path, pvary.site, fix,
                    f"the gradient of what pvary{line(pvary.site)} made of {path} is each rank's own, and goes into "
                    f"{case.partial[index][1]}, which is the same on all ranks along {names}: nothing adds up the "
                    f"parts, since pvary stands outside of what is differentiated. Write: {fix}; or, where each rank "
                    f"takes steps of its own, average what they lead to, by shardfn.pmean along {names}",
                )  # fmt: skip
                return True
    return False


def reduced_by_hand(case: Case, call: CollectiveCall) -> None:
    """Reports summed gradients of local means, and averaged gradients of a mean over all ranks."""
    if call.name not in ("psum", "pmean") or not call.own:
        return
    for event in case.trace.gradients():
        for variable_id, gradient_id in event.pairs:
            varying_axes = bits_of(call.axes & case.types.along[variable_id])
            if gradient_id == call.node and all(case.has_equal_bits(variable_id, bit) for bit in varying_axes):
                (_sum_of_means if call.name == "psum" else _mean_of_parts)(case, call, event)


def _sum_of_means(case: Case, call: CollectiveCall, event: Gradient) -> None:
    mean = case.types.mean[event.loss]
    local_axes = case.types.along[event.loss] & local(case, mean)
    bad = local_axes & call.axes
    # Sums along the other axes may come next.
    if not bad or any(divided(case, event, axes) for axes in {bad, local_axes}):
        return
    case.add_call(
        call, "means", bad, f"shardfn.pmean({case.expression(call)}, {axes_text(call.axis_name)})",
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
    gradients = [gradient_id for _, gradient_id in event.pairs]
    if scaled_later(case, gradients, event.end, lambda n, _: math.isclose(n * ranks, 1)):
        return
    case.add_call(
        call, "means", bad, f"shardfn.psum({case.expression(call)}, {axes_text(call.axis_name)})",
        f"is given the gradients of a loss that is reduced along {case.named(bad)} already: each rank's is its part, "
        f"and their sum is the gradient, which this divides by {ranks}",
    )  # fmt: skip
