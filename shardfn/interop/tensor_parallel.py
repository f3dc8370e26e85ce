"""Tensor parallelism for unmodified modules: linear layers compute with this rank's part of their matrices.

Code of the module that this would break raises an error: see `tensor_checks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfn.collectives.functional import all_gather, axis_index, axis_size, local_slice, pvary, ragged_all_to_all
from shardfn.interop.placeholder import Slot, placed
from shardfn.interop.pytrees import mapped
from shardfn.interop.tensor_checks import ShardedModules
from shardfn.interop.tensor_plan import PARTS, Cut, TensorPlan, cut_dim, dims, runs_as, weights_of
from shardfn.parallel.linear import from_parallel, to_parallel

Forward = Callable[..., Any]


class TensorParallel:
    """Forwards for modules whose parameters may be cut.

    Attributes:
        plan: the sharding of modules.
        forwards: by module.
        size: number of ranks over which the parameters of the running region are cut; 1 if they are whole.
        proving: whether a comparison by `Region.prove` runs, which is not traced.
    """

    def __init__(self, plan: TensorPlan) -> None:
        self.plan, self.entrance, self.size, self.proving = plan, Entrance(plan.axis), 1, False
        forwards = {m: self._forward(m, cut, m.forward) for m, cut in plan.cuts.items()}
        self.forwards = {m: forward for m, forward in forwards.items() if forward is not None}

    def region(self, path: str, modules: Iterable[nn.Module]) -> ShardedModules | None:
        """The region of the modules of one stage; None if none of them is cut."""
        inside = set(modules)
        cuts = {m: cut for m, cut in self.plan.cuts.items() if m in inside and cut.word != "replicate"}
        holders = {m: holder for m, holder in self.plan.holders.items() if m in inside}
        return ShardedModules(self, path, cuts, holders) if cuts else None

    def _forward(self, m: Any, cut: Cut, run: Forward) -> Forward | None:
        axis, style = self.plan.axis, cut.word
        if style == "replicate":
            return None
        if style == "replicated_with_grad_allreduce":
            return lambda *a, **k: _replicated(m, axis, run, *a, **k) if self.size > 1 else run(*a, **k)
        if style == "embedding_rowwise":
            is_plain = runs_as(m, nn.Embedding)
            inner: Forward = functools.partial(_padded_embedding if is_plain else _embedding_of_its_own, m, cut, axis)
            if not is_plain:
                inner = functools.partial(inner, run)
        elif style == "moe_tp_experts":
            inner = functools.partial(_experts, m, cut, axis, run)
        elif style in ("rowwise", "rowwise_split_input"):
            inner = functools.partial(_rowwise, m, cut, axis)
        else:
            inner = functools.partial(_colwise, m, cut, axis, self.entrance)
        name = weights_of(m, cut)[0]
        shape, dim = cut.shapes[name], cut_dim(m, cut, name)
        parts = {1: shape}

        def forward(*args: Any, **kwargs: Any) -> Any:
            local = m._parameters[name].shape
            if self.size not in parts:
                parts[self.size] = tuple(n // self.size if d == dim else n for d, n in enumerate(shape))
            if local != parts[self.size]:
                raise ValueError(
                    f"{cut.path}.{name} came as {tuple(local)}, which is not its shard of {tuple(shape)} where layers "
                    f"around it are sharded over {self.size} ranks along {axis!r}. Pass specs=model.specs to shard"
                )
            return run(*args, **kwargs) if self.size == 1 else inner(*args, **kwargs)

        return forward


class Entrance:
    """Prepares a value that all ranks have for cut matrices.

    The result is shared by layers that take the same value, as queries, keys and values do, so that its gradient is
    summed over ranks only once.
    """

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self.last: tuple[Tensor, Any, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """As `to_parallel`, reusing the last result if the value is the same and unchanged."""
        if torch.compiler.is_compiling():
            return to_parallel(x, self.axis)
        state = (None if x.is_inference() else x._version, torch.is_grad_enabled())
        if self.last is None or self.last[0] is not x or self.last[1] != state:
            self.last = (x, state, to_parallel(x, self.axis))
        return self.last[2]


def _colwise(m: Any, cut: Cut, axis: str, entrance: Entrance, x: Tensor) -> Tensor:
    weight, bias = m.weight, m.bias
    if cut.word in PARTS:
        parts, dim = PARTS[cut.word], dims(m)[0]
        weight = own_parts(weight, parts, axis, dim)
        bias = None if bias is None else own_parts(bias, parts, axis, 0)
    y = _product(m, entrance(x), weight, bias)
    return all_gather(y, axis, dim=-1, to="invariant") if cut.word == "colwise_gather_output" else y


def _rowwise(m: Any, cut: Cut, axis: str, x: Tensor) -> Tensor:
    if cut.word == "rowwise_split_input":
        x = local_slice(x, axis, dim=-1)
    width = m.weight.shape[dims(m)[1]]
    if x.shape[-1] != width:
        raise ValueError(
            f"{cut.path} has {width} of its {cut.shapes['weight'][dims(m)[1]]} input features on each rank along "
            f"{axis!r}, but is given {x.shape[-1]}: the layer before it is not sharded by columns in the table"
        )
    y = from_parallel(_product(m, x, m.weight, None), axis)
    return y if m.bias is None else y + m.bias


def _product(m: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight if dims(m)[0] == 0 else weight.mT, bias)


def own_parts(x: Tensor, parts: int, axis: str, dim: int) -> Tensor:
    """This rank's part of each of `parts` matrices, stacked in one that is cut as a whole.

    `[..., parts * n / size, ...] -> [..., parts * n / size, ...]`, differentiable. A rank sends at most the bytes of
    `x`, once in forward and once in backward.
    """
    size, axis_rank = axis_size(axis), axis_index(axis)
    if x.shape[dim] % parts:
        raise ValueError(
            f"a weight of shape {tuple(x.shape)} is this rank's shard of {parts} matrices in one, over {axis!r} of "
            f"{size} ranks, but {x.shape[dim]} is not {parts} equal parts: {size} has to divide the features of each"
        )
    # In blocks of n / size, block i belongs to rank i % size; at first, each rank has `parts` consecutive ones.
    targets = [(axis_rank * parts + i) % size for i in range(parts)]
    block = x.shape[dim] // parts
    order = sorted(range(parts), key=lambda i: targets[i])
    if order != list(range(parts)):
        blocks = x.split(block, dim)
        x = torch.cat([blocks[i] for i in order], dim)
    send = [targets.count(rank) * block for rank in range(size)]
    sources = [(i * size + axis_rank) // parts for i in range(parts)]
    return ragged_all_to_all(x, axis, send, [sources.count(rank) * block for rank in range(size)], dim=dim)


def _padded_embedding(m: Any, cut: Cut, axis: str, tokens: Tensor) -> Tensor:
    """As `parallel.embedding`, but supporting `padding_idx`, whose row gets no gradient."""
    table = m.weight
    rows = table.shape[0]
    first = axis_index(axis) * rows
    local_ids = tokens - first
    is_here = (local_ids >= 0) & (local_ids < rows)
    outside = (tokens < 0) | (tokens >= cut.shapes["weight"][0])
    padding = None if m.padding_idx is None or not 0 <= m.padding_idx - first < rows else m.padding_idx - first
    # A token of another rank looks up row 0 here; multiplying by zero removes its values and its gradient.
    rows_found = F.embedding(local_ids.where(is_here | outside, 0).where(~outside, rows), table, padding)
    return from_parallel(rows_found * is_here[..., None], axis)


def _embedding_of_its_own(m: Any, cut: Cut, axis: str, run: Forward, *args: Any, **kwargs: Any) -> Any:
    """For a class that calls F.embedding but does more, such as scaling the result."""
    with Lookups(m, cut, axis) as lookups:
        out = run(*args, **kwargs)
    if not lookups.found:
        raise lookups.error("reads its weight by something else than F.embedding")
    return out


class Lookups(TorchFunctionMode):
    """A context in which a module's lookups in its weight use this rank's rows.

    Raises:
        ValueError: it reads the weight in another way.
    """

    def __init__(self, m: Any, cut: Cut, axis: str) -> None:
        super().__init__()
        self.m, self.cut, self.axis, self.weight, self.found = m, cut, axis, m.weight, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is F.embedding and args[1] is self.weight:
            self.found = True
            return _padded_embedding(self.m, self.cut, self.axis, args[0])
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and any(x is self.weight for x in args):
            raise self.error(f"reads its weight by {getattr(func, '__name__', func)}")
        return out

    def error(self, problem: str) -> ValueError:
        """The error for another way of reading the weight."""
        return ValueError(
            f"{self.cut.path} ({type(self.m).__name__}) {problem}, while each rank along {self.axis!r} has some of its "
            f"rows: leave it out of the table"
        )


def _experts(m: nn.Module, cut: Cut, axis: str, run: Forward, *args: Any, **kwargs: Any) -> Any:
    """Computes with this rank's part of each expert, and sums the results over ranks."""
    values = {
        name: own_parts(p, PARTS[cut.words[name]], axis, p.ndim - 2) if cut.words[name] in PARTS else p
        for name, p in m._parameters.items()
        if p is not None
    }
    entered = mapped(lambda x: pvary(x, axis) if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs))
    with placed([Slot(m._parameters, name, name) for name in values], list(values.values())):
        return from_parallel(run(*entered[0], **entered[1]), axis)


def _replicated(m: nn.Module, axis: str, run: Forward, *args: Any, **kwargs: Any) -> Any:
    """Runs a module whose parameters are whole on every rank, but applied to values that only this rank has."""
    slots = [Slot(m._parameters, name, name) for name, p in m._parameters.items() if p is not None]
    with placed(slots, [pvary(holder[attr], axis) for holder, attr, _ in slots]):
        return run(*args, **kwargs)
