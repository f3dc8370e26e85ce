"""What a stage refuses, and that the step after an error is clean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import World
from tests.models import ENGINES, WIDTH, block, embed, head, params
from tests.random_programs import Fragile, Interrupted
from tests.reference import worst
from tests.stages.setting import Setting, on_threads, rows_of, tokens_of

pytestmark = pytest.mark.usefixtures("threads_on_one_core")

# --- exceptions ---


def interrupted(where: str, options: dict[str, Any]) -> Any:
    s = Setting(**options)

    def failing(p: Any, x: Tensor) -> Tensor:
        y = block(p, x)
        if where == "in a stage" or (where == "when recomputed" and count["calls"]):
            raise Interrupted
        count["calls"] += 1
        return Fragile.apply(y) if where == "in backward" else y

    count = {"calls": 0}
    bad = sf.stage(failing, **options)

    def program(ps: Any) -> Tensor:
        x = s.stage(embed)(ps["embed"], tokens_of(s.rank))
        for i, p in enumerate(sf.layers(ps["blocks"])):
            if i == 2 and where == "between stages":
                raise Interrupted
            x = (bad if i == 2 else s.stage(block))(p, x)
        return s.stage(head)(ps["head"], x).square().sum()

    found = []
    for engine in ENGINES:
        for _ in range(2):
            count["calls"] = 0
            try:
                engine(program, s.flat)
            except Interrupted:
                found.append(s.clean_step())
    return found


@pytest.mark.world(2)
@pytest.mark.parametrize("where", ["in a stage", "between stages", "in backward"])
def test_after_an_exception_the_next_step_is_clean_on_processes(world: World, where: str) -> None:
    for found in world.run(interrupted, where, {}):
        assert worst(found) < 1e-12


# --- refusals ---

CONSTANTS: dict[str, Callable[[Any], Tensor]] = {
    "computed": lambda p: torch.arange(WIDTH).double() * 2,
    "detached": lambda p: optree.tree_leaves(p)[0].detach().new_ones(WIDTH) * 3,
    "made without gradients": torch.no_grad()(lambda p: torch.ones(WIDTH).double().sin()),
    "written to": lambda p: torch.zeros(WIDTH).double().add_(1.5),
}


def constants(options: dict[str, Any]) -> list[float]:
    """A stage closes over numbers that the loss computed inside the transform."""
    s = Setting(**options)
    p, x, off = s.flat["blocks"][0], rows_of(0), []
    plain = {name: value.clone() for name, value in s.plain["blocks"][0].items()}
    for made in CONSTANTS.values():

        def loss(p: Any, stage: Any = sf.stage, made: Any = made) -> Tensor:
            c = made(p)
            return stage(lambda p, x: block(p, x) * c)(p, x).square().sum()

        got = sf.unshard(torch.func.grad(loss)(p))
        want = torch.func.grad(lambda p, loss=loss: s.n * loss(p, lambda f: f))(plain)
        off.append(worst((got[name] - want[name]).abs().max().item() for name in plain))
    return off


@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@on_threads
def test_a_constant_of_a_transform_may_be_closed_over(world: World, options: Any) -> None:
    for off in world.run(constants, options):
        assert worst(off) < 1e-12


def misuse(how: str) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    plain = params()
    flat = sf.shard(plain, mesh, sf.full_shard("shard"), frozen=["blocks.0.w"])
    f, x = sf.stage(block), rows_of(0)
    p = flat["blocks"][1]
    match how:
        case "shape":
            return f(sf.shards.FlatShard(p.values[:-1], p.layout), x)
        case "stack":
            return f(sf.shards.FlatShard(torch.stack([p.values] * 2), p.layout), x)
        case "no tensor":
            return f(sf.shards.FlatShard(3, p.layout), x)  # type: ignore[arg-type]
        case "one of two":
            return f(next(iter(flat["blocks"][0].values())), x)
        case "another mesh":
            other = sf.make_mesh(data=-1, device="cpu")
            q = sf.shard(plain, other, sf.full_shard("data"))["blocks"][0]
            return sf.stage(lambda p, q, x: block(q, block(p, x)))(p, q, x)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("shape", ValueError, "blocks.1.*holds shape.*but its piece is"),
        ("stack", ValueError, "torch.func.vmap"),
        ("no tensor", TypeError, "blocks.1.*holds int, not a tensor"),
        ("one of two", ValueError, "blocks.0.* alone: pass all"),
        ("another mesh", ValueError, "different meshes.*blocks.1.*blocks.0"),
    ],
)
@on_threads
def test_arguments_that_make_no_sense_are_refused(world: World, how: str, kind: type, message: str) -> None:
    for error in world.errors(misuse, how):
        with pytest.raises(kind, match=message):
            raise error or AssertionError("nothing")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"remat": "everything"}, TypeError),
        ({"remat": None}, TypeError),
        ({"remat": []}, TypeError),
        ({"remat": 1}, TypeError),
        ({"prefetch": -1}, ValueError),
        ({"prefetch": 1.5}, ValueError),
        ({"prefetch": True}, ValueError),
        ({"gather_dtype": torch.int32}, TypeError),
        ({"reduce_dtype": "bfloat16"}, TypeError),
        ({"input_dtype": 16}, TypeError),
        ({"output_dtype": torch.bool}, TypeError),
        ({"gather_dtype": torch.float8_e4m3fn}, ValueError),
        ({"reduce_dtype": torch.float8_e5m2}, ValueError),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: Any, kind: type) -> None:
    with pytest.raises(kind, match=next(iter(options))):
        sf.stage(block, **options)


# --- at the end, since after it a world of processes starts anew ---


def other_stages(how: str) -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    first = mesh.get_rank() == 0
    flat = sf.shard(params(), mesh, sf.ddp("shard") if how == "nothing is gathered" else sf.full_shard("shard"))
    blocks, x = flat["blocks"], rows_of(0)
    if how in ("known", "native"):  # both have run before
        sf.stage(block)(blocks[0], x)
        sf.stage(block)(blocks[1], x)
    if how == "native":
        with sf.collectives.transports(mesh, all_gather="native"):
            return sf.stage(block)(blocks[0 if first else 1], x)
    if how == "another size":
        return (sf.stage(block)(blocks[0], x) if first else sf.stage(head)(flat["head"], x)).sum()
    if how == "another dtype":
        return sf.stage(block, gather_dtype=torch.bfloat16 if first else torch.float16)(blocks[0], x)
    if how == "another function":
        return (sf.stage(block) if first else sf.stage(lambda p, x: x - block(p, x)))(blocks[0], x)
    return sf.stage(block)(blocks[0 if first else 1], x)


@pytest.mark.world(2)
def test_ranks_that_run_different_stages_are_told(world: World) -> None:
    found = [error for error in world.errors(other_stages, "known") if error is not None]
    assert found
    assert all("same way on every rank" in str(error) for error in found)


@pytest.mark.world(2, "processes")
def test_what_comes_with_the_parameters_of_another_stage_tells(world: World) -> None:
    found = [error for error in world.errors(other_stages, "native") if error is not None]
    assert found
    assert all("it gathers for" in str(error) for error in found)


@pytest.mark.parametrize("how", ["another", "another size", "another dtype", "another function", "nothing is gathered"])
@pytest.mark.world(2)
def test_stages_that_are_new_are_compared_before_anything_moves(world: World, how: str) -> None:
    for error in world.errors(other_stages, how):
        assert isinstance(error, ValueError)
        assert re.search("the stages differ between ranks: rank 0 has .*; rank 1 has .*same way on every", str(error))
