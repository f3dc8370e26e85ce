"""A process in which kernels in Triton run on the CPU, by its interpreter; or are compiled, without a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 240  # until a call has failed
Call = Callable[..., Any]


@contextlib.contextmanager
def process(interpreted: bool, cache: Path) -> Iterator[Call]:
    """Gives a function that calls others, of modules, in a process of its own.

    Triton reads the variable when it is imported, so this process must not set it.
    """
    if sys.platform != "linux":
        pytest.skip("triton is made for Linux alone")
    with multiprocessing.get_context("spawn").Pool(1, _begin, (interpreted, str(cache))) as pool:
        yield lambda f, *args: pool.apply_async(f, args).get(SECONDS)


def _begin(interpreted: bool, cache: str) -> None:
    os.environ["TRITON_INTERPRET"] = str(int(interpreted))
    os.environ["TRITON_CACHE_DIR"] = cache
    import torch

    from shardfn.quant import fused

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # NumPy's, about inf and nan
    if interpreted:
        fused.KINDS = ("cpu",)


@contextlib.contextmanager
def counted(module: Any, *names: str) -> Iterator[list[str]]:
    """Collects the names of a module's functions that are called inside."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(module, name, functools.partial(_call, calls, name, getattr(module, name)))
        yield calls


def _call(calls: list[str], name: str, f: Call, *args: Any) -> Any:
    calls.append(name)
    return f(*args)


def changed(module: Any, old: str, new: str, folder: str) -> Any:
    """A module whose source has one text replaced."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{old} occurs {source.count(old)} times"
    file = Path(folder, f"changed_{len(sys.modules)}.py")
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = made
    spec.loader.exec_module(made)
    return made
