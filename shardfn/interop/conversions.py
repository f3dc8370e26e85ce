"""Maps tensors between the files of `transformers` and the parameters of a module.

All private parts of `transformers` that this package uses are used here, except those of attention
(`context_parallel`): the rules by which its `from_pretrained` and
`save_pretrained`, and also `peft`, rename tensors, join several into one, and split one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import optree
import torch
from torch import nn

from shardfn.checkpoint.team import CheckpointError
from shardfn.compat import pytrees
from shardfn.compat.replacing import replaced
from shardfn.interop.lazy_tensors import Assembled, Computed, lazy


class Converted(NamedTuple):
    """Tensors of files as a module has them.

    Attributes:
        values: by the module's names.
        extra: names of tensors that the module does not have.
        used: indices of the rules that changed a name; None if no rules were applied.
    """

    values: dict[str, Assembled]
    extra: list[str]
    used: tuple[int, ...] | None = None


def of_transformers(module: nn.Module) -> bool:
    """Whether a module is a model of `transformers`."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def of_diffusers(module: nn.Module) -> bool:
    """Whether a module is a model of `diffusers`, which writes its configuration itself."""
    modeling = sys.modules.get("diffusers.models.modeling_utils")
    return modeling is not None and isinstance(module, modeling.ModelMixin)


_registering = threading.Lock()


def register_batches() -> None:
    """Makes the batches that tokenizers and processors return pytrees of their tensors."""
    with _registering:  # ranks may be threads, and functools.cache lets several of them compute the first result
        _register_kinds()


@functools.cache
def _register_kinds() -> None:
    from transformers import BatchEncoding, BatchFeature

    for kind in (BatchEncoding, BatchFeature):
        pytrees.register(
            kind,
            lambda batch: (tuple(batch.data.values()), tuple(batch.data), tuple(batch.data)),
            functools.partial(_batch, kind),
            optree.MappingEntry,
        )


def _batch(kind: Any, names: Sequence[str], values: Iterable[Any]) -> Any:
    return kind(dict(zip(names, values, strict=True)))


def converted(module: Any, stored: Mapping[str, Assembled], names: Iterable[str]) -> Converted:
    """Renames and converts tensors of files as `from_pretrained` would for a module, which is not changed.

    Args:
        module: a model of `transformers`; its parameters may have been taken out.
        stored: tensors by their names in files.
        names: of the module's parameters and of the buffers that files contain.

    Raises:
        CheckpointError: tensors do not fit together, or two are the same parameter.
        ImportError: the version of `transformers` is not supported.
    """
    library, rules = _library(), conversions(module)
    renames = [rule for rule in rules if isinstance(rule, library.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, library.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    of_module = dict.fromkeys(names, True)
    prefix = getattr(module, "base_model_prefix", None)
    result, to_convert, last = Converted({}, []), dict[str, list[tuple[str, str]]](), _Last()
    renamed: dict[str, str] = {}
    for name in sorted(stored, key=library.dot_natural_key):
        target, pattern = library.rename_source_key(name, renames, converters, prefix, of_module)
        if target not in of_module and name in of_module:
            target, pattern = library.rename_source_key(name, [], [], prefix, of_module)
        if target not in of_module:
            result.extra.append(name)
        elif pattern is not None:
            to_convert.setdefault(target, []).append((name, pattern))
        elif target in renamed:
            raise CheckpointError(f"{renamed[target]} and {name} are both {target} of the module")
        else:
            renamed[target] = name
            result.values[target] = stored[name]
    for target, sources in to_convert.items():
        outputs = _by_rule(module, by_pattern[sources[0][1]], target, sources, stored, last)
        result.values.update((name, x) for name, x in outputs.items() if name in of_module)
        result.extra.extend(name for name in outputs if name not in of_module)
    used = tuple(number for number, rule in enumerate(rules) if rule.was_used())
    return result._replace(used=used)


def reverted(module: Any, state: Mapping[str, Assembled]) -> dict[str, Assembled]:
    """Converts tensors of a module to those of the files that its `save_pretrained` would write.

    Raises:
        ImportError: the version of `transformers` is not supported.
    """
    in_files = _library().revert_weight_conversion(module, dict(state))
    return {name: _single(x) for name, x in in_files.items()}


def conversions(module: Any) -> list[Any]:
    """The rules of `transformers` for a module; new objects each time, as they record the tensors that they see."""
    return list(_library().get_model_conversion_mapping(module))


def loaded_by(module: Any, used: Iterable[int]) -> None:
    """Records on a module the rules that loaded it, as `from_pretrained` does; `reverted` reverses them."""
    rules = conversions(module)
    module._weight_conversions = [rules[number] for number in used]


def vocabularies(module: nn.Module) -> list[nn.Module]:
    """The embeddings and output layers of all models of `transformers` in a module."""
    layers: list[Any] = []
    for m in filter(of_transformers, module.modules()):
        for name in ("get_input_embeddings", "get_output_embeddings"):
            with contextlib.suppress(NotImplementedError, AttributeError):  # of models without tokens
                layers.append(getattr(m, name)())
    return [m for m in layers if m is not None]


def generation_settings(module: Any, path: Path) -> str:
    """The settings by which the model at a path generates text, as JSON; "" if there are none."""
    folder, library = path if path.is_dir() else path.parent, sys.modules.get("transformers")
    if library is None or not (of_transformers(module) and module.can_generate()):
        return ""
    newer, older = "generation_config.json", "config.json"  # older models have the settings in their configuration
    if (folder / newer).is_file():
        config = library.GenerationConfig.from_pretrained(folder)
    elif (folder / older).is_file():
        config = library.GenerationConfig.from_pretrained(folder, config_file_name=older, _from_model_config=True)
    else:
        return ""
    settings: str = config.to_json_string()
    return settings


def generate_by(module: Any, settings: str) -> None:
    """Gives a module such settings, as `from_pretrained` does, apart from those that were set on it before."""
    kind, current = type(module.generation_config), module.generation_config.to_dict()
    try:
        initial = kind.from_model_config(module.config).to_dict()
    except NotImplementedError:
        initial = kind().to_dict()
    changed = {name: value for name, value in current.items() if value != initial.get(name)}
    module.generation_config = kind.from_dict({**json.loads(settings), **changed})


def not_missed(module: Any, missing: Collection[str], extra: Collection[str]) -> tuple[set[str], set[str]]:
    """The missing and the extra names that `from_pretrained` would not report.

    Raises:
        ImportError: the version of `transformers` is not supported.
    """
    _library()
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(extra))
    module._adjust_missing_and_unexpected_keys(info)
    return set(missing) - info.missing_keys, set(extra) - info.unexpected_keys


def not_saved(module: Any) -> set[str]:
    """The names that the module's `save_pretrained` leaves out."""
    return set(getattr(module, "_keys_to_ignore_on_save", None) or ())


def write_settings(module: Any, folder: Path) -> None:
    """Writes the configurations and custom code that the module's `save_pretrained` writes."""
    if getattr(module, "_hf_peft_config_loaded", False) or getattr(module, "hf_quantizer", None) is not None:
        raise CheckpointError(
            f"{type(module).__name__} has adapters or quantized weights of transformers' own, which are saved by its "
            f"own save_pretrained"
        )
    from transformers.utils import logging

    with replaced(logging, _tqdm_active=False):  # no bar; the public switch would also hide those of the hub
        module.save_pretrained(folder, state_dict={})
    for file in folder.glob("*.safetensors"):
        file.unlink()


def _single(x: Any) -> Assembled:
    x = x[0] if isinstance(x, list) else x
    return x if isinstance(x, Assembled) else lazy(x.detach(), "")


class _Last:
    """Keeps only the last result, since results are large."""

    def __init__(self) -> None:
        self.key, self.value = "", dict[str, Assembled]()

    def get(self, key: str, make: Callable[[], dict[str, Assembled]]) -> dict[str, Assembled]:
        if key != self.key:
            self.value.clear()
            self.key, self.value = key, make()
        return self.value


def _by_rule(
    module: Any,
    converter: Any,
    target: str,
    sources: Sequence[tuple[str, str]],
    stored: Mapping[str, Assembled],
    last: _Last,
) -> dict[str, Assembled]:
    """The tensors that a rule makes of others. Those that it computes are computed when needed, and not kept.

    Raises:
        CheckpointError: the tensors do not fit together.
    """

    def joined() -> dict[str, Assembled]:
        inputs = {name: stored[name] for name, _ in sources}
        return {name: lazy(x.joined(), name) if isinstance(x, Computed) else x for name, x in inputs.items()}

    def run(tensors: Mapping[str, Assembled]) -> dict[str, Assembled]:
        rule = copy.deepcopy(converter)
        for name, pattern in sources:
            rule.add_tensor(target, name, pattern, tensors[name])
        return {name: _single(x) for name, x in rule.convert(target, model=module, config=module.config).items()}

    try:
        metas = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype, device="meta") for name, _ in sources}
        dry = run({name: lazy(meta, name) for name, meta in metas.items()})
        later = any(isinstance(stored[name], Computed) for name, _ in sources)
        if not later and all(part.origin for x in dry.values() for part in x.parts):
            return run(stored)
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            f"{target} cannot be made of {sources[0][0]} and {len(sources) - 1} more: {reason}"
        ) from error
    return {
        name: Computed(x.shape, x.dtype, lambda name=name: last.get(target, lambda: run(joined()))[name], later)  # type: ignore[misc]
        for name, x in dry.items()
    }


_NAMES = ("WeightConverter", "WeightRenaming", "dot_natural_key", "rename_source_key", "revert_weight_conversion")


def _library() -> Any:
    """The parts of `transformers` that are used here.

    Raises:
        ImportError: this version lacks some.
    """
    import transformers

    try:
        from transformers import conversion_mapping, core_model_loading
        from transformers.modeling_utils import PreTrainedModel

        parts = {name: getattr(core_model_loading, name) for name in _NAMES}
        parts["get_model_conversion_mapping"] = conversion_mapping.get_model_conversion_mapping
        for kind, name in (
            (parts["WeightConverter"], "convert"), (parts["WeightConverter"], "add_tensor"),
            (parts["WeightRenaming"], "was_used"), (PreTrainedModel, "_adjust_missing_and_unexpected_keys"),
        ):  # fmt: skip
            getattr(kind, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"interop knows how transformers 5 names and converts the tensors of its files, and transformers "
            f"{transformers.__version__} does it in another way ({error}): install 'transformers>=5', or use "
            f"checkpoint.import_hf and checkpoint.export_hf with names= of your own"
        ) from error
    return SimpleNamespace(**parts)


def stretches_rope(m: nn.Module) -> bool:
    """Whether a module recomputes its rotary frequencies for longer texts, and keeps the length in attributes."""
    kinds = getattr(m, "rope_type", ""), *getattr(m, "rope_types", ())
    flat = [kind_name for kind in kinds for kind_name in (kind.values() if isinstance(kind, dict) else [kind])]
    return any(isinstance(kind_name, str) and ("dynamic" in kind_name or kind_name == "longrope") for kind_name in flat)
