"""What a checked call costs besides time: nothing is kept, copied or loaded that an unchecked one would not."""

from __future__ import annotations

import gc
import subprocess
import sys
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
from shardfn.check.bits import bits, constant
from shardfn.check.recording import Recorder, current
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

    class Seen(Recorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    gc.disable()
    try:
        with mock.patch.object(checking, "Recorder", Seen):
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
    except sf.VaryingError as error:
        return error.findings[0].kind
    return ""


@pytest.mark.parametrize(("kind", "said"), [("rounded", ""), ("other", "output"), ("of another shape", "output")])
def test_large_results_are_compared_piece_by_piece(kind: str, said: str) -> None:
    assert world(2).run(apart, kind) == [said, said]
