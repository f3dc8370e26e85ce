"""Worlds of threads leave this process as it was."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardfn.testing import World, WorldTimeout, world


@pytest.mark.parametrize("action", [dist.get_rank, lambda: 1 / 0, lambda: None], ids=["value", "error", "none"])
def test_nothing_of_torch_stays_patched(action):
    before = distributed_c10d._world, torch.random.get_rng_state(), torch.get_default_dtype()
    world(3, "threads").errors(action)
    after = distributed_c10d._world, torch.random.get_rng_state(), torch.get_default_dtype()
    assert before[0] is after[0]
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_autograd_and_torch_func_work_in_ranks():
    def body():
        x = torch.full((3,), float(dist.get_rank() + 1), requires_grad=True)
        gradient = torch.func.grad(lambda y: (y**3).sum())(x.detach())
        return torch.autograd.grad((x**2).sum(), x)[0].tolist(), gradient.tolist()

    assert world(2, "threads").run(body) == [([2.0] * 3, [3.0] * 3), ([4.0] * 3, [12.0] * 3)]


def test_a_run_inside_a_run_is_refused():
    def nest():
        return world(2, "threads").run(dist.get_rank)

    def nest_directly():
        return World(2, kind="threads").run(dist.get_rank)

    for error in world(2, "threads").errors(nest_directly):
        assert "is running in this process already" in str(error)
    assert world(2, "threads").run(dist.get_rank) == [0, 1]


def test_a_thread_that_cannot_be_stopped_is_waited_for():
    def doze():
        if dist.get_rank() == 1:
            time.sleep(2)

    with pytest.raises(WorldTimeout, match=r"rank 1: at test_threads.py:\d+ \(doze\)"):
        world(2, "threads").with_deadline(0.3).run(doze)
    assert world(2, "threads").run(dist.get_rank) == [0, 1]


def test_the_fourth_of_four_ranks_releases_the_other_three():
    def body():
        if dist.get_rank() == 3:
            raise ValueError("late")
        dist.all_gather_single(torch.empty(4), torch.ones(1))

    errors = world(4, "threads").errors(body)
    assert [type(error) for error in errors] == [TimeoutError] * 3 + [ValueError]
    assert all("in all_gather_single" in str(error) for error in errors[:3])
