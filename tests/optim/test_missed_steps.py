"""Parameters that are trained later than others: their means are corrected by the steps that they have made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import checkpoint
from shardfn.curvature import hvp, preconditioned
from shardfn.testing import world
from tests.models import distance
from tests.reference import worst

BEFORE, AFTER = 7, 4
OPTIMIZERS: dict[str, Callable[[], so.Optimizer]] = {
    "adam": lambda: so.adam(0.1),
    "adam, pure": lambda: so.adam(0.1, donate=False),
    "adamw by rule": lambda: so.adamw(0.1, weight_decay=lambda path, shape: 0.1 * len(shape)),
    "adamw, float32": lambda: so.adamw(0.1, state_dtype=torch.float32),
    "adamw8bit": lambda: so.adamw8bit(0.1),
    "adamw8bit, pure": lambda: so.adamw8bit(0.1, donate=False),
    "lamb": lambda: so.lamb(0.1, weight_decay=0.1),
    "lamb, pure": lambda: so.lamb(0.1, donate=False),
    "adafactor": lambda: so.adafactor(0.1),
    "adafactor, pure": lambda: so.adafactor(0.1, donate=False),
    "soap": lambda: so.soap(0.1),
    "masked": lambda: so.masked(so.adamw(0.1), r".*w", so.lamb(0.1)),
    "master": lambda: so.fp32_master_weights(so.adamw(0.1)),
    "ema": lambda: so.ema(so.adamw(0.1), 0.9),
    "skip_nonfinite": lambda: so.skip_nonfinite(so.adam(0.1)),
    "torch's": lambda: so.from_torch(torch.optim.AdamW, lr=0.1),
}
COUNTED = ["adam", "adam, pure", "adamw8bit", "lamb", "lamb, pure", "adafactor", "adafactor, pure"]


def drawn(seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(5, 3, generator=draw, dtype=torch.float64), "b": torch.randn(3, generator=draw).double()}


def gradients(params: Any, step: int) -> Any:
    return optree.tree_map(lambda x: torch.sin(x.detach() + step) * (x != 0), params)


def placed(tree: Any, stages: list[str] | None = None) -> Any:
    return sf.shard(tree, sf.make_mesh(shard=-1, device="cpu"), sf.full_shard("shard"), stages=stages)


def late(name: str, plain: bool) -> float:
    """How far a parameter that is trained after others is from one that is trained alone."""
    optimizer = OPTIMIZERS[name]()
    make: Callable[[Any], Any] = (lambda tree: tree) if plain else placed
    params, alone = make({"old": drawn(0), "new": drawn(1)}), make({"new": drawn(1)})
    state, own = optimizer.init(params), optimizer.init(alone)
    for step in range(BEFORE):
        params, state = optimizer.step(params, {**gradients(params, step), "new": nothing(params["new"])}, state)
    for step in range(BEFORE, BEFORE + AFTER):
        alone, own = optimizer.step(alone, gradients(alone, step), own)
        params, state = optimizer.step(params, gradients(params, step), state)
    read = (lambda tree: tree) if plain else sf.unshard
    return distance(read(params)["new"], read(alone)["new"])


def nothing(params: Any) -> Any:
    return None if not isinstance(params, dict) else dict.fromkeys(params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_without_gradients_at_first_is_trained_as_if_alone(name: str) -> None:
    for ranks in (1, 2):
        assert worst(world(ranks).run(late, name, False)) < 1e-14
    assert late(name, True) < 1e-14


def counted(state: Any) -> Any:
    """A state whose numbers of steps are tensors, as in a captured step."""
    if not isinstance(state, dict):
        return state
    made = {key: torch.tensor(value) if key == "step" else counted(value) for key, value in state.items()}
    return made | ({"missed": optree.tree_map(torch.tensor, state["missed"])} if "missed" in state else {})


def by_tensors(name: str) -> float:
    found = []
    for change in (lambda state: state, counted):
        optimizer, params = OPTIMIZERS[name](), placed({"old": drawn(0), "new": drawn(1)})
        state = optimizer.init(params)
        params, state = optimizer.step(params, {**gradients(params, 0), "new": None}, state)
        state = change(state)
        for step in range(1, 4):
            params, state = optimizer.step(params, gradients(params, step), state)
        found.append(sf.unshard(params))
    return distance(*found)


@pytest.mark.parametrize("name", COUNTED)
def test_missed_steps_may_be_tensors(name: str) -> None:
    assert worst(world(1).run(by_tensors, name)) < 1e-14


def unfrozen(name: str, folder: str, together: bool) -> float:
    """As `late`, with a checkpoint in between that has no moments of the new ones; all may lie in one stage there."""
    optimizer = OPTIMIZERS[name]()
    params = placed({"m": {"old": drawn(0)}})
    state = optimizer.init(params)
    for step in range(BEFORE):
        params, state = optimizer.step(params, gradients(params, step), state)
    want = sf.unshard(params)["m"]
    checkpoint.save(folder, {"params": params, "state": state})
    params = placed({"m": {"old": drawn(2), "new": drawn(1)}}, None if together else ["m.old", "m.new"])
    read = checkpoint.load(folder, {"params": params, "state": optimizer.init(params)}, strict=False)
    params, state = read["params"], read["state"]
    old, alone = placed({"m": {"old": want["old"]}}), placed({"m": {"new": drawn(1)}})
    kept = checkpoint.load(folder, {"state": optimizer.init(old)}, strict=False)["state"]
    own = optimizer.init(alone)
    for step in range(BEFORE, BEFORE + AFTER):
        alone, own = optimizer.step(alone, gradients(alone, step), own)
        old, kept = optimizer.step(old, gradients(old, step), kept)
        params, state = optimizer.step(params, gradients(params, step), state)
    both = {"new": sf.unshard(alone)["m"]["new"], "old": sf.unshard(old)["m"]["old"]}
    # What is counted travels: into a new state, and into one that has missed other steps.
    checkpoint.save(f"{folder} again", {"params": params, "state": state})
    for like in (optimizer.init(params), optree.tree_map(lambda x: x, state)):
        again = checkpoint.load(f"{folder} again", {"state": like, "params": params}, donate=False)["state"]
        assert counts(again) == counts(state)
    return distance(sf.unshard(params)["m"], both)


def counts(state: Any) -> list[Any]:
    if not isinstance(state, dict):
        return []
    own = [(state["step"], sorted(state["missed"].items()))] if "missed" in state else []
    return [*own, *(found for value in state.values() for found in counts(value))]


@pytest.mark.parametrize("together", [True, False], ids=["one stage", "two stages"])
@pytest.mark.parametrize("name", [*COUNTED, "masked", "ema", "soap"])
def test_parameters_that_a_checkpoint_has_no_moments_of_are_new(name: str, together: bool, tmp_path: Path) -> None:
    for ranks in (1, 2):
        assert worst(world(ranks).run(unfrozen, name, str(tmp_path / str(ranks)), together)) < 1e-14


def from_torchs(folder: Path) -> float:
    """How far we are from torch, going on from its state of parameters that have made other numbers of steps."""
    names = ("old", "new")
    variables = {name: drawn(i)["w"].requires_grad_() for i, name in enumerate(names)}
    optimizer = torch.optim.AdamW(variables.values(), lr=0.1, weight_decay=0.0)

    def steps(some: tuple[str, ...], first: int, last: int) -> None:
        for step in range(first, last):
            for name, x in variables.items():
                x.grad = gradients(x, step) if name in some else None
            optimizer.step()

    steps(("old",), 0, BEFORE)
    steps(names, BEFORE, BEFORE + 2)
    found = optimizer.state_dict()
    torch.save(
        {
            "state": {name: found["state"][i] for i, name in enumerate(names)},
            "param_groups": [{**found["param_groups"][0], "params": list(names)}],
        },
        folder / "there.pt",
    )
    mine = so.adamw(0.5)
    params = placed({"m": {name: x.detach().clone() for name, x in variables.items()}})
    rules = [(r"m\.(.*)", r"\1")]
    state = checkpoint.load_torch_optimizer(folder / "there.pt", mine.init(params), names=rules)
    assert (state["step"], state["missed"]) == (BEFORE + 2, {"m.new": BEFORE})
    back = checkpoint.torch_optimizer(state)["state"]
    assert [float(back[f"m.{name}"]["step"]) for name in names] == [BEFORE + 2, 2]
    steps(names, BEFORE + 2, BEFORE + AFTER)
    for step in range(BEFORE + 2, BEFORE + AFTER):
        params, state = mine.step(params, gradients(params, step), state)
    return distance(sf.unshard(params)["m"], {name: x.detach() for name, x in variables.items()})


def test_torchs_counts_for_each_parameter_are_kept(tmp_path: Path) -> None:
    assert worst(world(1).run(from_torchs, tmp_path)) < 1e-14


def test_factored_squares_of_what_has_no_gradient_stay() -> None:
    optimizer, params = so.adafactor(0.1), {"a": torch.ones(4, 3), "b": torch.ones(4, 3)}
    state = optimizer.init(params)
    params, state = optimizer.step(params, gradients(params, 0), state)
    before: Tensor = state["chosen"]["square"]["b"].clone()
    params, state = optimizer.step(params, {**gradients(params, 1), "b": None}, state)
    assert state["chosen"]["square"]["b"].equal(before)


def divisors() -> float:
    """How far the divisor of Adam's mean is from that of each parameter's own count, by the trace of the identity."""
    params = placed({"m": {"old": drawn(0), "new": drawn(1)}})
    optimizer = so.adam(0.1)
    state = optimizer.init(params)
    params, state = optimizer.step(params, gradients(params, 0), state)
    state = state | {"step": 5, "missed": {"m.new.w": 4, "m.new.b": 4}}

    def loss(p: Any) -> Tensor:
        return so.vdot(p, p) / 2

    A = preconditioned(hvp(loss, params), state)
    found = sf.unshard(A @ optree.tree_map(torch.ones_like, params))["m"]
    squares = sf.unshard(state["square"])["m"]
    want = {
        name: {k: 1 / ((1 - 0.9**t) * ((x / (1 - 0.999**t)).sqrt() + 1e-8)) for k, x in squares[name].items()}
        for name, t in (("old", 5), ("new", 1))
    }
    return distance(found, want)


def test_a_hessian_is_preconditioned_by_each_parameters_own_count() -> None:
    for ranks in (1, 2):
        assert worst(world(ranks).run(divisors)) < 1e-10
