"""A finding and its warning name the user's line, whatever package computes, and whoever calls the function."""

from __future__ import annotations

import inspect
import json
import sys
import sysconfig
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import callers, interop
from shardfn.check.recording import TraceRecorder
from shardfn.testing import World

SOURCE = """
def mean(x):
    loss = x.mean()
    return loss

def calls(f, *args):
    return f(*args)

def fails():
    raise KeyError("odd")
"""


def package() -> Any:
    """A module that seems to be installed."""
    module: Any = types.ModuleType("installed_package")
    file = sysconfig.get_paths()["purelib"] + "/installed_package/means.py"
    exec(compile(SOURCE, file, "exec"), module.__dict__)
    sys.modules["installed_package"] = module
    return module


def own_mean(x: Tensor) -> Tensor:
    return x.mean()


def line_of(f: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(f)
    return f"test_places.py:{first + next(n for n, line in enumerate(lines) if text in line)}"


def means(mean: Callable[[Tensor], Tensor]) -> Any:
    mesh = sf.make_mesh(data=2, device="cpu")

    @sf.shard_map(mesh=mesh, in_specs=(..., ...), out_specs=...)
    def step(state: Any, x: Tensor) -> Any:
        return state, {"loss": sf.pmean(mean(x), "data")}  # here

    return mesh, step


def rows(start: int = 0) -> Any:
    while True:
        yield torch.ones(2 + dist.get_rank(), 3)


def warned(call: Callable[[], object]) -> tuple[str, str]:
    """The place and the message of the one warning of the checker."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (one,) = [w for w in caught if w.category is sf.check.VaryingWarning]
    return f"{one.filename.rpartition('/')[2]}:{one.lineno}", str(one.message)


def found(name: str) -> tuple[str, str]:
    mean = {"own": own_mean, "installed": package().mean}[name.split(",")[0]]
    _, step = means(mean)
    params = sf.shard({"w": torch.ones(2)}, sf.make_mesh(data=2, device="cpu"), sf.ddp("data"))
    if name.endswith("by a loop"):
        return warned(lambda: sf.run.loop(step, params, rows, steps=1, report=[]))
    if name.endswith("by a package"):
        return warned(lambda: package().calls(step, params, next(rows())))
    return warned(lambda: step(params, next(rows())))


HERE = line_of(means, "# here")
CALL = line_of(means, "@sf.shard_map")
OWN = f"is given means, made at tests/check/{line_of(own_mean, 'return')}, over"
INSTALLED = f"is given means, made at tests/check/{HERE} (in installed_package/means.py:3), over"
PLACES = {
    "own": (line_of(found, "lambda: step("), OWN),
    "installed": (line_of(found, "lambda: step("), INSTALLED),
    "own, by a loop": (CALL, OWN),
    "installed, by a loop": (CALL, INSTALLED),
    "own, by a package": (line_of(found, ".calls(step"), OWN),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.world(2)
def test_the_users_line_is_named(world: World, name: str) -> None:
    place, words = PLACES[name]
    for at, message in world.run(found, name):
        assert at == place
        assert words in message
        # What a line of a package calls its values is no advice for the user's line.
        assert "Write: shardfn.psum(total, 'data') / shardfn.psum(count, 'data')" in message


def test_the_debug_mode_names_the_users_line_and_where_it_led() -> None:
    module = package()
    assert callers.caller() == f"{__file__}:{sys._getframe().f_lineno}"
    place = module.calls(callers.caller)
    assert place.startswith(f"{__file__}:")
    assert place.endswith(" (in installed_package/means.py:7)")
    with pytest.raises(KeyError) as caught:
        module.fails()
    raised = callers.raised_at(caught.value)
    assert raised.startswith(f"{__file__}:")
    assert raised.endswith(" (in installed_package/means.py:10)")


def test_a_program_that_is_itself_installed_is_named() -> None:
    assert callers._users_line([("/usr/none.py", 3)]) == "/usr/none.py:3"
    inner = sysconfig.get_paths()["purelib"] + "/a/b.py"
    assert callers._users_line([(inner, 3), (inner, 9)]) == "a/b.py:3"


WHOSE = {
    callers.__file__: "package",
    torch.__file__: "between",
    threading.__file__: "between",
    "<frozen importlib._bootstrap>": "between",
    json.__file__: "python",
    pytest.__file__: "installed",
    __file__: "user",
    "<stdin>": "user",
}


@pytest.mark.parametrize("file", WHOSE)
def test_files_are_told_apart(file: str) -> None:
    assert callers.kind_of(file) == WHOSE[file]


def test_what_a_traced_module_computes_is_the_users() -> None:
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    model, recorder = interop.functional(traced), TraceRecorder("traced", {"shard": 2}, lambda group: ("shard",))
    with recorder:
        model(model.tree, torch.randn(2, 4))
    assert {node.op: node.own for node in recorder.trace.nodes if node.op in ("addmm", "tanh")} == {
        "addmm": True,
        "tanh": True,
    }
