"""The order of rows: every epoch a permutation, cut by ranks the same, found again at any step."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardfn.run.order import Order, permuted

orders = st.builds(
    Order,
    count=st.integers(1, 200),
    batch=st.sampled_from([4, 8, 12]),
    seed=st.integers(-(2**70), 2**70),
    shuffle=st.booleans(),
    remainder=st.sampled_from(["pad", "wrap"]),
    epochs=st.integers(1, 4),
)


def rows(order: Order, step: int) -> list[int]:
    return order.part(step, 0, order.batch).rows.tolist()


@given(count=st.integers(1, 3000), key=st.integers(0, 2**63))
def test_an_epoch_is_a_permutation(count: int, key: int) -> None:
    assert sorted(permuted(np.arange(count), count, key).tolist()) == list(range(count))


def test_a_place_in_a_long_order_takes_no_memory() -> None:
    found = permuted(np.arange(1000), 10**15, 7).tolist()
    assert len(set(found)) == 1000
    assert 0 <= min(found) < 10**13 < 9 * 10**14 < max(found) < 10**15


def test_all_orders_of_few_rows_come_equally_often() -> None:
    found = Counter(tuple(permuted(np.arange(4), 4, key).tolist()) for key in range(4800))
    assert len(found) == 24
    assert sum((n - 200) ** 2 / 200 for n in found.values()) < 60  # chi-square of 23 degrees of freedom


@given(order=orders)
def test_every_row_comes_once_in_each_epoch(order: Order) -> None:
    assert order.steps is not None
    parts = [order.part(step, 0, order.batch) for step in range(order.steps)]
    for epoch in range(order.epochs or 0):
        found = [
            row for part in parts for row, at, real in zip(*map(list, part), strict=True) if real and at == epoch
        ]  # fmt: skip
        assert [int(row) for row in sorted(found)] == list(range(order.count))


@given(order=orders, ranks=st.sampled_from([1, 2, 4]), steps=st.lists(st.integers(0, 10**6), min_size=20, max_size=20))
def test_ranks_cut_one_global_batch(order: Order, ranks: int, steps: list[int]) -> None:
    size = order.batch // ranks
    for step in steps:
        own: list[Any] = [order.part(step, rank * size, (rank + 1) * size).rows.tolist() for rank in range(ranks)]
        assert list(itertools.chain(*own)) == rows(order, step)


@given(order=orders, first=st.integers(0, 50), steps=st.integers(1, 20))
def test_steps_taken_together_are_those_taken_one_by_one(order: Order, first: int, steps: int) -> None:
    together = order.part(first, 1, 3, steps)
    alone = [order.part(step, 1, 3) for step in range(first, first + steps)]
    for mine, theirs in zip(together, zip(*alone, strict=True), strict=True):
        assert mine.tolist() == np.concatenate(theirs).tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    found = [tuple(rows(Order(64, 64, seed), epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(found)) == 9
    assert rows(Order(6, 4, 0, shuffle=False, remainder="wrap"), 1) == [4, 5, 0, 1]


def test_how_many_steps_there_are() -> None:
    kinds: list[Any] = ["drop", "pad", "wrap"]
    assert [Order(10, 4, 0, remainder=last, epochs=3).steps for last in kinds] == [6, 9, 8]
    assert Order(10, 4, 0).steps is None
    assert Order(10, 4, 0, remainder="pad").part(2, 0, 4).real.tolist() == [True, True, False, False]
