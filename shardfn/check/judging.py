"""What is wrong with a recorded call, and which call mends it. A pure function of what was recorded and compared."""

from __future__ import annotations

from shardfn.check import arguments, branches, by_hand, gradients, losses, noise, reducing, results, statistics, sums
from shardfn.check.case import Case, Compared
from shardfn.check.findings import PROBABLY, Finding
from shardfn.check.trace import Call, Claimed, Gradient, Output, Part, Summed, Trace, Used


def judged(trace: Trace, compared: Compared) -> list[Finding]:
    """What is wrong with a call, first cause first."""
    case = Case(trace, compared)
    for argument in compared.arguments:
        arguments.replica(case, argument)
    arguments.same(case)
    for event in trace.events:
        match event:
            case Call():
                reducing.called(case, event)
                sums.called(case, event)
                branches.dropped(case, event)
                by_hand.reduced(case, event)
            case Gradient():
                losses.added_up(case, event)
                losses.partial_sums(case, event)
            case Part():
                bad = case.types.along[event.node] & ~event.allowed
                gradients.partial(case, bad, trace.nodes[event.variable].variable, "the stage's sum")
            case Used():
                gradients.stepped(case, event)
            case Output():
                results.returned(case, event, compared.outputs.get(event.path, 0))
            case Claimed():
                bad = case.types.along[event.node] & ~event.allowed
                results.varies(case, event.what, event.node, bad, event.allowed, event.site)
            case Summed():
                pass
    noise.repeated(case)
    noise.met(case)
    statistics.of_some_rows(case)
    gradients.parts(case)
    return [finding for at, finding in sorted(case.found, key=lambda one: one[0]) if _settled(trace, at, finding)]


def _settled(trace: Trace, at: int, finding: Finding) -> bool:
    """Whether nothing that comes later can make a finding wrong: in a prefix, what is guessed before a step is used."""
    steps = (event.gradient for event in trace.events if isinstance(event, Used))
    return not trace.prefix or finding.kind not in PROBABLY or at < max(steps, default=-1)
