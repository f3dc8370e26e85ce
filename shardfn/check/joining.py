"""Which collective makes a value the same on all ranks, and on which line it is to be written."""

from __future__ import annotations

import torch

from shardfn.check.case import Case
from shardfn.check.sites import Site
from shardfn.check.trace import Mask, Node
from shardfn.check.varying import MEANS, bits_of
from shardfn.check.words import named, written

_COPIES = ("detach", "alias", "clone", "view", "gradient", "lift_fresh", "_to_copy")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "einsum")
_CHOOSE = ("argmax", "argmin", "topk", "sort")
_JOINED = {
    "sum": "psum", "count_nonzero": "psum", "dot": "psum", "linalg_vector_norm": "psum",
    **dict.fromkeys(MEANS, "pmean"),
    "max": "pmax", "amax": "pmax", "any": "pmax", "min": "pmin", "amin": "pmin", "all": "pmin",
}  # fmt: skip
"""What makes one number of many, and the collective that goes on with it."""


def reduction(case: Case, path: str, at: int, bad: Mask, roots: list[Node]) -> tuple[Site | None, str]:
    """What makes a value the same on all ranks, and where that is to be written."""
    names = named(case.trace.names(bad))
    if roots and all(n.root == "closure" for n in roots):
        return roots[0].site, "pass it as an argument, with a spec that says how it is cut"
    if roots and all(n.op == "all_gather" for n in roots):
        given = (roots[0].site.given if roots[0].site else None) or "..."
        return roots[0].site, f'shardfn.all_gather({given}, {names}, to="invariant")'
    if roots and all(n.root == "random" for n in roots):
        return roots[0].site, f"generator=shardfn.fold_in(seed) without {names}, the same on all ranks there"
    bit = bits_of(bad)[0]
    taken = _taken(case, at, bit)
    if roots and taken is None and all(n.root in ("", "constant") and n.effect == "union" for n in roots):
        return roots[0].site, f"the same number on all ranks along {names}"
    site, op = _partly(case, at, bit, taken)
    if op in _CHOOSE:
        return site, f'shardfn.all_gather({(site.of if site else None) or path}, {names}, to="invariant")'
    name = written(site) or path
    if op == "all_gather":
        return site, f'shardfn.all_gather({name}, {names}, to="invariant")'
    return site, f"shardfn.{op}({name}, {names})"


def _partly(case: Case, at: int, bit: Mask, taken: int | None) -> tuple[Site | None, str]:
    """Where a value was made of a rank's own part of many, and which collective joins the parts.

    That is the first place after which nothing else that varies comes in. Where a number made it vary, that was
    `taken` from a tensor.
    """
    nodes = case.trace.nodes
    while nodes[at].op in _COPIES and len(nodes[at].parents) == 1:
        at = nodes[at].parents[0]
    made = nodes[at]
    scalar = made.like is not None and not made.like[0]
    site, found = made.site, "psum" if scalar else "all_gather"
    if scalar and made.like is not None and made.like[1] is torch.bool:
        found = "pmax"
    while True:
        node, cut = nodes[at], _cut(case, at, bit)
        if len(cut) == 2 and node.op in _PRODUCTS:
            return node.site, "psum"
        if node.op in _CHOOSE and cut:
            return node.site, node.op
        if node.op in _JOINED and not node.root:
            site, found = node.site, _joined(node)
        if len(cut) == 1:
            at = cut[0]
        elif not cut and taken is not None:
            at, taken = taken, None
            site, found = nodes[at].site, "psum"
        else:
            return site, found


def _taken(case: Case, at: int, bit: Mask) -> int | None:
    """The value of a tensor that became a number in Python, if nothing but a number makes this one vary."""
    roots = [case.trace.nodes[r] for r in case.roots(at, bit)]
    if any(n.root not in ("", "constant") or n.effect != "union" for n in roots):
        return None
    before = range(at - 1, -1, -1)
    return next((k for k in before if case.trace.nodes[k].op == "item" and case.types.along[k] & bit), None)


def _cut(case: Case, at: int, bit: Mask) -> list[int]:
    """The values that one was made of that differ between ranks, not by type alone."""
    node = case.trace.nodes[at]
    if node.effect not in ("union", "minus") or node.root:
        return []
    return [p for p in node.parents if case.types.along[p] & bit and not case.alike(p, bit)]


def _joined(node: Node) -> str:
    """The collective that makes of the ranks' results that of all."""
    op = _JOINED[node.op]
    return "psum" if op == "pmean" and node.op != "mean" and not node.count else op
