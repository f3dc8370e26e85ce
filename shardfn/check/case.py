"""A recorded call that is being judged: what the rules ask about it, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardfn.check.findings import Finding, Kind
from shardfn.check.sites import Site
from shardfn.check.trace import Call, Given, Gradient, Mask, Node, Trace, given_by
from shardfn.check.varying import SCALES, Varying, bits_of, is_number, over_roots, roots_of, varying
from shardfn.check.words import root_of, target

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
        ahead, seen, like = [at] if flat else [], set(), nodes[at].like
        while ahead:
            now = ahead.pop()
            if now in seen:
                continue
            seen.add(now)
            holds = self.types.holds[gradients.get(now, now)]
            for shard, axes in flat.items():
                if nodes[shard].variable & holds and nodes[now].like == like == nodes[shard].like:
                    return axes
            if nodes[now].op in SCALES and nodes[now].effect == "union":
                ahead += [p for p in nodes[now].parents if nodes[p].like == like]
        return 0

    def scattered(self, at: int) -> Mask:
        """The axes along which a gradient was put together and cut, by what a backward pass made of `all_gather`."""
        nodes, like = self.trace.nodes, self.trace.nodes[at].like
        ahead, seen, found = [at] if nodes[at].op == "gradient" else [], {at}, 0
        while ahead:
            node = nodes[ahead.pop()]
            if node.op == "reduce_scatter" and node.backward:
                found |= node.axes
            elif node.op == "gradient" or node.op in SCALES:
                more = [p for p in node.parents if nodes[p].like == like and p not in seen]
                seen.update(more)
                ahead += more
        return found

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
