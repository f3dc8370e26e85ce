"""A step of an elementwise rule: in place by fused kernels, or in differentiable arithmetic on new tensors.

Slots that are stored otherwise than in the parameters' dtype are decoded for the rule, and encoded again after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.compat import dispatch
from shardfn.compat.devices import elements_at_a_time
from shardfn.optim.differentiable import refuse_overwriting, tied, varied
from shardfn.optim.fused import AdamW
from shardfn.optim.hyperparameters import Rule, RuleAtStep, begun, check, constants
from shardfn.optim.norms import wide
from shardfn.optim.optimizer import Optimizer, of_rule
from shardfn.optim.state_dtype import Coded, Kept, Opened, Stored
from shardfn.optim.state_offload import on_whole
from shardfn.optim.step_counts import Missed, missed_after, missed_key
from shardfn.quoting import listed
from shardfn.shards.blocks import BLOCK, CHUNK, Runs
from shardfn.shards.pieces import Segment, Unit, Units, dense, joined, pairs, refuse_complex, runs, units, zeros_like
from shardfn.shards.random import int_seed
from shardfn.tiers import streaming
from shardfn.tiers.streaming import Window, stream, streams, windows_of

LANES = 64  # elements: a multiple of the vector length of any processor


@dataclass(frozen=True)
class Elementwise:
    """An elementwise update rule.

    Attributes:
        slots: names of what it remembers of each element, zero at first.
        in_place: `(params, grads, slots, step, numbers)`, lists of tensors, which it overwrites.
        pure: `(param, grad, slots, step, numbers) -> (param, slots)`.
        fused: a kernel that does all of it on slots in 8 bits; None if there is none.
        counts: whether the rule depends on the step count; then its numbers may have `"missed"`, how many of the steps
            a parameter has not made.
    """

    slots: tuple[str, ...]
    in_place: Callable[..., None]
    pure: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    fused: AdamW | None = None
    counts: bool = False


@dataclass
class _RuleStep:
    """One step of a rule, with its numbers and how slots are stored: `kept` is None for the parameters' dtype."""

    rule: Elementwise
    kept: Kept | None
    leaves: Units
    count: Any
    now: dict[str, Any]
    salt: Any
    missed: Missed

    @property
    def fused(self) -> AdamW | None:
        """The rule's own kernel, if slots are in 8 bits, and step counts are numbers."""
        counted = any(isinstance(x, Tensor) for x in (self.count, *self.missed.values()))
        return self.rule.fused if isinstance(self.kept, Coded) and not counted else None

    def numbers(self, key: tuple[tuple[str, Any], ...], hparams: dict[str, Any] | None = None) -> dict[str, Any]:
        """The numbers for a range of elements; `hparams` are those that all ranges share, if they are others."""
        numbers = (hparams or self.now) | dict(key)
        if isinstance(path := numbers.get("missed"), str):
            numbers["missed"] = self.missed[path]
        return numbers

    def closed(self, decoded: Sequence[Opened], *, collective: bool) -> list[list[Stored]]:
        """Encodes the numbers of slots."""
        assert self.kept is not None, "slots in the parameters' dtype are not closed"
        return self.kept.closed(self.leaves, self.rule.slots, decoded, self.salt, collective=collective)


def optimizer(
    name: str, rule: Elementwise, numbers: dict[str, Any], donate: bool, storage: Kept | None = None, seed: int = 0
) -> Optimizer:
    """Makes an optimizer of an elementwise rule, with schedules and per-parameter rules.

    Its slots are in the parameters' dtype, or stored as `storage` says, with random numbers from the seed.
    """
    check(name, numbers | {"donate": donate}, numbers)
    drawing = {} if storage is None or storage.dtypes != (torch.bfloat16,) else {"seed": int_seed(seed)}

    def init(params: Any) -> Any:
        state = {"step": 0, "numbers": constants(numbers)} | drawing | ({"missed": {}} if rule.counts else {})
        if storage is None:
            return state | {slot: zeros_like(params) for slot in rule.slots}
        leaves = units(params)
        refuse_complex(leaves, f"{name} with a state of its own dtype")
        return state | storage.init(leaves, rule.slots)

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, hparams = begun(numbers, state)
        leaves = units(params)
        slots = [
            leaves.values_in(state[s]) if storage is None else storage.stored(leaves, state, s) for s in rule.slots
        ]
        rows = pairs(leaves, grads)
        missed = missed_after(state["missed"], rows) if rule.counts else {}
        new_counts = {"step": count} | ({"missed": missed} if rule.counts else {})
        work = [_UnitUpdate(i, unit, grad, [slot[i] for slot in slots]) for i, (unit, grad) in enumerate(rows)]
        rules = {name: value for name, value in hparams.items() if isinstance(value, RuleAtStep)}
        jobs = [(item, _spans(item.unit, rules, missed)) for item in work if item.grad is not None]
        rule_step = _RuleStep(rule, storage, leaves, count, hparams, (state.get("seed", 0), count), missed)
        if donate:
            refuse_overwriting(name, params, grads, state)
            if dispatch.in_graph():  # whose compiler fuses the rule's operations, and does them in place
                _copied_back(rule_step, jobs)
            else:
                (_overwrite if storage is None else _overwrite_kept)(rule_step, jobs)
            return params, state | new_counts
        (_replace_all if storage is None else _replace_kept)(rule_step, jobs)
        new_params = leaves.with_values(item.values for item in work)
        new = {slot: [item.slots[i] for item in work] for i, slot in enumerate(rule.slots)}
        trees = (
            {slot: leaves.with_values(x) for slot, x in new.items()}
            if storage is None
            else storage.entries(leaves, new)
        )
        return new_params, state | new_counts | trees

    return Optimizer(init, step if donate else on_whole(step))


class _UnitUpdate:
    """A unit during a step: its values and slots are replaced as the step goes on."""

    def __init__(self, index: int, unit: Unit, grad: Tensor | None, slots: list[Any]) -> None:
        self.number, self.unit, self.grad, self.slots, self.values = index, unit, grad, slots, unit.values

    @property
    def columns(self) -> list[Tensor]:
        """The parameters, the gradient if there is one, and the tensors of the slots."""
        return [self.values, *([] if self.grad is None else [self.grad]), *self.stored]

    @property
    def stored(self) -> list[Tensor]:
        """The tensors of all slots, in order."""
        return [x for slot in self.slots for x in ([slot] if isinstance(slot, Tensor) else slot)]


Span = tuple[tuple[tuple[str, Any], ...], int, int]


def _spans(unit: Unit, rules: Mapping[str, Rule], missed: Missed) -> list[Span]:
    """Ranges of elements with the same numbers: `(numbers, start, stop)`."""
    if not rules and not missed:
        return [((), 0, unit.values.numel())]

    def key_of(segment: Segment) -> tuple[tuple[str, Any], ...]:
        key = tuple((name, of_rule(rule, segment)) for name, rule in rules.items())
        return (*key, ("missed", missed_key(missed, segment.path))) if missed else key

    return runs(unit, key_of)


def _overwrite(rule_step: _RuleStep, work: list[tuple[_UnitUpdate, list[Span]]]) -> None:
    """Overwrites parameters and slots by fused kernels, one call for each set of numbers, dtype and device."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor], list[list[Tensor]]]] = {}
    copy_backs: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        streamed = [item for item in work if streams(item[0].columns)]
        if streamed:
            for item, _ in streamed:
                _refuse_dtypes(item, rule_step.kept)
            stream(_windows(rule_step, streamed))
            for item, _ in streamed:  # as below
                torch.autograd.graph.increment_version([item.values, *item.slots])
            work = [item for item in work if not streams(item[0].columns)]
        for item, spans in work:
            for key, start, stop in spans:
                kind = (key, item.unit.values.dtype, item.unit.values.device)
                ps, gs, slots = groups.setdefault(kind, ([], [], [[] for _ in rule_step.rule.slots]))
                is_full = (start, stop) == (0, item.unit.values.numel())
                row = [_real(x if is_full else x[start:stop]) for x in (item.unit.values, item.grad, *item.slots)]
                _refuse_dtypes(item, rule_step.kept)
                for dst, x in zip((ps, gs, *slots), _in_order(row, copy_backs), strict=True):
                    dst.append(x)
        for (key, *_), (ps, gs, slots) in groups.items():
            rule_step.rule.in_place(ps, gs, slots, rule_step.count, rule_step.numbers(key))
            # Fused kernels do not increment versions, by which autograd and caches notice that a tensor has changed.
            torch.autograd.graph.increment_version([*ps, *(x for slot in slots for x in slot)])
        for x, new in copy_backs:
            x.copy_(new)


def _windows(rule_step: _RuleStep, work: list[tuple[_UnitUpdate, list[Span]]]) -> Iterator[Window]:
    """Steps on tensors that are not on the device, a few elements at a time."""
    for item, spans in work:
        columns = [_real(x) for x in item.columns]
        for key, start, stop in spans:
            numbers = rule_step.numbers(key)

            def move(row: list[Tensor], numbers: dict[str, Any] = numbers) -> None:
                p, g, *slots = row
                rule_step.rule.in_place([p], [g], [[slot] for slot in slots], rule_step.count, numbers)

            for a, b in windows_of(start, stop):
                yield Window([x[a:b] for x in columns], [True, False, *[True] * len(item.slots)], move)


def _in_order(row: list[Tensor], copy_backs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A parameter, its gradient and slots in the same memory order, which fused kernels rely on.

    Where orders differ all are copied, and all but the gradient are noted in `copy_backs`, to be copied back.
    """
    if all(x.is_contiguous() for x in row):
        return row
    p, _, *slots = row
    if all(x.stride() == p.stride() for x in row) and dense(p):
        return row
    copies = [x.contiguous() for x in row]
    copy_backs += [(x, copy) for x, copy in zip((p, *slots), (copies[0], *copies[2:]), strict=True) if x is not copy]
    return copies


def _refuse_dtypes(item: _UnitUpdate, storage: Kept | None) -> None:
    """Raises ValueError for a slot of another dtype than the parameter or the storage."""
    for slot in item.slots:
        if storage is None and slot.dtype != item.values.dtype:
            raise ValueError(
                f"{item.unit.name}: the parameter is {item.values.dtype}, but the state {slot.dtype}: cast both, or "
                f"make a new state by init(params)"
            )
        if storage is not None and (dtypes := tuple(x.dtype for x in slot)) != storage.dtypes:
            raise ValueError(
                f"{item.unit.name}: the state is kept as {listed(storage.dtypes)}, but this one is "
                f"{listed(dtypes)}: make a new state by init(params)"
            )


def _copied_back(rule_step: _RuleStep, work: list[tuple[_UnitUpdate, list[Span]]]) -> None:
    """Overwrites parameters and slots with the results of the pure rule."""
    with torch.no_grad():
        for item, _ in work:
            _refuse_dtypes(item, rule_step.kept)
        columns = [[item.values, *item.stored] for item, _ in work]
        (_replace_all if rule_step.kept is None else _replace_kept)(rule_step, work)
        for before, (item, _) in zip(columns, work, strict=True):
            for x, new in zip(before, [item.values, *item.stored], strict=True):
                x.copy_(new)


def _replace_all(rule_step: _RuleStep, work: list[tuple[_UnitUpdate, list[Span]]]) -> None:
    for item, spans in work:
        _replace(rule_step, item, spans)


def _replace(rule_step: _RuleStep, item: _UnitUpdate, spans: list[Span]) -> None:
    """Replaces a unit's values and slots by new tensors, differentiably."""
    assert item.grad is not None
    hparams = {name: varied(value, item.unit) for name, value in rule_step.now.items()}
    results: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    for key, start, stop in spans:
        is_full = (start, stop) == (0, item.unit.values.numel())
        p, g, *slots = (_real(x if is_full else x[start:stop]) for x in (item.unit.values, item.grad, *item.slots))
        numbers = {
            name: x[start:stop].view(-1, *(1,) * (p.ndim - 1)) if isinstance(x, Tensor) and x.ndim else x
            for name, x in hparams.items()
        }
        new, after = rule_step.rule.pure(p, g, tuple(slots), rule_step.count, rule_step.numbers(key, numbers))
        if item.unit.values.is_complex():
            new, after = torch.view_as_complex(new), tuple(map(torch.view_as_complex, after))
        results.append((new, after))
    bounds = [(start, stop) for _, start, stop in spans]
    inputs = [item.unit.values, item.grad, *item.slots, *(x for x in hparams.values() if isinstance(x, Tensor))]
    item.values = tied(joined([p for p, _ in results], item.unit, bounds), inputs)
    for i, old in enumerate(item.slots):
        slot_unit = item.unit._replace(values=old)
        item.slots[i] = tied(joined([slots[i] for _, slots in results], slot_unit, bounds), inputs)


# --- slots in another dtype than the parameter, or in 8 bits ---


def _overwrite_kept(rule_step: _RuleStep, work: list[tuple[_UnitUpdate, list[Span]]]) -> None:
    """As `_overwrite`, a few elements at a time, whose slots are decoded, updated and encoded again."""
    storage = rule_step.kept
    assert storage is not None
    waiting: list[tuple[_UnitUpdate, Opened]] = []
    with torch.no_grad():
        ordered = []
        for item, spans in work:
            _refuse_dtypes(item, storage)
            assert item.grad is not None
            # Slots follow the order of elements, but a parameter's memory may have another order.
            ordered.append((item, spans, item.values.contiguous().view(-1), item.grad.contiguous().view(-1)))
        stream(
            _kept_window(rule_step, storage, item, (p, g), part, rule_step.numbers(key), waiting)
            for item, spans, p, g in ordered
            for key, start, stop in spans
            for part in storage.chunks(item.unit, start, stop, _at_once(rule_step, item, p, g))
        )
        for item, _, p, _ in ordered:
            if p.data_ptr() != item.values.data_ptr():
                item.values.copy_(p.view(item.values.shape))
            torch.autograd.graph.increment_version([item.values])  # as in `_overwrite`
        # Blocks that ranks share need one common scale, agreed on for all units in a single exchange.
        closed = rule_step.closed([decoded for _, decoded in waiting], collective=True)
        for (item, decoded), slots in zip(waiting, closed, strict=True):
            for stored, new in zip(item.slots, slots, strict=True):
                for x, place, part in zip(stored, storage.places(decoded.part), new, strict=True):
                    x.view(-1)[place] = part


def _at_once(rule_step: _RuleStep, item: _UnitUpdate, p: Tensor, g: Tensor) -> int:
    """The number of elements to decode at a time: all, if a kernel stores no intermediate results."""
    streamed = streams(item.columns)
    if rule_step.fused and not streamed and rule_step.fused.takes([p, g, *(x.view(-1) for x in item.stored)]):
        return max(len(p), BLOCK)
    max_elements = elements_at_a_time(item.values.device, CHUNK)
    return min(max_elements, streaming.CHUNK) if streamed else max_elements


def _kept_window(
    rule_step: _RuleStep,
    storage: Kept,
    item: _UnitUpdate,
    flat: tuple[Tensor, Tensor],
    part: Runs,
    hparams: dict[str, Any],
    waiting: list[tuple[_UnitUpdate, Opened]],
) -> Window:
    """A few elements and the function that updates them; it adds blocks shared with other ranks to `waiting`."""
    n = len(storage.dtypes)

    def move(row: list[Tensor]) -> None:
        p, g, *parts = row
        decoded, fused = Opened(item.number, part, []), rule_step.fused
        if fused and fused.takes(row):
            decoded.numbers = fused(row, part, rule_step.count, hparams, decoded.ready)
            if not decoded.ready:
                waiting.append((item, decoded))
            return
        dtype = wide(p)
        slots = [tuple(parts[i : i + n]) for i in range(0, len(parts), n)]
        pairs_of_slots = zip(rule_step.rule.slots, slots, strict=True)
        decoded.numbers = [storage.decode(*pair, part).to(dtype) for pair in pairs_of_slots]
        moving = p.to(dtype)
        _move_all(rule_step, [moving, g.to(dtype), *decoded.numbers], hparams)
        if moving is not p:
            p.copy_(moving)
        if not decoded.ready:
            waiting.append((item, decoded))
            return
        (encoded,) = rule_step.closed([decoded], collective=False)
        for x, new in zip(parts, itertools.chain.from_iterable(encoded), strict=True):
            x.copy_(new)

    columns = [x[part[0].start : part[-1].stop] for x in flat]
    for stored in item.slots:
        columns += [x.view(-1)[place] for x, place in zip(stored, storage.places(part), strict=True)]
    return Window(columns, [i != 1 for i in range(len(columns))], move)


def _move_all(rule_step: _RuleStep, columns: list[Tensor], hparams: dict[str, Any]) -> None:
    """Updates a vector of parameters and the vectors of slots, by one of gradients.

    On a CPU, kernels round differently in the remainder after the last full vector of the processor. So the remainder
    is padded to full vectors, and an element gets the same bits wherever ranks cut.
    """
    n = len(columns[0])
    rest = n % LANES if columns[0].device.type == "cpu" else 0
    groups = [[x[: n - rest] for x in columns]] if n > rest else []
    ends = [F.pad(x[n - rest :], (0, LANES - rest)) for x in columns] if rest else []
    groups += [ends] if rest else []
    ps, gs, *slots = (list(xs) for xs in zip(*groups, strict=True))
    rule_step.rule.in_place(ps, gs, slots, rule_step.count, hparams)
    for i, end in enumerate(ends):
        if i != 1:  # the gradient
            columns[i][n - rest :] = end[:rest]


def _replace_kept(rule_step: _RuleStep, work: list[tuple[_UnitUpdate, list[Span]]]) -> None:
    """As `_replace_all`, on the numbers that slots encode."""
    storage = rule_step.kept
    assert storage is not None
    pending: list[tuple[_UnitUpdate, Opened]] = []
    for item, spans in work:
        _refuse_dtypes(item, storage)
        assert item.grad is not None
        part, values = storage.all_elements(item.unit), item.values
        start, stop = (part[0].start, part[-1].stop) if part else (0, 0)
        zeros = values.new_zeros(values.numel(), dtype=wide(values))
        slots = []
        for slot, stored in zip(rule_step.rule.slots, item.slots, strict=True):
            numbers = zeros[:0]
            if part:
                stored_part = tuple(x.reshape(-1)[place] for x, place in zip(stored, storage.places(part), strict=True))
                numbers = storage.decode(slot, stored_part, part).to(zeros.dtype)
            slots.append(torch.cat((zeros[:start], numbers, zeros[stop:])).view(values.shape))
        unit = item.unit._replace(values=values.to(zeros.dtype))
        moving = _UnitUpdate(item.number, unit, item.grad.to(zeros.dtype), slots)
        _replace(rule_step, moving, spans)
        item.values = moving.values.to(values.dtype)
        if part:  # a rank that has nothing takes part in derivatives nevertheless
            pending.append((item, Opened(item.number, part, [x.reshape(-1)[start:stop] for x in moving.slots])))
    closed = rule_step.closed([decoded for _, decoded in pending], collective=True)
    for (item, decoded), stored in zip(pending, closed, strict=True):
        places = storage.places(decoded.part)
        for i, new in enumerate(stored):
            item.slots[i] = tuple(map(_with, item.slots[i], places, new))


def _with(x: Tensor, place: slice, new: Tensor) -> Tensor:
    """A tensor with some elements replaced."""
    flat = x.reshape(-1)
    return torch.cat((flat[: place.start], new, flat[place.stop :])).view(x.shape)


def _real(x: Tensor) -> Tensor:
    """Views complex numbers as pairs of real ones; each component is updated by itself."""
    return torch.view_as_real(x) if x.is_complex() else x
