"""Tensor parallelism of a module as it is: linear layers on this rank's part of their matrices, the rest untouched.

What runs between a layer that is cut by columns and one that is cut by rows meets this rank's features and heads; all
else meets what every rank has. The first run of each stage is followed, and whatever breaks that is an error.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfn.collectives.agree import agree, gathered
from shardfn.collectives.functional import all_gather, axis_index, axis_size, local_slice, pvary, ragged_all_to_all
from shardfn.compat.dispatch import plain
from shardfn.interop import recorders
from shardfn.interop.anatomy import Part, Slot, placed
from shardfn.interop.structures import Forms, is_cache, mapped
from shardfn.interop.tensor_plan import COUNTS, PARTS, Cut, Holder, TensorPlan, dims
from shardfn.mesh.grid import Axis
from shardfn.mesh.scope import bound_axis
from shardfn.parallel.linear import from_parallel, to_parallel
from shardfn.shards.replicated import checksum

_MARK = "_shardfn_cut"
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
        name = next(name for name, weight in _cut_names(m, cut) if weight)
        shape, dim = cut.shapes[name], _dim_of(m, cut, name)
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


def _cut_names(m: nn.Module, cut: Cut) -> list[tuple[str, bool]]:
    return [(name, name != "bias") for name in cut.shapes if m._parameters.get(name) is not None]


class Region:
    """The modules of one stage that are cut, and those around them."""

    def __init__(
        self, owner: TensorParallel, path: str, cuts: Mapping[nn.Module, Cut], holders: Mapping[nn.Module, Holder]
    ) -> None:
        self.owner, self.axis, self.path = owner, owner.plan.axis, path or "the model"
        self.cuts, self.holders = cuts, holders
        self.sample = next(
            (
                (m, name, cut.shapes[name])
                for m, cut in cuts.items()
                for name, weights in _cut_names(m, cut)
                if weights and cut.word != "replicated_with_grad_allreduce"
            ),
            None,
        )
        self.followed: set[Any] = set()
        self.numbers: dict[int, tuple[list[Slot], list[Any]]] = {}
        proves = holders or any(cut.word == "replicated_with_grad_allreduce" for cut in cuts.values())
        self.proved = _NOTHING if proves else _GRADIENTS

    def size(self) -> int:
        """Ranks that have a part of these parameters each; 1 where they came whole."""
        if self.sample is None:
            return 1
        m, name, whole = self.sample
        shape = m._parameters[name].shape  # type: ignore[union-attr]
        return 1 if shape == whole else axis_size(self.axis)

    @contextlib.contextmanager
    def entered(
        self, training: bool, given: Sequence[Any], slots: Sequence[Slot], again: bool
    ) -> Iterator[Following | None]:
        """Runs the block on this rank's part; gives what follows it, where it must be followed.

        Args:
            training: whether the module is.
            given: its arguments.
            slots: of its parameters.
            again: whether it is to be followed though it was before.
        """
        before, self.owner.size = self.owner.size, self.size()
        try:
            with self._cut(self.owner.size, training, given, slots, again) as following:
                yield following
        finally:
            self.owner.size = before

    @contextlib.contextmanager
    def _cut(
        self, size: int, training: bool, given: Sequence[Any], slots: Sequence[Slot], again: bool
    ) -> Iterator[Following | None]:
        if size == 1:
            yield None
            return
        state = size, training, torch.is_grad_enabled()
        follows = (state not in self.followed or again) and not torch.compiler.is_compiling()
        if state not in self.followed:
            self._check_heads(size)
            _check_same(bound_axis(self.axis, self.path), self.axis, self.path, given)
        try:
            with placed(*self._divided(size)):
                if follows:
                    with Following(self, given, slots) as following:
                        yield following
                else:
                    yield None
            self.followed.add(state)
        except TypeError as error:
            if Unsaid.__name__ not in str(error):
                raise
            numbers = [x for x in self._divided(size)[1] if isinstance(x, Unsaid)]
            raise RuntimeError("; or ".join(x.said() for x in numbers)) from error  # torch's own says less
        finally:
            self.owner.entrance.last = None

    def _check_heads(self, size: int) -> None:
        """Raises ValueError where heads do not divide."""
        for m, one in self.holders.items():
            counts = {**one.heads, **{f"{one.path}.{name}": vars(m)[name] for name in one.divided}}
            for path, count in counts.items():
                if count % size:
                    raise ValueError(
                        f"{path} has {count} heads, which {size} ranks along {self.axis!r} cannot have in equal "
                        f"parts: leave the layers of {one.path} out of the table, or make {self.axis!r} an axis whose "
                        f"size divides {count}"
                    )

    def _divided(self, size: int) -> tuple[list[Slot], list[Any]]:
        """Numbers of heads are those of this rank, and what nobody spoke of cannot be computed with."""
        if size not in self.numbers:
            slots: list[Slot] = []
            values: list[Any] = []
            for m, one in self.holders.items():
                own = vars(m)
                slots += [Slot(own, name, name) for name in (*one.divided, *one.refused)]
                values += [own[name] // size for name in one.divided]
                values += [Unsaid(one.path, name, self.axis, _add(one.path, name)) for name in one.refused]
                if "config" in own:
                    slots.append(Slot(own, "config", "config"))
                    values.append(_Config(own["config"], one.path, self.axis))
            self.numbers[1] = slots, [holder[at] for holder, at, _ in slots]
            self.numbers[size] = slots, values
        return self.numbers[size]

    def prove(self, part: Part, slots: Sequence[Slot], forward: Forward, args: Any, kwargs: Any) -> None:
        """Compares, once, what the stage computes on this rank's part with what it does on whole layers.

        Nothing else knows whether the module's code splits, normalises or counts what is cut here. It takes the stage's
        whole parameters and two runs more, in float64 where the module can, without dropout; where gradients are
        recorded, two backward passes too, since code that nothing follows, a function of its own say, may have the
        right values and this rank's part of a gradient.

        Raises:
            ValueError: the two differ.
        """
        level = _GRADIENTS if torch.is_grad_enabled() else _VALUES
        given = list(_tensors((args, kwargs)))
        size = self.owner.size
        if self.proved >= level or size == 1 or torch.compiler.is_compiling() or not all(map(plain, given)):
            return
        self.owner.proving = True
        with torch.no_grad(), recorders.recording(("_nothing",)), _evaluating(part.module):
            values = [holder[at].detach() for holder, at, _ in slots]
            moving = [holder[at].requires_grad and level == _GRADIENTS for holder, at, _ in slots]
            at_dim = self._dims_of(slots)
            whole = [
                v if d is None else all_gather(v, self.axis, dim=0 if v.ndim == 1 else d)
                for v, d in zip(values, at_dim, strict=True)
            ]

            def run(values: Sequence[Tensor], ranks: int, dtype: torch.dtype | None) -> Results:
                self.owner.size, self.owner.entrance.last = ranks, None
                kept = [holder[at].clone() for holder, at, _ in part.buffers]
                leaves = [_cast(x, dtype, needs) for x, needs in zip(values, moving, strict=True)]
                arguments = mapped(
                    lambda x: _cast(x, dtype, level == _GRADIENTS and getattr(x, "requires_grad", False)),
                    (args, kwargs),
                )
                inputs = [x for x in _tensors(arguments) if x.is_floating_point()]
                with (
                    torch.set_grad_enabled(level == _GRADIENTS),
                    placed(slots, leaves),
                    placed(part.buffers, kept),
                    placed(*self.numbers[ranks]),
                ):
                    outputs = list(_tensors(forward(*arguments[0], **arguments[1])))
                    slopes = _slopes(outputs, [*leaves, *inputs])
                return [y.detach() for y in outputs], slopes[: len(leaves)], slopes[len(leaves) :]

            try:
                try:
                    got, want = run(values, size, torch.float64), run(whole, 1, torch.float64)
                except (RuntimeError, TypeError, NotImplementedError):  # kernels that take no float64
                    got, want = run(values, size, None), run(whole, 1, None)
            finally:
                self.owner.size, self.owner.entrance.last, self.owner.proving = size, None, False
            here = axis_index(self.axis)
            pieces = [g if d is None else g.chunk(size, 0 if g.ndim == 1 else d)[here] for g, d in zip(
                want[1], at_dim, strict=True)]  # fmt: skip
        self._refuse_differing(got[0], want[0])
        self._refuse_slopes([key for _, _, key in slots], got[1], pieces)
        self._refuse_slopes(["what it is given"] * len(got[2]), got[2], want[2])
        self.proved = level

    def _dims_of(self, slots: Sequence[Slot]) -> list[int | None]:
        """The dimension along which each parameter came cut."""
        cut = {
            id(m._parameters[name]): _dim_of(m, one, name)
            for m, one in self.cuts.items()
            for name, p in m._parameters.items()
            if p is not None and p.shape != one.shapes[name]
        }
        return [cut.get(id(holder[at])) for holder, at, _ in slots]

    def _refuse_differing(self, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        for one, other in zip(got, want, strict=True):
            if not _close(one, other):
                raise ValueError(
                    f"{self.path} computes something else with layers that are cut over {self.axis!r} than with whole "
                    f"ones: its code splits, normalises or counts the features of a layer that is said to be "
                    f"{', '.join(sorted({self.cuts[m].word for m in self.cuts}))}. Say qkv_colwise or packed_colwise "
                    f"of several matrices in one, or colwise_gather_output and rowwise_split_input"
                )

    def _refuse_slopes(self, names: Sequence[str], got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        scale = max((float(g.double().abs().max()) for g in want if g.numel()), default=0.0)
        for name, one, other in zip(names, got, want, strict=True):
            if not _within(one, other, scale, _SLOPE):
                raise ValueError(
                    f"{self.path}: with layers that are cut over {self.axis!r} the gradient of {name} is another than "
                    f"with whole ones: it meets what each rank has alone, or is said to and does not. Say in the table "
                    f'that its module is "replicated_with_grad_allreduce" if it is applied to what is cut, and leave '
                    f"it out if it is not"
                )


_NOTHING, _VALUES, _GRADIENTS = range(3)
"""What was compared."""
Results = tuple[list[Tensor], list[Tensor], list[Tensor]]


def _slopes(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a number that depends on all outputs, in one way on all ranks; zeros where none is needed."""
    ends = [y for y in outputs if y.requires_grad]
    known = [x for x in inputs if x.requires_grad]
    along = [torch.arange(y.numel(), device=y.device).cos().to(y.dtype).view(y.shape) for y in ends]
    found = iter(torch.autograd.grad(ends, known, along, allow_unused=True) if ends and known else ())
    each = [next(found, None) if x.requires_grad else None for x in inputs]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, each, strict=True)]


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout."""
    trained = [m for m in module.modules() if m.training]
    for m in trained:
        m.training = False
    try:
        yield
    finally:
        for m in trained:
            m.training = True


def _cast(x: Any, dtype: torch.dtype | None, differentiated: bool) -> Any:
    if is_cache(x):
        return copy.deepcopy(x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(dtype or x.dtype).requires_grad_(differentiated)


def _close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return one.shape == other.shape and bool((one == other).all())
    scale = float(other.double().nan_to_num().abs().max()) if other.numel() else 0.0
    return _within(one, other, scale, _ROUNDING)


def _within(one: Tensor, other: Tensor, scale: float, rounding: float) -> bool:
    """Whether two tensors are equal, but for rounding of numbers of this size."""
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    away = (one.double() - other.double()).nan_to_num().abs().max()
    return bool(away <= max(rounding, 32 * torch.finfo(one.dtype).eps) * scale)


_ROUNDING = 1e-6  # modules compute some things in float32 whatever they are given
_SLOPE = 1e-4


def _dim_of(m: nn.Module, cut: Cut, name: str) -> int:
    """The dimension of a parameter that is cut."""
    word = cut.words.get(name, cut.word)
    if cut.words:
        return len(cut.shapes[name]) - (1 if word == "rowwise" else 2)
    return 0 if word == "embedding_rowwise" else dims(m)[word in ("rowwise", "rowwise_split_input")]


class Following(TorchFunctionMode):
    """A context: values that this rank alone has are followed through the module's own code.

    Raises:
        ValueError: one meets a value that is the same on all ranks and is differentiated.
    """

    def __init__(self, region: Region, given: Sequence[Any], slots: Sequence[Slot]) -> None:
        super().__init__()
        self.region, self.group = region, bound_axis(region.axis, region.path).group
        self.names: dict[int, str] = {}
        pieces = {
            id(m._parameters[name])
            for m, cut in region.cuts.items()
            for name in cut.shapes
            if m._parameters.get(name) is not None and m._parameters[name].shape != cut.shapes[name]  # type: ignore[union-attr]
        }
        for holder, at, key in slots:
            value = holder[at]
            self.names[id(value)] = key
            setattr(value, _MARK, id(value) in pieces)
        for x in given:
            if isinstance(x, Tensor):
                setattr(x, _MARK, False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.region.owner.proving:
            return out
        known = [x for x in _tensors((args, kwargs)) if hasattr(x, _MARK)]
        results = list(_tensors(out)) if known else []
        if isinstance(func, torch._ops.OpOverload) and func.namespace.startswith("shardfn"):
            op = str(func.name()).split("::")[-1]
            if self.group in args:
                cut = op not in ("psum", "all_gather_invariant")
            else:
                cut = any(map(is_cut, known))
        else:
            cut = any(map(is_cut, known))
            if cut and any(x.requires_grad for x in results):
                self._meet(known, getattr(func, "__name__", str(func)))
        for x in results:
            setattr(x, _MARK, cut)
        return out

    def _meet(self, known: list[Tensor], what: str) -> None:
        for x in known:
            if x.requires_grad and not is_cut(x) and what not in _SHAPES:
                name = self.names.get(id(x))
                said = f"the parameter {name}" if name else f"a value of shape {tuple(x.shape)}"
                raise ValueError(
                    f"{self.region.path}: in {what}, {said} that all ranks along {self.region.axis!r} have meets what "
                    f"each of them has alone, and its gradient would be this rank's part: say in the table that its "
                    f'module is "replicated_with_grad_allreduce", or cut what it meets otherwise'
                )

    def check(self, results: Any) -> None:
        """Raises ValueError unless all ranks have what the stage returns."""
        for x in _tensors(results):
            if is_cut(x):
                raise ValueError(
                    f"{self.region.path} returns a value of shape {tuple(x.shape)} of which each rank along "
                    f"{self.region.axis!r} has its own part, as attentions of its own heads are: ask for no such "
                    f'output, or end it in the table by a layer that is "rowwise" or "colwise_gather_output"'
                )


_SHAPES = ("expand_as", "view_as", "reshape_as", "type_as", "to")


def is_cut(x: Any) -> bool:
    """Whether a value that is followed is this rank's alone."""
    return bool(getattr(x, _MARK, False))


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in Forms().flatten(tree)[0] if isinstance(x, Tensor))


_SUMMARY = 1e-3


def _check_same(axis: Axis, name: str, path: str, given: Sequence[Any]) -> None:
    """Raises ValueError, on every rank along the axis, where they are given different values."""
    tensors = [x.detach() for x in given if isinstance(x, Tensor) and plain(x) and not x.is_meta and x.numel()]
    advice = (
        f"Along {name!r}, which cuts matrices, all ranks take the same batch and draw the same random numbers: cut the "
        f"batch over other axes, and seed these ranks alike"
    )
    subject = ("what it is given", advice)
    agree([f"{x.dtype} {tuple(x.shape)}" for x in tensors], axis, path, subject=subject)
    exact = [x for x in tensors if not x.is_floating_point() and not x.is_complex()]
    agree([f"numbers with checksum {checksum(x)}" for x in exact], axis, path, subject=subject)
    sums = [n for x in tensors if x.is_floating_point() for n in (x.double().sum(), x.double().abs().sum())]
    if not sums:
        return
    rows = gathered(torch.stack(sums).cpu(), axis, what="comparing what it is given", of=path)
    spread = (rows.amax(0) - rows.amin(0))[:, None].reshape(-1, 2).amax(1)
    if bool((spread > _SUMMARY * rows.abs().amax(0).reshape(-1, 2)[:, 1]).any()):
        raise ValueError(f"{path}: what it is given differs between ranks. {advice}")


class Unsaid:
    """In place of a number, while heads are cut: it refuses to be computed with."""

    def __init__(self, path: str, name: str, axis: str, fix: str) -> None:
        self.path, self.name, self.axis, self.fix = path, name, axis, fix

    def said(self) -> str:
        """What is wrong."""
        return (
            f"{self.path} computes with its {self.name} while {self.axis!r} cuts its layers, and nothing says whether "
            f"that counts what one rank has or what all have: {self.fix}"
        )

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(self.said())


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow",
    "rpow", "neg", "eq", "ne", "lt", "le", "gt", "ge", "index", "int", "float", "hash", "bool",
):  # fmt: skip
    setattr(Unsaid, f"__{_name}__", Unsaid._refuse)


class _Config:
    """A model's config as it is, but for the numbers of heads, which are not those of one rank."""

    def __init__(self, config: Any, path: str, axis: str) -> None:
        self.__dict__.update(_config=config, _path=path, _axis=axis)

    def __getattr__(self, name: str) -> Any:
        if name in COUNTS:
            return Unsaid(self._path, f"config.{name}", self._axis, "leave its layers out of the table")
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


def _add(path: str, name: str) -> str:
    """What a table lacks."""
    words = ["*" if word.isdigit() else word for word in (*path.split("."), name)]
    return f'add "{".".join(words)}": "divided", or "whole", to the table'
