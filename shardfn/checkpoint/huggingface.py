"""Exports and imports parameters in Hugging Face's layout: whole tensors in safetensors files, renamed by rules."""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfn.checkpoint import replicas
from shardfn.checkpoint.contents import Contents, TensorType, contents
from shardfn.checkpoint.loading import load_into
from shardfn.checkpoint.matching import LoadRequest, Rule, by_rules, refuse_flat, renamed, turned
from shardfn.checkpoint.safetensors import Elements, FileLayout, begin, clear, fill, planned, publish
from shardfn.checkpoint.saving import wait_for_saves
from shardfn.checkpoint.team import CheckpointError, RankGroup, on_each_rank, team_of
from shardfn.checkpoint.tensor_bytes import pieces
from shardfn.collectives import functional
from shardfn.compat import process_groups
from shardfn.local_paths import local_path
from shardfn.mesh import waiting
from shardfn.mesh.axes import device_of
from shardfn.mesh.scope import mesh_of, scope
from shardfn.quant.packed import Packed
from shardfn.quoting import listed
from shardfn.shards.boxes import full_box
from shardfn.shards.layout import FlatShard, is_flat
from shardfn.shards.pieces import is_unit
from shardfn.tiers.copying import read
from shardfn.tiers.placing import on_mesh_device
from shardfn.tracebacks import api_boundary

STEP = 2**23  # bytes that are gathered or written at a time


@waiting.during("sf.checkpoint.export_hf")
@api_boundary
def export_hf(
    path: str | os.PathLike[str],
    params: Any,
    *,
    names: Iterable[Rule] = (),
    largest: int = 5 * 2**30,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes parameters as safetensors files, which `transformers` reads, on all ranks together.

    Stages are gathered one after another, and the ranks that hold a stage take turns to write its tensors. In addition
    to its shards a rank needs memory for one stage and 32 MB; where `specs` cut parameters, for its part of a stage and
    the largest parameter. Other files in the folder, such as `config.json`, stay.

    When this returns, the model is in the folder, and has replaced an earlier one. If it raises, or a process dies, an
    earlier one is still complete, with one exception: if both consist of the same number of files, more than one, the
    index is missing while the files are replaced, and no model is found in the meantime.

    Args:
        path: of the folder, which all ranks see and which is created if necessary.
        params: a pytree of flat shards and whole tensors, the same on every rank.
        names: rules `(regular expression, template)`: a parameter whose whole name matches the expression gets the name
            that the template makes of the match, by `re.Match.expand`. `(..., ..., "T")` also swaps its last two
            dimensions, as from `[in, out]` to the `[out, in]` of `torch.nn.Linear`. The first rule that matches counts;
            without one, a parameter keeps its name.
        largest: bytes of tensors in a file; a single tensor may have more.
        dtype: floating-point dtype to which floating-point parameters are converted, and quantized ones decoded;
            None keeps their own.
        metadata: further strings for the header of each file.

    Raises:
        CheckpointError: two parameters have the same name, a rule matches nothing, parameters are in few bits and there
            is no dtype, or writing failed. The same on every rank.
        TypeError: the tree holds something other than flat shards and tensors; or `dtype` or `largest` has a wrong
            type.
        ValueError: `largest` is below 1.

    Example:
        ``export_hf("out", params, names=[(r"blocks\\.(\\d+)\\.q", r"layers.\\1.q_proj.weight", "T")])``
    """
    wait_for_saves()

    def started() -> tuple[Path, Contents]:
        refuse_options("export_hf", "largest", largest, dtype)
        return local_path(path, "checkpoint.export_hf: path"), contents(params, shared=False)

    folder, tree = on_each_rank(started)
    group, task = team_of(tree.grids), f"export_hf {folder}"

    def planning() -> tuple[dict[str, _Target], FileLayout]:
        _only_tensors(params, tree)
        targets = _file_targets(tree, names, dtype)
        return targets, planned({target.name: target.kind for target in targets.values()}, largest, metadata or {})

    targets, plan = group.run_on_each(task, planning)
    refuse_different(group, task, tree, (str(folder), repr(plan.headers)))
    try:
        group.first(task, lambda: begin(folder, plan))
        group.run_on_each(
            task, lambda: fill(folder, plan, turns(params, targets, group), functools.partial(_file_portions, targets))
        )
        group.first(task, lambda: publish(folder, plan))
    except BaseException:
        if group.rank == 0:
            clear(folder)
        raise


@waiting.during("sf.checkpoint.import_hf")
@api_boundary
def import_hf(
    path: str | os.PathLike[str],
    like: Any,
    *,
    names: Iterable[Rule] = (),
    strict: bool = True,
    ignore: str | Iterable[str] = (),
) -> Any:
    """Reads safetensors files into a tree of any placement, overwriting it, on all ranks together.

    It is `load` for parameters alone, whose dtypes may differ: they are converted silently, whatever `strict` is. Each
    rank reads the parts that it holds, one after another. These files have no checksums: truncated or inconsistent
    files are detected, a flipped bit is not.

    Args:
        path: of a folder with `model.safetensors` or an index of several files, of such an index, or of a file; or of
            anything else that `load` takes.
        like: a pytree of flat shards and tensors, into which the values are written.
        names: rules from our names to those in the files, as for `export_hf`.
        strict: whether the files must hold exactly the tensors of the tree. If not, what is missing keeps its values in
            `like`, what is extra is ignored, and both are logged by the logger `shardfn`; different shapes are still
            errors.
        ignore: regular expressions, or one; tensors in the files whose whole name matches one are ignored.

    Returns:
        `like`.

    Raises:
        CheckpointError: tensors are missing, extra or of another shape, all listed at once; rules do not fit; a file is
            gone, damaged, or lacks tensors of the index. The same on every rank. If damage is found while reading,
            `like` may have been overwritten in part.
        TypeError: the tree holds something other than flat shards and tensors.

    Example:
        ``import_hf("llama", params, names=[(r"blocks\\.(\\d+)\\.q", r"layers.\\1.q_proj.weight", "T")])``
    """
    wait_for_saves()
    request = LoadRequest("", by_rules(names), strict, ignore, converts=True)
    load_into(f"import_hf {path}", path, like, request, True, check=lambda flat_tree: _only_tensors(like, flat_tree))
    return like


def refuse_different(group: RankGroup, task: str, flat_tree: Contents, request: tuple[str, str]) -> None:
    """Raises CheckpointError on every rank if ranks ask for different things, or hold different copies of a value."""
    local_digests = replicas.digests(flat_tree, plain=True)
    local_summary = zlib.crc32(repr(request).encode()), replicas.summary(local_digests)
    asks, places = zip(*group.gathered(local_summary, task), strict=True)
    if len(set(asks)) > 1:
        raise CheckpointError(f"{task}: ranks were given different paths, trees or rules")
    if wrong := replicas.differing(local_digests, places, group):
        raise CheckpointError(f"{task}: {replicas.advice(wrong, 'keep each by checkpoint.save of ByRank(value)')}")


def refuse_options(caller: str, name: str, largest: Any, dtype: Any) -> None:
    """Raises TypeError or ValueError if `dtype` or the number of bytes, an option called `name`, is wrong."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{caller}: dtype={dtype!r}; pass a floating-point dtype, or None to keep the parameters'")
    if type(largest) is not int:
        raise TypeError(f"{caller}: {name}={largest!r}; pass a whole number of bytes, such as 5 * 2**30")
    if largest < 1:
        raise ValueError(f"{caller}: {name}={largest}; pass at least 1 byte")


# --- names ---


@dataclass(frozen=True)
class _Target:
    """The form of a parameter in the file.

    Attributes:
        name: in the file.
        kind: its dtype and shape in the file.
        turned: whether its last two dimensions are swapped.
        packed: for a quantized parameter, its format, without the bytes.
    """

    name: str
    kind: TensorType
    turned: bool
    packed: Packed | None


def _file_targets(contents: Contents, rules: Iterable[Rule], dtype: torch.dtype | None) -> dict[str, _Target]:
    """The form of each parameter in the files, by its name in the tree.

    Raises:
        CheckpointError: one is quantized and there is no dtype, since these files cannot describe the format.
    """
    few = {name: packed for name, packed in contents.packed.items() if name in contents.tensors}
    tensors = contents.tensors | {name: TensorType(packed.dtype, packed.shape) for name, packed in few.items()}
    if few and dtype is None:
        raise CheckpointError(
            f"{listed(few, 4)} {'is' if len(few) == 1 else 'are'} quantized, such as by "
            f"{next(iter(few.values())).format}, which these files cannot describe. Pass dtype=, such as "
            f"torch.bfloat16, to decode them, or write them by interop.save_pretrained"
        )
    targets: dict[str, _Target] = {}
    for name, (new_name, swap) in renamed(tensors, rules).items():
        kind = tensors[name]
        if swap:
            refuse_flat(name, kind)
        target_dtype = dtype if dtype is not None and kind.dtype.is_floating_point else kind.dtype
        targets[name] = _Target(new_name, TensorType(target_dtype, turned(kind.shape, swap)), swap, few.get(name))
    return targets


def _only_tensors(tree: Any, flat_tree: Contents) -> None:
    """Raises TypeError for anything but flat shards and tensors."""
    wrong = [*flat_tree.numbers, *flat_tree.by_rank]
    wrong += [repr(leaf) for leaf in optree.tree_leaves(tree, is_leaf=is_unit) if is_unit(leaf) and not is_flat(leaf)]
    if wrong:
        raise TypeError(f"Hugging Face files hold only flat shards and tensors that ranks share, got {wrong}")


# --- writing ---


def turns(params: Any, names: Iterable[str], group: RankGroup) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors that this rank writes, by name; all ranks of a stage take part in gathering it.

    Args:
        params: a tree of flat shards and whole tensors.
        names: of all its parameters, in the tree's order.
        group: the ranks that take turns.
    """
    rest = iter(names)
    for index, leaf in enumerate(optree.tree_leaves(params, is_leaf=is_unit)):
        if isinstance(leaf, Tensor):
            name = next(rest)
            if index % group.size == group.rank:
                yield name, read(leaf.detach())
        elif leaf.values is not None:
            yield from _gather_stage(leaf, list(itertools.islice(rest, len(leaf.layout.entries))), index)
    assert next(rest, None) is None, "names stand in the order of the leaves"


def _gather_stage(flat: FlatShard, names: list[str], number: int) -> Iterator[tuple[str, Tensor]]:
    """Gathers a stage, on the ranks that hold one copy of it; yields views of the parameters of this rank's turns."""
    layout, rank = flat.layout, process_groups.global_rank()
    cut = {*layout.placement.axes, *(axis for entry in layout.entries for axis in entry.spec.axes)}
    holders = tuple(name for name, _ in layout.grid.sizes if name in cut)
    copies = tuple(name for name, _ in layout.grid.sizes if name not in {*cut, *layout.placement.only_at_axes})
    if not layout.lives_on(rank) or layout.grid.index(rank, copies) != number % layout.grid.size(copies):
        return
    mesh = mesh_of(layout.grid, f"export_hf: stage {layout.stage!r}")
    with scope(mesh):
        buffer = _gather_portions(flat.values.detach(), layout.placement.axes, 0, layout.size, mesh)
        for turn, (name, entry, view) in enumerate(zip(names, layout.entries, layout.views(buffer), strict=True)):
            for dim, axes in enumerate(entry.spec.by_dim()):
                view = _gather_portions(view, axes, dim, layout.grid.size(axes), mesh)
            if layout.grid.index(rank, holders) == (number + turn) % layout.grid.size(holders):
                yield name, view


def _gather_portions(piece: Tensor, axes: tuple[str, ...], dim: int, size: int, mesh: DeviceMesh) -> Tensor:
    """As `all_gather` along a dimension, but in portions, since gloo holds a second copy of what it gathers."""
    if size == 1:
        return on_mesh_device(piece, mesh)
    n = piece.shape[dim]
    joined = torch.empty(
        *piece.shape[:dim], n * size, *piece.shape[dim + 1 :], dtype=piece.dtype, device=device_of(mesh)
    )
    for box, portion in pieces(piece, STEP // size):
        portion = on_mesh_device(portion, mesh)
        for i, part in enumerate(functional.all_gather(portion[None], axes, to="invariant")):
            joined.narrow(dim, i * n, n)[box.slices_in(full_box(piece.shape))] = part
    return joined


def _file_portions(targets: dict[str, _Target], name: str, values: Tensor) -> Iterator[Elements]:
    """Yields a parameter in portions, in the form that it has in the file."""
    target = targets[name]
    x = values if target.packed is None else target.packed.having(values).decoded(target.kind.dtype)
    for box, portion in pieces(x.mT if target.turned else x, STEP):
        yield target.name, box, portion.to(target.kind.dtype)
