"""Programs that run out of memory where they are told to, on the ranks that are told to."""

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
Fault = tuple[int, int, str, int, int]  # the rank, step, place and micro-batch, and the most parts, in which it happens


class Faults:
    """Raises an error where it is told to: `forward` or `backward`, `in front`, `in k`, `after k`, or `loss`."""

    def __init__(self, faults: Sequence[Fault], rank: int, error: Callable[[], Exception]) -> None:
        self.mine, self.error = [fault[1:] for fault in faults if fault[0] == rank], error
        self.step = self.batch = self.parts = self.met = 0

    def begin(self, x: Tensor, whole: Tensor) -> None:
        """A micro-batch of a batch."""
        self.batch = 1 if x.data_ptr() == whole.data_ptr() else self.batch + 1
        self.parts = round(len(whole) / len(x))

    def at(self, place: str) -> None:
        for step, where, batch, parts in self.mine:
            if (step, where, batch) == (self.step, place, self.batch) and self.parts <= parts:
                self.met += 1
                raise self.error()

    def passing(self, place: str, x: Tensor) -> Tensor:
        """`x`, which may not come through, forward or backward."""
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
    """As an accelerator's allocator says it."""
    return torch.OutOfMemoryError("pretended: out of memory. Tried to allocate 2.00 GiB")


def cpus() -> Exception:
    """As the CPU's does."""
    return RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 9 B")


def pythons() -> Exception:
    """As Python does."""
    return MemoryError()


def net(stage: Any, ps: Any, x: Tensor, faults: Faults | None) -> Tensor:
    """Residual blocks; faults are before them, in them and between them."""
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
    """What steps of training gave; in how many parts each ran; how many faults were met.

    Args:
        sizes: of the mesh.
        strategy: its name, or a placement.
        micro: as `accumulate` takes it; a list for a number at each step.
        faults: where errors are raised.
        steps: how many.
        error: what is raised.
        dropout: probability.
        options: of the stages.
        scoped: whether a step runs under shard_map.
        scratch: of the mesh.
        **how: more for `accumulate`.
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
    """Gradients as whole tensors, but the plain ones, which are each rank's own."""
    return {**sf.unshard({k: v for k, v in grads.items() if k != "scale"}), "scale": grads["scale"]}


def forget() -> bool:
    """What fits is found anew."""
    for name in [name for name in world_of_thread().agreed if name.startswith("fitting ")]:
        world_of_thread().agreed.pop(name)
    return True


def compared(sizes: dict[str, int], strategy: Any, faults: Sequence[Fault], steps: int = 2, **how: Any) -> Any:
    """Parts, faults met, whether it was bit for bit a run with those parts, and the distance from one process.

    The distance is of the first step, and nan with dropout.
    """
    forget()
    error = how.pop("error", out)
    results, used, met = trained(sizes, strategy, "auto", faults, steps, error=error, **how)
    again, _, _ = trained(sizes, strategy, used, (), steps, **how)
    far = float("nan") if how.get("dropout") else apart(results[0], sizes, how.get("has_aux", False))
    return used, met, identical(results, again), far


def apart(result: Any, sizes: dict[str, int], has_aux: bool) -> float:
    """How far a step's gradient is from that of one process, for all ranks' rows."""
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
