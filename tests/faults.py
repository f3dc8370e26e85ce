"""Programs that run out of memory at chosen places, on chosen ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

import shardfn as sf
from shardfn.mesh.groups import world_of_thread
from tests.models import STRATEGIES, distance, normal, plainly, residual, squares

D, DEPTH, ROWS = 4, 3, 8
Fault = tuple[int, int, str, int, int]  # rank, step, place, micro-batch, and the most parts with which it happens


class Faults:
    """Raises errors at the chosen places: `forward` or `backward` with `in front`, `in k` or `after k`; or `loss`."""

    def __init__(self, faults: Sequence[Fault], rank: int, error: Callable[[], Exception]) -> None:
        self.mine, self.error = [fault[1:] for fault in faults if fault[0] == rank], error
        self.step = self.batch = self.parts = self.met = 0

    def begin(self, x: Tensor, whole: Tensor) -> None:
        """Notes the beginning of a micro-batch `x` of the batch `whole`."""
        self.batch = 1 if x.data_ptr() == whole.data_ptr() else self.batch + 1
        self.parts = round(len(whole) / len(x))

    def at(self, place: str) -> None:
        for step, where, batch, parts in self.mine:
            if (step, where, batch) == (self.step, place, self.batch) and self.parts <= parts:
                self.met += 1
                raise self.error()

    def passing(self, place: str, x: Tensor) -> Tensor:
        """Returns `x`; may raise an error in forward or in backward."""
        self.at(f"forward {place}")
        made: Tensor = _Passing.apply(x, self, place)
        return made


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, faults: Faults, place: str) -> Tensor:
        ctx.faults, ctx.place = faults, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        ctx.faults.at(f"backward {ctx.place}")
        return ct, None, None


def out() -> Exception:
    """The error of an accelerator's allocator."""
    return torch.OutOfMemoryError("pretended: out of memory. Tried to allocate 2.00 GiB")


def cpus() -> Exception:
    """The error of the CPU's allocator."""
    return RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 9 B")


def pythons() -> Exception:
    """Python's own error."""
    return MemoryError()


def net(stage: Any, ps: Any, x: Tensor, faults: Faults | None) -> Tensor:
    """Residual blocks, with faults before, in and after each of them."""
    x = x * ps["scale"]
    x = x if faults is None else faults.passing("in front", x)
    for k, p in enumerate(sf.layers(ps["blocks"])):

        def block(p: Any, x: Tensor, k: int = k) -> Tensor:
            y = residual(p, x)
            return y if faults is None else faults.passing(f"in {k}", y)

        x = stage(block)(p, x)
        x = x if faults is None else faults.passing(f"after {k}", x)
    return x


def parameters() -> Any:
    return {"blocks": squares(DEPTH), "unused": normal(3, seed=21)}


def rows_of(rank: int) -> Tensor:
    return normal(ROWS, D, seed=50 + rank)


def scale() -> Tensor:
    return normal(D, seed=30)


def trained(
    sizes: dict[str, int],
    strategy: Any,
    micro: Any,
    faults: Sequence[Fault] = (),
    steps: int = 1,
    error: Callable[[], Exception] = out,
    dropout: float = 0.0,
    options: dict[str, Any] | None = None,
    scoped: bool = True,
    scratch: Any = None,
    **how: Any,
) -> tuple[Any, list[int], int]:
    """Trains; returns the results of the steps, the number of parts of each, and the number of faults met.

    Args:
        sizes: sizes of the mesh.
        strategy: a strategy's name, or a placement.
        micro: the argument of `accumulate`, or a list with one number for each step.
        faults: where errors are raised.
        steps: the number of steps.
        error: makes the error.
        dropout: the probability.
        options: options of the stages.
        scoped: whether a step runs under shard_map.
        scratch: the scratch folder of the mesh.
        **how: more arguments of `accumulate`.
    """
    mesh = sf.make_mesh(device="cpu", scratch=scratch, **sizes)
    rank, n = mesh.get_rank(), mesh.size()
    found, rows, used = Faults(faults, rank, error), rows_of(rank), []
    flat = sf.shard(parameters(), mesh, STRATEGIES[strategy] if isinstance(strategy, str) else strategy)
    ps = {**flat, "scale": scale()}
    torch.manual_seed(rank)

    def step(ps: Any, x: Tensor) -> Any:
        def loss(ps: Any, part: Tensor) -> Any:
            found.begin(part, x)
            part = torch.nn.functional.dropout(part, dropout)
            y = net(lambda f: sf.stage(f, **options or {}), ps, part, found)
            total = y.square().sum() / (n * ROWS)
            found.at("loss")
            return (total, part.sum()) if how.get("has_aux") else total

        run = sf.accumulate(loss, x, micro=micro[found.step] if isinstance(micro, list) else micro, **how)
        value, grads = run(ps)
        used.append(run.micro)
        return value, grads

    if scoped:
        step = sf.shard_map(step, mesh=mesh, in_specs=(..., ...), out_specs=(..., ...))
    results = []
    for found.step in range(steps):
        results.append(step(ps, rows))
        rows = rows + 0.01 * results[-1][1]["scale"]
    return [(value, plain(grads)) for value, grads in results], used, found.met


def plain(grads: Any) -> Any:
    """Gradients as whole tensors, except plain gradients, which are each rank's own."""
    return {**sf.unshard({k: v for k, v in grads.items() if k != "scale"}), "scale": grads["scale"]}


def forget() -> bool:
    """Forgets which batch sizes fit."""
    for name in [name for name in world_of_thread().agreed if name.startswith("fitting ")]:
        world_of_thread().agreed.pop(name)
    return True


def compared(sizes: dict[str, int], strategy: Any, faults: Sequence[Fault], steps: int = 2, **how: Any) -> Any:
    """Compares a run that meets faults with a run with the same parts, and with one process.

    Returns the parts, the number of faults met, whether both runs are equal bit for bit, and the distance of the first
    step from one process, which is nan with dropout.
    """
    forget()
    error = how.pop("error", out)
    results, used, met = trained(sizes, strategy, "auto", faults, steps, error=error, **how)
    again, _, _ = trained(sizes, strategy, used, (), steps, **how)
    far = float("nan") if how.get("dropout") else apart(results[0], sizes, how.get("has_aux", False))
    return used, met, identical(results, again), far


def apart(result: Any, sizes: dict[str, int], has_aux: bool) -> float:
    """The distance of a step's gradient from that of one process, for all ranks' rows."""
    n = sizes["replica"] * sizes["shard"]
    mesh = sf.make_mesh(device="cpu", **sizes)
    whole = {**parameters(), "scale": scale()}

    def joint(ps: Any) -> Tensor:
        each = [net(plainly, ps, rows_of(rank), None).square().sum() for rank in range(n)]
        return torch.stack(each).sum() / (n * ROWS)

    def own(ps: Any) -> Tensor:
        return net(plainly, ps, rows_of(mesh.get_rank()), None).square().sum() / (n * ROWS)

    want = torch.func.grad(joint)(whole)
    want["scale"] = torch.func.grad(own)(whole)["scale"]
    value = result[0][0] if has_aux else result[0]
    return distance((value, result[1]), (own(whole), want))


def identical(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))
