"""The analysis of a recorded call: answers the rules' questions, such as the divisors of a loss, and keeps findings."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from shardfn.check.callsites import Site
from shardfn.check.findings import Finding, Kind, axes_text, line, root_of, target
from shardfn.check.trace import CollectiveCall, Counted, Given, Gradient, Mask, Node, Trace, given_by, reached, union
from shardfn.check.varying import SCALES, Varying, bits_of, is_number, numbers_of, scales, varying

_ALIKE = ("pvary", "all_gather")  # their results vary by type alone: all ranks have the same bits
OWN_ROWS, _OTHER, _SINGLE = 1, 2, 4


@dataclass(frozen=True)
class Argument:
    """An argument of the function.

    Attributes:
        path: as Python: `params['w']`.
        node: its node.
        allowed: the axes along which its spec lets it vary; None if nothing is declared.
        plain: whether a spec cuts it, rather than a layout.
        constant: whether all of its elements are equal.
        spec: the spec as it was declared.
        rows: the axes that shard its first dimension.
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
    """The results of comparing bits between ranks: for each node, the axes along which they differ.

    Attributes:
        nodes: for values.
        counts: for the number of rows of a mean.
        watched: for bits that do not determine a type: of losses; of a generator's state, keyed by what was drawn; of a
            distribution's parameters.
        outputs: for results, by path.
        arguments: the arguments that were passed.
    """

    nodes: Mapping[int, Mask] = field(default_factory=dict)
    counts: Mapping[int, Mask] = field(default_factory=dict)
    watched: Mapping[int, Mask] = field(default_factory=dict)
    outputs: Mapping[str, Mask] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)


class Case:
    """A recorded call, and its findings so far.

    Attributes:
        types: along which axes each value varies.
        blank: arguments without a spec whose elements are all equal, such as zeros, and the axes along which they may
            be meant to vary: all, but for a parameter those along which another one of the same gradient varies.
        requested: the variables whose gradient was asked for.
        batched: those of them whose gradient was asked for as a batch of several.
        gradient_end: variable -> the node at which its gradient was complete.
        findings: pairs of a node and its finding.
        mismatched: arguments that differ from their declaration, and along which axes.
        added: sums of a varying and an invariant term, which should be reduced separately.
        partial: variables whose gradient is only each rank's part, along which axes, and what used it.
        first_results: results of collectives, see `given_by`.
        counted: totals that `accumulate` divides by counts.
        counts: those of these counts that are values.
        only_child: node -> the first node made from it alone.
        of_rows: axis -> for each value what makes it vary along it; `OWN_ROWS` alone means this rank's rows only.
    """

    def __init__(self, trace: Trace, compared: Compared) -> None:
        self.trace, self.compared = trace, compared
        self.types: Varying = varying(trace, compared.nodes)
        self.blank = {a.node: trace.everywhere for a in compared.arguments if a.allowed is None and a.constant}
        self.requested = self.batched = 0
        self.gradient_end: dict[int, int] = {}
        self.findings: list[tuple[int, Finding]] = []
        self.mismatched: dict[int, Mask] = {}
        self.added: set[int] = set()
        self.partial: dict[int, tuple[Mask, str]] = {}
        self.first_results: Given = given_by(trace)
        self.counted = {event.total: event for event in trace.events if isinstance(event, Counted)}
        self.counts = {event.by for event in self.counted.values()}
        self.only_child: dict[int, int] = {}
        for node_id, node in enumerate(trace.nodes):
            if len(node.parents) == 1:
                self.only_child.setdefault(node.parents[0], node_id)
        # Caches by axis, for all values at once, since a walk for each value that rules ask about would be quadratic.
        self._unlike = functools.cache(lambda bit: self._over_roots(bit, lambda node_id: not self._full(node_id, bit)))
        self._same = functools.cache(self._same_of)
        self.of_rows = functools.cache(self._rows)
        self._ask()

    def _ask(self) -> None:
        """Collects the gradients that the function asked for."""
        nodes = self.trace.nodes
        for event in self.trace.gradients():
            axes = union(self.types.along[variable_id] for variable_id, _ in event.pairs)
            for variable_id, gradient_id in event.pairs:
                if variable_id in self.blank:
                    self.blank[variable_id] = axes
                variables = nodes[variable_id].variable | self.types.holds[variable_id]
                self.requested |= variables
                if (nodes[variable_id].like or ((),))[0] != (nodes[gradient_id].like or ((),))[0]:
                    self.batched |= variables
                self.gradient_end |= dict.fromkeys(numbers_of(variables), event.end)

    def differentiated(self, event: Gradient) -> Mask:
        """Returns the variables by which, or by new values of which, a loss was differentiated.

        The variables of a flat shard include those of its full parameters, as stages receive them.
        """
        nodes, holds = self.trace.nodes, self.types.holds
        variables = union(nodes[variable_id].variable | holds[variable_id] for variable_id, _ in event.pairs)
        for variable in self.trace.variables:
            node = nodes[variable.node]
            if node.root == "parameter" and any(holds[parent] & variables for parent in node.parents):
                variables |= node.variable
        return variables

    def reported_axes(self, node_id: int, bad: Mask) -> Mask:
        """Returns the axes along which a value varies only because of arguments that are reported already."""
        reported = 0
        for bit in bits_of(bad):
            roots = self.roots(node_id, bit)
            if roots and all(self.mismatched.get(r, 0) & bit for r in roots):
                reported |= bit
        return reported

    def because(self, node_id: int, bad: Mask) -> str:
        """Returns a phrase with the places at which a value begins to vary."""
        roots = [r for bit in bits_of(bad) for r in self.roots(node_id, bit)]
        if not roots:
            return ""
        shown = {root_of(self.trace.nodes[r], self.compared.nodes.get(r, 0)): None for r in sorted(set(roots))}
        parts = list(shown)
        return f" (by {', '.join(parts[:3])}{f' and {len(parts) - 3} more' * (len(parts) > 3)})"

    def roots(self, node_id: int, bit: Mask) -> list[int]:
        """Returns the nodes at which a value begins to vary along an axis, the latest first."""
        visited, pending, roots = set(), [node_id], []
        while pending:
            current = pending.pop()
            if current in visited or not self.types.along[current] & bit:
                continue
            visited.add(current)
            begins, parents = self._begins(current, bit)
            roots += [current] * begins
            pending += parents
        return sorted(roots, reverse=True)

    def _begins(self, node_id: int, bit: Mask) -> tuple[bool, list[int]]:
        """Whether a value begins to vary along an axis at this node, and the parents through which it varies."""
        node = self.trace.nodes[node_id]
        passes = node.effect in ("union", "plus") or (node.effect == "minus" and not node.axes & bit)
        varying_parents = [p for p in node.parents if self.types.along[p] & bit] if passes else []
        differ = bool(self.compared.nodes.get(node_id, 0) & bit)
        if varying_parents and differ and not node.root:  # by a number of its own, and by its arguments
            return True, varying_parents
        gathers = node.effect == "plus" and bool(node.axes & bit) and node.op == "all_gather"
        begins = not varying_parents or node.root == "statistics" or differ or gathers
        return begins, [] if begins else varying_parents

    def _over_roots(self, bit: Mask, flags_of: Callable[[int], int]) -> list[int]:
        """Returns for each node the union of `flags_of` over the nodes at which it begins to vary along an axis."""
        unions: list[int] = []
        for node_id, axes in enumerate(self.types.along):
            begins, parents = self._begins(node_id, bit) if axes & bit else (False, [])
            unions.append((flags_of(node_id) if begins else 0) | union(unions[p] for p in parents))
        return unions

    def _full(self, node_id: int, bit: Mask) -> bool:
        """Whether a value varies by type alone: results of `pvary` and `all_gather`, and parameters of stages."""
        is_full = node_id in self.trace.cut and not self.trace.cut[node_id] & bit
        return is_full or self.trace.nodes[node_id].op in _ALIKE

    def has_equal_bits(self, node_id: int, bit: Mask) -> bool:
        """Whether a varying value is computed only from full values, so that all ranks have the same bits."""
        return not self._unlike(bit)[node_id]

    def same(self, node_id: int, bit: Mask) -> bool:
        """Whether a value varies by type alone: each rank computed it from full values."""
        return bool(self.types.along[node_id] & bit) and self._same(bit)[node_id]

    def _rows(self, bit: Mask) -> list[int]:
        sharded = {a.node for a in self.compared.arguments if a.rows & bit}
        return self._over_roots(bit, lambda i: _rows_of(self.trace.nodes[i], i in sharded, self.requested))

    def _same_of(self, bit: Mask) -> list[bool]:
        """Returns, for each value, whether it is invariant or varies only through ops that keep bits equal."""
        same: list[bool] = []
        for node_id, node in enumerate(self.trace.nodes):
            if not self.types.along[node_id] & bit:
                same.append(True)
            elif (node.effect == "plus" and node.axes & bit) or node.root == "parameter":
                same.append(self._full(node_id, bit) and not node.backward)
            elif node.root or node.effect == "exactly" or self.compared.nodes.get(node_id, 0) & bit:
                same.append(False)
            else:
                same.append(all(same[p] for p in node.parents))
        return same

    def divisors(self, node_id: int, axes: Mask = -1) -> list[float]:
        """Returns the divisors of a value, see `Varying`, except for rank counts along other axes."""
        return [number for number, counted in self.types.divisors[node_id] if not counted or counted & axes]

    def elsewhere(self, axes: Mask) -> set[int]:
        """Returns the divisions that only count ranks along other axes."""
        return {node_id for node_id, counted in self.types.counted.items() if counted and not counted & axes}

    def pieces(self, node_id: int) -> Mask:
        """Returns the axes of the flat shard whose scaled elements or gradient a value holds."""
        nodes, flat = self.trace.nodes, self.trace.flat
        events = self.trace.gradients() if flat else []
        variable_of = {gradient_id: variable_id for event in events for variable_id, gradient_id in event.pairs}
        shape_dtype = nodes[node_id].like

        def followed_parents(child: int) -> list[int]:
            scaled = nodes[child].op in SCALES and nodes[child].effect == "union"
            return [p for p in nodes[child].parents if scaled and nodes[p].like == shape_dtype]

        for current in reached([node_id] if flat else [], followed_parents):
            holds = self.types.holds[variable_of.get(current, current)]
            for shard, axes in flat.items():
                if nodes[shard].variable & holds and nodes[current].like == shape_dtype == nodes[shard].like:
                    return axes
        return 0

    def scattered(self, node_id: int) -> Mask:
        """Returns the axes along which the backward of an `all_gather` reduce-scattered a gradient."""
        nodes, shape_dtype = self.trace.nodes, self.trace.nodes[node_id].like

        def followed_parents(child: int) -> list[int]:
            passes = nodes[child].op == "gradient" or nodes[child].op in SCALES
            return [p for p in nodes[child].parents if passes and nodes[p].like == shape_dtype]

        starts = [node_id] if nodes[node_id].op == "gradient" else []
        path = [nodes[current] for current in reached(starts, followed_parents)]
        return union(node.axes for node in path if node.op == "reduce_scatter" and node.backward)

    def is_number(self, node_id: int) -> bool:
        """Whether a value has one element."""
        return is_number(self.trace.nodes[node_id])

    def expression(self, call: CollectiveCall) -> str:
        """Returns the source of a collective's argument, or the name of its value."""
        return (call.site.first_argument if call.site else None) or target(self.trace.nodes[call.node].site) or "..."

    def named(self, axes: Mask) -> str:
        """Returns the names of these axes as Python."""
        return axes_text(self.trace.names(axes))

    def size(self, axes: Mask) -> int:
        """Returns the number of ranks along these axes."""
        return math.prod(self.trace.axes[name] for name in self.trace.names(axes))

    def add(
        self,
        node_id: int,
        kind: Kind,
        axes: Mask,
        path: str,
        site: Site | None,
        fix: str,
        text: str,
        unseen: bool = False,
    ) -> None:
        """Adds a finding at a node, unless it is there already."""
        finding = Finding(kind, self.trace.names(axes), path, "" if site is None else str(site), fix, text, unseen)
        if finding not in [other for _, other in self.findings]:
            self.findings.append((node_id, finding))

    def add_call(self, call: CollectiveCall, kind: Kind, axes: Mask, fix: str, text: str) -> None:
        """Adds a finding about a collective call; `text` describes the call, and the fix follows."""
        subject = f"{call.name} along {axes_text(call.axis_name)}{line(call.site)}"
        self.add(call.node, kind, axes, "", call.site, fix, f"{subject} {text}. Write: {fix}")


def _rows_of(node: Node, is_sharded: bool, requested: Mask) -> int:
    """Returns the row flags that a root contributes to the values computed from it."""
    if is_sharded and not node.variable & requested:
        return OWN_ROWS | (_SINGLE if node.like is not None and node.like[0][:1] == (1,) else 0)
    return 0 if node.op in _ALIKE or node.root in ("random", "parameter") else _OTHER


def local(case: Case, mean: int) -> Mask:
    """Returns the axes along which a mean, a single number, is taken over this rank's rows alone."""
    if mean < 0 or not case.is_number(mean):
        return 0
    axes = 0
    for bit in bits_of(case.types.along[mean]):
        roots = [case.trace.nodes[r] for r in case.roots(mean, bit)]
        row_roots = (n for n in roots if n.root in ("input", "closure", "random"))
        axes |= bit if any(not n.variable & case.requested for n in row_roots) else 0
    return axes


def divided(case: Case, event: Gradient, axes: Mask) -> bool:
    """Whether a loss or its gradient is, or may be, divided by the number of ranks along axes."""
    ranks, product = case.size(axes), math.prod(case.divisors(event.loss, axes))
    parts = sum(other.begin == event.begin for other in case.trace.gradients())  # of which `accumulate` takes the sum
    return any(may_be(case, event.loss, axes, n) for n in {1, parts}) or scaled_later(
        case,
        [gradient_id for _, gradient_id in event.pairs],
        event.end,
        lambda n, factor: n == ranks or math.isclose(product * factor, ranks),
        case.elsewhere(axes),
    )


def may_be(case: Case, node_id: int, axes: Mask, parts: int = 1) -> bool:
    """Whether a value is or may be divided by the number of ranks along axes, times `parts`."""
    mean, divisors, ranks = case.types.mean[node_id], case.divisors(node_id, axes), case.size(axes) * parts
    if ranks in divisors or math.inf in divisors or _counts_all_ranks(case, node_id, axes, ranks, math.prod(divisors)):
        return True  # the next line: by as many rows as there are ranks, or by the ranks
    return mean >= 0 and ranks in (case.trace.nodes[mean].number, case.trace.nodes[mean].count)


def _counts_all_ranks(case: Case, node_id: int, axes: Mask, ranks: int, product: float) -> bool:
    """Whether a divisor may be the row count of all ranks, or a multiple of the number of ranks."""
    mean, total = case.types.mean[node_id], case.types.total[node_id]
    summed = case.size(case.trace.nodes[total].axes & ~axes) if total >= 0 else 1
    if product in [ranks, *(n * summed * ranks for n in case.types.rows[node_id])]:
        return True
    if mean < 0:
        return False
    if case.trace.nodes[mean].number in [n * ranks for n in case.types.rows[mean]]:
        return True
    ratio = product / ranks
    return math.isfinite(ratio) and ratio >= 1 and math.isclose(ratio, round(ratio), rel_tol=1e-9)


def scaled_later(
    case: Case, starts: Iterable[int], begin: int, enough: Callable[[float, float], bool], ignored: Container[int] = ()
) -> bool:
    """Whether a user's line divides something made from these values by a number that is `enough`, or by a tensor.

    Args:
        case: the call.
        starts: the values.
        begin: the node from which to look.
        enough: decides on a divisor and the product of all divisors so far.
        ignored: divisions that do not count.
    """
    factors = dict.fromkeys(starts, 1.0)
    for node_id, node in enumerate(case.trace.nodes[begin:], begin):
        own_factors = [factors[p] for p in node.parents if p in factors]
        if not own_factors or node_id in factors:
            continue
        if node_id in ignored:
            factors[node_id] = own_factors[0]
            continue
        factors[node_id] = own_factors[0] * abs(node.number or 1.0)
        if not node.own or not scales(node):
            continue
        other_parents = [p for p in node.parents if p not in factors]
        by_tensor = any(map(case.is_number, other_parents)) or node.op.startswith("_foreach_")
        if enough(abs(node.number), factors[node_id]) if node.number is not None else by_tensor:
            return True
    return False
