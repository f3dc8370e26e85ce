"""The parts of the benchmark for GPUs run on a CPU; what cannot is told by name, and counts as missed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import gpu, gpu_curvature, gpu_schedules, shared_device
from benchmarks.gpu_setting import Answer, Missing, Where, pretended
from benchmarks.gpu_training import gaps_between
from shardfn.compat import process_groups
from shardfn.mesh.groups import cpu_group
from shardfn.testing import World, world
from tests.benchmarks.running import told

CPU = Where("cpu", tiny=True)
SPEED = ("step / FSDP2", "nothing runs", "GB/s", "host time")  # goals for a GPU


def answered(name: str) -> Answer:
    return gpu.PARTS[name].ask(CPU)


@pytest.mark.parametrize(
    "name", ["late", "renewals", "waits", "graphs", "compiled", "memory", "worlds", "kernels", "host"]
)
def test_a_part_meets_its_goals_where_a_cpu_can_tell(name: str) -> None:
    with World(1, kind="alone", deadline=200) as fresh:  # a simulated device, once there, would be the accelerator
        (answer,) = fresh.run(answered, name)
    untold = {row["not answered"] for row in answer.rows if "not answered" in row}
    for goal in answer.goals:
        assert math.isnan(goal.value) == (goal.name in untold)
        assert goal.met or goal.name in untold or any(part in goal.name for part in SPEED), goal
    assert len(untold) < len(answer.goals)


def derived() -> Answer:
    answer = Answer()
    with pretended(1, "cpu"):
        gpu_curvature.right(CPU, answer)
    return answer


def test_derivatives_are_those_of_plain_torch() -> None:
    with World(1, kind="alone", deadline=200) as fresh:
        (answer,) = fresh.run(derived)
    assert len(answer.goals) == 4
    assert all(goal.met for goal in answer.goals), answer.goals


def test_ranks_on_one_device_train_like_one_process() -> None:
    answer = answered("ranks")
    assert all(goal.met for goal in answer.goals), answer.goals


def test_the_command_runs_each_part_as_a_process_and_tells_what_cannot_run(tmp_path: Path) -> None:
    found = told("gpu", tmp_path, "--device", "cpu", "--only", "renewals", "--sanitizer")
    untold = [row["not answered"] for row in found["rows"] if "not answered" in row]
    assert untold == ["device memory lost by all renewals, MiB", "late, compute-sanitizer: ends well"]
    assert [goal["name"] for goal in found["goals"] if not goal["met"]] == untold


def lacking(where: Where) -> Answer:
    raise Missing("another machine")


def test_a_part_that_lacks_something_or_fails_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(gpu.PARTS, "7B", gpu.Part(lacking, 1))
    gpu.here("7B", CPU, tmp_path / "told")
    found = json.loads((tmp_path / "told").read_text())
    assert found["rows"] == [{"not answered": "7B", "because": "another machine"}]
    assert [goal["met"] for goal in found["goals"]] == [False]
    monkeypatch.setitem(gpu.PARTS, "late", gpu.Part(lacking, 0.1))
    answer = gpu.asked("late", CPU)
    assert answer.rows == [{"not answered": "late: ends well", "because": "did not end within 0 s"}]
    assert not any(goal.met for goal in answer.goals)


class Early(gpu_schedules.Late):
    """Like `Late`, but nobody waits for its gathers."""

    def all_gather(self, whole: Tensor, own: Tensor, group: Any) -> Any:
        arrival = super().all_gather(whole, own, group)
        arrival.event = None
        return arrival


def with_early_gathers() -> Answer:
    gpu_schedules.Late = Early  # type: ignore[misc]
    return gpu_schedules.late(CPU)


def test_a_gather_that_nobody_waits_for_is_found() -> None:
    (answer,) = world(1, "alone").with_deadline(200).run(with_early_gathers)
    races = {goal.name: goal.value for goal in answer.goals}
    assert races["full_shard: races"] > 0


def test_gaps_are_where_nothing_runs() -> None:
    spans = [("a", 0.0, 4.0), ("b", 1.0, 2.0), ("c", 5.0, 6.0), ("d", 8.5, 9.0)]
    assert gaps_between(spans) == [(2.5, "c", "d"), (1.0, "a", "c")]


# --- the process group of ranks on one device ---


def together(path: str, body: Any) -> Any:
    store = dist.FileStore(path, 3)  # type: ignore[attr-defined]
    rank = store.add("ranks", 1) - 1
    shared_device.register()
    dist.init_process_group(shared_device.NAME, store=store, rank=rank, world_size=3)
    try:
        return rank, body(rank)
    finally:
        dist.destroy_process_group()


def run_together(folder: Path, body: Any) -> list[Any]:
    with World(3, kind="alone", deadline=60) as ranks:
        return [value for _, value in sorted(ranks.run(together, str(folder / "store"), body))]


def every_collective(rank: int) -> list[list[float]]:
    assert dist.group.WORLD is not None
    name, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional
    x = torch.arange(3.0) + rank
    started = [
        *(ops.all_reduce(x, op, name) for op in ("sum", "avg", "max", "min")),
        ops.all_gather_into_tensor(x, 3, name),
        ops.reduce_scatter_tensor(x, "sum", 3, name),
        ops.all_to_all_single(x, [1] * 3, [1] * 3, name),
        ops.broadcast(x, 1, name),
        ops.all_reduce(torch.full((2**15,), float(rank)), "sum", name)[:1],  # a larger mailbox
    ]
    return [ops.wait_tensor(one).tolist() for one in started]


def test_each_collective_gives_what_its_name_says(tmp_path: Path) -> None:
    for rank, found in enumerate(run_together(tmp_path, every_collective)):
        rows = [[float(i + r) for i in range(3)] for r in range(3)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        assert found == [
            [sum(c) for c in columns],
            [sum(c) / 3 for c in columns],
            [max(c) for c in columns],
            [min(c) for c in columns],
            [x for row in rows for x in row],
            [sum(columns[rank])],
            columns[rank],
            rows[1],
            [3.0],
        ]


def differing(rank: int) -> str:
    try:
        dist.all_reduce(torch.ones(2 + (rank == 1)))
    except RuntimeError as error:
        return str(error)
    return ""


def own_groups(rank: int) -> bool:
    """Whether what threads of the host say goes its own way, beside the collectives of a step."""
    return process_groups.between_processes() and cpu_group([0, 1, 2], "of a test") is not dist.group.WORLD


def test_a_backend_that_torch_does_not_have_is_one_between_processes(tmp_path: Path) -> None:
    assert run_together(tmp_path, own_groups) == [True] * 3


def test_ranks_that_launch_other_collectives_are_told(tmp_path: Path) -> None:
    messages = run_together(tmp_path, differing)
    assert "is all_reduce SUM (2,) torch.float32 on rank 0, and not so on ranks [1]" in messages[0]
    assert all(messages)
