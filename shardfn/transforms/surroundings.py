"""What the functions of a step read besides their arguments; a program that was made of them keeps what it was then.

A program is called often and fast. So the places of these values are looked for once, and then only read.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardfn.quoting import short

_OURS = ("shardfn", "torch", "optree", "einops", "functools", "contextlib", "builtins")
"""Packages whose functions are passed through: what these keep for themselves is not the step's."""
_PLAIN = (bool, int, float, complex, str, type(None))
_MOST = 256
"""Longer lists and dicts are not looked through, nor more functions."""
_GONE: Any = object()

Read = Callable[[], Any]


class Seen(NamedTuple):
    """A value, a weak reference of a tensor or module, and what reads it again."""

    value: Any
    read: Read

    def now(self) -> Any:
        """The value at present; as it was if its place is gone."""
        try:
            return self.read()
        except Exception:
            return _GONE

    def same(self, now: Any) -> bool:
        """Whether this is the same object, or an equal number or string."""
        if now is self.value or now is _GONE:
            return True
        if isinstance(self.value, weakref.ref):
            return self.value() is now
        return type(self.value) is type(now) and repr(self.value) == repr(now)


Around = dict[str, Seen]


def surroundings(step: Callable[..., Any]) -> Around:
    """Numbers, strings, tensors, modules and their modes that the functions of a step name, by where they are named.

    They are looked for in closures, globals, defaults and bound objects of the step and of the functions that are found
    there; in objects, those attributes that one of these functions names.
    """
    functions = list(_functions(step))
    named = {name for f, _ in functions for code in _codes(f.__code__) for name in code.co_names}
    return {
        f"{where} in {f.__qualname__}": Seen(value, again)
        for f, bound in functions if not _ours(f)
        for name, read in (*_reads(f), *bound) for where, value, again in _looked(name, read, named)
    }  # fmt: skip


def kept(before: Around, now: Around) -> Around:
    """Those of the values that have not changed."""
    return {where: seen for where, seen in now.items() if where in before and before[where].same(seen.now())}


def changed(around: Around) -> str:
    """The first of these values that has changed, as a message; empty if none has."""
    for where, seen in around.items():
        if not seen.same(now := seen.now()):
            return f"{where} is {_shown(now)} now, and was {_shown(seen.value)}"
    return ""


def _shown(x: Any) -> str:
    if isinstance(x, weakref.ref):
        return f"another {'module' if isinstance(x(), nn.Module) else 'tensor'}"
    return f"a {type(x).__name__}" if isinstance(x, (Tensor, nn.Module)) else short(repr(x), 40)


def _ours(x: Any) -> bool:
    name = x.__globals__.get("__name__") if isinstance(x, FunctionType) else getattr(type(x), "__module__", "")
    name = vars(x).get("__name__") if isinstance(x, ModuleType) else name
    return str(name).partition(".")[0] in _OURS


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions which it defines."""
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _codes(x)


def _reads(f: FunctionType) -> Iterator[tuple[str, Read]]:
    """What a function names besides its parameters and what it makes."""
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        yield name, functools.partial(getattr, cell, "cell_contents")
    if _ours(f):
        return
    names = dict.fromkeys(name for code in _codes(f.__code__) for name in code.co_names)
    yield from ((name, functools.partial(operator.getitem, f.__globals__, name)) for name in names)
    defaults, parameters = f.__defaults__ or (), f.__code__.co_varnames[: f.__code__.co_argcount]
    pairs = zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    for name, x in (*pairs, *(f.__kwdefaults__ or {}).items()):
        yield name, functools.partial(_itself, x)


def _itself(x: Any) -> Any:
    return x


def _values(reads: Iterator[tuple[str, Read]]) -> Iterator[Any]:
    """What is there: a cell may not be set yet, and a name may be one of an attribute."""
    for _, read in reads:
        with contextlib.suppress(ValueError, KeyError):
            yield read()


def _looked(name: str, read: Read, named: set[str], inside: bool = False) -> Iterator[tuple[str, Any, Read]]:
    """The values in one thing that a function names."""
    try:
        x = read()
    except (ValueError, KeyError):
        return
    if type(x) in _PLAIN:
        yield name, x, read
    elif isinstance(x, Tensor):
        yield name, weakref.ref(x), read
    elif isinstance(x, nn.Module) or isinstance(_attributes(x).get("module"), nn.Module):
        module = x if isinstance(x, nn.Module) else _attributes(x)["module"]
        with contextlib.suppress(AttributeError):  # not initialised
            yield f"{name}.training", (modes := _Modes(module))(), modes
        yield name, weakref.ref(x), read
    elif inside:
        return
    elif isinstance(x, (list, tuple, dict)) and len(x) <= _MOST:
        for key in list(x) if isinstance(x, dict) else range(len(x)):
            again = functools.partial(_item, read, key)
            yield from _looked(f"{name}[{key!r}]", again, named, inside=True)
    elif not isinstance(x, (type, FunctionType)) and not _ours(x):
        for key in sorted(named & _attributes(x).keys()):
            again = functools.partial(_own, read, key)
            yield from _looked(f"{name}.{key}", again, named, inside=True)


class _Modes:
    """Reads whether a module and those in it train."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = list(map(weakref.ref, module.modules()))

    def __call__(self) -> tuple[bool, ...]:
        return tuple([part.training for ref in self.parts if (part := ref()) is not None])


def _item(read: Read, key: Any) -> Any:
    return read()[key]


def _own(read: Read, key: str) -> Any:
    return _attributes(read())[key]


def _attributes(x: Any) -> dict[str, Any]:
    """An object's own attributes; looking at them runs nothing of the object's."""
    try:
        found: dict[str, Any] = object.__getattribute__(x, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found


def _functions(step: Any) -> Iterator[tuple[FunctionType, list[tuple[str, Read]]]]:
    """The functions that a step may call, as far as they can be seen, and the objects to which they are bound."""
    todo, seen = deque([step]), dict[int, Any]()
    while todo and len(seen) < _MOST:
        x = todo.popleft()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        called = inspect.getattr_static(type(x), "__call__", None)
        method = MethodType(called, x) if isinstance(called, FunctionType) and not _ours(x) else x
        bound = [method.__self__] if isinstance(method, MethodType) else []
        f = method.__func__ if isinstance(method, MethodType) else method
        if isinstance(x, functools.partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, (list, tuple)) and len(x) <= _MOST:
            todo += filter(callable, x)
        elif isinstance(f, FunctionType):
            yield f, [("self", functools.partial(_itself, y)) for y in bound]
            methods = [inspect.getattr_static(type(y), name, None) for y in bound for name in f.__code__.co_names]
            todo += [*_values(_reads(f)), *methods]
        todo += filter(callable, [_attributes(x).get("__wrapped__")])
