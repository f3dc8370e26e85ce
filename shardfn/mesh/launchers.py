"""Reads this process's launcher, rank, world size and rendezvous address from environment variables."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

Environ = Mapping[str, str]

_BRACKET = re.compile(r"\[([^\[\]]*)\]")  # in SLURM's lists of hosts: node[001-003,7],gpu-a[1-2]b
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
SPECIAL_STEPS = 0xFFFFFFF0  # from here on, SLURM's step ids mean steps not started by srun: shells, batch scripts
FIRST_PORT, PORTS = 61440, 4096  # above the range from which Linux picks ephemeral ports


@dataclass(frozen=True)
class Start:
    """A launcher's description of this process's place in a world of several processes.

    Attributes:
        launcher: `"torchrun"`, which stands for every launcher that sets RANK and WORLD_SIZE, `"srun"` or `"mpirun"`.
        rank: of this process.
        size: of the world.
        local_rank: on this node, if the launcher gives it.
        host: where rank 0 or torchrun listens; empty if the scheduler does not say.
        port: the port there, the same for all ranks.
        names: the variables that hold the rank, the number of processes and the local rank, in this order.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    host: str
    port: int
    names: tuple[str, str, str] = field(default=("RANK", "WORLD_SIZE", "LOCAL_RANK"), compare=False)

    def variables(self) -> dict[str, str]:
        """Returns the variables that torchrun would have set."""
        values = {"RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_ADDR": self.host, "MASTER_PORT": self.port}
        local = {} if self.local_rank is None else {"LOCAL_RANK": self.local_rank}
        return {name: str(value) for name, value in (values | local).items()}


def detect_launcher(environ: Environ, pid: int) -> Start | None:
    """Returns this process's place in the world that the environment describes; None for a world of one.

    RANK and WORLD_SIZE take precedence, since torchrun may itself have been started by srun or mpirun; then the
    variables of mpirun, which starts its processes through srun; then those of srun. Empty variables count as unset.

    Raises:
        ValueError: variables are missing, are no numbers or contradict each other; or several processes were started
            and each would form a world of its own.
    """
    task = scheduled(environ, pid)
    rank, size = _int_variable(environ, "RANK"), _int_variable(environ, "WORLD_SIZE", minimum=1)
    local, local_size = _int_variable(environ, "LOCAL_RANK"), _int_variable(environ, "LOCAL_WORLD_SIZE", minimum=1)
    _below("RANK", rank, "WORLD_SIZE", size)
    _below("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", local_size)
    if local_size is not None and size is not None and local_size > size:
        raise ValueError(f"make_mesh: LOCAL_WORLD_SIZE={local_size}, of a world of WORLD_SIZE={size}. {_LEFT_OVER}")
    if rank is not None and size is not None:
        if task is not None and task.size > 1:
            _one_world(environ, task, rank, size, local)
        host, port = address(environ, task, "torchrun")
        return Start("torchrun", rank, size, local, host, port)
    if task is not None:
        _refuse_others(task, rank, size, local)
        if task.size == 1:
            return None
        host, port = address(environ, task, task.launcher)
        return replace(task, host=host, port=port)
    set_names = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if environ.get(name)]
    if set_names:
        missing = " and ".join(name for name in ("RANK", "WORLD_SIZE") if name not in set_names)
        raise ValueError(
            f"make_mesh: {set_names[0]}={environ[set_names[0]]} is set, but not {missing}: start the program by "
            f"torchrun, which sets them all, or unset {set_names[0]} for a process alone"
        )
    return None


def scheduled(environ: Environ, pid: int) -> Start | None:
    """Returns this process's place according to mpirun or srun, even if torchrun was started inside it.

    Raises:
        ValueError: their variables contradict each other.
    """
    step, mpi = _of_srun(environ, pid), _of_mpirun(environ)
    if step is None or mpi is None:
        return mpi or step
    if step.size > 1 and mpi.size == _int_variable(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"):
        raise ValueError(
            f"make_mesh: srun has started {step.size} tasks (SLURM_NTASKS), and mpirun in this one a world of "
            f"{mpi.size} (OMPI_COMM_WORLD_SIZE): call mpirun once, without srun, or srun without mpirun"
        )
    return mpi  # mpirun starts its processes through srun, which sets its own variables, too


def said_by_job(environ: Environ) -> int:
    """Returns the number of tasks of a SLURM job whose script or shell runs this process without srun; else 1."""
    if not environ.get("SLURM_JOB_ID") or _srun_step(environ) is not None or environ.get("OMPI_COMM_WORLD_SIZE"):
        return 1
    return _int_variable(environ, "SLURM_NTASKS", minimum=1) or 1


def _of_srun(environ: Environ, pid: int) -> Start | None:
    step = _srun_step(environ)
    if step is None:
        return None
    names = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
    rank, size = _needed(environ, names[0], "srun"), _needed(environ, names[1], "srun", minimum=1)
    _below(names[0], rank, names[1], size)
    tasks = _int_variable(environ, "SLURM_STEP_NUM_TASKS", minimum=1)
    if tasks is not None and tasks != size:
        raise ValueError(
            f"make_mesh: SLURM_NTASKS={size}, but this srun has started SLURM_STEP_NUM_TASKS={tasks}: do not set "
            f"SLURM_NTASKS; say srun --ntasks={size}"
        )
    alone_in_shell = size > 1 and environ.get("SLURM_PTY_PORT") and environ.get("SLURM_TASK_PID") not in ("", str(pid))
    if alone_in_shell and "SLURM_TASK_PID" in environ:
        raise ValueError(
            f"make_mesh: this shell is one of the {size} tasks of an srun --pty, the only one with a terminal. "
            f"Start a shell with srun --ntasks=1 --pty or salloc, and the program with srun or torchrun"
        )
    job = _needed(environ, "SLURM_JOB_ID", "srun")
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    host = _first(nodelist) if nodelist else ""
    if _int_variable(environ, "SLURM_STEP_NUM_NODES", minimum=1) == 1:
        host = "127.0.0.1"
    # Jobs, and steps of one job, that share a node need different ports.
    port = FIRST_PORT + (31 * job + step) % PORTS
    return Start("srun", rank, size, _int_variable(environ, names[2]), host, port, names)


def _srun_step(environ: Environ) -> int | None:
    """Returns the job step's id if srun started this process; None in a shell or a batch script."""
    step = _int_variable(environ, "SLURM_STEP_ID")
    return None if step is None or step >= SPECIAL_STEPS else step


def _of_mpirun(environ: Environ) -> Start | None:
    """Reads Open MPI's variables, or those of Hydra, the launcher of MPICH and Intel MPI."""
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    on_node = "OMPI_COMM_WORLD_LOCAL_SIZE"
    if not any(environ.get(name) for name in names):
        names, on_node = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), "MPI_LOCALNRANKS"
        if not environ.get(names[2]):  # srun may set PMI_RANK and PMI_SIZE, too
            return None
    rank, size = _needed(environ, names[0], "mpirun"), _needed(environ, names[1], "mpirun", minimum=1)
    local, local_size = _int_variable(environ, names[2]), _int_variable(environ, on_node, minimum=1)
    _below(names[0], rank, names[1], size)
    _below(names[2], local, on_node, local_size)
    job, port = environ.get("PMIX_NAMESPACE") or environ.get("SLURM_JOB_ID"), 29500  # torch's default
    if job:
        port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    return Start("mpirun", rank, size, local, "127.0.0.1" if local_size == size else "", port, names)


def _one_world(environ: Environ, task: Start, rank: int, size: int, local: int | None) -> None:
    """Raises ValueError if RANK and WORLD_SIZE do not describe a world of all tasks that a scheduler started."""
    launch = f"{task.launcher} has started {task.size} tasks ({task.names[1]})"
    if environ.get("TORCHELASTIC_RUN_ID"):
        agents = _int_variable(environ, "GROUP_WORLD_SIZE", minimum=1) or 1
        if agents < task.size:
            raise ValueError(
                f"make_mesh: {launch}, each of them a torchrun, but this one's world has {agents} of them: say "
                f"torchrun --nnodes={task.size} and --rdzv-endpoint, with one task on each node. {_APART}"
            )
    elif size < task.size:
        raise ValueError(f"make_mesh: {launch}, each with WORLD_SIZE={size}. {_unset('RANK and WORLD_SIZE')}. {_APART}")
    elif size == task.size:
        _refuse_others(task, rank, size, local)


def _refuse_others(task: Start, *values: int | None) -> None:
    """Raises ValueError if RANK, WORLD_SIZE or LOCAL_RANK is set and differs from the scheduler's value."""
    stated = task.rank, task.size, task.local_rank
    for name, value, its, their in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), values, task.names, stated, strict=True):
        if value is not None and their is not None and value != their:
            raise ValueError(f"make_mesh: {name}={value}, but {task.launcher} has set {its}={their}. {_unset(name)}")


def check_begun(environ: Environ, pid: int, size: int) -> None:
    """Raises ValueError if an initialized world of one process leaves out tasks that a scheduler started."""
    task = scheduled(environ, pid)
    if task is not None and size == 1 and task.size > 1:
        raise ValueError(
            f"make_mesh: torch.distributed was started with a world of one process, but {task.launcher} has started "
            f"{task.size} ({task.names[1]}): leave init_process_group to make_mesh, or give it their rank and "
            f"number. {_APART}"
        )


def address(environ: Environ, task: Start | None, launcher: str) -> tuple[str, int]:
    """Returns the host and port where rank 0 listens: as set by the user, or else by the scheduler.

    Raises:
        ValueError: neither gives them, or the port is out of range.
    """
    host = environ.get("MASTER_ADDR") or (task.host if task else "")
    if not host and task and environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST"):
        host = _first(environ["SLURM_JOB_NODELIST"])
    if not host:
        fix = {
            "mpirun": "mpirun -x MASTER_ADDR=HOST (Open MPI) or mpiexec -genv MASTER_ADDR HOST (MPICH)",
            "srun": "export MASTER_ADDR=HOST before srun",
        }.get(launcher, "start the program by torchrun, which sets it, or export it")
        raise ValueError(f"make_mesh: MASTER_ADDR, the host where rank 0 runs, is not set and not known: {fix}")
    port = _int_variable(environ, "MASTER_PORT")
    if port is None and task:
        return host, task.port
    if port is None:
        raise ValueError(
            "make_mesh: MASTER_PORT, on which rank 0 listens, is not set: start the program by torchrun, which sets "
            "it, or export the same free port, 29500 say, for all ranks"
        )
    if not 0 < port < 65536:
        raise ValueError(f"make_mesh: MASTER_PORT={port} must be from 1024 to 65535")
    return host, port


_APART = "Worlds side by side are started by an srun or mpirun each"
_LEFT_OVER = "They are left over from another launch: unset them, and start the program by torchrun, srun or mpirun"


def _unset(names: str) -> str:
    return f"Was it exported before the launch? Unset {names}: make_mesh reads what the launcher sets"


def _first(nodelist: str) -> str:
    try:
        return next(hosts(nodelist))
    except ValueError as error:
        raise ValueError(f"make_mesh: in SLURM's list of nodes: {error}; export MASTER_ADDR=HOST before srun") from None


def _int_variable(environ: Environ, name: str, minimum: int = 0) -> int | None:
    """Returns a variable's value as an int; None if it is unset or empty."""
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) < minimum:
        raise ValueError(
            f"make_mesh: {name}={text!r} is not a number from {minimum} on: unset it, or let launchers set it"
        )
    return int(text)


def _needed(environ: Environ, name: str, launcher: str, minimum: int = 0) -> int:
    value = _int_variable(environ, name, minimum)
    if value is None:
        raise ValueError(
            f"make_mesh: {launcher} has started this process, but {name} is not set: do not unset it, as env -i and "
            f"srun --export=NONE and some containers do, or start the program by torchrun"
        )
    return value


def _below(name: str, value: int | None, limit: str, size: int | None) -> None:
    if value is not None and size is not None and value >= size:
        raise ValueError(f"make_mesh: {name}={value} is not below {limit}={size}. {_LEFT_OVER}")


def hosts(nodelist: str) -> Iterator[str]:
    """Yields the names in one of SLURM's lists of hosts, in the order in which they are written.

    Of several brackets in a name the last varies fastest.

    Raises:
        ValueError: the text is no such list.

    Example:
        >>> list(hosts("node[001-003,7],gpu-a[1-2]b"))
        ['node001', 'node002', 'node003', 'node7', 'gpu-a1b', 'gpu-a2b']
    """
    for name in re.split(r",(?![^\[\]]*\])", nodelist):
        *pieces, end = _BRACKET.split(name)
        if not name or re.search(r"[\[\]\s,]", "".join([*pieces[::2], end])):
            raise ValueError(f"{nodelist!r} is not a host list of SLURM, such as node[001-003,7],gpu1")
        texts, ranges = pieces[::2], pieces[1::2]
        for numbers in itertools.product(*(list(_in_bracket(bracket, nodelist)) for bracket in ranges)):
            yield "".join(itertools.chain.from_iterable(zip(texts, numbers, strict=True))) + end


def _in_bracket(ranges: str, nodelist: str) -> Iterator[str]:
    """Yields the numbers in a bracket, padded with zeros to the width in which they are written."""
    for part in ranges.split(","):
        bounds = _RANGE.fullmatch(part)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ValueError(f"{nodelist!r}: [{ranges}] does not hold numbers and ranges, such as [001-003,7]")
        for number in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1):
            yield str(number).zfill(len(bounds[1]))
