"""The peak bytes of live tensors in a step, independent of the allocator: for each strategy, and with the checker.

    python -m benchmarks.peak

A fake world of 4 ranks, `replica=2, shard=2`. The storage of an operation's result counts until it is freed; temporary
memory inside an operation does not. The unit is the bytes of all whole parameters. The limit is the memory for
gradients and copies in docs/reference/strategies.md, plus three stages for temporary values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
import shardfn.optim as so
from benchmarks.model import perceptron
from benchmarks.report import Goal, parser, publish
from benchmarks.strategies import STRATEGIES
from shardfn.testing import World

RANKS, LAYERS, WIDTH = 4, 8, 256
UNDER_WAY = 3 / LAYERS
# Fractions of all parameters: gradients, copies kept for backward, and parameters that other ranks update.
HELD = dict.fromkeys(STRATEGIES, 1 / 4) | {"ddp": 1.0, "hybrid_shard": 0.5, "hybrid_shard_zero2": 0.5}
HELD |= {"hfsdp": 1 / 4 + 1 / 4, "hpz": 1 / 4 + 1 / 2}
EXACT = 0.005  # the time when unused storages are freed may vary
MODES = {"checked": True, "unchecked": False}


class Living(TorchDispatchMode):
    """Counts the bytes of live storages that were made inside this mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {x.untyped_storage() for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in optree.tree_leaves(found):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()) not in self.seen and storage not in given:
                self._made(storage)
        return found

    def _made(self, storage: Any) -> None:
        self.seen.add(storage)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


def steps(strategy: Any, check: bool) -> Callable[[], Callable[[], Any]]:
    """A function that makes newly mapped steps, all on the same parameters."""
    mesh = sf.make_mesh(replica=2, shard=2, device="cpu")
    layers = [{"up": torch.ones(WIDTH, 2 * WIDTH), "down": torch.ones(2 * WIDTH, WIDTH)} for _ in range(LAYERS)]
    params, optimizer, staged = sf.shard(layers, mesh, strategy), so.adamw(1e-3), sf.stage(perceptron)
    kept = [params, optimizer.init(params)]
    rows = torch.ones(32, WIDTH)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params):
            x = staged(p, x)
        return sf.psum(x.square().sum(), ("replica", "shard"))

    def trained(params: Any, state: Any, x: Tensor) -> Any:
        value, grads = sf.value_and_grad(loss)(params, x)
        return *optimizer.step(params, grads, state), value

    def step() -> Callable[[], Any]:
        specs = (..., ..., sf.P(("replica", "shard")))
        run: Any = sf.shard_map(trained, mesh=mesh, in_specs=specs, out_specs=(..., ..., sf.P()), check=check)

        def once() -> None:
            kept[:2] = run(*kept, rows)[:2]

        return once

    return step


def peak(run: Callable[[], Any]) -> int:
    with Living() as living:
        run()
    return living.most


def measured() -> tuple[dict[str, int], dict[str, int]]:
    """The peaks of a steady step with each strategy, and of a first call, checked and unchecked, after another one."""
    steady, first = {}, {}
    for name, strategy in STRATEGIES.items():
        run = steps(strategy, check=False)()
        run()
        steady[name] = peak(run)
    for mode, check in MODES.items():
        made = steps(STRATEGIES["full_shard"], check)
        made()()
        first[mode] = peak(made())
    return steady, first


def main() -> None:
    args = parser("The peak bytes of live tensors in a step, counted.").parse_args()
    ((steady, first),) = World(RANKS, kind="fake", deadline=120).run(measured)
    whole = LAYERS * 2 * 2 * WIDTH**2 * 4
    rows: list[dict[str, Any]] = [{"strategy": name, "peak / parameters": n / whole} for name, n in steady.items()]
    rows += [{"first call": mode, "peak / parameters": n / whole} for mode, n in first.items()]
    goals = [
        Goal(
            f"{name}: peak of a step above what stays / parameters", n / whole, HELD[name] + UNDER_WAY, tolerance=EXACT
        )
        for name, n in steady.items()
    ]
    ratio = first["checked"] / first["unchecked"]
    goals.append(Goal("first call: peak, checked / unchecked", ratio, 1.03, tolerance=EXACT))
    publish("peak bytes of live tensors, above those that stay between steps", rows, goals, args.json)


if __name__ == "__main__":
    main()
