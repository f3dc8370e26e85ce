"""Proposes fixes: the collective that makes a value the same on all ranks, and the line for it."""

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
    """A place for a collective: the line, the collective, and the node of its argument."""

    site: Site | None
    op: str
    node: int

    @property
    def key(self) -> object:
        """Equal for places at the same point of the code."""
        return self.op, self.site, self.site and self.site.span


def reduction(case: Case, path: str, node_id: int, bad: Mask, roots: list[Node]) -> tuple[Site | None, str]:
    """Returns the call that makes a value the same on all ranks, and the site for it."""
    names = case.named(bad)
    if roots and all(n.root == "closure" for n in roots):
        return roots[0].site, "pass it as an argument, with a spec that says how it is cut"
    if roots and all(n.op == "all_gather" for n in roots):
        argument = given_at(roots[0].site)
        return roots[0].site, f'shardfn.all_gather({argument}, {names}, to="invariant")'
    if roots and all(n.root == "random" for n in roots):
        return roots[0].site, f"generator=shardfn.fold_in(seed) without {names}, the same on all ranks there"
    bit = bits_of(bad)[0]
    number_source = _number_source(case, node_id, bit)
    if roots and number_source is None and all(n.root in ("", "constant") and n.effect == "union" for n in roots):
        return roots[0].site, f"the same number on all ranks along {names}"
    fix_sites = _partly(case, node_id, bit, number_source)
    site, op, _ = fix_sites[-1]
    if op in _CHOOSE:
        return site, f'shardfn.all_gather({(site.value_source if site else None) or path}, {names}, to="invariant")'
    origin = original(case, node_id)
    rewritten = _term_by_term(case, origin, bit, names) or _ratio(case, origin, bit, names)
    if rewritten is not None:
        return case.trace.nodes[origin].site, rewritten
    if len(fix_sites) > 1 and all(written(s.site) and s.op in _JOINED.values() for s in fix_sites):
        return site, " and ".join(f"shardfn.{s.op}({written(s.site)}, {names})" for s in fix_sites)
    name = written(site) or path
    if op == "all_gather":
        return site, f'shardfn.all_gather({name}, {names}, to="invariant")'
    return site, f"shardfn.{op}({name}, {names})"


def original(case: Case, node_id: int) -> int:
    """Follows copies back to the original value."""
    nodes = case.trace.nodes
    while nodes[node_id].op in _COPIES and len(nodes[node_id].parents) == 1:
        node_id = nodes[node_id].parents[0]
    return node_id


def derived(case: Case, meeting_id: int, axis: int, member: Mask, path: str = "") -> str:
    """Returns the source of the operand through which a variable or sum meets a varying value.

    `member` is the bit of the variable or sum, and `axis` the one along which the value varies.
    Empty if that operand has no name, or is written with the variable at this `path` itself.
    """
    nodes, types, site = case.trace.nodes, case.types, case.trace.nodes[meeting_id].site
    for index, parent in enumerate(nodes[meeting_id].parents):
        if types.along[parent] >> axis & 1 or not types.free[parent][axis] & member:
            continue
        origin = original(case, parent)
        sides = site.sides if site is not None and len(nodes[meeting_id].parents) == 2 else None
        source = sides[index] if sides else (site.first_argument if site is not None and index == 0 else None)
        source = source or target(nodes[origin].site) or ""
        is_member = nodes[origin].variable & member and nodes[origin].root != "closure"
        names_variable = is_member or (path and site is not None and site.spelled(path) in source)
        return "" if names_variable else source
    return ""


def _term_by_term(case: Case, sum_id: int, bit: Mask, names: str) -> str | None:
    """Spells out a sum of varying and invariant terms with each varying term reduced on its own."""
    if len(_cut(case, sum_id, bit)) != 2:
        return None
    spelled: dict[int, str | None] = {}
    for node_id in sorted(_additions(case, sum_id, bit)):  # operands come before their sums
        if any(p in spelled or not case.types.along[p] & bit for p in case.trace.nodes[node_id].parents):
            spelled[node_id] = _terms(case, node_id, bit, names, spelled)
    return spelled.get(sum_id)


def _additions(case: Case, node_id: int, bit: Mask) -> set[int]:
    """Returns the varying sums from which a value was added up, itself included."""
    nodes = case.trace.nodes

    def adds(node_id: int) -> bool:
        return nodes[node_id].op in _ADDS and len(nodes[node_id].parents) == 2

    varying = reached([node_id], lambda i: [p for p in nodes[i].parents if adds(i) and case.types.along[p] & bit])
    return {i for i in varying if adds(i)}


def _terms(case: Case, node_id: int, bit: Mask, names: str, spelled: Mapping[int, str | None]) -> str | None:
    """Spells out a sum with each varying term reduced; None if it does not fit into one line."""
    node = case.trace.nodes[node_id]
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


def _ratio(case: Case, node_id: int, bit: Mask, names: str) -> str | None:
    """Spells out a quotient of two local sums with both summed over ranks before the division."""
    node = case.trace.nodes[node_id]
    if node.op != "div" or len(_cut(case, node_id, bit)) != 2 or node.site is None:
        return None
    if any(_sum_of(case, p, bit) != "psum" for p in node.parents) or node.site.sides is None:
        return None
    left, right = node.site.sides
    return f"shardfn.psum({left}, {names}) / shardfn.psum({right}, {names})"


def _partly(case: Case, node_id: int, bit: Mask, number_source: int | None) -> tuple[FixSite, ...]:
    """Returns the places of a value's local reductions, and the collectives that complete them.

    If a Python number made the value vary, `number_source` is the tensor that the number was read from.
    """
    node_id = original(case, node_id)
    node = case.trace.nodes[node_id]
    op = "pmean" if case.has_equal_bits(node_id, bit) else "all_gather"
    if op != "pmean" and node.like is not None and not node.like[0]:
        op = "pmax" if node.like[1] is torch.bool else "psum"
    default = FixSite(node.site, op, node_id)
    if number_source is not None:
        node_id = original(case, number_source)
        default = FixSite(case.trace.nodes[number_source].site, "psum", number_source)
    return (not case.has_equal_bits(node_id, bit) and joined_at(case, node_id, bit)) or (default,)


def joined_at(case: Case, end: int, bit: Mask) -> tuple[FixSite, ...]:
    """Returns the places at which to complete the local reductions of a value, if there are any."""
    fix_sites: dict[int, tuple[FixSite, ...]] = {}
    for node_id in sorted(reached([end], lambda i: _cut(case, i, bit))):  # operands come before their results
        fix_sites[node_id] = _sites_of(case, node_id, bit, fix_sites)
    return fix_sites[end]


def _sites_of(case: Case, node_id: int, bit: Mask, fix_sites: Mapping[int, tuple[FixSite, ...]]) -> tuple[FixSite, ...]:
    """Returns the fix sites of a node from those of its parents.

    The first op is taken after which no other varying value is combined with the result.
    """
    node, varying_parents = case.trace.nodes[node_id], _cut(case, node_id, bit)
    of_local_rows = bool(case.of_rows(bit)[node_id] & OWN_ROWS)
    keeps_rows = of_local_rows and node.by_row  # the result still has one entry for each of this rank's rows
    if len(varying_parents) == 2 and node.op in PRODUCTS and not (of_local_rows and node.op in _BY_ROW):
        return (FixSite(node.site, "psum", node_id),)
    if varying_parents and node.op in _CHOOSE and not keeps_rows:
        return (FixSite(node.site, node.op, node_id),)
    if varying_parents and case.types.mean[node_id] == node_id and node.number is not None and of_local_rows:
        return (FixSite(node.site, "pmean", node_id),)
    if varying_parents and all(fix_sites[p] for p in varying_parents):
        merged = list({fix_site.key: fix_site for p in varying_parents for fix_site in fix_sites[p]}.values())
        if len(merged) > 1 and node.op in _ADDS and len({fix_site.op for fix_site in merged}) == 1:
            return (FixSite(node.site, merged[0].op, node_id),)
        return tuple(merged[:_MOST])
    if varying_parents and node.op in _JOINED and not node.root and not keeps_rows:
        collective = _JOINED[node.op]
        if collective == "pmean" and node.op != "mean" and not node.count:
            collective = "psum"
        return (FixSite(node.site, collective, node_id),)
    if len(varying_parents) == 1 and node.op == "cat":
        return (FixSite(case.trace.nodes[varying_parents[0]].site, "all_gather", varying_parents[0]),)
    return ()


def _sum_of(case: Case, node_id: int, bit: Mask) -> str | None:
    """Returns the collective that completes a term's local reduction, if only scaling follows it."""
    fix_site, *other_sites = _partly(case, node_id, bit, None)
    node_id = original(case, node_id)
    while node_id != fix_site.node and case.trace.nodes[node_id].op in SCALES and len(_cut(case, node_id, bit)) == 1:
        node_id = original(case, _cut(case, node_id, bit)[0])
    joins = node_id == original(case, fix_site.node) and not other_sites and fix_site.op in ("psum", "pmean")
    return fix_site.op if joins else None


def _number_source(case: Case, node_id: int, bit: Mask) -> int | None:
    """Returns the tensor that was read as a Python number, if only that makes a value vary."""
    roots = [case.trace.nodes[r] for r in case.roots(node_id, bit)]
    if any(n.root not in ("", "constant") or n.effect != "union" for n in roots):
        return None
    earlier = range(node_id - 1, -1, -1)
    return next((i for i in earlier if case.trace.nodes[i].op == "item" and case.types.along[i] & bit), None)


def _cut(case: Case, node_id: int, bit: Mask) -> list[int]:
    """Returns the parents of a value that differ between ranks in more than type."""
    node = case.trace.nodes[node_id]
    if node.effect not in ("union", "minus") or node.root:
        return []
    return [p for p in node.parents if case.types.along[p] & bit and not case.has_equal_bits(p, bit)]
