"""Saved-tensor hooks of a call: they save the offset of a gathered parameter in place of the tensor.

So autograd does not keep the gathered buffer alive, and backward takes the same view of the buffer that it gathers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.compat import autograd
from shardfn.quant.packed import Packed
from shardfn.tiers.activations import View

if TYPE_CHECKING:
    from shardfn.stages.entry_exit import Call


class DecodedParameter:
    """A quantized parameter that a call has decoded: its format, its bytes and, while the function runs, the result."""

    __slots__ = ("form", "source", "x")

    def __init__(self, form: Packed, source: GatheredView | Tensor, x: Tensor | None) -> None:
        self.form, self.source, self.x = form, source, x


class GatheredView:
    """A view of gathered parameters: the value that hooks save in place of a tensor.

    It has its own class to be told apart from the values of users' hooks, which may be anything.

    Attributes:
        call: the call whose parameters it views.
        decoded: the decoded parameter that it views; None if it views the gathered buffer.
        offset: index of its first element there.
        noted: in a checked call, the recorder, which knows along which axes a parameter varies, and the node there.
    """

    __slots__ = ("call", "decoded", "dtype", "noted", "offset", "shape", "stride")

    def __init__(
        self,
        call: Call,
        decoded: DecodedParameter | None,
        x: Tensor,
        offset: int,
        recorder: recording.TraceRecorder | None,
    ) -> None:
        self.call, self.decoded, self.dtype = call, decoded, (dtype := x.dtype)
        self.shape, self.stride, self.offset = x.shape, x.stride(), offset // dtype.itemsize
        self.noted = None if recorder is None else (recorder, recorder.values.node_of(x))

    def rebuilt_view(self) -> Tensor:
        """The tensor, as a view of the parameters that backward has gathered."""
        call, decoded = self.call, self.decoded
        if decoded is not None:
            full = call.decode_again(decoded).view(-1).view(self.dtype)
        elif (full := call.flat.get(self.dtype)) is None:  # type: ignore[assignment]
            full = call.numbers(self.dtype)
        elif call.gathered is not None and call.gathered.stream is not None:
            call.gathered.wait()  # this node may run on a different stream than the one that has waited
        x = full.as_strided(self.shape, self.stride, self.offset)
        if self.noted is not None and self.noted[0] is recording.current():
            self.noted[0].values.keep(x, self.noted[1])
        return x


def owns(call: Call, x: Tensor) -> bool:
    """Whether a tensor is memory of a call's parameters, which other calls may use after it."""
    return autograd.memory_of(x) in call.owned


def hooks(call: Call, leave: Any) -> Any:
    """A context with the saved-tensor hooks of a call.

    Parameters are saved as `GatheredView`, offloaded activations as `View`, other tensors as the surrounding hooks save
    them, or else as the tensor and its version: autograd checks no versions where hooks are active.
    """
    around, kind, strided = autograd.saved_tensors_hooks(), Tensor, torch.strided
    recorder = recording.current()
    low = high = 0  # a test of addresses is faster than `call.place`; valid as long as the buffer is alive
    may_gather = call.gathered is not None and call.again is not False
    if may_gather and type(bytes_ := call.gathered.bytes) is Tensor and not call.signature.packed:  # type: ignore[union-attr]
        low = bytes_.data_ptr()
        high = low + bytes_.nbytes

    def pack(x: Tensor) -> Any:
        if high and type(x) is kind and x.layout is strided:
            if low <= (address := x.data_ptr()) < high and not ((x.dtype.is_complex and x.is_conj()) or x.is_neg()):
                call.saved = True
                if not call.keeps:
                    return GatheredView(call, None, x, address - low, recorder)
            elif address == 0 and (place := call.place(x)) is not None:  # without elements
                return place
        elif (place := call.place(x)) is not None:
            return place
        if leave is not None and not owns(call, x) and (view := leave(x)) is not None:
            return view
        return (x.detach(), x._version) if around is None else around[0](x)

    def unpack(packed: Any) -> Tensor:
        if type(packed) is GatheredView:
            return packed.rebuilt_view()
        if leave is not None and type(packed) is View:
            x, version = packed.witness, packed.version
            if x._version == version:
                return packed.on_device()
        elif around is not None:
            return around[1](packed)
        else:
            x, version = packed
            if x._version == version:
                return x
        raise RuntimeError(autograd.modified(x, version))

    return autograd.hooked(pack, unpack)
