"""Parameter groups of torch as rules and back, beside the torch optimizer that got the groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import get_parameter_names

import shardfn as sf
import shardfn.optim as so
from shardfn import P
from shardfn.interop import functional
from shardfn.testing import World
from tests.interop import zoo
from tests.models import DATA, STRATEGIES, data_mesh
from tests.reference import worst

Groups = list[dict[str, Any]]
NAMED: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}


def undecayed(module: nn.Module) -> Groups:
    """As the trainer of transformers makes them."""
    decayed = set(get_parameter_names(module, [nn.Embedding], ["bias", "norm"]))
    pairs = list(module.named_parameters())
    return [
        {"params": [p for name, p in pairs if name in decayed]},
        {"params": [p for name, p in pairs if name not in decayed], "weight_decay": 0.0, "betas": (0.7, 0.9)},
    ]


def by_layer(module: nn.Module) -> Groups:
    """As timm makes them, and scales them where it makes an optimizer: lr_scale by layer, with names beside tensors."""
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, p in module.named_parameters():
        layer = int(name.split(".")[2]) if "layers" in name else -1
        key = layer, p.ndim < 2
        new = {"params": [], "weight_decay": 0.0 if key[1] else 0.05, "lr_scale": 0.5 ** (2 - layer), "lr": 0.01}
        groups.setdefault(key, new)["params"].append((name, p))
    return list(groups.values())


MAKERS: dict[str, Callable[[nn.Module], Groups]] = {"undecayed": undecayed, "by layer": by_layer}


def by_torch(maker: str) -> dict[str, Tensor]:
    module = zoo.build("llama_tied")
    groups = MAKERS[maker](module)
    for group in groups:
        group["lr"] = group.get("lr", 0.01) * group.pop("lr_scale", 1.0)
    optimizer = torch.optim.AdamW(groups, **NAMED)
    for number in range(3):
        optimizer.zero_grad()
        of_tokens(module, number).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def of_tokens(call: Any, number: int) -> Tensor:
    tokens = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(number))
    return call(tokens, use_cache=False).logits.square().mean()


def by_shards(maker: str, strategy: str, back: bool) -> float:
    mesh, module = data_mesh(2), zoo.build("llama_tied")
    numbers = so.rules_from_param_groups(module, MAKERS[maker](module), lr=0.01, weight_decay=0.1, b1=0.8, b2=0.95)
    if back:  # once around: rules, an optimizer of torch, rules
        groups = so.param_groups_from_rules(module, **numbers)
        numbers = so.rules_from_param_groups(module, torch.optim.AdamW(groups))
    model, optimizer = functional(module), so.adamw(**numbers)
    params = model.shard(mesh, STRATEGIES[strategy])
    state = optimizer.init(params)

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P()), out_specs=...)
    def step(params: Any, state: Any, number: Any) -> Any:
        def loss(p: Any) -> Tensor:
            return sf.pmean(of_tokens(lambda *x, **options: model(p, *x, **options), number), DATA)

        return optimizer.step(params, sf.grad(loss)(params), state)

    for number in range(3):
        params, state = step(params, state, number)
    found, wanted = model.state_dict(params), by_torch(maker)
    return worst(((found[name] - x).abs().max() / x.abs().max()).item() for name, x in wanted.items())


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("maker", "strategy", "back"),
    [("undecayed", "full_shard", False), ("by layer", "zero1", False), ("by layer", "full_shard", True)],
)
def test_a_step_is_that_of_the_torch_optimizer(world: World, maker: str, strategy: str, back: bool) -> None:
    assert worst(world.run(by_shards, maker, strategy, back)) < 1e-12


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def test_what_groups_share_stays_a_number() -> None:
    module = net()
    found = so.rules_from_param_groups(module, torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
    assert found == {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}


def test_a_tensor_as_rate_is_a_number() -> None:
    module = net()
    found = so.rules_from_param_groups(module, torch.optim.Adam(module.parameters(), torch.tensor(0.25)))
    assert found["lr"] == 0.25


WRONG: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "a tensor": (
        lambda m: m[0].weight,
        "groups must be a torch optimizer or a list of dicts with params, got Parameter",
    ),
    "parameters": (lambda m: list(m.parameters()), "groups must be a torch optimizer or a list of dicts with params"),
    "of another module": (
        lambda m: torch.optim.SGD(copy.deepcopy(m).parameters()),
        "groups[0] holds a tensor of shape (2, 2) that is no parameter of the module",
    ),
    "twice": (
        lambda m: [{"params": m.parameters()}, {"params": m[1].bias}],
        "1.bias is in groups[1] and in another group",
    ),
    "left out": (
        lambda m: [{"params": m[0].parameters(), "lr": 1.0}],
        "1.weight, 1.bias (of 2) in no group, so torch would not train them",
    ),
    "no number": (
        lambda m: [{"params": m[0].parameters(), "lr": 1.0}, {"params": m[1].parameters()}],
        "the group of 1.weight has no lr, as others have: pass lr= for it",
    ),
    "a flag": (
        lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
        "groups[0] has amsgrad=True, which is no number",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_groups_that_are_no_rules_are_refused(case: str) -> None:
    module = net()
    make, message = WRONG[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        so.rules_from_param_groups(module, make(module))
    assert str(caught.value).startswith(f"rules_from_param_groups: {message}")


def test_a_rule_knows_only_the_parameters_of_its_groups() -> None:
    module = net()
    groups = [{"params": m.parameters(), "lr": float(i)} for i, m in enumerate(module)]
    rule = so.rules_from_param_groups(module, groups)["lr"]
    with pytest.raises(ValueError, match=r"lr: no parameter group has 2\.weight, only 0\.weight, 0\.bias, 1\.weight, "):
        rule("2.weight", (2, 2))


def test_schedules_are_none_of_the_numbers_of_a_group() -> None:
    with pytest.raises(ValueError, match=r"param_groups_from_rules: lr of 0\.weight is a schedule"):
        so.param_groups_from_rules(net(), lr=so.warmup_cosine(0.1, warmup=1, steps=3))


def test_groups_of_rules_hold_what_trains() -> None:
    module = net()
    module[0].weight.requires_grad_(False)
    found = so.param_groups_from_rules(module, lr=lambda path, shape: 0.1 * len(shape), b1=0.5)
    assert [(list(map(id, one["params"])), one["lr"], one["betas"]) for one in found] == [
        ([id(module[0].bias), id(module[1].bias)], 0.1, (0.5, 0.999)),
        ([id(module[1].weight)], 0.2, (0.5, 0.999)),
    ]


def number_then_rule(folder: str) -> list[str]:
    """The errors of states that are loaded across; as these advise, they go on."""
    params, rule = {"w": torch.ones(2, 2)}, lambda path, shape: 0.1
    number, by_rule = so.adamw(0.1), so.adamw(rule, weight_decay=0.1)
    sf.checkpoint.save(f"{folder}/0", number.init(params))
    sf.checkpoint.save(f"{folder}/1", by_rule.init(params))
    found = []
    ways: list[dict[str, Any]] = [{"ignore": r".*\bnumbers\.\w+"}, {"strict": False}]
    for i, (other, way) in enumerate(zip((by_rule, number), ways, strict=True)):
        with pytest.raises(sf.checkpoint.CheckpointError) as caught:
            sf.checkpoint.load(f"{folder}/{i}", other.init(params))
        found.append(str(caught.value))
        state = sf.checkpoint.load(f"{folder}/{i}", other.init(params), **way)
        other.step(params, params, state)
    return found


@pytest.mark.world(1)
def test_a_number_is_replaced_by_a_rule_where_a_run_goes_on(world: World, tmp_path: Path) -> None:
    (found,) = world.run(number_then_rule, str(tmp_path))
    assert found[0].endswith(r"no rules or schedules: to change one for the other, pass ignore=r'.*\bnumbers\.\w+'")
    assert found[1].endswith("no rules or schedules: to change one for the other, pass strict=False")
