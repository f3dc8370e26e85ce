"""Decides where tensors that autograd saves of a stage go.

They may go off the device, to hooks around the stage, or nowhere until a second run computes them again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardfn.compat import autograd
from shardfn.mesh import waiting
from shardfn.stages.activation_offload import Offloading, View
from shardfn.stages.replay import entered
from shardfn.stages.signature import Signature
from shardfn.transforms.step import escaped

SMALL = 2**20  # parameters of a stage below which its second run goes to its end


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
            unpacked: Tensor = extra(x)
            return unpacked
        counter = x.witness if kind == "away" else x
        if counter._version != extra:
            raise RuntimeError(modified(self.name, x))
        tensor: Tensor = x.brought() if kind == "away" else x
        return tensor


def modified(stage: str, x: Any) -> str:
    """The message for a saved tensor into which the function has written."""
    return (
        f"stage {stage}: a tensor of shape {tuple(x.shape)} that its backward needs has been modified by an inplace "
        f"operation since"
    )


class Recomputed:
    """A tensor that autograd saves, or the place in a graph where a second run puts it.

    Attributes:
        tensor: the tensor, detached from a graph that is not this one; None between the runs.
        version: its version then.
    """

    __slots__ = ("__weakref__", "dtype", "shape", "tensor", "version")

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.tensor: Tensor | None = x
        self.version = x._version


class _Complete(BaseException):
    """Ends a second run: everything that the graph needs has been computed. No Exception, so that nobody handles it."""


class Recomputing:
    """Keeps the graph of a run without the tensors that it saves, which a second run computes, and goes no further.

    What follows the last saved tensor, such as the last product of a layer, is computed once, as
    `torch.utils.checkpoint` does without reentrance.

    Attributes:
        complete: whether the second run has come to the last tensor that the graph needs.
        kinds: the kinds of the graph's nodes.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature, self.complete = signature, False
        self.kinds: set[type] = set()
        self._places: list[weakref.ref[Recomputed]] = []
        self._whole = False
        self._device: torch.device | None = None
        self._next = 0  # number of the tensor that the second run saves next; -1 after it has differed from the first

    @contextlib.contextmanager
    def first(self, device: torch.device | None = None) -> Iterator[None]:
        """A context for the first run, in which the graph holds what it saves; with `device`, looks at its streams."""
        if device is not None and device.type not in ("cpu", "meta"):
            self._device, self._stream = device, _stream(device)
        before = waiting.begun()
        with torch.autograd.graph.saved_tensors_hooks(self._place, self._taken):
            yield
        self._whole |= waiting.begun() != before

    def short(self) -> bool:
        """Whether the second run of such a function may end early.

        It may not if ranks meet in it, since one rank's graph may need a tensor behind a collective and another's none;
        if a node of the graph may read what no hook sees; if the function differentiates, in an order that may differ
        the next time; or if it uses a stream for which it may wait at its end.
        """
        return not self._whole and autograd.native(self.kinds)

    def empty(self) -> None:
        """Drops what the graph holds, after the first run."""
        alive = [place() for place in self._places]
        while alive and alive[-1] is None:
            alive.pop()
        for place in alive:
            if place is not None:
                place.tensor = None
        self._places, self.complete = self._places[: len(alive)], not alive

    @contextlib.contextmanager
    def second(self) -> Iterator[None]:
        """A context for the second run, which ends as soon as it is complete, and not before if it differs."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._fill, self._taken):
                yield
        except _Complete:
            pass
        except Exception:
            if not self.complete:  # else the function has wrapped the one above
                raise

    def _place(self, x: Tensor) -> Recomputed:
        if self._device is not None and _stream(self._device) != self._stream:
            self._whole = True
        place = Recomputed(x.detach())
        self._places.append(weakref.ref(place))
        return place

    def _fill(self, x: Tensor) -> Recomputed:
        if self.complete:
            raise _Complete
        place = None if self._next < 0 else self._places[self._next]()
        if place is None:  # the graph does not need it, or another one
            place = Recomputed(x.detach())
        elif place.shape == x.shape and place.dtype == x.dtype:
            place.tensor, place.version = x.detach(), x._version
        else:
            self._next = -1
            place = Recomputed(x.detach())
        if self._next < 0:
            return place
        self._next += 1
        if self._next == len(self._places):
            self.complete = True
            raise _Complete
        return place

    def _taken(self, place: Recomputed) -> Tensor:
        x = place.tensor
        self._whole = True  # in the first run, by the function itself
        if x is None:  # the gradient is not asked for by the stage's own backward
            raise escaped(self.signature.stage)
        if x._version != place.version:
            raise RuntimeError(modified(self.signature.name, x))
        return x


def recomputing(signature: Signature) -> Recomputing | None:
    """How a run whose graph is not kept may end early in backward; None if it should not.

    Taking what a run saves costs the host some time: more than the end of a small stage takes.
    """
    possible = signature.options.remat is True and signature.shortens is not False and signature.numel >= SMALL
    return Recomputing(signature) if possible and _takes() else None


def _takes() -> bool:
    """Whether hooks for saved tensors work here, and nobody else's are active."""
    return autograd.saved_tensors_hooks_allowed() and _around() is None


def _stream(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device)


def discarding(stage: str) -> Any:
    """A context in which autograd saves nothing: its graph only shows what depends on what."""

    def gone(_: Any) -> Tensor:
        raise escaped(stage)

    return torch.autograd.graph.saved_tensors_hooks(lambda x: None, gone)


def saved_tensor_hooks(signature: Signature, own: set[int], leave: Offloading | None, transformed: bool) -> Any:
    """A context for what autograd saves of a stage; None if nothing leaves and there are no hooks around."""
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
    """As `saved_tensor_hooks`, for a call's arguments, if no hooks are active around it."""
    if not autograd.saved_tensors_hooks_allowed() or _around() is not None:
        return contextlib.nullcontext()
    return SavedTensorHooks(signature.name, own, None, leave).context()


def _around() -> Any:
    """The hooks that others have activated around a call."""
    hooks = autograd.saved_tensors_hooks()
    ours = hooks is not None and isinstance(getattr(hooks[0], "__self__", None), (SavedTensorHooks, Recomputing))
    return None if ours else hooks
