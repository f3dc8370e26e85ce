"""Hyperparameters by parameter and by step, beside parameter groups of torch on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
import shardfn.optim as so
from shardfn.testing import World
from tests.models import DATA, STRATEGIES, data_mesh, distance, normal, params
from tests.reference import worst

STEPS, DEPTH = 4, 4


def number_of(path: str) -> int:
    first, *rest = path.split(".")
    return 0 if first == "embed" else DEPTH + 1 if first == "head" else 1 + int(rest[0])


schedule = so.warmup_cosine(0.05, warmup=2, steps=8)


def layerwise(path: str, shape: tuple[int, ...]) -> Any:
    """The rates of timm and of BEiT: less by a factor for each layer below the head."""
    factor = 0.75 ** (DEPTH + 1 - number_of(path))
    return lambda step: factor * schedule(step)


def vectors_undecayed(path: str, shape: tuple[int, ...]) -> float:
    return 0.1 if len(shape) > 1 else 0.0


def doubled_for_vectors(path: str, shape: tuple[int, ...]) -> float:
    """As LoRA+ takes a larger rate for one of the two matrices."""
    return 0.02 * (16 if path.endswith(".b") else 1)


def fan_in(path: str, shape: tuple[int, ...]) -> float:
    """As muP scales the rate of matrices."""
    return 0.03 / shape[0] if len(shape) > 1 else 0.03


def meeting(path: str, shape: tuple[int, ...]) -> Any:
    """Rates that are equal in the first and the last step alone."""
    factor = 1.0 + 2 * path.endswith(".w") + path.endswith(".b")
    return lambda step: 0.03 * (1.0 if step == 1 else 0.0 if step == STEPS else factor)


Groups = list[dict[str, Any]]


def groups_of(named: dict[str, Tensor], **rules: Callable[..., Any]) -> Groups:
    """One group of torch for each parameter."""
    return [
        {"params": [x], **{name: rule(path, tuple(x.shape)) for name, rule in rules.items()}}
        for path, x in named.items()
    ]


Made = tuple[so.Optimizer, Callable[[dict[str, Tensor]], torch.optim.Optimizer], Callable[..., Any] | None]
CASES: dict[str, Made] = {
    "layer-wise decay": (
        so.adamw(layerwise, weight_decay=vectors_undecayed),
        lambda named: torch.optim.AdamW(groups_of(named, weight_decay=vectors_undecayed), 0.0),
        layerwise,
    ),
    "one rate for some": (
        so.adamw(doubled_for_vectors),
        lambda named: torch.optim.AdamW(groups_of(named, lr=doubled_for_vectors)),
        None,
    ),
    "by width": (
        so.sgd(fan_in, momentum=0.9),
        lambda named: torch.optim.SGD(groups_of(named, lr=fan_in), momentum=0.9),
        None,
    ),
    "schedule of another number": (
        so.adam(0.02, weight_decay=lambda step: 0.1 / step),
        lambda named: torch.optim.Adam(list(named.values()), 0.02),
        None,
    ),
    "of torch, rates that meet": (
        so.from_torch(torch.optim.Adam, lr=meeting),
        lambda named: torch.optim.Adam(groups_of(named, lr=lambda path, shape: 0.0)),
        meeting,
    ),
    "of torch": (
        so.from_torch(torch.optim.RMSprop, lr=layerwise, weight_decay=vectors_undecayed),
        lambda named: torch.optim.RMSprop(groups_of(named, weight_decay=vectors_undecayed)),
        layerwise,
    ),
}


def gradient(ps: Any, number: int) -> Any:
    return optree.tree_map(lambda x: (x * (number + 1)).sin() + 0.1, ps)


def by_torch(name: str) -> Any:
    _, make, rates = CASES[name]
    leaves, tree = optree.tree_flatten(params(DEPTH))
    leaves = [x.clone().requires_grad_() for x in leaves]
    paths = [".".join(map(str, path)) for path in optree.tree_paths(params(DEPTH))]
    optimizer = make(dict(zip(paths, leaves, strict=True)))
    for number in range(STEPS):
        for group in optimizer.param_groups:
            path = next(p for p, x in zip(paths, leaves, strict=True) if x is group["params"][0])
            if rates is not None:
                group["lr"] = rates(path, ())(number + 1)
            if name == "schedule of another number":
                group["weight_decay"] = 0.1 / (number + 1)
        for x in leaves:
            x.grad = gradient(x.detach(), number)
        optimizer.step()
    return optree.tree_unflatten(tree, [x.detach() for x in leaves])


def by_shards(name: str, strategy: str, n: int) -> float:
    mesh = data_mesh(n)
    optimizer = CASES[name][0]
    ps = sf.shard(params(DEPTH), mesh, STRATEGIES[strategy])
    state = optimizer.init(ps)
    for number in range(STEPS):
        grads = sf.shard_map(
            lambda p, number=number: gradients_of(p, number), mesh=mesh, in_specs=(...,), out_specs=...
        )(ps)
        ps, state = optimizer.step(ps, grads, state)
    return distance(sf.unshard(ps), by_torch(name))


def gradients_of(ps: Any, number: int) -> Any:
    """Gradients with the layout of the parameters, of a loss whose gradient is `gradient`."""

    @sf.stage
    def part(p: Any) -> Tensor:
        n = number + 1
        return torch.stack([(0.1 * x - (x * n).cos() / n).sum() for x in optree.tree_leaves(p)]).sum()

    def loss(ps: Any) -> Tensor:
        parts = [ps["embed"], *sf.layers(ps["blocks"]), ps["head"]]
        return sf.pmean(torch.stack([part(p) for p in parts]).sum(), DATA)

    return sf.grad(loss)(ps)


def decay_of(path: str, shape: tuple[int, ...]) -> float:
    return 0.6 if path.startswith("head") else 0.9


def decay_at_step(path: str, shape: tuple[int, ...]) -> Any:
    return (lambda step: 0.5 + 0.1 * step) if path.startswith("embed") else 0.9


def bound_of(path: str, shape: tuple[int, ...]) -> float:
    return 0.5 if path.endswith("w") else 2.0


IN_PARTS: dict[str, Callable[..., so.Optimizer]] = {
    "lamb": lambda donate, which: so.lamb(0.05, b1=decay_of, eps=which, b2=decay_at_step, donate=donate),
    "adafactor": lambda donate, which: so.adafactor(layerwise, clip=bound_of, eps=which, donate=donate),
    "muon": lambda donate, which: so.masked(
        so.muon(layerwise, momentum=decay_at_step, dtype=None, donate=donate),
        lambda path, shape: len(shape) == 2,
        so.lamb(0.1, b2=decay_of, eps=which, donate=donate),
    ),
}


def small(path: str, shape: tuple[int, ...]) -> float:
    return 1e-3 if path.endswith("b") else 1e-8


def one_by_one(name: str, donate: bool) -> Any:
    """Each parameter by an optimizer of its own, in a tree in which it is alone."""
    leaves, tree = optree.tree_flatten(params(DEPTH))
    after = []
    for path, x in zip([".".join(map(str, path)) for path in optree.tree_paths(params(DEPTH))], leaves, strict=True):
        ps: Any = {path: x}
        optimizer = IN_PARTS[name](donate, small(path, tuple(x.shape)))
        state = optimizer.init(ps)
        for number in range(STEPS):
            ps, state = optimizer.step(ps, gradient(ps, number), state)
        after.append(ps[path])
    return optree.tree_unflatten(tree, after)


def in_parts(name: str, strategy: str, donate: bool, n: int) -> float:
    mesh, optimizer = data_mesh(n), IN_PARTS[name](donate, small)
    ps = sf.shard(params(DEPTH), mesh, STRATEGIES[strategy])
    state = optimizer.init(ps)
    for number in range(STEPS):
        grads = sf.shard_map(
            lambda p, number=number: gradients_of(p, number), mesh=mesh, in_specs=(...,), out_specs=...
        )(ps)
        ps, state = optimizer.step(ps, grads, state)
    return distance(sf.unshard(ps), one_by_one(name, donate))


@pytest.mark.central
@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
@pytest.mark.parametrize("strategy", ["hybrid_shard", "zero1"])
@pytest.mark.world(4, "processes")
def test_parameters_have_numbers_of_their_own_in_each_optimizer(world: World, strategy: str, donate: bool) -> None:
    for name in IN_PARTS:
        assert worst(world.run(in_parts, name, strategy, donate, 4)) < 1e-12, name


def test_a_number_out_of_its_range_in_one_set_names_it() -> None:
    ps = params(1)
    for optimizer in (so.lamb(0.1, b1=lambda path, shape: -0.5), so.muon(0.1, momentum=lambda path, shape: -0.5)):
        with pytest.raises(ValueError, match=r"(b1|momentum) must be a number"):
            optimizer.init(ps)


@pytest.mark.central
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hfsdp", "zero1"])
@pytest.mark.world(4, "processes")
def test_rules_are_parameter_groups_of_torch(world: World, strategy: str) -> None:
    for name in CASES:
        assert worst(world.run(by_shards, name, strategy, 4)) < 1e-12, name


def test_a_rule_is_called_with_path_and_shape() -> None:
    seen = set()

    def rule(path: str, shape: tuple[int, ...]) -> float:
        seen.add((path, shape))
        return 0.1

    ps = params(1)
    optimizer = so.adamw(rule)
    optimizer.step(ps, params(1), optimizer.init(ps))
    assert ("blocks.0.w", (4, 5)) in seen


class Rates(TorchDispatchMode):
    """Notes the rate of each fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._fused_adamw_.default:
            self.rates.append(kwargs["lr"])
        return func(*args, **(kwargs or {}))


def test_parameters_with_equal_rates_share_a_kernel() -> None:
    ps, optimizer = params(2), so.adamw(lambda path, shape: 0.1 if path.startswith("head") else 0.01)
    state = optimizer.init(ps)
    with Rates() as seen:
        optimizer.step(ps, params(2), state)
    assert sorted(seen.rates) == [0.01, 0.1]


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])
def test_steps_counted_by_a_tensor_have_the_same_rates(donate: bool) -> None:
    found = []
    for count in (0, torch.tensor(0)):
        ps, optimizer = params(2), so.adamw(layerwise, donate=donate)
        state = optimizer.init(ps) | {"step": count}
        for number in range(3):
            ps, state = optimizer.step(ps, gradient(ps, number), state)
        found.append(ps)
    assert distance(found[0], found[1]) < 1e-15


def test_the_derivative_by_one_rate_goes_through_rules_of_other_numbers() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    ps = {"w": normal(3, 2, seed=0), "b": normal(2, seed=1)}

    def after(lr: Tensor) -> Tensor:
        optimizer = so.sgd(lr, weight_decay=vectors_undecayed, donate=False)
        new, _ = optimizer.step(ps, ps, optimizer.init(ps))
        return new["w"].sum() + new["b"].sum()

    want = -(1.1 * ps["w"].sum() + ps["b"].sum())
    assert (torch.func.grad(after)(lr) - want).abs() < 1e-12


def test_a_momentum_may_be_none_at_times() -> None:
    def momentum(path: str, shape: tuple[int, ...]) -> Any:
        return lambda step: 0.0 if step == 2 or path == "b" else 0.9

    found = []
    for donate in (True, False):
        ps = {"w": normal(3, 2, seed=0), "b": normal(2, seed=1)}
        optimizer = so.sgd(0.1, momentum=momentum, donate=donate)
        state = optimizer.init(ps)
        for number in range(STEPS):
            ps, state = optimizer.step(ps, gradient(ps, number), state)
        found.append((ps, state["momentum"]))
    assert distance(found[0], found[1]) < 1e-15


class Needing(torch.optim.Optimizer):
    """Has no default for its rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                x.sub_(group["lr"] * x.grad)


def test_a_class_may_need_what_a_rule_gives() -> None:
    ps = {"w": normal(3, 2, seed=0), "b": normal(2, seed=1)}
    want = {"w": ps["w"] - 0.1, "b": ps["b"] - 0.2}
    optimizer = so.from_torch(Needing, lr=lambda path, shape: 0.1 if path == "w" else 0.2)
    got, _ = optimizer.step(ps, optree.tree_map(torch.ones_like, ps), optimizer.init(ps))
    assert distance(got, want) < 1e-15


def test_what_has_no_signature_is_a_schedule() -> None:
    ps, decays = {"w": normal(2, seed=0)}, [0.0, 0.5, 0.25]
    optimizer = so.adamw(0.1, weight_decay=decays.__getitem__)
    state = optimizer.init(ps)
    for number in range(2):
        ps, state = optimizer.step(ps, gradient(ps, number), state)


BAD: dict[str, tuple[Any, str]] = {
    "three arguments": (
        lambda a, b, c: 1.0,
        "lr must be a number, a 0-d tensor, a function of the step, or a function",
    ),
    "negative": (lambda path, shape: -1.0, "lr must be a number of 0 or more"),
    "text": (lambda path, shape: "fast", "lr must be a number of 0 or more"),
    "tensor": (lambda path, shape: torch.tensor(0.1), "rule of lr must give a number or a schedule, got a tensor"),
    "negative later": (lambda path, shape: lambda step: 1.0 - step * 2, "the schedule at step 1: lr must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_rules_are_errors(name: str) -> None:
    rule, message = BAD[name]
    ps = params(1)
    with pytest.raises((TypeError, ValueError), match=message):
        (optimizer := so.adamw(rule)).step(ps, params(1), optimizer.init(ps))


def test_clipping_by_group_scales_each_by_its_own_norm() -> None:
    grads = {"a": {"w": normal(4, 3, seed=0) * 9, "b": normal(3, seed=1)}, "c": {"w": normal(2, seed=2) / 99}}
    clip = so.clip_by_global_norm(0.5, by=lambda path, shape: path.split(".")[0], donate=False)
    state = clip.init(grads)
    got, state = clip.update(params=grads, grads=grads, state=state)
    norm = torch.cat([x.flatten() for x in grads["a"].values()]).norm()
    want = {"a": {name: x * 0.5 / norm for name, x in grads["a"].items()}, "c": grads["c"]}
    assert distance(got, want) < 1e-15
    assert set(state["norm"]) == {"a", "c"}
    assert (state["norm"]["a"] - norm).abs() < 1e-12


def test_the_norm_of_a_group_without_gradients_is_none_of_an_earlier_step() -> None:
    grads: Any = {"a": {"w": normal(2, seed=0)}, "c": {"w": normal(2, seed=2)}}
    clip = so.clip_by_global_norm(0.5, by=lambda path, shape: path.split(".")[0], donate=False)
    _, state = clip.update(params=grads, grads=grads, state=clip.init(grads))
    _, state = clip.update(params=grads, grads={**grads, "c": {"w": None}}, state=state)
    assert state["norm"]["c"] == 0


@pytest.mark.parametrize("by", [3, lambda path, shape: None])
def test_groups_must_have_names(by: Any) -> None:
    grads = {"w": normal(2, seed=0)}
    with pytest.raises(TypeError, match="by must"):
        (clip := so.clip_by_global_norm(1.0, by=by)).update(params=grads, grads=grads, state=clip.init(grads))


def test_groups_have_no_largest_magnitude() -> None:
    with pytest.raises(TypeError, match="with order 1 or 2"):
        so.clip_by_global_norm(1.0, order=float("inf"), by=lambda path, shape: "all")
