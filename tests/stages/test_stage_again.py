"""A stage's function that runs again, for its gradient: it must return what it returned first."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.compat.norms import WrittenOut
from shardfn.testing import World
from tests.models import distance, everyone, layer, normal, squares, variables
from tests.reference import worst
from tests.refusals import told

D = 4


def rows(rank: int) -> Tensor:
    return normal(3, D, seed=60 + rank)


def first_of(result: Any) -> Tensor:
    """A loss that is the same for all these results."""
    return torch.stack([y.double().sum() for y in optree.tree_leaves(result) if isinstance(y, Tensor)]).sum()


# What the function returns of `x` and `y` in its runs after the first, where it returns `first`.
CHANGES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, Tensor], Any], str]] = {
    "more tensors": (lambda x, y: (y,), lambda x, y: (y, 2 * y), r"first \(float64\[3, 4\],\), then \(float64"),
    "fewer tensors": (lambda x, y: (y, 2 * y), lambda x, y: (y,), "then"),
    "another structure": (lambda x, y: {"a": y}, lambda x, y: [y], r"first \{'a': float64\[3, 4\]\}, then \[float"),
    "a None": (lambda x, y: (y, None), lambda x, y: (y,), "None"),
    "another number": (lambda x, y: (y, 1), lambda x, y: (y, 2), r"first \(float64\[3, 4\], 1\), then .*, 2\)"),
    "another kind of number": (lambda x, y: (y, 1), lambda x, y: (y, 1.0), "then"),
    "another word": (lambda x, y: {"kind": "train", "y": y}, lambda x, y: {"kind": "eval", "y": y}, "'eval'"),
    "another place": (lambda x, y: (y, 1), lambda x, y: (1, y), r"then \(1, float64\[3, 4\]\)"),
    "another order": (lambda x, y: (y, x), lambda x, y: (x, y), r"handed through as tensors \[1\]\), then .* \[0\]"),
    "a tensor twice": (lambda x, y: (y, y), lambda x, y: (y, 2 * y), "then"),
    "another shape": (lambda x, y: y, lambda x, y: y[:1], r"first float64\[3, 4\], then float64\[1, 4\]"),
    "another dtype": (lambda x, y: y, lambda x, y: y.float(), r"first float64\[3, 4\], then float32\[3, 4\]"),
    "other numbers": (lambda x, y: y, lambda x, y: 1.01 * y, r"other numbers: tensor 0 .* float64\[3, 4\], differs by"),
    "one other number": (lambda x, y: (x, y), lambda x, y: (x, y + torch.eye(12)[5].view(3, 4)), "tensor 1 of its res"),
    "nan": (lambda x, y: y, lambda x, y: y + torch.where(torch.arange(12).view(3, 4) == 7, torch.nan, 0.0), "differs"),
    "no gradient": (
        lambda x, y: (y, 2 * y),
        lambda x, y: (y, 2 * y.detach()),
        "output 1 with a gradient, then without",
    ),
    "a gradient": (lambda x, y: (y, y.detach() * 2), lambda x, y: (y, 2 * y), "output 1 without a gradient, then with"),
}
# What may be another each time.
MEASURED: dict[str, Callable[[Any, Tensor], Any]] = {
    "a time": lambda x, y: (y, time.perf_counter()),
    "an object": lambda x, y: (y, object()),
    "the argument": lambda x, y: (y, x.contiguous(), x.to(x.dtype), torch.nn.functional.dropout(x, 0.5, False)),
    "nothing else": lambda x, y: y,
}


class Changing:
    """A stage that returns something else in its second run, and in later ones."""

    def __init__(self, first: Any, then: Any, **options: Any) -> None:
        self.first, self.then, self.runs = first, then, 0
        self.stage = sf.stage(self.run, **options)

    def run(self, p: Any, x: Tensor) -> Any:
        self.runs += 1
        return (self.first if self.runs == 1 else self.then)(x, layer(p, x))


def by_steps(f: Changing, flat: Any, x: Tensor) -> Any:
    return sf.value_and_grad(lambda ps: first_of(f.stage(ps[0], x)))(flat)[1]


def by_backward(f: Changing, flat: Any, x: Tensor) -> Any:
    leaves = variables(flat)
    first_of(f.stage(leaves[0], x)).backward()
    return optree.tree_map(lambda leaf: leaf.grad, leaves)


def by_a_second_backward(f: Changing, flat: Any, x: Tensor) -> Any:
    leaves = variables(flat)
    loss = first_of(f.stage(leaves[0], x))
    loss.backward(retain_graph=True)
    for leaf in optree.tree_leaves(leaves):
        leaf.grad = None
    loss.backward()
    return optree.tree_map(lambda leaf: leaf.grad, leaves)


def by_a_second_derivative(f: Changing, flat: Any, x: Tensor) -> Any:
    """The derivative of the sum of all gradients along ones, which runs what the stage means once more."""
    leaves = variables(flat)
    every = optree.tree_leaves(leaves)
    found = torch.autograd.grad(first_of(f.stage(leaves[0], x)), every, create_graph=True, allow_unused=True)
    torch.stack([g.square().sum() for g in found if g is not None]).sum().backward()
    return None


WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "remat, a step": (by_steps, {"remat": True}),
    "remat, backward": (by_backward, {"remat": True}),
    "remat of some ops": (by_steps, {"remat": [torch.ops.aten.mm.default]}),
    "a second backward": (by_a_second_backward, {}),
    "a second derivative": (by_a_second_derivative, {}),
}


def second_runs() -> dict[str, str]:
    """What each way says of each change, and how far each is off of what nothing has changed in."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat, x = sf.shard(squares(1), mesh, sf.full_shard("shard")), rows(mesh.get_rank())
    want = torch.func.grad(everyone(lambda ps, k: layer(ps[0], rows(k)).sum(), mesh.size()))(squares(1))
    found = {}
    for way, (run, options) in WAYS.items():
        for change, (first, then, _) in CHANGES.items():
            found[f"{way}: {change}"] = told(partial(run, Changing(first, then, **options), flat, x))
        for name, kind in MEASURED.items():
            got = run(Changing(kind, kind, **options), flat, x)
            if got is not None and not distance(sf.unshard(got), want) < 1e-12:
                found[f"{way}: {name}"] = f"off by {distance(sf.unshard(got), want)}"
    return found


@pytest.mark.world(2, "threads")
def test_a_function_that_returns_something_else_in_its_second_run_is_told(world: World) -> None:
    for found in world.run(second_runs):
        assert len(found) == len(WAYS) * len(CHANGES), "what is measured may differ"
        for name, message in found.items():
            way, _, change = name.partition(": ")
            if not WAYS[way][1]:
                continue  # nothing runs again
            if way == "a second derivative" and change in ("no gradient", "a gradient", "a tensor twice"):
                continue  # which nobody can know inside a transform
            if way == "remat of some ops" and "global state that changed between forward" in message:
                continue  # torch's own words, where other operations run
            assert "stage run ('0'): its function ran again" in message, name
            if ("number" in change and "another" not in change) or change == "nan":
                assert "what its first run left in a dict, a list, an attribute" in message, name
            else:
                assert "a counter, a cache or a switch" in message, name
            if way == "remat, a step":
                assert re.search(CHANGES[change][2], message), message


# State that a function's first run makes, and its second finds.


class Box:
    scale = 1.0


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "setdefault": (dict, lambda s: 1.0 + len(s) + 0 * len(s.setdefault("seen", "yes"))),
    "a nested list": (lambda: {"a": [[]]}, lambda s: s["a"][0].append(1) or float(len(s["a"][0]))),
    "an attribute": (Box, lambda s: vars(s).update(scale=1.5 * s.scale) or s.scale),
    "a tensor in place": (lambda: torch.ones(()), lambda s: s.data.mul_(1.5)),
    "an iterator": (lambda: iter(range(1, 99)), next),
    "python's random": (lambda: random.Random(0), lambda s: s.random()),
}


def states() -> dict[str, Any]:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat, x = sf.shard(squares(1), mesh, sf.full_shard("shard")), rows(mesh.get_rank())
    found: dict[str, Any] = {}
    for name, (make, factor) in STATES.items():
        for where in ("closed over", "an argument"):
            state = make()
            if where == "closed over":
                f = sf.stage(lambda p, x, factor=factor, state=state: layer(p, x) * factor(state), remat=True)
                call: Any = f
            elif name == "a tensor in place":
                continue  # torch's own words
            else:
                held = [state]
                g = sf.stage(lambda p, x, holder, factor=factor: layer(p, x) * factor(holder.held[0]), remat=True)
                holder = Holder(held)
                call = partial(g, holder=holder)
            found[f"{name}, {where}"] = told(partial(sf.grad(lambda ps, call=call: call(ps[0], x).sum()), flat))
    return found


class Holder:
    def __init__(self, held: list[Any]) -> None:
        self.held = held


@pytest.mark.world(2, "threads")
def test_state_that_the_first_run_makes_is_not_found_by_the_second(world: World) -> None:
    for found in world.run(states):
        assert len(found) == 2 * len(STATES) - 1
        assert {case: said for case, said in found.items() if "returned other numbers" not in said} == {}


def overwritten() -> float:
    """The result is written into after the stage has returned it; the second run returns what it was before."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat, x = sf.shard(squares(1), mesh, sf.full_shard("shard")), rows(mesh.get_rank())
    stage = sf.stage(layer, remat=True)
    got = sf.grad(lambda ps: stage(ps[0], x).mul_(3).add_(1).sum())(flat)
    want = torch.func.grad(everyone(lambda ps, k: layer(ps[0], rows(k)).mul(3).sum(), mesh.size()))(squares(1))
    return distance(sf.unshard(got), want)


@pytest.mark.world(2, "threads")
def test_a_result_that_is_overwritten_is_compared_as_it_was(world: World) -> None:
    assert worst(world.run(overwritten)) < 1e-12


def written_out() -> float:
    """A forward where norms are elementary operations, and a backward that runs it again where they are torch's."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    (flat,), x = sf.shard([{"w": normal(D, D, seed=1)}], mesh, sf.full_shard("shard")), rows(0)

    def norm(p: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x @ p["w"], (D,)).sin()

    found = []
    for remat in (False, True):
        (leaf,) = variables([flat])
        with WrittenOut():
            loss = sf.stage(norm, remat=remat)(leaf, x).square().sum()
        loss.backward()
        found.append(leaf.values.grad)
    return distance(*found)


@pytest.mark.world(2)
def test_a_second_run_has_the_norms_of_the_first(world: World) -> None:
    assert worst(world.run(written_out)) < 1e-12
