"""Puts parameters, some of them adapted, buffers and other forwards into a module while it runs, and restores it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfn.compat import functorch, replacing
from shardfn.compat.autograd import storage_of
from shardfn.interop.placeholder import ModulePart, Slot, left_in, placed
from shardfn.interop.tensor_checks import Following, ShardedModules
from shardfn.mesh.scope import current_mesh, scope_of
from shardfn.mesh.spec import joined
from shardfn.quoting import listed
from shardfn.shards.layout import Layout, assemble, flat_shards, is_stage, stage_shards
from shardfn.stages.written import first_written, sums_of


@contextlib.contextmanager
def along_tensor(
    region: ShardedModules | None, module: nn.Module, arguments: Sequence[Any], loose: ModulePart, params: Any
) -> Iterator[Following | None]:
    """Binds axis names to the parameters' mesh for loose code that is sharded by `tensor`, as inside stages."""
    if region is None:
        yield None
        return
    shards = flat_shards(params) if current_mesh() is None else []
    with (
        scope_of(shards[0].layout.grid, "the model") if shards else contextlib.nullcontext(),
        region.entered(module.training, arguments, [*loose.own, *loose.shared], retrace=False) as followed,
    ):
        yield followed


def arguments(params: Any, part: ModulePart, adapters: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a stage's function: its own parameters, those that others read too, and any adapters."""
    parameters = params.get(part.path, {}), {key: params[key] for key in part.shared_keys()}
    return (*parameters, adapters[part.path]) if part.path in adapters else parameters


def unstaged_parameters(own: Mapping[str, Tensor], shared: Mapping[str, Tensor], *adapters: Any) -> tuple[Any, ...]:
    """The function of the stage that gathers unstaged parameters; messages show its name."""
    copied = {name: x.clone() for name, x in (*own.items(), *shared.items())}
    return copied, *(optree.tree_map(torch.clone, part) for part in adapters)


@contextlib.contextmanager
def loose_in_place(
    adapting: Adapting,
    values: Mapping[str, Tensor],
    adapters: Sequence[Any],
    buffers: Mapping[str, Tensor],
    changing: frozenset[str],
    lent_ids: set[int],
    compare_bytes: bool,
) -> Iterator[dict[str, Tensor]]:
    """A context with loose parameters and all buffers in their places; yields the buffers that changed.

    With `compare_bytes`, the bytes of parameters are compared as well, which shows writes that bypass autograd,
    through `.data`. The ids of the values in the places are added to `lent_ids`.

    Raises:
        RuntimeError: a parameter was written to.
    """
    loose = adapting.part
    slots = [*loose.own, *loose.shared]
    versions = {key: x._version for key, x in values.items() if not x.is_inference()}
    memory = {key: memory_of(x) for key, x in values.items()}
    values_before = {key: x.detach() for key, x in values.items()} if compare_bytes else {}
    sums = sums_of(values_before.values())
    with (
        adapting.placed(slots, [values[slot.key] for slot in slots], adapters) as pairs,
        buffers_in_place(loose, buffers, changing) as changed,
    ):
        lent_ids.update(id(value) for _, value in pairs)
        yield changed
        written = (slot for slot, value in pairs if left_in(loose, slot) is not value)
        stray = next((key for key, x in versions.items() if values[key]._version != x), None)
        stray = stray or next((key for key, x in memory.items() if memory_of(values[key]) != x), None)
        if stray is None and (index := first_written([*values_before.values()], sums)) is not None:
            stray = [*values_before][index]
        if (slot := next(written, None)) or stray:
            raise RuntimeError(
                f"the module writes into its parameter {slot.key if slot else stray}, which would be lost: during a "
                f"call it is a copy. Compute a new tensor in forward, and change parameters outside of the model"
            )


@contextlib.contextmanager
def buffers_in_place(
    part: ModulePart, values: Mapping[str, Tensor], changing: Collection[str]
) -> Iterator[dict[str, Tensor]]:
    """A context with buffers in their places; yields a dict in which those that may change, as copies, are collected.

    Raises:
        RuntimeError: another buffer was changed.
    """
    changed: dict[str, Tensor] = {}
    copies = {key: x.clone() if key in changing else x for key, x in values.items()}
    versions = {key: x._version for key, x in copies.items() if key not in changing and not x.is_inference()}
    memory = {key: memory_of(x) for key, x in copies.items() if key not in changing}
    with placed(part.buffers, [copies[slot.key] for slot in part.buffers]):
        yield changed
        for holder, attr, key in part.buffers:
            current = holder[attr]
            if key in changing:
                if key not in changed or current is not copies[key]:  # a buffer may have several places
                    changed[key] = current.detach()
            elif (
                current is not copies[key]
                or current._version != versions.get(key, current._version)
                or memory_of(current) != memory[key]
            ):
                raise RuntimeError(
                    f"{part.path or 'the module'} writes into its buffer {key}, which would be lost: pass "
                    f"mutable_buffers=[{key!r}] to functional, and take the buffers back from each call"
                )


def memory_of(x: Tensor) -> int:
    """The address of a tensor's storage, which assigning to `.data` changes; 0 where it is not available."""
    if torch.compiler.is_compiling() or x.layout is not torch.strided:
        return 0
    return storage_of(functorch.unwrapped(x))


@contextlib.contextmanager
def replaced(name: str, values: Mapping[nn.Module, Any]) -> Iterator[None]:
    """A context that sets an attribute of modules; a parameter of that name stays registered."""
    before: dict[nn.Module, Any] = {m: m.__dict__.get(name) for m in values}
    for m, value in values.items():
        m.__dict__[name] = value
    try:
        yield
    finally:
        for m, previous in before.items():
            if previous is None:
                m.__dict__.pop(name, None)
            else:
                m.__dict__[name] = previous


def unasked(module: nn.Module) -> Callable[[], Any]:
    """A context factory that ignores assignments to `requires_grad`, for models of `transformers` that make them."""
    # They ask for gradients for their own checkpointing; a stage would take such a tensor for one not given to it.
    asks = any(hasattr(m, "_requires_grad") for m in module.modules())
    return _IgnoringRequiresGrad if asks else contextlib.nullcontext


class _IgnoringRequiresGrad(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func == _SET_REQUIRES_GRAD else func(*args, **(kwargs or {}))


_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def uncached(module: nn.Module) -> Callable[[], Any]:
    """A context factory that keeps torch's cache of parametrised weights from being used across calls.

    peft parametrises the parameters of experts in forward, by its layers' `_activate_lora`.
    """
    kind = nn.utils.parametrize.ParametrizationList
    parametrised = any(isinstance(m, kind) or hasattr(m, "_activate_lora") for m in module.modules())
    return replacing.without_parametrize_cache if parametrised else contextlib.nullcontext


# --- adapters ---


class _Home(NamedTuple):
    path: str
    module: nn.Module


class Adapting:
    """Puts parameters into the places of one part of a module, some of them adapted.

    Adapters are keyed by names within the part's module. A tensor under a parameter's name replaces the parameter. Any
    other object, under a parameter's name or a module's path, computes the adapted parameter, or the module's weight,
    by `adapter.apply_to(weight, training)`; before that, `adapter.misfit(module, parameter)` tells what
    is wrong with it.
    """

    def __init__(self, part: ModulePart) -> None:
        self.part = part
        self.homes = {id(m._parameters): _Home(path, m) for path, m in part.module.named_modules()}
        self.known: dict[int, Layout] = {}

    def check(self, adapters: Any) -> None:
        """Raises ValueError for adapters of other weights; adapters with known layouts are checked only once."""
        flats = stage_shards(adapters) if is_stage(adapters) else []
        if flats and all(id(flat.layout) in self.known for flat in flats):
            return
        structure = meta_structure([flat.layout for flat in flats]) if flats else adapters
        where = self.part.path or "the module"
        if not isinstance(structure, Mapping):
            raise ValueError(f"adapters: those of {where} must be a dict by name, got {type(structure).__name__}")
        for home in self.homes.values():
            if misfit := _misfit(home, structure):
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
            adapter: Any = adapters.get(name)
            if isinstance(adapter, Tensor) or hasattr(adapter, "apply_to"):
                used.add(name)
                adapted = adapter if isinstance(adapter, Tensor) else adapter.apply_to(value, home.module.training)
                pairs.append((slot, adapted))
            elif slot.at == "weight" and home.path in adapters:
                used.add(home.path)
                weights[home.module] = adapters[home.path].apply_to(value, home.module.training)
            else:
                pairs.append((slot, value))
        if other_places:
            pairs += self._elsewhere(other_places, slots, pairs, weights)
        if unused := set(adapters) - used:
            raise ValueError(
                f"adapters: {self.part.path or 'the module'} has no parameter for {listed(map(repr, sorted(unused)))}"
            )
        # A parameter itself stays a placeholder, which cannot be read.
        with placed([slot for slot, _ in pairs], [value for _, value in pairs]), replaced("weight", weights):
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


def meta_structure(layouts: Sequence[Layout]) -> Any:
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
