"""What stands in a module in place of parameters that were taken out, and how values get there for a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from shardfn.compat import autograd

_ATTRIBUTES = (
    "shape", "ndim", "requires_grad", "layout", "is_sparse", "is_nested", "is_quantized", "is_leaf", "grad_fn",
    "is_meta", "is_cuda", "is_cpu", "itemsize", "nbytes",
)  # fmt: skip
_DATA, _DEVICE, _DTYPE, _GRADIENT = (getattr(Tensor, name).__get__ for name in ("data", "device", "dtype", "grad"))
_KNOWN = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.stride, Tensor.is_contiguous, Tensor.requires_grad_, Tensor.__hash__, Tensor.__len__,
}  # fmt: skip


class Running(threading.local):
    """The call of a shell that this thread is in, and the stage of it that runs."""

    now: Any = None
    unit: Any = None


class Place:
    """Where the parameters of one shell are, and in which dtype its modules meet them; changes from call to call."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self.device, self.dtype, self.running = device, dtype, Running()

    def __deepcopy__(self, memo: Any) -> Place:
        return self


class Placeholder(nn.Parameter):
    """Knows shape, dtype, device and name of a parameter, and refuses to be computed with.

    It has the attributes that somebody gave to the parameter, which are in `given`.
    """

    path: str
    owner: str
    place: Place
    given: dict[str, Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers what is known, and raises RuntimeError at whatever needs values."""
        self: Any = args[0] if args else None
        if isinstance(self, Placeholder):
            if func == _DEVICE:
                return self.place.device
            if func == Tensor.detach or func == _DATA:
                return self  # a state_dict() asks for names and shapes
            with torch._C.DisableTorchFunctionSubclass():
                if func == _DTYPE:
                    own = func(self)
                    return self.place.dtype if self.place.dtype is not None and own.is_floating_point else own
                if func == _GRADIENT or (func == Tensor.requires_grad_ and _asked(args, kwargs) != self.requires_grad):
                    raise RuntimeError(self._settled(func))
                if func in _KNOWN:
                    return func(*args, **(kwargs or {}))
        found = (x for x in optree.tree_leaves((args, kwargs or {})) if isinstance(x, Placeholder))
        self = next(found)
        by = getattr(func, "__name__", func)
        if autograd.inside_backward():
            raise RuntimeError(
                f"{self.path} is read in backward by {by}, after its stage has run, as "
                f"torch.utils.checkpoint inside of it does: leave the checkpointing out of the module, and pass "
                f"remat=True to functional"
            )
        if self.place.running.now is None:
            raise RuntimeError(
                f"{self.path} was taken out of this module, which has no value for {by}: call the function that "
                f"`functional` returned, model(params, ...), with method= for other methods than forward; the values "
                f"are in params, and model.state_dict(params) or interop.save_pretrained give them these names"
            )
        where = f"stage {self.owner!r}" if self.owner else "the model's call"
        raise RuntimeError(
            f"{self.path} is read outside of {where}, by {by}: its values are among the "
            f"parameters that the model was called with, not in the module. Add it to loose=[{self.path!r}], or make "
            f"one stage of a module that holds all who read it"
        )

    def _settled(self, func: Any) -> str:
        if func == _GRADIENT:
            return (
                f"{self.path} was taken out of this module, and gets no gradient here: gradients are what "
                f"sf.value_and_grad returns, and shardfn's optimizers take them, not those of torch.optim"
            )
        return (
            f"{self.path} was taken out of this module, with requires_grad={self.requires_grad}: call requires_grad_ "
            f"before `functional`, or pass frozen=[...] to shard"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({self.path}, {tuple(self.shape)})"

    def __deepcopy__(self, memo: Any) -> Placeholder:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self.path} was taken out of its module: save the parameters, not the module")


def _asked(args: Any, kwargs: Any) -> bool:
    """The argument of `requires_grad_`."""
    return bool(args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True))


def placeholder(parameter: Tensor, path: str, owner: str, place: Place) -> Placeholder:
    """Of a parameter.

    Args:
        parameter: of which shape, dtype and need of a gradient are kept.
        path: its name in the whole module.
        owner: the stage that has it; "" for what all may read.
        place: of the shell.
    """
    made = Placeholder(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    made.path, made.owner, made.place, made.given = path, owner, place, dict(vars(parameter))
    return made


class Slot(NamedTuple):
    """A place of the module that holds a parameter or a buffer.

    Attributes:
        holder: a dict of the module's, or a list.
        at: its key there.
        key: of the value, in what a call is given.
    """

    holder: Any
    at: Any
    key: str


@dataclass
class Part:
    """A stage's, or what is loose.

    Attributes:
        path: of the module; "" for what is loose.
        module: that is the stage.
        own: places of parameters that it alone has; keys are names without the path.
        shared: of those that others read, too; keys are whole names.
        buffers: of the stage, and for what is loose of the whole module; keys are whole names.
    """

    path: str
    module: nn.Module
    own: list[Slot] = field(default_factory=list)
    shared: list[Slot] = field(default_factory=list)
    buffers: list[Slot] = field(default_factory=list)

    def shared_keys(self) -> tuple[str, ...]:
        """Names of what others read, too, each once."""
        return tuple(dict.fromkeys(slot.key for slot in self.shared))


@contextlib.contextmanager
def placed(slots: Sequence[Slot], values: Sequence[Any]) -> Iterator[None]:
    """Values in their places, while the block runs, with the attributes that somebody gave to the parameters."""
    before = [holder[at] for holder, at, _ in slots]
    for (holder, at, _), value, there in zip(slots, values, before, strict=True):
        if type(there) is Placeholder and there.given:
            vars(value).update(there.given)
        holder[at] = value
    try:
        yield
    finally:
        for (holder, at, _), value in zip(slots, before, strict=True):
            holder[at] = value


def left_in(part: Part, slot: Slot) -> Any:
    """What is in the place of a parameter after the module ran.

    A parametrisation that forward registers and removes, as peft's of experts, puts a plain tensor among the buffers
    afterwards, where nobody would replace it: it leaves them here.
    """
    if not isinstance(slot.holder, dict) or slot.at in slot.holder:
        return slot.holder[slot.at]
    owner = next((m for m in part.module.modules() if m._parameters is slot.holder), None)
    return None if owner is None else owner._buffers.pop(slot.at, None)
