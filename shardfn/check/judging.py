"""What is wrong with a recorded call, and which call mends it. A pure function of what was recorded and compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardfn.check.findings import Finding, Kind
from shardfn.check.sites import Site
from shardfn.check.trace import Call, Claimed, Gradient, Mask, Node, Output, Part, Summed, Trace, Used
from shardfn.check.varying import MEANS, Varying, bits_of, roots_of, varying

_SUMS = ("psum", "pmean", "reduce_scatter")
_ONCE = ("pvary", "local_slice")
_COPIES = ("detach", "alias", "clone", "view", "gradient", "lift_fresh", "_to_copy")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "einsum")
_CHOOSE = ("argmax", "argmin", "topk", "sort")
_JOINED = {
    "sum": "psum", "count_nonzero": "psum", "dot": "psum", "linalg_vector_norm": "psum",
    **dict.fromkeys(MEANS, "pmean"),
    "max": "pmax", "amax": "pmax", "any": "pmax", "min": "pmin", "amin": "pmin", "all": "pmin",
}  # fmt: skip
"""What makes one number of many, and the collective that goes on with it."""


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
    """

    path: str
    node: int
    allowed: Mask | None
    plain: bool
    constant: bool
    spec: str = ""


@dataclass
class Compared:
    """What ranks found out by comparing bits: by node, the axes along which these differ.

    Attributes:
        nodes: values.
        counts: how many rows a mean is over.
        outputs: results, by path.
        arguments: what was passed.
    """

    nodes: Mapping[int, Mask] = field(default_factory=dict)
    counts: Mapping[int, Mask] = field(default_factory=dict)
    outputs: Mapping[str, Mask] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)


def judged(trace: Trace, compared: Compared) -> list[Finding]:
    """What is wrong with a call, first cause first."""
    return _Judge(trace, compared).findings()


class _Judge:
    """One recorded call while it is judged."""

    def __init__(self, trace: Trace, compared: Compared) -> None:
        self.trace, self.compared = trace, compared
        self.types: Varying = varying(trace, compared.nodes)
        # Of what no spec is declared and which is nothing but zeros, say, nobody knows whether it shall stay the same.
        self.blank = {a.node for a in compared.arguments if a.allowed is None and a.constant}
        self.found: list[tuple[int, Finding]] = []
        self.wrong: dict[int, Mask] = {}  # arguments that are not what they were declared
        self.partial: dict[int, tuple[Mask, str]] = {}  # variables: the axes, and where their gradient went
        self.asked = self.batched = 0  # variables whose gradient was asked for; of each of several rows
        self.until: dict[int, int] = {}  # variables: the nodes before which they were used for their gradient
        self._ask()

    def _ask(self) -> None:
        """Takes down which gradients the function asked for."""
        nodes = self.trace.nodes
        for event in self._gradient_events():
            for of, at in event.pairs:
                variables = nodes[of].variable | self.types.holds[of]
                self.asked |= variables
                if (nodes[of].like or ((),))[0] != (nodes[at].like or ((),))[0]:
                    self.batched |= variables
                for bit in bits_of(variables):
                    self.until[bit.bit_length() - 1] = event.end

    def _gradient_events(self) -> list[Gradient]:
        return [event for event in self.trace.events if isinstance(event, Gradient)]

    def findings(self) -> list[Finding]:
        """All of them."""
        for argument in self.compared.arguments:
            self._replica(argument)
        self._same()
        for event in self.trace.events:
            match event:
                case Call():
                    self._call(event)
                case Gradient():
                    self._losses(event)
                    self._sums(event)
                case Part():
                    node = self.trace.nodes[event.variable]
                    self._gradients(self.types.along[event.node] & ~event.allowed, node.variable, "the stage's sum")
                case Used():
                    self._stepped(event)
                case Output():
                    self._output(event, self.compared.outputs.get(event.path, 0))
                case Claimed():
                    bad = self.types.along[event.node] & ~event.allowed
                    self._varies(event.what, event.node, bad, event.allowed, event.site)
                case Summed():
                    pass
        self._statistics()
        self._partial()
        return [finding for _, finding in sorted(self.found, key=lambda one: one[0])]

    # --- arguments ---

    def _replica(self, argument: Argument) -> None:
        if argument.allowed is None:
            return
        bad = self.compared.nodes.get(argument.node, 0) & ~argument.allowed
        if not bad:
            return
        self.wrong[argument.node] = bad
        names = self.trace.names(bad)
        self._add(
            argument.node, "replica", bad, argument.path, None,
            "start all ranks from one seed, or from rank 0's value",
            f"{argument.path} is declared to be the same on all ranks along {_axes(names)}"
            f"{f' ({argument.spec})' if argument.spec else ''}, but its bits differ there. Start all ranks from one "
            f"seed (shardfn.init_sharded does), or declare how it is cut",
        )  # fmt: skip

    def _same(self) -> None:
        trained = {of for event in self.trace.events if isinstance(event, Gradient) for of, _ in event.pairs}
        rows = [a for a in self.compared.arguments if a.plain and not a.constant and a.node not in trained]
        for k, name in enumerate(self.trace.axes):
            bit = 1 << k
            cut = [a for a in rows if a.allowed and a.allowed & bit]
            if cut and not any(self.compared.nodes.get(a.node, 0) & bit for a in cut):
                paths = ", ".join(a.path for a in cut[:3]) + (f" and {len(cut) - 3} more" * (len(cut) > 3))
                self._add(
                    cut[0].node, "same", bit, cut[0].path, None, f"pass each rank its own rows along {name!r}",
                    f"{paths}: declared to be cut along {name!r}, but the bits are the same on all ranks along it: "
                    f"each rank reads the same rows. Pass each its own, by shardfn.axis_index({name!r}), or "
                    f"shardfn.run.batches",
                )  # fmt: skip

    # --- collectives ---

    def _call(self, call: Call) -> None:
        along = self.types.along[call.node]
        if call.pieces & call.axes and call.name in (*_SUMS, "pmax", "pmin"):
            names = _axes(self.trace.names(call.pieces & call.axes))
            fix = f"leave {call.name} out: {self._expression(call)}"
            self._add(
                call.node, "sum", call.pieces & call.axes, "", call.site, fix,
                f"{call.name} along {_axes(call.said)}{_at(call.site)} is given flat shards, which are cut along "
                f"{names}, and mixes up different parameters: each rank has other elements. Where they are gradients, "
                f"they are summed already. Write: {fix}",
            )  # fmt: skip
            return
        if call.name in _SUMS and not call.number:
            self._sum(call, along)
        if call.name in _ONCE and along & call.axes:
            twice = along & call.axes
            rest = self.trace.names(call.axes & ~along)
            if rest:
                fix = f"shardfn.{call.name}({self._expression(call)}, {_axes(rest)})"
            elif call.name == "local_slice" and self.types.backward[call.node] & twice:
                fix = f"shardfn.reduce_scatter({self._expression(call)}, {_axes(self.trace.names(twice))})"
            else:
                fix = f"leave {call.name} out: {self._expression(call)}"
            because = self._because(call.node, twice)
            self._add(
                call.node, "vary", twice, "", call.site, fix,
                f"{call.name} along {_axes(call.said)}{_at(call.site)} takes a value that is the same on all ranks "
                f"along {_axes(self.trace.names(twice))}, but this one varies there already{because}. Write: {fix}",
            )  # fmt: skip

    def _sum(self, call: Call, along: Mask) -> None:
        missing, types = call.axes & ~along, self.types
        given = self._expression(call)
        if missing and (types.declared[call.node] or call.backward) and not types.guessed[call.node]:
            rest = self.trace.names(call.axes & along)
            other = self.trace.names(along & ~call.axes & ~call.pieces)
            times = self._size(missing)
            instead = rest or other
            fix = (
                f"shardfn.{call.name}({given}, {_axes(instead)})" if instead
                else f"shardfn.local_slice({given}, {_axes(call.said)})" if call.name == "reduce_scatter"
                else f"leave {call.name} out: {given}"
            )  # fmt: skip
            does = (
                f"divides its derivative by {times}" if call.name == "pmean"
                else f"makes it {times} times as large"
            )  # fmt: skip
            meant = f"; it varies along {_axes(other)}" if other and not rest else ""
            self._add(
                call.node, "sum", missing, "", call.site, fix,
                f"{call.name} along {_axes(call.said)}{_at(call.site)} is given a value that is the same on all ranks "
                f"along {_axes(self.trace.names(missing))}, and {does}{meant}. Write: {fix}",
            )  # fmt: skip
        mean = types.mean[call.node]
        uneven = self.compared.counts.get(mean, 0) & call.axes if mean >= 0 and call.own else 0
        if uneven:
            site = self.trace.nodes[mean].site
            axis = _axes(call.said)
            fix = f"shardfn.psum(total, {axis}) / shardfn.psum(count, {axis})"
            self._add(
                call.node, "means", uneven, "", call.site, fix,
                f"{call.name} along {axis}{_at(call.site)} is given means, made{_at(site)}, over numbers of rows "
                f"that differ between ranks along {_axes(self.trace.names(uneven))}: that is not the mean over all "
                f"rows. Write: {fix}",
            )  # fmt: skip

    # --- gradients ---

    def _losses(self, event: Gradient) -> None:
        along, mean = self.types.along[event.loss], self.types.mean[event.loss]
        summed = self._added_up(event)
        for bit in bits_of(along & summed):
            if not self._divided(event, self._size(bit)):
                self._repeated(event, bit)
        bad = along & summed & self.types.along[mean] if mean >= 0 else 0
        if not bad or self._divided(event, self._size(bad)) or self._of_all(mean, self._size(bad)):
            return
        made = self.trace.nodes[mean]
        fix = self._reduced(mean, bad)
        partly = self._summed(mean)
        alone = f"is summed along {_axes(self.trace.names(partly))} alone"
        what = alone if partly else "is a mean over this rank's rows"
        self._add(
            mean, "losses", bad, "", made.site, fix,
            f"the loss{_at(made.site)} {what}, and varies along {_axes(self.trace.names(bad))}, but gradients are "
            f"added up over the {self._size(bad)} ranks there: they are those of the sum of all ranks' losses. "
            f"Write: {fix}",
        )  # fmt: skip

    def _divided(self, event: Gradient, ranks: int) -> bool:
        """Whether a loss, or all that was made of its gradient at once, is divided by the number of ranks."""
        mean, rows = self.types.mean[event.loss], self.types.rows[event.loss]
        divisors = self.types.divisors[event.loss]
        by = math.prod(divisors)
        if ranks in divisors or by in [n * ranks for n in (1, *rows)]:
            return True
        if mean >= 0 and self.trace.nodes[mean].number == ranks:
            return True  # by as many rows as there are ranks, or by the ranks
        if mean >= 0 and by >= ranks and math.isclose(by / ranks, round(by / ranks), rel_tol=1e-9):
            return True
        gradients = {at for _, at in event.pairs}
        later = (n for n in self.trace.nodes[event.end :] if n.number == ranks)
        return any(not gradients.isdisjoint(n.parents) for n in later)

    def _of_all(self, mean: int, ranks: int) -> bool:
        """Whether a sum is divided by what may be the number of all ranks' rows as well as of this one's elements."""
        return self.trace.nodes[mean].number in [n * ranks for n in self.types.rows[mean]]

    def _sums(self, event: Gradient) -> None:
        """Sums over ranks that met what varies on their way to the loss: each rank's derivative is its part alone."""
        types, nodes = self.types, self.trace.nodes
        asked = 0
        for of, _ in event.pairs:
            asked |= nodes[of].variable | types.holds[of]
        for k in range(len(self.trace.axes)):
            if types.along[event.loss] >> k & 1:
                continue  # each rank's own loss: what it meets may be a part of it
            for bit in bits_of(types.met[event.loss][k] >> len(self.trace.variables)):
                at = types.sums[bit.bit_length() - 1]
                if types.depends[at] & asked and at >= event.begin:  # what was made before is a constant there
                    self._partial_sum(at, types.first[(k, bit << len(self.trace.variables))], 1 << k)

    def _partial_sum(self, at: int, met: int, axis: Mask) -> None:
        made, place, names = self.trace.nodes[at], self.trace.nodes[met].site, _axes(self.trace.names(axis))
        fix = f"shardfn.pvary({_target(made.site) or _written(made.site) or made.op}, {names})"
        name = "all_gather" if made.op == "all_gather_invariant" else made.op
        self._add(
            met, "gradient", axis, "", place, fix,
            f"what {name} gives{_at(made.site)} is the same on all ranks along {names}, and meets what varies"
            f"{_at(place)}, in {self.trace.nodes[met].op}: on each rank its derivative is that rank's part alone. "
            f"Write {fix} there: its transpose adds up the parts",
        )  # fmt: skip

    def _added_up(self, event: Gradient) -> Mask:
        """The axes along which gradients were summed on their way."""
        summed = 0
        for one in self.trace.events:
            if isinstance(one, Summed) and event.begin <= one.at <= event.end:
                summed |= one.axes
        for node in self.trace.nodes[event.begin : event.end]:
            if node.backward and node.op in ("psum", "reduce_scatter"):
                summed |= node.axes
        return summed

    def _repeated(self, event: Gradient, bit: Mask) -> None:
        """A loss that each rank computes of all ranks' values."""
        roots = [self.trace.nodes[r] for r in roots_of(self.trace, self.types, event.loss, bit, self.compared.nodes)]
        if not roots or any(n.op != "all_gather" for n in roots):
            return
        names, site = _axes(self.trace.names(bit)), roots[0].site
        given = (site.given if site else None) or "..."
        fix = f'shardfn.all_gather({given}, {names}, to="invariant")'
        self._add(
            event.loss, "losses", bit, "", site, fix,
            f"the loss is made of what all_gather{_at(site)} gives, so that each of the {self._size(bit)} ranks along "
            f"{names} has all of it, and gradients are added up over them: they are {self._size(bit)} times too large. "
            f"Write: {fix}",
        )  # fmt: skip

    def _stepped(self, event: Used) -> None:
        """What an optimizer gets varies along the axes along which the parameter does."""
        types, at = self.types, event.gradient
        if event.cut is None:
            bad = types.along[at] & ~types.along[event.parameter]
            holds = types.holds[event.parameter] | self.trace.nodes[event.parameter].variable
            self._gradients(bad, holds, f"an optimizer's step{_at(event.site)}")
            return
        like = self.trace.nodes[at].like
        here = like is None or math.prod(like[0]) > 0  # of what lives elsewhere a rank has nothing
        same = event.cut & ~types.along[at]
        if same and here and types.declared[at] and not types.guessed[at]:
            made, names = self.trace.nodes[at], _axes(self.trace.names(same))
            self._add(
                at, "sum", same, "", made.site, f"leave {made.op} out: the gradient of a flat shard is summed already",
                f"the gradient of a flat shard that goes into an optimizer's step{_at(event.site)} is the same on all "
                f"ranks along {names}, which cut it: {made.op}{_at(made.site)} has put pieces of different parameters "
                f"together. Leave it out: that gradient is summed already",
            )  # fmt: skip

    def _gradients(self, bad: Mask, variables: Mask, how: str) -> bool:
        """Takes down that gradients of these variables vary where they do not."""
        told = False
        variables &= (1 << len(self.trace.variables)) - 1
        for bit in bits_of(variables & self.asked or variables):
            at = bit.bit_length() - 1
            variable = self.trace.variables[at]
            mine = bad & variable.same & ~self.types.along[variable.node]
            if mine and variable.node not in self.blank:
                before, first = self.partial.get(at, (0, how))
                self.partial[at] = (before | mine, first)
                told = True
        return told

    def _partial(self) -> None:
        groups: dict[tuple[Site | None, Mask], list[int]] = {}
        met: dict[int, int] = {}
        for at, (axes, _) in self.partial.items():
            places = self._met(at, axes, self.types.first) or self._met(at, axes, self.types.touched)
            if not places and self._outside(at, axes):
                continue
            met[at] = min(places, default=-1)
            site = self.trace.nodes[met[at]].site if places else None
            if not places and self._follows(axes):
                continue
            groups.setdefault((site, axes), []).append(at)
        for (site, axes), members in groups.items():
            first = self.trace.variables[members[0]]
            names, how = self.trace.names(axes), self.partial[members[0]][1]
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            others = ", ".join(self.trace.variables[m].path for m in members[1:4])
            more += f" ({others}{', ...' * (len(members) > 4)})" if others else ""
            fix = f"shardfn.pvary({site.spelled(first.path) if site else first.path}, {_axes(names)})"
            where = (
                f"{_at(site)}, where it meets what varies, in {self.trace.nodes[met[members[0]]].op}" if site else ""
            )
            self._add(
                met[members[0]] if site else first.node, "gradient", axes, first.path, site, fix,
                f"{first.path}{more} is the same on all ranks along {_axes(names)}, but the gradient that goes into "
                f"{how} varies there: on each rank it is that rank's part alone. Write {fix}{where}: its transpose "
                f"adds up the parts",
            )  # fmt: skip

    def _met(self, at: int, axes: Mask, places: Mapping[tuple[int, int], int]) -> list[int]:
        """Where a variable met what varies along these axes, on the way to its gradient."""
        found = [places.get((k, 1 << at)) for k in range(len(self.trace.axes)) if axes >> k & 1]
        return [node for node in found if node is not None and node < self.until.get(at, len(self.trace.nodes))]

    def _follows(self, axes: Mask) -> bool:
        """Whether something else that is wrong along these axes is the cause."""
        names = set(self.trace.names(axes))
        return any(one.kind in ("sum", "vary", "losses") and names & set(one.axes) for _, one in self.found)

    def _outside(self, at: int, axes: Mask) -> bool:
        """Takes down a `pvary` of a variable that stands outside of what is differentiated by what it gave."""
        for event in self._gradient_events():
            for of, _ in event.pairs:
                if not self.types.along[of] & axes or not self.types.holds[of] >> at & 1:
                    continue
                roots = roots_of(self.trace, self.types, of, bits_of(axes)[0], self.compared.nodes)
                made = next((self.trace.nodes[r] for r in roots if self.trace.nodes[r].op == "pvary"), None)
                if made is not None:
                    path, names = self.trace.variables[at].path, _axes(self.trace.names(axes))
                    fix = f"shardfn.pvary({path}, {names}) inside of the function that is differentiated"
                    self._add(
                        of, "gradient", axes, path, made.site, fix,
                        f"the gradient of what pvary{_at(made.site)} made of {path} is each rank's own, and goes into "
                        f"{self.partial[at][1]}, which is the same on all ranks along {names}: nothing adds up the "
                        f"parts, since pvary stands outside of what is differentiated. Write: {fix}",
                    )  # fmt: skip
                    return True
        return False

    # --- results ---

    def _output(self, output: Output, differs: Mask) -> None:
        along = self.types.along[output.node]
        if output.allowed is None:
            for k in range(len(self.trace.axes)):  # new values of what was the same
                bit = along & self.types.backward[output.node] & 1 << k
                self._gradients(bit, self.types.updated[output.node][k] if bit else 0, output.path)
            return
        bad = along & ~output.allowed
        by_gradient = bad & self.types.backward[output.node]
        if by_gradient:
            variables = self._updated(output.node, by_gradient)
            if not (self.batched and not variables & ~self.batched) and self._gradients(
                by_gradient, variables, output.path
            ):
                bad &= ~by_gradient
        if output.outer:
            for k in range(len(self.trace.axes)):
                if not along >> k & 1:
                    self._gradients(1 << k, self.types.met[output.node][k], f"what differentiates {output.path}")
        self._varies(output.path, output.node, bad, output.allowed, self.trace.nodes[output.node].site, differs)
        unseen = differs & ~along & ~output.allowed
        if unseen and not bad:
            names = self.trace.names(unseen)
            self._add(
                output.node, "output", unseen, output.path, self.trace.nodes[output.node].site,
                f"shardfn.psum({output.path}, {_axes(names)})",
                f"{output.path} is declared to be the same on all ranks along {_axes(names)}, but its numbers differ "
                f"there, and nothing that it was seen to be made of does. Make it the same, or name the axis in its "
                f"spec",
            )  # fmt: skip

    def _updated(self, node: int, bad: Mask) -> Mask:
        """The variables whose gradient a value has, of which it is a new value if it is one."""
        updated = 0
        for k in range(len(self.trace.axes)):
            if bad >> k & 1:
                updated |= self.types.updated[node][k]
        first, touched = (self._used(places, node, bad) for places in (self.types.first, self.types.touched))
        if updated and (self.asked or updated & (first | touched)):
            return updated if self.asked else updated & (first | touched)
        like = self.trace.nodes[node].like  # where the function made a leaf of its own: of a variable like it
        alike = sum(1 << at for at, v in enumerate(self.trace.variables) if self.trace.nodes[v.node].like == like)
        return self.types.gradient[node] or first or touched & alike or updated

    def _used(self, places: Mapping[tuple[int, int], int], node: int, bad: Mask) -> int:
        """The variables that met these axes before the last backward pass; a moment is met after it."""
        last = max((at for at in range(node + 1) if self.trace.nodes[at].backward), default=node)
        met = 0
        for (axis, bit), at in places.items():
            met |= bit if bad >> axis & 1 and at <= last else 0
        return met

    def _varies(
        self, path: str, at: int, bad: Mask, allowed: Mask, site: Site | None, differs: Mask | None = None
    ) -> None:
        """A value varies along axes where it is said not to."""
        bad &= ~self._told(at, bad)
        if not bad:
            return
        roots = {r for k in bits_of(bad) for r in roots_of(self.trace, self.types, at, k, self.compared.nodes)}
        nodes = [self.trace.nodes[r] for r in sorted(roots)]
        guessed = all(n.root in ("", "constant", "closure") and n.effect == "union" for n in nodes)
        if differs is not None and not bad & differs and guessed:
            return  # each rank went another way to the same number
        names = self.trace.names(bad)
        kind: Kind = "closure" if nodes and all(n.root == "closure" for n in nodes) else "output"
        where, fix = self._reduction(path, at, bad, nodes)
        instead = "" if kind == "closure" else f", or declare how it is cut: a spec that names {_axes(names)}"
        self._add(
            at, kind, bad, path, where, fix,
            f"{path}{_at(site)} varies along {_axes(names)}{self._because(at, bad)}, but its spec says that it is the "
            f"same on all ranks there. Write: {fix}{_at(where) if where != site else ''}{instead}",
        )  # fmt: skip

    def _reduction(self, path: str, at: int, bad: Mask, roots: list[Node]) -> tuple[Site | None, str]:
        """What makes a value the same on all ranks, and where that is to be written."""
        names = _axes(self.trace.names(bad))
        if roots and all(n.root == "closure" for n in roots):
            return roots[0].site, "pass it as an argument, with a spec that says how it is cut"
        if roots and all(n.op == "all_gather" for n in roots):
            given = (roots[0].site.given if roots[0].site else None) or "..."
            return roots[0].site, f'shardfn.all_gather({given}, {names}, to="invariant")'
        if roots and all(n.root == "random" for n in roots):
            return roots[0].site, f"generator=shardfn.fold_in(seed) without {names}, the same on all ranks there"
        bit = bits_of(bad)[0]
        taken = self._taken(at, bit)
        if roots and taken is None and all(n.root in ("", "constant") and n.effect == "union" for n in roots):
            return roots[0].site, f"the same number on all ranks along {names}"
        site, op = self._partly(at, bit, taken)
        if op in _CHOOSE:
            return site, f'shardfn.all_gather({(site.of if site else None) or path}, {names}, to="invariant")'
        name = _written(site) or path
        if op == "all_gather":
            return site, f'shardfn.all_gather({name}, {names}, to="invariant")'
        return site, f"shardfn.{op}({name}, {names})"

    def _partly(self, at: int, bit: Mask, taken: int | None) -> tuple[Site | None, str]:
        """Where a value was made of a rank's own part of many, and which collective joins the parts.

        That is the first place after which nothing else that varies comes in. Where a number made it vary, that was
        `taken` from a tensor.
        """
        nodes = self.trace.nodes
        while nodes[at].op in _COPIES and len(nodes[at].parents) == 1:
            at = nodes[at].parents[0]
        made = nodes[at]
        scalar = made.like is not None and not made.like[0]
        site, found = made.site, "psum" if scalar else "all_gather"
        if scalar and made.like is not None and made.like[1] is torch.bool:
            found = "pmax"
        while True:
            node, cut = nodes[at], self._cut(at, bit)
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

    def _taken(self, at: int, bit: Mask) -> int | None:
        """The value of a tensor that became a number in Python, if nothing but a number makes this one vary."""
        roots = [self.trace.nodes[r] for r in roots_of(self.trace, self.types, at, bit, self.compared.nodes)]
        if any(n.root not in ("", "constant") or n.effect != "union" for n in roots):
            return None
        before = range(at - 1, -1, -1)
        return next((k for k in before if self.trace.nodes[k].op == "item" and self.types.along[k] & bit), None)

    def _cut(self, at: int, bit: Mask) -> list[int]:
        """The values that one was made of that differ between ranks, not by type alone."""
        node = self.trace.nodes[at]
        if node.effect not in ("union", "minus") or node.root:
            return []
        return [p for p in node.parents if self.types.along[p] & bit and not self._alike(p, bit)]

    def _alike(self, at: int, bit: Mask) -> bool:
        """Whether a value that varies has the same bits on all ranks: what `pvary` and `all_gather` give."""
        roots = roots_of(self.trace, self.types, at, bit, self.compared.nodes)
        return all(self.trace.nodes[r].op in ("pvary", "all_gather") for r in roots)

    def _totals(self, mean: int) -> list[Node]:
        """The sums over ranks that were divided by each other to make a mean; none if it is of one rank's rows."""
        found = [self.types.total[p] for p in self.trace.nodes[mean].parents if self.types.total[p] >= 0]
        return [self.trace.nodes[at] for at in found] if len(found) == 2 else []

    def _summed(self, mean: int) -> Mask:
        """The axes along which the numerator of a mean was summed."""
        totals = self._totals(mean)
        return totals[0].axes if totals else 0

    def _reduced(self, mean: int, more: Mask) -> str:
        """What makes a mean one along more axes."""
        totals = self._totals(mean)
        if totals:
            given = (totals[0].site.given if totals[0].site else None) or "..."
            return f"shardfn.psum({given}, {_axes(self.trace.names(totals[0].axes | more))})"
        return f"shardfn.pmean({_written(self.trace.nodes[mean].site) or 'loss'}, {_axes(self.trace.names(more))})"

    def _told(self, at: int, bad: Mask) -> Mask:
        """The axes along which a value varies by arguments alone that were reported."""
        told = 0
        for bit in bits_of(bad):
            roots = roots_of(self.trace, self.types, at, bit, self.compared.nodes)
            if roots and all(self.wrong.get(r, 0) & bit for r in roots):
                told |= bit
        return told

    def _because(self, at: int, bad: Mask) -> str:
        """Where it begins to vary."""
        roots = [r for k in bits_of(bad) for r in roots_of(self.trace, self.types, at, k, self.compared.nodes)]
        if not roots:
            return ""
        shown = {_root(self.trace.nodes[r], self.compared.nodes.get(r, 0)): None for r in sorted(set(roots))}
        parts = list(shown)
        return f" (by {', '.join(parts[:3])}{f' and {len(parts) - 3} more' * (len(parts) > 3)})"

    def _statistics(self) -> None:
        told = set()
        for at, node in enumerate(self.trace.nodes):
            along = self._by_rows(node.parents[0]) if node.root == "statistics" and node.parents else 0
            if not along or node.site in told:
                continue
            told.add(node.site)
            names = _axes(self.trace.names(along))
            self._add(
                at, "batch_norm", along, "", node.site,
                f"shardfn.psum of the sums along {names}",
                f"batch statistics{_at(node.site)} are those of this rank's rows alone, which vary along {names}"
                f"{self._because(node.parents[0], along)}: the result is not that of the whole batch. Sum up counts, "
                f"sums and squares by shardfn.psum along {names}, or use a norm without batch statistics",
            )  # fmt: skip

    def _by_rows(self, at: int) -> Mask:
        """The axes along which a value varies by more than parameters, which a stage gives to all ranks alike."""
        found = 0
        for bit in bits_of(self.types.along[at]):
            roots = roots_of(self.trace, self.types, at, bit, self.compared.nodes)
            found |= bit if any(self.trace.nodes[r].root not in ("parameter", "statistics") for r in roots) else 0
        return found

    # --- words ---

    def _expression(self, call: Call) -> str:
        """What the call was given, in the user's words where the value has a name."""
        return (call.site.given if call.site else None) or _target(self.trace.nodes[call.node].site) or "x"

    def _size(self, axes: Mask) -> int:
        size = 1
        for name in self.trace.names(axes):
            size *= self.trace.axes[name]
        return size

    def _add(self, at: int, kind: Kind, axes: Mask, path: str, site: Site | None, fix: str, text: str) -> None:
        finding = Finding(kind, self.trace.names(axes), path, "" if site is None else str(site), fix, text)
        if finding not in [one for _, one in self.found]:
            self.found.append((at, finding))


def _root(node: Node, differs: Mask) -> str:
    match node.root:
        case "input":
            return node.about
        case "parameter":
            return f"the parameter {node.about}"
        case "closure":
            return f"a tensor of shape {list(node.like[0]) if node.like else []} that is closed over{_at(node.site)}"
        case "random":
            return f"random numbers{_at(node.site)}"
        case "statistics":
            return f"batch statistics{_at(node.site)}"
        case _:
            if node.op == "all_gather":
                return f"all_gather{_at(node.site)}"
            return f"a number that differs between ranks{_at(node.site)}" if differs else f"{node.op}{_at(node.site)}"


def _joined(node: Node) -> str:
    """The collective that makes of the ranks' results that of all."""
    op = _JOINED[node.op]
    return "psum" if op == "pmean" and node.op != "mean" and not node.count else op


def _written(site: Site | None) -> str | None:
    """What is computed there, in the user's words."""
    if site is None:
        return None
    return site.target if (site.expression or "").endswith(".backward()") else site.expression or site.target


def _target(site: Site | None) -> str | None:
    return None if site is None else site.target


def _axes(names: object) -> str:
    if isinstance(names, str):
        return repr(names)
    several: tuple[str, ...] = tuple(names)  # type: ignore[arg-type]
    return repr(several[0]) if len(several) == 1 else repr(several)


def _at(site: Site | None) -> str:
    return "" if site is None else f" at {site}"
