"""Behaviors that FSDP2's tests check: modules trained on shards, beside the same module on one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop
from shardfn.testing import world
from tests.models import DATA, STRATEGIES, distance, variables
from tests.models import gradients as of_backward
from tests.peers.modules import (
    ROWS,
    WIDTH,
    Again,
    Attention,
    Scaled,
    Tied,
    Unused,
    filled,
    frozen,
    images,
    mapped,
    mean_square,
    nested,
    normed,
    recurrent,
    residuals,
    rows,
    setting,
    uneven,
)  # fmt: skip
from tests.peers.training import Optimizers, trained
from tests.reference import worst


def decayed_by_shape(ps: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in ps if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in ps if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.05)


# A key's bias, and one before a batch norm, have gradients of rounding alone, which Adam makes large.
MOMENTUM: Optimizers = (so.sgd(0.1, momentum=0.9), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
GROUPS: Optimizers = (so.adamw(0.05, weight_decay=lambda path, shape: 0.1 * (len(shape) > 1)), decayed_by_shape)
ADAM: Optimizers = (so.adam(0.05), lambda ps: torch.optim.Adam(ps, lr=0.05))
TRAINED: dict[str, dict[str, Any]] = {
    "HSDP": {},
    "modules inside modules": {"build": nested},
    "an uneven first dimension": {"build": uneven},
    "a scalar parameter": {"build": Scaled},
    "shared parameters": {"build": Tied},
    "unused parameters": {"build": Unused},
    "frozen parameters": {"build": frozen},
    "a layer that is called again": {"build": Again},
    "attention and layer norm": {"build": Attention, "optimizers": MOMENTUM},
    "convolutions and group norm": {"build": images},
    "a recurrent cell": {"build": recurrent},
    "a batch norm of all rows": {"build": normed, "sync_batch_norm": DATA, "optimizers": MOMENTUM},
    "no reshard after forward": {"reshard": False},
    "reshard after forward": {"reshard": True},
    "no prefetch": {"prefetch": 0},
    "a long prefetch": {"prefetch": 3},
    "activation checkpoints": {"remat": True},
    "activation checkpoints of called again": {"build": Again, "remat": True},
    "activations on the host": {"remat": "offload"},
    "units by class": {"stages": {"Residual"}, "build": nested},
    "units by pattern": {"stages": r"0|1"},
    "units of a size": {"min_num_params": 70},
    "one unit": {"stages": lambda path, m: False, "min_stage_params": 2**62},
    "every layer a unit": {"stages": {nn.Linear}},
    "parameters that other modules read": {"build": Tied, "unstaged": [r"embed\.weight"]},
    "Adam": {"optimizers": ADAM},
    "momentum": {"optimizers": MOMENTUM},
    "groups of an optimizer": {"optimizers": GROUPS},
    "clipped by the norm": {"optimizers": MOMENTUM, "limit": (0.1, 2.0)},
    "clipped by the sum": {"optimizers": MOMENTUM, "limit": (0.3, 1.0)},
    "clipped by the largest": {"optimizers": MOMENTUM, "limit": (0.01, float("inf"))},
    "gathered once a step": {"strategy": sf.full_shard(DATA).with_reshard("step")},
    "small parameters whole": {"strategy": sf.strategies.replicate_small(sf.full_shard(DATA), below=20)},
    "strategies by path": {"strategy": lambda path, shape: sf.full_shard(DATA) if "weight" in path else sf.ddp(DATA)},
    **{f"strategy {name}": {"strategy": one} for name, one in STRATEGIES.items() if name != "hybrid_shard"},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", TRAINED)
def test_a_module_on_shards_trains_as_on_one_process(name: str) -> None:
    world(4, "threads").run(trained, **TRAINED[name])


# --- behaviors that are more than a step ---


def one_set(build: Callable[[], nn.Module] = residuals, strategy: Any = None, **options: Any) -> Any:
    """A mesh, what takes this rank's rows, a model, its parameters, and the module itself."""
    module, (mesh, mine) = filled(build()), setting()
    plain = copy.deepcopy(module)
    model = interop.functional(module, **{"min_stage_params": 8} | options)
    return mesh, mine, model, model.shard(mesh, strategy or STRATEGIES["hybrid_shard"]), plain


def gradients(plain: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}


def evaluation_without_gradients_then_training() -> None:
    mesh, mine, model, params, plain = one_set()
    with torch.no_grad():
        out = model(params, mine(rows()))
    assert not out.requires_grad
    assert distance(out, mine(plain(rows())).detach()) < 1e-12
    loss = mapped(sf.grad(lambda ps, x: mean_square(model(ps, x), DATA)), mesh, out=...)
    mean_square(plain(rows()), ()).backward()
    assert distance(model.state_dict(loss(params, mine(rows()))), gradients(plain)) < 1e-12


def several_forwards_before_a_backward() -> None:
    mesh, mine, model, params, plain = one_set()

    def loss(ps: Any, x: Tensor) -> Tensor:
        return mean_square(model(ps, x), DATA) + 2 * mean_square(model(ps, x.flip(1)), DATA)

    got = mapped(sf.grad(loss), mesh, out=...)(params, mine(rows()))
    (mean_square(plain(rows()), ()) + 2 * mean_square(plain(rows().flip(1)), ())).backward()
    assert distance(model.state_dict(got), gradients(plain)) < 1e-12


def accumulation(defer: str | None = None, strategy: Any = None) -> None:
    mesh, mine, model, params, plain = one_set(strategy=strategy)
    options: Any = {} if defer is None else {"defer": defer}

    def part(ps: Any, x: Tensor) -> Any:
        return sf.psum(model(ps, x).square().sum(), DATA), sf.psum(x.numel(), DATA)

    got = mapped(lambda ps, x: sf.accumulate(part, x.split([1, 3]), **options)(ps), mesh)(params, mine(rows()))
    plain(rows()).square().mean().backward()
    assert distance(model.state_dict(got[1]), gradients(plain)) < 1e-12


def accumulation_without_synchronization() -> None:
    accumulation(defer="all")
    accumulation(defer="all", strategy=STRATEGIES["shard_grad_op"])


def logged(f: Callable[..., Any], strategy: str) -> sf.collectives.Ledger:
    """The messages of a function of a model, parameters and rows."""
    mesh, mine, model, params, _ = one_set(strategy=STRATEGIES[strategy])
    with sf.collectives.ledger() as log:
        mapped(functools.partial(f, model), mesh, out=...)(params, mine(rows()))
    return log


def slope(model: Any, params: Any, x: Tensor) -> Any:
    return sf.grad(lambda ps: mean_square(model(ps, x), DATA))(params)


def accumulated(model: Any, params: Any, x: Tensor, **options: Any) -> Any:
    return sf.accumulate(lambda ps, y: sf.psum(model(ps, y).sum(), DATA), x.split(1), **options)(params)[1]


def messages_of_accumulation_are_deferred() -> None:
    """A reduction of each micro-batch by default, or one at the end."""
    assert logged(accumulated, "full_shard").count(op="reduce_scatter") == 3 * 4
    at_end = functools.partial(accumulated, defer="all")
    assert logged(at_end, "full_shard").count(op="reduce_scatter") == 3


def gathers_of_a_step_by_strategy() -> None:
    """Of three layers: again for backward where they were freed, as the first is; the last two are still there."""
    for strategy, count in (("full_shard", 4), ("shard_grad_op", 3), ("ddp", 0)):
        assert logged(slope, strategy).count(op="all_gather", scheduled=True) == count, strategy


def backward_adds_to_gradients_that_are_there() -> None:
    """Outside of `shard_map`, where those of shards are summed over ranks, too."""
    _, mine, model, params, plain = one_set()
    leaves = variables(params)
    for _ in range(2):
        (model(leaves, mine(rows())).square().sum() / (ROWS * WIDTH)).backward()
        plain(rows()).square().mean().backward()
    assert distance(model.state_dict(of_backward(leaves)), gradients(plain)) < 1e-12


def a_state_dict_makes_a_round() -> None:
    for strategy in STRATEGIES.values():
        _, _, model, params, plain = one_set(Tied, strategy)
        state = model.state_dict(params)
        assert list(state) == list(plain.state_dict())
        assert distance(state, dict(plain.state_dict())) == 0
        plain.load_state_dict(state)


def a_module_on_meta_is_loaded() -> None:
    mesh, mine = setting()
    plain = filled(residuals())
    with interop.meta():
        module = residuals()
    model = interop.functional(module.double(), min_stage_params=8)
    params = interop.load(plain.state_dict(), model, mesh, sf.full_shard(DATA))
    assert distance(model(params, mine(rows())), mine(plain(rows()))) < 1e-12


def another_method_of_a_module() -> None:
    _, mine, model, params, plain = one_set(Unused)
    got = model(params, mine(rows()), times=3, method="encode")["code"]
    assert distance(got, mine(plain.encode(rows(), times=3)["code"])) < 1e-12


def a_rank_holds_its_part_alone() -> None:
    for strategy, parts in (("full_shard", 4), ("hybrid_shard", 2), ("ddp", 1)):
        _, _, _, params, plain = one_set(strategy=STRATEGIES[strategy])
        total = sum(p.numel() for p in plain.parameters())
        assert sum(p.values.numel() for p in params.values()) < (total + 64 * len(params)) / parts


def after_an_exception_in_forward_the_next_step_is_right() -> None:
    mesh, mine, model, params, plain = one_set()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(params, torch.ones(2, WIDTH + 1, dtype=torch.float64))
    got = mapped(sf.grad(lambda ps, x: mean_square(model(ps, x), DATA)), mesh, out=...)(params, mine(rows()))
    mean_square(plain(rows()), ()).backward()
    assert distance(model.state_dict(got), gradients(plain)) < 1e-12


class Seen(nn.Module):
    """A layer that keeps the dtypes that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(2, WIDTH)), set[Any]()
        self.register_buffer("ones", torch.ones(()).double())

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {x.dtype, self.weight.dtype, ("buffer", self.ones.dtype)}
        return F.linear(x, self.weight)


def low_precision_is_that_of_gathered_parameters_and_inputs() -> None:
    """Weights of 1 + 2^-9 round to 1 in bfloat16, so numbers are exact; gradients have the dtype of the shards."""
    mesh, mine = setting()
    module = Seen().double()
    module.weight.data += 2.0**-9
    low: Any = dict.fromkeys(("gather_dtype", "input_dtype"), torch.bfloat16)
    model = interop.functional(module, stages=lambda path, m: True, **low, output_dtype=torch.float32)
    params = model.shard(mesh, sf.full_shard(DATA))
    x = torch.arange(ROWS).double()[:, None] + torch.ones(WIDTH).double()
    value, got = mapped(sf.value_and_grad(lambda ps, x: sf.psum(model(ps, x).double().sum(), DATA)), mesh)(
        params, mine(x)
    )
    assert value == 2 * x.sum()
    assert model.module.seen == {torch.bfloat16, ("buffer", torch.float64)}
    assert model.state_dict(got)["weight"].dtype == torch.float64
    assert distance(model.state_dict(got)["weight"], x.sum(0).expand(2, WIDTH)) == 0


def reduced_in(dtype: torch.dtype) -> Tensor:
    """The sum of four ranks' gradients of 1 + 2^-9, which bfloat16 rounds to 1."""
    mesh, _ = setting()
    model = interop.functional(Seen().double(), stages=lambda path, m: True, reduce_dtype=dtype)
    x = torch.full((1, WIDTH), 1 + 2.0**-9).double()
    got = sf.grad(lambda ps: model(ps, x).sum())(model.shard(mesh, sf.full_shard(DATA)))
    return model.state_dict(got)["weight"]


def gradients_are_reduced_in_the_dtype_that_is_asked_for() -> None:
    assert reduced_in(torch.bfloat16).unique().tolist() == [4.0]
    assert reduced_in(torch.float32).unique().tolist() == [4 + 2.0**-7]


def parameters_of_several_dtypes_in_one_unit() -> None:
    mesh, mine = setting()
    module = filled(residuals())
    module.get_submodule("2").float()
    module.get_submodule("2").register_forward_pre_hook(lambda m, args: (args[0].float(),))
    model = interop.functional(copy.deepcopy(module), stages=lambda path, m: path == "", min_stage_params=8)
    params = model.shard(mesh, sf.full_shard(DATA))
    out = mapped(sf.grad(lambda ps, x: sf.psum(model(ps, x).square().sum(), DATA)), mesh, out=...)(params, mine(rows()))
    module(rows()).square().sum().backward()
    got = model.state_dict(out)
    assert {name: x.dtype for name, x in got.items()} == {name: p.dtype for name, p in module.named_parameters()}
    assert distance(got, gradients(module)) < 1e-5


def ignored_parameters_are_whole_and_summed_by_pvary() -> None:
    mesh, mine, model, params, plain = one_set()
    whole, rest = model.tree["0"], {key: p for key, p in params.items() if key != "0"}

    def loss(pair: Any, x: Tensor) -> Tensor:
        return mean_square(model(pair[0] | {"0": sf.pvary(pair[1], DATA)}, x), DATA)

    got = mapped(sf.grad(loss), mesh, out=(..., P()))((rest, whole), mine(rows()))
    mean_square(plain(rows()), ()).backward()
    found = model.state_dict(got[0] | {"0": got[1]})
    assert distance(found, gradients(plain)) < 1e-12


def initialization_is_the_same_on_any_mesh() -> None:
    def make(generator: Any) -> dict[str, Tensor]:
        return {"w": torch.randn(5, 3, generator=generator, dtype=torch.float64)}

    mesh, _ = setting()
    many = sf.unshard(sf.init_sharded([make, make], 3, mesh, STRATEGIES["full_shard"]))
    other = sf.unshard(sf.init_sharded([make, make], 3, mesh, STRATEGIES["ddp"]))
    assert distance(many, other) == 0
    assert distance(many[0], many[1]) > 0.1


BEHAVIORS = [
    evaluation_without_gradients_then_training, several_forwards_before_a_backward, accumulation,
    accumulation_without_synchronization, gathers_of_a_step_by_strategy, messages_of_accumulation_are_deferred,
    backward_adds_to_gradients_that_are_there, a_state_dict_makes_a_round, a_module_on_meta_is_loaded,
    another_method_of_a_module, a_rank_holds_its_part_alone, after_an_exception_in_forward_the_next_step_is_right,
    low_precision_is_that_of_gathered_parameters_and_inputs, gradients_are_reduced_in_the_dtype_that_is_asked_for,
    parameters_of_several_dtypes_in_one_unit, ignored_parameters_are_whole_and_summed_by_pvary,
    initialization_is_the_same_on_any_mesh,
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda f: f.__name__)
def test_behavior_of_fsdp2(behavior: Callable[[], None]) -> None:
    world(4, "threads").run(behavior)


# --- beside FSDP2 itself ---

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], int, float]] = {  # with micro-batches, and how far they may be
    "reshard": ({"reshard_after_forward": True}, {}, 1, 1e-12),
    "no reshard": ({"reshard_after_forward": False}, {"reshard": False}, 1, 1e-12),
    "gradients of two micro-batches": ({}, {}, 2, 1e-12),
    "bfloat16, reduced in float32": (
        {"mp_policy": BF16}, {"gather_dtype": torch.bfloat16, "input_dtype": torch.bfloat16}, 1, 0.02
    ),
}  # fmt: skip


def beside(name: str) -> float:
    """How far a gradient is from FSDP2's."""
    theirs, ours, micro, _ = BESIDE[name]
    module: Any = filled(residuals())
    x = rows().chunk(2)[dist.get_rank()]
    model = interop.functional(copy.deepcopy(module), min_stage_params=8, **ours)
    for layer in (*module.children(), module):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), **theirs)
    for i, part in enumerate(x.chunk(micro)):
        module.set_requires_gradient_sync(i == micro - 1)
        (module(part).double().square().mean() / micro).backward()
    params = model.shard(sf.make_mesh(device="cpu", shard=2), sf.full_shard("shard"))
    got = sf.accumulate(lambda ps, y: model(ps, y).double().square().sum() / rows().numel(), x.chunk(micro))(params)[1]
    return distance(model.state_dict(got), {n: p.grad.full_tensor() for n, p in module.named_parameters()})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BESIDE)
def test_a_gradient_is_that_of_fsdp2(name: str) -> None:
    assert worst(world(2).run(beside, name)) < BESIDE[name][-1]
