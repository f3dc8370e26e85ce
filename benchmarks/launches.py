"""Operations that a steady step launches on a device, and how often the host waits for the device.

    python -m benchmarks.launches

The device is simulated (`shardfn.testing.simulated`): the step is the real one, on shapes without numbers. Each
operation would launch one kernel or more on a real device; views and allocations launch none. Strategies: the
operations of a stage of two matrices, forward and backward, in addition to those of the same functions on plain
tensors; the same with parameters or gradients that are sent in few bits. Optimizers: the operations of one step on 4
matrices with a billion parameters together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.model import perceptron
from benchmarks.report import Goal, parser, publish
from benchmarks.strategies import STRATEGIES
from shardfn import quant
from shardfn.simulated.operations import NAME
from shardfn.testing import Device, World, simulated

LAYERS, WIDTH = 16, 256
MATRICES, ROWS = 4, 256
BILLION = 2**30

# Limits for the operations of a step: a few in all, a few per matrix, or some for each of 64 parts of 16M elements.
WIRES: dict[str, tuple[dict[str, Any], int]] = {
    "gather_format=int8": ({"gather_format": quant.int8()}, 60),
    "gather_format=fp8_e4m3": ({"gather_format": quant.fp8_e4m3()}, 60),
    "gather_format=nf4": ({"gather_format": quant.nf4()}, 110),
    "reduce_format=int8": ({"reduce_format": quant.int8()}, 80),
    "reduce_format=int4": ({"reduce_format": quant.int4()}, 90),
}
Make = Callable[[], so.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, int]] = {
    "sgd with momentum": (lambda: so.sgd(1e-3, momentum=0.9), 10),
    "adam": (lambda: so.adam(1e-3), 10),
    "adamw": (lambda: so.adamw(1e-3), 10),
    "adamw, clipped": (lambda: so.chain(so.clip_by_global_norm(1.0), so.adamw(1e-3)), 40),
    "adamw, skipping": (lambda: so.skip_nonfinite(so.adamw(1e-3)), 40),
    "adamw with a master copy": (lambda: so.fp32_master_weights(so.adamw(1e-3)), 100),
    "adamw, rounding at random": (lambda: so.stochastic_rounding(so.adamw(1e-3)), 2_000),
    "lion": (lambda: so.lion(1e-3), 10),
    "adafactor": (lambda: so.adafactor(1e-3), 1_000),
    "lamb": (lambda: so.lamb(1e-3), 300),
    "muon": (lambda: so.muon(1e-3), 1_000),
    "adamw8bit": (lambda: so.adamw8bit(1e-3), 3_000),
    "lion8bit": (lambda: so.lion8bit(1e-3), 3_000),
}
NARROW = {"adamw with a master copy", "adamw, rounding at random"}
DECIDES = {"adamw, skipping"}  # the host decides once, for all parameters


class Counts(NamedTuple):
    """The numbers of operations and of waits of one steady step."""

    operations: int
    waits: int


def counts(device: Device, step: Callable[[], Any]) -> Counts:
    """The counts of the second call."""
    step()
    device.reset_counts()
    step()
    return Counts(device.operations.total(), sum(one.times for one in device.synchronizations))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=NAME, dtype=dtype)


# --- strategies ---


def layers() -> list[dict[str, Tensor]]:
    return [{"up": empty(WIDTH, 4 * WIDTH), "down": empty(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]


def gradient(f: Callable[..., Tensor], params: Any) -> Callable[[], Any]:
    x = empty(8, WIDTH)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params):
            x = f(p, x)
        return x.square().sum()

    return partial(sf.value_and_grad(loss), params, x)


def by_strategy(device: Device) -> dict[str, Counts]:
    mesh = sf.make_mesh(replica=2, shard=4, device=NAME)
    found = {"plain": counts(device, gradient(perceptron, layers()))}
    for name, strategy in STRATEGIES.items():
        params = sf.shard(layers(), mesh, strategy)
        run = sf.shard_map(gradient(sf.stage(perceptron), params), mesh=mesh, in_specs=(), out_specs=...)
        found[name] = counts(device, run)
    return found


def by_wire(device: Device) -> dict[str, Counts]:
    mesh = sf.make_mesh(replica=2, shard=4, device=NAME)
    params, found = sf.shard(layers(), mesh, sf.full_shard(("replica", "shard"))), {}
    for name, (options, _) in WIRES.items():
        run = sf.shard_map(gradient(sf.stage(perceptron, **options), params), mesh=mesh, in_specs=(), out_specs=...)
        found[name] = counts(device, run)
    return found


# --- optimizers ---


def step_of(name: str) -> Callable[[], Any]:
    columns = BILLION // MATRICES // ROWS
    dtype = torch.bfloat16 if name in NARROW else torch.float32
    optimizer, params = OPTIMIZERS[name][0](), [empty(ROWS, columns, dtype=dtype) for _ in range(MATRICES)]
    grads, state = optree.tree_map(torch.empty_like, params), optimizer.init(params)
    return lambda: optimizer.step(params, grads, state)


def measured() -> tuple[dict[str, Counts], dict[str, Counts], dict[str, Counts]]:
    with simulated(ranks=8) as device:
        return by_strategy(device), by_wire(device), {name: counts(device, step_of(name)) for name in OPTIMIZERS}


def main() -> None:
    args = parser("Operations of a steady step on a device, and how often the host waits.").parse_args()
    ((strategies, wires, optimizers),) = World(1, kind="alone", deadline=300).run(measured)
    plain = strategies.pop("plain").operations
    rows: list[dict[str, Any]] = []
    goals = []
    for name, found in strategies.items():
        more = (found.operations - plain) / LAYERS
        rows.append({"strategy": name, "operations of a stage, more": more, "the host waits": found.waits})
        goals.append(Goal(f"{name}: operations of a stage, more than its function's", more, 20))
        goals.append(Goal(f"{name}: the host waits in a step", found.waits, 0))
    for name, found in wires.items():
        more = (found.operations - plain) / LAYERS
        rows.append({"in few bits": name, "operations of a stage, more": more, "the host waits": found.waits})
        goals.append(Goal(f"{name}: operations of a stage, more than its function's", more, WIRES[name][1]))
        goals.append(Goal(f"{name}: the host waits in a step", found.waits, 0))
    for name, found in optimizers.items():
        rows.append({"optimizer": name, "operations": found.operations, "the host waits": found.waits})
        goals.append(Goal(f"{name}: operations at 1B parameters", found.operations, OPTIMIZERS[name][1]))
        goals.append(Goal(f"{name}: the host waits in a step", found.waits, int(name in DECIDES)))
    publish("a steady step on a simulated device", rows, goals, args.json)


if __name__ == "__main__":
    main()
