"""`redistribute` against a model in one process: cut the whole value by each side, and compare the pieces."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jvp, vjp

import shardfn as sf
from shardfn.collectives.redistribute import plan
from shardfn.testing import strategies as draws
from shardfn.testing import world
from tests.reference import worst

AXES = ("a", "b")
SHAPE = (8, 16, 4)


class Side:
    """A placement on a mesh of a x b: the axes that cut each dimension, and those with partial sums."""

    def __init__(self, cuts: tuple[tuple[str, ...], ...], partial: tuple[str, ...] = ()) -> None:
        self.cuts, self.partial = cuts, partial

    def __str__(self) -> str:
        dims = ["/".join((name, *cut)) for name, cut in zip("xyz", self.cuts, strict=False)]
        return " ".join(dims + [f"+{axis}" for axis in self.partial])

    def cut(self, whole: Tensor, at: dict[str, int]) -> Tensor:
        for dim, axes in enumerate(self.cuts):
            for axis in axes:
                whole = whole.chunk(2, dim)[at[axis]]
        return whole

    def varies(self) -> set[str]:
        return {axis for axes in self.cuts for axis in axes} | set(self.partial)


def sides(ndim: int) -> list[Side]:
    """Every placement over two axes: each cuts a dimension, or is still to be added up, or neither."""
    found: dict[str, Side] = {}
    for order in itertools.permutations(AXES):
        for places in itertools.product(["whole", "partial", *range(ndim)], repeat=2):
            where = dict(zip(order, places, strict=True))
            cuts = tuple(tuple(axis for axis in order if where[axis] == dim) for dim in range(ndim))
            side = Side(cuts, tuple(axis for axis in AXES if where[axis] == "partial"))
            found[str(side)] = side
    return list(found.values())


def reachable(before: Side, after: Side) -> bool:
    return set(after.partial) <= set(before.partial)


def terms(whole: Tensor, partial: tuple[str, ...], at: dict[str, int], kept: tuple[str, ...]) -> Tensor:
    """This rank's partial sums of a value, already added up over the axes that are not kept."""
    random = [draws.tensor_of(whole.shape, torch.float64, 50 + i) for i in range(3)]
    grid = torch.stack([*random, whole - sum(random)]).view(2, 2, *whole.shape)
    for dim, axis in enumerate(AXES):
        grid = grid if axis in partial else grid.sum(dim, keepdim=True)
        grid = grid.narrow(dim, at[axis], 1) if axis in kept else grid.sum(dim, keepdim=True)
    return grid[0, 0]


def on_mesh(body: Any, check: bool = True) -> Any:
    mesh = sf.make_mesh(a=2, b=2, device="cpu")
    return sf.shard_map(body, mesh=mesh, in_specs=(), out_specs=..., check=check)()


def moved(before: Side, after: Side) -> tuple[str, str]:
    """`right`, or `refused` with the message, or what is wrong; and the pattern."""
    pattern = f"{before} -> {after}"
    at = {axis: sf.axis_index(axis) for axis in AXES}
    whole = draws.tensor_of(SHAPE[: len(before.cuts)], torch.float64, 1)
    mine = before.cut(terms(whole, before.partial, at, before.partial), at)
    try:
        got = sf.collectives.redistribute(mine, pattern)
    except ValueError as error:
        return f"refused: {error}" if pattern in str(error) else f"unclear: {error}", pattern
    want = after.cut(terms(whole, before.partial, at, after.partial), at)
    right = got.shape == want.shape and torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    return ("right" if right else f"wrong: {tuple(got.shape)} {(got - want).abs().max()}"), pattern


def closes(before: Side, after: Side) -> float:
    """This rank's term of <A t, c> - <t, A^T c>."""
    pattern = f"{before} -> {after}"
    gathered = {axis for step in plan(pattern)[1] if step.op == "all_gather" for axis in step.axes}
    takes, gives = before.varies(), after.varies() | gathered

    def drawn(shape: Any, varies: set[str], seed: int) -> Tensor:
        place = sum((i + 1) * sf.axis_index(axis) for i, axis in enumerate(AXES) if axis in varies)
        return draws.tensor_of(tuple(shape), torch.float64, seed + place)

    def f(x: Tensor) -> Tensor:
        return sf.collectives.redistribute(x, pattern)

    shape = before.cut(torch.empty(SHAPE[: len(before.cuts)]), dict.fromkeys(AXES, 0)).shape
    t = drawn(shape, takes, 100)
    y, pull = vjp(f, t)[:2]
    c = drawn(y.shape, gives, 200)
    pushed = (jvp(f, (t,), (t,))[1] * c).sum().item() / 2 ** (2 - len(gives))
    return pushed - (t * pull(c)[0]).sum().item() / 2 ** (2 - len(takes))


@pytest.mark.parametrize("before", sides(2), ids=str)
def test_every_placement_of_two_axes_becomes_every_other_or_says_why_not(before: Side) -> None:
    targets = [after for after in sides(2) if reachable(before, after)]
    for results in world(4).run(on_mesh, lambda: [moved(before, after) for after in targets]):
        wrong = [(pattern, result) for result, pattern in results if not result.startswith(("right", "refused"))]
        assert wrong == []
        assert all("only the last can be" in result for result, _ in results if result.startswith("refused"))
        assert sum(result == "right" for result, _ in results) >= len(results) / 3


@pytest.mark.parametrize("before", sides(2), ids=str)
def test_the_transpose_of_every_move_pulls_back_what_it_pushes(before: Side) -> None:
    def body() -> list[float]:
        found = []
        for after in sides(2):
            if reachable(before, after) and moved(before, after)[0] == "right":
                found.append(closes(before, after))
        return found

    for parts in zip(*world(4).run(on_mesh, body), strict=True):
        assert abs(sum(parts)) <= 1e-10  # of sums of hundreds of terms


@settings(max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.sampled_from(sides(3)), st.sampled_from(sides(3)))
def test_three_dimensions_too(before: Side, after: Side) -> None:
    if reachable(before, after):
        for result, pattern in world(4).run(on_mesh, lambda: moved(before, after)):
            assert result.startswith(("right", "refused")), (pattern, result)


ROWS = [  # left, right, the same by hand
    ("x/a y", "x y", lambda t: sf.all_gather(t, "a", dim=0)),
    ("x y/b", "x y", lambda t: sf.all_gather(t, "b", dim=1)),
    ("x/a/b y", "x y", lambda t: sf.all_gather(t, ("a", "b"), dim=0)),
    ("x/b/a y", "x y", lambda t: sf.all_gather(t, ("b", "a"), dim=0)),
    ("x/a/b y", "x/a y", lambda t: sf.all_gather(t, "b", dim=0)),
    ("x/a y/b", "x y", lambda t: sf.all_gather(sf.all_gather(t, "a", dim=0), "b", dim=1)),
    ("x y", "x/a y", lambda t: sf.collectives.local_slice(t, "a", dim=0)),
    ("x y", "x y/b/a", lambda t: sf.collectives.local_slice(t, ("b", "a"), dim=1)),
    ("x y", "x/a y/b", lambda t: sf.collectives.local_slice(sf.collectives.local_slice(t, "a", dim=0), "b", dim=1)),
    ("x y +a", "x/a y", lambda t: sf.reduce_scatter(t, "a", dim=0)),
    ("x y +a +b", "x y/a/b", lambda t: sf.reduce_scatter(t, ("a", "b"), dim=1)),
    ("x/a y +b", "x/a/b y", lambda t: sf.reduce_scatter(t, "b", dim=0)),
    ("x y +a", "x y", lambda t: sf.psum(t, "a")),
    ("x y +b +a", "x y", lambda t: sf.psum(t, ("a", "b"))),
    ("x y +a +b", "x y +b", lambda t: sf.psum(t, "a")),
    ("x y +a +b", "x/a y", lambda t: sf.psum(sf.reduce_scatter(t, "a", dim=0), "b")),
    ("x/a y", "x y/a", lambda t: sf.all_to_all(t, "a", split_dim=1, concat_dim=0)),
    ("x/b y/a", "x y/a/b", lambda t: sf.all_to_all(t, "b", split_dim=1, concat_dim=0)),
    ("x/a y", "x/b y", lambda t: sf.collectives.local_slice(sf.all_gather(t, "a", dim=0), "b", dim=0)),
    ("x/a y", "x/a y", lambda t: t),
]


@pytest.mark.parametrize(("left", "right", "by_hand"), ROWS, ids=[f"{row[0]} -> {row[1]}" for row in ROWS])
def test_a_pattern_is_the_collective_that_one_would_write(left: str, right: str, by_hand: Any) -> None:
    def body() -> list[float]:
        place = sum((i + 1) * sf.axis_index(axis) for i, axis in enumerate(AXES) if axis in left)
        x = draws.tensor_of((4, 8), torch.float64, place)

        def loss(f: Any) -> Any:
            return sf.value_and_grad(lambda x: torch.sin(f(x)).sum())(x)

        pairs = [(loss(lambda x: sf.collectives.redistribute(x, f"{left} -> {right}")), loss(by_hand))]
        pairs += [((sf.collectives.redistribute(x, f"{left}->{right}"),), (by_hand(x),))]
        return [(one - two).abs().max().item() for ones, twos in pairs for one, two in zip(ones, twos, strict=True)]

    # Each rank's own loss, of what may be the same on all of them: its derivative is that of their sum.
    for differences in world(4).run(on_mesh, body, False):
        assert worst(differences) <= 1e-12


@pytest.mark.parametrize(
    ("there", "back"),
    [
        ("x/a y -> x y/a", "x y/a -> x/a y"),
        ("x/a y -> x y", "x y -> x/a y"),
        ("x/a/b y -> x y/b/a", "x y/b/a -> x/a/b y"),
        ("x/a y/b -> x y", "x y -> x/a y/b"),
        ("x y/a/b -> x/b y/a", "x/b y/a -> x y/a/b"),
    ],
)
def test_there_and_back_is_the_identity(there: str, back: str) -> None:
    def body() -> bool:
        x = draws.tensor_of((4, 8), torch.float64, sf.axis_index(AXES))
        return sf.collectives.redistribute(sf.collectives.redistribute(x, there), back).equal(x)

    # What was gathered counts as varying, so that cutting it again has another derivative: values alone are compared.
    assert world(4).run(on_mesh, body, False) == [True] * 4


def test_a_tree_is_moved_leaf_by_leaf() -> None:
    def body() -> Any:
        x = torch.ones(2, 4) * (1 + sf.axis_index("a"))
        tree = sf.collectives.redistribute({"w": x, "more": (2 * x, None)}, "x/a y -> x y")
        return tree["w"][:, 0].tolist(), tree["more"][0][:, 0].tolist(), tree["more"][1]

    assert world(4).run(on_mesh, body) == [([1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 4.0, 4.0], None)] * 4


def test_scalars_have_no_dimensions() -> None:
    found = world(4).run(
        on_mesh, lambda: sf.collectives.redistribute(torch.tensor(1.0 + sf.axis_index("a")), "+a -> ").item()
    )
    assert found == [3.0] * 4


def test_spaces_do_not_matter_and_a_pattern_is_read_once() -> None:
    plan.cache_clear()
    steps = {plan(pattern)[1] for pattern in ("x/a y->x y", "  x/a   y  ->  x y ", "x/a y -> x y")}
    assert len(steps) == 1
    before = plan.cache_info()
    assert plan("x/a y -> x y") is plan("x/a y -> x y")
    after = plan.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 2)


UNREADABLE = [
    ("x y", ["one arrow"]),
    ("", ["one arrow"]),
    ("x/a -> x -> x", ["one arrow"]),
    ("x/a => x", ["one arrow"]),
    ("x/a - > x", ["one arrow"]),
    ("x/a, y -> x y", ["cannot read 'x/a,'"]),
    ("(x y)/a -> x y", ["cannot read '(x'"]),
    ("x/ y -> x y", ["cannot read 'x/'"]),
    ("/a y -> x y", ["cannot read '/a'"]),
    ("x//a -> x", ["cannot read 'x//a'"]),
    ("x +a/b -> x", ["cannot read '+a/b'"]),
    ("x + -> x", ["cannot read '+'"]),
    ("x ++a -> x", ["cannot read '++a'"]),
    ("x+a -> x", ["cannot read 'x+a'"]),
    ("1x/a -> 1x", ["cannot read '1x/a'"]),
    ("... x/a -> ... x", ["cannot read '...'"]),
    ("+a x -> x", ["'x'", "after a partial sum"]),
    ("x x/a -> x x", ["dimension 'x' occurs twice"]),
    ("x/a y/a -> x y", ["axis 'a' occurs twice"]),
    ("x/a/a -> x", ["axis 'a' occurs twice"]),
    ("x/a +a -> x", ["axis 'a' occurs twice"]),
    ("x +a +a -> x", ["axis 'a' occurs twice"]),
    ("x/a y -> y x", ["'x y'", "'y x'", "same order"]),
    ("x/a y -> x", ["'x y'", "'x'"]),
    ("x/a -> x z", ["'x'", "'x z'"]),
    ("x -> x +a", ["cannot make a partial sum over a"]),
    ("x/a -> x +a", ["cannot make a partial sum over a"]),
    ("x/a/b -> x/b", ["axis 'a'", "not the last", "several patterns"]),
    ("x/a/b y -> x/b y/a", ["axis 'a'", "several patterns"]),
    ("x/a/b -> x/b/a", ["several patterns"]),
    ("x/a y/b -> x/b y/a", ["several patterns"]),
    ("x/a +b -> x/b/a", ["several patterns"]),
]


@pytest.mark.parametrize(("pattern", "words"), UNREADABLE, ids=[row[0] for row in UNREADABLE])
def test_a_pattern_that_cannot_be_done_is_quoted(pattern: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(pattern))) as caught:
        plan(pattern)
    assert [word for word in words if word not in str(caught.value)] == []
    with pytest.raises(ValueError, match=re.escape(repr(pattern))):
        plan(pattern)  # an error is not remembered as a plan


@pytest.mark.parametrize(
    ("pattern", "shape", "kind", "words"),
    [
        ("x/a -> x", (2, 3), ValueError, ["names 1 dimensions", "(2, 3)"]),
        ("x/a y -> x y", (), ValueError, ["names 2 dimensions", "()"]),
        ("x y -> x/a y", (3, 2), ValueError, ["(3, 2)", "3 does not divide by 2", "pad it to 4"]),
        ("x/a y -> x y/a", (2, 5), ValueError, ["(2, 5)", "5 does not divide by 2", "pad it to 6"]),
        ("x y +a +b -> x y/a/b", (1, 6), ValueError, ["(1, 6)", "6 does not divide by 4", "pad it to 8"]),
        ("x/q -> x", (2,), ValueError, ["unknown axis 'q'", "a=2, b=2"]),
        ("x +q -> x", (2,), ValueError, ["unknown axis 'q'", "a=2, b=2"]),
        ("x/q y/a -> x/q y", (2, 2), ValueError, ["unknown axis 'q'", "a=2, b=2"]),
        ("x/q -> x/q", (2,), ValueError, ["unknown axis 'q'", "a=2, b=2"]),
        ("x +q -> x +q", (2,), ValueError, ["unknown axis 'q'", "a=2, b=2"]),
    ],
)
def test_a_pattern_that_does_not_fit_is_quoted(pattern: str, shape: Any, kind: type[Exception], words: Any) -> None:
    for error in world(4, "threads").errors(on_mesh, lambda: sf.collectives.redistribute(torch.ones(shape), pattern)):
        assert type(error) is kind
        assert [word for word in [repr(pattern), *words] if word not in str(error)] == []


def test_a_number_is_no_tensor_to_redistribute() -> None:
    for error in world(4, "threads").errors(on_mesh, lambda: sf.collectives.redistribute({"n": 3}, "+a -> ")):
        assert type(error) is TypeError
        assert "int" in str(error)


def test_without_a_mesh_a_pattern_means_nothing() -> None:
    with pytest.raises(NameError, match="no mesh in scope"):
        sf.collectives.redistribute(torch.ones(2), "x/a -> x")
