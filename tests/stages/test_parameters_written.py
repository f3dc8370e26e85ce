"""What a function does to the parameters that it is lent: it lasts for that call, or it is an error on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.compat import autograd
from shardfn.testing import World
from tests.models import distance, normal
from tests.reference import worst
from tests.refusals import refused
from tests.stages.setting import on_threads

pytestmark = pytest.mark.usefixtures("threads_on_one_core")

WIDTH = 6
STRATEGIES = {"full_shard": sf.full_shard("shard"), "ddp": sf.ddp("shard")}
OPTIONS: list[dict[str, Any]] = [{}, {"remat": True}]


def whole(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [{"w": normal(WIDTH, WIDTH, seed=k).to(dtype), "b": normal(WIDTH, seed=9 + k).to(dtype)} for k in range(2)]


def rows(rank: int) -> Tensor:
    return normal(3, WIDTH, seed=100 + rank)


def layer(p: Any, x: Tensor) -> Tensor:
    """In the dtype of its parameters; the graph keeps them for backward."""
    y: Tensor = torch.tanh(x.to(p["w"].dtype) @ p["w"] + p["b"]).double()
    return x + y


def loss(f: Any, ps: Any, x: Tensor) -> Tensor:
    for p in (*ps, ps[0]):  # the first one twice
        x = f(p, x)
    return x.square().sum()


def assigned(to: Callable[[Tensor], Tensor]) -> Any:
    def function(p: Any, x: Tensor) -> Tensor:
        for one in p.values():
            one.data = to(one.data)
        return layer(p, x)

    return function


KEPT: dict[int, Tensor] = {}  # by thread: ranks are threads


def keeps(p: Any, x: Tensor) -> Tensor:
    KEPT[threading.get_ident()] = p["w"]
    return layer(p, x)


def named(p: Any, x: Tensor) -> Tensor:
    assert not hasattr(p["w"], "seen")
    p["w"].seen = True
    return layer(p, x)


HONORED: dict[str, tuple[Any, Any]] = {  # the function, and what it computes
    "wider": (assigned(Tensor.double), lambda p, x: layer({k: v.double() for k, v in p.items()}, x)),
    "the same": (assigned(torch.clone), layer),
    "other strides": (assigned(lambda x: x.T.contiguous().T if x.ndim == 2 else x), layer),
    "narrower": (assigned(Tensor.bfloat16), lambda p, x: layer({k: v.bfloat16() for k, v in p.items()}, x)),
    "an attribute": (named, layer),
    "kept": (keeps, layer),
}


def honored(name: str, strategy: str, options: dict[str, Any]) -> list[float]:
    """How far it is off in three steps, and after each how far another stage of these parameters is."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    dtype = torch.float32 if name == "wider" else torch.float64
    ps = sf.shard(whole(dtype), mesh, STRATEGIES[strategy])
    function, meant = HONORED[name]

    def off(f: Any, like: Any) -> float:
        got = sf.grad(lambda ps: loss(f, ps, rows(mesh.get_rank())))(ps)
        want = torch.func.grad(lambda ps: torch.stack([loss(like, ps, rows(k)) for k in range(mesh.size())]).sum())
        return distance(sf.unshard(got), want(whole(dtype)))

    found = []
    for _ in range(3):
        found += [off(sf.stage(function, **options), meant), off(sf.stage(layer), layer)]
        if (kept := KEPT.pop(threading.get_ident(), None)) is not None:
            kept.data = torch.zeros(3)
    return found


@on_threads
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", HONORED)
def test_the_same_numbers_in_another_form_last_for_that_call(
    world: World, name: str, strategy: str, options: dict[str, Any]
) -> None:
    rounding = {"wider": 1e-5}.get(name, 1e-12)  # of float32, in which these parameters are
    for found in world.run(honored, name, strategy, options):
        assert worst(found) < rounding


def zeroed(x: Tensor | None) -> None:
    assert x is not None
    x.zero_()


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "assigned": lambda w: setattr(w, "data", w.data * 2),
    "assigned, transposed": lambda w: setattr(w, "data", w.data.T),
    "in place": lambda w: w.data.mul_(2),
    "in place, permuted": lambda w: w.data.copy_(w.data.flip(0).clone()),
    "by numpy": lambda w: w.detach().numpy().__setitem__((0, 0), 3.0),
    "by dlpack": lambda w: zeroed(autograd.second_storage(w.detach())),
}


def written(name: str, strategy: str, options: dict[str, Any]) -> str:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    ps = sf.shard(whole(torch.float64), mesh, STRATEGIES[strategy])

    def function(p: Any, x: Tensor) -> Tensor:
        WRITES[name](p["w"])
        return layer(p, x)

    gradient = sf.grad(lambda ps: loss(sf.stage(function, **options), ps, rows(mesh.get_rank())))
    return refused(lambda: gradient(ps), RuntimeError)


@on_threads
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WRITES)
def test_other_numbers_are_refused_whatever_the_strategy(
    world: World, name: str, strategy: str, options: dict[str, Any]
) -> None:
    for told in world.run(written, name, strategy, options):
        assert "stage function" in told
        assert "'0.w'" in told or "'1.w'" in told, told


def first_and_second() -> list[int]:
    """The most bytes of one tensor that a stage makes, when it looks at its parameters, and when it does not."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params = sf.shard({"w": torch.ones(1024, 1024, dtype=torch.bfloat16)}, mesh, sf.full_shard("shard"))
    function = sf.stage(lambda p, x: x @ p["w"])
    found: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **kwargs or {})
            if isinstance(made, Tensor) and not made._is_view():
                found[-1] = max(found[-1], made.untyped_storage().nbytes())
            return made

    for _ in range(2):
        found.append(0)
        with Sizes():
            function(params, torch.ones(1, 1024, dtype=torch.bfloat16))
    return found


@pytest.mark.world(1, "alone")
def test_a_look_at_the_parameters_takes_little_memory(world: World) -> None:
    ((first, second),) = world.run(first_and_second)
    assert first <= max(second, 2**19)  # of parameters of 2 MB


def written_one() -> list[str]:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params, x = sf.shard(whole(torch.float64), mesh, sf.full_shard("shard")), rows(0)

    def told(write: Callable[[Any], Any]) -> str:
        f = sf.stage(lambda p, x: (layer(p, x), write(p))[0])
        return refused(lambda: sf.grad(lambda ps: loss(f, ps, x))(params), RuntimeError)

    return [told(lambda p: p["b"].detach().add_(1)), told(lambda p: p["b"].data.numpy().fill(0))]


@pytest.mark.world(2)
def test_the_parameter_that_is_written_into_is_named(world: World) -> None:
    for found in world.run(written_one):
        assert all("its function writes into '0.b'" in text for text in found)
