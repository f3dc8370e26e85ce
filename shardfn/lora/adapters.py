"""Adapters, and adapted weights: the sum of a weight and a product of two thin matrices, which is never multiplied out.

An `Adapter` holds parameters and what they mean; an `Adapted` holds a weight and its adapter, and stands in the
weight's place, in a module or in the tree that a function takes. Computing with it gives what the sum would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfn.compat import pytrees
from shardfn.mesh.spec import joined
from shardfn.quant.packed import Packed
from shardfn.shards.layout import is_stage

Kind = Literal["linear", "conv1d", "embedding", "parameter", "experts", "turned_experts"]
BARE: tuple[Kind, ...] = ("parameter", "experts", "turned_experts")
"""Kinds of weights that are adapted as a parameter, by its own path, and not as the weight of a layer."""
_EXPERTS: tuple[Kind, ...] = ("experts", "turned_experts")
_TURNED: tuple[Kind, ...] = ("conv1d", "embedding", "turned_experts")
PARTS: dict[str, tuple[str, ...]] = {
    "embedding": ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"),
    **dict.fromkeys(("linear", "conv1d", *BARE), ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")),
}
"""The names of an adapter's parameters in peft's files."""


@dataclass(frozen=True)
class Recipe:
    """The definition of an adapter, without its values.

    Attributes:
        kind: of the weight: "linear", `[outputs, inputs]`; "conv1d" (of GPT-2) and "embedding", `[inputs, outputs]`;
            for a parameter by itself "parameter", `[outputs, inputs]`, "experts", `[experts, outputs, inputs]`, and
            "turned_experts", `[experts, inputs, outputs]`.
        rank: of the product, for each expert.
        alpha: the product is scaled by `alpha / rank`.
        rslora: whether it is scaled by `alpha / sqrt(rank)` instead (Kalajdzievski 2023).
        dropout: probability of dropout on the adapter's input; embeddings, and parameters by themselves, have none.
    """

    kind: Kind
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Adapter:
    """The parameters that adapt one weight: a pytree node, whose leaves have the names of peft's files.

    Attributes:
        a: `[rank, inputs]`; for experts `[experts * rank, inputs]`, one expert after another.
        b: `[outputs, rank]`; for experts `[outputs, rank * experts]`, with the experts innermost.
        magnitude: `[outputs]`, for DoRA (Liu et al. 2024); None without it.
        recipe: what they mean.
    """

    __slots__ = ("a", "b", "magnitude", "recipe")

    def __init__(self, a: Any, b: Any, magnitude: Any, recipe: Recipe) -> None:
        self.a, self.b, self.magnitude, self.recipe = a, b, magnitude, recipe

    def apply_to(self, weight: Tensor, training: bool) -> Any:
        """The adapted weight; with dropout if `training`.

        It is an `Adapted`, or for a parameter that is not a layer's the sum itself, as its use is unknown.
        """
        if self.recipe.kind not in BARE:
            return Adapted(weight, self, training, self.recipe.kind == "linear")
        first, second = self.factors()
        return (weight + (first * self.recipe.scale) @ second).to(weight.dtype)

    def factors(self) -> tuple[Tensor, Tensor]:
        """The factors of the product, without the scale: `[..., rows, rank]`, `[..., rank, columns]`."""
        a, b, kind = self.a, self.b, self.recipe.kind
        if kind in _EXPERTS:
            a = a.unflatten(0, (-1, self.recipe.rank))
            b = b.unflatten(1, (self.recipe.rank, -1)).movedim(2, 0)
        return (a.mT, b.mT) if kind in _TURNED else (b, a)

    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        sizes = (self.b.shape[0], self.a.shape[1])
        sizes = sizes[::-1] if self.recipe.kind in _TURNED else sizes
        return (self.a.shape[0] // self.recipe.rank, *sizes) if self.recipe.kind in _EXPERTS else sizes

    def unlike(self, shape: Sequence[int]) -> str:
        """Why it does not fit a weight of this shape; an empty string if it does."""
        rank = self.recipe.rank
        shapes = [tuple(x.shape) for x in (self.a, self.b, self.magnitude) if x is not None]
        expected = thin(self.recipe.kind, shape, rank)
        if expected and shapes == expected[: len(shapes)]:
            return ""
        if len(shapes[0]) == len(shapes[1]) == 2 and self.shape() != tuple(shape):
            return f"of shape {list(shape)}, and its adapter for {list(self.shape())}"
        return f"of shape {list(shape)}, and its adapter, of rank {rank}, has parts of {', '.join(map(str, shapes))}"

    def misfit(self, m: nn.Module, parameter: str | None = None) -> str:
        """Why it does not fit a layer's weight, or a parameter by its own name; an empty string if it does."""
        weight, kind = m._parameters.get(parameter or "weight"), layer_kind(m, parameter)
        if weight is not None and kind != self.recipe.kind:
            subject = f"a {type(m).__name__}" if parameter is None else f"a parameter of kind {kind!r}"
            return f"{subject}, and its adapter is for weights of kind {self.recipe.kind!r}"
        return "" if weight is None else self.unlike(weight.shape)

    def __repr__(self) -> str:
        return f"Adapter({self.recipe}{'' if self.magnitude is None else ', DoRA'})"


def thin(kind: Kind, shape: Sequence[int], rank: int) -> list[tuple[int, ...]]:
    """The shapes of an adapter's parameters, in the order of `PARTS`; empty if `shape` is not of this kind."""
    if len(shape) != (3 if kind in _EXPERTS else 2):
        return []
    *experts, rows, columns = shape
    outputs, inputs = (columns, rows) if kind in _TURNED else (rows, columns)
    total_rank = rank * math.prod(experts)
    return [(total_rank, inputs), (outputs, total_rank), (outputs,)][: 2 if kind in BARE else 3]


def parameter_of(path: str, kind: Kind) -> str:
    """The path of the parameter that an adapter at this path adapts."""
    return path if kind in BARE else joined(path, "weight")


def layer_kind(m: nn.Module, parameter: str | None = None) -> Kind | None:
    """The kind of a layer's weight, or of a parameter by its own name; None for layers that adapters do not support."""
    if parameter is not None:
        p = m._parameters[parameter]
        experts: Kind = "turned_experts" if getattr(m, "is_transposed", False) else "experts"
        return experts if p is not None and p.ndim == 3 else "parameter"
    if isinstance(m, nn.Linear):
        return "linear"
    if isinstance(m, nn.Embedding):
        return "embedding"
    conv1d = any(base.__name__ == "Conv1D" and base.__module__.startswith("transformers.") for base in type(m).__mro__)
    return "conv1d" if conv1d else None


def is_adapter(x: Any) -> bool:
    """Whether it is an adapter."""
    return type(x) is Adapter


# --- a weight and its adapter, as one ---

_KNOWN = frozenset((
    "shape", "ndim", "dtype", "device", "size", "dim", "numel", "nelement", "layout", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_nested", "is_quantized", "is_floating_point", "is_complex", "itemsize", "nbytes", "element_size",
    "requires_grad", "get_device",
))  # fmt: skip


class Adapted:
    """A weight and its adapter, which supports `@`, `F.linear`, `F.embedding`, `addmm`, indexing and transposing.

    Everything else raises, since it would ignore the adapter or need a matrix of the weight's shape; see `dense()`.
    """

    __slots__ = ("_adapter", "_outputs_first", "_training", "_weight")

    def __init__(self, weight: Any, adapter: Any, training: bool, outputs_first: bool) -> None:
        self._weight, self._adapter, self._training, self._outputs_first = weight, adapter, training, outputs_first

    @property
    def T(self) -> Adapted:
        """The transpose; also as `mT` and `t()`."""
        return Adapted(self._weight.mT, self._adapter, self._training, not self._outputs_first)

    mT = T

    def t(self) -> Adapted:
        """The transpose."""
        return self.T

    def transpose(self, dim0: int, dim1: int) -> Adapted:
        """The transpose, or itself if the two dimensions are the same."""
        return self if dim0 % 2 == dim1 % 2 else self.T

    def to(self, *args: Any, **kwargs: Any) -> Adapted:
        """The same in another dtype, or on another device."""
        return Adapted(self._weight.to(*args, **kwargs), self._adapter, self._training, self._outputs_first)

    def dense(self) -> Tensor:
        """The sum as a matrix of the weight's shape and dtype, without dropout; differentiable."""
        a, b, scale = self._adapter.a, self._adapter.b, self._adapter.recipe.scale
        weight = self._weight if self._outputs_first else self._weight.mT
        dense = weight + (b @ a) * scale
        if self._adapter.magnitude is not None:
            dense = dense * self._ratio()[:, None]
        dense = dense.to(self._weight.dtype)
        return dense if self._outputs_first else dense.mT

    def __matmul__(self, other: Any) -> Any:
        return _times_on_left(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _matmul(other, self)

    def __getitem__(self, rows: Any) -> Tensor:
        if not isinstance(rows, (int, Tensor)) or (isinstance(rows, Tensor) and rows.dtype == torch.bool):
            raise TypeError(f"{self} is indexed by {type(rows).__name__}: adapters know one index of rows, or {_DENSE}")
        return _adapted_rows(
            torch.as_tensor(rows, device=self._weight.device), self, self._weight[rows], lambda x: x[rows]
        )

    def __len__(self) -> int:
        return len(self._weight)

    def __getattr__(self, name: str) -> Any:
        if name in _KNOWN:
            return getattr(self._weight, name)
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise AttributeError(f"{self} has no .{name}, which is not among what adapters know: {_FIX}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of a torch function on the sum.

        Raises:
            TypeError: the function is not supported.
        """
        function = _FUNCTIONS.get(func)
        if function is None:
            weight = next(x for x in optree.tree_leaves((args, kwargs or {}), is_leaf=is_adapted) if is_adapted(x))
            name = getattr(func, "__qualname__", getattr(func, "__name__", str(func)))
            raise TypeError(f"{weight} is given to torch's {name}, which is not among what adapters know: {_FIX}")
        return function(*args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"Adapted({list(self._weight.shape)}, rank {self._adapter.recipe.rank})"

    def _factors(self) -> tuple[Tensor, Tensor]:
        """The two matrices by which `x @ self` multiplies x in turn: `[rows, rank]`, `[rank, columns]`."""
        a, b = self._adapter.a, self._adapter.b
        return (b, a) if self._outputs_first else (a.mT, b.mT)

    def _dropped(self, x: Tensor) -> Tensor:
        rate = self._adapter.recipe.dropout
        return F.dropout(x, rate) if rate and self._training else x

    def _ratio(self) -> Tensor:
        """DoRA's factor for each output: its magnitude over its row's norm, which is constant for derivatives."""
        weight = self._weight if self._outputs_first else self._weight.mT
        a, b = self._adapter.a, self._adapter.b
        norm = row_norms(weight.detach(), a.detach(), b.detach(), self._adapter.recipe.scale)
        ratio: Tensor = self._adapter.magnitude / norm.detach()
        return ratio


_DENSE = "take w.dense(), a matrix of its shape"
_FIX = f"these are x @ w, F.linear, F.embedding, torch.addmm, w[rows] and w.T; for others {_DENSE}"


def is_adapted(x: Any) -> bool:
    """Whether it is a weight with its adapter."""
    return type(x) is Adapted


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The norm of each row of `weight + scale * b @ a`, `[outputs]`, without that matrix.

    Args:
        weight: `[outputs, inputs]`.
        a: `[rank, inputs]`.
        b: `[outputs, rank]`.
        scale: factor of the product.
    """
    dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    a, b = a.to(dtype), b.to(dtype) * scale
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
    mixed = ((weight.to(dtype) @ a.mT) * b).sum(1)
    return (squares + 2 * mixed + ((b @ (a @ a.mT)) * b).sum(1)).clamp_min(0).sqrt()


def _added(x: Tensor, w: Adapted, base: Callable[[Tensor], Tensor], bias: Any = None) -> Tensor:
    """`x @ w + bias`, where `base(x)` is `x @ weight`."""
    first, second = w._factors()
    scale, magnitude = w._adapter.recipe.scale, w._adapter.magnitude
    if magnitude is not None and w._outputs_first:  # x is multiplied along the outputs, so the ratio scales x
        x = x * w._ratio()
    from_weight, dropped = base(x), w._dropped(x)
    delta = (dropped.to(first.dtype) @ first * scale) @ second
    if magnitude is not None and not w._outputs_first:
        ratio = w._ratio()
        scaled_base = from_weight if dropped is x else base(dropped)
        result = from_weight + (ratio - 1) * scaled_base + ratio * delta
    else:
        result = from_weight + delta
    result = result if bias is None else result + bias
    return result.to(from_weight.dtype)


def _matmul(x: Any, w: Any) -> Any:
    """`x @ w`."""
    if is_adapted(x):
        return _times_on_left(x, w)
    return _added(x, w, lambda x: x @ w._weight)


def _times_on_left(w: Adapted, x: Any) -> Any:
    """`w @ x`."""
    if is_adapted(x):
        raise TypeError(f"{w} @ {x}: adapters know the product with a tensor; for others {_DENSE}")
    return _matmul(x, w.T) if x.ndim == 1 else _matmul(x.mT, w.T).mT


def _adapted_linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    if is_adapted(input) or is_adapted(bias):
        raise TypeError(f"F.linear: adapters know it with {weight} as the weight; for others {_DENSE}")
    if weight._adapter.magnitude is None:
        return _added(input, weight.T, lambda x: F.linear(x, weight._weight, bias))
    return _added(input, weight.T, lambda x: F.linear(x, weight._weight), bias)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if is_adapted(input) or is_adapted(mat1) or beta != 1 or alpha != 1:
        raise TypeError(f"torch.addmm: adapters know it with {mat2} as the second matrix; for others {_DENSE}")
    if mat2._adapter.magnitude is None:
        return _added(mat1, mat2, lambda x: torch.addmm(input, x, mat2._weight))
    return _added(mat1, mat2, lambda x: x @ mat2._weight, input)


def _adapted_embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if is_adapted(input) or max_norm is not None:
        raise TypeError(f"F.embedding: adapters know it with {weight} as the weight, and without max_norm")

    def look_up(x: Tensor) -> Tensor:
        return F.embedding(input, x, padding_idx, None, norm_type, scale_grad_by_freq, sparse)

    return _adapted_rows(input, weight, look_up(weight._weight), look_up)


def _adapted_rows(index: Tensor, w: Adapted, base_rows: Tensor, select: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of `w`, which `select` takes from a matrix. Rows without a gradient there have none in the factor either."""
    first, second = w._factors()
    result = base_rows + (select(first) * w._adapter.recipe.scale) @ second
    if w._adapter.magnitude is not None:
        ratio = w._ratio()
        result = result * (ratio[index][..., None] if w._outputs_first else ratio)
    return result.to(base_rows.dtype)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.linear: _adapted_linear, F.embedding: _adapted_embedding, torch.addmm: _addmm, Tensor.addmm: _addmm,
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul, torch.mm: _matmul, Tensor.mm: _matmul,
    Tensor.__rmatmul__: lambda w, x: _matmul(x, w), torch.transpose: lambda w, i, j: w.transpose(i, j),
    torch.t: lambda w: w.T,
}  # fmt: skip


# --- trees ---


def adapted(base: Any, adapters: Any, *, training: bool = True) -> Any:
    """A tree of parameters, some replaced by adapted weights, for a function that knows nothing of adapters.

    Args:
        base: whole parameters, of any shapes: a stage's, as its function gets them, or all.
        adapters: a tree of the same structure, perhaps with parts left out: what `init` made, or its part for a stage.
            A plain tensor replaces the parameter.
        training: whether adapters with a `dropout` apply it.

    Returns:
        The tree, with an `Adapted` for each `Adapter`.

    Raises:
        TypeError: the trees hold flat shards: call it inside the stage's function, which gets whole parameters.
        ValueError: an adapter has no parameter, or one of another shape.

    Example:
        ``block = sf.stage(lambda p, a, x: layer(lora.adapted(p, a), x))``
    """
    return _adapted(base, adapters, training, "")


def _adapted(base: Any, adapters: Any, training: bool, path: str) -> Any:
    if is_stage(base) or is_stage(adapters):
        raise TypeError(
            f"adapted: {path or 'the tree'} must be full parameters, got flat shards. Call it inside of the function "
            f"that shardfn.stage wraps, with the function's parameters and adapters"
        )
    if is_adapter(adapters):
        is_weight = isinstance(base, (Tensor, Packed))
        if wrong := adapters.unlike(base.shape) if is_weight else f"{_shape_text(base)}, with an adapter":
            raise ValueError(f"adapted: {path or 'it'} is {wrong}")
        return adapters.apply_to(base.decoded() if isinstance(base, Packed) else base, training)
    if isinstance(adapters, Tensor):
        if not isinstance(base, Tensor) or base.shape != adapters.shape:
            raise ValueError(f"adapted: {path} is {_shape_text(base)}, and what replaces it {_shape_text(adapters)}")
        return adapters
    if isinstance(adapters, Mapping):
        return _with_items(base, adapters, training, path) if adapters else base
    if isinstance(adapters, (list, tuple)) and isinstance(base, (list, tuple)) and len(adapters) == len(base):
        return _with_items(base, dict(enumerate(adapters)), training, path)
    raise ValueError(f"adapted: {path or 'the tree'} is {_shape_text(base)} with adapters of {_shape_text(adapters)}")


def _with_items(base: Any, adapters: Mapping[Any, Any], training: bool, path: str) -> Any:
    """A container in which the items at some keys are adapted."""
    if isinstance(base, Mapping):
        items: Any = dict(base)
    elif isinstance(base, tuple) and hasattr(base, "_fields"):
        items = dict(zip(base._fields, base, strict=True))
    elif isinstance(base, (list, tuple)):
        items = dict(enumerate(base))
    else:
        raise ValueError(f"adapted: {path or 'the tree'} is {_shape_text(base)}, with adapters of {sorted(adapters)}")
    for key, adapter in adapters.items():
        if key not in items:
            raise ValueError(f"adapted: there is no {joined(path, key)} that an adapter could be of")
        items[key] = _adapted(items[key], adapter, training, joined(path, key))
    if isinstance(base, Mapping):
        return items
    return type(base)(**items) if hasattr(base, "_fields") else type(base)(items.values())


def _shape_text(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return f"of shape {list(shape)}" if isinstance(shape, Sequence) else f"a {type(x).__name__}"


def _flatten(adapter: Adapter) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
    dora = adapter.magnitude is not None
    values = (adapter.a, adapter.b, adapter.magnitude)[: 3 if dora else 2]
    return values, adapter.recipe, PARTS[adapter.recipe.kind][: len(values)]


pytrees.register(Adapter, _flatten, lambda recipe, x: Adapter(x[0], x[1], (*x, None)[2], recipe))
pytrees.register(
    Adapted,
    lambda w: ((w._weight, w._adapter), (w._training, w._outputs_first), ("", "")),
    lambda meant, children: Adapted(*children, *meant),
)
