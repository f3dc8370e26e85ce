"""Where what autograd saves of a stage goes: away from the device, to the hooks around the stage, or nowhere."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn.compat import autograd, dynamo, functorch
from shardfn.stages.away import Away, View
from shardfn.stages.offloading import Offload
from shardfn.stages.signature import Signature
from shardfn.stages.tape import StageRun
from shardfn.tiers import placing, tensors
from shardfn.tiers.files import File
from shardfn.transforms.step import escaped

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("shardfn")


class Offloading:
    """What of one run leaves the device. Called with a tensor that autograd saves; None for one that stays."""

    def __init__(self, away: Away, asked: Offload, file: File | None, run: StageRun) -> None:
        self.away, self.asked, self.file = away, asked, file
        self.left = run.away

    def __call__(self, x: Tensor) -> View | None:
        """What becomes of it."""
        view = self.away.leave(x, self.asked.above, self.file) if self._movable(x) else None
        if view is not None:
            self.left.append(weakref.ref(view.activation))
        return view

    def lets_go(self, x: Tensor) -> bool:
        """Whether an argument of the stage is not to be held by its graph."""
        return self._movable(x) and x.nbytes >= max(self.asked.above, 1)

    def _movable(self, x: Tensor) -> bool:
        """Whether a tensor is ordinary memory of the device."""
        plain = x.layout is torch.strided and not functorch.wrapped(x)
        plain = plain and (
            type(x) in (Tensor, torch.nn.Parameter) or (self.file is None and type(x) is dynamo.fake_tensors())
        )
        return plain and x.device == self.away.device and not x.is_neg() and tensors.place_of(x.detach()) is None


def offloading(away: Away, mesh: Callable[[], DeviceMesh], run: StageRun) -> Offloading | None:
    """What of a run leaves; None if nothing does.

    Raises:
        ValueError: it goes to disk, and nobody has said where.
    """
    asked, name = run.signature.options.remat, run.signature.name
    if not isinstance(asked, Offload):
        return None
    if not asked.moves(away.device.type):
        _offloads_nothing(name)
        return None
    if asked.to == "host":
        return Offloading(away, asked, None, run)
    try:
        return Offloading(away, asked, placing.file_of(mesh(), "activations"), run)
    except ValueError as error:
        raise ValueError(
            f'stage {name} ({run.signature.stage!r}): remat=offload(to="disk"), but nobody has said where: pass a '
            f"folder on a local disk, make_mesh(..., scratch=folder), or set {placing.SCRATCH}"
        ) from error


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
            shape = x.shape
            raise RuntimeError(
                f"stage {self.name}: a tensor of shape {tuple(shape)} that its backward needs has been "
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
    return hooks if allowed else _enabled(hooks)


def argument_hooks(signature: Signature, own: set[int], leave: Callable[[Tensor], View | None]) -> Any:
    """The same for what is saved of a call's arguments, where no hooks around it want that."""
    if not autograd.saved_tensors_hooks_allowed() or _around() is not None:
        return contextlib.nullcontext()
    return SavedTensorHooks(signature.name, own, None, leave).context()


@contextlib.contextmanager
def _enabled(hooks: Any) -> Iterator[None]:
    with autograd.saved_tensors_hooks_enabled(), hooks:
        yield


def _around() -> Any:
    """The hooks that somebody else has put around a call."""
    found = autograd.saved_tensors_hooks()
    own = found is not None and isinstance(getattr(found[0], "__self__", None), SavedTensorHooks)
    return None if own else found


@functools.cache
def _offloads_nothing(name: str) -> None:
    """Says so once for each stage."""
    _log.warning(
        'stage %s: remat="offload" keeps activations in the memory of the host, where they are anyway on a mesh of '
        'CPUs: it changes nothing here. remat=True saves memory everywhere, and remat=shardfn.offload("disk") too',
        name,
    )
