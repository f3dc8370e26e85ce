"""What stands next to a mistake in how losses are reduced, and is right: counts, weights, parts, noise, statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P
from tests.check.programs.setting import ROWS, D, Made, On, folded, plainly, right
from tests.models import drawn

CLASSES = 3
_draw = drawn(400)
X, Y = _draw(ROWS, 3), _draw(ROWS, CLASSES)
WEIGHTS = {"w": _draw(3, CLASSES), "b": _draw(CLASSES)}
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 1])
REAL = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0], dtype=X.dtype)
BATCH = (X, Y, LABELS, REAL)

Loss = Callable[..., Tensor]


def out(p: Any, x: Tensor, data: Any) -> Tensor:
    p = sf.pvary(p, data)
    return x @ p["w"] + p["b"]


def mixed(t: Tensor) -> Tensor:
    """Each rank's rows with those of its own in the other order."""
    return torch.cat([0.3 * half + 0.7 * half.flip(0) for half in t.chunk(2)])


def near(name: str, loss: Loss, wanted: Loss | None = None, axes: Any = "shard", replica: int = 1) -> None:
    """Value and gradient of `loss(params, x, y, labels, real, axes)`; of one process without axes, or of `wanted`."""

    def make(on: On) -> Made:
        step = on(
            lambda p, *batch: sf.value_and_grad(lambda p: loss(p, *batch, axes))(p),
            (P(), *[P(axes) for _ in BATCH]),
            (P(), P()),
        )
        one = plainly(lambda p: loss(p, *BATCH, ()) if wanted is None else wanted(p, *BATCH), WEIGHTS)
        return lambda: step(WEIGHTS, *on.cut(BATCH, axes)), one

    make.__name__ = name
    right(replica=replica, shard=2)(make) if replica > 1 else right(shard=2)(make)


def whole(f: Callable[[Tensor, Any], Tensor]) -> Loss:
    return lambda p, *batch: f(X @ p["w"] + p["b"], p)


MSE = whole(lambda o, p: F.mse_loss(o, Y))
CLASSIFIED = whole(lambda o, p: F.cross_entropy(o, LABELS))
TOTAL = whole(lambda o, p: (o - Y).square().sum())
BOTH = ("replica", "shard")
ON_BOTH: dict[str, Any] = {"axes": BOTH, "replica": 2}


def squares(p: Any, x: Tensor, y: Tensor, data: Any) -> Tensor:
    return (out(p, x, data) - y).square()


near("a_pmean_of_mse_loss", lambda p, x, y, k, r, a: sf.pmean(F.mse_loss(out(p, x, a), y), a), MSE)
near(
    "a_pmean_of_mse_loss_on_two_axes", lambda p, x, y, k, r, a: sf.pmean(F.mse_loss(out(p, x, a), y), a), MSE, **ON_BOTH
)
near("a_pmean_of_cross_entropy", lambda p, x, y, k, r, a: sf.pmean(F.cross_entropy(out(p, x, a), k), a), CLASSIFIED)
near(
    "a_psum_of_a_mean_over_the_ranks",
    lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).mean(), a) / sf.axis_size(a),
    MSE,
)
near("a_psum_of_a_part_of_a_mean", lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).mean() / 2, a), MSE)
near(
    "a_psum_of_a_mean_times_a_share",
    lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).mean() * len(x) / ROWS, a),
    MSE,
)
near(
    "a_psum_of_means_then_a_pmean",
    lambda p, x, y, k, r, a: sf.pmean(sf.psum(squares(p, x, y, a).mean() / 2, "shard"), "replica"),
    MSE,
    **ON_BOTH,
)
near(
    "a_psum_of_row_means_over_all_rows",
    lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).mean(1).sum(), a) / ROWS,
    MSE,
)
near(
    "a_psum_of_sums_over_a_global_count",
    lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).sum(), a) / (ROWS * CLASSES),
    MSE,
)
near(
    "a_psum_of_sums_over_a_psum_of_counts",
    lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).sum(), a) / sf.psum(y.numel(), a),
    MSE,
)
near(
    "a_psum_of_sums_over_counts_and_ranks",
    lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).sum(), a) / y.numel() / sf.axis_size(a),
    MSE,
)
near(
    "a_psum_of_sums_over_the_features",
    lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).sum(), a) / CLASSES,
    whole(lambda o, p: (o - Y).square().mean(1).sum()),
)
near("a_psum_of_sums", lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).sum(), a), TOTAL)
near(
    "a_pmean_of_sums_over_own_counts", lambda p, x, y, k, r, a: sf.pmean(squares(p, x, y, a).sum(), a) / y.numel(), MSE
)
near(
    "a_pmean_of_sums_over_a_pmean_of_counts",
    lambda p, x, y, k, r, a: (
        sf.pmean(squares(p, x, y, a).sum(), a) / sf.pmean(torch.tensor(float(y.numel()), dtype=y.dtype), a)
    ),
    MSE,
)
near(
    "a_pmean_of_sums_times_the_ranks",
    lambda p, x, y, k, r, a: sf.pmean(squares(p, x, y, a).sum(), a) * sf.axis_size(a),
    TOTAL,
)
near(
    "a_masked_mean",
    lambda p, x, y, k, r, a: sf.psum((squares(p, x, y, a).mean(1) * r).sum(), a) / sf.psum(r.sum(), a),
    whole(lambda o, p: ((o - Y).square().mean(1) * REAL).sum() / REAL.sum()),
)
near(
    "a_mean_of_all_losses_that_were_gathered",
    lambda p, x, y, k, r, a: sf.all_gather(squares(p, x, y, a), a, to="invariant").mean(),
    MSE,
)
near(
    "a_gathered_loss_averaged",
    lambda p, x, y, k, r, a: sf.pmean(F.cross_entropy(sf.all_gather(out(p, x, a), a), sf.all_gather(k, a)), a),
    CLASSIFIED,
)
near(
    "a_gathered_loss_summed_over_the_ranks",
    lambda p, x, y, k, r, a: sf.psum(
        F.cross_entropy(sf.all_gather(out(p, x, a), a), sf.all_gather(k, a)) / sf.axis_size(a), a
    ),
    CLASSIFIED,
)
near(
    "a_loss_with_weight_decay_outside",
    lambda p, x, y, k, r, a: sf.pmean(squares(p, x, y, a).mean(), a) + 0.1 * p["w"].square().sum(),
    whole(lambda o, p: F.mse_loss(o, Y) + 0.1 * p["w"].square().sum()),
)
near(
    "a_loss_with_weight_decay_inside_of_pmean",
    lambda p, x, y, k, r, a: sf.pmean(squares(p, x, y, a).mean() + 0.1 * sf.pvary(p["w"], a).square().sum(), a),
    whole(lambda o, p: F.mse_loss(o, Y) + 0.1 * p["w"].square().sum()),
)
near(
    "a_loss_with_a_part_of_weight_decay_in_psum",
    lambda p, x, y, k, r, a: sf.psum(squares(p, x, y, a).sum() + 0.1 * sf.pvary(p["w"], a).square().sum() / 2, a),
    whole(lambda o, p: (o - Y).square().sum() + 0.1 * p["w"].square().sum()),
)
near(
    "a_label_smoothed_loss",
    lambda p, x, y, k, r, a: sf.pmean(F.cross_entropy(out(p, x, a), k, label_smoothing=0.1), a),
    whole(lambda o, p: F.cross_entropy(o, LABELS, label_smoothing=0.1)),
)
near(
    "a_loss_of_mixed_rows",
    lambda p, x, y, k, r, a: sf.pmean(F.mse_loss(out(p, 0.3 * x + 0.7 * x.flip(0), a), 0.3 * y + 0.7 * y.flip(0)), a),
    lambda p, *_: F.mse_loss(mixed(X) @ p["w"] + p["b"], mixed(Y)),
)
near(
    "a_loss_of_several_terms",
    lambda p, x, y, k, r, a: sf.pmean(F.mse_loss(out(p, x, a), y) + 0.3 * F.l1_loss(out(p, x, a), y), a),
    whole(lambda o, p: F.mse_loss(o, Y) + 0.3 * F.l1_loss(o, Y)),
)
near(
    "a_loss_over_a_temperature",
    lambda p, x, y, k, r, a: sf.pmean(F.cross_entropy(out(p, x, a) / 0.5, k), a),
    whole(lambda o, p: F.cross_entropy(o / 0.5, LABELS)),
)
near(
    "a_kl_divergence_by_rows",
    lambda p, x, y, k, r, a: sf.pmean(F.kl_div(out(p, x, a).log_softmax(-1), y.softmax(-1), reduction="batchmean"), a),
    whole(lambda o, p: F.kl_div(o.log_softmax(-1), Y.softmax(-1), reduction="batchmean")),
)
near(
    "a_policy_gradient",
    lambda p, x, y, k, r, a: (
        sf.psum(-(out(p, x, a).log_softmax(-1).gather(1, k[:, None])[:, 0] * (r - sf.pmean(r.mean(), a))).sum(), a)
        / ROWS
    ),
    whole(lambda o, p: -(o.log_softmax(-1).gather(1, LABELS[:, None])[:, 0] * (REAL - REAL.mean())).mean()),
)
near(
    "a_variance_of_scores_by_moments",
    lambda p, x, y, k, r, a: sf.pmean(out(p, x, a).square().mean(), a) - sf.pmean(out(p, x, a).mean(), a).square(),
    whole(lambda o, p: o.var(correction=0)),
)
near(
    "a_load_balance_of_experts",
    lambda p, x, y, k, r, a: (
        CLASSES
        * (sf.pmean(out(p, x, a).softmax(-1).mean(0), a) * sf.pmean(F.one_hot(k, CLASSES).to(x.dtype).mean(0), a)).sum()
    ),
    whole(lambda o, p: CLASSES * (o.softmax(-1).mean(0) * F.one_hot(LABELS, CLASSES).to(X.dtype).mean(0)).sum()),
)
near(
    "a_contrast_with_all_rows",
    lambda p, x, y, k, r, a: sf.pmean(
        F.cross_entropy(out(p, x, a) @ sf.all_gather(y, a).T, torch.arange(len(x)) + len(x) * sf.axis_index(a)), a
    ),
    whole(lambda o, p: F.cross_entropy(o @ Y.T, torch.arange(ROWS))),
)
near(
    "a_contrast_with_gathered_scores",
    lambda p, x, y, k, r, a: (
        sf.psum(
            F.cross_entropy(
                y @ sf.all_gather(out(p, x, a), a).T, torch.arange(len(x)) + len(x) * sf.axis_index(a), reduction="sum"
            ),
            a,
        )
        / ROWS
    ),
    whole(lambda o, p: F.cross_entropy(Y @ o.T, torch.arange(ROWS))),
)


def _evaluated(name: str, f: Callable[..., Any], wanted: Any) -> None:
    def make(on: On) -> Made:
        step = on(f, (P(), *[P("shard") for _ in BATCH]), P())
        return lambda: step(WEIGHTS, *on.cut(BATCH, "shard")), wanted

    make.__name__ = name
    right(shard=2)(make)


SCORES = X @ WEIGHTS["w"] + WEIGHTS["b"]
RIGHT_ONES = (SCORES.argmax(1) == LABELS).double()


def _hits(p: Any, x: Tensor, k: Tensor) -> Tensor:
    return ((x @ p["w"] + p["b"]).argmax(1) == k).double()


_evaluated(
    "accuracy_by_sums",
    lambda p, x, y, k, r: sf.psum(_hits(p, x, k).sum(), "shard") / sf.psum(len(x), "shard"),
    RIGHT_ONES.mean(),
)
_evaluated("accuracy_by_means", lambda p, x, y, k, r: sf.pmean(_hits(p, x, k).mean(), "shard"), RIGHT_ONES.mean())
_evaluated(
    "sums_and_counts_for_later",
    lambda p, x, y, k, r: sf.psum({"hits": _hits(p, x, k).sum(), "rows": torch.tensor(len(x))}, "shard"),
    {"hits": RIGHT_ONES.sum(), "rows": torch.tensor(ROWS)},
)
_evaluated("hits_for_each_rank", lambda p, x, y, k, r: sf.pmean(_hits(p, x, k).sum(), "shard"), RIGHT_ONES.sum() / 2)
_evaluated(
    "perplexity",
    lambda p, x, y, k, r: sf.pmean(F.cross_entropy(x @ p["w"] + p["b"], k), "shard").exp(),
    F.cross_entropy(SCORES, LABELS).exp(),
)
_evaluated(
    "a_moving_average",
    lambda p, x, y, k, r: 0.9 * p["b"] + 0.1 * sf.pmean(x.mean(0), "shard"),
    0.9 * WEIGHTS["b"] + 0.1 * X.mean(0),
)
_evaluated(
    "batch_statistics_by_sums",
    lambda p, x, y, k, r: (sf.psum(x.sum(0), "shard") / ROWS, sf.psum(x.square().sum(0), "shard") / ROWS),
    (X.mean(0), X.square().mean(0)),
)
_evaluated(
    "ranks_counted_on_two_ways",
    lambda p, x, y, k, r: sf.psum(sf.psum(1, "shard") / sf.axis_size("shard"), "shard"),
    torch.tensor(2.0),
)


@right(tensor=2)
def a_mean_of_parts_of_a_product(on: On) -> Made:
    w, b = WEIGHTS["w"], WEIGHTS["b"]
    x, w = torch.cat([X, X[:, :1]], 1), torch.cat([w, w[:1]])
    mapped = on(lambda w, x: sf.psum((x @ w).mean(), "tensor"), (P("tensor"), P(None, "tensor")), P())
    return lambda: mapped(on.cut(w, "tensor"), on.cut(x, None, "tensor")), (x @ w).mean() + 0 * b.sum()


@right(tensor=2)
def a_bias_after_a_sum_of_parts(on: On) -> Made:
    x, w = torch.cat([X, X[:, :1]], 1), torch.cat([WEIGHTS["w"], WEIGHTS["w"][:1]])
    mapped = on(lambda w, x, b: sf.psum(x @ w, "tensor") + b, (P("tensor"), P(None, "tensor"), P()), P())
    return lambda: mapped(on.cut(w, "tensor"), on.cut(x, None, "tensor"), WEIGHTS["b"]), x @ w + WEIGHTS["b"]


@right(tensor=2)
def a_part_of_a_bias_in_a_sum_of_parts(on: On) -> Made:
    x, w = torch.cat([X, X[:, :1]], 1), torch.cat([WEIGHTS["w"], WEIGHTS["w"][:1]])
    mapped = on(lambda w, x, b: sf.psum(x @ w + b / 2, "tensor"), (P("tensor"), P(None, "tensor"), P()), P())
    return lambda: mapped(on.cut(w, "tensor"), on.cut(x, None, "tensor"), WEIGHTS["b"]), x @ w + WEIGHTS["b"]


@right(sequence=2)
def a_sum_over_positions_of_a_mean_over_sequences(on: On) -> Made:
    x = drawn(401)(3, ROWS, D)
    mapped = on(lambda x: sf.psum(x.square().sum((1, 2)).mean(), "sequence"), P(None, "sequence"), P())
    return lambda: mapped(on.cut(x, None, "sequence")), x.square().sum((1, 2)).mean()


@right(shard=2)
def rows_that_are_summed_before_a_mean_over_positions(on: On) -> Made:
    mapped = on(lambda x: sf.psum(x.square().sum(0).mean(), "shard"), P("shard"), P())
    return lambda: mapped(on.cut(X, "shard")), X.square().sum(0).mean()


@right(task=2)
def the_sum_of_the_losses_of_tasks(on: On) -> Made:
    """One task on each rank: the sum over tasks is what is meant."""
    x, y = X.view(2, ROWS // 2, 3), Y.view(2, ROWS // 2, CLASSES)

    def loss(p: Any, x: Tensor, y: Tensor, task: Any = ()) -> Tensor:
        p = sf.pvary(p, task)
        return sf.psum((x[0] @ p["w"] + p["b"] - y[0]).square().mean(), task)

    mapped = on(lambda p, x, y: sf.grad(loss)(p, x, y, "task"), (P(), P("task"), P("task")), P())
    wanted = plainly(lambda p: loss(p, x[:1], y[:1]) + loss(p, x[1:], y[1:]), WEIGHTS)[1]
    return lambda: mapped(WEIGHTS, *on.cut((x, y), "task")), wanted


@right(member=2)
def an_ensemble_of_which_each_rank_has_a_member(on: On) -> Made:
    w = drawn(402)(2, 3, CLASSES)

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (x @ w[0] - y).square().mean()

    mapped = on(sf.grad(lambda w, x, y: sf.psum(loss(w, x, y), "member")), (P("member"), P(), P()), P("member"))
    wanted = plainly(lambda w: loss(w[:1], X, Y) + loss(w[1:], X, Y), w)[1]
    return lambda: mapped(on.cut(w, "member"), X, Y), on.cut(wanted, "member")


def _noise(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, 3, generator=generator, dtype=X.dtype)


@right(data=2)
def noise_of_each_ranks_own(on: On) -> Made:
    mapped = on(lambda x: x + _noise(len(x), sf.fold_in(5, 1, "data")), P("data"), P("data"))
    wanted = torch.cat([half + _noise(4, folded(5, 1, i)) for i, half in enumerate(X.chunk(2))])
    return lambda: mapped(on.cut(X, "data")), on.cut(wanted, "data")


@right(data=2)
def one_noise_of_all_rows_that_is_cut(on: On) -> Made:
    def noisy(x: Tensor) -> Tensor:
        return x + _noise(ROWS, torch.Generator().manual_seed(6)).chunk(2)[sf.axis_index("data")]

    mapped = on(noisy, P("data"), P("data"))
    return lambda: mapped(on.cut(X, "data")), on.cut(X + _noise(ROWS, torch.Generator().manual_seed(6)), "data")


@right(data=2)
def several_noises_of_which_each_rank_takes_one(on: On) -> Made:
    def drawn_twice() -> list[Tensor]:
        generator = torch.Generator().manual_seed(11)
        return [_noise(ROWS // 2, generator) for _ in range(2)]

    mapped = on(lambda x: x + drawn_twice()[sf.axis_index("data")], P("data"), P("data"))
    return lambda: mapped(on.cut(X, "data")), on.cut(X + torch.cat(drawn_twice()), "data")


@right(data=2)
def noise_on_weights_that_all_ranks_have(on: On) -> Made:
    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        w = sf.pvary(w + torch.randn(w.shape, generator=torch.Generator().manual_seed(7), dtype=w.dtype), data)
        return sf.psum((x @ w).square().sum(), data)

    mapped = on(lambda w, x: sf.grad(loss)(w, x, "data"), (P(), P("data")), P())
    return lambda: mapped(WEIGHTS["w"], on.cut(X, "data")), plainly(loss, WEIGHTS["w"], X)[1]


@right(data=2)
def one_mask_of_features_for_all_rows(on: On) -> Made:
    def dropped(x: Tensor) -> Tensor:
        return x * (torch.rand(3, generator=torch.Generator().manual_seed(8)) > 0.4)

    mapped = on(dropped, P("data"), P("data"))
    return lambda: mapped(on.cut(X, "data")), on.cut(dropped(X), "data")


@right(data=2)
def one_number_for_all_rows(on: On) -> Made:
    """As the share of one image in another."""

    def mixed_up(x: Tensor) -> Tensor:
        share = torch.rand((), generator=torch.Generator().manual_seed(9), dtype=x.dtype)
        return share * x + (1 - share) * x.flip(0)

    mapped = on(mixed_up, P("data"), P("data"))
    wanted = torch.cat([mixed_up(half) for half in X.chunk(2)])
    return lambda: mapped(on.cut(X, "data")), on.cut(wanted, "data")


@right(tensor=2)
def dropout_of_what_all_ranks_of_an_axis_have(on: On) -> Made:
    def dropped(w: Tensor, x: Tensor, t: Any = ()) -> Tensor:
        h = sf.psum(x @ w, t)
        return h * (torch.rand(h.shape, generator=torch.Generator().manual_seed(10), dtype=h.dtype) > 0.5)

    x, w = torch.cat([X, X[:, :1]], 1), torch.cat([WEIGHTS["w"], WEIGHTS["w"][:1]])
    mapped = on(lambda w, x: dropped(w, x, "tensor"), (P("tensor"), P(None, "tensor")), P())
    return lambda: mapped(on.cut(w, "tensor"), on.cut(x, None, "tensor")), dropped(w, x)


def _tasks(p: Any, x: Tensor, y: Tensor) -> Tensor:
    def inner(q: Any) -> Tensor:
        return F.mse_loss(x[:2] @ q["w"] + q["b"], y[:2])

    own = optree.tree_map(lambda a, b: a - 0.3 * b, p, sf.grad(inner)(p))
    return F.mse_loss(x[2:] @ own["w"] + own["b"], y[2:])


def _by_tasks(p: Any) -> Tensor:
    return torch.stack([_tasks(p, x, y) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]).mean()


@right(shard=2)
def a_task_on_each_rank_of_whole_parameters(on: On) -> Made:
    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return sf.pmean(_tasks(sf.pvary(sf.unshard(p), "shard"), x, y), "shard")

    mapped = on(sf.value_and_grad(loss), (..., P("shard"), P("shard")), (P(), ...))
    flat = sf.shard(WEIGHTS, on.mesh, sf.full_shard("shard"))
    value, gradient = sf.value_and_grad(_by_tasks)(WEIGHTS)

    def run() -> Any:
        found, shards = mapped(flat, *on.cut((X, Y), "shard"))
        return found, sf.unshard(shards)

    return run, (value, gradient)


_layer = sf.stage(lambda p, x: x @ p["w"] + p["b"])


@right(shard=2)
def a_product_with_the_second_derivative_of_shards(on: On) -> Made:
    """A gradient inside of another, of a loss that is each rank's part of the mean over all rows."""
    flat = sf.shard(WEIGHTS, on.mesh, sf.full_shard("shard"))

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return (_layer(p, x) - y).square().square().sum() / ROWS

    def norm(p: Any, x: Tensor, y: Tensor, data: Any = ()) -> Tensor:
        leaves = optree.tree_leaves(sf.grad(loss)(p, x, y))
        return sf.psum(sum(g.square().sum() for g in leaves), data)

    mapped = on(sf.grad(lambda p, x, y: norm(p, x, y, "shard")), (..., P("shard"), P("shard")), ...)
    wanted = sf.grad(norm)(WEIGHTS, X, Y)
    return lambda: sf.unshard(mapped(flat, *on.cut((X, Y), "shard"))), wanted


@right(shard=2)
def a_step_to_the_sharpest_point_nearby(on: On) -> Made:
    flat = sf.shard(WEIGHTS, on.mesh, sf.full_shard("shard"))

    def loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return (_layer(p, x) - y).square().sum() / ROWS

    def sharp(p: Any, x: Tensor, y: Tensor) -> Any:
        return sf.grad(loss)(optree.tree_map(lambda a, b: a + 0.05 * b, p, sf.grad(loss)(p, x, y)), x, y)

    mapped = on(sharp, (..., P("shard"), P("shard")), ...)
    return lambda: sf.unshard(mapped(flat, *on.cut((X, Y), "shard"))), sharp(WEIGHTS, X, Y)


@right(shard=2)
def the_norm_of_flat_shards_by_hand(on: On) -> Made:
    flat = sf.shard(WEIGHTS, on.mesh, sf.full_shard("shard"))

    def norm(p: Any) -> Tensor:
        return sf.psum(sum(v.square().sum() for v in optree.tree_leaves(p)), "shard").sqrt()

    wanted = sum(v.square().sum() for v in WEIGHTS.values()) ** 0.5
    return lambda: on(norm, (...,), P())(flat), wanted


@right(shard=2)
def a_loss_of_which_each_rank_chooses_a_part(on: On) -> Made:
    """Chosen by a number that all ranks hold, so that what was received goes into the loss of both."""

    def loss(w: Tensor, x: Tensor, data: Any) -> Tensor:
        own = (x @ sf.pvary(w, data)).square().sum()
        total = sf.pvary(sf.psum(own, data), data)
        return sf.psum(torch.where(torch.tensor(sf.axis_index(data) == 0), own, total), data)

    mapped = on(lambda w, x: sf.grad(loss)(w, x, "shard"), (P(), P("shard")), P())
    halves = X.chunk(2)
    wanted = plainly(lambda w: 2 * (halves[0] @ w).square().sum() + (halves[1] @ w).square().sum(), WEIGHTS["w"])[1]
    return lambda: mapped(WEIGHTS["w"], on.cut(X, "shard")), wanted


@right(shard=2)
def received_rows_that_the_last_rank_does_not_want(on: On) -> Made:
    """Without a derivative a branch may drop what it likes."""

    def shifted(x: Tensor) -> Tensor:
        received = sf.ppermute(x, "shard", [(0, 1), (1, 0)])
        return x if sf.axis_index("shard") == 0 else received - x

    mapped = on(shifted, P("shard"), P("shard"))
    first, second = X.chunk(2)
    return lambda: mapped(on.cut(X, "shard")), on.cut(torch.cat([first, first - second]), "shard")


# --- parts of a gradient that are reduced by hand, and what else of them leaves under `...` ---


def of_parts(name: str, f: Callable[[Tensor, Tensor], Any], wanted: Callable[[list[Tensor], int], Any]) -> None:
    """What `f` makes of a weight and of its gradient's part of a mean that all ranks have; `wanted` knows all parts."""

    def make(on: On) -> Made:
        def made(w: Tensor, x: Tensor) -> Any:
            return f(w, sf.grad(lambda w: sf.psum((x @ w).square().sum(), "shard") / ROWS)(w))

        mapped = on(made, (..., P("shard")), ...)
        parts = [plainly(lambda w, x=x: (x @ w).square().sum() / ROWS, WEIGHTS["w"])[1] for x in X.chunk(4)]
        return lambda: mapped(WEIGHTS["w"], on.cut(X, "shard")), wanted(parts, on.index("shard"))

    make.__name__ = name
    right(shard=4)(make)


def compressed(g: Tensor) -> Tensor:
    return g.sign() * g.abs().mean()


def projected(g: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Of rank 1, as PowerSGD does it."""
    left = F.normalize(mean(g @ WEIGHTS["b"])[:, None], dim=0)
    return left @ mean(g.mT @ left).mT


of_parts(
    "a_signs_error_that_a_rank_remembers",
    lambda w, g: (w - sf.psum(compressed(g), "shard"), g - compressed(g)),
    lambda parts, r: (WEIGHTS["w"] - sum(map(compressed, parts)), parts[r] - compressed(parts[r])),
)
of_parts(
    "a_projections_error_that_a_rank_remembers",
    lambda w, g: (w - projected(g, lambda x: sf.pmean(x, "shard")), g - projected(g, lambda x: sf.pmean(x, "shard"))),
    lambda parts, r: tuple(x - projected(torch.stack(parts), lambda x: x.mean(0)) for x in (WEIGHTS["w"], parts[r])),
)
of_parts(
    "the_norm_of_a_part_beside_their_sum",
    lambda w, g: (w - sf.psum(g, "shard"), g.norm(), F.cosine_similarity(g, sf.psum(g, "shard"))),
    lambda parts, r: (
        WEIGHTS["w"] - sum(parts),
        parts[r].norm(),
        F.cosine_similarity(parts[r], torch.stack(parts).sum(0)),
    ),
)
of_parts(
    "a_piece_of_the_sum_of_parts",
    lambda w, g: (piece := sf.reduce_scatter(F.pad(g, (0, 1)), "shard", dim=1), piece.norm()),
    lambda parts, r: (piece := F.pad(torch.stack(parts).sum(0), (0, 1))[:, r : r + 1], piece.norm()),
)
of_parts(
    "the_median_of_parts",
    lambda w, g: (w - (middle := sf.all_gather(g[None], "shard").median(0).values), (g - middle).norm()),
    lambda parts, r: (
        WEIGHTS["w"] - (middle := torch.stack(parts).median(0).values),
        (parts[r] - middle).norm(),
    ),
)


@right(shard=2)
def how_far_a_rank_went_by_itself(on: On) -> Made:
    """Reptile: ranks take steps of their own, whose mean is the new weight; a norm is not a new weight."""

    def adapted(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(2):
            w = w - 0.1 * sf.grad(lambda w: (x @ w).square().sum())(w)
        return w

    def step(w: Tensor, x: Tensor) -> Any:
        own = adapted(sf.pvary(w, "shard"), x)
        return w + 0.5 * (sf.pmean(own, "shard") - w), (own - w).norm()

    w = WEIGHTS["w"]
    each = [adapted(w, x) for x in X.chunk(2)]
    wanted = w + 0.5 * (sum(each) / 2 - w), (each[on.index("shard")] - w).norm()
    return lambda: on(step, (..., P("shard")), ...)(w, on.cut(X, "shard")), wanted


def own_steps(name: str, drifted: float, f: Callable[[Tensor, Tensor], Any]) -> None:
    """What `f` makes of a weight before and after a step of a rank alone; ranks may begin with other weights."""

    def make(on: On) -> Made:
        def step(w: Tensor, x: Tensor) -> Any:
            own = sf.pvary(w, "shard")
            return f(w, own - 0.1 * sf.grad(lambda w: (x @ w).square().sum())(own))

        w, x = WEIGHTS["w"] * (1 + drifted * on.index("shard")), on.cut(X, "shard")
        wanted = f(w, w - 0.1 * plainly(lambda w: (x @ w).square().sum(), w)[1])
        mapped = on(step, (..., P("shard")), ...)
        return lambda: mapped(w, x), wanted

    make.__name__ = name
    right(shard=2)(make)


own_steps("a_step_of_each_ranks_own", 0, lambda old, new: new)
own_steps("a_step_of_each_ranks_own_that_is_resumed", 0.1, lambda old, new: new)
own_steps("how_a_rank_moved_by_itself", 0, lambda old, new: new - old)
own_steps("how_a_rank_moved_by_itself_resumed", 0.1, lambda old, new: (new - old, (new - old).norm()))
