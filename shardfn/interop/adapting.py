"""What stands in the places of a module's parameters while adapters are on them."""

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

    Adapters are by name, as the part's module calls things: a tensor under the name of a parameter replaces it. What
    else stands there, or under the path of a module, is asked for what the parameter, or the module's weight, becomes,
    `adapter.on(weight, training)`, and before that for what is wrong with it, `adapter.misfit(module, parameter)`.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self.homes = {id(m._parameters): _Home(path, m) for path, m in part.module.named_modules()}
        self.known: dict[int, Layout] = {}

    def check(self, adapters: Any) -> None:
        """Raises ValueError for adapters of other weights than are there; those of a layout are looked at once."""
        flats = stage_shards(adapters) if is_stage(adapters) else []
        if flats and all(id(flat.layout) in self.known for flat in flats):
            return
        like = described([flat.layout for flat in flats]) if flats else adapters
        where = self.part.path or "the module"
        if not isinstance(like, Mapping):
            raise ValueError(f"adapters: those of {where} are a dict by name, not of type {type(like).__name__}")
        for home in self.homes.values():
            if wrong := _misfit(home, like):
                name, how = wrong
                raise ValueError(
                    f"adapters: {joined(self.part.path, name)} is {how}: are these adapters of another model?"
                )
        self.known |= {id(flat.layout): flat.layout for flat in flats}

    def placed(
        self, slots: Sequence[Slot], values: Sequence[Tensor], adapters: Sequence[Mapping[str, Any]]
    ) -> contextlib.AbstractContextManager[Sequence[tuple[Slot, Tensor]]]:
        """The parameters in their places while a block runs, with the adapters of this part, if it has some.

        Returns:
            A context, which gives what is in which place.

        Raises:
            ValueError: an adapter of something that is not there.
        """
        return self._adapted(slots, values, *adapters) if adapters else _plainly(slots, values)

    @contextlib.contextmanager
    def _adapted(
        self, slots: Sequence[Slot], values: Sequence[Tensor], adapters: Mapping[str, Any]
    ) -> Iterator[Sequence[tuple[Slot, Tensor]]]:
        plain: list[tuple[Slot, Any]] = []
        instead: dict[nn.Module, Any] = {}
        elsewhere: list[tuple[Slot, Tensor]] = []
        used = set()
        for slot, value in zip(slots, values, strict=True):
            home = self.homes.get(id(slot.holder))
            if home is None:
                elsewhere.append((slot, value))
                continue
            name = joined(home.path, slot.at)
            one: Any = adapters.get(name)
            if isinstance(one, Tensor) or hasattr(one, "on"):
                used.add(name)
                plain.append((slot, one if isinstance(one, Tensor) else one.on(value, home.module.training)))
            elif slot.at == "weight" and home.path in adapters:
                used.add(home.path)
                instead[home.module] = adapters[home.path].on(value, home.module.training)
            else:
                plain.append((slot, value))
        if elsewhere:
            plain += self._elsewhere(elsewhere, slots, plain, instead)
        if lost := set(adapters) - used:
            raise ValueError(
                f"adapters: {self.part.path or 'the module'} has no parameter for {listed(map(repr, sorted(lost)))}"
            )
        with placed([slot for slot, _ in plain], [value for _, value in plain]), _attributes(instead):
            yield plain

    def _elsewhere(
        self,
        names: Sequence[tuple[Slot, Tensor]],
        slots: Sequence[Slot],
        plain: Sequence[tuple[Slot, Any]],
        instead: Mapping[nn.Module, Any],
    ) -> list[tuple[Slot, Any]]:
        """What parameters are where the module has them by another name, in a list say: what they are in their layers.

        Raises:
            ValueError: they are not the same in all layers.
        """
        meant: dict[str, list[Any]] = {}
        for slot, value in plain:
            meant.setdefault(slot.key, []).append(value)
        for slot in slots:
            home = self.homes.get(id(slot.holder))
            if home is not None and slot.at == "weight" and home.module in instead:
                meant.setdefault(slot.key, []).append(instead[home.module])
        for slot, value in names:
            now = meant.setdefault(slot.key, [value])
            if any(one is not now[0] for one in now):
                raise ValueError(
                    f"adapters: {self.part.path or 'the module'} has {slot.key} in a {type(slot.holder).__name__} too, "
                    f"and of the layers that are tied to it some have an adapter: let forward read it from a layer"
                )
        return [(slot, meant[slot.key][0]) for slot, _ in names]


def described(layouts: Sequence[Layout]) -> Any:
    """A stage's parameters without values, by the layouts of its flat shards."""
    views = [
        [torch.empty(layout.whole_shape(i), dtype=layout.dtype, device="meta") for i in range(len(layout.entries))]
        for layout in layouts
    ]
    return assemble(layouts, views)


def _misfit(home: _Home, adapters: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of a parameter for which there is something else, and what is wrong with that."""
    for attribute, parameter in home.module._parameters.items():
        name = joined(home.path, attribute)
        one: Any = adapters.get(name)
        if parameter is not None and isinstance(one, Tensor) and one.shape != parameter.shape:
            return name, f"of shape {list(parameter.shape)}, and what replaces it {list(one.shape)}"
        if parameter is not None and hasattr(one, "misfit") and (how := one.misfit(home.module, attribute)):
            return name, how
    one = adapters.get(home.path)
    how = one.misfit(home.module) if one is not None and hasattr(one, "misfit") else ""
    return (home.path, how) if how else None


@contextlib.contextmanager
def _plainly(slots: Sequence[Slot], values: Sequence[Tensor]) -> Iterator[Sequence[tuple[Slot, Tensor]]]:
    with placed(slots, values):
        yield list(zip(slots, values, strict=True))


@contextlib.contextmanager
def _attributes(weights: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Modules with something else as their weight; the parameter itself stays a placeholder, which nobody can read."""
    for m, weight in weights.items():
        m.__dict__["weight"] = weight
    try:
        yield
    finally:
        for m in weights:
            m.__dict__.pop("weight", None)


def cloned(adapters: Any) -> Any:
    """Copies of a part's adapters."""
    return optree.tree_map(torch.clone, adapters)
