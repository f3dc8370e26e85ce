"""New adapters: which weights get them, with which shapes and initial values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn

from shardfn.interop.functional import Functional
from shardfn.interop.in_place import meta_structure
from shardfn.lora.adapters import Adapter, Kind, Recipe, parameter_of, row_norms, thin
from shardfn.lora.targets import (
    ALL,
    PARAMETERS,
    Bias,
    Names,
    biases,
    holder_of,
    inside,
    modules,
    parameters,
    patterned,
    refuse_parts,
    saved_modules,
    selector_of,
)
from shardfn.mesh import waiting
from shardfn.mesh.spec import joined, leaves_by_path
from shardfn.quant.packed import Packed, is_packed
from shardfn.shards.layout import is_stage, stage_shards
from shardfn.shards.random import int_seed, mixed
from shardfn.shards.unsharding import unshard
from shardfn.tracebacks import api_boundary


@api_boundary
@waiting.during("sf.lora.init")
def init(
    base: Any,
    targets: Names,
    rank: int,
    *,
    alpha: float = 8,
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    exclude: Names = (),
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    modules_to_save: Names = (),
    target_parameters: Iterable[str] = (),
    bias: Bias = "none",
    fan_in_fan_out: bool | Names = False,
    params: Any = None,
    seed: int = 0,
) -> Any:
    """Makes adapters for the weights of a model, which change nothing at first: one factor of each product is zero.

    They are whole and the same on every rank; `sf.shard(adapters, mesh, sf.ddp("data"))` replicates them, and other
    strategies cut them. Take gradients with respect to them only, and give only them to the optimizer: the base is an
    argument like the data.

    Args:
        base: what `interop.functional` made of a module; or the parameters of your own functions, whole or sharded: a
            tree of dicts, lists and tuples.
        targets: which modules, or parameters of your own functions: ends of paths, `["q_proj", "mlp.down_proj"]`, one
            regular expression for whole paths, or "all-linear", like `target_modules` of peft.
        rank: rank of the products.
        alpha: the products are scaled by `alpha / rank`.
        dropout: probability of dropout on an adapter's input in training.
        rslora: whether to scale by `alpha / sqrt(rank)` instead.
        dora: whether each output gets a magnitude of its own, as in DoRA.
        exclude: names, as for `targets`, of those that get no adapter.
        rank_pattern: other ranks, by regular expressions for ends of paths.
        alpha_pattern: other alphas, likewise.
        modules_to_save: names of modules, or of parameters of your own functions, that are replaced by trained copies
            among the adapters. Like peft it matches any end of a path: "head" matches "lm_head" too.
        target_parameters: parameters of modules to adapt by themselves, expert by expert: ends of paths, such as
            `["experts.gate_up_proj", "experts.down_proj"]`. With these, `targets` can be empty. They have no dropout
            and no magnitudes, and are replaced by the sum, a tensor of the same size.
        bias: which biases of modules are replaced by trained copies: "none", "all", or "lora_only" for those of modules
            with adapters.
        fan_in_fan_out: which parameters of your own functions are `[inputs, outputs]`, as `x @ w` takes them: True for
            all, False for none, or names. Others are `[outputs, inputs]`, as `F.linear` takes them.
        params: the parameters of `base`, if it is a model and `dora`, `modules_to_save` or `bias` need their values;
            default: `base.tree`.
        seed: any int; each adapter draws from a generator seeded with it and the adapter's path.

    Returns:
        A dict of the model's stages, or a tree with the structure of the parameters, with an `Adapter` for each weight,
        in float32 or the weight's own dtype if that is wider. Paths are the names in peft's files.

    Raises:
        ValueError: a name matches nothing; a module is of an unsupported kind, a parameter not a matrix; a rank is
            below 1.
        TypeError: an argument is not of the types above.

    Example:
        ``adapters = lora.init(model, "all-linear", rank=16, alpha=32, dropout=0.05)``, then
        ``model(params, adapters=adapters, input_ids=tokens)``
    """
    if isinstance(base, nn.Module):
        raise TypeError(
            f"lora.init: base is a {type(base).__name__}; take it apart first, model = interop.functional(module), and "
            f"pass that"
        )
    make = _Make(rank, alpha, dropout, rslora, dora, rank_pattern or {}, alpha_pattern or {}, int_seed(seed))
    if isinstance(base, Functional):
        if fan_in_fan_out is not False:
            raise ValueError("lora.init: fan_in_fan_out= is for your own functions, not for modules")
        return _of_model(base, make, targets, exclude, modules_to_save, target_parameters, bias, params)
    if target_parameters or bias != "none":
        raise ValueError("lora.init: target_parameters= and bias= are for modules: targets= names any parameters here")
    if params is not None:
        raise ValueError("lora.init: params= goes with a model; here the tree itself is the parameters")
    return _of_tree(base, make, targets, exclude, modules_to_save, fan_in_fan_out)


@dataclass(frozen=True)
class _Make:
    """The options of one call of `init`, checked; it makes the adapters."""

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    seed: int

    def __post_init__(self) -> None:
        for argument, patterns in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            if not isinstance(patterns, Mapping):
                raise TypeError(f"lora: {argument} must be a dict of patterns for the ends of paths, got {patterns!r}")
            for key in patterns:
                selector_of(key, argument)
        for r in (self.rank, *self.ranks.values()):
            if not isinstance(r, int) or isinstance(r, bool) or r < 1:
                raise ValueError(f"lora: rank must be an int of at least 1, got {r!r}")
        for value in (self.alpha, *self.alphas.values()):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value == 0:
                raise ValueError(f"lora: alpha must be a finite number other than 0, got {value!r}")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ValueError(f"lora: dropout must be a probability below 1, got {self.dropout!r}")

    def check(self, paths: Iterable[str]) -> None:
        """Raises ValueError if a pattern of ranks or alphas matches none of the targets."""
        targets = list(paths)
        for argument, patterns in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            for key in patterns:
                if not any(patterned({key: True}, path, False) for path in targets):
                    raise ValueError(f"lora: {argument}: nothing that gets an adapter matches {key!r}")

    def adapter(self, path: str, kind: Kind, shape: Sequence[int], dtype: torch.dtype, value: Tensor | None) -> Adapter:
        """The adapter of the weight at a path."""
        rank = patterned(self.ranks, path, self.rank)
        if not (sizes := thin(kind, shape, rank)):
            raise ValueError(f"lora: targets: {path} has shape {list(shape)}; adapters are for matrices")
        if not dtype.is_floating_point:
            raise ValueError(
                f"lora: targets: {path} is {dtype}: adapters need floating-point parameters, which "
                f"quant.quantize can quantize"
            )
        recipe = Recipe(
            kind,
            rank,
            patterned(self.alphas, path, self.alpha),
            self.rslora,
            0.0 if kind == "embedding" else self.dropout,
        )
        dtype = torch.promote_types(dtype, torch.float32)
        # On the CPU, so that the numbers are the same on every rank and device.
        generator = torch.Generator("cpu").manual_seed(mixed(self.seed, path))
        a, b = (torch.zeros(shape, dtype=dtype, device="cpu") for shape in sizes[:2])
        if kind == "embedding":
            b.normal_(generator=generator)
        else:
            bound = 1 / math.sqrt(a.shape[1])
            a.uniform_(-bound, bound, generator=generator)
        if not self.dora or value is None:
            return Adapter(a, b, None, recipe)
        weight = value.detach().cpu()
        magnitude = row_norms(weight if kind == "linear" else weight.mT, a, b, recipe.scale).to(dtype)
        return Adapter(a, b, magnitude, recipe)


# --- of modules ---


def _of_model(
    model: Functional,
    make: _Make,
    targets: Names,
    exclude: Names,
    saved: Names,
    bare: Iterable[str],
    bias: str,
    params: Any,
) -> Any:
    selector, saved_paths = selector_of(bare, PARAMETERS), saved_modules(model, saved)
    kinds = modules(model, targets, exclude, saved) if targets or not selector.names else {}
    by_themselves = parameters(model, selector, kinds, saved_paths)
    selector.check(model.names, "parameters")
    refuse_parts(by_themselves, make.dropout, make.dora)
    kinds |= by_themselves
    make.check(kinds)
    trained = biases(model, bias, itertools.starmap(holder_of, kinds.items()), saved_paths)
    copies = trained + [
        joined(path, name) for path in saved_paths for name, _ in model.module.get_submodule(path).named_parameters()
    ]
    values = values_of(model, params, [*copies, *(joined(path, "weight") for path in kinds if make.dora)])
    adapters: dict[str, Any] = {}
    for path, kind in kinds.items():
        weight = model.module.get_parameter(parameter_of(path, kind))
        adapters[path] = make.adapter(path, kind, weight.shape, weight.dtype, values.get(joined(path, "weight")))
    return by_stage(model, adapters | {path: _float_copy(values[path]) for path in copies})


def values_of(model: Functional, params: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole parameters of a model, by any of their names."""
    canonical = {name: model.names[name] for name in names}
    if not canonical:
        return {}
    params = getattr(model, "tree", None) if params is None else params
    if params is None:
        raise ValueError("lora.init: dora= and modules_to_save= need values of parameters: pass params=")
    model._check(params)
    values = whole_values(params, canonical.values())
    if empty := next((name for name, x in values.items() if x.is_meta), None):
        raise ValueError(f"lora.init: {empty} has no values yet: load the model, and pass params=")
    return {name: values[key] for name, key in canonical.items()}


def whole_values(params: Any, paths: Iterable[str]) -> dict[str, Tensor]:
    """Whole parameters, by path, those that exist, in full precision; gathers one stage after another."""
    requested, values = set(paths), dict[str, Tensor]()
    for prefix, node in leaves_by_path(params, is_stage_or_packed).items():
        if is_stage(node):
            names = requested & {entry.path for flat in stage_shards(node) for entry in flat.layout.entries}
            node = unshard(node, only=list(map(re.escape, sorted(names)))) if names else None
        leaves = leaves_by_path(node, is_packed)
        values |= {path: leaf for inner, leaf in leaves.items() if (path := joined(prefix, inner)) in requested}
    return {path: leaf.decoded() if isinstance(leaf, Packed) else leaf for path, leaf in values.items()}


def is_stage_or_packed(x: Any) -> bool:
    """Whether it is the flat shards of a stage, or a quantized parameter."""
    return is_stage(x) or is_packed(x)


def by_stage(model: Functional, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Groups values by stage, keyed by their paths inside it; those outside all stages under ""."""
    grouped: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        stage = next((stage for stage in model.stages if inside(path, [stage])), "")
        grouped.setdefault(stage, {})[path.removeprefix(stage).removeprefix(".")] = value
    return grouped


# --- of trees ---


def _of_tree(base: Any, make: _Make, targets: Names, exclude: Names, saved: Names, turned: bool | Names) -> Any:
    if isinstance(targets, str) and targets.lower() == ALL:
        raise ValueError(f"lora: targets={ALL!r} is for modules: name the parameters of your own functions")
    template = optree.tree_map(without_values, base, is_leaf=is_stage)
    shapes = leaves_by_path(template, is_packed)
    rules = {"targets": targets, "exclude": exclude, "modules_to_save": saved}
    selectors = {argument: selector_of(names, argument) for argument, names in rules.items() if names}
    if isinstance(turned, bool):
        is_turned: Callable[[str], Any] = lambda path: turned  # noqa: E731
    else:
        selectors["fan_in_fan_out"] = selector_of(turned, "fan_in_fan_out")
        is_turned = selectors["fan_in_fan_out"].matching
    for names in selectors.values():
        names.check(shapes, "parameters")
    chosen: dict[str, list[str]] = {
        name: [path for path in shapes if name in selectors and selectors[name].matching(path)] for name in rules
    }
    copies = chosen["modules_to_save"]
    paths = [path for path in chosen["targets"] if path not in copies and path not in chosen["exclude"]]
    if not paths:
        raise ValueError(f"lora: targets: nothing is left of what {targets!r} matches, or nothing was named")
    make.check(paths)
    values = whole_values(base, [*copies, *(paths if make.dora else ())])
    adapters: dict[str, Any] = {path: _float_copy(values[path]) for path in copies}
    for path in paths:
        kind: Kind = "conv1d" if is_turned(path) else "linear"
        adapters[path] = make.adapter(path, kind, shapes[path].shape, shapes[path].dtype, values.get(path))
    return _pruned(template, adapters, "")


def without_values(node: Any) -> Any:
    """A stage's parameters on the meta device; anything else unchanged."""
    return meta_structure([flat.layout for flat in stage_shards(node)]) if is_stage(node) else node


def _pruned(node: Any, values: Mapping[str, Any], path: str) -> Any:
    """A tree with only the values found by path; lists keep their lengths. None if it has none."""
    if isinstance(node, (Tensor, Packed)):
        return values.get(path)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        node = dict(zip(node._fields, node, strict=True))
    if isinstance(node, Mapping):
        children = {key: _pruned(child, values, joined(path, key)) for key, child in node.items()}
        return {key: child for key, child in children.items() if child is not None and child != {}} or None
    if isinstance(node, (list, tuple)):
        items = [_pruned(child, values, joined(path, i)) for i, child in enumerate(node)]
        return [{} if x is None else x for x in items] if any(x is not None for x in items) else None
    if any(key == path or key.startswith(f"{path}.") for key in values):
        raise TypeError(
            f"lora.init: {path or 'the tree'} is a {type(node).__name__}; it can be dicts, lists and tuples"
        )
    return None


def _float_copy(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True)
