"""Quantized parameters as pytree nodes: one leaf of bytes, and the format, shape and dtype."""

from __future__ import annotations

import math
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.compat import pytrees
from shardfn.mesh.selectors import Which, chosen
from shardfn.mesh.spec import dotted, is_dtensor, places_itself
from shardfn.quant.formats import Format, check_format
from shardfn.quoting import listed
from shardfn.tracebacks import api_boundary


class Packed:
    """A quantized parameter: a pytree node with one leaf, whose path is the parameter's own.

    `shardfn.shard` cuts its bytes like any others, and a stage's function gets the decoded parameter.

    Attributes:
        values: `[format.nbytes(numel)]`, uint8.
        format: the format of the bytes.
        shape: the shape of the parameter.
        dtype: its dtype before quantization, and in a stage's function unless another is asked for.
    """

    __slots__ = ("dtype", "format", "shape", "values")

    def __init__(self, values: Any, format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.values, self.format, self.shape, self.dtype = values, format, tuple(shape), dtype

    @property
    def numel(self) -> int:
        """The number of elements of the parameter."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return self.format.nbytes(self.numel)

    @property
    def meant(self) -> str:
        """Format and shape, for comparisons and messages."""
        return f"{self.format} of {list(self.shape)}"

    @property
    def is_meta(self) -> bool:
        """Whether its bytes are on the meta device, without values."""
        return bool(self.values.is_meta)

    def decoded(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The decoded parameter, in its own dtype or another; on a CPU, in `out [numel]` of that dtype.

        Raises:
            TypeError: its leaf no longer holds bytes, but something computed from them.
        """
        if self.values.dtype is not torch.uint8:
            raise TypeError(
                f"{self} has {self.values.dtype} in place of its bytes, which are codes, not numbers to compute with. "
                f"Leave quantized parameters unchanged, such as by shardfn.shards.partition"
            )
        if out is not None:
            return self.format.decode_into(out, self.values).view(self.shape)
        return self.format.decode(self.values, self.numel, dtype or self.dtype).view(self.shape)

    def having(self, values: Any) -> Packed:
        """A parameter with other bytes of the same format, shape and dtype."""
        return Packed(values, self.format, self.shape, self.dtype)

    def __repr__(self) -> str:
        prefix = "None, " if self.values is None else ""  # in a tree of gradients: it has none
        return f"Packed({prefix}{self.format}, {list(self.shape)}, {str(self.dtype).removeprefix('torch.')})"


def pack(x: Tensor, format: Format) -> Packed:
    """Quantizes a parameter.

    Args:
        x: a tensor of floating-point numbers; if it is on the meta device, so are the bytes.
        format: such as `nf4()`.

    Raises:
        TypeError: the numbers are not floating-point.
        ValueError: numbers are not finite, or too large for scales in float32.
    """
    if not x.is_floating_point():
        raise TypeError(f"{format} is for floating-point numbers, not for {x.dtype}")
    if x.is_meta:
        values = torch.empty(format.nbytes(x.numel()), dtype=torch.uint8, device="meta")
    else:
        values = format.encode(x.reshape(-1))
        if not bool(torch.isfinite(format.scales(values, x.numel()) * format.code.most).all()):
            raise ValueError(
                "it has numbers that are not finite, or too large for scales in float32, and cannot be quantized"
            )
    return Packed(values, format, tuple(x.shape), x.dtype)


@api_boundary
def quantize(tree: Any, format: Format, names: Which | None = None) -> Any:
    """Quantizes some parameters of a tree.

    Args:
        tree: a pytree of tensors.
        format: such as `nf4(double=True)`.
        names: which ones: patterns that match whole paths, or a function of a path and a shape. Default: those of two
            or more dimensions with at least as many elements as a block.

    Returns:
        The tree with a `Packed` in place of each of them. Like all integers, they have no gradient.

    Raises:
        ValueError: a pattern matches nothing, or nothing is chosen; a chosen parameter has fewer elements than a block,
            or numbers that are not finite.
        TypeError: a chosen parameter is not floating-point, or is quantized already; a parameter is a shard; `format`
            is no format; `names` are neither patterns nor a function.

    Example:
        ``params = shard(quantize(tree, nf4()), mesh, full_shard("shard"))``
    """
    check_format(format, "quantize: format", optional=False)
    rule = chosen(names, "names") if names is not None else None
    paths, leaves, spec = _paths_and_values(
        "quantize", tree, "quantize parameters before they are cut, by shard or load"
    )
    unused = rule.unused(paths) if rule else set()
    if unused:
        raise ValueError(f"quantize: no parameter matches {listed(map(repr, sorted(unused)))}")
    if rule and not any(rule(path, _shape(x)) for path, x in zip(paths, leaves, strict=True)):
        raise ValueError(f"quantize: {rule.as_text()} chooses none of the tree's parameters")
    if not rule and not any(_long(x, format) for x in leaves):
        raise ValueError(
            f"quantize: there is no tensor with two or more dimensions and at least {format.block} floating-point "
            f"numbers, a block: pass a tree of parameters, such as model.tree, or choose different names="
        )
    packed_by_id: dict[int, Packed] = {}  # a tensor at several places stays shared
    values = [
        _pack_leaf(path, x, format, packed_by_id) if (rule(path, _shape(x)) if rule else _long(x, format)) else x
        for path, x in zip(paths, leaves, strict=True)
    ]
    return optree.tree_unflatten(spec, values)


def dequantize(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Decodes the quantized parameters of a tree, to their own dtypes or another.

    Args:
        tree: whole parameters.
        dtype: of floating-point numbers; default: each parameter's own.

    Raises:
        TypeError: the tree has shards, of which a rank has only a part; the dtype is not a floating-point one.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"dequantize: dtype must be a floating torch.dtype, or None for each parameter's, got {dtype!r}"
        )
    _, leaves, spec = _paths_and_values("dequantize", tree, "decode whole parameters, which unshard makes")
    return optree.tree_unflatten(spec, [x.decoded(dtype) if is_packed(x) else x for x in leaves])


def is_packed(x: Any) -> bool:
    """Whether it is a quantized parameter."""
    return type(x) is Packed


def _paths_and_values(where: str, tree: Any, instead: str) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """The paths and values of a tree, and its structure.

    Raises:
        TypeError: some values are shards.
    """
    accessors, leaves, spec = optree.tree_flatten_with_accessor(
        tree, is_leaf=lambda x: is_packed(x) or places_itself(x)
    )
    paths = [dotted(accessor) for accessor in accessors]
    for path, x in zip(paths, leaves, strict=True):
        if places_itself(x) or is_dtensor(x):
            raise TypeError(f"{where}: {path or 'the tree'} is a {type(x).__name__}, one rank's part: {instead}")
    return paths, leaves, spec


def _pack_leaf(path: str, x: Any, format: Format, packed_by_id: dict[int, Packed]) -> Packed:
    if is_packed(x):
        raise TypeError(f"quantize: {path} is already quantized, {x}")
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize: {path} is of type {type(x).__name__}, not a tensor")
    if x.numel() < format.block:
        raise ValueError(
            f"quantize: {path} has shape {list(x.shape)}, {x.numel()} numbers, fewer than the {format.block} of a "
            f"block. Leave it out"
        )
    if id(x) not in packed_by_id:
        try:
            packed_by_id[id(x)] = pack(x, format)
        except (TypeError, ValueError) as error:
            raise type(error)(f"quantize: {path}: {error}") from None
    return packed_by_id[id(x)]


def _long(x: Any, format: Format) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and x.numel() >= format.block


def _shape(x: Any) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, (Tensor, Packed)) else None


pytrees.register(
    Packed,
    lambda packed: ((packed.values,), (packed.format, packed.shape, packed.dtype), ("",)),
    lambda meant, children: Packed(*children, *meant),
)
