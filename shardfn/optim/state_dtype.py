"""How an optimizer keeps what it remembers of each element: in 8 bits, or in another dtype than the parameter's.

It computes in float32, or wider. What it has computed is rounded when it is put back: in 8 bits to the nearest code,
in bfloat16 at random, so that the mean over many steps is right where a small change would be lost in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import dynamo, functorch
from shardfn.optim.differentiable import differentiable
from shardfn.quant import codes
from shardfn.quant.codes import Code
from shardfn.shards import blocks
from shardfn.shards.blocks import CHUNK, Run, Runs, Said
from shardfn.shards.pieces import Unit, Units
from shardfn.shards.pieces import slot as slot_of
from shardfn.shards.random import mixed

Stored = tuple[Tensor, ...]  # what is kept of a unit in one slot
POSITIVE = ("square",)  # slots without negative numbers


@dataclass
class Opened:
    """Elements that an optimizer works on: a unit by its number, which part of it, and new numbers by slot."""

    unit: int
    part: Runs
    numbers: list[Tensor]

    @property
    def ready(self) -> bool:
        """Whether it can be closed without asking other ranks."""
        return all(one.shared < 0 for one in self.part)


@dataclass(frozen=True)
class Coded:
    """Codes of 8 bits, and for each block its largest magnitude, which the largest code stands for.

    Attributes:
        dtypes: of the tensors that are kept of a unit in one slot.
    """

    dtypes = torch.uint8, torch.float32

    def init(self, known: Units, slots: Sequence[str]) -> dict[str, Any]:
        """The entries of slots that are zero: codes and scales."""

        def zeros(unit: Unit, slot: str) -> Stored:
            zero = 0 if slot in POSITIVE else 127
            return slot_of(unit, dtype=torch.uint8, fill=zero), slot_of(unit, (blocks.count(unit),), torch.float32)

        return self.entries(
            known, {slot: [zeros(u, slot) if u.trainable else None for u in known.each] for slot in slots}
        )

    def stored(self, known: Units, state: Any, slot: str) -> list[Stored | None]:
        """What a slot has of each unit: codes and scales."""
        each = zip(known.beside(state["codes"][slot]), blocks.beside(known, state["scales"][slot]), strict=True)
        return [None if of_codes is None else (of_codes, scales) for of_codes, scales in each]

    def entries(self, known: Units, slots: dict[str, list[Stored | None]]) -> dict[str, Any]:
        """The entries of the optimizer's state: trees of codes, and trees of scales, by slot."""
        entries: dict[str, Any] = {"codes": {}, "scales": {}}
        for slot, stored in slots.items():
            of_codes, scales = zip(*(one or (None, None) for one in stored), strict=True) if stored else ((), ())
            entries["codes"][slot] = known.like(of_codes)
            entries["scales"][slot] = known.rebuilt(map(blocks.like, known.each, scales))
        return entries

    def chunks(self, unit: Unit, start: int, stop: int) -> Sequence[Runs]:
        """Elements `start` to `stop` of a unit, a few at a time: whole blocks."""
        return blocks.chunks(unit, start, stop)

    def whole(self, unit: Unit) -> Runs:
        """All elements of a unit, as its blocks."""
        return blocks.runs(unit)

    def places(self, part: Runs) -> tuple[slice, ...]:
        """Where in what is stored this part is: of its codes, and of its scales."""
        last = part[-1]
        return slice(part[0].start, last.stop), slice(part[0].at, last.at + last.blocks)

    def opened(self, slot: str, stored: Stored, part: Runs) -> Tensor:
        """The numbers of some elements, as a vector."""
        of_codes, scales = stored
        return blocks.times(_code(slot).decode(of_codes), scales, part)

    def closed(
        self, known: Units, slots: Sequence[str], every: Sequence[Opened], salt: Any, *, together: bool
    ) -> list[list[Stored]]:
        """What is to be kept of numbers: for each `Opened`, what replaces that part in each slot.

        `together` all ranks call it once in a step; by itself a rank calls it for what is `ready`.
        """
        del salt
        largest = [[blocks.largest(x.detach(), one.part) for x in one.numbers] for one in every]
        if together:
            largest = self._agreed(known, len(slots), every, largest)
        found: list[list[Stored]] = []
        for one, tops in zip(every, largest, strict=True):
            found.append([])
            for slot, x, top in zip(slots, one.numbers, tops, strict=True):
                divisor = torch.where(top == 0, 1.0, top)
                scaled = _over(x.detach().float(), divisor, one.part)
                found[-1].append((_code(slot).encode(scaled), _refusing(x, top)))
        return found

    def _agreed(
        self, known: Units, slots: int, every: Sequence[Opened], largest: list[list[Tensor]]
    ) -> list[list[Tensor]]:
        """With what other ranks have of the same blocks."""
        asked: list[tuple[int, int, int, Said]] = []
        for i, (one, tops) in enumerate(zip(every, largest, strict=True)):
            for slot, top in enumerate(tops):
                for run in one.part:
                    if run.shared >= 0:
                        at = run.at - one.part[0].at
                        asked.append((i, slot, at, Said(one.unit, slot, run.shared, top[at : at + 1])))
        answers = blocks.agreed(known, slots, [one for *_, one in asked])
        for (i, slot, at, _), answer in zip(asked, answers, strict=True):
            top = largest[i][slot]
            largest[i][slot] = torch.cat((top[:at], answer.to(top.device), top[at + 1 :]))
        return largest


def _code(slot: str) -> Code:
    return codes.positive if slot in POSITIVE else codes.dynamic


def _over(x: Tensor, divisors: Tensor, part: Runs) -> Tensor:
    if len(part) == 1:
        return (x.view(part[0].blocks, -1) / divisors[:, None]).view(-1)
    spread = blocks.spread(divisors, part, x)
    return x / torch.where(spread == 0, 1.0, spread)  # where there is no block


@dataclass(frozen=True)
class Rounded:
    """In a dtype; in bfloat16 rounded at random, to the one or the other neighbour, so that the mean is right."""

    dtype: torch.dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Its own."""
        return (self.dtype,)

    def init(self, known: Units, slots: Sequence[str]) -> dict[str, Any]:
        """Zeros."""
        each = {slot: [slot_of(u, dtype=self.dtype) if u.trainable else None for u in known.each] for slot in slots}
        return {slot: known.like(zeros) for slot, zeros in each.items()}

    def stored(self, known: Units, state: Any, slot: str) -> list[Stored | None]:
        """The tensors."""
        return [None if x is None else (x,) for x in known.beside(state[slot])]

    def entries(self, known: Units, slots: dict[str, list[Stored | None]]) -> dict[str, Any]:
        """A tree of tensors for each slot."""
        return {slot: known.like(None if one is None else one[0] for one in stored) for slot, stored in slots.items()}

    def chunks(self, unit: Unit, start: int, stop: int) -> Sequence[Runs]:
        """In order."""
        return [(Run(at, min(at + CHUNK, stop), 0, 0, -1),) for at in range(start, stop, CHUNK)]

    def whole(self, unit: Unit) -> Runs:
        """All."""
        n = unit.values.numel()
        return (Run(0, n, 0, 0, -1),) if n else ()

    def places(self, part: Runs) -> tuple[slice, ...]:
        """Of the elements."""
        return (slice(part[0].start, part[-1].stop),)

    def opened(self, slot: str, stored: Stored, part: Runs) -> Tensor:
        """In float32."""
        del slot, part
        return stored[0].float()

    def closed(
        self, known: Units, slots: Sequence[str], every: Sequence[Opened], salt: Any, *, together: bool
    ) -> list[list[Stored]]:
        """Rounded."""
        del slots, together
        found: list[list[Stored]] = []
        for one in every:
            (run,) = one.part
            unit = known.each[one.unit]._replace(values=one.numbers[0])  # which may not be where it is kept
            bits = drawn(unit, run.start, run.stop, len(one.numbers), salt)
            found.append([(closed_to(x, self.dtype, some),) for x, some in zip(one.numbers, bits, strict=True)])
        return found


Kept = Coded | Rounded
"""A way to keep slots: trees of tensors that stand for numbers, and are entries of the optimizer's state."""


# --- rounding at random ---


def rounded(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Numbers in `dtype`; in bfloat16 the lower or the upper neighbour, as often as it is near.

    Args:
        x: floating-point numbers.
        dtype: bfloat16, or one that is at least as wide as float32, which needs no rounding.
        bits: of the same shape, int32 from 0 to below 2^16, evenly spread.
    """
    if dtype != torch.bfloat16:
        return x.to(dtype)
    wide = x.float()
    up = ((wide.view(torch.int32) + bits) & -(2**16)).view(torch.float32)
    return torch.where(wide.isfinite(), up, wide).to(dtype)


def closed_to(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """As `rounded`; a derivative through it is an error."""
    return _refusing(x, rounded(x.detach(), dtype, bits))


def drawn(unit: Unit, start: int, stop: int, n: int, salt: Any) -> Iterator[Tensor]:
    """Random bits for elements of a unit, as `rounded` takes them, `n` times.

    They depend on the salt, the parameter's name and the element's place in it, and on nothing else: they are the same
    on all ranks that have the element, and however many there are.
    """
    for first in range(0, n, 2):
        both = _hashed(_places(unit, start, stop, (*salt, first)))
        yield both & 0xFFFF
        if first + 1 < n:
            yield (both >> 16) & 0xFFFF


def _places(unit: Unit, start: int, stop: int, salt: tuple[Any, ...]) -> Tensor:
    """A number for each element, int32: its place in its parameter, times one and plus another that the salt gives."""
    rows, last, device = [], start, unit.values.device
    for one in unit.filled:
        low, high = max(one.start, start), min(one.stop, stop)
        if low >= high:
            continue
        if last < low:
            rows.append(torch.zeros(low - last, dtype=torch.int32, device=device))
        factor, more = _keys(salt, one.path, one.corner)
        begin = one.first + low - one.start
        wide = torch.int32 if begin + high - low < 2**31 else torch.int64
        place = torch.arange(begin, begin + high - low, dtype=wide, device=device).to(torch.int32)
        rows.append(place.mul_(factor).add_(more))
        last = high
    if last < stop:
        rows.append(torch.zeros(stop - last, dtype=torch.int32, device=device))
    return torch.cat(rows) if len(rows) > 1 else rows[0]


@dynamo.constant_when_traced
def _keys(salt: tuple[Any, ...], path: str, corner: tuple[int, ...]) -> tuple[int, int]:
    key = mixed(*salt, path, *corner)
    return (key & 0x7FFFFFFF) | 1, (key >> 31) & 0x7FFFFFFF


def _hashed(x: Tensor) -> Tensor:
    """Each number's bits mixed, such that every bit depends on all of them: "lowbias32" of Wellons (2018)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x.mul_(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x


# --- derivatives ---


def _refusing(x: Tensor, kept: Tensor) -> Tensor:
    """What is kept of numbers. A derivative through it is an error: that of rounding is 0, which nobody means."""
    if torch.compiler.is_compiling():  # a graph cannot wait and see
        if (torch.is_grad_enabled() and x.requires_grad) or _inside():
            dynamo.refuse_in_graph(f"in a graph of torch.compile, {REFUSED}")
        return kept
    return _Refusing.apply(x, kept) if differentiable(x) else kept  # type: ignore[no-untyped-call]


@dynamo.constant_when_traced
def _inside() -> bool:
    return functorch.inside_transform() or functorch.inside_forward_mode()


class _Refusing(torch.autograd.Function):
    """`kept`, as a result of `x`."""

    @staticmethod
    def forward(x: Tensor, kept: Tensor) -> Tensor:
        return kept.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _refuse()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse()

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, kept: Tensor) -> Any:
        """One call, of all."""
        return _Refusing.apply(x if dims[0] is None else x.movedim(dims[0], 0), kept), dims[1]  # type: ignore[no-untyped-call]


def _refuse() -> None:
    raise NotImplementedError(REFUSED)


REFUSED = (
    "a derivative through what an optimizer rounded, its state in few bits or its parameters by stochastic_rounding: "
    "rounding has none. Differentiate a single step of an optimizer with such a state, and any number of steps of one "
    "that keeps all in the parameters' dtype, such as adamw(..., donate=False)"
)
