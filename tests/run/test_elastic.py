"""A run goes on without a host that was lost, and with it when it returns; torchrun starts the processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import elastic_rank
from benchmarks.elastic import Job, Place
from shardfn.testing import world
from tests.launched import workers


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """On two hosts that are this machine, with so many ranks each."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    first, second, shard = request.param
    places = {"a": Place((), "localhost", first), "b": Place((), "localhost", second)}
    folder = tmp_path / "job"
    folder.mkdir()
    made = Job(folder, places, ("--pace", "0.05", "--shard", str(shard)), variables, port)
    yield made
    for host in made.agents:
        lost(made, host)


def lost(job: Job, host: str) -> None:
    """All processes of a host are killed, its agent before those that it would start again."""
    agent = job.agents[host]
    if agent.poll() is None:
        for process in [agent.pid, *workers(agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait()


@pytest.mark.parametrize("job", [(1, 1, 1)], indirect=True)
def test_a_run_goes_on_without_a_host_and_with_it_again(job: Job, tmp_path: Path) -> None:
    for host in job.places:
        job.start(host)
    job.trained(2, elastic_rank.EVERY + 2)
    with job.event("killed", 1, 3):
        lost(job, "b")
    with job.event("returned", 2, 3):
        job.start("b")
    job.end()
    assert [row["steps repeated"] >= 0 for row in job.rows] == [True, True]
    rows = job.steps()
    apart = tmp_path / "apart"
    apart.mkdir()
    world(2).with_deadline(200).run(elastic_rank.train, apart, rows[-1]["step"] + 1, 0.0, 1)
    wanted = {row["step"]: row["loss"] for row in elastic_rank.rows_of(apart)}
    for row in rows:
        assert abs(row["loss"] / wanted[row["step"]] - 1) < 1e-12
