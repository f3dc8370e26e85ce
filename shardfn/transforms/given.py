"""Since when the tensors that a function was given have been ready on an accelerator.

Who reads them on another stream then need not wait for all that the program has enqueued meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import devices, functorch


class _Given(threading.local):
    def __init__(self) -> None:
        self.open: list[dict[int, tuple[Tensor, int, Any]]] = []  # by id: the tensor, its version, the event


_given = _Given()


@contextlib.contextmanager
def given(leaves: Iterable[Any]) -> Iterator[None]:
    """A context of a call with these arguments: `ready_since` knows the tensors among them that are on accelerators."""
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.device.type not in ("cpu", "meta")]
    if not tensors or functorch.inside_transform() or any(devices.capturing(x.device) for x in tensors[:1]):
        yield
        return
    events = {
        device: torch.get_device_module(device).current_stream(device).record_event()
        for device in dict.fromkeys(x.device for x in tensors)
    }
    known = {id(x): (x, x._version, events[x.device]) for x in tensors if not x.is_inference()}
    _given.open.append(known)
    try:
        yield
    finally:
        _given.open.remove(known)


def ready_since(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Events after which these tensors are as they are now.

    That is known of tensors that a call under way was given, if nothing has written to them since: their version
    counters show it. What another stream has written must have been waited for when the call began.

    Returns:
        The events; None if for one of the tensors there is none.
    """
    if not _given.open:
        return None
    found = {}
    for x in tensors:
        event = next((known[id(x)] for known in reversed(_given.open) if id(x) in known), None)
        if event is None or event[1] != x._version:
            return None
        found[id(event[2])] = event[2]
    return tuple(found.values())
