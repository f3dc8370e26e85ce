"""For tests that start programs as launchers do: environment variables, a free port, and torchrun's processes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAUNCHED = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_.*|GROUP_.*|TORCHELASTIC_.*|SLURM.*|OMPI_.*|PMI.*|MPI_.*"
)


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not LAUNCHED.fullmatch(name)}
    return plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | dict(environ)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def workers(parent: int) -> list[int]:
    """The processes that a torchrun has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(status.parent.name))
    return sorted(found)
