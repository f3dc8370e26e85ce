"""Safetensors files: the length of the header in 8 bytes, the header in JSON, and the tensors one after another.

A model is `model.safetensors`, or `model-00001-of-00002.safetensors` and so on with an index, which names the file of
each tensor. The layout of all files is planned before the first tensor is written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfn.checkpoint import folders
from shardfn.checkpoint.contents import TensorType
from shardfn.checkpoint.disk import sync, write_at, write_whole
from shardfn.checkpoint.team import CheckpointError
from shardfn.checkpoint.tensor_bytes import as_memoryview
from shardfn.quoting import listed
from shardfn.shards.boxes import Box, Ints, box_runs

MODEL, INDEX, HEADER = "model.safetensors", "model.safetensors.index.json", "__metadata__"
DIFFUSERS = "diffusion_pytorch_"
"""What diffusers puts before the names of files and of their index."""
OURS = re.compile(rf"({DIFFUSERS})?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class FileLayout:
    """The layout of a model's files.

    Attributes:
        headers: file -> its first bytes.
        lengths: file -> its length in bytes.
        places: tensor -> file, offset and shape.
        total: bytes of tensors.
        prefix: of all names of files.
    """

    headers: dict[str, bytes] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    places: dict[str, tuple[str, int, Ints]] = field(default_factory=dict)
    total: int = 0
    prefix: str = ""


def planned(tensors: dict[str, TensorType], largest: int, metadata: Mapping[str, str], prefix: str = "") -> FileLayout:
    """Plans the file and the place of each tensor.

    Args:
        tensors: by name.
        largest: bytes of tensors in a file; a single tensor may have more.
        metadata: for each file.
        prefix: of the names of the files.

    Raises:
        CheckpointError: these files cannot hold a dtype, a name or the metadata.
    """
    if any(type(text) is not str for pair in metadata.items() for text in pair):
        raise CheckpointError(f"metadata must map strings to strings, got {dict(metadata)!r}")
    for name, kind in tensors.items():
        if kind.dtype not in CODES:
            raise CheckpointError(f"{name} is {kind}, which safetensors does not know: pass another dtype")
        if name == HEADER:
            raise CheckpointError(f"no tensor can have the name {HEADER!r}")
    plan = FileLayout(total=sum(kind.bytes for kind in tensors.values()), prefix=prefix)
    groups: list[list[str]] = [[]]  # the tensors of each file
    size = 0
    for name, kind in tensors.items():
        if groups[-1] and size + kind.bytes > largest:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += kind.bytes
    for number, names in enumerate(groups, 1):
        file = prefix + (MODEL if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors")
        names.sort(key=lambda name: -tensors[name].dtype.itemsize)  # so that each is aligned to its element size
        ends = list(itertools.accumulate((tensors[name].bytes for name in names), initial=0))
        header = _header({name: tensors[name] for name in names}, ends, metadata)
        plan.headers[file], plan.lengths[file] = header, len(header) + ends[-1]
        for name, start in zip(names, ends, strict=False):
            plan.places[name] = file, len(header) + start, tensors[name].shape
    return plan


def begin(folder: Path, plan: FileLayout) -> None:
    """Creates the files at full length, under temporary names."""
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    for file, header in plan.headers.items():
        with temporary_path(folder, file).open("wb") as new:
            new.write(header)
            new.truncate(plan.lengths[file])
            os.fsync(new.fileno())


def temporary_path(folder: Path, file: str) -> Path:
    """The temporary path of a file until all are complete."""
    return folders.staging_path(folder / file, "writing")


Elements = tuple[str, Box, Tensor]
"""The name of a tensor in a file, a box of it, and the values."""


def fill(
    folder: Path,
    plan: FileLayout,
    values: Iterable[tuple[str, Tensor]],
    placed: Callable[[str, Tensor], Iterable[Elements]],
) -> None:
    """Writes this rank's tensors as they come; returns when they are on disk.

    Args:
        folder: prepared by `begin`.
        plan: the layout.
        values: named tensors. Other ranks take part in gathering some, so it is read to its end even if writing fails.
        placed: yields a tensor in portions as it is in the files.
    """
    first_error: Exception | None = None
    descriptors: dict[str, int] = {}
    with contextlib.ExitStack() as stack, torch.no_grad():

        def write(name: str, x: Tensor) -> None:
            for target, box, portion in placed(name, x):
                file, offset, shape = plan.places[target]
                if file not in descriptors:
                    descriptors[file] = os.open(temporary_path(folder, file), os.O_WRONLY)
                    stack.callback(os.close, descriptors[file])
                write_box(descriptors[file], offset, shape, box, portion)

        for name, x in values:
            try:
                if first_error is None:
                    write(name, x)
            except Exception as error:
                first_error = error
            del x  # frees the buffer that it is a view of before more is gathered
        if first_error is not None:
            raise first_error
        for descriptor in descriptors.values():
            os.fsync(descriptor)


def write_box(descriptor: int, offset: int, shape: Ints, box: Box, values: Tensor) -> None:
    """Writes a box of a tensor that begins at `offset` in a file."""
    content, width = as_memoryview(values), values.element_size()
    length, starts = box_runs(box, shape)
    for number, start in enumerate(starts if content else ()):
        run = content[number * length * width : (number + 1) * length * width]
        write_at(descriptor, run, offset + start * width)


def publish(folder: Path, plan: FileLayout) -> None:
    """Renames the files to their final names, the index last, and removes files of an earlier model."""
    new, index_file = set(plan.lengths), plan.prefix + INDEX
    if len(new) > 1:
        new.add(index_file)
        where = {name: file for name, (file, *_) in plan.places.items()}
        index = {"metadata": {"total_size": plan.total}, "weight_map": where}
        write_whole(temporary_path(folder, index_file), json.dumps(index, indent=2).encode())
        if any((folder / file).exists() for file in plan.lengths):
            (folder / index_file).unlink(missing_ok=True)  # an index must never name files of two models
            sync(folder)
    for file in sorted(new, key=lambda file: file == index_file):
        temporary_path(folder, file).rename(folder / file)
    sync(folder)
    for old in sorted(folder.iterdir()):
        if OURS.fullmatch(old.name) and old.name not in new:
            old.unlink()


def clear(folder: Path) -> None:
    """Removes unfinished files."""
    for path in folder.glob(".*model*.writing"):
        if OURS.fullmatch(path.name[1 : -len(".writing")]):
            path.unlink(missing_ok=True)


def _header(tensors: dict[str, TensorType], ends: list[int], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, Any] = {HEADER: {"format": "pt", **metadata}}
    for (name, kind), start, stop in zip(tensors.items(), ends, ends[1:], strict=False):
        described[name] = {"dtype": CODES[kind.dtype], "shape": kind.shape, "data_offsets": [start, stop]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Unknown:
    """A tensor in a file, of a dtype that torch lacks."""

    kind: str


def mapped_tensors(file: Path) -> Iterator[tuple[str, Tensor | Unknown]]:
    """Yields the tensors of a file, mapped: elements are read when they are used.

    Raises:
        CheckpointError: it cannot be read, or its length does not match its header.
        ImportError: the package is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading safetensors needs the package: pip install '.[huggingface]'") from error
    try:
        with safe_open(file, framework="pt") as archive:
            for name in archive.keys():  # noqa: SIM118  # it is not iterable itself
                part = archive.get_slice(name)
                is_known = part.get_dtype() in CODES.values()
                yield name, archive.get_tensor(name) if is_known else Unknown(f"{part.get_dtype()} {part.get_shape()}")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def index(path: Path) -> dict[str, str]:
    """The file of each tensor, read from an index of several files.

    Raises:
        CheckpointError: it cannot be read, or is not an index.
    """
    try:
        where: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        if all(type(file) is str for file in where.values()):
            outside = [file for file in dict.fromkeys(where.values()) if not _is_inside(path, file)]
            if not outside:
                return where
            problem = f"it names {listed(outside)}, outside of its folder, which is not read: put the file itself there"
        else:
            problem = "its weight_map is not file names"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise CheckpointError(f"{path} cannot be read: {problem}")


def _is_inside(path: Path, file: str) -> bool:
    """Whether a file is in the folder of an index, or below; links are allowed, as in Hugging Face's cache."""
    folder = os.path.abspath(path.parent)
    return os.path.commonpath([folder, os.path.abspath(os.path.join(folder, file))]) == folder
