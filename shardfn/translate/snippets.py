"""Calls in a Python file, which is parsed and never run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardfn.translate.facts import Call, Source, TranslateError

READ = {
    "FSDPStrategy",
    "ModelParallelStrategy",
    "DeepSpeedStrategy",
    "DDPStrategy",
    "Trainer",
    "Fabric",
    "FullyShardedDataParallel",
    "FSDP",
    "fully_shard",
    "Accelerator",
    "FullyShardedDataParallelPlugin",
    "DeepSpeedPlugin",
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "SentenceTransformerTrainingArguments",
    "SFTConfig",
    "Seq2SeqTrainer",
    "SentenceTransformerTrainer",
    "SFTTrainer",
}
_SETTINGS = {one for one in READ if one.endswith(("Strategy", "Plugin", "Arguments", "Config", "Accelerator"))}
_POSITIONS = {
    "FullyShardedDataParallel": ("module", "process_group", "sharding_strategy"),
    "FSDP": ("module", "process_group", "sharding_strategy"),
    "fully_shard": ("module",),
    "CPUOffload": ("offload_params",),
    "CPUOffloadPolicy": ("pin_memory",),
    "MixedPrecision": ("param_dtype", "reduce_dtype", "buffer_dtype"),
    "MixedPrecisionPolicy": ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
    "ModuleWrapPolicy": ("module_classes",),
    "init_device_mesh": ("device_type", "mesh_shape"),
    "partial": ("func",),
    "Trainer": ("model", "args"),
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"), ("output_dir",)),
    "SentenceTransformerTrainingArguments": ("output_dir",),
    **dict.fromkeys(("Seq2SeqTrainer", "SentenceTransformerTrainer", "SFTTrainer"), ("model", "args")),
}
_CHANGING = re.compile("set_.*|update|setdefault|pop|popitem|clear|append|extend|insert|remove")
_DTYPES = {"bfloat16", "float16", "half", "float32", "float64", "double"}


def calls(text: str, beside: Collection[str]) -> tuple[list[Call], set[str]]:
    """The calls of a file that are read, and those of other names, in order; and the packages that it imports.

    Raises:
        TranslateError: not Python.
    """
    try:
        tree = ast.parse(text)
        known = _assigned(tree)
        aliases = _aliases(tree)
        every, read = (node for node in ast.walk(tree) if isinstance(node, ast.Call)), {*READ, *beside}
        found = [node for node in every if _called(node, aliases) in read]
        made = [_call(node, known, aliases, ()) for node in sorted(found, key=lambda one: (one.lineno, one.col_offset))]
        return [*map(_changed(tree), made)], set(_imported(tree))
    except SyntaxError as error:
        raise TranslateError(f"line {error.lineno}: not Python: {error.msg}") from None
    except MemoryError:
        raise TranslateError("nested too deeply") from None
    except (ValueError, OverflowError) as error:
        raise error if isinstance(error, TranslateError) else TranslateError(f"not Python: {error}") from None


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that are assigned once, and are what they were: nothing else binds them, or changes what they hold."""
    nodes = list(ast.walk(tree))
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
    once: dict[str, ast.expr] = {}
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            once.update((target.id, node.value) for target in targets if isinstance(target, ast.Name))
    changed = {name for name, _ in _changes(nodes)}
    return {name: value for name, value in once.items() if bound[name] == 1 and name not in changed}


def _changes(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Where what a name holds is changed: `name.field = ...`, `name["key"] = ...`, `name.update(...)`."""
    for node in nodes:
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            place: ast.expr = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _CHANGING.match(node.func.attr):
            place = node.func
        else:
            continue
        root = place
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        if isinstance(root, ast.Name):
            yield root.id, node


def _changed(tree: ast.Module) -> Callable[[Call], Call]:
    """Adds to a call what the program changes later in what it has made: `args.max_grad_norm = 0.5`."""
    nodes = list(ast.walk(tree))
    names = {
        (node.value.lineno, target.id)
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def changed(call: Call) -> Call:
        own = {name for line, name in names if line == call.line} if call.name in _SETTINGS else set()
        late = {ast.unparse(place): Source(ast.unparse(place)) for name, place in _changes(nodes) if name in own}
        return replace(call, arguments={**call.arguments, **late}) if late else call

    return changed


def _aliases(tree: ast.Module) -> dict[str, str]:
    """`from ... import FullyShardedDataParallel as FSDP`."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {one.asname: one.name for node in imports for one in node.names if one.asname}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _name(node: ast.Call, aliases: Mapping[str, str]) -> str:
    return _last(node.func, aliases)


def _called(node: ast.Call, aliases: Mapping[str, str]) -> str:
    """Its name, or what it is a partial of."""
    name = _name(node, aliases)
    return _last(node.args[0], aliases) if name == "partial" and node.args else name


def _last(node: ast.expr, aliases: Mapping[str, str]) -> str:
    """The last part of a name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _call(node: ast.Call, known: Mapping[str, ast.expr], aliases: Mapping[str, str], inside: tuple[str, ...]) -> Call:
    name, given = _name(node, aliases), node.args
    if _called(node, aliases) in READ and name == "partial":
        name, given = _called(node, aliases), given[1:]
    arguments: dict[str, Any] = {}
    positions = _POSITIONS.get(name, ())
    for i, one in enumerate(given):
        arguments[positions[i] if i < len(positions) else f"argument {i + 1}"] = _value(one, known, aliases, inside)
    for word in node.keywords:
        value = _value(word.value, known, aliases, inside)
        if word.arg is not None:
            arguments[word.arg] = value
        elif isinstance(value, Mapping):
            arguments |= {str(key): one for key, one in value.items()}
        else:
            arguments[f"**{ast.unparse(word.value)}"] = Source(ast.unparse(word.value))
    return Call(name, node.lineno, arguments)


def _value(node: ast.expr, known: Mapping[str, ast.expr], aliases: Mapping[str, str], inside: tuple[str, ...]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in known and node.id not in inside:
        return _value(known[node.id], known, aliases, (*inside, node.id))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        made = [_value(one, known, aliases, inside) for one in node.elts]
        return tuple(made) if isinstance(node, ast.Tuple) else made
    if isinstance(node, ast.Dict):
        keys = [_value(key, known, aliases, inside) if key else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return {key: _value(one, known, aliases, inside) for key, one in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.Call):
        called = _call(node, known, aliases, inside)
        dicts = ("dict", "FSDPConfig", "FSDP2Config", "TPConfig", "ParallelismConfig")
        return dict(called.arguments) if called.name in dicts else called
    if isinstance(node, ast.Attribute) and node.attr in _DTYPES:
        return f"torch.{node.attr}"
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return Source(ast.unparse(node))
