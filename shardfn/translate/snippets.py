"""Calls in a Python file, which is parsed and never run."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
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
        found = [node for node in every if _name(node, aliases) in read]
        made = [_call(node, known, aliases, ()) for node in sorted(found, key=lambda one: (one.lineno, one.col_offset))]
        return made, set(_imported(tree))
    except SyntaxError as error:
        raise TranslateError(f"line {error.lineno}: not Python: {error.msg}") from None
    except MemoryError:
        raise TranslateError("nested too deeply") from None
    except (ValueError, OverflowError) as error:
        raise error if isinstance(error, TranslateError) else TranslateError(f"not Python: {error}") from None


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that are assigned once."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


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
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return aliases.get(node.func.id, node.func.id) if isinstance(node.func, ast.Name) else ""


def _call(node: ast.Call, known: Mapping[str, ast.expr], aliases: Mapping[str, str], inside: tuple[str, ...]) -> Call:
    name = _name(node, aliases)
    arguments: dict[str, Any] = {}
    positions = _POSITIONS.get(name, ())
    for i, one in enumerate(node.args):
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
