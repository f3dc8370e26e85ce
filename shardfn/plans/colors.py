"""Colors of ranks, the same in the terminal and in pictures, that show who holds what."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from shardfn.plans.holdings import Section

FEW = ("#38618c", "#e08e45", "#4f9d69", "#c0504d", "#7b5ea7", "#3d9db3", "#b08a2e", "#c2679b")
MANY = ("#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#f2d13c")
PADDING, OTHER = "#e4e8ed", "#9aa7b5"


def colors(section: Section) -> dict[int, str]:
    """Returns rank -> color: a hue by position along the axes cutting most bytes (or all), paler for further copies."""
    grid = section.grid
    if grid is None:
        return dict.fromkeys(section.ranks, FEW[0])
    whole = Counter[tuple[str, ...]]()
    for flat in section.flats:
        axes = tuple(name for name in flat.layout.placement.axes if grid.size(name) > 1)
        if axes:
            whole[axes] += flat.whole
    names = max(whole, key=lambda axes: whole[axes]) if whole else tuple(name for name, _ in grid.sizes)
    other_axes = tuple(name for name, _ in grid.sizes if name not in names)
    count, copies = grid.size(names), grid.size(other_axes)
    color_of = {}
    for rank in grid.ranks:
        paler = 0.45 * grid.index(rank, other_axes) / max(copies - 1, 1)
        color_of[rank] = mixed(hue(grid.index(rank, names), count), "#ffffff", paler)
    return color_of


def hue(index: int, count: int) -> str:
    """Returns color `index` of `count` distinct ones."""
    if count <= len(FEW):
        return FEW[index]
    low, part = divmod(index / (count - 1) * (len(MANY) - 1), 1)
    return mixed(MANY[int(low)], MANY[min(math.ceil(low + part), len(MANY) - 1)], part)


def mixed(a: str, b: str, part: float) -> str:
    """Mixes two colors: `part` of `b`, the rest of `a`."""
    return "#" + "".join(f"{round(x + (y - x) * part):02x}" for x, y in zip(_rgb(a), _rgb(b), strict=True))


def over(color: str) -> str:
    """Returns the text color, black or white, that is readable on a color."""
    r, g, b = _rgb(color)
    return "#ffffff" if 0.299 * r + 0.587 * g + 0.114 * b < 160 else "#1c2733"


def _rgb(color: str) -> Sequence[int]:
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]
