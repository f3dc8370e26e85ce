"""Which ranks and which calls draw the same numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardfn as sf
from shardfn.testing import world

SIZES = {"a": 2, "b": 2}


def drawn(seed: int, *what: Any) -> tuple[float, ...]:
    return tuple(torch.rand(3, generator=sf.fold_in(seed, *what), dtype=torch.float64).tolist())


def everywhere(*calls: tuple[Any, ...]) -> list[list[tuple[float, ...]]]:
    """Per rank of a 2 x 2 mesh, what each call draws."""

    def body() -> Any:
        mesh = sf.make_mesh(device="cpu", **SIZES)
        return sf.shard_map(lambda: [drawn(*call) for call in calls], mesh=mesh, in_specs=(), out_specs=...)()

    return world(4).run(body)


@pytest.mark.parametrize("axes", [(), ("a",), ("b",), ("a", "b"), ("b", "a")], ids=str)
@pytest.mark.parametrize("step", [(), (3,)], ids=["", "step"])
def test_ranks_differ_along_the_named_axes_and_agree_along_the_others(axes: Any, step: Any) -> None:
    found = [numbers for (numbers,) in everywhere((7, *step, *axes))]
    position = [dict(zip(SIZES, np.unravel_index(rank, (2, 2)), strict=True)) for rank in range(4)]
    for one, other in itertools.product(range(4), range(4)):
        together = all(position[one][axis] == position[other][axis] for axis in axes)
        assert (found[one] == found[other]) is together


def test_every_call_of_a_training_step_is_its_own_stream() -> None:
    calls: list[tuple[Any, ...]] = [
        (seed, step, layer, "a") for seed, step, layer in itertools.product(*[range(3)] * 3)
    ]
    calls += [(0,), (1,), (0, 0), (0, 1), (0, "a"), (0, "b"), (0, "a", "b"), (0, "a", 0), (0, 0, 0), (0, 1, 0), (-1,)]
    for numbers in everywhere(*calls):
        assert len(set(numbers)) == len(calls)


def test_a_tuple_of_axes_is_the_position_along_their_product() -> None:
    found = everywhere((0, ("a", "b")), (0, ("b", "a")), (0, "a", "b"), (0, ("a",)), (0, "a"))
    assert len({numbers for each in found for numbers in each[:3]}) == 3 * len(found)
    assert len({each[3] for each in found}) == len({each[4] for each in found}) == 2
    assert all(each[3] != each[4] for each in found)


def test_order_counts() -> None:
    for one, other, third, fourth in everywhere((0, 1, 2), (0, 2, 1), (0, "a", 5), (0, 5, "a")):
        assert one != other
        assert third != fourth


def test_an_axis_is_not_mistaken_for_an_int_or_for_another_axis() -> None:
    """Rank 1 of an axis must not draw what layer 1, or rank 1 of another axis, draws."""
    for rank, (axis_a, axis_b, *ints) in enumerate(everywhere((0, "a"), (0, "b"), (0, 0), (0, 1))):
        assert axis_a not in ints, f"rank {rank}"
        assert axis_b not in ints, f"rank {rank}"
        assert axis_a != axis_b


def test_the_same_call_draws_the_same_again_and_leaves_the_global_stream_alone() -> None:
    before = torch.random.get_rng_state()
    assert drawn(3, 1, 2) == drawn(3, 1, 2)
    assert torch.random.get_rng_state().equal(before)
    assert everywhere((3, "a"), (3, "a")) == everywhere((3, "a"), (3, "a"))
    torch.manual_seed(123)
    assert drawn(3, 1, 2) == drawn(3, 1, 2)


def test_the_stream_is_the_same_in_every_process_and_release() -> None:
    """A run that is resumed must go on with the numbers that it would have drawn."""
    assert sf.fold_in(0).initial_seed() == 7210762507766007076
    assert sf.fold_in(42, 3).initial_seed() == 347287857246984717


@given(st.integers(), st.lists(st.integers(-(2**70), 2**70), max_size=4))
def test_any_ints_are_a_seed(seed: int, parts: list[int]) -> None:
    generator = sf.fold_in(seed, *parts)
    assert 0 <= generator.initial_seed() < 2**63
    assert generator.initial_seed() == sf.fold_in(seed, *parts).initial_seed()
    assert generator.initial_seed() != sf.fold_in(seed + 1, *parts).initial_seed()
    assert generator.initial_seed() != sf.fold_in(seed, *parts, 0).initial_seed()


def test_integers_of_any_kind_are_the_same_seed() -> None:
    assert drawn(3, 4) == drawn(np.int64(3), np.int32(4)) == drawn(torch.tensor(3), torch.tensor(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [1.5, None, ("a", 1), torch.tensor(0.5), b"a"], ids=str)
def test_what_is_neither_an_axis_nor_an_int_is_refused(part: Any) -> None:
    with pytest.raises(TypeError, match="fold_in"):
        sf.fold_in(0, part)
