"""What an accountant says of DP-SGD, against closed forms and published values."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import pytest

from shardfn.curvature import epsilon, noise_multiplier_for, privacy
from tests.refusals import refused, told


def normal(x: float) -> float:
    """The distribution function of a normal number."""
    return math.erfc(-x / math.sqrt(2)) / 2


def delta_of_all(eps: float, noise: float, steps: int) -> float:
    """Delta of the sum of all rows with noise, by Balle and Wang (2018), theorem 8: steps are one of less noise."""
    mu = math.sqrt(steps) / noise
    return normal(mu / 2 - eps / mu) - math.exp(eps) * normal(-mu / 2 - eps / mu)


def delta_of_a_step(eps: float, noise: float, rate: float) -> float:
    """Delta of one step, by the integral of where the likelihood ratio of (1 - q) N(0) + q N(1) and N(0) is large."""

    def beyond(at: float, mean: float, up: bool) -> float:
        return normal((mean - at) / noise if up else (at - mean) / noise)

    def mixed(at: float, up: bool) -> float:
        return rate * beyond(at, 1, up) + (1 - rate) * beyond(at, 0, up)

    removed = 0.5 + noise**2 * math.log((math.exp(eps) - 1 + rate) / rate)
    found = mixed(removed, True) - math.exp(eps) * beyond(removed, 0, True)
    if math.exp(-eps) > 1 - rate:
        added = 0.5 + noise**2 * math.log((math.exp(-eps) - 1 + rate) / rate)
        found = max(found, beyond(added, 0, False) - math.exp(eps) * mixed(added, False))
    return found


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (4.0, 10), (30.0, 10_000), (300.0, 100), (0.5, 1), (2.0, 100)])
def test_of_all_rows_it_is_the_closed_form(noise: float, steps: int) -> None:
    found = epsilon(noise, 1.0, steps, 1e-5)
    assert delta_of_all(found, noise, steps) <= 1e-5
    assert delta_of_all(found * (1 - 1e-3), noise, steps) > 1e-5


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (0.6, 0.01), (3.0, 0.5), (50.0, 0.5), (0.4, 0.9)])
def test_of_one_sample_it_is_the_closed_form(noise: float, rate: float) -> None:
    found = epsilon(noise, rate, 1, 1e-5)
    assert delta_of_a_step(found, noise, rate) <= 1e-5
    assert delta_of_a_step(found * (1 - 1e-3), noise, rate) > 1e-5


PUBLISHED = {  # by moments, for 60,000 images and delta 1e-5: looser bounds of the same
    "Abadi et al. 2016, section 3.2": (4.0, 0.01, 10_000, 1.26),
    "TensorFlow Privacy's tutorial on MNIST, 15 epochs": (1.3, 250 / 60_000, 15 * 240, 1.19),
    "60 epochs": (1.1, 250 / 60_000, 60 * 240, 3.01),
    "45 epochs": (0.7, 250 / 60_000, 45 * 240, 7.10),
}


@pytest.mark.parametrize("source", PUBLISHED)
def test_published_bounds_are_a_little_looser(source: str) -> None:
    noise, rate, steps, bound = PUBLISHED[source]
    assert 0.7 * bound < epsilon(noise, rate, steps, 1e-5) < bound


def test_more_is_less_private() -> None:
    def of(**other: Any) -> float:
        return epsilon(**dict[str, Any](noise=1.1, rate=0.01, steps=100, delta=1e-5) | other)

    least = of()
    assert all(of(**more) > least for more in ({"noise": 1.0}, {"rate": 0.02}, {"steps": 200}, {"delta": 1e-6}))
    assert of(steps=0) == 0.0
    assert of(noise=0.02) == math.inf


@pytest.mark.parametrize("asked", [0.5, 30.0])
def test_the_noise_for_an_epsilon_has_it(asked: float) -> None:
    noise = noise_multiplier_for(asked, 0.1, 50, 1e-5)
    assert epsilon(noise, 0.1, 50, 1e-5) <= asked < epsilon(noise / 1.006, 0.1, 50, 1e-5)


def test_an_epsilon_out_of_reach_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "LEAST", 0.9)
    monkeypatch.setattr(privacy, "MOST", 4.0)
    for asked in (60.0, 0.1):
        said = refused(functools.partial(noise_multiplier_for, asked, 1.0, 10, 1e-5), ValueError)
        assert said == f"noise_multiplier_for: epsilon={asked}: the noise for it is not between 0.9 and 4"


WRONG: dict[str, tuple[Any, str]] = {
    "noise": (0.0, "epsilon: noise must be a finite number above 0, got 0.0"),
    "rate": (1.1, "epsilon: rate must be a number above 0 and at most 1, got 1.1"),
    "steps": (1.0, "epsilon: steps must be an int, 0 or more, got 1.0"),
    "delta": (1, "epsilon: delta must be a number above 0 and below 1, got 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_numbers_out_of_range_are_refused(name: str) -> None:
    value, says = WRONG[name]
    given: dict[str, Any] = {"noise": 1.0, "rate": 1.0, "steps": 1, "delta": 1e-5}
    assert told(lambda: epsilon(**given | {name: value})) == f"ValueError: {says}"
    others = {key: x for key, x in given.items() if key != "noise"}
    assert told(lambda: noise_multiplier_for(**{"epsilon": True} | others)).startswith(
        "ValueError: noise_multiplier_for: epsilon must be"
    )
    assert "steps must be 1 or more, got 0, which need no noise" in told(
        lambda: noise_multiplier_for(1.0, **others | {"steps": 0})
    )


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("dp_accounting", "dp_accounting.pld"):
        monkeypatch.setitem(sys.modules, module, None)
    for call in (epsilon, noise_multiplier_for):
        said = told(functools.partial(call, 1.0, 1.0, 1, 1e-5))
        assert said == f"ImportError: {call.__name__} needs the package dp-accounting: pip install '.[privacy]'"
