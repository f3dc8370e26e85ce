"""Random numbers that every rank has the same, for rows that each has its own."""

from __future__ import annotations

import functools
import operator

from shardfn.check.case import Case
from shardfn.check.torch_ops import DISTRIBUTIONS
from shardfn.check.words import line, named


def repeated(case: Case) -> None:
    """Numbers drawn from distributions that vary, by generators that do not."""
    watched = case.compared.watched
    for at in watched:
        made = case.trace.nodes[at]
        others = functools.reduce(operator.or_, [watched.get(p, 0) for p in made.parents], 0)
        same = case.types.along[at] & others & ~watched[at]
        if made.op in DISTRIBUTIONS and same:
            names = named(case.trace.names(same))
            fix = f"generator=shardfn.fold_in(seed, {names})"
            case.add(
                at, "same", same, "", made.site, fix,
                f"{made.op}{line(made.site)} draws by the same random numbers on all ranks along {names}, from "
                f"distributions that vary there{case.because(at, same)}: the rows of one rank have the noise of those "
                f"of the others. Pass {fix}",
            )  # fmt: skip
