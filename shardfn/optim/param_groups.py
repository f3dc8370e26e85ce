"""Parameter groups of torch's optimizers as rules by parameter, and rules as groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardfn.optim.hyperparameters import Hyperparameter, Rule, is_rule

_FLAGS = "amsgrad", "maximize", "nesterov", "centered"
_BETAS = "b1", "b2"


def rules_from_param_groups(module: nn.Module, groups: Any, **defaults: float) -> dict[str, Any]:
    """The numbers of a torch optimizer's parameter groups, as arguments of an optimizer of `shardfn.optim`.

    A number that all groups share stays one; any other becomes a rule by the parameter's name. `betas` are `b1` and
    `b2`. timm's `lr_scale` multiplies `lr`, and what is neither a number nor a pair, such as `fused`, is left out.

    Args:
        module: the module whose parameters the groups hold, as it was when they were made.
        groups: a torch optimizer, or the list of groups that it would get.
        defaults: numbers of groups that do not name them, as an optimizer's arguments.

    Returns:
        By argument name, a number or a rule `(path, shape) -> number`.

    Raises:
        TypeError: `groups` is neither an optimizer nor a list of groups.
        ValueError: a trainable parameter is in no group or in two, a group holds another tensor, lacks a number that
            others have, or has a flag, such as `amsgrad`, that no number expresses.

    Example:
        >>> from torch import nn
        >>> module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> groups = [{"params": module[0].parameters(), "lr": 1e-4}, {"params": module[1].parameters()}]
        >>> numbers = rules_from_param_groups(module, groups, lr=1e-3, weight_decay=0.1)
        >>> numbers["weight_decay"], numbers["lr"]("0.weight", (2, 2)), numbers["lr"]("1.bias", (1,))
        (0.1, 0.0001, 0.001)

    """
    listed = getattr(groups, "param_groups", groups)
    if not isinstance(listed, Sequence) or not all(
        isinstance(group, Mapping) and "params" in group for group in listed
    ):
        raise TypeError(
            f"rules_from_param_groups: groups must be a torch optimizer or a list of dicts with params, "
            f"got {groups!r:.80}"
        )
    names = {id(p): name for name, p in module.named_parameters()}
    numbers: dict[str, dict[str, float]] = {}
    for i, group in enumerate(listed):
        of_group = _numbers_of_group(i, {**defaults, **group})
        for p in _parameters_of_group(group):
            name = names.get(id(p))
            if name is None:
                raise ValueError(
                    f"rules_from_param_groups: groups[{i}] holds a tensor of shape {tuple(p.shape)} that is no "
                    f"parameter of the module: pass the module whose parameters() the groups were made of"
                )
            if name in numbers:
                raise ValueError(f"rules_from_param_groups: {name} is in groups[{i}] and in another group")
            numbers[name] = of_group
    missing = [name for name, p in module.named_parameters() if p.requires_grad and name not in numbers]
    if missing:
        raise ValueError(
            f"rules_from_param_groups: {', '.join(missing[:3])}{' and others' * (len(missing) > 3)} "
            f"(of {len(missing)}) in no group, so torch would not train them: freeze them with requires_grad_(False), "
            f"or add them"
        )
    keys = sorted({key for of_parameter in numbers.values() for key in of_parameter})
    return {key: _rule(key, {name: of_parameter.get(key) for name, of_parameter in numbers.items()}) for key in keys}


def param_groups_from_rules(module: nn.Module, **numbers: Hyperparameter) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer, one for each set of numbers that rules give to parameters.

    Args:
        module: its trainable parameters are the groups' `params`, in its order.
        numbers: the arguments of an optimizer of `shardfn.optim`, numbers or rules; `b1` and `b2` become `betas`.

    Raises:
        ValueError: a number is a schedule, which torch has in `torch.optim.lr_scheduler`.

    Example:
        >>> from torch import nn
        >>> rule = lambda path, shape: 0.1 * (len(shape) > 1)
        >>> [(len(one["params"]), one["weight_decay"]) for one in
        ...  param_groups_from_rules(nn.Linear(2, 2), lr=1e-3, weight_decay=rule)]
        [(1, 0.1), (1, 0.0)]

    """
    groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        of_parameter: dict[str, Any] = {}
        for key, value in numbers.items():
            rule: Any = value
            of_parameter[key] = rule(name, tuple(p.shape)) if is_rule(key, value) else value
        schedules = [key for key, value in of_parameter.items() if callable(value)]
        if schedules:
            raise ValueError(
                f"param_groups_from_rules: {schedules[0]} of {name} is a schedule: pass its number at the first step, "
                f"and the rest to torch.optim.lr_scheduler"
            )
        if any(key in of_parameter for key in _BETAS):
            of_parameter["betas"] = of_parameter.pop("b1", 0.9), of_parameter.pop("b2", 0.999)
        groups.setdefault(tuple(of_parameter.items()), []).append(p)
    return [{"params": listed, **dict(numbers_of_group)} for numbers_of_group, listed in groups.items()]


def _parameters_of_group(group: Mapping[str, Any]) -> list[Tensor]:
    """A group's parameters, which may be one tensor, or pairs of a name and a tensor."""
    params = group["params"]
    return [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]


def _numbers_of_group(i: int, group: Mapping[str, Any]) -> dict[str, float]:
    flags = [key for key in _FLAGS if group.get(key)]
    if flags:
        raise ValueError(
            f"rules_from_param_groups: groups[{i}] has {flags[0]}=True, which is no number: set it to False in the "
            f"groups, and pass it to so.from_torch or to the optimizer"
        )
    betas = dict(zip(_BETAS, group.get("betas", ()), strict=False))
    numbers = {
        key: float(value)
        for key, value in {**group, **betas}.items()
        if key not in ("initial_lr", "lr_scale", "params") and isinstance(value, (int, float, Tensor))
        if not isinstance(value, bool)
    }
    if not numbers.get("dampening"):  # torch's SGD has it always
        numbers.pop("dampening", None)
    if "lr" in numbers:
        numbers["lr"] *= group.get("lr_scale", 1.0)
    return numbers


def _rule(key: str, values: Mapping[str, float | None]) -> float | Rule:
    without = [name for name, value in values.items() if value is None]
    if without:
        raise ValueError(
            f"rules_from_param_groups: the group of {without[0]} has no {key}, as others have: pass {key}= for it, or "
            f"the torch optimizer"
        )
    by_name = {name: value for name, value in values.items() if value is not None}
    if len(distinct := set(by_name.values())) == 1:
        return distinct.pop()

    def number_of_parameter(path: str, shape: tuple[int, ...]) -> float:
        try:
            return by_name[path]
        except KeyError:
            raise ValueError(f"{key}: no parameter group has {path}, only {', '.join([*by_name][:3])}, ...") from None

    return number_of_parameter
