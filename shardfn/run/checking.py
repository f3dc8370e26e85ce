"""Checks that the batches of a user's own loader are consistent between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardfn.collectives.agree import agree, failing_together
from shardfn.compat import loaders
from shardfn.mesh.axes import sizes
from shardfn.mesh.grid import AxisName
from shardfn.run.batch_consistency import Peers, Read, State, axes_of, peers, together
from shardfn.run.collating import Pad, lengths_of, of_dicts
from shardfn.run.feeding import fresh, owned

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "sf.run.checked"


@dataclass(frozen=True)
class Checked:
    """Batches of a loader, compared between ranks before a step gets them; made by `checked`.

    Attributes:
        axes: mesh axes along which ranks have different rows.
    """

    axes: tuple[str, ...]
    _loader: Iterable[Any] = field(repr=False)
    _peers: Peers = field(repr=False)
    _begun: list[int] = field(repr=False, compare=False, default_factory=list)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh whose ranks iterate."""
        return self._peers.mesh

    def __iter__(self) -> Iterator[Any]:
        return self(0)

    def __call__(self, start: int) -> Iterator[Any]:
        """Iterates over the batches, after reading and dropping the first `start`.

        Raises:
            ValueError: the loader can be iterated only once, and batches of it have been read.
        """
        if self._begun and loaders.read_once(self._loader):
            raise ValueError(
                f"{NAME}: the loader is a {type(self._loader).__name__}, which can be read once, and its first batches "
                f"are gone: pass what can be iterated anew, as a DataLoader, or a class whose __iter__ begins again"
            )
        self._begun.append(start)
        return together(_reads(self._loader, start), start, self._peers, torch.device("cpu"))

    def __len__(self) -> int:
        size: Callable[[], int] | None = getattr(self._loader, "__len__", None)
        if size is None:
            raise TypeError(f"{NAME}: {type(self._loader).__name__} has no length")
        return size()


def checked(loader: Iterable[Any], mesh: DeviceMesh, axes: AxisName, *, pad: Pad | None = None) -> Checked:
    """Wraps a loader of your own, so that its batches are compared between ranks before any rank gets one.

    These raise on every rank, instead of wrong training or a hang: ranks at different places along `axes` have the same
    rows, as with a forgotten sampler; ranks at the same place have different rows; numbers of batches differ, or the
    structure, shapes (but for `pad`) or dtypes of batches; one rank's loader fails. Rows are compared in the first
    batches of each iteration: they count as the same on two ranks if all were equal and at least 8 of them distinct,
    so that data with many equal rows raises no false alarm.

    Batches keep their type and device, except that mappings become dicts. One batch more than the loop has is read.
    Batches are therefore copied, so that a loader may reuse its memory; not those of torch's `DataLoader` with its
    default `collate_fn`, which are new anyway.

    Args:
        loader: gives pytrees of tensors or arrays with rows along dim 0.
        mesh: whose ranks iterate, all of them alike.
        axes: the axis or axes along which ranks have different rows; `()` for none.
        pad: how to handle batches that are longer on some ranks, as in `batches`; None: an error.

    Returns:
        An iterable of the same batches, with the loader's `len`.

    Raises:
        TypeError, ValueError: on every rank: the loader is not iterable, or the mesh lacks an axis.
    """
    sizes(mesh)
    with failing_together([mesh], NAME, (TypeError, ValueError)):
        names = axes_of(axes, mesh, NAME)
        if not isinstance(loader, Iterable):
            raise TypeError(f"{NAME}: the loader is of type {type(loader).__name__}, which gives no batches")
        lengths = lengths_of(pad, getattr(loader, "collate_fn", None), NAME)
    agree([f"axes={names!r}", f"pad={lengths!r}"], mesh, NAME, subject=("axes= and pad=", "Every rank passes the same"))
    return Checked(names, loader, peers(mesh, names, NAME, lengths, distinct=True))


def _reads(loader: Iterable[Any], start: int) -> Generator[Read]:
    is_fresh = fresh(loader)
    for batch in itertools.islice(_to_its_end(loader), start, None):
        tree = of_dicts(batch)
        yield Read(State.BATCH, tree if is_fresh else owned(tree))


def _to_its_end(loader: Iterable[Any]) -> Generator[Any]:
    """Iterates over a loader, telling StopIteration at its end from one raised by code that it calls.

    Raises:
        RuntimeError: a row of the data set, or `collate_fn`, raised StopIteration.
    """
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration as end:
            loaders.refuse_failed(end, NAME)
            return
        yield batch
