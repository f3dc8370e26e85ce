"""Settings of torch's allocators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardfn.compat import devices


def settings(before: str, knows: Callable[[str], bool], patch: pytest.MonkeyPatch) -> list[str]:
    """The settings that a torch of such a state is given."""
    given: list[str] = []

    def change(text: str) -> None:
        given.append(text)
        if not knows(text):
            raise RuntimeError(f"Unrecognized key in {text}")

    patch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: before)
    patch.setattr(torch._C, "_accelerator_setAllocatorSettings", change)
    devices.pin_exactly()
    return given


@pytest.mark.parametrize(
    ("before", "knows", "want"),
    [
        ("", True, ["pinned_max_round_threshold_mb:1"]),
        ("a:1,b:[2,3]", True, ["a:1,b:[2,3],pinned_max_round_threshold_mb:1"]),
        ("pinned_max_round_threshold_mb:64", True, []),
        ("a:1", False, ["a:1,pinned_max_round_threshold_mb:1", "a:1"]),
    ],
)
def test_pinned_memory_has_its_own_size(
    before: str, knows: bool, want: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings(before, lambda text: knows or "pinned" not in text, monkeypatch) == want


def test_torch_has_the_setting() -> None:
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        devices.pin_exactly()
        assert torch._C._accelerator_getAllocatorSettings().endswith("pinned_max_round_threshold_mb:1")
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
