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
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.quoting import short

_OURS = ("shardfn", "torch", "optree", "einops", "functools", "contextlib", "builtins")
"""Packages whose functions are passed through: what these keep for themselves is not the step's."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, CodeType)
_MOST = 256
"""Longer lists and dicts are not looked through, nor more functions."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_INSIDE = {"parameter or buffer": ("_parameters", "_buffers"), "module": ("_modules",), "hook": _HOOKS}
"""What a module holds, and the attributes in which it does."""
_NOTING = "transformers.utils.output_capturing"
"""A module of hooks that only note what passes, and are made by the first call that asks for hidden states."""
_GONE: Any = object()

Read = Callable[[], Any]


class Seen(NamedTuple):
    """A value, a weak reference of a tensor or module, and what reads it again."""

    value: Any
    read: Read

    def now(self) -> Any:
        """The value at present, or a mark if its place is gone."""
        try:
            return self.read()
        except Exception:
            return _GONE

    def same(self, now: Any) -> bool:
        """Whether this is the same object, an equal number or string, or a function of the same code."""
        if now is self.value:
            return True
        if isinstance(self.value, weakref.ref):
            return now is not None and now is self.value()
        if isinstance(self.value, FunctionType):
            return isinstance(now, FunctionType) and now.__code__ is self.value.__code__
        if type(now) is tuple and len(now) == len(self.value) and all(map(operator.is_, now, self.value)):
            return True
        return type(self.value) is type(now) and repr(self.value) == repr(now)


Around = dict[str, Seen]


def surroundings(step: Callable[..., Any]) -> Around:
    """Numbers, strings, tensors and modules that the functions of a step name, by where they are named.

    Of a module, these are its mode, parameters, buffers, modules, hooks and the numbers, tensors and functions that its
    methods name, and those of the modules in it.

    They are looked for in closures, globals, defaults and bound objects of the step and of the functions that are found
    there; in objects, those attributes that one of these functions names. So are these functions.
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


def changed(around: Around, step: Callable[..., Any]) -> str:
    """The first of these values that has changed, as a message; empty if none has.

    If a function was made again, of the same code, the values are looked for anew: they are in other places.
    """
    told = _differs(around, around)
    if told or all(seen.read() is seen.value for seen in around.values() if type(seen.value) is FunctionType):
        return told
    found = surroundings(step)
    told = _differs(around, found)
    around.update({where: found[where] for where in around.keys() & found.keys()})
    return told


def _differs(around: Around, found: Around) -> str:
    for where, seen in around.items():
        if where in found and not seen.same(now := found[where].now()):
            return f"{where} is {_shown(now)} now, and was {_shown(seen.value)}"
    return ""


def _shown(x: Any) -> str:
    if seen := [y() for y in (x if type(x) is tuple else (x,)) if isinstance(y, weakref.ref)]:
        return f"another {'module' if any(isinstance(y, nn.Module) for y in seen) else 'tensor'}"
    if x is _GONE or isinstance(x, FunctionType):
        return "gone" if x is _GONE else f"the function at line {x.__code__.co_firstlineno}"
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
    parameters, count = f.__code__.co_varnames[: f.__code__.co_argcount], len(f.__defaults__ or ())
    for i, name in enumerate(parameters[len(parameters) - count :]):
        yield name, functools.partial(_then, operator.itemgetter(i), functools.partial(getattr, f, "__defaults__"))
    for name in f.__kwdefaults__ or ():
        yield name, functools.partial(_then, operator.itemgetter(name), functools.partial(getattr, f, "__kwdefaults__"))


def _values(reads: Iterator[tuple[str, Read]]) -> Iterator[Any]:
    """What is there: a cell may not be set yet, and a name may be one of an attribute."""
    for _, read in reads:
        with contextlib.suppress(ValueError, KeyError):
            yield read()


def _looked(name: str, read: Read, named: set[str], inside: bool = False) -> Iterator[tuple[str, Any, Read]]:
    """The values in one thing that a function names."""
    try:
        x = read()
    except (ValueError, KeyError, AttributeError):
        return
    if type(x) in _PLAIN or (inside and _is_plain(x)) or (type(x) is FunctionType and not _ours(x)):
        yield name, x, read
    elif isinstance(x, Tensor):
        yield name, weakref.ref(x), read
    elif isinstance(x, nn.Module) or isinstance(_attributes(x).get("module"), nn.Module):
        module = x if isinstance(x, nn.Module) else _attributes(x)["module"]
        yield name, weakref.ref(x), read
        with contextlib.suppress(AttributeError, KeyError):  # not initialised
            yield from _in_module(name, module)
    elif inside:
        return
    elif isinstance(x, (list, tuple, dict)) and len(x) <= _MOST:
        for key in list(x) if isinstance(x, dict) else range(len(x)):
            again = functools.partial(_then, operator.itemgetter(key), read)
            yield from _looked(f"{name}[{key!r}]", again, named, inside=True)
        if isinstance(x, list):
            yield f"len({name})", len(x), functools.partial(_then, len, read)
    elif isinstance(x, functools.partial):
        for part in ("func", "args", "keywords"):
            yield from _looked(f"{name}.{part}", functools.partial(_then, operator.attrgetter(part), read), named)
    elif not isinstance(x, (type, FunctionType)) and not _ours(x):
        for key in sorted(named & set(_attributes(x)).union(*map(vars, type(x).__mro__))):
            again = functools.partial(_then, functools.partial(_own, key), read)
            yield from _looked(f"{name}.{key}", again, named, inside=True)


def _in_module(name: str, module: nn.Module) -> Iterator[tuple[str, Any, Read]]:
    """What a module and those in it hold: each attribute by one reader for all that have it."""
    parts = list(module.modules())
    named: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        kind: Any = type(part)
        for key in sorted(vars(part).keys() & _read_by(kind)):
            if key != "forward" and _held(vars(part)[key]):
                named.setdefault(key, []).append(vars(part))
    for key, owners in named.items():
        plain = all(_is_plain(own[key]) for own in owners)
        read: Read = functools.partial(_each, owners, key)
        read = read if plain else functools.partial(_then, _noted, read)
        yield f"{name}.{key}", read(), read
    read = functools.partial(_forwards, [vars(part) for part in parts])
    yield f"{name}.forward", read(), read
    for what, keys in _INSIDE.items():
        held = [vars(part)[key] for part in parts for key in keys]
        read = functools.partial(_hooks if keys is _HOOKS else _references, held)
        yield f"a {what} of {name}", read(), read


def _is_plain(x: Any) -> bool:
    """Whether this is a number or the like, or a tuple of such."""
    return type(x) in _PLAIN or (type(x) is tuple and all(type(y) in _PLAIN for y in x))


def _held(x: Any) -> bool:
    """Whether an attribute of a module is compared: a number, tensor or function, or a list, tuple or dict of these."""
    values = list(x.values()) if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,)
    kinds = (Tensor, FunctionType, BuiltinFunctionType, MethodType)
    return 0 < len(values) <= _MOST and all(type(y) in _PLAIN or isinstance(y, kinds) for y in values)


@functools.lru_cache(maxsize=1024)
def _read_by(kind: Any) -> frozenset[str]:
    """The attributes that the methods of a module's class name."""
    methods = [x for c in kind.__mro__ if c not in nn.Module.__mro__ for x in vars(c).values()]
    codes = [code for x in methods if isinstance(x, FunctionType) for code in _codes(x.__code__)]
    return frozenset({"training"}.union(*(code.co_names for code in codes)))


def _each(owners: list[dict[str, Any]], key: str) -> tuple[Any, ...]:
    return tuple([own.get(key, _GONE) for own in owners])


def _forwards(owners: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Functions that replace those of the modules' classes."""
    return tuple([own["forward"] for own in owners if "forward" in own])


def _references(owners: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The tensors or modules in these dicts, of which most may be empty."""
    return tuple([None if x is None else weakref.ref(x) for own in filter(None, owners) for x in own.values()])


def _hooks(owners: list[dict[str, Any]]) -> tuple[Any, ...]:
    found = [x for own in filter(None, owners) for x in own.values()]
    return tuple([_noted(x) for x in found if getattr(x, "__module__", "") != _NOTING])


def _noted(x: Any) -> Any:
    """A value as it is kept: a weak reference of a tensor or module, a copy of a container."""
    if isinstance(x, (Tensor, nn.Module)):
        return weakref.ref(x)
    if isinstance(x, dict):
        return tuple(map(_noted, x.items()))
    return tuple(map(_noted, x)) if isinstance(x, (list, tuple)) else x


def _then(get: Callable[[Any], Any], read: Read) -> Any:
    return get(read())


def _own(key: str, x: Any) -> Any:
    """An attribute of an object or its class; no property is run."""
    for names in (_attributes(x), *map(vars, type(x).__mro__)):
        if key in names:
            return names[key].__get__(x) if isinstance(names[key], MemberDescriptorType) else names[key]
    raise AttributeError(key)


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
            code = f.__name__ + ".__code__", functools.partial(getattr, f, "__code__")
            yield f, [*(("self", functools.partial(getattr, method, "__self__")) for _ in bound), code]
            methods = [inspect.getattr_static(type(y), name, None) for y in bound for name in f.__code__.co_names]
            todo += [*_values(_reads(f)), *(m.fget if isinstance(m, property) else m for m in methods)]
        todo += filter(callable, [_attributes(x).get("__wrapped__")])
