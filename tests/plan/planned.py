"""Programs for tests of plans, run on CPU processes, on a simulated device with values, and planned."""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.held import Tracker
from shardfn import quant
from shardfn.compat import devices
from shardfn.testing import simulated
from tests.models import STRATEGIES

WIDTH, HIDDEN, VOCABULARY, LAYERS, ROWS = 16, 24, 32, 3, 4

VARIANTS = ("plain", "remat", "accumulate", "bf16", "tensor", "host", "disk", "adapters", "few bits", "offload",
            "autocast")  # fmt: skip


def makers(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Parameters of a small language model."""

    def draw(*shape: int) -> Callable[[torch.Generator], Tensor]:
        return lambda generator: torch.randn(shape, generator=generator, dtype=dtype) / 4

    block = {"up": draw(WIDTH, HIDDEN), "b": draw(HIDDEN), "down": draw(HIDDEN, WIDTH)}
    head = {"norm": draw(WIDTH), "out": draw(WIDTH, VOCABULARY)}
    return {"embed": {"table": draw(VOCABULARY, WIDTH)}, "blocks": [block] * LAYERS, "head": head}


def whole_loss(params: Any, tokens: Tensor) -> Tensor:
    """A loss without a collective of its own."""
    x = sf.stage(embed)(params["embed"], tokens)
    for p in sf.layers(params["blocks"]):
        x = sf.stage(block)(p, x)
    return sf.stage(head)(params["head"], x, tokens)


def low_rank() -> list[Any]:
    """Adapters for each block."""

    def draw(*shape: int) -> Callable[[torch.Generator], Tensor]:
        return lambda generator: torch.randn(shape, generator=generator) / 4

    return [{"a": draw(WIDTH, 2), "b": draw(2, HIDDEN)}] * LAYERS


OPTIONS: dict[str, dict[str, Any]] = {
    "remat": {"remat": True},
    "few bits": {"gather_format": quant.int8(), "reduce_format": quant.int8()},
    "bf16": {"reduce_dtype": torch.float32},
    "offload": {"remat": sf.offload(above=0)},
}


HALF = {"gather_dtype": torch.bfloat16, "input_dtype": torch.bfloat16, "output_dtype": torch.float32}
INPUTS = sf.offload(above=0, recompute=True)
MIXED: dict[str, tuple[dict[str, Any], ...]] = {
    "mixed: kept, recomputed, offloaded": ({}, {"remat": True}, {"remat": sf.offload(above=0)}),
    "mixed: inputs away": ({"remat": INPUTS},) * LAYERS,
    "mixed: inputs away, kept": ({"remat": INPUTS}, {}, {"remat": INPUTS}),
    "mixed: every second": ({"remat": True}, {"reshard": False}, {"remat": True}),
    "mixed: dtypes": (HALF, {"remat": True}, {}),
    "mixed: no prefetch": ({"prefetch": 0, "remat": INPUTS}, {"reshard": "step"}, {"prefetch": 2}),
}
"""Options of each block."""


def embed(p: Any, tokens: Tensor) -> Tensor:
    return p["table"][tokens]


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"] + p["b"]) @ p["down"]


def cut_block(p: Any, x: Tensor) -> Tensor:
    return x + sf.psum(torch.tanh(sf.pvary(x, "tensor") @ p["up"] + p["b"]) @ p["down"], "tensor")


def head(p: Any, x: Tensor, tokens: Tensor) -> Tensor:
    logits = F.rms_norm(x, x.shape[-1:], p["norm"].to(x.dtype)) @ p["out"]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def mesh_sizes(ranks: int, variant: str) -> dict[str, int]:
    shard = {1: 1, 2: 2, 4: 2}[ranks]
    if variant == "tensor":
        return {"replica": 1, "shard": max(1, ranks // 2), "tensor": min(2, ranks)}
    return {"replica": ranks // shard, "shard": shard}


def program(strategy: str, variant: str, ranks: int, device: str | None, scratch: str) -> tuple[Any, tuple[Any, ...]]:
    """A training step and its arguments."""
    sizes = mesh_sizes(ranks, variant)
    mesh = sf.make_mesh(device=device, scratch=scratch, **sizes)
    place = STRATEGIES[strategy]
    if variant in ("host", "disk"):
        place = place.with_tiers(params=variant, grads=variant, state=variant)  # type: ignore[arg-type]
    narrow = torch.bfloat16 if variant == "bf16" else torch.float32
    specs: Any = sf.P()
    if variant == "tensor":
        specs = sf.by_path(
            [(r"blocks\..*\.up", sf.P(None, "tensor")), (r"blocks\..*\.b", sf.P("tensor")),
             (r"blocks\..*\.down", sf.P("tensor"))], strict=False,
        )  # fmt: skip
    params = sf.init_sharded(makers(narrow), 0, mesh, place, specs=specs)
    adapters = sf.init_sharded(low_rank(), 1, mesh, sf.ddp(tuple(sizes))) if variant == "adapters" else None
    staged = functools.partial(sf.stage, **OPTIONS.get(variant, {}))
    first, last = staged(embed), staged(head)
    of_blocks = MIXED.get(variant, ({},) * LAYERS)
    each = [staged(cut_block if variant == "tensor" else block, **options) for options in of_blocks]
    adapted = sf.stage(lambda p, x: block({**p[0], "up": p[0]["up"] + p[1]["a"] @ p[1]["b"]}, x))

    @torch.autocast(mesh.device_type, torch.bfloat16, enabled=variant == "autocast")
    def loss(params: Any, base: Any, tokens: Tensor) -> Tensor:
        whole = params if base is None else base
        x = first(whole["embed"], tokens)
        blocks = sf.layers(whole["blocks"] if base is None else list(zip(base["blocks"], params, strict=True)))
        for stage, p in zip(each, blocks, strict=True):
            x = (stage if base is None else adapted)(p, x)
        return sf.pmean(last(whole["head"], x, tokens), tuple(name for name in sizes if name != "tensor"))

    opt = so.adamw(1e-2)

    @sf.shard_map(mesh=mesh, in_specs=..., out_specs=..., check=False)
    def step(params: Any, state: Any, base: Any, tokens: Tensor) -> Any:
        if variant == "accumulate":
            value, grads = sf.accumulate(lambda ps, x: loss(ps, base, x), tokens, micro=2)(params)
        else:
            value, grads = sf.value_and_grad(loss)(params, base, tokens)
        params, state = opt.step(params, grads, state)
        return params, state, value

    trained, base = (params, None) if adapters is None else (adapters, params)
    tokens = torch.zeros(ROWS, 8, dtype=torch.int64, device=mesh.device_type)
    return step, (trained, opt.init(trained), base, tokens)


# --- the same programs, run and planned ---

Sent = tuple[str, tuple[str, ...], str, str, int, bool, bool]


def sent(entries: Any) -> list[Sent]:
    """What the ledger, or a plan, knows of each collective."""
    return [
        (e.op, e.axis, e.stage, str(e.dtype).removeprefix("torch."), e.bytes, e.scheduled, e.backward) for e in entries
    ]


def sent_by(plan: sf.plan.StepPlan) -> list[Sent]:
    """The collectives of a plan."""
    return [
        (w.kind, w.axis, w.stage, w.dtype, w.sent, w.scheduled, w.phase in ("backward", "recompute"))
        for w in plan.collectives
    ]


def sent_by_second(step: Any, args: tuple[Any, ...]) -> list[Sent]:
    """The collectives of a program's second step."""
    step(*args)
    with sf.collectives.ledger() as log:
        step(*args)
    return sent(log.records)


@sf.debug(memory=False)
def ran(cases: list[tuple[str, str]], ranks: int) -> list[list[Sent]]:
    """The collectives of the second step of each program, on CPU processes."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for strategy, variant in cases:
            found.append(sent_by_second(*program(strategy, variant, ranks, "cpu", scratch)))
    return found


@sf.debug(memory=False)
def measured(cases: list[tuple[str, str]], ranks: int, rank: int, path: str) -> list[tuple[int, int, list[Sent]]]:
    """The most memory in the second step, as it is and in whole 512 bytes, and its collectives, on the device."""
    found = []
    for number, (strategy, variant) in enumerate(cases):
        devices.clear_caches()  # those of the program before, which this one would use without making them
        store = torch.distributed.FileStore(f"{path}/{number}", ranks)  # type: ignore[attr-defined]
        with simulated(ranks, rank, store=store, races=False) as device, tempfile.TemporaryDirectory() as scratch:
            with Tracker(device.name) as tracker:
                step, args = program(strategy, variant, ranks, device.name, scratch)
                step(*args)
                gc.collect()
                gc.disable()
                tracker.look(())
                tracker.most = tracker.rounded = 0
                with sf.collectives.ledger() as log:
                    result = step(*args)
                del result
                gc.enable()
            found.append((tracker.most, tracker.rounded, sent(log.records)))
            del step, args
    return found


@sf.debug(memory=False)
def planned(cases: list[tuple[str, str]], ranks: int, rank: int) -> list[sf.plan.StepPlan]:
    """The plans of the programs."""
    found = []
    for strategy, variant in cases:
        with sf.plan.mode(ranks, rank), tempfile.TemporaryDirectory() as scratch:
            step, args = program(strategy, variant, ranks, None, scratch)
            found.append(sf.plan.step(step, *args))
            del step, args
    return found
