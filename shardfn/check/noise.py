"""Random numbers that every rank has the same, for rows that each has its own."""

from __future__ import annotations

from shardfn.check.case import Case
from shardfn.check.words import line, named


def repeated(case: Case) -> None:
    """Numbers drawn from distributions that vary, by generators that do not."""
    for at, differs in case.compared.streams.items():
        made = case.trace.nodes[at]
        same = case.types.along[at] & ~differs
        if same:
            names = named(case.trace.names(same))
            fix = f"generator=shardfn.fold_in(seed, {names})"
            case.add(
                at, "same", same, "", made.site, fix,
                f"{made.op}{line(made.site)} draws by the same random numbers on all ranks along {names}, from "
                f"distributions that vary there{case.because(at, same)}: the rows of one rank have the noise of those "
                f"of the others. Pass {fix}",
            )  # fmt: skip
