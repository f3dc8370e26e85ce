"""What a collective gave, and what a branch drops on some of the ranks: its derivative is that of the others alone."""

from __future__ import annotations

from shardfn.check.case import Case
from shardfn.check.trace import JOINING, Call, Given, Trace, given_by
from shardfn.check.values import Evidence, Values
from shardfn.check.words import line, named, target


def used(values: Values) -> list[Evidence]:
    """Which of the values that collectives made the same on all ranks go into a loss here, for ranks to compare."""
    trace = values.trace
    losses = [event.loss for event in trace.gradients()]
    if not losses:
        return []
    reached, given = _before(trace, losses), given_by(trace)
    calls = [event for event in trace.events if isinstance(event, Call) and event.own and not event.backward]
    found = [(call, at) for call in calls for at in [_made(given, call)] if at is not None]
    return [Evidence(values.key(call.site, -7), at, int(at in reached)) for call, at in found]


def dropped(case: Case, call: Call) -> None:
    """A value that goes into the loss of some ranks, and not into that of others."""
    followed = call.own and not call.backward and not case.trace.prefix
    at = _made(case.given, call) if followed else None
    some = case.compared.watched.get(-1 if at is None else at, 0) & call.axes
    if not some or at is None or not case.types.depends[at] & case.asked:
        return
    names, given = named(case.trace.names(some)), target(call.site) or "..."
    fix = f"torch.where(condition, other, shardfn.pvary({given}, {names}))"
    case.add(
        at, "branch", some, "", call.site, fix,
        f"what {call.name}{line(call.site)} gives goes into the loss on some ranks along {names}, and a branch drops "
        f"it on others: its derivative is then not added up, and each rank's is its own part. Choose on all ranks, "
        f"by {fix}",
    )  # fmt: skip


def _made(given: Given, call: Call) -> int | None:
    """What a collective gave, if all ranks have that alike."""
    return min((given[key] for op in JOINING if (key := (op, call.node, call.site)) in given), default=None)


def _before(trace: Trace, ends: list[int]) -> set[int]:
    """All that some values were made of."""
    ahead, found = list(ends), set(ends)
    while ahead:
        more = [p for p in trace.nodes[ahead.pop()].parents if p not in found]
        found.update(more)
        ahead += more
    return found
