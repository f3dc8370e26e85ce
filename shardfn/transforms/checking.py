"""Checked calls: the first call of a mapped function, whose operations are recorded and compared between ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn import callers
from shardfn.check.bits import bits, constant, to_ints
from shardfn.check.callsites import paused
from shardfn.check.case import Argument, Case, Compared
from shardfn.check.findings import LAST, PROBABLY, Finding, VaryingError, VaryingWarning, findings_message
from shardfn.check.hints import hints
from shardfn.check.inputs import draws_met
from shardfn.check.judging import judged, used
from shardfn.check.recording import TraceRecorder
from shardfn.check.trace import Mask, Node, Output
from shardfn.check.values import like_of
from shardfn.collectives.agree import compare
from shardfn.collectives.ledger import unrecorded
from shardfn.compat import functorch
from shardfn.mesh.axes import known_axes, sizes
from shardfn.mesh.grid import as_names
from shardfn.mesh.scope import current_mesh
from shardfn.mesh.spec import Leaf, P
from shardfn.quoting import short
from shardfn.shards.layout import FlatShard, Layout, is_flat, local_parameters
from shardfn.shards.pieces import is_unit
from shardfn.transforms.autodiff import follow_parts, name_of
from shardfn.transforms.exchange import Exchange, digest, keys, numbers

_log = logging.getLogger("shardfn")
_WORDS = ("always", "first", "off")


def check_setting() -> str | None:
    """The value of `SHARDFN_CHECK`, for all functions: `always`, `first` or `off`; None if it is not set.

    Raises:
        ValueError: it has a different value.
    """
    value = os.environ.get("SHARDFN_CHECK", "").strip().lower()
    if value and value not in _WORDS:
        raise ValueError(f"SHARDFN_CHECK must be always, first (the first call of each kind) or off, got {value!r}")
    return value or None


def flat_axes(layout: Layout) -> tuple[str, ...]:
    """The axes along which ranks may hold different elements of a flat shard."""
    cut = {name for number in range(len(layout.entries)) for name in layout.cut_axes(number)}
    return (*layout.placement.axes, *layout.placement.only_at_axes, *cut)


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """A context outside of all transforms in which nothing is recorded."""
    with paused(), functorch.outside_transforms(), torch.no_grad(), unrecorded():
        yield


def _axes_of(mesh: DeviceMesh, group: str) -> Iterable[str]:
    """The names of the axes along which a group's ranks lie."""
    for candidate in filter(None, (mesh, current_mesh())):
        for names, axis in known_axes(candidate).used.items():
            if axis.group == group:
                return as_names(names)
    return ()


def _transformed(function: Callable[..., Any]) -> list[Tensor]:
    """Tensors of active torch.func transforms that a function closes over; the recorder, below them, sees none."""
    closed: list[Any] = []
    for cell in (getattr(function, "__closure__", None) or ()) if functorch.inside_transform() else ():
        with contextlib.suppress(ValueError):  # an empty cell
            closed += optree.tree_leaves(cell.cell_contents)
    return [x for x in closed if functorch.wrapped(x) and x.is_floating_point()]


class CheckedCall:
    """One checked call of a function.

    Args:
        function: the function.
        mesh: the mesh whose ranks compare.
        outer: whether something outside differentiates the call.
    """

    def __init__(self, function: Callable[..., Any], mesh: DeviceMesh, outer: bool) -> None:
        self.function, name = function, f"shard_map({name_of(function)})"
        several = {axis: size for axis, size in sizes(mesh).items() if size > 1}
        self.name, self.mesh = name, mesh
        self.ranks = Exchange(mesh, tuple(several), name)
        self.recorder = TraceRecorder(name, several, functools.partial(_axes_of, mesh))
        self.recorder.trace.outer = outer
        self.arguments: list[Argument] = []
        self.shown: list[Tensor | int] = []  # the bits of each argument
        self.constants: list[Tensor | bool | None] = []
        self.grads: list[tuple[str, Tensor, Any]] = []

    # --- arguments ---

    def record_arguments(self, leaves: Sequence[Leaf], pieces: Sequence[Any]) -> None:
        """Records the arguments, as the function gets them."""
        with _silently():
            for leaf, piece in zip(leaves, pieces, strict=True):
                self._record_leaf(leaf, piece)
            for x in _transformed(self.function):
                self.recorder.values.closure(functorch.unwrapped(x), True)

    def _record_leaf(self, leaf: Leaf, piece: Any) -> None:
        mask = self.recorder.trace.mask
        if is_flat(piece):
            if isinstance(piece.values, Tensor):
                self._flat(leaf.path, piece)
            return
        if not isinstance(piece, Tensor):
            for x in optree.tree_leaves(piece):
                if isinstance(x, Tensor):
                    self._argument(x, leaf.path, None, leaf)
            return
        self._argument(piece, leaf.path, mask(leaf.spec.axes) if isinstance(leaf.spec, P) else None, leaf)

    def _argument(self, x: Tensor, path: str, allowed: Mask | None, leaf: Leaf) -> None:
        x = functorch.unwrapped(x)
        node = self.recorder.input(x, path, allowed)
        plain = isinstance(leaf.spec, P)
        rows = self.recorder.trace.mask(next(leaf.spec.by_dim(), ())) if isinstance(leaf.spec, P) else 0
        declared = f"in_specs {leaf.spec}" if plain else ""
        self.arguments.append(Argument(path, node, allowed, plain, False, declared, rows))
        self.shown.append(bits(x))
        self.constants.append(constant(x) if allowed is None or (plain and allowed) else None)
        if x.is_leaf and x.requires_grad:
            before = None if x.grad is None else (weakref.ref(x.grad), x.grad._version)
            self.grads.append((f"{path}.grad", x, before))

    def _flat(self, path: str, flat: FlatShard) -> None:
        """Records a flat shard; each of its parameters is declared invariant along the axes that do not shard it."""
        layout, trace = flat.layout, self.recorder.trace
        flat_node = self.recorder.input(flat.values, path, trace.mask(flat_axes(layout)))
        trace.flat[flat_node] = trace.mask(layout.placement.axes)
        if trace.nodes[flat_node].axes == trace.everywhere and all(
            trace.mask(layout.cut_axes(k)) == trace.everywhere for k in range(len(layout.entries))
        ):
            return
        values = functorch.unwrapped(flat.values)
        if values.shape != (layout.piece,):  # a batch of shards, whose parameters cannot be told apart
            return
        parts = local_parameters(FlatShard(values, layout))
        follow_parts(self.recorder, values, layout)
        for number, entry in enumerate(layout.entries):
            cut = trace.mask(layout.cut_axes(number))
            node = self.recorder.part_of(flat_node, cut)
            self.arguments.append(Argument(f"{path}, {entry.path}", node, cut, False, False, str(layout)))
            self.shown.append(bits(parts[entry.path]) if entry.path in parts else 0)
            self.constants.append(None)

    # --- results ---

    def finish(self, leaves: Sequence[Leaf]) -> None:
        """Compares the records of all ranks, after the function has returned on this rank.

        Raises:
            VaryingError: a declaration of the function does not hold. Every rank raises the same error.
        """
        with _silently():
            results = self._results(leaves)
            values = self.recorder.values
            values.watched += [*used(values), *draws_met(values)]
            self._all_end()
        compared = self.compared(results)
        if self.recorder.trace.prefix:
            _log.info("%s: the call is long: only its beginning was checked, and what it returned", self.name)
        case: list[Case] = []

        def find() -> list[Finding]:
            case.append(Case(self.recorder.trace, compared))
            return judged(case[0])

        with _silently():
            findings = self.ranks.all_findings(find)
        if self.recorder.trace.prefix and not all(f.unseen for f in findings):
            findings = [f for f in findings if not f.unseen]  # a rank with a longer record has found the cause
        ordered = tuple(sorted(findings, key=lambda f: f.kind in LAST))
        if any(f.kind not in PROBABLY for f in ordered):
            raise VaryingError(findings_message(self.name, ordered, False), ordered)
        if ordered:
            file, line, names = callers.warned(self.function)
            warning = VaryingWarning(findings_message(self.name, ordered, True), ordered)
            registry = names.setdefault("__warningregistry__", {})
            warnings.warn_explicit(warning, VaryingWarning, file, line, names.get("__name__"), registry)
        if self.ranks.everybody.index == 0:
            for hint in hints(case[0]):
                _log.warning("%s: %s", self.name, hint)

    def _all_end(self) -> None:
        """Raises VaryingError if other ranks still call collectives."""
        try:
            compare(f"the end of {short(self.name, 80)}", "", self.ranks.everybody, by=self.name)
        except ValueError as error:
            names = tuple(self.recorder.trace.axes)
            fix = "call the same collectives on all ranks"
            raise VaryingError(str(error), (Finding("collectives", names, "", "", fix, str(error)),)) from None

    def _results(self, leaves: Sequence[Leaf]) -> list[tuple[str, Tensor, Mask]]:
        """Records the results; returns path, value and declared axes of those declared invariant along some axis."""
        trace, results = self.recorder.trace, []
        trace.prefix = self.recorder.ended()
        # A graph that the function has used for its own gradients is not differentiated again outside.
        trace.outer = trace.outer or (trace.closed and not any(node.backward for node in trace.nodes))
        for leaf in leaves:
            x: Any = leaf.value.values if is_unit(leaf.value) else leaf.value
            if isinstance(x, (int, float, complex)) and isinstance(leaf.spec, P):
                node = self.recorder.number(x, leaf.path)
                trace.events.append(Output(leaf.path, node, trace.mask(leaf.spec.axes)))
                results.append((leaf.path, torch.as_tensor(x, device="cpu"), trace.mask(leaf.spec.axes)))
            if not isinstance(x, Tensor):
                continue
            if is_unit(leaf.value):
                allowed: Mask | None = trace.mask(flat_axes(leaf.value.layout))
            else:
                allowed = trace.mask(leaf.spec.axes) if isinstance(leaf.spec, P) else None
            plain = functorch.unwrapped(x)
            outer = trace.outer and (x.requires_grad or functorch.wrapped(x)) and plain.is_floating_point()
            outer = outer and not trace.prefix
            trace.events.append(Output(leaf.path, self._node_of(plain, allowed), allowed, outer))
            if allowed is not None and allowed != trace.everywhere:
                results.append((leaf.path, plain, allowed))
        for path, number in self.recorder.stated:
            trace.events.append(Output(path, self.recorder.number(number, path), 0))
            results.append((path, torch.as_tensor(number, device="cpu"), 0))
        for path, x, before in self.grads if not trace.prefix else ():
            if x.grad is not None and (before is None or before[0]() is not x.grad or before[1] != x.grad._version):
                # A gradient varies along the axes along which its variable does.
                value = trace.nodes[self.recorder.values.node_of(x)]
                allowed = value.axes if value.effect == "exactly" else None
                trace.events.append(Output(path, self.recorder.values.node_of(x.grad), allowed))
                results.append((path, x.grad, trace.everywhere if allowed is None else allowed))
        return results

    def _node_of(self, x: Tensor, allowed: Mask | None) -> int:
        """The node of a result; if its operations were not recorded, only its bits can contradict its spec."""
        values = self.recorder.values
        unseen = Node("result", (), None, "exactly", allowed or 0, like=like_of(x))
        return values.add(unseen) if self.recorder.trace.prefix else values.node_of(x)

    @_silently()
    def compared(self, results: Sequence[tuple[str, Tensor, Mask]]) -> Compared:
        """Compares the bits of all recorded values between ranks."""
        ranks, values = self.ranks, self.recorder.values
        evidence, counts, watched = map(numbers, (values.evidence, values.counts, values.watched))
        constants = to_ints([0 if c is None else c for c in self.constants])
        shown = to_ints([*self.shown, *(bits(x) for _, x, _ in results)])
        # Arguments and results may be different trees on each rank; only if they are not, ranks compare by position.
        paths = keys([*(a.path for a in self.arguments), *(path for path, _, _ in results)])
        trace = self.recorder.trace
        meant = hash((*paths, *(allowed for *_, allowed in results)))
        digests = [*map(digest, (evidence, counts, watched)), len(shown), meant, trace.prefix]
        rows = ranks.gathered(torch.tensor(digests, device="cpu"))
        differing, trace.prefix = ranks.varying_axes(rows), bool(rows[:, -1].any())
        # Truncated records end at different places, so an entry that is missing in one proves nothing.
        spread = functools.partial(ranks.spread, absent=not trace.prefix)
        nodes = spread(evidence) if differing[0] else {}
        uneven = spread(counts) if differing[1] else {}
        watched_nodes = dict.fromkeys([node for _, node, _ in watched], 0) | (spread(watched) if differing[2] else {})
        first = len(self.arguments)
        if differing[3] or differing[4]:
            differs = ranks.spread(list(zip(paths, range(len(paths)), shown, strict=True)), absent=False)
        else:
            masks = (
                ranks.varying_axes(ranks.gathered(torch.tensor(shown, dtype=torch.int64, device="cpu")))
                if shown
                else []
            )
            differs = dict(enumerate(masks))
            for k, (_, x, allowed) in enumerate(results, first):
                differs[k] = ranks.beyond_rounding(x, differs[k] & ~allowed)
        for k, argument in enumerate(self.arguments):
            nodes[argument.node] = nodes.get(argument.node, 0) | differs.get(k, 0)
        outputs = {path: differs[k] for k, (path, _, _) in enumerate(results, first) if differs.get(k)}
        arguments = [dataclasses.replace(a, constant=bool(c)) for a, c in zip(self.arguments, constants, strict=True)]
        return Compared(nodes, uneven, watched_nodes, outputs, arguments)


def claim(
    recorder: TraceRecorder, function: str, side: str, leaves: Sequence[Leaf], pieces: Sequence[Any], mesh: DeviceMesh
) -> None:
    """Records the declared specs of a `shard_map` inside a checked one, for its arguments or its result."""
    trace = recorder.trace
    elsewhere = trace.mask(name for name in trace.axes if name not in sizes(mesh))
    for leaf, piece in zip(leaves, pieces, strict=True):
        if isinstance(leaf.spec, P) and isinstance(piece, Tensor):
            recorder.claimed(function, side, leaf.path, piece, trace.mask(leaf.spec.axes) | elsewhere)
