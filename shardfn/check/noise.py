"""Random numbers that every rank has the same, for rows that each has its own."""

from __future__ import annotations

import functools
import operator

from shardfn.check.case import Case
from shardfn.check.sums import rows
from shardfn.check.torch_ops import DISTRIBUTIONS
from shardfn.check.trace import Node
from shardfn.check.values import Evidence, Values
from shardfn.check.varying import bits_of
from shardfn.check.words import line, named

_MEETS = ("mul", "add", "sub", "div", "where", "masked_fill", "addcmul", "addcdiv", "lerp", "native_dropout", "cat",
          "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
          "binary_cross_entropy_with_logits",
          "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
          "_scaled_dot_product_efficient_attention")  # fmt: skip


_SEVERAL = ("split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "unbind")  # of which ranks may take others


def origins(values: Values) -> list[Evidence]:
    """Which draw it is that meets other values where, for ranks to compare: each may take another of several."""
    keys, drawn, found = {one.node: one.key for one in values.evidence}, dict[int, int](), []
    for at, node in enumerate(values.trace.nodes):
        before = [drawn[p] for p in node.parents if p in drawn]
        if node.root == "random":
            drawn[at] = keys.get(at, 0)
        elif before:
            drawn[at] = hash(tuple(before))
            if node.op.removesuffix("_") in _MEETS and not node.backward and len(before) < len(node.parents):
                found.append(Evidence(values.key(node.site, -8), at, drawn[at]))
    return found


def met(case: Case) -> None:
    """Numbers drawn for each row, by generators that do not vary, where they meet rows that do."""
    drawn: set[int] = set()
    told: set[int] = set()
    for at, node in enumerate(case.trace.nodes):
        if (node.root == "random" and node.op not in DISTRIBUTIONS) or _only_drawn(case, node, drawn):
            drawn.add(at)
        elif node.op.removesuffix("_") in _MEETS and not node.backward and drawn.intersection(node.parents):
            _told_where_met(case, at, drawn, told)


def _only_drawn(case: Case, node: Node, drawn: set[int]) -> bool:
    """Whether a value is made of random numbers, and of nothing else that varies."""
    others = [p for p in node.parents if p not in drawn]
    if node.op in _SEVERAL:
        return False
    return not node.root and len(others) < len(node.parents) and not any(case.types.along[p] for p in others)


def _told_where_met(case: Case, at: int, drawn: set[int], told: set[int]) -> None:
    node = case.trace.nodes[at]
    for noise in drawn.intersection(node.parents):
        others = [p for p in node.parents if p not in drawn and _for_each_row(case, noise, p, at)]
        same = sum(b for b in bits_of(~case.types.along[noise] & functools.reduce(
            operator.or_, [rows(case, p) for p in others], 0)))  # fmt: skip
        same &= ~case.compared.watched.get(at, 0)
        if not same or same in told:  # the first says it for all that draw alike
            continue
        told.add(same)
        made, names = case.trace.nodes[min(_origins(case, noise, drawn))], named(case.trace.names(same))
        fix = f"generator=shardfn.fold_in(seed, {names})"
        default = f"torch.manual_seed(shardfn.fold_in(seed, {names}).initial_seed())"
        case.add(
            at, "same", same, "", made.site, fix,
            f"{made.op.removesuffix('_')}{line(made.site)} draws the same random numbers on all ranks along {names}, "
            f"for rows that vary there{case.because(others[0], same)}: those of one rank have the noise of those of "
            f"the others. Pass {fix}, or where an op takes none, call {default} before",
        )  # fmt: skip


def _origins(case: Case, noise: int, drawn: set[int]) -> list[int]:
    """Where random numbers were drawn."""
    ahead, seen, found = [noise], {noise}, []
    while ahead:
        now = ahead.pop()
        if case.trace.nodes[now].root == "random":
            found.append(now)
        else:
            more = {p for p in case.trace.nodes[now].parents if p in drawn and p not in seen}
            seen.update(more)
            ahead += more
    return found


def _for_each_row(case: Case, noise: int, other: int, at: int) -> bool:
    """Whether random numbers are one or more for each of several rows."""
    given, rows, made = (case.trace.nodes[k].like for k in (noise, other, at))
    if given is None or rows is None or made is None:
        return False
    if case.trace.nodes[at].op.startswith("_scaled_dot_product"):
        return True
    if case.trace.nodes[at].op == "cat" and made[0][:1] != rows[0][:1]:
        return False  # rows of noise after others
    return len(given[0]) == len(rows[0]) > 0 and given[0][0] == rows[0][0] > 1


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
