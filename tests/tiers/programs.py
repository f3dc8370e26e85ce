"""Programs that train, differentiate, or change parameters in some way, to be run in memory and on tiers.

Each takes a mesh and a strategy and returns a tree of whole tensors and numbers. What it computes must not depend on
where the strategy keeps anything.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P, quant
from shardfn.shards.layout import is_flat
from tests.models import DATA, block, blocks, embed, head, normal, params, squares, token_rows
from tests.optim.test_optim import OPTIMIZERS as OF_OPTIM

Program = Callable[[Any, Any], Any]
PROGRAMS: dict[str, Program] = {}
LARGER = 24  # of the two widths: its shards are some blocks of a file


def program(f: Program) -> Program:
    PROGRAMS[f.__name__.replace("_", " ")] = f
    return f


def rank_of(mesh: Any) -> int:
    return int(mesh.mesh.flatten().tolist().index(torch.distributed.get_rank()))


def rows(mesh: Any, seed: int = 0, n: int = 2) -> Tensor:
    """This rank's tokens."""
    size = mesh.mesh.numel()
    at = rank_of(mesh)
    return token_rows(n * size + 10 * seed)[n * at : n * (at + 1)]


def loss_of(**options: Any) -> Callable[..., Tensor]:
    """Of the model `straight`."""
    first, last = sf.stage(embed), sf.stage(head, reshard=False)
    middle = sf.stage(block, **options)

    def loss(ps: Any, tokens: Tensor) -> Tensor:
        x = first(ps["embed"], tokens)
        for p in sf.layers(ps["blocks"]):
            x = middle(p, x)
        return last(ps["head"], x).square().sum()

    return loss


def placed(mesh: Any, strategy: Any, depth: int = 3, width: int = LARGER, **more: Any) -> Any:
    return sf.shard(params(depth, width), mesh, strategy, **more)


def trained(
    mesh: Any,
    strategy: Any,
    optimizer: so.Optimizer | None = None,
    steps: int = 3,
    options: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> Any:
    """Losses and parameters after some steps."""
    optimizer = so.adamw(1e-2, weight_decay=0.1) if optimizer is None else optimizer
    ps, loss, losses = placed(mesh, strategy, **(more or {})), loss_of(**(options or {})), []
    state = optimizer.init(ps)
    for number in range(steps):
        value, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
        ps, state = optimizer.step(ps, grads, state)
        losses.append(value)
    return losses, sf.unshard(ps)


def twice_stepped(ps: Any, loss: Callable[[Any], Tensor], optimizer: so.Optimizer) -> Any:
    """Parameters after two steps."""
    state = optimizer.init(ps)
    for _ in range(2):
        _, grads = sf.value_and_grad(loss)(ps)
        ps, state = optimizer.step(ps, grads, state)
    return ps


# --- optimizers ---


OPTIMIZERS = {
    name: OF_OPTIM[name]
    for name in (
        "sgd", "sgd-nesterov", "adam", "adamw-masked", "lion", "adamw8bit", "lion8bit", "adamw in bfloat16", "master",
        "rounded", "adafactor", "lamb", "muon", "rmsprop of torch", "everything",
    )
}  # fmt: skip


def stepped(mesh: Any, strategy: Any, make: Callable[[], so.Optimizer]) -> Any:
    """Trained by an optimizer that is made for it."""
    return trained(mesh, strategy, make())


for _name, _make in OPTIMIZERS.items():
    PROGRAMS[_name] = partial(stepped, make=partial(_make, donate=True))
    PROGRAMS[f"{_name}, not donated"] = partial(stepped, make=partial(_make, donate=False))


# --- options of stages ---

OPTIONS: dict[str, dict[str, Any]] = {
    "remat": {"remat": True},
    "kept for the step": {"reshard": "step"},
    "kept": {"reshard": False},
    "no prefetch": {"prefetch": 0},
    "prefetch of three": {"prefetch": 3},
    "gathered in float32": {"gather_dtype": torch.float32, "input_dtype": torch.float32, "output_dtype": torch.float64},
    "reduced in float32": {"reduce_dtype": torch.float32},
    "gathered in int8": {"gather_format": quant.int8()},
    "reduced in int8": {"reduce_format": quant.int8()},
    "remat with prefetch of three": {"remat": True, "prefetch": 3},
}
for _name, _options in OPTIONS.items():
    PROGRAMS[_name] = partial(trained, options=_options)


# --- ways to a gradient ---


@program
def by_backward(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    leaves = optree.tree_map(lambda x: x.requires_grad_(), ps)
    values = []
    for number in range(2):  # gradients add up
        value = loss(leaves, rows(mesh, number))
        value.backward()
        values.append(value.detach())
    return values, sf.unshard(optree.tree_map(lambda x: x.grad, leaves))


@program
def by_backward_with_an_optimizer_of_torch(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    leaves = [x.requires_grad_() for x in optree.tree_leaves(ps)]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2)
    for number in range(3):
        optimizer.zero_grad()
        loss(ps, rows(mesh, number)).backward()
        optimizer.step()
    return sf.unshard(optree.tree_map(torch.Tensor.detach, ps))


@program
def twice_backward(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    leaves = optree.tree_map(lambda x: x.requires_grad_(), ps)
    value = loss(leaves, rows(mesh))
    value.backward(retain_graph=True)
    value.backward()
    return sf.unshard(optree.tree_map(lambda x: x.grad, leaves))


def accumulated(mesh: Any, strategy: Any, defer: Any) -> Any:
    ps, loss, optimizer = placed(mesh, strategy), loss_of(), so.adamw(1e-2)
    state, values = optimizer.init(ps), []
    for number in range(2):
        batches = [rows(mesh, 5 * number + k) for k in range(3)]
        value, grads = sf.accumulate(loss, batches, defer=defer)(ps)
        ps, state = optimizer.step(ps, grads, state)
        values.append(value)
    return values, sf.unshard(ps)


for _defer in ("nothing", "replicas", "all"):
    PROGRAMS[f"accumulate, deferring {_defer}"] = partial(accumulated, defer=_defer)


@program
def by_torch_func_grad(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    return sf.unshard(torch.func.grad(loss)(ps, rows(mesh)))


@program
def by_vjp(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    value, pull = torch.func.vjp(lambda ps: loss(ps, rows(mesh)), ps)  # type: ignore[misc]
    return value, sf.unshard(pull(torch.ones_like(value))[0])


def direction(ps: Any) -> Any:
    return optree.tree_map(lambda x: torch.full_like(x, 0.25), ps)


@program
def by_jvp(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    return torch.func.jvp(lambda ps: loss(ps, rows(mesh)), (ps,), (direction(ps),))


@program
def hessian_times_vector(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    gradient = torch.func.grad(lambda ps: loss(ps, rows(mesh)))
    return sf.unshard(torch.func.jvp(gradient, (ps,), (direction(ps),))[1])


@program
def reverse_over_reverse(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()

    def along(ps: Any) -> Tensor:
        grads = torch.func.grad(loss)(ps, rows(mesh))
        return torch.stack([x.square().sum() for x in optree.tree_leaves(grads)]).sum()

    return sf.unshard(torch.func.grad(along)(ps))


@program
def gradients_of_each_row(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()

    def each(tokens: Tensor) -> Any:
        return torch.func.grad(loss)(ps, tokens[None])

    return optree.tree_map(lambda x: x.clone(), optree.tree_leaves(torch.func.vmap(each)(rows(mesh))))


@program
def ensemble(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    every = optree.tree_map(lambda x: torch.stack([x, 2 * x, x - 1]), ps)
    return torch.func.vmap(loss, in_dims=(0, None))(every, rows(mesh))


@program
def of_some_arguments(mesh: Any, strategy: Any) -> Any:
    one, other, loss = placed(mesh, strategy), placed(mesh, strategy), loss_of()

    def both(a: Any, b: Any, tokens: Tensor) -> Any:
        return loss(a, tokens) * loss(b, tokens), tokens.sum()

    (value, aux), grads = sf.value_and_grad(both, argnums=1, has_aux=True)(one, other, rows(mesh))
    return value, aux, sf.unshard(grads)


# --- what parameters there are ---


@program
def frozen_parts(mesh: Any, strategy: Any) -> Any:
    return trained(mesh, strategy, more={"frozen": r".*\.(b|e)"})


@program
def everything_frozen_but_one(mesh: Any, strategy: Any) -> Any:
    return trained(mesh, strategy, more={"frozen": r"blocks.*|embed.*"})


def mixture() -> dict[str, Any]:
    """Of several dtypes, of no element, of no dimension, and not contiguous."""
    g = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(6, 8, generator=g, dtype=torch.float64).t(),
        "v": torch.randn(6, 8, generator=g),
        "h": torch.randn(7, generator=g).bfloat16(),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4, dtype=torch.float64),
        "ids": torch.randint(9, (5,), generator=g),
        "mask": torch.rand(3, generator=g) > 0.5,
    }


def mixed(p: Any, x: Tensor) -> Tensor:
    y = x @ p["w"] @ p["v"].double() * p["scale"] + p["h"].double().sum() + p["none"].sum()
    return y * p["ids"].sum() + p["mask"].sum()


@program
def several_dtypes(mesh: Any, strategy: Any) -> Any:
    ps = sf.shard([mixture(), mixture()], mesh, strategy, frozen=r".*\.(ids|mask)")
    f, x, optimizer = sf.stage(mixed), normal(3, 8, seed=rank_of(mesh)), so.sgd(1e-4, momentum=0.9)

    def loss(ps: Any) -> Tensor:
        y = x
        for p in sf.layers(ps):
            y = torch.tanh(f(p, y))
        return y.sum()

    return sf.unshard(twice_stepped(ps, loss, optimizer))


@program
def complex_numbers(mesh: Any, strategy: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    ps = sf.shard({"a": {"c": torch.randn(5, 7, generator=g, dtype=torch.complex128)}}, mesh, strategy)
    f, x = (
        sf.stage(lambda p, x: (x @ p["c"].mH).abs().square().sum()),
        normal(3, 7, seed=rank_of(mesh)).to(torch.complex128),
    )
    return sf.unshard(twice_stepped(ps, lambda ps: f(ps["a"], x), so.adamw(1e-2)))


@program
def tied_shards(mesh: Any, strategy: Any) -> Any:
    ps, optimizer = sf.shard(squares(1, LARGER), mesh, strategy), so.adamw(1e-2)
    f, x = sf.stage(lambda p, x: torch.tanh(x @ p["w"] + p["b"])), normal(3, LARGER, seed=rank_of(mesh))

    def loss(ps: Any) -> Tensor:
        return f(ps[0], f(ps[0], f(ps[0], x))).square().sum()

    return sf.unshard(twice_stepped(ps, loss, optimizer))


@program
def tensor_parallel(mesh: Any, strategy: Any) -> Any:
    """Parameters are cut over the second axis of the mesh too, where there is one for it."""
    names = mesh.mesh_dim_names
    axis = next((name for name in names if name not in DATA), None)
    cuts = sf.by_path([(r".*\.w", P(axis)), (r".*\.v", P(None, axis))], strict=False)
    ps = sf.shard(blocks(2, LARGER), mesh, strategy, specs=P() if axis is None else cuts)
    optimizer = so.adamw(1e-2)

    def local(p: Any, x: Tensor) -> Tensor:
        rows, columns = p["w"].shape[0], p["v"].shape[1]
        return F.pad(torch.tanh(x[:, :rows] @ p["w"] + p["b"]) @ p["v"], (0, LARGER - columns))

    f, x = sf.stage(local), normal(3, LARGER, seed=rank_of(mesh))

    def loss(ps: Any) -> Tensor:
        y = x
        for p in ps:
            y = y + f(p, y)
        return y.square().sum()

    return optree.tree_map(lambda x: x.clone(), optree.tree_leaves(twice_stepped(ps, loss, optimizer)))


@program
def made_one_stage_at_a_time(mesh: Any, strategy: Any) -> Any:
    def make(generator: torch.Generator) -> dict[str, Tensor]:
        return {"w": torch.randn(7, 33, generator=generator, dtype=torch.float64)}

    return sf.unshard(sf.init_sharded({"blocks": [make] * 3, "head": make}, 3, mesh, strategy))


# --- changes by hand ---


@program
def changed_in_place_between_steps(mesh: Any, strategy: Any) -> Any:
    ps, loss, optimizer = placed(mesh, strategy), loss_of(prefetch=3), so.adamw(1e-2)
    state, values = optimizer.init(ps), []
    for number in range(3):
        value, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
        ps, state = optimizer.step(ps, grads, state)
        with torch.no_grad():
            optree.tree_map_(lambda x: x.mul_(1.5).add_(0.125), ps)
            values += [value, loss(ps, rows(mesh, number))]
            optree.tree_map_(lambda x: x[::2].sub_(0.25), ps)
    return values, sf.unshard(ps)


@program
def changed_to_new_tensors_between_steps(mesh: Any, strategy: Any) -> Any:
    ps, loss, optimizer = placed(mesh, strategy), loss_of(), so.adamw(1e-2)
    state = optimizer.init(ps)
    for number in range(3):
        _, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
        ps, state = optimizer.step(ps, grads, state)
        ps = optree.tree_map(lambda x: x * 2, ps)
        state = optree.tree_map(lambda x: x * 0.5 if isinstance(x, Tensor) else x, state)
        state = sf.shards.to_tier(state, strategy.tiers.state)
    return sf.unshard(ps)


def evenly(strategy: Any) -> Any:
    """One whose gradients are cut as its parameters."""
    even = strategy.gradients == strategy.axes
    return strategy if even else sf.full_shard(DATA).with_tiers(**strategy.tiers._asdict())


@program
def steps_by_hand(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, evenly(strategy)), loss_of()
    for number in range(3):
        _, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
        with torch.no_grad():
            ps = optree.tree_map(lambda p, g: p - 0.05 * g, ps, grads)
    return sf.unshard(ps)


@program
def steps_in_place_by_hand(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, evenly(strategy)), loss_of()
    for number in range(3):
        _, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
        with torch.no_grad():
            optree.tree_map_(lambda p, g: p.sub_(g, alpha=0.05), ps, grads)
    return sf.unshard(ps)


@program
def average_by_hand(mesh: Any, strategy: Any) -> Any:
    ps, loss, optimizer = placed(mesh, strategy), loss_of(), so.adamw(1e-2)
    state, mean = optimizer.init(ps), optree.tree_map(torch.clone, ps)
    for number in range(3):
        _, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
        ps, state = optimizer.step(ps, grads, state)
        with torch.no_grad():
            optree.tree_map_(lambda m, p: m.lerp_(p, 0.1), mean, ps)
    return sf.unshard(mean), loss(mean, rows(mesh)).detach()


@program
def gradients_kept_over_steps(mesh: Any, strategy: Any) -> Any:
    """What was returned stays as it is, whatever comes after."""
    ps, loss, optimizer = placed(mesh, strategy), loss_of(), so.sgd(1e-2)
    state, every = optimizer.init(ps), []
    for number in range(3):
        _, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
        ps, state = optimizer.step(ps, grads, state)
        every.append(grads)
    return [optree.tree_map(torch.clone, optree.tree_leaves(grads)) for grads in every]


@program
def gradients_of_two_batches_added(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    one, other = (sf.value_and_grad(loss)(ps, rows(mesh, k))[1] for k in range(2))
    return sf.unshard(optree.tree_map(torch.add, one, other))


def clipped(mesh: Any, strategy: Any, donate: bool) -> Any:
    ps, loss, optimizer = placed(mesh, strategy), loss_of(), so.adamw(1e-2)
    clip, state, found = so.clip_by_global_norm(0.5, donate=donate), optimizer.init(ps), []
    for number in range(3):
        _, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
        found += [so.global_norm(grads), so.global_norm(ps)]
        grads, _ = clip.update(ps, grads, clip.init(ps))
        ps, state = optimizer.step(ps, grads, state)
    return found, sf.unshard(ps)


@program
def partitioned_and_combined(mesh: Any, strategy: Any) -> Any:
    ps, loss, optimizer = placed(mesh, strategy), loss_of(), so.adamw(1e-2)
    trained_part, rest = sf.shards.partition(ps, r"blocks.*")
    state = optimizer.init(trained_part)
    for number in range(2):
        _, grads = sf.value_and_grad(lambda t: loss(sf.shards.combine(t, rest), rows(mesh, number)))(trained_part)  # noqa: B023
        trained_part, state = optimizer.step(trained_part, grads, state)
    return sf.unshard(sf.shards.combine(trained_part, rest))


@program
def scaled_loss(mesh: Any, strategy: Any) -> Any:
    return trained(mesh, strategy, so.dynamic_loss_scale(so.adamw(1e-2), scale=1.0))


@program
def state_cut_further(mesh: Any, strategy: Any) -> Any:
    axes = [name for name in mesh.mesh_dim_names if name in strategy.replicas and name not in strategy.gradients]
    optimizer = so.adamw(1e-2)
    return trained(mesh, strategy, so.shard_state(optimizer, axes[0]) if axes else optimizer)


# --- loops ---


@program
def layers_out_of_order(mesh: Any, strategy: Any) -> Any:
    ps = sf.shard(blocks(5, LARGER), mesh, strategy)
    f, x = sf.stage(block, prefetch=2), normal(3, LARGER, seed=rank_of(mesh))

    def loss(ps: Any) -> Tensor:
        y, announced = x, list(sf.layers(ps))
        for k in (0, 3, 1, 1, 4, 0):
            y = f(announced[k], y)
        return y.square().sum()

    value, grads = sf.value_and_grad(loss)(ps)
    return value, sf.unshard(grads)


@program
def loops_that_end_early(mesh: Any, strategy: Any) -> Any:
    ps = sf.shard(blocks(5, LARGER), mesh, strategy)
    f, x, found = sf.stage(block, prefetch=2), normal(3, LARGER, seed=rank_of(mesh)), []
    with torch.no_grad():
        for turn in range(4):
            y = x
            for k, p in enumerate(sf.layers(ps)):
                y = f(p, y)
                if k == turn % 3:
                    break
            optree.tree_map_(lambda t: t.mul_(1.25), ps)
            found.append(y)
    return found, sf.unshard(ps)


@program
def without_gradients(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    with torch.no_grad():
        one = loss(ps, rows(mesh))
    with torch.inference_mode():
        other = loss(ps, rows(mesh)).clone()
    value, grads = sf.value_and_grad(loss)(ps, rows(mesh))
    return one, other, value, sf.unshard(grads)


@program
def trained_after_inference(mesh: Any, strategy: Any) -> Any:
    ps, loss = placed(mesh, strategy), loss_of()
    with torch.inference_mode():
        loss(ps, rows(mesh))
    optimizer = so.adamw(1e-2)
    state = optimizer.init(ps)
    _, grads = sf.value_and_grad(loss)(ps, rows(mesh))
    return sf.unshard(optimizer.step(ps, grads, state)[0])


@program
def a_step_that_fails_in_between(mesh: Any, strategy: Any) -> Any:
    ps, loss, optimizer = placed(mesh, strategy), loss_of(prefetch=3), so.adamw(1e-2)
    state = optimizer.init(ps)

    def failing(ps: Any, tokens: Tensor) -> Tensor:
        x = sf.stage(embed)(ps["embed"], tokens)
        for p in sf.layers(ps["blocks"]):
            x = sf.stage(block, prefetch=3)(p, x)
            break
        raise KeyError("on purpose")

    for number in range(2):
        with contextlib.suppress(KeyError):
            sf.value_and_grad(failing)(ps, rows(mesh, number))
        _, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
        ps, state = optimizer.step(ps, grads, state)
    return sf.unshard(ps)


@program
def skipped_stages(mesh: Any, strategy: Any) -> Any:
    ps = sf.shard(blocks(3, LARGER), mesh, strategy)
    f, x = sf.stage(block), normal(3, LARGER, seed=rank_of(mesh))

    def loss(ps: Any) -> Tensor:
        y = x
        for k, p in enumerate(ps):
            if k == 1 and rank_of(mesh) % 2:
                sf.skip(f, p)
            else:
                y = f(p, y)
        return y.square().sum()

    value, grads = sf.value_and_grad(loss)(ps)
    return value, sf.unshard(grads)


# --- more than one ---


@program
def two_models(mesh: Any, strategy: Any) -> Any:
    teacher, pupil = placed(mesh, strategy, depth=2), placed(mesh, strategy, depth=1)
    f, optimizer = loss_of(), so.adamw(1e-2)
    state = optimizer.init(pupil)
    for number in range(2):
        with torch.no_grad():
            target = f(teacher, rows(mesh, number))
        _, grads = sf.value_and_grad(lambda ps: (f(ps, rows(mesh, number)) - target).square())(pupil)  # noqa: B023
        pupil, state = optimizer.step(pupil, grads, state)
    return sf.unshard(pupil)


@program
def many_steps_that_reuse_places(mesh: Any, strategy: Any) -> Any:
    """Gradients and states come and go, of several sizes."""
    found = []
    for width in (4, 24, 7, 24, 4):
        ps, loss, optimizer = sf.shard(params(2, width), mesh, strategy), loss_of(), so.adamw(1e-2)
        state = optimizer.init(ps)
        for number in range(2):
            _, grads = sf.value_and_grad(loss)(ps, rows(mesh, number))
            ps, state = optimizer.step(ps, grads, state)
        found.append(sf.unshard(ps))
    return found


@program
def from_two_threads(mesh: Any, strategy: Any) -> Any:
    """One after another, on another thread than the first."""
    ps, loss, found = placed(mesh, strategy), loss_of(), []

    def run() -> None:
        value, grads = sf.value_and_grad(loss)(ps, rows(mesh))
        found.append((value, sf.unshard(grads)))

    for _ in range(2):
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    return found


@program
def fetched_values(mesh: Any, strategy: Any) -> Any:
    """What a user may do with a value by itself."""
    ps = placed(mesh, strategy)
    flats = [x for x in optree.tree_leaves(ps, is_leaf=is_flat) if is_flat(x)]
    values = [x.values for x in flats]
    found = [v.clone() for v in values] + [v.sum() for v in values] + [v[::2].clone() for v in values if v.numel() > 1]
    found += [v.float().double() for v in values] + [torch.cat([v.reshape(-1) for v in values])]
    return found, so.vdot(ps, ps), so.norms(ps).total


for _donate in (True, False):
    PROGRAMS[f"clipped, donate={_donate}"] = partial(clipped, donate=_donate)
