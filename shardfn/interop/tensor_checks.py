"""Runs one stage with layers that are sharded by tensor parallelism: divides its heads, and detects unsupported code.

Code between a column-parallel layer and a row-parallel one sees this rank's features and heads; all other
code sees what every rank has. The first run of each stage is traced, and where that cannot suffice, compared with a run
on whole layers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfn.collectives.agree import agree, at_once, gathered
from shardfn.collectives.functional import all_gather, axis_index, axis_size
from shardfn.compat import dispatch, functorch
from shardfn.compat.dispatch import plain
from shardfn.interop import output_capturing
from shardfn.interop.placeholder import ModulePart, Slot, placed
from shardfn.interop.pytrees import Forms, is_cache, mapped
from shardfn.interop.tensor_plan import COUNTS, Cut, Holder, cut_dim, weights_of
from shardfn.mesh.grid import Axis
from shardfn.mesh.scope import bound_axis
from shardfn.shards.replicated import checksum

if TYPE_CHECKING:
    from shardfn.interop.tensor_parallel import TensorParallel

_MARK = "_shardfn_cut"


class ShardedModules:
    """The cut modules of one stage, and the modules that hold them."""

    def __init__(
        self, owner: TensorParallel, path: str, cuts: Mapping[nn.Module, Cut], holders: Mapping[nn.Module, Holder]
    ) -> None:
        self.owner, self.axis, self.path = owner, owner.plan.axis, path or "the model"
        self.cuts, self.holders = cuts, holders
        self.sample = next(
            (
                (m, name, cut.shapes[name])
                for m, cut in cuts.items()
                for name in weights_of(m, cut)
                if cut.word != "replicated_with_grad_allreduce"
            ),
            None,
        )
        self.followed: set[Any] = set()
        self.numbers: dict[int, tuple[list[Slot], list[Any]]] = {}
        proves = holders or any(cut.word == "replicated_with_grad_allreduce" for cut in cuts.values())
        self.proved = _NOTHING if proves else _GRADIENTS

    def size(self) -> int:
        """The number of ranks over which these parameters are sharded; 1 if they are whole."""
        if self.sample is None:
            return 1
        m, name, full_shape = self.sample
        shape = m._parameters[name].shape  # type: ignore[union-attr]
        return 1 if shape == full_shape else axis_size(self.axis)

    @contextlib.contextmanager
    def entered(
        self, training: bool, arguments: Sequence[Any], slots: Sequence[Slot], retrace: bool
    ) -> Iterator[Following | None]:
        """A context for running the stage on this rank's part; yields the tracer, if this run is traced.

        Args:
            training: whether the module trains.
            arguments: of the stage.
            slots: of its parameters.
            retrace: whether to trace although an earlier run was.
        """
        before, size = self.owner.size, self.size()
        self.owner.size = size
        try:
            if size == 1:
                yield None
                return
            state = size, training, torch.is_grad_enabled()
            follows = (state not in self.followed or retrace) and not torch.compiler.is_compiling()
            if state not in self.followed:
                self._check_heads(size)
                _check_same(bound_axis(self.axis, self.path), self.axis, self.path, arguments)
            with placed(*self._divided(size)):
                if follows:
                    with Following(self, arguments, slots) as following:
                        yield following
                else:
                    yield None
            self.followed.add(state)
        except TypeError as error:
            if size == 1 or Unsaid.__name__ not in str(error):
                raise
            numbers = [x for x in self._divided(size)[1] if isinstance(x, Unsaid)]
            raise RuntimeError("; or ".join(x.message() for x in numbers)) from error  # torch's does not say which
        finally:
            self.owner.size, self.owner.entrance.last = before, None

    def _check_heads(self, size: int) -> None:
        """Raises ValueError if a number of heads is not divisible by the number of ranks."""
        for m, entry in self.holders.items():
            counts = {**entry.heads, **{f"{entry.path}.{name}": vars(m)[name] for name in entry.divided}}
            for path, count in counts.items():
                if count % size:
                    raise ValueError(
                        f"{path} has {count} heads, which {size} ranks along {self.axis!r} cannot have in equal "
                        f"parts: leave the layers of {entry.path} out of the table, or make {self.axis!r} an axis "
                        f"whose size divides {count}"
                    )

    def _divided(self, size: int) -> tuple[list[Slot], list[Any]]:
        """Replacements of module attributes: numbers of heads are divided, and undeclared numbers raise when used."""
        if size not in self.numbers:
            slots: list[Slot] = []
            values: list[Any] = []
            for m, entry in self.holders.items():
                attributes = vars(m)
                slots += [Slot(attributes, name, name) for name in (*entry.divided, *entry.refused)]
                values += [attributes[name] // size for name in entry.divided]
                pattern = ".".join("*" if component.isdigit() else component for component in entry.path.split("."))
                values += [
                    Unsaid(entry.path, name, self.axis, f'add "{pattern}.{name}": "divided", or "whole", to the table')
                    for name in entry.refused
                ]
                if "config" in attributes:
                    slots.append(Slot(attributes, "config", "config"))
                    values.append(_Config(attributes["config"], entry.path, self.axis))
            self.numbers[1] = slots, [holder[attr] for holder, attr, _ in slots]
            self.numbers[size] = slots, values
        return self.numbers[size]

    def prove(
        self, part: ModulePart, slots: Sequence[Slot], forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """Compares, once, the stage's results on this rank's part with those on whole layers.

        Only this detects code of the module that splits, normalizes or counts what is cut. It needs the stage's whole
        parameters and two more runs, in float64 if the module supports it, without dropout; and two backward passes if
        gradients are recorded, since code that cannot be traced, such as a custom autograd function, may compute right
        values but only this rank's part of a gradient.

        Raises:
            ValueError: the two differ.
        """
        level = _GRADIENTS if torch.is_grad_enabled() else _VALUES
        tensors = list(_tree_tensors((args, kwargs)))
        size = self.owner.size
        if self.proved >= level or size == 1 or torch.compiler.is_compiling() or not all(map(plain, tensors)):
            return
        self.owner.proving = True
        modes = [Slot(vars(m), "training", "training") for m in part.module.modules()]
        with torch.no_grad(), output_capturing.recording(("_nothing",)), placed(modes, [False] * len(modes)):
            values = [holder[attr].detach() for holder, attr, _ in slots]
            moving = [holder[attr].requires_grad and level == _GRADIENTS for holder, attr, _ in slots]
            at_dim = self._dims_of(slots)
            full = [v if d is None else all_gather(v, self.axis, dim=d) for v, d in zip(values, at_dim, strict=True)]

            def run(values: Sequence[Tensor], ranks: int, dtype: torch.dtype | None) -> Results:
                self.owner.size, self.owner.entrance.last = ranks, None
                buffers = [holder[attr].clone() for holder, attr, _ in part.buffers]
                leaves = [_cast_copy(x, dtype, needs) for x, needs in zip(values, moving, strict=True)]
                arguments = mapped(
                    lambda x: _cast_copy(x, dtype, level == _GRADIENTS and getattr(x, "requires_grad", False)),
                    (args, kwargs),
                )
                inputs = [x for x in _tree_tensors(arguments) if x.is_floating_point()]
                with (
                    torch.set_grad_enabled(level == _GRADIENTS),
                    placed(slots, leaves),
                    placed(part.buffers, buffers),
                    placed(*self.numbers[ranks]),
                ):
                    outputs = list(_tree_tensors(forward(*arguments[0], **arguments[1])))
                    slopes = _slopes(outputs, [*leaves, *inputs])
                return [y.detach() for y in outputs], slopes[: len(leaves)], slopes[len(leaves) :]

            try:
                try:
                    got, want = run(values, size, torch.float64), run(full, 1, torch.float64)
                except (RuntimeError, TypeError, NotImplementedError):  # some kernels do not support float64
                    got, want = run(values, size, None), run(full, 1, None)
            finally:
                self.owner.size, self.owner.entrance.last, self.owner.proving = size, None, False
            place = axis_index(self.axis)
            pieces = [g if d is None else g.chunk(size, d)[place] for g, d in zip(
                want[1], at_dim, strict=True)]  # fmt: skip
        self._refuse_differing(got[0], want[0])
        self._refuse_slopes([key for _, _, key in slots], got[1], pieces)
        self._refuse_slopes(["what it is given"] * len(got[2]), got[2], want[2])
        self.proved = level

    def _dims_of(self, slots: Sequence[Slot]) -> list[int | None]:
        """The dimension along which each parameter is sharded; None for whole ones."""
        dims = {
            id(m._parameters[name]): cut_dim(m, cut, name)
            for m, cut in self.cuts.items()
            for name, p in m._parameters.items()
            if p is not None and p.shape != cut.shapes[name]
        }
        return [dims.get(id(holder[attr])) for holder, attr, _ in slots]

    def _refuse_differing(self, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        for y, expected in zip(got, want, strict=True):
            scale = float(expected.double().nan_to_num().abs().max()) if expected.numel() else 0.0
            exact = not y.is_floating_point()
            if not (torch.equal(y, expected) if exact else _close_to(y, expected, scale, _ROUNDING)):
                raise ValueError(
                    f"{self.path} computes a different result with layers sharded over {self.axis!r}: its code splits, "
                    f"normalizes or counts features of "
                    f"{', '.join(sorted({self.cuts[m].word for m in self.cuts}))} layers. Use qkv_colwise or "
                    f"packed_colwise for several matrices in one, or colwise_gather_output and rowwise_split_input"
                )

    def _refuse_slopes(self, names: Sequence[str], got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        scale = max((float(g.double().abs().max()) for g in want if g.numel()), default=0.0)
        for name, slope, expected in zip(names, got, want, strict=True):
            if not _close_to(slope, expected, scale, _SLOPE):
                raise ValueError(
                    f"{self.path}: with layers sharded over {self.axis!r} the gradient of {name} differs from that "
                    f'with full layers. Set its module to "replicated_with_grad_allreduce" in the table if and only if '
                    f"it is applied to sharded values"
                )


_NOTHING, _VALUES, _GRADIENTS = range(3)
"""What `prove` has compared so far."""
Results = tuple[list[Tensor], list[Tensor], list[Tensor]]  # outputs; gradients of parameters, of arguments


def _slopes(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of all outputs, with the same weights on all ranks; zeros for unused inputs."""
    ends = [y for y in outputs if y.requires_grad]
    needed = [x for x in inputs if x.requires_grad]
    weights = [torch.arange(y.numel(), device=y.device).cos().to(y.dtype).view(y.shape) for y in ends]
    gradients = iter(torch.autograd.grad(ends, needed, weights, allow_unused=True) if ends and needed else ())
    by_input = [next(gradients, None) if x.requires_grad else None for x in inputs]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, by_input, strict=True)]


def _cast_copy(x: Any, dtype: torch.dtype | None, differentiated: bool) -> Any:
    if is_cache(x):
        return copy.deepcopy(x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(dtype or x.dtype).requires_grad_(differentiated)


def _close_to(x: Tensor, y: Tensor, scale: float, rounding: float) -> bool:
    """Whether two tensors are equal up to rounding of numbers of magnitude `scale`."""
    if x.shape != y.shape or not x.numel():
        return x.shape == y.shape
    distance = (x.double() - y.double()).nan_to_num().abs().max()
    return bool(distance <= max(rounding, 32 * torch.finfo(x.dtype).eps) * scale)


_ROUNDING = 1e-6  # modules compute some things in float32 whatever their arguments
_SLOPE = 1e-4


class Following(TorchFunctionMode):
    """A context that traces, through the module's code, which values only this rank has.

    Raises:
        ValueError: one is combined with a value that is the same on all ranks and needs a gradient.
    """

    def __init__(self, region: ShardedModules, arguments: Sequence[Any], slots: Sequence[Slot]) -> None:
        super().__init__()
        self.region, self.group = region, bound_axis(region.axis, region.path).group
        self.names: dict[int, str] = {}
        pieces = {
            id(m._parameters[name])
            for m, cut in region.cuts.items()
            for name in cut.shapes
            if m._parameters.get(name) is not None and m._parameters[name].shape != cut.shapes[name]  # type: ignore[union-attr]
        }
        for holder, attr, key in slots:
            value = holder[attr]
            self.names[id(value)] = key
            setattr(value, _MARK, id(value) in pieces)
        for x in arguments:
            if isinstance(x, Tensor):
                setattr(x, _MARK, False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.region.owner.proving:
            return out
        traced = [x for x in _tree_tensors((args, kwargs)) if hasattr(x, _MARK)]
        results = list(_tree_tensors(out)) if traced else []
        if dispatch.is_op(func) and func.namespace.startswith("shardfn"):
            op = str(func.name()).split("::")[-1]
            if self.group in args:
                cut = op not in ("psum", "all_gather_invariant")
            else:
                cut = any(map(is_cut, traced))
        else:
            cut = any(map(is_cut, traced))
            if cut and any(x.requires_grad for x in results):
                self._check_operands(traced, getattr(func, "__name__", str(func)))
        for x in results:
            setattr(x, _MARK, cut)
        return out

    def _check_operands(self, traced: list[Tensor], op: str) -> None:
        for x in traced:
            if x.requires_grad and not is_cut(x) and op not in _SHAPES:
                name = self.names.get(id(x))
                value = f"the parameter {name}" if name else f"a value of shape {tuple(x.shape)}"
                raise ValueError(
                    f"{self.region.path}: {op} combines {value}, replicated over {self.region.axis!r}, with sharded "
                    f"values, so its gradient would be a partial sum. Set its module to "
                    f'"replicated_with_grad_allreduce" in the table, or shard the other operand differently'
                )

    def check(self, results: Any) -> None:
        """Raises ValueError if the stage returns something that is not the same on all ranks."""
        for x in _tree_tensors(results):
            if is_cut(x):
                raise ValueError(
                    f"{self.region.path} returns a value of shape {tuple(x.shape)} that is sharded over "
                    f"{self.region.axis!r}, such as attention weights of local heads. Do not request it, or "
                    f'end it with a "rowwise" or "colwise_gather_output" layer in the table'
                )


_SHAPES = ("expand_as", "view_as", "reshape_as", "type_as", "to")


def is_cut(x: Any) -> bool:
    """Whether a traced value is only this rank's."""
    return bool(getattr(x, _MARK, False))


def _tree_tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in Forms().flatten(tree)[0] if isinstance(x, Tensor))


_SUMMARY = 1e-3  # relative difference of sums from which on values count as different


@at_once()
def _check_same(axis: Axis, name: str, path: str, arguments: Sequence[Any]) -> None:
    """Raises ValueError on every rank along the axis if they are given different values."""
    unwrapped = [functorch.unwrapped(x) for x in arguments if isinstance(x, Tensor) and plain(x)]
    tensors = [x.detach() for x in unwrapped if not x.is_meta and x.numel()]
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
    rows = gathered(torch.stack(sums).cpu(), axis, operation="comparing what it is given", caller=path)
    spread = (rows.amax(0) - rows.amin(0))[:, None].reshape(-1, 2).amax(1)
    if bool((spread > _SUMMARY * rows.abs().amax(0).reshape(-1, 2)[:, 1]).any()):
        raise ValueError(f"{path}: its arguments differ between ranks. {advice}")


class Unsaid:
    """Replaces a number whose meaning the table does not declare, while heads are cut; raises when it is used."""

    def __init__(self, path: str, name: str, axis: str, fix: str) -> None:
        self.path, self.name, self.axis, self.fix = path, name, axis, fix

    def message(self) -> str:
        """The message of the error."""
        return (
            f"{self.path} computes with its {self.name} while {self.axis!r} cuts its layers, and nothing says whether "
            f"that counts what one rank has or what all have: {self.fix}"
        )

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(self.message())


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow",
    "rpow", "neg", "eq", "ne", "lt", "le", "gt", "ge", "index", "int", "float", "hash", "bool",
):  # fmt: skip
    setattr(Unsaid, f"__{_name}__", Unsaid._refuse)


class _Config:
    """A model's config in which numbers of heads, which are not one rank's, raise when they are used."""

    def __init__(self, config: Any, path: str, axis: str) -> None:
        self.__dict__.update(_config=config, _path=path, _axis=axis)

    def __getattr__(self, name: str) -> Any:
        if name in COUNTS:
            return Unsaid(self._path, f"config.{name}", self._axis, "leave its layers out of the table")
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)
