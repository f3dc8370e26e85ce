"""Puts parameters, with adapters applied to them, into a module's places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from shardfn.interop.placeholder import Part, Slot, placed
from shardfn.mesh.spec import joined
from shardfn.quoting import listed
from shardfn.shards.layout import Layout, assemble, is_stage, stage_shards


class _Home(NamedTuple):
    path: str
    module: nn.Module


class Adapting:
    """Puts parameters into the places of one part of a module, some of them adapted.

    Adapters are keyed by names within the part's module. A tensor under a parameter's name replaces the parameter. Any
    other object, under a parameter's name or a module's path, computes the adapted parameter, or the module's weight,
    by `adapter.on(weight, training)`; before that, `adapter.misfit(module, parameter)` tells what is wrong with it.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self.homes = {id(m._parameters): _Home(path, m) for path, m in part.module.named_modules()}
        self.known: dict[int, Layout] = {}

    def check(self, adapters: Any) -> None:
        """Raises ValueError for adapters of other weights; adapters with known layouts are checked only once."""
        flats = stage_shards(adapters) if is_stage(adapters) else []
        if flats and all(id(flat.layout) in self.known for flat in flats):
            return
        like = described([flat.layout for flat in flats]) if flats else adapters
        where = self.part.path or "the module"
        if not isinstance(like, Mapping):
            raise ValueError(f"adapters: those of {where} are a dict by name, not of type {type(like).__name__}")
        for home in self.homes.values():
            if misfit := _misfit(home, like):
                name, problem = misfit
                raise ValueError(
                    f"adapters: {joined(self.part.path, name)} is {problem}: are these adapters of another model?"
                )
        self.known |= {id(flat.layout): flat.layout for flat in flats}

    def placed(
        self, slots: Sequence[Slot], values: Sequence[Tensor], adapters: Sequence[Mapping[str, Any]]
    ) -> contextlib.AbstractContextManager[Sequence[tuple[Slot, Tensor]]]:
        """A context with the parameters in their places, adapted if this part has adapters.

        Returns:
            The context, which yields pairs of place and value.

        Raises:
            ValueError: an adapter has no parameter or module.
        """
        return self._adapted(slots, values, *adapters) if adapters else _unadapted(slots, values)

    @contextlib.contextmanager
    def _adapted(
        self, slots: Sequence[Slot], values: Sequence[Tensor], adapters: Mapping[str, Any]
    ) -> Iterator[Sequence[tuple[Slot, Tensor]]]:
        pairs: list[tuple[Slot, Any]] = []
        weights: dict[nn.Module, Any] = {}
        other_places: list[tuple[Slot, Tensor]] = []
        used = set()
        for slot, value in zip(slots, values, strict=True):
            home = self.homes.get(id(slot.holder))
            if home is None:
                other_places.append((slot, value))
                continue
            name = joined(home.path, slot.at)
            own: Any = adapters.get(name)
            if isinstance(own, Tensor) or hasattr(own, "on"):
                used.add(name)
                pairs.append((slot, own if isinstance(own, Tensor) else own.on(value, home.module.training)))
            elif slot.at == "weight" and home.path in adapters:
                used.add(home.path)
                weights[home.module] = adapters[home.path].on(value, home.module.training)
            else:
                pairs.append((slot, value))
        if other_places:
            pairs += self._elsewhere(other_places, slots, pairs, weights)
        if unused := set(adapters) - used:
            raise ValueError(
                f"adapters: {self.part.path or 'the module'} has no parameter for {listed(map(repr, sorted(unused)))}"
            )
        with placed([slot for slot, _ in pairs], [value for _, value in pairs]), _attributes(weights):
            yield pairs

    def _elsewhere(
        self,
        places: Sequence[tuple[Slot, Tensor]],
        slots: Sequence[Slot],
        pairs: Sequence[tuple[Slot, Any]],
        weights: Mapping[nn.Module, Any],
    ) -> list[tuple[Slot, Any]]:
        """The adapted values for further places of the same parameters, such as a list of the module's own.

        Raises:
            ValueError: tied layers have different values.
        """
        adapted: dict[str, list[Any]] = {}
        for slot, value in pairs:
            adapted.setdefault(slot.key, []).append(value)
        for slot in slots:
            home = self.homes.get(id(slot.holder))
            if home is not None and slot.at == "weight" and home.module in weights:
                adapted.setdefault(slot.key, []).append(weights[home.module])
        for slot, value in places:
            values = adapted.setdefault(slot.key, [value])
            if any(other is not values[0] for other in values):
                raise ValueError(
                    f"adapters: {self.part.path or 'the module'} has {slot.key} in a {type(slot.holder).__name__} too, "
                    f"and of the layers that are tied to it some have an adapter: let forward read it from a layer"
                )
        return [(slot, adapted[slot.key][0]) for slot, _ in places]


def described(layouts: Sequence[Layout]) -> Any:
    """The structure of a stage's parameters, on the device meta, from the layouts of its flat shards."""
    views = [
        [torch.empty(layout.whole_shape(i), dtype=layout.dtype, device="meta") for i in range(len(layout.entries))]
        for layout in layouts
    ]
    return assemble(layouts, views)


def _misfit(home: _Home, adapters: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of a parameter whose adapter does not fit, and the reason; None if all fit."""
    for attribute, parameter in home.module._parameters.items():
        name = joined(home.path, attribute)
        adapter: Any = adapters.get(name)
        if parameter is not None and isinstance(adapter, Tensor) and adapter.shape != parameter.shape:
            return name, f"of shape {list(parameter.shape)}, and what replaces it {list(adapter.shape)}"
        if parameter is not None and hasattr(adapter, "misfit") and (problem := adapter.misfit(home.module, attribute)):
            return name, problem
    adapter = adapters.get(home.path)
    problem = adapter.misfit(home.module) if adapter is not None and hasattr(adapter, "misfit") else ""
    return (home.path, problem) if problem else None


@contextlib.contextmanager
def _unadapted(slots: Sequence[Slot], values: Sequence[Tensor]) -> Iterator[Sequence[tuple[Slot, Tensor]]]:
    with placed(slots, values):
        yield list(zip(slots, values, strict=True))


@contextlib.contextmanager
def _attributes(weights: Mapping[nn.Module, Any]) -> Iterator[None]:
    """A context in which modules have other weights; the parameter itself stays a placeholder that cannot be read."""
    for m, weight in weights.items():
        m.__dict__["weight"] = weight
    try:
        yield
    finally:
        for m in weights:
            m.__dict__.pop("weight", None)


def cloned(adapters: Any) -> Any:
    """A copy of a part's adapters."""
    return optree.tree_map(torch.clone, adapters)
