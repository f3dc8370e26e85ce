"""What a stage refuses, and that the step after an error is clean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.testing import World, WorldError
from tests.models import ENGINES, WIDTH, block, distance, embed, head, params
from tests.random_programs import Fragile, Interrupted
from tests.reference import worst
from tests.refusals import told
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


@pytest.mark.parametrize("where", ["in a stage", "between stages", "in backward", "when recomputed"])
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"reshard": False}, {"prefetch": 2}], ids=str)
@on_threads
def test_after_an_exception_the_next_step_is_clean(world: World, where: str, options: Any) -> None:
    if where == "when recomputed" and not options.get("remat"):
        options = {**options, "remat": True}
    for found in world.run(interrupted, where, options):
        assert len(found) == 2 * len(ENGINES)
        assert worst(found) < 1e-12


@pytest.mark.world(2)
@pytest.mark.parametrize("where", ["in a stage", "between stages", "in backward"])
def test_after_an_exception_the_next_step_is_clean_on_processes(world: World, where: str) -> None:
    for found in world.run(interrupted, where, {}):
        assert worst(found) < 1e-12


# --- refusals ---

W = torch.ones(WIDTH, 5, dtype=torch.float64)


def outer_stage(p: Any, x: Tensor) -> Tensor:
    return sf.stage(block)(p, x)


def writing(p: Any, x: Tensor) -> Tensor:
    p["b"].add_(1)
    return x @ p["w"]


def writing_under_no_grad(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        p["b"].add_(1)
    return x @ p["w"]


REFUSED: dict[str, tuple[Any, str]] = {
    "the parameter": (lambda p, x: p["w"], "returns a parameter, or a view of one"),
    "a view": (lambda p, x: (x, {"y": p["w"].T[0]}), "returns a parameter, or a view of one"),
    "an expanded view": (lambda p, x: p["b"].expand(3, 5), "returns a parameter, or a view of one"),
    "a detached view": (lambda p, x: (x * 1, p["b"].detach()), "returns a parameter, or a view of one"),
    "a write": (writing, "writes into its parameters"),
    "a write under no_grad": (writing_under_no_grad, "writes into its parameters"),
    "an out argument": (
        lambda p, x: torch.add(x[:1, :1], torch.ones(5), out=p["b"].detach()[None]),
        "writes into its parameters",
    ),
}


def refused(name: str, needs: bool, options: dict[str, Any]) -> Any:
    s = Setting(**options)
    p = (s.leaves if needs else s.flat)["blocks"][0]
    f = REFUSED[name][0]
    return told(lambda: sf.stage(f, **options)(p, rows_of(s.rank))), s.clean_step()


@pytest.mark.parametrize("needs", [True, False], ids=["leaves", "values"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@pytest.mark.parametrize("world", [(1, "threads"), (2, "threads")], indirect=True, ids=["1", "2"])
def test_what_a_stage_must_not_do_is_refused(world: World, name: str, needs: bool, options: Any) -> None:
    for message, off in world.run(refused, name, needs, options):
        assert REFUSED[name][1] in message
        assert "blocks.0" in message
        # On one rank the shard is the parameters, and what was written stays.
        assert off < 1e-12 or (world.size == 1 and "writes" in message)


def nested_stage() -> Any:
    s = Setting()
    found = []
    for p in (s.flat["blocks"][0], s.leaves["blocks"][0]):
        for f in (outer_stage, lambda p, x, q=s.flat["blocks"][1]: sf.stage(block)(q, block(p, x))):
            try:
                sf.stage(f)(p, rows_of(s.rank))
            except RuntimeError as error:
                found.append(str(error))
    # the stage inside meets whole parameters in the first case: it is a plain function there
    return found, s.clean_step()


@on_threads
def test_a_stage_inside_a_stage_is_refused(world: World) -> None:
    for messages, off in world.run(nested_stage):
        assert len(messages) == 2
        assert all("inside stage" in message for message in messages)
        assert off < 1e-12


def reentrant_inside(how: str, options: dict[str, Any]) -> Any:
    s = Setting(**options)
    again = sf.stage(lambda p, x: checkpoint(lambda x: block(p, x), x, use_reentrant=True), **options)
    x = rows_of(s.rank).requires_grad_()
    if how == "backward":
        again(s.leaves["blocks"][0], x).sum().backward()
    else:
        sf.value_and_grad(lambda p: again(p, s.stage(block)(p, x)).sum())(s.flat["blocks"][0])


@pytest.mark.parametrize("how", ["backward", "value_and_grad"])
@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
def test_a_reentrant_checkpoint_in_a_stage_is_refused_by_the_stages_name(world: World, how: str, options: Any) -> None:
    with pytest.raises(WorldError, match=r"uses torch.utils.checkpoint with use_reentrant=True.* pass remat=True"):
        world.run(reentrant_inside, how, options)


CLOSED_OVER = [
    "a leaf", "an activation", "returned", "torch.func", "nothing else needs one", "value_and_grad",
    "an outer gradient",
]  # fmt: skip


def closing_over(how: str, options: dict[str, Any]) -> Any:
    s = Setting(**options)
    p, flat, x, one = s.leaves["blocks"][0], s.flat["blocks"][0], rows_of(s.rank), torch.ones((), dtype=torch.float64)
    leaf = one.clone().requires_grad_()

    def of(scale: Tensor, p: Any = flat) -> Tensor:
        return sf.stage(lambda p, x: block(p, x) * scale, **options)(p, x).sum()

    def outer(scale: Tensor) -> Tensor:
        def inner(p: Any) -> Tensor:
            return of(torch.tensor(2.0) * scale, p)  # a constant here, and not outside

        return optree.tree_leaves(torch.func.grad(inner)(flat))[0].sum()

    ways: dict[str, Callable[[], Any]] = {
        "a leaf": lambda: of(leaf, p).backward(),
        "an activation": lambda: of(sf.stage(block)(p, x), p).backward(),
        "returned": lambda: sf.stage(lambda p, x: (block(p, x), leaf), **options)(p, x)[0].sum().backward(),
        "torch.func": lambda: torch.func.grad(of)(one),
        "nothing else needs one": lambda: of(leaf),
        "value_and_grad": lambda: sf.grad(of)(one),
        "an outer gradient": lambda: torch.func.grad(outer)(one),
    }
    ways[how]()


@pytest.mark.parametrize("how", [*CLOSED_OVER])
@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
@on_threads
def test_a_tensor_closed_over_that_needs_a_gradient_is_refused(world: World, how: str, options: Any) -> None:
    for error in world.errors(closing_over, how, options):
        assert "not among its arguments" in str(error)


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
            return f(sf.FlatShard(p.values[:-1], p.layout), x)
        case "stack":
            return f(sf.FlatShard(torch.stack([p.values] * 2), p.layout), x)
        case "no tensor":
            return f(sf.FlatShard(3, p.layout), x)  # type: ignore[arg-type]
        case "one of two":
            return f(next(iter(flat["blocks"][0].values())), x)
        case "another mesh":
            other = sf.make_mesh(data=-1, device="cpu")
            q = sf.shard(plain, other, sf.full_shard("data"))["blocks"][0]
            return sf.stage(lambda p, q, x: block(q, block(p, x)))(p, q, x)
        case "sparse input":
            return f(p, x.to_sparse())
        case "sparse output":
            return sf.stage(lambda p, x: (x, (x @ p["w"]).to_sparse()))(p, x)
    raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("shape", ValueError, "blocks.1.*holds shape.*but its piece is"),
        ("stack", ValueError, "torch.func.vmap"),
        ("no tensor", TypeError, "blocks.1.*holds int, not a tensor"),
        ("one of two", ValueError, "blocks.0.*came alone"),
        ("another mesh", ValueError, "different meshes.*blocks.1.*blocks.0"),
        ("sparse input", TypeError, r"blocks.1.*shape \(3, 4\).*sparse.*to_dense"),
        ("sparse output", TypeError, "blocks.1.*returns a sparse tensor.*output.*to_dense"),
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
    if how == "known":  # both have run before
        sf.stage(block)(blocks[0], x)
        sf.stage(block)(blocks[1], x)
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


@pytest.mark.parametrize("how", ["another", "another size", "another dtype", "another function", "nothing is gathered"])
@pytest.mark.world(2)
def test_stages_that_are_new_are_compared_before_anything_moves(world: World, how: str) -> None:
    for error in world.errors(other_stages, how):
        assert isinstance(error, ValueError)
        assert re.search("the stages differ between ranks: rank 0 has .*; rank 1 has .*same way on every", str(error))


def energy(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"] + p["b"]).pow(2).sum()


def forces_by_a_leaf(p: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad(energy(p, y), y, create_graph=True)[0]


def forces_by_torch_func(p: Any, x: Tensor) -> Tensor:
    return torch.func.grad(energy, argnums=1)(p, x)


def forces_by_the_argument(p: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad(energy(p, x), x, create_graph=True)[0]


def forces() -> Any:
    s = Setting()
    p, x = s.flat["blocks"][0], rows_of(s.rank)[..., :WIDTH].clone()
    losses: dict[Any, Any] = {
        f: (lambda p, f=f: sf.stage(f)(p, x.clone().requires_grad_(f is forces_by_the_argument)).square().sum())
        for f in (forces_by_torch_func, forces_by_the_argument)
    }
    found = [sf.unshard(sf.grad(loss)(p)) for loss in losses.values()]
    return told(lambda: sf.grad(lambda p: sf.stage(forces_by_a_leaf)(p, x).square().sum())(p)), found, x


@pytest.mark.parametrize("world", [(2, "threads")], indirect=True, ids=["2"])
def test_a_leaf_that_a_stage_makes_is_refused_with_what_to_write(world: World) -> None:
    results = world.run(forces)
    whole = params()["blocks"][0]
    rows = torch.cat([x for _, _, x in results])
    want = torch.func.grad(lambda p: forces_by_torch_func(p, rows).square().sum())(whole)
    for message, found, _ in results:
        assert "If the function makes it, as y = x.detach().requires_grad_()" in message
        assert "torch.func.grad inside the stage, or call the stage with an x that requires a gradient" in message
        for gradient in found:
            assert distance(gradient, want) < 1e-12
