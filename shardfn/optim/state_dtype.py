"""Stores optimizer state in 8 bits, or in another dtype than the parameter's.

Steps compute in float32 or wider, and round when they store: in 8 bits to the nearest code, in bfloat16
stochastically, so that changes too small for a single step are right on average over many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfn.optim.rounding import closed, refusing
from shardfn.quant import codes
from shardfn.quant.codes import Code
from shardfn.shards import blocks
from shardfn.shards.blocks import BlockRun, Runs, Said
from shardfn.shards.pieces import Unit, Units
from shardfn.shards.pieces import slot as slot_of

Stored = tuple[Tensor, ...]  # the tensors that store one slot of a unit
POSITIVE = ("square",)  # slots without negative numbers


@dataclass
class Opened:
    """Decoded elements of a unit, on which an optimizer works.

    Attributes:
        unit: index of the unit.
        part: the runs of elements.
        numbers: the numbers of each slot, as vectors.
    """

    unit: int
    part: Runs
    numbers: list[Tensor]

    @property
    def ready(self) -> bool:
        """Whether it can be closed without asking other ranks: it has no shared blocks."""
        return all(run.shared < 0 for run in self.part)


@dataclass(frozen=True)
class Coded:
    """Stores 8-bit codes, and for each block its largest magnitude, which the largest code stands for.

    Attributes:
        dtypes: dtypes of the tensors that store one slot of a unit.
    """

    dtypes = torch.uint8, torch.float32

    def init(self, leaves: Units, slots: Sequence[str]) -> dict[str, Any]:
        """The state's entries for slots that are zero: codes and scales."""

        def zeros(unit: Unit, slot: str) -> Stored:
            # The code of zero.
            zero = 0 if slot in POSITIVE else 127
            return slot_of(unit, dtype=torch.uint8, fill=zero), slot_of(unit, (blocks.num_blocks(unit),), torch.float32)

        stored = {slot: [zeros(u, slot) if u.trainable else None for u in leaves.each] for slot in slots}
        return self.entries(leaves, stored)

    def stored(self, leaves: Units, state: Any, slot: str) -> list[Stored | None]:
        """The tensors that store a slot of each unit: codes and scales."""
        rows = zip(leaves.values_in(state["codes"][slot]), blocks.blocks_of(leaves, state["scales"][slot]), strict=True)
        return [None if of_codes is None else (of_codes, scales) for of_codes, scales in rows]

    def entries(self, leaves: Units, slots: dict[str, list[Stored | None]]) -> dict[str, Any]:
        """The state's entries: trees of codes and trees of scales, by slot."""
        entries: dict[str, Any] = {"codes": {}, "scales": {}}
        for slot, stored in slots.items():
            of_codes, scales = zip(*(pair or (None, None) for pair in stored), strict=True) if stored else ((), ())
            entries["codes"][slot] = leaves.with_values(of_codes)
            entries["scales"][slot] = leaves.rebuilt(map(blocks.blocks_node, leaves.each, scales))
        return entries

    def chunks(self, unit: Unit, start: int, stop: int, max_elements: int) -> Sequence[Runs]:
        """Elements `start` to `stop` of a unit, in chunks of whole blocks, of at most this many elements."""
        return blocks.chunks(unit, start, stop, max_elements)

    def all_elements(self, unit: Unit) -> Runs:
        """All elements of a unit, as its blocks."""
        return blocks.runs(unit)

    def places(self, part: Runs) -> tuple[slice, ...]:
        """Returns the slices of a part in the stored tensors: in the codes, and in the scales."""
        last = part[-1]
        return slice(part[0].start, last.stop), slice(part[0].at, last.at + last.blocks)

    def decode(self, slot: str, stored: Stored, part: Runs) -> Tensor:
        """Decodes some elements, as a vector."""
        of_codes, scales = stored
        return blocks.times(_code(slot).decode(of_codes), scales, part)

    def closed(
        self, leaves: Units, slots: Sequence[str], decoded: Sequence[Opened], salt: Any, *, collective: bool
    ) -> list[list[Stored]]:
        """Encodes numbers: for each `Opened`, the tensors to store for each slot.

        With `collective`, all ranks call it once a step; without, a rank calls it alone, for what is `ready`.
        """
        del salt
        largest = [[blocks.largest(x.detach(), item.part) for x in item.numbers] for item in decoded]
        if collective:
            largest = self._agreed(leaves, len(slots), decoded, largest)
        closed: list[list[Stored]] = []
        for item, maxima in zip(decoded, largest, strict=True):
            closed.append([])
            for slot, x, maximum in zip(slots, item.numbers, maxima, strict=True):
                divisor = torch.where(maximum == 0, 1.0, maximum)
                scaled = _divided_by(x.detach().float(), divisor, item.part)
                closed[-1].append((_code(slot).encode(scaled), refusing(x, maximum)))
        return closed

    def _agreed(
        self, leaves: Units, slots: int, decoded: Sequence[Opened], largest: list[list[Tensor]]
    ) -> list[list[Tensor]]:
        """The largest magnitudes, agreed on with the ranks that share a block."""
        shared: list[tuple[int, int, int, Said]] = []
        for i, (item, maxima) in enumerate(zip(decoded, largest, strict=True)):
            for slot, maximum in enumerate(maxima):
                for run in item.part:
                    if run.shared >= 0:
                        index = run.at - item.part[0].at
                        shared.append((i, slot, index, Said(item.unit, slot, run.shared, maximum[index : index + 1])))
        answers = blocks.agreed(leaves, slots, [item for *_, item in shared])
        for (i, slot, index, _), answer in zip(shared, answers, strict=True):
            maximum = largest[i][slot]
            largest[i][slot] = torch.cat((maximum[:index], answer.to(maximum.device), maximum[index + 1 :]))
        return largest


def _code(slot: str) -> Code:
    return codes.positive if slot in POSITIVE else codes.dynamic


def _divided_by(x: Tensor, divisors: Tensor, part: Runs) -> Tensor:
    if len(part) == 1:
        return (x.view(part[0].blocks, -1) / divisors[:, None]).view(-1)
    spread = blocks.spread(divisors, part, x)
    return x / torch.where(spread == 0, 1.0, spread)  # where there is no block


@dataclass(frozen=True)
class Rounded:
    """Stores numbers in a dtype; bfloat16 is rounded stochastically, up or down, such that the mean is exact."""

    dtype: torch.dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the tensors that store one slot of a unit."""
        return (self.dtype,)

    def init(self, leaves: Units, slots: Sequence[str]) -> dict[str, Any]:
        """The state's entries for slots that are zero."""
        by_slot = {slot: [slot_of(u, dtype=self.dtype) if u.trainable else None for u in leaves.each] for slot in slots}
        return {slot: leaves.with_values(zeros) for slot, zeros in by_slot.items()}

    def stored(self, leaves: Units, state: Any, slot: str) -> list[Stored | None]:
        """The tensors that store a slot of each unit."""
        return [None if x is None else (x,) for x in leaves.values_in(state[slot])]

    def entries(self, leaves: Units, slots: dict[str, list[Stored | None]]) -> dict[str, Any]:
        """The state's entries: a tree of tensors for each slot."""
        return {slot: leaves.with_values(None if x is None else x[0] for x in stored) for slot, stored in slots.items()}

    def chunks(self, unit: Unit, start: int, stop: int, max_elements: int) -> Sequence[Runs]:
        """Elements `start` to `stop` of a unit, in chunks of at most this many elements."""
        begins = range(start, stop, max_elements)
        return [(BlockRun(begin, min(begin + max_elements, stop), 0, 0, -1),) for begin in begins]

    def all_elements(self, unit: Unit) -> Runs:
        """All elements of a unit."""
        n = unit.values.numel()
        return (BlockRun(0, n, 0, 0, -1),) if n else ()

    def places(self, part: Runs) -> tuple[slice, ...]:
        """Returns the slice of a part in the stored tensor."""
        return (slice(part[0].start, part[-1].stop),)

    def decode(self, slot: str, stored: Stored, part: Runs) -> Tensor:
        """The numbers of some elements, in float32."""
        del slot, part
        return stored[0].float()

    def closed(
        self, leaves: Units, slots: Sequence[str], decoded: Sequence[Opened], salt: Any, *, collective: bool
    ) -> list[list[Stored]]:
        """Rounds numbers: for each `Opened`, the tensors to store for each slot."""
        del slots, collective
        out: list[list[Stored]] = []
        for item in decoded:
            (run,) = item.part
            unit = leaves.each[item.unit]._replace(values=item.numbers[0])  # may be on another device
            out.append([(x,) for x in closed(unit, run.start, run.stop, item.numbers, self.dtype, salt)])
        return out


Kept = Coded | Rounded
"""A way to store slots: trees of tensors that encode numbers, and are entries of the optimizer's state."""
