"""What the functions of a step read besides their arguments; a program that was made of them keeps what it was then."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from shardfn.quoting import short

_OURS = ("shardfn", "torch", "optree", "einops", "functools", "contextlib", "builtins")
"""Packages whose functions are passed through: what these keep for themselves is not the step's."""
_PLAIN = (bool, int, float, complex, str, type(None))
_MOST = 256
"""Longer lists and dicts are not looked through, nor more functions."""

Values = dict[str, Any]


def surroundings(step: Callable[..., Any]) -> Values:
    """Numbers, strings, tensors and modes of modules that the functions of a step name, by where they are named.

    They are looked for in closures, globals, defaults and bound objects of the step and of the functions that are found
    there; in objects, those attributes that one of these functions names. Tensors are weak references.
    """
    functions = list(_functions(step))
    named = {name for f, _ in functions for code in _codes(f.__code__) for name in code.co_names}
    return {
        f"{where} in {f.__qualname__}": value
        for f, bound in functions if not _ours(f)
        for name, x in (*_reads(f), *bound) for where, value in _looked(name, x, named)
    }  # fmt: skip


def kept(before: Values, now: Values) -> Values:
    """Those of the values that have not changed."""
    return {where: value for where, value in now.items() if where in before and _same(before[where], value)}


def changed(before: Values, now: Values) -> str:
    """The first of these values that has changed, as a message; empty if none has."""
    for where, was in before.items():
        if not _same(was, now.get(where, was)):
            return f"{where} is {_shown(now[where])} now, and was {_shown(was, 'another tensor')}"
    return ""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        return a() is b()
    return type(a) is type(b) and repr(a) == repr(b)


def _shown(x: Any, tensor: str = "a tensor") -> str:
    return tensor if isinstance(x, weakref.ref) else short(repr(x), 40)


def _ours(x: Any) -> bool:
    name = x.__globals__.get("__name__") if isinstance(x, FunctionType) else getattr(x, "__module__", "")
    name = x.__name__ if isinstance(x, ModuleType) else name
    return str(name).partition(".")[0] in _OURS


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions which it defines."""
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _codes(x)


def _reads(f: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function names besides its parameters and what it makes."""
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            yield name, cell.cell_contents
    if _ours(f):
        return
    names = dict.fromkeys(name for code in _codes(f.__code__) for name in code.co_names)
    yield from ((name, f.__globals__[name]) for name in names if name in f.__globals__)
    defaults = f.__defaults__ or ()
    parameters = f.__code__.co_varnames[: f.__code__.co_argcount]
    yield from zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    yield from (f.__kwdefaults__ or {}).items()


def _looked(name: str, x: Any, named: set[str], inside: bool = False) -> Iterator[tuple[str, Any]]:
    """The values in one thing that a function names."""
    if type(x) in _PLAIN:
        yield name, x
    elif isinstance(x, Tensor):
        yield name, weakref.ref(x)
    elif inside:
        return
    elif isinstance(x, (list, tuple, dict)) and len(x) <= _MOST:
        for key, y in list(x.items()) if isinstance(x, dict) else enumerate(x):
            yield from _looked(f"{name}[{key!r}]", y, named, inside=True)
    elif isinstance(module := _attribute(x, "module") or x, nn.Module):
        with contextlib.suppress(AttributeError):  # not initialised
            yield f"{name}.training", tuple(part.training for part in module.modules())
    elif not isinstance(x, (type, FunctionType)) and not _ours(x):
        values = _attributes(x)
        for key in sorted(named & set(values)):
            yield from _looked(f"{name}.{key}", values[key], named, inside=True)


def _attributes(x: Any) -> dict[str, Any]:
    """An object's own attributes; looking at them runs nothing of the object's."""
    try:
        return dict(object.__getattribute__(x, "__dict__"))
    except (AttributeError, TypeError):
        return {}


def _attribute(x: Any, name: str) -> Any:
    return _attributes(x).get(name)


def _functions(step: Any) -> Iterator[tuple[FunctionType, list[tuple[str, Any]]]]:
    """The functions that a step may call, as far as they can be seen, and the objects to which they are bound."""
    todo, seen = deque([step]), dict[int, Any]()
    while todo and len(seen) < _MOST:
        x = todo.popleft()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        called = inspect.getattr_static(type(x), "__call__", None)
        method = MethodType(called, x) if isinstance(called, FunctionType) and not _ours(x) else x
        bound = [("self", method.__self__)] if isinstance(method, MethodType) else []
        f = method.__func__ if isinstance(method, MethodType) else method
        if isinstance(x, functools.partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, (list, tuple)) and len(x) <= _MOST:
            todo += filter(callable, x)
        elif isinstance(f, FunctionType):
            yield f, bound
            methods = [getattr(type(y), name, None) for _, y in bound for name in f.__code__.co_names]
            todo += [y for _, y in _reads(f)] + methods
        todo += filter(callable, [_attribute(x, "__wrapped__")])
