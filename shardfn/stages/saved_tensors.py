"""Decides where tensors that autograd saves of a stage go: off the device, to hooks around the stage, or nowhere."""

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
    """Sends what autograd saves of a run off the device, or to the hooks that are active around the stage.

    Parameters stay: their memory is lent and backward fills it again, so another copy would only take memory.
    """

    def __init__(self, name: str, own: set[int], around: Any, leave: Callable[[Tensor], View | None] | None) -> None:
        self.name, self.own, self.around, self.leave = name, own, around, leave

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A context in which the hooks are active."""
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
            return "own", x.detach(), x._version  # detached: an output would keep its graph alive, which keeps it
        view = None if self.leave is None else self.leave(x)
        if view is not None:
            return "away", view, view.version
        if self.around is not None:
            return "around", self.around[0](x), self.around[1]
        return "own", x.detach(), x._version

    def _unpack(self, packed: tuple[str, Any, Any]) -> Tensor:
        kind, x, extra = packed
        if kind == "around":
            return extra(x)
        counter = x.witness if kind == "away" else x
        if counter._version != extra:
            raise RuntimeError(
                f"stage {self.name}: a tensor of shape {tuple(x.shape)} that its backward needs has been "
                f"modified by an inplace operation since"
            )
        return x.brought() if kind == "away" else x


def saved_tensor_hooks(signature: Signature, own: set[int], leave: Offloading | None, transformed: bool) -> Any:
    """A context for what autograd saves of a stage; None if nothing leaves and there are no hooks around."""
    allowed = autograd.saved_tensors_hooks_allowed()
    if not allowed and (leave is None or not transformed):
        return None
    around = _around() if allowed else None
    if not signature.keeps_graph:

        def gone(_: Any) -> Tensor:
            raise escaped(signature.stage)

        # Autograd saves nothing: its graph only shows what depends on what.
        return None if around is None else torch.autograd.graph.saved_tensors_hooks(lambda x: None, gone)
    if leave is None and around is None:
        return None
    hooks = SavedTensorHooks(signature.name, own, around, leave).context()
    return hooks if allowed else entered([autograd.saved_tensors_hooks_enabled(), hooks])


def argument_hooks(signature: Signature, own: set[int], leave: Callable[[Tensor], View | None]) -> Any:
    """As `saved_tensor_hooks`, for a call's arguments, if no hooks are active around it."""
    if not autograd.saved_tensors_hooks_allowed() or _around() is not None:
        return contextlib.nullcontext()
    return SavedTensorHooks(signature.name, own, None, leave).context()


def _around() -> Any:
    """The hooks that others have activated around a call."""
    hooks = autograd.saved_tensors_hooks()
    ours = hooks is not None and isinstance(getattr(hooks[0], "__self__", None), SavedTensorHooks)
    return None if ours else hooks
