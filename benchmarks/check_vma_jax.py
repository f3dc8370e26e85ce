"""The JAX side of `benchmarks.check_vma`: wrong programs under `jax.shard_map(check_vma=True)`, on CPU devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python check_vma_jax.py [NAME ...]

Runs in an interpreter that has JAX, and imports nothing else but numpy. Each program has the name and the mistake of a
program in shardfn's gallery (tests/check/wrong.py), but is written as a JAX user would write it. Those named `jax_...`
are programs that JAX refuses, from its source and tests; they have counterparts in tests/check/from_jax.py. Each result
is compared, in float64, with that of one device. The output is JSON: JAX's version, and the result of each program.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

ROUNDING = 1e-12
DEADLINE = 100  # seconds for a program that may hang; XLA itself gives up after 40
Tree = Any
Results = dict[str, Any]  # "gradient", "value" or another result of a program


@dataclass(frozen=True)
class Program:
    """A program with a mistake.

    Attributes:
        wrong: runs it on the mesh.
        right: the intended computation, on one device; None if there is none.
        hangs: whether it may hang, so that it needs its own process.
    """

    wrong: Callable[[], Results]
    right: Callable[[], Results] | None = None
    hangs: bool = False


PROGRAMS: dict[str, Program] = {}
CANNOT = {  # programs that JAX has no equivalent for, and why
    "missing_pvary_backward_dot_grad": "there is no backward() and no .grad",
    "mean_of_means_ragged": "pieces of one array have one shape",
    "missing_pvary_leaf_made_inside": "there is no requires_grad_()",
    "dropout_of_the_default_generator": "there is no default generator: each call takes a key",
    "closure_differs_between_ranks": "a body is traced once for all devices, and what it reads is one value",
}


def wrong(right: Callable[[], Results] | None = None, hangs: bool = False) -> Callable[[Any], Any]:
    """Registers a program by its name."""

    def put(program: Callable[[], Results]) -> Callable[[], Results]:
        PROGRAMS[program.__name__] = Program(program, right, hangs)
        return program

    return put


# --- data, and computations on one device ---

DRAW = np.random.default_rng(0)
ROWS, IN, OUT = 8, 4, 3
COUNT = ROWS * OUT
X, Y = DRAW.normal(size=(ROWS, IN)), DRAW.normal(size=(ROWS, OUT))
LABELS, TOKENS = np.array([0, 2, 1, 1, 0, 2, 2, 1]), np.array([[0, 3, 1, 4], [2, 2, 5, 1], [5, 0, 3, 3], [4, 1, 2, 0]])
REAL = np.array([1.0, 1, 1, 0, 1, 0, 0, 0])  # a mask with more ones on the first rank
SEQUENCES, TARGETS = DRAW.normal(size=(2, ROWS, 4, IN))
SHAPES = {
    "w": (IN, OUT), "b": (OUT,), "norm": (IN,), "first": (IN, IN), "up": (IN, 6), "down": (6, OUT),
    "narrow": (6, IN), "table": (6, IN), "place": (4, IN), "gate": (IN, 4), "scale": (), "low": (IN, 2),
    "high": (2, OUT), "center": (OUT,),
}  # fmt: skip
ALL = {name: 0.5 * DRAW.normal(size=shape) for name, shape in SHAPES.items()}
DATA, GRID, HYBRID = {"data": 2}, {"data": 2, "tensor": 2}, {"replica": 2, "shard": 2}
SHARD = {"shard": 2}
BOTH = ("replica", "shard")
CUT = {"up": P(None, "tensor"), "down": P("tensor")}


def weights(*names: str) -> dict[str, Any]:
    return {name: ALL[name] for name in names}


def squares(out: Any, y: Any) -> Any:
    return ((out - y) ** 2).sum()


def linear(p: Tree) -> Any:
    return X @ p["w"] + p.get("b", 0)


def error(p: Tree) -> Any:
    return squares(linear(p), Y) / COUNT


def rms(x: Any, weight: Any) -> Any:
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float64).eps) * weight


def entropies(logits: Any, labels: Any) -> Any:
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]


def sgd(params: Tree, grads: Tree, lr: Any = 0.1) -> Tree:
    return jax.tree.map(lambda p, g: p - lr * g, params, grads)


def adamw(params: Tree, grads: Tree) -> Tree:
    """AdamW's first step, from a state of zeros."""
    return jax.tree.map(lambda p, g: p - 0.1 * (g / (jnp.sqrt(g**2) + 1e-8) + 0.01 * p), params, grads)


def trained(loss: Callable[[Tree], Any], *names: str) -> Callable[[], Results]:
    """The value and gradient of a loss."""

    def run() -> Results:
        value, gradient = jax.value_and_grad(loss)(weights(*names))
        return {"gradient": gradient, "value": value}

    return run


def sloped(loss: Callable[[Tree], Any], *names: str) -> Callable[[], Results]:
    return lambda: {"gradient": jax.grad(loss)(weights(*names))}


def valued(f: Callable[[Tree], Any], *names: str) -> Callable[[], Results]:
    return lambda: {"value": f(weights(*names))}


# --- on a mesh ---


def mesh_of(sizes: dict[str, int]) -> Any:
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)


def placed(mesh: Any, spec: Any, tree: Tree) -> Tree:
    """Whole values, sharded by a prefix tree of specs."""
    if not isinstance(spec, P):
        return {name: placed(mesh, one, tree[name]) for name, one in spec.items()}
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.NamedSharding(mesh, spec)), tree)


def by_device(mesh: Any, spec: Any, shape: tuple[int, ...], piece: Callable[[int], Any]) -> Any:
    """An array whose piece on device i is `piece(i)`, even if that contradicts the spec."""
    pieces = [jax.device_put(piece(i), device) for i, device in enumerate(mesh.devices.flat)]
    return jax.make_array_from_single_device_arrays(shape, jax.NamedSharding(mesh, spec), pieces)


def on(f: Callable[..., Any], ins: tuple[Any, ...], outs: Any, sizes: dict[str, int] = DATA) -> Callable[..., Any]:
    """The function under `jit` and `shard_map`; it takes whole values, or arrays that are already on the mesh."""
    mesh = mesh_of(sizes)
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=True))

    def call(*args: Any) -> Any:
        pairs = zip(ins, args, strict=True)
        return mapped(*[arg if isinstance(arg, jax.Array) else placed(mesh, spec, arg) for spec, arg in pairs])

    return call


def graded(
    loss: Callable[..., Any],
    params: Tree,
    *rows: Any,
    specs: Any = None,
    cut: Any = None,
    sizes: dict[str, int] = DATA,
    value: bool = True,
) -> Results:
    """Value and gradient by `jax.value_and_grad` inside the map; the gradient is sharded like the parameters."""
    specs, cut = P() if specs is None else specs, P("data") if cut is None else cut

    def step(*args: Any) -> Results:
        found, gradient = jax.value_and_grad(loss)(*args)
        return {"gradient": gradient, "value": found} if value else {"gradient": gradient}

    outs = {"gradient": specs, "value": P()} if value else {"gradient": specs}
    return on(step, (specs, *[cut] * len(rows)), outs, sizes)(params, *rows)


def evaluated(f: Callable[..., Any], *args: Any, specs: Any = None, sizes: dict[str, int] = DATA) -> Results:
    """The result of a function, declared replicated; its arguments are parameters and rows, unless `specs` is given."""
    ins = specs or (P(), *[P("data")] * (len(args) - 1))
    return {"value": on(f, ins, P(), sizes)(*args)}


def summed(loss: Any, axis: Any = "data") -> Any:
    return lax.psum(loss, axis) / COUNT


# --- a replicated parameter is combined with varying rows, without pvary ---


def ddp(p: Tree, x: Any, y: Any) -> Any:
    return summed(squares(x @ p["w"] + p.get("b", 0), y))


@wrong(trained(error, "w"))
def missing_pvary_ddp() -> Results:
    return graded(ddp, weights("w"), X, Y)


@wrong(trained(lambda p: squares(rms(X, p["norm"]) @ p["w"], Y) / COUNT, "norm", "w"))
def missing_pvary_norm_weight() -> Results:
    return graded(lambda p, x, y: summed(squares(rms(x, p["norm"]) @ p["w"], y)), weights("norm", "w"), X, Y)


@wrong(trained(error, "w", "b"))
def missing_pvary_bias_only() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        return summed(squares(x @ lax.pcast(p["w"], "data", to="varying") + p["b"], y))

    return graded(loss, weights("w", "b"), X, Y)


@wrong(lambda: {"value": adamw(weights("w"), jax.grad(error)(weights("w")))})
def missing_pvary_with_optim_step() -> Results:
    return evaluated(lambda p, x, y: adamw(p, jax.grad(ddp)(p, x, y)), weights("w"), X, Y)


@wrong(trained(error, "w"))
def missing_pvary_under_dots() -> Results:
    """Specs from the values: `in_specs` is omitted."""
    mesh = mesh_of(DATA)

    def step(p: Tree, x: Any, y: Any) -> Results:
        value, gradient = jax.value_and_grad(ddp)(p, x, y)
        return {"gradient": gradient, "value": value}

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, out_specs=P()))
    return dict(mapped(placed(mesh, P(), weights("w")), *placed(mesh, P("data"), [X, Y])))


def clipped(params: Tree, grads: Tree) -> Tree:
    norm = jnp.sqrt((grads["w"] ** 2).sum())
    return {"new": sgd(params, grads, 0.1 * jnp.minimum(1, 0.5 / norm)), "norm": norm}


@wrong(lambda: {"value": clipped(weights("w"), jax.grad(error)(weights("w")))})
def missing_pvary_clip() -> Results:
    return evaluated(lambda p, x, y: clipped(p, jax.grad(ddp)(p, x, y)), weights("w"), X, Y)


@wrong(sloped(error, "w"))
def missing_pvary_torch_func_grad() -> Results:
    return graded(ddp, weights("w"), X, Y, value=False)


def moment(gradient: Tree) -> Tree:
    return jax.tree.map(lambda g: 0.1 * g**2, gradient)


@wrong(lambda: {"value": moment(jax.grad(error)(weights("w")))})
def missing_pvary_in_a_moment() -> Results:
    return evaluated(lambda p, x, y: moment(jax.grad(ddp)(p, x, y)), weights("w"), X, Y)


@wrong(sloped(error, "w"))
def missing_pvary_autograd_grad() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Results:
        value, pull = jax.vjp(lambda p: ddp(p, x, y), p)
        return {"gradient": pull(jnp.ones_like(value))[0]}

    return dict(on(step, (P(), P("data"), P("data")), P())(weights("w"), X, Y))


@wrong(sloped(error, "w"))
def missing_pvary_differentiated_outside() -> Results:
    mesh = mesh_of(DATA)
    loss = jax.shard_map(ddp, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    with jax.set_mesh(mesh):
        return {"gradient": jax.jit(jax.grad(loss))(placed(mesh, P(), weights("w")), *placed(mesh, P("data"), [X, Y]))}


def recurrent(p: Tree, x: Any, y: Any, total: Callable[[Any], Any]) -> Any:
    h, _ = lax.scan(lambda h, row: (jnp.tanh(h @ p["first"] + row), None), jnp.zeros_like(y), x.swapaxes(0, 1))
    return total(squares(h, y)) / TARGETS[:, 0].size


@wrong(trained(lambda p: recurrent(p, SEQUENCES, TARGETS[:, 0], lambda s: s), "first"))
def missing_pvary_in_scan() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        return recurrent(p, x, y, lambda s: lax.psum(s, "data"))

    return graded(loss, weights("first"), SEQUENCES, TARGETS[:, 0])


@wrong(trained(error, "w"))
def missing_pvary_vmap() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        return summed(jax.vmap(lambda x, y: squares(x @ p["w"], y))(x, y).sum())

    return graded(loss, weights("w"), X, Y)


def private(p: Tree, x: Any, y: Any) -> Any:
    each = jax.vmap(jax.grad(lambda p, x, y: squares(x @ p["w"], y)), (None, 0, 0))(p, x, y)["w"]
    norms = jnp.sqrt((each**2).sum((1, 2)))
    return (each / jnp.maximum(norms, 1)[:, None, None]).sum(0) / ROWS


@wrong(lambda: {"gradient": private(weights("w"), X, Y)})
def psum_forgotten_per_sample_gradients() -> Results:
    return {"gradient": on(private, (P(), P("data"), P("data")), P())(weights("w"), X, Y)}


def times() -> Any:
    """`x * weight` with a custom backward, as a fused kernel has."""
    scale = jax.custom_vjp(lambda x, weight: x * weight)
    scale.defvjp(lambda x, weight: (x * weight, (x, weight)), lambda kept, ct: (ct * kept[1], (ct * kept[0]).sum(0)))
    return scale


@wrong(trained(lambda p: squares((X * p["norm"]) @ p["w"], Y) / COUNT, "norm", "w"))
def missing_pvary_custom_function() -> Results:
    return graded(lambda p, x, y: summed(squares(times()(x, p["norm"]) @ p["w"], y)), weights("norm", "w"), X, Y)


@wrong(trained(error, "w"))
def missing_pvary_checkpoint() -> Results:
    layer = jax.checkpoint(lambda w, x: x @ w)
    return graded(lambda p, x, y: summed(squares(layer(p["w"], x), y)), weights("w"), X, Y)


@wrong(trained(error, "w", "b"))
def missing_pvary_in_place() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        return summed(squares((x @ p["w"]).at[...].add(p["b"]), y))

    return graded(loss, weights("w", "b"), X, Y)


def posed(p: Tree, tokens: Any, y: Any) -> Any:
    return squares(p["table"][tokens] + p["place"], y) / TARGETS[:4].size


@wrong(trained(lambda p: posed(p, TOKENS, TARGETS[:4]), "table", "place"))
def missing_pvary_positions() -> Results:
    return graded(lambda p, t, y: lax.psum(posed(p, t, y), "data"), weights("table", "place"), TOKENS, TARGETS[:4])


def heated(p: Tree, x: Any, labels: Any) -> Any:
    return entropies(x @ p["w"] * jnp.exp(p["scale"]), labels).sum() / ROWS


@wrong(trained(lambda p: heated(p, X, LABELS), "w", "scale"))
def missing_pvary_temperature() -> Results:
    return graded(lambda p, x, labels: lax.psum(heated(p, x, labels), "data"), weights("w", "scale"), X, LABELS)


def tied(p: Tree, tokens: Any) -> Any:
    return entropies(p["table"][tokens[:, :-1]] @ p["table"].T, tokens[:, 1:]).sum() / TOKENS[:, 1:].size


@wrong(trained(lambda p: tied(p, TOKENS), "table"))
def weight_tying_one_use_without_pvary() -> Results:
    return graded(lambda p, tokens: lax.psum(tied(p, tokens), "data"), weights("table"), TOKENS)


def gathered(p: Tree, axis: str = "shard") -> Tree:
    return {name: lax.all_gather(leaf, axis, tiled=True) if leaf.ndim > 1 else leaf for name, leaf in p.items()}


SHARDED = {"w": P("shard"), "b": P()}  # the bias is whole, since its 3 elements are not divisible by 2


@wrong(trained(error, "w"))
def missing_pvary_one_of_two_axes() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        return summed(squares(x @ gathered(p)["w"], y), BOTH)

    return graded(loss, weights("w"), X, Y, specs={"w": P("shard")}, cut=P(BOTH), sizes=HYBRID)


@wrong(trained(error, "w"))
def missing_pvary_accumulate() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Results:
        def one(total: Results, rows: Any) -> Any:
            value, gradient = jax.value_and_grad(ddp)(p, *rows)
            return jax.tree.map(jnp.add, total, {"gradient": gradient, "value": value}), None

        empty = {"gradient": jax.tree.map(jnp.zeros_like, p), "value": 0.0}
        return dict(lax.scan(one, empty, (x.reshape(2, 2, IN), y.reshape(2, 2, OUT)))[0])

    return dict(on(step, (P(), P("data"), P("data")), P())(weights("w"), X, Y))


@wrong(trained(lambda p: squares(X @ ALL["w"] + X @ p["low"] @ p["high"], Y) / COUNT, "low", "high"))
def missing_pvary_adapter() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        return summed(squares(x @ ALL["w"] + x @ p["low"] @ p["high"], y))

    return graded(loss, weights("low", "high"), X, Y)


ALONG = DRAW.normal(size=(IN, OUT))


def bent(p: Tree, x: Any, y: Any) -> Any:
    return squares(jnp.tanh(x @ p["w"]), y) / COUNT


@wrong(lambda: {"gradient": jax.grad(lambda p: (jax.grad(bent)(p, X, Y)["w"] * ALONG).sum())(weights("w"))})
def missing_pvary_hessian_vector_product() -> Results:
    def slope(p: Tree, x: Any, y: Any) -> Any:
        return (jax.grad(lambda p: lax.psum(bent(p, x, y), "data"))(p)["w"] * ALONG).sum()

    return graded(slope, weights("w"), X, Y, value=False)


@wrong(trained(error, "w"))
def all_gather_invariant_meets_rows() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        return summed(squares(x @ lax.all_gather(p["w"], "shard", tiled=True, to="invarying"), y), "shard")

    return graded(loss, weights("w"), X, Y, specs={"w": P("shard")}, cut=P("shard"), sizes=SHARD)


@wrong(lambda: {"value": jax.grad(error)(weights("w"))})
def pvary_outside_the_differentiated_function() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Tree:
        return jax.grad(ddp)(lax.pcast(p, "data", to="varying"), x, y)

    return evaluated(step, weights("w"), X, Y)


def standardized(p: Tree, x: Any, y: Any, total: Callable[[Any], Any]) -> Any:
    h = x @ p["w"]
    return total(squares(h - total(h.sum(0)) / ROWS, y)) / COUNT


@wrong(trained(lambda p: standardized(p, X, Y, lambda s: s), "w"))
def mean_of_the_batch_meets_its_rows() -> Results:
    return graded(lambda p, x, y: standardized(p, x, y, lambda s: lax.psum(s, "data")), weights("w"), X, Y)


def shared(p: Tree, x: Any, y: Any, total: Callable[[Any], Any]) -> Any:
    scores = jnp.exp((x @ p["w"])[:, 0])
    return total((((scores / total(scores.sum()))[:, None] * y) ** 2).sum())


@wrong(trained(lambda p: shared(p, X, Y, lambda s: s), "w"))
def softmax_over_all_rows() -> Results:
    return graded(lambda p, x, y: shared(p, x, y, lambda s: lax.psum(s, "data")), weights("w"), X, Y)


# --- a sum that is doubled ---


@wrong(trained(error, "w"))
def psum_twice_loss() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Results:
        value, gradient = jax.value_and_grad(ddp)(p, x, y)
        return {"gradient": gradient, "value": lax.psum(value, "data")}

    return dict(on(step, (P(), P("data"), P("data")), P())(weights("w"), X, Y))


@wrong(trained(error, "w"))
def psum_twice_gradient() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Results:
        value, gradient = jax.value_and_grad(ddp)(p, x, y)
        return {"gradient": lax.psum(gradient, "data"), "value": value}

    return dict(on(step, (P(), P("data"), P("data")), P())(weights("w"), X, Y))


@wrong(trained(error, "w"))
def pmean_of_invariant() -> Results:
    return graded(lambda p, x, y: lax.pmean(ddp(p, x, y), "data"), weights("w"), X, Y)


def decay(p: Tree) -> Any:
    return 0.1 * (p["w"] ** 2).sum()


@wrong(trained(lambda p: error(p) + decay(p), "w"))
def psum_of_weight_decay() -> Results:
    return graded(lambda p, x, y: ddp(p, x, y) + lax.psum(decay(p), "data"), weights("w"), X, Y)


@wrong(lambda: {"gradient": jax.grad(error)(weights("w"))["w"]})
def reduce_scatter_of_invariant() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Any:
        return lax.psum_scatter(jax.grad(ddp)(p, x, y)["w"], "data", tiled=True)

    return {"gradient": on(step, (P(), P("data"), P("data")), P("data"))(weights("w"), X, Y)}


@wrong(trained(error, "w"))
def psum_wrong_axis() -> Results:
    return graded(lambda p, x, y: summed(squares(x @ p["w"], y), "tensor"), weights("w"), X, Y, sizes=GRID)


@wrong(valued(lambda p: squares(jnp.tanh(X @ p["up"]) @ p["down"], Y) / COUNT, "up", "down"))
def psum_over_all_axes() -> Results:
    def f(p: Tree, x: Any, y: Any) -> Any:
        out = lax.psum(jnp.tanh(x @ p["up"]) @ p["down"], "tensor")
        return summed(squares(out, y), ("data", "tensor"))

    return evaluated(f, weights("up", "down"), X, Y, specs=(CUT, P("data"), P("data")), sizes=GRID)


def regraded(again: Callable[[Tree], Tree], axes: Any, sizes: dict[str, int]) -> Results:
    """The gradient of a sharded matrix, already summed by a loss over all rows, after one more reduction."""

    def step(p: Tree, x: Any, y: Any) -> Results:
        grads = jax.grad(lambda p: summed(squares(x @ gathered(p)["w"], y), axes))(p)
        return {"gradient": again(grads)}

    cut = {"w": P("shard")}
    return dict(on(step, (cut, P(axes), P(axes)), {"gradient": cut}, sizes)(weights("w"), X, Y))


@wrong(sloped(error, "w"))
def pmean_of_flat_shards() -> Results:
    return regraded(lambda grads: lax.pmean(grads, "shard"), "shard", SHARD)


@wrong(sloped(error, "w"))
def psum_of_hybrid_gradients() -> Results:
    return regraded(lambda grads: lax.psum(grads, "replica"), BOTH, HYBRID)


# --- a sum that is forgotten ---


def local(p: Tree, x: Any, y: Any) -> Any:
    return squares(x @ p["w"], y) / COUNT


@wrong(trained(error, "w"))
def psum_forgotten_loss_returned() -> Results:
    return graded(local, weights("w"), X, Y)


def mean_error(p: Tree, x: Any, y: Any) -> Any:
    whole = gathered(p)
    return ((x @ whole["w"] + whole["b"] - y) ** 2).mean()


@wrong(sloped(error, "w", "b"))
def psum_forgotten_loss_not_returned_fsdp() -> Results:
    return graded(mean_error, weights("w", "b"), X, Y, specs=SHARDED, cut=P("shard"), sizes=SHARD, value=False)


@wrong(sloped(lambda p: squares(linear(p), Y) / ROWS, "w"))
def sum_over_the_rows_of_one_rank() -> Results:
    return graded(lambda p, x, y: squares(x @ p["w"], y) / len(x), weights("w"), X, Y, value=False)


@wrong(sloped(lambda p: entropies(linear(p), LABELS).mean(), "w"))
def cross_entropy_over_the_rows_of_one_rank() -> Results:
    def loss(p: Tree, x: Any, labels: Any) -> Any:
        return entropies(x @ p["w"], labels).sum() / len(labels)

    return graded(loss, weights("w"), X, LABELS, value=False)


@wrong(trained(error, "w", "b"))
def psum_forgotten_hybrid() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        whole = gathered(p)
        return lax.psum(squares(x @ whole["w"] + whole["b"], y), "shard") / lax.psum(y.size, "shard")

    return graded(loss, weights("w", "b"), X, Y, specs=SHARDED, cut=P(BOTH), sizes=HYBRID)


@wrong(sloped(error, "w", "b"))
def psum_forgotten_hfsdp_with_an_optimizer() -> Results:
    return graded(mean_error, weights("w", "b"), X, Y, specs=SHARDED, cut=P(BOTH), sizes=HYBRID, value=False)


@wrong(trained(error, "w", "b"))
def psum_forgotten_ddp_strategy() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Results:
        value, gradient = jax.value_and_grad(lambda p: ((x @ p["w"] + p["b"] - y) ** 2).mean())(p)
        return {"gradient": gradient, "value": lax.pmean(value, "data")}

    return dict(on(step, (P(), P("data"), P("data")), P())(weights("w", "b"), X, Y))


@wrong(sloped(error, "w", "b"))
def psum_by_hand_forgets_the_bias() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Results:
        grads = jax.grad(lambda p: squares(x @ p["w"] + p["b"], y) / COUNT)(p)
        return {"gradient": grads | {"w": lax.psum(grads["w"], "data")}}

    return dict(on(step, (P(), P("data"), P("data")), P())(weights("w", "b"), X, Y))


@wrong(lambda: {"value": jnp.sqrt((jax.grad(error)(weights("w"))["w"] ** 2).sum())})
def grad_norm_of_local_shards() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Any:
        grads = jax.grad(lambda p: summed(squares(x @ gathered(p)["w"], y), "shard"))(p)
        return jnp.sqrt((grads["w"] ** 2).sum())

    specs = ({"w": P("shard")}, P("shard"), P("shard"))
    return evaluated(step, weights("w"), X, Y, specs=specs, sizes=SHARD)


@wrong(sloped(error, "w"))
def local_gradient_returned_replicated() -> Results:
    return graded(local, weights("w"), X, Y, value=False)


@wrong(valued(lambda p: jnp.tanh(linear(p)), "w"))
def out_specs_too_replicated_activations() -> Results:
    return evaluated(lambda p, x: jnp.tanh(x @ p["w"]), weights("w"), X)


def pairs(h: Any) -> Any:
    return ((h @ h.T) ** 2).sum() / COUNT


@wrong(trained(lambda p: pairs(jnp.tanh(linear(p))), "w"))
def all_gather_returned_replicated() -> Results:
    return graded(lambda p, x: pairs(lax.all_gather(jnp.tanh(x @ p["w"]), "data", tiled=True)), weights("w"), X)


def hits(p: Tree, x: Any, labels: Any) -> Any:
    return (x @ p["w"]).argmax(1) == labels


@wrong(valued(lambda p: hits(p, X, LABELS).mean(), "w"))
def local_metric_returned() -> Results:
    return evaluated(lambda p, x, labels: hits(p, x, labels).mean(), weights("w"), X, LABELS)


@wrong(valued(lambda p: {"right": hits(p, X, LABELS).sum(), "seen": ROWS}, "w"))
def local_counts_returned() -> Results:
    def counts(p: Tree, x: Any, labels: Any) -> Any:
        return {"right": hits(p, x, labels).sum(), "seen": lax.psum(len(x), "data")}

    return evaluated(counts, weights("w"), X, LABELS)


def masked(p: Tree) -> Any:
    return (((linear(p) - Y) ** 2).mean(1) * REAL).sum() / REAL.sum()


def each_masked(p: Tree, x: Any, y: Any, real: Any) -> Any:
    return (((x @ p["w"] - y) ** 2).mean(1) * real).sum()


@wrong(trained(masked, "w"))
def psum_forgotten_count() -> Results:
    def loss(p: Tree, x: Any, y: Any, real: Any) -> Any:
        return lax.psum(each_masked(p, x, y, real), "data") / real.sum()

    return graded(loss, weights("w"), X, Y, REAL)


def routed(p: Tree, x: Any, y: Any, total: Callable[[Any], Any]) -> Any:
    probabilities = jax.nn.softmax(x @ p["gate"])
    error = squares(probabilities @ p["first"][:, :OUT], y) / COUNT
    return total(error) + 0.1 * (probabilities.mean(0) ** 2).sum()


@wrong(trained(lambda p: routed(p, X, Y, lambda s: s), "gate", "first"))
def moe_router_aux_loss_local() -> Results:
    return graded(lambda p, x, y: routed(p, x, y, lambda s: lax.psum(s, "data")), weights("gate", "first"), X, Y)


@wrong(lambda: {"value": sgd(weights("w"), jax.grad(error)(weights("w")), 0.1 / (1 + error(weights("w"))))})
def lr_from_local_loss() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Tree:
        loss, grads = jax.value_and_grad(local)(p, x, y)
        return sgd(p, grads, 0.1 / (1 + loss))

    return evaluated(step, weights("w"), X, Y)


def switched(loss: Any) -> Any:
    return jnp.where(loss > 2, 0.1, 0.5)


@wrong(lambda: {"value": sgd(weights("w"), jax.grad(error)(weights("w")), switched(error(weights("w"))))})
def lr_switched_by_a_local_number() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Tree:
        loss, grads = jax.value_and_grad(local)(p, x, y)
        return sgd(p, grads, switched(loss))

    return evaluated(step, weights("w"), X, Y)


@wrong(lambda: {"value": 0.9 * ALL["center"] + 0.1 * linear(weights("w")).mean(0)})
def ema_of_local_batch_stats() -> Results:
    def update(p: Tree, x: Any) -> Any:
        return 0.9 * p["center"] + 0.1 * (x @ p["w"]).mean(0)

    return evaluated(update, weights("w", "center"), X)


@wrong(valued(lambda p: {"loss": error(p), "largest": abs(linear(p)).max()}, "w"))
def local_aux_returned() -> Results:
    def step(p: Tree, x: Any, y: Any) -> Any:
        def loss(p: Tree) -> Any:
            return ddp(p, x, y), abs(x @ p["w"]).max()

        (value, largest), _ = jax.value_and_grad(loss, has_aux=True)(p)
        return {"loss": value, "largest": largest}

    return evaluated(step, weights("w"), X, Y)


@wrong(valued(error, "w"))
def local_item_returned() -> Results:
    return evaluated(lambda p, x, y: squares(x @ p["w"], y).item() / COUNT, weights("w"), X, Y)


# --- means of unequal numbers of rows ---


@wrong(trained(masked, "w"))
def mean_of_means_masked() -> Results:
    def loss(p: Tree, x: Any, y: Any, real: Any) -> Any:
        return lax.pmean(each_masked(p, x, y, real) / real.sum(), "data")

    return graded(loss, weights("w"), X, Y, REAL)


def gathered_mean(loss: Any) -> Any:
    return lax.all_gather(loss[None], "data", tiled=True, to="invarying")


@wrong(trained(error, "w"))
def sum_of_gathered_means() -> Results:
    return graded(lambda p, x, y: gathered_mean(((x @ p["w"] - y) ** 2).mean()).sum(), weights("w"), X, Y)


@wrong(trained(masked, "w"))
def mean_of_gathered_means_masked() -> Results:
    def loss(p: Tree, x: Any, y: Any, real: Any) -> Any:
        return gathered_mean(each_masked(p, x, y, real) / real.sum()).mean()

    return graded(loss, weights("w"), X, Y, REAL)


def contrast(rows: Any, others: Any, first: Any) -> Any:
    """The mean cross-entropy of rows with all others, of which the equal one is wanted."""
    scores = rows @ others.T
    wanted = jnp.take_along_axis(scores, first + jnp.arange(len(rows))[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(scores, 1) - wanted).mean()


@wrong(trained(lambda p: contrast(X @ p["w"], X @ p["w"], 0), "w"))
def psum_of_means_against_gathered_rows() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        z = x @ p["w"]
        others = lax.all_gather(z, "data", tiled=True)
        return lax.psum(contrast(z, others, len(z) * lax.axis_index("data")), "data")

    return graded(loss, weights("w"), X, Y)


def reduced(loss: Callable[..., Any], reduce: Any) -> Results:
    """The mean as value, and a gradient that is reduced by hand."""

    def step(p: Tree, x: Any, y: Any) -> Results:
        value, gradient = jax.value_and_grad(loss)(p, x, y)
        return {"gradient": reduce(gradient, "data"), "value": lax.pmean(value, "data")}

    return dict(on(step, (P(), P("data"), P("data")), P())(weights("w"), X, Y))


@wrong(trained(error, "w"))
def psum_of_gradients_of_means() -> Results:
    return reduced(lambda p, x, y: ((x @ p["w"] - y) ** 2).mean(), lax.psum)


@wrong(trained(error, "w"))
def pmean_of_gradients_of_the_mean() -> Results:
    return reduced(lambda p, x, y: lax.pmean(((x @ p["w"] - y) ** 2).mean(), "data"), lax.pmean)


@wrong(trained(error, "w"))
def pmean_of_gradients_of_a_sum_over_all_rows() -> Results:
    return reduced(lambda p, x, y: lax.psum(squares(x @ p["w"], y), "data") / COUNT, lax.pmean)


@wrong(trained(masked, "w"))
def mean_of_selected_rows() -> Results:
    """With `where=`, since boolean indexing has no static shape for tracing."""

    def loss(p: Tree, x: Any, y: Any, real: Any) -> Any:
        return lax.pmean(((x @ p["w"] - y) ** 2).mean(1).mean(where=real > 0), "data")

    return graded(loss, weights("w"), X, Y, REAL)


@wrong(trained(lambda p: (entropies(linear(p), LABELS) * REAL).sum() / REAL.sum(), "w"))
def mean_of_means_ignore_index() -> Results:
    def loss(p: Tree, x: Any, labels: Any) -> Any:
        real = labels >= 0
        return lax.pmean(entropies(x @ p["w"], jnp.where(real, labels, 0)).mean(where=real), "data")

    return graded(loss, weights("w"), X, np.where(REAL > 0, LABELS, -100))


@wrong(trained(masked, "w"))
def grad_accumulation_local_scale() -> Results:
    def loss(p: Tree, x: Any, y: Any, real: Any) -> Any:
        micro = [rows.reshape(2, 2, *rows.shape[1:]) for rows in (x, y, real)]
        each = [each_masked(p, *(rows[i] for rows in micro)) / real.sum() for i in range(2)]
        return sum(lax.psum(one, "data") / 2 for one in each)

    return graded(loss, weights("w"), X, Y, REAL)


# --- statistics of a batch ---


def normalized(x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


@wrong(trained(lambda p: squares(normalized(X) @ p["w"], Y) / COUNT, "w"))
def batch_norm_local_statistics() -> Results:
    return graded(lambda p, x, y: summed(squares(normalized(x) @ p["w"], y)), weights("w"), X, Y)


@wrong(valued(lambda p: 0.9 * p["norm"] + 0.1 * X.mean(0), "norm"))
def batch_norm_running_stats_returned() -> Results:
    return evaluated(lambda p, x: 0.9 * p["norm"] + 0.1 * x.mean(0), weights("norm"), X)


# --- an axis that shards matrices ---


@wrong(valued(lambda p: squares(jnp.tanh(X @ p["up"]) @ p["down"], Y) / COUNT, "up", "down"))
def psum_tensor_forgotten_row_parallel() -> Results:
    def f(p: Tree, x: Any, y: Any) -> Any:
        return summed(squares(jnp.tanh(x @ p["up"]) @ p["down"], y))

    return evaluated(f, weights("up", "down"), X, Y, specs=(CUT, P("data"), P("data")), sizes=GRID)


def deeper(p: Tree, x: Any, y: Any, total: Callable[[Any], Any]) -> Any:
    return squares(total(jnp.tanh(jnp.tanh(x @ p["first"]) @ p["up"]) @ p["down"]), y) / COUNT


@wrong(trained(lambda p: deeper(p, X, Y, lambda s: s), "first", "up", "down"))
def pvary_forgotten_column_parallel() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        return lax.psum(deeper(p, x, y, lambda s: lax.psum(s, "tensor")), "data")

    return graded(loss, weights("first", "up", "down"), X, Y, specs={"first": P(), **CUT}, sizes=GRID)


def block(p: Tree, x: Any) -> Any:
    return jnp.tanh(rms(x, p["norm"]) @ p["up"]) @ p["narrow"]


@wrong(trained(lambda p: squares(block(p, SEQUENCES), TARGETS) / TARGETS.size, "norm", "up", "narrow"))
def norm_weight_unsynchronised_tp() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        h = lax.all_gather(rms(x, p["norm"]), "tensor", axis=1, tiled=True)
        out = lax.psum_scatter(jnp.tanh(h @ p["up"]) @ p["narrow"], "tensor", scatter_dimension=1, tiled=True)
        return lax.psum(squares(out, y), ("data", "tensor")) / TARGETS.size

    specs = {"norm": P(), "up": P(None, "tensor"), "narrow": P("tensor")}
    cut = P("data", "tensor")
    return graded(loss, weights("norm", "up", "narrow"), SEQUENCES, TARGETS, specs=specs, cut=cut, sizes=GRID)


def fold(*axes: str) -> Any:
    key = jax.random.key(0)
    for axis in axes:
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


@wrong()
def dropout_differs_along_tensor() -> Results:
    def f(p: Tree, x: Any, y: Any) -> Any:
        out = lax.psum(jnp.tanh(x @ p["up"]) @ p["down"], "tensor")
        return summed(squares(out * jax.random.bernoulli(fold("data", "tensor"), 0.5, out.shape), y))

    return evaluated(f, weights("up", "down"), X, Y, specs=(CUT, P("data"), P("data")), sizes=GRID)


@wrong(valued(lambda p: jnp.sqrt((p["up"] ** 2).sum()), "up"))
def norm_of_a_cut_weight() -> Results:
    return evaluated(lambda up: jnp.sqrt((up**2).sum()), ALL["up"], specs=(CUT["up"],), sizes=GRID)


@wrong(valued(lambda p: (X @ p["up"]).argmax(1), "up"))
def argmax_of_cut_logits() -> Results:
    return evaluated(lambda up, x: (x @ up).argmax(1), ALL["up"], X, specs=(CUT["up"], P()), sizes=GRID)


@wrong()
def tokens_sampled_by_each_rank() -> Results:
    def sample(up: Any, x: Any) -> Any:
        logits = lax.all_gather(x @ up, "tensor", axis=1, tiled=True, to="invarying")
        return jax.random.categorical(fold("tensor"), logits)

    return evaluated(sample, ALL["up"], X, specs=(CUT["up"], P()), sizes=GRID)


@wrong(sloped(lambda p: entropies(X @ p["up"], LABELS).mean(), "up"))
def pmax_differentiated() -> Results:
    def loss(p: Tree, x: Any, labels: Any) -> Any:
        logits = x @ p["up"]
        top = lax.pmax(logits.max(1), "tensor")
        every = jnp.log(lax.psum(jnp.exp(logits - top[:, None]).sum(1), "tensor")) + top
        own = labels[:, None] == 3 * lax.axis_index("tensor") + jnp.arange(3)
        return lax.psum((every - lax.psum((logits * own).sum(1), "tensor")).sum(), "data") / ROWS

    return graded(loss, weights("up"), X, LABELS, specs={"up": CUT["up"]}, sizes=GRID, value=False)


# --- values that vary already ---


@wrong(trained(error, "w"))
def pvary_twice() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        w = lax.pcast(p["w"], "replica", to="varying")
        return summed(squares(x @ lax.pcast(w, BOTH, to="varying"), y), BOTH)

    return graded(loss, weights("w"), X, Y, cut=P(BOTH), sizes=HYBRID)


@wrong(valued(error, "w"))
def local_slice_of_varying() -> Results:
    def own(rows: Any) -> Any:
        return lax.dynamic_slice_in_dim(rows, lax.axis_index("data") * 2, 2)

    return evaluated(lambda p, x, y: summed(squares(own(x) @ p["w"], own(y))), weights("w"), X, Y)


@wrong(lambda: {"gradient": jax.grad(error)(weights("w"))["w"]})
def local_slice_of_local_gradients() -> Results:
    """ZeRO-1 by hand."""

    def step(p: Tree, x: Any, y: Any) -> Any:
        return lax.dynamic_slice_in_dim(jax.grad(local)(p, x, y)["w"], lax.axis_index("data") * 2, 2)

    return {"gradient": on(step, (P(), P("data"), P("data")), P("data"))(weights("w"), X, Y)}


# --- initial values of the ranks ---


def started(w: Any, x: Any, y: Any, sizes: dict[str, int] = DATA) -> Results:
    """Value and gradient from arrays that are already on the mesh."""

    def step(w: Any, x: Any, y: Any) -> Results:
        value, gradient = jax.value_and_grad(lambda w: ddp({"w": w}, x, y))(w)
        return {"gradient": {"w": gradient}, "value": value}

    return dict(on(step, (P(), P("data"), P("data")), P(), sizes)(w, x, y))


@wrong(trained(error, "w"))
def replicas_initialised_differently() -> Results:
    return started(by_device(mesh_of(DATA), P(), (IN, OUT), lambda i: ALL["w"] * (1 + i)), X, Y)


@wrong(trained(error, "w"))
def replicas_initialised_differently_hybrid() -> Results:
    """Shards that each node initialized by itself."""

    def loss(p: Tree, x: Any, y: Any) -> Any:
        return summed(squares(x @ gathered(p)["w"], y), BOTH)

    def step(w: Any, x: Any, y: Any) -> Results:
        value, gradient = jax.value_and_grad(loss)({"w": w}, x, y)
        return {"gradient": gradient, "value": value}

    pieces = np.split(ALL["w"], 2)
    w = by_device(mesh_of(HYBRID), P("shard"), (IN, OUT), lambda i: pieces[i % 2] * (1 + i // 2))
    outs = {"gradient": {"w": P("shard")}, "value": P()}
    return dict(on(step, (P("shard"), P(BOTH), P(BOTH)), outs, HYBRID)(w, X, Y))


@wrong(trained(error, "w"))
def rows_by_rank_on_a_tensor_mesh() -> Results:
    """A loader that splits rows by rank, although ranks along `tensor` should have the same rows."""
    mesh = mesh_of(GRID)

    def loaded(rows: Any) -> Any:
        return by_device(mesh, P("data"), (4, rows.shape[1]), lambda i: np.split(rows, 4)[i])

    return started(ALL["w"], loaded(X), loaded(Y), GRID)


@wrong(valued(lambda p: 0.9 * jnp.ones((IN, OUT)) + jax.grad(error)(p)["w"], "w"))
def optimizer_state_of_another_run() -> Results:
    """One rank has not found its checkpoint."""
    mean = by_device(mesh_of(DATA), P(), (IN, OUT), lambda i: np.ones((IN, OUT)) * (1 - i))

    def step(mean: Any, x: Any, y: Any) -> Any:
        return 0.9 * mean + jax.grad(ddp)(weights("w"), x, y)["w"]

    return evaluated(step, mean, X, Y)


@wrong(trained(error, "w"))
def same_batch_everywhere() -> Results:
    return graded(ddp, weights("w"), np.tile(X[:4], (2, 1)), np.tile(Y[:4], (2, 1)))


@wrong()
def noise_differs_on_replicated_weights() -> Results:
    def perturb(p: Tree) -> Any:
        return p["w"] + 0.1 * jax.random.normal(fold("data"), (IN, OUT))

    return evaluated(perturb, weights("w"))


# --- values that are not arguments ---


@wrong(valued(lambda p: linear({"w": p["w"]}).mean(0) - p["b"], "w", "b"))
def closure_leaked_from_another_shard_map() -> Results:
    kept: list[Any] = []

    def features(p: Tree, x: Any) -> Any:
        out = x @ p["w"]
        kept.append(out.mean(0))
        return out

    on(features, (P(), P("data")), P("data"))(weights("w"), X)
    return evaluated(lambda b: kept[0] - b, ALL["b"])


@wrong(lambda: {"value": X.sum() * 1.5})
def axis_index_scales_output() -> Results:
    return evaluated(lambda x: x.sum() * (1 + lax.axis_index("data")), X)


@wrong(valued(lambda p: error(p) + decay(p), "w"))
def python_rank_branch_on_value() -> Results:
    """With `lax.cond`, since Python's `if` cannot use a traced value."""

    def loss(p: Tree, x: Any, y: Any) -> Any:
        return ddp(p, x, y) + lax.cond(lax.axis_index("data") == 0, lambda: decay(p), lambda: 0.0)

    return evaluated(loss, weights("w"), X, Y)


LIMIT = np.sort(abs(X).max(1))[-1] - 1e-3  # exceeded by one rank's rows only


@wrong(lambda: {"value": (X / abs(X).max()).sum()}, hangs=True)
def branch_issues_other_collectives() -> Results:
    def total(x: Any) -> Any:
        largest = abs(x).max()
        return lax.psum(lax.cond(largest > LIMIT, lambda: x / lax.pmax(largest, "data"), lambda: x).sum(), "data")

    return evaluated(total, X, specs=(P("data"),))


@wrong(hangs=True)
def loop_ends_by_a_local_number() -> Results:
    def total(x: Any) -> Any:
        largest = abs(x).max() * jnp.where(lax.axis_index("data") == 0, 4, 1)  # so that one rank takes more iterations

        def halve(carry: Any) -> Any:
            total, scale = carry
            return total + lax.psum((scale * x).sum() / 2, "data"), scale / 2

        return lax.while_loop(lambda carry: carry[1] * largest > 0.1, halve, (0.0, 1.0))[0]

    return evaluated(total, X, specs=(P("data"),))


# --- refused by JAX: outputs that vary although their spec says otherwise ---

TENSOR = {"tensor": 2}
V = DRAW.normal(size=IN)  # a vector that all ranks have
PIECES = X.reshape(2, 4, IN)


@wrong(valued(error, "w"))
def jax_value_out() -> Results:
    return evaluated(local, weights("w"), X, Y)


@wrong(valued(lambda p: {"loss": error(p), "accuracy": hits(p, X, LABELS).mean()}, "w"))
def jax_second_output() -> Results:
    def f(p: Tree, x: Any, y: Any, labels: Any) -> Any:
        return {"loss": ddp(p, x, y), "accuracy": hits(p, x, labels).mean()}

    return evaluated(f, weights("w"), X, Y, LABELS)


@wrong(valued(error, "w"))
def jax_one_axis_of_two() -> Results:
    def f(p: Tree, x: Any, y: Any) -> Any:
        return summed(squares(x @ p["w"], y), "replica")

    return evaluated(f, weights("w"), X, Y, specs=(P(), P(BOTH), P(BOTH)), sizes=HYBRID)


@wrong(lambda: {"value": X})
def jax_gathered_out() -> Results:
    return evaluated(lambda x: lax.all_gather(x, "data", tiled=True), X, specs=(P("data"),))


@wrong()
def jax_permuted_out() -> Results:
    return evaluated(lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), X, specs=(P("data"),))


@wrong()
def jax_exchanged_out() -> Results:
    return evaluated(lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), X, specs=(P("data"),))


@wrong()
def jax_scattered_out() -> Results:
    return evaluated(lambda x: lax.psum_scatter(x, "data", tiled=True), X, specs=(P("data"),))


@wrong()
def jax_selected_out() -> Results:
    return evaluated(lambda v, x: jnp.where(x.mean() > X.mean(), v, 2 * v), V, X)


@wrong()
def jax_written_into_a_buffer() -> Results:
    def f(v: Any, x: Any) -> Any:
        kept = jax.new_ref(v)
        kept[...] = x.mean(0)
        return kept[...]

    return evaluated(f, V, X)


@wrong(lambda: {"value": X.reshape(2, 4, 2, 2).sum(axis=(1, 2, 3))})
def jax_nested_out() -> Results:
    def f(x: Any) -> Any:
        inner = jax.shard_map(lambda x: x.sum(), in_specs=P(None, "tensor"), out_specs=P(), axis_names={"tensor"})
        return inner(x)[None]

    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        outer = jax.shard_map(f, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        return {"value": jax.jit(outer)(X)}


# --- ranks ---


@wrong()
def jax_scaled_by_rank() -> Results:
    return evaluated(lambda v: v * (1 + lax.axis_index("data")), V)


@wrong()
def jax_row_of_this_rank() -> Results:
    return evaluated(lambda v: v[lax.axis_index("data")], V)


@wrong()
def jax_piece_of_this_rank() -> Results:
    return evaluated(lambda v: jnp.stack(jnp.split(v, 2))[lax.axis_index("data")], V)


@wrong()
def jax_branch_on_rank() -> Results:
    return evaluated(lambda v: 2 * v if lax.axis_index("data") == 0 else v, V)


@wrong()
def jax_branch_on_rows() -> Results:
    return evaluated(lambda v, x: 2 * v if x.mean() > X.mean() else v, V, X)


@wrong()
def jax_number_of_rows() -> Results:
    return evaluated(lambda v, x: float(x.sum()) * v, V, X)


# --- collectives along an axis where a value is replicated, or varies already ---


@wrong(lambda: {"value": X.sum()})
def jax_psum_one_axis_more() -> Results:
    return evaluated(lambda x: lax.psum(x.sum(), ("data", "tensor")), X, specs=(P("data"),), sizes=GRID)


@wrong(lambda: {"value": X.mean()})
def jax_pmean_one_axis_more() -> Results:
    return evaluated(lambda x: lax.pmean(x.mean(), ("data", "tensor")), X, specs=(P("data"),), sizes=GRID)


@wrong(lambda: {"value": PIECES.sum(0)})
def jax_psum_scatter_one_axis_more() -> Results:
    def f(x: Any) -> Any:
        return lax.psum_scatter(x, ("data", "tensor"), tiled=True)

    return {"value": on(f, (P("data"),), P(("data", "tensor")), GRID)(X)}


@wrong(lambda: {"value": V})
def jax_psum_of_reduced() -> Results:
    return evaluated(lambda v: lax.psum(lax.pcast(v, "data", to="reduced"), "data"), V)


@wrong(trained(error, "w"))
def jax_pvary_of_rows() -> Results:
    return graded(lambda p, x, y: ddp(p, lax.pcast(x, "data", to="varying"), y), weights("w"), X, Y)


@wrong(trained(error, "w"))
def jax_pvary_one_axis_more() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        return summed(squares(lax.pcast(x, ("data", "tensor"), to="varying") @ p["w"], y), "data")

    return graded(loss, weights("w"), X, Y, sizes=GRID)


@wrong(trained(error, "w"))
def jax_reduced_twice() -> Results:
    def loss(p: Tree, x: Any, y: Any) -> Any:
        w = lax.pcast(lax.pcast(p["w"], "data", to="reduced"), "data", to="reduced")
        return summed(squares(x @ w, y))

    return graded(loss, weights("w"), X, Y)


@wrong(trained(lambda p: (jnp.tile(p["v"], 2) * X[:, 0]).sum(), "w"))
def jax_gather_of_what_all_have() -> Results:
    def loss(p: Tree, x: Any) -> Any:
        whole = lax.all_gather(p["v"], "data", tiled=True, to="reduced")
        return lax.psum((lax.dynamic_slice_in_dim(whole, 4 * lax.axis_index("data"), 4) * x[:, 0]).sum(), "data")

    return graded(loss, {"v": V}, X)


# --- loops and branches ---


def steps(v: Any, x: Any) -> Any:
    return lax.scan(lambda h, row: (jnp.tanh(h + row), None), v, x)[0].sum()


@wrong(lambda: {"gradient": jax.grad(lambda v: sum(steps(v, x) for x in PIECES))(V)})
def jax_scan_carry() -> Results:
    return graded(lambda v, x: lax.psum(steps(v, x), "data"), V, X, value=False)


@wrong()
def jax_while_carry() -> Results:
    def f(v: Any, x: Any) -> Any:
        return lax.while_loop(lambda h: (h**2).sum() < 100, lambda h: h + 1 + x.mean(0) ** 2, v)

    return evaluated(f, V, X)


@wrong()
def jax_branches_of_two_types() -> Results:
    return evaluated(lambda v, x: lax.cond((v**2).sum() > 0, lambda: x.mean(0), lambda: v), V, X)


# --- derivatives ---


def pvaried(p: Tree, x: Any, y: Any) -> Any:
    """The gradient of this rank's error, computed by hand."""
    return jax.grad(local)(lax.pcast(p, "data", to="varying"), x, y)


@wrong(lambda: {"value": jax.grad(error)(weights("w"))})
def jax_gradient_of_pvaried() -> Results:
    return evaluated(pvaried, weights("w"), X, Y)


@wrong(lambda: {"value": sgd(weights("w"), jax.grad(error)(weights("w")))})
def jax_update_by_a_local_gradient() -> Results:
    return evaluated(lambda p, x, y: sgd(p, pvaried(p, x, y)), weights("w"), X, Y)


@wrong(lambda: {"value": sgd(weights("w"), jax.grad(error)(weights("w")), -1)})
def jax_momentum_of_local_gradients() -> Results:
    return evaluated(lambda m, x, y: sgd(m, pvaried(weights("w"), x, y), -1), weights("w"), X, Y)


@wrong(trained(lambda p: (X @ p["w"]).sum() ** 2, "w"))
def jax_custom_vjp_forgets_psum() -> Results:
    product = jax.custom_vjp(lambda w, x: x @ w)
    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))
    return graded(lambda p, x: lax.psum(product(p["w"], x).sum(), "data") ** 2, weights("w"), X)


@wrong(lambda: {"gradient": jax.grad(lambda x: x.sum() ** 2)(X)})
def jax_custom_vjp_of_psum_is_psum() -> Results:
    total = jax.custom_vjp(lambda x: lax.psum(x, "data"))
    total.defvjp(lambda x: (lax.psum(x, "data"), None), lambda _, g: (lax.psum(g, "data"),))
    return {"gradient": on(jax.grad(lambda x: total(x.sum()) ** 2), (P("data"),), P("data"))(X)}


@wrong(lambda: {"tangent": 2 * X.sum() ** 2})
def jax_custom_jvp_forgets_psum() -> Results:
    total = jax.custom_jvp(lambda x: lax.psum(x.sum(), "data"))
    total.defjvp(lambda primals, tangents: (total(*primals), tangents[0].sum()))
    return {"tangent": on(lambda x: jax.jvp(lambda x: total(x) ** 2, (x,), (x,))[1], (P("data"),), P())(X)}


@wrong(lambda: {"value": jax.vjp(jnp.tanh, V)[1](X.sum(0))[0]})
def jax_cotangent_varies() -> Results:
    return evaluated(lambda v, x: jax.vjp(jnp.tanh, v)[1](x.sum(0))[0], V, X)


@wrong()
def jax_tangent_varies() -> Results:
    return evaluated(lambda v, x: jax.jvp(jnp.tanh, (v,), (x.sum(0),))[1], V, X)


@wrong(lambda: {"gradient": jax.grad(lambda v: (X @ v).max())(V)})
def jax_gradient_of_pmax() -> Results:
    return graded(lambda v, x: lax.pmax((x @ v).max(), "data"), V, X, value=False)


# --- partial sums, for which JAX has a type that a program must ask for ---


def unreduced(p: Tree) -> Any:
    return lax.pcast(jnp.tanh(X @ p["up"]) @ p["down"], "tensor", to="unreduced")


def paired(p: Tree) -> Any:
    return jnp.tanh(X @ p["up"]) @ p["down"]


@wrong(trained(lambda p: squares(paired(p) + p["b"], Y), "up", "down", "b"))
def jax_bias_before_the_sum() -> Results:
    def loss(p: Tree, y: Any) -> Any:
        return squares(lax.psum(unreduced(p) + p["b"], "tensor"), y)

    return graded(loss, weights("up", "down", "b"), Y, specs={**CUT, "b": P()}, cut=P(), sizes=TENSOR)


@wrong(valued(paired, "up", "down"))
def jax_partial_sums_out() -> Results:
    return evaluated(unreduced, weights("up", "down"), specs=(CUT,), sizes=TENSOR)


@wrong(valued(lambda p: jnp.tanh(paired(p)), "up", "down"))
def jax_tanh_of_partial_sums() -> Results:
    def f(p: Tree) -> Any:
        return lax.psum(jnp.tanh(unreduced(p)), "tensor")

    return evaluated(f, weights("up", "down"), specs=(CUT,), sizes=TENSOR)


# --- values that a body closes over, and random numbers ---


@wrong()
def jax_kept_from_another_map() -> Results:
    kept: list[Any] = []

    def rows(x: Any) -> Any:
        kept.append(x.mean(0))
        return x

    on(rows, (P("data"),), P("data"))(X)
    return evaluated(lambda v: v + kept[0], V)


def own_keys() -> Results:
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(2)]
    return {"value": sum(jax.random.poisson(key, np.exp(x)).sum() for key, x in zip(keys, np.split(X, 2), strict=True))}


@wrong(own_keys)
def one_seed_for_the_noise_of_all_rows() -> Results:
    def f(x: Any) -> Any:
        return lax.psum(jax.random.poisson(jax.random.key(0), jnp.exp(x)).sum(), "data")

    return evaluated(f, X, specs=(P("data"),))


@wrong()
def jax_one_key_for_all_rows() -> Results:
    def f(x: Any) -> Any:
        return lax.psum(jax.random.gamma(jax.random.key(0), jnp.exp(x)).sum(), "data")

    return evaluated(f, X, specs=(P("data"),))


# --- the results ---

REFUSALS = (  # parts of JAX's messages for programs that it refuses
    "require replication", "varying=frozenset", "manual axis types do not match", "must have equal types", "{V:", "{U:",
    "equal output types", "Unsupported pcast", "corresponds to one of varying", "are reduced", "that are varying",
    "is unreduced", "unreduced rule", "traced array", "Differentiation rule for 'pmax'",
)  # fmt: skip


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def copies(array: Any) -> list[Any]:
    """The copies of each piece whose copies differ between devices."""
    by_index: dict[str, list[Any]] = {}
    for shard in array.addressable_shards:
        by_index.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return [held for held in by_index.values() if any(not np.array_equal(one, held[0]) for one in held)]


def flat(tree: Tree) -> Any:
    return np.concatenate([np.asarray(leaf, dtype=np.float64).reshape(-1) for leaf in jax.tree.leaves(tree)])


def compared(found: Tree, meant: Tree) -> dict[str, float]:
    """The ratio of a result to the intended one (by projection), and its relative distance from it."""
    a, b = flat(found), flat(meant)
    return {"ratio": float(a @ b / (b @ b)), "off": float(np.linalg.norm(a - b) / np.linalg.norm(b))}


def judged(program: Program) -> dict[str, Any]:
    try:
        found = program.wrong()
        jax.block_until_ready(found)
    except Exception as error:
        if not any(words in str(error) for words in REFUSALS):
            raise
        return {"verdict": "finds", "said": first_line(error)}
    differ = any(copies(leaf) for leaf in jax.tree.leaves(found))
    if program.right is None:
        return {"verdict": "silent" if differ else "unknown", "differ": differ, "results": {}}
    meant = program.right()
    results = {name: compared(found[name], meant[name]) for name in meant}
    fits = not differ and all(one["off"] <= ROUNDING for one in results.values())
    return {"verdict": "right" if fits else "silent", "differ": differ, "results": results}


def alone(name: str) -> dict[str, Any]:
    """Runs a program that may hang in its own process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--here", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        return {"verdict": "hangs", "said": f"no answer in {DEADLINE} s"}
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout)["programs"][name]
        return answer
    if "rendezvous" in done.stderr:
        return {"verdict": "hangs", "said": "XLA ends the process: not all ranks came to a collective"}
    raise RuntimeError(done.stderr)


def main() -> None:
    here = "--here" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--here"] or list(PROGRAMS)
    jax.config.update("jax_enable_x64", True)
    told: dict[str, Any] = {}
    for name in names:
        began = time.perf_counter()
        told[name] = alone(name) if PROGRAMS[name].hangs and not here else judged(PROGRAMS[name])
        told[name]["seconds"] = time.perf_counter() - began
    for name, why in {} if here else CANNOT.items():
        told[name] = {"verdict": "cannot", "said": why}
    print(json.dumps({"jax": jax.__version__, "programs": told}, indent=1))


if __name__ == "__main__":
    main()
