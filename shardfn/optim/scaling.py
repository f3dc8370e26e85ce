"""Loss scaling for float16: gradients too small for the dtype are computed larger, and divided before the step."""

from __future__ import annotations

from typing import Any

from shardfn.optim.norms import scaled
from shardfn.optim.optimizer import Optimizer, must_be_optimizer
from shardfn.optim.ranges import check, whole
from shardfn.optim.wrappers import finite


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
            return params, state | {
                "scale": state["scale"] * backoff,
                "good": 0,
                "skipped": state["skipped"] + 1,
            }
        divided = scaled(grads, 1 / state["scale"], donate)
        params, inner = optimizer.step(params, divided, state["optimizer"])
        good = state["good"] + 1
        grown = good >= every
        return params, state | {
            "optimizer": inner,
            "scale": state["scale"] * (growth if grown else 1.0),
            "good": 0 if grown else good,
        }

    return Optimizer(init, step)
