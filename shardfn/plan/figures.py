"""Figures of a plan: bytes on each tier, of each kind, and the table of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Bytes:
    """How many bytes of something a rank has where.

    Attributes:
        device: on the device that computes; on a mesh of CPUs also what is in the host's memory, which is the same.
        host: in the host's memory, where that is another.
        disk: in files, in whole blocks of 4096.
    """

    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.disk + other.disk)

    @property
    def total(self) -> int:
        """On all of them."""
        return self.device + self.host + self.disk


def together(some: Iterable[Bytes]) -> Bytes:
    """Their sum."""
    return sum(some, Bytes())


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank has during a step, by kind and tier, as `memory` counts them.

    The first three are there from the first step to the last, and exact. Of the others each one is the most that there
    is at once: `gathered` to the byte where the backward of every stage reads its parameters, the others at most.

    Attributes:
        parameters: this rank's pieces, padding included: elements that its layouts hold, times the bytes of one.
        gradients: of what is trained, as `value_and_grad` returns them, in the parameters' dtype: elements that the
            layouts of the state hold, times the bytes of one. One set of them: a loop that keeps the last ones while it
            computes new ones has two.
        state: the tensors of `optimizer.init(params)`.
        gathered: the ring, `1 + prefetch` buffers (or one for each stage, if there are fewer) of the size of the
            largest stage; in addition to these, of each stage that is not given back after forward, its whole size;
            and what `hpz` leaves for backward. The size of a stage is the sum over its buffers, each rounded up to
            512 bytes; of what need not be gathered, because it is whole here and in its own dtype, it is 0.
        decoded: what parameters in few bits are decoded to: the largest stage's, in the dtype that it computes with.
        reducing: what gradients take off from: for each of a stage's buffers two gradients of the largest stage, and
            two of what arrives; and where gradients go to another tier, three pieces of the largest one.
        moving: what reads and writes disks, through buffers of whole MiB: of parameters, those of `1 + 2 prefetch`
            stages; of gradients, three; of an optimizer's step, five stretches of 2^19 elements of each column that is
            on disk, of which there may be some for each size of the last stretch; and 9 MiB by which values were put
            there.
    """

    parameters: Bytes = Bytes()
    gradients: Bytes = Bytes()
    state: Bytes = Bytes()
    gathered: Bytes = Bytes()
    decoded: Bytes = Bytes()
    reducing: Bytes = Bytes()
    moving: Bytes = Bytes()

    @property
    def total(self) -> Bytes:
        """Of all kinds, by tier: what a step takes, but for activations and what functions compute with."""
        return together(getattr(self, one.name) for one in fields(self))

    def __str__(self) -> str:
        rows = {one.name: getattr(self, one.name) for one in fields(self)} | {"total": self.total}
        unit, name = (1e9, "GB") if self.total.total >= 1e10 else (1e6, "MB")
        lines = [f"{name + ' a rank':<12}" + "".join(f"{tier:>12}" for tier in ("device", "host", "disk"))]
        for kind, some in rows.items():
            cells = (f"{n / unit:.3f}" if n else "-" for n in (some.device, some.host, some.disk))
            lines.append(f"{kind:<12}" + "".join(f"{cell:>12}" for cell in cells))
        return "\n".join(lines)
