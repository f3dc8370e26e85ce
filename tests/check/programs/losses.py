"""What a loss is divided by, so that it is the mean over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P
from tests.check.programs.setting import ROWS, D, Made, On, plainly, right
from tests.models import drawn, tensors


def _fitted(on: On, loss: Callable[..., Tensor], *data: Tensor, wanted: Callable[..., Tensor]) -> Made:
    """The value and gradient of `loss(params, *data, axis)` for flat shards, whole, and of the same on one process."""
    draw = drawn(20)
    params = {"first": {"w": draw(3, D)}, "last": {"w": draw(D, 2)}}
    flat = sf.shard(params, on.mesh, sf.full_shard("shard"))
    step = on(sf.value_and_grad(lambda p, *data: loss(p, *data, "shard")), (..., *[P("shard")] * len(data)), (P(), ...))

    def run() -> Any:
        value, gradient = step(flat, *on.cut(data, "shard"))
        return value, sf.unshard(gradient)

    return run, plainly(lambda p: wanted(p, *data), params)


@right(shard=2)
def a_sum_over_all_rows_with_a_feature_for_each_rank(on: On) -> Made:
    """A rank has as many elements as all ranks have rows."""
    w, x = tensors(29, (3, 2), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        return (x @ sf.pvary(w, data)).square().sum() / ROWS

    step = on(lambda w, x: sf.grad(loss)(w, x, "shard"), (P(), P("shard")), P())
    return lambda: step(w, on.cut(x, "shard")), plainly(loss, w, x)[1]


@right(shard=2)
def means_over_features_that_are_summed_over_rows(on: On) -> Made:
    w, x = tensors(29, (3, 2), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        return ((x @ sf.pvary(w, data)).square().sum(1) / 2).sum() / ROWS

    step = on(lambda w, x: sf.grad(loss)(w, x, "shard"), (P(), P("shard")), P())
    return lambda: step(w, on.cut(x, "shard")), plainly(loss, w, x)[1]


_first = sf.stage(lambda p, x: torch.tanh(x @ p["w"]))
_last = sf.stage(lambda p, x: x @ p["w"])


def _scores(p: Any, x: Tensor) -> Tensor:
    return _last(p["last"], _first(p["first"], x))


def _rows(seed: int) -> tuple[Tensor, Tensor]:
    return drawn(seed)(ROWS, 3), torch.tensor([0, 1] * (ROWS // 2))


def _mean_loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(_scores(p, x), y)


@right(shard=2)
def a_sum_over_a_python_count(on: On) -> Made:
    def loss(p: Any, x: Tensor, y: Tensor, data: Any) -> Tensor:
        total = F.cross_entropy(_scores(p, x), y, reduction="sum")
        return sf.psum(total, data) / sf.psum(y.numel(), data)

    return _fitted(on, loss, *_rows(21), wanted=_mean_loss)


@right(shard=2)
def a_sum_over_a_number_of_all_rows(on: On) -> Made:
    def loss(p: Any, x: Tensor, y: Tensor, data: Any) -> Tensor:
        return sf.psum(F.cross_entropy(_scores(p, x), y, reduction="sum"), data) / (len(x) * sf.axis_size(data))

    return _fitted(on, loss, *_rows(22), wanted=_mean_loss)


@right(shard=2)
def a_mean_of_means_of_as_many_rows(on: On) -> Made:
    return _fitted(on, lambda p, x, y, data: sf.pmean(_mean_loss(p, x, y), data), *_rows(23), wanted=_mean_loss)


@right(shard=2)
def a_mean_divided_by_the_number_of_ranks(on: On) -> Made:
    def loss(p: Any, x: Tensor, y: Tensor, data: Any) -> Tensor:
        return sf.psum(_mean_loss(p, x, y) / sf.axis_size(data), data)

    return _fitted(on, loss, *_rows(24), wanted=_mean_loss)


def _masked(p: Any, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(_scores(p, x), y, reduction="none")
    return (each * mask).sum(), mask.sum()


@right(shard=2)
def a_sum_over_a_masked_count(on: On) -> Made:
    mask = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 0], dtype=torch.float64)

    def loss(p: Any, x: Tensor, y: Tensor, mask: Tensor, data: Any) -> Tensor:
        total, count = _masked(p, x, y, mask)
        return sf.psum(total, data) / sf.psum(count, data).clamp(min=1)

    def wanted(p: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        total, count = _masked(p, x, y, mask)
        return total / count

    return _fitted(on, loss, *_rows(25), mask, wanted=wanted)


@right(shard=2)
def a_sum_over_a_count_of_targets_that_are_not_ignored(on: On) -> Made:
    x, y = _rows(26)
    y = torch.where(torch.tensor([0, 1, 1, 0, 0, 0, 0, 1]).bool(), -100, y)

    def loss(p: Any, x: Tensor, y: Tensor, data: Any) -> Tensor:
        total = F.cross_entropy(_scores(p, x), y, reduction="sum", ignore_index=-100)
        return sf.psum(total, data) / sf.psum((y != -100).sum(), data)

    return _fitted(on, loss, x, y, wanted=_mean_loss)


@right(shard=2)
def local_means_weighted_by_their_counts(on: On) -> Made:
    x, y = _rows(27)
    y = torch.where(torch.tensor([0, 1, 1, 0, 0, 0, 0, 1]).bool(), -100, y)

    def loss(p: Any, x: Tensor, y: Tensor, data: Any) -> Tensor:
        count = (y != -100).sum()
        return sf.psum(_mean_loss(p, x, y) * (count / sf.psum(count.double(), data)), data)

    return _fitted(on, loss, x, y, wanted=_mean_loss)


@right(shard=2)
def a_local_sum_over_the_count_of_all(on: On) -> Made:
    """A loss without psum: each rank's part of the mean over all rows. What is shown is its sum."""
    draw = drawn(28)
    params, (x, y) = {"first": {"w": draw(3, D)}, "last": {"w": draw(D, 2)}}, _rows(28)
    flat = sf.shard(params, on.mesh, sf.full_shard("shard"))

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(_scores(p, x), y, reduction="sum") / ROWS

    def step(p: Any, x: Tensor, y: Tensor) -> Any:
        value, gradient = sf.value_and_grad(loss)(p, x, y)
        return sf.psum(value, "shard"), gradient

    mapped = on(step, (..., P("shard"), P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = mapped(flat, *on.cut((x, y), "shard"))
        return value, sf.unshard(gradient)

    return run, plainly(lambda p: loss(p, x, y), params)


@right(shard=2)
def several_losses_and_auxiliary_results(on: On) -> Made:
    """Metrics that are the same on all ranks, and others that differ and say so."""
    w, x = tensors(29, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Any:
        y = x @ sf.pvary(w, data)
        total = sf.psum(y.square().sum(), data)
        penalty = 0.01 * w.square().sum()  # once, of what all ranks have
        return total / ROWS + penalty, {"norms": y.norm(dim=1), "largest": sf.pmax(y.detach().max(), data)}

    step = on(
        sf.value_and_grad(lambda w, x: loss(w, x, "shard"), has_aux=True),
        (P(), P("shard")),
        ((P(), {"norms": P("shard"), "largest": P()}), P()),
    )
    (value, aux), gradient = sf.value_and_grad(loss, has_aux=True)(w, x)
    aux["norms"] = on.cut(aux["norms"], "shard")
    return lambda: step(w, on.cut(x, "shard")), ((value, aux), gradient)


def _whole_on_all(on: On, loss: Callable[[Tensor, int], Tensor], wanted: Callable[[Tensor], Tensor]) -> Made:
    """The gradient of `loss(every row, ranks)`, which each rank has whole, so that all ranks' are added up."""
    w, x = tensors(30, (4, 3), (2, 4))
    step = on(sf.grad(lambda w: loss(x @ sf.all_gather(w, "shard"), sf.axis_size("shard"))), (P("shard"),), P("shard"))
    gradient = plainly(lambda w: wanted(x @ w), w)[1]
    return lambda: step(on.cut(w, "shard")), on.cut(gradient, "shard")


@right(shard=4)
def a_loss_that_every_rank_has_over_the_number_of_ranks(on: On) -> Made:
    return _whole_on_all(on, lambda y, ranks: y.square().sum() / ranks, lambda y: y.square().sum())


@right(shard=2)
def a_loss_that_every_rank_has_over_as_many_ranks_as_rows(on: On) -> Made:
    return _whole_on_all(on, lambda y, ranks: y.square().sum() / ranks, lambda y: y.square().sum())


@right(shard=4)
def a_mean_that_every_rank_has_over_the_number_of_ranks(on: On) -> Made:
    return _whole_on_all(on, lambda y, ranks: y.square().mean() / ranks, lambda y: y.square().mean())


@right(shard=4)
def a_sum_that_every_rank_has_over_rows_and_ranks(on: On) -> Made:
    return _whole_on_all(on, lambda y, ranks: y.square().sum() / (len(y) * ranks), lambda y: y.square().sum() / 2)


@right(shard=4)
def a_loss_that_every_rank_has_times_its_part(on: On) -> Made:
    return _whole_on_all(on, lambda y, ranks: (1 / ranks) * y.exp().sum(), lambda y: y.exp().sum())


@right(shard=4)
def a_loss_scaled_before_and_after(on: On) -> Made:
    return _whole_on_all(on, lambda y, ranks: 8.0 * (y.exp().sum() / 3) / ranks, lambda y: 8.0 * y.exp().sum() / 3)
