"""Saves and restores the hidden inputs of a layer's forward: attributes and Python's random state.

A stage may run its function again, for its gradient, after these have changed; and a failed call must undo its changes.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.compat import functorch
from shardfn.interop.refusals import OF_TORCH

_PLAIN = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_OF_TORCH = {*vars(nn.Module()), "forward", "_flat_weights", "_flat_weight_refs"}


class Attribute(NamedTuple):
    """A module's `__dict__`, the name of an attribute in it, and whether forward assigns another tensor to it."""

    own: dict[str, Any]
    name: str
    rebound: bool = False


class Attributes:
    """Attributes of the modules of one stage: `training` of all, and those that their forwards have changed.

    In the first run in each mode, all attributes are compared before and after, to find the latter.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.owners = [vars(m) for m in modules]
        self.changed: list[Attribute] = []
        self.drawn: list[RandomSource] = []
        self.looked: set[tuple[bool, ...]] = set()

    def present_state(self) -> Before:
        """The present state, at the beginning of a call of the stage."""
        training = tuple([attrs["training"] for attrs in self.owners])
        if training in self.looked:
            return Before(self, training, self.changed, self.drawn)
        places = [
            Attribute(attrs, name)
            for attrs in self.owners
            for name, value in attrs.items()
            if name not in _OF_TORCH and _is_restorable(value)
        ]
        return Before(self, training, places, _sources())


@contextlib.contextmanager
def undone(attributes: Attributes) -> Iterator[None]:
    """A context that restores attributes if its block fails, including the contents of containers and tensors."""
    before, owned = attributes.present_state(), [dict(attrs) for attrs in attributes.owners]
    filled = [(x, copy.copy(x)) for attrs in owned for x in _fillable(attrs)]
    try:
        with before.restoring():
            yield
    except BaseException:
        for attrs, values in zip(attributes.owners, owned, strict=True):
            attrs.clear()
            attrs.update(values)
        _refill([*filled, *before.contents])
        before.refill_tensors()
        raise


class Before:
    """The state when a stage was called, with which each run of its function begins.

    The first run keeps its changes, later ones undo theirs. Lists, dicts and sets remain the same objects, since others
    may refer to them: their contents are replaced.
    """

    def __init__(
        self, attributes: Attributes, training: tuple[bool, ...], places: list[Attribute], sources: list[RandomSource]
    ) -> None:
        self.of, self.training, self.places, self.sources = attributes, training, places, sources
        self.values = [_snapshot(attrs.get(name), rebound) for attrs, name, rebound in places]
        self.contents = _contents(self.values)
        self.states = [source.get() for source in sources]
        self.marks = [] if training in attributes.looked else [_mark(attrs[name]) for attrs, name, _ in places]
        self.ran = False

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """A context in which the stage's function runs on this state."""
        if not self.ran:
            self.ran = True
            yield
            if self.training not in self.of.looked:
                self._record_changes()
            return
        places = [*(Attribute(attrs, "training") for attrs in self.of.owners), *self.places]
        previous = [attrs.get(name) for attrs, name, _ in places]
        contents = _contents([*previous, *self.values])
        states = [source.get() for source in self.sources]
        values = [_snapshot(x, place.rebound) for place, x in zip(self.places, self.values, strict=True)]
        _restore_values(places, [*self.training, *values], self.contents)
        _draw_from(self.sources, self.states)
        try:
            yield
        finally:
            _restore_values(places, previous, contents)
            _draw_from(self.sources, states)

    def refill_tensors(self) -> None:
        """Restores the values of tensors that forward writes into."""
        for (attrs, name, rebound), value in zip(self.places, self.values, strict=True):
            if isinstance(value, Tensor) and not rebound:
                with torch.no_grad():
                    attrs[name].copy_(value)

    def _record_changes(self) -> None:
        """Records what the first run in this mode changed."""
        changed = [
            place._replace(rebound=place.own.get(place.name) is not mark[0])
            for place, mark in zip(self.places, self.marks, strict=True)
            if _is_changed(place, mark)
        ]
        recorded = {(id(attrs), name) for attrs, name, _ in self.of.changed}
        self.of.changed = [*self.of.changed, *(new for new in changed if (id(new.own), new.name) not in recorded)]
        sources = [s for s, state in zip(self.sources, self.states, strict=True) if str(s.get()) != str(state)]
        self.of.drawn = [*self.of.drawn, *(s for s in sources if s not in self.of.drawn)]
        self.of.looked.add(self.training)
        self.marks = []


class RandomSource(NamedTuple):
    """A generator of random numbers outside of torch."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


def _sources() -> list[RandomSource]:
    numpy = sys.modules.get("numpy")
    of_numpy = [RandomSource(numpy.random.get_state, numpy.random.set_state)] if numpy is not None else []
    return [RandomSource(random.getstate, random.setstate), *of_numpy]


def _is_restorable(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not functorch.wrapped(x) and not x.is_inference()
    return isinstance(x, _PLAIN) or type(x) in _CONTAINERS


def _snapshot(x: Any, rebound: bool) -> Any:
    """A copy of a tensor that later writes by the module do not change; anything else unchanged."""
    if isinstance(x, Tensor) and _is_restorable(x):
        return x.detach() if rebound else x.detach().clone()
    return x


def _contents(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The lists, dicts and sets among values and inside them, each with a shallow copy."""
    pending, copies = list(values), dict[int, tuple[Any, Any]]()
    while pending:
        value = pending.pop()
        if type(value) in _CONTAINERS and id(value) not in copies:
            copies[id(value)] = value, copy.copy(value)
            pending += value.values() if isinstance(value, dict) else value
    return list(copies.values())


def _fillable(attrs: dict[str, Any]) -> list[Any]:
    """The containers among a module's attributes that forward may fill; hooks belong to torch and are left out."""
    values = [attrs[name] for name in attrs.keys() - _OF_TORCH]
    return [attrs[name] for name in OF_TORCH] + [x for x in values if type(x) in _CONTAINERS]


def _refill(contents: Iterable[tuple[Any, Any]]) -> None:
    for x, values in contents:
        if not _same_items(x, values):
            x.clear()
            (x.extend if isinstance(x, (list, deque)) else x.update)(values)


def _mark(x: Any) -> Any:
    """A snapshot to compare with later, to notice a change."""
    if isinstance(x, Tensor):
        return x, x._version
    return x, _contents([x])


def _is_changed(place: Attribute, mark: Any) -> bool:
    current, (before, state) = place.own.get(place.name), mark
    if current is not before:
        return True
    if isinstance(current, Tensor):
        return current._version != state
    return not all(_same_items(x, values) for x, values in state)


def _same_items(first: Any, second: Any) -> bool:
    both = [list(x.items()) if isinstance(x, dict) else [(None, y) for y in x] for x in (first, second)]
    return len(first) == len(second) and all(a is b and k is l for (k, a), (l, b) in zip(*both, strict=True))


def _restore_values(places: list[Attribute], values: list[Any], contents: list[tuple[Any, Any]]) -> None:
    for (attrs, name, _), value in zip(places, values, strict=True):
        attrs[name] = value
    _refill(contents)


def _draw_from(sources: list[RandomSource], states: list[Any]) -> None:
    for source, state in zip(sources, states, strict=True):
        source.put(state)
