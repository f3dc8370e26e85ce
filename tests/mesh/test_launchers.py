"""Where a process finds its world: from the environment of each launcher, or in one error that names the fix."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.mesh import rollcall, start
from shardfn.mesh.groups import group_over
from shardfn.mesh.launchers import FIRST_PORT, Start, detect_launcher, hosts, said_by_job
from shardfn.mesh.make import across
from shardfn.mesh.rollcall import Card, contradiction, local_rank
from shardfn.testing import World
from tests.launched import ROOT, clean, free_port

PID = 100

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
    "MASTER_PORT": "29500", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
PLAIN = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
JOB = {"SLURM_JOB_ID": "1000", "SLURM_JOB_NODELIST": "gpu[07-08]"}
SRUN = JOB | {
    "SLURM_STEP_ID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_TASK_PID": str(PID),
}  # fmt: skip
BATCH = JOB | {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SHELL = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "39029"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
ON_ONE = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
AT = {"MASTER_ADDR": "b", "MASTER_PORT": "1234"}
ONE_TASK = SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ORTED = SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "gpu08"}
SRUN_PORT = FIRST_PORT + (31 * 1000 + 2) % 4096


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("node1", "node1"),
        ("a,b", "a b"),
        ("node[001-003,7],gpu-a[1-2]b", "node001 node002 node003 node7 gpu-a1b gpu-a2b"),
        ("node[09-11]", "node09 node10 node11"),
        ("r[1-2]n[1,3],x.y-z", "r1n1 r1n3 r2n1 r2n3 x.y-z"),
        ("n[5]", "n5"),
    ],
)
def test_slurms_lists_of_nodes_are_read(nodelist: str, names: str) -> None:
    assert list(hosts(nodelist)) == names.split()


@pytest.mark.parametrize("nodelist", ["", "a,,b", "n[1-", "n1]", "n[2-1]", "n[x]", "n[]", "n[1-2-3]", "a b", "n[[1]]"])
def test_what_is_no_list_of_nodes_is_refused(nodelist: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(nodelist))):
        list(hosts(nodelist))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (AT, None),
        (TORCHRUN, Start("torchrun", 1, 4, 1, "a", 29500)),
        (PLAIN, Start("torchrun", 1, 4, 1, "a", 29500)),
        (SRUN, Start("srun", 3, 4, 1, "gpu07", SRUN_PORT)),
        (SRUN | AT, Start("srun", 3, 4, 1, "b", 1234)),
        (SRUN | {"WORLD_SIZE": "4"} | AT, Start("srun", 3, 4, 1, "b", 1234)),
        (SRUN | {"RANK": "3", "WORLD_SIZE": "4"}, Start("torchrun", 3, 4, None, "gpu07", SRUN_PORT)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, Start("srun", 3, 4, 1, "127.0.0.1", SRUN_PORT)),
        (SRUN | {"RANK": "", "WORLD_SIZE": ""}, Start("srun", 3, 4, 1, "gpu07", SRUN_PORT)),
        (SRUN | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | TORCHRUN,
         Start("torchrun", 1, 4, 1, "a", 29500)),
        (ONE_TASK | TORCHRUN, Start("torchrun", 1, 4, 1, "a", 29500)),
        (BATCH | TORCHRUN, Start("torchrun", 1, 4, 1, "a", 29500)),
        (ONE_TASK, None),
        (ONE_TASK | {"SLURM_PTY_PORT": "1", "SLURM_TASK_PID": "7"}, None),
        (JOB, None),
        (BATCH, None),
        (SHELL, None),
        (ON_ONE, Start("mpirun", 3, 4, 1, "127.0.0.1", 29500)),
        (MPIRUN | AT, Start("mpirun", 3, 4, 1, "b", 1234)),
        (BATCH | MPIRUN | {"MASTER_PORT": "9"}, Start("mpirun", 3, 4, 1, "gpu07", 9)),
        (ORTED | MPIRUN | {"MASTER_PORT": "9"}, Start("mpirun", 3, 4, 1, "gpu07", 9)),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"} | TORCHRUN,
         Start("torchrun", 1, 4, 1, "a", 29500)),
        (HYDRA, Start("mpirun", 3, 4, 3, "127.0.0.1", 29500)),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, Start("srun", 3, 4, 1, "gpu07", SRUN_PORT)),
    ],
)  # fmt: skip
def test_a_world_is_found(environ: dict[str, str], expected: Start | None) -> None:
    assert detect_launcher(environ, PID) == expected


def test_ports_of_a_job_and_its_steps_differ() -> None:
    def port(job: int, step: int) -> int:
        start = detect_launcher(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}, PID)
        assert start is not None
        return start.port

    ports = [port(job, step) for job in range(123456, 123466) for step in range(10)]
    assert len(set(ports)) == 100
    assert all(61440 <= one < 65536 for one in ports)


WRONG: list[tuple[dict[str, str], str]] = [
    (PLAIN | {"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4.*unset them"),
    (PLAIN | {"RANK": "-1"}, "RANK='-1' is not a number from 0 on: unset it"),
    (PLAIN | {"RANK": "one"}, "RANK='one' is not a number"),
    (PLAIN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a number from 1 on"),
    (PLAIN | {"WORLD_SIZE": "4.0"}, "WORLD_SIZE='4.0' is not a number"),
    (PLAIN | {"LOCAL_RANK": "²"}, "LOCAL_RANK='²' is not a number"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8, of a world of WORLD_SIZE=4"),
    (PLAIN | {"MASTER_ADDR": ""}, "MASTER_ADDR, the host where rank 0 runs, is not set.*torchrun"),
    (PLAIN | {"MASTER_PORT": ""}, "MASTER_PORT, .*is not set: .*29500"),
    (PLAIN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
    (PLAIN | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 must be from 1024 to 65535"),
    (PLAIN | {"MASTER_PORT": "0"}, "MASTER_PORT=0 must be from"),
    ({"RANK": "0"}, "RANK=0 is set, but not WORLD_SIZE: start the program by torchrun"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, but not RANK"),
    ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but not RANK and WORLD_SIZE"),
    (
        SRUN | PLAIN | {"RANK": "0", "WORLD_SIZE": "1"},
        r"srun has started 4 tasks \(SLURM_NTASKS\), each with WORLD_SIZE=1.*Unset RANK",
    ),
    (SRUN | PLAIN | {"RANK": "0"}, "RANK=0, but srun has set SLURM_PROCID=3. Was it exported before the launch"),
    (SRUN | PLAIN | {"RANK": "3", "LOCAL_RANK": "0"}, "LOCAL_RANK=0, but srun has set SLURM_LOCALID=1"),
    (SRUN | {"RANK": "0"}, "RANK=0, but srun has set SLURM_PROCID=3"),
    (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8, but srun has set SLURM_NTASKS=4. .*Unset WORLD_SIZE"),
    (SRUN | {"LOCAL_RANK": "0"}, "LOCAL_RANK=0, but srun has set SLURM_LOCALID=1"),
    (SRUN | TORCHRUN, "srun has started 4 tasks .*torchrun, but this one's world has 2.*--nnodes=4"),
    (SRUN | TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, "world has 1 of them: say torchrun --nnodes=4.*side by side"),
    (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not below SLURM_NTASKS=4"),
    (SRUN | {"SLURM_PROCID": ""}, "srun has started this process, but SLURM_PROCID is not set.*--export=NONE"),
    (SRUN | {"SLURM_NTASKS": ""}, "SLURM_NTASKS is not set"),
    (SRUN | {"SLURM_NTASKS": "8"}, "SLURM_NTASKS=8, but this srun has started SLURM_STEP_NUM_TASKS=4.*srun --ntasks=8"),
    (SRUN | {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
    (SRUN | {"SLURM_JOB_ID": "job"}, "SLURM_JOB_ID='job' is not a number"),
    (SRUN | {"SLURM_STEP_NODELIST": "gpu[8-7]"}, r"SLURM's list of nodes: 'gpu\[8-7\]'.*export MASTER_ADDR"),
    (SRUN | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "MASTER_ADDR.*export MASTER_ADDR=HOST before srun"),
    (SRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be from"),
    (
        SRUN | {"SLURM_PTY_PORT": "1", "SLURM_TASK_PID": "7"},
        "one of the 4 tasks of an srun --pty.*srun --ntasks=1 --pty",
    ),
    (MPIRUN, r"MASTER_ADDR.*mpirun -x MASTER_ADDR=HOST"),
    (MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 is not below OMPI_COMM_WORLD_SIZE=4"),
    (MPIRUN | {"OMPI_COMM_WORLD_SIZE": ""}, "mpirun has started this process, but OMPI_COMM_WORLD_SIZE is not set"),
    (
        MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"},
        "OMPI_COMM_WORLD_LOCAL_RANK=2 is not below OMPI_COMM_WORLD_LOCAL_SIZE=2",
    ),
    (MPIRUN | AT | {"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but mpirun has set OMPI_COMM_WORLD_SIZE=4"),
    (MPIRUN | PLAIN | {"RANK": "0", "WORLD_SIZE": "1"}, "mpirun has started 4 tasks .*each with WORLD_SIZE=1"),
    (SRUN | ON_ONE, "srun has started 4 tasks .*and mpirun in this one a world of 4.*call mpirun once"),
    (HYDRA | {"PMI_SIZE": ""}, "PMI_SIZE is not set"),
]


@pytest.mark.parametrize(("environ", "says"), WRONG, ids=lambda value: value[:50] if isinstance(value, str) else "")
def test_what_contradicts_itself_is_one_error_that_names_the_fix(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=f"^make_mesh: (?s:.*){says}") as caught:
        detect_launcher(environ, PID)
    assert "\n" not in str(caught.value)


def test_a_job_that_did_not_start_this_process_says_how_many_tasks_it_has() -> None:
    assert [said_by_job(one) for one in ({}, JOB, BATCH, SHELL, SRUN)] == [1, 1, 4, 4, 1]


# --- the ranks come together ---


def card(
    host: str = "a", size: int = 2, local: int | None = None, devices: int = 0, timeout: float | None = None
) -> Card:
    return Card(host, size, local, devices, timeout, 1)


@pytest.mark.parametrize(
    ("cards", "says"),
    [
        ([card(), card("b")], ""),
        ([card(devices=1), card(devices=1)], ""),
        ([card(devices=2), card(devices=2)], ""),
        ([card(), card(size=3)], r"rank 0 \(a\) was told of 2 ranks, and rank 1 \(a\) of 3: WORLD_SIZE is the same"),
        ([card(timeout=3), card()], "rank 0 passes timeout=3 and rank 1 timeout=None: pass the same"),
        ([card(size=3, devices=2)] * 3, "rank 2 is number 2 of the processes on a, where it sees 2 devices: start no"),
        ([card(local=0, devices=2), card(local=2, devices=2)], "rank 1 is number 2 .*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_cards_that_do_not_fit_are_told(cards: list[Card], says: str) -> None:
    told = contradiction(dict(enumerate(cards)))
    assert re.search(says, told)
    assert bool(told) is bool(says)


def test_a_local_rank_that_nobody_says_is_the_place_on_the_host() -> None:
    cards = [card("a"), card("b"), card("a"), card("b", local=7)]
    assert [local_rank(rank, cards) for rank in range(4)] == [0, 0, 1, 7]


PROGRAM = """
    import datetime, logging, os, socket, sys
    if "SLURMD_NODENAME" in os.environ:
        socket.gethostname = lambda: os.environ["SLURMD_NODENAME"]
    import torch
    import shardfn as sf
    from shardfn.mesh import rendezvous
    rendezvous.NAMED = rendezvous.ANSWERS = 2.0

    {before}
    mesh = sf.make_mesh({arguments}, device="cpu")
    axes = tuple(mesh.mesh_dim_names)
    total = sf.shard_map(lambda: sf.psum(torch.ones(1), axes), mesh=mesh, in_specs=(), out_specs=...)
    said = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    sys.stdout.write(f"{{mesh.get_rank()}} {{int(total())}} {{' '.join(map(str, said))}}\\n")
"""


def program(folder: Path, arguments: str = "shard=-1", before: str = "") -> list[str]:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(PROGRAM).format(arguments=arguments, before=before))
    return [sys.executable, str(file)]


def together(command: list[str], environs: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """How each of several processes ended, and what it printed."""
    running = [
        subprocess.Popen(command, env=clean(one), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in environs
    ]
    try:
        printed = [one.communicate(timeout=200) for one in running]
        return [(one.returncode, *both) for one, both in zip(running, printed, strict=True)]
    finally:
        for one in running:
            one.kill()


def ranks(size: int) -> list[dict[str, str]]:
    """What a launcher says to each rank."""
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [at | {"RANK": str(rank)} for rank in range(size)]


def errors(ended: list[tuple[int, str, str]]) -> list[str]:
    """The last line that each has printed before it failed."""
    assert all(code for code, _, _ in ended), ended
    return [error.strip().splitlines()[-1] for _, _, error in ended]


def at_once(folder: Path, count: int) -> str:
    """Lets so many processes go on together, when all have loaded torch."""
    return (
        f"import time, pathlib; here = pathlib.Path({str(folder)!r}); (here / f'{{os.getpid()}}.here').touch()\n"
        f"while len(list(here.glob('*.here'))) < {count}: time.sleep(0.01)"
    )


def srun(*options: str, nodes: int = 1) -> tuple[list[str], dict[str, str]]:
    names = ["localhost", "127.0.0.1"][:nodes]
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": ",".join(names)}
    return [sys.executable, str(ROOT / "tests/fake_srun.py"), *options], job


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=clean(environ), capture_output=True, text=True, timeout=200)


def test_four_tasks_of_srun_are_a_world_of_four(tmp_path: Path) -> None:
    command, job = srun("--ntasks=4", nodes=2)
    ran = run([*command, *program(tmp_path, "replica=2, shard=-1")], job)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert sorted(ran.stdout.splitlines()) == ["0 4 0 4 0", "1 4 1 4 1", "2 4 2 4 0", "3 4 3 4 1"]


def test_ranks_that_alternate_between_nodes_are_told_once(tmp_path: Path) -> None:
    command, job = srun("--ntasks=4", "--distribution=cyclic", nodes=2)
    ran = run([*command, *program(tmp_path, "replica=2, shard=2")], job)
    assert ran.returncode == 0
    assert ran.stderr.count("\n") == 1
    assert re.match(r"make_mesh\(replica=2, shard=2\): axis 'shard' spans nodes, .* --distribution=block", ran.stderr)


def test_a_program_that_a_job_did_not_start_by_srun_says_that_it_is_alone(tmp_path: Path) -> None:
    ran = run(program(tmp_path), BATCH)
    assert (ran.returncode, ran.stdout) == (0, "0 1 None None None\n")
    assert re.fullmatch(r"make_mesh: a world of one process, in a SLURM job of 4 tasks .*\n", ran.stderr)


def test_mpirun_on_one_node_needs_nothing_more(tmp_path: Path) -> None:
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
    both = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": str(free_port())}
    ended = together(program(tmp_path), [both | dict.fromkeys(names, str(rank)) for rank in range(2)])
    assert ended == [(0, f"{rank} 2 {rank} 2 {rank}\n", "") for rank in range(2)]


def test_a_group_of_one_in_each_of_several_tasks_is_refused(tmp_path: Path) -> None:
    before = "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
    command, job = srun("--ntasks=2")
    ran = run([*command, *program(tmp_path, before=before)], job)
    assert ran.returncode
    assert ran.stderr.count("with a world of one process, but srun has started 2 (SLURM_NTASKS): leave") == 2


def test_missing_ranks_are_named_to_all_who_came(tmp_path: Path) -> None:
    ended = together(program(tmp_path, "shard=-1, timeout=3", at_once(tmp_path, 2)), ranks(4)[::2])
    for said in errors(ended):
        assert said.startswith("RuntimeError: make_mesh: ranks 1, 3 of 4 have not come in 3 s. Look at the output")


def test_a_missing_rank_0_is_named(tmp_path: Path) -> None:
    (said,) = errors(together(program(tmp_path, "shard=-1, timeout=1"), ranks(2)[1:]))
    assert re.search(r"rank 0 of 2 has not come: nothing listens at 127.0.0.1:\d+ .*in 1 s", said)


def test_two_processes_of_one_rank_are_told(tmp_path: Path) -> None:
    zero, one = ranks(3)[:2]
    for said in errors(together(program(tmp_path), [zero, one, one])):
        assert re.search(
            r"two processes are rank 1 of 3: process \d+ of .* and process \d+ of .*RANK must differ", said
        )


def test_two_processes_of_rank_0_are_told(tmp_path: Path) -> None:
    zero = ranks(3)[0]
    second, first = sorted(errors(together(program(tmp_path), [zero, zero])), key=lambda said: "does not come" in said)
    assert re.search(r"rank 0 cannot listen on port .*or rank 0 uses. Give each process a different RANK", second)
    assert re.search(r"make_mesh: process \d+ of .* does not come: rank 0 cannot listen .*or rank 0 uses", first)


def test_worlds_of_different_sizes_are_told(tmp_path: Path) -> None:
    first, second = ranks(2)
    for said in errors(together(program(tmp_path), [first, second | {"WORLD_SIZE": "4"}])):
        assert re.search(r"rank 0 \(.*\) was told of 2 ranks, and rank 1 \(.*\) of 4: WORLD_SIZE", said)


def test_a_rank_that_cannot_come_tells_the_others(tmp_path: Path) -> None:
    first, second = ranks(2)
    other, own = errors(together(program(tmp_path, before=at_once(tmp_path, 2)), [first, second | {"RANK": "2"}]))
    assert own.startswith("ValueError: make_mesh: RANK=2 is not below WORLD_SIZE=2")
    assert re.search(r"make_mesh: process \d+ of .* does not come: RANK=2 is not below WORLD_SIZE=2", other)


def test_different_timeouts_are_told(tmp_path: Path) -> None:
    arguments = "shard=-1, timeout=300 + int(os.environ['RANK'])"
    for said in errors(together(program(tmp_path, arguments), ranks(2))):
        assert "rank 0 passes timeout=300.0 and rank 1 timeout=301.0: pass the same" in said


def test_a_host_without_an_address_is_told(tmp_path: Path) -> None:
    for said in errors(together(program(tmp_path), [one | {"MASTER_ADDR": "nowhere.invalid"} for one in ranks(2)])):
        assert re.search("MASTER_ADDR='nowhere.invalid' has no address that .* knows", said)


def test_a_port_that_another_program_uses_is_told_on_all_ranks(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        zero, one = errors(together(program(tmp_path), [each | {"MASTER_PORT": port} for each in ranks(2)]))
    assert re.search(rf"rank 0 cannot listen on port {port} of .*export MASTER_PORT", zero)
    assert re.search(rf"what listens at .*:{port} is not rank 0 of this world .*Export MASTER_PORT", one)


def test_rank_0_on_another_host_than_said_is_told(tmp_path: Path) -> None:
    (said,) = errors(together(program(tmp_path), [ranks(2)[0] | {"MASTER_ADDR": "192.0.2.77"}]))
    assert re.search("rank 0 runs on .* does not find itself at .*192.0.2.77:.*MASTER_ADDR names the host", said)


# --- how long ranks wait ---


@pytest.mark.parametrize("timeout", ["60", True, [1], 1j])
def test_what_is_no_time_is_refused(timeout: Any) -> None:
    with pytest.raises(TypeError, match=r"make_mesh: timeout must be .* seconds or a datetime.timedelta, got"):
        sf.make_mesh(shard=-1, timeout=timeout)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), timedelta(0), timedelta(days=-1)])
def test_a_time_without_a_length_or_an_end_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"make_mesh: timeout must be above 0"):
        sf.make_mesh(shard=-1, timeout=timeout)


def patient(store: str) -> Any:
    """How long the world and other groups wait, after it was begun by make_mesh."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    at = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store}
    with mock.patch.dict(os.environ, at):
        sf.make_mesh(a=2, device="cpu", timeout=77)
        sf.make_mesh(a=1, b=2, device="cpu", timeout=timedelta(seconds=77))  # as it is
        with pytest.raises(ValueError, match="timeout=78 s, but the world has begun, with 77 s: pass it to the first"):
            sf.make_mesh(a=2, device="cpu", timeout=78)
        groups = [dist.group.WORLD, group_over([1, 0]), group_over([0, 1], "a use")]
    return [one._get_backend(torch.device("cpu")).options._timeout.total_seconds() for one in groups if one]


def test_a_timeout_is_that_of_every_group() -> None:
    with World(2) as fresh:
        assert fresh.run(patient, str(free_port())) == [[77.0] * 3] * 2


# --- which device ---


def devices(count: int, chosen: list[Any]) -> Any:
    """CUDA as a process sees it that has not used it yet."""
    return mock.Mock(is_initialized=lambda: False, device_count=lambda: count, set_device=chosen.append)


@pytest.mark.parametrize(("count", "local", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3), (8, 0, 0)])
def test_a_device_is_chosen_by_the_local_rank(count: int, local: int, index: int) -> None:
    chosen: list[Any] = []
    with mock.patch.object(torch, "cuda", devices(count, chosen)):
        start.choose_device("cuda", local)
    assert chosen == [index]


def test_a_device_that_the_program_has_chosen_stays() -> None:
    fake = mock.Mock(is_initialized=lambda: True, device_count=lambda: 4)
    with mock.patch.object(torch, "cuda", fake):
        start.choose_device("cuda", 1)
    fake.set_device.assert_not_called()


def begun_on(count: int, port: str) -> Any:
    """What happened first: a device was chosen, or a group was made."""
    rank, order = dist.get_rank(), []
    dist.destroy_process_group()
    at = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    chosen: list[Any] = []
    fake = devices(count, chosen)
    fake.set_device = lambda index: order.append(f"device {index}")
    begin = dist.init_process_group

    def begins(*args: Any, **kwargs: Any) -> None:
        order.append("group")
        with mock.patch.object(torch, "cuda", real):
            begin(*args, **kwargs)

    real = torch.cuda
    with (
        mock.patch.dict(os.environ, at),
        mock.patch.object(torch, "cuda", fake),
        mock.patch.object(dist, "init_process_group", begins),
    ):
        start.start_distributed("cuda")
    return order[:2]


def test_the_device_is_chosen_before_any_group_is_made() -> None:
    with World(2) as fresh:
        assert fresh.run(begun_on, 2, str(free_port())) == [["device 0", "group"], ["device 1", "group"]]


# --- axes and nodes ---


@pytest.mark.parametrize(
    ("hosts", "sizes", "says"),
    [
        ("aaaabbbb", {"replica": 2, "shard": 4}, ""),
        ("aaaabbbb", {"shard": 8}, ""),
        ("aaaabbbb", {"shard": 4, "replica": 2}, ""),
        ("aaaabbbb", {"pipe": 2, "shard": 2, "tensor": 2}, ""),
        ("aaaabbbb", {"shard": 8, "one": 1}, ""),
        ("abababab", {"replica": 2, "shard": 4}, "axis 'shard' spans nodes, .*up to 4 ranks: ranks 0 to 3 .*=block"),
        ("abababab", {"shard": 8}, ""),
        ("aabbaabb", {"replica": 2, "shard": 2, "tensor": 2}, "axis 'shard' spans nodes.*ranks 0 to 3 are on a, a, b"),
        ("aaaaaabb", {"replica": 2, "shard": 4}, "axis 'shard' spans nodes.*ranks 4 to 7 .*divide"),
        ("aaaabbbbcccc", {"data": 4, "tensor": 3}, "axis 'tensor' spans nodes.*ranks 3 to 5 are on a, b, b.*divide"),
        ("", {"shard": 4}, ""),
    ],
)  # fmt: skip
def test_an_axis_that_would_fit_into_a_node_and_spans_some_is_named(
    hosts: str, sizes: dict[str, int], says: str
) -> None:
    told = across(hosts, sizes)
    assert re.search(says, told)
    assert bool(told) is bool(says)


def compared() -> int:
    """How often ranks compare where they are, while several meshes are made."""
    with mock.patch.object(start, "roll_call", side_effect=rollcall.roll_call) as calls:
        for sizes in ({"a": 2}, {"a": 1, "b": 2}, {"c": 2}):
            sf.make_mesh(device="cpu", **sizes)
    return int(calls.call_count)


def test_hosts_are_compared_once_a_world() -> None:
    with World(2) as fresh:
        assert fresh.run(compared) == [1, 1]
