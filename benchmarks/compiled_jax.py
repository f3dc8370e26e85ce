"""The JAX side of `benchmarks.compiled`: the same model and step under `jax.jit(jax.shard_map(...))`, on CPU devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python compiled_jax.py '{"width": 512, ...}'

Runs in an interpreter that has JAX, and imports nothing else but numpy. Parameters are cut along their first dimension.
Each layer gathers its own in bfloat16, and again for backward, which JAX's checkpointing does by a policy. The output
is JSON: JAX's version, seconds to compile, seconds of each step, and the last loss.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name

Params = dict[str, Any]


def normed(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def block(p: Params, x: Any, heads: int) -> Any:
    b, t, d = x.shape
    h = normed(x, p["norm1"]) @ p["qkv"].T
    q, k, v = h.reshape(b, t, 3, heads, d // heads).transpose(2, 0, 1, 3, 4)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, d) @ p["out"].T
    h = normed(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"].T) * (h @ p["up"].T)) @ p["down"].T


def head(p: Params, x: Any, targets: Any) -> Any:
    logits = (normed(x, p["norm"]) @ p["out"].T).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def made(config: dict[str, int]) -> Params:
    d, f, v = config["width"], config["hidden"], config["vocabulary"]
    draw, ones = np.random.default_rng(0), np.ones(d, np.float32)

    def normal(*shape: int) -> Any:
        return draw.normal(0, 0.02, shape).astype(np.float32)

    def layer() -> Params:
        shapes = {"qkv": (3 * d, d), "out": (d, d), "gate": (f, d), "up": (f, d), "down": (d, f)}
        return {name: normal(*shape) for name, shape in shapes.items()} | {"norm1": ones, "norm2": ones}

    blocks = [layer() for _ in range(config["layers"])]
    return {"embed": {"tokens": normal(v, d)}, "blocks": blocks, "head": {"norm": ones, "out": normal(v, d)}}


def gathered(p: Params) -> Params:
    def whole(x: Any) -> Any:
        return checkpoint_name(lax.all_gather(x.astype(jnp.bfloat16), "data", tiled=True), "gathered")

    return jax.tree.map(whole, p)


def loss(params: Params, rows: Any, heads: int) -> Any:
    again = functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_anything_except_these_names("gathered")
    )
    layer = again(lambda p, x: block(gathered(p), x, heads))
    x = again(lambda p, rows: gathered(p)["tokens"][rows])(params["embed"], rows[:, :-1])
    for p in params["blocks"]:
        x = layer(p, x)
    return lax.pmean(again(lambda p, x, y: head(gathered(p), x, y))(params["head"], x, rows[:, 1:]), "data")


def adamw(p: Any, g: Any, m: Any, v: Any, n: Any) -> tuple[Any, Any, Any]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    moved = (m / (1 - 0.9**n)) / (jnp.sqrt(v / (1 - 0.999**n)) + 1e-8)
    return p - 1e-3 * (moved + 0.01 * p), m, v


def main() -> None:
    config = json.loads(sys.argv[1])
    mesh = jax.make_mesh((jax.device_count(),), ("data",))

    def step(params: Params, mean: Params, square: Params, n: Any, rows: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, rows, config["heads"])
        moved = jax.tree.map(lambda p, g, m, v: adamw(p, g, m, v, n), params, grads, mean, square)
        return *jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), moved), value

    cut = P("data")
    specs = {"in_specs": (cut, cut, cut, P(), cut), "out_specs": (cut, cut, cut, P())}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, **specs), donate_argnums=(0, 1, 2))
    params = jax.device_put(made(config), jax.NamedSharding(mesh, cut))
    mean, square = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
    shape = config["batch"] * jax.device_count(), config["context"] + 1
    rows = jax.device_put(
        np.random.default_rng(1).integers(0, config["vocabulary"], shape), jax.NamedSharding(mesh, cut)
    )
    took: list[float] = []
    value: Any = None
    for n in range(1, 1 + config["steps"]):
        began = time.perf_counter()
        params, mean, square, value = mapped(params, mean, square, float(n), rows)
        value.block_until_ready()
        took.append(time.perf_counter() - began)
    print(json.dumps({"jax": jax.__version__, "compile s": took[0], "seconds": took[1:], "loss": float(value)}))


if __name__ == "__main__":
    main()
