"""Losses and gradients of a batch whose bits do not depend on the mesh: part by part, added by one tree."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardfn.check.callsites import paused
from shardfn.collectives import functional
from shardfn.collectives.agree import agree
from shardfn.collectives.capturing import capturing
from shardfn.compat import dispatch, dynamo, functorch, process_groups
from shardfn.mesh.axes import device_of
from shardfn.mesh.exact import order, split_bases, sum_of_pieces
from shardfn.mesh.grid import Axis
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import BatchPart, current_axes, in_part, inside_part, mesh_of, scope_of
from shardfn.shards.layout import Layout
from shardfn.shards.random import mixed
from shardfn.tiers.streaming import in_place
from shardfn.transforms.autodiff import Variables, detached, follow, reaches_others, totals, unshared
from shardfn.transforms.fitting import Batch, agreed_batch, path_text, program_ranks
from shardfn.transforms.shortage import RandomNumbers
from shardfn.transforms.step import Parts, Step, exact_part_differentiates

_log = logging.getLogger("shardfn")
OfPart = Callable[[Any, Any], tuple[Tensor, Any, Any]]


def part_by_part(
    f: OfPart, tree: Any, params: Any, described: Sequence[str], name: str
) -> tuple[Tensor, list[Any], Any, int]:
    """The loss of all parts of a batch, the aux of each, the gradient, and how many parts this rank has.

    Args:
        f: `(params, part) -> (total, aux, count or None)`, of the rows of one part.
        tree: this rank's rows, a pytree.
        params: flat shards of one number of exact parts, and leaves without a gradient.
        described: other arguments that must be equal on all ranks, a line for each.
        name: the function's name, for messages.
    """
    _refuse_transforms(name, params)
    wrapped = Variables(params)
    layout, axes = _common(wrapped, name)
    _require_deterministic_kernels(device_of(mesh_of(layout.grid, name)), name)
    exact, ranks = layout.placement.exact, layout.grid.size(axes)
    count = exact // ranks
    _log_once(exact, ranks)
    with paused():
        seed = 0 if planned() else int(torch.randint(2**62, (), device="cpu"))
    batch = agreed_batch(tree, count, [*described, f"numbers drawn from torch's state {seed}"], program_ranks(params))
    first = _index(layout, axes) * count
    variables = [value.detach().requires_grad_() for value in wrapped.values]
    results: dict[int, tuple[Tensor, Any, Any]] = {}
    in_scope = scope_of(layout.grid, name) if current_axes() is None else contextlib.nullcontext()
    with in_scope:
        with torch.enable_grad(), Step(variables) as step, paused(), _restored_random_numbers(variables):
            step.parts = Parts(split_bases(exact, ranks)[1])
            for number in order(exact, ranks):
                part = BatchPart(axes, first + number, exact)
                _seed(mixed(seed, part.number))
                results[number] = _one_part(
                    f, wrapped.tree(variables), _rows_of_part(batch, number, count), part, step, variables
                )
            step.next_part()
            collected = step.finish()
        follow(collected, variables, wrapped.layouts)
        values, auxes, counts = zip(*(results[number] for number in range(count)), strict=True)
        total = _sum_over_parts(values, axes, exact)
        rows = None if counts[0] is None else _sum_over_parts(_tensors(counts, values[0].device, name), axes, exact)
        every = _of_all_parts(auxes, axes, program_ranks(params), values[0].device, name)
        gradients = unshared(totals([None] * len(variables), collected, variables, wrapped.layouts))
    if rows is not None:
        in_place(gradients, _divide_by_rows(rows))
        total = (total / rows).to(total.dtype)
    return total, every, wrapped.gradient(gradients), count


@functools.cache
def _log_once(exact: int, ranks: int) -> None:
    _log.info(
        "accumulate: exact in %d parts, %d on each of %d ranks, one after another; every part sends its gradients",
        exact, exact // ranks, ranks,
    )  # fmt: skip


def _refuse_transforms(name: str, params: Any) -> None:
    dynamo.refuse_compiling(f'accumulate({name}, micro="exact")')
    if inside_part():
        raise exact_part_differentiates(f"accumulate({name})")
    if dispatch.in_graph() or capturing() is not None:
        raise RuntimeError(
            f'accumulate({name}, micro="exact"): exact sums are not supported in a compiled or captured step'
        )
    outside = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in optree.tree_leaves(params)
    )
    if outside or functorch.inside_transform() or functorch.inside_batching_or_forward():
        raise RuntimeError(
            f'accumulate({name}, micro="exact"): exact sums are not supported under a transform of torch.func, or '
            f"where something outside differentiates. For that, shard the parameters by a strategy without with_exact"
        )


def _require_deterministic_kernels(device: torch.device, name: str) -> None:
    """Raises RuntimeError on a CUDA device whose kernels may add in another order every time."""
    if device.type != "cuda":
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.benchmark:
        raise RuntimeError(
            f'accumulate({name}, micro="exact"): CUDA kernels must be deterministic: call '
            f"torch.use_deterministic_algorithms(True), and leave torch.backends.cudnn.benchmark False"
        )


def _common(wrapped: Variables, name: str) -> tuple[Layout, tuple[str, ...]]:
    """A layout with the parts that all parameters have, and the axes along which ranks have different rows.

    Raises:
        ValueError: there are no parameters, or they differ in this, or are no flat shards.
    """
    layouts = [layout for layout in wrapped.layouts if layout is not None]
    if not layouts or len(layouts) < len(wrapped.layouts) or not all(layout.placement.exact for layout in layouts):
        raise ValueError(
            f'accumulate({name}, micro="exact"): all parameters with a gradient must be flat shards of a strategy with '
            f'exact parts: sf.shard(params, mesh, sf.full_shard("shard").with_exact(8))'
        )
    kinds = {
        (layout.placement.exact, frozenset(layout.placement.axes + layout.placement.replicas)) for layout in layouts
    }
    if len(kinds) > 1 or len({layout.grid for layout in layouts}) > 1:
        text = "; ".join(sorted(f"with_exact({n}) over {', '.join(sorted(names))}" for n, names in kinds))
        raise ValueError(f'accumulate({name}, micro="exact"): parameters must have the same parts and axes, got {text}')
    ((_, names),) = kinds
    return layouts[0], tuple(axis for axis, _ in layouts[0].grid.sizes if axis in names)


def _index(layout: Layout, axes: tuple[str, ...]) -> int:
    return layout.grid.index(process_groups.global_rank(), axes)


@contextlib.contextmanager
def _restored_random_numbers(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context after which default generators draw the numbers that they would have drawn before."""
    before, pythons = RandomNumbers(tensors), random.getstate()
    numpys = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        yield
    finally:
        before.restore()
        random.setstate(pythons)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)


def _seed(seed: int) -> None:
    """Seeds the default generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # it takes 32 bits


def _rows_of_part(batch: Batch, number: int, count: int) -> Any:
    """A copy of the rows of one part: kernels may round differently within a larger batch, or at another alignment."""
    n = batch.rows // count
    leaves = [x[number * n : (number + 1) * n].clone(memory_format=torch.contiguous_format) for x in batch.tensors]
    return optree.tree_unflatten(batch.tree, leaves)


def _one_part(
    f: OfPart, params: Any, rows: Any, part: BatchPart, step: Step, variables: Sequence[Tensor]
) -> tuple[Tensor, Any, Any]:
    """The total, aux and count of one part; the step collects its gradient."""
    with in_part(part):
        value, aux, count = f(params, rows)
        if reaches_others((value, aux), variables):
            raise RuntimeError(
                'accumulate(micro="exact"): the loss or aux depends on a tensor that needs a gradient and is none of '
                "the parameters. Pass it among these, or detach it"
            )
        step.next_part()  # of the one before, whose gradients may have been on their way until now
        with step.differentiating([value]):  # also where this rank's loss uses no parameter, as others' may
            gradients: Sequence[Tensor | None] = ()
            if value.requires_grad:
                gradients = torch.autograd.grad(value, variables, allow_unused=True)
            if any(g is not None for g in gradients):
                raise RuntimeError(
                    'accumulate(micro="exact"): the loss reads the numbers of a shard outside of a stage, and a '
                    "rank has others on another mesh: read parameters in a function that shardfn.stage wraps"
                )
    return value.detach(), optree.tree_map(detached, aux), count


def _tensors(counts: Sequence[Any], device: torch.device, name: str) -> list[Tensor]:
    if any(count is None for count in counts):
        raise ValueError(f"accumulate: {name} must return (total, count) for every part or for none")
    return [_tensor_on(device, count, torch.float64) for count in counts]


def _tensor_on(device: torch.device, x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor or number on a device, for which the host does not wait."""
    if isinstance(x, Tensor):
        return x.to(device, dtype, non_blocking=True)
    return torch.full((), x, dtype=torch.as_tensor(x).dtype if dtype is None else dtype, device=device)


def _sum_over_parts(values: Sequence[Tensor], axes: tuple[str, ...], exact: int) -> Tensor:
    """The sum of 0-d tensors of all parts, the same on every rank."""
    return sum_of_pieces(functional.all_gather(torch.stack(list(values)), axes, to="invariant"), exact)


def _of_all_parts(
    auxes: Sequence[Any], axes: tuple[str, ...], ranks: Axis, device: torch.device, name: str
) -> list[Any]:
    """The aux of each part of all ranks, in order, from those of this rank.

    Raises:
        TypeError: a leaf is no tensor and no number.
        ValueError: their structures, shapes or dtypes differ.
    """
    leaves, trees = zip(*map(optree.tree_flatten, auxes), strict=True)
    if not any(leaves):
        return list(auxes) * ranks.size
    described = [f"aux{path_text(path)} {_described(x)}" for aux in auxes for path, x in _with_paths(aux)]
    agree([*described, f"{name} returns {trees[0]}"], ranks, "accumulate", subject=_AUX)
    if len(set(trees)) > 1 or len(set(described)) * len(auxes) > len(described):
        raise ValueError(
            f'accumulate({name}, micro="exact"): the aux of each part must have the same shapes and dtypes'
        )
    columns = [torch.stack([_tensor_on(device, x) for x in column]) for column in zip(*leaves, strict=True)]
    gathered = [functional.all_gather(column, axes, to="invariant").unbind() for column in columns]
    return [optree.tree_unflatten(trees[0], row) for row in zip(*gathered, strict=True)]


_AUX = "the auxes of parts", "Each part gives an aux of the same structure, shapes and dtypes, on every rank"


def _with_paths(aux: Any) -> list[tuple[Any, Any]]:
    paths, leaves, _ = optree.tree_flatten_with_path(aux)
    return list(zip(paths, leaves, strict=True))


def _described(x: Any) -> str:
    if not isinstance(x, (Tensor, int, float)):
        raise TypeError(
            f"accumulate: aux must have tensors and numbers alone with micro='exact', got {type(x).__name__}"
        )
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


def _divide_by_rows(count: Tensor) -> Callable[[list[Tensor]], None]:
    """A function that divides tensors in place: those of 16 bits in float32, as a count may be infinite in theirs."""

    @functools.cache
    def count_on(device: torch.device, dtype: torch.dtype) -> Tensor:
        return count.to(device, dtype)

    def divide(xs: list[Tensor]) -> None:
        for x in xs:
            if x.dtype.itemsize > 2:
                x.div_(count_on(x.device, x.dtype))
            else:
                x.copy_(x.float() / count_on(x.device, torch.float32))

    return divide
