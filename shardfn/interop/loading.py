"""Loads parameters, from files or from one rank, into shards, without any rank holding them whole."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.checkpoint.contents import LocalBox, TensorType
from shardfn.checkpoint.matching import Differences, part_with, patterns
from shardfn.checkpoint.team import CheckpointError, RankGroup, team_of
from shardfn.collectives.agree import agree, failing_together
from shardfn.compat import process_groups
from shardfn.interop import coded, conversions
from shardfn.interop.coded import DecodedOnDemand
from shardfn.interop.deferred_init import beginning
from shardfn.interop.functional import Functional, expect_functional
from shardfn.interop.lazy_tensors import Assembled, AssembledPart, Computed, lazy
from shardfn.interop.reading import Source, fingerprint, in_files, tensors_of
from shardfn.mesh import waiting
from shardfn.mesh.axes import axis_of, device_of, grid_of, sizes
from shardfn.mesh.selectors import Which
from shardfn.mesh.spec import dotted, leaves_by_path
from shardfn.quant.formats import Format
from shardfn.quant.packed import Packed, is_packed, pack
from shardfn.quoting import listed
from shardfn.shards.boxes import Box, full_box, steps
from shardfn.shards.layout import Layout, is_flat, local_parameters
from shardfn.shards.placement import Strategy
from shardfn.shards.sharding import Rules, Specs, agreed
from shardfn.tiers import copying
from shardfn.tracebacks import api_boundary

_SOURCE = ("the sources", "src_rank= is the one rank that has the files, and the same number on every rank")
_SEED = ("the seeds", "seed= is the same number on every rank: parameters that begin with random numbers are cut")
_FEW = ("the parameters that model.tree has in few bits", "Every rank quantises the same ones, in the same format")
STEP = 2**23  # bytes that are read or sent at a time
_log = logging.getLogger("shardfn")


@waiting.during("sf.interop.load")
@api_boundary
def load(
    folder: Source | None,
    model: Functional,
    mesh: DeviceMesh,
    strategy: Strategy,
    *,
    src_rank: int | None = None,
    keep_quantized: bool = False,
    frozen: Which | None = None,
    specs: Specs | None = None,
    strict: bool = True,
    ignore: str | Iterable[str] = (),
    seed: int = 0,
) -> Any:
    """Reads a model's parameters into shards; all ranks of the mesh call together.

    Each rank reads only the elements that it keeps, and needs no memory beyond its shards. If a model of `transformers`
    has other names than its files, or one parameter for several tensors in them, the rules of its own `from_pretrained`
    apply; a parameter for which such a rule does more than move elements is whole in memory, one at a time. The files
    of other modules have the names of their `state_dict`. Tied parameters may be in the files once or several times,
    and must then be equal. Floating-point numbers are converted to the dtypes of `model.tree`.

    Parameters of which `model.tree` has a `quant.Packed` are encoded as they are read, one at a time. Parameters that
    files have in 4 bits of bitsandbytes are decoded, one at a time; or kept bit for bit, if `model.tree` has a `Packed`
    of this format, or with `keep_quantized=True`.

    A model of `transformers` gets the folder's `generation_config`, apart from settings that were changed on it before.
    Buffers that belong to the `state_dict`, such as the running statistics of batch norms, are written into
    `model.buffers`.

    Args:
        folder: the path of a folder with `model.safetensors`, `pytorch_model.bin` or an index of several such files; of
            an index; or of one file, also one of `torch.save`. Or a module, a `Functional`, or a mapping with the names
            of the module's `state_dict`. Without `src_rank` it must be the same on all ranks, which is checked.
        model: a `Functional`, whose module may have been built inside `meta`.
        mesh: as for `shardfn.shard`.
        strategy: as for `shardfn.shard`.
        src_rank: a global rank, which alone reads `folder` and sends the values to the others, 8 MB at a time: no rank
            holds more than its shards and these, apart from what that rank has anyway.
        keep_quantized: whether parameters that are quantized in the files stay in them, whatever `model.tree` has: they
            become `quant.Packed`, and are not trained.
        frozen: as for `shardfn.shard`; default: `model.frozen`.
        specs: as for `shardfn.shard`; default: `model.specs`.
        strict: whether the files must hold exactly what the model has. If not, extra tensors are ignored; missing ones
            keep the module's values or, if they are on the device meta, are initialized by their classes
            (`reset_parameters`, `_init_weights`), as are further rows of embeddings and output layers; and the logger
            `shardfn` warns of them. Other shapes are still errors.
        ignore: regular expressions, or one; extra tensors whose whole name matches one are not an error.
        seed: any int, the same on every rank; each initialized parameter draws from a generator seeded by it and its
            name, so that it has the same values on any mesh.

    Returns:
        The parameters, of the structure of `model.tree`.

    Raises:
        CheckpointError: tensors are missing, extra or of another shape, all listed at once; a missing parameter cannot
            be initialized by its classes; files are gone, damaged, or different between ranks; tied parameters differ;
            values would be rounded to few bits twice; or some rank failed. The same on every rank.
        ValueError, TypeError: as `shardfn.shard`.

    Example:
        ``params = load("llama-3-8b", model, mesh, sf.full_shard("shard"))``
    """
    expect_functional("load", model)
    grid, rank = grid_of(mesh), process_groups.global_rank()
    frozen, specs = model.frozen if frozen is None else frozen, model.specs if specs is None else specs
    rules = Rules(mesh, strategy, None, frozen, specs, "global", filled=False)
    _check_arguments(model, src_rank, keep_quantized, seed, mesh, sorted(grid.ranks))
    group, task = team_of([grid]), f"load {folder if in_files(folder) else 'parameters'}"
    reads = src_rank is None or src_rank == rank
    share = (group.rank, group.size) if src_rank is None else (0, 1)
    with torch.no_grad():
        plan = group.run_on_each(
            task,
            lambda: _plan_load(folder, model, keep_quantized, strict, patterns(ignore), seed, share) if reads else None,
        )
        note = _shared_note(plan, group, task)
        tree = _with_packed(model.tree, note.packed)
        params = agreed(rules, "load", lambda: rules.map_stages(tree, rules.cut))
        if src_rank is not None:
            _send(params, model, note, _Sender(plan, mesh, src_rank, group, task))
        elif plan is not None:
            group.run_on_each(task, functools.partial(_fill_params, params, model, plan))
    if note.used is not None:
        conversions.loaded_by(model.module, note.used)
    if note.generation:
        conversions.generate_by(model.module, note.generation)
    return params


def _check_arguments(
    model: Functional, src_rank: Any, keep_quantized: Any, seed: Any, mesh: DeviceMesh, ranks: list[int]
) -> None:
    """Raises ValueError or TypeError on all ranks if an argument is wrong on one, or differs between ranks."""
    if not hasattr(model, "tree"):
        raise ValueError("load: model.tree says which parameters there are, and was deleted: load before that")
    with failing_together([mesh], "load"):
        if src_rank is not None and (type(src_rank) is not int or src_rank not in ranks):
            raise ValueError(f"load: src_rank={src_rank!r} is not a rank of the mesh, whose ranks are {ranks}")
        if type(keep_quantized) is not bool:
            raise TypeError(f"load: keep_quantized must be True or False, got {keep_quantized!r}")
        if type(seed) is not int:
            raise TypeError(f"load: seed must be an int, got {seed!r}")
    agree([f"src_rank={src_rank}"], mesh, "load", subject=_SOURCE)
    agree([f"seed={seed}"], mesh, "load", subject=_SEED)
    few = [f"{name} in {x.meant}" for name, x in leaves_by_path(model.tree, is_packed).items() if is_packed(x)]
    agree(few or ["nothing"], mesh, "load", subject=_FEW)


def _shared_note(plan: _LoadPlan | None, group: RankGroup, task: str) -> _Note:
    """Shares the note of the ranks that read with all ranks.

    Raises:
        CheckpointError: they read different things.
    """
    notes = [note for note in group.gathered(None if plan is None else plan.note, task) if note is not None]
    if any(note != notes[0] for note in notes):
        raise CheckpointError(f"{task}: the files differ between ranks. Pass src_rank=0 to load those of one rank")
    if notes[0].said and group.rank == 0:
        _log.warning("%s, not strict: %s", task, notes[0].said)
    return notes[0]


class _Note(NamedTuple):
    """Facts about a load that all ranks need.

    Attributes:
        buffers: names of the buffers to write.
        used: rules of `transformers` that were applied.
        packed: formats of parameters that stay quantized.
        generation: settings of `transformers` for generating text, which the module gets.
        said: the warning of a load that is not strict.
        fingerprint: of the values and the files.
    """

    buffers: tuple[str, ...]
    used: tuple[int, ...] | None
    packed: dict[str, Format]
    generation: str
    said: str
    fingerprint: tuple[int, int, int]


class _LoadPlan(NamedTuple):
    """The values to read, and their release.

    Attributes:
        values: of parameters and buffers, by the tree's names.
        others: values of tied ones stored under further names, by the tree's names.
        note: for all ranks.
        forget: releases the memory of what was read of files.
    """

    values: dict[str, Assembled]
    others: dict[str, dict[str, Assembled]]
    note: _Note
    forget: Callable[[], None]


# --- what is there ---


def _plan_load(
    folder: Any,
    model: Functional,
    keep_quantized: bool,
    strict: bool,
    ignore: list[re.Pattern[str]],
    seed: int,
    share: tuple[int, int],
) -> _LoadPlan:
    """Finds the values of each parameter and buffer.

    Raises:
        CheckpointError: something is missing, extra, or does not fit.
    """
    (tensors, unsupported, clear_cache, identity), state_dict = tensors_of(folder, share), model.module.state_dict()
    first: dict[int, str] = {}  # name of each buffer, which may have several
    names = {**model.names, **{name: first.setdefault(id(b), name) for name, b in model.buffers.items()}}
    buffers = {names[name]: b for name, b in model.buffers.items() if name in state_dict}
    expected = {**leaves_by_path(model.tree, is_packed), **buffers}
    of_module = {name for name in names if names[name] in expected}
    by_module_name = _named_by_module(folder, model, coded.stored(tensors), of_module)
    values, tied_values = _by_name(coded.upright(by_module_name.values, model.module), names)
    wrong = [f"{name} is {kind}" for name, kind in unsupported.items() if name in expected]
    if wrong:
        raise CheckpointError(f"not a dense tensor there: {listed(wrong, 4)}")
    differences = _differences(values, tied_values, expected)
    extra = [*by_module_name.extra, *unsupported]
    differences.extra = [name for name in extra if not any(rule.fullmatch(name) for rule in ignore)]
    grown = [] if strict else _vocabularies(model, differences, values, expected)
    empty = [name for name, b in model.buffers.items() if b.is_meta and names[name] not in values]
    new = [name for name in differences.missing if expected[name].is_meta and name not in empty]
    stored_formats = coded.quantized_formats(values) if keep_quantized else {}
    expected |= leaves_by_path(_with_packed(model.tree, stored_formats), is_packed)
    packed = {name: x for name, x in expected.items() if isinstance(x, Packed)}
    fatal = Differences(shapes=differences.shapes, kinds=differences.kinds)
    reported = _reported(differences, model) if strict else fatal
    if reported or empty:
        advice = coded.hint(folder) if in_files(folder) else ""
        unknown = [name for name in new if name in reported.missing]
        message = _complaint(reported, unknown, empty, "" if values else part_with(reported.missing, tensors))
        raise CheckpointError(f"{message}. {advice}" if advice else message)
    coded.refuse_twice(values, {name: x.format for name, x in packed.items()})
    begins = [*new, *(name for name in grown if expected[name].is_meta)]
    initial = _initialised(
        model, {name: TensorType(expected[name].dtype, tuple(expected[name].shape)) for name in begins}, seed
    )
    initial |= {name: lazy(expected[name].detach(), "") for name in grown if name not in initial}
    values |= {name: _with_rows(values[name], x) if name in grown else x for name, x in initial.items()}
    values, tied_values = _encoded(values, tied_values, packed)
    kept_here = [name for name in differences.missing if name not in new]
    module_values = {name: packed[name].values if name in packed else expected[name].detach() for name in kept_here}
    values |= {name: lazy(x, name) for name, x in module_values.items()}
    used = set(tensors) - set(by_module_name.extra)
    local = module_values | {name: expected[name].detach() for name in grown if not expected[name].is_meta}
    crc = fingerprint(tensors, used, values=not in_files(folder)), fingerprint(local, local)
    message = "" if strict else _warning(new, kept_here, differences.extra, grown)
    generation = conversions.generation_settings(model.module, Path(folder)) if in_files(folder) else ""
    note = _Note(tuple(buffers), by_module_name.used, stored_formats, generation, message, (*crc, identity))
    clear_cache()
    return _LoadPlan(values, tied_values, note, clear_cache)


def _named_by_module(
    folder: Any, model: Functional, stored: dict[str, Assembled], of_module: set[str]
) -> conversions.Converted:
    """The tensors under the module's names."""
    if in_files(folder) and conversions.of_transformers(model.module):
        return conversions.converted(model.module, stored, of_module)
    extra = [name for name in stored if name not in of_module]
    return conversions.Converted({name: x for name, x in stored.items() if name in of_module}, extra)


def _by_name(
    values: Mapping[str, Assembled], names: Mapping[str, str]
) -> tuple[dict[str, Assembled], dict[str, dict[str, Assembled]]]:
    """One tensor for each parameter, by the tree's name, and separately those under further names of tied ones."""
    values_by_key: dict[str, Assembled] = {}
    tied_values: dict[str, dict[str, Assembled]] = {}
    for name in sorted(values, key=lambda name: names.get(name, name) != name):  # the tree's own names first
        key = names.get(name, name)
        if key in values_by_key:
            tied_values.setdefault(key, {})[name] = values[name]
        else:
            values_by_key[key] = values[name]
    return values_by_key, tied_values


def _differences(
    values: Mapping[str, Assembled], tied_values: Mapping[str, Mapping[str, Assembled]], expected: Mapping[str, Any]
) -> Differences:
    differences = Differences(missing=[name for name in expected if name not in values])
    for key, x in values.items():
        model_type = TensorType(expected[key].dtype, tuple(expected[key].shape))
        for name, stored in {key: x, **tied_values.get(key, {})}.items():
            stored_type = TensorType(stored.dtype, stored.shape)
            if stored_type.shape != model_type.shape:
                differences.shapes[name] = str(stored_type), str(model_type)
                continue
            a, b = stored_type.dtype, model_type.dtype
            floats = a.is_floating_point and b.is_floating_point and a.itemsize > 1  # 8-bit floats come with scales
            if not (a == b or floats or (a.is_complex and b.is_complex)):
                differences.kinds[name] = str(stored_type), str(model_type)
    return differences


def _reported(differ: Differences, model: Functional) -> Differences:
    """The differences without names that `transformers` would not report."""
    if not conversions.of_transformers(model.module):
        return differ
    missing, extra = conversions.not_missed(model.module, differ.missing, differ.extra)
    return replace(
        differ,
        missing=[name for name in differ.missing if name not in missing],
        extra=[name for name in differ.extra if name not in extra],
    )


def _initialised(model: Functional, new: Mapping[str, TensorType], seed: int) -> dict[str, Assembled]:
    """Parameters as their classes initialize them; computed when needed, one at a time."""

    @functools.lru_cache(maxsize=1)
    def content(name: str) -> Assembled:
        return lazy(beginning(model.module, name, new[name].shape, new[name].dtype, seed), "")

    return {
        name: Computed(kind.shape, kind.dtype, functools.partial(content, name), rounded=False)
        for name, kind in new.items()
    }


def _vocabularies(
    model: Functional, differences: Differences, values: Mapping[str, Assembled], expected: Mapping[str, Any]
) -> list[str]:
    """The embeddings and output layers that have more rows than in the files, which are no difference then."""
    owners = conversions.vocabularies(model.module) if differences.shapes else []
    vocabulary_ids = {id(p) for m in owners for p in m._parameters.values()}
    names = {model.names[path] for path, p in model.module.named_parameters() if id(p) in vocabulary_ids}
    grown = [
        name
        for name in differences.shapes
        if name in names
        and not isinstance(expected[name], Packed)
        and values[name].shape[1:] == tuple(expected[name].shape[1:])
        and values[name].shape[0] < expected[name].shape[0]
    ]
    for name in grown:
        del differences.shapes[name]
    return grown


def _with_rows(first: Assembled, initial: Assembled) -> Assembled:
    """The rows of a file, and those of an initial value after them."""
    rows, shape = first.shape[0], initial.shape

    def make() -> Assembled:
        rest = Box((rows, *[0] * (len(shape) - 1)), (shape[0] - rows, *shape[1:]))
        after = [AssembledPart(box, x, "") for box, x in initial.cut(rest)]
        return Assembled(shape, initial.dtype, [*first.parts, *after])

    return Computed(shape, initial.dtype, make, rounded=False)


def _warning(new: Sequence[str], missing: Sequence[str], extra: Sequence[str], grown: Sequence[str]) -> str:
    """The warning of a load that is not strict."""
    groups = (
        (new, "begin as their classes let them begin, and are to be trained before the model is used"),
        (missing, "are missing in the checkpoint, and stay as the module has them"),
        (extra, "are in the checkpoint, but not in the model"),
        (grown, "have more rows than in the checkpoint, and the new ones are to be trained"),
    )
    return "; ".join(f"{listed(names, 8)} {text}" for names, text in groups if names)


def _complaint(differ: Differences, unknown: list[str], empty: list[str], prefix: str) -> str:
    """The message; `prefix` is the common one of all names there, if that is why none was found."""
    sentences = [str(differ)] if differ else []
    if differ.extra:
        sentences.append("ignore= names, by patterns, what is there and is not wanted")
    if unknown:
        sentences.append(
            f"the module has no values for {listed(unknown, 4)} either, as they are on the device meta: with "
            f"strict=False what these files lack begins as its classes let it begin, or is kept if it is built outside "
            f"of interop.meta()"
        )
    if empty:
        sentences.append(
            f"neither these files nor the module have values for the buffers {listed(empty, 4)}: build the module "
            f"under interop.meta(), which leaves buffers their values, and not under torch.device('meta')"
        )
    names = f". All begin with {prefix + '.'!r} there: load a mapping of names without it to tensors" if prefix else ""
    return "; ".join(sentences) + names


def _encoded(
    values: dict[str, Assembled], tied_values: dict[str, dict[str, Assembled]], packed: Mapping[str, Packed]
) -> tuple[dict[str, Assembled], dict[str, dict[str, Assembled]]]:
    """The values, with those that stay quantized as bytes, encoded on demand, one at a time."""

    @functools.lru_cache(maxsize=1)
    def content(x: Assembled, name: str) -> Assembled:
        if isinstance(x, DecodedOnDemand):
            return lazy(x.packed().values, "")
        try:
            encoded = pack(x.joined().to(packed[name].dtype), packed[name].format)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from None
        return lazy(encoded.values, "")

    def instead(x: Assembled, name: str) -> Assembled:
        if name not in packed:
            return x
        return Computed((packed[name].nbytes,), torch.uint8, functools.partial(content, x, name))

    tied = {name: {alias: instead(x, name) for alias, x in aliases.items()} for name, aliases in tied_values.items()}
    return {name: instead(x, name) for name, x in values.items()}, tied


def _with_packed(tree: Any, formats: Mapping[str, Format]) -> Any:
    """The tree with a `Packed` without values in place of each parameter named in `formats`."""

    def instead(accessor: Any, x: Any) -> Any:
        name = dotted(accessor)
        return pack(x.to("meta"), formats[name]) if name in formats and not is_packed(x) else x

    return optree.tree_map_with_accessor(instead, tree, is_leaf=is_packed)


# --- from there to here ---


def _local_boxes(params: Any) -> Iterator[tuple[Layout, dict[str, list[LocalBox]]]]:
    """Yields the boxes of parameters that this rank keeps, one flat shard after another, by parameter."""
    rank = process_groups.global_rank()
    for flat in optree.tree_leaves(params, is_leaf=is_flat):
        views, boxes = local_parameters(flat), dict[str, list[LocalBox]]()
        for part in flat.layout.ranges(rank):
            values, local_boxes = views[part.path], boxes.setdefault(part.path, [])
            for box in steps(full_box(part.shape), STEP // values.element_size(), part.start, part.stop):
                local_boxes.append(
                    LocalBox(part.path, box.translated(part.corner), values[: box.numel].view(box.sizes))
                )
                values = values[box.numel :]
        yield flat.layout, boxes


def _fill_params(params: Any, model: Functional, plan: _LoadPlan) -> None:
    for _, boxes in _local_boxes(params):
        for local in (local for part_boxes in boxes.values() for local in part_boxes):
            _fill_box(plan, local.name, local.box, local.values)
    for name in plan.note.buffers:
        b = _buffer(model, name)
        _fill_box(plan, name, full_box(b.shape), b)


def _fill_box(plan: _LoadPlan, name: str, box: Box, target: Tensor) -> None:
    """Copies a box of a parameter or buffer.

    Raises:
        CheckpointError: it has different values under another of its names.
    """
    with copying.filling(target) as values:
        plan.values[name].fill(box, values)
        for alias, other in plan.others.get(name, {}).items():
            other_values = torch.empty_like(values)
            other.fill(box, other_values)
            if not torch.equal(_as_bytes(other_values), _as_bytes(values)):
                raise CheckpointError(
                    f"{name} and {alias} are one {'buffer' if name in plan.note.buffers else 'parameter'} of the "
                    f"module, but have different values there: make a module in which they are not tied, such as by "
                    f"tie_word_embeddings=False in its configuration"
                )
    plan.forget()


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _buffer(model: Functional, name: str) -> Tensor:
    """A buffer to write to, with memory; copies of buffers on other devices are dropped, since they become outdated."""
    model._elsewhere, b = {}, model.buffers[name]
    if b.is_meta:
        real = torch.empty_like(b, device="cpu")
        model.buffers |= {other: real for other, x in model.buffers.items() if x is b}
    return model.buffers[name]


class _Sender:
    """Broadcasts the values that one rank reads; after an error it continues until the next `compare`."""

    def __init__(self, plan: _LoadPlan | None, mesh: DeviceMesh, source: int, group: RankGroup, task: str) -> None:
        self.plan, self.source, self.team, self.what, self.device = plan, source, group, task, device_of(mesh)
        self.axis = axis_of(mesh, tuple(sizes(mesh)), "load")
        self.failed: Exception | None = None

    def send(self, name: str, box: Box, target: Tensor) -> None:
        """Fills a tensor on all ranks with a box of a parameter."""
        if self.plan is not None and self.failed is None:
            try:
                _fill_box(self.plan, name, box, target)
            except Exception as error:
                self.failed = error
        if self.axis.size > 1:
            with waiting.on("broadcast", self.axis.group, self.what):
                dist.broadcast(_as_bytes(target), src=self.source, group=process_groups.group_of(self.axis.group))

    def compare(self) -> None:
        """Raises CheckpointError on all ranks if sending failed on one."""
        failed, self.failed = self.failed, None

        def learnt() -> None:
            if failed is not None:
                raise failed

        self.team.run_on_each(self.what, learnt)


def _send(params: Any, model: Functional, note: _Note, sender: _Sender) -> None:
    """Sends what one rank reads to all ranks, which keep their parts."""
    for layout, boxes in _local_boxes(params):
        for index, entry in enumerate(layout.entries):
            shape = layout.whole_shape(index)
            limit, row = STEP // layout.dtype.itemsize, math.prod(shape[1:])
            for box in steps(
                full_box(shape), limit - limit % row if 0 < row < limit else limit
            ):  # whole rows, if short
                if box.numel == 0:
                    continue
                values = torch.empty(box.sizes, dtype=layout.dtype, device=sender.device)
                sender.send(entry.path, box, values)
                for local in boxes.get(entry.path, ()):
                    local.copy_from(box, values)
        sender.compare()
    for name in note.buffers:
        b = _buffer(model, name)
        values = torch.empty(b.shape, dtype=b.dtype, device=sender.device)
        sender.send(name, full_box(b.shape), values)
        b.copy_(values)
    sender.compare()
