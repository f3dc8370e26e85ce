"""What `transformers` calls the tensors in its files, and how these differ from a module's parameters.

Everything that this package uses of the private parts of `transformers` is here: the rules by which its own
`from_pretrained` and `save_pretrained`, and also `peft`, rename tensors, join several into one, and split one.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from shardfn.checkpoint.team import CheckpointError
from shardfn.interop.lazy_tensors import Assembled, Computed, lazy


class Converted(NamedTuple):
    """Tensors of files, as a module has them.

    Attributes:
        values: by the module's names.
        extra: names of those that the module does not have.
        used: numbers of the rules that changed a name; None where none were asked.
    """

    values: dict[str, Assembled]
    extra: list[str]
    used: tuple[int, ...] | None = None


def of_transformers(module: nn.Module) -> bool:
    """Whether a module is one of its models."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def converted(module: Any, stored: Mapping[str, Assembled], names: Iterable[str]) -> Converted:
    """Tensors under the names of files, as `from_pretrained` would put them into a module, which is not changed.

    Args:
        module: a model of `transformers`, whose parameters may be elsewhere.
        stored: tensors by their names in files.
        names: of the module's parameters and of buffers that are in files.

    Raises:
        CheckpointError: tensors that do not fit together; two that are the same parameter.
        ImportError: another version of `transformers`.
    """
    library, rules = _library(), conversions(module)
    renames = [rule for rule in rules if isinstance(rule, library.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, library.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known = dict.fromkeys(names, True)
    prefix = getattr(module, "base_model_prefix", None)
    found, several, last = Converted({}, []), dict[str, list[tuple[str, str]]](), _Last()
    renamed: dict[str, str] = {}
    for name in sorted(stored, key=library.dot_natural_key):
        target, pattern = library.rename_source_key(name, renames, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = library.rename_source_key(name, [], [], prefix, known)
        if target not in known:
            found.extra.append(name)
        elif pattern is not None:
            several.setdefault(target, []).append((name, pattern))
        elif target in renamed:
            raise CheckpointError(f"{renamed[target]} and {name} are both {target} of the module")
        else:
            renamed[target] = name
            found.values[target] = stored[name]
    for target, sources in several.items():
        made = _made(module, by_pattern[sources[0][1]], target, sources, stored, last)
        found.values.update((name, x) for name, x in made.items() if name in known)
        found.extra.extend(name for name in made if name not in known)
    used = tuple(number for number, rule in enumerate(rules) if rule.was_used())
    return found._replace(used=used)


def reverted(module: Any, state: Mapping[str, Assembled]) -> dict[str, Assembled]:
    """Tensors under a module's names as those of the files that its `save_pretrained` would write.

    Raises:
        ImportError: another version of `transformers`.
    """
    found = _library().revert_weight_conversion(module, dict(state))
    return {name: _one(x) for name, x in found.items()}


def conversions(module: Any) -> list[Any]:
    """The rules of `transformers` for a module, new ones each time: they keep what they meet."""
    return list(_library().get_model_conversion_mapping(module))


def loaded_by(module: Any, used: Iterable[int]) -> None:
    """Notes by which rules a module was loaded, as `from_pretrained` does: `reverted` applies them in reverse."""
    rules = conversions(module)
    module._weight_conversions = [rules[number] for number in used]


def not_missed(module: Any, missing: Collection[str], extra: Collection[str]) -> tuple[set[str], set[str]]:
    """Of names that are missing or extra, those about which `from_pretrained` says nothing.

    Raises:
        ImportError: another version of `transformers`.
    """
    _library()
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(extra))
    module._adjust_missing_and_unexpected_keys(info)
    return set(missing) - info.missing_keys, set(extra) - info.unexpected_keys


def not_saved(module: Any) -> set[str]:
    """Names that its `save_pretrained` leaves out."""
    return set(getattr(module, "_keys_to_ignore_on_save", None) or ())


def write_settings(module: Any, folder: Path) -> None:
    """All that its `save_pretrained` writes but tensors: the configuration, how it generates, code of its own."""
    if getattr(module, "_hf_peft_config_loaded", False) or getattr(module, "hf_quantizer", None) is not None:
        raise CheckpointError(
            f"{type(module).__name__} has adapters or quantized weights of transformers' own, which are saved by its "
            f"own save_pretrained"
        )
    with _no_bar():
        module.save_pretrained(folder, state_dict={})
    for file in folder.glob("*.safetensors"):
        file.unlink()


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """Without a picture of the progress of writing nothing; its public switch would turn off the hub's, too."""
    from transformers.utils import logging

    theirs: Any = logging
    shown, theirs._tqdm_active = theirs._tqdm_active, False
    try:
        yield
    finally:
        theirs._tqdm_active = shown


def _one(x: Any) -> Assembled:
    x = x[0] if isinstance(x, list) else x
    return x if isinstance(x, Assembled) else lazy(x.detach(), "")


class _Last:
    """Keeps the last of some results, which are large."""

    def __init__(self) -> None:
        self.key, self.value = "", dict[str, Assembled]()

    def get(self, key: str, make: Callable[[], dict[str, Assembled]]) -> dict[str, Assembled]:
        if key != self.key:
            self.value.clear()
            self.key, self.value = key, make()
        return self.value


def _made(
    module: Any,
    converter: Any,
    target: str,
    sources: Sequence[tuple[str, str]],
    stored: Mapping[str, Assembled],
    last: _Last,
) -> dict[str, Assembled]:
    """What a rule makes of some tensors; what it has to compute is computed when it is asked for, and not kept.

    Raises:
        CheckpointError: they do not fit together.
    """

    def joined() -> dict[str, Assembled]:
        some = {name: stored[name] for name, _ in sources}
        return {name: lazy(x.joined(), name) if isinstance(x, Computed) else x for name, x in some.items()}

    def run(tensors: Mapping[str, Assembled]) -> dict[str, Assembled]:
        one = copy.deepcopy(converter)
        for name, pattern in sources:
            one.add_tensor(target, name, pattern, tensors[name])
        return {name: _one(x) for name, x in one.convert(target, model=module, config=module.config).items()}

    try:
        dry = run({name: lazy(_like(stored[name]), name) for name, _ in sources})
        later = any(isinstance(stored[name], Computed) for name, _ in sources)
        if not later and all(part.origin for x in dry.values() for part in x.parts):
            return run(stored)
    except Exception as error:
        why = str(error) or type(error).__name__
        raise CheckpointError(
            f"{target} cannot be made of {sources[0][0]} and {len(sources) - 1} more: {why}"
        ) from error
    return {
        name: Computed(x.shape, x.dtype, lambda name=name: last.get(target, lambda: run(joined()))[name], later)  # type: ignore[misc]
        for name, x in dry.items()
    }


def _like(x: Assembled) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


_NAMES = ("WeightConverter", "WeightRenaming", "dot_natural_key", "rename_source_key", "revert_weight_conversion")


def _library() -> Any:
    """What is used of it.

    Raises:
        ImportError: a version that has something else.
    """
    import transformers

    try:
        from transformers import conversion_mapping, core_model_loading
        from transformers.modeling_utils import PreTrainedModel

        found = {name: getattr(core_model_loading, name) for name in _NAMES}
        found["get_model_conversion_mapping"] = conversion_mapping.get_model_conversion_mapping
        for kind, name in (
            (found["WeightConverter"], "convert"), (found["WeightConverter"], "add_tensor"),
            (found["WeightRenaming"], "was_used"), (PreTrainedModel, "_adjust_missing_and_unexpected_keys"),
        ):  # fmt: skip
            getattr(kind, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"interop knows how transformers 5 names and converts the tensors of its files, and transformers "
            f"{transformers.__version__} does it in another way ({error}): install 'transformers>=5', or use "
            f"checkpoint.import_ and checkpoint.export with names= of your own"
        ) from error
    return SimpleNamespace(**found)
