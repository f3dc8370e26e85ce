"""Shows which ranks hold which parts of a tree: on a terminal, in a notebook, or as a picture.

It is lines of text; each line consists of words with a style for the terminal.
"""

from __future__ import annotations

import itertools
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from shardfn.compat import process_groups
from shardfn.mesh.grid import Grid
from shardfn.plan.drawing import colors, text_color
from shardfn.plan.holdings import BytesByKind, Flat, MeshSection, Stage, dtype_name, owners, pieces_of, sections
from shardfn.plan.printed import WIDE, Line, Printed, need_matplotlib, save_figure
from shardfn.quoting import byte_count
from shardfn.shards.layout import Layout, Range

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 16  # most ranks that are named; with more, positions along axes are shown instead
PARTS = 4  # most parts of a parameter that are listed one by one
BAR = 16, 44  # least and greatest width of a bar, in columns
KEPT = "\N{NO-BREAK SPACE}"  # joins words that must stay in one line
MOST = 8  # most positions shown along an axis of the mesh
COLUMN, LINE = 0.08, 0.18  # size of a character in inches; whole pixels, as glyphs are rounded to pixels
INK = {"": "#1c2733", "bold": "#1c2733", "dim": "#66727f"}  # colors by style


def show(tree: Any, mesh: DeviceMesh | None = None) -> Shown:
    """Shows which rank holds which elements of which parameter, how each stage is placed, and what memory that takes.

    It reads layouts alone: nothing is sent, moved or copied, so one rank may call it without the others, on a mesh of
    any size, and for tensors on the meta device. Ranks are shown by number if there are at most 16; on larger meshes by
    their positions along the axes that shard a stage. Stages that differ only in their names are shown once.

    Args:
        tree: parameters, gradients or an optimizer's state: flat shards, plain tensors, or both. The tree of a module
            is `interop.functional(module).tree`.
        mesh: for plain tensors, which are taken to be the same on every rank. Default: the mesh of the flat shards,
            else the one in scope, else none, which shows what this process has. Flat shards of several meshes are shown
            mesh by mesh.

    Returns:
        An object that displays itself at a prompt and in a notebook; its `str(...)` is plain text, and
        `.save("params.png")` makes a picture of it.

    Raises:
        ValueError: there is nothing to show, or flat shards are on another mesh than the one passed.
        TypeError: the tree is a module.

    Example:
        ``print(show(params))``, or ``show(opt.init(params)).save("state.svg")``
    """
    return Shown(sections(tree, mesh))


class Shown(Printed):
    """The contents of each rank of a mesh.

    Attributes:
        sections: the contents, mesh by mesh.
    """

    def __init__(self, sections: tuple[MeshSection, ...]) -> None:
        self.sections = sections

    def nbytes(self, rank: int) -> int:
        """Returns the bytes that a rank holds, padding included; a plain tensor counts as it does here."""
        by_section = [section.bytes_by_rank for section in self.sections]
        if not any(rank in section for section in by_section):
            raise ValueError(f"show: rank {rank} is on none of the meshes")
        return sum(sum(section[rank]) for section in by_section if rank in section)

    def _lines(self, width: int) -> Iterator[Line]:
        return lines(self.sections, width)

    def figure(self) -> Figure:
        """Returns the picture, which notebooks can show, too.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
        """
        need_matplotlib("show")
        return _draw_lines(list(lines(self.sections, WIDE)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture, in the format given by the file name's suffix: `.svg`, `.png`, `.pdf`.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
            ValueError: no picture format has this suffix.
        """
        save_figure("show", self.figure(), path)


def _draw_lines(shown: list[Line]) -> Figure:
    """Draws lines as a picture, with each word in the columns that it has on a terminal."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    columns = max(sum(len(text) for text, _ in line) for line in shown)
    figure = Figure(figsize=((columns + 4) * COLUMN, (len(shown) + 2) * LINE), dpi=100, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-2, columns + 2), ylim=(len(shown) + 1, -1))
    axes.set_axis_off()
    font: dict[str, Any] = {"family": "monospace", "fontsize": 72 * COLUMN / 0.602, "parse_math": False}
    for y, line in enumerate(shown):
        x = 0
        for text, style in line:
            color, _, background = style.removesuffix(" underline").partition(" on ")
            if background:
                axes.add_patch(Rectangle((x, y), len(text), 1, facecolor=background, linewidth=0))
            begin, weight = x + len(text) - len(text.lstrip()), "bold" if style == "bold" else "normal"
            if text.strip():
                axes.text(begin, y + 0.75, text.strip(), color=INK.get(color, color), weight=weight, **font)
            x += len(text)
    return figure


def lines(shown: Sequence[MeshSection], width: int) -> Iterator[Line]:
    """Yields all lines."""
    for i, section in enumerate(shown):
        if i:
            yield []
        page = Page(section, colors(section), width)
        yield from page.mesh()
        for run in section.runs:
            yield []
            yield from page.stages(run)
        yield []
        yield from page.totals()


@dataclass(frozen=True)
class Page:
    """One section, formatted to the width of a terminal."""

    section: MeshSection
    color: dict[int, str]
    width: int

    # --- the mesh ---

    def mesh(self) -> Iterator[Line]:
        """Yields the mesh as a grid of its ranks, with this rank underlined."""
        grid = self.section.grid
        if grid is None:
            yield [("no mesh", "bold"), (": what this process has", "")]
            return
        ranks = len(grid.ranks)
        yield [("mesh ", "bold"), (str(grid), "bold"), (f": {ranks} rank{'s' * (ranks > 1)}", "")]
        *outer, (last, columns) = grid.sizes
        cell, names = len(str(max(grid.ranks))) + 2, [name for name, _ in outer]
        rows = list(itertools.product(*(range(size) for _, size in outer)))
        title = ["  " + " ".join(f"{name} {i}" for name, i in zip(names, position, strict=True)) for position in rows]
        left = max(map(len, title)) + 2
        shown = some_of(columns, min(MOST, max(4, (self.width - left) // (cell + 1))))
        yield [(" " * left + last, "dim")]
        yield [(" " * left, ""), *(((f"{'…' if i is None else i:^{cell}} "), "dim") for i in shown)]
        for row in some_of(len(rows), MOST):
            if row is None:
                yield [("  …", "dim")]
                continue
            line: Line = [(f"{title[row]:<{left}}", "dim")]
            for i in shown:
                line += [(f"{'…':^{cell}}", "dim")] if i is None else [self._cell(grid.ranks[row * columns + i], cell)]
                line.append((" ", ""))
            yield line

    def _cell(self, rank: int, cell: int) -> tuple[str, str]:
        underline = " underline" if rank == process_groups.global_rank() else ""
        return f"{rank:^{cell}}", f"{text_color(self.color[rank])} on {self.color[rank]}{underline}"

    # --- stages ---

    def stages(self, run: Sequence[Stage]) -> Iterator[Line]:
        """Yields a run of stages that differ only in their names."""
        first = run[0]
        name = first.name or ("at the top" if any(tensor.path for tensor in first.plain) else "(the tree itself)")
        if len(run) > 1:
            name += f" … {run[-1].name} ({len(run)} alike)"
        for flat in first.flats:
            yield from self._filled(f"{name}: ", shard_text(flat))
            if flat.piece:
                yield from self._flat(flat)
        if first.plain:
            kind = "plain tensors" if len(first.plain) > 1 else "a plain tensor"
            where = " a rank, the same on every rank unless it was made otherwise" if self.section.grid else ""
            nbytes = byte_count(sum(tensor.nbytes for tensor in first.plain))
            yield from self._filled(f"{name}: ", f"{kind}, {nbytes}{where}")
            names = _column([tensor.path or "(itself)" for tensor in first.plain], self.width)
            shapes = _column([str(list(tensor.shape)) for tensor in first.plain], self.width)
            for tensor, path, shape in zip(first.plain, names, shapes, strict=True):
                words = tensor.dtype, byte_count(tensor.nbytes) if tensor.nbytes else "", tensor.note
                yield [(f"  {path}  ", ""), (f"{shape}  ", "dim"), (", ".join(filter(None, words)), "")]

    def _filled(self, name: str, text: str) -> Iterator[Line]:
        head, *more = textwrap.wrap(name.replace(" ", KEPT) + text, self.width, subsequent_indent="    ")
        yield [(head[: len(name)].replace(KEPT, " "), "bold"), (head[len(name) :].replace(KEPT, " "), "")]
        yield from ([(line.replace(KEPT, " "), "")] for line in more)

    def _flat(self, flat: Flat) -> Iterator[Line]:
        layout = flat.layout
        numbers = range(len(layout.entries))
        names = _column([flat.name(i) or "(itself)" for i in numbers], self.width // 4)
        shapes = _column([shape_text(layout, i) for i in numbers], self.width // 3)
        left = 2 + len(names[0]) + 2 + len(shapes[0]) + 2
        bar = max(BAR[0], min(BAR[1], (self.width - left) // 2))
        max_width = max(self.width - left - bar - 3, 24)
        ranks_by_piece = holders(self.section, layout)
        shades = {piece: self.color[owning[0]] for piece, owning in ranks_by_piece.items()}
        yield [(" " * left, ""), *self._pieces(layout, ranks_by_piece, shades, bar)]
        parts_of = owners(layout) if len(layout.grid.ranks) <= NAMED else None
        for i, name, shape in zip(numbers, names, shapes, strict=True):
            descriptions = held_by(layout, i, None if parts_of is None else parts_of[layout.entries[i].path])
            head, *more = _broken(descriptions, max_width)
            yield [(f"  {name}  ", ""), (f"{shape}  ", "dim"), *_stretch(layout, i, shades, bar), (f"  {head}", "")]
            yield from ([(" " * (left + bar + 3) + text, "")] for text in more)

    def _pieces(self, layout: Layout, ranks_by_piece: dict[int, list[int]], shades: dict[int, str], bar: int) -> Line:
        """Returns the buffer as a bar of its pieces, each with the names of its holders."""
        if layout.size * 2 > bar:
            return [(f"│{f'{layout.size} pieces':^{bar - 1}}│", "dim")]
        line: Line = []
        for piece in range(layout.size):
            start, stop = (bar * k // layout.size for k in (piece, piece + 1))
            names_ranks = len(layout.grid.ranks) <= NAMED
            if names_ranks:
                label = ranks_text(ranks_by_piece[piece], layout.grid)
            else:
                label = str(piece) if layout.size > 1 else "every rank"
            label = _truncate(label, stop - start - 1)
            line.append((f"│{label:<{stop - start - 1}}", f"{text_color(shades[piece])} on {shades[piece]}"))
        return [*line, ("│", "dim")]

    # --- totals ---

    def totals(self) -> Iterator[Line]:
        """Yields the total bytes of each rank, and the full size."""
        section = self.section
        kinds: dict[BytesByKind, list[int]] = {}
        for rank, held_bytes in section.bytes_by_rank.items():
            kinds.setdefault(held_bytes, []).append(rank)
        for held_bytes, holder_ranks in itertools.islice(kinds.items(), PARTS):
            amounts = [f"{byte_count(n)} {kind}" for kind, n in held_bytes._asdict().items() if n]
            kind = f" ({', '.join(amounts)})" if len(amounts) > 1 else ""
            yield [(f"{_holders(holder_ranks, section)}: ", "bold"), (f"{byte_count(sum(held_bytes))}{kind}", "")]
        if len(kinds) > PARTS:
            minimum, maximum = min(map(sum, kinds)), max(map(sum, kinds))
            yield [(f"{len(kinds) - PARTS} more kinds of ranks: ", "bold"),
                   (f"{byte_count(minimum)} to {byte_count(maximum)} each", "")]  # fmt: skip
        flats = [flat for flat in section.flats if not flat.shared]
        plain = [x for stage in section.stages for x in stage.plain if not x.note.startswith("the same as")]
        full_bytes = sum(stage.full_bytes for stage in section.stages)
        count = sum(len(flat.layout.entries) for flat in flats)
        count, numel = count + len(plain), sum(flat.numbers for flat in flats) + sum(x.numel for x in plain)
        plural = "s" * (count != 1)
        yield [
            ("the whole: ", "bold"),
            (f"{byte_count(full_bytes)}, {numel:,} numbers in {count} parameter{plural}", ""),
        ]


def _holders(holders: list[int], section: MeshSection) -> str:
    grid = section.grid
    if grid is None:
        return "this process"
    if len(holders) == len(grid.ranks):
        return "each rank" if len(holders) > 1 else f"rank {holders[0]}"
    if len(grid.ranks) <= NAMED:
        return f"rank{'s' * (len(holders) > 1)} {ranks_text(holders, grid)}"
    fixed = {name: {grid.index(rank, name) for rank in holders} for name, n in grid.sizes if n > 1}
    position = ", ".join(f"{name}={min(some)}" for name, some in fixed.items() if len(some) == 1)
    return f"the {len(holders)} ranks{f' at {position}' if position else ''}"


# --- words ---


def shard_text(flat: Flat) -> str:
    """Describes a flat shard: its dtype, and how it is placed."""
    layout, placement = flat.layout, flat.layout.placement
    words = [dtype_name(layout.dtype)]
    if flat.itemsize and flat.dtype != layout.dtype:
        words.append(f"now {dtype_name(flat.dtype)}")
    words.append("trained" if layout.trainable else "frozen")
    if any(map(layout.packed_at, range(len(layout.entries)))):
        words.append("packed in few bits")
    axes = [name for name in placement.axes if layout.grid.size(name) > 1]
    words.append(f"1/{layout.size} over {' x '.join(axes)}" if axes else "whole")
    same = [layout.same_axes(number) for number in range(len(layout.entries))]
    copies = tuple(name for name, n in layout.grid.sizes if n > 1 and all(name in axes for axes in same))
    if layout.grid.size(copies) == len(layout.grid.ranks) > 1:
        words[-1] += " on every rank"
    elif copies:
        words.append(f"the same over {' x '.join(copies)}")
    words += [f"only at {name}={position}" for name, position in placement.only_at]
    if layout.state_layout is not layout and layout.state_layout.size > layout.size:
        words.append(f"gradients and state 1/{layout.state_layout.size} over {' x '.join(placement.gradients)}")
    words += _travels(layout) + [f"{kind} on {'the host' if tier == 'host' else tier}" for kind, tier in zip(
        ("parameters", "gradients", "state"), placement.tiers, strict=True) if tier != "device"]  # fmt: skip
    if flat.shared:
        return ", ".join([*words, f"the same tensor as {flat.shared}"])
    if not flat.itemsize:
        return ", ".join([*words, "no numbers"])
    full_size = f" of {byte_count(flat.full_bytes)}" if flat.layout.size > 1 else ""
    return ", ".join([*words, f"{byte_count(flat.piece)} a rank{full_size}".replace(" ", KEPT)])


def _travels(layout: Layout) -> list[str]:
    """Returns phrases about gathers and reductions: their formats, and the lifetime of gathered copies."""
    placement, words = layout.placement, list[str]()
    reshard = placement.reshard
    if layout.size > 1 and layout.trainable and isinstance(reshard, tuple):
        words.append(f"backward gathers from a copy over {' x '.join(reshard)}")
    elif layout.size > 1 and layout.trainable:
        policies = {"step": "the gathered copy kept for the step", False: "the gathered copy kept for backward"}
        words.append(policies.get(reshard, "gathered again for backward"))
    if layout.size > 1 and placement.gather_format is not None:
        words.append(f"gathered in {placement.gather_format}")
    if placement.reduce_format is not None and layout.trainable:
        words.append(f"gradients travel in {placement.reduce_format}")
    return words


def shape_text(layout: Layout, index: int) -> str:
    """Returns a parameter's full shape, with its spec or its packed format."""
    spec, packed = layout.entries[index].spec, layout.packed_at(index)
    suffix = f" {spec}" if spec.axes else f" {packed.format}" if packed is not None else ""
    return f"{list(layout.meant_shape(index))}{suffix}"


def held_by(layout: Layout, index: int, parts: dict[Range, list[int]] | None) -> list[str]:
    """Describes the holders of a parameter's elements, by rank if `parts` is given, else by position along axes."""
    full_shape, unit = layout.whole_shape(index), "bytes" if layout.packed_at(index) else "elements"
    if parts is not None and len(parts) <= PARTS:
        return [
            f"{ranks_text(owning, layout.grid)}: {region(part, full_shape, unit)}" for part, owning in parts.items()
        ]
    if parts is not None:
        largest = max(part.stop - part.start for part in parts)
        all_holders = sorted(rank for holder_ranks in parts.values() for rank in holder_ranks)
        return [f"{ranks_text(all_holders, layout.grid)}: {len(parts)} parts, up to {largest:,} {unit} each"]
    pieces = pieces_of(layout, index)
    axes = " x ".join(name for name in layout.placement.axes if layout.grid.size(name) > 1) or "every rank"
    if len(pieces) > PARTS:
        return [f"{axes} {pieces[0]} to {pieces[-1]}: up to {layout.piece:,} {unit} each"]
    entry, descriptions = layout.entries[index], []
    for piece in pieces:
        start, stop, _ = layout.element_range(index, piece)
        part = Range(entry.path, start, stop, entry.shape, (0,) * len(entry.shape))
        descriptions.append(f"{f'{axes} {piece}' if layout.size > 1 else axes}: {region(part, entry.shape, unit)}")
    return descriptions


def region(part: Range, full_shape: Sequence[int], unit: str = "elements") -> str:
    """Describes elements of a parameter, as a slice if they are complete rows."""
    numel = math.prod(part.shape)
    if (part.start, part.stop) == (0, numel):
        return _box(part.corner, part.shape, full_shape) or "all"
    row = numel // part.shape[0]
    if part.start % row == 0 and part.stop % row == 0 and unit == "elements":
        first, last = part.start // row, part.stop // row
        return _box((part.corner[0] + first, *part.corner[1:]), (last - first, *part.shape[1:]), full_shape)
    box = _box(part.corner, part.shape, full_shape)
    return f"{unit} {part.start:,}:{part.stop:,}" + f" of {box}" * bool(box)


def _box(corner: Sequence[int], shape: Sequence[int], full_shape: Sequence[int]) -> str:
    """Formats a part of a tensor as Python slices; empty for all of it."""
    dims = zip(corner, shape, full_shape, strict=True)
    slices = [":" if n == total else f"{start}:{start + n}" for start, n, total in dims]
    while slices and slices[-1] == ":":
        slices.pop()
    return f"[{', '.join(slices)}]" if slices else ""


def ranks_text(numbers: Sequence[int], grid: Grid) -> str:
    """Formats numbers of ranks, with neighbors as `0-3`."""
    if len(numbers) == len(grid.ranks) > 1:
        return "every rank"
    runs: list[list[int]] = []
    for rank in numbers:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def holders(section: MeshSection, layout: Layout) -> dict[int, list[int]]:
    """Returns piece -> the ranks that hold it."""
    ranks_of: dict[int, list[int]] = {}
    for rank in sorted(section.ranks):
        if layout.lives_on(rank):
            ranks_of.setdefault(layout.index(rank), []).append(rank)
    return ranks_of


def _stretch(layout: Layout, index: int, shades: dict[int, str], bar: int) -> Line:
    """Returns a bar that shows where in the buffer a parameter lies, in the colors of its holders."""
    entry, padded = layout.entries[index], layout.padded
    start = min(bar * entry.offset // padded, bar - 1)
    stop = max(start + 1, min(math.ceil(bar * (entry.offset + entry.numel) / padded), bar))
    pieces = pieces_of(layout, index)
    middles = ((2 * column + 1) * layout.size // (2 * bar) for column in range(start, stop))
    shown = (shades[min(max(piece, pieces.start), pieces.stop - 1)] for piece in middles)
    mark = "━" if entry.numel else "·"
    line = [(mark * len(list(same_color)), color) for color, same_color in itertools.groupby(shown)]
    return [(" " * start, ""), *line, (" " * (bar - stop + 1), "")]


def some_of(count: int, limit: int) -> list[int | None]:
    """Returns the first indices and the last, with None for those between, if `count` is more than `limit`."""
    return [*range(count)] if count <= limit else [*range(limit - 2), None, count - 1]


def _column(words: Sequence[str], max_width: int) -> list[str]:
    short = [_truncate(text, max_width) for text in words]
    return [f"{text:<{max(map(len, short))}}" for text in short]


def _truncate(text: str, max_width: int) -> str:
    return text if len(text) <= max_width else text[: max(max_width - 1, 0)] + "…"[:max_width]


def _broken(parts: Iterable[str], max_width: int) -> list[str]:
    """Joins parts into lines no wider than `max_width`, without breaking a part."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= max_width:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    return lines or [""]
