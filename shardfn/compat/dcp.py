"""The metadata of torch.distributed.checkpoint."""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional


def checkpoint_metadata(
    tensors: dict[str, tuple[torch.dtype, Sequence[int], list[tuple[Any, ...]]]],
    numbers: dict[str, tuple[str, int, int]],
    keys: dict[str, tuple[Any, ...]],
) -> Any:
    """Returns the metadata that torch.distributed.checkpoint pickles next to its files.

    Args:
        tensors: name -> dtype, shape, and parts `(offsets, sizes, file, offset, length)`.
        numbers: name -> `(file, offset, length)`.
        keys: name -> the keys that lead to it in nested dicts.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    described: dict[str, Any] = {name: metadata.BytesStorageMetadata() for name in numbers}
    places = {metadata.MetadataIndex(name): filesystem._StorageInfo(*place) for name, place in numbers.items()}
    for name, (dtype, shape, parts) in tensors.items():
        chunks = [metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in parts]
        described[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=dtype), torch.Size(shape), chunks
        )
        for i, (offsets, _, *place) in enumerate(parts):
            places[metadata.MetadataIndex(name, offsets, i)] = filesystem._StorageInfo(*place)
    version = filesystem.CURRENT_DCP_VERSION
    return metadata.Metadata(described, keys, places, metadata.StorageMeta(), version=version)


def read_checkpoint_metadata(content: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, int, int]]]:
    """Returns the first two arguments of `checkpoint_metadata` from such a pickle; nothing else may be in it.

    Raises:
        pickle.UnpicklingError: the pickle refers to anything else.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    described = _read_metadata(content)
    places: dict[tuple[str, Any], filesystem._StorageInfo] = {
        (index.fqn, index.offset and tuple(index.offset)): place for index, place in described.storage_data.items()
    }
    tensors, numbers = {}, {}
    for name, entry in described.state_dict_metadata.items():
        if isinstance(entry, metadata.BytesStorageMetadata):
            place = places[name, None]
            numbers[name] = place.relative_path, place.offset, place.length
            continue
        parts = []
        for chunk in entry.chunks:
            place = places.get((name, tuple(chunk.offsets))) or places[name, None]
            parts.append((tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length))
        tensors[name] = entry.properties.dtype, tuple(entry.size), parts
    all_places = [*numbers.values(), *(part[2:] for _, _, parts in tensors.values() for part in parts)]
    if any(tuple(map(type, place)) != (str, int, int) or min(place[1:]) < 0 for place in all_places):
        raise pickle.UnpicklingError("an invalid place in a file")
    return tensors, numbers


def read_checkpoint_keys(content: bytes) -> dict[str, tuple[Any, ...]]:
    """Returns the third argument of `checkpoint_metadata` from such a pickle; empty if there is none.

    Raises:
        pickle.UnpicklingError: the pickle refers to anything else.
    """
    keys = _read_metadata(content).planner_data
    return dict(keys) if isinstance(keys, dict) else {}


def _read_metadata(content: bytes) -> Any:
    from torch.distributed.checkpoint import metadata

    loaded = _Data(io.BytesIO(content)).load()
    if not isinstance(loaded, metadata.Metadata):
        raise pickle.UnpicklingError(f"a {type(loaded).__name__} in place of torch.distributed.checkpoint's Metadata")
    return loaded


class _Data(pickle.Unpickler):
    """Unpickles the description of a checkpoint, and refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        from torch.distributed.checkpoint import filesystem, metadata

        if module == "torch.distributed.checkpoint.metadata" and name in (*metadata.__all__, "_MEM_FORMAT_ENCODING"):
            return getattr(metadata, name)
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return filesystem._StorageInfo
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return getattr(torch.serialization, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"):
            return getattr(pathlib, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no description of tensors needs")
