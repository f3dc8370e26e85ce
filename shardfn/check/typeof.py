"""What type a value has in a checked call, as text."""

from __future__ import annotations

import torch
from torch import Tensor

from shardfn.check import recording
from shardfn.check.varying import varying
from shardfn.compat import functorch

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def typeof(x: Tensor) -> str:
    """The dtype and shape of a value, and the mesh axes along which it varies.

    That is known inside a checked call of `shard_map`, which is the first one for each kind of arguments, on every
    rank by itself: nothing is exchanged. What only other ranks' bits can tell, of a tensor that is closed over say,
    is known when the call has ended, and counts as the same on all ranks until then.

    Args:
        x: a tensor.

    Returns:
        `f32[8, 64]{varying: shard, tensor}`; `f32[8, 64]` for a value that is the same on all ranks;
        `f32[8, 64]{not followed}` where no call is being checked.

    Raises:
        TypeError: something that is not a tensor.

    Example:
        ``print(sf.typeof(loss))``
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"typeof takes a tensor, not {type(x).__name__}")
    short = _SHORT.get(x.dtype, str(x.dtype).removeprefix("torch."))
    said = f"{short}[{', '.join(map(str, x.shape))}]"
    recorder = recording.current()
    if recorder is None:
        return f"{said}{{not followed}}"
    node = recorder.values.node_of(functorch.unwrapped(x))
    names = recorder.trace.names(varying(recorder.trace, {}).along[node])
    return f"{said}{{varying: {', '.join(names)}}}" if names else said
