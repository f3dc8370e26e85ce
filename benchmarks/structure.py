"""The structure of the package: folders, imports between them, the amount of code, and what a step enters of it.

    python -m benchmarks.structure --picture docs/house.png

A room is a folder of `shardfn/`, or a module next to these folders. Imports under `TYPE_CHECKING` do not count.

The core is what a step of one's own needs: which ranks there are (without who waits for whom), collectives, shards,
stages, and transforms. A step that is entered is one of two stages on two ranks,
with its gradients and without an optimizer, after some that have prepared it.
"""

from __future__ import annotations

import ast
import functools
import io
import sys
import threading
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import shardfn as sf
from benchmarks.report import Goal, parser, publish
from shardfn.testing import World

HOUSE = Path(__file__).resolve().parents[1] / "shardfn"
ABOVE = ("__init__", "__main__")  # modules that only re-export or start the rest
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


WAITING = ("comparisons", "deadlock", "lanes", "liveness", "rendezvous", "rollcall", "waiting", "watchdog")
CORE = ("mesh", "collectives", "shards", "stages", "transforms")
BESIDE = {f"mesh.{name}" for name in WAITING}


@dataclass
class House:
    """The modules of the package, by name without the package's own name.

    Attributes:
        imports: the modules of the package that each module imports.
        code: the number of lines of each module that are neither blank, nor docstrings, nor comments.
    """

    imports: dict[str, set[str]] = field(default_factory=dict)
    code: dict[str, int] = field(default_factory=dict)

    def rooms(self) -> dict[str, set[str]]:
        """The other rooms that each room imports."""
        found: dict[str, set[str]] = {room(name): set() for name in self.imports}
        for name, imported in self.imports.items():
            found[room(name)] |= {room(other) for other in imported} - {room(name)}
        return found

    def lines(self, *rooms: str) -> int:
        """Lines of code in these rooms, without what is beside the core; of all, if none are named."""
        return sum(n for name, n in self.code.items() if not rooms or (room(name) in rooms and name not in BESIDE))


def room(name: str) -> str:
    """The room that a module is in."""
    return name.split(".")[0]


@functools.cache
def house(root: Path = HOUSE) -> House:
    """Reads the package."""
    files = {_name(path, root): path for path in sorted(root.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    found = House(code={name: code_lines(files[name].read_text()) for name in files})
    for name, tree in trees.items():
        if name not in ABOVE:
            found.imports[name] = {other for other in _imported(tree, files) if other not in (name, *ABOVE)}
    return found


def code_lines(text: str) -> int:
    """The number of lines of code in a file: neither blank, nor a comment, nor a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _imported(tree: ast.AST, files: dict[str, Path]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shardfn":
            base = node.module.removeprefix("shardfn").removeprefix(".")
            for alias in node.names:
                full = f"{base}.{alias.name}" if base else alias.name
                yield full if full in files else base or "__init__"
        yield from _imported(node, files)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The cycles of a graph, each with all nodes on it."""
    reach = {name: _reached(name, graph) for name in graph}
    found: list[list[str]] = []
    for name in graph:
        if name in reach[name] and not any(name in one for one in found):
            found.append([other for other in graph if other in reach[name] and name in reach[other]])
    return found


def _reached(name: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = list(graph[name])
    while left:
        other = left.pop()
        if other not in seen:
            seen.add(other)
            left += graph.get(other, ())
    return seen


def floors(rooms: dict[str, set[str]]) -> list[list[str]]:
    """The floors from below: a room is one floor above the highest room that it imports. There must be no circles."""
    of: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in of:
            of[name] = 1 + max((floor(other) for other in rooms[name]), default=-1)
        return of[name]

    for name in rooms:
        floor(name)
    return [sorted(name for name in rooms if of[name] == n) for n in range(1 + max(of.values()))]


def draw(rooms: dict[str, set[str]], levels: list[list[str]], path: Path) -> None:
    """Draws the rooms on their floors, and the imports between them, without those that follow from others."""
    figure = Figure(figsize=(8.8, 1.0 + 1.0 * len(levels)), dpi=110)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(levels) - 0.3)
    at = {
        name: ((i + 0.5 + (y % 2) * 0.16) / (len(level) + (y % 2) * 0.16), float(y))
        for y, level in enumerate(levels)
        for i, name in enumerate(level)
    }
    for name, (x, y) in at.items():
        for other in rooms[name]:
            if any(other in _reached(between, rooms) for between in rooms[name]):
                continue
            to = at[other]
            axes.plot([x, to[0]], [y - 0.2, to[1] + 0.2], color="#9aa7b5", linewidth=0.8, zorder=1)
    for name, (x, y) in at.items():
        box = FancyBboxPatch((x - 0.075, y - 0.2), 0.15, 0.4, boxstyle="round,pad=0.004", zorder=2)
        box.set(facecolor="#e8f0f8", edgecolor="#38618c")
        axes.add_patch(box)
        axes.text(x, y, name, ha="center", va="center", fontsize=11, zorder=3)
    figure.savefig(path)


def entered() -> tuple[int, int]:
    """The functions of the package that one step enters, and their files."""
    mesh = sf.make_mesh(shard=-1, device="cpu")
    makers = [lambda g: {"w": torch.randn(8, 8, generator=g)}] * 2
    params, x = sf.init_sharded(makers, 0, mesh, sf.full_shard("shard")), torch.randn(2, 8)

    @sf.stage
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["w"])

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in sf.layers(params):
            x = layer(p, x)
        return sf.psum(x.square().sum(), "shard")

    step = sf.shard_map(sf.value_and_grad(loss), mesh=mesh, in_specs=(..., sf.P("shard")), out_specs=...)
    for _ in range(5):
        step(params, x)
    seen: set[tuple[str, str, int]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(HOUSE)):
            seen.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    step(params, x)
    sys.setprofile(None)
    threading.setprofile(None)
    return len(seen), len({file for file, *_ in seen})


def main() -> None:
    options = parser("Rooms, floors, imports and circles of the package, and the lengths of its functions.")
    options.add_argument("--picture", type=Path, help="file for a picture of the rooms")
    args = options.parse_args()
    found = house()
    rooms = found.rooms()
    levels = floors(rooms)
    if args.picture:
        draw(rooms, levels, args.picture)
    rows = [
        {"floor": n, "room": name, "imports": ", ".join(sorted(rooms[name]))}
        for n, level in reversed(list(enumerate(levels)))
        for name in level
    ]
    (functions, of_files), _ = World(2, kind="processes", deadline=120).run(entered)
    goals = [
        Goal("circles of rooms or modules", len(circles(rooms)) + len(circles(found.imports)), 0),
        Goal("lines of code", found.lines(), 38_000),
        Goal("lines of code, core", found.lines(*CORE), 8_400),
        Goal("lines of code, stages", found.lines("stages"), 1_600),
        Goal("functions that a step enters", functions, 150),
        Goal("files that a step enters", of_files, 22),
    ]
    publish(f"shardfn: {len(found.code)} files, {found.lines()} lines of code", rows, goals, args.json)


if __name__ == "__main__":
    main()
