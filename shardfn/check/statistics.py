"""Batch statistics of one rank's rows alone."""

from __future__ import annotations

from shardfn.check.case import Case
from shardfn.check.trace import Mask
from shardfn.check.varying import bits_of
from shardfn.check.words import line, named


def of_some_rows(case: Case) -> None:
    """A batch norm that takes its mean and variance from this rank's rows."""
    told = set()
    for at, node in enumerate(case.trace.nodes):
        along = _by_rows(case, node.parents[0]) if node.root == "statistics" and node.parents else 0
        if not along or node.site in told:
            continue
        told.add(node.site)
        names = named(case.trace.names(along))
        case.add(
            at, "batch_norm", along, "", node.site,
            f"shardfn.psum of the sums along {names}",
            f"batch statistics{line(node.site)} are those of this rank's rows alone, which vary along {names}"
            f"{case.because(node.parents[0], along)}: the result is not that of the whole batch. Sum up counts, "
            f"sums and squares by shardfn.psum along {names}, or use a norm without batch statistics",
        )  # fmt: skip


def _by_rows(case: Case, at: int) -> Mask:
    """The axes along which a value varies by more than parameters, which a stage gives to all ranks alike."""
    found = 0
    for bit in bits_of(case.types.along[at]):
        roots = case.roots(at, bit)
        found |= bit if any(case.trace.nodes[r].root not in ("parameter", "statistics") for r in roots) else 0
    return found
