"""How fast a device computes: rates by dtype, memory, and what a launch takes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardfn.plans.schedule import Work
from shardfn.quoting import listed, short

EFFICIENCY = 0.7
"""The part of a vendor's peak that operations reach, for arithmetic and for memory.

An assumption: AutoParallel (meta-pytorch/autoparallel, `cost_models/compute_estimation.py`) makes it of both, and takes
an operation to need 7 microseconds or more. `measure_chip` replaces it by what the device at hand reaches.
"""


@dataclass(frozen=True)
class Chip:
    """A device.

    Attributes:
        name: of the device.
        source: where the figures are from.
        rates: the most floating-point operations a second, by dtype of the operands. Sparsity is not counted.
        bandwidth: the most bytes a second that its memory reads and writes.
        memory: bytes.
        efficiency: the part of the peak rates that operations reach.
        reach: the part of the peak bandwidth that operations reach.
        launch: the least seconds that an operation takes on the device.
        host: seconds that the host needs to issue an operation. 0: the host is never late, as with a graph.
    """

    name: str
    source: str
    rates: dict[str, float]
    bandwidth: float
    memory: int
    efficiency: float = EFFICIENCY
    reach: float = EFFICIENCY
    launch: float = 7e-6
    host: float = 0.0

    def __post_init__(self) -> None:
        figures = {f"rates[{dtype!r}]": rate for dtype, rate in self.rates.items()}
        figures |= {name: getattr(self, name) for name in ("bandwidth", "memory", "efficiency", "reach")}
        for name, figure in figures.items():
            if not isinstance(figure, (int, float)) or not figure > 0:
                raise ValueError(
                    f"Chip {short(repr(self.name))}: {name}={short(repr(figure))}; it is a positive number"
                )
        for name, least in (("launch", self.launch), ("host", self.host)):
            if not isinstance(least, (int, float)) or not least >= 0:
                raise ValueError(
                    f"Chip {short(repr(self.name))}: {name}={short(repr(least))}; it is seconds, 0 or more"
                )

    def seconds(self, work: Work) -> float:
        """Returns the time of computing: that of its arithmetic, of its memory traffic or of its launches.

        The longest of the three, as if each were hidden behind the longest.

        Raises:
            ValueError: a dtype has no rate.
        """
        arithmetic = sum(count / self.rate(dtype) for dtype, count in work.flops.items() if count)
        traffic = work.moved / (self.bandwidth * self.reach)
        return max(arithmetic / self.efficiency, traffic, work.launches * self.launch)

    def rate(self, dtype: str) -> float:
        """Returns the peak rate of a dtype.

        Raises:
            ValueError: it has none.
        """
        dtype = _AS.get(dtype, dtype)
        if dtype not in self.rates:
            raise ValueError(
                f"the chip {self.name!r} has no rate for {short(repr(dtype))}, only for {listed(self.rates)}: pass one "
                f"that has, with_rate({dtype!r}, FLOP/s)"
            )
        return self.rates[dtype]

    def with_rate(self, dtype: str, rate: float) -> Chip:
        """The same with another rate for a dtype, such as that of TensorFloat-32 for `"float32"`."""
        return replace(self, rates=self.rates | {dtype: rate})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the figures as JSON, which `load` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Chip:
        """Reads what `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it holds something else.
        """
        try:
            return Chip(**json.loads(Path(path).read_text()))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"Chip.load: {path} holds no chip ({error}): Chip.save writes them") from error


_AS = {"float8_e5m2": "float8_e4m3fn", "complex64": "float32", "complex128": "float64"}
