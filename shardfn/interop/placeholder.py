"""Placeholders for parameters that were taken out of a module, and their replacement by values during a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from shardfn.compat import autograd, dispatch

_ATTRIBUTES = (
    "shape", "ndim", "requires_grad", "layout", "is_sparse", "is_nested", "is_quantized", "is_leaf", "grad_fn",
    "is_meta", "is_cuda", "is_cpu", "itemsize", "nbytes",
)  # fmt: skip
_DATA, _DEVICE, _DTYPE, _GRADIENT = (getattr(Tensor, name).__get__ for name in ("data", "device", "dtype", "grad"))
_KNOWN = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.stride, Tensor.is_contiguous, Tensor.requires_grad_, Tensor.__hash__, Tensor.__len__,
}  # fmt: skip


_ATTACHING = {
    "__set__",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
    "custom_function_call",
    "grad",
}
"""Operations that would be those of a copy only."""

HOOKED = "_g", "_v", "_u", "_orig"
"""Ends of the parameters from which a hook of torch.nn.utils makes a weight before forward, outside of a stage."""


class ShellCall(threading.local):
    """The call of a shell that this thread is in, and the stage that it runs."""

    now: Any = None
    unit: Any = None


class ShellPlacement:
    """The device of one shell's parameters, which may change with each call, and the dtypes in which modules get them.

    `dtypes` are those of stages, by path, where they differ from `dtype`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self.device, self.dtype, self.running = device, dtype, ShellCall()
        self.dtypes: dict[str, torch.dtype | None] = {}

    def reveals(self) -> bool:
        """Whether values of stages may be read now: in a call of the shell, in code outside of its stages."""
        return self.running.now is not None and self.running.unit is None

    def __deepcopy__(self, memo: Any) -> ShellPlacement:
        return self


class Placeholder(nn.Parameter):
    """Knows shape, dtype, device and name of a parameter, and raises when it is computed with.

    It has the attributes that were set on the parameter, also in `given`.
    """

    path: str
    owner: str
    place: ShellPlacement
    given: dict[str, Any]
    refuses_operations = True

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raises RuntimeError: below `__torch_function__` a value would have no gradient."""
        self = next(x for x in optree.tree_leaves((args, kwargs or {})) if isinstance(x, Placeholder))
        raise RuntimeError(given_as_it_is(self.path))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns known facts, and raises RuntimeError for whatever needs values."""
        self: Any = args[0] if args else None
        if isinstance(self, Placeholder):
            if func == _DEVICE:
                return self.place.device
            if func == Tensor.detach or func == _DATA:
                value = revealed(self)
                return self if value is self else value.detach()  # state_dict() asks, for names and shapes
            with torch._C.DisableTorchFunctionSubclass():
                if func == _DTYPE:
                    dtype, cast = func(self), self.place.dtypes.get(self.owner, self.place.dtype)
                    return cast if cast is not None and dtype.is_floating_point else dtype
                if func == _GRADIENT or (
                    func == Tensor.requires_grad_ and _grad_argument(args, kwargs) != self.requires_grad
                ):
                    raise RuntimeError(self._settled(func))
                if func in _KNOWN:
                    return func(*args, **(kwargs or {}))
        placeholders = (x for x in optree.tree_leaves((args, kwargs or {})) if isinstance(x, Placeholder))
        self = next(placeholders)
        operation = getattr(func, "__name__", func)
        if autograd.inside_backward():
            raise RuntimeError(
                f"{self.path} is read in backward by {operation}, after its stage has run, as "
                f"torch.utils.checkpoint inside of it does: leave the checkpointing out of the module, and pass "
                f"remat=True to functional"
            )
        if operation not in _ATTACHING and self.place.reveals():
            args, kwargs = optree.tree_map(revealed, (args, kwargs or {}))
            if not any(isinstance(x, Placeholder) for x in optree.tree_leaves((args, kwargs))):
                return func(*args, **kwargs)
        if self.place.running.now is None:
            raise RuntimeError(
                f"{self.path} was taken out of this module, which has no value for {operation}: call the function that "
                f"`functional` returned, model(params, ...), with method= for other methods than forward. Read values "
                f"from model.state_dict(params)"
            )
        where = f"stage {self.owner!r}" if self.owner else "the model's call"
        normed = self.path.endswith(HOOKED)
        hook = " (a hook of torch.nn.utils? torch.nn.utils.parametrizations has none)" if normed else ""
        raise RuntimeError(
            f"{self.path} is read outside of {where}, by {operation}{hook}: its values are in the params of "
            f"the call, not in the module. Add it to unstaged=[{self.path!r}], or make a module with all its readers "
            f"one stage"
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
        if self.place.running.now is not None and torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError(
                f"{self.path} is copied in forward: torch's copy would be a separate parameter, and this one the "
                f"same parameter, with its gradient. Copy under torch.no_grad(), or compute with the module itself"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self.path} was taken out of its module: save the parameters, not the module")


def given_as_it_is(path: str) -> str:
    """Says what to do where a transform or a Function holds a placeholder, and hides what computes with it."""
    return (
        f"{path} is given to a transform of torch.func, or to a torch.autograd.Function, outside of its stage, where "
        f"it would get no gradient: give it a copy, {path.rpartition('.')[2]}.clone()"
    )


def revealed(x: Any) -> Any:
    """The value of a placeholder read outside its stage, if the call can gather it; else `x`."""
    return x.place.running.now.reveal(x) if isinstance(x, Placeholder) and x.place.reveals() else x


def _grad_argument(args: Any, kwargs: Any) -> bool:
    """The argument of a call of `requires_grad_`."""
    return bool(args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True))


def placeholder(parameter: Tensor, path: str, owner: str, place: ShellPlacement) -> Placeholder:
    """Makes the placeholder of a parameter.

    Args:
        parameter: whose shape, dtype and requires_grad are kept.
        path: its name in the whole module.
        owner: path of the stage that has it; "" for a loose parameter.
        place: of the shell.
    """
    if dispatch.fake(parameter):  # of a pretended device, whose attributes are those of its mode
        with dispatch.outside_modes():
            meta, attributes = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), dict[str, Any]()
    else:
        meta, attributes = torch.empty_like(parameter, device="meta"), dict(vars(parameter))
    result = Placeholder(meta, requires_grad=parameter.requires_grad)
    vars(result).update(attributes)
    result.path, result.owner, result.place, result.given = path, owner, place, attributes
    return result


class Slot(NamedTuple):
    """A place in a module that holds a parameter or a buffer.

    Attributes:
        holder: a dict of the module's, or a list.
        at: the key or index in it.
        key: name of the value, in the arguments of a call.
    """

    holder: Any
    at: Any
    key: str


@dataclass
class ModulePart:
    """The places of a stage, or of what is loose.

    Attributes:
        path: of the module; "" for what is loose.
        module: of the stage.
        own: places of parameters that only this part reads; keys are names without the path.
        shared: places of parameters that others read, too; keys are full names.
        buffers: places of buffers, for what is loose those of the whole module; keys are full names.
    """

    path: str
    module: nn.Module
    own: list[Slot] = field(default_factory=list)
    shared: list[Slot] = field(default_factory=list)
    buffers: list[Slot] = field(default_factory=list)

    def shared_keys(self) -> tuple[str, ...]:
        """Names of the parameters that others read, too, without duplicates."""
        return tuple(dict.fromkeys(slot.key for slot in self.shared))


@contextlib.contextmanager
def placed(slots: Sequence[Slot], values: Sequence[Any]) -> Iterator[None]:
    """A context with values in their places, carrying the attributes that were set on the parameters."""
    before = [holder[attr] for holder, attr, _ in slots]
    for (holder, attr, _), value, replaced in zip(slots, values, before, strict=True):
        if type(replaced) is Placeholder and replaced.given:
            vars(value).update(replaced.given)
        holder[attr] = value
    try:
        yield
    finally:
        for (holder, attr, _), value in zip(slots, before, strict=True):
            holder[attr] = value


def left_in(part: ModulePart, slot: Slot) -> Any:
    """The value in a parameter's place after the module ran.

    If a parametrisation was registered and removed in forward, as peft does for experts, torch leaves a plain tensor
    among the buffers, which would stay there; it is removed here.
    """
    if not isinstance(slot.holder, dict) or slot.at in slot.holder:
        return slot.holder[slot.at]
    owner = next((m for m in part.module.modules() if m._parameters is slot.holder), None)
    return None if owner is None else owner._buffers.pop(slot.at, None)
