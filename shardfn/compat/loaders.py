"""Torch's data loader, which may mistake a failure for its end, and whose errors hold its workers; and iterables that
can be read only once.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def refuse_failed(end: StopIteration, name: str) -> None:
    """Raises RuntimeError if a loader's end is really a StopIteration of a numbered data set or of `collate_fn`.

    Args:
        end: what its iterator raised.
        name: the caller, for the message.
    """
    frames = [frame for frame, _ in traceback.walk_tb(end.__traceback__)]
    if (isinstance(end.value, str) and "in DataLoader worker process" in end.value) or any(
        frame.f_code.co_qualname == "_MapDatasetFetcher.fetch" for frame in frames
    ):
        raise RuntimeError(
            f"{name}: a row of the loader's data set, or its collate_fn, raised StopIteration"
        ) from without_frames(end)


def without_frames(error: BaseException) -> BaseException:
    """Clears the variables of torch's and this package's functions that an error and its causes came through.

    They are in circles with it, and hold a loader's workers: those would live on until the garbage collector came by,
    which then waits for each.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if frame.f_code.co_filename.startswith(_NOT_THE_USERS):
                with contextlib.suppress(RuntimeError):  # it is still running
                    frame.clear()
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return error


def read_once(loader: Any) -> bool:
    """Whether a loader continues where it stopped when it is iterated again, as generators do.

    For a class written in Python that is unknown, so False: its `__iter__` may start over.
    """
    if isinstance(loader, _BaseDataLoaderIter):
        return True
    return isinstance(loader, Iterator) and not isinstance(type(loader).__iter__, FunctionType)
