"""From a file to a translation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardfn.quoting import listed
from shardfn.translate import accelerate, composer, deepspeed, files, fsdp, lightning, transformers
from shardfn.translate.calls import calls
from shardfn.translate.draft import Draft
from shardfn.translate.facts import Call, TranslateError, Translation
from shardfn.translate.program import program
from shardfn.translate.schema import Section, read
from shardfn.translate.settling import settle

_TRAINERS = {"Trainer", "Fabric", *transformers.TRAINERS}
READ = {*lightning.STRATEGIES, *_TRAINERS, *transformers.ARGUMENTS, *fsdp.CALLS, *accelerate.PLUGINS, "Accelerator"}
_READ_BEFORE = ("fsdp_plugin", "deepspeed_plugin")
_FILES = {"Accelerate": accelerate.FILE, "DeepSpeed": deepspeed.FILE, "Composer": composer.FILE}


def translate(path: str | os.PathLike[str]) -> Translation:
    """Says in lines of shardfn what a configuration of another system says.

    Args:
        path: a YAML of Accelerate (with DeepSpeed's JSON, where it links one) or Composer, a JSON of DeepSpeed, or a
            Python file with the strategy of Lightning, Composer or torch, a plugin of Accelerate, or the arguments of a
            Trainer of Transformers; it is never run.

    Returns:
        The program, and a row for each key.

    Raises:
        TranslateError: what cannot be read, has a value that its key cannot have, or contradicts itself.

    Example:
        ``print(translate("ds_config.json").program)``
    """
    file, draft = Path(path), Draft()
    try:
        if file.suffix == ".py":
            found, imported = calls(files.text_of(file), {*READ, *fsdp.BESIDE})
            system = _called(draft, file, found, imported)
            fsdp.beside(draft, found)
        else:
            given = files.mapping_of(file)
            system = files.system_of(given, str(file), _FILES)
            read(draft, "", files.linked(given, file) if system == "Accelerate" else given, _FILES[system])
        settle(draft)
        text = program(draft)
    except RecursionError:
        raise TranslateError(f"{file}: nested too deeply") from None
    except TranslateError as error:
        said = str(error)
        raise TranslateError(said if said.startswith(str(file)) else f"{file}: {said}") from None
    return Translation(str(file), system, tuple(draft.rows), text, dict(draft.names))


def _called(draft: Draft, file: Path, found: list[Call], imported: set[str]) -> str:
    """Reads the call that says how the program is sharded, and says whose it is."""
    strategies = [one for one in found if one.name in lightning.STRATEGIES]
    torch = [one for one in found if one.name in fsdp.CALLS]
    plugins = [one for one in found if one.name in accelerate.PLUGINS]
    trainers = [one for one in found if one.name in _TRAINERS]
    made = [one for one in found if one.name == "Accelerator"]
    arguments = [one for one in found if one.name in transformers.ARGUMENTS]
    _refuse_two(strategies, torch, plugins, trainers)
    trainer = trainers[0].arguments if trainers else {}
    if arguments or "args" in trainer or any(one.name in transformers.TRAINERS for one in trainers):
        _transformers(draft, file, arguments, trainer)
        return "Transformers"
    if plugins or made:
        _accelerate(draft, plugins, made)
        return "Accelerate"
    if trainers and not strategies and _is_composer(trainer, imported):
        read(draft, "", trainer, composer.FILE)
        return "Composer"
    if strategies or trainers:
        lightning.translate(draft, strategies[0] if strategies else None, trainer)
        return "Lightning"
    if torch:
        fsdp.several(draft, torch)
        return "torch"
    raise TranslateError(f"no call that is read: {', '.join(sorted(READ))}")


def _refuse_two(strategies: list[Call], torch: list[Call], plugins: list[Call], trainers: list[Call]) -> None:
    kinds = {fsdp.CALLS[one.name].owner for one in torch}
    differ = fsdp.differ(torch)
    if len(strategies) + len(plugins) + len(kinds) > 1 or len(trainers) > 1 or differ:
        lines = listed(f"{one.name} in line {one.line}" for one in [*strategies, *plugins, *torch, *trainers])
        why = f", which differ in {listed(differ)}" if differ else ""
        raise TranslateError(f"two strategies in one file: {lines}{why}; leave one of them")


def _is_composer(given: Mapping[str, Any], imported: set[str]) -> bool:
    if {"composer", "llmfoundry"} & imported or {"lightning", "pytorch_lightning"} & imported:
        return bool({"composer", "llmfoundry"} & imported)
    return bool({"parallelism_config", "fsdp_config", "max_duration", "device_train_microbatch_size"} & set(given))


def _accelerate(draft: Draft, plugins: list[Call], made: list[Call]) -> None:
    for one in plugins:
        read(draft, "", one, accelerate.PLUGINS[one.name])
    given = {key: one for call in made for key, one in call.arguments.items() if key not in _READ_BEFORE}
    cut = "zero2" if draft.get("kind") == "deepspeed" else "ddp"
    read(draft, "", given, Section(accelerate.ACCELERATOR, "Accelerator", cut=cut))


def _transformers(draft: Draft, file: Path, arguments: list[Call], trainer: Mapping[str, Any]) -> None:
    if len(arguments) != 1:
        lines = listed(f"{one.name} in line {one.line}" for one in arguments)
        told = f"{lines}; leave one of them" if arguments else f"none of {listed(sorted(transformers.ARGUMENTS))}"
        raise TranslateError(f"a Trainer of Transformers is told by one set of arguments, and there is {told}")
    transformers.translate(draft, arguments[0], trainer, lambda name: files.mapping_of(files.near(file, name)))
