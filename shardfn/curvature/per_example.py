"""Gradients of single examples, without ever holding one for each: their norms, their products, their clipped sum.

The gradient of an example is that of its own loss with respect to all parameters. Stages run on their schedule; while a
stage's parameters are gathered, the norms of its rows' gradients are found from what backward has anyway.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardfn.check.bits import digest_of
from shardfn.check.callsites import paused
from shardfn.collectives import functional
from shardfn.collectives.agree import ARGUMENTS, agree
from shardfn.compat import autograd, functorch
from shardfn.curvature.operators import must_take
from shardfn.curvature.row_axes import Cuts, all_of, cuts, over_ranks, row_axes, same_along
from shardfn.curvature.row_uses import Key, Receiver, SquaredNorms
from shardfn.curvature.rows import ExecutionMode, FunctionCall, cannot, stages_apart
from shardfn.curvature.vectors import random
from shardfn.forward_mode.jvp import jvp
from shardfn.mesh.axes import axis_of, per_mesh
from shardfn.mesh.lanes import lane
from shardfn.mesh.scope import scope
from shardfn.optim.hyperparameters import check_integer, in_range
from shardfn.optim.norms import global_norm
from shardfn.quoting import listed, short
from shardfn.shards.layout import flat_shards, is_flat
from shardfn.shards.pieces import Unit, units
from shardfn.shards.random import int_seed
from shardfn.stages.replay import RngAndAutocast
from shardfn.transforms.accumulate import accumulate
from shardfn.transforms.autodiff import Variables, grad, moves, name_of, value_and_grad
from shardfn.transforms.fitting import program_ranks
from shardfn.transforms.modules import refuse_module

Losses = Callable[..., Tensor]
_ALIKE = "the arguments", "All ranks clip alike, and add parts of the same noise: pass the same"


@dataclass(frozen=True, eq=False)
class PerExample:
    """The examples of this rank.

    Attributes:
        values: their losses, `[rows]`.
        norms: norms of the gradients of these losses with respect to all parameters, `[rows]`.
    """

    values: Tensor
    norms: Tensor
    _losses: Losses = field(repr=False)
    _params: Any = field(repr=False)
    _batch: BatchArguments = field(repr=False)
    _micro: int = field(repr=False)

    def dots(self, direction: Any) -> Tensor:
        """The inner product of each example's gradient with a tree like the parameters, `[rows]`.

        Args:
            direction: a tree like the parameters, with their layouts. For leaves without a gradient, anything.
        """
        parts = self._batch.parts(self._micro)
        losses, params = self._losses, self._params
        dots = [jvp(lambda p, part=part: part.batched_losses(losses, p), (params,), (direction,))[1] for part in parts]
        return torch.cat(dots)

    def clipped(self, limit: float) -> Any:
        """The sum over all ranks' rows of gradients, each scaled to a norm of at most `limit`.

        It is a tree like a gradient, and takes one more forward and backward. If the gradient of any row is not finite,
        the sum is not.

        Args:
            limit: above 0, the same on all ranks.
        """
        limits = [f"limit: {float(limit)!r}"]
        _all_alike(lambda: in_range("clipped", "limit", float(limit)), self._params, "clipped", limits)
        return self._weighted(self._scales(limit))

    def _scales(self, limit: float) -> Tensor:
        return (limit / self.norms.clamp(min=limit)).where(self.norms.isfinite(), self.norms)

    def weighted(self, weights: Tensor) -> Any:
        """The sum over all ranks' rows of weights times gradients; a tree like a gradient.

        Args:
            weights: of this rank's rows, `[rows]`.
        """

        def fit() -> None:
            if weights.shape != self.norms.shape:
                raise ValueError(f"weights: {tuple(weights.shape)}, for {len(self.norms)} examples of this rank")

        _all_alike(fit, self._params, "weighted")
        return self._weighted(weights)

    def _weighted(self, weights: Tensor) -> Any:
        parts = self._batch.parts(self._micro)
        pairs = list(zip(weights.detach().split([part.rows for part in parts]), parts, strict=True))

        def total(params: Any, weights: Tensor, part: BatchArguments) -> Tensor:
            losses = part.batched_losses(self._losses, params)
            return (losses * weights.to(losses.dtype)).sum()

        if len(pairs) == 1:
            gradient = grad(total)(self._params, *pairs[0])
        else:
            gradient = accumulate(total, pairs)(self._params)[1]
        return _sum_over_ranks(self._params, gradient)


def per_example(losses: Losses, params: Any, *batch: Any, micro: int = 1) -> PerExample:
    """Norms of per-example gradients, with their inner products and clipped or weighted sums.

    Where rows are used by matrix products, embeddings and convolutions, norms are found from activations and their
    gradients; elsewhere from the gradients of as many rows as fit into some memory. At the first call with a function
    all losses, and one gradient, are compared with those of `losses` as it is written.

    Along an axis that cuts parameters, as one of tensor parallelism, ranks have the same rows, and the same losses.

    Args:
        losses: `(params, *batch) -> [rows]`: the loss of each row, of this rank's rows, neither summed nor averaged. A
            row's loss depends on no other row. It is called with one row at a time, of which `torch.func.vmap` makes
            all; a stage may do what vmap cannot, and is then called for each row.
        params: a pytree of flat shards and tensors.
        *batch: pytrees; every tensor in them has this rank's rows in dim 0. Anything else is the same for all rows.
        micro: in how many parts the batch is taken, one after another, on every rank.

    Returns:
        `PerExample`, with values and norms of this rank's rows.

    Raises:
        ValueError, TypeError: rows that do not match; a result that is not one loss a row; parameters that live on some
            ranks only, or are sharded over an axis along which ranks have other rows, as experts are.
        RuntimeError: rows that are mixed, as by a batch norm; other random numbers than in `losses` as it is written;
            a transform around it.

    Sources: Goodfellow, Efficient per-example gradient computations (2015); Li et al., Large language models can be
    strong differentially private learners (2022); Bu et al., Differentially private optimization on large model at
    small cost (2023).

    Example:
        >>> import torch
        >>> losses = lambda w, x: (x @ w).square()
        >>> rows = per_example(losses, torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        >>> rows.norms
        tensor([2., 0.])
    """
    return examples(losses, params, batch, "per_example", micro)


def examples(losses: Losses, params: Any, batch: tuple[Any, ...], name: str, micro: int = 1) -> PerExample:
    """As `per_example`, with the caller's name for messages."""
    refuse_module(name, losses)
    if functorch.inside_transform() or functorch.inside_forward_mode():
        raise RuntimeError(f"{name} inside of another transform: take it outside")
    sharded_axes = cuts(params, name)

    def right() -> tuple[Any, ...]:
        check_integer(name, "micro", micro, 1)  # a batch is split into so many parts
        must_take(losses, [params, *batch], name, fix="Pass what follows the parameters one by one: x, y, not (x, y)")
        return batch

    _, rows = checked_batch(params, right, name, [f"micro={micro}"])
    same_along(sharded_axes, params, rows.leaves, name)
    check = _unseen(losses, params, rows)
    results = []
    for part in rows.parts(micro):
        forward_state = RngAndAutocast(part.device, [], again=check is not None)
        results.append(_norms(losses, params, part, sharded_axes, name))
        if check is not None:
            with forward_state.restored_state(), paused():  # a checked call judges the program's own gradients
                compared = _compare_losses(losses, params, part, results[-1], name)
            if compared:
                check()
            check = None
    values, norms = (torch.cat([getattr(result, name) for result in results]) for name in ("values", "norms"))
    return PerExample(values, norms, losses, params, rows, micro)


def dp_grads(
    losses: Losses,
    params: Any,
    batch: Any,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
    seed: int,
    step: int,
    mask: Tensor | None = None,
    micro: int = 1,
) -> Any:
    r"""A differentially private gradient: clipped per example, summed over all ranks, with noise, and divided.

    :math:`(\sum_i g_i \min(1, C / \lVert g_i \rVert) + \sigma C z) / B`, with z normal. Each element of each
    parameter gets one number, which depends on seed, step and its place alone, so it is the same on any mesh.

    This is the arithmetic. A guarantee also needs batches sampled as the accounting assumes, as by `sample_rate=` of
    `sf.run.batches`; an `expected_batch_size` that does not depend on the sample; and a secret seed. The numbers come
    from a hash, not from a cryptographic generator. `epsilon` says what is guaranteed.

    Args:
        losses: as for `per_example`.
        params: as for `per_example`.
        batch: the batch, or a tuple of what follows the parameters in a call of `losses`.
        max_grad_norm: C, above 0.
        noise_multiplier: sigma, 0 or more.
        expected_batch_size: B, the expected number of examples of all ranks.
        seed: any int. It is secret, and no two gradients that are published have the same seed and step: of two with
            another noise_multiplier or max_grad_norm, one could subtract it.
        step: the number of the step.
        mask: bool `[rows]`: this rank's rows that count; None for all. What others hold makes no difference, and they
            take no time. A rank may have no rows that count, and so may all of them.
        micro: in how many parts the batch is taken.

    Returns:
        A tree like a gradient.

    Raises:
        ValueError, TypeError, RuntimeError: as `per_example`; numbers that are out of their range, or differ between
            ranks; a mask that is not bool `[rows]`; parameters in fewer than 32 bits, in which sums are rounded before
            there is noise.

    Sources: Abadi et al., Deep learning with differential privacy (2016), algorithm 1.
    """
    tree = batch if isinstance(batch, tuple) else (batch,)

    def right() -> tuple[Any, ...]:
        _refuse_settings(params, max_grad_norm, noise_multiplier, expected_batch_size)
        int_seed(seed)
        must_take(losses, [params, *tree], "dp_grads", fix="The batch is a tuple of what follows: (x, y)")
        int_seed(step)
        return tree if mask is None else _counting(tree, mask)

    settings = {
        "max_grad_norm": max_grad_norm,
        "noise_multiplier": noise_multiplier,
        "expected_batch_size": expected_batch_size,
        "step": step,
    }
    seed_checksum = digest_of(f"{seed}".encode()) % 2**24  # a message must not tell the seed, which is secret
    lines = [*(f"{key}: {value!r}" for key, value in settings.items()), f"seed: an int with checksum {seed_checksum:x}"]
    arguments, _ = checked_batch(params, right, "dp_grads", lines, _ALIKE)
    rows = examples(losses, params, arguments, "dp_grads", micro)
    leaves = units(rows._weighted(rows._scales(max_grad_norm)))
    salt = int_seed(seed), "noise", int_seed(step)

    def noisy(unit: Unit) -> Any:
        if not unit.trainable or unit.values is None:
            return unit.values
        if not noise_multiplier:
            return unit.values / expected_batch_size
        noise = noise_multiplier * max_grad_norm * random(unit, "normal", salt)
        return (unit.values + noise.to(unit.values.dtype)) / expected_batch_size

    return leaves.with_values(noisy(unit) for unit in leaves.each)


def _refuse_settings(params: Any, max_grad_norm: Any, noise_multiplier: Any, expected_batch_size: Any) -> None:
    for name, value in {"max_grad_norm": max_grad_norm, "expected_batch_size": expected_batch_size}.items():
        if not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise ValueError(f"dp_grads: {name} must be a finite number above 0, got {value!r}")
    if not isinstance(noise_multiplier, Real) or not 0 <= float(noise_multiplier) < math.inf:
        raise ValueError(f"dp_grads: noise_multiplier must be a finite number, 0 or more, got {noise_multiplier!r}")
    narrow = [unit for unit in units(params).each if unit.trainable and unit.values is not None]
    narrow = [unit for unit in narrow if unit.values.dtype.itemsize < 4]
    if narrow:
        raise TypeError(
            f"dp_grads: {narrow[0].name} is in {narrow[0].values.dtype}, in which sums are rounded before noise is "
            f"added: one row could change it by more than max_grad_norm. Keep parameters in float32, with gather_dtype="
        )


def noise_scale(norms: Tensor, gradient: Any) -> Tensor:
    r"""The simple noise scale: the size of a batch at which noise and mean of its gradient are equally large.

    :math:`\operatorname{tr} \Sigma / \lVert G \rVert^2`, both without bias, from the gradients of the n examples of
    all ranks. An estimate from few examples may be negative, or large; average both of many steps, or the result.

    Args:
        norms: of this rank's examples' gradients, `[rows]`.
        gradient: their mean over the examples of all ranks.

    Returns:
        A 0-d tensor, the same on every rank; nan from fewer than two examples.

    Sources: McCandlish et al., An empirical model of large-batch training (2018), equations 2.8 and A.2.
    """
    wide = norms.double()
    total, n = over_ranks(gradient, torch.stack([wide.square().sum(), wide.new_tensor(float(len(wide)))])).unbind()
    mean = global_norm(gradient).double().square()
    spread = (total / n - mean) * n / (n - 1)
    return spread / (mean - spread / n)


def _all_alike(
    find: Callable[[], Any], params: Any, name: str, lines: Sequence[str] = (), subject: tuple[str, str] = _ALIKE
) -> Any:
    """Returns the result of `find`; raises on all ranks if one raises, or if lines differ."""
    result, error = None, None
    try:
        result = find()
    except (TypeError, ValueError) as failure:
        error = failure
    agree([*lines], program_ranks(params), name, own_error=error, subject=subject)
    return result


# --- the batch ---


@dataclass(frozen=True, eq=False)
class BatchArguments:
    """Arguments after the parameters.

    Attributes:
        leaves: their leaves.
        tree: their structure.
        mapped: which leaves have rows.
        rows: number of rows.
    """

    leaves: list[Any]
    tree: optree.PyTreeSpec
    mapped: list[bool]
    rows: int

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return next(x.device for x, has_rows in zip(self.leaves, self.mapped, strict=True) if has_rows)

    def batched_losses(self, losses: Losses, params: Any, name: str = "per_example") -> Tensor:
        """Returns the losses of one call with all rows, without vmap."""
        result = losses(params, *optree.tree_unflatten(self.tree, self.leaves))
        if not isinstance(result, Tensor) or result.shape != (self.rows,):
            raise TypeError(_not_losses(losses, result, f"{self.rows} rows", name))
        return result

    def filled(self) -> list[Any]:
        """The leaves, with a row of zeros if there is none, as all ranks call stages equally often."""
        if self.rows:
            return self.leaves
        pairs = zip(self.leaves, self.mapped, strict=True)
        return [x.new_zeros((1, *x.shape[1:])) if has_rows else x for x, has_rows in pairs]

    def having(self, some: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        """Returns the arguments with a selection of the rows."""
        leaves = [some(x) if has_rows else x for x, has_rows in zip(self.leaves, self.mapped, strict=True)]
        arguments: tuple[Any, ...] = optree.tree_unflatten(self.tree, leaves)
        return arguments

    def parts(self, n: int) -> list[BatchArguments]:
        """Splits the batch into n parts; with too few rows the last are empty."""
        if n == 1:
            return [self]
        counts = [self.rows // n + (i < self.rows % n) for i in range(n)]
        split = [x.split(counts) if has_rows else [x] * n for x, has_rows in zip(self.leaves, self.mapped, strict=True)]
        return [BatchArguments([xs[i] for xs in split], self.tree, self.mapped, counts[i]) for i in range(n)]


def batch_of(batch: tuple[Any, ...], name: str = "per_example") -> BatchArguments:
    """Returns the arguments after the parameters; raises TypeError or ValueError without a common dim 0."""
    paths, leaves, tree = optree.tree_flatten_with_path(batch, none_is_leaf=True)
    if flat_shards(batch):
        raise TypeError(f"{name}: there is a flat shard in the batch; pass parameters as `params`")
    mapped = [isinstance(x, Tensor) and x.ndim > 0 for x in leaves]
    counts = {str(path): len(x) for path, x, has_rows in zip(paths, leaves, mapped, strict=True) if has_rows}
    if not counts:
        raise ValueError(f"{name}: no tensor of the batch has rows: every tensor has this rank's rows in dim 0")
    if len(set(counts.values())) > 1:
        listing = listed(f"{path} has {n}" for path, n in counts.items())
        raise ValueError(f"{name}: every tensor of the batch has this rank's rows in dim 0, and {listing}")
    return BatchArguments(leaves, tree, mapped, next(iter(counts.values())))


def checked_batch(
    params: Any,
    batch: Callable[[], tuple[Any, ...]],
    name: str,
    lines: Sequence[str] = (),
    subject: tuple[str, str] = ARGUMENTS,
) -> tuple[tuple[Any, ...], BatchArguments]:
    """Returns a batch's arguments and rows, after all ranks have checked theirs and compared lines."""

    def right() -> tuple[tuple[Any, ...], BatchArguments]:
        arguments = batch()
        return arguments, batch_of(arguments, name)

    result: tuple[tuple[Any, ...], BatchArguments] = _all_alike(right, params, name, lines, subject)
    return result


def _counting(batch: tuple[Any, ...], mask: Tensor) -> tuple[Any, ...]:
    """Selects the rows of a batch that a mask includes."""
    rows = batch_of(batch, "dp_grads")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (rows.rows,):
        description = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"dp_grads: mask must be bool, [{rows.rows}], one for each of this rank's rows, got {description}"
        )
    indices = mask.nonzero()[:, 0]
    return rows.having(lambda x: x.index_select(0, indices.to(x.device)))


def _not_losses(losses: Losses, result: Any, subject: str, name: str) -> str:
    description = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    return (
        f"{name}: {name_of(losses)} returns one loss a row, [rows], and returned {description} for {subject}: leave "
        f"out the mean or sum over rows, as by reduction='none'"
    )


# --- norms ---


class ExampleNorms(NamedTuple):
    """Losses and norms of some rows, and the relative rounding of the coarsest numbers from which they come."""

    values: Tensor
    norms: Tensor
    eps: float


def _code_key(function: Any, depth: int = 3) -> Any:
    """The code of a function and its closure, equal for functions that each step makes again."""
    if isinstance(function, functools.partial):
        callees = [callee for callee in (function.func, *function.args) if callable(callee)]
        return tuple(_code_key(callee, depth - 1) for callee in callees if depth)
    cells = getattr(function, "__closure__", None) or ()
    with contextlib.suppress(ValueError):  # an empty cell
        inner = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
        return getattr(function, "__code__", type(function)), *(
            _code_key(callee, depth - 1) for callee in inner if depth
        )
    return getattr(function, "__code__", type(function))


def _norms(losses: Losses, params: Any, batch: BatchArguments, sharded_axes: Cuts, name: str) -> ExampleNorms:
    """Computes the losses and the gradient norms of the rows."""
    norms = SquaredNorms(max(batch.rows, 1), *dtype_and_device(params, batch), sharded_axes)
    values = visit(losses, params, batch, norms, name)
    squares = norms.squares.pop(())
    if sharded_axes:
        mesh, axes = row_axes(params)[0], all_of(sharded_axes)
        local = torch.stack([values.double(), squares[: batch.rows].double()])
        with scope(mesh):
            maxima, negated_minima = functional.pmax(torch.cat([local, -local]), axes).chunk(2)
            squares[: batch.rows] = maxima[1]
            for names, part in norms.squares.items():
                squares += functional.psum(part, names)
        scale = torch.stack([values.abs().double(), squares[: batch.rows].double()])
        differ = bool((maxima + negated_minima > 4 * math.sqrt(norms.eps) * scale).any())
        error = ValueError(
            f"{name}: along {', '.join(axes)}, which cut parameters, ranks have other losses of the same rows, or "
            f"other gradients of parameters that no axis cuts: end losses in psum, and write pvary where such a "
            f"parameter, or what all ranks have, meets what each rank has"
        )
        agree([], program_ranks(params), name, own_error=error if differ else None)
    return ExampleNorms(values, squares.sqrt()[: batch.rows], norms.eps)


def dtype_and_device(params: Any, batch: BatchArguments) -> tuple[torch.dtype, torch.device]:
    """The dtype in which gradients of rows are summed, float32 or wider, and the device."""
    values = Variables(params).values
    dtype = torch.float64 if any(x.dtype in (torch.float64, torch.complex128) for x in values) else torch.float32
    return dtype, values[0].device if values else batch.device


def visit(losses: Losses, params: Any, batch: BatchArguments, receiver: Receiver, name: str) -> Tensor:
    """Computes the losses of the rows, `[rows]`, and passes their gradients to a receiver.

    A rank without rows visits one of zeros, since it calls stages as often as others: its receiver has one row.
    """
    wrapped = Variables(params)
    layouts = wrapped.layouts
    values = [x.detach() for x in wrapped.values]
    pairs = enumerate(zip(values, layouts, strict=True))
    shards = {id(x): (i, x.requires_grad_()) for i, (x, layout) in pairs if layout is not None}
    keys = [Key(i) if layout is None else None for i, layout in enumerate(layouts)]
    rows = [x.detach() if isinstance(x, Tensor) else x for x in batch.filled()]
    # Each row is a batch of one row.
    rows = [x[:, None] if has_rows else x for x, has_rows in zip(rows, batch.mapped, strict=True)]
    dtype, device = dtype_and_device(params, batch)
    # With shards, ranks call stages equally often, so not for some rows alone.
    mode = ExecutionMode.for_code(_code_key(losses), 1 if shards else 2, bounded=not shards)

    def call(leaves: list[Any]) -> Any:
        receiver.calls.clear()
        arguments = optree.tree_unflatten(batch.tree, leaves[len(values) :])
        result = losses(wrapped.tree(leaves[: len(values)]), *arguments)
        if not isinstance(result, Tensor) or result.shape != (1,):
            raise TypeError(_not_losses(losses, result, "one row", name))
        return result

    def total(anchor: Tensor) -> tuple[Tensor, Tensor]:
        mapped = [False] * len(values) + batch.mapped
        all_keys = [*keys, *[None] * len(rows)]
        with stages_apart(receiver, shards):
            try:
                result, which = mode.run(FunctionCall(call, [*values, *rows], mapped, all_keys, anchor, receiver))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if not cannot(error) or not shards:
                    raise
                raise RuntimeError(
                    f"{name}: {name_of(losses)} does something outside of stages that torch.func.vmap cannot do "
                    f"for rows: let a stage do it. It said: {short(error)}"
                ) from error
        row_losses = result[:, 0] if which[0] else result.expand(receiver.rows)
        if not shards.keys().isdisjoint(id(leaf) for leaf in autograd.leaves_of([row_losses])):
            raise RuntimeError(
                f"{name}: {name_of(losses)} computes with a flat shard outside of stages, where its rows cannot "
                f"be told apart: let a stage do it"
            )
        return row_losses.sum(), row_losses.detach()

    anchor = torch.zeros((), dtype=dtype, device=device)
    with torch.no_grad():  # nothing outside takes a gradient of it
        (_, row_losses), _ = value_and_grad(total, has_aux=True)(anchor)
        receiver.finish()
    return row_losses[: batch.rows]


# --- the first call, compared with the losses as they are written ---


_seen: set[Any] = set()


def _unseen(losses: Losses, params: Any, batch: BatchArguments) -> Callable[[], None] | None:
    """Returns a function that marks losses as compared; None if they were. All ranks agree."""
    mesh, _ = row_axes(params)
    compared: set[Any] = _seen if mesh is None else per_mesh(mesh, ("per_example", lane()), set)
    key = _code_key(losses), batch.tree
    return None if key in compared else lambda: compared.add(key)


def compare_once(losses: Losses, params: Any, batch: tuple[Any, ...], name: str) -> None:
    """Raises RuntimeError on every rank if the losses mix rows, unless compared before."""
    if _unseen(losses, params, batch_of(batch, name)) is not None:
        examples(losses, params, batch, name)


def _compare_losses(losses: Losses, params: Any, batch: BatchArguments, computed: ExampleNorms, name: str) -> bool:
    """Compares losses, and the gradient norm of one row, with those of a call without vmap.

    Returns:
        Whether the ranks at the first position of the axes of rows have one, the same on every rank.

    Raises:
        RuntimeError: on every rank, if they differ on one.
    """
    mesh, axes = row_axes(params)
    position = 0 if mesh is None else axis_of(mesh, axes).index  # on all ranks, as it may make a group
    first = batch.rows > 0 and position == 0
    _, device = dtype_and_device(params, batch)
    weights = torch.zeros(batch.rows, device=device)
    weights[-1:] = float(first)

    def total(params: Any) -> tuple[Tensor, Tensor]:
        row_losses = batch.batched_losses(losses, params, name)
        return (row_losses * weights.to(row_losses.dtype)).sum(), row_losses

    (_, row_losses), gradient = value_and_grad(total, has_aux=True)(params)
    norm = global_norm(_sum_over_ranks(params, gradient)).double()
    precision = math.sqrt(computed.eps)
    differences = row_losses.double()
    if batch.rows:
        differences = (row_losses - computed.values).abs().double() / row_losses.abs().max().clamp(min=1e-30)
    row = int(differences.argmax()) if batch.rows else 0
    other = computed.norms[-1:].double()
    flags = torch.zeros(3, dtype=torch.float64, device=device)
    flags[2] = float(first)
    flags[0] = float((differences > 4 * precision).any())
    if first:  # where gradients are summed in fewer bits, the norm as written is a rough one
        tolerance = precision if precision < 1e-6 else max(precision, 2e-2)
        flags[1] = float(((norm - other).abs() > tolerance * norm.maximum(other)).any())
    if mesh is not None and mesh.size() > 1:
        with scope(mesh):
            flags = functional.psum(flags, tuple(mesh.mesh_dim_names or ()))
    if bool(flags[0] > 0):
        details = ""
        if bool((differences > 4 * precision).any()):
            in_batch, alone = float(row_losses[row]), float(computed.values[row])
            details = f" (here row {row}: {in_batch:.6g} in the batch, {alone:.6g} alone)"
        raise RuntimeError(
            f"{name}: the loss of a row differs when {name_of(losses)} gets this row alone{details}: rows are mixed, "
            f"as by a batch norm, or random numbers differ. Draw random numbers before, and pass them as rows"
        )
    if bool(flags[1] > 0):
        raise RuntimeError(
            f"{name}: on rank 0 the norm of the last row's gradient differs from that of {name_of(losses)} called with "
            f"all rows{f' ({float(other):.6g}, and {float(norm):.6g} with all)' if first else ''}: its derivative "
            f"mixes rows, or differs from autograd's for one row"
        )
    return bool(flags[2] > 0)


# --- sums over ranks ---


def _sum_over_ranks(params: Any, gradient: Any) -> Any:
    """Sums the plain tensors of a gradient over ranks; stages have summed the flat shards."""
    return optree.tree_map(
        lambda node: node if is_flat(node) or not moves(node) else over_ranks(params, node), gradient, is_leaf=is_flat
    )
