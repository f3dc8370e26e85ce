"""The structure of the package: folders, imports between them, the amount of code, and the lengths of functions.

    python -m benchmarks.structure --picture docs/house.png

A room is a folder of `shardfn/`, or a module next to these folders. Imports under `TYPE_CHECKING` do not count.
"""

from __future__ import annotations

import ast
import functools
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from benchmarks.report import Goal, parser, publish

HOUSE = Path(__file__).resolve().parents[1] / "shardfn"
ABOVE = ("__init__", "__main__")  # modules that only re-export or start the rest
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass
class House:
    """The modules of the package, by name without the package's own name.

    Attributes:
        imports: the modules of the package that each module imports.
        lengths: the length of every function, in lines.
        private: the lengths of functions that no folder exports, by name.
        used_once: the private functions that their file uses once.
        files: the number of files.
        lines: the number of lines in all files.
        code: the number of lines that are neither blank, nor docstrings, nor comments.
    """

    imports: dict[str, set[str]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    private: dict[str, int] = field(default_factory=dict)
    used_once: list[str] = field(default_factory=list)
    files: int = 0
    lines: int = 0
    code: int = 0

    def rooms(self) -> dict[str, set[str]]:
        """The other rooms that each room imports."""
        found: dict[str, set[str]] = {room(name): set() for name in self.imports}
        for name, imported in self.imports.items():
            found[room(name)] |= {room(other) for other in imported} - {room(name)}
        return found


def room(name: str) -> str:
    """The room that a module is in."""
    return name.split(".")[0]


@functools.cache
def house(root: Path = HOUSE) -> House:
    """Reads the package."""
    files = {_name(path, root): path for path in sorted(root.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    handed_out = {name for module, tree in trees.items() if files[module].name == "__init__.py" for name in _all(tree)}
    found = House(files=len(files))
    for name, tree in trees.items():
        text = files[name].read_text()
        found.lines += text.count("\n")
        found.code += code_lines(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        found.lengths += [_length(node) for node in functions]
        found.private |= {f"{name}.{node.name}": _length(node) for node in functions if node.name not in handed_out}
        found.used_once += [f"{name}.{function}" for function in _used_once(tree)]
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


def _length(node: ast.FunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _all(tree: ast.Module) -> Iterator[str]:
    """The names in a module's `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)


def _used_once(tree: ast.Module) -> list[str]:
    """The private functions of a module that it uses in one place."""
    named = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("_")]
    return [name for name in functions if named[name] == 1]


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
    goals = [
        Goal("rooms", len(rooms), 15),
        Goal("floors", len(levels), 8),
        Goal("imports between rooms", sum(map(len, rooms.values())), 49),
        Goal("circles of rooms or modules", len(circles(rooms)) + len(circles(found.imports)), 0),
        Goal("lines of a function, median", statistics.median(found.lengths), 10),
        Goal("lines of the longest function", max(found.lengths), 80),
        Goal("lines of the longest function that no folder hands out", max(found.private.values()), 60),
        Goal("private functions that are used once", len(found.used_once), 390),
        Goal("files", found.files, 230),
        Goal("lines of code", found.code, 27_500),
    ]
    publish(f"shardfn: {found.files} files, {found.lines} lines, {found.code} of them code", rows, goals, args.json)


if __name__ == "__main__":
    main()
