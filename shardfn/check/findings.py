"""The checker's findings and their wording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardfn.check.callsites import Site
from shardfn.check.trace import Mask, Node
from shardfn.quoting import MOST, short

Kind = Literal[
    "output", "gradient", "sum", "vary", "losses", "means", "whole", "inner", "parts", "branch", "replica", "same",
    "batch_norm", "order", "closure", "collectives",
]  # fmt: skip
PROBABLY = ("losses", "means", "whole", "inner", "parts", "branch", "same", "batch_norm", "order")
"""Kinds that may be intended, if rarely: reported as a warning."""
LAST = ("means", "whole", "same", "batch_norm", "order")
"""Kinds that never cause other findings."""


@dataclass(frozen=True)
class Finding:
    """One error in a function.

    Attributes:
        kind: its category.
        axes: the mesh axes that it concerns.
        path: of the argument or result, as Python: `params['w']`.
        where: the user's file and line; empty if there is none.
        fix: the call to insert, or what else to write.
        text: the full message, a sentence or two.
        unseen: whether only the numbers show it, and its cause was not recorded.
    """

    kind: Kind
    axes: tuple[str, ...]
    path: str
    where: str
    fix: str
    text: str
    unseen: bool = False

    def __str__(self) -> str:
        return self.text


class VaryingError(ValueError):
    """Values declared to be the same on all ranks along an axis differ, or the other way round.

    Shapes are right: without the checker such a program runs, and computes something other than what is written.

    Attributes:
        findings: what is wrong, first cause first.
    """

    def __init__(self, message: str, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class VaryingWarning(UserWarning):
    """Values that differ between ranks, or are the same on all, where that is probably not meant.

    Attributes:
        findings: what is suspicious, first cause first.
    """

    def __init__(self, message: str, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


def findings_message(name: str, findings: tuple[Finding, ...], probably: bool) -> str:
    """Formats as many of the first findings as fit into one message, and counts the rest."""
    head = f"{short(name, 200)}: " + (
        "probably not meant" if probably else "what ranks hold is not what the function declares (shapes are right)"
    )
    if len(findings) == 1:
        return f"{head}: {short(str(findings[0]), MOST - len(head) - 2)}"
    lines = [f"{head}; {len(findings)} findings, first cause first:"]
    left = MOST - len(lines[0]) - 60  # for the last line
    for i, finding in enumerate(findings, 1):
        line = f"  {i}. {short(str(finding), 900)}"
        if len(line) + 1 > left:
            lines.append(f"  and {len(findings) - i + 1} more, in the error's findings")
            break
        lines.append(line)
        left -= len(line) + 1
    return "\n".join(lines)


def root_of(node: Node, differs: Mask) -> str:
    """Describes the root at which a value begins to vary."""
    match node.root:
        case "input":
            return node.about
        case "parameter":
            return f"the parameter {node.about}"
        case "closure":
            return f"a tensor of shape {list(node.like[0]) if node.like else []} that is closed over{line(node.site)}"
        case "random":
            return f"random numbers{line(node.site)}"
        case "statistics":
            return f"batch statistics{line(node.site)}"
        case _:
            if node.op == "all_gather":
                return f"all_gather{line(node.site)}"
            return f"a number that differs between ranks{line(node.site)}" if differs else f"{node.op}{line(node.site)}"


def written(site: Site | None) -> str | None:
    """Returns the source of the expression at a site, or the name that it is assigned to."""
    if site is None:
        return None
    return site.target if (site.expression or "").endswith(".backward()") else site.expression or site.target


def given_at(site: Site | None) -> str:
    """Returns the source of the first argument of the call at a site, or dots."""
    return (site.first_argument if site is not None else None) or "..."


def target(site: Site | None) -> str | None:
    """Returns the name to which a line assigns its result."""
    return None if site is None else site.target


def axes_text(names: object) -> str:
    """Formats names of axes as Python."""
    if isinstance(names, str):
        return repr(names)
    axes: tuple[str, ...] = tuple(names)  # type: ignore[arg-type]
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def line(site: Site | None) -> str:
    """Returns ` at file:line` to append to a phrase; empty without a site."""
    return "" if site is None else f" at {site}"
