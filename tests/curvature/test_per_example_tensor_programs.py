"""Norms of rows in programs that cut parameters in uncommon ways, against one process.

Each is a program for four ranks: parameters, how they are cut, and losses that are written once for both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P, parallel
from shardfn.curvature.per_example import per_example
from shardfn.testing import world as shared_world
from tests.curvature.test_per_example import Doubling, alone, norms_of, off
from tests.curvature.test_per_example_programs import drawn
from tests.models import distance, normal, plainly
from tests.reference import worst

D = 8


@dataclass
class Program:
    """What ranks compute, and how.

    Attributes:
        losses: `(stage, params, axis, *batch) -> [rows]`.
        batch: of the ranks at a place of the axes of rows.
    """

    params: Any
    specs: Any
    losses: Callable[..., Tensor]
    batch: Callable[[int], tuple[Tensor, ...]]
    sizes: dict[str, int] = field(default_factory=lambda: {"shard": 2, "tensor": 2})
    strategy: Any = field(default_factory=lambda: sf.full_shard("shard"))
    frozen: str = ""
    beside: dict[str, Tensor] = field(default_factory=dict)
    micro: int = 1


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(f: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[f.__name__] = f
    return f


def vectors(place: int, rows: int = 3) -> tuple[Tensor, ...]:
    return (normal(rows, 4, D, seed=100 + place),)


def words(place: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(place)),)


def two_layers() -> Any:
    return {name: drawn(n=(D,), up=(D, 12), down=(12, D)) for name in "ab"}


PAIR = sf.by_path([(r".*\.up", P(None, "tensor")), (r".*\.down", P("tensor")), (r".*", P())])


def mlp(p: Any, x: Tensor, t: Any) -> Tensor:
    h = parallel.to_parallel(F.rms_norm(x, (D,), p["n"]), t)
    return x + parallel.from_parallel(torch.tanh(h @ p["up"]) @ p["down"], t)


def twice(layer: Any) -> Callable[..., Tensor]:
    def losses(stage: Any, params: Any, t: Any, x: Tensor) -> Tensor:
        f = stage(lambda p, x: layer(p, x, t))
        return f(params["b"], f(params["a"], x)).square().sum((1, 2))

    return losses


def first(layer: Any) -> Callable[..., Tensor]:
    def losses(stage: Any, params: Any, t: Any, x: Tensor) -> Tensor:
        y: Tensor = stage(lambda p, x: layer(p, x, t))(params["a"], x)
        return y.square().flatten(1).sum(1)

    return losses


# --- meshes and placements ---


@program
def tensor_ranks_are_far_apart() -> Program:
    return Program(two_layers(), PAIR, twice(mlp), vectors, {"tensor": 2, "shard": 2}, sf.strategies.zero1("shard"))


@program
def four_columns() -> Program:
    return Program(two_layers(), PAIR, twice(mlp), vectors, {"shard": 1, "tensor": 4})


@program
def an_idle_axis() -> Program:
    return Program(two_layers(), PAIR, twice(mlp), vectors, {"shard": 1, "idle": 2, "tensor": 2})


@program
def layers_cut_over_other_axes() -> Program:
    both = sf.by_path(
        [
            (r"a\.up", P(None, ("tensor", "more"))),
            (r"a\.down", P(("tensor", "more"))),
            (r"b\.up", P(None, "tensor")),
            (r"b\.down", P("tensor")),
            (r".*", P()),
        ]
    )

    def losses(stage: Any, params: Any, t: Any, x: Tensor) -> Tensor:
        x = stage(lambda p, x: mlp(p, x, (t, "more") if t else ()))(params["a"], x)
        y: Tensor = stage(lambda p, x: mlp(p, x, t))(params["b"], x)
        return y.square().sum((1, 2))

    return Program(two_layers(), both, losses, vectors, {"shard": 1, "tensor": 2, "more": 2})


@program
def a_matrix_cut_in_both_dimensions() -> Program:
    def layer(p: Any, x: Tensor, t: Any) -> Tensor:
        more: Any = "more" if t else ()
        own = sf.collectives.local_slice(parallel.to_parallel(x, more), t, dim=-1)
        y = sf.all_gather(sf.psum(own @ p["w"], t), more, dim=-1, to="invariant")
        return torch.tanh(y) * p["n"]

    specs = sf.by_path([(r"a\.w", P("tensor", "more")), (r".*", P())])
    return Program({"a": drawn(w=(D, D), n=(D,))}, specs, first(layer), vectors, {"shard": 1, "tensor": 2, "more": 2})


@program
def frozen_matrices() -> Program:
    return Program(two_layers(), PAIR, twice(mlp), vectors, frozen=r".*\.up|a\.down")


@program
def no_rows_on_the_first_rank() -> Program:
    return Program(two_layers(), PAIR, twice(mlp), lambda place: vectors(place, 3 if place else 0))


@program
def parts_of_uneven_batches() -> Program:
    return Program(two_layers(), PAIR, twice(mlp), lambda place: vectors(place, 5 if place else 1), micro=3)


@program
def a_plain_tensor_beside() -> Program:
    def losses(stage: Any, params: Any, t: Any, x: Tensor) -> Tensor:
        y = stage(lambda p, x, s: mlp(p, x * s, t))(params["a"], x, params["scale"])
        return (y * params["scale"]).square().sum((1, 2))

    return Program(two_layers(), PAIR, losses, vectors, frozen=r"b\..*", beside={"scale": normal(D, seed=9)})


# --- the vocabulary ---


def of_words(**options: Any) -> Callable[..., Tensor]:
    sequence = {name: options[name] for name in ("sequence",) if name in options}

    def losses(stage: Any, params: Any, t: Any, tokens: Tensor) -> Tensor:
        targets = tokens[:, 1:].where(tokens[:, 1:] != 3, -100).to(torch.int32)
        x = stage(lambda p, at: parallel.embedding(at, p["w"], t, **sequence))(params["a"], tokens[:, :-1])

        def head(p: Any, x: Tensor, targets: Tensor) -> Tensor:
            return parallel.cross_entropy(x, p["w"].T, targets, t, **options).sum(1)

        y: Tensor = stage(head)(params["a"], x, targets)
        return y

    return losses


@program
def a_padded_vocabulary() -> Program:
    return Program({"a": drawn(w=(12, D))}, P("tensor"), of_words(vocabulary=11), words)


@program
def logits_in_chunks_of_cut_sequences() -> Program:
    return Program({"a": drawn(w=(12, D))}, P("tensor"), of_words(chunk=2, sequence=1), words)


# --- what a stage does ---


@program
def a_gradient_inside() -> Program:
    def layer(p: Any, x: Tensor, t: Any) -> Tensor:
        return x + torch.tanh(torch.func.grad(lambda y: mlp(p, y, t).square().sum())(x))

    return Program(two_layers(), PAIR, twice(layer), vectors)


@program
def a_norm_of_whole_and_of_cut_values() -> Program:
    def layer(p: Any, x: Tensor, t: Any) -> Tensor:
        own = sf.collectives.local_slice(x, t, dim=1) * sf.pvary(p["n"], t)
        return mlp(p, sf.all_gather(own, t, dim=1, to="invariant") + x * p["n"], t)

    return Program(two_layers(), PAIR, twice(layer), vectors)


@program
def columns_that_a_stage_returns() -> Program:
    def losses(stage: Any, params: Any, t: Any, x: Tensor) -> Tensor:
        up, n = stage(lambda p: (p["up"] * 2, sf.pvary(p["n"], t)))(params["a"])

        def layer(p: Any, x: Tensor, up: Tensor, n: Tensor) -> Tensor:
            h = torch.tanh((parallel.to_parallel(x, t) * n) @ up)
            return x + parallel.from_parallel(h @ p["down"], t)

        y: Tensor = stage(layer)(params["b"], x, up, n)
        return y.square().sum((1, 2))

    return Program(two_layers(), PAIR, losses, vectors, frozen=r"a\.down|b\.(n|up)")


@program
def cut_values_between_stages() -> Program:
    def losses(stage: Any, params: Any, t: Any, x: Tensor) -> Tensor:
        h = stage(lambda p, x: torch.tanh(parallel.to_parallel(x, t) @ p["up"]))(params["a"], x)
        whole = sf.all_gather(h, t, dim=-1, to="invariant")
        y = stage(lambda p, h: sf.psum(h @ p["down"], t))(params["a"], h)
        return y.square().sum((1, 2)) + whole.square().sum((1, 2))

    return Program(two_layers(), PAIR, losses, vectors, frozen=r"a\.n|b\..*")


@program
def a_large_parameter_that_no_rule_knows() -> Program:
    """Its stage runs for some rows at a time, another number of times on ranks with other rows."""

    def layer(p: Any, x: Tensor, t: Any) -> Tensor:
        number = parallel.to_parallel(x.sum((1, 2)), t)[:, None, None] / 10
        return sf.psum((p["w"] * number).exp().sum((1, 2)), t).log()[:, None]

    rows = {0: 5, 1: 3}
    return Program({"a": drawn(w=(600, 1024))}, P("tensor"), first(layer), lambda place: vectors(place, rows[place]))


@program
def convolutions() -> Program:
    def layer(p: Any, x: Tensor, t: Any) -> Tensor:
        h = torch.tanh(F.conv1d(parallel.to_parallel(x, t).mT, p["k"], p["b"], padding=1))
        return x + parallel.from_parallel(F.conv1d(h, p["j"], padding=1), t).mT

    specs = sf.by_path([(r".*\.(k|b)", P("tensor")), (r".*\.j", P(None, "tensor"))])
    return Program({"a": drawn(k=(D, D, 3), b=(D,), j=(D, D, 3))}, specs, first(layer), vectors)


@program
def experts_of_cut_width() -> Program:
    def layer(p: Any, x: Tensor, t: Any) -> Tensor:
        h = torch.tanh(torch.einsum("btd,edf->ebtf", parallel.to_parallel(x, t), p["up"]))
        y = parallel.from_parallel(torch.einsum("ebtf,efd->ebtd", h, p["down"]), t)
        return x + torch.einsum("ebtd,bte->btd", y, torch.softmax(x @ p["router"], -1))

    specs = sf.by_path([(r".*up", P(None, None, "tensor")), (r".*down", P(None, "tensor")), (r".*", P())])
    params = {"a": drawn(up=(3, D, 12), down=(3, 12, D), router=(D, 3))}
    return Program(params, specs, first(layer), vectors)


@program
def a_function_that_cannot_be_mapped() -> Program:
    def layer(p: Any, x: Tensor, t: Any) -> Tensor:
        h = Doubling.apply(parallel.to_parallel(x, t) @ p["up"], 1 + p["down"].sum(1))
        return x + parallel.from_parallel(h @ p["down"], t)

    return Program(two_layers(), PAIR, first(layer), vectors, frozen=r"a\.n|b\..*")


@program
def rows_that_decide() -> Program:
    def layer(p: Any, x: Tensor, t: Any) -> Tensor:
        return torch.stack([mlp(p, row[None], t)[0] if row.sum() > 0 else row * p["n"] for row in x])

    return Program(two_layers(), PAIR, twice(layer), lambda place: vectors(place, 5 if place else 2))


def differences(name: str) -> list[float]:
    """How far norms and clipped sums are from those of one process."""
    given = PROGRAMS[name]()
    mesh = sf.make_mesh(device="cpu", **given.sizes)
    flat = sf.shard(given.params, mesh, given.strategy, specs=given.specs, frozen=given.frozen or ())
    params, whole = flat | given.beside, given.params | given.beside
    batches = [given.batch(place) for place in range(given.sizes["shard"])]
    place = mesh.get_local_rank("shard")

    def losses(params: Any, *batch: Tensor) -> Tensor:
        return given.losses(sf.stage, params, "tensor", *batch)

    def found(params: Any, *batch: Tensor) -> Any:
        rows = per_example(losses, params, *batch, micro=given.micro)
        return rows.norms, rows.clipped(0.7)

    def reference(params: Any, *batch: Tensor) -> Tensor:
        return given.losses(plainly, params, (), *batch)

    each = alone(reference, whole, *[torch.cat(xs) for xs in zip(*batches, strict=True)])
    paths, gradients, tree = optree.tree_flatten_with_path(each)
    trained = [not re.fullmatch(given.frozen, ".".join(map(str, path))) for path in paths]
    kept = [g if yes else torch.zeros_like(g) for g, yes in zip(gradients, trained, strict=True)]
    norms = norms_of(optree.tree_unflatten(tree, kept))
    weights = (0.7 / norms).clamp(max=1)
    wanted = [torch.einsum("r,r...->...", weights, g) for g, yes in zip(kept, trained, strict=True) if yes]
    mapped = sf.shard_map(found, mesh=mesh, in_specs=..., out_specs=...)
    result = []
    for _ in range(2):  # the first call compares
        own, clipped = mapped(params, *batches[place])
        sf.shards.assert_replicated(clipped, mesh)
        result.append(off(own, norms.split([len(batch[0]) for batch in batches])[place]))
        result.append(distance(optree.tree_leaves(sf.unshard(clipped)), wanted, floor=1.0))
    return result


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_those_of_one_process(name: str) -> None:
    for found in shared_world(4).run(differences, name):
        assert worst(found) < 1e-12, found
        assert not any(map(math.isnan, found))
