"""What JAX's `shard_map(check_vma=True)` refuses, said in shardfn: wrong programs in the gallery's form.

The list is from `jax/_src/shard_map.py`, the rules of the collectives, of loops and branches and of custom derivatives,
and JAX's own tests. benchmarks/check_vma_jax.py has each of them in JAX. Programs without a reference were meant to be
nothing else; that they are wrong is seen in ranks with different results under a spec that says they are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import shardfn as sf
from shardfn import P
from tests.check.gallery.setting import (
    BOTH,
    COUNT,
    DATA,
    GRID,
    HYBRID,
    IN,
    LABELS,
    TENSOR,
    Wrong,
    X,
    Y,
    error,
    graded,
    normal,
    part,
    sgd,
    squares,
    valued,
    weights,
)  # fmt: skip

COLUMNS = {"tensor": 2}
V = normal(IN, seed=5)  # a vector that all ranks hold
CANNOT = {  # be said here, and why
    "jax_tanh_of_partial_sums": "a partial sum has no type of its own: it varies"
}
FROM_JAX: dict[str, Wrong] = {}


def wrong(
    kind: str,
    axes: str | tuple[str, ...] = "data",
    path: str = "result",
    reference: Callable[[], Any] | None = None,
    mesh: dict[str, int] = DATA,
) -> Callable[[Any], Any]:
    """Puts a program among the others, by its name."""
    along = (axes,) if isinstance(axes, str) else axes

    def take(program: Any) -> Any:
        FROM_JAX[program.__name__] = Wrong(program, kind, along, path, "", reference or nothing, mesh)
        return program

    return take


def nothing() -> None:
    """Of a program that was meant to be nothing else."""


def alone(shard_map: Any, mesh: Any, f: Any, *rows: Tensor, out: Any = None) -> Any:
    """Of the vector that all ranks hold, and of rows."""
    mapped = shard_map(f, in_specs=(P(), *[P("data")] * len(rows)), out_specs=P() if out is None else out)
    return mapped(V.clone(), *(part(whole, mesh, "data") for whole in rows))


def of_rows(shard_map: Any, mesh: Any, f: Any, out: Any = None) -> Any:
    return shard_map(f, in_specs=P("data"), out_specs=P() if out is None else out)(part(X, mesh, "data"))


def local(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return squares(x @ p["w"], y) / COUNT


def ddp(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return sf.psum(squares(x @ sf.pvary(p["w"], "data"), y), "data") / COUNT


def batch(mesh: Any) -> tuple[Tensor, Tensor]:
    return part(X, mesh, "data"), part(Y, mesh, "data")


ROWS = (P(), P("data"), P("data"))


# --- outputs that vary where their spec says that they do not ---


@wrong("output", reference=valued(error, "w"))
def jax_value_out(shard_map, mesh):
    return shard_map(local, in_specs=ROWS, out_specs=P())(weights("w"), *batch(mesh))


def told(p: Any) -> Any:
    return {"loss": error(p), "accuracy": ((X @ p["w"]).argmax(1) == LABELS).double().mean()}


@wrong("output", path="result['accuracy']", reference=valued(told, "w"))
def jax_second_output(shard_map, mesh):
    def f(p, x, y, labels):
        return {"loss": ddp(p, x, y), "accuracy": ((x @ p["w"]).argmax(1) == labels).double().mean()}

    return shard_map(f, in_specs=(*ROWS, P("data")), out_specs=P())(
        weights("w"), *batch(mesh), part(LABELS, mesh, "data")
    )


@wrong("output", "shard", reference=valued(error, "w"), mesh=HYBRID)
def jax_one_axis_of_two(shard_map, mesh):
    def f(p, x, y):
        return sf.psum(squares(x @ p["w"], y), "replica") / COUNT

    rows = part(X, mesh, *BOTH), part(Y, mesh, *BOTH)
    return shard_map(f, in_specs=(P(), P(BOTH), P(BOTH)), out_specs=P())(weights("w"), *rows)


@wrong("output", reference=lambda: 2 * X)
def jax_gathered_out(shard_map, mesh):
    """The numbers are right, and its derivative is not: each rank's cotangent is added up."""

    def f(x):
        return sf.all_gather(x, "data") * (1 + sf.axis_index("data"))

    return of_rows(shard_map, mesh, f)


@wrong("output")
def jax_permuted_out(shard_map, mesh):
    return of_rows(shard_map, mesh, lambda x: sf.ppermute(x, "data", [(0, 1), (1, 0)]))


@wrong("output")
def jax_exchanged_out(shard_map, mesh):
    return of_rows(shard_map, mesh, lambda x: sf.all_to_all(x, "data", split_dim=1, concat_dim=0))


@wrong("output")
def jax_scattered_out(shard_map, mesh):
    return of_rows(shard_map, mesh, lambda x: sf.reduce_scatter(x, "data"))


@wrong("output")
def jax_selected_out(shard_map, mesh):
    return alone(shard_map, mesh, lambda v, x: torch.where(x.mean() > X.mean(), v, 2 * v), X)


@wrong("output")
def jax_written_into_a_buffer(shard_map, mesh):
    def f(v, x):
        kept = v.clone()
        kept.copy_(x.mean(0))
        return kept

    return alone(shard_map, mesh, f, X)


@wrong("output", "tensor", "", lambda: X.sum(), GRID)
def jax_nested_out(shard_map, mesh):
    def f(x):
        inner = shard_map(lambda x: x.sum(1), in_specs=P("data", "tensor"), out_specs=P("data"))
        return sf.psum(inner(x).sum(), "data")

    x = part(part(X, mesh, "data"), mesh, "tensor", dim=1)
    return shard_map(f, in_specs=P("data", "tensor"), out_specs=P())(x)


# --- ranks ---


@wrong("output")
def jax_scaled_by_rank(shard_map, mesh):
    return alone(shard_map, mesh, lambda v: v * (1 + sf.axis_index("data")))


@wrong("output")
def jax_row_of_this_rank(shard_map, mesh):
    return alone(shard_map, mesh, lambda v: v[sf.axis_index("data")])


@wrong("output")
def jax_piece_of_this_rank(shard_map, mesh):
    return alone(shard_map, mesh, lambda v: v.chunk(2)[sf.axis_index("data")])


@wrong("output")
def jax_branch_on_rank(shard_map, mesh):
    return alone(shard_map, mesh, lambda v: 2 * v if sf.axis_index("data") == 0 else v)


@wrong("output")
def jax_branch_on_rows(shard_map, mesh):
    return alone(shard_map, mesh, lambda v, x: 2 * v if x.mean() > X.mean() else v, X)


@wrong("output")
def jax_number_of_rows(shard_map, mesh):
    return alone(shard_map, mesh, lambda v, x: x.sum().item() * v, X)


# --- collectives along an axis where a value is the same, or varies already ---


@wrong("sum", "tensor", "", lambda: X.sum(), GRID)
def jax_psum_one_axis_more(shard_map, mesh):
    return of_rows(shard_map, mesh, lambda x: sf.psum(x.sum(), ("data", "tensor")))


@wrong("sum", "tensor", "", lambda: torch.func.grad(lambda x: x.square().mean())(X), GRID)
def jax_pmean_one_axis_more(shard_map, mesh):
    """The number is right, and its derivative is half of what it should be."""

    def loss(x):
        return sf.pmean(x.square().mean(), ("data", "tensor"))

    def f(x):
        return sf.all_gather(sf.grad(loss)(x), "data", to="invariant")

    return of_rows(shard_map, mesh, f)


@wrong("sum", "tensor", "", lambda: X[:4] + X[4:], GRID)
def jax_psum_scatter_one_axis_more(shard_map, mesh):
    def f(x):
        return sf.all_gather(sf.reduce_scatter(x, ("data", "tensor")), ("data", "tensor"), to="invariant")

    return of_rows(shard_map, mesh, f)


@wrong("sum", "data", "", lambda: V)
def jax_psum_of_reduced(shard_map, mesh):
    return alone(shard_map, mesh, lambda v: sf.psum(v, "data"))


@wrong("vary", "data", "", lambda: torch.func.grad(lambda x: squares(x @ weights("w")["w"], Y) / COUNT)(X))
def jax_pvary_of_rows(shard_map, mesh):
    def loss(x, y):
        return ddp(weights("w"), sf.pvary(x, "data"), y)

    def f(x, y):
        return sf.all_gather(sf.grad(loss)(x, y), "data", to="invariant")

    return shard_map(f, in_specs=(P("data"), P("data")), out_specs=P())(*batch(mesh))


@wrong("vary", "data", "", lambda: torch.func.grad(lambda x: squares(x @ weights("w")["w"], Y) / COUNT)(X), GRID)
def jax_pvary_one_axis_more(shard_map, mesh):
    def loss(x, y):
        return sf.psum(squares(sf.pvary(x, ("data", "tensor")) @ weights("w")["w"], y), "data") / COUNT

    def f(x, y):
        return sf.all_gather(sf.grad(loss)(x, y), "data", to="invariant")

    return shard_map(f, in_specs=(P("data"), P("data")), out_specs=P())(*batch(mesh))


@wrong("vary", "data", "", graded(error, "w"))
def jax_reduced_twice(shard_map, mesh):
    def loss(p, x, y):
        return ddp(sf.pvary(p, "data"), x, y)

    return shard_map(sf.grad(loss), in_specs=ROWS, out_specs=P())(weights("w"), *batch(mesh))


@wrong("gradient", "data", "v", lambda: X[:, 0].reshape(2, 4).sum(0))
def jax_gather_of_what_all_have(shard_map, mesh):
    def loss(v, x):
        mine = sf.all_gather(v, "data").chunk(2)[sf.axis_index("data")]
        return sf.psum((mine * x[:, 0]).sum(), "data")

    def gradient(v, x):
        return sf.grad(loss)(v, x)

    return alone(shard_map, mesh, gradient, X)


# --- loops and branches ---


def steps(v: Tensor, x: Tensor) -> Tensor:
    for row in x:
        v = torch.tanh(v + row)
    return v.sum()


@wrong("gradient", "data", "v", lambda: torch.func.grad(lambda v: steps(v, X[:4]) + steps(v, X[4:]))(V))
def jax_scan_carry(shard_map, mesh):
    def gradient(v, x):
        return sf.grad(lambda v: sf.psum(steps(v, x), "data"))(v)

    return alone(shard_map, mesh, gradient, X)


@wrong("output")
def jax_while_carry(shard_map, mesh):
    def f(v, x):
        while v.square().sum() < 100:
            v = v + 1 + x.mean(0).square()
        return v

    return alone(shard_map, mesh, f, X)


@wrong("output")
def jax_branches_of_two_types(shard_map, mesh):
    return alone(shard_map, mesh, lambda v, x: x.mean(0) if v.square().sum() > 0 else v, X)


# --- derivatives ---


def pvaried(p: Any, x: Tensor, y: Tensor) -> Any:
    """The gradient of this rank's error, by hand."""
    return sf.grad(local)(sf.pvary(p, "data"), x, y)


@wrong("gradient", path="p['w']", reference=graded(error, "w"))
def jax_gradient_of_pvaried(shard_map, mesh):
    return shard_map(pvaried, in_specs=ROWS, out_specs=P())(weights("w"), *batch(mesh))


@wrong("gradient", path="p['w']", reference=lambda: sgd(weights("w"), graded(error, "w")()))
def jax_update_by_a_local_gradient(shard_map, mesh):
    def step(p, x, y):
        return sgd(p, pvaried(p, x, y))

    return shard_map(step, in_specs=ROWS, out_specs=P())(weights("w"), *batch(mesh))


@wrong("gradient", path="", reference=lambda: sgd(weights("w"), graded(error, "w")(), -1))
def jax_momentum_of_local_gradients(shard_map, mesh):
    def step(m, x, y):
        return sgd(m, pvaried(weights("w"), x, y), -1)

    return shard_map(step, in_specs=ROWS, out_specs=P())(weights("w"), *batch(mesh))


class Product(Function):
    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(w, x)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        w, x = ctx.saved_tensors
        return x.T @ g, g @ w.T


@wrong("gradient", path="params['w']", reference=graded(lambda p: (X @ p["w"]).sum() ** 2, "w"))
def jax_custom_vjp_forgets_psum(shard_map, mesh):
    def loss(params, x):
        return sf.psum(Product.apply(params["w"], x).sum(), "data") ** 2

    def gradient(params, x):
        return sf.grad(loss)(params, x)

    return shard_map(gradient, in_specs=ROWS[:2], out_specs=P())(weights("w"), part(X, mesh, "data"))


class Total(Function):
    """A sum over ranks whose transpose is another one."""

    @staticmethod
    def forward(ctx, x):
        return sf.psum(x, "data")

    @staticmethod
    def backward(ctx, g):
        return sf.psum(g, "data")


@wrong("sum", "data", "", lambda: torch.func.grad(lambda x: x.sum() ** 2)(X))
def jax_custom_vjp_of_psum_is_psum(shard_map, mesh):
    def f(x):
        return sf.all_gather(sf.grad(lambda x: Total.apply(x.sum()) ** 2)(x), "data", to="invariant")

    return of_rows(shard_map, mesh, f)


class Sum(Function):
    """A sum over ranks whose tangent is not one."""

    @staticmethod
    def forward(x):
        return sf.psum(x, "data")

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.clone()


@wrong("output", reference=lambda: 2 * X.sum() ** 2)
def jax_custom_jvp_forgets_psum(shard_map, mesh):
    return of_rows(shard_map, mesh, lambda x: torch.func.jvp(lambda x: Sum.apply(x.sum()) ** 2, (x,), (x,))[1])


@wrong("gradient", path="v", reference=lambda: torch.func.vjp(torch.tanh, V)[1](X.sum(0))[0])
def jax_cotangent_varies(shard_map, mesh):
    return alone(shard_map, mesh, lambda v, x: torch.func.vjp(torch.tanh, v)[1](x.sum(0))[0], X)


@wrong("output", reference=lambda: torch.func.jvp(torch.tanh, (V,), (X.sum(0),))[1])
def jax_tangent_varies(shard_map, mesh):
    """What JAX does not refuse, where it refuses its transpose."""
    return alone(shard_map, mesh, lambda v, x: torch.func.jvp(torch.tanh, (v,), (x.sum(0),))[1], X)


@wrong("NotImplementedError", "data", "", lambda: torch.func.grad(lambda v: (X @ v).max())(V))
def jax_gradient_of_pmax(shard_map, mesh):
    def gradient(v, x):
        return sf.grad(lambda v: sf.pmax((x @ v).max(), "data"))(v)

    return alone(shard_map, mesh, gradient, X)


# --- partial sums ---


def paired(p: Any) -> Tensor:
    return torch.tanh(X @ p["up"]) @ p["down"]


def halves(mesh: Any, *more: str) -> Any:
    whole = weights("up", "down", *more)
    return whole | {"up": part(whole["up"], mesh, "tensor", dim=1), "down": part(whole["down"], mesh, "tensor")}


def biased(p: Any) -> Tensor:
    return squares(paired(p) + p["b"], Y)


@wrong("sum", "tensor", "", lambda: graded(biased, "up", "down", "b")()["b"], COLUMNS)
def jax_bias_before_the_sum(shard_map, mesh):
    def loss(params):
        return squares(sf.psum(paired(params) + params["b"], "tensor"), Y)

    def gradient(params):
        return sf.grad(loss)(params)["b"]

    return shard_map(gradient, in_specs=(TENSOR | {"b": P()},), out_specs=P())(halves(mesh, "b"))


@wrong("output", "tensor", reference=valued(paired, "up", "down"), mesh=COLUMNS)
def jax_partial_sums_out(shard_map, mesh):
    return shard_map(paired, in_specs=(TENSOR,), out_specs=P())(halves(mesh))


# --- what a body reads, and random numbers ---


@wrong("closure")
def jax_kept_from_another_map(shard_map, mesh):
    kept = []

    def rows(x):
        kept.append(x.mean(0))
        return x

    of_rows(shard_map, mesh, rows, P("data"))
    return alone(shard_map, mesh, lambda v: v + kept[0])


@wrong("same", "data", "", lambda: torch.poisson(X.exp(), generator=torch.Generator().manual_seed(0)).sum())
def jax_one_key_for_all_rows(shard_map, mesh):
    """The same random numbers for every rank's rows."""

    def f(x):
        return sf.psum(torch.poisson(x.exp(), generator=torch.Generator().manual_seed(0)).sum(), "data")

    return of_rows(shard_map, mesh, f)
