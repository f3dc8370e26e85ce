"""The JAX side of test_jax.py: programs of collectives under `jax.shard_map`, on four CPU devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python jax_oracle.py < programs.json

Imports JAX and numpy alone. For each program, given as a list of operations and its inputs, it prints the value, its
gradients in both inputs, and those of a directional derivative. Loops over operations are unrolled by JAX's tracing.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

AXES = ("a", "b")
FUNCTIONS = {"tanh": jnp.tanh, "sin": jnp.sin, "square": lambda h: h**2 / 2}


def ramp(h: Any) -> Any:
    return jnp.cos(jnp.arange(h.size, dtype=jnp.float64)).reshape(h.shape)


def slice_of(h: Any, axis: Any, dim: int) -> Any:
    own = h.shape[dim] // lax.psum(1, axis)
    return lax.dynamic_slice_in_dim(lax.pcast(h, axis, to="varying"), lax.axis_index(axis) * own, own, dim)


OPERATIONS = {
    "psum": lax.psum,
    "pmean": lax.pmean,
    "pvary": lambda h, axis: lax.pcast(h, axis, to="varying"),
    "all_gather": lambda h, axis, dim: lax.all_gather(h, axis, axis=dim, tiled=True),
    "reduce_scatter": lambda h, axis, dim: lax.psum_scatter(h, axis, scatter_dimension=dim, tiled=True),
    "all_to_all": lambda h, axis, split, concat: lax.all_to_all(h, axis, split, concat, tiled=True),
    "ppermute": lax.ppermute,
    "local_slice": slice_of,
    "over_largest": lambda h, axis: h / (1 + jnp.abs(lax.pmax(lax.stop_gradient(h), axis))),
    "by_index": lambda h, axis: h * (1 + lax.axis_index(axis)),
} | {name: lambda h, f=f: f(h) for name, f in FUNCTIONS.items()}


def joined(axis: Any) -> Any:
    return tuple(axis) if isinstance(axis, list) else axis


def results(program: list[list[Any]], left: list[str], inputs: dict[str, list[Any]]) -> list[Any]:
    x, w, u, v = (np.array(inputs[name]) for name in "xwuv")

    def body(x: Any, w: Any) -> Any:
        h = jnp.tanh(x * lax.pcast(w, AXES, to="varying"))
        for name, *arguments in program:
            h = OPERATIONS[name](h, *map(joined, arguments)) if arguments else OPERATIONS[name](h)
        total = (jnp.sin(h) * ramp(h)).sum()
        return lax.psum(total, tuple(left)) if left else total

    mesh = jax.make_mesh((2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(AXES), P()), out_specs=P())

    def derivative(x: Any, w: Any) -> Any:
        gx, gw = jax.grad(mapped, (0, 1))(x, w)
        return (gx * u).sum() + (gw * v).sum()

    value, gradients = jax.jit(jax.value_and_grad(mapped, (0, 1)))(x, w)
    return [np.asarray(found).tolist() for found in (value, *gradients, *jax.jit(jax.grad(derivative, (0, 1)))(x, w))]


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    print(json.dumps([results(*one) for one in json.load(sys.stdin)]))
