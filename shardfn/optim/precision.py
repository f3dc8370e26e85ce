"""Optimizers for 16-bit parameters: float32 master copies, stochastic rounding, loss scaling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardfn.compat.devices import elements_at_a_time
from shardfn.optim.differentiable import refuse_overwriting
from shardfn.optim.hyperparameters import check, check_integer
from shardfn.optim.norms import scaled, wide
from shardfn.optim.optimizer import Optimizer, must_be_optimizer
from shardfn.optim.rounding import closed
from shardfn.optim.wrappers import counted, number, step_if_finite
from shardfn.shards.blocks import CHUNK
from shardfn.shards.pieces import Unit, Units, copied, refuse_complex, units
from shardfn.shards.random import int_seed

LEAST = torch.finfo(torch.float32).tiny  # the smallest loss scale


def fp32_master_weights(optimizer: Optimizer, *, donate: bool = True) -> Optimizer:
    """The optimizer on a float32 copy of the parameters; the parameters are its rounded values.

    The copy, the master, is under `"master"` in the state, and cut as the state is: with `zero1` or `hfsdp` a rank
    computes with bfloat16 parameters, and keeps float32 ones for its part only. Where a strategy cuts parameters as
    well, float32 parameters that a stage gathers in bfloat16, `stage(gather_dtype=torch.bfloat16)`, need less memory.

    State: 4 bytes more for each 16-bit parameter. Parameters of float32 or float64 are their own masters.

    Args:
        optimizer: any optimizer; its state is in float32, too.
        donate: whether to overwrite parameters. If not, the step can be differentiated, as far as the optimizer's can:
            rounding then has derivative 1.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError: `optimizer` is not an optimizer; `init` also for complex parameters.

    Sources: Micikevicius et al., Mixed precision training (2018), section 3.1.

    Example:
        ``opt = fp32_master_weights(adamw(3e-4)); state = opt.init(params)``, where `params` are in bfloat16
    """
    must_be_optimizer("fp32_master_weights", optimizer)
    check("fp32_master_weights", {"donate": donate})

    def init(params: Any) -> Any:
        leaves = units(params)
        refuse_complex(leaves, "fp32_master_weights")
        make = (lambda unit: copied(unit, wide(unit.values))) if donate else _widened
        copies = [make(unit) if _is_narrow(unit) else None for unit in leaves.each]
        return {"optimizer": optimizer.init(_with(leaves, copies)), "master": leaves.with_values(copies)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        leaves = units(params)
        if donate:
            refuse_overwriting("fp32_master_weights", params, grads, state)
        copies = leaves.values_in(state["master"])
        new_params, inner = optimizer.step(_with(leaves, copies), grads, state["optimizer"])
        new = leaves.values_in(new_params)
        masters = [x if _is_narrow(unit) else None for x, unit in zip(new, leaves.each, strict=True)]
        rounded = (x.to(unit.values.dtype) if _is_narrow(unit) else x for x, unit in zip(new, leaves.each, strict=True))
        return _tree_with_values(leaves, rounded, params, donate), {
            "optimizer": inner,
            "master": leaves.with_values(masters),
        }

    return Optimizer(init, step)


def stochastic_rounding(optimizer: Optimizer, *, seed: int = 0, donate: bool = True) -> Optimizer:
    """The optimizer, with new bfloat16 parameters rounded stochastically: up or down, such that the mean is exact.

    A change smaller than bfloat16 can represent is then right on average, without a master copy. A step works on a
    temporary float32 copy of this rank's parameters, 4 bytes each. The random bits depend on the seed, the step number,
    the parameter's name and the element's place in it. So ranks that hold the same element round it alike, and the bits
    are the same for any number of ranks, on any device, and after a checkpoint.

    State: the optimizer's, with slots in float32 unless it has a `state_dtype` or 8 bits; the seed, and a step count.

    Args:
        optimizer: any optimizer.
        seed: an int, the same on every rank.
        donate: whether to overwrite parameters. If not, they stay unchanged, but even then no step can be
            differentiated.

    Returns:
        An `Optimizer`; parameters of float32 or float64 are not rounded.

    Raises:
        TypeError: `optimizer` is not an optimizer, or the seed not an int; `init` also for complex parameters, and for
            float16, for which there is `fp32_master_weights`.

    Sources: Zamirai et al., Revisiting bfloat16 training (2020).

    Example:
        ``stochastic_rounding(adamw(3e-4, state_dtype=torch.bfloat16), seed=1)``: 6 bytes a parameter in all
    """
    must_be_optimizer("stochastic_rounding", optimizer)
    check("stochastic_rounding", {"donate": donate})
    first = int_seed(seed)

    def init(params: Any) -> Any:
        leaves = units(params)
        refuse_complex(leaves, "stochastic_rounding")
        for unit in leaves.each:
            if _is_narrow(unit) and unit.values.dtype != torch.bfloat16:
                raise TypeError(
                    f"stochastic_rounding: {unit.name} is {unit.values.dtype}, and only bfloat16 is rounded at random: "
                    f"use fp32_master_weights(optimizer), or other parameters"
                )
        copies = [copied(unit, wide(unit.values)) if _is_narrow(unit) else None for unit in leaves.each]
        return {"optimizer": optimizer.init(_with(leaves, copies)), "step": 0, "seed": first}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, leaves = state["step"] + 1, units(params)
        if donate:
            refuse_overwriting("stochastic_rounding", params, grads, state)
        copies = [_widened(unit) if _is_narrow(unit) else None for unit in leaves.each]
        copies = [x.detach() if donate and x is not None else x for x in copies]
        new_params, inner = optimizer.step(_with(leaves, copies), grads, state["optimizer"])
        salt = state["seed"], count, "parameters"
        new = leaves.values_in(new_params)
        round_unit = _rounded_into if donate else _rounded
        new = [round_unit(unit, x, salt) if _is_narrow(unit) else x for unit, x in zip(leaves.each, new, strict=True)]
        state = {"optimizer": inner, "step": count, "seed": state["seed"]}
        return _tree_with_values(leaves, new, params, donate), state

    return Optimizer(init, step)


def dynamic_loss_scale(
    optimizer: Optimizer,
    *,
    scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    donate: bool = True,
) -> Optimizer:
    """The optimizer, for gradients of `loss * state["scale"]`; overwrites gradients unless `donate=False`.

    It divides gradients by the scale. If any gradient on any rank is not finite, all ranks skip the step and the scale
    shrinks; after `growth_interval` finite steps in a row it grows. It stays where float32 holds both it and its
    inverse. In a compiled or graphed step the host does not decide: see `skip_nonfinite`.

    State: `"scale"`, `"good"` (finite steps since the scale last changed), `"skipped"`, which are 0-d tensors, and the
    optimizer's.

    Args:
        optimizer: any optimizer.
        scale: the initial scale, above 0.
        growth_factor: factor by which the scale grows, 1 or more.
        backoff_factor: factor by which the scale shrinks, above 0 and at most 1.
        growth_interval: finite steps in a row after which the scale grows, 1 or more.
        donate: whether to overwrite gradients.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError, ValueError: `optimizer` is not an optimizer; a number is out of its range.

    Sources: Micikevicius et al., Mixed precision training (2018), section 3.2.

    Example:
        ``grads = sf.grad(lambda p: loss(p) * state["scale"])(params); params, state = opt.step(params, grads, state)``
    """
    must_be_optimizer("dynamic_loss_scale", optimizer)
    numbers = {"scale": scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
    check("dynamic_loss_scale", numbers | {"donate": donate})
    check_integer("dynamic_loss_scale", "growth_interval", growth_interval, 1)

    def init(params: Any) -> Any:
        begin = {"scale": number(params, float(scale)), "good": number(params, 0), "skipped": number(params, 0)}
        return {"optimizer": optimizer.init(params)} | begin

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        current = counted(params, state["scale"]).to(torch.float64)
        params, inner, is_finite = step_if_finite(
            optimizer,
            params,
            grads,
            lambda: scaled("dynamic_loss_scale", grads, 1 / current, donate),
            state["optimizer"],
        )
        if not isinstance(is_finite, Tensor):
            # Without a copy, for which the host would wait.
            is_finite = torch.full((), is_finite, device=current.device)
        good = torch.where(is_finite, counted(params, state["good"]) + 1, 0)
        grows = good >= growth_interval
        larger = torch.where(grows, (current * growth_factor).clamp(max=1 / LEAST), current)
        new = {
            "optimizer": inner,
            "scale": torch.where(is_finite, larger, (current * backoff_factor).clamp(min=LEAST)),
            "good": torch.where(grows, 0, good),
            "skipped": counted(params, state["skipped"]) + ~is_finite,
        }
        return params, state | new

    return Optimizer(init, step)


def _is_narrow(unit: Unit) -> bool:
    return unit.trainable and unit.values.dtype.itemsize < wide(unit.values).itemsize


def _widened(unit: Unit) -> Tensor:
    return unit.values.to(wide(unit.values))


def _with(leaves: Units, copies: list[Any]) -> Any:
    """The tree with copies in place of the values that have one."""
    return leaves.with_values(unit.values if x is None else x for unit, x in zip(leaves.each, copies, strict=True))


def _rounded(unit: Unit, x: Tensor, salt: tuple[Any, ...]) -> Tensor:
    (new,) = closed(unit, 0, x.numel(), [x.reshape(-1)], unit.values.dtype, salt)
    new = new.view(x.shape)
    return new if x.is_contiguous() else torch.empty_like(x, dtype=new.dtype).copy_(new)


@torch.no_grad()
def _rounded_into(unit: Unit, x: Tensor, salt: tuple[Any, ...]) -> Tensor:
    """Overwrites a unit's values with rounded ones, a chunk at a time, which bounds the memory for random bits."""
    source, target = x.reshape(-1), unit.values.reshape(-1)
    max_elements = elements_at_a_time(source.device, CHUNK)
    for start in range(0, len(source), max_elements):
        stop = min(start + max_elements, len(source))
        (target[start:stop],) = closed(unit, start, stop, [source[start:stop]], unit.values.dtype, salt)
    return unit.values if target.data_ptr() == unit.values.data_ptr() else target.view(unit.values.shape)


def _tree_with_values(leaves: Units, new: Iterable[Any], params: Any, donate: bool) -> Any:
    """The tree with new values; with `donate`, the old tree, overwritten."""
    if not donate:
        return leaves.with_values(new)
    with torch.no_grad():
        for unit, x in zip(leaves.each, new, strict=True):
            if unit.trainable and x is not unit.values:
                unit.values.copy_(x)
    return params
