"""What a plan shows of itself: a table, a page for the browser, a picture, and a trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfn.plans import chart, table, trace, webpage
from shardfn.plans.drawing import Drawing, Times, drawing, must_be_times
from shardfn.plans.page import Line
from shardfn.plans.printed import Printed, need_matplotlib, save_figure
from shardfn.plans.schedule import Allocation, Held, Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Views(Printed):
    """The pictures of a plan; its attributes are as in `Plan`."""

    name: str
    mesh: dict[str, int]
    rank: int
    works: tuple[Work, ...]
    held: tuple[Held, ...]
    host: dict[str, int]
    disk: dict[str, int]
    peak: Held
    allocations: tuple[Allocation, ...]
    parameters: int
    allocator: int = 0
    assumed: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """What pictures call it."""
        return self.name.rpartition("<locals>.")[2]

    def _lines(self, width: int) -> Iterator[Line]:
        return table.lines(self, width)

    def table(self, width: int | None = None) -> str:
        """Returns the table: memory at the peak, the largest allocations, what is sent, and what each stage does.

        Stages that do the same are one row, and long lists end with how much more there is, so a table has at most
        about 60 lines.

        Args:
            width: the most columns of a line. Default: the terminal's width.
        """
        return self.text(width)

    def drawing(self, times: Times | None = None) -> Drawing:
        """Returns when each work runs, and in which lane; those of a profile have times of their own."""
        must_be_times(times)
        return drawing(self.works, self.held, self if times is None and isinstance(self, Times) else times)

    def html(self, path: str | os.PathLike[str], times: Times | None = None, beside: Views | None = None) -> None:
        """Writes a page for the browser, of one file: lanes of works in time, and the memory beneath.

        It needs no network. The wheel and the keys + and - zoom, dragging and arrows move, a click keeps what is told
        of a work.

        Args:
            path: of the file.
            times: when each work begins and ends, in seconds, such as `plan.timed(...)` returns. Default: the order
                in which works are issued.
            beside: another plan or a profile, shown beneath on the same axis.

        Raises:
            ValueError: the times are those of another plan.
        """
        webpage.write(path, self._shown(times, beside))

    def figure(self, times: Times | None = None, beside: Views | None = None) -> Figure:
        """Returns the picture, which notebooks can show, too: the lanes, and the memory beneath.

        Args:
            times: as for `html`.
            beside: as for `html`.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
            ValueError: the times are those of another plan.
        """
        need_matplotlib("plan")
        return chart.drawn(self._shown(times, beside))

    def _shown(self, times: Times | None, beside: Views | None) -> list[tuple[Views, Times | None]]:
        must_be_times(times)
        if beside is not None and not isinstance(beside, Views):
            raise TypeError(f"beside is of type {type(beside).__name__}; it is another plan, or a profile")
        return [(self, times), *([(beside, None)] if beside is not None else [])]

    def save_picture(
        self, path: str | os.PathLike[str], times: Times | None = None, beside: Views | None = None
    ) -> None:
        """Writes the picture, in the format given by the file name's suffix: `.svg`, `.png`, `.pdf`.

        Args:
            path: of the file.
            times: as for `html`.
            beside: as for `html`.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
            ValueError: no picture format has this suffix, or the times are those of another plan.
        """
        save_figure("plan", self.figure(times, beside), path)

    def trace(self, path: str | os.PathLike[str], times: Times | None = None) -> None:
        """Writes a trace in Chrome's format, which chrome://tracing and Perfetto open.

        Streams are threads, and memory is a counter by kind. Without times, a work takes one microsecond.

        Args:
            path: of the file, such as `"step.json"`.
            times: as for `html`.

        Raises:
            ValueError: the times are those of another plan.
        """
        trace.write(path, self, times)
