"""Epsilon of differentially private training, and the noise for an epsilon, by an accountant.

The package `dp-accounting` composes the privacy losses of all steps numerically, so that errors of rounding and of the
grid only make epsilon larger.
"""

from __future__ import annotations

import math
from typing import Any


def epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    r"""The epsilon of training by `dp_grads` on Poisson samples, which is :math:`(\epsilon, \delta)`-private.

    Data sets are neighbors if one has one more example than the other. The bound holds for whoever sees the parameters
    after every step. What else is computed from the data, as a loss that is printed or a rate that is chosen by it, is
    not counted.

    Args:
        noise: sigma, as for `dp_grads`, above 0.
        rate: the probability of each example, at each step, above 0 and at most 1; as for `sf.run.batches`.
        steps: number of steps, 0 or more.
        delta: from above 0 to below 1; much smaller than one over the number of examples.

    Returns:
        Epsilon, a tight bound from above; inf where it is too large for the library, from several hundred on.

    Raises:
        ValueError: a number out of its range.
        ImportError: `dp-accounting` is not installed.

    Sources: Abadi et al., Deep learning with differential privacy (2016); Koskela et al., Computing tight differential
    privacy guarantees using FFT (2020); Doroshenko et al., Connect the dots: tighter discrete approximations of privacy
    loss distributions (2022).

    Example:
        ``epsilon(noise=1.1, rate=256 / 60_000, steps=14_062, delta=1e-5)`` is 2.38
    """
    _check_ranges("epsilon", noise=noise, rate=rate, steps=steps, delta=delta)
    return _composed_epsilon(_library("epsilon"), noise, rate, steps, delta) if steps else 0.0


def noise_multiplier_for(epsilon: float, rate: float, steps: int, delta: float) -> float:
    """The least noise with which training has an epsilon of at most `epsilon`, up to 0.5 %.

    Args:
        epsilon: above 0 and at most 100.
        rate: as for `epsilon`, like the arguments that follow.
        steps: number of steps, 1 or more.
        delta: from above 0 to below 1.

    Returns:
        Sigma, as for `dp_grads`. The epsilon of this noise is not above the one that was asked for.

    Raises:
        ValueError: a number out of its range; an epsilon for which the noise is not between 0.1 and 100,000.
        ImportError: `dp-accounting` is not installed.

    Example:
        ``noise_multiplier_for(epsilon=3, rate=256 / 60_000, steps=14_062, delta=1e-5)`` is 0.97
    """
    _check_ranges("noise_multiplier_for", epsilon=epsilon, rate=rate, steps=steps, delta=delta)
    if not steps:
        raise ValueError("noise_multiplier_for: steps must be 1 or more, got 0, which need no noise")
    library = _library("noise_multiplier_for")

    def enough(noise: float) -> bool:
        return _composed_epsilon(library, noise, rate, steps, delta) <= epsilon

    high = 1.0
    while not enough(high) and high <= MOST:
        high *= 2
    low = high / 2
    while enough(low) and low >= LEAST:
        low, high = low / 2, low
    if not LEAST <= low < high <= MOST:
        raise ValueError(
            f"noise_multiplier_for: epsilon={epsilon}: the noise for it is not between {LEAST} and {MOST:,.0f}"
        )
    while high > 1.005 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


LEAST, MOST = 0.1, 1e5
RANGES = {
    "noise": (0, math.inf, "a finite number above 0"),
    "epsilon": (0, math.nextafter(100, 101), "a number above 0 and at most 100"),
    "rate": (0, math.nextafter(1, 2), "a number above 0 and at most 1"),
    "delta": (0, 1, "a number above 0 and below 1"),
    "steps": (-1, math.inf, "an int, 0 or more"),
}


def _check_ranges(caller: str, **numbers: Any) -> None:
    for name, value in numbers.items():
        low, high, requirement = RANGES[name]
        kind: Any = int if name == "steps" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not low < value < high:
            raise ValueError(f"{caller}: {name} must be {requirement}, got {value!r}")


def _library(caller: str) -> Any:
    try:
        import dp_accounting.pld  # takes a second, with scipy
    except ImportError as error:
        raise ImportError(f"{caller} needs the package dp-accounting: pip install '.[privacy]'") from error
    return dp_accounting


def _composed_epsilon(library: Any, noise: float, rate: float, steps: int, delta: float) -> float:
    """Computes epsilon from privacy loss distributions, on a grid fine enough for one step."""
    max_loss = 0.5 / noise**2 + 10 / noise  # about the largest loss of a step
    mu = rate * math.sqrt(steps * math.expm1(min(noise**-2, 30)))  # about the shift of one normal of all steps
    grid = max(max_loss / 3e4, (mu**2 / 2 + 6 * mu) / 1e6)
    accountant = library.pld.PLDAccountant(value_discretization_interval=grid)
    event = library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
    try:
        return float(accountant.compose(event, steps).get_epsilon(delta))
    except OverflowError:
        return math.inf
