"""Where gathered parameters live, how long anything lives, and that steps leave nothing behind."""

from __future__ import annotations

import ast
import contextlib
import gc
import tempfile
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.collectives.into_buffers import all_gather, communicator_of
from shardfn.stages import buffers
from shardfn.testing import World, world
from tests import models
from tests.models import STRATEGIES, normal, residual, squares, variables

D, DEPTH = 8, 6
WAYS: list[dict[str, Any]] = [{}, {"remat": True}, {"reshard": False}, {"remat": sf.offload("disk", above=0)}]


class Setting:
    def __init__(self, depth: int = DEPTH, **options: Any) -> None:
        self.mesh = sf.make_mesh(shard=-1, device="cpu", scratch=tempfile.gettempdir())
        g = torch.Generator().manual_seed(0)
        self.plain = {
            "blocks": [{"w": torch.randn(D, D, generator=g) / 4, "b": torch.zeros(D)} for _ in range(depth)],
            "big": {"o": torch.randn(D, 40 * D, generator=g) / 4},
        }
        self.flat = sf.shard(self.plain, self.mesh, sf.full_shard("shard"))
        self.block = sf.stage(residual, **options)
        self.head = sf.stage(lambda p, x: x @ p["o"], **options)

    def loss(self, ps: Any) -> Tensor:
        x = torch.ones(3, D)
        for p in sf.layers(ps["blocks"]):
            x = self.block(p, x)
        return self.head(ps["big"], x).square().sum()

    def step(self) -> Any:
        return sf.value_and_grad(self.loss)(self.flat)

    def by_backward(self) -> Any:
        return models.by_backward(self.loss, self.flat)[1]


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Sizes in bytes of what is newly made without values."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.zeros, torch.ops.aten.new_empty):
            self.sizes.append(out.numel() * out.element_size())
        return out


def allocated(options: dict[str, Any], how: str) -> Any:
    s = Setting(**options)
    run, made = getattr(s, how), list[int]()
    plain, sizes = buffers.Buffer.__init__, []

    def making(self: Any, nbytes: int, *rest: Any, **more: Any) -> None:
        made.append(nbytes)  # modes do not see it
        plain(self, nbytes, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers.Buffer, "__init__", making)
        for _ in range(6):
            with Allocations() as seen:
                run()
            sizes.append(max([*seen.sizes, *made], default=0))
            made.clear()
    largest = s.flat["big"].values.numel() * 4 * s.mesh.size()
    return sizes, largest


@pytest.mark.parametrize("how", ["step", "by_backward"])
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"prefetch": 2}], ids=str)
@pytest.mark.world(2)
def test_no_buffer_for_whole_parameters_is_made_after_the_first_steps(world: World, options: Any, how: str) -> None:
    for (first, *_, last, latest), largest in world.run(allocated, options, how):
        assert first >= largest
        assert max(last, latest) < largest


def census() -> Counter:
    """What is alive, of tensors and of shardfn's own objects."""
    found: Counter = Counter()
    for one in gc.get_objects():
        kind = type(one)
        module = getattr(kind, "__module__", None)
        if isinstance(module, str) and (module.startswith("shardfn.") or issubclass(kind, Tensor)):
            found[f"{module}.{kind.__qualname__}"] += 1
    return found


def without_cycles(options: dict[str, Any], how: str) -> Any:
    """Counts before and after steps, without a garbage collector."""
    s = Setting(**options)
    s.block = sf.stage(residual, **options)
    run = {
        "step": s.step,
        "by_backward": s.by_backward,
        "grad": lambda: torch.func.grad(s.loss)(s.flat),
        "vjp": lambda: torch.func.vjp(s.loss, s.flat)[1](torch.ones(())),
        "twice": lambda: torch.func.grad(
            lambda p: sum(x.sum() for x in optree.tree_leaves(torch.func.grad(s.loss)(p)))
        )(s.flat),
        "no backward": lambda: s.loss(variables(s.flat)),
    }[how]
    for _ in range(5):  # each buffer has met each kind of stage then, and keeps its views
        run()
    gc.collect()
    gc.disable()
    try:
        before = census()
        for _ in range(4):
            run()
        return census() - before
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["step", "by_backward", "grad", "vjp", "twice", "no backward"])
@pytest.mark.parametrize("options", WAYS[:3], ids=str)
@pytest.mark.world(2)
def test_steps_leave_nothing_for_the_garbage_collector(world: World, options: Any, how: str) -> None:
    for more in world.run(without_cycles, options, how):
        assert not more, more


def alive_after(how: str, options: dict[str, Any]) -> Any:
    s = Setting(**options)
    kept: list[Any] = []
    inner = s.block

    def watching(p: Any, x: Tensor) -> Tensor:
        y = inner(p, x)
        kept.append(weakref.ref(y))
        return y

    s.block = watching
    gc.disable()
    try:
        for _ in range(3):
            gradients = getattr(s, how)()
            kept += [weakref.ref(x) for x in optree.tree_leaves(gradients)]
            del gradients
        leaves = optree.tree_map(lambda x: x.clone(), s.flat)
        kept += [weakref.ref(x) for x in optree.tree_leaves(leaves)]
        s.flat = leaves
        getattr(s, how)()
        s.flat = None
        del leaves
        return sum(ref() is not None for ref in kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["step", "by_backward"])
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.world(2)
def test_gradients_activations_and_old_parameters_are_freed_at_once(world: World, how: str, options: Any) -> None:
    assert world.run(alive_after, how, options) == [0, 0]


def leaves_after_backward() -> Any:
    """Shards that were leaves of `loss.backward()` are free when the user drops them."""
    s = Setting()
    gc.disable()
    try:
        leaves = variables(s.flat)
        s.loss(leaves).backward()
        refs = [weakref.ref(x) for x in optree.tree_leaves(leaves)]
        refs += [weakref.ref(x.grad) for x in optree.tree_leaves(leaves)]
        del leaves
        after_backward = sum(ref() is not None for ref in refs)
        with torch.no_grad():
            values = optree.tree_map(torch.clone, s.flat)
            s.loss(values)
        refs = [weakref.ref(x) for x in optree.tree_leaves(values)]
        del values
        return after_backward, sum(ref() is not None for ref in refs)
    finally:
        gc.enable()


@pytest.mark.world(2)
def test_a_schedule_keeps_no_shards(world: World) -> None:
    assert world.run(leaves_after_backward) == [(0, 0)] * 2


def dies_with_its_mesh() -> Any:
    mesh = sf.make_mesh(shard=-1, device="cpu")
    flat = sf.shard({"w": torch.ones(4, 4)}, mesh, sf.full_shard("shard"))
    sf.grad(lambda p: sf.stage(torch.sum)(p["w"]))(flat)
    ref = weakref.ref(mesh)
    del mesh, flat
    gc.collect()
    return ref() is None


@pytest.mark.world(2)
def test_a_schedule_goes_with_its_mesh(world: World) -> None:
    assert world.run(dies_with_its_mesh) == [True, True]


def dropped_in_a_cycle(s: Setting, ps: Any) -> None:
    """Calls that keep their parameters, and that only the garbage collector frees."""
    cycle: list[Any] = [s.loss(ps)]
    cycle.append(cycle)


def collected_on_one_rank(how: str) -> bool:
    """Whether a step is what it is without calls, before it, that one rank has collected and the other has not."""
    s = Setting(reshard=False)
    want, loss = getattr(s, how)(), s.loss

    def after_dropped_calls(ps: Any) -> Tensor:
        dropped_in_a_cycle(s, ps)
        if dist.get_rank() == 0:
            gc.collect()
        return loss(ps)

    gc.disable()
    try:
        got = models.by_backward(after_dropped_calls, s.flat) if how == "by_backward" else None
        got = sf.value_and_grad(after_dropped_calls)(s.flat) if got is None else got[1]
    finally:
        gc.enable()
    return all(map(torch.equal, optree.tree_leaves(got), optree.tree_leaves(want)))


@pytest.mark.parametrize("how", ["step", "by_backward"])
@pytest.mark.world(2)
def test_when_a_rank_collects_garbage_changes_nothing_of_what_it_gathers(world: World, how: str) -> None:
    assert world.with_deadline(20).run(collected_on_one_rank, how) == [True, True]


def test_what_the_garbage_collector_calls_only_takes_a_note() -> None:
    """It runs on any thread, in the middle of anything: a list or a deque takes a note at once."""
    folder = Path(sf.__file__).parent
    for file in folder.rglob("*.py"):
        if file.relative_to(folder).parts[0] in ("testing", "simulated", "plan"):
            continue  # nothing there runs beside training
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("weakref.finalize", "weakref.ref"):
                for callback in node.args[1:2]:
                    assert isinstance(callback, ast.Attribute), ast.unparse(node)
                    assert callback.attr in ("append", "remove"), f"{file}: {ast.unparse(node)}"
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                called = {ast.unparse(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
                assert all(name.endswith(".append") for name in called), f"{file}: {called}"


def test_a_gather_that_nobody_waits_for_takes_nothing_from_the_next() -> None:
    """As when a schedule is collected that had begun the gather of the next stage."""

    def body() -> list[list[int]]:
        mesh = sf.make_mesh(shard=2, device="cpu")
        comm, rank = communicator_of(mesh, ("shard",)), dist.get_rank()
        came: list[list[int]] = []
        for dropped in (True, False, True, False, False):
            whole = torch.zeros(128, dtype=torch.uint8)
            whole.view(2, -1)[rank] = rank + 10 * len(came)
            time.sleep(0.2 * (rank == len(came) % 2))  # each is the later one, once
            work = all_gather(whole, comm, torch.uint8)
            if not dropped:
                work.wait()
                came.append(whole.view(2, -1)[:, 0].tolist())
            del work, whole
        return came

    assert world(2).with_deadline(20).run(body) == [[[0, 1], [10, 11], [20, 21]]] * 2


def gathered_with_garbage(strategy: str, kind: str) -> int:
    """Graphs in cycles, without a backward, which one rank's garbage collector finds sooner than another's."""
    n = dist.get_world_size()
    mesh = sf.make_mesh(replica=2, shard=n // 2, device="cpu")
    flat = sf.shard(squares(3), mesh, STRATEGIES[strategy])

    def keeping(p: Any, x: Tensor) -> Tensor:
        cycle: list[Any] = [p["w"]]
        cycle.append(cycle)
        return torch.tanh(x @ p["w"] + p["b"])

    staged, leaves = sf.stage(keeping), optree.tree_map(lambda x: x.requires_grad_(), flat)

    def loss() -> Tensor:
        y = normal(2, 4, seed=1)
        for p in leaves:
            y = staged(p, y)
        return y.square().sum()

    gc.disable()
    try:
        with sf.collectives.ledger() as log:
            for i in range(4):
                cycle: list[Any] = [loss()]
                cycle.append(cycle)
                if kind == "then backward" and i == 2:
                    loss().backward()
                del cycle
                if dist.get_rank() == i:
                    gc.collect()
    finally:
        gc.enable()
    return log.count(op="all_gather")


@pytest.mark.parametrize("kind", ["dropped", "then backward"])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "hybrid_shard_zero2", "full_shard", "hpz"])
@pytest.mark.world(4)
def test_when_garbage_is_collected_changes_nothing_of_what_is_gathered(world: World, strategy: str, kind: str) -> None:
    assert len(set(world.with_deadline(20).run(gathered_with_garbage, strategy, kind))) == 1


# --- buffers that are used again ---


def interrupted(buffer: Any) -> None:
    """Leaves a view that was made, and of which the buffer does not know."""

    def half(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(buffers.Buffer, "_forget_many", half)
        buffer.part(0, 8, torch.float32)


HOLDS: dict[str, tuple[Any, bool]] = {
    "nothing": (lambda buffer: None, True),
    "its own views": (lambda buffer: (buffer.part(0, 8, torch.float32), None)[1], True),
    "an interrupt": (interrupted, True),
    "a tensor": (lambda buffer: buffer.part(0, 8, torch.float32).detach(), False),
    "a view": (lambda buffer: buffer.all[4:], False),
    "a storage": (lambda buffer: buffer.all.untyped_storage(), False),
    "an array": (lambda buffer: buffer.all.numpy(), False),
    "a capsule": (lambda buffer: torch.utils.dlpack.to_dlpack(buffer.all[4:]), False),  # type: ignore[attr-defined]
    "the buffer": (lambda buffer: buffer, False),
    "whoever freed it": (lambda buffer: buffer.all.untyped_storage().resize_(0) and None, False),
    "another process": (lambda buffer: buffer.all.untyped_storage().share_memory_() and None, False),
}


@pytest.mark.parametrize("who", HOLDS)
def test_a_pool_hands_out_a_buffer_that_nothing_refers_to(who: str) -> None:
    pool, like = buffers.Pool(torch.device("cpu")), torch.empty(0)
    pool.empty(64, like, False)
    hold, free = HOLDS[who]
    held = hold(pool.buffers[0])
    number = id(pool.buffers[0])
    assert (id(pool.empty(64, like, False)) == number) is free
    del held


SEQUENCES = {
    "equal ends": [9, 6, 6, 6, 9],
    "ends of other sizes": [9, 6, 6, 6, 8],
    "a large end": [90, 6, 6, 6, 90],
    "all differ": [3, 5, 4, 7, 6, 8],
    "a large middle": [1, 2, 9, 2, 1, 3],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_pool_takes_no_more_than_the_largest_for_each_that_is_used_at_once(name: str) -> None:
    pool, like = buffers.Pool(torch.device("cpu")), torch.empty(0)
    sizes, made = SEQUENCES[name], []
    for _ in range(4):
        before = [id(b) for b in pool.buffers]
        for sequence in (sizes, sizes[::-1]):
            last = None
            for n in sequence:
                last = (last, pool.empty(n * 64, like, False))[1]  # the one before is in use
                assert last.nbytes >= n * 64
                assert pool.nbytes() <= 2 * max(sizes) * 64
        del last
        pool.trim()
        made.append(len([b for b in pool.buffers if id(b) not in before]))
    assert made[2:] == [0, 0]
