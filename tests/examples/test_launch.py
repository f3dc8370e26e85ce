"""The launch recipes start what they say, as far as that can be known without their schedulers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launched import ROOT, clean, free_port

RECIPES = ROOT / "examples/launch"
SCRIPTS = sorted([*RECIPES.glob("*.sh"), *RECIPES.glob("*.sbatch")])
SBATCH = sorted(RECIPES.glob("*.sbatch"))

STAND_IN = """
    import sys
    import torch
    import shardfn as sf
    from examples.run import hybrid_arguments

    args = hybrid_arguments("", ("replica", "shard"), "", 1)
    mesh = sf.make_mesh(device="cpu", **args.mesh)
    total = sf.shard_map(lambda: sf.psum(torch.ones(1), ("replica", "shard")), mesh=mesh, in_specs=(), out_specs=...)
    sys.stdout.write(f"{mesh.get_rank()} {int(total())} {dict(zip(mesh.mesh_dim_names, mesh.shape))} {args.steps}\\n")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clone whose train_lm only says where it runs, and the programs that a cluster's nodes have."""
    (tmp_path / "examples").mkdir()
    for name in ("__init__.py", "run.py"):
        (tmp_path / "examples" / name).symlink_to(ROOT / "examples" / name)
    (tmp_path / "examples/train_lm.py").write_text("if True:" + STAND_IN)
    (tmp_path / "bin").mkdir()
    programs = {
        "python": f'exec {sys.executable} "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "srun": f'exec {sys.executable} {ROOT}/tests/fake_srun.py "$@"',
        "scontrol": 'echo "$3" | tr , "\\n"',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def start(folder: Path, command: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        command,
        env=clean(environ) | {"PATH": path},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(*running: subprocess.Popen[str]) -> list[str]:
    """What all of them have printed, sorted, after they ended well."""
    lines: list[str] = []
    for one in running:
        try:
            out, error = one.communicate(timeout=250)
        finally:
            one.kill()
        assert one.returncode == 0, error
        lines += out.splitlines()
    return sorted(lines)


def expected(size: int, mesh: str, steps: int = 7) -> list[str]:
    return [f"{rank} {size} {mesh} {steps}" for rank in range(size)]


def options(script: Path) -> dict[str, str]:
    """What the script's #SBATCH lines ask for."""
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    found = [re.fullmatch(r"#SBATCH --([a-z-]+)=(\S+)", line) for line in lines]
    assert all(found), lines
    return {one[1]: one[2] for one in found if one}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash_that_stops_at_errors(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True).stderr == ""
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("script", SBATCH, ids=lambda path: path.name)
def test_what_a_job_asks_for_fits_together(script: Path) -> None:
    asked, text = options(script), script.read_text()
    tasks, gpus = int(asked["ntasks-per-node"]), int(asked["gpus-per-node"])
    assert set(asked) - {"distribution"} == {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output"
    }  # fmt: skip
    assert asked["nodes"] == {"one": "1", "two": "2"}[script.stem.split("_")[1]]
    assert tasks == (1 if "torchrun" in text else gpus), "one task for each device, or one torchrun for each node"
    assert text.index("#SBATCH --output") < text.index("set -euo"), "sbatch reads no further than the first command"


def test_torchrun_on_one_node(folder: Path) -> None:
    script = start(folder, ["bash", str(RECIPES / "torchrun_one_node.sh"), "--steps", "7"], {"NPROC": "1"})
    assert said(script) == expected(1, "{'replica': 1, 'shard': 1}")


def test_torchrun_on_two_nodes(folder: Path) -> None:
    at = {"NPROC": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = ["bash", str(RECIPES / "torchrun_two_nodes.sh"), "--steps", "7"]
    both = [start(folder, command, at | {"NODE_RANK": str(node)}) for node in range(2)]
    assert said(*both) == expected(2, "{'replica': 2, 'shard': 1}")


def test_a_script_that_lacks_its_node_says_so(folder: Path) -> None:
    script = start(folder, ["bash", str(RECIPES / "torchrun_two_nodes.sh")], {})
    _, error = script.communicate(timeout=20)
    assert script.returncode
    assert "NODE_RANK: 0 on the first node, 1 on the second" in error


@pytest.mark.parametrize(
    ("name", "nodes", "tasks", "mesh"),
    [
        ("slurm_one_node", 1, 2, "{'replica': 1, 'shard': 2}"),
        ("slurm_two_nodes", 2, 1, "{'replica': 2, 'shard': 1}"),
        ("slurm_two_nodes_torchrun", 2, 1, "{'replica': 2, 'shard': 1}"),
    ],
)
def test_a_job(folder: Path, name: str, nodes: int, tasks: int, mesh: str) -> None:
    job = {
        "SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": ",".join(["localhost", "127.0.0.1"][:nodes]),
        "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NTASKS": str(tasks * nodes), "SLURM_NNODES": str(nodes),
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "NPROC": "1",
    }  # fmt: skip
    script = start(folder, ["bash", str(RECIPES / f"{name}.sbatch"), "--steps", "7"], job)
    assert said(script) == expected(2, mesh)


def pods(job: dict[str, Any], changed: dict[str, str]) -> list[list[str]]:
    """The command line of each pod, with the variables that Kubernetes puts in."""
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    lines = []
    for index in range(job["spec"]["completions"]):
        values = {one["name"]: one["value"] for one in container["env"] if "value" in one} | changed
        values["JOB_COMPLETION_INDEX"] = str(index)
        assert {one["name"] for one in container["env"]} == set(values)
        line = "\n".join(container["command"] + container["args"])
        for name, value in values.items():
            line = line.replace(f"$({name})", value)
        lines.append(line.split("\n"))
    return lines


def test_kubernetes(folder: Path) -> None:
    service, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == ("Service", "None", "Job")
    assert service["spec"]["selector"] == {"job-name": name}
    assert values["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    assert values["NPROC"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {one["name"] for one in pod["volumes"]} == {one["name"] for one in container["volumeMounts"]}
    lines = pods(job, {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "NPROC": "2"})
    assert "--nnodes=2" in lines[0]
    assert said(*(start(folder, [*line, "--steps=7"], {}) for line in lines)) == expected(
        4, "{'replica': 2, 'shard': 2}"
    )


def test_ray_trains(tmp_path: Path) -> None:
    """Two workers train, for one step, and leave what the program leaves."""
    command = [sys.executable, "-m", "examples.launch.ray_train", "--workers", "2", "--storage", str(tmp_path / "ray")]
    command += ["--", "--steps", "1", "--mesh", "shard=-1", "--device", "cpu", "--out", str(tmp_path / "out")]
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    ran = subprocess.run(command, env=clean(quiet), cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    assert "held-out files" in ran.stdout + ran.stderr
    assert (tmp_path / "out/loss.png").stat().st_size > 1000
    assert not re.search(r"Warning:", ran.stdout + ran.stderr), "no warnings of Python's"
