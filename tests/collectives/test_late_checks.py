"""Checks of what arrives on a device: made later, on the host, and never of what was called off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import quant
from shardfn.collectives import late_checks
from shardfn.testing import simulated, world

WHOLE: dict[str, Any] = {}
FEW_BITS = {"gather_format": quant.int8(64), "reduce_format": quant.int8(64)}


def block(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def loss(names: str, layer: Any) -> Callable[[Any, Tensor], Tensor]:
    def run(params: Any, x: Tensor) -> Tensor:
        for name in names:
            x = layer(params[name], x)
        return x.square().sum()

    return run


def met(store: str, names: tuple[str, str], options: dict[str, Any], then: str) -> tuple[str, int, int]:
    """What a rank hears that runs stages in its own order, for how much the host waited, and the number of races."""
    place = dist.FileStore(store, 2)  # type: ignore[attr-defined]
    rank = place.add("ranks", 1) - 1
    with simulated(2, rank, store=place) as device:
        mesh, layer = sf.make_mesh(shard=2, device=device.name), sf.stage(block, **options)
        whole = {name: {"w": torch.ones(4, 4) * i} for i, name in enumerate("abc")}
        params, x = sf.shard(whole, mesh, sf.full_shard("shard")), torch.ones(2, 4, device=device.name)
        sf.value_and_grad(loss("abc", layer))(params, x)  # the stages are compared
        late_checks.late_checks().read(wait=True)
        device.reset_counts()
        sf.value_and_grad(loss(names[rank], layer))(params, x)
        waited = len(device.synchronizations)
        try:
            if then == "called off":
                late_checks.drop_checks()
            if then == "the next steps":
                for _ in range(4):
                    sf.value_and_grad(loss("abc", layer))(params, x)
            late_checks.late_checks().read(wait=True)
        except RuntimeError as error:
            return str(error), waited, len(device.races)
    return "", waited, len(device.races)


def heard(tmp_path: Path, *args: Any) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = world(2, "alone").run(met, str(tmp_path / "store"), *args)
    return found


@pytest.mark.parametrize("options", [WHOLE, FEW_BITS], ids=["whole", "few bits"])
def test_ranks_that_run_different_stages_hear_of_it_when_the_device_has_got_there(tmp_path: Path, options: Any) -> None:
    found = heard(tmp_path, ("abc", "acb"), options, "waits")
    messages = [message for message, _, _ in found if message]
    assert messages
    for message in messages:
        assert "ranks run different stages" in message or "ranks sum the gradients of different stages" in message
        assert "found when the device had got there" in message
    assert [rest for _, *rest in found] == [[0, 0]] * 2


@pytest.mark.parametrize("options", [WHOLE, FEW_BITS], ids=["whole", "few bits"])
def test_an_attempt_that_is_called_off_is_not_judged(tmp_path: Path, options: Any) -> None:
    assert heard(tmp_path, ("abc", "acb"), options, "called off") == [("", 0, 0)] * 2


@pytest.mark.parametrize("options", [WHOLE, FEW_BITS], ids=["whole", "few bits"])
def test_ranks_that_run_the_same_hear_nothing_and_wait_for_nothing(tmp_path: Path, options: Any) -> None:
    assert heard(tmp_path, ("abc", "abc"), options, "the next steps") == [("", 0, 0)] * 2
