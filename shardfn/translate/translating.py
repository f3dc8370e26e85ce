"""From a file to a translation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardfn.quoting import listed
from shardfn.translate import accelerate, composer, deepspeed, fsdp, lightning, reading, snippets, transformers
from shardfn.translate.draft import Draft
from shardfn.translate.facts import Call, TranslateError, Translation
from shardfn.translate.meanings import apply
from shardfn.translate.program import program

_TRAINERS = {"Trainer", "Fabric", *transformers.TRAINERS}
_TORCH = {"FullyShardedDataParallel": "FSDP1", "FSDP": "FSDP1", "fully_shard": "FSDP2"}
_PLUGINS = {"FullyShardedDataParallelPlugin", "DeepSpeedPlugin"}


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
        system = _python(draft, file) if file.suffix == ".py" else _mapping(draft, file)
        if "product" not in draft.facts:
            deepspeed.batches(draft)
        text = program(draft)
    except RecursionError:
        raise TranslateError(f"{file}: nested too deeply") from None
    except TranslateError as error:
        said = str(error)
        raise TranslateError(said if said.startswith(str(file)) else f"{file}: {said}") from None
    return Translation(str(file), system, tuple(draft.rows), text, dict(draft.names))


def _mapping(draft: Draft, file: Path) -> str:
    given = reading.mapping_of(file)
    system = reading.system_of(given, str(file))
    if system == "Accelerate":
        accelerate.translate(draft, reading.linked(given, file))
    else:
        (deepspeed if system == "DeepSpeed" else composer).translate(draft, given)
    return system


def _python(draft: Draft, file: Path) -> str:
    found, imported = snippets.calls(reading.text_of(file), fsdp.CALLS)
    system = _called(draft, file, found, imported)
    fsdp.beside(draft, found)
    return system


def _called(draft: Draft, file: Path, found: list[Call], imported: set[str]) -> str:
    """Whose call says how the program is sharded, and what."""
    strategies = [one for one in found if one.name in lightning.STRATEGIES]
    torch = [one for one in found if one.name in _TORCH]
    plugins = [one for one in found if one.name in _PLUGINS]
    trainers = [one for one in found if one.name in _TRAINERS]
    kinds = {_TORCH[one.name] for one in torch}
    if len(strategies) + len(plugins) + len(kinds) > 1 or len(trainers) > 1 or _differ(torch):
        lines = listed(f"{one.name} in line {one.line}" for one in [*strategies, *plugins, *torch, *trainers])
        why = f", which differ in {listed(_differ(torch))}" if _differ(torch) else ""
        raise TranslateError(f"two strategies in one file: {lines}{why}; leave one of them")
    arguments = trainers[0].arguments if trainers else {}
    of_transformers = [one for one in found if one.name in transformers.ARGUMENTS]
    if of_transformers or "args" in arguments or any(one.name in transformers.TRAINERS for one in trainers):
        return _transformers(draft, file, of_transformers, trainers)
    if plugins or any(one.name == "Accelerator" for one in found):
        return _plugin(draft, plugins, [one for one in found if one.name == "Accelerator"])
    if trainers and not strategies and _is_composer(arguments, imported):
        composer.translate(draft, arguments)
        return "Composer"
    if strategies or trainers:
        lightning.translate(draft, strategies[0] if strategies else None, arguments)
        return "Lightning"
    if torch:
        return _plain(draft, torch)
    raise TranslateError(f"no call that is read: {', '.join(sorted(snippets.READ))}")


_KEPT = "reshard_after_forward"


def _differ(torch: list[Call]) -> list[str]:
    """In what calls for several modules differ, but for the module, and whether it is kept whole."""
    found = set()
    for call in torch:
        for key in {*torch[0].arguments, *call.arguments} - {"module", _KEPT}:
            if call.arguments.get(key) != torch[0].arguments.get(key):
                found.add(key)
    return sorted(found)


def _is_composer(given: Mapping[str, Any], imported: set[str]) -> bool:
    if {"composer", "llmfoundry"} & imported or {"lightning", "pytorch_lightning"} & imported:
        return bool({"composer", "llmfoundry"} & imported)
    return bool({"parallelism_config", "fsdp_config", "max_duration", "device_train_microbatch_size"} & set(given))


def _plugin(draft: Draft, plugins: list[Call], made: list[Call]) -> str:
    arguments = {
        key: one
        for call in made
        for key, one in call.arguments.items()
        if key not in ("fsdp_plugin", "deepspeed_plugin")
    }
    draft.facts["fsdp"] = any(one.name == "FullyShardedDataParallelPlugin" for one in plugins)
    draft.facts["deepspeed"] = any(one.name == "DeepSpeedPlugin" for one in plugins)
    for one in plugins:
        if draft.get("fsdp"):
            accelerate.plugin(draft, one.arguments)
        else:
            apply(draft, one.arguments, accelerate.DEEPSPEED, "", "DeepSpeedPlugin")
    accelerate.accelerator(draft, arguments)
    draft.facts.setdefault("cut", "zero2" if draft.get("deepspeed") else "ddp")
    return "Accelerate"


def _transformers(draft: Draft, file: Path, arguments: list[Call], trainers: list[Call]) -> str:
    if len(arguments) != 1:
        lines = listed(f"{one.name} in line {one.line}" for one in arguments)
        told = f"{lines}; leave one of them" if arguments else f"none of {listed(sorted(transformers.ARGUMENTS))}"
        raise TranslateError(f"a Trainer of Transformers is told by one set of arguments, and there is {told}")
    trainer = trainers[0].arguments if trainers else {}

    def linked(name: str) -> dict[str, Any]:
        near = file.parent / name
        return reading.mapping_of(near if near.is_file() else Path(name))

    transformers.translate(draft, arguments[0], trainer, linked)
    return "Transformers"


def _plain(draft: Draft, torch: list[Call]) -> str:
    old = _TORCH[torch[0].name] == "FSDP1"
    apply(draft, torch[0].arguments, fsdp.FSDP1 if old else fsdp.FSDP2, "", torch[0].name)
    for call in torch:
        kept = call.arguments.get(_KEPT)
        if kept == torch[0].arguments.get(_KEPT):
            continue
        if call is torch[-1]:
            text = "of the root alone: what the ring of buffers still holds is not gathered again; no number changes"
            draft.row(f"{_KEPT} in line {call.line}", kept, "always", text)
        else:
            text = "one strategy for all stages: no number changes, memory may; reshard= of sf.stage is of one"
            draft.row(f"{_KEPT} in line {call.line}", kept, "missing", text)
    draft.facts.setdefault("cut", "full_shard")
    if draft.get("hybrid") and not draft.get("cut").startswith(("hybrid", "hpz")):
        draft.facts["cut"] = "hybrid_shard" if draft.get("cut") == "full_shard" else "hybrid_shard_zero2"
    return "torch"
