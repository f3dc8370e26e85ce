"""Output in lines of styled text: on a terminal, in a notebook, and saved as a picture."""

from __future__ import annotations

import html
import io
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shardfn.local_paths import local_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = list[tuple[str, str]]
"""Words, each with a style."""
WIDE = 120  # columns, where there is no terminal
MONO = "white-space:pre;overflow-x:auto;line-height:1.25;font-family:Menlo,'DejaVu Sans Mono',consolas,monospace"


class Printed:
    """A value that displays itself in prompts and notebooks, in color if rich is installed."""

    def _lines(self, width: int) -> Iterable[Line]:
        """Returns the lines, of at most `width` columns if words allow it."""
        raise NotImplementedError

    def text(self, width: int | None = None) -> str:
        """Returns the text, in lines of at most `width` columns if words allow it. Default: the terminal's width."""
        lines = self._lines(width or _columns())
        return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        """The text, in color if standard output is a terminal."""
        if not sys.stdout.isatty() or "NO_COLOR" in os.environ or find_spec("rich") is None:
            return self.text()
        from rich.console import Console

        with io.StringIO() as out:
            Console(file=out, force_terminal=True, width=_columns()).print(self)
            return out.getvalue().removesuffix("\n")

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield self._styled(options.max_width)

    def _styled(self, width: int) -> Any:
        from rich.text import Text

        lines = (Text.assemble(*line) for line in self._lines(width))
        return Text("\n", no_wrap=True, overflow="ignore").join(lines)

    def _repr_html_(self) -> str:
        if find_spec("rich") is None:
            return f"<pre>{html.escape(self.text(WIDE))}</pre>"
        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=WIDE, force_jupyter=False)
        console.print(self._styled(WIDE))
        return console.export_html(inline_styles=True, code_format=f'<pre style="{MONO}">{{code}}</pre>')


def _columns() -> int:
    return shutil.get_terminal_size((WIDE, 24)).columns


def need_matplotlib(caller: str) -> None:
    """Raises the error that names the extra, if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"{caller}: pictures need matplotlib, which is in the extra examples: pip install '.[examples]'",
            name="matplotlib",
        )


def save_figure(caller: str, figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a picture in the format given by the file name's suffix, or raises the error that names some."""
    formats = figure.canvas.get_supported_filetypes()
    ending = local_path(path, f"{caller}: path").suffix.removeprefix(".").lower()
    if ending not in formats:
        raise ValueError(f"{caller}: {os.fspath(path)!r} names no kind of picture: end it in .svg, .png or .pdf")
    figure.savefig(path, dpi=150)
