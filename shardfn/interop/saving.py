"""Saves parameters to the files that `from_pretrained`, or the module itself, reads."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.checkpoint import folders
from shardfn.checkpoint.contents import TensorType, contents
from shardfn.checkpoint.disk import sync
from shardfn.checkpoint.huggingface import STEP, refuse_different, refuse_options, turns
from shardfn.checkpoint.safetensors import DIFFUSERS, OURS, Elements, FileLayout, begin, clear, fill, planned, publish
from shardfn.checkpoint.saving import wait_for_saves
from shardfn.checkpoint.team import CheckpointError, on_each_rank, team_of
from shardfn.checkpoint.tensor_bytes import pieces
from shardfn.interop import coded, conversions
from shardfn.interop.functional import Functional, expect_functional
from shardfn.interop.lazy_tensors import Assembled, AssembledPart, lazy
from shardfn.local_paths import local_path
from shardfn.mesh import waiting
from shardfn.mesh.spec import leaves_by_path
from shardfn.quant import bitsandbytes
from shardfn.quant.packed import Packed, is_packed
from shardfn.quoting import listed
from shardfn.shards.boxes import flaw, full_box
from shardfn.shards.layout import flat_shards, is_flat
from shardfn.tracebacks import api_boundary

SETTINGS = ".settings.writing"  # holds the other files until all are complete
CONFIG = "config.json"  # without which `from_pretrained` finds no model


@waiting.during("sf.interop.save_pretrained")
@api_boundary
def save_pretrained(
    folder: str | os.PathLike[str],
    model: Functional,
    params: Any,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a model in its own library's format, on all ranks together, one stage gathered after another.

    For a model of `transformers` this is what its `save_pretrained` writes: safetensors files, with the names and
    layout that it uses in files, tied parameters once, and its configuration. `from_pretrained` then finds nothing
    missing or unexpected. Before anything is written, what it would make of these files is compared with the
    parameters. A model of `diffusers` gets its own configuration and names of files. For another module it is
    `model.safetensors` with all names of its `state_dict`, for
    `module.load_state_dict(safetensors.torch.load_file(...))`.

    Quantized parameters are written as by bitsandbytes, and noted in the configuration; `dtype` decodes them.

    In addition to its shards a rank needs memory for one stage and 32 MB. An earlier model in the folder stays until
    all of the new one is on disk, as with `checkpoint.export_hf`, and files of other names stay. If the process dies
    while one replaces the other, `from_pretrained` finds no model, rather than the tensors of one with the
    configuration of another: a configuration that changes is moved away first, and the new one is put in place last.

    Args:
        folder: which all ranks see, and which is created if necessary.
        model: a `Functional`.
        params: of the structure of `model.tree`: flat shards, whole tensors, or both.
        buffers: as the last call of the model returned them; default: `model.buffers`. The first rank's are written.
        tokenizer: whose files belong to the model: anything with a `save_pretrained(folder)`.
        dtype: floating-point dtype to which floating-point parameters are converted, and quantized ones decoded;
            None keeps their own. Buffers keep theirs.
        max_shard_bytes: bytes of tensors in a file; a single tensor may have more.
        metadata: further strings for the header of each file.

    Raises:
        CheckpointError: files cannot be written, or could not be read back; or `transformers` could not read parameters
            in few bits. The same on every rank.
        ValueError: the parameters are not the model's; or the model changes buffers and none were passed.
        TypeError: `dtype` has a wrong type, `model` is not a `Functional`, or the tokenizer cannot be saved.

    Example:
        ``save_pretrained("out", model, params, tokenizer=tokenizer)``
    """
    wait_for_saves()

    def started() -> tuple[Path, _Given]:
        expect_functional("save_pretrained", model)
        refuse_options("save_pretrained", "max_shard_bytes", max_shard_bytes, dtype)
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise TypeError(
                f"save_pretrained: tokenizer={tokenizer!r} has no save_pretrained(folder): pass the tokenizer itself"
            )
        return local_path(folder, "interop.save_pretrained: folder"), _values_to_write(model, params, buffers)

    path, provided = on_each_rank(started)
    group, task = team_of(flat.layout.grid for flat in flat_shards(params)), f"save_pretrained {path}"
    files, stored, plan = group.run_on_each(
        task, lambda: _plan_files(model, provided, dtype, max_shard_bytes, metadata or {})
    )
    refuse_different(group, task, contents(params, shared=False), (str(path), repr(plan.headers)))
    try:
        group.first(task, lambda: _create_files(path, plan, model, tokenizer, files, stored))
        local_buffers = provided.buffers.items() if group.rank == 0 else ()
        values = itertools.chain(turns(params, provided.params, group), local_buffers)
        placed = functools.partial(_file_portions, _targets(files), stored, provided.packed, dtype)
        group.run_on_each(task, lambda: fill(path, plan, values, placed))
        group.first(task, lambda: _finish(path, plan))
    except BaseException:
        if group.rank == 0:
            clear(path)
            shutil.rmtree(path / SETTINGS, ignore_errors=True)
        raise


class _Given(NamedTuple):
    """The parameters and buffers to write.

    Attributes:
        params: dtype and shape of each parameter by the tree's name, in its order; of quantized ones, of the decoded
            one.
        packed: the quantized parameters, without their bytes.
        buffers: by name.
    """

    params: dict[str, TensorType]
    packed: dict[str, Packed]
    buffers: dict[str, Tensor]


def _values_to_write(model: Functional, params: Any, buffers: Mapping[str, Tensor] | None) -> _Given:
    """The values to write; raises ValueError unless parameters and buffers are the model's."""
    model._check(params)
    state_dict = model.module.state_dict()
    changed = [name for name in model._changing if name in state_dict]
    forgotten = [name for name in changed if name not in (buffers or {})]
    if forgotten:
        raise ValueError(
            f"save_pretrained: {type(model.module).__name__} changes buffers while it trains, among them "
            f"{listed(forgotten, 3)}: pass buffers=, all that the last call of the model returned, or "
            f"model.buffers if there was none"
        )
    for name, b in (buffers or {}).items():
        if name not in model.buffers or b.shape != model.buffers[name].shape:
            is_ = f"of shape {list(model.buffers[name].shape)}" if name in model.buffers else "not one of this model"
            raise ValueError(f"save_pretrained: the buffer {name}, passed with shape {list(b.shape)}, is {is_}")
    kinds, packed = dict[str, TensorType](), dict[str, Packed]()
    for name, leaf in leaves_by_path(params, lambda x: is_flat(x) or is_packed(x)).items():
        if is_packed(leaf):
            packed[name] = leaf
        if not is_flat(leaf):
            kinds[name] = TensorType(leaf.dtype, tuple(leaf.shape))
        elif leaf.values is not None:
            for number, entry in enumerate(leaf.layout.entries):
                if (packed_here := leaf.layout.packed_at(number)) is not None:
                    packed[entry.path] = packed_here
                dtype = leaf.values.dtype if packed_here is None else packed_here.dtype
                kinds[entry.path] = TensorType(dtype, leaf.layout.meant_shape(number))
    names = set(model.names.values())
    if set(kinds) != names:
        differing = sorted(names ^ set(kinds))
        raise ValueError(
            f"save_pretrained: these are not the parameters of this model, which differ in {listed(differing, 4)}"
        )
    all_buffers = {**model.buffers, **(buffers or {})}
    return _Given(kinds, packed, {name: b.detach() for name, b in all_buffers.items() if name in state_dict})


# --- what is written where ---


def _plan_files(
    model: Functional, provided: _Given, dtype: torch.dtype | None, largest: int, metadata: Mapping[str, str]
) -> tuple[dict[str, Assembled], _Few, FileLayout]:
    """The sources of each stored tensor, those that stay quantized, and the layout of the files."""
    names = {name: model.names.get(name, name) for name in model.module.state_dict()}
    strange = [name for name, key in names.items() if key not in provided.params and key not in provided.buffers]
    if strange:
        raise CheckpointError(
            f"{type(model.module).__name__} keeps more than parameters and buffers in its state_dict, {strange[0]}: "
            f"load model.state_dict(params) into a whole module on one process, and save the state_dict of that"
        )
    metas = {name: _meta(kind, dtype) for name, kind in provided.params.items()}
    metas |= {name: _meta(TensorType(b.dtype, tuple(b.shape)), None) for name, b in provided.buffers.items()}
    files = {name: lazy(metas[key], key) for name, key in names.items()}
    if conversions.of_transformers(model.module):
        files = _of_transformers(model, {name: x for name, x in files.items() if name in metas}, metas)
    few = _few(model, provided, files, metas) if dtype is None and provided.packed else _Few({}, {})
    kinds = {name: TensorType(x.dtype, x.shape) for name, x in files.items() if name not in few.formats}
    for name, packed in few.formats.items():
        parts = bitsandbytes.file_tensors(name, packed).items()
        kinds |= {part: TensorType(x.dtype, tuple(x.shape)) for part, x in parts}
    prefix = DIFFUSERS if conversions.of_diffusers(model.module) else ""
    return files, few, planned(kinds, largest, metadata, prefix)


class _Few(NamedTuple):
    """Stored tensors that stay quantized.

    Attributes:
        formats: by name, without their bytes.
        settings: what the configuration says of them.
    """

    formats: dict[str, Packed]
    settings: dict[str, Any]


def _few(model: Functional, provided: _Given, files: Mapping[str, Assembled], metas: Mapping[str, Tensor]) -> _Few:
    """Finds the tensors that stay quantized; raises CheckpointError if `from_pretrained` could not read them."""
    formats = dict[str, Packed]()
    try:
        for name, x in files.items():
            origins = {part.origin for part in x.parts} & set(provided.packed)
            if origins and not (len(x.parts) == 1 and _same_places(next(iter(origins)), x, metas)):
                raise ValueError(f"{name}, which contains {listed(sorted(origins), 2)}, is not a full parameter")
            for origin in origins:
                packed = provided.packed[origin]
                formats[name] = packed.having(torch.empty(packed.nbytes, dtype=torch.uint8, device="meta"))
                bitsandbytes.file_tensors(name, formats[name])
    except ValueError as error:
        raise CheckpointError(f"{error}. Pass dtype= to decode the parameters") from None
    linear = [name for name, m in model.module.named_modules() if isinstance(m, nn.Linear)]
    of_transformers = conversions.of_transformers(model.module)
    return _Few(formats, coded.settings(provided.packed, linear) if of_transformers else {})


def _meta(kind: TensorType, dtype: torch.dtype | None) -> Tensor:
    """A meta tensor in place of one that is written, converted to `dtype` if there is one."""
    target_dtype = kind.dtype if dtype is None or not kind.dtype.is_floating_point else dtype
    return torch.empty(kind.shape, dtype=target_dtype, device="meta")


def _of_transformers(
    model: Functional, state: Mapping[str, Assembled], metas: Mapping[str, Tensor]
) -> dict[str, Assembled]:
    """The tensors of the files of a `transformers` model.

    Raises:
        CheckpointError: `from_pretrained` would not find the parameters in them.
    """
    skipped = conversions.not_saved(model.module)
    saved = {name: x for name, x in state.items() if name not in skipped}
    files = conversions.reverted(model.module, saved)
    problem = _problem(model, files, saved, metas)
    if problem and not _problem(model, saved, saved, metas):
        return saved  # from_pretrained also reads the module's own names
    if problem:
        raise CheckpointError(
            f"the files that transformers has for {type(model.module).__name__} cannot be written one stage at a time: "
            f"{problem}. Put model.state_dict(params) into a whole module on one process, and call its save_pretrained"
        )
    return files


def _problem(
    model: Functional, files: Mapping[str, Assembled], state: Mapping[str, Assembled], metas: Mapping[str, Tensor]
) -> str:
    """Why `from_pretrained` would not load these parameters from these files; "" if it would."""
    for name, x in files.items():
        if any(part.origin not in metas for part in x.parts):
            return f"{name} is computed of parameters, not made up of parts of them"
        if problem := flaw(x.shape, [part.box for part in x.parts]):
            return f"{name}: {problem}"
    loaded = conversions.converted(model.module, files, model.module.state_dict())
    if loaded.extra or set(loaded.values) != set(state):
        differing = sorted({*loaded.extra, *(set(loaded.values) ^ set(state))})
        return f"these names would be missing or extra: {listed(differing, 4)}"
    misplaced = [name for name, x in loaded.values.items() if not _same_places(name, x, metas)]
    return f"{misplaced[0]} would have its elements in other places" if misplaced else ""


def _same_places(name: str, x: Assembled, metas: Mapping[str, Tensor]) -> bool:
    """Whether all elements of a tensor have the same places as in the parameter."""
    return x.shape == tuple(metas[name].shape) and all(
        part.origin == name and _geometry(part.values) == _geometry(metas[name][part.box.slices_in(full_box(x.shape))])
        for part in x.parts
    )


def _geometry(x: Tensor) -> tuple[Any, ...]:
    strides = [stride for stride, n in zip(x.stride(), x.shape, strict=True) if n != 1]
    return tuple(x.shape), strides, x.storage_offset()


# --- writing ---


def _targets(files: Mapping[str, Assembled]) -> dict[str, list[tuple[str, AssembledPart]]]:
    """For each parameter, the tensors in files that contain parts of it, and these parts, which are views of it."""
    targets: dict[str, list[tuple[str, AssembledPart]]] = {}
    for name, x in files.items():
        for part in x.parts:
            targets.setdefault(part.origin, []).append((name, part))
    return targets


def _file_portions(
    targets: Mapping[str, list[tuple[str, AssembledPart]]],
    few: _Few,
    packed: Mapping[str, Packed],
    dtype: torch.dtype | None,
    name: str,
    x: Tensor,
) -> Iterator[Elements]:
    """Yields all portions of files that come from a parameter."""
    if name in packed and dtype is not None:
        x = packed[name].having(x).decoded(dtype)
    for target, part in targets.get(name, ()):
        if target in few.formats:
            for key, values in bitsandbytes.file_tensors(target, packed[name].having(x)).items():
                yield key, full_box(values.shape), values
            continue
        x, (box, view, _) = x.contiguous(), part
        strided = x.as_strided(view.shape, view.stride(), x.storage_offset() + view.storage_offset())
        for box_of_portion, portion in pieces(strided, STEP):
            yield target, box_of_portion.translated(box.offsets), portion.to(view.dtype)


def _create_files(
    folder: Path, plan: FileLayout, model: Functional, tokenizer: Any, files: Mapping[str, Assembled], few: _Few
) -> None:
    """Creates the tensor files at full length and writes the other files, all under temporary names."""
    begin(folder, plan)
    new = folder / SETTINGS
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    if conversions.of_transformers(model.module):
        conversions.write_settings(model.module, new)
        floats = [x.dtype for x in files.values() if x.dtype.is_floating_point]
        settings = json.loads((new / CONFIG).read_text())
        settings.pop("quantization_config", None)  # describes the files from which the model was loaded
        if floats:
            settings["dtype"] = str(floats[0]).removeprefix("torch.")
        if few.settings:
            settings["quantization_config"] = few.settings
        (new / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    elif conversions.of_diffusers(model.module):
        settings_of: Any = model.module
        settings_of.save_config(str(new))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(new))
    for file in _files_in(new):
        if OURS.fullmatch(str(file)):
            raise CheckpointError(f"tokenizer= wrote {file}, which is a file of the model's tensors")
        sync(new / file)


def _finish(folder: Path, plan: FileLayout) -> None:
    """Renames all files; at no time are tensors of one model next to the configuration of another."""
    new, config = folder / SETTINGS, folder / CONFIG
    files = sorted(_files_in(new), key=lambda file: str(file) == CONFIG)
    old_config, old_tensors = folders.staging_path(config, "replaced"), _tensor_files(folder)
    same = all((folder / file).exists() and (folder / file).read_bytes() == (new / file).read_bytes() for file in files)
    hidden = config.exists() and (new / CONFIG).exists() and not same
    if hidden:
        os.replace(config, old_config)
        sync(folder)
    try:
        publish(folder, plan)
    except BaseException:
        if hidden and _tensor_files(folder) == old_tensors:
            os.replace(old_config, config)
        raise
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / file, folder / file)
    sync(folder)
    old_config.unlink(missing_ok=True)
    shutil.rmtree(new)


def _tensor_files(folder: Path) -> dict[str, int]:
    """The tensor files of a model in a folder, with inodes, which change if a file is replaced."""
    return {path.name: path.stat().st_ino for path in folder.iterdir() if OURS.fullmatch(path.name)}


def _files_in(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder)
