"""Pipelines: what passes when, what is held, and what happens when something fails."""

from __future__ import annotations

import collections
import functools
import os
import signal
import time
import weakref
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import parallel
from shardfn.parallel import messages
from shardfn.parallel.pipeline import schedule_of
from shardfn.testing import World, errors
from tests.reference import worst
from tests.refusals import told

either = pytest.mark.parametrize("world", [(2, "processes"), (4, "processes")], indirect=True, ids=["2", "4"])


def matrices(size: int, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 3, generator=g, dtype=torch.float64) for _ in range(size)]


def batches(count: int) -> Tensor:
    return torch.randn(count, 5, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def part(w: Tensor, x: Any, b: Tensor) -> Any:
    index, last = sf.axis_index("pipe"), sf.axis_size("pipe") - 1
    x, number = (b, torch.zeros(2, dtype=torch.long)) if index == 0 else x
    y = torch.tanh(x @ w)
    return y.square().sum() + 0.1 * number.double().sum() if index == last else (y, number + 1)


def plain(ws: list[Tensor], xs: Tensor) -> Tensor:
    total = xs.new_zeros(())
    for x in xs:
        for w in ws:
            x = torch.tanh(x @ w)
        total = total + x.square().sum() + 0.1 * 2 * (len(ws) - 1)
    return total


def differences() -> dict[Any, float]:
    size = torch.distributed.get_world_size()
    mesh = sf.make_mesh(pipe=size, device="cpu")
    index, ws, vs = mesh.get_rank(), matrices(size), matrices(size, 1)
    found = {}
    for schedule in ("1f1b", "gpipe"):
        for count in (1, 5):
            xs = batches(count)

            @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
            def run(w: Tensor, v: Tensor, xs: Tensor = xs, schedule: Any = schedule) -> dict[str, Any]:
                def f(w: Tensor, xs: Tensor = xs) -> Tensor:
                    return parallel.pipeline(part, w, list(xs), "pipe", schedule=schedule)

                leaf = w.clone().requires_grad_()
                (3 * f(leaf)).backward()
                assert leaf.grad is not None
                first = {
                    "value": f(w), "grad": sf.grad(f)(w), "torch.func": torch.func.grad(f)(w),
                    "backward": leaf.grad / 3, "of batches": sf.grad(f, 1)(w, xs),
                    "tied": sf.grad(lambda w: f(sf.pvary(w, "pipe")))(ws[0]),
                }  # fmt: skip
                if schedule == "gpipe":  # further derivatives know no schedule
                    return first
                return first | {
                    "jvp": torch.func.jvp(f, (w,), (v,))[1],
                    "hvp": torch.func.jvp(sf.grad(f), (w,), (v,))[1],
                    "sf.jvp": sf.jvp(f, (w,), (v,))[1],
                    "sf.jvp of sf.grad": sf.jvp(sf.grad(f), (w,), (v,))[1],
                    "twice": sf.grad(lambda w: (sf.grad(f)(w) * v).sum())(w),
                    "each": torch.func.vmap(lambda x: sf.grad(f)(w, x[:, None]), in_dims=1)(xs),
                }

            every = tuple(ws)
            gradient = torch.func.grad(lambda *ws, xs=xs: plain(list(ws), xs), tuple(range(size)))
            product = torch.func.jvp(gradient, every, tuple(vs))[1]
            wanted = {
                "value": plain(ws, xs), "grad": gradient(*every)[index], "hvp": product[index],
                "jvp": torch.func.jvp(lambda *ws, xs=xs: plain(list(ws), xs), every, tuple(vs))[1],
                "each": torch.stack([gradient(*every, xs=xs[:, i : i + 1])[index] for i in range(5)]),
                "tied": torch.func.grad(lambda w, xs=xs: plain([w] * size, xs))(ws[0]),
            }  # fmt: skip
            wanted |= {"torch.func": wanted["grad"], "backward": wanted["grad"], "twice": wanted["hvp"]}
            wanted |= {"sf.jvp": wanted["jvp"], "sf.jvp of sf.grad": wanted["hvp"]}
            of_batches = torch.func.grad(lambda xs: plain(ws, xs))(xs)
            wanted["of batches"] = of_batches if index == 0 else torch.zeros_like(of_batches)
            for name, got in run(ws[index].clone(), vs[index]).items():
                found[schedule, count, name] = (got - wanted[name]).abs().max().item()
    return found


@either
def test_every_derivative_is_that_of_one_process(world: World) -> None:
    for found in world.with_deadline(100).run(differences):
        assert len(found) == 2 * (12 + 6)
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_schedules_do_every_pass_once_and_never_wait_for_each_other(schedule: Any, size: int, count: int) -> None:
    lists = [schedule_of(schedule, index, size, count) for index in range(size)]
    for own in lists:
        assert sorted(own) == sorted((kind, m) for kind in ("forward", "backward") for m in range(count))
    done: set[tuple[str, int, int]] = set()
    while any(lists):
        before = len(done)
        for index, own in enumerate(lists):
            while own:
                kind, m = own[0]
                needs = ("forward", m, index - 1) if kind == "forward" else ("backward", m, index + 1)
                if 0 <= needs[2] < size and needs not in done:
                    break
                done.add((kind, m, index))
                own.pop(0)
        assert len(done) > before, "a deadlock"
    held = {"1f1b": min(count, size), "gpipe": count}[schedule]
    assert max_held(schedule_of(schedule, 0, size, count)) == held


def max_held(own: list[tuple[str, int]]) -> int:
    held = most = 0
    for kind, _ in own:
        held += 1 if kind == "forward" else -1
        most = max(most, held)
    return most


def activations(schedule: Any) -> int:
    """The most micro-batches whose activations a rank holds at once."""
    mesh = sf.make_mesh(pipe=2, device="cpu")
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def counting(w: Tensor, x: Any, b: Tensor) -> Any:
        nonlocal most
        kept = (b if sf.axis_index("pipe") == 0 else x) @ w
        alive.add(kept)
        most = max(most, len(alive))
        y = kept.exp()  # whose backward needs what it returns
        alive.add(y)
        return y.sum() if sf.axis_index("pipe") == 1 else y

    def loss(w: Tensor) -> Tensor:
        return parallel.pipeline(counting, w, list(batches(8)), "pipe", schedule=schedule)

    sf.shard_map(sf.grad(loss), mesh=mesh, in_specs=..., out_specs=...)(matrices(1)[0] / 10)
    return most


@pytest.mark.world(2)
def test_1f1b_holds_the_activations_of_few_micro_batches(world: World) -> None:
    first, last = world.run(activations, "1f1b")
    assert first < max(world.run(activations, "gpipe"))
    assert last <= first <= 4


def failing(where: str) -> Any:
    index = torch.distributed.get_rank()
    mesh = sf.make_mesh(pipe=4, device="cpu")
    many = list(batches(3 - (where == "count" and index == 2)))

    outside = torch.ones((), dtype=torch.float64, requires_grad=True)

    def bad(w: Tensor, x: Any, b: Tensor) -> Any:
        if where == "raises" and index == 2:
            raise KeyError("no such layer")
        if where == "shape" and index == 1:
            return x[:, :2]
        if where == "loss" and index == 3:
            return x
        if where == "not a tensor" and index == 0:
            return 3
        if where == "closure" and index == 1:
            return x * outside
        return x.sum() if index == 3 else b @ w if index == 0 else x @ w

    def run(w: Tensor) -> Any:
        if where == "schedule":
            return parallel.pipeline(bad, w, many, "pipe", schedule="zero")  # type: ignore[arg-type]
        return parallel.pipeline(bad, w, [] if where == "none" else many, "pipe")

    return sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=...)(matrices(1)[0])


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("raises", ["no such layer"]), ("shape", ["5x2 and 3x3"]),
        ("loss", ["scalar", "(5, 3)"]), ("not a tensor", ["pytree of tensors", "int"]),
        ("count", ["micro-batches", "2", "3"]), ("schedule", ["'zero'", "'1f1b', 'gpipe'"]),
        ("none", ["no micro-batches"]), ("closure", ["not among its arguments", "Pass it with params"]),
    ],
)  # fmt: skip
def test_what_fails_on_one_rank_is_an_error_on_all(world: World, where: str, words: list[str]) -> None:
    for error in world.with_deadline(20).errors(failing, where):
        assert isinstance(error, (ValueError, TypeError, KeyError, RuntimeError))
        assert all(word in str(error) for word in words), str(error)


# --- what passes may differ from message to message ---

Made = Any


def shapes(i: int, x: Tensor, w: Tensor, n: int) -> Made:
    return (x @ w)[: 5 - n - i]


def trees(i: int, x: Tensor, w: Tensor, n: int) -> Made:
    y = x @ w
    return (y, {"more": [y + 1, None]}) if n % 2 else [y, y.long(), y > 0, torch.complex(y, y), y[:0], y.sum()]


def views(i: int, x: Tensor, w: Tensor, n: int) -> Made:
    y = x @ w
    return y.T.contiguous().T[::2], torch.complex(y, y).conj(), y.expand(2, *y.shape), y


def aliases(i: int, x: Tensor, w: Tensor, n: int) -> Made:
    y = x @ w
    return y, y, x, y.view(-1)


def partly(i: int, x: Tensor, w: Tensor, n: int) -> Made:
    return (x @ w).detach() if n == 1 else x @ w, torch.ones(2, dtype=x.dtype)


def dtypes(i: int, x: Tensor, w: Tensor, n: int) -> Made:
    return (x @ w).to((torch.float64, torch.float32)[n % 2])


def large(i: int, x: Tensor, w: Tensor, n: int) -> Made:
    return {
        f"{'a long name ' * 9}{k}": (x @ w)[:2] * k for k in range(1, 12)
    }  # whose description does not fit into a note


CASES = [shapes, trees, views, aliases, partly, dtypes, large]


def joined(made: Made) -> Tensor:
    """Of all that came, the rows that a part goes on with."""
    rows = [
        y.reshape(-1, 3).to(torch.float64)
        for y in optree.tree_leaves(made)
        if y.numel() % 3 == 0 and not y.is_complex()
    ]
    rows += [
        torch.view_as_real(y.resolve_conj())[..., 1].reshape(-1, 3) for y in optree.tree_leaves(made) if y.is_complex()
    ]
    return torch.tanh(torch.cat(rows))


def through(case: Any, w: Tensor, x: Any, batch: Any) -> Any:
    """A part of a pipeline."""
    n, b = batch
    i, last = sf.axis_index("pipe"), sf.axis_size("pipe") - 1
    x = b if i == 0 else joined(x)
    return torch.tanh(x @ w).square().sum() if i == last else case(i, x, w, n)


def at_once(case: Any, ws: list[Tensor], many: Any) -> Tensor:
    """The same on one process."""
    total = torch.zeros((), dtype=torch.float64)
    for n, x in many:
        for i, w in enumerate(ws[:-1]):
            x = joined(case(i, x, w, n))
        total = total + torch.tanh(x @ ws[-1]).square().sum()
    return total


def ragged() -> dict[Any, float]:
    size = torch.distributed.get_world_size()
    mesh = sf.make_mesh(pipe=size, device="cpu")
    index, ws, vs = mesh.get_rank(), matrices(size), matrices(size, 1)
    found = {}
    sets = [list(enumerate(batches(4))), [(n, b[: 4 - n]) for n, b in enumerate(batches(3))], [(3, batches(1)[0])]]
    for case in CASES:
        for turn, many in enumerate(sets):  # one function, and what passes changes from call to call
            numbers, rows = [n for n, _ in many], [b for _, b in many]

            def f(w: Tensor, rows: Any, case: Any = case, numbers: Any = numbers, turn: int = turn) -> Tensor:
                part, many = functools.partial(through, case), list(zip(numbers, rows, strict=True))
                return parallel.pipeline(part, w, many, "pipe", schedule=("gpipe", "1f1b")[turn % 2])

            def g(ws: Any, rows: Any, case: Any = case, numbers: Any = numbers) -> Tensor:
                return at_once(case, ws, zip(numbers, rows, strict=True))

            @sf.shard_map(mesh=mesh, in_specs=..., out_specs=...)
            def run(w: Tensor, v: Tensor, rows: Any, f: Any = f, turn: int = turn) -> dict[str, Any]:
                value, (of_w, of_rows) = sf.value_and_grad(f, (0, 1))(w, rows)
                with torch.no_grad():
                    got = {"value": value, "gradient": of_w, "of the batches": of_rows, "without gradients": f(w, rows)}
                if turn == 1:
                    got["product"] = torch.func.jvp(lambda w: sf.grad(f)(w, rows), (w,), (v,))[1]
                return got

            got = run(ws[index], vs[index], rows)
            of_ws, of_rows = torch.func.grad(g, (0, 1))(ws, rows)
            wanted = {"value": g(ws, rows), "gradient": of_ws[index], "without gradients": g(ws, rows)}
            wanted["of the batches"] = of_rows if index == 0 else [torch.zeros_like(r) for r in rows]
            if turn == 1:
                along = torch.func.jvp(lambda ws, rows=rows, g=g: torch.func.grad(g)(ws, rows), (ws,), (vs,))[1]
                wanted["product"] = along[index]
            for name in got:
                pairs = zip(optree.tree_leaves(got[name]), optree.tree_leaves(wanted[name]), strict=True)
                found[case.__name__, turn, name] = max((a - b).abs().max().item() for a, b in pairs)
    return found


@either
def test_what_passes_may_differ_from_message_to_message(world: World) -> None:
    for found in world.with_deadline(100).run(ragged):
        assert len(found) == len(CASES) * (3 * 4 + 1)
        assert not {cell: worst for cell, worst in found.items() if not worst < 1e-12}


# --- what goes wrong after a good call ends on all ranks, and leaves nothing behind ---


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        raise ArithmeticError("no such derivative")


def interrupted(number: int, frame: Any) -> None:
    raise KeyboardInterrupt("from the keyboard")


def broken(where: str, wrong: int, w: Tensor, x: Any, batch: Any) -> Any:
    """Goes wrong with the third micro-batch on one rank."""
    n, b = batch
    index, last = sf.axis_index("pipe"), sf.axis_size("pipe") - 1
    y = torch.tanh((b if index == 0 else x) @ w)
    if index == wrong and n == 2:
        if where == "forward":
            raise ArithmeticError("no such number")
        if where == "backward":
            y = Fails.apply(y)
        if where == "interrupt":
            signal.signal(signal.SIGUSR1, interrupted)
            signal.raise_signal(signal.SIGUSR1)
        if where == "exit":
            raise SystemExit(3)
        if where == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "along the pipe":
            y = sf.psum(y, "pipe")
        if where == "inside another":
            y = y * parallel.pipeline(functools.partial(broken, "", 0), w, [batch], "pipe")
        if where == "number":
            return 3.0
        if where == "unknown":
            return Unknown(y)
        if where == "sparse":
            return y.to_sparse()
        if where == "loss":
            return y[None]
    return y.square().sum() if index == last else y


class Unknown:
    def __init__(self, y: Tensor) -> None:
        self.y = y


def given(where: str, number: int, wrong: int) -> Any:
    """Micro-batches, of which one rank has others."""
    index = torch.distributed.get_rank()
    if index == wrong and where == "no batches":
        return []
    if index == wrong and where == "batches":
        return (1 // 0 for _ in range(2))
    return list(enumerate(batches(number - (index == wrong and where == "count"))))


WRONG = {
    "forward": "no such number", "backward": "no such derivative", "interrupt": "from the keyboard", "exit": "3",
    "along the pipe": "ranks along 'pipe' run independently", "inside another": "ranks along 'pipe' run independently",
    "number": "a pytree of tensors to the next rank", "unknown": "a pytree of tensors to the next rank",
    "sparse": "sparse", "loss": "a real scalar", "count": "all ranks have the same",
    "no batches": "no micro-batches", "batches": "division", "schedule": "all ranks have the same",
}  # fmt: skip


def failures() -> Any:
    """One after another, with a good call after each; how often that was right, and what was not."""
    size = torch.distributed.get_world_size()
    mesh = sf.make_mesh(pipe=size, device="cpu")
    index, ws = mesh.get_rank(), matrices(size)
    bad, good = [], 0

    def call(where: str, wrong: int, pure: bool) -> Any:
        def f(w: Tensor) -> Tensor:
            part = functools.partial(broken, where, wrong)
            schedule: Any = "gpipe" if where == "schedule" and index >= max(wrong, 1) else "1f1b"
            return parallel.pipeline(part, w, given(where, 5, wrong), "pipe", schedule=schedule)

        def run(w: Tensor) -> Any:
            return torch.func.jvp(f, (w,), (w,))[1] if pure else sf.grad(f)(w)

        return sf.shard_map(run, mesh=mesh, in_specs=..., out_specs=...)(ws[index])

    wanted = {pure: call("", 0, pure) for pure in (False, True)}
    for where, words in WRONG.items():
        for wrong in (0, size - 1):
            for pure in (False, True):
                cannot = (where in ("number", "unknown", "sparse") and wrong == size - 1) or (
                    where == "loss" and wrong == 0
                )
                if cannot or (pure and where == "backward"):
                    continue
                began = time.monotonic()
                try:
                    call(where, wrong, pure)
                    bad.append((where, wrong, pure, "nothing was raised"))
                except BaseException as error:
                    if words not in str(error):
                        bad.append((where, wrong, pure, repr(error)))
                if time.monotonic() - began > 10:
                    bad.append((where, wrong, pure, "late"))
                good += torch.equal(call("", 0, pure), wanted[pure])
    return good, bad


@either
def test_what_fails_after_a_good_call_is_an_error_on_all_and_leaves_nothing_behind(world: World) -> None:
    for good, bad in world.with_deadline(240).run(failures):
        assert not bad
        assert good == 2 * 2 * len(WRONG) - 2 - 2 * (3 + 1)


def killed() -> None:
    mesh, w = sf.make_mesh(pipe=4, device="cpu"), matrices(1)[0]

    def f(w: Tensor, where: str) -> Tensor:
        return parallel.pipeline(functools.partial(broken, where, 1), w, given("", 5, 1), "pipe")

    run = sf.shard_map(sf.grad(f), mesh=mesh, in_specs=..., out_specs=...)
    run(w, "")
    began = time.monotonic()
    try:
        run(w, "kill")
    finally:
        assert time.monotonic() - began < 10, "late"
        with pytest.raises(RuntimeError, match="cut short"):
            run(w, "")


@pytest.mark.world(4)
def test_a_process_that_is_killed_is_an_error_on_all_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "GRACE", 20.0)  # ranks have as long after that as they have here at all
    for rank, error in enumerate(world.with_deadline(30).errors(killed)):
        if rank == 1:
            assert isinstance(error, ChildProcessError)
        else:
            assert isinstance(error, RuntimeError)
            assert "rank 1 along 'pipe' does not answer" in str(error)


class Dead:
    """A group, and what it sends, of which the other rank is gone: known at once, or when it is waited for."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def send(self, rows: Any, to: int, tag: int) -> Any:
        if self.at_once:
            raise RuntimeError("Connection reset by peer")
        return self

    def wait(self) -> None:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(
    ("way", "at_once"),
    [("a note", True), ("a tensor", True), ("an exchange", True), ("a note", False), ("a tensor", False)],
)
def test_whatever_cannot_be_sent_says_which_rank_is_gone(
    way: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages._NoteChannel, "_arrived", lambda line, work: work.wait())
    monkeypatch.setattr(messages, "record", lambda *args, **kwargs: None)
    dead: Any = Dead(at_once)
    team: Any = object.__new__(messages.PipelineRanks)
    team.axis, team.size, team.index, team.device, team.together = "pipe", 2, 0, torch.device("cpu"), False
    team.lines, team.sent, team.ends = {1: messages._NoteChannel(dead, 1)}, {1: collections.deque()}, {}
    team.groups, team.communicator = {"gathers": dead}, SimpleNamespace(names=(), axis=SimpleNamespace(group=None))
    if way == "a tensor":
        monkeypatch.setattr(team.lines[1], "send", lambda *args: None)

    def talk() -> None:
        if way == "an exchange":
            team.exchange(1)
        for _ in range(2):
            team.send([torch.ones(2)] * (way == "a tensor"), 1, "gathers", None)
            team.delivered(1)

    with pytest.raises(RuntimeError, match=r"rank 1 along 'pipe' does not answer \(Connection reset by peer\)"):
        talk()
    assert team.ends == {1: messages._GONE}


# --- what a part's surroundings and habits are ---


def mapped(f: Any, *args: Any, mesh: Any = None) -> Any:
    mesh = mesh or sf.make_mesh(pipe=torch.distributed.get_world_size(), device="cpu")
    return sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)(*args)


def simple(w: Tensor, x: Any, b: Tensor) -> Tensor:
    y = torch.tanh((b if sf.axis_index("pipe") == 0 else x) @ w)
    return y.float().square().sum() if sf.axis_index("pipe") == sf.axis_size("pipe") - 1 else y


def chained(ws: list[Tensor], x: Tensor) -> Tensor:
    for w in ws:
        x = torch.tanh(x @ w)
    return x.float().square().sum()


def under_autocast() -> list[float]:
    """With and without it in turn; the same as one process that adds up the micro-batches' gradients."""
    mesh = sf.make_mesh(pipe=torch.distributed.get_world_size(), device="cpu")
    index, found = torch.distributed.get_rank(), list[float]()
    ws = [w.float() for w in matrices(torch.distributed.get_world_size())]
    for on in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = sf.value_and_grad(lambda w: parallel.pipeline(simple, w, list(batches(3).float()), "pipe"))
            value, gradient = mapped(loss, ws[index], mesh=mesh)
        total, sums = torch.zeros(()), torch.zeros(3, 3)
        for x in batches(3).float():
            leaves = [w.clone().requires_grad_() for w in ws]
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                own = chained(leaves, x)
            total, sums = total + own.detach(), sums + torch.autograd.grad(own, leaves)[index]
        found += [abs(value - total).item() / total.item(), (gradient - sums).abs().max().item()]
    return found


@either
def test_autocast_may_be_on_and_off(world: World) -> None:
    for found in world.run(under_autocast):
        assert worst(found) < 2e-6


def one_trains() -> list[float]:
    """Only one rank has something that needs a gradient."""
    size, index, found = torch.distributed.get_world_size(), torch.distributed.get_rank(), []
    for who in range(size):
        ws = [w.requires_grad_(i == who) for i, w in enumerate(matrices(size))]

        def run(w: Tensor, who: int = who) -> Tensor:
            loss = parallel.pipeline(simple, w, list(batches(3)), "pipe")
            if index == who:
                loss.backward()
            return loss.detach()

        mapped(run, ws[index])
        wanted = torch.autograd.grad(sum(chained(ws, x) for x in batches(3)), ws[who])[0]  # type: ignore[arg-type]
        assert (ws[index].grad is not None) == (index == who)
        if index == who:
            (got,) = [w.grad for w in ws if w.grad is not None]
            found.append((got - wanted).abs().max().item())
    return found


@either
def test_ranks_of_which_one_only_trains(world: World) -> None:
    for found in world.run(one_trains):
        assert len(found) == 1
        assert found[0] < 1e-6  # of a loss in float32


def habits() -> dict[Any, str]:
    last, found = torch.distributed.get_world_size() - 1, {}
    index, ws = torch.distributed.get_rank(), matrices(last + 1)
    buffer, before = torch.zeros(5, 3, dtype=torch.float64), list[Tensor]()

    def one_buffer(w: Tensor, x: Any, b: Tensor) -> Tensor:
        return x.square().sum() if index == last else buffer.copy_((b if index == 0 else x) @ w)

    def changed_later(w: Tensor, x: Any, b: Tensor) -> Tensor:
        for y in before:
            y.mul_(2)
        y = (b if index == 0 else x) @ w
        before[:] = [y]
        return y.sum() if index == last else y

    for part in (one_buffer, changed_later):
        for way in ("value", "gradient", "backward"):
            buffer, before = torch.zeros(5, 3, dtype=torch.float64), []

            def f(w: Tensor, part: Any = part) -> Tensor:
                return parallel.pipeline(part, w, list(batches(6)), "pipe")

            run = {"value": f, "gradient": sf.grad(f), "backward": torch.func.grad(f)}[way]
            found[part.__name__, way] = told(functools.partial(mapped, run, ws[index]))
    return found


@either
def test_a_tensor_that_is_on_its_way_must_not_change(world: World) -> None:
    for found in world.with_deadline(30).run(habits):
        assert len(found) == 6
        # A buffer that is kept also becomes a result of what a micro-batch before was given.
        kept = ("changed in place", "not among its arguments")
        assert not {cell: told for cell, told in found.items() if not any(words in told for words in kept)}


def closures() -> dict[str, str]:
    """Parts that use a tensor which some transform outside follows."""
    index, ws, found = torch.distributed.get_rank(), matrices(torch.distributed.get_world_size()), {}
    ways: dict[str, Any] = {
        "grad": lambda f, w: torch.func.grad(f)(w),
        "value_and_grad": lambda f, w: sf.value_and_grad(f)(w),
        "jvp": lambda f, w: torch.func.jvp(f, (w,), (w,)),
        "hvp": lambda f, w: torch.func.jvp(sf.grad(f), (w,), (w,)),
        "vmap": lambda f, w: torch.func.vmap(f)(torch.stack([w, w])),
    }
    xs = list(batches(3))
    for name, way in ways.items():

        def f(w: Tensor) -> Tensor:
            return parallel.pipeline(lambda _, x, b: simple(w, x, b), ws[index], xs, "pipe")

        found[name] = told(functools.partial(mapped, functools.partial(way, f), ws[index]))
    return found


@either
def test_what_a_part_closes_over_is_no_silent_loss(world: World) -> None:
    for found in world.with_deadline(30).run(closures):
        assert len(found) == 5
        assert not {way: told for way, told in found.items() if "not among its arguments" not in told}


def test_layers_are_shared_evenly_and_each_rank_has_one() -> None:
    assert parallel.split_layers(7, 3) == [range(3), range(3, 5), range(5, 7)]
    with pytest.raises(ValueError, match="3 layers cannot be shared by 4 ranks"):
        parallel.split_layers(3, 4)
