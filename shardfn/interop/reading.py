"""Whole tensors by name: in files, read when they are used, or in memory."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardfn.checkpoint.files import MODELS, FileReader, model_in
from shardfn.checkpoint.manifest import METADATA
from shardfn.checkpoint.team import CheckpointError
from shardfn.interop.functional import Functional
from shardfn.interop.placeholder import Placeholder
from shardfn.local_paths import local_path
from shardfn.mesh.spec import is_dtensor
from shardfn.quoting import listed
from shardfn.shards.replicated import checksum

INNER = "state_dict."
T = TypeVar("T")

_NAMED = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name

Source = str | os.PathLike[str] | nn.Module | Functional | Mapping[str, Any]
"""Where parameters come from: the path of a folder or file, a module, a `Functional`, or a mapping by name."""


def in_files(source: Any) -> bool:
    """Whether a source is a path."""
    return isinstance(source, (str, os.PathLike))


class Tensors(NamedTuple):
    """The contents of a source.

    Attributes:
        values: whole tensors by name, none of them copied.
        others: descriptions of entries that are not tensors, by name.
        forget: releases the memory of what was read from files.
        identity: for files, a number that is equal for copies of them.
    """

    values: dict[str, Tensor]
    others: dict[str, str]
    forget: Callable[[], None]
    identity: int = 0


def tensors_of(source: Any, share: tuple[int, int] = (0, 1)) -> Tensors:
    """The tensors of a source.

    Args:
        source: the path of a folder or file; a module or a `Functional`; or a mapping of names to tensors or to such
            mappings.
        share: `(i, n)` for reader i of n, which share the work of comparing checksums.

    Raises:
        CheckpointError: a file is gone, damaged, or lacks tensors of the index.
        TypeError: the source has another type, or values that are not dense tensors.
    """
    if in_files(source):
        path = local_path(source, "interop.load: source")
        model_path = model_in(path)
        if model_path is None:
            if path.is_dir():
                raise CheckpointError(_without_model(path))
            hub = ": of a model on the Hub pass the folder that huggingface_hub.snapshot_download returns"
            raise CheckpointError(f"{path} does not exist here{hub if _NAMED.fullmatch(str(path)) else ''}")
        reader = FileReader(model_path, share)
        reader.check()
        unsupported = {name: f"the value {x!r}" for name, x in reader.source.numbers.items()} | reader.source.others
        inner = any(name.startswith(INNER) for name in reader.tensors)  # as trainers save it, beside other state
        values, unsupported = (
            (_inner_part(reader.tensors), _inner_part(unsupported)) if inner else (reader.tensors, unsupported)
        )
        return Tensors(values, unsupported, reader.release_pages, zlib.crc32(reader.identity().encode()))
    if isinstance(source, Functional):
        state_dict = source.module.state_dict()
        source = {**source.tree, **{name: b for name, b in source.buffers.items() if name in state_dict}}
    if isinstance(source, nn.Module):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        raise TypeError(
            f"parameters are loaded from the path of a folder or file, a module, or a mapping of names to tensors, not "
            f"from {source!r}" + (": src_rank= names the rank that passes it" if source is None else "")
        )
    return Tensors(_checked_tensors(dict(_flat_items(source))), {}, lambda: None)


def _inner_part(named: dict[str, T]) -> dict[str, T]:
    return {name.removeprefix(INNER): x for name, x in named.items() if name.startswith(INNER)}


def fingerprint(tensors: Mapping[str, Tensor], names: Iterable[str], values: bool = True) -> int:
    """A CRC-32 of the names, dtypes and shapes of some tensors, and of their elements if `values`."""
    crc = 0
    for name in sorted(names):
        x = tensors[name]
        content = checksum(x) if values else ""
        crc = zlib.crc32(f"{name}: {x.dtype} {tuple(x.shape)} {content}".encode(), crc)
    return crc


def _flat_items(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        name = f"{prefix}.{key}" if prefix and key else prefix or key
        if isinstance(value, Mapping):
            yield from _flat_items(value, name)
        else:
            yield name, value


def _checked_tensors(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    for name, x in tensors.items():
        if isinstance(x, Placeholder):
            raise TypeError(f"{name} was taken out of this module by `functional`: pass what that returned")
        if is_dtensor(x):
            raise TypeError(f"{name} is a DTensor: pass whole tensors, or let shardfn's checkpoints convert it")
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is of type {type(x).__name__}, not a tensor")
        if x.is_meta or x.layout is not torch.strided or x.is_quantized or x.is_nested:
            where = "on the device meta, without values" if x.is_meta else "not dense"
            raise TypeError(f"{name} is {where}")
    return {name: x.detach() for name, x in tensors.items()}


def _without_model(folder: Path) -> str:
    files = sorted(file.name for file in folder.iterdir())
    if METADATA in files:
        return (
            f"{folder} is a checkpoint: checkpoint.load(folder, params, part=...) reads it, into parameters that "
            f"init_sharded or shard made"
        )
    return f"{folder} holds {listed(files, 4) or 'nothing'}, and none of {', '.join(MODELS)}"
