"""By what a loss is divided, or what is made of its gradient: where nobody can tell, it may be the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable

from shardfn.check.case import Case
from shardfn.check.trace import Gradient, Mask
from shardfn.check.varying import bits_of, scales


def local(case: Case, mean: int) -> Mask:
    """The axes along which a mean is one over this rank's rows alone: it is one number, of rows that are cut there."""
    if mean < 0 or not case.is_number(mean):
        return 0
    found = 0
    for bit in bits_of(case.types.along[mean]):
        roots = [case.trace.nodes[r] for r in case.roots(mean, bit)]
        rows = (n for n in roots if n.root in ("input", "closure", "random"))
        found |= bit if any(not n.variable & case.asked for n in rows) else 0
    return found


def divided(case: Case, event: Gradient, ranks: int) -> bool:
    """Whether a loss, or anything that is made of its gradient, is or may be divided by the number of ranks."""
    product = math.prod(case.types.divisors[event.loss])
    return may_be(case, event.loss, ranks) or scaled_later(
        case,
        [at for _, at in event.pairs],
        event.end,
        lambda n, all_in_all: n == ranks or math.isclose(product * all_in_all, ranks),
    )


def may_be(case: Case, at: int, ranks: int) -> bool:
    """Whether a value is or may be divided by the number of ranks."""
    mean, by = case.types.mean[at], case.types.divisors[at]
    if ranks in by or math.inf in by or _whole(case, at, ranks):
        return True  # below: by as many rows as there are ranks, or by the ranks
    return mean >= 0 and ranks in (case.trace.nodes[mean].number, case.trace.nodes[mean].count)


def _whole(case: Case, at: int, ranks: int) -> bool:
    """Whether a mean is divided by a multiple of the ranks, or a sum by what may be the number of all their rows."""
    mean, product = case.types.mean[at], math.prod(case.types.divisors[at])
    if product in [n * ranks for n in (1, *case.types.rows[at])]:
        return True
    if mean < 0:
        return False
    if case.trace.nodes[mean].number in [n * ranks for n in case.types.rows[mean]]:
        return True
    times = product / ranks
    return math.isfinite(times) and times >= 1 and math.isclose(times, round(times), rel_tol=1e-9)


def scaled_later(
    case: Case, starts: Iterable[int], begin: int, enough: Callable[[float, float], bool], but: Container[int] = ()
) -> bool:
    """Whether a line of the user's divides what is made of some values by a number that is `enough`, or by a tensor.

    Args:
        case: the call.
        starts: the values.
        begin: where they are done.
        enough: of a number, and of the product of all by which the same was divided.
        but: divisions that do not count.
    """
    reached = dict.fromkeys(starts, 1.0)
    for at, node in enumerate(case.trace.nodes[begin:], begin):
        before = [reached[p] for p in node.parents if p in reached]
        if not before or at in reached:
            continue
        if at in but:
            reached[at] = before[0]
            continue
        reached[at] = before[0] * abs(node.number or 1.0)
        if not node.own or not scales(node):
            continue
        others = [p for p in node.parents if p not in reached]
        by_tensor = any(map(case.is_number, others)) or node.op.startswith("_foreach_")
        if enough(abs(node.number), reached[at]) if node.number is not None else by_tensor:
            return True
    return False
