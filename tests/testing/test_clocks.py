"""The simulated device finds what a real one would leave to luck."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import late_checks
from shardfn.compat import process_groups
from shardfn.stages import gather, reduction
from shardfn.testing import simulated, world
from shardfn.tiers import activations

# --- programs of a few lines ---


def side() -> Any:
    return torch.get_device_module("sim").Stream()


def on(stream: Any) -> Any:
    return torch.get_device_module("sim").stream(stream)


@contextlib.contextmanager
def beside() -> Iterator[Any]:
    """Another stream, after what there is on this one."""
    stream = side()
    stream.wait_stream(torch.get_device_module("sim").current_stream())
    with on(stream):
        yield stream


def written_beside(x: Tensor) -> None:
    stream = side()
    with on(stream):
        x.mul_(2)


def written_beside_in_order(x: Tensor) -> None:
    stream, now = side(), torch.get_device_module("sim").current_stream()
    stream.wait_stream(now)
    with on(stream):
        x.mul_(2)
    now.wait_event(stream.record_event())
    x.add_(1)


def read_by_both(x: Tensor) -> None:
    with beside():
        x.sum()
    x.sum()


def read_and_written(x: Tensor) -> None:
    with beside():
        x.sum()
    x.add_(1)


def apart(x: Tensor) -> None:
    with beside():
        x[:2].add_(1)
    x[2:].add_(1)


def freed_early(x: Tensor) -> None:
    y = x * 2
    with beside():
        y.sum()
    del y


def freed_and_recorded(x: Tensor) -> None:
    y = x * 2
    with beside() as stream:
        y.sum()
    y.record_stream(stream)
    del y


def host_reads_early(x: Tensor) -> None:
    _ = torch.empty(4, pin_memory=True).copy_(x, non_blocking=True) + 1


def host_reads_in_time(x: Tensor) -> None:
    host = torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
    torch.get_device_module("sim").current_stream().synchronize()
    _ = host + 1


def host_writes_early(x: Tensor) -> None:
    host = torch.ones(4).pin_memory()
    x.copy_(host, non_blocking=True)
    host.zero_()


def host_asks(x: Tensor) -> None:
    host = torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
    event = torch.get_device_module("sim").current_stream().record_event()
    assert not event.query()
    while not event.query():
        x.mul(2)
    _ = host + 1


def collective_unwaited(x: Tensor) -> None:
    work = torch.distributed.all_reduce(x, async_op=True)
    x.add_(1)
    work.wait()


def collective_waited(x: Tensor) -> None:
    torch.distributed.all_reduce(x, async_op=True).wait()
    x.add_(1)


LUCK = [written_beside, read_and_written, freed_early, host_reads_early, host_writes_early, collective_unwaited]
ORDER = [written_beside_in_order, read_by_both, apart, freed_and_recorded, host_reads_in_time, host_asks,
         collective_waited]  # fmt: skip


def raced() -> dict[str, list[str]]:
    found, kept = {}, []
    with simulated(2) as device:
        for program in (*LUCK, *ORDER):
            x = torch.ones(4, device=device.name)
            kept.append(x)
            device.reset_counts()
            program(x)
            found[program.__name__] = device.races
    return found


def test_uses_that_nothing_orders_are_races_with_both_lines() -> None:
    found = world(1, "alone").run(raced)[0]
    for program in LUCK:
        races = found[program.__name__]
        assert any(race.count("test_clocks.py:") == 2 for race in races), (program.__name__, races)
    for program in ORDER:
        assert found[program.__name__] == [], program.__name__


# --- mutants of the library ---


class Ignored:
    """An event that nothing waits for."""

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def no_wait_for_events(patch: Any) -> None:
    patch.setattr(activations.Away, "_current_stream", lambda self: NoWaits(), raising=True)


class NoWaits(torch.Stream):
    """A stream that waits for no event."""

    def __new__(cls) -> NoWaits:
        now = torch.get_device_module("sim").current_stream()
        return super().__new__(cls, stream_id=now.stream_id, device_index=now.device.index, device_type=20)

    def wait_event(self, event: Any) -> None:
        pass


def no_wait_for_gathers(patch: Any) -> None:
    patch.setattr(gather, "arrived", lambda *args: None)


def flags_read_early(patch: Any) -> None:
    close = late_checks._PinnedRows.close

    def closed(page: Any) -> None:
        close(page)
        page.event = Ignored()

    patch.setattr(late_checks._PinnedRows, "close", closed)
    patch.setattr(late_checks.LateChecks, "add", Together.add)


class Together(late_checks.LateChecks):
    add_one = late_checks.LateChecks.add

    def add(self, x: Tensor, wrong: Any) -> None:
        Together.add_one(self, x, lambda row: str(row.sum().item())[:0])


def buffers_filled_early(patch: Any) -> None:
    start = process_groups.start_all_gather

    def early(*args: Any) -> Any:
        module = torch.get_device_module("sim")
        with module.stream(module.Stream()):  # which does not wait for what reads the buffer
            return start(*args)

    patch.setattr(process_groups, "start_all_gather", early)


def forgotten(name: str, value: Any, patch: Any) -> None:
    """A reduction on its way forgets something."""
    ahead = reduction.PendingReduction.ahead

    def forgets(self: Any, side: Any) -> None:
        ahead(self, side)
        setattr(self, name, value() if callable(value) else value)

    patch.setattr(reduction.PendingReduction, "ahead", forgets)


MUTANTS: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "a buffer is filled before it has been read": (buffers_filled_early, {}),
    "gradients overwrite what is still sent": (
        functools.partial(forgotten, "left", lambda: torch.get_device_module("sim").Event()),
        {},
    ),
    "gradients are freed while they are sent": (functools.partial(forgotten, "source", ()), {}),
    "activations are read before they are back": (no_wait_for_events, {"remat": sf.offload(above=0)}),
    "parameters are read before they are gathered": (no_wait_for_gathers, {}),
    "what arrived is looked at early": (flags_read_early, {}),
}


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"])


def trained(mutant: str, mutate: bool) -> list[str]:
    change, options = MUTANTS[mutant]
    with simulated(4) as device, pytest.MonkeyPatch.context() as patch:
        mesh, staged = sf.make_mesh(replica=2, shard=2, device=device.name), sf.stage(block, **options)
        placement = sf.hybrid_shard(shard="shard", replica="replica")
        params = sf.shard({"blocks": [{"w": torch.ones(8, 8)} for _ in range(4)]}, mesh, placement)
        x = torch.ones(4, 8, device=device.name)

        def loss(params: Any) -> Tensor:
            y = x
            for p in sf.layers(params["blocks"]):
                y = staged(p, y)
            return y.sum()

        if mutate:
            change(patch)
        summed = sf.accumulate(lambda params, _: loss(params), [x, x], defer="all")
        for _ in range(3):
            sf.value_and_grad(loss)(params)
            summed(params)
        return device.races


def orders(swapped: bool) -> list[dict[str, Any]]:
    """The collectives of two ranks, of which the second may begin with another."""
    found = []
    for rank in range(2):
        with simulated(2, rank) as device:
            mesh = sf.make_mesh(shard=2, device=device.name)
            x, y = torch.ones(2, device=device.name), torch.ones(4, device=device.name)

            def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                return sf.psum(x, "shard"), sf.psum(y, "shard")

            sf.shard_map(both, mesh=mesh, in_specs=..., out_specs=...)(*((y, x) if swapped and rank else (x, y)))
            found.append(dict(device.collectives))
    return found


def test_ranks_that_begin_with_different_collectives_are_told_apart() -> None:
    (alike,), (swapped,) = (world(1, "alone").run(orders, swap) for swap in (False, True))
    assert alike[0] == alike[1]
    assert swapped[0] != swapped[1]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_missing_wait_in_the_library_is_a_race(mutant: str) -> None:
    assert world(1, "alone").run(trained, mutant, False) == [[]]
    (races,) = world(1, "alone").run(trained, mutant, True)
    assert races
