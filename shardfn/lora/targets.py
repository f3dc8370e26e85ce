"""Which weights get adapters: chosen by names, with peft's rules."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from shardfn.interop.functional import Functional
from shardfn.lora.adapters import BARE, Kind, layer_kind
from shardfn.mesh.spec import joined
from shardfn.quoting import listed

_log = logging.getLogger("shardfn")
Names = str | Iterable[str]
"""A regular expression that matches a whole path, or ends of paths: `["q_proj", "mlp.down_proj"]`."""
ALL, SAVED, PARAMETERS = "all-linear", "modules_to_save", "target_parameters"
Bias = Literal["none", "all", "lora_only"]


class Selector(NamedTuple):
    """An argument that chooses by names.

    Attributes:
        argument: the argument's name, for messages.
        names: a regular expression for whole paths, or ends of paths.
    """

    argument: str
    names: str | tuple[str, ...]

    def matching(self, path: str) -> list[str]:
        """The names that match a path."""
        if isinstance(self.names, str):
            return [self.names] if re.fullmatch(self.names, path) else []
        if self.argument == SAVED:  # peft matches any end of a path here, not only whole words
            return [name for name in self.names if path.endswith(name)]
        return [name for name in self.names if path == name or path.endswith(f".{name}")]

    def check(self, paths: Iterable[str], noun: str, some: bool = False) -> None:
        """Raises ValueError if a name matches none of these paths, which `noun` describes.

        With `some`, only if no name matches any, as in peft; a warning in the log tells of the others.
        """
        candidates = list(paths)
        names = (self.names,) if isinstance(self.names, str) else self.names
        matched = {name for path in candidates for name in self.matching(path)}
        unmatched = [name for name in names if name not in matched]
        if unmatched and matched and some:
            _log.warning("lora: %s: nothing matches %s", self.argument, listed(map(repr, unmatched)))
        elif unmatched:
            ends = dict.fromkeys(path.rpartition(".")[2] for path in candidates)
            hint = (
                f": one string is a regular expression for whole paths, so pass [{self.names!r}]"
                if isinstance(self.names, str) and any(path.endswith(f".{self.names}") for path in candidates)
                else ""
            )
            raise ValueError(
                f"lora: {self.argument}: nothing matches {listed(map(repr, unmatched))}{hint}; {noun} end in "
                f"{listed(ends, 12)}"
            )


def selector_of(names: Names, argument: str) -> Selector:
    """The selector of an argument's names.

    Raises:
        TypeError: they are not names.
        ValueError: a string is not a regular expression.
    """
    if isinstance(names, str):
        try:
            re.compile(names)
        except re.error as error:
            raise ValueError(f"lora: {argument}: {names!r} is not a regular expression: {error}") from None
        return Selector(argument, names)
    ends = list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(end, str) for end in ends):
        raise TypeError(
            f"lora: {argument} must be a regular expression for whole paths, or a list of their ends, such as "
            f"['q_proj', 'v_proj'], got {names!r}"
        )
    return Selector(argument, tuple(ends))


def patterned(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a path, like peft's `rank_pattern` and `alpha_pattern`."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), default)


# --- modules ---


def modules(model: Functional, targets: Names, exclude: Names, saved: Names) -> dict[str, Kind]:
    """The modules chosen, by path, with the kinds of their weights.

    Args:
        model: the model.
        targets: names, or "all-linear": every `Linear` and `Conv1D` except the output layer.
        exclude: names of modules that get no adapter.
        saved: names of modules that are trained as copies.

    Raises:
        ValueError: a name matches nothing; a module is of an unsupported kind.
    """
    by_path = {path: m for path, m in model.module.named_modules() if path}
    excluded = [selector_of(exclude, "exclude")] if exclude else []
    for selector in excluded:
        selector.check(by_path, "modules")
    saved_paths = tuple(saved_modules(model, saved))

    def left_out(path: str) -> bool:
        return any(selector.matching(path) for selector in excluded) or inside(path, saved_paths)

    if isinstance(targets, str) and targets.lower() == ALL:
        output = _output(model.module)
        linear = [path for path, m in by_path.items() if m is not output and layer_kind(m) in ("linear", "conv1d")]
        chosen = [path for path in linear if not left_out(path)]
        but = " but those that are left out" if excluded or saved_paths else ""
        reason = f"{type(model.module).__name__} has no linear layers{but}"
    else:
        target_names = selector_of(targets, "targets")
        target_names.check(by_path, "modules", some=True)
        chosen = [path for path in by_path if target_names.matching(path) and not left_out(path)]
        excluded_all = f"all that match {targets!r} are excluded, or trained themselves"
        reason = excluded_all if target_names.names else "nothing is named"
    if not chosen:
        raise ValueError(f"lora: targets: {reason}")
    refuse_several_homes(model, chosen)
    kinds: dict[str, Kind] = {}
    for path in chosen:
        m = by_path[path]
        kind = layer_kind(m)
        if kind is None or m._parameters.get("weight") is None:
            raise ValueError(
                f"lora: targets: {path} is a {type(m).__name__}{'' if kind is None else ' that computes its weight'}; "
                f"adapters are for Linear, Embedding and the Conv1D of transformers, so leave it out by exclude="
            )
        kinds[path] = kind
    return kinds


def parameters(model: Functional, ends: Selector, adapted: Iterable[str], saved: Iterable[str]) -> dict[str, Kind]:
    """The parameters that are adapted by themselves, by path, with their kinds.

    Args:
        model: the model.
        ends: their names, peft's `target_parameters`.
        adapted: paths of modules that have adapters.
        saved: paths of modules that are trained as copies.

    Raises:
        TypeError: the names are a regular expression, which peft does not take here.
        ValueError: peft cannot adapt a parameter, or it is adapted or trained in another way.
    """
    if isinstance(ends.names, str):
        raise TypeError(
            f"lora: {PARAMETERS} must be a list of ends of paths, such as ['experts.down_proj'], got {ends.names!r}"
        )
    kinds, adapted_paths, saved_paths = dict[str, Kind](), set(adapted), list(saved)
    for path, m in model.module.named_modules():
        for name, p in m.named_parameters(recurse=False):
            if not ends.matching(full := joined(path, name)):
                continue
            kinds[full] = kind = layer_kind(m, name) or "parameter"
            if wrong := _unfit(path, kind, p.shape, adapted_paths, saved_paths):
                raise ValueError(f"lora: {PARAMETERS}: {full} {wrong}")
    refuse_several_homes(model, {path.rpartition(".")[0] for path in kinds})
    return kinds


def _unfit(holder: str, kind: Kind, shape: Sequence[int], adapted: set[str], saved: Iterable[str]) -> str:
    """Why a parameter of a module cannot be adapted by itself; an empty string if it can."""
    if not holder:
        return "belongs to the whole model, of which peft adapts no parameters"
    if len(shape) not in (2, 3):
        return f"has shape {list(shape)}; adapters are for matrices, and for one of each expert"
    if kind == "turned_experts" and shape[0] == 1:
        return f"has shape {list(shape)}: to one expert, with is_transposed, peft adds the product the wrong way round"
    if holder in adapted:
        return "is of a layer that has an adapter: exclude= that, or leave this out"
    if inside(holder, saved):
        return "is of a module that is trained itself, by modules_to_save"
    return ""


def holder_of(path: str, kind: Kind) -> str:
    """The path of the module whose parameter an adapter at this path adapts."""
    return path.rpartition(".")[0] if kind in BARE else path


def refuse_parts(paths: Iterable[str], dropout: float, dora: bool) -> None:
    """Raises ValueError if parameters are adapted by themselves with dropout or DoRA, which only layers have."""
    if (path := next(iter(paths), None)) and (dropout or dora):
        option = f"dropout={dropout}" if dropout else "dora=True"
        raise ValueError(f"lora: {PARAMETERS}: {option} is of layers, and {path} is adapted by itself: it has none")


def biases(model: Functional, bias: str, adapted: Iterable[str], saved: Iterable[str]) -> list[str]:
    """The biases that are trained as copies.

    Args:
        model: the model.
        bias: "all", "lora_only" for those of modules with adapters, or "none", as in peft.
        adapted: paths of modules with adapters.
        saved: paths of modules that are trained as copies.

    Raises:
        ValueError: `bias` is none of these; a bias has several names.
    """
    if bias not in get_args(Bias):
        raise ValueError(f"lora: bias must be one of {', '.join(map(repr, get_args(Bias)))}, got {bias!r}")
    if bias == "none":
        return []
    adapted_paths, saved_paths = set(adapted), list(saved)
    all_biases = [name for name in model.names if name.rpartition(".")[2] == "bias"]
    chosen = [
        name
        for name in all_biases
        if not inside(holder := name.rpartition(".")[0], saved_paths) and (bias == "all" or holder in adapted_paths)
    ]
    counts = Counter(model.names.values())
    for name in chosen:
        if counts[model.names[name]] > 1:
            aliases = [alias for alias in model.names if alias != name and model.names[alias] == model.names[name]]
            raise ValueError(f"lora: bias={bias!r}: {name} is {listed(aliases)}, too, which would keep another copy")
    return chosen


def inside(path: str, modules: Iterable[str]) -> bool:
    """Whether a path is one of some modules' paths, or below it."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def in_files(model: Functional, kinds: Mapping[str, Kind], copies: Iterable[str] = ()) -> dict[str, str]:
    """The names in peft's files of adapters, and of parameters that are replaced, by path.

    There a parameter is adapted by a wrapper around its module, and the next one by a wrapper around that wrapper.
    """
    wrappers = Counter(holder_of(path, kind) for path, kind in kinds.items())

    def wrapped(path: str) -> str:
        holder, _, name = path.rpartition(".")
        return joined(wrapped(holder), *["base_layer"] * wrappers[holder], name) if path else ""

    file_names = {path: wrapped(path) for path in (*kinds, *copies)}
    for holder in wrappers:
        names = [joined(holder, name) for name in model.module.get_submodule(holder)._parameters]
        for depth, path in enumerate(reversed([name for name in names if kinds.get(name) in BARE])):
            file_names[path] = joined(wrapped(holder), *["base_layer"] * depth)
    return file_names


def saved_modules(model: Functional, saved: Names) -> list[str]:
    """The paths of the modules that are trained as copies.

    Raises:
        ValueError: a name matches nothing; a module has no parameters, or has buffers.
    """
    if not saved:
        return []
    by_path = {path: m for path, m in model.module.named_modules() if path}
    selector = selector_of(saved, SAVED)
    selector.check(by_path, "modules")
    paths = [path for path in by_path if selector.matching(path)]
    for path in paths:
        if not any(True for _ in by_path[path].parameters()):
            raise ValueError(f"lora: modules_to_save: {path} has no parameters")
        if buffers := [name for name, _ in by_path[path].named_buffers()]:
            raise ValueError(
                f"lora: modules_to_save: {path} has buffers, {listed(buffers, 3)}, which adapters do not keep"
            )
    refuse_several_homes(model, [*paths, *(p for p in by_path if any(p.startswith(f"{path}.") for path in paths))])
    return paths


def other_names(model: Functional) -> Callable[[str], list[str]]:
    """Returns a function that maps a module's path to all paths of that module."""
    paths: dict[int, list[str]] = {}
    for path, m in model.module.named_modules(remove_duplicate=False):
        paths.setdefault(id(m), []).append(path)
    return lambda path: paths[id(model.module.get_submodule(path))]


def refuse_several_homes(model: Functional, paths: Iterable[str]) -> None:
    """Raises ValueError for modules that several stages call, only the first of which would have the adapter."""
    names, stages = other_names(model), {id(model.module.get_submodule(stage)): stage for stage in model.stages}

    def home(path: str) -> str:
        words = path.split(".")
        above = (id(model.module.get_submodule(".".join(words[:n]))) for n in range(1, len(words) + 1))
        return next((stages[key] for key in above if key in stages), "")

    for path in paths:
        homes = dict.fromkeys(map(home, names(path)))
        if len(homes) > 1:
            where = listed((f"stage {stage!r}" if stage else "no stage" for stage in homes), separator=" and ")
            raise ValueError(
                f"lora: {path} is one module with {listed(names(path), 3, separator=' and ')}, in {where}, and the "
                f"first alone would have its adapter: make one stage of a module that holds them all, or leave it out"
            )


def _output(module: Any) -> Any:
    """The layer that returns logits, if a transformers model names it."""
    get = getattr(module, "get_output_embeddings", None)
    try:
        return get() if callable(get) else None
    except NotImplementedError:
        return None
