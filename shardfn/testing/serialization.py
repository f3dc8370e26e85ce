"""Calls, results and failures as bytes.

A function is pickled by name where the ranks can import its module, and by value otherwise. Tensors travel inside
the bytes, so no rank shares memory with the caller or with another rank.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import torch

from shardfn.testing.errors import Outcome, Returned, failure_of


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Keeps the file of a function that is pickled by value, which errors name; cloudpickle 3.1.3 drops it."""

    def reducer_override(self, x: Any) -> Any:
        if type(x) is not CodeType:
            return super().reducer_override(x)
        make, parts = self.dispatch_table[CodeType](x)
        return make, tuple([x.co_filename if part == "<dynamic-code>" else part for part in parts])


def _dumped(x: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(x)
        return file.getvalue()


def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call `fn(*args, **kwargs)` as bytes.

    Raises:
        TypeError: something in the call cannot be pickled.
    """
    try:
        with _by_value_unless_importable(fn):
            return _dumped((fn, args, kwargs))
    except Exception as error:
        raise TypeError(f"this call cannot be pickled for the ranks: {error}") from error


def perform(call: bytes) -> Outcome:
    """Unpacks a call and makes it, on this rank."""
    try:
        fn, args, kwargs = pickle.loads(call)
    except BaseException as error:
        error.add_note("(while this rank unpickled the function and its arguments)")
        return failure_of(error, skip=1)
    try:
        with torch.enable_grad():
            return Returned(fn(*args, **kwargs))
    except BaseException as error:
        return failure_of(error, skip=1)


def encode_outcome(outcome: Outcome) -> bytes:
    """An outcome as bytes; a result that cannot be pickled becomes a failure."""
    if isinstance(outcome, Returned):
        try:
            return b"v" + _dumped(outcome.value)
        except Exception as error:
            kind = type(outcome.value).__qualname__
            outcome = failure_of(TypeError(f"the result, a {kind}, cannot be pickled: {error}"))
    try:
        exception = _dumped(outcome.exception)
    except Exception:
        exception = b""
    return b"f" + pickle.dumps((dataclasses.replace(outcome, exception=None), exception))


def decode_outcome(answer: bytes) -> Outcome:
    """The outcome that `encode_outcome` encoded; an exception that cannot be unpickled stays text."""
    body = memoryview(answer)[1:]
    if answer[:1] == b"v":
        try:
            return Returned(pickle.loads(body))
        except Exception as error:
            return failure_of(TypeError(f"the result was pickled by the rank but cannot be unpickled here: {error!r}"))
    failure, pickled = pickle.loads(body)
    try:
        exception = pickle.loads(pickled)
    except Exception:
        exception = None
    return dataclasses.replace(failure, exception=exception)


@contextmanager
def _by_value_unless_importable(fn: Callable[..., Any]) -> Iterator[None]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _importable(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    """Whether a fresh process with this process's `sys.path` would import this very file by this name."""
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    path: Any = None
    name, origin = "", None
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        path, origin = spec.submodule_search_locations, spec.origin
    return bool(origin == file)
