"""A machine: how fast its chips compute, and how long collectives take on the links between ranks.

Links are tables of bytes and seconds, for each number of ranks.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from shardfn.local_paths import local_path
from shardfn.plan.schedule import Work
from shardfn.quoting import listed, short

EFFICIENCY = 0.7
"""The part of a vendor's peak that operations reach, for arithmetic and for memory.

An assumption: AutoParallel (meta-pytorch/autoparallel, `cost_models/compute_estimation.py`) makes it of both, and takes
an operation to need 7 microseconds or more. `measure_chip` replaces it by what the device at hand reaches.
"""
_AS = {"float8_e5m2": "float8_e4m3fn", "complex64": "float32", "complex128": "float64"}  # computed as
Curve = tuple[tuple[float, float], ...]
"""Pairs of bytes that a rank sends and seconds, with bytes growing."""
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
_ALSO = {"ppermute": "send", "broadcast": "send"}


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
        names = ("bandwidth", "memory", "efficiency", "reach", "launch", "host")
        for name, figure in (figures | {name: getattr(self, name) for name in names}).items():
            seconds = name in ("launch", "host")
            if not isinstance(figure, (int, float)) or not (figure >= 0 if seconds else figure > 0):
                expected = "seconds, 0 or more" if seconds else "a positive number"
                chip = f"Chip {short(repr(self.name))}"
                raise ValueError(f"{chip}: {name} must be {expected}, got {short(repr(figure))}")

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
        local_path(path, "Chip.save: path").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Chip:
        """Reads what `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it holds something else.
        """
        try:
            return Chip(**json.loads(local_path(path, "Chip.load: path").read_text()))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"Chip.load: {path} holds no chip ({error}): Chip.save writes them") from error


@dataclass(frozen=True)
class Links:
    """Measured or stated times of collectives.

    Attributes:
        name: of the machine.
        source: where the figures are from.
        curves: for each operation, by `(nodes, ranks on each node)` that take part: times by the bytes that a rank
            sends, each piece counted once, as the ledger counts them.
        copying: bytes a second between a device and its host, in one direction.
    """

    name: str
    source: str
    curves: dict[str, dict[tuple[int, int], Curve]]
    copying: float

    def __post_init__(self) -> None:
        if not isinstance(self.copying, (int, float)) or not self.copying > 0:
            raise ValueError(
                f"Links {short(repr(self.name))}: copying must be a positive number of bytes a second, "
                f"got {short(repr(self.copying))}"
            )
        for operation, tables in self.curves.items():
            for spread, curve in tables.items():
                sizes = [size for size, _ in curve]
                if not curve or sizes != sorted(set(sizes)) or min(min(pair) for pair in curve) <= 0:
                    raise ValueError(
                        f"Links {self.name!r}: {operation} of {spread}: a table must be pairs of bytes and seconds, "
                        f"all positive, with bytes growing, got {short(curve)}"
                    )

    def seconds(self, operation: str, sent: float, ranks: int, nodes: int = 1) -> float:
        """Returns the time of one collective that has its links to itself.

        Times between table entries are interpolated between their logarithms: over bytes, over the ranks on a node, and
        over nodes. Fewer bytes than any entry take as long as the least, and more take longer in proportion. More ranks
        or nodes than any entry follow the slope of the last two entries.

        Args:
            operation: as the ledger names it.
            sent: bytes that this rank sends.
            ranks: that take part.
            nodes: over which these are spread evenly.

        Raises:
            ValueError: no table has this operation, within a node or between nodes, as asked.
        """
        if operation == "copy":
            return sent / self.copying
        if ranks < 2:
            return 0.0
        tables = self.curves.get(_ALSO.get(operation, operation))
        known = [] if tables is None else [spread for spread in tables if (spread[0] > 1) == (nodes > 1)]
        if tables is None or not known:
            where = "between nodes" if nodes > 1 else "within a node"
            spreads = ((name, spread) for name, by_spread in self.curves.items() for spread in by_spread)
            have = listed(f"{name} {spread[0]} x {spread[1]}" for name, spread in spreads)
            raise ValueError(
                f"links {self.name!r} have no times of {short(repr(operation))} {where}; they have (nodes x ranks on "
                f"each): {have or 'none'}. Measure them with measure_links on a mesh with such an axis"
            )
        sizes = [sent]
        if nodes > max(known)[0]:  # fewer bytes take no longer than more, to which they could be padded
            sizes += [size for size, _ in tables[max(known)] if size > sent]
        return min(_spread_over(tables, known, size, max(1.0, ranks / nodes), nodes) for size in sizes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tables as JSON, which `load` reads."""
        curves = {
            operation: {f"{nodes}x{per_node}": curve for (nodes, per_node), curve in tables.items()}
            for operation, tables in self.curves.items()
        }
        fields = {"name": self.name, "source": self.source, "copying": self.copying, "curves": curves}
        local_path(path, "Links.save: path").write_text(json.dumps(fields, indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Links:
        """Reads what `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it holds something else.
        """
        try:
            fields = json.loads(local_path(path, "Links.load: path").read_text())
            curves: dict[str, dict[tuple[int, int], Curve]] = {}
            for operation, tables in fields.pop("curves").items():
                for key, curve in tables.items():
                    nodes, _, per_node = key.partition("x")
                    curves.setdefault(operation, {})[int(nodes), int(per_node)] = tuple(map(tuple, curve))
            return Links(curves=curves, **fields)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(
                f"Links.load: {path} holds no tables of links ({error}): Links.save writes them"
            ) from error


def _spread_over(
    tables: dict[tuple[int, int], Curve], known: list[tuple[int, int]], sent: float, ranks: float, nodes: int
) -> float:
    """Returns the time on so many nodes with so many ranks on each."""
    by_ranks = []
    for per_node in sorted({per_node for _, per_node in known}):
        over = []
        for n in sorted(n for n, width in known if width == per_node):
            curve = tables[n, per_node]
            max_bytes, longest = curve[-1]
            over.append((n, longest * sent / max_bytes if sent >= max_bytes else _between(curve, sent)))
        by_ranks.append((per_node, _between(over, nodes)))
    return _between(by_ranks, ranks)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolates between the logarithms of points; beyond the last one with the last slope, if that rises."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    index = min(bisect([position for position, _ in points], x), len(points) - 1)
    (a, low), (b, high) = points[index - 1], points[index]
    slope = math.log(high / low) / math.log(b / a)
    if x > b:
        return high * (x / b) ** max(slope, 0.0)
    return low * (x / a) ** slope


def nodes_of(mesh: dict[str, int], rank: int, axis: Iterable[str], per_node: int) -> int:
    """Returns the number of nodes over which the ranks of a group along some axes are spread.

    Args:
        mesh: sizes of the axes, by name, in order; ranks are numbered row-major.
        rank: one of the ranks.
        axis: names of the axes.
        per_node: ranks on a node, numbered one after another.
    """
    strides, stride = dict[str, int](), 1
    for name, size in reversed(mesh.items()):
        strides[name] = stride
        stride *= size
    members = [rank - sum(rank // strides[name] % mesh[name] * strides[name] for name in axis)]
    for name in axis:
        members = [first + k * strides[name] for first in members for k in range(mesh[name])]
    return len({member // per_node for member in members})
