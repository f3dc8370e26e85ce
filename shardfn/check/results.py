"""Results that vary where their specs say that they do not."""

from __future__ import annotations

from collections.abc import Mapping

from shardfn.check.case import Case
from shardfn.check.findings import Kind
from shardfn.check.gradients import partial
from shardfn.check.joining import reduction
from shardfn.check.sites import Site
from shardfn.check.trace import Mask, Output
from shardfn.check.varying import bits_of
from shardfn.check.words import line, named


def returned(case: Case, output: Output, differs: Mask) -> None:
    """A result, of which the bits differ along these axes."""
    if case.trace.prefix and (node := _last_updated(case, differs & ~(output.allowed or 0))) is not None:
        output = output._replace(node=node)
    along = case.types.along[output.node]
    if output.allowed is None:
        for k in range(len(case.trace.axes)):  # new values of what was the same
            bit = along & case.types.backward[output.node] & 1 << k
            partial(case, bit, case.types.updated[output.node][k] if bit else 0, output.path)
        return
    bad = along & ~output.allowed
    by_gradient = bad & case.types.backward[output.node]
    if by_gradient:
        variables = _updated(case, output.node, by_gradient)
        if not (case.batched and not variables & ~case.batched) and partial(case, by_gradient, variables, output.path):
            bad &= ~by_gradient
    if output.outer:
        for k in range(len(case.trace.axes)):
            if not along >> k & 1:
                partial(case, 1 << k, case.types.met[output.node][k], f"what differentiates {output.path}")
    varies(case, output.path, output.node, bad, output.allowed, case.trace.nodes[output.node].site, differs)
    unseen = differs & ~along & ~output.allowed
    if unseen and not bad:
        names = case.trace.names(unseen)
        case.add(
            output.node, "output", unseen, output.path, case.trace.nodes[output.node].site,
            f"shardfn.pmean({output.path}, {named(names)}) of a mean, shardfn.psum of a part of a sum",
            f"{output.path} is declared to be the same on all ranks along {named(names)}, but its numbers differ "
            f"there, and nothing that it was seen to be made of does. Make it the same (by shardfn.pmean if it is a "
            f"mean over rows, by shardfn.psum if it is a part of a sum), or name the axis in its spec",
            unseen=True,
        )  # fmt: skip


def _last_updated(case: Case, axes: Mask) -> int | None:
    """The last value that was updated by a gradient which varies along axes, as a result has come to do since."""
    for at in reversed(range(len(case.types.along) if axes else 0)):
        if any(case.types.updated[at][k] for k in range(len(case.trace.axes)) if axes >> k & 1):
            return at
    return None


def _updated(case: Case, node: int, bad: Mask) -> Mask:
    """The variables whose gradient a value has, of which it is a new value if it is one."""
    updated = 0
    for k in range(len(case.trace.axes)):
        if bad >> k & 1:
            updated |= case.types.updated[node][k]
    first, touched = (_used(case, places, node, bad) for places in (case.types.first, case.types.touched))
    kept = updated if case.asked else updated & (first | touched)
    if kept and not (
        _trained(case, node, bad) and not kept & case.asked
    ):  # and no moment, to which a gradient was added
        return kept
    like = case.trace.nodes[node].like  # where the function made a leaf of its own: of a variable like it
    alike = sum(1 << at for at, v in enumerate(case.trace.variables) if case.trace.nodes[v.node].like == like)
    return case.types.gradient[node] or first or touched & alike or updated


def _trained(case: Case, node: int, bad: Mask) -> Mask:
    """The variables, the same along these axes, whose gradients were asked for and are in a value."""
    same = sum(1 << at for at, variable in enumerate(case.trace.variables) if variable.same & bad)
    return case.types.gradient[node] & case.asked & same


def _used(case: Case, places: Mapping[tuple[int, int], int], node: int, bad: Mask) -> int:
    """The variables that met these axes before the last backward pass; a moment is met after it."""
    last = max((at for at in range(node + 1) if case.trace.nodes[at].backward), default=node)
    met = 0
    for (axis, bit), at in places.items():
        met |= bit if bad >> axis & 1 and at <= last else 0
    return met


def varies(
    case: Case, path: str, at: int, bad: Mask, allowed: Mask, site: Site | None, differs: Mask | None = None
) -> None:
    """A value varies along axes where it is said not to."""
    bad &= ~case.told(at, bad)
    if not bad:
        return
    roots = {r for k in bits_of(bad) for r in case.roots(at, k)}
    nodes = [case.trace.nodes[r] for r in sorted(roots)]
    guessed = all(n.root in ("", "constant", "closure") and n.effect == "union" for n in nodes)
    if differs is not None and not bad & differs and guessed:
        return  # each rank went another way to the same number
    names = case.trace.names(bad)
    kind: Kind = "closure" if nodes and all(n.root == "closure" for n in nodes) else "output"
    where, fix = reduction(case, path, at, bad, nodes)
    instead = "" if kind == "closure" else f", or declare how it is cut: a spec that names {named(names)}"
    case.add(
        at, kind, bad, path, where, fix,
        f"{path}{line(site)} varies along {named(names)}{case.because(at, bad)}, but its spec says that it is the "
        f"same on all ranks there. Write: {fix}{line(where) if where != site else ''}{instead}",
    )  # fmt: skip
