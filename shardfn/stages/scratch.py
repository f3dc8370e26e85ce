"""The memory from which gradients are sent, used again from stage to stage: fresh pages for each cost time and memory.

An accelerator's is freed between steps, and has the size that is needed. The tensors stay, as there are many views of
them: only their memory comes and goes. So no reference protects it, but the order of streams alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardfn.collectives.capturing import capturing
from shardfn.compat import devices


class Scratch:
    """Memories by name.

    Attributes:
        memories: the tensors; each was once as large as needed.
        room: bytes that each has now.
        owners: of an accelerator: the stream on which each was allocated, which may use it again once it is freed.
        views: by name, length and dtype.
        derived: what callers made of them.
        of_graph: whether they belong to a graph that is being captured, or to the rehearsal of one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.comes_and_goes = device, device.type != "cpu"
        self.memories: dict[Any, Tensor] = {}
        self.room: dict[Any, int] = {}
        self.owners: dict[Any, Any] = {}
        self.views: dict[Any, Tensor] = {}
        self.derived: dict[Any, Any] = {}
        self.of_graph = False

    def begin(self, first: bool) -> None:
        """Separates graphs of an accelerator from what runs: they write to their memory again, so no step may free it.

        Args:
            first: whether nothing was sent since all had arrived, so that this may be another graph.
        """
        of_graph = capturing() is not None or devices.capturing(self.device)
        if of_graph is not self.of_graph or (of_graph and first):
            self.of_graph = of_graph
            self.forget()

    def view(self, name: Any, numel: int, dtype: torch.dtype) -> Tensor:
        """A memory as a tensor; what it held before is lost if it had another size."""
        nbytes = numel * dtype.itemsize
        room = self.room.get(name, -1)
        if room < nbytes or (room > nbytes and self.comes_and_goes):
            self._allocate(name, nbytes)
        view = self.views.get((name, numel, dtype))
        if view is None:
            view = self.views[(name, numel, dtype)] = self.memories[name][:nbytes].view(dtype)
        return view

    def whole(self, name: Any) -> Tensor | None:
        """All of a memory; None if it has none."""
        return self.memories[name][: self.room[name]] if name in self.room else None

    def _allocate(self, name: Any, nbytes: int) -> None:
        self._free(name)  # first, so that both are never there at once, and that nothing is copied
        memory = self.memories.get(name)
        if memory is None or memory.numel() < nbytes:
            self.memories[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.views = {key: view for key, view in self.views.items() if key[0] != name}
        else:
            memory.untyped_storage().resize_(nbytes)
        self.room[name] = nbytes
        if self.comes_and_goes:
            self.owners[name] = self._stream()

    def _free(self, name: Any) -> None:
        """Frees a memory, which nothing uses that the current stream has not waited for."""
        if self.room.pop(name, None) is None or not self.comes_and_goes:
            return
        stream = self._stream()
        if stream != self.owners[name]:  # the owner has not waited
            self.memories[name].record_stream(stream)
        self.memories[name].untyped_storage().resize_(0)

    def free(self, beside: Iterable[Any] = ()) -> None:
        """Frees an accelerator's memory once all has arrived, and once these streams have done what they were given."""
        if self.of_graph:
            self.forget()
        elif self.comes_and_goes and self.room:
            stream = self._stream()
            for other in beside:
                stream.wait_stream(other)
            for name in list(self.room):
                self._free(name)

    def forget(self) -> None:
        """Drops all of it, whatever may still use it: what is sent keeps its tensors."""
        self.memories, self.room, self.owners, self.views, self.derived = {}, {}, {}, {}, {}

    def _stream(self) -> Any:
        return torch.get_device_module(self.device).current_stream(self.device)
