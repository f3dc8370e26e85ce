"""Programs as others write them send what their plans say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shardfn.testing import world
from tests.plans import foreign

# A CPU differentiates on the caller's thread, where the mesh is in scope, and a device on one of autograd's.
WITHOUT_AXES = ("a product with the Hessian",)


@pytest.mark.parametrize("name", foreign.PROGRAMS)
def test_programs_send_what_is_planned(name: str) -> None:
    [[plan]] = world(1, "alone").within(120).run(foreign.planned, [name])
    [run], _ = world(2, "processes").within(120).run(foreign.ran, [name])

    def told(call: Any) -> Any:
        return (call[0], *call[2:]) if name in WITHOUT_AXES else call

    assert Counter(map(told, plan)) == Counter(map(told, run))
    assert run


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_no_attention_mask_is_held_that_a_run_does_not_make(name: str) -> None:
    assert world(1, "alone").run(foreign.masks, name) == [[]]
