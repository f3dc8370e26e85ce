"""Worlds that only pretend."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardfn.testing import World, WorldError, world


def test_four_thousand_ranks_cost_nothing():
    def body():
        gathered = torch.empty(4096, 2)
        dist.all_gather_single(gathered, torch.ones(2))
        return dist.get_rank(), dist.get_world_size(), tuple(gathered.shape)

    results = world(4096, "fake", ranks=(0, 17, 4095)).run(body)
    assert results == [(rank, 4096, (4096, 2)) for rank in (0, 17, 4095)]
    assert not dist.is_initialized()


def test_a_large_mesh():
    def body():
        mesh = init_device_mesh("cpu", (64, 64), mesh_dim_names=("replica", "shard"))
        return mesh.get_local_rank("replica"), mesh.get_local_rank("shard")

    assert world(4096, "fake", ranks=[65]).run(body) == [(1, 1)]


def test_rank_zero_stands_for_all():
    assert world(8, "fake").run(dist.get_rank) == [0]


def test_failures_name_the_pretended_rank():
    def body():
        if dist.get_rank() == 5:
            raise ValueError("not on mine")

    with pytest.raises(WorldError, match=r"^rank 5 failed in .*\n  rank 5: ValueError: not on mine"):
        World(8, kind="fake", ranks=(4, 5)).run(body)
    assert not dist.is_initialized()


def test_an_existing_process_group_is_respected():
    def nest():
        return World(8, kind="fake").run(dist.get_rank)

    for error in world(2).errors(nest):
        assert "there is one already: backend gloo, rank" in str(error)
