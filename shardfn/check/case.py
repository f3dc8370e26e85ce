"""A recorded call that is being judged: what rules ask about it, as by what a loss is divided, and what they find."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from shardfn.check.callsites import Site
from shardfn.check.findings import Finding, Kind, root_of, target
from shardfn.check.trace import Call, Given, Gradient, Mask, Node, Trace, given_by, reached
from shardfn.check.varying import SCALES, Varying, bits_of, is_number, over_roots, roots_of, scales, varying

_ALIKE = ("pvary", "all_gather")  # of which the result varies by its type alone
OWN_ROWS, _OTHER, _SINGLE = 1, 2, 4


@dataclass(frozen=True)
class Argument:
    """An argument of the function.

    Attributes:
        path: as Python.
        node: its own.
        allowed: along which axes its spec lets it vary; None where nothing is declared.
        plain: whether a spec cuts it, and no layout.
        constant: whether all of its elements are the same.
        spec: as it was declared.
        rows: the axes that cut its first dimension.
    """

    path: str
    node: int
    allowed: Mask | None
    plain: bool
    constant: bool
    spec: str = ""
    rows: Mask = 0


@dataclass
class Compared:
    """What ranks found out by comparing bits: by node, the axes along which these differ.

    Attributes:
        nodes: values.
        counts: how many rows a mean is over.
        watched: what no type follows from: losses; the state of a generator, by what was drawn; of what it was drawn.
        outputs: results, by path.
        arguments: what was passed.
    """

    nodes: Mapping[int, Mask] = field(default_factory=dict)
    counts: Mapping[int, Mask] = field(default_factory=dict)
    watched: Mapping[int, Mask] = field(default_factory=dict)
    outputs: Mapping[str, Mask] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)


class Case:
    """A call, and what was found so far.

    Attributes:
        types: along which axes each value varies.
        blank: arguments without a spec that are nothing but zeros, say: nobody knows whether they shall stay the same.
        asked: variables whose gradient was asked for.
        batched: those of which it was asked for each of several rows.
        until: by variable, the node before which it was used for its gradient.
        found: findings, and the nodes where they are.
        wrong: arguments that are not what they were declared, and along which axes.
        added: sums of what varies and of what does not, which are to be taken apart.
        partial: variables whose gradient is each rank's part, along which axes, and where it went.
        given: what collectives gave: see `given_by`.
        only: by node, the first that was made of it alone.
    """

    def __init__(self, trace: Trace, compared: Compared) -> None:
        self.trace, self.compared = trace, compared
        self.types: Varying = varying(trace, compared.nodes)
        self.blank = {a.node for a in compared.arguments if a.allowed is None and a.constant}
        self.asked = self.batched = 0
        self.until: dict[int, int] = {}
        self.found: list[tuple[int, Finding]] = []
        self.wrong: dict[int, Mask] = {}
        self.added: set[int] = set()
        self.partial: dict[int, tuple[Mask, str]] = {}
        self.given: Given = given_by(trace)
        self.only: dict[int, int] = {}
        for at, node in enumerate(trace.nodes):
            if len(node.parents) == 1:
                self.only.setdefault(node.parents[0], at)
        # By axis, of every value: rules ask of one after another, and a walk for each would take the square of them.
        self._unlike: dict[Mask, list[int]] = {}
        self._same: dict[Mask, list[bool]] = {}
        self._of_rows: dict[Mask, list[int]] = {}
        self._ask()

    def _ask(self) -> None:
        """Takes down which gradients the function asked for."""
        nodes = self.trace.nodes
        for event in self.gradients():
            for of, at in event.pairs:
                variables = nodes[of].variable | self.types.holds[of]
                self.asked |= variables
                if (nodes[of].like or ((),))[0] != (nodes[at].like or ((),))[0]:
                    self.batched |= variables
                for bit in bits_of(variables):
                    self.until[bit.bit_length() - 1] = event.end

    def differentiated(self, event: Gradient) -> Mask:
        """The variables by which a loss was differentiated, or by new values of which it was."""
        held = (self.trace.nodes[of].variable | self.types.holds[of] for of, _ in event.pairs)
        return functools.reduce(operator.or_, held, 0)

    def told(self, at: int, bad: Mask) -> Mask:
        """The axes along which a value varies by arguments alone that were reported."""
        told = 0
        for bit in bits_of(bad):
            roots = self.roots(at, bit)
            if roots and all(self.wrong.get(r, 0) & bit for r in roots):
                told |= bit
        return told

    def because(self, at: int, bad: Mask) -> str:
        """Where it begins to vary."""
        roots = [r for k in bits_of(bad) for r in self.roots(at, k)]
        if not roots:
            return ""
        shown = {root_of(self.trace.nodes[r], self.compared.nodes.get(r, 0)): None for r in sorted(set(roots))}
        parts = list(shown)
        return f" (by {', '.join(parts[:3])}{f' and {len(parts) - 3} more' * (len(parts) > 3)})"

    def roots(self, at: int, bit: Mask) -> list[int]:
        """The nodes at which a value begins to vary along an axis, the latest first."""
        return roots_of(self.trace, self.types, at, bit, self.compared.nodes)

    def alike(self, at: int, bit: Mask) -> bool:
        """Whether a value that varies has the same bits on all ranks: what `pvary` and `all_gather` give."""
        if bit not in self._unlike:
            nodes = self.trace.nodes
            self._unlike[bit] = self._over_roots(bit, lambda at: int(nodes[at].op not in _ALIKE))
        return not self._unlike[bit][at]

    def same(self, at: int, bit: Mask) -> bool:
        """Whether a value varies by its type alone: all ranks made it of what `pvary` and `all_gather` gave them."""
        if bit not in self._same:
            self._same[bit] = self._same_of(bit)
        return bool(self.types.along[at] & bit) and self._same[bit][at]

    def of_rows(self, bit: Mask) -> list[int]:
        """Of each value, what makes it vary along an axis: `OWN_ROWS` where it is this rank's rows alone."""
        if bit not in self._of_rows:
            cut = {a.node for a in self.compared.arguments if a.rows & bit}
            self._of_rows[bit] = self._over_roots(bit, lambda at: _rows_of(self.trace.nodes[at], at in cut, self.asked))
        return self._of_rows[bit]

    def _over_roots(self, bit: Mask, of: Callable[[int], int]) -> list[int]:
        return over_roots(self.trace, self.types, bit, self.compared.nodes, of)

    def _same_of(self, bit: Mask) -> list[bool]:
        """Of each value, whether nothing but what gives all ranks the same makes it vary."""
        found: list[bool] = []
        for at, node in enumerate(self.trace.nodes):
            if not self.types.along[at] & bit:
                found.append(True)
            elif node.effect == "plus" and node.axes & bit:
                found.append(node.op in _ALIKE and not node.backward)
            elif node.root or node.effect == "exactly" or self.compared.nodes.get(at, 0) & bit:
                found.append(False)
            else:
                found.append(all(found[p] for p in node.parents))
        return found

    def pieces(self, at: int) -> Mask:
        """The axes that cut the flat shard, or the gradient of one, of which a value has the elements, scaled."""
        nodes, flat = self.trace.nodes, self.trace.flat
        gradients = {at: of for event in self.gradients() for of, at in event.pairs} if flat else {}
        like = nodes[at].like

        def onward(at: int) -> list[int]:
            scaled = nodes[at].op in SCALES and nodes[at].effect == "union"
            return [p for p in nodes[at].parents if scaled and nodes[p].like == like]

        for now in reached([at] if flat else [], onward):
            holds = self.types.holds[gradients.get(now, now)]
            for shard, axes in flat.items():
                if nodes[shard].variable & holds and nodes[now].like == like == nodes[shard].like:
                    return axes
        return 0

    def scattered(self, at: int) -> Mask:
        """The axes along which a gradient was put together and cut, by what a backward pass made of `all_gather`."""
        nodes, like = self.trace.nodes, self.trace.nodes[at].like

        def onward(at: int) -> list[int]:
            passes = nodes[at].op == "gradient" or nodes[at].op in SCALES
            return [p for p in nodes[at].parents if passes and nodes[p].like == like]

        ways = [nodes[now] for now in reached([at] if nodes[at].op == "gradient" else [], onward)]
        scatters = [node.axes for node in ways if node.op == "reduce_scatter" and node.backward]
        return functools.reduce(operator.or_, scatters, 0)

    def is_number(self, at: int) -> bool:
        """Whether a value has one element."""
        return is_number(self.trace.nodes[at])

    def expression(self, call: Call) -> str:
        """What a collective was given, in the user's words where the value has a name."""
        return (call.site.given if call.site else None) or target(self.trace.nodes[call.node].site) or "..."

    def size(self, axes: Mask) -> int:
        """How many ranks there are along these axes."""
        size = 1
        for name in self.trace.names(axes):
            size *= self.trace.axes[name]
        return size

    def add(
        self, at: int, kind: Kind, axes: Mask, path: str, site: Site | None, fix: str, text: str, unseen: bool = False
    ) -> None:
        """Takes down what is wrong, at a node, unless it was already."""
        finding = Finding(kind, self.trace.names(axes), path, "" if site is None else str(site), fix, text, unseen)
        if finding not in [one for _, one in self.found]:
            self.found.append((at, finding))

    def calls(self, name: str) -> list[Call]:
        """The collectives of a name that the function called."""
        return [event for event in self.trace.events if isinstance(event, Call) and event.name == name]

    def gradients(self) -> list[Gradient]:
        """The gradients that the function asked for."""
        return self.trace.gradients()


def _rows_of(node: Node, cut: bool, asked: Mask) -> int:
    """What a value that begins to vary says of the rows of what is made of it."""
    if cut and not node.variable & asked:
        return OWN_ROWS | (_SINGLE if node.like is not None and node.like[0][:1] == (1,) else 0)
    return 0 if node.op in _ALIKE or node.root in ("random", "parameter") else _OTHER


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
