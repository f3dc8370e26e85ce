"""What `run` means, on every kind of world."""

import functools
import os
import threading
import warnings

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch.distributed.device_mesh import init_device_mesh

from shardfn.testing import World, WorldError, world

REAL = [(1, "processes"), (2, "processes"), (4, "processes"), (1, "threads"), (4, "threads")]
ALL = [*REAL, (8, "fake")]


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def summed(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    x = x * scale
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize("world", REAL, indirect=True)
def test_results_come_in_rank_order(world):
    assert world.run(rank_and_size) == [(rank, world.size) for rank in range(world.size)]


@pytest.mark.parametrize("world", REAL, indirect=True)
def test_collectives_move_values(world):
    for result in world.run(summed, torch.arange(3.0), scale=2.0):
        assert result.tolist() == [0.0, 2.0 * world.size, 4.0 * world.size]


@pytest.mark.parametrize("world", REAL, indirect=True)
def test_subgroups_and_meshes_work(world):
    def body():
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
        x = torch.tensor([float(mesh.get_local_rank())])
        dist.all_reduce(x, group=mesh.get_group("shard"))
        return x.item()

    world_size = world.size
    assert world.run(body) == [sum(range(world.size))] * world.size


@pytest.mark.parametrize("world", ALL, indirect=True)
@pytest.mark.parametrize(
    "function",
    [lambda x, y: x + y, functools.partial(lambda y, x: x + y, 2), torch.add, max, "{}{}".format],
    ids=["lambda", "partial", "builtin", "python builtin", "bound method"],
)
def test_any_callable_can_run(world, function):
    first, second = (torch.tensor(1.0), torch.tensor(2.0)) if function is torch.add else (1, 2)
    expected = function(first) if isinstance(function, functools.partial) else function(first, second)
    arguments = (first,) if isinstance(function, functools.partial) else (first, second)
    assert world.run(function, *arguments) == [expected] * len(world.ranks)


@pytest.mark.parametrize("world", ALL, indirect=True)
def test_closures_carry_copies_and_share_nothing(world):
    x = torch.zeros(2)
    calls = []

    def body(y):
        calls.append(1)
        x.add_(1)
        y.add_(2)
        return x, y, len(calls)

    y = torch.zeros(2)
    for seen_x, seen_y, count in world.run(body, y):
        assert (seen_x.tolist(), seen_y.tolist(), count) == ([1, 1], [2, 2], 1)
    assert (x.tolist(), y.tolist(), calls) == ([0, 0], [0, 0], [])


@pytest.mark.parametrize("world", ALL, indirect=True)
def test_every_run_starts_in_the_same_state(world):
    def spoil():
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)

    def draw():
        return torch.get_default_dtype(), torch.is_grad_enabled()

    before = torch.random.get_rng_state()
    world.run(spoil)
    assert world.run(draw) == [(torch.float32, True)] * len(world.ranks)
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.random.get_rng_state(), before)


def test_random_numbers_are_those_of_seed_zero():
    expected = torch.randn(3, generator=torch.Generator().manual_seed(0))
    for kind in ("processes", "fake"):
        for _ in range(2):
            assert torch.equal(world(2, kind).run(torch.randn, 3)[0], expected)


@pytest.mark.parametrize("world", REAL, indirect=True)
def test_a_warning_that_is_an_error_here_is_an_error_there(world):
    def warn():
        warnings.warn("careless", UserWarning, stacklevel=1)

    assert [str(error) for error in world.errors(warn)] == ["careless"] * world.size
    if world.kind == "processes":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world.run(warn)


@pytest.mark.parametrize("world", [(2, "processes"), (2, "threads")], indirect=True)
def test_fifty_megabytes_travel_both_ways(world):
    x = torch.arange(50 * 2**20 // 4, dtype=torch.int32)
    for result in world.run(torch.neg, x):
        assert torch.equal(result, -x)


@settings(max_examples=20)
@given(values=st.lists(st.integers(-5, 5), min_size=1, max_size=4))
def test_hypothesis_draws_for_a_shared_world(values):
    for result in world(2).run(summed, torch.tensor(values)):
        assert result.tolist() == [2 * value for value in values]


def test_the_shared_world_is_one_object_and_keeps_its_processes():
    assert world(2) is world(2, "processes")
    assert world(2) is not world(2, "threads")
    assert world(2).run(os.getpid) == world(2).run(os.getpid)


def test_a_closed_world_starts_again():
    with World(2) as local:
        first = local.run(os.getpid)
    second = local.run(os.getpid)
    local.close()
    assert not set(first) & set(second)


def test_ranks_see_no_more_than_one_thread_each():
    assert world(2).run(torch.get_num_threads) == [1, 1]


def test_groups_left_behind_do_not_pile_up():
    def make_groups():
        for _ in range(300):
            dist.new_group([0])
        return os.getpid()

    with World(1) as local:
        first = local.run(make_groups)
        assert local.run(os.getpid) != first


def test_a_world_inside_a_rank_works():
    def nest():
        with World(2, kind="threads") as inner:
            return inner.run(dist.get_rank)

    assert world(2).run(nest) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "at least one rank, got size 0"),
        ((2, "fibres"), {}, "kind='fibres' is not one of 'processes', 'threads', 'fake'"),
        ((2,), {"ranks": [0]}, 'ranks=.* is for kind="fake"'),
        ((2, "fake"), {"ranks": [0, 2, 3]}, r"ranks \[2, 3\] are not in a world of size 2"),
    ],
)
def test_nonsense_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        world(*arguments, **options)


@pytest.mark.parametrize("world", ALL, indirect=True)
def test_what_cannot_be_pickled_is_refused_before_anything_runs(world):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be pickled for the ranks"):
        world.run(lambda: lock)
    assert world.run(int) == [0] * len(world.ranks)


def test_a_world_error_is_a_runtime_error():
    assert issubclass(WorldError, RuntimeError)
