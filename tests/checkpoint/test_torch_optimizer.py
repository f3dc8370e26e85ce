"""A run trained with FSDP2 and torch.optim.AdamW goes on under shardfn as if nothing had been between, and back."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import shardfn as sf
import shardfn.optim as so
from shardfn import checkpoint
from shardfn.testing import World
from tests.models import distance, mesh_of
from tests.reference import worst
from tests.refusals import told

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
STEPS = 3
NUMBERS: dict[str, Any] = {"lr": 1e-2, "b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
SHAPES = {"0": {"weight": (16, 8), "bias": (16,)}, "2": {"weight": (5, 16), "bias": (5,)}}


def initial(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        layer: {name: torch.randn(shape, generator=g, dtype=torch.float64) / 3 for name, shape in own.items()}
        for layer, own in SHAPES.items()
    }


def rows(step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a step's batch of 12."""
    g = torch.Generator().manual_seed(100 + step)
    x, y = (torch.randn(12, n, generator=g, dtype=torch.float64) for n in (8, 5))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return x[rank::size], y[rank::size]


def decays(path: str, shape: tuple[int, ...]) -> float:
    return 0.1 if len(shape) > 1 else 0.0


# --- torch's side ---


def plain(seed: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    tree = initial(seed)
    model.load_state_dict({f"{layer}.{name}": x for layer, own in tree.items() for name, x in own.items()})
    return model


def optimizer_of(model: nn.Module, make: Any = torch.optim.AdamW, groups: bool = False, **numbers: Any) -> Any:
    n, params = {**NUMBERS, **numbers}, list[Any](model.parameters())
    if groups:
        params = [{"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
                  {"params": [p for p in params if p.ndim > 1]}]  # fmt: skip
    return make(params, lr=n["lr"], betas=(n["b1"], n["b2"]), eps=n["eps"], weight_decay=n["weight_decay"])


def torch_run(seed: int, make: Any = torch.optim.AdamW, groups: bool = False, **numbers: Any) -> tuple[Any, Any]:
    """A module under FSDP2 and its optimizer."""
    model: Any = plain(seed)
    mesh = mesh_of(shard=-1)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer_of(model, make, groups, **numbers)


@contextlib.contextmanager
def accelerator(state_dict_type: str) -> Iterator[Any]:
    """Accelerate's own, with FSDP2, which it allows on accelerators alone: it is told of it once it knows its ranks."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    states: tuple[Any, ...] = (AcceleratorState, GradientState, PartialState)
    with mock.patch.dict(os.environ, ranks):
        made: Any = Accelerator(cpu=True)
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=state_dict_type, auto_wrap_policy="size_based_wrap", min_num_params=1,
            cpu_ram_efficient_loading=False,
        )  # fmt: skip
        for state in (made.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
        try:
            yield made
        finally:
            for one in states:
                one._reset_state()


def torch_steps(model: Any, optimizer: Any, first: int, n: int = STEPS) -> dict[str, Any]:
    """The parameters after some steps."""
    for step in range(first, first + n):
        x, y = rows(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    whole = {name: x.full_tensor() for name, x in model.state_dict().items()}
    return {layer: {name: whole[f"{layer}.{name}"].clone() for name in own} for layer, own in SHAPES.items()}


def torch_save(model: Any, optimizer: Any, folder: Path) -> None:
    """In one folder; and with flattened optimizer state."""
    weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optim": moments}, checkpoint_id=folder / "nested")
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    state_dict_saver.save({"model": weights, "optim": flat}, checkpoint_id=folder / "flat")


def torch_load(model: Any, optimizer: Any, path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=path.name == "flat")
    state: Any = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    state_dict_loader.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)


# --- our side ---


def our_strategies() -> dict[str, Callable[[], Any]]:
    return {
        "full_shard": lambda: (mesh_of(shard=-1), sf.full_shard("shard"), {}),
        "zero1": lambda: (mesh_of(shard=-1), sf.strategies.zero1("shard"), {"stages": ""}),
    }


def our_run(seed: int, name: str, optimizer: Any) -> tuple[Any, Any]:
    mesh, strategy, more = our_strategies()[name]()
    params = sf.shard(initial(seed), mesh, strategy, **more)
    return params, optimizer.init(params)


def our_steps(name: str, params: Any, state: Any, optimizer: Any, first: int, n: int = STEPS) -> tuple[Any, Any]:
    def whole(p: Any, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(linear(p["0"], x))
        return F.mse_loss(linear(p["2"], h), y) / torch.distributed.get_world_size()

    def loss(ps: Any, x: Tensor, y: Tensor) -> Tensor:
        if name == "zero1":
            return sf.stage(whole)(ps, x, y)
        h = torch.tanh(sf.stage(linear)(ps["0"], x))
        return F.mse_loss(sf.stage(linear)(ps["2"], h), y) / torch.distributed.get_world_size()

    for step in range(first, first + n):
        _, grads = sf.value_and_grad(loss)(params, *rows(step))
        params, state = optimizer.step(params, grads, state)
    return params, state


def linear(p: Any, x: Tensor) -> Tensor:
    return F.linear(x, p["weight"], p["bias"])


# --- from torch ---


def from_torch(folder: Path, groups: bool) -> dict[str, float]:
    """How far our runs that go on from torch's files are from torch's own, by what they read."""
    model, other = torch_run(0, groups=groups)
    torch_steps(model, other, 0)
    torch_save(model, other, folder)
    want = torch_steps(model, other, STEPS)
    found = {
        f"{name}, {kind}": goes_on(name, groups, want, (folder / kind, "model"), (folder / kind, "optim"))
        for name in our_strategies()
        for kind in ("nested", "flat")
    }
    kept = so.adamw(1.0, weight_decay=decays if groups else 0.7).init(our_run(1, "full_shard", so.adamw(1.0))[0])
    copy = checkpoint.load_torch_optimizer(folder / "nested", kept, part="optim", donate=False)
    assert kept["step"] == 0
    assert sf.unshard(kept["mean"])["0"]["bias"].eq(0).all()
    assert copy["step"] == STEPS
    assert not sf.unshard(copy["mean"])["0"]["bias"].eq(0).any()
    return found


def goes_on(name: str, groups: bool, want: Any, weights: tuple[Path, str], moments: tuple[Path, str]) -> float:
    """How far our run that goes on from files, each with the part to read, is from torch's own."""
    # with other numbers, as those of the file count
    optimizer = so.adamw(1.0, b1=0.1, weight_decay=decays if groups else 0.7)
    params, state = our_run(1, name, optimizer)
    params = checkpoint.load(weights[0], params, part=weights[1])
    before = state["mean"]
    state = checkpoint.load_torch_optimizer(moments[0], state, part=moments[1])
    assert state["step"] == STEPS
    assert optree.tree_all(optree.tree_map(lambda a, b: a is b, before, state["mean"]))
    assert all(state["numbers"][key] == NUMBERS[key] for key in state["numbers"])
    params, _ = our_steps(name, params, state, optimizer, STEPS)
    return distance(sf.unshard(params), want)


@pytest.mark.world(2)
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
def test_a_run_of_fsdp2_goes_on_here(world: World, groups: bool, tmp_path: Path) -> None:
    for found in world.run(from_torch, tmp_path, groups):
        assert len(found) == 4
        assert worst(found.values()) < 1e-13, found


# --- to torch ---


def to_torch(folder: Path, groups: bool) -> dict[str, float]:
    found = {}
    more: dict[str, Any] = {"weight_decay": decays} if groups else {}
    optimizer = so.adamw(**{**NUMBERS, **more})
    for name in our_strategies():
        params, state = our_steps(name, *our_run(0, name, optimizer), optimizer, 0)
        for kind in ("nested", "async"):
            tree = {"model": params, "optim": checkpoint.torch_optimizer(state, **more)}
            if kind == "async":
                checkpoint.save_async(folder / name / kind, tree).wait()
            else:
                checkpoint.save(folder / name / kind, tree)
        again = checkpoint.load_torch_optimizer(folder / name / "nested", optimizer.init(params), part="optim")
        assert again["numbers"] == state["numbers"]
        assert again["step"] == STEPS
        assert distance(sf.unshard(again["square"]), sf.unshard(state["square"])) == 0
        params, _ = our_steps(name, params, state, optimizer, STEPS)
        want = sf.unshard(params)
        for kind in ("nested", "async"):
            model, other = torch_run(7, groups=groups, lr=0.5, b1=0.1)
            torch_load(model, other, folder / name / kind)
            assert {group["lr"] for group in other.param_groups} == {NUMBERS["lr"]}
            found[f"{name}, {kind}"] = distance(torch_steps(model, other, STEPS), want)
    return found


@pytest.mark.world(2)
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
def test_a_run_here_goes_on_with_fsdp2(world: World, groups: bool, tmp_path: Path) -> None:
    for found in world.run(to_torch, tmp_path, groups):
        assert len(found) == 4
        assert worst(found.values()) < 1e-13, found


# --- Accelerate ---

FOLDERS = {
    "SHARDED_STATE_DICT": (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")),
    "FULL_STATE_DICT": (("pytorch_model_fsdp.bin", ""), ("optimizer.bin", "")),
}


def with_accelerate(folder: Path) -> dict[str, float]:
    """Its `save_state` to us, and ours to its `load_state`."""
    found = {}
    for kind, (weights, moments) in FOLDERS.items():
        with accelerator(kind) as theirs:
            model = plain(0)
            other = optimizer_of(model, groups=True)
            scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)
            model, other, _ = theirs.prepare(model, other, scheduler)
            torch_steps(model, other, 0)
            theirs.save_state(str(folder / kind))
            want = torch_steps(model, other, STEPS)
        places: Any = [(folder / kind / name, part) for name, part in (weights, moments)]
        for name in our_strategies():
            found[f"{name} from {kind}"] = goes_on(name, True, want, *places)
        assert checkpoint.load(folder / kind / "scheduler.bin", {"last_epoch": 5}, ignore=".*") == {"last_epoch": 0}
    optimizer = so.adamw(**{**NUMBERS, "weight_decay": decays})
    params, state = our_steps("full_shard", *our_run(0, "full_shard", optimizer), optimizer, 0)
    checkpoint.save(folder / "ours/pytorch_model_fsdp_0", {"model": params})
    told = checkpoint.torch_optimizer(state, weight_decay=decays)
    checkpoint.save(folder / "ours/optimizer_0", {"optimizer": told})
    params, _ = our_steps("full_shard", params, state, optimizer, STEPS)
    with accelerator("SHARDED_STATE_DICT") as theirs:
        model = plain(7)
        model, other = theirs.prepare(model, optimizer_of(model, groups=True, lr=0.5, b1=0.1))
        theirs.load_state(str(folder / "ours"))
        found["back"] = distance(torch_steps(model, other, STEPS), sf.unshard(params))
    return found


@pytest.mark.world(2, "processes")
def test_a_run_of_accelerate_goes_on_here_and_a_run_here_with_accelerate(world: World, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in world.run(with_accelerate, tmp_path):
        assert len(found) == 5
        assert worst(found.values()) < 1e-13, found


# --- any placement ---


def mixed(seed: int) -> dict[str, Any]:
    """Of several dtypes in a stage, frozen, loose, under keys with dots."""
    g = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    return {
        "": {"norm.weight": drawn(3)},
        "layers.0": {"w": drawn(4, 6), "b": drawn(6).float(), "n": torch.arange(3), "frozen": drawn(2)},
        "blocks": [{"w": drawn(4, 6)} for _ in range(2)],
    }


def at_places(path: str, shape: tuple[int, ...]) -> sf.Placement:
    return sf.full_shard("shard").only_on(pipe=len(path) % 2)


HFSDP = sf.strategies.hfsdp(shard="shard", replica="replica")
PLACED: dict[str, Callable[[Any], Any]] = {
    "full": lambda tree: sf.shard(tree, mesh_of(shard=4), sf.full_shard("shard"), frozen=r".*frozen"),
    "zero1": lambda tree: sf.shard(tree, mesh_of(shard=4), sf.strategies.zero1("shard"), stages="", frozen=r".*frozen"),
    "hfsdp": lambda tree: sf.shard(tree, mesh_of(replica=2, shard=2), HFSDP, frozen=".*frozen"),
    "tensor": lambda tree: sf.shard(tree, mesh_of(shard=2, tensor=2), sf.full_shard("shard"), frozen=".*frozen",
                                    specs=sf.by_path([(r".*\.w", sf.P(None, "tensor"))], strict=False)),
    "pipe": lambda tree: sf.shard(tree, mesh_of(shard=2, pipe=2), at_places, frozen=".*frozen"),
}  # fmt: skip


def moved(folder: Path) -> list[str]:
    """Where moments that went through torch's names to another placement are not what they were."""
    wrong = []
    for i, name in enumerate(PLACED):
        other = list(PLACED)[(i + 1) % len(PLACED)]
        optimizer = so.adamw(torch.tensor(0.25, dtype=torch.float64))
        params = PLACED[name](mixed(0))
        grads = optree.tree_map(lambda x: torch.sin(x) if x.is_floating_point() else x, params)
        _, state = optimizer.step(params, grads, optimizer.init(params))
        checkpoint.save(folder / name, {"optim": checkpoint.torch_optimizer(state)})
        like = optimizer.init(PLACED[other](mixed(1)))
        found = checkpoint.load_torch_optimizer(folder / name, like, part="optim")
        for slot in ("mean", "square"):
            if distance(sf.unshard(found[slot]), sf.unshard(state[slot])) != 0:
                wrong.append(f"{slot} from {name} to {other}")
        lr = found["numbers"]["lr"]
        if not (isinstance(lr, Tensor) and lr.dtype == torch.float64 and lr == 0.25 and found["step"] == 1):
            wrong.append(f"numbers from {name}: {found['numbers']}, step {found['step']}")
    return wrong


@pytest.mark.world(4)
def test_moments_go_by_torchs_names_from_any_placement_to_any_other(world: World, tmp_path: Path) -> None:
    assert world.run(moved, tmp_path) == [[]] * 4


# --- what does not fit ---


def full(make: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    """A state of torch's by names, of whole tensors, after a step."""
    tree = {f"{layer}.{name}": x.requires_grad_() for layer, own in initial(0).items() for name, x in own.items()}
    optimizer = make(list(tree.values()), lr=0.1, weight_decay=0.1, **options)
    sum(x.square().sum() for x in tree.values()).backward()
    optimizer.step()
    found = optimizer.state_dict()
    return {
        "state": {name: found["state"][i] for i, name in enumerate(tree)},
        "param_groups": [{**found["param_groups"][0], "params": list(tree)}],
    }


def changed(change: Callable[[Any], Any]) -> dict[str, Any]:
    tree = full()
    change(tree)
    return tree


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no step": (lambda: changed(lambda t: t["state"]["2.bias"].pop("step")),
                "missing in the checkpoint: state.2.bias.step"),
    "no state": (lambda: changed(lambda t: t["state"].pop("2.bias")),
                 "Torch has no state of parameters that never had a gradient"),
    "radam": (lambda: full(torch.optim.RAdam, decoupled_weight_decay=True), "it has no amsgrad"),
    "no moment": (lambda: changed(lambda t: t["state"]["2.bias"].pop("exp_avg_sq")),
                  "missing in the checkpoint: state.2.bias.exp_avg_sq (here square.2.bias)"),
    "more": (lambda: changed(lambda t: t["state"].update(other=t["state"]["0.bias"])),
             "in the checkpoint, but not in the tree: state.other.exp_avg"),
    "no group": (lambda: changed(lambda t: t["param_groups"][0]["params"].remove("2.bias")),
                 "no group of param_groups in the checkpoint has 2.bias"),
    "groups": (lambda: changed(lambda t: t["param_groups"].append(
                  {**t["param_groups"][0], "weight_decay": 0.0, "params": [t["param_groups"][0]["params"].pop()]})),
               "weight_decay is 0.1 for 0.bias and 0.0 for 2.bias, and this state has one for all"),
    "shape": (lambda: changed(lambda t: t["state"]["2.bias"].update(exp_avg=torch.zeros(6))), "is float32 [6] there"),
    "amsgrad": (lambda: full(amsgrad=True), "max_exp_avg_sq"),
    "maximize": (lambda: full(maximize=True), "has maximize=True, which shardfn.optim does not have"),
    "adam": (lambda: full(torch.optim.Adam), "is torch.optim.Adam's: go on with shardfn.optim.adam, and pass make="),
    "numbered": (lambda: {"state": dict(enumerate(full()["state"].values())), "param_groups": full()["param_groups"]},
                 "missing in the checkpoint: state.0.bias.exp_avg"),
}  # fmt: skip


def refusals(folder: Path) -> dict[str, str]:
    optimizer = so.adamw(0.1)
    params, state = our_run(0, "full_shard", optimizer)
    chained = so.chain(so.clip_by_global_norm(1.0), optimizer)
    read = checkpoint.load_torch_optimizer
    said = {name: told(functools.partial(read, folder / f"{name}.pt", state)) for name in WRONG}
    assert sf.unshard(state["mean"])["0"]["weight"].eq(0).all(), "nothing was overwritten"
    by_function = so.adamw(lambda step: 0.1 * step, weight_decay=decays).init(params)
    say = checkpoint.torch_optimizer
    calls: dict[str, Callable[[], Any]] = {
        "part": lambda: read(folder / "good.pt", state, part="optim"),
        "chain": lambda: read(folder / "good.pt", chained.init(params)),
        "sgd": lambda: say(so.sgd(0.1).init(params)),
        "class": lambda: say(state, torch.optim.SGD),  # type: ignore[arg-type]
        "function": lambda: say(by_function),
        "unknown": lambda: say(state, rate=3),
        "into": lambda: checkpoint.load(folder / "good.pt", say(state)),
    }
    said |= {name: told(call) for name, call in calls.items()}
    group = say(by_function, lr=lambda step: 0.1 * step, weight_decay=decays)["param_groups"]
    assert [one["weight_decay"] for one in group] == [0.0, 0.1]
    assert group[0]["lr"] == 0.1
    done = read(folder / "good.pt", chained.init(params)[-1])
    assert done["step"] == 1
    assert read(folder / "adam.pt", so.adam(0.1).init(params), make=torch.optim.Adam)["step"] == 1
    turned = {layer: {"w": x["weight"].mT.contiguous(), "b": x["bias"]} for layer, x in initial(3).items()}
    mine = so.adamw(0.1).init(sf.shard(turned, mesh_of(shard=-1), sf.full_shard("shard")))
    names: list[Any] = [(r"(\d)\.w", r"\1.weight", "T"), (r"(\d)\.b", r"\1.bias")]
    got = sf.unshard(read(folder / "good.pt", mine, names=names)["mean"])
    assert got["0"]["w"].equal(full()["state"]["0.weight"]["exp_avg"].mT)
    return said


SAYS = {
    "part": "There is no part 'optim': the first keys are state, param_groups",
    "chain": "TypeError: this takes the state of shardfn.optim.adam or adamw, not a tuple; where one of them is ",
    "sgd": "TypeError: this takes the state of shardfn.optim.adam or adamw, not a dict of step, numbers",
    "class": "TypeError: make must be torch.optim.AdamW or torch.optim.Adam, got",
    "function": "ValueError: torch_optimizer: lr is a function of this optimizer, and not in its state: pass lr=",
    "unknown": "TypeError: torch_optimizer: unknown numbers rate",
    "into": "is part of what torch_optimizer made, which is for save: load_torch_optimizer(path, state) reads it",
}


@pytest.mark.world(2)
def test_what_does_not_fit_is_an_error_on_every_rank(world: World, tmp_path: Path) -> None:
    for name, (make, _) in {**WRONG, "good": (full, "")}.items():
        torch.save(make(), tmp_path / f"{name}.pt")
    for said in world.run(refusals, tmp_path):
        for name, text in {**{name: text for name, (_, text) in WRONG.items()}, **SAYS}.items():
            assert text in said[name], (name, said[name])


def test_the_manifest_keeps_what_is_not_a_number(tmp_path: Path) -> None:
    state = so.adamw(0.1).init(initial(0))
    checkpoint.save(tmp_path / "one", {"optim": checkpoint.torch_optimizer(state)})
    kept = json.loads((tmp_path / "one/manifest.json").read_text())["numbers"]
    assert kept["optim.param_groups.0.betas"] == {"tuple": [0.9, 0.999]}
    assert kept["optim.param_groups.0.foreach"] is None
    assert checkpoint.load_torch_optimizer(tmp_path / "one", state, part="optim")["numbers"] == state["numbers"]
    assert not checkpoint.verify(tmp_path / "one").damage
