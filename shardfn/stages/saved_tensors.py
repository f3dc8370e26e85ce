"""Where what autograd saves of a stage goes: to the host, to the hooks around the stage, or nowhere."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import autograd
from shardfn.stages.signature import Signature
from shardfn.transforms.owned import escaped

_log = logging.getLogger("shardfn")


class SavedTensorHooks:
    """Where what autograd saves of a run goes: to the host, or through the hooks that are in force around the stage.

    Parameters go nowhere. Their memory is lent, backward fills it again, and another copy would only take room.
    """

    def __init__(self, name: str, own: set[int], device: torch.device | None, around: Any) -> None:
        self.name, self.own, self.device, self.around = name, own, device, around

    def context(self) -> Any:
        """Under which it works."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> tuple[str, Any, Any]:
        if autograd.storage_of(x) in self.own:
            return "own", x.detach(), x._version  # an output itself would hold the graph that holds it
        if self.device is None:
            return "around", self.around[0](x), self.around[1]
        if x.device != self.device:
            return "own", x.detach(), x._version
        away = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return "host", away.copy_(x, non_blocking=True), None

    def _unpack(self, packed: tuple[str, Any, Any]) -> Tensor:
        where, x, more = packed
        if where == "host":
            back: Tensor = x.to(self.device, non_blocking=True)
            return back
        if where == "around":
            found: Tensor = more(x)
            return found
        if x._version != more:
            raise RuntimeError(
                f"stage {self.name}: a tensor of shape {tuple(x.shape)} that its backward needs has been "
                f"modified by an inplace operation since"
            )
        same: Tensor = x
        return same


def discarding(stage: str) -> Any:
    """A context in which autograd saves nothing: its graph only shows what depends on what."""

    def gone(_: Any) -> Tensor:
        raise escaped(stage)

    return torch.autograd.graph.saved_tensors_hooks(lambda x: None, gone)


def saved_tensor_hooks(signature: Signature, own: set[int], device: torch.device) -> Any:
    """A context for what autograd saves of a stage; None if hooks around it want nothing and the host gets nothing."""
    if not autograd.saved_tensors_hooks_allowed():
        return None
    around, remat = autograd.saved_tensors_hooks(), signature.options.remat
    if remat not in (False, "offload"):
        return None if around is None else discarding(signature.stage)
    if remat == "offload" and device.type == "cpu":
        _offloads_nothing(signature.name)
    host = device if remat == "offload" and device.type != "cpu" else None
    return None if host is None and around is None else SavedTensorHooks(signature.name, own, host, around).context()


@functools.cache
def _offloads_nothing(name: str) -> None:
    """Says so once for each stage."""
    _log.warning(
        'stage %s: remat="offload" keeps activations in the memory of the host, where they are anyway on a mesh of '
        "CPUs: it changes nothing here. remat=True saves memory everywhere",
        name,
    )
