"""Parameters to the files that `from_pretrained`, or the module itself, reads."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from shardfn.checkpoint import folders
from shardfn.checkpoint.boxes import flaw, whole
from shardfn.checkpoint.contents import Kind, pieces
from shardfn.checkpoint.disk import sync
from shardfn.checkpoint.huggingface import STEP, refuse_options, turns
from shardfn.checkpoint.safetensors import OURS, Elements, Plan, begin, clear, fill, planned, publish
from shardfn.checkpoint.saving import finish
from shardfn.checkpoint.team import CheckpointError, on_each_rank, team_of
from shardfn.interop import coded, conversions
from shardfn.interop.functional import Functional, expect_functional
from shardfn.interop.lazy_tensors import Assembled, Part, lazy
from shardfn.mesh import waiting
from shardfn.mesh.spec import dotted
from shardfn.quant import bitsandbytes
from shardfn.quant.packed import Packed, is_packed
from shardfn.quoting import listed, short_errors
from shardfn.shards.layout import is_flat

SETTINGS = ".settings.writing"  # where other files are until all are whole
CONFIG = "config.json"  # without which `from_pretrained` finds no model


@waiting.during("sf.interop.save_pretrained")
@short_errors
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
    """Writes a model as its own library reads it, on all ranks together, one stage gathered after another.

    Of a model of `transformers` this is what its `save_pretrained` writes: safetensors files, under the names and in
    the form that it has in files, tied parameters once, with its configuration. `from_pretrained` finds nothing missing
    and nothing unexpected there. Before anything is written, what it would make of these files is compared with the
    parameters. Of another module it is `model.safetensors` with all names of its `state_dict`, for
    `module.load_state_dict(safetensors.torch.load_file(...))`.

    Parameters in few bits are written as bitsandbytes has them, and the configuration says so; `dtype` decodes them.

    In addition to its shards a rank needs memory for one stage and 32 MB. An earlier model in the folder stays until
    the new one is all on the disk, as with `checkpoint.export`, and files of other names are left alone. If the process
    dies while the one replaces the other, `from_pretrained` finds no model, rather than the tensors of one with the
    configuration of another: a configuration that changes is away meanwhile, and comes last.

    Args:
        folder: which all ranks see, and which is made if necessary.
        model: what `functional` returned.
        params: of the structure of `model.tree`: flat shards, whole tensors, or both.
        buffers: as the last call of the model returned them; default: `model.buffers`. The first rank's are written.
        tokenizer: whose files belong to the model: anything with a `save_pretrained(folder)`.
        dtype: convert floating-point parameters to this floating-point dtype, and decode those in few bits; None for
            their own. Buffers keep theirs.
        max_shard_bytes: bytes of tensors in a file; one tensor may have more.
        metadata: further strings for the header of each file.

    Raises:
        CheckpointError: what could not be written, or could not be read back; parameters in few bits of which
            `transformers` would know nothing; the same on every rank.
        ValueError: other parameters than the model's; a model that changes buffers, without them.
        TypeError: another dtype; a model that is not a function, or a tokenizer that cannot be saved.

    Example:
        ``save_pretrained("out", model, params, tokenizer=tokenizer)``
    """
    finish()

    def started() -> tuple[Path, _Known]:
        expect_functional("save_pretrained", model)
        refuse_options("save_pretrained", "max_shard_bytes", max_shard_bytes, dtype)
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise TypeError(
                f"save_pretrained: tokenizer={tokenizer!r} has no save_pretrained(folder): pass the tokenizer itself"
            )
        return Path(folder), _known(model, params, buffers)

    path, known = on_each_rank(started)
    grids = [leaf.layout.grid for leaf in optree.tree_leaves(params, is_leaf=is_flat) if is_flat(leaf)]
    team, what = team_of(grids), f"save_pretrained {path}"
    files, few, plan = team.each(what, lambda: _planned(model, known, dtype, max_shard_bytes, metadata or {}))
    if len(set(team.gathered((str(path), zlib.crc32(repr(plan.headers).encode())), what))) > 1:
        raise CheckpointError(f"{what}: ranks were given different paths or parameters")
    try:
        team.first(what, lambda: _begin(path, plan, model, tokenizer, files, few))
        own = known.buffers.items() if team.rank == 0 else ()
        values = itertools.chain(turns(params, known.params, team), own)
        placed = functools.partial(_placed, _targets(files), few, known.packed, dtype)
        team.each(what, lambda: fill(path, plan, values, placed))
        team.first(what, lambda: _finish(path, plan))
    except BaseException:
        if team.rank == 0:
            clear(path)
            shutil.rmtree(path / SETTINGS, ignore_errors=True)
        raise


class _Known(NamedTuple):
    """What there is to be written: kinds of the parameters by the tree's names, in its order, and buffers.

    Of those in few bits it is the kind that they stand for; `packed` has them without their bytes.
    """

    params: dict[str, Kind]
    packed: dict[str, Packed]
    buffers: dict[str, Tensor]


def _known(model: Functional, params: Any, buffers: Mapping[str, Tensor] | None) -> _Known:
    """Raises ValueError for other parameters or buffers, or buffers that were forgotten."""
    model._check(params)
    stated = model.module.state_dict()
    changed = [name for name in model._changing if name in stated]
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
    kinds, packed = dict[str, Kind](), dict[str, Packed]()
    accessors, leaves, _ = optree.tree_flatten_with_accessor(params, is_leaf=lambda x: is_flat(x) or is_packed(x))
    for accessor, leaf in zip(accessors, leaves, strict=True):
        if is_packed(leaf):
            packed[dotted(accessor)] = leaf
        if not is_flat(leaf):
            kinds[dotted(accessor)] = Kind(leaf.dtype, tuple(leaf.shape))
        elif leaf.values is not None:
            for number, entry in enumerate(leaf.layout.entries):
                if (one := leaf.layout.packed_at(number)) is not None:
                    packed[entry.path] = one
                dtype = leaf.values.dtype if one is None else one.dtype
                kinds[entry.path] = Kind(dtype, leaf.layout.meant_shape(number))
    names = set(model.names.values())
    if set(kinds) != names:
        odd = sorted(names ^ set(kinds))
        raise ValueError(
            f"save_pretrained: these are not the parameters of this model, which differ in {listed(odd, 4)}"
        )
    every = {**model.buffers, **(buffers or {})}
    return _Known(kinds, packed, {name: b.detach() for name, b in every.items() if name in stated})


# --- what is written where ---


def _planned(
    model: Functional, known: _Known, dtype: torch.dtype | None, largest: int, metadata: Mapping[str, str]
) -> tuple[dict[str, Assembled], _Few, Plan]:
    """What each tensor of the files is made of, which of them are in few bits, and where they stand."""
    names = {name: model.names.get(name, name) for name in model.module.state_dict()}
    strange = [name for name, key in names.items() if key not in known.params and key not in known.buffers]
    if strange:
        raise CheckpointError(
            f"{type(model.module).__name__} keeps more than parameters and buffers in its state_dict, {strange[0]}: "
            f"load model.state_dict(params) into a whole module on one process, and save the state_dict of that"
        )
    metas = {name: _meta(kind, dtype) for name, kind in known.params.items()}
    metas |= {name: _meta(Kind(b.dtype, tuple(b.shape)), None) for name, b in known.buffers.items()}
    files = {name: lazy(metas[key], key) for name, key in names.items()}
    if conversions.of_transformers(model.module):
        files = _of_transformers(model, {name: x for name, x in files.items() if name in metas}, metas)
    few = _few(model, known, files, metas) if dtype is None and known.packed else _Few({}, {})
    kinds = {name: Kind(x.dtype, x.shape) for name, x in files.items() if name not in few.formats}
    for name, packed in few.formats.items():
        parts = bitsandbytes.tensors(name, packed).items()
        kinds |= {part: Kind(x.dtype, tuple(x.shape)) for part, x in parts}
    return files, few, planned(kinds, largest, metadata)


class _Few(NamedTuple):
    """What stays in few bits: tensors of files, without their bytes, and what the configuration says of them."""

    formats: dict[str, Packed]
    settings: dict[str, Any]


def _few(model: Functional, known: _Known, files: Mapping[str, Assembled], metas: Mapping[str, Tensor]) -> _Few:
    """Raises CheckpointError for parameters of which nothing that reads these files would know."""
    found = dict[str, Packed]()
    try:
        for name, x in files.items():
            origins = {part.origin for part in x.parts} & set(known.packed)
            if origins and not (len(x.parts) == 1 and _same(next(iter(origins)), x, metas)):
                raise ValueError(f"{name}, in which {listed(sorted(origins), 2)} is, is not a whole parameter in files")
            for origin in origins:
                packed = known.packed[origin]
                found[name] = packed.having(torch.empty(packed.nbytes, dtype=torch.uint8, device="meta"))
                bitsandbytes.tensors(name, found[name])
    except ValueError as error:
        raise CheckpointError(f"{error}: pass dtype=, which decodes what is written") from None
    linear = [name for name, m in model.module.named_modules() if isinstance(m, nn.Linear)]
    of_transformers = conversions.of_transformers(model.module)
    return _Few(found, coded.settings(known.packed, linear) if of_transformers else {})


def _meta(kind: Kind, dtype: torch.dtype | None) -> Tensor:
    """Stands for a tensor that is written, in another dtype if there is one."""
    own = kind.dtype if dtype is None or not kind.dtype.is_floating_point else dtype
    return torch.empty(kind.shape, dtype=own, device="meta")


def _of_transformers(
    model: Functional, state: Mapping[str, Assembled], metas: Mapping[str, Tensor]
) -> dict[str, Assembled]:
    """The tensors that its files have.

    Raises:
        CheckpointError: `from_pretrained` would not find the parameters in them.
    """
    skipped = conversions.not_saved(model.module)
    kept = {name: x for name, x in state.items() if name not in skipped}
    files = conversions.reverted(model.module, kept)
    problem = _problem(model, files, kept, metas)
    if problem and not _problem(model, kept, kept, metas):
        return kept  # from_pretrained also reads the module's own names
    if problem:
        raise CheckpointError(
            f"the files that transformers has for {type(model.module).__name__} cannot be written one stage at a time: "
            f"{problem}. Put model.state_dict(params) into a whole module on one process, and call its save_pretrained"
        )
    return files


def _problem(
    model: Functional, files: Mapping[str, Assembled], state: Mapping[str, Assembled], metas: Mapping[str, Tensor]
) -> str:
    """Why these files would not be loaded as these parameters; "" if they would."""
    for name, x in files.items():
        if any(part.origin not in metas for part in x.parts):
            return f"{name} is computed of parameters, not made up of parts of them"
        if why := flaw(x.shape, [part.box for part in x.parts]):
            return f"{name}: {why}"
    found = conversions.converted(model.module, files, model.module.state_dict())
    if found.extra or set(found.values) != set(state):
        odd = sorted({*found.extra, *(set(found.values) ^ set(state))})
        return f"these names would be missing or extra: {listed(odd, 4)}"
    moved = [name for name, x in found.values.items() if not _same(name, x, metas)]
    return f"{moved[0]} would have its elements in other places" if moved else ""


def _same(name: str, x: Assembled, metas: Mapping[str, Tensor]) -> bool:
    """Whether all elements of a tensor stand where they stand in the parameter."""
    return x.shape == tuple(metas[name].shape) and all(
        part.origin == name and _geometry(part.values) == _geometry(metas[name][part.box.within(whole(x.shape))])
        for part in x.parts
    )


def _geometry(x: Tensor) -> tuple[Any, ...]:
    strides = [stride for stride, n in zip(x.stride(), x.shape, strict=True) if n != 1]
    return tuple(x.shape), strides, x.storage_offset()


# --- writing ---


def _targets(files: Mapping[str, Assembled]) -> dict[str, list[tuple[str, Part]]]:
    """Where each parameter is in files: names of tensors, and the parts of these that are views of it."""
    found: dict[str, list[tuple[str, Part]]] = {}
    for name, x in files.items():
        for part in x.parts:
            found.setdefault(part.origin, []).append((name, part))
    return found


def _placed(
    targets: Mapping[str, list[tuple[str, Part]]],
    few: _Few,
    packed: Mapping[str, Packed],
    dtype: torch.dtype | None,
    name: str,
    x: Tensor,
) -> Iterator[Elements]:
    """What a parameter is in files, in all its places."""
    if name in packed and dtype is not None:
        x = packed[name].having(x).decoded(dtype)
    for theirs, part in targets.get(name, ()):
        if theirs in few.formats:
            for key, values in bitsandbytes.tensors(theirs, packed[name].having(x)).items():
                yield key, whole(values.shape), values
            continue
        x, (box, view, _) = x.contiguous(), part
        moved = x.as_strided(view.shape, view.stride(), x.storage_offset() + view.storage_offset())
        for at, some in pieces(moved, STEP):
            yield theirs, at.moved(box.offsets), some.to(view.dtype)


def _begin(
    folder: Path, plan: Plan, model: Functional, tokenizer: Any, files: Mapping[str, Assembled], few: _Few
) -> None:
    """Files of full length for the tensors, and the other files, none of them under its name yet."""
    begin(folder, plan)
    new = folder / SETTINGS
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    if conversions.of_transformers(model.module):
        conversions.write_settings(model.module, new)
        floats = [x.dtype for x in files.values() if x.dtype.is_floating_point]
        _note_dtype(new / CONFIG, floats, few.settings)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(new))
    for file in _files_in(new):
        if OURS.fullmatch(str(file)):
            raise CheckpointError(f"tokenizer= wrote {file}, which is a file of the model's tensors")
        sync(new / file)


def _finish(folder: Path, plan: Plan) -> None:
    """Gives all files their names, at no time the tensors of one model together with the configuration of another."""
    new, there = folder / SETTINGS, folder / CONFIG
    files = sorted(_files_in(new), key=lambda file: str(file) == CONFIG)
    away, before = folders.aside(there, "replaced"), _tensors_in(folder)
    same = all((folder / file).exists() and (folder / file).read_bytes() == (new / file).read_bytes() for file in files)
    hidden = there.exists() and (new / CONFIG).exists() and not same
    if hidden:
        os.replace(there, away)
        sync(folder)
    try:
        publish(folder, plan)
    except BaseException:
        if hidden and _tensors_in(folder) == before:
            os.replace(away, there)
        raise
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / file, folder / file)
    sync(folder)
    away.unlink(missing_ok=True)
    shutil.rmtree(new)


def _tensors_in(folder: Path) -> dict[str, int]:
    """Which files a model has there: names, and what tells a file of this name from another."""
    return {path.name: path.stat().st_ino for path in folder.iterdir() if OURS.fullmatch(path.name)}


def _note_dtype(config: Path, floats: list[torch.dtype], few: dict[str, Any]) -> None:
    """Says in a configuration in which dtype, or few bits, the tensors are, by which `from_pretrained` goes."""
    said = json.loads(config.read_text())
    said.pop("quantization_config", None)  # of the files from which the model was loaded
    if floats:
        said["dtype"] = str(floats[0]).removeprefix("torch.")
    if few:
        said["quantization_config"] = few
    config.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def _files_in(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder)
