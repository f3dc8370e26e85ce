"""Chooses the modules that become stages, and finds the parameters and buffers of each stage, with their names.

This is done once. Then the module is a shell: its parameters are placeholders, in whose places the values of a call are
put while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.interop.placeholder import ModulePart, Placeholder, ShellPlacement, Slot, placeholder
from shardfn.interop.refusals import aliases, refuse_shared_memory, refuse_taken
from shardfn.mesh.selectors import Chosen
from shardfn.mesh.spec import joined
from shardfn.quoting import listed

Choice = str | type[nn.Module]
Boundaries = Choice | Callable[[str, nn.Module], bool] | Iterable[Choice] | Mapping[Choice, Mapping[str, Any]]
"""Names of classes, classes, regular expressions of paths, or a predicate of a path and a module; with options: a dict
from names, classes or expressions to options of their stages."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
LOOSE = ""
"""Key of the parameters that belong to no stage, and are gathered once per call."""


@dataclass
class Anatomy:
    """The parameters and buffers taken out of a module, which is a shell now.

    Attributes:
        tree: stage path -> name -> value; a parameter that several stages read is at the top level, under its full
            name.
        names: every name that the module has for a parameter, including aliases -> its name in the tree.
        frozen: patterns for the parameters that need no gradient.
        buffers: by full name.
        same: every name that the module has for a buffer -> the key of its places.
        parts: the stages, by path.
        loose: what belongs to no stage.
        place: shared by the placeholders.
    """

    tree: dict[str, Any]
    names: dict[str, str]
    frozen: tuple[str, ...]
    buffers: dict[str, Tensor]
    same: dict[str, str]
    parts: dict[str, ModulePart]
    loose: ModulePart
    place: ShellPlacement


def taken_apart(
    module: nn.Module,
    stages: Boundaries | None,
    min_num_params: int | None,
    small: int,
    loose: Chosen,
    gather_dtype: torch.dtype | None,
    accept: Callable[[Mapping[str, nn.Module]], None],
) -> Anatomy:
    """Takes a module's parameters out of it, after `accept` had a chance to object to the chosen stages.

    Raises:
        TypeError: the parameters have been taken out before, or are managed by another library.
        ValueError: patterns match nothing.
    """
    refuse_taken(module)
    named = list(module.named_parameters(remove_duplicate=False))
    refuse_shared_memory(module, named)
    canonical = canonical_names(module)
    if unused := loose.unused([*[name for name, _ in named], *canonical.values()]):
        raise ValueError(f"functional: unstaged: nothing matches {listed(map(repr, sorted(unused)))}")

    def is_loose(name: str) -> bool:
        return loose(name, ()) or loose(canonical[name], ())

    chosen = boundaries(module, stages, min_num_params, small, is_loose)
    accept(chosen)
    _keep_order(module)
    parts, rest = {path: ModulePart(path, m) for path, m in chosen.items()}, ModulePart(LOOSE, module)
    modules_by_path = dict(module.named_modules(remove_duplicate=False))
    part_of, add = _by_name(modules_by_path, parts, rest), _Once()
    all_parts = {**parts, LOOSE: rest}
    paths_of = {name: dict.fromkeys([part_of(name).path, *[LOOSE] * is_loose(name)]) for name, _ in named}
    readers: dict[int, dict[str, None]] = {}
    for name, p in named:
        readers.setdefault(id(p), {}).update(paths_of[name])
    tree: dict[str, Any] = {path: {} for path in all_parts}
    stand_ins: dict[int, Placeholder] = {}
    devices = {p.device for _, p in named if not p.is_meta}
    place = ShellPlacement(devices.pop() if len(devices) == 1 else torch.device("cpu"), gather_dtype)
    places = _parameter_slots(module, {id(p): p for _, p in named})
    for name, p in named:
        key, paths = canonical[name], list(readers[id(p)])
        has_one_reader = len(paths) == 1
        short = key.removeprefix(f"{paths[0]}.") if has_one_reader and paths[0] else key
        (tree[paths[0]] if has_one_reader else tree).setdefault(short, p.detach())
        if id(p) not in stand_ins:
            stand_ins[id(p)] = placeholder(p, key, LOOSE if LOOSE in paths else paths[0], place)
        for path in paths_of[name]:
            for holder, attribute in places[name]:
                add(all_parts[path].own if has_one_reader else all_parts[path].shared, Slot(holder, attribute, short))
    frozen = dict.fromkeys(re.escape(canonical[name]) for name, p in named if not p.requires_grad)
    buffers, same = _buffers(module, modules_by_path, part_of, rest, add)
    for part in all_parts.values():
        for holder, attribute, _ in (*part.own, *part.shared):
            holder[attribute] = stand_ins.get(id(holder[attribute]), holder[attribute])
    for m in module.modules() if stand_ins else ():
        if m is module or any(p is not None for p in m._parameters.values()):
            m.register_load_state_dict_pre_hook(_refuse_values)
    tree = {key: value for key, value in tree.items() if not isinstance(value, dict) or value}
    return Anatomy(tree, canonical, tuple(frozen), buffers, same, parts, rest, place)


def _refuse_values(module: nn.Module, *_: Any) -> None:
    """Raises RuntimeError when a state dict is loaded into a shell."""
    raise RuntimeError(
        f"load_state_dict: the parameters of this {type(module).__name__} were taken out of it. Load them into the "
        f"module before `functional`, or load their files by `interop.load`, which gives a tree of them"
    )


def _keep_order(module: nn.Module) -> None:
    """Keeps layers of bitsandbytes from reordering their weight for the CPU, which they do once, at the first call."""
    for m in module.modules():
        if getattr(m, "support_avx512bf16_for_cpu", False):
            m.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _buffers(
    module: nn.Module,
    modules: Mapping[str, nn.Module],
    part_of: Callable[[str], ModulePart],
    rest: ModulePart,
    add: Callable[[list[Slot], Slot], None],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Gives parts their buffers; returns these by name, and the first name of the same buffer for each name."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    first = {id(b): name for name, b in reversed(buffers.items())}
    same = {name: first[id(b)] for name, b in buffers.items()}
    for name, key in same.items():
        parent, _, attribute = name.rpartition(".")
        for part in (part_of(name), rest):
            add(part.buffers, Slot(modules[parent]._buffers, attribute, key))
    return buffers, same


def _by_name(
    modules: Mapping[str, nn.Module], parts: Mapping[str, ModulePart], rest: ModulePart
) -> Callable[[str], ModulePart]:
    """A function that finds the stage of a name; a module may have several names."""
    of_module = {id(part.module): part for part in parts.values()}

    def part_of(name: str) -> ModulePart:
        words = name.split(".")
        paths = (".".join(words[:n]) for n in range(1, len(words)))
        return next((of_module[id(modules[path])] for path in paths if id(modules[path]) in of_module), rest)

    return part_of


class _Once:
    """Adds a place to a list only once, although it may be reached by several names."""

    def __init__(self) -> None:
        self.listed: set[tuple[int, int, Any]] = set()

    def __call__(self, slots: list[Slot], slot: Slot) -> None:
        if (where := (id(slots), id(slot.holder), slot.at)) not in self.listed:
            self.listed.add(where)
            slots.append(slot)


def _parameter_slots(module: nn.Module, parameters: Mapping[int, Tensor]) -> dict[str, list[tuple[Any, Any]]]:
    """The places of each parameter by name: in its module, and elsewhere in attributes of modules."""
    elsewhere: dict[int, list[tuple[Any, Any]]] = {}
    for holder, key, number in aliases(module, parameters):
        elsewhere.setdefault(number, []).append((holder, key))
    return {
        joined(path, attribute): [(m._parameters, attribute), *elsewhere.get(id(p), ())]
        for path, m in module.named_modules(remove_duplicate=False)
        for attribute, p in m._parameters.items()
        if p is not None
    }


def canonical_names(module: nn.Module) -> dict[str, str]:
    """For each name of a parameter, including aliases, its name in the tree.

    Of tied parameters it is the one that the model's class declares, or the first.
    """
    first: dict[int, str] = {}
    by_name = dict(module.named_parameters(remove_duplicate=False))
    for name, p in by_name.items():
        first.setdefault(id(p), name)
    for path, m in module.named_modules():
        tied = getattr(m, "all_tied_weights_keys", None) or getattr(m, "_tied_weights_keys", None)
        for alias, source in tied.items() if isinstance(tied, dict) else ():
            alias_path, source_path = joined(path, alias), joined(path, source)
            if alias_path in by_name and by_name.get(source_path) is by_name[alias_path]:
                first[id(by_name[alias_path])] = source_path
    return {name: first[id(p)] for name, p in by_name.items()}


# --- which modules are stages ---


def boundaries(
    module: nn.Module, stages: Boundaries | None, min_num_params: int | None, small: int, loose: Callable[[str], bool]
) -> dict[str, nn.Module]:
    """Chooses the modules that are stages, by path, in the module's order; none is inside another.

    Args:
        module: whole.
        stages: as `functional` takes it.
        min_num_params: instead of `stages`: the smallest modules that hold as many parameters.
        small: modules with fewer parameters are no stages, unless they were chosen.
        loose: whether a parameter, by its path, belongs to no stage.

    Raises:
        ValueError: a name, class or pattern matches nothing; or both `stages` and `min_num_params` are given.
        TypeError: `stages` has another type.
    """
    if stages is not None and min_num_params is not None:
        raise ValueError("functional: stages= and min_num_params= both say which modules are stages: pass one")
    chosen: dict[str, nn.Module] = {}

    def eligible(path: str, m: nn.Module) -> bool:
        param_names = [name for name, _ in m.named_parameters(path)]
        called = type(m).forward is not nn.Module.forward and not isinstance(m, _CONTAINERS)
        return bool(path and param_names and called and not all(map(loose, param_names)))

    def choose(path: str, m: nn.Module, chooses: Callable[[str, nn.Module], bool]) -> None:
        """Chooses the outermost among a module and those inside."""
        if path in chosen:
            return
        if eligible(path, m) and chooses(path, m) and (is_asked(path, m) or not (automatic and _takes_lists(m))):
            chosen[path] = m
            return
        for name, child in m.named_children():
            choose(joined(path, name), child, chooses)

    automatic = stages is None or isinstance(stages, Mapping)
    is_asked = _stage_rule(module, stages, eligible) if stages is not None else lambda path, m: False
    choose("", module, _policy(module, stages, min_num_params, is_asked))
    above = {"", *(path[:i] for path in chosen for i, letter in enumerate(path) if letter == ".")}
    choose("", module, lambda path, m: path not in above and _numel(m) >= small)
    # A module has several paths if its parents share it: keep each once, and none that is also inside another.
    once = {id(m): path for path, m in reversed(chosen.items())}
    inside = {id(part) for m in chosen.values() for part in m.modules() if part is not m}
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    outermost = {path for path, m in chosen.items() if once[id(m)] == path and id(m) not in inside}
    return {path: chosen[path] for path in names if path in outermost}


def _takes_lists(m: nn.Module) -> bool:
    """Whether forward says that it takes a list, to which it may append, as the last blocks of torchvision's pyramids.

    A stage gets a copy of it, so the modules inside become stages instead.
    """
    kinds = {name: str(kind) for name, kind in getattr(type(m).forward, "__annotations__", {}).items()}
    return any(re.match(r"(typing\.)?[lL]ist\b", kind) for name, kind in kinds.items() if name != "return")


def _numel(m: nn.Module) -> int:
    return sum(p.numel() for p in m.parameters())


def _policy(
    module: nn.Module,
    stages: Boundaries | None,
    min_num_params: int | None,
    is_asked: Callable[[str, nn.Module], bool],
) -> Callable[[str, nn.Module], bool]:
    if min_num_params is not None:
        enough: int = min_num_params
        return lambda path, m: _numel(m) >= enough and all(_numel(child) < enough for child in m.children())
    if stages is not None and not isinstance(stages, Mapping):
        return is_asked
    names = {name for m in module.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    repeated = {id(child) for m in lists for child in m.children()}
    named = any(type(m).__name__ in names for m in module.modules())
    inside = [path for path, m in module.named_modules(remove_duplicate=False) if is_asked(path, m)]

    def chooses(path: str, m: nn.Module) -> bool:
        default = type(m).__name__ in names if named else id(m) in repeated
        return is_asked(path, m) or (default and not any(other.startswith(f"{path}.") for other in inside))

    return chooses


def _stage_rule(
    module: nn.Module, stages: Any, eligible: Callable[[str, nn.Module], bool]
) -> Callable[[str, nn.Module], bool]:
    if callable(stages) and not isinstance(stages, type):
        return lambda path, m: bool(stages(path, m))
    choices = [stages] if isinstance(stages, (str, type)) else list(stages)
    for item in choices:
        if not isinstance(item, (str, type)):
            raise TypeError(
                f"functional: stages must be names of classes, classes, regular expressions of paths, or a function of "
                f"a path and a module, got {stages!r}"
            )

    modules = list(module.named_modules(remove_duplicate=False))
    for item in choices:
        if not any(_matches(item, path, m) for path, m in modules):
            classes = listed(dict.fromkeys(type(m).__name__ for _, m in modules if any(True for _ in m.parameters())))
            raise ValueError(f"functional: stages: nothing is or matches {item!r}; the module has {classes}")
        if not any(eligible(path, m) for path, m in modules if _matches(item, path, m)):
            path, m = next((path, m) for path, m in modules if _matches(item, path, m))
            raise ValueError(
                f"functional: stages: {item!r} must match layers, got {path or 'the whole module'} "
                f"({type(m).__name__}): a stage is a module inside, with parameters that are not unstaged and a forward"
            )
    return lambda path, m: any(_matches(item, path, m) for item in choices)


def _matches(item: Choice, path: str, m: nn.Module) -> bool:
    """Whether a class, the name of one, or a regular expression of a whole path is that of a module."""
    if isinstance(item, type):
        return isinstance(m, item)
    return type(m).__name__ == item or re.fullmatch(item, path) is not None


def options_by_stage(
    module: nn.Module, stages: Boundaries | None, chosen: Mapping[str, nn.Module], common: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The options of each stage: those that all have, replaced by those of the first item of `stages` that matches it.

    Raises:
        ValueError: an item is the first to match no stage.
        TypeError: the options of an item are no dict.
    """
    rules = stages if isinstance(stages, Mapping) else {}
    for item, options in rules.items():
        if not isinstance(options, Mapping):
            raise TypeError(f"functional: stages: the options of {item!r} must be a dict, got {options!r}")
    paths: dict[nn.Module, list[str]] = {}  # a module that is shared has several
    for path, m in module.named_modules(remove_duplicate=False):
        paths.setdefault(m, []).append(path)
    first = {
        path: next((item for item in rules if any(_matches(item, name, m) for name in paths[m])), None)
        for path, m in chosen.items()
    }
    for item in rules:
        if item not in first.values():
            raise ValueError(
                f"functional: stages: no stage gets the options of {item!r}: its modules are inside another stage, or "
                f"match an earlier item. Put special items first; stages are {listed(list(chosen), 4)}"
            )
    return {path: common if item is None else {**common, **rules[item]} for path, item in first.items()}
