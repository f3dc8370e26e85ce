"""Gradients that the function reduces itself, by the wrong one of `psum` and `pmean`."""

from __future__ import annotations

import math

from shardfn.check.case import Case
from shardfn.check.scaling import divided, local, scaled_later
from shardfn.check.trace import Call, Gradient
from shardfn.check.varying import bits_of
from shardfn.check.words import line, named


def reduced(case: Case, call: Call) -> None:
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
