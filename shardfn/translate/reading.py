"""Files: what kind they are, what they hold, and whose configuration that is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardfn.quoting import listed
from shardfn.translate import accelerate, composer, deepspeed
from shardfn.translate.facts import TranslateError

_LARGEST = 1_000_000
_ACCELERATE = {
    "compute_environment",
    "distributed_type",
    "num_machines",
    "num_processes",
    "machine_rank",
    "deepspeed_config",
    "main_training_function",
}
_DEEPSPEED = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "fp16",
    "bf16",
    "gradient_clipping",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
}
_COMPOSER = {"device_train_microbatch_size", "max_duration", "global_train_batch_size"}
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
        twice = (
            [key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1] if len(found) < len(pairs) else []
        )
        if twice:
            raise TranslateError(f"{path}: the key {twice[0]} stands twice")
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
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        _once(path, tree)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise TranslateError(f"{path}: {where}not YAML: {getattr(error, 'problem', error)}") from None


def _once(path: Path, node: Any) -> None:
    """Of two equal keys YAML's reader takes the last, and says nothing."""
    seen, waiting = set(), [node]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not isinstance(getattr(one, "value", None), list):
            continue
        seen.add(id(one))
        pairs = [pair for pair in one.value if isinstance(pair, tuple)]
        keys = [key.value for key, _ in pairs if isinstance(key.value, str)]
        twice = next((key for key in keys if keys.count(key) > 1), None) if len(keys) < 2000 else None
        if twice is not None:
            raise TranslateError(f"{path}: line {one.start_mark.line + 1}: the key {twice} stands twice")
        waiting += [value for _, value in pairs] + [value for value in one.value if not isinstance(value, tuple)]


def system_of(given: Mapping[str, Any], where: str) -> str:
    """Whose configuration a mapping is.

    Raises:
        TranslateError: nobody's that is known here, or two systems'.
    """
    plugin = given.get("fsdp_config")
    section: Mapping[str, Any] = plugin if isinstance(plugin, Mapping) else {}
    parallel = given.get("parallelism_config")
    prefixed = any(str(key).startswith("fsdp_") for key in section)
    found = {
        "Accelerate": bool(_ACCELERATE & set(given)) or prefixed,
        "DeepSpeed": bool(_DEEPSPEED & set(given)),
        "Composer": bool(_COMPOSER & set(given))
        or (isinstance(parallel, Mapping) and bool({"fsdp", "fsdp2", "tp"} & set(parallel)))
        or (bool(section) and not prefixed and bool(set(section) & set(composer.FSDP))),
    }
    which = [name for name, yes in found.items() if yes]
    if len(which) > 1:
        raise TranslateError(
            f"{where}: two strategies in one file, those of {listed(which, separator=' and ')}; leave one of them"
        )
    return which[0] if which else _likeliest(given, where)


def _likeliest(given: Mapping[str, Any], where: str) -> str:
    """By how many of the keys a system knows, where none is its own alone."""
    tables = {"Accelerate": accelerate.CONFIG, "DeepSpeed": deepspeed.CONFIG, "Composer": composer.CONFIG}
    known = {name: sum(key in table for key in given) for name, table in tables.items()}
    best = [name for name, count in known.items() if count == max(known.values())]
    typed = [one for one in (given.get("optimizer"), given.get("scheduler")) if isinstance(one, Mapping)]
    if len(best) > 1 and typed:
        best = ["DeepSpeed"] if all("type" in one for one in typed) else ["Composer"]
    if len(best) > 1 or not known[best[0]]:
        near = ", ".join(list(map(str, given))[:5])
        raise TranslateError(f"{where}: no configuration that is known here, by its keys: {near}; FILE is {SYSTEMS}")
    return best[0]


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
    near = path.parent / name
    file = near if near.is_file() else Path(name)
    if file.exists() and path.exists() and file.samefile(path):
        raise TranslateError(f"{path}: deepspeed_config_file leads back to the file itself")
    found = mapping_of(file)
    if "deepspeed_config" in found or "deepspeed_config_file" in found:
        raise TranslateError(f"{path}: deepspeed_config_file is {file}, which names one itself: a circle")
    both = sorted({"gradient_clipping", "gradient_accumulation_steps", "zero_stage"} & set(section))
    inside = {"zero_stage": _stage(found)} | {key: found[key] for key in both if key in found}
    for key in both:
        if inside.get(key, section[key]) not in (section[key], "auto"):
            raise TranslateError(f"{path}: deepspeed_config.{key} and {file} contradict each other")
    return {**given, "deepspeed_config": {**section, "deepspeed_config_file": found}}


def _stage(found: Mapping[str, Any]) -> Any:
    zero = found.get("zero_optimization")
    return zero.get("stage", 0) if isinstance(zero, Mapping) else 0
