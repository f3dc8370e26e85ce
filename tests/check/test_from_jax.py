"""What JAX refuses is found."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import World, world
from tests.check.from_jax import FROM_JAX
from tests.check.gallery.setting import Wrong
from tests.models import distance

FORWARD = ("jax_custom_jvp_forgets_psum", "jax_tangent_varies")  # which threads do not have


def world_of(case: Wrong) -> World:
    ranks = math.prod(case.mesh.values())
    return world(ranks, "processes" if case.name in FORWARD else "threads")


def numbers(name: str, **options: Any) -> list[Tensor]:
    case = FROM_JAX[name]
    mesh = sf.make_mesh(device="cpu", **case.mesh)
    result = case.program(functools.partial(sf.shard_map, mesh=mesh, **options), mesh)
    return [torch.as_tensor(leaf).detach() for leaf in optree.tree_leaves(result)]


def said(name: str) -> list[tuple[str, tuple[str, ...], str]]:
    """Of each finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", sf.check.VaryingWarning)
            numbers(name, check=True)
    except (sf.check.VaryingError, sf.check.VaryingWarning) as error:
        return [(one.kind, tuple(one.axes), one.path) for one in error.findings]
    except NotImplementedError:
        return [("NotImplementedError", FROM_JAX[name].axes, "")]
    return []


@pytest.mark.parametrize("name", FROM_JAX)
def test_what_jax_refuses_is_found(name: str) -> None:
    case = FROM_JAX[name]
    first, *others = world_of(case).run(said, name)
    assert all(other == first for other in others)
    assert any((kind, axes) == (case.kind, case.axes) and path.startswith(case.path) for kind, axes, path in first), (
        first
    )


@pytest.mark.parametrize("name", [name for name, case in FROM_JAX.items() if case.kind != "NotImplementedError"])
def test_when_nobody_checks_ranks_differ_or_the_numbers_are_wrong(name: str) -> None:
    case = FROM_JAX[name]
    ranks = world_of(case).run(numbers, name, check=False)
    differ = any(not torch.equal(a, b) for rank in ranks for a, b in zip(rank, ranks[0], strict=True))
    meant = [torch.as_tensor(leaf) for leaf in optree.tree_leaves(case.reference())]
    assert differ or max(distance(rank, meant, floor=1e-3) for rank in ranks) > 1e-3
