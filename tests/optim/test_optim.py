"""Optimizers on shards: the parameters of one process, whatever the strategy, the rule and the number of ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn.optim import elementwise
from shardfn.optim.muon import cost as muon_cost
from shardfn.optim.owners import on_everyone, on_owner
from shardfn.shards.pieces import units
from shardfn.testing import World, world
from tests.models import DATA, STRATEGIES, copied, data_mesh, distance, normal, plainly, scaled
from tests.models import scaled_loss as model
from tests.models import token_rows as tokens
from tests.reference import worst
from tests.refusals import told

STEPS = 5


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and path != "embed.e"


def decay(path: str, shape: tuple[int, ...]) -> float:
    del path
    return 0.1 if len(shape) > 1 else 0.0


def rate(path: str, shape: tuple[int, ...]) -> Any:
    """A schedule for matrices, a number for the others, less for earlier blocks."""
    base = 0.02 * 0.75 ** (3 - int(path.split(".")[1])) if path.startswith("blocks.") else 0.02
    return so.warmup_cosine(base, warmup=2, steps=6) if len(shape) > 1 else base


def told_of_squares(optimizer: so.Sophia) -> so.Optimizer:
    """Sophia, for which at every other step some function of the gradient stands for a diagonal."""

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        if state["step"] % 2 == 0:
            diagonal = optree.tree_map(lambda g: 30 * g * g - 1e-3, grads)
            state = optimizer.estimate(params, diagonal, state)
        return optimizer.step(params, grads, state)

    return so.Optimizer(optimizer.init, step)


OPTIMIZERS: dict[str, Callable[..., so.Optimizer]] = {
    "sgd": lambda **k: so.sgd(0.05, **k),
    "sgd-nesterov": lambda **k: so.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=decay, **k),
    "adam": lambda **k: so.adam(0.02, weight_decay=0.1, **k),
    "adamw": lambda **k: so.adamw(0.02, **k),
    "adamw-masked": lambda **k: so.adamw(so.warmup_cosine(0.02, warmup=2, steps=6), weight_decay=decay, **k),
    "lion": lambda **k: so.lion(0.01, weight_decay=0.1, **k),
    "sophia": lambda **k: told_of_squares(so.sophia(0.02, gamma=0.7, weight_decay=decay, **k)),
    "adamw8bit": lambda **k: so.adamw8bit(0.02, weight_decay=decay, **k),
    "lion8bit": lambda **k: so.lion8bit(0.01, weight_decay=0.1, **k),
    "adamw in bfloat16": lambda **k: so.adamw(0.02, weight_decay=decay, state_dtype=torch.bfloat16, seed=3, **k),
    "sgd in bfloat16": lambda **k: so.sgd(0.05, momentum=0.9, state_dtype=torch.bfloat16, **k),
    "master": lambda **k: so.fp32_master_weights(so.adamw(0.02, **k), **k),
    "rounded": lambda **k: so.stochastic_rounding(so.adamw8bit(0.02, **k), seed=2, **k),
    "adafactor": lambda **k: so.adafactor(0.02, weight_decay=0.1, **k),
    "lamb": lambda **k: so.lamb(0.02, weight_decay=decay, **k),
    "muon": lambda **k: so.masked(so.muon(0.02, dtype=None, **k), is_matrix, so.adamw(0.02, **k)),
    "shampoo": lambda **k: so.shampoo(0.02, ridge=1e-6, every=2, block=5, weight_decay=decay, **k),
    "kl_shampoo": lambda **k: so.kl_shampoo(0.02, ridge=1e-6, every=2, block=5, weight_decay=decay, **k),
    "soap": lambda **k: so.soap(0.02, eps=1e-6, every=2, weight_decay=decay, **k),
    "rmsprop of torch": lambda donate: so.from_torch(torch.optim.RMSprop, lr=0.01, weight_decay=decay),
    "adam of torch": lambda donate: so.from_torch(torch.optim.Adam, lr=0.01, amsgrad=True),
    "everything": lambda **k: so.chain(
        so.clip_by_value(3.0, **k),
        so.clip_by_global_norm(0.7, **k),
        so.multi_steps(so.ema(so.skip_nonfinite(so.adamw(0.02, weight_decay=decay, **k)), 0.9, **k), 2),
    ),
}

BY_PARAMETER: dict[str, Callable[..., so.Optimizer]] = {
    "adamw by parameter": lambda **k: so.chain(
        so.clip_by_global_norm(0.5, by=lambda path, shape: path.split(".")[0], **k),
        so.adamw(rate, b1=lambda path, shape: 0.8 if "w" in path else 0.9, weight_decay=lambda step: 0.1 / step, **k),
    ),
    "adamw8bit by parameter": lambda **k: so.adamw8bit(rate, weight_decay=decay, **k),
    "adafactor by parameter": lambda **k: so.adafactor(rate, weight_decay=decay, **k),
    "lamb by parameter": lambda **k: so.lamb(rate, weight_decay=decay, **k),
    "muon by parameter": lambda **k: so.masked(so.muon(rate, dtype=None, **k), is_matrix, so.adamw(rate, **k)),
    "soap by parameter": lambda **k: so.soap(rate, eps=1e-6, every=2, weight_decay=decay, **k),
    "rmsprop of torch by parameter": lambda donate: so.from_torch(torch.optim.RMSprop, lr=rate, weight_decay=decay),
}

ROUNDING = {"soap": 1e-8, "soap by parameter": 1e-8}  # the eigenvectors of small eigenvalues amplify it


def containers(tree: Any) -> set[int]:
    """The identities of the dicts and lists in a tree."""
    if isinstance(tree, (dict, list, tuple)):
        inside = tree.values() if isinstance(tree, dict) else tree
        own = set() if isinstance(tree, tuple) else {id(tree)}
        return own.union(*map(containers, inside))
    return set()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_has_its_numbers_to_itself(name: str) -> None:
    optimizer = OPTIMIZERS[name](donate=False)
    states = [optimizer.init(scaled()) for _ in range(2)]
    assert not containers(states[0]) & containers(states[1])


def test_a_number_of_another_name_in_a_state_is_an_error_at_any_step() -> None:
    optimizer, ps = so.adamw(0.1, donate=False), scaled()
    state = optimizer.init(ps)
    for _ in range(2):
        wrong = state | {"numbers": state["numbers"] | {"learning_rate": 9.0}}
        with pytest.raises(ValueError, match="learning_rate"):
            optimizer.step(ps, ps, wrong)
        ps, state = optimizer.step(ps, ps, state)
    state["numbers"]["learning_rate"] = 9.0
    with pytest.raises(ValueError, match="learning_rate"):
        optimizer.step(ps, ps, state)


def trained(optimizer: so.Optimizer, ps: Any, gradient: Callable[[Any, int], Any]) -> tuple[Any, Any]:
    state = optimizer.init(ps)
    for number in range(STEPS):
        ps, state = optimizer.step(ps, gradient(ps, number), state)
    return ps, state


@functools.cache
def by_one_process(name: str) -> Any:
    """What a process works out once for all strategies."""
    rows = tokens(12)

    def gradient(ps: Any, number: int) -> Any:
        return sf.grad(lambda p: model(plainly, p, (rows + number) % 11) / rows.numel())(ps)

    return trained((OPTIMIZERS | BY_PARAMETER)[name](donate=True), copied(scaled()), gradient)[0]


def compare(strategy: str, names: list[str], n: int) -> Any:
    mesh = data_mesh(n)
    rows = tokens(12)
    mine = rows.tensor_split(n)[mesh.get_rank()]
    found = {}
    for name in names:
        for donate in (True, False) if n == 4 else (True,):

            def shared(ps: Any, number: int) -> Any:
                return sf.grad(lambda p: model(sf.stage, p, (mine + number) % 11) / rows.numel())(ps)

            want = by_one_process(name)
            flat = sf.shard(scaled(), mesh, STRATEGIES[strategy])
            before = optree.tree_map(torch.clone, flat)
            got, state = trained((OPTIMIZERS | BY_PARAMETER)[name](donate=donate), flat, shared)
            found[name, donate] = distance(sf.unshard(got), want)
            if not donate and "of torch" not in name:
                found[f"{name}, as before", donate] = distance(flat, before)
            assert optree.tree_structure(got) == optree.tree_structure(flat)
            del state
    return found


@pytest.mark.parametrize(
    "world", [(1, "processes"), (2, "processes"), (4, "processes")], indirect=True, ids=["1", "2", "4"]
)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_optimizer_with_every_strategy_trains_as_one_process(world: World, strategy: str) -> None:
    for found in world.with_deadline(120).run(compare, strategy, list(OPTIMIZERS), world.size):
        assert not {name: d for name, d in found.items() if not d < ROUNDING.get(name[0], 1e-10)}


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hfsdp"])
@pytest.mark.world(4, "processes")
def test_numbers_by_parameter_are_those_of_one_process(world: World, strategy: str) -> None:
    for found in world.with_deadline(120).run(compare, strategy, list(BY_PARAMETER), world.size):
        assert not {name: d for name, d in found.items() if not d < ROUNDING.get(name[0], 1e-10)}


def torch_of(name: str, leaves: list[Tensor]) -> torch.optim.Optimizer:
    matrices = {"params": [x for x in leaves if x.ndim == 2], "weight_decay": 0.1}
    groups: list[dict[str, Any]] = [matrices, {"params": [x for x in leaves if x.ndim < 2]}]
    return {
        "sgd-nesterov": lambda: torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam(leaves, 0.02, weight_decay=0.1),
        "adamw": lambda: torch.optim.AdamW(leaves, 0.02),
        "sgd": lambda: torch.optim.SGD(leaves, 0.05),
        "adafactor": lambda: torch.optim.Adafactor(leaves, 0.02, weight_decay=0.1),
    }[name]()


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
@pytest.mark.parametrize("name", ["sgd", "sgd-nesterov", "adam", "adamw", "adafactor"])
def test_optimizers_are_those_of_torch(name: str, donate: bool) -> None:
    rows = tokens(12)
    gradient = sf.grad(lambda p: model(plainly, p, rows) / rows.numel())
    got, _ = trained(OPTIMIZERS[name](donate=donate), copied(scaled()), lambda p, _: gradient(p))
    leaves, tree = optree.tree_flatten(copied(scaled()))
    leaves = [x.requires_grad_() for x in leaves]
    optimizer = torch_of(name, leaves)
    for _ in range(STEPS):
        for x, g in zip(leaves, optree.tree_leaves(gradient(optree.tree_unflatten(tree, leaves))), strict=True):
            x.grad = g.detach()
        optimizer.step()
    assert distance(got, optree.tree_unflatten(tree, [x.detach() for x in leaves])) < 1e-12


@pytest.mark.parametrize("bounds", [(0.0, None), (1.5, 2.5)])
@pytest.mark.parametrize("donate", [True, False])
def test_lamb_is_adams_step_times_the_quotient_of_two_norms(bounds: tuple[float, float | None], donate: bool) -> None:
    """Of each parameter; 1 for one that is zero or does not move."""
    (least, most), decays = bounds, {"w": 0.5, "large": 0.2}
    ps = {
        "w": normal(4, 3, seed=0),
        "large": 9 * normal(2, seed=2),
        "zero": torch.zeros(3, dtype=torch.float64),
        "still": normal(2, seed=1),
    }
    got, _ = trained(
        so.lamb(
            0.1,
            min_trust_ratio=least,
            max_trust_ratio=most,
            weight_decay=lambda path, shape: decays.get(path, 0.0),
            donate=donate,
        ),
        copied(ps),
        lambda p, n: p | {"still": p["still"] * 0, "zero": p["zero"] + n - 1},
    )
    means, squares_ = ({k: torch.zeros_like(x) for k, x in ps.items()} for _ in range(2))
    for t in range(1, STEPS + 1):
        for k, p in ps.items():
            g = {"w": p, "large": p, "still": p * 0, "zero": p + t - 2}[k]
            means[k], squares_[k] = 0.9 * means[k] + 0.1 * g, 0.999 * squares_[k] + 0.001 * g * g
            u = means[k] / (1 - 0.9**t) / ((squares_[k] / (1 - 0.999**t)).sqrt() + 1e-6) + decays.get(k, 0.0) * p
            size = (p.norm() / u.norm()).clamp(least, most) if p.norm() > 0 and u.norm() > 0 else 1.0
            ps[k] = p - 0.1 * size * u
    assert distance(got, ps) < 1e-12


def moved(name: str, strategy: str) -> bool:
    """Whether a donated step left the memory of parameters of which this rank has some."""
    mesh = sf.make_mesh(device="cpu", replica=1, shard=2)
    flat = sf.shard(scaled(), mesh, STRATEGIES[strategy])
    before = [x.data_ptr() for x in optree.tree_leaves(flat["blocks"])]
    optimizer = OPTIMIZERS[name](donate=True)
    state = optimizer.init(flat)
    for _ in range(2):
        flat, state = optimizer.step(flat, optree.tree_map(torch.ones_like, flat), state)
    return before != [x.data_ptr() for x in optree.tree_leaves(flat["blocks"])]


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_a_donated_step_stays_in_the_memory_of_the_parameters(world: World, strategy: str) -> None:
    for name in OPTIMIZERS.keys() - {"everything"}:  # which rests at every other step
        assert world.run(moved, name, strategy) == [False, False], name


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
@pytest.mark.parametrize("name", ["sgd", "sgd-nesterov", "adam", "adamw", "lion"])
def test_complex_parameters_move_as_pairs_of_real_ones(name: str, donate: bool) -> None:
    pair = {"w": normal(4, 2, seed=0)}
    complex_one = {"w": torch.view_as_complex(pair["w"].clone())}
    got, _ = trained(OPTIMIZERS[name](donate=donate), complex_one, lambda p, n: {"w": p["w"] * (n + 1)})
    optimizer = OPTIMIZERS[name](donate=True)
    flat, _ = trained(optimizer, {"w": pair["w"].flatten()}, lambda p, n: {"w": p["w"] * (n + 1)})
    assert (torch.view_as_real(got["w"]).flatten() - flat["w"]).abs().max() < 1e-12


def by_backward(name: str, strategy: str) -> float:
    """As users of `loss.backward()` write it: parameters are leaves of autograd, and stay that."""
    mesh = sf.make_mesh(device="cpu", replica=2, shard=2)
    rows = tokens(12)
    mine = rows.tensor_split(4)[mesh.get_rank()]
    want = by_one_process(name)
    flat = optree.tree_map(torch.Tensor.requires_grad_, sf.shard(scaled(), mesh, STRATEGIES[strategy]))
    optimizer = OPTIMIZERS[name](donate=True)
    state = optimizer.init(flat)
    for number in range(STEPS):
        (model(sf.stage, flat, (mine + number) % 11) / rows.numel()).backward()
        grads = optree.tree_map(lambda x: x.grad, flat)
        flat, state = optimizer.step(flat, grads, state)
        for x in optree.tree_leaves(flat):
            assert x.is_leaf
            assert x.requires_grad
            x.grad = None
    return distance(sf.unshard(optree.tree_map(torch.Tensor.detach, flat)), want)


@pytest.mark.world(4)
@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "hfsdp"])
@pytest.mark.parametrize("name", ["adamw-masked", "muon", "adafactor", "rmsprop of torch"])
def test_parameters_may_be_leaves_of_autograd(world: World, name: str, strategy: str) -> None:
    assert worst(world.with_deadline(60).run(by_backward, name, strategy)) < 1e-10


# --- state cut further ---


def cut_further(name: str, replicated: bool) -> tuple[float, float]:
    """The distance from one process, and the state's elements over the parameters'."""
    mesh = sf.make_mesh(device="cpu", replica=2, shard=2)
    strategy, axis = (sf.ddp(("replica", "shard")), ("replica", "shard")) if replicated else (
        sf.hybrid_shard(shard="shard", replica="replica"), "replica")  # fmt: skip
    rows = tokens(12)
    mine = rows.tensor_split(4)[mesh.get_rank()]
    want = by_one_process(name)
    flat = sf.shard(scaled(), mesh, strategy)
    got, state = trained(
        so.shard_state(OPTIMIZERS[name](donate=True), axis),
        flat,
        lambda ps, number: sf.grad(lambda p: model(sf.stage, p, (mine + number) % 11) / rows.numel())(ps),
    )
    assert optree.tree_structure(got) == optree.tree_structure(flat)
    elements = sum(x.numel() for x in optree.tree_leaves(state) if isinstance(x, Tensor) and x.ndim)
    return distance(sf.unshard(got), want), elements / sum(x.numel() for x in optree.tree_leaves(flat))


@pytest.mark.world(4)
@pytest.mark.parametrize("replicated", [True, False], ids=["ddp", "hybrid_shard"])
@pytest.mark.parametrize(
    "name", ["adamw-masked", "adafactor", "lamb", "muon", "soap", "rmsprop of torch", "everything"]
)
def test_shard_state_cuts_the_state_of_any_optimizer(world: World, name: str, replicated: bool) -> None:
    for d, share in world.with_deadline(60).run(cut_further, name, replicated):
        assert d < ROUNDING.get(name, 1e-10)
        slots = {"adamw-masked": 2, "everything": 4}.get(name)
        assert slots is None or share == slots / (4 if replicated else 2)


@pytest.mark.world(2)
def test_shard_state_needs_an_axis_over_which_parameters_are_the_same(world: World) -> None:
    def body() -> None:
        mesh = sf.make_mesh(device="cpu", replica=1, shard=2)
        flat = sf.shard(scaled(), mesh, sf.ddp("shard"))
        so.shard_state(so.adamw(0.1), "replica").init(flat)

    for error in world.errors(body):
        assert "stage 'blocks.0' is not the same over 'replica', but over 'shard'" in str(error)


# --- gradients through updates ---


META: dict[str, Callable[[Any], so.Optimizer]] = {
    "adamw": lambda lr: so.adamw(lr, eps=1e-3, weight_decay=0.1, donate=False),
    "clipped": lambda lr: so.chain(
        so.clip_by_global_norm(0.1, donate=False), so.adamw(lr, eps=1e-3, weight_decay=decay, donate=False)
    ),
    "sgd": lambda lr: so.ema(so.sgd(lr, momentum=0.9, weight_decay=decay, donate=False), 0.9, donate=False),
    "adafactor": lambda lr: so.adafactor(lr, weight_decay=0.1, donate=False),
    "lamb": lambda lr: so.lamb(lr, eps=1e-3, weight_decay=decay, donate=False),
    "muon": lambda lr: so.masked(
        so.muon(lr, dtype=None, weight_decay=0.1, donate=False), is_matrix, so.adamw(lr, eps=1e-3, donate=False)
    ),
}


def through_updates(name: str, strategy: str, n: int) -> dict[str, float]:
    """Derivatives of the loss after two steps: by the parameters, the rate, and a scale of the gradient."""
    mesh = data_mesh(n)
    rows = tokens(12)

    def after(ps: Any, rate: Tensor, scale: Tensor, stage: Any, x: Tensor, varying: Any, total: Any) -> Tensor:
        optimizer = META[name](rate)
        state = optimizer.init(ps)
        for _ in range(2):
            _, grads = sf.value_and_grad(lambda p: total(model(stage, p, x) * varying(scale)) / rows.numel())(ps)
            ps, state = optimizer.step(ps, grads, state)
        if "average" in state:
            ps = state["average"]
        return total(model(stage, ps, x)) / rows.numel()

    rate, scale = torch.tensor(0.05, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64)
    want = sf.grad(lambda p, r, s: after(p, r, s, plainly, rows, plainly, plainly), (0, 1, 2))(scaled(), rate, scale)
    mine = rows.tensor_split(n)[mesh.get_rank()]

    def meta(p: Any, r: Tensor, s: Tensor) -> Any:
        def loss(p: Any, r: Tensor, s: Tensor) -> Tensor:
            return after(p, r, s, sf.stage, mine, lambda s: sf.pvary(s, DATA), lambda x: sf.psum(x, DATA))

        return sf.grad(loss, (0, 1, 2))(p, r, s)

    flat = sf.shard(scaled(), mesh, STRATEGIES[strategy])
    mapped = sf.shard_map(meta, mesh=mesh, in_specs=(..., sf.P(), sf.P()), out_specs=(..., sf.P(), sf.P()))
    by_params, by_rate, by_scale = mapped(flat, rate, scale)
    largest = max(1.0, *(x.abs().max().item() for x in optree.tree_leaves(want[0])))
    return {
        "parameters": distance(sf.unshard(by_params), want[0]) / largest,
        "rate": (by_rate / want[1] - 1).abs().item(),
        "scale": abs(by_scale - want[2]).item(),
    }


@pytest.mark.world(4)
@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "ddp", "zero1", "hfsdp"])
@pytest.mark.parametrize("name", list(META))
def test_a_meta_gradient_goes_through_two_steps(world: World, name: str, strategy: str) -> None:
    for found in world.with_deadline(60).run(through_updates, name, strategy, world.size):
        assert worst(found.values()) < 1e-11, found


def test_a_pure_average_depends_on_the_first_parameters() -> None:
    optimizer = so.ema(so.sgd(0.0, donate=False), 0.9, donate=False)

    def average(w: Tensor) -> Tensor:
        _, state = optimizer.step({"w": w}, {"w": torch.ones(3)}, optimizer.init({"w": w}))
        total: Tensor = state["average"]["w"].sum()
        return total

    assert torch.allclose(torch.func.grad(average)(torch.arange(3.0)), torch.ones(3))


# --- what users change, and what they get wrong ---


RATED: dict[str, Callable[[float], so.Optimizer]] = {
    "sgd": so.sgd,
    "adamw": so.adamw,
    "lion": so.lion,
    "adafactor": so.adafactor,
    "lamb": so.lamb,
    "torch": lambda lr: so.from_torch(torch.optim.Adam, lr=lr),
}


def changed(name: str) -> float:
    """The same as an optimizer made with the new number."""
    mesh = sf.make_mesh(device="cpu", shard=2)
    make = RATED[name]
    found = []
    for first in (0.1, 0.01):
        ps = sf.shard(scaled(), mesh, sf.full_shard("shard"))
        optimizer = make(first)
        state = optimizer.init(ps)
        for part in [state] if "numbers" in state else state.values():
            part["numbers"]["lr"] = 0.01
        ps, state = optimizer.step(ps, optree.tree_map(torch.ones_like, ps), state)
        found.append(sf.unshard(ps))
    return distance(*found)


@pytest.mark.world(2)
@pytest.mark.parametrize("name", list(RATED))
def test_a_rate_can_be_changed_in_the_state(world: World, name: str) -> None:
    assert world.run(changed, name) == [0.0, 0.0]


WRONG_THINGS: dict[str, Any] = {
    "function": so.adamw,
    "torch's": torch.optim.SGD([torch.ones(1)], 0.1),
    "number": 3,
    "tree": {"w": torch.ones(2)},
    "rates": {"w": 0.1},
    "rule": lambda path, shape, name: 0.1,
}


def stepped(optimizer: so.Optimizer) -> Any:
    ps = {"w": torch.ones(3)}
    return optimizer.step(ps, {"w": torch.ones(3)}, optimizer.init(ps))


loose: Any = so  # for calls that the types refuse


def own(move: Callable[[Any, Any], None]) -> so.Optimizer:
    """An optimizer of the user's, with torch's interface, whose step is `move` of each of its groups."""

    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "count": 0})
            self.count = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                move(self, group)

    return so.from_torch(Own, lr=0.1)


def counting_in_group(optimizer: Any, group: Any) -> None:
    group["count"] += 1
    for x in group["params"]:
        x.sub_(x.grad / group["count"])


def counting_itself(optimizer: Any, group: Any) -> None:
    optimizer.count += 1
    for x in group["params"]:
        x.sub_(x.grad / optimizer.count)


def clipping_all(optimizer: Any, group: Any) -> None:
    norm = torch.stack([x.grad.norm() for x in group["params"]]).norm()
    for x in group["params"]:
        x.sub_(x.grad / norm)


def clipping_each(optimizer: Any, group: Any) -> None:
    for x in group["params"]:
        x.sub_(x.grad * (200 / x.grad.norm()).clamp(max=1))


def decaying_matrices(optimizer: Any, group: Any) -> None:
    for x in group["params"]:
        x.sub_(x.grad + (0.1 * x if x.dim() > 1 else 0))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a gradient of another shape": (
        lambda: so.sgd(0.1).step({"w": torch.ones(3)}, {"w": torch.ones(2)}, so.sgd(0.1).init({"w": torch.ones(3)})),
        "w: the gradient has shape (2,), the parameter (3,)",
    ),
    "no tensor": (lambda: so.adamw(0.1).init({"w": 3}), "w is int; parameters are tensors"),
    "a chain of two optimizers": (lambda: so.chain(so.sgd(0.1), so.adamw(0.1)), "of transforms and then one"),
    "an empty chain": (lambda: so.chain(), "but was given nothing"),
    "a chain without an optimizer": (lambda: so.chain(so.clip_by_value(1.0)), "but was given a Transform"),
    "a function for an optimizer": (lambda: so.ema(WRONG_THINGS["function"], 0.9), "3e-4), got the function adamw"),
    "torch's optimizer": (lambda: so.skip_nonfinite(WRONG_THINGS["torch's"]), "torch's own SGD: see from_torch"),
    "torch's optimizer for its class": (lambda: so.from_torch(WRONG_THINGS["torch's"]), "make must be an optimizer's"),
    "a rule that is none": (lambda: so.masked(so.sgd(0.1), WRONG_THINGS["number"]), "the rule says which parameters"),
    "gradients for a limit": (lambda: so.clip_by_global_norm(WRONG_THINGS["tree"]), "the transform that it gives"),
    "a rule that says nothing": (
        lambda: stepped(so.adamw(0.1, weight_decay=lambda path, shape: None)),
        "w: a rule for a parameter: weight_decay must be a number of 0 or more",
    ),
    "a schedule that says nothing": (
        lambda: stepped(so.sgd(lambda step: None)),
        "the schedule at step 1: lr must be a number of 0 or more",
    ),
    "a rule for a schedule": (
        lambda: so.adamw(WRONG_THINGS["rule"]),
        "adamw: lr must be a number, a 0-d tensor, a function of the step, or a function of a parameter's path and "
        "shape, got a function of (path, shape, name). For rates by parameter pass for example lr=lambda path, shape:",
    ),
    "a rule for torch's schedule": (
        lambda: so.from_torch(torch.optim.SGD, lr=WRONG_THINGS["rule"]),
        "from_torch: lr must be a number, a 0-d tensor, a function of the step, or a function of a parameter's path",
    ),
    "rates by path": (lambda: so.muon(WRONG_THINGS["rates"]), "muon: lr must be a number, a 0-d tensor, a function"),
    "a rule of the path": (
        lambda: stepped(so.lamb(lambda path: 0.1 if path.endswith("w") else 0.2)),
        "lr must be a number, a 0-d tensor, a function of the step, or a function of a parameter's path and shape, got "
        "the function <lambda>, which raised "
        "AttributeError",
    ),
    "nesterov alone": (lambda: so.sgd(0.1, nesterov=True), "needs a momentum"),
    "a limit below 0": (lambda: so.clip_by_global_norm(-1.0), "limit must be a number above 0, got -1.0"),
    "a decay above 1": (lambda: so.ema(so.sgd(0.1), 1.5), "decay must be a number of 0 or more and at most 1, got 1.5"),
    "no steps": (lambda: so.multi_steps(so.sgd(0.1), 0), "every must be an integer of 1 or more, got 0"),
    "a backoff of 0": (
        lambda: so.dynamic_loss_scale(so.sgd(0.1), backoff_factor=0.0),
        "dynamic_loss_scale: backoff_factor must be a number above 0 and at most 1, got 0.0",
    ),
    "a long warmup": (lambda: so.warmup_cosine(0.1, warmup=20, steps=10), "do not fit into steps=10"),
    "a coupled optimizer": (lambda: so.from_torch(torch.optim.Adafactor, lr=0.1), "Adafactor moves an element by"),
    "a count for all parameters": (lambda: own(counting_in_group), "Own remembers something outside of its `state`"),
    "a count of the optimizer's": (lambda: own(counting_itself), "Own remembers something outside of its `state`"),
    "an optimizer of matrices": (lambda: so.from_torch(torch.optim.Muon, lr=0.1), "Muon takes no vectors"),
    "a norm of all gradients": (lambda: own(clipping_all), "Own moves an element by what other elements are"),
    "a norm that is limited late": (lambda: own(clipping_each), "Own moves an element by what its neighbors are"),
    "a decay of matrices alone": (lambda: own(decaying_matrices), "Own moves an element by how many dimensions"),
    "a tensor that is not a rate": (
        lambda: so.muon(0.1, momentum=torch.ones(())),  # type: ignore[arg-type]
        "momentum is a tensor",
    ),
    "bounds that cross": (
        lambda: so.lamb(0.1, min_trust_ratio=2.0, max_trust_ratio=1.0),
        "max_trust_ratio=1.0 is below min_trust_ratio=2.0",
    ),
    "no block": (lambda: so.from_torch(torch.optim.SGD, lr=0.1, block=0), "block must be an integer of 1 or more"),
    "complex matrices": (lambda: so.muon(0.1).init({"w": torch.ones(2, 2) * 1j}), "muon: w is torch.complex64"),
    "complex parameters": (lambda: so.adafactor(0.1).init({"w": torch.ones(2) * 1j}), "adafactor: w is torch"),
    # What people write who know torch's.
    "betas": (lambda: loose.adamw(1e-3, betas=(0.9, 0.95)), "argument 'betas'; betas=(0.9, 0.95) is b1=0.9"),
    "a number of another library": (lambda: loose.adam(1e-3, amsgrad=True), "write shardfn.optim.from_torch("),
    "a number of another optimizer": (lambda: loose.lion(1e-3, eps=1e-8), "it takes lr, b1, b2, weight_decay"),
    "parameters": (lambda: loose.muon([torch.ones(2)], lr=1e-3), "'lr'; an optimizer is made of numbers by name"),
    "parameters alone": (
        lambda: loose.sgd(iter([torch.ones(2)])), "optimizer gets parameters by state = optimizer.init(params)"
    ),
    "a module": (lambda: loose.soap(torch.nn.Linear(1, 1)), "shape, got a Linear. The optimizer gets parameters by"),
    "no rate": (
        lambda: loose.kfac(), "kfac: missing a required argument: 'lr'; an optimizer is made of numbers by name"
    ),
    "zero_grad": (lambda: loose.sgd(0.1).zero_grad(), "no .zero_grad: gradients are values"),
    "groups": (lambda: loose.chain(loose.sgd(0.1)).param_groups, "no .param_groups: its numbers are arguments"),
    "what no optimizer has": (lambda: loose.sgd(0.1).model, "an Optimizer has no .model: it has init and step"),
    "one tensor twice": (lambda: so.sgd(0.1).init((lambda x: {"a": x, "b": x})(torch.ones(2))), "at two places"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG))
def test_what_makes_no_sense_is_refused(case: str) -> None:
    act, says = WRONG[case]
    with pytest.raises((ValueError, TypeError, AttributeError)) as caught:
        act()
    assert says in str(caught.value)


# What takes each number, and what it is when it makes sense.
NUMBERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sgd": (so.sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (so.adam, {"lr": 0.1, "b1": 0.9, "b2": 0.9, "eps": 1e-8, "weight_decay": 0.1}),
    "adamw": (so.adamw, {"lr": 0.1, "b1": 0.9, "b2": 0.9, "eps": 1e-8, "weight_decay": 0.1}),
    "lion": (so.lion, {"lr": 0.1, "b1": 0.9, "b2": 0.9, "weight_decay": 0.1}),
    "sophia": (so.sophia, {"lr": 0.1, "b1": 0.9, "b2": 0.9, "gamma": 0.1, "eps": 1e-8, "weight_decay": 0.1}),
    "adafactor": (
        so.adafactor,
        {"lr": 0.1, "decay": -0.8, "clip": 1.0, "eps": 1e-8, "least": 1e-3, "weight_decay": 0.1},
    ),
    "lamb": (
        so.lamb, {"lr": 0.1, "b1": 0.9, "b2": 0.9, "eps": 1e-8, "min_trust_ratio": 0.1, "max_trust_ratio": 9.0,
                  "weight_decay": 0.1}
    ),
    "muon": (so.muon, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "iterations": 5}),
    "shampoo": (so.shampoo, {"lr": 0.1, "b1": 0.9, "b2": 0.9, "eps": 1e-8, "ridge": 1e-8, "exponent": 0.5,
                             "weight_decay": 0.1, "every": 2, "block": 9}),
    "kl_shampoo": (so.kl_shampoo, {"lr": 0.1, "b1": 0.9, "b2": 0.9, "eps": 1e-8, "ridge": 1e-8, "initial": 0.5,
                                   "weight_decay": 0.1, "every": 2, "block": 9}),
    "soap": (so.soap, {"lr": 0.1, "b1": 0.9, "b2": 0.9, "eps": 1e-8, "weight_decay": 0.1, "every": 2, "block": 9}),
    "from_torch": (lambda **k: so.from_torch(torch.optim.Adam, **k), {"lr": 0.1, "block": 1}),
    "clip_by_global_norm": (so.clip_by_global_norm, {"limit": 1.0}),
    "clip_by_value": (so.clip_by_value, {"limit": 1.0}),
    "ema": (lambda **k: so.ema(so.sgd(0.1), **k), {"decay": 0.9}),
    "multi_steps": (lambda **k: so.multi_steps(so.sgd(0.1), **k), {"every": 2}),
    "dynamic_loss_scale": (
        lambda **k: so.dynamic_loss_scale(so.sgd(0.1), **k),
        {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2},
    ),
    "warmup_cosine": (so.warmup_cosine, {"peak": 0.1, "warmup": 2, "steps": 9, "end": 0.0}),
    "warmup_linear": (so.warmup_linear, {"peak": 0.1, "warmup": 2, "steps": 9, "end": 0.0}),
    "wsd": (so.wsd, {"peak": 0.1, "warmup": 2, "decay": 3, "steps": 9, "end": 0.0}),
}  # fmt: skip
OPTIONAL = {("adafactor", "eps"), ("lamb", "max_trust_ratio"), ("shampoo", "exponent")}
SENSELESS = ["1e-3", True, [0.1], 1j, torch.ones(2), float("nan"), float("inf"), -1.0, -3]


@pytest.mark.parametrize("name", list(NUMBERS))
def test_a_number_that_makes_no_sense_is_refused_by_name(name: str) -> None:
    make, numbers = NUMBERS[name]
    make(**numbers)
    for key, value in itertools.product(numbers, [*SENSELESS, None]):
        if (value is None and (name, key) in OPTIONAL) or (
            name == "adafactor" and key == "decay" and repr(value)[0] == "-"
        ):
            continue  # which make sense
        with pytest.raises((TypeError, ValueError)) as caught:
            make(**numbers | {key: value})
        assert str(caught.value).startswith(f"{name}: {key}")


@pytest.mark.parametrize(
    "name", ["sgd", "adam", "adamw", "lion", "sophia", "adafactor", "lamb", "muon", "shampoo", "kl_shampoo", "soap"]
)
def test_numbers_at_the_ends_of_their_ranges_are_taken(name: str) -> None:
    make, numbers = NUMBERS[name]
    make(**numbers | {"lr": 0, "weight_decay": 0})
    make(**numbers | {"lr": torch.tensor(0.1), "weight_decay": decay, "donate": False})
    make(**numbers | {"lr": so.warmup_cosine(0.1, warmup=0, steps=0)})


RATE_FREE: dict[str, Callable[[Any], so.Optimizer]] = {
    "sgd": lambda lr: so.sgd(lr, momentum=0.9, weight_decay=decay),
    "adam": so.adam,
    "adamw": lambda lr: so.adamw(lr, weight_decay=decay),
    "lion": lambda lr: so.lion(lr, weight_decay=decay),
    "sophia": lambda lr: told_of_squares(so.sophia(lr, weight_decay=decay)),
    "adafactor": so.adafactor,
    "lamb": lambda lr: so.lamb(lr, weight_decay=decay),
    "muon": lambda lr: so.masked(so.muon(lr, dtype=None, weight_decay=decay), is_matrix, so.lion(lr)),
    "soap": lambda lr: so.soap(lr, weight_decay=decay),
}


@pytest.mark.parametrize("name", list(RATE_FREE))
def test_a_rate_may_be_a_tensor_where_parameters_are_overwritten(name: str) -> None:
    found = []
    for rate in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        ps, _ = trained(RATE_FREE[name](rate), scaled(), lambda ps, _: optree.tree_map(torch.sin, ps))
        found.append(ps)
    assert distance(*found) < 1e-12


# --- parameters of any kind ---


ODD: dict[str, Callable[[], Any]] = {
    "of all kinds": lambda: {
        "sizes": {"rows": normal(0, 3, seed=1), "w": normal(3, 4, seed=2), "columns": normal(3, 0, seed=3),
                  "scalar": normal(seed=4), "one": normal(1, seed=5), "none": normal(0, seed=6),
                  "one of one": normal(1, 1, seed=7)},
        "empty": {"rows": normal(0, 2, seed=1), "both": normal(0, 0, seed=2)},
        "numbers": {"w": normal(2, 2, seed=8), "i": torch.arange(3), "b": torch.tensor(True), "nothing": None},
        "frozen": {"w": normal(3, 2, seed=9)},
        "beside": {"w": normal(5, 2, seed=10), "frozen": normal(3, seed=11)},
        "no leaves": {},
    },
    "all frozen": lambda: {"a": {"frozen": normal(3, 2, seed=1)}, "frozen": normal(3, seed=2)},
    "no parameters": lambda: {"a": {}, "b": []},
}  # fmt: skip


def sines(tree: Any) -> Any:
    """Gradients of all that is trained."""

    def one(leaf: Any) -> Any:
        if type(leaf) is sf.shards.FlatShard:
            found: Any = torch.sin(leaf.values) if leaf.layout.trainable else None
            return sf.shards.FlatShard(found, leaf.layout)
        return torch.sin(leaf) if leaf.is_floating_point() else None

    return optree.tree_map(one, tree, is_leaf=lambda x: type(x) is sf.shards.FlatShard)


def of_any_kind(n: int) -> list[Any]:
    mesh = data_mesh(n)
    every = OPTIMIZERS | {"dynamic_loss_scale": lambda **k: so.dynamic_loss_scale(so.adamw(0.02, **k), scale=2.0, **k)}
    wrong = []
    for kind, name, donate in itertools.product(ODD, every, (True, False)):
        strategy = sf.strategies.zero1(DATA) if donate and n == 4 else sf.full_shard(DATA)
        flat = sf.shard(ODD[kind](), mesh, strategy, frozen=[r".*frozen.*"] if "frozen" in str(ODD[kind]()) else [])
        whole, rest = sf.shards.partition(ODD[kind](), lambda path, shape: "frozen" not in path)
        want, _ = trained(every[name](donate=True), whole, lambda ps, _: sines(ps))
        got, _ = trained(every[name](donate=donate), flat, lambda ps, _: sines(ps))
        pairs = zip(optree.tree_leaves(sf.unshard(got)), optree.tree_leaves(sf.shards.combine(want, rest)), strict=True)
        if not all(torch.allclose(x, y, rtol=0, atol=1e-12) for x, y in pairs):
            wrong.append((kind, name, donate))
        assert so.all_finite(got)
        assert abs(so.norms(got).total - so.global_norm(got).item()) < 1e-12
    return wrong


@pytest.mark.parametrize(
    "world", [(1, "processes"), (2, "processes"), (4, "processes")], indirect=True, ids=["1", "2", "4"]
)
def test_every_optimizer_takes_parameters_of_any_size_and_kind(world: World) -> None:
    assert world.with_deadline(120).run(of_any_kind, world.size) == [[]] * world.size


# --- arguments that do not belong together ---


def ones(flat: Any, rank: int) -> Any:
    """Gradients as `value_and_grad` gives them."""

    def one(node: sf.shards.FlatShard) -> sf.shards.FlatShard:
        fine = node.layout.state_layout
        return sf.shards.FlatShard(torch.ones(fine.num_elements_on(rank), dtype=node.values.dtype), fine)

    return optree.tree_map(one, flat, is_leaf=lambda x: type(x) is sf.shards.FlatShard)


Call = Callable[..., Any]
MISTAKES: dict[str, tuple[Call, str]] = {
    "swapped": (lambda o, p, g, s, w: o.step(g, p, s), "step takes (params, grads, state): the "),
    "as optax takes them": (lambda o, p, g, s, w: o.step(g, s, p), "which is where optax's update takes it"),
    "state first": (lambda o, p, g, s, w: o.step(s, p, g), "the state came as the first argument"),
    "state last but one": (lambda o, p, g, s, w: o.step(p, s, g), "the state came as the second argument"),
    "no state": (lambda o, p, g, s, w: o.step(p, g, None), "the state is None"),
    "value and gradients": (lambda o, p, g, s, w: o.step(p, (torch.ones(()), g), s), "pass the second of it"),
    "whole gradients": (lambda o, p, g, s, w: o.step(p, scaled(), s), "are whole, the parameters are cut"),
    "whole parameters": (lambda o, p, g, s, w: o.step(scaled(), g, s), "are cut, the parameters are whole"),
    "nothing cut but the state": (lambda o, p, g, s, w: o.step(scaled(), scaled(), s), "of other parameters: "),
    "another stage's gradient": (
        lambda o, p, g, s, w: o.step(p, {**g, "blocks": g["blocks"][::-1]}, s),
        "blocks.0: the gradient is of other parameters: of blocks.2: ",
    ),
    "too few stages": (lambda o, p, g, s, w: o.step(p, {**g, "blocks": g["blocks"][:2]}, s), "[0, 1] at blocks"),
    "a key too few": (lambda o, p, g, s, w: o.step(p, {"embed": g["embed"]}, s), "the gradients have [embed], the"),
    "a tensor for a stage": (lambda o, p, g, s, w: o.step(p, g | {"scale": normal(6, seed=3)}, s), "are whole"),
    "no gradients": (lambda o, p, g, s, w: o.step(p, None, s), "there is None for a dict"),
    "another model's gradients": (lambda o, p, g, s, w: o.step(p, ones(w, 0), s), "is of other parameters"),
    "another model's state": (lambda o, p, g, s, w: o.step(p, g, o.init(w)), "of other parameters: "),
    "another optimizer's state": (lambda o, p, g, s, w: o.step(p, g, {"step": 0}), "state is of another optimizer"),
    "parameters for a state": (lambda o, p, g, s, w: o.step(p, g, p), "this state is of another optimizer"),
    "a piece of another length": (
        lambda o, p, g, s, w: o.step(optree.tree_map(lambda x: x[:3], p), optree.tree_map(lambda x: x[:3], g), s),
        "a tensor of shape (3,), but the layout",
    ),
}  # fmt: skip
OF_SLOTS = ("nothing cut but the state", "another model's state")
WRAPPERS: dict[str, Callable[..., so.Optimizer]] = {
    "masked": lambda **k: so.masked(so.adamw(0.1), lambda path, shape: path != "embed.e"),
    "accumulate": lambda **k: so.multi_steps(so.sgd(0.1), 2),
    "ema": lambda **k: so.ema(so.sgd(0.1), 0.9),
    "skip_nonfinite": lambda **k: so.skip_nonfinite(so.sgd(0.1)),
    "dynamic_loss_scale": lambda **k: so.dynamic_loss_scale(so.sgd(0.1)),
    "shard_state": lambda **k: so.shard_state(so.sgd(0.1, momentum=0.9), "replica"),
    "clip_by_value": lambda **k: so.chain(so.clip_by_value(1.0), so.lion(0.1)),
}


def mistaken(strategy: sf.Placement, names: list[str], steps: list[int]) -> list[str]:
    """What is not refused, or not in the right words, or only after something has changed."""
    mesh = sf.make_mesh(device="cpu", replica=1, shard=2)
    wider = scaled() | {"blocks": [p | {"more": normal(4, seed=9)} for p in scaled()["blocks"]]}
    other = sf.shard(wider, mesh, strategy)
    missed = []
    for name in names:
        o, flat = (OPTIMIZERS | WRAPPERS)[name](donate=True), sf.shard(scaled(), mesh, strategy)
        state = o.init(flat)
        for step in range(2):
            if step not in steps:
                flat, state = o.step(flat, ones(flat, mesh.get_rank()), state)
                continue
            grads = ones(flat, mesh.get_rank())
            before = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (flat, grads, state))
            for mistake, (call, says) in MISTAKES.items():
                if mistake in OF_SLOTS and (
                    "of torch" in name or name in ("sgd", "skip_nonfinite", "dynamic_loss_scale")
                ):
                    continue  # these remember nothing of a parameter, or not yet
                try:
                    call(o, flat, grads, state, other)
                    missed.append(f"{name}, {mistake}: passed")
                except (TypeError, ValueError) as error:
                    if says not in str(error):
                        missed.append(f"{name}, {mistake}: {error}")
            for x, y in zip(optree.tree_leaves((flat, grads, state)), optree.tree_leaves(before), strict=True):
                if not (torch.equal(x, y) if isinstance(x, Tensor) else x == y):
                    missed.append(f"{name}: changed something")
    return missed


@pytest.mark.world(2)
def test_a_step_refuses_what_does_not_belong_together(world: World) -> None:
    every = [*OPTIMIZERS, *WRAPPERS]
    assert world.with_deadline(90).run(mistaken, STRATEGIES["hybrid_shard"], every, [1]) == [[], []]
    few = ["sgd-nesterov", "muon", "everything"]
    assert world.with_deadline(90).run(mistaken, STRATEGIES["zero1"], few, [0, 1]) == [[], []]


def test_a_swapped_call_is_noticed_wherever_the_parameters_are_known() -> None:
    optimizer = so.sgd(0.1, donate=False)
    ps = scaled()
    state = optimizer.init(ps)
    for _ in range(2):
        grads = optree.tree_map(torch.ones_like, ps)
        with pytest.raises(ValueError, match="the parameters came as grads"):
            optimizer.step(grads, ps, state)
        ps, state = optimizer.step(ps, grads, state)
    optimizer.step(ps, ps, state)  # the gradient of half of a sum of squares
    optimizer.step(optree.tree_map(torch.clone, ps), optree.tree_map(torch.clone, ps), state)


@pytest.mark.parametrize("clip", [so.clip_by_global_norm(1.0), so.clip_by_value(1.0)])
def test_a_transform_refuses_what_does_not_belong_together(clip: so.Transform) -> None:
    ps, grads = scaled(), optree.tree_map(torch.ones_like, scaled())
    state = clip.init(ps)
    clip.update(ps, grads, state)
    clip.update(grads=grads, state=state, params=ps)
    for wrong, says in (
        ((grads, state, ps), "update takes (params, grads, state): the state came as the second argument"),
        ((state, grads, ps), "the state came as the first argument"),
        ((ps, (torch.ones(()), grads), state), "pass the second of it"),
        ((ps, grads, None), "the state is None"),
        ((ps, {"embed": grads["embed"]}, state), "the gradients have [embed]"),
        ((grads, ps, state), "the parameters came as grads"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            clip.update(*wrong)
        assert says in str(caught.value)


def trace(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """A transform whose state is like the parameters, with its arguments in optax's order."""
    del params
    made = optree.tree_map(lambda g, m: g + 0.5 * m, grads, state)
    return made, made


def test_one_order_of_arguments_however_a_transform_names_them() -> None:
    ps = scaled()
    grads = optree.tree_map(torch.ones_like, ps)
    momentum = so.Transform(lambda params: optree.tree_map(torch.zeros_like, params), trace)
    state = momentum.init(ps)
    for wrong, place in (((grads, state, ps), "state"), ((grads, ps, state), "grads")):
        with pytest.raises(ValueError, match=rf"update takes \(params, grads, state\): the parameters came as {place}"):
            momentum.update(*wrong)
    made, state = momentum.update(ps, grads, state)
    made, state = momentum.update(params=ps, grads=grads, state=state)
    assert all(x.eq(1.5).all() for x in optree.tree_leaves(made))
    optimizer = so.chain(momentum, so.sgd(1.0, donate=False))
    moved, _ = optimizer.step(ps, grads, optimizer.init(ps))
    assert all(torch.equal(p - 1, q) for p, q in zip(optree.tree_leaves(ps), optree.tree_leaves(moved), strict=True))
    for other in (lambda g, s, p: (g, s), lambda params, grads: (grads, ()), trace.__get__(1)):
        with pytest.raises(TypeError, match="name its arguments params, grads and state, in any order"):
            so.Transform(lambda params: (), other)


def unevenly(x: Tensor) -> Tensor:
    """The same numbers, with gaps between them in memory."""
    gaps = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]
    return gaps.copy_(x)


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": torch.clone,
    "by columns": lambda x: x.mT.contiguous().mT if x.ndim == 2 else x.clone(),
    "with gaps": unevenly,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "rounded"])
def test_parameters_in_16_bits_go_where_those_in_32_go(name: str, donate: bool, dtype: torch.dtype) -> None:
    """With as many numbers as a processor takes at once, and more; what is rounded at random is tested elsewhere."""
    start = {"w": normal(8, 9, seed=1).to(dtype), "b": normal(37, seed=2).to(dtype)}
    went = []
    for kind in (dtype, torch.float32):
        ps = optree.tree_map(lambda x, kind=kind: x.to(kind, copy=True), start)
        gs = optree.tree_map(lambda x: (x + x.sign()).to(dtype).to(x.dtype), ps)  # squares of small ones are zero
        optimizer = OPTIMIZERS[name](donate=donate)
        state = optimizer.init(ps)
        for _ in range(2):
            ps, state = optimizer.step(ps, gs, state)
        went.append(optree.tree_leaves(ps))
    for low, high, x in zip(*went, optree.tree_leaves(start), strict=True):
        step = high - x.float()
        assert step.abs().min() > 0
        eps = torch.finfo(dtype).eps
        assert (
            (low.float() - high).abs() <= 2 * eps * high.abs().maximum(x.float().abs()) + 8 * eps * step.abs()
        ).all()


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "fused adamw of torch"])
def test_how_a_tensor_lies_in_memory_does_not_matter(name: str, donate: bool) -> None:
    """As the gradients of `x @ w.T` do, which lie by columns, and of a sum, whose elements are one."""
    every = OPTIMIZERS | {"fused adamw of torch": lambda donate: so.from_torch(torch.optim.AdamW, lr=0.01, fused=True)}
    ps = {"w": normal(4, 3, seed=1), "b": normal(3, seed=2)}

    def run(of_params: Callable[[Tensor], Tensor], of_grads: Callable[[Tensor], Tensor]) -> Any:
        given = optree.tree_map(of_params, ps)
        return trained(every[name](donate=donate), given, lambda p, n: optree.tree_map(of_grads, sines(ps)))[0]

    want = run(torch.clone, torch.clone)
    for first, second in itertools.product(ORDERS.values(), repeat=2):
        assert distance(run(first, second), want) < 1e-12
    same = [run(torch.clone, f) for f in (lambda x: x.new_ones(()).expand(x.shape), lambda x: x.new_ones(x.shape))]
    assert distance(*same) < 1e-12


@pytest.mark.parametrize("name", ["sgd-nesterov", "adam", "adamw", "lion"])
def test_a_state_of_another_dtype_is_refused(name: str) -> None:
    optimizer, ps = OPTIMIZERS[name](donate=True), scaled()
    state = optimizer.init(ps)
    ps = optree.tree_map(torch.Tensor.float, ps)
    with pytest.raises(ValueError, match=r"the parameter is torch\.float32, but the state torch"):
        optimizer.step(ps, ps, state)


# --- results that are dropped ---


@pytest.mark.parametrize("name", [*OPTIMIZERS, *WRAPPERS])
def test_a_state_that_earlier_steps_have_used_up_is_refused(name: str) -> None:
    o, ps = (OPTIMIZERS | WRAPPERS)[name](donate=True), scaled()
    state, grads = o.init(ps), optree.tree_map(torch.ones_like, ps)
    for _ in range(3):
        ps, state = o.step(ps, grads, state)

    def drop() -> None:
        for _ in range(8):
            o.step(ps, optree.tree_map(torch.clone, grads), state)

    with pytest.raises(ValueError, match=r"already used by the 2 steps before.*params, state = optimizer\.step"):
        drop()
    ps, state = o.step(optree.tree_map(torch.clone, ps), grads, state)  # those may be others, put back
    ps, state = o.step(ps, grads, state)


def test_a_state_may_be_used_again_where_that_is_meant() -> None:
    ps = scaled()
    grads = optree.tree_map(torch.ones_like, ps)
    pure, donating = so.adamw(0.1, donate=False), so.adamw(0.1)
    state = pure.init(ps)
    for _ in range(4):
        pure.step(ps, grads, state)  # overwrites nothing
    before = optree.tree_map(torch.clone, ps)
    state = donating.init(ps)
    for _ in range(4):
        donating.step(ps, grads, state)
        optree.tree_map_(lambda x, y: x.copy_(y), ps, before)  # put back
    for _ in range(4):
        ps, _ = donating.step(ps, grads, donating.init(ps))
    for rate in (0.1, torch.tensor(0.1)):
        plain = so.sgd(rate)
        for _ in range(4):
            ps, _ = plain.step(ps, grads, dict(plain.init(ps)))
    for _ in range(4):
        ps, state = donating.step(ps, grads, state | {"step": 0})
    for _ in range(2):
        for _ in range(2):
            ps, state = donating.step(ps, grads, state)
        state = dict(state, step=0)

    def step(params: Any, grads: Any, state: Any) -> Any:
        for x, g in zip(optree.tree_leaves(params), optree.tree_leaves(grads), strict=True):
            x.sub_(g)
        return params, state

    own = so.Optimizer(lambda params: {"every": 3}, step)
    state = own.init(ps)
    for _ in range(4):
        ps, state = own.step(ps, grads, state)


def whitened(_: Any, x: Tensor) -> Tensor:
    """What needs the whole matrix, as Shampoo does."""
    CALLS.append(tuple(x.shape))
    return torch.linalg.inv(x @ x.mT + torch.eye(len(x), dtype=x.dtype)) @ x


CALLS: list[tuple[int, ...]] = []


def by_owners(strategy: Any, everyone: bool) -> tuple[float, int]:
    """How far a function of whole matrices is from that of one process, and how many matrices this rank worked on."""
    shapes = {"a": (6, 10), "b": (7, 3), "c": (0, 4), "d": (5, 5)}
    whole = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    mesh = sf.make_mesh(replica=2, shard=-1, device="cpu")
    flat = sf.shard({"stage": whole}, mesh, strategy)
    CALLS.clear()
    known = units(flat)
    values = [unit.values for unit in known.each]
    made = (on_everyone if everyone else on_owner)(known.each, values, whitened, muon_cost)
    calls = len(CALLS)
    got = sf.unshard(known.with_values(made))["stage"]
    wanted = {name: whitened(None, x) for name, x in whole.items()}
    return max((got[name] - x).abs().max().item() for name, x in wanted.items() if x.numel()), calls


@pytest.mark.world(4)
def test_a_function_of_whole_matrices_is_done_once_by_their_owners(world: World) -> None:
    for strategy in (sf.hybrid_shard(shard="shard", replica="replica"), sf.full_shard(("replica", "shard"))):
        found = world.run(by_owners, strategy, False)
        assert worst(error for error, _ in found) < 1e-12
        assert sum(calls for _, calls in found) == 3
        assert max(calls for _, calls in found) == 1
        found = world.run(by_owners, strategy, True)
        assert worst(error for error, _ in found) < 1e-12
        assert [calls for _, calls in found] == [3] * 4


@pytest.mark.parametrize("make", [so.adam, so.adamw, so.sgd, functools.partial(so.sgd, momentum=0.9)])
def test_a_rate_that_a_kernel_would_round_moves_float64_as_exactly(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's fused kernels read a rate that is a tensor, as in a captured step, as float32."""
    found = []
    for rate, exact in ((0.0123, False), (torch.tensor(0.0123, dtype=torch.float64), True)):
        monkeypatch.setattr(elementwise, "_too_exact", lambda lr, p, exact=exact: exact)
        optimizer = make(rate, weight_decay=0.1)
        ps = {"w": torch.linspace(-1, 1, 50, dtype=torch.float64), "v": torch.ones(3, dtype=torch.float64)}
        state = optimizer.init(ps)
        for _ in range(3):
            ps, state = optimizer.step(ps, optree.tree_map(torch.sin, ps), state)
        slots = [state[name] for name in ("mean", "square", "momentum") if name in state]
        found.append(optree.tree_leaves(ps) + optree.tree_leaves(slots))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-16)


def with_other_numbers(strategy: str, rates: dict[str, Any]) -> str:
    """The error of a step whose optimizer has other numbers on rank 0."""
    mesh = sf.make_mesh(shard=2, device="cpu")
    params = sf.shard({"w": torch.ones(8)}, mesh, sf.strategies.from_name(strategy))
    optimizer = so.chain(so.clip_by_global_norm(1.0), so.adamw(**(rates if dist.get_rank() else {"lr": 1e-2})))
    state = optimizer.init(params)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(params: Any, state: Any, x: Tensor) -> Any:
        layer = sf.stage(lambda p, x: (p["w"] * x).sum())
        _, grads = sf.value_and_grad(lambda p: sf.pmean(layer(p, x), "shard"))(params)
        return optimizer.step(params, grads, state)

    return told(lambda: step(params, state, torch.ones(8)))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "zero1"])
@pytest.mark.parametrize("rates", [{"lr": 1e-3}, {"lr": 1e-2, "weight_decay": 0.3}, {"lr": 1e-2}], ids=str)
def test_an_optimizer_with_other_numbers_on_a_rank_is_an_error(strategy: str, rates: dict[str, Any]) -> None:
    found = world(2).with_deadline(60).run(with_other_numbers, strategy, rates)
    assert len(set(found)) == 1
    if rates == {"lr": 1e-2}:
        assert found[0] == "it was done"
    else:
        (name,) = {"lr", "weight_decay"} & rates.keys() if len(rates) == 1 else {"weight_decay"}
        assert f"the optimizer's 1.numbers.{name} varies along 'shard'" in found[0]


class Launching(torch.optim.AdamW):
    """As an optimizer of another library, which starts a kernel for each tensor: CUDA starts none for no elements."""

    def step(self, closure: Any = None) -> Any:
        assert all(p.numel() and p.grad.numel() for group in self.param_groups for p in group["params"])
        return super().step(closure)


def decays(p: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([{"params": [p[k]], "weight_decay": d} for k, d in (("w", 0.1), ("b", 0))], 0.1)]


RULED: dict[str, tuple[Callable[[], so.Optimizer], Callable[[Any], list[torch.optim.Optimizer]]]] = {
    "a rule": (
        lambda: so.from_torch(torch.optim.AdamW, lr=0.1, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1)),
        decays,
    ),
    "kernels": (
        lambda: so.from_torch(Launching, lr=0.1, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1)),
        decays,
    ),
    "masked": (
        lambda: so.masked(so.from_torch(torch.optim.NAdam, lr=0.1), r"b", so.from_torch(torch.optim.RMSprop, lr=0.1)),
        lambda p: [torch.optim.NAdam([p["b"]], 0.1), torch.optim.RMSprop([p["w"]], 0.1)],
    ),
}  # fmt: skip
RULED_SHAPES = {"w": (5, 4), "b": (3,)}  # with several ranks, only the first has elements of `b`


def of_two_dtypes() -> float:
    """How far two steps are from torch's, of a stage whose parameters lie in two buffers."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    whole = [{"a": torch.ones(5, dtype=torch.float64), "b": torch.ones(5)} for _ in range(2)]
    params, optimizer = sf.shard(whole, mesh, sf.full_shard("shard")), so.from_torch(torch.optim.RMSprop, lr=0.1)
    state = optimizer.init(params)
    want = [x.clone().requires_grad_() for x in optree.tree_leaves(whole)]
    theirs = torch.optim.RMSprop(want, lr=0.1)
    for _ in range(2):
        params, state = optimizer.step(params, optree.tree_map(torch.sin, params), state)
        for x in want:
            x.grad = x.detach().sin()
        theirs.step()
    found = optree.tree_leaves(sf.unshard(params))
    return worst(float((x - y.detach()).abs().max()) for x, y in zip(found, want, strict=True))


def test_an_optimizer_of_torch_moves_each_buffer_of_a_stage_by_its_own_memory() -> None:
    assert worst(world(2).run(of_two_dtypes)) < 1e-6


def ruled(case: str, folder: str, resumes: bool) -> Any:
    """The parameters after three steps, saved after two of them; or loaded there, with one step more."""
    mesh, optimizer = sf.make_mesh(shard=-1, device="cpu"), RULED[case][0]()
    params = sf.shard(
        {k: torch.ones(s, dtype=torch.float64) for k, s in RULED_SHAPES.items()}, mesh, sf.full_shard("shard")
    )

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)  # which compares what ranks pass
    def step(params: Any, state: Any) -> Any:
        return optimizer.step(params, optree.tree_map(torch.sin, params), state)

    params, state = step(params, optimizer.init(params))
    if resumes:
        params, state = sf.checkpoint.load(folder, (params, state))
    else:
        params, state = step(params, state)
        sf.checkpoint.save(folder, (params, state))
    return sf.unshard(step(params, state)[0])


@pytest.mark.parametrize("case", list(RULED))
def test_an_optimizer_of_torch_has_one_structure_of_states_whatever_ranks_hold(case: str, tmp_path: Path) -> None:
    want = {k: torch.ones(s, dtype=torch.float64, requires_grad=True) for k, s in RULED_SHAPES.items()}
    theirs = RULED[case][1](want)
    for _ in range(3):
        for p in want.values():
            p.grad = p.detach().sin()
        for optimizer in theirs:
            optimizer.step()
    for ranks, resumes in ((2, False), (4, True), (1, True)):
        for found in world(ranks).run(ruled, case, str(tmp_path / "saved"), resumes):
            assert distance(found, optree.tree_map(torch.detach, want)) < 1e-14


def in_blocks() -> float:
    """How far parameters are from those of one process, where a rank's elements are whole blocks, without a rest."""
    want = torch.ones(8, dtype=torch.float64, requires_grad=True)
    theirs, optimizer = torch.optim.AdamW([want], 0.1), so.from_torch(Launching, block=4, lr=0.1)
    mesh = sf.make_mesh(shard=2, device="cpu")
    params = sf.shard({"w": torch.ones(8, dtype=torch.float64)}, mesh, sf.full_shard("shard"))
    state = optimizer.init(params)
    for _ in range(3):
        want.grad = want.detach().sin()
        theirs.step()
        params, state = optimizer.step(params, optree.tree_map(torch.sin, params), state)
    return distance(sf.unshard(params)["w"], want.detach())


def test_an_optimizer_of_another_library_gets_no_rest_without_elements() -> None:
    assert worst(world(2).run(in_blocks)) < 1e-14
