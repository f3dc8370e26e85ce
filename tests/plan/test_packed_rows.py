"""Plans of rows of documents over a context axis, whose numbers a plan does not know, and of windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from benchmarks import packed
from shardfn import parallel
from shardfn.testing import world

pytest.importorskip("transformers")

ROW = packed.Row((356, 800, 892), 2)  # documents that end inside of blocks, and that both ranks share
WHOLE, SHORT = packed.Row((2048,), 2), packed.Row((512,) * 4, 2)


def test_a_packed_row_holds_what_is_planned_and_the_host_waits_for_nothing() -> None:
    for plan, (most, rounded, waits) in zip(
        packed.of_each(packed.planned, ROW), packed.held_together(ROW), strict=True
    ):
        assert (plan.peak, plan.allocator) == (most, rounded)
        assert waits == []


def peaks(rows: list[packed.Row]) -> list[tuple[int, int]]:
    """For each row the peak that the plan of one rank says, and the one of a run."""
    return [(packed.planned(row, 0).peak, packed.held(row, 0)[0]) for row in rows]


def test_a_plan_of_documents_is_a_bound_and_that_of_one_is_exact() -> None:
    [(bound, most), (plan, held)] = world(1, "alone").with_deadline(100).run(peaks, [SHORT, WHOLE])[0]
    assert bound > most
    assert plan == held


def blocks_of_windows(one_by_one: bool) -> list[tuple[Any, ...]]:
    """For some masks the peak of a plan, and its operations."""
    found = []
    with pytest.MonkeyPatch.context() as patch, sf.plan.mode(4, 1):
        place = parallel.attention.__globals__
        patch.setitem(place, "TILE", 16)
        if one_by_one:
            patch.setitem(place, "_planned_blocks", lambda both, fused: [(x, 1) for x in both.blocks(fused)])
        mesh = sf.make_mesh(context=4)
        q, k = torch.zeros(1, 4, 128, 8), torch.zeros(1, 2, 128, 8)
        for balanced in (False, True):
            for window, softcap in ((40, None), (200, 0.5)):

                def loss(
                    q: Any, k: Any, window: Any = window, softcap: Any = softcap, balanced: bool = balanced
                ) -> torch.Tensor:
                    mask = parallel.Mask(window=window)
                    y = parallel.ring_attention(q, k, k, "context", mask=mask, softcap=softcap, balanced=balanced)
                    return y.sum()

                run = sf.shard_map(sf.grad(loss, (0, 1)), mesh=mesh, in_specs=..., out_specs=..., check=False)
                plan = sf.plan.step(run, q, k)
                counts = (sum(getattr(work, name) for work in plan.works) for name in ("moved", "launches", "sent"))
                found.append((plan.peak.total, plan.allocator, plan.flops(), *counts))
    return found


def test_blocks_of_a_kind_are_planned_once_and_count_as_all() -> None:
    run = world(1, "alone").run
    assert run(blocks_of_windows, False) == run(blocks_of_windows, True)
