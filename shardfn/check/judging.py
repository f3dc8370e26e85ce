"""Judges a recorded call: a pure function from the record and the compared bits to findings."""

from __future__ import annotations

from collections.abc import Mapping

from shardfn.check import gradients, inputs, reductions
from shardfn.check.callsites import Site
from shardfn.check.case import Case
from shardfn.check.findings import PROBABLY, Finding, Kind, axes_text, line, target
from shardfn.check.fixes import reduction
from shardfn.check.trace import (
    JOINING,
    Claimed,
    CollectiveCall,
    Counted,
    Given,
    Gradient,
    Mask,
    Output,
    PartialGradient,
    Used,
    given_by,
    reached,
    union,
)
from shardfn.check.values import Evidence, Values
from shardfn.check.varying import bits_of, numbers_of


def judged(case: Case) -> list[Finding]:
    """Returns the findings of a call, first cause first."""
    trace = case.trace
    for argument in case.compared.arguments:
        inputs.replica(case, argument)
    inputs.same_rows(case)
    unnamed: dict[str, Mask] = {}
    for event in trace.events:
        match event:
            case CollectiveCall():
                reductions.misplaced(case, event)
                reductions.miscounted(case, event)
                reductions.gathered_means(case, event)
                _dropped(case, event)
                gradients.reduced_by_hand(case, event)
            case Gradient():
                gradients.added_up(case, event)
                gradients.partial_sums(case, event)
            case PartialGradient():
                bad = case.types.along[event.node] & ~event.allowed
                gradients.partial(case, bad, trace.nodes[event.variable].variable, "the stage's sum")
            case Counted():
                reductions.local_count(case, event)
            case Used():
                gradients.stepped(case, event)
            case Output():
                _returned(case, event, case.compared.outputs.get(event.path, 0))
            case Claimed():
                _claimed(case, event, unnamed)
    reductions.micro_batches(case)
    inputs.repeated_draws(case)
    inputs.noise_of_rows(case)
    inputs.batch_statistics(case)
    inputs.orders(case)
    gradients.partial_gradients(case)
    gradients.undeclared(case)
    # What comes after a prefix can refute guesses, but not those from before an optimizer's step.
    last = max((event.gradient for event in trace.events if isinstance(event, Used)), default=-1)
    certain = [(i, f) for i, f in case.findings if not trace.prefix or f.kind not in PROBABLY or i < last]
    return [finding for _, finding in sorted(certain, key=lambda pair: pair[0])]


def _returned(case: Case, output: Output, differs: Mask) -> None:
    """Judges a result whose bits differ along these axes."""
    if case.trace.prefix and (node := _last_updated(case, differs & ~(output.allowed or 0))) is not None:
        output = output._replace(node=node)
    varying_axes = case.types.along[output.node]
    if output.allowed is None:
        for k in numbers_of(varying_axes & case.types.backward[output.node]):  # updated values of invariant variables
            gradients.partial(case, 1 << k, case.types.updated[output.node][k], output.path)
        return
    bad = varying_axes & ~output.allowed
    by_gradient = bad & case.types.backward[output.node]
    if by_gradient:
        variables = _updated(case, output.node, by_gradient)
        if not (case.batched and not variables & ~case.batched) and gradients.partial(
            case, by_gradient, variables, output.path
        ):
            bad &= ~by_gradient
    if output.outer:
        for k in numbers_of(case.trace.everywhere & ~varying_axes):
            gradients.partial(case, 1 << k, case.types.met[output.node][k], f"what differentiates {output.path}")
    _varies(case, output.path, output.node, bad, output.allowed, case.trace.nodes[output.node].site, differs)
    unseen = differs & ~varying_axes & ~output.allowed
    if unseen and not bad:
        names = case.trace.names(unseen)
        case.add(
            output.node, "output", unseen, output.path, case.trace.nodes[output.node].site,
            f"shardfn.pmean({output.path}, {axes_text(names)}) of a mean, shardfn.psum of a part of a sum",
            f"{output.path} is declared to be the same on all ranks along {axes_text(names)}, but its numbers differ "
            f"there, and nothing that it was seen to be made of does. Make it the same (by shardfn.pmean if it is a "
            f"mean over rows, by shardfn.psum if it is a part of a sum), or name the axis in its spec",
            unseen=True,
        )  # fmt: skip


def _last_updated(case: Case, axes: Mask) -> int | None:
    """Returns the last value that was updated by a gradient varying along these axes, if any."""
    for node_id in reversed(range(len(case.types.along) if axes else 0)):
        if any(case.types.updated[node_id][k] for k in numbers_of(axes)):
            return node_id
    return None


def _updated(case: Case, node: int, bad: Mask) -> Mask:
    """Returns the variables whose gradient a value contains, or those of which it is a new value."""
    updated = union(case.types.updated[node][k] for k in numbers_of(bad))
    first, touched = (_used(case, places, node, bad) for places in (case.types.first, case.types.touched))
    candidates = updated if case.requested else updated & (first | touched)
    same = sum(1 << index for index, variable in enumerate(case.trace.variables) if variable.same & bad)
    # An optimizer's moment is no new value of a variable.
    moment = case.types.gradient[node] & case.requested & same and not candidates & case.requested
    if candidates and not moment:
        return candidates
    shape_dtype = case.trace.nodes[node].like  # for a leaf that the function made, take variables like it
    matching = sum(1 << i for i, v in enumerate(case.trace.variables) if case.trace.nodes[v.node].like == shape_dtype)
    return case.types.gradient[node] or first or touched & matching or updated


def _used(case: Case, meetings: Mapping[tuple[int, int], int], node: int, bad: Mask) -> int:
    """Returns the variables that met these axes before the last backward pass; optimizer moments are met after it."""
    last = max((meeting_id for meeting_id in range(node + 1) if case.trace.nodes[meeting_id].backward), default=node)
    return union(bit for (axis, bit), meeting_id in meetings.items() if bad >> axis & 1 and meeting_id <= last)


def _claimed(case: Case, event: Claimed, unnamed: dict[str, Mask]) -> None:
    """Judges an argument or a result of an inner function.

    `unnamed` holds, by function, the axes along which arguments vary that their specs do not name: the author thought
    of the inner function's own axes. A result that varies along these needs another spec, not a reduction.
    """
    bad = case.types.along[event.node] & ~event.allowed
    if event.side == "in_specs":
        unnamed[event.function] = unnamed.get(event.function, 0) | bad
    by_spec = bad & unnamed.get(event.function, 0)
    path = f"{event.function} {event.side}: {event.path}"
    _varies(case, path, event.node, bad & ~by_spec, event.allowed, event.site)
    by_spec &= ~case.reported_axes(event.node, by_spec)
    if by_spec:
        names = case.named(by_spec)
        case.add(
            event.node, "output", by_spec, path, event.site, f"a spec that names {names}, or `...`",
            f"{path}{line(event.site)} varies along {names}{case.because(event.node, by_spec)}, but its spec says that "
            f"it is the same on all ranks there. The specs of a function that is mapped inside another name the axes "
            f"of both: write a spec that names {names}, too, or `...`",
        )  # fmt: skip


def _varies(
    case: Case, path: str, node_id: int, bad: Mask, allowed: Mask, site: Site | None, differs: Mask | None = None
) -> None:
    """Reports a value that varies along axes where it is declared not to."""
    bad &= ~case.reported_axes(node_id, bad)
    if not bad:
        return
    roots = {r for bit in bits_of(bad) for r in case.roots(node_id, bit)}
    nodes = [case.trace.nodes[r] for r in sorted(roots)]
    guessed = all(n.root in ("", "constant", "closure") and n.effect == "union" for n in nodes)
    if differs is not None and not bad & differs and guessed:
        return  # ranks took different branches, but to the same number
    names = case.trace.names(bad)
    kind: Kind = "closure" if nodes and all(n.root == "closure" for n in nodes) else "output"
    where, fix = reduction(case, path, node_id, bad, nodes)
    instead = "" if kind == "closure" else f", or declare how it is cut: a spec that names {axes_text(names)}"
    case.add(
        node_id, kind, bad, path, where, fix,
        f"{path}{line(site)} varies along {axes_text(names)}{case.because(node_id, bad)}, but its spec says that it is "
        f"the same on all ranks there. Write: {fix}{line(where) if where != site else ''}{instead}",
    )  # fmt: skip


def used(values: Values) -> list[Evidence]:
    """Returns evidence for ranks to compare: the invariant results of collectives that reach a loss."""
    trace = values.trace
    losses = [event.loss for event in trace.gradients()]
    if not losses:
        return []
    inputs, results = set(reached(losses, lambda node_id: trace.nodes[node_id].parents)), given_by(trace)
    calls = [event for event in trace.events if isinstance(event, CollectiveCall) and event.own and not event.backward]
    pairs = [(call, result) for call in calls for result in [_invariant_result(results, call)] if result is not None]
    return [Evidence(values.key(call.site, -7), result, int(result in inputs)) for call, result in pairs]


def _dropped(case: Case, call: CollectiveCall) -> None:
    """Reports a value that goes into the loss on some ranks and not on others."""
    followed = call.own and not call.backward and not case.trace.prefix
    result_id = _invariant_result(case.first_results, call) if followed else None
    differing = case.compared.watched.get(-1 if result_id is None else result_id, 0) & call.axes
    if not differing or result_id is None or not case.types.depends[result_id] & case.requested:
        return
    names, argument = case.named(differing), target(call.site) or "..."
    fix = f"torch.where(condition, other, shardfn.pvary({argument}, {names}))"
    case.add(
        result_id, "branch", differing, "", call.site, fix,
        f"what {call.name}{line(call.site)} gives goes into the loss on some ranks along {names}, and a branch drops "
        f"it on others: its derivative is then not added up, and each rank's is its own part. Choose on all ranks, "
        f"by {fix}",
    )  # fmt: skip


def _invariant_result(results: Given, call: CollectiveCall) -> int | None:
    """Returns the node of a collective's result, if that is the same on all ranks; else None."""
    return min((results[key] for op in JOINING if (key := (op, call.node, call.site)) in results), default=None)
