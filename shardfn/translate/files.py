"""Files: what kind they are, what they hold, and whose configuration that is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardfn.quoting import listed
from shardfn.translate import composer
from shardfn.translate.facts import TranslateError
from shardfn.translate.schema import Section

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


def text_of(path: Path) -> str:
    """A file's text.

    Raises:
        TranslateError: there is none, or it is too large or no text.
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
    """What a JSON or a YAML file holds.

    Raises:
        TranslateError: it is neither, or no mapping of keys.
    """
    text = text_of(path)
    try:
        found = _json(path, text) if path.suffix == ".json" or text.lstrip()[:1] == "{" else _yaml(path, text)
    except RecursionError:
        raise TranslateError(f"{path}: nested too deeply") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        kind = "a list" if isinstance(found, list) else "no mapping of keys that are strings"
        raise TranslateError(f"{path}: {kind}; a configuration is a mapping of keys")
    return found


def _json(path: Path, text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise TranslateError(f"{path}: the key {twice} stands twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise TranslateError(f"{path}: line {error.lineno}: not JSON: {error.msg}") from None


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise TranslateError(
            f"{path}: reading YAML needs pyyaml, which is in the extra translate: pip install 'shardfn[translate]'"
        ) from None

    class Once(yaml.SafeLoader):  # type: ignore[misc]
        """Of two equal keys YAML's own reader takes the last, and says nothing."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key.value, str) and key.value in seen:
                    line = node.start_mark.line + 1
                    raise TranslateError(f"{path}: line {line}: the key {key.value} stands twice")
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Once)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise TranslateError(f"{path}: {where}not YAML: {getattr(error, 'problem', error)}") from None


def system_of(given: Mapping[str, Any], where: str, systems: Mapping[str, Section]) -> str:
    """Whose configuration a mapping is, of these systems.

    Raises:
        TranslateError: nobody's that is known here, or two systems'.
    """
    plugin, parallel = (
        set(one) if isinstance(one, Mapping) else set()
        for one in (given.get("fsdp_config"), given.get("parallelism_config"))
    )
    found = {name for name, keys in _OWN.items() if set(keys.split()) & set(given)}
    if any(str(key).startswith("fsdp_") for key in plugin):
        found.add("Accelerate")
    elif plugin & set(composer.FSDP):
        found.add("Composer")
    if {"fsdp", "fsdp2", "tp"} & parallel:
        found.add("Composer")
    if len(found) > 1:
        whose = listed((name for name in systems if name in found), separator=" and ")
        raise TranslateError(f"{where}: two strategies in one file, those of {whose}; leave one of them")
    return found.pop() if found else _likeliest(given, where, systems)


def _likeliest(given: Mapping[str, Any], where: str, systems: Mapping[str, Section]) -> str:
    """By how many of the keys a system knows, where none is its own alone."""
    known = {name: sum(key in section.table for key in given) for name, section in systems.items()}
    best = [name for name, count in known.items() if count == max(known.values())]
    typed = [one for one in (given.get("optimizer"), given.get("scheduler")) if isinstance(one, Mapping)]
    if len(best) > 1 and typed:
        best = ["DeepSpeed"] if all("type" in one for one in typed) else ["Composer"]
    if len(best) > 1 or not known[best[0]]:
        few = ", ".join(list(map(str, given))[:5])
        raise TranslateError(f"{where}: no configuration that is known here, by its keys: {few}; FILE is {SYSTEMS}")
    return best[0]


def near(path: Path, name: str) -> Path:
    """A file that another one names: beside it, or by its own path."""
    beside = path.parent / name
    return beside if beside.is_file() else Path(name)


def linked(given: dict[str, Any], path: Path) -> dict[str, Any]:
    """With the file that deepspeed_config_file names in the place of its name.

    Raises:
        TranslateError: it is not there, or leads back.
    """
    section = given.get("deepspeed_config")
    section = section if isinstance(section, Mapping) else {}
    name = section.get("deepspeed_config_file")
    if not isinstance(name, str) or name.strip().lower() == "none":
        return given
    file = near(path, name)
    if file.exists() and path.exists() and file.samefile(path):
        raise TranslateError(f"{path}: deepspeed_config_file leads back to the file itself")
    found = mapping_of(file)
    if "deepspeed_config" in found or "deepspeed_config_file" in found:
        raise TranslateError(f"{path}: deepspeed_config_file is {file}, which names one itself: a circle")
    both = sorted({"gradient_clipping", "gradient_accumulation_steps", "zero_stage"} & set(section))
    zero = found.get("zero_optimization")
    inside = {"zero_stage": zero.get("stage", 0) if isinstance(zero, Mapping) else 0} | found
    for key in both:
        if inside.get(key, section[key]) not in (section[key], "auto"):
            raise TranslateError(f"{path}: deepspeed_config.{key} and {file} contradict each other")
    return {**given, "deepspeed_config": {**section, "deepspeed_config_file": found}}
