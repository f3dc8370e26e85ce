"""Proposes fixes: which collective makes a value the same on all ranks, and on which line to write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from shardfn.check.callsites import Site
from shardfn.check.case import OWN_ROWS, Case
from shardfn.check.findings import given_at, target, written
from shardfn.check.trace import Mask, Node, reached
from shardfn.check.varying import MEANS, SCALES, bits_of

_COPIES = ("detach", "alias", "clone", "view", "gradient", "lift_fresh", "_to_copy")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "einsum")
_BY_ROW = ("bmm", "baddbmm")
_ADDS = {"add": "+", "sub": "-"}
_LONGEST = 400  # most characters of a spelled-out sum: adding a term to itself doubles it each time
_CHOOSE = ("argmax", "argmin", "topk", "sort", "std", "var", "median", "nanmedian", "kthvalue", "mode", "prod",
           "logsumexp", "linalg_vector_norm")  # fmt: skip
_JOINED = {
    **dict.fromkeys(("sum", "count_nonzero", "dot", "bincount", "histc"), "psum"),
    **dict.fromkeys(MEANS, "pmean"),
    "max": "pmax", "amax": "pmax", "any": "pmax", "min": "pmin", "amin": "pmin", "all": "pmin",
}  # fmt: skip
"""Ops that reduce many numbers to one, and the collective that continues the reduction over ranks."""
_MOST = 3  # most places that a fix names


class FixSite(NamedTuple):
    """Where parts are joined: the line, the collective, and the node of its argument."""

    site: Site | None
    op: str
    node: int

    @property
    def key(self) -> object:
        """Equal for places at the same point of the code."""
        return self.op, self.site, self.site and self.site.span


def reduction(case: Case, path: str, at: int, bad: Mask, roots: list[Node]) -> tuple[Site | None, str]:
    """Returns the call that makes a value the same on all ranks, and the site at which to write it."""
    names = case.named(bad)
    if roots and all(n.root == "closure" for n in roots):
        return roots[0].site, "pass it as an argument, with a spec that says how it is cut"
    if roots and all(n.op == "all_gather" for n in roots):
        given = given_at(roots[0].site)
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
    instead = _term_by_term(case, original(case, at), bit, names) or _ratio(case, original(case, at), bit, names)
    if instead is not None:
        return case.trace.nodes[original(case, at)].site, instead
    if len(places) > 1 and all(written(place.site) and place.op in _JOINED.values() for place in places):
        return site, " and ".join(f"shardfn.{place.op}({written(place.site)}, {names})" for place in places)
    name = written(site) or path
    if op == "all_gather":
        return site, f'shardfn.all_gather({name}, {names}, to="invariant")'
    return site, f"shardfn.{op}({name}, {names})"


def original(case: Case, at: int) -> int:
    """Follows copies back to the original value."""
    nodes = case.trace.nodes
    while nodes[at].op in _COPIES and len(nodes[at].parents) == 1:
        at = nodes[at].parents[0]
    return at


def derived(case: Case, met: int, axis: int, member: Mask, path: str = "") -> str:
    """Returns the source of the operand through which a variable or sum, by its bit, meets what varies along an axis.

    Empty if that operand has no name, or is written with the variable at this `path` itself.
    """
    nodes, types, site = case.trace.nodes, case.types, case.trace.nodes[met].site
    for number, at in enumerate(nodes[met].parents):
        if types.along[at] >> axis & 1 or not types.free[at][axis] & member:
            continue
        origin = original(case, at)
        sides = site.sides if site is not None and len(nodes[met].parents) == 2 else None
        source = sides[number] if sides else (site.given if site is not None and number == 0 else None)
        source = source or target(nodes[origin].site) or ""
        itself = nodes[origin].variable & member and nodes[origin].root != "closure"
        direct = itself or (path and site is not None and site.spelled(path) in source)
        return "" if direct else source
    return ""


def _term_by_term(case: Case, at: int, bit: Mask, names: str) -> str | None:
    """Spells out a sum of varying and invariant terms with each varying term reduced on its own."""
    if len(_cut(case, at, bit)) != 2:
        return None
    spelled: dict[int, str | None] = {}
    for k in sorted(_additions(case, at, bit)):  # operands come before their sums
        if any(p in spelled or not case.types.along[p] & bit for p in case.trace.nodes[k].parents):
            spelled[k] = _terms(case, k, bit, names, spelled)
    return spelled.get(at)


def _additions(case: Case, at: int, bit: Mask) -> set[int]:
    """Returns the varying sums from which a value was added up, itself included."""
    nodes = case.trace.nodes

    def adds(at: int) -> bool:
        return nodes[at].op in _ADDS and len(nodes[at].parents) == 2

    varying = reached([at], lambda at: [p for p in nodes[at].parents if adds(at) and case.types.along[p] & bit])
    return {at for at in varying if adds(at)}


def _terms(case: Case, at: int, bit: Mask, names: str, spelled: Mapping[int, str | None]) -> str | None:
    """Spells out a sum with each varying term reduced; None if that cannot be written, or not in one line."""
    node = case.trace.nodes[at]
    sides = node.site.sides if node.site is not None else None
    if sides is None or None in [spelled.get(p, "") for p in node.parents]:
        return None
    operands: list[str | None] = []
    for p, side in zip(node.parents, sides, strict=True):
        if not case.types.along[p] & bit:
            operands.append(side)
        elif p in spelled:
            operands.append(spelled[p])
        else:
            op = _sum_of(case, p, bit)
            operands.append(f"shardfn.{op}({side}, {names})" if op else None)
    left, right = operands
    if left is None or right is None or len(left) + len(right) > _LONGEST:
        return None
    return f"{left} {_ADDS[node.op]} {right}"


def _ratio(case: Case, at: int, bit: Mask, names: str) -> str | None:
    """Spells out a quotient of two sums over this rank's rows with both summed over ranks before the division."""
    node = case.trace.nodes[at]
    if node.op != "div" or len(_cut(case, at, bit)) != 2 or node.site is None:
        return None
    if any(_sum_of(case, p, bit) != "psum" for p in node.parents) or node.site.sides is None:
        return None
    left, right = node.site.sides
    return f"shardfn.psum({left}, {names}) / shardfn.psum({right}, {names})"


def _partly(case: Case, at: int, bit: Mask, taken: int | None) -> tuple[FixSite, ...]:
    """Returns where a value was reduced over a rank's own part of the data, and the collective that joins the parts.

    If a Python number made the value vary, `taken` is the tensor that the number was read from.
    """
    at = original(case, at)
    node = case.trace.nodes[at]
    op = "pmean" if case.alike(at, bit) else "all_gather"
    if op != "pmean" and node.like is not None and not node.like[0]:
        op = "pmax" if node.like[1] is torch.bool else "psum"
    default = FixSite(node.site, op, at)
    if taken is not None:
        at, default = original(case, taken), FixSite(case.trace.nodes[taken].site, "psum", taken)
    return (not case.alike(at, bit) and joined_at(case, at, bit)) or (default,)


def joined_at(case: Case, end: int, bit: Mask) -> tuple[FixSite, ...]:
    """Returns where to join the parts of a value, if something on the way to it reduces many numbers to one."""
    places: dict[int, tuple[FixSite, ...]] = {}
    for at in sorted(reached([end], lambda at: _cut(case, at, bit))):  # operands come before their results
        places[at] = _places(case, at, bit, places)
    return places[end]


def _places(case: Case, at: int, bit: Mask, before: Mapping[int, tuple[FixSite, ...]]) -> tuple[FixSite, ...]:
    """Returns a node's places from those of its parents: the first after which nothing else that varies joins in."""
    node, cut = case.trace.nodes[at], _cut(case, at, bit)
    rows = bool(case.of_rows(bit)[at] & OWN_ROWS)
    by_row = rows and node.by_row  # the result still has one entry for each of this rank's rows
    if len(cut) == 2 and node.op in PRODUCTS and not (rows and node.op in _BY_ROW):
        return (FixSite(node.site, "psum", at),)
    if cut and node.op in _CHOOSE and not by_row:
        return (FixSite(node.site, node.op, at),)
    if cut and case.types.mean[at] == at and node.number is not None and rows:
        return (FixSite(node.site, "pmean", at),)
    if cut and all(before[p] for p in cut):
        places = list({place.key: place for p in cut for place in before[p]}.values())
        if len(places) > 1 and node.op in _ADDS and len({place.op for place in places}) == 1:
            return (FixSite(node.site, places[0].op, at),)
        return tuple(places[:_MOST])
    if cut and node.op in _JOINED and not node.root and not by_row:
        collective = _JOINED[node.op]
        if collective == "pmean" and node.op != "mean" and not node.count:
            collective = "psum"
        return (FixSite(node.site, collective, at),)
    if len(cut) == 1 and node.op == "cat":
        return (FixSite(case.trace.nodes[cut[0]].site, "all_gather", cut[0]),)
    return ()


def _sum_of(case: Case, at: int, bit: Mask) -> str | None:
    """Returns the collective that joins a term's parts, if only scaling follows the place where they are joined."""
    place, *others = _partly(case, at, bit, None)
    at = original(case, at)
    while at != place.node and case.trace.nodes[at].op in SCALES and len(_cut(case, at, bit)) == 1:
        at = original(case, _cut(case, at, bit)[0])
    return place.op if at == original(case, place.node) and not others and place.op in ("psum", "pmean") else None


def _taken(case: Case, at: int, bit: Mask) -> int | None:
    """Returns the tensor that was read as a Python number, if only such a number makes this value vary."""
    roots = [case.trace.nodes[r] for r in case.roots(at, bit)]
    if any(n.root not in ("", "constant") or n.effect != "union" for n in roots):
        return None
    before = range(at - 1, -1, -1)
    return next((k for k in before if case.trace.nodes[k].op == "item" and case.types.along[k] & bit), None)


def _cut(case: Case, at: int, bit: Mask) -> list[int]:
    """Returns the parents of a value that differ between ranks in more than type."""
    node = case.trace.nodes[at]
    if node.effect not in ("union", "minus") or node.root:
        return []
    return [p for p in node.parents if case.types.along[p] & bit and not case.alike(p, bit)]
