"""Where what autograd saves of a stage goes: away from the device, to the hooks around the stage, or nowhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import autograd
from shardfn.stages.activation_offload import Offloading, View
from shardfn.stages.replay import entered
from shardfn.stages.signature import Signature
from shardfn.transforms.step import escaped


class SavedTensorHooks:
    """Where what autograd saves of a run goes: away, or through the hooks that are in force around the stage.

    Parameters go nowhere. Their memory is lent, backward fills it again, and another copy would only take room.
    """

    def __init__(self, name: str, own: set[int], around: Any, leave: Callable[[Tensor], View | None] | None) -> None:
        self.name, self.own, self.around, self.leave = name, own, around, leave

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Under which it works."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            try:
                yield
            except RuntimeError as error:
                if self.leave is None or "support saved tensor hooks" not in str(error):
                    raise
                raise RuntimeError(
                    f"stage {self.name}: its function uses a transform of torch.func, in which torch lets nobody take "
                    f"what autograd saves, with a remat that moves it: make this stage with remat=True or False"
                ) from error

    def _pack(self, x: Tensor) -> tuple[str, Any, Any]:
        if x.layout is torch.strided and autograd.storage_of(x) in self.own:
            return "own", x.detach(), x._version  # an output itself would hold the graph that holds it
        view = None if self.leave is None else self.leave(x)
        if view is not None:
            return "away", view, view.version
        if self.around is not None:
            return "around", self.around[0](x), self.around[1]
        return "own", x.detach(), x._version

    def _unpack(self, packed: tuple[str, Any, Any]) -> Tensor:
        where, x, more = packed
        if where == "around":
            found: Tensor = more(x)
            return found
        now = x.witness if where == "away" else x
        if now._version != more:
            raise RuntimeError(
                f"stage {self.name}: a tensor of shape {tuple(x.shape)} that its backward needs has been "
                f"modified by an inplace operation since"
            )
        same: Tensor = x.brought() if where == "away" else x
        return same


def discarding(stage: str) -> Any:
    """A context in which autograd saves nothing: its graph only shows what depends on what."""

    def gone(_: Any) -> Tensor:
        raise escaped(stage)

    return torch.autograd.graph.saved_tensors_hooks(lambda x: None, gone)


def saved_tensor_hooks(signature: Signature, own: set[int], leave: Offloading | None, transformed: bool) -> Any:
    """A context for what autograd saves of a stage; None if hooks around it want nothing and nothing leaves."""
    allowed = autograd.saved_tensors_hooks_allowed()
    if not allowed and (leave is None or not transformed):
        return None
    around = _around() if allowed else None
    if not signature.keeps_graph:
        return None if around is None else discarding(signature.stage)
    if leave is None and around is None:
        return None
    hooks = SavedTensorHooks(signature.name, own, around, leave).context()
    return hooks if allowed else entered([autograd.saved_tensors_hooks_enabled(), hooks])


def argument_hooks(signature: Signature, own: set[int], leave: Callable[[Tensor], View | None]) -> Any:
    """The same for what is saved of a call's arguments, where no hooks around it want that."""
    if not autograd.saved_tensors_hooks_allowed() or _around() is not None:
        return contextlib.nullcontext()
    return SavedTensorHooks(signature.name, own, None, leave).context()


def _around() -> Any:
    """The hooks that somebody else has put around a call."""
    found = autograd.saved_tensors_hooks()
    own = found is not None and isinstance(getattr(found[0], "__self__", None), SavedTensorHooks)
    return None if own else found
