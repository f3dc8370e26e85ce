"""Ranks that wait for each other in vain end with an error that says what for; ranks that are only slow do not."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.collectives.agree import agree
from shardfn.compat import process_groups
from shardfn.mesh import waiting, watchdog
from shardfn.mesh.deadlock import BARRIER, State, waits_in_vain
from shardfn.mesh.groups import group_over
from shardfn.mesh.scope import mesh_of
from shardfn.testing import World, WorldError, errors, world
from tests.heard import heard

stage = sf.stage(lambda p, x: x + p.sum())


def loss(params: Any, names: str) -> torch.Tensor:
    x = torch.zeros((), dtype=torch.float64)
    for name in names:
        x = stage(params[name], x)
    return x


def step(params: Any, names: str = "abc") -> Any:
    return sf.value_and_grad(loss)(params, names)


def total(_: Any) -> torch.Tensor:
    return sf.psum(torch.ones(3), "shard")


def under(f: Any, params: Any) -> Any:
    return sf.shard_map(f, mesh=sf.make_mesh(shard=-1, device="cpu"), in_specs=..., out_specs=...)(params)


def known(f: Any) -> Any:
    """Rank 0 calls once more what all ranks have called before, with arguments of the same kind."""
    made: list[Any] = []

    def call(params: Any) -> Any:
        if not made:
            mesh = mesh_of(params["a"].layout.grid, "the tree")
            made.append(sf.shard_map(f, mesh=mesh, in_specs=..., out_specs=...))
        return made[0](params)

    call.warm = True  # type: ignore[attr-defined]
    return call


def ends(params: Any) -> None:
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(0)


def raises(params: Any) -> None:
    sys.last_value = ValueError("broken here")  # as the interpreter does before it leaves
    ends(params)


def catches(params: Any) -> None:
    """In a run, rank 1 meets an error that its program catches before it leaves."""

    def fails(state: Any, batch: Any) -> Any:
        if dist.get_rank() == 1 and batch == 2:
            raise KeyError("odd")
        step(params)
        return state, {}

    try:
        sf.run.loop(fails, {"k": 0}, [0, 1, 2, 3], steps=4, report=[])
    except KeyError:
        ends(params)


def killed(params: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save(params: Any) -> None:
    sf.checkpoint.save("/nowhere/at/all", params)


CALLED = "All ranks call {}: take it out of a branch such as `if rank == 0`, and leave there only what uses its result"
PROGRAMS: dict[str, tuple[Any, Any, str, str]] = {
    # what rank 0 does, what the other does, and what the two say
    "one stage more": (lambda p: step(p, "abc"), lambda p: step(p, "ab"), "all_gather of 'c'", "reduce_scatter of 'b'"),
    "in backward": (lambda p: step(p, "cab"), lambda p: step(p, "c"), "all_gather of 'a'", "reduce_scatter of 'c'"),
    "other sizes": (lambda p: loss(p, "a"), lambda p: loss(p, "b"), "all_gather of 'a'", "all_gather of 'b'"),
    "psum": (known(total), step, "all_reduce of", "all_gather of 'a'"),
    "norm": (known(sf.optim.global_norm), step, "all_reduce of", "all_gather of 'a'"),
    "new arguments": (lambda p: under(total, p), step, "comparing the arguments of 'shard_map(total)'", "all_gather"),
    "unshard": (sf.unshard, step, "over shard in sf.unshard", CALLED.format("sf.unshard")),
    "save": (save, step, "in sf.checkpoint.save", CALLED.format("sf.checkpoint.save")),
    "load": (lambda p: sf.checkpoint.load("/nowhere/at/all", p), step, "in sf.checkpoint.load", "all_gather of 'a'"),
    "export": (
        lambda p: sf.checkpoint.export_hf("/nowhere", p),
        step,
        "in sf.checkpoint.export_hf",
        "all_gather of 'a'",
    ),
    "new arguments, saves": (
        lambda p: under(total, p),
        save,
        "'shard_map(total)'",
        CALLED.format("sf.checkpoint.save"),
    ),
    "agree": (sf.shards.assert_replicated, step, "comparing", "all_gather of 'a'"),
}
ENDINGS: dict[str, tuple[Any, Any, str, str]] = {
    "ends": (step, ends, "rank 1 has ended", ""),
    "raises": (step, raises, "rank 1 has failed: ValueError: broken here", ""),
    "catches, ends": (catches, catches, "rank 1 has failed: KeyError: 'odd'", ""),
    "killed": (
        step,
        killed,
        "rank 1 has ended without an error message (killed, out of memory, or crashed); look first at",
        "",
    ),
    "save, ends": (save, ends, "rank 1 has ended", ""),
    "new arguments, ends": (lambda p: under(total, p), ends, "rank 1 has ended", ""),
}


def program(name: str) -> Any:
    watchdog.PATIENCE, watchdog.TICK = 0.3, 0.05
    generator = torch.Generator().manual_seed(0)
    plain = {k: torch.randn(40 + 10 * i, 4, dtype=torch.float64, generator=generator) for i, k in enumerate("abc")}
    params = sf.shard(plain, sf.make_mesh(shard=-1, device="cpu"), sf.full_shard("shard"))
    step(params)
    first, second, *_ = (PROGRAMS | ENDINGS)[name]
    if hasattr(first, "warm"):
        first(params)
    return (second if dist.get_rank() == 1 else first)(params)


@pytest.mark.parametrize(("size", "name"), [*((2, name) for name in PROGRAMS), (3, "one stage more"), (3, "psum")])
def test_programs_that_cannot_meet_end_with_an_error_on_every_rank(size: int, name: str) -> None:
    with pytest.raises(WorldError) as caught:
        world(size).with_deadline(30).run(program, name)
    _, _, mine, other = PROGRAMS[name]
    for rank, failure in caught.value.failures.items():
        assert failure.how == "raised", f"rank {rank}: {failure}"
        assert "in vain" in failure.message
        assert mine in failure.message, failure.message
        assert other in failure.message, failure.message
        assert "pad them" not in failure.message or name == "new arguments"
        assert "new to rank" not in failure.message  # all of it is, in a first call
        # "waited", where the others broke the group before this rank had waited for long
        assert len(re.findall("wait(?:s|ed) in vain", failure.message)) == 1
    assert len(caught.value.failures) == size


def given_up() -> list[str]:
    """What the same group says at first, and when it is used again; all ranks live on."""
    watchdog.PATIENCE, watchdog.TICK = 0.3, 0.05
    mesh, x = sf.make_mesh(shard=-1, device="cpu"), torch.ones(3 + dist.get_rank())
    said = []
    for _ in range(3):
        with pytest.raises(RuntimeError) as caught:
            sf.shard_map(lambda x: sf.psum(x, "shard"), mesh=mesh, in_specs=..., out_specs=..., check=False)(x)
        said.append(str(caught.value))
    return said


def test_a_group_that_was_given_up_says_why_when_it_is_used_again() -> None:
    with World(2, deadline=30) as own:
        for said in own.run(given_up):
            assert "in vain for all_reduce" in said[0]
            assert said[1] == said[2]
            assert re.search(r"has been broken since \S+:\d+, where rank \d waits in vain for all_reduce", said[1])


def a_wrong_batch() -> str:
    """At step 3 the batch of rank 1 has another width; its parameters and its other arguments are as before."""
    watchdog.PATIENCE, watchdog.TICK = 0.3, 0.05
    mesh = sf.make_mesh(data=-1, device="cpu")
    layers = [{"w": torch.ones(4, 4, dtype=torch.float64)} for _ in range(9)]
    params, layer = sf.shard(layers, mesh, sf.full_shard("data")), sf.stage(lambda p, x: x @ p["w"])

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in sf.layers(params):
            x = layer(p, x)
        return sf.psum(x.sum(), "data")

    value = sf.shard_map(loss, mesh=mesh, in_specs=(..., sf.P("data")), out_specs=sf.P())
    for k in range(3):
        value(params, torch.full((2, 4), k, dtype=torch.float64))
    with pytest.raises(RuntimeError) as caught:
        value(params, torch.ones(2 - dist.get_rank(), 4, dtype=torch.float64))
    return str(caught.value)


def test_a_wrong_batch_in_the_middle_of_a_run_is_named_on_every_rank() -> None:
    with World(2, deadline=30) as own:
        found = own.run(a_wrong_batch)
        for said in found:
            assert "new to rank 1 (x: torch.float64 (1, 4); known before: x: torch.float64 (2, 4))" in said
            assert "FlatShard" not in said
            assert "If this is a last batch with fewer rows, drop it (drop_last=True) or pad it" in said
            assert len(said) <= 2000
        # The cause and what to do come first where the batch is, before the wait in which it shows.
        assert found[1].startswith("shard_map(loss): the arguments are new to rank 1 (x: ")


@pytest.mark.parametrize("name", ENDINGS)
def test_a_rank_that_waits_for_one_that_has_gone_says_so(name: str) -> None:
    with World(2) as fresh, pytest.raises(WorldError) as caught:
        fresh.with_deadline(30).run(program, name)
    assert caught.value.failures[0].how == "raised", caught.value.failures[0]
    said = caught.value.failures[0].message
    assert ENDINGS[name][2] in said
    assert "GLHF" not in said + caught.value.failures[0].traceback
    assert "pad it" not in said


def in_a_barrier(call: str) -> tuple[list[str], str]:
    """Rank 1 waits in a barrier of the program's own for rank 0, which waits for it; the log, and the error."""
    watchdog.PATIENCE, watchdog.TICK = 0.3, 0.05
    params = sf.shard({"a": torch.ones(40)}, sf.make_mesh(shard=-1, device="cpu"), sf.full_shard("shard"))
    calls: dict[str, Any] = {"sf.unshard": sf.unshard, "sf.checkpoint.save": save}
    does = calls[call] if dist.get_rank() == 0 else lambda _: dist.barrier()
    with heard() as said, pytest.raises(RuntimeError) as caught:
        does(params)
    return said, str(caught.value)


@pytest.mark.parametrize("call", ["sf.unshard", "sf.checkpoint.save"])
def test_a_rank_in_a_barrier_of_the_programs_own_does_not_come(call: str) -> None:
    with World(2, deadline=30) as own:
        (_, error), (said, _) = own.run(in_a_barrier, call)
    assert f"in {call}: rank 1 waits for torch.distributed.barrier" in error
    assert re.search(r"barrier over shard at \S+test_waiting\.py:\d+\. All ranks call", error), error
    assert CALLED.format(call) in error
    line = next(line for line in said if "rank 1 has waited" in line)  # its error is torch's own
    assert "s for torch.distributed.barrier over shard: rank 0 waits for " in line
    assert CALLED.format(call) in line


def late_in_calls(late: float) -> list[str]:
    """What the log of rank 0 says while rank 1 is late to calls that all ranks make."""
    watchdog.PATIENCE, watchdog.TICK = 0.1, 0.02
    mesh = sf.make_mesh(shard=-1, device="cpu")
    params = sf.shard({"a": torch.ones(40)}, mesh, sf.full_shard("shard"))
    try:
        with heard() as said:
            time.sleep(late * dist.get_rank())
            sf.unshard(params)
            time.sleep(late * dist.get_rank())
            with waiting.during("sf.checkpoint.save"):
                group_over([0, 1], "a call's own")
    finally:
        watchdog.PATIENCE, watchdog.TICK = 5.0, 1.0
    return said


def test_a_wait_in_a_call_soon_says_that_all_ranks_make_it() -> None:
    with World(2, deadline=30) as own:  # whose watcher no later test meets asleep
        said = own.run(late_in_calls, 0.4)[0]
    for call in ("sf.unshard", "sf.checkpoint.save"):
        line = next(line for line in said if f"in {call}: " in line)
        assert CALLED.format(call) in line
        assert watchdog.STARTS not in line


def late_with_a_program(late: float) -> list[str]:
    """What the log of rank 0 says while rank 1 compiles."""
    watchdog.PATIENCE, watchdog.TICK = (
        0.3,
        0.02,
    )  # six times as much for a rank that compiles; the watcher may sleep a tick from before
    mesh = sf.make_mesh(shard=-1, device="cpu")
    agree([], mesh, "before")
    try:
        with heard() as said:
            time.sleep(late * dist.get_rank())
            agree([], mesh, "compile(step)", subject=("the programs", watchdog.COMPILES))
    finally:
        watchdog.PATIENCE, watchdog.TICK = 5.0, 1.0
    return [line for line in said if "the programs" in line]


def test_a_wait_for_a_rank_that_compiles_is_told_late_and_as_such() -> None:
    with World(2, deadline=30) as own:
        assert own.run(late_with_a_program, 0.5)[0] == []
        line, *_ = own.run(late_with_a_program, 4.2)[0]
    assert "for comparing the programs of 'compile(step)': rank 1 has not come" in line
    assert line.endswith(f". {watchdog.COMPILES}")


def only_slow() -> list[str]:
    """Each rank is late in turn, by many times the patience; what the log said."""
    watchdog.PATIENCE, watchdog.TICK = 0.1, 0.02
    generator = torch.Generator().manual_seed(0)
    plain = {k: torch.randn(40, 4, dtype=torch.float64, generator=generator) for k in "abc"}
    rank, mesh = dist.get_rank(), sf.make_mesh(shard=-1, device="cpu")
    params = sf.shard(plain, mesh, sf.full_shard("shard"))
    try:
        with heard() as said:
            for late in range(mesh.size()):
                if rank == late:
                    time.sleep(0.3)
                step(params)
                if rank == late:
                    time.sleep(0.3)
                under(total, params)
                if rank != late:
                    time.sleep(0.3)
                dist.barrier()
    finally:
        watchdog.PATIENCE, watchdog.TICK = 5.0, 1.0
    return said


def test_ranks_that_are_only_slow_are_waited_for_with_a_word() -> None:
    for rank, said in enumerate(world(3).with_deadline(40).run(only_slow)):
        assert any(f"rank {rank} has waited" in line and "of 'a' over shard" in line for line in said), said
        assert not any("in vain" in line for line in said)


def slow_to_begin() -> list[str]:
    """Rank 1 comes late to a new group, and then later still; what the log of the other says of each."""
    watchdog.PATIENCE, watchdog.TICK = 0.1, 0.02
    said = []
    try:
        for late in (0.3, 1.2):
            time.sleep(late * dist.get_rank())
            with heard() as heard_now:
                group_over([0, 1], f"a use {late} late")
            said.append("; ".join(heard_now))
    finally:
        watchdog.PATIENCE, watchdog.TICK = 5.0, 1.0
    return said


def test_a_rank_that_begins_late_alarms_nobody() -> None:
    soon, late = world(2).run(slow_to_begin)[0]
    assert soon == ""
    assert "for the making of a group" in late
    assert "A rank that still imports modules or loads data comes later" in late


def two_threads_that_cross() -> Any:
    """Rank 0's first thread waits for rank 1's, which is late, as rank 0's second is: nobody waits in vain."""
    watchdog.PATIENCE, watchdog.TICK = 0.1, 0.02
    mesh, rank = sf.make_mesh(shard=-1, device="cpu"), dist.get_rank()
    total = sf.shard_map(lambda x: sf.psum(x, "shard"), mesh=mesh, in_specs=..., out_specs=...)
    other = sf.shard_map(lambda x: sf.all_gather(x, "shard"), mesh=mesh, in_specs=..., out_specs=...)
    found: dict[str, Any] = {}

    def work(name: str, f: Any, late: int) -> None:
        f(torch.ones(2))
        time.sleep(1.0 * (rank == late))
        found[name] = f(torch.ones(3)).sum().item()

    jobs = [("one", total, 1), ("two", other, 0)]
    threads = [threading.Thread(target=work, args=job, name=job[0]) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    watchdog.PATIENCE, watchdog.TICK = 5.0, 1.0
    return found


def test_threads_that_wait_for_late_ones_are_not_given_up() -> None:
    assert world(2).with_deadline(30).run(two_threads_that_cross) == [{"one": 6.0, "two": 6.0}] * 2


# --- what follows from what ranks have told, alone ---


def waits(
    what: str, count: int = 1, *, main: bool = True, first: bool = False, ranks: Any = (0, 1, 2), sided: bool = False
) -> Any:
    told = {"group": "g", "ranks": list(ranks), "told": what, "key": what, "count": count}
    return {"thread": 1 if main else 2, "main": main, "used": ["g"], "wait": {**told, "sided": sided, "first": first}}


def told(*threads: Any, ended: str = "", **counts: int) -> State:
    return {"beat": 1, "ended": ended, "vain": "", "threads": list(threads) or None, "counts": {"g": counts}}


KILLED: State = told(ended="was killed") | {"counts": None}
IN_BARRIER: State = told(waits(BARRIER)) | {"counts": {"g": {BARRIER: 1}}}
IDLE = {"thread": 2, "main": False, "used": ["g"], "wait": None}


@pytest.mark.parametrize(
    ("states", "vain"),
    [
        ({0: told(waits("a"), a=1), 1: told(waits("b"), b=1), 2: told()}, {0, 1}),
        ({0: told(waits("a"), a=1), 1: told(), 2: told()}, set()),
        ({0: told(waits("a"), a=1), 1: told(waits("b"), a=1, b=1), 2: told()}, set()),
        ({0: told(waits("a"), a=1), 1: told(waits("b"), a=1, b=1), 2: told(waits("c"), c=1)}, {0, 1, 2}),
        ({0: told(waits("a", 2), a=2), 1: told(waits("a", 1), a=1), 2: told()}, set()),
        ({0: told(waits("a"), a=1), 1: told(a=1, ended="has ended"), 2: told(ended="has ended", a=1)}, set()),
        ({0: told(waits("a", 2), a=2), 1: told(a=1, ended="has ended"), 2: told()}, {0}),
        ({0: told(waits("a"), a=1), 1: told(waits("b"), IDLE, b=1), 2: told(waits("b"), b=1)}, {0, 1, 2}),
        ({0: told(waits("a"), IDLE, a=1), 1: told(waits("b"), IDLE, b=1), 2: told()}, set()),
        ({0: told(waits("a", main=False, first=True), a=1), 1: told(waits("b"), b=1), 2: told()}, set()),
        ({0: told(waits("a"), a=1)}, set()),
        ({0: told(waits("a", ranks=(0, 1)), a=1), 1: told(waits("b", ranks=(1, 2)), b=1), 2: told()}, set()),
        ({0: told(waits("a"), a=1), 1: KILLED}, set()),
        ({0: told(waits("a"), a=1), 1: KILLED, 2: told(waits("a"), a=1)}, {0, 2}),
        ({0: told(waits("a"), a=1), 1: KILLED, 2: KILLED}, {0}),
        ({0: told(waits("a"), a=1), 1: KILLED, 2: told(ended="has ended", a=1)}, {0}),
        ({0: told(waits("a"), a=1), 1: KILLED, 2: told(waits("b", ranks=(0, 2)), b=1)}, {0, 2}),
        ({0: told(waits("a"), a=1), 1: IN_BARRIER, 2: told(waits("a"), a=1)}, {0, 1, 2}),
        ({0: told(waits("a", ranks=(0, 1)), a=1), 1: IN_BARRIER, 2: told()}, {0, 1}),
        ({0: IN_BARRIER, 1: IN_BARRIER, 2: told()}, set()),
        ({0: IN_BARRIER, 1: told(ended="has failed"), 2: IN_BARRIER}, set()),
        ({0: IN_BARRIER, 1: KILLED, 2: IN_BARRIER}, {0, 2}),
        ({0: told(waits("m", ranks=(1,), sided=True), m=1), 1: IN_BARRIER, 2: told()}, set()),
        ({0: told(waits("m", ranks=(1,), sided=True), m=1), 1: told()}, set()),
        ({0: told(waits("m", ranks=(1,), sided=True), m=1), 1: KILLED}, {0}),
        ({0: told(waits("m", ranks=(1,), sided=True), m=1), 1: told(ended="has ended")}, {0}),
    ],
    ids=[
        "two wait for each other, whatever a third does",
        "the others compute",
        "one has come, and the third computes",
        "all wait",
        "one is behind",
        "they came before they ended",
        "one ended before it came",
        "another thread may still come to one, but not to all",
        "other threads may still come",
        "a new thread",
        "nothing is known",
        "through a third that computes",
        "one was killed, perhaps after it came, and the third computes",
        "one was killed, and all others wait",
        "two were killed",
        "one was killed, and another ended after it had come",
        "one was killed, and the third waits for this one elsewhere",
        "one is in a barrier of its own, for which the others wait",
        "so is one, and the third computes",
        "two are in a barrier, and the third computes",
        "two are in a barrier, and the third had an error, after which it may come",
        "two are in a barrier, and the third was killed",
        "one is in a barrier, for another that waits for its message",
        "a message from one that computes",
        "a message from one that was killed",
        "a message from one that has ended",
    ],
)
def test_only_what_cannot_come_is_given_up(states: dict[int, State], vain: set[int]) -> None:
    assert {rank for rank, _ in waits_in_vain(states)} == vain


def test_a_wait_that_fails_for_another_reason_says_its_own() -> None:
    with pytest.raises(RuntimeError, match=r"^an odd shape$"), waiting.on("psum", "g"):
        raise RuntimeError("an odd shape")


def test_there_is_no_folder_where_the_programs_would_write() -> None:
    assert not Path("/nowhere").exists()


def test_a_group_whose_first_connection_is_closed_is_broken_all_the_same() -> None:
    def body() -> str:
        group, rank, said = dist.new_group(list(range(3))), dist.get_rank(), []
        dist.barrier()  # all have connected
        if rank == 0:
            process_groups.break_group(group)
        if rank < 2:
            time.sleep(3)
            return ""

        def waits() -> None:
            try:
                group.recv([torch.zeros(1)], 1, 7).wait()
            except RuntimeError as error:
                said.append(str(error))

        thread = threading.Thread(target=waits, daemon=True)
        thread.start()
        time.sleep(1)
        process_groups.break_group(group)
        thread.join(5)
        return said[0] if said else "it waits"

    with World(3, deadline=30) as fresh:
        assert "closure" in fresh.run(body)[2]


def test_a_rank_that_is_killed_before_a_group_is_made_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "GRACE", 10.0)  # the other rank shall have time to notice

    def body() -> str:
        if dist.get_rank() == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 has ended without an error message") as caught:
            group_over([0, 1], "a use of its own")
        assert time.monotonic() - begun < 10
        raise RuntimeError(f"told: {caught.value}")

    with World(2, deadline=30) as fresh, pytest.raises(WorldError) as error:
        fresh.run(body)
    assert "told: " in str(error.value.failures[0])


@pytest.mark.parametrize("kind", ["file", "hash"])
def test_ranks_that_are_late_are_waited_for_by_any_store(kind: str, tmp_path: Path) -> None:
    stores: Any = dist  # whose types do not name all of them
    store = stores.FileStore(str(tmp_path / "store"), 2) if kind == "file" else stores.HashStore()
    assert not waiting._came(store, ["one"])
    store.set("one", "")
    assert waiting._came(store, ["one"])


def after_a_wait_in_vain(names: list[str]) -> list[tuple[str, str]]:
    """What became of a call by different axes, and of later ones by the same, on this rank."""
    watchdog.PATIENCE, watchdog.TICK = 0.3, 0.05
    mesh, rank = sf.make_mesh(x=2, y=2, device="cpu"), dist.get_rank()

    def total(axis: Any, x: float) -> tuple[str, str]:
        @sf.shard_map(mesh=mesh, in_specs=(), out_specs=..., check=False)
        def run() -> Any:
            return sf.psum(torch.tensor(x), axis)

        try:
            return "got", str(run().item())
        except RuntimeError as error:
            return type(error).__name__, str(error)

    every = {"x": "x", "y": "y", "both": ("x", "y")}
    for axis in every.values():
        total(axis, 1.0)
    return [total(every[name], 100.0 + rank) for name in (names[rank], *("both", "x", "y") * 2)]


@pytest.mark.parametrize("names", [["y", "x", "x", "y"], ["both", "y", "both", "both"]], ids=" ".join)
def test_a_group_that_failed_is_failed_on_all_ranks_and_pairs_nobody(names: list[str]) -> None:
    sums = {"both": [406.0] * 4, "x": [202.0, 204.0] * 2, "y": [201.0] * 2 + [205.0] * 2}
    broken = {(name, rank) for rank in range(4) for name in "xy"}
    if "both" in names:
        broken = {*(("both", rank) for rank in range(4)), ("y", 0), ("y", 1)}
    with World(4, deadline=60) as fresh:
        every = fresh.run(after_a_wait_in_vain, names)
    for rank, (first, *later) in enumerate(every):
        assert first[1].startswith(f"rank {rank} waits in vain for "), first
        for name, (how, said) in zip(("both", "x", "y") * 2, later, strict=True):
            if (name, rank) in broken:
                assert re.search(r"its group has been broken since .*rank \d waits in vain for ", said), (
                    rank,
                    name,
                    how,
                    said,
                )
            else:
                assert (how, said) == ("got", str(sums[name][rank])), (rank, name)
