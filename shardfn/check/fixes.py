"""How a finding is mended: which collective makes a value the same on all ranks, and on which line to write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from shardfn.check.callsites import Site
from shardfn.check.case import OWN_ROWS, Case
from shardfn.check.findings import named, written
from shardfn.check.trace import Mask, Node, reached
from shardfn.check.varying import MEANS, SCALES, bits_of

_COPIES = ("detach", "alias", "clone", "view", "gradient", "lift_fresh", "_to_copy")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "einsum")
_BY_ROW = ("bmm", "baddbmm")
_ADDS = {"add": "+", "sub": "-"}
_LONGEST = 400  # of a sum that a fix spells out: one term added to itself doubles it each time
_CHOOSE = ("argmax", "argmin", "topk", "sort", "std", "var", "median", "nanmedian", "kthvalue", "mode", "prod",
           "logsumexp", "linalg_vector_norm")  # fmt: skip
_JOINED = {
    **dict.fromkeys(("sum", "count_nonzero", "dot", "bincount", "histc"), "psum"),
    **dict.fromkeys(MEANS, "pmean"),
    "max": "pmax", "amax": "pmax", "any": "pmax", "min": "pmin", "amin": "pmin", "all": "pmin",
}  # fmt: skip
"""What makes one number of many, and the collective that goes on with it."""
_MOST = 3  # places that a fix names


class Place(NamedTuple):
    """Where parts are joined: the line, the collective, and the value that is given to it."""

    site: Site | None
    op: str
    node: int

    @property
    def key(self) -> object:
        """The same for one place of the code."""
        return self.op, self.site, self.site and self.site.span


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
    places = _partly(case, at, bit, taken)
    site, op, _ = places[-1]
    if op in _CHOOSE:
        return site, f'shardfn.all_gather({(site.of if site else None) or path}, {names}, to="invariant")'
    instead = _term_by_term(case, _plain(case, at), bit, names) or _ratio(case, _plain(case, at), bit, names)
    if instead is not None:
        return case.trace.nodes[_plain(case, at)].site, instead
    if len(places) > 1 and all(written(one.site) and one.op in _JOINED.values() for one in places):
        return site, " and ".join(f"shardfn.{one.op}({written(one.site)}, {names})" for one in places)
    name = written(site) or path
    if op == "all_gather":
        return site, f'shardfn.all_gather({name}, {names}, to="invariant")'
    return site, f"shardfn.{op}({name}, {names})"


def _plain(case: Case, at: int) -> int:
    """What a value is a copy of."""
    nodes = case.trace.nodes
    while nodes[at].op in _COPIES and len(nodes[at].parents) == 1:
        at = nodes[at].parents[0]
    return at


def _term_by_term(case: Case, at: int, bit: Mask, names: str) -> str | None:
    """A sum of several terms that vary and of one that does not, each reduced where it stands."""
    if len(_cut(case, at, bit)) != 2:
        return None
    said: dict[int, str | None] = {}
    for k in sorted(_additions(case, at, bit)):  # what one is made of comes before it
        if any(p in said or not case.types.along[p] & bit for p in case.trace.nodes[k].parents):
            said[k] = _terms(case, k, bit, names, said)
    return said.get(at)


def _additions(case: Case, at: int, bit: Mask) -> set[int]:
    """The sums that vary of which a value was added up, itself among them."""
    nodes = case.trace.nodes

    def adds(at: int) -> bool:
        return nodes[at].op in _ADDS and len(nodes[at].parents) == 2

    vary = reached([at], lambda at: [p for p in nodes[at].parents if adds(at) and case.types.along[p] & bit])
    return {at for at in vary if adds(at)}


def _terms(case: Case, at: int, bit: Mask, names: str, said: Mapping[int, str | None]) -> str | None:
    """A sum with each term that varies reduced; None where that is not to be written, or not in a line."""
    node = case.trace.nodes[at]
    sides = node.site.sides if node.site is not None else None
    if sides is None or None in [said.get(p, "") for p in node.parents]:
        return None
    found: list[str | None] = []
    for p, side in zip(node.parents, sides, strict=True):
        if not case.types.along[p] & bit:
            found.append(side)
        elif p in said:
            found.append(said[p])
        else:
            op = _sum_of(case, p, bit)
            found.append(f"shardfn.{op}({side}, {names})" if op else None)
    left, right = found
    if left is None or right is None or len(left) + len(right) > _LONGEST:
        return None
    return f"{left} {_ADDS[node.op]} {right}"


def _ratio(case: Case, at: int, bit: Mask, names: str) -> str | None:
    """A sum over this rank's rows by another, which are to be summed before they are divided."""
    node = case.trace.nodes[at]
    if node.op != "div" or len(_cut(case, at, bit)) != 2 or node.site is None:
        return None
    if any(_sum_of(case, p, bit) != "psum" for p in node.parents) or node.site.sides is None:
        return None
    left, right = node.site.sides
    return f"shardfn.psum({left}, {names}) / shardfn.psum({right}, {names})"


def _partly(case: Case, at: int, bit: Mask, taken: int | None) -> tuple[Place, ...]:
    """Where a value was made of a rank's own part of many, and which collective joins the parts.

    Where a number made it vary, that was `taken` from a tensor.
    """
    at = _plain(case, at)
    made = case.trace.nodes[at]
    found = "pmean" if case.alike(at, bit) else "all_gather"
    if found != "pmean" and made.like is not None and not made.like[0]:
        found = "pmax" if made.like[1] is torch.bool else "psum"
    default = Place(made.site, found, at)
    if taken is not None:
        at, default = _plain(case, taken), Place(case.trace.nodes[taken].site, "psum", taken)
    return joined_at(case, at, bit) or (default,)


def joined_at(case: Case, end: int, bit: Mask) -> tuple[Place, ...]:
    """Where the parts of a value are joined, if something on the way to it makes one of many."""
    found: dict[int, tuple[Place, ...]] = {}
    for at in sorted(reached([end], lambda at: _cut(case, at, bit))):  # what one is made of comes before it
        found[at] = _places(case, at, bit, found)
    return found[end]


def _places(case: Case, at: int, bit: Mask, before: Mapping[int, tuple[Place, ...]]) -> tuple[Place, ...]:
    """Those of a value, by those of what it is made of: the first after which nothing else that varies comes in."""
    node, cut = case.trace.nodes[at], _cut(case, at, bit)
    rows = bool(case.of_rows(bit)[at] & OWN_ROWS)
    by_row = rows and node.by_row  # they are still each rank's
    if len(cut) == 2 and node.op in PRODUCTS and not (rows and node.op in _BY_ROW):
        return (Place(node.site, "psum", at),)
    if cut and node.op in _CHOOSE and not by_row:
        return (Place(node.site, node.op, at),)
    if cut and case.types.mean[at] == at and node.number is not None and rows:
        return (Place(node.site, "pmean", at),)
    if cut and all(before[p] for p in cut):
        several = list({place.key: place for p in cut for place in before[p]}.values())
        if len(several) > 1 and node.op in _ADDS and len({place.op for place in several}) == 1:
            return (Place(node.site, several[0].op, at),)
        return tuple(several[:_MOST])
    if cut and node.op in _JOINED and not node.root and not by_row:
        return (Place(node.site, _joined(node), at),)
    if len(cut) == 1 and node.op == "cat":
        return (Place(case.trace.nodes[cut[0]].site, "all_gather", cut[0]),)
    return ()


def _sum_of(case: Case, at: int, bit: Mask) -> str | None:
    """The collective that joins a term's parts, if nothing but scaling comes after the place where they are."""
    place, *others = _partly(case, at, bit, None)
    at = _plain(case, at)
    while at != place.node and case.trace.nodes[at].op in SCALES and len(_cut(case, at, bit)) == 1:
        at = _plain(case, _cut(case, at, bit)[0])
    return place.op if at == _plain(case, place.node) and not others and place.op in ("psum", "pmean") else None


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
