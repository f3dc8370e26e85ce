"""Values that the functions of a step read in addition to their arguments, and that a program freezes.

A program is called often and fast. So the places of these values are looked for once, and then only read.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardfn.quoting import short

_OURS = ("shardfn", "torch", "optree", "einops", "functools", "contextlib", "builtins")
"""Packages whose functions are passed through: what these keep for themselves is not the step's."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, CodeType)
_MOST = 256
"""Longer lists and dicts are not looked through, nor more functions, nor more things inside of one."""
_LIBRARIES = (os.path.dirname(os.__file__), "site-packages", "dist-packages")
"""Parts of paths of code that a person who writes a step does not change: what it names is not looked for."""
_MODULES: dict[str, Any] = vars(nn.modules.module)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_INSIDE = {"parameters and buffers": ("_parameters", "_buffers"), "modules": ("_modules",)}
"""What a module holds, and the attributes in which it does."""
_NOT_CALLED = {
    "__init__",
    "__new__",
    "__post_init__",
    "__repr__",
    "__str__",
    "__setattr__",
    "__getstate__",
    "__setstate__",
}
"""Special methods of an object that a step does not run; it may run the others without naming them."""
_OF_TORCH = vars(nn.Module()).keys() - {"training"}
"""What torch keeps on a module; of this, what matters is in `_INSIDE`."""
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_LARGEST = 2**12  # bytes of an array that are compared
_NOTING = "transformers.utils.output_capturing"
"""A module of hooks that only note what passes, and are made by the first call that asks for hidden states."""
_GONE: Any = object()

Read = Callable[[], Any]


class CapturedValue(NamedTuple):
    """A saved value, the function that rereads it, and the names of its parts if a tuple."""

    value: Any
    read: Read
    parts: tuple[str, ...] = ()

    def current_value(self) -> Any:
        """The value at present, or a mark if its place is gone."""
        try:
            return self.read()
        except Exception:
            return _GONE

    def same(self, current: Any) -> bool:
        """Whether this is the same object, an equal number or string, or a function of the same code."""
        if isinstance(self.value, weakref.ref):
            return current is self.value or (current is not None and current is self.value())
        return _same_value(self.value, current)

    def describe_change(self, where: str, current: Any) -> str:
        """Returns how the value differs, as a message; of several, the first that does."""
        value, inside = self.value, where.partition(" in ")[2]
        if self.parts and type(current) is tuple and len(current) == len(value) == len(self.parts):
            i = next(i for i, pair in enumerate(zip(value, current, strict=True)) if not _same_value(*pair))
            where, value, current = f"{self.parts[i]} in {inside}", value[i], current[i]
        while (
            type(current) is type(value) is tuple and len(current) == len(value) and not _is_plain((*value, *current))
        ):
            value, current = next(pair for pair in zip(value, current, strict=True) if not _same_value(*pair))
        if type(current) is type(value) is tuple and not _is_plain((*value, *current)):
            return f"{where}: there are more or fewer now"
        if isinstance(value, weakref.ref) and isinstance(current, (weakref.ref, Tensor, nn.Module)):
            return f"{where} is another {_type_name(current)} now"
        return f"{where} is {_shown(current)} now, and was {_shown(value)}"


def _same_value(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, FunctionType):
        return isinstance(y, FunctionType) and x.__code__ is y.__code__
    if type(x) is not type(y):
        return False
    if type(x) is tuple:
        return len(x) == len(y) and (all(map(operator.is_, x, y)) or all(map(_same_value, x, y)))
    return isinstance(x, _PLAIN) and repr(x) == repr(y)


Around = dict[str, CapturedValue]


def captured_values(step: Callable[..., Any]) -> Around:
    """Numbers, strings, tensors and modules that the functions of a step name, by where they are named.

    Of a module, these are its mode, parameters, buffers, modules, hooks and the attributes that its methods name, and
    those of the modules in it.

    They are looked for in closures, globals, defaults and bound objects of the step and of the functions that are found
    there, such as the `forward` of a module; in objects, those attributes that one of these functions names. So are
    these functions. Code of installed packages is not looked through for more.
    """
    functions = list(_functions(step))
    named = {name for f, _ in functions for code in _codes(f.__code__) for name in code.co_names}
    return {
        f"{where} in {f.__qualname__}": CapturedValue(*captured)
        for f, bound in functions if not _is_of_library(f)
        for name, read in (*_readers(f), *bound) for where, *captured in _looked(name, read, named)
    }  # fmt: skip


def unchanged_values(previous: Around, current: Around) -> Around:
    """Returns the values that have not changed."""
    return {
        where: captured
        for where, captured in current.items()
        if where in previous and previous[where].same(captured.current_value())
    }


def changed(around: Around, step: Callable[..., Any]) -> str:
    """The first of these values that has changed, as a message; empty if none has.

    If a function was made again, of the same code, the values are looked up again: they are in other places.
    """
    change = _differs(around, around)
    if change or all(
        captured.read() is captured.value for captured in around.values() if type(captured.value) is FunctionType
    ):
        return change
    current = captured_values(step)
    change = _differs(around, current)
    around.update({where: current[where] for where in around.keys() & current.keys()})
    return change


def _differs(around: Around, current: Around) -> str:
    for where, captured in around.items():
        if where in current and not captured.same(current_value := current[where].current_value()):
            return captured.describe_change(where, current_value)
    return ""


def _shown(x: Any) -> str:
    if isinstance(x, weakref.ref):
        return f"a {_type_name(x)}"
    if isinstance(x, _FUNCTIONS):
        return f"the function {f'at line {x.__code__.co_firstlineno}' if isinstance(x, FunctionType) else x.__name__}"
    if x is _GONE or isinstance(x, (Tensor, nn.Module)):
        return "not there" if x is _GONE else f"a {type(x).__name__}"
    return short(repr(x), 40)


def _type_name(x: Any) -> str:
    x = x() if isinstance(x, weakref.ref) else x
    return (
        "module" if isinstance(x, nn.Module) else "tensor" if x is None or isinstance(x, Tensor) else type(x).__name__
    )


def _installed(kind: type) -> bool:
    """Whether a class is of an installed package, whose functions nobody changes."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return any(part in path for part in _LIBRARIES)


def _is_of_library(x: Any) -> bool:
    name = x.__globals__.get("__name__") if isinstance(x, FunctionType) else getattr(type(x), "__module__", "")
    name = x.__module__ if isinstance(x, type) else name
    name = vars(x).get("__name__") if isinstance(x, ModuleType) else name
    return str(name).partition(".")[0] in _OURS


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions which it defines."""
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _codes(x)


def _readers(f: FunctionType) -> Iterator[tuple[str, Read]]:
    """Yields the closure variables, globals and defaults that a function names, with readers."""
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        yield name, functools.partial(getattr, cell, "cell_contents")
    if _is_of_library(f):
        return
    names = dict.fromkeys(name for code in _codes(f.__code__) for name in code.co_names)
    yield from ((name, functools.partial(operator.getitem, f.__globals__, name)) for name in names)
    parameters, count = f.__code__.co_varnames[: f.__code__.co_argcount], len(f.__defaults__ or ())
    for i, name in enumerate(parameters[len(parameters) - count :]):
        yield name, functools.partial(_then, operator.itemgetter(i), functools.partial(getattr, f, "__defaults__"))
    for name in f.__kwdefaults__ or ():
        yield name, functools.partial(_then, operator.itemgetter(name), functools.partial(getattr, f, "__kwdefaults__"))


def _readable_values(reads: Iterator[tuple[str, Read]]) -> Iterator[Any]:
    """Yields the values that can be read.

    A cell may not be set yet, and a name may be one of an attribute.
    """
    for _, read in reads:
        with contextlib.suppress(ValueError, KeyError):
            yield read()


def _looked(name: str, read: Read, named: set[str], inside: bool = False) -> Iterator[tuple[Any, ...]]:
    """The values in one thing that a function names."""
    try:
        x = read()
    except (ValueError, KeyError, AttributeError):
        return
    if isinstance(x, (*_PLAIN, *_FUNCTIONS)) or (inside and _is_plain(x)):
        yield name, x, read
    elif isinstance(x, Tensor):
        yield name, weakref.ref(x), read
    elif isinstance(x, nn.Module) or isinstance(_attributes(x).get("module"), nn.Module):
        module = x if isinstance(x, nn.Module) else _attributes(x)["module"]
        yield name, weakref.ref(x), read
        for where, reread, *parts in _in_module(name, module) if _ready(module) else ():
            with contextlib.suppress(Exception):  # of an object that cannot be looked at
                yield where, reread(), reread, *parts
    elif inside or (_is_of_library(x) and not isinstance(x, (type, ModuleType, list, tuple, dict, functools.partial))):
        reread = functools.partial(_then, functools.partial(_noted, named=frozenset(named)), read)
        yield name, reread(), reread
    elif isinstance(x, (list, tuple, dict)) and len(x) <= _MOST:
        for key in list(x) if isinstance(x, dict) else range(len(x)):
            reread = functools.partial(_then, operator.itemgetter(key), read)
            yield from _looked(f"{name}[{key!r}]", reread, named, inside=True)
        if isinstance(x, list):
            yield f"len({name})", len(x), functools.partial(_then, len, read)
    elif isinstance(x, functools.partial):
        for part in ("func", "args", "keywords"):
            yield from _looked(f"{name}.{part}", functools.partial(_then, operator.attrgetter(part), read), named)
    elif not isinstance(x, type) and not _is_of_library(x):
        kind: Any = type(x)
        for key in sorted(named & (_attributes(x).keys() | _class_names(kind))):
            reread = functools.partial(_then, functools.partial(_attribute_of, key), read)
            yield from _looked(f"{name}.{key}", reread, named, inside=True)


def _in_module(name: str, module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yields the state of a module and its submodules, with one reader for each attribute name."""
    parts = {f"{name}.{path}" if path else name: part for path, part in module.named_modules()}
    kinds: list[Any] = list(dict.fromkeys(map(type, parts.values())))
    of_class = {kind: _of_class(kind) for kind in kinds}
    having: dict[str, list[str]] = {}
    for where, part in parts.items():
        kind: Any = type(part)
        for key in sorted((vars(part).keys() & _read_by(kind) - _OF_TORCH).union(of_class[kind])):
            having.setdefault(key, []).append(where)
    named = frozenset[str]().union(*map(_read_by, kinds))
    for key, owners in having.items():
        attribute_dicts = [vars(parts[where]) for where in owners]
        plain = all(_is_plain(attributes.get(key)) for attributes in attribute_dicts)
        read: Read = (
            functools.partial(_values_of, attribute_dicts, key)
            if plain
            else functools.partial(_each_noted, attribute_dicts, key, named)
        )
        yield f"{name}.{key}", read, tuple([f"{where}.{key}" for where in owners])
    for kind, class_keys in of_class.items():
        for key in class_keys:
            yield f"{kind.__qualname__}.{key} of {name}", functools.partial(inspect.getattr_static, kind, key)
    for member_kind, keys in _INSIDE.items():
        members = [(where, vars(part)[key]) for where, part in parts.items() for key in keys]
        read = functools.partial(_references, [attributes for _, attributes in members])
        yield (
            f"the {member_kind} of {name}",
            read,
            tuple([f"{where}.{key}" for where, attributes in members for key in attributes]),
        )
    hooks = [vars(part)[key] for part in parts.values() for key in _HOOKS]
    read = functools.partial(_hooks, hooks + [_MODULES.get(f"_global{key}", {}) for key in _HOOKS])
    yield f"the hooks of {name}", read


def _of_class(kind: Any) -> list[str]:
    """The functions and numbers of a module's class that its `forward` may use; of a library's class, itself alone."""
    is_user_class = not (_is_of_library(kind) or _installed(kind))
    keys = {"forward", *(_read_by(kind) & {*dir(kind)} - {*dir(nn.Module)} if is_user_class else ())}
    attributes = {key: inspect.getattr_static(kind, key, None) for key in sorted(keys)}
    return [key for key, x in attributes.items() if isinstance(x, _FUNCTIONS) or _is_plain(x)]


def _ready(x: Any) -> bool:
    """Whether this is a module of modules that are initialized."""
    try:
        return isinstance(x, nn.Module) and len(list(x.modules())) > 0
    except AttributeError:
        return False


def _is_plain(x: Any) -> bool:
    """Whether this is a number or the like, or a tuple of such."""
    return type(x) in _PLAIN or (type(x) is tuple and all(type(y) in _PLAIN for y in x))


@functools.lru_cache(maxsize=1024)
def _read_by(kind: Any, methods: frozenset[str] = frozenset({"forward"})) -> frozenset[str]:
    """The names of attributes in an object's methods that are called, in its special ones, and in those they name."""
    named, classes = {"training", "forward"}, kind.__mro__[:-1]
    special = {name for c in classes if c is not nn.Module for name in vars(c) if name.startswith("__")}
    todo = [*methods, *(("__call__",) if _installed(kind) else special - _NOT_CALLED)]
    while todo:
        name = todo.pop()
        attribute = next((vars(c)[name] for c in classes if c is not nn.Module and name in vars(c)), None)
        f = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
        if isinstance(f, FunctionType):
            names = {x for code in _codes(f.__code__) for x in code.co_names}
            todo += names - named
            named |= names
    return frozenset(named)


def _values_of(owners: list[dict[str, Any]], key: str) -> tuple[Any, ...]:
    return tuple([attributes.get(key, _GONE) for attributes in owners])


def _each_noted(owners: list[dict[str, Any]], key: str, named: frozenset[str]) -> tuple[Any, ...]:
    """As `_each`; what several have, such as a configuration, is looked through once."""
    notes: dict[int, Any] = {}
    return tuple(
        [notes[id(x)] if id(x) in notes else notes.setdefault(id(x), _noted(x, named)) for x in _values_of(owners, key)]
    )


def _references(owners: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The tensors or modules in these dicts, of which most may be empty."""
    return tuple([None if x is None else weakref.ref(x) for members in filter(None, owners) for x in members.values()])


def _hooks(owners: list[dict[str, Any]]) -> tuple[Any, ...]:
    hooks = [x for hook_dict in filter(None, owners) for x in hook_dict.values()]
    return tuple([_noted(x, frozenset()) for x in hooks if getattr(x, "__module__", "") != _NOTING])


def _noted(x: Any, named: frozenset[str]) -> Any:
    """Returns a comparable form of a value: weak references for tensors and modules, tuples for containers.

    Of an object, these are the attributes that some function names, or a method of its own that is called.
    """
    left = [_MOST]

    def note(x: Any, named: frozenset[str]) -> Any:
        left[0] -= 1
        kind: Any = type(x)
        if kind in _PLAIN or isinstance(x, (*_FUNCTIONS, type, ModuleType, Enum)):
            return x
        if isinstance(x, (list, tuple, set, frozenset, dict, deque)):
            if len(x) > left[0]:
                return kind, len(x)
            items = x.items() if isinstance(x, dict) else sorted(x, key=repr) if isinstance(x, (set, frozenset)) else x
            return (kind, *[note(y, named) for y in items])
        if isinstance(x, np.ndarray) and x.nbytes <= _LARGEST:
            return x.shape, str(x.dtype), x.tobytes()
        if isinstance(x, functools.partial):
            return (kind, *[note(y, named) for y in (x.func, x.args, x.keywords)])
        if isinstance(x, MethodType):
            return x.__func__, note(x.__self__, named | {x.__func__.__name__})
        if isinstance(x, (Tensor, nn.Module, np.ndarray)) or _is_of_library(x):
            try:
                return weakref.ref(x)
            except TypeError:
                return x
        if left[0] <= 0:
            return kind
        named = named | _read_by(kind, named)
        names = sorted(named & (_attributes(x).keys() | _class_names(kind)))
        return (kind, *[(name, note(_own_if_set(name, x), named)) for name in names])

    return note(x, named)


@functools.lru_cache(maxsize=1024)
def _class_names(kind: Any) -> frozenset[str]:
    """The names of what a class and those that it comes from have."""
    return frozenset[str]().union(*map(vars, kind.__mro__[:-1]))


def _then(get: Callable[[Any], Any], read: Read) -> Any:
    return get(read())


def _attribute_of(key: str, x: Any) -> Any:
    """An attribute of an object or its class; no property is run."""
    for names in (_attributes(x), *map(vars, type(x).__mro__)):
        if key in names:
            return names[key].__get__(x) if isinstance(names[key], MemberDescriptorType) else names[key]
    raise AttributeError(key)


def _own_if_set(key: str, x: Any) -> Any:
    try:
        return _attribute_of(key, x)
    except AttributeError:
        return _GONE


def _attributes(x: Any) -> dict[str, Any]:
    """An object's own attributes; looking at them runs nothing of the object's."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(x, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes


def _functions(step: Any) -> Iterator[tuple[FunctionType, list[tuple[str, Read]]]]:
    """The functions that a step may call, as far as they can be seen, and the objects to which they are bound."""
    todo, visited = deque([step]), dict[Any, Any]()
    while todo and len(visited) < _MOST:
        x = todo.popleft()
        called = inspect.getattr_static(type(x), "__call__", None)
        method = MethodType(called, x) if isinstance(called, FunctionType) and not _is_of_library(x) else x
        f, owner = (method.__func__, method.__self__) if isinstance(method, MethodType) else (method, None)
        module = isinstance(owner, nn.Module)
        key = (id(f), type(owner) if module else id(owner)) if isinstance(f, FunctionType) else id(x)
        if key in visited:
            continue
        visited[key] = x, f, owner
        if isinstance(x, functools.partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, (list, tuple)) and len(x) <= _MOST:
            todo += filter(callable, x)
        elif isinstance(f, FunctionType):
            code = f.__name__ + ".__code__", functools.partial(getattr, f, "__code__")
            bound = [] if owner is None or module else [("self", functools.partial(getattr, method, "__self__"))]
            yield f, [*bound, code]
            names = f.__code__.co_names if owner is not None else ()
            methods = [inspect.getattr_static(type(owner), name, None) for name in names]
            methods = [m.fget if isinstance(m, property) else m for m in methods]
            todo += [
                *_readable_values(_readers(f)),
                *(MethodType(m, owner) for m in methods if isinstance(m, FunctionType)),
            ]
        todo += [*_forwards(x), *filter(callable, [_attributes(x).get("__wrapped__")])]


def _forwards(x: Any) -> list[MethodType]:
    """The functions that compute a module and those in it, one for each class that is of no library."""
    module: Any = x if isinstance(x, nn.Module) else _attributes(x).get("module")
    part_by_class = {type(part): part for part in module.modules()} if _ready(module) else {}
    forwards = [(inspect.getattr_static(kind, "forward", None), part) for kind, part in part_by_class.items()]
    user_forwards = [(f, part) for f, part in forwards if not (_is_of_library(type(part)) or _installed(type(part)))]
    return [MethodType(f, part) for f, part in user_forwards if isinstance(f, FunctionType)]
