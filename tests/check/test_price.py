"""What a checked call costs besides time: nothing is kept, copied or loaded that an unchecked one would not."""

from __future__ import annotations

import gc
import inspect
import logging
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import shardfn as sf
from shardfn import P
from shardfn.check import bits as bits_of
from shardfn.check import recording
from shardfn.check.bits import bits, constant
from shardfn.check.recording import TraceRecorder, current
from shardfn.collectives.agree import compare
from shardfn.testing import world
from shardfn.transforms import checking

ROOT = Path(__file__).resolve().parents[2]
layer = sf.stage(lambda p, x: torch.tanh(x @ p["w"]))


def trained(check: bool, body: Any) -> Any:
    """What a small step of everything gives: a stage, noise, a mean, an optimizer; `body` runs in the middle of it."""
    mesh = sf.make_mesh(data=2, device="cpu")
    params = sf.shard({"w": torch.eye(64)}, mesh, sf.full_shard("data"))
    optimizer = sf.optim.adamw(1e-3)
    state, rows = optimizer.init(params), torch.randn(4, 64) + mesh.get_rank()

    @sf.shard_map(mesh=mesh, in_specs=(..., ..., P("data")), out_specs=..., check=check)
    def step(params: Any, state: Any, x: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            y = layer(params, x) * 0.5 + torch.rand(64, generator=sf.fold_in(0, 1, "data"))
            body(y)
            y = y / y.mean()
            return sf.pmean(y.square().mean(), "data")

        found, grads = sf.value_and_grad(loss)(params)
        body(found)
        return found, *optimizer.step(params, grads, state)

    return step(params, state, rows)


def loaded() -> tuple[list[str], list[str]]:
    """What an unchecked call has loaded of torch.compile, and what a checked one after it loads besides."""
    trained(False, lambda _: None)
    before = set(sys.modules)
    trained(True, lambda _: None)
    return sorted(before & {"torch._dynamo", "sympy"}), sorted(set(sys.modules) - before)


@pytest.mark.central
def test_a_checked_call_loads_nothing() -> None:
    code = (  # in a process of its own: that of the tests has loaded torch.compile
        "from shardfn.testing import World; from tests.check.test_price import loaded; "
        "w = World(2); print(w.run(loaded)); w.close()"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert told.stdout.strip() == str([([], [])] * 2), told.stderr


def alive(check: bool) -> list[bool]:
    """Of what a body makes and lets go, whether it is gone at once: tensors and their memory."""
    found: list[bool] = []

    def body(y: Tensor) -> None:
        made = [y.sum() + torch.ones(3), torch.randn(3, 3), torch.ones(5).requires_grad_() * 2]
        made += [made[0][1:], made[0].detach(), made[2].sum(), made[1].mean(), made[1] / made[1].sum()]
        weak = [weakref.ref(x) for x in made] + [weakref.ref(x.untyped_storage()) for x in made]
        del made
        found.extend(ref() is None for ref in weak)

    gc.disable()
    try:
        trained(check, body)
    finally:
        gc.enable()
    return found


def test_a_checked_call_keeps_no_tensor_longer() -> None:
    for check in (True, False):
        for gone in world(2).run(alive, check):
            assert gone == [True] * 32


def held() -> list[str]:
    """What of torch's a record refers to, when much was recorded: memory, or the head of memory."""
    found: list[str] = []

    def body(_: Tensor) -> None:
        recorder = current()
        assert recorder is not None
        values, trace = recorder.values, recorder.trace
        assert all((values.evidence, values.counts, trace.nodes))
        ahead: list[Any] = [values, trace]
        seen: set[int] = set()
        for one in ahead:  # which grows
            if id(one) in seen or isinstance(one, (type, FunctionType, ModuleType, CodeType)):
                continue
            seen.add(id(one))
            found.extend([type(one).__name__] * isinstance(one, (Tensor, torch.UntypedStorage, StorageWeakRef)))
            ahead.extend(gc.get_referents(one))

    trained(True, body)
    return found


def test_a_record_holds_no_memory() -> None:
    assert world(2).run(held) == [[], []]


def left() -> bool:
    """Whether the record of a call is there after it."""
    made: list[Any] = []

    class Seen(TraceRecorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    gc.disable()
    try:
        with mock.patch.object(checking, "TraceRecorder", Seen):
            trained(True, lambda _: None)
        return bool(made) and made[0]() is not None
    finally:
        gc.enable()


def test_the_record_goes_with_the_call() -> None:
    assert world(2).run(left) == [False, False]


KINDS: dict[str, Any] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "of every other": lambda x: torch.stack([x, -x], -1).flatten(-2)[..., ::2],
    "after a byte": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "negated twice": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("shape", [(3,), (700, 50), (3, 40000), (2, 3, 40001), (1, 0, 5), (1,)])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_numbers_however_they_lie(kind: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float32)
    other = KINDS[kind](x)
    assert bits(other) == bits(x)
    if x.numel():
        changed = other.clone()
        changed[(-1,) * x.ndim] += 1
        assert bits(changed) != bits(x)
        assert [bool(constant(y)) for y in (torch.ones_like(x), changed)] == [True, x.numel() == 1]


@pytest.mark.parametrize("kind", KINDS)
def test_bits_copy_little(kind: str) -> None:
    x = KINDS[kind](torch.randn(2000, 1000))
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **kwargs or {})
            if isinstance(made, Tensor) and not made._is_view() and made.untyped_storage() is not x.untyped_storage():
                largest = max(largest, made.untyped_storage().nbytes())
            return made

    bits(x[:1]), constant(x[:1])
    with Sizes():
        bits(x), constant(x)
    assert 0 < largest <= 8 * bits_of._ON_CPU


def apart(kind: str) -> str:
    """What is said of a result that is not the same on all ranks, bit for bit."""
    mesh = sf.make_mesh(data=2, device="cpu")
    rank = mesh.get_rank()

    @sf.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
    def result(x: Tensor) -> Tensor:
        y = sf.psum(x, "data").expand(90000).clone()
        if rank:
            with torch.no_grad():
                numbers = y.numpy()  # by no op
                numbers[-1] *= {"rounded": 1 + 1e-6, "other": 1.1, "of another shape": 1.0}[kind]
        return y[: 90000 - rank] if kind == "of another shape" else y

    try:
        result(torch.ones(1) + rank)
    except sf.check.VaryingError as error:
        return error.findings[0].kind
    return ""


@pytest.mark.parametrize(("kind", "said"), [("rounded", ""), ("other", "output"), ("of another shape", "output")])
def test_large_results_are_compared_piece_by_piece(kind: str, said: str) -> None:
    assert world(2).run(apart, kind) == [said, said]


# --- long calls ---


def long(after: str, steps: int, most: int | None = 300, heavy: int = 0) -> tuple[str, list[int], int, list[str]]:
    """A loop of training in one call, of which only the beginning is recorded.

    Args:
        after: what is wrong in it, and when: see WRONG.
        steps: how many.
        most: values that are taken down; None: as many as by default.
        heavy: how many ops more the second rank does in each step.

    Returns:
        What is raised, how many ops each step sent through Python, how many values were recorded, and what was logged.
    """
    mesh = sf.make_mesh(data=2, device="cpu")
    rank, seen = mesh.get_rank(), [0] * steps
    params = sf.shard({"w": torch.eye(4)}, mesh, sf.full_shard("data"))
    optimizer = sf.optim.sgd(1e-3)
    logged: list[str] = []
    recorders: list[TraceRecorder] = []

    @sf.shard_map(mesh=mesh, in_specs=(P(), P("data"), ...), out_specs=(P(), P(), ...))
    def loop(w: Tensor, x: Tensor, params: Any) -> Any:
        state = optimizer.init(params)
        found = current()
        assert found is not None
        recorders.append(found)
        for number in range(steps):
            doing[0] = number

            def loss(both: Any, number: int = number) -> Tensor:
                w, params = both
                late = number >= steps // 2
                w = w if after == "early" or (after == "late" and late) else sf.pvary(w, "data")
                for _ in range(heavy * rank):
                    w = w * 1.0
                y = layer(params, x @ w).square().mean()
                return y if after == "guess" else sf.pmean(y, "data")

            _, (g, grads) = sf.value_and_grad(loss)((w, params))
            params, state = optimizer.step(params, grads, state)
            w = w - 0.1 * g
            if after == "twice" and number >= steps // 2:
                w = sf.psum(w, "data") / 2  # of what is the same already, and of no harm to the numbers
        return w, (w + rank if after == "result" else w).sum(), params

    doing = [0]

    def counted(frame: Any, event: str, _: Any) -> None:
        seen[doing[0]] += event == "call" and frame.f_code is inspect.unwrap(TraceRecorder.__torch_dispatch__).__code__

    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardfn")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        with (
            mock.patch.object(recording, "MOST", most or recording.MOST),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always", sf.check.VaryingWarning)
            sys.setprofile(counted)
            loop(torch.eye(4), torch.randn(4, 4) + rank, params)
            raised = "; ".join(str(one.message) for one in warned if issubclass(one.category, sf.check.VaryingWarning))
    except sf.check.VaryingError as error:
        raised = str(error)
    finally:
        sys.setprofile(None)
        logger.removeHandler(handler)
        logger.setLevel(level)
    return raised, seen, len(recorders[0].trace.nodes), [one for one in logged if "long" in one]


def test_a_long_call_is_followed_for_a_while_and_then_runs_on_by_itself() -> None:
    for raised, seen, nodes, logged in world(2).run(long, "", 30):
        assert raised == ""
        assert seen[0] > 30
        assert seen[15:] == [0] * 15
        assert 300 <= nodes < 330
        assert len(logged) == 1


def test_a_short_call_is_followed_to_its_end() -> None:
    for raised, seen, _, logged in world(2).run(long, "", 3, None):
        assert raised == ""
        assert min(seen) > 30
        assert logged == []


@pytest.mark.parametrize("most", [276, 300, 339])  # a record may end anywhere, and elsewhere on each rank
def test_what_is_wrong_in_the_beginning_is_told_as_in_a_short_call(most: int) -> None:
    for kind in ("early", "guess"):
        short = [raised for raised, *_ in world(2).run(long, kind, 3, None)]
        for said, (raised, *_) in zip(short, world(2).run(long, kind, 30, most), strict=True):
            assert raised == said
            assert ("pvary(" if kind == "early" else "pmean(") in raised


def test_of_what_comes_later_the_results_are_compared() -> None:
    for raised, *_ in world(2).run(long, "twice", 30):  # it is not seen, and not said to be right
        assert raised == ""
    for raised, *_ in world(2).run(long, "late", 30):
        assert "result[0] is declared to be the same on all ranks along 'data', but its numbers differ" in raised
    for raised, *_ in world(2).run(long, "result", 30):
        assert "result[1] is declared to be the same" in raised
        assert "result[0]" not in raised


@pytest.mark.parametrize("most", [300, 317])
def test_ranks_that_do_not_do_as_much_wait_for_nobody(most: int) -> None:
    found = world(2).run(long, "", 30, most, 90)
    assert [raised for raised, *_ in found] == ["", ""]
    ends = [next(n for n, count in enumerate(seen) if not count) for _, seen, *_ in found]
    assert ends[0] > ends[1]


def compared(most: int, more: int) -> int:
    """How many collectives of a long call ranks compare, of which one is over before the other is."""
    mesh = sf.make_mesh(data=2, device="cpu")
    told: list[str] = []

    def counted(op: str, *args: Any, **kwargs: Any) -> None:
        told.append(op)
        compare(op, *args, **kwargs)

    @sf.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
    def summed(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for _ in range(40):
            for _ in range(more * mesh.get_rank()):
                x = x * 1.0
            total = total + sf.psum(x.sum(), "data")
        return total

    with (
        mock.patch.object(recording, "MOST", most),
        mock.patch.object(recording, "COMPARED", 25),
        mock.patch("shardfn.collectives.ops.compare", counted),
    ):
        assert summed(torch.ones(2)) == 160
    return told.count("psum")


def test_collectives_are_compared_as_often_on_every_rank() -> None:
    assert world(2).run(compared, 50, 5) == [25, 25]
    assert world(2).run(compared, 10000, 5) == [25, 25]


def inside(more: int) -> float:
    """A function mapped inside of another, of which one rank's record is over by then."""
    mesh = sf.make_mesh(data=-1, device="cpu")
    inner = sf.shard_map(lambda x: sf.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())

    @sf.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
    def outer(x: Tensor) -> Tensor:
        y = x
        for _ in range(10 + more * mesh.get_rank()):
            y = y + 0.0
        return sf.psum((inner(y) * 0 + x).sum(), "data")

    with mock.patch.object(recording, "MOST", 50):
        return float(outer(torch.ones(4)))


@pytest.mark.parametrize("more", [0, 100])
def test_what_is_mapped_inside_is_a_part_of_the_same_check_on_every_rank(more: int) -> None:
    assert world(2).with_deadline(30).run(inside, more) == [8.0, 8.0]


def test_the_rounding_of_products_is_known_however_tf32_was_asked_for() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert bits_of.rounding(torch.ones(2)) == 1000 * torch.finfo(torch.float32).eps
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
