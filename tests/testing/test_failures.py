"""What comes back when a rank raises, hangs or dies."""

import os
import pickle
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from shardfn.testing import WorldError, WorldTimeout, errors

both = pytest.mark.parametrize("world", [(2, "processes"), (2, "threads")], indirect=True)
processes = pytest.mark.parametrize("world", [(2, "processes")], indirect=True)


class Stubborn(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Unpicklable(Exception):
    def __reduce__(self):
        raise pickle.PicklingError("no")


class Bomb:
    """A result that pickles, but does not unpickle."""

    def __reduce__(self):
        return _explode, ()


def _explode():
    raise ValueError("boom")


def only(rank: int, action, then=None):
    """A function in which one rank does `action`, and the others `then`."""

    def body():
        if dist.get_rank() == rank:
            return action()
        return then() if then is not None else None

    return body


def fail():
    raise ValueError("a bad shard")


def wait():
    dist.all_reduce(torch.ones(1))


def usable(world) -> bool:
    return world.run(dist.get_rank) == list(range(world.size))


@both
def test_one_rank_raises(world):
    with pytest.raises(WorldError) as caught:
        world.run(only(1, fail))
    message = str(caught.value)
    assert message.startswith("rank 1 failed in only.<locals>.body (test_failures.py:")
    assert "rank 1: ValueError: a bad shard" in message
    assert 'raise ValueError("a bad shard")' in message
    assert not isinstance(caught.value, WorldTimeout)
    [(rank, failure)] = caught.value.failures.items()
    assert (rank, failure.how, failure.type_name, failure.message) == (1, "raised", "ValueError", "a bad shard")
    assert isinstance(failure.exception, ValueError)
    assert "in fail" in failure.traceback
    assert "serialization.py" not in failure.traceback
    assert usable(world)


@both
def test_all_ranks_raise_the_same(world):
    with pytest.raises(WorldError, match=r"^ranks 0, 1 failed in fail") as caught:
        world.run(fail)
    assert str(caught.value).count("Traceback") == 1
    assert list(caught.value.failures) == [0, 1]


@both
def test_errors_lists_the_exception_of_every_rank(world):
    first, second = world.errors(only(1, fail))
    assert first is None
    assert isinstance(second, ValueError)
    assert [type(error) for error in world.errors(fail)] == [ValueError, ValueError]
    assert world.errors(dist.get_rank) == [None, None]


@both
def test_a_rank_that_raises_releases_those_that_wait_for_it(world):
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world.run(only(1, fail, then=wait))
    assert time.monotonic() - start < 10
    assert not isinstance(caught.value, WorldTimeout)
    assert [(rank, failure.how) for rank, failure in caught.value.failures.items()] == [(1, "raised"), (0, "waiting")]
    assert "rank 0: in all_reduce, called at test_failures.py" in str(caught.value)
    assert usable(world)


@both
def test_a_hang_ends_at_the_deadline_and_shows_where(world):
    start = time.monotonic()
    with pytest.raises(WorldTimeout) as caught:
        world.with_deadline(0.5).run(only(0, wait))
    assert time.monotonic() - start < 10
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("rank 0 did not return within 0.5 s from only.<locals>.body")
    assert lines[1].startswith("  rank 0: in all_reduce, called at test_failures.py:")
    assert "(wait)" in lines[1]
    assert "in wait" in caught.value.failures[0].traceback
    assert usable(world)


@both
def test_a_hang_is_a_timeout_error_among_errors(world):
    stuck, done = world.with_deadline(0.5).errors(only(0, wait))
    assert isinstance(stuck, TimeoutError)
    assert "in all_reduce" in str(stuck)
    assert done is None
    assert usable(world)


@processes
def test_a_hang_outside_collectives_shows_the_line(world):
    def sleep():
        time.sleep(60)

    with pytest.raises(WorldTimeout, match=r"ranks 0, 1: at test_failures.py:\d+ \(sleep\)"):
        world.with_deadline(0.5).run(sleep)
    assert usable(world)


@processes
@pytest.mark.parametrize(
    ("death", "message"),
    [
        (lambda: os._exit(3), "the process exited with code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "the process was killed by SIGSEGV"),
    ],
    ids=["exit", "kill", "crash"],
)
def test_a_death_is_reported_without_waiting_for_the_others(world, death, message, monkeypatch):
    monkeypatch.setattr(errors, "GRACE", 0.5)
    start = time.monotonic()
    with pytest.raises(WorldError, match=r"^rank 1 died in") as caught:
        world.run(only(1, death, then=lambda: time.sleep(30)))
    assert time.monotonic() - start < 10
    assert (caught.value.failures[1].how, caught.value.failures[1].message) == ("died", message)
    assert next(iter(caught.value.failures)) == 1
    assert usable(world)
    assert isinstance(world.errors(only(1, death))[1], ChildProcessError)


@processes
def test_a_crash_shows_its_stack(world):
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(WorldError, match=r"killed by SIGSEGV[\s\S]*in crash"):
        world.run(crash)


@processes
def test_a_death_between_runs_is_reported_by_the_next(world):
    victim = world.run(os.getpid)[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorldError, match="rank 1: the process was killed by SIGKILL"):
        world.run(wait)
    assert usable(world)


@processes
def test_a_death_under_way_to_an_answer_is_a_death(world):
    def die_while_pickling():
        return Killer()

    assert isinstance(world.errors(die_while_pickling)[0], ChildProcessError)
    assert usable(world)


class Killer:
    def __reduce__(self):
        os._exit(1)


@processes
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (threading.Lock, "the result, a lock, cannot be pickled"),
        (Bomb, r"cannot be unpickled here: ValueError\('boom'\)"),
    ],
    ids=["pickle", "unpickle"],
)
def test_a_result_that_cannot_travel_is_an_error_of_its_rank(world, result, message):
    with pytest.raises(WorldError, match=message):
        world.run(only(1, result))
    assert usable(world)


@processes
@pytest.mark.parametrize("make", [lambda: Stubborn("no", "way"), lambda: Unpicklable("no way")])
def test_an_exception_that_cannot_travel_stays_text(world, make):
    def body():
        raise make()

    name = type(make()).__name__
    with pytest.raises(WorldError, match=f"ranks 0, 1: {name}: no way") as caught:
        world.run(body)
    assert caught.value.failures[0].exception is None
    assert str(world.errors(body)[0]) == f"{name}: no way"


@both
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_exceptions_that_are_not_errors_are_reported_too(world, error):
    def body():
        raise error

    assert [type(raised) for raised in world.errors(body)] == [type(error)] * 2
    assert usable(world)


@both
def test_an_exception_without_words_is_named(world):
    def body():
        raise ValueError

    with pytest.raises(WorldError, match=r"ranks 0, 1: ValueError\n"):
        world.run(body)


@both
def test_a_failed_import_in_a_rank_says_so(world):
    class Reluctant:
        def __reduce__(self):
            return _explode, ()

    with pytest.raises(WorldError, match="boom") as caught:
        world.run(str, Reluctant())
    assert "while this rank unpickled" in str(caught.value)


@processes
def test_half_done_collectives_do_not_reach_the_next_run(world):
    def leave_one_behind():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.full((1,), 100.0), async_op=True)
        raise ValueError("after half a collective")

    def sums():
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    world.errors(leave_one_behind)
    assert world.run(sums) == [2.0, 2.0]
