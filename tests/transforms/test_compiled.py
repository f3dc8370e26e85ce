"""Steps as compiled programs: the numbers and the messages of the same step as it is, and an error for what they cannot
hold.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, parallel
from shardfn.compat import devices
from shardfn.compiled import pure, regions, surroundings
from shardfn.mesh import watchdog
from shardfn.testing import World, world
from tests.lossless import LOSSLESS
from tests.models import DATA, STRATEGIES, distance, drawn
from tests.optimizers import optimizers_named
from tests.transforms import steps
from tests.transforms.steps import LAYERS, WIDTH, block, data, spoiled, whole

ROWS, STEPS = 4, 5

Step = Callable[..., Any]
Setting = tuple[Step, Any, Any]
"""A step `(params, state, batch) -> (params, state, loss)`, with parameters and state."""


# --- models ---


def normed(p: Any, x: Tensor) -> Tensor:
    h = F.layer_norm(x, (WIDTH,)) * p["b"].mean()
    return x + F.gelu(h @ p["up"]) @ p["down"]


def dropped(p: Any, x: Tensor) -> Tensor:
    return x + F.dropout(torch.tanh(x @ p["up"] + p["b"]), 0.5) @ p["down"]


def device_here() -> str:
    return devices.in_use() or "cpu"


def mesh_here() -> Any:
    n = dist.get_world_size()
    return sf.make_mesh(device=device_here(), replica=2 if n == 4 else 1, shard=n // 2 if n == 4 else n)


def stepping(loss: Callable[[Any, Any], Tensor], optimizer: so.Optimizer, mesh: Any, **accumulated: Any) -> Step:
    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(params: Any, state: Any, x: Any) -> Any:
        if accumulated:
            value, grads = sf.accumulate(loss, x, **accumulated)(params)
        else:
            value, grads = sf.value_and_grad(loss)(params, x)
        params, state = optimizer.step(params, grads, state)
        return params, state, value

    return step


def of_blocks(
    strategy: Any = "full_shard",
    optimizer: Callable[[], so.Optimizer] = lambda: so.adamw(so.warmup_cosine(1e-2, warmup=3, steps=9)),
    function: Callable[..., Tensor] = block,
    dtype: torch.dtype = torch.float64,
    again: bool = False,
    accumulated: Any = None,
    frozen: Any = (),
    **options: Any,
) -> Setting:
    mesh, made = mesh_here(), optimizer()
    placed = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    params = sf.shard(whole(dtype), mesh, placed, frozen=frozen)
    layer = sf.stage(function, **options)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = layer(p, x.to(dtype))
        x = layer(params["blocks"][0], x) if again else x
        if accumulated:  # micro-batches add up
            return sf.psum(x.square().sum(), DATA) / 100
        return sf.pmean(x.square().mean(), DATA)

    return stepping(loss, made, mesh, **(accumulated or {})), params, made.init(params)


def by_tensor() -> Setting:
    mesh = sf.make_mesh(device=device_here(), shard=dist.get_world_size() // 2, tensor=2)
    optimizer = so.chain(so.clip_by_global_norm(0.1), so.adamw(1e-2))
    specs = sf.by_path([(r".*\.up", P(None, "tensor")), (r".*\.b", P("tensor")), (r".*\.down", P("tensor", None))])
    tree = whole()
    for p in tree["blocks"]:
        p["up"], p["b"], p["down"] = (torch.cat([x, 2 * x], d) for x, d in ((p["up"], 1), (p["b"], 0), (p["down"], 0)))
    params = sf.shard(tree, mesh, sf.full_shard("shard"), specs=specs)

    @sf.stage
    def layer(p: Any, x: Tensor) -> Tensor:
        h = torch.tanh(parallel.to_parallel(x, "tensor") @ p["up"] + p["b"])
        return x + parallel.from_parallel(h @ p["down"], "tensor")

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = layer(p, x)
        return sf.pmean(x.square().mean(), "shard")

    return stepping(loss, optimizer, mesh), params, optimizer.init(params)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table((x[..., 0].abs() * 10).long() % 11)
        for layer in self.layers:
            h = layer(h)
        out: Tensor = self.head(h)
        return out


def module(stages: Any = None) -> Setting:
    torch.manual_seed(0)
    mesh, optimizer = mesh_here(), so.ema(so.sgd(0.1, momentum=0.9), 0.9)  # Adam's quotients amplify rounding
    model = interop.functional(Net().double(), stages)
    params = model.shard(mesh, STRATEGIES["full_shard"])

    def loss(params: Any, x: Tensor) -> Tensor:
        return sf.pmean(model(params, x).square().mean(), DATA)

    return stepping(loss, optimizer, mesh), params, optimizer.init(params)


BY_LAYER = {r"layers\.0": {"remat": [torch.ops.aten.mm.default]}, r"layers\.1": {"remat": True, "reshard": False}}


def rate_of_parameter(path: str, shape: tuple[int, ...]) -> Any:
    """A schedule for each parameter, as layer-wise decay of the rate with a warm-up has."""
    return lambda step: 1e-2 * (len(shape) + path.count("1")) / (1 + step)


def decay_of_matrices(path: str, shape: tuple[int, ...]) -> float:
    return 0.1 * (len(shape) > 1)


STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "remat": {"remat": True},
    "accumulate": {"accumulated": {"micro": 2}},
}
PROGRAMS: dict[str, Callable[[], Setting]] = {
    **{
        f"{strategy}, {name}": functools.partial(of_blocks, strategy, **options)
        for strategy in STRATEGIES
        for name, options in STRATEGY_OPTIONS.items()
    },
    "kept for the step": lambda: of_blocks(reshard="step", accumulated={"micro": 2}),
    "kept": lambda: of_blocks(reshard=False),
    "no prefetch": lambda: of_blocks(prefetch=0),
    "prefetch 2": lambda: of_blocks(prefetch=2),
    "one stage twice": lambda: of_blocks(again=True),
    "one stage twice, kept": lambda: of_blocks(again=True, reshard=False),
    "policy": lambda: of_blocks(remat=[torch.ops.aten.mm.default]),
    "policy, dropout": lambda: of_blocks(function=dropped, remat=[torch.ops.aten.mm.default]),
    "defers nothing": lambda: of_blocks("hybrid_shard", accumulated={"micro": 2, "defer": "nothing"}),
    "defers everything": lambda: of_blocks("hybrid_shard", accumulated={"micro": 2, "defer": "all"}),
    "gathers in few bits": lambda: of_blocks(gather_format=LOSSLESS),
    "few bits": lambda: of_blocks("hpz", gather_format=LOSSLESS, reduce_format=LOSSLESS),
    "int8": lambda: of_blocks("hybrid_shard", gather_format=sf.quant.int8(), reduce_format=sf.quant.int8()),
    "mixed": lambda: of_blocks(dtype=torch.float32, gather_dtype=torch.bfloat16, input_dtype=torch.bfloat16,
                               output_dtype=torch.float32, reduce_dtype=torch.float32),
    "normed": lambda: of_blocks(function=normed),
    "dropout": lambda: of_blocks(function=dropped),
    "dropout, remat": lambda: of_blocks(function=dropped, remat=True),
    "sgd": lambda: of_blocks(optimizer=lambda: so.sgd(0.1, momentum=0.9)),
    "adam, pure": lambda: of_blocks(optimizer=lambda: so.adam(1e-2, donate=False)),
    "lion": lambda: of_blocks(optimizer=lambda: so.lion(lambda step: 1e-2 / step)),
    "rules": lambda: of_blocks(optimizer=lambda: so.adamw(rate_of_parameter, weight_decay=decay_of_matrices)),
    "rules of lamb": lambda: of_blocks(optimizer=lambda: so.lamb(
        rate_of_parameter, b1=lambda path, shape: 0.8 + 0.1 * (len(shape) > 1))),
    "clipped by group": lambda: of_blocks(optimizer=lambda: so.chain(
        so.clip_by_global_norm(0.1, by=lambda path, shape: str(len(shape))), so.sgd(rate_of_parameter, momentum=0.9))),
    "clipped": lambda: of_blocks(optimizer=lambda: so.chain(so.clip_by_global_norm(0.1), so.adamw(1e-2))),
    **{
        name: functools.partial(of_blocks, optimizer=make)
        for name, make in optimizers_named("adamw8bit, adafactor, lamb, muon, averaged").items()
    },
    "skips steps": lambda: of_blocks(optimizer=lambda: so.chain(spoiled(0, 3), so.skip_nonfinite(so.adamw(1e-2)))),
    "scaled": lambda: of_blocks("zero1", optimizer=lambda: so.chain(spoiled(2, 3), so.dynamic_loss_scale(
        so.fp32_master_weights(so.ema(so.adamw(1e-2, donate=False), 0.9)), scale=4.0, growth_interval=1))),
    "skips in turn": lambda: of_blocks(optimizer=lambda: so.chain(spoiled(0, 1), so.skip_nonfinite(
        so.dynamic_loss_scale(so.skip_nonfinite(so.sgd(0.1, momentum=0.9)), scale=3.0)))),
    "frozen matrices": lambda: of_blocks(frozen=r".*\.up"),
    "shard_state": lambda: of_blocks("hybrid_shard", optimizer=lambda: so.shard_state(so.adamw(1e-2), "replica")),
    "frozen": lambda: of_blocks(optimizer=lambda: so.sgd(0.1, momentum=0.9), frozen=r".*\.b"),
    "tensor": by_tensor,
    "module": module,
    "module, options by layer": lambda: module(BY_LAYER),
}  # fmt: skip


# --- against the step as it is ---


def in_turn(name: str, around: Callable[[int], Any] = lambda i: contextlib.nullcontext()) -> Any:
    """A step as it is beside the same compiled: for each call the differences and the messages that differ.

    `around` makes contexts of the compiled calls.
    """
    step, params, state = PROGRAMS[name]()
    draw = drawn(1 + dist.get_rank() // (2 if name == "tensor" else 1))
    compiled, found = sf.compile(step), []
    one = params, state
    two = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, one)
    for i in range(STEPS):
        x = draw(ROWS, WIDTH, WIDTH).to(device_here())
        torch.manual_seed(i)
        with sf.collectives.ledger() as plainly_sent:
            *one, value = step(*one, x)
        torch.manual_seed(i)
        with sf.collectives.ledger() as sent, around(i):
            *two, other = compiled(*two, x)
        counts = [Counter(map(_message, log.records)) for log in (plainly_sent, sent)]
        found.append(
            (
                distance(_numbers([*two, other]), _numbers([*one, value]), 1.0),
                counts[1] - counts[0],
                counts[0] - counts[1],
            )
        )
    return found


def _message(record: Any) -> Any:
    return record.op, record.axis, record.stage, record.dtype, record.bytes, record.backward


def _numbers(tree: Any) -> list[Tensor]:
    leaves = optree.tree_leaves(tree)
    return [torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in leaves if isinstance(x, (Tensor, int))]


def compared(name: str, inductor: bool = False) -> Any:
    return in_turn(name) if inductor else alone(lambda: in_turn(name))


# On four ranks what goes by meshes, on two the rest, and what both have in common on both.
MESHES = [
    name for name in PROGRAMS if name.split(",")[0] in STRATEGIES or name in ("tensor", "few bits", "shard_state")
]
CASES = [(4, name) for name in MESHES]
CASES += [(2, name) for name in PROGRAMS if name not in MESHES or name.startswith("full_shard")]


@pytest.mark.central
@pytest.mark.parametrize(("ranks", "name"), CASES, ids=[f"{ranks}-{name}" for ranks, name in CASES])
def test_a_program_has_the_numbers_and_messages_of_the_step(ranks: int, name: str) -> None:
    for found in world(ranks).with_deadline(120).run(compared, name):
        for i, (off, more, less) in enumerate(found):
            assert off < (1e-5 if name == "mixed" else 1e-12), (i, off)
            if i >= 2:  # the second call compares what ranks will send; the third ends with a comparison
                assert less == Counter()
                assert more.total() == int(i == 2), (i, more)


INDUCTOR = ["hybrid_shard, accumulate", "dropout, remat", "clipped", "module", "int8", "tensor"]


def test_inductor_compiles_a_program() -> None:
    test_what_inductor_compiles_has_the_same_numbers("full_shard, plain")


@pytest.mark.parametrize("name", INDUCTOR)
def test_what_inductor_compiles_has_the_same_numbers(name: str) -> None:
    for found in world(2).with_deadline(300).run(compared, name, inductor=True):
        for i, (off, more, less) in enumerate(found):
            assert off < 1e-12, (i, off)
            assert i < 2 or (more.total() == int(i == 2) and less == Counter())


# --- one rank: what a program does with arguments and results ---


def test_ranks_that_are_threads_are_refused() -> None:
    with pytest.raises(Exception, match=r"compile\(step\): ranks are threads of one process, and torch"):
        world(2, "threads").with_deadline(60).run(in_turn, "policy")


def alone(case: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions.Region, "function", lambda region: lambda xs: region.graph(*xs))
        return case()


def on_one_rank(case: Callable[[], Any]) -> Any:
    return world(1).with_deadline(60).run(alone, case)[0]


toy = functools.partial(steps.toy, sf.compile, "cpu")
repeated = functools.partial(steps.repeated, sf.compile, "cpu", calls=5)
counter, alternating, powers, used_again = (
    functools.partial(f, sf.compile) for f in (steps.counter, steps.alternating, steps.powers, steps.used_again)
)


def test_a_step_on_plain_tensors() -> None:
    assert on_one_rank(lambda: repeated(lambda w, x: w.sum())) == pytest.approx(_by_hand(), abs=1e-12)


def _by_hand() -> list[float]:
    w, losses = torch.full((WIDTH,), 0.5, dtype=torch.float64), []
    for i in range(5):
        losses.append(((w * data(i)).square().sum() + w.sum()).item())
        w = w - 0.1 * 2 * w * data(i).square()
    return losses


def replaced() -> Any:
    outside = [torch.ones(WIDTH, dtype=torch.float64)]

    def more(w: Tensor, x: Tensor) -> Any:
        outside[0] = outside[0] + 1
        return (w * outside[0].detach()).sum()

    return repeated(more)


def swapped() -> Any:
    outside = [torch.full((WIDTH,), float(i), dtype=torch.float64) for i in range(9)]
    return repeated(lambda w, x: (w * outside.pop()).sum())


def seeded() -> Any:
    return repeated(lambda w, x: (torch.manual_seed(1), torch.rand(()))[1])


def given_memory(of: str) -> Any:
    kept = torch.zeros(WIDTH, dtype=torch.float64)

    def step(w: Tensor, x: Tensor) -> Any:
        given = {"an argument": w, "a temporary": w * 2, "elsewhere": kept}[of]
        given.data -= x  # in place
        given.data = given.data * 1.5 + x
        return w.clone(), given.sum()

    return both(step, lambda: data(1))


def views_from_elsewhere() -> Any:
    pair = torch.zeros(2, WIDTH, dtype=torch.float64)
    mean = pair[0]

    def more(w: Tensor, x: Tensor) -> Any:
        pair.mul_(0.9)
        mean.add_(w.detach())
        return pair.sum()

    return repeated(more)


def arrays(make: Callable[[], Any]) -> Any:
    return repeated(lambda w, x: torch.from_numpy(make()).add_(x).sum())


def buffers(kept: list[bytearray]) -> Any:
    def fresh() -> Tensor:
        kept.append(bytearray(8 * WIDTH))
        return torch.frombuffer(kept[-1], dtype=torch.float64)

    return repeated(lambda w, x: fresh().add_(x).sum())


def negated() -> Any:
    numbers = torch.ones(WIDTH, dtype=torch.float64)
    negative: Tensor = torch._neg_view(numbers)  # the same memory, shape and dtype
    return repeated(lambda w, x: (numbers.add_(x) * 2 + negative).sum())


def overwritten() -> Any:
    step, params, state = toy()
    for i in range(4):
        step(params, state, data(i))


def shared() -> Any:
    step = sf.compile(lambda a, b: (a + b.sum(), b * 2), mesh=sf.make_mesh(shard=1, device="cpu"))
    a, b = data(0), data(1)
    a, b = step(a, b)
    return step(a, a)


def many_shapes() -> Any:
    step, params, state = toy(lambda w, x, y: y.sum())
    for i in range(12):
        params, state, _ = step(params, state, data(), data(rows=3 + i))
        params, state, _ = step(params, state, data(), data(rows=3 + i))


def with_gradients() -> Any:
    step, params, state = toy()
    params = {"w": params["w"].requires_grad_()}
    return step(params, state, data())


def in_debug_mode() -> Any:
    with sf.debug(nan=True):
        return repeated(lambda w, x: 0)


def drawing_from_its_own() -> Any:
    own = torch.Generator().manual_seed(0)
    return repeated(lambda w, x: torch.rand(1, generator=own).sum())


def on_disk() -> Any:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDFN_SCRATCH", folder)
        step, params, state = of_blocks(remat=sf.offload("disk", above=0))
        compiled = sf.compile(step)
        for _ in range(3):
            params, state, _ = compiled(params, state, torch.ones(ROWS, WIDTH, dtype=torch.float64))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a number of the host that changes": (counter, r"the step does .*mul.*0\.30.*, and at the last call .*0\.2"),
    "operations that change": (alternating, r"the step does aten\.(sin|cos).*, and at the last call aten\.(cos|sin)"),
    "a tensor that is replaced": (replaced, r"uses a tensor of shape \[8\] that an earlier call kept in a list"),
    "random numbers after a seed": (seeded, r"draws random numbers after their state was set"),
    **{
        f"other memory for {of}": (
            functools.partial(given_memory, of),
            r"x\.data = y at .* gives a tensor other memory",
        )
        for of in ("an argument", "a temporary", "elsewhere")
    },
    "views of one tensor from elsewhere": (
        views_from_elsewhere,
        r"from elsewhere, which shares memory with another that",
    ),
    "an array of NumPy from elsewhere": (
        functools.partial(arrays, np.ones(WIDTH).view),
        r"overwrites a tensor of shape \[8\] in memory that is not torch's",
    ),
    "an array of NumPy of its own": (
        functools.partial(arrays, functools.partial(np.ones, WIDTH)),
        r"overwrites a tensor of shape \[8\] in memory that is not torch's",
    ),
    "memory that is another in each call": (
        functools.partial(buffers, []),
        r"overwrites a tensor of shape \[8\] in memory that is not torch's.* or that is another in each call",
    ),
    "a power of a count": (powers, r"a power that has become a tensor of integers, where negative powers are 0"),
    "a negative view from elsewhere": (negated, r"from elsewhere, which shares memory with another that"),
    "another tensor in each call": (
        swapped,
        r"the step does the same with other tensors from elsewhere, of shapes \[8\]: a compiled program cannot change",
    ),
    "the host reads": (
        lambda: repeated(lambda w, x: w.sum().item()),
        r"the host reads a result.* return it, and read it after",
    ),
    "the host branches": (lambda: repeated(lambda w, x: 1 if w.sum() > 0 else 0), r"the host reads a result"),
    "the host counts": (lambda: repeated(lambda w, x: w[w > 0].sum()), r"the host reads a result, by aten::index"),
    "a number among the arguments changes": (
        lambda: repeated(lambda w, x, n: n * w.sum(), lambda i: (0.5 + i,)),
        r"compile\(step\): rest.* is 1\.5, and was 0\.5: a program keeps numbers as constants",
    ),
    "nothing is passed back": (overwritten, r"the step overwrites params\.w, and the program does not pass back"),
    "arguments share memory": (shared, r"shares memory with another argument, and the step overwrites it"),
    "a donated argument": (used_again, r"a tensor that was given to a step"),
    "many shapes": (many_shapes, r"there are 8 programs already, each for different shapes"),
    "an argument requires a gradient": (with_gradients, r"params\.w requires a gradient"),
    "a debug mode": (in_debug_mode, r"debug\(nan=True\) checks each call on the host: leave it off"),
    "a generator": (drawing_from_its_own, r"aten::rand.* draws from a torch\.Generator, such as fold_in makes"),
    "activations on disk": (on_disk, r"moves activations to the disk and back, which a compiled step cannot do"),
}


class Rate:
    def __init__(self) -> None:
        self.rate, self.unread = 1.0, 0

    def __call__(self, w: Tensor, x: Tensor) -> Any:
        return w.sum() * self.rate


settings = {"rate": 1.0}


def late_number() -> Callable[[], Any]:
    rate = 1.0

    def more(w: Tensor, x: Tensor) -> Any:
        return w.sum() * rate

    def change() -> None:
        nonlocal rate
        rate = 0.5

    return running(more, change)


def late_global() -> Callable[[], Any]:
    return running(lambda w, x: w.sum() * settings["rate"], lambda: settings.update(rate=settings["rate"] / 2))


def late_attribute() -> Callable[[], Any]:
    rate = Rate()
    return running(rate, lambda: setattr(rate, "rate", 0.5))


def late_tensor() -> Callable[[], Any]:
    teachers = {"new": torch.zeros(WIDTH, dtype=torch.float64)}
    return running(lambda w, x: (w * teachers["new"]).sum(), lambda: teachers.update(new=teachers["new"] + 1))


def late_optimizer() -> Callable[[], Any]:
    small, large = (sf.optim.sgd(sf.optim.warmup_cosine(peak, warmup=0, steps=9)) for peak in (1e-3, 1.0))

    def more(w: Tensor, x: Tensor) -> Any:
        return small.step([w.detach().clone()], [torch.ones_like(w)], small.init([w.detach()]))[0][0].sum()

    def change() -> None:
        nonlocal small
        small = large

    return running(more, change)


def late_mode() -> Callable[[], Any]:
    net = nn.Sequential(nn.Linear(WIDTH, 1).double(), nn.Dropout(0.5))
    return running(lambda w, x: net(w).sum(), net.eval)


def late_module() -> Callable[[], Any]:
    nets = [nn.Linear(WIDTH, 1).double() for _ in range(2)]
    return running(lambda w, x: nets[0](w).sum(), nets.reverse)


def running(more: Callable[..., Any], change: Callable[[], Any]) -> Callable[[], Any]:
    """Four calls, a change, and a call."""

    def run() -> Any:
        step, params, state = toy(more)
        for i in range(5):
            params, state, _ = step(params, state, data(i))
            if i == 3:
                change()

    return run


LATE: dict[str, tuple[Callable[[], Callable[[], Any]], str]] = {
    "number": (
        late_number,
        r"rate in late_number\.<locals>\.more is 0\.5 now, and was 1\.0: a program keeps what the step",
    ),
    "global": (late_global, r"settings\['rate'\] in late_global\.<locals>\.<lambda> is 0\.5 now, and was 1\.0"),
    "attribute": (late_attribute, r"more\.rate in toy.* is 0\.5 now"),
    "tensor": (late_tensor, r"teachers\['new'\] in late_tensor.* is another tensor now"),
    "optimizer": (late_optimizer, r"small in late_optimizer.* is another Optimizer now"),
    "module": (late_module, r"nets\[0\] in late_module.* is another module now"),
    "mode": (late_mode, r"net\.training in late_mode.* is False now, and was True"),
}


class Halved:
    """Its rate comes from its class, a place without a dict, or a property."""

    __slots__ = ("own",)
    rate = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    @property
    def both(self) -> float:
        return self.rate * self.own

    def __call__(self, w: Tensor) -> Tensor:
        return w * self.both


class Acting(nn.Module):
    """Its forward reads functions, tensors, tuples, lists and dicts that are no submodules, parameters or buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.by, self.scale, self.shifts, self.named = F.relu, torch.ones(2), (1.0,), [1.0], {"rate": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * self.by * self.scale[0] + sum(self.shifts)) * self.named["rate"]


@dataclass
class Rates:
    rate: float = 1.0
    inner: Any = None


class Way(Enum):
    one, two = 1, 2


class Scaling:
    """Its methods name what its users do not."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by

    def scaled(self, x: Tensor) -> Tensor:
        return self(x)


class Configured(nn.Module):
    """Its forward reads what objects of many kinds hold, its class, and what its methods and functions name."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config, self.fields = Rates(inner=Rates()), SimpleNamespace(rate=1.0)
        self.lists, self.kinds, self.numbers = OrderedDict(rates=[1.0]), {"one"}, np.ones(2)
        self.part, self.bound = functools.partial(torch.mul, 1.0), Halved().__call__
        self.way, self.kind, self.format = Way.one, nn.ReLU, torch.contiguous_format
        self.called, self.asked, self.number = Scaling(1.0), Scaling(1.0), np.float64(1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.config.rate * self.config.inner.rate * self.fields.rate * self.lists["rates"][0] * self.factor
        x = self.called(self.asked.scaled(x)).contiguous(memory_format=self.format) * self.number
        x = self.kind()(x) if self.way is Way.one else x
        return self.bound(self.part(x)) * float(self.numbers[0]) * len(self.kinds) * self.more()

    def more(self) -> float:
        return self.yet_more()

    def yet_more(self) -> float:
        return sum(RATES)


RATES = [1.0]


def cases_of_modules() -> dict[str, tuple[Callable[..., Any], Callable[[], Any], str]]:
    """As `cases_of_places`, of a module."""
    kind: Any = type("Own", (Configured,), {})
    net = nn.Sequential(kind(), nn.Linear(2, 2))
    own: Any = net[0]
    changes: dict[str, tuple[Callable[[], Any], str]] = {
        "a field of its configuration": (
            lambda: setattr(own.config, "rate", 2.0),
            r"0\.config in .* is \('rate', 2\.0\) now",
        ),
        "a field in a field": (
            lambda: setattr(own.config.inner, "rate", 2.0),
            r"0\.config in .* is \('rate', 2\.0\) now",
        ),
        "another configuration": (
            lambda: setattr(own, "config", Rates(2.0, Rates())),
            r"config in .* is \('rate', 2\.0\) now",
        ),
        "a namespace": (lambda: setattr(own.fields, "rate", 2.0), r"0\.fields in .* is .*2\.0.* now"),
        "a list in a dict": (lambda: own.lists["rates"].__setitem__(0, 2.0), r"0\.lists in .* is 2\.0 now"),
        "a set": (lambda: own.kinds.add("two"), r"0\.kinds in .*: there are more or fewer now"),
        "an array": (lambda: own.numbers.__setitem__(0, 2.0), r"0\.numbers in .* is b'"),
        "a partial": (lambda: setattr(own, "part", functools.partial(torch.mul, 2.0)), r"0\.part in .* is 2\.0 now"),
        "what a method is bound to": (
            lambda: setattr(own.bound.__self__, "own", 2.0),
            r"0\.bound in .* is .*2\.0.* now",
        ),
        "a member of an enumeration": (lambda: setattr(own, "way", Way.two), r"0\.way in .* is <Way\.two: 2> now"),
        "a class that it has": (lambda: setattr(own, "kind", nn.GELU), r"0\.kind in .* is <class .*GELU'> now"),
        "an object of torch": (
            lambda: setattr(own, "format", torch.channels_last),
            r"0\.format in .* is torch\.channels_last now",
        ),
        "an object that it calls": (lambda: setattr(own, "called", Scaling(2.0)), r"0\.called in .* is .*2\.0.* now"),
        "an object that it asks": (lambda: setattr(own.asked, "by", 2.0), r"0\.asked in .* is .*2\.0.* now"),
        "its class": (lambda: setattr(kind, "factor", 2.0), r"Own\.factor of net in .* is 2\.0 now"),
        "an attribute in place of its class's": (lambda: setattr(own, "factor", 2.0), r"0\.factor in .* is 2\.0 now"),
        "its class's function": (
            lambda: setattr(kind, "forward", lambda self, x: x),
            r"Own\.forward of net in .* is the function at line",
        ),
        "its class's method": (lambda: setattr(kind, "yet_more", lambda self: 2.0), r"Own\.yet_more of net in"),
        "what its method names": (lambda: RATES.__setitem__(0, 2.0), r"RATES\[0\] in Configured\.yet_more is 2\.0 now"),
        "a hook of all modules": (
            lambda: hooks.append(nn.modules.module.register_module_forward_hook(lambda *given: None)),
            "the hooks of net in .*: there are more or fewer now",
        ),
    }
    hooks: list[Any] = []
    return {name: (lambda w: net(w), change, told) for name, (change, told) in changes.items()}


@pytest.mark.parametrize("name", cases_of_modules())
def test_a_change_is_noticed_wherever_a_module_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RATES", [1.0])
    step, change, told = cases_of_modules()[name]
    around = surroundings.unchanged_values(surroundings.captured_values(step), surroundings.captured_values(step))
    assert surroundings.changed(around, step) == ""
    change()
    try:
        assert re.search(told, surroundings.changed(around, step)), surroundings.changed(around, step)
    finally:
        nn.modules.module._global_forward_hooks.clear()


def test_what_is_equal_or_too_much_to_look_through_is_the_same() -> None:
    net: Any = Configured()
    net.lists = {"rates": [1.0], "many": [[[0.0] * 200] * 200] * 200}
    around = surroundings.captured_values(lambda w: net(w))
    net.number, net.config, net.fields = np.float64(1.0), Rates(inner=Rates()), SimpleNamespace(rate=1.0)
    began = time.perf_counter()
    assert surroundings.changed(around, lambda w: net(w)) == ""
    assert time.perf_counter() - began < 1


def scaled(rate: float) -> Callable[[Tensor], Tensor]:
    return lambda w: w * rate


def cases_of_places() -> dict[str, tuple[Callable[..., Any], Callable[[], Any], str]]:
    """Steps, what changes a thing that they read, and what is said of it."""
    held: dict[str, Any] = {"f": scaled(1.0), "x": torch.ones(2), "shape": (2, 3)}
    several, settings, kind = [1.0, 2.0], {"rate": 1.0}, type("Own", (Halved,), {"__slots__": ()})
    of_class, of_slot, bound = kind(), Halved(), functools.partial(lambda w, rate: w * rate, rate=1.0)
    f, dtype, swapped, optimizer = scaled(1.0), torch.float32, scaled(1.0), sf.optim.sgd(0.1)
    x: Tensor | None = torch.ones(2)

    def optional(w: Tensor, rate: float = 1.0) -> Tensor:
        return w * rate

    def plain(w: Tensor) -> Tensor:
        return w

    def set_f() -> None:
        nonlocal f
        f = scaled(0.5)

    def set_other() -> None:
        nonlocal swapped
        swapped = plain

    def set_x() -> None:
        nonlocal x
        x = None

    def set_dtype() -> None:
        nonlocal dtype
        dtype = torch.float64

    def set_optimizer() -> None:
        nonlocal optimizer
        optimizer = sf.optim.sgd(0.1)

    linear, dropout, norm, of_model = nn.Linear(2, 2), nn.Dropout(0.1), nn.BatchNorm1d(2), nn.Dropout(0.1)
    inner, acting = nn.Sequential(), Acting()
    net = nn.Sequential(linear, nn.Sequential(dropout, norm), inner, acting)
    model = interop.functional(nn.Sequential(nn.Linear(2, 2), of_model))

    return {
        "a module's number": (
            lambda w: net(w),
            lambda: setattr(dropout, "p", 0.5),
            r"net\.1\.0\.p in .* is 0\.5 now, and was 0\.1",
        ),
        "a module's parameter": (
            lambda w: net(w),
            lambda: setattr(linear, "weight", nn.Parameter(torch.ones(2, 2))),
            r"net\.0\.weight in .* is another tensor now",
        ),
        "a module's buffer": (
            lambda w: net(w),
            lambda: setattr(norm, "running_mean", torch.zeros(2)),
            r"net\.1\.1\.running_mean in .* is another tensor now",
        ),
        "a number of a model": (
            lambda w: model(w, w),
            lambda: setattr(of_model, "p", 0.5),
            r"model\.1\.p in .* is 0\.5 now",
        ),
        "a mode": (lambda w: net(w), lambda: net[1].eval(), r"net\.1\.training in .* is False now, and was True"),
        "another module": (
            lambda w: net(w),
            lambda: setattr(net, "0", nn.Linear(2, 2)),
            r"net\.0 in .* is another module now",
        ),
        "a module more": (
            lambda w: net(w),
            lambda: inner.append(nn.Tanh()),
            "the modules of net in .*: there are more or fewer now",
        ),
        "a hook": (
            lambda w: net(w),
            lambda: linear.register_forward_hook(lambda *given: given[2] * 2),
            "the hooks of net in .*: there are more or fewer now",
        ),
        "a forward": (
            lambda w: net(w),
            lambda: setattr(linear, "forward", torch.tanh),
            r"net\.0\.forward in .* is the function tanh now, and was not there",
        ),
        "a module's function": (
            lambda w: net(w),
            lambda: setattr(acting, "act", torch.tanh),
            r"net\.3\.act in .* is the function tanh now, and was the function at line",
        ),
        "a tensor of a module": (
            lambda w: net(w),
            lambda: setattr(acting, "by", torch.zeros(2)),
            r"net\.3\.by in .* is another tensor now",
        ),
        "a module's tuple": (
            lambda w: net(w),
            lambda: setattr(acting, "scale", (2.0,)),
            r"net\.3\.scale in .* is \(2\.0,\) now, and was \(1\.0,\)",
        ),
        "in a module's list": (
            lambda w: net(w),
            lambda: acting.shifts.append(2.0),
            r"net\.3\.shifts in .*: there are more or fewer now",
        ),
        "in a module's dict": (
            lambda w: net(w),
            lambda: acting.named.update(rate=2.0),
            r"net\.3\.named in .* is 2\.0 now, and was 1\.0",
        ),
        "a closure made again": (lambda w: f(w), set_f, r"rate in scaled.* is 0\.5 now, and was 1\.0"),
        "another function": (lambda w: swapped(w), set_other, "swapped in .* is the function at line "),
        "its code": (lambda w: optional(w), lambda: setattr(optional, "__code__", plain.__code__), "__code__ in"),
        "a default": (lambda w: optional(w), lambda: setattr(optional, "__defaults__", (0.5,)), r"rate in .* is 0\.5"),
        "an optimizer": (lambda w: optimizer.init(w), set_optimizer, "optimizer in .* is another Optimizer now"),
        "no tensor": (lambda w: w if x is None else w * x, set_x, "x in .* is None now, and was a tensor"),
        "a dtype": (lambda w: w.to(dtype), set_dtype, r"dtype in .* is torch\.float64 now"),
        "a key less": (
            lambda w: w * settings.get("rate", 2),
            settings.clear,
            r"\['rate'\] in .* is not there now, and was 1\.0",
        ),
        "an item more": (lambda w: w * sum(several), lambda: several.append(3), r"len\(several\) in .* is 3 now"),
        "a tuple": (lambda w: w.view(held["shape"]), lambda: held.update(shape=(3, 2)), r"is \(3, 2\) now"),
        "of a class": (lambda w: w * of_class.rate, lambda: setattr(kind, "rate", 0.5), r"of_class\.rate in .* is 0"),
        "a slot, by a property": (of_slot, lambda: setattr(of_slot, "own", 0.5), r"self\.own in .* is 0\.5"),
        "a partial": (lambda w: bound(w), lambda: bound.keywords.update(rate=0.5), r"keywords\['rate'\] in .* is 0\.5"),
    }


@pytest.mark.parametrize("name", cases_of_places())
def test_a_change_is_noticed_wherever_it_is(name: str) -> None:
    step, change, told = cases_of_places()[name]
    around = surroundings.unchanged_values(surroundings.captured_values(step), surroundings.captured_values(step))
    assert surroundings.changed(around, step) == ""
    change()
    assert re.search(told, surroundings.changed(around, step)), surroundings.changed(around, step)


class Noted(nn.Linear):
    """A layer on which others note where training is."""

    epoch = 1


def test_what_others_note_on_a_module_changes_nothing() -> None:
    from transformers.utils import output_capturing

    layer = Noted(2, 2)
    layer.epoch = 2

    def step(w: Tensor) -> Any:
        return layer(w)

    around = surroundings.captured_values(step)
    layer.epoch = 3
    with torch.no_grad():
        layer.weight.add_(1)
    output_capturing.install_output_capuring_hook(layer, "hidden_states", 0)
    assert surroundings.changed(around, step) == ""


def test_functions_that_are_made_again_alike_are_the_same() -> None:
    made = [scaled(1.0)]

    def step(w: Tensor) -> Tensor:
        f = made[0]
        return f(w)

    around = surroundings.captured_values(step)
    for rate, told in ((1.0, ""), (1.0, ""), (0.5, "rate in scaled.<locals>.<lambda> is 0.5 now, and was 1.0")):
        made[0] = scaled(rate)
        assert surroundings.changed(around, step) == told


@pytest.mark.parametrize("name", LATE)
def test_what_changes_after_the_program_was_made_is_an_error(name: str) -> None:
    case, told = LATE[name]
    with pytest.raises(Exception, match=told):
        on_one_rank(lambda: case()())


class Settings(dict[str, Any]):
    """Its keys are its attributes, as in many libraries; others are a KeyError."""

    __getattr__ = dict.__getitem__


class Strict:
    """No other attribute may even be asked for."""

    __slots__ = ("rate",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def unread() -> Any:
    """Steps whose surroundings change without any effect on what they do, among objects that are easily disturbed."""
    calls, last, object_ = [0], [torch.zeros(())], Rate()
    strict: Any = Strict()
    unfinished = nn.Linear.__new__(nn.Linear)
    odd: Any = Settings({str(i): i for i in range(300)}, rate=1.0)
    strict.rate = 1.0

    def more(w: Tensor, x: Tensor) -> Any:
        calls[0] += 1
        last[0] = w.sum()
        assert unfinished is not None
        return object_(w, x) * odd.rate * strict.rate

    step, params, state = toy(more)
    for i in range(7):
        params, state, value = step(params, state, data(i))
        object_.unread += i > 3
        calls[0] += 1
    return value


def test_what_a_step_does_not_read_may_change() -> None:
    assert on_one_rank(unread) == on_one_rank(lambda: repeated(lambda w, x: w.sum(), calls=7))[-1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_cannot_hold_is_an_error(name: str) -> None:
    case, told = REFUSED[name]
    with pytest.raises(Exception, match=told) as raised:
        on_one_rank(case)
    assert len(str(raised.value).split("\n---")[0]) < 1500


@contextlib.contextmanager
def graphs_made() -> Iterator[list[Any]]:
    """The graphs of which programs are made inside."""
    graphs: list[Any] = []
    plain = regions.program

    def program(graph: Any) -> Any:
        graphs.append(graph)
        return plain(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "program", program)
        yield graphs


def hyperbolic(name: str) -> int:
    """How often the program of a step computes a tanh."""
    with graphs_made() as graphs:
        step, params, state = PROGRAMS[name]()
        compiled = sf.compile(step)
        for _ in range(2):
            params, state, _ = compiled(params, state, torch.ones(ROWS, WIDTH, dtype=torch.float64))
    return sum(node.target is torch.ops.aten.tanh.default for node in graphs[0].nodes)


def test_a_policy_runs_again_what_it_does_not_keep() -> None:
    names = "dropout", "dropout, remat", "policy, dropout"
    kept, again, most = (on_one_rank(functools.partial(hyperbolic, name)) for name in names)
    assert (kept, again, most) == (LAYERS, 2 * LAYERS, 2 * LAYERS)


def compiles() -> Any:
    """How often 100 steps with a schedule compile, and how often after steps of another shape."""
    with graphs_made() as programs:
        step, params, state = of_blocks()
        compiled = sf.compile(step)
        for _ in range(100):
            params, state, _ = compiled(params, state, torch.ones(ROWS, WIDTH, dtype=torch.float64))
        first = len(programs)
        for _ in range(4):
            params, state, _ = compiled(params, state, torch.ones(2 * ROWS, WIDTH, dtype=torch.float64))
    return first, len(programs)


def test_a_schedule_compiles_once_and_another_shape_once_more() -> None:
    assert on_one_rank(compiles) == (1, 2)


def regions_of(layers: int) -> int:
    keys: set[str] = set()

    def function(region: Any) -> Any:
        keys.add(region.key)
        return lambda xs: region.graph(*xs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions.Region, "function", function)
        patch.setattr(steps, "LAYERS", layers)
        step, params, state = of_blocks()
        compiled = sf.compile(step)
        for _ in range(2):
            params, state, _ = compiled(params, state, torch.ones(ROWS, WIDTH, dtype=torch.float64))
    return len(keys)


def decompositions_of(layers: int) -> int:
    """How many operations of layers are decomposed, besides collectives and what touches the parameters."""
    seen: list[Any] = []
    made = pure._Decompositions.__init__

    def noted(parts: Any, run: Any, chained: Any) -> None:
        seen.extend(node for node in run if node not in chained and not regions.is_collective(node))
        made(parts, run, chained)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pure._Decompositions, "__init__", noted)
        regions_of(layers)
    return len(seen)


@pytest.mark.parametrize("count", [regions_of, decompositions_of])
def test_equal_layers_are_compiled_once(count: Callable[[int], int]) -> None:
    few, many = (world(2).with_deadline(60).run(count, layers) for layers in (4, 9))
    assert few == many


def running_statistics() -> Any:
    """What batch norm keeps, beside the same without a compiler."""
    found = []
    for wrap in (lambda step: step, lambda step: sf.compile(step, mesh=sf.make_mesh(shard=1, device="cpu"))):
        mean = torch.zeros(WIDTH, dtype=torch.float64)

        def step(w: Any, x: Tensor, mean: Tensor = mean) -> Any:
            def loss(w: Tensor) -> Tensor:
                return F.batch_norm(x * w, mean, torch.ones_like(mean), training=True).pow(3).sum()

            value, gradient = sf.value_and_grad(loss)(w)
            return w - 0.1 * gradient, value

        run, w = wrap(step), data(1)
        for i in range(4):
            w, _ = run(w, torch.stack([data(i), data(2 * i + 1).sin(), data(3)]))
        found += [mean, w]
    return found


def test_tensors_from_elsewhere_are_overwritten_in_place() -> None:
    mean, w, other_mean, other_w = on_one_rank(running_statistics)
    assert distance([other_mean, other_w], [mean, w]) < 1e-12
    assert mean.abs().sum() > 0.1


def kept_in_a_list() -> list[Any]:
    """What is kept of each call: its number, or why it has none."""
    log: list[Tensor] = []

    def more(w: Tensor, x: Tensor) -> Any:
        log.append(w.sum().detach())
        return 0

    repeated(more)
    found: list[Any] = []
    for kept in log:
        try:
            found.append(float(kept))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_what_a_step_keeps_has_no_numbers_rather_than_wrong_ones() -> None:
    first, *later = on_one_rank(kept_in_a_list)
    assert first == WIDTH / 2
    assert later == ["GuardOnDataDependentSymNode"] * 2


def inner_compiled() -> Any:
    def step(w: Tensor, x: Tensor) -> Any:
        return w * 0.9 - x, w.sum()

    return both(torch.compile(step, backend="eager"), lambda: data(1))


def test_functions_that_are_compiled_are_part_of_the_program() -> None:
    plain, compiled = on_one_rank(inner_compiled)
    assert distance(compiled, plain) < 1e-12


def other_results() -> Any:
    def step(x: Tensor) -> Any:
        return {"n": 3, "name": "a", "x": x, "t": x.view(2, -1).T, "twice": [x + 1] * 2}

    compiled = sf.compile(step, mesh=sf.make_mesh(shard=1, device="cpu"))
    return [compiled(data(i)) for i in range(3)]


def test_results_are_as_without_a_compiler() -> None:
    for i, found in enumerate(on_one_rank(other_results)):
        assert (found["n"], found["name"]) == (3, "a")
        for x, want in ((found["x"], data(i)), (found["t"], data(i).view(2, -1).T), (found["twice"][1], data(i) + 1)):
            assert torch.equal(x, want)


def by_rank(other: str) -> Any:
    rank, mesh, calls = dist.get_rank(), mesh_here(), list[int]()
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "more": lambda x: sf.psum(sf.psum(x, DATA), DATA),
        "another": lambda x: sf.pmax(x, DATA),
        "another shape": lambda x: sf.psum(x[:3], DATA),
        "another dimension": lambda x: sf.all_gather(x.view(2, -1), DATA, dim=1),
    }
    first = ways["another dimension"] if other == "another dimension" else lambda x: sf.psum(x, DATA)
    ways["another dimension"] = lambda x: sf.all_gather(x.view(2, -1), DATA, dim=0)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
    def step(x: Tensor) -> Tensor:
        return (ways[other] if calls and rank else first)(x).sum()

    compiled = sf.compile(step, mesh=mesh)
    for _ in range(2):
        compiled(data())
        calls.append(1)


@pytest.mark.parametrize("other", ["more", "another", "another shape", "another dimension"])
def test_ranks_that_do_different_things_are_told_before_they_run(other: str) -> None:
    with pytest.raises(Exception, match="the collectives of the step differ between ranks"):
        world(2).with_deadline(60).run(by_rank, other)


UNLIKE: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "first": (0, lambda x: x[:3]),
    "second": (1, lambda x: x[:3]),
    "third": (2, lambda x: x[:3]),
    "strides": (0, lambda x: x.t().contiguous().t()),
    "dtype": (0, lambda x: x.float()),
    "structure": (0, lambda x: [x]),
}


def unlike(transform: str, name: str) -> list[str]:
    """What a rank is told whose arguments change their kind alone, after so many calls with that kind on all ranks."""
    watchdog.PATIENCE, watchdog.TICK = 0.3, 0.05
    mesh, (before, other) = mesh_here(), UNLIKE[name]
    params = sf.shard(whole(), mesh, sf.full_shard(DATA))
    layer, optimizer = sf.stage(block), so.sgd(0.1)

    def loss(params: Any, batch: Any) -> Tensor:
        (x,) = batch if isinstance(batch, list) else [batch]
        for p in sf.layers(params["blocks"]):
            x = layer(p, x.double())
        return sf.psum(x.sum(), DATA)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = sf.value_and_grad(loss)(params, batch)
        return *optimizer.step(params, grads, state), value

    state, compiled, x = optimizer.init(params), getattr(sf, transform)(step), data().view(1, -1).expand(4, -1).clone()
    for batch in [x] * 5 + [other(x)] * before:
        params, state, _ = compiled(params, state, batch)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        compiled(params, state, other(x) if dist.get_rank() else x)
    return [str(caught.value)]


@pytest.mark.central
@pytest.mark.parametrize(
    ("transform", "name"),
    [*(("compile", name) for name in UNLIKE), ("cuda_graph", "first"), ("cuda_graph", "structure")],
)
def test_a_kind_of_arguments_that_is_new_to_one_rank_is_an_error_on_all(transform: str, name: str) -> None:
    with World(2, deadline=60) as fresh:
        (here,), (there,) = fresh.run(alone, functools.partial(unlike, transform, name))
    call = name if name in ("second", "third") else "first"
    assert f"{call} call with arguments of this kind" in there
    assert "rank 1 waits for comparing" in here
    if name == "strides":
        assert "New here: batch: torch.float64 [4, 8] with strides [1, 4]" in there


def read_and_overwritten() -> Any:
    def step(p: Tensor, m: Tensor, x: Tensor) -> Any:
        before, twice = p.sum(), p * 2
        m.mul_(0.9).add_(p)
        p.sub_(x * m)
        return p, m, before, twice, (twice * m).sum() + p.sum()

    def pure(p: Tensor, m: Tensor, x: Tensor) -> Any:
        new, also = p - x, m + x  # what reads the old ones comes later
        return new, also, p * 2, m.exp(), p * p.sum() + m

    found = []
    for each in (step, pure):
        for run in (each, sf.compile(each, mesh=sf.make_mesh(shard=1, device="cpu"))):
            p, m = data(1), data(2)
            for i in range(4):
                p, m, *others = run(p, m, data(i))
            found.append([p, m, *others])
    return found


def test_arguments_are_overwritten_after_all_have_read_them() -> None:
    plain, compiled, pure, compiled_pure = on_one_rank(read_and_overwritten)
    assert distance(compiled, plain) < 1e-12
    assert distance(compiled_pure, pure) < 1e-12


Toy = Callable[..., Any]


def both(step: Toy, first: Callable[[], Any], rest: Callable[[int], Any] = data) -> Any:
    """What a step `(carried, x) -> (carried, ...)` returns in its calls, and what it is compiled."""
    found: list[Any] = []
    for run in (step, sf.compile(step, mesh=sf.make_mesh(shard=1, device="cpu"))):
        carried, every = first(), []
        for i in range(4):
            torch.manual_seed(i)
            carried, *others = run(carried, rest(i))
            every.append([x.clone() for x in optree.tree_leaves(others)])
        found.append([every, carried])
    return found


def clamped(w: Tensor, x: Tensor) -> Any:
    w.sub_(x)
    return w.clamp(-1, 1), w.sum()


def old(w: Tensor, x: Tensor) -> Any:
    return w - x, w, w[1:].view(-1), x


def unfolded(w: Tensor, x: Tensor) -> Any:
    windows = w.unfold(0, 3, 1)
    return w - x, windows.square().sum(1), torch.view_as_complex(w.view(-1, 2)).abs()


def drawing(w: Tensor, x: Tensor) -> Any:
    a, b = torch.randn_like(x), torch.rand_like(x)
    c = torch.empty_like(x).exponential_() + F.dropout(x, 0.5)
    return w + b, (a * w.norm()).sum(), torch.multinomial(c.abs(), 2), torch.empty_like(x).bernoulli_(0.3)


def cast(w: Tensor, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        a = torch.outer(w, x) @ w
        with torch.autocast("cpu", enabled=False):
            b = torch.outer(w, x) @ w
    return w - b, a.float(), b


def sliced(w: Tensor, x: Tensor) -> Any:
    return w - x, x[2:5].as_strided((2,), (1,)), x.view(2, -1)[1]


def drawing_across(w: Tensor, x: Tensor) -> Any:
    """Random numbers in memory that is not contiguous, as attention's dropout meets it."""
    across, spread = x.view(2, 4).t(), torch.empty(8, 4, dtype=x.dtype)[::2, 1:3]
    mask = F.dropout(across, 0.5) + torch.rand_like(across)
    return w - mask.sum(), mask, spread.uniform_(1, 2) * 1, torch.empty_like(across).random_(3, 9)


counts = torch.zeros((), dtype=torch.int64)


def counting(w: Tensor, x: Tensor) -> Any:
    counts.add_(1)
    return w * counts, counts + 0


def chosen(w: Tensor, x: Tensor) -> Any:
    values, places = x.topk(3)
    return (
        w + values.mean() / (places.float().mean() + 1),
        values * values.sum(),
        torch.det(x.view(2, 4) @ w.view(4, 2)),
    )


def pooled(w: Tensor, x: Tensor) -> Any:
    images = torch.stack([x, w]).view(1, 1, 4, 4)
    y = F.conv2d(images, images[..., :2, :2], padding=1)
    return w - F.max_pool2d(y, 2).mean() / 1e3, y * y.sum(), y


def writing(w: Tensor, x: Tensor) -> Any:
    """Overwriting beside the same operations on memory that nothing overwrites."""
    first, second, third = x * 2, x * 2, x * 2
    torch._foreach_mul_(first.split(4), 3.0)
    torch.add(second, w, out=second)
    tail, table = second[3:], torch.zeros(3, WIDTH, dtype=x.dtype)
    table[1] = first
    table.index_put_((torch.tensor([0, 2]),), second, accumulate=True)
    second += 1
    again = second.view(2, 4)
    again.add_(third.view(2, 4))
    return w - first, tail * 2, table.t().contiguous(), third, again, second[3:] * 2


def alike(w: Tensor, x: Tensor) -> Any:
    """Operations that look alike."""
    x = x + 1
    n, square = (10 * x).long(), torch.outer(x, w)
    products = [n * 2, n * 2.0, n * True, x * x, x * w, x / w, w / x, x.copysign(0.0), x.copysign(-0.0)]
    products += [torch.addcmul(x, w, x), torch.addcmul(x, w, w), square * 2, square.t() * 2]
    sums = [square.sum(0), square.t().sum(0), square[1:].sum(0), square[:, 1:].sum(0), square.sum(1)]
    return w.cos() + w.cos().square(), *products, *sums, F.softmax(square, 0), F.softmax(square, 1), F.softmax(x, 0)


def by_data(w: Tensor, x: Tensor) -> Any:
    y = w * 2
    w.data -= x
    y.data *= 3
    return w, y


TOYS: dict[str, Toy] = {
    f.__name__: f
    for f in (by_data, clamped, old, unfolded, drawing, drawing_across, sliced, chosen, pooled, writing, alike)
}


@pytest.mark.parametrize("name", TOYS)
def test_small_steps_are_as_without_a_compiler(name: str) -> None:
    plain, compiled = on_one_rank(lambda: both(TOYS[name], lambda: data(1)))
    assert distance(compiled, plain) < 1e-12
    strides = [[x.stride() for x in optree.tree_leaves(each)] for each in (compiled, plain)]
    assert strides[0] == strides[1]


def overwritten_by(name: str) -> Any:
    """Two squares that become what is computed of both, as it is and compiled."""

    def step(pair: Any, x: Tensor) -> Any:
        before = pair[0][0, 0] + x.sum()
        return OVERWRITTEN[name](*pair), before

    def first() -> Any:
        a = torch.arange(16.0, dtype=torch.float64).view(4, 4)
        return a.sin(), a.cos().T.contiguous().T

    return both(step, first)


OVERWRITTEN: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "swapped": lambda a, b: (b, a),
    "transposed": lambda a, b: (b.t(), a.t()),
    "turned": lambda a, b: (a.flip(0).t(), b.roll(1, 0).t()),
    "slices": lambda a, b: (torch.cat([a, b])[2:6], torch.cat([b, b])[1:5]),
    "in place": lambda a, b: (a.copy_(a.t().flip(0).t()), b.copy_(b.roll(1, 0))),
    "repeated": lambda a, b: (b.repeat(1, 1), a.pow(1)),
}


def drawn_in_all_ways(w: Tensor, x: Tensor) -> Any:
    found = torch.bernoulli(x.sigmoid()), torch.rand_like(x), torch.normal(w, 1.0), w[torch.randperm(WIDTH)]
    also = F.dropout(x, 0.5), F.rrelu(x - 1, training=True), torch.empty_like(x).bernoulli_(0.4), torch.randint(9, (2,))
    return w * 0.9, *found, *also


def drawn_by_inductor() -> Any:
    return both(drawn_in_all_ways, lambda: data(1))


def test_inductor_draws_what_torch_draws() -> None:
    plain, compiled = world(1).with_deadline(120).run(drawn_by_inductor)[0]
    assert distance(compiled, plain) < 1e-12


@pytest.mark.parametrize("name", OVERWRITTEN)
def test_inductor_overwrites_nothing_that_is_still_read(name: str) -> None:
    plain, compiled = world(1).with_deadline(120).run(overwritten_by, name)[0]
    assert distance(compiled, plain) < 1e-12


def counted() -> Any:
    """A counter from elsewhere, which the step alone overwrites."""
    found = both(counting, lambda: data(1))
    return [every for every, _ in found], counts


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an operation": lambda b, x: b.add_(x),
    "two operations": lambda b, x: (b.add_(x), b.mul_(0.5)),
    "a copy": lambda b, x: b.copy_(b * 2 + x),
    "a rotation": lambda b, x: b.copy_(torch.cat([b[1:], x[:1]])),
    "what is read in between": lambda b, x: (b.add_(x), x.mul(b), b.add_(b * x)),
    "an output": lambda b, x: torch.add(b, x, out=b),
    "a list": lambda b, x: torch._foreach_add_([b[:2], b[2:]], [x[:2], x[2:]]),
    "another name": lambda b, x: b.data.add_(x),
    "no history": lambda b, x: b.detach().lerp_(x, 0.3),
    "an alias": lambda b, x: torch.ops.aten.alias(b).copy_(x + b),
    "a view": lambda b, x: b.view(-1).add_(x),
    "a view of the same shape": lambda b, x: b.view_as(b).copy_(x + b),
    "a shape with one more": lambda b, x: b.unsqueeze(0).mul_(x).squeeze(0).add_(1),
    "rows and columns": lambda b, x: b.view(2, -1).t().copy_(x.view(2, -1).t()),
    "all": lambda b, x: b[:].copy_(x + b),
    "a slice": lambda b, x: b[:2].copy_(x[:2]),
    "an element": lambda b, x: b.__setitem__(0, x[1]),
    "every second element": lambda b, x: b[::2].mul_(x[::2]),
    "elements by number": lambda b, x: b.index_put_((torch.tensor([0, 1]),), x[:2]),
    "elements where": lambda b, x: b.masked_fill_(x > 0.25, 3.0),
    "parts": lambda b, x: [part.add_(x[0]) for part in b.unbind()],
    "halves": lambda b, x: [part.add_(x[: len(part)]) for part in b.split(2)],
    "complex numbers": lambda b, x: torch.view_as_complex(b.view(-1, 2)).mul_(2.0),
    "bits": lambda b, x: b.view(torch.int64).bitwise_xor_(1),
    "running statistics": lambda b, x: F.batch_norm(torch.stack([x, x * 2]), b, b.abs().clone(), training=True),
    "running statistics, twice": lambda b, x: [
        F.batch_norm(torch.stack([x, x * k]), b, b.abs().clone(), training=True) for k in (2, 3)
    ],
    "statistics of each row": lambda b, x: F.instance_norm(
        torch.stack([x, x * 2]).view(2, -1, 1) * torch.arange(1.0, 4.0, dtype=x.dtype), b, b.abs().clone()
    ),
}


def beside_what_it_overwrites(make: Callable[[], tuple[Toy, Tensor]]) -> Any:
    """What steps return and overwrite, as they are and compiled; each has a tensor of its own to overwrite."""
    found = []
    for compiles in (False, True):
        step, held = make()
        stepping = sf.compile(step, mesh=sf.make_mesh(shard=1, device="cpu")) if compiles else step
        w, every = data(1), []
        for i in range(4):
            w, last = stepping(w, data(i))
            every.append([w.clone(), last, held.clone()])
        found.append(every)
    return found


def written_elsewhere(write: Callable[[Tensor, Tensor], Any]) -> Any:
    """A tensor from elsewhere that is read, overwritten in some way, and read again."""

    def make() -> tuple[Toy, Tensor]:
        held = torch.arange(1, 1 + WIDTH, dtype=torch.float64)

        def step(w: Tensor, x: Tensor) -> Any:
            before = held * 1
            write(held, x)
            return w / 2 + x + held + before, (w * held).sum()

        return step, held

    return beside_what_it_overwrites(make)


def all_written_elsewhere() -> dict[str, float]:
    found = {name: written_elsewhere(write) for name, write in WRITES.items()}
    return {name: distance(compiled, plain) for name, (plain, compiled) in found.items()}


@pytest.mark.central
def test_what_overwrites_a_tensor_from_elsewhere_in_any_way_does_so_when_compiled() -> None:
    for name, apart in on_one_rank(all_written_elsewhere).items():
        assert apart < 1e-12, name


def in_a_buffer() -> Any:
    """A step that overwrites memory of its own, by a new tensor in each call."""

    def make() -> tuple[Toy, Tensor]:
        memory = bytearray(8 * WIDTH)

        def step(w: Tensor, x: Tensor) -> Any:
            held = torch.frombuffer(memory, dtype=torch.float64)
            held[1:].add_(x[1:])
            return w / 2 + torch.frombuffer(memory, dtype=torch.float64), held.sum()

        return step, torch.frombuffer(memory, dtype=torch.float64)

    return beside_what_it_overwrites(make)


def test_memory_that_is_not_torchs_is_overwritten_where_it_stays() -> None:
    plain, compiled = on_one_rank(in_a_buffer)
    assert distance(compiled, plain) < 1e-12


@pytest.mark.parametrize("name", ["a slice", "running statistics, twice", "statistics of each row"])
def test_inductor_overwrites_a_tensor_from_elsewhere(name: str) -> None:
    plain, compiled = world(1).with_deadline(120).run(written_elsewhere, WRITES[name])[0]
    assert distance(compiled, plain) < 1e-12


def lists_from_elsewhere() -> Any:
    """Tensors from elsewhere, which operations on lists overwrite and return nothing of, as optimizers on GPUs do."""
    found = []
    for run in (lambda step: step, lambda step: sf.compile(step, mesh=sf.make_mesh(shard=1, device="cpu"))):
        counts = [torch.zeros(()), torch.ones(())]

        def step(w: Tensor, x: Tensor, counts: list[Tensor] = counts) -> Any:
            torch._foreach_add_(counts, 1)
            torch._foreach_mul_(counts, 2.0)
            return w + counts[0] * x, counts[1] * 1

        stepping, w = run(step), data(1)
        for i in range(5):
            w, last = stepping(w, data(i))
        found.append([w, last, counts])
    return found


def test_lists_from_elsewhere_are_overwritten_in_place() -> None:
    plain, compiled = on_one_rank(lists_from_elsewhere)
    assert distance(compiled, plain) < 1e-12


def exact_inside(w: Tensor, x: Tensor) -> Any:
    """An operation that wants equal dtypes, of what autocast leaves as it is, in a call under autocast."""
    with torch.autocast("cpu", enabled=False):
        y = torch.outer(w, x).sin() @ x
        return w - y / 100, torch.zeros_like(w).scatter_add(0, torch.arange(WIDTH), y)


def compiled_under_autocast() -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return both(exact_inside, lambda: data(1))


def test_inductor_meets_no_autocast() -> None:
    plain, compiled = world(1).with_deadline(120).run(compiled_under_autocast)[0]
    assert distance(compiled, plain) < 1e-12


def test_what_a_step_overwrites_elsewhere_is_overwritten_once_a_call() -> None:
    (plain, compiled), total = on_one_rank(counted)
    assert [x.item() for [x] in compiled] == [5, 6, 7, 8]
    assert [x.item() for [x] in plain] == [1, 2, 3, 4]
    assert total.item() == 8


def test_slices_of_a_larger_batch() -> None:
    def slices(i: int) -> Tensor:
        return torch.arange(50, dtype=torch.float64)[i : i + WIDTH]

    plain, compiled = on_one_rank(lambda: both(sliced, lambda: data(1), slices))
    assert distance(compiled, plain) < 1e-12


@pytest.mark.parametrize("around", [False, True])
def test_autocast_is_that_of_the_trace(around: bool) -> None:
    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            return both(cast, lambda: data(1).float(), lambda i: data(i).float())

    plain, compiled = on_one_rank(run)
    assert distance(compiled, plain, 1.0) < 1e-6


def of_one_block(step: Step, mesh: Any) -> Any:
    """What a step `(params, x) -> (params, ...)` on one block returns in its calls, and what it is compiled."""
    ends = []
    for run in (step, sf.compile(step)):
        params, values = sf.shard({"blocks": whole()["blocks"][:1]}, mesh, STRATEGIES["full_shard"]), []
        for i in range(4):
            torch.manual_seed(i)
            params, *found = run(params, drawn(dist.get_rank() + i)(ROWS, WIDTH))
            values += found
        ends.append([*values, *optree.tree_leaves(params)])
    return ends


def differentiated_twice() -> Any:
    """A penalty on a gradient through a stage."""
    mesh = mesh_here()
    layer = sf.stage(block, remat=True)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
    def step(params: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            y = layer(params["blocks"][0], x)
            return sf.psum(y.pow(3).sum(), DATA)

        def penalty(params: Any) -> Tensor:
            return so.vdot(gradient := sf.grad(loss)(params), gradient)

        grads = sf.grad(penalty)(params)
        return optree.tree_map(lambda p, g: p - 1e-3 * g, params, grads), loss(params)

    return of_one_block(step, mesh)


def test_second_derivatives_are_compositions() -> None:
    for plain, compiled in world(2).with_deadline(60).run(alone, differentiated_twice):
        assert distance(compiled, plain, 1.0) < 1e-12


def twice_backward() -> Any:
    """Two backward passes through a stage that draws and runs again."""
    mesh = mesh_here()
    layer = sf.stage(dropped, remat=True)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
    def step(params: Any, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = layer(params["blocks"][0], x).square().sum()
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        second = torch.autograd.grad(y * 2, x)[0]
        return optree.tree_map(lambda p: p * 0.9, params), first, second

    return of_one_block(step, mesh)


def test_a_second_backward_uses_the_same_random_numbers() -> None:
    for plain, compiled in world(2).with_deadline(60).run(alone, twice_backward):
        assert distance(compiled, plain) < 1e-12


def sent_around() -> Any:
    """Collectives whose arguments are each rank's own."""
    mesh, ends = mesh_here(), []

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
    def step(w: Tensor, x: Tensor) -> Any:
        n, rank = dist.get_world_size(), sf.axis_index("shard")
        around = sf.ppermute(x, "shard", [(k, (k + 1) % n) for k in range(n)])
        whole = sf.all_gather(x, "shard", to="invariant")
        comes = [1 + i for i in range(n)] if rank == n - 1 else [1] * n
        ragged = sf.collectives.ragged_all_to_all(x[: n + rank], "shard", [1] * (n - 1) + [1 + rank], comes)
        return w - around, sf.collectives.local_slice(whole * 2, "shard"), ragged

    for run in (step, sf.compile(step, mesh=mesh)):
        w, values = data(1), []
        for i in range(4):
            w, *found = run(w, data(i) + dist.get_rank())
            values += found
        ends.append([w, *values])
    return ends


def test_collectives_with_arguments_of_each_rank() -> None:
    for plain, compiled in world(2).with_deadline(60).run(alone, sent_around):
        assert distance(compiled, plain) < 1e-12


def wrong_index() -> Any:
    mesh = sf.make_mesh(shard=1, device="cpu")

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(w: Tensor, rows: Tensor) -> Any:
        return w * 0.5, parallel.embedding(rows, w, ()).sum()

    compiled, w = sf.compile(step, mesh=mesh), data().view(-1, 2)
    for i in range(4):
        w, _ = compiled(w, torch.tensor([0, 1, 2 + i]))


def test_wrong_indices_are_found() -> None:
    with pytest.raises(Exception, match=r"IndexError: .*from 0 to 4; they are from 0 to 3, and 1 of 3 are not"):
        on_one_rank(wrong_index)


def gone_on() -> Any:
    numbers, told = iter(range(1, 99)), []
    step, params, state = toy(lambda w, x: w.sum() * next(numbers))
    for i in range(2):
        params, state, _ = step(params, state, data(i))
    for i in range(2):
        try:
            step(params, state, data(i))
        except RuntimeError as error:
            told.append(str(error)[:40])
    return told


def test_a_step_that_changes_is_refused_again_and_again() -> None:
    first, second = on_one_rank(gone_on)
    assert first == second
    assert "the step does" in first


def changing_places() -> Any:
    step = sf.compile(lambda a, b, c: (b, c, a), mesh=sf.make_mesh(shard=1, device="cpu"))
    a, b, c = data(0), data(1), data(2)
    for _ in range(4):
        a, b, c = step(a, b, c)
    return a, b, c


def in_other_trees(name: str) -> Any:
    """A count, and parameters, where arguments and results are packed differently."""
    mesh, optimizer = sf.make_mesh(shard=1, device="cpu"), so.sgd(so.warmup_cosine(1e-2, warmup=2, steps=9))
    w = {"w": torch.full((WIDTH,), 0.5, dtype=torch.float64)}

    def step(p: Any, s: Any, x: Tensor) -> Any:
        value, grads = sf.value_and_grad(lambda p: (p["w"] * x).square().sum())(p)
        return *optimizer.step(p, grads, s), value

    def as_dict(p: Any, s: Any, x: Tensor) -> Any:
        return dict(zip("psv", step(p, s, x), strict=True))

    def inside(p: Any, s: Any, x: Tensor) -> Any:
        p, s, v = step(p, s, x)
        return {"model": {"weights": p}, "rest": [s, {"loss": v}]}

    def one(both: Any, x: Tensor) -> Any:
        p, s = both
        return step(p, s, x)

    run: Any = {"as_dict": as_dict, "inside": inside, "one": one}[name]
    found = []
    for wrapped in (run, sf.compile(run, mesh=mesh)):
        p, s = optree.tree_map(lambda x: x + 0, w), optimizer.init(w)
        for i in range(6):
            if name == "one":
                p, s, v = wrapped((p, s), data(i))
            else:
                made = wrapped(p, s, data(i))
                p, s, v = (made[k] for k in "psv") if name == "as_dict" else (
                    made["model"]["weights"], made["rest"][0], made["rest"][1]["loss"]
                )  # fmt: skip
        found += [[v, p, float(s["step"])]]
    return found


@pytest.mark.parametrize("name", ["as_dict", "inside", "one"])
def test_what_is_carried_is_found_in_any_tree(name: str) -> None:
    plain, compiled = on_one_rank(lambda: in_other_trees(name))
    assert distance(compiled, plain) < 1e-12


def test_results_may_change_places() -> None:
    assert [x[0].item() for x in on_one_rank(changing_places)] == [1.0, 2.0, 0.0]


def saved() -> Any:
    """Steps that go on from a checkpoint: those as they are, or compiled, from those as they are, or compiled."""
    ends = []
    for first in (0, 1):
        for then in (0, 1):
            step, params, state = of_blocks()
            runs, begun = (step, sf.compile(step)), of_blocks()[1:]
            for i in range(3):
                params, state, _ = runs[first](params, state, drawn(i)(ROWS, WIDTH))
            with tempfile.TemporaryDirectory() as folder:
                sf.checkpoint.save(f"{folder}/c", {"params": params, "state": state})
                fresh = sf.checkpoint.load(f"{folder}/c", dict(zip(("params", "state"), begun, strict=True)))
                params, state = sf.checkpoint.load(f"{folder}/c", {"params": params, "state": state}).values()
            assert distance(_numbers(fresh), _numbers({"params": params, "state": state})) == 0
            params, state = fresh.values()
            for i in range(3):
                params, state, _ = runs[then](params, state, drawn(3 + i)(ROWS, WIDTH))
            ends.append(_numbers((params, state)))
    return ends


def test_a_checkpoint_of_a_compiled_step_is_that_of_any_other() -> None:
    plain, *others = on_one_rank(saved)
    for other in others:
        assert distance(other, plain) < 1e-12


def _from(batches: list[Tensor], n: int) -> list[Tensor]:
    return batches[n:]


def looped() -> list[Any]:
    """Parameters of a run that is saved and goes on, as it is and compiled."""
    found = []
    for wrap in (lambda step: step, sf.compile):
        inner, params, moments = of_blocks()
        each = wrap(inner)

        def step(state: Any, batch: Any, each: Any = each) -> Any:
            params, moments, value = each(*state, batch)
            return (params, moments), {"loss": value}

        draw = drawn(3)
        batches = [draw(ROWS, WIDTH) for _ in range(8)]
        with tempfile.TemporaryDirectory() as folder:
            for steps in (4, 8):
                begun = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (params, moments))
                (ended, _), _ = sf.run.loop(
                    step, begun, functools.partial(_from, batches), steps=steps, save=folder, save_every=2
                )
        found.append(optree.tree_leaves(ended))
    return found


def test_a_loop_saves_what_a_compiled_step_returns_and_goes_on() -> None:
    plain, compiled = on_one_rank(looped)
    assert distance(compiled, plain) < 1e-12


def test_results_of_a_call_without_a_program_are_tensors_of_their_own() -> None:
    def step(params: Any, state: Any, x: Tensor) -> Any:
        state = {"steps": state["steps"] + 1}
        return {"w": params["w"] + x}, state, state["steps"]

    compiled, params, state, found = sf.compile(step), {"w": torch.zeros(2)}, {"steps": torch.tensor(0)}, []
    for _ in range(5):
        params, state, steps = compiled(params, state, torch.ones(2))
        found.append(steps)
    assert [int(n) for n in found] == [1, 2, 3, 4, 5]


def mapped_over_tangents() -> float:
    mesh = mesh_here()
    params = sf.shard(whole(), mesh, STRATEGIES["full_shard"])
    layer = sf.stage(block)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = layer(p, x)
        return sf.pmean(x.square().mean(), DATA)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
    def step(params: Any, x: Tensor) -> Any:
        def along(k: Tensor) -> Tensor:
            tangent = optree.tree_map(lambda w: w * k, params)
            slope: Tensor = torch.func.jvp(lambda p: loss(p, x), (params,), (tangent,))[1]
            return slope

        slopes = torch.func.vmap(along)(torch.arange(1.0, 3.0, dtype=torch.float64))
        return optree.tree_map(lambda w: w * 0.9, params), slopes

    compiled, one, two, off = sf.compile(step), params, optree.tree_map(torch.clone, params), 0.0
    for i in range(4):
        x = drawn(i)(ROWS, WIDTH)
        one, slopes = step(one, x)
        two, others = compiled(two, x)
        off = max(off, float((slopes - others).abs().max() / slopes.abs().max()))
    return off


def test_a_map_over_tangents_is_a_composition_of_collectives() -> None:
    for off in world(2).with_deadline(120).run(alone, mapped_over_tangents):
        assert off < 1e-12
