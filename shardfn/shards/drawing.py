"""The picture of who holds what: the mesh as a grid, and each stage as a strip that its ranks share.

A strip is as wide as the stage's buffer and as high as there are copies of it: blocks side by side are pieces, blocks
one above the other are copies, each in the color of the rank that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shardfn.mesh.grid import Grid
from shardfn.shards.colors import FEW, OTHER, PADDING, colors, over
from shardfn.shards.holdings import Flat, Plain, Section, Stage, along, lives, word
from shardfn.shards.layout import Layout
from shardfn.shards.listing import Page, size, some_of

WIDTH, MARGIN, LEFT, RIGHT = 11.0, 0.35, 2.8, 2.0  # inches, as everything here
PIECES, COPIES = 64, 8  # of a stage that are drawn one by one
DARK, PALE = "#1c2733", "#66727f"
Box = tuple[float, float, float, float]  # left, top, width, height


@dataclass
class Canvas:
    """What is going to be drawn, by kind, because many small things are drawn faster together."""

    texts: list[tuple[float, float, str, dict[str, Any]]] = field(default_factory=list)
    blocks: list[tuple[Box, str, str]] = field(default_factory=list)
    copies: list[Box] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, **how: Any) -> None:
        """Words, whose middle line is at `y`."""
        self.texts.append((x, y, text, {"va": "center", "fontsize": 9.0, "color": DARK, **how}))

    def block(self, box: Box, color: str, edge: str = "white") -> None:
        """A filled rectangle."""
        self.blocks.append((box, color, edge))

    def figure(self, height: float) -> Figure:
        """All of it, so high."""
        figure = Figure(figsize=(WIDTH, height), dpi=100, facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        axes.set_axis_off()
        filled = [Rectangle(box[:2], *box[2:]) for box, _, _ in self.blocks]
        faces, edges = [color for _, color, _ in self.blocks], [edge for _, _, edge in self.blocks]
        axes.add_collection(PatchCollection(filled, facecolor=faces, edgecolor=edges, linewidth=0.5))
        hatched = [Rectangle(box[:2], *box[2:]) for box in self.copies]
        axes.add_collection(
            PatchCollection(hatched, facecolor="none", edgecolor=(1, 1, 1, 0.4), linewidth=0, hatch="////")
        )
        for x, y, text, how in self.texts:
            axes.text(x, y, text, **how)
        return figure


def draw(sections: Sequence[Section]) -> Figure:
    """Every mesh, one below the other."""
    canvas, y = Canvas(), MARGIN
    for section in sections:
        y = _Drawing(section, canvas, colors(section)).all(y) + MARGIN
    return canvas.figure(y)


@dataclass(frozen=True)
class _Drawing:
    section: Section
    canvas: Canvas
    color: dict[int, str]

    def all(self, y: float) -> float:
        """The section below `y`; returns where it ends."""
        rows = [row for stage in self.section.stages for row in _rows(stage)]
        y = max(self.mesh(y), self.sums(y)) + 0.3
        self.headings(y)
        y += 0.24
        height = 0.66 if len(rows) <= 14 else 0.36 if len(rows) <= 28 else 0.26
        most = max((nbytes for _, _, nbytes, _ in rows), default=0)
        for name, one, nbytes, whole in rows:
            self.label(name, one, y, height)
            self.bytes(nbytes, whole, most, y, height)
            strip = (LEFT, y + 0.03, WIDTH - LEFT - RIGHT, (0.38 if height > 0.5 else height - 0.08))
            if isinstance(one, Flat):
                self.strip(one, strip, names=height > 0.5)
            else:
                self.plain(one, strip)
            y += height
        return y

    # --- the mesh, and the sums beside it ---

    def mesh(self, y: float) -> float:
        """The ranks, as they stand."""
        grid = self.section.grid
        if grid is None:
            self.canvas.text(MARGIN, y, "this process", weight="bold", fontsize=11)
            return y + 0.2
        count = len(grid.ranks)
        self.canvas.text(MARGIN, y, f"{grid}: {count:,} rank{'s' * (count > 1)}", weight="bold", fontsize=11)
        columns = grid.sizes[-1][1]
        across, down = some_of(columns, 12), some_of(count // columns, 12)
        cell = 0.42 if max(len(across), len(down)) <= 8 else 0.3
        left, top = MARGIN + self.titles(grid, down, y + 0.57, cell), y + 0.57
        self.canvas.text(left, y + 0.27, f"{grid.sizes[-1][0]} →", fontsize=8, color=PALE)
        for i, column in enumerate(across):
            name = "…" if column is None else str(column)
            self.canvas.text(left + (i + 0.5) * cell, top - 0.1, name, fontsize=7, color=PALE, ha="center")
        for j, row in enumerate(down):
            for i, column in enumerate(across):
                x, y = left + i * cell, top + j * cell
                if row is None or column is None:
                    self.canvas.text(x + cell / 2, y + cell / 2, "…", ha="center", color=PALE)
                else:
                    self.cell(grid.ranks[row * columns + column], x, y, cell)
        return top + len(down) * cell

    def cell(self, rank: int, x: float, y: float, cell: float) -> None:
        """One rank."""
        color = self.color[rank]
        self.canvas.block((x, y, cell, cell), color)
        small = 9.0 if cell > 0.4 else 8.0 if rank < 1000 else 6.5
        self.canvas.text(x + cell / 2, y + cell / 2, str(rank), ha="center", color=over(color), fontsize=small)

    def titles(self, grid: Grid, rows: Sequence[int | None], top: float, cell: float) -> float:
        """Where each row of the mesh is, along the axes that are not its columns; returns the room that this takes."""
        columns = grid.sizes[-1][1]
        titles = []
        for row in rows:
            where = {} if row is None else self.section.places[grid.ranks[row * columns]]
            titles.append("  ".join(f"{name} {where[name]}" for name, _ in grid.sizes[:-1]) if where else "…")
        room = 0.075 * max(map(len, titles)) + 0.1 if len(grid.sizes) > 1 else 0.0
        for j, title in enumerate(titles):
            if room:
                self.canvas.text(MARGIN + room - 0.1, top + (j + 0.5) * cell, title, fontsize=8, color=PALE, ha="right")
        return room

    def sums(self, y: float) -> float:
        """What each rank holds, and what the marks mean, on the right."""
        x, y = 6.2, y
        for line in Page(self.section, self.color, 200).totals():
            (name, _), (text, _) = line
            self.canvas.text(x, y, name, weight="bold", ha="right")
            self.canvas.text(x + 0.05, y, text)
            y += 0.23
        y += 0.1
        marks = [(OTHER, True, "hatched: a copy of what another rank holds"), (PADDING, False, "padding")]
        for color, hatched, text in marks:
            box = (x - 0.5, y - 0.08, 0.4, 0.16)
            self.canvas.block(box, color)
            self.canvas.copies += [box] * hatched
            self.canvas.text(x + 0.05, y, text, fontsize=8, color=PALE)
            y += 0.22
        return y

    # --- stages ---

    def headings(self, y: float) -> None:
        self.canvas.text(MARGIN, y, "stage", fontsize=8, color=PALE)
        self.canvas.text(LEFT, y, "its buffer, and who holds it: pieces side by side, copies above each other",
                         fontsize=8, color=PALE)  # fmt: skip
        self.canvas.text(WIDTH - RIGHT + 0.15, y, "a rank holds", fontsize=8, color=PALE)
        self.canvas.text(WIDTH - MARGIN, y, "the whole", fontsize=8, color=PALE, ha="right")

    def label(self, name: str, one: Flat | Plain, y: float, height: float) -> None:
        """The stage's name, and in some words how it is placed."""
        words = _words(one)
        if height > 0.5:
            self.canvas.text(MARGIN, y + 0.12, _short(name, 30), weight="bold")
            self.canvas.text(MARGIN, y + 0.29, _cut(words, 46), fontsize=7, color=PALE)
            return
        middle = y + (height - 0.02) / 2
        self.canvas.text(MARGIN, middle, _short(name, 18), weight="bold", fontsize=7.5)
        self.canvas.text(LEFT - 0.1, middle, _cut(words, 32), fontsize=6, color=PALE, ha="right")

    def bytes(self, nbytes: int, whole: int, most: int, y: float, height: float) -> None:
        """How much a rank holds of it, beside the stage of which it holds most."""
        middle, x = y + (0.2 if height > 0.5 else (height - 0.02) / 2), WIDTH - RIGHT + 0.15
        small = 8.5 if height > 0.5 else 7.0
        high = 0.2 if height > 0.5 else 0.17
        if nbytes:
            self.canvas.block((x - 0.05, middle - high / 2, 0.8 * nbytes / most, high), "#cfdbe8")
        self.canvas.text(x, middle, size(nbytes), fontsize=small)
        self.canvas.text(WIDTH - MARGIN, middle, size(whole), fontsize=small, color=PALE, ha="right")

    def strip(self, flat: Flat, box: Box, names: bool) -> None:
        """The blocks of a flat shard."""
        layout, (left, top, width, height) = flat.layout, box
        if not flat.piece:
            why = f"the same tensor as {flat.shared}" if flat.shared else "no numbers"
            self.canvas.text(left, top + height / 2, why, fontsize=8, color=PALE)
            return
        groups = self.holders(layout)
        for i, ranks in enumerate(groups):
            for j, rank in enumerate(ranks):
                x, high = left + width * i / len(groups), height / len(ranks)
                self.block(rank, (x, top + j * high, width / len(groups), high), seams=len(groups) == layout.size)
        self.padding(layout, box)
        self.canvas.copies += self.copied(layout, groups[0], box)
        if names:
            self.names(flat, box)

    def block(self, rank: int, box: Box, seams: bool) -> None:
        """What one rank holds, with its number where there is room; without seams, if it stands for others too."""
        x, y, width, height = box
        color = self.color[rank]
        thin = height < 0.06  # white lines would be half of it
        edge = "white" if seams and not thin else color
        self.canvas.block((x, y, width - 0.012 * (thin and seams), height), color, edge)
        small = min(8.0, 62 * height)  # points
        if seams and small > 5 and width > (0.012 * len(str(rank)) + 0.01) * small:
            at = x + 0.07, y + height / 2
            self.canvas.text(*at, str(rank), fontsize=small, color=over(color), weight="bold")

    def holders(self, layout: Layout) -> list[list[int]]:
        """Of each piece that is drawn the ranks that hold it, those of them that are drawn."""
        found: dict[int, list[int]] = {}
        for rank, where in self.section.places.items():
            if lives(layout, where):
                found.setdefault(along(layout.grid, where, layout.placement.axes), []).append(rank)
        drawn = [found[piece] for piece in _spread(layout.size, PIECES)]
        return [[ranks[k] for k in _spread(len(ranks), COPIES)] for ranks in drawn]

    def copied(self, layout: Layout, ranks: Sequence[int], box: Box) -> Iterator[Box]:
        """Where blocks are copies of what the ranks above them hold."""
        left, top, width, height = box
        high = height / len(ranks)
        for number, entry in enumerate(layout.entries):
            x, wide = left + width * entry.offset / layout.padded, width * entry.numel / layout.padded
            for j, rank in enumerate(ranks):
                if entry.numel and any(self.section.places[rank][name] for name in layout.same_axes(number)):
                    yield x, top + j * high, wide, high

    def padding(self, layout: Layout, box: Box) -> None:
        """What no parameter uses, at the end."""
        left, top, width, height = box
        used = width * layout.total / layout.padded
        if width - used > 0.02:
            self.canvas.block((left + used, top, width - used, height), PADDING)

    def names(self, flat: Flat, box: Box) -> None:
        """The parameters, below the strip."""
        left, top, width, height = box
        y = top + height + 0.04
        for number, entry in enumerate(flat.layout.entries):
            x, wide = (width * n / flat.layout.padded for n in (entry.offset, entry.numel))
            self.canvas.block((left + x, y - 0.015, max(wide, 0.02), 0.03), PALE)
            name = flat.name(number)
            if name and len(name) * 0.056 + 0.02 < wide:
                self.canvas.text(left + x + wide / 2, y + 0.085, name, fontsize=7, ha="center", color=PALE)

    def plain(self, one: Plain, box: Box) -> None:
        """A tensor that every rank has of its own."""
        grid = self.section.grid
        self.canvas.block(box, OTHER if grid else FEW[0])
        if grid is not None and len(grid.ranks) > 1 and one.nbytes:
            left, top, width, height = box
            self.canvas.copies.append((left, top + height / 2, width, height / 2))
        self.canvas.text(box[0] + 0.07, box[1] + box[3] / 2, str(list(one.shape)), fontsize=7.5, color="#ffffff")


def _rows(stage: Stage) -> Iterator[tuple[str, Flat | Plain, int, int]]:
    for flat in stage.flats:
        yield stage.name or "(the tree itself)", flat, flat.piece, flat.whole
    for one in stage.plain:
        yield ".".join(filter(None, (stage.name, one.path))) or "(the tree itself)", one, one.nbytes, one.whole


def _words(one: Flat | Plain) -> str:
    """Of a strip what a glance asks for."""
    if isinstance(one, Plain):
        return one.note or f"{one.dtype}, plain"
    layout = one.layout
    axes = [name for name in layout.placement.axes if layout.grid.size(name) > 1]
    words = [word(one.dtype), "whole" if not axes else f"1/{layout.size} over {' x '.join(axes)}"]
    words += ["frozen"] * (not layout.trainable)
    words += ["packed"] * any(map(layout.packed_at, range(len(layout.entries))))
    if layout.size > 1 and layout.trainable and layout.placement.reshard is not True:
        words.append("copy kept")
    return ", ".join(words)


def _spread(count: int, most: int) -> list[int]:
    """So many of the first numbers, evenly, or all of them."""
    return list(range(count)) if count <= most else [math.floor(k * (count - 1) / (most - 1)) for k in range(most)]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"
