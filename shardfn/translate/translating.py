"""From a configuration file to its translation."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardfn.local_paths import local_path
from shardfn.quoting import listed
from shardfn.translate import accelerate, beside, composer, deepspeed, fsdp, lightning, transformers
from shardfn.translate.calls import calls
from shardfn.translate.draft import Translation, TranslationBuilder, derive_facts
from shardfn.translate.program import program
from shardfn.translate.schema import Section, missing, read, yours
from shardfn.translate.values import SourceCall, TranslateError

_LARGEST = 1_000_000
# Keys that no other system has.
_OWN = {
    "Accelerate": "compute_environment distributed_type num_machines num_processes machine_rank deepspeed_config "
    "main_training_function",
    "DeepSpeed": "zero_optimization train_batch_size train_micro_batch_size_per_gpu fp16 bf16 gradient_clipping "
    "wall_clock_breakdown zero_allow_untested_optimizer",
    "Composer": "device_train_microbatch_size max_duration global_train_batch_size",
}
SYSTEMS = (
    "a YAML of Accelerate or Composer, a JSON of DeepSpeed, or Python with the strategy of Lightning, Composer or torch"
)
_TRAINERS = {"Trainer", "Fabric", *transformers.TRAINERS}
READ = {*lightning.STRATEGIES, *_TRAINERS, *transformers.ARGUMENTS, *fsdp.CALLS, *accelerate.PLUGINS, "Accelerator",
        "deepspeed.initialize"}  # fmt: skip
_READ_BEFORE = ("fsdp_plugin", "deepspeed_plugin")
_FILES = {"Accelerate": accelerate.FILE, "DeepSpeed": deepspeed.FILE, "Composer": composer.FILE}


def translate(path: str | os.PathLike[str]) -> Translation:
    """Translates a configuration of another system into lines of shardfn.

    Args:
        path: a YAML of Accelerate (with DeepSpeed's JSON, where it links one) or Composer, a JSON of DeepSpeed, or a
            Python file with the strategy of Lightning, Composer or torch, a plugin of Accelerate, or the arguments of a
            Trainer of Transformers, which is never run.

    Returns:
        The program, and a row for each key.

    Raises:
        TranslateError: the file cannot be read, a key cannot have its value, or the file contradicts itself.

    Example:
        ``print(translate("ds_config.json").program)``
    """
    file, draft = local_path(path, "translate: path"), TranslationBuilder()
    try:
        if file.suffix == ".py":
            calls_read, imported, modules = calls(text_of(file), {*READ, *fsdp.BESIDE, *beside.TABLE})
            system, used = _read_call(draft, file, calls_read, imported)
            fsdp.read_other_calls(draft, calls_read)
            beside.add_rows(draft, calls_read, used, modules, fsdp.BESIDE)
        else:
            config = mapping_of(file)
            system = system_of(config, str(file), _FILES)
            read(draft, "", linked(config, file) if system == "Accelerate" else config, _FILES[system])
        derive_facts(draft)
        text = program(draft)
    except RecursionError:
        raise TranslateError(f"{file}: nested too deeply") from None
    except TranslateError as error:
        message = str(error)
        raise TranslateError(message if message.startswith(str(file)) else f"{file}: {message}") from None
    return Translation(str(file), system, tuple(draft.rows), text, dict(draft.names))


def _read_call(
    draft: TranslationBuilder, file: Path, calls_read: list[SourceCall], imported: set[str]
) -> tuple[str, list[SourceCall]]:
    """Reads the call that says how the program is sharded; returns its system, and the calls that it has read."""
    kinds = (
        lightning.STRATEGIES, fsdp.CALLS, accelerate.PLUGINS, _TRAINERS, ("Accelerator",), transformers.ARGUMENTS,
        ("deepspeed.initialize",), ("ZeroRedundancyOptimizer",),
    )  # fmt: skip
    strategies, torch, plugins, trainers, accelerators, arguments, engines, zero1 = (
        [call for call in calls_read if call.name in names] for names in kinds
    )
    several = len(strategies) + len(plugins) + len({fsdp.CALLS[call.name].owner for call in torch}) > 1
    differing = fsdp.differ(torch)
    if several or len(trainers) > 1 or differing:
        lines = listed(f"{call.name} in line {call.line}" for call in [*strategies, *plugins, *torch, *trainers])
        difference = f", which differ in {listed(differing)}" if differing else ""
        raise TranslateError(f"two strategies in one file: {lines}{difference}; leave one of them")
    trainer = trainers[0].arguments if trainers else {}
    if arguments or "args" in trainer or any(call.name in transformers.TRAINERS for call in trainers):
        if len(arguments) != 1:
            lines = listed(f"{call.name} in line {call.line}" for call in arguments)
            none = f"none of {listed(sorted(transformers.ARGUMENTS))}"
            listing = f"{lines}; leave one of them" if arguments else none
            raise TranslateError(f"a Trainer of Transformers takes one set of arguments, and there is {listing}")
        transformers.read_arguments(draft, arguments[0], trainer, lambda name: mapping_of(near(file, name)))
        return "Transformers", [*trainers, *arguments]
    if plugins or accelerators:
        for plugin in plugins:
            read(draft, "", plugin, accelerate.PLUGINS[plugin.name])
        settings = {key: x for call in accelerators for key, x in call.arguments.items() if key not in _READ_BEFORE}
        cut = "zero2" if draft.get("kind") == "deepspeed" else "ddp"
        read(draft, "", settings, Section(accelerate.ACCELERATOR, "Accelerator", cut=cut))
        return "Accelerate", [*plugins, *accelerators]
    if trainers and not strategies and _is_composer(trainer, imported):
        read(draft, "", trainer, composer.FILE)
        return "Composer", trainers
    if strategies or trainers:
        lightning.read_trainer(draft, strategies[0] if strategies else None, trainer)
        return "Lightning", [*strategies, *trainers]
    if engines:
        _engine(draft, file, engines[0])
        return "DeepSpeed", engines[:1]
    if torch:
        fsdp.several(draft, torch)
        return "torch", torch
    if zero1:
        return "torch", []
    raise TranslateError(f"no call that is read: {', '.join(sorted(READ))}")


_ENGINE = {
    **dict.fromkeys(
        ("args", "model", "model_parameters", "training_data", "collate_fn"), yours("the program is yours")
    ),
    "optimizer": yours("the optimizer, in rows of its own, if the file makes it"),
    "dist_init_required": yours("make_mesh starts torch.distributed"),
    "distributed_port": yours("starting processes: torchrun"),
    "lr_scheduler": missing("lr= of the optimizer takes a function of the step", "None"),
    "mpu": missing("axes of the mesh: see docs/how-to/tensor-parallel.md", "None"),
    "mesh_param": missing("axes of make_mesh", "None"),
}


def _engine(draft: TranslationBuilder, file: Path, call: SourceCall) -> None:
    """Reads deepspeed.initialize, whose `config` is a dict, or names a file."""
    settings = dict(call.arguments)
    config = settings.pop("config", settings.pop("config_params", None))
    if config is None:
        draft.row("config", "not said", "open", "of the command line, by args: translate that file")
    keys = transformers.mapping(draft, "config", config, lambda name: mapping_of(near(file, name)))
    read(draft, "", keys, deepspeed.FILE)
    read(draft, "", settings, Section(_ENGINE, "deepspeed.initialize", cut="ddp"))


def _is_composer(arguments: Mapping[str, Any], imported: set[str]) -> bool:
    if {"composer", "llmfoundry"} & imported or {"lightning", "pytorch_lightning"} & imported:
        return bool({"composer", "llmfoundry"} & imported)
    return bool({"parallelism_config", "fsdp_config", "max_duration", "device_train_microbatch_size"} & set(arguments))


# --- files ---


def text_of(path: Path) -> str:
    """A file's text.

    Raises:
        TranslateError: there is no such file, or it is too large, empty or not text.
    """
    try:
        if not path.is_file():
            raise TranslateError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}; FILE is {SYSTEMS}")
        if path.stat().st_size > _LARGEST:
            raise TranslateError(f"{path}: {path.stat().st_size} bytes is more than a configuration has, {_LARGEST}")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise TranslateError(f"{path}: not text in UTF-8") from None
    except OSError as error:
        raise TranslateError(f"{path}: {error.strerror}") from None
    if "\0" in text:
        raise TranslateError(f"{path}: not text: it has zero bytes")
    if not text.strip():
        raise TranslateError(f"{path}: empty")
    return text


def mapping_of(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or a YAML file.

    Raises:
        TranslateError: it is neither, or not a mapping with strings as keys.
    """
    text = text_of(path)
    try:
        mapping = _json(path, text) if path.suffix == ".json" or text.lstrip()[:1] == "{" else _yaml(path, text)
    except RecursionError:
        raise TranslateError(f"{path}: nested too deeply") from None
    if not isinstance(mapping, dict) or not all(isinstance(key, str) for key in mapping):
        kind = "a list" if isinstance(mapping, list) else "no mapping of keys that are strings"
        raise TranslateError(f"{path}: {kind}; a configuration is a mapping of keys")
    return mapping


def _json(path: Path, text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise TranslateError(f"{path}: the key {twice} stands twice")
        return mapping

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise TranslateError(f"{path}: line {error.lineno}: not JSON: {error.msg}") from None


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise TranslateError(
            f"{path}: reading YAML needs pyyaml, which is in the extra translate: pip install '.[translate]'"
        ) from None

    class Once(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that stands twice; the base class silently takes the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys: set[str] = set()
            for key, _ in node.value:
                if isinstance(key.value, str) and key.value in keys:
                    line = node.start_mark.line + 1
                    raise TranslateError(f"{path}: line {line}: the key {key.value} stands twice")
                keys.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Once)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise TranslateError(f"{path}: {where}not YAML: {getattr(error, 'problem', error)}") from None


def system_of(config: Mapping[str, Any], where: str, systems: Mapping[str, Section]) -> str:
    """The system whose configuration a mapping is.

    Raises:
        TranslateError: it is none of these systems', or two systems'.
    """
    plugin, parallel = (
        set(x) if isinstance(x, Mapping) else set()
        for x in (config.get("fsdp_config"), config.get("parallelism_config"))
    )
    matches = {name for name, keys in _OWN.items() if set(keys.split()) & set(config)}
    if any(str(key).startswith("fsdp_") for key in plugin):
        matches.add("Accelerate")
    elif plugin & set(composer.FSDP):
        matches.add("Composer")
    if {"fsdp", "fsdp2", "tp"} & parallel:
        matches.add("Composer")
    if len(matches) > 1:
        whose = listed((name for name in systems if name in matches), separator=" and ")
        raise TranslateError(f"{where}: one file has two strategies, those of {whose}; keep one of them")
    return matches.pop() if matches else _likeliest(config, where, systems)


def _likeliest(config: Mapping[str, Any], where: str, systems: Mapping[str, Section]) -> str:
    """The system that knows most of the keys, where none is specific to one system."""
    counts = {name: sum(key in section.table for key in config) for name, section in systems.items()}
    best = [name for name, count in counts.items() if count == max(counts.values())]
    typed = [x for x in (config.get("optimizer"), config.get("scheduler")) if isinstance(x, Mapping)]
    if len(best) > 1 and typed:
        best = ["DeepSpeed"] if all("type" in x for x in typed) else ["Composer"]
    if len(best) > 1 or not counts[best[0]]:
        names = ", ".join(list(map(str, config))[:5])
        raise TranslateError(f"{where}: no configuration that is known here, by its keys: {names}; FILE is {SYSTEMS}")
    return best[0]


def near(path: Path, name: str) -> Path:
    """The file that another one names: next to it, or at the path itself."""
    sibling = path.parent / name
    return sibling if sibling.is_file() else Path(name)


def linked(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The configuration with the contents of the file that deepspeed_config_file names in place of its name.

    Raises:
        TranslateError: the file is not there, leads back, or contradicts the configuration.
    """
    section = config.get("deepspeed_config")
    section = section if isinstance(section, Mapping) else {}
    name = section.get("deepspeed_config_file")
    if not isinstance(name, str) or name.strip().lower() == "none":
        return config
    file = near(path, name)
    if file.exists() and path.exists() and file.samefile(path):
        raise TranslateError(f"{path}: deepspeed_config_file leads back to the file itself")
    contents = mapping_of(file)
    if "deepspeed_config" in contents or "deepspeed_config_file" in contents:
        raise TranslateError(f"{path}: deepspeed_config_file is {file}, which names one itself: a circle")
    repeated = sorted({"gradient_clipping", "gradient_accumulation_steps", "zero_stage"} & set(section))
    zero = contents.get("zero_optimization")
    inside = {"zero_stage": zero.get("stage", 0) if isinstance(zero, Mapping) else 0} | contents
    for key in repeated:
        if inside.get(key, section[key]) not in (section[key], "auto"):
            raise TranslateError(f"{path}: deepspeed_config.{key} and {file} contradict each other")
    return {**config, "deepspeed_config": {**section, "deepspeed_config_file": contents}}
