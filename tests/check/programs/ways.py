"""More ways to train: tied and divided, taught and attacked, by hooks, by modules of torch."""

from __future__ import annotations

from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

import shardfn as sf
import shardfn.optim as so
from shardfn import P, parallel
from tests.check.programs.setting import DATA, ROWS, D, Made, On, mlp, mlp_setting, plainly, right, tokens_of
from tests.models import drawn, tensors


@right("processes", shard=2)
def tied_parameters_and_a_norm_by_hand(on: On) -> Made:
    """One matrix in two stages, and means over features in a loss that is a sum over rows."""
    draw = drawn(120)
    whole, tokens = {"table": {"w": draw(11, D)}, "norm": {"g": 1 + draw(D), "b": draw(D)}}, tokens_of(120)

    def normed(p: Any, x: Tensor) -> Tensor:
        away = x - x.mean(-1, keepdim=True)
        return away / (away.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["g"] + p["b"]

    def loss(params: Any, tokens: Tensor) -> Tensor:
        x = sf.stage(lambda p, t: p["w"][t])(params["table"], tokens[:, :-1])
        x = sf.stage(normed)(params["norm"], x)
        logits = sf.stage(lambda p, x: x @ p["w"].T)(params["table"], x)
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return each.view(-1, 4).mean(1).sum() / ROWS

    def step(params: Any, tokens: Tensor, data: Any = ()) -> Any:
        value, gradient = sf.value_and_grad(loss)(params, tokens)
        return sf.psum(value, data), gradient, so.global_norm(gradient)

    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))
    mapped = on(lambda p, t: step(p, t, "shard"), (..., P("shard")), (P(), ..., P()))

    def run() -> Any:
        value, gradient, norm = mapped(flat, on.cut(tokens, "shard"))
        return value, sf.unshard(gradient), norm

    return run, step(whole, tokens)


@right(shard=2)
def a_local_mean_over_the_number_of_ranks(on: On) -> Made:
    draw = drawn(121)
    whole, x = {"block": {"w": draw(3, D)}}, draw(ROWS, 3)
    layer = sf.stage(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(params: Any, x: Tensor, data: Any = ()) -> Tensor:
        return layer(params["block"], x).square().mean() / sf.axis_size(data)

    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))
    step = on(lambda p, x: sf.grad(loss)(p, x, "shard"), (..., P("shard")), ...)
    return lambda: sf.unshard(step(flat, on.cut(x, "shard"))), plainly(loss, whole, x)[1]


@right(shard=2)
def gradients_of_local_means_divided_afterwards(on: On) -> Made:
    draw = drawn(122)
    whole, x = {"block": {"w": draw(3, D)}}, draw(ROWS, 3)
    layer = sf.stage(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(params: Any, x: Tensor) -> Tensor:
        return layer(params["block"], x).square().mean()

    def step(params: Any, x: Tensor, data: Any = ()) -> Any:
        value, gradient = sf.value_and_grad(loss)(params, x)
        return sf.pmean(value, data), optree.tree_map(lambda g: g / sf.axis_size(data), gradient)

    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))
    mapped = on(lambda p, x: step(p, x, "shard"), (..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = mapped(flat, on.cut(x, "shard"))
        return value, sf.unshard(gradient)

    return run, step(whole, x)


@right("processes", replica=2, shard=2)
def training_in_two_levels_by_hand(on: On) -> Made:
    """Pieces over `shard`, gathered; gradients scattered over it, and then summed over `replica`."""
    w, x = tensors(123, (D, 3), (ROWS, D))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w).square().sum() / ROWS

    def step(piece: Tensor, x: Tensor) -> Any:
        slope = sf.grad(loss)(sf.all_gather(piece, "shard"), x)
        return piece - 0.1 * sf.psum(sf.reduce_scatter(slope, "shard"), "replica")

    mapped = on(step, (P("shard"), P(DATA)), P("shard"))
    wanted = w - 0.1 * plainly(loss, w, x)[1]
    return lambda: mapped(on.cut(w, "shard"), on.cut(x, DATA)), on.cut(wanted, "shard")


@right(shard=2)
def a_teacher_that_is_not_trained(on: On) -> Made:
    """Parameters that all ranks have meet rows without pvary: nothing is differentiated by them."""
    teacher, student, x = tensors(124, (3, D), (3, D), (ROWS, 3))

    def loss(student: Tensor, teacher: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        with torch.no_grad():
            aim = (x @ teacher).softmax(1)
        found = (x @ sf.pvary(student, data)).log_softmax(1)
        return sf.psum(F.kl_div(found, aim, reduction="sum"), data) / ROWS

    step = on(lambda *args: sf.value_and_grad(loss)(*args, "shard"), (P(), P(), P("shard")), P())
    return lambda: step(student, teacher, on.cut(x, "shard")), plainly(loss, student, teacher, x)


@right(shard=2)
def gradients_by_rows(on: On) -> Made:
    """Adversarial rows: of the data, which differ, and not of the parameters, which do not."""
    params, _, x = mlp_setting(125)

    def attacked(params: Any, x: Tensor, data: Any = ()) -> Any:
        slope = grad(lambda x: mlp(params, x))(x)
        worse = x + 0.1 * slope.sign()
        return worse, sf.value_and_grad(mlp)(params, worse, data)

    mapped = on(lambda p, x: attacked(p, x, "shard"), (P(), P("shard")), (P("shard"), P()))
    worse, found = attacked(params, x)
    return lambda: mapped(params, on.cut(x, "shard")), (on.cut(worse, "shard"), found)


@right(shard=2)
def two_players(on: On) -> Made:
    """A generator and a discriminator, each with a gradient of its own."""
    g, d, x, z = tensors(126, (2, 3), (3, 1), (ROWS, 3), (ROWS, 2))

    def of_d(d: Tensor, g: Tensor, x: Tensor, z: Tensor, data: Any = ()) -> Tensor:
        fake = (z @ g).detach()
        scores = F.softplus(-(x @ sf.pvary(d, data))) + F.softplus(fake @ sf.pvary(d, data))
        return sf.psum(scores.sum(), data) / ROWS

    def of_g(g: Tensor, d: Tensor, z: Tensor, data: Any = ()) -> Tensor:
        return sf.psum(F.softplus(-(z @ sf.pvary(g, data) @ d)).sum(), data) / ROWS

    def step(g: Tensor, d: Tensor, x: Tensor, z: Tensor, data: Any = ()) -> Any:
        d = d - 0.1 * sf.grad(of_d)(d, g, x, z, data)
        return g - 0.1 * sf.grad(of_g)(g, d, z, data), d

    mapped = on(lambda g, d, x, z: step(g, d, x, z, "shard"), (P(), P(), P("shard"), P("shard")), P())
    return lambda: mapped(g, d, *on.cut((x, z), "shard")), step(g, d, x, z)


@right(shard=2)
def hooks_that_add_up_gradients(on: On) -> Made:
    """As DDP does it: a hook for each parameter, and `.grad`."""
    params, _, x = mlp_setting(127)

    def step(params: Any, x: Tensor) -> Any:
        leaves = optree.tree_map(lambda p: p.detach().clone().requires_grad_(), params)
        for leaf in optree.tree_leaves(leaves):
            leaf.register_hook(lambda g: sf.psum(g, "shard"))
        mlp(leaves, x).backward()
        return optree.tree_map(lambda leaf: leaf.grad, leaves)

    mapped = on(step, (P(), P("shard")), P())
    return lambda: mapped(params, on.cut(x, "shard")), plainly(mlp, params, x)[1]


@right(shard=2)
def a_module_and_an_optimizer_of_torch(on: On) -> Made:
    """`backward` of the local part, `.grad` summed in its place, and a step of torch's SGD."""
    x = drawn(128)(ROWS, 3)

    def trained(step: Any, rows: Tensor) -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(3, D), torch.nn.GELU(), torch.nn.Linear(D, 2)).double()
        draw = drawn(129)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(draw(*p.shape))
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        values = [step(net, optimizer, rows).clone() for _ in range(3)]
        return values, {name: p.detach().clone() for name, p in net.named_parameters()}

    def step(net: Any, optimizer: Any, x: Tensor, data: Any = ()) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().sum() / ROWS
        loss.backward()
        for p in net.parameters():
            p.grad = sf.psum(p.grad, data)
        optimizer.step()
        return sf.psum(loss.detach(), data)

    mapped = on(lambda net, opt, x: step(net, opt, x, "shard"), (P(), P(), P("shard")), P())
    return lambda: trained(mapped, on.cut(x, "shard")), trained(step, x)


@right("processes", shard=2)
def a_module_called_with_parameters(on: On) -> Made:
    """An encoder of torch in stages, by `functional_call`, and with parameters that all ranks have."""

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)

    net, x = made().requires_grad_(False), drawn(130)(ROWS, 5, D)
    whole = {"layer": {name: p.detach() for name, p in made().named_parameters()}}
    layer = sf.stage(lambda p, x: torch.func.functional_call(net, p, (x,)))

    def loss(params: Any, x: Tensor, data: Any = ()) -> Tensor:
        return sf.psum(layer(params["layer"], x).exp().sum(), data) / ROWS

    def by_pvary(params: Any, x: Tensor, data: Any = ()) -> Tensor:
        return loss(sf.pvary(params, data), x, data)

    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))
    step = on(
        lambda p, q, x: (sf.grad(loss)(p, x, "shard"), sf.grad(by_pvary)(q, x, "shard")),
        (..., P(), P("shard")),
        (..., P()),
    )

    def run() -> Any:
        sharded, replicated = step(flat, whole, on.cut(x, "shard"))
        return sf.unshard(sharded), replicated

    return run, (plainly(loss, whole, x)[1],) * 2


@right(tensor=2)
def norms_of_groups_and_of_batches_that_all_ranks_have(on: On) -> Made:
    """Statistics of activations that are the same along `tensor`, between layers that are cut over it."""
    w, x = tensors(131, (D, 6), (ROWS, D))

    def loss(w: Tensor, x: Tensor, t: Any = ()) -> Tensor:
        h = F.batch_norm(F.group_norm(x, 2), None, None, training=True)
        return sf.psum(torch.tanh(sf.pvary(h, t) @ w).sum(1), t).square().mean()

    step = on(lambda *args: sf.value_and_grad(loss, (0, 1))(*args, "tensor"), (P(None, "tensor"), P()),
              (P(), (P(None, "tensor"), P())))  # fmt: skip
    value, (a, b) = plainly(loss, w, x, argnums=(0, 1))
    return lambda: step(on.cut(w, None, "tensor"), x), (value, (on.cut(a, None, "tensor"), b))


@right(data=2)
def norms_of_rows_and_of_groups(on: On) -> Made:
    w, x = tensors(132, (6, D), (ROWS, 3, 6))

    def loss(w: Tensor, x: Tensor, data: Any = ()) -> Tensor:
        h = F.instance_norm(F.layer_norm(F.group_norm(x, 3, eps=0.1), (6,), eps=0.1), eps=0.1)
        return sf.psum((h @ sf.pvary(w, data)).square().mean((1, 2)).sum(), data) / ROWS

    step = on(lambda *args: sf.value_and_grad(loss)(*args, "data"), (P(), P("data")), P())
    return lambda: step(w, on.cut(x, "data")), plainly(loss, w, x)


@right("processes", shard=2)
def a_loss_that_is_scaled(on: On) -> Made:
    draw = drawn(134)
    whole, x = {"block": {"w": draw(3, D)}}, draw(ROWS, 3)
    layer = sf.stage(lambda p, x: torch.tanh(x @ p["w"]))
    opt = so.dynamic_loss_scale(so.sgd(0.1), scale=2.0**10)

    def step(params: Any, state: Any, x: Tensor, data: Any = ()) -> Any:
        def loss(params: Any) -> Tensor:
            return sf.psum(layer(params["block"], x).square().sum(), data) / ROWS * state["scale"]

        value, gradient = sf.value_and_grad(loss)(params)
        return *opt.step(params, gradient, state), value / state["scale"]

    def trained(step: Any, params: Any, x: Tensor) -> Any:
        params, state, value = step(params, opt.init(params), x)
        return params, value, float(state["scale"])

    mapped = on(lambda p, s, x: step(p, s, x, "shard"), (..., ..., P("shard")), (..., ..., P()))

    def run() -> Any:
        params, *told = trained(mapped, sf.shard(whole, on.mesh, sf.full_shard("shard")), on.cut(x, "shard"))
        return sf.unshard(params), *told

    return run, trained(step, optree.tree_map(torch.clone, whole), x)


@right("processes", shard=2)
def collectives_of_torch_in_the_body(on: On) -> Made:
    """Raw ones, on a tensor that nobody differentiates, in a program that is half ported."""
    params, _, x = mlp_setting(135)

    def step(params: Any, x: Tensor) -> Any:
        slope = sf.grad(mlp)(params, x)
        for g in optree.tree_leaves(slope):
            dist.all_reduce(g, group=on.mesh.get_group("shard"))
        return slope

    mapped = on(step, (P(), P("shard")), P())
    return lambda: mapped(params, on.cut(x, "shard")), plainly(mlp, params, x)[1]


@right("processes", shard=2)
def a_penalty_on_the_norm_of_all_parameters(on: On) -> Made:
    """A number that all ranks have, of elements that each has some of, beside the loss of all rows."""
    draw = drawn(150)
    whole, x = {"block": {"w": draw(3, D), "b": draw(D)}}, draw(ROWS, 3)
    layer = sf.stage(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))

    def loss(params: Any, x: Tensor, data: Any = ()) -> Tensor:
        rows = sf.psum(layer(params["block"], x).square().sum(), data) / ROWS
        return rows + 0.1 * so.global_norm(params) ** 2 + 0.1 * so.vdot(params, params)

    flat = sf.shard(whole, on.mesh, sf.full_shard("shard"))
    step = on(lambda p, x: sf.value_and_grad(loss)(p, x, "shard"), (..., P("shard")), (P(), ...))

    def run() -> Any:
        value, gradient = step(flat, on.cut(x, "shard"))
        return value, sf.unshard(gradient)

    def plain(params: Any) -> Tensor:
        squares = torch.stack([p.square().sum() for p in optree.tree_leaves(params)]).sum()
        return torch.tanh(x @ params["block"]["w"] + params["block"]["b"]).square().sum() / ROWS + 0.2 * squares

    return run, plainly(plain, whole)


@right(shard=2)
def gradients_added_up_over_parts_of_a_batch(on: On) -> Made:
    """By a loop, with a count that was read, and figures that are means of as many rows."""
    draw = drawn(151)
    params, x, y = {"w": draw(3, 2)}, draw(ROWS, 3), torch.arange(ROWS) % 2

    def total(p: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ p["w"], y, reduction="sum", label_smoothing=0.1)

    def step(p: Any, x: Tensor, y: Tensor, data: Any = ()) -> Any:
        count = int(sf.psum(torch.tensor(len(y)), data).item())
        grads = optree.tree_map(torch.zeros_like, p)
        for some, aims in zip(x.chunk(2), y.chunk(2), strict=True):
            more = sf.grad(total)(p, some, aims)
            grads = optree.tree_map(lambda a, b: a + b / count, grads, more)
        hits = ((x @ p["w"]).argmax(1) == y).double()
        return sf.psum(grads, data), sf.pmean(hits.mean(), data)

    mapped = on(lambda p, x, y: step(p, x, y, "shard"), (P(), P("shard"), P("shard")), P())
    return lambda: mapped(params, *on.cut((x, y), "shard")), step(params, x, y)


@right("processes", tensor=2)
def tokens_that_all_ranks_draw_alike(on: On) -> Made:
    """Generation: logits gathered over the vocabulary, and a draw from one generator on all ranks, a few times."""
    draw = drawn(152)
    table, start = draw(12, D), torch.arange(3)

    def generated(table: Tensor, tokens: Tensor, t: Any = ()) -> Tensor:
        with torch.no_grad():
            for step in range(4):
                x = parallel.embedding(tokens, table, t).mean(0, keepdim=True)
                logits = sf.all_gather(x @ table.T, t, dim=1, to="invariant")
                best = logits.topk(5).indices
                shares = logits.gather(1, best).softmax(1)
                one = torch.multinomial(shares, 1, generator=sf.fold_in(9, step))
                tokens = torch.cat((tokens, best.gather(1, one)[0]))
        return tokens

    mapped = on(lambda table, tokens: generated(table, tokens, "tensor"), (P("tensor"), P()), P())
    return lambda: mapped(on.cut(table, "tensor"), start), generated(table, start)
