"""Which modules become stages: what the caller says, else what the model's classes say, else what repeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from shardfn.quoting import listed

Boundaries = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Iterable[str | type[nn.Module]]
"""Names of classes, classes, regular expressions of paths, or a predicate of a path and a module."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def boundaries(
    module: nn.Module,
    stages: Boundaries | None,
    min_num_params: int | None,
    small: int,
    loose: Callable[[str], bool],
) -> dict[str, nn.Module]:
    """The modules that are stages, by path, in the order in which the module holds them; none inside another.

    Args:
        module: whole.
        stages: which, as `functional` takes it.
        min_num_params: or instead: the smallest modules that hold as many parameters.
        small: what holds fewer parameters is none, unless it was chosen.
        loose: whether a parameter, by its path, is left to no stage.

    Raises:
        ValueError: a name, class or pattern that matches nothing; two ways of choosing at once.
        TypeError: something else than these.
    """
    if stages is not None and min_num_params is not None:
        raise ValueError("functional: stages= and min_num_params= both say which modules are stages: pass one")
    chosen: dict[str, nn.Module] = {}

    def eligible(path: str, m: nn.Module) -> bool:
        held = [name for name, _ in m.named_parameters(path)]
        return bool(path and held and _called(m) and not all(map(loose, held)))

    def outermost(path: str, m: nn.Module, chooses: Callable[[str, nn.Module], bool]) -> None:
        if eligible(path, m) and chooses(path, m):
            chosen[path] = m
            return
        for child_path, child in _children(path, m):
            outermost(child_path, child, chooses)

    above = {""}

    def rest(path: str, m: nn.Module) -> None:
        if path in chosen:
            return
        if path not in above and eligible(path, m) and _numel(m) >= small:
            chosen[path] = m
            return
        for child_path, child in _children(path, m):
            rest(child_path, child)

    outermost("", module, _policy(module, stages, min_num_params))
    above |= {path[:i] for path in chosen for i, letter in enumerate(path) if letter == "."}
    rest("", module)
    chosen = _apart(chosen)
    order = {name: i for i, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    return dict(sorted(chosen.items(), key=lambda item: order[item[0]]))


def _apart(chosen: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Each module once, and none that is also a part of another: one has several paths where its parents share it."""
    once = {id(m): path for path, m in reversed(chosen.items())}
    inside = {id(part) for m in chosen.values() for part in m.modules() if part is not m}
    return {path: m for path, m in chosen.items() if once[id(m)] == path and id(m) not in inside}


def _children(path: str, m: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return [(f"{path}.{name}" if path else name, child) for name, child in m.named_children()]


def _called(m: nn.Module) -> bool:
    """Whether it has a function of its own: containers have none."""
    return type(m).forward is not nn.Module.forward and not isinstance(m, _CONTAINERS)


def _numel(m: nn.Module) -> int:
    return sum(p.numel() for p in m.parameters())


def _policy(
    module: nn.Module, stages: Boundaries | None, min_num_params: int | None
) -> Callable[[str, nn.Module], bool]:
    if min_num_params is not None:
        enough: int = min_num_params
        return lambda path, m: _numel(m) >= enough and all(_numel(child) < enough for child in m.children())
    if stages is not None:
        return _said(module, stages)
    names = {name for m in module.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    if any(type(m).__name__ in names for m in module.modules()):
        return lambda path, m: type(m).__name__ in names
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    repeated = {id(child) for m in lists for child in m.children()}
    return lambda path, m: id(m) in repeated


def _said(module: nn.Module, stages: Any) -> Callable[[str, nn.Module], bool]:
    if callable(stages) and not isinstance(stages, type):
        return lambda path, m: bool(stages(path, m))
    asked = [stages] if isinstance(stages, (str, type)) else list(stages)
    for one in asked:
        if not isinstance(one, (str, type)):
            raise TypeError(
                f"functional: stages={stages!r}; it is names of classes, classes, regular expressions of paths, or a "
                f"function of a path and a module"
            )

    def matches(one: Any, path: str, m: nn.Module) -> bool:
        if isinstance(one, type):
            return isinstance(m, one)
        return type(m).__name__ == one or re.fullmatch(one, path) is not None

    there = list(module.named_modules(remove_duplicate=False))
    for one in asked:
        if not any(matches(one, path, m) for path, m in there):
            classes = listed(dict.fromkeys(type(m).__name__ for _, m in there if any(True for _ in m.parameters())))
            raise ValueError(f"functional: stages: nothing is or matches {one!r}; the module has {classes}")
    return lambda path, m: any(matches(one, path, m) for one in asked)
