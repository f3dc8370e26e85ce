"""A whole training step compiled, the same step as it is, and FSDP2 with compiled blocks, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.compiled --ranks 2
    OMP_NUM_THREADS=1 python -m benchmarks.compiled --jax jaxenv/bin/python

Two models: a GPT with 34 million parameters, and a deep, thin one of 48 layers of width 128, whose operations are
small. Parameters are gathered in bfloat16, AdamW works in float32, gloo, one thread a rank. Every system has its own
processes, which take turns of a few steps; times are medians. Memory is what the operating system gave to a rank in a
step, above the time between steps, with parameters and optimizer state added. With `--jax`, an interpreter that has JAX
runs the same step afterwards (benchmarks/compiled_jax.py), on as many CPU devices. `compile s` is the call that traces
and compiles, in one process and with an empty cache, for 12 layers and for 48.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardfn as sf
import shardfn.optim as so
from benchmarks.crew import Crew, Usage, in_turns
from benchmarks.model import SEED, Config, Params, Whole, block, embed, head, makers, tokens
from benchmarks.report import Goal, parser, publish
from benchmarks.train_step import KEEPS_MEMORY, timed
from shardfn import P

LOW = torch.bfloat16
GPT = Config()
THIN = Config(vocabulary=1024, width=128, layers=48, heads=4, hidden=352, context=64)
TINY = Config(vocabulary=64, width=32, layers=2, heads=2, hidden=48, context=8)
COMPILES = 3  # steps of which one compiles
SYSTEMS = ("as it is", "compiled", "FSDP2, compiled blocks")


def stepping(config: Config, compiled: bool) -> tuple[Callable[[], Tensor], int]:
    """A step that returns this rank's loss, and the bytes of parameters and state."""
    mesh = sf.make_mesh(data=dist.get_world_size(), device="cpu")
    params = sf.init_sharded(makers(config), SEED, mesh, sf.full_shard("data"))
    optimizer, rows = so.adamw(1e-3), tokens(config, dist.get_rank())
    state = optimizer.init(params)
    first, last = sf.stage(embed, gather_dtype=LOW), sf.stage(head, gather_dtype=LOW)
    layer = sf.stage(functools.partial(block, heads=config.heads), gather_dtype=LOW)

    def loss(params: Params, rows: Tensor) -> Tensor:
        ordered = sf.layers([params["embed"], *params["blocks"], params["head"]])
        x = first(ordered[0], rows[:, :-1])
        for p in ordered[1:-1]:
            x = layer(p, x)
        return sf.pmean(last(ordered[-1], x, rows[:, 1:]), "data")

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P("data")), out_specs=...)
    def trained(params: Params, state: Any, rows: Tensor) -> Any:
        value, grads = sf.value_and_grad(loss)(params, rows)
        return *optimizer.step(params, grads, state), value

    run = sf.compile(trained) if compiled else trained

    def step() -> Tensor:
        nonlocal params, state
        params, state, value = run(params, state, rows)
        return value

    return step, sum(x.nbytes for x in optree.tree_leaves((params, state)) if isinstance(x, Tensor))


def fsdp2(config: Config) -> tuple[Callable[[], Tensor], int]:
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)

    def wrapped(stage: nn.Module, name: str) -> nn.Module:
        stage.compile()
        fully_shard(stage, mp_policy=policy)
        return stage

    model = Whole(config, wrapped)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = tokens(config, dist.get_rank())

    def step() -> Tensor:
        value = model(rows)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step, 3 * sum(x.to_local().nbytes for x in model.parameters())  # type: ignore[attr-defined]


def built(usage: Usage, system: str, config: Config) -> dict[str, Callable[..., Any]]:
    torch.set_num_threads(1)
    step, held = fsdp2(config) if system.startswith("FSDP2") else stepping(config, system == "compiled")
    return {
        "train": functools.partial(timed, step),
        "memory": lambda: held + transient(usage, step),
        "sent": lambda: sent(step),
    }


def transient(usage: Usage, step: Callable[[], Any]) -> float:
    """The bytes that a step takes and gives back."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 2**16)  # large blocks are the kernel's, so that its figure is the memory in use
    libc.mallopt(-1, 0)
    step()
    libc.malloc_trim(0)
    before = usage.again()
    for _ in range(3):
        step()
    return usage.peak() + usage.base - before


def sent(step: Callable[[], Any]) -> tuple[int, int]:
    with sf.collectives.ledger() as log:
        step()
    return log.count(), log.bytes()


def compile_seconds(layers: int, config: Config) -> float:
    """Seconds of the call that compiles, with an empty cache."""
    with Crew(1, _compiling, replace(config, layers=layers), environment=KEEPS_MEMORY) as crew:
        return float(crew.turn("compile")[0])


def _compiling(usage: Usage, config: Config) -> dict[str, Callable[..., Any]]:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    stepping(replace(config, layers=1), True)[0]()  # imports do not count
    step, _ = stepping(config, True)
    step()

    def run() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return {"compile": run}


def compared(config: Config, ranks: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row for each system."""
    with ExitStack() as stack:
        crews = {
            name: stack.enter_context(Crew(ranks, built, name, config, environment=KEEPS_MEMORY)) for name in SYSTEMS
        }
        for crew in crews.values():
            crew.turn("train", COMPILES)
        took, losses = in_turns(
            {name: functools.partial(crew.turn, "train", steps) for name, crew in crews.items()}, rounds
        )
        memory = {name: max(crew.turn("memory")) / 1e6 for name, crew in crews.items()}
        counted = {name: crew.turn("sent")[0] for name, crew in crews.items()}
    return [
        {
            "system": name,
            "step ms": took[name],
            "/ as it is": took[name] / took[SYSTEMS[0]],
            "MB": memory[name],
            "MB / as it is": memory[name] / memory[SYSTEMS[0]],
            "calls": counted[name][0],
            "MB sent": counted[name][1] / 1e6,
            "loss": losses[name][-1],
        }
        for name in SYSTEMS
    ]


def by_jax(python: str, config: Config, ranks: int, steps: int) -> dict[str, Any]:
    """The row of JAX."""
    script = Path(__file__).with_name("compiled_jax.py")
    sizes = {key: value for key, value in asdict(config).items() if isinstance(value, int)}
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}"}
    command = [python, str(script), json.dumps(sizes | {"steps": steps})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{python} {script} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    took = statistics.median(found["seconds"]) * 1e3
    return {"system": f"jax.jit(shard_map), {found['jax']}", "step ms": took, "loss": found["loss"]}


def main() -> None:
    options = parser("A whole step compiled, the step as it is, and FSDP2 with compiled blocks, side by side.")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--steps", type=int, default=3, help="steps per turn")
    options.add_argument("--jax", metavar="PYTHON", help="a Python interpreter that has JAX")
    options.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    args = options.parse_args()
    models = {"tiny": TINY} if args.tiny else {"GPT": GPT, "deep and thin": THIN}
    rows, goals = [], []
    for name, config in models.items():
        found = compared(config, args.ranks, args.rounds, args.steps)
        if args.jax:
            row = by_jax(args.jax, config, args.ranks, COMPILES + (1 + args.rounds) * args.steps)
            found.append(row | {"/ as it is": row["step ms"] / found[0]["step ms"]})
        rows += [{"model": name} | row for row in found]
        whole, compiled = found[0], found[1]
        goals += [
            Goal(
                f"{name}: step, compiled / as it is",
                compiled["/ as it is"],
                0.97 if name == "GPT" else 0.85,
                tolerance=0.1,
            ),
            Goal(f"{name}: memory, compiled / as it is", compiled["MB / as it is"], 1.05, tolerance=0.02),
            Goal(f"{name}: messages, compiled / as it is", compiled["calls"] / whole["calls"], 1.0),
            Goal(f"{name}: bytes, compiled / as it is", compiled["MB sent"] / whole["MB sent"], 1.0),
        ]
    if not args.tiny:
        few, many = (compile_seconds(layers, THIN) for layers in (12, 48))
        rows.append({"layers": 12, "compile s": few})
        rows.append({"layers": 48, "compile s": many})
        goals.append(Goal("compile time of 48 layers / of 12", many / few, 1.5, tolerance=0.2))
    publish(f"{args.ranks} ranks", rows, goals, args.json)


if __name__ == "__main__":
    main()
