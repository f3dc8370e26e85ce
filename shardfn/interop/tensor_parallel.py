"""Tensor parallelism of a module as it is: linear layers on this rank's part of their matrices, the rest untouched.

Whatever of the module's own code breaks that is an error: see `tensor_checks`.
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
from shardfn.interop.tensor_checks import Region
from shardfn.interop.tensor_plan import PARTS, Cut, TensorPlan, cut_dim, dims, weights_of
from shardfn.parallel.linear import from_parallel, to_parallel

Forward = Callable[..., Any]


class TensorParallel:
    """The forwards that take the place of modules' own where their parameters came in pieces.

    Attributes:
        plan: what is cut how.
        forwards: by module.
        size: ranks that have a part each of the parameters of the region that runs; 1 where they came whole.
        proving: whether a proof runs, whose values nothing follows.
    """

    def __init__(self, plan: TensorPlan) -> None:
        self.plan, self.entrance, self.size, self.proving = plan, Entrance(plan.axis), 1, False
        made = {m: self._forward(m, cut, m.forward) for m, cut in plan.cuts.items()}
        self.forwards = {m: forward for m, forward in made.items() if forward is not None}

    def region(self, path: str, modules: Iterable[nn.Module]) -> Region | None:
        """What holds for the modules of one stage; None where none of them is cut."""
        inside = set(modules)
        cuts = {m: cut for m, cut in self.plan.cuts.items() if m in inside and cut.word != "replicate"}
        holders = {m: one for m, one in self.plan.holders.items() if m in inside}
        return Region(self, path, cuts, holders) if cuts else None

    def _forward(self, m: Any, cut: Cut, whole: Forward) -> Forward | None:
        axis, word = self.plan.axis, cut.word
        if word == "replicate":
            return None
        if word == "replicated_with_grad_allreduce":
            return lambda *a, **k: _replicated(m, axis, whole, *a, **k) if self.size > 1 else whole(*a, **k)
        if word == "embedding_rowwise":
            plain_one = type(m).forward is nn.Embedding.forward
            inner: Forward = functools.partial(_embedding if plain_one else _embedding_of_its_own, m, cut, axis)
            if not plain_one:
                inner = functools.partial(inner, whole)
        elif word == "moe_tp_experts":
            inner = functools.partial(_experts, m, cut, axis, whole)
        elif word in ("rowwise", "rowwise_split_input"):
            inner = functools.partial(_rowwise, m, cut, axis)
        else:
            inner = functools.partial(_colwise, m, cut, axis, self.entrance)
        name = weights_of(m, cut)[0]
        shape, dim = cut.shapes[name], cut_dim(m, cut, name)
        parts = {1: shape}

        def forward(*args: Any, **kwargs: Any) -> Any:
            came = m._parameters[name].shape
            if self.size not in parts:
                parts[self.size] = tuple(n // self.size if d == dim else n for d, n in enumerate(shape))
            if came != parts[self.size]:
                raise ValueError(
                    f"{cut.path}.{name} came as {tuple(came)}, which is not its part of {tuple(shape)} where layers "
                    f"around it are cut over {self.size} ranks along {axis!r}: pass specs=model.specs to shard"
                )
            return whole(*args, **kwargs) if self.size == 1 else inner(*args, **kwargs)

        return forward


class Entrance:
    """What all ranks have, on its way to matrices that are cut: made once where several layers take it, as queries,
    keys and values do, so that its gradient is summed once.
    """

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self.last: tuple[Tensor, Any, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """What `to_parallel` makes of it."""
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
            f"{axis!r}, but is given {x.shape[-1]}: what comes before it is not cut by columns in the table"
        )
    y = from_parallel(_product(m, x, m.weight, None), axis)
    return y if m.bias is None else y + m.bias


def _product(m: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight if dims(m)[0] == 0 else weight.mT, bias)


def own_parts(x: Tensor, parts: int, axis: str, dim: int) -> Tensor:
    """This rank's piece of each of several matrices that stand one after another in one which is cut as a whole.

    `[..., parts * n / size, ...] -> [..., parts * n / size, ...]`, differentiable. Bytes a rank sends: at most those of
    `x`, once in forward and once in backward.
    """
    size, here = axis_size(axis), axis_index(axis)
    if x.shape[dim] % parts:
        raise ValueError(
            f"a weight of shape {tuple(x.shape)} is this rank's part of {parts} matrices in one, cut over {axis!r} of "
            f"{size} ranks, but {x.shape[dim]} is not {parts} equal parts: {size} has to divide the features of each"
        )
    # In blocks of n / size, of which block i belongs to rank i % size, and a rank has `parts` one after another.
    targets = [(here * parts + i) % size for i in range(parts)]
    block = x.shape[dim] // parts
    order = sorted(range(parts), key=lambda i: targets[i])
    if order != list(range(parts)):
        blocks = x.split(block, dim)
        x = torch.cat([blocks[i] for i in order], dim)
    send = [targets.count(rank) * block for rank in range(size)]
    sources = [(i * size + here) // parts for i in range(parts)]
    return ragged_all_to_all(x, axis, send, [sources.count(rank) * block for rank in range(size)], dim=dim)


def _embedding(m: Any, cut: Cut, axis: str, tokens: Tensor) -> Tensor:
    """As `parallel.embedding`, with the row that gets no gradient."""
    table = m.weight
    rows = table.shape[0]
    first = axis_index(axis) * rows
    own = tokens - first
    here = (own >= 0) & (own < rows)
    outside = (tokens < 0) | (tokens >= cut.shapes["weight"][0])
    padding = None if m.padding_idx is None or not 0 <= m.padding_idx - first < rows else m.padding_idx - first
    # A token of another rank reads some row here, but neither its numbers nor its gradient count.
    found = F.embedding(own.where(here | outside, 0).where(~outside, rows), table, padding)
    return from_parallel(found * here[..., None], axis)


def _embedding_of_its_own(m: Any, cut: Cut, axis: str, whole: Forward, *args: Any, **kwargs: Any) -> Any:
    """Of a class that does more than nn.Embedding, which it calls: scales what it finds, say."""
    with Lookups(m, cut, axis) as lookups:
        out = whole(*args, **kwargs)
    if not lookups.found:
        raise lookups.error("reads its weight by something else than F.embedding")
    return out


class Lookups(TorchFunctionMode):
    """A context: where a module looks up rows of its weight, it does so in this rank's part.

    Raises:
        ValueError: it reads the weight otherwise.
    """

    def __init__(self, m: Any, cut: Cut, axis: str) -> None:
        super().__init__()
        self.m, self.cut, self.axis, self.weight, self.found = m, cut, axis, m.weight, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is F.embedding and args[1] is self.weight:
            self.found = True
            return _embedding(self.m, self.cut, self.axis, args[0])
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and any(x is self.weight for x in args):
            raise self.error(f"reads its weight by {getattr(func, '__name__', func)}")
        return out

    def error(self, what: str) -> ValueError:
        """What is wrong."""
        return ValueError(
            f"{self.cut.path} ({type(self.m).__name__}) {what}, while each rank along {self.axis!r} has some of its "
            f"rows: leave it out of the table"
        )


def _experts(m: nn.Module, cut: Cut, axis: str, whole: Forward, *args: Any, **kwargs: Any) -> Any:
    """Of each expert a part, whose results are added up."""
    values = {
        name: own_parts(p, PARTS[cut.words[name]], axis, p.ndim - 2) if cut.words[name] in PARTS else p
        for name, p in m._parameters.items()
        if p is not None
    }
    entered = mapped(lambda x: pvary(x, axis) if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs))
    with placed([Slot(m._parameters, name, name) for name in values], list(values.values())):
        return from_parallel(whole(*entered[0], **entered[1]), axis)


def _replicated(m: nn.Module, axis: str, whole: Forward, *args: Any, **kwargs: Any) -> Any:
    """With parameters that every rank has whole and uses on what it alone has."""
    slots = [Slot(m._parameters, name, name) for name, p in m._parameters.items() if p is not None]
    with placed(slots, [pvary(holder[at], axis) for holder, at, _ in slots]):
        return whole(*args, **kwargs)
