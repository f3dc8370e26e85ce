"""Every strategy on one device of a pretended world: collectives that come late, and steps for which nobody waits."""

from __future__ import annotations

import os
import random
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import optree
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from benchmarks.gpu_setting import Answer, Where, accelerator
from benchmarks.strategies import DATA, STRATEGIES
from shardfn.collectives import into_buffers
from shardfn.compat import process_groups
from shardfn.testing import Device

ROWS = 8
POISON = 255  # in every byte: nan, or -1
STEPS = 2
AWHILE = 10**6  # clock cycles: about half a millisecond


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def problem(where: Where, device: str) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Parameters of some layers, and a batch."""
    width, layers = (16, 2) if where.tiny else (512, 6)
    draw = torch.Generator().manual_seed(0)
    shapes = {"up": (width, 3 * width), "bias": (3 * width,), "down": (3 * width, width)}

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=draw) / width**0.5).to(device)

    return [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(layers)], normal(ROWS, width)


def rule() -> so.Optimizer:
    return so.chain(so.clip_by_global_norm(1.0), so.adamw(1e-3))


def training(
    mesh: Any, strategy: Any, stages: list[Any], whole: Any, x: Tensor, order: Any = None
) -> Callable[[], Any]:
    """A step of clipped AdamW, which returns the loss and the shards that it has overwritten.

    `order` are the layers in turn, by default each once, and `stages` their functions.
    """
    optimizer = rule()
    params = sf.shard(optree.tree_map(torch.clone, whole), mesh, strategy)
    state = optimizer.init(params)

    def loss(params: Any, x: Tensor) -> Tensor:
        for stage, p in zip(stages, sf.layers([params[i] for i in order or range(len(params))]), strict=True):
            x = stage(p, x)
        return sf.pmean(x.square().mean(), DATA)

    run = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=..., out_specs=...)

    def step() -> Any:
        nonlocal params, state
        value, gradients = run(params, x)
        params, state = optimizer.step(params, gradients, state)
        return value, params

    return step


# --- collectives that come late ---


class Late:
    """Collectives of a world that one process pretends; what other ranks would send is made up from its own.

    Args:
        module: torch's module of the device.
        dice: each collective runs on a stream of its own and takes a random time, and its result, and memory that was
            lent to it, are nan in the meantime. None: each is complete when it is launched.
    """

    def __init__(self, module: Any, dice: random.Random | None) -> None:
        self.module, self.dice = module, dice
        self.streams = [module.Stream() for _ in range(2)] if dice else []

    def all_gather(self, whole: Tensor, own: Tensor, group: Any) -> Any:
        pieces = whole.view(group.size(), -1)
        others = [piece for i, piece in enumerate(pieces.unbind()) if i != group.rank()]

        def fill() -> None:
            for i, piece in enumerate(others):
                torch.mul(own, 1 + i / 8, out=piece) if own.is_floating_point() else piece.copy_(own)

        return self._launch(0, own, others, fill)

    def reduce_scatter(self, out: Tensor, flat: Tensor, group: Any) -> Any:
        return self._launch(1, flat, [out], lambda: torch.sum(flat.view(group.size(), -1), 0, out=out), lent=flat)

    def all_reduce(self, x: Tensor, along: Any) -> Any:
        def fill() -> None:
            x.copy_(sent).mul_(along.axis.size)

        sent = x
        if self.dice is not None:
            self.streams[1].wait_stream(self.module.current_stream())
            with self.module.stream(self.streams[1]):
                sent = x.clone()
        return self._launch(1, x, [x], fill, sent)

    @torch.no_grad()
    def _launch(
        self, line: int, read: Tensor, written: list[Tensor], fill: Any, *held: Tensor, lent: Any = None
    ) -> Any:
        if self.dice is None:
            fill()
            self.module.synchronize()
            return _Arrival(self.module, None, ())
        stream = self.streams[line]
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            for x in written:
                _poison(x)
            if read.is_cuda:
                torch.cuda._sleep(self.dice.randrange(AWHILE))
            fill()
            if lent is not None:
                _poison(lent)
            event = self.module.Event()
            event.record(stream)
        return _Arrival(self.module, event, (read, *written, *held))


class _Arrival:
    """A collective under way, which holds its memory until it is waited for."""

    def __init__(self, module: Any, event: Any, held: tuple[Tensor, ...]) -> None:
        self.module, self.event, self.held = module, event, held

    def wait(self) -> None:
        if self.event is not None:
            self.event.wait(self.module.current_stream())
        self.held = ()


def _poison(x: Tensor) -> None:
    x.detach().view(-1).view(torch.uint8).fill_(POISON)


@contextmanager
def collectives(mesh: Any, late: Late) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(into_buffers.transports(mesh, all_gather="native", reduce_scatter="native"))
        stack.enter_context(mock.patch.object(process_groups, "start_all_gather", late.all_gather))
        stack.enter_context(mock.patch.object(process_groups, "start_reduce_scatter", late.reduce_scatter))
        stack.enter_context(mock.patch.dict(into_buffers.TRANSPORTS["all_reduce"], native=late.all_reduce))
        yield


@contextmanager
def busy(device: str, dice: random.Random) -> Iterator[None]:
    """Other streams have work; and the block's own may not be the default one."""
    if device != "cuda":
        yield
        return
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for stream in streams[:2]:
        with torch.cuda.stream(stream):
            for _ in range(dice.randint(0, 8)):
                matrix = torch.randn(2048, 2048, device=device)
                matrix @ matrix
            torch.cuda._sleep(dice.randrange(10 * AWHILE))
    with torch.cuda.stream(streams[2]) if dice.random() < 0.5 else nullcontext():
        yield
    torch.cuda.synchronize()


def trained(mesh: Any, strategy: Any, kinds: list[Any], order: list[int], whole: Any, x: Tensor, dice: Any) -> Any:
    """The losses, and the shards after some steps; `dice` draws the delays, or None if there are none."""
    module = torch.get_device_module(mesh.device_type)
    serial = {} if dice else {"prefetch": 0}
    stages = [sf.stage(block, **kind | serial) for kind in kinds]
    chosen = [stages[i % len(stages)] for i in range(len(order))]
    with collectives(mesh, Late(module, dice)), busy(mesh.device_type, dice) if dice else nullcontext():
        step = training(mesh, strategy, chosen, whole, x, order)
        losses, params = zip(*(step() for _ in range(STEPS)), strict=True)
    module.synchronize()
    return [one.detach().cpu() for one in (*losses, *optree.tree_leaves(params[-1]))]


def different(found: list[Tensor], wanted: list[Tensor]) -> int:
    """The number of tensors that differ in a bit, or are not finite."""
    return sum(
        not (torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) and bool(b.isfinite().all()))
        for a, b in zip(found, wanted, strict=True)
    )


def late(where: Where) -> Answer:
    """Random stages of every strategy, whose collectives come late, against the serial schedule."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else streams may make cuBLAS add in another order
    answer, schedules = Answer(), 1 if where.tiny else 20
    with accelerator(where, values=True) as (device, simulation):
        mesh = sf.make_mesh(replica=2, shard=4, device=device)
        whole, x = problem(where, device)
        for name, strategy in STRATEGIES.items():
            wrong = 0
            if simulation:
                simulation.reset_counts()
            for seed in range(schedules):
                dice = random.Random(f"{name} {seed}")
                order = [dice.randrange(len(whole)) for _ in range(dice.randint(3, 4 if where.tiny else 12))]
                kinds = [
                    {
                        "prefetch": dice.choice([0, 1, 2, 3]),
                        "reshard": dice.choice([True, False, None]),
                        "remat": dice.choice([False, True, "offload"]),
                    }
                    for _ in range(dice.choice([1, 2]))
                ]
                wanted = trained(mesh, strategy, kinds, order, whole, x, None)
                wrong += different(trained(mesh, strategy, kinds, order, whole, x, dice), wanted) > 0
            races = len(simulation.races) if simulation else "not looked for"
            answer.rows.append({"strategy": name, "schedules": schedules, "differ": wrong, "races": races})
            answer.goal(f"{name}: schedules whose bits differ from the serial one", wrong, 0)
            if isinstance(races, int):
                answer.goal(f"{name}: races", races, 0)
    return answer


# --- steady steps ---


def waits(where: Where) -> Answer:
    """What makes the host wait in a steady step; CUDA stops at the first, and a simulated device counts them."""
    answer = Answer()
    with accelerator(where, values=False) as (device, simulation):
        mesh = sf.make_mesh(replica=2, shard=4, device=device)
        whole, x = problem(where, device)
        for name, strategy in STRATEGIES.items():
            found = []
            for remat in (False, True, "offload"):
                step = training(mesh, strategy, [sf.stage(block, remat=remat)] * len(whole), whole, x)
                step()
                step()
                found += [f"{told}, remat={remat}" for told in waited(step, simulation)]
            answer.rows.append({"strategy": name, "the host waits": "; ".join(found) or "nowhere"})
            answer.goal(f"{name}: the host waits in a step", len(found), 0)
    return answer


def waited(step: Callable[[], Any], simulation: Device | None) -> list[str]:
    """Where the host waits in a step; on CUDA, only the first place."""
    if simulation:
        simulation.reset_counts()
        step()
        return [f"{one.kind} at {one.where}" for one in simulation.synchronizations]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        lines = re.findall(r'File ".*?(shardfn/[^"]+)", line (\d+)', traceback.format_exc())
        return [f"{error} at {':'.join(lines[-1]) if lines else '?'}"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []
