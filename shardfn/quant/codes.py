"""Low-bit codes of numbers between -1 and 1, or in another range: encoding and decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.compat import devices, dispatch, dynamo, functorch

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # by their three bits; the fourth is the sign


@dataclass(frozen=True)
class Code:
    """A code.

    Attributes:
        name: its name in files and messages.
        bits: 4 or 8; 4-bit codes stand two to a byte, the first in the upper half.
        most: the largest number; `encode` takes numbers from `-most`, or 0, to `most`.
        encode: maps float32 numbers `[..., n]` to the nearest codes, as uint8 bytes.
        decode: maps bytes to the numbers of their codes, float32; with 4 bits, to an even count of them.
        keeps: whether a number above 0, however small, has not the code of 0.
    """

    name: str
    bits: int
    most: float
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    keeps: bool = False


def midpoints(numbers: Tensor, keeps: bool) -> Tensor:
    """The bounds between sorted numbers: a number has the code of the first whose upper bound it does not exceed."""
    between = (numbers[:-1] + numbers[1:]) / 2
    return between.masked_fill(numbers[:-1] == 0, 0) if keeps else between


def numbers(code: Code) -> Tensor:
    """The numbers of all codes, in the order of the codes, float32."""
    with _building_tables():
        if code.bits == 8:
            return code.decode(torch.arange(256, device="cpu").to(torch.uint8))
        return code.decode(torch.arange(16, device="cpu").to(torch.uint8) << 4)[::2]


@contextlib.contextmanager
def _building_tables() -> Iterator[None]:
    """Makes tensors inside plain ones on the CPU, which can be cached, whatever modes and transforms are active."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        functorch.outside_transforms(),
        dispatch.outside_modes(),
        torch.device("cpu"),
    ):
        yield


def _pack_pairs(codes: Tensor) -> Tensor:
    """4-bit codes, packed two to a byte."""
    even = codes if codes.shape[-1] % 2 == 0 else F.pad(codes, (0, 1))
    return even[..., ::2] << 4 | even[..., 1::2]


def _cached(make: Callable[[], tuple[Tensor, ...]]) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """Tables on each device that asks for them, cached unless a mode made its own, such as fake tensors.

    They are usable on every stream.
    """
    cache: dict[torch.device, tuple[Tensor, ...]] = {}
    devices.clears.append(cache.clear)

    def tables_on(device: torch.device) -> tuple[Tensor, ...]:
        if device in cache:
            return cache[device]
        with _building_tables():
            tables = make()
        if device.type != "cpu":
            with torch.inference_mode(False), torch.no_grad(), functorch.outside_transforms():
                tables = tuple(table.to(device) for table in tables)
        if dispatch.pretended() or all(type(table) is Tensor for table in tables):
            cache[device] = tables
        return tables

    return tables_on


class _CodeTable:
    """A table of numbers, whose codes are their indices; cached on each device that asks for it."""

    def __init__(self, values: Callable[[], Tensor], keeps: bool = False) -> None:
        self._values, self._keeps = values, keeps
        self._on = _cached(lambda: (values(),))
        self.bounds = _cached(self._between)
        self.jumps = _cached(self._by_halves)

        @dynamo.constant_when_traced
        def listed() -> tuple[tuple[float, ...], ...]:
            with _building_tables():
                parts = (values(), *self.bounds(torch.device("cpu")))
                return tuple(tuple(part.tolist()) for part in parts)

        self.listed = listed  # numbers, bounds and, if unsorted, order

    def values_of(self, codes: Tensor) -> Tensor:
        """The numbers of codes."""
        table = _constants(self.listed()[:1], codes)[0] if _traced() else self._on(codes.device)[0]
        return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)

    def _between(self) -> tuple[Tensor, ...]:
        """The midpoints between neighboring numbers; and, if the table is unsorted, the codes sorted by number."""
        values = self._values()
        order = torch.argsort(values)
        between = midpoints(values[order], self._keeps)
        return (between,) if bool((order.diff() == 1).all()) else (between, order.to(torch.uint8))

    def _by_halves(self) -> tuple[Tensor, ...]:
        """For each upper half of a float32: the smallest code of such numbers, and the bound among them, or inf.

        It requires that the table is sorted and so coarse that there is at most one such bound.
        """
        bounds = self.bounds(torch.device("cpu"))[0]
        halves = torch.arange(2**16, dtype=torch.int32, device="cpu") << 16
        ends = (torch.bucketize(x.view(torch.float32), bounds) for x in (halves, halves | 0xFFFF))
        smallest, greatest = torch.stack(tuple(ends)).aminmax(dim=0)
        bound = bounds[smallest.clamp(max=len(bounds) - 1)].masked_fill(smallest == greatest, torch.inf)
        return smallest.to(torch.uint8), bound


def _traced() -> bool:
    """Whether torch.compile traces, in which case the cached tensors must not enter the graph."""
    return torch.compiler.is_compiling()


def _constants(listed: tuple[tuple[float, ...], ...], template: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(row, dtype=torch.float32, device=template.device) for row in listed)


def _tabled(name: str, bits: int, values: Callable[[], Tensor], keeps: bool = False) -> Code:
    """The code of a table of numbers, of which the largest is 1."""
    table = _CodeTable(values, keeps)
    if bits == 8:
        return Code(name, 8, 1.0, lambda x: _looked_up(x, table), table.values_of, keeps)
    return Code(name, 4, 1.0, lambda x: _pack_pairs(_nearest_codes(x, table)), _of_pairs(values))


def _looked_up(x: Tensor, table: _CodeTable) -> Tensor:
    """The codes of a sorted 8-bit table nearest to `x`."""
    if _traced():
        return torch.bucketize(x, _constants(table.listed()[1:2], x)[0]).to(torch.uint8)
    smallest, bound = table.jumps(x.device)
    flat = x.reshape(-1)
    half = (flat.view(torch.int32) >> 16) & 0xFFFF
    return (smallest.index_select(0, half) + (flat > bound.index_select(0, half))).view(x.shape)


def _nearest_codes(x: Tensor, table: _CodeTable) -> Tensor:
    """The codes of a 4-bit table nearest to `x`: so few bounds are faster compared than searched."""
    between, *order = _constants(table.listed()[1:], x) if _traced() else table.bounds(x.device)
    place = (x > between[0]).to(torch.uint8)  # derived from x: batched by vmap if x is
    for bound in between[1:]:
        place += x > bound
    return order[0].to(torch.uint8)[place.int()] if order else place


def _of_pairs(values: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that decodes both codes of a byte at once: each pair of float32 numbers is one 64-bit table entry."""
    singles = _CodeTable(values)
    pairs = _CodeTable(lambda: torch.cartesian_prod(values(), values()).view(torch.float64).view(-1))

    def decode(codes: Tensor) -> Tensor:
        if _traced():
            return singles.values_of(torch.stack((codes >> 4, codes & 15), -1)).flatten(-2)
        return pairs.values_of(codes).view(torch.float32)

    return decode


def _stepped(name: str, bits: int) -> Code:
    """The whole numbers from `-limit` to `limit`."""
    limit = float(2 ** (bits - 1) - 1)

    def encode(x: Tensor) -> Tensor:
        return x.round().to(torch.int8).view(torch.uint8)

    if bits == 8:
        return Code(name, 8, limit, encode, lambda codes: codes.view(torch.int8).float())

    def numbers() -> Tensor:
        return torch.arange(16, device="cpu").add(8).remainder(16).sub(8).to(torch.float32)

    return Code(name, 4, limit, lambda x: _pack_pairs(encode(x) & 15), _of_pairs(numbers))


def _float8_code(name: str, dtype: torch.dtype) -> Code:
    """The numbers of an 8-bit floating-point dtype."""
    table = _CodeTable(lambda: torch.arange(256, device="cpu").to(torch.uint8).view(dtype).to(torch.float32))
    return Code(name, 8, torch.finfo(dtype).max, lambda x: x.to(dtype).view(torch.uint8), table.values_of)


def _dynamic(signed: bool) -> Tensor:
    """bitsandbytes' dynamic map, finer for larger numbers: leading bits give the exponent, the others the fraction."""
    parts = [torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i + (0 if signed else 1)) + 1, dtype=torch.float32, device="cpu")
        centers = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        parts += [centers, -centers] if signed else [centers]
    return torch.cat(parts).sort().values


nf4 = _tabled("nf4", 4, lambda: torch.tensor(NF4, dtype=torch.float32, device="cpu"))
fp4 = _tabled("fp4", 4, lambda: torch.tensor((*FP4, *(-x for x in FP4)), dtype=torch.float32, device="cpu") / 12)
int4 = _stepped("int4", 4)
int8 = _stepped("int8", 8)
fp8_e4m3 = _float8_code("fp8_e4m3", torch.float8_e4m3fn)
fp8_e5m2 = _float8_code("fp8_e5m2", torch.float8_e5m2)
dynamic = _tabled("dynamic", 8, lambda: _dynamic(True))
positive = _tabled("positive", 8, lambda: _dynamic(False), keeps=True)  # of what one divides by
