"""Any parameters, any mesh, any order of stages, any options: loss and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import optree
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardfn as sf
from shardfn.shards import layout
from shardfn.testing import strategies as draws
from shardfn.testing import world
from tests.lossless import LOSSLESS
from tests.reference import worst

COMMUNICATING = settings(max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])
D = 3


def mix(p: Any, x: Tensor, *, keep: float = 0.5) -> Tensor:
    """Something of every floating leaf, in whatever tree, nonlinear in the input and the parameters."""
    for i, leaf in enumerate(optree.tree_leaves(p)):
        if leaf.is_floating_point() and leaf.numel():
            y = leaf.reshape(-1).to(x.dtype)
            x = torch.tanh(x * (1 + y.mean()) + keep * torch.sin(y.cumsum(0))[-D:].sum()) + (x if i % 2 else 0)
        elif leaf.numel():
            x = x + leaf.reshape(-1)[0].to(x.dtype)
    return x


def runner(program: Any) -> Any:
    """The program as a function of parameters, over stages or over plain functions."""

    def run(ps: Any, x: Tensor, functions: Any, layers: Any) -> Tensor:
        total = x.sum() * 0
        for kind, numbers in program:
            if kind == "layers":
                for number, p in zip(numbers, layers([ps[number] for number in numbers]), strict=True):
                    x = functions[number](p, x)
            elif kind == "twice":
                x = functions[numbers[0]](ps[numbers[0]], x) + functions[numbers[0]](ps[numbers[0]], x.sin())
            elif kind == "branch":
                total = total + functions[numbers[0]](ps[numbers[0]], x).square().sum()
            else:
                for number in numbers:
                    x = functions[number](ps[number], x)
        return total + x.square().sum()

    return run


def compare(sizes: Any, placement: Any, trees: Any, frozen: Any, options: Any, program: Any, how: str) -> Any:
    mesh = sf.make_mesh(device="cpu", **sizes)
    n, rank = mesh.size(), mesh.get_rank()
    rows = torch.randn(n, 2, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    flat = sf.shard(trees, mesh, sf.Placement(**placement), frozen=frozen)
    functions = [sf.stage(mix, **more) for more in options]
    run = runner(program)

    def loss(ps: Any) -> Tensor:
        return run(ps, rows[rank], functions, sf.layers)

    def joint(ps: Any) -> Tensor:
        return torch.stack([run(ps, rows[k], [mix] * len(trees), iter) for k in range(n)]).sum()

    want = sf.grad(joint)(trees)
    own = run(trees, rows[rank], [mix] * len(trees), iter)
    found = []
    for _ in range(2):
        if how == "backward":
            leaves = optree.tree_map(
                lambda p: sf.FlatShard(p.values.clone().requires_grad_(p.layout.trainable), p.layout),
                flat,
                is_leaf=lambda p: isinstance(p, sf.FlatShard),
            )
            value = loss(leaves)
            if value.requires_grad:
                value.backward()
            gradient = optree.tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, leaves)
        else:
            value, gradient = sf.value_and_grad(loss)(flat)
            gradient = optree.tree_map(
                lambda g, p: sf.FlatShard(torch.zeros_like(p.values), p.layout) if g.values is None else g,
                gradient,
                flat,
                is_leaf=lambda p: isinstance(p, sf.FlatShard),
            )
        found.append((value.detach() - own).abs().item() / (1 + own.abs().item()))
        got = sf.unshard(gradient)
        paths = names_of(got)
        scale = 1 + worst([0.0, *(g.abs().max().item() for g in optree.tree_leaves(want) if g.numel())])
        for path, a, b, p in zip(
            paths, optree.tree_leaves(got), aligned(want, trees), optree.tree_leaves(trees), strict=True
        ):
            if p.is_floating_point() and not any(path == name for name in frozen) and p.numel():
                tolerance = 1e8 if p.dtype == torch.float32 else 1.0
                found.append((a - b).abs().max().item() / scale / tolerance)
    return found


def names_of(tree: Any) -> list[str]:
    return [
        ".".join(str(getattr(entry, "field", entry.entry)) for entry in accessor)
        for accessor in optree.tree_accessors(tree)
    ]


def aligned(gradient: Any, trees: Any) -> list[Any]:
    """One for each parameter, None where it has none."""
    return optree.tree_structure(trees).flatten_up_to(gradient)


@st.composite
def programs(draw: st.DrawFn, stages: int) -> list[Any]:
    numbers = st.lists(st.integers(0, stages - 1), min_size=1, max_size=5)
    return draw(st.lists(st.tuples(st.sampled_from(["layers", "plain", "twice", "branch"]), numbers), max_size=4))


@st.composite
def placements(draw: st.DrawFn, axes: list[str]) -> dict[str, Any]:
    order = draw(st.permutations(axes))
    cut = draw(st.integers(0, len(order)))
    return {"axes": tuple(order[:cut]), "replicas": tuple(order[cut:]), "reshard": draw(st.booleans())}


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "remat": st.sampled_from([True, False, "offload"]),
        "reshard": st.booleans(),
        "prefetch": st.integers(0, 3),
        "gather_format": st.just(LOSSLESS),
        "reduce_format": st.just(LOSSLESS),
    },
)
FLOATS = draws.tensors(draws.shapes(min_size=0, max_size=4), dtype=torch.float64)
MIXED = draws.tensors(
    draws.shapes(min_size=0, max_size=4),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, torch.int64, torch.bool]),
)


def check(data: st.DataObject, leaves: Any, kind: Any, n: int, compared: Any = compare) -> None:
    sizes = data.draw(draws.mesh_sizes(world=n))
    placement = data.draw(placements(list(sizes)))
    trees = data.draw(st.lists(draws.pytrees(leaves, max_leaves=4), min_size=1, max_size=4))
    trees = [tree if optree.tree_leaves(tree) else torch.ones(2, dtype=torch.float64) for tree in trees]
    floating = [
        name for name, leaf in zip(names_of(trees), optree.tree_leaves(trees), strict=True) if leaf.is_floating_point()
    ]
    frozen = data.draw(st.lists(st.sampled_from(floating), max_size=2)) if floating else []
    options = data.draw(st.lists(OPTIONS, min_size=len(trees), max_size=len(trees)))
    program = data.draw(programs(len(trees)))
    how = data.draw(st.sampled_from(["backward", "value_and_grad"]))
    for found in world(n, kind).with_deadline(20).run(compared, sizes, placement, trees, frozen, options, program, how):
        assert worst(found) < 1e-12, found


@COMMUNICATING
@given(data=st.data())
def test_any_program_has_the_loss_and_the_gradients_of_one_process(data: st.DataObject) -> None:
    check(data, FLOATS, "threads", data.draw(st.sampled_from([1, 2, 3, 4])))


@COMMUNICATING
@given(data=st.data())
def test_any_program_with_several_dtypes(data: st.DataObject) -> None:
    check(data, MIXED, "threads", data.draw(st.sampled_from([2, 4])))


@settings(COMMUNICATING, max_examples=25)
@given(data=st.data())
def test_any_program_on_processes(data: st.DataObject) -> None:
    check(data, MIXED, "processes", 2)


def compare_one_by_one(*args: Any) -> Any:
    """With gradients sent as those of large parameters are, each from where it is."""
    before, layout.COARSE = layout.COARSE, 0
    try:
        return compare(*args)
    finally:
        layout.COARSE = before


@settings(COMMUNICATING, max_examples=25)
@given(data=st.data())
def test_any_program_with_parameters_that_move_one_by_one(data: st.DataObject) -> None:
    check(data, MIXED, "processes", data.draw(st.sampled_from([2, 4])), compare_one_by_one)
