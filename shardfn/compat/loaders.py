"""Torch's data loader, where it takes a failure for its end."""

from __future__ import annotations

import traceback


def failed(end: StopIteration) -> bool:
    """Whether the end of a loader is none: the code of a data set with numbered rows, or a `collate_fn`, raised it."""
    if isinstance(end.value, str) and "in DataLoader worker process" in end.value:
        return True
    return any(
        frame.f_code.co_qualname == "_MapDatasetFetcher.fetch" for frame, _ in traceback.walk_tb(end.__traceback__)
    )
