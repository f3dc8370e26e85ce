"""Kernels are used only where they were compared."""

from __future__ import annotations

import warnings

import pytest
import torch

from shardfn.compat import trusted

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "_found", {})


def test_a_kernel_is_compared_once() -> None:
    calls: list[bool] = []

    def check() -> str:
        calls.append(torch.is_grad_enabled())
        return ""

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [trusted.trusted("a kernel", CPU, check) for _ in range(3)] == [True] * 3
    assert calls == [False]


@pytest.mark.parametrize("way", ["differs", "raises"])
def test_a_kernel_that_fails_is_warned_of_once_and_not_used(way: str) -> None:
    def check() -> str:
        if way == "raises":
            raise RuntimeError("no such image")
        return "dq is wrong by 0.5"

    said = {"differs": "dq is wrong by 0.5", "raises": "RuntimeError: no such image"}[way]
    with pytest.warns(RuntimeWarning, match=f"a kernel, on cpu, is not used: .*{said}") as caught:
        assert [trusted.trusted("a kernel", CPU, check) for _ in range(3)] == [False] * 3
    assert len(caught) == 1


def test_running_out_of_memory_says_nothing_of_a_kernel() -> None:
    def full() -> str:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        trusted.trusted("a kernel", CPU, full)
    assert trusted.trusted("a kernel", CPU, lambda: "")


def test_a_kernel_is_compared_on_plain_tensors_inside_transforms_and_fake_modes() -> None:
    def check() -> str:
        x = torch.ones(3)
        return "" if float(x.sum()) == 3 and x.untyped_storage().nbytes() else "no numbers"

    def inside(x: torch.Tensor) -> torch.Tensor:
        assert trusted.trusted("in a transform", CPU, check)
        return x.sum()

    torch.vmap(torch.func.grad(inside))(torch.ones(2, 3))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert trusted.trusted("in a fake mode", CPU, check)
