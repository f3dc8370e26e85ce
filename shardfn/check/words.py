"""How a finding speaks of values, lines and axes."""

from __future__ import annotations

from shardfn.check.sites import Site
from shardfn.check.trace import Mask, Node


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
