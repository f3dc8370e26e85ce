"""Which weights get adapters: said by names, as peft takes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from shardfn.interop.functional import Functional
from shardfn.lora.adapters import Kind, kind_of
from shardfn.quoting import listed

Names = str | Iterable[str]
"""A regular expression that matches a whole path, or ends of paths: `["q_proj", "mlp.down_proj"]`."""
ALL, SAVED = "all-linear", "modules_to_save"


class Said(NamedTuple):
    """What an argument of names says.

    Attributes:
        argument: which one, for messages.
        said: one regular expression, or ends of paths.
    """

    argument: str
    said: str | tuple[str, ...]

    def matching(self, path: str) -> list[str]:
        """Those that match a path."""
        if isinstance(self.said, str):
            return [self.said] if re.fullmatch(self.said, path) else []
        if self.argument == SAVED:  # of which peft takes any end, not whole words alone
            return [one for one in self.said if path.endswith(one)]
        return [one for one in self.said if path == one or path.endswith(f".{one}")]

    def check(self, paths: Iterable[str], what: str) -> None:
        """Raises ValueError for names that match none of these paths."""
        there = list(paths)
        every = (self.said,) if isinstance(self.said, str) else self.said
        found = {one for path in there for one in self.matching(path)}
        if lost := [one for one in every if one not in found]:
            ends = dict.fromkeys(path.rpartition(".")[2] for path in there)
            hint = (
                f": one string is a regular expression for whole paths, so pass [{self.said!r}]"
                if isinstance(self.said, str) and any(path.endswith(f".{self.said}") for path in there)
                else ""
            )
            raise ValueError(
                f"lora: {self.argument}: nothing matches {listed(map(repr, lost))}{hint}; {what} end in "
                f"{listed(ends, 12)}"
            )


def named(names: Names, argument: str) -> Said:
    """What an argument says.

    Raises:
        TypeError: it is not names.
        ValueError: a string that is not a regular expression.
    """
    if isinstance(names, str):
        try:
            re.compile(names)
        except re.error as error:
            raise ValueError(f"lora: {argument}: {names!r} is not a regular expression: {error}") from None
        return Said(argument, names)
    said = list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(one, str) for one in said):
        raise TypeError(
            f"lora: {argument}={names!r}; it is a regular expression for whole paths, or a list of their ends, such as "
            f"['q_proj', 'v_proj']"
        )
    return Said(argument, tuple(said))


def patterned(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """What the first pattern says that matches the end of a path, as `rank_pattern` and `alpha_pattern` do in peft."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), default)


# --- modules ---


def modules(model: Functional, targets: Names, exclude: Names, saved: Names) -> dict[str, Kind]:
    """The modules that names say, and of what kind their weights are.

    Args:
        model: whose modules.
        targets: names, or "all-linear": every `Linear` and `Conv1D` but that of the output.
        exclude: those of them that get none.
        saved: modules that are trained themselves.

    Raises:
        ValueError: names that match nothing; modules of other kinds.
    """
    there = {path: m for path, m in model.module.named_modules() if path}
    without = [named(exclude, "exclude")] if exclude else []
    for one in without:
        one.check(there, "modules")
    own = tuple(saved_modules(model, saved))

    def left_out(path: str) -> bool:
        return any(one.matching(path) for one in without) or any(
            path == one or path.startswith(f"{one}.") for one in own
        )

    if isinstance(targets, str) and targets.lower() == ALL:
        output = _output(model.module)
        kinds = {path: kind_of(m) for path, m in there.items() if m is not output and not left_out(path)}
        found: dict[str, Kind] = {path: kind for path, kind in kinds.items() if kind in ("linear", "conv1d")}
        if not found:
            but = " but those that are left out" if without or own else ""
            raise ValueError(f"lora: targets: {type(model.module).__name__} has no linear layers{but}")
        refuse_several_homes(model, found)
        return {path: _kind(path, there[path]) for path in found}
    wanted = named(targets, "targets")
    wanted.check(there, "modules")
    chosen = [path for path in there if wanted.matching(path) and not left_out(path)]
    if not chosen:
        why = f"all that match {targets!r} are excluded, or trained themselves" if wanted.said else "nothing is named"
        raise ValueError(f"lora: targets: {why}")
    refuse_several_homes(model, chosen)
    return {path: _kind(path, there[path]) for path in chosen}


def saved_modules(model: Functional, saved: Names) -> list[str]:
    """The modules that are trained themselves, by path.

    Raises:
        ValueError: names that match nothing; a module without parameters, or with buffers.
    """
    if not saved:
        return []
    there = {path: m for path, m in model.module.named_modules() if path}
    names = named(saved, SAVED)
    names.check(there, "modules")
    found = [path for path in there if names.matching(path)]
    for path in found:
        if not any(True for _ in there[path].parameters()):
            raise ValueError(f"lora: modules_to_save: {path} has no parameters")
        if buffers := [name for name, _ in there[path].named_buffers()]:
            raise ValueError(
                f"lora: modules_to_save: {path} has buffers, {listed(buffers, 3)}, which adapters do not keep"
            )
    refuse_several_homes(model, [*found, *(p for p in there if any(p.startswith(f"{one}.") for one in found))])
    return found


def other_names(model: Functional) -> Callable[[str], list[str]]:
    """What finds, by the path of a module, all paths that it has."""
    paths: dict[int, list[str]] = {}
    for path, m in model.module.named_modules(remove_duplicate=False):
        paths.setdefault(id(m), []).append(path)
    return lambda path: paths[id(model.module.get_submodule(path))]


def refuse_several_homes(model: Functional, paths: Iterable[str]) -> None:
    """Raises ValueError for modules that are called from several stages, of which one alone would have the adapter."""
    names, stages = other_names(model), {id(model.module.get_submodule(one)): one for one in model.stages}

    def home(path: str) -> str:
        words = path.split(".")
        above = (id(model.module.get_submodule(".".join(words[:n]))) for n in range(1, len(words) + 1))
        return next((stages[one] for one in above if one in stages), "")

    for path in paths:
        homes = dict.fromkeys(map(home, names(path)))
        if len(homes) > 1:
            where = listed((f"stage {one!r}" if one else "no stage" for one in homes), separator=" and ")
            raise ValueError(
                f"lora: {path} is one module with {listed(names(path), 3, separator=' and ')}, in {where}, and the "
                f"first alone would have its adapter: make one stage of a module that holds them all, or leave it out"
            )


def stage_of(model: Functional) -> Callable[[str], tuple[str, str]]:
    """What finds, by the path of a module or parameter, its stage and its name there; `("", path)` if it is loose."""

    def find(path: str) -> tuple[str, str]:
        for stage in model.stages:
            if path == stage or path.startswith(f"{stage}."):
                return stage, path[len(stage) + 1 :]
        return "", path

    return find


def _kind(path: str, m: nn.Module) -> Kind:
    kind = kind_of(m)
    if kind is None or m._parameters.get("weight") is None:
        raise ValueError(
            f"lora: targets: {path} is a {type(m).__name__}{'' if kind is None else ' that computes its weight'}; "
            f"adapters are for Linear, Embedding and the Conv1D of transformers, so leave it out by exclude="
        )
    return kind


def _output(module: Any) -> Any:
    """The layer whose results are logits, if a module of transformers says so."""
    get = getattr(module, "get_output_embeddings", None)
    try:
        return get() if callable(get) else None
    except NotImplementedError:
        return None
