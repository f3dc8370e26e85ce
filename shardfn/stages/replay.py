"""Running a function again in backward: with the same random numbers, under the same autocast."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.check.bits import rounding
from shardfn.compat import functorch

SAMPLE = 2**16  # numbers of one tensor


class RngAndAutocast:
    """The state that a function may depend on in addition to its arguments, for running it again."""

    __slots__ = ("device", "generators", "numbers", "more", "autocast")  # noqa: RUF023

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self.device = device
        self.generators = [(one, one.get_state()) for one in generators]
        self.numbers = torch.get_rng_state()
        self.more = None if device.type == "cpu" else _module(device).get_rng_state(device)
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}

    @contextlib.contextmanager
    def uncached(self) -> Iterator[None]:
        """Autocast as it is, without its cache: that goes by tensors, which in a slot get other numbers."""
        with contextlib.ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same random numbers and the same autocast as then."""
        now = RngAndAutocast(self.device, [one for one, _ in self.generators])
        kinds = dict.fromkeys([*self.autocast, *now.autocast])
        self._restore()
        try:
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    on, dtype = kind in self.autocast, self.autocast.get(kind)
                    stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=False))
                yield
        finally:
            now._restore()

    def _restore(self) -> None:
        torch.set_rng_state(self.numbers)
        for one, state in self.generators:
            one.set_state(state)
        if self.more is not None:
            _module(self.device).set_rng_state(self.more, self.device)


class Off(NamedTuple):
    """A tensor in a result that differs from that of the first run.

    Attributes:
        number: which of them.
        kind: dtype and shape.
        part: of its norm, by which it differs.
    """

    number: int
    kind: str
    part: float


class Sample:
    """Some of the numbers that a function returned: all of a small tensor, and evenly spread ones of a large."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.parts = [None if x is None or not _compared(x) else _spread(x).clone() for x in tensors]

    def off(self, tensors: Sequence[Tensor]) -> Off | None:
        """The first tensor of another run that has other numbers, but for rounding; None if all have the same."""
        for number, (part, x) in enumerate(zip(self.parts, tensors, strict=True)):
            now = functorch.unwrapped(x.detach())
            if part is None or now.dtype != part.dtype:
                continue
            if (some := _spread(now)).shape == part.shape:
                apart = _apart(some, part)
                if not apart <= rounding(part):
                    return Off(number, f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}", apart)
        return None


def _compared(x: Tensor) -> bool:
    """Whether a tensor has numbers to compare; those of integers may differ by a tie that rounding decides."""
    return type(x) is Tensor and (x.is_floating_point() or x.is_complex()) and x.numel() > 0


def _spread(x: Tensor) -> Tensor:
    """Without a copy of the whole, which one that is not contiguous needs to be flat."""
    step = math.ceil(x.numel() / SAMPLE)
    for dim in range(x.ndim - 1, -1, -1) if not x.is_contiguous() else ():
        some = min(step, x.shape[dim])
        x, step = x.movedim(dim, 0)[::some].movedim(0, dim), math.ceil(step / some)
    return x.reshape(-1)[::step]


def _apart(now: Tensor, then: Tensor) -> float:
    """The norm of a difference, as a part of the larger norm; nan is the same as nan, and infinity as infinity."""
    wide = torch.complex128 if now.is_complex() else torch.float64
    now, then = now.to(wide), then.to(wide)
    same = (now == then) | (now.isnan() & then.isnan())
    found = torch.where(same, 0, now - then).norm() / torch.maximum(_norm(now), _norm(then))
    return 0.0 if bool(same.all()) else math.inf if bool(found.isnan()) else float(found)


def _norm(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0).norm()


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)
