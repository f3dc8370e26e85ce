"""Optimizers for 16 bits: small changes by a master in float32 or rounding at random, small gradients by a scale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardfn.optim.hyperparameters import check, whole
from shardfn.optim.norms import scaled, wide
from shardfn.optim.optimizer import Optimizer, must_be_optimizer
from shardfn.optim.state_dtype import closed_to, drawn, rounded
from shardfn.optim.wrappers import finite
from shardfn.shards.blocks import CHUNK
from shardfn.shards.pieces import Unit, Units, copied, refuse_complex, units
from shardfn.shards.random import int_seed


def master(optimizer: Optimizer, *, donate: bool = True) -> Optimizer:
    """The optimizer on a copy of the parameters in float32, of which the parameters are the rounded values.

    The copy, the master, is under `"master"` in the state, and cut as that is: with `zero1` or `hfsdp` a rank computes
    with bfloat16 parameters, and keeps float32 ones for its part only. Where a strategy cuts parameters as well,
    float32 parameters that a stage gathers in bfloat16, `stage(gather_dtype=torch.bfloat16)`, need less memory.

    State: 4 bytes a parameter of 16 bits more. Parameters of float32 or float64 are their own masters.

    Args:
        optimizer: any; its state is in float32, too.
        donate: overwrite parameters. If not, the step can be differentiated, as far as the optimizer's can: what is
            rounded has the derivative of what it is rounded from.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError: what is not an optimizer; by `init`, complex parameters.

    Sources: Micikevicius et al., Mixed precision training (2018), section 3.1.

    Example:
        ``opt = master(adamw(3e-4)); state = opt.init(params)``, where `params` are in bfloat16
    """
    must_be_optimizer("master", optimizer)
    check("master", {"donate": donate})

    def init(params: Any) -> Any:
        known = units(params)
        refuse_complex(known, "master")
        make = (lambda unit: copied(unit, wide(unit.values))) if donate else _widened
        copies = [make(unit) if _narrow(unit) else None for unit in known.each]
        return {"optimizer": optimizer.init(_with(known, copies)), "master": known.like(copies)}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        known = units(params)
        copies = known.beside(state["master"])
        made, inner = optimizer.step(_with(known, copies), grads, state["optimizer"])
        new = known.beside(made)
        kept = [x if _narrow(unit) else None for x, unit in zip(new, known.each, strict=True)]
        rounded = (x.to(unit.values.dtype) if _narrow(unit) else x for x, unit in zip(new, known.each, strict=True))
        return _moved(known, rounded, params, donate), {"optimizer": inner, "master": known.like(kept)}

    return Optimizer(init, step)


def stochastic_rounding(optimizer: Optimizer, *, seed: int = 0, donate: bool = True) -> Optimizer:
    """The optimizer, whose new bfloat16 parameters are rounded at random, up as often as they are near the upper value.

    A change that is smaller than what bfloat16 can tell apart is then right in the mean, with no master. A step works
    on a copy of the parameters in float32, 4 bytes for each that is here, which it gives back. The random bits come
    from the seed, the number of the step, and a parameter's name and the element's place in it: ranks that hold the
    same element round it alike, and the bits are the same on any number of ranks and device, and after a checkpoint.

    State: the optimizer's, whose slots are in float32 unless it has a `state_dtype` or 8 bits; the seed, and a count.

    Args:
        optimizer: any.
        seed: an int, the same on every rank.
        donate: overwrite parameters. If not, they stay as they are, but no step can be differentiated.

    Returns:
        An `Optimizer`; parameters of float32 or float64 are not rounded.

    Raises:
        TypeError: what is not an optimizer; a seed that is not an int; by `init`, complex parameters, or float16 ones,
            for which there is `master`.

    Sources: Zamirai et al., Revisiting bfloat16 training (2020).

    Example:
        ``stochastic_rounding(adamw(3e-4, state_dtype=torch.bfloat16), seed=1)``: 6 bytes a parameter in all
    """
    must_be_optimizer("stochastic_rounding", optimizer)
    check("stochastic_rounding", {"donate": donate})
    first = int_seed(seed)

    def init(params: Any) -> Any:
        known = units(params)
        refuse_complex(known, "stochastic_rounding")
        for unit in known.each:
            if _narrow(unit) and unit.values.dtype != torch.bfloat16:
                raise TypeError(
                    f"stochastic_rounding: {unit.name} is {unit.values.dtype}, and only bfloat16 is rounded at random: "
                    f"use master(optimizer), or other parameters"
                )
        copies = [copied(unit, wide(unit.values)) if _narrow(unit) else None for unit in known.each]
        return {"optimizer": optimizer.init(_with(known, copies)), "step": 0, "seed": first}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        count, known = state["step"] + 1, units(params)
        copies = [_widened(unit) if _narrow(unit) else None for unit in known.each]
        copies = [x.detach() if donate and x is not None else x for x in copies]
        made, inner = optimizer.step(_with(known, copies), grads, state["optimizer"])
        salt = state["seed"], count, "parameters"
        new = known.beside(made)
        round_one = _rounded_into if donate else _rounded
        new = [round_one(unit, x, salt) if _narrow(unit) else x for unit, x in zip(known.each, new, strict=True)]
        return _moved(known, new, params, donate), {"optimizer": inner, "step": count, "seed": state["seed"]}

    return Optimizer(init, step)


def loss_scaled(
    optimizer: Optimizer,
    *,
    scale: float = 2.0**16,
    growth: float = 2.0,
    backoff: float = 0.5,
    every: int = 2000,
    donate: bool = True,
) -> Optimizer:
    """The optimizer, for gradients of `loss * state["scale"]`; overwrites gradients unless `donate=False`.

    It divides them by the scale. If a number of theirs is not finite, on whatever rank, all ranks leave out the step
    and the scale shrinks; after `every` steps in a row it grows.

    State: `"scale"`, `"good"` (steps since it last changed), `"skipped"`, and the optimizer's.

    Args:
        optimizer: any.
        scale: the first, above 0.
        growth: what it is multiplied by when it grows, 1 or more.
        backoff: what it is multiplied by when it shrinks, above 0 and at most 1.
        every: after so many finite steps in a row it grows, 1 or more.
        donate: overwrite gradients.

    Returns:
        An `Optimizer`.

    Raises:
        TypeError, ValueError: what is not an optimizer; a number out of its range.

    Sources: Micikevicius et al., Mixed precision training (2018), section 3.2.

    Example:
        ``grads = sf.grad(lambda p: loss(p) * state["scale"])(params); params, state = opt.step(params, grads, state)``
    """
    must_be_optimizer("loss_scaled", optimizer)
    check("loss_scaled", {"scale": scale, "growth": growth, "backoff": backoff, "donate": donate})
    whole("loss_scaled", "every", every, 1)

    def init(params: Any) -> Any:
        return {"optimizer": optimizer.init(params), "scale": float(scale), "good": 0, "skipped": 0}

    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        if not finite(grads):
            skipped = {"scale": state["scale"] * backoff, "good": 0, "skipped": state["skipped"] + 1}
            return params, state | skipped
        divided = scaled(grads, 1 / state["scale"], donate)
        params, inner = optimizer.step(params, divided, state["optimizer"])
        state = state | {"optimizer": inner, "good": state["good"] + 1}
        if state["good"] >= every:
            state |= {"scale": state["scale"] * growth, "good": 0}
        return params, state

    return Optimizer(init, step)


def _narrow(unit: Unit) -> bool:
    return unit.trainable and unit.values.dtype.itemsize < wide(unit.values).itemsize


def _widened(unit: Unit) -> Tensor:
    return unit.values.to(wide(unit.values))


def _with(known: Units, copies: list[Any]) -> Any:
    """The tree with copies in place of what has one."""
    return known.like(unit.values if x is None else x for unit, x in zip(known.each, copies, strict=True))


def _rounded(unit: Unit, x: Tensor, salt: tuple[Any, ...]) -> Tensor:
    n = unit.values.numel()
    (bits,) = drawn(unit, 0, n, 1, salt) if n else (torch.zeros(0, dtype=torch.int32, device=x.device),)
    return closed_to(x, unit.values.dtype, bits.view(x.shape))


@torch.no_grad()
def _rounded_into(unit: Unit, x: Tensor, salt: tuple[Any, ...]) -> Tensor:
    """The unit's values, overwritten, a few at a time."""
    source, target = x.reshape(-1), unit.values.reshape(-1)
    for start in range(0, len(source), CHUNK):
        stop = min(start + CHUNK, len(source))
        (bits,) = drawn(unit, start, stop, 1, salt)
        target[start:stop] = rounded(source[start:stop], unit.values.dtype, bits)
    return unit.values if target.data_ptr() == unit.values.data_ptr() else target.view(unit.values.shape)


def _moved(known: Units, new: Iterable[Any], params: Any, donate: bool) -> Any:
    if not donate:
        return known.like(new)
    with torch.no_grad():
        for unit, x in zip(known.each, new, strict=True):
            if unit.trainable and x is not unit.values:
                unit.values.copy_(x)
    return params
