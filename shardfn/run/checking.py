"""Batches of anybody's loader are compared between ranks."""

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
    """Batches that are compared before a step gets them; made by `checked`.

    Attributes:
        axes: of the mesh, along which ranks have different rows.
    """

    axes: tuple[str, ...]
    _loader: Iterable[Any] = field(repr=False)
    _peers: Peers = field(repr=False)
    _begun: list[int] = field(repr=False, compare=False, default_factory=list)

    @property
    def mesh(self) -> DeviceMesh:
        """Whose ranks iterate."""
        return self._peers.mesh

    def __iter__(self) -> Iterator[Any]:
        return self(0)

    def __call__(self, start: int) -> Iterator[Any]:
        """The batches but for the first `start`, which are read and dropped.

        Raises:
            ValueError: the loader is a generator, or another iterator, of which batches have been read.
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
    """The batches of a loader of your own, each of which every rank has been told of before any rank gets it.

    An error on every rank, instead of wrong training or a hang, are: ranks at different places along `axes` with the
    same rows, which a forgotten sampler causes; ranks at the same place with different rows; a different number of
    batches, or batches of different structure, shapes (but for `pad`) or dtypes; an error of one rank's loader. Rows
    are compared in the first batches of each iteration, as far as needed: two ranks have the same if all their rows
    were equal and at least 8 different ones were among them, so that data whose rows are alike is none.

    Batches stay what and where they are, but for mappings, which become dicts; one more than the loop has is read. So
    they are copied, and a loader may use its memory again, but not those of torch's `DataLoader` with its own
    `collate_fn`, which are new.

    Args:
        loader: gives pytrees of tensors or arrays, whose dim 0 are rows.
        mesh: whose ranks iterate, all of them alike.
        axes: the axis or axes along which ranks have different rows; `()` is none.
        pad: what becomes of batches that are longer on some ranks, as `batches` takes it; None: they are an error.

    Returns:
        An iterable of the same batches, with the loader's `len`.

    Raises:
        TypeError, ValueError: on every rank, a loader that is none, or an axis that the mesh does not have.
    """
    sizes(mesh)
    with failing_together([mesh], NAME, (TypeError, ValueError)):
        names = axes_of(axes, mesh, NAME)
        if not isinstance(loader, Iterable):
            raise TypeError(f"{NAME}: the loader is of type {type(loader).__name__}, which gives no batches")
        lengths = lengths_of(pad, getattr(loader, "collate_fn", None), NAME)
    agree([f"axes={names!r}", f"pad={lengths!r}"], mesh, NAME)
    return Checked(names, loader, peers(mesh, names, NAME, lengths, distinct=True))


def _reads(loader: Iterable[Any], start: int) -> Generator[Read]:
    keeps = fresh(loader)
    for batch in itertools.islice(_to_its_end(loader), start, None):
        found = of_dicts(batch)
        yield Read(State.BATCH, found if keeps else owned(found))


def _to_its_end(loader: Iterable[Any]) -> Generator[Any]:
    """What a loader gives, whose own StopIteration is its end, and that of the code that it calls is not.

    Raises:
        RuntimeError: a row, or what makes a batch of rows, has raised it.
    """
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration as error:
            if loaders.failed(error):
                raise RuntimeError(f"{NAME}: a row of the loader's data set, or its collate_fn, raised it") from error
            return
        yield batch
