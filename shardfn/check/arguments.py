"""Arguments that are not what their specs declare."""

from __future__ import annotations

from shardfn.check.case import Argument, Case
from shardfn.check.trace import Gradient
from shardfn.check.words import named


def replica(case: Case, argument: Argument) -> None:
    """One that differs along axes along which it is declared to be the same."""
    if argument.allowed is None:
        return
    bad = case.compared.nodes.get(argument.node, 0) & ~argument.allowed
    if not bad:
        return
    case.wrong[argument.node] = bad
    names = case.trace.names(bad)
    case.add(
        argument.node, "replica", bad, argument.path, None,
        "start all ranks from one seed, or from rank 0's value",
        f"{argument.path} is declared to be the same on all ranks along {named(names)}"
        f"{f' ({argument.spec})' if argument.spec else ''}, but its bits differ there. Start all ranks from one "
        f"seed (shardfn.init_sharded does), or declare how it is cut",
    )  # fmt: skip


def same(case: Case) -> None:
    """Rows that are declared to be cut, and of which every rank has the same."""
    trained = {of for event in case.trace.events if isinstance(event, Gradient) for of, _ in event.pairs}
    rows = [a for a in case.compared.arguments if a.plain and not a.constant and a.node not in trained]
    for k, name in enumerate(case.trace.axes):
        bit = 1 << k
        cut = [a for a in rows if a.allowed and a.allowed & bit]
        if cut and not any(case.compared.nodes.get(a.node, 0) & bit for a in cut):
            paths = ", ".join(a.path for a in cut[:3]) + (f" and {len(cut) - 3} more" * (len(cut) > 3))
            case.add(
                cut[0].node, "same", bit, cut[0].path, None, f"pass each rank its own rows along {name!r}",
                f"{paths}: declared to be cut along {name!r}, but the bits are the same on all ranks along it: "
                f"each rank reads the same rows. Pass each its own, by shardfn.axis_index({name!r}), or "
                f"shardfn.run.batches",
            )  # fmt: skip
