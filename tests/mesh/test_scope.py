"""What axis names mean on which thread."""

from __future__ import annotations

import _thread
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.testing import world


def on_foreign_thread(f: Callable[[], Any]) -> Any:
    """Runs on a thread that the threading module knows nothing of, as autograd's are."""
    out: list[Any] = []
    done = threading.Event()

    def run() -> None:
        try:
            out.append(f())
        except Exception as error:
            out.append(error)
        done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(10)
    return out[0]


def on_python_thread(f: Callable[[], Any]) -> Any:
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(f())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    return out[0]


def inside(how: Callable[[Callable[[], Any]], Any]) -> Any:
    mesh = sf.make_mesh(a=1, b=2, device="cpu")
    f = sf.shard_map(lambda: how(lambda: sf.axis_index("b")), mesh=mesh, in_specs=(), out_specs=...)
    return f(), how(lambda: sf.axis_index("b"))


def test_autograds_threads_see_the_mesh_in_scope() -> None:
    for rank, (index, outside) in enumerate(world(2).run(inside, on_foreign_thread)):
        assert index == rank
        assert isinstance(outside, NameError)


def test_a_users_thread_has_no_mesh_in_scope() -> None:
    for index, outside in world(2).run(inside, on_python_thread):
        assert isinstance(index, NameError)
        assert isinstance(outside, NameError)


def test_two_meshes_in_scope_are_no_answer() -> None:
    def nested() -> Any:
        mesh = sf.make_mesh(a=1, b=2, device="cpu")
        other = sf.make_mesh(a=2, b=1, device="cpu")

        def outer() -> Any:
            inner = sf.shard_map(
                lambda: on_foreign_thread(lambda: sf.axis_index("b")), mesh=other, in_specs=(), out_specs=...
            )
            return inner()

        return sf.shard_map(outer, mesh=mesh, in_specs=(), out_specs=...)()

    assert all(isinstance(found, NameError) for found in world(2).run(nested))


def threads_at_once(jobs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Each job on a thread of its name, all begun at the same time; errors come as results."""
    found: dict[str, Any] = {}
    together = threading.Barrier(len(jobs))

    def run(name: str) -> None:
        together.wait(10)
        try:
            found[name] = jobs[name]()
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return found


def model(seed: int, stages: int) -> tuple[Any, Callable[..., torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    layer = [torch.randn(6 + i, 6 + i, generator=generator, dtype=torch.float64) for i in range(stages)]
    stage = sf.stage(lambda p, x: torch.tanh(p["w"] @ p["w"].T).sum() + x, remat=True)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in sf.layers(params):
            x = stage(p, x)
        return x

    return [{"w": w} for w in layer], loss


def trained_on_two_threads(names: tuple[str, str], strategy: str = "full_shard") -> Any:
    """The errors of gradients that two threads take at once, again and again, of models that differ."""
    mesh = (
        sf.make_mesh(shard=2, replica=-1, device="cpu") if strategy == "mics" else sf.make_mesh(shard=-1, device="cpu")
    )
    placement = sf.strategies.mics(("shard", "replica")) if strategy == "mics" else sf.full_shard("shard")

    def job(seed: int, stages: int) -> Callable[[], Any]:
        plain, loss = model(seed, stages)
        params = sf.shard(plain, mesh, placement)
        wanted = sf.grad(loss)(plain, torch.zeros((), dtype=torch.float64))

        def work() -> float:
            worst = 0.0
            for _ in range(5):
                # All ranks' losses are the same, and their gradients are added up.
                found = sf.unshard(sf.grad(loss)(params, torch.zeros((), dtype=torch.float64)))
                for a, b in zip(found, wanted, strict=True):
                    worst = max(worst, (a["w"] - mesh.size() * b["w"]).abs().max().item())
            return worst

        return work

    return threads_at_once({names[0]: job(0, 3), names[1]: job(1, 4)})


@pytest.mark.parametrize(("size", "strategy"), [(1, "full_shard"), (2, "full_shard"), (4, "mics")])
def test_two_threads_run_stages_at_once(size: int, strategy: str) -> None:
    for found in world(size).run(trained_on_two_threads, ("train", "evaluate"), strategy):
        assert found["train"] < 1e-13, found
        assert found["evaluate"] < 1e-13, found


def shards_alone(how: Callable[[Callable[[], Any]], Any]) -> Any:
    """Only the shards are kept, and used on another thread."""
    plain, loss = model(0, 2)
    zero = torch.zeros((), dtype=torch.float64)
    params = sf.shard(plain, sf.make_mesh(shard=-1, device="cpu"), sf.full_shard("shard"))
    gc.collect()
    return how(lambda: loss(params, zero)), loss(plain, zero)


@pytest.mark.parametrize("how", [on_python_thread, lambda f: f()], ids=["thread", "here"])
def test_shards_keep_their_mesh_for_all_threads(how: Any) -> None:
    for found, wanted in world(2).run(shards_alone, how):
        assert isinstance(found, torch.Tensor), found
        assert torch.allclose(found, wanted, rtol=0, atol=1e-14)


def in_a_pool(jobs: int) -> Any:
    """One job after another, each on another thread of a pool than on the other rank."""
    total = sf.shard_map(
        lambda x: sf.psum(x, "shard"), mesh=sf.make_mesh(shard=-1, device="cpu"), in_specs=..., out_specs=...
    )
    found = []
    with ThreadPoolExecutor(2) as pool:
        for n in range(jobs):
            free = threading.Event()
            if (n + dist.get_rank()) % 2:
                pool.submit(free.wait, 10)
            found.append(pool.submit(total, torch.full((n,), float(n))).result(10).sum().item())
            free.set()
    return found


def test_ranks_meet_whichever_threads_of_a_pool_they_use() -> None:
    assert world(2).with_deadline(20).run(in_a_pool, 6) == [[2.0 * n * n for n in range(6)]] * 2


def two_of_one_lane() -> Any:
    """A thread runs a stage while another of the same pool is inside one."""
    plain, _ = model(0, 1)
    params = sf.shard(plain, sf.make_mesh(shard=-1, device="cpu"), sf.full_shard("shard"))
    inside, refused = threading.Event(), threading.Event()
    zero = torch.zeros((), dtype=torch.float64)

    def slow(p: Any, x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert refused.wait(10)
        return p["w"].sum() + x

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sf.stage(slow), params[0], zero)
        assert inside.wait(10)
        second = pool.submit(sf.stage(lambda p, x: p["w"].sum() + x), params[0], zero).exception(10)
        refused.set()
        return first.result(10).item(), plain[0]["w"].sum().item(), str(second)


def test_threads_that_ranks_cannot_tell_apart_do_not_run_stages_at_once() -> None:
    for found, wanted, refusal in world(2).with_deadline(30).run(two_of_one_lane):
        assert abs(found - wanted) < 1e-13
        assert "run stages at the same time" in refusal
        assert "threading.Thread(name=...)" in refusal


def called_by_threads(names: list[str | None]) -> Any:
    """Two threads call one function that the main thread has made, in another order on the other rank."""
    total = sf.shard_map(
        lambda x: sf.psum(x, "shard"),
        mesh=sf.make_mesh(shard=-1, device="cpu"),
        in_specs=...,
        out_specs=...,
        check=False,
    )
    total(torch.zeros(()))
    found: dict[int, Any] = {}
    both = threading.Barrier(2)

    def work(k: int) -> None:
        both.wait(10)
        try:
            total(torch.zeros(()))  # makes groups, which takes its time
            both.wait(10)
            time.sleep(0.5 * (k != dist.get_rank()))
            found[k] = [total(torch.tensor(100.0 * k + i)).item() for i in range(3)]
        except RuntimeError as error:
            found[k] = str(error)

    threads = [threading.Thread(target=work, args=(k,), name=name) for k, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_threads_with_names_share_a_function_that_another_thread_has_made() -> None:
    for found in world(2).with_deadline(30).run(called_by_threads, ["train", "evaluate"]):
        assert found == {k: [200.0 * k + 2 * i for i in range(3)] for k in range(2)}


@pytest.mark.parametrize("name", [None, "work"])
def test_threads_that_ranks_cannot_tell_apart_do_not_call_them(name: str | None) -> None:
    for found in world(2).with_deadline(30).run(called_by_threads, [name, name]):
        for k in range(2):
            assert "live at the same time, and other ranks cannot tell them apart" in found[k]
