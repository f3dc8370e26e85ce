"""What axis names mean on which thread."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

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
