"""Gradients that are each rank's part alone, of parameters that are the same on all."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping

from shardfn.check.case import Case
from shardfn.check.scaling import divided, local
from shardfn.check.sites import Site
from shardfn.check.trace import Mask, Node, Used
from shardfn.check.varying import bits_of
from shardfn.check.words import line, named, written


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
    ahead, seen = [at], {at}
    while ahead and same and like is not None and math.prod(like[0]):  # of what lives elsewhere a rank has nothing
        node = nodes[ahead.pop()]
        if node.effect == "minus" and node.axes & same:
            return node
        more = [p for p in node.parents if nodes[p].like == like and p not in seen and not case.types.along[p] & same]
        seen.update(more)
        ahead += more
    return None


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


def _held(case: Case, at: int) -> Mask:
    """The variables of which a value is one, or a new value."""
    return case.trace.nodes[at].variable | case.types.holds[at]


def _mean_besides(case: Case, members: list[int], axes: Mask) -> str:
    """What is to be said where the loss is a mean over this rank's rows, of which no sum is wanted."""
    for event in case.gradients():
        mean = case.types.mean[event.loss]
        asked = functools.reduce(operator.or_, [_held(case, of) for of, _ in event.pairs], 0)
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
