"""What the gallery's programs are made of, and what they are: programs as people write them, each with one mistake.

A program takes `shard_map`, which knows its mesh and whether it checks, and the mesh, and returns numbers that one
process computes by the program's `reference`. The line that a message must name ends with `# here`. A line that is to
be replaced stands under comments `# fix: ...`, which say by what: between the two there is no other difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P

AS_FIXED = ""
"""What a message says to write, where that stands in the comments of the program."""

DATA, SHARD = {"data": 2}, {"shard": 2}
HYBRID, GRID = {"replica": 2, "shard": 2}, {"data": 2, "tensor": 2}
BOTH = ("replica", "shard")


@dataclass(frozen=True)
class Wrong:
    """A wrong program, and what must be said of it.

    Attributes:
        program: with its mistake.
        kind: of the finding that comes first.
        axes: that it names.
        path: of the value in the arguments or the result; empty where the value has none.
        fix: what the message says to write.
        reference: what one process computes.
        mesh: sizes of its axes.
        says: what else the message says.
        hangs: whether ranks wait forever when nobody checks.
    """

    program: Callable[..., Any]
    kind: str
    axes: tuple[str, ...]
    path: str
    fix: str
    reference: Callable[[], Any]
    mesh: dict[str, int]
    says: str = ""
    hangs: bool = False

    @property
    def name(self) -> str:
        return self.program.__name__


GALLERY: dict[str, Wrong] = {}


def wrong(
    kind: str,
    axes: str | tuple[str, ...],
    path: str,
    fix: str,
    reference: Callable[[], Any],
    mesh: dict[str, int] = DATA,
    says: str = "",
    hangs: bool = False,
) -> Callable[[Any], Any]:
    along = (axes,) if isinstance(axes, str) else axes

    def take(program: Any) -> Any:
        GALLERY[program.__name__] = Wrong(program, kind, along, path, fix, reference, mesh, says, hangs)
        return program

    return take


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ROWS, IN, OUT = 8, 4, 3
COUNT = ROWS * OUT
X, Y = normal(ROWS, IN, seed=1), normal(ROWS, OUT, seed=2)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 1])
TOKENS = torch.tensor([[0, 3, 1, 4], [2, 2, 5, 1], [5, 0, 3, 3], [4, 1, 2, 0]])
REAL = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0], dtype=torch.float64)  # a mask with more on the first rank
SEQUENCES, TARGETS = normal(ROWS, 4, IN, seed=3), normal(ROWS, 4, IN, seed=4)
SHAPES: dict[str, tuple[int, ...]] = {
    "w": (IN, OUT), "b": (OUT,), "norm": (IN,), "first": (IN, IN), "up": (IN, 6), "down": (6, OUT), "narrow": (6, IN),
    "table": (6, IN), "place": (4, IN), "gate": (IN, 4), "scale": (), "low": (IN, 2), "high": (2, OUT),
    "center": (OUT,),
}  # fmt: skip


def weights(*names: str, seed: int = 0) -> dict[str, Tensor]:
    """New tensors, since optimizers overwrite theirs."""
    return {name: 0.5 * normal(*SHAPES[name], seed=100 * seed + 10 + list(SHAPES).index(name)) for name in names}


def part(whole: Tensor, mesh: Any, *axes: str, dim: int = 0) -> Tensor:
    """This rank's piece."""
    for axis in axes:
        whole = whole.chunk(mesh[axis].size(), dim)[mesh.get_local_rank(axis)]
    return whole.clone()


def sgd(params: Any, grads: Any, lr: Any = 0.1) -> Any:
    return optree.tree_map(lambda p, g: p - lr * g, params, grads)


def train(
    shard_map: Any, mesh: Any, loss_fn: Any, params: Any, *batch: Tensor, axes: Any = "data", specs: Any = None
) -> Any:
    """A step of SGD by hand, on rows that `axes` cut: new parameters, placed as `specs` say, and the loss."""
    specs = P() if specs is None else specs

    @shard_map(in_specs=(specs, *(P(axes) for _ in batch)), out_specs=(specs, P()))
    def step(params, *batch):
        loss, grads = sf.value_and_grad(loss_fn)(params, *batch)
        return sgd(params, grads), loss

    along = (axes,) if isinstance(axes, str) else axes
    return step(params, *(part(whole, mesh, *along) for whole in batch))


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum()


def linear(p: Any) -> Tensor:
    return X @ p["w"] + p.get("b", 0)


def error(p: Any) -> Tensor:
    return squares(linear(p), Y) / COUNT


def masked(p: Any) -> Tensor:
    return ((linear(p) - Y).square().mean(1) * REAL).sum() / REAL.sum()


def decayed(p: Any) -> Tensor:
    return error(p) + 0.1 * p["w"].square().sum()


def trained(loss: Callable[[Any], Tensor], *names: str) -> Callable[[], Any]:
    """New parameters and the loss."""

    def reference() -> Any:
        params = weights(*names)
        grads, value = torch.func.grad_and_value(loss)(params)
        return sgd(params, grads), value

    return reference


def stepped(loss: Callable[[Any], Tensor], *names: str) -> Callable[[], Any]:
    """New parameters."""
    return lambda: trained(loss, *names)()[0]


def graded(loss: Callable[[Any], Tensor], *names: str) -> Callable[[], Any]:
    """The gradient."""
    return lambda: torch.func.grad(loss)(weights(*names))


def valued(f: Callable[[Any], Any], *names: str) -> Callable[[], Any]:
    return lambda: f(weights(*names))


def staged(p: Any) -> Tensor:
    return error(p["layer"])


def train_stage() -> Any:
    params = {"layer": weights("w", "b")}
    grads, loss = torch.func.grad_and_value(staged)(params)
    return sgd(params, grads), loss


def megatron(p: Any) -> Tensor:
    return squares(torch.tanh(X @ p["up"]) @ p["down"], Y) / COUNT


TENSOR = {"up": P(None, "tensor"), "down": P("tensor")}


def columns_and_rows(mesh: Any, **more: Tensor) -> dict[str, Tensor]:
    whole = weights("up", "down")
    return {"up": part(whole["up"], mesh, "tensor", dim=1), "down": part(whole["down"], mesh, "tensor"), **more}
