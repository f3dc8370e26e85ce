"""What looks like a mistake and is none: factors that only the user knows, parts that only seem to be means of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

import shardfn as sf
import shardfn.optim as so
from shardfn import P
from tests.check.programs.setting import ROWS, D, Made, On, plainly, right
from tests.models import drawn, tensors

Loss = Callable[..., Tensor]


def _layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"]).square()


def _of_shards(on: On, loss: Loss, finish: Any = None, sizes: Any = (4, 4), **options: Any) -> Made:
    """Gradients of flat shards by a local loss, which are those of the mean over all rows."""
    w, x = tensors(70, (3, D), (ROWS, 3))
    flat = sf.shard({"w": w}, on.mesh, sf.full_shard("shard"))
    stage = sf.stage(_layer)

    def step(p: Any, x: Tensor) -> Any:
        gradient = sf.grad(lambda p: loss(stage(p, x), x))(p)
        return gradient if finish is None else optree.tree_map(finish, gradient)

    mapped = on(step, (..., ...), ..., **options)
    rows = x.split(list(sizes))[on.index("shard")].clone()
    wanted = plainly(lambda p: _layer(p, x).mean(), {"w": w})[1]
    return lambda: sf.unshard(mapped(flat, rows)), wanted


@right(shard=2)
def a_local_mean_over_a_psum_of_one(on: On) -> Made:
    return _of_shards(on, lambda y, x: y.mean() / sf.psum(1, "shard"))


@right(shard=2)
def a_local_mean_over_a_tensor(on: On) -> Made:
    return _of_shards(on, lambda y, x: y.mean() / torch.tensor(2.0, dtype=y.dtype))


@right(shard=2)
def a_loss_that_is_scaled_up_and_its_gradient_down(on: On) -> Made:
    return _of_shards(on, lambda y, x: y.mean() * 1024, lambda g: g / 1024 / 2)


@right(shard=2)
def a_gradient_over_a_tensor(on: On) -> Made:
    return _of_shards(on, lambda y, x: y.mean(), lambda g: g * torch.tensor(0.5, dtype=g.dtype))


@right(shard=2)
def a_mean_times_this_ranks_share(on: On) -> Made:
    return _of_shards(on, lambda y, x: y.mean() * (len(x) / ROWS), sizes=(5, 3))


@right(shard=2)
def a_mean_times_a_number_over_that_of_all(on: On) -> Made:
    return _of_shards(on, lambda y, x: y.mean() * len(x) / sf.psum(len(x), "shard"), sizes=(5, 3))


@right(shard=2)
def a_mean_times_this_ranks_share_of_a_sum_that_varies(on: On) -> Made:
    def loss(y: Tensor, x: Tensor) -> Tensor:
        return sf.psum(y.mean() * len(x) / sf.pvary(sf.psum(torch.tensor(float(len(x))), "shard"), "shard"), "shard")

    w, x = tensors(70, (3, D), (ROWS, 3))
    mapped = on(sf.grad(lambda w, x: loss(torch.tanh(x @ sf.pvary(w, "shard")), x)), (P(), ...), P())
    rows = x.split([5, 3])[on.index("shard")].clone()
    return lambda: mapped(w, rows), plainly(lambda w: torch.tanh(x @ w).mean(), w)[1]


@right(shard=2)
def a_sum_over_tasks_of_the_means_of_each(on: On) -> Made:
    w, tasks = tensors(72, (3, D), (4, 5, 3))

    def loss(w: Tensor, tasks: Tensor) -> Tensor:
        return torch.stack([(task @ w).square().mean() for task in tasks]).sum()

    mapped = on(sf.grad(lambda w, tasks: sf.psum(loss(sf.pvary(w, "shard"), tasks), "shard")), (P(), P("shard")), P())
    return lambda: mapped(w, on.cut(tasks, "shard")), plainly(lambda w: loss(w, tasks), w)[1]


@right(shard=2)
def a_scale_that_is_hardly_a_number(on: On) -> Made:
    return _of_shards(on, lambda y, x: y.mean() / 2 * 1e-150 * 1e-159, lambda g: g * 1e150 * 1e159)


@right(shard=2)
def a_product_with_the_least_of_numbers(on: On) -> Made:
    x = torch.ones(2, dtype=torch.float64)
    mapped = on(lambda x: sf.psum(x * (1.0, 1e-310)[sf.axis_index("shard")], "shard"), P("shard"), P())
    return lambda: mapped(x), x


@right(shard=2)
def own_rows_of_a_gathered_value(on: On) -> Made:
    """Each rank has another part of a loss that is made of what all ranks have."""
    w, x = tensors(71, (4, 3), (2, 4))

    def loss(w: Tensor) -> Tensor:
        return (x @ sf.all_gather(w, "shard")).chunk(2)[sf.axis_index("shard")].exp().sum()

    mapped = on(sf.grad(loss), P("shard"), P("shard"))
    wanted = plainly(lambda w: (x @ w).exp().sum(), w)[1]
    return lambda: mapped(on.cut(w, "shard")), on.cut(wanted, "shard")


@right(shard=2)
def a_mean_over_sequences_of_which_positions_are_cut(on: On) -> Made:
    w, x = tensors(72, (3, D), (2, ROWS, 3))
    flat = sf.shard({"w": w}, on.mesh, sf.full_shard("shard"))
    stage = sf.stage(_layer)
    mapped = on(lambda p, x: sf.grad(lambda p: stage(p, x).mean(-1).mean(0).sum())(p), (..., P(None, "shard")), ...)
    wanted = plainly(lambda p: _layer(p, x).mean(-1).mean(0).sum(), {"w": w})[1]
    return lambda: sf.unshard(mapped(flat, on.cut(x, None, "shard"))), wanted


@right(shard=2)
def clipping_where_a_stage_is_not_used(on: On) -> Made:
    draw = drawn(73)
    whole, x = {"used": {"w": draw(3, D)}, "unused": {"w": draw(3, D)}}, draw(ROWS, 3)
    optimizer, stage = so.chain(so.clip_by_global_norm(0.01), so.sgd(0.1)), sf.stage(_layer)

    def step(p: Any, state: Any, x: Tensor) -> Any:
        gradient = sf.grad(lambda p: sf.pmean(stage(p["used"], x).mean(), "shard"))(p)
        return optimizer.step(p, gradient, state)[0]

    mapped = on(step, (..., ..., P("shard")), ...)
    gradient = plainly(lambda p: _layer(p["used"], x).mean() + 0 * p["unused"]["w"].sum(), whole)[1]
    wanted = optimizer.step(optree.tree_map(torch.clone, whole), gradient, optimizer.init(whole))[0]

    def run() -> Any:
        flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))  # anew: a step writes into them
        return sf.unshard(mapped(flat, optimizer.init(flat), on.cut(x, "shard")))

    return run, wanted


def _by_hand(on: On, finish: Callable[[Tensor], Tensor], loss: Loss = lambda y: y.mean()) -> Made:
    """The gradient of the mean over all rows, of one weight that all ranks have."""
    w, x = tensors(74, (3, D), (ROWS, 3))
    mapped = on(lambda w, x: finish(sf.grad(lambda w: loss(_layer({"w": w}, x)))(w)), (P(), P("shard")), P())
    return lambda: mapped(w, on.cut(x, "shard")), plainly(lambda w: _layer({"w": w}, x).mean(), w)[1]


@right(shard=2)
def a_sum_of_gradients_over_a_psum_of_one(on: On) -> Made:
    return _by_hand(on, lambda g: sf.psum(g, "shard") / sf.psum(1, "shard"))


@right(shard=2)
def a_sum_of_gradients_that_is_cleaned_and_then_divided(on: On) -> Made:
    def finish(g: Tensor) -> Tensor:
        total = sf.psum(g, "shard")
        return torch.where(total.isfinite(), total, 0.0).clamp(-10, 10).nan_to_num() / 2

    return _by_hand(on, finish)


@right(shard=2)
def a_sum_of_gradients_that_is_divided_with_others(on: On) -> Made:
    def finish(g: Tensor) -> Tensor:
        total = sf.psum(g, "shard")
        torch._foreach_div_([total, torch.ones(2)], 2)
        return total

    return _by_hand(on, finish)


@right(shard=2)
def a_mean_of_gradients_times_the_ranks(on: On) -> Made:
    return _by_hand(on, lambda g: sf.pmean(g, "shard") * sf.axis_size("shard"), lambda y: sf.pmean(y.mean(), "shard"))


@right(shard=2)
def a_mean_of_gradients_that_are_the_same_already(on: On) -> Made:
    w, x = tensors(75, (3, D), (ROWS, 3))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return sf.pmean(_layer({"w": sf.pvary(w, "shard")}, x).mean(), "shard")

    mapped = on(lambda w, x: sf.pmean(sf.grad(loss)(w, x), "shard"), (P(), P("shard")), P())
    return lambda: mapped(w, on.cut(x, "shard")), plainly(lambda w: _layer({"w": w}, x).mean(), w)[1]


@right(shard=2)
def the_sum_of_gradients_of_columns_that_are_cut(on: On) -> Made:
    """All ranks have all rows: what varies is another part of the model."""
    draw = drawn(76)
    w, v, x = draw(3), draw(3, 2), draw(ROWS, 3)  # one column for each rank, whose mean is one number

    def loss(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return ((x * w) @ v).tanh().square().mean(0).sum()

    def gradients(w: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        whole, cut = sf.grad(loss, (0, 1))(w, v, x)
        return sf.psum(whole, "shard"), cut

    mapped = on(gradients, (P(), P(None, "shard"), P()), (P(), P(None, "shard")))
    whole, cut = plainly(loss, w, v, x, argnums=(0, 1))[1]
    return lambda: mapped(w, on.cut(v, None, "shard"), x), (whole, on.cut(cut, None, "shard"))


@right(shard=2)
def the_mean_saliency_of_rows(on: On) -> Made:
    w, x = tensors(77, (3,), (ROWS, 3))

    def loss(x: Tensor) -> Tensor:
        return sf.psum((x @ w).tanh().square().sum(), "shard") / ROWS

    mapped = on(lambda x: sf.pmean(sf.grad(loss)(x).mean(0), "shard"), P("shard"), P())
    wanted = plainly(lambda x: (x @ w).tanh().square().sum() / ROWS, x)[1].mean(0)
    return lambda: mapped(on.cut(x, "shard")), wanted


@right(shard=2)
def one_draw_for_all_rows_that_is_said_to_vary(on: On) -> Made:
    draw = drawn(78)
    a, x = draw(3).exp(), draw(ROWS, 3)

    def noise(a: Tensor) -> Tensor:
        return torch._standard_gamma(a, generator=torch.Generator().manual_seed(3))

    def loss(a: Tensor, x: Tensor) -> Tensor:
        return sf.psum((x * noise(sf.pvary(a, "shard"))).square().sum(), "shard")

    mapped = on(sf.grad(loss), (P(), P("shard")), P())
    return lambda: mapped(a, on.cut(x, "shard")), plainly(lambda a: (x * noise(a)).square().sum(), a)[1]


@right(shard=2)
def sums_in_another_order_on_each_rank(on: On) -> Made:
    """The same but for rounding, which nothing that goes in tells."""
    terms = [drawn(79)(ROWS, 3) * 10.0**k for k in range(6)]

    def total(*terms: Tensor) -> Tensor:
        order = terms if sf.axis_index("shard") == 0 else terms[::-1]
        found = order[0]
        for term in order[1:]:
            found = found + term
        return found

    mapped = on(total, P(), P())
    return lambda: mapped(*terms), torch.stack(terms).sum(0)
