"""What Python does in a body: branches, loops, prints, writes in place, random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.shards.random import mixed
from tests.check.programs.setting import DATA, ROWS, D, Made, On, folded, mlp, mlp_setting, plainly, right
from tests.models import drawn, tensors


@right(shard=2)
def loops_and_branches_that_are_the_same_on_all_ranks(on: On) -> Made:
    """A search for a step that is short enough, by values that ranks have agreed on."""
    params, _, x = mlp_setting(80)

    def searched(params: Any, x: Tensor, data: Any = ()) -> Any:
        value, slope = sf.value_and_grad(mlp)(params, x, data)
        rate, tries = 4.0, 0
        while True:
            moved = optree.tree_map(lambda p, g, rate=rate: p - rate * g, params, slope)
            tries += 1
            if mlp(moved, x, data).item() < 0.9 * value.item():
                return moved, torch.tensor(tries)
            rate /= 2

    mapped = on(lambda p, x: searched(p, x, "shard"), (P(), P("shard")), P())
    moved, tries = searched(params, x)
    assert tries > 1
    return lambda: mapped(params, on.cut(x, "shard")), (moved, tries)


@right(shard=2)
def conjugate_gradients(on: On) -> Made:
    """Least squares with rows on each rank: vectors that all have, and one sum a step."""
    a, b = tensors(81, (ROWS, D), (ROWS,))

    def solved(a: Tensor, b: Tensor, data: Any = ()) -> Tensor:
        x = torch.zeros(a.shape[1], dtype=a.dtype)
        residual = sf.psum(a.T @ b, data)
        direction, square = residual.clone(), residual @ residual
        while square.sqrt() > 1e-13:
            image = sf.psum(a.T @ (a @ direction), data)
            step = square / (direction @ image)
            x += step * direction
            residual -= step * image
            before, square = square, residual @ residual
            direction = residual + square / before * direction
        return x

    mapped = on(lambda a, b: solved(a, b, "shard"), P("shard"), P())
    return lambda: mapped(*on.cut((a, b), "shard")), torch.linalg.lstsq(a, b[:, None]).solution[:, 0]


@right(shard=2)
def branches_by_the_place_of_a_rank(on: On) -> Made:
    """Without collectives in them, and what they make is declared to differ."""
    x = drawn(82)(ROWS, D)

    def edges(x: Tensor) -> Any:
        if sf.axis_index("shard") == 0:
            x = torch.cat((torch.zeros_like(x[:1]), x[1:]))
        elif sf.axis_index("shard") == sf.axis_size("shard") - 1:
            x = x * 2
        return x, torch.full((1,), sf.axis_index("shard") + 1), torch.arange(2) + 2 * sf.axis_index("shard")

    mapped = on(edges, P("shard"), P("shard"))
    wanted = torch.cat((torch.zeros(1, D, dtype=x.dtype), x[1 : ROWS // 2], 2 * x[ROWS // 2 :]))
    pieces = on.cut((wanted, torch.arange(2) + 1, torch.arange(4)), "shard")
    return lambda: mapped(on.cut(x, "shard")), pieces


@right(shard=2)
def a_mask_by_the_place_of_a_rank_under_a_sum(on: On) -> Made:
    """A value of the first rank for all: the others add zeros."""
    x = drawn(83)(ROWS, D)

    def first(x: Tensor) -> Tensor:
        return sf.psum(x[0] if sf.axis_index("shard") == 0 else torch.zeros_like(x[0]), "shard")

    mapped = on(first, P("shard"), P())
    return lambda: mapped(on.cut(x, "shard")), x[0]


@right(shard=2)
def what_the_first_rank_writes_down(on: On) -> Made:
    params, _, x = mlp_setting(84)
    history: list[float] = []
    text: list[str] = []

    def step(params: Any, x: Tensor) -> Any:
        value, slope = sf.value_and_grad(mlp)(params, x, "shard")
        if sf.axis_index("shard") == 0:
            history.append(value.item())
            text.append(f"{x.mean().item():.3f} {slope['w'].norm()} {x[0]}")
        return value, slope

    mapped = on(step, (P(), P("shard")), P())
    value, slope = plainly(mlp, params, x)

    def run() -> Any:
        found = mapped(params, on.cut(x, "shard"))
        return found, torch.tensor(history[-1:] or [value.item()], dtype=torch.float64)

    return run, ((value, slope), value[None])


@right(shard=2)
def there_and_back_by_numpy(on: On) -> Made:
    x = drawn(85)(ROWS, D)

    def ranks(x: Tensor) -> Any:
        order = np.argsort(x.numpy()[:, 0])
        total = sf.psum(torch.from_numpy(np.square(x.numpy()).sum(0)), "shard")
        return torch.from_numpy(order), torch.from_numpy(x.numpy()[order].copy()), total, torch.tensor(total.tolist())

    mapped = on(ranks, P("shard"), (P("shard"), P("shard"), P(), P()))

    def wanted() -> Any:
        own = on.cut(x, "shard")
        order, total = own[:, 0].argsort(), x.square().sum(0)
        return order, own[order], total, total.float()

    return lambda: mapped(on.cut(x, "shard")), wanted()


@right(shard=2)
def what_is_written_in_place(on: On) -> Made:
    """Buffers that are filled, `out=`, views that are written through, and a counter."""
    w, x = drawn(86)(3, D), drawn(87)(ROWS, 3)

    def step(w: Tensor, x: Tensor, seen: Tensor) -> Any:
        rows = torch.empty(len(x), D, dtype=x.dtype)
        torch.mm(x, w, out=rows)
        rows[:, 0].mul_(2)
        rows.add_(1).relu_()
        total = torch.zeros(D, dtype=x.dtype)
        for row in rows:
            total += row
        total.copy_(sf.psum(total, "shard"))
        seen += sf.axis_size("shard") * len(x)
        return rows, total, seen

    mapped = on(step, (P(), P("shard"), P()), (P("shard"), P(), P()))
    rows = x @ w
    rows[:, 0] *= 2
    rows = (rows + 1).relu()

    def run() -> Any:
        return mapped(w, on.cut(x, "shard"), torch.zeros((), dtype=torch.int64))

    return run, (on.cut(rows, "shard"), rows.sum(0), torch.tensor(ROWS))


@right(shard=2)
def in_place_under_a_gradient(on: On) -> Made:
    params, _, x = mlp_setting(88)

    def loss(p: Any, x: Tensor, data: Any = ()) -> Tensor:
        h = x @ sf.pvary(p["w"], data)
        h += 0.5
        h[:, 0].mul_(2)
        out = torch.zeros(len(x), 2, dtype=x.dtype)
        out[:] = h.tanh_() @ sf.pvary(p["v"], data)
        return sf.psum(out.square_().sum(), data) / ROWS

    step = on(lambda p, x: sf.value_and_grad(loss)(p, x, "shard"), (P(), P("shard")), P())
    return lambda: step(params, on.cut(x, "shard")), sf.value_and_grad(loss)(params, x)


@right(shard=2)
def an_average_of_parameters_by_hand(on: On) -> Made:
    params, average, x = mlp_setting(89)

    def step(params: Any, average: Any, x: Tensor, data: Any = ()) -> Any:
        slope = sf.grad(mlp)(params, x, data)
        params = optree.tree_map(lambda p, g: p - 0.1 * g, params, slope)
        with torch.no_grad():
            for a, p in zip(optree.tree_leaves(average), optree.tree_leaves(params), strict=True):
                a.lerp_(p, 0.1)
        return params, average

    mapped = on(lambda p, a, x: step(p, a, x, "shard"), (P(), P(), P("shard")), P())

    def run(step: Any, x: Tensor) -> Any:
        state = params, optree.tree_map(torch.clone, average)
        for _ in range(3):
            state = step(*state, x)
        return state

    return lambda: run(mapped, on.cut(x, "shard")), run(step, x)


@right(shard=2)
def constants_and_closures(on: On) -> Made:
    """Tensors that all ranks have alike, made outside and in the body, and zeros that come in."""
    params, _, x = mlp_setting(90)
    scale, table = torch.tensor(2.0, dtype=torch.float64), torch.arange(8, dtype=torch.float64).view(ROWS, 1)

    def step(params: Any, carried: Tensor, x: Tensor) -> Any:
        eye = torch.eye(3, dtype=x.dtype)
        value = mlp(params, (x @ eye) * scale, "shard")
        carried = carried + x.sum(0) * 0.5
        penalty = (params["w"] * scale).square().sum() + torch.ones(2, dtype=x.dtype).sum()
        return value + penalty, carried, table * scale, torch.zeros(3), sf.psum(torch.ones(()), "shard")

    mapped = on(step, (P(), P("shard"), P("shard")), (P(), P("shard"), P(), P(), P()))
    value = mlp(params, 2 * x) + (2 * params["w"]).square().sum() + 2
    carried = torch.cat([rows.sum(0) * 0.5 for rows in x.chunk(2)])

    def run() -> Any:
        return mapped(params, torch.zeros(3, dtype=x.dtype), on.cut(x, "shard"))

    return run, (value, on.cut(carried, "shard"), table * 2, torch.zeros(3), torch.tensor(2.0))


@right(shard=2)
def positions_and_masks_that_are_cut_and_equal(on: On) -> Made:
    """Besides the rows, each rank is given the same positions and the same mask; and a bias of zeros."""
    w, x = tensors(91, (D, D), (ROWS, 5, D))
    positions, mask = torch.arange(5).repeat(ROWS, 1), torch.ones(ROWS, 5, dtype=torch.bool).tril()
    bias = torch.zeros(ROWS, D, dtype=x.dtype)

    def loss(w: Tensor, x: Tensor, positions: Tensor, mask: Tensor, bias: Tensor, data: Any = ()) -> Tensor:
        h = (x + positions[..., None] / 5 + bias[:, None]) @ sf.pvary(w, data)
        return sf.psum((h.square().sum(-1) * mask).sum(), data) / sf.psum(mask.sum(), data)

    rows = x, positions, torch.cat((mask[:4], mask[:4])), bias
    step = on(lambda *args: sf.value_and_grad(loss)(*args, "shard"), (P(), *[P("shard")] * 4), P())
    return lambda: step(w, *on.cut(rows, "shard")), plainly(loss, w, *rows)


@right(shard=2)
def rows_that_are_all_zero(on: On) -> Made:
    """A first call on nothing: zeros as data and as parameters."""
    params = {"w": torch.zeros(3, D, dtype=torch.float64), "v": torch.zeros(D, 2, dtype=torch.float64)}
    x = torch.zeros(ROWS, 3, dtype=torch.float64)
    step = on(lambda p, x: sf.value_and_grad(mlp)(p, x, "shard"), (P(), P("shard")), P())
    return lambda: step(params, on.cut(x, "shard")), plainly(mlp, params, x)


@right(shard=2)
def arithmetic_on_places_and_sizes(on: On) -> Made:
    x = drawn(92)(ROWS, D)

    def scaled(x: Tensor) -> Any:
        index, size = sf.axis_index("shard"), sf.axis_size("shard")
        places = torch.arange(len(x)) + index * len(x)
        return x * (index + 1) / size, places, x.new_full((1,), index / size), torch.tensor(size * len(x))

    mapped = on(scaled, P("shard"), (P("shard"), P("shard"), P("shard"), P()))
    weights = torch.tensor([0.5] * 4 + [1.0] * 4, dtype=x.dtype)[:, None]
    own = on.cut((x * weights, torch.arange(ROWS), torch.tensor([0, 0.5], dtype=x.dtype)), "shard")
    return lambda: mapped(on.cut(x, "shard")), (*own, torch.tensor(ROWS))


@right(replica=2, shard=2)
def generators_for_some_axes(on: On) -> Made:
    x = drawn(93)(ROWS, D)

    def noisy(x: Tensor) -> Any:
        def noise(*what: Any) -> Tensor:
            return torch.rand(x.shape, generator=sf.fold_in(5, *what), dtype=x.dtype)

        return x + noise(1)[:1], noise(2), sf.all_gather(noise(3, "shard"), "shard", to="invariant"), noise(4, DATA)

    mapped = on(noisy, P("shard"), (P("shard"), P(), P(), P(DATA)))

    def rand(rows: int, *parts: Any) -> Tensor:
        return torch.rand(rows, D, generator=torch.Generator().manual_seed(mixed(5, *parts)), dtype=x.dtype)

    rank = on.index("replica") * 2 + on.index("shard")
    half = ROWS // 2
    own = on.cut(x, "shard") + rand(half, 1)[:1]
    every = torch.cat([rand(half, 3, f"shard={i}") for i in range(2)])
    return lambda: mapped(on.cut(x, "shard")), (own, rand(half, 2), every, rand(half, 4, f"{DATA}={rank}"))


@right(data=2)
def draws_from_distributions(on: On) -> Made:
    """Of one for all ranks by one generator, and of each rank's own by its own."""
    draw = drawn(31)
    rate, rates = draw(3).exp(), draw(ROWS, 3).exp()

    def f(rate: Tensor, rates: Tensor) -> Any:
        own = torch.poisson(rates, generator=sf.fold_in(5, 1, "data"))
        return torch.poisson(rate, generator=sf.fold_in(5, 1)), own

    everywhere = torch.poisson(rate, generator=torch.Generator().manual_seed(mixed(5, 1)))
    by_rank = [torch.poisson(x, generator=folded(5, 1, i)) for i, x in enumerate(rates.chunk(2))]
    mapped = on(f, (P(), P("data")), (P(), P("data")))
    return lambda: mapped(rate, on.cut(rates, "data")), (everywhere, by_rank[on.index("data")])


@right("processes", shard=2)
def dropout_by_torchs_generator_under_a_sum(on: On) -> Made:
    """Each rank drops by its own numbers: what depends on them is summed or says that it differs."""
    params, _, x = mlp_setting(94)

    def loss(p: Any, x: Tensor) -> Tensor:
        return mlp(p, F.dropout(x, 0.5), "shard")

    step = on(lambda p, x: sf.value_and_grad(loss)(p, x), (P(), P("shard")), P())

    def run() -> Any:
        torch.manual_seed(on.index("shard"))
        return step(params, on.cut(x, "shard"))

    kept = []
    for i, rows in enumerate(x.chunk(2)):
        torch.manual_seed(i)
        kept.append(F.dropout(rows, 0.5))
    return run, plainly(mlp, params, torch.cat(kept))
