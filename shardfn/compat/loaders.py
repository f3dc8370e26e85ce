"""Torch's data loader, which may mistake a failure for its end; and iterables that can be read only once."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


def failed(end: StopIteration) -> bool:
    """Whether a loader's end is really a StopIteration raised by a numbered data set's code or by `collate_fn`."""
    if isinstance(end.value, str) and "in DataLoader worker process" in end.value:
        return True
    return any(
        frame.f_code.co_qualname == "_MapDatasetFetcher.fetch" for frame, _ in traceback.walk_tb(end.__traceback__)
    )


def read_once(loader: Any) -> bool:
    """Whether a loader continues where it stopped when it is iterated again, as generators do.

    For a class written in Python that is unknown, so False: its `__iter__` may start over.
    """
    if isinstance(loader, _BaseDataLoaderIter):
        return True
    return isinstance(loader, Iterator) and not isinstance(type(loader).__iter__, FunctionType)
