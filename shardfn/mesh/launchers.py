"""Who started this process, as which rank of how many, and on which nodes: read from the environment alone."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

Environ = Mapping[str, str]

_BRACKET = re.compile(r"\[([^\[\]]*)\]")  # in SLURM's lists of hosts: node[001-003,7],gpu-a[1-2]b
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
SPECIAL_STEPS = 0xFFFFFFF0  # SLURM's numbers from here on are of steps that srun has not started: shells, batch scripts
FIRST_PORT, PORTS = 61440, 4096  # above those that Linux gives to whoever asks for any


@dataclass(frozen=True)
class Start:
    """How this process enters a world of several, as one launcher says.

    Attributes:
        launcher: `"torchrun"`, which stands for all who set RANK and WORLD_SIZE, `"srun"` or `"mpirun"`.
        rank: of this process.
        size: of the world.
        local_rank: on this node, where it is said.
        host: where rank 0 listens, or torchrun does; empty where a scheduler does not say that.
        port: on which: the same for all of them.
        names: of the variables that say its rank, the number of processes, and its rank on this node, in this order.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    host: str
    port: int
    names: tuple[str, str, str] = field(default=("RANK", "WORLD_SIZE", "LOCAL_RANK"), compare=False)

    def variables(self) -> dict[str, str]:
        """What torchrun would have set."""
        found = {"RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_ADDR": self.host, "MASTER_PORT": self.port}
        local = {} if self.local_rank is None else {"LOCAL_RANK": self.local_rank}
        return {name: str(value) for name, value in (found | local).items()}


def found(environ: Environ, pid: int) -> Start | None:
    """How to enter the world of which the environment speaks; None for a process alone.

    RANK and WORLD_SIZE come first, since torchrun may itself have been started by srun or mpirun; then what mpirun
    says, which starts its processes by srun; then srun. Variables that are empty count as unset.

    Raises:
        ValueError: variables are missing, no numbers, or contradict each other; or several processes were started, each
            of which would be a world of its own.
    """
    task = scheduled(environ, pid)
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", least=1)
    local, locals_ = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE", least=1)
    _below("RANK", rank, "WORLD_SIZE", size)
    _below("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", locals_)
    if locals_ is not None and size is not None and locals_ > size:
        raise ValueError(f"make_mesh: LOCAL_WORLD_SIZE={locals_}, of a world of WORLD_SIZE={size}. {_LEFT_OVER}")
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
    half = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if environ.get(name)]
    if half:
        missing = " and ".join(name for name in ("RANK", "WORLD_SIZE") if name not in half)
        raise ValueError(
            f"make_mesh: {half[0]}={environ[half[0]]} is set, but not {missing}: start the program by torchrun, "
            f"which sets them all, or unset {half[0]} for a process alone"
        )
    return None


def scheduled(environ: Environ, pid: int) -> Start | None:
    """What mpirun or srun says of this process, whatever else has been started since.

    Raises:
        ValueError: they contradict each other, or themselves.
    """
    step, mpi = _of_srun(environ, pid), _of_mpirun(environ)
    if step is None or mpi is None:
        return mpi or step
    if step.size > 1 and mpi.size == _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"):
        raise ValueError(
            f"make_mesh: srun has started {step.size} tasks (SLURM_NTASKS), and mpirun in this one a world of "
            f"{mpi.size} (OMPI_COMM_WORLD_SIZE): call mpirun once, without srun, or srun without mpirun"
        )
    return mpi  # it starts its processes by way of srun


def said_by_job(environ: Environ) -> int:
    """How many tasks a SLURM job has whose script or shell runs this process without srun; 1 elsewhere."""
    if not environ.get("SLURM_JOB_ID") or _step(environ) is not None or environ.get("OMPI_COMM_WORLD_SIZE"):
        return 1
    return _number(environ, "SLURM_NTASKS", least=1) or 1


def _of_srun(environ: Environ, pid: int) -> Start | None:
    step = _step(environ)
    if step is None:
        return None
    names = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
    rank, size = _needed(environ, names[0], "srun"), _needed(environ, names[1], "srun", least=1)
    _below(names[0], rank, names[1], size)
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", least=1)
    if tasks is not None and tasks != size:
        raise ValueError(
            f"make_mesh: SLURM_NTASKS={size}, but this srun has started SLURM_STEP_NUM_TASKS={tasks}: do not set "
            f"SLURM_NTASKS; say srun --ntasks={size}"
        )
    alone_in_shell = size > 1 and environ.get("SLURM_PTY_PORT") and environ.get("SLURM_TASK_PID") not in ("", str(pid))
    if alone_in_shell and "SLURM_TASK_PID" in environ:
        raise ValueError(
            f"make_mesh: this shell is one of the {size} tasks of an srun --pty, and the others have no terminal: ask "
            f"for the shell by srun --ntasks=1 --pty, or salloc, and start the program from it by srun or torchrun"
        )
    job = _needed(environ, "SLURM_JOB_ID", "srun")
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    host = _first(nodelist) if nodelist else ""
    if _number(environ, "SLURM_STEP_NUM_NODES", least=1) == 1:
        host = "127.0.0.1"
    port = FIRST_PORT + (31 * job + step) % PORTS
    return Start("srun", rank, size, _number(environ, names[2]), host, port, names)


def _step(environ: Environ) -> int | None:
    """The number of the job step, if srun has started this process; a shell or a batch script is none."""
    step = _number(environ, "SLURM_STEP_ID")
    return None if step is None or step >= SPECIAL_STEPS else step


def _of_mpirun(environ: Environ) -> Start | None:
    """By Open MPI's variables, or those of MPICH and Intel MPI, whose launcher is named Hydra."""
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    on_node = "OMPI_COMM_WORLD_LOCAL_SIZE"
    if not any(environ.get(name) for name in names):
        names, on_node = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), "MPI_LOCALNRANKS"
        if not environ.get(names[2]):  # srun sets the others, too
            return None
    rank, size = _needed(environ, names[0], "mpirun"), _needed(environ, names[1], "mpirun", least=1)
    local, here = _number(environ, names[2]), _number(environ, on_node, least=1)
    _below(names[0], rank, names[1], size)
    _below(names[2], local, on_node, here)
    job, port = environ.get("PMIX_NAMESPACE") or environ.get("SLURM_JOB_ID"), 29500  # torch's own
    if job:
        port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    return Start("mpirun", rank, size, local, "127.0.0.1" if here == size else "", port, names)


def _one_world(environ: Environ, task: Start, rank: int, size: int, local: int | None) -> None:
    """Raises ValueError if RANK and WORLD_SIZE are not of a world of all tasks of a scheduler."""
    several = f"{task.launcher} has started {task.size} tasks ({task.names[1]})"
    if environ.get("TORCHELASTIC_RUN_ID"):
        starters = _number(environ, "GROUP_WORLD_SIZE", least=1) or 1
        if starters < task.size:
            raise ValueError(
                f"make_mesh: {several}, each of them a torchrun, but this one's world has {starters} of them: say "
                f"torchrun --nnodes={task.size} and --rdzv-endpoint, with one task on each node. {_APART}"
            )
    elif size < task.size:
        raise ValueError(
            f"make_mesh: {several}, each with WORLD_SIZE={size}. {_unset('RANK and WORLD_SIZE')}. {_APART}"
        )
    elif size == task.size:
        _refuse_others(task, rank, size, local)


def _refuse_others(task: Start, *own: int | None) -> None:
    """Raises ValueError if RANK, WORLD_SIZE or LOCAL_RANK is set and not what a scheduler says."""
    said = task.rank, task.size, task.local_rank
    for name, value, its, theirs in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), own, task.names, said, strict=True):
        if value is not None and theirs is not None and value != theirs:
            raise ValueError(f"make_mesh: {name}={value}, but {task.launcher} has set {its}={theirs}. {_unset(name)}")


def check_begun(environ: Environ, pid: int, size: int) -> None:
    """Raises ValueError for a world that somebody has begun, if it leaves out what a scheduler has started."""
    task = scheduled(environ, pid)
    if task is not None and size == 1 and task.size > 1:
        raise ValueError(
            f"make_mesh: torch.distributed was started with a world of one process, but {task.launcher} has started "
            f"{task.size} ({task.names[1]}): leave init_process_group to make_mesh, or give it their rank and "
            f"number. {_APART}"
        )


def address(environ: Environ, task: Start | None, launcher: str) -> tuple[str, int]:
    """Where rank 0 listens: what the user says, or else the scheduler.

    Raises:
        ValueError: nobody does, or it is no port.
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
    port = _number(environ, "MASTER_PORT")
    if port is None and task:
        return host, task.port
    if port is None:
        raise ValueError(
            "make_mesh: MASTER_PORT, on which rank 0 listens, is not set: start the program by torchrun, which sets "
            "it, or export the same free port, 29500 say, for all ranks"
        )
    if not 0 < port < 65536:
        raise ValueError(f"make_mesh: MASTER_PORT={port} is no port: export one from 1024 to 65535")
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


def _number(environ: Environ, name: str, least: int = 0) -> int | None:
    """The value of a variable; None where it is unset or empty."""
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"make_mesh: {name}={text!r} is not a number from {least} on: unset it, or let launchers set it"
        )
    return int(text)


def _needed(environ: Environ, name: str, launcher: str, least: int = 0) -> int:
    found = _number(environ, name, least)
    if found is None:
        raise ValueError(
            f"make_mesh: {launcher} has started this process, but {name} is not set: do not unset it, as env -i and "
            f"srun --export=NONE and some containers do, or start the program by torchrun"
        )
    return found


def _below(name: str, value: int | None, limit: str, size: int | None) -> None:
    if value is not None and size is not None and value >= size:
        raise ValueError(f"make_mesh: {name}={value} is not below {limit}={size}. {_LEFT_OVER}")


def hosts(nodelist: str) -> Iterator[str]:
    """The names in a list of SLURM's, in the order in which they are written.

    The last of several brackets counts fastest.

    Raises:
        ValueError: it is not written so.

    Example:
        >>> list(hosts("node[001-003,7],gpu-a[1-2]b"))
        ['node001', 'node002', 'node003', 'node7', 'gpu-a1b', 'gpu-a2b']
    """
    for name in re.split(r",(?![^\[\]]*\])", nodelist):
        *pieces, end = _BRACKET.split(name)
        if not name or re.search(r"[\[\]\s,]", "".join([*pieces[::2], end])):
            raise ValueError(f"{nodelist!r} is no list of hosts as SLURM writes them, such as node[001-003,7],gpu1")
        texts, ranges = pieces[::2], pieces[1::2]
        for numbers in itertools.product(*(list(_in_bracket(one, nodelist)) for one in ranges)):
            yield "".join(itertools.chain.from_iterable(zip(texts, numbers, strict=True))) + end


def _in_bracket(ranges: str, nodelist: str) -> Iterator[str]:
    """What a bracket holds: numbers as wide as they are written."""
    for one in ranges.split(","):
        found = _RANGE.fullmatch(one)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{nodelist!r}: [{ranges}] does not hold numbers and ranges, such as [001-003,7]")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield str(number).zfill(len(found[1]))
