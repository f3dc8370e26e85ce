"""Parameters to and from Hugging Face's layout: whole tensors in safetensors files, under others' names."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.checkpoint.boxes import Box, Ints, whole
from shardfn.checkpoint.contents import Contents, Kind, LocalBox, contents, memory, pieces
from shardfn.checkpoint.disk import write_at
from shardfn.checkpoint.loading import Differences, patterns
from shardfn.checkpoint.safetensors import Plan, Stored, aside, begin, clear, opened, planned, publish, stored_in
from shardfn.checkpoint.saving import finish
from shardfn.checkpoint.team import CheckpointError, Team, on_each_rank, team_of
from shardfn.collectives import functional
from shardfn.compat import process_groups
from shardfn.mesh import waiting
from shardfn.mesh.scope import mesh_of, scope
from shardfn.shards.layout import FlatShard, is_flat
from shardfn.shards.pieces import is_unit

Rule = tuple[str, str] | tuple[str, str, str]
STEP = 2**23  # bytes that are gathered or written at a time
_Parsed = tuple[re.Pattern[str], str, bool]
_log = logging.getLogger("shardfn")


@waiting.during("sf.checkpoint.export")
def export(
    path: str | os.PathLike[str],
    params: Any,
    *,
    names: Iterable[Rule] = (),
    largest: int = 5 * 2**30,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes parameters as safetensors files, which `transformers` reads, on all ranks together.

    One stage is gathered after another, and the ranks that hold it take turns to write its tensors. In addition to its
    shards a rank needs memory for one stage and 32 MB; where `specs` cut parameters, for its part of a stage and the
    largest parameter. Other files in the folder, such as `config.json`, stay.

    The model is in the folder when this returns, in place of an earlier one. If it raises, or a process dies, an
    earlier one is whole still; but where both consist of equally many files, and more than one, it loses its index
    while these are replaced, and no model is found in the meantime.

    Args:
        path: of the folder, which all ranks see and which is made if necessary.
        params: a pytree of flat shards and whole tensors, the same on every rank.
        names: rules `(regular expression, template)`: a parameter whose whole name matches the first is called what
            the second makes of it, by `re.Match.expand`. `(..., ..., "T")` also swaps its last two dimensions, as from
            `[in, out]` to the `[out, in]` of `torch.nn.Linear`. The first rule that matches counts; without one, a
            parameter keeps its name.
        largest: bytes of tensors in a file; one tensor may have more.
        dtype: convert floating-point parameters to this floating-point dtype; None for their own.
        metadata: further strings for the header of each file.

    Raises:
        CheckpointError: two parameters of one name, a rule that matches nothing, what could not be written. The same
            on every rank.
        TypeError: the tree holds something other than flat shards and tensors; another dtype.

    Example:
        ``export("out", params, names=[(r"blocks\\.(\\d+)\\.q", r"layers.\\1.q_proj.weight", "T")])``
    """
    finish()
    found = on_each_rank(lambda: contents(params, shared=False))
    team, folder = team_of(found.grids), Path(path)
    what = f"export {folder}"

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"export: dtype={dtype!r}; it is a floating-point dtype, or None for the parameters' own")

    def planning() -> tuple[dict[str, _Kept], Plan]:
        _only_tensors(params, found)
        kept = _kept(found.tensors, list(names), dtype)
        return kept, planned({one.name: one.kind for one in kept.values()}, largest, metadata or {})

    kept, plan = team.each(what, planning)
    if len(set(team.gathered((str(folder), zlib.crc32(repr(plan.headers).encode())), what))) > 1:
        raise CheckpointError(f"{what}: ranks were given different paths, trees or rules")
    try:
        team.first(what, lambda: begin(folder, plan))
        team.each(what, lambda: _fill(folder, plan, kept, turns(params, kept, team)))
        team.first(what, lambda: publish(folder, plan))
    except BaseException:
        if team.rank == 0:
            clear(folder)
        raise


@waiting.during("sf.checkpoint.import_")
def import_(
    path: str | os.PathLike[str],
    like: Any,
    *,
    names: Iterable[Rule] = (),
    strict: bool = True,
    ignore: str | Iterable[str] = (),
) -> Any:
    """Reads safetensors files into a tree of any placement, which it overwrites, on all ranks together.

    Each rank reads the parts that it holds, one after another. Other dtypes are converted silently, whatever `strict`
    is. These files have no checksums: what is cut short or does not fit is found, a changed bit is not.

    Args:
        path: of a folder with `model.safetensors` or an index of several files, of such an index, or of a file.
        like: a pytree of flat shards and tensors, into which the values are written.
        names: rules from our names to those in the files, as for `export`.
        strict: whether the files must hold just what the tree does. If not, what is missing stays as it is in `like`,
            what is extra is ignored, and the log of `shardfn` says so; other shapes are still errors.
        ignore: regular expressions, or one; tensors in the files whose whole name matches one are not wanted.

    Returns:
        `like`.

    Raises:
        CheckpointError: what is missing, extra or of another shape, all at once; rules that do not fit; a file that is
            gone, damaged, or lacks what the index says. The same on every rank. If damage is found on the way, `like`
            may have been overwritten in part.
        TypeError: the tree holds something other than flat shards and tensors.

    Example:
        ``import_("llama", params, names=[(r"blocks\\.(\\d+)\\.q", r"layers.\\1.q_proj.weight", "T")])``
    """
    finish()
    wanted = on_each_rank(lambda: contents(like, shared=False))
    team, path = team_of(wanted.grids), Path(path)
    what = f"import_ {path}"

    def compared() -> tuple[dict[str, _Kept], dict[str, Stored], Differences]:
        _only_tensors(like, wanted)
        kept, stored = _kept(wanted.tensors, list(names)), stored_in(path)
        differ = _compared(kept, stored, patterns(ignore))
        if differ.shapes or (strict and differ):
            raise CheckpointError(str(differ))
        return kept, stored, differ

    kept, stored, differ = team.each(what, compared)
    if differ and team.rank == 0:
        _log.warning("%s, not strict: %s", what, differ)
    team.each(what, lambda: _read(wanted, kept, stored))
    return like


# --- names ---


@dataclass(frozen=True)
class _Kept:
    """How a parameter is kept: under which name, as what, and whether its last two dimensions are swapped."""

    name: str
    kind: Kind
    turned: bool


def _kept(tensors: dict[str, Kind], rules: Sequence[Rule], dtype: torch.dtype | None = None) -> dict[str, _Kept]:
    """How each of our parameters is kept."""
    parsed = _parsed(rules, tensors)
    found: dict[str, _Kept] = {}
    owners: dict[str, str] = {}
    for name, kind in tensors.items():
        theirs, turned = _renamed(name, parsed)
        if turned and len(kind.shape) < 2:
            raise CheckpointError(f'a rule with "T" matches {name}, but of {kind} there are no two dimensions to swap')
        if theirs in owners:
            raise CheckpointError(f"{owners[theirs]} and {name} are both {theirs!r} there: each needs its own name")
        owners[theirs] = name
        there = dtype if dtype is not None and kind.dtype.is_floating_point else kind.dtype
        found[name] = _Kept(theirs, Kind(there, _turned(kind.shape, turned)), turned)
    return found


def _parsed(rules: Sequence[Rule], names: dict[str, Kind]) -> list[_Parsed]:
    """The rules, each of which must match something."""
    for rule in rules:
        if isinstance(rule, str) or len(rule) not in (2, 3) or tuple(rule[2:]) not in ((), ("T",)):
            raise CheckpointError(f'a rule is (regular expression, template), or these and "T", not {rule!r}')
    parsed = [(re.compile(rule[0]), rule[1], len(rule) == 3) for rule in rules]
    idle = [repr(pattern.pattern) for pattern, *_ in parsed if not any(map(pattern.fullmatch, names))]
    if idle:
        some = [*itertools.islice(names, 8)]
        raise CheckpointError(f"no parameter matches {', '.join(idle)}; the first of them are {', '.join(some)}")
    return parsed


def _renamed(name: str, rules: list[_Parsed]) -> tuple[str, bool]:
    """By the first rule that matches: the name there, and whether dimensions are swapped."""
    for pattern, template, turned in rules:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(template), turned
    return name, False


def _turned(numbers: Ints, turned: bool) -> Ints:
    return (*numbers[:-2], numbers[-1], numbers[-2]) if turned else numbers


def _only_tensors(tree: Any, found: Contents) -> None:
    """Raises TypeError for anything but flat shards and tensors."""
    wrong = [*found.numbers, *found.by_rank]
    wrong += [repr(leaf) for leaf in optree.tree_leaves(tree, is_leaf=is_unit) if is_unit(leaf) and not is_flat(leaf)]
    if wrong:
        raise TypeError(f"these files hold flat shards and tensors alone, the same on all ranks, not {wrong}")


# --- writing ---


def turns(params: Any, names: Iterable[str], team: Team) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors that this rank writes, by our names; on the way it gathers with others what they write.

    Args:
        params: a tree of flat shards and whole tensors.
        names: of all of them, in the tree's order.
        team: the ranks that take turns.
    """
    rest = iter(names)
    for number, leaf in enumerate(optree.tree_leaves(params, is_leaf=is_unit)):
        if isinstance(leaf, Tensor):
            name = next(rest)
            if number % team.size == team.rank:
                yield name, leaf.detach()
        elif leaf.values is not None:
            yield from _gathered(leaf, list(itertools.islice(rest, len(leaf.layout.entries))), number)
    assert next(rest, None) is None, "names stand in the order of the leaves"


def _gathered(flat: FlatShard, names: list[str], number: int) -> Iterator[tuple[str, Tensor]]:
    """As `unshard`, but views, and only on ranks that hold one copy between them: each its turn's parameters."""
    layout, rank = flat.layout, process_groups.global_rank()
    cut = {*layout.placement.axes, *(axis for entry in layout.entries for axis in entry.spec.axes)}
    holders = tuple(name for name, _ in layout.grid.sizes if name in cut)
    copies = tuple(name for name, _ in layout.grid.sizes if name not in {*cut, *layout.placement.only_at_axes})
    if not layout.here(rank) or layout.grid.index(rank, copies) != number % layout.grid.size(copies):
        return
    with scope(mesh_of(layout.grid, f"export: stage {layout.stage!r}")):
        buffer = _joined(flat.values.detach(), layout.placement.axes, 0, layout.size)
        for turn, (name, entry, view) in enumerate(zip(names, layout.entries, layout.views(buffer), strict=True)):
            for dim, axes in enumerate(entry.spec.by_dim()):
                view = _joined(view, axes, dim, layout.grid.size(axes))
            if layout.grid.index(rank, holders) == (number + turn) % layout.grid.size(holders):
                yield name, view


def _joined(piece: Tensor, axes: tuple[str, ...], dim: int, size: int) -> Tensor:
    """As `all_gather`, but little by little: gloo has a second copy of what it gathers at a time."""
    if size == 1:
        return piece
    n = piece.shape[dim]
    joined = piece.new_empty(*piece.shape[:dim], n * size, *piece.shape[dim + 1 :])
    for box, some in pieces(piece, STEP // size):
        for i, part in enumerate(functional.all_gather(some[None], axes, to="invariant")):
            joined.narrow(dim, i * n, n)[box.within(whole(piece.shape))] = part
    return joined


def _fill(folder: Path, plan: Plan, kept: dict[str, _Kept], turns: Iterable[tuple[str, Tensor]]) -> None:
    """Writes this rank's tensors; returns when they are on the disk."""
    failed: Exception | None = None
    descriptors: dict[str, int] = {}
    with contextlib.ExitStack() as stack, torch.no_grad():
        for name, values in turns:
            try:
                if failed is None:  # else the others still gather
                    file, offset = plan.places[kept[name].name]
                    if file not in descriptors:
                        descriptors[file] = os.open(aside(folder, file), os.O_WRONLY)
                        stack.callback(os.close, descriptors[file])
                    _write(descriptors[file], offset, values.mT if kept[name].turned else values, kept[name].kind.dtype)
            except Exception as error:
                failed = error
            del values  # what it is a view of must not be there while more is gathered
        if failed is not None:
            raise failed
        for descriptor in descriptors.values():
            os.fsync(descriptor)


def _write(descriptor: int, offset: int, values: Tensor, dtype: torch.dtype) -> None:
    for _, some in pieces(values, STEP):
        content = memory(some.to(dtype))
        write_at(descriptor, content, offset)
        offset += len(content)


# --- reading ---


def _compared(kept: dict[str, _Kept], stored: dict[str, Stored], ignore: list[re.Pattern[str]]) -> Differences:
    differ = Differences()
    for name, one in kept.items():
        said = name if name == one.name else f"{one.name} (here {name})"
        theirs = stored.get(one.name)
        if theirs is None:
            differ.missing.append(said)
        elif theirs.shape != one.kind.shape:
            turned = " when its last two dimensions are swapped" if one.turned else ""
            differ.shapes[said] = str(theirs), f"{one.kind}{turned}"
    known = {one.name for one in kept.values()}
    differ.extra = [name for name in stored if name not in known and not any(rule.fullmatch(name) for rule in ignore)]
    return differ


def _read(wanted: Contents, kept: dict[str, _Kept], stored: dict[str, Stored]) -> None:
    """Fills what this rank holds, one file after another."""
    plain = (LocalBox(name, *piece) for name, x in wanted.plain.items() for piece in pieces(x, STEP))
    by_file: dict[Path, list[LocalBox]] = {}
    for local in (*wanted.boxes, *plain):
        if kept[local.name].name in stored and local.values.numel():
            by_file.setdefault(stored[kept[local.name].name].file, []).append(local)
    for file, some in by_file.items():
        with opened(file) as source, torch.no_grad():
            for local in some:
                one = kept[local.name]
                try:
                    local.values.copy_(_values(source, one, local.box))
                except Exception as error:  # a damaged file raises almost anything
                    raise CheckpointError(f"{file}: {one.name} cannot be read: {error}") from error


def _values(source: Any, one: _Kept, box: Box) -> Tensor:
    """A box of ours, of which the file is not copied."""
    there = Box(_turned(box.offsets, one.turned), _turned(box.sizes, one.turned))
    values: Tensor = source.get_slice(one.name)[there.within(whole(one.kind.shape))]
    return values.mT if one.turned else values
