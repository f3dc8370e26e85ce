"""Running a function again in backward: with the same random numbers, under the same autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


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


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)
