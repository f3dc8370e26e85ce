"""What ranks must be given alike, what a folder must be of, and errors that say what to do."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

import shardfn as sf
import shardfn.optim as so
from shardfn import curvature as sc
from shardfn.testing import World
from shardfn.testing import world as started
from shardfn.testing.world import close_worlds
from tests.curvature.test_curvature import given
from tests.curvature.test_influence import losses_of, mine, net, rows, whole
from tests.models import STRATEGIES, data_mesh, leaves
from tests.refusals import refused, told

two = pytest.mark.world(2, "processes")
misused: Any = sc  # with arguments that mypy would refuse


def any_of(x: Any) -> Any:
    """The same, of which mypy knows no more."""
    return x


# --- numbers that ranks must be given alike ---

LOCAL = {"epsilon", "noise_multiplier_for", "Spectrum.density", "SampledLabels.labeled"}  # no other rank takes part
SECRET = 987654321


def functions() -> dict[str, Any]:
    """All functions of the kit, and methods of its classes."""
    found = {}
    for name in sc.__all__:
        value = getattr(sc, name)
        if inspect.isfunction(value):
            found[name] = value
        for key, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(method) and not key.startswith("_") and value.__module__.startswith("shardfn"):
                found[f"{name}.{key}"] = method
    return found


def settings() -> set[tuple[str, str]]:
    """All of their arguments that are numbers or flags."""
    kinds = re.compile(r"\b(int|float|bool)\b")
    return {
        (name, key)
        for name, f in functions().items()
        if name not in LOCAL
        for key, parameter in inspect.signature(f).parameters.items()
        if kinds.search(str(parameter.annotation)) and "Tensor" not in str(parameter.annotation)
    }


def calls(params: Any, batches: Any, folder: str) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """A call of each function, and its numbers."""
    A, b, losses = given(torch.eye(3)), {"x": torch.ones(3)}, losses_of(sf.stage)
    rows = sc.per_example(losses, params, *batches[0])
    F = sc.ekfac(losses, params, batches, corrected=False)
    store = sc.store_gradients(folder, losses, params, batches, size=2)
    private = {
        "max_grad_norm": 1.0,
        "noise_multiplier": 1.0,
        "expected_batch_size": 4.0,
        "seed": SECRET,
        "step": 1,
        "micro": 1,
    }
    pure, weights = so.sgd(0.1, donate=False), torch.ones(())
    return {
        "top_eig": (
            lambda **n: sc.top_eig(A, **n),
            {"count": 1, "tolerance": 0.1, "max_basis": 3, "products": 9, "seed": 0},
        ),
        "spectrum": (lambda **n: sc.spectrum(A, **n), {"steps": 1, "num_probes": 1, "seed": 0, "every": 1}),
        "trace": (lambda **n: sc.trace(A, **n), {"num_matvecs": 9, "sketch": 1, "seed": 0}),
        "diag": (lambda **n: sc.diag(A, **n), {"products": 2, "seed": 0}),
        "solve": (
            lambda **n: sc.solve(A, b, "neumann", **n),
            {"damping": 0.1, "tolerance": 0.1, "products": 9, "scale": 0.5},
        ),
        "sharpness": (
            lambda **n: sc.sharpness(lambda p: p["x"].square().sum(), b, **n),
            {"tolerance": 0.1, "products": 9, "seed": 0},
        ),
        "critical_sharpness": (
            lambda **n: sc.critical_sharpness(lambda p: p["x"].square().sum(), b, b, **n),
            {"rate": 0.1, "tolerance": 0.1, "forwards": 5},
        ),
        "fisher": (lambda **n: sc.fisher(lambda p: p, lambda z: z, b, **n), {"labels": 1}),
        "per_example": (lambda **n: sc.per_example(losses, params, *batches[0], **n), {"micro": 1}),
        "PerExample.clipped": (rows.clipped, {"limit": 1.0}),
        "dp_grads": (lambda **n: sc.dp_grads(losses, params, batches[0], **n), private),
        "ekfac": (lambda **n: sc.ekfac(losses, params, batches, **n), {"corrected": False}),
        "Kronecker.solve": (lambda **n: F.solve(params, **n), {"damping": 0.1}),
        "second_moments": (
            lambda **n: sc.second_moments(losses, params, batches, **n), {"outputs": False, "fisher": False}
        ),
        "store_gradients": (
            lambda **n: sc.store_gradients(folder, losses, params, batches, **n), {"size": 2, "seed": 0}
        ),
        "GradientStore.scores": (lambda **n: store.scores([], **n), {"damping": 0.1}),
        "unroll": (
            lambda **n: sc.unroll(lambda p, h, *_: p["x"].sum() * h, pure, lambda p, h: p["x"].sum(), **n)(
                b, pure.init(b), weights, [(1,), (2,)]
            ),
            {"segment": 1},
        ),
    }  # fmt: skip


def differing(folder: str) -> dict[tuple[str, str], str]:
    """What each call says if the last rank is given another number."""
    mesh = data_mesh(dist.get_world_size())
    params, found = sf.shard(whole(), mesh, STRATEGIES["full_shard"]), {}
    for name, (call, numbers) in calls(params, mine(mesh), folder).items():
        for key, value in numbers.items():
            other = not value if isinstance(value, bool) else value + 1
            own = numbers | ({key: other} if mesh.get_rank() else {})
            found[name, key] = told(functools.partial(call, **own))
    return found


@two
def test_each_number_is_compared_between_ranks(world: World, tmp_path: Path) -> None:
    for found in world.run(differing, str(tmp_path / "rows")):
        assert settings() == found.keys()
        for (name, key), said in found.items():
            assert re.match(rf"ValueError: .*differ.*\b{key}", said, re.DOTALL), (name, key, said)
            assert len(said) < 700
            assert str(SECRET) not in said, (name, key, said)


def otherwise_differing() -> dict[str, str]:
    mesh = data_mesh(dist.get_world_size())
    rank, losses = mesh.get_rank(), losses_of(sf.stage)
    params, batches = sf.shard(whole(), mesh, STRATEGIES["full_shard"]), mine(mesh)
    H = sc.hvp(lambda p, *b: losses(p, *b).sum(), params, batches)
    moments = sc.second_moments(losses, params, batches, outputs=True)
    matrices = [path for path in moments.kinds if "head" in path]
    rows = sc.per_example(losses, params, *batches[0])
    private: Any = {"max_grad_norm": 1.0, "noise_multiplier": 0.0, "expected_batch_size": 4.0, "seed": 0, "step": 0}

    def estimated(**numbers: Any) -> Any:
        optimizer = so.kfac(0.1, which=matrices, **numbers)
        return optimizer.estimate(moments, optimizer.init(params))

    return {
        "a factor": told(lambda: H * (2.0 + rank)),
        "rows of one rank": told(lambda: H / (1000 + rank)),
        "no batches": told(lambda: sc.hvp(losses, params, None if rank else batches)),
        "a generator": told(lambda: sc.hvp(losses, params, iter(batches) if rank else batches)),
        "a seed of labels": told(lambda: sc.second_moments(
            sc.SampledLabels(lambda p, t, y: net(sf.stage, p, t), lambda z, t, y: Categorical(logits=z), seed=rank),
            params, batches,
        )),
        "a state": told(lambda: sc.sharpness(lambda p: p["x"].square().sum(), {"x": torch.ones(3)},
                                             state={"x": torch.ones(3)} if rank else None)),
        "kfac": told(lambda: estimated(damping=0.1 + rank)),
        "kfac's steps": told(lambda: estimated(every=1 + rank)),
        "a range": told(lambda: sc.dp_grads(losses, params, batches[0], **private | {"max_grad_norm": 1.0 - rank})),
        "parts": told(lambda: sc.per_example(losses, params, *batches[0], micro=1 - rank)),
        "weights": told(lambda: rows.weighted(torch.ones(len(rows.norms) + rank))),
        "a limit": told(lambda: rows.clipped(1.0 - rank)),
    }  # fmt: skip


@two
def test_what_one_rank_is_given_otherwise_is_told_on_all(world: World) -> None:
    for found in world.run(otherwise_differing):
        for what, said in found.items():
            assert re.match(r"(ValueError|TypeError): ", said), (what, said)
        assert "a factor is from 2 to 3 on the ranks" in found["a factor"]
        assert "a factor is from 0.000999001 to 0.001 on the ranks" in found["rows of one rank"]
        assert "state: " in found["a state"]
        assert "damping: 0.1" in found["kfac"]
        assert "every: 1" in found["kfac's steps"]
        assert "max_grad_norm must be a finite number above 0, got 0.0" in found["a range"]
        assert "limit must be a number above 0, got 0.0" in found["a limit"]


# --- folders ---


def plain_losses(params: Any, t: Tensor, y: Tensor, stage: Any = lambda f: f) -> Tensor:
    return losses_of(stage)(params, t, y)


def smoothed(params: Any, t: Tensor, y: Tensor, stage: Any = lambda f: f) -> Tensor:
    return F.cross_entropy(net(stage, params, t), y, reduction="none", label_smoothing=0.01)


def half_stopped(params: Any, t: Tensor, y: Tensor, stage: Any = lambda f: f) -> Tensor:
    """The same losses, with other gradients."""
    each = losses_of(stage)(params, t, y)
    return (each + each.detach()) / 2


def dropped(params: Any, t: Tensor, y: Tensor) -> Tensor:
    each: Tensor = losses_of(lambda f: f)(params, t, y)
    return F.dropout(each, 0.5)


def drawn(seed: int = 0, temperature: float = 1.0, stage: Any = lambda f: f) -> sc.SampledLabels:
    return sc.SampledLabels(lambda p, t, y: net(stage, p, t), lambda z, t, y: Categorical(logits=z / temperature), seed)


def moved(by: float) -> Any:
    other = whole()
    other["head"]["w"] = other["head"]["w"] * (1 + by)
    return other


def kept(name: str, folder: Path, losses: Any, params: Any, batches: Any) -> Any:
    """What each function that has a folder found."""
    if name == "spectrum":
        H = sc.hvp(lambda p, *batch: losses(p, *batch).sum(), params, batches)
        return sc.spectrum(H, 4, folder=folder).values
    if name == "ekfac":
        return leaves(sf.unshard(sc.ekfac(losses, params, batches, folder=folder).state))["head.w.values"]
    store = sc.store_gradients(folder, losses, params, batches, size=2)
    return store.scores([params])


FOLDERS = ("spectrum", "ekfac", "store_gradients")


def test_all_functions_with_a_folder_are_tried() -> None:
    assert {name for name, f in functions().items() if "folder" in inspect.signature(f).parameters} == set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize(
    ("losses", "by", "said"),
    [
        (smoothed, 0.0, "of (other losses|another operator)"),
        (half_stopped, 0.0, "of (other losses|another operator)"),
        (plain_losses, 1e-7, "of different values of the parameters"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, name: str, losses: Any, by: float, said: str) -> None:
    batches = [rows(0), rows(1)]
    first = kept(name, tmp_path / "f", plain_losses, whole(), batches)
    again = kept(name, tmp_path / "f", plain_losses, whole(), batches)
    assert torch.equal(first, again)
    message = refused(lambda: kept(name, tmp_path / "f", losses, moved(by), batches))
    assert re.search(said, message), message
    assert str(tmp_path) in message
    assert len(message) < 700
    assert torch.equal(first, kept(name, tmp_path / "f", plain_losses, whole(), batches))


@pytest.mark.parametrize("name", FOLDERS[1:])
def test_a_folder_of_losses_that_draw_is_known_again(tmp_path: Path, name: str) -> None:
    batches = [rows(0), rows(1)]
    torch.manual_seed(1)
    first = kept(name, tmp_path / "f", dropped, whole(), batches)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(first, kept(name, tmp_path / "f", dropped, whole(), batches))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("other", "said"), [(drawn(1), "drawn with seed 0.*drawn with seed 1"),
                                             (drawn(0, 1.01), "of other losses"), (plain_losses, "given")])  # fmt: skip
def test_a_folder_of_other_labels_is_refused(tmp_path: Path, other: Any, said: str) -> None:
    kept("ekfac", tmp_path / "f", drawn(), whole(), [rows(0)])
    assert re.search(said, refused(lambda: kept("ekfac", tmp_path / "f", other, whole(), [rows(0)])))
    nothing = told(lambda: kept("ekfac", tmp_path / "none", drawn(), whole(), None))
    assert re.match(r"ValueError: ekfac of .*: pass batches, as there is nothing in .*none", nothing), nothing


def on_mesh(folder: Path, temperature: float, cut: int) -> dict[str, str]:
    mesh = data_mesh(dist.get_world_size())
    params, found = sf.shard(whole(), mesh, STRATEGIES["full_shard"]), {}
    batches = [tuple(x[:cut].tensor_split(mesh.size())[mesh.get_rank()] for x in rows(0))]
    kinds: dict[str, Any] = {
        "given": functools.partial(plain_losses if temperature == 1.0 else smoothed, stage=sf.stage),
        "drawn": drawn(0, temperature, sf.stage),
    }
    for name, losses in kinds.items():
        found[name] = told(functools.partial(sc.ekfac, losses, params, batches, folder=folder / name))
    return found


def on_the_first_rank(folder: Path) -> list[Tensor]:
    """Only the first rank has rows."""
    mesh = data_mesh(dist.get_world_size())
    params, first = sf.shard(whole(), mesh, STRATEGIES["hybrid_shard"]), mesh.get_rank() == 0
    batch: Any = tuple(x if first else x[:0] for x in rows(0))
    norms = sc.per_example(losses_of(sf.stage), params, *batch).norms
    for name, losses in {"given": losses_of(sf.stage), "drawn": drawn(0, 1.0, sf.stage)}.items():
        for _ in range(2):
            sc.ekfac(losses, params, [batch], folder=folder / name)
    return [norms] if first else []


def test_ranks_without_rows_join_when_groups_are_made(tmp_path: Path) -> None:
    close_worlds()  # so that no rank knows a group
    want = sc.per_example(plain_losses, whole(), *rows(0)).norms
    (norms,), *others = started(4, "processes").with_deadline(60).run(on_the_first_rank, tmp_path)
    assert others == [[]] * 3
    torch.testing.assert_close(norms, want)


def test_losses_are_compared_on_another_mesh(tmp_path: Path) -> None:
    for ranks, temperature, cut, said in (
        (2, 1.0, 8, "it was done"), (1, 1.0, 8, "it was done"), (4, 1.0, 8, "it was done"),
        (4, 1.01, 8, "CheckpointError: .*of other losses"), (1, 1.01, 8, "CheckpointError: .*of other losses"),
    ):  # fmt: skip
        for found in started(ranks, "processes").run(on_mesh, tmp_path, temperature, cut):
            assert all(re.match(said, each) for each in found.values()), (ranks, found)
    for found in started(2, "processes").run(on_mesh, tmp_path, 1.0, 6):
        assert re.match("CheckpointError: .*of another first batch, of 8 rows .* not 6", found["given"]), found


# --- errors that say what to do ---

X = {"x": torch.ones(3)}
PAIR: Any = (torch.ones(2, 3), torch.ones(2))
EYE = torch.eye(3)


def two_of(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return (x @ p["x"] - y).square()


def summed(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return two_of(p, x, y).sum()


def outer_loss(p: Any, h: Any, x: Tensor, y: Tensor) -> Tensor:
    return summed(p, x, y) * h


def normal(z: Tensor, x: Tensor, y: Tensor) -> Any:
    return torch.distributions.Normal(z, 1.0)


PURE = so.sgd(0.1, donate=False)
UNPACKED: dict[str, Callable[[], Any]] = {
    "hvp": lambda: sc.hvp(summed, X, PAIR) @ X,
    "ggn": lambda: sc.ggn(two_of, lambda z, x, y: z.sum(), X, PAIR) @ X,
    "ggn's loss": lambda: sc.ggn(lambda p, *_: p["x"], lambda z, x, y: z.sum(), X, PAIR) @ X,
    "fisher": lambda: sc.fisher(two_of, normal, X, PAIR) @ X,
    "empirical_fisher": lambda: sc.empirical_fisher(two_of, X, PAIR) @ X,
    "sharpness": lambda: sc.sharpness(summed, X, PAIR),
    "critical_sharpness": lambda: sc.critical_sharpness(summed, X, X, PAIR),
    "influence": lambda: sc.influence(lambda q: q, [X], two_of, X, PAIR),
    "store_gradients": lambda: sc.store_gradients("/nowhere/at/all", two_of, X, PAIR),
    "ekfac": lambda: sc.ekfac(two_of, X, PAIR),
    "ekfac of drawn": lambda: sc.ekfac(sc.SampledLabels(two_of, normal), X, PAIR),
    "second_moments": lambda: sc.second_moments(two_of, X, PAIR),
    "unroll": lambda: sc.unroll(outer_loss, PURE, lambda p, h: p["x"].sum())(X, PURE.init(X), torch.ones(()), PAIR),
    "implicit": lambda: sc.implicit(outer_loss, lambda p, h: p["x"].sum(), X, torch.ones(()), PAIR),
}


@pytest.mark.parametrize("which", UNPACKED)
def test_one_batch_in_place_of_a_list_is_told(which: str) -> None:
    message = told(UNPACKED[which])
    caller = "hvp" if which == "sharpness" else re.split("['| ]", which)[0]
    assert re.match(rf"TypeError: {caller}", message), message
    assert re.search(r"gets \d arguments in batch 0: missing a required argument: 'y'. Batches are a list", message)
    assert "[(x, y)] for one batch, not (x, y)" in message
    assert len(message) < 700


def test_all_functions_with_batches_are_tried() -> None:
    having = {name for name, f in functions().items() if "batches" in inspect.signature(f).parameters}
    assert having - {re.split("['| ]", which)[0] for which in UNPACKED} == set()


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "top_eig": sc.top_eig, "spectrum": sc.spectrum, "trace": sc.trace, "diag": sc.diag,
    "solve": lambda A: sc.solve(A, X), "preconditioned": lambda A: sc.preconditioned(A, X),
}  # fmt: skip


@pytest.mark.parametrize("which", OPERATORS)
def test_what_is_no_operator_is_told(which: str) -> None:
    for wrong, kind in ((summed, "the function summed"), (X, "a dict"), (EYE, "a tensor of shape (3, 3)")):
        message = told(functools.partial(OPERATORS[which], wrong))
        assert message.startswith(f"TypeError: {which}: A must be an operator, got {kind}"), message


def test_all_functions_of_operators_are_tried() -> None:
    taking = {name for name, f in functions().items() if list(inspect.signature(f).parameters)[:1] == ["A"]}
    assert taking == OPERATORS.keys()


COUNTS = {
    "top_eig": ("count", "max_basis", "products"), "spectrum": ("steps", "num_probes", "every"), "diag": ("products",),
    "trace": ("num_matvecs", "sketch"), "solve": ("products",),
}  # fmt: skip


@pytest.mark.parametrize(("which", "key"), [(which, key) for which, keys in COUNTS.items() for key in keys])
def test_a_count_that_is_no_integer_is_told(which: str, key: str) -> None:
    call: Any = functools.partial(sc.solve, given(EYE), X) if which == "solve" else None
    call = call or functools.partial(getattr(sc, which), given(EYE))
    for value, said in ((2.5, "2.5, a float"), ("3", "'3', a str"), (True, "True, a bool")):
        message = told(functools.partial(call, **{key: value}))
        assert re.match(rf"TypeError: {which}: {key} must be an integer of \d or more, got {said}", message), message
    message = told(lambda: call(**{key: -1}))
    assert re.match(rf"ValueError: {which}: {key} must be an integer of \d or more, got -1", message), message


def stored(folder: str | None = None) -> sc.GradientStore:
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory() as place:
        return sc.store_gradients(place, two_of, X, [PAIR])


def unsaid() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = stored(folder).folder / "gradients.json"
        file.write_text(json.dumps({key: x for key, x in json.loads(file.read_text()).items() if key != "of"}))
        stored(folder)


MISUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "more eigenvalues than products": (
        lambda: sc.top_eig(given(torch.eye(178)), 1000, products=50),
        "ValueError: top_eig: products=50, count=1000, of 178 eigenvalues: .*pass products=178",
    ),
    "forwards": (
        lambda: misused.critical_sharpness(summed, X, X, [PAIR], forwards=2.5),
        "TypeError: .*forwards must be an integer of 2 or more, got 2.5, a float",
    ),
    "damping": (
        lambda: misused.solve(given(EYE), X, damping="1"),
        "TypeError: solve: damping must be a number, got '1', a str",
    ),
    "tolerance": (
        lambda: sc.solve(given(EYE), X, tolerance=-1.0),
        "ValueError: solve: tolerance must be a number of 0 or more, got -1.0",
    ),
    "a seed": (lambda: misused.trace(given(EYE), seed=0.5), "TypeError: a seed is an int"),
    "a matrix in place of its inverse": (
        lambda: misused.influence(sc.ekfac(two_of, X, [PAIR]), [X], two_of, X, [PAIR]),
        "TypeError: influence of two_of: inverse must be a function .* got a Kronecker. Pass lambda q: F.sol",
    ),
    "a solver without damping": (
        lambda: misused.influence(sc.ekfac(two_of, X, [PAIR]).solve, [X], two_of, X, [PAIR]),
        "TypeError: influence .*missing a required argument: 'damping'. Pass a function of a query alone: lambda q",
    ),
    "a query without a list": (
        lambda: misused.influence(lambda q: q, X, two_of, X, [PAIR]),
        r"TypeError: influence .*queries must be a list of trees .*got a dict. Pass \[q\]",
    ),
    "a query of a store without a list": (
        lambda: any_of(stored()).scores(X),
        r"TypeError: scores: queries must be a list of trees .*got a dict. Pass \[q\]",
    ),
    "a folder that does not say what it is of": (unsaid, "CheckpointError: .*does not say what it was made of: remove"),
    "a query of another kind": (
        lambda: sc.influence(lambda q: q, [EYE], two_of, X, [PAIR]),
        r"ValueError: influence .*a query is a tree .*a tensor of shape \(3, 3\), .*Queries are a list of such trees",
    ),
    "a solver that returns nothing": (
        lambda: sc.influence(lambda q: None, [X], two_of, X, [PAIR]),
        "ValueError: influence .*a solution is a tree .*a NoneType, .*The first argument returns one",
    ),
    "a solution with its residual": (
        lambda: sc.influence(lambda q: sc.solve(given(EYE), q), [X], two_of, X, [PAIR]),
        r"ValueError: influence .*a solution is a tree .*a Solution, .*solve\(...\).x",
    ),
    "a mean": (
        lambda: sc.ekfac(summed, X, [PAIR]),
        r"TypeError: ekfac of summed: summed returns one loss a row.*shape \(\).*reduction='none'",
    ),
    "a mean to influence": (
        lambda: sc.influence(lambda q: q, [X], summed, X, [PAIR]),
        "TypeError: influence of summed: summed returns one",
    ),
    "a mean to grams": (
        lambda: sc.second_moments(summed, X, [PAIR]),
        "TypeError: second_moments of summed: summed returns one",
    ),
    "a mean to dp_grads": (
        lambda: sc.dp_grads(
            summed, X, PAIR, max_grad_norm=1.0, noise_multiplier=0.0, expected_batch_size=1.0, seed=0, step=0
        ),
        "TypeError: dp_grads: summed returns one loss a row",
    ),
    "a batch in one": (
        lambda: sc.per_example(two_of, X, PAIR),
        "TypeError: per_example: two_of.* gets 2 arguments: missing .*'y'. Pass what follows the parameters one by one",
    ),
    "a batch in a list": (
        lambda: sc.dp_grads(
            two_of, X, [*PAIR], max_grad_norm=1.0, noise_multiplier=0.0, expected_batch_size=1.0, seed=0, step=0
        ),
        r"TypeError: dp_grads: .* missing .*'y'. The batch is a tuple of what follows: \(x, y\)",
    ),
    "a state before moments": (
        lambda: any_of(so.kfac(0.1)).estimate({}, None),
        r"TypeError: kfac: estimate\(moments, state\) takes what curvature.second_moments ret.* a dict and a NoneTy",
    ),
    "a pattern of nothing": (
        lambda: so.kfac(0.1, which="nothing").init({"w": EYE}),
        "ValueError: kfac: no parameter has a path that as a whole matches 'nothing'; there are w",
    ),
}


@pytest.mark.parametrize("which", MISUSED)
def test_an_error_says_what_to_do(which: str) -> None:
    call, said = MISUSED[which]
    message = told(call)
    assert re.match(said, message, re.DOTALL), message
    assert len(message) < 700


def test_functions_that_do_not_say_what_they_take_are_called() -> None:
    def any_number(*given: Any) -> Tensor:
        return summed(*given)

    @functools.wraps(two_of)
    def filled(p: Any, x: Tensor) -> Tensor:
        return summed(p, x, PAIR[1])

    want = (sc.hvp(summed, X, [PAIR]) @ X)["x"]
    assert torch.equal((sc.hvp(any_number, X, [PAIR]) @ X)["x"], want)
    assert torch.equal((sc.hvp(filled, X, [PAIR[0]]) @ X)["x"], want)
    assert isinstance(refused(lambda: sc.hvp(filled, X, [PAIR]) @ X, TypeError), str)
