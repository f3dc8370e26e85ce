"""Shows who holds what of a tree on a mesh: on a terminal, in a notebook, or as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardfn.plans import holdings, page
from shardfn.plans.page import Line
from shardfn.plans.printed import WIDE, Printed, need_matplotlib, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.distributed.device_mesh import DeviceMesh


def show(tree: Any, mesh: DeviceMesh | None = None) -> Shown:
    """Shows which rank holds which elements of which parameter, how each stage is placed, and what memory that takes.

    It reads layouts alone: nothing is sent, moved or copied, so one rank may call it without the others, on a mesh of
    any size, and for tensors on the meta device. Ranks are shown by number if there are at most 16; on larger meshes by
    their positions along the axes that cut a stage. Stages that differ only in their names are shown once.

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
    return Shown(holdings.sections(tree, mesh))


class Shown(Printed):
    """Who holds what.

    Attributes:
        sections: the contents, mesh by mesh.
    """

    def __init__(self, sections: tuple[holdings.Section, ...]) -> None:
        self.sections = sections

    def nbytes(self, rank: int) -> int:
        """Returns the bytes that a rank holds, padding included; a plain tensor counts as it does here."""
        held = [section.held for section in self.sections]
        if not any(rank in section for section in held):
            raise ValueError(f"show: rank {rank} is on none of the meshes")
        return sum(sum(section[rank]) for section in held if rank in section)

    def _lines(self, width: int) -> Iterator[Line]:
        return page.lines(self.sections, width)

    def figure(self) -> Figure:
        """Returns the picture, which notebooks can show, too.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
        """
        need_matplotlib("show")
        return _drawn(list(page.lines(self.sections, WIDE)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture, in the format given by the file name's suffix: `.svg`, `.png`, `.pdf`.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
            ValueError: no picture format has this suffix.
        """
        save_figure("show", self.figure(), path)


COLUMN, LINE = 0.08, 0.18  # size of a character in inches; whole pixels, as glyphs are rounded to pixels
INK = {"": "#1c2733", "bold": "#1c2733", "dim": "#66727f"}  # colors by style


def _drawn(lines: list[Line]) -> Figure:
    """Draws lines as a picture, with each word in the columns that it has on a terminal."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    columns = max(sum(len(word) for word, _ in line) for line in lines)
    figure = Figure(figsize=((columns + 4) * COLUMN, (len(lines) + 2) * LINE), dpi=100, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-2, columns + 2), ylim=(len(lines) + 1, -1))
    axes.set_axis_off()
    font: dict[str, Any] = {"family": "monospace", "fontsize": 72 * COLUMN / 0.602, "parse_math": False}
    for y, line in enumerate(lines):
        x = 0
        for word, style in line:
            color, _, background = style.removesuffix(" underline").partition(" on ")
            if background:
                axes.add_patch(Rectangle((x, y), len(word), 1, facecolor=background, linewidth=0))
            begin, weight = x + len(word) - len(word.lstrip()), "bold" if style == "bold" else "normal"
            if word.strip():
                axes.text(begin, y + 0.75, word.strip(), color=INK.get(color, color), weight=weight, **font)
            x += len(word)
    return figure
