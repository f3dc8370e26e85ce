"""Steps as compiled programs: the numbers and the messages of the same step as it is, and an error for what they cannot
hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfn as sf
import shardfn.optim as so
from shardfn import P, interop, parallel
from shardfn.testing import world
from shardfn.transforms import regions
from tests.lossless import LOSSLESS
from tests.models import DATA, STRATEGIES, distance, drawn

WIDTH, LAYERS, ROWS, STEPS = 8, 3, 4, 5
plainly = sf.debug(memory=False)  # compiled steps refuse the debug mode in which tests run

Step = Callable[..., Any]
Setting = tuple[Step, Any, Any]
"""A step `(params, state, batch) -> (params, state, loss)`, with parameters and state."""


# --- models ---


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"] + p["b"]) @ p["down"]


def normed(p: Any, x: Tensor) -> Tensor:
    h = F.layer_norm(x, (WIDTH,)) * p["b"].mean()
    return x + F.gelu(h @ p["up"]) @ p["down"]


def dropped(p: Any, x: Tensor) -> Tensor:
    return x + F.dropout(torch.tanh(x @ p["up"] + p["b"]), 0.5) @ p["down"]


def whole(dtype: torch.dtype = torch.float64) -> Any:
    draw = drawn(0, 0.5)
    shapes = {"up": (WIDTH, 5), "b": (5,), "down": (5, WIDTH)}
    tree = {"blocks": [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]}
    return optree.tree_map(lambda x: x.to(dtype), tree)


def mesh_here() -> Any:
    n = dist.get_world_size()
    return sf.make_mesh(device="cpu", replica=2 if n == 4 else 1, shard=n // 2 if n == 4 else n)


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
    **options: Any,
) -> Setting:
    mesh, made = mesh_here(), optimizer()
    placed = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    params = sf.shard(whole(dtype), mesh, placed)
    layer = sf.stage(function, **options)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = layer(p, x.to(dtype))
        x = layer(params["blocks"][0], x) if again else x
        return sf.pmean(x.square().mean(), DATA)

    return stepping(loss, made, mesh, **(accumulated or {})), params, made.init(params)


def frozen() -> Setting:
    mesh, optimizer = mesh_here(), so.sgd(0.1, momentum=0.9)
    params = sf.shard(whole(), mesh, STRATEGIES["full_shard"], frozen=r".*\.b")
    layer = sf.stage(block)

    def loss(params: Any, x: Tensor) -> Tensor:
        for p in sf.layers(params["blocks"]):
            x = layer(p, x)
        return sf.pmean(x.square().mean(), DATA)

    return stepping(loss, optimizer, mesh), params, optimizer.init(params)


def by_tensor() -> Setting:
    mesh = sf.make_mesh(device="cpu", shard=dist.get_world_size() // 2, tensor=2)
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


def module() -> Setting:
    torch.manual_seed(0)
    mesh, optimizer = mesh_here(), so.ema(so.sgd(0.1, momentum=0.9), 0.9)  # Adam's quotients amplify rounding
    model = interop.functional(Net().double())
    params = model.shard(mesh, STRATEGIES["full_shard"])

    def loss(params: Any, x: Tensor) -> Tensor:
        return sf.pmean(model(params, x).square().mean(), DATA)

    return stepping(loss, optimizer, mesh), params, optimizer.init(params)


STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "remat": {"remat": True},
    "accumulate": {"accumulated": {"micro": 2}},
}
PROGRAMS: dict[str, Callable[[], Setting]] = {
    **{
        f"{strategy}, {name}": lambda s=strategy, o=options: of_blocks(s, **o)
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
    "defers nothing": lambda: of_blocks("hybrid_shard", accumulated={"micro": 2, "defer": "nothing"}),
    "defers everything": lambda: of_blocks("hybrid_shard", accumulated={"micro": 2, "defer": "everything"}),
    "gathers in few bits": lambda: of_blocks(gather=LOSSLESS),
    "few bits": lambda: of_blocks("hpz", gather=LOSSLESS, reduce=LOSSLESS),
    "int8": lambda: of_blocks("hybrid_shard", gather=sf.quant.int8(), reduce=sf.quant.int8()),
    "mixed": lambda: of_blocks(dtype=torch.float32, gather_dtype=torch.bfloat16, input_dtype=torch.bfloat16,
                               output_dtype=torch.float32, reduce_dtype=torch.float32),
    "normed": lambda: of_blocks(function=normed),
    "dropout": lambda: of_blocks(function=dropped),
    "dropout, remat": lambda: of_blocks(function=dropped, remat=True),
    "sgd": lambda: of_blocks(optimizer=lambda: so.sgd(0.1, momentum=0.9)),
    "adam, pure": lambda: of_blocks(optimizer=lambda: so.adam(1e-2, donate=False)),
    "lion": lambda: of_blocks(optimizer=lambda: so.lion(lambda step: 1e-2 / step)),
    "clipped": lambda: of_blocks(optimizer=lambda: so.chain(so.clip_by_global_norm(0.1), so.adamw(1e-2))),
    "adamw8bit": lambda: of_blocks(optimizer=lambda: so.adamw8bit(1e-2)),
    "adafactor": lambda: of_blocks(optimizer=lambda: so.adafactor(1e-2)),
    "muon": lambda: of_blocks(
        optimizer=lambda: so.masked(so.muon(0.02), lambda path, shape: len(shape) == 2, so.adamw(1e-2))
    ),
    "ema": lambda: of_blocks(optimizer=lambda: so.ema(so.adamw(1e-2), 0.9)),
    "shard_state": lambda: of_blocks("hybrid_shard", optimizer=lambda: so.shard_state(so.adamw(1e-2), "replica")),
    "frozen": frozen,
    "tensor": by_tensor,
    "module": module,
}  # fmt: skip


# --- against the step as it is ---


def in_turn(name: str) -> Any:
    """A step as it is beside the same compiled: for each call the differences and the messages that differ."""
    step, params, state = PROGRAMS[name]()
    draw = drawn(1 + dist.get_rank() // (2 if name == "tensor" else 1))
    compiled, found = sf.compile(step), []
    one = params, state
    two = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, one)
    for i in range(STEPS):
        x = draw(ROWS, WIDTH, WIDTH)
        torch.manual_seed(i)
        with sf.ledger() as plainly_sent:
            *one, value = step(*one, x)
        torch.manual_seed(i)
        with sf.ledger() as sent:
            *two, other = compiled(*two, x)
        counts = [Counter(map(_message, log.records)) for log in (plainly_sent, sent)]
        found.append((distance([*_numbers(two), other], [*_numbers(one), value], 1.0), counts[1] - counts[0], counts[0] - counts[1]))
    return found


def _message(record: Any) -> Any:
    return record.op, record.axis, record.stage, record.dtype, record.bytes, record.backward


def _numbers(tree: Any) -> list[Tensor]:
    return [torch.as_tensor(x, dtype=torch.float64) for x in optree.tree_leaves(tree) if isinstance(x, (Tensor, int))]


@plainly
def compared(name: str, inductor: bool = False) -> Any:
    if inductor:
        return in_turn(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions.Region, "function", lambda region: lambda xs: region.graph(*xs))
        return in_turn(name)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_program_has_the_numbers_and_messages_of_the_step(name: str, ranks: int) -> None:
    for found in world(ranks).within(120).run(compared, name):
        for i, (off, more, less) in enumerate(found):
            assert off < (1e-5 if name == "mixed" else 1e-12), (i, off)
            if i >= 2:  # the second call compares what ranks will send
                assert not more and not less, (i, more, less)
