"""Tables that define how tensor parallelism cuts a module's layers, in the words of `transformers`, and their use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardfn.interop.partition import canonical_names
from shardfn.mesh.spec import P
from shardfn.quoting import listed

Table = Mapping[str, str]
"""Ends of paths of modules, with `*` for one name between dots -> a word of `WORDS`."""

LLAMA: Table = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
"""The layers of models like Llama, Mistral and Qwen2."""

GPT2: Table = {
    "h.*.attn.c_attn": "qkv_colwise",
    "h.*.attn.split_size": "divided",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
"""The layers of GPT-2."""

WORDS = {
    "colwise": "cut by output features; each rank goes on with its own",
    "rowwise": "cut by input features, of which each rank has its own; the results are added up",
    "colwise_gather_output": "as colwise, and then every rank has all features",
    "rowwise_split_input": "as rowwise, of an input that every rank has whole",
    "qkv_colwise": "as colwise, for queries, keys and values of equal widths, one after another in one matrix",
    "packed_colwise": "as colwise, for two matrices, one after another in one",
    "embedding_rowwise": "an embedding cut by rows, over the vocabulary",
    "replicated_with_grad_allreduce": "whole, and applied to what is cut, as norms of single heads are",
    "replicate": "whole",
    "moe_tp_experts": "experts in parameters of three dimensions, each of which has a word too",
}
"""The words for a module, or for a parameter of experts, in a table."""
NUMBERS = ("divided", "whole")
"""The words for an integer attribute that a module's forward reads: whether the axis divides it."""
PARTS = {"qkv_colwise": 3, "packed_colwise": 2}
"""How many matrices are stacked in one."""
_SAME = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_BY_COLUMNS = ("colwise", "colwise_gather_output", *PARTS)
_BY_ROWS = ("rowwise", "rowwise_split_input")
LOCAL = ("colwise", *PARTS)
"""Words after which each rank has different features."""
COUNTS = (
    "num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
    "num_query_heads",
)  # fmt: skip
"""Attributes that count heads."""
_NEVER_CUT = (
    "layer_idx", "layer_id", "head_dim", "head_size", "attention_head_size", "num_key_value_groups", "sliding_window",
)  # fmt: skip
_HEAD = ("head_dim", "attention_head_size", "head_size")


@dataclass(frozen=True)
class Cut:
    """A module to which the table gives a word.

    Attributes:
        path: of the module.
        word: one of `WORDS`.
        shapes: of its parameters, whole.
        words: of its parameters, if it holds experts.
    """

    path: str
    word: str
    shapes: dict[str, tuple[int, ...]]
    words: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Holder:
    """A module with layers that are sharded by columns, so that its forward sees only some of the heads.

    Attributes:
        path: of the module.
        divided: attributes that are divided by the number of ranks.
        refused: attributes that raise when used, since it is not declared whether they are one rank's or all ranks'.
        heads: number of heads of each cut layer whose head width is known.
    """

    path: str
    divided: tuple[str, ...]
    refused: tuple[str, ...]
    heads: dict[str, int]


@dataclass(frozen=True)
class TensorPlan:
    """The meaning of a table for a module.

    Attributes:
        axis: mesh axis that cuts.
        cuts: modules with a word.
        holders: modules with layers that are sharded by columns.
        specs: for each name in the tree, the sharding of the parameter.
    """

    axis: str
    cuts: dict[nn.Module, Cut]
    holders: dict[nn.Module, Holder]
    specs: dict[str, P]

    def spec(self, path: str, shape: tuple[int, ...]) -> P:
        """The spec of a parameter, as a function for `shard(specs=...)`.

        Raises:
            ValueError: the module has no such parameter.
        """
        if path not in self.specs:
            raise ValueError(f"specs: the module has no parameter {path!r}; specs describe the unchanged model.tree")
        return self.specs[path]

    def refuse_outside(self, stages: Mapping[str, nn.Module]) -> None:
        """Raises ValueError if a layer that is sharded by columns is in none of these stages."""
        inside = {m for stage in stages.values() for m in stage.modules()}
        for m, cut in self.cuts.items():
            if cut.word in LOCAL and m not in inside:
                raise ValueError(
                    f"functional: tensor: {cut.path} has the word {cut.word!r} and is in no stage, so nothing "
                    f"compares it with the full layer. Choose stages= that contain it"
                )


def apply_table(module: nn.Module, table: Table | str, axis: str) -> TensorPlan:
    """Applies a table to a module.

    Args:
        module: whole.
        table: or "auto", the table that the module's classes ship.
        axis: that cuts.

    Raises:
        ValueError: an entry matches nothing; a word is unknown or does not fit; two entries cut a parameter in
            different ways; or "auto" is given for a module whose classes ship no table.
        TypeError: `table` is not a table.
    """
    is_auto = isinstance(table, str)
    if isinstance(table, str) and table != "auto":
        raise ValueError(f'functional: tensor must be a table, such as interop.LLAMA, or "auto", got {table!r}')
    entries = _shipped(module) if isinstance(table, str) else table
    if not isinstance(entries, Mapping) or not all(isinstance(x, str) for pair in entries.items() for x in pair):
        raise TypeError(f"functional: tensor must be a dict from ends of module paths to words, got {table!r}")
    paths: dict[nn.Module, str] = {m: path for path, m in module.named_modules()}
    words, numbers, parameters = _matched(module, entries, is_auto)
    words = _with_ties(module, words)
    cuts = {m: _module_cut(m, paths[m], style, parameters.get(m, {})) for m, style in words.items()}
    if stray := next((m for m in parameters if words.get(m) != "moe_tp_experts"), None):
        name = f"{paths[stray]}.{next(iter(parameters[stray]))}"
        raise ValueError(
            f"functional: tensor: {name} is a parameter in the table, but {paths[stray] or 'the module'} is not: "
            f'only experts are sharded by parameter, in a module whose word is "moe_tp_experts"'
        )
    return TensorPlan(axis, cuts, _holders(module, cuts, numbers, is_auto), _specs(module, cuts, axis))


def dims(m: nn.Module) -> tuple[int, int]:
    """The output and the input dimension of a linear layer's weight."""
    return (1, 0) if is_conv1d(m) else (0, 1)


def runs_as(m: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module runs the forward of this class, not an override."""
    return getattr(m.forward, "__func__", None) is kind.forward


def is_conv1d(m: nn.Module) -> bool:
    """Whether a module is the transposed linear layer of `transformers`."""
    return type(m).__name__ == "Conv1D" and type(m).__module__ == "transformers.pytorch_utils"


def _shipped(module: nn.Module) -> Table:
    """The tables that the classes of all models inside ship, with full paths."""
    table: dict[str, str] = {}
    for path, m in module.named_modules():
        plans = [getattr(m, "_tp_plan", None)]
        if getattr(m, "base_model", None) is m:
            plans.append(getattr(getattr(m, "config", None), "base_model_tp_plan", None))
        for plan in plans:
            table |= {f"{path}.{key}" if path else key: style for key, style in (plan or {}).items()}
    if not any("layers" in key or "*" in key for key in table):
        raise ValueError(
            f'functional: tensor="auto", but the classes of {type(module).__name__} ship no table for its layers: pass '
            f"one, interop.LLAMA or interop.GPT2 say, or a dict of module paths -> {', '.join(WORDS)}"
        )
    return table


Words = dict[nn.Module, str]
Numbers = dict[nn.Module, dict[str, str]]


def _matched(module: nn.Module, entries: Table, is_auto: bool) -> tuple[Words, Numbers, Numbers]:
    """The words of modules, of integer attributes, and of parameters.

    Raises:
        ValueError: an entry matches nothing; two differ for the same thing; or a word is unknown.
    """
    modules = list(module.named_modules(remove_duplicate=False))
    words: Words = {}
    numbers: Numbers = {}
    parameters: Numbers = {}

    def add(to: dict[Any, str], key: Any, style: str, path: str) -> None:
        if to.setdefault(key, style) != style:
            raise ValueError(f"functional: tensor: {path} is both {to[key]!r} and {style!r}: keep one of the entries")

    for entry, value in entries.items():
        style, matched = _SAME.get(value, value), False
        if style not in WORDS and style not in NUMBERS:
            raise ValueError(
                f"functional: tensor: {entry!r} is {value!r}, which is not one of {', '.join((*WORDS, *NUMBERS))}: say "
                f"it in these words, or leave it out together with what depends on it"
            )
        pattern = re.compile(("" if is_auto else r"(?:.*\.)?") + re.escape(entry).replace(r"\*", r"[^.]+"))
        for path, m in modules:
            if style in WORDS and path and pattern.fullmatch(path):
                add(words, m, style, path)
                matched = True
            names = list(m._parameters) if style in WORDS else _integers(m)
            for name in names:
                full_name = f"{path}.{name}" if path else name
                if pattern.fullmatch(full_name):
                    add((parameters if style in WORDS else numbers).setdefault(m, {}), name, style, full_name)
                    matched = True
        if not matched and not is_auto:
            raise ValueError(f"functional: tensor: nothing of {type(module).__name__} matches {entry!r} ({value})")
    return words, numbers, parameters


def _integers(m: nn.Module) -> list[str]:
    return [name for name, x in vars(m).items() if isinstance(x, int) and not isinstance(x, bool)]


def _with_ties(module: nn.Module, words: Words) -> Words:
    """Adds words for modules that share a weight with one sharded over the vocabulary."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                owners.setdefault(id(p), []).append((m, name))
    result = dict(words)
    for m, style in words.items():
        by_rows = style == "embedding_rowwise" or (style == "colwise_gather_output" and dims(m)[0] == 0)
        for other, name in owners.get(id(m._parameters.get("weight")), ()) if by_rows else ():
            if other not in result and name == "weight":
                if isinstance(other, nn.Embedding):
                    result[other] = "embedding_rowwise"
                elif runs_as(other, nn.Linear):
                    result[other] = "colwise_gather_output"
    return result


def _module_cut(m: nn.Module, path: str, style: str, words: dict[str, str]) -> Cut:
    """The `Cut` of a module.

    Raises:
        ValueError: the word does not fit the module.
    """
    kind = f"{path} ({type(m).__name__})"
    if style == "embedding_rowwise":
        fits = isinstance(m, nn.Embedding)
        if isinstance(m, nn.Embedding) and (m.max_norm is not None or m.scale_grad_by_freq or m.sparse):
            raise ValueError(
                f"functional: tensor: {kind} has max_norm, scale_grad_by_freq or sparse gradients, with which it "
                f"cannot be cut: leave it out of the table"
            )
    elif style == "moe_tp_experts":
        _check_experts(m, kind, words)
        fits = True
    else:
        is_replicated = style in ("replicate", "replicated_with_grad_allreduce")
        fits = is_replicated or runs_as(m, nn.Linear) or (is_conv1d(m) and runs_as(m, type(m)))
    if not fits or (style in (*_BY_COLUMNS, *_BY_ROWS) and m._parameters.get("weight") is None):
        raise ValueError(
            f"functional: tensor: {kind} must not be {style!r}, which is for "
            f"{'nn.Embedding' if style == 'embedding_rowwise' else 'nn.Linear and Conv1D, with their own weight'}"
        )
    shapes = {name: tuple(p.shape) for name, p in m._parameters.items() if p is not None}
    if style in PARTS and shapes["weight"][dims(m)[0]] % PARTS[style]:
        raise ValueError(
            f"functional: tensor: {kind} has {shapes['weight'][dims(m)[0]]} output features, which are not "
            f"{PARTS[style]} equal parts as {style!r} says"
        )
    return Cut(path, style, shapes, words)


def _check_experts(m: Any, kind: str, words: Mapping[str, str]) -> None:
    if getattr(m, "is_transposed", False) or not getattr(m, "is_concatenated", True):
        raise ValueError(
            f"functional: tensor: the experts of {kind} are transposed or interleaved in their parameters "
            f"{listed(m._parameters)}, which cannot be cut: leave them out of the table"
        )
    for name, p in m._parameters.items():
        if p is not None and (p.ndim != 3 or words.get(name) not in ("colwise", "packed_colwise", "rowwise")):
            raise ValueError(
                f"functional: tensor: {kind} holds experts, and its parameter {name} of shape {tuple(p.shape)} has the "
                f"word {words.get(name)!r}: each must have 3 dimensions, and be colwise, packed_colwise or rowwise"
            )


def _holders(
    module: nn.Module, cuts: Mapping[nn.Module, Cut], numbers: Numbers, is_auto: bool
) -> dict[nn.Module, Holder]:
    holders = {}
    for path, m in module.named_modules():
        cut_layers = [cuts[child] for child in m.children() if child in cuts and cuts[child].word in LOCAL]
        if not cut_layers:
            continue
        declared = numbers.get(m, {})
        undeclared = [name for name in _integers(m) if name not in declared and name not in _NEVER_CUT]
        if is_auto:  # the class's author wrote the table, so attributes that forward reads are not numbers of heads
            divided, refused = [], [name for name in undeclared if name in COUNTS]
        else:
            divided = [name for name in undeclared if name in COUNTS]
            refused = [name for name in undeclared if name not in COUNTS]
        divided += [name for name, style in declared.items() if style == "divided"]
        holders[m] = Holder(path, tuple(divided), tuple(refused), _heads(m, cut_layers))
    return holders


def _heads(m: nn.Module, layers: list[Cut]) -> dict[str, int]:
    """The number of heads of each layer that is sharded by columns, if the module has the width of a head."""
    width = next((vars(m)[name] for name in _HEAD if isinstance(vars(m).get(name), int)), 0)
    heads = {}
    for cut in layers:
        features = cut.shapes["weight"][dims(m.get_submodule(cut.path.rpartition(".")[2]))[0]] // PARTS.get(cut.word, 1)
        if width and features % width == 0:
            heads[cut.path] = features // width
    return heads


def _specs(module: nn.Module, cuts: Mapping[nn.Module, Cut], axis: str) -> dict[str, P]:
    """The spec of each parameter, by its name in the tree.

    Raises:
        ValueError: a tied parameter is cut in different ways.
    """
    names = canonical_names(module)
    by_name: dict[str, tuple[P, str]] = {}
    for path, m in module.named_modules(remove_duplicate=False):
        for name, p in m._parameters.items():
            if p is None:
                continue
            alias = f"{path}.{name}" if path else name
            dim = cut_dim(m, cuts[m], name) if m in cuts else None
            spec = P() if dim is None else P(*[None] * dim, axis)
            first_spec, first_name = by_name.setdefault(names[alias], (spec, alias))
            if not first_spec.same(spec):
                raise ValueError(
                    f"functional: tensor: {first_name} and {alias} are one parameter, but the table shards them as "
                    f"{first_spec} and {spec}. Give both modules words that shard it in the same way, or none"
                )
    return {name: spec for name, (spec, _) in by_name.items()}


def cut_dim(m: nn.Module, cut: Cut, name: str) -> int | None:
    """The dimension along which a parameter is sharded; None if it is whole."""
    style = cut.words.get(name, cut.word)
    if cut.words:
        return len(cut.shapes[name]) - (1 if style == "rowwise" else 2)
    if style == "embedding_rowwise" or (style in _BY_COLUMNS and name == "bias"):
        return 0
    return dims(m)[style in _BY_ROWS] if style in (*_BY_COLUMNS, *_BY_ROWS) and name == "weight" else None


def weights_of(m: nn.Module, cut: Cut) -> list[str]:
    """The parameters that a cut module has at present, except the bias."""
    return [name for name in cut.shapes if name != "bias" and m._parameters.get(name) is not None]
