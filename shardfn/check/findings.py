"""What the checker reports, and in which words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardfn.check.callsites import Site
from shardfn.check.trace import Mask, Node
from shardfn.quoting import MOST, short

Kind = Literal[
    "output", "gradient", "sum", "vary", "losses", "means", "whole", "inner", "branch", "replica", "same", "batch_norm",
    "closure", "collectives",
]  # fmt: skip
PROBABLY = ("losses", "means", "whole", "inner", "branch", "same", "batch_norm")
"""What may be meant, if seldom: a warning."""
LAST = ("means", "whole", "same", "batch_norm")
"""What is no cause of anything else that is found."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a function.

    Attributes:
        kind: what, in a word.
        axes: along which of the mesh's axes.
        path: of the argument or result, as Python: `params['w']`.
        where: the user's file and line; empty where there is none.
        fix: the call to insert, or what else to write.
        text: all of that in a sentence or two.
        unseen: whether it shows in numbers alone, whose cause was not recorded.
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
    """Values that are declared to be the same on all ranks along an axis differ, or the other way round.

    Shapes are right: without the checker such a program runs, and computes something else than what is written.

    Attributes:
        findings: what is wrong, first cause first.
    """

    def __init__(self, message: str, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class VaryingWarning(UserWarning):
    """Values that differ between ranks, or are the same, where that is probably not meant.

    Attributes:
        findings: what it is.
    """

    def __init__(self, message: str, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


def said(name: str, findings: tuple[Finding, ...], probably: bool) -> str:
    """The first findings, as many as go into one message, and how many there are besides."""
    head = f"{short(name, 200)}: " + (
        "probably not meant" if probably else "what ranks hold is not what the function declares (shapes are right)"
    )
    if len(findings) == 1:
        return f"{head}: {short(str(findings[0]), MOST - len(head) - 2)}"
    lines = [f"{head}; {len(findings)} findings, first cause first:"]
    left = MOST - len(lines[0]) - 60  # for the last line
    for i, one in enumerate(findings, 1):
        line = f"  {i}. {short(str(one), 900)}"
        if len(line) + 1 > left:
            lines.append(f"  and {len(findings) - i + 1} more, in the error's findings")
            break
        lines.append(line)
        left -= len(line) + 1
    return "\n".join(lines)


def root_of(node: Node, differs: Mask) -> str:
    """What makes a value vary that has no parents which do."""
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
    """What is computed there, in the user's words."""
    if site is None:
        return None
    return site.target if (site.expression or "").endswith(".backward()") else site.expression or site.target


def target(site: Site | None) -> str | None:
    """The name that a line gives to what it computes."""
    return None if site is None else site.target


def named(names: object) -> str:
    """Names of axes, as Python."""
    if isinstance(names, str):
        return repr(names)
    several: tuple[str, ...] = tuple(names)  # type: ignore[arg-type]
    return repr(several[0]) if len(several) == 1 else repr(several)


def line(site: Site | None) -> str:
    """The file and the line, to go on with."""
    return "" if site is None else f" at {site}"
