"""Rules for wrong reductions: sums of means, means of sums, sums of replicated values or flat shards."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterator

from shardfn.check.case import OWN_ROWS, Case, may_be, scaled_later
from shardfn.check.findings import axes_text, line, written
from shardfn.check.fixes import PRODUCTS, original
from shardfn.check.trace import CollectiveCall, Counted, Gradient, Mask, reached, union
from shardfn.check.varying import MEANS, SCALES, bits_of

_SUMS_UP = ("sum", "mean", "expand", "select")
_MADE_ROW = re.compile(r"(\[None\]|\.(reshape|view)\(1\)|\.unsqueeze\(0\))$")  # so that a number can be gathered
_ADDS = {"add": "+", "add_": "+", "sub": "-", "sub_": "-"}


def miscounted(case: Case, call: CollectiveCall) -> None:
    """Checks the argument of a `psum` or `pmean`, unless it is a gradient."""
    if not call.own or call.backward or call.number is not None:
        return
    if case.types.gradient[call.node]:  # of a loss that is made of one, at most
        if call.name == "psum" and case.is_number(call.node):
            _sum_of_means(case, call)
        return
    if call.name == "pmean":
        _mean_of_sums(case, call)
    if call.name == "psum" and not (_sum_of_full_values(case, call) or _sum_of_means(case, call)):
        _over_its_own_rows(case, call)
        _added_before(case, call)


def _sum_of_full_values(case: Case, call: CollectiveCall) -> bool:
    """Reports a sum of values that each rank computed in full; returns whether there is one."""
    equal_axes = call.axes & case.types.along[call.node] & ~case.compared.watched.get(call.node, 0)
    bad = sum(b for b in bits_of(equal_axes) if case.same(call.node, b))
    if not bad or _weighed(case, call, bad):
        return False
    names = case.named(bad)
    fix = f"shardfn.pmean({case.expression(call)}, {names})"
    case.add_call(
        call, "whole", bad, fix,
        f"adds up what every rank along {names} has in full{case.because(call.node, bad)}, and makes it, and its "
        f"gradient, {case.size(bad)} times as large",
    )  # fmt: skip
    return True


def _sum_of_means(case: Case, call: CollectiveCall) -> bool:
    """Reports a sum of means over equally many local rows; returns whether there is one."""
    mean = case.types.mean[call.node]
    if mean < 0 or case.trace.nodes[mean].like != case.trace.nodes[call.node].like:
        return False
    bad = call.axes & case.types.along[call.node] & _rows_of_mean(case, mean)
    if not bad or case.compared.counts.get(mean, 0) & bad or _by_parts(case, mean) or _weighed(case, call, bad):
        return False
    names, other = case.named(bad), call.axes & case.types.along[call.node] & ~bad
    fix = f"shardfn.pmean({case.expression(call)}, {names})"
    fix = f"shardfn.psum({fix}, {case.named(other)})" if other else fix
    where = line(case.trace.nodes[mean].site)
    text = f"adds up means over each rank's rows{where}: it is {case.size(bad)} times the mean over all rows"
    case.add_call(call, "means", bad, fix, text)
    return True


def gathered_means(case: Case, call: CollectiveCall) -> None:
    """Reports gathered means over local rows that are added up, or averaged although ranks have unequal rows."""
    mean = case.types.mean[call.node]
    if call.name != "all_gather" or not call.own or call.backward or mean < 0 or not case.is_number(call.node):
        return
    nodes, bad = case.trace.nodes, call.axes & case.types.along[call.node] & _rows_of_mean(case, mean)
    uneven = case.compared.counts.get(mean, 0) & call.axes
    if not bad or _by_parts(case, mean) or may_be(case, call.node, bad):
        return
    names, argument = case.named(bad), _MADE_ROW.sub("", case.expression(call))

    def by_ranks(number: float, _: float) -> bool:
        return number == case.size(bad)

    for node_id, node in enumerate(nodes):
        source = nodes[original(case, node.parents[0])] if node.op in ("sum", "mean") and node.parents else None
        if source is None or not source.op.startswith("all_gather") or source.parents != (call.node,):
            continue
        if node.op == "sum" and not uneven and not scaled_later(case, [node_id], node_id + 1, by_ranks):
            text = f"gathers means over each rank's rows, and adds them up{line(node.site)}"
            fix, times = f"shardfn.pmean({argument}, {names})", case.size(bad)
            case.add_call(call, "means", bad, fix, f"{text}: that is {times} times the mean over all rows")
        elif node.op == "mean" and uneven:
            text = f"gathers means over numbers of rows that differ between ranks, and averages them{line(node.site)}"
            fix = f"shardfn.psum(total, {names}) / shardfn.psum(count, {names})"
            case.add_call(call, "means", bad, fix, f"{text}: that is not the mean over all rows")


def _over_its_own_rows(case: Case, call: CollectiveCall) -> None:
    """Reports a sum over all ranks' rows that is divided by the number of local rows."""
    counts, bad = case.types.rows[call.node], call.axes & local_row_axes(case, call.node)
    total = _sum_of(case, call)
    if not counts or not bad or total is None or case.types.mean[call.node] >= 0 or _weighed(case, call, bad):
        return
    if _has_all_rows(case, bad):  # once each rank has its own, this number may be that of all
        return
    for node_id, factor in _scaled(case, total):
        number = case.trace.nodes[node_id].number
        if number != factor or number not in _counts(counts, case.size(bad)):
            continue
        site, names = case.trace.nodes[node_id].site, axes_text(call.axis_name)
        fix = f"shardfn.psum({(site.divisor if site else None) or 'count'}, {names})"
        case.add(
            node_id, "means", bad, "", site, fix,
            f"what psum along {names}{line(call.site)} adds up is divided{line(site)} by {number:g}, the number of "
            f"this rank's rows alone: it is {case.size(bad)} times the mean over all rows. Divide by the number of "
            f"all: {fix}",
        )  # fmt: skip
        return


def local_count(case: Case, event: Counted) -> None:
    """Reports a total that `accumulate` divides by a local count, or by a count reduced differently."""
    nodes, types = case.trace.nodes, case.types
    summed = nodes[types.total[event.total]].axes if types.total[event.total] >= 0 else 0
    axes, averaged = summed | local_row_axes(case, event.total), _averaged_over(case, event.total)
    counts_local_rows = event.number in (*types.rows[event.total], *(1 / n for n in case.divisors(event.total, 0)))
    bad = axes & types.along[event.by] if event.by >= 0 else (axes & ~averaged) * counts_local_rows
    if not bad:
        _averaged_alone(case, event, summed, averaged)
        return
    names, site = case.named(bad), nodes[event.total].site
    count = "count" if event.by < 0 else written(nodes[event.by].site) or "count"
    total = written(site) or "total"
    total = total if summed & bad else f"shardfn.psum({total}, {names})"
    fix = f"({total}, shardfn.psum({count}, {names}))"
    case.add(
        event.total, "means", bad, "", site, fix,
        f"accumulate divides a total{line(site)} by a count of this rank's rows alone along {names}, but gradients are "
        f"added up over all ranks there. Write: {fix}",
    )  # fmt: skip


def _averaged_alone(case: Case, event: Counted, summed: Mask, averaged: Mask) -> None:
    """Reports a total averaged over ranks but divided by a count summed over ranks, or the reverse."""
    nodes, types = case.trace.nodes, case.types
    if event.by < 0 or types.total[event.by] < 0:
        return
    bad = summed & nodes[types.total[event.by]].axes & (averaged ^ _averaged_over(case, event.by))
    divisors = [n for node_id in (event.total, event.by) for n in case.divisors(node_id, 0)]
    ranks, names, site = case.size(bad), case.named(bad), nodes[event.total].site
    if not bad or any(n == math.inf or n * ranks == 1 or n == ranks for n in divisors):
        return
    fix = f"(shardfn.psum(total, {names}), shardfn.psum(count, {names}))"
    case.add(
        event.total, "means", bad, "", site, fix,
        f"accumulate divides a total{line(site)} by a count, but one of them is a mean over the ranks along {names}, "
        f"the other a sum: the result is {ranks} times too {'small' if averaged & bad else 'large'}. Write: {fix}",
    )  # fmt: skip


def _averaged_over(case: Case, node_id: int) -> Mask:
    """Returns the axes over whose ranks a scaled number is averaged, rather than summed."""
    nodes = case.trace.nodes

    def followed_parents(child: int) -> list[int]:
        return list(nodes[child].parents[:1]) if nodes[child].op in SCALES and nodes[child].op != "psum" else []

    return union(case.types.counted.get(node_id, 0) for node_id in reached([node_id], followed_parents))


def micro_batches(case: Case) -> None:
    """Reports means over micro-batches, which `accumulate` adds up."""
    calls = dict[int, list[Gradient]]()
    for event in case.trace.gradients():
        calls.setdefault(event.begin, []).append(event)
    for begin, events in calls.items():
        loss = events[0].loss
        are_means = all(_is_a_mean(case, event.loss, begin) for event in events) and len(events) > 1
        counts = [case.counted.get(case.trace.nodes[event.loss].parents[0]) for event in events]
        if None not in counts:  # a mean times the number of its terms is a sum
            are_means = are_means and not any(case.divisors(event.loss, 0) for event in events)
            are_means = are_means and any(event is not None and _counts_terms(case, event) for event in counts)
        elif are_means:
            are_means = not _divided_by(case, events, len(events))
        if not are_means and not _unequal(case, events):
            continue
        site = case.trace.nodes[case.types.mean[loss]].site
        case.add(
            loss, "means", 0, "", site, "return (total, count)",
            f"accumulate adds up the losses of {len(events)} micro-batches, each of which is a mean{line(site)}: the "
            f"result is the sum of these means, and rows of a small micro-batch count for more. To get the mean over "
            f"the whole batch, return (total, count), a sum and the number of its terms, both summed over ranks: "
            f"accumulate divides once",
        )  # fmt: skip


def _counts_terms(case: Case, event: Counted) -> bool:
    """Whether a count is known to be that of more than one term on a rank."""
    if event.by < 0:
        return event.number != 1
    total = case.types.total[event.by]
    return total >= 0 and _python_number(case, total) != 1


def _python_number(case: Case, total: int) -> float | None:
    """Returns the Python number that each rank gave to a sum over ranks."""
    numbers = {event.node: event.number for event in case.trace.events if isinstance(event, CollectiveCall)}
    return numbers.get(case.trace.nodes[total].parents[0])


def _unequal(case: Case, events: list[Gradient]) -> bool:
    """Whether the means are known to be over different numbers of elements, without compensation."""
    nodes, mean_ids = case.trace.nodes, [case.types.mean[event.loss] for event in events]
    counts = [nodes[mean].count or nodes[mean].number or 0 for mean in mean_ids]
    products = [n * math.prod(case.divisors(event.loss)) for n, event in zip(counts, events, strict=True)]
    known = min(mean_ids) >= 0 and 0 not in counts and math.inf not in products
    return known and len(set(counts)) > 1 and not math.isclose(max(products), min(products))


def _is_a_mean(case: Case, loss: int, begin: int) -> bool:
    """Whether a loss is a mean over its micro-batch, not over a count that was known before."""
    nodes, mean = case.trace.nodes, case.types.mean[loss]
    if mean < begin or nodes[mean].number is not None:  # a number may be that of the whole batch
        return False
    if nodes[mean].op in MEANS:
        return True
    total, count = (case.types.total[p] for p in nodes[mean].parents[:2])
    number = _python_number(case, count) if count >= begin else None
    if number is not None:  # of this micro-batch, if it has as many terms
        return number in case.types.rows[total]
    by = nodes[count].parents[0] if count >= begin else -1
    return by >= begin if count >= 0 else nodes[mean].parents[-1] >= begin


def _divided_by(case: Case, events: list[Gradient], parts: int) -> bool:
    """Whether losses of micro-batches or their gradients may be divided by the number of micro-batches."""
    divisors = [n for event in events for n in case.divisors(event.loss, 0)]
    starts = [gradient_id for event in events for _, gradient_id in event.pairs]
    return any(n == math.inf or n % parts == 0 for n in divisors) or scaled_later(
        case, starts, events[0].end, lambda n, factor: n == parts or math.isclose(factor, parts)
    )


def _has_all_rows(case: Case, axes: Mask) -> bool:
    """Whether a finding says that all ranks along these axes have the same rows."""
    names = set(case.trace.names(axes))
    return any(finding.kind == "same" and names <= set(finding.axes) for _, finding in case.findings)


def _mean_of_sums(case: Case, call: CollectiveCall) -> None:
    """Reports a mean over ranks of local sums that is divided by the count of all rows, or by none."""
    counts, bad = case.types.rows[call.node], call.axes & local_row_axes(case, call.node)
    result, divisors = _sum_of(case, call), case.divisors(call.node)
    if not counts or not bad or result is None or case.types.mean[call.node] >= 0 or math.inf in divisors:
        return
    ranks, names = case.size(bad), axes_text(call.axis_name)
    by_ranks = _averaged(case, call)
    result = result if by_ranks is None else by_ranks
    uses = [(node_id, number * math.prod(divisors)) for node_id, number in [(result, 1.0), *_scaled(case, result)]]
    if any(node_id in case.counted or node_id in case.counts for node_id, _ in uses):  # see `local_count`
        return
    argument, total = case.expression(call), f"shardfn.psum({case.expression(call)}, {names})"
    of_all = {float(n * ranks) for n in counts} - {float(n) for n in counts}  # counts that cannot be this rank's alone
    if any(n in of_all for _, n in uses) or any(_by_all(case, node_id, ranks, call.axes) for node_id, _ in uses):
        case.add_call(
            call, "means", bad, total,
            f"is given sums over each rank's rows, and what it makes is divided by the number of all rows besides: it "
            f"is {ranks} times too small",
        )  # fmt: skip
    elif all(n == 1 for _, n in uses) and _is_a_loss(case, [node_id for node_id, _ in uses], ranks):
        mean = f"{total} / shardfn.psum(count, {names})"
        case.add(
            call.node, "means", bad, "", call.site, f"{total}, or {mean}",
            f"pmean along {names}{line(call.site)} is given sums over each rank's rows, {argument}: it is neither "
            f"their sum nor the mean over all rows, but the sum divided by the {ranks} ranks. Write, for the sum: "
            f"{total}; for the mean: {mean}",
        )  # fmt: skip


def _by_all(case: Case, node_id: int, ranks: int, axes: Mask) -> bool:
    """Whether a value is divided by a count that was summed over ranks, rather than averaged."""
    node, types = case.trace.nodes[node_id], case.types
    if node.op not in ("div", "div_") or len(node.parents) != 2:
        return False
    count = node.parents[1]
    total = types.total[count]
    return total >= 0 and case.trace.nodes[total].axes == axes and ranks not in case.divisors(count)


def _is_a_loss(case: Case, node_ids: list[int], ranks: int) -> bool:
    """Whether one of these is a loss for which nothing compensates the division by the number of ranks."""
    types = case.types
    events = [e for e in case.trace.gradients() if e.loss in node_ids and types.mean[e.loss] < 0]
    return any(
        math.inf not in case.divisors(e.loss)
        and not scaled_later(
            case, [gradient_id for _, gradient_id in e.pairs], e.end, lambda n, _: math.isclose(n * ranks, 1)
        )
        for e in events
    )


def _added_before(case: Case, call: CollectiveCall) -> None:
    """Reports an invariant term that is added before a sum over ranks, and so is counted once per rank."""
    bad = call.axes & case.types.along[call.node]
    for node_id in _terms(case, call.node):
        node = case.trace.nodes[node_id]
        for local_term, term in (node.parents, node.parents[::-1]):
            axes = sum(b for b in bits_of(bad) if _meets(case, node_id, local_term, term, b))
            if axes & ~case.types.along[term] and case.types.depends[term] & case.requested:
                case.added.add(node_id)
            if axes and not may_be(case, term, axes) and not _divided_later(case, call, axes):
                _say_added(case, call, node_id, term == node.parents[1], axes)
                return


def _say_added(case: Case, call: CollectiveCall, node_id: int, last: bool, axes: Mask) -> None:
    node, names = case.trace.nodes[node_id], axes_text(call.axis_name)
    left, right = (node.site.sides if node.site else None) or ("...", "...")
    term = right if last else left
    fix = f"shardfn.psum({left if last else right}, {names})"
    varying_axes = case.types.along[node.parents[last]] & axes
    once = f"shardfn.pmean({term}, {names})" if varying_axes else term
    fix = f"{fix} {_ADDS[node.op]} {once}" if last else f"{once} {_ADDS[node.op]} {fix}"
    # Then its gradient is a part, too.
    certain = not varying_axes and bool(case.types.depends[node.parents[last]] & case.requested)
    case.add(
        node_id, "sum" if certain else "whole", axes, "", call.site, fix,
        f"psum along {names}{line(call.site)} is given a sum{line(node.site)} of what varies and of a term that is the "
        f"same on all ranks along {case.named(axes)}, {term}: that term is in it {case.size(axes)} times. "
        f"Write: {fix}",
    )  # fmt: skip


def _meets(case: Case, node_id: int, local_term: int, term: int, bit: Mask) -> bool:
    """Whether a term that all ranks share is added to a term that is this rank's part."""
    types, nodes = case.types, case.trace.nodes
    if not types.along[local_term] & bit or case.same(local_term, bit) or nodes[local_term].like != nodes[node_id].like:
        return False
    if types.along[term] & bit and not case.same(term, bit):
        return False
    trained = bool(types.depends[term] & union(map(case.differentiated, case.trace.gradients())))
    return trained if case.is_number(local_term) else bool(types.declared[term]) and _is_partial(case, local_term, bit)


def _is_partial(case: Case, node_id: int, bit: Mask) -> bool:
    """Whether a value is a product over a sharded dimension, and so has to be summed over ranks."""
    nodes = case.trace.nodes
    while nodes[node_id].op in SCALES and nodes[node_id].op not in _SUMS_UP:
        varying = [p for p in nodes[node_id].parents if case.types.along[p] & bit]
        if len(varying) != 1:
            break
        node_id = varying[0]
    return nodes[node_id].op in PRODUCTS and sum(bool(case.types.along[p] & bit) for p in nodes[node_id].parents) == 2


def _terms(case: Case, end: int) -> Iterator[int]:
    """Yields the additions from which a value was made, with nothing but scaling after them."""
    nodes = case.trace.nodes

    def followed_parents(child: int) -> list[int]:
        node = nodes[child]
        scales = node.op in SCALES and node.op not in _SUMS_UP and node.effect == "union" and not node.root
        return [p for p in node.parents if scales and nodes[p].like == node.like]

    return (i for i in reached([end], followed_parents) if nodes[i].op in _ADDS and len(nodes[i].parents) == 2)


def _weighed(case: Case, call: CollectiveCall, axes: Mask) -> bool:
    """Whether the argument or result of a sum over ranks may be divided by their number."""
    return may_be(case, call.node, axes) or _divided_later(case, call, axes)


def _divided_later(case: Case, call: CollectiveCall, axes: Mask) -> bool:
    total, ranks = _sum_of(case, call), case.size(axes)
    if total is None:
        return True
    calls = [event for event in case.trace.events if isinstance(event, CollectiveCall) and event.name == "pmean"]
    averaged = (_averaged(case, c) for c in calls if _own_mean(case, c, axes))
    other_means = case.elsewhere(axes).union(node for node in averaged if node is not None)

    def enough(number: float, factor: float) -> bool:
        return number == ranks or math.isclose(factor, ranks)

    later = [e for e in case.trace.gradients() if e.end > total]
    return scaled_later(case, [total], total + 1, enough, other_means) or any(
        scaled_later(case, [gradient_id for _, gradient_id in e.pairs], e.end, enough, other_means) for e in later
    )


def _own_mean(case: Case, call: CollectiveCall, axes: Mask) -> bool:
    """Whether a `pmean` averages local means, so that its division is not for an earlier sum."""
    mean = case.types.mean[call.node]
    return mean >= 0 and any(not case.same(mean, b) for b in bits_of(axes & case.types.along[mean]))


def local_row_axes(case: Case, node_id: int) -> Mask:
    """Returns the axes along which a value is made of this rank's rows alone."""
    return sum(bit for bit in bits_of(case.types.along[node_id]) if case.of_rows(bit)[node_id] == OWN_ROWS)


def _by_parts(case: Case, mean: int) -> bool:
    """Whether a mean is taken of sums over rows, of one row, or of partial products that may be intended."""
    types, nodes = case.types, case.trace.nodes
    if nodes[mean].op == "mean" and any(types.rows[p] for p in nodes[mean].parents):
        return True
    sharded = {argument.node for argument in case.compared.arguments if argument.rows}
    if any(_takes_one(case, i, sharded) for i in reached([mean], lambda i: nodes[i].parents)):
        return True

    def varying(child: int) -> list[int]:
        return [p for p in nodes[child].parents if any(not case.same(p, b) for b in bits_of(types.along[p]))]

    path = reached([] if case.requested else [mean], varying)
    return any(nodes[node_id].op in PRODUCTS and len(varying(node_id)) > 1 for node_id in path)


def _rows_of_mean(case: Case, mean: int) -> Mask:
    """Returns the axes along which what a mean is taken of, rather than its targets, is made of local rows alone."""
    node = case.trace.nodes[mean]
    return local_row_axes(case, node.parents[0] if node.op.startswith("nll_loss") else mean)


def _takes_one(case: Case, node_id: int, sharded: Container[int]) -> bool:
    """Whether an op takes one of several rows of an argument, such as a task."""
    node = case.trace.nodes[node_id]
    if node.op not in ("select", "unbind") or original(case, node.parents[0]) not in sharded:
        return False
    all_rows, row = case.trace.nodes[node.parents[0]].like, node.like
    return all_rows is not None and row is not None and all_rows[0][0] > 1 and row[0] == all_rows[0][1:]


def _sum_of(case: Case, call: CollectiveCall) -> int | None:
    """Returns the node of the sum's result."""
    return case.first_results.get(("psum", call.node, call.site))


def _averaged(case: Case, call: CollectiveCall) -> int | None:
    """Returns the node at which `pmean` divides by the number of ranks."""
    total = _sum_of(case, call)
    return None if total is None else case.only_child.get(total)


def _scaled(case: Case, start: int) -> Iterator[tuple[int, float]]:
    """Yields the values made from a value by scaling, each with the product of the user's divisors."""
    factors = {start: 1.0}
    for node_id, node in enumerate(case.trace.nodes[start + 1 :], start + 1):
        own_factors = [factors[p] for p in node.parents if p in factors]
        if own_factors and node.op in SCALES and not node.backward:
            factors[node_id] = own_factors[0] * (node.number or 1.0 if node.own else 1.0)
            yield node_id, factors[node_id]


def _counts(rows: tuple[int, ...], ranks: int) -> set[float]:
    """Returns the numbers that can only be a count of the local rows or of their elements."""
    sizes = [b // a for a, b in itertools.pairwise(rows) if a]
    features = {math.prod(sizes[i:j]) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1)}
    return {float(n) for n in rows if n > 1} - {float(n * ranks) for n in (1, *rows)} - set(map(float, features))


_SUMS = ("psum", "pmean", "reduce_scatter")
_ONCE = ("pvary", "local_slice")


def misplaced(case: Case, call: CollectiveCall) -> None:
    """Reports sums of invariant values, `pvary` of varying ones, and means of means over uneven rows."""
    varying_axes = case.types.along[call.node]
    mixes = call.name in (*_SUMS, "pmax", "pmin")
    flat = (call.pieces or case.pieces(call.node)) & call.axes if mixes else 0
    pieces = flat or (case.scattered(call.node) & call.axes if mixes else 0)
    if pieces:
        names, kind = case.named(pieces), "flat shards" if flat else "gradients of pieces"
        fix = f"leave {call.name} out: {case.expression(call)}"
        case.add_call(
            call, "sum", pieces, fix,
            f"is given {kind}, which are cut along {names}, and mixes up different parameters: each rank has other "
            f"elements. Where they are gradients, they are summed already",
        )  # fmt: skip
        return
    if call.name in _SUMS and call.number is None:
        _report_sum(case, call, varying_axes)
    if call.name in _ONCE and varying_axes & call.axes and not _starts_local_state(case, call):
        twice = varying_axes & call.axes
        valid = case.trace.names(call.axes & ~varying_axes)
        if valid:
            fix = f"shardfn.{call.name}({case.expression(call)}, {axes_text(valid)})"
        elif call.name == "local_slice" and case.types.backward[call.node] & twice:
            fix = f"shardfn.reduce_scatter({case.expression(call)}, {case.named(twice)})"
        else:
            fix = f"leave {call.name} out: {case.expression(call)}"
        case.add_call(
            call, "vary", twice, fix,
            f"takes a value that is the same on all ranks along {case.named(twice)}, but this one varies there "
            f"already{case.because(call.node, twice)}",
        )  # fmt: skip


def _starts_local_state(case: Case, call: CollectiveCall) -> bool:
    """Whether `pvary` takes an undeclared value, and no backward pass goes through it.

    Such are the initial values of per-rank state, which are the same at first, and differ once a run is resumed.
    """
    if call.name != "pvary" or call.backward or case.trace.outer:
        return False
    nodes = case.trace.nodes
    roots = [nodes[r] for bit in bits_of(call.axes) for r in case.roots(call.node, bit)]
    sums = (n for n in nodes if n.backward and n.op == "psum" and n.axes & call.axes)
    comes_back = any(n.like == nodes[call.node].like for n in sums)
    return not comes_back and all(root.root == "input" and root.effect != "exactly" for root in roots)


def _summed_before(case: Case, node_id: int, missing: Mask) -> bool:
    """Whether a value is already a sum over ranks, without a division that may be by their number."""
    nodes, divisors = case.trace.nodes, case.divisors(node_id)
    while nodes[node_id].op in SCALES and nodes[node_id].op != "psum" and len(nodes[node_id].parents) == 1:
        node_id = nodes[node_id].parents[0]
    return nodes[node_id].op == "psum" and bool(nodes[node_id].axes & missing) and not divisors


def _report_sum(case: Case, call: CollectiveCall, varying_axes: Mask) -> None:
    missing, types = call.axes & ~varying_axes, case.types
    argument = case.expression(call)
    matters = call.name != "pmean" or bool(types.depends[call.node] and not types.gradient[call.node])
    certain = (types.declared[call.node] or call.backward) and not types.guessed[call.node]
    if missing and matters and (certain or _summed_before(case, call.node, missing)):
        varying = case.trace.names(call.axes & varying_axes)
        other_axes = case.trace.names(varying_axes & ~call.axes & ~(call.pieces or case.pieces(call.node)))
        times = case.size(missing)
        instead = varying or other_axes
        fix = (
            f"shardfn.{call.name}({argument}, {axes_text(instead)})" if instead
            else f"shardfn.collectives.local_slice({argument}, {axes_text(call.axis_name)})"
            if call.name == "reduce_scatter"
            else f"leave {call.name} out: {argument}"
        )  # fmt: skip
        effect = (
            f"divides its derivative by {times}" if call.name == "pmean"
            else f"makes it {times} times as large"
        )  # fmt: skip
        hint = f"; it varies along {axes_text(other_axes)}" if other_axes and not varying else ""
        same = f"is given a value that is the same on all ranks along {case.named(missing)}"
        case.add_call(call, "sum", missing, fix, f"{same}, and {effect}{hint}")
    mean = types.mean[call.node]
    uneven = case.compared.counts.get(mean, 0) & call.axes if mean >= 0 and call.own else 0
    if uneven:
        axis = axes_text(call.axis_name)
        case.add_call(
            call, "means", uneven, f"shardfn.psum(total, {axis}) / shardfn.psum(count, {axis})",
            f"is given means, made{line(case.trace.nodes[mean].site)}, over numbers of rows that differ between ranks "
            f"along {case.named(uneven)}: that is not the mean over all rows",
        )  # fmt: skip
