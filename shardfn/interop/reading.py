"""Whole tensors by name: in files, of which nothing is read before it is used, or in memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardfn.checkpoint import safetensors
from shardfn.checkpoint.contents import memory
from shardfn.checkpoint.team import CheckpointError
from shardfn.interop.functional import Functional
from shardfn.interop.placeholder import Placeholder
from shardfn.mesh.spec import is_dtensor
from shardfn.shards.replicated import checksum

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
WHOLE = (safetensors.MODEL, safetensors.INDEX, PICKLED, PICKLED_INDEX)
FEW = 16  # elements of each tensor of a file that ranks compare

_NAMED = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
_OBJECT = re.compile(r"Unsupported (?:global|class)\W+(?:GLOBAL )?([\w.]+)")  # as torch.load says

Source = str | os.PathLike[str] | nn.Module | Functional | Mapping[str, Any]
"""Where parameters are: the path of a folder or file, a module, what `functional` made of one, or a mapping by name."""


def in_files(source: Any) -> bool:
    """Whether it is a path."""
    return isinstance(source, (str, os.PathLike))


def tensors_of(source: Any, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    """The tensors of a source, none of which is copied; they are there while the stack is.

    Args:
        source: the path of a folder or file; a module, or what `functional` made of one; a mapping of names to tensors,
            or to such mappings.
        stack: what closes the files.

    Raises:
        CheckpointError: a file that is gone, damaged, or lacks what the index says.
        TypeError: something else; values that are not dense tensors.
    """
    if isinstance(source, Functional):
        stated = source.module.state_dict()
        source = {**source.tree, **{name: b for name, b in source.buffers.items() if name in stated}}
    if isinstance(source, nn.Module):
        return _checked(source.state_dict())
    if isinstance(source, Mapping):
        return _checked(dict(_flat(source)))
    if not in_files(source):
        raise TypeError(
            f"parameters are loaded from the path of a folder or file, a module, or a mapping of names to tensors, not "
            f"from {source!r}" + (": source= names the rank that passes it" if source is None else "")
        )
    path = Path(source)
    if not path.exists():
        hub = ": of a model on the Hub pass the folder that huggingface_hub.snapshot_download returns"
        raise CheckpointError(f"{path} does not exist here{hub if _NAMED.fullmatch(str(path)) else ''}")
    if path.is_dir() and not any((path / name).exists() for name in WHOLE):
        raise CheckpointError(_without_model(path))
    if _is_pickled(path):
        return _checked(_unpickled(path))
    stored = safetensors.stored_in(path)
    files = {file: stack.enter_context(safetensors.opened(file)) for file in {one.file for one in stored.values()}}
    try:
        return {name: files[one.file].get_slice(name)[...] for name, one in stored.items()}
    except Exception as error:  # a damaged file raises almost anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def fingerprint(tensors: Mapping[str, Tensor], names: Iterable[str], whole: bool) -> int:
    """Of some of these tensors: names, kinds, and all of the elements, or the first few."""
    found = 0
    for name in sorted(names):
        x = tensors[name]
        some = checksum(x) if whole else zlib.crc32(memory(x.reshape(-1)[:FEW]))
        found = zlib.crc32(f"{name}: {x.dtype} {tuple(x.shape)} {some}".encode(), found)
    return found


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        name = f"{prefix}.{key}" if prefix and key else prefix or key
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        else:
            yield name, value


def _checked(found: Mapping[str, Any]) -> dict[str, Tensor]:
    for name, x in found.items():
        if isinstance(x, Placeholder):
            raise TypeError(f"{name} was taken out of this module by `functional`: pass what that returned")
        if is_dtensor(x):
            raise TypeError(f"{name} is a DTensor: pass whole tensors, or let shardfn's checkpoints convert it")
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is of type {type(x).__name__}, not a tensor")
        if x.is_meta or x.layout is not torch.strided or x.is_quantized or x.is_nested:
            where = "on the device meta, without values" if x.is_meta else "not dense"
            raise TypeError(f"{name} is {where}")
    return {name: x.detach() for name, x in found.items()}


def _without_model(folder: Path) -> str:
    files = sorted(file.name for file in folder.iterdir())
    if ".metadata" in files:
        return (
            f"{folder} is a checkpoint: checkpoint.load(folder, params, part=...) reads it, into parameters that "
            f"init_sharded or shard made"
        )
    some = ", ".join(files[:4]) + (", ..." if len(files) > 4 else "")
    return f"{folder} holds {some or 'nothing'}, and none of {', '.join(WHOLE)}"


def _is_pickled(path: Path) -> bool:
    if not path.is_dir():
        return path.suffix in SUFFIXES or path.name.endswith(PICKLED_INDEX)
    ours = any((path / name).exists() for name in (safetensors.MODEL, safetensors.INDEX))
    return not ours and any((path / name).exists() for name in (PICKLED, PICKLED_INDEX))


def _unpickled(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote, of which only tensors and containers are unpickled."""
    if path.is_dir():
        path = path / (PICKLED if (path / PICKLED).exists() else PICKLED_INDEX)
    if path.suffix != ".json":
        return _inside(path)
    try:
        where: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        files = sorted(set(where.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    found: dict[str, Any] = {}
    for file in files:
        found |= _inside(path.parent / file)
    lacking = [name for name in where if name not in found]
    if lacking:
        raise CheckpointError(f"the files of {path} have no {', '.join(lacking[:4])}, though it says so")
    return found


def _inside(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file raises almost anything
        said = str(error).partition("\n")[0] or type(error).__name__
        if unread := _OBJECT.search(str(error)):
            said = (
                f"it holds a {unread[1]}, and only tensors, numbers and containers of them are read: save the "
                f"module's state_dict(), or pass what torch.load(path, weights_only=False) returns, if you trust it"
            )
        raise CheckpointError(f"{path} cannot be read: {said}") from error
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state dict")
    if inner := [str(key) for key, x in found.items() if isinstance(x, Mapping)]:
        some = ", ".join(map(str, list(found)[:6])) + (", ..." if len(found) > 6 else "")
        raise CheckpointError(
            f"{path} holds {some}: pass the part that is the state dict, such as torch.load(path)[{inner[0]!r}], with "
            f"source= for the one rank that read it"
        )
    return found
