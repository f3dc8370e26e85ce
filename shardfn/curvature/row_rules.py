"""Rules for ops whose per-row gradients have factors, so that norms need no gradients.

A rule gets the arguments of a call, of which at least one is a row and one is computed from parameters alone. It
returns NotImplemented for what it does not know for certain; the general way then takes over.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfn.curvature.row_gradients import Dense, ExampleGradient, Outer, Picked, row_slices

if TYPE_CHECKING:
    from shardfn.curvature.rows import RowsMode


# --- products with a matrix ---


@dataclass(frozen=True)
class Product:
    """`x @ w`, of `[rows, *, m]` and `[m, n]`."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """The product."""
        return x @ w

    def back(self, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        """The gradient of x."""
        return g @ w.T

    def form(self, x: Tensor, g: Tensor) -> ExampleGradient:
        """Returns the per-row gradients of w."""
        tokens = math.prod(x.shape[1:-1])
        a, b = (y.reshape(len(y), 1, tokens, y.shape[-1]) for y in (x, g))
        return Outer(a, b, (x.shape[-1], g.shape[-1]))


def linear(mode: RowsMode, input: Any, weight: Any, bias: Any = None) -> Any:
    """`F.linear`."""
    if not (mode.row(input) and mode.shared(weight) and weight.ndim == 2 and _are_real(input, weight)):
        return NotImplemented
    y = mode.by(Product(), input, weight, (1, 0))
    return y if bias is None else mode.call(torch.add, y, bias)


def matmul(mode: RowsMode, input: Any, other: Any) -> Any:
    """`x @ w`, and `w @ x` for a vector or a matrix x."""
    if not (isinstance(input, Tensor) and isinstance(other, Tensor) and _are_real(input, other)):
        return NotImplemented
    if mode.row(input) and mode.shared(other) and input.ndim >= 1:
        if other.ndim == 2:
            return mode.by(Product(), input, other, (0, 1))
        if input.ndim == other.ndim > 2 and input.shape[:-2] == other.shape[:-2]:
            heads = "abcdefgh"[: input.ndim - 2]
            return einsum(mode, f"{heads}ti,{heads}ij->{heads}tj", input, other)
    if mode.shared(input) and mode.row(other) and input.ndim == 2:
        if other.ndim == 1:
            return mode.by(Product(), other, input, (1, 0))
        if other.ndim == 2:
            return mode.by(Product(), other.T, input, (1, 0)).T
    return NotImplemented


def addmm(mode: RowsMode, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`torch.addmm` without factors."""
    if (beta, alpha) != (1, 1):
        return NotImplemented
    y = matmul(mode, mat1, mat2)
    return y if y is NotImplemented else mode.call(torch.add, y, input)


@dataclass(frozen=True)
class Contraction:
    """An einsum of two operands, `[rows, *]` and a tensor, whose letters are these.

    Attributes:
        x: letters of the rows' operand.
        w: letters of the tensor: `heads`, `ins` and `outs`, in this order.
        y: letters of the result.
        heads: letters of all three.
        ins: letters of the operands alone.
        outs: letters of the tensor and the result alone.
        tokens: letters of the rows' operand and the result alone.
        row: a letter for the rows.
    """

    x: str
    w: str
    y: str
    heads: str
    ins: str
    outs: str
    tokens: str
    row: str

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """The result."""
        return torch.einsum(f"{self.row}{self.x},{self.w}->{self.row}{self.y}", x, w)

    def back(self, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        """The gradient of x."""
        return torch.einsum(f"{self.row}{self.y},{self.w}->{self.row}{self.x}", g, w)

    def form(self, x: Tensor, g: Tensor) -> ExampleGradient:
        """Returns the per-row gradients of the tensor."""
        sizes = dict(zip(self.x + self.y, (*x.shape[1:], *g.shape[1:]), strict=True))

        def ordered(y: Tensor, letters: str, last: str) -> Tensor:
            dims = [1 + letters.index(c) for c in self.heads + self.tokens + last]
            shape = [math.prod(sizes[c] for c in part) for part in (self.heads, self.tokens, last)]
            return y.permute(0, *dims).reshape(len(y), *shape)

        shape = tuple(sizes[c] for c in self.w)
        return Outer(ordered(x, self.x, self.ins), ordered(g, self.y, self.outs), shape)


def einsum(mode: RowsMode, equation: Any, *operands: Any) -> Any:
    """`torch.einsum` of a row and a tensor, in which each letter occurs in two places at least."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return NotImplemented
    inputs, result = equation.replace(" ", "").split("->")
    x_letters, w_letters = inputs.split(",")
    x, w = operands
    if mode.row(w) and mode.shared(x):
        x_letters, w_letters, x, w = w_letters, x_letters, w, x
    if not (mode.row(x) and mode.shared(w) and _are_real(x, w)):
        return NotImplemented
    letters = x_letters, w_letters, result
    unclear = any("." in term or len(set(term)) < len(term) for term in letters)
    sizes = [dict(zip(names, y.shape, strict=False)) for names, y in ((x_letters, x), (w_letters, w))]
    if unclear or any(sizes[0][c] != sizes[1][c] for c in set(x_letters) & set(w_letters)):
        return NotImplemented
    if any(sum(c in term for term in letters) < 2 for c in x_letters + w_letters):
        return NotImplemented
    heads = "".join(c for c in w_letters if c in x_letters and c in result)
    ins = "".join(c for c in w_letters if c in x_letters and c not in result)
    outs = "".join(c for c in w_letters if c not in x_letters)
    tokens = "".join(c for c in x_letters if c not in w_letters)
    row = next(c for c in "zyxwvutsrqponmlkjihgfedcbaABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in inputs)
    ordered = heads + ins + outs
    op = Contraction(x_letters, ordered, result, heads, ins, outs, tokens, row)
    return mode.by(op, x, w, [w_letters.index(c) for c in ordered])


# --- tables ---


@dataclass(frozen=True)
class EmbeddingRows:
    """A lookup of table rows by `[rows, *]` indices; the row `padding` has no gradient."""

    count: int
    padding: int | None = None

    def forward(self, indices: Tensor, table: Tensor) -> Tensor:
        """Looks up the table rows."""
        return table[indices]

    def form(self, indices: Tensor, g: Tensor) -> ExampleGradient:
        """Returns the per-row gradients of the table."""
        places = (indices.long() % self.count).flatten(1)
        values = g.reshape(*places.shape, -1)
        if self.padding is not None:
            values = values * (places != self.padding)[..., None]
        return Picked(places, values, (self.count, *g.shape[indices.ndim :]), self.padding)


def _picked(mode: RowsMode, table: Tensor, indices: Tensor, padding: int | None = None) -> Any:
    if (
        indices.dtype not in (torch.int64, torch.int32)
        or not _are_real(table)
        or not indices.numel()
        or not table.numel()
    ):
        return NotImplemented
    return mode.by(EmbeddingRows(len(table), padding), indices, table, range(table.ndim))


def embedding(
    mode: RowsMode,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`F.embedding`."""
    if not (mode.row(input) and mode.shared(weight)) or max_norm or scale_grad_by_freq or sparse:
        return NotImplemented
    return _picked(mode, weight, input, None if padding_idx is None else padding_idx % len(weight))


def padded_embedding(
    mode: RowsMode, input: Any, weight: Any, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """`F.embedding` of per-row tables with padding, which vmap applies to the first row only."""
    if padding_idx is None or not mode.row(weight):
        return NotImplemented
    y = F.embedding(input, weight, None, *args, **kwargs)
    return torch.where((input == padding_idx % len(weight))[..., None], y.detach(), y)


def getitem(mode: RowsMode, table: Any, index: Any) -> Any:
    """`table[tokens]`."""
    indices = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if not (isinstance(indices, Tensor) and mode.row(indices) and mode.shared(table)):
        return NotImplemented
    return _picked(mode, table, indices)


def index_select(mode: RowsMode, input: Any, dim: Any, index: Any) -> Any:
    """`torch.index_select` in the first dimension."""
    if dim != 0 or not (mode.row(index) and mode.shared(input)) or index.ndim != 1:
        return NotImplemented
    return _picked(mode, input, index)


# --- convolutions ---


@dataclass(frozen=True)
class ConvolutionWeight:
    """Per-row gradients of a convolution's weight, computed by a convolution with a group for each row."""

    x: Tensor
    g: Tensor
    op: Convolution

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.x)

    def squares(self) -> Tensor:
        """The square of each row's norm, `[rows]`."""
        numel = math.prod(self.op.shape)
        return torch.cat([Dense(self.part(rows)).squares() for rows in row_slices(self.rows, numel)])

    def part(self, rows: slice) -> Tensor:
        """The gradients of some rows."""
        return self.op.of_weight(self.x[rows], self.g[rows])

    def outer(self) -> Outer | None:
        """Returns outer products with patches of the input; None for grouped channels."""
        if self.op.groups > 1:
            return None
        a, b = self.op.patches(self.x)[:, None], self.g.movedim(2, -1).flatten(1, -2)[:, None]
        return Outer(b, a, (b.shape[-1], a.shape[-1]))


@dataclass(frozen=True)
class Convolution:
    """A convolution of `[rows, images, channels, *]`.

    Attributes:
        shape: of the weight.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """The convolution."""
        settings = self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups
        return torch.convolution(x.flatten(0, 1), w, None, *settings).unflatten(0, x.shape[:2])

    def back(self, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        """The gradient of x."""
        return self._backward(g.flatten(0, 1), x.flatten(0, 1), w, self.groups, 0).unflatten(0, x.shape[:2])

    def form(self, x: Tensor, g: Tensor) -> ExampleGradient:
        """Returns the per-row gradients of the weight."""
        return ConvolutionWeight(x, g, self)

    def patches(self, x: Tensor) -> Tensor:
        """Returns the inputs of each output element, `[rows, elements, channels * kernel]`."""
        dims = len(self.stride)
        x = F.pad(x, [n for n in reversed(self.padding) for _ in range(2)])
        for i, (n, step, dilation) in enumerate(zip(self.shape[2:], self.stride, self.dilation, strict=True)):
            x = x.unfold(3 + i, (n - 1) * dilation + 1, step)[..., ::dilation]
        return x.movedim(2, 2 + dims).flatten(-1 - dims).flatten(1, -2)

    def of_weight(self, x: Tensor, g: Tensor) -> Tensor:
        """The gradient of the weight for each row, `[rows, *shape]`."""
        rows = len(x)
        a, b = (y.transpose(0, 1).flatten(1, 2) for y in (x, g))  # [images, rows * channels, *]
        template = x.new_empty((1,)).expand(rows * self.shape[0], *self.shape[1:])
        return self._backward(b, a, template, rows * self.groups, 1).unflatten(0, (rows, self.shape[0]))

    def _backward(self, g: Tensor, x: Tensor, w: Tensor, groups: int, which: int) -> Tensor:
        mask, zeros = [which == 0, which == 1, False], [0] * len(self.stride)
        gradient: Tensor = torch.ops.aten.convolution_backward(
            g, x, w, None, self.stride, self.padding, self.dilation, False, zeros, groups, mask
        )[which]
        return gradient


def convolution(dims: int) -> Callable[..., Any]:
    """The rule of `torch.conv1d`, `conv2d` or `conv3d`."""

    def per_dim(value: Any) -> tuple[int, ...]:
        return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)

    def rule(
        mode: RowsMode, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if not (mode.row(input) and mode.shared(weight) and _are_real(input, weight)) or input.ndim != dims + 2:
            return NotImplemented
        if isinstance(padding, str):
            total_padding = [d * (n - 1) for d, n in zip(per_dim(dilation), weight.shape[2:], strict=True)]
            if padding == "same" and any(n % 2 for n in total_padding):
                return NotImplemented
            padding = tuple(n // 2 for n in total_padding) if padding == "same" else 0
        op = Convolution(tuple(weight.shape), per_dim(stride), per_dim(padding), per_dim(dilation), groups)
        y = mode.by(op, input, weight, range(weight.ndim))
        return y if bias is None else mode.call(torch.add, y, bias.reshape(-1, *(1,) * dims))

    return rule


# --- ops without parameters that have no kernel for mapped rows, or hide ops with parameters ---


def attention(
    mode: RowsMode, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """`F.scaled_dot_product_attention` of rows, which are images of one batch to it."""
    rows = [query, key, value]
    if any(not mode.row(x) or x.ndim != 4 for x in rows) or len({len(x) for x in rows}) > 1:
        return NotImplemented
    if isinstance(attn_mask, Tensor):
        if mode.shared(attn_mask) or (attn_mask.ndim == 4 and len(attn_mask) not in (1, len(query))):
            return NotImplemented
        if mode.row(attn_mask):
            if attn_mask.ndim != 4 or len(attn_mask) != len(query):
                return NotImplemented
            rows.append(attn_mask)
        elif attn_mask.ndim == 4 and len(attn_mask) != 1:
            return NotImplemented

    def merged(*rows: Tensor) -> Tensor:
        q, k, v, *masks = (x.flatten(0, 1) for x in rows)
        mask = masks[0] if masks else attn_mask
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **kwargs)
        return y.unflatten(0, rows[0].shape[:2])

    return mode.call_batched(merged, *rows)


def cross_entropy(
    mode: RowsMode, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """`F.cross_entropy` of tokens, each of which has its own loss, summed or not."""
    if reduction not in ("none", "sum") or size_average is not None or reduce is not None or mode.shared(weight):
        return NotImplemented
    if not (mode.row(input) and mode.row(target)) or input.ndim < 2 or mode.row(weight):
        return NotImplemented

    def merged(logits: Tensor, labels: Tensor) -> Tensor:
        options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1), weight, **options)
        losses = losses.unflatten(0, logits.shape[:2])
        return losses if reduction == "none" else losses.flatten(1).sum(1)

    return mode.call_batched(merged, input, target)


def _visible_copy(function: Any) -> Callable[..., Any]:
    """Copies a Python function of torch so that torch-function modes see its inner calls."""
    scope = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


OPENED: dict[Any, Callable[..., Any]] = {F.multi_head_attention_forward: _visible_copy(F.multi_head_attention_forward)}
RULES: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), matmul),
    Tensor.__rmatmul__: lambda mode, input, other: matmul(mode, other, input),
    **dict.fromkeys((torch.mm, Tensor.mm), lambda mode, input, mat2: matmul(mode, input, mat2)),
    **dict.fromkeys((torch.addmm, Tensor.addmm), addmm),
    torch.einsum: einsum,
    F.embedding: embedding,
    Tensor.__getitem__: getitem,
    **dict.fromkeys((torch.index_select, Tensor.index_select), index_select),
    torch.conv1d: convolution(1),
    torch.conv2d: convolution(2),
    torch.conv3d: convolution(3),
}
WITHOUT_PARAMETERS: dict[Any, Callable[..., Any]] = {
    F.embedding: padded_embedding,
    F.scaled_dot_product_attention: attention,
    F.cross_entropy: cross_entropy,
}


def _are_real(*xs: Tensor) -> bool:
    return all(x.is_floating_point() for x in xs)
