"""Which weights get adapters: said by names, as peft takes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from shardfn.interop.functional import Functional
from shardfn.lora.adapters import BARE, Kind, kind_of
from shardfn.mesh.spec import joined
from shardfn.quoting import listed

Names = str | Iterable[str]
"""A regular expression that matches a whole path, or ends of paths: `["q_proj", "mlp.down_proj"]`."""
ALL, SAVED, PARAMETERS = "all-linear", "modules_to_save", "target_parameters"
Bias = Literal["none", "all", "lora_only"]


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
        return any(one.matching(path) for one in without) or inside(path, own)

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


def parameters(model: Functional, said: Said, adapted: Iterable[str], saved: Iterable[str]) -> dict[str, Kind]:
    """The parameters that are adapted by themselves, and their kinds.

    Args:
        model: whose parameters.
        said: their names, as `target_parameters` of peft.
        adapted: modules that have adapters.
        saved: modules that are trained themselves.

    Raises:
        TypeError: a regular expression, which peft does not take here.
        ValueError: parameters that peft cannot adapt, or that are adapted or trained otherwise.
    """
    if isinstance(said.said, str):
        raise TypeError(f"lora: {PARAMETERS}={said.said!r}; it is a list of ends of paths, ['experts.down_proj'] say")
    found, taken, own = dict[str, Kind](), set(adapted), list(saved)
    for path, m in model.module.named_modules():
        for name, p in m.named_parameters(recurse=False):
            if not said.matching(full := joined(path, name)):
                continue
            found[full] = kind = kind_of(m, name) or "parameter"
            if wrong := _unfit(path, kind, p.shape, taken, own):
                raise ValueError(f"lora: {PARAMETERS}: {full} {wrong}")
    refuse_several_homes(model, {path.rpartition(".")[0] for path in found})
    return found


def _unfit(holder: str, kind: Kind, shape: Sequence[int], taken: set[str], saved: Iterable[str]) -> str:
    """Why a parameter of a module cannot be adapted by itself."""
    if not holder:
        return "belongs to the whole model, of which peft adapts no parameters"
    if len(shape) not in (2, 3):
        return f"has shape {list(shape)}; adapters are for matrices, and for one of each expert"
    if kind == "turned_experts" and shape[0] == 1:
        return f"has shape {list(shape)}: to one expert, with is_transposed, peft adds the product the wrong way round"
    if holder in taken:
        return "is of a layer that has an adapter: exclude= that, or leave this out"
    if inside(holder, saved):
        return "is of a module that is trained itself, by modules_to_save"
    return ""


def holder_of(path: str, kind: Kind) -> str:
    """The module of which an adapter's path means a parameter."""
    return path.rpartition(".")[0] if kind in BARE else path


def refuse_parts(found: Iterable[str], dropout: float, dora: bool) -> None:
    """Raises ValueError if there are parameters that are adapted by themselves, with what goes through layers alone."""
    if (path := next(iter(found), None)) and (dropout or dora):
        what = f"dropout={dropout}" if dropout else "dora=True"
        raise ValueError(f"lora: {PARAMETERS}: {what} is of layers, and {path} is adapted by itself: it has none")


def biases(model: Functional, bias: str, adapted: Iterable[str], saved: Iterable[str]) -> list[str]:
    """The biases that are trained along.

    Args:
        model: whose parameters.
        bias: all, those of modules with adapters, or none, as in peft.
        adapted: modules with adapters.
        saved: modules that are trained themselves.

    Raises:
        ValueError: another word; a bias that has several names.
    """
    if bias not in get_args(Bias):
        raise ValueError(f"lora: bias={bias!r}; it is one of {', '.join(map(repr, get_args(Bias)))}")
    if bias == "none":
        return []
    own, above = set(adapted), list(saved)
    every = [name for name in model.names if name.rpartition(".")[2] == "bias"]
    found = [
        name
        for name in every
        if not inside(holder := name.rpartition(".")[0], above) and (bias == "all" or holder in own)
    ]
    several = Counter(model.names.values())
    for name in found:
        if several[model.names[name]] > 1:
            others = [one for one in model.names if one != name and model.names[one] == model.names[name]]
            raise ValueError(f"lora: bias={bias!r}: {name} is {listed(others)}, too, which would keep another copy")
    return found


def inside(path: str, modules: Iterable[str]) -> bool:
    """Whether a path is that of one of some modules, or below it."""
    return any(path == one or path.startswith(f"{one}.") for one in modules)


def in_files(model: Functional, kinds: Mapping[str, Kind], copies: Iterable[str] = ()) -> dict[str, str]:
    """What adapters, and parameters that are replaced, are called in peft's files, by their paths.

    There a parameter is adapted by a wrapper around its module, and the next one by a wrapper around that.
    """
    wrappers = Counter(holder_of(path, kind) for path, kind in kinds.items())

    def wrapped(path: str) -> str:
        holder, _, name = path.rpartition(".")
        return joined(wrapped(holder), *["base_layer"] * wrappers[holder], name) if path else ""

    found = {path: wrapped(path) for path in (*kinds, *copies)}
    for holder in wrappers:
        names = [joined(holder, name) for name in model.module.get_submodule(holder)._parameters]
        for depth, path in enumerate(reversed([name for name in names if kinds.get(name) in BARE])):
            found[path] = joined(wrapped(holder), *["base_layer"] * depth)
    return found


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
