"""Forward and backward in other orders, in parts, again, and while parameters change."""

from __future__ import annotations

from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.testing import World
from tests.models import block, distance, embed, everyone, gradients, head, params, plainly, variables
from tests.reference import worst
from tests.stages.setting import OPTIONS, Setting, apart, everywhere, loops, on_threads, rows_of, straight, tokens_of

pytestmark = pytest.mark.usefixtures("threads_on_one_core")


def two_forwards(order: tuple[int, ...], options: dict[str, Any]) -> Any:
    s = Setting(**options)
    losses = [straight(s.stage, s.leaves, s.rank + k) for k in range(len(order))]
    found: dict[Any, float] = {}
    for k in order:
        losses[k].backward()
        found[k] = distance(s.collected(), s.want(straight, k))
    found["clean"] = s.clean_step()
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_threads
def test_forwards_before_backwards_in_any_order(world: World, order: Any, options: Any) -> None:
    for found in world.run(two_forwards, order, options):
        assert worst(found.values()) < 1e-12, found


def interleaved() -> Any:
    s = Setting()
    first = straight(s.stage, s.leaves, s.rank)
    second = straight(s.stage, s.leaves, s.rank + 1)
    second.backward()
    third = straight(s.stage, s.leaves, s.rank + 2)
    first.backward()
    with torch.no_grad():
        straight(s.stage, s.leaves, s.rank + 3)
    third.backward()
    return distance(s.collected(), s.want(straight, 0, 1, 2))


@everywhere
def test_forwards_and_backwards_interleave(world: World) -> None:
    assert worst(world.run(interleaved)) < 1e-12


def half_backward() -> Any:
    """Backward of a part of the calls, and of the rest later."""
    s = Setting()
    ps, stage = s.leaves, s.stage
    x = stage(embed)(ps["embed"], tokens_of(s.rank))
    cut = stage(block)(ps["blocks"][0], x)
    middle = cut.detach().requires_grad_()
    y = middle
    for p in sf.layers(ps["blocks"][1:]):
        y = stage(block)(p, y)
    stage(head)(ps["head"], y).square().sum().backward()
    again = straight(stage, s.leaves, s.rank + 1)
    cut.backward(middle.grad)
    again.backward()
    return distance(s.collected(), s.want(straight, 0, 1))


@everywhere
def test_a_backward_in_pieces(world: World) -> None:
    assert worst(world.run(half_backward)) < 1e-12


def forward_alone(context: str, options: dict[str, Any]) -> Any:
    s = Setting(**options)
    own = straight(plainly, s.plain, s.rank)
    contexts: dict[str, Any] = {"nothing": torch.enable_grad, "no_grad": torch.no_grad}
    found = []
    for leaves in (s.flat, s.leaves):
        for _ in range(2):
            with contexts.get(context, torch.inference_mode)():
                loss = straight(s.stage, leaves, s.rank)
                assert loss.is_inference() == (context == "inference_mode")
                assert loss.requires_grad == (context == "nothing" and leaves is s.leaves)
                found.append((loss - own).abs().item())
            del loss
        found.append(s.clean_step())
    return worst(found)


@pytest.mark.parametrize("context", ["nothing", "no_grad", "inference_mode"])
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@on_threads
def test_a_forward_without_backward_disturbs_nothing(world: World, context: str, options: Any) -> None:
    assert worst(world.run(forward_alone, context, options)) < 1e-12


def made_in_inference_mode() -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    plain = params()
    with torch.inference_mode():
        flat = sf.shard(plain, mesh, sf.full_shard("shard"))
        losses = [straight(sf.stage, flat, mesh.get_rank()) for _ in range(2)]
        for leaf in optree.tree_leaves(flat):
            leaf.mul_(2)
        losses.append(straight(sf.stage, flat, mesh.get_rank()))
    twice = straight(plainly, optree.tree_map(lambda x: 2 * x, plain), mesh.get_rank())
    own = straight(plainly, plain, mesh.get_rank())
    return [(a - b).abs().item() for a, b in zip(losses, [own, own, twice], strict=True)]


@everywhere
def test_shards_made_in_inference_mode(world: World) -> None:
    assert worst(one for found in world.run(made_in_inference_mode) for one in found) < 1e-12


def parameters_change(options: dict[str, Any], how: str) -> Any:
    """Steps of gradient descent; the shards are written in place, or are other tensors each time."""
    s = Setting(**options)
    leaves, plain = s.flat, s.plain
    found = []
    for _ in range(4):
        _, gradient = sf.value_and_grad(lambda ps: straight(s.stage, ps, s.rank))(leaves)
        want = torch.func.grad(everyone(lambda ps, k: straight(plainly, ps, k), s.n))(plain)
        found.append(distance(sf.unshard(gradient), want))
        plain = optree.tree_map(lambda p, g: p - 0.01 * g, plain, want)
        if how == "in place":
            optree.tree_map_(lambda p, g: p.sub_(0.01 * g), leaves, gradient)
        elif how == "through data":
            optree.tree_map_(lambda p, g: p.data.copy_(p - 0.01 * g), leaves, gradient)
        else:
            leaves = optree.tree_map(lambda p, g: p - 0.01 * g, leaves, gradient)
    with torch.no_grad():
        found.append((straight(s.stage, leaves, s.rank) - straight(plainly, plain, s.rank)).abs().item())
    return worst(found)


@pytest.mark.parametrize("how", ["in place", "through data", "out of place"])
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@on_threads
def test_parameters_that_change_between_steps_are_gathered_anew(world: World, how: str, options: Any) -> None:
    assert worst(world.run(parameters_change, options, how)) < 1e-11


def changed_between_forwards() -> Any:
    s = Setting()
    found = []
    with torch.no_grad():
        for k in range(3):
            factor = 1.0 + k
            flat = optree.tree_map(lambda x: x * factor, s.flat)  # noqa: B023
            plain = optree.tree_map(lambda x: x * factor, s.plain)  # noqa: B023
            found.append((straight(s.stage, flat, s.rank) - straight(plainly, plain, s.rank)).abs().item())
            optree.tree_map_(lambda x: x.neg_(), flat)
            negative = optree.tree_map(lambda x: -x, plain)
            found.append((straight(s.stage, flat, s.rank) - straight(plainly, negative, s.rank)).abs().item())
            del flat
    return worst(found)


@everywhere
def test_forwards_see_the_parameters_of_the_moment(world: World) -> None:
    assert worst(world.run(changed_between_forwards)) < 1e-12


def retained(options: dict[str, Any]) -> Any:
    s = Setting(**options)
    loss = straight(s.stage, s.leaves, s.rank)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    other = loops(s.stage, s.leaves, s.rank)
    loss.backward()
    other.backward()
    once = s.want(straight)
    also = s.want(loops)
    return distance(s.collected(), optree.tree_map(lambda a, b: 3 * a + b, once, also))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_threads
def test_a_retained_graph_goes_backward_again(world: World, options: Any) -> None:
    assert worst(world.run(retained, options)) < 1e-11


def implicit(f: Any, x: Tensor) -> Tensor:
    """A fixed point of `f`, whose gradient a hook finds by passes of its own, as deep equilibrium models do."""
    with torch.no_grad():
        z = f(f(x))
    z = f(z)
    start = z.detach().requires_grad_()
    again = f(start)

    def solved(gradient: Tensor) -> Tensor:
        y = gradient
        for _ in range(3):
            y = gradient + torch.autograd.grad(again, start, y, retain_graph=True)[0] / 4
        return y

    z.register_hook(solved)
    return z


def passes_inside(options: dict[str, Any]) -> Any:
    s, x = Setting(1, **options), rows_of(sf.make_mesh(shard=-1, device="cpu").get_rank())

    def loss(stage: Any, ps: Any, x: Tensor) -> Tensor:
        return implicit(partial(stage(block), ps["blocks"][0]), x).square().sum()

    whole = variables(s.plain)
    torch.stack([loss(plainly, whole, rows_of(rank)) for rank in range(s.n)]).sum().backward()
    loss(s.stage, s.leaves, x).backward()
    ways = {
        "backward": s.left(),
        "value_and_grad": sf.value_and_grad(lambda ps: loss(s.stage, ps, x))(s.flat)[1],
        "accumulate": sf.accumulate(lambda ps, x: loss(s.stage, ps, x), x.split(1))(s.flat)[1],
    }
    return worst(apart(ways, gradients(whole)).values())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_threads
def test_a_step_collects_nothing_of_passes_that_hooks_start_inside_of_its_own(
    world: World, options: dict[str, Any]
) -> None:
    assert worst(world.run(passes_inside, options)) < 1e-12


def freed_graph() -> Any:
    s = Setting()
    loss = straight(s.stage, s.leaves, s.rank)
    loss.backward()
    loss.backward()


@on_threads
def test_a_graph_that_is_gone_says_so_as_torch_does(world: World) -> None:
    for error in world.errors(freed_graph):
        assert "retain_graph" in str(error)


def some_gradients(options: dict[str, Any]) -> Any:
    """Only those asked for: of one layer, of the input, of a layer twice."""
    s = Setting(**options)
    x = rows_of(s.rank).requires_grad_()

    def net(stage: Any, blocks: Any, x: Tensor) -> Tensor:
        for p in sf.layers(blocks):
            x = stage(block)(p, x)
        return x.square().sum()

    loss = net(s.stage, s.leaves["blocks"], x)
    chosen = s.leaves["blocks"][2]
    g, gx = torch.autograd.grad(loss, [chosen.values, x])

    def joint(p: Any) -> Tensor:
        blocks = [*s.plain["blocks"][:2], p, *s.plain["blocks"][3:]]
        return torch.stack([net(plainly, blocks, rows_of(k)) for k in range(s.n)]).sum()

    want = torch.func.grad(joint)(s.plain["blocks"][2])
    wanted = torch.func.grad(lambda x: net(plainly, s.plain["blocks"], x))(x.detach())
    only = torch.func.grad(lambda x: net(s.stage, s.flat["blocks"], x))(x.detach())
    own = sf.grad(lambda ps, x: net(s.stage, ps, x), argnums=1)(s.flat["blocks"], x.detach())
    return worst(
        [
            distance(sf.unshard(sf.shards.FlatShard(g, chosen.layout)), want),
            *(distance(one, wanted) for one in (gx, only, own)),
        ]
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_threads
def test_only_the_gradients_that_are_asked_for(world: World, options: Any) -> None:
    assert worst(world.run(some_gradients, options)) < 1e-12


def one_leaf_of_many() -> Any:
    """Only some leaves need gradients; the other shards are data."""
    s = Setting()
    mixed = {**s.flat, "head": s.leaves["head"], "blocks": [s.leaves["blocks"][0], *s.flat["blocks"][1:]]}
    with sf.collectives.ledger() as log:
        straight(s.stage, mixed, s.rank).backward()
    want = s.want(straight)
    blank = optree.tree_map(torch.zeros_like, want)
    want = {**blank, "head": want["head"], "blocks": [want["blocks"][0], *blank["blocks"][1:]]}
    return distance(s.collected(), want), log.count(op="reduce_scatter")


@everywhere
def test_shards_that_need_no_gradient_send_none(world: World) -> None:
    for off, scattered in world.run(one_leaf_of_many):
        assert off < 1e-12
        assert scattered == 2
