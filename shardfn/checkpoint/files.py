"""Reads files of other tools in which each tensor is whole: those of `torch.save`, and safetensors.

Both are mapped into memory, so that a rank reads only the parts that it needs.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.checkpoint import disk, safetensors
from shardfn.checkpoint.contents import SCALARS, LocalBox, TensorType, lack
from shardfn.checkpoint.disk import Flaw, checked_records
from shardfn.checkpoint.manifest import Entries
from shardfn.checkpoint.reading import BoxReader
from shardfn.checkpoint.team import CheckpointError
from shardfn.mesh.spec import dotted, is_dtensor
from shardfn.quoting import listed
from shardfn.shards.boxes import full_box, steps
from shardfn.tiers import copying, mapping

_WHOLE = safetensors.MODEL, safetensors.INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json"
_DIFFUSERS = (safetensors.DIFFUSERS + name for name in (safetensors.MODEL, safetensors.INDEX))
MODELS = (*_WHOLE, *_DIFFUSERS, f"{safetensors.DIFFUSERS}model.bin")
STEP = 2**23  # bytes that are copied at a time


@dataclass
class Files(Entries):
    """The entries of files of whole tensors.

    Attributes:
        places: the file of each entry.
        mapped: the tensors, mapped into memory.
    """

    places: dict[str, Path] = field(default_factory=dict)
    mapped: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, file: Path, leaf: Any) -> None:
        """Adds an entry of a file.

        Raises:
            CheckpointError: the name is in use.
        """
        if name in self.places:
            raise CheckpointError(
                f"{name} is in {self.places[name]} and in {file}"
                if self.places[name] != file
                else f"{file}: two things in it have the name {name!r}: save it again without one of them"
            )
        self.places[name] = file
        if type(leaf) in SCALARS:
            self.numbers[name] = leaf
        elif isinstance(leaf, Tensor) and not is_dtensor(leaf) and not lack(leaf):
            self.tensors[name], self.mapped[name] = TensorType(leaf.dtype, tuple(leaf.shape)), leaf.detach()
        elif isinstance(leaf, safetensors.Unknown):
            self.others[name] = leaf.kind
        else:
            kind = "a DTensor" if is_dtensor(leaf) else f"a tensor {lack(leaf)}" if isinstance(leaf, Tensor) else ""
            self.others[name] = kind or f"a {type(leaf).__name__}"


def model_in(path: Path) -> Path | None:
    """The model file at a path or in a folder, or the index of several; None if there is none."""
    if path.is_dir():
        return next((path / name for name in MODELS if (path / name).exists()), None)
    return path if path.exists() else None


class FileReader(BoxReader):
    """Reads whole tensors in files.

    With `share=(i, n)`, this is reader i of n that read together.

    Attributes:
        source: the entries, with the mapped tensors.
    """

    source: Files

    def __init__(self, path: Path, share: tuple[int, int] = (0, 1)) -> None:
        self.source, self._share = Files(), share
        self._checksums: dict[Path, dict[str, int]] = {}  # checksums in each file of torch.save
        self._places: set[tuple[int, int]] = set()  # addresses and lengths of the mapped files
        before = _version(path)
        self._open(path)
        if _version(path) != before:
            raise CheckpointError(f"{path} was replaced by another while its tensors were looked up: load it again")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, mapped."""
        return self.source.mapped

    def _open(self, path: Path) -> None:
        where = safetensors.index(path) if path.suffix == ".json" else {"": path.name}
        of_torch = not all(file.endswith(".safetensors") for file in where.values())
        for file in (path.parent / name for name in sorted(set(where.values()))):
            expected = {name for name in where if name and path.parent / where[name] == file}
            if of_torch:
                self._checksums[file] = _verify_checksums(file, values=False)
            names = set[str]()
            for name, leaf in _of_torch(file) if of_torch else safetensors.mapped_tensors(file):
                if of_torch or name in expected or not expected:
                    self.source.add(name, file, leaf)
                    names.add(name)
            if missing := [name for name in where if name in expected - names]:
                raise CheckpointError(f"{file} has no {listed(missing)}, though {path.name} says so")
            self._places |= _mapped_range(file, [x for name, x in self.tensors.items() if name in names])

    def identity(self) -> str:
        """A text that is equal for equal files: the checksums in torch.save files, or of a sample of bytes."""
        files = sorted({*self.source.places.values(), *self._checksums})
        return "; ".join(f"{disk.sampled(file):x} {sorted(self._checksums.get(file, {}).items())}" for file in files)

    def plan_reads(self, targets: Iterable[LocalBox]) -> list[LocalBox]:
        """The boxes to fill that are not empty."""
        return [target for target in targets if target.box.numel]

    def check(self, plan: Sequence[LocalBox] = ()) -> None:
        """Compares the checksums in files by torch.save, for this reader's share of the records.

        Raises:
            CheckpointError: a file is damaged.
        """
        for file in self._checksums:
            _verify_checksums(file, True, self._share)

    def fill(self, plan: Iterable[LocalBox]) -> None:
        """Fills each box from the tensor of its name, converting the dtype."""
        with torch.no_grad():
            for target in plan:
                x = self.tensors[target.name]
                for box in steps(target.box, STEP // x.element_size()):
                    copying.copy_(target.values[box.slices_in(target.box)], x[box.slices_in(full_box(x.shape))])
                    self.release_pages()

    def release_pages(self) -> None:
        """Releases the memory of mapped pages that have been read."""
        for address, nbytes in self._places:
            mapping.drop_pages(address, nbytes)


def _version(path: Path) -> tuple[int, ...]:
    """Inode, time and size, which change if a file is replaced; replacing several files replaces their index, too."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _of_torch(file: Path) -> Iterator[tuple[str, Any]]:
    """The leaves of a `torch.save` file, under names like those in our trees."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(_unpickled(file))
    return ((dotted(accessor) or "value", leaf) for accessor, leaf in zip(accessors, leaves, strict=True))


def _mapped_range(file: Path, mapped: Iterable[Tensor]) -> set[tuple[int, int]]:
    """The address and length of the mapping of a file, found from one of its tensors."""
    x = next((x for x in mapped if x.numel()), None)
    mapped_range = None if x is None else mapping.private(str(file), x.untyped_storage().data_ptr())
    return set() if mapped_range is None else {mapped_range}


def _unpickled(file: Path) -> Any:
    """Loads a `torch.save` file with `weights_only=True`; tensor elements stay in the file."""
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        culprit = re.search(r"[Uu]nsupported (?:global|class|operand)[^\n.]*(?:\.\w[^\n. ]*)*", str(error))
        detail = f" ({culprit[0]})" if culprit else ""
        raise CheckpointError(
            f"{file} holds more than tensors, numbers, strings and containers of these{detail}, and loading it can run "
            f"code. Save a module's state_dict() instead of the module, or convert a trusted file with "
            f"torch.load(path, weights_only=False)"
        ) from error
    except Exception as error:  # a damaged file raises almost anything
        raise CheckpointError(f"{file} cannot be read: {str(error).partition(chr(10))[0]}") from error


def _verify_checksums(file: Path, values: bool, share: tuple[int, int] = (0, 1)) -> dict[str, int]:
    """Compares the checksums in a `torch.save` file, as `checked` does, and returns them."""
    with disk.open_readonly(file) as descriptor:
        if not zipfile.is_zipfile(file):
            raise CheckpointError(
                f"{file} is not a torch.save file, or is truncated. Convert a file of torch before 1.6 with "
                f"torch.load(path, weights_only=True) and torch.save"
            )
        try:
            return checked_records(descriptor, 0, file.stat().st_size, values=values, share=share)
        except Flaw as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
