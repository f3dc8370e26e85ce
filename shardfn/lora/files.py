"""Adapters in peft's files: `adapter_config.json`, and `adapter_model.safetensors` with whole tensors."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn.checkpoint import folders
from shardfn.checkpoint.contents import contents
from shardfn.checkpoint.disk import sync, write_whole
from shardfn.checkpoint.files import FileReader
from shardfn.checkpoint.huggingface import refuse_different
from shardfn.checkpoint.team import CheckpointError, on_each_rank, team_of
from shardfn.interop.functional import Functional, expect_functional
from shardfn.local_paths import local_path
from shardfn.lora import targets
from shardfn.lora.adapters import BARE, PARTS, Adapter, Kind, Recipe, is_adapter, layer_kind, parameter_of, thin
from shardfn.lora.init import by_stage, values_of, without_values
from shardfn.mesh import waiting
from shardfn.mesh.axes import grid_of
from shardfn.mesh.spec import joined, leaves_by_path
from shardfn.quoting import listed
from shardfn.shards.layout import flat_shards, is_stage
from shardfn.shards.placement import Strategy
from shardfn.shards.sharding import shard
from shardfn.shards.unsharding import unshard
from shardfn.tracebacks import api_boundary

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
# peft's names for the tasks of models, by the ends of their classes' names, where that changes nothing else.
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
_INITS = (True, False, "gaussian", "eva", "orthogonal")  # others change the base
_HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora",
    "use_rslora",
}  # fmt: skip


@waiting.during("sf.lora.save_pretrained")
@api_boundary
def save_pretrained(folder: str | os.PathLike[str], model: Functional, adapters: Any) -> None:
    """Writes the adapters of a model in peft's format; all ranks call it.

    `PeftModel.from_pretrained(base, folder)` gives the same logits. The first rank gathers and writes them; no other
    has more than its part. An adapter that the folder had before stays until the new one is on disk; the configuration
    of one is never there with the tensors of the other.

    Args:
        folder: created if necessary.
        model: what `interop.functional` made.
        adapters: the model's adapters, flat shards or whole tensors.

    Raises:
        CheckpointError: they could not be written; the same on every rank.
        ValueError: peft cannot have these adapters together, such as some with DoRA and some without.

    Example:
        ``lora.save_pretrained("french", model, adapters)``
    """
    path, config = on_each_rank(lambda: (local_path(folder, "lora.save_pretrained: folder"), _config(model, adapters)))
    grids = [flat.layout.grid for flat in flat_shards(adapters)]
    group, task = team_of(grids), f"save_pretrained {path}"
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    refuse_different(group, task, contents(adapters, shared=False), (str(path), text))
    first = sorted(grids[0].ranks)[:1] if grids else None
    full = unshard(adapters, ranks=first, to="cpu") if first else adapters
    group.first(task, lambda: _write(path, _adapter_tensors(model, full), text))


def _config(model: Functional, adapters: Any) -> dict[str, Any]:
    """peft's configuration of adapters.

    Raises:
        ValueError: they differ in something that peft's configuration has only once.
    """
    expect_functional("lora.save_pretrained", model)
    model._check_adapters(adapters)
    leaves = leaves_by_path(optree.tree_map(without_values, adapters, is_leaf=is_stage), is_adapter)
    by_path: dict[str, Adapter] = {path: adapter for path, adapter in leaves.items() if is_adapter(adapter)}
    if not by_path:
        raise ValueError("lora.save_pretrained: there are no adapters")
    recipes = {path: adapter.recipe for path, adapter in by_path.items()}
    kinds = {path: recipe.kind for path, recipe in recipes.items()}
    adapted = set(itertools.starmap(targets.holder_of, kinds.items()))
    _refuse_several_names(model, adapted)
    bare = {path for path, kind in kinds.items() if kind in BARE}
    if bare and "conv1d" in kinds.values():
        raise ValueError(
            f"lora.save_pretrained: there are adapters of layers of the class Conv1D and of {min(bare)} by itself: "
            f"peft has no configuration with both"
        )
    rslora = _once("rslora", (recipe.rslora for recipe in recipes.values()))
    dora = _once("dora", (adapter.magnitude is not None for adapter in by_path.values()))
    dropout = _once("dropout", (recipe.dropout for recipe in recipes.values() if recipe.kind != "embedding"), 0.0)
    rank, ranks = _patterns({path: recipe.rank for path, recipe in recipes.items()})
    scales = {path: recipe.alpha for path, recipe in recipes.items()}
    alpha, alphas = _patterns({path: int(x) if float(x).is_integer() else x for path, x in scales.items()})
    saved, bias = _replaced_parameters(model, {path for path in leaves if path not in by_path}, adapted)
    module: Any = model.module
    name = type(module).__name__
    return {
        "peft_type": "LORA",
        "task_type": next((task for end, task in _TASKS.items() if name.endswith(end)), None),
        "base_model_name_or_path": getattr(module, "name_or_path", None) or None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": dropout,
        "use_rslora": rslora,
        "use_dora": dora,
        "target_modules": _target_names(model, by_path.keys() - bare, saved),
        "target_parameters": _bare_targets(model, bare),
        "modules_to_save": saved or None,
        "fan_in_fan_out": "conv1d" in kinds.values(),
        "bias": bias,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _replaced_parameters(model: Functional, copies: set[str], adapted: set[str]) -> tuple[list[str], targets.Bias]:
    """The `modules_to_save` and `bias` of a configuration that describe these replaced parameters."""

    def alone(path: str) -> bool:
        holder, _, name = path.rpartition(".")
        parameters = model.module.get_submodule(holder).named_parameters()
        return name == "bias" and not copies.issuperset(joined(holder, other) for other, _ in parameters)

    lone = set(filter(alone, copies))
    saved = sorted({path.rpartition(".")[0] for path in copies - lone})
    choices: tuple[targets.Bias, ...] = ("none", "lora_only", "all")
    for bias in choices:
        if lone == set(targets.biases(model, bias, adapted, saved)):
            return saved, bias
    raise ValueError(
        f"lora.save_pretrained: there are copies of {listed(sorted(lone), 4)}: peft supports no biases, those of "
        f"adapted layers, or all"
    )


def _refuse_several_names(model: Functional, paths: Iterable[str]) -> None:
    names = targets.other_names(model)
    for path in paths:
        if len(aliases := names(path)) > 1:
            raise ValueError(
                f"{path} is one module with {listed(aliases, 3, separator=' and ')}: in peft the first alone has the "
                f"adapter, here all of them have it"
            )


def _once(name: str, values: Iterable[Any], default: Any = None) -> Any:
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1:
        raise ValueError(
            f"lora.save_pretrained: adapters with {name}={distinct[0]} and {name}={distinct[1]}: peft has one"
        )
    return distinct[0] if distinct else default


def _patterns(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The most common value, and patterns for the others; the first pattern that matches counts."""
    common = Counter(values.values()).most_common(1)[0][0]
    patterns = {re.escape(path): value for path, value in values.items() if value != common}
    if any(targets.patterned(patterns, path, common) != value for path, value in values.items()):
        longest = sorted(values, key=len, reverse=True)
        patterns = {re.escape(path): values[path] for path in longest}
    return common, patterns


def _target_names(model: Functional, paths: set[str], saved: Iterable[str]) -> list[str] | str:
    """Names by which peft finds exactly these modules: last words of paths if possible."""
    if not paths:
        return []
    above = list(saved)
    left = [path for path, _ in model.module.named_modules() if path and not targets.inside(path, above)]
    return _names_of(paths, left, "targets") or f"({'|'.join(re.escape(path) for path in sorted(paths))})"


def _bare_targets(model: Functional, paths: set[str]) -> list[str] | None:
    """Names by which peft finds exactly these parameters."""
    names = _names_of(paths, model.names, targets.PARAMETERS) if paths else None
    if paths and not names:
        raise ValueError(
            f"lora.save_pretrained: peft has no names for {listed(sorted(paths), 4)} and no other parameters"
        )
    return names


def _names_of(paths: set[str], existing: Iterable[str], argument: str) -> list[str] | None:
    """Ends of paths that match exactly these of the existing paths: last words if possible; None if nothing does."""
    candidates = list(existing)
    for ends in (sorted({path.rpartition(".")[2] for path in paths}), sorted(paths)):
        if set(filter(targets.selector_of(ends, argument).matching, candidates)) == paths:
            return ends
    return None


def _adapter_tensors(model: Functional, adapters: Any) -> dict[str, Tensor]:
    """The adapters' tensors by their names in the file."""
    leaves = leaves_by_path(adapters, is_adapter)
    kinds = {path: leaf.recipe.kind for path, leaf in leaves.items() if is_adapter(leaf)}
    names = targets.in_files(model, kinds, leaves.keys() - kinds.keys())
    return {
        PREFIX + joined(names[path], part): x.detach().cpu().contiguous()
        for path, leaf in leaves.items()
        for part, x in leaves_by_path(leaf).items()
    }


def _write(folder: Path, tensors: dict[str, Tensor], config: str) -> None:
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    new = {name: folders.staging_path(folder / name, "writing") for name in (WEIGHTS, CONFIG)}
    try:
        write_whole(new[WEIGHTS], save(tensors, {"format": "pt"}))
        write_whole(new[CONFIG], config.encode())
        (folder / CONFIG).unlink(missing_ok=True)  # first, so that a crash leaves no adapter rather than a mixed one
        sync(folder)
        new[WEIGHTS].rename(folder / WEIGHTS)
        sync(folder)
        new[CONFIG].rename(folder / CONFIG)
        sync(folder)
    finally:
        for path in new.values():
            path.unlink(missing_ok=True)


# --- reading ---


@waiting.during("sf.lora.load")
@api_boundary
def load(
    folder: str | os.PathLike[str], model: Functional, mesh: DeviceMesh, strategy: Strategy, *, params: Any = None
) -> Any:
    """Reads adapters from peft's folder, and cuts them into shards; all ranks of the mesh call it.

    Args:
        folder: it has `adapter_config.json`, and `adapter_model.safetensors` or `adapter_model.bin`.
        model: what `interop.functional` made of the base.
        mesh: as for `shardfn.shard`.
        strategy: as for `shardfn.shard`: `sf.ddp("data")`, say.
        params: the model's parameters, to compare with base weights in the file, which peft writes beside adapters of
            an embedding; default: `model.tree`.

    Returns:
        Adapters like those of `init`, in float32 or the weights' own dtype if that is wider.

    Raises:
        CheckpointError: files are missing or damaged, of another model, or use options that are not supported; the same
            on every rank.

    Example:
        ``adapters = lora.load("french", model, mesh, sf.ddp("shard"))``
    """
    expect_functional("lora.load", model)
    path, group = local_path(folder, "lora.load: folder"), team_of([grid_of(mesh)])
    task = f"load {path}"
    adapters, base = group.run_on_each(task, lambda: _read_adapters(path, model))
    if len(set(group.gathered(tuple(sorted(base)), task))) > 1:
        raise CheckpointError(f"{task}: ranks see different files")
    if base:
        try:
            values = values_of(model, params, base)
        except ValueError as error:
            raise CheckpointError(
                f"{task}: it has {listed(base)} of the base, which must be those of the model: {error}"
            ) from None
        group.run_on_each(task, lambda: _compare_base(base, values))
    return shard(adapters, mesh, strategy)


def _compare_base(base: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    for name, x in base.items():
        param = params[name]
        if param.shape != x.shape or not torch.equal(param.cpu().to(x.dtype), x):
            raise CheckpointError(f"its {name} of the base differs from the model's: load it into the model first")


def _read_adapters(folder: Path, model: Functional) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Whole adapters, and the base's weights that are in the file as well."""
    config = _configuration(folder / CONFIG)
    file = next((folder / name for name in (WEIGHTS, "adapter_model.bin") if (folder / name).exists()), None)
    if file is None:
        raise CheckpointError(f"{folder} has no {WEIGHTS}")
    reader = FileReader(file)
    reader.check()
    if foreign := {**reader.source.others, **reader.source.numbers}:
        raise CheckpointError(f"{file} has {listed(foreign)}, which is not a tensor")
    if unprefixed := [name for name in reader.tensors if not name.startswith(PREFIX)]:
        raise CheckpointError(f"{file} has {unprefixed[0]}; peft's names begin with {PREFIX}")
    try:
        return _understood(config, reader.tensors, model)
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from None


def _understood(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: Functional
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    by_path = {path: m for path, m in model.module.named_modules() if path}

    def unwrapped(name: str) -> str:
        return name if name in by_path or name in model.names else re.sub(r"\.base_layer(?=\.)", "", name)

    saved = list(filter(targets.selector_of(config.get(targets.SAVED) or (), targets.SAVED).matching, by_path))
    bare = targets.parameters(
        model, targets.selector_of(config.get(targets.PARAMETERS) or (), targets.PARAMETERS), (), saved
    )
    targets.refuse_parts(bare, config.get("lora_dropout") or 0.0, bool(config.get("use_dora")))
    paths = {name: path for path, name in targets.in_files(model, bare).items()}
    parts_by_path: dict[str, dict[str, Tensor]] = {}
    other_tensors: dict[str, Tensor] = {}
    for key, x in tensors.items():
        name = key.removeprefix(PREFIX)
        part = next((part for parts in PARTS.values() for part in parts if name.endswith(f".{part}")), None)
        if part is not None:
            path = name[: -len(part) - 1]
            parts_by_path.setdefault(paths.get(path) or unwrapped(path), {})[part] = x
        elif not any(name.startswith((f"{prefix}.modules_to_save.", f"{prefix}.original_module.")) for prefix in saved):
            other_tensors[unwrapped(name)] = x
    unknown = [name for name in other_tensors if name not in model.names] + [
        path for path in parts_by_path if path not in by_path and path not in bare
    ]
    if unknown:
        raise CheckpointError(f"{type(model.module).__name__} has no {listed(unknown, 4)}: it is of another model")
    _check_complete(config, model, parts_by_path.keys() - bare.keys(), saved)
    kinds = {path: bare[path] if path in bare else _layer_kind(path, by_path[path]) for path in parts_by_path}
    adapted = set(itertools.starmap(targets.holder_of, kinds.items()))
    trained = targets.biases(model, config.get("bias") or "none", adapted, saved)
    if missing := [path for path in (*bare, *trained) if path not in parts_by_path and path not in other_tensors]:
        raise CheckpointError(f"its configuration names {listed(missing, 4)}, which has no tensors")
    copies = {name: x for name, x in other_tensors.items() if name in trained or targets.inside(name, saved)}
    _refuse_several_names(model, adapted)
    targets.refuse_several_homes(model, [*adapted, *{path.rpartition(".")[0] for path in copies}])
    adapters: dict[str, Any] = {}
    for path, parts in parts_by_path.items():
        weight = model.module.get_parameter(parameter_of(path, kinds[path]))
        adapters[path] = _adapter(config, path, kinds[path], weight, parts)
    for path, x in copies.items():
        parameter = model.module.get_parameter(path)
        if parameter.shape != x.shape:
            raise CheckpointError(f"{path} has shape {list(x.shape)}, which the model's has not")
        adapters[path] = x.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
    return by_stage(model, adapters), {name: x for name, x in other_tensors.items() if name not in copies}


def _configuration(file: Path) -> dict[str, Any]:
    """The contents of `adapter_config.json`.

    Raises:
        CheckpointError: it cannot be read, or has options that are not supported.
    """
    try:
        config = json.loads(file.read_bytes())
        kind = config.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from None
    if kind != "LORA":
        raise CheckpointError(f"{file} is of {kind!r}; there is LORA here")
    unsupported = {key: value for key, value in config.items() if key not in _HARMLESS and value}
    if config.get("init_lora_weights", True) not in _INITS:
        unsupported["init_lora_weights"] = config["init_lora_weights"]
    if unsupported:
        options = listed(f"{key}={value!r}" for key, value in unsupported.items())
        raise CheckpointError(f"{file} asks for {options}, which is not known here")
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), (int, float)):
            raise CheckpointError(f"{file} says {key}={config.get(key)!r}, which is not a number")
    return config


def _check_complete(config: Mapping[str, Any], model: Functional, paths: Set[str], saved: Iterable[str]) -> None:
    """Raises CheckpointError if the modules that the configuration names are not those that have tensors."""
    names, exclude = config.get("target_modules") or (), config.get("exclude_modules") or ()
    if not (names or config.get(targets.PARAMETERS)) or config.get("layers_to_transform") is not None:
        return
    excluded = targets.selector_of(exclude, "exclude_modules")
    if names == "all-linear":
        named_paths = set(targets.modules(model, names, exclude, config.get(targets.SAVED) or ()))
    else:
        all_paths = (path for path, _ in model.module.named_modules() if path)
        named_paths = set(filter(targets.selector_of(names, "target_modules").matching, all_paths))
    named_paths = {path for path in named_paths if not excluded.matching(path) and not targets.inside(path, saved)}
    if named_paths != paths:
        missing, extra = sorted(named_paths - paths), sorted(paths - named_paths)
        raise CheckpointError(
            f"its configuration and its tensors name other modules: {listed((missing or extra), 4)} "
            f"{'has no tensors' if missing else 'is not among its target_modules'}"
        )


def _layer_kind(path: str, m: nn.Module) -> Kind:
    kind = layer_kind(m)
    if kind is None or m._parameters.get("weight") is None:
        raise CheckpointError(f"{path} is a {type(m).__name__}, which has no adapters here")
    return kind


def _adapter(config: Mapping[str, Any], path: str, kind: Kind, weight: Tensor, parts: Mapping[str, Tensor]) -> Adapter:
    names = PARTS[kind] if config.get("use_dora") else PARTS[kind][:2]
    if set(parts) != set(names):
        name = sorted(set(parts) ^ set(names))[0]
        raise CheckpointError(f"{joined(path, name)} is {'missing' if name in names else 'there, and should not be'}")
    rank = targets.patterned(config.get("rank_pattern") or {}, path, config["r"])
    alpha = targets.patterned(config.get("alpha_pattern") or {}, path, config["lora_alpha"])
    dropout = 0.0 if kind == "embedding" else config.get("lora_dropout") or 0.0
    dtype = torch.promote_types(weight.dtype, torch.float32)
    values = [parts[part].to(dtype, copy=True) for part in names]
    shapes = [tuple(x.shape) for x in values]
    if shapes != thin(kind, weight.shape, rank)[: len(shapes)]:
        raise CheckpointError(
            f"{path} has an adapter of shapes {' and '.join(str(list(shape)) for shape in shapes)}; its weight has "
            f"{list(weight.shape)}, and the rank is {rank}"
        )
    a, b, magnitude = (*values, None)[:3]
    return Adapter(a, b, magnitude, Recipe(kind, rank, alpha, bool(config.get("use_rslora")), dropout))
