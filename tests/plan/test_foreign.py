"""Programs as others write them send what their plans say."""

from __future__ import annotations

from collections import Counter

import pytest

from shardfn.testing import world
from tests.plan import foreign


@pytest.mark.parametrize("name", foreign.PROGRAMS)
def test_programs_send_what_is_planned(name: str) -> None:
    for rank, [run] in enumerate(world(2, "processes").with_deadline(120).run(foreign.ran, [name])):
        if rank == 0 or name.startswith("a pipeline"):  # where ranks differ
            [[plan]] = world(1, "alone").with_deadline(120).run(foreign.planned, [name], rank)
            if name.startswith("as few"):  # ranks compare their rows in a group apart from the axis's
                plan, run = ([(op, *rest) for op, _, *rest in calls] for calls in (plan, run))
            assert Counter(plan) == Counter(run)
            assert run


def test_loads_of_experts_are_taken_for_even() -> None:
    [(assumed, sent)] = world(1, "alone").run(foreign.assumed, "experts without a limit")
    assert [what.partition(" at ")[0] for what in assumed] == ["as many tokens for each expert"]
    # 16 choices of 8 numbers of 4 bytes, half of them to the other rank: there and back, and the gradient of the latter
    assert sent.count(16 * 8 * 4 // 2) == 3


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("experts, no token too many", "no token beyond the capacity"),
        ("ragged pieces", "ragged_all_to_all: from each rank comes as much as goes there"),
        ("as few micro-batches as fit", "accumulate: micro='auto' has 1 part"),
    ],
)
def test_what_depends_on_numbers_is_told(name: str, what: str) -> None:
    [(assumed, _)] = world(1, "alone").run(foreign.assumed, name)
    assert what in [each.partition(" at ")[0] for each in assumed]


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_no_attention_mask_is_held_that_a_run_does_not_make(name: str) -> None:
    assert world(1, "alone").run(foreign.masks, name) == [[]]
