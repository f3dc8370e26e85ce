"""Finds calls in a Python file, which is parsed and never run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardfn.translate.values import SourceCall, SourceExpression, TranslateError

_WRAPPED = ("module", "process_group", "sharding_strategy")
_POSITIONS = {
    **dict.fromkeys(("FullyShardedDataParallel", "FSDP"), _WRAPPED),
    "fully_shard": ("module",),
    **dict.fromkeys(
        ["Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "NAdam", "RAdam", "Adamax", "SGD"], ("params", "lr")
    ),
    "DataLoader": ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn"),
    "DistributedSampler": ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last"),
    **dict.fromkeys(("GradScaler", "ShardedGradScaler"), ("device", "init_scale")),
    "CPUOffload": ("offload_params",),
    "CPUOffloadPolicy": ("pin_memory",),
    "MixedPrecision": ("param_dtype", "reduce_dtype", "buffer_dtype"),
    "MixedPrecisionPolicy": ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
    "ModuleWrapPolicy": ("module_classes",),
    "init_device_mesh": ("device_type", "mesh_shape"),
    "partial": ("func",),
    "clip_grad_norm_": ("parameters", "max_norm", "norm_type"),
    "clip_grad_value_": ("parameters", "clip_value"),
    **dict.fromkeys(("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"), ("factor",)),
    **dict.fromkeys(("Trainer", "Seq2SeqTrainer", "SentenceTransformerTrainer", "SFTTrainer"), ("model", "args")),
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"), ("output_dir",)),
    "SentenceTransformerTrainingArguments": ("output_dir",),
    **dict.fromkeys(("DistributedDataParallel", "DDP"), ("module", "device_ids", "output_device")),
    "ZeroRedundancyOptimizer": ("params", "optimizer_class"),
    "deepspeed.initialize": ("args", "model", "optimizer", "model_parameters"),
    "torch.compile": ("model",),
    "autocast": ("device_type", "dtype", "enabled"),
}
_SETTINGS = ("Strategy", "Plugin", "Arguments", "Config", "Accelerator")
# Last parts of names that mean many things, and the modules whose they are.
_WHOLE = {"compile": "torch", "initialize": "deepspeed", "wrap": "torch.distributed.fsdp.wrap"}
_DICTS = ("dict", "FSDPConfig", "FSDP2Config", "TPConfig", "ParallelismConfig")
_CHANGING = re.compile("set_.*|update|setdefault|pop|popitem|clear|append|extend|insert|remove")
_NUMBERS = ("lr", "weight_decay", "momentum", "betas", "eps", "alpha", "dampening", "lr_mul", "lr_scale")
_DTYPES = {"bfloat16", "float16", "half", "float32", "float64", "double"}


@dataclass(frozen=True)
class FileBindings:
    """The bindings of names in a file.

    Attributes:
        known: names that are assigned once and stay as they were: nothing else binds them, or changes what they hold.
        aliases: `from ... import FullyShardedDataParallel as FSDP`.
        modules: where names are imported from; "" for those that the file defines.
        changes: names, and where what they hold is changed: `name.field = ...`, `name.update(...)`.
        made: lines and names to which they assign the result of a call.
        read: names of the calls that are read.
    """

    known: Mapping[str, ast.expr]
    aliases: Mapping[str, str]
    modules: Mapping[str, str]
    changes: tuple[tuple[str, ast.expr], ...]
    made: frozenset[tuple[int, str]]
    read: Collection[str]


def calls(text: str, read: Collection[str]) -> tuple[list[SourceCall], set[str], Mapping[str, str]]:
    """The calls of a file with these names, or with the name of settings, in order; the packages that it imports; and
    the modules from which its names are, "" for its own.

    Raises:
        TranslateError: the text is not Python.
    """
    try:
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        program = _file_bindings(nodes, read)
        nodes_read = [node for node in nodes if isinstance(node, ast.Call) and _is_read(_called(node, program), read)]
        calls_read = [_read_call(node, program) for node in sorted(nodes_read, key=lambda n: (n.lineno, n.col_offset))]
        calls_read += _param_groups(nodes)
    except SyntaxError as error:
        raise TranslateError(f"line {error.lineno}: not Python: {error.msg}") from None
    except MemoryError:
        raise TranslateError("nested too deeply") from None
    except (ValueError, OverflowError) as error:
        raise error if isinstance(error, TranslateError) else TranslateError(f"not Python: {error}") from None
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return calls_read, {name.partition(".")[0] for name in imported}, program.modules


def _is_read(name: str, read: Collection[str]) -> bool:
    return name in read or (name.endswith(_SETTINGS) and name[:1].isupper() and name not in _DICTS)


def _file_bindings(nodes: list[ast.AST], read: Collection[str]) -> FileBindings:
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
    assigned: dict[str, ast.expr] = {}
    call_results: set[tuple[int, str]] = set()
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            assigned.update(dict.fromkeys(names, node.value))
            call_results |= {(node.value.lineno, name) for name in names if isinstance(node.value, ast.Call)}
    changes = tuple(_mutations(nodes))
    changed = {name for name, _ in changes}
    imports = [(node.module or "", alias) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    definitions = {node.name: "" for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return FileBindings(
        {name: value for name, value in assigned.items() if bound[name] == 1 and name not in changed},
        {alias.asname: alias.name for _, alias in imports if alias.asname},
        {alias.name: module for module, alias in imports} | definitions,
        changes,
        frozenset(call_results),
        read,
    )


def _mutations(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            root: ast.expr = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _CHANGING.match(node.func.attr):
            root = node.func
        else:
            continue
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        if isinstance(root, ast.Name):
            yield root.id, node


def _param_groups(nodes: list[ast.AST]) -> list[SourceCall]:
    """Assignments to an optimizer's groups, `group["lr"] = ...`, as calls with these arguments."""
    if not any(isinstance(node, ast.Attribute) and node.attr == "param_groups" for node in nodes):
        return []
    assignments = []
    for node in nodes:
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            key = target.slice if isinstance(target, ast.Subscript) else None
            if isinstance(key, ast.Constant) and key.value in _NUMBERS:
                assignments.append(
                    SourceCall("param_groups", node.lineno, {str(key.value): SourceExpression(ast.unparse(node))})
                )
    return assignments


def _called(node: ast.Call, program: FileBindings) -> str:
    """The name of the called function, or of the one that `partial` is applied to."""
    name = _last(node.func, program)
    return _last(node.args[0], program) if name == "partial" and node.args else name


def _last(node: ast.expr, program: FileBindings) -> str:
    """The last part of a name, with import aliases resolved."""
    if isinstance(node, ast.Attribute):
        return f"{_WHOLE[node.attr]}.{node.attr}" if ast.unparse(node.value) == _WHOLE.get(node.attr) else node.attr
    name = program.aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""
    return f"{_WHOLE[name]}.{name}" if program.modules.get(name, "") == _WHOLE.get(name) else name


def _read_call(node: ast.Call, program: FileBindings) -> SourceCall:
    """A call, with what the program later assigns to its result's fields: `args.max_grad_norm = 0.5`."""
    call = _call(node, program, ())
    if not call.name.endswith(_SETTINGS):
        return call
    names = {name for line, name in program.made if line == call.line}
    changed = {
        ast.unparse(place): SourceExpression(ast.unparse(place)) for name, place in program.changes if name in names
    }
    return replace(call, arguments={**call.arguments, **changed})


def _call(node: ast.Call, program: FileBindings, inside: tuple[str, ...]) -> SourceCall:
    name, positional = _last(node.func, program), node.args
    if name == "partial" and _called(node, program) in program.read:
        name, positional = _called(node, program), positional[1:]
    arguments: dict[str, Any] = {}
    positions = _POSITIONS.get(name, ())
    for i, item in enumerate(positional):
        arguments[positions[i] if i < len(positions) else f"argument {i + 1}"] = _read_value(item, program, inside)
    for keyword in node.keywords:
        value = _read_value(keyword.value, program, inside)
        if keyword.arg is not None:
            arguments[keyword.arg] = value
        elif isinstance(value, Mapping):
            arguments |= {str(key): item for key, item in value.items()}
        else:
            arguments[f"**{ast.unparse(keyword.value)}"] = SourceExpression(ast.unparse(keyword.value))
    return SourceCall(name, node.lineno, arguments)


def _read_value(node: ast.expr, program: FileBindings, inside: tuple[str, ...]) -> Any:
    if isinstance(node, ast.Name) and node.id in program.known and node.id not in inside:
        return _read_value(program.known[node.id], program, (*inside, node.id))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        items = [_read_value(item, program, inside) for item in node.elts]
        return tuple(items) if isinstance(node, ast.Tuple) else items
    if isinstance(node, ast.Dict):
        keys = [_read_value(key, program, inside) if key else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return {key: _read_value(item, program, inside) for key, item in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.Call):
        called = _call(node, program, inside)
        return dict(called.arguments) if called.name in _DICTS else called
    if isinstance(node, ast.Attribute) and node.attr in _DTYPES:
        return f"torch.{node.attr}"
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return SourceExpression(ast.unparse(node))
