"""Torch's data loader, where it takes a failure for its end; and what can be iterated once."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


def failed(end: StopIteration) -> bool:
    """Whether the end of a loader is none: the code of a data set with numbered rows, or a `collate_fn`, raised it."""
    if isinstance(end.value, str) and "in DataLoader worker process" in end.value:
        return True
    return any(
        frame.f_code.co_qualname == "_MapDatasetFetcher.fetch" for frame, _ in traceback.walk_tb(end.__traceback__)
    )


def read_once(loader: Any) -> bool:
    """Whether a loader goes on where it was when it is iterated again, as generators do.

    Of a class that somebody has written in Python nobody knows: its `__iter__` may begin anew.
    """
    if isinstance(loader, _BaseDataLoaderIter):
        return True
    return isinstance(loader, Iterator) and not isinstance(type(loader).__iter__, FunctionType)
