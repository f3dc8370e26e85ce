"""Starts tasks like SLURM's srun, but all of them on this machine, with the variables that srun sets.

The nodes are those of SLURM_JOB_NODELIST; options such as `--nodes` and the job's variables give their number and that
of the tasks. The tasks of a node are consecutive, unless `--distribution=cyclic`. As with `--kill-on-bad-exit`, a task
that fails ends the others.
"""

import os
import subprocess
import sys
import time

from shardfn.mesh.launchers import hosts


def number(options, name, default):
    return int(options.get(name) or os.environ.get("SLURM_" + name.upper().replace("-", "_")) or default)


def tasks(options):
    """The names of the nodes, and the node's index of each task."""
    names = list(hosts(os.environ["SLURM_JOB_NODELIST"]))
    nodes = number(options, "nodes", len(names)) if "nodes" in options else len(names)
    count = number(options, "ntasks", number(options, "ntasks-per-node", 1) * nodes)
    placed = [task % nodes for task in range(count)]
    return names[:nodes], placed if options.get("distribution") == "cyclic" else sorted(placed)


def main():
    options, command = {}, sys.argv[1:]
    while command[0].startswith("--"):
        name, _, value = command.pop(0)[2:].partition("=")
        options[name] = value
    names, placed = tasks(options)
    here = [placed.count(node) for node in range(len(names))]
    step = {
        "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(len(placed)), "SLURM_STEP_NUM_TASKS": str(len(placed)),
        "SLURM_STEP_NODELIST": ",".join(names), "SLURM_STEP_NUM_NODES": str(len(names)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, here)),
    }  # fmt: skip
    running = []
    for rank, node in enumerate(placed):
        own = {
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(placed[:rank].count(node)), "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": f"{names[node]}-{node}",
        }  # fmt: skip
        running.append(subprocess.Popen(command, env=os.environ | step | own))
    while any(task.poll() is None for task in running):
        if any(task.poll() for task in running):
            time.sleep(1)  # so that every task can print its messages
            for task in running:
                task.terminate()
        time.sleep(0.05)
    sys.exit(max(abs(task.returncode) for task in running))


if __name__ == "__main__":
    main()
