"""A run on two hosts, one of which is lost and comes back, twice: the time that this takes, and the steps repeated.

    python -m benchmarks.elastic

The hosts are two network namespaces of this machine, with two ranks each. Creating them requires root, or
`CAP_SYS_ADMIN` and `CAP_NET_ADMIN`. `torchrun --nnodes 1:2` starts the ranks as it would on real hosts. At a random
step, all processes of one host are killed, including its torchrun agent; the other host continues alone from the newest
checkpoint. Then the host returns, and both continue. After that, the link is cut and restored in the same way. At the
end, every loss that was ever computed is compared with that of an undisturbed run. `benchmarks/elastic_rank.py` is the
training program.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.elastic_rank import EVERY, rows_of
from benchmarks.report import Goal, parser, publish
from benchmarks.two_hosts import HOSTS, environment, hosts, inside, kill, link

STAYS, GOES = HOSTS
PORT = 29414
RESTARTS = 5  # restarts that torchrun allows after failures of ranks on a host
PATIENCE = 180.0  # seconds to wait for anything
SETTINGS = {"last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 3, "read_timeout": 20}


@dataclass(frozen=True)
class Place:
    """A host of a job: the prefix of a command that runs there, its address, and its number of ranks."""

    before: tuple[str, ...]
    address: str
    ranks: int = 2


@dataclass
class Job:
    """A run on two hosts.

    Attributes:
        folder: the folder for its steps, checkpoints and logs.
        places: first the host that stays, which has torchrun's store, then the one that is lost and returns.
        options: options of `benchmarks.elastic_rank`.
        variables: environment variables.
        port: the port of torchrun's store.
        agents: torchrun's agent on each host.
        rows: a table row for each event.
    """

    folder: Path
    places: dict[str, Place]
    options: tuple[str, ...]
    variables: dict[str, str]
    port: int = PORT
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stays(self) -> str:
        return next(iter(self.places))

    def start(self, host: str) -> None:
        place, stays = self.places[host], self.places[self.stays]
        settings = SETTINGS | {"is_host": int(host == self.stays)}
        launch = (
            *place.before, sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2",
            "--nproc-per-node", str(place.ranks), "--max-restarts", str(RESTARTS), "--monitor-interval", "0.2",
            "--rdzv-id", "elastic", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{stays.address}:{self.port}",
            "--local-addr", place.address, "--rdzv-conf", ",".join(f"{name}={n}" for name, n in settings.items()),
            "-m", "benchmarks.elastic_rank", str(self.folder), *self.options,
        )  # fmt: skip
        variables = self.variables | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / f"{host}.log").open("ab") as log:
            self.agents[host] = subprocess.Popen(launch, env=variables, stdout=log, stderr=log)

    def steps(self) -> list[dict[str, Any]]:
        """The steps that rank 0 has logged, in order."""
        return rows_of(self.folder)

    def wait(self, what: str, until: Callable[[], bool]) -> None:
        """Waits for a condition; meanwhile restarts the agent of the host that is not the first, if it has failed."""
        end = time.monotonic() + PATIENCE
        while not until():
            if self.agents[self.stays].poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{what}: not reached. {self.tails()}")
            for host, agent in [*self.agents.items()]:
                if host != self.stays and agent.poll() not in (None, 0, -signal.SIGKILL):
                    self.start(host)
            time.sleep(0.1)

    def tails(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def trained(self, ranks: int, steps: int, since: float = 0.0) -> list[dict[str, Any]]:
        """Waits until so many ranks have taken so many steps that are not repetitions, and returns these."""

        def found() -> list[dict[str, Any]]:
            return [row for row in fresh(self.steps()) if row["ranks"] == ranks and row["time"] >= since]

        self.wait(f"{steps} steps on {ranks} ranks", lambda: len(found()) >= steps)
        return found()

    @contextmanager
    def event(self, what: str, ranks: int, steps: int) -> Iterator[None]:
        """Runs the block as an event that leaves so many ranks, and waits until they have taken so many steps."""
        began = time.time()
        yield
        new = self.trained(ranks, steps, since=began)[0]
        rows = self.steps()
        first = next(row for row in rows if row["ranks"] == ranks and row["time"] >= began)
        last = [row for row in fresh(rows) if row["time"] < new["time"]][-1]
        self.rows.append(
            {
                "event": what,
                "at s": began - rows[0]["time"],
                "ranks after": ranks,
                "s until a step on them": first["time"] - began,
                "steps repeated": new["step"] - first["step"],
                "s without a new step": new["time"] - last["time"],
            }
        )

    def end(self) -> None:
        """Ends the run after its next step."""
        (self.folder / "stop").touch()
        for host, agent in self.agents.items():
            if agent.wait(PATIENCE):
                raise SystemExit(f"the agent of {host} failed. {self.tails()}")


def fresh(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The steps that are not repetitions."""
    furthest = -1
    for row in steps:
        if row["step"] > furthest:
            furthest = row["step"]
            yield row


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """The losses of so many steps on one host with all ranks."""
    launch = (
        *inside(STAYS), sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        "-m", "benchmarks.elastic_rank", str(folder), "--until", str(steps),
    )  # fmt: skip
    variables = environment() | {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    subprocess.run(launch, env=variables, check=True, capture_output=True)
    return {row["step"]: row["loss"] for row in rows_of(folder)}


def measured(tiny: bool, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """A row for each event, all steps, and the largest relative difference of a loss from the undisturbed run."""
    some = random.Random(seed)

    def few() -> int:
        return 5 if tiny else some.randint(20, 60)

    with tempfile.TemporaryDirectory() as folder, hosts("benchmarks.elastic"):
        places = {host: Place(inside(host), address) for host, address in HOSTS.items()}
        job = Job(Path(folder, "job"), places, ("--pace", "0.05" if tiny else "0.2"), environment())
        job.folder.mkdir()
        for host in HOSTS:
            job.start(host)
        job.trained(4, EVERY + few())
        with job.event("a host is killed", 2, few()):
            kill(GOES)
            job.agents[GOES].wait()
        with job.event("it returns", 4, EVERY + few()):
            job.start(GOES)
        with job.event("its link is cut", 2, few()):
            link(GOES, "down")
        with job.event("the link is mended", 4, few()):
            link(GOES, "up")
        job.end()
        steps = job.steps()
        apart = Path(folder, "apart")
        apart.mkdir()
        wanted = undisturbed(apart, max(row["step"] for row in steps) + 1)
    return job.rows, steps, max(abs(row["loss"] / wanted[row["step"]] - 1) for row in steps)


def main() -> None:
    options = parser("A run on two emulated hosts, one of which is lost and comes back.")
    options.add_argument("--seed", type=int, default=0, help="chooses the steps of the events (default: %(default)s)")
    options.add_argument("--tiny", action="store_true", help="as few steps as possible, to try the command")
    args = options.parse_args()
    events, _, difference = measured(args.tiny, args.seed)
    goals = [
        Goal("a loss beside that of the undisturbed run, largest relative difference", difference, 1e-12),
        Goal("steps repeated after an event", max(row["steps repeated"] for row in events), 2 * EVERY),
        Goal("seconds without a new step after an event", max(row["s without a new step"] for row in events), 60),
    ]
    publish("a run on two hosts of two ranks, one of which is lost and comes back", events, goals, args.json)


if __name__ == "__main__":
    main()
