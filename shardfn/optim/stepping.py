"""A step of a rule for elements: in place by fused kernels, or in differentiable arithmetic on new tensors.

What is kept otherwise than in the parameters' dtype is opened for the rule, and closed behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.compat import dynamo
from shardfn.optim.differentiable import tied, varied
from shardfn.optim.hyperparameters import at_step, check, check_rule, constants
from shardfn.optim.norms import wide
from shardfn.optim.optimizer import Optimizer, Rule, of_rule
from shardfn.optim.state_dtype import Kept, Opened, Stored
from shardfn.optim.state_offload import on_whole
from shardfn.quoting import listed
from shardfn.shards.blocks import Runs
from shardfn.shards.pieces import Unit, Units, dense, joined, pairs, refuse_complex, runs, units, zeros_like
from shardfn.shards.random import int_seed
from shardfn.tiers.streaming import Window, stream, streams, windows_of

LANES = 64  # elements: a multiple of what the vectors of any processor hold


@dataclass(frozen=True)
class Elementwise:
    """A rule for elements.

    Attributes:
        slots: what it remembers of each element, zero at first.
        in_place: `(params, grads, slots, step, numbers)`, lists of tensors, which it overwrites.
        pure: `(param, grad, slots, step, numbers) -> (param, slots)`.
    """

    slots: tuple[str, ...]
    in_place: Callable[..., None]
    pure: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


@dataclass
class _Step:
    """One step of a rule: the numbers that it goes by, and how slots are kept; None is in the parameters' dtype."""

    rule: Elementwise
    kept: Kept | None
    known: Units
    count: int
    now: dict[str, Any]
    salt: Any

    def closed(self, every: Sequence[Opened], *, together: bool) -> list[list[Stored]]:
        """What is to be kept of numbers."""
        assert self.kept is not None, "slots in the parameters' dtype are not closed"
        return self.kept.closed(self.known, self.rule.slots, every, self.salt, together=together)


def optimizer(
    name: str, rule: Elementwise, numbers: dict[str, Any], donate: bool, kept: Kept | None = None, seed: int = 0
) -> Optimizer:
    """An optimizer by a rule. A number may be a schedule, if it is the learning rate, or else a rule for parameters.

    Its slots are in the parameters' dtype, or kept otherwise, by random numbers from a seed.
    """
    check(name, numbers | {"donate": donate}, numbers)
    varying = {name: value for name, value in numbers.items() if callable(value) and name != "lr"}
    drawing = {} if kept is None or kept.dtypes != (torch.bfloat16,) else {"seed": int_seed(seed)}

    def init(params: Any) -> Any:
        state = {"step": 0, "numbers": constants(numbers)} | drawing
        if kept is None:
            return state | {slot: zeros_like(params) for slot in rule.slots}
        known = units(params)
        refuse_complex(known, f"{name} with a state of its own dtype")
        return state | kept.init(known, rule.slots)

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, known = state["step"] + 1, units(params)
        now = dict(state["numbers"])
        if callable(numbers["lr"]):
            now["lr"] = at_step(numbers["lr"], count)
        slots = [known.beside(state[s]) if kept is None else kept.stored(known, state, s) for s in rule.slots]
        each = enumerate(pairs(known, grads))
        work = [_Work(i, unit, grad, [slot[i] for slot in slots]) for i, (unit, grad) in each]
        every = [(one, _spans(one.unit, varying)) for one in work if one.grad is not None]
        this = _Step(rule, kept, known, count, now, (state.get("seed", 0), count))
        if donate:
            if torch.compiler.is_compiling():
                dynamo.refuse_in_graph(
                    f"{name}: donate=True overwrites parameters by fused kernels, which a graph of torch.compile "
                    f"cannot hold: pass donate=False to what is compiled"
                )
            (_overwrite if kept is None else _overwrite_kept)(this, every)
            return params, state | {"step": count}
        (_replace_all if kept is None else _replace_kept)(this, every)
        made = known.like(one.values for one in work)
        new = {slot: [one.slots[i] for one in work] for i, slot in enumerate(rule.slots)}
        trees = {slot: known.like(x) for slot, x in new.items()} if kept is None else kept.entries(known, new)
        return made, state | {"step": count} | trees

    return Optimizer(init, step if donate else on_whole(step))


class _Work:
    """One unit on its way through a step."""

    def __init__(self, number: int, unit: Unit, grad: Tensor | None, slots: list[Any]) -> None:
        self.number, self.unit, self.grad, self.slots, self.values = number, unit, grad, slots, unit.values

    @property
    def columns(self) -> list[Tensor]:
        """The parameters, the gradient, and what is kept of them."""
        return [self.values, *([] if self.grad is None else [self.grad]), *self.stored]

    @property
    def stored(self) -> list[Tensor]:
        """The tensors of all slots in order."""
        return [x for slot in self.slots for x in ([slot] if isinstance(slot, Tensor) else slot)]


Span = tuple[tuple[tuple[str, Any], ...], int, int]


def _spans(unit: Unit, varying: dict[str, Rule]) -> list[Span]:
    """Stretches with the same numbers."""
    if not varying:
        return [((), 0, unit.values.numel())]
    found = runs(unit, lambda one: tuple((name, of_rule(rule, one)) for name, rule in varying.items()))
    for key, *_ in found:
        check_rule(unit.name, key)
    return found


def _overwrite(this: _Step, work: list[tuple[_Work, list[Span]]]) -> None:
    groups: dict[Any, tuple[list[Tensor], list[Tensor], list[list[Tensor]]]] = {}
    moved: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        away = [one for one in work if streams(one[0].columns)]
        if away:
            for one, _ in away:
                _refuse_dtypes(one)
            stream(_windows(this, away))
            work = [one for one in work if not streams(one[0].columns)]
        for one, spans in work:
            for key, start, stop in spans:
                kind = (key, one.unit.values.dtype, one.unit.values.device)
                ps, gs, slots = groups.setdefault(kind, ([], [], [[] for _ in this.rule.slots]))
                whole = (start, stop) == (0, one.unit.values.numel())
                every = [_real(x if whole else x[start:stop]) for x in (one.unit.values, one.grad, *one.slots)]
                _refuse_dtypes(one)
                for into, x in zip((ps, gs, *slots), _in_order(every, moved), strict=True):
                    into.append(x)
        for (key, *_), (ps, gs, slots) in groups.items():
            this.rule.in_place(ps, gs, slots, this.count, this.now | dict(key))
            torch.autograd.graph.increment_version([*ps, *(x for slot in slots for x in slot)])  # fused kernels do not
        for x, made in moved:
            x.copy_(made)


def _windows(this: _Step, work: list[tuple[_Work, list[Span]]]) -> Iterator[Window]:
    """What is not on the device, a few elements at a time."""
    for one, spans in work:
        columns = [_real(x) for x in one.columns]
        for key, start, stop in spans:
            own = this.now | dict(key)

            def move(some: list[Tensor], own: dict[str, Any] = own) -> None:
                p, g, *slots = some
                this.rule.in_place([p], [g], [[slot] for slot in slots], this.count, own)

            for a, b in windows_of(start, stop):
                yield Window([x[a:b] for x in columns], [True, False, *[True] * len(one.slots)], move)


def _in_order(every: list[Tensor], moved: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A parameter, its gradient and slots, all in one order in memory, in which fused kernels go through them.

    What lies in another order is copied, and but for the gradient to be copied back.
    """
    if all(x.is_contiguous() for x in every):
        return every
    p, _, *slots = every
    if all(x.stride() == p.stride() for x in every) and dense(p):
        return every
    found = [x.contiguous() for x in every]
    moved += [(x, made) for x, made in zip((p, *slots), (found[0], *found[2:]), strict=True) if x is not made]
    return found


def _refuse_dtypes(one: _Work) -> None:
    dtype = one.values.dtype
    for slot in one.slots:
        if slot.dtype != dtype:
            raise ValueError(
                f"{one.unit.name}: the parameter is {dtype}, but the state {slot.dtype}: cast both, or "
                f"make a new state by init(params)"
            )


def _replace_all(this: _Step, work: list[tuple[_Work, list[Span]]]) -> None:
    for one, spans in work:
        _replace(this, one, spans)


def _replace(this: _Step, one: _Work, spans: list[Span]) -> None:
    assert one.grad is not None
    now = {name: varied(number, one.unit) for name, number in this.now.items()}
    made: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    for key, start, stop in spans:
        whole = (start, stop) == (0, one.unit.values.numel())
        p, g, *slots = (_real(x if whole else x[start:stop]) for x in (one.unit.values, one.grad, *one.slots))
        own = {
            name: x[start:stop].view(-1, *(1,) * (p.ndim - 1)) if isinstance(x, Tensor) and x.ndim else x
            for name, x in now.items()
        }
        new, after = this.rule.pure(p, g, tuple(slots), this.count, own | dict(key))
        if one.unit.values.is_complex():
            new, after = torch.view_as_complex(new), tuple(map(torch.view_as_complex, after))
        made.append((new, after))
    where = [(start, stop) for _, start, stop in spans]
    inputs = [one.unit.values, one.grad, *one.slots, *(x for x in now.values() if isinstance(x, Tensor))]
    one.values = tied(joined([p for p, _ in made], one.unit, where), inputs)
    for i, old in enumerate(one.slots):
        stand = one.unit._replace(values=old)
        one.slots[i] = tied(joined([slots[i] for _, slots in made], stand, where), inputs)


# --- slots that are kept otherwise ---


def _overwrite_kept(this: _Step, work: list[tuple[_Work, list[Span]]]) -> None:
    """As `_overwrite`, a few elements at a time, of which the slots are opened, moved and closed again."""
    kept = this.kept
    assert kept is not None
    waiting: list[tuple[_Work, Opened]] = []
    with torch.no_grad():
        ordered = []
        for one, spans in work:
            _refuse_other_dtypes(one, kept)
            assert one.grad is not None
            # Kernels go by the order of elements, in which a parameter need not lie.
            ordered.append((one, spans, one.values.contiguous().view(-1), one.grad.contiguous().view(-1)))
        stream(
            _kept_window(this, kept, one, (p, g), part, this.now | dict(key), waiting)
            for one, spans, p, g in ordered
            for key, start, stop in spans
            for part in kept.chunks(one.unit, start, stop)
        )
        for one, _, p, _ in ordered:
            if p.data_ptr() != one.values.data_ptr():
                one.values.copy_(p.view(one.values.shape))
            torch.autograd.graph.increment_version([one.values])  # fused kernels do not
        closed = this.closed([opened for _, opened in waiting], together=True)
        for (one, opened), slots in zip(waiting, closed, strict=True):
            for stored, new in zip(one.slots, slots, strict=True):
                for x, place, part in zip(stored, kept.places(opened.part), new, strict=True):
                    x.view(-1)[place] = part


def _kept_window(
    this: _Step,
    kept: Kept,
    one: _Work,
    flat: tuple[Tensor, Tensor],
    part: Runs,
    now: dict[str, Any],
    waiting: list[tuple[_Work, Opened]],
) -> Window:
    """A few elements, and what is done to them; those that other ranks have to be asked about wait, opened."""
    n = len(kept.dtypes)

    def move(some: list[Tensor]) -> None:
        p, g, *parts = some
        dtype = wide(p)
        slots = [tuple(parts[i : i + n]) for i in range(0, len(parts), n)]
        numbers = [kept.opened(*each, part).to(dtype) for each in zip(this.rule.slots, slots, strict=True)]
        opened, moving = Opened(one.number, part, numbers), p.to(dtype)
        _move_all(this, [moving, g.to(dtype), *numbers], now)
        if moving is not p:
            p.copy_(moving)
        if not opened.ready:
            waiting.append((one, opened))
            return
        for x, new in zip(parts, itertools.chain.from_iterable(this.closed([opened], together=False)[0]), strict=True):
            x.copy_(new)

    columns = [x[part[0].start : part[-1].stop] for x in flat]
    for stored in one.slots:
        columns += [x.view(-1)[place] for x, place in zip(stored, kept.places(part), strict=True)]
    return Window(columns, [i != 1 for i in range(len(columns))], move)


def _move_all(this: _Step, columns: list[Tensor], now: dict[str, Any]) -> None:
    """Moves a vector of parameters, by one of gradients and those of the slots.

    On the CPU kernels round what remains behind whole vectors of the processor otherwise: it goes through them in
    such a vector of its own, so that an element moves by the same bits wherever ranks cut.
    """
    n = len(columns[0])
    rest = n % LANES if columns[0].device.type == "cpu" else 0
    groups = [[x[: n - rest] for x in columns]] if n > rest else []
    ends = [F.pad(x[n - rest :], (0, LANES - rest)) for x in columns] if rest else []
    groups += [ends] if rest else []
    ps, gs, *slots = (list(each) for each in zip(*groups, strict=True))
    this.rule.in_place(ps, gs, slots, this.count, now)
    for i, end in enumerate(ends):
        if i != 1:  # the gradient
            columns[i][n - rest :] = end[:rest]


def _replace_kept(this: _Step, work: list[tuple[_Work, list[Span]]]) -> None:
    """As `_replace_all`, on the numbers that slots stand for."""
    kept = this.kept
    assert kept is not None
    every: list[tuple[_Work, Opened]] = []
    for one, spans in work:
        _refuse_other_dtypes(one, kept)
        assert one.grad is not None
        part, values = kept.whole(one.unit), one.values
        start, stop = (part[0].start, part[-1].stop) if part else (0, 0)
        nothing = values.new_zeros(values.numel(), dtype=wide(values))
        slots = []
        for slot, stored in zip(this.rule.slots, one.slots, strict=True):
            opened = nothing[:0]
            if part:
                here = tuple(x.reshape(-1)[at] for x, at in zip(stored, kept.places(part), strict=True))
                opened = kept.opened(slot, here, part).to(nothing.dtype)
            slots.append(torch.cat((nothing[:start], opened, nothing[stop:])).view(values.shape))
        unit = one.unit._replace(values=values.to(nothing.dtype))
        moving = _Work(one.number, unit, one.grad.to(nothing.dtype), slots)
        _replace(this, moving, spans)
        one.values = moving.values.to(values.dtype)
        if part:  # a rank that has nothing takes part in derivatives nevertheless
            every.append((one, Opened(one.number, part, [x.reshape(-1)[start:stop] for x in moving.slots])))
    closed = this.closed([some for _, some in every], together=True)
    for (one, some), stored in zip(every, closed, strict=True):
        places = kept.places(some.part)
        for i, new in enumerate(stored):
            one.slots[i] = tuple(map(_with, one.slots[i], places, new))


def _with(x: Tensor, place: slice, new: Tensor) -> Tensor:
    """A tensor with some elements replaced."""
    flat = x.reshape(-1)
    return torch.cat((flat[: place.start], new, flat[place.stop :])).view(x.shape)


def _refuse_other_dtypes(one: _Work, kept: Kept) -> None:
    for stored in one.slots:
        found = tuple(x.dtype for x in stored)
        if found != kept.dtypes:
            raise ValueError(
                f"{one.unit.name}: the state is kept as {listed(kept.dtypes)}, but this one is "
                f"{listed(found)}: make a new state by init(params)"
            )


def _real(x: Tensor) -> Tensor:
    """Complex numbers as pairs, each of which moves by itself."""
    return torch.view_as_real(x) if x.is_complex() else x
