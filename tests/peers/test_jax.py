"""Collectives' values and transposes, beside JAX's `shard_map` on drawn programs.

Each program is a chain of collectives and elementwise functions on a mesh of two axes. Its value, its gradients and the
gradients of a directional derivative are compared. Where JAX is not installed, some have values that JAX has computed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import world
from tests.models import distance, drawn

AXES, ROWS, COLUMNS = ("a", "b"), 4, 4
PROGRAMS = 56
Program = tuple[list[list[Any]], list[str]]
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed: pip install '.[oracle]'"
)

# Drawn programs add up what ranks have in full, of which the checker warns; what it calls an error still is one.
pytestmark = pytest.mark.filterwarnings("ignore::shardfn.check.VaryingWarning")


# --- programs, by number ---


def program(seed: int) -> Program:
    """Operations with their arguments, and the axes along which the result varies."""
    draw = random.Random(seed)
    varying, shape, chain = {*AXES}, [ROWS, COLUMNS], list[list[Any]]()
    while len(chain) < draw.randint(3, 6):
        if operation := _operation(draw, varying, shape):
            chain.append(operation)
    return chain, sorted(varying)


def _operation(draw: random.Random, varying: set[str], shape: list[int]) -> list[Any] | None:
    name = draw.choice(list(OPERATIONS))
    axis = draw.choice([*AXES, *([list(AXES), ["b", "a"]] if name in SEVERAL else [])])
    axes = {*axis}
    if name in FUNCTIONS:
        return [name]
    if axes & varying if name in ("pvary", "local_slice") else axes - varying:
        return None
    size, dim, other = 2 ** len(axes), draw.randrange(2), draw.randrange(2)
    if name in ("reduce_scatter", "local_slice", "all_to_all") and shape[dim] % size:
        return None
    if name == "all_gather" and shape[dim] > 8:
        return None
    if name in ("psum", "pmean"):
        varying -= axes
    elif name in ("pvary", "local_slice"):
        varying |= axes
    if name in ("reduce_scatter", "local_slice", "all_to_all"):
        shape[dim] //= size
    if name == "all_gather":
        shape[dim] *= size
    if name == "all_to_all":
        shape[other] *= size
    permutation = draw.sample([*enumerate(draw.sample(range(2), 2))], draw.choice([1, 2, 2]))
    more: dict[str, list[Any]] = {"all_to_all": [dim, other], "ppermute": [permutation]}
    one = [dim] if name in ("all_gather", "reduce_scatter", "local_slice") else []
    return [name, axis, *more.get(name, one)]


def inputs(seed: int) -> dict[str, Tensor]:
    """The arguments, and directions."""
    draw = drawn(seed)
    return {name: draw(4 * ROWS if name in "xu" else ROWS, COLUMNS) for name in "xwuv"}


# --- programs in shardfn ---


def over_largest(h: Tensor, axis: Any) -> Tensor:
    return h / (1 + sf.pvary(sf.pmax(h.detach(), axis), axis).abs())


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "square": lambda h: h.square() / 2,
}
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "psum": sf.psum,
    "pmean": sf.pmean,
    "pvary": sf.pvary,
    "all_gather": lambda h, axis, dim: sf.all_gather(h, axis, dim=dim),
    "reduce_scatter": lambda h, axis, dim: sf.reduce_scatter(h, axis, dim=dim),
    "all_to_all": lambda h, axis, split, concat: sf.all_to_all(h, axis, split_dim=split, concat_dim=concat),
    "ppermute": sf.ppermute,
    "local_slice": lambda h, axis, dim: sf.collectives.local_slice(h, axis, dim=dim),
    "over_largest": over_largest,
    "by_index": lambda h, axis: h * (1 + sf.axis_index(axis)),
    **FUNCTIONS,
}
SEVERAL = ("psum", "pmean", "all_gather", "reduce_scatter", "pvary", "over_largest")


def ramp(h: Tensor) -> Tensor:
    return torch.arange(h.numel(), dtype=torch.float64).cos().view(h.shape)


def results(seed: int) -> list[Tensor]:
    """A rank's value, gradients, and gradients of a directional derivative."""
    chain, left = program(seed)
    mesh = sf.make_mesh(device="cpu", a=2, b=2)
    given = {name: x.chunk(4)[mesh.get_rank()] if name in "xu" else x for name, x in inputs(seed).items()}

    def loss(p: Any) -> Tensor:
        h = torch.tanh(p["x"] * sf.pvary(p["w"], AXES))
        for name, *arguments in chain:
            h = OPERATIONS[name](h, *(tuple(one) if i == 0 else one for i, one in enumerate(arguments)))
        total = (h.sin() * ramp(h)).sum()
        return sf.psum(total, tuple(left)) if left else total

    def derivative(p: Any, u: Tensor, v: Tensor) -> Tensor:
        slopes = sf.grad(loss)(p)
        return sf.psum((slopes["x"] * u).sum(), AXES) + (slopes["w"] * v).sum()

    specs = {"x": P(AXES), "w": P()}
    run = functools.partial(sf.shard_map, mesh=mesh)
    p = {name: given[name] for name in specs}
    value, first = run(sf.value_and_grad(loss), in_specs=(specs,), out_specs=(P(), specs))(p)
    second = run(sf.grad(derivative), in_specs=(specs, P(AXES), P()), out_specs=specs)(p, given["u"], given["v"])
    return [x.detach() for x in (value, first["x"], first["w"], second["x"], second["w"])]


def whole(ranks: list[list[Tensor]]) -> list[Tensor]:
    """Of all ranks' results; those of the second input are the same on every rank."""
    assert all(torch.equal(rank[i], ranks[0][i]) for rank in ranks for i in (0, 2, 4))
    return [torch.cat([rank[i] for rank in ranks]) if i in (1, 3) else ranks[0][i] for i in range(5)]


# --- beside JAX ---


@pytest.fixture(scope="module")
def of_jax() -> list[Any]:
    """The results of all programs."""
    given = [(*program(seed), {k: x.tolist() for k, x in inputs(seed).items()}) for seed in range(PROGRAMS)]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    file = Path(__file__).with_name("jax_oracle.py")
    done = subprocess.run(
        [sys.executable, str(file)], input=json.dumps(given), capture_output=True, text=True, env=env, timeout=500
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@needs_jax
@pytest.mark.sampled(0)
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_drawn_program_has_the_value_and_derivatives_of_jax(seed: int, of_jax: list[Any]) -> None:
    got = whole(world(4, "threads").run(results, seed))
    for one, want in zip(got, of_jax[seed], strict=True):
        assert distance(one, torch.tensor(want, dtype=torch.float64), floor=1e-9) < 1e-10, program(seed)


# --- beside what JAX has computed ---

# The value of each program, and its derivatives' inner products with `ramp`.
WRITTEN: dict[int, list[float]] = {
    0: [0.3282282046306, 0.01882470337213, -0.3740883975425, -0.900201723663, 0.9132280891033],
    1: [2.654788902047, 0.0009701312419478, 3.349437620112, -0.3711378290621, 3.451001933052],
    2: [0.2832353582813, 0.3555792340659, 0.1378022712463, -1.808938315433, -0.2236442533317],
    3: [3.7429841972, -0.05833315393331, 6.725218501783, -6.324587144804, -2.969595344275],
    4: [-4.420053509337, 0.5771888695927, 1.433968391574, 4.758755092925, 4.343548874055],
    5: [-0.2856451533703, -0.5308376362205, -1.289852519434, -3.07715291502, -1.229269328703],
    9: [-0.2453921305912, 4.161164085149, 7.304846987751, -19.3344709547, 16.7100385089],
    13: [1.807476396927, 2.439670037732, 1.324715401993, 7.566960225408, 13.56898309557],
}


def summary(found: list[Tensor]) -> list[float]:
    return [(x * ramp(x)).sum().item() for x in found]


@pytest.mark.parametrize("seed", WRITTEN)
def test_a_program_has_the_values_that_jax_had(seed: int) -> None:
    got = summary(whole(world(4, "threads").run(results, seed)))
    assert got == pytest.approx(WRITTEN[seed], rel=1e-10, abs=1e-12)


def test_programs_have_every_operation() -> None:
    assert {name for seed in range(PROGRAMS) for name, *_ in program(seed)[0]} == set(OPERATIONS)
