"""Groups of backends that connect in their first collective, as NCCL does, are connected before any step needs them.

gloo is taken for such a backend here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import parallel
from shardfn.compat import process_groups
from shardfn.testing import World
from tests.faults import compared


@pytest.fixture
def late() -> Iterator[World]:
    with World(4, kind="processes") as world:
        world.run(connect_late)
        yield world


def connect_late() -> None:
    process_groups._CONNECTED.discard("gloo")
    process_groups.connection = Counted(process_groups.connection)


class Counted:
    """Connects groups, and counts how often each group, and the pairs in it, were connected."""

    def __init__(self, connection: Callable[..., Any]) -> None:
        self.connection = connection
        self.times = Counter[tuple[str, bool]]()

    def __call__(self, group: Any, device: Any, pairs: bool = False) -> Any:
        self.times[group.group_name, pairs] += 1
        return self.connection(group, device, pairs)


def times() -> Counter[tuple[str, bool]]:
    assert isinstance(process_groups.connection, Counted)
    return process_groups.connection.times


def connections(foreign: bool) -> tuple[Counter[tuple[str, bool]], set[str]]:
    if foreign:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    else:
        mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    groups = {sf.mesh.axes.axis_of(mesh, axis).group for axis in ("replica", "shard", ("replica", "shard"))}
    return times(), groups


@pytest.mark.parametrize("foreign", [False, True], ids=["made", "foreign"])
def test_an_axis_is_connected_once_and_before_it_is_used(late: World, foreign: bool) -> None:
    for _ in range(2):
        for connected, groups in late.run(connections, foreign):
            assert groups
            assert {connected[group, False] for group in groups} == {1}


def fitted(rank: int) -> tuple[Any, Counter[tuple[str, bool]]]:
    result = compared({"replica": 2, "shard": 2}, "full_shard", [(rank, 0, "forward in front", 1, 1)])
    return result, times()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_may_run_out_of_memory_before_the_first_collective(late: World, rank: int) -> None:
    for (parts, _, same, far), connected in late.run(fitted, rank):
        assert (parts, same) == ([2, 2], True)
        assert far < 1e-14
        assert max(connected.values()) == 2, "once when it is made, and once when it is renewed"


def piped() -> tuple[float, Counter[tuple[str, bool]]]:
    mesh = sf.make_mesh(pipe=4, device="cpu")
    xs = [torch.full((2, 3), float(i), dtype=torch.float64) for i in range(5)]

    def part(w: Tensor, x: Any, b: Tensor) -> Any:
        y = (b if sf.axis_index("pipe") == 0 else x) * w
        return y.sum() if sf.axis_index("pipe") == 3 else y

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def run(w: Tensor) -> Tensor:
        return parallel.pipeline(part, w, xs, "pipe")

    w = torch.tensor(2.0, dtype=torch.float64)
    run(w)
    return float(run(w)), times()


def test_the_neighbors_of_a_pipeline_are_connected(late: World) -> None:
    for value, connected in late.run(piped):
        assert value == 2.0**4 * 6 * sum(range(5))
        assert sorted(n for (_, pairs), n in connected.items() if pairs) == [1, 1], "one group for each direction"
