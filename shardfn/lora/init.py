"""New adapters: which weights get them, of which shapes, and with which numbers at first."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from shardfn.interop.adapting import described
from shardfn.interop.functional import Functional
from shardfn.lora.adapters import Adapter, Kind, Recipe, leaves_by_path, norms, parameter_of, thin
from shardfn.lora.targets import (
    ALL,
    PARAMETERS,
    Bias,
    Names,
    biases,
    holder_of,
    inside,
    modules,
    named,
    parameters,
    patterned,
    refuse_parts,
    saved_modules,
)
from shardfn.mesh.spec import joined
from shardfn.quant.packed import Packed, is_packed
from shardfn.quoting import short_errors
from shardfn.shards.layout import is_stage, stage_shards
from shardfn.shards.random import int_seed, mixed
from shardfn.shards.unsharding import unshard


@short_errors
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
    """Adapters for the weights of a model, which change nothing yet: one factor of each product is zero.

    They are whole and the same on every rank; `sf.shard(adapters, mesh, sf.ddp("data"))` replicates them, or another
    strategy cuts them. Take gradients with respect to them, and give them alone to the optimizer: the base is an
    argument like the data.

    Args:
        base: what `interop.functional` made of a module; or the parameters of functions of your own, whole or sharded:
            a tree of dicts, lists and tuples.
        targets: which modules, or parameters of your own functions: ends of paths, `["q_proj", "mlp.down_proj"]`, one
            regular expression for whole paths, or "all-linear". As `target_modules` of peft.
        rank: of the products.
        alpha: over `rank`, what they are multiplied by.
        dropout: of what goes through an adapter while it trains.
        rslora: whether `alpha` is over the square root of `rank`.
        dora: whether each output gets a magnitude of its own, as in DoRA.
        exclude: names, as `targets`, of those that get none.
        rank_pattern: other ranks, by regular expressions for ends of paths.
        alpha_pattern: other alphas, likewise.
        modules_to_save: names of modules, or of parameters of your own functions, of which the adapters have trained
            copies that take their places. As peft does it takes any end of a path: "head" is "lm_head", too.
        target_parameters: parameters of modules that are adapted by themselves, for each expert: ends of paths, such as
            `["experts.gate_up_proj", "experts.down_proj"]`. With these, `targets` can be empty. They have no dropout
            and no magnitudes, and take the sum in their places, which is as large as they are.
        bias: of modules, whether the adapters have trained copies of biases: "none", "all" or, of modules with
            adapters, "lora_only".
        fan_in_fan_out: of parameters of your own functions: which are `[inputs, outputs]`, as `x @ w` takes them; all,
            none, or names. Others are `[outputs, inputs]`, as `F.linear` takes them.
        params: of `base`, where it is a model and their values are needed, by `dora`, `modules_to_save` and `bias`;
            default: `base.tree`.
        seed: any int; each adapter draws from a generator folded from it and the adapter's path.

    Returns:
        A dict of the model's stages, or a tree of the structure of the parameters, with an `Adapter` for each weight,
        in float32 or the weight's own dtype if that is wider. Their paths are the names of peft's files.

    Raises:
        ValueError: names that match nothing; modules of other kinds, parameters that are not matrices; a rank below 1.
        TypeError: something other than names, numbers or such a tree.

    Example:
        ``adapters = lora.init(model, "all-linear", rank=16, alpha=32, dropout=0.05)``, then
        ``model(params, adapters=adapters, input_ids=tokens)``
    """
    if isinstance(base, nn.Module):
        raise TypeError(
            f"lora.init: base is a {type(base).__name__}; take it apart first, model = interop.functional(module), and "
            f"pass that"
        )
    make = _Make(rank, alpha, dropout, rslora, dora, rank_pattern or {}, alpha_pattern or {}, seed)
    if isinstance(base, Functional):
        if fan_in_fan_out is not False:
            raise ValueError("lora.init: fan_in_fan_out= is for functions of your own: what modules are is known")
        return _of_model(base, make, targets, exclude, modules_to_save, target_parameters, bias, params)
    if target_parameters or bias != "none":
        raise ValueError("lora.init: target_parameters= and bias= are for modules: targets= names any parameters here")
    if params is not None:
        raise ValueError("lora.init: params= goes with a model; here the tree itself is the parameters")
    return _of_tree(base, make, targets, exclude, modules_to_save, fan_in_fan_out)


class _Make:
    """Makes adapters as one call of `init` asks for them."""

    def __init__(
        self,
        rank: int,
        alpha: float,
        dropout: float,
        rslora: bool,
        dora: bool,
        ranks: Mapping[str, int],
        alphas: Mapping[str, float],
        seed: int,
    ) -> None:
        for argument, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
            if not isinstance(patterns, Mapping):
                raise TypeError(f"lora: {argument}={patterns!r}; it is a dict of patterns for the ends of paths")
            for key in patterns:
                named(key, argument)
        for r in (rank, *ranks.values()):
            if not isinstance(r, int) or isinstance(r, bool) or r < 1:
                raise ValueError(f"lora: rank={r!r}; it is an int of at least 1")
        for one in (alpha, *alphas.values()):
            if not isinstance(one, (int, float)) or isinstance(one, bool) or not math.isfinite(one) or one == 0:
                raise ValueError(f"lora: alpha={one!r}; it is a number other than 0")
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"lora: dropout={dropout!r}; it is a probability below 1")
        self.rank, self.alpha, self.dropout, self.rslora = rank, alpha, dropout, rslora
        self.dora, self.ranks, self.alphas, self.seed = dora, ranks, alphas, int_seed(seed)

    def check(self, paths: Iterable[str]) -> None:
        """Raises ValueError for a pattern of ranks or alphas that matches none of the targets."""
        targets = list(paths)
        for argument, patterns in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            for key in patterns:
                if not any(patterned({key: True}, path, False) for path in targets):
                    raise ValueError(f"lora: {argument}: nothing that gets an adapter matches {key!r}")

    def adapter(self, path: str, kind: Kind, shape: Sequence[int], dtype: torch.dtype, value: Tensor | None) -> Adapter:
        """For the weight of a path."""
        rank = patterned(self.ranks, path, self.rank)
        if not (sizes := thin(kind, shape, rank)):
            raise ValueError(f"lora: targets: {path} has shape {list(shape)}; adapters are for matrices")
        if not dtype.is_floating_point:
            raise ValueError(
                f"lora: targets: {path} is {dtype}: adapters are for floating-point numbers, which "
                f"quant.quantize keeps in few bits"
            )
        recipe = Recipe(
            kind,
            rank,
            patterned(self.alphas, path, self.alpha),
            self.rslora,
            0.0 if kind == "embedding" else self.dropout,
        )
        dtype = torch.promote_types(dtype, torch.float32)
        draw = torch.Generator("cpu").manual_seed(mixed(self.seed, path))
        a, b = (torch.zeros(shape, dtype=dtype, device="cpu") for shape in sizes[:2])
        if kind == "embedding":
            b.normal_(generator=draw)
        else:
            most = 1 / math.sqrt(a.shape[1])
            a.uniform_(-most, most, generator=draw)
        if not self.dora or value is None:
            return Adapter(a, b, None, recipe)
        weight = value.detach().cpu()
        magnitude = norms(weight if kind == "linear" else weight.mT, a, b, recipe.scale).to(dtype)
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
    said, own = named(bare, PARAMETERS), saved_modules(model, saved)
    kinds = modules(model, targets, exclude, saved) if targets or not said.said else {}
    alone = parameters(model, said, kinds, own)
    said.check(model.names, "parameters")
    refuse_parts(alone, make.dropout, make.dora)
    kinds |= alone
    make.check(kinds)
    trained = biases(model, bias, itertools.starmap(holder_of, kinds.items()), own)
    copies = trained + [
        joined(path, name) for path in own for name, _ in model.module.get_submodule(path).named_parameters()
    ]
    values = values_of(model, params, [*copies, *(joined(path, "weight") for path in kinds if make.dora)])
    made: dict[str, Any] = {}
    for path, kind in kinds.items():
        weight = model.module.get_parameter(parameter_of(path, kind))
        made[path] = make.adapter(path, kind, weight.shape, weight.dtype, values.get(joined(path, "weight")))
    return by_stage(model, made | {path: _copy(values[path]) for path in copies})


def values_of(model: Functional, params: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole parameters of a model by any of their names."""
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
    """Whole parameters by path, as far as they are there, in full precision; one stage after another is gathered."""
    wanted, values = set(paths), dict[str, Tensor]()
    for here, node in leaves_by_path(params, is_stage_or_packed).items():
        if is_stage(node):
            held = wanted & {entry.path for flat in stage_shards(node) for entry in flat.layout.entries}
            node = unshard(node, only=list(map(re.escape, sorted(held)))) if held else None
        leaves = leaves_by_path(node, is_packed)
        values |= {path: leaf for inner, leaf in leaves.items() if (path := joined(here, inner)) in wanted}
    return {path: leaf.decoded() if isinstance(leaf, Packed) else leaf for path, leaf in values.items()}


def is_stage_or_packed(x: Any) -> bool:
    """Whether it is the flat shards of a stage, or a parameter in few bits."""
    return is_stage(x) or is_packed(x)


def by_stage(model: Functional, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What belongs to modules and parameters of a model, by path, as its stages take it; what is loose under ""."""
    grouped: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        stage = next((stage for stage in model.stages if inside(path, [stage])), "")
        grouped.setdefault(stage, {})[path.removeprefix(stage).removeprefix(".")] = value
    return grouped


# --- of trees ---


def _of_tree(base: Any, make: _Make, targets: Names, exclude: Names, saved: Names, turned: bool | Names) -> Any:
    if isinstance(targets, str) and targets.lower() == ALL:
        raise ValueError(f"lora: targets={ALL!r} is for modules: name the parameters of your own functions")
    like = optree.tree_map(without_values, base, is_leaf=is_stage)
    shapes = leaves_by_path(like, is_packed)
    rules = {"targets": targets, "exclude": exclude, "modules_to_save": saved}
    said = {argument: named(names, argument) for argument, names in rules.items() if names}
    if isinstance(turned, bool):
        is_turned: Callable[[str], Any] = lambda path: turned  # noqa: E731
    else:
        said["fan_in_fan_out"] = named(turned, "fan_in_fan_out")
        is_turned = said["fan_in_fan_out"].matching
    for names in said.values():
        names.check(shapes, "parameters")
    chosen: dict[str, list[str]] = {
        argument: [path for path in shapes if argument in said and said[argument].matching(path)] for argument in rules
    }
    copies = chosen["modules_to_save"]
    paths = [path for path in chosen["targets"] if path not in copies and path not in chosen["exclude"]]
    if not paths:
        raise ValueError(f"lora: targets: nothing is left of what {targets!r} matches, or nothing was named")
    make.check(paths)
    values = whole_values(base, [*copies, *(paths if make.dora else ())])
    made: dict[str, Any] = {path: _copy(values[path]) for path in copies}
    for path in paths:
        kind: Kind = "conv1d" if is_turned(path) else "linear"
        made[path] = make.adapter(path, kind, shapes[path].shape, shapes[path].dtype, values.get(path))
    return _pruned(like, made, "")


def without_values(node: Any) -> Any:
    """A stage's parameters on the device meta; anything else as it is."""
    return described([flat.layout for flat in stage_shards(node)]) if is_stage(node) else node


def _pruned(node: Any, found: Mapping[str, Any], path: str) -> Any:
    """A tree with what was found at each path, and nothing else; lists keep their lengths."""
    if isinstance(node, (Tensor, Packed)):
        return found.get(path)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        node = dict(zip(node._fields, node, strict=True))
    if isinstance(node, Mapping):
        made = {key: _pruned(one, found, joined(path, key)) for key, one in node.items()}
        return {key: one for key, one in made.items() if one is not None and one != {}} or None
    if isinstance(node, (list, tuple)):
        items = [_pruned(one, found, joined(path, i)) for i, one in enumerate(node)]
        return [{} if one is None else one for one in items] if any(one is not None for one in items) else None
    if any(one == path or one.startswith(f"{path}.") for one in found):
        raise TypeError(
            f"lora.init: {path or 'the tree'} is a {type(node).__name__}; it can be dicts, lists and tuples"
        )
    return None


def _copy(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True)
